"""Latents of other projects, rewritten as shards: the command `prepare_latents.py convert`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Literal

import torch

from common.progress import progress_bar
from common.types import AutoencoderSpec, Count, Positive, Text
from latents.prepare.formats import open_latents, settle_header
from latents.prepare.write import SHARD_SIZE, Dtype, Kind, ShardWriter
from latents.shards import pack_images

log = logging.getLogger(__name__)


def convert(
    path: Text,
    output: Text,
    kind: Kind | None = None,
    scale: Positive | None = None,
    scale_factor: Positive | None = None,
    autoencoder: AutoencoderSpec | None = None,
    resolution: Count | None = None,
    num_classes: Count | None = None,
    normalize: bool | None = None,
    keep_images: Literal["none", "jpeg"] = "none",
    dtype: Dtype = "float16",
    shard_size: Count = SHARD_SIZE,
) -> None:
    """Rewrite the latents of another project as shards.

    Args:
        path: where they are.
        kind: moments | sample, where the format does not say it (tars).
        scale: what samples were multiplied by before they were stored (1, or 0.18215), where the format does not say it; shards
            hold them without.
        scale_factor: what the network's input is multiplied by; null: as the autoencoder has it.
        autoencoder: sd-vae:<hub id or folder>, va-vae:<file or folder>, identity, or none where nothing decodes them; null:
            SD-VAE, for latents of 4 channels.
        resolution: of the images, in pixels; null: as the autoencoder has it.
        num_classes: null: the largest label + 1.
        normalize: true: the network sees each channel with a mean of 0 and a standard deviation of 1, measured over all
            latents; null: so by LightningDiT's latents_stats.pt, where there is one; false: never.
        keep_images: none | jpeg: put the images that lie beside REPA's latents into the shards, for alignment.
        dtype: of the stored latents.
    """
    source = open_latents(path)
    log.info("%s: %d items, %s. %s", path, len(source.labels), type(source).__name__, source.note)
    info, scale = settle_header(source, kind, scale, autoencoder, normalize, scale_factor, resolution, num_classes)
    log.info("%s, stored values divided by %g; `inspect` shows whether they are so", info, scale)
    settings = {"command": "convert", "format": type(source).__name__, **asdict(info), "scale": scale}
    settings |= {"normalize": normalize, "keep_images": keep_images}
    read_image = source.find_images(info.resolution) if keep_images == "jpeg" else None
    fingerprint = source.fingerprint()
    writer = ShardWriter(output, settings, lambda start, stop: fingerprint, len(source.labels), shard_size, dtype)
    writer.open()
    for shard in progress_bar(writer.missing(), unit="shards"):
        tensors = {name: latents / scale for name, latents in source.read(shard.start, shard.stop).items()}
        if read_image is not None:
            tensors |= pack_images([read_image(item) for item in range(shard.start, shard.stop)])
        writer.write(shard, torch.from_numpy(source.labels[shard.start : shard.stop]), info, tensors)
    writer.finish(normalize=bool(normalize), source=path)
