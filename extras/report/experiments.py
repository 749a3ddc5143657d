"""Runs grouped into experiments: which row of the paper's tables they are, and which dense runs they are compared with."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from omegaconf import DictConfig, OmegaConf

from configs.compose import compose_overrides
from configs.experiments import ROWS
from configs.schema import Role, role_of
from configs.settings import flatten
from extras.report.runs import LOSS, UNGUIDED, Measure, Run

# What a dense run and a routed one may differ in.
ROUTING = tuple(f"model.{key}" for key in ("name", "routes", "selection", "path_drop", "fp32_after_route"))


@dataclass(frozen=True)
class Figure:
    """A measure at one step, of each seed."""

    step: int
    values: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


@dataclass(eq=False)
class Experiment:
    """Runs that differ only in the seed, in where they are and in how they were logged."""

    runs: list[Run]
    identity: dict[str, object]  # the values of the keys that make runs different experiments
    changes: dict[str, tuple[object, object]]  # (the row's value, the runs' value) of each key that differs from the row's
    label: str = ""
    baseline: Experiment | None = None  # the dense experiment that it is compared with

    @property
    def row(self) -> dict:
        return self.runs[0].row

    @property
    def is_routed(self) -> bool:
        is_fused = str(self.identity.get("model.name")).endswith("sprint")  # with ratio 0 too, it is no dense network
        return is_fused or any(route["selection_ratio"] > 0 for route in self.identity["model.routes"])

    def measures(self) -> list[Measure]:
        return [measure for measure in dict.fromkeys(key for run in self.runs for key in run.figures) if measure != LOSS]

    def furthest(self, measure: Measure) -> list[Run]:
        """The runs that have the latest figure: the curve is their mean at every step, so that no seed joins or leaves it."""
        last = max((max(run.figures[measure]) for run in self.runs if measure in run.figures), default=None)
        return [run for run in self.runs if last in run.figures.get(measure, ())]

    def curve(self, measure: Measure) -> list[Figure]:
        values = [run.figures[measure] for run in self.furthest(measure)]
        steps = sorted(set.intersection(*map(set, values))) if values else []
        return [Figure(step, [one[step] for one in values]) for step in steps]

    def hours_at(self, step: float, measure: Measure) -> float:
        """Hours of training until a step, mean over the runs of the measure's curve."""
        return statistics.fmean(run.hours_at(step) for run in self.furthest(measure))

    def paper(self, measure: Measure) -> float | None:
        """The paper's figure, of its own number of samples. None where the runs changed their row."""
        figures = self.row.get("paper" if measure.guidance == UNGUIDED else "paper_guided") or {}
        return None if self.changes else figures.get(measure.metric)

    def has_paper(self, measure: Measure) -> bool:
        """Whether the paper's figure is of as many samples."""
        return self.paper(measure) is not None and self.row["num_samples"] == measure.num_samples


def leading_measure(experiments: Sequence[Experiment]) -> Measure | None:
    """Where possible what the paper reports, then unguided before guided figures, then what most experiments have."""
    counts = Counter(measure for one in experiments for measure in one.measures())
    compared = {measure for one in experiments for measure in one.measures() if one.has_paper(measure)}
    return min(counts, key=lambda one: (one not in compared, one.guidance != UNGUIDED, -counts[one]), default=None)


def curve_measure(experiments: Sequence[Experiment]) -> Measure:
    """The leading measure, with the number of samples that was evaluated most often; LOSS without any.

    FID of 50,000 samples is often there for the last step alone, and FID of 5,000 for many.
    """
    if (leading := leading_measure(experiments)) is None:
        return LOSS
    measures = (measure for one in experiments for measure in one.measures())
    alike = [measure for measure in measures if (measure.metric, measure.guidance) == (leading.metric, leading.guidance)]
    return max(alike, key=lambda measure: sum(len(one.curve(measure)) for one in experiments))


def drop_copies(runs: Sequence[Run]) -> tuple[list[Run], dict[str, str]]:
    """The runs without copies of others, and why the copies are left out, by folder.

    A copy has the settings and the seed of another run, and its figures wherever both have them. The run that got furthest stays.
    """
    kept: dict[tuple, list[Run]] = {}
    problems = {}
    for run in sorted(runs, key=lambda run: -run.step):
        alike = kept.setdefault((run.config["seed"], repr(sorted(identity_of(run.config).items()))), [])
        if other := next((other for other in alike if run.agrees_with(other)), None):
            problems[str(run.path)] = f"a copy of {other.path}: the same settings, seed and figures"
        else:
            alike.append(run)
    return [run for run in runs if str(run.path) not in problems], problems


