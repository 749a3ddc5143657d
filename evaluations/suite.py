"""The table of metrics, all metrics of two sets of features, and the names that figures are kept under.

A metric is one entry of METRICS: evaluation, fid.py, training and reports take its name, direction and format from there.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from common.errors import UserError
from evaluations import metrics
from evaluations.features import Features

log = logging.getLogger(__name__)

NUM_NEIGHBOURS = 3
INCEPTION_SPLIT = 5000


@dataclass
class FeaturePair:
    """What a metric is computed from; see `evaluate`."""

    reference: Features
    samples: Features
    labels: Tensor | None
    device: torch.device | str

    def frechet_distance(self, layer: str) -> float | None:
        """None where a side has neither images nor stored statistics of the layer."""
        sides = [side.statistics.get(layer, getattr(side, layer)) for side in (self.reference, self.samples)]
        is_missing = any(side is None or (isinstance(side, Tensor) and not len(side)) for side in sides)
        return None if is_missing else metrics.frechet_distance(*sides)

    @functools.cached_property
    def precision_recall(self) -> tuple[float | None, float | None]:
        """Both at once, as they share the neighbour search; None where a side has too few images."""
        if min(len(self.reference), len(self.samples)) <= NUM_NEIGHBOURS:
            return None, None
        return metrics.precision_recall(self.reference.pool.to(self.device), self.samples.pool.to(self.device), NUM_NEIGHBOURS)

    def inception_score(self) -> float | None:
        return metrics.inception_score(self.samples.logits, INCEPTION_SPLIT) if len(self.samples) else None

    def class_agreement(self) -> float | None:
        return None if self.labels is None else metrics.class_agreement(self.samples.logits, self.labels)


# ----------------------------------------------------------------------------------------------------------------------
# The table.


@dataclass(frozen=True)
class Metric:
    """A metric of the features of one detector.

    Attributes:
        name: full names append the sample count.
        format: a format specification, for people; files keep full precision.
        compute: the value, or None where there is too little to compute it from.
    """

    name: str
    detector: str
    direction: Literal["lower", "higher"]
    format: str
    compute: Callable[[FeaturePair], float | None]


# The first one of a detector is its primary metric. Each detector has its own names, because its features give other numbers.
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("fid", "inception", "lower", ".2f", lambda pair: pair.frechet_distance("pool")),
        Metric("sfid", "inception", "lower", ".2f", lambda pair: pair.frechet_distance("spatial")),
        Metric("inception_score", "inception", "higher", ".2f", FeaturePair.inception_score),
        Metric("precision", "inception", "higher", ".3f", lambda pair: pair.precision_recall[0]),
        Metric("recall", "inception", "higher", ".3f", lambda pair: pair.precision_recall[1]),
        Metric("fd_dinov2", "dinov2", "lower", ".2f", lambda pair: pair.frechet_distance("pool")),
        Metric("precision_dinov2", "dinov2", "higher", ".3f", lambda pair: pair.precision_recall[0]),
        Metric("recall_dinov2", "dinov2", "higher", ".3f", lambda pair: pair.precision_recall[1]),
        Metric("fd_digits", "digits", "lower", ".2f", lambda pair: pair.frechet_distance("pool")),
        Metric("precision_digits", "digits", "higher", ".3f", lambda pair: pair.precision_recall[0]),
        Metric("recall_digits", "digits", "higher", ".3f", lambda pair: pair.precision_recall[1]),
        Metric("class_agreement", "digits", "higher", ".3f", FeaturePair.class_agreement),
    )
}


SMALL = "small-"  # and the name of a set: the detectors of evaluations/small_detector.py
_SET = r"[a-z_]*[a-z]"  # names of metrics must not end in a digit


def set_of(detector: str) -> str | None:
    """The set of a detector of small pictures: small-fashion -> fashion. None for other names."""
    name = detector.removeprefix(SMALL)
    return name if name != detector and re.fullmatch(_SET, name) and f"fd_{name}" not in METRICS else None


@functools.cache
def _metrics_of_set(name: str) -> tuple[Metric, ...]:
    return (
        Metric(f"fd_{name}", f"{SMALL}{name}", "lower", ".2f", lambda pair: pair.frechet_distance("pool")),
        Metric(f"class_agreement_{name}", f"{SMALL}{name}", "higher", ".3f", FeaturePair.class_agreement),
    )


def metrics_of(detector: str) -> list[Metric]:
    """The metrics of a detector, the primary one first."""
    if name := set_of(detector):
        return list(_metrics_of_set(name))
    return [metric for metric in METRICS.values() if metric.detector == detector]


def evaluate(
    reference: Features, samples: Features, labels: Tensor | None = None, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """The metrics of the detector by name, in the order of the table, without those that cannot be computed.

    Each of the caveats is logged once, however often it applies.
    `class_agreement` needs labels; precision and recall need images on both sides, not only stored statistics.

    Args:
        labels: [N] int64, the classes that were asked for, in the order of the samples.
        device: for the neighbour search.

    """
    if reference.detector != samples.detector:
        raise UserError(f"the reference has features of {reference.detector}, the samples of {samples.detector}")
    for caveat in caveats(reference, samples):
        _warn_once(caveat)
    pair = FeaturePair(reference, samples, labels, device)
    values = {metric.name: metric.compute(pair) for metric in metrics_of(samples.detector)}
    return {name: value for name, value in values.items() if value is not None}


@functools.cache
def _warn_once(caveat: str) -> None:
    """At the first evaluation alone: a run repeats it at every guidance scale and step."""
    log.warning("%s", caveat)


def caveats(reference: Features, samples: Features) -> list[str]:
    """What a reader of the numbers must know: too few images for what the metric usually means."""
    found = []
    is_inception = samples.detector == "inception"
    distance = "FID and sFID" if is_inception else f"fd_{samples.detector.removeprefix(SMALL)}"
    dim = max(samples.pool.shape[1], reference.pool.shape[1])  # without images, a side has no features
    for name, features in (("samples", samples), ("reference images", reference)):
        if len(features) < dim and "pool" not in features.statistics:
            found.append(
                f"{distance} from {len(features)} {name}, fewer than the {dim} features: their covariance is singular and the "
                "distance biased upwards; compare it only with distances from equally many"
            )
        if len(features) <= NUM_NEIGHBOURS and set_of(samples.detector) is None:
            found.append(f"no precision and recall: they need more than {NUM_NEIGHBOURS} images a side; {name}: {len(features)}")
    if is_inception and 0 < len(samples) < INCEPTION_SPLIT:
        size = f"{len(samples)} samples, less than a split of {INCEPTION_SPLIT}"
        found.append(f"Inception Score from {size}: lower than from a full one")
    elif is_inception and (last_split := len(samples) % INCEPTION_SPLIT):
        size = f"{last_split} of {INCEPTION_SPLIT} samples"
        found.append(f"Inception Score: the last split holds {size} and counts like a full one, as in ADM")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Full names: `fid50k/cfg1.5` is FID of 50,000 samples under guidance scale 1.5; `fd_digits250` names no guidance. After a
# digit, an underscore comes first: `fd_dinov2_50k`.

_FULL_NAME = re.compile(r"(?P<metric>[a-z]\w*?[a-z_])(?P<count>\d+)(?P<thousands>k?)(?:/(?P<guidance>.+))?")


class MetricName(NamedTuple):
    """The parts of a full name."""

    metric: str  # a key of METRICS, or of an older or newer table
    num_samples: int
    guidance: str  # `cfg1.5` or other words; empty if the name has none


def metric_name(metric: str, num_samples: int, guidance: float | str) -> str:
    """`fid5k/cfg1.5`. `guidance` is the scale of classifier-free guidance (1 is none), or words for any other."""
    words = guidance if isinstance(guidance, str) else f"cfg{float(guidance)}"
    return f"{counted_name(metric, num_samples)}/{words}"


def counted_name(metric: str, num_samples: int) -> str:
    """`fid5k`, `fd_dinov2_5k`: a metric and its number of samples."""
    return f"{metric}{'_' if metric[-1].isdigit() else ''}{short_count(num_samples)}"


def short_count(count: int) -> str:
    """50000 -> 50k, 250 -> 250: the sample count as it stands in the names of metrics."""
    return f"{count // 1000}k" if count % 1000 == 0 else str(count)


def read_metric_name(name: str) -> MetricName | None:
    """The parts of a full name; None where it is none (`loss`)."""
    if name in METRICS or not (parts := _FULL_NAME.fullmatch(name)):
        return None
    metric = parts["metric"].removesuffix("_")
    return MetricName(metric, int(parts["count"]) * (1000 if parts["thousands"] else 1), parts["guidance"] or "")


def find_metric(name: str) -> Metric | None:
    """The metric of a full name or a plain one; None where the table has none."""
    parts = read_metric_name(name)
    metric = parts.metric if parts else name
    of_set = re.fullmatch(rf"(?:fd|class_agreement)_({_SET})", metric)
    if metric in METRICS or not of_set:
        return METRICS.get(metric)
    return next(one for one in _metrics_of_set(of_set[1]) if one.name == metric)


def rank_of(name: str) -> int:
    """The place of a metric in its table, for sorting; other names come last."""
    metric = find_metric(name)
    if metric is None:
        return 2 * len(METRICS)
    return (
        list(METRICS).index(metric.name) if metric.name in METRICS else len(METRICS) + metrics_of(metric.detector).index(metric)
    )


def format_metric(name: str, value: float) -> str:
    """A value as people read it: in the table's format, four significant digits for other names."""
    metric = find_metric(name)
    return f"{value:{metric.format if metric else '.4g'}}"


def format_metrics(values: dict[str, float]) -> str:
    """`fid 2.27, sfid 4.60`: values by full or plain name as one line."""
    return ", ".join(f"{name} {format_metric(name, value)}" for name, value in values.items())


def display_name(metric: str, num_samples: int, cfg_scale: float | None = None) -> str:
    return counted_name(metric, num_samples) if cfg_scale is None else metric_name(metric, num_samples, cfg_scale)
