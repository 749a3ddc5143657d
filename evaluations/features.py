"""Features of images, the interface of a detector, and the features of a whole set. N images, D pooled features, S spatial
features, C classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from evaluations.statistics import Statistics, rows_not_finite


@dataclass(frozen=True)
class Features:
    """Features of N images, in their order.

    Attributes:
        detector: name of the detector; only features of one detector are compared.
        pool: [N, D] float32.
        logits: [N, C] float32, where the detector has them; their softmax gives the class probabilities.
        spatial: [N, S] float32, where the detector has them.
        statistics: of `pool` and `spatial`, stored in a file or computed once for a reference; metrics then use these.
    """

    detector: str
    pool: Tensor
    logits: Tensor | None = None
    spatial: Tensor | None = None
    statistics: dict[str, Statistics] = field(default_factory=dict)

    def __post_init__(self):
        sizes = {name: tuple(x.shape) for name, x in self.tensors().items()}
        if any(len(size) != 2 or size[0] != len(self.pool) for size in sizes.values()):
            raise ValueError(f"features must be [N, ...] with one N, not {sizes}")

    def __len__(self) -> int:
        return len(self.pool)

    def tensors(self) -> dict[str, Tensor]:
        """Those of pool, logits and spatial that there are."""
        return {name: x for name in ("pool", "logits", "spatial") if (x := getattr(self, name)) is not None}

    def to(self, device: torch.device | str) -> Features:
        return replace(self, **{name: x.to(device) for name, x in self.tensors().items()})


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


def sha256_of_file(file: str | Path) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def check_images(images: np.ndarray | Tensor) -> Tensor:
    """uint8 [N, H, W, 3] as a tensor. Raises UserError for floats, another number of channels, or channels first."""
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
    return Features(
        parts[0].detector, **{name: torch.cat([getattr(part, name) for part in parts]) for name in parts[0].tensors()}
    )


def extract(detectors: Sequence[Detector], batches: Iterable[np.ndarray]) -> list[Features]:
    """Features of all batches (uint8 [b, H, W, 3] each), on the CPU, of each detector; the batches are gone through once.

    Raises:
        UserError: no images; features that are not finite.
    """
    parts: list[list[Features]] = [[] for _ in detectors]

    def compute(batch: np.ndarray) -> list[Features]:
        return [detector.features(batch) for detector in detectors]

    # Copying to the CPU waits for the device, so the device gets the next batch before one is copied.
    for computing, _ in pairwise(chain(map(compute, batches), [None])):
        for done, part in zip(parts, computing):
            part = part.to("cpu")
            for name, x in part.tensors().items():
                if bad := rows_not_finite(x):
                    image = sum(map(len, done)) + bad[0]
                    raise UserError(f"the {part.detector} detector gives NaN or infinite {name} features for image {image}")
            done.append(part)
    return [concatenate(done) for done in parts]
