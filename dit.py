"""DiT with adaLN-Zero (arXiv 2212.09748) and optional token routing (arXiv 2501.04765).

The parameter names match those in facebookresearch/DiT, so published state dicts load with strict=True.

Shapes: B is the batch size, and D is the network's width. Latents have C channels, height H and width W. With patch size p, a
latent has N = HW/p^2 tokens. A network has R routes, and the blocks in a route's window process K kept tokens.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.randomness import SampleRandom
from routing_module import Route, SelectionRule, TokenRouter, build_rule, num_kept_tokens, uniform_noise

# Network sizes (depth, width, heads). S to XL are from DiT (arXiv 2212.09748, Table 1). XS is a small size for small pictures.
SIZES = {"XS": (12, 96, 3), "S": (12, 384, 6), "B": (12, 768, 12), "L": (24, 1024, 16), "XL": (28, 1152, 16)}
BACKBONES = {f"DiT-{size}/{patch}": (*SIZES[size], patch) for size in SIZES for patch in (1, 2, 4, 8)}


def build(backbone: str, **kwargs) -> DiT:
    """Build a network by name, such as `DiT-B/2`. Keyword arguments are passed to `DiT` and override its sizes."""
    return DiT(**look_up_sizes(backbone, BACKBONES) | kwargs)


def look_up_sizes(backbone: str, backbones: Mapping[str, tuple[int, int, int, int]]) -> dict[str, int]:
    """Return the depth, width, number of heads and patch size of a backbone. Raises KeyError if its name is unknown."""
    return dict(zip(("depth", "width", "num_heads", "patch_size"), backbones[backbone]))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return x * (1 + scale) + shift, where x is (B, N, D) and shift and scale are (B, D)."""
    return torch.addcmul(shift.unsqueeze(1), x, 1 + scale.unsqueeze(1))


def sincos_1d(positions: Tensor, width: int) -> Tensor:
    """Encode N positions as sines, followed by cosines, with frequencies 10000^(-i / (width/2)). The result is (N, width)."""
    frequencies = 10000.0 ** (-torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angles = positions.double()[:, None] * frequencies  # (N, width/2)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def sincos_2d(grid_size: int, width: int) -> Tensor:
    """Return row-major position encodings (grid_size^2, width). As in DiT, the column encoding precedes the row encoding."""
    row, column = torch.meshgrid(torch.arange(grid_size), torch.arange(grid_size), indexing="ij")
    return torch.cat([sincos_1d(column.flatten(), width // 2), sincos_1d(row.flatten(), width // 2)], dim=1).float()


def num_linear_weights(module: nn.Module) -> int:
    """Return the number of weights of the linear layers in a module, without biases."""
    return sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))


class PatchEmbed(nn.Module):
    """Embeds patches as tokens in row-major order. As in DiT, the weights are stored in a convolution layer."""

    def __init__(self, patch_size: int, in_channels: int, width: int):
        super().__init__()
        self.proj = nn.Conv2d(in_channels, width, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W) -> (B, N, D)
        # A matrix product returns contiguous tokens. A convolution returns non-contiguous tokens, which slow down every block.
        patches = F.pixel_unshuffle(x, self.proj.stride[0])  # (B, C p p, H/p, W/p)
        return F.linear(patches.flatten(2).mT.contiguous(), self.proj.weight.flatten(1), self.proj.bias)


class TimestepEmbedder(nn.Module):
    """Embeds the noise level with 256 sinusoidal features (cosines first), followed by a two-layer MLP."""

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
    """Embeds class labels. Row `num_classes` of the table embeds the null class, which means 'no label'."""

    def __init__(self, num_classes: int, width: int):
        super().__init__()
        self.num_classes = num_classes
        self.embedding_table = nn.Embedding(num_classes + 1, width)

    def forward(self, y: Tensor, drop: Tensor | None) -> Tensor:  # (B,), bool (B,) -> (B, D)
        if drop is not None:
            y = y.masked_fill(drop, self.num_classes)
        return self.embedding_table(y)


class Attention(nn.Module):
    """Multi-head self-attention that uses timm's parameter names."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        # The backward pass of `chunk` concatenates the gradients of q, k and v in a single copy.
        q, k, v = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # q is (B, heads, N, D/heads)


class DiTBlock(nn.Module):
    """Transformer block in which the conditioning vector shifts, scales and gates the attention and the MLP (adaLN-Zero)."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        # The MLP copies timm's `Mlp` and its parameter names. Importing timm would take two thirds of the start-up time.
        fc1, fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, act=nn.GELU("tanh"), fc2=fc2))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor, *tables: Tensor) -> Tensor:  # (B, N, D), (B, D) -> (B, N, D)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = torch.addcmul(x, gate_msa.unsqueeze(1), self.attn(modulate(self.norm1(x), shift_msa, scale_msa), *tables))
        return torch.addcmul(x, gate_mlp.unsqueeze(1), self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp)))

    def flops(self, num_tokens: int) -> int:
        """Return the FLOPs of the matrix products for `num_tokens` tokens of one image (see `DiT.forward_flops`)."""
        modulation = num_linear_weights(self.adaLN_modulation)
        attention = 2 * 2 * num_tokens**2 * self.attn.proj.in_features  # Q K^T, and the product of the attention weights and V
        return 2 * num_tokens * (num_linear_weights(self) - modulation) + attention + 2 * modulation


