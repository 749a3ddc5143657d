"""Sampling with DDPM's noise prediction (arXiv 2006.11239) and the learned variance of improved DDPM (arXiv 2102.09672).

DiT's published weights (arXiv 2212.09748) require this diffusion. It has no training loss, so train with edm/ or sit/.

Shapes: B is the batch size. Latents have C channels, height H and width W. The timestep t is an integer from 0 (least noise) to
999. The network receives t without scaling.

    x_t = sqrt(alpha_bar_t) x + sqrt(1 - alpha_bar_t) eps        alpha_bar_t = product of 1 - beta_s for s = 0 .. t
    D_x = E[x | x_t] = (x_t - sqrt(1 - alpha_bar_t) eps_hat) / sqrt(alpha_bar_t)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from common.levels import level_of_each
from common.randomness import SampleRandom
from common.roles import SameLatents
from common.types import Steps, settings_dataclass

NUM_TIMESTEPS, BETA_FIRST, BETA_LAST = 1000, 1e-4, 0.02  # from arXiv 2006.11239, section 4; DiT uses the same values


@functools.cache
def alpha_bars() -> np.ndarray:
    """Return alpha_bar_t for the linear schedule as a float64 array of shape [1000] (arXiv 2006.11239, Eq. 4)."""
    return np.cumprod(1 - np.linspace(BETA_FIRST, BETA_LAST, NUM_TIMESTEPS))


@settings_dataclass
class AncestralSampler:
    """A sampler for the reverse chain from x_999 to x_0. It visits all timesteps or a subset.

    Attributes:
        num_steps: Number of evenly spaced timesteps to visit, from 0 to 999. The sampler calls the denoiser once per timestep.
        solver: `ancestral` samples from p(x_prev | x_t). `ddim` is deterministic (arXiv 2010.02502, Eq. 12 with sigma = 0).
    """

    num_steps: Annotated[Steps, Field(le=NUM_TIMESTEPS)] = 250
    solver: Literal["ancestral", "ddim"] = "ancestral"

    def timesteps(self) -> list[int]:
        """Return the timesteps to visit in ascending order: 0, 999 / (num_steps - 1), ..., rounded as in improved DDPM's code."""
        stride = (NUM_TIMESTEPS - 1) / max(self.num_steps - 1, 1)
        # Use a running sum like improved DDPM's code, because products could round a timestep that ends in .5 differently.
        return [round(t) for t in itertools.accumulate([stride] * (self.num_steps - 1), initial=0.0)]

    def evaluated_levels(self) -> list[float]:
        """Return the timesteps at which the sampler calls the denoiser, in descending order."""
        return [float(t) for t in reversed(self.timesteps())]

    @torch.no_grad()
    def __call__(self, denoiser: Callable[..., Tensor], noise: Tensor, y: Tensor, random: SampleRandom | None = None) -> Tensor:
        """Generate latents, starting from noise at the highest timestep.

        Between two visited timesteps, beta = 1 - alpha_bar / alpha_bar_prev (arXiv 2102.09672, section 4). With a learned v, the
        variance of a step is exp(v log(beta) + (1 - v) log(beta_tilde)) (Eq. 15). Without v, the variance is beta.

        Other arguments and the result are the same as for `edm.sampler.HeunSampler`, with t in place of sigma.

        Args:
            denoiser: Function (x, t, y) that returns D_x, or D_x and v concatenated along the channels, like `DDPM.denoise`.
            random: Source of the noise that ancestral steps add. DDIM ignores this argument.
        """
        dtype = torch.float32 if noise.device.type == "mps" else torch.float64  # MPS does not support float64
        timesteps, C = self.timesteps(), noise.shape[1]
        visited_alpha_bars = [1.0, *(float(alpha_bars()[t]) for t in timesteps)]
        log_variances = log_variance_bounds(visited_alpha_bars)
        x = noise.to(dtype)
        for i in reversed(range(self.num_steps)):
            out = denoiser(x.float(), float(timesteps[i]), y).to(dtype)
            D_x, v = out[:, :C], out[:, C:]
            alpha_bar_prev, alpha_bar = visited_alpha_bars[i], visited_alpha_bars[i + 1]
            if self.solver == "ddim":
                eps = (x - math.sqrt(alpha_bar) * D_x) / math.sqrt(1 - alpha_bar)
                x = math.sqrt(alpha_bar_prev) * D_x + math.sqrt(1 - alpha_bar_prev) * eps
                continue
            # Compute the posterior mean (arXiv 2006.11239, Eq. 7).
            alpha = alpha_bar / alpha_bar_prev
            x = math.sqrt(alpha_bar_prev) * (1 - alpha) * D_x + math.sqrt(alpha) * (1 - alpha_bar_prev) * x
            x = x / (1 - alpha_bar)
            if i > 0:
                low, high = log_variances[i]
                log_variance = low + v * (high - low) if v.shape[1] else torch.tensor(high, dtype=dtype)
                x = x + (log_variance / 2).exp() * random.randn(*x.shape[1:]).to(dtype)
        return x.float()


