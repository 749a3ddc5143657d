"""Configuration schema for every command: the keys, their types, and the keys that must not change when a run resumes.

Each Hydra group has a class in this module. configs/*.yaml define the default values and explain every key in a comment.
Diffusions and their samplers are settings too. For example, `cfg.diffusion` is an `edm.EDM`. Importing torch takes seconds, so
the modules of the chosen network and diffusion are imported only after all other keys are validated.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from enum import Enum
from pkgutil import resolve_name
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, create_model, model_validator

from common import types
from common.errors import UserError
from common.files import hash_bytes
from common.types import AutoencoderSpec, Colour, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Text
from configs.settings import GROUPS, OneOrMany, Settings, as_list, flatten, nearest, validate

MAX_NUMBERS = 10**7  # maximum number of seeds or classes in one range
MAX_NAME_LENGTH = 60  # maximum number of characters in a generated run name

# Network modules by model.name. A network module defines `build(backbone, **settings)` and BACKBONES, which lists sizes by name.
NETWORKS = {
    "dit": "dit",
    "tread": "dit",
    "sprint": "extras.sprint",
    "lightningdit": "extras.lightningdit",
    "lightningdit_tread": "extras.lightningdit",
    "lightningdit_sprint": "extras.sprint",
}
# Diffusion classes by diffusion.name. Each class has a `sampler` and a `denoise` method. EDM and SiT also have a `loss` method.
DIFFUSIONS = {"edm": "edm:EDM", "sit": "sit:SiT", "ddpm": "extras.ddpm:DDPM"}
Diffusion = Any  # an instance of a class in DIFFUSIONS


def parse_numbers(spec: str | int | list) -> list[int]:
    """Parse numbers and ranges: `[0-3,7]` -> [0, 1, 2, 3, 7]. Raises ValueError for invalid text and for repeated numbers."""
    numbers: list[int] = []
    for part in ",".join(map(str, as_list(spec))).split(","):
        ends = [end.strip() for end in part.split("-")]
        if len(ends) > 2 or not all(end.isdecimal() for end in ends) or not 0 <= int(ends[-1]) - int(ends[0]) < MAX_NUMBERS:
            raise ValueError(f"{spec!r:.60} is not a list of at most {MAX_NUMBERS} numbers and ranges such as [0-3,7]")
        numbers.extend(range(int(ends[0]), int(ends[-1]) + 1))
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{spec!r:.60} is empty or repeats a number")
    return numbers


Fraction = Annotated[float, Field(ge=0, lt=1)]
FolderName = Annotated[str, types.matching(r"[^/\\]*[^/\\.][^/\\]*", "a folder name without slashes")]  # and not only dots
Checkpoint = Text  # checkpoint folder, or a run folder to select its newest checkpoint
_DETECTORS = "inception|dinov2|digits|small-[a-z][a-z0-9_]*"
Detector = Annotated[str, types.matching(_DETECTORS, "inception, dinov2, digits or small-<set>")]
Numbers = Annotated[list[int], BeforeValidator(parse_numbers)]
Weights = Literal["ema", "raw"]
Precision = Literal["fp32", "bf16"]
Compile = Literal["auto", "none", "blocks"]  # see runtime.compilation.resolve_compile
Labels = Literal["random", "balanced"]  # see sampling.sampler.draw_labels
EMALength = Annotated[float, Field(gt=0, le=0.28)]  # see extras.posthoc_ema


class RouteSettings(Settings):
    """Arguments of `routing_module.Route`. `TokenRouter` checks that a route fits the network."""

    selection_ratio: FiniteFloat
    start_layer_idx: int
    end_layer_idx: int


class Model(Settings):
    name: Literal["dit", "tread", "lightningdit", "lightningdit_tread"]
    backbone: str
    routes: list[RouteSettings]
    selection: Literal["uniform", "importance", "grid"]
    fp32_after_route: bool
    class_dropout: Fraction
    learn_sigma: bool
    init: Literal["adaln_zero", "official_tread"]

    @property
    def module(self) -> ModuleType:
        """Import and return the network's module."""
        return resolve_name(NETWORKS[self.name])

    @property
    def sizes(self) -> dict[str, int]:
        """Return the backbone's depth, width, num_heads and patch_size."""
        from dit import look_up_sizes

        return look_up_sizes(self.backbone, self.module.BACKBONES)


