"""Tiny random networks of every architecture that can be routed, and a reference that knows no routing.

The reference runs every block at full length, with the skipping tokens barred as attention keys and restored afterwards
(the meaning of a route), by replacing torch's attention and by hooks that it writes for itself. It shares nothing with
attach: neither the adapters, nor the gathering of tokens and positions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

import dit
from extras import lightningdit

B, GRID, T = 3, 4, 5
N = GRID * GRID


@dataclass(frozen=True)
class Network:
    """How the tests build a network, call it, and find its tokens.

    Attributes:
        build: () -> the network.
        inputs: (padded) -> keywords of its forward; `padded` is text of different lengths where the network knows masks.
        blocks: (list of blocks, index of the tokens in what a block returns or None) in order.
        text_first: in a joint sequence and in joint attention, whether the text comes before the image; SD3's attention
            puts it after.
        padded_text: the network takes a mask or lengths of text.
        positions: the argument that carries rotary positions, if any.
    """

    build: Callable
    inputs: Callable
    blocks: tuple[tuple[str, int | None], ...]
    text_first: bool = True
    attention_text_first: bool = True
    padded_text: bool = False
    positions: str | None = None
    num_tokens: int = N
    first_image_token: Callable | None = None
    argument: str = "hidden_states"


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=generator(seed))


def lengths(padded):
    return torch.tensor([T, 2, 3] if padded else [T] * B)


def text_mask(padded):
    return torch.arange(T)[None] < lengths(padded)[:, None]


def timesteps():
    return torch.tensor([0.1, 0.5, 0.9])


def grid_ids(axes, text_axes=None):
    rows, columns = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    image = torch.zeros(N, axes)
    image[:, 1], image[:, 2] = rows.flatten(), columns.flatten()
    text = torch.zeros(T, axes)
    if text_axes is not None:
        text[:, text_axes] = torch.arange(T).float()
    return image, text


def our_dit():
    return dit.DiT(input_size=8, patch_size=2, in_channels=4, num_classes=3, depth=6, width=32, num_heads=2, class_dropout=0.0)


def our_lightningdit():
    settings = dict(depth=6, width=32, num_heads=2, class_dropout=0.0)
    return lightningdit.LightningDiT(input_size=8, patch_size=2, in_channels=4, num_classes=3, **settings)


def our_inputs(padded):
    return dict(x=normal(B, 4, 8, 8), t=timesteps(), y=torch.arange(B))


def flux():
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=3,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 6, 6),
    )


def flux_inputs(padded):
    image_ids, text_ids = grid_ids(3)
    return dict(
        hidden_states=normal(B, N, 4),
        encoder_hidden_states=normal(B, T, 12, seed=2),
        pooled_projections=normal(B, 8, seed=3),
        timestep=timesteps(),
        img_ids=image_ids,
        txt_ids=text_ids,
    )


def sd3():
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=6,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=32,
        pooled_projection_dim=8,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0, 2),
        qk_norm="rms_norm",
    )


def sd3_inputs(padded):
    return dict(
        hidden_states=normal(B, 4, 8, 8),
        encoder_hidden_states=normal(B, T, 12, seed=2),
        pooled_projections=normal(B, 8, seed=3),
        timestep=timesteps(),
    )


def pixart():
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=6,
        cross_attention_dim=32,
        sample_size=8,
        patch_size=2,
        caption_channels=12,
        use_additional_conditions=False,
    )


def pixart_inputs(padded):
    return dict(
        hidden_states=normal(B, 4, 8, 8),
        encoder_hidden_states=normal(B, T, 12, seed=2),
        encoder_attention_mask=text_mask(padded).float() if padded else None,
        # Three image tokens are masked for everybody.
        attention_mask=(torch.arange(N) > 2).float().expand(B, -1) if padded else None,
        timestep=timesteps() * 1000,
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    )


def diffusers_dit():
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=6,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=1,
        dropout=0.0,
    )


def diffusers_dit_inputs(padded):
    # The label table drops labels by itself in training; the largest label is the null class, which stays what it is.
    return dict(hidden_states=normal(B, 4, 8, 8), timestep=torch.tensor([1, 5, 9]), class_labels=torch.full((B,), 10))


def flux2():
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        in_channels=4,
        num_layers=3,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )


def flux2_inputs(padded):
    image_ids, text_ids = grid_ids(4, text_axes=3)
    return dict(
        hidden_states=normal(B, N, 4),
        encoder_hidden_states=normal(B, T, 12, seed=2),
        timestep=timesteps(),
        img_ids=image_ids,
        txt_ids=text_ids,
    )


def wan():
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=64,
        num_layers=6,
        rope_max_seq_len=32,
    )


def wan_inputs(padded, per_token=False):
    timestep = timesteps() * 1000
    return dict(
        hidden_states=normal(B, 4, 2, 8, 4),  # two frames of 4 x 2 patches
        timestep=timestep[:, None] + torch.arange(N)[None] if per_token else timestep,
        encoder_hidden_states=normal(B, T, 12, seed=2),
    )


def auraflow():
    from diffusers import AuraFlowTransformer2DModel

    return AuraFlowTransformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=3,
        num_single_dit_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
    )


def auraflow_inputs(padded):
    return dict(hidden_states=normal(B, 4, 8, 8), encoder_hidden_states=normal(B, T, 12, seed=2), timestep=timesteps())


def qwen(zero_cond_t=False):
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=6,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=12,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=zero_cond_t,
    )


def qwen_inputs(padded, num_images=1):
    return dict(
        hidden_states=normal(B, N * num_images, 16),
        encoder_hidden_states=normal(B, T, 12, seed=2),
        encoder_hidden_states_mask=text_mask(padded) if padded else None,
        timestep=timesteps(),
        img_shapes=[[(1, GRID, GRID)] * num_images] * B,
    )


def hunyuan_dit():
    from diffusers import HunyuanDiT2DModel

    return HunyuanDiT2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        patch_size=2,
        sample_size=8,
        hidden_size=32,
        num_layers=6,
        mlp_ratio=2.0,
        cross_attention_dim=12,
        cross_attention_dim_t5=16,
        pooled_projection_dim=8,
        text_len=3,
        text_len_t5=2,
        use_style_cond_and_image_meta_size=False,
    )


def hunyuan_dit_inputs(padded):
    angles = normal(N, 8, seed=4).repeat_interleave(2, dim=1)  # (N, D_head)
    mask = text_mask(padded).long()
    return dict(
        hidden_states=normal(B, 4, 8, 8),
        timestep=timesteps(),
        encoder_hidden_states=normal(B, 3, 12, seed=2),
        text_embedding_mask=mask[:, :3],
        encoder_hidden_states_t5=normal(B, 2, 16, seed=3),
        text_embedding_mask_t5=mask[:, 3:],
        image_rotary_emb=(angles.cos(), angles.sin()),
    )


def lumina2():
    from diffusers import Lumina2Transformer2DModel

    return Lumina2Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=6,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(32, 16, 16),
        cap_feat_dim=12,
    )


def lumina2_inputs(padded):
    return dict(
        hidden_states=normal(B, 4, 8, 8),
        timestep=timesteps(),
        encoder_hidden_states=normal(B, T, 12, seed=2),
        encoder_attention_mask=text_mask(padded),
    )


def z_image():
    from diffusers import ZImageTransformer2DModel

    return ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=6,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=12,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 32, 32],
    )


def z_image_inputs(padded):
    # Text is brought to a multiple of 32 tokens, so only a long one makes the lengths of the joint sequences differ.
    text = [normal(40 if padded and i == 0 else T - i, 12, seed=2 + i) for i in range(B)]
    return dict(x=list(normal(B, 4, 1, 8, 8)), t=timesteps(), cap_feats=text)


def vision_transformer():
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=16, patch_size=4, num_classes=7, embed_dim=32, depth=6, num_heads=2, reg_tokens=2, init_values=0.5
    )


NETWORKS = {
    "DiT": Network(our_dit, our_inputs, (("blocks", None),), argument="x"),
    "LightningDiT": Network(our_lightningdit, our_inputs, (("blocks", None),), argument="x"),
    "Flux": Network(
        flux,
        flux_inputs,
        (("transformer_blocks", 1), ("single_transformer_blocks", 1)),
        positions="image_rotary_emb",
    ),
    "SD3": Network(sd3, sd3_inputs, (("transformer_blocks", 1),), attention_text_first=False),
    "PixArt": Network(pixart, pixart_inputs, (("transformer_blocks", None),), padded_text=True),
    "diffusers DiT": Network(diffusers_dit, diffusers_dit_inputs, (("transformer_blocks", None),)),
    "Flux2": Network(
        flux2,
        flux2_inputs,
        (("transformer_blocks", 1), ("single_transformer_blocks", None)),
        positions="image_rotary_emb",
    ),
    "Wan": Network(wan, wan_inputs, (("blocks", None),), positions="rotary_emb"),
    "Wan, timesteps per token": Network(
        wan, lambda padded: wan_inputs(padded, per_token=True), (("blocks", None),), positions="rotary_emb"
    ),
    "AuraFlow": Network(auraflow, auraflow_inputs, (("joint_transformer_blocks", 1), ("single_transformer_blocks", None))),
    "QwenImage": Network(qwen, qwen_inputs, (("transformer_blocks", 1),), padded_text=True, positions="image_rotary_emb"),
    "QwenImage, edit": Network(
        lambda: qwen(zero_cond_t=True),
        lambda padded: qwen_inputs(padded, num_images=2),
        (("transformer_blocks", 1),),
        padded_text=True,
        positions="image_rotary_emb",
        num_tokens=2 * N,
    ),
    "HunyuanDiT": Network(hunyuan_dit, hunyuan_dit_inputs, (("blocks", None),), padded_text=True, positions="image_rotary_emb"),
    "Lumina2": Network(
        lumina2,
        lumina2_inputs,
        (("layers", None),),
        padded_text=True,
        positions="image_rotary_emb",
        first_image_token=lambda padded: lengths(padded).tolist(),
    ),
    "ZImage": Network(
        z_image,
        z_image_inputs,
        (("layers", None),),
        text_first=False,
        attention_text_first=False,
        padded_text=True,
        positions="freqs_cis",
        argument="x",
    ),
    "timm": Network(vision_transformer, lambda padded: dict(x=normal(B, 3, 16, 16)), (("blocks", None),), argument="x"),
}


def randomized_network(name):
    """The same random weights every time; layers that start at zero are random too, so that every part matters."""
    torch.manual_seed(0)
    network = NETWORKS[name].build()
    with torch.no_grad():
        for i, p in enumerate(network.parameters()):
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator(i)) * 0.05)
    return network.train()


@cache
def cached_network(name):
    """Shared between tests, which leave it as they found it."""
    return randomized_network(name)


def sample_of(output):
    """The prediction, (B, ...), from whatever a network returns."""
    output = output if isinstance(output, torch.Tensor) else output[0]
    return output if isinstance(output, torch.Tensor) else torch.stack(output)


def call(network, inputs):
    return sample_of(network(**inputs) if "return_dict" not in inputs else network(**inputs))


def run(network, inputs):
    """(prediction, {parameter: gradient}) of a loss in which every element of the prediction has its own weight."""
    network.zero_grad(set_to_none=True)
    output = call(network, inputs)
    (output * normal(*output.shape, seed=9)).mean().backward()
    grads = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad(set_to_none=True)
    return output.detach(), grads


def blocks_of(network, case):
    return [(block, output) for attribute, output in case.blocks for block in getattr(network, attribute)]


@contextmanager
def reference(network, case, windows, padded=False):
    """Inside, `network` runs at full length with the meaning of routes.

    Args:
        windows: (first block, last block, skip) per route; skip is (B, N) bool, True for a token that skips.
    """
    stock_attention = F.scaled_dot_product_attention
    now: list[torch.Tensor | None] = [None]  # the skipping tokens of the block that runs
    first = case.first_image_token(padded) if case.first_image_token else None

    def place(skip, length, text_first):
        """(B, N) -> (B, length): the same tokens in a sequence that holds text too; None if it holds no image."""
        if length == case.num_tokens:
            return skip
        if length < case.num_tokens:
            return None
        whole = torch.zeros(len(skip), length, dtype=torch.bool)
        for b in range(len(skip)):
            start = first[b] if first is not None else (length - case.num_tokens if text_first else 0)
            whole[b, start : start + case.num_tokens] = skip[b]
        return whole

    def attention(query, key, value, attn_mask=None, *args, **kwargs):
        barred = None if now[0] is None else place(now[0], key.shape[-2], case.attention_text_first)
        if barred is not None:
            allowed = ~barred[:, None, None, :]
            if kwargs.get("is_causal"):
                kwargs["is_causal"] = False
                allowed = allowed & torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
            if attn_mask is None:
                attn_mask = allowed
            elif attn_mask.dtype == torch.bool:
                attn_mask = attn_mask & allowed
            else:
                attn_mask = attn_mask.masked_fill(~allowed, float("-inf"))
        return stock_attention(query, key, value, attn_mask, *args, **kwargs)

    def hooks(skip, output_index):
        def before(module, args, kwargs):
            now[0] = skip
            module.tokens_before = kwargs[case.argument] if case.argument in kwargs else args[0]

        def after(module, args, kwargs, output):
            now[0] = None
            tokens = output if output_index is None else output[output_index]
            skipping = place(skip, tokens.shape[1], case.text_first)
            tokens = torch.where(skipping[..., None], module.tokens_before, tokens)
            if output_index is None:
                return tokens
            return (*output[:output_index], tokens, *output[output_index + 1 :])

        return before, after

    handles = []
    blocks = blocks_of(network, case)
    for start, end, skip in windows:
        for block, output_index in blocks[start : end + 1]:
            before, after = hooks(skip, output_index)
            handles += [
                block.register_forward_pre_hook(before, with_kwargs=True),
                block.register_forward_hook(after, with_kwargs=True),
            ]
    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = stock_attention
        for handle in handles:
            handle.remove()
        for block, _ in blocks:
            vars(block).pop("tokens_before", None)


def windows_of(attachment, num_tokens=N):
    """The routes of the last pass, as the reference wants them, from what the attachment reports."""
    windows = []
    for route, ids_keep in zip(attachment.router.routes, attachment.ids_keep):
        skip = torch.ones(len(ids_keep), num_tokens, dtype=torch.bool)
        for b, ids in enumerate(ids_keep.tolist()):
            skip[b, ids] = False
        windows.append((route.start_layer_idx, route.end_layer_idx, skip))
    return windows


def worst_difference(ours, theirs):
    """Largest absolute difference, relative to the largest value where that is above one."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)).item()
