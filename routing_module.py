"""Token routing (TREAD, arXiv 2501.04765): a random subset of the tokens skips a window of transformer blocks.

Shapes: B batch, N tokens, K kept tokens (K = N - int(N * selection_ratio)), D width.
This file works on tensors with a token axis and is independent of any network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Route:
    """One window of blocks that a subset of the tokens skips (TREAD, section 3).

    Attributes:
        selection_ratio: fraction of the tokens that SKIP the window, in [0, 1). 0 switches the route off.
        start_layer_idx: the first block of the window. A negative index counts from the end, as in Python.
        end_layer_idx: the last block of the window, inclusive. A negative index counts from the end.
    """

    selection_ratio: float
    start_layer_idx: int
    end_layer_idx: int


# Selection rules: (tokens (B, N, D), uniform random numbers (B, N)) -> finite scores (B, N). The tokens with the highest
# scores stay in the route. NaN would rank highest. There is no check, because it would have to wait for the device.
SelectionRule = Callable[[Tensor, Tensor], Tensor]


def uniform_scores(x: Tensor, uniform: Tensor) -> Tensor:
    """Every subset is equally likely (TREAD, section 3)."""
    return uniform


def importance_scores(x: Tensor, uniform: Tensor, weight: float = 0.5, *, inverse: bool = False) -> Tensor:
    """Tokens with a large L1-norm stay more often: (1 - weight) * uniform + weight * norm, in float32, without a gradient.

    The norms of each sample are scaled to [0, 1], so that they weigh the same at every depth and in every sample.

    Args:
        weight: 0 is uniform, 1 keeps exactly the tokens with the largest norms.
        inverse: keep the smallest norms instead.
    """
    with torch.no_grad():
        norm = x.detach().abs().sum(dim=-1, dtype=torch.float32)  # (B, N)
        low, high = norm.amin(dim=1, keepdim=True), norm.amax(dim=1, keepdim=True)
        norm = (norm - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)
        if inverse:
            norm = 1 - norm
        return (1 - weight) * uniform + weight * norm


# By name, for `attach(selection=...)` and `model.selection` (which also has `grid`).
SELECTIONS: dict[str, SelectionRule] = {"uniform": uniform_scores, "importance": importance_scores}


def num_kept_tokens(num_tokens: int, selection_ratio: float) -> int:
    """Return K, the number of tokens that stay in the window: N - int(N * selection_ratio). It is 0 only for a ratio of 1."""
    _check_ratio("selection_ratio", selection_ratio)
    return num_tokens - int(num_tokens * selection_ratio)


def _check_ratio(name: str, ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise ValueError(f"{name}={ratio!r} must be a number in [0, 1]: the fraction of tokens that skip the route")


def apply_rule(rule: SelectionRule, x: Tensor, uniform: Tensor) -> Tensor:
    """Score tokens x (B, N, D) by a rule: (B, N). Raises ValueError if the rule returns another shape."""
    scores = rule(x, uniform)
    if scores.shape != x.shape[:2]:
        raise ValueError(f"the selection rule gives scores of shape {tuple(scores.shape)}, the tokens need {tuple(x.shape[:2])}")
    return scores


class TokenRouter:
    """The routes of one network, checked against its depth, and the operations that choose, remove and restore tokens.

    Args:
        routes: in the order of their blocks. They must not overlap.
        depth: number of transformer blocks.

    Raises ValueError for a route that does not fit, naming the route, the value and what is accepted.
    """

    def __init__(self, routes: Sequence[Route], depth: int):
        self.depth = depth
        self.routes: tuple[Route, ...] = ()  # with indices that are not negative
        for i, route in enumerate(routes):
            _check_ratio(f"routes[{i}].selection_ratio", route.selection_ratio)
            if route.selection_ratio == 1:
                raise ValueError(f"routes[{i}].selection_ratio=1 leaves no token in the route: it must be below 1")
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
        """Return the ratio of every route: its own, or `overrides` (one number, or one per route). At 1, all tokens skip."""
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
        scores: Tensor | None = None,
        generator: torch.Generator | None = None,
        rule: SelectionRule = uniform_scores,
    ) -> Tensor:
        """Choose, for every sample separately, which tokens stay: a uniformly random subset, or by another rule.

        Args:
            x: (B, N, D), the tokens where the route starts.
            selection_ratio: fraction of the tokens that skip.
            scores: (B, N) independent uniform numbers in [0, 1) for the rule. They are drawn from `generator` when absent.
            rule: one of `SELECTIONS`.

        Returns:
            ids_keep: (B, K) int64, the positions that stay, ascending (so that memory is read in order).

        Raises:
            ValueError: a ratio outside [0, 1], or scores of another shape, from the caller or the rule.
        """
        B, N = x.shape[:2]
        if scores is None:
            scores = torch.rand(B, N, device=x.device, generator=generator)
        elif scores.shape != (B, N):
            raise ValueError(f"scores have shape {tuple(scores.shape)}, the tokens need {(B, N)}")
        return TokenRouter.keep_highest(apply_rule(rule, x, scores), num_kept_tokens(N, selection_ratio))

    @staticmethod
    def keep_highest(scores: Tensor, num_kept: int) -> Tensor:
        """(B, N) -> (B, K) int64: the positions of the `num_kept` highest scores of each sample, ascending."""
        return scores.topk(num_kept, dim=1, sorted=False).indices.sort(dim=1).values

    @staticmethod
    def start_route(x: Tensor, ids_keep: Tensor) -> Tensor:
        """(B, N, D) -> (B, K, D): the tokens at `ids_keep`. Also gathers tensors such as positions or masks, (B, N, ...)."""
        if len(ids_keep) != len(x):  # gather would drop the other samples
            raise ValueError(f"ids_keep has shape {tuple(ids_keep.shape)}, but there are {len(x)} samples")
        index = ids_keep.reshape(ids_keep.shape + (1,) * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
        return x.gather(1, index)

    @staticmethod
    def end_route(x: Tensor, skipped: Tensor, ids_keep: Tensor) -> Tensor:
        """Put the kept tokens back among those that skipped, at their own positions.

        Args:
            x: (B, K, D), the kept tokens after the window.
            skipped: (B, N, D), all tokens as they were before the window. It is not written to.
            ids_keep: (B, K), from `choose_ids_keep`.

        Returns:
            (B, N, D). Tokens that skipped are bit-identical to `skipped`. Gradients reach both inputs.
        """
        if ids_keep.shape != x.shape[:2] or (len(x), *x.shape[2:]) != (len(skipped), *skipped.shape[2:]):  # it could broadcast
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (x, skipped, ids_keep))
            raise ValueError(f"x, skipped and ids_keep of shapes {shapes} do not belong to one route")
        index = ids_keep.unsqueeze(-1).expand_as(x)
        return skipped.scatter(1, index, x.to(skipped.dtype))  # (B, N, D)
