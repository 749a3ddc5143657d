"""Run folders as they are on disk: unfinished, damaged or of another version, as far as they can be read.

No content of a file raises an error here. What cannot be read is listed in words, beside what can.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from PIL import Image
from yaml import YAMLError

from common.errors import UserError
from common.files import read_lines
from configs.schema import TrainConfig, flatten
from configs.settings import keys_of
from evaluations.suite import metric_name

METRICS, STARTS, CONFIG, RESULTS = "metrics.jsonl", "starts.jsonl", "config.yaml", "results.jsonl"
TRAINING_SERIES = ("loss", "steps_per_sec", "images_per_sec")
# What the figures of fid.py depend on, beside the checkpoint, the sample count and the guidance.
SAMPLER_SETTINGS = ("weights", "num_steps", "S_churn", "solver")
LARGEST_COUNT = 2**53  # larger numbers are damage: a float does not hold them exactly


@dataclass(frozen=True)
class Point:
    """One evaluation by fid.py: the settings of sampler and guidance, and figures by full name (fid5k/cfg1.5)."""

    step: int
    settings: dict[str, object]
    values: dict[str, float]


@dataclass
class Run:
    """What a run's folder holds.

    Attributes:
        config: values by dotted key, without experiment.*; keys that are younger than the run have their defaults.
        experiment: experiment.*, as far as it can be read.
        series: values by name and step: TRAINING_SERIES, and the figures of training and of fid.py with the run's own sampler.
        points: all evaluations by fid.py.
        starts: how training started and was resumed.
        grid: step and file of the last sample grid.
        problems: what could not be read.
    """

    path: Path
    config: dict[str, object]
    experiment: dict[str, object] = field(default_factory=dict)
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    starts: list[dict] = field(default_factory=list)
    grid: tuple[int, Path] | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def metrics(self) -> list[str]:
        """Full names of its figures."""
        return [name for name in self.series if "/" in name]

    @property
    def step(self) -> int:
        """The last recorded step."""
        return max(map(max, self.series.values()))

    @property
    def num_steps(self) -> int | None:
        """The step at which the run ends."""
        return self.config.get("train.num_steps")

    @property
    def is_finished(self) -> bool:
        return self.num_steps is not None and self.step >= self.num_steps

    @property
    def is_routed(self) -> bool:
        routes = self.config.get("model.routes")
        return isinstance(routes, list) and any(isinstance(route, dict) and route.get("selection_ratio") for route in routes)

    @property
    def images_per_sec(self) -> float | None:
        """Median over the training lines."""
        speeds = self.series.get("images_per_sec")
        return statistics.median(speeds.values()) if speeds else None

    @property
    def own_sampler(self) -> dict[str, object]:
        """The settings of training's own evaluations."""
        sampler = {key: self.config.get(f"diffusion.sampler.{key}") for key in SAMPLER_SETTINGS}
        sampler |= {"weights": "ema", "num_steps": self.config.get("eval.num_steps") or sampler["num_steps"]}
        return {key: value for key, value in sampler.items() if value is not None}

    @cached_property
    def line_hours(self) -> dict[int, float]:
        """Hours of training between each training line and the one before; steps_per_sec leaves out what is not training."""
        previous, hours = self.starts[0]["step"] if self.starts else 0, {}
        for step, speed in sorted(self.series.get("steps_per_sec", {}).items()):
            hours[step] = max(step - previous, 0) / speed / 3600 if speed > 0 else 0.0
            previous = step
        return hours

    @cached_property
    def hours(self) -> list[tuple[int, float]]:
        """(step, hours of training until there), sorted; empty without training lines."""
        points = list(zip(self.line_hours, accumulate(self.line_hours.values())))
        return [(0, 0.0), *points] if points else []

    @property
    def device_hours(self) -> float | None:
        """Hours times processes; None where a start does not say how many processes it had."""
        if not self.starts or not self.hours or any("num_processes" not in start for start in self.starts):
            return None
        first, total = self.starts[0], 0.0
        for step, hours in self.line_hours.items():  # of the last start before this step: a resume writes the later steps again
            total += hours * [one["num_processes"] for one in self.starts if one["step"] < step or one is first][-1]
        return total

    def hours_at(self, step: float) -> float | None:
        """Interpolated linearly between the training lines."""
        return interpolate(self.hours, step)


