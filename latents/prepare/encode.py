"""From images to a folder of shards: read and crop in workers, encode on the device, write beside it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from common.errors import UserError, reading
from common.progress import progress_bar
from common.randomness import SeedRandom
from common.types import Colour, Count, Positive, Whole
from latents.autoencoders import SD_VAE, Autoencoder, from_uint8
from latents.prepare.images import LabelledImages, read_cropped, to_jpeg
from latents.prepare.write import SHARD_SIZE, Dtype, Kind, ShardWriter
from latents.shards import NumClasses, Resolution, ShardInfo, draw_latents, pack_images

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Encoding:
    """The keys of `prepare_latents.py encode`."""

    # A folder with a folder per class (ImageNet's layout) or with EDM's dataset.json, WebDataset tars, or torchvision:<class>.
    images: str
    output: str  # folder
    labels: Literal["auto", "none"] = "auto"  # none: all images of a folder are of one class
    root: str = "datasets"  # of torchvision's sets: the folder that has the files, or gets them from the network
    split: str = "train"  # of torchvision's sets: train | test, or another that the set has
    resolution: Resolution = 256  # of the square that ADM's centre crop leaves, in pixels; at most 65,536
    pad: Whole = 0  # black pixels that are added to every side before the crop: pad=2 makes 32x32 of 28x28
    background: Colour = "white"  # behind transparent images: a name, or '#rrggbb' in quotes
    grey: bool = False  # keep the brightness alone, as one channel, with autoencoder=identity
    autoencoder: Annotated[str, Field(pattern="^(identity|(sd|va)-vae:.+)$")] = SD_VAE
    kind: Kind = "moments"  # moments (mean and log-variance, sampled afresh at every read) or sample (drawn once, from `seed`)
    flips: bool = False  # encode the mirrored images as well
    keep_images: Literal["none", "jpeg"] = "none"  # jpeg: put the cropped images beside the latents, for alignment
    normalize: bool = False  # the network sees each channel with mean 0 and standard deviation 1, measured over all latents
    latents_stats: str | None = None  # file of LightningDiT: the network sees each channel by its mean and standard deviation
    sigma_data: Positive | None = None  # the network sees all values with this deviation: 0.5 for EDM
    num_classes: NumClasses | None = None  # at most 1,000,000; null: as the class names or the labels have it
    precision: Literal["fp32", "bf16"] = "fp32"  # of the autoencoder; bf16 is for GPUs
    dtype: Dtype = "float16"  # of the stored latents
    seed: Whole = 0  # of kind=sample
    shard_size: Count = SHARD_SIZE  # images per shard: what a stop loses, and what one process holds in memory
    on_error: Literal["stop", "skip"] = "stop"  # at an image that cannot be read; manifest.json lists what was skipped
    batch_size: Count = 64
    num_workers: Whole | None = None  # processes that read images, beside each that encodes; null: its share of the cores
    cpu_threads: Count | None = None
    tf32: bool = True  # on CUDA, compute products and convolutions of float32 in TF32


# What another machine or a moved folder may change: the latents do not depend on it.
NOT_OF_THE_LATENTS = {
    "images", "output", "labels", "root", "split", "latents_stats", "on_error", "batch_size", "num_workers", "cpu_threads"
}  # fmt: skip


class _Batch(NamedTuple):
    """Consecutive images of one shard."""

    images: Tensor  # uint8 [b, H, W, 3], those that could be read
    kept: list[int]  # their numbers
    left_out: list[dict]  # the others, {"name", "problem"} each
    num_transparent: int  # of `images`, those that show the background
    jpegs: list[bytes]  # a file for each of `images`, where they are kept


class _CroppedImages(Dataset):
    """For a DataLoader with batch_size=None: one item is one batch."""

    def __init__(self, images: LabelledImages, how: Encoding):
        self.images, self.how = images, how

    def __getitem__(self, numbers: range) -> _Batch:
        how, pixels, kept, left_out, num_transparent = self.how, [], [], [], 0
        for number in numbers:
            name = self.images.names[number]
            try:
                with reading(name):
                    image, is_transparent = read_cropped(self.images, number, how.resolution, how.background, how.pad, how.grey)
                pixels.append(image)
                num_transparent += is_transparent
                kept.append(number)
            except UserError as e:
                left_out.append({"name": name, "problem": str(e)})
        shape = (0, how.resolution, how.resolution, 3)
        jpegs = [to_jpeg(image) for image in pixels] if how.keep_images == "jpeg" else []
        stacked = torch.from_numpy(np.stack(pixels) if pixels else np.zeros(shape, np.uint8))
        return _Batch(stacked, kept, left_out, num_transparent, jpegs)


def encode_images(
    source: LabelledImages, vae: Autoencoder, writer: ShardWriter, info: ShardInfo, how: Encoding, accelerator: Accelerator
) -> None:
    """Encode the images of the shards that are missing and write these, each process its share.

    Batches end where a shard ends, and noise is drawn per image: a shard is the same whichever process makes it.
    `how` must have its num_workers set. Raises UserError for an image that cannot be read, under on_error=stop.
    """
    rank, num_processes, batch_size = accelerator.process_index, accelerator.num_processes, how.batch_size
    accelerator.wait_for_everyone()  # all have checked the folder before one changes it
    if accelerator.is_main_process:
        writer.open()
    accelerator.wait_for_everyone()
    shards, num_missing = writer.missing(rank, num_processes), len(writer.missing())
    accelerator.wait_for_everyone()  # all have listed what is missing before one writes
    log.info("%d images in %d classes; %d of %d shards to make", len(source), info.num_classes, num_missing, len(writer.shards))
    batch_ranges = [range(i, min(i + batch_size, s.stop)) for s in shards for i in range(s.start, s.stop, batch_size)]
    loading = {"sampler": batch_ranges, "num_workers": how.num_workers, "pin_memory": accelerator.device.type == "cuda"}
    batches = iter(DataLoader(_CroppedImages(source, how), batch_size=None, **loading))
    bar = progress_bar(total=sum(s.stop - s.start for s in shards), unit="images", desc=f"process {rank + 1} of {num_processes}")
    with bar, ThreadPoolExecutor(1) as pool:
        written = pool.submit(int)  # the shard before: none yet
        for shard in shards:
            kept, left_out, encoded, jpegs, num_transparent = [], [], [], [], 0
            for _ in range(shard.start, shard.stop, batch_size):
                batch = next(batches)
                if batch.left_out and how.on_error == "stop":
                    raise UserError(f"{batch.left_out[0]['problem']}; repair or remove the image, or set on_error=skip")
                kept, left_out, jpegs = kept + batch.kept, left_out + batch.left_out, jpegs + batch.jpegs
                num_transparent += batch.num_transparent
                if batch.kept:
                    encoded.append(_encode(batch, vae, how, accelerator.device))
                if len(encoded) > 1:  # fetched while the device works on the batch after it
                    encoded[-2] = {name: tensor.cpu() for name, tensor in encoded[-2].items()}
                bar.update(len(batch.kept) + len(batch.left_out))
            tensors = {name: torch.cat([part[name].cpu() for part in encoded]) for name in (encoded[0] if encoded else ())}
            tensors |= pack_images(jpegs) if jpegs else {}
            written.result()  # at most one shard waits to be written
            labels = torch.from_numpy(source.labels[kept])
            written = pool.submit(writer.write, shard, labels, info, tensors, left_out, num_transparent)
        written.result()


def _encode(batch: _Batch, vae: Autoencoder, how: Encoding, device: torch.device) -> dict[str, Tensor]:
    """Latents [b, C or 2C, h, w] of the images, and of the mirrored ones, still on the device."""
    pixels = from_uint8(batch.images.to(device, non_blocking=True))[:, : 1 if how.grey else 3]
    latents = {}
    for flip, name in enumerate(("latents", "latents_flip")[: 1 + how.flips]):
        moments = vae.encode_moments(pixels.flip(-1) if flip else pixels)
        if how.kind == "sample":
            moments = draw_latents(moments, "moments", SeedRandom([(how.seed, number, flip) for number in batch.kept], device))
        latents[name] = moments
    return latents
