"""Encode images into latents and decode latents with an autoencoder. This module never applies the scale factor to latents."""

from __future__ import annotations

import functools
import hashlib
import logging
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.downloads import fetch_from_hub
from common.errors import UserError, as_user_error, first_line
from common.files import hash_bytes, hash_file, read_json
from common.progress import log_if_slow

log = logging.getLogger(__name__)

SD_VAES = ("stabilityai/sd-vae-ft-ema", "stabilityai/sd-vae-ft-mse")
SD_VAE = f"sd-vae:{SD_VAES[0]}"
SD_SCALE = 0.18215  # scales SD-VAE latents from a standard deviation of about 5.5 to about 1
# Maximum number of pixels per autoencoder call, which limits the memory use. 2**20 pixels are 16 images of 256x256 pixels.
MAX_DECODED_PIXELS = 2**20  # the largest decoder activations have 256 channels and occupy 1 GiB each
MAX_ENCODED_PIXELS = 2**22  # the largest encoder activations have 128 channels and occupy 2 GiB each
HUB_FILES = ("config.json", "diffusion_pytorch_model.safetensors")


class Scaling(NamedTuple):
    """How an autoencoder's authors scale its latents: (latents - latents_mean) / latents_std * scale_factor."""

    scale_factor: float
    downsampling: int  # image height divided by latent height
    latents_mean: list[float] | None = None  # one value per channel, or None for 0
    latents_std: list[float] | None = None  # one value per channel, or None for 1