def log_variance_bounds(alpha_bars: list[float]) -> list[tuple[float, float]]:
    """Compute log(beta_tilde) and log(beta) for each step. beta_tilde is the posterior variance (arXiv 2006.11239, Eq. 7).

    `alpha_bars` starts with 1 for the clean latents, followed by the values of the visited timesteps in ascending order. The last
    sampling step has a posterior variance of 0, so its log variance is clipped to that of the previous step (arXiv 2102.09672).
    """
    pairs = list(itertools.pairwise(alpha_bars))
    betas = [1 - alpha_bar / previous for previous, alpha_bar in pairs]
    posterior = [beta * (1 - previous) / (1 - alpha_bar) for beta, (previous, alpha_bar) in zip(betas, pairs)]
    posterior[0] = posterior[min(1, len(posterior) - 1)] or betas[0]
    return [(math.log(low), math.log(high)) for low, high in zip(posterior, betas)]


@settings_dataclass
class DDPM:
    """DDPM's denoiser, with the interface of `edm.EDM` but without a loss. It calls net(x_t, t, y, **kwargs)."""

    name: SameLatents[Literal["ddpm"]] = "ddpm"  # selected by diffusion=ddpm
    Sampler: ClassVar[type] = AncestralSampler

    def denoise(self, net: Callable[..., Tensor], x: Tensor, t: Tensor | float, y: Tensor, **net_kwargs) -> Tensor:
        """Compute D_x from the predicted noise (arXiv 2006.11239, Eq. 15). If the network learned a variance, also return v.

        Args:
            x: Noisy latents x_t, (B, C, H, W) float32.
            t: Timesteps, (B,) float32, with integer values from 0 to 999, or one timestep for all samples.
            y: Class labels, (B,) int64.

        Returns:
            Estimate of the clean latents, (B, C, H, W) float32. For a network with 2C output channels, the result is
            (B, 2C, H, W). Its second half is v in [0, 1], where v = 0 gives the posterior variance and v = 1 gives beta
            (arXiv 2102.09672, Eq. 15). The published networks predict 2v - 1. Other output shapes raise a ValueError.
        """
        t = level_of_each(t, x)
        out = net(x, t, y, **net_kwargs).float()
        B, C, H, W = x.shape
        if out.shape not in ((B, C, H, W), (B, 2 * C, H, W)):  # other shapes could broadcast silently
            raise ValueError(f"the network returns {tuple(out.shape)} for latents {tuple(x.shape)}")
        # Compute the square roots in float64, because 1 - alpha_bar is small at the first timesteps.
        roots = torch.from_numpy(np.sqrt([1 - alpha_bars(), alpha_bars()])).float().to(x.device)  # (2, 1000)
        noise_scale, data_scale = roots[:, t.long()].reshape(2, B, 1, 1, 1)
        D_x = (x - noise_scale * out[:, :C]) / data_scale
        return torch.cat([D_x, (out[:, C:] + 1) / 2], dim=1)
