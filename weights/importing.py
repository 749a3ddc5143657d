"""From a published file of weights to a run folder that every command can read."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from downloads import ANSWER_SEC, answer_within
from errors import UserError
from files import lock_output, write_file
from latents import autoencoders
from setup import rows, schema
from setup.build import build_network
from training import checkpoint as checkpoints
from weights.published import (
    DIFFUSIONS,
    FILE_TYPES,
    Sizes,
    check_names,
    read_published,
    read_sizes,
    turn_clock_and_sign,
    without_projectors,
)

log = logging.getLogger(__name__)

# The samplers of the published scores, where they are not this project's defaults.
SAMPLERS = {"sit": {"num_steps": 250, "solver": "euler_maruyama"}, "repa": {"num_steps": 250, "solver": "euler_maruyama"}}
# Of weights whose file does not say how long they were trained: long enough that an EMA started from them has no warm-up.
LONG_TRAINED = 10**6


def import_published(source: str, kind: str, output: Path, step: int | None, data: dict[str, object]) -> Path:
    """Write published weights as the only checkpoint of a new run, which appears under its name when it is whole.

    Args:
        source: a file, or of the Hugging Face hub owner/name or owner/name/file.
        step: optimizer steps that the weights were trained for; None: what the file says, else 0.
        data: data.autoencoder, and scale_factor and resolution, which None leaves to the autoencoder.

    Returns:
        The folder of the checkpoint.

    Raises:
        UserError: the folder exists; the file cannot be had or read, or is of another network.
    """
    check_free(output)
    file = find_published(source)
    published = read_published(file)
    model, ema = ((without_projectors(one) if kind == "repa" else one) for one in (published.model, published.ema))
    sizes = read_sizes(file, model)
    step = published.step or 0 if step is None else step
    as_published = build_config(sizes, kind, output, step, data)
    with torch.device("meta"):
        like = build_network(as_published).state_dict()
    for state in (model, ema):
        check_names(file, state, like, sizes.backbone)
    turned = {id(state): as_ours(state, kind) for state in (model, ema)}  # one state dict, if the file holds one
    learn_sigma = sizes.learn_sigma and kind != "sit"
    cfg = as_published.model_copy(update={"model": as_published.model.model_copy(update={"learn_sigma": learn_sigma})})
    checkpoint = checkpoints.Checkpoint(
        step=step,
        model=turned[id(model)],
        ema=turned[id(ema)],
        optimizer={},
        state={"ema_num_updates": step or LONG_TRAINED, "imported_from": f"{source} (kind={kind})"},
        config=cfg.model_dump(),
    )
    log.info("%s: %s for latents of %s x %s x %s, %s classes", file, sizes.backbone, sizes.in_channels, *[sizes.input_size] * 2,
             sizes.num_classes)  # fmt: skip
    return write_run(output, checkpoint)


def as_ours(state: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    state = {name: value.float() for name, value in state.items()}
    return turn_clock_and_sign(state) if kind == "sit" else state


def build_config(sizes: Sizes, kind: str, output: Path, step: int, data: dict[str, object]) -> schema.TrainConfig:
    """The configuration of the run: what the shapes say, the published sampler, and this project's defaults."""
    known = autoencoders.known_scale_and_factor(data["autoencoder"])
    for key, value in zip(("scale_factor", "resolution"), (known[0], known[1] * sizes.input_size) if known else (None, None)):
        if data[key] is None and value is None:
            raise UserError(
                f"{key}= is missing: autoencoder={data['autoencoder']} is not loaded here, and the file does not say it; give "
                f"{key}=<{'what the network was given latents times' if key == 'scale_factor' else 'of the images, in pixels'}>"
            )
        data = data | {key: data[key] or value}
    group = {(4, 32, 1000): "imagenet256", (4, 64, 1000): "imagenet512"}
    group = group.get((sizes.in_channels, sizes.input_size, sizes.num_classes), "custom")
    model = "tread" if kind == "tread" else "dit"
    composed = rows.compose_row(None, f"model={model}", f"diffusion={DIFFUSIONS[kind]}", f"data={group}")
    raw = OmegaConf.to_container(composed, resolve=True)
    raw |= {"name": output.name, "output_dir": str(output.parent)}
    raw["model"] |= {"backbone": sizes.backbone, "learn_sigma": sizes.learn_sigma}
    raw["data"] |= data | {key: getattr(sizes, key) for key in ("in_channels", "input_size", "num_classes")}
    raw["diffusion"]["sampler"] |= SAMPLERS.get(kind, {})
    raw["train"]["num_steps"] = max(step, 1)
    return schema.check(raw, schema.TrainConfig)


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
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils import validate_repo_id

    unknown = "give the path of a file, or of the Hugging Face hub <owner>/<name> or <owner>/<name>/<file>"
    try:
        validate_repo_id(repository)
    except HFValidationError as e:
        raise UserError(f"source={source}: there is no such file; {unknown}") from e
    if not model:
        raise UserError(f"source={source}: there is no such file; {unknown}")
    if name and isinstance(cached := try_to_load_from_cache(repository, name), str):
        return Path(cached)
    try:
        listing = answer_within(ANSWER_SEC, lambda: HfApi().model_info(repository, timeout=ANSWER_SEC))
        held = [file.rfilename for file in listing.siblings or () if Path(file.rfilename).suffix in FILE_TYPES]
        if name not in held and not (name == "" and len(held) == 1):
            raise UserError(
                f"source={source}: the model {repository} of the hub holds {', '.join(held[:8]) or 'no file of weights'}"
                + ("; give one of them: <owner>/<name>/<file>" if held else f"; {unknown}")
            )
        log.info("downloading %s of %s from the Hugging Face hub", name or held[0], repository)
        return Path(hf_hub_download(repository, name or held[0]))
    except (RepositoryNotFoundError, EntryNotFoundError) as e:
        raise UserError(
            f"source={source}: there is no such file, and the hub has no such model that you may read; {unknown}"
        ) from e
    except OfflineModeIsEnabled:
        reason = "HF_HUB_OFFLINE=1 forbids to download it"
    except (OSError, HTTPError) as e:
        reason = f"it cannot be downloaded ({(str(e) or type(e).__name__).splitlines()[0]})"
    raise UserError(
        f"source={source}: there is no such file, it is not in the hub's cache, and {reason}; download it where there is a "
        "network, and give the path of the file"
    )
