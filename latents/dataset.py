"""Read latents from a folder of shards by index.

Shards can also store JPEG files of the unmirrored images. `LatentDataset.fetch_with_images` mirrors the pixels on request.
"""

from __future__ import annotations

import functools
import io
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from common.errors import UserError, as_user_error
from common.files import hash_file
from common.images import to_uint8
from latents.reader import FileReader
from latents.shards import (
    LATENT_TENSORS,
    MANIFEST,
    UNFINISHED,
    ShardInfo,
    hash_of_shards,
    mean_and_log_variance,
    open_shard,
    read_header,
    read_manifest,
    shard_files,
)

log = logging.getLogger(__name__)


def evenly_spaced_items(num_items: int, at_most: int) -> np.ndarray:
    """Return up to `at_most` evenly spaced item indices, int64 [n], which include the first and the last item."""
    return np.unique(np.linspace(0, num_items - 1, num=min(at_most, num_items)).astype(np.int64))


def _open_shards(files: Sequence[Path]) -> tuple[ShardInfo, Sequence[dict[str, Tensor]], Sequence[dict[str, int]]]:
    """Open shards. Return their common metadata, and each shard's memory-mapped tensors and their offsets in the file.

    Raises UserError if a shard differs from the first shard in header, tensors or shape.
    """
    infos, shards, offsets = zip(*map(open_shard, files))
    layouts = []  # what all shards must have in common
    for info, shard in zip(infos, shards):
        names = sorted(shard.keys() - {"image_hashes"})
        layouts.append((info, names, shard["latents"].dtype, shard["latents"].shape[1:]))
    for file, layout in zip(files, layouts):
        if layout != layouts[0]:
            raise UserError(f"{file} does not belong with {files[0]}: {layout}, not {layouts[0]}")
    return infos[0], shards, offsets


