"""Detectors, references, and metrics of a sampler or of images on disk. All processes share the work; no files lie in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from accelerate import Accelerator

from common.errors import UserError, reading
from common.files import hash_file
from common.progress import progress_bar, say_if_slow
from configs import schema
from evaluations.classifiers import DIGITS_WEIGHTS, ClassifierDetector
from evaluations.features import (
    Detector,
    Features,
    extract,
    features_of_images,
    join_features,
    read_cache,
    write_cache,
)
from evaluations.images import ImageSet, open_images
from evaluations.inception import InceptionDetector, fetch_weights
from evaluations.suite import evaluate, jackknife, set_of
from evaluations.vit import DINOV2_L, DINOv2Detector, find_encoder_weights
from runtime.processes import check_same, gather_on_main, on_main
from sampling.sampler import ImageSampler

log = logging.getLogger(__name__)

T = TypeVar("T")


def build_detectors(settings: schema.DetectorSettings, accelerator: Accelerator) -> list[Detector]:
    """What evaluation.* asks for, on this process's device. Raises UserError where the weights cannot be had."""
    return [_build_detector(name, settings, accelerator) for name in settings.all_detectors]


def hash_weights(settings: schema.DetectorSettings) -> dict[str, str | None]:
    """Hashes of the detectors' files, for results; None for the published weights. UserError where a file cannot be read."""

    def content(key: str) -> str | None:
        with reading(f"evaluation.{key}={(file := getattr(settings, key))}"):
            return file and hash_file(Path(file))

    return {"detector_weights": content("weights"), "dinov2_weights": content("dinov2_weights")}


def _build_detector(name: str, settings: schema.DetectorSettings, accelerator: Accelerator) -> Detector:
    if name == "digits":
        return ClassifierDetector(name, DIGITS_WEIGHTS, accelerator.device)
    if set_of(name):
        if settings.weights is None:
            raise UserError(f"evaluation.detector={name} needs evaluation.weights=<the file of prepare_latents.py detector>")
        return ClassifierDetector(name, settings.weights, accelerator.device)
    if name == "dinov2":
        return DINOv2Detector(settings.dinov2_weights or find_encoder_weights(DINOV2_L), accelerator.device)
    given = None if any(map(set_of, settings.all_detectors)) else settings.weights  # of small-<set>, in a list with it
    return InceptionDetector(given or fetch_weights(), accelerator.device)


def open_reference(
    path: str | None, key: str, detectors: Sequence[str], resolution: int | None = None, background: str = "white"
) -> ImageSet:
    """The reference that `key` names, for detectors by name. Images of a folder are cropped to the resolution, as in encode.

    Raises:
        UserError: it cannot be used, or holds neither images nor statistics of a detector.
    """
    if path is None or not Path(path).exists():
        problem = "is not set" if path is None else f"{path} does not exist"
        raise UserError(
            f"{key}: {problem}; give a folder of images or a reference batch (ADM's are at "
            "https://github.com/openai/guided-diffusion/tree/main/evaluations, `prepare_latents.py reference` makes one)"
        )
    images = open_images(path, crop=resolution if Path(path).is_dir() else None, background=background)
    check_same(images.outline(), key, images.path)
    for name in detectors:  # before their weights are downloaded
        if len(images) == 0 and name not in images.statistics:
            raise UserError(f"{key}={path} holds no images and no statistics of the {name} detector")
    return images


class Interrupted(Exception):
    """Sampling was given up because it was asked to stop."""


def until_stopped(batches: Iterable[T], stop: Callable[[], bool]) -> Iterator[T]:
    """The batches. Asks `stop` before each one, and raises Interrupted if it answers yes."""
    for batch in batches:
        if stop():
            raise Interrupted
        yield batch


