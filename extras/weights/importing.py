"""From a published file of weights to a run folder that every command can read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import torch
from omegaconf import OmegaConf

import dit
from checkpoints import store
from checkpoints.load import build_network
from common.downloads import find_on_hub
from common.errors import UserError
from common.files import write_file
from common.types import Count, Positive, Text, Whole
from configs import schema
from configs.command_line import check
from configs.compose import compose_overrides
from configs.experiments import LIGHTNING_DIFFUSION, SIT_SAMPLER
from configs.schema import AutoencoderSpec
from extras import lightningdit
from extras.weights.published import read_published, read_sizes, turn_clock_and_sign, without_projectors
from latents.autoencoders import SD_VAE, known_scale_and_factor
from latents.torch_files import read_channel_statistics

log = logging.getLogger(__name__)

TRUNCATED = {"sample.rounding": "truncate"}
# Of each kind of weights: model, diffusion, and the diffusion's settings for the published scores that are not our defaults.
KINDS_OF_WEIGHTS = {
    "dit": ("dit", "ddpm", {}),
    "sit": ("dit", "sit", SIT_SAMPLER),
    "repa": ("dit", "sit", SIT_SAMPLER | TRUNCATED),
    "tread": ("tread", "edm", TRUNCATED),
    "lightningdit": ("lightningdit", "sit", LIGHTNING_DIFFUSION),
}
TURNED = ("sit", "lightningdit")  # their clock runs from noise at 0 to data at 1, and they predict data - noise
# Steps of weights whose file does not say how long they were trained: enough that an EMA started from them has no warm-up.
LONG_TRAINED = 10**6


def import_weights(
    source: Text,
    kind: Literal[tuple(KINDS_OF_WEIGHTS)],
    output: Text,
    step: Whole | None = None,
    autoencoder: AutoencoderSpec | None = None,
    scale_factor: Positive | None = None,
    resolution: Count | None = None,
    latents_stats: Text | None = None,
) -> None:
    """Write published weights as a run: sizes come from the tensors' shapes, the sampler is that of the published scores.

    Args:
        source: a file (.pt or .safetensors), or of the Hugging Face hub <owner>/<name>/<file>.
        kind: whose layout, clock and diffusion it has: dit | sit | repa | tread | lightningdit.
        output: the folder of the new run.
        step: optimizer steps that it was trained for; None: what the file says, else 0.
        autoencoder: decodes its latents; None: the SD-VAE, and for lightningdit none, which each command can name.
        scale_factor: what its latents are multiplied by; None: that of the autoencoder.
        resolution: of its images, in pixels; None: that of the autoencoder.
        latents_stats: of lightningdit, its latents_stats.pt, published beside the VA-VAE; or none: channels as they are.

    Raises:
        UserError: the folder exists; the file cannot be had or read, or is of another network; a key is missing.
    """
    folder = Path(output)
    if folder.exists():
        raise UserError(f"output={output} exists, and nothing was written; give the folder of a new run")
    file = find_published(source)
    model, ema, known_step = read_published(file)
    if kind == "repa":
        model, ema = without_projectors(model), without_projectors(ema)
    sizes = read_sizes(file, model, (lightningdit if kind == "lightningdit" else dit).BACKBONES)
    data = sizes["data"]
    if sizes["model"]["learn_sigma"] and kind not in ("dit", "sit"):
        raise UserError(f"{file} has twice as many channels out as in, which only kind=dit and kind=sit publish, not kind={kind}")
    if autoencoder is None and kind != "lightningdit" and data["in_channels"] != 4:
        raise UserError(f"autoencoder= is missing: {file} is for latents of {data['in_channels']} channels, SD-VAE's have 4")
    data |= fill_in_latents(kind, autoencoder, scale_factor, resolution, data["input_size"])
    if kind == "lightningdit" and latents_stats is None:
        raise UserError("latents_stats= is missing: give LightningDiT's latents_stats.pt, or none for channels as they are")
    if latents_stats not in (None, "none"):
        data["latents_mean"], data["latents_std"] = read_channel_statistics(Path(latents_stats), data["in_channels"])
    step = known_step if step is None else step
    # In float32, as published scores were sampled.
    run = {"name": folder.name, "output_dir": str(folder.parent), "train": {"num_steps": max(step, 1), "precision": "fp32"}}
    cfg = build_config(kind, sizes | run)
    with torch.device("meta"):
        like = build_network(cfg).state_dict()
    for state in (model, ema):
        store.check_tensors(file, state, like)
        if wrong := [name for name, value in state.items() if not value.isfinite().all()]:
            raise UserError(f"{file}: {wrong[0]} holds NaN or infinity")
    config = cfg.model_dump()
    if kind in TURNED:
        model, ema = turn_clock_and_sign(model), turn_clock_and_sign(ema)
        config["model"]["learn_sigma"] = False
    state = {"ema_num_updates": step or LONG_TRAINED, "imported_from": f"{source} (kind={kind})"}
    write_file(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))
    checkpoint = store.Checkpoint(step, model, ema, optimizer={}, state=state, config=config)
    written = store.save(folder / "checkpoints", checkpoint, keep_last=1, keep_every=0)
    shape = "{in_channels}x{input_size}x{input_size}, {num_classes} classes".format(**data)
    log.info("%s: %s for latents of %s, in %s", file, cfg.model.backbone, shape, written)
    decoder = " autoencoder=va-vae:<file>" if data["autoencoder"] == "none" else ""
    log.info("look at its samples: python sample.py checkpoint=%s seeds=0-7%s", folder, decoder)


def find_published(source: str) -> Path:
    """The file that `source` names; one of the hub is downloaded, unless its cache has it. Raises UserError without one."""
    if Path(source).is_file():
        return Path(source)
    owner, name, file = (*source.split("/", 2), "", "")[:3]
    otherwise = f"source={source} is no file, nor <owner>/<name>/<file> of the Hugging Face hub"
    return find_on_hub(f"{owner}/{name}", file, otherwise=otherwise)[0]


def fill_in_latents(
    kind: str, autoencoder: str | None, scale_factor: float | None, resolution: int | None, input_size: int
) -> dict[str, object]:
    """data.autoencoder, scale_factor and resolution; what is None is as the kind and the autoencoder have it."""
    # VA-VAE is a file of the user's: until a command names it, nothing decodes the latents of LightningDiT.
    autoencoder = autoencoder or ("none" if kind == "lightningdit" else SD_VAE)
    scale, factor = ((1.0, 16) if kind == "lightningdit" else known_scale_and_factor(autoencoder)) or (None, None)
    found = {"scale_factor": scale_factor or scale, "resolution": resolution or (factor and factor * input_size)}
    if missing := [f"{key}=" for key, value in found.items() if value is None]:
        raise UserError(f"{' and '.join(missing)} missing: autoencoder={autoencoder} does not say it before it is loaded")
    return found | {"autoencoder": autoencoder}


def build_config(kind: str, changed: dict) -> schema.TrainConfig:
    """The configuration of the run: `changed`, the published sampler, and this project's defaults."""
    model, diffusion, published = KINDS_OF_WEIGHTS[kind]
    overrides = [f"{key}={value}" for key, value in published.items()]
    composed = compose_overrides([f"model={model}", f"diffusion={diffusion}", "data=custom", *overrides])
    return check(OmegaConf.merge(OmegaConf.to_container(composed), changed), schema.TrainConfig)
