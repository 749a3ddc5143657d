"""Evaluate sampled images or images on disk against a reference. The processes share the work without intermediate files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional as F

from common.errors import UserError, as_user_error, prefix_errors
from common.files import hash_file
from common.images import are_same_colour, differing_class
from common.interruption import until_stopped
from common.progress import log_if_slow, progress_bar
from configs import schema
from evaluations.features import (
    Detector,
    Features,
    extract_features,
    features_of_images,
    read_cache,
    stored_statistics,
    write_cache,
)
from evaluations.images import ImageSet, NpzImages, evaluation_order
from evaluations.suite import compute_metrics, jackknife, small_set
from latents.image_sets import holds_shards, open_image_set
from runtime.processes import FileFingerprint, fingerprint_file, gather_on_main, keep_on_main, on_main
from sampling.sampler import ImageSampler

log = logging.getLogger(__name__)


def build_detectors(settings: schema.SharedEvaluationSettings, accelerator: Accelerator) -> list[Detector]:
    """Build the configured detectors on this process's device."""
    return [_build_detector(name, settings, accelerator) for name in settings.all_detectors]


def weights_files(settings: schema.SharedEvaluationSettings) -> dict[str, Path]:
    """Return the weights file of each key that a configured detector loads. Published and bundled weights have none."""
    loaded = {"detector_weights": settings.owners_of_weights, "dinov2_weights": "dinov2" in settings.all_detectors}
    return {key: Path(file) for key, is_loaded in loaded.items() if is_loaded and (file := getattr(settings, key)) is not None}


def fingerprint_weights(settings: schema.SharedEvaluationSettings) -> list[FileFingerprint]:
    """Return what this process sees of the weights files of the detectors."""
    return [fingerprint_file(f"evaluation.{key}", file) for key, file in weights_files(settings).items()]


def hash_weights(settings: schema.SharedEvaluationSettings) -> dict[str, str]:
    """Return the hash of each weights file that a configured detector loads. Published and bundled weights have none."""
    hashes = {}
    for key, file in weights_files(settings).items():
        with as_user_error(f"evaluation.{key}={file}"):
            hashes[key] = hash_file(file)
    return hashes


def is_classifier(detector: str) -> bool:
    """Return whether a detector is a small classifier, which takes images of one size. The others resize images."""
    return detector == "digits" or small_set(detector) is not None


def _build_detector(name: str, settings: schema.SharedEvaluationSettings, accelerator: Accelerator) -> Detector:
    if is_classifier(name):
        from evaluations.classifiers import DIGITS_WEIGHTS, ClassifierDetector

        if name != "digits" and settings.detector_weights is None:
            raise UserError(
                f"evaluation.detector={name} needs evaluation.detector_weights=<file of `prepare_latents.py detector`>"
            )
        return ClassifierDetector(name, DIGITS_WEIGHTS if name == "digits" else settings.detector_weights, accelerator.device)
    if name == "dinov2":
        from evaluations.vit import DINOV2_L, DINOv2Detector, fetch_encoder_weights

        return DINOv2Detector(settings.dinov2_weights or fetch_encoder_weights(DINOV2_L), accelerator.device)

    from evaluations.inception import InceptionDetector, fetch_weights

    file = settings.detector_weights if name in settings.owners_of_weights else None
    return InceptionDetector(file or fetch_weights(), accelerator.device)


