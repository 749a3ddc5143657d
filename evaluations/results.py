"""Results of evaluations in a folder: finished points of a sweep, the table and the plot made of them."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.files import append_line, read_lines, write_file
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


class Results:
    """The finished points of a folder: results.jsonl, and the table and plot made of them.

    Two points are the same if their settings, their content and the conditions are.

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
        key = self._key(point)
        return next((line for line in self.lines if line["point"] == key), None)

    def add(self, point: Point, metrics: dict[str, float], cost: dict[str, float]) -> None:
        line = {"point": self._key(point), "shown": point.shown, "about": self.about, "metrics": metrics, "cost": cost}
        append_line(self.file, line)
        self.lines.append(line)

    def write(self, points: Sequence[Point], plotted: str) -> str:
        """Write results.csv and results.md of all finished points of the folder, and results.png of these, if they are a sweep.

        Args:
            plotted: the metric of the plot. The lowest among points of the same conditions is marked as the best.

        Returns:
            The Markdown.
        """

        def conditions(line: dict) -> list:
            return [line["point"].get(key) for key in self.conditions]

        shown, measured = [line["shown"] for line in self.lines], []
        for line in self.lines:
            alike = [other["metrics"].get(plotted, math.inf) for other in self.lines if conditions(other) == conditions(line)]
            is_best = len(alike) > 1 and line["metrics"].get(plotted) == min(alike)
            measured.append(line["about"] | {"best": "*" if is_best else ""} | line["metrics"] | line["cost"])
        names = list(dict.fromkeys(name for row in shown + measured for name in row))
        rows = [one | other for one, other in zip(shown, measured)]
        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(rows)
        write_file(self.folder / "results.csv", text.getvalue())
        table = markdown_table(names, [[_format(name, row.get(name, "")) for name in names] for row in rows])
        write_file(self.folder / "results.md", table)
        if len(points) > 1:
            values, num_samples = [self.find(point)["metrics"][plotted] for point in points], self.conditions["num_samples"]
            write_file(self.folder / "results.png", plot([p.shown for p in points], values, display_name(plotted, num_samples)))
        return table


def _format(name: str, value: object) -> str:
    return format_metric(name, value) if isinstance(value, float) else str(value)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, with a final newline. Bars inside cells cannot break it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def in_words(settings: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def plot(settings: list[dict], values: list[float], label: str) -> bytes:
    """PNG of the metric against the setting with the most values, with a line for each combination of the others."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.figure import Figure

    names = dict.fromkeys(name for row in settings for name in row)  # checkpoints of two diffusions differ in some
    choices = {name: {row.get(name) for row in settings} for name in names}
    numbers = [name for name, chosen in choices.items() if all(isinstance(value, (int, float)) for value in chosen)]
    axis = max(numbers, key=lambda name: len(choices[name]))
    others = [name for name in choices if name != axis and len(choices[name]) > 1]
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    curves: dict[str, list[tuple]] = {}
    for row, value in zip(settings, values):
        curves.setdefault(in_words({name: row[name] for name in others if name in row}), []).append((row[axis], value))
    for name, curve in curves.items():
        axes.plot(*zip(*sorted(curve)), marker="o", label=name or None)
    axes.set(xlabel=axis, ylabel=label)
    axes.grid(alpha=0.3)
    if others:
        axes.legend()
    png = io.BytesIO()
    figure.savefig(png, dpi=150, bbox_inches="tight")
    return png.getvalue()
