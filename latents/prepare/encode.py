"""Implement `prepare_latents.py encode`, which encodes images into a folder of shards.

Threads read and crop images, the device encodes them, and a thread writes shards.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor
from tqdm import tqdm

from common.errors import UserError, list_problems
from common.images import from_uint8
from common.progress import progress_bar
from common.randomness import SeedRandom
from common.types import Colour, NonNegativeInt, PositiveFloat, PositiveInt, Range, Text
from latents import autoencoders
from latents.autoencoders import SD_VAE, Autoencoder
from latents.batches import map_ahead
from latents.prepare.labelled_images import (
    ImageReader,
    LabelledImages,
    count_classes,
    describe_classes,
    hash_images,
    open_labelled_images,
    to_jpeg,
)
from latents.prepare.write import SHARD_SIZE, Dtype, PlannedShard, ShardFolder, ShardWriter
from latents.shards import (
    LATENT_TENSORS,
    UNFINISHED,
    Duplicates,
    Kind,
    NumClasses,
    Part,
    Resolution,
    ShardInfo,
    draw_latents,
    pack_images,
)
from latents.torch_files import read_channel_statistics
from runtime.machine import cores_per_process, start_accelerator
from runtime.processes import SeenFile, check_new_file, check_same, gather_lists, keep_on_main, on_main

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodeConfig:
    """Keys of `prepare_latents.py encode`."""

    images: Text  # folder with one subfolder per class (as in ImageNet) or with EDM's dataset.json, or WebDataset tars
    output: Text  # folder for the shards
    # `auto` makes the folders that hold the images the classes. `first_level` makes the first level of folders the classes, and
    # accepts tars of several parts of a data set. `none` assigns all images to a single class.
    labels: Literal["auto", "none", "first_level"] = "auto"
    # `validation` selects about one of 20 images and `train` selects the others. Equal images belong to the same part.
    part: Part = "all"
    duplicates: Duplicates = "keep"  # whether to leave out images that equal an earlier one (`skip`)
    resolution: Resolution = 256  # height and width in pixels after ADM's centre crop (at most 65,536)
    pad: NonNegativeInt = 0  # number of black pixels to add on each side before the crop (2 pads 28x28 to 32x32)
    background: Colour = "white"  # background colour for transparent images, either a name or #rrggbb
    # Grey images with more than 8 bits (16-bit PNG, float TIFF) need the values that become black and white, such as [0,65535].
    value_range: Range | None = None
    grey: bool = False  # whether to convert images to one grey channel (requires autoencoder=identity)
    autoencoder: Annotated[str, Field(pattern="^(identity|(sd|va)-vae:.+)$")] = SD_VAE
    kind: Kind = "moments"  # `moments` (mean and log-variance, from which the trainer samples) or `sample` (drawn once by `seed`)
    flips: bool = False  # true also encodes the mirrored images
    keep_images: Literal["none", "jpeg"] = "none"  # `jpeg` also stores the cropped images for alignment
    normalize: bool = False  # whether to normalise each network input channel to mean 0 and standard deviation 1 over all latents
    latents_stats: Text | None = None  # LightningDiT's latents_stats.pt, which contains statistics to normalise each channel
    sigma_data: PositiveFloat | None = None  # target standard deviation of the network input (EDM: 0.5), which sets scale_factor
    scale_factor: PositiveFloat | None = None  # factor of another data set, so that init_from= can continue on this one
    num_classes: NumClasses | None = None  # number of classes, at most 1,000,000 (default: from class names or labels)
    precision: Literal["fp32", "bf16"] = "fp32"  # precision of the autoencoder (bf16 is intended for GPUs)
    dtype: Dtype = "float16"  # data type of the stored latents
    seed: NonNegativeInt = 0  # random seed for kind=sample
    shard_size: PositiveInt = SHARD_SIZE  # images per shard (a process holds up to two in memory, and loses them if interrupted)
    # `stop` lists what cannot be read in one error, after all other shards are made. `skip` leaves it out, and manifest.json
    # lists it: images, links, folders, and class folders without images.
    on_error: Literal["stop", "skip"] = "stop"
    batch_size: PositiveInt = 64  # batch size per process
    num_workers: NonNegativeInt | None = None  # number of reading threads per process (default: an equal share of the CPU cores)
    cpu_threads: PositiveInt | None = None  # number of torch's threads per process (default: an equal share of the CPU cores)
    tf32: bool = True  # whether CUDA uses TF32 for float32 matrix products and convolutions


# Keys that may change when `encode` resumes. Item hashes cover the images and labels, and shard headers contain the statistics.
# The settings in shards get scale_factor from ShardInfo.
MAY_CHANGE_ON_RESUME = {"images", "output", "labels", "latents_stats", "on_error", "batch_size", "num_workers", "cpu_threads"}
MAY_CHANGE_ON_RESUME |= {"scale_factor"}
REPAIR = "repair or remove {}, or set on_error=skip"
# After shards are made, a removed image would move all later ones to other places in the shards.
REPAIR_IN_SHARDS = "repair {}, or set on_error=skip (if you remove images, all later shards are made again)"
NUM_CHECKED = 10_000  # number of images that `find_unreadable` reads


def encode(cfg: EncodeConfig) -> None:
    """Encode images into a folder of shards. All processes that accelerate starts share the work."""
    check_settings(cfg)
    cfg = replace(cfg, num_workers=cores_per_process() if cfg.num_workers is None else cfg.num_workers)
    # Use a long timeout, because processes that finish early wait for the slowest process.
    accelerator = start_accelerator(cfg.cpu_threads, tf32=cfg.tf32, timeout=timedelta(days=7))
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    # Only the main process lists the images, so that the others do not look up every file on a shared disk.
    source = on_main(lambda: list_and_check_images(cfg))
    vae = load_autoencoder(cfg, accelerator.device)
    weights_hash = vae.hash()
    check_same(functools.partial(list_seen_files, source, weights_hash, cfg))
    if cfg.part != "all" or cfg.duplicates == "skip":
        share = range(len(source) * rank // num_processes, len(source) * (rank + 1) // num_processes)
        hashes = gather_lists(hash_images(source, image_reader(cfg), share, cfg.num_workers))
        source = source.select_part(hashes, cfg.part, cfg.duplicates)
    # Only the main process looks at the folder, because the file systems of other nodes may see it as it was before.
    folder = keep_on_main(lambda: open_folder(source, vae, weights_hash, cfg))
    writer, missing, unreadable = on_main(lambda: plan_shards(folder, source, cfg))
    check_new_file("output", Path(cfg.output) / UNFINISHED)
    # The error comes after every process has made its shards, because it ends all processes.
    unreadable += gather_lists(encode_images(source, vae, writer, missing[rank::num_processes], cfg, accelerator))
    if unreadable:
        raise UserError(list_problems([entry["problem"] for entry in unreadable], REPAIR_IN_SHARDS))
    entries = {"source": cfg.images, "unread": source.unread}
    on_main(lambda: folder.finish(source.class_names, cfg.normalize, cfg.sigma_data, source.problems, **entries))


def check_settings(cfg: EncodeConfig) -> None:
    """Raise UserError if two settings exclude each other."""
    if cfg.autoencoder == "identity" and cfg.kind == "moments":
        raise UserError("kind=moments: pixels have no log-variance; use kind=sample with autoencoder=identity")
    if cfg.grey and cfg.autoencoder != "identity":
        raise UserError(f"grey=true: autoencoder={cfg.autoencoder} encodes RGB; use autoencoder=identity")
    scaling_keys = [key for key in ("normalize", "sigma_data", "latents_stats", "scale_factor") if getattr(cfg, key)]
    if len(scaling_keys) > 1:
        raise UserError(f"{'= and '.join(scaling_keys)}= all scale the latents; give one of them")
    if Path(cfg.images).resolve() in (Path(cfg.output).resolve(), *Path(cfg.output).resolve().parents):
        raise UserError(f"output={cfg.output} is inside images={cfg.images}; give a folder elsewhere")


def list_and_check_images(cfg: EncodeConfig) -> LabelledImages:
    """List the images. If there are problems and on_error=stop, raise UserError, which also names unreadable images."""
    source = open_labelled_images(cfg.images, cfg.labels)
    if source.problems and cfg.on_error == "stop":
        problems = dict.fromkeys([*source.problems.values(), *find_unreadable(source, cfg)])
        raise UserError(f"images={cfg.images}: {list_problems([*problems], REPAIR)}")
    return source


def find_unreadable(source: LabelledImages, cfg: EncodeConfig) -> list[str]:
    """Read the first NUM_CHECKED images, and return the errors. `encode_images` finds the other unreadable images."""
    num_images = min(len(source), NUM_CHECKED)
    errors = map_ahead(functools.partial(image_reader(cfg).error_of, source), range(num_images), cfg.num_workers)
    return [error for error in progress_bar(errors, total=num_images, unit="images", desc="checking") if error is not None]


def load_autoencoder(cfg: EncodeConfig, device: torch.device) -> Autoencoder:
    """Build the autoencoder, and check that it accepts images of `cfg.resolution`."""
    try:
        vae = autoencoders.build(cfg.autoencoder, device, precision=cfg.precision)
    except UserError as e:
        raise UserError(f"{e}; or set autoencoder=identity, which keeps pixels and needs no weights") from e
    if cfg.resolution % vae.downsampling:
        raise UserError(f"resolution={cfg.resolution} is not a multiple of {vae.downsampling}, the downsampling factor")
    return vae


def list_seen_files(source: LabelledImages, weights_hash: str, cfg: EncodeConfig) -> list[SeenFile]:
    """Return what this process sees of the images and of the autoencoder's weights."""
    weights = SeenFile("autoencoder", Path(cfg.autoencoder.partition(":")[2]), weights_hash)
    return [SeenFile("images", Path(cfg.images), source.hash(0, 1)), weights]


