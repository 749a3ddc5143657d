"""Store the results of evaluated points in a folder, and write tables and a plot."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Annotated, Any

from pydantic import BaseModel, Field

from common.errors import UserError
from common.files import (
    append_line,
    describe_write_error,
    is_leftover,
    lock_file,
    read_lines,
    refuse_link,
    regular_file,
    write_atomically,
)
from common.progress import log_if_slow
from common.types import FiniteFloat
from configs.settings import validate
from evaluations.metrics import standard_error
from evaluations.suite import format_metric

# Settings that older results do not store, with the values that older versions used. Add a line for each new setting. Guidance
# and sampler settings need no line, because results store only those that differ from their defaults.
DEFAULTS = {"labels": "random", "first_seed": 0}

# Hashes in results.jsonl that results.csv contains, and the other tables only where lines would look the same.
HASHES = ("reference_hash", "content", "autoencoder_hash", "detector_weights", "dinov2_weights")

log = logging.getLogger(__name__)

LOCK_FOLDER = ".evaluating"  # folder with the file that a process locks while it writes results


@dataclass(frozen=True)
class Point:
    """A checkpoint with sampling settings, or a set of images, that fid.py evaluates."""

    settings: dict  # settings as stored in results.jsonl
    hash: str  # hash of the checkpoints or images, which results.jsonl stores as `content`
    display: dict  # settings as displayed in tables and plots, which results.jsonl stores as `shown`

    @property
    def key(self) -> dict:
        """Return the hash and the settings without paths, so that moving the files does not change the key."""
        return without_paths(self.settings) | {"content": self.hash}


class ResultLine(BaseModel, strict=True):
    """A line of results.jsonl."""

    point: dict[str, Any]
    shown: dict[str, Any]
    about: dict[str, Any]
    metrics: dict[str, FiniteFloat]
    jackknife: dict[str, Annotated[list[FiniteFloat], Field(min_length=1)]]
    cost: dict[str, FiniteFloat]


class Results:
    """Evaluated points in a folder's results.jsonl. Two points are equal if their keys and shared settings are equal.

    Several commands can evaluate into one folder. If two of them evaluate the same point, the first result is kept. Lines that
    are not results are skipped with a warning.

    Args:
        folder: Folder of results.jsonl, the tables and the plot, which contain every point. It must not be a link.
        shared: Settings that all points share, such as the number of samples, the detector and the reference.
        shared_display: These settings as displayed in tables, which results.jsonl stores as `about`. Tables omit the
            reference's `quick_fingerprint` in `reference_hash`, unless lines differ in nothing else.
        is_optional: If the folder cannot be written, only log a warning, and keep new results in memory. Without this setting,
            a folder that cannot be written raises UserError here, before the evaluations, which take long.
    """

    def __init__(self, folder: Path, shared: dict, shared_display: dict | None = None, is_optional: bool = False):
        self.folder, self.file = folder, folder / "results.jsonl"
        self.shared, self.shared_display = shared, shared_display or {}
        self._is_optional, self._is_writable = is_optional, True
        self._stored: tuple[int, list[dict]] = (0, [])  # the size of results.jsonl when it was read last, and its lines
        self._unstored: list[dict] = []  # results that could not be written
        self._try(self._check)

    def _try(self, action: Callable[[], object]) -> None:
        """Call `action`, which writes into the folder. If the folder is optional, the first UserError ends all writing."""
        try:
            if self._is_writable:
                action()
        except UserError as e:
            if not self._is_optional:
                raise
            self._is_writable = False
            log.warning("%s; the results of this run are printed, but not stored", e)

    def _check(self) -> None:
        refuse_link(self.folder), refuse_link(self.file)
        unowned = [name for name in ("results.md", "results.csv", "results.png") if (self.folder / name).exists()]
        if unowned and not self.file.exists():
            raise UserError(f"{self.folder / unowned[0]} was not written by fid.py; choose another output=")
        try:  # only a result creates the folder
            TemporaryFile(dir=next(path for path in (self.folder, *self.folder.parents) if path.exists())).close()
        except OSError as e:
            raise UserError(f"cannot write to {self.folder}: {describe_write_error(self.folder, e)}") from e

    @property
    def lines(self) -> list[dict]:
        """All results, also those that other processes have stored by now."""
        size = 0
        with contextlib.suppress(FileNotFoundError), open(regular_file(self.file), "rb") as f:
            size = os.fstat(f.fileno()).st_size  # NFS may remember an older size of a file that is not open
        if size != self._stored[0]:
            level = logging.DEBUG if self._stored[0] else logging.WARNING  # warn once about lines that are not results
            self._stored = size, list(read_lines(self.file, partial(validate, kind=ResultLine), level))
        return self._stored[1] + self._unstored

    def find(self, point: Point) -> dict | None:
        """Return the point's JSON object from results.jsonl, or None if the point has not been evaluated yet."""
        key = without_defaults(json.loads(json.dumps(point.key | self.shared)))
        older = {name: value for name, value in key.items() if name != "autoencoder_hash"}  # earlier versions do not store it

        def is_same(settings: dict) -> bool:
            return settings == (key if "autoencoder_hash" in settings else older)

        return next((line for line in self.lines if is_same(without_defaults(without_paths(line["point"])))), None)

    def in_order(self, points: Sequence[Point]) -> list[dict]:
        """Return all results in the order of the file, but those of `points` among themselves in the order of `points`."""
        own = [line for point in points if (line := self.find(point))]
        ordered = iter(own)
        return [next(ordered, line) if line in own else line for line in self.lines]

    def _lock(self) -> IO[bytes]:
        """Wait until no other process writes results into the folder, and keep others from it until the file is closed.

        This is not the folder's .lock, which a trainer or sample.py may hold for long.
        """
        with log_if_slow(log, "waiting for another process that is writing to %s", self.folder):
            lock = lock_file(refuse_link(self.folder / LOCK_FOLDER) / ".lock", "writing to", "output", blocking=True)
        for path in self.folder.glob(".tmp_*_results.*"):  # of a process that was killed
            if is_leftover(path.name):
                with contextlib.suppress(OSError):
                    path.unlink()
        return lock

    def add(self, point: Point, metrics: dict[str, float], jackknife: dict[str, list[float]], cost: dict[str, float]) -> None:
        """Append an evaluated point, unless another process has done so by now.

        `jackknife` lists each metric without sample group i, and `cost` is the cost per image.
        """
        settings = point.settings | self.shared | {"content": point.hash}
        values = {"metrics": metrics, "jackknife": jackknife, "cost": cost}
        line = {"point": settings, "shown": point.display, "about": self.shared_display, **values}

        def append() -> None:
            with self._lock():
                if not self.find(point):
                    append_line(self.file, line)

        self._try(append)
        if not self.find(point):
            self._unstored.append(line)

    def write(self, points: Sequence[Point], plotted: str) -> str:
        """Write all results in the folder to results.csv and results.md. If several of `points` have results, plot them, too.

        Args:
            plotted: Metric to plot. Among points with equal shared settings, the tables mark the lowest value with `*`, and
                values that do not differ significantly from the lowest value with `~`.

        Returns:
            Text table for a terminal (see `terminal_table`).
        """
        self._try(lambda: self._write_files(points, plotted))
        return terminal_table(self.in_order(points), self.shared, plotted)

    def _write_files(self, points: Sequence[Point], plotted: str) -> None:
        with self._lock():
            if not (lines := self.in_order(points)):  # a later command would not know whose the files are
                return
            rows, columns = make_tables(lines, self.shared, plotted)
            write_atomically(self.folder / "results.csv", csv_text(rows))
            table = markdown_table(list(columns), list(zip(*columns.values())))
            if any(row["best"] for row in rows):
                table += f"\n`*`: the lowest {plotted} at equal shared settings; `~`: not significantly above the lowest (95%)\n"
            write_atomically(self.folder / "results.md", table)
            self._plot(points, plotted)

    def _plot(self, points: Sequence[Point], plotted: str) -> None:
        """Write results.png if several of the points have the metric."""
        evaluated = [(p.display, line) for p in points if (line := self.find(p)) and plotted in line["metrics"]]
        if len(evaluated) > 1:
            displays, lines = zip(*evaluated)
            values = [line["metrics"][plotted] for line in lines]
            errors = [standard_error(line["jackknife"].get(plotted) or [0.0]) for line in lines]
            label = f"{plotted} of {self.shared['num_samples']:,} samples"
            write_atomically(self.folder / "results.png", plot(displays, values, errors, label))


