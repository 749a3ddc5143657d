"""Routing a network that is not ours: `attach(network, routes)`, through forward hooks and nothing else.

Before every block of a route the tokens that stay are gathered, with their positions and masks; after the block they are
put back among those that skip. The same subset serves the whole route, so this equals gathering once before the route and
putting back once after it, but nothing between the blocks (residuals of a ControlNet, long skips, skipped layers, gradient
checkpointing) ever sees a shortened sequence.

Shapes: B batch, N image tokens, K kept of them, L tokens of a block's sequence (with text), D width.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from attach.adapters import Adapter, BlockList, Extent, TokenAxis, find_adapter
from attach.presets import as_routes
from routing_module import Route, TokenRouter, importance_scores, num_kept_tokens

SELECTIONS = ("uniform", "importance")
NO_BACKWARD = -1  # what torch calls the backward pass that runs when none does
TWO_THREADS = (
    "two threads call the routed network at the same time, and one would get the tokens of the other: let them take turns, "
    "or give each a copy (instead of DataParallel: DistributedDataParallel)"
)


@dataclass(frozen=True)
class RouteStatistics:
    """What the last routed forward pass did; counts are of image tokens.

    Attributes:
        num_tokens: N.
        num_requested: K of every route by its selection ratio alone.
        num_kept: K of every route as it was, which force_keep may have raised.
        requested_saving: share of all passes of image tokens through blocks that the ratios would skip.
        saving: share that was skipped. The step gets cheaper by about this much, and by more where attention dominates.
    """

    num_tokens: int
    num_requested: tuple[int, ...]
    num_kept: tuple[int, ...]
    requested_saving: float
    saving: float


class PerSampleTable:
    """Positions (B, L, ...) where a network expects one table (L, ...) for the whole batch.

    Attention reaches such a table only to add the axes of batch and heads, `table[None, :, None]` or
    `table.unsqueeze(1)`; here the batch axis is there already. Anything else is an error, not a guess.
    """

    def __init__(self, table: Tensor):
        self.table = table
        self.ndim = table.ndim - 1

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def shape(self) -> torch.Size:
        return self.table.shape[1:]

    def to(self, *args, **kwargs) -> PerSampleTable:
        return PerSampleTable(self.table.to(*args, **kwargs))

    def float(self) -> PerSampleTable:
        return PerSampleTable(self.table.float())

    def unsqueeze(self, dim: int) -> Tensor:
        """(L, ...) -> (L, 1, ...) is meant to broadcast over a batch axis before it: (B, L, 1, ...)."""
        if dim < 1:
            raise TypeError(f"positions of a routed block were asked to unsqueeze({dim}); only an axis after the tokens is known")
        return self.table.unsqueeze(dim + 1)

    def __getitem__(self, key) -> Tensor:
        key = key if isinstance(key, tuple) else (key,)
        if not key or key[0] is not None or any(item is not None and item != slice(None) for item in key):
            raise TypeError(f"positions of a routed block were indexed with {key}; only [None, ...] and [:] are known")
        return self.table[(slice(None), *key[1:])]


class Plan:
    """Which image tokens stay in every route of one forward pass.

    `ids_keep` holds (B, K) per route, or None while `importance` has not yet seen the tokens, or for a route that is off.
    `scores` holds the random numbers (1 or B, N) of each route that is on. They are kept: by them a pass whose embedding
    runs again in the backward pass is recognised. `inputs` remembers the memory in which the input of each block lay, so that
    a block that runs again finds the plan it ran with. The references are weak: they keep nothing alive, and memory that was
    freed and used again is another memory to them.
    """

    def __init__(self, extent: Extent | None = None, num_kept: Sequence[int] = (), in_evaluation: bool = False):
        self.extent = extent  # None: this pass is dense
        self.num_kept = tuple(num_kept)
        self.in_evaluation = in_evaluation
        self.scores: list[Tensor | None] = [None] * len(self.num_kept)
        self.ids_keep: list[Tensor | None] = [None] * len(self.num_kept)
        self.inputs: dict[int, tuple[StorageWeakRef, int]] = {}
        self.recomputed: set[int] = set()  # blocks that ran again already
        self.thread = current_thread()

    def note_input(self, layer: int, tokens: Tensor) -> None:
        self.inputs[layer] = StorageWeakRef(tokens.untyped_storage()), tokens.storage_offset()

    def had_input(self, layer: int, tokens: Tensor) -> bool:
        """Whether this pass gave these very tokens to the block, and not others that came to lie at the same address."""
        if layer not in self.inputs:
            return False
        storage, offset = self.inputs[layer]
        return storage == StorageWeakRef(tokens.untyped_storage()) and offset == tokens.storage_offset()

    def is_on(self, route: int) -> bool:
        return self.extent is not None and self.num_kept[route] < self.extent.num_tokens

    def index(self, route: int, layout: str, length: int, device: torch.device) -> Tensor:
        """Positions that stay in a sequence of `length` tokens: (B, L - N + K), ascending. Text always stays."""
        extent, ids_keep = self.extent, self.ids_keep[route].to(device)
        others = length - extent.num_tokens
        if others < 0 or (layout == "image" and others):
            raise ValueError(
                f"a routed block got {length} tokens, but the network's embedding counted {extent.num_tokens} image tokens"
            )
        if others == 0:
            return ids_keep
        if extent.first_token is not None:
            first_token = extent.first_token.to(device)[:, None]  # (B, 1)
            other_ids = torch.arange(others, device=device)[None]
            other_ids = torch.where(other_ids < first_token, other_ids, other_ids + extent.num_tokens)
            return torch.cat([other_ids, ids_keep + first_token], dim=1).sort(dim=1).values
        if layout == "image_text":
            other_ids = torch.arange(extent.num_tokens, length, device=device)
            return torch.cat([ids_keep, other_ids.expand(len(ids_keep), -1)], dim=1)
        other_ids = torch.arange(others, device=device)
        return torch.cat([other_ids.expand(len(ids_keep), -1), ids_keep + others], dim=1)

    def image_tokens(self, x: Tensor, layout: str) -> Tensor:
        """(B, L, D) -> (B, N, D)."""
        num_tokens, length = self.extent.num_tokens, x.shape[1]
        if self.extent.first_token is not None and length > num_tokens:
            ids = torch.arange(num_tokens, device=x.device)[None] + self.extent.first_token.to(x.device)[:, None]
            return TokenRouter.start_route(x, ids)
        return x[:, length - num_tokens :] if layout == "text_image" else x[:, :num_tokens]


def gather_axis(x: Tensor, index: Tensor, dim: int, shared: bool) -> Tensor | PerSampleTable:
    """The entries at `index` (B, K) of a tensor whose token axis is `dim`; 0 is a table without a batch axis."""
    if dim == 0:
        if shared:
            return x.index_select(0, index[0])
        return PerSampleTable(TokenRouter.start_route(x.expand(len(index), *x.shape), index))
    if x.shape[0] == 1 and len(index) > 1:
        x = x.expand(len(index), *x.shape[1:])
    return TokenRouter.start_route(x.movedim(dim, 1), index).movedim(1, dim)


def current_thread() -> int:
    """0 where a compiler traces: threads are told apart in eager passes only."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def is_other_thread(thread: int) -> bool:
    """Whether `thread` is known not to be this one. A plan that was made in compiled code may be used in eager code."""
    now = current_thread()
    return thread != now and 0 not in (thread, now)


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of the module's forward, in order. By its class: hooks of others may replace the instance's."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


