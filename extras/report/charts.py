"""The curves of a table: figures and training loss against steps, images and hours of training."""

from __future__ import annotations

import io
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure as Canvas

from extras.report.experiments import Experiment, curve_measure
from extras.report.runs import LOSS, Measure

MAX_POINTS = 200  # of a line; the page would be too large with all
LOG_FROM = 8  # ratio of the largest to the smallest value from which the vertical axis is logarithmic


def draw_curves(experiments: Sequence[Experiment]) -> str:
    """All metrics of the leading figure's evaluations, and the loss, as an SVG image.

    Lines are means over seeds, bands reach from the lowest seed to the highest, and dense runs are dashed.
    """
    leading = curve_measure(experiments)
    measures = dict.fromkeys(measure for one in experiments for measure in one.measures())
    rows = [*(measure for measure in measures if measure[1:] == leading[1:]), LOSS]
    canvas = Canvas((13, 3.4 * len(rows) + 0.25 * len(experiments)), layout="constrained")
    colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(experiments)))
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
    line, marker = "-" if one.is_routed else "--", None if measure == LOSS else "."
    for axis, x in zip(axes, (steps, steps * one.identity["train.batch_size"], hours)):
        axis.plot(x, values[:, 0], color=colour, linestyle=line, marker=marker, label=one.label)
        if len(one.furthest(measure)) > 1:
            axis.fill_between(x, values[:, 1], values[:, 2], color=colour, alpha=0.15, linewidth=0)
