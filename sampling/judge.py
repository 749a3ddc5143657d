"""Evaluates the points of fid.py: recipes, or images on disk. Finished points are kept."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from accelerate import Accelerator

from checkpoints import store
from checkpoints.load import load_config
from configs.schema import FidConfig
from evaluations.features import Features
from evaluations.images import ImageSet
from evaluations.results import Point, Results, in_words
from evaluations.suite import format_metrics
from latents import autoencoders
from runtime.processes import on_main
from sampling.evaluator import Evaluator, build_detectors, hash_weights
from sampling.recipe import Recipe
from sampling.sampler import draw_labels

log = logging.getLogger(__name__)


@dataclass
class Judge:
    """Evaluates points. They share detectors, features of the reference and networks.

    Attributes:
        cfg: with the detector and the reference filled in.
        folders: verified checkpoints. [] for images on disk.
        images: on disk, in place of checkpoints.
        output: the folder of the results.
    """

    cfg: FidConfig
    accelerator: Accelerator
    folders: list[Path]
    images: ImageSet | None
    reference: ImageSet
    output: Path

    def points(self) -> list[tuple[Point, Recipe | None]]:
        """Build a point for every combination of listed values, checked against its checkpoint. Images on disk have no recipe.

        Raises:
            UserError: as `Recipe.for_checkpoint`.
        """
        if self.images:
            path = self.cfg.images
            return [(Point({"images": path}, on_main(self.images.fingerprint), {"images": Path(path).name}), None)]
        points: list[tuple[Point, Recipe]] = []
        for folder, choice in itertools.product(self.folders, self.cfg.choices()):
            recipe = Recipe.for_checkpoint(folder, choice, load_config(folder).eval.precision)
            settings, sampler = recipe.settings(), vars(recipe.diffusion.sampler)
            given = {key: sampler[key] for key, value in choice.model_extra.items() if value is not None}
            name = (store.find_run(folder) or folder.resolve().parent).name
            shown = {"run": name, "step": store.read_step(folder), **settings, **given}
            point = Point({"checkpoint": str(folder), **settings, "precision": recipe.precision}, recipe.content, shown)
            if point.identity not in (earlier.identity for earlier, _ in points):  # with cfg_scale=1, all intervals are equal
                points.append((point, recipe))
        return points

    @cached_property
    def evaluator(self) -> Evaluator:
        for folder in self.folders:  # check first: loading detector and reference takes minutes
            autoencoders.find(self.cfg.autoencoder or load_config(folder).data.autoencoder)
        detectors = build_detectors(self.cfg.evaluation, self.accelerator)
        # Cache next to the runs, which often share a reference.
        run = None if self.cfg.output or not self.folders else store.find_run(self.folders[0])
        cache = (run.parent if run else self.output) / "reference_features"
        return Evaluator(self.accelerator, detectors, self.reference, self.cfg.batch_size, cache)

    def results(self, num_samples: int) -> Results:
        """Return the finished points with this number of samples. Every process must call this."""
        seeds = {} if self.images else {"first_seed": self.cfg.first_seed, "labels": self.cfg.labels}
        detector = "+".join(self.cfg.evaluation.all_detectors)
        conditions = {"num_samples": num_samples, "autoencoder": self.cfg.autoencoder, "detector": detector}
        conditions |= on_main(lambda: hash_weights(self.cfg.evaluation)) | seeds
        conditions["reference"] = on_main(self.reference.fingerprint)
        about = {"reference": Path(self.cfg.reference).name, "detector": detector, "num_samples": num_samples, **seeds}
        return Results(self.output, conditions, about)

    def __call__(self, points: Sequence[tuple[Point, Recipe | None]], num_samples: int) -> Results:
        """Evaluate the points that are not finished."""
        results = self.results(num_samples)
        missing = on_main(lambda: [i for i, (point, _) in enumerate(points) if not results.find(point)])
        log.info("%d of %d evaluations to do, in %s", len(missing), len(points), self.output)
        finished = []

        def finish(point: Point, features: list[Features], labels: Sequence[int] | None, metrics: dict, cost: dict) -> None:
            results.add(point, metrics, self.evaluator.jackknife(features, labels, num_groups=10), cost)
            log.info("%s: %s", in_words(point.shown), format_metrics(metrics))

        with ThreadPoolExecutor(1) as thread:  # the main process computes errors while the next point is sampled
            for number, (point, recipe) in enumerate((points[i] for i in missing), start=1):
                on_main(lambda: [future.result() for future in finished if future.done()])
                features, labels, cost = self.features(recipe, num_samples, f"point {number} of {len(missing)}")
                metrics = on_main(partial(self.evaluator.evaluate, features, labels))
                if self.accelerator.is_main_process:
                    finished.append(thread.submit(finish, point, features, labels, metrics, cost))
        on_main(lambda: [future.result() for future in finished])
        return results

    def features(self, recipe: Recipe | None, num_samples: int, name: str) -> tuple:
        """Compute a point's features. Also return the requested labels of its images, and the cost per image."""
        if recipe is None:
            labels = self.images.labels
            return self.evaluator.features_of_set(self.images, num_samples), None if labels is None else labels[:num_samples], {}
        seeds = range(self.cfg.first_seed, self.cfg.first_seed + num_samples)
        labels = draw_labels(seeds, recipe.run.data.num_classes, self.cfg.labels)
        sampler = recipe.load(self.accelerator.device, self.cfg.compile)
        features = self.evaluator.features_of_samples(sampler, labels, name=name)
        return features, list(labels.values()), sampler.cost