def open_folder(source: LabelledImages, vae: Autoencoder, weights_hash: str, cfg: EncodeConfig) -> ShardFolder:
    """Lock the output folder, and rename shards that are out of date."""
    info = describe_shards(source, vae, cfg)
    settings = {name: value for name, value in asdict(cfg).items() if name not in MAY_CHANGE_ON_RESUME}
    if cfg.duplicates == "keep":
        del settings["duplicates"]  # shards of earlier versions lack the key
    settings |= {"command": "encode", **asdict(info), "weights": weights_hash, "crop": "adm_center_crop"}
    return ShardFolder(cfg.output, info, settings, source.hash, len(source), cfg.shard_size, cfg.dtype)


def plan_shards(
    folder: ShardFolder, source: LabelledImages, cfg: EncodeConfig
) -> tuple[ShardWriter, list[PlannedShard], list[dict]]:
    """Return what writes the shards, the missing shards, and the unreadable images of the other shards.

    A shard is missing, too, if it left out an image that can be read now. With on_error=stop, all shards stay if some have
    unreadable images, which are returned. With on_error=skip, no images are returned.
    """
    read_image = image_reader(cfg)
    readable: dict[PlannedShard, str] = {}  # an image of each shard that was left out and can be read now
    unreadable: list[dict] = []
    for shard, names in folder.left_out.items():
        errors = {i: read_image.error_of(source, i) for i in range(shard.start, shard.stop) if source.names[i] in names}
        if now := [source.names[i] for i, error in errors.items() if error is None]:
            readable[shard] = now[0]
        if cfg.on_error == "stop":
            unreadable += [{"name": source.names[i], "problem": error} for i, error in errors.items() if error is not None]
    if not unreadable:  # a command that ends with an error makes no shard again
        folder.rename_incomplete(readable)
    missing, num_classes = folder.missing_shards(), folder.writer.info.num_classes
    log.info("%d images in %d classes; %d of %d shards to make", len(source), num_classes, len(missing), len(folder.shards))
    return folder.writer, missing, unreadable


