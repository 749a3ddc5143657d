"""Exponential moving average (EMA) of the network's weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class EMA:
    """A float32 copy of the network in evaluation mode, whose weights are averages of the trained weights.

    The averages start as copies of the initial weights. After step s, counted from 0, the update is ema += (1 - d) * (weights -
    ema). With `constant`, d is the decay, as in the official code of TREAD, DiT, SiT, REPA and LightningDiT. With `warmup`, d is
    min(decay, (1 + s) / (10 + s)), which helps short runs forget their random initial weights. With a decay of 0.9999, the
    warm-up takes about 90,000 steps.

    Attributes:
        decay, schedule: Decay per step, and `warmup` or `constant`.
        net: The float32 copy of the network.
        averages: Parameters of `net` by name.
        num_updates_before: Number of EMA updates before step 0 of this run, which is above 0 only after init_from. The warm-up
            counts these updates.
    """

    def __init__(self, net: nn.Module, decay: float, schedule: str = "warmup"):
        self.decay, self.schedule = decay, schedule
        self.num_updates_before = 0
        self.net = copy.deepcopy(net).float().eval().requires_grad_(False)
        self.averages = dict(self.net.named_parameters())
        # Untrained parameters, such as the position embeddings, have the same values in both networks.
        self._trained = {name: p for name, p in net.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the averages after training step `step`, counted from 0. Call this method once per step, in order.

        Buffers, such as BatchNorm statistics, are not averaged.
        """
        num_updates = self.num_updates_before + step
        decay = self.decay if self.schedule == "constant" else min(self.decay, (1 + num_updates) / (10 + num_updates))
        torch._foreach_lerp_([self.averages[name] for name in self._trained], [*self._trained.values()], 1 - decay)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the averages that a checkpoint stores, by file and name."""
        return {"ema": self.averages}
