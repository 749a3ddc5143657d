"""Implement `prepare_latents.py inspect`, which checks latent shards for problems and logs properties of the latents."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from common.errors import UserError
from common.files import open_atomically
from common.images import DRAWING, SUFFIXES, class_caption, from_uint8, labelled_grid, to_uint8
from common.progress import progress_bar
from common.types import AutoencoderSpec, PositiveFloat, PositiveInt, Text
from latents import autoencoders
from latents.autoencoders import MAX_DECODED_PIXELS, Autoencoder
from latents.batches import map_ahead
from latents.channel_statistics import USUAL_STD, are_mirrored, channel_sums, mean_and_std, overall_std, to_network_scale
from latents.dataset import LatentDataset, evenly_spaced_items
from latents.prepare.encode_plan import EncodeConfig, image_reader, select_images
from latents.prepare.image_reader import ImageReader
from latents.prepare.labelled_images import open_labelled_images
from latents.prepare.write import count_left_out, log_notes
from latents.shards import MANIFEST, UNFINISHED, EncodeSettings, ShardInfo, hash_latents, is_intact, mean_and_log_variance
from runtime.machine import start_accelerator

log = logging.getLogger(__name__)

CHUNK = 1024  # number of latents to read at once
FEW = 0.01  # tolerated fraction of constant or repeated images in a class, because many published data sets have some
# Largest difference between an image and its decoded latent: RMS over a grid of at most 16x16 cell means, in -1 to 1.
MAX_DIFFERENCE = 0.15


def inspect(
    path: Text,
    images: Text | None = None,
    autoencoder: AutoencoderSpec | None = None,
    other: Text | None = None,
    grid: Text = "auto",
    sigma_data: PositiveFloat = 0.5,
    cpu_threads: PositiveInt | None = None,
) -> None:
    """Read all latents, print a summary, and save a grid of 16 decoded latents. Exit with code 1 if there are problems.

    Args:
        path: Folder of shards, or a single shard.
        images: Folder of the encoded images. If `images` is set, the command compares all latents with these images, and the grid
            shows the original images next to the decoded latents.
        other: Folder of shards. If `other` is set, images that are in both folders are a problem.
        autoencoder: Autoencoder that decodes the latents for the grid. By default, the shards determine the autoencoder.
        grid: Image file to write. `auto` writes <path>/inspect_<hash>.png, and `none` disables the grid.
        sigma_data: Standard deviation of the network input that the diffusion assumes.
    """
    dataset = LatentDataset(path, check_folder=False)
    autoencoder = autoencoder or dataset.info.autoencoder
    file = grid_file(grid, dataset, autoencoder)
    device = start_accelerator(cpu_threads).device
    decoder = None
    if file is not None or (images is not None and dataset.info.autoencoder != "identity"):
        decoder = autoencoders.build(autoencoder, device, dataset.channels)
        decoded, resolution = dataset.height * decoder.scaling.downsampling, dataset.info.resolution
        if images is not None and decoded != resolution:
            raise UserError(f"autoencoder={autoencoder} decodes to a height of {decoded}, but the images have {resolution}")
    shared = [] if other is None else find_shared(dataset, LatentDataset(other, check_folder=False))
    originals = None if images is None else open_originals(dataset, images)
    problems = find_problems(dataset, sigma_data, originals, decoder, device) + shared
    if file is not None:
        draw_grid(file, dataset, decoder, device, originals)
    if problems:
        raise UserError("\n- ".join([f"{path}: {len(problems)} problems", *problems]))
    log.info("no problems were found")


def grid_file(grid: str, dataset: LatentDataset, autoencoder: str) -> Path | None:
    """Return the file of the grid, or None without a grid. Raises UserError if the file cannot be written as an image."""
    if grid == "none" or (grid, autoencoder) == ("auto", "none"):
        return None
    if grid == "auto":
        folder = dataset.path if dataset.path.is_dir() else dataset.path.parent
        return folder / DRAWING.format(dataset.hash[:8])
    file = Path(grid)
    if file.exists():
        raise UserError(f"grid={file} exists; give another file, or remove it")
    if file.suffix.lower() not in SUFFIXES:
        raise UserError(f"grid={file} must end in {', '.join(SUFFIXES)}")
    return file


def draw_grid(
    file: Path, dataset: LatentDataset, decoder: Autoencoder, device: torch.device, originals: ImageReader | None
) -> None:
    """Save a grid of 16 decoded latents, next to their images if these are known or stored. A write error is only logged."""
    items = evenly_spaced_items(len(dataset), 16)
    columns = [to_uint8(decoder.decode(_fetch_means(dataset, items).to(device)).cpu()).numpy()]
    if originals is not None:
        columns.append([originals(item).pixels for item in items])
    elif dataset.has_jpegs:
        with contextlib.suppress(UserError):  # find_problems already reports unreadable images
            columns.append(dataset.fetch_with_images(items)[2].numpy())
    images = [image for row in zip(*columns) for image in row]
    captions = [class_caption(label, dataset.class_names) for label in dataset.labels[items].tolist() for _ in columns]
    try:
        with open_atomically(file) as f:
            labelled_grid(images, captions, 4 * len(columns)).save(f)
        log.info("drew %d latents in %s", len(items), file)
    except UserError as e:
        log.warning("%s; grid=<file> sets another file", e)


def open_originals(dataset: LatentDataset, folder: str) -> ImageReader:
    """Find the image of each latent again in the folder or tars that were encoded.

    Raises UserError if their number differs from the number of latents.
    """
    # Manifests of earlier versions lack `label_by`.
    label_by = dataset.manifest.get("label_by") or ("none" if dataset.info.num_classes == 1 else "auto")
    settings = {key: value for key, value in dataset.encode_settings.items() if key in EncodeSettings.model_fields}
    settings |= {"resolution": dataset.info.resolution, "num_workers": torch.get_num_threads()}
    cfg = EncodeConfig(folder, str(dataset.path), label_by, **settings)
    images = select_images(open_labelled_images(folder, cfg.labels, needs_labels=False), cfg)
    left_out = {entry["name"] for entry in dataset.manifest.get("left_out", [])}
    images = images.select([i for i, name in enumerate(images.names) if name not in left_out])
    if len(images) != len(dataset):
        raise UserError(f"images={folder} holds {len(images)} images, but {dataset.path} holds {len(dataset)} latents")
    return image_reader(images, cfg)


def find_problems(
    dataset: LatentDataset,
    sigma_data: float,
    originals: ImageReader | None,
    decoder: Autoencoder | None,
    device: torch.device,
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
    problems = [*_check_checksums(dataset), *_check_manifest(dataset)]
    problems += [*_check_jpegs(dataset), *_check_flips(dataset), *_check_classes(dataset)]
    latents = _read_all(dataset)
    if latents.not_finite:
        problems.append(f"{len(latents.not_finite)} items hold NaN or Inf, {latents.not_finite[0]} first")
    if latents.sums.any():
        problems += _check_standard_deviation(dataset, latents.sums, sigma_data)
    different, constant = _compare_with_images(dataset, originals, decoder, device) if originals else ([], latents.constant)
    noun = "latents" if dataset.image_hashes is None else "images"
    in_class, in_other_class = _find_repeats(latents.hashes, dataset.labels.tolist())
    findings = {
        "are constant": dict.fromkeys(constant),
        f"repeat {noun} of the class": in_class,
        f"equal {noun} of another class": in_other_class,
    }
    names = originals.images.names if originals else None
    problems += _check_repeats(dataset, findings, noun, names)
    if different:
        examples = ", ".join([f"{names[item]} (item {item})" for item in different[:3]] + (["..."] if different[3:] else []))
        problems.append(f"{len(different)} of {len(dataset)} decoded latents do not match their image: {examples}")
    return problems


def _check_checksums(dataset: LatentDataset) -> Iterator[str]:
    hashes = dataset.hashes
    first_file: dict[str, Path] = {}  # the first file with each hash
    for file in progress_bar(dataset.files, unit="shards", desc="checksums"):
        if not is_intact(file):
            yield f"{file}: its checksum differs"
        elif (first := first_file.setdefault(hashes[file.name], file)) != file:
            yield f"{file} is a copy of {first.name}"


def _check_manifest(dataset: LatentDataset) -> Iterator[str]:
    manifest = dataset.manifest
    if not manifest:
        log.info("there is no %s, so it is unknown whether latents are missing", MANIFEST)
        if (dataset.path / UNFINISHED).exists():
            yield "the folder is not finished: run the same prepare_latents.py command again to complete it"
        return
    left_out = [entry["name"] for entry in manifest.get("left_out", [])]
    log.info("%s items could not be read when the folder was made", count_left_out(left_out))
    log_notes(manifest)
    hashes, listed = dataset.hashes, manifest["shards"]
    for name in sorted(listed | hashes):
        if listed.get(name) != hashes.get(name):
            yield f"{dataset.path / name} {f'is not a file that {MANIFEST} lists' if name in hashes else 'is missing'}"


def _check_jpegs(dataset: LatentDataset) -> Iterator[str]:
    if dataset.has_jpegs:
        try:
            dataset.fetch_with_images(evenly_spaced_items(len(dataset), 256))
        except UserError as e:
            yield str(e)


def _check_flips(dataset: LatentDataset) -> Iterator[str]:
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
        if dataset.encode_settings.get("part") != "validation":
            yield text
        else:  # every 20th image misses small classes
            log.info("%s", text)


class _Latents(NamedTuple):
    """What a pass over all latents finds."""

    sums: np.ndarray  # result of `channel_sums`, over the finite latents
    not_finite: list[int]  # items with NaN or infinity
    hashes: np.ndarray  # hash of each item's image, or of its latent if those of images are unknown
    constant: list[int]  # items whose image has a single colour (latents of an autoencoder do not show it)


def _read_all(dataset: LatentDataset) -> _Latents:
    info = dataset.info
    sums = np.zeros((3, dataset.channels))
    not_finite, hashes, constant = [], [], []
    for start in progress_bar(range(0, len(dataset), CHUNK), unit=f"x {CHUNK} latents", desc="reading"):
        latents, *flipped = _fetch(dataset, np.arange(start, min(start + CHUNK, len(dataset))))
        finite = torch.cat([latents, *flipped], dim=1).flatten(1).isfinite().all(dim=1)
        not_finite += (start + (~finite).nonzero()[:, 0]).tolist()
        sums += channel_sums(latents[finite], info.kind)
        means = mean_and_log_variance(latents.float(), info.kind)[0]
        if dataset.image_hashes is None:
            hashes.append(hash_latents(means, "sample").numpy())
        if info.autoencoder == "identity":
            constant += (start + _are_constant(means).nonzero()[:, 0]).tolist()
    return _Latents(sums, not_finite, np.concatenate(hashes) if hashes else dataset.image_hashes, constant)


def _are_constant(images: Tensor) -> Tensor:
    """Return for each image [b, C, H, W] in -1 to 1 whether every channel has a single grey level, bool [b]."""
    return (images.amax(dim=(2, 3)) - images.amin(dim=(2, 3)) < 0.5 / 127.5).all(dim=1)


def _find_repeats(hashes: np.ndarray, labels: list[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return the items that equal an earlier item of their class, and those that equal one of another class, with this item."""
    _, group, count = np.unique(hashes, return_inverse=True, return_counts=True)
    items_of: dict[int, list[int]] = defaultdict(list)  # the items of each hash that occurs several times
    for item in np.flatnonzero(count[group] > 1).tolist():
        items_of[int(hashes[item])].append(item)
    in_class, in_other_class = {}, {}
    for items in items_of.values():
        first: dict[int, int] = {}  # the first item of each class
        for item in items:
            first.setdefault(labels[item], item)
        lowest, highest = min(first), max(first)
        for item in items:
            label = labels[item]
            if item != first[label]:
                in_class[item] = first[label]
            if lowest != highest:
                in_other_class[item] = first[highest if label == lowest else lowest]
    return in_class, in_other_class


