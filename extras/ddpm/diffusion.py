"""DDPM's noise prediction (arXiv 2006.11239) with the learned variance of improved DDPM (arXiv 2102.09672), for sampling.

It is what DiT's published weights were trained with (arXiv 2212.09748). There is no loss: train with edm/ or sit/.

Shapes: B batch, C H W latents. t is one of the timesteps 0 (least noise) to 999, and the network receives t itself:

    x_t = sqrt(alpha_bar_t) x + sqrt(1 - alpha_bar_t) eps        alpha_bar_t = product of 1 - beta_s for s = 0 .. t
    D_x = E[x | x_t] = (x_t - sqrt(1 - alpha_bar_t) eps_hat) / sqrt(alpha_bar_t)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.randomness import SampleRandom
from extras.ddpm.sampler import AncestralSampler, alpha_bars


@dataclass(frozen=True)
class DDPM:
    """Denoiser and sampler, with the interface of `edm.EDM` but without a loss. It owns no parameters: a network is any callable
    net(x_t, t, y, **kwargs).

    Attributes:
        sampler: the settings of the sampler.
    """

    sampler: AncestralSampler = AncestralSampler()

    def denoise(self, net: Callable[..., Tensor], x: Tensor, t: Tensor, y: Tensor, **net_kwargs) -> Tensor:
        """D_x by the predicted noise (arXiv 2006.11239, Eq. 15), and with it the learned variance.

        Args:
            x: (B, C, H, W) float32, x_t.
            t: (B,) float32, whole numbers from 0 to 999.
            y: (B,) int64 labels.

        Returns:
            (B, C, H, W) float32, the network's estimate of the clean latents. Of a network with 2C output channels
            (B, 2C, H, W): then v in [0, 1] as well, where the variance lies between the posterior's and beta's
            (arXiv 2102.09672, Eq. 15). The published networks predict 2v - 1. Any other shape is a ValueError.
        """
        out = net(x, t, y, **net_kwargs).float()
        B, C, H, W = x.shape
        if out.shape not in ((B, C, H, W), (B, 2 * C, H, W)):  # it would broadcast
            raise ValueError(f"the network makes {tuple(out.shape)} of latents {tuple(x.shape)}")
        # Roots in float64: 1 - alpha_bar of the first timesteps is small.
        roots = torch.from_numpy(np.sqrt([1 - alpha_bars(), alpha_bars()])).float().to(x.device)  # (2, 1000)
        noise_scale, data_scale = roots[:, t.long()].reshape(2, B, 1, 1, 1)
        D_x = (x - noise_scale * out[:, :C]) / data_scale
        return torch.cat([D_x, (out[:, C:] + 1) / 2], dim=1)

    @torch.no_grad()
    def sample(self, denoiser: Callable[..., Tensor], noise: Tensor, y: Tensor, random: SampleRandom | None = None) -> Tensor:
        """(B, C, H, W) unit normal noise -> latents. See `AncestralSampler`."""
        return self.sampler(denoiser, noise, y, random)
