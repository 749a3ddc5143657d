"""The tables of docs/experiments.md about routed and dense networks on Fashion-MNIST, from all of their evaluations."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import fmean

from scipy.stats import t

from common.types import Text
from evaluations.results import markdown_table
from evaluations.suite import format_mean, format_metric

RESULTS = Path(__file__).parent / "results/fashion_equal_time.jsonl"
CHOSEN_BY, NUM_CHOOSING_SEEDS = "fd_fashion", 3
NAMES = {
    CHOSEN_BY: "distance", "class_agreement_fashion": "agreement", "precision_fashion": "precision", "recall_fashion": "recall",
}  # fmt: skip
GUIDANCES = {"none": "", "cfg": ", cfg 1.5", "path_drop": ", path-drop 1.5"}
DENSE = ("A", "B")


def evidence(results: Text = str(RESULTS)) -> None:
    """Print the tables: learning rates, each arm at its best rate, and there each routed arm against the arms before it.

    A rate counts if it has the first three seeds.
    """
    lines = sorted(map(json.loads, Path(results).read_text(encoding="utf-8").splitlines()), key=lambda line: line["seed"])
    arms, rates = (sorted({line[key] for line in lines}) for key in ("arm", "lr"))

    def find(metric: str, arm: str, lr: float, num_samples: int = 1000, guidance: str = "none") -> list[float]:
        """A value per seed."""
        wanted = {"arm": arm, "lr": lr, "num_samples": num_samples, "guidance": guidance}
        return [line["metrics"][metric] for line in lines if metric in line["metrics"] and wanted.items() <= line.items()]

    first = {(arm, lr): find(CHOSEN_BY, arm, lr)[:NUM_CHOOSING_SEEDS] for arm in arms for lr in rates}
    complete = [key for key, values in first.items() if len(values) == NUM_CHOOSING_SEEDS]
    best = dict(sorted(complete, key=lambda key: (key[0], -fmean(first[key]))))  # arm -> lr: the last of an arm stays
    show(["learning rate", *best], [[f"{lr:g}", *(mean_text(CHOSEN_BY, first[arm, lr]) for arm in best)] for lr in rates])

    rows, differences = [], []
    for guidance, suffix in GUIDANCES.items():
        found = {arm: [find(metric, arm, best[arm], 2000, guidance) for metric in NAMES] for arm in best}
        found = {arm: columns for arm, columns in found.items() if all(columns)}
        for arm, columns in found.items():
            rows.append([arm + suffix, f"{best[arm]:g}", str(len(columns[0])), *map(mean_text, NAMES, columns)])
        spreads = [pooled_deviation(column) for column in zip(*found.values())]
        for other, arm in combinations(found, 2):
            if arm not in DENSE:
                differences.append([f"{arm} - {other}{suffix}", *map(interval, NAMES, found[arm], found[other], spreads)])
    show(["", "learning rate", "seeds", *NAMES.values()], rows)
    show(["", *NAMES.values()], differences)


def show(columns: list[str], rows: list[list[str]]) -> None:
    sys.stdout.write(markdown_table(columns, rows) + "\n")


def mean_text(metric: str, values: Sequence[float]) -> str:
    return format_mean(metric, values) if values else ""


def pooled_deviation(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Standard deviation within groups, assumed equal in all of them, and its degrees of freedom."""
    df = sum(len(values) - 1 for values in groups)
    squares = sum((x - fmean(values)) ** 2 for values in groups for x in values)
    return sqrt(squares / df) if df else float("nan"), df


def interval(metric: str, ours: Sequence[float], theirs: Sequence[float], spread: tuple[float, int]) -> str:
    """The difference of the means with its 95% interval.

    If this holds zero, also the difference that a repetition would tell from zero with a probability of 80%.
    """
    deviation, df = spread
    error = deviation * sqrt(1 / len(ours) + 1 / len(theirs))
    difference, margin = fmean(ours) - fmean(theirs), t.ppf(0.975, df) * error
    texts = [format_metric(metric, x) for x in (difference, difference - margin, difference + margin)]
    power = f"; 80%: {format_metric(metric, margin + t.ppf(0.8, df) * error)}" if abs(difference) < margin else ""
    return f"{texts[0]} ({texts[1]} to {texts[2]}{power})"