def write_all(points: Sequence[tuple[Point, Results]], plotted: str) -> tuple[str, list[dict]]:
    """Write the files in the folder of each point. Return a text table for a terminal, and the results of the points.

    The table contains all results of a single folder, or only these points if they are in several folders.
    """
    texts = [
        results.write([point for point, other in points if other is results], plotted)
        for results in dict.fromkeys(results for _, results in points)
    ]
    found = [line for point, results in points if (line := results.find(point))]
    return texts[0] if len(texts) == 1 else terminal_table(found, points[0][1].shared, plotted), found


def make_tables(
    lines: Sequence[dict], shared: Iterable[str], plotted: str
) -> tuple[tuple[dict[str, object], ...], dict[str, list[str]]]:
    """Return the rows of results.csv, and the columns of the other tables as texts."""
    rows, cells = zip(*(_row(line, lines, shared, plotted) for line in lines))
    _distinguish(lines, cells)
    return rows, {name: [row.get(name, "") for row in cells] for name in dict.fromkeys(name for row in cells for name in row)}


def terminal_table(lines: Sequence[dict], shared: Iterable[str], plotted: str) -> str:
    """Return a text table with the metrics and the settings that differ between rows, or nothing if there are no results."""
    if not lines:
        return ""
    _, columns = make_tables(lines, shared, plotted)
    metrics = {name for line in lines for name in line["metrics"]}
    printed = [[name, *column] for name, column in columns.items() if name in metrics or len(set(column)) > 1]
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in printed]
    return "".join("  ".join(row).rstrip() + "\n" for row in zip(*padded))