def describe_shards(source: LabelledImages, vae: Autoencoder, cfg: EncodeConfig) -> ShardInfo:
    """Return the header of the shards, and log the classes. The user's statistics replace the autoencoder's own.

    Raises UserError if labels, `num_classes` or `latents_stats` do not fit.
    """
    num_classes = count_classes(source.all_labels, cfg.num_classes, source.class_names)
    log.info("%s", describe_classes(source))
    scale_factor, _, mean, std = vae.scaling
    if cfg.latents_stats:
        scale_factor = 1.0
        mean, std = read_channel_statistics(Path(cfg.latents_stats), vae.channels)
    elif cfg.normalize or cfg.sigma_data:  # `ShardFolder.finish` stores the measured statistics or scale factor
        scale_factor = 1.0 if cfg.normalize else scale_factor
        mean = std = None
    return ShardInfo(cfg.kind, cfg.scale_factor or scale_factor, cfg.autoencoder, cfg.resolution, num_classes, mean, std)


def image_reader(cfg: EncodeConfig) -> ImageReader:
    return ImageReader(cfg.resolution, cfg.background, cfg.pad, cfg.grey, cfg.value_range)


class _Item(NamedTuple):
    """A readable image, without its pixels."""

    index: int  # index of the image in the source
    label: int
    image_hash: int
    notes: list[str]  # see `ReadImage`
    jpeg: bytes | None  # the cropped image as a JPEG file (None unless keep_images=jpeg)


