"""Read runs from disk, including their configuration, starts, speed, and all figures from training and fid.py."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel

from checkpoints import store
from checkpoints.load import load_run_config
from checkpoints.run import is_renamed, present_starts, read_metrics
from common.errors import UserError
from common.files import read_lines
from common.images import walk
from common.types import FiniteFloat, NonNegativeInt
from configs.schema import TrainConfig
from configs.settings import validate
from evaluations.results import format_settings, guidance_fields, without_defaults

UNGUIDED = "none"
# Settings in fid.py results that `Measure.settings` omits or that `Run.add` formats.
OMITTED = ("checkpoint", "content", "num_samples", "detector", "reference", "autoencoder_hash")


class Measure(NamedTuple):
    """The quantity that a figure measures. Two figures are comparable only if all fields are equal."""

    metric: str  # a metric name, or `training loss`
    num_samples: int
    guidance: str  # guidance settings as text, or UNGUIDED
    # Sampler, weights and reference as text. The reference is a file name with the start of its hash. Lines of older versions
    # lack the name or the hash.
    settings: str

    def in_words(self) -> str:
        """Format the measure as text, such as `fid of 50,000 samples, cfg_scale 1.5`."""
        return f"{self.metric} of {self.num_samples:,} samples" + (f", {self.guidance}" if self.guidance != UNGUIDED else "")


LOSS = Measure("training loss", 0, UNGUIDED, "")


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


class CheckpointResult(BaseModel, strict=True):
    """The entries of a line of results.jsonl that the report needs."""

    checkpoint: str
    content: str
    num_samples: NonNegativeInt
    step: NonNegativeInt
    metrics: dict[str, FiniteFloat]


def check_result(line: dict) -> None:
    """Raise UserError if a line of results.jsonl is not a result of fid.py. Results of images on disk need no checkpoint."""
    if not all(isinstance(line.get(key), dict) for key in ("point", "shown", "metrics")):
        raise UserError("it is not a result of fid.py")
    if "checkpoint" in line["point"]:
        validate(line["point"] | {"step": line["shown"].get("step"), "metrics": line["metrics"]}, CheckpointResult)


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
        """Return the description of the run's row, which is empty if the run has no row. Earlier versions had rows in folders."""
        names = ("name", "baseline", "checkpoint_of")
        row = self.cfg.experiment or {}
        return row | {key: row[key].replace("/", "_") for key in names if row.get(key)}

    @property
    def changes_on_resume(self) -> tuple[str, ...]:
        """Return the settings that a resume changed, such as `at step 400: train.lr: 0.002 -> 0.0001`."""
        changes = (f"at step {start['step']}: {line}" for start in self.starts for line in start.get("changed", ()))
        return tuple(dict.fromkeys(changes))  # a run that is stopped before its next checkpoint resumes from the same one again

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
        """Return the fingerprint of the latents by the newest checkpoint, or None if no checkpoint is here."""
        for folder in reversed(store.list_steps(self.path / "checkpoints").values()):
            with contextlib.suppress(UserError):
                return store.read_data_hash(folder)
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

    def add(
        self, step: int, metrics: dict[str, float], num_samples: int, settings: dict, name: str | None, reference_hash: str | None
    ) -> None:
        """Add the figures of one evaluation. `settings` contains guidance (cfg_scale, guidance.*) and sampler.

        `name` and `reference_hash` are the file name and the hash of the reference, if they are known.
        """
        settings = without_defaults(settings)
        guidance = guidance_fields(settings)
        if "guidance.checkpoint" in guidance:  # runs with other seeds have their own checkpoints
            guidance["guidance.checkpoint"] = without_seed(str(guidance["guidance.checkpoint"]))
        reference = " ".join(filter(None, [name, reference_hash and reference_hash[:8]]))
        others = {key: value for key, value in sorted(settings.items()) if key not in (*guidance, *OMITTED)}
        others |= {"reference": reference} if reference else {}
        guidance_text = UNGUIDED if guidance == {"cfg_scale": 1.0} else format_settings(guidance)
        for metric, value in metrics.items():
            self.figures.setdefault(Measure(metric, num_samples, guidance_text, format_settings(others)), {})[step] = value


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[str, str]]:
    """Return all runs in the folders, sorted by path, and the reason for each path that was left out.

    Each fid.py result in the folders is added to the run whose checkpoint it evaluated.
    """
    runs, problems = [], {}
    for file in find_files(folders, "config.yaml"):
        try:
            if file.parent.parent.name != "checkpoints":
                runs.append(read_run(file.parent))
        except UserError as e:
            problems[str(file)] = str(e).replace(str(file), "it", 1)
    files = [file for file in find_files(folders, "results.jsonl") if not is_renamed(file.parent)]
    results = {file: [line for line in read_lines(file, check_result) if "checkpoint" in line["point"]] for file in files}
    # fid.py's older results have only a hash that also covers the modification times of a folder's images.
    hashes = {
        line["point"].get("reference"): line["about"]["reference_hash"]
        for lines in results.values()
        for line in lines
        if "reference_hash" in line.get("about", {})
    }
    for file, lines in results.items():
        if orphans := add_results(file, lines, runs, hashes):
            problems[str(file)] = f"results of {'; '.join(sorted(orphans))}"
    problems |= {str(run.path): "no figures yet" for run in runs if not run.figures}
    return [run for run in runs if run.figures], problems


