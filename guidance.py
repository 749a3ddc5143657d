"""Guidance: from a network's estimates to the denoiser that a sampler calls, (x, level, y) -> D_x.

Guidance combines denoised estimates, so it works for every diffusion. Settings are checked when a denoiser is built.
Shapes: x is (B, C, H, W). level is (B,), the noise level (sigma for EDM, t for SiT), the same in every row. y is (B,) int64
labels, of which num_classes is the null class. There are R routes and N tokens.

`bounds` are level_lo and level_hi: guidance evaluates its second branch only at noise levels in (level_lo, level_hi]
(arXiv 2404.07724), and returns the first branch elsewhere. None, the default, means no bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from routing_module import num_kept_tokens

Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class GuidanceInputs:
    """The inputs of guidance for one batch of images.

    Attributes:
        denoise: (x, level, y, *, selection_ratios=None, route_scores=None) -> D_x. With selection_ratios, that fraction of the
            tokens skips the network's routes, chosen by route_scores (B, R, N).
        num_classes: the null class.
        routes_shape: (R, N).
        route_scores: () -> (B, R, N) new uniform numbers. Row i depends only on image i's seed and on how many calls came before.
        weak: the second network of autoguidance.
    """

    denoise: Callable[..., Tensor]
    num_classes: int
    routes_shape: tuple[int, int] = (0, 0)
    route_scores: Callable[[], Tensor] | None = None
    weak: Denoiser | None = None


Guidance = Callable[[GuidanceInputs], Denoiser]


def none(inputs: GuidanceInputs) -> Denoiser:
    """No guidance: returns the conditional estimate."""
    return inputs.denoise


def cfg(inputs: GuidanceInputs, *, cfg_scale: float, channels: int | None = None, **bounds: float | None) -> Denoiser:
    """Classifier-free guidance (arXiv 2207.12598): D = D_null + cfg_scale * (D_label - D_null). With bounds, `interval`.

    Args:
        cfg_scale: 1 is off (one evaluation a step), 0 is unconditional, above 1 guides. Both estimates come from one
            batched evaluation.
        channels: guide only the first `channels` channels of the latents, and take the others from D_label. None guides all.
            The published code of DiT, SiT and LightningDiT guides three.
    """

    def label_and_null(x: Tensor, level: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        null = torch.full_like(y, inputs.num_classes)
        return inputs.denoise(torch.cat([x, x]), torch.cat([level, level]), torch.cat([y, null])).chunk(2)

    return _guide(label_and_null, inputs.denoise, cfg_scale, channels=channels, **bounds)


def path_drop(inputs: GuidanceInputs, *, cfg_scale: float, **bounds: float | None) -> Denoiser:
    """Path-drop guidance (SPRINT, arXiv 2510.21986): `cfg`, whose null estimate also skips all blocks of the fused routes."""

    def label_and_weak(x: Tensor, level: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        null = torch.full_like(y, inputs.num_classes)
        return inputs.denoise(x, level, y), inputs.denoise(x, level, null, selection_ratios=1.0)

    return _guide(label_and_weak, inputs.denoise, cfg_scale, **bounds)


def sparse(inputs: GuidanceInputs, *, w: float, r_strong: float, r_weak: float, **bounds: float | None) -> Denoiser:
    """Sparse guidance (arXiv 2601.01608): D = D_weak + w * (D_strong - D_weak), both with the class label.

    Both branches use the same network. In the weak branch, more tokens skip its routes. Every evaluation draws new tokens. With
    uniform selection, the strong branch keeps every token that the weak branch keeps.

    Args:
        w: 1 is off: the strong branch alone, which for r_strong = 0 is the dense network.
        r_strong, r_weak: fractions of the tokens that SKIP, 0 <= r_strong < r_weak <= 1. 0 is dense.

    Raises ValueError for a network without routes, and if the weak branch would not keep fewer tokens than the strong one.
    """
    num_routes, N = inputs.routes_shape
    if num_routes == 0:
        raise ValueError("guidance=sparse needs a network with routes; use guidance=cfg, or give the network routes")
    if num_kept_tokens(N, r_weak) >= num_kept_tokens(N, r_strong):
        raise ValueError(f"r_weak={r_weak} must leave fewer of the {N} tokens than r_strong={r_strong}")

    def branches(ratios: tuple[float, ...], *batch: Tensor) -> list[Tensor]:
        route_scores = inputs.route_scores() if any(ratios) else None
        routings = ({"selection_ratios": ratio, "route_scores": route_scores} if ratio > 0 else {} for ratio in ratios)
        return [inputs.denoise(*batch, **routing) for routing in routings]

    return _guide(partial(branches, (r_strong, r_weak)), lambda *batch: branches((r_strong,), *batch)[0], w, **bounds)


def autoguidance(inputs: GuidanceInputs, *, w: float, **bounds: float | None) -> Denoiser:
    """Autoguidance (arXiv 2406.02507): D = D_weak + w * (D - D_weak), where a smaller or less trained network gives D_weak.

    w = 1 is off. Raises ValueError if there is no second network.
    """
    if inputs.weak is None:
        raise ValueError("guidance=autoguidance needs a second network: guidance.checkpoint=<folder of a checkpoint or of a run>")

    def own_and_weak(x: Tensor, level: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return inputs.denoise(x, level, y), inputs.weak(x, level, y)

    return _guide(own_and_weak, inputs.denoise, w, **bounds)


def _guide(
    estimates: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]],
    unguided: Denoiser,
    scale: float,
    level_lo: float | None = None,
    level_hi: float | None = None,
    channels: int | None = None,
) -> Denoiser:
    """Compute D_weak + scale * (D - D_weak) from the `estimates` (D, D_weak). For scale 1 and outside the bounds: `unguided`.

    With `channels`, D alone gives the other channels. Raises ValueError if level_lo is not below level_hi.
    """
    low, high = -math.inf if level_lo is None else level_lo, math.inf if level_hi is None else level_hi
    if low >= high:
        raise ValueError(f"level_lo={level_lo} must be below level_hi={level_hi}: guidance is on between them")
    if scale == 1:
        return unguided

    def denoiser(x: Tensor, level: Tensor, y: Tensor) -> Tensor:
        if (low, high) != (-math.inf, math.inf):
            # Compare in the precision of `level`: a bound may equal one of the sampler's noise levels.
            inside = (level > low) & (level <= high)
            some, every = torch.stack([inside.any(), inside.all()]).tolist()  # waits for the device
            if some and not every:
                raise ValueError("a batch has noise levels inside and outside (level_lo, level_hi]; use one level per batch")
            if not some:
                return unguided(x, level, y)
        D, D_weak = estimates(x, level, y)
        C = x.shape[1] if channels is None else channels
        guided = D_weak[:, :C] + scale * (D[:, :C] - D_weak[:, :C])
        return torch.cat([guided, D[:, C:]], dim=1)  # D may have more channels: the learned variance (`ddpm.DDPM.denoise`)

    return denoiser


GUIDANCES = {"none": none, "cfg": cfg, "interval": cfg, "path_drop": path_drop, "sparse": sparse, "autoguidance": autoguidance}
