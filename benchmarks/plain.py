"""The step that most published trainers run, for comparison: the same mathematics, none of the engineering."""

from __future__ import annotations

from functools import partial

import torch
from timm.models.vision_transformer import Attention as TimmAttention
from timm.models.vision_transformer import Mlp
from torch import Tensor, nn

import dit
from training.ema import EMA
from training.trainer import Trainer


class PlainBlock(nn.Module):
    """A DiT block as DiT's own code writes it, with the weights of ours: timm's attention and MLP, one operation at a time."""

    def __init__(self, block: dit.DiTBlock):
        super().__init__()
        width = block.attn.proj.in_features
        self.norm1 = block.norm1
        self.attn = TimmAttention(width, block.attn.num_heads, qkv_bias=True)
        self.attn.qkv, self.attn.proj = block.attn.qkv, block.attn.proj
        self.norm2 = block.norm2
        self.mlp = Mlp(width, block.mlp.fc1.out_features, act_layer=partial(nn.GELU, approximate="tanh"))
        self.mlp.fc1, self.mlp.fc2 = block.mlp.fc1, block.mlp.fc2
        self.adaLN_modulation = block.adaLN_modulation

    def forward(self, x: Tensor, c: Tensor) -> Tensor:  # (B, N, D), (B, D) -> (B, N, D)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(self.norm1(x) * (1 + scale_msa.unsqueeze(1)) + shift_msa.unsqueeze(1))
        return x + gate_mlp.unsqueeze(1) * self.mlp(self.norm2(x) * (1 + scale_mlp.unsqueeze(1)) + shift_mlp.unsqueeze(1))


def make_blocks_plain(net: dit.DiT) -> dit.DiT:
    """Give a new network plain blocks; names and values of its parameters stay."""
    net.blocks = nn.ModuleList(PlainBlock(block) for block in net.blocks)
    return net


class PlainEMA(EMA):
    """The same average, one parameter after the other in a Python loop."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        for average, parameter in self._pairs:
            average.mul_(decay).add_(parameter, alpha=1 - decay)


def plain_optimizer(net: nn.Module, train) -> torch.optim.AdamW:
    """The AdamW of train.* that is neither fused nor batched."""
    return torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad],
        lr=train.lr,
        betas=tuple(train.betas),
        weight_decay=train.weight_decay,
        foreach=False,
        fused=False,
    )


def plain_step(trainer: Trainer, micro_batches) -> float:
    """The trainer's step, then the wait for its loss that a progress bar costs."""
    trainer.train_step(micro_batches)
    return trainer.loss_sum.item()
