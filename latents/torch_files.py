"""Load tensors from files without executing any code that the files contain."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from common.errors import UserError, as_user_error
from common.files import regular_file


def load_tensors(file: Path) -> Any:
    """Load a tensor, or dictionaries and lists of tensors, from a safetensors file or a torch.save file.

    Raises UserError if the file is damaged or unreadable, or if it contains other objects, whose pickles could execute code.
    """
    with as_user_error(file):
        if file.suffix == ".safetensors":
            return load_file(regular_file(file))
        with open(regular_file(file), "rb") as f:
            start = f.read(40)
        if not start.startswith((b"PK", b"\x80")):  # for example, an HTML error page or a Git LFS pointer
            raise UserError(f"{file} is not a file of torch.save, which is a zip archive or a pickle: it begins with {start!r}")
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))


def read_channel_statistics(file: Path, num_channels: int) -> tuple[list[float], list[float]]:
    """Read each channel's mean and standard deviation from LightningDiT's latents_stats.pt."""
    stored = load_tensors(file)
    try:
        mean, std = (stored[name].double().flatten().tolist() for name in ("mean", "std"))
    except (LookupError, TypeError, AttributeError) as e:
        raise UserError(f"{file} does not hold the tensors mean and std") from e
    if not len(mean) == len(std) == num_channels:
        raise UserError(f"{file} has {len(mean)} channels, and the latents have {num_channels}")
    for channel, (m, s) in enumerate(zip(mean, std)):
        if not math.isfinite(m) or not 0 < s < math.inf:
            raise UserError(
                f"{file}: mean and std of channel {channel} are {m:g} and {s:g}; need finite numbers, and std above 0"
            )
    return mean, std
