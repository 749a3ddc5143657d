"""Compute the mean and standard deviation of latents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from latents.dataset import LatentDataset, evenly_spaced_items
from latents.shards import ShardInfo, mean_and_log_variance, normalize_latents

# Usual range of the network input's standard deviation divided by sigma_data. With EDM's sigma_data of 0.5, this ratio is 1.5 to
# 2 for scaled SD-VAE latents, 10 for unscaled latents, and 0.3 for latents that were scaled twice.
USUAL_STD = (0.5, 4.0)


def channel_sums(latents: Tensor, kind: str) -> np.ndarray:
    """Compute each channel's count, sum and sum of squares, float64 [3, C], from latents [b, C or 2C, H, W].

    For `moments`, compute the expected sums over sampled latents. The results of several batches can be added.
    """
    x, log_variance = mean_and_log_variance(latents.double(), kind)
    squares = x.square() + (0.0 if log_variance is None else log_variance.exp())
    return np.stack([np.full(x.shape[1], x[:, 0].numel()), x.sum(dim=(0, 2, 3)), squares.sum(dim=(0, 2, 3))])


def mean_and_std(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the mean [C] and standard deviation [C] of each channel from the result of `channel_sums`."""
    mean, square = sums[1:] / sums[0]
    return mean, np.sqrt(np.maximum(square - mean**2, 0))


def to_network_scale(mean: np.ndarray, std: np.ndarray, info: ShardInfo) -> tuple[list[float], list[float]]:
    """Convert per-channel means and standard deviations from the scale of the stored latents to that of the network input."""
    normalized = normalize_latents(torch.from_numpy(mean).reshape(-1, 1, 1), info)
    return normalized.flatten().tolist(), (std * info.scale_factor / (info.latents_std or 1.0)).tolist()


def estimate_std(dataset: LatentDataset) -> float:
    """Estimate the standard deviation of the network input over all channels from 256 evenly spaced items of the data set."""
    items = evenly_spaced_items(len(dataset), 256)
    sums = channel_sums(dataset.fetch(items)[0], dataset.info.kind)
    return overall_std(*to_network_scale(*mean_and_std(sums), dataset.info))


def are_mirrored(latents: Tensor, flipped: Tensor) -> bool:
    """Return whether `flipped` contains the latents of the mirrored images. Both tensors are [n, C, H, W] in the same order.

    An autoencoder maps a mirrored image to approximately the mirrored latent, so the function checks two conditions. For more
    than half of the images, `flipped` must be closest to the mirrored latent of the same image. Over all images, `flipped` must
    be closer to the mirrored latents than to the unmirrored latents.
    """
    latents, flipped = (x.float().nan_to_num(0, 0, 0) for x in (latents, flipped))
    mirrored = latents.flip(-1)
    # Do not use the faster matmul mode, because its rounding errors would give identical latents different distances.
    distances = torch.cdist(flipped.flatten(1), mirrored.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
    is_nearest = distances.diagonal() <= distances.amin(dim=1)
    is_mirrored = (flipped - mirrored).square().sum() <= (flipped - latents).square().sum()
    return bool(is_mirrored and is_nearest.float().mean() > 0.5)


def overall_std(mean: Sequence[float], std: Sequence[float]) -> float:
    """Compute the standard deviation over all channels, EDM's sigma_data (section 5), from each channel's `mean` and `std`."""
    return (np.mean(np.square(mean) + np.square(std)) - np.mean(mean) ** 2).item() ** 0.5
