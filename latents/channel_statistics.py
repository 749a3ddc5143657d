"""Mean and standard deviation of latents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from latents.shards import mean_and_log_variance


def channel_sums(latents: Tensor, kind: str) -> np.ndarray:
    """[3, C] float64 of latents [b, C or 2C, H, W]: number, sum and sum of squares of each channel's values.

    Of `moments`, those of their samples. The sums of parts add up to those of the whole.
    """
    x, log_variance = mean_and_log_variance(latents.double(), kind)
    squares = x.square() + (0.0 if log_variance is None else log_variance.exp())
    return np.stack([np.full(x.shape[1], x[:, 0].numel()), x.sum(dim=(0, 2, 3)), squares.sum(dim=(0, 2, 3))])


def mean_and_std(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[C] each, in the units of the stored latents, of `channel_sums`."""
    mean, square = sums[1:] / sums[0]
    return mean, np.sqrt(np.maximum(square - mean**2, 0))


def overall_std(mean: Sequence[float], std: Sequence[float]) -> float:
    """Standard deviation of all values together, from those of each channel: what EDM's sigma_data (section 5) means."""
    return (np.mean(np.square(mean) + np.square(std)) - np.mean(mean) ** 2).item() ** 0.5
