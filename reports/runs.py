"""Reading runs as they are on disk: unfinished, torn or written by another version, as far as they can be read.

Nothing here raises for what a file holds; what cannot be read is said in words, beside what can.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from PIL import Image
from yaml import YAMLError

from evaluations.suite import metric_name
from setup.schema import flatten

METRICS, STARTS, CONFIG, RESULTS = "metrics.jsonl", "starts.jsonl", "config.yaml", "results.jsonl"
# Of a point of fid.py: what its figures depend on beside the checkpoint, the sample count and the guidance.
SAMPLER_SETTINGS = ("weights", "num_steps", "S_churn", "solver")
# Numbers beyond this are damage: float and JSON readers of other languages do not hold them.
LARGEST_COUNT = 2**53
_STEP_IN_NAME = re.compile(r"step_(\d+)$")


@dataclass(frozen=True)
class Point:
    """One evaluation by fid.py.

    Attributes:
        settings: what it was sampled with, cfg_scale among them.
        values: figures under their full names, fid5k/cfg1.5.
    """

    step: int
    settings: dict[str, object]
    values: dict[str, float]


@dataclass
class Run:
    """A run's folder.

    Attributes:
        config: its keys with dots, without experiment.*.
        experiment: name, table, paper, source, differs and baseline, as far as they are there.
        lines: training lines of metrics.jsonl by step.
        evaluations: figures by step, of training itself and of fid.py with the run's own sampler.
        points: all of fid.py.
        starts: how training started, and went on.
        grid: the last sample grid, with its step.
        problems: what could not be read.
    """

    path: Path
    config: dict[str, object]
    experiment: dict[str, object]
    lines: dict[int, dict]
    evaluations: dict[int, dict[str, float]]
    points: list[Point] = field(default_factory=list)
    starts: list[dict] = field(default_factory=list)
    grid: tuple[int, Path] | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def step(self) -> int:
        """The last step that is on record."""
        return max([*self.lines, *self.evaluations], default=0)

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
    def images_seen(self) -> int | None:
        batch_size = self.config.get("train.batch_size")
        return self.step * batch_size if batch_size else None

    @property
    def images_per_sec(self) -> float | None:
        """Median over the lines."""
        speeds = sorted(line["images_per_sec"] for line in self.lines.values() if "images_per_sec" in line)
        return (speeds[len(speeds) // 2] + speeds[(len(speeds) - 1) // 2]) / 2 if speeds else None

    @cached_property
    def hours(self) -> dict[int, float]:
        """Hours of training until each step, without checkpoints, grids and evaluations (steps_per_sec leaves those out)."""
        return self._accumulated(lambda step: 1)

    @cached_property
    def device_hours(self) -> float | None:
        """Hours times processes; None where a start is not on record."""
        if not self.starts or not self.hours or any("num_processes" not in start for start in self.starts):
            return None
        return max(self._accumulated(self._num_processes).values(), default=None)

    def _accumulated(self, num_devices) -> dict[int, float]:
        total, previous, hours = 0.0, self.starts[0].get("step", 0) if self.starts else 0, {}
        for step, line in sorted(self.lines.items()):
            if line.get("steps_per_sec", 0) > 0:
                total += num_devices(step) * max(step - previous, 0) / line["steps_per_sec"] / 3600
            hours[step] = total
            previous = step
        return hours

    def _num_processes(self, step: int) -> int:
        """Of the start that made this step: the last one from an earlier step, since a resume writes later steps again."""
        return [start["num_processes"] for start in self.starts if start.get("step", 0) < step or start is self.starts[0]][-1]

    def hours_at(self, step: int) -> float | None:
        """Linear between the lines of metrics.jsonl."""
        return interpolate([(0, 0.0), *self.hours.items()] if 0 not in self.hours else list(self.hours.items()), step)


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """y at x, linear between points sorted by x; None outside them."""
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return points[0][1] if len(points) == 1 and points[0][0] == x else None


# ----------------------------------------------------------------------------------------------------------------------
# From disk.


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], dict[str, list[str]]]:
    """All runs below the folders, and by path what could not be read.

    A folder is a run when it holds config.yaml or metrics.jsonl. Results of fid.py count for the run whose checkpoint they
    name, wherever below the folders they are.
    """
    runs, problems, results = [], {}, []
    for path, files in _walk(folders):
        if RESULTS in files:
            results.append(path / RESULTS)
        if METRICS not in files and CONFIG not in files:
            continue
        run, reason = read_run(path)
        if run is None:
            problems[str(path)] = [reason]
        else:
            runs.append(run)
    for file in results:
        for problem in _add_points(file, runs):
            problems.setdefault(str(file), []).append(problem)
    for run in runs:
        if run.problems:
            problems[str(run.path)] = run.problems
    return runs, problems


def _walk(folders: Sequence[Path]) -> Iterator[tuple[Path, list[str]]]:
    seen = set()
    for root in folders:
        for path, inner, files in os.walk(root):
            if METRICS in files or CONFIG in files:  # of a run only the evaluations; its images and checkpoints can be many
                inner[:] = [name for name in inner if name == "evaluations"]
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            resolved = Path(path).resolve()
            if resolved not in seen:
                seen.add(resolved)
                yield Path(path), files


def read_run(path: Path) -> tuple[Run | None, str]:
    """(run, ""), or (None, why it cannot be shown)."""
    try:
        stored = OmegaConf.to_container(OmegaConf.load(path / CONFIG), resolve=True)
    except FileNotFoundError:
        return None, f"no {CONFIG}: it stopped before its first step, or another program wrote it"
    except (OSError, YAMLError, OmegaConfBaseException, ValueError) as e:
        return None, f"{CONFIG} cannot be read: {' '.join(str(e).split())[:200]}"
    if not isinstance(stored, dict) or not isinstance(stored.get("train"), dict):
        return None, f"{CONFIG} is not a configuration of train.py: it has no train.*"
    experiment = stored.pop("experiment", None)
    run = Run(path, flatten(stored), {}, {}, {})
    if isinstance(experiment, dict):
        run.experiment = _known_experiment(experiment, run.problems)
    for key in ("train.num_steps", "train.batch_size", "seed"):
        if not _is_count(run.config.get(key)):
            run.config.pop(key, None)
            run.problems.append(f"{CONFIG} has no {key}: of another version")
    for start in _json_lines(path / STARTS, run.problems, {"step": int}):
        if "num_processes" in start and not (_is_count(start["num_processes"]) and start["num_processes"] > 0):
            run.problems.append(f"{STARTS}: num_processes={str(start.pop('num_processes'))[:40]} is not a number of processes")
        run.starts.append(start)
    lines = list(_json_lines(path / METRICS, run.problems, {"step": int}))
    for line in lines:
        numbers = {key: value for key, value in line.items() if is_figure(value)}
        if len(numbers) < len(line):
            run.problems.append(f"{METRICS}, step {line['step']}: {', '.join(line.keys() - numbers)} not a finite number")
        if "loss" in line:
            run.lines[line["step"]] = numbers
        figures = {key: value for key, value in numbers.items() if "/" in key}
        if figures:
            run.evaluations.setdefault(line["step"], {}).update(figures)
    if not run.lines and not run.evaluations:
        return None, "; ".join([f"{METRICS} holds no figures yet", *run.problems])
    run.grid = newest_grid(path / "samples", run.problems)
    return run, ""


def _known_experiment(stored: dict, problems: list[str]) -> dict[str, object]:
    """experiment.*: texts, and the paper's figures; anything else is left out."""
    known = {}
    for key, value in stored.items():
        if isinstance(value, str) and key != "paper":
            known[key] = value
        elif key == "paper" and isinstance(value, dict):
            known[key] = {str(metric): figure for metric, figure in value.items() if is_figure(figure)}
        elif value is not None:
            what = "a mapping of metrics to figures" if key == "paper" else "a text"
            problems.append(f"experiment.{key} is not {what}, and is left out")
    return known


