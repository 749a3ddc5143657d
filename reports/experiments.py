"""Runs grouped into experiments, and what is compared: figures with the paper's, routed runs with dense ones."""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reports.runs import Run, interpolate

# What does not make two runs different experiments: the seed, where things are, and how a run is watched.
NOT_IDENTITY = ("seed", "name", "output_dir", "resume", "wandb", "checkpoint", "sample", "data.path", "data.num_workers")
NOT_IDENTITY += ("train.cpu_threads", "train.log_every", "train.compile", "eval.every", "eval.batch_size", "eval.num_samples")
NOT_IDENTITY += ("eval.cfg_scales", "evaluation.weights", "evaluation.reference", "evaluation.compile", "guidance")
# And what a dense run and a routed one may differ in.
ROUTING = ("model.name", "model.routes")
# The metric that a table leads with: the first kind that there is, unguided, at the largest sample count.
LEADING = ("fid", "fd_digits", "sfid")
LOWER_IS_BETTER = ("fid", "sfid", "fd_")
_METRIC = re.compile(r"(?P<kind>[a-z_]+?)(?P<count>\d+k?)(?:/(?P<guidance>.+))?")


@dataclass(frozen=True)
class Figure:
    """Mean of a metric over seeds, at one step.

    Attributes:
        spread: standard deviation over seeds (n - 1); None for one seed.
    """

    name: str
    step: float
    mean: float
    spread: float | None
    values: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """A figure beside the paper's.

    Attributes:
        measured: None where the runs have no such figure; `instead` is then the nearest one that they have.
    """

    metric: str
    paper: float
    measured: Figure | None
    instead: Figure | None

    @property
    def difference(self) -> float | None:
        return None if self.measured is None else self.measured.mean - self.paper


@dataclass
class Experiment:
    """Runs that differ in nothing but the seed and in how they were watched."""

    label: str
    runs: list[Run]
    baseline: Experiment | None = None
    identity: dict[str, object] = field(default_factory=dict)

    @property
    def about(self) -> dict[str, object]:
        """experiment.* of the configuration."""
        return self.runs[0].experiment

    @property
    def is_routed(self) -> bool:
        return self.runs[0].is_routed

    def metrics(self) -> list[str]:
        return sorted({name for run in self.runs for values in run.evaluations.values() for name in values}, key=metric_order)

    def figure(self, metric: str) -> Figure | None:
        """At the last step that has it; seeds that have not got there are left out."""
        curve = self.curve(metric)
        return curve[-1] if curve else None

    def furthest(self, metric: str) -> list[Run]:
        """The runs that got furthest with a metric (`loss`: with training): those that its curve is the mean of."""
        last = [max(_series(run, metric), default=-1) for run in self.runs]
        return [run for run, step in zip(self.runs, last) if step == max(last) >= 0]

    def curve(self, metric: str) -> list[Figure]:
        """Means by step, over the seeds that got furthest: the same seeds at every step."""
        return mean_curve(metric, [_series(run, metric) for run in self.furthest(metric)])

    def hours_at(self, step: float, metric: str) -> float | None:
        """Mean over the seeds of the metric's curve."""
        return mean_of(run.hours_at(step) for run in self.furthest(metric))

    @property
    def num_steps(self) -> int | None:
        """The step at which its runs end."""
        return self.identity.get("train.num_steps")

    def comparisons(self) -> list[Comparison]:
        """The paper's figures, each beside its own measured one."""
        result = []
        for metric, paper in (self.about.get("paper") or {}).items():
            if isinstance(paper, (int, float)) and not isinstance(paper, bool):
                names = [metric] if "/" in metric else [metric, f"{metric}/cfg1.0"]
                measured = next((figure for name in names if (figure := self.figure(name))), None)
                instead = None if measured else self.figure(nearest_metric(metric, self.metrics()) or "")
                result.append(Comparison(metric, float(paper), measured, instead))
        return result


