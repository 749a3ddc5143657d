"""Guidance methods. Each method builds the denoiser (x, level, y) -> D_x that a sampler calls, and checks its settings first.

Guidance combines denoised estimates and works with every diffusion. Shapes: x is (B, C, H, W). y is (B,) int64, and num_classes
is the null class. level is the noise level of all B samples, a number (sigma for EDM, t for SiT). The network has R routes and N
tokens.

The `bounds` limit guidance to noise levels in (level_lo, level_hi] (arXiv 2404.07724). At other noise levels, the denoiser
returns the estimate that the guidance starts from, for sparse guidance that of the strong branch. A bound of None, the default,
has no effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from routing_module import num_kept_tokens

Denoiser = Callable[[Tensor, float, Tensor], Tensor]


@dataclass(frozen=True)
class GuidanceInputs:
    """Inputs of a guidance method for one batch of images.

    Attributes:
        denoise: Function (x, level, y, *, selection_ratios=None, route_noise=None) -> D_x. selection_ratios is the fraction of
            tokens that the network's routes carry past blocks, and route_noise (B, R, N) determines which tokens.
        num_classes: Number of classes, which is also the index of the null class.
        route_noise_shape: Number of routes and number of tokens, (R, N).
        draw_route_noise: Function that draws new noise (B, R, N). The noise of image i depends on its seed and on the number
            of earlier calls.
        weak: Denoiser of a second, weaker network, with the arguments of `denoise`.
        weak_route_noise_shape: `route_noise_shape` of the weak network.
        levels: Noise levels at which the sampler calls the denoiser, in descending order. Moving ratios need them.
    """

    denoise: Callable[..., Tensor]
    num_classes: int
    route_noise_shape: tuple[int, int] = (0, 0)
    draw_route_noise: Callable[[], Tensor | None] = lambda: None  # no noise without routes
    weak: Callable[..., Tensor] | None = None
    weak_route_noise_shape: tuple[int, int] = (0, 0)
    levels: Sequence[float] = ()


Guidance = Callable[[GuidanceInputs], Denoiser]


def none(inputs: GuidanceInputs) -> Denoiser:
    """Return the conditional denoiser without guidance."""
    return inputs.denoise


def classifier_free(inputs: GuidanceInputs, *, cfg_scale: float, channels: int | None = None, **bounds: float | None) -> Denoiser:
    """Classifier-free guidance (arXiv 2207.12598): D = D_null + cfg_scale * (D_label - D_null). `interval` is `cfg` with bounds.

    Args:
        cfg_scale: Guidance scale. A scale of 0 gives the unconditional estimate. A scale of 1 disables guidance, so the network
            computes only D_label. At other scales, one batched evaluation computes D_label and D_null.
        channels: Number of leading latent channels to guide. The remaining channels come from D_label. None guides all channels.
            The published code of DiT, SiT and LightningDiT guides three channels.
    """

    def label_and_null(x: Tensor, level: float, y: Tensor) -> tuple[Tensor, ...]:
        null = torch.full_like(y, inputs.num_classes)
        return inputs.denoise(torch.cat([x, x]), level, torch.cat([y, null])).chunk(2)

    return _guide(label_and_null, inputs.denoise, cfg_scale, channels=channels, **bounds)


def path_drop(inputs: GuidanceInputs, *, cfg_scale: float, **bounds: float | None) -> Denoiser:
    """Path-drop guidance (SPRINT, arXiv 2510.21986), which is `cfg` with a null estimate in which all tokens skip the windows."""

    def label_and_weak(x: Tensor, level: float, y: Tensor) -> tuple[Tensor, Tensor]:
        null = torch.full_like(y, inputs.num_classes)
        return inputs.denoise(x, level, y), inputs.denoise(x, level, null, selection_ratios=1.0)

    return _guide(label_and_weak, inputs.denoise, cfg_scale, **bounds)


def sparse(
    inputs: GuidanceInputs,
    *,
    w: float,
    r_strong: float,
    r_weak: float,
    r_strong_last: float | None = None,
    r_weak_last: float | None = None,
    **bounds: float | None,
) -> Denoiser:
    """Sparse guidance (arXiv 2601.01608): D = D_weak + w * (D_strong - D_weak). Both estimates use the class label.

    In each branch, a fraction of the tokens skips the windows of the routes. The weak branch evaluates the weak network, for
    example an earlier checkpoint of the run. Without a weak network, it evaluates the same network, and must keep fewer tokens
    than the strong branch. Every call of the denoiser draws new noise for the selection, which both branches share. With one
    network and uniform selection, the strong branch therefore keeps every token that the weak branch keeps.

    A ratio is constant, or follows half a cosine from its first to its last value over the sampler's noise levels. The noise
    level alone determines the ratio, so that D is a function of x and the noise level, as second-order solvers assume. Heun's
    second evaluation of a step therefore has the ratios of the next step, which begins at the same noise level.

    Args:
        w: Guidance weight. A weight of 1 disables guidance and uses only the strong branch, which is dense if r_strong is 0.
        r_strong, r_weak: Fractions of the tokens that SKIP the windows, in [0, 1). At 0, no tokens skip.
        r_strong_last, r_weak_last: Fractions at the lowest noise level. None keeps a fraction constant.

    Raises ValueError if tokens must skip in a network without routes, if the routes of the two networks have different shapes, or
    if there is one network and the weak branch does not keep fewer tokens than the strong branch.
    """
    num_routes, N = inputs.route_noise_shape
    is_moving = (r_strong_last, r_weak_last) != (None, None)
    levels = list(inputs.levels) if is_moving else [0.0]
    if not levels:
        raise ValueError("r_strong_last and r_weak_last need the noise levels of the sampler")
    strong_ratios = cosine_schedule(r_strong, r_strong_last, len(levels))
    weak_ratios = cosine_schedule(r_weak, r_weak_last, len(levels))
    if num_routes == 0 and (inputs.weak is None or any(strong_ratios)):
        raise ValueError("guidance=sparse needs a network with routes; use guidance=cfg, or give the network routes")
    if inputs.weak is None:
        for strong, weak in zip(strong_ratios, weak_ratios):
            if num_kept_tokens(N, weak) >= num_kept_tokens(N, strong):
                moved = " at each noise level" if is_moving else ""
                raise ValueError(f"r_weak={weak:.4g} must keep fewer of the {N} tokens than r_strong={strong:.4g}{moved}")
    elif any(weak_ratios) and inputs.weak_route_noise_shape != inputs.route_noise_shape:
        both = " and ".join(f"{R} routes for {N} tokens" for R, N in (inputs.weak_route_noise_shape, inputs.route_noise_shape))
        raise ValueError(f"r_weak above 0 needs a weak network with as many routes and tokens as the network, not {both}")

    def ratios_at(level: float) -> tuple[float, float]:
        if not is_moving:
            return r_strong, r_weak
        return tuple(float(np.interp(level, levels[::-1], ratios[::-1])) for ratios in (strong_ratios, weak_ratios))

    def branches(x: Tensor, level: float, y: Tensor, count: int = 2) -> list[Tensor]:
        ratios = ratios_at(level)[:count]
        route_noise = inputs.draw_route_noise() if any(ratios) else None
        networks = inputs.denoise, inputs.weak or inputs.denoise
        return [  # a dense branch gets no noise, because the routes of a second network may have another shape
            network(x, level, y, selection_ratios=ratio, route_noise=route_noise if ratio else None)
            for network, ratio in zip(networks, ratios)
        ]

    return _guide(branches, lambda *batch: branches(*batch, count=1)[0], w, **bounds)


def cosine_schedule(first: float, last: float | None, num_levels: int) -> list[float]:
    """Return num_levels values from `first` to `last` that follow half a cosine, or equal values if `last` is None."""
    if last is None:
        return [first] * num_levels
    parts = [(1 + math.cos(math.pi * i / max(num_levels - 1, 1))) / 2 for i in range(num_levels)]  # from exactly 1 to exactly 0
    return [part * first + (1 - part) * last for part in parts]


def autoguidance(inputs: GuidanceInputs, *, w: float, **bounds: float | None) -> Denoiser:
    """Autoguidance (arXiv 2406.02507): D = D_weak + w * (D - D_weak), where D_weak comes from a smaller or less trained network.

    A weight w of 1 disables guidance. Raises ValueError if there is no weak network.
    """
    if (weak := inputs.weak) is None:
        raise ValueError("guidance=autoguidance needs a second network: guidance.checkpoint=<folder of a checkpoint or of a run>")
    return _guide(lambda *batch: (inputs.denoise(*batch), weak(*batch)), inputs.denoise, w, **bounds)


def is_within(level: float, low: float, high: float) -> bool:
    """Return whether guidance with these bounds is on at a noise level: above `low`, and up to `high`.

    A bound that is meant to equal one of the sampler's noise levels may differ from it in float64. In float32, it is equal.
    """
    with np.errstate(over="ignore"):  # a bound may exceed float32
        return bool(np.float32(low) < np.float32(level) <= np.float32(high))


def _guide(
    estimates: Callable[[Tensor, float, Tensor], tuple[Tensor, ...]],
    unguided: Denoiser,
    scale: float,
    level_lo: float | None = None,
    level_hi: float | None = None,
    channels: int | None = None,
) -> Denoiser:
    """Build a denoiser for D_weak + scale * (D - D_weak), where `estimates` returns (D, D_weak).

    If scale is 1 or the noise level is outside the bounds, the denoiser calls `unguided` instead. If `channels` is set, the
    remaining channels come from D. Raises ValueError if level_lo is not below level_hi.
    """
    low = -math.inf if level_lo is None else level_lo
    high = math.inf if level_hi is None else level_hi
    if low >= high:
        raise ValueError(f"level_lo={level_lo} must be below level_hi={level_hi}: guidance is on between them")
    if scale == 1:
        return unguided

    def denoiser(x: Tensor, level: float, y: Tensor) -> Tensor:
        if not is_within(level, low, high):
            return unguided(x, level, y)
        D, D_weak = estimates(x, level, y)
        C = x.shape[1] if channels is None else channels
        guided = D_weak[:, :C] + scale * (D[:, :C] - D_weak[:, :C])
        return torch.cat([guided, D[:, C:]], dim=1)  # D may also contain the learned variance (`ddpm.DDPM.denoise`)

    return denoiser


GUIDANCES = {
    "none": none,
    "cfg": classifier_free,
    "interval": classifier_free,
    "path_drop": path_drop,
    "sparse": sparse,
    "autoguidance": autoguidance,
}
