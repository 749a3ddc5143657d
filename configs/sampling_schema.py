"""Configuration schema of sample.py and fid.py, and what they store about their images.

The two commands have the groups sampler, sampling, guidance and machine of train.py, and fid.py also has evaluation. There, a
key that is null has the run's value, which `Overrides.complete` fills in. The keys weights and ema_length of sampling are only
there. The keys every, final_num_samples and validation of evaluation are only in train.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, Field, create_model

from common.errors import UserError
from common.interfaces import Sampler
from common.types import AutoencoderSpec, PositiveInt, Text
from configs.schema import (
    CheckpointPath,
    EMALength,
    EvaluationSettings,
    Guidances,
    GuidanceSettings,
    Labels,
    Machine,
    Precision,
    Rounding,
    Sampling,
    SharedEvaluationSettings,
    TrainConfig,
    Weights,
    combinations,
    validate_groups,
)
from configs.settings import OneOrMany, Settings, as_list, flatten, override

MAX_NUMBERS = 10**7  # maximum number of seeds or classes in one range


def parse_numbers(spec: str | int | list) -> list[int]:
    """Parse numbers and ranges: `[0-3,7]` -> [0, 1, 2, 3, 7]. Raises ValueError for invalid text and for repeated numbers."""
    numbers: list[int] = []
    for part in ",".join(map(str, as_list(spec))).split(","):
        ends = [end.strip() for end in part.split("-")]
        has_ends = len(ends) <= 2 and all(end.isdecimal() for end in ends)
        if not has_ends or not 0 <= int(ends[-1]) - int(ends[0]) < MAX_NUMBERS:
            raise ValueError(f"{spec!r:.60} is not a list of at most {MAX_NUMBERS} numbers and ranges such as [0-3,7]")
        numbers.extend(range(int(ends[0]), int(ends[-1]) + 1))
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(f"{spec!r:.60} is empty or repeats a number")
    return numbers


def list_entries(spec: object) -> list[int | str]:
    """List numbers and texts as the user wrote them: the number 2 is not the text "2", which may be the name of a class."""
    return [part if type(part) is int else str(part) for part in as_list(spec)]


Numbers = Annotated[list[int], BeforeValidator(parse_numbers)]
# `sampling.sample_command.class_numbers` looks up the entries.
Classes = Annotated[list[int | str], Field(min_length=1), BeforeValidator(list_entries)]


def or_none(name: str, settings_class: type[Settings], **further: object) -> type[Settings]:
    """Return a class `name` with the keys of another one and `further` keys, given by their types. All may be None."""
    hints = get_type_hints(settings_class, include_extras=True)
    types = {key: hints[key] for key in settings_class.model_fields} | further
    return create_model(name, __base__=Settings, **{key: (kind | None, ...) for key, kind in types.items()})


# The keys of groups that train.py has, too, where None stands for the run's value. Two keys of sampling choose the weights. For
# these, fid.py may list several values.
MachineOverrides = or_none("MachineOverrides", Machine)
EvaluationOverrides = or_none("EvaluationOverrides", SharedEvaluationSettings)
SamplingOverrides = or_none("SamplingOverrides", Sampling, weights=Weights, ema_length=EMALength)
SamplingSweep = or_none("SamplingSweep", Sampling, weights=OneOrMany[Weights], ema_length=OneOrMany[EMALength])


class Overrides(Settings):
    """What a command chooses in the groups of train.py, one value for each key. A key that is None has the run's value."""

    sampler: dict[str, Any]  # `sampler_of_run` checks these keys, because they depend on the run's diffusion
    sampling: SamplingOverrides
    guidance: GuidanceSettings | None = None
    machine: MachineOverrides

    def complete(self, run: TrainConfig, step: int, evaluation: EvaluationOverrides | None = None) -> TrainConfig:
        """Return the configuration of a run with the chosen values. This is where a key that is None gets the run's value.

        Args:
            step: Step of the run's checkpoint, on which the run's number of samples in an evaluation depends.
            evaluation: What the command chooses in the group evaluation.

        Raises UserError if the sampler of the run's diffusion does not accept the chosen settings.
        """
        values = {
            "sampler": sampler_of_run(run, self.sampler),
            "sampling": override(run.sampling, self.sampling),
            "evaluation": evaluation_of_run(run, step, evaluation),
            "machine": override(run.machine, self.machine),
        }
        return run.model_copy(update=values)


