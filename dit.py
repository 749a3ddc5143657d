"""DiT with adaLN-Zero (arXiv 2212.09748), with optional token routes (arXiv 2501.04765).

Parameter names are those of facebookresearch/DiT, so that published state dicts load with strict=True.

Shapes: B batch, C H W latent channels, height and width, p patch size, N = HW/p^2 tokens, K kept tokens, D width,
R routes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.randomness import SampleRandom
from routing_module import SELECTIONS, Route, SelectionRule, TokenRouter

# name: (depth, width, heads). S to XL are the sizes of DiT (arXiv 2212.09748, Table 1). XS is our size, for the embedded digits.
SIZES = {"XS": (12, 96, 3), "S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}
PATCH_SIZES = (1, 2, 4, 8)
BACKBONES = {f"DiT-{size}/{patch}": (*SIZES[size], patch) for size in SIZES for patch in PATCH_SIZES}


def build(backbone: str, **kwargs) -> DiT:
    """Build a network by name, such as `DiT-B/2`. Keyword arguments go to `DiT` and override the sizes that the name implies."""
    return DiT(**look_up_sizes(backbone, BACKBONES) | kwargs)


def look_up_sizes(backbone: str, backbones: Mapping[str, tuple[int, int, int, int]]) -> dict[str, int]:
    """Look up depth, width, heads and patch size by name. Raises KeyError for an unknown name."""
    return dict(zip(("depth", "width", "num_heads", "patch_size"), backbones[backbone]))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x (1 + scale) + shift: (B, N, D), (B, D), (B, D) -> (B, N, D)."""
    return torch.addcmul(shift.unsqueeze(1), x, 1 + scale.unsqueeze(1))


