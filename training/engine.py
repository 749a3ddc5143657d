"""What may be done to a network's blocks to trade memory, compilation and time; values and parameter names stay."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import dit

# The results that `selective` keeps: matrix products and attention, which are slow to compute again. The rest (norms,
# modulation, activations) is most of the memory and little of the time.
_KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def checkpoint_activations(net: dit.DiT, what: str) -> None:
    """Have the backward compute again what the forward then need not keep.

    Args:
        what: `none`; `blocks` keeps the input of every block alone, for about a third more time; `selective` keeps matrix
            products and attention too (with compile=blocks, which hides them, it is the same as `blocks`).
    """
    if what == "none":
        return
    # Nothing in a block is random, so that there is no generator to rewind.
    settings = {"use_reentrant": False, "preserve_rng_state": False}
    if what == "selective":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(_KEPT))
    for block in net.blocks:
        block.forward = _checkpointed(block.forward, settings)


def _checkpointed(forward: Callable[..., Tensor], settings: dict) -> Callable[..., Tensor]:
    def checkpointed_forward(x: Tensor, c: Tensor) -> Tensor:
        return checkpoint(forward, x, c, **settings)

    return checkpointed_forward


def compile_network(net: dit.DiT, mode: str) -> None:
    """torch.compile, for the shapes of this run alone. It comes before `checkpoint_activations`.

    Args:
        mode: `none`; `blocks` compiles a block once for all that see as many tokens, soon done; any other is torch.compile's
            own, for the network as a whole.
    """
    if mode == "blocks":
        for block in net.blocks:
            block.forward = torch.compile(block.forward, dynamic=False, fullgraph=True)
    elif mode != "none":
        net.compile(mode=mode, dynamic=False)