class SampleConfig(Overrides):
    checkpoint: CheckpointPath
    output: Text | None
    num_samples: PositiveInt | None
    seeds: Numbers | None
    classes: Classes | None
    npz: bool


class ImageSettings(Settings):
    """The settings.yaml of a folder of images: everything that determines an image except its seed. A new key needs a default."""

    checkpoint: str  # hash of the checkpoint's files
    weights: Weights
    ema_length: EMALength | None
    labels: Labels | None
    classes: list[int] | None
    autoencoder: AutoencoderSpec
    guidance: GuidanceSettings
    sampler: dict[str, Any]
    precision: Precision
    rounding: Rounding
    autoencoder_hash: str | None = None  # hash of its files if they are local


class FidConfig(Settings):
    checkpoint: OneOrMany[Text] | None
    checkpoints: Text | None
    images: Text | None
    convert_to_rgb: bool
    output: Text | None
    sampler: dict[str, Any]
    sampling: SamplingSweep
    guidance: Guidances | None = None
    machine: MachineOverrides
    evaluation: EvaluationOverrides

    def choices(self, run: TrainConfig) -> Iterator[Overrides]:
        """Yield every combination of the listed weights, lengths, guidances and sampler settings."""
        listed = combinations(dict(self.sampling)), self.guidance or run.guidance, combinations(self.sampler)
        for sampling, guidance, sampler in itertools.product(*listed):
            yield Overrides(sampler=sampler, sampling=SamplingOverrides(**sampling), guidance=guidance, machine=self.machine)

    def evaluation_of_images(self, number: int, background: str | None) -> SharedEvaluationSettings:
        """Return the group evaluation for `number` images on disk, with the background that they state."""
        nothing = dict.fromkeys(SharedEvaluationSettings.model_fields)
        usual = {"num_samples": number, "first_seed": 0, "detector": "inception", "background": background or "white"}
        return override(SharedEvaluationSettings(**nothing | usual), self.evaluation)

    def keys_of_sampling(self) -> list[str]:
        """Return the keys that are set and have no effect on images on disk."""
        groups = {
            "sampler": self.sampler,
            "sampling": self.sampling.model_dump(exclude={"batch_size"}),
            "guidance": self.guidance,
            "evaluation": self.evaluation.model_dump(include={"first_seed"}),
            "machine": self.machine.model_dump(include={"compile"}),
        }
        return [key for key, value in flatten(groups).items() if value not in (None, {})]


def sampler_of_run(run: TrainConfig, given: Mapping[str, Any]) -> Sampler:
    """Return the sampler of a run with the `given` settings. None stands for the run's value.

    Raises UserError if the sampler of the run's diffusion has no such setting, or does not accept its value.
    """
    if unknown := [key for key in given if not hasattr(run.sampler, key)]:
        names = ", ".join(vars(run.sampler))
        owner = f"the sampler of diffusion={run.diffusion.name}"
        raise UserError(f"sampler.{unknown[0]} is not a key of {owner}, which has {names}")
    values = vars(run.sampler) | {key: value for key, value in given.items() if value is not None}
    return validate_groups({"sampler": values}, sampler=type(run.sampler))["sampler"]


def evaluation_of_run(run: TrainConfig, step: int, given: EvaluationOverrides | None) -> EvaluationSettings:
    """Return the group evaluation as the run evaluates after `step`, with the `given` values."""
    of_run = run.evaluation.at_step(step, run.train.num_steps)
    values = {"background": of_run.background or "white"}  # runs of imported weights have none
    if override(of_run, given).owners_of_weights != of_run.owners_of_weights:
        values["detector_weights"] = None  # the run's file belongs to the run's detector
    return override(of_run.model_copy(update=values), given)
