"""Runs grouped into experiments, and what is compared: figures with the paper's, routed runs with dense ones."""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from evaluations.suite import MetricName, rank_of, read_metric_name
from extras.report import rows
from extras.report.runs import Run, interpolate

UNGUIDED = ("", "cfg1.0")
MAX_WORDS = 3  # of a label: more are in the list of what differs


@dataclass(frozen=True)
class Figure:
    """A metric at one step, of each seed."""

    name: str
    step: float
    values: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds (n - 1); None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """The paper's figure beside the measured one, or, if not `is_same`, beside the nearest that the runs have."""

    metric: str
    paper: float
    figure: Figure | None
    is_same: bool


@dataclass(eq=False)
class Experiment:
    """Runs that differ only in the seed, in where they are and in how they were logged.

    Attributes:
        identity: what its runs have in common: the keys of the configuration that have a role in the schema.
        changes: what it changed of its row of the paper's tables, by key: (the row's value, its own). None: it names a row that
            this version does not have.
        baseline: the dense experiment that it is compared with.
    """

    label: str
    runs: list[Run]
    identity: dict[str, object]
    changes: dict[str, tuple[object, object]] | None = field(default_factory=dict)
    baseline: Experiment | None = None

    @property
    def about(self) -> dict[str, object]:
        """experiment.* of the configuration: name, table, paper, source, differs and baseline, as far as they are there.

        The paper's figures, and where they stand, belong to the row as it is.
        """
        stored = self.runs[0].experiment
        if not self.changes:
            return stored
        changed = f"not the row itself: {rows.change_words(self.changes)}"
        own = {key: value for key, value in stored.items() if key not in ("paper", "source")}
        return own | {"differs": "; ".join(filter(None, (changed, stored.get("differs"))))}

    @property
    def is_routed(self) -> bool:
        return self.runs[0].is_routed

    def metrics(self) -> list[str]:
        """Full names, the leading one first."""
        return sorted({name for run in self.runs for name in run.metrics}, key=metric_order)

    def furthest(self, metric: str) -> list[Run]:
        """The runs that have the latest figure of a metric: its curve is their mean."""
        last = [max(run.series.get(metric, ()), default=-1) for run in self.runs]
        return [run for run, step in zip(self.runs, last) if step == max(last) >= 0]

    def curve(self, metric: str) -> list[Figure]:
        """Figures by step, of the same seeds at every step: those that got furthest."""
        series = [run.series[metric] for run in self.furthest(metric)]
        steps = sorted(set.intersection(*map(set, series))) if series else []
        return [Figure(metric, step, [values[step] for values in series]) for step in steps]

    def figure(self, metric: str) -> Figure | None:
        """At the last step that has it."""
        return next(reversed(self.curve(metric)), None)

    def hours_at(self, step: float, metric: str) -> float | None:
        """Mean over the seeds of the metric's curve."""
        return mean_of(run.hours_at(step) for run in self.furthest(metric))

    def comparisons(self) -> list[Comparison]:
        """The paper's figures, each beside the measured one, or one of another sample count."""
        result = []
        for metric, paper in (self.about.get("paper") or {}).items():
            wanted = _metric_and_guidance(metric)
            near = [name for name in self.metrics() if read_metric_name(name) and _metric_and_guidance(name) == wanted]
            names = [metric] if "/" in metric else [metric, f"{metric}/cfg1.0"]
            figure = next((figure for name in (*names, *near) if (figure := self.figure(name))), None)
            result.append(Comparison(metric, float(paper), figure, figure is not None and figure.name in names))
        return result


def mean_of(values: Iterable[float | None]) -> float | None:
    """None if there are none, or one of them is None."""
    known = list(values)
    return statistics.fmean(known) if known and None not in known else None


# ----------------------------------------------------------------------------------------------------------------------
# Metrics.


def _metric_and_guidance(name: str) -> tuple[str, str]:
    parts = read_metric_name(name) or MetricName(name, 0, "")
    return parts.metric, "" if parts.guidance in UNGUIDED else parts.guidance


def metric_order(name: str) -> tuple:
    """A sort key: metrics in the order of their table, unguided before guided, many samples before few."""
    parts = read_metric_name(name) or MetricName(name, 0, "")
    return rank_of(parts.metric), parts.metric, parts.guidance not in UNGUIDED, -parts.num_samples, parts.guidance


def leading_metric(experiments: Sequence[Experiment]) -> str | None:
    """What a table is about: the paper's metric if it was measured, else the first of those that most experiments have."""
    compared = [comparison.figure for experiment in experiments for comparison in experiment.comparisons()]
    counts = Counter(name for experiment in experiments for name in experiment.metrics())
    return next((figure.name for figure in compared if figure), None) or _most_frequent(counts)


