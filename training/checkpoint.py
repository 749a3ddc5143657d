"""Checkpoints: folders that are complete, or not there.

step_0000400/ holds model.safetensors, ema.safetensors, optimizer.pt, state.json, config.yaml, with alignment also
projector.safetensors, and manifest.json with the size and hash of each. `save` writes it under a temporary name, flushes it to
disk and then renames it. The trainer calls it in a thread, with a copy of the weights, and trains on. A checkpoint counts only
if its files match the manifest; damaged ones are renamed, never deleted.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import yaml
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from common.errors import UserError
from common.files import HashingFile, hash_file, why_not_written
from common.progress import say_if_slow

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
WEIGHTS = {"raw": "model.safetensors", "ema": "ema.safetensors"}
PROJECTOR = "projector.safetensors"
# As safetensors names them.
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}
_MAX_DEPTH = 50  # of the values in config.yaml
_STEP = re.compile(r"step_(\d{7,})")


@dataclass
class Checkpoint:
    """The content of a checkpoint. Tensors that `load` gives are maps of its files: copy them, and do not write to them."""

    step: int  # optimizer steps done
    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict  # its state dict; empty for imported weights
    state: dict  # plain values of the trainer (JSON)
    config: dict  # the resolved configuration of the run, of plain values
    projector: dict[str, Tensor] | None = None  # alignment's; None: a run without


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete or altered."""


class SaveError(UserError):
    """A checkpoint that could not be written; earlier ones are intact."""


def folder_name(step: int) -> str:
    return f"step_{step:07d}"


