"""The configuration of every command: its keys, what each accepts, and which of them make a run another run.

A class per Hydra group. The values stand in configs/*.yaml, with a comment for every key; here stand their types. The diffusions
and their samplers are settings themselves: `cfg.diffusion` is an `edm.EDM`, say.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import fields
from enum import Enum
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import AfterValidator, BeforeValidator, Field, create_model, model_validator

import dit
from common.files import hash_bytes
from common.types import AutoencoderSpec, Colour, Count, NotNegative, Number, Positive, Text, Whole, settings
from configs.experiments import GROUPS, compose_overrides
from configs.settings import OneOrMany, Settings, as_list, flatten, nearest
from edm import EDM
from edm.sampler import HeunSampler
from evaluations.suite import metrics_of
from extras import ddpm, lightningdit
from routing_module import SELECTIONS, Route
from sit import SiT
from sit.sampler import FlowSampler

MAX_NUMBERS = 10**7  # of seeds or classes in a command
MAX_NAME_LENGTH = 60  # of a run

# model.name -> the module of its network.
NETWORKS = dict.fromkeys(("dit", "tread", "sprint"), dit)
NETWORKS |= {f"lightning{name}": lightningdit for name in ("dit", "dit_tread", "dit_sprint")}


def parse_numbers(spec: str | int | list) -> list[int]:
    """`0-3`, `[0-3,7]` -> [0, 1, 2, 3, 7]. Raises ValueError for anything else, and for a number that is named twice."""
    numbers: list[int] = []
    for part in ",".join(map(str, as_list(spec))).split(","):
        ends = [end.strip() for end in part.split("-")]
        if len(ends) > 2 or not all(end.isdecimal() for end in ends) or not 0 <= int(ends[-1]) - int(ends[0]) < MAX_NUMBERS:
            raise ValueError(f"{spec!r:.60} is no list of numbers and ranges such as [0-3,7], with at most {MAX_NUMBERS} numbers")
        numbers.extend(range(int(ends[0]), int(ends[-1]) + 1))
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{spec!r:.60} is empty or names a number twice")
    return numbers


def known_detector(name: str) -> str:
    if not metrics_of(name):
        raise ValueError(f"{name!r} is none of inception, dinov2, digits and small-<set>, with a set in small letters")
    return name


def check_folder_name(name: str) -> str:
    if not name.strip(".") or {*name} & {*"/\\"}:
        raise ValueError(f"{name!r} is not the name of a folder: it must not be empty, hold / or \\, or consist of dots")
    return name


Fraction = Annotated[float, Field(ge=0, lt=1)]
FolderName = Annotated[str, AfterValidator(check_folder_name)]
Checkpoint = Text  # the folder of a checkpoint, or of a run for its newest
Detector = Annotated[str, AfterValidator(known_detector)]
Numbers = Annotated[list[int], BeforeValidator(parse_numbers)]
Weights = Literal["ema", "raw"]
Precision = Literal["fp32", "bf16"]
Compile = Literal["auto", "none", "blocks"]  # training.speed.compile_network
Labels = Literal["random", "balanced"]  # sampling.sampler.labels_of
EMALength = Annotated[float, Field(gt=0, le=0.28)]  # extras.posthoc_ema

RouteSettings = settings(Route)  # routing_module.py needs torch alone


class Model(Settings):
    name: Literal[tuple(NETWORKS)]
    backbone: str
    routes: list[RouteSettings]
    selection: Literal[(*SELECTIONS, "grid")]
    fusion: Literal["replace", "concat"]
    path_drop: Fraction
    fp32_after_route: bool
    class_dropout: Fraction
    learn_sigma: bool
    init: Literal[dit.INITS]

    @model_validator(mode="after")
    def _known_backbone(self) -> Model:
        if self.backbone not in (known := NETWORKS[self.name].BACKBONES):
            raise ValueError(f"model.backbone={self.backbone} is not one of model={self.name}{nearest(self.backbone, known)}")
        return self


class Data(Settings):
    """Keys with a default are filled in by `training.build.open_data`, as the latents have them."""

    name: FolderName
    path: Text | None
    autoencoder: AutoencoderSpec | None
    in_channels: Count | None
    input_size: Count | None
    num_classes: Count | None
    num_workers: Whole
    scale_factor: Positive | None = None
    latents_mean: list[Number] | None = None
    latents_std: list[Positive] | None = None
    resolution: Count | None = None


Diffusion = Annotated[EDM | SiT | ddpm.DDPM, Field(discriminator="name")]


class NoChoice(Settings):
    name: Literal["none"]


class REPASettings(Settings):
    name: Literal["repa"]
    encoder: Text
    weights: Text | None
    block: Count
    weight: Positive
    projector_width: Count


Alignment = Annotated[NoChoice | REPASettings, Field(discriminator="name")]


class CFG(Settings):
    name: Literal["cfg"]
    cfg_scale: Number
    channels: Count | None = None


class Interval(CFG):
    name: Literal["interval"]
    level_lo: NotNegative
    level_hi: NotNegative


class Bounded(Settings):
    level_lo: NotNegative | None
    level_hi: NotNegative | None


class PathDrop(Bounded):
    name: Literal["path_drop"]
    cfg_scale: Number


class Sparse(Bounded):
    name: Literal["sparse"]
    w: Number
    r_strong: Fraction
    r_weak: Fraction


class Autoguidance(Bounded):
    name: Literal["autoguidance"]
    checkpoint: Checkpoint
    weights: Weights
    w: Number


Guidance = Annotated[NoChoice | CFG | Interval | PathDrop | Sparse | Autoguidance, Field(discriminator="name")]


class Train(Settings):
    num_steps: Count | None  # here and below, `training.build.fill_in_lengths` fills in what is None
    batch_size: Count
    grad_accum_steps: Count
    lr: Positive
    warmup_steps: Whole
    schedule: Literal["constant", "cosine", "inverse_sqrt"]
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)]
    weight_decay: NotNegative
    grad_clip_norm: Positive | None
    ema_decay: Fraction | None
    ema_lengths: list[EMALength]
    ema_snapshot_every: Count | None
    precision: Precision
    tf32: bool
    parallel: Literal["ddp", "fsdp"]
    compile: Compile
    activation_checkpointing: Literal["none", "blocks"]
    cpu_threads: Count | None
    log_every: Count


class CheckpointSettings(Settings):
    every: Count | None
    keep_last: Count
    keep_every: Whole


class Sample(Settings):
    every: Whole | None
    num_samples: Annotated[int, Field(ge=1, le=10**4)]  # one picture
    batch_size: Count
    precision: Precision
    rounding: Literal["round", "truncate"]


class Eval(Settings):
    every: Whole | None
    num_samples: Count
    final_num_samples: Count | None
    labels: Labels
    cfg_scales: Annotated[list[Number], Field(min_length=1)]
    num_steps: Count | None
    batch_size: Count
    precision: Precision

    @property
    def closing_num_samples(self) -> int:
        """Images per guidance scale at the last step."""
        return self.final_num_samples or self.num_samples


class DetectorSettings(Settings):
    detector: OneOrMany[Detector] | None
    weights: Text | None
    dinov2_weights: Text | None
    background: Colour | None

    @property
    def all_detectors(self) -> list[str]:
        return as_list(self.detector)


class EvaluationSettings(DetectorSettings):
    detector: OneOrMany[Detector]
    reference: Text | None


class Wandb(Settings):
    mode: Literal["disabled", "offline", "online"]
    project: Text


class TrainConfig(Settings):
    name: FolderName
    output_dir: Text
    experiment: dict[str, Any] | None  # configs.experiments.Row
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)]  # NumPy's global generator takes no other
    resume: Text
    init_from: Text | None
    init_state: Literal["weights", "all"]
    model: Model
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

    def named(self, overrides: Sequence[str]) -> TrainConfig:
        """The configuration with its run's name: the default, then each changed key that makes a run another one.

        A key is named by its last part and its value, unless the value is the default. Keys that may change when a run resumes,
        such as train.num_steps, are not named, and neither is what the default says already (data, model, experiment and its
        seed). A name of more than MAX_NAME_LENGTH characters ends with a hash.
        """
        typed = {override.lstrip("+~").partition("=")[0]: override for override in overrides}
        choices = ("data", "model", "experiment")  # the default name holds them
        in_default = {*choices} | ({"seed"} if "experiment" in typed else set())
        keys = [key for key in typed if role_of(key) in (*SAME_RUN, Role.NOTED) and key not in in_default]
        if "name" in typed or not keys:
            return self
        own, composed = flatten(self.model_dump()), {}
        for groups in (choices, GROUPS + choices):
            chosen = [override for key, override in typed.items() if key in groups]
            composed[groups] = flatten(OmegaConf.to_container(compose_overrides(chosen), resolve=True))
        words = [self.name]
        for key in keys:
            name, default = (f"{key}.name", composed[choices]) if key in GROUPS else (key, composed[GROUPS + choices])
            if own[name] != default.get(name):
                value = json.dumps(own[name]).strip('[]{}"/ ')
                words.append(f"{key.rpartition('.')[2]}-{re.sub(r'[^0-9A-Za-z.+-]+', '-', value)}")
        name = "_".join(words)
        if len(name) > MAX_NAME_LENGTH:
            name = f"{name[: MAX_NAME_LENGTH - 9]}_{hash_bytes(name.encode())[:8]}"
        return self.model_copy(update={"name": name})

    def checkpoints_gb(self, num_parameters: int) -> float:
        """What checkpoints (weight, EMA, two moments, tracked averages, in float32) and snapshots (float16) take at most."""
        keep, every, lengths = self.checkpoint.keep_last + 1, self.checkpoint.keep_every, len(self.train.ema_lengths)
        num_checkpoints = keep + (self.train.num_steps // every if every else 0)  # one is written before another is removed
        num_snapshots = self.train.num_steps // self.train.ema_snapshot_every
        return (num_checkpoints * 4 * (4 + lengths) + num_snapshots * 2 * lengths) * num_parameters / 1e9


class _Sampling(Settings):
    output: Text | None
    labels: Labels
    autoencoder: AutoencoderSpec | None
    batch_size: Count
    precision: Precision | None
    tf32: bool
    compile: Compile
    cpu_threads: Count | None


class _SampleConfig(_Sampling):
    checkpoint: Checkpoint
    weights: Weights
    ema_length: EMALength | None
    num_samples: Count | None
    seeds: Numbers | None
    classes: Numbers | None
    guidance: Guidance
    cfg_scale: Number | None
    npz: bool


# Every setting of every sampler; `sampling.sampler.sampler_with` knows which of them the run's diffusion has.
_SAMPLERS = (HeunSampler, FlowSampler, ddpm.AncestralSampler)
SAMPLER_KEYS = tuple({field.name: None for sampler in _SAMPLERS for field in fields(sampler)})
SampleConfig = create_model("SampleConfig", __base__=_SampleConfig, **{key: (Any, ...) for key in SAMPLER_KEYS})


def combinations(chosen_from: dict) -> list[dict]:
    """{a: [1, 2], b: 3} -> [{a: 1, b: 3}, {a: 2, b: 3}]: every choice of one entry from each list."""
    return [dict(zip(chosen_from, chosen)) for chosen in itertools.product(*map(as_list, chosen_from.values()))]


class FidConfig(_Sampling):
    checkpoint: OneOrMany[Text] | None
    checkpoints: Text | None
    images: Text | None
    reference: Text | None
    num_samples: Count | None
    first_seed: Whole
    keep_features: bool
    search: list[Text] | None
    search_num_samples: Annotated[int, Field(ge=2)] | None
    weights: OneOrMany[Weights]
    ema_length: OneOrMany[EMALength] | None
    guidance: list[Guidance]  # one for every combination of the values that the command lists
    cfg_scale: OneOrMany[Number] | None
    num_steps: OneOrMany[Any]
    S_churn: OneOrMany[Any]
    solver: OneOrMany[Any]
    convert_to_rgb: bool
    evaluation: DetectorSettings

    @model_validator(mode="before")
    @classmethod
    def _combine(cls, raw: dict) -> dict:
        if empty := [key for key, value in flatten(raw).items() if value == []]:
            raise ValueError(f"{empty[0]}=[]: a list needs an entry")
        return raw | {"guidance": combinations(raw["guidance"])} if isinstance(raw.get("guidance"), dict) else raw


class Role(Enum):
    """Keys without a role (paths, logging, speed) do not affect results."""

    ARCHITECTURE = "weights of another value do not fit: init_from, autoguidance and a resume refuse them"
    FIXED = "another value makes another run: a resume refuses it"
    STARTED = "fixed when the run starts; does not affect its figures"
    NOTED = "may change on a resume, which logs it; runs with other values are another experiment"
    COMPARED = "may change on a resume; runs with other values are another experiment"


SAME_RUN = (Role.ARCHITECTURE, Role.FIXED, Role.STARTED)
_ROLES = {  # a group stands for those of its keys that are not listed
    Role.ARCHITECTURE: "model.backbone model.learn_sigma model.fusion diffusion.name diffusion.sigma_data data.scale_factor "
    "data.latents_mean data.latents_std data.in_channels data.input_size data.num_classes",
    Role.FIXED: "seed init_from init_state model diffusion alignment train.batch_size",
    Role.STARTED: "train.ema_lengths",
    Role.NOTED: "train.lr train.warmup_steps train.schedule train.betas train.weight_decay train.grad_clip_norm train.ema_decay "
    "train.precision train.tf32",
    Role.COMPARED: "data.name data.resolution data.autoencoder diffusion.sampler sample.rounding train.num_steps "
    "eval.num_steps eval.labels eval.precision evaluation.detector",
    None: "alignment.weights",
}
_ROLE_OF = {key: role for role, listed in _ROLES.items() for key in listed.split()}


def role_of(key: str) -> Role | None:
    """The role of a key of train.py, or of the innermost group around it that has one."""
    while key and key not in _ROLE_OF:
        key = key.rpartition(".")[0]
    return _ROLE_OF.get(key)


def differences(stored: Settings | dict, current: Settings | dict, roles: Sequence[Role] | None = None) -> list[str]:
    """`key: stored -> current` for every key that differs; with `roles`, for the keys of these roles alone."""
    old, new = (flatten(one.model_dump() if isinstance(one, Settings) else one) for one in (stored, current))
    return [
        f"{key}: {old.get(key, 'absent')!r:.100} -> {new.get(key, 'absent')!r:.100}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and (roles is None or role_of(key) in roles)
    ]
