"""Compare frozen encoders with an independent definition of DINOv2 that has the same random weights."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
import timm
import torch
from conftest import Malicious
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional as F

from common.errors import UserError
from evaluations.vit import Encoder, resample_as_dinov2

DINOV2_S = "vit_small_patch14_dinov2.lvd142m"
TINY = "test_vit.r160_in1k"  # 64 wide, patches of 16 pixels
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def dinov2_file(tmp_path_factory):
    """Fixture: a file of random DINOv2-S weights in the published layout, with a table of 37x37 positions."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape, scale=0.05):
        return scale * torch.randn(*shape, generator=g)

    with torch.device("meta"):
        net = timm.create_model(DINOV2_S, num_classes=0).state_dict()
    weights = {name: normal(*x.shape, scale=1 if name == "pos_embed" else 0.05) for name, x in net.items()}
    for name, x in weights.items():
        x += 1 if "norm" in name and x.ndim == 1 and name.endswith("weight") else 0.3 * name.endswith("gamma")
    weights["mask_token"] = normal(1, 384)
    file = tmp_path_factory.mktemp("dinov2") / "dinov2_vits14_pretrain.pth"
    torch.save(weights, file)
    return file


def bicubic_points(size: int, stored: int, scale: float) -> np.ndarray:
    """Return the weights [size, stored] of a cubic filter (a = -0.75). It repeats border values and does not antialias."""
    a, rows = -0.75, np.zeros((size, stored))
    for i in range(size):
        centre = (i + 0.5) / scale - 0.5
        for j in range(int(np.floor(centre)) - 1, int(np.floor(centre)) + 3):
            t = abs(centre - j)
            weight = (a + 2) * t**3 - (a + 3) * t**2 + 1 if t <= 1 else a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
            rows[i, min(max(j, 0), stored - 1)] += weight
    return rows


def dinov2_tokens(w: dict[str, torch.Tensor], images: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the tokens after the last norm, in float64. `images` [B, H, W, 3] has values in 0 to 1 and sides divisible by 14."""
    w = {name: x.double() for name, x in w.items()}
    x = torch.from_numpy((images - MEAN) / STD)
    B, grid = len(x), x.shape[1] // 14
    patches = x.view(B, grid, 14, grid, 14, 3).permute(0, 1, 3, 5, 2, 4).reshape(B, grid * grid, -1)
    x = patches @ w["patch_embed.proj.weight"].flatten(1).T + w["patch_embed.proj.bias"]
    rows = torch.from_numpy(bicubic_points(grid, 37, (grid + 0.1) / 37))
    table = torch.einsum("ir,jc,rcd->ijd", rows, rows, w["pos_embed"][0, 1:].view(37, 37, -1)).flatten(0, 1)
    x = torch.cat([(w["cls_token"][0] + w["pos_embed"][0, :1]).expand(B, 1, -1), x + table], dim=1)

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-6)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    for i in range(12):
        block = f"blocks.{i}"
        qkv = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv")
        q, k, v = qkv.view(B, x.shape[1], 3, num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = ((q @ k.mT) / q.shape[-1] ** 0.5).softmax(-1) @ v
        x = x + w[f"{block}.ls1.gamma"] * linear(attended.transpose(1, 2).flatten(2), f"{block}.attn.proj")
        hidden = linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")
        x = x + w[f"{block}.ls2.gamma"] * linear(F.gelu(hidden), f"{block}.mlp.fc2")
    return norm(x, "norm")


def test_tokens_equal_those_of_an_independent_definition_of_dinov2(dinov2_file):
    encoder = Encoder(DINOV2_S, dinov2_file, 56, preprocessing="edm2")
    images = np.random.default_rng(0).integers(0, 256, (2, 56, 56, 3), dtype=np.uint8)
    expected = dinov2_tokens(torch.load(dinov2_file), images / 255, num_heads=6)
    class_token, patches = encoder.encode(images)
    assert encoder.width == 384 and patches.shape == (2, 16, 384) and expected.std() > 0.5
    # The encoder runs 12 blocks in float32. A wrong position, weight or order would change tokens by 0.1 or more.
    torch.testing.assert_close(class_token.double(), expected[:, 0], rtol=0, atol=1e-3)
    torch.testing.assert_close(patches.double(), expected[:, 1:], rtol=0, atol=1e-3)


def test_the_position_table_is_resampled_as_in_timm_by_default_and_dinov2s_way_differs(dinov2_file):
    stored = torch.load(dinov2_file)["pos_embed"]
    expected = timm.layers.resample_abs_pos_embed(stored, [4, 4])
    assert torch.equal(Encoder(DINOV2_S, dinov2_file, 56).net.pos_embed, expected)
    other = resample_as_dinov2(stored, 4)
    assert torch.equal(other[:, 0], expected[:, 0]) and (other - expected)[:, 1:].std() > 0.3  # white noise: antialiasing matters
    for preprocessing in ("repa", "edm2"):
        assert torch.equal(Encoder(DINOV2_S, dinov2_file, 518, preprocessing=preprocessing).net.pos_embed, stored)


def test_images_are_resized_like_pillows_bicubic_filter_and_normalised(dinov2_file):
    smooth = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    image = np.array(Image.fromarray(smooth).resize((150, 200), Image.Resampling.BILINEAR))
    expected = np.array(Image.fromarray(image).resize((56, 56), Image.Resampling.BICUBIC)) / 255
    seen = []  # the network's input, [1, 3, H, W]
    for preprocessing in ("edm2", "repa"):
        encoder = Encoder(DINOV2_S, dinov2_file, 56, preprocessing=preprocessing)
        encoder.net.patch_embed.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
        encoder.encode(image[None])
    found, plain = (x[0].permute(1, 2, 0).numpy() * STD + MEAN for x in seen)
    assert np.abs(found - expected).max() < 1.2 / 255  # Pillow rounds to uint8
    assert np.abs(plain - found).max() > 0.02


def test_an_encoder_is_frozen_in_its_own_precision(tiny_encoder):
    encoder = Encoder(TINY, tiny_encoder, 32)
    images = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)
    assert not encoder.net.training and not any(p.requires_grad for p in encoder.net.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        inside = encoder.encode(images)[0]
    assert torch.equal(inside, encoder.encode(images)[0])
    rounded = Encoder(TINY, tiny_encoder, 32, precision="bf16").encode(images)[0]
    assert rounded.dtype == torch.float32 and 0 < (rounded - inside).abs().max() < 0.2


def test_networks_that_cannot_be_encoders_are_refused_with_a_one_line_error(tiny_encoder, tmp_path):
    other, pickled = tmp_path / "other.safetensors", tmp_path / "code.pth"
    save_file({"weight": torch.zeros(2)}, other)
    pickled.write_bytes(pickle.dumps({"weight": Malicious(os.mkdir, str(tmp_path / "was run"))}))
    for name, weights, message in (
        ("test_vit.nothing", tiny_encoder, "'test_vit.nothing' is not a VisionTransformer of timm"),
        ("resnet18", tiny_encoder, "'resnet18' is not a VisionTransformer of timm"),
        (TINY, tmp_path / "none.pth", "none.pth .weights of the encoder. cannot be read"),
        (TINY, other, "other.safetensors .weights of the encoder. cannot be read"),
        (TINY, pickled, "code.pth .weights of the encoder. cannot be read"),
        ("vit_tiny_patch16_224", tiny_encoder, "tiny.safetensors .weights of the encoder. cannot be read"),
    ):
        with pytest.raises(UserError, match=message) as e:
            Encoder(name, weights, 64)
        assert "\n" not in str(e.value)
    assert not (tmp_path / "was run").exists()
