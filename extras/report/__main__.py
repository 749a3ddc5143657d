"""The report: what runs measured, beside the paper's figures, as one HTML page.

    python -m extras.report runs/                              # writes runs/report.html
    python -m extras.report runs/ more_runs/ output=table2.html

It reads config.yaml, metrics.jsonl, starts.jsonl, the sample grids and the results of fid.py of every run below the folders, and
changes none of them. The page links to the grids where they lie; all else is in it.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import jinja2

from common.errors import UserError
from common.files import write_file
from configs import command_line as cli
from extras.report.charts import draw_curves
from extras.report.experiments import Experiment, change_words, group
from extras.report.runs import read_runs
from extras.report.tables import figures_table, machine_of, results_table, speedup_table

USAGE = "use python -m extras.report <folders of runs> [output=<file>.html]"


def main(arguments: Sequence[str]) -> None:
    folders = [Path(argument) for argument in arguments if not argument.startswith("output=")]
    outputs = [Path(argument.removeprefix("output=")) for argument in arguments if argument.startswith("output=")]
    if wrong := [one for one in folders if not one.is_dir()] + [one for one in outputs if one.suffix != ".html"]:
        raise UserError(f"{wrong[0]} is not accepted; {USAGE}")
    runs, problems = read_runs(folders)
    left_out = "".join(f"\nleft out: {file}: {why}" for file, why in problems.items())
    if not runs:
        raise UserError(f"no runs in {' '.join(arguments) or 'no folder'}; {USAGE}{left_out}")
    page = [folders[0] / "report.html", *outputs][-1]
    write_file(page, render(page, group(runs), problems))
    sys.stdout.write(f"{len(runs)} runs in {page}{left_out}\n")


def render(page: Path, tables: dict[str, list[Experiment]], problems: dict[str, str]) -> str:
    """The page as HTML.

    Args:
        page: where it will be, for links.
        problems: what could not be read, by file.
    """
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    sections = []
    for name, experiments in tables.items():
        chart = base64.b64encode(draw_curves(experiments).encode()).decode()
        shown = [table for make in (results_table, speedup_table, figures_table) if (table := make(experiments)).rows]
        sections.append({"name": name, "experiments": experiments, "tables": shown, "chart": chart})
    return environment.get_template("page.html.j2").render(
        sections=sections,
        problems=problems,
        time=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        change_words=change_words,
        machine_of=machine_of,
        link=lambda file: os.path.relpath(file, page.resolve().parent),
    )


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
