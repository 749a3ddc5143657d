"""Runs grouped into experiments, and what is compared: figures with the paper's, routed runs with dense ones."""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evaluations.suite import METRICS, MetricName, find_metric, read_metric_name
from reports.runs import Run, interpolate
from setup.schema import role_of

# What a dense run and a routed one may differ in.
ROUTING = ("model.name", "model.routes", "model.selection")
UNGUIDED = ("", "cfg1.0")


@dataclass(frozen=True)
class Figure:
    """Mean of a metric over seeds, at one step.

    Attributes:
        spread: standard deviation over seeds (n - 1); None for one seed.
        values: of each seed.
    """

    name: str
    step: float
    mean: float
    spread: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, name: str, step: float, values: Sequence[float]) -> Figure:
        spread = statistics.stdev(values) if len(values) > 1 else None
        return cls(name, step, statistics.fmean(values), spread, tuple(values))


@dataclass(frozen=True)
class Comparison:
    """A figure beside the paper's.

    Attributes:
        measured: None if the runs have no such figure; `instead` is then the nearest one that they have.
    """

    metric: str
    paper: float
    measured: Figure | None
    instead: Figure | None


@dataclass
class Experiment:
    """Runs that differ only in the seed, in where they are and in how they were logged.

    Attributes:
        identity: what its runs have in common: the keys of the configuration that have a role in the schema.
        baseline: the dense experiment that it is compared with.
    """

    label: str
    runs: list[Run]
    identity: dict[str, object] = field(default_factory=dict)
    baseline: Experiment | None = None

    @property
    def about(self) -> dict[str, object]:
        """experiment.* of the configuration: name, table, paper, source, differs and baseline, as far as they are there."""
        return self.runs[0].experiment

    @property
    def is_routed(self) -> bool:
        return self.runs[0].is_routed

    @property
    def num_steps(self) -> int | None:
        """The step at which its runs end."""
        return self.identity.get("train.num_steps")

    def metrics(self) -> list[str]:
        """Full names, the leading one first."""
        return sorted({name for run in self.runs for values in run.evaluations.values() for name in values}, key=metric_order)

    def furthest(self, metric: str) -> list[Run]:
        """The runs that have the latest figure of a metric: its curve is their mean."""
        last = [max(series_of(run, metric), default=-1) for run in self.runs]
        return [run for run, step in zip(self.runs, last) if step == max(last) >= 0]

    def curve(self, metric: str) -> list[Figure]:
        """Means by step, over the same seeds at every step: those that got furthest."""
        series = [series_of(run, metric) for run in self.furthest(metric)]
        steps = sorted(set.intersection(*map(set, series))) if series else []
        return [Figure.of(metric, step, [one[step] for one in series]) for step in steps]

    def figure(self, metric: str) -> Figure | None:
        """At the last step that has it."""
        return next(reversed(self.curve(metric)), None)

    def hours_at(self, step: float, metric: str) -> float | None:
        """Mean over the seeds of the metric's curve."""
        return mean_of(run.hours_at(step) for run in self.furthest(metric))

    def comparisons(self) -> list[Comparison]:
        """The paper's figures, each beside its own measured one."""
        result = []
        for metric, paper in (self.about.get("paper") or {}).items():
            names = [metric] if "/" in metric else [metric, f"{metric}/cfg1.0"]
            measured = next((figure for name in names if (figure := self.figure(name))), None)
            instead = None if measured else self.figure(nearest_metric(metric, self.metrics()) or "")
            result.append(Comparison(metric, float(paper), measured, instead))
        return result


def series_of(run: Run, metric: str) -> dict[int, float]:
    """A run's figures of a metric by step; `loss` is that of training."""
    if metric == "loss":
        return {step: line["loss"] for step, line in run.lines.items() if "loss" in line}
    return {step: values[metric] for step, values in run.evaluations.items() if metric in values}


def mean_of(values: Iterable[float | None]) -> float | None:
    """None if there are none, or one of them is None."""
    known = list(values)
    return statistics.fmean(known) if known and None not in known else None


# ----------------------------------------------------------------------------------------------------------------------
# Metrics.


def metric_order(name: str) -> tuple:
    """A sort key: metrics in the order of their table, unguided before guided, many samples before few."""
    parts = read_metric_name(name) or MetricName(name, 0, "")
    rank = list(METRICS).index(parts.metric) if parts.metric in METRICS else len(METRICS)
    return rank, parts.metric, parts.guidance not in UNGUIDED, -parts.num_samples, parts.guidance


def nearest_metric(name: str, available: Sequence[str]) -> str | None:
    """The same metric under the same guidance, at another sample count."""

    def kind(parts: MetricName) -> tuple[str, str]:
        return parts.metric, "" if parts.guidance in UNGUIDED else parts.guidance

    wanted = kind(read_metric_name(name) or MetricName(name, 0, ""))
    return next((other for other in available if (parts := read_metric_name(other)) and kind(parts) == wanted), None)


