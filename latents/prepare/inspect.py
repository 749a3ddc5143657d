"""Check latent shards for problems, and log properties of the latents."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from common.errors import UserError, as_user_error
from common.images import class_caption
from common.progress import progress_bar
from latents.autoencoders import MAX_DECODED_PIXELS, Autoencoder, from_uint8, to_uint8
from latents.channel_statistics import USUAL_STD, are_mirrored, channel_sums, mean_and_std, overall_std, to_network_scale
from latents.order import map_ahead
from latents.prepare.images import ImageReader, open_labelled_images
from latents.prepare.write import count_left_out, log_notes
from latents.shards import (
    MANIFEST,
    UNFINISHED,
    LatentDataset,
    evenly_spaced_items,
    is_intact,
    mean_and_log_variance,
    read_manifest,
)

log = logging.getLogger(__name__)

CHUNK = 1024  # number of latents to read at once
FEW = 0.01  # tolerated fraction of constant or repeated images in a class, because many published data sets have some
# Largest difference between an image and its decoded latent: RMS over a grid of at most 16x16 cell means, in -1 to 1.
MAX_DIFFERENCE = 0.15


class SourceImages:
    """The encoded images of a data set, which are read again from their folder or tars.

    Attributes:
        names: Path of each item's image.
    """

    def __init__(self, dataset: LatentDataset, folder: str):
        """Find the images. Raises UserError if their number differs from the number of latents."""
        settings = dataset.settings
        labels = "none" if dataset.info.num_classes == 1 else "first_level"
        self._source = open_labelled_images(folder, labels, settings.get("part", "all"))
        left_out = {entry["name"] for entry in (read_manifest(dataset.path) or {}).get("left_out", [])}
        self._source.keep([i for i, name in enumerate(self._source.names) if name not in left_out])
        self.names = self._source.names
        if len(self.names) != len(dataset):
            raise UserError(f"images={folder} holds {len(self.names)} images, but {dataset.path} holds {len(dataset)} latents")
        keys = ("background", "pad", "grey", "value_range")
        self._crop = ImageReader(dataset.info.resolution, **{key: settings[key] for key in keys if key in settings})

    def read(self, item: int) -> np.ndarray:
        """Read and crop an item's image, uint8 [R, R, 3]."""
        with as_user_error(self.names[item]):
            return self._crop(self._source, item)[0]


def find_problems(
    dataset: LatentDataset,
    sigma_data: float = 0.5,
    originals: SourceImages | None = None,
    decoder: Autoencoder | None = None,
    device: torch.device | None = None,
) -> list[str]:
    """Read all latents, log their properties, and return a list of problems.

    Args:
        sigma_data: Standard deviation of the network input that the diffusion assumes.
        originals: If set, compare all latents with these images.
        decoder, device: Autoencoder for this comparison, and its device. Latents of `identity` need no decoder.
    """
    size = f"{dataset.channels}x{dataset.height}x{dataset.width}"
    log.info("%s: %d latents %s in %d files", dataset.path, len(dataset), size, len(dataset.files))
    log.info("latents of mirrored images: %s, JPEG files: %s", dataset.has_flips, dataset.has_jpegs)
    log.info("%s", dataset.info)
    names = originals.names if originals else None
    problems = [*_check_files(dataset), *_check_images(dataset), *_check_classes(dataset)]
    problems += _check_values(dataset, sigma_data, names)
    return problems + ([*_check_originals(dataset, originals, decoder, device)] if originals else [])


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
    left_out = manifest.get("left_out", [])
    log.info("%s items could not be read when the folder was made", count_left_out(left_out))
    log_notes(manifest)
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
        latents, flipped = (x[:, : dataset.channels] for x in _fetch(dataset, evenly_spaced_items(len(dataset), 256)))
        if not are_mirrored(latents, flipped):
            yield "latents_flip do not resemble the mirrored latents: they belong to other images"


def _check_classes(dataset: LatentDataset) -> Iterator[str]:
    counts = np.bincount(dataset.labels, minlength=dataset.info.num_classes)
    names = [f" ({name})" for name in dataset.class_names] if dataset.class_names else [""] * len(counts)
    counts = counts[: len(names)]  # num_classes can exceed the number of class names
    smallest = [f"{label}{names[label]} {counts[label]}" for label in np.argsort(counts, kind="stable")]
    log.info("%d classes of %d to %d items; smallest: %s", len(counts), counts.min(), counts.max(), ", ".join(smallest[:3]))
    if num_empty := int((counts == 0).sum()):
        text = f"{num_empty} of {len(counts)} classes have no item: {', '.join(smallest[: min(num_empty, 5)])}"
        if dataset.settings.get("part") != "validation":
            yield text
        else:  # every 20th image misses small classes
            log.info("%s", text)