class SPRINTModel(Model):
    name: Literal["sprint", "lightningdit_sprint"]
    path_drop: Fraction


class Data(Settings):
    """Training data settings. `training.build.open_data` reads the values of keys that are None from the latents."""

    name: FolderName
    path: Text | None
    autoencoder: AutoencoderSpec | None
    in_channels: PositiveInt | None
    input_size: PositiveInt | None
    num_classes: PositiveInt | None
    num_workers: NonNegativeInt
    scale_factor: PositiveFloat | None = None
    latents_mean: list[FiniteFloat] | None = None
    latents_std: list[PositiveFloat] | None = None
    resolution: PositiveInt | None = None


class Disabled(Settings):
    name: Literal["none"]


class REPASettings(Settings):
    name: Literal["repa"]
    encoder: Text
    encoder_weights: Text | None
    block: PositiveInt
    weight: PositiveFloat
    projector_width: PositiveInt


Alignment = Annotated[Disabled | REPASettings, Field(discriminator="name")]


class CFG(Settings):
    name: Literal["cfg"]
    cfg_scale: FiniteFloat
    channels: PositiveInt | None = None


class Interval(CFG):
    name: Literal["interval"]
    level_lo: NonNegativeFloat
    level_hi: NonNegativeFloat


class Bounded(Settings):
    level_lo: NonNegativeFloat | None
    level_hi: NonNegativeFloat | None


class PathDrop(Bounded):
    name: Literal["path_drop"]
    cfg_scale: FiniteFloat


class Sparse(Bounded):
    name: Literal["sparse"]
    w: FiniteFloat
    r_strong: Fraction
    r_weak: Fraction


class Autoguidance(Bounded):
    name: Literal["autoguidance"]
    checkpoint: Checkpoint
    weights: Weights
    w: FiniteFloat


Guidance = Annotated[Disabled | CFG | Interval | PathDrop | Sparse | Autoguidance, Field(discriminator="name")]


class Train(Settings):
    num_steps: PositiveInt | None  # `training.build.fill_in_lengths` computes lengths that are None
    batch_size: PositiveInt
    grad_accum_steps: PositiveInt
    lr: PositiveFloat
    warmup_steps: NonNegativeInt
    schedule: Literal["constant", "cosine", "inverse_sqrt"]
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)]
    weight_decay: NonNegativeFloat
    grad_clip_norm: PositiveFloat | None
    ema_decay: Fraction | None
    ema_lengths: list[EMALength]
    ema_snapshot_every: PositiveInt | None
    precision: Precision
    tf32: bool
    compile: Compile
    activation_checkpointing: Literal["none", "blocks"]
    activation_memory_budget: Annotated[float, Field(ge=0, le=1)]
    cpu_threads: PositiveInt | None
    log_every: PositiveInt

    @model_validator(mode="after")
    def _check_schedule(self) -> Train:
        if self.schedule == "inverse_sqrt" and self.warmup_steps == 0:
            raise ValueError("schedule=inverse_sqrt decays from the end of the warm-up, so warmup_steps must be above 0")
        return self


class CheckpointSettings(Settings):
    every: PositiveInt | None
    keep_last: PositiveInt
    keep_every: NonNegativeInt


class Sample(Settings):
    every: NonNegativeInt | None
    num_samples: Annotated[int, Field(ge=1, le=10**4)]  # one grid shows all samples
    batch_size: PositiveInt
    precision: Precision
    rounding: Literal["round", "truncate"]


class Eval(Settings):
    every: NonNegativeInt | None
    num_samples: PositiveInt
    final_num_samples: PositiveInt | None
    labels: Labels
    cfg_scales: Annotated[list[FiniteFloat], Field(min_length=1)]
    num_steps: PositiveInt | None
    batch_size: PositiveInt
    precision: Precision
    validation: Text | None


