"""Random numbers that belong to samples, not to batches or processes: randn(*shape) and rand(*shape) are (B, *shape)."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def key_of(*parts: int | str | tuple) -> int:
    """A seed for a generator, below 2^63, from everything that the numbers depend on. Raises TypeError for a float.

    On a CPU, torch's generator uses only the low 32 bits: among 50,000 seeds, about 0.3 pairs give equal numbers.
    """
    digest = hashlib.blake2b(repr(tuple(map(_plain, parts))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _plain(part: int | str | tuple) -> int | str | tuple:
    """Equal numbers give equal draws, also as NumPy's integers or tensors, which repr writes in another way."""
    if isinstance(part, str):
        return part
    return tuple(map(_plain, part)) if isinstance(part, tuple) else int(operator.index(part))


class StepRandom:
    """Random numbers of one training step: a function of (seed, step, stream, row of the global batch).

    Every process draws the numbers of the global batch from one generator on its device, and keeps its rows: there is no state
    to save, and the numbers are the same for any number of processes and micro-batches.

    Args:
        seed, step: of the run.
        stream: what the numbers are for. Streams are independent: one more draw in one does not change the others.
        batch_size: of the global batch.
        part: the rows of this process's micro-batch.

    Raises TypeError where seed or step is no integer.
    """

    def __init__(self, seed: int, step: int, stream: str, batch_size: int, part: slice, device: torch.device):
        self.batch_size, self.part, self.device = batch_size, part, device
        self.generator = torch.Generator(device).manual_seed(key_of(seed, step, stream))

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(self.batch_size, *shape, generator=self.generator, device=self.device)[self.part]

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(self.batch_size, *shape, generator=self.generator, device=self.device)[self.part]


class SeedRandom:
    """Random numbers of sampling: row i is a function of seeds[i] alone. They are drawn on the CPU, so any device gets the same.

    Args:
        seeds: one per sample; integers, or tuples of them. Others raise TypeError.
        stream: what the numbers are for; streams are independent.
    """

    def __init__(self, seeds: Sequence[int | tuple[int, ...]], device: torch.device, stream: str = "sample"):
        self.generators = [torch.Generator().manual_seed(key_of(stream, seed)) for seed in seeds]
        self.device = device

    def randn(self, *shape: int) -> Tensor:
        return self._draw(torch.randn, shape)

    def rand(self, *shape: int) -> Tensor:
        return self._draw(torch.rand, shape)

    def _draw(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        rows = torch.stack([draw(shape, generator=g) for g in self.generators])
        on_cuda = self.device.type == "cuda"  # where a copy of pinned memory does not wait for what is queued
        return (rows.pin_memory() if on_cuda else rows).to(self.device, non_blocking=on_cuda)


SampleRandom = StepRandom | SeedRandom  # or anything with their `randn` and `rand`, on the device of the batch
