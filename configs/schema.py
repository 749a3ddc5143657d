"""The configuration of every command: its keys, what each accepts, and which of them make a run another run.

A class per Hydra group. The values stand in configs/, with a comment for every key; here stand their types. A checked
configuration is a value: nobody writes to it, and `model_copy(update=...)` makes another one.

To add a key: a line here, and one with its comment in configs/. Give it a default here too: checkpoints that were written
before the key existed are read as if they held this default.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from types import ModuleType
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError
from pydantic import BeforeValidator, Field, create_model, model_validator

import dit
import guidance
from common.errors import UserError
from configs.settings import (
    Accepts,
    BatchSize,
    Count,
    Fraction,
    LatentSize,
    NotNegative,
    Number,
    NumClasses,
    NumSamples,
    NumThreads,
    NumWorkers,
    OneOrMany,
    Positive,
    Resolution,
    S,
    SamplerSteps,
    Seed,
    Settings,
    Text,
    Whole,
    keys_of,
    one_of,
    validate,
)
from evaluations.suite import set_of
from extras import lightningdit
from extras.ddpm.sampler import DDPM_SOLVERS, NUM_TIMESTEPS
from latents.shards import KINDS
from routing_module import SELECTIONS, Route
from sit.diffusion import TIMESTEPS
from sit.sampler import DIFFUSION_FORMS, LAST_STEPS, SOLVERS

T = TypeVar("T")
MAX_NUMBERS, MAX_NUMBER = 10**7, 2**63 - 1  # of seeds or classes in a command


# ----------------------------------------------------------------------------------------------------------------------
# What a value may be.


def _is_folder_name(value: str) -> bool:
    return value not in ("", ".", "..") and not set(value) & set("/\\")


def _is_autoencoder(value: str) -> bool:
    kind, _, source = value.partition(":")
    return value in ("identity", "none") or (kind in ("sd-vae", "va-vae") and source != "")


def _is_detector(value: str) -> bool:
    return value in ("inception", "dinov2", "digits") or set_of(value) is not None


def _is_detectors(value: list) -> bool:
    # The others are for one set of small pictures each.
    return value in (["inception"], ["dinov2"], ["inception", "dinov2"], ["dinov2", "inception"])


def _is_routes(value: list) -> bool:
    # The router, which knows the depth, checks the values inside.
    names = {field.name for field in fields(Route)}
    return all(isinstance(route, dict) and route.keys() == names for route in value)


_ROUTES_IN_WORDS = (  # without the quotes, the shell takes the braces
    f"a list of routes, each with {', '.join(field.name for field in fields(Route))}, in quotes: "
    "'model.routes=[{selection_ratio:0.5,start_layer_idx:2,end_layer_idx:-4}]'"
)


def _is_numbers(value: object) -> bool:
    try:
        return len(parse_numbers(value)) > 0
    except UserError:
        return False


def parse_numbers(spec: str | int | list) -> list[int]:
    """`0-3`, `[0-3,7]` -> [0, 1, 2, 3, 7].

    Raises:
        UserError: anything else, a number that is named twice, more than MAX_NUMBERS of them, or one above MAX_NUMBER.
    """
    numbers, count = [], 0
    for part in ",".join(map(str, spec if isinstance(spec, list) else [spec])).split(","):
        first, _, last = part.strip().partition("-")
        is_range = first.isdecimal() and (last.isdecimal() or "-" not in part) and int(last or first) >= int(first)
        if not is_range:
            raise UserError(f"{spec!r} is not a list of numbers and ranges such as [0-3,7]")
        low, high = int(first), int(last or first)
        count += high - low + 1
        if count > MAX_NUMBERS or high > MAX_NUMBER:
            raise UserError(f"{spec!r} names {count} numbers up to {high}; at most {MAX_NUMBERS} up to {MAX_NUMBER} are accepted")
        numbers.extend(range(low, high + 1))
    if len(set(numbers)) < len(numbers):
        raise UserError(f"{spec!r} names a number twice")
    return numbers


FolderName = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),  # name=2024
    Accepts(_is_folder_name, "the name of a folder, without slashes"),
]
Checkpoint = Annotated[str, Accepts(bool, "the folder of a checkpoint or of a run: checkpoint=runs/<name>")]
Autoencoder = Annotated[str, Accepts(_is_autoencoder, "identity | none | sd-vae:<hub id or folder> | va-vae:<file or folder>")]
Numbers = Annotated[
    Any, Accepts(_is_numbers, "numbers and ranges such as 0-49 or [3,7,100-199], none of them twice, at most 10000000 in all")
]
Bound = Annotated[
    float,
    Field(ge=0, lt=math.inf),
    Accepts(
        lambda _: True,
        "a noise level: sigma for diffusion=edm (0.28 to 2.9, say), t for diffusion=sit (0.22 to 0.74, say) and ddpm (0 to 999)",
    ),
]
Weights = Literal["ema", "raw"]
Precision = Literal["fp32", "bf16"]
Detector = Annotated[str, Accepts(_is_detector, "inception | dinov2 | digits | small-<set>, such as small-fashion")]
Detectors = Annotated[list, Accepts(_is_detectors, "a list of inception, dinov2 or both: [inception,dinov2]")]
# training.speed.compile_network
Compile = Literal[
    "auto", "none", "blocks", "segments", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
]


class Role(Enum):
    """What another value of a key means for a run. A key without a role says where a run is, how it is watched or how fast."""

    ARCHITECTURE = "weights of another value do not fit: init_from and autoguidance refuse them, and so does a resume"
    FIXED = "another value is another run: a resume refuses it"
    NOTED = "may change on a resume, which logs it; figures of another value are another experiment's"
    COMPARED = "may change on a resume; figures of another value are another experiment's"


Architecture = Annotated[T, Role.ARCHITECTURE]
Fixed = Annotated[T, Role.FIXED]
Noted = Annotated[T, Role.NOTED]
Compared = Annotated[T, Role.COMPARED]
SAME_RUN = (Role.ARCHITECTURE, Role.FIXED)


# ----------------------------------------------------------------------------------------------------------------------
# The groups.


# By the first word of model.backbone: the file of the network, and model.name without and with routes.
FAMILIES = {"DiT": (dit, ("dit", "tread")), "LightningDiT": (lightningdit, ("lightningdit", "lightningdit_tread"))}
BACKBONES = {**dit.BACKBONES, **lightningdit.BACKBONES}  # name: (depth, width, heads, patch size)


def family_of(backbone: str) -> tuple[ModuleType, tuple[str, str]]:
    """The value of FAMILIES for a name in BACKBONES."""
    return FAMILIES[backbone.partition("-")[0]]


def backbone_of(name: str, size: str) -> str:
    """The backbone of this size ("XS/2") for model=<name>, in the configuration of the digits."""
    return next((f"{family}-{size}" for family, (_, names) in FAMILIES.items() if name in names), size)


class Model(Settings):
    name: Fixed[Literal["dit", "tread", "lightningdit", "lightningdit_tread"]]
    backbone: Architecture[Annotated[str, one_of(BACKBONES)]]
    routes: Fixed[Annotated[list, Accepts(_is_routes, _ROUTES_IN_WORDS)]]
    selection: Fixed[Annotated[str, one_of(SELECTIONS)]] = "uniform"
    fp32_after_route: Fixed[bool]
    class_dropout: Fixed[Fraction]
    learn_sigma: Architecture[bool]
    init: Fixed[Literal[dit.INITS]]

    @model_validator(mode="after")
    def _of_one_family(self) -> Model:
        if self.name not in family_of(self.backbone)[1]:
            own = next(module.BACKBONES for module, names in FAMILIES.values() if self.name in names)
            other = " or ".join(f"model={name}" for name in family_of(self.backbone)[1])
            raise UserError(
                f"model.backbone={self.backbone} is for {other}; use that, or one for model={self.name}: {', '.join(own)}"
            )
        return self


class Data(Settings):
    name: Compared[FolderName]
    path: Text | None
    format: Literal["native", "webdataset"]
    kind: Compared[Literal[KINDS] | None]
    stored_scale: Compared[Positive | None]
    scale_factor: Architecture[Positive | None]
    latents_mean: Architecture[list[Number] | None] = None
    latents_std: Architecture[list[Positive] | None] = None
    resolution: Compared[Resolution | None]
    allow_pickle: bool
    autoencoder: Compared[Autoencoder | None]
    in_channels: Architecture[LatentSize | None]
    input_size: Architecture[LatentSize | None]
    num_classes: Architecture[NumClasses | None]
    num_workers: NumWorkers


class HeunSettings(Settings):
    """Of `edm.sampler.HeunSampler`."""

    num_steps: Compared[SamplerSteps]
    sigma_min: Compared[Annotated[float, Field(gt=0)]]
    sigma_max: Compared[Positive]
    rho: Compared[Positive]
    S_churn: Compared[NotNegative]
    S_min: Compared[Annotated[float, Field(ge=0)]]
    S_max: Compared[Annotated[float, Field(ge=0)]]
    S_noise: Compared[NotNegative]


class FlowSettings(Settings):
    """Of `sit.sampler.FlowSampler`."""

    num_steps: Compared[SamplerSteps]
    solver: Compared[Literal[SOLVERS]]
    timestep_shift: Compared[Positive] = 1.0
    diffusion_form: Compared[Literal[tuple(DIFFUSION_FORMS)]]
    diffusion_norm: Compared[NotNegative]
    last_step_size: Compared[Annotated[float, Field(gt=0, lt=1)]]
    last_step: Compared[Literal[LAST_STEPS]]


class AncestralSettings(Settings):
    """Of `ddpm.sampler.AncestralSampler`."""

    num_steps: Compared[Annotated[int, Field(ge=1, le=NUM_TIMESTEPS)]]
    solver: Compared[Literal[DDPM_SOLVERS]]


class EDMSettings(Settings):
    name: Architecture[Literal["edm"]]
    sigma_data: Architecture[Positive]
    P_mean: Fixed[Number]
    P_std: Fixed[Positive]
    sampler: HeunSettings


class SiTSettings(Settings):
    name: Architecture[Literal["sit"]]
    timestep: Fixed[Literal[TIMESTEPS]]
    logit_mean: Fixed[Number]
    logit_std: Fixed[Positive]
    cosine_weight: Fixed[NotNegative] = 0.0
    sampler: FlowSettings


class DDPMSettings(Settings):
    name: Architecture[Literal["ddpm"]]
    sampler: AncestralSettings


Diffusion = Annotated[EDMSettings | SiTSettings | DDPMSettings, Field(discriminator="name")]


class NoAlignment(Settings):
    name: Fixed[Literal["none"]]


class REPASettings(Settings):
    """Of `alignment.Alignment`."""

    name: Fixed[Literal["repa"]]
    encoder: Fixed[Text]
    weights: Text | None
    block: Fixed[Count]
    weight: Fixed[NotNegative]
    projector_width: Fixed[Annotated[int, Field(ge=1, le=2**16)]]
    stop_step: Noted[Whole | None]


AlignmentSettings = Annotated[NoAlignment | REPASettings, Field(discriminator="name")]


class NoGuidance(Settings):
    name: Literal["none"]


class CFG(Settings):
    name: Literal["cfg"]
    cfg_scale: Number
    channels: LatentSize | None = None


class Interval(Settings):
    name: Literal["interval"]
    cfg_scale: Number
    channels: LatentSize | None = None
    level_lo: Bound
    level_hi: Bound

    @model_validator(mode="after")
    def _ordered(self) -> Interval:
        return _check_order(self, "level_lo", "level_hi", "")


class Sparse(Settings):
    name: Literal["sparse"]
    w: Number
    r_strong: Fraction
    r_weak: Fraction
    subset: Literal[guidance.SUBSETS]
    level_lo: NotNegative | None
    level_hi: NotNegative | None

    @model_validator(mode="after")
    def _ordered(self) -> Sparse:
        _check_order(self, "level_lo", "level_hi", "level_hi=null leaves it open")
        return _check_order(self, "r_strong", "r_weak", "the strong branch skips fewer tokens; r_strong=0 is the dense network")


class Autoguidance(Settings):
    name: Literal["autoguidance"]
    checkpoint: Annotated[str, Accepts(bool, "the folder of a checkpoint or of a run: guidance.checkpoint=runs/<name>")]
    weights: Weights
    w: Number
    level_lo: NotNegative | None
    level_hi: NotNegative | None

    @model_validator(mode="after")
    def _ordered(self) -> Autoguidance:
        return _check_order(self, "level_lo", "level_hi", "level_hi=null leaves it open")


def _check_order(settings: T, low: str, high: str, hint: str) -> T:
    lower, upper = getattr(settings, low), getattr(settings, high)
    if lower is not None and upper is not None and not lower < upper:
        raise UserError(f"guidance.{low}={lower:g} must be below guidance.{high}={upper:g}{f' ({hint})' if hint else ''}")
    return settings


Guidance = Annotated[NoGuidance | CFG | Interval | Sparse | Autoguidance, Field(discriminator="name")]


class Train(Settings):
    num_steps: Compared[Count]
    batch_size: Fixed[BatchSize]
    grad_accum_steps: Count
    lr: Noted[Positive]
    betas: Noted[Annotated[list[Fraction], Field(min_length=2, max_length=2), Accepts(bool, "two numbers in [0, 1)")]]
    weight_decay: Noted[NotNegative]
    grad_clip_norm: Noted[Positive | None]
    ema_decay: Noted[Fraction]
    precision: Noted[Literal["fp32", "bf16", "fp8"]]
    tf32: Noted[bool] = True
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"]
    parallel: Literal["ddp", "fsdp"]
    gradient_precision: Noted[Precision] = "fp32"
    fsdp_reshard: Literal["after_forward", "after_backward"] = "after_backward"
    fsdp_shard: Literal["all", "node"] = "all"
    compile: Compile
    activation_checkpointing: Literal["none", "blocks", "selective"]
    cpu_threads: NumThreads | None
    log_every: Count


class CheckpointSettings(Settings):
    every: Count
    keep_last: Count
    keep_every: Whole


class Sample(Settings):
    every: Whole
    num_samples: Annotated[int, Field(ge=1, le=10**4)]  # one picture
    batch_size: BatchSize
    precision: Precision = "fp32"


class Eval(Settings):
    every: Whole
    num_samples: NumSamples
    final_num_samples: NumSamples | None = None
    cfg_scales: Annotated[
        list[Number],
        Field(min_length=1),
        Accepts(lambda v: len(set(v)) == len(v), "a list of different numbers, such as [1.0, 1.5]"),
    ]
    num_steps: Compared[SamplerSteps | None]
    batch_size: BatchSize
    precision: Compared[Precision] = "fp32"


class DetectorSettings(Settings):
    detector: Compared[Detector]
    detectors: Compared[Detectors | None] = None
    weights: Text | None
    dinov2_weights: Text | None = None
    precision: Compared[Precision]
    compile: bool

    @property
    def all_detectors(self) -> list[str]:
        """`detectors`, else `detector` alone."""
        return list(self.detectors or [self.detector])


class EvaluationSettings(DetectorSettings):
    reference: Text | None


class Wandb(Settings):
    mode: Literal["disabled", "offline", "online"]
    project: Text


class ExperimentSettings(Settings):
    """What a row of the paper's tables is: see configs/experiments.py."""

    name: Text
    table: Text
    paper: dict[str, Number]
    paper_guided: dict[str, Number]
    num_samples: Count
    source: Text
    differs: Text | None
    baseline: Text | None


