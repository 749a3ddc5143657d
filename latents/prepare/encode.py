"""Implement `prepare_latents.py encode`, which encodes images into a folder of shards.

Threads read and crop images, the device encodes them, and a thread writes shards. `latents.prepare.encode_plan` chooses the
images and the shards.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from common.devices import copy_to_device
from common.errors import UserError, list_problems
from common.images import from_uint8
from common.progress import progress_bar
from common.randomness import SeedRandom
from latents.autoencoders import Autoencoder
from latents.batches import map_ahead
from latents.prepare.encode_plan import (
    EncodeConfig,
    check_settings,
    fingerprint_inputs,
    image_reader,
    list_and_check_images,
    load_autoencoder,
    plan_shards,
    select_images,
)
from latents.prepare.image_reader import to_jpeg
from latents.prepare.labelled_images import LabelledImages
from latents.prepare.write import ShardFolder
from latents.shards import LATENT_TENSORS, draw_latents, pack_images
from runtime.machine import cores_per_process, start_accelerator
from runtime.processes import check_new_file, check_same_files, gather_lists, on_main

# After shards are made, a removed image would move all later ones to other places in the shards.
REPAIR_IN_SHARDS = "repair {}, or set on_error=skip (if you remove images, all later shards are made again)"


def encode(cfg: EncodeConfig) -> None:
    """Encode images into a folder of shards. All processes that accelerate starts share the work.

    The main process decides in two steps. First, it lists the images. Then, after all processes have compared what they see and
    have selected the images to encode, it plans the shards.
    """
    check_settings(cfg)
    cfg = replace(cfg, num_workers=cores_per_process() if cfg.num_workers is None else cfg.num_workers)
    # Use a long timeout, because processes that finish early wait for the slowest process.
    accelerator = start_accelerator(cfg.cpu_threads, tf32=cfg.tf32, timeout=timedelta(days=7))
    # Only the main process lists the images, so that the others do not look up every file on a shared disk.
    images = on_main(partial(list_and_check_images, cfg))
    vae = load_autoencoder(cfg, accelerator.device)
    weights_hash = vae.hash()
    check_same_files(partial(fingerprint_inputs, images, weights_hash, cfg))
    images = select_images(images, cfg)
    with contextlib.ExitStack() as stack:  # the main process locks the output folder
        # Only the main process looks at the folder, because the file systems of other nodes may see it as it was before.
        folder, still_unreadable = on_main(partial(plan_shards, images, vae, weights_hash, cfg, stack))
        check_new_file("output", folder.lock_path)
        unreadable = encode_images(folder, images, vae, cfg, accelerator)
        unreadable = still_unreadable | dict(gather_lists([*unreadable.items()]))
        # The error comes after every process has made its shards, because it ends all processes.
        if unreadable:
            raise UserError(list_problems([*unreadable.values()], REPAIR_IN_SHARDS))
        entries = {"source": cfg.images, "label_by": cfg.labels, "unread": images.unsupported}
        on_main(partial(folder.finish, images.class_names, images.problems, **entries))


class _ReadableImage(NamedTuple):
    """A readable image, without its pixels."""

    index: int  # index of the image in the `LabelledImages`
    label: int
    image_hash: int
    notes: list[str]  # see `ReadImage`
    jpeg: bytes | None  # the cropped image as a JPEG file (None unless keep_images=jpeg)


class _Batch(NamedTuple):
    """A batch of images of one shard."""

    items: list[_ReadableImage]  # the readable images
    pixels: Tensor  # cropped pixels of `items`, uint8 [b, H, W, 3]
    unreadable: dict[str, str]  # {name: problem} of the unreadable images


def _read_batch(images: LabelledImages, cfg: EncodeConfig, pin_memory: bool, indices: Sequence[int]) -> _Batch:
    """Read and crop a batch. `pin_memory` puts the pixels into pinned memory, from which a copy to the GPU does not block."""
    read_image = image_reader(images, cfg)
    items: list[_ReadableImage] = []
    pixels = np.empty((len(indices), cfg.resolution, cfg.resolution, 3), np.uint8)
    unreadable: dict[str, str] = {}
    for index in indices:
        try:
            image = read_image(index)
        except UserError as e:
            unreadable[images.names[index]] = str(e)
            continue
        pixels[len(items)] = image.pixels
        jpeg = to_jpeg(image.pixels) if cfg.keep_images == "jpeg" else None
        items.append(_ReadableImage(index, int(images.labels[index]), image.image_hash, image.notes, jpeg))
    readable = torch.from_numpy(pixels[: len(items)])
    return _Batch(items, readable.pin_memory() if pin_memory else readable, unreadable)


def encode_images(
    folder: ShardFolder, images: LabelledImages, vae: Autoencoder, cfg: EncodeConfig, accelerator: Accelerator
) -> dict[str, str]:
    """Encode this process's share of the missing shards and write them. Return {name: problem} of the unreadable images.

    On equal devices, it does not matter for a shard which process encodes it: no batch spans two shards, each image has its own
    noise, and the errors of unreadable images hold nothing that differs between processes.
    `cfg.num_workers` must not be None. If on_error=stop, no shard with an unreadable image is written. If on_error=skip, the
    shards leave such images out, and the function returns {}.
    """
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    shards = folder.missing[rank::num_processes]
    batch_size = cfg.batch_size
    unreadable: dict[str, str] = {}
    batch_ranges = [range(i, min(i + batch_size, s.stop)) for s in shards for i in range(s.start, s.stop, batch_size)]
    pin_memory = accelerator.device.type == "cuda"
    batches = map_ahead(partial(_read_batch, images, cfg, pin_memory), batch_ranges, cfg.num_workers)
    bar = progress_bar(total=sum(s.stop - s.start for s in shards), unit="images", desc=f"process {rank + 1} of {num_processes}")
    with bar, contextlib.closing(batches), ThreadPoolExecutor(1) as pool:  # closing ends the reading threads after an error
        previous: Future[None] | None = None  # the write of the previous shard
        for shard in shards:
            num_batches = len(range(shard.start, shard.stop, batch_size))
            tensors, left_out, notes = _encode_shard(islice(batches, num_batches), vae, cfg, accelerator.device, bar)
            if left_out and cfg.on_error == "stop":
                unreadable |= left_out
                continue
            if previous is not None:
                previous.result()  # at most one shard is queued
            previous = pool.submit(folder.write, shard, tensors, left_out, notes)
        if previous is not None:
            previous.result()  # raises the error of the last write
    return unreadable


def _encode_shard(
    batches: Iterable[_Batch], vae: Autoencoder, cfg: EncodeConfig, device: torch.device, bar: tqdm
) -> tuple[dict[str, Tensor], dict[str, str], Counter[str]]:
    """Encode the batches of a shard. Return the tensors, unreadable images and notes for `ShardFolder.write`.

    With on_error=stop, encode nothing after the first unreadable image.
    """
    items: list[_ReadableImage] = []
    latents = [_no_latents(vae, cfg)]  # followed by those of each batch
    left_out: dict[str, str] = {}
    for batch in batches:
        left_out |= batch.unreadable
        if batch.items and not (left_out and cfg.on_error == "stop"):
            latents.append(_encode(batch, vae, cfg, device))
            latents[-2] = {name: tensor.cpu() for name, tensor in latents[-2].items()}  # while the device encodes this batch
            items += batch.items
        bar.update(len(batch.items) + len(batch.unreadable))
    tensors = {"labels": torch.tensor([item.label for item in items], dtype=torch.int64)}
    tensors |= {name: torch.cat([part[name].cpu() for part in latents]) for name in latents[0]}
    tensors["image_hashes"] = torch.tensor([item.image_hash for item in items], dtype=torch.int64)
    if cfg.keep_images == "jpeg":
        tensors |= pack_images([item.jpeg for item in items])
    return tensors, left_out, Counter(note for item in items for note in item.notes)


def _no_latents(vae: Autoencoder, cfg: EncodeConfig) -> dict[str, Tensor]:
    """Return empty latents [0, C or 2C, h, w], with which a shard can be written even if all its images are unreadable."""
    channels = (1 if cfg.grey else vae.channels) * (1 + (cfg.kind == "moments"))
    size = cfg.resolution // vae.scaling.downsampling
    return {name: torch.empty(0, channels, size, size) for name in LATENT_TENSORS[: 1 + cfg.flips]}


def _encode(batch: _Batch, vae: Autoencoder, cfg: EncodeConfig, device: torch.device) -> dict[str, Tensor]:
    """Encode a batch into latents [b, C or 2C, h, w] on the device. If flips=true, also encode the mirrored images."""
    pixels = from_uint8(copy_to_device(batch.pixels, device))[:, : 1 if cfg.grey else 3]
    latents = {}
    for flip, name in enumerate(LATENT_TENSORS[: 1 + cfg.flips]):
        moments = vae.encode_moments(pixels.flip(-1) if flip else pixels)
        if cfg.kind == "sample":
            random = SeedRandom([(cfg.seed, item.index, flip) for item in batch.items], device)
            moments = draw_latents(moments, "moments", random)
        latents[name] = moments
    return latents
