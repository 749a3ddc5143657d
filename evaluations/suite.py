"""Compute all metrics of two sets of features. The table METRICS lists their names, directions, formats and functions."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import torch
from torch import Tensor

from common.detectors import small_set
from evaluations import metrics
from evaluations.features import Features

log = logging.getLogger(__name__)


@dataclass
class FeaturePair:
    """The input of a metric: features of the reference and of the samples. Labels and device are those of `evaluate`."""

    reference: Features
    samples: Features
    labels: Tensor | None
    device: torch.device | str

    def frechet_distance(self, layer: str) -> float | None:
        """Compute the distance for a layer. Returns None if a side has neither statistics of the layer nor two images."""
        sides = [side.statistics.get(layer, getattr(side, layer)) for side in (self.reference, self.samples)]
        is_missing = any(side is None or (isinstance(side, Tensor) and len(side) < 2) for side in sides)
        if is_missing:
            return None
        if torch.device(self.device).type == "cuda":  # other devices may lack float64, and the CPU takes only seconds
            sides = [side.to(self.device) for side in sides]
        return metrics.frechet_distance(*sides)

    @functools.cached_property
    def precision_recall(self) -> tuple[float | None, float | None]:
        """Compute both at once, because they share the neighbour search. Both are None if a side has too few images."""
        if min(len(self.reference), len(self.samples)) <= metrics.NUM_NEIGHBOURS:
            return None, None
        return metrics.precision_recall(self.reference.pool.to(self.device), self.samples.pool.to(self.device))

    def class_agreement(self) -> float | None:
        return None if self.labels is None else metrics.class_agreement(self.samples.logits, self.labels)


@dataclass(frozen=True)
class Metric:
    """A metric of the features of certain detectors."""

    name: str  # `{}` stands for the detector or its set, because values depend on the detector
    detectors: tuple[str, ...]  # names of the detectors, where `small` stands for `small-<set>` of any set
    direction: str  # which values are better, `lower` or `higher`
    format: str  # format of a value in tables and logs (files keep full precision)
    compute: Callable[[FeaturePair], float | None]  # returns None if images or labels are missing
    in_jackknife: bool = True  # False if it is too slow to repeat


# A detector's first metric is its primary metric.
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


def metrics_for(detector: str) -> list[Metric]:
    """List the metrics of a detector with full names, the primary metric first. The list is empty for an unknown detector."""
    name = small_set(detector)
    rows = [metric for metric in METRICS if ("small" if name else detector) in metric.detectors]
    return [replace(metric, name=metric.name.format(name or detector)) for metric in rows]


def find_metric(name: str) -> Metric | None:
    """Find the row of METRICS for a full name such as fid or fd_fashion. Returns None for other names."""
    return next((metric for metric in METRICS if re.fullmatch(metric.name.replace("{}", "[a-z0-9_]+"), name)), None)


def evaluate(
    reference: Features, samples: Features, labels: Tensor | None = None, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Compute all metrics of the detector that made the features, in the order of METRICS. Omit those without enough data.

    labels: [N] int64, the requested class of each sample. device: where the neighbour search runs.
    """
    pair = FeaturePair(reference, samples, labels, device)
    values = {metric.name: metric.compute(pair) for metric in metrics_for(samples.detector)}
    if missing := [name for name, value in values.items() if value is None]:
        log.info("no %s: images or labels are missing", ", ".join(missing))
    return {name: value for name, value in values.items() if value is not None}


def jackknife(reference: Features, samples: Features, labels: Tensor | None, num_groups: int) -> dict[str, list[float]]:
    """Compute metrics without each of num_groups groups of consecutive samples: {name: [value without group i]}.

    `metrics.standard_error` takes such a list. The result is empty if a group would have fewer than two samples.
    """
    values: dict[str, list[float]] = {}
    for group in torch.arange(len(samples)).tensor_split(num_groups) if len(samples) >= 2 * num_groups > 0 else ():
        rows = torch.cat([torch.arange(int(group[0])), torch.arange(int(group[-1]) + 1, len(samples))])
        without = replace(samples, statistics={}, **{name: x[rows] for name, x in samples.tensors().items()})
        pair = FeaturePair(reference, without, None if labels is None else labels[rows], "cpu")
        for metric in metrics_for(samples.detector):
            if metric.in_jackknife and (value := metric.compute(pair)) is not None:
                values.setdefault(metric.name, []).append(value)
    return values


def display_name(metric: str, num_samples: int, cfg_scale: float | None = None) -> str:
    """Add sample count and guidance scale (1: no guidance) to a name: `fid50k/cfg1.5`, or `fd_dinov2_5k` after a digit."""
    count = f"{num_samples // 1000}k" if num_samples % 1000 == 0 else str(num_samples)
    return f"{metric}{'_' if metric[-1].isdigit() else ''}{count}" + ("" if cfg_scale is None else f"/cfg{float(cfg_scale)}")


def format_metric(metric: str, value: float) -> str:
    """Format a value as METRICS says, or with four significant digits if the metric is unknown."""
    found = find_metric(metric)
    return f"{value:{found.format if found else '.4g'}}"


def format_mean(metric: str, values: Sequence[float]) -> str:
    """Format mean and standard deviation (n - 1) as `40.00 ± 1.41`. A single value has no deviation."""
    return " ± ".join(format_metric(metric, x) for x in (fmean(values), *([stdev(values)] if len(values) > 1 else [])))


def format_metrics(values: dict[str, float]) -> str:
    """Format all values on one line: `fid 2.27, sfid 4.60`."""
    return ", ".join(f"{metric} {format_metric(metric, value)}" for metric, value in values.items())
