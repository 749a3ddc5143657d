"""All numbers of one evaluation, from two sets of features."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from errors import UserError
from evaluations import metrics
from evaluations.detector import InceptionDetector
from evaluations.digits_detector import DigitsDetector
from evaluations.features import Features
from evaluations.statistics import statistics_of

log = logging.getLogger(__name__)

NUM_NEIGHBOURS = 3
INCEPTION_SPLIT = 5000


def evaluate(
    reference: Features, samples: Features, labels: Tensor | None = None, device: torch.device | str = "cpu"
) -> dict[str, float]:
    """The metrics by name, lowest-is-best distances first.

    Inception gives `fid`, `sfid`, `inception_score`, `precision` and `recall`. The digits' detector gives `fd_digits`,
    `precision_digits`, `recall_digits` and, with labels, `class_agreement`: other features, so other names. A set with
    stored statistics but no images has no precision and recall. What to beware of (see `caveats`) is logged as warnings.

    Args:
        labels: [N] int64, the classes that were asked for, in the order of the samples.
        device: for the neighbour search.

    Raises:
        UserError: features of different detectors; too few samples to compute anything.
    """
    if reference.detector != samples.detector:
        raise UserError(f"the reference has features of {reference.detector}, the samples of {samples.detector}")
    for caveat in caveats(reference, samples):
        log.warning("%s", caveat)
    pool = reference.pool.to(device), samples.pool.to(device)
    has_neighbours = min(len(reference), len(samples)) > NUM_NEIGHBOURS
    precision, recall = metrics.precision_recall(*pool, NUM_NEIGHBOURS) if has_neighbours else (None, None)
    if reference.detector == DigitsDetector.name:
        result = {
            "fd_digits": _frechet_distance(reference, samples, "pool"),
            "precision_digits": precision,
            "recall_digits": recall,
            "class_agreement": None if labels is None else metrics.class_agreement(samples.logits, labels),
        }
    elif reference.detector == InceptionDetector.name:
        result = {
            "fid": _frechet_distance(reference, samples, "pool"),
            "sfid": _frechet_distance(reference, samples, "spatial"),
            "inception_score": metrics.inception_score(samples.logits, INCEPTION_SPLIT) if len(samples) else None,
            "precision": precision,
            "recall": recall,
        }
    else:
        raise UserError(f"no names for the metrics of detector {reference.detector!r}")
    return {name: value for name, value in result.items() if value is not None}


def caveats(reference: Features, samples: Features) -> list[str]:
    """What a reader of the numbers must know: too few images for what the metric usually means."""
    found = []
    distance = "FID and sFID" if samples.detector == InceptionDetector.name else f"fd_{samples.detector}"
    dim = samples.pool.shape[1]
    for name, features in (("samples", samples), ("reference images", reference)):
        if len(features) < dim and "pool" not in features.statistics:
            found.append(
                f"{distance} from {len(features)} {name}, fewer than the {dim} features: their covariance is singular and the "
                "distance biased upwards; compare it only with distances from equally many"
            )
        if len(features) <= NUM_NEIGHBOURS:
            found.append(f"no precision and recall: they need more than {NUM_NEIGHBOURS} images a side; {name}: {len(features)}")
    if samples.detector == InceptionDetector.name and len(samples):
        last = len(samples) % INCEPTION_SPLIT
        if len(samples) < INCEPTION_SPLIT:
            found.append(
                f"Inception Score from {len(samples)} samples, less than a split of {INCEPTION_SPLIT}: lower than from a full one"
            )
        elif last:
            found.append(
                f"Inception Score: the last split holds {last} of {INCEPTION_SPLIT} samples and counts like a full one, as in ADM"
            )
    return found


def _frechet_distance(reference: Features, samples: Features, layer: str) -> float | None:
    """By stored statistics where a side has them; None where a side has neither these nor features."""
    sides = [(features.statistics.get(layer), getattr(features, layer)) for features in (reference, samples)]
    if any(known is None and (x is None or len(x) == 0) for known, x in sides):
        return None
    (known1, x1), (known2, x2) = sides
    if known1 is None and known2 is None:
        return metrics.frechet_distance_of_features(x1, x2)
    if known1 is not None and known2 is not None:
        return metrics.frechet_distance(known1, known2)
    known, x = (known1, x2) if known2 is None else (known2, x1)
    if len(x) <= x.shape[1]:
        return metrics.frechet_distance_to_statistics(x, known)
    return metrics.frechet_distance(known, statistics_of(x))
