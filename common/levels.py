"""Noise levels of a batch."""

from __future__ import annotations

import torch
from torch import Tensor


def level_of_each(level: Tensor | float, x: Tensor) -> Tensor:
    """Return the noise level of each sample of x, (B,) float32. In sampling, all samples have the same level, a number."""
    return level if isinstance(level, Tensor) else torch.full((len(x),), level, dtype=torch.float32, device=x.device)
