"""Detectors and references of a command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator

from common.errors import UserError
from configs import schema
from evaluations.detector import InceptionDetector, fetch_weights
from evaluations.digits_detector import DigitsDetector
from evaluations.dinov2_detector import DINOV2, DINOv2Detector
from evaluations.encoders import find_encoder_weights
from evaluations.features import Detector
from evaluations.images import ImageSet, open_images
from evaluations.reference import check_reference
from evaluations.small_detector import MAKE, SmallDetector
from evaluations.suite import set_of


def build_detectors(settings: schema.DetectorSettings, accelerator: Accelerator) -> list[Detector]:
    """What evaluation.* asks for, on this process's device. Raises UserError where the weights cannot be had."""
    return [_build_detector(name, settings, accelerator) for name in settings.all_detectors]


def _build_detector(name: str, settings: schema.DetectorSettings, accelerator: Accelerator) -> Detector:
    how = (accelerator.device, settings.precision, settings.compile)
    if name == DigitsDetector.name:
        return DigitsDetector(accelerator.device)
    if set_of(name):
        if settings.weights is None:
            raise UserError(f"evaluation.detector={name} needs evaluation.weights=<its file>; make it: {MAKE}")
        return SmallDetector(name, settings.weights, accelerator.device)
    if name == DINOv2Detector.name:
        with accelerator.local_main_process_first():  # one process of a machine downloads, the others find the file
            weights = find_encoder_weights(DINOV2, settings.dinov2_weights, "evaluation.dinov2_weights")
        return DINOv2Detector(weights, *how)
    with accelerator.local_main_process_first():
        weights = settings.weights or fetch_weights(accelerator.is_local_main_process)
    return InceptionDetector(weights, *how)


def open_reference(path: str | None, key: str, detectors: Sequence[str]) -> ImageSet:
    """The reference that `key` names, for detectors by name."""
    if path is None:
        raise UserError(
            f"{key} is not set: give a reference batch, VIRTUAL_imagenet256_labeled.npz of ADM's evaluation suite, say, or a "
            "folder of images"
        )
    if not (Path(path).is_dir() or Path(path).is_file()):
        found = "is not a file" if Path(path).exists() else "does not exist"
        adm = "https://github.com/openai/guided-diffusion/tree/main/evaluations"
        raise UserError(
            f"{key}={path} {found}; reference batches are at {adm}, and `prepare_latents.py reference` makes one of "
            "images of your own"
        )
    images = open_images(path)
    for name in detectors:  # before their weights are downloaded
        check_reference(images, name)
    return images