def leading_metric(experiments: Sequence[Experiment]) -> str | None:
    """What a table is about: the paper's metric if it was measured, else the first of those that most experiments have."""
    for experiment in experiments:
        for comparison in experiment.comparisons():
            figure = comparison.measured or comparison.instead
            if figure is not None:
                return figure.name
    counts = Counter(name for experiment in experiments for name in experiment.metrics())
    return min(counts, key=lambda name: (-counts[name], metric_order(name)), default=None)


def curve_metric(experiments: Sequence[Experiment]) -> str | None:
    """What curves and speedups are about: the leading metric, at the sample count that was evaluated most often.

    FID of 50,000 samples is often there for the last step alone, and FID of 5,000 for many.
    """
    leading = leading_metric(experiments)
    parts = read_metric_name(leading or "")
    if parts is None:
        return leading
    counts = {
        name: sum(len(one.curve(name)) for one in experiments)
        for name in dict.fromkeys(name for one in experiments for name in one.metrics())
        if (other := read_metric_name(name)) and (other.metric, other.guidance) == (parts.metric, parts.guidance)
    }
    return min(counts, key=lambda name: (-counts[name], metric_order(name)))


# ----------------------------------------------------------------------------------------------------------------------
# Routed against dense.


@dataclass(frozen=True)
class Speedup:
    """How much earlier a routed experiment reaches the best figure of its dense one.

    Attributes:
        target: the dense runs' best figure.
        target_hours: their hours of training until there.
        step, hours: at which the routed runs reach it, linear between the evaluations in `between`; None: they do not.
        between: the two evaluations (step, figure); one if the first evaluation has already reached the target.
        best: the routed runs' best figure.
    """

    target: Figure
    target_hours: float | None
    step: float | None
    hours: float | None
    between: tuple[tuple[int, float], ...]
    best: Figure

    @property
    def in_steps(self) -> float | None:
        return self.target.step / self.step if self.step else None

    @property
    def in_hours(self) -> float | None:
        return self.target_hours / self.hours if self.hours and self.target_hours else None


def compared_metric(routed: Experiment) -> str | None:
    """The metric of the curves, if the experiment and its dense one have it."""
    metric = curve_metric([routed, routed.baseline]) if routed.baseline else None
    return metric if metric and routed.curve(metric) and routed.baseline.curve(metric) else None


def starts_alike(routed: Experiment) -> bool:
    """Whether it and its dense experiment start from the same weights, whose earlier training is in neither's hours."""
    own, dense = routed.identity, routed.baseline.identity
    same = own.get("init_from") == dense.get("init_from")
    return same and (own.get("init_from") is None or own.get("init_state") == dense.get("init_state"))


def find_speedup(routed: Experiment, metric: str) -> Speedup | None:
    """None if the two start from different weights, or the table of metrics does not say whether lower is better.

    Args:
        metric: one that `compared_metric` gave.
    """
    known = find_metric(metric)
    if known is None or not starts_alike(routed):
        return None
    sign = 1 if known.direction == "lower" else -1
    curve = routed.curve(metric)
    target, best = (min(figures, key=lambda figure: sign * figure.mean) for figures in (routed.baseline.curve(metric), curve))
    step, between = first_reached([(figure.step, figure.mean) for figure in curve], target.mean, sign)
    hours = None if step is None else routed.hours_at(step, metric)
    return Speedup(target, routed.baseline.hours_at(target.step, metric), step, hours, between, best)


