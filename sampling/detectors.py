"""The detectors and the reference that evaluation.* names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator

from common.errors import UserError
from configs import schema
from evaluations.classifiers import DIGITS_WEIGHTS, ClassifierDetector
from evaluations.features import Detector, stored_statistics
from evaluations.images import ImageSet, open_images
from evaluations.inception import InceptionDetector, fetch_weights
from evaluations.suite import set_of
from evaluations.vit import DINOV2_L, DINOv2Detector, find_encoder_weights


def build_detectors(settings: schema.DetectorSettings, accelerator: Accelerator) -> list[Detector]:
    """What evaluation.* asks for, on this process's device. Raises UserError where the weights cannot be had."""
    return [_build_detector(name, settings, accelerator) for name in settings.all_detectors]


def _build_detector(name: str, settings: schema.DetectorSettings, accelerator: Accelerator) -> Detector:
    if name == "digits":
        return ClassifierDetector(name, DIGITS_WEIGHTS, accelerator.device)
    if set_of(name):
        if settings.weights is None:
            raise UserError(f"evaluation.detector={name} needs evaluation.weights=<the file of prepare_latents.py detector>")
        return ClassifierDetector(name, settings.weights, accelerator.device)
    how = (accelerator.device, settings.precision, settings.compile)
    with accelerator.local_main_process_first():  # one process of a machine downloads, the others find the file
        if name == "dinov2":
            weights = settings.dinov2_weights or find_encoder_weights(DINOV2_L)
        else:
            weights = settings.weights or fetch_weights()
    return (DINOv2Detector if name == "dinov2" else InceptionDetector)(weights, *how)


def open_reference(path: str | None, key: str, detectors: Sequence[str]) -> ImageSet:
    """The reference that `key` names, for detectors by name.

    Raises:
        UserError: it cannot be used, or holds neither images nor statistics of a detector.
    """
    if path is None or not Path(path).exists():
        raise UserError(
            f"{key}={path} does not exist; give a folder of images or a reference batch (ADM's are at "
            "https://github.com/openai/guided-diffusion/tree/main/evaluations, `prepare_latents.py reference` makes one)"
        )
    images = open_images(path)
    for name in detectors:  # before their weights are downloaded
        if len(images) == 0 and not stored_statistics(images, name):
            raise UserError(f"{key}={path} holds no images and no statistics of the {name} detector")
    return images
