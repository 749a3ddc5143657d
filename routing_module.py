"""Token routing (TREAD, arXiv 2501.04765): a route carries a random subset of the tokens past a window of transformer blocks.

Shapes: B is the batch size, and D is the width. Each sample has N tokens. The blocks in the window process only
K = N - int(N * selection_ratio) of them, the kept tokens. The others skip the window and return unchanged after it. The functions
operate on tensors with a token axis and do not depend on a particular network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Route:
    """Carries a subset of the tokens past a window of transformer blocks (TREAD, section 3).

    Attributes:
        selection_ratio: Fraction of the tokens that SKIP the window, in [0, 1). At 0, no token skips.
        start_layer_idx: Index of the first block in the window. A negative index counts from the last block, as in Python.
        end_layer_idx: Index of the last block in the window, inclusive. A negative index counts from the last block.
    """

    selection_ratio: float
    start_layer_idx: int
    end_layer_idx: int


# A selection rule maps tokens (B, N, D) and uniform noise (B, N) in [0, 1) to finite scores (B, N). The tokens with the highest
# scores are KEPT, although `selection_ratio` counts the skipped ones. NaN scores would rank highest, and checking for NaN would
# wait for the device.
SelectionRule = Callable[[Tensor, Tensor], Tensor]


def uniform_scores(x: Tensor, noise: Tensor) -> Tensor:
    """Return `noise` as the scores, so that every subset of tokens is equally likely (TREAD, section 3)."""
    return noise


def importance_scores(x: Tensor, noise: Tensor, weight: float = 0.5, *, inverse: bool = False) -> Tensor:
    """Return (1 - weight) * noise + weight * norm in float32, so that tokens with a large L1 norm are kept more often.

    Each sample's norms are scaled to [0, 1], so that the norms have equal influence at every depth. The scores have no gradient.

    Args:
        weight: Weight of the norms. A weight of 0 keeps a uniformly random subset, and 1 keeps the tokens with the largest norms.
        inverse: Whether tokens with a small L1 norm are kept more often instead.
    """
    with torch.no_grad():
        norm = x.detach().abs().sum(dim=-1, dtype=torch.float32)  # (B, N)
        low, high = norm.amin(dim=1, keepdim=True), norm.amax(dim=1, keepdim=True)
        norm = (norm - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)
        if inverse:
            norm = 1 - norm
        return (1 - weight) * noise + weight * norm


class GridRule:
    """Selection rule that keeps equally many random tokens in every 2x2 group of tokens, or as nearly as possible.

    Ratios of 1/4, 1/2 and 3/4 keep three, two and one of the four tokens in a group. For other ratios, the numbers of kept tokens
    in any two groups differ by at most one.

    Args:
        rows, columns: Size of each image's token grid, in row-major order. Raises ValueError if either number is odd.
    """

    def __init__(self, rows: int, columns: int):
        if rows % 2 or columns % 2:
            raise ValueError(f"selection=grid needs even numbers of rows and columns of tokens, not {rows} x {columns}")
        self.grid = (rows // 2, 2, columns // 2, 2)

    def __call__(self, x: Tensor, noise: Tensor) -> Tensor:
        if noise.shape[1] != math.prod(self.grid):
            size = f"{self.grid[0] * 2} x {self.grid[2] * 2}"
            raise ValueError(f"a grid of {size} tokens does not fit the image's {noise.shape[1]}")
        groups = noise.unflatten(1, self.grid).transpose(2, 3).flatten(3)  # (B, rows/2, columns/2, 4)
        ranks = groups.argsort(dim=3).argsort(dim=3)  # ranks 0 to 3 in each group, where all orders are equally likely
        return ranks.unflatten(3, (2, 2)).transpose(2, 3).flatten(1) + noise  # (B, N)


# Selection rules by name, for `attach(selection=...)` and the key `model.selection`. A rule that needs the size of the token grid
# is a class, whose instances are the rules for grids of `rows` x `columns` tokens.
SELECTIONS: dict[str, SelectionRule | type] = {"uniform": uniform_scores, "importance": importance_scores, "grid": GridRule}


def build_rule(selection: str | SelectionRule, grid: tuple[int, int] | None = None) -> SelectionRule:
    """Return the selection rule with a name in `SELECTIONS`, for a `grid` of (rows, columns) tokens, or `selection` itself.

    Raises KeyError for an unknown name, and ValueError if the named rule needs a `grid`.
    """
    if not isinstance(selection, str):
        return selection
    rule = SELECTIONS[selection]
    if not isinstance(rule, type):
        return rule
    if grid is None:
        make = f"routing_module.{rule.__name__}(rows, columns)"
        raise ValueError(f"selection={selection} needs the size of the token grid; use {make}")
    return rule(*grid)


def uniform_noise(*shape: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Call torch.rand. In code that torch.compile traces, it takes no `generator`, even None, with sizes that change."""
    return torch.rand(*shape, device=device, **({} if generator is None else {"generator": generator}))


def num_kept_tokens(num_tokens: int, selection_ratio: float) -> int:
    """Return K = N - int(N * selection_ratio), the number of kept tokens. K is 0 only if the ratio is 1."""
    _check_ratio("selection_ratio", selection_ratio)
    return num_tokens - int(num_tokens * selection_ratio)


