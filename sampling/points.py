"""Evaluate the points of a fid.py command. A point is a checkpoint with sampling settings, or a set of images on disk."""

from __future__ import annotations

import itertools
import logging
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from accelerate import Accelerator

from checkpoints import store
from checkpoints.load import load_class_names, load_config
from common.errors import UserError
from configs.schema import FidConfig, Measuring
from evaluations.features import Features
from evaluations.images import ImageSet
from evaluations.record import Evaluation, Results
from evaluations.suite import format_metrics
from evaluations.tables import format_settings, shown
from latents import autoencoders
from runtime.processes import keep_on_main, on_main
from sampling.evaluator import Evaluator, build_detectors
from sampling.recipe import Recipe
from sampling.score import score_images, score_samples, settings_of_scores

log = logging.getLogger(__name__)

NUM_GROUPS = 10  # groups of samples for the jackknife


@dataclass(frozen=True)
class Point:
    """An evaluation of a fid.py command.

    Attributes:
        wanted: The evaluation without figures.
        cfg: The command's settings with one value per key, without keys that are left to the run.
        recipe: How to sample, or None for images on disk.
        typed: Sampler settings that the command gives. Tables show them even if they have their default values.
    """

    wanted: Evaluation
    cfg: FidConfig
    recipe: Recipe | None
    typed: Mapping[str, object]

    @property
    def checkpoint(self) -> Path | None:
        return self.recipe and self.recipe.checkpoint

    @property
    def shown(self) -> dict[str, object]:
        own = shown(self.wanted)
        return {**{key: own[key] for key in ("run", "step") if key in own}, **self.typed, **own}


def choose_recipes(cfg: FidConfig, folders: Sequence[Path]) -> list[tuple[FidConfig, Recipe, dict]]:
    """Return the settings, the recipe and the given sampler settings for every checkpoint and combination of listed values.

    Combinations that only some of a run's `checkpoints` do not support are left out with a warning: `ema_length` needs snapshots
    of several earlier steps.

    Raises UserError if a combination does not fit any checkpoint, or not one that the command names.
    """
    chosen: list[tuple[FidConfig, Recipe, dict]] = []
    refused: dict[int, list[UserError]] = {}  # for each combination
    for folder in folders:
        run, step = load_config(folder), store.read_step(folder)
        for number, choice in enumerate(cfg.choices(run)):
            try:
                own = choice.of_run(run, step)
                recipe = Recipe.for_checkpoint(folder, run, own)
            except UserError as e:
                refused.setdefault(number, []).append(e)
                is_unreadable = isinstance(e.__cause__, OSError) or not folder.exists()
                if cfg.checkpoints is None or is_unreadable or len(refused[number]) == len(folders):
                    raise
                continue
            typed = {key: getattr(own.sampler, key) for key, value in choice.sampler.items() if value is not None}
            chosen.append((own, recipe, typed))
    for error in itertools.chain.from_iterable(refused.values()):
        log.warning("%s; this point is left out", error)
    return chosen


def points_of_recipes(recipes: Sequence[tuple[FidConfig, Recipe, dict]], reference: ImageSet) -> list[Point]:
    """Return the points of the recipes, without points that measure the same."""
    points: list[Point] = []
    scores = settings_of_scores(recipes[0][0].evaluation, reference)  # equal for all
    for cfg, recipe, typed in recipes:
        folder, step = recipe.checkpoint, store.read_step(recipe.checkpoint)
        name = (store.find_run(folder) or folder.resolve().parent).name
        wanted = Evaluation(
            # What training measured at a step is not that of another folder with this step, such as a backup.
            run=name if folder.name == store.folder_name(step) else f"{name}/{folder.name}",
            step=step,
            checkpoint=recipe.checkpoint_hash,
            settings=recipe.settings() | cfg.evaluation.model_dump(include={"num_samples", "first_seed"}) | scores,
        )
        if not any(wanted.answers(other.wanted, False) for other in points):  # intervals have no effect at cfg_scale=1
            points.append(Point(wanted, cfg, recipe, typed))
    return points


def point_of_images(cfg: FidConfig, images: ImageSet, reference: ImageSet) -> Point:
    settings = {"images": cfg.images, "images_hash": on_main(images.fingerprint), "num_samples": cfg.evaluation.num_samples}
    return Point(Evaluation(settings=settings | settings_of_scores(cfg.evaluation, reference)), cfg, None, {})


