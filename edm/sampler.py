"""EDM's stochastic second-order sampler (arXiv 2206.00364, Algorithm 2). S_churn = 0 makes it deterministic (Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from common.randomness import SampleRandom
from common.types import NonNegativeFloat, NonNegativeOrInfinite, PositiveFloat, Steps, settings_dataclass


@settings_dataclass
class HeunSampler:
    """Heun's method for the ODE dx/dsigma = (x - D(x; sigma)) / sigma.

    Attributes:
        num_steps: Number of noise levels. The sampler calls the denoiser 2 * num_steps - 1 times.
        sigma_min, sigma_max: Lowest noise level above zero, and initial noise level.
        rho: Exponent of the noise schedule. A larger rho places more noise levels near sigma_min (Eq. 5).
        S_churn: Amount of noise to add over the complete trajectory. If S_churn is 0, the sampler is deterministic.
        S_min, S_max: Range of noise levels at which the sampler adds noise.
        S_noise: Factor by which the sampler scales the added noise.
    """

    num_steps: Steps = 40
    sigma_min: PositiveFloat = 0.002
    sigma_max: PositiveFloat = 80.0
    rho: PositiveFloat = 7.0
    S_churn: NonNegativeFloat = 0.0
    S_min: NonNegativeFloat = 0.0
    S_max: NonNegativeOrInfinite = math.inf
    S_noise: NonNegativeFloat = 1.0

    def __post_init__(self):
        if self.sigma_min >= self.sigma_max:
            raise ValueError(f"sigma_min={self.sigma_min} is not below sigma_max={self.sigma_max}")

    def noise_levels(self) -> list[float]:
        """Return num_steps noise levels from sigma_max to sigma_min, followed by 0 (Eq. 5)."""
        last = max(self.num_steps - 1, 1)
        high, low = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        return [(high + i / last * (low - high)) ** self.rho for i in range(self.num_steps)] + [0.0]

    def sigma_hat(self, sigma: float) -> float:
        """Return sigma * (1 + gamma), the noise level after the sampler adds noise at level sigma (Algorithm 2)."""
        gamma_max = min(self.S_churn / self.num_steps, math.sqrt(2) - 1)
        return sigma * (1 + (gamma_max if self.S_min <= sigma <= self.S_max else 0.0))

    def evaluated_levels(self) -> list[float]:
        """Return the noise levels at which the sampler calls the denoiser, in descending order."""
        levels = self.noise_levels()[:-1]
        return sorted({*levels[1:], *map(self.sigma_hat, levels)}, reverse=True)

    @torch.no_grad()
    def __call__(self, denoiser: Callable[..., Tensor], noise: Tensor, y: Tensor, random: SampleRandom | None = None) -> Tensor:
        """Sample latents by integrating from sigma_max to 0.

        Args:
            denoiser: Function (x, sigma, y) -> D_x, where x is (B, C, H, W) float32, sigma is a number and y is (B,).
            noise: Standard normal noise, (B, C, H, W).
            y: Labels to pass to the denoiser, (B,) int64.
            random: Source of the noise that the sampler adds, required if S_churn > 0.

        Returns:
            Latents, (B, C, H, W) float32. The solver's state is float64 if the device supports it.
        """
        dtype = torch.float32 if noise.device.type == "mps" else torch.float64  # MPS does not support float64
        levels = self.noise_levels()

        def derivative(x: Tensor, sigma: float) -> Tensor:
            return (x - denoiser(x.float(), sigma, y).to(dtype)) / sigma

        x = noise.to(dtype) * levels[0]
        for sigma_cur, sigma_next in pairwise(levels):
            # Add noise to raise the noise level from sigma_cur to sigma_hat.
            sigma_hat = self.sigma_hat(sigma_cur)
            if sigma_hat > sigma_cur:
                added = math.sqrt(sigma_hat**2 - sigma_cur**2) * self.S_noise
                x = x + added * random.randn(*x.shape[1:]).to(dtype)
            # Take an Euler step.
            d_cur = derivative(x, sigma_hat)
            x_next = x + (sigma_next - sigma_hat) * d_cur
            # Apply the second-order correction, except in the last step, because the slope does not exist at sigma = 0.
            if sigma_next > 0:
                d_prime = derivative(x_next, sigma_next)
                x_next = x + (sigma_next - sigma_hat) * (d_cur + d_prime) / 2
            x = x_next
        return x.float()