def group(runs: Sequence[Run]) -> dict[str, list[Experiment]]:
    """Experiments by table: the paper's in their order, then those without a row, by their data."""
    found: dict[tuple, Experiment] = {}
    for run in runs:
        identity = identity_of(run.config)
        key = (run.row.get("name"), repr(sorted(identity.items())))
        if key not in found:
            found[key] = Experiment([], identity, changes_of(run))
        found[key].runs.append(run)
    experiments = list(found.values())
    label_experiments(experiments)
    order = {name: i for i, name in enumerate(ROWS)}
    experiments.sort(key=lambda one: (order.get(one.row.get("name"), len(order)), bool(one.changes), one.is_routed, one.label))
    tables: dict[str, list[Experiment]] = {}
    for one in experiments:
        one.baseline = find_baseline(one, experiments)
        tables.setdefault(one.row.get("table") or f"Other runs on {one.runs[0].config['data.name']}", []).append(one)
    return tables


def identity_of(config: dict) -> dict[str, object]:
    """The values that make two runs different experiments: those of keys with a role in the schema, the seed excepted."""
    identity = {key: value for key, value in config.items() if role_of(key) not in (None, Role.STARTED) and key != "seed"}
    if isinstance(source := identity.get("init_from"), str):
        identity["init_from"] = without_seed(source)
    return identity


def without_seed(name: str) -> str:
    return re.sub(r"[-_.]*seed[-_.=]*\d+", "", name)


@cache
def compose_row(name: str) -> DictConfig:
    return compose_overrides([f"experiment={name}"])


def changes_of(run: Run) -> dict[str, tuple[object, object]]:
    """(the row's value, the run's) of each key that the run changed of its row, without what the row leaves to the data."""
    if run.row.get("name") not in ROWS:
        return {}
    own = {key: run.config[key] for key in ("seed", "output_dir")}
    composed = OmegaConf.merge(compose_row(run.row["name"]), own)
    row = identity_of(flatten(OmegaConf.to_container(composed, resolve=True)))
    changed = {key: (row[key], value) for key, value in identity_of(run.config).items() if key in row and value != row[key]}
    return {key: values for key, values in changed.items() if not (key.startswith("data.") and values[0] is None)}


def change_words(changes: dict[str, tuple[object, object]]) -> str:
    """train.batch_size=8 instead of 256."""
    return ", ".join(f"{key}={new} instead of {old}" for key, (old, new) in changes.items())


def label_experiments(experiments: Sequence[Experiment]) -> None:
    """Label each by its row and what it changed, or by the names of its runs without their seeds; equal labels get a number."""
    taken: Counter[str] = Counter()
    for one in experiments:
        changed = ", ".join(f"{key}={new}" for key, (_, new) in one.changes.items())
        names = dict.fromkeys(without_seed(run.path.name) for run in one.runs)
        label = one.row["name"] + (f" with {changed}" if changed else "") if one.row else " / ".join(names)
        taken[label] += 1
        one.label = label if taken[label] == 1 else f"{label} ({taken[label]})"


def differences_from(one: Experiment, other: Experiment, besides: Iterable[str] = ROUTING) -> dict[str, tuple[object, object]]:
    """(value of `one`, value of `other`) of the keys in which they differ."""
    keys = sorted((one.identity.keys() | other.identity.keys()) - set(besides))
    values = {key: (one.identity.get(key), other.identity.get(key)) for key in keys}
    return {key: pair for key, pair in values.items() if pair[0] != pair[1]}


def find_baseline(experiment: Experiment, experiments: Sequence[Experiment]) -> Experiment | None:
    """The dense experiment of the row that the configuration names, or, without a row, of the same settings beside the routes.

    Of several it is the one with the fewest differences. Runs that changed their row are compared only with dense runs that
    changed theirs alike, beside the routes and the length.
    """
    named = experiment.row.get("baseline")
    if not experiment.is_routed and (named is None or experiment.changes):  # also a routed row without its routes
        return None
    dense = [other for other in experiments if not other.is_routed and other.row.get("name") == named]
    nearest = min(dense, key=lambda other: len(differences_from(experiment, other)), default=None)
    if nearest is None:
        return None
    unlike = differences_from(experiment, nearest, (*ROUTING, "train.num_steps")).keys()
    if experiment.row:
        unlike &= experiment.changes.keys() | nearest.changes.keys()
    return None if unlike else nearest
