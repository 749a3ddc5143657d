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
    """

    def __init__(self, folder: Path, conditions: dict):
        self.folder, self.conditions, self.file = folder, conditions, folder / "results.jsonl"
        self.lines = [line for line in read_lines(self.file) if "point" in line and "metrics" in line]

    def _key(self, point: Point) -> dict:
        return json.loads(json.dumps({**point.settings, **self.conditions, "content": point.content}))

    def find(self, point: Point) -> dict | None:
        """The line of results.jsonl; None if the point is not finished."""
        key = self._key(point)
        return next((line for line in self.lines if line["point"] == key), None)

    def add(self, point: Point, metrics: dict[str, float], cost: dict[str, float]) -> None:
        line = {"point": self._key(point), "metrics": metrics, "cost": cost}
        append_line(self.file, line)
        self.lines.append(line)

    def write(self, points: Sequence[Point], plotted: str) -> str:
        """Write results.csv, results.md and, for a sweep, results.png of finished points; returns the Markdown.

        Args:
            plotted: the metric of the plot.
        """
        lines, num_samples = list(map(self.find, points)), self.conditions["num_samples"]
        rows = [p.shown | {"num_samples": num_samples} | line["metrics"] | line["cost"] for p, line in zip(points, lines)]
        names = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(rows)
        write_file(self.folder / "results.csv", text.getvalue())
        cells = [[_format(name, row.get(name, "")) for name in names] for row in rows]
        table = markdown_table(names, cells)
        write_file(self.folder / "results.md", table)
        if len(points) > 1:
            values = [line["metrics"][plotted] for line in lines]
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
