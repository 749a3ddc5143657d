"""What latents of unknown origin are: told from their shape and statistics. Every decision is logged; none is a guess."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from errors import UserError
from latents.autoencoders import SD_VAES, known_scale_and_factor
from latents.shards import KINDS, ShardInfo, mean_and_log_variance

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
        key_prefix: goes before the keys in messages (`data.` in training).

    Returns:
        The header, the stored scale (stored values / stored scale are latents as the autoencoder makes them), and one
        statement per decision; statements that begin with "warning:" deserve to be seen.

    Raises:
        UserError: the statistics leave it open (the message asks for the key), keys contradict the data, or a label is
            outside num_classes.
    """
    latents = latents.float()
    height, width = latents.shape[2:]
    if not latents.isfinite().all():
        raise UserError("the latents hold NaN or Inf; make them again in float32 or bfloat16, or leave those items out")
    if height != width:
        raise UserError(f"latents of {height}x{width} are not square; encode square images")
    kind, statements = _detect_kind(latents, kind, known_kind, key_prefix)
    mean, log_variance = mean_and_log_variance(latents, kind)
    std = mean.double().std(correction=0).item()

    reason = "as given"
    if autoencoder is None and mean.shape[1] == 4:
        autoencoder = SD_VAE
        reason = (
            f"assumed, as latents have 4 channels (-ft-ema and -ft-mse share one encoder); {key_prefix}autoencoder= names another"
        )
    elif autoencoder is None:
        raise UserError(
            f"latents have {mean.shape[1]} channels, which is not SD-VAE's 4; name what made them with "
            f"{key_prefix}autoencoder=sd-vae:<hub id or folder>, or {key_prefix}autoencoder=none where nothing decodes them"
        )
    statements.append(f"autoencoder={autoencoder}: {reason}")
    known = known_scale_and_factor(autoencoder)

    is_sd_vae = autoencoder.removeprefix("sd-vae:") in SD_VAES
    stored_scale, reasons = _detect_stored_scale(std, kind, is_sd_vae, stored_scale, known_stored_scale, key_prefix)
    statements += reasons

    reason = "as given" if scale_factor is not None else f"that of {autoencoder}"
    if scale_factor is None and known is None:
        variance = 0.0 if log_variance is None else log_variance.double().exp().mean().item()
        drawn_std = math.sqrt(std**2 + variance) / stored_scale  # of mean + sqrt(variance) * noise, which training draws
        advice = (
            f"{SIGMA_DATA / drawn_std:.4g} gives it the standard deviation {SIGMA_DATA} that EDM assumes" if drawn_std else ""
        )
        raise UserError(
            f"{key_prefix}scale_factor= is missing: the network sees latents x scale_factor, and that of "
            f"autoencoder={autoencoder} is not known; {advice or 'these latents are constant'}"
        )
    scale_factor = known[0] if scale_factor is None else scale_factor
    statements.append(f"scale_factor={scale_factor:g}: {reason}")

    if resolution is None and known is None:
        raise UserError(
            f"{key_prefix}resolution= is missing: the size of the images in pixels cannot be told from latents of "
            f"{height}x{width} and autoencoder={autoencoder}"
        )
    reason = "as given" if resolution is not None else f"{height} latents of {known[1]} pixels along a side"
    resolution = known[1] * height if resolution is None else resolution
    statements.append(f"resolution={resolution}: {reason}")

    num_classes, reason = _detect_num_classes(labels, num_classes, key_prefix)
    statements.append(f"num_classes={num_classes}: {reason}")
    return ShardInfo(kind, float(scale_factor), autoencoder, int(resolution), num_classes), stored_scale, statements


