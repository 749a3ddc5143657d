"""A run's folder: its lock, its metrics and where its files go."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path


@contextlib.contextmanager
def naming(file: Path):
    """A full disk does not say which file it was: add the name to the error."""
    try:
        yield
    except OSError as e:
        raise OSError(e.errno, f"cannot write {file}: {e.strerror}; the checkpoints are intact") from e


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
            ValueError: no permission to write, or another process trains in it.
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
            raise ValueError(f"output_dir: cannot write to {self.path} ({e.strerror}); choose another output_dir=...") from e
        try:
            # Released by the system when this process ends; not handed down to loader workers, which may outlive it.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as e:
            raise ValueError(f"another process is training in {self.path}; wait for it, or choose another name=...") from e

    def log_metrics(self, record: dict) -> None:
        """Append one line to metrics.jsonl."""
        with naming(self.metrics), open(self.metrics, "a") as f:
            f.write(json.dumps(record) + "\n")

    def log_start(self, record: dict) -> None:
        """Append one line to starts.jsonl: how training started, or went on, at a step."""
        with naming(self.starts), open(self.starts, "a") as f:
            f.write(json.dumps(record) + "\n")

    def has_evaluation(self, step: int) -> bool:
        """Whether metrics.jsonl holds the evaluation of a step."""
        return any(
            _step_of(line) == step and "evaluation_sec" in json.loads(line) for line in self.metrics.read_text().splitlines()
        )

    def keep_metrics_until(self, step: int) -> int:
        """Drop the lines after `step` (and torn ones), which the run writes again. Returns how many."""
        text = self.metrics.read_text(errors="replace")
        lines = text.splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        wanted = "".join(line + "\n" for line in kept)
        if wanted != text:
            temporary = self.metrics.with_name(".tmp_metrics.jsonl")
            with naming(temporary):
                temporary.write_text(wanted)
                os.replace(temporary, self.metrics)
        return len(lines) - len(kept)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
