"""Mean and standard deviation of latents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from latents.shards import LatentDataset, ShardInfo, mean_and_log_variance, normalize_latents, spread_items

# The usual range of the standard deviation of the network input, divided by sigma_data. With EDM's sigma_data of 0.5, scaled
# SD-VAE latents have 1.5 to 2, unscaled latents 10, and latents that were scaled twice 0.3.
USUAL_STD = (0.5, 4.0)


def channel_sums(latents: Tensor, kind: str) -> np.ndarray:
    """Compute number, sum and sum of squares of the values of each channel, float64 [3, C], from latents [b, C or 2C, H, W].

    For `moments`, these are the expected sums over their samples. The results for parts of the data add up to that for all data.
    """
    x, log_variance = mean_and_log_variance(latents.double(), kind)
    squares = x.square() + (0.0 if log_variance is None else log_variance.exp())
    return np.stack([np.full(x.shape[1], x[:, 0].numel()), x.sum(dim=(0, 2, 3)), squares.sum(dim=(0, 2, 3))])


def mean_and_std(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute mean and standard deviation [C] from the result of `channel_sums`."""
    mean, square = sums[1:] / sums[0]
    return mean, np.sqrt(np.maximum(square - mean**2, 0))


def for_network(mean: np.ndarray, std: np.ndarray, info: ShardInfo) -> tuple[list[float], list[float]]:
    """Convert mean and standard deviation of each channel of the stored latents to those of the network input."""
    normalized = normalize_latents(torch.from_numpy(mean).reshape(-1, 1, 1), info)
    return normalized.flatten().tolist(), (std * info.scale_factor / (info.latents_std or 1.0)).tolist()


def estimate_std(dataset: LatentDataset) -> float:
    """Estimate the standard deviation of all values of the network input from 256 items spread over the data."""
    items = spread_items(len(dataset), 256)
    sums = channel_sums(dataset.fetch(items, np.zeros(len(items), dtype=bool))[0], dataset.info.kind)
    return overall_std(*for_network(*mean_and_std(sums), dataset.info))


def are_mirrored(latents: Tensor, flipped: Tensor) -> bool:
    """Return whether `flipped` holds the latents of the mirrored images. Both are [n, C, H, W], in the same order.

    An autoencoder maps a mirrored image to nearly the mirrored latents. Therefore, most of `flipped` must be closer to the
    mirrored latents of their own image than to those of any other image. In total, `flipped` must also be closer to the mirrored
    than to the unmirrored latents.
    """
    latents, flipped = (x.float().nan_to_num(0, 0, 0) for x in (latents, flipped))
    mirrored = latents.flip(-1)
    # The faster mode rounds, so equal latents would not have equal distances.
    distances = torch.cdist(flipped.flatten(1), mirrored.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
    is_nearest = distances.diagonal() <= distances.amin(dim=1)
    is_mirrored = (flipped - mirrored).square().sum() <= (flipped - latents).square().sum()
    return bool(is_mirrored and is_nearest.float().mean() > 0.5)


def overall_std(mean: Sequence[float], std: Sequence[float]) -> float:
    """Compute the standard deviation of all values, EDM's sigma_data (section 5), from means and deviations of channels."""
    return (np.mean(np.square(mean) + np.square(std)) - np.mean(mean) ** 2).item() ** 0.5