class RoutedBlock:
    """The two hooks of one block. Blocks outside of the routes have them too, to note their inputs.

    Attributes:
        layer: the block's index through all lists.
        route: the index of its route, or None.
    """

    def __init__(self, attachment: Attachment, layer: int, spec: BlockList, names: tuple[str, ...]):
        self.attachment = attachment
        self.layer = layer
        self.spec = spec
        self.positions = {name: i for i, name in enumerate(names)}
        routes = attachment.router.routes
        inside = [i for i, route in enumerate(routes) if route.start_layer_idx <= layer <= route.end_layer_idx]
        self.route = inside[0] if inside else None
        # While the block runs: all tokens, which of them are in it, and the thread.
        self.before: tuple[Tensor, Tensor, int] | None = None

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Forward pre-hook: shorten the tokens, and everything that has an entry for each of them."""
        self.before = None
        position = self.positions[self.spec.argument]
        tokens = args[position] if position < len(args) else kwargs[self.spec.argument]  # (B, L, D)
        plan = self.attachment.plan_for(self.layer, tokens, module.training)
        if plan is None or self.route is None or not plan.is_on(self.route):
            return None
        if not (module.training or plan.in_evaluation):  # a frozen part of a network in training, or a copy of it
            return None
        if plan.ids_keep[self.route] is None:
            self.attachment.select_by_importance(plan, self.route, plan.image_tokens(tokens, self.spec.layout))

        indices: dict[tuple, Tensor] = {}  # of this call: cos and sin, and a mask, list the same tokens

        def index_of(layout: str, length: int, device: torch.device) -> Tensor:
            if (layout, length, device) not in indices:
                indices[layout, length, device] = plan.index(self.route, layout, length, device)
            return indices[layout, length, device]

        index = index_of(self.spec.layout, tokens.shape[1], tokens.device)
        self.before = tokens, index, current_thread()
        args, kwargs = list(args), dict(kwargs)
        self._replace(args, kwargs, self.spec.argument, TokenRouter.start_route(tokens, index))
        for axis in self.spec.axes:
            position = self.positions[axis.argument]
            value = args[position] if position < len(args) else kwargs.get(axis.argument)
            if value is not None:
                self._replace(args, kwargs, axis.argument, self._shorten(value, axis, plan, index_of))
        return tuple(args), kwargs

    def leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Forward hook: put the tokens back. Also called, without an output, when the block stops with an exception."""
        before, self.before = self.before, None  # not kept alive: recomputation may stop half-way through a block
        if before is None or output is None:
            return None
        skipped, index, thread = before
        if is_other_thread(thread):
            raise RuntimeError(TWO_THREADS)
        tokens = output if self.spec.output is None else output[self.spec.output]
        # Under autocast a block may answer in another precision than it was asked in; lose none of either.
        tokens = TokenRouter.end_route(tokens, skipped.to(torch.promote_types(skipped.dtype, tokens.dtype)), index)
        if self.spec.output is None:
            return tokens
        return tuple(tokens if i == self.spec.output else item for i, item in enumerate(output))

    def _replace(self, args: list, kwargs: dict, name: str, value: Any) -> None:
        if self.positions[name] < len(args):
            args[self.positions[name]] = value
        else:
            kwargs[name] = value

    def _shorten(self, value: Any, axis: TokenAxis, plan: Plan, index_of: Callable[..., Tensor]) -> Any:
        if isinstance(value, (tuple, list)):
            items = range(len(value)) if axis.items is None else axis.items
            return tuple(self._shorten(item, axis, plan, index_of) if i in items else item for i, item in enumerate(value))
        if axis.key is not None:
            entry = value.get(axis.key)
            return value if entry is None else {**value, axis.key: self._shorten(entry, replace(axis, key=None), plan, index_of)}
        if axis.mask:
            return self._shorten_mask(value, axis, index_of)
        if axis.ndim is not None and value.ndim != axis.ndim:
            return value
        dim = axis.dim % value.ndim
        index = index_of(axis.layout, value.shape[dim], value.device)
        shared = self.attachment.shared and (axis.layout == "image" or plan.extent.first_token is None)
        return gather_axis(value, index, dim, shared)

    def _shorten_mask(self, mask: Tensor, axis: TokenAxis, index_of: Callable[..., Tensor]) -> Tensor:
        if mask.ndim not in (2, 4):
            raise ValueError(
                f"{axis.argument}: an attention mask of shape {tuple(mask.shape)} cannot be routed; "
                "it needs (B, 1, 1, tokens), (B, 1, tokens, tokens) or (tokens, tokens)"
            )
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        for dim in (2, 3):
            if mask.shape[dim] > 1:
                mask = gather_axis(mask, index_of(axis.layout, mask.shape[dim], mask.device), dim, shared=False)
        return mask


