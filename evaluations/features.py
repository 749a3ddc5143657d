"""Extract image features with detectors, and cache the features of reference images on disk.

Shapes use N for images, D for pooled features, S for spatial features and C for classes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from common.devices import copy_to_device
from common.errors import UserError
from common.files import hash_bytes, regular_file, write_atomically
from common.progress import progress_bar
from evaluations.images import ImageSet, read_ahead
from evaluations.metrics import Statistics, squared_radii_of_reference, statistics_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Features:
    """Features of N images, in image order. Optional tensors are None if the detector does not compute them."""

    detector: str  # detector name, equal for the reference and the samples that a metric compares
    pool: Tensor  # [N, D] float32
    logits: Tensor | None = None  # [N, C] float32, unnormalised log-probabilities of the classes
    spatial: Tensor | None = None  # [N, S] float32
    statistics: dict[str, Statistics] = field(default_factory=dict)  # statistics by layer, which metrics use if available
    _memo: dict[tuple[str, str], Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # see `_memoised`

    def __len__(self) -> int:
        return len(self.pool)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors `pool`, `logits` and `spatial` in a dictionary, without tensors that are None."""
        return {name: x for name in ("pool", "logits", "spatial") if (x := getattr(self, name)) is not None}

    def squared_radii_on(self, device: torch.device | str) -> Tensor:
        """Return `metrics.squared_radii_of_reference` of `pool` [N]. The first call computes it on the device.

        Later calls return the same tensor, because many sample sets share one reference, whose search takes longest.
        """
        return self._memoised("radii", device, lambda: squared_radii_of_reference(self.pool.to(device)))

    def statistics_or_features(self, layer: str, device: torch.device | str) -> Statistics | Tensor | None:
        """Return the statistics of a layer on the device, or its features if there are no statistics.

        The statistics stay on the device, with the root that they cache.
        """
        if layer in self.statistics:
            return self._memoised(layer, device, lambda: self.statistics[layer].to(device))
        features = getattr(self, layer)
        return None if features is None else features.to(device)

    def _memoised(self, name: str, device: torch.device | str, compute: Callable[[], Any]) -> Any:
        """Return what an earlier call computed for this name and device, or compute it."""
        if (key := (name, str(device))) not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    def select(self, items: Tensor) -> Features:
        """Return the features of the images `items` [n], int64, in this order and without statistics."""
        return replace(self, statistics={}, **{name: x[items] for name, x in self.tensors().items()})


class Detector(Protocol):
    """A network that computes image features."""

    name: str  # short name, used in file names
    weights_hash: str  # hash of the weights and everything else that affects the features, used to identify cached features

    def features(self, images: np.ndarray | Tensor) -> Features:
        """Compute features of uint8 images [N, H, W, 3] on the detector's device."""
        ...


def stored_statistics(images: ImageSet, detector: Detector) -> dict[str, Statistics]:
    """Return the statistics of a detector's features that a file of images stores, by layer.

    Statistics in ADM's format belong to the published Inception. They are left out for an Inception with other weights, and the
    function raises UserError if the file has no images from which to compute others.
    """
    found = images.statistics.get(detector.name, {})
    if not found or getattr(detector, "has_published_weights", True):
        return found
    if not len(images):
        reason = f"which evaluation.detector_weights replaces (SHA-256 {detector.weights_hash[:8]}...)"
        raise UserError(f"{images.path} holds only statistics of the published {detector.name}, {reason}; give images")
    return {}


