"""The figures of docs/experiments.md, "Does it work?", from extras/benchmarks/results/fashion_learning_rates.jsonl.

A line of that file is an evaluation: arm, lr, seed, step, num_samples, guidance and metrics. Those of 1,000 samples choose the
learning rate of each arm, those of 2,000 compare the arms.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, stdev

from scipy.stats import ttest_ind

from common.types import Text
from evaluations.results import markdown_table
from evaluations.suite import format_metric

RESULTS = Path(__file__).parent / "results/fashion_learning_rates.jsonl"
CHOSEN_BY, KEYS = "fd_fashion", ("num_samples", "arm", "guidance", "lr", "seed")


def evidence(results: Text = str(RESULTS)) -> None:
    """Print every mean ± deviation over seeds, and by how much C differs from A and B, each at its best learning rate."""
    lines = map(json.loads, Path(results).read_text(encoding="utf-8").splitlines())
    last = {tuple(line[key] for key in KEYS): line["metrics"] for line in sorted(lines, key=lambda line: line["step"])}
    found: dict[tuple, dict[str, list[float]]] = {}  # metric -> a value per seed
    for (*key, _), metrics in last.items():
        for name, value in metrics.items():
            found.setdefault(tuple(key), {}).setdefault(name, []).append(value)
    names = list(dict.fromkeys(name for metrics in found.values() for name in metrics))

    def cell(name: str, values: list[float]) -> str:
        return " ± ".join(format_metric(name, value) for value in (fmean(values), *([stdev(values)] if values[1:] else [])))

    cells = {key: [cell(name, found[key][name]) if name in found[key] else "" for name in names] for key in sorted(found)}
    rows = [[*map(str, key), str(len(found[key][CHOSEN_BY])), *cells[key]] for key in cells]
    sys.stdout.write(markdown_table(["samples", "arm", "guidance", "lr", "seeds", *names], rows))

    best = {
        arm: min((fmean(found[key][CHOSEN_BY]), key[3]) for key in found if key[:2] == (1000, arm))[1] for _, arm, *_ in found
    }
    for arm in sorted(best.keys() - {"C"}):
        ours, theirs = (found.get((2000, one, "none", best[one]), {}) for one in ("C", arm))
        for name in (name for name in ours if name in theirs):
            low, high = ttest_ind(ours[name], theirs[name], equal_var=False).confidence_interval(0.95)
            low, mean, high = (format_metric(name, x) for x in (low, fmean(ours[name]) - fmean(theirs[name]), high))
            sys.stdout.write(f"C - {arm}, {name}: {mean}, 95% {low} to {high} (Welch)\n")