class Attachment:
    """The routes of one network; what `attach` returns.

    It lives in the hooks of the network: a deep copy of the network has an `Attachment` of its own (`attached(copy)`).

    Attributes:
        adapter: how the network is built.
        router: the routes, with absolute indices.
    """

    # Forward passes that may wait for their backward pass at the same time, under gradient checkpointing by others.
    NUM_REMEMBERED = 64

    def __init__(
        self,
        network: nn.Module,
        adapter: Adapter,
        router: TokenRouter,
        *,
        selection: str,
        importance_weight: float,
        inverse: bool,
        shared: bool,
        generator: torch.Generator | None,
    ):
        self.adapter = adapter
        self.router = router
        self.selection = selection
        self.importance_weight = importance_weight
        self.inverse = inverse
        self.shared = shared
        self.generator = generator
        self.ratios_now: tuple[float, ...] | None = None  # inside `routed()`
        self.forced: Tensor | None = None  # inside `force_keep()`: (B, N) bool
        self.num_forced = 0
        self.pending: bool | None = None  # the network has been called, its embedding not yet: True where it should route
        self.plan: Plan | None = None
        self.bound: Plan | None = None  # inside `checkpoint()`
        self.recent: deque[Plan] = deque(maxlen=self.NUM_REMEMBERED)
        self.recomputed: tuple[Plan, int, int] | None = None  # plan, block and backward pass of the last block that ran again
        self.begun_in = NO_BACKWARD  # the backward pass in which `begin` ran last: the whole network is recomputed there
        self.last: Plan | None = None
        self.last_requested: tuple[int, ...] = ()

        embedding = network.get_submodule(adapter.tokens_from)
        self.begin_names = argument_names(embedding)
        if adapter.tokens_from:
            self.handles = [
                network.register_forward_pre_hook(self.expect),
                embedding.register_forward_hook(self.begin, with_kwargs=True),
            ]
        else:
            self.handles = [embedding.register_forward_pre_hook(self.begin, with_kwargs=True)]
        layer = 0
        for spec in adapter.blocks:
            for block in getattr(network, spec.attribute):
                block = inner_module(block)
                hooks = RoutedBlock(self, layer, spec, argument_names(block))
                self.handles.append(block.register_forward_pre_hook(hooks.enter, with_kwargs=True))
                self.handles.append(block.register_forward_hook(hooks.leave, with_kwargs=True, always_call=True))
                layer += 1

    # ---- for users ---------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Remove every hook; the network is as it was. Calling it again does nothing."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.plan = self.last = None
        self.recent.clear()
        forget_compiled()

    @contextmanager
    def routed(self, selection_ratios: float | Sequence[float] | None = None) -> Iterator[None]:
        """Inside, route in evaluation mode and without gradients too: for sparse guidance (arXiv 2601.01608).

        Args:
            selection_ratios: instead of the routes' own: one number, or one per route. 0 switches routing off.
        """
        before = self.ratios_now
        self.ratios_now = self.router.selection_ratios(selection_ratios)
        try:
            yield
        finally:
            self.ratios_now = before

    @contextmanager
    def force_keep(self, mask: Tensor | None) -> Iterator[None]:
        """Inside, the tokens of `mask` are never routed: masked regions, inpainting, reference images.

        All samples of a batch keep the same number of tokens: where one forces more than the routes keep, every sample
        keeps as many. `statistics` says what saving is left. Wrap the forward pass; the backward pass may be outside.

        Args:
            mask: (B, N), True or non-zero is kept; None forces nothing. One synchronisation with the device.
        """
        before = self.forced, self.num_forced
        if mask is None:
            self.forced, self.num_forced = None, 0
        else:
            if not isinstance(mask, Tensor) or mask.is_meta:
                raise ValueError(f"force_keep got {type(mask).__name__} without values; it needs a tensor (batch, image tokens)")
            if mask.ndim != 2:
                raise ValueError(f"force_keep has shape {tuple(mask.shape)}; it needs (batch, image tokens)")
            mask = mask != 0
            forced = mask.any(dim=0, keepdim=True).expand_as(mask) if self.shared else mask
            self.forced, self.num_forced = forced, int(forced.sum(dim=1).max())
        try:
            yield
        finally:
            self.forced, self.num_forced = before

    def checkpoint(self, function, *args, **kwargs) -> Any:
        """Gradient checkpointing that recomputes each block with the subset of its own forward pass.

        For diffusers: `network.enable_gradient_checkpointing(attachment.checkpoint)`. The default function works as well,
        as far as `plan_for` can tell the passes apart; this one always can.

        Under torch.compile, set `torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True`: the hooks hold
        the tokens that skip while a block runs, which is a side effect that need not be replayed.
        """
        if torch.compiler.is_compiling():  # the compiler keeps what it recomputes
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        plan = self.plan

        def run(*args, **kwargs):
            before, self.bound = self.bound, plan
            try:
                return function(*args, **kwargs)
            finally:
                self.bound = before

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    @property
    def ids_keep(self) -> tuple[Tensor | None, ...]:
        """(B, K) per route of the last routed forward pass: image tokens that stayed; None for a route that was off."""
        return () if self.last is None else tuple(self.last.ids_keep)

    @property
    def statistics(self) -> RouteStatistics | None:
        """Of the last routed forward pass; None before the first."""
        if self.last is None:
            return None
        num_tokens = self.last.extent.num_tokens

        def saving(num_kept: Sequence[int]) -> float:
            skipped = [
                (num_tokens - kept) * (route.end_layer_idx - route.start_layer_idx + 1)
                for kept, route in zip(num_kept, self.router.routes)
            ]
            return sum(skipped) / (num_tokens * self.router.depth)

        requested, kept = self.last_requested, self.last.num_kept
        return RouteStatistics(num_tokens, requested, kept, saving(requested), saving(kept))

    # ---- for the hooks -----------------------------------------------------------------------------------------------

    def expect(self, module: nn.Module, args: tuple) -> None:
        """Hook of the network: from here on `begin` must come before the blocks do; no plan of another pass is left to them."""
        self.pending = self.ratios_now is not None or (module.training and torch.is_grad_enabled())

    def begin(self, module: nn.Module, args: tuple, kwargs: dict, output: Any = None) -> None:
        """Hook of the embedding: decide the whole forward pass, outside of every checkpointed block.

        Random numbers drawn inside a checkpointed block would be drawn again in its recomputation and would
        desynchronise dropout.
        """
        if not torch.compiler.is_compiling():
            self.begun_in = torch._C._current_graph_task_id()
        self.pending = None
        in_evaluation = self.ratios_now is not None
        if not in_evaluation and not (module.training and torch.is_grad_enabled()):
            self.plan = Plan()
        else:
            arguments = dict(zip(self.begin_names, args)) | kwargs
            extent = self.adapter.extent(module, arguments, output)
            ratios = self.ratios_now if in_evaluation else self.router.selection_ratios()
            again = not torch.compiler.is_compiling() and self.begun_in != NO_BACKWARD
            self.plan = self._find_drawn(extent, ratios) if again else None
            self.plan = self.plan or self._draw(extent, ratios, in_evaluation)
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.recent.append(self.plan)

    def _draw(self, extent: Extent, ratios: Sequence[float], in_evaluation: bool) -> Plan:
        B, N = extent.batch, extent.num_tokens
        if self.forced is not None and self.forced.shape != (B, N):
            raise ValueError(f"force_keep has shape {tuple(self.forced.shape)}; the network has {(B, N)} image tokens")
        requested = tuple(num_kept_tokens(N, ratio) for ratio in ratios)
        plan = Plan(extent, [max(num_kept, self.num_forced) for num_kept in requested], in_evaluation)
        for i in range(len(ratios)):
            if plan.is_on(i):
                plan.scores[i] = self._random(extent)
                if self.selection == "uniform":
                    plan.ids_keep[i] = self._select(plan.scores[i], plan, i)
        self.last, self.last_requested = plan, requested
        return plan

    def _random(self, extent: Extent) -> Tensor:
        batch = 1 if self.shared else extent.batch
        return torch.rand(batch, extent.num_tokens, device=extent.device, generator=self.generator)

    def _find_drawn(self, extent: Extent, ratios: Sequence[float]) -> Plan | None:
        """The plan of the pass that runs again in this backward pass, embedding included; None where nothing is routed.

        The checkpoint has restored the random numbers, so that the first of them tell the passes apart. Drawing alone would
        not do: `force_keep` and `routed` may have ended before the backward pass.

        Raises:
            RuntimeError: no pass drew these numbers.
        """
        if all(num_kept_tokens(extent.num_tokens, ratio) == extent.num_tokens for ratio in ratios):
            return None
        if self.generator is not None:
            raise RuntimeError(
                "the whole network is computed again for the backward pass, and its generator would draw other tokens; "
                "attach(..., generator=None), whose random numbers the checkpoint restores, or checkpoint the blocks"
            )
        first = self._random(extent)
        for plan in reversed(self.recent):
            drawn = [scores for scores in plan.scores if scores is not None]
            if drawn and drawn[0].device == first.device and torch.equal(drawn[0], first):
                for _ in drawn[1:]:
                    self._random(extent)  # dropout that follows is that of the first time
                return plan
        raise RuntimeError(
            "the whole network is computed again for the backward pass, and which tokens it ran with is not known: checkpoint "
            "it with use_reentrant=False and preserve_rng_state=True, or checkpoint the blocks with the attachment's checkpoint()"
        )

    def _select(self, scores: Tensor, plan: Plan, route: int) -> Tensor:
        scores = scores.expand(plan.extent.batch, -1)
        if self.forced is not None:
            scores = scores.masked_fill(self.forced.to(scores.device), torch.inf)
        return TokenRouter.select(scores, plan.num_kept[route])  # (B, K)

    def select_by_importance(self, plan: Plan, route: int, tokens: Tensor) -> None:
        """Choose the subset of a route at its first block, from the image tokens (B, N, D) that arrive there."""
        scores = importance_scores(tokens, plan.scores[route].to(tokens.device), self.importance_weight, inverse=self.inverse)
        if self.shared:
            scores = scores.mean(dim=0, keepdim=True)
        plan.ids_keep[route] = self._select(scores, plan, route)

    def plan_for(self, layer: int, tokens: Tensor, training: bool) -> Plan | None:
        """The plan of the forward pass that a block is running in, or running again in.

        A block that runs during a backward pass is being recomputed. Under `checkpoint` its plan is bound. Under anybody
        else's checkpointing it is found by the block's input, which the checkpoint holds. Blocks that are recomputed as one
        piece follow their first.

        Raises:
            RuntimeError: recomputed, and the input was moved (offloaded activations), was given to the same block by several
                passes, or the pass is too long ago; or running, and the plan is not of this pass.
        """
        if torch.compiler.is_compiling():
            return self._current()
        if self.bound is not None:
            return self.bound
        backward = torch._C._current_graph_task_id()
        if backward == NO_BACKWARD:
            plan = self._current()
            if plan is None:
                return None
            if is_other_thread(plan.thread) and (plan.extent is not None or (training and torch.is_grad_enabled())):
                raise RuntimeError(TWO_THREADS)
            plan.note_input(layer, tokens)
            return plan
        if backward == self.begun_in or self.plan is None:
            return self.plan
        found = [plan for plan in self.recent if plan.had_input(layer, tokens)]
        # A network that is given the same tensor at every step: its passes of earlier steps are over.
        found = [plan for plan in found if layer not in plan.recomputed] or found
        if not found and self.recomputed is not None and self.recomputed[1:] == (layer - 1, backward):
            found = [self.recomputed[0]]
        if len(found) == 1:
            found[0].recomputed.add(layer)
            self.recomputed = found[0], layer, backward
            return found[0]
        raise RuntimeError(
            f"block {layer} is computed again for the backward pass, and which tokens it ran with is not known; "
            "checkpoint the blocks with the attachment's checkpoint(): "
            "network.enable_gradient_checkpointing(attachment.checkpoint) in diffusers; when torch.compile is around them, also "
            "set torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True"
        )

    def _current(self) -> Plan | None:
        """The plan that `begin` made last, if it is of the pass in which a block runs now."""
        if self.pending:
            raise RuntimeError(
                f"blocks run, but {self.adapter.tokens_from!r}, which attach() counts the tokens by, did not run "
                "before: another module took its place after attach() (modules_to_save, an adapter that was unloaded). "
                "detach(), and attach() again"
            )
        return None if self.pending is False else self.plan

    def __getstate__(self) -> dict:
        """Copies and pickles start without the state of a pass that is under way."""
        return self.__dict__ | {
            "pending": None,
            "plan": None,
            "bound": None,
            "last": None,
            "recomputed": None,
            "begun_in": NO_BACKWARD,
            "recent": deque(maxlen=self.NUM_REMEMBERED),
            "ratios_now": None,
            "forced": None,
            "num_forced": 0,
        }


