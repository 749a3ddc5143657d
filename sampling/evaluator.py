"""Evaluate sampled images or images on disk against a reference. The processes share the work without intermediate files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from common.errors import UserError, as_user_error
from common.files import hash_file
from common.interruption import until_stopped
from common.progress import log_if_slow, progress_bar
from configs import schema
from evaluations.features import Detector, Features, extract, features_of_images, read_cache, write_cache
from evaluations.images import ImageSet, open_images
from evaluations.suite import evaluate, jackknife
from runtime.processes import check_same, gather_on_main, on_main
from sampling.sampler import ImageSampler

log = logging.getLogger(__name__)


def build_detectors(settings: schema.EvaluationSettings, accelerator: Accelerator) -> list[Detector]:
    """Build the configured detectors on this process's device. Raises UserError if a detector's weights are missing."""
    return [_build_detector(name, settings, accelerator) for name in settings.all_detectors]


def hash_weights(settings: schema.EvaluationSettings) -> dict[str, str | None]:
    """Return the hash of each configured weights file, or None if published weights are used. Raises UserError on read errors."""
    hashes = {}
    for key in ("detector_weights", "dinov2_weights"):
        with as_user_error(f"evaluation.{key}={(file := getattr(settings, key))}"):
            hashes[key] = file and hash_file(Path(file))
    return hashes


def _build_detector(name: str, settings: schema.EvaluationSettings, accelerator: Accelerator) -> Detector:
    if name == "digits" or name.startswith("small-"):
        from evaluations.classifiers import DIGITS_WEIGHTS, ClassifierDetector

        if name != "digits" and settings.detector_weights is None:
            raise UserError(
                f"evaluation.detector={name} needs evaluation.detector_weights=<file of `prepare_latents.py detector`>"
            )
        return ClassifierDetector(name, DIGITS_WEIGHTS if name == "digits" else settings.detector_weights, accelerator.device)
    if name == "dinov2":
        from evaluations.vit import DINOV2_L, DINOv2Detector, find_encoder_weights

        return DINOv2Detector(settings.dinov2_weights or find_encoder_weights(DINOV2_L), accelerator.device)

    from evaluations.inception import InceptionDetector, fetch_weights

    # If the detectors include small-<set>, `evaluation.detector_weights` is the weights file for small-<set>, not for Inception.
    file = None if any(name.startswith("small-") for name in settings.all_detectors) else settings.detector_weights
    return InceptionDetector(file or fetch_weights(), accelerator.device)


def open_reference(
    path: str | None, key: str, detectors: Sequence[str], resolution: int | None = None, background: str = "white"
) -> ImageSet:
    """Open the reference at `path`. If `path` is a folder, its images are cropped to `resolution` with ADM's centre crop.

    Args:
        detectors: Names of the detectors that will be applied to the reference.

    Raises:
        UserError: The reference cannot be opened, or has no images and no statistics for one of the detectors.
    """
    if path is None or not Path(path).exists():
        problem = "is not set" if path is None else f"{path} does not exist"
        raise UserError(
            f"{key}: {problem}; give a folder of images or a reference batch (ADM's are at "
            "https://github.com/openai/guided-diffusion/tree/main/evaluations, `prepare_latents.py reference` makes one)"
        )
    images = open_images(path, crop=resolution if Path(path).is_dir() else None, background=background)
    check_same(images.quick_fingerprint(), key, images.path)
    for name in detectors:  # checked before the detectors download their weights
        if len(images) == 0 and name not in images.statistics:
            raise UserError(f"{key}={path} holds no images and no statistics of the {name} detector")
    return images


class Evaluator:
    """Computes image features on all processes, and metrics against one reference on the main process.

    Args:
        cache: Folder that caches the reference features.

    Attributes:
        references: Reference features and statistics for each detector. Every entry is None on the other processes, because
            only the main process computes metrics.
    """

    def __init__(
        self, accelerator: Accelerator, detectors: Sequence[Detector], reference: ImageSet, batch_size: int, cache: Path
    ):
        self.accelerator, self.detectors, self.batch_size, self.cache = accelerator, detectors, batch_size, cache
        self.references = [self._load_reference(reference, detector) for detector in detectors]

    def features_of_samples(
        self, sampler: ImageSampler, labels: Mapping[int, int], stop: Callable[[], bool] = lambda: False, name: str = "evaluation"
    ) -> list[Features]:
        """Sample one image per seed and compute its features with each detector. Returns [] except on the main process.

        Args:
            labels: Maps each seed to a class.
            stop: Called before each batch, equally often on every process. Must return the same value on all processes.
            name: Title of the progress bar.

        Raises:
            Interrupted: `stop` returned True.
        """
        all_seeds = list(labels)

        def compute(start: int, end: int) -> list[Features]:
            own = all_seeds[start:end]
            own += all_seeds[-1:] * (end - start - len(own))  # all processes have equally many batches, as they call `stop`
            batches = [own[i : i + self.batch_size] for i in range(0, len(own), self.batch_size)]
            is_other = not self.accelerator.is_main_process
            bar = progress_bar(batches, desc=name, unit="batch", leave=False, disable=is_other)
            images = (sampler(seeds, [labels[seed] for seed in seeds]) for seeds in until_stopped(bar, stop))
            return extract(self.detectors, images)

        return shared_features(self.accelerator, len(labels), compute)

    def features_of_set(self, images: ImageSet, num_samples: int) -> list[Features]:
        """Compute features of the first `num_samples` images with each detector. Returns [] except on the main process.

        If `num_samples` covers all images in the file, the features include statistics stored in the file, as in ADM's evaluator.
        """
        features = self._features_of(images, self.detectors, num_samples)
        if num_samples == len(images):
            features = [replace(x, statistics=images.statistics.get(x.detector, {})) for x in features]
        return features

    def evaluate(self, samples: Sequence[Features], labels: Sequence[int] | None) -> dict[str, float]:
        """Compute the metrics of sample features against the reference. Only the main process can call this method.

        `labels` contains the class of each sample, which `class_agreement` needs.
        """
        values, y = {}, None if labels is None else torch.as_tensor(labels)
        with log_if_slow(log, "computing the metrics of %d images", len(samples[0])):
            for pair in zip(self.references, samples):
                values |= evaluate(*pair, y, self.accelerator.device)
        return values

    def jackknife(self, samples: Sequence[Features], labels: Sequence[int] | None, num_groups: int) -> dict[str, list[float]]:
        """Call `evaluations.suite.jackknife` for each detector. This method does not use the GPU, so it can run in a thread."""
        values, y = {}, None if labels is None else torch.as_tensor(labels)
        for pair in zip(self.references, samples):
            values |= jackknife(*pair, y, num_groups)
        return values

    def _load_reference(self, images: ImageSet, detector: Detector) -> Features | None:
        is_main = self.accelerator.is_main_process
        features = read_cache(self.cache, images, detector) if is_main else None
        if on_main(lambda: features is None):  # other nodes may see another cache folder
            computed = self._features_of(images, [detector], len(images))
            if is_main:
                features = write_cache(self.cache, images, detector, computed[0]) if len(images) else computed[0]
        return replace(features, statistics=features.statistics | images.statistics.get(detector.name, {})) if is_main else None

    def _features_of(self, images: ImageSet, detectors: Sequence[Detector], count: int) -> list[Features]:
        """Compute features of the first `count` images with each detector. Returns [] except on the main process."""
        is_main = self.accelerator.is_main_process

        def compute(start: int, end: int) -> list[Features]:
            start, end = min(start, max(count - 1, 0)), min(end, count)  # a range after the last image contains the last image
            return features_of_images(images, detectors, self.batch_size, start, end, show_progress=is_main)

        return shared_features(self.accelerator, count, compute)


def shared_features(accelerator: Accelerator, count: int, compute: Callable[[int, int], list[Features]]) -> list[Features]:
    """Divide `count` items among processes that each call compute(start, stop) once. Returns [] except on the main process.

    All processes have ranges of the same length, which may end after the last item. Their features are padded, and trimmed to
    `count` items after gathering.
    """
    if accelerator.num_processes == 1 or count == 0:
        features = compute(0, count)
        return features if accelerator.is_main_process else []
    length = -(-count // accelerator.num_processes)
    start = accelerator.process_index * length

    def gather(tensor: Tensor) -> Tensor | None:
        parts = gather_on_main(F.pad(tensor, (0, 0, 0, length - len(tensor))))
        return torch.cat(parts)[:count] if parts else None

    features = compute(start, start + length)
    gathered = [Features(x.detector, **{name: gather(tensor) for name, tensor in x.tensors().items()}) for x in features]
    return gathered if accelerator.is_main_process else []
