"""Exponential moving average of the weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from checkpoints.run import RunFolder


class EMA:
    """A float32 copy of the network, in evaluation mode, whose weights are averages of the trained weights.

    After step s (counted from 0): ema += (1 - d) * (weights - ema), d = min(decay, (1 + s) / (10 + s)). The warm-up lets
    short runs forget their random start; with decay 0.9999 it is over after 90,000 steps.

    Attributes:
        net: the copy.
        averages: its parameters by name.
        num_updates_before: the number of updates in the run that gave the initial weights. s counts them, too.
    """

    def __init__(self, net: nn.Module, decay: float):
        self.decay = decay
        self.num_updates_before = 0
        self.net = copy.deepcopy(net).float().eval().requires_grad_(False)
        self.averages = dict(self.net.named_parameters())
        # Parameters that are not trained (the positions) are equal in both.
        self._trained = {name: p for name, p in net.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages after step `step`, counted from 0. Call it once per step, in order; it does not check this.

        Buffers (the statistics of a BatchNorm) are not averaged.
        """
        num_updates = self.num_updates_before + step
        decay = min(self.decay, (1 + num_updates) / (10 + num_updates))
        torch._foreach_lerp_([self.averages[name] for name in self._trained], [*self._trained.values()], 1 - decay)

    def hooks(self, run: RunFolder, every: int) -> list:
        """Return hooks that store extra EMA data between checkpoints, every `every` steps."""
        return []

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors to save in a checkpoint, by file name."""
        return {"ema": self.averages}

    @torch.no_grad()
    def load(self, stored: dict[str, dict[str, Tensor]]) -> None:
        """Load the states of a checkpoint. Averages that the checkpoint lacks keep their values."""
        for file, averages in stored.items():
            for name, own in self.states()[file].items():
                if name in averages:
                    own.copy_(averages[name])
