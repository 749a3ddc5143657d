"""Define the native format of latents, which docs/data.md describes: shards (safetensors) and the manifest of their folder.

`latents.dataset` reads a folder of shards by index.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from common.errors import Unreadable, UserError, as_user_error
from common.files import hash_bytes, pop_format, read_json, regular_file, write_atomically
from common.images import hash_pixels
from common.randomness import SampleRandom
from common.types import MAX_CLASSES, Colour, FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range
from configs.settings import describe_errors

MANIFEST = "manifest.json"  # file that lists all shards of a complete folder
UNFINISHED = ".unfinished"  # lock file, which `ShardFolder` removes after all shards are written
LATENT_TENSORS = ("latents", "latents_flip")
Kind = Literal["sample", "moments"]
LabelBy = Literal["auto", "none", "first_level"]
Part = Literal["all", "train", "validation"]
Duplicates = Literal["keep", "skip"]
NumClasses = Annotated[PositiveInt, Field(le=MAX_CLASSES)]
Resolution = Annotated[PositiveInt, Field(le=2**16)]
_MAY_BE_TEXT = pydantic.Strict(False)  # other programs may write numbers of the header as text


@pydantic.dataclasses.dataclass(frozen=True)
class ShardInfo:
    """Metadata for reading a shard. All shards of a folder have the same metadata. Invalid values raise ValueError."""

    kind: Kind  # `sample` (C channels) or `moments` (mean and log-variance in 2C channels, from which the trainer draws latents)
    scale_factor: Annotated[PositiveFloat, _MAY_BE_TEXT]  # factor that scales latents before they enter the network
    autoencoder: str  # name of the autoencoder: identity, none, sd-vae:<hub id or folder> or va-vae:<file or folder>
    resolution: Annotated[Resolution, _MAY_BE_TEXT]  # image height and width in pixels
    num_classes: Annotated[NumClasses, _MAY_BE_TEXT]  # number of classes (labels range from 0 to num_classes - 1)
    # Mean and standard deviation of each of the C channels over all latents. If both values are None, latents are not normalised.
    latents_mean: list[Annotated[FiniteFloat, _MAY_BE_TEXT]] | None = None
    latents_std: list[Annotated[PositiveFloat, _MAY_BE_TEXT]] | None = None

    def __post_init__(self):
        if len(self.latents_mean or ()) != len(self.latents_std or ()):
            raise ValueError("latents_mean and latents_std need a number for each channel")


def pack_images(files: Sequence[bytes]) -> dict[str, Tensor]:
    """Pack the JPEG files of a shard's items into the tensors `images` and `image_offsets`."""
    offsets = torch.tensor([0, *(len(file) for file in files)], dtype=torch.int64).cumsum(0)
    content = bytearray(b"".join(files))  # PyTorch warns about read-only memory
    return {"images": torch.from_numpy(np.frombuffer(content, np.uint8)), "image_offsets": offsets}


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
    for name in {*LATENT_TENSORS} & tensors.keys():
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


def read_header(file: Path) -> dict:
    """Read the metadata of a shard: the fields of ShardInfo, `hash`, and for shards from `encode` or `convert` also `provenance`.

    For other safetensors files, it is {}.
    """
    return _read_header(file)[0]


def _read_header(file: Path) -> tuple[dict, dict[str, int]]:
    """Return the metadata, and each tensor's offset in the file."""
    with as_user_error(file), open(regular_file(file), "rb") as f:
        size = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(size))
        metadata = dict(json.loads(header.pop("__metadata__", {}).get("about", "{}")))
        return metadata, {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}


def open_shard(file: Path) -> tuple[ShardInfo, dict[str, Tensor], dict[str, int]]:
    """Open a shard. Return the metadata, the memory-mapped tensors, and the offset of each tensor in the file."""
    try:
        shard = load_file(regular_file(file))
    except (SafetensorError, OSError) as e:
        raise UserError(f"{file} is truncated or not a safetensors file: {e}") from e
    metadata, starts = _read_header(file)
    pop_format(metadata, file)
    try:
        info = ShardInfo(**metadata)
    except pydantic.ValidationError as e:
        raise UserError(f"{file} is not a latent shard: in its header, {describe_errors(e, metadata)}") from e
    _check_tensors(file, info, shard)
    return info, shard, starts


