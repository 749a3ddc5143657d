"""Read runs from disk, including their configuration, starts, speed, and all figures from training and fid.py."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel

from checkpoints import store
from checkpoints.checkpoint import read_config
from checkpoints.run import is_renamed, present_starts, read_checked_lines, read_metrics
from common.errors import UserError
from common.images import walk
from common.types import NonNegativeInt
from configs.schema import TrainConfig
from evaluations.record import EvaluationRecord, read_records
from evaluations.tables import format_settings
from latents.autoencoders import SD_VAE

UNGUIDED = "none"
# Settings of records that `Measure.other_settings` omits or that `Run.add` formats.
OMITTED = ("num_samples", "detector", "reference_hash", "autoencoder", "autoencoder_hash", "ema_hash")
USUAL_AUTOENCODERS = (SD_VAE, "identity")  # measures do not name them


Items = tuple[tuple[str, object], ...]  # settings that can be compared and hashed


class Measure(NamedTuple):
    """The quantity that a figure measures. Two figures are comparable only if all fields are equal."""

    metric: str  # a metric name, or `training loss`
    num_samples: int
    guidance_settings: Items
    other_settings: Items  # sampler, weights, autoencoder and reference, which is a file name with the start of its hash

    @property
    def guidance(self) -> str:
        """The guidance settings as text, or UNGUIDED."""
        is_unguided = self.guidance_settings in ((), (("cfg_scale", 1.0),))
        return UNGUIDED if is_unguided else format_settings(dict(self.guidance_settings))

    @property
    def measured_with(self) -> str:
        """The other settings as text."""
        return format_settings(dict(self.other_settings))

    def in_words(self) -> str:
        """Format the measure as text, such as `fid of 50,000 samples, cfg_scale 1.5`."""
        return f"{self.metric} of {self.num_samples:,} samples" + (f", {self.guidance}" if self.guidance != UNGUIDED else "")


LOSS = Measure("training loss", 0, (), ())


class StartLine(BaseModel, strict=True):
    """A line of starts.jsonl."""

    step: NonNegativeInt
    time: str
    command: str
    commit: str | None
    modified: bool | None
    device: str
    num_processes: int
    torch: str
    changed: list[str] = []


@dataclass
class Run:
    """The contents of a run folder."""

    path: Path
    cfg: TrainConfig
    starts: list[dict]  # the lines of starts.jsonl
    speeds: dict[int, float] = field(default_factory=dict)  # steps per second by step, from the training lines
    image_offset: int = 0  # images seen beyond step * batch_size, after init_state=all from a run with another batch size
    figures: dict[Measure, dict[int, float]] = field(default_factory=dict)  # values by measure and step, including LOSS

    @property
    def row(self) -> dict:
        """Return the description of the run's row, which is empty if the run has no row."""
        return self.cfg.experiment or {}

    @property
    def changes_on_resume(self) -> tuple[str, ...]:
        """Return the settings that a resume changed, such as `at step 400: train.lr: 0.002 -> 0.0001`.

        A start that made no figure, or whose steps a later start repeated, changed nothing that the report shows.
        """
        ends = [start["step"] for start in self.starts[1:]] + [self.step]
        counted = [start for i, start in enumerate(self.starts) if start["step"] < min(ends[i:])]
        return tuple(f"at step {start['step']}: {line}" for start in counted for line in start.get("changed", ()))

    @property
    def step(self) -> int:
        """Return the last step that has a figure."""
        return max(map(max, self.figures.values()))

    @cached_property
    def checkpoint_hashes(self) -> dict[int, str]:
        """Return the hash of each checkpoint in the run folder by step, as computed by `checkpoints.store.hash_checkpoint`."""
        hashes = {}
        for step, folder in store.list_steps(self.path / "checkpoints").items():
            with contextlib.suppress(UserError):  # it has no manifest, or a running trainer has removed it
                hashes[step] = store.hash_checkpoint(folder)
        return hashes

    @cached_property
    def data_hash(self) -> str | None:
        """Return the hash of the latents by the newest checkpoint, or None if no checkpoint is here."""
        for folder in reversed(store.list_steps(self.path / "checkpoints").values()):
            with contextlib.suppress(UserError):
                return store.read_state(folder).get("data")
        return None

    @cached_property
    def clock(self) -> tuple[list[int], list[float]]:
        """Return the logged steps and the training hours until each step, excluding checkpoints, grids and evaluations."""
        steps = [self.starts[0]["step"] if self.starts else 0, *self.speeds]
        hours = ((step - before) / speed / 3600 for before, (step, speed) in zip(steps, self.speeds.items()))
        return steps, [0.0, *accumulate(hours)]

    def hours_at(self, step: float) -> float:
        """Return the training hours until a step, interpolated between logged steps. Steps outside the logged range give NaN."""
        return float(np.interp(step, *self.clock, left=np.nan, right=np.nan))

    def add(self, record: EvaluationRecord) -> None:
        """Add the figures of an evaluation of this run."""
        settings = record.comparable_settings
        guidance = {key: value for key, value in settings.items() if key in record.guidance and key != "guidance.checkpoint_hash"}
        others = {key: value for key, value in sorted(settings.items()) if key not in (*record.guidance, *OMITTED)}
        # Local files may lie at other paths on other machines, so their hash names them.
        autoencoder = settings.get("autoencoder_hash", settings.get("autoencoder", SD_VAE))
        others |= {} if autoencoder in USUAL_AUTOENCODERS else {"autoencoder": autoencoder}
        name, digest = record.settings.get("reference"), settings.get("reference_hash")
        others |= {"reference": f"{name} {digest[:8]}"} if name and digest else {}
        if weak := record.guidance.get("guidance.checkpoint"):  # runs with other seeds have their own checkpoints
            guidance["guidance.checkpoint"] = without_seed(str(weak))
        for metric, value in record.metrics.items():
            measure = Measure(metric, settings["num_samples"], tuple(guidance.items()), tuple(others.items()))
            self.figures.setdefault(measure, {})[record.step] = value


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[str, str]]:
    """Return all runs in the folders, sorted by path, and the reason for each path that was left out.

    Each record of an evaluation in the folders is added to the run that it evaluated.
    """
    runs = []
    problems = {}
    for file in find_files(folders, "config.yaml"):
        try:
            if file.parent.parent.name != "checkpoints":
                runs.append(read_run(file.parent))
        except UserError as e:
            problems[str(file)] = str(e).replace(str(file), "it", 1)
    for file in find_files(folders, "results.jsonl"):
        if not is_renamed(file.parent):
            records = [record for record in read_records(file) if record.step is not None]
            if orphans := add_records(file, records, runs):
                problems[str(file)] = f"results of {'; '.join(sorted(orphans))}"
    problems |= {str(run.path): "no figures yet" for run in runs if not run.figures}
    return [run for run in runs if run.figures], problems


