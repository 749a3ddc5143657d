"""Features of a reference batch, cached beside it, so that its images go through the detector once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from common.errors import UserError
from common.files import write_file
from common.progress import SLOW_SEC, progress_bar, say_if_slow
from evaluations.detector import LAYER_SIZES, InceptionDetector
from evaluations.dinov2_detector import DINOV2_WIDTH, DINOv2Detector
from evaluations.features import Detector, Features, extract
from evaluations.images import ImageSet, read_ahead
from evaluations.npz import STATISTICS_KEYS, statistics_by_key, write_npz
from evaluations.statistics import Statistics, statistics_of

log = logging.getLogger(__name__)

FORMAT = "1"  # of the cache; another one is not read
# Of a detector: layer -> name of its statistics in a file. Other detectors have none there.
STORED = {InceptionDetector.name: {"pool": "pool", "spatial": "spatial"}, DINOv2Detector.name: {"pool": "dinov2"}}
STORED_SIZES = LAYER_SIZES | {"dinov2": DINOV2_WIDTH}


def features_of_images(
    images: ImageSet,
    detectors: Sequence[Detector],
    batch_size: int = 64,
    start: int = 0,
    stop: int | None = None,
    show_progress: bool = True,
) -> list[Features]:
    """Features of images start .. stop - 1 by each detector, computed in this process, the images being read once.

    There are none for an .npz that holds statistics only.
    """
    if len(images) == 0:
        return [Features(detector.name, pool=torch.empty(0, 0), logits=torch.empty(0, 0)) for detector in detectors]
    count = (len(images) if stop is None else stop) - start
    bar = progress_bar(
        total=count, desc=f"features of {images.path.name}", unit="images", delay=SLOW_SEC, leave=False, disable=not show_progress
    )

    def batches() -> Iterator[np.ndarray]:
        for batch in read_ahead(images.batches(batch_size, start, stop)):
            yield batch
            bar.update(len(batch))

    with bar:
        return extract(detectors, batches())


def load_reference(
    images: ImageSet,
    detector: Detector,
    batch_size: int = 64,
    compute: Callable[[ImageSet, Sequence[Detector], int], list[Features]] = features_of_images,
    agree: Callable[[bool], bool] = bool,
    is_main: bool = True,
) -> Features | None:
    """Features of all images, from the cache or computed and cached, with the statistics that the metrics need.

    Statistics that the file stores are used (ADM's, for Inception); others are computed here once. A layer that has no more
    images than features gets none: `frechet_distance` is exact on the features themselves.

    Args:
        compute: gives features that are not cached; with several processes, one that shares the work between them.
        agree: gives every process the main one's answer to whether they are cached.
        is_main: the other processes neither read nor write the cache, and get None.

    Raises:
        UserError: the file holds neither images nor statistics of this detector.
    """
    check_reference(images, detector.name)
    stored = stored_statistics(images, detector)
    with say_if_slow(log, "reading the features of %s", images.path):
        features = read_cache(images, detector) if is_main else None
    is_cached = agree(features is not None)
    if not is_cached:
        (features,) = compute(images, [detector], batch_size)
    if not is_main:
        return None
    if not is_cached:
        layers = {name: x for name, x in features.tensors().items() if name in STATISTICS_KEYS and len(x) > x.shape[1]}
        features = replace(features, statistics={name: statistics_of(x) for name, x in layers.items()})
        if len(features):
            write_cache(images, detector, features)
    return replace(features, statistics=features.statistics | stored)


def check_reference(images: ImageSet, detector: str) -> None:
    """Raises UserError where images and statistics of this detector, by its name, are both missing."""
    if len(images) == 0 and images.statistics.keys().isdisjoint(STORED.get(detector, {}).values()):
        raise UserError(
            f"{images.path} holds statistics of other detectors and no images: the {detector} detector has nothing to compare "
            "with; make a reference of the images: python prepare_latents.py reference images=<folder> output=<file.npz> "
            "'detectors=[inception,dinov2]'"
        )


def stored_statistics(images: ImageSet, detector: Detector) -> dict[str, Statistics]:
    """The statistics of this detector in the file, as ADM's evaluator uses Inception's."""
    if images.statistics and detector.name not in STORED:
        log.info("%s: its mu and sigma are Inception's; the %s detector does not use them", images.path, detector.name)
    names = STORED.get(detector.name, {})
    found = {layer: images.statistics[name] for layer, name in names.items() if name in images.statistics}
    for layer, known in found.items():
        if len(known.mu) != (size := STORED_SIZES[names[layer]]):
            network = "Inception" if detector.name == InceptionDetector.name else "DINOv2"
            raise UserError(
                f"{images.path}: {STATISTICS_KEYS[names[layer]][0]} has {len(known.mu)} entries, {network}'s {layer} features "
                f"{size}; take the statistics out of the file or make them again: python prepare_latents.py reference"
            )
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The cache: a safetensors file whose header says which images and which detector it belongs to.


def cache_file(images: ImageSet, detector: Detector) -> Path:
    """VIRTUAL_x.npz -> VIRTUAL_x.npz.inception-features.safetensors; the same beside a folder."""
    path = images.path.resolve()
    return path.with_name(f"{path.name}.{detector.name}-features.safetensors")


def _cache_key(images: ImageSet, detector: Detector) -> dict[str, str]:
    return {"format": FORMAT, "images": images.fingerprint(), "detector": detector.name, "weights": detector.weights_hash}


def read_cache(images: ImageSet, detector: Detector) -> Features | None:
    """The cached features; None if there is no cache or it belongs to other images or another detector."""
    file = cache_file(images, detector)
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="pt") as f:
            changed = [name for name, value in _cache_key(images, detector).items() if (f.metadata() or {}).get(name) != value]
            if changed:
                log.info("%s is of other %s; computing the features again", file, " and ".join(changed))
                return None
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as e:
        log.warning("%s cannot be read (%s); computing the features again", file, e)
        return None
    statistics = {
        layer: Statistics(tensors.pop(mu), tensors.pop(sigma)) for layer, (mu, sigma) in STATISTICS_KEYS.items() if mu in tensors
    }
    return Features(detector.name, statistics=statistics, **tensors)


def write_cache(images: ImageSet, detector: Detector, features: Features) -> None:
    """Write the cache. If the folder cannot be written to, warn: only later starts become slower."""
    tensors = features.tensors() | statistics_by_key(features.statistics)
    blob = save({name: x.contiguous() for name, x in tensors.items()}, metadata=_cache_key(images, detector))
    try:
        write_file(cache_file(images, detector), blob)
    except UserError as e:
        log.warning("%s; the features will be computed at every start", e)


def write_reference(images: ImageSet, output: Path, detectors: Sequence[Detector] = (), batch_size: int = 64) -> None:
    """Make a reference batch of a set of images, in ADM's format. Raises UserError where the output exists.

    Args:
        detectors: Inception, to store mu, sigma, mu_s and sigma_s as well, and DINOv2, to store mu_dinov2 and sigma_dinov2;
            evaluations then need not compute them.
    """
    if output.exists():
        raise UserError(f"{output} exists; nothing was written")
    statistics = {}
    for features in features_of_images(images, detectors, batch_size) if detectors else ():
        statistics |= {name: statistics_of(getattr(features, layer)) for layer, name in STORED[features.detector].items()}
    singles = (image for batch in read_ahead(images.batches(batch_size)) for image in batch)
    write_npz(output, singles, images.shape, images.labels, statistics)
