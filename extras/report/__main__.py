"""The report: what runs measured, beside the paper's figures, as one HTML page.

    python -m extras.report runs/                              # writes runs/report.html
    python -m extras.report runs/ more_runs/ output=table2.html

It reads config.yaml, metrics.jsonl, starts.jsonl, the sample grids and the results of fid.py of every run below the folders, and
changes none of them. The page links to the grids where they lie; all else is in it.
"""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import jinja2
import matplotlib
import numpy as np
from matplotlib.figure import Figure as Canvas

from common.errors import UserError
from common.files import write_file
from configs import command_line as cli
from extras.report.experiments import Experiment, change_words, curve_measure, drop_copies, group
from extras.report.runs import LOSS, Measure, read_runs
from extras.report.tables import figures_table, machine_of, results_table, speedup_table

USAGE = "use python -m extras.report <folders of runs> [output=<file>.html]"
MAX_POINTS = 200  # of a line; the page would be too large with all
LOG_FROM = 8  # ratio of the largest to the smallest value from which the vertical axis is logarithmic


def main(arguments: Sequence[str]) -> None:
    if cli.HELP & {*arguments}:
        sys.stdout.write(__doc__)
        return
    folders = [Path(argument) for argument in arguments if not argument.startswith("output=")]
    outputs = [Path(argument.removeprefix("output=")) for argument in arguments if argument.startswith("output=")]
    if wrong := [one for one in folders if not one.is_dir()] + [one for one in outputs if one.suffix != ".html"]:
        raise UserError(f"{wrong[0]} is not accepted; {USAGE}")
    runs, problems = read_runs(folders)
    runs, copies = drop_copies(runs)
    problems |= copies
    left_out = "".join(f"\nleft out: {file}: {why}" for file, why in problems.items())
    if not runs:
        raise UserError(f"no runs in {' '.join(arguments) or 'no folder'}; {USAGE}{left_out}")
    page = [folders[0] / "report.html", *outputs][-1]
    write_file(page, render(page, group(runs), problems))
    sys.stdout.write(f"{len(runs)} runs in {page}{left_out}\n")


def render(page: Path, tables: dict[str, list[Experiment]], problems: dict[str, str]) -> str:
    """The page as HTML; `page` is where it will be, for links, and `problems` are what could not be read, by file."""
    how = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, **how)
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


def draw_curves(experiments: Sequence[Experiment]) -> str:
    """All metrics of the leading figure's evaluations, and the loss, as an SVG image.

    Lines are means over seeds, bands reach from the lowest seed to the highest, and dense runs are dashed.
    """
    leading = curve_measure(experiments)
    measures = dict.fromkeys(measure for one in experiments for measure in one.measures())
    rows = [*(measure for measure in measures if measure[1:] == leading[1:]), LOSS]
    rows = [measure for measure in rows if any(len(one.curve(measure)) > 1 for one in experiments)] or [LOSS]
    canvas = Canvas((13, 3.4 * len(rows) + 0.25 * len(experiments)), layout="constrained")
    colours = [matplotlib.colormaps["tab10" if len(experiments) <= 10 else "tab20"](i % 20) for i in range(len(experiments))]
    for axes, measure in zip(canvas.subplots(len(rows), 3, squeeze=False, sharey="row"), rows):
        for one, colour in zip(experiments, colours):
            draw_line(axes, one, measure, colour)
        low, high = axes[0].dataLim.intervaly
        if 0 < LOG_FROM * low < high:
            axes[0].set_yscale("log")
        axes[0].set_ylabel(measure.metric if measure == LOSS else measure.in_words())
        for axis, words in zip(axes, ("steps", "images seen", "hours of training")):
            axis.set_xlabel(words)
            axis.grid(alpha=0.3)
            axis.locator_params(axis="x", nbins=6)
    canvas.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left")
    image = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        canvas.savefig(image, format="svg")
    return image.getvalue()


def draw_line(axes: Sequence[matplotlib.axes.Axes], one: Experiment, measure: Measure, colour: np.ndarray) -> None:
    """An experiment's curve on the axes of steps, images and hours."""
    curve = one.curve(measure)
    curve = curve[:: len(curve) // MAX_POINTS + 1]
    steps = np.array([figure.step for figure in curve])
    hours = [one.hours_at(step, measure) for step in steps]
    values = np.array([[figure.mean, min(figure.values), max(figure.values)] for figure in curve]).reshape(-1, 3)
    line, marker = "-" if one.is_routed else "--", None if measure == LOSS and len(curve) > 1 else "."
    label = one.label.replace("$", r"\$")  # not the start of a formula
    label = f" {label}" if label.startswith("_") else label  # matplotlib would leave it out of the legend
    for axis, x in zip(axes, (steps, steps * one.identity["train.batch_size"], hours)):
        axis.plot(x, values[:, 0], color=colour, linestyle=line, marker=marker, label=label)
        if len(one.furthest(measure)) > 1:
            axis.fill_between(x, values[:, 1], values[:, 2], color=colour, alpha=0.15, linewidth=0)


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
