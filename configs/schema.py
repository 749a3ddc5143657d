"""Configuration schema of train.py: the keys, their types and their roles (see common/roles.py).

configs/sampling_schema.py has the configurations of sample.py and fid.py, which use the same groups. Each Hydra group has a class
in this module. configs/*.yaml define the values of new runs and explain every key in a comment. A default in a class is the value
that runs used before the key existed (see `configs.settings.read_stored`). Names of choices also stand in the tables `GUIDANCES`,
`SELECTIONS` and `OPTIMIZERS`, whose modules import torch, and in configs/*.yaml. tests/test_choices.py holds these lists equal.

Diffusions and their samplers are settings too. For example, `cfg.diffusion` is an `edm.EDM`, and `cfg.sampler` an
`edm.EDM.Sampler`. Importing torch takes seconds, so the modules of the chosen network and diffusion are imported only after all
other keys are validated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, create_model, model_validator

from common import types
from common.errors import UserError
from common.interfaces import Diffusion, Sampler
from common.roles import (
    ChangesNothing,
    ChangesReport,
    ChangesWeights,
    SameClasses,
    SameLatents,
    SameRun,
    SameState,
    SameWeights,
    roles_of,
)
from common.types import AutoencoderSpec, Colour, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Text
from configs.run_name import run_name
from configs.settings import OneOrMany, Settings, as_list, did_you_mean, flatten, validate

# Classes by diffusion.name (see `common.interfaces.Diffusion`).
DIFFUSIONS = {"edm": "edm:EDM", "sit": "sit:SiT", "ddpm": "extras.ddpm:DDPM"}

Fraction = Annotated[float, Field(ge=0, lt=1)]
NumSamples = Annotated[PositiveInt, Field(ge=2)]  # a Frechet distance needs a covariance
# Names that begin with a dot belong to the project, such as runs/.sweeps.
FolderName = Annotated[str, types.matching(r"[^/\\.][^/\\]*", "a folder name without slashes and without a dot at its start")]
CheckpointPath = Text  # checkpoint folder, or a run folder to select its newest checkpoint
_DETECTORS = "inception|dinov2|digits|small-[a-z][a-z0-9_]*"
DetectorName = Annotated[str, types.matching(_DETECTORS, "inception, dinov2, digits or small-<set>")]
Weights = Literal["ema", "raw"]
Precision = Literal["fp32", "bf16"]
Compile = Literal["auto", "none", "blocks"]  # see runtime.compilation.resolve_compile
Rounding = Literal["round", "truncate"]  # see common.images.to_uint8
Labels = Literal["random", "balanced"]  # see sampling.sampler.draw_labels
EMALength = Annotated[float, Field(gt=0, le=0.28)]  # see extras.posthoc_ema
# Earlier configurations hold `auto`, which meant none.
CUDAGraphs = Annotated[Literal["none", "step"], BeforeValidator(lambda value: "none" if value == "auto" else value)]


class RouteSettings(Settings):
    """Arguments of `routing_module.Route`. `TokenRouter` checks that a route fits the network."""

    selection_ratio: FiniteFloat
    start_layer_idx: int
    end_layer_idx: int


class Model(Settings):
    """Settings of a network whose module defines `build(backbone, **settings)` and BACKBONES, which lists sizes by name."""

    module_name: ClassVar[str] = "dit"
    name: Literal["dit", "tread"]
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
        return resolve_name(self.module_name)

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


class LightningModel(Model):
    module_name = "extras.lightningdit"
    name: Literal["lightningdit", "lightningdit_tread"]


class SPRINTModel(Model):
    module_name = "extras.sprint"
    name: Literal["sprint", "lightningdit_sprint"]
    path_drop: Fraction


AnyModel = Annotated[Model | LightningModel | SPRINTModel, Field(discriminator="name")]


class Data(Settings):
    """Training data settings. `training.data.complete_config` takes the values of keys that are None from the latents."""

    name: ChangesReport[FolderName]
    path: ChangesNothing[Text | None]
    in_channels: SameLatents[PositiveInt | None]
    input_size: SameLatents[PositiveInt | None]
    num_classes: SameClasses[PositiveInt | None]
    num_workers: ChangesNothing[NonNegativeInt]
    scale_factor: SameLatents[PositiveFloat | None] = None
    latents_mean: SameLatents[list[FiniteFloat] | None] = None
    latents_std: SameLatents[list[PositiveFloat] | None] = None
    resolution: ChangesReport[PositiveInt | None] = None


class Disabled(Settings):
    name: Literal["none"]


class REPASettings(Settings):
    name: Literal["repa"]
    encoder: Text
    encoder_weights: ChangesNothing[Text | None]
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


class BoundedGuidance(Settings):
    level_lo: NonNegativeFloat | None
    level_hi: NonNegativeFloat | None


class PathDrop(BoundedGuidance):
    name: Literal["path_drop"]
    cfg_scale: FiniteFloat


class Sparse(BoundedGuidance):
    name: Literal["sparse"]
    w: FiniteFloat
    r_strong: Fraction
    r_weak: Fraction
    r_strong_last: Fraction | None = None
    r_weak_last: Fraction | None = None
    checkpoint: CheckpointPath | None = None
    weights: Weights = "ema"

    @property
    def has_moving_ratios(self) -> bool:
        """Whether a ratio moves over the noise levels."""
        return (self.r_strong_last, self.r_weak_last) != (None, None)


class Autoguidance(BoundedGuidance):
    name: Literal["autoguidance"]
    checkpoint: CheckpointPath
    weights: Weights
    w: FiniteFloat


GuidanceSettings = Annotated[Disabled | CFG | Interval | PathDrop | Sparse | Autoguidance, Field(discriminator="name")]


def combinations(chosen_from: object) -> list[dict]:
    """Return every combination of one value per key: {a: [1, 2], b: 3} -> [{a: 1, b: 3}, {a: 2, b: 3}]."""
    if not isinstance(chosen_from, dict):  # the list that a run stores
        return chosen_from
    if empty := [key for key, values in chosen_from.items() if values == []]:
        raise UserError(f"{empty[0]}=[] lists no value")
    return [dict(zip(chosen_from, chosen)) for chosen in itertools.product(*map(as_list, chosen_from.values()))]


Guidances = Annotated[list[GuidanceSettings], BeforeValidator(combinations), Field(min_length=1)]  # keys may have lists of values


class Train(Settings):
    num_steps: ChangesReport[PositiveInt | None]  # `training.data.complete_lengths` computes lengths that are None
    batch_size: SameRun[PositiveInt]
    grad_accum_steps: ChangesNothing[PositiveInt]
    optimizer: SameState[Literal["adamw", "muon"]] = "adamw"  # a name in training.optimizers.OPTIMIZERS
    lr: ChangesWeights[PositiveFloat]
    warmup_steps: ChangesWeights[NonNegativeInt]
    schedule: ChangesWeights[Literal["constant", "cosine", "inverse_sqrt"]]
    betas: ChangesWeights[Annotated[list[Fraction], Field(min_length=2, max_length=2)]]
    weight_decay: ChangesWeights[NonNegativeFloat]
    grad_clip_norm: ChangesWeights[PositiveFloat | None]
    ema_decay: ChangesWeights[Fraction | None]
    ema_schedule: SameRun[Literal["warmup", "constant"]] = "warmup"
    ema_lengths: SameState[list[EMALength]]
    ema_snapshot_every: ChangesNothing[PositiveInt | None]
    precision: ChangesWeights[Precision]
    cuda_graphs: ChangesNothing[CUDAGraphs] = "none"
    activation_checkpointing: ChangesNothing[Literal["none", "blocks"]]
    activation_memory_budget: ChangesNothing[Annotated[float, Field(ge=0, le=1)]]
    log_every: ChangesNothing[PositiveInt]

    @model_validator(mode="after")
    def _check_schedule(self) -> Train:
        if self.schedule == "inverse_sqrt" and self.warmup_steps == 0:
            raise ValueError("schedule=inverse_sqrt decays from the end of the warm-up, so warmup_steps must be above 0")
        return self


class CheckpointSettings(Settings):
    every: PositiveInt | None
    keep_last: PositiveInt
    keep_every: NonNegativeInt | None


class SampleGrid(Settings):
    every: NonNegativeInt | None
    num_samples: Annotated[PositiveInt, Field(le=10**4)]  # one grid shows all samples


class Sampling(Settings):
    labels: Labels
    precision: Precision
    rounding: Rounding
    batch_size: PositiveInt
    autoencoder: AutoencoderSpec | None


class SharedEvaluationSettings(Settings):
    """The keys of the group evaluation that train.py and fid.py share."""

    num_samples: NumSamples
    first_seed: NonNegativeInt
    detector: OneOrMany[DetectorName]
    detector_weights: Text | None
    dinov2_weights: Text | None
    background: Colour | None
    reference: Text | None

    @property
    def all_detectors(self) -> list[str]:
        return as_list(self.detector)

    @property
    def owners_of_weights(self) -> set[str]:
        """The detectors that load `detector_weights`: every small-<set>, or Inception if there is none."""
        small = {name for name in self.all_detectors if name.startswith("small-")}
        return small or {"inception"} & {*self.all_detectors}


class EvaluationSettings(SharedEvaluationSettings):
    every: NonNegativeInt | None
    final_num_samples: NumSamples | None
    validation: Text | None

    def at_step(self, step: int, last_step: int | None) -> EvaluationSettings:
        """Return the settings of an evaluation after `step`, in a run that ends after `last_step`."""
        is_final = last_step is not None and step >= last_step and self.final_num_samples is not None
        return self.model_copy(update={"num_samples": self.final_num_samples}) if is_final else self


class Machine(Settings):
    compile: ChangesNothing[Compile]
    tf32: ChangesWeights[bool]
    cpu_threads: ChangesNothing[PositiveInt | None]


class Wandb(Settings):
    mode: Literal["disabled", "offline", "online"]
    project: Text


def validate_groups(raw: dict, **classes: type) -> dict[str, Any]:
    """Validate groups whose types follow from other keys."""
    fields = {name: (kind, ...) for name, kind in classes.items()}
    return dict(validate(raw, create_model("Groups", __base__=Settings, **fields)))


def check_backbone(model: Model) -> None:
    name, known = model.backbone, model.module.BACKBONES
    if name not in known:
        raise UserError(f"model.backbone={name} is not a backbone of model={model.name}{did_you_mean(name, known)}")


def build_diffusion_and_sampler(diffusion: Any, sampler: Any) -> dict[str, Any]:
    """Return the objects for the dictionaries of both groups. Their classes check the keys."""
    name = str(diffusion.get("name") if isinstance(diffusion, dict) else diffusion)
    if name not in DIFFUSIONS:
        raise UserError(f"diffusion.name={name} is none of {', '.join(DIFFUSIONS)}")
    diffusion_class = resolve_name(DIFFUSIONS[name])
    groups = {"diffusion": diffusion, "sampler": sampler}
    return validate_groups(groups, diffusion=diffusion_class, sampler=diffusion_class.Sampler)


# YAML has dictionaries for these two groups. `TrainConfig` makes them objects after it has validated all other keys, because the
# import of their classes takes seconds.
_BUILT_LATER = PlainValidator(lambda value: value)


class TrainConfig(Settings):
    name: ChangesNothing[FolderName]
    output_dir: ChangesNothing[Text]
    experiment: ChangesNothing[dict[str, Any] | None]  # see configs/experiment/bases/row.yaml
    seed: SameRun[Annotated[int, Field(ge=0, le=2**32 - 1)]]  # seed range of NumPy's global generator
    resume: ChangesNothing[Literal["auto", "changed", "never"]]
    init_from: SameRun[Text | None]
    init_state: SameRun[Literal["weights", "all"]]
    model: SameRun[AnyModel]
    data: Data
    diffusion: SameRun[Annotated[Diffusion, _BUILT_LATER]]
    alignment: SameState[Alignment]
    train: Train
    checkpoint: ChangesNothing[CheckpointSettings]
    sample_grid: ChangesNothing[SampleGrid]
    # A record of an evaluation has its own settings of the four groups from here on.
    sampler: ChangesNothing[Annotated[Sampler, _BUILT_LATER]]
    sampling: ChangesNothing[Sampling]
    guidance: ChangesNothing[Guidances]
    evaluation: ChangesNothing[EvaluationSettings]
    machine: Machine
    wandb: ChangesNothing[Wandb]

    @model_validator(mode="wrap")
    @classmethod
    def _validate(cls, raw: object, validate_keys: Callable[[object], TrainConfig]) -> TrainConfig:
        """Validate all keys, and then what needs torch: the name of the backbone, the diffusion and its sampler."""
        cfg = validate_keys(raw)
        check_backbone(cfg.model)
        return cfg.model_copy(update=build_diffusion_and_sampler(cfg.diffusion, cfg.sampler))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the network, if the settings of the latents are filled in."""
        return (self.data.input_size // self.model.sizes["patch_size"]) ** 2

    @property
    def is_evaluated(self) -> bool:
        """Whether the run evaluates samples or the validation loss. With data=custom, `every` may be None until the start."""
        is_possible = self.evaluation.reference or self.evaluation.validation
        return bool(is_possible) if self.evaluation.every is None else self.evaluation.every > 0

    def named(self, overrides: Sequence[str]) -> TrainConfig:
        """Name the run after the overridden keys, unless the user set a name (see `run_name`)."""
        name = run_name(self.name, overrides, flatten(self.model_dump()), roles_of(self))
        return self.model_copy(update={"name": name})
