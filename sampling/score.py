"""Score samples of a network. The trainer and fid.py make the records of their evaluations with these functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from configs import schema
from evaluations.features import Features
from evaluations.images import ImageSet
from evaluations.record import EvaluationRecord, PlannedEvaluation
from runtime.processes import on_main
from sampling.evaluator import Evaluator, hash_weights
from sampling.recipe import Recipe
from sampling.sampler import ImageSampler, draw_labels


def scoring_settings(evaluation: schema.SharedEvaluationSettings, reference: ImageSet) -> dict[str, object]:
    """Return what the figures of images depend on besides the images, by the names in results."""
    return {
        "detector": "+".join(evaluation.all_detectors),
        **hash_weights(evaluation),
        "reference": Path(evaluation.reference).name,
        "reference_hash": reference.portable_hash(),
    }


def settings_of_samples(
    recipe: Recipe, evaluation: schema.SharedEvaluationSettings, scoring: dict[str, object]
) -> dict[str, object]:
    """Return what the figures of samples depend on besides the checkpoint, by the names in results.

    `scoring` are the `scoring_settings`.
    """
    return recipe.result_settings() | evaluation.model_dump(include={"num_samples", "first_seed"}) | scoring


def score_samples(
    evaluator: Evaluator,
    image_sampler: ImageSampler,
    planned: PlannedEvaluation,
    class_names: Sequence[str] | None,
    stop: Callable[[], bool] = lambda: False,
    name: str = "evaluation",
) -> tuple[EvaluationRecord, list[Features], Sequence[int] | None]:
    """Sample the images of the `planned` evaluation, and score them. Every process must call this function.

    Args:
        class_names: Names of the network's classes, or None if they are unknown.

    Returns:
        The record, the images' features (on the main process), and their labels, or None if the detector has other classes.
    """
    start_sec = time.perf_counter()
    settings = planned.settings
    seeds = range(settings["first_seed"], settings["first_seed"] + settings["num_samples"])
    labels = draw_labels(seeds, image_sampler.data.num_classes, settings["labels"])
    compared = evaluator.labels_to_compare(list(labels.values()), class_names)
    features = evaluator.features_of_samples(image_sampler, labels, stop, name)
    metrics = on_main(partial(evaluator.compute_metrics, features, compared))
    record = planned.with_figures(metrics, time.perf_counter() - start_sec, cost=image_sampler.cost)
    return record, features, compared


def score_images(
    evaluator: Evaluator, images: ImageSet, planned: PlannedEvaluation
) -> tuple[EvaluationRecord, list[Features], np.ndarray | None]:
    """Score images on disk. See `score_samples`, which returns the same."""
    start_sec = time.perf_counter()
    features, labels = evaluator.features_of_set(images, planned.settings["num_samples"])
    labels = evaluator.labels_to_compare(labels, images.class_names)
    metrics = on_main(partial(evaluator.compute_metrics, features, labels))
    return planned.with_figures(metrics, time.perf_counter() - start_sec), features, labels
