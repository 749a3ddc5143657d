"""SPRINT (arXiv 2510.21986), the successor of TREAD. SPRINT fuses the tokens after each window with those before it.

This module provides model=sprint and model=lightningdit_sprint. For guidance, see `guidance.path_drop`.

Shapes: B = batch size, N = number of tokens, K = number of kept tokens, D = width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import dit
from common.randomness import SampleRandom
from extras import lightningdit
from routing_module import TokenRouter, uniform_noise


class Fusion(dit.RouteEnd):
    """Combine the values of each token before and after a window with a linear layer, Linear([before, after]).

    A learned mask token, initially zero, replaces `after` for skipped tokens. `DiT` initialises the layer like its other layers.
    """

    is_called_at_ratio_0 = True

    def __init__(self, width: int):
        super().__init__(width)
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, x_before: Tensor, ids_keep: Tensor | None, inputs: Tensor | None = None) -> Tensor:
        """Return the combined tokens (B, N, D). See `dit.RouteEnd` for the arguments.

        `inputs`, (B,) bool, is True for each sample in which the mask token replaces all tokens after the window (path-drop).
        """
        masked = self.mask_token.to(x_before.dtype).expand_as(x_before)
        after = x if ids_keep is None else TokenRouter.end_route(x, masked, ids_keep)
        if inputs is not None:
            after = torch.where(inputs[:, None, None], masked, after)
        return self.proj(torch.cat([x_before, after], dim=2)).to(x_before.dtype)  # under autocast, the residual stream is float32


class SPRINT(dit.DiT):
    """DiT with SPRINT's fusion and path-drop.

    Args:
        path_drop: Probability that mask tokens replace all of a sample's tokens after the windows during training.

    Raises ValueError if the network has no routes.
    """

    route_end_class = Fusion

    def __init__(self, *, path_drop: float = 0.0, **kwargs):
        super().__init__(**kwargs)
        if not self.router.routes:
            raise ValueError("model=sprint needs a route; a dense second stage has one with selection_ratio 0")
        self.path_drop = path_drop

    def forward(self, x: Tensor, t: Tensor, y: Tensor, *, drop_paths: Tensor | None = None, **inputs) -> Tensor:
        """Run `DiT.forward`. In training mode, the network draws `drop_paths` if it is None.

        `drop_paths`, (B,) bool, marks samples in which mask tokens replace all tokens after the windows. Raises ValueError if its
        shape is wrong.
        """
        if drop_paths is not None and drop_paths.shape != x.shape[:1]:  # a scalar would broadcast over the batch
            raise ValueError(f"drop_paths has shape {tuple(drop_paths.shape)}; {len(x)} latents need {(len(x),)}")
        if self.training and drop_paths is None and self.path_drop > 0:
            drop_paths = uniform_noise(len(y), device=y.device, generator=inputs.get("generator")) < self.path_drop
        return super().forward(x, t, y, route_inputs=drop_paths, **inputs)

    def draw_inputs(self, random_for: Callable[[str], SampleRandom]) -> dict[str, Tensor]:
        draws = super().draw_inputs(random_for)
        return draws | ({"drop_paths": random_for("paths").rand() < self.path_drop} if self.path_drop > 0 else {})


class LightningSPRINT(SPRINT, lightningdit.LightningDiT):
    """LightningDiT with SPRINT's fusion and path-drop. `super()` in SPRINT's methods means LightningDiT."""


BACKBONES = dit.BACKBONES | lightningdit.BACKBONES


def build(backbone: str, **kwargs) -> SPRINT:
    """Build a network by name, such as `DiT-B/2`. Keyword arguments override the sizes that the name implies."""
    network = SPRINT if backbone in dit.BACKBONES else LightningSPRINT
    return network(**dit.look_up_sizes(backbone, BACKBONES) | kwargs)
