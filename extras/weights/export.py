"""A checkpoint as a folder that others load: safetensors, configuration, code for diffusers, a model card; and its upload."""

from __future__ import annotations

import json
import logging
import math
import secrets
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from common.downloads import ANSWER_SEC, answer_within, is_hub_id
from common.errors import UserError, first_line
from common.files import why_not_written
from configs import schema
from dit import DiT
from extras.weights.card import make_card, without_folders
from extras.weights.source import join_source
from latents import autoencoders
from latents.autoencoders import Identity
from training import build, load
from training.checkpoint import imported_from

log = logging.getLogger(__name__)

NETWORKS = {"DiT": "DiTModel", "LightningDiT": "LightningDiTModel"}  # the class of a network -> the one in weights/network.py
CODE_NAMES = ["*.py", "*/*.py"]  # on the hub, code of an earlier export goes


def export_checkpoint(
    checkpoint: Path, output: Path, weights: str, autoencoder: str | None, license: str | None, push: str | None
) -> None:
    """Write the folder, which appears under its name only when it is complete.

    Args:
        checkpoint: a verified one.
        output: does not exist yet, or is an empty folder.
        weights: `ema` or `raw`.
        autoencoder: null keeps the run's.
        license: of the weights, for the card.
        push: the hub's name that the card shows in its example.

    Raises:
        UserError: `output` cannot be written; the autoencoder cannot be loaded; the network is none of NETWORKS.
    """
    import diffusers  # slow to import; prepare_checkpoint.py has other commands

    cfg = load.load_config(checkpoint)
    decoder = autoencoders.build(autoencoder or cfg.data.autoencoder, torch.device("cpu"), cfg.data.in_channels)
    net = load.load_network(checkpoint, cfg, weights, torch.device("cpu"))
    if type(net).__name__ not in NETWORKS:
        raise UserError(
            f"export has no class for diffusers of the network {type(net).__name__}; write one in weights/network.py, and add "
            "it to NETWORKS in weights/export.py"
        )
    staged = output.with_name(f".tmp_{secrets.token_hex(8)}_{output.name}")
    try:
        (staged / "transformer").mkdir(parents=True)
        index: dict[str, object] = {"_diffusers_version": diffusers.__version__}
        for key, module, class_name, folder in (
            ("_class_name", "extras.weights.pipeline", "ClassToImagePipeline", staged),
            ("transformer", "extras.weights.network", NETWORKS[type(net).__name__], staged / "transformer"),
        ):
            name, code = join_source(module, f"{class_name}, for diffusers.")
            (folder / f"{name}.py").write_text(code, encoding="utf-8")
            index[key] = [name, class_name]
        about = {"_class_name": NETWORKS[type(net).__name__], "_diffusers_version": diffusers.__version__}
        _write_json(staged / "transformer" / "config.json", about | describe_network(net))
        tensors = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
        save_file(tensors, staged / "transformer" / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
        if isinstance(decoder, Identity):
            index["vae"] = [None, None]
        else:
            spec = without_folders({"": autoencoder or cfg.data.autoencoder})[""]
            decoder.vae.register_to_config(_name_or_path=spec.partition(":")[2])  # diffusers has put the whole path here
            decoder.vae.save_pretrained(staged / "vae")
            index["vae"] = ["diffusers", type(decoder.vae).__name__]
        _write_json(staged / "model_index.json", index | describe_sampling(cfg))
        (staged / "training.yaml").write_text(
            OmegaConf.to_yaml(OmegaConf.create(describe_run(cfg, checkpoint))), encoding="utf-8"
        )
        card = make_card(checkpoint, cfg, weights, net, decoder.factor, license, push or output.name)
        (staged / "README.md").write_text(card, encoding="utf-8")
        for file in staged.rglob("*.safetensors"):  # which safetensors lets nobody but their owner read
            shutil.copymode(staged / "README.md", file)
        if output.is_dir():
            output.rmdir()  # it is empty; Windows renames to no folder that exists
        staged.rename(output)
    except (OSError, RuntimeError) as e:  # safetensors' own errors are no OSErrors
        raise UserError(f"cannot write {output}: {why_not_written(output, e)}") from e
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def check_output_folder(output: Path) -> None:
    """Raises UserError unless there is nothing under this name, or an empty folder."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"output={output} is not empty; export overwrites nothing: give another folder, or remove it")


def describe_network(net: DiT) -> dict[str, object]:
    """The arguments of the network's class in weights/network.py."""
    return {
        "input_size": net.input_size,
        "patch_size": net.patch_size,
        "in_channels": net.x_embedder.proj.in_channels,
        "num_classes": net.num_classes,
        "depth": len(net.blocks),
        "width": net.x_embedder.proj.out_channels,
        "num_heads": net.blocks[0].attn.num_heads,
        "learn_sigma": net.out_channels > net.x_embedder.proj.in_channels,
    }


def describe_sampling(cfg: schema.TrainConfig) -> dict[str, object]:
    """What `extras.weights.pipeline.ClassToImagePipeline` keeps in model_index.json. Guidance is the run's, if it is cfg or interval."""
    diffusion = asdict(build.build_diffusion(cfg.diffusion))
    # JSON has no infinity; S_max, the one setting that may be infinite, is so by default.
    sampler = {key: value for key, value in diffusion.pop("sampler").items() if value != math.inf}
    is_classifier_free = cfg.guidance.name in ("cfg", "interval")
    return {
        "diffusion": {"name": cfg.diffusion.name, **diffusion, "sampler": sampler},
        "guidance": cfg.guidance.model_dump(exclude={"name"}) if is_classifier_free else {"cfg_scale": 1.0},
        "latents": {key: getattr(cfg.data, key) for key in ("scale_factor", "latents_mean", "latents_std")},
        "null_class": cfg.data.num_classes if cfg.model.class_dropout > 0 else None,
    }


def describe_run(cfg: schema.TrainConfig, checkpoint: Path) -> dict[str, object]:
    """The settings that figures depend on, by dotted key; the others say where a run is, or how fast.

    Of imported weights those that were not made up for the import: nobody trained with the others.
    """
    settings = {key: value for key, value in schema.flatten(cfg.model_dump()).items() if schema.role_of(key)}
    if imported_from(checkpoint):
        settings = {key: value for key, value in settings.items() if key.startswith(("model.", "data.", "diffusion."))}
    return without_folders(settings)


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------------------
# The hub.


def check_hub(repo_id: str) -> None:
    """Raises UserError, within seconds, where `push_folder` cannot work: the name, the network, the token."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

    if not is_hub_id(repo_id):
        raise UserError(f"push={repo_id} is not a name on the Hugging Face hub, such as you/model")
    without = "leave push out, and run `hf upload` with the exported folder where there is a network"
    try:
        if get_token() is None:
            raise UserError(f"push={repo_id}: there is no token of the Hugging Face hub; run `hf auth login`, or set HF_TOKEN")
        answer_within(2 * ANSWER_SEC, HfApi().whoami)
    except OfflineModeIsEnabled as e:
        raise UserError(f"push={repo_id}: HF_HUB_OFFLINE=1 forbids it; unset it, or {without}") from e
    except (OSError, HTTPError) as e:
        if getattr(getattr(e, "response", None), "status_code", None) == 401:
            raise UserError(f"push={repo_id}: the hub does not accept your token; run `hf auth login`, or set HF_TOKEN") from e
        raise UserError(f"push={repo_id}: the hub cannot be reached ({first_line(e)}); {without}") from e


def push_folder(folder: Path, repo_id: str, private: bool) -> str:
    """Upload an export, and return its address. The repository is created if it does not exist; `private` is for a new one.

    Raises:
        UserError: the hub refuses it, or the network fails.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    try:
        url = HfApi().create_repo(repo_id, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Export", delete_patterns=CODE_NAMES)
    except (OSError, HTTPError) as e:
        again = f"`hf upload {repo_id} {folder} .`"
        raise UserError(f"push={repo_id} failed ({first_line(e)}); {folder} is complete: {again} uploads it") from e
    return str(url)