class LatentDataset:
    """Data set that provides indexed access to the N latents in a folder of shards.

    Attributes:
        labels: Class labels [N] in int64.
        channels, height, width: Shape of a latent. For `moments`, `channels` is half the number of stored channels.
        has_flips: Whether the shards contain latents of the mirrored images.
        has_jpegs: Whether the shards contain the images as JPEG files.
        has_images: Whether `fetch_with_images` works, because the shards contain JPEG files or the latents are pixels.
        manifest: Content of the folder's manifest.json, or {} if this file is missing.
        class_names: Class names from the manifest, or None if the class names are unknown.
        encode_settings: Settings of the `encode` or `convert` that made the shards. The dictionary is empty without a manifest.
        image_hashes: Hash of the image of each latent [N], int64, or None if not all shards contain hashes.

    Args:
        path: Folder of shards, or a single shard.
        check_folder: Whether to reject unfinished folders and folders whose shards differ from the manifest.

    Raises:
        UserError: If there are no shards, if a shard is damaged, if a shard differs from the first shard in header, tensors or
            shape, or if `check_folder` rejects the folder.
    """

    def __init__(self, path: str | Path, check_folder: bool = True):
        self.path = Path(path)
        if not self.path.exists():
            raise UserError(f"{self.path} does not exist")
        self.files = shard_files(self.path)
        self.manifest = read_manifest(self.path)
        if not self.files:
            raise UserError(f"{self.path} holds no latent shards (*.safetensors); make them with encode or convert")
        if check_folder:
            self._check_folder()
        self.info, shards, offsets = _open_shards(self.files)
        self.labels: np.ndarray = np.concatenate([shard["labels"].numpy() for shard in shards])
        hashes = [shard["image_hashes"].numpy() for shard in shards if "image_hashes" in shard]
        self.image_hashes: np.ndarray | None = np.concatenate(hashes) if len(hashes) == len(shards) else None
        channels, self.height, self.width = shards[0]["latents"].shape[1:]
        self.channels = channels // (1 + (self.info.kind == "moments"))
        self.has_flips = "latents_flip" in shards[0]
        self.has_jpegs = "images" in shards[0]
        self.has_images = self.has_jpegs or self.info.autoencoder == "identity"
        self.class_names: list[str] | None = self.manifest.get("class_names")
        self.encode_settings: dict = self.manifest.get("settings", {})
        self._index_items(shards, offsets)

    def _index_items(self, shards: Sequence[dict[str, Tensor]], offsets: Sequence[dict[str, int]]) -> None:
        """Remember where the items are in the files. `offsets` are those of the tensors in each file."""
        self._reader = FileReader(self.files)
        self._first_item = np.cumsum([0] + [len(shard["labels"]) for shard in shards])
        no_latents = shards[0]["latents"][:0].numpy()
        self._shape, self._dtype = no_latents.shape[1:], no_latents.dtype
        self._item_bytes = math.prod(self._shape) * self._dtype.itemsize
        stored = LATENT_TENSORS[: 1 + self.has_flips]
        self._offsets = [[starts[name] for starts in offsets] for name in stored]  # indices: [flip][shard]
        if self.has_jpegs:  # file offsets of all images, followed by the end of the last image, [M + 1] per shard
            self._images = [shard["image_offsets"].numpy() + starts["images"] for shard, starts in zip(shards, offsets)]

    def _check_folder(self) -> None:
        """Raise UserError if the shards are not those of the manifest. Log a warning if a folder has lost its manifest."""
        if self.manifest:
            if self.manifest["shards"] != self.hashes:
                raise UserError(
                    f"{self.path}: the shards are not those that {MANIFEST} lists; run inspect to find the difference"
                )
        elif (self.path / UNFINISHED).exists():
            raise UserError(f"{self.path} is not finished: run the same prepare_latents.py command again to complete it")
        elif self.path.is_dir() and "provenance" in read_header(self.files[0]):
            log.warning("%s has no %s: if it is a copy, copy it completely, or shards may be missing", self.path, MANIFEST)

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: np.ndarray, flips: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        """Read stored latents [b, C or 2C, H, W] and int64 labels [b].

        Args:
            indices: Item indices [b].
            flips: Whether to read each item from `latents_flip`, bool [b]. By default, no item is mirrored.

        Raises:
            ValueError: If the lengths differ, or if `flips` requests mirrored latents that the shards do not contain.
            IndexError: If an index is negative or too large.
            UserError: If a shard is truncated or unreadable.
        """
        flips = np.zeros(len(indices), dtype=bool) if flips is None else flips
        if len(indices) != len(flips) or (not self.has_flips and flips.any()):
            mirrored = "mirrored latents" if self.has_flips else "no mirrored latents"
            raise ValueError(f"got {len(indices)} indices and {len(flips)} flips; these shards hold {mirrored}")
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"items {indices.min()} to {indices.max()} are not all in 0 .. {len(self) - 1}")
        values = np.empty((len(indices), *self._shape), dtype=self._dtype)
        parts = values.view(np.uint8).reshape(len(indices), self._item_bytes)
        # Read items one by one. Indexing each shard takes ten times longer if all items of a batch are in different shards.
        for part, shard_idx, row, flip in zip(parts, *self._locate(indices), flips.tolist()):
            offset = self._offsets[flip][shard_idx] + row * self._item_bytes
            self._reader.read_into(part, shard_idx, offset)
        return torch.from_numpy(values), torch.from_numpy(self.labels[indices])

    def fetch_with_images(self, indices: np.ndarray, flips: np.ndarray | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Read latents and labels like `fetch`, and also the images, uint8 [b, R, R, 3]. `has_images` must be True.

        Mirror the images where `flips` is True. Raises UserError if an image is not a JPEG file of R x R pixels.
        """
        flips = np.zeros(len(indices), dtype=bool) if flips is None else flips
        latents, labels = self.fetch(indices, flips)
        if self.info.autoencoder == "identity":
            return latents, labels, to_uint8(mean_and_log_variance(latents.float(), self.info.kind)[0])
        size = self.info.resolution
        images = np.empty((len(indices), size, size, 3), dtype=np.uint8)
        for pixels, index, shard_idx, row, flip in zip(images, indices, *self._locate(indices), flips.tolist()):
            start, stop = self._images[shard_idx][row : row + 2].tolist()
            jpeg = np.empty(stop - start, dtype=np.uint8)
            self._reader.read_into(jpeg, shard_idx, start)
            # Use Pillow because torchvision's decoder is deprecated. Pillow releases the GIL while it decodes an image.
            with as_user_error(f"{self.path}: image {index}"), Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as image:
                if image.size != (size, size):
                    raise ValueError(f"{image.width}x{image.height} pixels, not {size}x{size}")
                pixels[:] = np.array(image.convert("RGB"))[:, :: -1 if flip else 1]
        return latents, labels, torch.from_numpy(images)

    def _locate(self, indices: np.ndarray) -> tuple[list[int], list[int]]:
        """Return each item's shard index and its row within the shard."""
        shards = np.searchsorted(self._first_item, indices, side="right") - 1
        return shards.tolist(), (indices - self._first_item[shards]).tolist()

    @functools.cached_property
    def hashes(self) -> dict[str, str]:
        """Map each shard's file name to the hash in its header. If the header contains no hash, compute the hash of the file."""
        return {file.name: read_header(file).get("hash") or hash_file(file) for file in self.files}

    def shared_with(self, other: LatentDataset) -> np.ndarray:
        """Return for each item whether `other` contains its image, bool [N]. All are False if one of both has no hashes."""
        if self.image_hashes is None or other.image_hashes is None:
            return np.zeros(len(self), dtype=bool)
        return np.isin(self.image_hashes, other.image_hashes)

    @property
    def hash(self) -> str:
        """Return a hash that identifies the data set."""
        return hash_of_shards(self.hashes)
