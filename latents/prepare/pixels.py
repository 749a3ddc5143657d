"""The images in shards of pixels (autoencoder=identity), for a reference batch of exactly what training reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common.errors import UserError
from latents.autoencoders import to_uint8
from latents.shards import LatentDataset, mean_and_log_variance


class PixelShards:
    """A folder of shards as a set of images, like `evaluations.images.ImageFolder`; grey becomes RGB.

    Attributes:
        shape: (N, H, W, 3).
        labels: [N] int64.

    Raises:
        UserError: no shards, or shards of latents.
    """

    def __init__(self, path: str | Path):
        self.path, self.dataset, self.statistics = Path(path), LatentDataset(path), {}
        if self.dataset.info.autoencoder != "identity":
            raise UserError(f"images={path} holds latents of {self.dataset.info.autoencoder}; give the images they were made of")
        self.shape = (len(self.dataset), self.dataset.height, self.dataset.width, 3)
        self.labels, self.fingerprint = self.dataset.labels, self.dataset.fingerprint

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, batch_size: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """As `NpzImages.batches`."""
        numbers = np.arange(len(self))[start:stop]
        for i in range(0, len(numbers), batch_size):
            batch = numbers[i : i + batch_size]
            stored, _ = self.dataset.fetch(batch, np.zeros(len(batch), dtype=bool))
            yield to_uint8(mean_and_log_variance(stored.float(), self.dataset.info.kind)[0]).numpy()
