"""EDM's preconditioning and loss (arXiv 2206.00364, Table 1 and section 5).

Shapes: B is the batch size. Latents have C channels, height H and width W. The noise level sigma has the units of the latents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor

from common.levels import level_of_each
from common.randomness import SampleRandom
from common.roles import SameLatents, SameWeights
from common.types import FiniteFloat, PositiveFloat, settings_dataclass
from edm.sampler import HeunSampler


@settings_dataclass
class EDM:
    """EDM's preconditioning and loss, without parameters. The network can be any callable net(x, c_noise, y, **kwargs).

    Attributes:
        sigma_data: Standard deviation of the latents.
        P_mean, P_std: Mean and standard deviation of ln(sigma), which is normally distributed in training.
        Sampler: Class of the sampler and its settings.
    """

    sigma_data: SameWeights[PositiveFloat] = 0.5
    P_mean: FiniteFloat = -1.2
    P_std: PositiveFloat = 1.2
    name: SameLatents[Literal["edm"]] = "edm"  # selected with diffusion=edm
    Sampler: ClassVar[type] = HeunSampler

    def coefficients(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return c_skip, c_out, c_in and c_noise (Table 1, column "Ours"). Each coefficient has the shape of sigma."""
        total = sigma**2 + self.sigma_data**2
        return self.sigma_data**2 / total, sigma * self.sigma_data / total.sqrt(), 1 / total.sqrt(), sigma.log() / 4

    def denoise(self, net: Callable[..., Tensor], x: Tensor, sigma: Tensor | float, y: Tensor, **net_kwargs) -> Tensor:
        """Compute D_x = c_skip x + c_out F_x(c_in x; c_noise) (Eq. 7).

        Args:
            x: Latents with added noise of standard deviation sigma, (B, C, H, W) float32.
            sigma: Noise levels above 0, (B,) float32, or one number for all samples.
            y: Labels, (B,) int64.

        Returns:
            Estimate of the clean latents, (B, C, H, W) float32. The method drops extra output channels, such as the
            learned variance in published DiT checkpoints, and raises ValueError for any other shape mismatch.
        """
        c_skip, c_out, c_in, c_noise = self.coefficients(level_of_each(sigma, x).reshape(-1, 1, 1, 1))
        F_x = net(c_in * x, c_noise.flatten(), y, **net_kwargs)[:, : x.shape[1]]
        if F_x.shape != x.shape:  # F_x would broadcast
            raise ValueError(f"the network returns {tuple(F_x.shape)} for latents {tuple(x.shape)}")
        return c_skip * x + c_out * F_x.float()

    def draw_levels(self, random: SampleRandom) -> tuple[Tensor, Tensor]:
        """Draw sigma (B,) for training. Return it with its quantiles (B,)."""
        numbers = random.randn()
        return self._sigma(numbers), torch.special.ndtr(numbers)

    def levels_at(self, quantiles: Tensor) -> Tensor:
        """Return sigma (B,) at quantiles (B,) of its distribution in training."""
        return self._sigma(torch.special.ndtri(quantiles))

    def _sigma(self, numbers: Tensor) -> Tensor:
        return (self.P_mean + self.P_std * numbers).exp()

    def loss(
        self, net: Callable[..., Tensor], x: Tensor, y: Tensor, random: SampleRandom, levels: Tensor | None = None, **net_kwargs
    ) -> Tensor:
        """Return the weighted squared error (B,) of the denoised latents, averaged over C, H and W (Eq. 2 and Table 1).

        Args:
            x: Clean latents, (B, C, H, W) float32.
            y: Labels, (B,) int64.
            random: Random number source for B samples, from which the loss draws the noise.
            levels: sigma, (B,) float32. If None, the loss draws it before the noise (`draw_levels`).
        """
        sigma = self.draw_levels(random)[0] if levels is None else levels
        noisy = x + sigma.reshape(-1, 1, 1, 1) * random.randn(*x.shape[1:])
        weight = (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2
        D_x = self.denoise(net, noisy, sigma, y, **net_kwargs)
        return weight * (D_x - x).square().mean(dim=(1, 2, 3))
