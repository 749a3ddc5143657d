"""DDPM's noise prediction (arXiv 2006.11239) with the learned variance of improved DDPM (arXiv 2102.09672), for sampling.

DiT's published weights need it (arXiv 2212.09748). There is no loss: train with edm/ or sit/.

Shapes: B is the batch size. Latents have C channels, height H and width W. t is one of the timesteps 0 (least noise) to 999, and
the network receives t itself:

    x_t = sqrt(alpha_bar_t) x + sqrt(1 - alpha_bar_t) eps        alpha_bar_t = product of 1 - beta_s for s = 0 .. t
    D_x = E[x | x_t] = (x_t - sqrt(1 - alpha_bar_t) eps_hat) / sqrt(alpha_bar_t)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from common.randomness import SampleRandom
from common.types import Steps, settings

NUM_TIMESTEPS, BETA_FIRST, BETA_LAST = 1000, 1e-4, 0.02  # arXiv 2006.11239, section 4, and DiT


@functools.cache
def alpha_bars() -> np.ndarray:
    """Return alpha_bar_t of the linear schedule, float64 [1000] (arXiv 2006.11239, Eq. 4)."""
    return np.cumprod(1 - np.linspace(BETA_FIRST, BETA_LAST, NUM_TIMESTEPS))


@settings
class AncestralSampler:
    """Samples along the chain x_999 .. x_0, or along some of its timesteps.

    Attributes:
        num_steps: timesteps to visit, evenly spaced from 0 to 999. Each takes one evaluation of the denoiser.
        solver: `ancestral` draws from p(x_prev | x_t). `ddim` is deterministic (arXiv 2010.02502, Eq. 12 with sigma = 0).
    """

    num_steps: Annotated[Steps, Field(le=NUM_TIMESTEPS)] = 250
    solver: Literal["ancestral", "ddim"] = "ancestral"

    def timesteps(self) -> list[int]:
        """Return the timesteps to visit, lowest first: 0, 999 / (num_steps - 1), ..., rounded as in improved DDPM's code."""
        stride = (NUM_TIMESTEPS - 1) / max(self.num_steps - 1, 1)
        # A running sum, as in that code: products round differently, which could change a timestep that ends in .5.
        return [round(t) for t in itertools.accumulate([stride] * (self.num_steps - 1), initial=0.0)]

    def evaluated_levels(self) -> list[float]:
        """Return the timesteps at which the denoiser is called, highest first."""
        return [float(t) for t in reversed(self.timesteps())]

    @torch.no_grad()
    def __call__(self, denoiser: Callable[..., Tensor], noise: Tensor, y: Tensor, random: SampleRandom | None = None) -> Tensor:
        """Sample from the highest timestep to the latents.

        Between two visited timesteps, beta = 1 - alpha_bar / alpha_bar_prev (arXiv 2102.09672, section 4). The variance of a step
        is exp(v log(beta) + (1 - v) log(beta_tilde)) with the learned v (Eq. 15), or beta if the denoiser learned no variance.

        Arguments and result as for `edm.sampler.HeunSampler`, with t in place of sigma.

        Args:
            denoiser: (x, t, y) -> D_x, or D_x and v along the channels, as `DDPM.denoise` returns them.
            random: gives the noise of ancestral steps. DDIM does not use it.
        """
        dtype = torch.float32 if noise.device.type == "mps" else torch.float64  # MPS has no float64
        timesteps, C = self.timesteps(), noise.shape[1]
        kept = [1.0, *(float(alpha_bars()[t]) for t in timesteps)]
        log_variances = log_variance_bounds(kept)
        x = noise.to(dtype)
        for i in reversed(range(self.num_steps)):
            ts = torch.full((len(x),), float(timesteps[i]), dtype=torch.float32, device=x.device)
            out = denoiser(x.float(), ts, y).to(dtype)
            D_x, v = out[:, :C], out[:, C:]
            alpha_bar_prev, alpha_bar = kept[i], kept[i + 1]
            if self.solver == "ddim":
                eps = (x - math.sqrt(alpha_bar) * D_x) / math.sqrt(1 - alpha_bar)
                x = math.sqrt(alpha_bar_prev) * D_x + math.sqrt(1 - alpha_bar_prev) * eps
                continue
            # The posterior's mean (arXiv 2006.11239, Eq. 7).
            alpha = alpha_bar / alpha_bar_prev
            x = math.sqrt(alpha_bar_prev) * (1 - alpha) * D_x + math.sqrt(alpha) * (1 - alpha_bar_prev) * x
            x = x / (1 - alpha_bar)
            if i > 0:
                low, high = log_variances[i]
                log_variance = low + v * (high - low) if v.shape[1] else torch.tensor(high, dtype=dtype)
                x = x + (log_variance / 2).exp() * random.randn(*x.shape[1:]).to(dtype)
        return x.float()


def log_variance_bounds(alpha_bars: list[float]) -> list[tuple[float, float]]:
    """Compute the logarithms of beta_tilde (the posterior variance, arXiv 2006.11239, Eq. 7) and of beta for each step.

    `alpha_bars` starts with 1 for the clean latents. The values of the visited timesteps follow, lowest first. The posterior's
    variance of the last step is 0. Its logarithm is clipped to that of the step before (arXiv 2102.09672).
    """
    pairs = list(itertools.pairwise(alpha_bars))
    betas = [1 - alpha_bar / previous for previous, alpha_bar in pairs]
    posterior = [beta * (1 - previous) / (1 - alpha_bar) for beta, (previous, alpha_bar) in zip(betas, pairs)]
    posterior[0] = posterior[min(1, len(posterior) - 1)] or betas[0]
    return [(math.log(low), math.log(high)) for low, high in zip(posterior, betas)]


@settings
class DDPM:
    """Denoiser and sampler, with the interface of `edm.EDM` but without a loss. A network is any net(x_t, t, y, **kwargs)."""

    sampler: AncestralSampler = AncestralSampler()
    name: Literal["ddpm"] = "ddpm"  # diffusion=ddpm

    def denoise(self, net: Callable[..., Tensor], x: Tensor, t: Tensor, y: Tensor, **net_kwargs) -> Tensor:
        """Compute D_x from the predicted noise (arXiv 2006.11239, Eq. 15), and the learned variance.

        Args:
            x: (B, C, H, W) float32, x_t.
            t: (B,) float32, whole numbers from 0 to 999.
            y: (B,) int64 labels.

        Returns:
            (B, C, H, W) float32, the network's estimate of the clean latents. A network with 2C output channels gives
            (B, 2C, H, W): the second half is v in [0, 1], where 0 stands for the posterior's variance and 1 for beta
            (arXiv 2102.09672, Eq. 15). The published networks predict 2v - 1. Any other shape is a ValueError.
        """
        out = net(x, t, y, **net_kwargs).float()
        B, C, H, W = x.shape
        if out.shape not in ((B, C, H, W), (B, 2 * C, H, W)):  # another shape could broadcast
            raise ValueError(f"the network returns {tuple(out.shape)} for latents {tuple(x.shape)}")
        # Roots in float64: 1 - alpha_bar of the first timesteps is small.
        roots = torch.from_numpy(np.sqrt([1 - alpha_bars(), alpha_bars()])).float().to(x.device)  # (2, 1000)
        noise_scale, data_scale = roots[:, t.long()].reshape(2, B, 1, 1, 1)
        D_x = (x - noise_scale * out[:, :C]) / data_scale
        return torch.cat([D_x, (out[:, C:] + 1) / 2], dim=1)
