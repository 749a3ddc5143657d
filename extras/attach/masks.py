"""For a loss on a part of the image: the tokens that must not skip, because the loss looks at them.

    with attachment.force_keep(mask_to_tokens(mask, patch_size=2)):
        prediction = network(...)

Shapes: B batch, H W latent height and width, F latent frames (of a video), p patch size, N tokens.
"""

from __future__ import annotations

from torch import Tensor


def mask_to_tokens(mask: Tensor, patch_size: int | tuple[int, ...]) -> Tensor:
    """The tokens that a mask of latents touches, in the order in which patches become tokens (row by row).

    Args:
        mask: (B, H, W), or (B, F, H, W) for a video; above 0 is inside.
        patch_size: p, or one size per axis of the mask after the batch.

    Returns:
        (B, N) bool, for `Attachment.force_keep`.
    """
    sizes = (patch_size,) * (mask.ndim - 1) if isinstance(patch_size, int) else patch_size
    inside = mask > 0
    for axis, p in enumerate(sizes, start=1):
        inside = inside.unflatten(axis, (-1, p)).any(dim=axis + 1)
    return inside.flatten(1)