@dataclass(frozen=True)
class Speedup:
    """How much earlier a routed experiment reaches the best figure of its dense one.

    Attributes:
        target: the dense run's best figure, reached there at dense_step.
        step, hours: where the routed run reaches it, linear between the evaluations in `between`; None: it does not.
        between: the two evaluations (step, figure); one where the first evaluation is already there.
        best: the routed run's best figure.
    """

    metric: str
    target: float
    dense_step: int
    dense_hours: float | None
    step: float | None
    hours: float | None
    between: tuple[tuple[int, float], ...]
    best: Figure

    @property
    def in_steps(self) -> float | None:
        return self.dense_step / self.step if self.step else None

    @property
    def in_hours(self) -> float | None:
        return self.dense_hours / self.hours if self.hours and self.dense_hours else None


@dataclass(frozen=True)
class Equal:
    """A routed experiment and its dense one at equal steps and at equal time.

    Attributes:
        step, hours: the last step that both have evaluated, and the routed runs' mean hours of training until there.
        routed, dense: figures of that step, of all seeds that have it.
        time_step: the step that the dense runs' mean hours are `hours` at; None where they do not reach so far.
        dense_in_time: the dense figure there, every seed's linear between its evaluations; None outside them.
    """

    metric: str
    step: int | None
    hours: float | None = None
    routed: Figure | None = None
    dense: Figure | None = None
    time_step: float | None = None
    dense_in_time: Figure | None = None


