"""Check latent shards for problems, and log properties of the latents."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError, as_user_error
from common.progress import progress_bar
from latents.channel_statistics import USUAL_STD, are_mirrored, channel_sums, for_network, mean_and_std, overall_std
from latents.prepare.images import open_labelled_images, read_cropped
from latents.shards import MANIFEST, UNFINISHED, LatentDataset, is_intact, mean_and_log_variance, read_manifest, spread_items

log = logging.getLogger(__name__)

CHUNK = 1024  # number of latents to read at once


def find_problems(dataset: LatentDataset, sigma_data: float = 0.5) -> list[str]:
    """Read all latents, log their properties, and return a list of problems.

    Args:
        sigma_data: Standard deviation of the network input that the diffusion assumes.
    """
    size = f"{dataset.channels}x{dataset.height}x{dataset.width}"
    log.info("%s: %d latents %s in %d files", dataset.path, len(dataset), size, len(dataset.files))
    log.info("latents of mirrored images: %s, JPEG files: %s", dataset.has_flips, dataset.has_jpegs)
    log.info("%s", dataset.info)
    return [*_check_files(dataset), *_check_images(dataset), *_check_classes(dataset), *_check_values(dataset, sigma_data)]


def _check_files(dataset: LatentDataset) -> Iterator[str]:
    hashes, first_file = dataset.hashes, {}  # first_file maps each hash to the first file with that hash
    for file in progress_bar(dataset.files, unit="shards", desc="checksums"):
        if not is_intact(file):
            yield f"{file}: its checksum differs"
        elif (first := first_file.setdefault(hashes[file.name], file)) != file:
            yield f"{file} is a copy of {first.name}"
    manifest = read_manifest(dataset.path)
    if manifest is None:
        log.info("there is no %s, so it is unknown whether latents are missing", MANIFEST)
        if (dataset.path / UNFINISHED).exists():
            yield "the folder is not finished: run the same prepare_latents.py command again to complete it"
        return
    log.info("%d items could not be read when the folder was made", len(manifest["left_out"]))
    listed = manifest["shards"]
    for name in sorted(listed | hashes):
        if listed.get(name) != hashes.get(name):
            yield f"{dataset.path / name} {f'is not a file that {MANIFEST} lists' if name in hashes else 'is missing'}"


def _check_images(dataset: LatentDataset) -> Iterator[str]:
    if dataset.has_jpegs:
        try:
            fetch_images(dataset, 256)
        except UserError as e:
            yield str(e)
    if dataset.has_flips:
        latents, flipped = (x[:, : dataset.channels] for x in _fetch(dataset, spread_items(len(dataset), 256)))
        if not are_mirrored(latents, flipped):
            yield "latents_flip do not resemble the mirrored latents: they belong to other images"


def _check_classes(dataset: LatentDataset) -> Iterator[str]:
    counts = np.bincount(dataset.labels, minlength=dataset.info.num_classes)
    names = [f" ({name})" for name in dataset.class_names] if dataset.class_names else [""] * len(counts)
    counts = counts[: len(names)]  # num_classes can exceed the number of class names
    smallest = [f"{label}{names[label]} {counts[label]}" for label in np.argsort(counts, kind="stable")]
    log.info("%d classes of %d to %d items; smallest: %s", len(counts), counts.min(), counts.max(), ", ".join(smallest[:3]))
    if num_empty := int((counts == 0).sum()):
        yield f"{num_empty} of {len(counts)} classes have no item: {', '.join(smallest[: min(num_empty, 5)])}"


def _check_values(dataset: LatentDataset, sigma_data: float) -> Iterator[str]:
    """Check for NaN and infinity, and compare the standard deviation of the network input with `sigma_data`."""
    info, sums, not_finite = dataset.info, np.zeros((3, dataset.channels)), []
    for start in progress_bar(range(0, len(dataset), CHUNK), unit=f"x {CHUNK} latents", desc="reading"):
        latents, *flipped = _fetch(dataset, np.arange(start, min(start + CHUNK, len(dataset))))
        finite = torch.cat([latents, *flipped], dim=1).flatten(1).isfinite().all(dim=1)
        not_finite += (start + (~finite).nonzero()[:, 0]).tolist()
        sums += channel_sums(latents[finite], info.kind)
    if not_finite:
        yield f"{len(not_finite)} items hold NaN or Inf, {not_finite[0]} first"
    if not sums.any():
        return
    stored_mean, stored_std = mean_and_std(sums)
    mean, std = for_network(stored_mean, stored_std, info)
    log.info(" " * 20 + "".join(f"{f'channel {c}':>12}" for c in range(dataset.channels)))
    for title, values in {"stored mean": stored_mean, "stored std": stored_std, "network mean": mean, "network std": std}.items():
        log.info(f"{title:20}" + "".join(f"{value:12.4f}" for value in values))
    overall = overall_std(mean, std)
    words = f"a standard deviation of {overall:.3f} over all channels, {overall / sigma_data:.2f} times sigma_data={sigma_data:g}"
    log.info("the network input has %s", words)
    if not USUAL_STD[0] <= overall / sigma_data <= USUAL_STD[1]:
        reasons = f"a wrong scale factor ({info.scale_factor:g}) or kind ({info.kind}), or scale= of convert"
        yield f"{words}, cannot be right: {reasons}"


def _fetch(dataset: LatentDataset, indices: np.ndarray) -> list[Tensor]:
    """Fetch the stored latents of items and, if the shards contain them, the latents of the mirrored images."""
    return [dataset.fetch(indices, np.full(len(indices), flip))[0] for flip in (False, True)[: 1 + dataset.has_flips]]


def fetch_spread(dataset: LatentDataset) -> tuple[Tensor, list[int]]:
    """Fetch latents, float32 [16, C, h, w], and labels of evenly spaced items in the data set.

    For `moments`, return the means as latents. Replace NaN and infinity with 0.
    """
    indices = spread_items(len(dataset), 16)
    stored, labels = dataset.fetch(indices, np.zeros(len(indices), dtype=bool))
    return mean_and_log_variance(stored.float(), dataset.info.kind)[0].nan_to_num(0, 0, 0), labels.tolist()


def fetch_images(dataset: LatentDataset, num_items: int = 16) -> np.ndarray:
    """Fetch the stored images, uint8 [n, R, R, 3], of evenly spaced items. By default, use the same items as `fetch_spread`."""
    indices = spread_items(len(dataset), num_items)
    return dataset.fetch_with_images(indices, np.zeros(len(indices), dtype=bool))[2].numpy()


def fetch_originals(dataset: LatentDataset, folder: str) -> np.ndarray:
    """Read and crop the original images of 16 items from `folder`. Raise UserError if the number of images differs."""
    labels = "none" if dataset.info.num_classes == 1 else "auto"
    source = open_labelled_images(folder, labels, dataset.settings.get("part", "all"))
    manifest, crops = read_manifest(dataset.path) or {}, []
    left_out = {entry["name"] for entry in manifest.get("left_out", [])}
    numbers = [i for i, name in enumerate(source.names) if name not in left_out]
    if len(numbers) != len(dataset):
        raise UserError(f"images={folder} holds {len(numbers)} images, but {dataset.path} holds {len(dataset)} latents")
    defaults = {"background": "white", "pad": 0, "grey": False}
    settings = {key: dataset.settings.get(key, default) for key, default in defaults.items()}
    for i in spread_items(len(dataset), 16):
        with as_user_error(source.names[numbers[i]]):
            crops.append(read_cropped(source, numbers[i], dataset.info.resolution, **settings))
    return np.stack(crops)
