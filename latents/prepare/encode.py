"""From images to a folder of shards: read and crop in workers, encode on the device, write beside it."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from accelerate import Accelerator
from PIL import ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from errors import UserError
from evaluations.images import adm_center_crop, read_rgb
from latents.autoencoders import Autoencoder, from_uint8
from latents.prepare.images import LabelledImages
from latents.prepare.write import ShardWriter
from latents.shards import ShardInfo, draw_latents
from progress import progress_bar
from randomness import SeedRandom

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Batch:
    """Consecutive images of one shard."""

    images: Tensor  # uint8 [b, H, W, 3], those that could be read
    kept: list[int]  # their numbers
    left_out: list[dict]  # the others, {"name", "problem"} each

    def pin_memory(self) -> _Batch:
        """For the DataLoader."""
        return replace(self, images=self.images.pin_memory())


class _CroppedImages(Dataset):
    """For a DataLoader with batch_size=None: one item is one batch."""

    def __init__(self, images: LabelledImages, resolution: int, pad: int, grey: bool):
        self.images, self.resolution, self.pad, self.grey = images, resolution, pad, grey

    def __getitem__(self, numbers: range) -> _Batch:
        pixels, kept, left_out = [], [], []
        for number in numbers:
            try:
                image = ImageOps.expand(read_rgb(self.images.open(number)), self.pad)
                if self.grey:
                    image = image.convert("L").convert("RGB")
                pixels.append(adm_center_crop(image, self.resolution))
                kept.append(number)
            except ValueError as e:
                left_out.append({"name": self.images.names[number], "problem": str(e)})
        shape = (0, self.resolution, self.resolution, 3)
        return _Batch(torch.from_numpy(np.stack(pixels) if pixels else np.zeros(shape, np.uint8)), kept, left_out)


def encode_images(
    images: LabelledImages,
    autoencoder: Autoencoder,
    writer: ShardWriter,
    info: ShardInfo,
    accelerator: Accelerator,
    *,
    batch_size: int,
    num_workers: int,
    flips: bool,
    seed: int,
    on_error: str,
    pad: int,
    grey: bool,
) -> None:
    """Encode the images of the shards that are missing and write these, each process its share.

    Batches end where a shard ends, and noise is drawn per image: a shard is the same whichever process makes it.

    Args:
        flips: encode the mirrored images as well.
        seed: of the noise with which kind=sample is drawn.
        on_error: `stop` or `skip` at an image that cannot be read.
        pad: black pixels that are added to every side, before the crop.
        grey: encode one channel, the brightness, instead of RGB.

    Raises:
        UserError: an image that cannot be read, under on_error=stop, by name.
    """
    rank, num_processes, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    accelerator.wait_for_everyone()  # all have checked the folder before one changes it
    if accelerator.is_main_process:
        writer.open()
    accelerator.wait_for_everyone()
    shards, num_missing = writer.missing(rank, num_processes), len(writer.missing())
    accelerator.wait_for_everyone()  # all have listed what is missing before one writes
    log.info("%d images in %d classes", len(images), info.num_classes)
    log.info("%d of %d shards to make", num_missing, len(writer.shards))
    order = [range(i, min(i + batch_size, s.stop)) for s in shards for i in range(s.start, s.stop, batch_size)]
    cropped, pin_memory = _CroppedImages(images, info.resolution, pad, grey), device.type == "cuda"
    batches = iter(DataLoader(cropped, batch_size=None, sampler=order, num_workers=num_workers, pin_memory=pin_memory))
    waited_sec, start_sec = 0.0, time.perf_counter()
    title = f"process {rank + 1} of {num_processes}" if num_processes > 1 else None
    bar = progress_bar(total=sum(s.stop - s.start for s in shards), unit="images", desc=title)
    with bar, ThreadPoolExecutor(1) as pool:
        written = pool.submit(int)  # the shard before: none yet
        for shard in shards:
            kept, left_out, encoded = [], [], []
            for _ in range(shard.start, shard.stop, batch_size):
                wait_sec = time.perf_counter()
                batch = next(batches)
                waited_sec += time.perf_counter() - wait_sec
                if batch.left_out and on_error == "stop":
                    raise UserError(
                        f"{images.path}: {batch.left_out[0]['name']} cannot be read ({batch.left_out[0]['problem']}); "
                        "mend or remove it, or leave such images out: on_error=skip"
                    )
                kept, left_out = kept + batch.kept, left_out + batch.left_out
                if batch.kept:
                    encoded.append(_encode(batch, autoencoder, info.kind, device, flips, seed, 1 if grey else 3))
                if len(encoded) > 1:  # fetched while the device works on the batch after it
                    encoded[-2] = [latents.cpu() for latents in encoded[-2]]
                bar.update(len(batch.kept) + len(batch.left_out))
            latents = [torch.cat([part[i].cpu() for part in encoded]) if encoded else torch.empty(0) for i in range(1 + flips)]
            written.result()  # at most one shard waits to be written
            labels = torch.from_numpy(images.labels[kept])
            written = pool.submit(writer.write, shard, latents[0], labels, info, latents[1] if flips else None, left_out)
        written.result()
    if shards and accelerator.is_main_process:
        log.info("waiting for images took %.0f%% of the time", 100 * waited_sec / max(time.perf_counter() - start_sec, 1e-9))


def _encode(
    batch: _Batch, autoencoder: Autoencoder, kind: str, device: torch.device, flips: bool, seed: int, channels: int
) -> list[Tensor]:
    """Latents [b, C or 2C, h, w] of the images, and of the mirrored ones, still on the device."""
    pixels = from_uint8(batch.images.to(device, non_blocking=True))[:, :channels]
    latents = []
    for flip in range(1 + flips):
        moments = autoencoder.encode_moments(pixels.flip(-1) if flip else pixels)
        if kind == "sample":
            moments = draw_latents(moments, "moments", SeedRandom([(seed, number, flip) for number in batch.kept], device))
        latents.append(moments)
    return latents