def list_steps(root: Path) -> dict[int, Path]:
    """Checkpoint folders below `root` by step, oldest first, without temporary and damaged (renamed) ones."""
    with reading(root):  # unlike glob, which finds nothing in a folder that it cannot read
        folders = [p for p in root.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()] if root.is_dir() else []
    return dict(sorted((int(folder.name.removeprefix("step_")), folder) for folder in folders))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Any error inside becomes a CheckpointError that names what could not be read: what is damaged can make any parser fail."""
    try:
        yield
    except CheckpointError:
        raise
    except UserError as e:
        raise CheckpointError(f"{path} is not readable: {e}") from e
    except Exception as e:
        reason = e.strerror if isinstance(e, OSError) and e.strerror else f"{type(e).__name__}: {e}".partition("\n")[0]
        raise CheckpointError(f"{path} is not readable: {reason}") from e


# ----------------------------------------------------------------------------------------------------------------------
# Writing.


def save(root: Path, checkpoint: Checkpoint, keep_last: int, keep_every: int) -> Path:
    """Write `checkpoint` below `root`, then delete old ones: all but the newest keep_last and the multiples of keep_every.

    Raises SaveError if the disk is full, for example: the incomplete checkpoint is removed, earlier ones are untouched.
    """
    final = root / folder_name(checkpoint.step)
    temporary = root / f".tmp_{final.name}"
    try:
        for leftover in [*root.glob(".tmp_step_*"), *root.glob(".del_step_*")]:  # of an interrupted save
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_files(temporary, checkpoint)
        _flush_folder(temporary)
        if final.exists():  # after a resume from an earlier step; the old folder goes last
            final.rename(root / f".del_{final.name}")
        temporary.rename(final)
        _flush_folder(root)
    except OSError as e:
        shutil.rmtree(temporary, ignore_errors=True)
        kept = [path.name for path in list_steps(root).values()]
        reason = f"{why_not_written(final, e)}{f' ({e.filename})' if e.filename else ''}"
        raise SaveError(f"cannot write the checkpoint {final}: {reason}; intact before it: {', '.join(kept) or 'none'}") from e
    for step, path in list(list_steps(root).items())[:-keep_last]:
        if not (keep_every and step % keep_every == 0):
            # A half-deleted checkpoint must not look like a complete one. Windows refuses while somebody reads it: the next
            # save tries again.
            with contextlib.suppress(PermissionError):
                path.rename(root / f".del_{path.name}")
                shutil.rmtree(root / f".del_{path.name}", ignore_errors=True)
    return final


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    manifest = {}
    with _new_file(folder / WEIGHTS["raw"], manifest) as file:
        _write_safetensors(file, checkpoint.model)
    with _new_file(folder / WEIGHTS["ema"], manifest) as file:
        _write_safetensors(file, checkpoint.ema)
    if checkpoint.projector is not None:
        with _new_file(folder / PROJECTOR, manifest) as file:
            _write_safetensors(file, checkpoint.projector)
    with _new_file(folder / "optimizer.pt", manifest) as file:
        torch.save(checkpoint.optimizer, file)
    with _new_file(folder / "state.json", manifest) as file:
        file.write(json.dumps({"step": checkpoint.step} | checkpoint.state, indent=1).encode())
    with _new_file(folder / "config.yaml", manifest) as file:
        file.write(OmegaConf.to_yaml(OmegaConf.create(checkpoint.config)).encode())
    with _new_file(folder / MANIFEST, {}) as file:
        file.write(json.dumps(manifest, indent=1).encode())


@contextlib.contextmanager
def _new_file(path: Path, manifest: dict) -> Iterator[HashingFile]:
    """Open a file to write it. At the exit it is flushed to the disk and listed in the manifest. An OSError names it."""
    try:
        with HashingFile(path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            manifest[path.name] = {"size": file.tell(), "blake2b": file.hash()}
    except (OSError, RuntimeError) as e:
        error = e if isinstance(e, OSError) else e.__context__  # torch.save follows the disk's error by one of its own
        if not isinstance(error, OSError):
            raise
        raise OSError(error.errno, error.strerror, path.name) from e


def _write_safetensors(file: IO[bytes], tensors: dict[str, Tensor]) -> None:
    """Write the bytes that safetensors.torch.save_file writes; that function takes a path only, which leaves no way to hash.

    The format: the header's length (8 bytes), the header in JSON, and the values in the order of the header.
    """
    # Larger types first, so that all values are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {}, 0
    for name in names:
        tensor, start, end = tensors[name], end, end + tensors[name].nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(tensors[name].reshape(-1).view(torch.uint8).numpy())


def _flush_folder(path: Path) -> None:
    if sys.platform == "win32":  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------------------------------------------------------------
# Reading. All but `verify` and the searches need a checkpoint that was verified.


def verify(folder: Path) -> None:
    """Compare every file with the manifest, and the folder's name with its step.

    Raises:
        CheckpointError: a file is missing, truncated, altered or unreadable, or the folder has the name of another step.
    """
    with reading(folder):
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not a folder; give a checkpoint such as runs/<name>/checkpoints/{folder_name(400)}"
            )
        if not (folder / MANIFEST).exists():
            raise CheckpointError(f"{folder} is not a whole checkpoint: it has no {MANIFEST}")
        if not (folder / MANIFEST).is_file():  # reading a pipe would wait for ever
            raise CheckpointError(f"{folder / MANIFEST} is not a file")
    with reading(folder / MANIFEST):
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        expected = {name: (int(entry["size"]), entry["blake2b"]) for name, entry in manifest.items()}
    missing = [name for name in (*WEIGHTS.values(), "optimizer.pt", "state.json", "config.yaml") if name not in expected]
    if missing:
        raise CheckpointError(f"{folder / MANIFEST} does not list {missing[0]}")
    num_bytes = sum(size for size, _ in expected.values())
    with say_if_slow(log, "comparing %s with its checksums (%.1f GB)", folder, num_bytes / 1e9):
        for name, (size, digest) in expected.items():
            file = folder / name
            with reading(file):
                if not file.is_file():
                    raise CheckpointError(f"{file} is missing")
                if (found := file.stat().st_size) != size:
                    raise CheckpointError(f"{file} has {found} bytes instead of {size}: it is truncated or altered")
                if hash_file(file) != digest:
                    raise CheckpointError(f"{file} was altered: its hash is not the one in {MANIFEST}")
    step = step_of(folder)
    if _STEP.fullmatch(folder.name) and folder.name != folder_name(step):
        raise CheckpointError(f"{folder} holds step {step}: it was renamed. Its name must be {folder_name(step)}")


def step_of(folder: Path) -> int:
    return _read_state(folder)["step"]


def _read_state(folder: Path) -> dict:
    """state.json. Raises CheckpointError where it has no step."""
    file = folder / "state.json"
    with reading(file):
        state = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(state, dict) or type(state.get("step")) is not int or state["step"] < 0:
        raise CheckpointError(f"{file} has no step")
    return state


def imported_from(folder: Path) -> str | None:
    """What the weights of a verified checkpoint were imported from: it has no optimizer. None for one of a training run."""
    return _read_state(folder).get("imported_from")


def run_of(folder: Path) -> Path | None:
    """The folder of the run that a checkpoint lies in; None for a checkpoint that was copied elsewhere."""
    parent = folder.resolve().parent
    return parent.parent if parent.name == "checkpoints" else None


def identity(folder: Path) -> str:
    """A hash of everything in a checkpoint: of its manifest, which holds the hash of every file."""
    return hashlib.blake2b((folder / MANIFEST).read_bytes(), digest_size=8).hexdigest()


def read_config(folder: Path) -> dict:
    """The resolved configuration of the run that wrote a checkpoint, as it was stored."""
    file = folder / "config.yaml"
    with reading(file):
        depth = 0
        for event in yaml.parse(file.read_text(encoding="utf-8")):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            # Aliases multiply: a few lines can stand for more values than memory holds. Deep nesting takes hours to read.
            if isinstance(event, yaml.AliasEvent) or depth > _MAX_DEPTH:
                raise CheckpointError(f"{file} holds an alias or more than {_MAX_DEPTH} levels, which training does not write")
        return OmegaConf.to_container(OmegaConf.load(file))


def load_weights(folder: Path, weights: str) -> dict[str, Tensor]:
    """`ema` or `raw` weights, mapped from the file: see `Checkpoint`."""
    return _load_tensors(folder / WEIGHTS[weights])


def _load_tensors(file: Path) -> dict[str, Tensor]:
    with reading(file):
        return load_file(file)


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint. Raises CheckpointError naming the file that cannot be read."""
    state = _read_state(folder)
    with reading(folder / "optimizer.pt"):
        optimizer = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True, mmap=True)
    return Checkpoint(
        step=state.pop("step"),
        model=load_weights(folder, "raw"),
        ema=load_weights(folder, "ema"),
        optimizer=optimizer,
        state=state,
        config=read_config(folder),
        projector=_load_tensors(folder / PROJECTOR) if (folder / PROJECTOR).exists() else None,
    )


