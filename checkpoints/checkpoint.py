"""Find checkpoints, and read what commands need to know about them. The main process does so for all processes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints import store
from common.errors import UserError
from common.files import is_leftover, pop_format, read_yaml
from configs import schema
from configs.settings import read_stored
from latents.shards import hash_of_shards, read_manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as a value, which the main process reads and shares with the other processes.

    Its small files are verified, and those of the large files that the command reads (`open_checkpoint`).

    Attributes:
        path: Folder of the checkpoint.
        hash: Hash of the manifest, which identifies the checkpoint in results.
        step: Number of completed optimizer steps.
        config: Configuration of the run, with the meaning of this version.
        state: The contents of state.json.
        class_names: Names of the classes that the network was trained on, or None if they are unknown.
    """

    path: Path
    hash: str
    step: int
    config: schema.TrainConfig = field(compare=False)
    state: dict = field(compare=False)
    class_names: list[str] | None = field(default=None, compare=False)

    @property
    def run_folder(self) -> Path | None:
        """Folder of the run that contains the checkpoint, or None if the checkpoint is not in a folder named checkpoints."""
        parent = self.path.resolve().parent
        return parent.parent if parent.name == "checkpoints" else None

    @property
    def manifest_file(self) -> Path:
        return self.path / store.MANIFEST

    @property
    def imported_from(self) -> str | None:
        """Source of imported weights, which have no optimizer, or None for a checkpoint from a training run."""
        return self.state.get("imported_from")


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's small files, which the caller has verified, and the names of its classes."""
    checkpoint_hash = store.hash_checkpoint(folder)
    state = store.read_state(folder)
    config = read_config(folder)
    return Checkpoint(folder, checkpoint_hash, state["step"], config, state, find_class_names(config, state))


def read_config(folder: Path) -> schema.TrainConfig:
    """Read the configuration that a checkpoint or a run stores. Refuse other formats than `FORMAT`."""
    config = read_yaml(file := folder / "config.yaml")
    pop_format(config, file)
    return read_stored(config, schema.TrainConfig, file)


def find_class_names(config: schema.TrainConfig, state: dict) -> list[str] | None:
    """Return the class names that state.json holds, or else those of the run's latents, if these are still at data.path.

    Earlier versions stored no names in checkpoints.
    """
    if (names := state.get("class_names")) is not None:
        return names
    path = config.data.path
    trained_on = state.get("data")  # hash of the latents
    with contextlib.suppress(UserError):  # a damaged manifest does not stop sampling
        manifest = read_manifest(path)
        if manifest and trained_on not in (None, hash_of_shards(manifest["shards"])):
            log.info("data.path=%s holds other latents than this run's, so its class names are not used", path)
            return None
        return manifest.get("class_names")


# ----------------------------------------------------------------------------------------------------------------------
# Find checkpoints. `files` lists the files that must be intact, or is None for all files (see `store.verify`). `check` raises
# UserError for a checkpoint that does not fit. It is called before large files are hashed, which can take minutes.


def accept_any(checkpoint: Checkpoint) -> None:
    """Accept any checkpoint."""


def open_checkpoint(
    folder: Path, files: Collection[str] | None = None, check: Callable[[Checkpoint], None] = accept_any
) -> Checkpoint:
    """Verify and read a checkpoint.

    Raises the errors of `store.verify`, those of `check`, and UserError if this version does not read the files.
    """
    store.verify(folder, ())
    try:
        checkpoint = read_checkpoint(folder)
    except UserError:
        store.verify(folder, files)  # damage comes first: an earlier checkpoint may be readable
        raise
    check(checkpoint)
    store.verify(folder, files)
    return checkpoint


def list_newest_first(root: Path) -> Iterator[Path]:
    """Yield the checkpoints in `root`. List them again after each, because a running trainer may have saved a newer one."""
    seen: set[Path] = set()
    while left := [path for path in store.list_steps(root).values() if path not in seen]:
        seen.add(left[-1])
        yield left[-1]


def find_newest(
    root: Path, files: Collection[str] | None = None, check: Callable[[Checkpoint], None] = accept_any
) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the newest intact checkpoint in `root` or None, and {folder: problem} of newer ones, which are damaged."""
    damaged = {}
    for folder in list_newest_first(root):
        try:
            return open_checkpoint(folder, files, check), damaged
        except store.Damaged as e:
            damaged[folder] = str(e)
        except store.Removed:
            log.warning("%s was removed while it was read; looking for the next newest", folder)
    return None, damaged


def find_all(root: Path, files: Collection[str] | None = None) -> list[Checkpoint]:
    """Return the checkpoints in `root` in ascending order, without damaged ones, of which it warns, unless all are damaged."""
    found, damaged = [], []
    for folder in store.list_steps(root).values():
        try:
            found.append(open_checkpoint(folder, files))
        except store.Damaged as e:
            damaged.append(e)
        except store.Removed:
            log.warning("%s was removed while it was read; it is left out", folder)
    if damaged and not found:
        raise damaged[0]
    for problem in damaged:
        log.warning("%s; it is left out", problem)
    return found


def warn_of_renamed(root: Path, newest: Checkpoint | None) -> None:
    """Warn of checkpoints in `root` after `newest` that are not found, because their folders have other names."""
    newest_step = -1 if newest is None else newest.step
    known = {*store.list_steps(root).values()}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder in known or is_leftover(folder.name) or not (folder / store.MANIFEST).exists():
            continue
        with contextlib.suppress(UserError):  # a damaged state.json
            if (step := store.read_state(folder)["step"]) > newest_step:
                message = "%s holds the later step %d and is not used, because its name is not %s"
                log.warning(message, folder, step, store.folder_name(step))


def holds_latents(folder: Path) -> bool:
    """Return whether the folder's manifest, whose file has the same name as that of a checkpoint, lists shards."""
    with contextlib.suppress(UserError):
        return bool(read_manifest(folder))
    return False


def resolve_checkpoint(
    folder: Path, key: str, files: Collection[str] | None = None, check: Callable[[Checkpoint], None] = accept_any
) -> Checkpoint:
    """Return the checkpoint `folder`, or the newest intact checkpoint of the run `folder`. `key` names it in errors."""
    if holds_latents(folder):
        raise UserError(f"{key}: {folder} holds latents, not a checkpoint; give the folder of a run, such as runs/<name>")
    if (folder / store.MANIFEST).exists():
        return open_checkpoint(folder, files, check)
    if not (folder / "checkpoints").is_dir():
        what = f"runs/<name> for its newest checkpoint, or runs/<name>/checkpoints/{store.folder_name(400)}"
        raise UserError(f"{key}: {folder} is not the folder of a run or of a complete checkpoint; give {what}")
    newest, damaged = find_newest(folder / "checkpoints", files, check)
    warn_of_renamed(folder / "checkpoints", newest)
    if newest is None:
        problems = "; ".join(damaged.values()) or "none yet"
        raise UserError(f"{key}={folder} is a run without an intact checkpoint: {problems}")
    for problem in damaged.values():
        log.warning("%s; using an earlier checkpoint", problem)
    return newest