def find_files(folders: Sequence[Path], name: str) -> list[Path]:
    """Return a sorted list of all files with this name in the folders, without duplicates. Links to folders are followed."""
    return sorted({(folder / file).resolve() for folder in folders for file, entry in walk(folder, {}) if entry.name == name})


def read_run(path: Path) -> Run:
    """Read the run in a folder."""
    starts = read_checked_lines(path / "starts.jsonl", StartLine)
    run = Run(path, read_config(path), present_starts(starts))
    for line in read_metrics(path / "metrics.jsonl"):
        run.speeds[line["step"]] = line["steps_per_sec"]
        if isinstance(images := line.get("images_seen"), int):
            run.image_offset = images - line["step"] * run.cfg.train.batch_size
        run.figures.setdefault(LOSS, {})[line["step"]] = line["loss"]
    return run


def add_records(file: Path, records: Sequence[EvaluationRecord], runs: Sequence[Run]) -> set[str]:
    """Add the records in a file to their runs. Return text about the runs to which the remaining records belong.

    The hash of a checkpoint identifies its run, even if the folder was moved. A record of a checkpoint that is gone belongs to
    the run in whose folder the file lies, or else to the only run with its name, unless it has another checkpoint at the step.
    """
    orphans = set()
    folder = file.parent.parent
    own = [run for run in runs if run.path == folder] if file.parent.name == "evaluations" else []
    for record in records:
        named = own or [run for run in runs if run.path.name == record.run]
        if record.checkpoint is None:
            matches = own
        else:
            matches = [run for run in runs if record.checkpoint in run.checkpoint_hashes.values()]
            if not matches and len(named) == 1 and record.step not in named[0].checkpoint_hashes:
                matches = named
        for run in matches:  # several matches are copies of one run
            run.add(record)
        if not matches:
            problem = f"for another checkpoint at step {record.step}" if named else "which is no run here"
            orphans.add(f"{record.run}, {problem}")
    return orphans


def without_seed(name: str) -> str:
    return re.sub(r"[-_.]*seed[-_.=]*\d+", "", name)
