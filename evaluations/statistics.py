"""Mean and covariance of features in one pass, in float64. N samples, D features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import UserError


@dataclass(frozen=True)
class Statistics:
    """The Gaussian that is fitted to features. Other precisions become float64.

    Attributes:
        mu: [D] float64, the mean.
        sigma: [D, D] float64, the covariance with N - 1 in the denominator, as np.cov.
    """

    mu: Tensor
    sigma: Tensor

    def __post_init__(self):
        if self.mu.ndim != 1 or self.sigma.shape != 2 * self.mu.shape:
            raise UserError(f"mu {list(self.mu.shape)} and sigma {list(self.sigma.shape)} must be [D] and [D, D]")
        for name in ("mu", "sigma"):  # the dataclass is frozen
            object.__setattr__(self, name, getattr(self, name).double())
        if not (self.mu.isfinite().all() and self.sigma.isfinite().all()):
            raise UserError("mu or sigma holds NaN or infinity")
        tolerance = 1e-6 * self.sigma.abs().max() if len(self.mu) else 0.0
        if (self.sigma - self.sigma.T).abs().gt(tolerance).any() or self.sigma.diagonal().lt(-tolerance).any():
            raise UserError("sigma is no covariance: it must be symmetric, and nowhere negative on its diagonal")


def statistics_of(features: Tensor, chunk_size: int = 4096) -> Statistics:
    """Statistics of features [N, D] of any precision, on the CPU; only one chunk at a time is copied to float64.

    Sums are kept about the running mean (Chan, Golub and LeVeque 1983). The plain sum of x x^T loses digits where the mean is
    far larger than the spread. Raises UserError as `check_samples` does.
    """
    check_samples(features)
    count, dim = 0, features.shape[1]
    mean = torch.zeros(dim, dtype=torch.float64)
    scatter = torch.zeros(dim, dim, dtype=torch.float64)  # sum of (x - mean)(x - mean)^T
    for chunk in features.split(chunk_size):
        x = chunk.to(mean)
        chunk_mean, total = x.mean(0), count + len(x)
        shift = chunk_mean - mean
        between = shift * (count * len(x) / total) ** 0.5  # the scatter between the two means, as one more sample
        rows = torch.cat([x - chunk_mean, between[None]])
        scatter.addmm_(rows.T, rows)
        mean += shift * (len(x) / total)
        count = total
    sigma = scatter / (count - 1)
    return Statistics(mean, (sigma + sigma.T) / 2)


def check_samples(features: Tensor) -> None:
    """Raise UserError unless there are 2 samples [D] or more, all of them finite."""
    check_finite(features)
    if len(features) < 2:
        raise UserError(f"a covariance needs at least 2 samples, not {len(features)}")


def check_finite(features: Tensor) -> None:
    """Raise UserError unless features are real numbers [N, D] without NaN and infinity."""
    if features.ndim != 2 or features.is_complex():
        raise UserError(f"features are {features.dtype} {list(features.shape)}; need real numbers [N, D]")
    if bad := rows_not_finite(features):
        raise UserError(f"features hold NaN or infinity, first in sample {bad[0]} ({len(bad)} of {len(features)} samples)")


def rows_not_finite(features: Tensor) -> list[int]:
    return (~features.isfinite().all(dim=1)).nonzero().flatten().tolist()
