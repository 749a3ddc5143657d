"""Token routing for a network from another library. `attach(network, routes)` only registers forward hooks.

`Attachment` chooses the tokens to keep in a forward pass. Block hooks (hooks.py) remove and restore the other tokens.

Shapes: B = batch size, N = number of image tokens, K = number of kept image tokens.
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
from extras.attach.hooks import BlockHooks, ForwardPlan, argument_names
from routing_module import Route, SelectionRule, TokenRouter, build_rule, num_kept_tokens, uniform_noise, uniform_scores

# Maps the name of each wrapper class to the attribute that contains the wrapped module.
WRAPPED = {
    "OptimizedModule": "_orig_mod",  # torch.compile
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DistributedDataParallel": "module",
    "PeftModel": "base_model",
    "BaseTuner": "model",  # a PEFT class
}


class Attachment:
    """The routes and hooks of one network, as returned by `attach`. `router.routes` lists the routes with non-negative indices.

    A deep copy of the network has its own attachment, which `attached(copy)` returns.
    """

    def __init__(self, network: nn.Module, adapter: Adapter, routes: Sequence[Route], rule: SelectionRule, generator):
        self.network = network
        self.adapter = adapter
        self.rule = rule
        self.generator = generator
        self.forced_ratios: tuple[float, ...] | None = None  # set inside `routed()`
        self.plan: ForwardPlan | None = None  # plan of the latest forward pass, None until the embedding runs
        self.recomputed_plan: ForwardPlan | None = None  # set while `checkpoint()` recomputes
        blocks = [(listed, inner_module(block)) for listed in adapter.blocks for block in getattr(network, listed.attribute)]
        self.router = TokenRouter(routes, depth=len(blocks))

        routed = []
        for route_idx, route in enumerate(self.router.routes):
            for layer in range(route.start_layer_idx, route.end_layer_idx + 1):
                block_list, block = blocks[layer]
                names = argument_names(block)
                missing = {block_list.argument, *(axis.argument for axis in block_list.axes)} - set(names)
                if missing:
                    raise ValueError(f"{type(block).__name__} has no argument {missing}; it has {', '.join(names)}")
                routed.append((block, BlockHooks(self, layer, route_idx, block_list, names)))

        embedding = network.get_submodule(adapter.tokens_from)
        self.embedding_arguments = argument_names(embedding)
        register = embedding.register_forward_hook if adapter.tokens_from else embedding.register_forward_pre_hook
        self.handles = [network.register_forward_pre_hook(self._before_network)]
        self.handles.append(register(self._make_plan, with_kwargs=True))
        for block, hooks in routed:
            self.handles.append(block.register_forward_pre_hook(hooks.before_block, with_kwargs=True))
            self.handles.append(block.register_forward_hook(hooks.after_block, with_kwargs=True, always_call=True))
        reset_compiled_code()

    def detach(self) -> None:
        """Remove all hooks, which restores the original network. Calling `detach` again has no effect."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        reset_compiled_code()

    @contextmanager
    def routed(self, selection_ratios: float | Sequence[float] | None = None) -> Iterator[None]:
        """Context manager that also routes in evaluation mode and without gradients, for sparse guidance (arXiv 2601.01608).

        `selection_ratios` overrides the ratios of all routes, with one number or one number per route. 0 disables routing.
        """
        before, self.forced_ratios = self.forced_ratios, self.router.selection_ratios(selection_ratios)
        try:
            yield
        finally:
            self.forced_ratios = before

    def checkpoint(self, function, *args, **kwargs) -> Any:
        """Run gradient checkpointing, and recompute each block with the same tokens as in its forward pass.

        With diffusers, call `network.enable_gradient_checkpointing(attachment.checkpoint)`. Any other checkpoint function causes
        a RuntimeError in the backward pass, or wrong gradients if it is called around compiled blocks. With torch.compile, set
        `torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True`.
        """
        if torch.compiler.is_compiling():  # compiled code recomputes from the tensors that it saved
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        plans = []  # the plan of the forward pass, which `function` may create itself

        def run(*args, **kwargs):
            if not plans:
                output = function(*args, **kwargs)
                plans.append(self.plan if self.recomputed_plan is None else self.recomputed_plan)
                return output
            before, self.recomputed_plan = self.recomputed_plan, plans[0]
            try:
                return function(*args, **kwargs)
            finally:
                self.recomputed_plan = before

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    @property
    def ids_keep(self) -> tuple[Tensor | None, ...]:
        """Return the kept image positions of the last forward pass, (B, K) per route. The entry of an inactive route is None."""
        ids_keep = self.plan.ids_keep if self.plan else {}
        return tuple(ids_keep.get(i) for i in range(len(self.router.routes)))

    def _before_network(self, module: nn.Module, args: tuple) -> None:
        """Network pre-hook: reset the plan, so that blocks raise an error if the embedding hook does not create a new plan."""
        self.plan = None

    def _make_plan(self, module: nn.Module, args: tuple, kwargs: dict, output: Any = None) -> None:
        """Hook at `Adapter.tokens_from`: create the plan of the forward pass, and draw all random numbers that its routes need.

        Drawing random numbers in a checkpointed block could change the block's dropout masks during recomputation.
        """
        self.plan = ForwardPlan()
        # The network's mode counts, because peft's layer on an embedding can be in another mode. It is read here, because methods
        # such as `network.features(x)` do not run `_before_network`.
        if self.forced_ratios is None and not (self.network.training and torch.is_grad_enabled()):
            return
        image = self.adapter.count_tokens(dict(zip(self.embedding_arguments, args)) | kwargs, output)
        ratios = self.router.selection_ratios() if self.forced_ratios is None else self.forced_ratios
        num_kept = tuple(num_kept_tokens(image.num_tokens, ratio) for ratio in ratios)
        self.plan = plan = ForwardPlan(image, num_kept, in_evaluation=self.forced_ratios is not None)
        for route_idx in filter(plan.is_active, range(len(ratios))):
            noise = uniform_noise(image.batch, image.num_tokens, device=image.device, generator=self.generator)
            plan.noise[route_idx] = noise
            if self.rule is uniform_scores:
                self.choose_ids_keep(plan, route_idx)

    def choose_ids_keep(self, plan: ForwardPlan, route_idx: int, tokens: Tensor | None = None) -> None:
        """Choose a route's kept tokens. All rules except `uniform` need the image tokens (B, N, D) before the window."""
        ids_keep = TokenRouter.keep_highest(self.rule, tokens, plan.noise[route_idx], plan.num_kept[route_idx])
        plan.ids_keep[route_idx] = ids_keep  # (B, K)

    def find_plan(self, layer: int) -> ForwardPlan:
        """Return the plan of a block's forward pass, even if a backward pass recomputes the block."""
        if self.recomputed_plan is not None:
            return self.recomputed_plan
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:  # a backward pass is running
            raise RuntimeError(f"the backward pass recomputes block {layer}; checkpoint blocks with attachment.checkpoint")
        if self.plan is None:
            reason = f"block {layer} runs, but {self.adapter.tokens_from!r} did not run before it"
            raise RuntimeError(f"{reason}; if it was replaced after attach(), detach() and attach() again")
        return self.plan


