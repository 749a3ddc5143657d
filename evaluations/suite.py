"""Compute all metrics of two feature sets. METRICS lists the name, direction, format and function of each metric."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean, stdev

import torch
from torch import Tensor

from evaluations import metrics
from evaluations.features import Features

log = logging.getLogger(__name__)


@dataclass
class FeaturePair:
    """Reference and sample features that a metric compares. See `compute_metrics` for the meaning of `labels` and `device`."""

    reference: Features
    samples: Features
    labels: Tensor | None
    device: torch.device | str

    def frechet_distance(self, layer: str) -> float | None:
        """Compute the Frechet distance for a layer. Returns None if a set has no statistics and fewer than two images."""
        # Devices other than CUDA may lack float64, and the CPU needs only seconds.
        device = self.device if torch.device(self.device).type == "cuda" else "cpu"
        sides = [side.statistics_or_features(layer, device) for side in (self.reference, self.samples)]
        is_missing = any(side is None or (isinstance(side, Tensor) and len(side) < 2) for side in sides)
        if is_missing:
            return None
        return metrics.frechet_distance(*sides)

    @functools.cached_property
    def precision_recall(self) -> tuple[float | None, float | None]:
        """Compute precision and recall with one neighbour search. Returns (None, None) if a set has too few images."""
        if min(len(self.reference), len(self.samples)) <= metrics.NUM_NEIGHBOURS:
            return None, None
        reference, samples = self.reference.pool.to(self.device), self.samples.pool.to(self.device)
        return metrics.precision_recall(reference, samples, reference_squared_radii=self.reference.squared_radii_on(self.device))

    def class_agreement(self) -> float | None:
        """Compute the class agreement. Returns None without labels, or with labels that the detector does not know."""
        if self.labels is None or not 0 <= int(self.labels.min()) <= int(self.labels.max()) < self.samples.logits.shape[1]:
            return None
        return metrics.class_agreement(self.samples.logits, self.labels)


@dataclass(frozen=True)
class Metric:
    """A metric, and the detectors that provide its features."""

    name: str  # `{}` is replaced by the detector or its data set, because values depend on the detector
    detectors: tuple[str, ...]  # detector names, where `small` matches `small-<set>` for any data set
    direction: str  # which values are better, `lower` or `higher`
    format: str  # format in tables and logs (results.jsonl has full precision)
    compute: Callable[[FeaturePair], float | None]  # returns None if there are too few images or no labels
    in_jackknife: bool = True  # False if the metric is too slow to compute repeatedly


# The first metric that lists a detector is the primary metric of that detector.
METRICS = (
    Metric("fid", ("inception",), "lower", ".2f", lambda pair: pair.frechet_distance("pool")),
    Metric("sfid", ("inception",), "lower", ".2f", lambda pair: pair.frechet_distance("spatial")),
    Metric("inception_score", ("inception",), "higher", ".2f", lambda pair: metrics.inception_score(pair.samples.logits)),
    Metric("precision", ("inception",), "higher", ".3f", lambda pair: pair.precision_recall[0], False),
    Metric("recall", ("inception",), "higher", ".3f", lambda pair: pair.precision_recall[1], False),
    Metric("fd_{}", ("dinov2", "digits", "small"), "lower", ".2f", lambda pair: pair.frechet_distance("pool")),
    Metric("precision_{}", ("dinov2", "digits", "small"), "higher", ".3f", lambda pair: pair.precision_recall[0], False),
    Metric("recall_{}", ("dinov2", "digits", "small"), "higher", ".3f", lambda pair: pair.precision_recall[1], False),
    Metric("class_agreement", ("digits",), "higher", ".3f", FeaturePair.class_agreement),
    Metric("class_agreement_{}", ("small",), "higher", ".3f", FeaturePair.class_agreement),
)


def small_set(detector: str) -> str | None:
    """Return the data set in the name of a small-image detector (small-fashion -> fashion), or None for other detectors."""
    match = re.fullmatch(r"small-(?!digits$|dinov2$)([a-z][a-z0-9_]*)", detector)  # digits and dinov2 are other detectors
    return match and match[1]


def metrics_for(detector: str) -> list[Metric]:
    """List a detector's metrics with full names, starting with the primary metric. Returns [] for an unknown detector."""
    name = small_set(detector)
    rows = [metric for metric in METRICS if ("small" if name else detector) in metric.detectors]
    return [replace(metric, name=metric.name.format(name or detector)) for metric in rows]


