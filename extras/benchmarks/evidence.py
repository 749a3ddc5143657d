"""The figures of docs/experiments.md, "Does it work?", from extras/benchmarks/results/fashion_learning_rates.jsonl.

A line of that file is an evaluation: arm, lr, seed, step, num_samples, guidance and metrics. Those of 1,000 samples choose the
learning rate of each arm, those of 2,000 compare the arms. The rules are in the .md files beside it.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.figure import Figure
from scipy.stats import ttest_ind

from common.types import Text
from evaluations.results import markdown_table
from evaluations.suite import format_mean, format_metric

RESULTS = Path(__file__).parent / "results/fashion_learning_rates.jsonl"
CHOSEN_BY, CHOOSING_SEEDS = "fd_fashion", range(3)
DRAWN = ((CHOSEN_BY, "distance"), ("class_agreement_fashion", "class agreement"))
KEYS = ("num_samples", "arm", "guidance", "lr")
ARMS = {  # name and time of a step, relative to A's: results/fashion_sprint.md
    "A": ("dense, 64 images", 1.0),
    "B": ("dense, 46 images", 0.710),
    "C": ("routed, 64 images", 0.702),
    "S": ("SPRINT, 64 images", 0.524),
}


def evidence(results: Text = str(RESULTS), plot: Text | None = None) -> None:
    """Print every mean ± deviation over seeds, and by how much C differs from the others, each at its best learning rate.

    plot: a file for the curves of each arm at that rate, an .svg or .png.
    """
    lines = sorted(map(json.loads, Path(results).read_text(encoding="utf-8").splitlines()), key=lambda line: line["step"])
    last = {(*(line[key] for key in KEYS), line["seed"]): line["metrics"] for line in lines}
    found: dict[tuple, list[float]] = {}  # (*KEYS, metric) -> a value per seed
    choosing: dict[tuple, list[float]] = {}  # (arm, lr) -> a value per seed
    for (*key, seed), metrics in last.items():
        for name, value in metrics.items():
            found.setdefault((*key, name), []).append(value)
        num_samples, arm, guidance, lr = key
        if (num_samples, guidance) == (1000, "none") and seed in CHOOSING_SEEDS:
            choosing.setdefault((arm, lr), []).append(metrics[CHOSEN_BY])
    best = {arm: lr for _, arm, lr in sorted(((fmean(values), *key) for key, values in choosing.items()), reverse=True)}

    rows = []
    for (*key, name), values in sorted(found.items()):
        rows.append([*map(str, key), str(len(values)), name, format_mean(name, values)])
    sys.stdout.write(markdown_table(["samples", "arm", "guidance", "lr", "seeds", "metric", "mean"], rows))
    for arm in sorted(best.keys() - {"C"}):
        for name in dict.fromkeys(key[-1] for key in found):
            ours, theirs = (found.get((2000, one, "none", best.get(one), name)) for one in ("C", arm))
            if ours and theirs:
                low, high = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
                low, mean, high = (format_metric(name, x) for x in (low, fmean(ours) - fmean(theirs), high))
                sys.stdout.write(f"C - {arm}, {name}: {mean}, 95% {low} to {high} (Welch)\n")
    if plot:
        draw([line for line in lines if line["num_samples"] == 1000 and line["lr"] == best[line["arm"]]], plot)


def draw(lines: list[dict], plot: str) -> None:
    """Distance and class agreement against time. Lines are means over seeds, bands reach from the lowest to the highest."""
    canvas = Figure((9, 3.4), layout="constrained")
    for axes, (name, words) in zip(canvas.subplots(1, 2), DRAWN):
        for arm, (label, step_time) in ARMS.items():
            by_step = groupby((line for line in lines if line["arm"] == arm), key=lambda line: line["step"])
            points = [(step, [line["metrics"][name] for line in some]) for step, some in by_step]
            if points:
                time = [step * step_time for step, _ in points]
                lr = next(line["lr"] for line in lines if line["arm"] == arm)
                axes.plot(time, [fmean(values) for _, values in points], marker=".", label=f"{label}, lr {lr:g}")
                axes.fill_between(time, *zip(*((min(values), max(values)) for _, values in points)), alpha=0.15, linewidth=0)
        axes.set(xlabel="time, in steps of the dense network with 64 images", ylabel=words)
        axes.grid(alpha=0.3)
    canvas.axes[0].set_yscale("log")
    canvas.axes[0].legend()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "evidence"}):  # text stays text; the same file each time
        canvas.savefig(plot, metadata={"Date": None} if plot.endswith(".svg") else None)
