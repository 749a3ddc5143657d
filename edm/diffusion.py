"""Preconditioning and loss of EDM (arXiv 2206.00364, Table 1 and section 5).

Shapes: B is the batch size. Latents have C channels, height H and width W. sigma is the noise level, in the units of the latents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from common.randomness import SampleRandom
from common.types import Number, Positive, settings
from edm.sampler import HeunSampler


@settings
class EDM:
    """EDM's preconditioning, loss and sampler. It has no parameters. A network is any callable net(x, c_noise, y, **kwargs).

    Attributes:
        sigma_data: standard deviation of the latents.
        P_mean, P_std: ln(sigma) ~ N(P_mean, P_std^2) in training.
        sampler: the settings of the Heun sampler.
    """

    sigma_data: Positive = 0.5
    P_mean: Number = -1.2
    P_std: Positive = 1.2
    sampler: HeunSampler = HeunSampler()
    name: Literal["edm"] = "edm"  # diffusion=edm

    def coefficients(self, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return c_skip, c_out, c_in, c_noise (Table 1, column "Ours"), each with sigma's shape."""
        total = sigma**2 + self.sigma_data**2
        return self.sigma_data**2 / total, sigma * self.sigma_data / total.sqrt(), 1 / total.sqrt(), sigma.log() / 4

    def denoise(self, net: Callable[..., Tensor], x: Tensor, sigma: Tensor, y: Tensor, **net_kwargs) -> Tensor:
        """D_x = c_skip x + c_out F_x(c_in x; c_noise) (Eq. 7).

        Args:
            x: (B, C, H, W) float32, latents plus noise of standard deviation sigma.
            sigma: (B,) float32, above 0.
            y: (B,) int64 labels.

        Returns:
            (B, C, H, W) float32, the network's estimate of the clean latents. Extra output channels of the network
            (the learned variance of published DiT checkpoints) are dropped. Any other shape is a ValueError.
        """
        c_skip, c_out, c_in, c_noise = self.coefficients(sigma.reshape(-1, 1, 1, 1))
        F_x = net(c_in * x, c_noise.flatten(), y, **net_kwargs)[:, : x.shape[1]]
        if F_x.shape != x.shape:  # it would broadcast
            raise ValueError(f"the network returns {tuple(F_x.shape)} for latents {tuple(x.shape)}")
        return c_skip * x + c_out * F_x.float()

    def loss(self, net: Callable[..., Tensor], x: Tensor, y: Tensor, random: SampleRandom, **net_kwargs) -> Tensor:
        """(B,) weighted squared error of the denoised latents, averaged over C, H and W (Eq. 2 and Table 1).

        Args:
            x: (B, C, H, W) float32, clean latents.
            y: (B,) int64 labels.
            random: draws first sigma and then the noise for B samples.
        """
        sigma = (self.P_mean + self.P_std * random.randn()).exp()  # (B,)
        noisy = x + sigma.reshape(-1, 1, 1, 1) * random.randn(*x.shape[1:])
        weight = (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2
        D_x = self.denoise(net, noisy, sigma, y, **net_kwargs)
        return weight * (D_x - x).square().mean(dim=(1, 2, 3))
