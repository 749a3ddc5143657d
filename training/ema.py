"""Exponential moving average of the weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from checkpoints.run import RunFolder
from training.sharding import distribute_like, full_tensor, local_shard


class EMA:
    """A float32 copy of the network, in evaluation mode, whose weights are averages of the trained weights.

    After step s (counted from 0): ema += (1 - d) * (weights - ema), d = min(decay, (1 + s) / (10 + s)). The warm-up lets
    short runs forget their random start; with decay 0.9999 it is over after 90,000 steps.

    Attributes:
        net: the copy. After `shard_like` it has values only inside `full_weights`.
        averages: the averages by parameter name. `shard_like` shards them.
        num_updates_before: the number of updates in the run that gave the initial weights. s counts them, too.
    """

    def __init__(self, net: nn.Module, decay: float):
        self.decay = decay
        self.num_updates_before = 0
        self.net = copy.deepcopy(net).float().eval().requires_grad_(False)
        self._is_sharded = False
        self._follow(net, dict(self.net.named_parameters()))

    def shard_like(self, net: nn.Module) -> None:
        """Shard the averages like the weights of `net`. Call it before the first update, while both are equal."""
        self._is_sharded = True
        self.net.to("meta")
        self._follow(net, {name: p.detach().clone() for name, p in net.named_parameters()})

    def _follow(self, net: nn.Module, averages: dict[str, Tensor]) -> None:
        self.averages = averages
        # Parameters that are not trained (the positions) are equal in both.
        self._pairs = {name: (averages[name], p) for name, p in net.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages after step `step`, counted from 0. Call it once per step, in order; it does not check this.

        Sharded averages need no communication. Buffers (the statistics of a BatchNorm) are not averaged.
        """
        num_updates = self.num_updates_before + step
        decay = min(self.decay, (1 + num_updates) / (10 + num_updates))
        averages, weights = ([local_shard(tensor) for tensor in side] for side in zip(*self._pairs.values()))
        torch._foreach_lerp_(averages, weights, 1 - decay)

    def hooks(self, run: RunFolder, every: int) -> list:
        """Hooks that store more of the EMA than checkpoints do, after every `every` steps."""
        return []

    def states(self) -> dict[str, dict[str, Tensor]]:
        """The tensors for a checkpoint, by the name of the file."""
        return {"ema": self.averages}

    @torch.no_grad()
    def load(self, stored: dict[str, dict[str, Tensor]]) -> None:
        """Load states of a checkpoint: full tensors of the same shapes. Averages without a stored tensor keep their values."""
        for file, averages in stored.items():
            for name, own in self.states()[file].items():
                if name in averages:
                    local_shard(own).copy_(local_shard(distribute_like(averages[name], own)))

    @contextlib.contextmanager
    def full_weights(self) -> Iterator[None]:
        """Inside the context, `net` holds full weights. Every process must enter it.

        If the averages are sharded, every process holds all weights in float32 until the exit (DiT-XL/2: 2.5 GiB); there are
        no activations or gradients at that time. Otherwise this does nothing.
        """
        if not self._is_sharded:
            yield
            return
        self.net.to_empty(device=local_shard(next(iter(self.averages.values()))).device)
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                p.copy_(full_tensor(self.averages[name]))
        try:
            yield
        finally:
            self.net.to("meta")