def _most_frequent(counts: dict[str, int]) -> str | None:
    return min(counts, key=lambda name: (-counts[name], metric_order(name)), default=None)


def curve_metric(experiments: Sequence[Experiment]) -> str | None:
    """What curves and speedups are about: the leading metric, at the sample count that was evaluated most often.

    FID of 50,000 samples is often there for the last step alone, and FID of 5,000 for many.
    """
    leading = leading_metric(experiments)
    parts = read_metric_name(leading or "")
    if parts is None:
        return leading
    counts: Counter[str] = Counter()
    for experiment in experiments:
        for name in experiment.metrics():
            other = read_metric_name(name)
            if other and (other.metric, other.guidance) == (parts.metric, parts.guidance):
                counts[name] += len(experiment.curve(name))
    return _most_frequent(counts)


# ----------------------------------------------------------------------------------------------------------------------
# Routed against dense.


def compared_metric(routed: Experiment) -> str | None:
    """The metric of the curves, if the experiment and its dense one have it."""
    metric = curve_metric([routed, routed.baseline]) if routed.baseline else None
    return metric if metric and routed.curve(metric) and routed.baseline.curve(metric) else None


def starts_alike(routed: Experiment) -> bool:
    """Whether it and its dense experiment start from the same weights, whose earlier training is in neither's hours."""
    keys = ("init_from", "init_state") if routed.identity.get("init_from") else ("init_from",)
    return not any(key in keys for key in different_keys(routed, routed.baseline))


