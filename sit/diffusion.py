"""Linear-path flow matching with velocity prediction (SiT, arXiv 2401.08740, section 2).

Shapes: B is the batch size. Latents have C channels, height H and width W. Convention: t is in [0, 1] with the data at t = 0 and
unit noise at t = 1, as in the SiT paper, and the network receives t itself, not 1000 t:

    x_t = (1 - t) x + t eps        v(x_t, t) = E[eps - x | x_t]        D_x = E[x | x_t] = x_t - t v

The published code of SiT and LightningDiT (arXiv 2501.01423) reverses time (s = 1 - t, data at s = 1) and predicts x - eps. To
use its networks here, set net(x, t, y) = -published(x, 1 - t, y). REPA's code uses our convention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from common.randomness import SampleRandom
from common.types import NotNegative, Number, Positive, settings
from sit.sampler import FlowSampler


@settings
class SiT:
    """SiT's path, loss and sampler, with the interface of `edm.EDM`: a network is any callable net(x_t, t, y, **kwargs).

    Attributes:
        timestep: how t is drawn in training: `uniform` in [0, 1), or `logit_normal`, logit(t) ~ N(logit_mean, logit_std^2)
            (arXiv 2403.03206, section 3.1).
        logit_mean, logit_std: see `timestep`. A higher mean trains more at high noise.
        cosine_weight: weight of the term 1 - cos(v, eps - x) in the loss. 0 leaves it out, and LightningDiT uses 1.
        sampler: the settings of the sampler.
    """

    timestep: Literal["uniform", "logit_normal"] = "uniform"
    logit_mean: Number = 0.0
    logit_std: Positive = 1.0
    cosine_weight: NotNegative = 0.0
    sampler: FlowSampler = FlowSampler()
    name: Literal["sit"] = "sit"  # diffusion=sit

    def velocity(self, net: Callable[..., Tensor], x: Tensor, t: Tensor, y: Tensor, **net_kwargs) -> Tensor:
        """(B, C, H, W) float32, the network's estimate of v = E[eps - x | x_t].

        Extra output channels of the network (the learned variance of published DiT and SiT checkpoints) are dropped. Any other
        shape is a ValueError.
        """
        v = net(x, t, y, **net_kwargs)[:, : x.shape[1]].float()
        if v.shape != x.shape:  # it would broadcast
            raise ValueError(f"the network returns {tuple(v.shape)} for latents {tuple(x.shape)}")
        return v

    def denoise(self, net: Callable[..., Tensor], x: Tensor, t: Tensor, y: Tensor, **net_kwargs) -> Tensor:
        """D_x = x_t - t v. Arguments and result as for `edm.EDM.denoise`: x is x_t, and t (B,) in [0, 1] is the noise level."""
        return x - t.reshape(-1, 1, 1, 1) * self.velocity(net, x, t, y, **net_kwargs)

    def loss(self, net: Callable[..., Tensor], x: Tensor, y: Tensor, random: SampleRandom, **net_kwargs) -> Tensor:
        """(B,) squared error of the velocity, averaged over C, H and W (SiT, section 2.1), plus the cosine term.

        The cosine term comes from LightningDiT (arXiv 2501.01423) and FasterDiT (arXiv 2410.10356). It is cosine_weight times
        1 - cos(v, eps - x), with the cosine over the C channels of each position, averaged over H and W.

        Arguments as for `edm.EDM.loss`. `random` draws t, then the noise.
        """
        t = random.rand() if self.timestep == "uniform" else (self.logit_mean + self.logit_std * random.randn()).sigmoid()  # (B,)
        eps = random.randn(*x.shape[1:])
        v = self.velocity(net, x + t.reshape(-1, 1, 1, 1) * (eps - x), t, y, **net_kwargs)
        loss = (v - (eps - x)).square().mean(dim=(1, 2, 3))
        if self.cosine_weight:
            loss = loss + self.cosine_weight * (1 - F.cosine_similarity(v, eps - x, dim=1)).mean(dim=(1, 2))
        return loss