def open_reference(
    path: str | None,
    key: str,
    detectors: Sequence[str],
    resolution: int | None = None,
    background: str = "white",
    encoded_with: Iterable[Mapping[str, object]] = (),
) -> ImageSet:
    """Open the reference at `path`. If `path` is a folder of images, they are cropped to `resolution` with ADM's centre crop.

    Args:
        detectors: Names of the detectors that will be applied to the reference.
        resolution: Height of the samples in pixels. Stored images of another height cause a warning, or an error if a detector
            takes images of one size.
        background: Colour that the training latents have behind transparent images.
        encoded_with: Settings of `prepare_latents.py encode` that made the latents of each run, if they are known.

    Raises:
        UserError: The reference cannot be opened, was made with another background, has images of another size than a detector
            takes, or fewer than two images and no statistics for one of the detectors. Also raised for a folder if the training
            images were padded.
    """
    if path is None or not Path(path).exists():
        problem = "is not set" if path is None else f"{path} does not exist"
        raise UserError(
            f"{key}: {problem}; give a folder of images, shards of pixels or a reference batch (ADM's are at "
            "https://github.com/openai/guided-diffusion/tree/main/evaluations, `prepare_latents.py reference` makes one)"
        )
    is_folder = Path(path).is_dir() and not holds_shards(path)
    if is_folder and (pad := next((settings["pad"] for settings in encoded_with if settings.get("pad")), None)):
        remedy = f"use shards of pixels (`prepare_latents.py encode autoencoder=identity pad={pad}`), or an .npz of padded images"
        raise UserError(f"{key}={path}: the training images were encoded with pad={pad}, but a folder is only cropped; {remedy}")
    if is_folder and any(settings.get("grey") for settings in encoded_with):
        log.warning("%s=%s: the training images were encoded with grey=true; colour images in a folder stay coloured", key, path)
    with prefix_errors(key):
        images = open_image_set(path, crop=resolution if is_folder else None, background=background)
    for name in detectors:  # checked before the detectors download their weights
        if len(images) < 2 and name not in images.statistics:
            number = "only one image" if len(images) else "no images"
            raise UserError(f"{key}={path} holds {number} and no statistics of the {name} detector")
    if len(images) and resolution not in (None, images.shape[1]):
        size = f"{images.shape[2]}x{images.shape[1]} pixels"
        problem = f"{key}={path} holds images of {size}, but the samples have a height of {resolution} pixels"
        if fixed := [name for name in detectors if is_classifier(name)]:
            raise UserError(f"{problem}, and evaluation.detector={fixed[0]} takes images of one size")
        log.warning("%s", problem)
    if images.background is not None and not are_same_colour(images.background, background):
        made = f"{key}={path} was made with background={images.background}, but evaluation.background={background}"
        raise UserError(f"{made}; make it again with background={background}, or set evaluation.background={images.background}")
    if images.background is None and isinstance(images, NpzImages) and not images.statistics:
        message = f"{key}={path} does not say which colour is behind its transparent images; evaluation.background={background}"
        log.warning("%s. If it has such images, make it again: `prepare_latents.py reference` now stores the colour", message)
    return images


