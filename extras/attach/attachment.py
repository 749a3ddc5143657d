"""Routing a network of another library: `attach(network, routes)` only adds forward hooks.

`Attachment` decides which tokens stay in a forward pass. The hooks in hooks.py shorten and restore the tokens at the blocks.

Shapes: B batch, N image tokens, K kept image tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from extras.attach.adapters import Adapter, find_adapter
from extras.attach.hooks import BlockHooks, Plan, argument_names
from routing_module import SELECTIONS, Route, SelectionRule, TokenRouter, apply_rule, num_kept_tokens, uniform_scores

# Class names of wrappers, and the attribute that holds the wrapped module.
WRAPPED = {
    "OptimizedModule": "_orig_mod",  # torch.compile
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DistributedDataParallel": "module",
    "PeftModel": "base_model",
    "BaseTuner": "model",  # of PEFT
}


class Attachment:
    """The routes of one network, as `attach` returns them. `router.routes` holds them with absolute indices.

    A deep copy of the network has its own attachment, `attached(copy)`.
    """

    def __init__(self, network: nn.Module, adapter: Adapter, routes: Sequence[Route], rule: SelectionRule, generator):
        self.adapter, self.rule, self.generator = adapter, rule, generator
        self.ratios_now: tuple[float, ...] | None = None  # inside `routed()`
        self.plan: Plan | None = None  # of the current or last forward pass, None before its embedding
        self.recomputed: Plan | None = None  # inside a block that `checkpoint()` runs
        blocks = [(spec, inner_module(block)) for spec in adapter.blocks for block in getattr(network, spec.attribute)]
        self.router = TokenRouter(routes, depth=len(blocks))

        routed = []
        for i, route in enumerate(self.router.routes):
            for layer in range(route.start_layer_idx, route.end_layer_idx + 1):
                spec, block = blocks[layer]
                names = argument_names(block)
                missing = {spec.argument, *(axis.argument for axis in spec.axes)} - set(names)
                if missing:
                    raise ValueError(f"{type(block).__name__} has no argument {missing}; it has {', '.join(names)}")
                routed.append((block, BlockHooks(self, layer, i, spec, names)))

        embedding = network.get_submodule(adapter.tokens_from)
        self.embedding_arguments = argument_names(embedding)
        register = embedding.register_forward_hook if adapter.tokens_from else embedding.register_forward_pre_hook
        self.handles = [network.register_forward_pre_hook(self._before_network)]
        self.handles.append(register(self._after_embedding, with_kwargs=True))
        for block, hooks in routed:
            self.handles.append(block.register_forward_pre_hook(hooks.before_block, with_kwargs=True))
            self.handles.append(block.register_forward_hook(hooks.after_block, with_kwargs=True, always_call=True))
        forget_compiled()

    def detach(self) -> None:
        """Remove every hook, which restores the network. A second call does nothing."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        forget_compiled()

    @contextmanager
    def routed(self, selection_ratios: float | Sequence[float] | None = None) -> Iterator[None]:
        """Inside the context, also route in evaluation mode and without gradients: for sparse guidance (arXiv 2601.01608).

        `selection_ratios` replaces the routes' own ratios: one number, or one per route. 0 switches routing off.
        """
        before, self.ratios_now = self.ratios_now, self.router.selection_ratios(selection_ratios)
        try:
            yield
        finally:
            self.ratios_now = before

    def checkpoint(self, function, *args, **kwargs) -> Any:
        """Gradient checkpointing that recomputes each block with the tokens of its forward pass.

        For diffusers: `network.enable_gradient_checkpointing(attachment.checkpoint)`. With other checkpoint functions, the
        backward pass raises a RuntimeError.
        Under torch.compile, set `torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True`.
        """
        if torch.compiler.is_compiling():  # the compiler recomputes from what it kept
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        plan = self.plan

        def run(*args, **kwargs):
            before, self.recomputed = self.recomputed, plan
            try:
                return function(*args, **kwargs)
            finally:
                self.recomputed = before

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    @property
    def ids_keep(self) -> tuple[Tensor | None, ...]:
        """Return the image tokens that stayed in the last forward pass, (B, K) per route. None for a route that was off."""
        ids_keep = self.plan.ids_keep if self.plan else {}
        return tuple(ids_keep.get(i) for i in range(len(self.router.routes)))

    def _before_network(self, module: nn.Module, args: tuple) -> None:
        """Hook of the network: forget the last plan, so that blocks raise an error if the embedding makes no new plan."""
        self.plan = None

    def _after_embedding(self, module: nn.Module, args: tuple, kwargs: dict, output: Any = None) -> None:
        """Hook of the embedding: make the plan of the forward pass, and draw all of its random numbers.

        If a checkpointed block drew them, its recomputation would draw again and get other dropout masks.
        """
        self.plan = Plan()
        if self.ratios_now is None and not (module.training and torch.is_grad_enabled()):
            return
        image = self.adapter.count_tokens(dict(zip(self.embedding_arguments, args)) | kwargs, output)
        ratios = self.router.selection_ratios() if self.ratios_now is None else self.ratios_now
        num_kept = tuple(num_kept_tokens(image.num_tokens, ratio) for ratio in ratios)
        self.plan = plan = Plan(image, num_kept, in_evaluation=self.ratios_now is not None)
        for i in filter(plan.is_on, range(len(ratios))):
            plan.uniform[i] = torch.rand(image.batch, image.num_tokens, device=image.device, generator=self.generator)
            if self.rule is uniform_scores:
                self.choose_ids_keep(plan, i)

    def choose_ids_keep(self, plan: Plan, route: int, tokens: Tensor | None = None) -> None:
        """Choose the tokens that stay in a route. Rules other than uniform need the tokens (B, N, D) that arrive at it."""
        scores = plan.uniform[route]
        if tokens is not None:
            scores = apply_rule(self.rule, tokens, scores)
        plan.ids_keep[route] = TokenRouter.keep_highest(scores, plan.num_kept[route])  # (B, K)

    def find_plan(self, layer: int) -> Plan:
        """Return the plan of a block's forward pass, also if a backward pass recomputes the block."""
        if not torch.compiler.is_compiling():
            if self.recomputed is not None:
                return self.recomputed
            if torch._C._current_graph_task_id() != -1:  # a backward pass is running
                raise RuntimeError(f"the backward pass recomputes block {layer}; checkpoint blocks with attachment.checkpoint")
        if self.plan is None:
            reason = f"block {layer} runs, but {self.adapter.tokens_from!r} did not run before it"
            raise RuntimeError(f"{reason}; if it was replaced after attach(), detach() and attach() again")
        return self.plan


