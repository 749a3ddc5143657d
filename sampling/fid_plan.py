"""Plan the evaluations of checkpoints by fid.py. A point is a checkpoint with sampling settings."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from checkpoints import store
from checkpoints.checkpoint import Checkpoint, find_all, resolve_checkpoint
from common.errors import Unreadable, UserError
from common.files import REPOSITORY
from configs.differences import differences
from configs.sampling_schema import FidConfig
from configs.schema import Machine, SharedEvaluationSettings
from configs.settings import as_list
from evaluations.images import ImageSet
from evaluations.record import EvaluationRecord, PlannedEvaluation, Results
from evaluations.tables import columns_of, format_settings
from latents.shards import read_manifest
from runtime.processes import FileFingerprint
from sampling.evaluator import fingerprint_weights, open_reference
from sampling.recipe import Recipe, find_weak_checkpoint, fingerprint_files_of
from sampling.score import plan_evaluations, scoring_settings

log = logging.getLogger(__name__)


class TableRow(NamedTuple):
    """An evaluation in the tables of a command: where its record is, what it measures, and what the tables show of that."""

    results: Results
    planned: PlannedEvaluation
    columns: dict[str, object]


@dataclass(frozen=True)
class FidPoint:
    """An evaluation of a fid.py command.

    Attributes:
        planned: What it measures.
        results: The results to which its record is added.
        recipe: Recipe of the samples to evaluate.
    """

    planned: PlannedEvaluation
    results: Results
    recipe: Recipe

    def find(self) -> EvaluationRecord | None:
        """Return the point's record, or None if it is still to do."""
        return self.results.find(self.planned)


@dataclass(frozen=True)
class FidPlan:
    """What fid.py evaluates with checkpoint= or checkpoints=. The main process decides it for all processes.

    Attributes:
        points: All points of the command.
        missing: The points that have no record yet, in the order of their evaluation.
        sampler_keys: Sampler settings of the command. Tables show them even if they have their default values.
        reference: Images with which the points are compared.
        evaluation: The group evaluation, which all points share, except num_samples.
        machine: The group machine. Keys that the command leaves open have the values of the first point's run.
        batch_size: Number of images in a batch, of samples of all runs and of the reference.
        key: Key of the command that names the checkpoints.
    """

    points: list[FidPoint]
    missing: list[FidPoint]
    sampler_keys: list[str]
    reference: ImageSet
    evaluation: SharedEvaluationSettings
    machine: Machine
    batch_size: int
    key: str

    @property
    def rows(self) -> list[TableRow]:
        return [TableRow(point.results, point.planned, self.columns(point)) for point in self.points]

    def columns(self, point: FidPoint) -> dict[str, object]:
        """Return what tables and messages show of a point."""
        of_sampler = {key: getattr(point.recipe.config.sampler, key) for key in self.sampler_keys}
        return {"run": None, "step": None, **of_sampler, **columns_of(point.planned)}

    @cached_property
    def differing_columns(self) -> set[str]:
        """The columns in which points differ."""
        rows = [self.columns(point) for point in self.points]
        names = {name for row in rows for name in row}
        return {name for name in names if len({str(row.get(name)) for row in rows}) > 1}

    def file_fingerprints(self) -> list[FileFingerprint]:
        """Return what this process sees of the files that all processes read."""
        reference = FileFingerprint("evaluation.reference", self.reference.path, self.reference.spot_check())
        files = fingerprint_files_of([point.recipe for point in self.points], self.key)
        return [*files, *fingerprint_weights(self.evaluation), reference]


def plan_checkpoints(cfg: FidConfig) -> FidPlan:
    """Plan the evaluation of checkpoints: each of them with each combination of the listed settings."""
    checkpoints = find_checkpoints(cfg)
    recipes = choose_recipes(cfg, checkpoints)
    first = recipes[0].config
    evaluation = check_evaluations_agree([recipe.config.evaluation for recipe in recipes])
    reference = open_reference(
        evaluation.reference,
        "evaluation.reference",
        evaluation.all_detectors,
        resolution=common_resolution(checkpoints),
        background=evaluation.background,
        encoded_with=settings_of_latents(checkpoints),
    )
    points = points_of_recipes(recipes, scoring_settings(evaluation, reference), cfg.output)
    plan = FidPlan(
        points=points,
        missing=find_missing(points),
        sampler_keys=[key for key, value in cfg.sampler.items() if value is not None],
        reference=reference,
        evaluation=evaluation,
        machine=first.machine,
        batch_size=first.sampling.batch_size,
        key="checkpoint" if cfg.checkpoints is None else "checkpoints",
    )
    log_plan(len(plan.missing), plan.rows)
    return plan


def log_plan(num_missing: int, rows: Sequence[TableRow]) -> None:
    folders = ", ".join(dict.fromkeys(str(row.results.folder) for row in rows))
    numbers = " and ".join(f"{n:,}" for n in sorted({row.planned.settings["num_samples"] for row in rows}))
    log.info("%d of %d evaluations to do, of %s samples, in %s", num_missing, len(rows), numbers, folders)


def find_checkpoints(cfg: FidConfig) -> list[Checkpoint]:
    """Find the checkpoints that the command names, and verify the files that sampling reads."""
    files = store.files_for_sampling(as_list(cfg.sampling.weights or "ema"), cfg.sampling.ema_length is not None)
    if cfg.checkpoints is None:
        return [resolve_checkpoint(Path(folder), "checkpoint", files) for folder in as_list(cfg.checkpoint)]
    found = find_all(Path(cfg.checkpoints) / "checkpoints", files)
    if not found:
        raise UserError(f"checkpoints={cfg.checkpoints} is not the folder of a run with checkpoints")
    return found


