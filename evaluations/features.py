"""Features of images, the interface of a detector, and the features of a whole set.

N images, D pooled features, S spatial features, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from evaluations.metrics import Statistics


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

    def __len__(self) -> int:
        return len(self.pool)

    def tensors(self) -> dict[str, Tensor]:
        """Those of pool, logits and spatial that there are."""
        return {name: x for name in ("pool", "logits", "spatial") if (x := getattr(self, name)) is not None}


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


def to_device(images: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """uint8 [N, H, W, 3] on the device. Raises UserError for floats, another number of channels, or channels first."""
    x = torch.as_tensor(images)
    if x.dtype != torch.uint8 or x.ndim != 4 or x.shape[3] != 3:
        raise UserError(f"images are {x.dtype} {list(x.shape)}; a detector takes uint8 [N, H, W, 3]")
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()  # only from pinned memory does the copy not wait for the batch before it
    return x.to(device, non_blocking=True)


def extract(detectors: Sequence[Detector], batches: Iterable[np.ndarray]) -> list[Features]:
    """Features of all batches (uint8 [b, H, W, 3] each), on the CPU, by each detector. The batches are gone through once.

    Raises:
        UserError: features that are not finite.
    """
    parts: list[list[dict[str, Tensor]]] = [[] for _ in detectors]
    computed = ([detector.features(batch) for detector in detectors] for batch in batches)
    # Copying to the CPU waits for the device, so the device gets the next batch before one is copied.
    for computing, _ in pairwise(chain(computed, [None])):
        for done, features in zip(parts, computing):
            part = {name: x.cpu() for name, x in features.tensors().items()}
            for name, x in part.items():
                if not x.isfinite().all():
                    raise UserError(f"the {features.detector} detector gives NaN or infinite {name} features")
            done.append(part)
    return [
        Features(detector.name, **{name: torch.cat([part[name] for part in done]) for name in done[0]})
        for detector, done in zip(detectors, parts)
    ]
