"""Write published weights as a run folder that every command can read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import torch
from omegaconf import OmegaConf

import dit
from checkpoints import store
from checkpoints.load import build_network
from common.errors import UserError
from common.files import write_file
from common.types import Count, Positive, Text
from configs import schema
from configs.command_line import check
from configs.compose import compose_overrides
from configs.experiments import LIGHTNING_DIFFUSION, SIT_SAMPLER
from configs.schema import AutoencoderSpec
from extras import lightningdit
from extras.weights.published import read_published, read_sizes, turn_time_and_sign, without_projectors
from latents.autoencoders import SD_VAE, known_scale_and_factor
from latents.torch_files import read_channel_statistics

log = logging.getLogger(__name__)

TRUNCATED = "sample.rounding=truncate"
# Kind of weights -> model, diffusion, and the settings of the published scores that differ from our defaults.
KINDS_OF_WEIGHTS = {
    "dit": ("dit", "ddpm", ""),
    "sit": ("dit", "sit", SIT_SAMPLER),
    "repa": ("dit", "sit", f"{SIT_SAMPLER} {TRUNCATED}"),
    "tread": ("tread", "edm", TRUNCATED),
    "lightningdit": ("lightningdit", "sit", LIGHTNING_DIFFUSION),
}
TURNED = ("sit", "lightningdit")  # their time runs from noise at 0 to data at 1, and they predict data - noise
# The number of EMA updates to assume if a file of weights has no step. An EMA that starts from them then has no warm-up.
LONG_TRAINED = 10**6


def import_weights(
    source: Text,
    kind: Literal[tuple(KINDS_OF_WEIGHTS)],
    output: Text,
    autoencoder: AutoencoderSpec | None = None,
    scale_factor: Positive | None = None,
    resolution: Count | None = None,
    latents_stats: Text | None = None,
) -> None:
    """Write published weights as a run. Sizes come from the shapes of the tensors, and the sampler from the published scores.

    Args:
        source: a .pt or .safetensors file.
        kind: project of the weights, which gives parameter names, time and diffusion: dit | sit | repa | tread | lightningdit.
        output: the folder of the new run.
        autoencoder: decodes the latents. None is the SD-VAE, or `none` for lightningdit (name a VA-VAE here or in each command).
        scale_factor: multiplies the latents. None means the scale factor of the autoencoder.
        resolution: height and width of the images, in pixels. If None, it follows from the autoencoder.
        latents_stats: for lightningdit, the latents_stats.pt published with the VA-VAE, or `none` for channels as they are.

    Raises:
        UserError: the folder exists, a key is missing, or the file cannot be read or holds another network.
    """
    folder = Path(output)
    if folder.exists():
        raise UserError(f"output={output} exists; give the folder of a new run")
    file = Path(source)
    model, ema, step = read_published(file)
    if kind == "repa":
        model, ema = without_projectors(model), without_projectors(ema)
    sizes = read_sizes(file, model, (lightningdit if kind == "lightningdit" else dit).BACKBONES)
    data = sizes["data"]
    if sizes["model"]["learn_sigma"] and kind not in ("dit", "sit"):
        raise UserError(f"{file} has twice as many channels out as in, which fits kind=dit and kind=sit, not kind={kind}")
    autoencoder = autoencoder or ("none" if kind == "lightningdit" else SD_VAE)
    scale, factor = ((1.0, 16) if kind == "lightningdit" else known_scale_and_factor(autoencoder)) or (None, None)
    if None in (scale_factor or scale, resolution or factor):
        raise UserError(f"autoencoder={autoencoder} needs scale_factor= and resolution=, which only its files tell")
    data |= {"autoencoder": autoencoder, "scale_factor": scale_factor or scale}
    data["resolution"] = resolution or factor * data["input_size"]
    if kind == "lightningdit" and latents_stats is None:
        raise UserError("latents_stats= is missing: give LightningDiT's latents_stats.pt, or none for channels as they are")
    if latents_stats not in (None, "none"):
        data["latents_mean"], data["latents_std"] = read_channel_statistics(Path(latents_stats), data["in_channels"])
    # In float32, like the published scores.
    run = {"name": folder.name, "output_dir": str(folder.parent), "train": {"num_steps": max(step, 1), "precision": "fp32"}}
    cfg = build_config(kind, sizes | run)
    with torch.device("meta"):
        like = build_network(cfg).state_dict()
    for state in (model, ema):
        store.check_tensors(file, state, like)
    config = cfg.model_dump()
    if kind in TURNED:
        model, ema = turn_time_and_sign(model), turn_time_and_sign(ema)
        config["model"]["learn_sigma"] = False
    state = {"ema_num_updates": step or LONG_TRAINED, "imported_from": f"{source} (kind={kind})"}
    write_file(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))
    checkpoint = store.Checkpoint(step, model, ema, optimizer={}, state=state, config=config)
    written = store.save(folder / "checkpoints", checkpoint, keep_last=1, keep_every=0)
    shape = "{in_channels}x{input_size}x{input_size}, {num_classes} classes".format(**data)
    log.info("%s: %s for latents of %s, in %s", file, cfg.model.backbone, shape, written)


def build_config(kind: str, changed: dict) -> schema.TrainConfig:
    """Compose the run's configuration: our defaults, then the published sampler, then `changed`."""
    model, diffusion, published = KINDS_OF_WEIGHTS[kind]
    composed = compose_overrides([f"model={model}", f"diffusion={diffusion}", "data=custom", *published.split()])
    return check(OmegaConf.merge(OmegaConf.to_container(composed), changed), schema.TrainConfig)
