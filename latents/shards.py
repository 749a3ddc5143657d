"""Read and write latent shards in the native safetensors format, which docs/data.md describes.

Shards can also store JPEG files of the unmirrored images. `LatentDataset.fetch_with_images` mirrors the pixels on request.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
from PIL import Image
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from common.errors import UserError, as_user_error
from common.files import check_format, hash_bytes, hash_file, read_json, regular_file, write_atomically
from common.images import hash_pixels, to_uint8
from common.types import Colour, FiniteFloat, NonNegativeInt, PositiveFloat, Range
from latents.reader import FileReader

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"  # file that lists all shards of a complete folder
UNFINISHED = ".unfinished"  # lock file, which `ShardWriter` removes after all shards are written
_STORED = ("latents", "latents_flip")
Kind = Literal["sample", "moments"]
Part = Literal["all", "train", "validation"]
Duplicates = Literal["keep", "skip"]
MAX_CLASSES = 10**6  # tables for more classes would not fit into memory
NumClasses = Annotated[int, Field(ge=1, le=MAX_CLASSES)]
Resolution = Annotated[int, Field(ge=1, le=2**16)]


@pydantic.dataclasses.dataclass(frozen=True)
class ShardInfo:
    """Metadata for reading a shard. All shards of a folder have the same metadata. Invalid values raise ValueError."""

    kind: Kind  # `sample` (C channels) or `moments` (mean and log-variance in 2C channels, from which the trainer draws latents)
    scale_factor: PositiveFloat  # factor that scales latents before they enter the network
    autoencoder: str  # name of the autoencoder: identity, none, sd-vae:<hub id or folder> or va-vae:<file or folder>
    resolution: Resolution  # image height and width in pixels
    num_classes: NumClasses  # number of classes (labels range from 0 to num_classes - 1)
    # Mean and standard deviation of each of the C channels over all latents. If both values are None, latents are not normalised.
    latents_mean: list[FiniteFloat] | None = None
    latents_std: list[PositiveFloat] | None = None

    def __post_init__(self):
        if len(self.latents_mean or ()) != len(self.latents_std or ()):
            raise ValueError("latents_mean and latents_std need a number for each channel")


def pack_images(files: Sequence[bytes]) -> dict[str, Tensor]:
    """Pack the JPEG files of a shard's items into the tensors `images` and `image_offsets`."""
    offsets = torch.tensor([0, *(len(file) for file in files)], dtype=torch.int64).cumsum(0)
    return {"images": torch.from_numpy(np.frombuffer(bytearray(b"".join(files)), np.uint8)), "image_offsets": offsets}


def hash_latents(stored: Tensor, kind: str) -> Tensor:
    """Hash the means of stored latents [b, C or 2C, H, W] in float16, int64 [b]. Latents without images are compared by them."""
    means = mean_and_log_variance(stored, kind)[0].half().numpy()
    return torch.tensor([hash_pixels(x) for x in means], dtype=torch.int64)


def write_shard(path: str | Path, latents: Tensor, labels: Tensor, info: ShardInfo, **more: Tensor | None) -> None:
    """Write a shard atomically. An interrupted call leaves no incomplete shard.

    Args:
        latents: Latents [M, C, H, W], or [M, 2C, H, W] for kind `moments`, in float16 or float32.
        labels: Class labels [M] in int64.
        more: Optional tensors: `latents_flip` with the same shape and dtype as `latents`, the result of `pack_images`, and
            `image_hashes` [M] in int64, which are equal for equal images.

    Raises:
        UserError: If the file already exists, if a shape, dtype or label is invalid, or if a value is not finite.
    """
    path = Path(path)
    if path.exists():
        raise UserError(f"{path} exists; nothing was written: remove it, or write elsewhere")
    write_atomically(path, serialize_shard(path, info, latents=latents, labels=labels, **more))


def serialize_shard(path: Path, info: ShardInfo, provenance: dict | None = None, **tensors: Tensor | None) -> bytes:
    """Serialize a shard. Identical inputs produce identical bytes. Like `write_shard`, raise UserError for invalid tensors.

    Args:
        path: Path of the shard, which error messages show.
        provenance: JSON-serializable record of how the shard was created.
    """
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    _check_tensors(path, info, tensors)
    for name in {*_STORED} & tensors.keys():
        finite = tensors[name].flatten(1).isfinite().all(dim=1).tolist()
        if not all(finite):
            raise UserError(f"{path}: {name} of item {finite.index(False)} hold NaN or infinity in {tensors[name].dtype}")
    metadata = asdict(info) | ({"provenance": provenance} if provenance else {})
    metadata["hash"] = _hash(tensors, metadata)
    return save(tensors, metadata={"about": json.dumps(metadata)})  # one entry, because safetensors orders entries randomly