def machine_of(start: dict) -> str:
    return f"{start.get('num_processes', '?')} × {start.get('device', 'unknown device')}"


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """y at x, linear between points sorted by x; None outside them."""
    i = bisect_left(points, x, key=itemgetter(0))
    if i == len(points) or (i == 0 and points[0][0] != x):
        return None
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y1 if x == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


# ----------------------------------------------------------------------------------------------------------------------
# From disk.


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[str, list[str]]]:
    """All runs below the folders, and what could not be read, by path.

    A folder is a run if it holds config.yaml or metrics.jsonl. Results of fid.py, wherever they are below the folders, count
    for the run whose checkpoint they name. A run of imported weights has no other figures.
    """
    runs, problems, results = [], {}, []
    for path, files in _walk(folders):
        if RESULTS in files:
            results.append(path / RESULTS)
        if METRICS in files or CONFIG in files:
            try:
                runs.append(read_run(path))
            except UserError as e:
                problems[str(path)] = [str(e)]
    problems |= {str(file): found for file in results if (found := _add_points(file, runs))}
    for run in [run for run in runs if not run.series]:
        runs.remove(run)
        problems[str(run.path)] = ["; ".join([f"{METRICS} holds no figures yet", *run.problems])]
    return runs, problems | {str(run.path): run.problems for run in runs if run.problems}


def _walk(folders: Sequence[Path]) -> Iterator[tuple[Path, list[str]]]:
    seen = set()
    for root in folders:
        for path, inner, files in os.walk(root):
            if METRICS in files or CONFIG in files:  # of a run only the evaluations: its images and checkpoints can be many
                inner[:] = [name for name in inner if name == "evaluations"]
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            resolved = Path(path).resolve()
            if resolved not in seen:
                seen.add(resolved)
                yield Path(path), files


def read_run(path: Path) -> Run:
    """The run in a folder. Raises UserError if it cannot be shown."""
    try:
        stored = OmegaConf.to_container(OmegaConf.load(path / CONFIG), resolve=True)
    except FileNotFoundError:
        raise UserError(f"no {CONFIG}: it stopped before its first step, or another program wrote it") from None
    except (OSError, YAMLError, OmegaConfBaseException, ValueError) as e:
        raise UserError(f"{CONFIG} cannot be read: {' '.join(str(e).split())[:200]}") from e
    if not isinstance(stored, dict) or not isinstance(stored.get("train"), dict):
        raise UserError(f"{CONFIG} is not a configuration of train.py: it has no train.*")
    experiment = stored.pop("experiment", None)
    fields = {key: found[0] for key, found in keys_of(TrainConfig, stored).items()}
    defaults = {key: field.default for key, field in fields.items() if not field.is_required()}
    run = Run(path, defaults | flatten(stored))
    if isinstance(experiment, dict):
        run.experiment = _read_experiment(experiment, run.problems)
    for key in ("train.num_steps", "train.batch_size", "seed"):
        if not _is_count(run.config.get(key)):
            run.config.pop(key, None)
            run.problems.append(f"{CONFIG} has no {key}: of another version")
    for start in _json_lines(path / STARTS, run.problems, {"step": int}):
        count = start.get("num_processes", 1)
        if not _is_count(count) or count < 1:
            del start["num_processes"]
            run.problems.append(f"{STARTS}: num_processes={str(count)[:40]} is not a number of processes")
        run.starts.append(start)
    for line in _json_lines(path / METRICS, run.problems, {"step": int}):
        numbers = {key: value for key, value in line.items() if is_figure(value)}
        if len(numbers) < len(line):
            run.problems.append(f"{METRICS}, step {line['step']}: {', '.join(line.keys() - numbers)} not a finite number")
        for key, value in numbers.items():
            if key in TRAINING_SERIES or "/" in key:
                run.series.setdefault(key, {})[line["step"]] = value
    run.grid = _find_grid(path / "samples", run.problems)
    return run


def _read_experiment(stored: dict, problems: list[str]) -> dict[str, object]:
    """experiment.*: texts, and the paper's figures. Anything else is left out."""
    known = {}
    for key, value in stored.items():
        kind, words = (dict, "a mapping of metrics to figures") if key == "paper" else (str, "a text")
        if isinstance(value, kind):
            known[key] = {str(metric): one for metric, one in value.items() if is_figure(one)} if kind is dict else value
        elif value is not None:
            problems.append(f"experiment.{key} is not {words}, and is left out")
    return known


