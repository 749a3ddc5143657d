"""Generate random numbers that depend on the sample and not on the batch or process."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.devices import copy_to_device


def derive_seed(*parts: int | str | tuple) -> int:
    """Hash the values that determine random numbers, and return a generator seed below 2^63. Raises TypeError for floats.

    On a CPU, torch's generator uses only the low 32 bits. Among 50,000 seeds, about 0.3 pairs therefore give the same numbers.
    """
    digest = hashlib.blake2b(repr(_plain(parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _plain(part: int | str | tuple) -> int | str | tuple:
    """Convert NumPy and torch integers to Python integers, so that equal numbers have the same repr."""
    if isinstance(part, tuple):
        return tuple(map(_plain, part))
    return part if isinstance(part, str) else int(operator.index(part))


class SampleRandom:
    """Random numbers for B samples. In every result, the samples are the first axis. Subclasses define `draw_with`."""

    def randn(self, *shape: int) -> Tensor:
        """Draw standard normal numbers [B, *shape]."""
        return self.draw_with(torch.randn, shape)

    def rand(self, *shape: int) -> Tensor:
        """Draw uniform numbers in [0, 1), [B, *shape]."""
        return self.draw_with(torch.rand, shape)

    def draw_with(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        """Draw numbers [B, *shape] with `draw`, which is torch.randn or torch.rand."""
        raise NotImplementedError


class SeedRandom(SampleRandom):
    """Random numbers for sampling, drawn on the CPU. Those of sample i depend only on seeds[i], an integer or a tuple of them."""

    def __init__(self, seeds: Sequence[int | tuple[int, ...]], device: torch.device, stream: str = "sample"):
        self.generators = [torch.Generator().manual_seed(derive_seed(stream, seed)) for seed in seeds]
        self.device = device

    def draw_with(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        drawn = torch.stack([draw(shape, generator=g) for g in self.generators])
        return copy_to_device(drawn, self.device)
