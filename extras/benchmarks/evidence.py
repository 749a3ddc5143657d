"""The figures of docs/experiments.md, "Does it work?", from extras/benchmarks/results/fashion_learning_rates.jsonl.

A line of that file is an evaluation: arm, lr, seed, step, num_samples, guidance and metrics. Those of 1,000 samples choose the
learning rate of each arm, those of 2,000 compare the arms.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean

from scipy.stats import ttest_ind

from common.types import Text
from evaluations.results import markdown_table
from evaluations.suite import format_mean, format_metric

RESULTS = Path(__file__).parent / "results/fashion_learning_rates.jsonl"
CHOSEN_BY, KEYS = "fd_fashion", ("num_samples", "arm", "guidance", "lr")


def evidence(results: Text = str(RESULTS)) -> None:
    """Print every mean ± deviation over seeds, and by how much C differs from A and B, each at its best learning rate."""
    lines = sorted(map(json.loads, Path(results).read_text(encoding="utf-8").splitlines()), key=lambda line: line["step"])
    last = {tuple(line[key] for key in (*KEYS, "seed")): line["metrics"] for line in lines}
    found: dict[tuple, list[float]] = {}  # (*KEYS, metric) -> a value per seed
    for (*key, _), metrics in last.items():
        for name, value in metrics.items():
            found.setdefault((*key, name), []).append(value)
    rows = []
    for (*key, name), values in sorted(found.items()):
        rows.append([*map(str, key), str(len(values)), name, format_mean(name, values)])
    sys.stdout.write(markdown_table(["samples", "arm", "guidance", "lr", "seeds", "metric", "mean"], rows))

    chosen_by = [(fmean(values), key) for key, values in found.items() if (key[0], key[2], key[-1]) == (1000, "none", CHOSEN_BY)]
    best = {arm: lr for _, (_, arm, _, lr, _) in sorted(chosen_by, reverse=True)}  # the last one has the lowest mean
    for arm in sorted(best.keys() - {"C"}):
        for name in dict.fromkeys(key[-1] for key in found):
            ours, theirs = (found.get((2000, one, "none", best.get(one), name)) for one in ("C", arm))
            if ours and theirs:
                low, high = ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
                low, mean, high = (format_metric(name, x) for x in (low, fmean(ours) - fmean(theirs), high))
                sys.stdout.write(f"C - {arm}, {name}: {mean}, 95% {low} to {high} (Welch)\n")