def _distinguish(lines: Sequence[dict], cells: Sequence[dict[str, str]]) -> None:
    """Add the start of a hash to the cells of lines that differ in it, but in no other setting that the tables display."""
    alike: dict[str, list[tuple[dict, dict]]] = {}  # (hashes, cells) of the lines with the same displayed settings
    for line, own in zip(lines, cells):
        alike.setdefault(json.dumps(displayed_settings(line), sort_keys=True), []).append((hashes_of(line), own))
    for group, name in itertools.product(alike.values(), HASHES):
        if len({hashes[name] for hashes, _ in group}) > 1:
            for hashes, own in group:
                own[name] = (hashes[name] or "")[:8]


def _row(line: dict, lines: Sequence[dict], shared: Iterable[str], plotted: str) -> tuple[dict[str, object], dict[str, str]]:
    """Return a line's values with their standard errors for results.csv, and the texts of its cells for the other tables."""

    def settings(line: dict) -> list:
        return [line["point"].get(key, DEFAULTS.get(key)) for key in shared]

    comparable = [other for other in lines if plotted in other["metrics"] and settings(other) == settings(line)]
    best = min(comparable, key=lambda other: other["metrics"][plotted], default=line)
    mark = "" if len(comparable) < 2 else "*" if line is best else "~" if differ(line, best, plotted) is False else ""
    errors = {name: standard_error(values) for name, values in line["jackknife"].items()}
    row = displayed_settings(line) | {"best": mark} | line["metrics"] | line["cost"]
    cells = {name: _format(name, value, errors.get(name)) for name, value in row.items() if value is not None}
    return row | {f"{name}_error": error for name, error in errors.items()} | hashes_of(line), cells


