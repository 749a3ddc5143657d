"""Decide how a run starts, and with which recipes it samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from checkpoints.run import RunFolder
from checkpoints.store import WEIGHTS
from configs.schema import TrainConfig
from evaluations.images import ImageSet
from evaluations.record import PlannedEvaluation
from latents.dataset import LatentDataset
from runtime.processes import FileFingerprint, fingerprint_file, fingerprint_folder
from sampling.evaluator import fingerprint_weights, open_reference
from sampling.recipe import FindWeak, Recipe, find_weak_checkpoint, fingerprint_files_of
from sampling.score import plan_evaluations, scoring_settings
from training import tracking
from training.start import RunStart, decide_start


@dataclass(frozen=True)
class TrainPlan:
    """What a run starts and samples with. The main process decides it for all processes.

    Attributes:
        start: How the command starts the run, and with which checkpoint.
        grid_recipe: Recipe of the sample grids, or None without grids.
        evaluations: For each guidance whose samples are scored, what this measures, and the recipe of the samples.
        reference: Images with which these samples are compared, or None.
    """

    start: RunStart
    grid_recipe: Recipe | None
    evaluations: list[tuple[PlannedEvaluation, Recipe]]
    reference: ImageSet | None

    @property
    def recipes(self) -> list[Recipe]:
        return [*(recipe for _, recipe in self.evaluations), *([self.grid_recipe] if self.grid_recipe else [])]

    def file_fingerprints(
        self, cfg: TrainConfig, dataset: LatentDataset, validation: LatentDataset | None
    ) -> list[FileFingerprint]:
        """Return what this process sees of the files that all processes read."""
        seen = fingerprint_files_of(self.recipes)
        if (checkpoint := self.start.checkpoint) is not None:
            key = "output_dir" if self.start.kind == "resume" else "init_from"
            seen.append(fingerprint_folder(key, checkpoint.manifest_file))
            raw = checkpoint.path / WEIGHTS["raw"]
            seen.append(FileFingerprint(key, raw, raw.exists()))  # init_state=weights takes the EMA if it is missing
        data = {"data.path": dataset, "evaluation.validation": validation}
        seen += [FileFingerprint(key, latents.path, latents.hash) for key, latents in data.items() if latents is not None]
        if (reference := self.reference) is not None:
            seen.append(FileFingerprint("evaluation.reference", reference.path, reference.spot_check()))
            seen += fingerprint_weights(cfg.evaluation)
        if file := getattr(cfg.alignment, "encoder_weights", None):
            seen.append(fingerprint_file("alignment.encoder_weights", Path(file)))
        return seen


def plan_training(cfg: TrainConfig, run: RunFolder, dataset: LatentDataset) -> TrainPlan:
    """Decide how the run starts, and check all that can be checked before slow work.

    If the run's folder exists, first lock it, and remove what interrupted writes have left in it.
    """
    tracking.check_login(cfg.wandb.mode)
    if run.path.exists():
        run.open()
    start = decide_start(run, cfg)
    tracking.check_folder(run, cfg.wandb.mode)
    if cfg.evaluation.every:
        run.results.ensure_writable()
    find_weak = cache(find_weak_checkpoint)
    grid = plan_grid(cfg, find_weak)
    evaluations, reference = plan_scores(cfg, dataset, find_weak)
    return TrainPlan(start, grid, evaluations, reference)


def plan_grid(cfg: TrainConfig, find_weak: FindWeak) -> Recipe | None:
    if not cfg.sample_grid.every:
        return None
    return Recipe.build(cfg, cfg.guidance[-1], find_weak=find_weak)


def plan_scores(
    cfg: TrainConfig, dataset: LatentDataset, find_weak: FindWeak
) -> tuple[list[tuple[PlannedEvaluation, Recipe]], ImageSet | None]:
    """Plan the evaluations of samples, and open the reference. There are none if only the validation loss is measured."""
    evaluation = cfg.evaluation
    if not evaluation.every or (evaluation.validation and evaluation.reference is None):
        return [], None
    recipes = [Recipe.build(cfg, guidance, find_weak=find_weak) for guidance in cfg.guidance]
    reference = open_reference(
        evaluation.reference,
        "evaluation.reference",
        evaluation.all_detectors,
        resolution=cfg.data.resolution,
        background=evaluation.background,
        encoded_with=[dataset.encode_settings],
    )
    return plan_evaluations(recipes, scoring_settings(evaluation, reference)), reference