def _check_repeats(
    dataset: LatentDataset, findings: Mapping[str, Mapping[int, int | None]], noun: str, names: Sequence[str] | None
) -> Iterator[str]:
    """Describe the classes with constant or repeated items. If they are at most FEW of a class, only log a warning.

    Args:
        findings: The affected items for each kind of finding, such as `are constant`, with the item that each equals, or None.
        noun: `images` or `latents`, whichever were compared.
        names: Paths of the items' images, if they are known.
    """
    labels, num_items = dataset.labels.tolist(), np.bincount(dataset.labels)
    found_in: dict[int, dict[str, list[tuple[int, int | None]]]] = defaultdict(dict)  # the findings of each class by kind
    for kind, found in findings.items():
        for item, other in sorted(found.items()):
            found_in[labels[item]].setdefault(kind, []).append((item, other))

    def share(label: int) -> float:
        return max(map(len, found_in[label].values())) / num_items[label]

    def describe_item(item: int) -> str:
        return f"{item} {names[item]}" if names else f"{item}"

    def describe_class(label: int) -> str:
        parts = []
        for kind, found in found_in[label].items():
            item, other = found[0]
            example = f"item {describe_item(item)}" + (f" equals {describe_item(other)}" if other is not None else "")
            parts.append(f"{len(found)} {kind} ({example})")
        return f"class {class_caption(label, dataset.class_names)}: of {num_items[label]} {noun}, {', '.join(parts)}"

    def describe(classes: Sequence[int]) -> list[str]:
        return [*map(describe_class, classes[:5])] + (["and more classes"] if len(classes) > 5 else [])

    affected = sorted(found_in, key=lambda label: (-share(label), label))
    yield from describe([label for label in affected if share(label) > FEW])
    if few := describe([label for label in affected if share(label) <= FEW]):
        log.warning("%s", "; ".join(few))


