"""Save, verify and load checkpoints. An interrupted save leaves no incomplete checkpoint folder.

A folder such as step_0000400/ contains model.safetensors, ema.safetensors, optimizer.pt, state.json, config.yaml, and a manifest
(manifest.json) of file sizes and hashes. REPA adds projector.safetensors, and train.ema_lengths adds tracked_ema.safetensors.
`save` writes a temporary folder, flushes the folder to disk and renames it. The trainer calls `save` in a background thread with
a copy of the weights. A checkpoint is valid only if its files match the manifest. Resuming a run renames damaged checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import UserError, as_user_error
from common.files import hash_bytes, hash_file, remove_leftovers, why_not_written
from common.progress import log_if_slow

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
WEIGHTS = {"raw": "model.safetensors", "ema": "ema.safetensors"}
OPTIONAL = ("projector", "tracked_ema")  # tensor files that only some checkpoints contain
FILES = (*WEIGHTS.values(), "optimizer.pt", "state.json", "config.yaml")  # required in every checkpoint, as is the manifest
_STEP = re.compile(r"step_(\d{7,})")


@dataclass
class Checkpoint:
    """The contents of a checkpoint. `load` memory-maps the tensors, so callers must copy the tensors and never modify them."""

    step: int  # number of completed optimizer steps
    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict  # the optimizer's state dict, which is empty for imported weights
    state: dict  # other trainer state as JSON values
    config: dict  # the run's resolved configuration
    projector: dict[str, Tensor] | None = None  # present only with alignment
    tracked_ema: dict[str, Tensor] | None = None  # present only with train.ema_lengths


class CheckpointRemoved(UserError):
    """A checkpoint was removed while a command read it, because a running trainer keeps only `checkpoint.keep_last` of them."""


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Raise CheckpointRemoved instead of another UserError if the checkpoint folder does not exist at the end of the block."""
    try:
        yield
    except UserError as e:
        if folder.exists():
            raise
        raise CheckpointRemoved(f"{folder} was removed while it was read (training keeps checkpoint.keep_last of them)") from e


def folder_name(step: int) -> str:
    return f"step_{step:07d}"


def list_steps(root: Path) -> dict[int, Path]:
    """Map steps to checkpoint folders in `root`, in ascending order. Temporary and renamed (damaged) folders are excluded."""
    with as_user_error(root):  # `glob` would silently return nothing for an unreadable folder
        folders = [p for p in root.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()] if root.is_dir() else []
    return dict(sorted((int(folder.name.removeprefix("step_")), folder) for folder in folders))


def save(root: Path, checkpoint: Checkpoint, keep_last: int, keep_every: int) -> Path:
    """Save `checkpoint` in `root`, and delete old checkpoints except the newest keep_last and multiples of keep_every steps.

    Raise UserError if writing fails, for example because the disk is full. Earlier checkpoints then remain intact.
    """
    final = root / folder_name(checkpoint.step)
    temporary = root / f".tmp_{final.name}"
    try:
        remove_leftovers(root)
        temporary.mkdir(parents=True)
        _write_files(temporary, checkpoint)
        if final.exists():  # the run resumed from an earlier step and replaces this folder
            final.rename(root / f".del_{final.name}")
        temporary.rename(final)
        _flush(root)
    except (OSError, RuntimeError, SafetensorError) as e:  # torch.save raises RuntimeError if the disk is full
        shutil.rmtree(temporary, ignore_errors=True)
        kept = ", ".join(path.name for path in list_steps(root).values()) or "none"
        raise UserError(f"cannot write the checkpoint {final}: {why_not_written(final, e)}; intact before it: {kept}") from e
    for step, path in list(list_steps(root).items())[:-keep_last]:
        if not (keep_every and step % keep_every == 0):
            with contextlib.suppress(OSError):  # the next save tries again to delete the folder
                # Rename the folder first, because a partly deleted checkpoint must not look complete.
                shutil.rmtree(path.rename(root / f".del_{path.name}"))
    return final


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint's files, then the manifest with the file sizes and hashes, and flush everything to disk."""
    with open(folder / "optimizer.pt", "wb") as file:  # torch.save with a path does not report a failed final write
        torch.save(checkpoint.optimizer, file)
    for name in ("model", "ema", *OPTIONAL):
        if (tensors := getattr(checkpoint, name)) is not None:
            file = folder / f"{name}.safetensors"
            save_file({key: value.contiguous() for key, value in tensors.items()}, file)
            shutil.copymode(folder / "optimizer.pt", file)  # safetensors makes files readable only by their owner
    (folder / "state.json").write_text(json.dumps({"step": checkpoint.step} | checkpoint.state, indent=1), encoding="utf-8")
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(checkpoint.config)), encoding="utf-8")
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


