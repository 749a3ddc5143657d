"""From images to latents and back. Latents here are as the autoencoder makes them, without the shard's scale factor."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from common.downloads import NotDownloaded, download_from_hub, is_hub_id
from common.errors import UserError
from common.files import read_json
from common.progress import say_if_slow
from latents.va_vae import find_va_vae, load_va_vae

log = logging.getLogger(__name__)

SD_VAES = ("stabilityai/sd-vae-ft-ema", "stabilityai/sd-vae-ft-mse")
# An SD-VAE decodes this many pixels at once: 16 images of 256x256. Its largest activations, 256 channels, take 1 GiB each.
DECODED_PIXELS = 2**20
ENCODED_PIXELS = 2**22  # 2 GiB for each activation of 128 channels
CONFIG_NAME = "config.json"
WEIGHTS_NAMES = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")  # the first one that is there


class Autoencoder(Protocol):
    """What encodes images and decodes latents."""

    scale_factor: float  # what its latents are multiplied by for the network
    factor: int  # pixels of an image along one side of a latent

    def fingerprint(self) -> str:
        """A hash of the weights."""
        ...

    def encode_moments(self, images: Tensor) -> Tensor:
        """[B, 1 or 3, H, W], float32, -1 to 1 -> float32 [B, 2C, h, w]: mean, then log-variance.

        Nobody can tell images of 0 to 1 from pale ones: `from_uint8` makes the right range.
        """
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


class KLAutoencoder:
    """A diffusers AutoencoderKL: sd-vae:<hub id or folder>, or va-vae:<file or folder>. The arguments are those of `build`."""

    def __init__(self, spec: str, device: torch.device, channels: int | None, key: str, precision: str = "fp32"):
        kind, _, source = spec.partition(":")
        file = find_files(source, key) if kind == "sd-vae" else find_va_vae(source, key)
        try:
            with say_if_slow(log, "loading the autoencoder %s", spec):
                from diffusers import AutoencoderKL  # slow to import; data of pixels does not need it

                vae = AutoencoderKL.from_pretrained(file) if kind == "sd-vae" else load_va_vae(file)
                self.vae = vae.to(device).eval().requires_grad_(False)
        except UserError:
            raise
        except (OSError, ValueError) as e:
            raise UserError(
                f"the autoencoder {spec} cannot be loaded ({str(e).splitlines()[0]}); give a local copy with "
                f"{key}=sd-vae:<folder>"
            ) from e
        self.precision = precision
        if channels is not None and self.vae.config.latent_channels != channels:
            raise UserError(f"{key}: {spec} decodes {self.vae.config.latent_channels} channels, but the latents have {channels}")
        if getattr(self.vae.config, "shift_factor", None):
            raise UserError(f"{key}: {spec} shifts its latents (shift_factor), which shards have no place for")
        self.scale_factor, self.factor = _scale_and_factor(self.vae.config)

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for name, weight in sorted(self.vae.state_dict().items()):
            digest.update(name.encode() + weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def encode_moments(self, images: Tensor) -> Tensor:
        slices = images.split(max(ENCODED_PIXELS // (images.shape[2] * images.shape[3]), 1))
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            posteriors = [self.vae.encode(part).latent_dist for part in slices]
        return torch.cat([torch.cat([p.mean, p.logvar], dim=1) for p in posteriors]).float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        num_pixels = latents.shape[2] * latents.shape[3] * self.factor**2
        slices = latents.split(max(DECODED_PIXELS // num_pixels, 1))
        return torch.cat([self.vae.decode(part).sample.float() for part in slices])


def find(spec: str, key: str) -> Path | None:
    """Find or download what `build` will load, for a command that builds it late. None: there is nothing to load."""
    kind, _, source = spec.partition(":")
    if kind == "va-vae" and source:
        return find_va_vae(source, key)
    return find_files(source, key) if kind == "sd-vae" and source else None


def find_files(source: str, key: str) -> Path:
    """The folder that holds configuration and weights of sd-vae:<source>.

    Args:
        source: that folder, or an id of the Hugging Face hub: then the hub's cache is used without asking the network, and a
            model that is not there is downloaded. Of several processes one downloads; the hub's locks have the others wait.
        key: the key of the configuration that sets it, for the messages.

    Raises:
        UserError: there is no such folder or model, or it cannot be downloaded; within ANSWER_SEC where nothing answers.
    """
    if Path(source).is_dir():
        return Path(source)
    if not is_hub_id(source):
        raise UserError(
            f"the autoencoder sd-vae:{source} cannot be loaded (there is no such folder); give a local copy with "
            f"{key}=sd-vae:<folder>, or the id of a model on the Hugging Face hub, such as sd-vae:{SD_VAES[0]}"
        )
    if (folder := _find_cached(source)) is not None:
        return folder

    def choose(names: list[str]) -> tuple[str, str]:
        weights = next((name for name in WEIGHTS_NAMES if name in names), None)
        if CONFIG_NAME not in names or weights is None:
            raise UserError(
                f"{key}=sd-vae:{source}: this model of the hub is not an AutoencoderKL of diffusers, which has {CONFIG_NAME} and "
                f"{WEIGHTS_NAMES[0]}; give another one, or a folder"
            )
        return CONFIG_NAME, weights

    try:
        return download_from_hub(source, choose)[0].parent
    except NotDownloaded as e:
        fetch = "fetch" if source == SD_VAES[0] else f"fetch autoencoder=sd-vae:{source}"
        raise UserError(
            f"the autoencoder sd-vae:{source} is not in the cache of the Hugging Face hub, and {e}; run `python "
            f"prepare_latents.py {fetch}` once where there is a network, or give a local copy with {key}=sd-vae:<folder>"
        ) from e


def _find_cached(source: str) -> Path | None:
    """The folder of a model in the hub's cache; None where a file is missing."""
    from huggingface_hub import try_to_load_from_cache

    config, *weights = (try_to_load_from_cache(source, name) for name in (CONFIG_NAME, *WEIGHTS_NAMES))
    is_whole = isinstance(config, str) and any(isinstance(file, str) for file in weights)
    return Path(config).parent if is_whole else None


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
    if kind == "va-vae":
        return 1.0, 16
    if kind == "sd-vae" and Path(source).is_dir():
        try:
            return _scale_and_factor(read_json(Path(source) / CONFIG_NAME))
        except (ValueError, KeyError) as e:
            raise UserError(f"autoencoder={spec}: {Path(source) / 'config.json'} is not that of an AutoencoderKL ({e!r})") from e
    return None