class EvaluationSettings(Settings):
    detector: OneOrMany[Detector] | None
    detector_weights: Text | None
    dinov2_weights: Text | None
    background: Colour | None
    reference: Text | None = None

    @property
    def all_detectors(self) -> list[str]:
        return as_list(self.detector or "inception")


class Wandb(Settings):
    mode: Literal["disabled", "offline", "online"]
    project: Text


class TrainConfig(Settings):
    name: FolderName
    output_dir: Text
    experiment: dict[str, Any] | None  # the fields of a configs.experiments.Row
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)]  # seed range of NumPy's global generator
    resume: Literal["auto", "never"]
    init_from: Text | None
    init_state: Literal["weights", "all"]
    model: Annotated[Model | SPRINTModel, Field(discriminator="name")]
    data: Data
    diffusion: Diffusion
    alignment: Alignment
    guidance: Guidance
    train: Train
    checkpoint: CheckpointSettings
    sample: Sample
    eval: Eval
    evaluation: EvaluationSettings
    wandb: Wandb

    @model_validator(mode="after")
    def _import_choices(self) -> TrainConfig:
        """Validate the backbone and the diffusion settings. Both checks import the chosen modules."""
        name, known = self.model.backbone, self.model.module.BACKBONES
        if name not in known:
            raise UserError(f"model.backbone={name} is not a backbone of model={self.model.name}{nearest(name, known)}")
        if isinstance(self.diffusion, dict):
            if (name := str(self.diffusion.get("name"))) not in DIFFUSIONS:
                raise UserError(f"diffusion.name={name} is none of {', '.join(DIFFUSIONS)}")
            kind = resolve_name(DIFFUSIONS[name])
            checked = create_model("Chosen", __base__=Settings, diffusion=(kind, ...))
            object.__setattr__(self, "diffusion", validate({"diffusion": self.diffusion}, checked).diffusion)
        return self

    def named(self, overrides: Sequence[str]) -> TrainConfig:
        """Name the run after its default name and the typed keys with their values, unless the user typed a name.

        The name omits keys that have no role or the role CHANGE_ALLOWED, such as train.num_steps. It also omits keys that the
        default name covers (data, model, experiment and its seed). A name longer than MAX_NAME_LENGTH is shortened with a hash.
        """
        typed = {key: value for key, _, value in (override.lstrip("+~").partition("=") for override in overrides)}
        if "name" in typed:
            return self
        in_default = {"data", "model", "experiment"} | ({"seed"} if "experiment" in typed else set())
        values, words = flatten(self.model_dump()), [self.name]  # `values` omits keys inside lists
        for key in typed:
            if find_role(key) not in (None, Role.CHANGE_ALLOWED) and key not in in_default:
                value = json.dumps(values.get(f"{key}.name" if key in GROUPS else key, typed[key])).strip('[]{}"/ ')
                words.append(f"{key.rpartition('.')[2]}-{re.sub(r'[^0-9A-Za-z.+-]+', '-', value)}")
        name = "_".join(words)
        if len(words) > 1 and len(name) > MAX_NAME_LENGTH:
            name = f"{name[: MAX_NAME_LENGTH - 9]}_{hash_bytes(name.encode())[:8]}"
        return self.model_copy(update={"name": name})


class _Sampling(Settings):
    """Keys that sample.py and fid.py share. `sampling.recipe` checks `model_extra` against the checkpoint's sampler."""

    model_config = ConfigDict(extra="allow")
    output: Text | None
    labels: Labels
    autoencoder: AutoencoderSpec | None
    batch_size: PositiveInt
    precision: Precision | None
    tf32: bool
    compile: Compile
    cpu_threads: PositiveInt | None


class SampleConfig(_Sampling):
    checkpoint: Checkpoint
    weights: Weights
    ema_length: EMALength | None
    num_samples: PositiveInt | None
    seeds: Numbers | None
    classes: Numbers | None
    guidance: Guidance
    cfg_scale: FiniteFloat | None
    npz: bool


