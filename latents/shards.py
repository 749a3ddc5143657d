"""The native shard format: safetensors files that are read by index, in batches.

A shard holds `latents` [M, C, H, W] (float16 or float32), `labels` [M] (int64), optionally `latents_flip` (the
latents of the mirrored images, same shape), and in its header `kind`, `scale_factor`, `autoencoder`, `resolution`,
`num_classes` and optionally `latents_mean` and `latents_std`. Latents are stored as the autoencoder makes them; the network sees
(latents - latents_mean) / latents_std * scale_factor.

For alignment (alignment.py) it can also hold what an image encoder is shown, or what it answered:
- `images` [bytes] (uint8), JPEG files of the cropped images one after the other, and `image_offsets` [M + 1] (int64): image i is
  images[image_offsets[i] : image_offsets[i + 1]]. Mirrored images are mirrored when they are read;
- or `features` [M, n, E] (float16), the encoder's patch tokens, row by row of their grid, `features_flip` where there is a
  `latents_flip`, and in the header `encoder`.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from common.errors import UserError
from common.files import read_file, with_sorted_header, write_file
from latents.autoencoders import to_uint8
from latents.contents import way_on
from latents.manifest import MANIFEST, UNFINISHED, check_files, read_manifest
from latents.reader import FileReader

KINDS = ("sample", "moments")
MAX_CLASSES, MAX_RESOLUTION = 10**6, 2**16  # beyond, tables over classes and images would not fit into memory


@dataclass(frozen=True, repr=False)
class ShardInfo:
    """What the header of a shard says; equal for all shards of a folder."""

    kind: str  # sample (C channels) | moments (2C channels: mean, then log-variance; sampled afresh at every read)
    scale_factor: float  # multiplies a stored latent to give what the network sees
    autoencoder: str  # identity | none | sd-vae:<hub id or folder> | va-vae:<file or folder>
    resolution: int  # height = width of the images, in pixels
    num_classes: int  # labels are 0 .. num_classes - 1
    latents_mean: tuple[float, ...] | None = None  # of each of the C channels, over all latents; None: nothing is subtracted
    latents_std: tuple[float, ...] | None = None  # their standard deviations; both are None, or neither
    encoder: str | None = None  # whose patch tokens `features` are; None: there are none

    def __post_init__(self):
        if self.kind not in KINDS:
            raise UserError(f"kind={self.kind!r} must be one of {', '.join(KINDS)}")
        if not (math.isfinite(self.scale_factor) and self.scale_factor > 0):
            raise UserError(f"scale_factor={self.scale_factor} must be a positive number")
        for name, largest in (("resolution", MAX_RESOLUTION), ("num_classes", MAX_CLASSES)):
            if not 1 <= getattr(self, name) <= largest:
                raise UserError(f"{name}={getattr(self, name)} must be a whole number from 1 to {largest}")
        means, stds = self.latents_mean or (), self.latents_std or ()
        if len(means) != len(stds) or not all(map(math.isfinite, (*means, *stds))) or not all(std > 0 for std in stds):
            raise UserError(
                f"latents_mean has {len(means)} and latents_std {len(stds)} numbers; need finite ones, a mean and a standard "
                "deviation above 0 for each channel"
            )

    def __repr__(self) -> str:  # is hashed in fingerprints: without what is not there
        return f"ShardInfo({', '.join(f'{name}={value!r}' for name, value in vars(self).items() if value is not None)})"

    def to_metadata(self) -> dict[str, str]:
        given = {name: value for name, value in vars(self).items() if value is not None}
        return {name: json.dumps(value) if name in _PER_CHANNEL else str(value) for name, value in given.items()}

    @classmethod
    def from_metadata(cls, metadata: dict[str, str] | None) -> ShardInfo:
        names = [name for name in cls.__dataclass_fields__ if name not in _OPTIONAL or name in (metadata or {})]
        missing = [name for name in names if name not in (metadata or {})]
        if missing:
            raise UserError(f"its header lacks {', '.join(missing)}")
        types = {"scale_factor": float, "resolution": int, "num_classes": int} | dict.fromkeys(_PER_CHANNEL, _parse_numbers)
        return cls(**{name: types.get(name, str)(metadata[name]) for name in names})


_PER_CHANNEL = ("latents_mean", "latents_std")
_OPTIONAL = (*_PER_CHANNEL, "encoder")
_NAMES = ("latents", "labels", "latents_flip", "images", "image_offsets", "features", "features_flip")
_BY_ITEM = ("latents", "latents_flip", "features", "features_flip")  # of equal size for every item


def _parse_numbers(text: str) -> tuple[float, ...]:
    numbers = json.loads(text)
    if not isinstance(numbers, list) or not all(type(number) in (int, float) for number in numbers):
        raise UserError(f"{text[:40]} is not a list of numbers")
    return tuple(map(float, numbers))


# ----------------------------------------------------------------------------------------------------------------------
# Writing.


def pack_images(files: Sequence[bytes]) -> dict[str, Tensor]:
    """`images` and `image_offsets` of a shard, from the JPEG file of every item."""
    offsets = torch.tensor([0, *(len(file) for file in files)], dtype=torch.int64).cumsum(0)
    return {"images": torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8), "image_offsets": offsets}


def write_shard(
    path: str | Path,
    latents: Tensor,
    labels: Tensor,
    info: ShardInfo,
    latents_flip: Tensor | None = None,
    shown: Mapping[str, Tensor] | None = None,
) -> None:
    """Write one shard; it appears under its name only when it is complete.

    Args:
        latents: [M, C, H, W] (2C channels for kind `moments`), float16 or float32.
        labels: [M] int64.
        latents_flip: the same for the mirrored images.
        shown: for alignment, `pack_images` or {"features": ..., "features_flip": ...}, as the file says.

    Raises:
        UserError: the file exists; other shapes or types, labels outside num_classes, values that are not finite.
    """
    path = Path(path)
    if path.exists():
        raise UserError(f"{path} exists; nothing was written: remove it, or write elsewhere")
    write_file(path, serialize_shard(path, latents, labels, info, latents_flip, shown))


def serialize_shard(
    path: Path,
    latents: Tensor,
    labels: Tensor,
    info: ShardInfo,
    latents_flip: Tensor | None = None,
    shown: Mapping[str, Tensor] | None = None,
) -> bytes:
    """The bytes of the file that `write_shard` writes: equal data give equal bytes. Raises as `write_shard` does."""
    tensors = {"latents": latents, "labels": labels, "latents_flip": latents_flip, **(shown or {})}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    _check_tensors(path, info, tensors)
    for name in [name for name in _BY_ITEM if name in tensors]:
        bad = (~tensors[name].flatten(1).isfinite().all(dim=1)).nonzero()
        if len(bad):
            raise UserError(f"{path}: {name} of item {bad[0].item()} are not finite; nothing was written")
    return with_sorted_header(save(tensors, metadata=info.to_metadata()))


def _check_tensors(file: Path, info: ShardInfo, shard: dict[str, Tensor]) -> None:
    """Raises UserError where names, shapes, types or labels are not those of a shard."""
    if not {"latents", "labels"} <= shard.keys() <= set(_NAMES):
        more = ", ".join(_NAMES[2:])
        raise UserError(f"{file} holds {sorted(shard)}; a latent shard holds latents, labels and optionally {more}")
    latents, labels = shard["latents"], shard["labels"]
    if latents.ndim != 4 or latents.dtype not in (torch.float16, torch.float32) or len(latents) == 0:
        raise UserError(f"{file}: latents are {latents.dtype} {list(latents.shape)}; need float16 or float32 [M, C, H, W]")
    flipped = shard.get("latents_flip", latents)
    if (flipped.shape, flipped.dtype) != (latents.shape, latents.dtype):
        raise UserError(f"{file}: latents_flip {list(flipped.shape)} differs from latents {list(latents.shape)}")
    if info.kind == "moments" and latents.shape[1] % 2:
        raise UserError(f"{file}: kind=moments needs an even number of channels, not {latents.shape[1]}")
    channels = latents.shape[1] // 2 if info.kind == "moments" else latents.shape[1]
    if info.latents_mean is not None and len(info.latents_mean) != channels:
        raise UserError(f"{file}: latents have {channels} channels, but latents_mean and latents_std {len(info.latents_mean)}")
    if labels.dtype != torch.int64 or labels.shape != latents.shape[:1]:
        raise UserError(f"{file}: labels are {labels.dtype} {list(labels.shape)}; need int64 [{len(latents)}]")
    _check_shown(file, info, shard)
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= info.num_classes:
        raise UserError(f"{file}: labels run from {low} to {high}, outside num_classes={info.num_classes}")


def _check_shown(file: Path, info: ShardInfo, shard: dict[str, Tensor]) -> None:
    """Raises UserError where images or features are not as the file's docstring says."""
    num_items = len(shard["latents"])
    images, offsets = shard.get("images"), shard.get("image_offsets")
    if (images is None) != (offsets is None):
        raise UserError(f"{file} holds one of images and image_offsets; need both")
    if images is not None:
        fit = images.dtype == torch.uint8 and images.ndim == 1
        fit = fit and offsets.dtype == torch.int64 and offsets.shape == (num_items + 1,)
        if not fit or offsets[0] != 0 or offsets[-1] != len(images) or not (offsets.diff() > 0).all():
            raise UserError(f"{file}: image_offsets do not cut images into {num_items} files")
    features = shard.get("features")
    if (features is None) != (info.encoder is None):
        raise UserError(f"{file}: features and the header's encoder={info.encoder} do not belong together")
    if features is not None and (features.dtype != torch.float16 or features.ndim != 3 or len(features) != num_items):
        raise UserError(f"{file}: features are {features.dtype} {list(features.shape)}; need float16 [{num_items}, n, E]")
    flipped = shard.get("features_flip")
    if (flipped is None) == (features is not None and "latents_flip" in shard):
        raise UserError(f"{file}: features_flip go with features and latents_flip")
    if flipped is not None and (flipped.shape, flipped.dtype) != (features.shape, features.dtype):
        raise UserError(f"{file}: features_flip {list(flipped.shape)} differs from features {list(features.shape)}")


