"""The report as one HTML file: no script, no network, nothing beside it. page.html.j2 is its text, page.css its style."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup, escape
from PIL import Image

from reports.charts import curves, sweeps
from reports.experiments import Experiment
from reports.tables import (
    about_lines,
    equal_table,
    figures_table,
    is_command,
    origin_lines,
    problems_table,
    results_table,
    speedup_table,
)

# Larger grids are embedded smaller, as JPEG.
MAX_IMAGE_BYTES = 250_000
MAX_IMAGE_PIXELS = 900


def html_report(
    marker: str, title: str, subtitle: str, tables: dict[str, list[Experiment]], problems: dict[str, list[str]]
) -> str:
    return load_template().render(
        marker=marker,
        title=title,
        subtitle=subtitle,
        sections=[describe_section(f"t{i}", name, experiments) for i, (name, experiments) in enumerate(tables.items())],
        problems=problems_table(problems) if problems else None,
    )


@functools.cache
def load_template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names, settings and commands come from files of others
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"breakable": breakable, "tenths": "{:.1f}".format}
    environment.tests["command"] = is_command
    return environment.get_template("page.html.j2")


def breakable(text: str) -> Markup:
    """Long names may break after a slash or an underscore."""
    return Markup(escape(text).replace("/", Markup("/<wbr>")).replace("_", Markup("_<wbr>")))


def describe_section(identifier: str, title: str, experiments: Sequence[Experiment]) -> dict:
    """One of the paper's tables, or the runs that belong to none, as the template shows it."""
    comparisons = [make(experiments) for make in (results_table, speedup_table, equal_table)]
    charts = [curves(identifier, experiments), *sweeps(identifier, experiments)]
    origins = [
        {
            "label": experiment.label,
            "about_lines": about_lines(experiment),
            "runs": [(run.name, origin_lines(run)) for run in experiment.runs],
        }
        for experiment in experiments
    ]
    return {
        "identifier": identifier,
        "title": title,
        "comparisons": [table for table in comparisons if table],
        "charts": [group for group in charts if group.charts],
        "grids": [describe_grid(experiment) for experiment in experiments if experiment.runs[0].grid],
        "figures": figures_table(experiments),
        "experiments": origins,
    }


def describe_grid(experiment: Experiment) -> dict:
    """The last grid of the first run."""
    run = experiment.runs[0]
    step, file = run.grid
    scale = run.config.get("guidance.cfg_scale")
    caption = f"{experiment.label}, step {step:,}" + ("" if scale is None else f", cfg {scale}")
    return {"run": run.name, "step": step, "caption": caption, "source": embed_image(file)}


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
