"""Linear-path flow matching with velocity prediction (SiT, arXiv 2401.08740, section 2).

Shapes: B is the batch size. Latents have C channels, height H and width W. As in the SiT paper, t is in [0, 1], with the data at
t = 0 and standard normal noise at t = 1. The network receives t itself, not 1000 t.

    x_t = (1 - t) x + t eps        v(x_t, t) = E[eps - x | x_t]        D_x = E[x | x_t] = x_t - t v

The published code of SiT and LightningDiT (arXiv 2501.01423) reverses time (s = 1 - t, data at s = 1) and predicts x - eps. To
use a published network here, define net(x, t, y) = -published(x, 1 - t, y). REPA's code uses the same convention as this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from common.levels import level_of_each
from common.randomness import SampleRandom
from common.roles import SameLatents
from common.types import FiniteFloat, NonNegativeFloat, PositiveFloat, settings_dataclass
from sit.sampler import FlowSampler


@settings_dataclass
class SiT:
    """SiT's path and loss. The interface matches `edm.EDM`. The network can be any callable net(x_t, t, y, **kwargs).

    Attributes:
        timestep: Distribution of t in training. `uniform` draws t from [0, 1), and `logit_normal` draws logit(t) from
            N(logit_mean, logit_std^2) (arXiv 2403.03206, section 3.1).
        logit_mean, logit_std: Mean and standard deviation for `logit_normal`. A higher mean draws high noise levels more often.
        cosine_weight: Weight of the loss term 1 - cos(v, eps - x). A weight of 0 disables the term, and LightningDiT uses 1.
        Sampler: Class of the sampler and its settings.
    """

    timestep: Literal["uniform", "logit_normal"] = "uniform"
    logit_mean: FiniteFloat = 0.0
    logit_std: PositiveFloat = 1.0
    cosine_weight: NonNegativeFloat = 0.0
    name: SameLatents[Literal["sit"]] = "sit"  # selected with diffusion=sit
    Sampler: ClassVar[type] = FlowSampler

    def velocity(self, net: Callable[..., Tensor], x: Tensor, t: Tensor, y: Tensor, **net_kwargs) -> Tensor:
        """Return the network's estimate of v = E[eps - x | x_t], (B, C, H, W) float32.

        The method drops extra output channels, such as the learned variance in published DiT and SiT checkpoints, and raises
        ValueError for any other shape mismatch.
        """
        v = net(x, t, y, **net_kwargs)[:, : x.shape[1]].float()
        if v.shape != x.shape:  # v would broadcast
            raise ValueError(f"the network returns {tuple(v.shape)} for latents {tuple(x.shape)}")
        return v

    def denoise(self, net: Callable[..., Tensor], x: Tensor, t: Tensor | float, y: Tensor, **net_kwargs) -> Tensor:
        """Compute D_x = x_t - t v. See `edm.EDM.denoise` for the arguments. x is x_t, and t is the noise level in [0, 1]."""
        t = level_of_each(t, x)
        return x - t.reshape(-1, 1, 1, 1) * self.velocity(net, x, t, y, **net_kwargs)

    def draw_levels(self, random: SampleRandom) -> tuple[Tensor, Tensor]:
        """Draw t (B,) for training. Return it with its quantiles (B,)."""
        if self.timestep == "uniform":
            t = random.rand()
            return t, t
        numbers = random.randn()
        return self._logit_normal(numbers), torch.special.ndtr(numbers)

    def levels_at(self, quantiles: Tensor) -> Tensor:
        """Return t (B,) at quantiles (B,) of its distribution in training."""
        return quantiles if self.timestep == "uniform" else self._logit_normal(torch.special.ndtri(quantiles))

    def _logit_normal(self, numbers: Tensor) -> Tensor:
        return (self.logit_mean + self.logit_std * numbers).sigmoid()

    def loss(
        self, net: Callable[..., Tensor], x: Tensor, y: Tensor, random: SampleRandom, levels: Tensor | None = None, **net_kwargs
    ) -> Tensor:
        """Return the squared error (B,) of the velocity, averaged over C, H and W (SiT, section 2.1), plus the cosine term.

        The cosine term of LightningDiT (arXiv 2501.01423) and FasterDiT (arXiv 2410.10356) is cosine_weight times the average
        over H and W of 1 - cos(v, eps - x), where each cosine is computed over the C channels.

        See `edm.EDM.loss` for the arguments. The levels are t.
        """
        t = self.draw_levels(random)[0] if levels is None else levels
        eps = random.randn(*x.shape[1:])
        v = self.velocity(net, x + t.reshape(-1, 1, 1, 1) * (eps - x), t, y, **net_kwargs)
        loss = (v - (eps - x)).square().mean(dim=(1, 2, 3))
        if self.cosine_weight:
            loss = loss + self.cosine_weight * (1 - F.cosine_similarity(v, eps - x, dim=1)).mean(dim=(1, 2))
        return loss