def verify(folder: Path) -> None:
    """Check every file of a checkpoint against the manifest, and the folder name against the stored step.

    Raise UserError if a file is missing, truncated or altered, or if the folder name does not match the step. If the disk cannot
    be read, the UserError has an OSError as its cause, and the checkpoint may still be intact.
    """
    file = folder / MANIFEST
    with as_user_error(file):
        if not file.is_file():
            raise UserError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}")
        manifest = json.loads(file.read_text(encoding="utf-8"))
        expected = dict.fromkeys(FILES) | {name: entry["blake2b"] for name, entry in manifest.items()}
    with log_if_slow(log, "comparing %s with its checksums", folder):
        for file, digest in ((folder / name, digest) for name, digest in expected.items()):
            with as_user_error(file):
                if digest is None or not file.is_file():
                    raise UserError(f"{file} is missing")
                if hash_file(file) != digest:
                    raise UserError(f"{file} is truncated or altered: its hash is not the one in {MANIFEST}")
    step = read_step(folder)
    if _STEP.fullmatch(folder.name) and folder.name != folder_name(step):
        raise UserError(f"{folder} holds step {step}: it was renamed. Its name must be {folder_name(step)}")


def _read_state(folder: Path) -> dict:
    with _reading(folder), as_user_error(folder / "state.json"):
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        if not isinstance(state, dict) or type(state.get("step")) is not int:
            raise ValueError("it holds no step")
        return state


def read_step(folder: Path) -> int:
    return _read_state(folder)["step"]


def imported_from(folder: Path) -> str | None:
    """Return the source of imported weights, which have no optimizer, or None for a checkpoint from a training run."""
    return _read_state(folder).get("imported_from")


def find_run(folder: Path) -> Path | None:
    """Return the run folder that contains a checkpoint, or None if the checkpoint is not in a folder named checkpoints."""
    parent = folder.resolve().parent
    return parent.parent if parent.name == "checkpoints" else None


_hashes: dict[Path, str] = {}  # hashes of the checkpoints that this process has read


def hash_checkpoint(folder: Path) -> str:
    """Compute the hash of a checkpoint from its manifest, which contains the hashes of all files.

    If the checkpoint was removed after this process had read it, return the same hash, because its network may still be loaded.
    Raise CheckpointRemoved if the checkpoint is missing otherwise.
    """
    if folder not in _hashes or folder.exists():
        with _reading(folder), as_user_error(file := folder / MANIFEST):
            _hashes[folder] = hash_bytes(file.read_bytes())[:16]
    return _hashes[folder]


def read_config(folder: Path) -> dict:
    """Return the resolved training configuration that a checkpoint stores."""
    with _reading(folder), as_user_error(file := folder / "config.yaml"), open(file, encoding="utf-8") as f:
        if not isinstance(config := OmegaConf.to_container(OmegaConf.load(f)), dict):
            raise ValueError("it holds no configuration")
        return config


def load_weights(folder: Path, weights: str) -> dict[str, Tensor]:
    """Memory-map the `ema` or `raw` weights from their file. Callers must not modify the tensors."""
    with _reading(folder), as_user_error(file := folder / WEIGHTS[weights]):
        return load_file(file)


def load(folder: Path) -> Checkpoint:
    """Load a checkpoint. If a file cannot be read, raise UserError with the name of the file."""
    state = _read_state(folder)
    with as_user_error(folder / "optimizer.pt"):
        optimizer = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(optimizer, dict):
            raise ValueError("it holds no state of an optimizer")
    optional = {}
    for name in OPTIONAL:
        with as_user_error(file := folder / f"{name}.safetensors"):
            optional[name] = load_file(file) if file.exists() else None
    model, ema = load_weights(folder, "raw"), load_weights(folder, "ema")
    return Checkpoint(state.pop("step"), model, ema, optimizer, state, read_config(folder), **optional)


def check_tensors(file: Path, given: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Check that the tensors from `file` have the same names, shapes and types as the tensors in `like`.

    Raise UserError, which names the first tensor that differs or is missing on one side.
    """
    for name in {**like, **given}:
        sides = [f"{list(side[name].shape)} {side[name].dtype}" if name in side else "missing" for side in (given, like)]
        if sides[0] != sides[1]:
            raise UserError(f"{file}: {name} is {sides[0]} in the file and {sides[1]} in this network")


def verify_all(root: Path) -> list[Path]:
    """Verify and return all checkpoints in `root`, in ascending order. Leave out those that a trainer removes meanwhile."""
    found = []
    for path in list_steps(root).values():
        try:
            with _reading(path):
                verify(path)
            found.append(path)
        except CheckpointRemoved as e:
            log.warning("%s; it is left out", e)
    return found


def find_newest(root: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest intact checkpoint or None, and the problems of newer, damaged ones. Raise UserError on disk errors.

    If a running trainer removes a checkpoint meanwhile, the search lists the checkpoints again.
    """
    problems: dict[Path, str] = {}
    while left := [path for path in list_steps(root).values() if path not in problems]:
        try:
            with _reading(left[-1]):
                verify(left[-1])
            return left[-1], problems
        except CheckpointRemoved as e:
            log.warning("%s; looking for the next newest", e)
        except UserError as e:
            if isinstance(e.__cause__, OSError):
                raise
            problems[left[-1]] = str(e)
    return None, problems


def find_checkpoint(folder: Path, key: str) -> Path:
    """Verify and return the checkpoint `folder`, or return a run's newest intact checkpoint. Raise UserError if none exists."""
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
    """Rename a damaged checkpoint to bad_<name>_<random>, so that `list_steps` skips it. Raise UserError if that fails."""
    target = folder.with_name(f"bad_{folder.name}_{secrets.token_hex(4)}")
    try:
        return folder.rename(target)
    except OSError as e:
        raise UserError(f"{folder} is damaged, and cannot be renamed to {target.name}: {e.strerror}; move it away") from e