def find_files(folders: Sequence[Path], name: str) -> list[Path]:
    """Return a sorted list of all files with this name in the folders, without duplicates. Links to folders are followed."""
    return sorted({(folder / file).resolve() for folder in folders for file, entry in walk(folder, {}) if entry.name == name})


def read_run(path: Path) -> Run:
    """Read the run in a folder."""
    starts = list(read_lines(path / "starts.jsonl", partial(validate, kind=StartLine)))
    run, lines = Run(path, load_run_config(path), present_starts(starts)), read_metrics(path / "metrics.jsonl")
    for line in lines["training"]:
        run.speeds[line["step"]] = line["steps_per_sec"]
        if isinstance(images := line.get("images_seen"), int):
            run.image_offset = images - line["step"] * run.cfg.train.batch_size
        run.figures.setdefault(LOSS, {})[line["step"]] = line["loss"]
    for line in lines["evaluation"]:
        # The run's configuration has these two settings, too, so that they distinguish experiments anyway.
        settings = {key: x for key, x in line.get("settings", {}).items() if key not in ("rounding", "autoencoder")}
        point = guidance_fields(line) | settings
        run.add(line["step"], line["metrics"], line["num_samples"], point, point.get("reference"), line.get("reference_hash"))
    return run


def add_results(file: Path, lines: Sequence[dict], runs: Sequence[Run], hashes: Mapping[str, str]) -> set[str]:
    """Add the fid.py results in a file to their runs. Return text about the runs to which the remaining results belong.

    `hashes` maps fid.py's hash of a reference to train.py's hash, which does not cover modification times.

    Checkpoint hashes identify runs, even if a run folder was moved. If no hash matches, the function uses the run folder that the
    result names, or else the run folder that contains the file, unless this run has another checkpoint at the step. The file's
    folder counts only for the run with this name, or if all results in the file name the same run.
    """
    named_runs = [Path(line["point"]["checkpoint"]).resolve().parent.parent for line in lines]
    orphans, own = set(), file.parent.parent
    for line, named_run in zip(lines, named_runs):
        point, step = line["point"], line["shown"]["step"]
        matches = [run for run in runs if point["content"].startswith(tuple(run.checkpoint_hashes.values()))]
        places = [named_run, own] if named_run.name == own.name or len({*named_runs}) == 1 else [named_run]
        candidates = [run for place in places for run in runs if run.path == place]
        matches = matches or [run for run in candidates if step not in run.checkpoint_hashes][:1]
        name, reference = line.get("about", {}).get("reference"), point.get("reference")
        for run in matches:  # several matches are copies of one run
            run.add(step, line["metrics"], point["num_samples"], point, name, hashes.get(reference, reference))
        if not matches:
            is_here = any(run.path == named_run for run in runs)
            orphans.add(f"{named_run}, " + (f"for another checkpoint at step {step}" if is_here else "which is no run here"))
    return orphans


def without_seed(name: str) -> str:
    return re.sub(r"[-_.]*seed[-_.=]*\d+", "", name)