def displayed_settings(line: dict) -> dict:
    """Return the settings of a line of results.jsonl that the tables display."""
    return {name: value for name, value in (line["shown"] | line["about"]).items() if name not in HASHES}


def hashes_of(line: dict) -> dict[str, str | None]:
    """Return the hashes that a line of results.jsonl stores, by their names in HASHES."""
    return {name: line["about"].get(name) or line["point"].get(name) for name in HASHES}


def csv_text(rows: Sequence[dict[str, object]]) -> str:
    """Format rows with different columns as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(name for row in rows for name in row))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def without_paths(settings: dict) -> dict:
    """Return a point's settings without the entries that contain paths."""
    return {name: value for name, value in settings.items() if name not in ("checkpoint", "images", "guidance.checkpoint")}


def without_defaults(settings: dict) -> dict:
    """Return the settings that are set and differ from DEFAULTS, which is how settings of different versions are compared."""
    return {name: value for name, value in settings.items() if value is not None and value != DEFAULTS.get(name)}


def differ(line: dict, other: dict, metric: str) -> bool | None:
    """Return whether zero is outside the 95% confidence interval of the difference between two results.

    Return None without jackknife values, which need 20 samples.

    The jackknife is applied to the difference itself, because points with the same seeds share most of their sampling noise.
    """
    from scipy.special import stdtrit  # scipy is slow to import

    groups = [side["jackknife"].get(metric) for side in (line, other)]
    if None in groups:
        return None
    error = standard_error([a - b for a, b in zip(*groups)])
    return bool(abs(line["metrics"][metric] - other["metrics"][metric]) > stdtrit(len(groups[0]) - 1, 0.975) * error)


def _format(name: str, value: object, error: float | None) -> str:
    text = format_metric(name, value) if isinstance(value, float) else str(value)
    return text if error is None else f"{text} ± {format_metric(name, error)}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table that ends with a newline. Vertical bars in cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def guidance_fields(line: Mapping[str, object]) -> dict[str, object]:
    """Return the entries of a result that `sampling.recipe.guidance_settings` wrote."""
    return {key: value for key, value in line.items() if key.partition(".")[0] in ("cfg_scale", "guidance")}


def format_settings(settings: dict) -> str:
    """Format settings as text, such as `step 400000, cfg_scale 1.5`."""
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def plot(settings: Sequence[dict], values: list[float], errors: list[float], label: str) -> bytes:
    """Plot a metric with standard errors against the numeric setting that has the most values, and return the plot as a PNG.

    Each combination of the other settings has a separate curve.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.figure import Figure

    names = dict.fromkeys(name for row in settings for name in row)  # EDM and SiT samplers have different settings
    choices = {name: {row.get(name) for row in settings} for name in names}
    numbers = [name for name, chosen in choices.items() if all(isinstance(value, (int, float)) for value in chosen)]
    axis = max(numbers, key=lambda name: len(choices[name]))
    others = [name for name in choices if name != axis and len(choices[name]) > 1]
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    curves: dict[str, list[tuple]] = {}
    for row, value, error in zip(settings, values, errors):
        curve = format_settings({name: row[name] for name in others if name in row})
        curves.setdefault(curve, []).append((row[axis], value, error))
    for name, curve in curves.items():
        x, y, error = zip(*sorted(curve))
        label_text = name.replace("$", r"\$") or None  # matplotlib interprets $ as the start of a formula
        axes.errorbar(x, y, error, marker="o", capsize=3, label=label_text)
    axes.set(xlabel=axis, ylabel=label)
    axes.grid(alpha=0.3)
    if others:
        axes.legend()
    png = io.BytesIO()
    figure.savefig(png, dpi=150, bbox_inches="tight")
    return png.getvalue()
