"""From latents to images. Latents here are as the autoencoder makes them, without the shard's scale factor."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Autoencoder(Protocol):
    def decode(self, latents: Tensor) -> Tensor:
        """[B, C, h, w] -> images [B, 1 or 3, H, W], float32, about -1 to 1."""
        ...


class Identity:
    """For data whose latents are the pixels themselves."""

    def decode(self, latents: Tensor) -> Tensor:
        return latents


class SDVAE:
    """A diffusers AutoencoderKL.

    Args:
        source: a local folder, or a name on the Hugging Face hub (stabilityai/sd-vae-ft-ema, say).
        channels, key: as for `build`.
    """

    def __init__(self, source: str, device: torch.device, channels: int, key: str):
        from diffusers import AutoencoderKL  # slow to import; data of pixels does not need it

        try:
            self.vae = AutoencoderKL.from_pretrained(source).to(device).eval().requires_grad_(False)
        except (OSError, ValueError) as e:
            raise ValueError(
                f"the autoencoder sd-vae:{source} cannot be loaded ({str(e).splitlines()[0]}); give a local copy with "
                f"{key}=sd-vae:<folder>"
            ) from e
        if self.vae.config.latent_channels != channels:
            raise ValueError(
                f"{key}: sd-vae:{source} decodes {self.vae.config.latent_channels} channels, but the latents have {channels}"
            )

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        return self.vae.decode(latents).sample.float()


def build(spec: str, device: torch.device, channels: int, key: str) -> Autoencoder:
    """`identity` or `sd-vae:<hub id or folder>`, as shards and data.autoencoder name it.

    Args:
        channels: of the latents to decode.
        key: the key of the configuration that sets it, for the messages.

    Raises:
        ValueError: it is unknown, cannot be loaded, or decodes other latents.
    """
    kind, _, source = spec.partition(":")
    if kind == "identity" and not source:
        if channels not in (1, 3):
            raise ValueError(f"{key}=identity shows latents as pixels, which have 1 or 3 channels, not {channels}")
        return Identity()
    if kind == "sd-vae" and source:
        return SDVAE(source, device, channels, key)
    raise ValueError(f"{key}={spec!r} is unknown; use identity or sd-vae:<hub id or folder>")


def to_uint8(images: Tensor) -> Tensor:
    """[B, 1 or 3, H, W], -1 to 1 -> uint8 [B, H, W, 3]; grey becomes RGB."""
    pixels = (images * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
    return pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous()
