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
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import UserError, as_user_error
from common.files import (
    FORMAT,
    check_format,
    describe_write_error,
    hash_bytes,
    hash_file,
    is_leftover,
    read_json,
    read_yaml,
    regular_file,
    remove_leftovers,
)
from common.progress import log_if_slow

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
WEIGHTS = {"raw": "model.safetensors", "ema": "ema.safetensors"}
OPTIONAL = ("projector", "tracked_ema")  # tensor files that only some checkpoints contain
FILES = (*WEIGHTS.values(), "optimizer.pt", "state.json", "config.yaml")  # required in every checkpoint, as is the manifest
READ_ALWAYS = ("state.json", "config.yaml")  # every command reads these files
_STEP = re.compile(r"step_(\d{7,})")


@dataclass
class Checkpoint:
    """The contents of a checkpoint. `load` memory-maps the tensors, so callers must copy the tensors and never modify them."""

    step: int  # number of completed optimizer steps
    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict  # {"state": {parameter name: tensors}}, or {} for imported weights
    state: dict  # other trainer state as JSON values
    config: dict  # the run's resolved configuration
    projector: dict[str, Tensor] | None = None  # present only with alignment
    tracked_ema: dict[str, Tensor] | None = None  # present only with train.ema_lengths

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors. The other contents of a checkpoint take only kilobytes."""
        moments = (value for state in self.optimizer.get("state", {}).values() for value in state.values())
        tensors = [*self.model.values(), *self.ema.values(), *(self.projector or {}).values(), *(self.tracked_ema or {}).values()]
        return sum(x.nbytes for x in (*tensors, *moments) if isinstance(x, Tensor))


def folder_name(step: int) -> str:
    return f"step_{step:07d}"


def list_steps(root: Path) -> dict[int, Path]:
    """Map steps to checkpoint folders in `root`, in ascending order. Temporary and renamed (damaged) folders are excluded."""
    with as_user_error(root):  # `glob` would silently return nothing for an unreadable folder
        folders = [p for p in root.iterdir() if _STEP.fullmatch(p.name) and p.is_dir()] if root.is_dir() else []
    return dict(sorted((int(folder.name.removeprefix("step_")), folder) for folder in folders))


def save(root: Path, checkpoint: Checkpoint, keep_last: int, keep_every: int) -> Path:
    """Save `checkpoint` in `root`, and delete old checkpoints except the newest keep_last and multiples of keep_every steps.

    If more are there, because the run had a larger keep_last, they are deleted before the new checkpoint needs their space.

    Raises UserError if writing fails, for example because the disk is full. Earlier checkpoints then remain intact.
    """
    final = root / folder_name(checkpoint.step)
    temporary = root / f".tmp_{final.name}"
    try:
        remove_leftovers(root)
        _delete_old(root, keep_last, keep_every)
        temporary.mkdir(parents=True)
        _write_files(temporary, checkpoint)
        if final.exists():  # the run resumed from an earlier step and replaces this folder
            final.rename(root / f".del_{final.name}")
        temporary.rename(final)
        _flush(root)
    except (OSError, RuntimeError, SafetensorError) as e:  # torch.save raises RuntimeError if the disk is full
        shutil.rmtree(temporary, ignore_errors=True)
        kept = ", ".join(path.name for path in list_steps(root).values()) or "none"
        problem = describe_write_error(final, e, checkpoint.num_bytes)
        raise UserError(f"cannot write the checkpoint {final}: {problem}; intact before it: {kept}") from e
    _delete_old(root, keep_last, keep_every)
    return final


def _delete_old(root: Path, keep_last: int, keep_every: int) -> None:
    """Delete all checkpoints except the newest keep_last and multiples of keep_every steps."""
    for step, path in list(list_steps(root).items())[:-keep_last]:
        if not (keep_every and step % keep_every == 0):
            with contextlib.suppress(OSError):  # the next save tries again to delete the folder
                # Rename the folder first, because a partly deleted checkpoint must not look complete.
                shutil.rmtree(path.rename(root / f".del_{path.name}"))


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
    (folder / "config.yaml").write_text(config_text(checkpoint.config), encoding="utf-8")
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


def files_for_sampling(weights: Iterable[str], with_tracked_ema: bool = False) -> list[str]:
    """Return the files that sampling reads from a checkpoint. `weights` lists `ema` and `raw`."""
    return [WEIGHTS[name] for name in weights] + ["tracked_ema.safetensors"] * with_tracked_ema


def refuse_removed(folder: Path) -> None:
    """Raise UserError if a checkpoint is gone that was there before: a running trainer keeps only `checkpoint.keep_last`."""
    if not folder.exists():
        raise UserError(f"{folder} was removed while it was read; run the same command again")


def verify(folder: Path, reads: Collection[str] | None = None) -> None:
    """Check a checkpoint's files against the manifest, and the folder name against the stored step.

    Args:
        reads: Files to check besides READ_ALWAYS, if the manifest lists them. None checks all files. Other files may be missing.

    Raises UserError if a file is missing, truncated or altered, or if the folder name does not match the step. If the disk cannot
    be read, the UserError has an OSError as its cause, and the checkpoint may still be intact.
    """
    listed = read_listed_hashes(folder)
    expected = dict.fromkeys(FILES) | listed
    if reads is not None:
        expected = {name: digest for name, digest in expected.items() if name in (*READ_ALWAYS, *reads)}
    with log_if_slow(log, "comparing %s with its checksums", folder):
        for file, digest in ((folder / name, digest) for name, digest in expected.items()):
            with as_user_error(file):
                if digest is None or not file.exists():
                    raise UserError(f"{file} is missing")
                if hash_file(file) != digest:
                    raise UserError(f"{file} is truncated or altered: its hash is not the one in {MANIFEST}")
    step = read_step(folder)
    if _STEP.fullmatch(folder.name) and folder.name != folder_name(step):
        raise UserError(f"{folder} holds step {step}: it was renamed. Its name must be {folder_name(step)}")


def _read_state(folder: Path) -> dict:
    with as_user_error(folder / "state.json"):
        state = read_json(folder / "state.json")
        if not isinstance(state, dict) or type(state.get("step")) is not int:
            raise ValueError("it holds no whole number as step")
        return state


def read_step(folder: Path) -> int:
    return _read_state(folder)["step"]


def read_data_hash(folder: Path) -> str | None:
    """Return the fingerprint of the latents that a checkpoint was trained on, or None if it is unknown."""
    return _read_state(folder).get("data")


def read_class_names(folder: Path) -> list[str] | None:
    """Return the class names that a checkpoint stores, or None if they are unknown."""
    return _read_state(folder).get("class_names")


def imported_from(folder: Path) -> str | None:
    """Return the source of imported weights, which have no optimizer, or None for a checkpoint from a training run."""
    return _read_state(folder).get("imported_from")


def find_run(folder: Path) -> Path | None:
    """Return the run folder that contains a checkpoint, or None if the checkpoint is not in a folder named checkpoints."""
    parent = folder.resolve().parent
    return parent.parent if parent.name == "checkpoints" else None


def hash_checkpoint(folder: Path) -> str:
    """Compute the hash of a verified checkpoint from its manifest, which contains the hashes of all files."""
    refuse_removed(folder)
    with as_user_error(file := folder / MANIFEST):
        return hash_bytes(regular_file(file).read_bytes())[:16]


def config_text(config: dict) -> str:
    """Return the text of a config.yaml, which `read_config` reads."""
    return OmegaConf.to_yaml(OmegaConf.create({"format": FORMAT} | config))


def read_config(folder: Path) -> dict:
    """Return the resolved training configuration that a checkpoint or a run stores. Refuse other formats than FORMAT."""
    config = read_yaml(file := folder / "config.yaml")
    check_format(config, file)
    return config


def load_weights(folder: Path, weights: str) -> dict[str, Tensor]:
    """Memory-map the `ema` or `raw` weights of a verified checkpoint. Callers must not modify the tensors."""
    refuse_removed(folder)
    with as_user_error(file := folder / WEIGHTS[weights]):
        return load_file(regular_file(file))


def load(folder: Path) -> Checkpoint:
    """Load a verified checkpoint. If a file cannot be read, raise UserError with the name of the file."""
    checkpoint, listed = load_initial(folder), read_listed_hashes(folder)
    with as_user_error(file := folder / "optimizer.pt"):
        checkpoint.optimizer = torch.load(regular_file(file), map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(checkpoint.optimizer, dict):
            raise ValueError("it holds no state of an optimizer")
    for name in OPTIONAL:
        with as_user_error(file := folder / f"{name}.safetensors"):
            setattr(checkpoint, name, load_file(regular_file(file)) if file.name in listed else None)
    return checkpoint


def load_initial(folder: Path) -> Checkpoint:
    """Load the weights with which another run starts. If a checkpoint has no raw weights, use its EMA for both."""
    state, ema = _read_state(folder), load_weights(folder, "ema")
    model = load_weights(folder, "raw") if (folder / WEIGHTS["raw"]).exists() else dict(ema)
    return Checkpoint(state.pop("step"), model, ema, {}, state, read_config(folder))


def check_tensors(file: Path, given: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Check that the tensors from `file` have the same names, shapes and types as the tensors in `like`.

    Raises UserError, which names the first tensor that differs or is missing on one side.
    """
    for name in {**like, **given}:
        sides = [f"{list(side[name].shape)} {side[name].dtype}" if name in side else "missing" for side in (given, like)]
        if sides[0] != sides[1]:
            raise UserError(f"{file}: {name} is {sides[0]} in the file and {sides[1]} in this network")


