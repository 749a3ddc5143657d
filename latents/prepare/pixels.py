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
        self.path, self.statistics = Path(path), {}
        self.dataset = LatentDataset(path)
        if self.dataset.info.autoencoder != "identity":
            raise UserError(
                f"images={path} holds latents of {self.dataset.info.autoencoder}; give the images that they were made of, or "
                "shards of pixels (encode autoencoder=identity kind=sample)"
            )
        self.shape = (len(self.dataset), self.dataset.height, self.dataset.width, 3)
        self.labels = self.dataset.labels

    def __len__(self) -> int:
        return len(self.dataset)

    def batches(self, batch_size: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """As `NpzImages.batches`."""
        stop = len(self) if stop is None else stop
        for i in range(start, stop, batch_size):
            numbers = np.arange(i, min(i + batch_size, stop))
            stored, _ = self.dataset.fetch(numbers, np.zeros(len(numbers), dtype=bool))
            yield to_uint8(mean_and_log_variance(stored.float(), self.dataset.info.kind)[0]).numpy()

    def fingerprint(self) -> str:
        return self.dataset.fingerprint()
