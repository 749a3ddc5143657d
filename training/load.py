"""From a checkpoint on disk to its configuration, its network and its sampler."""

from __future__ import annotations

import gc
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import nn

import guidance
from common.errors import UserError, first_line
from configs import schema
from configs.settings import validate
from latents import autoencoders
from latents.autoencoders import Autoencoder
from sampling.sampler import ImageSampler
from training import checkpoint as checkpoints
from training.build import build_network
from training.resume import find_checkpoint_together
from training.speed import compile_network, resolve_compile


def load_config(folder: Path) -> schema.TrainConfig:
    """The configuration of the run that wrote a verified checkpoint. Raises UserError if this version cannot read it."""
    stored = checkpoints.read_config(folder)
    try:
        return validate(stored, schema.TrainConfig)
    except UserError as e:
        raise UserError(f"{folder / 'config.yaml'} cannot be read: {first_line(e)}") from e


def load_network(
    folder: Path, weights: str, device: torch.device, compile_mode: str = "none", ema_length: float | None = None
) -> nn.Module:
    """The network of a verified checkpoint, in evaluation mode. The last two stay loaded: points of a sweep share them.

    Args:
        weights: `ema` or `raw`.
        compile_mode: of `training.speed.compile_network`.
        ema_length: of a post-hoc EMA, instead of `weights`.
    """
    return _load_network(folder, checkpoints.identity(folder), weights, device, compile_mode, ema_length)


@lru_cache(maxsize=2)
def _load_network(
    folder: Path, content: str, weights: str, device: torch.device, compile_mode: str, ema_length: float | None
) -> nn.Module:
    gc.collect()  # a compiled network is a cycle: Python would keep those before on the device
    if ema_length is None:
        stored = checkpoints.load_weights(folder, weights)
    else:
        from extras import posthoc_ema  # the registry's line

        stored = posthoc_ema.average_of(folder, ema_length)
    with torch.device("meta"):  # no time for random weights
        net = build_network(load_config(folder)).eval().requires_grad_(False)
    checkpoints.check_tensors(folder / checkpoints.WEIGHTS[weights], stored, net.state_dict())
    net.to_empty(device=device).load_state_dict(stored)
    compile_network(net, resolve_compile(compile_mode, device))
    return net


def with_scale(settings: schema.Guidance, cfg_scale: float | None) -> schema.Guidance:
    """cfg_scale is guidance.cfg_scale by its short name."""
    if cfg_scale is None:
        return settings
    if not hasattr(settings, "cfg_scale"):
        raise UserError(f"cfg_scale={cfg_scale:g} needs guidance=cfg, interval or path_drop, not guidance={settings.name}")
    return settings.model_copy(update={"cfg_scale": cfg_scale})


def build_guidance(settings: schema.Guidance) -> guidance.Guidance:
    """guidance.* as a function of what a batch has, `guidance.GuidanceInputs`; autoguidance's second network is among that."""
    return partial(guidance.GUIDANCES[settings.name], **settings.model_dump(exclude={"name", "checkpoint", "weights"}))


