"""Samplers for SiT's linear path (arXiv 2401.08740, sections 2.2 and 2.4), along which t decreases from 1 (noise) to 0 (data).

Euler and Heun integrate the probability-flow ODE, and Euler-Maruyama integrates the reverse SDE. Guidance works as for EDM,
because the samplers need only the denoised estimate D_x = E[x | x_t] from the model and derive the other quantities:

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
from common.types import PositiveFloat, Steps, settings_dataclass


@settings_dataclass
class FlowSampler:
    """Sampler for the ODE dx/dt = v, or for the SDE dx = (v - w/2 score) dt + sqrt(w) dW, which runs backwards in t.

    The SDE has the same marginals for every w(t) >= 0. The sampler uses w(t) = 2 t, as in SiT's published samples.

    Attributes:
        num_steps: Number of steps in t. The sampler calls the denoiser num_steps times, or 2 * num_steps - 1 times for `heun`,
            whose last step is an Euler step.
        solver: `euler` and `heun` solve the ODE and are deterministic. `euler_maruyama` solves the SDE.
        timestep_shift: Shift s in t' = t / (s + (1 - s) t), which the ODE solvers apply to evenly spaced t. A shift of 1 has no
            effect, and a smaller shift takes more steps at high noise. LightningDiT defines s in the same way. SD3's shift
            (arXiv 2403.03206, section 5.3.2) is 1 / s.
        last_step_size: Value of t at the start of the SDE's last step, which adds no noise. The earlier steps have equal size.
    """

    num_steps: Steps = 40
    solver: Literal["euler", "heun", "euler_maruyama"] = "heun"
    timestep_shift: PositiveFloat = 1.0
    last_step_size: Annotated[PositiveFloat, Field(lt=1)] = 0.04

    def __post_init__(self):
        if self.solver == "euler_maruyama" and self.timestep_shift != 1:
            raise ValueError(f"timestep_shift={self.timestep_shift:g} moves the steps of the ODE; euler_maruyama needs 1")

    def noise_levels(self) -> list[float]:
        """Return the num_steps values of t at which steps begin, in descending order from 1, followed by 0."""
        if self.solver != "euler_maruyama":
            even = [1 - i / self.num_steps for i in range(self.num_steps)] + [0.0]
            return [t / (1 - (1 - self.timestep_shift) * (1 - t)) for t in even]  # equals t exactly for s = 1
        last = max(self.num_steps - 1, 1)
        return [1 - i / last * (1 - self.last_step_size) for i in range(self.num_steps)] + [0.0]

    def evaluated_levels(self) -> list[float]:
        """Return the values of t at which the sampler calls the denoiser, in descending order from 1."""
        return self.noise_levels()[:-1]

    @torch.no_grad()
    def __call__(self, denoiser: Callable[..., Tensor], noise: Tensor, y: Tensor, random: SampleRandom | None = None) -> Tensor:
        """Sample latents by integrating from t = 1 to 0. The arguments match `edm.sampler.HeunSampler`, with t instead of sigma.

        The SDE solver draws noise from `random`. The ODE solvers do not use `random`.
        """
        dtype = torch.float32 if noise.device.type == "mps" else torch.float64  # MPS does not support float64

        def denoised(x: Tensor, t: float) -> Tensor:
            return denoiser(x.float(), t, y).to(dtype)

        x = noise.to(dtype)
        for t_cur, t_next in pairwise(self.noise_levels()):
            D_x = denoised(x, t_cur)
            if self.solver == "euler_maruyama":
                step = t_cur - t_next
                score = -(x - (1 - t_cur) * D_x) / t_cur**2
                x = x - step * ((x - D_x) / t_cur - t_cur * score)  # w(t) / 2 = t
                if t_next > 0:
                    x = x + math.sqrt(2 * t_cur * step) * random.randn(*x.shape[1:]).to(dtype)
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