def reset_compiled_code() -> None:
    """Discard code that torch.compile has compiled, because it would silently ignore new hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def inner_module(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers of torch.compile, DDP, activation checkpointing and PEFT."""
    for cls in type(module).__mro__:
        if cls.__name__ in WRAPPED:
            return inner_module(getattr(module, WRAPPED[cls.__name__]))
    return module


def attached(network: nn.Module) -> Attachment | None:
    """Return the attachment of a network or of a deep copy, or None if the network has no attachment."""
    owners = (getattr(hook, "__self__", None) for hook in inner_module(network)._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, Attachment)), None)


def attach(
    network: nn.Module,
    routes: Sequence[Route],
    *,
    selection: str | SelectionRule = "uniform",
    generator: torch.Generator | None = None,
    adapter: Adapter | None = None,
) -> Attachment:
    """Route the image tokens of a network (TREAD, section 3). Routes are active only in training mode with gradients enabled.

    Args:
        network: Network that `ADAPTERS` or `adapter` describes. DDP, torch.compile or PEFT may wrap the network. `attach` only
            registers forward hooks, which `detach` removes.
        routes: Routes to add. selection_ratio is the fraction of tokens that SKIP. Layer indices count blocks across all lists
            and may be negative.
        selection: Rule that chooses the kept tokens. `uniform` keeps a random subset, as in the paper. `importance` prefers
            tokens with a large L1 norm. A `SelectionRule` is also accepted, such as `partial(importance_scores, weight=1.0)` or
            `GridRule(32, 48)`, which needs the size of the token grid.
        generator: Generator on the tokens' device. torch.compile can trace only torch's default generator (None) in one graph.

    Unlike in TREAD (section 4), the block after a route runs in the same precision as the other blocks under autocast.

    Raises:
        ValueError: If the routes do not fit the network's depth, if the network cannot be routed, or if `selection` is `grid`.
        KeyError: If the name of the selection rule is unknown.
    """
    network = inner_module(network)
    if attached(network):
        raise ValueError(f"{type(network).__name__} is routed already; call attached(network).detach() first")
    if own_routes := getattr(getattr(network, "router", None), "routes", ()):  # a dit.DiT
        raise ValueError(f"{type(network).__name__} has router.routes={own_routes} already; build it without routes")
    return Attachment(network, adapter or find_adapter(network), routes, build_rule(selection), generator)