def _check_values(dataset: LatentDataset, sigma_data: float, names: Sequence[str] | None) -> Iterator[str]:
    """Check for NaN and infinity, and compare the standard deviation of the network input with `sigma_data`.

    `names` are the paths of the items' images, if they are known.
    """
    info, sums, not_finite, projections, constant = dataset.info, np.zeros((3, dataset.channels)), [], [], []
    for start in progress_bar(range(0, len(dataset), CHUNK), unit=f"x {CHUNK} latents", desc="reading"):
        latents, *flipped = _fetch(dataset, np.arange(start, min(start + CHUNK, len(dataset))))
        finite = torch.cat([latents, *flipped], dim=1).flatten(1).isfinite().all(dim=1)
        not_finite += (start + (~finite).nonzero()[:, 0]).tolist()
        sums += channel_sums(latents[finite], info.kind)
        means = mean_and_log_variance(latents.float(), info.kind)[0]
        projections.append(_project(means))
        constant += (_are_constant(means) & (info.autoencoder == "identity")).tolist()
    if not_finite:
        yield f"{len(not_finite)} items hold NaN or Inf, {not_finite[0]} first"
    if not sums.any():
        return
    yield from _check_repeats(dataset, torch.cat(projections), constant, "latents", names)
    stored_mean, stored_std = mean_and_std(sums)
    mean, std = to_network_scale(stored_mean, stored_std, info)
    log.info(" " * 20 + "".join(f"{f'channel {c}':>12}" for c in range(dataset.channels)))
    for title, values in {"stored mean": stored_mean, "stored std": stored_std, "network mean": mean, "network std": std}.items():
        log.info(f"{title:20}" + "".join(f"{value:12.4f}" for value in values))
    overall = overall_std(mean, std)
    times = overall / sigma_data
    spread = f"a standard deviation of {overall:.3f} over all channels, {times:.2f} times sigma_data={sigma_data:g}"
    log.info("the network input has %s (accepted: %g to %g times)", spread, *USUAL_STD)
    half = dataset.channels // 2
    if info.kind == "sample" and dataset.channels % 2 == 0 and (stored_mean + 2 * stored_std)[half:].max() < 0:
        looks = f"the last {half} of {dataset.channels} channels look like log-variances (mean {stored_mean[half:].mean():.1f})"
        yield f"{looks}, so these latents are kind=moments, not kind=sample"
    if not USUAL_STD[0] <= times <= USUAL_STD[1]:
        reasons = f"a wrong scale factor ({info.scale_factor:g}) or kind ({info.kind}), or scale= of convert"
        yield f"{spread}, cannot be right: {reasons}"


@functools.lru_cache(maxsize=2)
def _directions(num_values: int) -> Tensor:
    return torch.randn(num_values, 8, generator=torch.Generator().manual_seed(0)) / num_values**0.5


def _project(images: Tensor) -> Tensor:
    """Project images or latents [b, ...] on random directions, float32 [b, 8], in which nearly equal items are neighbours."""
    flat = images.flatten(1).float().nan_to_num(0, 0, 0)
    return flat @ _directions(flat.shape[1])


def _are_constant(images: Tensor) -> Tensor:
    """Return for each image [b, C, H, W] in -1 to 1 whether every channel has a single grey level, bool [b]."""
    return (images.amax(dim=(2, 3)) - images.amin(dim=(2, 3)) < 0.5 / 127.5).all(dim=1)


