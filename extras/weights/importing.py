"""From a published file of weights to a run folder that every command can read."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf

from common.downloads import NotDownloaded, NotOnHub, download_from_hub, is_hub_id
from common.errors import UserError
from common.files import lock_output, write_file
from configs import experiments, schema
from extras.weights.published import (
    FILE_TYPES,
    KINDS_OF_WEIGHTS,
    TURNED,
    Sizes,
    as_dit,
    check_names,
    read_published,
    read_sizes,
    turn_clock_and_sign,
)
from latents import autoencoders
from latents.arrays import read_channel_statistics
from latents.detection import SD_VAE
from training import checkpoint as checkpoints
from training.build import build_network

log = logging.getLogger(__name__)

# What the published scores were sampled with, and LightningDiT trained, where it is not this project's default.
OF_DIFFUSION = {
    "sit": experiments.SIT_SAMPLER,
    "repa": experiments.SIT_SAMPLER,
    "lightningdit": experiments.LIGHTNING_DIFFUSION,
}
# Of weights whose file does not say how long they were trained: long enough that an EMA started from them has no warm-up.
LONG_TRAINED = 10**6


@dataclass(frozen=True)
class Latents:
    """What a file of weights does not say about the latents. None: as is usual for the kind and the autoencoder."""

    autoencoder: str | None = None
    scale_factor: float | None = None
    resolution: int | None = None
    stats: str | None = None  # LightningDiT's latents_stats.pt, or none


def import_published(source: str, kind: str, output: Path, step: int | None, latents: Latents) -> Path:
    """Write published weights as the only checkpoint of a new run, which appears under its name when it is whole.

    Args:
        source: a file, or of the Hugging Face hub owner/name or owner/name/file.
        step: optimizer steps that the weights were trained for; None: what the file says, else 0.

    Returns:
        The folder of the checkpoint.

    Raises:
        UserError: the folder exists; the file cannot be had or read, or is of another network.
    """
    check_free(output)
    file = find_published(source)
    published = read_published(file)
    states = {"model": published.model, "ema": published.ema}
    if kind == "repa":
        states = {name: as_dit(state) for name, state in states.items()}
    model, _ = KINDS_OF_WEIGHTS[kind]
    backbones = next(network.BACKBONES for network, names in schema.FAMILIES.values() if model in names)
    sizes = read_sizes(file, states["model"], backbones)
    if sizes.learn_sigma and kind not in ("dit", "sit"):
        raise UserError(f"{file} has twice as many channels out as in, which only DiT and SiT publish; give kind=dit or kind=sit")
    step = published.step or 0 if step is None else step
    cfg = build_config(sizes, kind, output, step, latents)
    with torch.device("meta"):
        like = build_network(cfg).state_dict()
    for state in states.values():
        check_names(file, state, like, sizes.backbone)
    states = {name: {key: value.float() for key, value in state.items()} for name, state in states.items()}
    if kind in TURNED:
        states = {name: turn_clock_and_sign(state) for name, state in states.items()}
        cfg = cfg.model_copy(update={"model": cfg.model.model_copy(update={"learn_sigma": False})})
    size = f"{sizes.in_channels}x{sizes.input_size}x{sizes.input_size}"
    log.info("%s: %s for latents of %s, %s classes", file, sizes.backbone, size, sizes.num_classes)
    state = {"ema_num_updates": step or LONG_TRAINED, "imported_from": f"{source} (kind={kind})"}
    return write_run(output, checkpoints.Checkpoint(step, **states, optimizer={}, state=state, config=cfg.model_dump()))


def build_config(sizes: Sizes, kind: str, output: Path, step: int, latents: Latents) -> schema.TrainConfig:
    """The configuration of the run: what the shapes say, the published sampler, and this project's defaults."""
    model, diffusion = KINDS_OF_WEIGHTS[kind]
    group = {(4, 32, 1000): "imagenet256", (4, 64, 1000): "imagenet512"}
    group = group.get((sizes.in_channels, sizes.input_size, sizes.num_classes), "custom")
    published = [f"{key}={value}" for key, value in OF_DIFFUSION.get(kind, {}).items()]
    composed = experiments.compose_overrides([f"model={model}", f"diffusion={diffusion}", f"data={group}", *published])
    raw = OmegaConf.to_container(composed, resolve=True)
    raw |= {"name": output.name, "output_dir": str(output.parent)}
    raw["model"] |= {"backbone": sizes.backbone, "learn_sigma": sizes.learn_sigma}
    raw["data"] |= {key: getattr(sizes, key) for key in ("in_channels", "input_size", "num_classes")}
    raw["data"] |= describe_latents(kind, sizes, latents)
    raw["train"]["num_steps"] = max(step, 1)
    return schema.check(raw, schema.TrainConfig)


