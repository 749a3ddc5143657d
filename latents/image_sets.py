"""Open sets of images on disk: folders of images, .npz files, and shards of pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from common.errors import UserError
from evaluations.images import ImageSet, open_images
from latents.dataset import LatentDataset
from latents.shards import shard_files


class PixelShards(ImageSet):
    """Images in shards of autoencoder=identity, whose latents are the pixels."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._dataset = LatentDataset(path)
        if (autoencoder := self._dataset.info.autoencoder) != "identity":
            command = "`python prepare_latents.py reference images=<the images> output=<file.npz>`"
            raise UserError(f"{path} holds latents of autoencoder={autoencoder}, not images; give their images, or run {command}")
        self.shape = (len(self._dataset), self._dataset.height, self._dataset.width, 3)
        self.labels = self._dataset.labels
        self.class_names = self._dataset.class_names
        self.background = self._dataset.encode_settings.get("background")

    def batches(self, batch_size: int, items: Sequence[int] | None = None) -> Iterator[np.ndarray]:
        items = np.arange(len(self)) if items is None else np.asarray(items)
        for i in range(0, len(items), batch_size):
            part = items[i : i + batch_size]
            yield self._dataset.fetch_with_images(part)[2].numpy()

    def portable_hash(self) -> str:
        return self._dataset.hash

    def spot_check(self) -> str:
        return LatentDataset(self.path).hash


def holds_shards(path: str | Path) -> bool:
    """Return whether a path is a shard or a folder of shards."""
    path = Path(path)
    return path.suffix == ".safetensors" or (path.is_dir() and bool(shard_files(path)))


def open_image_set(
    path: str | Path, convert_to_rgb: bool = False, crop: int | None = None, background: str = "white"
) -> ImageSet:
    """Open images on disk. `evaluations.images.ImageFolder` documents the other arguments. `crop` is for a folder only.

    Raises UserError if the images cannot be used, or if `path` is the folder of a run, whose pictures are grids and plots.
    """
    if holds_shards(path):
        if crop is not None:
            raise UserError(f"resolution={crop} crops the images of a folder, but {path} holds shards")
        return PixelShards(path)
    if all((Path(path) / name).exists() for name in ("config.yaml", "checkpoints")):
        raise UserError(f"{path} is the folder of a run, which holds grids and plots; give a folder of images, or an .npz")
    return open_images(path, convert_to_rgb, crop, background)
