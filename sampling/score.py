"""Score samples of a network. The trainer and fid.py make the records of their evaluations with these functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from checkpoints import store
from configs import schema
from evaluations.features import Features
from evaluations.images import ImageSet
from evaluations.record import EvaluationRecord, PlannedEvaluation
from evaluations.result_settings import guidance_for_results, sampler_for_results
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


def plan_evaluation(recipe: Recipe, scoring: Mapping[str, object]) -> PlannedEvaluation:
    """Return what an evaluation of a recipe's samples measures, at no step yet for a network in training.

    Sampler settings with default values are omitted, except num_steps. `precision` is a metric, so that the networks' precision
    is called `network_precision`.

    Args:
        scoring: The `scoring_settings` of the command.
    """
    config, checkpoint, average = recipe.config, recipe.checkpoint, recipe.average
    settings = {
        "weights": recipe.weights,
        **guidance_for_results(recipe.guidance),
        **sampler_for_results(config.sampler),
        "ema_length": average and average.length,
        "network_precision": config.sampling.precision,
        "labels": config.sampling.labels,
        "rounding": config.sampling.rounding,
        "autoencoder": config.sampling.autoencoder,
        "autoencoder_hash": recipe.autoencoder_hash,
        "guidance.checkpoint_hash": recipe.weak and recipe.weak.hash,
        "ema_hash": average and average.hash,
        "num_samples": config.evaluation.num_samples,
        "first_seed": config.evaluation.first_seed,
        **scoring,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    if checkpoint is None:
        return PlannedEvaluation(run=config.name, settings=settings)
    run = (checkpoint.run_folder or checkpoint.path.resolve().parent).name
    if checkpoint.path.name != store.folder_name(checkpoint.step):
        run += f"/{checkpoint.path.name}"  # what training measured at a step is not that of another folder, such as a backup
    return PlannedEvaluation(run=run, step=checkpoint.step, checkpoint=checkpoint.hash, settings=settings)


def plan_evaluations(recipes: Iterable[Recipe], scoring: Mapping[str, object]) -> list[tuple[PlannedEvaluation, Recipe]]:
    """Return each recipe with the evaluation of its samples (`plan_evaluation`), without recipes that measure the same.

    For example, intervals have no effect at cfg_scale=1.
    """
    planned: dict[tuple, tuple[PlannedEvaluation, Recipe]] = {}
    for recipe in recipes:
        evaluation = plan_evaluation(recipe, scoring)
        planned.setdefault(evaluation.key, (evaluation, recipe))
    return [*planned.values()]


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
    labels = draw_labels(seeds, image_sampler.config.data.num_classes, settings["labels"])
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