def describe_latents(kind: str, sizes: Sizes, latents: Latents) -> dict[str, object]:
    """data.* that says what the network sees of an image."""
    # VA-VAE is a file of the user's: until a command names it, nothing decodes the latents.
    autoencoder = latents.autoencoder or ("none" if kind == "lightningdit" else SD_VAE)
    known = (1.0, 16) if kind == "lightningdit" else autoencoders.known_scale_and_factor(autoencoder)
    found: dict[str, object] = {"autoencoder": autoencoder}
    for i, (key, words) in enumerate((("scale_factor", "what latents are multiplied by"), ("resolution", "of the images"))):
        found[key] = getattr(latents, key)
        if found[key] is None and known is None:
            raise UserError(f"{key}= is missing: autoencoder={autoencoder} does not say it before it is loaded; give {words}")
        if found[key] is None:
            found[key] = known[i] * (sizes.input_size if key == "resolution" else 1)
    if latents.stats not in (None, "none"):
        mean, std = read_channel_statistics(Path(latents.stats), sizes.in_channels)
        found |= {"latents_mean": mean, "latents_std": std}
    elif kind == "lightningdit" and latents.stats is None:
        raise UserError(
            "latents_stats= is missing: LightningDiT normalises each channel of the latents; give latents_stats.pt, which is "
            "published beside the VA-VAE, or latents_stats=none for weights that were trained without"
        )
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Files.


def check_free(output: Path) -> None:
    if output.exists():
        raise UserError(f"output={output} exists, and nothing was written; give the folder of a new run")


def write_run(output: Path, checkpoint: checkpoints.Checkpoint) -> Path:
    """Write the run under another name and rename it. Returns the folder of the checkpoint."""
    temporary = output.with_name(f".tmp_{output.name}")
    lock = lock_output(temporary, "importing into")
    try:
        written = checkpoints.save(temporary / "checkpoints", checkpoint, keep_last=1, keep_every=0)
        write_file(temporary / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(checkpoint.config)))
        lock.close()
        (temporary / ".lock").unlink()
        check_free(output)
        temporary.rename(output)
    except OSError as e:
        raise UserError(f"cannot write output={output}: {e.strerror}; give another folder") from e
    finally:
        lock.close()
        shutil.rmtree(temporary, ignore_errors=True)
    return output / "checkpoints" / written.name


def find_published(source: str) -> Path:
    """The file that `source` names; one of the hub is downloaded, unless its cache has it.

    Raises:
        UserError: there is no such file or model, it cannot be downloaded, or the model has several files of weights.
    """
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        files = ", ".join(sorted(file.name for file in path.iterdir() if file.suffix in FILE_TYPES)[:5])
        raise UserError(f"source={source} is a folder; give the file of weights in it{f': {files}' if files else ''}")
    owner, _, rest = source.partition("/")
    model, _, name = rest.partition("/")
    repository = f"{owner}/{model}"
    from huggingface_hub import try_to_load_from_cache

    unknown = "give the path of a file, or of the Hugging Face hub <owner>/<name> or <owner>/<name>/<file>"
    if not model or not is_hub_id(repository):
        raise UserError(f"source={source}: there is no such file; {unknown}")
    if name and isinstance(cached := try_to_load_from_cache(repository, name), str):
        return Path(cached)

    def choose(names: list[str]) -> list[str]:
        held = [file for file in names if Path(file).suffix in FILE_TYPES]
        if name not in held and not (name == "" and len(held) == 1):
            raise UserError(
                f"source={source}: the model {repository} of the hub holds {', '.join(held[:8]) or 'no file of weights'}"
                + ("; give one of them: <owner>/<name>/<file>" if held else f"; {unknown}")
            )
        return [name or held[0]]

    try:
        return download_from_hub(repository, choose)[0]
    except NotOnHub as e:
        raise UserError(f"source={source}: there is no such file, and {e}; {unknown}") from e
    except NotDownloaded as e:
        raise UserError(
            f"source={source}: there is no such file, it is not in the hub's cache, and {e}; download it where there is a "
            "network, and give the path of the file"
        ) from e