# ----------------------------------------------------------------------------------------------------------------------
# The commands.


class TrainConfig(Settings):
    name: FolderName
    output_dir: Text
    experiment: ExperimentSettings | None
    seed: Fixed[Seed]
    resume: Annotated[Text, Accepts(bool, "auto | never | the folder of a checkpoint or of a run")]
    init_from: Fixed[Text | None] = None
    init_state: Compared[Literal["weights", "all"]] = "weights"
    model: Model
    data: Data
    diffusion: Diffusion
    alignment: AlignmentSettings = NoAlignment(name="none")
    guidance: Guidance
    train: Train
    checkpoint: CheckpointSettings
    sample: Sample
    eval: Eval
    evaluation: EvaluationSettings
    wandb: Wandb


# What sample.py may set on the sampler of a run. sigma_min, sigma_max and rho define EDM's schedule.
SAMPLER_OVERRIDES = {
    key: Annotated[(field.annotation, *field.metadata)]
    for settings in (HeunSettings, FlowSettings)
    for key, field in settings.model_fields.items()
    if key not in ("sigma_min", "sigma_max", "rho")
} | {"solver": Literal[(*SOLVERS, *DDPM_SOLVERS)]}  # `build.build_diffusion` knows which of them the run's diffusion has


SChurn, Solver = SAMPLER_OVERRIDES["S_churn"], SAMPLER_OVERRIDES["solver"]


