"""A run's folder: its lock, its metrics and where its files go."""

from __future__ import annotations

import contextlib
import fcntl
import json
import secrets
from pathlib import Path

from omegaconf import OmegaConf

from errors import UserError
from files import append_line, read_lines, write_file


@contextlib.contextmanager
def naming_file(file: Path):
    """Name the file in the error of a full disk, which does not."""
    try:
        yield
    except OSError as e:
        raise UserError(f"cannot write {file}: {e.strerror or e}") from e


class RunFolder:
    """runs/<name>/ with checkpoints/, samples/, metrics.jsonl and starts.jsonl. Only the main process writes to it."""

    def __init__(self, output_dir: str, name: str | int):
        self.path = Path(output_dir) / str(name)
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.metrics = self.path / "metrics.jsonl"
        self.starts = self.path / "starts.jsonl"
        self._lock = None

    def open(self) -> None:
        """Create the folders and lock the run against a second training.

        Raises:
            UserError: no permission to write, or another process trains in it.
        """
        try:
            for folder in (self.checkpoints, self.samples):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")
            self.metrics.touch()
            # Whoever may write a file may not always make one: a checkpoint needs that.
            probe = self.checkpoints / ".tmp_step_probe"
            probe.mkdir(exist_ok=True)
            probe.rmdir()
        except OSError as e:
            raise UserError(f"output_dir: cannot write to {self.path} ({e.strerror}); choose another output_dir=...") from e
        try:
            # Released by the system when this process ends; not handed down to loader workers, which may outlive it.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as e:
            raise UserError(f"another process is training in {self.path}; wait for it, or choose another name=...") from e

    def write_config(self, config: dict) -> None:
        """config.yaml: the resolved configuration of the run, of plain values."""
        write_file(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))

    def wandb_id(self) -> str:
        """The same for every start of this run, so that Weights & Biases continues one run instead of opening another."""
        file = self.path / "wandb_id"
        if not file.exists():
            write_file(file, secrets.token_hex(4))
        return file.read_text().strip()

    def log_metrics(self, record: dict) -> None:
        """Append one line to metrics.jsonl."""
        append_line(self.metrics, record)

    def log_start(self, record: dict) -> None:
        """Append one line to starts.jsonl: how training started, or went on, at a step."""
        append_line(self.starts, record)

    def has_evaluation(self, step: int) -> bool:
        """Whether metrics.jsonl holds the evaluation of a step."""
        return any(line and line.get("step") == step and "evaluation_sec" in line for _, line in read_lines(self.metrics))

    def keep_metrics_until(self, step: int) -> int:
        """Drop the lines after `step` (and torn ones), which the run writes again. Returns how many."""
        lines = [line for _, line in read_lines(self.metrics)]
        kept = [line for line in lines if line and isinstance(line.get("step"), int) and line["step"] <= step]
        wanted = "".join(json.dumps(line) + "\n" for line in kept)
        if wanted != self.metrics.read_text(errors="replace"):
            write_file(self.metrics, wanted)
        return len(lines) - len(kept)