@dataclass
class PointEvaluator:
    """Evaluates the points of a command, which share detectors and reference features.

    Attributes:
        evaluation: Settings of the evaluation, which all points share except the number of samples.
        images: Images on disk to evaluate instead of checkpoints, or None.
        outputs: For each checkpoint folder, or None for images on disk, the folder for its results.
        is_output_given: Whether the command names this folder. Otherwise, it belongs to the checkpoint's run.
    """

    accelerator: Accelerator
    evaluation: Measuring
    points: Sequence[Point]
    reference: ImageSet
    images: ImageSet | None
    outputs: Mapping[Path | None, Path]
    is_output_given: bool

    @cached_property
    def evaluator(self) -> Evaluator:
        detectors = build_detectors(self.evaluation, self.accelerator)
        # Store reference features next to the run folders, because several runs often use the same reference.
        folder = self.points[0].checkpoint
        run = None if self.is_output_given or folder is None else store.find_run(folder)
        cache = (run.parent if run else next(iter(self.outputs.values()))) / "reference_features"
        return Evaluator(self.accelerator, detectors, self.reference, self.points[0].cfg.sampling.batch_size, cache)

    def open_results(self) -> list[Results]:
        """Return the results in the folder of each point."""
        folders = [self.outputs[point.checkpoint] for point in self.points]
        runs = [None if self.is_output_given or p.checkpoint is None else store.find_run(p.checkpoint) for p in self.points]
        owners, several = dict(zip(folders, runs)), len({*folders}) > 1
        results = {folder: Results(folder, run, is_optional=several).check() for folder, run in owners.items()}
        return [results[folder] for folder in folders]

    def evaluate(self) -> list[tuple[Point, Results]]:
        """Evaluate the points that have no stored results yet. The main process gets each point with the results in its folder.

        Points that another command has stored meanwhile are skipped. So are points of checkpoints that a running trainer has
        removed meanwhile, if there are several checkpoints.
        """
        points, results = self.points, keep_on_main(self.open_results) or []
        missing = on_main(lambda: in_random_order(points, [i for i, own in enumerate(results) if not own.find(points[i].wanted)]))
        folders = ", ".join(dict.fromkeys(str(own.folder) for own in results))
        numbers = sorted({point.cfg.evaluation.num_samples for point in points})
        counted = " and ".join(f"{number:,}" for number in numbers)
        log.info("%d of %d evaluations to do, of %s samples, in %s", len(missing), len(points), counted, folders)
        if any(points[i].cfg.evaluation.num_samples < 2 * NUM_GROUPS for i in missing):
            log.info("no standard errors: they need at least %d samples", 2 * NUM_GROUPS)
        for autoencoder in dict.fromkeys(recipe.sampling.autoencoder for i in missing if (recipe := points[i].recipe)):
            autoencoders.find_weights(autoencoder)  # fail early, because loading the detectors takes minutes
        finished: list[Future] = []

        def is_left(i: int) -> bool:
            for future in finished:
                if future.done():
                    future.result()  # raises its error
            if results[i].find(points[i].wanted):
                log.info("%s: another command has stored this point", name(i))
                return False
            if (folder := points[i].checkpoint) and len(self.outputs) > 1 and not folder.exists():
                log.warning("%s was removed meanwhile; this point is left out", folder)
                return False
            return True

        def name(i: int) -> str:
            own = {key: x for key, x in points[i].shown.items() if len({str(other.shown.get(key)) for other in points}) > 1}
            return format_settings({"step": points[i].wanted.step, **own} if points[i].recipe else {"images": self.images.path})

        def finish(i: int, record: Evaluation, features: list[Features], labels: Sequence[int] | None) -> None:
            errors = self.evaluator.jackknife(features, labels, NUM_GROUPS)
            log.info("%s: %s", name(i), format_metrics(record.metrics))  # first, because writing may fail
            results[i].add(record.model_copy(update={"jackknife": errors}))

        with ThreadPoolExecutor(1) as thread:  # computes standard errors while we sample the next point
            for number, i in enumerate(missing, 1):
                if on_main(partial(is_left, i)):
                    scored = self.score(points[i], f"point {number} of {len(missing)}")
                    if self.accelerator.is_main_process:
                        finished.append(thread.submit(finish, i, *scored))
        on_main(lambda: [future.result() for future in finished])
        return list(zip(points, results))

    def score(self, point: Point, name: str) -> tuple[Evaluation, list[Features], Sequence[int] | None]:
        """Return a point's record without standard errors, the features of its images, and their class labels."""
        if point.recipe is None:
            return score_images(self.evaluator, self.images, point.wanted)
        sampler = point.recipe.load_sampler(self.accelerator.device, point.cfg.machine.compile)
        class_names = on_main(lambda: load_class_names(point.checkpoint))
        return score_samples(self.evaluator, sampler, point.wanted, class_names, name=name)


def in_random_order(points: Sequence[Point], chosen: Iterable[int]) -> list[int]:
    """Return the indices of the chosen points in a new random order, so that commands at the same time rarely meet at a point.

    The points of a network stay together, because loading and compiling it takes long.
    """
    draw = random.SystemRandom().random  # no seed may give two commands the same order
    places: dict[object, float] = defaultdict(draw)
    return sorted(chosen, key=lambda i: (places[(recipe := points[i].recipe) and recipe.network], draw()))