def choose_recipes(cfg: FidConfig, checkpoints: Sequence[Checkpoint]) -> list[Recipe]:
    """Return the recipe for every checkpoint and combination of listed values.

    Combinations that only some of a run's `checkpoints` do not support are left out with a warning: `ema_length` needs snapshots
    of several earlier steps. So are those of a checkpoint that a running trainer removes meanwhile.

    Raises UserError if a combination does not fit any checkpoint, or not one that the command names.
    """
    find_weak = cache(find_weak_checkpoint)
    recipes: list[Recipe] = []
    refused: dict[str, list[UserError]] = defaultdict(list)  # by combination
    num_tried: Counter[str] = Counter()  # number of checkpoints, whose runs may list other guidances
    for checkpoint in checkpoints:
        for chosen in cfg.choices(checkpoint.config):
            combination = chosen.model_dump_json()
            num_tried[combination] += 1
            try:
                recipes.append(Recipe.for_checkpoint(checkpoint, chosen, cfg.evaluation, find_weak))
            except UserError as e:
                refused[combination].append(e)
                if cfg.checkpoints is None or isinstance(e, Unreadable):
                    raise
    for combination, errors in refused.items():
        if len(errors) == num_tried[combination]:
            raise errors[-1]
    for error in itertools.chain.from_iterable(refused.values()):
        log.warning("%s; this point is left out", error)
    return recipes


def check_evaluations_agree(evaluations: Sequence[SharedEvaluationSettings]) -> SharedEvaluationSettings:
    """Return the group evaluation, whose keys of fid.py must be equal for all points, except num_samples."""
    keys = SharedEvaluationSettings.model_fields.keys() - {"num_samples"}
    first, *others = [{"evaluation": evaluation.model_dump(include=keys)} for evaluation in evaluations]
    for other in others:
        if changed := differences(first, other):
            raise UserError(
                f"the checkpoints have different evaluation settings ({'; '.join(map(str, changed))}); set them in the command"
            )
    return evaluations[0]


def common_resolution(checkpoints: Sequence[Checkpoint]) -> int | None:
    """Return the resolution of the runs' images. Raises UserError if there are several."""
    sizes = {checkpoint.config.data.resolution: checkpoint.path for checkpoint in checkpoints}
    if len(sizes) > 1:
        raise UserError(f"checkpoints of different resolutions need separate commands: {format_settings(sizes)}")
    return next(iter(sizes))


def settings_of_latents(checkpoints: Iterable[Checkpoint]) -> list[dict[str, object]]:
    """Return the settings that encoded each run's latents, if the latents are on this machine."""
    settings = []
    for checkpoint in checkpoints:
        with contextlib.suppress(UserError):  # a damaged manifest does not stop an evaluation
            settings.append(read_manifest(checkpoint.config.data.path).get("settings", {}))
    return settings


def points_of_recipes(recipes: Sequence[Recipe], scoring: dict[str, object], output: str | None) -> list[FidPoint]:
    """Return the point of each recipe, without points that measure the same. Check that their results can be written.

    Args:
        scoring: The `scoring_settings` of the command.
        output: Folder of the results, or None for the folders of the runs.
    """
    planned = plan_evaluations(recipes, scoring)
    results = open_results(output, list(dict.fromkeys(recipe.checkpoint for _, recipe in planned)))
    return [FidPoint(evaluation, results[recipe.checkpoint], recipe) for evaluation, recipe in planned]


def open_results(output: str | None, checkpoints: Sequence[Checkpoint]) -> dict[Checkpoint, Results]:
    """Return the results of each checkpoint, in `output` or else in its run. Several folders are optional: each may fail."""
    folders = {checkpoint: given_output(output) or results_folder(checkpoint) for checkpoint in checkpoints}
    runs = {folder: None if output else checkpoint.run_folder for checkpoint, folder in folders.items()}
    opened = {folder: Results(folder, run, is_optional=len(runs) > 1).ensure_writable() for folder, run in runs.items()}
    return {checkpoint: opened[folder] for checkpoint, folder in folders.items()}


def given_output(output: str | None) -> Path | None:
    """Return the folder that `output` names. It can be a link, unlike the folders that results have by default."""
    return output and (Path(output).resolve() if Path(output).is_symlink() else Path(output))


def results_folder(checkpoint: Checkpoint) -> Path:
    """Return <run>/evaluations for a checkpoint in a run, or a folder next to a checkpoint outside any run."""
    path = checkpoint.path.resolve()
    folder = (checkpoint.run_folder or path.parent) / "evaluations"
    if folder == REPOSITORY / "evaluations":  # this folder contains source code, not results
        return path.with_name(f"{path.name}_evaluations")
    return folder


def find_missing(points: Sequence[FidPoint]) -> list[FidPoint]:
    """Return the points that have no record yet, in the order of their evaluation."""
    return in_random_order([point for point in points if not point.find()])


def in_random_order(points: Sequence[FidPoint]) -> list[FidPoint]:
    """Return the points in a new random order, so that commands at the same time rarely meet at a point.

    The points of a network stay together, because loading and compiling it takes long.
    """
    draw = random.SystemRandom().random  # no seed may give two commands the same order
    places: dict[object, float] = defaultdict(draw)
    return sorted(points, key=lambda point: (places[point.recipe.weights_source], draw()))
