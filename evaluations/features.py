"""Features of images, the interface of a detector, and the features of a whole set. N images, D pooled features, S spatial
features, C classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from errors import UserError
from evaluations.statistics import Statistics


@dataclass(frozen=True)
class Features:
    """Features of N images, in their order.

    Attributes:
        detector: name of the detector; only features of one detector are compared.
        pool: [N, D] float32.
        logits: [N, C] float32; their softmax gives the class probabilities.
        spatial: [N, S] float32, where the detector has them.
        statistics: of `pool` and `spatial`, stored in a file or computed once for a reference. Metrics use them instead of
            computing their own.
    """

    detector: str
    pool: Tensor
    logits: Tensor
    spatial: Tensor | None = None
    statistics: dict[str, Statistics] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pool)

    def tensors(self) -> dict[str, Tensor]:
        """pool, logits and, where there is one, spatial."""
        return {name: x for name in ("pool", "logits", "spatial") if (x := getattr(self, name)) is not None}

    def to(self, device: torch.device | str) -> Features:
        return replace(self, **{name: x.to(device) for name, x in self.tensors().items()})

    def statistics_or_samples(self, layer: str) -> Statistics | Tensor | None:
        """The known statistics of `pool` or `spatial`, else its features [N, D]; None where there are neither."""
        samples = getattr(self, layer)
        return self.statistics.get(layer, samples if samples is not None and len(samples) else None)


class Detector(Protocol):
    """What turns images into features.

    Attributes:
        name: short, part of file names.
        weights_hash: of the weights and of all else that changes the features; caches are keyed by it.
    """

    name: str
    weights_hash: str

    def features(self, images: np.ndarray | Tensor) -> Features:
        """uint8 [N, H, W, 3] -> features on the detector's device."""
        ...


def check_images(images: np.ndarray | Tensor) -> Tensor:
    """uint8 [N, H, W, 3] as a tensor.

    Raises:
        UserError: floats, another number of channels, channels first.
    """
    images = torch.as_tensor(images)
    if images.dtype != torch.uint8:
        raise UserError(f"images are {images.dtype}; a detector takes uint8, 0 to 255 (round and clamp floats before)")
    if images.ndim != 4 or images.shape[3] != 3:
        raise UserError(f"images are {list(images.shape)}; a detector takes [N, H, W, 3], channels last")
    return images


def concatenate(parts: Iterable[Features]) -> Features:
    """Features of consecutive batches as one set."""
    parts = list(parts)
    if not parts:
        raise UserError("there are no images")
    if len({part.detector for part in parts}) > 1:
        raise UserError(f"features of different detectors: {sorted({part.detector for part in parts})}")
    tensors = {name: torch.cat([part.tensors()[name] for part in parts]) for name in parts[0].tensors()}
    return Features(parts[0].detector, **tensors)


def extract(detector: Detector, batches: Iterable[np.ndarray]) -> Features:
    """Features of all batches, on the CPU.

    Args:
        batches: uint8 [b, H, W, 3] each.

    Raises:
        UserError: no images; features that are not finite.
    """
    parts: list[Features] = []
    computing = None
    for images in itertools.chain(batches, [None]):
        following = None if images is None else detector.features(images)
        if computing is not None:
            # Copying to the CPU waits for the device, so a batch is copied while the device computes the next one.
            parts.append(computing.to("cpu"))
            _check_finite(parts[-1], first_image=sum(map(len, parts[:-1])))
        computing = following
    return concatenate(parts)


def _check_finite(features: Features, first_image: int) -> None:
    for name, x in features.tensors().items():
        bad = (~x.isfinite().all(dim=1)).nonzero()
        if len(bad):
            image = first_image + bad[0].item()
            raise UserError(f"the {features.detector} detector gives NaN or infinite {name} features for image {image}")
