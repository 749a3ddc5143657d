"""Build and check recipes. A recipe contains all settings that determine an image, except the seed and the label.

The main process builds the recipes of a command, and shares them with the other processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from checkpoints import store
from checkpoints.checkpoint import Checkpoint, resolve_checkpoint
from checkpoints.load import load_network
from common.errors import UserError
from common.interfaces import WeightAverage
from configs.differences import differences_by_role
from configs.sampling_schema import EvaluationOverrides, Overrides
from configs.schema import GuidanceSettings, TrainConfig, Weights
from dit import DiT
from guidance import GUIDANCES, Guidance, GuidanceInputs, is_within
from latents import autoencoders
from latents.autoencoders import Autoencoder
from runtime.compilation import resolve_compile
from runtime.processes import FileFingerprint, fingerprint_folder
from sampling.sampler import ImageSampler


def find_weak_checkpoint(path: str, weights: str) -> Checkpoint:
    """Find and verify the checkpoint of a weak network. A plan of several recipes caches it, because its run may be training."""
    return resolve_checkpoint(Path(path), "guidance.checkpoint", store.files_for_sampling([weights]))


FindWeak = Callable[[str, str], Checkpoint]  # `find_weak_checkpoint`, or a cache of it


@dataclass(frozen=True)
class Recipe:
    """Settings that determine an image.

    Attributes:
        config: Configuration of the run that trains the network, with the values to sample with.
        guidance: Its guidance. The configuration may list several. If it has a `checkpoint`, this is the folder of `weak`.
        weak: Checkpoint of the guidance method's weak network, or None if the method uses no second network.
        checkpoint: Checkpoint of the network, or None for a network in training.
        weights: The weights of the network.
        average: Average (sampling.ema_length) that is loaded instead of the checkpoint's weights, or None.
        autoencoder_hash: Hash of the autoencoder's files if they are local, because somebody can replace them.
    """

    config: TrainConfig
    guidance: GuidanceSettings
    weak: Checkpoint | None = None
    checkpoint: Checkpoint | None = None
    weights: Weights = "ema"
    average: WeightAverage | None = None
    autoencoder_hash: str | None = None

    def __post_init__(self):
        check_guidance(self.config, self.guidance, self.weak)

    @classmethod
    def build(
        cls,
        config: TrainConfig,
        guidance: GuidanceSettings,
        checkpoint: Checkpoint | None = None,
        weights: Weights = "ema",
        average: WeightAverage | None = None,
        find_weak: FindWeak = find_weak_checkpoint,
    ) -> Recipe:
        """Build a recipe, and find the other files that it needs.

        Raises UserError if the run's network does not support a setting, or if some settings are incompatible.
        """
        guidance, weak = resolve_guidance(config, guidance, find_weak)
        autoencoder_hash = autoencoders.hash_local_files(config.sampling.autoencoder)
        return cls(config, guidance, weak, checkpoint, weights, average, autoencoder_hash)

    @classmethod
    def for_checkpoint(
        cls,
        checkpoint: Checkpoint,
        chosen: Overrides,
        evaluation: EvaluationOverrides | None = None,
        find_weak: FindWeak = find_weak_checkpoint,
    ) -> Recipe:
        """Build the recipe of a command for a checkpoint, with what the command chooses.

        Raises UserError as `build` does, or if the checkpoint has no such average.
        """
        config = chosen.complete(checkpoint.config, checkpoint.step, evaluation)
        weights, length, average = chosen.sampling.weights or "ema", chosen.sampling.ema_length, None
        if length is not None:
            from extras import posthoc_ema  # imported only for sampling.ema_length

            average = posthoc_ema.find_average(checkpoint, weights, length)
        return cls.build(config, chosen.guidance or config.guidance[-1], checkpoint, weights, average, find_weak)

    @property
    def weights_source(self) -> tuple[Checkpoint | None, str | WeightAverage]:
        """Return the checkpoint and the weights of its network, or no checkpoint in training."""
        return self.checkpoint, self.average or self.weights

    def load_image_sampler(self, device: torch.device, compile_mode: str) -> ImageSampler:
        """Load the checkpoint's network and build its sampler."""
        compile_mode = compile_mode_for([self], compile_mode)
        net = load_network(*self.weights_source, device, compile_mode)
        decoder = autoencoders.build(self.config.sampling.autoencoder, device, self.config.data.in_channels)
        return self.build_image_sampler(net, decoder, device, compile_mode)

    def build_image_sampler(self, net: DiT, decoder: Autoencoder, device: torch.device, compile_mode: str) -> ImageSampler:
        """Build a sampler for a network that was compiled with `compile_mode`. Also load the guidance method's weak network."""
        weak = None
        if self.weak:
            weak = load_network(self.weak, self.guidance.weights, device, compile_mode), self.weak.config.diffusion
        guidance, is_compiled = build_guidance(self.guidance), resolve_compile(compile_mode, device) != "none"
        return ImageSampler(net, self.config, guidance, decoder, device, is_compiled, weak)


