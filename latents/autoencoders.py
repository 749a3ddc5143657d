"""From images to latents and back. Latents here are as the autoencoder makes them, without the shard's scale factor."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from errors import UserError
from files import read_json

SD_VAES = ("stabilityai/sd-vae-ft-ema", "stabilityai/sd-vae-ft-mse")
# An SD-VAE decodes this many pixels at once: 16 images of 256x256. Its largest activations, 256 channels, take 1 GiB each.
DECODED_PIXELS = 2**20


class Autoencoder(Protocol):
    """What encodes images and decodes latents."""

    scale_factor: float  # what its latents are multiplied by for the network
    factor: int  # pixels of an image along one side of a latent

    def fingerprint(self) -> str:
        """A hash of the weights."""
        ...

    def encode_moments(self, images: Tensor) -> Tensor:
        """[B, 1 or 3, H, W], float32, -1 to 1 -> float32 [B, 2C, h, w]: mean, then log-variance."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """[B, C, h, w] -> images [B, 1 or 3, H, W], float32, about -1 to 1."""
        ...


class Identity:
    """For data whose latents are the pixels."""

    scale_factor, factor = 1.0, 1  # pixels in [-1, 1] have about EDM's standard deviation, 0.5

    def fingerprint(self) -> str:
        return "identity"

    def encode_moments(self, images: Tensor) -> Tensor:
        return torch.cat([images, torch.full_like(images, -30.0)], dim=1)  # no variance

    def decode(self, latents: Tensor) -> Tensor:
        return latents


class SDVAE:
    """A diffusers AutoencoderKL from a local folder or the Hugging Face hub; the other arguments are those of `build`."""

    def __init__(self, source: str, device: torch.device, channels: int | None, key: str, precision: str = "fp32"):
        from diffusers import AutoencoderKL  # slow to import; data of pixels does not need it

        try:
            self.vae = AutoencoderKL.from_pretrained(source).to(device).eval().requires_grad_(False)
        except (OSError, ValueError) as e:
            raise UserError(
                f"the autoencoder sd-vae:{source} cannot be loaded ({str(e).splitlines()[0]}); give a local copy with "
                f"{key}=sd-vae:<folder>"
            ) from e
        self.precision = precision
        if channels is not None and self.vae.config.latent_channels != channels:
            raise UserError(
                f"{key}: sd-vae:{source} decodes {self.vae.config.latent_channels} channels, but the latents have {channels}"
            )
        if getattr(self.vae.config, "shift_factor", None):
            raise UserError(f"{key}: sd-vae:{source} shifts its latents (shift_factor), which shards have no place for")
        self.scale_factor, self.factor = _scale_and_factor(self.vae.config)

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for name, weight in sorted(self.vae.state_dict().items()):
            digest.update(name.encode() + weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def encode_moments(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            posterior = self.vae.encode(images).latent_dist
        return torch.cat([posterior.mean, posterior.logvar], dim=1).float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        num_pixels = latents.shape[2] * latents.shape[3] * self.factor**2
        slices = latents.split(max(DECODED_PIXELS // num_pixels, 1))
        return torch.cat([self.vae.decode(part).sample.float() for part in slices])


def _scale_and_factor(config: dict) -> tuple[float, int]:
    return float(config["scaling_factor"]), 2 ** (len(config["block_out_channels"]) - 1)


def known_scale_and_factor(spec: str) -> tuple[float, int] | None:
    """(scale factor, pixels along one side of a latent) of an autoencoder that need not be loaded for that; None: not known.

    Raises:
        UserError: a local folder without a proper config.json.
    """
    kind, _, source = spec.partition(":")
    if spec == "identity":
        return Identity.scale_factor, Identity.factor
    if kind == "sd-vae" and source in SD_VAES:
        return 0.18215, 8
    if kind == "sd-vae" and Path(source).is_dir():
        try:
            return _scale_and_factor(read_json(Path(source) / "config.json"))
        except (ValueError, KeyError) as e:
            raise UserError(f"autoencoder={spec}: {Path(source) / 'config.json'} is not that of an AutoencoderKL ({e!r})") from e
    return None


def build(spec: str, device: torch.device, channels: int | None, key: str, precision: str = "fp32") -> Autoencoder:
    """The autoencoder that shards and data.autoencoder name: `identity` or `sd-vae:<hub id or folder>`.

    Args:
        channels: of the latents to decode; None: whatever it makes.
        key: the key of the configuration that sets it, for the messages.
        precision: of encoding, fp32 | bf16.

    Raises:
        UserError: it is `none` or unknown, cannot be loaded, or decodes other latents.
    """
    kind, _, source = spec.partition(":")
    if spec == "none":
        raise UserError(f"{key}=none: nothing is known that decodes these latents; if there is, {key}=sd-vae:<hub id or folder>")
    if kind == "identity" and not source:
        if channels not in (None, 1, 3):
            raise UserError(f"{key}=identity shows latents as pixels, which have 1 or 3 channels, not {channels}")
        return Identity()
    if kind == "sd-vae" and source:
        return SDVAE(source, device, channels, key, precision)
    raise UserError(f"{key}={spec!r} is unknown; use identity, none or sd-vae:<hub id or folder>")


def from_uint8(images: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] -> float32 [B, 3, H, W], -1 to 1."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def to_uint8(images: Tensor) -> Tensor:
    """[B, 1 or 3, H, W], -1 to 1 -> uint8 [B, H, W, 3]; grey becomes RGB."""
    pixels = (images * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
    return pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous()