def _check_ratio(name: str, ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise ValueError(f"{name}={ratio!r} must be a number in [0, 1]: the fraction of tokens that skip the blocks")


class TokenRouter:
    """Checks the routes of a network against its depth. The methods choose, remove and restore tokens.

    Args:
        routes: Routes in the order of their blocks. The routes must not overlap.
        depth: Number of transformer blocks.

    The constructor raises ValueError for a route that does not fit. The message names the route, the value and what is accepted.
    """

    def __init__(self, routes: Sequence[Route], depth: int):
        self.routes: tuple[Route, ...] = ()  # these routes have non-negative block indices
        for i, route in enumerate(routes):
            _check_ratio(f"routes[{i}].selection_ratio", route.selection_ratio)
            if route.selection_ratio == 1:
                raise ValueError(f"routes[{i}].selection_ratio=1 keeps no token for the blocks: it must be below 1")
            for name in ("start_layer_idx", "end_layer_idx"):
                if not -depth <= (idx := getattr(route, name)) < depth:
                    known = f"{depth} blocks; use {-depth} to {depth - 1}"
                    raise ValueError(f"routes[{i}].{name}={idx} does not exist in a network of {known}")
            start, end = route.start_layer_idx % depth, route.end_layer_idx % depth
            first = self.routes[-1].end_layer_idx + 1 if self.routes else 0
            if end < start:
                raise ValueError(f"routes[{i}] ends with block {end}, before it starts with block {start}")
            if start < first:
                raise ValueError(f"routes[{i}] starts with block {start}, but routes[{i - 1}] ends with block {first - 1}")
            self.routes += (Route(float(route.selection_ratio), start, end),)

    def selection_ratios(self, overrides: float | Sequence[float] | None = None) -> tuple[float, ...]:
        """Return each route's ratio, or `overrides` (one number, or one per route). At ratio 1, all tokens skip the window."""
        if overrides is None:
            return tuple(route.selection_ratio for route in self.routes)
        ratios = [overrides] * len(self.routes) if isinstance(overrides, (int, float)) else list(overrides)
        if len(ratios) != len(self.routes):
            raise ValueError(f"selection_ratios={ratios} must hold one ratio for each of {len(self.routes)} routes")
        for i, ratio in enumerate(ratios):
            _check_ratio(f"selection_ratios[{i}]", ratio)
        return tuple(map(float, ratios))

    @staticmethod
    def choose_ids_keep(
        x: Tensor,
        selection_ratio: float,
        *,
        noise: Tensor | None = None,
        generator: torch.Generator | None = None,
        rule: SelectionRule = uniform_scores,
    ) -> Tensor:
        """Choose which tokens to keep, separately for each sample. The default rule chooses a uniformly random subset.

        Args:
            x: Tokens (B, N, D) before the window.
            selection_ratio: Fraction of the tokens that skip the window.
            noise: Independent uniform noise (B, N) in [0, 1) for the rule. By default, the method draws it from `generator`.
            rule: Selection rule, such as `importance_scores`.

        Returns:
            Positions (B, K) int64 of the kept tokens. The positions ascend, so that `start_route` reads memory in order.

        Raises:
            ValueError: If the ratio is outside [0, 1], or if the noise or the scores have a wrong shape.
        """
        B, N = x.shape[:2]
        if noise is None:
            noise = uniform_noise(B, N, device=x.device, generator=generator)
        elif noise.shape != (B, N):
            raise ValueError(f"noise has shape {tuple(noise.shape)}, the tokens need {(B, N)}")
        return TokenRouter.keep_highest(rule, x, noise, num_kept_tokens(N, selection_ratio))

    @staticmethod
    def keep_highest(rule: SelectionRule, x: Tensor, noise: Tensor, num_kept: int) -> Tensor:
        """Return ascending positions (B, K) int64 of each sample's `num_kept` tokens with the highest scores."""
        scores = rule(x, noise)
        if scores.shape != noise.shape:
            raise ValueError(f"the selection rule returns scores of shape {tuple(scores.shape)} instead of {tuple(noise.shape)}")
        return scores.topk(num_kept, dim=1, sorted=False).indices.sort(dim=1).values

    @staticmethod
    def start_route(x: Tensor, ids_keep: Tensor) -> Tensor:
        """Return the kept tokens (B, K, D), at the positions `ids_keep`. x may also contain positions or masks (B, N, ...)."""
        if len(ids_keep) != len(x):  # gather would silently drop the remaining samples
            raise ValueError(f"ids_keep has shape {tuple(ids_keep.shape)}, but there are {len(x)} samples")
        index = ids_keep.reshape(ids_keep.shape + (1,) * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
        return x.gather(1, index)

    @staticmethod
    def end_route(x: Tensor, x_before: Tensor, ids_keep: Tensor) -> Tensor:
        """Put the kept tokens back at their original positions among the skipped tokens.

        Args:
            x: Kept tokens (B, K, D) after the window.
            x_before: All tokens (B, N, D) before the window. The method does not modify this tensor.
            ids_keep: Positions (B, K) from `choose_ids_keep`.

        Returns:
            All tokens (B, N, D). Skipped tokens are bit-identical to `x_before`. Gradients flow to x and x_before.
        """
        if ids_keep.shape != x.shape[:2] or (len(x), *x.shape[2:]) != (len(x_before), *x_before.shape[2:]):  # x could broadcast
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (x, x_before, ids_keep))
            raise ValueError(f"x, x_before and ids_keep of shapes {shapes} do not belong to one route")
        index = ids_keep.unsqueeze(-1).expand_as(x)
        return x_before.scatter(1, index, x.to(x_before.dtype))  # (B, N, D)
