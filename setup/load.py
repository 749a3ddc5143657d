"""From a checkpoint on disk to its configuration, its network and its sampler."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from errors import UserError
from latents import autoencoders
from latents.autoencoders import Autoencoder
from routing_module import TokenRouter
from sampling.sampler import ImageSampler
from setup import schema
from setup.build import DEFAULT_ROUTE, Diffusion, build_diffusion, build_guidance, build_network
from training import checkpoint as checkpoints
from training.speed import compile_network


def load_config(folder: Path) -> schema.TrainConfig:
    """The configuration of the run that wrote a verified checkpoint."""
    return schema.from_checkpoint(checkpoints.load_config(folder))


def load_network(
    folder: Path, cfg: schema.TrainConfig, weights: str, device: torch.device, compile_mode: str = "none"
) -> nn.Module:
    """The network of a verified checkpoint, in evaluation mode.

    Args:
        cfg: its configuration.
        weights: `ema` or `raw`.
        compile_mode: of `training.speed.compile_network`.
    """
    net = build_network(cfg).eval().requires_grad_(False)
    net.load_state_dict(checkpoints.load_weights(folder, weights))
    compile_network(net, compile_mode)
    return net.to(device)


def find_weak(settings: schema.Guidance, run_cfg: schema.TrainConfig, accelerator: Accelerator) -> schema.Guidance:
    """The guidance with the verified checkpoint of autoguidance's second network, the same one for all processes.

    Other guidance is returned as it is.

    Args:
        run_cfg: of the run that is to be guided.

    Raises:
        UserError: there is none, or it denoises other latents, classes or noise levels.
    """
    if settings.name != "autoguidance":
        return settings
    folder = None
    if accelerator.is_main_process:
        folder = checkpoints.find_checkpoint(Path(settings.checkpoint), "guidance.checkpoint")
    folder = broadcast_object_list([folder])[0]
    weak_cfg = load_config(folder)
    pairs = {f"data.{key}": (getattr(run_cfg.data, key), getattr(weak_cfg.data, key)) for key in LATENT_KEYS}
    pairs["diffusion.name"] = run_cfg.diffusion.name, weak_cfg.diffusion.name
    for key, (own, other) in pairs.items():
        if own != other:
            raise UserError(
                f"guidance.checkpoint={settings.checkpoint} has {key}={other}, and the network that it is to guide {own}; "
                "autoguidance needs a second network for the same latents, classes and diffusion, of any backbone"
            )
    return settings.model_copy(update={"checkpoint": str(folder)})


LATENT_KEYS = ("in_channels", "input_size", "num_classes", "scale_factor")


def load_weak(settings: schema.Guidance, device: torch.device, compile_mode: str = "none") -> tuple[nn.Module, Diffusion] | None:
    """The network that `find_weak` found, with its diffusion; None for guidance without a second network."""
    if settings.name != "autoguidance":
        return None
    folder = Path(settings.checkpoint)
    cfg = load_config(folder)
    return load_network(folder, cfg, settings.weights, device, compile_mode), build_diffusion(cfg.diffusion)


def build_sampler(
    net: nn.Module,
    cfg: schema.TrainConfig,
    settings: schema.Guidance,
    autoencoder: Autoencoder,
    device: torch.device,
    *,
    diffusion: Diffusion,
    weak: tuple[nn.Module, Diffusion] | None,
    precision: str = "fp32",
) -> ImageSampler:
    """The sampler of a run: its shapes, classes and scale come from the run's configuration.

    Args:
        cfg: of the run, with data.* filled in.
        settings: guidance.*
        weak: what `load_weak` gives.
    """
    data = cfg.data
    return ImageSampler(
        net=net,
        router=net.router if net.router.routes else TokenRouter([DEFAULT_ROUTE], len(net.blocks)),
        diffusion=diffusion,
        guidance=build_guidance(settings),
        autoencoder=autoencoder,
        latent_shape=(data.in_channels, data.input_size, data.input_size),
        num_classes=data.num_classes,
        scale_factor=data.scale_factor,
        device=device,
        precision=precision,
        weak=weak,
    )


def load_sampler(
    folder: Path,
    cfg: schema.TrainConfig,
    settings: schema.Guidance,
    device: torch.device,
    *,
    weights: str,
    diffusion: Diffusion,
    autoencoder: str | None,
    compile_mode: str = "none",
    precision: str = "fp32",
) -> ImageSampler:
    """The sampler of a verified checkpoint.

    Args:
        cfg: its configuration.
        settings: guidance.*, with the second network that `find_weak` found.
        weights: `ema` or `raw`.
        diffusion: with the sampler to use.
        autoencoder: instead of the run's own; None keeps that.
        compile_mode: of `training.speed.compile_network`.
        precision: of the network, fp32 | bf16.
    """
    net = load_network(folder, cfg, weights, device, compile_mode)
    decoder = autoencoders.build(autoencoder or cfg.data.autoencoder, device, cfg.data.in_channels, "autoencoder")
    weak = load_weak(settings, device, compile_mode)
    return build_sampler(net, cfg, settings, decoder, device, diffusion=diffusion, weak=weak, precision=precision)
