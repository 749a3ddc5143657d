"""Line charts: which lines the report draws, and where their points are. chart.svg.j2 turns them into SVG.

They are drawn here and not by a library: these take their colours from the page, in the dark as well, and describe themselves
to screen readers. matplotlib's SVG of the same lines has fixed colours and three to four times as many bytes.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from extras.report.experiments import Experiment, curve_metric, leading_metric, mean_of
from extras.report.runs import Point, Run, is_figure

MAX_POINTS = 160  # of a line; neighbours are averaged beyond that, since nobody sees them and every reader loads them
MAX_LABEL = 44  # characters of an axis's label, which fit beside " (log scale)"; the chart's title has all of it
TICK_WIDTH = 7  # of a character
LOG_FROM = 8  # the ratio of largest to smallest value from which the vertical axis is logarithmic


@dataclass(frozen=True)
class Series:
    """A line.

    Attributes:
        points: (x, y) sorted by x.
        style: number of its colour and marker.
        dashed: dense runs are, so that colour is not all that tells lines apart.
        band: (low, high) at each point, or empty.
    """

    label: str
    points: Sequence[tuple[float, float]]
    style: int = 0
    dashed: bool = False
    band: Sequence[tuple[float, float]] = ()


class Chart:
    """Lines in a box, and where their points are in it.

    Args:
        series: with at least one point each.
        identifier: unique in the page.
        markers: the points are marked.
        from_zero: the horizontal axis starts there.
    """

    width, height = 440, 270
    left, right, top, bottom = 52, 420, 12, 228  # of the plot inside the axes
    header = 20  # above it, for the vertical axis's label: beside the axis, a long one would cross the ticks'

    def __init__(
        self, series: Sequence[Series], identifier: str, title: str, axes: tuple[str, str], markers: bool, from_zero: bool
    ):
        self.series, self.identifier, self.title, self.markers = series, identifier, title, markers
        xs = [x for one in series for x, _ in one.points]
        ys = [y for one in series for _, y in one.points] + [y for one in series for pair in one.band for y in pair]
        self.is_logarithmic = min(ys) > 0 and max(ys) / min(ys) > LOG_FROM
        self.x_label, self.y_label = axes[0], cut(axes[1]) + (" (log scale)" if self.is_logarithmic else "")
        self.x_ticks = linear_ticks(0.0 if from_zero else min(xs), max(xs))
        self.y_ticks = (log_ticks if self.is_logarithmic else linear_ticks)(min(ys), max(ys))
        self.x_range = min(self.x_ticks[0], *xs), max(self.x_ticks[-1], *xs)
        self.y_range = min(self.y_ticks[0], *ys), max(self.y_ticks[-1], *ys)

    @property
    def start(self) -> float:
        """The left end, as far out as the ticks' labels need it."""
        return min(0, self.left - 6 - TICK_WIDTH * max(len(short(tick)) for tick in self.y_ticks))

    @property
    def description(self) -> str:
        """Where each line starts and ends, for screen readers."""
        words = []
        for one in self.series:
            (x0, y0), (x1, y1) = one.points[0], one.points[-1]
            words.append(f"{one.label}: from {y0:.4g} at {short(x0)} to {y1:.4g} at {short(x1)} {self.x_label}.")
        return " ".join(words)

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (value - low) / ((high - low) or 1) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high, value = (math.log(v) if self.is_logarithmic else v for v in (*self.y_range, value))
        return self.bottom - (value - low) / ((high - low) or 1) * (self.bottom - self.top)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        """Points as SVG's coordinates."""
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def outline(self, one: Series) -> str:
        """The path around a line's band."""
        lower, upper = ([(x, pair[side]) for (x, _), pair in zip(one.points, one.band)] for side in (0, 1))
        return self.path(upper + lower[::-1])


@dataclass(frozen=True)
class ChartGroup:
    """Charts under one legend."""

    title: str
    legend: Sequence[Series]
    charts: Sequence[Chart]


# ----------------------------------------------------------------------------------------------------------------------
# What is drawn.


def draw_curves(identifier: str, experiments: Sequence[Experiment]) -> ChartGroup:
    """The metric, the class agreement where a detector gives it, and the loss, against steps and against hours.

    Args:
        identifier: begins those of its charts.
    """
    metric = curve_metric(experiments)
    legend = [Series(one.label, (), style, not one.is_routed) for one, style in zip(experiments, styles_of(experiments))]
    charts = []
    names = dict.fromkeys((metric, metric.replace("fd_", "class_agreement_", 1))) if metric else ()
    measured = [name for name in names if any(one.curve(name) for one in experiments)]
    for name, words in [*zip(measured, measured), ("loss", "training loss")]:
        for axis, x_label in (("steps", "steps"), ("hours", "hours of training")):
            series = [curve_series(line, experiment, name, axis) for line, experiment in zip(legend, experiments)]
            title, chart_id = f"{words} against {x_label}", f"{identifier}-{axis}-{len(charts)}"
            charts.append(line_chart(series, chart_id, title, x_label, words, markers=name in measured))
    return ChartGroup("Curves", legend, [chart for chart in charts if chart])


def curve_series(line: Series, experiment: Experiment, metric: str, axis: str) -> Series:
    """The line with the points of a metric against steps or hours, and with a band where there are several seeds."""
    curve, runs = experiment.curve(metric), experiment.furthest(metric)
    xs = [figure.step if axis == "steps" else mean_of(run.hours_at(figure.step) for run in runs) for figure in curve]
    known = [(float(x), figure) for x, figure in zip(xs, curve) if x is not None]
    band = [(min(figure.values), max(figure.values)) for _, figure in known if len(figure.values) > 1]
    return replace(line, points=[(x, figure.mean) for x, figure in known], band=band)


