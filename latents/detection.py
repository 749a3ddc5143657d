"""What latents of unknown origin are: told from their shape and statistics. Every decision is logged; none is a guess."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from common.errors import UserError
from latents.autoencoders import SD_VAES, known_scale_and_factor
from latents.shards import KINDS, ShardInfo
from latents.statistics import ChannelStatistics

SD_VAE = "sd-vae:stabilityai/sd-vae-ft-ema"
SD_SCALE = 0.18215  # brings SD-VAE latents, whose standard deviation is about 5.5, to about 1
SIGMA_DATA = 0.5  # EDM, Table 1: the standard deviation that the network is built for


def detect(
    latents: Tensor,
    *,
    labels: np.ndarray,
    kind: str | None = None,
    stored_scale: float | None = None,
    scale_factor: float | None = None,
    autoencoder: str | None = None,
    resolution: int | None = None,
    num_classes: int | None = None,
    known_kind: str | None = None,
    known_stored_scale: float | None = None,
    known_scale_factor: float | None = None,
    key_prefix: str = "",
) -> tuple[ShardInfo, float, list[str]]:
    """Find what a header of native shards says, for latents that come without one.

    Args:
        latents: [n, C, h, w] (2C channels where they are moments), stored values of items spread over the data; a few
            hundred are plenty.
        labels: [N] int64, of all items.
        kind, scale_factor, autoencoder, resolution, num_classes: as in ShardInfo; None is detected.
        stored_scale: what the stored values were multiplied by after the autoencoder made them; None is detected.
        known_kind, known_stored_scale: what the format says; `kind` and `stored_scale` override it.
        known_scale_factor: 1, for latents of which each channel is normalised.
        key_prefix: goes before the keys in messages (`data.` in training).

    Returns:
        The header, the stored scale (stored values / stored scale are latents as the autoencoder makes them), and one
        statement per decision; statements that begin with "warning:" deserve to be seen.

    Raises:
        UserError: the statistics leave it open (the message asks for the key), keys contradict the data, or a label is
            outside num_classes.
    """
    latents = latents.float()
    channels, height, width = latents.shape[1:]
    if not latents.isfinite().all():
        raise UserError("the latents hold NaN or Inf; make them again in float32 or bfloat16, or leave those items out")
    if height != width:
        raise UserError(f"latents of {height}x{width} are not square; encode square images")
    if kind not in (None, *KINDS):
        raise UserError(f"{key_prefix}kind={kind} is not accepted; use {' | '.join(KINDS)}")
    if stored_scale is not None and not (math.isfinite(stored_scale) and stored_scale > 0):
        raise UserError(f"{key_prefix}stored_scale={stored_scale} must be a positive number")
    statements: list[str] = []

    def settle(key: str, given: Any, *options: tuple[Any, str], otherwise: str = "") -> tuple[Any, str]:
        """(value, reason): what is given, or the first option (value, reason) that has a value; `otherwise` is the error."""
        value, reason = next(((v, r) for v, r in ((given, "as given"), *options) if v is not None), (None, ""))
        if value is None:
            raise UserError(otherwise)
        statements.append(f"{key}={f'{value:g}' if isinstance(value, float) else value}: {reason}")
        return value, reason

    likely_kind, look = _likely_kind(latents)
    kind, _ = settle(
        "kind",
        kind,
        (known_kind, "the format says so"),
        (likely_kind, look),
        otherwise=f"cannot tell whether the {channels} channels are a sample, or mean and log-variance: {look}; "
        f"set {key_prefix}kind=sample or {key_prefix}kind=moments",
    )
    if known_kind not in (None, kind):
        statements.append(f"warning: {key_prefix}kind={kind}, but this format holds kind={known_kind}")
    if kind == "moments" and channels % 2:
        raise UserError(f"{key_prefix}kind=moments needs an even number of channels (mean and log-variance), not {channels}")
    if likely_kind not in (None, kind):
        statements.append(f"warning: kind={kind}, but the values look like kind={likely_kind}: {look}")
    statistics = ChannelStatistics()
    statistics.add(latents, kind)
    num_channels = len(statistics.mean)

    shared = "(-ft-ema and -ft-mse share one encoder)"
    autoencoder, _ = settle(
        "autoencoder",
        autoencoder,
        (
            SD_VAE if num_channels == 4 else None,
            f"assumed, as latents have 4 channels {shared}; {key_prefix}autoencoder= names another",
        ),
        otherwise=f"latents have {num_channels} channels, which is not SD-VAE's 4; name what made them with "
        f"{key_prefix}autoencoder=sd-vae:<hub id or folder> (VA-VAE: va-vae:<file>), or "
        f"{key_prefix}autoencoder=none where nothing decodes them",
    )
    known_factor, pixels = known_scale_and_factor(autoencoder) or (None, None)
    is_sd_vae = autoencoder.removeprefix("sd-vae:") in SD_VAES

    std = statistics.overall_std  # of `moments`: of the latents that training draws from them
    measured = f"{'drawn' if kind == 'moments' else 'stored'} latents have a standard deviation of {std:.3g}"
    stored_scale, reason = settle(
        "stored_scale",
        stored_scale,
        # A log-variance cannot be scaled with its mean, and no project stores such.
        (1.0 if kind == "moments" else None, f"moments are stored as the autoencoder makes them; {measured}"),
        (known_stored_scale, "the format says so"),
        (None if is_sd_vae else 1.0, f"assumed, as for any autoencoder but SD-VAE; {measured}"),
        (1.0 if 4 <= std <= 7 else None, f"{measured}, as SD-VAE makes them"),
        (SD_SCALE if 0.6 <= std <= 1.4 else None, f"{measured}, as SD-VAE's have once they were multiplied by {SD_SCALE}"),
        otherwise=f"cannot tell what the stored values were multiplied by: {measured}, where SD-VAE's have 4 to 7, or 0.6 to 1.4 "
        f"once multiplied by {SD_SCALE}; set {key_prefix}stored_scale=1 or {key_prefix}stored_scale={SD_SCALE}",
    )
    if kind == "moments" and stored_scale != 1:
        raise UserError(
            f"{key_prefix}stored_scale={stored_scale:g} ({reason}) does not go with kind=moments: a log-variance cannot be "
            f"scaled with its mean; set {key_prefix}stored_scale=1, or {key_prefix}kind=sample "
            "if these are samples"
        )
    if is_sd_vae and not 2 <= std / stored_scale <= 12:
        statements.append(
            f"warning: {measured}, which is {std / stored_scale:.3g} at stored_scale={stored_scale:g}, but SD-VAE makes 4 to 7; "
            f"check {key_prefix}{'kind' if kind == 'moments' else 'stored_scale'} and {key_prefix}autoencoder"
        )

    advice = "these latents are constant"
    if std:
        advice = f"{SIGMA_DATA * stored_scale / std:.4g} gives it the standard deviation {SIGMA_DATA} that EDM assumes"
    scale_factor, _ = settle(
        "scale_factor",
        scale_factor,
        (known_scale_factor, "each channel is brought to a mean of 0 and a standard deviation of 1"),
        (known_factor, f"that of {autoencoder}"),
        otherwise=f"{key_prefix}scale_factor= is missing: the network sees latents x scale_factor, and that of "
        f"autoencoder={autoencoder} is not known; {advice}",
    )
    resolution, _ = settle(
        "resolution",
        resolution,
        (pixels and pixels * height, f"{height} latents of {pixels} pixels along a side"),
        otherwise=f"{key_prefix}resolution= is missing: the size of the images in pixels cannot be told from latents of "
        f"{height}x{width} and autoencoder={autoencoder}",
    )
    num_classes, _ = settle(
        "num_classes", num_classes, (_count_classes(labels, num_classes, key_prefix), "the largest label + 1")
    )
    info = ShardInfo(kind, float(scale_factor), autoencoder, int(resolution), int(num_classes))
    return info, float(stored_scale), statements


def _likely_kind(latents: Tensor) -> tuple[str | None, str]:
    """(kind, or None where the values leave it open; the reason)."""
    channels = latents.shape[1]
    if channels % 2:
        return "sample", f"{channels} channels are an odd number"
    first, second = (half.double() for half in latents.chunk(2, dim=1))
    (first_mean, first_std), (second_mean, second_std) = ((x.mean().item(), x.std(correction=0).item()) for x in (first, second))
    # The log-variances of a KL autoencoder that is trained mainly to reconstruct are far below 0: SD-VAE's are about -20 to
    # -8, and clamped at -30. Means are centred.
    if (second < 0).double().mean() >= 0.99 and second_mean < -6 and abs(first_mean) < 2 * first_std:
        low, high = second.min().item(), second.max().item()
        return "moments", f"{channels} channels, the last {channels // 2} between {low:.1f} and {high:.1f}, as log-variances are"
    halves = f"mean {first_mean:.2f} and std {first_std:.2f}, the last mean {second_mean:.2f} and std {second_std:.2f}"
    halves = f"the first {channels // 2} of {channels} channels have {halves}"
    if abs(second_mean) < 2 * second_std and first_std / 4 < second_std < first_std * 4:
        return "sample", f"{halves}, so that none are log-variances"
    return None, halves


def _count_classes(labels: np.ndarray, num_classes: int | None, key_prefix: str) -> int:
    """The largest label + 1. Raises UserError for labels that are negative or outside `num_classes`."""
    if len(labels) == 0:
        raise UserError("there are no items")
    lowest, highest = int(labels.argmin()), int(labels.argmax())
    if labels[lowest] < 0:
        raise UserError(f"the label of item {lowest} is {labels[lowest]}; labels are 0 .. num_classes - 1")
    if num_classes is not None and labels[highest] >= num_classes:
        raise UserError(
            f"the label of item {highest} is {labels[highest]}, outside {key_prefix}num_classes={num_classes}; "
            f"set {key_prefix}num_classes={labels[highest] + 1} or correct the labels"
        )
    return int(labels[highest]) + 1
