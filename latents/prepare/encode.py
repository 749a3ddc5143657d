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

from common.errors import UserError
from common.progress import progress_bar
from common.randomness import SeedRandom
from evaluations.images import adm_center_crop, read_rgb
from evaluations.vit import Encoder
from latents.autoencoders import Autoencoder, from_uint8
from latents.prepare.images import LabelledImages, to_jpeg
from latents.prepare.write import ShardWriter
from latents.shards import ShardInfo, draw_latents, pack_images

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Batch:
    """Consecutive images of one shard."""

    images: Tensor  # uint8 [b, H, W, 3], those that could be read
    kept: list[int]  # their numbers
    left_out: list[dict]  # the others, {"name", "problem"} each
    jpegs: list[bytes]  # a file for each of `images`, where they are kept

    def pin_memory(self) -> _Batch:
        """For the DataLoader."""
        return replace(self, images=self.images.pin_memory())


class _CroppedImages(Dataset):
    """For a DataLoader with batch_size=None: one item is one batch."""

    def __init__(self, images: LabelledImages, resolution: int, pad: int, grey: bool, keep_images: bool):
        self.images, self.resolution, self.pad, self.grey, self.keep_images = images, resolution, pad, grey, keep_images

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
        jpegs = [to_jpeg(image) for image in pixels] if self.keep_images else []
        return _Batch(torch.from_numpy(np.stack(pixels) if pixels else np.zeros(shape, np.uint8)), kept, left_out, jpegs)


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
    keep_images: bool,
    encoder: Encoder | None,
) -> None:
    """Encode the images of the shards that are missing and write these, each process its share.

    Batches end where a shard ends, and noise is drawn per image: a shard is the same whichever process makes it.

    Args:
        flips: encode the mirrored images as well.
        seed: of the noise with which kind=sample is drawn.
        on_error: `stop` or `skip` at an image that cannot be read.
        pad: black pixels that are added to every side, before the crop.
        grey: encode one channel, the brightness, instead of RGB.
        keep_images: put the cropped images into the shards, as JPEG files.
        encoder: its patch tokens of the images, and of the mirrored ones, go into the shards; None: none do.

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
    cropped, pin_memory = _CroppedImages(images, info.resolution, pad, grey, keep_images), device.type == "cuda"
    batches = iter(DataLoader(cropped, batch_size=None, sampler=order, num_workers=num_workers, pin_memory=pin_memory))
    waited_sec, start_sec = 0.0, time.perf_counter()
    title = f"process {rank + 1} of {num_processes}" if num_processes > 1 else None
    bar = progress_bar(total=sum(s.stop - s.start for s in shards), unit="images", desc=title)
    with bar, ThreadPoolExecutor(1) as pool:
        written = pool.submit(int)  # the shard before: none yet
        for shard in shards:
            kept, left_out, encoded, jpegs = [], [], [], []
            for _ in range(shard.start, shard.stop, batch_size):
                wait_sec = time.perf_counter()
                batch = next(batches)
                waited_sec += time.perf_counter() - wait_sec
                if batch.left_out and on_error == "stop":
                    raise UserError(
                        f"{images.path}: {batch.left_out[0]['name']} cannot be read ({batch.left_out[0]['problem']}); "
                        "mend or remove it, or leave such images out: on_error=skip"
                    )
                kept, left_out, jpegs = kept + batch.kept, left_out + batch.left_out, jpegs + batch.jpegs
                if batch.kept:
                    encoded.append(_encode(batch, autoencoder, info.kind, device, flips, seed, 1 if grey else 3))
                    if encoder is not None:
                        encoded[-1] |= _encode_features(batch, encoder, flips)
                if len(encoded) > 1:  # fetched while the device works on the batch after it
                    encoded[-2] = {name: tensor.cpu() for name, tensor in encoded[-2].items()}
                bar.update(len(batch.kept) + len(batch.left_out))
            shown = {name: torch.cat([part[name].cpu() for part in encoded]) for name in (encoded[0] if encoded else ())}
            latents, latents_flip = shown.pop("latents", torch.empty(0)), shown.pop("latents_flip", None)
            written.result()  # at most one shard waits to be written
            labels = torch.from_numpy(images.labels[kept])
            shown |= pack_images(jpegs) if jpegs else {}
            written = pool.submit(writer.write, shard, latents, labels, info, latents_flip, left_out, shown)
        written.result()
    if shards and accelerator.is_main_process:
        log.info("waiting for images took %.0f%% of the time", 100 * waited_sec / max(time.perf_counter() - start_sec, 1e-9))


def _encode(
    batch: _Batch, autoencoder: Autoencoder, kind: str, device: torch.device, flips: bool, seed: int, channels: int
) -> dict[str, Tensor]:
    """Latents [b, C or 2C, h, w] of the images, and of the mirrored ones, still on the device."""
    pixels = from_uint8(batch.images.to(device, non_blocking=True))[:, :channels]
    latents = {}
    for flip, name in enumerate(("latents", "latents_flip")[: 1 + flips]):
        moments = autoencoder.encode_moments(pixels.flip(-1) if flip else pixels)
        if kind == "sample":
            moments = draw_latents(moments, "moments", SeedRandom([(seed, number, flip) for number in batch.kept], device))
        latents[name] = moments
    return latents


def _encode_features(batch: _Batch, encoder: Encoder, flips: bool) -> dict[str, Tensor]:
    """Patch tokens [b, n, E] of the images, and of the mirrored ones, still on the device."""
    features = {"features": encoder.encode(batch.images)[1].half()}
    if flips:
        features["features_flip"] = encoder.encode(batch.images.flip(2))[1].half()
    return features
