"""Convert published weights to a run folder that every command can read."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Literal

import torch
from omegaconf import OmegaConf

import dit
from checkpoints import store
from cli.compose import compose_overrides, parse_config
from common.errors import UserError
from common.files import write_atomically
from common.types import PositiveFloat, PositiveInt, Text
from configs import schema
from configs.schema import AutoencoderSpec
from extras import lightningdit
from extras.weights.published import read_published, read_sizes, reverse_time_and_sign, with_null_row
from latents.autoencoders import SD_VAE, SD_VAES, known_scaling
from latents.torch_files import read_channel_statistics

log = logging.getLogger(__name__)

TRUNCATED = "sampling.rounding=truncate"
# For each kind of weights: arguments of train.py that set the model, the diffusion, and how the published scores were sampled.
KINDS_OF_WEIGHTS = {
    "dit": ["model=dit", "diffusion=ddpm"],
    "sit": ["model=dit", "experiment=bases/sde"],
    "repa": ["model=dit", "experiment=bases/sde", TRUNCATED],
    "tread": ["model=tread", TRUNCATED],
    "lightningdit": ["model=lightningdit", "experiment=bases/lightning_diffusion"],
}
CHANNELS = {"identity": (1, 3), **{f"sd-vae:{name}": (4,) for name in SD_VAES}}  # latent channels of known autoencoders
REVERSED = ("sit", "lightningdit")  # these networks use time 0 for noise and time 1 for data, and predict data - noise
# Assumed number of EMA updates if a weights file contains no step. It is so large that training skips the EMA warm-up.
ASSUMED_EMA_UPDATES = 10**6


def import_weights(
    source: Text,
    kind: Literal[tuple(KINDS_OF_WEIGHTS)],
    output: Text,
    autoencoder: AutoencoderSpec | None = None,
    scale_factor: PositiveFloat | None = None,
    resolution: PositiveInt | None = None,
    latents_stats: Text | None = None,
    num_classes: PositiveInt | None = None,
) -> None:
    """Import published weights as a run. Tensor shapes determine the sizes. Sampler settings are those of the published scores.

    Args:
        source: A .pt or .safetensors file.
        kind: Project of the weights: dit | sit | repa | tread | lightningdit. It determines parameter names, time and diffusion.
        output: Folder of the new run.
        autoencoder: Decoder of the latents. The default is SD-VAE, or `none` for lightningdit (commands then need a VA-VAE).
        scale_factor: Factor by which latents are multiplied. The default is the autoencoder's scale factor.
        resolution: Height and width of the images in pixels. The default follows from the latent size and the autoencoder.
        latents_stats: The latents_stats.pt of the VA-VAE, or `none` to leave the channels unchanged. Required for lightningdit.
        num_classes: Number of classes. The default comes from the file's arguments, or else is the label table's number of rows
            without a last row for the null class. Set it for a file without arguments whose table has no null class.

    Raises:
        UserError: If the folder exists, if a key is missing or contradicts the file, or if the file cannot be read, belongs to a
            checkpoint of this project, or contains another network or values that are not finite.
    """
    folder = Path(output)
    if folder.exists():
        raise UserError(f"output={output} exists; give the folder of a new run")
    file = Path(source)
    listed: dict[str, str] = {}
    with contextlib.suppress(UserError):  # without a manifest, or with that of another program
        listed = store.read_listed_hashes(file.parent)
    if file.name in listed:
        raise UserError(f"source={file} belongs to a checkpoint of this project; use it as it is: checkpoint={file.parent}")
    weights, step, stored_num_classes = read_published(file, kind)
    backbones = (lightningdit if kind == "lightningdit" else dit).BACKBONES
    sizes = read_sizes(file, weights[0], backbones, num_classes or stored_num_classes)
    data = sizes["data"]
    if sizes["model"]["learn_sigma"]:
        outputs, fitting_kinds = "twice", ("dit", "sit")
    else:  # every published DiT also predicts a variance
        outputs, fitting_kinds = "only", [name for name in KINDS_OF_WEIGHTS if name != "dit"]
    if kind not in fitting_kinds:
        raise UserError(
            f"{file} has {outputs} as many channels out as in, which fits kind={' or '.join(fitting_kinds)}, not kind={kind}"
        )
    autoencoder = autoencoder or ("none" if kind == "lightningdit" else SD_VAE)
    if (channels := CHANNELS.get(autoencoder)) and data["in_channels"] not in channels:
        found, needed = data["in_channels"], " or ".join(map(str, channels))
        raise UserError(
            f"{file} is for latents with {found} channels, and autoencoder={autoencoder} has {needed}; set autoencoder="
        )
    known = known_scaling("va-vae" if kind == "lightningdit" and autoencoder == "none" else autoencoder)
    known_scale, downsampling, *statistics = known or (None,) * 4
    if None in (scale_factor or known_scale, resolution or downsampling):
        raise UserError(f"autoencoder={autoencoder} needs scale_factor= and resolution=, which its name does not determine")
    data["scale_factor"] = scale_factor or known_scale
    data["resolution"] = resolution or downsampling * data["input_size"]
    if data["resolution"] != (downsampling or data["resolution"] // data["input_size"]) * data["input_size"]:
        pixels = f"{downsampling} pixels" if downsampling else "a whole number of pixels"
        raise UserError(f"resolution={resolution}, but {file} is for {data['input_size']} latents a side, each of {pixels}")
    if kind == "lightningdit" and latents_stats is None:
        raise UserError("latents_stats= is missing: give LightningDiT's latents_stats.pt, or none for channels as they are")
    if latents_stats == "none":
        statistics = None, None
    elif latents_stats is not None:
        statistics = read_channel_statistics(Path(latents_stats), data["in_channels"])
    data["latents_mean"], data["latents_std"] = statistics
    # Use float32, because the published scores also used float32.
    train = {"num_steps": max(step, 1), "precision": "fp32"}
    run = {"name": folder.name, "output_dir": str(folder.parent), "train": train, "sampling": {"autoencoder": autoencoder}}
    composed = compose_overrides(["data=custom", *KINDS_OF_WEIGHTS[kind]])
    cfg = parse_config(OmegaConf.merge(OmegaConf.to_container(composed), sizes | run), schema.TrainConfig)
    with torch.device("meta"):
        expected = cfg.model.build(cfg.data).state_dict()
    weights = [with_null_row(tensors, data["num_classes"]) for tensors in weights]
    for tensors in weights:
        store.check_tensors(file, tensors, expected)
    config = cfg.model_dump()
    if kind in REVERSED:
        weights = [*map(reverse_time_and_sign, weights)]
        config["model"]["learn_sigma"] = False
    state = {"ema_num_updates": step or ASSUMED_EMA_UPDATES, "imported_from": f"{source} (kind={kind})"}
    write_atomically(folder / "config.yaml", store.config_text(config))
    model, ema = weights
    contents = {"model": model, "ema": ema, "optimizer": {}}, state, config
    written = store.save(folder / "checkpoints", step, *contents, keep_last=1, keep_every=0)
    shape = "{in_channels}x{input_size}x{input_size}, {num_classes} classes".format(**data)
    null_class = "and a null class" if cfg.model.class_dropout else "without a null class"
    log.info("%s: %s for latents of %s %s, in %s", file, cfg.model.backbone, shape, null_class, written)
