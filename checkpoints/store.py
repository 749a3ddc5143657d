"""The format of checkpoints: folders that are complete, or absent.

step_0000400/ holds model.safetensors, ema.safetensors, optimizer.pt, state.json, config.yaml, and manifest.json with the size and
hash of each file; with REPA also projector.safetensors, with train.ema_lengths also tracked_ema.safetensors. `save` writes a
temporary folder, flushes it to disk and renames it. The trainer calls `save` in a thread, with a copy of the weights, and keeps
training. A checkpoint counts only if its files match the manifest. A damaged one is renamed, never deleted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import UserError, reading
from common.files import hash_bytes, hash_file, remove_leftovers, why_not_written
from common.progress import log_if_slow

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
WEIGHTS = {"raw": "model.safetensors", "ema": "ema.safetensors"}
OPTIONAL = ("projector", "tracked_ema")  # files of tensors that only some checkpoints have
FILES = (*WEIGHTS.values(), "optimizer.pt", "state.json", "config.yaml")  # in every checkpoint, with the manifest
_STEP = re.compile(r"step_(\d{7,})")


@dataclass
class Checkpoint:
    """The content of a checkpoint. `load` maps tensors from its files: copy them, and do not write to them."""

    step: int  # optimizer steps done
    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict  # its state dict; empty for imported weights
    state: dict  # plain values of the trainer (JSON)
    config: dict  # the resolved configuration of the run, as plain values
    projector: dict[str, Tensor] | None = None  # with alignment
    tracked_ema: dict[str, Tensor] | None = None  # with `extras.posthoc_ema`


def folder_name(step: int) -> str:
    return f"step_{step:07d}"


def list_steps(root: Path) -> dict[int, Path]:
    """List checkpoint folders under `root` by step, oldest first, without temporary and damaged (renamed) ones."""
    with reading(root):  # glob would return nothing for an unreadable folder
        folders = [p for p in root.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()] if root.is_dir() else []
    return dict(sorted((int(folder.name.removeprefix("step_")), folder) for folder in folders))


def save(root: Path, checkpoint: Checkpoint, keep_last: int, keep_every: int) -> Path:
    """Save `checkpoint` under `root`. Then delete old ones, except the newest keep_last and those at multiples of keep_every.

    Raises UserError if the disk is full, for example: the incomplete checkpoint is removed, earlier ones are untouched.
    """
    final = root / folder_name(checkpoint.step)
    temporary = root / f".tmp_{final.name}"
    try:
        remove_leftovers(root)
        temporary.mkdir(parents=True)
        _write_files(temporary, checkpoint)
        if final.exists():  # after a resume from an earlier step; the old folder goes last
            final.rename(root / f".del_{final.name}")
        temporary.rename(final)
        _flush(root)
    except (OSError, RuntimeError, SafetensorError) as e:  # torch.save raises RuntimeError on a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        kept = ", ".join(path.name for path in list_steps(root).values()) or "none"
        raise UserError(f"cannot write the checkpoint {final}: {why_not_written(final, e)}; intact before it: {kept}") from e
    for step, path in list(list_steps(root).items())[:-keep_last]:
        if not (keep_every and step % keep_every == 0):
            with contextlib.suppress(OSError):  # the next save tries again
                # A partly deleted checkpoint must not look complete.
                shutil.rmtree(path.rename(root / f".del_{path.name}"))
    return final


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    """Write every file, and last the manifest with their sizes and hashes; then flush all to the disk."""
    with open(folder / "optimizer.pt", "wb") as file:  # given a path, torch.save does not report a failed final write
        torch.save(checkpoint.optimizer, file)
    for name in ("model", "ema", *OPTIONAL):
        if (tensors := getattr(checkpoint, name)) is not None:
            file = folder / f"{name}.safetensors"
            save_file({key: value.contiguous() for key, value in tensors.items()}, file)
            shutil.copymode(folder / "optimizer.pt", file)  # safetensors lets nobody but the owner read
    (folder / "state.json").write_text(json.dumps({"step": checkpoint.step} | checkpoint.state, indent=1), encoding="utf-8")
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(checkpoint.config)), encoding="utf-8")
    files = sorted(folder.iterdir())
    manifest = {file.name: {"size": file.stat().st_size, "blake2b": hash_file(file)} for file in files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in [*files, folder / MANIFEST, folder]:
        _flush(path)


def _flush(path: Path) -> None:
    """Return once a file, or the list of files in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify(folder: Path) -> None:
    """Compare every file with the manifest, and the folder's name with its step.

    Raises UserError if a file is missing, truncated or altered, or if the folder has the name of another step. If the disk
    cannot be read, the cause of the error is an OSError, which says nothing about the checkpoint.
    """
    file = folder / MANIFEST
    with reading(file):
        if not file.is_file():
            raise UserError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}")
        manifest = json.loads(file.read_text(encoding="utf-8"))
        expected = dict.fromkeys(FILES) | {name: entry["blake2b"] for name, entry in manifest.items()}
    with log_if_slow(log, "comparing %s with its checksums", folder):
        for file, digest in ((folder / name, digest) for name, digest in expected.items()):
            with reading(file):
                if digest is None or not file.is_file():
                    raise UserError(f"{file} is missing")
                if hash_file(file) != digest:
                    raise UserError(f"{file} is truncated or altered: its hash is not the one in {MANIFEST}")
    step = read_step(folder)
    if _STEP.fullmatch(folder.name) and folder.name != folder_name(step):
        raise UserError(f"{folder} holds step {step}: it was renamed. Its name must be {folder_name(step)}")


