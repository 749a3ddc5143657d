"""Encode images into a folder of shards. Workers read and crop images, the device encodes them, and a thread writes shards."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader

from common.errors import UserError, as_user_error
from common.progress import progress_bar
from common.randomness import SeedRandom
from common.types import Colour, NonNegativeInt, PositiveFloat, PositiveInt
from latents.autoencoders import SD_VAE, Autoencoder, from_uint8
from latents.prepare.images import LabelledImages, read_cropped, to_jpeg
from latents.prepare.write import SHARD_SIZE, Dtype, ShardWriter
from latents.shards import Kind, NumClasses, Resolution, ShardInfo, draw_latents, pack_images

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodeConfig:
    """Keys of `prepare_latents.py encode`."""

    images: str  # folder with one subfolder per class (as in ImageNet) or with EDM's dataset.json, or WebDataset tars
    output: str  # folder for the shards
    labels: Literal["auto", "none"] = "auto"  # `none` assigns all images to a single class
    part: Literal["all", "train", "validation"] = "all"  # `validation` selects every 20th image, `train` selects the others
    resolution: Resolution = 256  # height and width in pixels after ADM's centre crop (at most 65,536)
    pad: NonNegativeInt = 0  # number of black pixels to add on each side before the crop (2 pads 28x28 to 32x32)
    background: Colour = "white"  # background colour for transparent images, either a name or '#rrggbb' in quotes
    grey: bool = False  # whether to convert images to one grey channel (requires autoencoder=identity)
    autoencoder: Annotated[str, Field(pattern="^(identity|(sd|va)-vae:.+)$")] = SD_VAE
    kind: Kind = "moments"  # `moments` (mean and log-variance, from which the trainer samples) or `sample` (drawn once by `seed`)
    flips: bool = False  # true also encodes the mirrored images
    keep_images: Literal["none", "jpeg"] = "none"  # `jpeg` also stores the cropped images for alignment
    normalize: bool = False  # whether to normalise each network input channel to mean 0 and standard deviation 1 over all latents
    latents_stats: str | None = None  # LightningDiT's latents_stats.pt, which contains statistics to normalise each channel
    sigma_data: PositiveFloat | None = None  # target standard deviation of the network input (EDM: 0.5), which sets scale_factor
    num_classes: NumClasses | None = None  # number of classes, at most 1,000,000 (default: from class names or labels)
    precision: Literal["fp32", "bf16"] = "fp32"  # precision of the autoencoder (bf16 is intended for GPUs)
    dtype: Dtype = "float16"  # data type of the stored latents
    seed: NonNegativeInt = 0  # random seed for kind=sample
    shard_size: PositiveInt = SHARD_SIZE  # images per shard (a process buffers one in memory and loses it if interrupted)
    on_error: Literal["stop", "skip"] = "stop"  # what to do with unreadable images (manifest.json lists skipped images)
    batch_size: PositiveInt = 64  # batch size per process
    num_workers: NonNegativeInt | None = None  # number of loader workers per process (default: an equal share of the CPU cores)
    cpu_threads: PositiveInt | None = None  # number of threads per process (default: an equal share of the CPU cores)
    tf32: bool = True  # whether CUDA uses TF32 for float32 matrix products and convolutions


# Keys that may change when `encode` resumes. Item hashes cover the images and labels, and shard headers contain the statistics.
NOT_IN_LATENTS = {"images", "output", "labels", "latents_stats", "on_error", "batch_size", "num_workers", "cpu_threads"}


class _Batch(NamedTuple):
    """A batch of consecutive images in one shard."""

    images: Tensor  # the readable images, uint8 [b, H, W, 3]
    kept: list[int]  # indices of the readable images
    left_out: list[dict]  # {"name", "problem"} for each unreadable image
    jpegs: list[bytes]  # `images` as JPEG files (empty unless keep_images=jpeg)


def _read_batch(source: LabelledImages, cfg: EncodeConfig, numbers: list[int]) -> _Batch:
    pixels, kept, left_out = [], [], []
    crop = cfg.resolution, cfg.background, cfg.pad, cfg.grey
    for number in numbers:
        name = source.names[number]
        try:
            with as_user_error(name):
                pixels.append(read_cropped(source, number, *crop))
            kept.append(number)
        except UserError as e:
            left_out.append({"name": name, "problem": str(e)})
    jpegs = [to_jpeg(image) for image in pixels] if cfg.keep_images == "jpeg" else []
    stacked = np.array(pixels, np.uint8).reshape(-1, cfg.resolution, cfg.resolution, 3)
    return _Batch(torch.from_numpy(stacked), kept, left_out, jpegs)


def encode_images(
    source: LabelledImages, vae: Autoencoder, writer: ShardWriter, info: ShardInfo, cfg: EncodeConfig, accelerator: Accelerator
) -> None:
    """Encode the images of all missing shards and write the shards. The processes divide the shards among themselves.

    A shard does not depend on the process that encodes it, because no batch spans two shards and each image has its own noise.
    `cfg.num_workers` must not be None. Raise UserError if an image is unreadable and on_error=stop.
    """
    rank, num_processes, batch_size = accelerator.process_index, accelerator.num_processes, cfg.batch_size
    accelerator.wait_for_everyone()  # no process changes the folder before every process has checked it
    if accelerator.is_main_process:
        writer.open()
    accelerator.wait_for_everyone()
    shards, num_missing = writer.missing(rank, num_processes), len(writer.missing())
    accelerator.wait_for_everyone()  # no process writes before every process has listed the missing shards
    log.info("%d images in %d classes; %d of %d shards to make", len(source), info.num_classes, num_missing, len(writer.shards))
    batch_ranges = [range(i, min(i + batch_size, s.stop)) for s in shards for i in range(s.start, s.stop, batch_size)]
    loading = {"num_workers": cfg.num_workers, "pin_memory": accelerator.device.type == "cuda"}
    loading |= {"batch_sampler": batch_ranges, "collate_fn": functools.partial(_read_batch, source, cfg)}
    batches = iter(DataLoader(range(len(source)), **loading))
    bar = progress_bar(total=sum(s.stop - s.start for s in shards), unit="images", desc=f"process {rank + 1} of {num_processes}")
    with bar, ThreadPoolExecutor(1) as pool:
        written = pool.submit(int)  # placeholder for the first iteration, which has no previous shard
        for shard in shards:
            kept, left_out, jpegs, encoded = [], [], [], [_no_latents(vae, cfg)]
            for _ in range(shard.start, shard.stop, batch_size):
                batch = next(batches)
                if batch.left_out and cfg.on_error == "stop":
                    raise UserError(f"{batch.left_out[0]['problem']}; repair or remove the image, or set on_error=skip")
                kept, left_out, jpegs = kept + batch.kept, left_out + batch.left_out, jpegs + batch.jpegs
                if batch.kept:
                    latents = _encode(batch, vae, cfg, accelerator.device)
                    encoded[-1] = {name: tensor.cpu() for name, tensor in encoded[-1].items()}  # runs while the device encodes
                    encoded.append(latents)
                bar.update(len(batch.kept) + len(batch.left_out))
            tensors = {name: torch.cat([part[name].cpu() for part in encoded]) for name in encoded[0]}
            tensors |= pack_images(jpegs) if cfg.keep_images == "jpeg" else {}
            written.result()  # wait for the previous shard, so that at most one shard is queued
            written = pool.submit(writer.write, shard, torch.from_numpy(source.labels[kept]), info, tensors, left_out)
        written.result()


def _no_latents(vae: Autoencoder, cfg: EncodeConfig) -> dict[str, Tensor]:
    """Return empty latents [0, C or 2C, h, w], so that a shard can be written even if all its images are unreadable."""
    channels = (1 if cfg.grey else vae.channels) * (1 + (cfg.kind == "moments"))
    size = cfg.resolution // vae.downsampling
    return {name: torch.empty(0, channels, size, size) for name in ("latents", "latents_flip")[: 1 + cfg.flips]}


def _encode(batch: _Batch, vae: Autoencoder, cfg: EncodeConfig, device: torch.device) -> dict[str, Tensor]:
    """Encode a batch into latents [b, C or 2C, h, w] on the device. If flips=true, also encode the mirrored images."""
    pixels = from_uint8(batch.images.to(device, non_blocking=True))[:, : 1 if cfg.grey else 3]
    latents = {}
    for flip, name in enumerate(("latents", "latents_flip")[: 1 + cfg.flips]):
        moments = vae.encode_moments(pixels.flip(-1) if flip else pixels)
        if cfg.kind == "sample":
            random = SeedRandom([(cfg.seed, number, flip) for number in batch.kept], device)
            moments = draw_latents(moments, "moments", random)
        latents[name] = moments
    return latents
