"""SPRINT (arXiv 2510.21986), TREAD's successor: what comes out of a route is fused with what went in.

`model.selection=grid` and `model.fusion=concat`, for DiT and LightningDiT; its guidance is `guidance.path_drop`.

Shapes: B batch, N tokens, K kept tokens, D width.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from routing_module import SelectionRule, TokenRouter


def grid_rule(rows: int, columns: int) -> SelectionRule:
    """Of each 2x2 group of neighbours, equally many tokens stay, drawn group by group: three, two or one of four.

    Ratios between 1/4, 1/2 and 3/4 leave as equal numbers as K allows. For `attach` too: `selection=grid_rule(32, 48)`.

    Args:
        rows, columns: of the image's tokens, which are row-major. Raises ValueError for an odd number.
    """
    if rows % 2 or columns % 2:
        raise ValueError(f"selection=grid needs even numbers of rows and columns of tokens, not {rows} x {columns}")
    return partial(_grid_scores, grid=(rows // 2, 2, columns // 2, 2))


def _grid_scores(x: Tensor, uniform: Tensor, grid: tuple[int, int, int, int]) -> Tensor:
    groups = uniform.unflatten(1, grid).transpose(2, 3).flatten(3)  # (B, rows/2, columns/2, 4)
    ranks = groups.argsort(dim=3).argsort(dim=3)  # 0 to 3 in each group: every order is equally likely
    return ranks.unflatten(3, (2, 2)).transpose(2, 3).flatten(1) + uniform  # (B, N)


class Fusion(nn.Module):
    """Every token becomes Linear([before the route, after it]); one learned mask token stands for those that skipped.

    The mask token starts at zero. The network's initialisation sets the linear layer, as all of them.
    """

    def __init__(self, width: int):
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.proj = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, skipped: Tensor, ids_keep: Tensor, drop: Tensor | None = None) -> Tensor:
        """Args:
            x: (B, K, D), the kept tokens after the route; K may be 0.
            skipped: (B, N, D), all tokens before it.
            ids_keep: (B, K), of `TokenRouter.choose_ids_keep`.
            drop: (B,) bool, samples for which the mask token replaces all of x (path-drop); None: none.

        Returns:
            (B, N, D).
        """
        masked = self.mask_token.to(skipped.dtype).expand_as(skipped)
        after = TokenRouter.end_route(x, masked, ids_keep)
        if drop is not None:
            after = torch.where(drop[:, None, None], masked, after)
        return self.proj(torch.cat([skipped, after], dim=2)).to(skipped.dtype)  # autocast leaves the residual stream in float32