class Evaluator:
    """Features of images, which all processes compute together, and metrics against one reference.

    Args:
        cache: a folder for features of the reference.

    Attributes:
        references: features of the reference by each detector, cached or computed by all processes together, with their
            statistics; None but on the main process, which alone computes metrics.
    """

    def __init__(
        self, accelerator: Accelerator, detectors: Sequence[Detector], reference: ImageSet, batch_size: int, cache: Path
    ):
        self.accelerator, self.detectors, self.batch_size, self.cache = accelerator, detectors, batch_size, cache
        self.references = [self._load_reference(reference, detector) for detector in detectors]

    def features_of_samples(
        self,
        sampler: ImageSampler,
        labels: Mapping[int, int],
        stop: Callable[[], bool] = lambda: False,
        name: str = "evaluation",
    ) -> list[Features]:
        """Features of an image for each seed, by each detector; [] but on the main process.

        Args:
            labels: the class of each seed.
            stop: asked before every batch, equally often on every process, which all must get the same answer.
            name: of the progress bar, which counts the images of this process.

        Raises:
            Interrupted: `stop` answered yes.
        """
        all_seeds = list(labels)

        def compute(start: int, end: int) -> list[Features]:
            batches = [all_seeds[i : min(i + self.batch_size, end)] for i in range(start, end, self.batch_size)]
            is_other = not self.accelerator.is_main_process
            bar = progress_bar(total=end - start, desc=name, unit="image", leave=False, disable=is_other)

            def images() -> Iterator[np.ndarray]:
                for seeds in until_stopped(batches, stop):
                    yield sampler(seeds, [labels[seed] for seed in seeds])
                    bar.update(len(seeds))

            with bar:
                return extract(self.detectors, images())

        return shared_features(self.accelerator, len(labels), compute)

    def features_of_set(self, images: ImageSet, num_samples: int) -> list[Features]:
        """Features of the first num_samples images on disk, by each detector; [] but on the main process.

        As in ADM's evaluator, statistics that the file stores are used, if all of its images are evaluated.
        """
        features = self._features_of(images, self.detectors, num_samples)
        if num_samples == len(images):
            features = [replace(one, statistics=images.statistics.get(one.detector, {})) for one in features]
        return features

    def evaluate(self, samples: Sequence[Features], labels: Sequence[int] | None) -> dict[str, float]:
        """Metrics of features. Only the main process can call it.

        labels: the classes that were asked for, in the order of the samples; class_agreement needs them.
        """
        values, y = {}, None if labels is None else torch.as_tensor(labels)
        with say_if_slow(log, "computing the metrics of %d images", len(samples[0])):
            for pair in zip(self.references, samples):
                values |= evaluate(*pair, y, self.accelerator.device)
        return values

    def jackknife(self, samples: Sequence[Features], labels: Sequence[int] | None, num_groups: int) -> dict[str, list[float]]:
        """Of the metrics (`evaluations.suite.jackknife`). It may run in a thread: it leaves the device and its settings alone."""
        values, y = {}, None if labels is None else torch.as_tensor(labels)
        for pair in zip(self.references, samples):
            values |= jackknife(*pair, y, num_groups)
        return values

    def _load_reference(self, images: ImageSet, detector: Detector) -> Features | None:
        is_main = self.accelerator.is_main_process
        features = read_cache(self.cache, images, detector) if is_main else None
        if on_main(lambda: features is None):  # on other nodes the folder may be another one
            computed = self._features_of(images, [detector], len(images))
            if is_main:
                features = write_cache(self.cache, images, detector, computed[0]) if len(images) else computed[0]
        return replace(features, statistics=features.statistics | images.statistics.get(detector.name, {})) if is_main else None

    def _features_of(self, images: ImageSet, detectors: Sequence[Detector], count: int) -> list[Features]:
        """Features of the first `count` images on disk; [] but on the main process."""
        is_main = self.accelerator.is_main_process
        compute = partial(features_of_images, images, detectors, self.batch_size, show_progress=is_main)
        return shared_features(self.accelerator, count, compute)


def shared_features(accelerator: Accelerator, count: int, compute: Callable[[int, int], list[Features]]) -> list[Features]:
    """Features of items 0 .. count - 1 in order; [] but on the main process. Each computes a stretch: compute(start, stop)."""
    num_processes = accelerator.num_processes
    if num_processes == 1 or count < num_processes:
        own = compute(0, count)  # on every process, since what it asks of all may be exchanged
        return own if accelerator.is_main_process else []
    # Gathering needs stretches of one length: the last ones start earlier, and each keeps what lies before the next one.
    length = -(-count // num_processes)
    starts = [min(rank * length, count - length) for rank in range(num_processes)]
    kept = [end - start for start, end in pairwise([*starts, count])]
    own = compute(starts[accelerator.process_index], starts[accelerator.process_index] + length)

    gathered = [{name: gather_on_main(x) for name, x in one.tensors().items()} for one in own]
    if not accelerator.is_main_process:
        return []
    each = list(zip(own, gathered))
    return join_features(
        [Features(one.detector, **{name: x[rank][:num] for name, x in parts.items()}) for one, parts in each]
        for rank, num in enumerate(kept)
    )
