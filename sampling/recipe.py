"""A recipe: everything that determines an image, except its seed and label. It is built and checked in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import guidance
from checkpoints import store
from checkpoints.load import load_config, load_network
from checkpoints.resume import find_checkpoint_together
from common.errors import UserError
from configs import schema
from configs.settings import explained
from latents import autoencoders
from latents.autoencoders import Autoencoder
from runtime.compilation import resolve_compile
from sampling.sampler import ImageSampler


@dataclass(frozen=True)
class Recipe:
    """What determines an image. Raises UserError if guidance.* does not fit the run.

    Attributes:
        run: the configuration of the run that trains the network, with data.* filled in.
        diffusion: the diffusion of the run, with the sampler to use.
        guidance: the settings guidance.*. Those of autoguidance hold the verified folder of the second checkpoint.
        precision: the precision of the networks, fp32 | bf16.
        autoencoder: decodes the latents.
        checkpoint: the verified folder of the checkpoint, or None for a network in training.
        weights: ema | raw.
        content: hashes of the checkpoints, which identify them in results.
        average: an `extras.posthoc_ema.Average`, which replaces `weights`, or None.
    """

    run: schema.TrainConfig
    diffusion: schema.Diffusion
    guidance: schema.Guidance
    precision: str
    autoencoder: str
    checkpoint: Path | None = None
    weights: str = "ema"
    content: str = ""
    average: Any = None

    def __post_init__(self):
        check_guidance(self.guidance, self.run, self.diffusion)

    @classmethod
    def for_checkpoint(cls, folder: Path, command: schema.SampleConfig | schema.FidConfig, precision: str) -> Recipe:
        """Make the recipe of a verified checkpoint with the settings of a command.

        Args:
            command: has one value for each key. If it is None, the run's value is used.
            precision: is used if the command sets no precision.

        Raises:
            UserError: the run's sampler, network or checkpoint does not have a setting, or settings do not fit each other.
        """
        run, content = load_config(folder), store.hash_checkpoint(folder)
        guidance = with_second_checkpoint(with_scale(command.guidance, command.cfg_scale), run)
        if guidance.name == "autoguidance":
            content += store.hash_checkpoint(Path(guidance.checkpoint))
        average = None
        if command.ema_length is not None:
            from extras import posthoc_ema  # needed only here

            average = posthoc_ema.Average(folder, command.ema_length)
            content += posthoc_ema.check_length(folder, command.weights, command.ema_length)
        return cls(
            run,
            with_sampler(run.diffusion, command.model_extra),
            guidance,
            command.precision or precision,
            command.autoencoder or run.data.autoencoder,
            folder,
            command.weights,
            content,
            average,
        )

    @classmethod
    def in_training(
        cls, run: schema.TrainConfig, guidance: schema.Guidance, precision: str, num_steps: int | None = None
    ) -> Recipe:
        """Make the recipe for samples of the network while it trains.

        num_steps: noise levels of the sampler. None takes the value of the run.
        """
        diffusion, guidance = with_sampler(run.diffusion, {"num_steps": num_steps}), with_second_checkpoint(guidance, run)
        return cls(run, diffusion, guidance, precision, run.data.autoencoder)

    def settings(self) -> dict:
        """Return the settings by their names in results. Of the sampler, only num_steps and changed settings appear."""
        ema_length = {"ema_length": self.average.length} if self.average else {}
        return {"weights": self.weights, **name_guidance(self.guidance), **name_sampler(self.diffusion), **ema_length}

    def load(self, device: torch.device, compile_mode: str) -> ImageSampler:
        """Load the checkpoint's network and build its sampler."""
        net = load_network(self.checkpoint, self.average or self.weights, device, compile_mode)
        decoder = autoencoders.build(self.autoencoder, device, self.run.data.in_channels)
        return self.sampler(net, decoder, device, compile_mode)

    def sampler(self, net: nn.Module, decoder: Autoencoder, device: torch.device, compile_mode: str) -> ImageSampler:
        """Build the sampler of a network on the device, compiled as compile_mode says. Loads autoguidance's second network."""
        second = None
        if self.guidance.name == "autoguidance":
            folder = Path(self.guidance.checkpoint)
            second = load_network(folder, self.guidance.weights, device, compile_mode), load_config(folder).diffusion
        return ImageSampler(
            net=net,
            diffusion=self.diffusion,
            guidance=build_guidance(self.guidance),
            autoencoder=decoder,
            data=self.run.data,
            device=device,
            precision=self.precision,
            rounding=self.run.sample.rounding,
            is_compiled=resolve_compile(compile_mode, device) != "none",
            second=second,
        )


def with_scale(settings: schema.Guidance, cfg_scale: float | None) -> schema.Guidance:
    """Set guidance.cfg_scale to the value of its short name `cfg_scale`. Raises UserError for guidance without a scale."""
    if cfg_scale is None:
        return settings
    if not hasattr(settings, "cfg_scale"):
        raise UserError(f"cfg_scale={cfg_scale:g} needs guidance=cfg, interval or path_drop, not guidance={settings.name}")
    return settings.model_copy(update={"cfg_scale": cfg_scale})


