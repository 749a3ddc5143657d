"""The tables of docs/experiments.md, "Does it work?", from extras/benchmarks/results/fashion_*.jsonl.

A line of these files is an evaluation: arm, lr, seed, step, num_samples, guidance and metrics. Those with 1,000 samples choose
the learning rate of each arm, those with 2,000 compare the arms. The rules are in the .md files next to them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

from scipy.stats import ttest_ind

from common.types import Text
from evaluations.results import markdown_table
from evaluations.suite import format_mean, format_metric

RESULTS = Path(__file__).parent / "results/fashion_learning_rates.jsonl"
CHOSEN_BY, NUM_CHOOSING_SEEDS = "fd_fashion", 3
IN_CURVES = (CHOSEN_BY, "class_agreement_fashion")
NAMES = {
    CHOSEN_BY: "distance", "class_agreement_fashion": "agreement", "fd_fashion_noisy": "second distance",
    "precision_fashion": "precision", "recall_fashion": "recall",
}  # fmt: skip
GUIDANCES = {"none": "", "cfg": ", cfg 1.5", "sparse": ", sparse guidance", "path_drop": ", path-drop 1.5"}
DENSE = ("A", "B")


def evidence(results: Text = str(RESULTS)) -> None:
    """Print the tables: learning rates, steps, each arm at its best rate, and there each routed arm against the arms before it.

    A rate counts if it has the first three seeds.
    """
    lines = sorted(map(json.loads, Path(results).read_text(encoding="utf-8").splitlines()), key=lambda line: line["seed"])
    last = {line["arm"]: line["step"] for line in sorted(lines, key=lambda line: line["step"])}
    arms, rates, steps = (sorted({line[key] for line in lines}) for key in ("arm", "lr", "step"))

    def find(metric: str, arm: str, lr: float, step: int, num_samples: int = 1000, guidance: str = "none") -> list[float]:
        """A value per seed."""
        wanted = {"arm": arm, "lr": lr, "step": step, "num_samples": num_samples, "guidance": guidance}
        return [line["metrics"][metric] for line in lines if metric in line["metrics"] and wanted.items() <= line.items()]

    first = {(arm, lr): find(CHOSEN_BY, arm, lr, last[arm])[:NUM_CHOOSING_SEEDS] for arm in arms for lr in rates}
    complete = [key for key, values in first.items() if len(values) == NUM_CHOOSING_SEEDS]
    best = dict(sorted(complete, key=lambda key: (key[0], -fmean(first[key]))))  # arm -> lr: the last of an arm stays
    show(["learning rate", *best], [[f"{lr:g}", *(mean_text(CHOSEN_BY, first[arm, lr]) for arm in best)] for lr in rates])

    rows = []
    for step in steps:
        curves = [[(metric, find(metric, arm, best[arm], step)) for metric in IN_CURVES] for arm in best]
        cells = [", ".join(mean_text(metric, values) for metric, values in curve if values) for curve in curves]
        rows += [[f"{step:,}", *cells]] if any(cells) else []
    show(["step", *best], rows)

    metrics = [metric for metric in NAMES if any(metric in line["metrics"] for line in lines)]
    rows, differences = [], []
    for guidance, suffix in GUIDANCES.items():
        found = {arm: [find(metric, arm, best[arm], last[arm], 2000, guidance) for metric in metrics] for arm in best}
        found = {arm: columns for arm, columns in found.items() if all(columns)}
        for arm, columns in found.items():
            rows.append([arm + suffix, f"{best[arm]:g}", str(len(columns[0])), *map(mean_text, metrics, columns)])
        for other, arm in combinations(found, 2):
            if arm not in DENSE:
                differences.append([f"{arm} - {other}{suffix}", *map(interval, metrics, found[arm], found[other])])
    show(["", "learning rate", "seeds", *map(NAMES.get, metrics)], rows)
    show(["", *map(NAMES.get, metrics)], differences)


def show(columns: list[str], rows: list[list[str]]) -> None:
    sys.stdout.write(markdown_table(columns, rows) + "\n")


def mean_text(metric: str, values: Sequence[float]) -> str:
    return format_mean(metric, values) if values else ""


def interval(metric: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The difference of the means and its 95% interval (Welch)."""
    low, high = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    difference, low, high = (format_metric(metric, x) for x in (fmean(ours) - fmean(theirs), low, high))
    return f"{difference} ({low} to {high})"
