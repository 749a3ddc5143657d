"""Log runs to Weights & Biases. The checks before a run starts raise UserError. Later errors of wandb never end a run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from accelerate import Accelerator
from PIL import Image

from checkpoints.run import RunFolder
from common.errors import UserError, first_line
from configs.schema import TrainConfig

log = logging.getLogger(__name__)


def check_login(mode: str) -> None:
    """Raise UserError if wandb is not installed, or if wandb.mode=online has no valid API key.

    In a terminal, wandb asks for a missing key.
    """
    if mode == "disabled":
        return
    try:
        import wandb  # imported only if it is used
    except Exception as e:  # without wandb, accelerate would silently log nothing
        raise UserError(f"wandb.mode={mode}: {first_line(e)}; run `pip install wandb`, or set wandb.mode=disabled") from e
    if mode == "offline":
        return
    try:
        problem = None if wandb.login(verify=False) else "no API key is configured"
    except Exception as e:  # noqa: BLE001 (wandb raises many kinds of errors)
        problem = first_line(e).rstrip(".")
    if problem:
        raise UserError(f"wandb.mode=online: {problem}; run `wandb login`, set WANDB_API_KEY, or set wandb.mode=offline")


def check_folder(run: RunFolder, mode: str) -> None:
    """Raise UserError if wandb could not write to the run's folder, because it would then write to another folder."""
    if mode == "disabled":
        return
    if (run.path / "wandb_id").exists():
        run.wandb_id()
    if run.wandb.exists() and not (run.wandb.is_dir() and os.access(run.wandb, os.W_OK | os.X_OK)):
        raise UserError(f"wandb.mode={mode}: {run.wandb} is not a folder that can be written to; move it away")


def init_trackers(accelerator: Accelerator, cfg: TrainConfig, run: RunFolder) -> None:
    """Start to log a run, or continue to log it after a resume."""
    if cfg.wandb.mode == "disabled":
        return
    kwargs = {"name": cfg.name, "mode": cfg.wandb.mode, "dir": str(run.path), "id": run.wandb_id(), "resume": "allow"}
    # In a sweep, a failed run is still open. By default, wandb would add this run's figures to the failed run.
    kwargs |= {"reinit": "finish_previous"}
    with never_fatal(accelerator):
        accelerator.init_trackers(cfg.wandb.project, cfg.model_dump(), init_kwargs={"wandb": kwargs})
        # Use the logged step as the axis. wandb's own step would ignore the steps that a run repeats after a crash.
        for tracker in accelerator.trackers:
            tracker.tracker.define_metric("*", step_metric="step")


@contextlib.contextmanager
def never_fatal(accelerator: Accelerator) -> Iterator[None]:
    """Turn any error of Weights & Biases in the `with` block into a warning, and log nothing more to it."""
    try:
        yield
    except Exception as e:  # noqa: BLE001 (the service of wandb may die or lose its connection during any call)
        accelerator.trackers = []
        problem = f"{type(e).__name__}: {first_line(e)}"
        log.warning("Weights & Biases failed (%s). Training continues without it; metrics.jsonl has all figures", problem)
        with contextlib.suppress(Exception):  # otherwise, wandb prints a traceback when the process exits
            import wandb  # it may be missing, which is also only a warning

            wandb.teardown()


def track(accelerator: Accelerator, record: dict) -> None:
    """Log a record. Split a list with one value per noise level bin into `name/0` to `name/9`."""
    lists = {key: value for key, value in record.items() if isinstance(value, list)}
    by_level = {f"{key}/{level}": value for key, values in lists.items() for level, value in enumerate(values)}
    with never_fatal(accelerator):
        accelerator.log({key: value for key, value in (record | by_level).items() if key not in lists and value is not None})


def track_grid(accelerator: Accelerator, step: int, grid: Image.Image) -> None:
    with never_fatal(accelerator):
        for tracker in accelerator.trackers:
            tracker.log_images({"samples": [grid]}, commit=False)
            tracker.log({"step": step})


def finish(accelerator: Accelerator) -> None:
    with never_fatal(accelerator):
        for tracker in accelerator.trackers:
            tracker.finish()
