"""The images in shards of pixels (autoencoder=identity), for a reference batch of exactly what training reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.errors import UserError
from latents.autoencoders import to_uint8
from latents.shards import LatentDataset, mean_and_log_variance


class PixelShards:
    """The images of a folder of shards; grey becomes RGB.

    Attributes:
        shape: (N, H, W, 3).
        labels: [N] int64.

    Raises:
        UserError: no shards, or shards of latents.
    """

    def __init__(self, path: str | Path):
        self.dataset = LatentDataset(path)
        if self.dataset.info.autoencoder != "identity":
            raise UserError(f"images={path} holds latents of {self.dataset.info.autoencoder}; give the images they were made of")
        self.shape = (len(self.dataset), self.dataset.height, self.dataset.width, 3)
        self.labels = self.dataset.labels

    def batches(self, batch_size: int) -> Iterator[np.ndarray]:
        """Images in order, uint8 [b, H, W, 3] each."""
        numbers = np.arange(len(self.dataset))
        for i in range(0, len(numbers), batch_size):
            batch = numbers[i : i + batch_size]
            stored, _ = self.dataset.fetch(batch, np.zeros(len(batch), dtype=bool))
            yield to_uint8(mean_and_log_variance(stored.float(), self.dataset.info.kind)[0]).numpy()
