"""Hooks of `attach` on the blocks of a network: they shorten the tokens before a block and restore them after it.

They shorten positions and masks with the tokens. The same tokens stay in the whole route, so the result equals gathering once
before the route and putting back once after it. But nothing between the blocks (residuals of a ControlNet, long skips, skipped
layers, gradient checkpointing) ever sees a shortened sequence.

Shapes: B batch, N image tokens, K kept of them, L tokens of a block's sequence (with text), D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from extras.attach.adapters import BlockList, ImageTokens, TokenAxis
from routing_module import TokenRouter


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of the module's forward, in order. The class has it: other libraries may replace the instance's."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


class PositionsPerSample:
    """Positions (B, L, ...) where a network expects one table (L, ...) for the whole batch.

    Attention only adds the axes of batch and heads to such a table, `table[None, :, None]` or `table.unsqueeze(1)`; here
    the batch axis is there already. Any other index raises a TypeError.
    """

    def __init__(self, table: Tensor):
        self.table = table

    def unsqueeze(self, dim: int) -> Tensor:
        """(L, ...) -> (L, 1, ...) is meant to broadcast over a batch axis before it: (B, L, 1, ...)."""
        if dim < 1:
            raise TypeError(f"positions of a routed block: unsqueeze({dim}) is not known, only an axis after the tokens")
        return self.table.unsqueeze(dim + 1)

    def __getitem__(self, key) -> Tensor:
        key = key if isinstance(key, tuple) else (key,)
        if not key or key[0] is not None or any(item is not None and item != slice(None) for item in key):
            raise TypeError(f"positions of a routed block: index {key} is not known, only [None, ...] with None and [:]")
        return self.table[(slice(None), *key[1:])]


def gather_axis(x: Tensor, index: Tensor, dim: int) -> Tensor | PositionsPerSample:
    """The entries at `index` (B, K) of a tensor whose token axis is `dim`; 0 is a table without a batch axis."""
    if dim == 0:
        return PositionsPerSample(TokenRouter.start_route(x.expand(len(index), *x.shape), index))
    x = x.expand(len(index), *x.shape[1:])
    return TokenRouter.start_route(x.movedim(dim, 1), index).movedim(1, dim)


def memory_of(tokens: Tensor) -> tuple[StorageWeakRef, int]:
    """A weak identity of a tensor's memory: a later tensor at the same address does not match. It keeps nothing alive."""
    return StorageWeakRef(tokens.untyped_storage()), tokens.storage_offset()


@dataclass(eq=False)
class Plan:
    """Which image tokens stay in every route of one forward pass."""

    image: ImageTokens | None = None  # None where the pass is dense
    num_kept: tuple[int, ...] = ()  # K per route
    in_evaluation: bool = False  # whether blocks in evaluation mode are routed too
    uniform: dict[int, Tensor] = field(default_factory=dict)  # random numbers (1 or B, N) of each active route
    ids_keep: dict[int, Tensor] = field(default_factory=dict)  # (B, K) of each active route that has begun
    inputs: dict[int, tuple] = field(default_factory=dict)  # `memory_of` the input of each block

    def is_on(self, route: int) -> bool:
        return self.image is not None and self.num_kept[route] < self.image.num_tokens

    def image_start(self, layout: str, length: int) -> int:
        """Where the image begins in a sequence of `length` tokens."""
        num_others = length - self.image.num_tokens
        if num_others < 0 or (layout == "image" and num_others):
            raise ValueError(f"a block got {length} tokens ({layout}), but the embedding counted {self.image.num_tokens}")
        return {"image": 0, "image_text": 0, "text_image": num_others}[layout]

    def image_tokens(self, x: Tensor, layout: str) -> Tensor:
        """(B, L, D) -> (B, N, D), without a gradient: a checkpointed block must save the same tensors when it runs again."""
        return x.detach().narrow(1, self.image_start(layout, x.shape[1]), self.image.num_tokens)

    def index(self, route: int, layout: str, length: int) -> Tensor:
        """(B, L - N + K), the positions that stay in a sequence of `length` tokens: all other tokens and K image tokens."""
        start, ids_keep = self.image_start(layout, length), self.ids_keep[route]
        ends = ((0, start), (start + self.image.num_tokens, length))
        before, after = (torch.arange(*end, device=ids_keep.device).expand(len(ids_keep), -1) for end in ends)
        return torch.cat([before, ids_keep + start, after], dim=1)


