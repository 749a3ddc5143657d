"""The native shard format (docs/data.md, The format): safetensors files, from which batches are read by index.

Shards hold JPEG files of the unmirrored images. Pixels are mirrored when they are read.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
from collections.abc import Sequence
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

from common.errors import UserError, reading
from common.files import hash_bytes, hash_file, read_json, write_file
from common.types import Number, Positive
from latents.autoencoders import to_uint8
from latents.reader import FileReader

MANIFEST = "manifest.json"  # lists the shards of a folder, written when the folder is complete
UNFINISHED = ".unfinished"  # lock file of the command that writes the folder, left behind by an interruption
_STORED = ("latents", "latents_flip")
Kind = Literal["sample", "moments"]
MAX_CLASSES = 10**6  # with more classes, tables over classes and images would not fit into memory
NumClasses = Annotated[int, Field(ge=1, le=MAX_CLASSES)]
Resolution = Annotated[int, Field(ge=1, le=2**16)]


@pydantic.dataclasses.dataclass(frozen=True)
class ShardInfo:
    """The part of a header needed to read a shard. All shards of a folder share it. Raises ValueError for a wrong value."""

    kind: Kind  # sample (C channels) or moments (2C channels: mean and log-variance, sampled at every read)
    scale_factor: Positive  # factor that multiplies latents before they enter the network
    autoencoder: str  # identity | none | sd-vae:<hub id or folder> | va-vae:<file or folder>
    resolution: Resolution  # height and width of the images in pixels
    num_classes: NumClasses  # labels are 0 .. num_classes - 1
    # Mean and standard deviation of each of the C channels over all latents. If both are None, latents are not normalised.
    latents_mean: tuple[Number, ...] | None = None
    latents_std: tuple[Positive, ...] | None = None

    def __post_init__(self):
        if len(self.latents_mean or ()) != len(self.latents_std or ()):
            raise ValueError("latents_mean and latents_std need a number for each channel")


def pack_images(files: Sequence[bytes]) -> dict[str, Tensor]:
    """Pack the JPEG file of every item into the tensors `images` and `image_offsets` of a shard."""
    offsets = torch.tensor([0, *(len(file) for file in files)], dtype=torch.int64).cumsum(0)
    return {"images": torch.from_numpy(np.frombuffer(bytearray(b"".join(files)), np.uint8)), "image_offsets": offsets}


def write_shard(path: str | Path, latents: Tensor, labels: Tensor, info: ShardInfo, **more: Tensor | None) -> None:
    """Write a shard. The file appears only when it is complete.

    Args:
        latents: [M, C, H, W], or [M, 2C, H, W] for kind `moments`, float16 or float32.
        labels: [M] int64.
        more: latents_flip with the shape and type of latents; images and image_offsets from `pack_images`.

    Raises:
        UserError: the file exists, a shape, type or label is wrong, or a value is not finite.
    """
    path = Path(path)
    if path.exists():
        raise UserError(f"{path} exists; nothing was written: remove it, or write elsewhere")
    write_file(path, serialize_shard(path, info, latents=latents, labels=labels, **more))


def serialize_shard(path: Path, info: ShardInfo, provenance: dict | None = None, **tensors: Tensor | None) -> bytes:
    """Serialize a shard. Equal data give equal bytes. Raises UserError for wrong tensors, like `write_shard`.

    Args:
        path: the file of the shard, for error messages.
        provenance: how the shard was made, in JSON types.
    """
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    _check_tensors(path, info, tensors)
    for name in {*_STORED} & tensors.keys():
        finite = tensors[name].flatten(1).isfinite().all(dim=1).tolist()
        if not all(finite):
            raise UserError(f"{path}: {name} of item {finite.index(False)} are not finite as {tensors[name].dtype}")
    about = asdict(info) | ({"provenance": provenance} if provenance else {})
    about["hash"] = _hash(tensors, about)
    return save(tensors, metadata={"about": json.dumps(about)})  # a single entry, because safetensors orders several at random


def _hash(tensors: dict[str, Tensor], about: dict) -> str:
    digest = hashlib.blake2b(json.dumps(about).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().numpy())
    return digest.hexdigest()


def read_header(file: Path) -> tuple[dict, dict[str, int]]:
    """Read (about, starts) from the header of a safetensors file. Raises UserError for other files.

    `about` holds the fields of ShardInfo, `hash`, and `provenance` if encode or convert made the shard. It is {} if the file is
    not a shard. `starts` maps the name of each tensor to its first byte in the file.
    """
    with reading(file), open(file, "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
        about = dict(json.loads(header.pop("__metadata__", {}).get("about", "{}")))
        return about, {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}


def is_intact(file: Path) -> bool:
    """Read the whole shard and compare its hash with the one in its header. Returns True if the header has none."""
    try:
        about, _ = read_header(file)
        return about.pop("hash", None) in (None, _hash(load_file(file), about))
    except (SafetensorError, UserError):
        return False


def _check_tensors(file: Path, info: ShardInfo, shard: dict[str, Tensor]) -> None:
    """Check names, shapes, types and labels of the tensors of a shard. Raises UserError if one is wrong."""
    held = ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in shard.items())

    def need(is_so: bool, what: str) -> None:
        if not is_so:
            raise UserError(f"{file} holds {held}; a latent shard needs {what}")

    need({"latents", "labels"} <= shard.keys() <= {*_STORED, "labels", "images", "image_offsets"}, "latents and labels")
    latents, labels = shard["latents"], shard["labels"]
    is_float = latents.dtype in (torch.float16, torch.float32)
    need(latents.ndim == 4 and is_float, "latents [M, C, H, W] of float16 or float32")
    flips = shard.get("latents_flip", latents)
    need((flips.shape, flips.dtype) == (latents.shape, latents.dtype), "latents_flip like latents")
    need(info.kind == "sample" or latents.shape[1] % 2 == 0, "an even number of channels for kind=moments")
    channels = latents.shape[1] // (1 + (info.kind == "moments"))
    need(len(info.latents_mean or range(channels)) == channels, f"latents_mean and latents_std of {channels} channels")
    need(labels.dtype == torch.int64 and labels.shape == latents.shape[:1], "labels [M] of int64")
    are_classes = ((labels >= 0) & (labels < info.num_classes)).all()
    need(are_classes, f"labels from 0 to {info.num_classes - 1}, as num_classes says")
    need("images" not in shard or len(shard.get("image_offsets", ())) == len(labels) + 1, "image_offsets [M + 1] of images")


def spread_items(num_items: int, at_most: int) -> np.ndarray:
    """Choose item numbers, int64 [n], spread evenly over the data, including the first and the last."""
    return np.unique(np.linspace(0, num_items - 1, num=min(at_most, num_items)).astype(np.int64))


def shard_files(folder: Path) -> list[Path]:
    """List the shards of a folder in order. Hidden files are half-written shards and are left out."""
    return sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("."))


def read_manifest(folder: Path) -> dict | None:
    """Read the manifest of a folder. Returns None if there is none. Raises UserError if it does not describe latents."""
    file = folder / MANIFEST
    if not file.exists():
        return None
    manifest = read_json(file)
    if not (isinstance(manifest, dict) and {"shards", "settings"} <= manifest.keys()):
        raise UserError(f"{file} is not a manifest of latent shards; make the folder again, or remove this file")
    return manifest


class LatentDataset:
    """The shards of a folder as one array of latents, read by index.

    Attributes:
        labels: [N] int64.
        channels, height, width: shape of a latent. For `moments`, `channels` is half the number of stored channels.
        has_flips: whether shards hold latents of the mirrored images.
        has_jpegs: whether shards hold the images as JPEG files.
        has_images: whether `fetch_with_images` works, because shards hold JPEG files or the latents are pixels.
        class_names: names of the classes from the manifest, or None.
        settings: settings of the command that made the folder, from the manifest, or {}.

    Args:
        path: a folder of shards, or a single shard.
        check_folder: False also opens an unfinished folder, or one whose manifest lists other shards.

    Raises:
        UserError: there are no shards, a shard is damaged, or a shard differs from the first one in header, tensors or shape; the
            folder is unfinished, or its manifest lists other shards.
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
        layouts = [(i, sorted(shard), shard["latents"].dtype, shard["latents"].shape[1:]) for i, shard in zip(infos, shards)]
        for file, layout in zip(self.files, layouts):
            if layout != layouts[0]:
                raise UserError(f"{file} does not belong with {self.files[0]}: {layout}, not {layouts[0]}")
        self.info: ShardInfo = infos[0]
        self.labels: np.ndarray = np.concatenate([shard["labels"].numpy() for shard in shards])
        latents = shards[0]["latents"][:0].numpy()
        self._shape, self._dtype = latents.shape[1:], latents.dtype
        self._item_bytes = math.prod(self._shape) * self._dtype.itemsize
        self.has_flips, self.has_jpegs = "latents_flip" in shards[0], "images" in shards[0]
        self.has_images = self.has_jpegs or self.info.autoencoder == "identity"
        self._offsets = [[starts[name] for starts in offsets] for name in _STORED[: 1 + self.has_flips]]  # [flip][shard]
        if self.has_jpegs:  # [M + 1] for each shard: the first byte of each image in the file, and the end of the last image
            self._images = [shard["image_offsets"].numpy() + starts["images"] for shard, starts in zip(shards, offsets)]
        self._first_item = np.cumsum([0] + [len(shard["labels"]) for shard in shards])
        self._reader = FileReader(self.files)
        channels, self.height, self.width = self._shape
        self.channels = channels // (1 + (self.info.kind == "moments"))
        self.class_names: list[str] | None = manifest and manifest.get("class_names")
        self.settings: dict = manifest["settings"] if manifest else {}
        if check_folder and manifest and manifest["shards"] != self.hashes:
            raise UserError(f"{self.path}: the shards are not those that {MANIFEST} lists; run inspect to find the difference")

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: np.ndarray, flips: np.ndarray) -> tuple[Tensor, Tensor]:
        """Read latents [b, C or 2C, H, W] as stored (latents_flip where `flips` is True), and labels [b] int64.

        Args:
            indices: [b] item numbers.
            flips: [b] bool, which items to read mirrored.

        Raises:
            ValueError: the lengths differ, or `flips` asks for mirrored latents and there are none.
            IndexError: an item does not exist, or its number is negative.
            UserError: a shard is truncated or cannot be read.
        """
        if len(indices) != len(flips) or (not self.has_flips and flips.any()):
            held = "hold" if self.has_flips else "hold no"
            raise ValueError(f"got {len(indices)} indices and {len(flips)} flips; these shards {held} mirrored latents")
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"items {indices.min()} to {indices.max()} are not all in 0 .. {len(self) - 1}")
        values = np.empty((len(indices), *self._shape), dtype=self._dtype)
        parts = values.view(np.uint8).reshape(len(indices), self._item_bytes)
        # Items are read one by one. Indexing shard by shard takes ten times longer if each item of a batch is in another shard.
        for part, shard_idx, row, flip in zip(parts, *self._locate(indices), flips.tolist()):
            self._reader.read_into(part, shard_idx, self._offsets[flip][shard_idx] + row * self._item_bytes)
        return torch.from_numpy(values), torch.from_numpy(self.labels[indices])

    def fetch_with_images(self, indices: np.ndarray, flips: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Like `fetch`, but also read the images, uint8 [b, R, R, 3], mirrored where `flips` is True. Needs `has_images`.

        Also raises UserError if an image is not a JPEG file of R x R pixels.
        """
        latents, labels = self.fetch(indices, flips)
        if self.info.autoencoder == "identity":
            return latents, labels, to_uint8(mean_and_log_variance(latents.float(), self.info.kind)[0])
        size = self.info.resolution
        images = np.empty((len(indices), size, size, 3), dtype=np.uint8)
        for pixels, index, shard_idx, row, flip in zip(images, indices, *self._locate(indices), flips.tolist()):
            start, stop = self._images[shard_idx][row : row + 2].tolist()
            self._reader.read_into(jpeg := np.empty(stop - start, dtype=np.uint8), shard_idx, start)
            # Pillow releases the GIL while it decodes. The decoder of torchvision is deprecated.
            with reading(f"{self.path}: image {index}"), Image.open(io.BytesIO(jpeg), formats=["JPEG"]) as image:
                if image.size != (size, size):
                    raise ValueError(f"{image.width}x{image.height} pixels, not {size}x{size}")
                pixels[:] = np.array(image.convert("RGB"))[:, :: -1 if flip else 1]
        return latents, labels, torch.from_numpy(images)

    def _locate(self, indices: np.ndarray) -> tuple[list[int], list[int]]:
        """Find the shard of each item, and its row in the shard."""
        shards = np.searchsorted(self._first_item, indices, side="right") - 1
        return shards.tolist(), (indices - self._first_item[shards]).tolist()

    @functools.cached_property
    def hashes(self) -> dict[str, str]:
        """Map the name of each shard to the hash in its header. If the header has none, the whole file is hashed."""
        return {file.name: read_header(file)[0].get("hash") or hash_file(file) for file in self.files}

    @property
    def identity(self) -> str:
        """Return a hash that identifies the data set."""
        return hash_bytes("".join(self.hashes.values()).encode())


def _open_shard(file: Path) -> tuple[ShardInfo, dict[str, Tensor], dict[str, int]]:
    """Open a shard. Returns the header, the memory-mapped tensors, and the first byte of each tensor in the file."""
    try:
        shard = load_file(file)
    except (SafetensorError, OSError) as e:
        raise UserError(f"{file} is truncated or not a safetensors file: {e}") from e
    about, starts = read_header(file)
    try:
        info = ShardInfo(**about)
    except pydantic.ValidationError as e:
        key, message = ".".join(map(str, e.errors()[0]["loc"])), e.errors()[0]["msg"]
        raise UserError(f"{file} is not a latent shard: in its header, {key}: {message}") from e
    _check_tensors(file, info, shard)
    return info, shard, starts


def mean_and_log_variance(stored: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """Split stored latents [b, C or 2C, H, W] into mean and log-variance [b, C, H, W]. `sample` has no log-variance (None)."""
    if kind == "sample":
        return stored, None
    mean, log_variance = stored.chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)  # the autoencoder's own clamp (diffusers, DiagonalGaussianDistribution)


def draw_latents(stored: Tensor, kind: str, random=None) -> Tensor:
    """Draw latents [b, C, H, W] from [b, C or 2C, H, W]. For `moments`, `random.randn(C, H, W)` draws noise [b, C, H, W]."""
    mean, log_variance = mean_and_log_variance(stored, kind)
    return mean if log_variance is None else mean + (log_variance / 2).exp() * random.randn(*mean.shape[1:])


def latents_for_network(stored: Tensor, info: ShardInfo, random=None) -> Tensor:
    """Turn stored latents [b, C or 2C, H, W] into network input, float32 [b, C, H, W]. `random` is as in `draw_latents`."""
    return normalize_latents(draw_latents(stored.float(), info.kind, random), info)


def normalize_latents(latents: Tensor, info: ShardInfo) -> Tensor:
    """Turn latents [b, C, H, W] of the autoencoder into network input: (x - latents_mean) / latents_std * scale_factor.

    `info` may be any object with these three fields: a header, the settings data.* of a configuration, or a sampler.
    """
    mean, std = _mean_and_std(info, latents.device)
    return (latents - mean) / std * info.scale_factor


def restore_latents(latents: Tensor, info: ShardInfo) -> Tensor:
    """Invert `normalize_latents`, so that the autoencoder can decode the latents."""
    mean, std = _mean_and_std(info, latents.device)
    return latents / info.scale_factor * std + mean


def _mean_and_std(info: ShardInfo, device: torch.device) -> tuple[Tensor, Tensor] | tuple[float, float]:
    if info.latents_mean is None:
        return 0.0, 1.0
    return _per_channel(tuple(info.latents_mean), device), _per_channel(tuple(info.latents_std), device)


@functools.lru_cache(maxsize=16)  # copying the values for every batch would synchronise with the device
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).reshape(-1, 1, 1)
