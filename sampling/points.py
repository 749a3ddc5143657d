"""Plan the evaluations of a fid.py command. A point is a checkpoint with sampling settings, or a set of images on disk."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from checkpoints import store
from checkpoints.checkpoint import Checkpoint, find_all, read_class_names, resolve_checkpoint
from common.errors import UserError, name_key
from common.files import REPOSITORY
from common.images import are_same_colour
from configs.schema import FidConfig, Measuring, differences
from configs.settings import as_list
from evaluations.images import ImageSet
from evaluations.record import Evaluation, Results
from evaluations.tables import columns_of, format_settings
from latents.image_sets import open_image_set
from latents.shards import read_manifest_at
from runtime.compilation import log_compile_mode
from runtime.processes import Seen, see_file
from sampling.evaluator import open_reference
from sampling.recipe import Recipe, see_weak_checkpoints
from sampling.score import settings_of_scores

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """An evaluation of a fid.py command.

    Attributes:
        wanted: The evaluation without figures.
        results: The results to which the figures are added.
        cfg: The command's settings with one value per key, without keys that are left to the run.
        recipe: How to sample, or None for images on disk.
        typed: Sampler settings that the command gives. Tables show them even if they have their default values.
        class_names: Names of the network's classes, or None if they are unknown.
    """

    wanted: Evaluation
    results: Results
    cfg: FidConfig
    recipe: Recipe | None = None
    typed: dict[str, object] = field(default_factory=dict)
    class_names: list[str] | None = None

    @property
    def checkpoint(self) -> Checkpoint | None:
        return self.recipe and self.recipe.checkpoint

    @property
    def columns(self) -> dict[str, object]:
        columns = columns_of(self.wanted)
        return {**{key: columns[key] for key in ("run", "step") if key in columns}, **self.typed, **columns}


class Choice(NamedTuple):
    """A checkpoint with a combination of listed values: the settings, the recipe, and the sampler settings that were given."""

    cfg: FidConfig
    recipe: Recipe
    typed: dict[str, object]


@dataclass(frozen=True)
class EvaluationPlan:
    """What a fid.py command evaluates. The main process decides it for all processes.

    Attributes:
        points: All points of the command.
        missing: Indices of the points that have no results yet, in the order of their evaluation.
        images: Images on disk to evaluate instead of checkpoints, or None.
    """

    points: list[Point]
    missing: list[int]
    reference: ImageSet
    images: ImageSet | None

    @property
    def cfg(self) -> FidConfig:
        """Settings of the first point. All points share the group evaluation, except num_samples.

        The settings of this point for the machine hold for all, except `compile`.
        """
        return self.points[0].cfg

    def seen(self) -> list[Seen]:
        """Return what this process sees of the files that all processes read."""
        recipes = [point.recipe for point in self.points if point.recipe]
        key = "checkpoint" if self.cfg.checkpoints is None else "checkpoints"
        files = dict.fromkeys(recipe.checkpoint.manifest for recipe in recipes)
        sets = {"evaluation.reference": self.reference} | ({"images": self.images} if self.images else {})
        opened = [Seen(name, images.path, images.spot_check()) for name, images in sets.items()]
        return [*(see_file(key, file) for file in files), *see_weak_checkpoints(recipes), *opened]


def plan_evaluations(cfg: FidConfig, device: torch.device) -> EvaluationPlan:
    """Find the points of a command, and check all that can be checked before slow work."""
    points, reference, images = plan_images_on_disk(cfg, device) if cfg.images else plan_checkpoints(cfg, device)
    missing = in_random_order(points, [i for i, point in enumerate(points) if not point.results.find(point.wanted)])
    folders = ", ".join(dict.fromkeys(str(point.results.folder) for point in points))
    numbers = " and ".join(f"{number:,}" for number in sorted({point.cfg.evaluation.num_samples for point in points}))
    log.info("%d of %d evaluations to do, of %s samples, in %s", len(missing), len(points), numbers, folders)
    return EvaluationPlan(points, missing, reference, images)


def plan_checkpoints(cfg: FidConfig, device: torch.device) -> tuple[list[Point], ImageSet, None]:
    """Return the points of checkpoints, and the reference."""
    checkpoints = find_checkpoints(cfg)
    choices = choose_recipes(cfg, checkpoints)
    evaluation = check_evaluations_agree([choice.cfg for choice in choices])
    log_compile_mode(choices[0].cfg.machine.compile, device)
    sizes = {checkpoint.config.data.resolution: checkpoint.path for checkpoint in checkpoints}
    if len(sizes) > 1:
        raise UserError(f"checkpoints of different resolutions need separate commands: {format_settings(sizes)}")
    needs = evaluation.all_detectors, *sizes, evaluation.background, settings_of_latents(checkpoints)
    reference = open_reference(evaluation.reference, "evaluation.reference", *needs)
    return points_of_choices(choices, reference), reference, None


def plan_images_on_disk(cfg: FidConfig, device: torch.device) -> tuple[list[Point], ImageSet, ImageSet]:
    """Return the point of images on disk, the reference, and the images."""
    images = open_images_to_evaluate(cfg)
    filled = cfg.of_images(len(images), images.background)
    check_images(images, filled)
    log_compile_mode(filled.machine.compile, device)
    needs = filled.evaluation.all_detectors, images.shape[1], filled.evaluation.background
    reference = open_reference(filled.evaluation.reference, "evaluation.reference", *needs)
    warn_of_jpegs(images, reference)
    return [point_of_images(filled, images, reference)], reference, images


def find_checkpoints(cfg: FidConfig) -> list[Checkpoint]:
    """Find the checkpoints that the command names, and verify the files that sampling reads."""
    reads = store.files_for_sampling(as_list(cfg.sampling.weights or "ema"), cfg.sampling.ema_length is not None)
    if cfg.checkpoints is None:
        return [resolve_checkpoint(Path(folder), "checkpoint", reads) for folder in as_list(cfg.checkpoint)]
    found = find_all(Path(cfg.checkpoints) / "checkpoints", reads)
    if not found:
        raise UserError(f"checkpoints={cfg.checkpoints} is not the folder of a run with checkpoints")
    return found


def open_images_to_evaluate(cfg: FidConfig) -> ImageSet:
    with name_key("images"):
        images = open_image_set(cfg.images, cfg.convert_to_rgb, background=cfg.evaluation.background or "white")
    if len(images) < 2:
        problem = "holds only one image, and a Frechet distance needs 2" if len(images) else "holds statistics but no images"
        raise UserError(f"images={cfg.images} {problem}")
    return images


def check_images(images: ImageSet, cfg: FidConfig) -> None:
    """Raise UserError if images on disk were made with another background, or if there are too few."""
    evaluation = cfg.evaluation
    if images.background is not None and not are_same_colour(images.background, evaluation.background):
        made = f"images={cfg.images} was made with background={images.background}"
        raise UserError(f"{made}, but evaluation.background={evaluation.background}")
    if evaluation.num_samples > len(images):
        problem = f"{cfg.images} holds {len(images)} images; make more, or lower it"
        raise UserError(f"evaluation.num_samples={evaluation.num_samples}, but {problem}")


def warn_of_jpegs(images: ImageSet, reference: ImageSet) -> None:
    """Warn if only one of two folders holds JPEG files."""
    formats = [{file.suffix.lower() in (".jpg", ".jpeg") for file in getattr(s, "files", ())} for s in (images, reference)]
    if {True} in formats and {False} in formats:
        message = "images=%s and evaluation.reference=%s: one set is JPEG and the other is not, which changes distances"
        log.warning(message, images.path, reference.path)


def choose_recipes(cfg: FidConfig, checkpoints: Sequence[Checkpoint]) -> list[Choice]:
    """Return the recipe for every checkpoint and combination of listed values.

    Combinations that only some of a run's `checkpoints` do not support are left out with a warning: `ema_length` needs snapshots
    of several earlier steps.

    Raises UserError if a combination does not fit any checkpoint, or not one that the command names.
    """
    chosen: list[Choice] = []
    refused: dict[int, list[UserError]] = {}  # for each combination
    for checkpoint in checkpoints:
        for number, listed in enumerate(cfg.choices(checkpoint.config)):
            try:
                filled = listed.of_run(checkpoint.config, checkpoint.step)
                recipe = Recipe.for_checkpoint(checkpoint, filled)
            except UserError as e:
                refused.setdefault(number, []).append(e)
                is_unreadable = isinstance(e.__cause__, OSError) or not checkpoint.path.exists()
                if cfg.checkpoints is None or is_unreadable or len(refused[number]) == len(checkpoints):
                    raise
                continue
            typed = {key: getattr(filled.sampler, key) for key, value in listed.sampler.items() if value is not None}
            chosen.append(Choice(filled, recipe, typed))
    for error in itertools.chain.from_iterable(refused.values()):
        log.warning("%s; this point is left out", error)
    return chosen


def check_evaluations_agree(chosen: Sequence[FidConfig]) -> Measuring:
    """Return the group evaluation, which must be equal for all points, except num_samples."""
    first, *others = [{"evaluation": cfg.evaluation.model_dump(exclude={"num_samples"})} for cfg in chosen]
    for other in others:
        if changed := differences(first, other):
            raise UserError(f"the checkpoints have different evaluation settings ({'; '.join(changed)}); set them in the command")
    return chosen[0].evaluation


def settings_of_latents(checkpoints: Iterable[Checkpoint]) -> dict[str, object]:
    """Return the settings that encoded the runs' latents, if the latents are on this machine."""
    settings = {}
    for checkpoint in checkpoints:
        with contextlib.suppress(UserError):  # a damaged manifest does not stop an evaluation
            settings |= read_manifest_at(checkpoint.config.data.path).get("settings", {})
    return settings