def newest_grid(folder: Path, problems: list[str]) -> tuple[int, Path] | None:
    """The last grid that is an image; what is wrong with later ones goes to `problems`."""
    grids = {int(match.group(1)): file for file in folder.glob("step_*.png") if (match := _STEP_IN_NAME.search(file.stem))}
    for step, file in sorted(grids.items(), reverse=True):
        try:
            with Image.open(file) as image:
                image.load()
            return step, file
        except (OSError, SyntaxError, ValueError) as e:  # what PIL raises for files that are cut off or no images
            problems.append(f"{file.name} is not a readable image ({type(e).__name__})")
    return None


def is_figure(value: object) -> bool:
    return type(value) is float and math.isfinite(value) or type(value) is int and abs(value) < LARGEST_COUNT


def _is_count(value: object) -> bool:
    return type(value) is int and abs(value) < LARGEST_COUNT


def _json_lines(file: Path, problems: list[str], required: dict[str, type]) -> Iterator[dict]:
    """The objects of a .jsonl file that have the required values; what is wrong with the others goes to `problems`."""
    if not file.exists():
        return
    bad = []
    try:
        text = file.read_text(errors="replace")
    except OSError as e:
        problems.append(f"{file.name} cannot be read: {e.strerror}")
        return
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            value = json.loads(line)
        except ValueError:
            bad.append(f"{number} (cut off or damaged)")
            continue
        fits = isinstance(value, dict) and all(type(value.get(key)) is kind for key, kind in required.items())
        if fits and ("step" not in required or _is_count(value["step"])):
            yield value
        else:
            bad.append(f"{number} (of another version)")
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        problems.append(f"{file.name}: left out line {', '.join(bad[:3])}{more}")


