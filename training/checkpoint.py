"""Checkpoints that are either whole or not there.

A folder step_0000400/ holds model.safetensors, ema.safetensors, optimizer.pt, state.json, config.yaml and, in
manifest.json, the size and hash of each. It is written under another name, flushed to the disk and then renamed. When
loading, the newest folder whose manifest holds is taken; bad ones are set aside, never deleted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from errors import UserError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
WEIGHTS = {"raw": "model.safetensors", "ema": "ema.safetensors"}
_STEP = re.compile(r"step_(\d{7,})")


@dataclass
class Checkpoint:
    """What a folder holds. Tensors are on the CPU.

    Attributes:
        step: optimiser steps done.
        model, ema: state dicts of the network.
        optimizer: state dict of the optimiser.
        state: the trainer's plain values (JSON).
        config: the resolved configuration of the run, of plain values.
    """

    step: int
    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict
    state: dict
    config: dict


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete or altered."""


class SaveError(UserError):
    """A checkpoint that could not be written; those before it are intact."""


def folder_name(step: int) -> str:
    return f"step_{step:07d}"


def list_steps(root: Path) -> dict[int, Path]:
    """Checkpoint folders below `root` by step, oldest first. Only whole names count: not temporary ones, not those set aside."""
    found = {int(m.group(1)): p for p in root.glob("step_*") if p.is_dir() and (m := _STEP.fullmatch(p.name))}
    return dict(sorted(found.items()))


# ----------------------------------------------------------------------------------------------------------------------
# Writing.


def save(root: Path, checkpoint: Checkpoint, keep_last: int, keep_every: int) -> Path:
    """Write `checkpoint` below `root`, then delete old ones: all but the newest keep_last and the multiples of keep_every.

    Raises:
        SaveError: the disk is full, say. What was written is removed; earlier checkpoints are untouched.
    """
    final = root / folder_name(checkpoint.step)
    temporary = root / f".tmp_{final.name}"
    try:
        remove_leftovers(root)
        temporary.mkdir(parents=True)
        save_file({k: v.contiguous() for k, v in checkpoint.model.items()}, temporary / WEIGHTS["raw"])
        save_file({k: v.contiguous() for k, v in checkpoint.ema.items()}, temporary / WEIGHTS["ema"])
        torch.save(checkpoint.optimizer, temporary / "optimizer.pt")
        (temporary / "state.json").write_text(json.dumps({"step": checkpoint.step} | checkpoint.state, indent=1))
        (temporary / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(checkpoint.config)))
        manifest = {file.name: _size_and_hash(file) for file in sorted(temporary.iterdir())}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        for file in temporary.iterdir():
            _flush(file)
        _flush(temporary)
        if final.exists():  # a step that is saved again, after a resume from an earlier one: the old folder goes last
            final.rename(root / f".del_{final.name}")
        temporary.rename(final)
        _flush(root)
    # safetensors and torch.save wrap the disk's own errors in theirs.
    except (OSError, SafetensorError, RuntimeError) as e:
        shutil.rmtree(temporary, ignore_errors=True)
        kept = [path.name for path in list_steps(root).values()]
        raise SaveError(f"cannot write the checkpoint {final}: {e}; intact before it: {', '.join(kept) or 'none'}") from e
    _prune(root, keep_last, keep_every)
    return final


