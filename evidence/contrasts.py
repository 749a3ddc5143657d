"""Find values in the lines of a results file, compare them, and print the tables that several rules need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from scipy.special import nctdtrinc
from scipy.stats import t

from evaluations.suite import format_mean
from evaluations.tables import markdown_table

FOLDER = Path(__file__).parent / "results" / "fashion"
DISTANCE, LOSS = "fd_fashion", "validation_loss"
NAMES = {
    DISTANCE: "distance", "class_agreement_fashion": "agreement", "precision_fashion": "precision", "recall_fashion": "recall",
}  # fmt: skip


def find_lines(lines: list[dict], metric: str, **wanted: object) -> list[dict]:
    """Return all lines that have the metric and contain the `wanted` entries."""
    return [line for line in lines if metric in line["metrics"] and wanted.items() <= line.items()]


def find_values(lines: list[dict], metric: str, **wanted: object) -> dict[int, float]:
    """Return the metric by training seed, for all lines that contain the `wanted` entries."""
    return {line["seed"]: line["metrics"][metric] for line in find_lines(lines, metric, **wanted)}


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    sys.stdout.write(markdown_table(columns, rows) + "\n")


def show_loss_ratios(lines: list[dict], *conditions: dict[str, object], name: str = "validation loss") -> None:
    """Print the ratio of the mean validation losses of two conditions by noise level, in a row called `name`."""
    losses = [[line["validation_loss_by_level"] for line in find_lines(lines, LOSS, **wanted)] for wanted in conditions]
    ratios = np.divide(*(np.mean(levels, axis=0) for levels in losses)) if all(losses) else []
    columns = ["noise level", *map(str, range(1, len(ratios) + 1))]
    print_table(columns, [[name, *(f"{ratio:.3f}" for ratio in ratios)]])


def as_ratio(log_ratio: float) -> str:
    """Format the logarithm of a ratio as the ratio."""
    return f"{exp(log_ratio):.2f}"


def mean_text(metric: str, values: Sequence[float]) -> str:
    return format_mean(metric, values) if values else ""


def paired(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, list[float]]:
    """Return the differences of two arms by training seed as one group with a weight of 1."""
    return 1, [a - b for a, b in zip(ours, theirs)]


def pooled_deviation(groups: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Compute the pooled standard deviation within groups, which assumes equal variances, and its degrees of freedom."""
    df = sum(len(values) - 1 for values in groups)
    squares = sum((x - fmean(values)) ** 2 for values in groups for x in values)
    return sqrt(squares / df) if df else float("nan"), df


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of group means, where each group is a set of runs."""

    estimate: float
    error: float  # standard error of the estimate
    df: float  # degrees of freedom of the standard error

    @staticmethod
    def of(groups: Sequence[tuple[float, Sequence[float]]], spread: tuple[float, int] | None = None) -> Contrast:
        """Compute a contrast from groups of (weight, values of runs). `spread` defaults to the `pooled_deviation` of `groups`."""
        deviation, df = spread or pooled_deviation([values for _, values in groups])
        estimate = sum(weight * fmean(values) for weight, values in groups)
        return Contrast(estimate, deviation * sqrt(sum(weight**2 / len(values) for weight, values in groups)), df)

    @staticmethod
    def welch(groups: Sequence[tuple[float, Sequence[float]]]) -> Contrast:
        """Compute a contrast of groups with different variances. The degrees of freedom follow Welch and Satterthwaite."""
        variances = [weight**2 * stdev(values) ** 2 / len(values) for weight, values in groups]
        df = sum(variances) ** 2 / sum(x**2 / (len(values) - 1) for x, (_, values) in zip(variances, groups))
        return Contrast(sum(weight * fmean(values) for weight, values in groups), sqrt(sum(variances)), df)

    @property
    def p_value(self) -> float:
        return 2 * t.sf(abs(self.estimate) / self.error, self.df)

    def text(self, text_of: Callable[[float], str]) -> str:
        """Format the estimate with its 95% interval.

        If the interval contains zero, also print the effect that a repetition would detect with a probability of 80%. The t
        statistic of this effect has a noncentral t distribution.
        """
        quantile = t.ppf(0.975, self.df)
        low, high = self.estimate - quantile * self.error, self.estimate + quantile * self.error
        power = f"; 80%: {text_of(nctdtrinc(self.df, 0.2, quantile) * self.error)}" if low < 0 < high else ""
        return f"{text_of(self.estimate)} ({text_of(low)} to {text_of(high)}{power})"


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple comparisons with Holm's method (1979)."""
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = highest
    return corrected