class Identity:
    """An autoencoder whose latents are the pixels in [-1, 1], up to noise that 8-bit pixels do not show.

    The log-variance of -30 makes `encode kind=sample` add noise with a standard deviation of exp(-15), or 3e-7. It changes the
    rounding to float16 of some values. Without it, pictures that are encoded again would get other hashes of their shards, and
    runs on them would not resume.
    """

    scaling = Scaling(1.0, 1)
    channels = 3  # number of latent channels

    def hash(self) -> str:
        """Return a hash of the weights."""
        return "identity"

    def encode_moments(self, images: Tensor) -> Tensor:
        """Encode float32 images [B, 1 or 3, H, W] in [-1, 1]. Return the means and log-variances, float32 [B, 2C, h, w]."""
        return torch.cat([images, torch.full_like(images, -30.0)], dim=1)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, C, h, w] into float32 images [B, 1 or 3, H, W] with values from about -1 to 1."""
        return latents


class KLAutoencoder:
    """Wrapper around diffusers' AutoencoderKL with the same interface as `Identity`. `build` documents the arguments."""

    def __init__(self, spec: str, device: torch.device, precision: str):
        from latents.va_vae import autoencoder_kl, load_va_vae

        self.precision = precision
        file = find_weights(spec)
        try:
            with log_if_slow(log, "loading the autoencoder %s", spec):
                vae = load_va_vae(file) if spec.startswith("va-vae:") else autoencoder_kl().from_pretrained(file)
        except (OSError, ValueError) as e:  # load_va_vae raises UserError, a subclass of ValueError
            raise UserError(f"autoencoder={spec} cannot be loaded: {first_line(e)}") from e
        self.vae = vae.to(device).eval().requires_grad_(False)
        self.channels = self.vae.config.latent_channels
        self.scaling = _scaling_of(self.vae.config)

    def hash(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for name, weight in sorted(self.vae.state_dict().items()):
            digest.update(name.encode() + weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def encode_moments(self, images: Tensor) -> Tensor:
        slices = images.split(max(MAX_ENCODED_PIXELS // images[0, 0].numel(), 1))
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            posteriors = [self.vae.encode(part).latent_dist for part in slices]
        return torch.cat([torch.cat([p.mean, p.logvar], dim=1) for p in posteriors]).float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        slices = latents.split(max(MAX_DECODED_PIXELS // (latents[0, 0].numel() * self.scaling.downsampling**2), 1))
        return torch.cat([self.vae.decode(part).sample.float() for part in slices])


Autoencoder = Identity | KLAutoencoder


def find_weights(spec: str) -> Path | None:
    """Return the path of an autoencoder's weights. Download weights from the hub if the local cache does not contain them.

    Return None for autoencoders without weights.
    """
    kind, _, location = spec.partition(":")
    if kind == "va-vae":
        from latents.va_vae import find_va_vae

        return find_va_vae(location)
    if kind != "sd-vae":
        return None
    if Path(location).is_dir():
        return Path(location)
    otherwise = f"autoencoder={spec}: there is no such folder; give a folder, or a hub id that prepare_latents.py fetched"
    return fetch_from_hub(location, *HUB_FILES, otherwise=otherwise)[0].parent


def hash_local_files(spec: str) -> str | None:
    """Return a hash of an autoencoder's files if `spec` names a local file or folder, whose content can change, or else None."""
    kind, _, location = spec.partition(":")
    if not location or not (path := Path(location)).exists():
        return None
    suffixes = (".json", ".safetensors", ".bin", ".pt", *([".ckpt"] if kind == "va-vae" else []))
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in suffixes)
    with as_user_error(path):
        hashes = [_hash_file_once(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hash_bytes("".join(hashes).encode())


@functools.cache
def _hash_file_once(file: Path, size: int, mtime_ns: int) -> str:
    """Hash a file, and read it again only if its size or modification time changes."""
    return hash_file(file)


def _scaling_of(config: dict) -> Scaling:
    """Read diffusers' configuration of an AutoencoderKL. SD3 and FLUX.1 have a shift_factor, and others a mean per channel."""
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if shift := config.get("shift_factor"):
        mean = mean or [shift] * config["latent_channels"]
    if mean or std:
        mean, std = mean or [0.0] * len(std), std or [1.0] * len(mean)
    # The files of stabilityai/sd-vae-ft-ema, for example, do not store the scale factor, and diffusers uses this default.
    return Scaling(float(config.get("scaling_factor", SD_SCALE)), 2 ** (len(config["block_out_channels"]) - 1), mean, std)


def known_scaling(spec: str) -> Scaling | None:
    """Return how an autoencoder's latents are scaled without loading it, or None if this is unknown."""
    kind, _, location = spec.partition(":")
    known = {"identity": Identity.scaling, "va-vae": Scaling(1.0, 16)}
    if location in SD_VAES:
        return Scaling(SD_SCALE, 8)
    if kind == "sd-vae" and Path(location).is_dir():
        return _scaling_of(read_json(Path(location) / HUB_FILES[0]))
    return known.get(kind)


def build(spec: str, device: torch.device, channels: int | None = None, precision: str = "fp32") -> Autoencoder:
    """Build an autoencoder. `spec` is identity, sd-vae:<hub id or folder> or va-vae:<file or folder>, as in sampling.autoencoder.

    Args:
        channels: Expected number of latent channels. None accepts any number of channels.
        precision: Precision of the encoder, `fp32` or `bf16`.

    Raises:
        UserError: If `spec` is `none` or cannot be loaded, or if the autoencoder does not have `channels` channels.
    """
    if spec == "none":
        raise UserError(
            "autoencoder=none: the shards name none; set sampling.autoencoder= (autoencoder= of inspect) to decode them"
        )
    if spec == "identity":
        if channels not in (None, 1, 3):
            raise UserError(f"autoencoder=identity shows latents as pixels, which have 1 or 3 channels, not {channels}")
        return Identity()
    vae = _load_kl(spec, hash_local_files(spec), device, precision)
    if channels not in (None, vae.channels):
        raise UserError(f"autoencoder={spec} has {vae.channels} channels, and the latents have {channels}")
    return vae


@functools.lru_cache(maxsize=1)  # avoids reloading the same autoencoder for every run of a sweep
def _load_kl(spec: str, local_hash: str | None, device: torch.device, precision: str) -> KLAutoencoder:
    """Load an autoencoder. `local_hash` is the `hash_local_files` of `spec`: files that were replaced are loaded again."""
    return KLAutoencoder(spec, device, precision)
