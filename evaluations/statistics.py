"""Mean and covariance of features in one pass, in float64, mergeable across processes.

N samples, D features. Sums are kept about the running mean (Chan, Golub and LeVeque 1983), so that features with a mean far
larger than their spread lose no digits, which the plain sum of x x^T does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from errors import UserError


@dataclass(frozen=True)
class Statistics:
    """What a Gaussian fitted to features needs.

    Attributes:
        mu: [D] float64, the mean.
        sigma: [D, D] float64, the covariance with N - 1 in the denominator, as np.cov.
    """

    mu: Tensor
    sigma: Tensor

    def __post_init__(self):
        if self.mu.ndim != 1 or self.sigma.shape != 2 * self.mu.shape:
            raise UserError(f"mu {list(self.mu.shape)} and sigma {list(self.sigma.shape)} must be [D] and [D, D]")
        if not (self.mu.isfinite().all() and self.sigma.isfinite().all()):
            raise UserError("mu or sigma holds NaN or infinity")


class RunningStatistics:
    """Accumulates batches; the result does not depend on how the samples were cut into batches and shards.

    Args:
        dim: D.
        device: where the sums are kept; it must know float64.
    """

    def __init__(self, dim: int, device: torch.device | str = "cpu"):
        self.count = 0
        self.mean = torch.zeros(dim, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(dim, dim, dtype=torch.float64, device=device)  # sum of (x - mean)(x - mean)^T

    def update(self, features: Tensor) -> None:
        """Add a batch [b, D], without padded or duplicated samples.

        Raises:
            UserError: another D, or NaN or infinite features.
        """
        if features.ndim != 2 or features.shape[1] != len(self.mean):
            raise UserError(f"features are {list(features.shape)}, not [b, {len(self.mean)}]")
        if not features.isfinite().all():
            raise UserError("features hold NaN or infinity")
        if len(features):
            x = features.to(self.mean)
            mean = x.mean(0)
            self._add(len(x), mean, x - mean)

    def merge(self, other: RunningStatistics) -> None:
        """Add what another shard or process accumulated."""
        if len(other.mean) != len(self.mean):
            raise UserError(f"cannot merge statistics of {len(other.mean)} features into {len(self.mean)}")
        if other.count:
            self._add(other.count, other.mean.to(self.mean), None)
            self.scatter += other.scatter.to(self.scatter)

    def _add(self, count: int, mean: Tensor, centred: Tensor | None) -> None:
        total = self.count + count
        shift = mean - self.mean
        rows = (shift * (self.count * count / total) ** 0.5)[None]  # the scatter between the two means, as one more sample
        if centred is not None:
            rows = torch.cat([centred, rows])
        self.scatter.addmm_(rows.T, rows)
        self.mean += shift * (count / total)
        self.count = total

    def pack(self) -> Tensor:
        """[1 + D + D * D] float64: one tensor to send to another process."""
        count = torch.tensor([self.count], dtype=torch.float64, device=self.mean.device)  # exact below 2^53
        return torch.cat([count, self.mean, self.scatter.flatten()])

    @classmethod
    def unpack(cls, packed: Tensor, dim: int) -> RunningStatistics:
        if packed.shape != (1 + dim + dim * dim,):
            raise UserError(f"packed statistics are {list(packed.shape)}, not [{1 + dim + dim * dim}] for {dim} features")
        result = cls(dim, packed.device)
        result.count = int(packed[0].item())
        result.mean = packed[1 : 1 + dim].clone()
        result.scatter = packed[1 + dim :].reshape(dim, dim).clone()
        return result

    def result(self) -> Statistics:
        """The statistics so far, on the CPU.

        Raises:
            UserError: fewer than 2 samples.
        """
        if self.count < 2:
            raise UserError(f"a covariance needs at least 2 samples, not {self.count}")
        sigma = self.scatter / (self.count - 1)
        return Statistics(self.mean.cpu(), ((sigma + sigma.T) / 2).cpu())


def statistics_of(features: Tensor, chunk_size: int = 4096) -> Statistics:
    """Statistics of features [N, D] of any precision; needs memory for one float64 chunk only."""
    running = RunningStatistics(features.shape[1])
    for chunk in features.split(chunk_size):
        running.update(chunk)
    return running.result()