def _find_copies(projections: Tensor, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each item an equal earlier item of its class, and an equal item of another class, int64 [N] each, or -1.

    Two items are equal if their projections fall into the same cell of a grid, whose cells are 1% of the standard deviation.
    Copies of an image can differ by rounding, or by the noise of kind=sample. Three shifted grids therefore find the copies that
    a cell's border separates in one grid.
    """
    scaled = projections.double().numpy() / (0.01 * projections.std(dim=0, correction=0).mean().item() or 1.0)
    repeat_of, shared_with = np.full((2, len(labels)), -1)
    for shift in (0, 1 / 3, 2 / 3):
        cells = np.unique(np.floor(scaled + shift), axis=0, return_inverse=True)[1].reshape(-1)
        # The first item of each pair (cell, class), sorted by cell and then by class.
        _, first, pair = np.unique(cells * (labels.max() + 1) + labels, return_index=True, return_inverse=True)
        is_repeat = first[pair] != np.arange(len(labels))
        repeat_of[is_repeat] = first[pair][is_repeat]
        start = np.unique(cells[first], return_index=True)[1]
        # First items of the lowest and the highest class in each item's cell.
        lowest, highest = first[start][cells], first[np.append(start[1:], len(first)) - 1][cells]
        is_shared = labels[lowest] != labels[highest]
        shared_with[is_shared] = np.where(labels == labels[lowest], highest, lowest)[is_shared]
    return repeat_of, shared_with


def _check_repeats(
    dataset: LatentDataset, projections: Tensor, constant: list[bool], what: str, names: Sequence[str] | None
) -> Iterator[str]:
    """Count constant and repeated items in each class. Counts of at most FEW of a class are logged and are no problem."""

    def describe(item: int) -> str:
        return f"{item} {names[item]}" if names else f"{item}"

    labels, counts = dataset.labels, np.bincount(dataset.labels)
    repeat_of, shared_with = _find_copies(projections, labels)
    kinds = {
        "are constant": np.where(constant, np.arange(len(labels)), -1),
        f"repeat {what} of the class": repeat_of,
        f"equal {what} of another class": shared_with,
    }
    numbers = {kind: np.bincount(labels[others >= 0], minlength=len(counts)) for kind, others in kinds.items()}
    worst = np.max(np.stack(list(numbers.values())), axis=0) / np.maximum(counts, 1)
    lines = {True: [], False: []}  # whether the class is a problem -> lines
    affected = np.argsort(-worst, kind="stable")[: np.count_nonzero(worst)]
    for label in affected[:100]:
        parts = []
        for kind in [kind for kind in kinds if numbers[kind][label]]:
            item = np.flatnonzero((labels == label) & (kinds[kind] >= 0))[0]
            other = kinds[kind][item]
            example = f"item {describe(item)}" + (f" equals {describe(other)}" if other != item else "")
            parts.append(f"{numbers[kind][label]} {kind} ({example})")
        caption = class_caption(label, dataset.class_names)
        lines[bool(worst[label] > FEW)].append(f"class {caption}: of {counts[label]} {what}, {', '.join(parts)}")
    for is_problem, texts in lines.items():
        printed = texts[:5] + (["and more classes"] if len(texts) > 5 else [])
        if is_problem:
            yield from printed
        elif printed:
            log.warning("%s", "; ".join(printed))


def _check_originals(
    dataset: LatentDataset, originals: SourceImages, decoder: Autoencoder | None, device: torch.device | None
) -> Iterator[str]:
    """Compare every latent with its image: pixels exactly, and decoded latents in the means of at most 16x16 cells."""
    info, different, projections, constant = dataset.info, [], [], []
    size = max(1, MAX_DECODED_PIXELS // info.resolution**2)
    images = map_ahead(originals.read, range(len(dataset)), torch.get_num_threads())
    for start in progress_bar(range(0, len(dataset), size), unit=f"x {size} images", desc="comparing"):
        items = np.arange(start, min(start + size, len(dataset)))
        pixels = torch.from_numpy(np.stack([next(images) for _ in items]))
        stored = dataset.fetch(items, np.zeros(len(items), dtype=bool))[0].float().nan_to_num(0, 0, 0)
        latents = mean_and_log_variance(stored, info.kind)[0]
        if info.autoencoder == "identity":
            is_different = (to_uint8(latents) != pixels).flatten(1).any(dim=1)
        else:
            expected = from_uint8(pixels)
            error = decoder.decode(latents.to(device)).cpu().clamp(-1, 1) - expected
            cells = adaptive_avg_pool2d(error, min(16, info.resolution))
            is_different = cells.square().mean(dim=(1, 2, 3)).sqrt() > MAX_DIFFERENCE
            projections.append(_project(expected))
            constant += _are_constant(expected).tolist()
        different += items[is_different.numpy()].tolist()
    if projections:  # pixels are compared as latents
        yield from _check_repeats(dataset, torch.cat(projections), constant, "images", originals.names)
    log.info("%d of %d decoded latents match their image", len(dataset) - len(different), len(dataset))
    if different:
        names = ", ".join(f"{originals.names[item]} (item {item})" for item in different[:3]) + (", ..." if different[3:] else "")
        yield f"{len(different)} of {len(dataset)} decoded latents do not match their image: {names}"


def _fetch(dataset: LatentDataset, indices: np.ndarray) -> list[Tensor]:
    """Fetch the stored latents of items and, if the shards contain them, the latents of the mirrored images."""
    return [dataset.fetch(indices, np.full(len(indices), flip))[0] for flip in (False, True)[: 1 + dataset.has_flips]]


def fetch_spread(dataset: LatentDataset) -> tuple[Tensor, list[int]]:
    """Fetch latents, float32 [16, C, h, w], and labels of evenly spaced items in the data set.

    For `moments`, return the means as latents. Replace NaN and infinity with 0.
    """
    indices = evenly_spaced_items(len(dataset), 16)
    stored, labels = dataset.fetch(indices, np.zeros(len(indices), dtype=bool))
    return mean_and_log_variance(stored.float(), dataset.info.kind)[0].nan_to_num(0, 0, 0), labels.tolist()


def fetch_images(dataset: LatentDataset, num_items: int = 16) -> np.ndarray:
    """Fetch the stored images, uint8 [n, R, R, 3], of evenly spaced items. By default, use the same items as `fetch_spread`."""
    indices = evenly_spaced_items(len(dataset), num_items)
    return dataset.fetch_with_images(indices, np.zeros(len(indices), dtype=bool))[2].numpy()