def check_tensors(file: Path, given: Mapping[str, object], like: Mapping[str, Tensor]) -> None:
    """Compare what `file` holds with the tensors that are to take its values.

    Raises:
        CheckpointError: with the first name that only one side has, or whose shape or type differs.
    """

    def describe(values: Mapping[str, object], name: str) -> str:
        value = values.get(name)
        is_plain = isinstance(value, Tensor) and value.layout is torch.strided and not (values is given and value.is_meta)
        return f"{list(value.shape)} {value.dtype}" if is_plain else "no tensor"

    for name in {**like, **given}:
        if (found := describe(given, name)) != (wanted := describe(like, name)):
            raise CheckpointError(f"{file}: {name} is {found} there and {wanted} in this network")


def find_newest(root: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint below `root` that verifies (None: there is none), and what is wrong with each newer one."""
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
    """A verified checkpoint: the folder itself, or the newest good one of a run. CheckpointError names `key` if there is none."""
    with reading(Path(f"{key}={folder}")):
        is_run = (folder / "checkpoints").is_dir()
        is_checkpoint = _STEP.fullmatch(folder.name) or any((folder / name).exists() for name in (MANIFEST, *WEIGHTS.values()))
        if not is_run and not (folder.is_dir() and is_checkpoint):
            raise CheckpointError(explain_path(folder, key))
    if not is_run:
        try:
            verify(folder)
        except CheckpointError as e:
            raise CheckpointError(f"{key}: {e}") from e
        return folder
    newest, problems = find_newest(folder / "checkpoints")
    if newest is None:
        reasons = "; ".join(problems.values()) or "it has none yet"
        raise CheckpointError(f"{key}={folder} is a run without a whole checkpoint: {reasons}. Give another run or checkpoint")
    for problem in problems.values():
        log.warning("%s; taking an earlier checkpoint", problem)
    return newest


def explain_path(path: Path, key: str) -> str:
    """The message for a path that is no checkpoint and no run: what it is, and what to give for `key` instead."""
    checkpoint = next((folder for folder in path.parents if _STEP.fullmatch(folder.name) and folder.is_dir()), None)
    if checkpoint is not None:
        return f"{key}={path} lies in a checkpoint; give {key}={checkpoint}"
    run = next((folder for folder in path.parents if (folder / "checkpoints").is_dir()), None)
    if run is not None:
        steps = ", ".join(folder.name for folder in list(list_steps(run / "checkpoints").values())[-5:])
        held = f"; {run / 'checkpoints'} holds {steps}" if steps else ""
        return f"{key}={path} is no checkpoint; give the folder of the run, {key}={run}, for its newest one{held}"
    place = path if path.is_dir() else path.parent
    runs = [folder for folder in sorted(place.iterdir()) if (folder / "checkpoints").is_dir()] if place.is_dir() else []
    if path.is_dir():
        if runs:
            return f"{key}={path} is a folder of runs; give one of them: " + ", ".join(f"{key}={run}" for run in runs[:5])
        return f"{key}: {path} is not a checkpoint or a run: it has no {MANIFEST} and no folder checkpoints"
    near = difflib.get_close_matches(path.name, [run.name for run in runs], n=3)
    found = [place / name for name in near] or [run for run in [Path("runs") / path] if (run / "checkpoints").is_dir()]
    nearest = f"; nearest: {', '.join(f'{key}={run}' for run in found)}" if found else ""
    return (
        f"{key}: {path} is not a folder; give a checkpoint such as runs/<name>/checkpoints/{folder_name(400)}, or a run such as "
        f"runs/<name>, of which the newest checkpoint is taken{nearest}"
    )


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to bad_<name>, so that `list_steps` skips it; nothing is deleted. UserError if it cannot be."""
    target, number = folder.with_name(f"bad_{folder.name}"), 1
    while target.exists():
        number += 1
        target = folder.with_name(f"bad_{folder.name}_{number}")
    try:
        folder.rename(target)
    except OSError as e:
        raise UserError(f"{folder} is damaged, and cannot be renamed to {target.name}: {e.strerror}; move it away") from e
    return target
