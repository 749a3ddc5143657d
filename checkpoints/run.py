"""The folder of a run: its lock, its metrics and where its files go."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from omegaconf import OmegaConf

from common.files import lock_file, read_lines, remove_leftovers, write_file


class RunFolder:
    """runs/<name>/, with checkpoints/, samples/, metrics.jsonl and starts.jsonl. Only the main process writes to it."""

    def __init__(self, output_dir: str, name: str):
        self.path = Path(output_dir) / name
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.metrics = self.path / "metrics.jsonl"
        self.starts = self.path / "starts.jsonl"
        self._lock = None

    def open(self) -> None:
        """Create and lock the folders. Raises UserError without write permission, or if another process trains here."""
        self._lock = lock_file(self.path / ".lock", "training in", "name")
        for folder in (self.checkpoints, self.samples):
            folder.mkdir(exist_ok=True)
            remove_leftovers(folder)

    def write_config(self, config: dict) -> None:
        """Write config.yaml: the resolved configuration of the run, as plain values."""
        write_file(self.path / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))

    def wandb_id(self) -> str:
        """Return an id that all starts of this run share, so that Weights & Biases continues one run."""
        file = self.path / "wandb_id"
        if not file.exists():
            write_file(file, secrets.token_hex(4))
        return file.read_text(encoding="utf-8").strip()

    def has_evaluation(self, about: dict) -> bool:
        """Return whether metrics.jsonl holds this evaluation."""
        return any("metrics" in line and about.items() <= line.items() for line in read_lines(self.metrics))

    def keep_until(self, step: int) -> None:
        """Remove incomplete lines, and metrics and grids after `step`, which the run will write again."""
        kept = [line for line in read_lines(self.metrics) if line.get("step", 0) <= step]
        write_file(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))
        for file in self.samples.glob("step_*.png"):
            number = file.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:  # other names belong to the user
                file.unlink()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
