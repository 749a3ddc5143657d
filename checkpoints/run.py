"""The run folder, runs/<name>/, with its lock, its metrics and the paths of its files."""

from __future__ import annotations

import json
import logging
import secrets
from pathlib import Path

from omegaconf import OmegaConf

from common.files import lock_file, read_lines, remove_leftovers, write_atomically

log = logging.getLogger(__name__)


class RunFolder:
    """A run folder with checkpoints/, samples/, metrics.jsonl and starts.jsonl. Only the main process writes to the folder."""

    def __init__(self, output_dir: str, name: str):
        self.path = Path(output_dir) / name
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.config, self.metrics = self.path / "config.yaml", self.path / "metrics.jsonl"
        self.starts = self.path / "starts.jsonl"
        self._lock = None

    def open(self) -> None:
        """Create and lock the run folder, unless it is open. Raise UserError if it is not writable or used by another process."""
        if self._lock is not None:
            return
        self._lock = lock_file(self.path / ".lock", "training in", "name")
        for folder in (self.checkpoints, self.samples):
            folder.mkdir(exist_ok=True)
            remove_leftovers(folder)

    def write_config(self, config: dict) -> None:
        """Write the run's resolved configuration to config.yaml."""
        write_atomically(self.config, OmegaConf.to_yaml(OmegaConf.create(config)))

    def wandb_id(self) -> str:
        """Return the run's Weights & Biases ID, which stays the same when the run resumes."""
        file = self.path / "wandb_id"
        if not file.exists():
            write_atomically(file, secrets.token_hex(4))
        return file.read_text(encoding="utf-8").strip()

    def has_evaluation(self, about: dict) -> bool:
        """Return whether metrics.jsonl contains an evaluation with the fields in `about`."""
        return any("metrics" in line and about.items() <= line.items() for line in read_lines(self.metrics))

    def metric_at(self, step: int) -> float | None:
        """Return the first metric of the last evaluation at `step`, at the guidance scale where it is lowest.

        If the run measures only the validation loss, return that loss. Return None without evaluations.
        """
        lines = [line for line in read_lines(self.metrics) if line.get("step") == step and line.get("metrics")]
        lines = [line for line in lines if "validation_loss" not in line["metrics"]] or lines
        same = ("settings", "num_samples", "reference_hash")
        alike = [line for line in lines if all(line.get(key) == lines[-1].get(key) for key in same)]
        return min((next(iter(line["metrics"].values())) for line in alike), default=None)

    def keep_until(self, step: int) -> None:
        """Delete incomplete metrics lines. Also delete metrics and grids after `step`, because the run will write them again."""
        kept = [line for line in read_lines(self.metrics) if line.get("step", 0) <= step]
        write_atomically(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))
        for file in self.samples.glob("step_*.png"):
            number = file.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:  # files with other names belong to the user
                file.unlink()

    def rename_results(self) -> None:
        """Rename the files and grids of a run with other settings, so that a new run does not delete them."""
        suffix = f"earlier_{secrets.token_hex(4)}"
        for name in ("config.yaml", "metrics.jsonl", "samples", "evaluations", "wandb_id"):
            if (path := self.path / name).exists():
                path.rename(path.with_name(f"{path.stem}_{suffix}{path.suffix}"))
        log.warning("%s holds results of a run with other settings; they are now in *_%s", self.path, suffix)

    def close(self) -> None:
        """Release the lock on the run folder."""
        if self._lock is not None:
            self._lock.close()