def build(spec: str, device: torch.device, channels: int | None, key: str, precision: str = "fp32") -> Autoencoder:
    """The autoencoder that shards and data.autoencoder name: identity, sd-vae:<hub id or folder> or va-vae:<file or folder>.

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
    if kind in ("sd-vae", "va-vae") and source:
        return KLAutoencoder(spec, device, channels, key, precision)
    raise UserError(f"{key}={spec!r} is unknown; use identity, none, sd-vae:<hub id or folder> or va-vae:<file or folder>")


def from_uint8(images: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] -> float32 [B, 3, H, W], -1 to 1. Raises ValueError for other types and shapes."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(f"images are {images.dtype} {list(images.shape)}; need uint8 [B, H, W, 3]")
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def to_uint8(images: Tensor) -> Tensor:
    """[B, 1 or 3, H, W], -1 to 1 -> uint8 [B, H, W, 3]; grey becomes RGB.

    Raises:
        ValueError: integers, which are pixels already.
        UserError: NaN or infinity, which would look like black pixels.
    """
    if not images.is_floating_point():
        raise ValueError(f"images are {images.dtype}; need floats, -1 to 1")
    if not images.isfinite().all():
        raise UserError("decoded images hold NaN or infinity: the network or the autoencoder overflows; if it is bf16, try fp32")
    pixels = (images * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
    return pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous()
