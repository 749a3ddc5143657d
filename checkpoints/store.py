"""Save, verify and load checkpoints. An interrupted save leaves no incomplete checkpoint folder.

A folder such as step_0000400/ contains model.safetensors, ema.safetensors, optimizer.pt, state.json, config.yaml, and a manifest
(manifest.json) of file sizes and hashes. REPA adds projector.safetensors, and train.ema_lengths adds tracked_ema.safetensors.
`save` writes a temporary folder, flushes the folder to disk and renames it. The trainer calls `save` in a background thread with
a copy of the weights. A checkpoint is valid only if its files match the manifest. Resuming a run renames damaged checkpoints.
Commands that only read weights check the files that they read, so a checkpoint can be shared without the other files.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import Unreadable, UserError, as_user_error
from common.files import (
    FORMAT,
    describe_write_error,
    hash_bytes,
    hash_file,
    read_json,
    read_yaml,
    regular_file,
    remove_leftovers,
)
from common.progress import log_if_slow

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
WEIGHTS = {"raw": "model.safetensors", "ema": "ema.safetensors"}
FILES = (*WEIGHTS.values(), "optimizer.pt", "state.json", "config.yaml")  # required in every checkpoint, as is the manifest
READ_ALWAYS = ("state.json", "config.yaml")  # every command reads these files
_STEP = re.compile(r"step_(\d{7,})")


# The tensors of a checkpoint, {file without suffix: {name: tensor}}. Each checkpoint has `model`, `ema` and `optimizer`. The last
# has another form: {"state": {parameter name: {name: tensor}}}, or {} for imported weights.
Tensors = dict[str, dict[str, Any]]


def folder_name(step: int) -> str:
    return f"step_{step:07d}"


def list_steps(root: Path) -> dict[int, Path]:
    """Map steps to checkpoint folders in `root`, in ascending order. Temporary and renamed (damaged) folders are excluded."""
    with as_user_error(root):  # `glob` would silently return nothing for an unreadable folder
        folders = [p for p in root.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()] if root.is_dir() else []
    return dict(sorted((int(folder.name.removeprefix("step_")), folder) for folder in folders))


def save(root: Path, step: int, tensors: Tensors, state: dict, config: dict, keep_last: int, keep_every: int) -> Path:
    """Save a checkpoint in `root`, and delete old checkpoints except the newest keep_last and those that `is_kept` keeps.

    If more are there, because the run had a larger keep_last, they are deleted before the new checkpoint needs their space.

    Args:
        step: Number of completed optimizer steps.
        state: Other state of the trainer, as JSON values.
        config: The run's resolved configuration.

    Raises UserError if writing fails, for example because the disk is full. Earlier checkpoints then remain intact.
    """
    final = root / folder_name(step)
    temporary = root / f".tmp_{final.name}"
    try:
        remove_leftovers(root)
        _delete_old(root, keep_last, keep_every)
        temporary.mkdir(parents=True)
        _write_files(temporary, tensors, {"step": step} | state, config)
        if final.exists():  # put there while the run trained, because a resume renames all checkpoints after its own
            final.rename(root / f".del_{final.name}")
        temporary.rename(final)
        _flush(root)
    except (OSError, RuntimeError, SafetensorError) as e:  # torch.save raises RuntimeError if the disk is full
        shutil.rmtree(temporary, ignore_errors=True)
        kept = ", ".join(path.name for path in list_steps(root).values()) or "none"
        problem = describe_write_error(final, e, num_bytes(tensors))
        raise UserError(f"cannot write the checkpoint {final}: {problem}; intact before it: {kept}") from e
    _delete_old(root, keep_last, keep_every)
    return final


def num_bytes(tensors: dict[str, Any]) -> int:
    """Return the size of all tensors in nested dictionaries. The other files of a checkpoint take only kilobytes."""
    return sum(num_bytes(x) if isinstance(x, dict) else getattr(x, "nbytes", 0) for x in tensors.values())


def _delete_old(root: Path, keep_last: int, keep_every: int) -> None:
    """Delete all checkpoints except the newest keep_last and those that `is_kept` keeps."""
    for step, path in list(list_steps(root).items())[:-keep_last]:
        if not is_kept(step, path, keep_every):
            with contextlib.suppress(OSError):  # the next save tries again to delete the folder
                # Rename the folder first, because a partly deleted checkpoint must not look complete.
                shutil.rmtree(path.rename(root / f".del_{path.name}"))


def is_kept(step: int, folder: Path, keep_every: int) -> bool:
    """Return whether `step` is a multiple of keep_every, or of the value with which the checkpoint was saved.

    A longer run may have a larger keep_every (`training.data.complete_lengths`), and must not delete what the shorter one kept.
    """
    if keep_every and step % keep_every == 0:
        return True
    try:
        stored = read_yaml(folder / "config.yaml")["checkpoint"]["keep_every"]
        return bool(stored) and step % stored == 0
    except Unreadable:
        return True
    except (UserError, KeyError, TypeError):  # the checkpoint is damaged
        return False


def _write_files(folder: Path, tensors: Tensors, state: dict, config: dict) -> None:
    """Write the checkpoint's files, then the manifest with the file sizes and hashes, and flush everything to disk."""
    with open(folder / "optimizer.pt", "wb") as file:  # torch.save with a path does not report a failed final write
        torch.save(tensors["optimizer"], file)
    for name, named in tensors.items():
        if name != "optimizer":
            file = folder / f"{name}.safetensors"
            save_file({key: value.contiguous() for key, value in named.items()}, file)
            shutil.copymode(folder / "optimizer.pt", file)  # safetensors makes files readable only by their owner
    (folder / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    (folder / "config.yaml").write_text(config_text(config), encoding="utf-8")
    files = sorted(folder.iterdir())
    manifest = {file.name: {"size": file.stat().st_size, "blake2b": hash_file(file)} for file in files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in [*files, folder / MANIFEST, folder]:
        _flush(path)


def _flush(path: Path) -> None:
    """Flush a file, or the list of files in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_listed_hashes(folder: Path) -> dict[str, str]:
    """Return {file name: hash} from a checkpoint's manifest."""
    file = folder / MANIFEST
    if not file.exists():
        raise UserError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}")
    manifest = read_json(file)
    with as_user_error(file):
        if outside := [name for name in manifest if Path(name).name != name]:
            raise ValueError(f"{outside[0]!r} is not the name of a file in the checkpoint")
        return {name: entry["blake2b"] for name, entry in manifest.items()}


def files_for_sampling(weights: Iterable[str], needs_tracked_ema: bool = False) -> list[str]:
    """Return the files that sampling reads from a checkpoint. `weights` lists `ema` and `raw`."""
    return [WEIGHTS[name] for name in weights] + ["tracked_ema.safetensors"] * needs_tracked_ema


class Damaged(UserError):
    """A file of a checkpoint is missing or altered. The message names the file. An earlier checkpoint may be intact."""


class Removed(UserError):
    """A checkpoint is gone that was there before: a running trainer keeps only `checkpoint.keep_last`."""


def refuse_removed(folder: Path) -> None:
    """Raise Removed if a checkpoint is gone that was there before."""
    if not folder.exists():
        raise Removed(f"{folder} was removed while it was read; run the same command again")


def verify(folder: Path, files: Collection[str] | None = None) -> None:
    """Check a checkpoint's files against the manifest, and the folder name against the stored step.

    Args:
        files: Files to check besides READ_ALWAYS, or None for all files. Other files may be missing. The manifest must list those
            that are in FILES. The others, such as tracked_ema.safetensors, are checked only if it lists them.

    Raises:
        Damaged: A file is missing, truncated or altered, or the folder name does not match the step.
        Removed: A running trainer has removed the checkpoint meanwhile.
        Unreadable: The disk cannot be read. The checkpoint may still be intact.
    """
    try:
        _compare_with_manifest(folder, files)
    except UserError as e:
        refuse_removed(folder)
        if isinstance(e, Unreadable):
            raise
        raise Damaged(str(e)) from e


def _compare_with_manifest(folder: Path, files: Collection[str] | None) -> None:
    listed = read_listed_hashes(folder)
    expected = dict.fromkeys(FILES) | listed
    if files is not None:
        expected = {name: digest for name, digest in expected.items() if name in (*READ_ALWAYS, *files)}
    with log_if_slow(log, "comparing %s with its checksums", folder):
        for name, digest in expected.items():
            with as_user_error(file := folder / name):
                if digest is None or not file.exists():
                    raise UserError(f"{file} is missing")
                if hash_file(file) != digest:
                    raise UserError(f"{file} is truncated or altered: its hash is not the one in {MANIFEST}")
    step = read_state(folder)["step"]
    if _STEP.fullmatch(folder.name) and folder.name != folder_name(step):
        raise UserError(f"{folder} holds step {step}: it was renamed. Its name must be {folder_name(step)}")


def read_state(folder: Path) -> dict:
    """Return the contents of state.json: `step`, and what `save` stored as `state`."""
    with as_user_error(folder / "state.json"):
        state = read_json(folder / "state.json")
        if not isinstance(state, dict) or type(state.get("step")) is not int:
            raise ValueError("it holds no whole number as step")
        return state


def hash_checkpoint(folder: Path) -> str:
    """Compute the hash of a verified checkpoint from its manifest, which contains the hashes of all files."""
    refuse_removed(folder)
    with as_user_error(file := folder / MANIFEST):
        return hash_bytes(regular_file(file).read_bytes())[:16]


def config_text(config: dict) -> str:
    """Return the text of a config.yaml, which `checkpoints.checkpoint.read_config` reads."""
    return OmegaConf.to_yaml(OmegaConf.create({"format": FORMAT} | config))


def load_weights(folder: Path, weights: str) -> dict[str, Tensor]:
    """Memory-map the `ema` or `raw` weights of a verified checkpoint. Callers must not modify the tensors."""
    refuse_removed(folder)
    with as_user_error(file := folder / WEIGHTS[weights]):
        return load_file(regular_file(file))


def load(folder: Path) -> Tensors:
    """Memory-map the tensors of a verified checkpoint. Callers must not modify the tensors.

    If a file cannot be read, raise UserError with the name of the file.
    """
    refuse_removed(folder)
    tensors: Tensors = {}
    for file in map(folder.joinpath, read_listed_hashes(folder)):
        if file.suffix == ".safetensors":
            with as_user_error(file):
                tensors[file.stem] = load_file(regular_file(file))
    with as_user_error(file := folder / "optimizer.pt"):
        tensors["optimizer"] = torch.load(regular_file(file), map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(tensors["optimizer"], dict):
            raise ValueError("it holds no state of an optimizer")
    return tensors


def load_weights_and_ema(folder: Path) -> Tensors:
    """Load the weights with which another run starts. If a checkpoint has no raw weights, use its EMA for both."""
    ema = load_weights(folder, "ema")
    return {"model": load_weights(folder, "raw") if (folder / WEIGHTS["raw"]).exists() else dict(ema), "ema": ema}


def check_tensors(file: Path, given: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Check that the tensors from `file` have the same names, shapes and types as the tensors in `like`.

    Raises UserError, which names the first tensor that differs or is missing on one side.
    """
    for name in {**like, **given}:
        sides = [f"{list(side[name].shape)} {side[name].dtype}" if name in side else "missing" for side in (given, like)]
        if sides[0] != sides[1]:
            raise UserError(f"{file}: {name} is {sides[0]} in the file and {sides[1]} in this network")


def rename_damaged(folder: Path) -> Path:
    """Rename a damaged checkpoint to bad_<name>_<random>, so that `list_steps` skips it."""
    target = folder.with_name(f"bad_{folder.name}_{secrets.token_hex(4)}")
    try:
        return folder.rename(target)
    except OSError as e:
        raise UserError(f"{folder} is damaged, and cannot be renamed to {target.name}: {e.strerror}; move it away") from e
