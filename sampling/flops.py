"""FLOPs of a network's matrix products (dit.py, lightningdit.py), from its sizes. A multiply-add is 2 FLOPs.

Norms, activations, modulation and softmax are not counted, as is usual.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

import dit
from routing_module import TokenRouter, num_kept_tokens


def forward_flops(net: dit.DiT, selection_ratios: float | Sequence[float] | None = 0.0, router: TokenRouter | None = None) -> int:
    """FLOPs of one forward for one image.

    Args:
        selection_ratios: fraction of the tokens that SKIP, one for all routes or one for each. 0 is dense, as in sampling;
            None takes the routes' own, as in training.
        router: instead of the network's.
    """
    router = router or net.router
    N, D = net.num_tokens, net.pos_embed.shape[-1]
    tokens = [N] * len(net.blocks)  # that each block sees
    for route, ratio in zip(router.routes, router.selection_ratios(selection_ratios)):
        for i in range(route.start_layer_idx, route.end_layer_idx + 1):
            tokens[i] = num_kept_tokens(N, ratio)

    conv, final = net.x_embedder.proj, net.final_layer
    patch_embedding = 2 * N * D * conv.in_channels * conv.kernel_size[0] * conv.kernel_size[1]
    conditioning = 2 * sum(layer.weight.numel() for layer in (net.t_embedder.mlp[0], net.t_embedder.mlp[2]))
    blocks = sum(block_flops(block, K) for block, K in zip(net.blocks, tokens))
    output = 2 * final.adaLN_modulation[1].weight.numel() + 2 * N * final.linear.weight.numel()
    return patch_embedding + conditioning + blocks + output


def block_flops(block: dit.DiTBlock, num_tokens: int) -> int:
    """FLOPs of one block for `num_tokens` tokens of one image."""
    per_token = [layer for part in (block.attn, block.mlp) for layer in part.modules() if isinstance(layer, nn.Linear)]
    linear = 2 * num_tokens * sum(layer.weight.numel() for layer in per_token)
    attention = 2 * 2 * num_tokens**2 * block.attn.proj.in_features  # Q K^T, and its product with V
    return linear + attention + 2 * block.adaLN_modulation[1].weight.numel()


def step_flops(net: dit.DiT) -> int:
    """FLOPs of one image in training, with the network's own routes.

    For each product of the forward, the backward computes two: for the gradients of the input and of the weight.
    """
    return 3 * forward_flops(net, None)
