"""Mean and standard deviation of latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from torch import Tensor

from latents.shards import mean_and_log_variance


@dataclass
class ChannelStatistics:
    """Mean and standard deviation of each latent channel, in the units of the stored latents; of `moments`, of their samples."""

    count: int = 0  # values seen of each channel
    sums: Sequence[float] = ()  # [C], of these values
    square_sums: Sequence[float] = ()

    def add(self, latents: Tensor, kind: str) -> None:
        """Take in latents [b, C or 2C, H, W]."""
        x, log_variance = mean_and_log_variance(latents.double(), kind)
        squares = x.square() + (0.0 if log_variance is None else log_variance.exp())
        count = x.shape[0] * x.shape[2] * x.shape[3]
        self.merge(ChannelStatistics(count, x.sum(dim=(0, 2, 3)).tolist(), squares.sum(dim=(0, 2, 3)).tolist()))

    def merge(self, other: ChannelStatistics) -> None:
        self.count += other.count
        self.sums = [a + b for a, b in zip_longest(self.sums, other.sums, fillvalue=0.0)]
        self.square_sums = [a + b for a, b in zip_longest(self.square_sums, other.square_sums, fillvalue=0.0)]

    @property
    def mean(self) -> list[float]:
        return [total / self.count for total in self.sums]

    @property
    def std(self) -> list[float]:
        return [max(square / self.count - mean**2, 0.0) ** 0.5 for square, mean in zip(self.square_sums, self.mean)]


def overall_std(mean: Sequence[float], std: Sequence[float]) -> float:
    """Standard deviation of all values together, from those of each channel: what EDM's sigma_data (section 5) means."""
    return (np.mean(np.square(mean) + np.square(std)) - np.mean(mean) ** 2).item() ** 0.5