def combinations(chosen_from: dict) -> list[dict]:
    """Return every combination of one value per key: {a: [1, 2], b: 3} -> [{a: 1, b: 3}, {a: 2, b: 3}].

    Raises UserError if a key is an empty list.
    """
    if empty := [key for key, values in chosen_from.items() if values == []]:
        raise UserError(f"{empty[0]}=[] lists no value")
    return [dict(zip(chosen_from, chosen)) for chosen in itertools.product(*map(as_list, chosen_from.values()))]


class FidConfig(_Sampling):
    checkpoint: OneOrMany[Text] | None
    checkpoints: Text | None
    images: Text | None
    reference: Text | None
    num_samples: PositiveInt | None
    first_seed: NonNegativeInt
    weights: OneOrMany[Weights]
    ema_length: OneOrMany[EMALength] | None
    guidance: Annotated[list[Guidance], BeforeValidator(combinations)]  # values may be lists
    cfg_scale: OneOrMany[FiniteFloat] | None
    convert_to_rgb: bool
    evaluation: EvaluationSettings

    def choices(self) -> list[FidConfig]:
        """Return one configuration for each combination of weights, ema_length, guidance, cfg_scale and sampler settings."""
        listed = {key: getattr(self, key) for key in ("weights", "ema_length", "guidance", "cfg_scale")} | self.model_extra
        return [self.model_copy(update=choice) for choice in combinations(listed)]


class Role(Enum):
    """How a key affects a run. Keys without a role (paths, logging, speed) do not distinguish experiments.

    The value of a role lists its keys. A group's role applies to all unlisted keys in the group.
    """

    ARCHITECTURE = (  # must be equal wherever the weights are used: init_from, autoguidance, resume
        "model.backbone", "model.learn_sigma", "diffusion.name", "diffusion.sigma_data", "data.scale_factor", "data.latents_mean",
        "data.latents_std", "data.in_channels", "data.input_size", "data.num_classes",
    )  # fmt: skip
    FIXED = ("seed", "init_from", "init_state", "model", "diffusion", "alignment", "train.batch_size")  # is fixed at the start
    FIXED_NO_EFFECT = ("train.ema_lengths",)  # is fixed at the start, but does not affect the figures of the run
    CHANGE_LOGGED = (  # may change on a resume, which logs the change; it distinguishes experiments
        "train.lr", "train.warmup_steps", "train.schedule", "train.betas", "train.weight_decay", "train.grad_clip_norm",
        "train.ema_decay", "train.precision", "train.tf32",
    )  # fmt: skip
    CHANGE_ALLOWED = (  # may change on a resume; it distinguishes experiments
        "data.name", "data.resolution", "data.autoencoder", "diffusion.sampler", "sample.rounding", "train.num_steps",
        "eval.num_steps", "eval.labels", "eval.precision", "evaluation.detector",
    )  # fmt: skip


SAME_RUN = (Role.ARCHITECTURE, Role.FIXED, Role.FIXED_NO_EFFECT)
_ROLE_OF = {key: role for role in Role for key in role.value} | {"alignment.encoder_weights": None}  # a path has no role


def find_role(key: str) -> Role | None:
    """Return the role of a train.py key. An unlisted key has the role of its innermost listed group."""
    while key and key not in _ROLE_OF:
        key = key.rpartition(".")[0]
    return _ROLE_OF.get(key)


def differences(stored: Settings | dict, current: Settings | dict, roles: Sequence[Role] | None = None) -> list[str]:
    """Return `key: stored -> current` for every changed key. If `roles` is given, keys with other roles are ignored."""
    old, new = (flatten(side.model_dump() if isinstance(side, Settings) else side) for side in (stored, current))
    return [
        f"{key}: {old.get(key, 'absent')!r:.100} -> {new.get(key, 'absent')!r:.100}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and (roles is None or find_role(key) in roles)
    ]