def _add_points(file: Path, runs: Sequence[Run]) -> list[str]:
    """Give the results of fid.py to the runs whose checkpoints they name; returns what is wrong with the others."""
    problems: list[str] = []
    orphans: dict[str, int] = {}
    for line in _json_lines(file, problems, {"point": dict, "metrics": dict}):
        point, metrics = line["point"], {name: value for name, value in line["metrics"].items() if is_figure(value)}
        if not isinstance(point.get("checkpoint"), str):
            orphans["images on disk"] = orphans.get("images on disk", 0) + 1
            continue
        folder = Path(point["checkpoint"])
        run, match = _run_of(folder, runs), _STEP_IN_NAME.search(folder.name)
        readable = _is_count(point.get("num_samples")) and is_figure(point.get("cfg_scale", 1.0))
        if run is None or match is None or not readable:
            orphans[str(folder)] = orphans.get(str(folder), 0) + 1
            continue
        step, cfg_scale = int(match.group(1)), point.get("cfg_scale", 1.0)
        guided = {key: value for key, value in point.items() if key == "guidance" or key.startswith("guidance.")}
        settings = {"cfg_scale": cfg_scale, **guided, **{key: point[key] for key in SAMPLER_SETTINGS if key in point}}
        values = {metric_name(metric, point["num_samples"], cfg_scale): value for metric, value in metrics.items()}
        if guided:  # interval, sparse, ...: cfg_scale alone does not say which
            words = ",".join(
                str(value) for value in {**guided, "cfg_scale": point.get("cfg_scale")}.values() if value is not None
            )
            values = {f"{name.partition('/')[0]}/{words}": value for name, value in values.items()}
        run.points.append(Point(step, settings, values))
        if _is_runs_own_sampler(point, run):
            run.evaluations[step] = values | run.evaluations.get(step, {})
    problems += [f"{count} results of {what}, which is no run here" for what, count in orphans.items()]
    return problems


def _run_of(checkpoint: Path, runs: Sequence[Run]) -> Run | None:
    if checkpoint.parent.name != "checkpoints":
        return None
    folder = checkpoint.parent.parent
    exact = [run for run in runs if run.path.resolve() == folder.resolve()]
    named = exact or [run for run in runs if run.name == folder.name]  # runs that were moved or copied here
    return named[0] if len(named) == 1 else None


def _is_runs_own_sampler(point: dict, run: Run) -> bool:
    """Whether the figures are those that training itself would have: EMA weights, its sampler, float32 detector and network."""
    num_steps = run.config.get("eval.num_steps") or run.config.get("diffusion.sampler.num_steps")
    own = {"weights": "ema", "num_steps": num_steps, "precision": "fp32", "detector_precision": "fp32"}
    for key in ("S_churn", "solver"):  # of those that the run's sampler has
        if f"diffusion.sampler.{key}" in run.config:
            own[key] = run.config[f"diffusion.sampler.{key}"]
    return all(point.get(key, value) == value for key, value in own.items())