def forget_compiled() -> None:
    """Drop compiled code, which would silently ignore new hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def inner_module(module: nn.Module) -> nn.Module:
    """Unwrap a module from torch.compile, DDP, activation checkpointing and PEFT."""
    for cls in type(module).__mro__:
        if cls.__name__ in WRAPPED:
            return inner_module(getattr(module, WRAPPED[cls.__name__]))
    return module


def attached(network: nn.Module) -> Attachment | None:
    """Return the attachment of a network or of its deep copy, or None."""
    hooks = inner_module(network)._forward_pre_hooks.values()
    return next((hook.__self__ for hook in hooks if isinstance(getattr(hook, "__self__", None), Attachment)), None)


def attach(
    network: nn.Module,
    routes: Sequence[Route],
    *,
    selection: str | SelectionRule = "uniform",
    generator: torch.Generator | None = None,
    adapter: Adapter | None = None,
) -> Attachment:
    """Route the image tokens of a network (TREAD, section 3) in training mode with gradients. Evaluation does not change.

    Args:
        network: one of `ADAPTERS`, or any that `adapter` describes. It may be inside DDP, torch.compile or PEFT. It gets forward
            hooks, which `detach` removes. Nothing else changes.
        routes: selection_ratio is the fraction that SKIPS. Layer indices count through all lists of blocks in order, and may be
            negative.
        selection: which tokens stay: `uniform` (the paper: a random subset), `importance` (tokens with a large L1 norm stay
            more often), or a `SelectionRule`, such as `partial(importance_scores, weight=1.0)`.
        generator: on the device of the tokens. None is torch's default, the only one that torch.compile traces in one graph.

    Differs from TREAD, section 4: under autocast, the block right after a route runs in the same precision as the others.

    Raises:
        ValueError: routes that do not fit the network's depth, or a network that cannot be routed.
        KeyError: an unknown selection.
    """
    network = inner_module(network)
    if attached(network):
        raise ValueError(f"{type(network).__name__} is routed already; call attached(network).detach() first")
    if routes_of_its_own := getattr(getattr(network, "router", None), "routes", ()):  # dit.DiT
        raise ValueError(f"{type(network).__name__} has router.routes={routes_of_its_own} already; build it without routes")
    rule = SELECTIONS[selection] if isinstance(selection, str) else selection
    return Attachment(network, adapter or find_adapter(network), routes, rule, generator)
