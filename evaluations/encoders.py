"""Frozen vision transformers of timm: images -> class token and patch tokens. Nothing here imports timm before it is needed,
because that takes about ten seconds.

B images, N = grid * grid patches, D width.
"""

from __future__ import annotations

import logging
import math
import pickle
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from common.downloads import NotDownloaded, download_from_hub, is_hub_id
from common.errors import UserError
from common.files import hash_file
from common.progress import say_if_slow

log = logging.getLogger(__name__)

DINOV2_B = "vit_base_patch14_dinov2.lvd142m"
EXAMPLE = f"{DINOV2_B}, say"
HUB_FILE = "model.safetensors"  # of timm's weights on the Hugging Face hub


class Encoder:
    """A vision transformer whose weights never change.

    It resizes images with a bicubic filter and normalises them with the mean and deviation that timm states for the weights.

    Args:
        name: timm's name of a VisionTransformer, with the tag of its weights: vit_base_patch14_dinov2.lvd142m.
        weights: a file of its weights as timm or its authors publish them (.safetensors, or of torch.save); None: from the
            cache of the Hugging Face hub, or downloaded into it.
        input_size: height = width of what the network sees, in pixels; None: that of its training.
        antialias: filter before shrinking. EDM2's FD-DINOv2 does, REPA's training does not.
        positions: how the table of positions is resampled to another grid: `timm` (bicubic with antialias, as REPA does it) or
            `dinov2` (bicubic without, at scale (grid + 0.1) / stored grid, as the authors' code and so FD-DINOv2 do it).
        precision: of its products, fp32 | bf16, whatever autocast the caller is in.
        compile: with torch.compile.
        key: of the configuration that names `weights`, for the messages.

    Attributes:
        patch_size: pixels along one side of a patch.
        grid: patches along one side of the input; the patch of row r and column c is token r * grid + c.
        width: D.
        weights_hash: of the file of weights.

    Raises:
        UserError: timm has no such network, or it is of another kind; the weights cannot be had, are of another network or not
            finite; input_size is not a multiple of the patch size.
    """

    def __init__(
        self,
        name: str,
        weights: str | Path | None = None,
        input_size: int | None = None,
        device: torch.device | str = "cpu",
        *,
        antialias: bool = True,
        positions: Literal["timm", "dinov2"] = "timm",
        precision: str = "fp32",
        compile: bool = False,
        key: str = "weights",
    ):
        self.name, self.device, self.antialias, self.precision = name, torch.device(device), antialias, precision
        file = None if weights is None else find_encoder_weights(name, weights, key)  # before timm is imported
        with say_if_slow(log, "loading the encoder %s", name):
            net, mean, std = _build(name, input_size)  # before anything is downloaded
            file = file or find_encoder_weights(name, None, key)
            _load(net, file, name, key, positions)
            self.weights_hash = hash_file(file)
        self.net = net.float().to(self.device).eval().requires_grad_(False)
        self.patch_size, self.width = net.patch_embed.patch_size[0], net.embed_dim
        self.input_size, self.grid = net.patch_embed.img_size[0], net.patch_embed.grid_size[0]
        self._forward = torch.compile(self.net.forward_features) if compile else self.net.forward_features
        self._num_prefix_tokens = net.num_prefix_tokens
        self._mean, self._std = (torch.tensor(values, device=self.device)[:, None, None] for values in (mean, std))

    @torch.no_grad()
    def encode(self, images: np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
        """The class token and the patch tokens, both after the last norm, float32 on the encoder's device.

        Args:
            images: [B, H, W, 3], uint8 or floats of 0 to 1, of any size; they are squeezed to a square.

        Returns:
            [B, D] and [B, N, D], the patches row by row.
        """
        x = torch.as_tensor(images)
        if x.ndim != 4 or x.shape[3] != 3:
            raise ValueError(f"images are {list(x.shape)}; an encoder takes [B, H, W, 3], channels last")
        if x.dtype != torch.uint8 and not x.is_floating_point():
            raise ValueError(f"images are {x.dtype}; an encoder takes uint8, or floats of 0 to 1")
        x = x.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        with torch.autocast(self.device.type, enabled=False):
            x = x.float() / 255 if x.dtype == torch.uint8 else x.float()
            size = (self.input_size, self.input_size)
            if x.shape[2:] != size:
                x = F.interpolate(x, size, mode="bicubic", antialias=self.antialias)
            x = (x - self._mean) / self._std
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            tokens = self._forward(x).float()
        return tokens[:, 0], tokens[:, self._num_prefix_tokens :]


def _build(name: str, input_size: int | None) -> tuple[nn.Module, tuple[float, ...], tuple[float, ...]]:
    """The network without weights (on the meta device), and mean and deviation of the pixels that it was trained with."""
    import timm  # slow to import
    from timm.models.vision_transformer import VisionTransformer

    try:
        published = timm.get_pretrained_cfg(name)
    except RuntimeError:  # the tag is unknown
        published = None
    if published is None:
        raise UserError(f"the encoder {name!r} is none of timm's; use one that `timm.list_pretrained()` names: {EXAMPLE}")
    size = {} if input_size is None else {"img_size": input_size}
    try:
        with torch.device("meta"):
            net = timm.create_model(name, pretrained=False, num_classes=0, **size)
    except TypeError:  # networks of other kinds have no img_size
        net = None
    if not isinstance(net, VisionTransformer) or net.cls_token is None or net.pos_embed is None:
        raise UserError(
            f"the encoder {name} is no VisionTransformer of timm with a class token and a table of positions; use {EXAMPLE}"
        )
    patch = net.patch_embed.patch_size[0]
    if net.patch_embed.img_size[0] % patch:
        near = max(round(input_size / patch), 1) * patch
        raise UserError(f"the encoder {name} has patches of {patch} pixels, which do not divide {input_size}; give {near}")
    return net, published.mean, published.std


def find_encoder_weights(name: str, weights: str | Path | None, key: str) -> Path:
    """The file of weights: `weights` itself, or that of timm's model on the Hugging Face hub, downloaded if it is not cached.

    Raises:
        UserError: it is not there and cannot be downloaded; the message names `key`.
    """
    repository = f"timm/{name}"
    if weights is not None:
        if not Path(weights).is_file():
            raise UserError(
                f"{key}={weights} is not a file; put {HUB_FILE} of {repository} (Hugging Face hub) there, or leave it out"
            )
        return Path(weights)
    from huggingface_hub import try_to_load_from_cache

    if not is_hub_id(repository):
        raise UserError(f"the encoder {name!r} is no name of timm's: give it without timm/ or hf-hub: before it, {EXAMPLE}")
    if isinstance(cached := try_to_load_from_cache(repository, HUB_FILE), str):
        return Path(cached)
    try:
        return download_from_hub(repository, lambda names: [HUB_FILE])[0]
    except NotDownloaded as e:
        raise UserError(
            f"the weights of the encoder {name} are not in the cache of the Hugging Face hub, and {e}; run `python "
            f"prepare_latents.py fetch encoder={name}` once where there is a network, or set {key}=<{HUB_FILE} of {repository}>"
        ) from e


def _load(net: nn.Module, file: Path, name: str, key: str, positions: str) -> None:
    """Load a file of weights, its table of positions resampled. Raises UserError; nothing in the file is run."""
    from timm.models import load_state_dict
    from timm.models.vision_transformer import checkpoint_filter_fn

    try:
        stored = load_state_dict(str(file), weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, ValueError, SafetensorError, AttributeError) as e:
        reason = " ".join(str(e).split()).partition(". ")[0][:200]
        raise UserError(f"{key}: {file} cannot be read as weights ({reason}); give {HUB_FILE} of timm/{name}") from e
    try:
        table, patches = stored.get("pos_embed"), stored.get("patch_embed.proj.weight")
        if patches is not None and patches.ndim == 4 and patches.shape[3] != net.patch_embed.patch_size[1]:
            raise ValueError(f"its patches have {patches.shape[3]} pixels")  # timm would resample them
        if positions == "dinov2" and table is not None and table.shape != net.pos_embed.shape:
            stored["pos_embed"] = resample_as_dinov2(table, net.patch_embed.grid_size[0])
        state = checkpoint_filter_fn(dict(stored), net)
        state = {k: x for k, x in state.items() if not k.startswith("head.")}  # of a classifier
        net.load_state_dict(state, assign=True)
    except (RuntimeError, TypeError, KeyError, ValueError, AttributeError, IndexError) as e:
        reason = " ".join(str(e).split())[:200]  # RuntimeError lists every key
        raise UserError(f"{key}: {file} holds the weights of another network than {name} ({reason})") from e
    if not all(x.isfinite().all() for x in state.values()):
        raise UserError(f"{key}: {file} holds weights that are not finite; get {HUB_FILE} of timm/{name} again")


def resample_as_dinov2(table: Tensor, grid: int) -> Tensor:
    """A table of positions [1, 1 + M * M, D] -> [1, 1 + grid * grid, D], as DINOv2's own code does it (arXiv 2304.07193).

    That code adds 0.1 to the new size before it divides by the stored one, so that the sampled points are slightly denser than
    the grid, and uses no antialias.
    """
    stored_grid = math.isqrt(table.shape[1] - 1)
    patches = table[:, 1:].float().unflatten(1, (stored_grid, stored_grid)).permute(0, 3, 1, 2)
    scale = (grid + 0.1) / stored_grid
    patches = F.interpolate(patches, scale_factor=(scale, scale), mode="bicubic")
    return torch.cat([table[:, :1], patches.flatten(2).transpose(1, 2).to(table)], dim=1)
