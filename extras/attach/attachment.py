"""Routing a network that is not ours: `attach(network, routes)`, through forward hooks and nothing else.

`Attachment` decides which tokens stay in a forward pass; the hooks of attach/hooks.py carry it out at the blocks.

Shapes: B batch, N image tokens, K kept of them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from extras.attach.adapters import Adapter, ImageTokens, find_adapter
from extras.attach.hooks import BlockHooks, Plan, argument_names, check_thread
from extras.attach.presets import as_routes
from routing_module import SELECTIONS, Route, SelectionRule, TokenRouter, apply_rule, num_kept_tokens, uniform_scores

NO_BACKWARD = -1  # what torch calls the backward pass that runs when none does


def current_backward() -> int:
    """The number of the backward pass that is running; NO_BACKWARD outside of one and in compiled code."""
    return NO_BACKWARD if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


@dataclass(frozen=True)
class RouteStatistics:
    """What the last routed forward pass did; counts are of image tokens."""

    num_tokens: int  # N
    num_requested: tuple[int, ...]  # K of every route by its selection ratio alone
    num_kept: tuple[int, ...]  # K of every route as it was, which may be larger because of force_keep
    requested_saving: float  # share of all passes of image tokens through blocks that the ratios would skip
    saving: float  # share that was skipped: the step gets cheaper by about this much, more where attention dominates


class Attachment:
    """The routes of one network; what `attach` returns.

    It lives in the hooks of the network: a deep copy of the network has an `Attachment` of its own (`attached(copy)`).

    Attributes:
        adapter: how the network is built.
        router: the routes, with absolute indices.
        rule: which tokens stay, by their scores.
        shared: whether one subset serves the whole batch.
        generator: source of the random numbers; None is torch's default.
    """

    # Forward passes that may wait for their backward pass at the same time, under gradient checkpointing by others.
    NUM_REMEMBERED = 64

    def __init__(self, network: nn.Module, adapter: Adapter, router: TokenRouter, rule: SelectionRule, shared: bool, generator):
        self.adapter, self.router, self.rule = adapter, router, rule
        self.shared, self.generator = shared, generator
        self._forget_passes()

        embedding = network.get_submodule(adapter.tokens_from)
        self.embedding_arguments = argument_names(embedding)
        if adapter.tokens_from:
            self.handles = [
                network.register_forward_pre_hook(self._before_network),
                embedding.register_forward_hook(self._after_embedding, with_kwargs=True),
            ]
        else:
            self.handles = [embedding.register_forward_pre_hook(self._after_embedding, with_kwargs=True)]
        blocks = [(spec, inner_module(block)) for spec in adapter.blocks for block in getattr(network, spec.attribute)]
        for layer, (spec, block) in enumerate(blocks):
            hooks = BlockHooks(self, layer, spec, argument_names(block))
            self.handles.append(block.register_forward_pre_hook(hooks.before_block, with_kwargs=True))
            self.handles.append(block.register_forward_hook(hooks.after_block, with_kwargs=True, always_call=True))

    def _forget_passes(self) -> None:
        """Start as if the network had never run."""
        self.ratios_now: tuple[float, ...] | None = None  # inside `routed()`
        self.forced: Tensor | None = None  # inside `force_keep()`: (B, N) bool
        self.num_forced = 0
        self.pending: bool | None = None  # the network has been called, its embedding not yet: True where it should route
        self.plan: Plan | None = None  # of the forward pass that began last
        self.bound: Plan | None = None  # inside a block that `checkpoint()` runs
        self.last: Plan | None = None  # the last plan that routes
        self.recent: deque[Plan] = deque(maxlen=self.NUM_REMEMBERED)
        self.recomputed: tuple[Plan, int, int] | None = None  # plan, block and backward pass of the last block that ran again
        self.begun_in = NO_BACKWARD  # the backward pass in which the embedding ran last: it recomputes the whole network

    def __getstate__(self) -> dict:
        """Copies and pickles know of no pass that is under way."""
        fresh = object.__new__(Attachment)
        fresh._forget_passes()
        return self.__dict__ | fresh.__dict__

    # ------------------------------------------------------------------------------------------------------------------
    # For users.

    def detach(self) -> None:
        """Remove every hook; the network is as it was. Calling it again does nothing."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self._forget_passes()
        forget_compiled()

    @contextmanager
    def routed(self, selection_ratios: float | Sequence[float] | None = None) -> Iterator[None]:
        """Inside, route in evaluation mode and without gradients too: for sparse guidance (arXiv 2601.01608).

        Args:
            selection_ratios: instead of the routes' own: one number, or one per route. 0 switches routing off.
        """
        before, self.ratios_now = self.ratios_now, self.router.selection_ratios(selection_ratios)
        try:
            yield
        finally:
            self.ratios_now = before

    @contextmanager
    def force_keep(self, mask: Tensor | None) -> Iterator[None]:
        """Inside, the tokens of `mask` never skip: masked regions, inpainting, reference images.

        Every sample keeps as many tokens as the sample that forces most; `statistics` reports the saving that is left.
        Wrap the forward pass; the backward pass may be outside.

        Args:
            mask: (B, N), True or non-zero is kept; None forces nothing. Reading it synchronises once with the device.

        Raises:
            ValueError: a mask without values or of another shape; where only N or B is wrong, in the forward pass.
        """
        forced, num_forced = None, 0
        if mask is not None:
            if not isinstance(mask, Tensor) or mask.is_meta:
                raise ValueError(f"force_keep got {type(mask).__name__} without values; it needs a tensor (batch, image tokens)")
            if mask.ndim != 2:
                raise ValueError(f"force_keep has shape {tuple(mask.shape)}; it needs (batch, image tokens)")
            forced = mask != 0
            if self.shared:
                forced = forced.any(dim=0, keepdim=True).expand_as(forced)
            num_forced = int(forced.sum(dim=1).max())
        before = self.forced, self.num_forced
        self.forced, self.num_forced = forced, num_forced
        try:
            yield
        finally:
            self.forced, self.num_forced = before

    def checkpoint(self, function, *args, **kwargs) -> Any:
        """Gradient checkpointing that recomputes each block with the subset of its own forward pass.

        For diffusers: `network.enable_gradient_checkpointing(attachment.checkpoint)`. Its default function works as well,
        as far as `find_plan` can tell the passes apart; this one always can.

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
        return () if self.last is None else tuple(self.last.ids_keep.get(i) for i in range(len(self.last.num_kept)))

    @property
    def statistics(self) -> RouteStatistics | None:
        """Of the last routed forward pass; None before the first."""
        if self.last is None:
            return None
        last, num_tokens = self.last, self.last.image.num_tokens
        num_blocks = [route.end_layer_idx - route.start_layer_idx + 1 for route in self.router.routes]

        def saving(num_kept: Sequence[int]) -> float:
            skipped = sum((num_tokens - kept) * blocks for kept, blocks in zip(num_kept, num_blocks))
            return skipped / (num_tokens * self.router.depth)

        return RouteStatistics(num_tokens, last.num_requested, last.num_kept, saving(last.num_requested), saving(last.num_kept))

    # ------------------------------------------------------------------------------------------------------------------
    # Before the blocks run: plan the forward pass.

    def _should_route(self, module: nn.Module) -> bool:
        return self.ratios_now is not None or (module.training and torch.is_grad_enabled())

    def _before_network(self, module: nn.Module, args: tuple) -> None:
        """Hook of the network: from here on `_after_embedding` must run before the blocks do."""
        self.pending = self._should_route(module)

    def _after_embedding(self, module: nn.Module, args: tuple, kwargs: dict, output: Any = None) -> None:
        """Hook of the embedding: make the plan of the forward pass, and draw all of its random numbers.

        Random numbers that are drawn inside a checkpointed block would be drawn again in its recomputation and would
        desynchronise dropout.
        """
        self.pending = None
        backward = current_backward()
        self.plan = Plan()
        if self._should_route(module):
            image = self.adapter.count_tokens(module, dict(zip(self.embedding_arguments, args)) | kwargs, output)
            ratios = self.router.selection_ratios() if self.ratios_now is None else self.ratios_now
            recomputed = None if backward == NO_BACKWARD else self._find_recomputed_pass(image, ratios)
            self.plan = recomputed or self._make_plan(image, ratios)
        if not torch.compiler.is_compiling():
            self.begun_in = backward
            if torch.is_grad_enabled():
                self.recent.append(self.plan)

    def _make_plan(self, image: ImageTokens, ratios: Sequence[float]) -> Plan:
        B, N = image.batch, image.num_tokens
        if self.forced is not None and self.forced.shape != (B, N):
            raise ValueError(f"force_keep has shape {tuple(self.forced.shape)}; the network has {(B, N)} image tokens")
        requested = tuple(num_kept_tokens(N, ratio) for ratio in ratios)
        kept = tuple(max(num_kept, self.num_forced) for num_kept in requested)
        self.last = plan = Plan(image, requested, kept, in_evaluation=self.ratios_now is not None)
        for i in range(len(ratios)):
            if plan.is_on(i):
                plan.uniform[i] = self._draw(image)
                if self.rule is uniform_scores:
                    self.choose_ids_keep(plan, i)
        return plan

    def _draw(self, image: ImageTokens) -> Tensor:
        batch = 1 if self.shared else image.batch
        return torch.rand(batch, image.num_tokens, device=image.device, generator=self.generator)

    def choose_ids_keep(self, plan: Plan, route: int, tokens: Tensor | None = None) -> None:
        """Choose the tokens that stay in a route.

        Args:
            tokens: (B, N, D), the image tokens that arrive at its first block; the uniform rule needs none.
        """
        scores = plan.uniform[route]
        if tokens is not None:
            scores = apply_rule(self.rule, tokens, scores.to(tokens.device).expand(len(tokens), -1))
            if self.shared:
                scores = scores.mean(dim=0, keepdim=True)
        scores = scores.expand(plan.image.batch, -1)
        if self.forced is not None:
            scores = scores.masked_fill(self.forced.to(scores.device), torch.inf)
        plan.ids_keep[route] = TokenRouter.keep_highest(scores, plan.num_kept[route])  # (B, K)

    # ------------------------------------------------------------------------------------------------------------------
    # While the blocks run: find the plan of the forward pass, also when a backward pass runs them again.

    def _find_recomputed_pass(self, image: ImageTokens, ratios: Sequence[float]) -> Plan | None:
        """The plan of the pass that runs again in this backward pass, embedding included; None where nothing is routed.

        The checkpoint has restored the state of the generator, so the first random numbers identify the pass. A new plan
        from them would not do: `force_keep` and `routed` may have ended before the backward pass.

        Raises:
            RuntimeError: no pass drew these numbers.
        """
        if all(num_kept_tokens(image.num_tokens, ratio) == image.num_tokens for ratio in ratios):
            return None
        reason = (
            "its generator would draw other tokens; attach(..., generator=None), whose random numbers the checkpoint restores"
        )
        if self.generator is None:
            reason = "which tokens it ran with is not known: checkpoint it with use_reentrant=False and preserve_rng_state=True"
            first = self._draw(image)
            for plan in reversed(self.recent):
                drawn = list(plan.uniform.values())
                if drawn and drawn[0].device == first.device and torch.equal(drawn[0], first):
                    for _ in drawn[1:]:
                        self._draw(image)  # dropout that follows is that of the first time
                    return plan
        raise RuntimeError(
            f"the whole network is computed again for the backward pass, and {reason}, "
            "or checkpoint the blocks with the attachment's checkpoint()"
        )

    def find_plan(self, layer: int, tokens: Tensor, training: bool) -> Plan | None:
        """The plan of the forward pass that a block is running in, or running again in.

        A block that runs during a backward pass is being recomputed. Under `checkpoint` its plan is known. Under anybody
        else's checkpointing the block's input, which the checkpoint holds, identifies the pass. Blocks that are recomputed
        as one piece follow their first.

        Raises:
            RuntimeError: recomputed, and the input was moved (offloaded activations), was given to the same block by several
                passes, or the pass is too long ago; or running, and the plan is not of this pass.
        """
        compiling = torch.compiler.is_compiling()
        if self.bound is not None and not compiling:
            return self.bound
        backward = current_backward()
        if backward == NO_BACKWARD:
            if self.pending:
                raise RuntimeError(
                    f"blocks run, but {self.adapter.tokens_from!r}, which attach() counts the tokens by, did not run "
                    "before: another module took its place after attach() (modules_to_save, an adapter that was unloaded). "
                    "detach(), and attach() again"
                )
            plan = None if self.pending is False else self.plan
            if plan is not None and not compiling:
                if plan.image is not None or (training and torch.is_grad_enabled()):
                    check_thread(plan.thread)
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


def forget_compiled() -> None:
    """Drop compiled code: it does not look at hooks again, so new ones would be silently ignored."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def inner_module(module: nn.Module) -> nn.Module:
    """The module that computes, below the wrappers of torch.compile, DDP, FSDP, activation checkpointing and PEFT."""
    while True:
        inner = getattr(module, "_orig_mod", None) or getattr(module, "_checkpoint_wrapped_module", None)
        if isinstance(inner, nn.Module):
            module = inner
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
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
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
    """Route the image tokens of a network (TREAD, section 3) in training mode with gradients; evaluation is untouched.

    Args:
        network: of diffusers, timm or dit.py, or any that `adapter` describes; also inside DDP, torch.compile or PEFT.
            Nothing in it is changed: it gets forward hooks, and `detach` removes them.
        routes: a preset, a SimpleTuner `tread_config`, or routes (see `as_routes`). selection_ratio is the fraction
            that SKIPS; layer indices count through all lists of blocks in order, and may be negative.
        selection: a rule of `routing_module.SELECTIONS`: `uniform` (the paper: a random subset), or `importance` (tokens
            with a large L1-norm stay more often).
        importance_weight: for `importance`: 0 is as random as uniform, 1 keeps exactly the largest; None is 0.5.
        inverse: for `importance`: the smallest stay.
        per_sample: a subset for every sample; False is one subset for the whole batch.
        generator: source of the random numbers, on the device of the tokens; None is torch's default (torch.compile
            cannot trace any other in one graph).
        adapter: describes a network that is not known.

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
    rule = partial(SELECTIONS[selection], inverse=True) if inverse else SELECTIONS[selection]
    if importance_weight is not None:
        if not 0 <= importance_weight <= 1:
            raise ValueError(f"importance_weight={importance_weight} must be in [0, 1]: 0 is random, 1 keeps the largest norms")
        rule = partial(rule, weight=importance_weight)
    network = inner_module(network)
    if attached(network) is not None:
        raise ValueError(f"{type(network).__name__} is routed already; detach() first: attached(network).detach()")
    adapter = adapter or find_adapter(network)
    if adapter.obstacle and (obstacle := adapter.obstacle(network)):
        raise ValueError(f"this {type(network).__name__} cannot be routed: {obstacle}")
    check_adapter(network, adapter)
    router = TokenRouter(routes, depth=sum(len(getattr(network, spec.attribute)) for spec in adapter.blocks))
    attachment = Attachment(network, adapter, router, rule, not per_sample, generator)
    forget_compiled()
    return attachment


def check_adapter(network: nn.Module, adapter: Adapter) -> None:
    """Raises a ValueError if the network lacks what the adapter names, as in another version of the library."""
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
            missing = [argument for argument in (spec.argument, *(axis.argument for axis in spec.axes)) if argument not in names]
            if missing:
                raise ValueError(
                    f"{type(block).__name__} takes {', '.join(names)} and no {missing[0]!r}; "
                    f"the adapter of {name} does not fit this version"
                )
