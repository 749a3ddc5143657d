"""A loss on a part of the image, and the tokens that must not skip because the loss looks at them.

    keep = mask_to_tokens(mask, patch_size=2)
    with attachment.force_keep(keep):
        prediction = network(...)
    loss = masked_mse(prediction, target, mask).mean()

Shapes: B batch, C channels, H W latent height and width, F latent frames (of a video), p patch size, N tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def latent_mask(mask: Tensor, height: int, width: int) -> Tensor:
    """A mask of pixels as a mask of latents: the share of each latent's area that is inside.

    Args:
        mask: (B, H_pixels, W_pixels), bool or numbers in [0, 1]; 1 is inside.

    Returns:
        (B, H, W) float32 in [0, 1]. No region is lost: what touches the mask is above 0.
    """
    if mask.ndim != 3:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; it needs (batch, height, width)")
    return F.adaptive_avg_pool2d(mask.float()[:, None], (height, width))[:, 0]


def mask_to_tokens(mask: Tensor, patch_size: int | tuple[int, ...]) -> Tensor:
    """The tokens that a mask of latents touches, in the order in which patches become tokens (row by row).

    Args:
        mask: (B, H, W), or (B, F, H, W) for a video; above 0 is inside.
        patch_size: p, or one size per axis of the mask after the batch.

    Returns:
        (B, N) bool, for `Attachment.force_keep`. Raises ValueError for a mask that cannot be cut into patches.
    """
    sizes = (patch_size,) * (mask.ndim - 1) if isinstance(patch_size, int) else tuple(patch_size)
    if len(sizes) != mask.ndim - 1 or any(n % p for n, p in zip(mask.shape[1:], sizes)):
        raise ValueError(f"patch_size={patch_size} does not cut a mask of shape {tuple(mask.shape[1:])} into patches")
    inside = mask > 0
    for axis, p in enumerate(sizes, start=1):
        inside = inside.unflatten(axis, (-1, p)).any(dim=axis + 1)
    return inside.flatten(1)


def masked_mse(prediction: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Squared error, averaged over the inside of the mask.

    Args:
        prediction, target: (B, C, H, W), or (B, C, F, H, W).
        mask: (B, H, W) or (B, F, H, W), weights in [0, 1]; None is everywhere.

    Returns:
        (B,) float32; 0 for a sample whose mask is empty. Raises ValueError for shapes that do not fit.
    """
    if prediction.shape != target.shape:  # they would broadcast
        raise ValueError(f"prediction has shape {tuple(prediction.shape)}, target {tuple(target.shape)}; they must be the same")
    error = (prediction.float() - target.float()).square().mean(dim=1)  # (B, H, W)
    if mask is None:
        return error.flatten(1).mean(dim=1)
    if mask.shape != error.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; the latents need {tuple(error.shape)}")
    weight = mask.to(error.dtype).flatten(1)
    return (error.flatten(1) * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=torch.finfo(error.dtype).tiny)
