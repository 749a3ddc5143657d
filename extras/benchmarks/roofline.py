"""What the parts of a training step cost at the peaks that the vendor publishes: nothing overlaps, nothing waits.

A step cannot be faster, and a part that a profiler shows far above its line is the one to look at. With E the elements of
activations (tokens x channels of one block, D wide, H inside the MLP, F into its activation) and s = 2 bytes for each, or 4
in float32:

    products     3 x the forward's FLOPs of linear layers (the backward has two products for each)
    attention    3.5 x the forward's FLOPs (its backward has five products for two: it computes Q K^T again)
    elementwise  of a compiled block, which reads and writes tokens once for each of these; the residual stream is float32:
                 forward   norm (4 + s), residual and norm (8 + 2s), residual (8 + s), activation s (F + H) / D
                 backward  gate (4 + 2s), norm and gate (12 + 3s), norm (12 + s), activation s (2F + H) / D, sums for biases
    float32      all three of the blocks that run in float32: products and attention in TF32, at half of the bfloat16 peak
    AdamW, EMA   28 bytes per parameter (reads it, its gradient and two moments, writes all but the gradient), and 12
    casts        14 bytes per parameter of a product: 6 to round it to bfloat16, 2 + 6 for its gradient

Not counted: communication, embeddings' and rotary tables' traffic, gather and scatter of tokens.
"""

from __future__ import annotations

import re

from torch import nn

import dit
from evaluations.results import markdown_table
from sampling.flops import attention_flops, block_flops, forward_flops, linear_layers, tokens_of_blocks

# TFLOP/s of dense bfloat16 products and TB/s of the memory, from the vendors' data sheets. The whole name must match: a part of
# a GPU (MIG) has no peak.
PEAKS = {
    r"A(100|800).*80GB.*": (312, 2.039), r"A(100|800).*40GB.*": (312, 1.555), r"H100 \d+GB HBM3|H800": (989.4, 3.35),
    r"H200": (989.4, 4.8), r"GH200 .*": (989.4, 4.0), r"H100 PCIe": (756, 2.0), r"H100 NVL": (835, 3.9), r"H200 NVL": (835, 4.8),
    r"B200": (2250, 8.0), r"L4": (121, 0.3), r"L40S": (362, 0.864), r"GeForce RTX 3090": (71, 0.936),
    r"GeForce RTX 4090": (165.2, 1.008), r"GeForce RTX 5090": (209.5, 1.792),
}  # fmt: skip


def peaks_of(name: str) -> tuple[float, float] | None:
    """(bfloat16 FLOP/s, bytes/s) of a device by the name that torch gives it; None where it is not in the table."""
    name = name.removeprefix("NVIDIA ")
    return next((tuple(1e12 * x for x in peaks) for pattern, peaks in PEAKS.items() if re.fullmatch(pattern, name)), None)


def step_parts(
    net: dit.DiT, num_images: int, peaks: tuple[float, float], precision: str = "bf16", num_shards: int = 1
) -> dict[str, float]:
    """Milliseconds of the parts of one step of one process, and their sum.

    Args:
        num_images: in this process.
        num_shards: over which FSDP divides parameters, AdamW and EMA; 1 with DDP.
    """
    flops_per_sec, bytes_per_sec = peaks
    parts = dict.fromkeys(("products", "attention", "elementwise", "float32"), 0.0)
    blocks = list(zip(net.blocks, tokens_of_blocks(net)))
    outside = forward_flops(net, None) - sum(block_flops(*block) for block in blocks)
    parts["products"] = 3 * num_images * outside / flops_per_sec
    for i, (block, K) in enumerate(blocks):
        is_float32 = precision == "fp32" or i in net.fp32_layers
        attention = attention_flops(block, K)
        seconds = {
            "products": 3 * (block_flops(block, K) - attention) / flops_per_sec * (2 if is_float32 else 1),
            "attention": 3.5 * attention / flops_per_sec * (2 if is_float32 else 1),
            "elementwise": elementwise_bytes(block, K, 4 if is_float32 else 2) / bytes_per_sec,
        }
        for name, value in seconds.items():
            parts["float32" if is_float32 else name] += num_images * value
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    parts["AdamW, EMA"] = (28 + 12) * trained / num_shards / bytes_per_sec
    cast = sum(layer.weight.numel() for layer in net.modules() if isinstance(layer, nn.Linear))
    parts["casts"] = 14 * cast / bytes_per_sec if precision == "bf16" else 0.0
    return {name: 1000 * value for name, value in parts.items()} | {"sum": 1000 * sum(parts.values())}


def elementwise_bytes(block: dit.DiTBlock, num_tokens: int, s: int) -> int:
    """Bytes for one image, forward and backward, by the formula above."""
    D, layers, (first, *_, last) = block.attn.proj.in_features, linear_layers(block), linear_layers(block.mlp)
    F, H = first.out_features, last.in_features
    biases = sum(layer.out_features for layer in layers)
    return num_tokens * (D * (48 + 10 * s) + s * (3 * F + 2 * H + biases))


def roofline_table(columns: dict[str, dict[str, float]]) -> str:
    """Markdown, a line for each part and a column for each network."""
    names = list(dict.fromkeys(name for parts in columns.values() for name in parts))
    lines = [[name, *(f"{parts[name]:.3g}" if parts.get(name) else "" for parts in columns.values())] for name in names]
    return markdown_table(["at the device's peaks, ms", *columns], lines)