class _Batch(NamedTuple):
    """A batch of images of one shard."""

    items: list[_Item]  # the readable images
    pixels: Tensor  # cropped pixels of `items`, uint8 [b, H, W, 3]
    left_out: list[dict]  # {"name", "problem"} for each unreadable image


def _read_batch(source: LabelledImages, cfg: EncodeConfig, indices: Sequence[int], pin_memory: bool = False) -> _Batch:
    """Read and crop a batch. `pin_memory` puts the pixels into pinned memory, from which a copy to the GPU does not block."""
    read_image = image_reader(cfg)
    items: list[_Item] = []
    pixels = np.empty((len(indices), cfg.resolution, cfg.resolution, 3), np.uint8)
    left_out: list[dict] = []
    for index in indices:
        try:
            image = read_image(source, index)
        except UserError as e:
            left_out.append({"name": source.names[index], "problem": str(e)})
            continue
        pixels[len(items)] = image.pixels
        jpeg = to_jpeg(image.pixels) if cfg.keep_images == "jpeg" else None
        items.append(_Item(index, int(source.labels[index]), image.image_hash, image.notes, jpeg))
    readable = torch.from_numpy(pixels[: len(items)])
    return _Batch(items, readable.pin_memory() if pin_memory else readable, left_out)


class _ShardContent:
    """What a shard will contain, collected from batch to batch.

    Args:
        no_latents: Empty latents, so that a shard can be written even if all its images are unreadable.
        keep_images: Whether to store the images as JPEG files.

    Attributes:
        left_out: {"name", "problem"} for each unreadable image.
    """

    def __init__(self, no_latents: dict[str, Tensor], keep_images: bool):
        self.left_out: list[dict] = []
        self._items: list[_Item] = []
        self._latents = [no_latents]  # one entry per batch, after this one
        self._keep_images = keep_images

    def add(self, items: list[_Item], latents: dict[str, Tensor]) -> None:
        """Add a batch of images with their latents [b, C or 2C, h, w], which the device may still be computing."""
        self._latents[-1] = {name: tensor.cpu() for name, tensor in self._latents[-1].items()}  # runs while the device encodes
        self._latents.append(latents)
        self._items += items

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for `ShardWriter.write`, on the CPU."""
        tensors = {"labels": torch.tensor([item.label for item in self._items], dtype=torch.int64)}
        tensors |= {name: torch.cat([part[name].cpu() for part in self._latents]) for name in self._latents[0]}
        tensors["image_hashes"] = torch.tensor([item.image_hash for item in self._items], dtype=torch.int64)
        return tensors | (pack_images([item.jpeg for item in self._items]) if self._keep_images else {})

    def notes(self) -> Counter[str]:
        """Return the number of images for each note of `ReadImage`."""
        return Counter(note for item in self._items for note in item.notes)


def encode_images(
    source: LabelledImages,
    vae: Autoencoder,
    writer: ShardWriter,
    shards: Sequence[PlannedShard],
    cfg: EncodeConfig,
    accelerator: Accelerator,
) -> list[dict]:
    """Encode this process's share of the missing shards and write them. Return the unreadable images.

    A shard does not depend on the process that encodes it, because no batch spans two shards and each image has its own noise.
    `cfg.num_workers` must not be None. If on_error=stop, no shard with an unreadable image is written. If on_error=skip, the
    shards leave such images out, and the function returns [].
    """
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    batch_size = cfg.batch_size
    unreadable: list[dict] = []
    batch_ranges = [range(i, min(i + batch_size, s.stop)) for s in shards for i in range(s.start, s.stop, batch_size)]
    pin_memory = accelerator.device.type == "cuda"
    batches = map_ahead(functools.partial(_read_batch, source, cfg, pin_memory=pin_memory), batch_ranges, cfg.num_workers)
    bar = progress_bar(total=sum(s.stop - s.start for s in shards), unit="images", desc=f"process {rank + 1} of {num_processes}")
    with bar, contextlib.closing(batches), ThreadPoolExecutor(1) as pool:  # closing ends the reading threads after an error
        previous: Future[None] | None = None  # the write of the previous shard
        for shard in shards:
            num_batches = len(range(shard.start, shard.stop, batch_size))
            content = _encode_shard(islice(batches, num_batches), vae, cfg, accelerator.device, bar)
            if content.left_out and cfg.on_error == "stop":
                unreadable += content.left_out
                continue
            tensors = content.tensors()
            if previous is not None:
                previous.result()  # at most one shard is queued
            previous = pool.submit(writer.write, shard, tensors, content.left_out, content.notes())
        if previous is not None:
            previous.result()  # raises the error of the last write
    return unreadable


def _encode_shard(
    batches: Iterable[_Batch], vae: Autoencoder, cfg: EncodeConfig, device: torch.device, bar: tqdm
) -> _ShardContent:
    """Encode the batches of a shard. With on_error=stop, add nothing after the first unreadable image."""
    content = _ShardContent(_no_latents(vae, cfg), cfg.keep_images == "jpeg")
    for batch in batches:
        content.left_out += batch.left_out
        if batch.items and not (content.left_out and cfg.on_error == "stop"):
            content.add(batch.items, _encode(batch, vae, cfg, device))
        bar.update(len(batch.items) + len(batch.left_out))
    return content


def _no_latents(vae: Autoencoder, cfg: EncodeConfig) -> dict[str, Tensor]:
    """Return empty latents [0, C or 2C, h, w]."""
    channels = (1 if cfg.grey else vae.channels) * (1 + (cfg.kind == "moments"))
    size = cfg.resolution // vae.downsampling
    return {name: torch.empty(0, channels, size, size) for name in LATENT_TENSORS[: 1 + cfg.flips]}


def _encode(batch: _Batch, vae: Autoencoder, cfg: EncodeConfig, device: torch.device) -> dict[str, Tensor]:
    """Encode a batch into latents [b, C or 2C, h, w] on the device. If flips=true, also encode the mirrored images."""
    pixels = from_uint8(batch.pixels.to(device, non_blocking=True))[:, : 1 if cfg.grey else 3]
    latents = {}
    for flip, name in enumerate(LATENT_TENSORS[: 1 + cfg.flips]):
        moments = vae.encode_moments(pixels.flip(-1) if flip else pixels)
        if cfg.kind == "sample":
            random = SeedRandom([(cfg.seed, item.index, flip) for item in batch.items], device)
            moments = draw_latents(moments, "moments", random)
        latents[name] = moments
    return latents