def forget_compiled() -> None:
    """What torch.compile has compiled does not look at hooks again; without this they would be silently ignored."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def inner_module(module: nn.Module) -> nn.Module:
    """The module that computes, below the wrappers of torch.compile, DDP, FSDP, activation checkpointing and PEFT."""
    while True:
        if isinstance(getattr(module, "_orig_mod", None), nn.Module):  # torch.compile
            module = module._orig_mod
        elif isinstance(getattr(module, "_checkpoint_wrapped_module", None), nn.Module):
            module = module._checkpoint_wrapped_module
        elif type(module).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            module = module.module
        elif callable(getattr(module, "get_base_model", None)):  # PEFT
            module = module.get_base_model()
        else:
            return module


def attached(network: nn.Module) -> Attachment | None:
    """The attachment of a network, or of the copy of one; None when it has none."""
    network = inner_module(network)
    for module in network.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for hook in hooks.values():
                if isinstance(getattr(hook, "__self__", None), Attachment):
                    return hook.__self__
    return None


def attach(
    network: nn.Module,
    routes: str | Mapping | Sequence[Route | Mapping] | Route,
    *,
    selection: str = "uniform",
    importance_weight: float | None = None,
    inverse: bool = False,
    per_sample: bool = True,
    generator: torch.Generator | None = None,
    adapter: Adapter | None = None,
) -> Attachment:
    """Route the image tokens of a network (TREAD, section 3), in training mode with gradients; evaluation is untouched.

    Args:
        network: of diffusers, timm or dit.py, or any that `adapter` describes; also inside DDP, torch.compile or PEFT.
            Nothing in it is changed: it gets forward hooks, and `detach` removes them.
        routes: a preset, a SimpleTuner `tread_config`, or routes (see `as_routes`). selection_ratio is the fraction
            that SKIPS; layer indices count through all lists of blocks in order, and may be negative.
        selection: `uniform` (the paper: a random subset), or `importance` (tokens with a large L1-norm stay more often).
        importance_weight: for `importance`: 0 is as random as uniform, 1 keeps exactly the largest; None is 0.5.
        inverse: for `importance`: the smallest stay.
        per_sample: a subset for every sample; False is one subset for the whole batch.
        generator: source of the random numbers, on the device of the tokens; None is torch's default (torch.compile
            cannot trace any other in one graph).
        adapter: for a network that is not known.

    Differs from TREAD, section 4: the block right after a route runs in the precision of all others under autocast.

    Raises:
        ValueError: no routes, routes that do not fit the network's depth, a network that cannot be routed and why.
    """
    routes = as_routes(routes)
    if selection not in SELECTIONS:
        raise ValueError(f"selection={selection!r} is unknown; choose one of {', '.join(SELECTIONS)}")
    for name, value in (("importance_weight", importance_weight), ("inverse", inverse or None)):
        if value is not None and selection != "importance":
            raise ValueError(f'{name}={value} has no meaning for selection={selection!r}; add selection="importance"')
    importance_weight = 0.5 if importance_weight is None else importance_weight
    if not 0 <= importance_weight <= 1:
        raise ValueError(f"importance_weight={importance_weight} must be in [0, 1]: 0 is random, 1 keeps the largest norms")
    network = inner_module(network)
    if attached(network) is not None:
        raise ValueError(f"{type(network).__name__} is routed already; detach() first: attached(network).detach()")
    adapter = adapter or find_adapter(network)
    obstacle = adapter.obstacle(network) if adapter.obstacle else None
    if obstacle:
        raise ValueError(f"this {type(network).__name__} cannot be routed: {obstacle}")
    check_adapter(network, adapter)
    depth = sum(len(getattr(network, spec.attribute)) for spec in adapter.blocks)
    attachment = Attachment(
        network,
        adapter,
        TokenRouter(routes, depth),
        selection=selection,
        importance_weight=importance_weight,
        inverse=inverse,
        shared=not per_sample,
        generator=generator,
    )
    forget_compiled()
    return attachment


def check_adapter(network: nn.Module, adapter: Adapter) -> None:
    """Raises ValueError where the network has not what the adapter names: another version of the library, say."""
    name = type(network).__name__
    try:
        network.get_submodule(adapter.tokens_from)
    except AttributeError as error:
        raise ValueError(f"{name} has no {adapter.tokens_from!r}, which its adapter counts tokens by: {error}") from error
    for spec in adapter.blocks:
        blocks = getattr(network, spec.attribute, None)
        if not isinstance(blocks, (nn.ModuleList, nn.Sequential)):
            raise ValueError(f"{name} has no list of blocks {spec.attribute!r}; its adapter does not fit this version")
        for block in blocks:
            names = argument_names(inner_module(block))
            for argument in (spec.argument, *(axis.argument for axis in spec.axes)):
                if argument not in names:
                    raise ValueError(
                        f"{type(block).__name__} takes {', '.join(names)} and no {argument!r}; "
                        f"the adapter of {name} does not fit this version"
                    )