def to_device(images: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy uint8 images [N, H, W, 3] to the device."""
    x = torch.as_tensor(images)
    if x.dtype != torch.uint8 or x.ndim != 4 or x.shape[3] != 3:
        raise UserError(f"images are {x.dtype} {list(x.shape)}; a detector takes uint8 [N, H, W, 3]")
    return copy_to_device(x, device)


def extract_features(detectors: Sequence[Detector], batches: Iterable[np.ndarray]) -> list[Features]:
    """Compute each detector's features for all batches (uint8 [b, H, W, 3]) in one pass, and return the features on the CPU.

    Raises UserError if a feature is not finite.
    """
    parts = []
    computed = ([detector.features(batch) for detector in detectors] for batch in batches)
    # Copying features to the CPU waits for the device, so the loop queues the next batch before it copies the current features.
    for current, _ in pairwise(chain(computed, [None])):
        parts.append([Features(x.detector, **{name: tensor.cpu() for name, tensor in x.tensors().items()}) for x in current])
        for features in parts[-1]:
            for name, tensor in features.tensors().items():
                if not tensor.isfinite().all():
                    raise UserError(f"the {features.detector} detector gives NaN or infinite {name} features")
    return join_features(parts)


def join_features(parts: Iterable[Sequence[Features]]) -> list[Features]:
    """Concatenate the features of each detector over all parts: [part][detector] -> [detector]."""
    return [
        Features(group[0].detector, **{name: torch.cat([getattr(x, name) for x in group]) for name in group[0].tensors()})
        for group in zip(*parts)
    ]


def features_of_images(
    images: ImageSet, detectors: Sequence[Detector], batch_size: int, items: Sequence[int], show_progress: bool = True
) -> list[Features]:
    """Compute each detector's features of the images with the ascending indices `items`, reading every image only once.

    The features are empty if the images come from an .npz file that contains only statistics.
    """
    if len(images) == 0:
        return [Features(detector.name, pool=torch.empty(0, 0)) for detector in detectors]
    batches = read_ahead(images.batches(batch_size, items))
    total = -(-len(items) // batch_size)
    desc = f"features of {images.path.name}"
    bar = progress_bar(batches, total=total, desc=desc, unit="batch", leave=False, disable=not show_progress)
    return extract_features(detectors, bar)


def _cache_file(folder: Path, images: ImageSet, detector: Detector) -> tuple[Path, dict[str, str]]:
    """Return the cache file <folder>/<images>_<detector>_<hash>.safetensors and a header that identifies images and weights."""
    header = {"images": images.local_hash(), "weights": detector.weights_hash}
    return folder / f"{images.path.name}_{detector.name}_{hash_bytes(repr(header).encode())[:8]}.safetensors", header


def read_cache(folder: Path, images: ImageSet, detector: Detector) -> Features | None:
    """Load cached features and statistics. Returns None if the cache contains no features for the images and detector weights."""
    file, header = _cache_file(folder, images, detector)
    try:
        with safe_open(regular_file(file), framework="pt") as f:
            if f.metadata() != header:
                return None
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError):
        return None
    layers = [layer for layer in ("pool", "spatial") if f"{layer}.mu" in tensors]
    statistics = {layer: Statistics(tensors.pop(f"{layer}.mu"), tensors.pop(f"{layer}.sigma")) for layer in layers}
    return Features(detector.name, statistics=statistics, **tensors)


def write_cache(folder: Path, images: ImageSet, detector: Detector, features: Features) -> Features:
    """Compute statistics, cache them with the features, and return both. Logs a warning if the cache folder is not writable.

    If a layer has no more images than features, no statistics are computed, because `frechet_distance` is exact on the features.
    """
    tensors = {name: x.contiguous() for name, x in features.tensors().items()}
    layers = [name for name, x in tensors.items() if name != "logits" and len(x) > x.shape[1]]
    statistics = {layer: statistics_of(tensors[layer]) for layer in layers}
    for layer, computed in statistics.items():
        tensors |= {f"{layer}.mu": computed.mu, f"{layer}.sigma": computed.sigma}
    file, header = _cache_file(folder, images, detector)
    try:
        write_atomically(file, save(tensors, metadata=header))
    except UserError as e:
        log.warning("%s; the features will be computed at every start", e)
    return replace(features, statistics=statistics)
