"""Frozen vision transformers from timm, among them the detector of FD-DINOv2 (DINOv2 ViT-L/14).

B images, N = grid * grid patches, D width. timm takes seconds to import, so functions import it when they need it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.downloads import find_on_hub
from common.errors import UserError, reading
from common.files import hash_file
from evaluations.features import Features, to_device
from evaluations.metrics import full_float32

DINOV2_L = "vit_large_patch14_dinov2.lvd142m"


class Encoder:
    """A frozen vision transformer, which maps images to a class token [B, D] and patch tokens [B, N, D].

    Images are resized to a square with a bicubic filter and normalised with timm's mean and deviation for these weights.

    Args:
        name: timm's name of a VisionTransformer with the tag of its weights, such as vit_base_patch14_dinov2.lvd142m.
        weights: a .safetensors file or a torch.save file, as timm or the authors publish it. None takes it from the hub.
        input_size: height = width of the resized images, a multiple of the patch size.
        recipe: `repa` resizes images without antialias, and position tables like timm (bicubic with antialias). `edm2`, for
            FD-DINOv2, resizes images with antialias, and position tables like the code of DINOv2.
        precision: precision of matrix products, fp32 or bf16. The caller's autocast has no effect.

    Attributes:
        width: width D of the tokens.
        weights_hash: hash of the weights file, and the precision.

    Raises:
        UserError: timm has no such VisionTransformer, or the weights are missing or belong to another network.
    """

    def __init__(
        self,
        name: str,
        weights: str | Path | None,
        input_size: int,
        device: torch.device | str = "cpu",
        *,
        recipe: Literal["repa", "edm2"] = "repa",
        precision: str = "fp32",
    ):
        self.device, self.recipe, self.precision = torch.device(device), recipe, precision
        net, *normalisation = _build(name, input_size)  # wrong arguments fail before the download
        file = find_encoder_weights(name) if weights is None else Path(weights)
        _load(net, file, recipe)
        self.weights_hash = hash_file(file) + ("" if precision == "fp32" else f"-{precision}")
        self.net = net.float().to(self.device).eval().requires_grad_(False)
        self.width, self._size = net.embed_dim, net.patch_embed.img_size
        self._mean, self._std = (torch.tensor(values, device=self.device)[:, None, None] for values in normalisation)

    @torch.no_grad()
    def encode(self, images: np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
        """Encode images, uint8 [B, H, W, 3] of any size, into class token [B, D] and patch tokens [B, N, D], row by row.

        Tokens are taken after the last norm. They are float32 on the encoder's device.
        """
        x = to_device(images, self.device).permute(0, 3, 1, 2).float() / 255
        if x.shape[2:] != self._size:
            x = F.interpolate(x, self._size, mode="bicubic", antialias=self.recipe == "edm2")
        x = (x - self._mean) / self._std
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            tokens = self.net.forward_features(x).float()
        return tokens[:, 0], tokens[:, self.net.num_prefix_tokens :]


class DINOv2Detector(Encoder):
    """Computes DINOv2 class tokens [B, 1024] of images resized to 224x224 pixels, as EDM2 does (arXiv 2312.02696)."""

    name = "dinov2"

    def __init__(self, weights: str | Path, device: torch.device | str = "cpu"):
        super().__init__(DINOV2_L, weights, 224, device, recipe="edm2")

    def features(self, images: np.ndarray | Tensor) -> Features:
        """Compute features of images, uint8 [B, H, W, 3] of any size, on the device."""
        with full_float32():
            return Features(self.name, pool=self.encode(images)[0])


def _build(name: str, input_size: int) -> tuple[nn.Module, tuple[float, ...], tuple[float, ...]]:
    """Build the network on the meta device, without weights. Also return mean and deviation, which normalise pixels."""
    import timm
    from timm.models.vision_transformer import VisionTransformer

    try:
        published = timm.get_pretrained_cfg(name)
        with torch.device("meta"):
            net = timm.create_model(name, pretrained=False, num_classes=0, img_size=input_size)
    except (RuntimeError, TypeError) as e:  # TypeError: other networks have no img_size
        raise UserError(f"the encoder {name!r} is not a VisionTransformer of timm ({e})") from e
    if published is None or not isinstance(net, VisionTransformer) or net.cls_token is None or net.pos_embed is None:
        raise UserError(f"the encoder {name!r} is not a VisionTransformer of timm with a class token and a position table")
    return net, published.mean, published.std


def find_encoder_weights(name: str) -> Path:
    """Find timm weights in the Hugging Face cache, or download them. Raises UserError if the download fails."""
    otherwise = f"give the weights file of {name}, or run `python prepare_latents.py fetch encoder={name}`"
    return find_on_hub(f"timm/{name}", "model.safetensors", otherwise=otherwise)[0]


def _load(net: nn.Module, file: Path, recipe: str) -> None:
    """Load a weights file, without running code in it, and resize its position table to the grid of the network."""
    from timm.models import load_state_dict
    from timm.models.vision_transformer import checkpoint_filter_fn

    with reading(f"{file} (weights of the encoder)"):
        stored = load_state_dict(str(file), weights_only=True)
        if recipe == "edm2" and stored["pos_embed"].shape != net.pos_embed.shape:
            stored["pos_embed"] = resample_as_dinov2(stored["pos_embed"], net.patch_embed.grid_size[0])
        state = checkpoint_filter_fn(dict(stored), net)
        net.load_state_dict({k: x for k, x in state.items() if not k.startswith("head.")}, assign=True)  # drops the head


def resample_as_dinov2(table: Tensor, grid: int) -> Tensor:
    """Resize a position table [1, 1 + M * M, D] to [1, 1 + grid * grid, D] like the code of DINOv2 (arXiv 2304.07193).

    That code adds 0.1 to the new size before it divides by the stored size, so it samples slightly denser than the grid. It
    uses no antialias.
    """
    stored_grid = math.isqrt(table.shape[1] - 1)
    patches = table[:, 1:].float().unflatten(1, (stored_grid, stored_grid)).permute(0, 3, 1, 2)
    scale = (grid + 0.1) / stored_grid
    patches = F.interpolate(patches, scale_factor=(scale, scale), mode="bicubic")
    return torch.cat([table[:, :1], patches.flatten(2).transpose(1, 2).to(table)], dim=1)
