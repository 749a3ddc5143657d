"""Generate random numbers that depend on the sample and not on the batch or process."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def derive_seed(*parts: int | str | tuple) -> int:
    """Hash the values that determine random numbers, and return a generator seed below 2^63. Raises TypeError for floats.

    On a CPU, torch's generator uses only the low 32 bits. Among 50,000 seeds, about 0.3 pairs therefore give the same numbers.
    """
    digest = hashlib.blake2b(repr(_plain(parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _plain(part: int | str | tuple) -> int | str | tuple:
    """Convert NumPy and torch integers to Python integers, so that equal numbers have the same repr."""
    if isinstance(part, str):
        return part
    return tuple(map(_plain, part)) if isinstance(part, tuple) else int(operator.index(part))


class SampleRandom:
    """Random numbers for B samples. randn(*shape) and rand(*shape) return [B, *shape]. Subclasses define `_draw`.

    Attributes:
        quantiles: Quantiles in [0, 1] of the numbers from the last call without a shape, [B]. A diffusion's loss draws only its
            noise levels without a shape.
    """

    def randn(self, *shape: int) -> Tensor:
        numbers = self._draw(torch.randn, shape)
        if not shape:
            self.quantiles = torch.special.ndtr(numbers)
        return numbers

    def rand(self, *shape: int) -> Tensor:
        numbers = self._draw(torch.rand, shape)
        if not shape:
            self.quantiles = numbers
        return numbers


class StepRandom(SampleRandom):
    """Random numbers for one training step. The numbers depend only on the seed, step, stream and row of the global batch.

    Every process draws numbers for the global batch (`batch_size` rows) on its device and returns the rows of its micro-batch
    (`rows`). Checkpoints therefore need no random state, and the number of processes or micro-batches does not matter.
    Additional draws from one stream do not change other streams. Raises TypeError if the seed or the step is a float.
    """

    def __init__(self, seed: int, step: int, stream: str, batch_size: int, rows: slice, device: torch.device):
        self.batch_size, self.rows, self.device = batch_size, rows, device
        self.generator = torch.Generator(device).manual_seed(derive_seed(seed, step, stream))

    def _draw(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        return draw(self.batch_size, *shape, generator=self.generator, device=self.device)[self.rows]


class SeedRandom(SampleRandom):
    """Random numbers for sampling. The CPU draws row i, which depends only on seeds[i] (an integer or a tuple of integers)."""

    def __init__(self, seeds: Sequence[int | tuple[int, ...]], device: torch.device, stream: str = "sample"):
        self.generators = [torch.Generator().manual_seed(derive_seed(stream, seed)) for seed in seeds]
        self.device = device

    def _draw(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        rows = torch.stack([draw(shape, generator=g) for g in self.generators])
        on_cuda = self.device.type == "cuda"  # copies from pinned memory do not wait for queued work
        return (rows.pin_memory() if on_cuda else rows).to(self.device, non_blocking=on_cuda)


class StratifiedRandom(SeedRandom):
    """Variant of SeedRandom for items 0, 1, ... of a data set. Numbers without a shape cover their distribution evenly.

    The number for item i lies in tenth i mod 10 of the distribution. A golden-ratio sequence spaces each tenth's numbers evenly.
    """

    def __init__(self, items: Sequence[int], device: torch.device, stream: str):
        super().__init__(items, device, stream)
        items = torch.as_tensor(items)
        positions = (items // 10 + 0.5).double() * ((5**0.5 - 1) / 2) % 1
        self._even = ((items % 10 + positions) / 10).float().to(device)

    def _draw(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        if shape:
            return super()._draw(draw, shape)
        return torch.special.ndtri(self._even) if draw is torch.randn else self._even