def first_reached(
    curve: Sequence[tuple[int, float]], target: float, sign: int
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """The step at which a curve first reaches the target, linear between its points, and these points.

    Args:
        sign: 1: lower is better; -1: higher is.
    """
    for i, (step, value) in enumerate(curve):
        if sign * value <= sign * target:
            if i == 0:
                return float(step), (curve[0],)
            before = curve[i - 1]
            return interpolate(sorted([(before[1], before[0]), (value, step)]), target), (before, curve[i])
    return None, ()


def compare_at_equal_cost(routed: Experiment, metric: str) -> tuple[Figure, Figure, float | None, Figure | None] | None:
    """Routed against dense after equally many steps, and after equally many hours; None without a common step.

    Returns:
        Both figures at the last common step, over all seeds that have it; the routed runs' mean hours of training until there;
        the dense figure at the step that the dense runs reach in these hours, each seed's linear between its evaluations.
    """
    own, dense = ([run for run in one.runs if series_of(run, metric)] for one in (routed, routed.baseline))
    steps = [{step for run in runs for step in series_of(run, metric)} for runs in (own, dense)]
    step = max(set.intersection(*steps), default=None)
    if step is None:
        return None
    own, dense = ([run for run in runs if step in series_of(run, metric)] for runs in (own, dense))
    hours = mean_of(run.hours_at(step) for run in own)
    time_step = None if hours is None else step_after(dense, hours)
    in_time = []
    if time_step is not None:
        in_time = [interpolate(sorted(series_of(run, metric).items()), time_step) for run in dense]
        in_time = [value for value in in_time if value is not None]
    figures = (Figure.of(metric, step, [series_of(run, metric)[step] for run in runs]) for runs in (own, dense))
    return *figures, hours, Figure.of(metric, time_step, in_time) if in_time else None


def step_after(runs: Sequence[Run], hours: float) -> float | None:
    """The step at which the runs have trained for `hours` on average; None beyond what all of them have."""
    steps = sorted({step for run in runs for step in run.hours})
    known = [(mean, step) for step in steps if (mean := mean_of(run.hours_at(step) for run in runs)) is not None]
    return interpolate([(0.0, 0), *known], hours)


# ----------------------------------------------------------------------------------------------------------------------
# Grouping.


def group(runs: Sequence[Run]) -> dict[str, list[Experiment]]:
    """Experiments by the table that they belong to, the paper's tables first; those without one are grouped by their data."""
    found: dict[tuple, Experiment] = {}
    for run in sorted(runs, key=lambda run: run.name):
        identity = identity_of(run)
        key = (run.experiment.get("name"), repr(sorted(identity.items())))
        found.setdefault(key, Experiment("", [], identity)).runs.append(run)
    experiments = list(found.values())
    label_experiments(experiments)
    for experiment in experiments:
        experiment.baseline = find_baseline(experiment, experiments)
    tables: dict[str, list[Experiment]] = {}
    for experiment in sorted(experiments, key=lambda e: (by_number((e.baseline or e).label), e.is_routed, by_number(e.label))):
        other = f"Other runs on {experiment.runs[0].config.get('data.name') or 'unknown data'}"
        tables.setdefault(str(experiment.about.get("table") or other), []).append(experiment)
    return dict(sorted(tables.items(), key=lambda item: (item[0].startswith("Other runs"), item[0])))


def identity_of(run: Run) -> dict[str, object]:
    """The values that make two runs different experiments: those of keys with a role in the schema, the seed excepted."""
    identity = {key: value for key, value in run.config.items() if role_of(key) is not None and key != "seed"}
    if isinstance(init_from := identity.get("init_from"), str):  # its run and step, without the folder and the seed
        path = Path(init_from)
        name = f"{path.parent.parent.name}/{path.name}" if path.parent.name == "checkpoints" else path.name
        identity["init_from"] = re.sub(r"[-_.]*seed[-_.]*\d+", "", name)
    return identity


def by_number(label: str) -> list[str | int]:
    """A key that sorts `0_10` after `0_2`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", label)]


def label_experiments(experiments: Sequence[Experiment]) -> None:
    """Label each by its name, or by what the names of its runs share; equal labels also say what differs."""
    for experiment in experiments:
        names = [run.name for run in experiment.runs]
        shared = re.sub(r"[-_.]*(seed[-_.]*\d*)?$", "", os.path.commonprefix(names)) if len(names) > 1 else names[0]
        experiment.label = str(experiment.about.get("name") or shared or names[0])
    for label in {experiment.label for experiment in experiments}:
        same = [experiment for experiment in experiments if experiment.label == label]
        if len(same) > 1:
            keys = {key for one in same for key in one.identity}
            keys = sorted(key for key in keys if any(one.identity.get(key) != same[0].identity.get(key) for one in same))
            for number, experiment in enumerate(same, start=1):
                words = ", ".join(f"{key}={experiment.identity.get(key)}" for key in keys[:3])
                experiment.label = f"{label} ({words or number})"


def find_baseline(experiment: Experiment, experiments: Sequence[Experiment]) -> Experiment | None:
    """The dense experiment that the configuration names, or the only one that differs in nothing but the routes."""
    named = experiment.about.get("baseline")
    if named:
        found = [other for other in experiments if other.about.get("name") == named and other is not experiment]
        # Of several with this name, the one that differs least, and then the one of the same length.
        return min(found, key=lambda o: (len(other_settings(experiment, o)), o.num_steps != experiment.num_steps), default=None)
    if not experiment.is_routed or experiment.about:
        return None
    for ignored in (ROUTING, (*ROUTING, "train.num_steps")):
        rest, *others = (
            {key: value for key, value in one.identity.items() if key not in ignored} for one in (experiment, *experiments)
        )
        dense = [other for other, its_rest in zip(experiments, others) if not other.is_routed and its_rest == rest]
        if dense:
            return dense[0] if len(dense) == 1 else None
    return None


def other_settings(experiment: Experiment, baseline: Experiment) -> list[str]:
    """The keys that two experiments differ in, beside the routes, the length and what they start from."""
    own, other = experiment.identity, baseline.identity
    expected = (*ROUTING, "train.num_steps", "init_from", "init_state")
    return sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key) and key not in expected)