class _SampleConfig(Settings):
    checkpoint: Checkpoint
    output: Text | None
    weights: Weights
    autoencoder: Autoencoder | None
    seeds: Numbers
    classes: Numbers | None
    guidance: Guidance
    cfg_scale: Number | None
    batch_size: BatchSize
    precision: Precision
    tf32: bool
    compile: Compile
    cpu_threads: NumThreads | None
    npz: bool


SampleConfig = create_model(
    "SampleConfig", __base__=_SampleConfig, **{key: (annotation | None, ...) for key, annotation in SAMPLER_OVERRIDES.items()}
)


class FidDetector(DetectorSettings):
    detector: Detector | None


class FidConfig(Settings):
    checkpoint: OneOrMany[Text] | None
    checkpoints: Text | None
    images: Text | None
    reference: Text | None
    output: Text | None
    num_samples: NumSamples | None
    weights: OneOrMany[Weights]
    autoencoder: Autoencoder | None
    guidance: Annotated[list[Guidance], Field(min_length=1)]  # one for every combination of the values that the command lists

    @model_validator(mode="before")
    @classmethod
    def _combine(cls, raw: dict) -> dict:
        return raw | {"guidance": combinations(raw["guidance"])} if isinstance(raw.get("guidance"), dict) else raw

    cfg_scale: OneOrMany[Number] | None
    num_steps: OneOrMany[SamplerSteps] | None
    S_churn: OneOrMany[SChurn] | None
    solver: OneOrMany[Solver] | None
    batch_size: BatchSize
    precision: Precision
    tf32: bool
    compile: Compile
    cpu_threads: NumThreads | None
    convert_to_rgb: bool
    evaluation: FidDetector


