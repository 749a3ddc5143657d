"""Group runs into experiments, and find the dense baseline of each."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from evaluations.record import PlannedEvaluation
from evaluations.result_settings import sampler_for_results
from extras.report.rows import changes_of, config_of_row, identity_of, runs_of_other_rows
from extras.report.runs import LOSS, UNGUIDED, Measure, Run, without_seed

# Settings in which a routed run may differ from its dense baseline.
ROUTING = tuple(f"model.{key}" for key in ("name", "routes", "selection", "path_drop", "fp32_after_route"))


@dataclass(eq=False)
class Experiment:
    """A group of runs that differ only in seed, paths and logging, so that the first run has the settings of all."""

    runs: list[Run]  # one per seed
    data_hash: str | None  # hash of the latents, or None if it is unknown
    label: str = ""  # what the tables call it: `settings_label`, and the latents if several experiments have the same
    baseline: Experiment | None = None  # the dense experiment to compare this one with

    @property
    def row(self) -> dict:
        return self.runs[0].row

    @cached_property
    def identity(self) -> dict[str, object]:
        """Return the settings that distinguish experiments."""
        return identity_of(self.runs[0].cfg)

    @cached_property
    def changes(self) -> dict[str, tuple[object, object]]:
        """Return (value in the row, value in the runs) for each key that the runs changed in their row."""
        return changes_of(self.runs[0])

    def settings_label(self) -> str:
        """Return the row and its changed settings, or run names without seeds."""
        label = self.row.get("name") or " / ".join(sorted({without_seed(run.path.name) for run in self.runs}))
        changed = ", ".join(f"{key}={new}" for key, (_, new) in self.changes.items())
        resumed = "; ".join(self.runs[0].changes_on_resume)
        return label + (f" with {changed}" if changed else "") + (f", resumed {resumed}" if resumed else "")

    @property
    def is_routed(self) -> bool:
        is_sprint = str(self.identity["model.name"]).endswith("sprint")  # SPRINT is never dense, even if no token skips
        return is_sprint or any(route["selection_ratio"] > 0 for route in self.identity["model.routes"])

    def measures(self) -> list[Measure]:
        return [measure for measure in dict.fromkeys(key for run in self.runs for key in run.figures) if measure != LOSS]

    def longest_runs(self, measure: Measure) -> list[Run]:
        """Return the runs that have the latest figure. `curve` uses only these runs, so that every step has the same seeds."""
        last = max((max(run.figures[measure]) for run in self.runs if measure in run.figures), default=None)
        return [run for run in self.runs if last in run.figures.get(measure, ())]

    def curve(self, measure: Measure) -> dict[int, dict[int, float]]:
        """Return the values by seed for each step, sorted by step. The result is empty if no run has the measure."""
        curves = {run.cfg.seed: run.figures[measure] for run in self.longest_runs(measure)}
        steps = sorted(set.intersection(*map(set, curves.values()))) if curves else []
        return {step: {seed: curve[step] for seed, curve in curves.items()} for step in steps}

    def last_values(self, measure: Measure) -> tuple[int, dict[int, float]]:
        """Return the last step of a measure that the experiment has, and its values by seed."""
        return [*self.curve(measure).items()][-1]

    def hours_at(self, step: float, measure: Measure) -> float:
        """Return the hours of training until a step, averaged over the runs in the measure's curve."""
        return statistics.fmean(run.hours_at(step) for run in self.longest_runs(measure))

    def is_measured_like_the_row(self, measure: Measure, step: int) -> bool:
        """Return whether a figure is of the row's last step, sampled as the row samples from the EMA of the checkpoint."""
        row = config_of_row(self.row.get("name"), self.runs[0])
        sampling = row.sampling.model_dump(include={"labels", "rounding"}) | {"network_precision": row.sampling.precision}
        expected = PlannedEvaluation(settings={"weights": "ema", **sampling, **sampler_for_results(row.sampler)})
        free = {"reference", "autoencoder", "first_seed", "dinov2_weights"}
        free |= {"detector_weights"} if row.evaluation.detector_weights else set()
        values = {key: value for key, value in measure.other_settings if key not in free}
        return step == self.identity["train.num_steps"] and values == expected.comparable_settings

    def paper(self, measure: Measure) -> float | None:
        """Return the paper's figure for the same number of samples, or None if it is missing or the runs changed the row."""
        if self.changes or self.row.get("num_samples") != measure.num_samples:
            return None
        by_guidance = self.row["paper_by_guidance"]
        if measure.guidance == UNGUIDED:
            figures = self.row.get("paper")
        elif dict(measure.guidance_settings).get("guidance", "cfg") == "cfg":
            figures = self.row.get("paper_guided")
        else:
            figures = next((by_guidance[arguments] for arguments in by_guidance if is_guided_by(measure, arguments)), None)
        return (figures or {}).get(measure.metric)


