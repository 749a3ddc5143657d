"""Results of evaluations in a folder: finished points of a sweep, the table and the plot made of them."""

from __future__ import annotations

import csv
import io
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.files import append_line, read_lines, write_file
from evaluations.metrics import standard_error
from evaluations.suite import display_name, format_metric


@dataclass(frozen=True)
class Point:
    """What is evaluated.

    Attributes:
        settings: as results.jsonl holds them.
        content: hashes of the checkpoints or images.
        shown: the settings as tables and plots show them.
    """

    settings: dict
    content: str
    shown: dict

    @property
    def identity(self) -> dict:
        """What distinguishes it from other points. Hashes of the content replace the paths."""
        return without_paths({**self.settings, "content": self.content})


class Results:
    """The finished points of a folder: results.jsonl, and the table and plot made of them.

    Two points are equal if their settings, content and conditions are equal.

    Args:
        conditions: what all points share: the number of samples, the detector, the reference and so on.
        about: what tables show of the conditions.
    """

    def __init__(self, folder: Path, conditions: dict, about: dict | None = None):
        self.folder, self.conditions, self.about, self.file = folder, conditions, about or {}, folder / "results.jsonl"
        self.lines = [line for line in read_lines(self.file) if "shown" in line and "metrics" in line]

    def _key(self, point: Point) -> dict:
        return json.loads(json.dumps({**point.settings, **self.conditions, "content": point.content}))

    def find(self, point: Point) -> dict | None:
        """The line of results.jsonl; None if the point is not finished."""
        key = without_paths(self._key(point))
        return next((line for line in self.lines if without_paths(line["point"]) == key), None)

    def add(self, point: Point, metrics: dict[str, float], jackknife: dict[str, list[float]], cost: dict[str, float]) -> None:
        values = {"metrics": metrics, "jackknife": jackknife, "cost": cost}
        line = {"point": self._key(point), "shown": point.shown, "about": self.about, **values}
        append_line(self.file, line)
        self.lines.append(line)

    def write(self, points: Sequence[Point], plotted: str, axes: Sequence[str] = ()) -> str:
        """Write results.csv and results.md for all finished points of the folder, and results.png for a sweep of `points`.

        Args:
            plotted: the metric of the plot. Among points of the same conditions, `*` marks the lowest and `~` those that
                cannot be told from it.
            axes: of the plot, for the points of a search.

        Returns:
            The table for a terminal: the columns in which rows differ, and the metrics.
        """

        def conditions(line: dict) -> list:
            return [line["point"].get(key) for key in self.conditions]

        rows, cells = [], []
        for line in self.lines:
            alike = [other for other in self.lines if plotted in other["metrics"] and conditions(other) == conditions(line)]
            best = min(alike, key=lambda other: other["metrics"][plotted], default=line)
            mark = "" if len(alike) < 2 else "*" if line is best else "~" if not differ(line, best, plotted) else ""
            errors = {name: standard_error(values) for name, values in line["jackknife"].items()}
            row = line["shown"] | line["about"] | {"best": mark} | line["metrics"] | line["cost"]
            cells.append({name: _format(name, value, errors.get(name)) for name, value in row.items()})
            rows.append(row | {f"{name}_error": error for name, error in errors.items()})
        names = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(rows)
        write_file(self.folder / "results.csv", text.getvalue())
        names = [name for name in names if any(name in row for row in cells)]
        table = markdown_table(names, [[row.get(name, "") for name in names] for row in cells])
        if any(row["best"] for row in rows):
            table += f"\n`*`: the lowest {plotted} of its conditions; `~`: its difference from the lowest may be chance (95%)\n"
        write_file(self.folder / "results.md", table)
        if len(points) > 1:
            lines, label = [self.find(point) for point in points], display_name(plotted, self.conditions["num_samples"])
            values = [line["metrics"][plotted] for line in lines]
            errors = [standard_error(line["jackknife"].get(plotted) or [0.0]) for line in lines]
            write_file(self.folder / "results.png", plot([p.shown for p in points], values, errors, label, axes))
        return table_for_terminal(cells, self.lines)


def without_paths(point: dict) -> dict:
    """The settings of a point without the keys that are paths."""
    return {name: value for name, value in point.items() if name not in ("checkpoint", "images", "guidance.checkpoint")}


def differ(line: dict, other: dict, metric: str) -> bool:
    """Whether two results differ by more than the 95% interval of their difference.

    The difference is taken group by group: points of the same seeds share most of their noise.
    """
    from scipy.special import stdtrit  # scipy takes time to import

    sides = [one["jackknife"].get(metric) for one in (line, other)]
    if None in sides:
        return False
    error = standard_error([a - b for a, b in zip(*sides)])
    return abs(line["metrics"][metric] - other["metrics"][metric]) > stdtrit(len(sides[0]) - 1, 0.975) * error


def _format(name: str, value: object, error: float | None) -> str:
    text = format_metric(name, value) if isinstance(value, float) else str(value)
    return text if error is None else f"{text} ± {format_metric(name, error)}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, with a final newline. Bars inside cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def table_for_terminal(rows: Sequence[dict[str, str]], lines: Sequence[dict]) -> str:
    """Aligned columns: the metrics, and columns in which rows differ (results.md: all). `lines`: the rows in results.jsonl."""
    names = dict.fromkeys(name for row in rows for name in row)
    metrics = {name for line in lines for name in line["metrics"]}
    shown = [name for name in names if name in metrics or len({row.get(name) for row in rows}) > 1]
    table = [shown, *([row.get(name, "") for name in shown] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table)]
    return "".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() + "\n" for row in table)


def in_words(settings: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def plot(settings: list[dict], values: list[float], errors: list[float], label: str, axes: Sequence[str] = ()) -> bytes:
    """PNG of the metric, with its standard errors, against the setting with the most values, or against each of `axes`.

    Without `axes`, there is a line for each combination of the other settings.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.figure import Figure

    names = dict.fromkeys(name for row in settings for name in row)  # two diffusions have different settings
    choices = {name: {row.get(name) for row in settings} for name in names}
    numbers = [name for name, chosen in choices.items() if all(isinstance(value, (int, float)) for value in chosen)]
    shown = list(axes) or [max(numbers, key=lambda name: len(choices[name]))]
    others = [] if axes else [name for name in choices if name not in shown and len(choices[name]) > 1]
    figure = Figure(figsize=(6 * len(shown), 4))
    for axis, panel in zip(shown, figure.subplots(1, len(shown), squeeze=False)[0]):
        curves: dict[str, list[tuple]] = {}
        for row, value, error in zip(settings, values, errors):
            curves.setdefault(in_words({name: row[name] for name in others if name in row}), []).append((row[axis], value, error))
        for name, curve in curves.items():
            x, y, error = zip(*sorted(curve))
            words = name.replace("$", r"\$")  # not the start of a formula
            panel.errorbar(x, y, error, marker="o", capsize=3, linestyle="none" if axes else "-", label=words or None)
        panel.set(xlabel=axis, ylabel=label)
        panel.grid(alpha=0.3)
        if others:
            panel.legend()
    png = io.BytesIO()
    figure.savefig(png, dpi=150, bbox_inches="tight")
    return png.getvalue()
