"""LightningDiT (arXiv 2501.01423): DiT with rotary positions, RMSNorm and SwiGLU, with the same routes as DiT.

Parameter names are those of hustvl/LightningDiT, so that published state dicts load with strict=True. It has only the options
of the published weights: rotary positions, RMSNorm, SwiGLU, modulation with a shift, no normalisation of queries and keys.

Shapes: B batch, N tokens of a square grid, K tokens that a block sees, D width, H heads, d = D/H.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dit import SIZES, Attention, DiT, DiTBlock, look_up_sizes, sincos_1d

# name: (depth, width, heads, patch size), the sizes of DiT. XS is ours, for the embedded digits.
BACKBONES = {f"LightningDiT-{size}/{patch}": (*SIZES[size], patch) for size in ("XS", "B", "L", "XL") for patch in (1, 2)}


def build(backbone: str, **kwargs) -> LightningDiT:
    """Build a network by name, such as `LightningDiT-XL/1`. Other keywords override the sizes of the name."""
    return LightningDiT(**look_up_sizes(backbone, BACKBONES) | kwargs)


def rotary_tables(grid_size: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles for `rotate`, each (N, d), row-major.

    The row turns the first half of the channels, the column the second half. In each half of d/2 channels, channels 2i and
    2i + 1 form a pair with the angle position x 10000^(-2i / (d/2)).
    """
    axes = torch.meshgrid(torch.arange(grid_size), torch.arange(grid_size), indexing="ij")  # rows, columns
    halves = [sincos_1d(axis.flatten(), head_width // 2).float().chunk(2, dim=1) for axis in axes]  # sines, cosines (N, d/4)
    sin, cos = (torch.cat(parts, dim=1).repeat_interleave(2, dim=1) for parts in zip(*halves))
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair of neighbouring channels: (a, b) -> (a cos - b sin, b cos + a sin), in the precision of the tables."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack([-b, a], dim=-1).flatten(-2) * sin


class RotaryAttention(Attention):
    """Multi-head self-attention with rotary positions."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, K, D), (B or 1, K, d) twice -> (B, K, D)
        width = x.shape[2]
        qk, v = (part.unflatten(2, (-1, width // self.num_heads)) for part in self.qkv(x).split([2 * width, width], dim=2))
        q, k = rotate(qk, cos.unsqueeze(2), sin.unsqueeze(2)).type_as(v).chunk(2, dim=2)  # (B, K, H, d)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class RMSNorm(nn.RMSNorm):
    """RMSNorm in float32, as in the published code."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).type_as(x)


class SwiGLU(nn.Module):
    """w3(silu(gate) x value), where w12 gives gate and value (arXiv 2002.05202)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.w12 = nn.Linear(width, 2 * hidden)
        self.w3 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, K, D) -> (B, K, D)
        gate, value = self.w12(x).chunk(2, dim=2)
        return self.w3(F.silu(gate) * value)


class LightningDiTBlock(DiTBlock):
    """DiT's block with RMSNorm, rotary attention and SwiGLU."""

    def __init__(self, width: int, num_heads: int):
        nn.Module.__init__(self)  # DiT's parts would all be replaced
        self.norm1 = RMSNorm(width, eps=1e-6)
        self.attn = RotaryAttention(width, num_heads)
        self.norm2 = RMSNorm(width, eps=1e-6)
        self.mlp = SwiGLU(width, int(2 / 3 * 4 * width))  # as many weights as DiT's MLP
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, K, D), (B, D), (B or 1, K, d) twice
        return super().forward(x, c, cos, sin)


class LightningDiT(DiT):
    """The network. It has the arguments, the initialisation and the `forward` of DiT.

    The rotary tables are parameters that are not trained, like `pos_embed`. Published state dicts hold buffers of the same names,
    which replace the tables when they are loaded.

    Raises:
        ValueError: as DiT, and for heads whose width is not a multiple of 4.
    """

    block_class = LightningDiTBlock

    def __init__(self, *, input_size: int, patch_size: int, width: int, num_heads: int, **kwargs):
        if width % (4 * num_heads):
            raise ValueError(f"width={width} is no multiple of 4 x num_heads={num_heads}, which rotary positions need")
        super().__init__(input_size=input_size, patch_size=patch_size, width=width, num_heads=num_heads, **kwargs)
        self.final_layer.norm_final = RMSNorm(width, eps=1e-6)
        cos, sin = rotary_tables(input_size // patch_size, width // num_heads)
        self.feat_rope = nn.ParameterDict({"freqs_cos": cos, "freqs_sin": sin}).requires_grad_(False)

    def token_tables(self) -> tuple[Tensor, ...]:
        return self.feat_rope["freqs_cos"][None], self.feat_rope["freqs_sin"][None]  # (1, N, d)
