"""Guidance: from a denoise function to the denoiser that a sampler calls. Both have the form (x, sigma, y) -> D_x.

Shapes: x (B, C, H, W), sigma (B,), y (B,) int64 labels, of which num_classes is the null class.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]


def none(denoise: Denoiser, num_classes: int) -> Denoiser:
    """No guidance: the conditional estimate itself."""
    return denoise


def cfg(denoise: Denoiser, num_classes: int, *, cfg_scale: float) -> Denoiser:
    """Classifier-free guidance (arXiv 2207.12598): D = D_null + cfg_scale * (D_label - D_null).

    Args:
        cfg_scale: 1 is off (one evaluation a step), 0 is unconditional, above 1 guides. Both estimates come from one
            batched evaluation.
    """
    if cfg_scale == 1:
        return denoise

    def denoiser(x: Tensor, sigma: Tensor, y: Tensor) -> Tensor:
        null = torch.full_like(y, num_classes)
        D_label, D_null = denoise(torch.cat([x, x]), torch.cat([sigma, sigma]), torch.cat([y, null])).chunk(2)
        return D_null + cfg_scale * (D_label - D_null)

    return denoiser


GUIDANCES = {"none": none, "cfg": cfg}
