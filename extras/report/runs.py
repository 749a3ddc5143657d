"""What runs left on disk: configurations, figures, starts and grids."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from checkpoints import store
from common.errors import UserError
from common.files import read_lines
from configs.settings import flatten
from evaluations.results import in_words

UNGUIDED = "none"
START_KEYS = {"step", "time", "command", "commit", "modified", "device", "num_processes", "torch"}
NEEDED = {"experiment", "seed", "output_dir", "data.name", "model.routes", "train.num_steps", "train.batch_size"}
# Of a point of fid.py, what a measure says elsewhere, and what it says only where it has another value.
ELSEWHERE = ("checkpoint", "content", "num_samples", "detector")
DEFAULTS = {"labels": "random", "first_seed": 0}


class Measure(NamedTuple):
    """What a figure is. Two figures can be compared only if all of this is the same."""

    metric: str  # a name in the table of metrics, or `training loss`
    num_samples: int
    guidance: str  # in words; UNGUIDED for none
    # Sampler, detector and reference, in words. Training names the reference's file and fid.py its hash: these stay apart.
    how: str

    def in_words(self) -> str:
        """fid of 50,000 samples, cfg_scale 1.5."""
        return f"{self.metric} of {self.num_samples:,} samples" + (f", {self.guidance}" if self.guidance != UNGUIDED else "")


LOSS = Measure("training loss", 0, UNGUIDED, "")


@dataclass
class Run:
    """What a run's folder holds."""

    path: Path
    config: dict  # values by dotted key
    row: dict  # experiment.* of the configuration; empty without a row
    starts: list[dict]  # the lines of starts.jsonl
    speeds: dict[int, float] = field(default_factory=dict)  # steps per second by step, of the lines of training
    figures: dict[Measure, dict[int, float]] = field(default_factory=dict)  # by measure and step, LOSS among them
    grid: Path | None = None  # the last sample grid

    @property
    def step(self) -> int:
        """The last step that has a figure."""
        return max(map(max, self.figures.values()))

    @cached_property
    def identities(self) -> list[str]:
        """Those of its checkpoints (`checkpoints.store.identity`)."""
        folders = store.list_steps(self.path / "checkpoints").values()
        return [store.identity(folder) for folder in folders if (folder / store.MANIFEST).exists()]

    @property
    def images_per_sec(self) -> float:
        """Median over the lines of training; NaN without any."""
        return statistics.median(self.speeds.values()) * self.config["train.batch_size"] if self.speeds else np.nan

    @cached_property
    def clock(self) -> tuple[list[int], list[float]]:
        """(steps of the lines of training, hours of training until each), without checkpoints, grids and evaluations."""
        steps = [self.starts[0]["step"] if self.starts else 0, *self.speeds]
        hours = ((step - before) / speed / 3600 for before, (step, speed) in zip(steps, self.speeds.items()))
        return steps, [0.0, *accumulate(hours)]

    def hours_at(self, step: float) -> float:
        """Interpolated linearly between the lines of training; NaN beyond them."""
        return float(np.interp(step, *self.clock, left=np.nan, right=np.nan))

    def agrees_with(self, other: Run) -> bool:
        """Whether both have figures of the same steps, and all of these are equal."""
        pairs = [
            (value, other.figures[measure][step])
            for measure, values in self.figures.items()
            for step, value in values.items()
            if step in other.figures.get(measure, ())
        ]
        return bool(pairs) and all(value == theirs for value, theirs in pairs)

    def add(self, step: int, metrics: dict, num_samples: int, point: dict) -> None:
        """Keep the figures of one evaluation; `point` holds its guidance (cfg_scale, guidance.*) and how it was made."""
        guidance = {key: value for key, value in point.items() if key.partition(".")[0] in ("cfg_scale", "guidance")}
        how = {key: value for key, value in point.items() if key not in (*guidance, *ELSEWHERE)}
        how = {key: value for key, value in how.items() if value not in (None, DEFAULTS.get(key))}
        words = UNGUIDED if guidance == {"cfg_scale": 1.0} else in_words(guidance)
        for metric, value in metrics.items():
            if math.isfinite(value):
                self.figures.setdefault(Measure(metric, num_samples, words, in_words(how)), {})[step] = value


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[str, str]]:
    """All runs below the folders, sorted, and why others could not be read, by file.

    Results of fid.py, wherever they are below the folders, count for the run whose checkpoint they name.
    """
    runs, problems = [], {}
    for file in find_files(folders, "config.yaml"):
        try:
            if file.parent.parent.name != "checkpoints":
                runs.append(read_run(file.parent))
        except UserError as e:
            problems[str(file)] = str(e)
    for file in find_files(folders, "results.jsonl"):
        if orphans := add_results(file, runs):
            problems[str(file)] = f"results of {', '.join(sorted(orphans))}, which is no run here"
    problems |= {str(run.path): "no figures yet" for run in runs if not run.figures}
    return [run for run in runs if run.figures], problems


def find_files(folders: Sequence[Path], name: str) -> list[Path]:
    """The files of this name below the folders, each once."""
    return sorted({file.resolve() for folder in folders for file in folder.rglob(name)})


def read_run(path: Path) -> Run:
    """The run in a folder. Raises UserError if its configuration is none of train.py."""
    try:
        stored = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
    except (OSError, YAMLError, OmegaConfBaseException) as e:
        raise UserError(f"cannot be read: {' '.join(str(e).split())}") from e
    config = flatten(stored) if isinstance(stored, dict) else {}
    if missing := NEEDED - config.keys():
        raise UserError(f"not a configuration of train.py: without {', '.join(sorted(missing))}")
    starts = [line for line in read_lines(path / "starts.jsonl") if line.keys() >= START_KEYS]
    run = Run(path, config, config.pop("experiment") or {}, starts)
    for line in read_lines(path / "metrics.jsonl"):
        with contextlib.suppress(KeyError):  # a line that train.py did not write
            if "metrics" in line:
                run.add(line["step"], line["metrics"], line["num_samples"], {"cfg_scale": line["cfg_scale"], **line["how"]})
            elif "loss" in line:
                run.speeds[line["step"]] = line["steps_per_sec"]
                run.figures.setdefault(LOSS, {})[line["step"]] = line["loss"]
    run.grid = max((path / "samples").glob("step_*.png"), default=None)
    return run


def add_results(file: Path, runs: Sequence[Run]) -> set[str]:
    """Add the results of fid.py in a file to their runs; returns the folders of checkpoints that belong to no run."""
    orphans = set()
    for line in read_lines(file):
        point = line.get("point")
        if not isinstance(point, dict) or not isinstance(point.get("checkpoint"), str) or not {"shown", "metrics"} <= line.keys():
            continue  # images on disk, or a file of another project
        folder = Path(point["checkpoint"]).resolve().parent.parent
        found = [run for run in runs if point.get("content", "").startswith(tuple(run.identities))]  # wherever it is now
        if not found:  # the checkpoint is gone: a run that was moved kept its name, and one that was renamed holds its results
            alike = [run for run in runs if run.path == folder] or [run for run in runs if run.path.name == folder.name]
            found = alike or [run for run in runs if run.path == file.parent.parent]
            found = found if len(found) == 1 else []
        for run in found:  # several are copies
            run.add(line["shown"]["step"], line["metrics"], point["num_samples"], point)
        if not found:
            orphans.add(str(folder))
    return orphans
