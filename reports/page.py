"""The report as text: one HTML page without scripts or files beside it, and the same tables as Markdown.

The templates beside this file hold the layout and most words: page.html.j2 with page.css and chart.svg.j2, report.md.j2, and
origin.j2 for both.
"""

from __future__ import annotations

import base64
import functools
import html
import io
from pathlib import Path

import jinja2
from PIL import Image

from files import markdown_table
from reports.charts import draw_curves, draw_sweeps, short
from reports.experiments import Experiment
from reports.runs import machine_of
from reports.tables import equal_table, figures_table, results_table, speedup_table

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
        groups = [draw_curves(f"t{i}", experiments), *draw_sweeps(f"t{i}", experiments)]
        section["charts"] = [group for group in groups if group.charts]
        sections.append(section)
    context = {"marker": marker, "title": title, "subtitle": subtitle, "sections": sections}
    context["problems"] = {path: "; ".join(reasons) for path, reasons in problems.items()}
    return [load_templates().get_template(name).render(context) for name in ("page.html.j2", "report.md.j2")]


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
    environment.globals["markdown_table"] = lambda table: markdown_table(table.columns, table.rows, plain)
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
