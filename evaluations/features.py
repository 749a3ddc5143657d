"""Features of images: the interface of a detector, the features of a whole set, and those of a reference, which are cached.

N images, D pooled features, S spatial features, C classes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from common.errors import UserError
from common.files import hash_bytes, write_file
from common.progress import progress_bar
from evaluations.images import ImageSet, read_ahead
from evaluations.metrics import Statistics, statistics_of

log = logging.getLogger(__name__)


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
    """What turns images into features."""

    name: str  # short, part of file names
    weights_hash: str  # of the weights and of all else that changes the features; caches are keyed by it

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

    Raises UserError for features that are not finite.
    """
    parts = []
    computed = ([detector.features(batch) for detector in detectors] for batch in batches)
    # Copying to the CPU waits for the device, so the device gets the next batch before one is copied.
    for computing, _ in pairwise(chain(computed, [None])):
        parts.append([Features(one.detector, **{name: x.cpu() for name, x in one.tensors().items()}) for one in computing])
        for features in parts[-1]:
            for name, x in features.tensors().items():
                if not x.isfinite().all():
                    raise UserError(f"the {features.detector} detector gives NaN or infinite {name} features")
    return join_features(parts)


def join_features(parts: Iterable[Sequence[Features]]) -> list[Features]:
    """Features of all images by each detector, from those of stretches of the images."""
    return [
        Features(same[0].detector, **{name: torch.cat([getattr(one, name) for one in same]) for name in same[0].tensors()})
        for same in zip(*parts)
    ]


def features_of_images(
    images: ImageSet, detectors: Sequence[Detector], batch_size: int, start: int, stop: int, show_progress: bool = True
) -> list[Features]:
    """Features of images start .. stop - 1 by each detector, computed in this process, the images being read once.

    There are none for an .npz that holds statistics only.
    """
    if len(images) == 0:
        return [Features(detector.name, pool=torch.empty(0, 0)) for detector in detectors]
    total = len(range(start, stop, batch_size))
    how = {"desc": f"features of {images.path.name}", "unit": "batch", "leave": False, "disable": not show_progress}
    return extract(detectors, progress_bar(read_ahead(images.batches(batch_size, start, stop)), total=total, **how))


def stored_statistics(images: ImageSet, detector: str) -> dict[str, Statistics]:
    """The statistics of this detector that the file holds, by layer. ADM's evaluator uses Inception's so."""
    return {layer: known for (name, layer), known in images.statistics.items() if name == detector}


def _cache_of(folder: Path, images: ImageSet, detector: Detector) -> tuple[Path, dict[str, str]]:
    """The cache, <folder>/x.npz_inception_<hash>.safetensors, and its header: the images and the weights."""
    header = {"images": images.fingerprint(), "weights": detector.weights_hash}
    return folder / f"{images.path.name}_{detector.name}_{hash_bytes(repr(header).encode())[:8]}.safetensors", header


def read_cache(folder: Path, images: ImageSet, detector: Detector) -> Features | None:
    """The cached features with their statistics; None if there are none, or they are of other images or weights."""
    file, header = _cache_of(folder, images, detector)
    try:
        with safe_open(file, framework="pt") as f:
            if f.metadata() != header:
                return None
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError):
        return None
    layers = [layer for layer in ("pool", "spatial") if f"{layer}.mu" in tensors]
    statistics = {layer: Statistics(tensors.pop(f"{layer}.mu"), tensors.pop(f"{layer}.sigma")) for layer in layers}
    return Features(detector.name, statistics=statistics, **tensors)


def write_cache(folder: Path, images: ImageSet, detector: Detector, features: Features) -> Features:
    """Cache the features with their statistics, and return both. If the folder cannot be written to, warn.

    A layer that has no more images than features gets no statistics: `frechet_distance` is exact on the features themselves.
    """
    tensors = {name: x.contiguous() for name, x in features.tensors().items()}
    layers = [name for name, x in tensors.items() if name != "logits" and len(x) > x.shape[1]]
    statistics = {layer: statistics_of(tensors[layer]) for layer in layers}
    for layer, known in statistics.items():
        tensors |= {f"{layer}.mu": known.mu, f"{layer}.sigma": known.sigma}
    file, header = _cache_of(folder, images, detector)
    try:
        write_file(file, save(tensors, metadata=header))
    except UserError as e:
        log.warning("%s; the features will be computed at every start", e)
    return replace(features, statistics=statistics)