def with_sampler(diffusion: schema.Diffusion, settings: Mapping[str, object]) -> schema.Diffusion:
    """Change settings of the sampler. None keeps a value. Raises UserError for a wrong value or a key of another sampler."""
    given = {key: value for key, value in settings.items() if value is not None}
    if unknown := [key for key in given if not hasattr(diffusion.sampler, key)]:
        names = ", ".join(vars(diffusion.sampler))
        raise UserError(f"{unknown[0]} is not a setting of the sampler of diffusion={diffusion.name}, which has {names}")
    kind = type(diffusion.sampler)
    with explained(given, known=vars(diffusion.sampler)):
        return replace(diffusion, sampler=kind(**vars(diffusion.sampler) | given))


def name_sampler(diffusion: schema.Diffusion) -> dict[str, object]:
    """Return num_steps and each setting of the sampler that differs from its default."""
    default = vars(type(diffusion.sampler)())
    return {key: x for key, x in vars(diffusion.sampler).items() if key == "num_steps" or x != default[key]}


def name_guidance(settings: schema.Guidance) -> dict[str, object]:
    """Return only cfg_scale for cfg and for no guidance (1.0). Other guidance adds `guidance` and `guidance.*`."""
    if settings.name == "none" or getattr(settings, "cfg_scale", None) == 1:
        return {"cfg_scale": 1.0}
    own = settings.model_dump(exclude={"name"}, exclude_defaults=True)
    if own.keys() == {"cfg_scale"}:
        return own
    scale = {"cfg_scale": own.pop("cfg_scale")} if "cfg_scale" in own else {}
    return {"guidance": settings.name, **scale, **{f"guidance.{key}": value for key, value in own.items()}}


def build_guidance(settings: schema.Guidance) -> guidance.Guidance:
    """Turn the settings guidance.* into a function of `guidance.GuidanceInputs`, which hold autoguidance's second network."""
    return partial(guidance.GUIDANCES[settings.name], **settings.model_dump(exclude={"name", "checkpoint", "weights"}))


def check_guidance(settings: schema.Guidance, run: schema.TrainConfig, diffusion: schema.Diffusion) -> None:
    """Check the settings guidance.* against the run whose network is guided. `diffusion` has the sampler to use.

    Raises:
        UserError: the settings do not fit each other. The network was not trained with the null class or path-drop that they
            need. They guide too many channels. The interval exceeds the highest noise level or contains no noise level.
    """
    scale, channels = getattr(settings, "cfg_scale", 1.0), getattr(settings, "channels", None) or 0
    if scale != 1 and run.model.class_dropout == 0:
        raise UserError(f"cfg_scale={scale:g} needs the null class, and the run was trained with model.class_dropout=0")
    if settings.name == "path_drop" and not getattr(run.model, "path_drop", 0):
        found = f"{run.name} has model={run.model.name} and model.path_drop={getattr(run.model, 'path_drop', 0):g}"
        raise UserError(f"guidance=path_drop needs a network of model=sprint and model.path_drop above 0, but the run {found}")
    if channels > run.data.in_channels:
        raise UserError(f"guidance.channels={channels}, but the latents have {run.data.in_channels} channels")
    routes_shape = (len(run.model.routes), (run.data.input_size // run.model.sizes["patch_size"]) ** 2)
    try:  # builds a denoiser without calling a network
        build_guidance(settings)(guidance.GuidanceInputs(None, run.data.num_classes, routes_shape, weak=id))
    except ValueError as e:
        raise UserError(f"guidance: {e}") from e
    levels = diffusion.sampler.evaluated_levels()
    low, high = getattr(settings, "level_lo", None) or 0.0, getattr(settings, "level_hi", None)
    top = levels[0] * (1 + 1e-6)  # levels are rounded to float32 when they are compared
    holds_some = any(low < level and (high is None or level <= high * (1 + 1e-6)) for level in levels)
    if not holds_some or (high is not None and high > top):  # for example, a sigma for a diffusion in t
        raise UserError(
            f"guidance.level_lo={low} to guidance.level_hi={high} does not fit the {len(levels)} noise levels of the sampler of "
            f"diffusion={diffusion.name}, which go from {levels[0]:g} to {levels[-1]:.3g}"
        )


@lru_cache(maxsize=100)
def find_second_checkpoint(path: str) -> Path:
    """Find autoguidance's verified second checkpoint. It is the same for all points, even if its run still trains."""
    return find_checkpoint_together(path, "guidance.checkpoint")


def with_second_checkpoint(settings: schema.Guidance, run: schema.TrainConfig) -> schema.Guidance:
    """Fill in the verified folder of autoguidance's second checkpoint. Other guidance is unchanged.

    Raises UserError if there is no checkpoint, or if its network denoises other latents, classes or noise levels than the run.
    """
    if settings.name != "autoguidance":
        return settings
    folder = find_second_checkpoint(settings.checkpoint)
    changed = schema.differences(load_config(folder), run, [schema.Role.ARCHITECTURE])
    if changed := [line for line in changed if line.startswith(("data.", "diffusion.name"))]:
        raise UserError(f"guidance.checkpoint={settings.checkpoint} denoises other latents than the run: {'; '.join(changed)}")
    return settings.model_copy(update={"checkpoint": str(folder)})
