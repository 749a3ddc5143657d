"""Mean and standard deviation of latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from latents.shards import mean_and_log_variance


@dataclass
class ChannelStatistics:
    """Mean and standard deviation of each latent channel, in the units of the stored latents; of `moments`, of their samples."""

    count: int = 0  # values seen of each channel
    sums: list[float] = field(default_factory=list)  # [C], of these values
    square_sums: list[float] = field(default_factory=list)

    def add(self, latents: Tensor, kind: str) -> None:
        """Take in latents [b, C or 2C, H, W]."""
        x, log_variance = mean_and_log_variance(latents.double(), kind)
        squares = x.square() + (0.0 if log_variance is None else log_variance.exp())
        count = x.shape[0] * x.shape[2] * x.shape[3]
        self.merge(ChannelStatistics(count, x.sum(dim=(0, 2, 3)).tolist(), squares.sum(dim=(0, 2, 3)).tolist()))

    def merge(self, other: ChannelStatistics) -> None:
        if other.count:
            zeros = [0.0] * len(other.sums)
            self.sums = [a + b for a, b in zip(self.sums or zeros, other.sums)]
            self.square_sums = [a + b for a, b in zip(self.square_sums or zeros, other.square_sums)]
            self.count += other.count

    @property
    def mean(self) -> list[float]:
        return [total / self.count for total in self.sums]

    @property
    def std(self) -> list[float]:
        return [max(square / self.count - mean**2, 0.0) ** 0.5 for square, mean in zip(self.square_sums, self.mean)]


def overall_std(mean: Sequence[float], std: Sequence[float]) -> float:
    """Standard deviation of all values of all channels together, as EDM's sigma_data and SD-VAE's 0.18215 mean it.

    EDM (section 5) scales the network's input by the standard deviation of the training data, one number for all its
    values. Latent diffusion's scale factor is 1 / std of all values of a batch of drawn latents (its `scale_by_std`).
    Within channels it would be less where the means of the channels differ, and the network sees these differences.

    Args:
        mean, std: of each channel.
    """
    return (np.mean(np.square(mean) + np.square(std)) - np.mean(mean) ** 2).item() ** 0.5
