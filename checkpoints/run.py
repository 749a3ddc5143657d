"""The run folder, runs/<name>/, with its lock, its metrics and the paths of its files."""

from __future__ import annotations

import json
import logging
import secrets
from pathlib import Path
from typing import Literal

from omegaconf import OmegaConf

from common.files import lock_file, read_lines, remove_leftovers, write_atomically

log = logging.getLogger(__name__)


# Kinds of lines in metrics.jsonl, with the field that only lines of this kind have. All lines have a `step`.
# training: losses and speed since the previous training line, and norms (`Trainer.pop_metrics`, `training.metrics.STEP_METRICS`)
# evaluation: `metrics` of samples or held-out latents, and what identifies the evaluation (`training.hooks.EvaluationHook`)
FIELD_OF_KIND = {"training": "loss", "evaluation": "metrics"}


def read_metrics(file: Path, kind: Literal["training", "evaluation"]) -> list[dict]:
    """Return all lines of one kind in a run's metrics.jsonl, or [] if the file is missing. Raise UserError if reading fails."""
    return [line for line in read_lines(file) if FIELD_OF_KIND[kind] in line]


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
        return any(about.items() <= line.items() for line in read_metrics(self.metrics, "evaluation"))

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
