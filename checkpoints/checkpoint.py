"""Find checkpoints, and read what commands need to know about them. The main process does so for all processes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
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

    Its small files are verified, and those of the large files that the command reads (`verify_and_read`).

    Attributes:
        path: Folder of the checkpoint.
        hash: Hash of the manifest, which identifies the checkpoint in results.
        step: Number of completed optimizer steps.
        config: Configuration of the run, with the meaning of this version.
        state: The contents of state.json.
    """

    path: Path
    hash: str
    step: int
    config: schema.TrainConfig = field(compare=False)
    state: dict = field(compare=False)

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
    """Read a checkpoint's small files. The caller has verified them."""
    checkpoint_hash = store.hash_checkpoint(folder)
    state = store.read_state(folder)
    return Checkpoint(folder, checkpoint_hash, state["step"], read_config(folder), state)


def read_config(folder: Path) -> schema.TrainConfig:
    """Read the configuration that a checkpoint or a run stores. Refuse other formats than `FORMAT`."""
    config = read_yaml(file := folder / "config.yaml")
    pop_format(config, file)
    return read_stored(config, schema.TrainConfig, file)


def read_class_names(checkpoint: Checkpoint) -> list[str] | None:
    """Return the names of the classes that the network was trained on, or None if they are unknown.

    Earlier versions stored no names in checkpoints. Then they come from the run's latents, if these are still at data.path.
    """
    if (names := checkpoint.state.get("class_names")) is not None:
        return names
    path = checkpoint.config.data.path
    trained_on = checkpoint.state.get("data")  # hash of the latents
    with contextlib.suppress(UserError):  # a damaged manifest does not stop sampling
        manifest = read_manifest(path)
        if manifest and trained_on not in (None, hash_of_shards(manifest["shards"])):
            log.warning("data.path=%s holds other latents than this run's, so its class names are not used", path)
            return None
        return manifest.get("class_names")


# ----------------------------------------------------------------------------------------------------------------------
# Find checkpoints. `files` lists the files that must be intact, or is None for all files (see `store.verify`). `check` raises
# UserError for a checkpoint that does not fit. It is called before large files are hashed, which can take minutes.


@dataclass(frozen=True)
class Damaged:
    """A checkpoint with a missing or altered file. `problem` names the file."""

    path: Path
    problem: str


def accept(checkpoint: Checkpoint) -> None:
    """Accept any checkpoint."""


def verify_and_read(
    folder: Path, files: Collection[str] | None = None, check: Callable[[Checkpoint], None] = accept
) -> Checkpoint | Damaged:
    """Verify and read a checkpoint.

    Raises UserError if the disk cannot be read, if this version does not read the files, if `check` does, or (`store.Removed`) if
    a running trainer removes the checkpoint meanwhile.
    """
    if problem := find_damage(folder, ()):
        return Damaged(folder, problem)
    try:
        checkpoint = read_checkpoint(folder)
    except UserError:
        store.refuse_removed(folder)
        if problem := find_damage(folder, files):  # damage comes first: an earlier checkpoint may be readable
            return Damaged(folder, problem)
        raise
    check(checkpoint)
    if problem := find_damage(folder, files):
        return Damaged(folder, problem)
    return checkpoint


def find_damage(folder: Path, files: Collection[str] | None) -> str | None:
    """Return what is wrong with the files of a checkpoint, or None. Raises UserError if the disk cannot be read."""
    try:
        store.verify(folder, files)
    except UserError as e:
        store.refuse_removed(folder)
        if isinstance(e.__cause__, OSError):
            raise
        return str(e)
    return None


def scan(
    folders: Iterable[Path], files: Collection[str] | None, if_removed: str, check: Callable[[Checkpoint], None] = accept
) -> Iterator[Checkpoint | Damaged]:
    """Verify and yield checkpoints. Warn of those that a trainer removes meanwhile, with `if_removed`, and leave them out."""
    for folder in folders:
        try:
            yield verify_and_read(folder, files, check)
        except store.Removed:
            log.warning("%s was removed while it was read; %s", folder, if_removed)


def list_newest_first(root: Path) -> Iterator[Path]:
    """Yield the checkpoints in `root`. List them again after each, because a running trainer may have saved a newer one."""
    seen: set[Path] = set()
    while left := [path for path in store.list_steps(root).values() if path not in seen]:
        seen.add(left[-1])
        yield left[-1]


def find_newest(
    root: Path, files: Collection[str] | None = None, check: Callable[[Checkpoint], None] = accept
) -> tuple[Checkpoint | None, list[Damaged]]:
    """Return the newest intact checkpoint in `root` or None, and the newer ones, which are damaged."""
    damaged = []
    for found in scan(list_newest_first(root), files, "looking for the next newest", check):
        if isinstance(found, Checkpoint):
            return found, damaged
        damaged.append(found)
    return None, damaged


def find_all(root: Path, files: Collection[str] | None = None) -> list[Checkpoint]:
    """Return the checkpoints in `root` in ascending order, without damaged ones, of which it warns, unless all are damaged."""
    found = [*scan(store.list_steps(root).values(), files, "it is left out")]
    damaged = [checkpoint.problem for checkpoint in found if isinstance(checkpoint, Damaged)]
    if damaged and len(damaged) == len(found):
        raise UserError(damaged[0])
    for problem in damaged:
        log.warning("%s; it is left out", problem)
    return [checkpoint for checkpoint in found if isinstance(checkpoint, Checkpoint)]


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
    folder: Path, key: str, files: Collection[str] | None = None, check: Callable[[Checkpoint], None] = accept
) -> Checkpoint:
    """Return the checkpoint `folder`, or the newest intact checkpoint of the run `folder`. `key` names it in errors."""
    if holds_latents(folder):
        raise UserError(f"{key}: {folder} holds latents, not a checkpoint; give the folder of a run, such as runs/<name>")
    if (folder / store.MANIFEST).exists():
        found = verify_and_read(folder, files, check)
        if isinstance(found, Damaged):
            raise UserError(found.problem)
        return found
    if not (folder / "checkpoints").is_dir():
        what = f"runs/<name> for its newest checkpoint, or runs/<name>/checkpoints/{store.folder_name(400)}"
        raise UserError(f"{key}: {folder} is not the folder of a run or of a complete checkpoint; give {what}")
    newest, damaged = find_newest(folder / "checkpoints", files, check)
    warn_of_renamed(folder / "checkpoints", newest)
    if newest is None:
        problems = "; ".join(checkpoint.problem for checkpoint in damaged)
        raise UserError(f"{key}={folder} is a run without an intact checkpoint: {problems or 'none yet'}")
    for checkpoint in damaged:
        log.warning("%s; using an earlier checkpoint", checkpoint.problem)
    return newest