def fingerprint_files_of(recipes: Sequence[Recipe], key: str = "checkpoint") -> list[FileFingerprint]:
    """Return what this process sees of the files of recipes: checkpoints, also of weak networks, and local autoencoders.

    `key` is the key of the command that names the checkpoints.
    """
    files = dict.fromkeys((key, recipe.checkpoint.manifest_file) for recipe in recipes if recipe.checkpoint)
    files |= dict.fromkeys(("guidance.checkpoint", recipe.weak.manifest_file) for recipe in recipes if recipe.weak)
    specs = dict.fromkeys(recipe.config.sampling.autoencoder for recipe in recipes if recipe.autoencoder_hash)
    decoders = [(Path(spec.partition(":")[2]), autoencoders.hash_local_files(spec)) for spec in specs]
    seen = [FileFingerprint("sampling.autoencoder", path, local_hash) for path, local_hash in decoders]
    return [fingerprint_folder(name, file) for name, file in files] + seen


def compile_mode_for(recipes: Iterable[Recipe], mode: str) -> str:
    """Return `mode`, or `none` if a recipe's ratios move, because each number of tokens would be compiled separately."""
    return "none" if any(getattr(recipe.guidance, "has_moving_ratios", False) for recipe in recipes) else mode


def route_noise_shape(config: TrainConfig) -> tuple[int, int]:
    """Return the number of routes and the number of tokens of a run's network."""
    return len(config.model.routes), config.num_tokens


def build_guidance(settings: GuidanceSettings) -> Guidance:
    """Build the guidance function from its settings. `GuidanceInputs` contains the weak network."""
    return partial(GUIDANCES[settings.name], **settings.model_dump(exclude={"name", "checkpoint", "weights"}))


def check_guidance(config: TrainConfig, guidance: GuidanceSettings, weak: Checkpoint | None = None) -> None:
    """Check guidance settings against the run that trains the network, and against the noise levels of the sampler.

    Raises:
        UserError: The settings contradict each other, require a null class or path-drop that training did not use, or guide more
            channels than the latents have. Also raised if the interval exceeds the highest noise level or has no noise level.
    """
    check_null_class(config, guidance)
    check_path_drop(config, guidance)
    check_channels(config, guidance)
    check_method(config, guidance, weak)
    check_interval(config, guidance)


def check_null_class(config: TrainConfig, guidance: GuidanceSettings) -> None:
    scale = getattr(guidance, "cfg_scale", 1.0)
    if scale != 1 and config.model.class_dropout == 0:
        raise UserError(f"guidance.cfg_scale={scale:g} needs the null class, and the run was trained with model.class_dropout=0")


def check_path_drop(config: TrainConfig, guidance: GuidanceSettings) -> None:
    path_drop = getattr(config.model, "path_drop", 0)
    if guidance.name == "path_drop" and not path_drop:
        reason = f"{config.name} has model={config.model.name} and model.path_drop={path_drop:g}"
        raise UserError(f"guidance=path_drop needs a network of model=sprint and model.path_drop above 0, but the run {reason}")


def check_channels(config: TrainConfig, guidance: GuidanceSettings) -> None:
    channels = getattr(guidance, "channels", None) or 0
    if channels > config.data.in_channels:
        raise UserError(f"guidance.channels={channels}, but the latents have {config.data.in_channels} channels")


def check_method(config: TrainConfig, guidance: GuidanceSettings, weak: Checkpoint | None) -> None:
    """Let the guidance method check its settings, which it does when it builds its denoiser. No network is called."""
    inputs = GuidanceInputs(
        denoise=_network_to_load,
        num_classes=config.data.num_classes,
        route_noise_shape=route_noise_shape(config),
        weak=_network_to_load if weak else None,
        weak_route_noise_shape=route_noise_shape(weak.config) if weak else (0, 0),
        levels=config.sampler.evaluated_levels(),
    )
    try:
        build_guidance(guidance)(inputs)
    except ValueError as e:
        raise UserError(f"guidance: {e}") from e


def _network_to_load(*inputs: torch.Tensor, **routing: object) -> torch.Tensor:
    raise NotImplementedError("this stands for a network that is not loaded yet")


def check_interval(config: TrainConfig, guidance: GuidanceSettings) -> None:
    """Check that bounds leave guidance on at a noise level of the sampler, and that none exceeds the highest level."""
    levels = config.sampler.evaluated_levels()
    low, high = getattr(guidance, "level_lo", None), getattr(guidance, "level_hi", None)
    if low is None and high is None:
        return
    low, end = low or 0.0, math.inf if high is None else high
    is_too_high = high is not None and not is_within(high, -math.inf, levels[0])  # for example, a sigma for a diffusion of t
    if is_too_high or not any(is_within(level, low, end) for level in levels):
        raise UserError(
            f"guidance.level_lo={low} to guidance.level_hi={high} does not fit the {len(levels)} noise levels of the sampler of "
            f"diffusion={config.diffusion.name}, which go from {levels[0]:g} to {levels[-1]:.3g}"
        )


def resolve_guidance(
    config: TrainConfig, guidance: GuidanceSettings, find_weak: FindWeak
) -> tuple[GuidanceSettings, Checkpoint | None]:
    """Find the checkpoint of the guidance method's weak network. Return the settings with its folder, and the checkpoint.

    A method without a second network has none, and the settings stay as they are. Raises UserError if no checkpoint is found, or
    if its network was trained for other latents, classes or noise levels.
    """
    if getattr(guidance, "checkpoint", None) is None:
        return guidance, None
    weak = find_weak(guidance.checkpoint, guidance.weights)
    if changed := differences_by_role("guidance", "refuses", weak.config, config):
        problem = f"was trained for other latents, classes or noise levels than the run: {'; '.join(map(str, changed))}"
        raise UserError(f"guidance.checkpoint={guidance.checkpoint} {problem}")
    return guidance.model_copy(update={"checkpoint": str(weak.path)}), weak
