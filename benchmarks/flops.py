"""Arithmetic of a DiT, from its sizes: multiplications and additions of matrix products, counted separately.

A multiply-add is 2 FLOPs. Norms, activations, modulation and softmax are left out, as is usual.
"""

from __future__ import annotations

import dit
from routing_module import num_kept_tokens

# The backward computes two products (with respect to input and weight) for each one of the forward.
FORWARD_AND_BACKWARD = 3


def forward_flops(net: dit.DiT, *, routed: bool) -> int:
    """FLOPs of one forward for one image.

    Args:
        routed: as in training: blocks in the window of a route see its K kept tokens. False: as in sampling.
    """
    N, D = net.num_tokens, net.pos_embed.shape[-1]
    tokens = [N] * len(net.blocks)  # that each block sees
    for route in net.router.routes if routed else ():
        for i in range(route.start_layer_idx, route.end_layer_idx + 1):
            tokens[i] = num_kept_tokens(N, route.selection_ratio)

    conv = net.x_embedder.proj
    patch_embedding = 2 * N * D * conv.in_channels * conv.kernel_size[0] * conv.kernel_size[1]
    conditioning = 2 * sum(layer.weight.numel() for layer in (net.t_embedder.mlp[0], net.t_embedder.mlp[2]))
    blocks = sum(block_flops(block, K) for block, K in zip(net.blocks, tokens))
    final = net.final_layer
    return (
        patch_embedding
        + conditioning
        + blocks
        + 2 * final.adaLN_modulation[1].weight.numel()
        + 2 * N * final.linear.weight.numel()
    )


def block_flops(block: dit.DiTBlock, num_tokens: int) -> int:
    """FLOPs of one block for one image of which it sees `num_tokens` tokens."""
    per_token = (block.attn.qkv, block.attn.proj, block.mlp.fc1, block.mlp.fc2)
    linear = 2 * num_tokens * sum(layer.weight.numel() for layer in per_token)
    attention = 2 * 2 * num_tokens**2 * block.attn.proj.in_features  # Q K^T, and its product with V
    return linear + attention + 2 * block.adaLN_modulation[1].weight.numel()


def step_flops(net: dit.DiT, *, routed: bool) -> int:
    """FLOPs of one image in training: forward and backward, 3 times the forward."""
    return FORWARD_AND_BACKWARD * forward_flops(net, routed=routed)