def _check_standard_deviation(dataset: LatentDataset, sums: np.ndarray, sigma_data: float) -> Iterator[str]:
    """Log the mean and standard deviation of each channel, and compare those of the network input with `sigma_data`."""
    info = dataset.info
    stored_mean, stored_std = mean_and_std(sums)
    mean, std = to_network_scale(stored_mean, stored_std, info)
    log.info(" " * 20 + "".join(f"{f'channel {c}':>12}" for c in range(dataset.channels)))
    rows = {"stored mean": stored_mean, "stored std": stored_std, "network mean": mean, "network std": std}
    for title, values in rows.items():
        log.info(f"{title:20}" + "".join(f"{value:12.4f}" for value in values))
    overall = overall_std(mean, std)
    ratio = overall / sigma_data
    spread = f"a standard deviation of {overall:.3f} over all channels, {ratio:.2f} times sigma_data={sigma_data:g}"
    log.info("the network input has %s (accepted: %g to %g times)", spread, *USUAL_STD)
    half = dataset.channels // 2
    if info.kind == "sample" and dataset.channels % 2 == 0 and (stored_mean + 2 * stored_std)[half:].max() < 0:
        looks = f"the last {half} of {dataset.channels} channels look like log-variances (mean {stored_mean[half:].mean():.1f})"
        yield f"{looks}, so these latents are kind=moments, not kind=sample"
    if not USUAL_STD[0] <= ratio <= USUAL_STD[1]:
        reasons = f"a wrong scale factor ({info.scale_factor:g}) or kind ({info.kind}), or scale= of convert"
        yield f"{spread}, cannot be right: {reasons}"


