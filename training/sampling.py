"""From a network to images: the same code for the grids of training, for sample.py and for evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from omegaconf import DictConfig, OmegaConf
from PIL import Image, ImageDraw
from torch import Tensor, nn

from guidance import Guide, Offer
from latents import autoencoders
from latents.autoencoders import Autoencoder, to_uint8
from routing_module import TokenRouter
from training.checkpoint import find_checkpoint, load_config, load_weights
from training.config import DEFAULT_ROUTE, Diffusion, build_diffusion, build_network
from training.engine import compile_network
from training.flops import forward_flops, sparse_saving
from training.randomness import SeedRandom


@dataclass
class ImageSampler:
    """Images by seed.

    Attributes:
        net: in evaluation mode, on the device to sample on.
        diffusion: with its sampler.
        guide: what guidance=... asks for.
        autoencoder: decodes latents / scale_factor.
        latent_shape: (C, H, W).
        weak: the second network of autoguidance and its diffusion.
        evaluations_per_image, flops_per_image: of networks, counted during the last call.
    """

    net: nn.Module
    diffusion: Diffusion
    guide: Guide
    autoencoder: Autoencoder
    latent_shape: tuple[int, int, int]
    num_classes: int
    scale_factor: float
    device: torch.device
    precision: str = "fp32"
    weak: tuple[nn.Module, Diffusion] | None = None
    evaluations_per_image: float = field(default=0.0, init=False)
    flops_per_image: float = field(default=0.0, init=False)

    @torch.no_grad()
    def __call__(self, seeds: list[int], labels: list[int]) -> np.ndarray:
        """uint8 [B, H, W, 3]; image i depends on seeds[i] and labels[i] alone."""
        random = SeedRandom(seeds, self.device)
        subsets = SeedRandom(seeds, self.device, stream="routes")
        y = torch.tensor(labels, dtype=torch.int64, device=self.device)
        self.evaluations_per_image = self.flops_per_image = 0.0

        def denoise_by(net: nn.Module, diffusion: Diffusion):
            def denoise(x: Tensor, level: Tensor, y: Tensor, **routing) -> Tensor:
                self.evaluations_per_image += len(x) / len(seeds)
                self.flops_per_image += len(x) / len(seeds) * forward_flops(net, routing.get("selection_ratios", 0.0))
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                    return diffusion.denoise(net, x, level, y, **routing)

            return denoise

        routes_shape = (len(self.net.router.routes), self.net.num_tokens)
        offer = Offer(
            denoise_by(self.net, self.diffusion),
            self.num_classes,
            routes_shape,
            route_scores=lambda: subsets.rand(*routes_shape),
            weak=denoise_by(*self.weak) if self.weak else None,
        )
        latents = self.diffusion.sample(self.guide(offer), random.randn(*self.latent_shape), y, random)
        return to_uint8(self.autoencoder.decode(latents / self.scale_factor)).cpu().numpy()


def build_sampler(net: nn.Module, cfg: DictConfig, autoencoder: Autoencoder, device: torch.device, **settings) -> ImageSampler:
    """The sampler of a run: its shapes, classes and scale come from the run's configuration.

    Args:
        cfg: of the run, with data.* filled in.
        settings: diffusion, guide, precision and weak of `ImageSampler`.
    """
    if not net.router.routes:
        # Nothing changes without guidance=sparse, which forces routing: in evaluation mode the network is dense.
        net.router = TokenRouter([DEFAULT_ROUTE], len(net.blocks), net.num_tokens)
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


def find_weak(settings: DictConfig, run_cfg: DictConfig, accelerator: Accelerator) -> Path | None:
    """The verified checkpoint of autoguidance's second network, the same for all processes; None for other guidance.

    Args:
        settings: guidance.*; its `checkpoint` becomes the folder that was found.
        run_cfg: of the run that is to be guided.

    Raises:
        ValueError: there is none, or it denoises other latents, classes or noise levels.
    """
    if settings.name != "autoguidance":
        return None
    folder = find_checkpoint(Path(settings.checkpoint), "guidance.checkpoint") if accelerator.is_main_process else None
    folder = broadcast_object_list([folder])[0]
    weak_cfg = load_config(folder)
    for key in (*(f"data.{name}" for name in ("in_channels", "input_size", "num_classes", "scale_factor")), "diffusion.name"):
        own, other = OmegaConf.select(run_cfg, key), OmegaConf.select(weak_cfg, key)
        if own != other:
            raise ValueError(
                f"guidance.checkpoint={settings.checkpoint} has {key}={other}, and the network that it is to guide {own}; "
                "autoguidance needs a second network for the same latents, classes and diffusion, of any backbone"
            )
    settings.checkpoint = str(folder)
    return folder


def load_weak(settings: DictConfig, device: torch.device, compile_mode: str = "none") -> tuple[nn.Module, Diffusion] | None:
    """The network that `find_weak` found, with its diffusion."""
    if settings.name != "autoguidance":
        return None
    folder = Path(settings.checkpoint)
    return load_network(folder, settings.weights, device, compile_mode), build_diffusion(load_config(folder))


def load_network(folder: Path, weights: str, device: torch.device, compile_mode: str = "none") -> nn.Module:
    """The network of a verified checkpoint, in evaluation mode.

    Args:
        weights: `ema` or `raw`.
        compile_mode: of `training.engine.compile_network`.
    """
    net = build_network(load_config(folder)).eval().requires_grad_(False)
    net.load_state_dict(load_weights(folder, weights))
    compile_network(net, compile_mode)
    return net.to(device)


def load_sampler(
    folder: Path, weights: str, autoencoder: str | None, device: torch.device, compile_mode: str = "none", **settings
) -> ImageSampler:
    """The sampler of a verified checkpoint.

    Args:
        weights: `ema` or `raw`.
        autoencoder: instead of the run's own; None keeps that.
        compile_mode: of `training.engine.compile_network`.
        settings: as for `build_sampler`.
    """
    cfg = load_config(folder)
    net = load_network(folder, weights, device, compile_mode)
    decoder = autoencoders.build(autoencoder or cfg.data.autoencoder, device, cfg.data.in_channels, "autoencoder")
    return build_sampler(net, cfg, decoder, device, **settings)


def describe_cost(sampler: ImageSampler, settings: DictConfig) -> str:
    """What the last batch cost, in words.

    Args:
        settings: guidance.*
    """
    words = f"{sampler.evaluations_per_image:g} network evaluations and {sampler.flops_per_image / 1e9:.4g} GFLOPs per image"
    if settings.name == "sparse" and settings.w != 1:
        saving = sparse_saving(sampler.net, settings.r_strong, settings.r_weak)
        words += f"; where it guides, sparse guidance takes {saving:.1%} fewer FLOPs than classifier-free guidance"
    return words


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
