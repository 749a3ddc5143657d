"""Frozen vision transformers from timm, including the FD-DINOv2 detector (DINOv2 ViT-L/14).

Shapes use B for images, N = grid * grid for patches and D for width. Functions import timm locally because the import is slow.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from common.downloads import fetch_from_hub
from common.errors import UserError, as_user_error
from common.files import hash_file
from evaluations.features import Features, to_device
from evaluations.metrics import full_float32

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer

DINOV2_L = "vit_large_patch14_dinov2.lvd142m"


class Encoder:
    """A frozen vision transformer that maps images to class tokens [B, D] and patch tokens [B, N, D].

    The encoder resizes images to a square with a bicubic filter and normalises pixels with timm's mean and deviation.

    Args:
        name: timm model name of a VisionTransformer with the tag of the weights, such as vit_base_patch14_dinov2.lvd142m.
        weights: .safetensors or torch.save file, as published by timm or the authors. If None, use the Hugging Face hub's file.
        input_size: Height and width of the resized images. Must be a multiple of the patch size.
        preprocessing: `repa` resizes images without antialiasing, and position embeddings as timm does (bicubic, antialiased).
            `edm2`, which FD-DINOv2 uses, resizes images with antialiasing, and position embeddings as DINOv2's code does.
        precision: Precision of matrix products, `fp32` or `bf16`. The encoder ignores the caller's autocast.

    Attributes:
        width: Width D of the tokens.
        weights_hash: Hash of the weights file, followed by the precision if it is not `fp32`.

    Raises:
        UserError: timm has no VisionTransformer with the given name, or the weights are missing or belong to another network.
    """

    def __init__(
        self,
        name: str,
        weights: str | Path | None,
        input_size: int,
        device: torch.device | str = "cpu",
        *,
        preprocessing: Literal["repa", "edm2"] = "repa",
        precision: str = "fp32",
    ):
        self.device, self.preprocessing, self.precision = torch.device(device), preprocessing, precision
        net, *normalisation = _build(name, input_size)  # invalid arguments raise an error before the download
        file = fetch_encoder_weights(name) if weights is None else Path(weights)
        _load(net, file, preprocessing)
        self.weights_hash = hash_file(file) + ("" if precision == "fp32" else f"-{precision}")
        self.net = net.float().to(self.device).eval().requires_grad_(False)
        self.width, self._size = net.embed_dim, net.patch_embed.img_size
        self._mean, self._std = (torch.tensor(values, device=self.device)[:, None, None] for values in normalisation)

    @torch.no_grad()
    def encode(self, images: np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
        """Encode uint8 images [B, H, W, 3] of any size into class tokens [B, D] and row-major patch tokens [B, N, D].

        The tokens come from the final norm layer and are float32 tensors on the encoder's device.
        """
        x = to_device(images, self.device).permute(0, 3, 1, 2).float() / 255
        if x.shape[2:] != self._size:
            x = F.interpolate(x, self._size, mode="bicubic", antialias=self.preprocessing == "edm2")
        x = (x - self._mean) / self._std
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            tokens = self.net.forward_features(x).float()
        return tokens[:, 0], tokens[:, self.net.num_prefix_tokens :]


class DINOv2Detector(Encoder):
    """Computes DINOv2 class tokens [B, 1024] of images resized to 224x224 pixels, as EDM2 does (arXiv 2312.02696)."""

    name = "dinov2"

    def __init__(self, weights: str | Path, device: torch.device | str = "cpu"):
        super().__init__(DINOV2_L, weights, 224, device, preprocessing="edm2")

    def features(self, images: np.ndarray | Tensor) -> Features:
        """Compute features of uint8 images [B, H, W, 3] of any size on the detector's device."""
        with full_float32():
            return Features(self.name, pool=self.encode(images)[0])


def _build(name: str, input_size: int) -> tuple[VisionTransformer, tuple[float, ...], tuple[float, ...]]:
    """Build the network on the meta device without weights. Also return the pixel mean and standard deviation."""
    import timm
    from timm.models.vision_transformer import VisionTransformer

    try:
        published = timm.get_pretrained_cfg(name)
        with torch.device("meta"):
            net = timm.create_model(name, pretrained=False, num_classes=0, img_size=input_size)
    except (RuntimeError, TypeError) as e:  # networks without img_size raise TypeError
        raise UserError(f"the encoder {name!r} is not a VisionTransformer of timm ({e})") from e
    if published is None or not isinstance(net, VisionTransformer) or net.cls_token is None or net.pos_embed is None:
        raise UserError(f"the encoder {name!r} is not a VisionTransformer of timm with a class token and a position table")
    return net, published.mean, published.std


def fetch_encoder_weights(name: str) -> Path:
    """Find or download timm weights in the Hugging Face cache."""
    otherwise = f"give the weights file of {name}, or run `python prepare_latents.py fetch encoder={name}`"
    return fetch_from_hub(f"timm/{name}", "model.safetensors", otherwise=otherwise)[0]


def _load(net: VisionTransformer, file: Path, preprocessing: str) -> None:
    """Load a weights file without executing any code in the file, and resize the position embeddings to the network's grid."""
    from timm.models import load_state_dict
    from timm.models.vision_transformer import checkpoint_filter_fn

    with as_user_error(f"{file} (weights of the encoder)"):
        stored = load_state_dict(str(file), weights_only=True)
        if preprocessing == "edm2" and stored["pos_embed"].shape != net.pos_embed.shape:
            stored["pos_embed"] = resample_as_dinov2(stored["pos_embed"], net.patch_embed.grid_size[0])
        state = checkpoint_filter_fn(dict(stored), net)
        net.load_state_dict({k: x for k, x in state.items() if not k.startswith("head.")}, assign=True)  # ignores the head


def resample_as_dinov2(table: Tensor, grid: int) -> Tensor:
    """Resize position embeddings [1, 1 + M * M, D] to [1, 1 + grid * grid, D] as DINOv2's code does (arXiv 2304.07193).

    DINOv2's code adds 0.1 to the new grid size before dividing by the stored size, so sampling is slightly denser than the grid.
    The interpolation uses no antialiasing.
    """
    stored_grid = math.isqrt(table.shape[1] - 1)
    patches = table[:, 1:].float().unflatten(1, (stored_grid, stored_grid)).permute(0, 3, 1, 2)
    scale = (grid + 0.1) / stored_grid
    patches = F.interpolate(patches, scale_factor=(scale, scale), mode="bicubic")
    return torch.cat([table[:, :1], patches.flatten(2).transpose(1, 2).to(table)], dim=1)