def _compare_with_images(
    dataset: LatentDataset, originals: ImageReader, decoder: Autoencoder | None, device: torch.device
) -> tuple[list[int], list[int]]:
    """Compare every latent with its image, by the stored hash and by `_are_different`.

    Return the items that do not match their image, and those whose image has a single colour.
    """
    info = dataset.info
    different, constant = [], []
    # `convert` hashes latents.
    has_hashes = dataset.image_hashes is not None and dataset.encode_settings.get("command") == "encode"
    size = max(1, MAX_DECODED_PIXELS // info.resolution**2)
    images = map_ahead(originals, range(len(dataset)), torch.get_num_threads())
    for start in progress_bar(range(0, len(dataset), size), unit=f"x {size} images", desc="comparing"):
        items = np.arange(start, min(start + size, len(dataset)))
        read = [next(images) for _ in items]
        pixels = torch.from_numpy(np.stack([image.pixels for image in read]))
        is_different = _are_different(_fetch_means(dataset, items), pixels, info, decoder, device)
        if has_hashes:
            is_different |= torch.from_numpy(dataset.image_hashes[items] != [image.image_hash for image in read])
        different += items[is_different.numpy()].tolist()
        constant += items[_are_constant(from_uint8(pixels)).numpy()].tolist()
    log.info("%d of %d decoded latents match their image", len(dataset) - len(different), len(dataset))
    return different, constant


def _are_different(latents: Tensor, pixels: Tensor, info: ShardInfo, decoder: Autoencoder | None, device: torch.device) -> Tensor:
    """Compare latents with images, uint8 [b, R, R, 3]: pixels exactly, decoded latents in the means of 16x16 cells. bool [b]."""
    if info.autoencoder == "identity":
        return (to_uint8(latents) != pixels).flatten(1).any(dim=1)
    error = decoder.decode(latents.to(device)).cpu().clamp(-1, 1) - from_uint8(pixels)
    cells = adaptive_avg_pool2d(error, min(16, info.resolution))
    return cells.square().mean(dim=(1, 2, 3)).sqrt() > MAX_DIFFERENCE


def find_shared(dataset: LatentDataset, other: LatentDataset) -> list[str]:
    """Return a problem if images of `dataset` are also in `other`. Raises UserError if one of both has no hashes of images."""
    if missing := [str(found.path) for found in (dataset, other) if found.image_hashes is None]:
        raise UserError(
            f"other={other.path}: {' and '.join(missing)} holds no hashes of images; make it again with encode or convert"
        )
    if not (shared := dataset.shared_with(other)).any():
        return []
    item = int(np.flatnonzero(shared)[0])
    copy = int(np.flatnonzero(other.image_hashes == dataset.image_hashes[item])[0])
    return [f"{shared.sum()} of {len(dataset)} images are also in {other.path} (item {item} is its item {copy})"]


def _fetch(dataset: LatentDataset, indices: np.ndarray) -> list[Tensor]:
    """Fetch the stored latents of items and, if the shards contain them, the latents of the mirrored images."""
    return [dataset.fetch(indices, np.full(len(indices), flip))[0] for flip in (False, True)[: 1 + dataset.has_flips]]


def _fetch_means(dataset: LatentDataset, indices: np.ndarray) -> Tensor:
    """Fetch latents, float32 [n, C, h, w]. For `moments`, return the means. Replace NaN and infinity with 0."""
    stored, _ = dataset.fetch(indices)
    return mean_and_log_variance(stored.float(), dataset.info.kind)[0].nan_to_num(0, 0, 0)