def check_guidance(settings: schema.Guidance, run_cfg: schema.TrainConfig, diffusion: schema.Diffusion) -> None:
    """Compare guidance.* with the run that it is to guide; `diffusion` has the sampler that is to be used.

    Raises:
        UserError: settings that do not fit each other; a null class or path-drop that was never trained; too many channels;
            an interval that goes beyond the sampler's noise levels, or holds none of them.
    """
    scale, channels = getattr(settings, "cfg_scale", 1.0), getattr(settings, "channels", None) or 0
    if scale != 1 and run_cfg.model.class_dropout == 0:
        raise UserError(f"cfg_scale={scale:g} needs the null class, and the run was trained with model.class_dropout=0")
    if settings.name == "path_drop" and not run_cfg.model.path_drop:
        found = f"{run_cfg.name} has model.fusion={run_cfg.model.fusion} and model.path_drop={run_cfg.model.path_drop:g}"
        raise UserError(f"guidance=path_drop needs model.fusion=concat and model.path_drop above 0, but the run {found}")
    if channels > run_cfg.data.in_channels:
        raise UserError(f"guidance.channels={channels}, but the latents have {run_cfg.data.in_channels} channels")
    *_, patch_size = schema.NETWORKS[run_cfg.model.name].BACKBONES[run_cfg.model.backbone]
    routes_shape = (len(run_cfg.model.routes), (run_cfg.data.input_size // patch_size) ** 2)
    try:  # a denoiser is made, and none of its networks is called
        inputs = guidance.GuidanceInputs(None, run_cfg.data.num_classes, routes_shape, weak=id)
        build_guidance(settings)(inputs)
    except ValueError as e:
        raise UserError(f"guidance: {e}") from e
    levels = diffusion.sampler.evaluated_levels()
    low, high = getattr(settings, "level_lo", None) or 0.0, getattr(settings, "level_hi", None)
    top = levels[0] * (1 + 1e-6)  # levels are rounded to float32 when they are compared
    holds_some = any(low < level and (high is None or level <= high * (1 + 1e-6)) for level in levels)
    if not holds_some or (high is not None and high > top):  # sigma for a diffusion that counts in t, say
        raise UserError(
            f"guidance.level_lo={low} to guidance.level_hi={high} does not fit the {len(levels)} noise levels of the sampler of "
            f"diffusion={diffusion.name}, which go from {levels[0]:g} to {levels[-1]:.3g}"
        )


def find_second_checkpoint(settings: schema.Guidance, run_cfg: schema.TrainConfig) -> schema.Guidance:
    """guidance.* with the verified checkpoint of autoguidance's second network. Other guidance is returned as it is.

    Args:
        run_cfg: of the run that is to be guided.

    Raises:
        UserError: there is none, or it denoises other latents, classes or noise levels.
    """
    if settings.name != "autoguidance":
        return settings
    folder = find_checkpoint_together(settings.checkpoint, "guidance.checkpoint")
    changed = schema.differences(load_config(folder), run_cfg, [schema.Role.ARCHITECTURE])
    if changed := [line for line in changed if line.startswith(("data.", "diffusion.name"))]:
        raise UserError(f"guidance.checkpoint={settings.checkpoint} denoises other latents than the run: {'; '.join(changed)}")
    return settings.model_copy(update={"checkpoint": str(folder)})


def build_sampler(
    net: nn.Module,
    cfg: schema.TrainConfig,
    settings: schema.Guidance,
    autoencoder: Autoencoder,
    device: torch.device,
    *,
    diffusion: schema.Diffusion,
    compile_mode: str,
    precision: str,
) -> ImageSampler:
    """The sampler of a run: its shapes, classes and scale come from the run's configuration.

    Args:
        cfg: of the run, with data.* filled in.
        settings: guidance.*, with the second checkpoint found; its network is loaded here.
        compile_mode: of `net`, which is compiled already, and of the second network.
    """
    weak = None
    if settings.name == "autoguidance":
        folder = Path(settings.checkpoint)
        weak = load_network(folder, settings.weights, device, compile_mode), load_config(folder).diffusion
    return ImageSampler(
        net=net,
        diffusion=diffusion,
        guidance=build_guidance(settings),
        autoencoder=autoencoder,
        data=cfg.data,
        device=device,
        precision=precision,
        rounding=cfg.sample.rounding,
        is_compiled=resolve_compile(compile_mode, device) != "none",
        weak=weak,
    )


def load_sampler(
    folder: Path,
    run_cfg: schema.TrainConfig,
    settings: schema.Guidance,
    device: torch.device,
    *,
    weights: str,
    ema_length: float | None,
    diffusion: schema.Diffusion,
    precision: str,
    command: schema.SampleConfig | schema.FidConfig,
) -> ImageSampler:
    """The sampler of a verified checkpoint.

    Args:
        settings: guidance.*, with the second checkpoint found.
        weights, ema_length: as of `load_network`.
        diffusion: with the sampler to use.
        precision: `fp32` or `bf16`.
        command: its autoencoder (null keeps the run's) and compile.
    """
    net = load_network(folder, weights, device, command.compile, ema_length)
    decoder = autoencoders.build(command.autoencoder or run_cfg.data.autoencoder, device, run_cfg.data.in_channels)
    options = {"diffusion": diffusion, "compile_mode": command.compile, "precision": precision}
    return build_sampler(net, run_cfg, settings, decoder, device, **options)
