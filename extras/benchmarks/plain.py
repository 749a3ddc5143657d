"""The step that most published trainers run, for comparison: the same mathematics, none of the engineering."""

from __future__ import annotations

from functools import partial

import torch
from timm.models.vision_transformer import Attention as TimmAttention
from torch import Tensor

import dit
from training.ema import EMA


def plain_forward(block: dit.DiTBlock, x: Tensor, c: Tensor, *tables: Tensor) -> Tensor:  # (B, N, D), (B, D) -> (B, N, D)
    """A block as DiT's own code writes it, one operation at a time."""
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = block.adaLN_modulation(c).chunk(6, dim=1)
    modulated = block.norm1(x) * (1 + scale_msa.unsqueeze(1)) + shift_msa.unsqueeze(1)
    x = x + gate_msa.unsqueeze(1) * block.attn(modulated, *tables)
    return x + gate_mlp.unsqueeze(1) * block.mlp(block.norm2(x) * (1 + scale_mlp.unsqueeze(1)) + shift_mlp.unsqueeze(1))


def make_blocks_plain(net: dit.DiT) -> None:
    """Give a new network plain blocks, in DiT with timm's attention; names and values of its parameters stay."""
    for block in net.blocks:
        block.forward = partial(plain_forward, block)
        if type(block.attn) is dit.Attention:
            attn = TimmAttention(block.attn.proj.in_features, block.attn.num_heads, qkv_bias=True)
            attn.qkv, attn.proj = block.attn.qkv, block.attn.proj
            block.attn = attn


class PlainEMA(EMA):
    """The same average, one parameter after the other in a Python loop."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        for average, parameter in self._pairs:
            average.mul_(decay).add_(parameter, alpha=1 - decay)


def make_optimizer_plain(optimizer: torch.optim.Optimizer) -> None:
    """Neither fused nor batched. Before its first step."""
    for group in optimizer.param_groups:
        group.update(fused=False, foreach=False)