def combinations(settings: dict) -> list[dict]:
    """{a: [1, 2], b: 3} -> [{a: 1, b: 3}, {a: 2, b: 3}]: every choice of one entry from each list."""
    entries = [value if isinstance(value, list) else [value] for value in settings.values()]
    return [dict(zip(settings, chosen)) for chosen in itertools.product(*entries)]


# ----------------------------------------------------------------------------------------------------------------------
# Checking and comparing.


def check(cfg: DictConfig | dict, settings: type[S]) -> S:
    """The configuration as checked settings, with its interpolations resolved.

    Args:
        settings: TrainConfig, SampleConfig or FidConfig.

    Raises:
        UserError: naming the key, the value and what is accepted.
    """
    try:
        raw = OmegaConf.to_container(cfg, resolve=True) if OmegaConf.is_config(cfg) else cfg
    except InterpolationResolutionError as e:
        raise UserError(f"{e.full_key}: {str(e).splitlines()[0]}") from e
    return validate(raw, settings)


def from_checkpoint(raw: dict) -> TrainConfig:
    """The configuration that an earlier version stored: keys that it did not know yet have their defaults.

    Raises:
        UserError: it is not a configuration that this version can read.
    """
    try:
        return validate(raw, TrainConfig)
    except UserError as e:
        raise UserError(f"config.yaml of another version: {e}") from e


def flatten(config: dict, prefix: str = "") -> dict[str, object]:
    """Nested dictionaries -> {"train.lr": 1e-4, ...}; lists are values, and so is `experiment`, which only says what a run is."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict) and value and f"{prefix}{key}" != "experiment":
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def role_of(key: str) -> Role | None:
    """What another value of a key of train.py means for a run."""
    return _ROLES.get(key)


_ROLES = {
    key: next((one for field in fields for one in field.metadata if isinstance(one, Role)), None)
    for key, fields in keys_of(TrainConfig).items()
}


def differences(stored: Settings | dict, current: Settings | dict, roles: Sequence[Role] | None = None) -> list[str]:
    """`key: stored -> current` for every key that differs; with `roles`, for the keys of these roles alone."""
    old, new = (flatten(one.model_dump() if isinstance(one, Settings) else one) for one in (stored, current))
    return [
        f"{key}: {old.get(key, 'absent')!r} -> {new.get(key, 'absent')!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and (roles is None or role_of(key) in roles)
    ]