def mean_of(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if not known or any(value is None for value in known) else statistics.fmean(known)


def _series(run: Run, metric: str) -> dict[int, float]:
    if metric == "loss":
        return {step: line["loss"] for step, line in run.lines.items() if "loss" in line}
    return {step: values[metric] for step, values in run.evaluations.items() if metric in values}


def mean_curve(metric: str, series: Sequence[dict[int, float]]) -> list[Figure]:
    """Mean and spread at the steps that all series have."""
    curve = []
    for step in sorted(set.intersection(*map(set, series)) if series else ()):
        curve.append(figure_of(metric, step, [one[step] for one in series]))
    return curve


def figure_of(metric: str, step: float, values: Sequence[float]) -> Figure:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return Figure(metric, step, statistics.fmean(values), spread, tuple(values))


def is_lower_better(metric: str) -> bool:
    return metric.startswith(LOWER_IS_BETTER)


def metric_order(metric: str) -> tuple:
    """Leading kinds first, unguided before guided, many samples before few."""
    match = _METRIC.fullmatch(metric)
    if match is None:
        return (len(LEADING) + 1, metric, 0, "")
    kind, count = match["kind"], match["count"]
    rank = LEADING.index(kind) if kind in LEADING else len(LEADING)
    guidance = match["guidance"] or ""
    number = int(count.removesuffix("k")) * (1000 if count.endswith("k") else 1)
    return (rank, kind if rank == len(LEADING) else "", guidance not in ("", "cfg1.0"), -number, guidance)


def nearest_metric(metric: str, available: Sequence[str]) -> str | None:
    """The same metric, unguided, at another sample count."""
    match = _METRIC.fullmatch(metric)
    kind = match["kind"] if match else metric
    for name in available:
        other = _METRIC.fullmatch(name)
        if other and other["kind"] == kind and (other["guidance"] or "cfg1.0") == ((match and match["guidance"]) or "cfg1.0"):
            return name
    return None


def speedup(routed: Experiment, metric: str) -> Speedup | None:
    """None where one of the two has no such figure, or started from the weights of other runs than the other."""
    if routed.baseline is not None and not starts_alike(routed):
        return None
    dense_curve, curve = routed.baseline.curve(metric) if routed.baseline else [], routed.curve(metric)
    if not dense_curve or not curve:
        return None
    sign = 1 if is_lower_better(metric) else -1
    goal = min(dense_curve, key=lambda figure: sign * figure.mean)
    best = min(curve, key=lambda figure: sign * figure.mean)
    step, between = first_reached([(figure.step, figure.mean) for figure in curve], goal.mean, sign)
    return Speedup(
        metric=metric,
        target=goal.mean,
        dense_step=goal.step,
        dense_hours=routed.baseline.hours_at(goal.step, metric),
        step=step,
        hours=None if step is None else routed.hours_at(step, metric),
        between=between,
        best=best,
    )


def equal(routed: Experiment, metric: str) -> Equal:
    """Figures at the last common step, and at the same hours."""
    own, dense = ([run for run in one.runs if _series(run, metric)] for one in (routed, routed.baseline))
    steps = [{step for run in runs for step in _series(run, metric)} for runs in (own, dense)]
    step = max(steps[0] & steps[1], default=None)
    if step is None:
        return Equal(metric, None)
    own, same_step = ([run for run in runs if step in _series(run, metric)] for runs in (own, dense))
    hours = mean_of(run.hours_at(step) for run in own)
    time_step = None if hours is None else step_after(same_step, hours)
    in_time = []
    if time_step is not None:
        in_time = [interpolate(sorted(_series(run, metric).items()), time_step) for run in same_step]
    in_time = [value for value in in_time if value is not None]
    return Equal(
        metric,
        step,
        hours,
        figure_of(metric, step, [_series(run, metric)[step] for run in own]),
        figure_of(metric, step, [_series(run, metric)[step] for run in same_step]),
        time_step,
        figure_of(metric, time_step, in_time) if in_time else None,
    )


def step_after(runs: Sequence[Run], hours: float) -> float | None:
    """The step at which the runs' mean hours of training are `hours`; None beyond what all of them have."""
    steps = sorted({step for run in runs for step in run.hours})
    known = [(mean, step) for step in steps if (mean := mean_of(run.hours_at(step) for run in runs)) is not None]
    return interpolate([(0.0, 0), *known], hours)


def first_reached(
    curve: Sequence[tuple[int, float]], target: float, sign: int
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """Where a curve first is at or past the target (below it for sign 1), linear between its points; and those points."""
    for i, (step, value) in enumerate(curve):
        if sign * value <= sign * target:
            if i == 0:
                return float(step), (curve[0],)
            before = curve[i - 1]
            return interpolate(sorted([(before[1], before[0]), (value, step)]), target), (before, curve[i])
    return None, ()


# ----------------------------------------------------------------------------------------------------------------------
# Grouping.


def group(runs: Sequence[Run]) -> dict[str, list[Experiment]]:
    """Experiments by the table that they belong to; runs without an experiment go to tables by their data."""
    found: dict[tuple, Experiment] = {}
    for run in sorted(runs, key=lambda run: run.name):
        identity = {key: value for key, value in run.config.items() if not is_under(key, NOT_IDENTITY)}
        if isinstance(identity.get("init_from"), str):
            identity["init_from"] = start_of(identity["init_from"])
        key = (run.experiment.get("name"), repr(sorted(identity.items(), key=lambda item: item[0])))
        found.setdefault(key, Experiment("", [], identity=identity)).runs.append(run)
    experiments = list(found.values())
    name_experiments(experiments)
    for experiment in experiments:
        experiment.baseline = find_baseline(experiment, experiments)
    tables: dict[str, list[Experiment]] = {}
    for experiment in experiments:
        config = experiment.runs[0].config
        without = f"Other runs on {config.get('data.name') or 'unknown data'}"
        tables.setdefault(str(experiment.about.get("table") or without), []).append(experiment)
    for table in tables.values():
        table.sort(
            key=lambda e: (by_number((e.baseline or e).label), e.is_routed, by_number(e.label))
        )  # next to their dense ones
    # The paper's tables first.
    return dict(sorted(tables.items(), key=lambda item: (item[0].startswith("Other runs"), item[0])))


def by_number(label: str) -> list[str | int]:
    """A key that sorts `0_10` after `0_2`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", label)]


def start_of(init_from: str) -> str:
    """The run and the step that init_from names, without its folder and its seed, which are not what an experiment is."""
    path = Path(init_from)
    name = f"{path.parent.parent.name}/{path.name}" if path.parent.name == "checkpoints" else path.name
    return re.sub(r"[-_.]*seed[-_.]*\d+", "", name)


def starts_alike(experiment: Experiment) -> bool:
    """Whether it and its dense experiment start from the same weights; what one of them trained before is not in its hours."""
    own, dense = experiment.identity, experiment.baseline.identity
    same = own.get("init_from") == dense.get("init_from")
    return same and (own.get("init_from") is None or own.get("init_state") == dense.get("init_state"))


def is_under(key: str, prefixes: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def name_experiments(experiments: Sequence[Experiment]) -> None:
    """The experiment's name, or what the names of its runs share; where that is the same for two, with what differs."""
    for experiment in experiments:
        names = [run.name for run in experiment.runs]
        shared = re.sub(r"[-_.]*(seed[-_.]*\d*)?$", "", os.path.commonprefix(names)) if len(names) > 1 else names[0]
        experiment.label = str(experiment.about.get("name") or shared or names[0])
    for label in {experiment.label for experiment in experiments}:
        same = [experiment for experiment in experiments if experiment.label == label]
        if len(same) > 1:
            keys = sorted(
                {key for one in same for key in one.identity if any(one.identity.get(key) != o.identity.get(key) for o in same)}
            )
            for number, experiment in enumerate(same, start=1):
                said = ", ".join(f"{key}={experiment.identity.get(key)}" for key in keys[:3])
                experiment.label = f"{label} ({said or number})"


def find_baseline(experiment: Experiment, experiments: Sequence[Experiment]) -> Experiment | None:
    """The dense experiment that the configuration names, or the one that differs in nothing but the routes."""
    named = experiment.about.get("baseline")
    if named:
        found = [other for other in experiments if other.about.get("name") == named and other is not experiment]
        # Among several of the name (run with other settings, say), the one that differs least, and then that of the same length.
        return min(found, key=lambda o: (len(other_settings(experiment, o)), o.num_steps != experiment.num_steps), default=None)
    if not experiment.is_routed or experiment.about:
        return None

    def rest(one: Experiment) -> dict:
        return {key: value for key, value in one.identity.items() if not is_under(key, ROUTING)}

    dense = [other for other in experiments if not other.is_routed and rest(other) == rest(experiment)]
    if not dense:  # or of another length
        steps = "train.num_steps"
        dense = [o for o in experiments if not o.is_routed and rest(o) | {steps: 0} == rest(experiment) | {steps: 0}]
    return dense[0] if len(dense) == 1 else None


def other_settings(experiment: Experiment, baseline: Experiment) -> list[str]:
    """The keys that two experiments differ in, beside the routes, the length and what they start from."""
    own, other = experiment.identity, baseline.identity
    expected = (*ROUTING, "train.num_steps", "init_from", "init_state")
    return sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key) and not is_under(key, expected))