def remove_leftovers(root: Path) -> None:
    """Delete what an interrupted save or prune left behind."""
    for leftover in [*root.glob(".tmp_step_*"), *root.glob(".del_step_*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def _prune(root: Path, keep_last: int, keep_every: int) -> None:
    steps = list(list_steps(root).items())
    for step, path in steps[:-keep_last]:
        if not (keep_every and step % keep_every == 0):
            doomed = root / f".del_{path.name}"
            path.rename(doomed)  # a half-deleted checkpoint must not look like a whole one
            shutil.rmtree(doomed, ignore_errors=True)


def _size_and_hash(file: Path) -> dict:
    with open(file, "rb") as f:
        digest = hashlib.blake2b(digest_size=16)
        while chunk := f.read(1 << 22):
            digest.update(chunk)
    return {"size": file.stat().st_size, "blake2b": digest.hexdigest()}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------------------------------------------------------------
# Reading.


def verify(folder: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        CheckpointError: naming the file that is missing, truncated or altered.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give a checkpoint such as runs/<name>/checkpoints/{folder_name(400)}")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        expected = {name: (entry["size"], entry["blake2b"]) for name, entry in manifest.items()}
    except FileNotFoundError as e:
        raise CheckpointError(f"{folder} is not a whole checkpoint: it has no {MANIFEST}") from e
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise CheckpointError(f"{folder / MANIFEST} is not readable: {e!r}") from e
    for name in [*WEIGHTS.values(), "optimizer.pt", "state.json", "config.yaml"]:
        if name not in expected:
            raise CheckpointError(f"{folder / MANIFEST} does not list {name}")
    for name, (size, digest) in expected.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != size:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes instead of {size}: it is truncated or altered")
        if _size_and_hash(file)["blake2b"] != digest:
            raise CheckpointError(f"{file} was altered: its hash is not the one in {MANIFEST}")


def step_of(folder: Path) -> int:
    """The step of a checkpoint. Verify it first."""
    return json.loads((folder / "state.json").read_text())["step"]


def run_of(folder: Path) -> Path | None:
    """The folder of the run that a checkpoint lies in; None for a checkpoint that was copied elsewhere."""
    parent = folder.resolve().parent
    return parent.parent if parent.name == "checkpoints" else None


def identity(folder: Path) -> str:
    """A short hash that no other checkpoint has: of the manifest, which holds the hash of every file."""
    return hashlib.blake2b((folder / MANIFEST).read_bytes(), digest_size=8).hexdigest()


def load_config(folder: Path) -> dict:
    """The resolved configuration of the run that wrote a checkpoint, as it was stored. Verify the checkpoint first."""
    return OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))


def load_weights(folder: Path, weights: str) -> dict[str, Tensor]:
    """`ema` or `raw` weights. Verify the checkpoint first."""
    return load_file(folder / WEIGHTS[weights])


def load(folder: Path) -> Checkpoint:
    """Verify a checkpoint and read it whole.

    Raises:
        CheckpointError: it is not whole.
    """
    verify(folder)
    state = json.loads((folder / "state.json").read_text())
    return Checkpoint(
        step=state.pop("step"),
        model=load_weights(folder, "raw"),
        ema=load_weights(folder, "ema"),
        optimizer=torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True),
        state=state,
        config=load_config(folder),
    )


def find_newest(root: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint below `root` that verifies, and the bad ones after it with what is wrong. Changes nothing.

    Raises:
        CheckpointError: there are checkpoints, and all of them are bad.
    """
    newest, problems = _newest(root)
    if newest is None and problems:
        raise CheckpointError(
            f"no checkpoint below {root} is whole, and training does not silently start over: {'; '.join(problems.values())}. "
            "Restore one, or start a run under another name=..."
        )
    return newest, problems


def _newest(root: Path) -> tuple[Path | None, dict[Path, str]]:
    problems: dict[Path, str] = {}
    for path in reversed(list_steps(root).values()):
        try:
            verify(path)
        except CheckpointError as e:
            problems[path] = str(e)
        else:
            return path, problems
    return None, problems


def find_checkpoint(folder: Path, key: str) -> Path:
    """A verified checkpoint: the folder itself, or the newest good one of a run.

    Args:
        key: of the configuration, which named the folder.

    Raises:
        CheckpointError: there is none.
    """
    if (folder / "checkpoints").is_dir():
        newest, problems = _newest(folder / "checkpoints")
        if newest is None and problems:
            reasons = "; ".join(problems.values())
            raise CheckpointError(
                f"{key}={folder} is a run without a whole checkpoint: {reasons}. Give another run or checkpoint"
            )
        for problem in problems.values():
            log.warning("%s; taking an earlier checkpoint", problem)
        if newest is None:
            raise CheckpointError(f"{key}={folder} is a run without checkpoints yet")
        return newest
    try:
        verify(folder)
    except CheckpointError as e:
        raise CheckpointError(f"{key}: {e}") from e
    return folder


def set_aside(folder: Path) -> Path:
    """Rename a bad checkpoint, so that it is out of the way and still there."""
    target = folder.with_name(f"bad_{folder.name}")
    number = 1
    while target.exists():
        number += 1
        target = folder.with_name(f"bad_{folder.name}_{number}")
    folder.rename(target)
    return target
