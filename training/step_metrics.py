"""Metrics of a training step, in addition to its losses and the speed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from training.trainer import Trainer


def grad_norm(trainer: Trainer) -> Tensor:
    """Return the norm of the gradient of all trained parameters before gradient clipping."""
    return torch.nn.utils.get_total_norm([p.grad for p in trainer.parameters.values() if p.grad is not None])


def weight_norm(trainer: Trainer) -> Tensor:
    """Return the norm of all trained parameters at which the gradient was computed."""
    return torch.nn.utils.get_total_norm([p.detach() for p in trainer.parameters.values()])


# Functions by name in metrics.jsonl. `Trainer.train_step` calls them in the last step before a line, after the backward pass and
# before the update. They return a number on the device, [], and must not read it, which would wait for the device.
STEP_METRICS: dict[str, Callable[[Trainer], Tensor]] = {"grad_norm": grad_norm, "weight_norm": weight_norm}
