"""Decide with which checkpoints and recipes a run starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from checkpoints.checkpoint import Checkpoint, read_class_names
from checkpoints.run import RunFolder
from checkpoints.run_start import lock_run_and_find_checkpoint, select_initial_checkpoint
from configs.schema import TrainConfig
from evaluations.images import ImageSet
from latents.dataset import LatentDataset
from runtime.processes import FileFingerprint, fingerprint_file, fingerprint_folder
from sampling.evaluator import fingerprint_weights, open_reference
from sampling.recipe import Recipe, fingerprint_files_of, resolve_weak_checkpoint
from sampling.score import scoring_settings
from training import tracking


@dataclass(frozen=True)
class TrainPlan:
    """With what a run starts. The main process decides it for all processes.

    Attributes:
        newest: Checkpoint from which the run resumes, or None if it starts at its first step.
        initial: Checkpoint of init_from with which the run begins, or None.
        initial_classes: Names of the classes of `initial`, or None if they are unknown.
        grid_recipe: Recipe of the sample grids, or None without grids.
        evaluation_recipes: Recipe for each guidance whose samples are scored.
        reference: Images with which these samples are compared, or None.
        scoring: What the scores depend on besides the samples (`scoring_settings`).
    """

    newest: Checkpoint | None
    initial: Checkpoint | None
    initial_classes: list[str] | None
    grid_recipe: Recipe | None
    evaluation_recipes: list[Recipe]
    reference: ImageSet | None
    scoring: dict[str, object]

    @property
    def recipes(self) -> list[Recipe]:
        return [*self.evaluation_recipes, *([self.grid_recipe] if self.grid_recipe else [])]

    def file_fingerprints(
        self, cfg: TrainConfig, dataset: LatentDataset, validation: LatentDataset | None
    ) -> list[FileFingerprint]:
        """Return what this process sees of the files that all processes read."""
        files = {"output_dir": self.newest, "init_from": self.initial}
        seen = [fingerprint_folder(key, checkpoint.manifest_file) for key, checkpoint in files.items() if checkpoint]
        seen += fingerprint_files_of(self.recipes)
        data = {"data.path": dataset, "evaluation.validation": validation}
        seen += [FileFingerprint(key, latents.path, latents.hash) for key, latents in data.items() if latents is not None]
        if (reference := self.reference) is not None:
            seen.append(FileFingerprint("evaluation.reference", reference.path, reference.spot_check()))
            seen += fingerprint_weights(cfg.evaluation)
        if file := getattr(cfg.alignment, "encoder_weights", None):
            seen.append(fingerprint_file("alignment.encoder_weights", Path(file)))
        return seen


def plan_training(cfg: TrainConfig, run: RunFolder, dataset: LatentDataset) -> TrainPlan:
    """Find the checkpoints with which a run starts, and check all that can be checked before slow work.

    Lock the folder of a run that exists, and rename its damaged checkpoints.
    """
    tracking.check_login(cfg.wandb.mode)
    initial = select_initial_checkpoint(run, cfg)
    newest = lock_run_and_find_checkpoint(run, cfg)
    tracking.check_folder(run, cfg.wandb.mode)
    if cfg.evaluation.every:
        run.results.ensure_writable()
    resolve_weak_checkpoint.cache_clear()
    grid = plan_grid(cfg)
    evaluation_recipes = plan_evaluation_recipes(cfg)
    reference, scoring = plan_scoring(cfg, dataset) if evaluation_recipes else (None, {})
    initial_classes = initial and read_class_names(initial)
    return TrainPlan(newest, initial, initial_classes, grid, evaluation_recipes, reference, scoring)


def plan_grid(cfg: TrainConfig) -> Recipe | None:
    return Recipe.in_training(cfg, cfg.guidance[-1]) if cfg.sample_grid.every else None


def plan_evaluation_recipes(cfg: TrainConfig) -> list[Recipe]:
    """Return a recipe for each guidance with other samples. There is none if only the validation loss is measured."""
    evaluation = cfg.evaluation
    if not evaluation.every or (evaluation.validation and evaluation.reference is None):
        return []
    recipes: list[Recipe] = []
    for recipe in (Recipe.in_training(cfg, guidance) for guidance in cfg.guidance):
        # For example, intervals have no effect at cfg_scale=1.
        if all(recipe.result_settings() != other.result_settings() for other in recipes):
            recipes.append(recipe)
    return recipes


def plan_scoring(cfg: TrainConfig, dataset: LatentDataset) -> tuple[ImageSet, dict[str, object]]:
    """Open the reference. Return it, and what the scores depend on besides the samples."""
    evaluation = cfg.evaluation
    reference = open_reference(
        evaluation.reference,
        "evaluation.reference",
        evaluation.all_detectors,
        resolution=cfg.data.resolution,
        background=evaluation.background,
        encoded_with=[dataset.encode_settings],
    )
    return reference, scoring_settings(evaluation, reference)