def first_reached(
    curve: Sequence[tuple[int, float]], target: float, sign: int
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """The step at which a curve first reaches the target, linear between its points, and these points.

    Args:
        sign: 1: lower is better; -1: higher is.
    """
    i = next((i for i, (_, value) in enumerate(curve) if sign * value <= sign * target), None)
    if i is None:
        return None, ()
    between = tuple(curve[max(i - 1, 0) : i + 1])
    return float(curve[0][0]) if i == 0 else interpolate(sorted((value, step) for step, value in between), target), between


def compare_at_equal_cost(routed: Experiment, metric: str) -> tuple[Figure, Figure, float | None, Figure | None] | None:
    """Routed against dense after equally many steps, and after equally many hours; None without a common step.

    Returns:
        Both figures at the last common step, over all seeds that have it; the routed runs' mean hours of training until there;
        the dense figure at the step that the dense runs reach in these hours, each seed's linear between its evaluations.
    """
    both = [[run for run in one.runs if metric in run.series] for one in (routed, routed.baseline)]
    step = max(set.intersection(*({step for run in runs for step in run.series[metric]} for runs in both)), default=None)
    if step is None:
        return None
    own, dense = ([run for run in runs if step in run.series[metric]] for runs in both)
    figures = [Figure(metric, step, [run.series[metric][step] for run in runs]) for runs in (own, dense)]
    hours, in_time = mean_of(run.hours_at(step) for run in own), []
    dense_steps = sorted({step for run in dense for step, _ in run.hours})
    dense_hours = [(mean_of(run.hours_at(step) for run in dense), step) for step in dense_steps]
    time_step = None if hours is None else interpolate([point for point in dense_hours if point[0] is not None], hours)
    if time_step is not None:
        in_time = [interpolate(sorted(run.series[metric].items()), time_step) for run in dense]
        in_time = [value for value in in_time if value is not None]
    return *figures, hours, Figure(metric, time_step, in_time) if in_time else None


# ----------------------------------------------------------------------------------------------------------------------
# Grouping.


def group(runs: Sequence[Run]) -> dict[str, list[Experiment]]:
    """Experiments by the table that they belong to, the paper's tables first; those without one are grouped by their data."""
    found: dict[tuple, Experiment] = {}
    for run in sorted(runs, key=lambda run: run.name):
        identity, row = rows.identity_of(run.config), run.experiment.get("name")
        key = (row, repr(sorted(identity.items())))
        if key not in found:
            found[key] = Experiment("", [], identity, rows.changes_of(row, identity) if row else {})
        found[key].runs.append(run)
    experiments = list(found.values())
    label_experiments(experiments)
    for experiment in experiments:
        experiment.baseline = find_baseline(experiment, experiments)
    tables: dict[str, list[Experiment]] = {}
    for experiment in sorted(experiments, key=lambda e: (by_number((e.baseline or e).label), e.is_routed, by_number(e.label))):
        other = f"Other runs on {experiment.runs[0].config.get('data.name') or 'unknown data'}"
        tables.setdefault(str(experiment.about.get("table") or other), []).append(experiment)
    return dict(sorted(tables.items(), key=lambda item: (item[0].startswith("Other runs"), item[0])))


def by_number(label: str) -> list[str | int]:
    """A key that sorts `0_10` after `0_2`."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", label)]


def label_experiments(experiments: Sequence[Experiment]) -> None:
    """Label each by its row and what it changed of it, or by its runs; equal labels also say what differs."""
    for experiment in experiments:
        row = experiment.about.get("name")
        experiment.label = str(row) + changed_label(experiment.changes) if row else shared_name(experiment)
    for label, count in Counter(experiment.label for experiment in experiments).items():
        same = [experiment for experiment in experiments if experiment.label == label] if count > 1 else []
        keys = sorted({key for experiment in same for key in different_keys(same[0], experiment)})[:MAX_WORDS]
        for number, experiment in enumerate(same, start=1):
            words = ", ".join(f"{key}={rows.typed(experiment.identity.get(key))}" for key in keys)
            experiment.label = f"{label} ({words or number})"


def changed_label(changes: dict[str, tuple[object, object]] | None) -> str:
    """` with backbone=DiT-XS/2, batch_size=8 and 2 more`."""
    words = [f"{rows.short_change_key(key)}={rows.typed(new)}" for key, (_, new) in (changes or {}).items()]
    more = f" and {len(words) - MAX_WORDS} more" if len(words) > MAX_WORDS else ""
    return f" with {', '.join(words[:MAX_WORDS])}{more}" if words else ""


def shared_name(experiment: Experiment) -> str:
    """What the names of its runs share beside seeds and numbers; if that is nothing, or a fragment, what the runs are."""
    names = [run.name for run in experiment.runs]
    if len(names) == 1:
        return names[0]
    unseeded = [rows.without_seed(name) for name in names]
    for candidates in (unseeded, [re.sub(r"(^|[-_. ])s?\d+$", "", name) for name in unseeded]):
        if len({*candidates}) == 1 and candidates[0]:
            return candidates[0]
    shared = os.path.commonprefix([re.split(r"([-_. ]+)", name) for name in unseeded])  # of words, not of letters
    words = "".join(shared).strip("-_. ")
    if len(shared) >= 3:  # two words and what separates them
        return words
    config, kind = experiment.runs[0].config, "tread" if experiment.is_routed else "dit"
    return " ".join(str(word) for word in (config.get("data.name"), kind, config.get("model.backbone")) if word)


def find_baseline(experiment: Experiment, experiments: Sequence[Experiment]) -> Experiment | None:
    """The dense experiment that the configuration names, or the only one that differs in nothing but the routes.

    What changed its row is compared only with dense runs that changed theirs alike, beside the routes and the length, and a row
    as it is only with a row as it is.
    """
    named = experiment.about.get("baseline")
    if named:
        found = [other for other in experiments if other.about.get("name") == named and other is not experiment]
        found = [other for other in found if not other.is_routed and common_changes(other) == common_changes(experiment)]
        if not experiment.changes:
            found = [other for other in found if not other.changes]
        elif not experiment.is_routed and experiment.changes.keys() & rows.ROUTING:
            return None  # the routed row without its routes is a dense run itself
        # Of several with this name, the one that differs least, and then the one of the same length.
        distances = [
            (len(other_settings(experiment, one)), "train.num_steps" in different_keys(experiment, one)) for one in found
        ]
        return found[distances.index(min(distances))] if found else None
    if not experiment.is_routed or experiment.about:
        return None
    dense = [other for other in experiments if not other.is_routed]
    for expected in (rows.ROUTING, (*rows.ROUTING, "train.num_steps")):
        if found := [other for other in dense if not set(different_keys(experiment, other)) - set(expected)]:
            return found[0] if len(found) == 1 else None
    return None


def common_changes(experiment: Experiment) -> dict[str, object]:
    """The values that it changed of its row, beside the routes and the length."""
    changes = experiment.changes or {}
    return {key: new for key, (_, new) in changes.items() if key not in (*rows.ROUTING, "train.num_steps")}


def different_keys(one: Experiment, other: Experiment) -> list[str]:
    keys = one.identity.keys() | other.identity.keys()
    return sorted(key for key in keys if one.identity.get(key) != other.identity.get(key))


def other_settings(experiment: Experiment, baseline: Experiment) -> list[str]:
    """The keys that two experiments differ in, beside the routes, the length and what they start from."""
    expected = (*rows.ROUTING, "init_from", "init_state")
    if not (experiment.changes or baseline.changes):  # rows differ in length as the paper's do
        expected = (*expected, "train.num_steps")
    return [key for key in different_keys(experiment, baseline) if key not in expected]
