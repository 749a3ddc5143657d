"""The record of an evaluation, and the file that keeps the records of a run.

train.py and fid.py append a line for each evaluation to <run>/evaluations/results.jsonl. Tables, plots and reports are made from
these lines.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

from pydantic import BaseModel, Field

from common.errors import UserError
from common.files import (
    append_line,
    describe_write_error,
    is_leftover,
    lock_file,
    read_lines,
    refuse_link,
    regular_file,
    write_atomically,
)
from common.progress import log_if_slow
from common.types import FiniteFloat, NonNegativeFloat, NonNegativeInt
from configs.settings import validate
from evaluations.result_settings import RESULT_SETTINGS, ResultSetting

log = logging.getLogger(__name__)

MIN_FREE_BYTES = 1 << 20  # bytes that must be free before an evaluation: a record, the tables and the plot are smaller
LOCK_FOLDER = ".evaluating"  # folder with the file that a process locks while it writes results


class PlannedEvaluation(BaseModel, frozen=True, strict=True, extra="forbid"):
    """What an evaluation measures: samples of a network, images on disk, or the loss on held-out latents.

    Attributes:
        run: Name of the folder of the run, or None for images on disk.
        step: Number of training steps. None for images on disk, and in the plan of a run, which evaluates at several steps.
        checkpoint: Hash of the checkpoint, or None if the run evaluated itself at this step.
        settings: All settings that the figures depend on besides the weights, by name (see `evaluations.result_settings`).
    """

    run: str | None = None
    step: NonNegativeInt | None = None
    checkpoint: str | None = None
    settings: dict[str, Any]

    @property
    def of_samples(self) -> bool:
        """Whether the metrics compare images with a reference. The others are losses on held-out latents."""
        return "detector" in self.settings

    @property
    def key(self) -> tuple[str | int | None, frozenset]:
        """What tells the evaluations in a folder apart: the weights and the settings.

        The hash of the checkpoint identifies the weights. If the run evaluated itself, its step does, and images have none.
        """
        return self.checkpoint or self.step, frozenset(self.comparable_settings.items())

    @property
    def comparable_settings(self) -> dict[str, object]:
        """The settings without paths, and without values that a missing setting means. Lists become text, which can be hashed.

        Evaluations in which these are equal measure in the same way.
        """

        def counts(name: str, value: object) -> bool:
            setting = RESULT_SETTINGS.get(name, ResultSetting("value"))  # sampler and guidance settings are values
            return setting.kind != "path" and value != setting.value_if_missing

        values = {name: value for name, value in self.settings.items() if counts(name, value)}
        return {name: json.dumps(value) if isinstance(value, (list, tuple, dict)) else value for name, value in values.items()}

    @property
    def ranking_group(self) -> tuple:
        """The values in which evaluations must agree to be ranked: equally many, equally drawn images, the same reference."""
        values = self.comparable_settings
        return tuple(values.get(name) for name, setting in RESULT_SETTINGS.items() if setting.separates_ranking)

    @property
    def guidance(self) -> dict[str, object]:
        """The settings of the guidance, as `guidance_for_results` names them, and the hash of its checkpoint."""
        return {name: value for name, value in self.settings.items() if name.partition(".")[0] in ("cfg_scale", "guidance")}

    def with_figures(
        self,
        metrics: dict[str, float],
        evaluation_sec: float,
        cost: dict[str, float] | None = None,
        by_level: list[float | None] | None = None,
    ) -> EvaluationRecord:
        """Return the record of this evaluation. The arguments are fields of `EvaluationRecord`."""
        figures = {"metrics": metrics, "cost": cost or {}, "by_level": by_level or [], "evaluation_sec": evaluation_sec}
        return EvaluationRecord.model_construct(**dict(self), **figures)  # without checks: these are our own figures


class EvaluationRecord(PlannedEvaluation):
    """The record of an evaluation: what it measures, and its figures.

    Attributes:
        metrics: Figures by name.
        jackknife: For each metric, its value without the i-th group of samples, from which standard errors follow.
        cost: Network evaluations and GFLOPs per sampled image.
        by_level: Validation loss by noise level, with None for levels without images.
        evaluation_sec: Duration of sampling and scoring.
    """

    metrics: dict[str, FiniteFloat] = {}
    jackknife: dict[str, Annotated[list[FiniteFloat], Field(min_length=1)]] = {}
    cost: dict[str, FiniteFloat] = {}
    by_level: list[FiniteFloat | None] = []
    evaluation_sec: NonNegativeFloat = 0.0


def lowest_figure(records: Iterable[EvaluationRecord], metric: str) -> float | None:
    """Return the lowest value of a metric of images, or the lowest validation loss if no record is of images.

    Records without the metric do not count. For example, it was not finite.
    """
    measured = list(records)
    of_samples = [record for record in measured if record.of_samples]
    name = metric if of_samples else "validation_loss"
    return min((record.metrics[name] for record in of_samples or measured if name in record.metrics), default=None)


def read_records(file: Path, log_level: int = logging.WARNING) -> list[EvaluationRecord]:
    """Return the records in a results.jsonl. Lines that are no records are left out with a message at `log_level`."""
    return list(read_lines(file, lambda line: validate(line, EvaluationRecord), log_level))


class Results:
    """The records in a folder's results.jsonl.

    Several commands can evaluate into one folder. If two of them make the same evaluation, the first record is kept.

    Args:
        folder: Folder of results.jsonl, the tables and the plot. It must not be a link.
        run_folder: Folder of the run that owns the folder, if there is one.
        is_optional: If the folder cannot be written, only log a warning, and keep new results in memory.
    """

    def __init__(self, folder: Path, run_folder: Path | None = None, is_optional: bool = False):
        self.folder, self.run_folder, self._is_optional = folder, run_folder, is_optional
        self.file = folder / "results.jsonl"
        self._is_writable = True
        self._version: tuple[int, ...] | None = None  # inode, size and time of results.jsonl when it was read last
        self._stored: dict[tuple, EvaluationRecord] = {}  # the first record of each evaluation, by its key
        self._unstored: dict[tuple, EvaluationRecord] = {}  # records that could not be written

    @property
    def reference_cache(self) -> Path:
        """Folder for the features of references, next to the runs, because several runs often use the same reference."""
        return (self.run_folder.parent if self.run_folder else self.folder) / "reference_features"

    def write_or_warn(self, action: Callable[[], object]) -> None:
        """Call `action`, which writes into the folder. If the folder is optional, the first UserError ends all writing."""
        try:
            if self._is_writable:
                action()
        except UserError as e:
            if not self._is_optional:
                raise
            self._is_writable = False
            log.warning("%s; the results of this run are printed, but not stored", e)

    def ensure_writable(self) -> Results:
        """Raise UserError if the folder cannot be written, unless it is optional. Call it before evaluations, which take long."""
        self.write_or_warn(self._refuse_unwritable)
        return self

    def _refuse_unwritable(self) -> None:
        refuse_link(self.folder)
        refuse_link(self.file)
        unowned = [name for name in ("results.md", "results.csv", "results.png") if (self.folder / name).exists()]
        if unowned and not self.file.exists() and self.run_folder is None:
            raise UserError(f"{self.folder / unowned[0]} was not written by fid.py; choose another output=")
        try:  # only a result creates the folder
            with TemporaryFile(dir=next(path for path in (self.folder, *self.folder.parents) if path.exists())) as file:
                file.write(bytes(MIN_FREE_BYTES))
        except OSError as e:
            raise UserError(f"cannot write to {self.folder}: {describe_write_error(self.folder, e)}") from e

    @property
    def records(self) -> list[EvaluationRecord]:
        """All records, also those that other processes have stored by now."""
        return [*self._by_key().values()]

    def find(self, planned: PlannedEvaluation) -> EvaluationRecord | None:
        """Return the record of an evaluation, or None if it is still to do.

        In the folder of a run, a record without the hash of a checkpoint has the figures of the run's weights at its step.
        """
        known = self._by_key()
        found = known.get(planned.key)
        if found is None and planned.checkpoint and self.run_folder is not None and self.run_folder.name == planned.run:
            found = known.get(planned.model_copy(update={"checkpoint": None}).key)
        return found

    def _by_key(self) -> Mapping[tuple, EvaluationRecord]:
        """Return the records by key. The file is read again if it has changed."""
        version = None
        with contextlib.suppress(FileNotFoundError), open(regular_file(self.file), "rb") as f:
            status = os.fstat(f.fileno())  # NFS may remember an older state of a file that is not open
            version = (status.st_ino, status.st_size, status.st_mtime_ns)
        if version != self._version:
            log_level = logging.DEBUG if self._version else logging.WARNING  # warn once about lines that are not results
            stored: dict[tuple, EvaluationRecord] = {}
            for record in read_records(self.file, log_level):
                stored.setdefault(record.key, record)
            self._stored, self._version = stored, version  # last, because another thread may look up records meanwhile
        return ChainMap(self._unstored, self._stored)  # not a copy: a sweep looks up each of its evaluations

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Wait until no other process writes results into the folder, and keep others from it in the `with` block.

        This is not the folder's .lock, which a trainer or sample.py may hold for long.
        """
        with log_if_slow(log, "waiting for another process that is writing to %s", self.folder):
            lock = lock_file(refuse_link(self.folder / LOCK_FOLDER) / ".lock", "writing to", "output", blocking=True)
        with lock:
            for path in self.folder.glob(".tmp_*_results.*"):  # of a process that was killed
                if is_leftover(path.name):
                    with contextlib.suppress(OSError):
                        path.unlink()
            yield

    def add(self, record: EvaluationRecord) -> None:
        """Append a record, unless another process has stored this evaluation by now."""

        def append() -> None:
            with self.lock():
                if not self.find(record):
                    append_line(self.file, record.model_dump(exclude_defaults=True))

        self.write_or_warn(append)
        if not self.find(record):
            self._unstored[record.key] = record

    def forget_after(self, step: int) -> None:
        """Delete the run's own records after `step`, because a run that resumes there makes these evaluations again.

        Records of fid.py stay, as they name their checkpoint.
        """
        if self.file.exists():
            with self.lock():
                kept = [line for line in read_lines(self.file) if line.get("checkpoint") or not is_after(line, step)]
                write_atomically(self.file, "".join(json.dumps(line) + "\n" for line in kept))


def is_after(line: dict, step: int) -> bool:
    """Return whether a line of a run's file is of a later step. Lines without a step are of no step."""
    return isinstance(line.get("step"), (int, float)) and line["step"] > step