def primary_metric(detectors: Sequence[str]) -> str:
    """Return the name of the first detector's primary metric, which tables rank by and sweepers minimise."""
    return metrics_for(detectors[0])[0].name


def find_metric(name: str) -> Metric | None:
    """Find the METRICS entry for a full name such as fid or fd_fashion. Returns None for an unknown name."""
    return next((metric for metric in METRICS if re.fullmatch(metric.name.replace("{}", "[a-z0-9_]+"), name)), None)


def compute_metrics(
    reference: Features, samples: Features, labels: Tensor | None = None, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Compute all metrics of the detector that extracted the features, in METRICS order.

    Metrics without enough data and values that are not finite are omitted.

    `labels` [N], int64, contains the requested classes. The neighbour search runs on `device`, as do Frechet distances on CUDA.
    """
    pair = FeaturePair(reference, samples, labels, device)
    values = {metric.name: metric.compute(pair) for metric in metrics_for(samples.detector)}
    if infinite := [name for name, value in values.items() if value is not None and not isfinite(value)]:
        log.warning("no %s: the value is NaN or infinite", ", ".join(infinite))
    if missing := [name for name, value in values.items() if value is None]:
        needs = "images (a distance needs 2, recall 4), statistics, or labels of the detector's classes"
        log.info("no %s: missing %s", ", ".join(missing), needs)
    return {name: value for name, value in values.items() if value is not None and isfinite(value)}


def jackknife(reference: Features, samples: Features, labels: Tensor | None, num_groups: int) -> dict[str, list[float]]:
    """Compute metrics num_groups times, each time leaving out a different group of consecutive samples.

    Returns {name: [value without group i]} for `metrics.standard_error`, or {} if a group would have fewer than two samples.
    A metric without a finite value for every group is omitted, because records are compared group by group.
    """
    values: dict[str, list[float]] = {}
    for group in torch.arange(len(samples)).tensor_split(num_groups) if len(samples) >= 2 * num_groups > 0 else ():
        rows = torch.cat([torch.arange(int(group[0])), torch.arange(int(group[-1]) + 1, len(samples))])
        pair = FeaturePair(reference, samples.select(rows), None if labels is None else labels[rows], "cpu")
        for metric in metrics_for(samples.detector):
            if metric.in_jackknife and (value := metric.compute(pair)) is not None and isfinite(value):
                values.setdefault(metric.name, []).append(value)
    return {name: complete for name, complete in values.items() if len(complete) == num_groups}


def display_name(metric: str, num_samples: int) -> str:
    """Append the sample count to a metric name, as in `fid50k`, or `fd_dinov2_5k` after a digit."""
    count = f"{num_samples // 1000}k" if num_samples % 1000 == 0 else str(num_samples)
    return f"{metric}{'_' if metric[-1].isdigit() else ''}{count}"


def format_metric(metric: str, value: float) -> str:
    """Format a value with the metric's format from METRICS, or with four significant digits for an unknown metric."""
    known = find_metric(metric)
    return f"{value:{known.format if known else '.4g'}}"


def format_mean(metric: str, values: Sequence[float]) -> str:
    """Format the mean and the sample standard deviation as in `40.00 ± 1.41`. A single value is formatted without a deviation."""
    return " ± ".join(format_metric(metric, x) for x in (fmean(values), *([stdev(values)] if len(values) > 1 else [])))


def format_metrics(values: dict[str, float]) -> str:
    """Format all metrics on one line, as in `fid 2.27, sfid 4.60`."""
    return ", ".join(f"{metric} {format_metric(metric, value)}" for metric, value in values.items())
