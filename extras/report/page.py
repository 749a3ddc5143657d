"""The report as text: one HTML page without scripts or files beside it, and the same tables as Markdown.

The templates beside this file hold the layout and most words: page.html.j2 with page.css, chart.svg.j2 with chart.css, origin.j2
and report.md.j2. picture.svg.j2 makes a file of one chart.
"""

from __future__ import annotations

import base64
import functools
import html
import io
import re
from pathlib import Path

import jinja2
from PIL import Image

from common.files import markdown_table
from extras.report.charts import ChartGroup, draw_curves, draw_sweeps, short
from extras.report.experiments import Experiment
from extras.report.runs import machine_of
from extras.report.tables import equal_table, figures_table, results_table, speedup_table

# Larger grids are embedded smaller, as JPEG.
MAX_IMAGE_BYTES = 250_000
MAX_IMAGE_PIXELS = 900


def render_report(
    marker: str, title: str, subtitle: str, tables: dict[str, list[Experiment]], problems: dict[str, list[str]]
) -> list[str]:
    """The page and the Markdown file."""
    sections = []
    for i, (name, experiments) in enumerate(tables.items()):
        section = {"identifier": f"t{i}", "title": name, "experiments": experiments, "figures": figures_table(experiments)}
        section["comparisons"] = [t for make in (results_table, speedup_table, equal_table) if (t := make(experiments))]
        section["charts"] = chart_groups(f"t{i}", experiments)
        sections.append(section)
    context = {"marker": marker, "title": title, "subtitle": subtitle, "sections": sections}
    context["problems"] = {path: "; ".join(reasons) for path, reasons in problems.items()}
    return [load_templates().get_template(name).render(context) for name in ("page.html.j2", "report.md.j2")]


def render_charts(marker: str, tables: dict[str, list[Experiment]]) -> dict[str, str]:
    """Each chart of the page as an SVG file of its own, with its legend, by the name of the file."""
    template, files = load_templates().get_template("picture.svg.j2"), {}
    for name, experiments in tables.items():
        for group in chart_groups("t", experiments):
            for chart in group.charts:
                words = f"{name} {chart.title}".lower()
                file = re.sub(r"[^a-z0-9_.]+", "-", words).strip("-") + ".svg"
                files[file] = template.render(marker=marker, legend=group.legend, chart=chart)
    return files


def chart_groups(identifier: str, experiments: list[Experiment]) -> list[ChartGroup]:
    """The curves, then the sweeps, as far as there are any."""
    groups = [draw_curves(identifier, experiments), *draw_sweeps(identifier, experiments)]
    return [group for group in groups if group.charts]


@functools.cache
def load_templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(["html.j2", "svg.j2"]),  # names, settings and commands come from files of others
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # Markdown passes HTML on.
    environment.filters["plain"] = plain = functools.partial(html.escape, quote=False)
    environment.globals["markdown_table"] = lambda table: markdown_table(
        [plain(cell) for cell in table.columns], [[plain(cell) for cell in row] for row in table.rows]
    )
    environment.globals |= {"machine_of": machine_of, "embed_image": embed_image, "short": short}
    return environment


def embed_image(file: Path) -> str:
    """A data URL. Large images are reduced."""
    data, kind = file.read_bytes(), "png"
    if len(data) > MAX_IMAGE_BYTES:
        with Image.open(io.BytesIO(data)) as image:
            image = image.convert("RGB")
        image.thumbnail((MAX_IMAGE_PIXELS, 4 * MAX_IMAGE_PIXELS))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=82)
        data, kind = buffer.getvalue(), "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