class BlockHooks:
    """The two hooks of one block of a route; `layer` counts blocks through all lists, `names` are those of its arguments."""

    def __init__(self, attachment, layer: int, route: int, spec: BlockList, names: tuple[str, ...]):
        self.attachment, self.layer, self.route, self.spec, self.names = attachment, layer, route, spec, names
        self.before: tuple[Tensor, Tensor] | None = None  # while the block runs: all tokens, and which of them are in it

    def before_block(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Forward pre-hook: shorten the tokens, and everything that has an entry for each of them."""
        self.before = None
        arguments = dict(zip(self.names, args)) | kwargs
        tokens = arguments[self.spec.argument]  # (B, L, D)
        plan = self.attachment.find_plan(self.layer, tokens)
        # A block in evaluation mode belongs to a frozen part of a network in training.
        if not plan.is_on(self.route) or not (module.training or plan.in_evaluation):
            return None
        if self.route not in plan.ids_keep:
            self.attachment.choose_ids_keep(plan, self.route, plan.image_tokens(tokens, self.spec.layout))

        indices: dict[tuple[str, int], Tensor] = {}  # cos, sin and a mask list the same tokens

        def index_of(layout: str, length: int) -> Tensor:
            if (layout, length) not in indices:
                indices[layout, length] = plan.index(self.route, layout, length).to(tokens.device)
            return indices[layout, length]

        index = index_of(self.spec.layout, tokens.shape[1])
        self.before = tokens, index
        arguments[self.spec.argument] = TokenRouter.start_route(tokens, index)
        for axis in self.spec.axes:
            if axis.argument in arguments:
                arguments[axis.argument] = shorten(arguments[axis.argument], axis, index_of)
        return (), arguments

    def after_block(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Forward hook: put the tokens back. If the block stops with an exception, it is called without an output."""
        before, self.before = self.before, None  # free the tokens: recomputation may stop half-way through a block
        if before is None or output is None:
            return None
        skipped, index = before
        tokens = output if self.spec.output is None else output[self.spec.output]
        # Under autocast a block may return another precision than it got; keep the higher one.
        tokens = TokenRouter.end_route(tokens, skipped.to(torch.promote_types(skipped.dtype, tokens.dtype)), index)
        if self.spec.output is None:
            return tokens
        return tuple(tokens if i == self.spec.output else item for i, item in enumerate(output))


def shorten(value: Any, axis: TokenAxis, index_of: Callable[[str, int], Tensor]) -> Any:
    """A block's argument reduced to the tokens that stay, at index_of(layout, length) -> (B, K)."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        items = range(len(value)) if axis.items is None else axis.items
        return tuple(shorten(item, axis, index_of) if i in items else item for i, item in enumerate(value))
    if axis.key is not None:
        if axis.key not in value:
            return value
        return {**value, axis.key: shorten(value[axis.key], replace(axis, key=None), index_of)}
    if axis.ndim is not None and value.ndim != axis.ndim:
        return value
    dims = [axis.dim]
    if axis.mask:
        if value.ndim not in (2, 4):
            raise ValueError(f"{axis.argument}: a mask of shape {tuple(value.shape)} cannot be routed; it needs 2 or 4 axes")
        value = value.reshape((1,) * (4 - value.ndim) + value.shape)
        dims = [dim for dim in (2, 3) if value.shape[dim] > 1]
    for dim in dims:
        value = gather_axis(value, index_of(axis.layout, value.shape[dim]), dim)
    return value
