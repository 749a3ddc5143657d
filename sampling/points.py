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
from checkpoints.load import load_config
from common.errors import UserError
from configs.schema import FidConfig
from evaluations.features import Features
from evaluations.images import ImageSet
from evaluations.results import Point, Results, format_settings
from evaluations.suite import format_metrics
from latents import autoencoders
from runtime.processes import keep_on_main, on_main
from sampling.evaluator import Evaluator, build_detectors, hash_weights
from sampling.recipe import Recipe
from sampling.sampler import draw_labels

log = logging.getLogger(__name__)

NUM_GROUPS = 10  # groups of samples for the jackknife


@dataclass
class PointEvaluator:
    """Evaluates the points of a command, which share detectors and reference features.

    Attributes:
        cfg: Settings of the fid.py command, with unset evaluation settings filled in from the run.
        folders: Verified checkpoint folders, or [] to evaluate images on disk.
        images: Images on disk to evaluate instead of checkpoints, or None.
        outputs: For each checkpoint folder, or None for images on disk, the folder for its results.
    """

    cfg: FidConfig
    accelerator: Accelerator
    folders: list[Path]
    images: ImageSet | None
    reference: ImageSet
    outputs: Mapping[Path | None, Path]

    def points(self) -> list[tuple[Point, Recipe | None]]:
        """Build a point and a recipe for every checkpoint and combination of listed values. Images on disk have no recipe.

        Combinations that only some of a run's `checkpoints` do not support are left out with a warning: `ema_length` needs
        snapshots of several earlier steps.

        Raises:
            UserError: `Recipe.for_checkpoint` rejects a combination for every checkpoint, or for one that the command names.
        """
        if self.images:
            path = self.cfg.images
            return [(Point({"images": path}, on_main(self.images.fingerprint), {"images": path}), None)]
        points: list[tuple[Point, Recipe]] = []
        refused: dict[int, list[UserError]] = {}  # for each combination
        for folder, (number, choice) in itertools.product(self.folders, enumerate(self.cfg.choices())):
            try:
                recipe = Recipe.for_checkpoint(folder, choice, load_config(folder).eval.precision)
            except UserError as e:
                refused.setdefault(number, []).append(e)
                is_unreadable = isinstance(e.__cause__, OSError) or not folder.exists()
                if self.cfg.checkpoints is None or is_unreadable or len(refused[number]) == len(self.folders):
                    raise
                continue
            settings, sampler = recipe.settings(), vars(recipe.diffusion.sampler)
            typed = {key: sampler[key] for key, value in choice.model_extra.items() if value is not None}
            name = (store.find_run(folder) or folder.resolve().parent).name
            display = {"run": name, "step": store.read_step(folder), **settings, **typed}
            display["network_precision"] = recipe.precision  # `precision` is also a metric
            identity = {"precision": recipe.precision, "autoencoder_hash": recipe.autoencoder_hash}
            point = Point({"checkpoint": str(folder), **settings, **identity}, recipe.checkpoint_hash, display)
            if point.key not in (earlier.key for earlier, _ in points):  # intervals have no effect at cfg_scale=1
                points.append((point, recipe))
        for error in itertools.chain.from_iterable(refused.values()):
            log.warning("%s; this point is left out", error)
        return points

    @cached_property
    def evaluator(self) -> Evaluator:
        detectors = build_detectors(self.cfg.evaluation, self.accelerator)
        # Store reference features next to the run folders, because several runs often use the same reference.
        run = None if self.cfg.output or not self.folders else store.find_run(self.folders[0])
        cache = (run.parent if run else next(iter(self.outputs.values()))) / "reference_features"
        return Evaluator(self.accelerator, detectors, self.reference, self.cfg.batch_size, cache)

    def open_results(self, points: Sequence[tuple[Point, Recipe | None]], num_samples: int) -> list[tuple[Point, Results]]:
        """Return each point with the results in its folder, for evaluations with `num_samples` samples."""
        # Earlier versions took images on disk in the order of the files. Results without this entry are therefore not comparable.
        seeds = {"order": "fixed"} if self.images else {"first_seed": self.cfg.first_seed, "labels": self.cfg.labels}
        detector = "+".join(self.cfg.evaluation.all_detectors)
        shared = {"num_samples": num_samples, "autoencoder": self.cfg.autoencoder, "detector": detector}
        shared |= hash_weights(self.cfg.evaluation) | seeds
        shared["reference"] = self.reference.fingerprint()
        display = {"reference": Path(self.cfg.reference).name, "detector": detector, "num_samples": num_samples, **seeds}
        display |= {"autoencoder": self.cfg.autoencoder} if self.cfg.autoencoder else {}
        display["reference_hash"] = self.reference.quick_fingerprint()  # as in train.py's evaluations
        folders = [self.outputs[recipe and recipe.checkpoint] for _, recipe in points]
        results = {folder: Results(folder, shared, display, is_optional=len({*folders}) > 1) for folder in dict.fromkeys(folders)}
        return [(point, results[folder]) for (point, _), folder in zip(points, folders)]

    def evaluate(self, points: Sequence[tuple[Point, Recipe | None]], num_samples: int) -> list[tuple[Point, Results]]:
        """Evaluate the points that have no stored results yet. The main process gets each point with the results in its folder.

        Points that another command has stored meanwhile are skipped. So are points of checkpoints that a running trainer has
        removed meanwhile, if there are several checkpoints.
        """
        opened = keep_on_main(lambda: self.open_results(points, num_samples)) or []
        missing = on_main(lambda: in_random_order(points, [i for i, (point, own) in enumerate(opened) if not own.find(point)]))
        folders = ", ".join(dict.fromkeys(str(results.folder) for _, results in opened))
        log.info("%d of %d evaluations to do, in %s", len(missing), len(points), folders)
        if num_samples < 2 * NUM_GROUPS:
            log.info("no standard errors: they need at least %d samples", 2 * NUM_GROUPS)
        for autoencoder in dict.fromkeys(recipe.autoencoder for i in missing if (recipe := points[i][1])):
            autoencoders.find_weights(autoencoder)  # fail early, because loading the detectors takes minutes
        finished: list[Future] = []

        def is_left(i: int) -> bool:
            for future in finished:
                if future.done():
                    future.result()  # raises its error
            (point, results), recipe = opened[i], points[i][1]
            if results.find(point):
                log.info("%s: another command has stored this point", format_settings(point.display))
                return False
            if recipe and len(self.folders) > 1 and not recipe.checkpoint.exists():
                log.warning("%s was removed meanwhile; this point is left out", recipe.checkpoint)
                return False
            return True

        def finish(i: int, features: list[Features], labels: Sequence[int] | None, metrics: dict, cost: dict) -> None:
            point, results = opened[i]
            results.add(point, metrics, self.evaluator.jackknife(features, labels, NUM_GROUPS), cost)
            log.info("%s: %s", format_settings(point.display), format_metrics(metrics))

        with ThreadPoolExecutor(1) as thread:  # computes standard errors while we sample the next point
            for number, i in enumerate(missing, 1):
                if on_main(partial(is_left, i)):
                    features, labels, cost = self.features(points[i][1], num_samples, f"point {number} of {len(missing)}")
                    metrics = on_main(partial(self.evaluator.evaluate, features, labels))
                    if self.accelerator.is_main_process:
                        finished.append(thread.submit(finish, i, features, labels, metrics, cost))
        on_main(lambda: [future.result() for future in finished])
        return opened

    def features(self, recipe: Recipe | None, num_samples: int, name: str) -> tuple:
        """Compute the features of a point's images. Also return the class labels of the images and the cost per sampled image."""
        if recipe is None:
            return *self.evaluator.features_of_set(self.images, num_samples), {}
        seeds = range(self.cfg.first_seed, self.cfg.first_seed + num_samples)
        labels = draw_labels(seeds, recipe.run.data.num_classes, self.cfg.labels)
        sampler = recipe.load_sampler(self.accelerator.device, self.cfg.compile)
        features = self.evaluator.features_of_samples(sampler, labels, name=name)
        return features, list(labels.values()), sampler.cost


def in_random_order(points: Sequence[tuple[Point, Recipe | None]], chosen: Iterable[int]) -> list[int]:
    """Return the indices of the chosen points in a new random order, so that commands at the same time rarely meet at a point.

    The points of a network stay together, because loading and compiling it takes long.
    """
    draw = random.SystemRandom().random  # no seed may give two commands the same order
    places: dict[object, float] = defaultdict(draw)
    return sorted(chosen, key=lambda i: (places[(recipe := points[i][1]) and recipe.network], draw()))