def _find_grid(folder: Path, problems: list[str]) -> tuple[int, Path] | None:
    """The last grid that is an image. Later ones that are not go to `problems`."""
    grids = {step: file for file in folder.glob("step_*.png") if (step := _step_in(file.stem)) is not None}
    for step, file in sorted(grids.items(), reverse=True):
        try:
            with Image.open(file) as image:
                image.load()
            return step, file
        except (OSError, SyntaxError, ValueError) as e:  # what PIL raises for files that are cut off or no images
            problems.append(f"{file.name} is not a readable image ({type(e).__name__})")
    return None


def _step_in(name: str) -> int | None:
    """400 of step_0000400."""
    match = re.fullmatch(r"step_(\d+)", name)
    return int(match.group(1)) if match else None


def is_figure(value: object) -> bool:
    return type(value) is float and math.isfinite(value) or _is_count(value)


def _is_count(value: object) -> bool:
    return type(value) is int and abs(value) < LARGEST_COUNT


def _json_lines(file: Path, problems: list[str], required: dict[str, type]) -> Iterator[dict]:
    """The lines of a .jsonl file that have the required values. The others go to `problems`, by number."""
    bad = []
    try:
        for number, line in read_lines(file):
            if line is None:
                bad.append(f"{number} (cut off or damaged)")
            elif all(type(line.get(key)) is kind for key, kind in required.items()) and _is_count(line.get("step", 0)):
                yield line
            else:
                bad.append(f"{number} (of another version)")
    except OSError as e:
        problems.append(f"{file.name} cannot be read: {e.strerror}")
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        problems.append(f"{file.name}: left out line {', '.join(bad[:3])}{more}")


def _add_points(file: Path, runs: Sequence[Run]) -> list[str]:
    """Add the results of fid.py in a file to their runs; returns what cannot be read."""
    problems: list[str] = []
    orphans: Counter[str] = Counter()
    for line in _json_lines(file, problems, {"point": dict, "metrics": dict}):
        point = line["point"]
        if not isinstance(point.get("checkpoint"), str):
            orphans["images on disk"] += 1
            continue
        folder = Path(point["checkpoint"])
        run, step = _run_of(folder, runs), _step_in(folder.name)
        num_samples, cfg_scale = point.get("num_samples"), point.get("cfg_scale", 1.0)
        if run is None or step is None or not _is_count(num_samples) or not is_figure(cfg_scale):
            orphans[str(folder)] += 1
            continue
        guidance = {key: value for key, value in point.items() if key.partition(".")[0] == "guidance"}
        words = cfg_scale
        if guidance:  # interval, sparse, ...: cfg_scale alone does not say which
            words = ",".join(str(value) for value in (*guidance.values(), point.get("cfg_scale")) if value is not None)
        figures = {
            metric_name(metric, num_samples, words): value for metric, value in line["metrics"].items() if is_figure(value)
        }
        sampler = {key: point[key] for key in SAMPLER_SETTINGS if key in point}
        run.points.append(Point(step, {"cfg_scale": cfg_scale, **guidance, **sampler}, figures))
        precisions = {"precision": "eval.precision", "detector_precision": "evaluation.precision"}
        own = run.own_sampler | {key: run.config.get(name, "fp32") for key, name in precisions.items()}  # training's own
        if all(point.get(key, value) == value for key, value in own.items()):
            for name, value in figures.items():
                run.series.setdefault(name, {}).setdefault(step, value)
    return problems + [f"{count} results of {what}, which is no run here" for what, count in orphans.items()]


def _run_of(checkpoint: Path, runs: Sequence[Run]) -> Run | None:
    """The run in whose folder a checkpoint is; of runs that were moved or copied here, the only one of its name."""
    if checkpoint.parent.name != "checkpoints":
        return None
    folder = checkpoint.parent.parent
    exact = [run for run in runs if run.path.resolve() == folder.resolve()]
    found = exact or [run for run in runs if run.name == folder.name]
    return found[0] if len(found) == 1 else None
