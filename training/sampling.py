"""From a network to images: the same code for the grids of training, for sample.py and for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig
from PIL import Image, ImageDraw
from torch import Tensor, nn

from edm import EDM
from guidance import Denoiser
from latents import autoencoders
from latents.autoencoders import Autoencoder, to_uint8
from training.checkpoint import load_config, load_weights
from training.config import build_network
from training.randomness import SeedRandom


@dataclass
class ImageSampler:
    """Images by seed.

    Attributes:
        net: in evaluation mode, on the device to sample on.
        diffusion: with its sampler.
        guide: (denoise, num_classes) -> denoiser, what guidance=... asks for.
        autoencoder: decodes latents / scale_factor.
        latent_shape: (C, H, W).
    """

    net: nn.Module
    diffusion: EDM
    guide: Callable[[Denoiser, int], Denoiser]
    autoencoder: Autoencoder
    latent_shape: tuple[int, int, int]
    num_classes: int
    scale_factor: float
    device: torch.device
    precision: str = "fp32"

    @torch.no_grad()
    def __call__(self, seeds: list[int], labels: list[int]) -> np.ndarray:
        """uint8 [B, H, W, 3]; image i depends on seeds[i] and labels[i] alone."""
        random = SeedRandom(seeds, self.device)
        y = torch.tensor(labels, dtype=torch.int64, device=self.device)

        def denoise(x: Tensor, sigma: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                return self.diffusion.denoise(self.net, x, sigma, y)

        denoiser = self.guide(denoise, self.num_classes)
        latents = self.diffusion.sample(denoiser, random.randn(*self.latent_shape), y, random)
        return to_uint8(self.autoencoder.decode(latents / self.scale_factor)).cpu().numpy()


def build_sampler(net: nn.Module, cfg: DictConfig, autoencoder: Autoencoder, device: torch.device, **settings) -> ImageSampler:
    """The sampler of a run: its shapes, classes and scale come from the run's configuration.

    Args:
        cfg: of the run, with data.* filled in.
        settings: diffusion, guide and precision of `ImageSampler`.
    """
    data = cfg.data
    return ImageSampler(
        net=net,
        autoencoder=autoencoder,
        latent_shape=(data.in_channels, data.input_size, data.input_size),
        num_classes=data.num_classes,
        scale_factor=data.scale_factor,
        device=device,
        **settings,
    )


def load_sampler(folder: Path, weights: str, autoencoder: str | None, device: torch.device, **settings) -> ImageSampler:
    """The sampler of a verified checkpoint.

    Args:
        weights: `ema` or `raw`.
        autoencoder: instead of the run's own; None keeps that.
        settings: as for `build_sampler`.
    """
    cfg = load_config(folder)
    net = build_network(cfg).eval().requires_grad_(False)
    net.load_state_dict(load_weights(folder, weights))
    decoder = autoencoders.build(autoencoder or cfg.data.autoencoder, device, cfg.data.in_channels, "autoencoder")
    return build_sampler(net.to(device), cfg, decoder, device, **settings)


def labelled_grid(images: list[np.ndarray], labels: list[int], num_columns: int = 10, min_pixels: int = 64) -> Image.Image:
    """Images side by side, each with its label above it; small ones are enlarged (bicubic).

    Args:
        images: uint8 [H, W, 3], all of one size.
        min_pixels: images smaller than this are enlarged to at least this.
    """
    height, width = images[0].shape[:2]
    factor = -(-min_pixels // min(height, width))
    height, width, gap, caption = height * factor, width * factor, 4, 14
    num_columns = min(num_columns, len(images))
    num_rows = -(-len(images) // num_columns)
    grid = Image.new("RGB", (num_columns * (width + gap) + gap, num_rows * (height + caption + gap) + gap), "white")
    draw = ImageDraw.Draw(grid)
    for i, (image, label) in enumerate(zip(images, labels)):
        x, y = gap + i % num_columns * (width + gap), gap + i // num_columns * (height + caption + gap)
        draw.text((x + 1, y), str(label), fill="black")
        grid.paste(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC), (x, y + caption))
    return grid