def _hash(tensors: dict[str, Tensor], metadata: dict) -> str:
    digest = hashlib.blake2b(json.dumps(metadata).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().numpy())
    return digest.hexdigest()


def read_header(file: Path) -> tuple[dict, dict[str, int]]:
    """Read the header of a safetensors file and return (metadata, starts).

    `metadata` contains the fields of ShardInfo and `hash`, and for shards from `encode` or `convert` also `provenance`. For other
    safetensors files, `metadata` is {}. `starts` maps each tensor name to the tensor's offset in the file.
    """
    with as_user_error(file), open(regular_file(file), "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
        metadata = dict(json.loads(header.pop("__metadata__", {}).get("about", "{}")))
        return metadata, {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}


def is_intact(file: Path) -> bool:
    """Return whether a shard is readable and matches the hash in its header. Readable shards without a hash count as intact."""
    try:
        metadata, _ = read_header(file)
        return metadata.pop("hash", None) in (None, _hash(load_file(regular_file(file)), metadata))
    except (SafetensorError, UserError):
        return False


def _check_tensors(file: Path, info: ShardInfo, shard: dict[str, Tensor]) -> None:
    """Raise UserError if a shard's tensors have invalid names, shapes, dtypes or labels."""
    contents = ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in shard.items())

    def require(condition: bool, expected: str) -> None:
        if not condition:
            raise UserError(f"{file} holds {contents}; a latent shard needs {expected}")

    require(
        {"latents", "labels"} <= shard.keys() <= {*_STORED, "labels", "images", "image_offsets", "image_hashes"},
        "latents and labels",
    )
    latents, labels = shard["latents"], shard["labels"]
    require(latents.ndim == 4 and latents.dtype in (torch.float16, torch.float32), "latents [M, C, H, W] of float16 or float32")
    flips = shard.get("latents_flip", latents)
    require((flips.shape, flips.dtype) == (latents.shape, latents.dtype), "latents_flip like latents")
    require(info.kind == "sample" or latents.shape[1] % 2 == 0, "an even number of channels for kind=moments")
    require(min(latents.shape[1:]) > 0, "latents [M, C, H, W] with C, H and W above 0")
    channels = latents.shape[1] // (1 + (info.kind == "moments"))
    require(len(info.latents_mean or range(channels)) == channels, f"latents_mean and latents_std of {channels} channels")
    require(labels.dtype == torch.int64 and labels.shape == latents.shape[:1], "labels [M] of int64")
    hashes = shard.get("image_hashes", labels)
    require(hashes.dtype == torch.int64 and hashes.shape == labels.shape, "image_hashes [M] of int64")
    are_classes = ((labels >= 0) & (labels < info.num_classes)).all()
    require(are_classes, f"labels from 0 to {info.num_classes - 1}, as num_classes says")
    require("images" not in shard or len(shard.get("image_offsets", ())) == len(labels) + 1, "image_offsets [M + 1] of images")


def evenly_spaced_items(num_items: int, at_most: int) -> np.ndarray:
    """Return up to `at_most` evenly spaced item indices, int64 [n], which include the first and the last item."""
    return np.unique(np.linspace(0, num_items - 1, num=min(at_most, num_items)).astype(np.int64))


def shard_files(folder: Path) -> list[Path]:
    """List the shards of a folder in sorted order. Skip hidden files, which are incomplete or outdated shards."""
    return sorted(regular_file(f) for f in folder.glob("*.safetensors") if not f.name.startswith("."))


class _Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", strict=True)


class _EncodeSettings(_Open):
    """Entries of a manifest's `settings` that this project reads. `convert` and other programs do not write them."""

    part: Part = "all"
    duplicates: Duplicates = "keep"
    background: Colour = "white"
    pad: NonNegativeInt = 0
    grey: bool = False
    value_range: Range | None = None


class _LeftOut(_Open):
    name: str
    problem: str


class _Manifest(_Open):
    """Entries of a manifest that this project reads. Other programs may leave out those with a default."""

    shards: dict[str, str]
    settings: _EncodeSettings
    class_names: list[str] | None = None
    left_out: list[_LeftOut] = []
    notes: dict[str, int] = {}


def read_manifest(folder: Path) -> dict | None:
    """Read a folder's manifest, or return None if the file is missing."""
    file = folder / MANIFEST
    if not os.path.lexists(file):
        return None
    manifest = read_json(regular_file(file))
    manifest = manifest if isinstance(manifest, dict) else {}
    check_format(manifest, file)
    try:
        _Manifest.model_validate(manifest)
    except pydantic.ValidationError as e:
        problem = f"{'.'.join(map(str, e.errors()[0]['loc']))}: {e.errors()[0]['msg']}"
        remedy = "make the folder again, or remove this file"
        raise UserError(f"{file} is not a manifest of latent shards ({problem}); {remedy}") from e
    return manifest


