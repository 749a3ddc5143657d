"""SPRINT (arXiv 2510.21986), the successor of TREAD. SPRINT fuses the tokens after each window with those before it.

This module provides model=sprint, model=lightningdit_sprint and model.selection=grid. For guidance, see `guidance.path_drop`.

Shapes: B = batch size, N = number of tokens, K = number of kept tokens, D = width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import dit
from common.randomness import SampleRandom
from extras import lightningdit
from routing_module import SelectionRule, TokenRouter, uniform_noise


def grid_rule(rows: int, columns: int) -> SelectionRule:
    """Create a selection rule that keeps equally many random tokens in every 2x2 group of tokens, or as nearly as possible.

    Ratios of 1/4, 1/2 and 3/4 keep three, two and one of the four tokens in a group. For other ratios, the numbers of kept tokens
    in any two groups differ by at most one. `attach` also accepts the rule as `selection=grid_rule(32, 48)`.

    Args:
        rows, columns: Size of each image's token grid, in row-major order. Raises ValueError if either number is odd.
    """
    if rows % 2 or columns % 2:
        raise ValueError(f"selection=grid needs even numbers of rows and columns of tokens, not {rows} x {columns}")
    return partial(_grid_scores, grid=(rows // 2, 2, columns // 2, 2))


def _grid_scores(x: Tensor, noise: Tensor, grid: tuple[int, int, int, int]) -> Tensor:
    if noise.shape[1] != math.prod(grid):
        raise ValueError(f"a grid of {grid[0] * 2} x {grid[2] * 2} tokens does not fit the image's {noise.shape[1]}")
    groups = noise.unflatten(1, grid).transpose(2, 3).flatten(3)  # (B, rows/2, columns/2, 4)
    ranks = groups.argsort(dim=3).argsort(dim=3)  # ranks 0 to 3 in each group, where all orders are equally likely
    return ranks.unflatten(3, (2, 2)).transpose(2, 3).flatten(1) + noise  # (B, N)


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


class FusedRoutes:
    """Mixin that adds SPRINT's fusion and path-drop to a network with routes. It must precede the network in the list of bases.

    Args:
        path_drop: Probability that mask tokens replace all of a sample's tokens after the windows during training.

    Raises ValueError if the network has no routes.
    """

    route_end_class = Fusion

    def __init__(self, *, path_drop: float = 0.0, **settings):
        super().__init__(**settings)
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


class SPRINT(FusedRoutes, dit.DiT):
    """DiT with SPRINT's routes."""


class LightningSPRINT(FusedRoutes, lightningdit.LightningDiT):
    """LightningDiT with SPRINT's routes."""


BACKBONES = dit.BACKBONES | lightningdit.BACKBONES


def build(backbone: str, **settings) -> FusedRoutes:
    """Build a network by name, such as `DiT-B/2`. Keyword arguments override the sizes that the name implies."""
    network = SPRINT if backbone in dit.BACKBONES else LightningSPRINT
    return network(**dit.look_up_sizes(backbone, BACKBONES) | settings)
