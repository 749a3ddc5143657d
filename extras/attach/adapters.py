"""Descriptions of networks for `attach`: their lists of blocks, and the block arguments with a token axis.

Nothing here imports a network: `find_adapter` compares the names of classes and their packages.

Shapes: B batch, N image tokens, L tokens of a joint sequence of text and image, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

# The tokens of a sequence: image tokens only, or text and image tokens in this order. Text is never routed.
Layout = Literal["image", "text_image", "image_text"]


@dataclass(frozen=True)
class TokenAxis:
    """An argument of a block, besides the tokens themselves, that has one entry per token: positions, a mask."""

    argument: str  # its name in the block's forward
    dim: int  # the token axis. At 0 there is no batch axis: one table serves the whole batch.
    layout: Layout = "image"
    ndim: int | None = None  # if set, only tensors with this many axes have an entry per token
    items: tuple[int | str, ...] | None = None  # the entries of a tuple or dict that have the token axis (None: all of a tuple)
    mask: bool = False  # an attention mask, (B or 1, heads or 1, L or 1, L) or (L, L): its last two axes are token axes


@dataclass(frozen=True)
class BlockList:
    """One list of blocks of a network."""

    attribute: str  # the list's name in the network
    argument: str = "hidden_states"  # the name of the tokens in the block's forward
    output: int | None = None  # index of the tokens in the returned tuple. None: the block returns the tokens alone.
    layout: Layout = "image"
    axes: tuple[TokenAxis, ...] = ()  # the other arguments with a token axis


@dataclass(frozen=True)
class ImageTokens:
    """The image tokens of one forward pass."""

    batch: int  # B
    num_tokens: int  # N
    device: torch.device


def count_embedded(arguments: Mapping[str, Any], output: Tensor) -> ImageTokens:
    """Count tokens in the output of an embedding layer: (B, N, D), or (B, D, ...) with the grid at the end."""
    return ImageTokens(len(output), output.shape[1] if output.ndim == 3 else prod(output.shape[2:]), output.device)


@dataclass(frozen=True)
class Adapter:
    """The description of one kind of network."""

    # The output of this submodule gives the number of image tokens. It runs once per forward pass, before the blocks.
    tokens_from: str  # "": the network itself, before it runs
    blocks: tuple[BlockList, ...]  # in the order in which they run. Layer indices of routes count through all lists.
    count_tokens: Callable[[Mapping[str, Any], Any], ImageTokens] = count_embedded  # (the submodule's arguments, output) -> count


def count_z_image(arguments: Mapping[str, Any], output: None) -> ImageTokens:
    """Count tokens in the call: x is a list of images (C, F, H, W). The padding of the image to 32 tokens is never routed."""
    images, p, f = arguments["x"], arguments.get("patch_size", 2), arguments.get("f_patch_size", 1)
    _, frames, height, width = images[0].shape
    if any(image.shape != images[0].shape for image in images):
        raise ValueError(f"x holds images of shapes {[tuple(image.shape) for image in images]}; a routed batch needs one size")
    return ImageTokens(len(images), (frames // f) * (height // p) * (width // p), images[0].device)


FLUX_AXES = (
    # (cos, sin), each (L, D_head): one table for text and image, for the whole batch.
    TokenAxis("image_rotary_emb", dim=0, layout="text_image"),
    # It may hold a mask for padded text. The blocks have no other argument for a mask.
    TokenAxis("joint_attention_kwargs", dim=-1, layout="text_image", items=("attention_mask",), mask=True),
)
FLUX_DOUBLE = BlockList("transformer_blocks", output=1, axes=FLUX_AXES)
FLUX_SINGLE = BlockList("single_transformer_blocks", output=1, axes=FLUX_AXES)
FLUX2_SINGLE = BlockList("single_transformer_blocks", layout="text_image", axes=FLUX_AXES)
PIXART = BlockList("transformer_blocks", axes=(TokenAxis("attention_mask", dim=2, ndim=3),))  # (B, 1, N)
WAN_AXES = (
    TokenAxis("rotary_emb", dim=1),  # (cos, sin), each (1, N, 1, D_head)
    TokenAxis("temb", dim=1, ndim=4),  # (B, N, 6, D) for timesteps per token
)
QWEN_AXES = (
    TokenAxis("image_rotary_emb", dim=0, items=(0,)),  # (image (N, D_head/2), text), complex
    TokenAxis("modulate_index", dim=1),  # (B, N), if reference images have a different timestep
)
Z_IMAGE_AXES = (
    TokenAxis("freqs_cis", dim=1, layout="image_text"),  # (B, L, D_head/2) complex
    TokenAxis("attn_mask", dim=1, layout="image_text", ndim=2),  # (B, L), for padded text
)
Z_IMAGE = BlockList("layers", "x", layout="image_text", axes=Z_IMAGE_AXES)
LIGHTNING = BlockList("blocks", "x", axes=(TokenAxis("cos", dim=1), TokenAxis("sin", dim=1)))  # (1, N, D_head)

# By package and class.
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
    """Find the adapter of a network's class or base class. Raises ValueError for an unknown network."""
    for cls in type(network).__mro__:
        adapter = ADAPTERS.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        if adapter is not None:
            return adapter
    raise ValueError(f"attach() does not know {type(network).__name__}; pass adapter=, or use one of {', '.join(ADAPTERS)}")
