"""Find checkpoints, and read what commands need to know about them. The main process does so for all processes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints import store
from common.errors import UserError
from common.files import is_leftover, pop_format, read_yaml
from configs import schema
from configs.settings import read_stored
from latents.shards import hash_of_shards, read_manifest_at

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as a value, which the main process reads and shares with the other processes.

    Its small files are verified. `find_newest`, `find_all` and `resolve_checkpoint` also verify large files (see `store.verify`).

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
        manifest = read_manifest_at(path)
        if manifest and trained_on not in (None, hash_of_shards(manifest["shards"])):
            log.warning("data.path=%s holds other latents than this run's, so its class names are not used", path)
            return None
        return manifest.get("class_names")


def find_all(root: Path, files: Collection[str] | None = None) -> list[Checkpoint]:
    """Verify and return all checkpoints in `root`, in ascending order. Leave out those that a trainer removes meanwhile.

    Damaged checkpoints are left out with a warning, unless all are damaged. Raises UserError on disk errors. `files` lists the
    files that must be intact (see `store.verify`).
    """
    intact, problems = [], []
    for path in store.list_steps(root).values():
        found = read_intact(path, files, "it is left out")
        if isinstance(found, Checkpoint):
            intact.append(found)
        elif path.exists():
            problems.append(found)
    if problems and not intact:
        raise problems[0]
    for problem in problems:
        log.warning("%s; it is left out", problem)
    return intact


def find_newest(root: Path, files: Collection[str] | None = None) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the newest intact checkpoint or None, and the problems of newer, damaged ones. Raises UserError on disk errors.

    If a running trainer removes a checkpoint meanwhile, the search lists the checkpoints again. `files` lists the files that must
    be intact (see `store.verify`). Warn of newer checkpoints that `list_steps` does not find, because their folders were renamed.
    """
    problems: dict[Path, str] = {}
    while left := [path for path in store.list_steps(root).values() if path not in problems]:
        found = read_intact(left[-1], files, "looking for the next newest")
        if isinstance(found, Checkpoint):
            warn_of_renamed(root, found.step)
            return found, problems
        if left[-1].exists():
            problems[left[-1]] = str(found)
    warn_of_renamed(root, -1)
    return None, problems


def read_intact(folder: Path, files: Collection[str] | None, what_next: str) -> Checkpoint | UserError:
    """Verify and read a checkpoint. Return what is wrong if it is damaged, or if a running trainer removes it meanwhile.

    Raises UserError if the disk cannot be read, or if this version does not read the files. `what_next` ends the warning about a
    removed checkpoint.
    """
    is_intact = False
    try:
        store.verify(folder, files)
        is_intact = True
        return read_checkpoint(folder)
    except UserError as e:
        if not folder.exists():
            log.warning("%s was removed while it was read; %s", folder, what_next)
        elif is_intact or isinstance(e.__cause__, OSError):
            raise
        return e


def warn_of_renamed(root: Path, newest_step: int) -> None:
    """Warn of checkpoints in `root` with a step above `newest_step` whose folders do not have the name of a checkpoint."""
    known = {*store.list_steps(root).values()}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder in known or is_leftover(folder.name) or not (folder / store.MANIFEST).exists():
            continue
        with contextlib.suppress(UserError):  # a damaged state.json
            if (step := store.read_state(folder)["step"]) > newest_step:
                message = "%s holds the later step %d and is not used, because its name is not %s"
                log.warning(message, folder, step, store.folder_name(step))


def resolve_checkpoint(folder: Path, key: str, files: Collection[str] | None = None) -> Checkpoint:
    """Verify and return the checkpoint `folder`, or return a run's newest intact checkpoint.

    `files` lists the files that the caller reads (see `store.verify`).
    """
    checkpoint_files = {*store.WEIGHTS.values(), *(f"{name}.safetensors" for name in store.OPTIONAL)}
    if any(file.name not in checkpoint_files for file in folder.glob("*.safetensors")):  # a folder of latents also has a manifest
        raise UserError(f"{key}: {folder} holds latents, not a checkpoint; give the folder of a run, such as runs/<name>")
    if (folder / store.MANIFEST).exists():
        try:
            store.verify(folder, files)
        except UserError:
            store.refuse_removed(folder)
            raise
        return read_checkpoint(folder)
    if not (folder / "checkpoints").is_dir():
        what = f"runs/<name> for its newest checkpoint, or runs/<name>/checkpoints/{store.folder_name(400)}"
        raise UserError(f"{key}: {folder} is not the folder of a run or of a complete checkpoint; give {what}")
    newest, problems = find_newest(folder / "checkpoints", files)
    if newest is None:
        raise UserError(f"{key}={folder} is a run without an intact checkpoint: {'; '.join(problems.values()) or 'none yet'}")
    for problem in problems.values():
        log.warning("%s; using an earlier checkpoint", problem)
    return newest