def sincos_1d(positions: Tensor, width: int) -> Tensor:
    """(N,) -> (N, width): sines, then cosines, of frequencies 10000^(-i / (width/2))."""
    frequencies = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = positions.double()[:, None] * frequencies  # (N, width/2)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def sincos_2d(grid_size: int, width: int) -> Tensor:
    """(grid_size^2, width), row-major: the first half encodes the column, the second the row (as DiT does)."""
    row, column = torch.meshgrid(torch.arange(grid_size), torch.arange(grid_size), indexing="ij")
    return torch.cat([sincos_1d(column.flatten(), width // 2), sincos_1d(row.flatten(), width // 2)], dim=1).float()


class PatchEmbed(nn.Module):
    """Patches -> tokens, row-major. The parameters form a convolution, as in DiT."""

    def __init__(self, patch_size: int, in_channels: int, width: int):
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, N, D)
        # A matrix product gives tokens that are contiguous in memory. A convolution does not, which slows every block.
        patches = F.pixel_unshuffle(x, self.proj.stride[0])  # (B, C p p, H/p, W/p)
        return F.linear(patches.flatten(2).mT.contiguous(), self.proj.weight.flatten(1), self.proj.bias)


class TimestepEmbedder(nn.Module):
    """Noise level -> vector: 256 sinusoidal features (cosines first), then a two-layer MLP."""

    NUM_FEATURES = 256

    def __init__(self, width: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(self.NUM_FEATURES, width), nn.SiLU(), nn.Linear(width, width))

    @classmethod
    def frequencies(cls, device: torch.device | None = None) -> Tensor:  # (128,)
        half = cls.NUM_FEATURES // 2
        return torch.exp(-math.log(10000) / half * torch.arange(half, dtype=torch.float32, device=device))

    def forward(self, t: Tensor) -> Tensor:  # (B,) -> (B, D)
        angles = t.float()[:, None] * self.frequencies(t.device)  # (B, 128)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=1))


class LabelEmbedder(nn.Module):
    """Class label -> vector. Row `num_classes` is the null class, which means 'no label'."""

    def __init__(self, num_classes: int, width: int):
        super().__init__()
        self.num_classes = num_classes
        self.embedding_table = nn.Embedding(num_classes + 1, width)

    def forward(self, y: Tensor, drop: Tensor | None) -> Tensor:  # (B,), bool (B,) -> (B, D)
        if drop is not None:
            y = y.masked_fill(drop, self.num_classes)
        return self.embedding_table(y)


class Attention(nn.Module):
    """Multi-head self-attention with timm's parameter names."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        # q, k and v are views of one product: with chunk, the backward joins their gradients in a single copy.
        q, k, v = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # heads (B, H, N, D/H)


class DiTBlock(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the conditioning (adaLN-Zero)."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        # timm's Mlp with its parameter names: importing timm would take two thirds of the start-up time.
        fc1, fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, act=nn.GELU("tanh"), fc2=fc2))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor, *tables: Tensor) -> Tensor:  # (B, N, D), (B, D) -> (B, N, D)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = torch.addcmul(x, gate_msa.unsqueeze(1), self.attn(modulate(self.norm1(x), shift_msa, scale_msa), *tables))
        return torch.addcmul(x, gate_mlp.unsqueeze(1), self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp)))


class FinalLayer(nn.Module):
    def __init__(self, width: int, patch_size: int, out_channels: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:  # (B, N, D), (B, D) -> (B, N, p*p*C)
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT(nn.Module):
    """The network. It is dense in evaluation mode, and its routes are active in training mode.

    Args:
        input_size: height = width of the latents, a multiple of patch_size.
        in_channels: C of the latents.
        num_classes: labels are 0 .. num_classes - 1, and num_classes is the null class.
        learn_sigma: twice the output channels, as in published DiT checkpoints (the caller drops the unused half).
        class_dropout: probability that a label is replaced by the null class in training.
        routes: windows of blocks that some tokens skip. Without routes, this is the plain DiT.
        selection: the rule that chooses the tokens that stay, or its name in `routing_module.SELECTIONS`.
        fp32_after_route: under autocast, run the block (or final layer) after each active route in float32 (TREAD, section 4).
        init: `adaln_zero`, as in DiT: every block starts as the identity, and the output as zero. `official_tread`, as in the
            official code: modulation and final layers are Xavier-uniform like all others.

    Raises ValueError if a route does not fit the depth, or if input_size is not a multiple of patch_size.
    """

    block_class: type[nn.Module] = DiTBlock
    # Class of the module that ends a route, such as `extras.sprint.Fusion`. With None, `TokenRouter.end_route` ends routes.
    route_end: type[nn.Module] | None = None

    def __init__(
        self,
        *,
        input_size: int,
        patch_size: int,
        in_channels: int,
        num_classes: int,
        depth: int,
        width: int,
        num_heads: int,
        learn_sigma: bool = False,
        class_dropout: float = 0.1,
        routes: Sequence[Route] = (),
        selection: str | SelectionRule = "uniform",
        fp32_after_route: bool = True,
        init: str = "adaln_zero",
    ):
        super().__init__()
        if input_size % patch_size:
            raise ValueError(f"latents of size {input_size} cannot be cut into patches of {patch_size}: use another backbone")
        self.class_dropout = class_dropout
        self.input_size, self.patch_size = input_size, patch_size
        self.out_channels = in_channels * (2 if learn_sigma else 1)

        self.x_embedder = PatchEmbed(patch_size, in_channels, width)
        self.t_embedder = TimestepEmbedder(width)
        self.y_embedder = LabelEmbedder(num_classes, width)
        self.num_tokens = (input_size // patch_size) ** 2
        self.pos_embed = nn.Parameter(sincos_2d(input_size // patch_size, width)[None], requires_grad=False)
        self.blocks = nn.ModuleList(self.block_class(width, num_heads) for _ in range(depth))
        self.final_layer = FinalLayer(width, patch_size, self.out_channels)

        self.router = TokenRouter(routes, depth)
        # Named after their blocks, so that weights do not load into a route elsewhere.
        places = [f"{r.start_layer_idx}_{r.end_layer_idx}" for r in self.router.routes]
        self.route_ends = nn.ModuleDict({place: self.route_end(width) for place in places} if self.route_end else {})
        self.selection_rule = SELECTIONS[selection] if isinstance(selection, str) else selection
        self.fp32_layers = {r.end_layer_idx + 1 for r in self.router.routes} if fp32_after_route else set()
        self.initialize_weights(init)

    def initialize_weights(self, init: str) -> None:
        """Initialise all linear layers alike, then apply the exceptions in order (DiT, section 3)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        # The patch embedding is a linear layer written as a convolution.
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.view(self.x_embedder.proj.out_channels, -1))
        nn.init.zeros_(self.x_embedder.proj.bias)
        for embedding in (self.y_embedder.embedding_table, self.t_embedder.mlp[0], self.t_embedder.mlp[2]):
            nn.init.normal_(embedding.weight, std=0.02)
        if init == "adaln_zero":
            for layer in (*self.blocks, self.final_layer):
                nn.init.zeros_(layer.adaLN_modulation[1].weight)
            nn.init.zeros_(self.final_layer.linear.weight)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        y: Tensor,
        *,
        drop_labels: Tensor | None = None,
        route_scores: Tensor | None = None,
        route_inputs: Tensor | None = None,
        selection_ratios: float | Sequence[float] | None = None,
        generator: torch.Generator | None = None,
        observe: Callable[[int, Tensor, Tensor | None], None] | None = None,
    ) -> Tensor:
        """Args:
            x: (B, C, H, W) latents.
            t: (B,) noise level in the diffusion's own conditioning (EDM: c_noise).
            y: (B,) int64 labels, 0 to num_classes, which is the null class. Other values crash the process on a GPU.
            drop_labels: (B,) bool, labels to replace by the null class. Training mode draws them when they are absent.
            route_scores: (B, R, N) uniform numbers for the selection rule. They are drawn when absent.
            route_inputs: (B, ...), an extra input for the modules of `route_end`.
            selection_ratios: route with these ratios (one, or one per route), in evaluation mode too. All tokens skip a route of
                ratio 1. By default, training mode uses each route's own ratio, and evaluation mode is dense.
            generator: source of the numbers drawn here.
            observe: called after every block as observe(number from 1, tokens, ids_keep). Outside a route, it gets all tokens
                (B, N, D) and None. In a route, it gets the kept tokens (B, K, D) and their positions (B, K) int64.

        Returns:
            (B, out_channels, H, W).

        Raises ValueError for t, y or drop_labels of another shape, and for ratios or scores that do not fit the routes.
        """
        for name, value in (("t", t), ("y", y), ("drop_labels", drop_labels)):
            if value is not None and value.shape != x.shape[:1]:  # a scalar would broadcast
                raise ValueError(f"{name} has shape {tuple(value.shape)}; {len(x)} latents need {(len(x),)}")
        if self.training and drop_labels is None and self.class_dropout > 0:
            drop_labels = torch.rand(len(y), device=y.device, generator=generator) < self.class_dropout

        h, tables = self.x_embedder(x) + self.pos_embed, self.token_tables()  # (B, N, D), each (1, N, ...)
        c = self.t_embedder(t) + self.y_embedder(y, drop_labels)  # (B, D)

        ratios = self.router.selection_ratios(selection_ratios if self.training or selection_ratios is not None else 0)
        active = [i for i, ratio in enumerate(ratios) if ratio > 0 or self.route_end]
        starts = {self.router.routes[i].start_layer_idx: i for i in active}  # block index -> route
        ends = {self.router.routes[i].end_layer_idx: i for i in active}
        in_fp32 = self.fp32_layers & {end + 1 for end in ends}

        ids_keep, all_tables = None, tables
        for i, block in enumerate(self.blocks):
            if i in starts:
                scores = None if route_scores is None else route_scores[:, starts[i]]
                skipped, ratio = h, ratios[starts[i]]  # (B, N, D)
                if ratio > 0 or self.training:  # at ratio 0, all tokens stay, and weights of the route's end get gradients (DDP)
                    ids_keep = self.router.choose_ids_keep(h, ratio, scores=scores, generator=generator, rule=self.selection_rule)
                    h = self.router.start_route(h, ids_keep)  # (B, K, D)
                    tables = [self.router.start_route(table.expand(len(x), *table.shape[1:]), ids_keep) for table in all_tables]
            if h.shape[1] > 0:  # otherwise all tokens skip
                h = self._in_fp32(block, h, c, *tables) if i in in_fp32 else block(h, c, *tables)
            if observe is not None:
                observe(i + 1, h, ids_keep)
            if i in ends:
                if self.route_end:
                    h = [*self.route_ends.values()][ends[i]](h, skipped, ids_keep, route_inputs)
                else:
                    h = self.router.end_route(h, skipped, ids_keep)  # (B, N, D)
                tables, ids_keep = all_tables, None

        out = self._in_fp32(self.final_layer, h, c) if len(self.blocks) in in_fp32 else self.final_layer(h, c)  # (B, N, p*p*C)
        return self.unpatchify(out)

    def draw_inputs(self, random: Callable[[str], SampleRandom]) -> dict[str, Tensor]:
        """Draw random keyword arguments for `forward` in one training step, each from its own named stream."""
        draws = {"drop_labels": random("labels").rand() < self.class_dropout}
        if self.router.routes:
            draws["route_scores"] = random("routes").rand(len(self.router.routes), self.num_tokens)
        return draws

    def token_tables(self) -> tuple[Tensor, ...]:
        """Return per-token tables that blocks take besides the tokens (such as rotary angles), each (1, N, ...).

        In a route, a block gets the rows of the kept tokens.
        """
        return ()

    @staticmethod
    def _in_fp32(layer: Callable[..., Tensor], h: Tensor, c: Tensor, *tables: Tensor) -> Tensor:
        """Run a layer in float32 under autocast. Without autocast, nothing changes."""
        if not torch.is_autocast_enabled(h.device.type):
            return layer(h, c, *tables)
        with torch.autocast(h.device.type, enabled=False):
            return layer(h.float(), c.float(), *tables)

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """(B, N, p*p*C) -> (B, C, H, W). The order within a token is row, column, channel."""
        grid, p = math.isqrt(self.num_tokens), self.patch_size
        x = tokens.reshape(len(tokens), grid, grid, p, p, self.out_channels)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(len(tokens), self.out_channels, grid * p, grid * p)
