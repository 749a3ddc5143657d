"""Tiny random networks of every architecture that can be routed, and a reference that defines what a route computes.

The reference runs every block at full length. It masks the skipping tokens as attention keys and restores them after the block.
For this, it replaces torch's attention and adds its own hooks to the blocks. It shares no code with attach.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from extras.attach.attachment import inner_module

B, GRID, T = 3, 4, 5  # samples, rows and columns of tokens, text tokens
N = GRID * GRID


@dataclass(frozen=True)
class Network:
    """How to build a network of 4 blocks, call it, and find its tokens."""

    path: str  # package and class
    settings: dict
    # inputs(variant) -> arguments of forward. A variant has masks, padded text, timesteps per token, residuals or skipped layers.
    inputs: Callable
    blocks: tuple[tuple[str, int | None], ...]  # in order: (list of blocks, index of the tokens in a block's output or None)
    variant: bool = False  # whether the network has a variant
    text_first: bool = True  # whether text precedes image tokens in a joint sequence
    attention_text_first: bool = True  # the same for the keys of joint attention
    num_tokens: int = N
    argument: str = "hidden_states"


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=generator(seed))


def text_mask():
    return torch.arange(T)[None] < torch.tensor([T, 2, 3])[:, None]


def pair_mask(length):  # True where a query may attend to a key
    return (normal(length, length) > -1) | torch.eye(length, dtype=torch.bool)


def inputs(**more):
    image, text = normal(B, 4, 8, 8), normal(B, T, 12, seed=2)
    return dict(hidden_states=image, timestep=torch.tensor([0.1, 0.5, 0.9]), encoder_hidden_states=text) | more


def our_inputs(variant):
    return dict(x=normal(B, 4, 8, 8), t=torch.tensor([0.1, 0.5, 0.9]), y=torch.arange(B))


def grid_ids(axes):  # (N, axes): the row on axis 1, the column on axis 2, else 0
    return F.pad(torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).float(), (1, axes - 3))


def flux_inputs(variant):
    more = {}
    if variant:  # a mask for padded text, and a residual from a ControlNet
        mask = torch.cat([text_mask(), torch.ones(B, N, dtype=torch.bool)], dim=1)[:, None, None]
        more = dict(joint_attention_kwargs={"attention_mask": mask}, controlnet_block_samples=[normal(B, N, 32, seed=6)])
    positions = dict(img_ids=grid_ids(3), txt_ids=torch.zeros(T, 3))
    return inputs(hidden_states=normal(B, N, 4), pooled_projections=normal(B, 8, seed=3), **positions, **more)


def flux2_inputs(variant):
    more = dict(joint_attention_kwargs={"attention_mask": pair_mask(T + N)}) if variant else {}
    positions = dict(img_ids=grid_ids(4), txt_ids=torch.arange(T)[:, None] * torch.tensor([0.0, 0.0, 0.0, 1.0]))
    return inputs(hidden_states=normal(B, N, 4), **positions, **more)


def pixart_inputs(variant):
    masks = {}
    if variant:  # the first three image tokens are masked in every sample
        image_mask = (torch.arange(N) > 2).float().expand(B, -1)
        masks = dict(encoder_attention_mask=text_mask().float(), attention_mask=image_mask)
    return inputs(added_cond_kwargs={"resolution": None, "aspect_ratio": None}, **masks)


def wan_inputs(variant):
    timestep = torch.tensor([100, 500, 900])
    per_token = timestep[:, None] + torch.arange(N)[None]
    return inputs(hidden_states=normal(B, 4, 2, 8, 4), timestep=per_token if variant else timestep)  # 2 frames of 4 x 2 patches


def qwen_inputs(variant):
    """Return inputs with an image and a reference image. The reference image has a different timestep."""
    mask, shapes = text_mask() if variant else None, [[(1, GRID, GRID)] * 2] * B
    return inputs(hidden_states=normal(B, 2 * N, 16), encoder_hidden_states_mask=mask, img_shapes=shapes)


def z_image_inputs(variant):
    # Text is padded to a multiple of 32 tokens, so only a long text changes the length of the joint sequence.
    text = [normal(40 if variant and i == 0 else T - i, 12, seed=2 + i) for i in range(B)]
    return dict(x=list(normal(B, 4, 1, 8, 8)), t=torch.tensor([0.1, 0.5, 0.9]), cap_feats=text)


OURS = dict(input_size=8, patch_size=2, in_channels=4, num_classes=3, depth=4, width=32, num_heads=2, class_dropout=0.0)
HEADS = dict(attention_head_dim=16, num_attention_heads=2)
JOINT = HEADS | dict(joint_attention_dim=12)
LATENTS = dict(sample_size=8, patch_size=2, in_channels=4)
FLUX = JOINT | dict(in_channels=4, num_layers=2, num_single_layers=2)
BLOCKS, DOUBLE, SINGLE = (("blocks", None),), ("transformer_blocks", 1), ("single_transformer_blocks", None)

NETWORKS = {
    "DiT": Network("dit.DiT", OURS, our_inputs, BLOCKS, argument="x"),
    "LightningDiT": Network("extras.lightningdit.LightningDiT", OURS, our_inputs, BLOCKS, argument="x"),
    "Flux": Network(
        "diffusers.FluxTransformer2DModel", FLUX | dict(pooled_projection_dim=8, axes_dims_rope=(4, 6, 6)),
        flux_inputs, (DOUBLE, ("single_transformer_blocks", 1)), variant=True,
    ),
    "Flux2": Network(
        "diffusers.Flux2Transformer2DModel",
        FLUX | dict(timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False),
        flux2_inputs, (DOUBLE, SINGLE), variant=True,
    ),
    "SD3": Network(
        "diffusers.SD3Transformer2DModel",
        LATENTS | JOINT | dict(num_layers=4, caption_projection_dim=32, pooled_projection_dim=8, out_channels=4,
                               pos_embed_max_size=8, dual_attention_layers=(0, 2), qk_norm="rms_norm"),
        lambda variant: inputs(pooled_projections=normal(B, 8, seed=3), skip_layers=[2] if variant else None),
        (DOUBLE,), variant=True, attention_text_first=False,
    ),
    "PixArt": Network(
        "diffusers.PixArtTransformer2DModel",
        LATENTS | HEADS | dict(num_layers=4, out_channels=8, cross_attention_dim=32, caption_channels=12,
                               use_additional_conditions=False),
        pixart_inputs, (("transformer_blocks", None),), variant=True,
    ),
    "diffusers DiT": Network(
        "diffusers.DiTTransformer2DModel",
        LATENTS | HEADS | dict(num_layers=4, out_channels=8, num_embeds_ada_norm=10, norm_num_groups=1),
        # In training, the label table replaces random labels by the null class. If all labels are null, this changes nothing.
        lambda variant: dict(hidden_states=normal(B, 4, 8, 8), timestep=torch.arange(B), class_labels=torch.full((B,), 10)),
        (("transformer_blocks", None),),
    ),
    "Wan": Network(
        "diffusers.WanTransformer3DModel",
        HEADS | dict(patch_size=(1, 2, 2), in_channels=4, out_channels=4, text_dim=12, freq_dim=16, ffn_dim=64, num_layers=4,
                     rope_max_seq_len=32),
        wan_inputs, BLOCKS, variant=True,
    ),
    "QwenImage": Network(
        "diffusers.QwenImageTransformer2DModel",
        JOINT | dict(patch_size=2, in_channels=16, out_channels=4, num_layers=4, axes_dims_rope=(4, 6, 6), zero_cond_t=True),
        qwen_inputs, (DOUBLE,), variant=True, num_tokens=2 * N,
    ),
    "ZImage": Network(
        "diffusers.ZImageTransformer2DModel",
        dict(in_channels=4, dim=32, n_layers=4, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=12,
             axes_dims=[4, 6, 6], axes_lens=[128, 32, 32]),
        z_image_inputs, (("layers", None),),
        variant=True, text_first=False, attention_text_first=False, argument="x",
    ),
}  # fmt: skip


def build(name, **settings):
    """Return a network with the same random weights at every call. No weight stays at zero, so every part matters."""
    torch.manual_seed(0)
    module, _, cls = NETWORKS[name].path.rpartition(".")
    network = getattr(importlib.import_module(module), cls)(**NETWORKS[name].settings | settings)
    with torch.no_grad():
        for i, p in enumerate(network.parameters()):
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator(i)) * 0.05)
    return network.train()


@cache
def cached(name):
    """Return a network that tests share. Tests must leave it unchanged."""
    return build(name)


def call(network, inputs):
    """Return the prediction (B, ...). The network may return a tensor, or a tuple with a tensor or a list of tensors."""
    output = network(**inputs)
    output = output if isinstance(output, torch.Tensor) else output[0]
    return output if isinstance(output, torch.Tensor) else torch.stack(output)


def run(network, inputs):
    """Return (prediction, {parameter: gradient}) for a loss in which every element of the prediction has its own weight."""
    network.zero_grad(set_to_none=True)
    output = call(network, inputs)
    (output * normal(*output.shape, seed=9)).mean().backward()
    grads = {name.replace("_orig_mod.", ""): p.grad for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad(set_to_none=True)
    return output.detach(), grads


def difference(ours, theirs):
    """Return the largest absolute difference of tensors or results of `run`, divided by the largest value if that exceeds 1."""
    if isinstance(ours, torch.Tensor):
        return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)).item()
    assert ours[1].keys() == theirs[1].keys()
    return max(difference(ours[0], theirs[0]), *(difference(ours[1][key], theirs[1][key]) for key in ours[1]))


def blocks_of(network, case):
    return [(block, output) for attribute, output in case.blocks for block in getattr(network, attribute)]


def reference_error(network, case, inputs, attachment):
    """Return the largest difference of output and gradients between a routed pass and the reference. Detach `attachment`."""
    results = run(network, inputs)
    windows = skipped(attachment, case.num_tokens)
    attachment.detach()
    with reference(inner_module(network), case, windows):
        return difference(results, run(network, inputs))


def skipped(attachment, num_tokens=N):
    """Return (first block, last block, (B, N) bool, True for tokens that skip) for each route of the last pass."""
    routes = zip(attachment.router.routes, attachment.ids_keep)
    return [
        (r.start_layer_idx, r.end_layer_idx, torch.ones(len(ids), num_tokens, dtype=torch.bool).scatter(1, ids, False))
        for r, ids in routes
    ]


@contextmanager
def reference(network, case, windows):
    """Inside the context, `network` runs at full length and imitates the routes `windows` (from `skipped`)."""
    stock_attention = F.scaled_dot_product_attention
    now: list[torch.Tensor | None] = [None]  # the tokens that skip the running block

    def place(skip, length, text_first):
        """Return a mask (B, length) of a sequence with text. It is True for the image tokens that `skip` (B, N) marks."""
        whole = torch.zeros(len(skip), length, dtype=torch.bool)
        for b in range(len(skip)):
            start = (length - case.num_tokens) * text_first
            whole[b, start : start + case.num_tokens] = skip[b]
        return whole

    def attention(query, key, value, attn_mask=None, *args, **kwargs):
        if now[0] is not None and key.shape[-2] >= case.num_tokens:  # the keys include image tokens
            allowed = ~place(now[0], key.shape[-2], case.attention_text_first)[:, None, None, :]
            attn_mask = torch.tensor(True) if attn_mask is None else attn_mask
            boolean = attn_mask.dtype == torch.bool
            attn_mask = attn_mask & allowed if boolean else attn_mask.masked_fill(~allowed, float("-inf"))
        return stock_attention(query, key, value, attn_mask, *args, **kwargs)

    def hooks(skip, output_index):
        before_block = []

        def before(module, args, kwargs):
            now[0] = skip
            before_block.append(kwargs[case.argument] if case.argument in kwargs else args[0])

        def after(module, args, kwargs, output):
            now[0] = None
            tokens = output if output_index is None else output[output_index]
            skipping = place(skip, tokens.shape[1], case.text_first)
            tokens = torch.where(skipping[..., None], before_block.pop(), tokens)
            if output_index is None:
                return tokens
            return (*output[:output_index], tokens, *output[output_index + 1 :])

        return before, after

    handles, blocks = [], blocks_of(network, case)
    for start, end, skip in windows:
        for block, output_index in blocks[start : end + 1]:
            before, after = hooks(skip, output_index)
            handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(block.register_forward_hook(after, with_kwargs=True))
    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = stock_attention
        for handle in handles:
            handle.remove()
