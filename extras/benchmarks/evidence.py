"""The tables and the plot of docs/experiments.md, "Does it work?", from extras/benchmarks/results/fashion_*.jsonl.

A line of these files is an evaluation: arm, lr, seed, step, num_samples, guidance and metrics. Those of 1,000 samples choose the
learning rate of each arm, those of 2,000 compare the arms. The rules are in the .md files beside them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.figure import Figure
from scipy.stats import ttest_ind

from common.types import Text
from evaluations.results import markdown_table
from evaluations.suite import format_mean, format_metric

RESULTS = Path(__file__).parent / "results/fashion_learning_rates.jsonl"
KEYS = ("num_samples", "guidance", "arm", "lr", "step")
CHOSEN_BY, NUM_CHOOSING_SEEDS = "fd_fashion", 3
DRAWN = {CHOSEN_BY: "distance", "class_agreement_fashion": "agreement"}
SHOWN = DRAWN | {"fd_fashion_noisy": "second distance", "precision_fashion": "precision", "recall_fashion": "recall"}
GUIDANCES = {"none": "", "cfg": ", cfg 1.5", "sparse": ", sparse guidance", "path_drop": ", path-drop 1.5"}
ARMS = {  # name, and time of a step, relative to A's: results/fashion_sprint.md
    "A": ("dense, 64 images", 1.0),
    "B": ("dense, 46 images", 0.710),
    "C": ("routed, 64 images", 0.702),
    "S": ("SPRINT, 64 images", 0.524),
}
DENSE = ("A", "B")


def evidence(results: Text = str(RESULTS), plot: Text | None = None) -> None:
    """Print the tables: learning rates, steps, each arm at its best rate, and there each routed arm against those before it.

    A rate counts when the first three seeds are there.

    plot: a file for the curves of each arm at its best rate, an .svg or .png.
    """
    lines = sorted(map(json.loads, Path(results).read_text(encoding="utf-8").splitlines()), key=lambda line: line["seed"])
    last = {line["arm"]: line["step"] for line in sorted(lines, key=lambda line: line["step"])}
    values: dict[tuple, list[float]] = {}  # (*KEYS, metric) -> a value per seed
    for line in lines:
        for name, value in line["metrics"].items():
            values.setdefault((*(line[key] for key in KEYS), name), []).append(value)

    def of(arm: str, lr: float, num_samples: int = 2000, guidance: str = "none", name: str = CHOSEN_BY) -> list[float]:
        """What the last step of an arm gave."""
        return values.get((num_samples, guidance, arm, lr, last[arm], name), [])

    rates = sorted({line["lr"] for line in lines})
    first = {key: of(*key, 1000)[:NUM_CHOOSING_SEEDS] for key in product(sorted(last), rates)}
    complete = [key for key in first if len(first[key]) == NUM_CHOOSING_SEEDS]
    best = dict(sorted(complete, key=lambda key: (key[0], -fmean(first[key]))))  # arm -> lr: of an arm, the last one stays
    show(["learning rate", *best], [[f"{lr:g}", *(mean(CHOSEN_BY, first[arm, lr]) for arm in best)] for lr in rates])

    at_best = {(1000, "none", arm, lr) for arm, lr in best.items()}
    curves = {(key[2], *key[4:]): some for key, some in values.items() if key[:4] in at_best}  # by arm, step and metric
    rows = []
    for step in sorted({step for _, step, _ in curves}):
        cells = [[mean(name, curves[arm, step, name]) for name in DRAWN if (arm, step, name) in curves] for arm in best]
        rows.append([f"{step:,}", *map(", ".join, cells)])
    show(["step", *best], rows)

    shown = [name for name in SHOWN if any(key[-1] == name for key in values)]
    rows, differences = [], []
    for guidance, suffix in GUIDANCES.items():
        found = {arm: [of(arm, best[arm], 2000, guidance, name) for name in shown] for arm in best}
        found = {arm: columns for arm, columns in found.items() if all(columns)}
        for arm, columns in found.items():
            rows.append([arm + suffix, f"{best[arm]:g}", str(len(columns[0])), *map(mean, shown, columns)])
        for other, arm in combinations(found, 2):
            if arm not in DENSE:
                differences.append([f"{arm} - {other}{suffix}", *map(interval, shown, found[arm], found[other])])
    show(["", "learning rate", "seeds", *map(SHOWN.get, shown)], rows)
    show(["", *map(SHOWN.get, shown)], differences)
    if plot:
        draw(curves, best, plot)


def show(columns: list[str], rows: list[list[str]]) -> None:
    sys.stdout.write(markdown_table(columns, rows) + "\n")


def mean(name: str, values: Sequence[float]) -> str:
    return format_mean(name, values) if values else ""


def interval(name: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Difference of the means, and its 95% interval (Welch)."""
    low, high = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    difference, low, high = (format_metric(name, x) for x in (fmean(ours) - fmean(theirs), low, high))
    return f"{difference} ({low} to {high})"


def draw(curves: dict[tuple, list[float]], best: dict[str, float], plot: str) -> None:
    """Distance and agreement against time. Lines are means over seeds, bands reach from the lowest to the highest."""
    canvas = Figure((9, 3.4), layout="constrained")
    for axes, (drawn, words) in zip(canvas.subplots(1, 2), DRAWN.items()):
        for arm, (label, step_time) in ARMS.items():
            points = [(step * step_time, some) for (one, step, name), some in curves.items() if (one, name) == (arm, drawn)]
            if points:
                time, values = zip(*sorted(points))
                axes.plot(time, [fmean(some) for some in values], marker=".", label=f"{arm}: {label}, lr {best[arm]:g}")
                axes.fill_between(time, [min(some) for some in values], [max(some) for some in values], alpha=0.15, linewidth=0)
        axes.set(xlabel="time, in steps of the dense network with 64 images", ylabel=words)
        axes.grid(alpha=0.3)
    canvas.axes[0].set_yscale("log")
    canvas.axes[0].yaxis.set_minor_formatter("{x:g}")
    canvas.axes[0].yaxis.set_major_formatter("{x:g}")
    canvas.axes[0].legend()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "evidence"}):  # text stays text; the same file each time
        canvas.savefig(plot, metadata={"Date": None} if plot.endswith(".svg") else None)