def _read_state(folder: Path) -> dict:
    with reading(folder / "state.json"):
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if not isinstance(state, dict) or type(state.get("step")) is not int:
            raise ValueError("it holds no step")
        return state


def read_step(folder: Path) -> int:
    return _read_state(folder)["step"]


def imported_from(folder: Path) -> str | None:
    """Return the source of imported weights, which have no optimizer; None for a checkpoint of a training run."""
    return _read_state(folder).get("imported_from")


def find_run(folder: Path) -> Path | None:
    """Return the run folder that a checkpoint belongs to; None for a checkpoint that was copied elsewhere."""
    parent = folder.resolve().parent
    return parent.parent if parent.name == "checkpoints" else None


def hash_checkpoint(folder: Path) -> str:
    """Hash a checkpoint from its manifest, which holds the hash of every file."""
    return hash_bytes((folder / MANIFEST).read_bytes())[:16]


def read_config(folder: Path) -> dict:
    """Return the stored configuration of the run that wrote a checkpoint, resolved."""
    with reading(file := folder / "config.yaml"), open(file, encoding="utf-8") as f:
        if not isinstance(config := OmegaConf.to_container(OmegaConf.load(f)), dict):
            raise ValueError("it holds no configuration")
        return config


def load_weights(folder: Path, weights: str) -> dict[str, Tensor]:
    """Map the `ema` or `raw` weights from their file, see `Checkpoint`."""
    with reading(folder / WEIGHTS[weights]):
        return load_file(folder / WEIGHTS[weights])


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint. Raises UserError naming the file that cannot be read."""
    state = _read_state(folder)
    with reading(folder / "optimizer.pt"):
        optimizer = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(optimizer, dict):
            raise ValueError("it holds no state of an optimizer")
    optional = {}
    for name in OPTIONAL:
        with reading(file := folder / f"{name}.safetensors"):
            optional[name] = load_file(file) if file.exists() else None
    model, ema = load_weights(folder, "raw"), load_weights(folder, "ema")
    return Checkpoint(state.pop("step"), model, ema, optimizer, state, read_config(folder), **optional)


def check_tensors(file: Path, given: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Compare the tensors that `file` holds with those that take their values.

    Raises:
        UserError: a tensor is missing on one side, or its shape or type differs. The message names the first such tensor.
    """
    for name in {**like, **given}:
        sides = [f"{list(side[name].shape)} {side[name].dtype}" if name in side else "missing" for side in (given, like)]
        if sides[0] != sides[1]:
            raise UserError(f"{file}: {name} is {sides[0]} in the file and {sides[1]} in this network")


def find_newest(root: Path) -> tuple[Path | None, dict[Path, str]]:
    """Find the newest intact checkpoint under `root`, or None. Also return what is wrong with each newer one.

    Raises UserError if the disk cannot be read.
    """
    problems: dict[Path, str] = {}
    for path in reversed(list_steps(root).values()):
        try:
            verify(path)
            return path, problems
        except UserError as e:
            if isinstance(e.__cause__, OSError):
                raise
            problems[path] = str(e)
    return None, problems


def find_checkpoint(folder: Path, key: str) -> Path:
    """Return a verified checkpoint: the folder itself, or a run's newest intact one. If there is none, UserError names `key`."""
    if (folder / MANIFEST).exists():
        verify(folder)
        return folder
    if not (folder / "checkpoints").is_dir():
        what = f"runs/<name> for its newest checkpoint, or runs/<name>/checkpoints/{folder_name(400)}"
        raise UserError(f"{key}: {folder} is not the folder of a run or of a complete checkpoint; give {what}")
    newest, problems = find_newest(folder / "checkpoints")
    if newest is None:
        raise UserError(f"{key}={folder} is a run without an intact checkpoint: {'; '.join(problems.values()) or 'none yet'}")
    for problem in problems.values():
        log.warning("%s; using an earlier checkpoint", problem)
    return newest


def rename_damaged(folder: Path) -> Path:
    """Rename a damaged checkpoint to bad_<name>_<random>, so that `list_steps` skips it. Nothing is deleted.

    Raises UserError if it cannot be renamed.
    """
    target = folder.with_name(f"bad_{folder.name}_{secrets.token_hex(4)}")
    try:
        return folder.rename(target)
    except OSError as e:
        raise UserError(f"{folder} is damaged, and cannot be renamed to {target.name}: {e.strerror}; move it away") from e
