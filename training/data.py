"""Open the training and validation latents, and fill in the configuration values that depend on them."""

from __future__ import annotations

import logging
from typing import Any

from common.errors import UserError, prefix_errors
from common.images import are_same_colour, differing_class
from common.progress import log_if_slow
from configs import schema
from configs.differences import differences
from configs.settings import fill_missing
from latents.channel_statistics import USUAL_STD, estimate_std
from latents.dataset import LatentDataset

log = logging.getLogger(__name__)


def open_training_latents(data: schema.Data) -> LatentDataset:
    """Open the training latents in data.path."""
    if data.path is None:
        raise UserError(f"data.path is not set: give the folder of the latent shards of {data.name}; see docs/data.md")
    with log_if_slow(log, "opening data.path=%s", data.path), prefix_errors("data.path"):
        dataset = LatentDataset(data.path)
    if dataset.height != dataset.width:
        raise UserError(f"data.path={data.path}: networks need square latents, not {dataset.height}x{dataset.width}")
    return dataset


def complete_config(cfg: schema.TrainConfig, dataset: LatentDataset) -> schema.TrainConfig:
    """Return the configuration with the values that depend on the latents, which it must not contradict."""
    stored = {"in_channels": dataset.channels, "input_size": dataset.height}
    for key in ("num_classes", "scale_factor", "resolution", "latents_mean", "latents_std"):
        stored[key] = getattr(dataset.info, key)
    for key, value in stored.items():
        if getattr(cfg.data, key) not in (None, value):
            actual = f"the latents of {dataset.path} have {value}; data=custom reads it from them"
            raise UserError(f"data.{key}={getattr(cfg.data, key)}, but {actual}")
    filled = {
        "data": cfg.data.model_copy(update=stored),
        "sampling": fill_missing(cfg.sampling, {"autoencoder": dataset.info.autoencoder}),
        "evaluation": fill_missing(cfg.evaluation, {"background": dataset.encode_settings.get("background", "white")}),
    }
    return complete_lengths(cfg.model_copy(update=filled), len(dataset))


def warn_of_unusual_scale(cfg: schema.TrainConfig, dataset: LatentDataset) -> None:
    """Warn if the latents that the network sees have another standard deviation than usual."""
    std = estimate_std(dataset)
    low, high = (x * getattr(cfg.diffusion, "sigma_data", 0.5) for x in USUAL_STD)
    if not low <= std <= high:
        message = f"the network sees latents with a standard deviation of {std:.3g}, and {low:g} to {high:g} is usual"
        log.warning("%s: %s; is the scale factor wrong? See `prepare_latents.py inspect`", dataset.path, message)


def complete_lengths(cfg: schema.TrainConfig, num_images: int) -> schema.TrainConfig:
    """Return the configuration with the intervals, num_steps and ema_decay that are unset derived from the number of images.

    configs/data/custom.yaml describes the rule.
    """
    num_steps = cfg.train.num_steps or max(min(max(2000 * num_images, 2_560_000), 102_400_000) // cfg.train.batch_size, 1)
    every = max(num_steps // 20, min(num_steps, 500))
    ema_decay = round(min(max(1 - 10 / num_steps, 0.9), 0.9999), 6)
    rule = {
        "train": {"num_steps": num_steps, "ema_decay": ema_decay, "ema_snapshot_every": max(num_steps // 20, 1)},
        "checkpoint": {"every": every, "keep_every": 5 * (cfg.checkpoint.every or every)},
        "sample_grid": {"every": every},
        "evaluation": {"every": 2 * every if cfg.evaluation.reference or cfg.evaluation.validation else 0},
    }
    filled = cfg.model_copy(update={group: fill_missing(getattr(cfg, group), values) for group, values in rule.items()})
    if derived := differences(cfg, filled):
        log.info("for %d images: %s", num_images, ", ".join(f"{change.key}={change.new}" for change in derived))
    return filled


def open_validation(cfg: schema.TrainConfig, dataset: LatentDataset) -> LatentDataset | None:
    """Open the validation latents in evaluation.validation.

    Raises UserError if the validation latents do not match the training latents, or if evaluation.every is 0. Warn if they
    share shards or images, or if only one of the two folders says which background its images have.
    """
    if not cfg.evaluation.validation:
        return None
    if not cfg.evaluation.every:
        problem = "has no effect with evaluation.every=0; set evaluation.every"
        raise UserError(f"evaluation.validation={cfg.evaluation.validation} {problem}")
    with prefix_errors("evaluation.validation"):
        validation = LatentDataset(cfg.evaluation.validation)
    check_same_latents(validation, dataset)
    check_same_background(validation, dataset)
    warn_of_overlap(validation, dataset)
    return validation


def check_same_latents(validation: LatentDataset, dataset: LatentDataset) -> None:
    """Raise UserError if the validation latents have another shape, encoding or list of classes than the training latents."""

    def describe(data: LatentDataset) -> dict[str, Any]:
        stored = {key: getattr(data.info, key) for key in ("autoencoder", "resolution", "kind", "num_classes")}
        return {"channels": data.channels, "height": data.height, **stored, "class_names": data.class_names}

    training = describe(dataset)
    for key, here in describe(validation).items():
        there = training[key]
        if here != there and (key != "class_names" or differing_class(here, there)):  # class names may be unknown
            raise UserError(f"evaluation.validation={validation.path}: {key} is {here}, but {there} in data.path={dataset.path}")


def check_same_background(validation: LatentDataset, dataset: LatentDataset) -> None:
    """Raise UserError if the two folders were encoded with different backgrounds. Warn if only one of them says which."""
    here, there = (data.encode_settings.get("background") for data in (validation, dataset))
    if here and there and not are_same_colour(here, there):
        problem = f"it was encoded with background={here}, but data.path={dataset.path} with background={there}"
        raise UserError(f"evaluation.validation={validation.path}: {problem}")
    if bool(here) != bool(there):
        silent, other = (validation, dataset) if there else (dataset, validation)
        message = f"{silent.path} does not say which colour is behind its transparent images; {other.path} has {here or there}"
        log.warning("evaluation.validation: %s", message)


def warn_of_overlap(validation: LatentDataset, dataset: LatentDataset) -> None:
    """Warn if shards or images of the validation latents are also in the training latents."""
    if shared := set(validation.hashes.values()) & set(dataset.hashes.values()):
        overlap = f"{len(shared)} of the {len(validation.files)} shards of {validation.path} are also in data.path={dataset.path}"
        log.warning("evaluation.validation: %s, so they measure a loss on training latents", overlap)
    elif num_shared := int(validation.shared_with(dataset).sum()):
        overlap = f"{num_shared} of the {len(validation)} images of {validation.path} are also in data.path={dataset.path}"
        log.warning("evaluation.validation: %s, so they measure a loss on training images", overlap)