# ----------------------------------------------------------------------------------------------------------------------
# Reading.


def spread_items(num_items: int, at_most: int) -> np.ndarray:
    """[n] int64: item numbers spread evenly over the data, first and last among them."""
    return np.unique(np.linspace(0, num_items - 1, num=min(at_most, num_items)).astype(np.int64))


def shard_files(folder: Path) -> list[Path]:
    """The shards of a folder in order; hidden files are half-written ones."""
    return sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("."))


class LatentDataset:
    """All shards of a folder as one array of latents, read by index.

    Attributes:
        labels: [N] int64.
        channels, height, width: of the latents that the network sees (half the stored channels for `moments`).
        has_flips: whether there are latents of the mirrored images.
        stores_images, has_images: whether there are images; whether there are images, or latents that are pixels.
        features_shape: (n, E) of the features of an item; None: there are none.
        class_names: from the manifest, where there is one that knows them.
        statements: what was detected on opening, for the log: nothing, as the headers say it all.

    Args:
        path: a folder of shards, or one shard.
        check_folder: False opens the shards that are there, finished or not and whatever the manifest says (the writer, inspect).
        key: that gave the path, for the messages.

    Raises:
        UserError: a folder that does not exist or holds no shards; a shard that is truncated, has no proper header,
            other shapes or labels outside num_classes, or disagrees with the first one; a folder that is not finished, or
            whose shards are not those of its manifest. The message names the file.
    """

    statements: tuple[str, ...] = ()

    def __init__(self, path: str | Path, check_folder: bool = True, key: str = "data.path"):
        self.path = Path(path)
        if not self.path.exists():
            raise UserError(f"{key}={self.path} does not exist; give a folder of latent shards (*.safetensors)")
        self.files = shard_files(self.path) if self.path.is_dir() else [self.path]
        manifest = read_manifest(self.path) if self.path.is_dir() else None
        if check_folder and manifest is None and (self.path / UNFINISHED).exists():
            raise UserError(
                f"{self.path} is not finished: prepare_latents.py was stopped; run the same command again, which goes on there"
            )
        if not self.files or self.files[0].suffix != ".safetensors":
            raise UserError(f"{key}={self.path} holds no latent shards (*.safetensors); it {_way_on(self.path, key)}")
        if check_folder and manifest is not None:
            check_files(self.path, self.files, manifest)
        opened = [_open_shard(file, self.path, key) for file in self.files]
        first = opened[0]
        self.info: ShardInfo = first.info
        self.labels: np.ndarray = np.concatenate([shard.labels for shard in opened])
        for file, shard in zip(self.files, opened):
            if shard.layout != first.layout:
                raise UserError(f"{file} does not belong with {self.files[0]}: {shard.layout} against {first.layout}")
        self._shape, self._dtype = first.shape[1:], first.dtype  # of an item
        self._offsets = {name: [shard.offsets[name] for shard in opened] for name in first.offsets}
        self.features_shape = first.features_shape
        self._images = None if first.images is None else [shard.images for shard in opened]
        self.stores_images = first.images is not None
        self.has_images = self.stores_images or self.info.autoencoder == "identity"
        self._first_item = np.cumsum([0] + [shard.shape[0] for shard in opened])
        self._reader = FileReader(self.files)
        channels, self.height, self.width = self._shape
        self.channels = channels // 2 if self.info.kind == "moments" else channels
        self.has_flips = "latents_flip" in self._offsets
        self.class_names: list[str] | None = manifest.get("class_names") if manifest else None
        if check_folder and manifest is not None and manifest["fingerprint"] != self.fingerprint():
            raise UserError(
                f"{self.path}: the shards have changed since {MANIFEST} was written; "
                f"`prepare_latents.py inspect path={self.path}` names the file"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: np.ndarray, flips: np.ndarray) -> tuple[Tensor, Tensor]:
        """Read a batch.

        Args:
            indices: [b] item numbers.
            flips: [b] bool, take `latents_flip`; all False where there are none.

        Returns:
            latents [b, C or 2C, H, W] as stored, labels [b] int64.

        Raises:
            ValueError: flips and indices of different lengths, or flips where there are none.
            IndexError: an item that does not exist; negative numbers do not count from the end.
            UserError: a shard was cut off since it was opened, or cannot be read.
        """
        if len(indices) != len(flips) or (not self.has_flips and flips.any()):
            raise ValueError(f"{len(indices)} items with {len(flips)} flips; mirrored latents are there: {self.has_flips}")
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"items {indices.min()} to {indices.max()} are not all in 0 .. {len(self) - 1}")
        return self._read("latents", self._shape, self._dtype, indices, flips), torch.from_numpy(self.labels[indices])

    def fetch_with_images(self, indices: np.ndarray, flips: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """`fetch`, and the images, uint8 [b, R, R, 3], mirrored where the latents are.

        Raises:
            ValueError: there are no images: see `has_images`.
            UserError: also an image that is no JPEG of this size.
        """
        latents, labels = self.fetch(indices, flips)
        if not self.stores_images:
            if not self.has_images:
                raise ValueError(f"{self.path} holds no images")
            return latents, labels, to_uint8(mean_and_log_variance(latents.float(), self.info.kind)[0])
        images = torch.empty(len(indices), self.info.resolution, self.info.resolution, 3, dtype=torch.uint8)
        for image, index, flip in zip(images, indices.tolist(), flips.tolist()):
            pixels = self._decode_image(index)
            image.copy_(pixels.flip(1) if flip else pixels)
        return latents, labels, images

    def fetch_with_features(self, indices: np.ndarray, flips: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """`fetch`, and the features, float16 [b, n, E]. Raises also ValueError where there are none."""
        if self.features_shape is None:
            raise ValueError(f"{self.path} holds no features")
        latents, labels = self.fetch(indices, flips)
        return latents, labels, self._read("features", self.features_shape, np.dtype(np.float16), indices, flips)

    def _read(self, name: str, shape: tuple[int, ...], dtype: np.dtype, indices: np.ndarray, flips: np.ndarray) -> Tensor:
        """[b, *shape]: the items of a tensor, or of its mirrored twin."""
        shard_of = np.searchsorted(self._first_item, indices, side="right") - 1
        rows = indices - self._first_item[shard_of]
        values, item_bytes = np.empty((len(indices), *shape), dtype=dtype), dtype.itemsize * math.prod(shape)
        parts, offsets = values.view(np.uint8).reshape(len(indices), item_bytes), (self._offsets[name],)
        if self.has_flips:
            offsets += (self._offsets[f"{name}_flip"],)
        # Item by item: where a batch is spread over as many shards as it has items, indexing shard by shard costs ten times more.
        for part, shard_idx, row, flip in zip(parts, shard_of.tolist(), rows.tolist(), flips.tolist()):
            self._reader.read_into(part, shard_idx, offsets[flip][shard_idx] + row * item_bytes)
        return torch.from_numpy(values)

    def _read_image(self, index: int) -> np.ndarray:
        """uint8 [bytes], the JPEG file of an item."""
        shard_idx = int(np.searchsorted(self._first_item, index, side="right")) - 1
        start, stop = self._images[shard_idx][index - self._first_item[shard_idx] :][:2].tolist()
        file = np.empty(stop - start, dtype=np.uint8)
        self._reader.read_into(file, shard_idx, start)
        return file

    def _decode_image(self, index: int) -> Tensor:
        """uint8 [R, R, 3]. Pillow decodes without holding up other threads; torchvision's decoder is deprecated."""
        size = self.info.resolution
        try:
            with Image.open(io.BytesIO(self._read_image(index)), formats=["JPEG"]) as image:
                pixels = torch.from_numpy(np.array(image.convert("RGB")))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as e:
            raise UserError(f"{self.path}: image {index} is no JPEG file that can be read; make the shards again") from e
        if pixels.shape != (size, size, 3):
            found = f"{pixels.shape[1]}x{pixels.shape[0]} pixels instead of {size}x{size}"
            raise UserError(f"{self.path}: image {index} has {found}; make the shards again")
        return pixels

    def fingerprint(self) -> str:
        """A hash of the headers, sizes, labels and 64 latents spread over the data: other data, another value."""
        digest = hashlib.blake2b(digest_size=16)
        shapes = [[int(num_items), *self._shape] for num_items in np.diff(self._first_item)]
        digest.update(repr((self.info, shapes)).encode())
        digest.update(self.labels.tobytes())
        spread = spread_items(len(self), 64)
        for flip in (False, True)[: 1 + self.has_flips]:
            flips = np.full(len(spread), flip)
            digest.update(self.fetch(spread, flips)[0].numpy().tobytes())
            if self.features_shape is not None:
                digest.update(self.fetch_with_features(spread, flips)[2].numpy().tobytes())
        for index in spread.tolist() if self.stores_images else ():
            digest.update(self._read_image(index).tobytes())
        return digest.hexdigest()


def _way_on(path: Path, key: str) -> str:
    return way_on(path, key, f"{key.removesuffix('path')}format")


@dataclass(frozen=True)
class _Shard:
    """What a shard holds and where: all but its latents."""

    info: ShardInfo
    labels: np.ndarray
    shape: tuple[int, ...]  # [M, C or 2C, H, W]
    dtype: np.dtype
    offsets: dict[str, int]  # of `latents` and of those of _BY_ITEM that are there: their first byte in the file
    features_shape: tuple[int, ...] | None  # (n, E)
    images: np.ndarray | None  # [M + 1] int64: where in the file an image starts, and the last one ends

    @property
    def layout(self) -> str:
        """What all shards of a folder have in common, in words."""
        latents = [f"{name} {self.dtype} {list(self.shape[1:])}" for name in self.offsets if name.startswith("latents")]
        features = [] if self.features_shape is None else [f"features {list(self.features_shape)}"]
        return ", ".join([str(self.info), *latents, *features, *(["images"] if self.images is not None else [])])


def _open_shard(file: Path, path: Path, key: str) -> _Shard:
    """The header and the labels."""
    if not file.is_file():  # opening a pipe would wait for ever
        raise UserError(f"{file} is not a file")
    try:
        with safe_open(file, framework="pt") as f:
            metadata = f.metadata()
            shard = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (not a dict); mapped, and not read until used
        size = int.from_bytes(read_file(file, 8), "little")
        header = json.loads(read_file(file, 8 + size)[8:])
    except (SafetensorError, OSError, UserError, ValueError) as e:
        raise UserError(f"{file} is truncated or not a safetensors file: {e}") from e
    try:
        info = ShardInfo.from_metadata(metadata)
    except ValueError as e:
        hint = "" if "kind" in (metadata or {}) else f"; {path} {_way_on(path, key)}"
        raise UserError(f"{file} is not a latent shard: {e}{hint}") from e
    _check_tensors(file, info, shard)
    first_byte = {name: 8 + size + header[name]["data_offsets"][0] for name in shard}
    offsets = {name: first_byte[name] for name in _BY_ITEM if name in shard}
    latents, features = shard["latents"], shard.get("features")
    return _Shard(
        info,
        shard["labels"].numpy(),
        tuple(latents.shape),
        latents[:0].numpy().dtype,
        offsets,
        None if features is None else tuple(features.shape[1:]),
        shard["image_offsets"].numpy() + first_byte["images"] if "images" in shard else None,
    )


# ----------------------------------------------------------------------------------------------------------------------
# From what is stored to latents.


def mean_and_log_variance(stored: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """[b, C or 2C, H, W] -> [b, C, H, W] each: the latents (the mean, of `moments`) and the log-variance, None for `sample`."""
    if kind not in KINDS or (kind == "moments" and stored.shape[1] % 2):
        raise ValueError(f"kind={kind!r} does not fit {stored.shape[1]} channels; moments have mean and log-variance of each")
    if kind == "sample":
        return stored, None
    mean, log_variance = stored.chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)  # the autoencoder's own clamp (diffusers, DiagonalGaussianDistribution)


def draw_latents(stored: Tensor, kind: str, random=None) -> Tensor:
    """[b, C or 2C, H, W] -> [b, C, H, W]: stored samples as they are, `moments` sampled.

    Args:
        random: source of the noise with which `moments` are sampled, `random.randn(C, H, W)` -> [b, C, H, W].
    """
    mean, log_variance = mean_and_log_variance(stored, kind)
    if log_variance is not None and random is None:
        raise ValueError("moments are sampled: pass random, or take the mean with mean_and_log_variance")
    return mean if log_variance is None else mean + (log_variance / 2).exp() * random.randn(*mean.shape[1:])


def latents_for_network(stored: Tensor, info: ShardInfo, random=None) -> Tensor:
    """Stored latents [b, C or 2C, H, W] -> float32 [b, C, H, W] as the network sees them; `random` as for `draw_latents`."""
    return normalize_latents(draw_latents(stored.float(), info.kind, random), info)


class Normalized(Protocol):
    """What says how the network sees latents: a header, data.* of a configuration, a sampler."""

    scale_factor: float
    latents_mean: Sequence[float] | None
    latents_std: Sequence[float] | None


def normalize_latents(latents: Tensor, how: Normalized) -> Tensor:
    """[b, C, H, W] of the autoencoder -> as the network sees them, (x - latents_mean) / latents_std * scale_factor."""
    if how.latents_mean is not None:
        mean, std = (_per_channel(tuple(values), latents.device) for values in (how.latents_mean, how.latents_std))
        latents = (latents - mean) / std
    return latents * how.scale_factor


def restore_latents(latents: Tensor, how: Normalized) -> Tensor:
    """The inverse of `normalize_latents`, for the autoencoder that decodes them."""
    latents = latents / how.scale_factor
    if how.latents_mean is None:
        return latents
    mean, std = (_per_channel(tuple(values), latents.device) for values in (how.latents_mean, how.latents_std))
    return latents * std + mean


@functools.lru_cache(maxsize=16)  # a new one for every batch would have the device wait
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, 1, 1)