def draw_sweeps(identifier: str, experiments: Sequence[Experiment]) -> list[ChartGroup]:
    """The leading metric against what fid.py swept, and against the guidance scales of training's own evaluations."""
    metric = (leading_metric(experiments) or "").partition("/")[0]
    axes: dict[str, list[Series]] = {}
    for style, experiment in zip(styles_of(experiments), experiments):
        for axis, curve, words in swept_curves(experiment.runs, metric):
            label = experiment.label + (f", {words}" if words else "")
            axes.setdefault(axis, []).append(Series(label, curve, style, not experiment.is_routed))
    groups = []
    for axis, series in axes.items():
        if len({(one.style, one.dashed) for one in series}) < len(series):  # several lines of one experiment: a style for each
            series = [replace(one, style=style) for style, one in enumerate(series)]
        chart_id, title = f"{identifier}-sweep-{axis.replace('.', '-')}", f"{metric} against {axis}"
        chart = line_chart(series, chart_id, title, axis, metric, markers=True, from_zero=False)
        groups.append(ChartGroup(f"Sweep of {axis}", series, [chart]))
    return groups


def styles_of(experiments: Sequence[Experiment]) -> list[int]:
    """A colour and marker for each. A dense experiment and its only routed one share theirs, and differ in the dashes."""
    followers = Counter(experiment.baseline for experiment in experiments)
    styles: dict[Experiment, int] = {}
    for experiment in experiments:
        dense = experiment.baseline
        shares = dense in styles and followers[dense] == 1
        styles[experiment] = styles[dense] if shares else len(set(styles.values()))
    return list(styles.values())


def swept_curves(runs: Sequence[Run], metric: str) -> list[tuple[str, list[tuple[float, float]], str]]:
    """(axis, (value, metric) points, the other settings in words) for each setting that varies while the rest stays the same.

    Of several seeds the mean, where all of them have a point.
    """
    found: dict[tuple, dict[float, dict[str, float]]] = {}  # by axis and other settings, value of the axis, and run
    for run in runs:
        for point in [*run.points, *own_points(run, metric)]:
            value = next((value for name, value in point.values.items() if name.partition("/")[0] == metric), None)
            settings = {key: one if is_figure(one) else str(one) for key, one in (point.settings | {"step": point.step}).items()}
            for axis in point.settings if value is not None else ():
                if is_figure(settings[axis]):
                    key = axis, tuple(sorted((name, one) for name, one in settings.items() if name != axis))
                    found.setdefault(key, {}).setdefault(float(settings[axis]), {}).setdefault(str(run.path), value)
    curves = {}
    for key, by_value in found.items():
        points = [(x, mean_of(values.values())) for x, values in sorted(by_value.items()) if len(values) == len(runs)]
        if len(points) > 1:
            curves[key] = points
    result = []
    for (axis, rest), points in curves.items():
        settings = [dict(other) for other_axis, other in curves if other_axis == axis]
        words = ", ".join(f"{key} {value}" for key, value in rest if len({str(other.get(key)) for other in settings}) > 1)
        result.append((axis, points, words))
    return result


def own_points(run: Run, metric: str) -> list[Point]:
    """Training's last evaluation as fid.py would give it: a point for each guidance scale."""
    last = max((step for name in run.metrics for step in run.series[name]), default=0)
    matches = (re.fullmatch(rf"{re.escape(metric)}/cfg(-?\d+\.\d+)", name) for name in run.metrics if last in run.series[name])
    settings = [(match.group(), {"cfg_scale": float(match.group(1)), **run.own_sampler}) for match in matches if match]
    return [Point(last, one, {name: run.series[name][last]}) for name, one in settings]


# ----------------------------------------------------------------------------------------------------------------------
# Where it is drawn.


def line_chart(
    series: Sequence[Series], identifier: str, title: str, x_label: str, y_label: str, markers: bool, from_zero: bool = True
) -> Chart | None:
    """None if there is nothing to draw. Without markers, for few points, a line's points are averaged to MAX_POINTS."""
    series = [one if markers else thin(one) for one in series if one.points]
    return Chart(series, identifier, title, (x_label, y_label), markers, from_zero) if series else None


def thin(one: Series) -> Series:
    """At most MAX_POINTS, each the mean of equally many neighbours."""
    size = -(-len(one.points) // MAX_POINTS)

    def means(rows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
        return [tuple(sum(column) / len(chunk) for column in zip(*chunk)) for chunk in chunks]

    return replace(one, points=means(one.points), band=means(one.band))


def linear_ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose [low, high], with steps of 1, 2 or 5 times a power of ten."""
    raw = ((high - low) or abs(high) or 1.0) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten that enclose [low, high]; fewer where they would crowd."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        ticks = ticks[bisect_right(ticks, low * (1 + 1e-9)) - 1 : bisect_left(ticks, high * (1 - 1e-9)) + 1]
        if len(ticks) <= 9:
            break
    return ticks


def cut(text: str) -> str:
    """At most MAX_LABEL characters: the beginning and the end."""
    half = MAX_LABEL // 2
    return text if len(text) <= MAX_LABEL else f"{text[:half]}…{text[1 - half :]}"


def short(value: float) -> str:
    """400000 -> 400k."""
    size, suffix = next(((size, name) for size, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= size), (1, ""))
    return f"{value / size:.4g}{suffix}"
