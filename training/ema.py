"""Exponential moving average of the weights."""

from __future__ import annotations

import copy

import torch
from torch import nn


class EMA:
    """A float32 copy of the network, in evaluation mode, whose parameters follow those of the network.

    After step s (counted from 0): ema += (1 - d) * (weights - ema), d = min(decay, (1 + s) / (10 + s)). The warm-up lets
    short runs forget their random start; with decay 0.9999 it is over after 90,000 steps.

    Args:
        net: the network, before anything wraps it.
        decay: per step, in [0, 1).

    Attributes:
        num_updates_before: updates that the average had seen before step 0, in the run whose weights this one starts from.
    """

    def __init__(self, net: nn.Module, decay: float):
        self.decay = decay
        self.num_updates_before = 0
        self.net = copy.deepcopy(net).float().eval().requires_grad_(False)
        # Fixed parameters (the positions) are equal in both and stay out of it.
        pairs = [(a, p) for a, p in zip(self.net.parameters(), net.parameters()) if p.requires_grad]
        self._averages, self._parameters = [list(side) for side in zip(*pairs)]

    @torch.no_grad()
    def update(self, step: int) -> None:
        age = self.num_updates_before + step
        decay = min(self.decay, (1 + age) / (10 + age))
        torch._foreach_lerp_(self._averages, [p.detach() for p in self._parameters], 1 - decay)
