"""DINOv2's ViT-L/14 as a detector, as dgm-eval (arXiv 2306.04675) and EDM2 (arXiv 2312.02696) use it: FD-DINOv2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from evaluations.encoders import Encoder
from evaluations.features import Features, check_images
from evaluations.metrics import full_float32

DINOV2 = "vit_large_patch14_dinov2.lvd142m"
DINOV2_WIDTH = 1024
INPUT_SIZE = 224


class DINOv2Detector:
    """The class token, [N, 1024], of images that are resized to 224x224 pixels.

    As in EDM2's code: bicubic with antialias in torch, ImageNet's mean and deviation, positions resampled by DINOv2's own code.

    Args:
        weights: a file, timm's or the authors'; None: from the Hugging Face hub's cache, or downloaded.
        precision, compile: as for InceptionDetector.
        key: of the configuration that names `weights`, for the messages.

    Raises:
        UserError: the weights are missing, unreadable or of another network.
    """

    name = "dinov2"

    def __init__(
        self,
        weights: str | Path | None = None,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        compile: bool = False,
        key: str = "evaluation.dinov2_weights",
    ):
        self._encoder = Encoder(
            DINOV2, weights, INPUT_SIZE, device, positions="dinov2", precision=precision, compile=compile, key=key
        )
        self.weights_hash = self._encoder.weights_hash + ("" if precision == "fp32" else f"-{precision}")

    def features(self, images: np.ndarray | Tensor) -> Features:
        """uint8 [N, H, W, 3] of any size -> features on the device."""
        x = check_images(images)
        if self._encoder.device.type == "cuda" and x.device.type == "cpu":
            x = x.pin_memory()  # as in InceptionDetector
        with full_float32():
            return Features(self.name, pool=self._encoder.encode(x)[0])
