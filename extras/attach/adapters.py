"""Adapters that tell `attach` where a network's blocks are and which block arguments have a token axis.

This module does not import any network, because `find_adapter` compares class and package names.

Shapes: B = batch size, N = image tokens, L = tokens in a joint text and image sequence, D = width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

# Token order in a sequence of image tokens, or of text and image tokens. Text tokens are never routed.
Layout = Literal["image", "text_image", "image_text"]


@dataclass(frozen=True)
class TokenAxis:
    """A block argument other than the tokens that has one entry per token, such as positions or a mask."""

    argument: str  # name of the argument in the block's `forward`
    dim: int  # index of the token axis. If it is 0, there is no batch axis, and all samples share one table.
    layout: Layout = "image"
    ndim: int | None = None  # if set, only tensors with this number of axes have a token axis
    items: tuple[int | str, ...] | None = None  # items of a tuple or dict with a token axis. None selects all items of a tuple.
    mask: bool = False  # whether this is an attention mask, (B or 1, heads or 1, L or 1, L), (B, L) or (L, L)


@dataclass(frozen=True)
class BlockList:
    """A list of blocks in a network."""

    attribute: str  # name of the list in the network
    argument: str = "hidden_states"  # name of the token argument in the block's `forward`
    output: int | None = None  # index of the tokens in the returned tuple. With None, the block returns only the tokens.
    layout: Layout = "image"
    axes: tuple[TokenAxis, ...] = ()  # other block arguments with a token axis


@dataclass(frozen=True)
class ImageTokens:
    """Batch size, number and device of the image tokens in one forward pass."""

    batch: int  # B
    num_tokens: int  # N
    device: torch.device


def count_embedded(arguments: Mapping[str, Any], output: Tensor) -> ImageTokens:
    """Count the image tokens in an embedding layer's output, which is (B, N, D) or (B, D, ...) followed by the grid axes."""
    return ImageTokens(len(output), output.shape[1] if output.ndim == 3 else prod(output.shape[2:]), output.device)


@dataclass(frozen=True)
class Adapter:
    """Describes one network class for `attach`."""

    # Submodule whose output gives the number of image tokens. The submodule runs once per forward pass, before the blocks.
    tokens_from: str  # name of the submodule. An empty name selects the network itself, before it runs.
    blocks: tuple[BlockList, ...]  # in execution order. The layer indices of routes count blocks across all lists.
    count_tokens: Callable[[Mapping[str, Any], Any], ImageTokens] = count_embedded  # gets the submodule's arguments and output


def count_z_image(arguments: Mapping[str, Any], output: None) -> ImageTokens:
    """Count the image tokens from x, a list of images (C, F, H, W). Padding tokens (to a multiple of 32) are never routed."""
    images = arguments["x"]
    patch_size, frames_per_patch = arguments.get("patch_size", 2), arguments.get("f_patch_size", 1)
    if isinstance(images[0], (list, tuple)):
        raise ValueError("x holds lists of images (omni mode), whose tokens have no common grid; such a network cannot be routed")
    _, frames, height, width = images[0].shape
    if any(image.shape != images[0].shape for image in images):
        raise ValueError(f"x holds images of shapes {[tuple(image.shape) for image in images]}; a routed batch needs one size")
    num_tokens = (frames // frames_per_patch) * (height // patch_size) * (width // patch_size)
    return ImageTokens(len(images), num_tokens, images[0].device)


FLUX_AXES = (
    # (cos, sin), each (L, D_head). All samples share one table, which covers text and image tokens.
    TokenAxis("image_rotary_emb", dim=0, layout="text_image"),
    # `joint_attention_kwargs` may contain a mask for padded text. The blocks have no other mask argument.
    TokenAxis("joint_attention_kwargs", dim=-1, layout="text_image", items=("attention_mask",), mask=True),
)
FLUX_DOUBLE = BlockList("transformer_blocks", output=1, axes=FLUX_AXES)
FLUX_SINGLE = BlockList("single_transformer_blocks", output=1, axes=FLUX_AXES)
FLUX2_SINGLE = BlockList("single_transformer_blocks", layout="text_image", axes=FLUX_AXES)
PIXART = BlockList("transformer_blocks", axes=(TokenAxis("attention_mask", dim=2, ndim=3),))  # (B, 1, N)
WAN_AXES = (
    TokenAxis("rotary_emb", dim=1),  # (cos, sin), each (1, N, 1, D_head)
    TokenAxis("temb", dim=1, ndim=4),  # (B, N, 6, D) with per-token timesteps
)
QWEN_AXES = (
    TokenAxis("image_rotary_emb", dim=0, items=(0,)),  # (image table (N, D_head/2), text table), both complex
    TokenAxis("modulate_index", dim=1),  # (B, N), used if reference images have a different timestep
)
Z_IMAGE_AXES = (
    TokenAxis("freqs_cis", dim=1, layout="image_text"),  # (B, L, D_head/2) complex
    TokenAxis("attn_mask", dim=1, layout="image_text", ndim=2),  # (B, L), for padded text
)
Z_IMAGE = BlockList("layers", "x", layout="image_text", axes=Z_IMAGE_AXES)
LIGHTNING = BlockList("blocks", "x", axes=(TokenAxis("cos", dim=1), TokenAxis("sin", dim=1)))  # (1, N, D_head)

# Adapters by package name and class name.
ADAPTERS = {
    "dit.DiT": Adapter("x_embedder", (BlockList("blocks", "x"),)),
    "extras.LightningDiT": Adapter("x_embedder", (LIGHTNING,)),
    "diffusers.FluxTransformer2DModel": Adapter("x_embedder", (FLUX_DOUBLE, FLUX_SINGLE)),
    "diffusers.Flux2Transformer2DModel": Adapter("x_embedder", (FLUX_DOUBLE, FLUX2_SINGLE)),
    "diffusers.SD3Transformer2DModel": Adapter("pos_embed", (BlockList("transformer_blocks", output=1),)),
    "diffusers.PixArtTransformer2DModel": Adapter("pos_embed", (PIXART,)),
    "diffusers.DiTTransformer2DModel": Adapter("pos_embed", (BlockList("transformer_blocks"),)),
    "diffusers.WanTransformer3DModel": Adapter("patch_embedding", (BlockList("blocks", axes=WAN_AXES),)),
    "diffusers.QwenImageTransformer2DModel": Adapter("img_in", (BlockList("transformer_blocks", output=1, axes=QWEN_AXES),)),
    "diffusers.ZImageTransformer2DModel": Adapter("", (Z_IMAGE,), count_z_image),
}


def find_adapter(network: nn.Module) -> Adapter:
    """Find the adapter for a network's class or a base class. Raises ValueError if there is no such adapter."""
    for cls in type(network).__mro__:
        adapter = ADAPTERS.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        if adapter is not None:
            return adapter
    raise ValueError(f"attach() does not know {type(network).__name__}; pass adapter=, or use one of {', '.join(ADAPTERS)}")
