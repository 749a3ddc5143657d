"""LightningDiT (arXiv 2501.01423), a DiT with rotary positions, RMSNorm and SwiGLU. It supports the same routes as DiT.

Parameter names match hustvl/LightningDiT, so published state dicts load with strict=True. The network has only the options that
the published weights use: rotary positions, RMSNorm, SwiGLU, modulation with a shift, and no query-key normalisation.

Shapes: B = batch size, N = tokens in the square grid, K = tokens that a block receives, D = width, H = heads, d = D/H.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dit import SIZES, Attention, DiT, DiTBlock, look_up_sizes, sincos_1d

# Maps names to (depth, width, heads, patch size). The sizes are from DiT, except XS, which we added for the embedded digits.
BACKBONES = {f"LightningDiT-{size}/{patch}": (*SIZES[size], patch) for size in ("XS", "B", "L", "XL") for patch in (1, 2)}


def build(backbone: str, **kwargs) -> LightningDiT:
    """Build a network by name, such as `LightningDiT-XL/1`. Keyword arguments override the sizes that the name implies."""
    return LightningDiT(**look_up_sizes(backbone, BACKBONES) | kwargs)


def rotary_tables(grid_size: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotation angles for `rotate`, each of shape (N, d) in row-major order.

    Row positions rotate the first half of the channels, and column positions rotate the second half. In each half, which has d/2
    channels, channels 2i and 2i + 1 form a pair that is rotated by the angle position x 10000^(-2i / (d/2)).
    """
    axes = torch.meshgrid(torch.arange(grid_size), torch.arange(grid_size), indexing="ij")  # row and column indices
    halves = [sincos_1d(axis.flatten(), head_width // 2).float().chunk(2, dim=1) for axis in axes]  # sines, cosines (N, d/4)
    sin, cos = (torch.cat(parts, dim=1).repeat_interleave(2, dim=1) for parts in zip(*halves))
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of neighbouring channels, (a, b) -> (a cos - b sin, b cos + a sin), in the precision of the tables."""
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
    """RMSNorm that computes in float32, as the published code does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).type_as(x)


class SwiGLU(nn.Module):
    """A SwiGLU layer (arXiv 2002.05202) that computes w3(silu(gate) x value), where w12 computes both gate and value."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.w12 = nn.Linear(width, 2 * hidden)
        self.w3 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, K, D) -> (B, K, D)
        gate, value = self.w12(x).chunk(2, dim=2)
        return self.w3(F.silu(gate) * value)


class LightningDiTBlock(DiTBlock):
    """A DiT block with RMSNorm, rotary attention and SwiGLU."""

    def __init__(self, width: int, num_heads: int):
        nn.Module.__init__(self)  # skips DiTBlock.__init__, because this class replaces all of its layers
        self.norm1 = RMSNorm(width, eps=1e-6)
        self.attn = RotaryAttention(width, num_heads)
        self.norm2 = RMSNorm(width, eps=1e-6)
        self.mlp = SwiGLU(width, int(2 / 3 * 4 * width))  # gives about as many weights as DiT's MLP
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, K, D), (B, D), (B or 1, K, d) twice
        return super().forward(x, c, cos, sin)


class LightningDiT(DiT):
    """The LightningDiT network. Its arguments, initialisation and `forward` are the same as for DiT.

    Like `pos_embed`, the rotary tables are parameters that are not trained. Published state dicts contain buffers with the same
    names, so loading a published state dict overwrites the rotary tables.

    Raises:
        ValueError: If DiT rejects the arguments, or if the head width is not a multiple of 4.
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