class Evaluator:
    """Computes image features on all processes, and metrics against one reference on the main process.

    The main process gets all features, and the other processes get [].

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
        self,
        image_sampler: ImageSampler,
        labels: Mapping[int, int],
        stop: Callable[[], bool] = lambda: False,
        name: str = "evaluation",
    ) -> list[Features]:
        """Sample one image per seed, and compute its features with each detector.

        Args:
            labels: Maps each seed to a class.
            stop: Called before each batch, equally often on every process. Must return the same value on all processes.
            name: Title of the progress bar.

        Raises:
            Interrupted: `stop` returned True.
        """
        all_seeds = list(labels)

        def compute(start: int, end: int) -> list[Features]:
            mine = all_seeds[start:end]
            mine += all_seeds[-1:] * (end - start - len(mine))  # pad, because all processes must call `stop` equally often
            batches = [mine[i : i + self.batch_size] for i in range(0, len(mine), self.batch_size)]
            is_other = not self.accelerator.is_main_process
            bar = progress_bar(batches, desc=name, unit="batch", leave=False, disable=is_other)
            images = (image_sampler(seeds, [labels[seed] for seed in seeds]) for seeds in until_stopped(bar, stop))
            return extract_features(self.detectors, images)

        return compute_on_all_processes(self.accelerator, len(labels), compute)

    def features_of_set(self, images: ImageSet, num_samples: int) -> tuple[list[Features], np.ndarray | None]:
        """Compute features of the first `num_samples` images in `evaluation_order` with each detector. Also return their labels.

        If `num_samples` covers all images in the file, the features include statistics stored in the file, as in ADM's evaluator.
        """
        items = evaluation_order(len(images))[:num_samples]
        ascending = np.sort(items)  # an .npz can only be read forwards
        positions = torch.from_numpy(np.searchsorted(ascending, items))
        features = [x.select(positions) for x in self._features_of(images, self.detectors, ascending)]
        if num_samples == len(images):
            features = [replace(x, statistics=stored_statistics(images, d)) for x, d in zip(features, self.detectors)]
        return features, None if images.labels is None else images.labels[items]

    def labels_to_compare(self, labels: Sequence[int] | None, class_names: Sequence[str] | None) -> Sequence[int] | None:
        """Return the labels, or None with a warning if a detector was trained on classes with other names than `class_names`."""
        for detector in self.detectors if labels is not None else ():
            if differing := differing_class(getattr(detector, "class_names", None), class_names):
                message = "no class agreement: the %s detector was trained on other classes than those of the images: %s"
                log.warning(message, detector.name, differing)
                return None
        return labels

    def compute_metrics(self, samples: Sequence[Features], labels: Sequence[int] | None) -> dict[str, float]:
        """Compute the metrics of sample features against the reference. Only the main process can call this method.

        `labels` contains the class of each sample, which `class_agreement` needs.
        """
        values = {}
        y = None if labels is None else torch.as_tensor(labels)
        with log_if_slow(log, "computing the metrics of %d images", len(samples[0])):
            for pair in zip(self.references, samples):
                values |= compute_metrics(*pair, y, self.accelerator.device)
        return values

    def jackknife(self, samples: Sequence[Features], labels: Sequence[int] | None, num_groups: int) -> dict[str, list[float]]:
        """Call `evaluations.suite.jackknife` for each detector. This method does not use the GPU, so it can run in a thread."""
        values = {}
        y = None if labels is None else torch.as_tensor(labels)
        for pair in zip(self.references, samples):
            values |= jackknife(*pair, y, num_groups)
        return values

    def _load_reference(self, images: ImageSet, detector: Detector) -> Features | None:
        statistics = stored_statistics(images, detector)
        features = keep_on_main(lambda: read_cache(self.cache, images, detector))
        if on_main(lambda: features is None):  # other nodes may see another cache folder
            all_features = self._features_of(images, [detector], range(len(images)))
            features = keep_on_main(
                lambda: write_cache(self.cache, images, detector, *all_features) if len(images) else all_features[0]
            )
        return replace(features, statistics=features.statistics | statistics) if features is not None else None

    def _features_of(self, images: ImageSet, detectors: Sequence[Detector], items: Sequence[int]) -> list[Features]:
        """Compute features of the images with the ascending indices `items`."""

        def compute(start: int, stop: int) -> list[Features]:
            # A process without items repeats the last one, which is trimmed after gathering.
            mine = items[start:stop] if start < len(items) else items[-1:]
            is_main = self.accelerator.is_main_process
            return features_of_images(images, detectors, self.batch_size, mine, show_progress=is_main)

        return compute_on_all_processes(self.accelerator, len(items), compute)


def build_evaluator(
    settings: schema.SharedEvaluationSettings, accelerator: Accelerator, reference: ImageSet, batch_size: int, cache: Path
) -> Evaluator:
    """Build the evaluator with the configured detectors. See `Evaluator` for the arguments."""
    return Evaluator(accelerator, build_detectors(settings, accelerator), reference, batch_size, cache)


def compute_on_all_processes(
    accelerator: Accelerator, count: int, compute: Callable[[int, int], list[Features]]
) -> list[Features]:
    """Divide `count` items among processes, which each call compute(start, stop) once. The main process gets all features.

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
