"""Evaluate the points of a fid.py command. A point is a checkpoint with sampling settings, or a set of images on disk."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
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
from runtime.processes import on_main
from sampling.evaluator import Evaluator, build_detectors, hash_weights
from sampling.recipe import Recipe
from sampling.sampler import draw_labels

log = logging.getLogger(__name__)

NUM_GROUPS = 10  # groups of samples for the jackknife
WAIT_SEC = 1  # between two attempts to claim a point that another process evaluates


@dataclass
class PointEvaluator:
    """Evaluates the points of a command, which share detectors and reference features.

    Attributes:
        cfg: Settings of the fid.py command, with unset evaluation settings filled in from the run.
        folders: Verified checkpoint folders, or [] to evaluate images on disk.
        images: Images on disk to evaluate instead of checkpoints, or None.
        output: Folder for the results.
        homes: For each checkpoint folder, as text, the results folder of its run, which also stores its results.
    """

    cfg: FidConfig
    accelerator: Accelerator
    folders: list[Path]
    images: ImageSet | None
    reference: ImageSet
    output: Path
    homes: dict[str, Path] = field(default_factory=dict)

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
        cache = (run.parent if run else self.output) / "reference_features"
        return Evaluator(self.accelerator, detectors, self.reference, self.cfg.batch_size, cache)

    def results(self, num_samples: int) -> Results:
        """Open the results folder for evaluations with `num_samples` samples. Every process must call this method."""
        # Earlier versions took images on disk in the order of the files. Results without this entry are therefore not comparable.
        seeds = {"order": "fixed"} if self.images else {"first_seed": self.cfg.first_seed, "labels": self.cfg.labels}
        detector = "+".join(self.cfg.evaluation.all_detectors)
        shared = {"num_samples": num_samples, "autoencoder": self.cfg.autoencoder, "detector": detector}
        shared |= on_main(lambda: hash_weights(self.cfg.evaluation)) | seeds
        shared["reference"] = on_main(self.reference.fingerprint)
        display = {"reference": Path(self.cfg.reference).name, "detector": detector, "num_samples": num_samples, **seeds}
        display |= {"autoencoder": self.cfg.autoencoder} if self.cfg.autoencoder else {}
        display["reference_hash"] = on_main(self.reference.quick_fingerprint)  # as in train.py's evaluations
        return Results(self.output, shared, display, self.homes)

    def evaluate(self, points: Sequence[tuple[Point, Recipe | None]], num_samples: int) -> Results:
        """Evaluate the points that have no stored results yet. Return the results of all points.

        With several checkpoints, skip the points of those that a running trainer has removed meanwhile.
        """
        results = self.results(num_samples)
        missing = on_main(lambda: [i for i, (point, _) in enumerate(points) if not results.find(point)])
        log.info("%d of %d evaluations to do, in %s", len(missing), len(points), self.output)
        if num_samples < 2 * NUM_GROUPS:
            log.info("no standard errors: they need at least %d samples", 2 * NUM_GROUPS)
        for autoencoder in dict.fromkeys(recipe.autoencoder for i in missing if (recipe := points[i][1])):
            autoencoders.find_weights(autoencoder)  # fail early, because loading the detectors takes minutes
        finished = []

        def raise_errors(futures: Iterable[Future]) -> None:
            for future in futures:
                future.result()

        def finish(point: Point, features: list[Features], labels: Sequence[int] | None, metrics: dict, cost: dict) -> None:
            try:
                results.add(point, metrics, self.evaluator.jackknife(features, labels, NUM_GROUPS), cost)
            finally:
                results.release(point)
            log.info("%s: %s", format_settings(point.display), format_metrics(metrics))

        def claim(point: Point, recipe: Recipe | None) -> str:
            raise_errors(future for future in finished if future.done())
            if recipe and len(self.folders) > 1 and not recipe.checkpoint.exists():
                log.warning("%s was removed meanwhile; this point is left out", recipe.checkpoint)
                return "removed"
            return results.claim(point)

        def evaluate_free(pending: list[int], thread: ThreadPoolExecutor) -> list[int]:
            """Evaluate the pending points that no other process evaluates. Return the others."""
            in_use = []
            for i in pending:
                point, recipe = points[i]
                if (state := on_main(partial(claim, point, recipe))) == "in use":
                    in_use.append(i)
                if state != "ours":
                    continue
                name = f"point {missing.index(i) + 1} of {len(missing)}"
                features, labels, cost = self.features(recipe, num_samples, name)
                metrics = on_main(partial(self.evaluator.evaluate, features, labels))
                if self.accelerator.is_main_process:
                    finished.append(thread.submit(finish, point, features, labels, metrics, cost))
            return in_use

        with contextlib.ExitStack() as stack:
            stack.callback(results.release)
            thread = stack.enter_context(ThreadPoolExecutor(1))  # computes standard errors while we sample the next point
            pending = evaluate_free(missing, thread)
            for i in pending:
                log.info("%s: waiting for another process that evaluates this point", format_settings(points[i][0].display))
            while pending:  # all processes exchange a message for each attempt, so that no timeout ends those that wait
                if (left := evaluate_free(pending, thread)) == pending:
                    time.sleep(WAIT_SEC)
                pending = left
        on_main(lambda: raise_errors(finished))
        return results

    def features(self, recipe: Recipe | None, num_samples: int, name: str) -> tuple:
        """Compute the features of a point's images. Also return the class labels of the images and the cost per sampled image."""
        if recipe is None:
            return *self.evaluator.features_of_set(self.images, num_samples), {}
        seeds = range(self.cfg.first_seed, self.cfg.first_seed + num_samples)
        labels = draw_labels(seeds, recipe.run.data.num_classes, self.cfg.labels)
        sampler = recipe.load_sampler(self.accelerator.device, self.cfg.compile)
        features = self.evaluator.features_of_samples(sampler, labels, name=name)
        return features, list(labels.values()), sampler.cost
