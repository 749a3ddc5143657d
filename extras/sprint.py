"""SPRINT (arXiv 2510.21986), TREAD's successor: a route's output is fused with its input.

It provides model=sprint, model=lightningdit_sprint and model.selection=grid. Its guidance is `guidance.path_drop`.

Shapes: B batch, N tokens, K kept tokens, D width.
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
from routing_module import SelectionRule, TokenRouter


def grid_rule(rows: int, columns: int) -> SelectionRule:
    """Make a rule that keeps the same number of random tokens in each 2x2 group: three, two or one of four.

    For ratios other than 1/4, 1/2 and 3/4, the counts of two groups differ by at most one. `attach` also takes the rule:
    `selection=grid_rule(32, 48)`.

    Args:
        rows, columns: size of every image's grid of tokens, row-major. Raises ValueError for an odd number.
    """
    if rows % 2 or columns % 2:
        raise ValueError(f"selection=grid needs even numbers of rows and columns of tokens, not {rows} x {columns}")
    return partial(_grid_scores, grid=(rows // 2, 2, columns // 2, 2))


def _grid_scores(x: Tensor, uniform: Tensor, grid: tuple[int, int, int, int]) -> Tensor:
    if uniform.shape[1] != math.prod(grid):
        raise ValueError(f"a grid of {grid[0] * 2} x {grid[2] * 2} tokens does not fit the image's {uniform.shape[1]}")
    groups = uniform.unflatten(1, grid).transpose(2, 3).flatten(3)  # (B, rows/2, columns/2, 4)
    ranks = groups.argsort(dim=3).argsort(dim=3)  # 0 to 3 in each group: every order is equally likely
    return ranks.unflatten(3, (2, 2)).transpose(2, 3).flatten(1) + uniform  # (B, N)


class Fusion(nn.Module):
    """Every token becomes Linear([before the route, after it]). A learned mask token replaces each token that skipped the route.

    The mask token starts at zero. The network initialises the linear layer like its others.
    """

    def __init__(self, width: int):
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, skipped: Tensor, ids_keep: Tensor | None, inputs: Tensor | None = None) -> Tensor:
        """Args:
            x: (B, K, D), the kept tokens after the route. K may be 0.
            skipped: (B, N, D), all tokens before it.
            ids_keep: (B, K), from `TokenRouter.choose_ids_keep`. None if x holds all tokens, at ratio 0 in evaluation mode.
            inputs: (B,) bool, samples in which the mask token replaces all of x (path-drop).

        Returns:
            (B, N, D).
        """
        masked = self.mask_token.to(skipped.dtype).expand_as(skipped)
        after = x if ids_keep is None else TokenRouter.end_route(x, masked, ids_keep)
        if inputs is not None:
            after = torch.where(inputs[:, None, None], masked, after)
        return self.proj(torch.cat([skipped, after], dim=2)).to(skipped.dtype)  # autocast leaves the residual stream in float32


class FusedRoutes:
    """SPRINT's changes to a network with routes: how a route ends, and path-drop. List it before the network among the bases.

    Args:
        path_drop: probability in training that mask tokens replace the whole output of a sample's routes.

    Raises ValueError for a network without routes.
    """

    route_end = Fusion

    def __init__(self, *, path_drop: float = 0.0, **settings):
        super().__init__(**settings)
        if not self.router.routes:
            raise ValueError("model=sprint needs a route; a dense second stage has one with selection_ratio 0")
        self.path_drop = path_drop

    def forward(self, x: Tensor, t: Tensor, y: Tensor, *, drop_paths: Tensor | None = None, **inputs) -> Tensor:
        """As `DiT.forward`. drop_paths: (B,) bool, samples whose routes output mask tokens only. Training draws it if absent.

        Raises ValueError for drop_paths of another shape.
        """
        if drop_paths is not None and drop_paths.shape != x.shape[:1]:  # a scalar would broadcast
            raise ValueError(f"drop_paths has shape {tuple(drop_paths.shape)}; {len(x)} latents need {(len(x),)}")
        if self.training and drop_paths is None and self.path_drop > 0:
            drop_paths = torch.rand(len(y), device=y.device, generator=inputs.get("generator")) < self.path_drop
        return super().forward(x, t, y, route_inputs=drop_paths, **inputs)

    def draw_inputs(self, random: Callable[[str], SampleRandom]) -> dict[str, Tensor]:
        draws = super().draw_inputs(random)
        return draws | ({"drop_paths": random("paths").rand() < self.path_drop} if self.path_drop > 0 else {})


class SPRINT(FusedRoutes, dit.DiT):
    """DiT with SPRINT's routes."""


class LightningSPRINT(FusedRoutes, lightningdit.LightningDiT):
    """LightningDiT with SPRINT's routes."""


BACKBONES = dit.BACKBONES | lightningdit.BACKBONES


def build(backbone: str, **settings) -> FusedRoutes:
    """Build a network by name, such as `DiT-B/2`. Keyword arguments go to the network and override the sizes of the name."""
    network = SPRINT if backbone in dit.BACKBONES else LightningSPRINT
    return network(**dit.look_up_sizes(backbone, BACKBONES) | settings)
