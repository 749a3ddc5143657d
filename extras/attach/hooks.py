"""The block hooks of `attach`. They remove tokens before a block runs and restore the full sequence after the block.

The hooks also shorten positions and masks. All blocks in a window get the same tokens, so the result equals one gather before
the window and one scatter after it. However, code between the blocks (ControlNet residuals, long skip connections, skipped
layers, gradient checkpointing) always sees the full sequence.

Shapes: B = batch size, N = image tokens, K = kept image tokens, L = tokens in a block's sequence (with text), D = width.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from extras.attach.adapters import BlockList, ImageTokens, TokenAxis
from routing_module import TokenRouter


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the argument names of `forward` in the class, because some libraries replace `forward` in instances."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


class PositionsPerSample:
    """Per-sample positions (B, L, ...) for a network that expects one table (L, ...) for the complete batch.

    Attention layers only add batch and head axes to the table, with `table[None, :, None]` or `table.unsqueeze(1)`. The
    table in this class already has a batch axis, so only the head axis is added. Any other index raises a TypeError.
    """

    def __init__(self, table: Tensor):
        self.table = table

    def unsqueeze(self, dim: int) -> Tensor:
        """Insert an axis at index `dim` of the shared table (L, ...). With dim=1, this returns (B, L, 1, ...)."""
        if dim < 1:
            raise TypeError(f"positions of a routed block: unsqueeze({dim}) is not supported, only an axis after the tokens")
        return self.table.unsqueeze(dim + 1)

    def __getitem__(self, key) -> Tensor:
        key = key if isinstance(key, tuple) else (key,)
        if not key or key[0] is not None or any(item is not None and item != slice(None) for item in key):
            raise TypeError(f"positions of a routed block: index {key} is not supported, only [None, ...] with None and [:]")
        return self.table[(slice(None), *key[1:])]


@dataclass(eq=False)
class ForwardPlan:
    """The kept image tokens of each route in one forward pass."""

    image: ImageTokens | None = None  # None if the forward pass is dense
    num_kept: tuple[int, ...] = ()  # number of kept image tokens (K) per route
    in_evaluation: bool = False  # whether to also route blocks in evaluation mode
    noise: dict[int, Tensor] = field(default_factory=dict)  # uniform random numbers (B, N) for each active route
    ids_keep: dict[int, Tensor] = field(default_factory=dict)  # chosen positions (B, K) for each active route

    def is_active(self, route_idx: int) -> bool:
        return self.image is not None and self.num_kept[route_idx] < self.image.num_tokens

    def image_start(self, layout: str, length: int) -> int:
        """Return the position of the first image token in a sequence of `length` tokens."""
        num_others = length - self.image.num_tokens
        if num_others < 0 or (layout == "image" and num_others):
            raise ValueError(f"a block got {length} tokens ({layout}), but the embedding counted {self.image.num_tokens}")
        return num_others if layout == "text_image" else 0

    def image_tokens(self, x: Tensor, layout: str) -> Tensor:
        """Return the image tokens, (B, L, D) -> (B, N, D), detached because a recomputed block must save the same tensors."""
        return x.detach().narrow(1, self.image_start(layout, x.shape[1]), self.image.num_tokens)

    def gather(self, x: Tensor, route_idx: int, axis: TokenAxis, dim: int) -> Tensor | PositionsPerSample:
        """Select the entries of K image tokens and all non-image tokens along axis `dim`. With dim=0, x has no batch axis."""
        index = self.positions(route_idx, axis.layout, x.shape[dim])
        if dim == 0:
            return PositionsPerSample(TokenRouter.start_route(x.expand(len(index), *x.shape), index))
        x = x.expand(len(index), *x.shape[1:])
        return TokenRouter.start_route(x.movedim(dim, 1), index).movedim(1, dim)

    def positions(self, route_idx: int, layout: str, length: int) -> Tensor:
        """Return the positions of K image tokens and all non-image tokens in a sequence of `length` tokens, (B, L - N + K)."""
        start = self.image_start(layout, length)
        ids_keep = self.ids_keep[route_idx]
        positions = torch.arange(length, device=ids_keep.device).expand(len(ids_keep), -1)
        return torch.cat([positions[:, :start], ids_keep + start, positions[:, start + self.image.num_tokens :]], dim=1)

    def shorten(self, value: Any, route_idx: int, axis: TokenAxis) -> Any:
        """Reduce a block argument to the entries of the kept tokens."""
        if value is None:
            return None
        if isinstance(value, dict):
            return {key: self.shorten(item, route_idx, axis) if key in axis.items else item for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            items = range(len(value)) if axis.items is None else axis.items
            return tuple(self.shorten(item, route_idx, axis) if i in items else item for i, item in enumerate(value))
        if axis.ndim is not None and value.ndim != axis.ndim:
            return value
        if not axis.mask:
            return self.gather(value, route_idx, axis, axis.dim)
        if value.ndim not in (2, 4):
            raise ValueError(f"{axis.argument}: a mask of shape {tuple(value.shape)} cannot be routed; it needs 2 or 4 axes")
        if value.ndim == 2 and len(value) == self.image.batch:  # (B, L), which diffusers reads as padding of each sample
            value = value[:, None, None]
        value = value.reshape((1,) * (4 - value.ndim) + value.shape)
        for dim in (2, 3):
            value = self.gather(value, route_idx, axis, dim) if value.shape[dim] > 1 else value
        return value


class BlockHooks:
    """The two hooks of one routed block. `layer` counts blocks across all lists. `names` lists the block's arguments."""

    def __init__(self, attachment, layer: int, route_idx: int, block_list: BlockList, names: tuple[str, ...]):
        self.attachment = attachment
        self.layer = layer
        self.route_idx = route_idx
        self.block_list = block_list
        self.names = names
        self.saved: tuple[Tensor, Tensor] | None = None  # all tokens and the kept positions, while the block runs

    def before_block(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Forward pre-hook: remove skipped tokens from the sequence and from all arguments that have one entry per token."""
        self.saved = None
        plan = self.attachment.find_plan(self.layer)
        route_idx, block_list = self.route_idx, self.block_list
        # A block in evaluation mode belongs to a frozen part of the network, so the hook does not route it during training.
        if not plan.is_active(route_idx) or not (module.training or plan.in_evaluation):
            return None
        arguments = dict(zip(self.names, args)) | kwargs
        tokens = arguments[block_list.argument]  # (B, L, D)
        if route_idx not in plan.ids_keep:
            self.attachment.choose_ids_keep(plan, route_idx, plan.image_tokens(tokens, block_list.layout))
        self.saved = tokens, plan.positions(route_idx, block_list.layout, tokens.shape[1])
        arguments[block_list.argument] = TokenRouter.start_route(*self.saved)
        for axis in block_list.axes:
            if axis.argument in arguments:
                arguments[axis.argument] = plan.shorten(arguments[axis.argument], route_idx, axis)
        return (), arguments

    def after_block(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Forward hook: put the kept tokens back into the full sequence. If the block raises an exception, `output` is None."""
        saved, self.saved = self.saved, None  # free the tokens even if recomputation stops inside the block
        if saved is None or output is None:
            return None
        all_tokens, positions = saved
        tokens = output if self.block_list.output is None else output[self.block_list.output]
        # Under autocast, a block's output may have a different precision than its input. Use the higher precision.
        all_tokens = all_tokens.to(torch.promote_types(all_tokens.dtype, tokens.dtype))
        tokens = TokenRouter.end_route(tokens, all_tokens, positions)
        if self.block_list.output is None:
            return tokens
        return tuple(tokens if i == self.block_list.output else item for i, item in enumerate(output))