def is_guided_by(measure: Measure, arguments: str) -> bool:
    """Return whether a measure's guidance has only the values in arguments such as `guidance=sparse guidance.r_strong=0.5`.

    Arguments do not state the scale, nor the bounds of `guidance=interval`. A value also matches the end of the measure's value,
    such as the folder name of a checkpoint.
    """
    values = {key: value for key, value in measure.guidance_settings if value is not None}
    wanted = dict(argument.split("=", 1) for argument in arguments.split())
    unstated = {"cfg_scale", "guidance.w"}
    if wanted["guidance"] == "interval":
        unstated |= {"guidance.level_lo", "guidance.level_hi"}
    has_values = all(str(values.get(key, "")).endswith(value) for key, value in wanted.items())
    return has_values and values.keys() <= wanted.keys() | unstated


def curve_measure(dense: Experiment, routed: Experiment) -> Measure | None:
    """Choose a measure for comparing two experiments over training. Return None if the experiments share no measure.

    Measures with a paper figure come first, then unguided measures. The function prefers the number of samples with the most
    evaluations, because FID of 50,000 samples often exists only for the last step, but FID of 5,000 samples for many steps.
    """
    shared = [measure for measure in routed.measures() if measure in dense.measures()]
    leading = min(shared, key=lambda m: (routed.paper(m) is None, m.guidance != UNGUIDED), default=None)
    alike = [m for m in shared if (m.metric, m.guidance) == (leading.metric, leading.guidance)]
    return max(alike, key=lambda m: len(dense.curve(m)) + len(routed.curve(m)), default=None)


def group(runs: Sequence[Run]) -> tuple[dict[str, list[Experiment]], dict[str, str]]:
    """Return the experiments of each table, and the reason for each run that is left out, by path.

    The papers' tables come first, in alphabetical order. In a table, a dense row precedes the rows that are compared with it.
    Runs without a row follow in one table per data set. A label consists of the row and its changed settings, or of run names
    without seeds. Among runs with the same seed, only the longest run counts. Runs on other latents are other experiments, and so
    are runs that a resume continued with other settings. A run without checkpoints, whose latents are unknown, joins the longest
    run.
    """
    problems: dict[str, str] = {}
    runs = sorted([*runs, *runs_of_other_rows(runs)], key=lambda run: -run.step)
    settings = [(run.row.get("name"), repr(sorted(identity_of(run.cfg).items())), run.changes_on_resume) for run in runs]
    # The latents of the longest run with these settings, which comes last.
    data_of = {key: run.data_hash for key, run in zip(reversed(settings), reversed(runs)) if run.data_hash}
    by_seed: dict[tuple, dict[int, Run]] = {}  # the runs of each experiment
    for key, run in zip(settings, runs):
        longest = by_seed.setdefault((key, run.data_hash or data_of.get(key)), {}).setdefault(run.cfg.seed, run)
        if longest is not run:
            problems[str(run.path)] = f"it has the settings and the seed of {longest.path}"
    experiments = [Experiment([*found.values()], data_hash) for (_, data_hash), found in by_seed.items()]
    counts = Counter(experiment.settings_label() for experiment in experiments)
    for experiment in experiments:
        experiment.label = experiment.settings_label()
        if counts[experiment.label] > 1 and experiment.data_hash:
            experiment.label += f" on latents {experiment.data_hash[:8]}"
    experiments.sort(key=order_in_report)
    tables: dict[str, list[Experiment]] = {}
    for experiment in experiments:
        experiment.baseline = find_baseline(experiment, experiments)
        name = experiment.row.get("table") or f"Other runs on {experiment.runs[0].cfg.data.name}"
        tables.setdefault(name, []).append(experiment)
    return tables, problems


def order_in_report(experiment: Experiment) -> tuple:
    """Return a key for sorting experiments (see `group`)."""
    name, dense = (str(experiment.row.get(key) or "") for key in ("name", "baseline"))
    place = (not experiment.row, str(experiment.row.get("table")), dense or name, dense != "", name)
    return (*place, bool(experiment.changes), experiment.is_routed, experiment.label)


def differences_from(first: Experiment, second: Experiment) -> dict[str, tuple[object, object]]:
    """Return (value in `first`, value in `second`) for each key that differs, except the keys in ROUTING."""
    keys = sorted((first.identity.keys() | second.identity.keys()) - set(ROUTING))
    values = {key: (first.identity.get(key), second.identity.get(key)) for key in keys}
    return {key: pair for key, pair in values.items() if pair[0] != pair[1]}


def find_baseline(experiment: Experiment, experiments: Sequence[Experiment]) -> Experiment | None:
    """Find the dense experiment that the row names, on the same latents. Without a row, it differs only in routes and length.

    The candidate with the fewest differences is chosen. If the runs changed settings of their row, the dense runs must have the
    same changes, except in routes and length.
    """
    named = experiment.row.get("baseline")
    if not experiment.is_routed and (named is None or experiment.changes):  # includes a routed row whose routes were removed
        return None

    def is_comparable(dense: Experiment) -> bool:
        is_elsewhere = None not in (dense.data_hash, experiment.data_hash) and dense.data_hash != experiment.data_hash
        if dense.is_routed or dense.row.get("name") != named or is_elsewhere:
            return False
        different = differences_from(experiment, dense).keys() - {"train.num_steps"}
        return not (different & (experiment.changes.keys() | dense.changes.keys()) if experiment.row else different)

    comparable = filter(is_comparable, experiments)
    return min(comparable, key=lambda dense: len(differences_from(experiment, dense)), default=None)
