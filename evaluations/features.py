"""What a detector makes of images, and how the features of many batches and processes become those of one set.

N images, D pooled features, S spatial features, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
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
        statistics: `pool` and `spatial`, known already: stored in a file, or computed once for a reference. Metrics use
            them instead of computing their own.
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
        return Features(self.detector, statistics=self.statistics, **{name: x.to(device) for name, x in self.tensors().items()})

    def first(self, count: int) -> Features:
        """The first `count` images, without stored statistics, which are of all."""
        return Features(self.detector, **{name: x[:count] for name, x in self.tensors().items()})

    def in_order(self, indices: Tensor) -> Features:
        """Undo a gather over processes: row i is of image indices[i]; padding appears twice and is dropped.

        Args:
            indices: [rows] int64, each of 0 .. N-1 at least once.

        Raises:
            UserError: an image is missing.
        """
        unique, inverse = torch.unique(indices.cpu(), return_inverse=True)
        if len(indices) != len(self) or not torch.equal(unique, torch.arange(len(unique))):
            raise UserError(f"{len(self)} rows with {len(indices)} indices are not images 0, 1, ... each at least once")
        row_of = torch.empty(len(unique), dtype=torch.int64)
        row_of[inverse] = torch.arange(len(indices))  # of two copies, either
        return Features(self.detector, **{name: x[row_of.to(x.device)] for name, x in self.tensors().items()})


class Detector(Protocol):
    """Turns images into features.

    Attributes:
        name: short, part of file names.
        weights_hash: of the weights and of whatever else changes the features: the key of caches.
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
    names = parts[0].tensors()
    return Features(parts[0].detector, **{name: torch.cat([part.tensors()[name] for part in parts]) for name in names})


def extract(detector: Detector, batches: Iterable[np.ndarray]) -> Features:
    """Features of all batches, on the CPU.

    Args:
        batches: uint8 [b, H, W, 3] each.

    Raises:
        UserError: no images; features that are not finite.
    """
    done, running, count = [], None, 0
    for images in batches:
        # Copying to the CPU waits for the device, so a batch is fetched when the next one is under way.
        following = detector.features(images)
        if running is not None:
            done.append(_fetch(running, count))
            count += len(running)
        running = following
    if running is not None:
        done.append(_fetch(running, count))
    return concatenate(done)


def _fetch(features: Features, first: int) -> Features:
    features = features.to("cpu")
    for name, x in features.tensors().items():
        bad = (~x.isfinite().all(dim=1)).nonzero()
        if len(bad):
            image = first + bad[0].item()
            raise UserError(f"the {features.detector} detector gives NaN or infinite {name} features for image {image}")
    return features
