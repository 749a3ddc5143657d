"""Samplers of the linear path (SiT, arXiv 2401.08740, sections 2.2 and 2.4): Euler and Heun along the probability-flow ODE,
Euler-Maruyama along the reverse SDE. t goes from 1 (noise) down to 0 (data).

The samplers need only D_x = E[x | x_t] from the model. Guidance combines denoised estimates, so it works as for EDM:

    E[eps | x_t] = (x_t - (1 - t) D_x) / t        v = (x_t - D_x) / t        score = -E[eps | x_t] / t
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from common.randomness import SampleRandom
from common.types import Positive, Steps, settings


@settings
class FlowSampler:
    """ODE: dx/dt = v. SDE, backwards in t: dx = (v - w/2 score) dt + sqrt(w) dW, with the same marginals for every w(t) >= 0.

    Attributes:
        num_steps: steps in t. The denoiser is called num_steps times, or 2 * num_steps - 1 times for heun, whose last step
            is an Euler step.
        solver: `euler` or `heun` (ODE, deterministic), or `euler_maruyama` (SDE).
        timestep_shift: s in t' = t / (s + (1 - s) t), applied to the evenly spaced t of the ODE's steps. 1 changes nothing. Below
            1, more steps are at high noise. LightningDiT uses this s. SD3's shift (arXiv 2403.03206, section 5.3.2) is 1 / s.

    For the SDE only:
        last_step_size: the t at which the last step starts. That step adds no noise. The other steps divide the rest evenly.
            w(t) = 2 t, as for the published samples.
    """

    num_steps: Steps = 40
    solver: Literal["euler", "heun", "euler_maruyama"] = "heun"
    timestep_shift: Positive = 1.0
    last_step_size: Annotated[Positive, Field(lt=1)] = 0.04

    def __post_init__(self):
        if self.solver == "euler_maruyama" and self.timestep_shift != 1:
            raise ValueError(f"timestep_shift={self.timestep_shift:g} moves the steps of the ODE; euler_maruyama needs 1")

    def noise_levels(self) -> list[float]:
        """Return the num_steps values of t at which steps begin, from 1 downwards, then 0."""
        if self.solver != "euler_maruyama":
            even = [1 - i / self.num_steps for i in range(self.num_steps)] + [0.0]
            return [t / (1 - (1 - self.timestep_shift) * (1 - t)) for t in even]  # s = 1 gives t exactly
        last = max(self.num_steps - 1, 1)
        return [1 - i / last * (1 - self.last_step_size) for i in range(self.num_steps)] + [0.0]

    def evaluated_levels(self) -> list[float]:
        """Return the values of t at which the denoiser is called, from 1 downwards."""
        return self.noise_levels()[:-1]

    @torch.no_grad()
    def __call__(self, denoiser: Callable[..., Tensor], noise: Tensor, y: Tensor, random: SampleRandom | None = None) -> Tensor:
        """Solve from t = 1 to 0. Arguments and result as for `edm.sampler.HeunSampler`, with t in place of sigma.

        `random` is the source of the noise of the SDE. The ODE needs none.
        """
        dtype = torch.float32 if noise.device.type == "mps" else torch.float64  # MPS has no float64

        def denoised(x: Tensor, t: float) -> Tensor:
            ts = torch.full((len(x),), t, dtype=torch.float32, device=x.device)
            return denoiser(x.float(), ts, y).to(dtype)

        x = noise.to(dtype)
        for t_cur, t_next in pairwise(self.noise_levels()):
            D_x = denoised(x, t_cur)
            if self.solver == "euler_maruyama":
                x = self._sde_step(x, D_x, t_cur, t_next, random)
            elif self.solver == "euler":
                x = x + (t_next - t_cur) * (x - D_x) / t_cur
            else:
                v_cur = (x - D_x) / t_cur
                x_next = x + (t_next - t_cur) * v_cur
                if t_next > 0:  # v = (x - D_x) / t is undefined at t = 0
                    v_next = (x_next - denoised(x_next, t_next)) / t_next
                    x_next = x + (t_next - t_cur) * (v_cur + v_next) / 2
                x = x_next
        return x.float()

    def _sde_step(self, x: Tensor, D_x: Tensor, t_cur: float, t_next: float, random: SampleRandom) -> Tensor:
        """Euler-Maruyama, with w(t) / 2 = t."""
        step = t_cur - t_next
        score = -(x - (1 - t_cur) * D_x) / t_cur**2
        mean = x - step * ((x - D_x) / t_cur - t_cur * score)
        if t_next == 0:
            return mean
        return mean + math.sqrt(2 * t_cur * step) * random.randn(*x.shape[1:]).to(x.dtype)
