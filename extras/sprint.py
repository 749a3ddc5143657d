"""SPRINT (arXiv 2510.21986), TREAD's successor: a route's output is fused with its input.

`model.selection=grid` and `model.fusion=concat`, for DiT and LightningDiT; its guidance is `guidance.path_drop`.

Shapes: B batch, N tokens, K kept tokens, D width.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from routing_module import SelectionRule, TokenRouter


def grid_rule(rows: int, columns: int) -> SelectionRule:
    """A rule by which equally many tokens of each 2x2 group stay, drawn group by group: three, two or one of four.

    At other ratios than 1/4, 1/2 and 3/4, these numbers differ by at most one. `attach` takes it too:
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


def build_fusions(fusion: str, path_drop: float, num_routes: int, width: int) -> nn.ModuleList:
    """A `Fusion` per route for fusion=concat, none for replace. Raises ValueError if the settings contradict each other."""
    number = {"replace": 0, "concat": num_routes}[fusion]
    if number == 0 and fusion == "concat":
        raise ValueError("fusion=concat needs a route; set fusion=replace path_drop=0 for a network without")
    if number == 0 and path_drop > 0:
        raise ValueError(f"path_drop={path_drop} needs fusion=concat; set path_drop=0 for fusion=replace")
    return nn.ModuleList(Fusion(width) for _ in range(number))


class Fusion(nn.Module):
    """Every token becomes Linear([before the route, after it]); a learned mask token replaces the tokens that skipped.

    The mask token starts at zero. The network initialises the linear layer with its others.
    """

    def __init__(self, width: int):
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, skipped: Tensor, ids_keep: Tensor | None, drop: Tensor | None = None) -> Tensor:
        """Args:
            x: (B, K, D), the kept tokens after the route; K may be 0.
            skipped: (B, N, D), all tokens before it.
            ids_keep: (B, K), from `TokenRouter.choose_ids_keep`; None if x holds all tokens.
            drop: (B,) bool, samples for which the mask token replaces all of x (path-drop); None for no sample.

        Returns:
            (B, N, D).
        """
        masked = self.mask_token.to(skipped.dtype).expand_as(skipped)
        after = x if ids_keep is None else TokenRouter.end_route(x, masked, ids_keep)
        if drop is not None:
            after = torch.where(drop[:, None, None], masked, after)
        return self.proj(torch.cat([skipped, after], dim=2)).to(skipped.dtype)  # autocast leaves the residual stream in float32
