"""Configuration schema for every command: the keys, their types, and the roles of train.py's keys (see common/roles.py).

Each Hydra group has a class in this module. configs/*.yaml define the values of new runs and explain every key in a comment. A
default in a class is the value that runs used before the key existed (see `configs.settings.read_stored`).
Diffusions and their samplers are settings too. For example, `cfg.diffusion` is an `edm.EDM`. Importing torch takes seconds, so
the modules of the chosen network and diffusion are imported only after all other keys are validated.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pkgutil import resolve_name
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    field_validator,
    model_validator,
)

from common import types
from common.errors import UserError
from common.files import hash_bytes
from common.roles import (
    Free,
    Reported,
    SameClasses,
    SameLatents,
    SameRun,
    SameState,
    SameWeights,
    Trained,
    Use,
    roles_of,
)
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


def parse_classes(spec: str | int | list) -> list[int | str]:
    """Parse class numbers, ranges of numbers and class names: `[0-2,color]` -> [0, 1, 2, "color"]."""
    classes: list[int | str] = []
    for part in ",".join(map(str, as_list(spec))).split(","):
        classes += parse_numbers(part) if re.fullmatch(r"[\d\s-]*", part) else [part.strip()]
    if len(set(classes)) < len(classes):
        raise ValueError(f"{spec!r:.60} repeats a class")
    return classes


Fraction = Annotated[float, Field(ge=0, lt=1)]
# Names that begin with a dot belong to the project, such as runs/.sweeps.
FolderName = Annotated[str, types.matching(r"[^/\\.][^/\\]*", "a folder name without slashes and without a dot at its start")]
Checkpoint = Text  # checkpoint folder, or a run folder to select its newest checkpoint
_DETECTORS = "inception|dinov2|digits|small-[a-z][a-z0-9_]*"
Detector = Annotated[str, types.matching(_DETECTORS, "inception, dinov2, digits or small-<set>")]
Numbers = Annotated[list[int], BeforeValidator(parse_numbers)]
Classes = Annotated[list[int | str], BeforeValidator(parse_classes)]
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
    backbone: SameWeights[str]
    routes: list[RouteSettings]
    selection: Literal["uniform", "importance", "grid"]
    fp32_after_route: bool
    class_dropout: Fraction
    learn_sigma: SameWeights[bool]
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

    def build(self, data: Data) -> Any:
        """Build the network, a `dit.DiT`, for latents whose data.* keys are set."""
        settings = {key: value for key, value in self if key not in ("name", "backbone")}
        settings |= {key: getattr(data, key) for key in ("input_size", "in_channels", "num_classes")}
        try:
            return self.module.build(self.backbone, **settings)
        except ValueError as e:
            raise UserError(f"model: {e}") from e


class SPRINTModel(Model):
    name: Literal["sprint", "lightningdit_sprint"]
    path_drop: Fraction


class Data(Settings):
    """Training data settings. `training.build.open_data` reads the values of keys that are None from the latents."""

    name: Reported[FolderName]
    path: Free[Text | None]
    autoencoder: Reported[AutoencoderSpec | None]
    in_channels: SameLatents[PositiveInt | None]
    input_size: SameLatents[PositiveInt | None]
    num_classes: SameClasses[PositiveInt | None]
    num_workers: Free[NonNegativeInt]
    scale_factor: SameLatents[PositiveFloat | None] = None
    latents_mean: SameLatents[list[FiniteFloat] | None] = None
    latents_std: SameLatents[list[PositiveFloat] | None] = None
    resolution: Reported[PositiveInt | None] = None


class Disabled(Settings):
    name: Literal["none"]


class REPASettings(Settings):
    name: Literal["repa"]
    encoder: Text
    encoder_weights: Free[Text | None]
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
    r_strong_last: Fraction | None = None
    r_weak_last: Fraction | None = None
    checkpoint: Checkpoint | None = None
    weights: Weights = "ema"

    @property
    def has_moving_ratios(self) -> bool:
        """Whether a ratio moves over the noise levels."""
        return (self.r_strong_last, self.r_weak_last) != (None, None)


class Autoguidance(Bounded):
    name: Literal["autoguidance"]
    checkpoint: Checkpoint
    weights: Weights
    w: FiniteFloat


Guidance = Annotated[Disabled | CFG | Interval | PathDrop | Sparse | Autoguidance, Field(discriminator="name")]


class Train(Settings):
    num_steps: Reported[PositiveInt | None]  # `training.build.fill_in_lengths` computes lengths that are None
    batch_size: SameRun[PositiveInt]
    grad_accum_steps: Free[PositiveInt]
    optimizer: SameState[Literal["adamw", "muon"]] = "adamw"  # a name in training.optimizers.OPTIMIZERS
    lr: Trained[PositiveFloat]
    warmup_steps: Trained[NonNegativeInt]
    schedule: Trained[Literal["constant", "cosine", "inverse_sqrt"]]
    betas: Trained[Annotated[list[Fraction], Field(min_length=2, max_length=2)]]
    weight_decay: Trained[NonNegativeFloat]
    grad_clip_norm: Trained[PositiveFloat | None]
    ema_decay: Trained[Fraction | None]
    ema_schedule: SameRun[Literal["warmup", "constant"]] = "warmup"
    ema_lengths: SameState[list[EMALength]]
    ema_snapshot_every: Free[PositiveInt | None]
    precision: Trained[Precision]
    tf32: Trained[bool]
    compile: Free[Compile]
    cuda_graphs: Free[Literal["auto", "none", "step"]] = "auto"
    activation_checkpointing: Free[Literal["none", "blocks"]]
    activation_memory_budget: Free[Annotated[float, Field(ge=0, le=1)]]
    cpu_threads: Free[PositiveInt | None]
    log_every: Free[PositiveInt]

    @model_validator(mode="after")
    def _check_schedule(self) -> Train:
        if self.schedule == "inverse_sqrt" and self.warmup_steps == 0:
            raise ValueError("schedule=inverse_sqrt decays from the end of the warm-up, so warmup_steps must be above 0")
        return self


class CheckpointSettings(Settings):
    every: PositiveInt | None
    keep_last: PositiveInt
    keep_every: NonNegativeInt | None


class Sample(Settings):
    every: Free[NonNegativeInt | None]
    num_samples: Free[Annotated[int, Field(ge=1, le=10**4)]]  # one grid shows all samples
    batch_size: Free[PositiveInt]
    precision: Free[Precision]
    rounding: Reported[Literal["round", "truncate"]]


class Eval(Settings):
    every: Free[NonNegativeInt | None]
    num_samples: Free[PositiveInt]
    final_num_samples: Free[PositiveInt | None]
    labels: Reported[Labels]
    cfg_scales: Free[Annotated[list[FiniteFloat], Field(min_length=1)]]
    num_steps: Reported[PositiveInt | None]
    batch_size: Free[PositiveInt]
    precision: Reported[Precision]
    validation: Free[Text | None]
    guidance: Free[Guidance] = Disabled(name="none")

    @field_validator("guidance", mode="before")
    @classmethod
    def _check_guidance_is_a_group(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(f"{value} is the name of a group of keys; use guidance@eval.guidance={value}")
        return value


class EvaluationSettings(Settings):
    detector: Reported[OneOrMany[Detector] | None]
    detector_weights: Free[Text | None]
    dinov2_weights: Free[Text | None]
    background: Free[Colour | None]
    reference: Free[Text | None] = None

    @property
    def all_detectors(self) -> list[str]:
        return as_list(self.detector or "inception")


class Wandb(Settings):
    mode: Literal["disabled", "offline", "online"]
    project: Text


class TrainConfig(Settings):
    name: Free[FolderName]
    output_dir: Free[Text]
    experiment: Free[dict[str, Any] | None]  # see configs/experiment/bases/row.yaml
    seed: SameRun[Annotated[int, Field(ge=0, le=2**32 - 1)]]  # seed range of NumPy's global generator
    resume: Free[Literal["auto", "changed", "never"]]
    init_from: SameRun[Text | None]
    init_state: SameRun[Literal["weights", "all"]]
    model: SameRun[Annotated[Model | SPRINTModel, Field(discriminator="name")]]
    data: Data
    diffusion: SameRun[Diffusion]
    alignment: SameState[Alignment]
    guidance: Free[Guidance]
    train: Train
    checkpoint: Free[CheckpointSettings]
    sample: Sample
    eval: Eval
    evaluation: EvaluationSettings
    wandb: Free[Wandb]

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

    @property
    def is_evaluated(self) -> bool:
        """Whether the run evaluates samples or the validation loss. With data=custom, eval.every may be None until the start."""
        return bool(self.evaluation.reference or self.eval.validation) if self.eval.every is None else self.eval.every > 0

    def named(self, overrides: Sequence[str]) -> TrainConfig:
        """Append the overridden keys and their values to the default run name, unless the user set a name.

        The name omits keys that a resume accepts, and keys that the default name covers: data and model, or an experiment and its
        seed.
        Names longer than MAX_NAME_LENGTH get a hash.
        """
        typed = {key: value for key, _, value in (override.lstrip("+~").partition("=") for override in overrides)}
        if "name" in typed:
            return self
        in_default = {"experiment", "seed"} if "experiment" in typed else {"data", "model"}
        values, roles, parts = flatten(self.model_dump()), roles_of(self), [self.name]  # `values` omits keys inside lists
        for key in typed:
            known = key
            while known and known not in roles:  # for example, an index in a list: model.routes.0.selection_ratio
                known = known.rpartition(".")[0]
            if known and {"resume", "resume=auto"} & {*roles[known].compared_by} and key not in in_default:
                value = json.dumps(values.get(f"{key}.name" if key in GROUPS else key, typed[key])).strip('[]{}"/ ')
                parts.append(f"{key.rpartition('.')[2]}-{re.sub(r'[^0-9A-Za-z.+-]+', '-', value)}")
        name = "_".join(parts)
        if len(parts) > 1 and len(name) > MAX_NAME_LENGTH:
            name = f"{name[: MAX_NAME_LENGTH - 9]}_{hash_bytes(name.encode())[:8]}"
        return self.model_copy(update={"name": name})


class _Sampling(Settings):
    """Keys that sample.py and fid.py share. `sampling.recipe` checks `model_extra` against the checkpoint's sampler.

    `cfg_scale` is a short form: the composed `guidance.cfg_scale` refers to it.
    """

    model_config = ConfigDict(extra="allow")
    output: Text | None
    labels: Labels
    autoencoder: AutoencoderSpec | None
    batch_size: PositiveInt
    precision: Precision | None
    tf32: bool
    compile: Compile
    cpu_threads: PositiveInt | None

    @model_validator(mode="after")
    def _check_short_forms(self) -> _Sampling:
        guidances, scale = as_list(self.guidance), self.cfg_scale
        if scale is not None and not getattr(self, "images", None):
            if not hasattr(guidances[0], "cfg_scale"):
                raise ValueError(f"cfg_scale={scale} needs guidance=cfg, interval or path_drop, not guidance={guidances[0].name}")
            check_short_form("cfg_scale", scale, "guidance.cfg_scale", [*dict.fromkeys(g.cfg_scale for g in guidances)])
        return self


def check_short_form(short: str, value: object, key: str, values: list) -> None:
    """Raise ValueError if a short form and its key are both set, to different values."""
    if as_list(value) != values:
        other = values[0] if len(values) == 1 else values
        raise ValueError(f"{short}={value} and {key}={other} set the same thing; give one of them")


class SampleConfig(_Sampling):
    checkpoint: Checkpoint
    weights: Weights
    ema_length: EMALength | None
    num_samples: PositiveInt | None
    seeds: Numbers | None
    classes: Classes | None
    guidance: Guidance
    cfg_scale: FiniteFloat | None
    npz: bool


class ImageSettings(Settings):
    """The settings.yaml of a folder of images: everything that determines an image except its seed. A new key needs a default."""

    checkpoint: str  # hash of the checkpoint's files
    weights: Weights
    ema_length: EMALength | None
    labels: Labels | None
    classes: list[int] | None
    autoencoder: AutoencoderSpec
    guidance: Guidance
    sampler: dict[str, Any]
    precision: Precision
    autoencoder_hash: str | None = None  # hash of its files if they are local


def combinations(chosen_from: dict) -> list[dict]:
    """Return every combination of one value per key: {a: [1, 2], b: 3} -> [{a: 1, b: 3}, {a: 2, b: 3}]."""
    if empty := [key for key, values in chosen_from.items() if values == []]:
        raise UserError(f"{empty[0]}=[] lists no value")
    return [dict(zip(chosen_from, chosen)) for chosen in itertools.product(*map(as_list, chosen_from.values()))]


class FidConfig(_Sampling):
    # The keys that apply to images on disk. All other keys apply only to sampling from checkpoints.
    keys_for_images: ClassVar = {
        "images", "convert_to_rgb", "reference", "evaluation", "num_samples", "batch_size", "cpu_threads", "output",
    }  # fmt: skip

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

    @model_validator(mode="after")
    def _check_reference(self) -> FidConfig:
        if self.reference is not None:
            check_short_form("reference", self.reference, "evaluation.reference", [self.evaluation.reference])
        return self

    def choices(self) -> list[FidConfig]:
        """Return one configuration for each combination of weights, ema_length, guidance and sampler settings."""
        listed = {key: getattr(self, key) for key in ("weights", "ema_length", "guidance")} | self.model_extra
        return [self.model_copy(update=choice) for choice in combinations(listed)]


def differences(stored: Settings | dict, current: Settings | dict) -> list[str]:
    """Return `key: stored -> current` for every changed key."""
    old, new = (flatten(side.model_dump() if isinstance(side, Settings) else side) for side in (stored, current))
    return [
        f"{key}: {old.get(key, 'absent')!r:.100} -> {new.get(key, 'absent')!r:.100}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def differences_for(use: Use, stored: TrainConfig, current: TrainConfig) -> list[str]:
    """Return the `differences` of two training configurations in the keys whose role names `use`."""
    roles = roles_of(stored) | roles_of(current)
    return [line for line in differences(stored, current) if use in roles[line.partition(":")[0]].compared_by]