def points_of_choices(choices: Sequence[Choice], reference: ImageSet) -> list[Point]:
    """Return the points of the choices, without points that measure the same."""
    scores = settings_of_scores(choices[0].cfg.evaluation, reference)  # equal for all
    chosen: list[tuple[Evaluation, Choice]] = []
    for choice in choices:
        wanted = evaluation_of_recipe(choice.cfg, choice.recipe, scores)
        if not any(wanted.answers(other, False) for other, _ in chosen):  # intervals have no effect at cfg_scale=1
            chosen.append((wanted, choice))
    checkpoints = list(dict.fromkeys(choice.recipe.checkpoint for _, choice in chosen))
    results = open_results(choices[0].cfg.output, checkpoints)
    names = {checkpoint: read_class_names(checkpoint) for checkpoint in checkpoints}
    points = []
    for wanted, choice in chosen:
        checkpoint = choice.recipe.checkpoint
        points.append(Point(wanted, results[checkpoint], *choice, names[checkpoint]))
    return points


def evaluation_of_recipe(cfg: FidConfig, recipe: Recipe, scores: dict[str, object]) -> Evaluation:
    """Return the evaluation of a recipe without figures. `scores` are the `settings_of_scores`."""
    checkpoint, folder = recipe.checkpoint, recipe.checkpoint.path
    name = (checkpoint.run or folder.resolve().parent).name
    return Evaluation(
        # What training measured at a step is not that of another folder with this step, such as a backup.
        run=name if folder.name == store.folder_name(checkpoint.step) else f"{name}/{folder.name}",
        step=checkpoint.step,
        checkpoint=checkpoint.hash,
        settings=recipe.settings() | cfg.evaluation.model_dump(include={"num_samples", "first_seed"}) | scores,
    )