def verify_all(root: Path, reads: Collection[str] | None = None) -> list[Path]:
    """Verify and return all checkpoints in `root`, in ascending order. Leave out those that a trainer removes meanwhile.

    Damaged checkpoints are left out with a warning, unless all are damaged. Raises UserError on disk errors. `reads` lists the
    files that must be intact (see `verify`).
    """
    intact, problems = [], []
    for path in list_steps(root).values():
        try:
            verify(path, reads)
            intact.append(path)
        except UserError as e:
            if not path.exists():
                log.warning("%s was removed while it was read; it is left out", path)
            elif isinstance(e.__cause__, OSError):
                raise
            else:
                problems.append(e)
    if problems and not intact:
        raise problems[0]
    for problem in problems:
        log.warning("%s; it is left out", problem)
    return intact


def verify_newest(root: Path, reads: Collection[str] | None = None) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest intact checkpoint or None, and the problems of newer, damaged ones. Raises UserError on disk errors.

    If a running trainer removes a checkpoint meanwhile, the search lists the checkpoints again. `reads` lists the files that must
    be intact (see `verify`). Warn of newer checkpoints that `list_steps` does not find, because their folders were renamed.
    """
    problems: dict[Path, str] = {}
    while left := [path for path in list_steps(root).values() if path not in problems]:
        try:
            verify(left[-1], reads)
            warn_of_renamed(root, read_step(left[-1]))
            return left[-1], problems
        except UserError as e:
            if not left[-1].exists():
                log.warning("%s was removed while it was read; looking for the next newest", left[-1])
            elif isinstance(e.__cause__, OSError):
                raise
            else:
                problems[left[-1]] = str(e)
    warn_of_renamed(root, -1)
    return None, problems


def warn_of_renamed(root: Path, newest_step: int) -> None:
    """Warn of checkpoints in `root` with a step above `newest_step` whose folders do not have the name of a checkpoint."""
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if _STEP.fullmatch(folder.name) or is_leftover(folder.name) or not (folder / MANIFEST).exists():
            continue
        with contextlib.suppress(UserError):  # a damaged state.json
            if (step := read_step(folder)) > newest_step:
                message = "%s holds the later step %d and is not used, because its name is not %s"
                log.warning(message, folder, step, folder_name(step))


def resolve_checkpoint(folder: Path, key: str, reads: Collection[str] | None = None) -> Path:
    """Verify and return the checkpoint `folder`, or return a run's newest intact checkpoint.

    `reads` lists the files that the caller reads (see `verify`).
    """
    own_files = {*WEIGHTS.values(), *(f"{name}.safetensors" for name in OPTIONAL)}
    if any(file.name not in own_files for file in folder.glob("*.safetensors")):  # a folder of latents also has a manifest
        raise UserError(f"{key}: {folder} holds latents, not a checkpoint; give the folder of a run, such as runs/<name>")
    if (folder / MANIFEST).exists():
        try:
            verify(folder, reads)
        except UserError:
            refuse_removed(folder)
            raise
        return folder
    if not (folder / "checkpoints").is_dir():
        what = f"runs/<name> for its newest checkpoint, or runs/<name>/checkpoints/{folder_name(400)}"
        raise UserError(f"{key}: {folder} is not the folder of a run or of a complete checkpoint; give {what}")
    newest, problems = verify_newest(folder / "checkpoints", reads)
    if newest is None:
        raise UserError(f"{key}={folder} is a run without an intact checkpoint: {'; '.join(problems.values()) or 'none yet'}")
    for problem in problems.values():
        log.warning("%s; using an earlier checkpoint", problem)
    return newest


def rename_damaged(folder: Path) -> Path:
    """Rename a damaged checkpoint to bad_<name>_<random>, so that `list_steps` skips it."""
    target = folder.with_name(f"bad_{folder.name}_{secrets.token_hex(4)}")
    try:
        return folder.rename(target)
    except OSError as e:
        raise UserError(f"{folder} is damaged, and cannot be renamed to {target.name}: {e.strerror}; move it away") from e