def leading_metric(experiments: Sequence[Experiment]) -> str | None:
    """What a table and its curves are about: the paper's metric where it was measured, else what most have, LEADING first."""
    for experiment in experiments:
        for comparison in experiment.comparisons():
            figure = comparison.measured or comparison.instead
            if figure is not None:
                return figure.name
    counts = Counter(name for experiment in experiments for name in experiment.metrics())
    return min(counts, key=lambda name: (-counts[name], metric_order(name)), default=None)


def curve_metric(experiments: Sequence[Experiment]) -> str | None:
    """What curves and speedups are about: of the leading kind, unguided, the sample count that was evaluated most often.

    FID of 50,000 samples is often there for the last step alone, and FID of 5,000 for many.
    """
    leading = leading_metric(experiments)
    match = _METRIC.fullmatch(leading or "")
    if match is None:
        return leading
    names = dict.fromkeys(name for experiment in experiments for name in experiment.metrics())
    kin = [
        name
        for name in names
        if (m := _METRIC.fullmatch(name)) and (m["kind"], m["guidance"]) == (match["kind"], match["guidance"])
    ]
    counts = {name: sum(len(experiment.curve(name)) for experiment in experiments) for name in kin}
    return min(kin, key=lambda name: (-counts[name], metric_order(name)), default=leading)
