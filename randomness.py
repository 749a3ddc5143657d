"""Random numbers that belong to samples, not to batches or processes. Both sources offer randn and rand, one row a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def _key(*parts: object) -> int:
    """A 63-bit generator seed from what the numbers are to depend on."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class StepRandom:
    """The draws of one training step, a function of (seed, step, stream) for each sample of the global batch.

    The numbers of the whole global batch are drawn from one generator on the device, and this process keeps its part:
    no state to save, and the same numbers for any number of processes and micro-batches.

    Args:
        seed, step: of the run.
        stream: what the numbers are for; streams are independent, so that one more draw in one leaves the others alone.
        batch_size: of the global batch.
        part: the rows of this process's micro-batch.
    """

    def __init__(self, seed: int, step: int, stream: str, batch_size: int, part: slice, device: torch.device):
        self.batch_size, self.part, self.device = batch_size, part, device
        self.generator = torch.Generator(device).manual_seed(_key(seed, step, stream))

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(self.batch_size, *shape, generator=self.generator, device=self.device)[self.part]

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(self.batch_size, *shape, generator=self.generator, device=self.device)[self.part]


class SeedRandom:
    """The draws of sampling: row i is a function of seeds[i] alone, on any device (drawn on the CPU).

    Args:
        seeds: numbers, or tuples of them.
        stream: what the numbers are for; streams are independent.
    """

    def __init__(self, seeds: Sequence[int | tuple[int, ...]], device: torch.device, stream: str = "sample"):
        self.generators = [torch.Generator().manual_seed(_key(stream, seed)) for seed in seeds]
        self.device = device

    def randn(self, *shape: int) -> Tensor:
        return torch.stack([torch.randn(*shape, generator=g) for g in self.generators]).to(self.device)

    def rand(self, *shape: int) -> Tensor:
        return torch.stack([torch.rand(*shape, generator=g) for g in self.generators]).to(self.device)


def class_of_seed(seed: int, num_classes: int) -> int:
    """A uniformly random class, a function of the seed alone."""
    return int(np.random.default_rng(_key("class", seed)).integers(num_classes))