def open_results(output: str | None, checkpoints: Sequence[Checkpoint]) -> dict[Checkpoint, Results]:
    """Return the results of each checkpoint, in `output` or else in its run. Several folders are optional: each may fail."""
    folders = {checkpoint: given_output(output) or results_folder(checkpoint) for checkpoint in checkpoints}
    runs = {folder: None if output else checkpoint.run for checkpoint, folder in folders.items()}
    opened = {folder: Results(folder, run, is_optional=len(runs) > 1).check() for folder, run in runs.items()}
    return {checkpoint: opened[folder] for checkpoint, folder in folders.items()}


def point_of_images(cfg: FidConfig, images: ImageSet, reference: ImageSet) -> Point:
    output = given_output(cfg.output) or folder_for_images(cfg.images)
    if images.path.resolve() in (output.resolve(), *output.resolve().parents):  # otherwise, results.png would become an image
        raise UserError(f"output={output} is inside images={cfg.images}; give a folder elsewhere")
    settings = {"images": cfg.images, "images_hash": images.hash(), "num_samples": cfg.evaluation.num_samples}
    wanted = Evaluation(settings=settings | settings_of_scores(cfg.evaluation, reference))
    return Point(wanted, Results(output).check(), cfg)


def given_output(output: str | None) -> Path | None:
    """Return the folder that `output` names. It can be a link, unlike the folders that results have by default."""
    return output and (Path(output).resolve() if Path(output).is_symlink() else Path(output))


def folder_for_images(images: str) -> Path:
    """Return the folder for the results of images. They never lie next to the images, where a folder would become a class."""
    return Path("runs") / "evaluations" / Path(images).resolve().name


def results_folder(checkpoint: Checkpoint) -> Path:
    """Return <run>/evaluations for a checkpoint in a run, or a folder next to a checkpoint outside any run."""
    path = checkpoint.path.resolve()
    folder = (checkpoint.run or path.parent) / "evaluations"
    if folder == REPOSITORY / "evaluations":  # this folder contains source code, not results
        return path.with_name(f"{path.name}_evaluations")
    return folder


def in_random_order(points: Sequence[Point], chosen: Iterable[int]) -> list[int]:
    """Return the indices of the chosen points in a new random order, so that commands at the same time rarely meet at a point.

    The points of a network stay together, because loading and compiling it takes long.
    """
    draw = random.SystemRandom().random  # no seed may give two commands the same order
    places: dict[object, float] = defaultdict(draw)
    return sorted(chosen, key=lambda i: (places[(recipe := points[i].recipe) and recipe.network], draw()))