def _detect_kind(latents: Tensor, kind: str | None, known_kind: str | None, key_prefix: str) -> tuple[str, list[str]]:
    channels = latents.shape[1]
    likely, reason = _likely_kind(latents)
    if kind is not None:
        if kind not in KINDS:
            raise UserError(f"{key_prefix}kind={kind} is not accepted; use {' | '.join(KINDS)}")
        statements = [f"kind={kind}: as given"]
        if known_kind not in (None, kind):
            statements.append(f"warning: {key_prefix}kind={kind}, but this format holds kind={known_kind}")
    elif known_kind is not None:
        kind, statements = known_kind, [f"kind={known_kind}: the format says so"]
    elif likely is not None:
        kind, statements = likely, [f"kind={likely}: {reason}"]
    else:
        raise UserError(
            f"cannot tell whether the {channels} channels are a sample, or mean and log-variance: {reason}; "
            f"set {key_prefix}kind=sample or {key_prefix}kind=moments"
        )
    if kind == "moments" and channels % 2:
        raise UserError(f"{key_prefix}kind=moments needs an even number of channels (mean and log-variance), not {channels}")
    if likely not in (None, kind):
        statements.append(f"warning: kind={kind}, but the values look like kind={likely}: {reason}")
    return kind, statements


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


def _detect_stored_scale(
    std: float, kind: str, is_sd_vae: bool, stored_scale: float | None, known: float | None, key_prefix: str
) -> tuple[float, list[str]]:
    """`std`: of the stored values, of the means alone where they are moments."""
    measured = f"stored {'means' if kind == 'moments' else 'latents'} have a standard deviation of {std:.3g}"
    if stored_scale is not None:
        if not (math.isfinite(stored_scale) and stored_scale > 0):
            raise UserError(f"{key_prefix}stored_scale={stored_scale} must be a positive number")
        reason = "as given"
    elif known is not None:
        stored_scale, reason = known, "the format says so"
    elif not is_sd_vae:
        stored_scale, reason = 1.0, f"assumed, as for any autoencoder but SD-VAE; {measured}"
    elif 4 <= std <= 7:
        stored_scale, reason = 1.0, f"{measured}, as SD-VAE makes them"
    elif 0.6 <= std <= 1.4:
        stored_scale, reason = SD_SCALE, f"{measured}, as SD-VAE's have once they were multiplied by {SD_SCALE}"
    else:
        raise UserError(
            f"cannot tell what the stored values were multiplied by: {measured}, where SD-VAE's have 4 to 7, or 0.6 to 1.4 "
            f"once multiplied by {SD_SCALE}; set {key_prefix}stored_scale=1 or {key_prefix}stored_scale={SD_SCALE}"
        )
    if kind == "moments" and stored_scale != 1:
        raise UserError(
            f"{key_prefix}stored_scale={stored_scale:g} ({reason}) does not go with kind=moments: a log-variance cannot be "
            f"scaled with its mean, and no project stores such; set {key_prefix}stored_scale=1, or {key_prefix}kind=sample "
            "if these are samples"
        )
    statements = [f"stored_scale={stored_scale:g}: {reason}"]
    if is_sd_vae and not 2 <= std / stored_scale <= 12:
        statements.append(
            f"warning: {measured}, which is {std / stored_scale:.3g} at stored_scale={stored_scale:g}, but SD-VAE makes 4 to 7; "
            f"check {key_prefix}stored_scale and {key_prefix}autoencoder"
        )
    return float(stored_scale), statements


def _detect_num_classes(labels: np.ndarray, num_classes: int | None, key_prefix: str) -> tuple[int, str]:
    if len(labels) == 0:
        raise UserError("there are no items")
    lowest, highest = int(labels.argmin()), int(labels.argmax())
    if labels[lowest] < 0:
        raise UserError(f"the label of item {lowest} is {labels[lowest]}; labels are 0 .. num_classes - 1")
    if num_classes is None:
        return int(labels[highest]) + 1, "the largest label + 1"
    if labels[highest] >= num_classes:
        raise UserError(
            f"the label of item {highest} is {labels[highest]}, outside {key_prefix}num_classes={num_classes}; "
            f"set {key_prefix}num_classes={labels[highest] + 1} or correct the labels"
        )
    return int(num_classes), "as given"
