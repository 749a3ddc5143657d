"""Features of a reference batch, cached beside it, so that its images go through the detector once."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from common.errors import UserError
from common.files import write_file
from common.progress import progress_bar
from evaluations.features import Detector, Features, extract
from evaluations.images import ImageSet, read_ahead
from evaluations.metrics import Statistics, statistics_of
from evaluations.npz import STATISTICS_KEYS, write_npz

log = logging.getLogger(__name__)


def features_of_images(
    images: ImageSet,
    detectors: Sequence[Detector],
    batch_size: int,
    start: int,
    stop: int,
    show_progress: bool = True,
) -> list[Features]:
    """Features of images start .. stop - 1 by each detector, computed in this process, the images being read once.

    There are none for an .npz that holds statistics only.
    """
    if len(images) == 0:
        return [Features(detector.name, pool=torch.empty(0, 0)) for detector in detectors]
    total = math.ceil((stop - start) / batch_size)
    how = {"desc": f"features of {images.path.name}", "unit": "batch", "leave": False, "disable": not show_progress}
    return extract(detectors, progress_bar(read_ahead(images.batches(batch_size, start, stop)), total=total, **how))


def stored_statistics(images: ImageSet, detector: str) -> dict[str, Statistics]:
    """The statistics of this detector that the file holds, by layer. ADM's evaluator uses Inception's so."""
    return {layer: known for (name, layer), known in images.statistics.items() if name == detector}


# ----------------------------------------------------------------------------------------------------------------------
# The cache: a safetensors file whose header says which images and which detector it belongs to.


def cache_file(images: ImageSet, detector: Detector) -> Path:
    """VIRTUAL_x.npz -> VIRTUAL_x.npz.inception-features.safetensors; the same beside a folder."""
    return Path(f"{images.path.resolve()}.{detector.name}-features.safetensors")


def _cache_key(images: ImageSet, detector: Detector) -> dict[str, str]:
    return {"images": images.fingerprint(), "weights": detector.weights_hash}


def read_cache(images: ImageSet, detector: Detector) -> Features | None:
    """The cached features with their statistics; None if there are none, or they are of other images or weights."""
    try:
        with safe_open(cache_file(images, detector), framework="pt") as f:
            if f.metadata() != _cache_key(images, detector):
                return None
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError):
        return None
    layers = [layer for layer in ("pool", "spatial") if f"{layer}.mu" in tensors]
    statistics = {layer: Statistics(tensors.pop(f"{layer}.mu"), tensors.pop(f"{layer}.sigma")) for layer in layers}
    return Features(detector.name, statistics=statistics, **tensors)


def write_cache(images: ImageSet, detector: Detector, features: Features) -> Features:
    """Cache the features with their statistics, and return both. If the folder cannot be written to, warn.

    A layer that has no more images than features gets no statistics: `frechet_distance` is exact on the features themselves.
    """
    tensors = {name: x.contiguous() for name, x in features.tensors().items()}
    layers = [name for name, x in tensors.items() if name != "logits" and len(x) > x.shape[1]]
    statistics = {layer: statistics_of(tensors[layer]) for layer in layers}
    for layer, known in statistics.items():
        tensors |= {f"{layer}.mu": known.mu, f"{layer}.sigma": known.sigma}
    try:
        write_file(cache_file(images, detector), save(tensors, metadata=_cache_key(images, detector)))
    except UserError as e:
        log.warning("%s; the features will be computed at every start", e)
    return replace(features, statistics=statistics)


def write_reference(images: ImageSet, output: Path, detectors: Sequence[Detector] = (), batch_size: int = 64) -> None:
    """Make a reference batch of a set of images, in ADM's format. Raises UserError where the output exists.

    Args:
        detectors: Inception, to store mu, sigma, mu_s and sigma_s as well, and DINOv2, to store mu_dinov2 and sigma_dinov2;
            evaluations then need not compute them.
    """
    if output.exists():
        raise UserError(f"{output} exists; nothing was written")
    statistics = {}
    for features in features_of_images(images, detectors, batch_size, 0, len(images)) if detectors else ():
        layers = {(features.detector, name): x for name, x in features.tensors().items()}
        statistics |= {layer: statistics_of(x) for layer, x in layers.items() if layer in STATISTICS_KEYS}
    singles = (image for batch in read_ahead(images.batches(batch_size)) for image in batch)
    write_npz(output, singles, images.shape, images.labels, statistics)