def read_manifest_at(path: str | None) -> dict:
    """Return the manifest of the latents at `path`, or {} if the folder or the file is missing."""
    return (read_manifest(Path(path)) if path and Path(path).is_dir() else None) or {}


def hash_of_shards(hashes: Mapping[str, str]) -> str:
    """Return a hash that identifies a data set with these hashes of its shards, in the order of the files."""
    return hash_bytes("".join(hashes.values()).encode())


class LatentDataset:
    """Data set that provides indexed access to the N latents in a folder of shards.

    Attributes:
        labels: Class labels [N] in int64.
        channels, height, width: Shape of a latent. For `moments`, `channels` is half the number of stored channels.
        has_flips: Whether the shards contain latents of the mirrored images.
        has_jpegs: Whether the shards contain the images as JPEG files.
        has_images: Whether `fetch_with_images` works, because the shards contain JPEG files or the latents are pixels.
        class_names: Class names from the manifest, or None if the class names are unknown.
        settings: Settings of the command that created the shards. The dictionary is empty without a manifest.
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
        self.files = [self.path] if self.path.is_file() else shard_files(self.path)
        manifest = read_manifest(self.path)
        if check_folder and manifest is None and (self.path / UNFINISHED).exists():
            raise UserError(f"{self.path} is not finished: run the same prepare_latents.py command again to complete it")
        if not self.files:
            raise UserError(f"{self.path} holds no latent shards (*.safetensors); make them with encode or convert")
        infos, shards, offsets = zip(*map(_open_shard, self.files))
        names = [sorted(shard.keys() - {"image_hashes"}) for shard in shards]
        layouts = [(i, n, shard["latents"].dtype, shard["latents"].shape[1:]) for i, n, shard in zip(infos, names, shards)]
        for file, layout in zip(self.files, layouts):
            if layout != layouts[0]:
                raise UserError(f"{file} does not belong with {self.files[0]}: {layout}, not {layouts[0]}")
        self.info: ShardInfo = infos[0]
        self.labels: np.ndarray = np.concatenate([shard["labels"].numpy() for shard in shards])
        hashes = [shard["image_hashes"].numpy() for shard in shards if "image_hashes" in shard]
        self.image_hashes: np.ndarray | None = np.concatenate(hashes) if len(hashes) == len(shards) else None
        latents = shards[0]["latents"][:0].numpy()
        self._shape, self._dtype = latents.shape[1:], latents.dtype
        self._item_bytes = math.prod(self._shape) * self._dtype.itemsize
        self.has_flips, self.has_jpegs = "latents_flip" in shards[0], "images" in shards[0]
        self.has_images = self.has_jpegs or self.info.autoencoder == "identity"
        self._offsets = [[starts[name] for starts in offsets] for name in _STORED[: 1 + self.has_flips]]  # indices: [flip][shard]
        if self.has_jpegs:  # file offsets of all images, followed by the end of the last image, [M + 1] per shard
            self._images = [shard["image_offsets"].numpy() + starts["images"] for shard, starts in zip(shards, offsets)]
        self._first_item = np.cumsum([0] + [len(shard["labels"]) for shard in shards])
        self._reader = FileReader(self.files)
        channels, self.height, self.width = self._shape
        self.channels = channels // (1 + (self.info.kind == "moments"))
        self.class_names: list[str] | None = manifest and manifest.get("class_names")
        self.settings: dict = manifest["settings"] if manifest else {}
        if check_folder and manifest and manifest["shards"] != self.hashes:
            raise UserError(f"{self.path}: the shards are not those that {MANIFEST} lists; run inspect to find the difference")
        if check_folder and manifest is None and self.path.is_dir() and "provenance" in read_header(self.files[0])[0]:
            log.warning("%s has no %s: if it is a copy, copy it completely, or shards may be missing", self.path, MANIFEST)

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: np.ndarray, flips: np.ndarray) -> tuple[Tensor, Tensor]:
        """Read stored latents [b, C or 2C, H, W] and int64 labels [b].

        Args:
            indices: Item indices [b].
            flips: Whether to read each item from `latents_flip`, bool [b].

        Raises:
            ValueError: If the lengths differ, or if `flips` requests mirrored latents that the shards do not contain.
            IndexError: If an index is negative or too large.
            UserError: If a shard is truncated or unreadable.
        """
        if len(indices) != len(flips) or (not self.has_flips and flips.any()):
            mirrored = "mirrored latents" if self.has_flips else "no mirrored latents"
            raise ValueError(f"got {len(indices)} indices and {len(flips)} flips; these shards hold {mirrored}")
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"items {indices.min()} to {indices.max()} are not all in 0 .. {len(self) - 1}")
        values = np.empty((len(indices), *self._shape), dtype=self._dtype)
        parts = values.view(np.uint8).reshape(len(indices), self._item_bytes)
        # Read items one by one. Indexing each shard takes ten times longer if all items of a batch are in different shards.
        for part, shard_idx, row, flip in zip(parts, *self._locate(indices), flips.tolist()):
            self._reader.read_into(part, shard_idx, self._offsets[flip][shard_idx] + row * self._item_bytes)
        return torch.from_numpy(values), torch.from_numpy(self.labels[indices])

    def fetch_with_images(self, indices: np.ndarray, flips: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Read latents and labels like `fetch`, and also the images, uint8 [b, R, R, 3]. `has_images` must be True.

        Mirror the images where `flips` is True. Raises UserError if an image is not a JPEG file of R x R pixels.
        """
        latents, labels = self.fetch(indices, flips)
        if self.info.autoencoder == "identity":
            return latents, labels, to_uint8(mean_and_log_variance(latents.float(), self.info.kind)[0])
        size = self.info.resolution
        images = np.empty((len(indices), size, size, 3), dtype=np.uint8)
        for pixels, index, shard_idx, row, flip in zip(images, indices, *self._locate(indices), flips.tolist()):
            start, stop = self._images[shard_idx][row : row + 2].tolist()
            self._reader.read_into(jpeg := np.empty(stop - start, dtype=np.uint8), shard_idx, start)
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
        return {file.name: read_header(file)[0].get("hash") or hash_file(file) for file in self.files}

    def shared_with(self, other: LatentDataset) -> np.ndarray:
        """Return for each item whether `other` contains its image, bool [N]. All are False if one of both has no hashes."""
        if self.image_hashes is None or other.image_hashes is None:
            return np.zeros(len(self), dtype=bool)
        return np.isin(self.image_hashes, other.image_hashes)

    @property
    def hash(self) -> str:
        """Return a hash that identifies the data set."""
        return hash_of_shards(self.hashes)


