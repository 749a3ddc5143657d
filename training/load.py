"""From a checkpoint on disk to its configuration, its network and its sampler."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from common.errors import UserError
from configs import schema
from latents import autoencoders
from latents.autoencoders import Autoencoder
from routing_module import TokenRouter
from sampling.sampler import ImageSampler
from training import checkpoint as checkpoints
from training.build import DEFAULT_ROUTE, Diffusion, build_diffusion, build_guidance, build_network
from training.resume import find_checkpoint_together
from training.speed import compile_network, resolve_compile


def load_config(folder: Path) -> schema.TrainConfig:
    """The configuration of the run that wrote a verified checkpoint. Raises CheckpointError if this version cannot read it."""
    with checkpoints.reading(folder / "config.yaml"):
        return schema.from_checkpoint(checkpoints.read_config(folder))


def load_network(
    folder: Path, cfg: schema.TrainConfig, weights: str, device: torch.device, compile_mode: str = "none"
) -> nn.Module:
    """The network of a verified checkpoint, in evaluation mode.

    Args:
        cfg: its configuration.
        weights: `ema` or `raw`.
        compile_mode: of `training.speed.compile_network`.
    """
    stored = checkpoints.load_weights(folder, weights)
    with checkpoints.reading(folder / "config.yaml"), torch.device("meta"):  # without memory: sizes may be absurd
        net = build_network(cfg).eval().requires_grad_(False)
    checkpoints.check_tensors(folder / checkpoints.WEIGHTS[weights], stored, net.state_dict())
    net.to_empty(device=device).load_state_dict(stored)
    compile_network(net, resolve_compile(compile_mode, device))
    return net


def find_second_checkpoint(settings: schema.Guidance, run_cfg: schema.TrainConfig, accelerator: Accelerator) -> schema.Guidance:
    """guidance.* with the verified checkpoint of autoguidance's second network. Other guidance is returned as it is.

    Args:
        run_cfg: of the run that is to be guided.

    Raises:
        UserError: there is none, or it denoises other latents, classes or noise levels.
    """
    if settings.name != "autoguidance":
        return settings
    folder = find_checkpoint_together(settings.checkpoint, "guidance.checkpoint", accelerator)
    own, second = (schema.flatten(cfg.model_dump()) for cfg in (run_cfg, load_config(folder)))
    for key, value in own.items():
        is_shared = key == "diffusion.name" or (key.startswith("data.") and schema.role_of(key) is schema.Role.ARCHITECTURE)
        if is_shared and second[key] != value:
            raise UserError(
                f"guidance.checkpoint={settings.checkpoint} has {key}={second[key]}, and the network that it is to guide "
                f"{value}; autoguidance needs a second network for the same latents, classes and diffusion, of any backbone"
            )
    return settings.model_copy(update={"checkpoint": str(folder)})


def load_second_network(
    settings: schema.Guidance, device: torch.device, compile_mode: str = "none"
) -> tuple[nn.Module, Diffusion] | None:
    """The network that `find_second_checkpoint` found, with its diffusion; None for guidance without a second network."""
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
    compile_mode: str = "none",
    precision: str = "fp32",
) -> ImageSampler:
    """The sampler of a run: its shapes, classes and scale come from the run's configuration.

    Args:
        cfg: of the run, with data.* filled in.
        settings: guidance.*, with the second checkpoint found; its network is loaded here.
        compile_mode: of `net`, which is compiled already, and of the second network.
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
        latents_mean=data.latents_mean,
        latents_std=data.latents_std,
        device=device,
        precision=precision,
        is_compiled=resolve_compile(compile_mode, device) != "none",
        weak=load_second_network(settings, device, compile_mode),
    )


def load_sampler(
    folder: Path,
    run_cfg: schema.TrainConfig,
    settings: schema.Guidance,
    device: torch.device,
    *,
    weights: str,
    diffusion: Diffusion,
    command: schema.SampleConfig | schema.FidConfig,
) -> ImageSampler:
    """The sampler of a verified checkpoint.

    Args:
        settings: guidance.*, with the second checkpoint found.
        weights: `ema` or `raw`.
        diffusion: with the sampler to use.
        command: its autoencoder (null keeps the run's), compile and precision.
    """
    net = load_network(folder, run_cfg, weights, device, command.compile)
    name = command.autoencoder or run_cfg.data.autoencoder
    decoder = autoencoders.build(name, device, run_cfg.data.in_channels)
    options = {"compile_mode": command.compile, "precision": command.precision}
    return build_sampler(net, run_cfg, settings, decoder, device, diffusion=diffusion, **options)
