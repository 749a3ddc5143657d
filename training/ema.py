"""Exponential moving average of the weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from training.sharding import all_parts, local, part_like


class EMA:
    """A float32 copy of the network, in evaluation mode, whose parameters follow those of the network.

    After step s (counted from 0): ema += (1 - d) * (weights - ema), d = min(decay, (1 + s) / (10 + s)). The warm-up lets
    short runs forget their random start; with decay 0.9999 it is over after 90,000 steps.

    Args:
        net: the network, before anything wraps it.
        decay: per step, in [0, 1).

    Attributes:
        net: the copy; after `shard_like` it has values inside `whole` only.
        averages: by the names of the parameters; sharded after `shard_like`.
        num_updates_before: updates that the average had seen before step 0, in the run whose weights this one starts from.
    """

    def __init__(self, net: nn.Module, decay: float):
        self.decay = decay
        self.num_updates_before = 0
        self.net = copy.deepcopy(net).float().eval().requires_grad_(False)
        self._is_sharded = False
        self._follow(net, dict(self.net.named_parameters()))

    def shard_like(self, net: nn.Module) -> None:
        """Keep this process's part alone. Before the first update: the averages of weights are the weights.

        Args:
            net: the network, which `training.sharding.shard` has sharded since.
        """
        self._is_sharded = True
        self.net.to("meta")
        self._follow(net, {name: p.detach().clone() for name, p in net.named_parameters()})

    def _follow(self, net: nn.Module, averages: dict[str, Tensor]) -> None:
        self.averages = averages
        # Fixed parameters (the positions) are equal in both and stay out of it.
        self._pairs = [(averages[name], p) for name, p in net.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After step `step`. Sharded, every process follows its own part: nothing is communicated."""
        age = self.num_updates_before + step
        decay = min(self.decay, (1 + age) / (10 + age))
        averages, parameters = ([local(tensor) for tensor in side] for side in zip(*self._pairs))
        torch._foreach_lerp_(averages, parameters, 1 - decay)

    @torch.no_grad()
    def load(self, averages: dict[str, Tensor]) -> None:
        """Take over the averages of a checkpoint, whole tensors by name."""
        for name, average in self.averages.items():
            local(average).copy_(local(part_like(averages[name], average)))

    @contextlib.contextmanager
    def whole(self, here: bool) -> Iterator[None]:
        """Within it, `net` can be used where `here`. All processes have to enter, to send their parts.

        What it takes: for a sharded average, all weights of the network in float32 on every process with `here` until the
        exit (DiT-XL/2: 2.5 GiB), while no activations or gradients of a step are there. Otherwise nothing.
        """
        if not self._is_sharded:
            yield
            return
        if here:
            self.net.to_empty(device=local(next(iter(self.averages.values()))).device)
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                value = all_parts(self.averages[name])
                if here:
                    p.copy_(value)
        try:
            yield
        finally:
            self.net.to("meta")