def _open_shard(file: Path) -> tuple[ShardInfo, dict[str, Tensor], dict[str, int]]:
    """Open a shard. Return the metadata, the memory-mapped tensors, and the offset of each tensor in the file."""
    try:
        shard = load_file(regular_file(file))
    except (SafetensorError, OSError) as e:
        raise UserError(f"{file} is truncated or not a safetensors file: {e}") from e
    metadata, starts = read_header(file)
    check_format(metadata, file)
    try:
        info = ShardInfo(**metadata)
    except pydantic.ValidationError as e:
        key, message = ".".join(map(str, e.errors()[0]["loc"])), e.errors()[0]["msg"]
        raise UserError(f"{file} is not a latent shard: in its header, {key}: {message}") from e
    _check_tensors(file, info, shard)
    return info, shard, starts


def mean_and_log_variance(stored: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """Split stored latents [b, C or 2C, H, W] into mean and log-variance [b, C, H, W]. For `sample`, the log-variance is None."""
    if kind == "sample":
        return stored, None
    mean, log_variance = stored.chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)  # same clamp as in diffusers' DiagonalGaussianDistribution


def draw_latents(stored: Tensor, kind: str, random=None) -> Tensor:
    """Sample latents [b, C, H, W] from [b, C or 2C, H, W]. For `moments`, `random.randn(C, H, W)` draws noise [b, C, H, W]."""
    mean, log_variance = mean_and_log_variance(stored, kind)
    return mean if log_variance is None else mean + (log_variance / 2).exp() * random.randn(*mean.shape[1:])


def latents_for_network(stored: Tensor, info: ShardInfo, random=None) -> Tensor:
    """Convert stored latents [b, C or 2C, H, W] to the network input, float32 [b, C, H, W]. `draw_latents` explains `random`."""
    return normalize_latents(draw_latents(stored.float(), info.kind, random), info)


def normalize_latents(latents: Tensor, info: ShardInfo) -> Tensor:
    """Convert autoencoder latents [b, C, H, W] to the network input (x - latents_mean) / latents_std * scale_factor.

    `info` may be any object with latents_mean, latents_std and scale_factor, such as the `data` settings of a configuration.
    """
    mean, std = _mean_and_std(info, latents.device)
    return (latents - mean) / std * info.scale_factor


def restore_latents(latents: Tensor, info: ShardInfo) -> Tensor:
    """Convert network input back to autoencoder latents. This function is the inverse of `normalize_latents`."""
    mean, std = _mean_and_std(info, latents.device)
    return latents / info.scale_factor * std + mean


def _mean_and_std(info: ShardInfo, device: torch.device) -> tuple[Tensor, Tensor] | tuple[float, float]:
    if info.latents_mean is None:
        return 0.0, 1.0
    return _per_channel(tuple(info.latents_mean), device), _per_channel(tuple(info.latents_std), device)


@functools.lru_cache(maxsize=16)  # copying the values for every batch would synchronise the host with the device
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, 1, 1)
