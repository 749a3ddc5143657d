"""Count the FLOPs of the matrix products in dit.py and lightningdit.py. A multiply-add counts as 2 FLOPs.

By convention, the FLOPs of norms, activation functions, elementwise modulation and softmax are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

import dit
from routing_module import num_kept_tokens


def forward_flops(net: dit.DiT, selection_ratios: float | Sequence[float] | None = 0.0) -> int:
    """Compute the FLOPs of one forward pass for one image.

    Args:
        selection_ratios: Fraction of tokens that SKIP a window, as one number for all routes or one number per route. With 0, no
            token skips, as in sampling. With 1, all tokens skip. With None, each route uses its own ratio, as in training.
    """
    N, D = net.num_tokens, net.pos_embed.shape[-1]
    conv, final = net.x_embedder.proj, net.final_layer
    patch_embedding = 2 * N * D * conv.in_channels * conv.kernel_size[0] * conv.kernel_size[1]
    conditioning = 2 * sum(layer.weight.numel() for layer in (net.t_embedder.mlp[0], net.t_embedder.mlp[2]))
    tokens = [N] * len(net.blocks)
    for route, ratio in zip(net.router.routes, net.router.selection_ratios(selection_ratios)):
        for i in range(route.start_layer_idx, route.end_layer_idx + 1):
            tokens[i] = num_kept_tokens(N, ratio)
    blocks = sum(block_flops(block, num_tokens) for block, num_tokens in zip(net.blocks, tokens) if num_tokens)
    blocks += sum(2 * N * layer.weight.numel() for layer in net.route_end_modules.modules() if isinstance(layer, nn.Linear))
    output = 2 * final.adaLN_modulation[1].weight.numel() + 2 * N * final.linear.weight.numel()
    return patch_embedding + conditioning + blocks + output


def block_flops(block: dit.DiTBlock, num_tokens: int) -> int:
    """Compute the FLOPs of one block for `num_tokens` tokens of one image."""
    linear = [layer for name, layer in block.named_modules() if isinstance(layer, nn.Linear) and "adaLN" not in name]
    attention = 2 * 2 * num_tokens**2 * block.attn.proj.in_features  # Q K^T, and the product of the attention weights and V
    return 2 * num_tokens * sum(x.weight.numel() for x in linear) + attention + 2 * block.adaLN_modulation[1].weight.numel()
