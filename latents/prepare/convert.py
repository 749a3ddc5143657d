"""Implement `prepare_latents.py convert`, which converts latents of other projects to shards."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from common.errors import UserError
from common.progress import progress_bar
from common.types import AutoencoderSpec, PositiveFloat, PositiveInt, Text
from latents.autoencoders import SD_VAE, SD_VAES, known_scaling
from latents.prepare.formats import LatentSource, open_latents
from latents.prepare.labelled_images import count_classes
from latents.prepare.write import SHARD_SIZE, Dtype, ShardFolder
from latents.shards import Kind, NumClasses, Resolution, ShardInfo, pack_images

log = logging.getLogger(__name__)

SD_SPECS = tuple(f"sd-vae:{name}" for name in SD_VAES)  # autoencoders with 4 channels


@dataclass(frozen=True)
class ConvertConfig:
    """Keys of `prepare_latents.py convert`. The latent format or the autoencoder determines the values of null keys."""

    path: Text  # file or folder of latents in a format that docs/data.md lists
    output: Text  # folder for the shards
    kind: Kind | None = None  # `moments` or `sample` (required for tars)
    scale: PositiveFloat | None = None  # factor that scaled the stored samples (1 or 0.18215, required for tars of samples)
    scale_factor: PositiveFloat | None = None  # factor that scales latents before they enter the network
    autoencoder: AutoencoderSpec | None = None  # autoencoder as in `encode`, or `none` (default for 4 channels: SD-VAE)
    resolution: Resolution | None = None  # image height and width in pixels
    num_classes: NumClasses | None = None  # number of classes (default: the largest label + 1)
    # If true, normalise each channel with its measured mean and standard deviation. If null, use the statistics in LightningDiT's
    # latents_stats.pt, if this file exists. If false, do not normalise.
    normalize: bool | None = None
    keep_images: Literal["none", "jpeg"] = "none"  # `jpeg` also stores the images from REPA's folder images/ for alignment
    dtype: Dtype = "float16"  # data type of the stored latents
    shard_size: PositiveInt = SHARD_SIZE  # number of latents per shard


def convert(cfg: ConvertConfig) -> None:
    """Convert the latents of another project to shards."""
    source = open_latents(cfg.path)
    log.info("%s: %d items, %s. %s", cfg.path, len(source.labels), type(source).__name__, source.log_message)
    info, scale = resolve_shard_info(source, cfg)
    log.info("%s; stored values are divided by %g. Check the result with `inspect`", info, scale)
    settings = {"command": "convert", "format": type(source).__name__, **asdict(info), "scale": scale}
    settings |= {name: getattr(cfg, name) for name in ("normalize", "keep_images", "shard_size", "dtype")}
    read_jpeg = source.open_jpegs(info.resolution) if cfg.keep_images == "jpeg" else None
    items_hash = source.hash()
    with contextlib.ExitStack() as stack:  # locks the output folder
        folder = ShardFolder.open(cfg.output, info, settings, lambda start, _: f"{items_hash} {start}", len(source.labels), stack)
        for shard in progress_bar(folder.missing, unit="shards"):
            tensors = {"labels": torch.from_numpy(source.labels[shard.start : shard.stop])}
            tensors |= {name: latents / scale for name, latents in source.read(shard.start, shard.stop).items()}
            if read_jpeg is not None:
                tensors |= pack_images([read_jpeg(item) for item in range(shard.start, shard.stop)])
            folder.write(shard, tensors)
        folder.finish(source=cfg.path)


def resolve_shard_info(source: LatentSource, cfg: ConvertConfig) -> tuple[ShardInfo, float]:
    """Return the header of the shards and the scale of the stored values. The user's keys override the format's values.

    Raises UserError if a key is missing, or if the latents do not fit the keys.
    """
    channels, height, width = source.shape
    kind = cfg.kind or source.kind
    scale = cfg.scale or source.scale or (1.0 if kind == "moments" else None)
    if cfg.autoencoder in (None, *SD_SPECS):
        _check_channels_of_sd_vae(source.path, kind, channels)
    autoencoder = cfg.autoencoder or (SD_VAE if channels == (8 if kind == "moments" else 4) else None)
    scale_factor, downsampling, *statistics = known_scaling(autoencoder or "none") or (None, None, None, None)
    if cfg.normalize is not None or source.channel_statistics:  # these replace the autoencoder's own statistics
        found = source.channel_statistics if cfg.normalize is None else None
        statistics = [[value / scale for value in values] for values in found] if found else [None, None]
        scale_factor = 1.0 if found or cfg.normalize else scale_factor
    header = {
        "kind": kind,
        "autoencoder": autoencoder,
        "scale_factor": cfg.scale_factor or scale_factor,
        "resolution": cfg.resolution or (downsampling and downsampling * height),
        "num_classes": count_classes(source.labels, cfg.num_classes),
    }
    if missing := [f"{key}=" for key, value in {**header, "scale": scale}.items() if value is None]:
        raise UserError(f"{source.path}: give {', '.join(missing)}, unknown for latents {list(source.shape)} of this format")
    if height != width or (kind == "moments" and (scale != 1 or channels % 2)):
        latents = f"{source.path}: latents {list(source.shape)}, kind={kind}, scale={scale:g}"
        raise UserError(f"{latents}: they must be square, and moments unscaled, with mean and log-variance")
    return ShardInfo(**header, latents_mean=statistics[0], latents_std=statistics[1]), scale


def _check_channels_of_sd_vae(path: Path, kind: str | None, channels: int) -> None:
    """Raise UserError if the number of channels belongs to the other kind of SD-VAE's latents."""
    if kind == "sample" and channels == 8:
        reason = "8 channels are the mean and log-variance of SD-VAE's 4 channels: give kind=moments"
        raise UserError(f"{path}: kind=sample, but {reason}, or autoencoder= for an autoencoder with 8 channels")
    if kind == "moments" and channels == 4:
        reason = "4 channels are samples of SD-VAE, whose moments have 8 channels: give kind=sample and scale="
        raise UserError(f"{path}: kind=moments, but {reason}, or autoencoder= for an autoencoder with 2 channels")