def is_intact(file: Path) -> bool:
    """Return whether a shard is readable and matches the hash in its header. Readable shards without a hash count as intact.

    Raises Unreadable if the disk does not give the content now.
    """
    try:
        metadata = read_header(file)
        with as_user_error(file):
            return metadata.pop("hash", None) in (None, _hash(load_file(regular_file(file)), metadata))
    except Unreadable:
        raise
    except UserError:
        return False


def _check_tensors(file: Path, info: ShardInfo, shard: dict[str, Tensor]) -> None:
    """Raise UserError if a shard's tensors have invalid names, shapes, dtypes or labels."""
    contents = ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in shard.items())

    def require(condition: bool, expected: str) -> None:
        if not condition:
            raise UserError(f"{file} holds {contents}; a latent shard needs {expected}")

    require(
        {"latents", "labels"} <= shard.keys() <= {*LATENT_TENSORS, "labels", "images", "image_offsets", "image_hashes"},
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


def shard_files(path: Path) -> list[Path]:
    """List a single shard, or the shards of a folder in sorted order. Skip hidden files, which are incomplete or outdated."""
    if path.is_file():
        return [path]
    return sorted(regular_file(f) for f in path.glob("*.safetensors") if not f.name.startswith("."))


class _AllowsExtra(pydantic.BaseModel):
    """Base class that accepts unknown entries, which other programs may add, and converts no types."""

    model_config = pydantic.ConfigDict(extra="allow", strict=True)


class EncodeSettings(_AllowsExtra):
    """Entries of a manifest's `settings` that say how `encode` chose and read images. Other programs do not write them.

    The defaults only allow this: `read_manifest` returns the entries of the file.
    """

    part: Part = "all"
    duplicates: Duplicates = "keep"
    background: Colour = "white"
    pad: NonNegativeInt = 0
    grey: bool = False
    value_range: Range | None = None


class _LeftOut(_AllowsExtra):
    name: str
    problem: str


class _Manifest(_AllowsExtra):
    """Entries of a manifest that this project reads. Other programs may leave out those with a default."""

    shards: dict[str, str]
    settings: EncodeSettings
    class_names: list[str] | None = None
    label_by: LabelBy | None = None  # `labels` of `encode`
    left_out: list[_LeftOut] = []
    notes: dict[str, int] = {}


def read_manifest(folder: Path | str | None) -> dict:
    """Read the manifest of a folder of shards. Return {} if `folder` is None or a single shard, or if the file is missing."""
    if folder is None or not os.path.lexists(file := Path(folder) / MANIFEST):
        return {}
    manifest = read_json(regular_file(file))
    manifest = manifest if isinstance(manifest, dict) else {}
    pop_format(manifest, file)
    try:
        _Manifest.model_validate(manifest)
    except pydantic.ValidationError as e:
        remedy = "make the folder again, or remove this file"
        raise UserError(f"{file} is not a manifest of latent shards ({describe_errors(e, manifest)}); {remedy}") from e
    return manifest


def hash_of_shards(hashes: Mapping[str, str]) -> str:
    """Return a hash that identifies a data set with these hashes of its shards, in the order of the files."""
    return hash_bytes("".join(hashes.values()).encode())


def mean_and_log_variance(stored: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """Split stored latents [b, C or 2C, H, W] into mean and log-variance [b, C, H, W]. For `sample`, the log-variance is None."""
    if kind == "sample":
        return stored, None
    mean, log_variance = stored.chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)  # same clamp as in diffusers' DiagonalGaussianDistribution


def draw_latents(stored: Tensor, kind: str, random: SampleRandom | None = None) -> Tensor:
    """Sample latents [b, C, H, W] from [b, C or 2C, H, W]. For `moments`, `random.randn(C, H, W)` draws noise [b, C, H, W]."""
    mean, log_variance = mean_and_log_variance(stored, kind)
    return mean if log_variance is None else mean + (log_variance / 2).exp() * random.randn(*mean.shape[1:])


def latents_for_network(stored: Tensor, info: ShardInfo, random: SampleRandom | None = None) -> Tensor:
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
