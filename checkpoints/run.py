"""The run folder, runs/<name>/, with its lock, its metrics and the paths of its files."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel

from checkpoints import store
from common.errors import UserError, as_user_error
from common.files import (
    is_leftover,
    lock_file,
    make_folder,
    read_lines,
    read_yaml,
    refuse_link,
    regular_file,
    remove_leftovers,
    write_atomically,
)
from common.types import FiniteFloat, NonNegativeInt, PositiveFloat
from configs.settings import validate
from evaluations.record import Results, is_after

log = logging.getLogger(__name__)

SNAPSHOTS = "ema_snapshots"  # subfolder for the snapshots of train.ema_lengths
LOG_SUFFIXES = (".out", ".err", ".log", ".txt")  # files with these suffixes may lie in a run's folder before the run starts


class TrainingLine(BaseModel, strict=True):
    """A line of metrics.jsonl: losses, speed and norms since the line before (`training.loop.collect_metrics`)."""

    step: NonNegativeInt
    loss: FiniteFloat
    steps_per_sec: PositiveFloat


def read_metrics(file: Path) -> list[dict]:
    """Return the lines of a run's metrics.jsonl. A missing file has no lines.

    Lines with a missing field or a number that is not finite are left out with a warning.
    """
    return read_checked_lines(file, TrainingLine)


def read_checked_lines(file: Path, line_class: type[BaseModel]) -> list[dict]:
    """Return the lines of a JSON-lines file with all their fields. Lines that do not fit `line_class` are left out."""

    def check(line: dict) -> dict:
        validate(line, line_class)
        return line

    return list(read_lines(file, check))


def present_starts(starts: list[dict]) -> list[dict]:
    """Return the lines of starts.jsonl from the last start on that resumed no checkpoint, which began the present run.

    Earlier lines belong to starts without a checkpoint, whose results train.py renamed.
    """
    new = [i for i, start in enumerate(starts) if start.get("resumed") is False]
    return starts[new[-1] :] if new else starts


def list_snapshots(run_folder: Path | None) -> list[tuple[int, Path]]:
    """Return the step and the file of each snapshot of a run, in ascending order. A file is named by step and hash of content."""
    pattern = re.compile(r"step_(\d{7,})_[0-9a-f]{32}\.safetensors")
    files = (run_folder / SNAPSHOTS).glob("*") if run_folder else ()
    return sorted((int(match[1]), file) for file in files if (match := pattern.fullmatch(file.name)))


def is_renamed(path: Path) -> bool:
    """Return whether `RunFolder.rename_results` renamed a file or folder."""
    return re.search(r"_earlier_[0-9a-f]{8}$", path.stem) is not None


class RunFolder:
    """A run folder with checkpoints/, samples/, evaluations/, metrics.jsonl and starts.jsonl. The main process writes it."""

    def __init__(self, output_dir: str, name: str):
        self.path = Path(output_dir) / name
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.snapshots = self.path / SNAPSHOTS
        self.wandb = self.path / "wandb"
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.starts = self.path / "starts.jsonl"
        self.lock_path = self.path / ".lock"
        self._lock = None

    @cached_property
    def results(self) -> Results:
        """The run's evaluations."""
        return Results(self.path / "evaluations", self.path)

    def open(self) -> None:
        """Create and lock the run folder, and remove what interrupted writes have left in it, unless this process has locked it.

        Raises UserError if the folder is not writable, belongs to another process or is not a run, or if a subfolder is a link.
        """
        if self._lock is not None:
            return
        for folder in (self.checkpoints, self.samples, self.snapshots, self.wandb):
            refuse_link(folder)
        if self.path.is_dir() and not self._is_run() and (foreign := [*self._foreign_paths()]):
            reason = f"{self.path} holds {foreign[0].name} and was not made by train.py"
            raise UserError(f"{reason}; choose another name=... or output_dir=...")
        self._lock = lock_file(self.lock_path, "training in", "name")
        for folder in (self.checkpoints, self.samples):
            make_folder(folder)
        for folder in (self.checkpoints, self.samples, self.snapshots):
            remove_leftovers(folder)

    def _is_run(self) -> bool:
        """Return whether train.py or an import of weights made the folder."""
        if self.starts.exists() or any((step / store.MANIFEST).exists() for step in store.list_steps(self.checkpoints).values()):
            return True
        with contextlib.suppress(UserError):  # the file is missing, or is not a configuration
            return {"data", "model", "diffusion", "train", "checkpoint"} <= read_yaml(self.config).keys()
        return False

    def _foreign_paths(self) -> Iterator[Path]:
        """Yield the contents of the folder that neither an interrupted first start nor a launcher creates."""
        for path in sorted(self.path.iterdir()):
            is_ours = path in (self.checkpoints, self.samples) and path.is_dir()
            is_empty = is_ours and all(is_leftover(file.name) for file in path.iterdir())
            is_known = path.name in (".lock", ".hydra", ".has_saved")  # also hydra.output_subdir, and a file of earlier versions
            if not (is_empty or is_known or is_leftover(path.name) or path.suffix in LOG_SUFFIXES):
                yield path

    def write_config(self, config: dict) -> None:
        """Write the run's resolved configuration to config.yaml."""
        write_atomically(self.config, store.config_text(config))

    def wandb_id(self) -> str:
        """Return the run's Weights & Biases ID, which stays the same when the run resumes."""
        file = self.path / "wandb_id"
        if not file.exists():
            write_atomically(file, secrets.token_hex(4))
        with as_user_error(file):
            identifier = regular_file(file).read_text(encoding="utf-8").strip()
            if not re.fullmatch(r"[\w.-]{1,64}", identifier):
                raise ValueError("it holds no ID of Weights & Biases (up to 64 letters, digits, dots, - and _)")
        return identifier

    def earlier_initial_checkpoint(self, init_from: Path) -> Path:
        """Return the checkpoint of `init_from` from which an earlier start of this run began, or `init_from` itself.

        A run without checkpoints that is started again must not begin from other weights because `init_from` has trained further.
        """
        starts = present_starts([*read_lines(self.starts)])
        first = starts[0] if starts else {}  # a start that resumed has no init_from
        recorded = first.get("init_from") or {}  # {"checkpoint": folder, "hash": hash of the checkpoint}
        steps = [*store.list_steps(init_from / "checkpoints").values()]
        folder = init_from / "checkpoints" / Path(recorded.get("checkpoint", "")).name
        if not steps or str(folder.resolve()) != recorded.get("checkpoint"):  # another run, or a checkpoint
            return init_from
        if folder not in steps or store.hash_checkpoint(folder) != recorded["hash"]:
            log.warning("init_from: this run began from %s before, which is gone", folder)
            return init_from
        if folder != steps[-1]:
            message = "init_from: this run began from %s before; for a newer one, set init_from=%s or another name"
            log.warning(message, folder, steps[-1])
        return folder

    def delete_results_after(self, step: int) -> None:
        """Delete incomplete lines, and metrics, evaluations, grids and snapshots after `step`, which the run will write again."""
        kept = [line for line in read_lines(self.metrics) if not is_after(line, step)]
        write_atomically(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))
        self.results.forget_after(step)
        for file in self.samples.glob("step_*.png"):
            number = file.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:  # files with other names belong to the user
                file.unlink()
        for number, file in list_snapshots(self.path):
            if number > step:  # `extras.posthoc_ema` must not mix them with those of the steps that the run repeats
                file.unlink()

    def has_results(self) -> bool:
        """Return whether the folder holds metrics, evaluations, grids or snapshots."""
        files = (self.metrics, self.results.file)
        folders = (self.samples, self.snapshots)
        return any(file.exists() and file.stat().st_size for file in files) or any(any(folder.glob("*")) for folder in folders)

    def rename_results(self) -> None:
        """If the folder holds results, rename its files, so that a run that starts anew does not delete them (see `is_renamed`).

        Empty folders stay, such as the samples/ that `open` has made for the new run.
        """
        if not self.has_results():
            return
        suffix = f"earlier_{secrets.token_hex(4)}"
        # The results come last: if the process is killed here, the next start renames the rest.
        for name in ("config.yaml", "wandb_id", "metrics.jsonl", "samples", "evaluations", SNAPSHOTS):
            path = self.path / name
            is_empty = path.is_dir() and not any(path.iterdir())
            if path.exists() and not is_empty:
                path.rename(path.with_name(f"{path.stem}_{suffix}{path.suffix}"))
        log.warning("%s holds results but no checkpoint; training starts over, and they are now in *_%s", self.path, suffix)

    def close(self) -> None:
        """Release the lock on the run folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None