class FinalLayer(nn.Module):
    """A modulated norm and a linear layer, which map each token to the values of its patch."""

    def __init__(self, width: int, patch_size: int, out_channels: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:  # (B, N, D), (B, D) -> (B, N, p*p*C)
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class RouteEnd(nn.Module):
    """The end of a route in TREAD: kept tokens return to their positions among the tokens that skipped the window.

    This is also the base class of other route ends, which have the same signature (see `DiT.route_end_class`).

    Attributes:
        is_called_at_ratio_0: Whether the route end changes tokens even if no token skips the window.
    """

    is_called_at_ratio_0 = False

    def __init__(self, width: int):
        super().__init__()

    def forward(self, x: Tensor, x_before: Tensor, ids_keep: Tensor | None, inputs: Tensor | None = None) -> Tensor:
        """Return all tokens after the window, (B, N, D).

        Args:
            x: Kept tokens after the window, (B, K, D). At ratio 1, K is 0.
            x_before: All tokens before the window, (B, N, D).
            ids_keep: Positions of the kept tokens, (B, K) int64. None in evaluation mode at ratio 0, when x contains all
                tokens.
            inputs: The `route_inputs` of `DiT.forward`.
        """
        return TokenRouter.end_route(x, x_before, ids_keep)


class ActiveRoute(NamedTuple):
    """A route that changes tokens in a forward pass."""

    number: int  # index in `TokenRouter.routes`
    ratio: float  # fraction of the tokens that skip the window in this pass
    end: RouteEnd


class DiT(nn.Module):
    """The DiT network. In training mode, routes carry some tokens past blocks. In evaluation mode, they carry none by default.

    Args:
        input_size: Height and width of the latents. The constructor raises ValueError if it is not a multiple of patch_size.
        num_classes: Number of classes. Labels range from 0 to num_classes - 1, and num_classes is the null class.
        learn_sigma: Whether to double the output channels, as in published DiT checkpoints. EDM and SiT drop the second half.
        class_dropout: Probability that the network replaces a label with the null class in training.
        routes: Routes that carry tokens past blocks, or () for a plain DiT. `TokenRouter` checks that they fit the depth. With a
            ratio below 1 / number of tokens, a route carries no token.
        selection: Selection rule that chooses the kept tokens, or its name in `routing_module.SELECTIONS`.
        fp32_after_route: Run the block or final layer after each active route in float32 under autocast (TREAD, section 4).
        init: With `adaln_zero`, every block starts as the identity and the output starts at zero, as in DiT. With
            `official_tread`, the modulation and final layers start with Xavier-uniform weights, as in TREAD's official code.
    """

    block_class: type[DiTBlock] = DiTBlock
    route_end_class: type[RouteEnd] = RouteEnd  # class of the modules that end the routes
    blocks: Sequence[DiTBlock]  # an nn.ModuleList, whose items have no type

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
        self.input_size = input_size
        self.patch_size = patch_size
        self.out_channels = in_channels * (2 if learn_sigma else 1)

        self.x_embedder = PatchEmbed(patch_size, in_channels, width)
        self.t_embedder = TimestepEmbedder(width)
        self.y_embedder = LabelEmbedder(num_classes, width)
        grid_size = input_size // patch_size
        self.num_tokens = grid_size**2
        self.pos_embed = nn.Parameter(sincos_2d(grid_size, width)[None], requires_grad=False)
        self.blocks = nn.ModuleList(self.block_class(width, num_heads) for _ in range(depth))
        self.final_layer = FinalLayer(width, patch_size, self.out_channels)

        self.selection_rule = build_rule(selection, grid=(grid_size, grid_size))
        self.router = TokenRouter(routes, depth)
        # Route ends are named after the blocks in the window, so that weights cannot load into a route past other blocks.
        names = [f"{r.start_layer_idx}_{r.end_layer_idx}" for r in self.router.routes]
        self.route_end_modules = nn.ModuleDict({name: self.route_end_class(width) for name in names})
        self.fp32_after_route = fp32_after_route
        self.initialize_weights(init)

    def initialize_weights(self, init: str) -> None:
        """Initialise all linear layers in the same way, and then initialise the exceptions (DiT, section 3)."""
        if init not in ("adaln_zero", "official_tread"):
            raise ValueError(f"init={init!r} must be adaln_zero or official_tread")
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        # The patch embedding is a linear layer that is stored as a convolution.
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
        route_noise: Tensor | None = None,
        route_inputs: Tensor | None = None,
        selection_ratios: float | Sequence[float] | None = None,
        generator: torch.Generator | None = None,
        on_block: Callable[[int, Tensor, Tensor | None], None] | None = None,
    ) -> Tensor:
        """Run the network, and return its output (B, out_channels, H, W).

        Args:
            x: Latents (B, C, H, W).
            t: Noise levels (B,) in the diffusion's own parameterisation, such as c_noise for EDM.
            y: Labels (B,) int64, 0 to num_classes, which is the null class. Out-of-range labels crash the process on a GPU.
            drop_labels: Mask (B,) bool of labels to replace with the null class. By default, training mode draws a random mask.
            route_noise: Uniform noise (B, R, N) in [0, 1) for the selection rule. By default, the network draws the noise.
            route_inputs: Extra input (B, ...) for the route ends.
            selection_ratios: Fraction of tokens that the routes carry past blocks (one number, or one per route), in training and
                evaluation mode. At ratio 1, all tokens skip. By default, training mode uses the routes' ratios, and evaluation
                mode uses 0.
            generator: Generator for the random numbers that the network draws.
            on_block: Function to call after every block as on_block(block number from 1, tokens, ids_keep). In a route's
                window, the tokens are (B, K, D) and ids_keep is (B, K) int64. Elsewhere, the tokens are (B, N, D) and ids_keep is
                None.

        Raises ValueError if t, y or drop_labels does not have shape (B,), or if the ratios or the noise do not fit the routes.
        """
        for name, value in (("t", t), ("y", y), ("drop_labels", drop_labels)):
            if value is not None and value.shape != x.shape[:1]:  # a scalar would broadcast silently
                raise ValueError(f"{name} has shape {tuple(value.shape)}; {len(x)} latents need {(len(x),)}")
        noise_shape = (len(x), *self.route_noise_shape)
        if route_noise is not None and route_noise.shape != noise_shape:
            needed = f"these latents, routes and tokens need {noise_shape}"
            raise ValueError(f"route_noise has shape {tuple(route_noise.shape)}; {needed}")
        if self.training and drop_labels is None and self.class_dropout > 0:
            drop_labels = uniform_noise(len(y), device=y.device, generator=generator) < self.class_dropout

        h = self.x_embedder(x) + self.pos_embed  # (B, N, D)
        tables = self.token_tables()  # each (1, N, ...)
        c = self.t_embedder(t) + self.y_embedder(y, drop_labels)  # (B, D)

        ratios = self._ratios_of_pass(selection_ratios)
        starting: dict[int, ActiveRoute] = {}  # by the first block of the window
        ending: dict[int, ActiveRoute] = {}  # by its last block
        for number, (route, ratio, end) in enumerate(zip(self.router.routes, ratios, self.route_end_modules.values())):
            if ratio > 0 or end.is_called_at_ratio_0:
                starting[route.start_layer_idx] = ending[route.end_layer_idx] = ActiveRoute(number, ratio, end)

        ids_keep, kept_tables = None, tables  # outside windows, the blocks run on all tokens
        for i, block in enumerate(self.blocks):
            if i in starting:
                number, ratio, _ = starting[i]
                x_before = h  # (B, N, D)
                if ratio > 0 or self.training:  # in training, every parameter of the route end needs a gradient
                    noise = None if route_noise is None else route_noise[:, number]
                    ids_keep = self.router.choose_ids_keep(h, ratio, noise=noise, generator=generator, rule=self.selection_rule)
                    h = self.router.start_route(h, ids_keep)  # (B, K, D)
                    kept_tables = [self.router.start_route(table.expand(len(x), *table.shape[1:]), ids_keep) for table in tables]
            if h.shape[1] > 0:  # at ratio 1, no tokens are kept
                h = self._run_layer(block, i - 1 in ending, h, c, *kept_tables)
            if on_block is not None:
                on_block(i + 1, h, ids_keep)
            if i in ending:
                h = ending[i].end(h, x_before, ids_keep, route_inputs)  # (B, N, D)
                ids_keep, kept_tables = None, tables

        out = self._run_layer(self.final_layer, len(self.blocks) - 1 in ending, h, c)  # (B, N, p*p*C)
        return self.unpatchify(out)

    def _ratios_of_pass(self, selection_ratios: float | Sequence[float] | None) -> tuple[float, ...]:
        """Return each route's ratio in a forward pass. None means the routes' own ratios in training mode, and otherwise 0."""
        return self.router.selection_ratios(0 if selection_ratios is None and not self.training else selection_ratios)

    def draw_inputs(self, random_for: Callable[[str], SampleRandom]) -> dict[str, Tensor]:
        """Draw the random keyword arguments of `forward` for one training step. Each argument has its own random stream."""
        draws = {"drop_labels": random_for("labels").rand() < self.class_dropout}
        if self.router.routes:
            draws["route_noise"] = random_for("routes").rand(*self.route_noise_shape)
        return draws

    @property
    def route_noise_shape(self) -> tuple[int, int]:
        """Number of routes and number of tokens, (R, N), which is the shape of `route_noise` for one sample."""
        return len(self.router.routes), self.num_tokens

    def token_tables(self) -> tuple[Tensor, ...]:
        """Return additional per-token inputs for the blocks, such as tables of rotary angles. Each table is (1, N, ...).

        Blocks in a route's window receive only the entries of the kept tokens.
        """
        return ()

    def _run_layer(self, layer: Callable[..., Tensor], after_route: bool, h: Tensor, c: Tensor, *tables: Tensor) -> Tensor:
        """Run a block or the final layer. After a route, `fp32_after_route` disables autocast for the layer."""
        if not (after_route and self.fp32_after_route and torch.is_autocast_enabled(h.device.type)):
            return layer(h, c, *tables)
        with torch.autocast(h.device.type, enabled=False):
            return layer(h.float(), c.float(), *tables)

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """Convert tokens (B, N, p*p*C) to an output (B, C, H, W). Each token is ordered by row, then column, then channel."""
        grid, p = self.input_size // self.patch_size, self.patch_size
        x = tokens.reshape(len(tokens), grid, grid, p, p, self.out_channels)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(len(tokens), self.out_channels, grid * p, grid * p)

    def forward_flops(self, selection_ratios: float | Sequence[float] | None = None) -> int:
        """Return the FLOPs of the matrix products in a forward pass for one image. A multiply-add counts as 2 FLOPs.

        `selection_ratios` is as in `forward`, also that its default depends on the mode. By convention, the FLOPs of norms,
        activation functions, elementwise modulation and softmax are not counted.
        """
        N, D = self.num_tokens, self.pos_embed.shape[-1]
        conv, final = self.x_embedder.proj, self.final_layer
        patch_embedding = 2 * N * D * conv.in_channels * conv.kernel_size[0] * conv.kernel_size[1]
        conditioning = 2 * num_linear_weights(self.t_embedder)
        tokens = [N] * len(self.blocks)
        for route, ratio in zip(self.router.routes, self._ratios_of_pass(selection_ratios)):
            for i in range(route.start_layer_idx, route.end_layer_idx + 1):
                tokens[i] = num_kept_tokens(N, ratio)
        blocks = sum(block.flops(num_tokens) for block, num_tokens in zip(self.blocks, tokens) if num_tokens)
        blocks += 2 * N * num_linear_weights(self.route_end_modules)
        output = 2 * num_linear_weights(final.adaLN_modulation) + 2 * N * final.linear.weight.numel()
        return patch_embedding + conditioning + blocks + output
