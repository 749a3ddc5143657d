"""Record and log the settings with which a run starts."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from checkpoints import store
from checkpoints.load import load_config
from checkpoints.provenance import describe_start
from checkpoints.resume import changes_on_resume
from checkpoints.run import RunFolder
from common.errors import UserError
from common.files import append_line
from runtime.compilation import resolve_compile
from training import optimizers
from training.trainer import Trainer

log = logging.getLogger(__name__)


def record_start(trainer: Trainer, run: RunFolder, newest: Path | None, initial: Path | None) -> None:
    """Write config.yaml and starts.jsonl, delete results of steps that the run will repeat, and log the settings.

    The main process calls this function. Raises UserError if the disk has no room for a checkpoint.
    `newest` is the checkpoint from which the run resumes, and `initial` that of init_from with which it begins.
    """
    cfg, accelerator = trainer.cfg, trainer.accelerator
    if trainer.step < cfg.train.num_steps:  # a complete run keeps its stored configuration
        run.write_config(cfg.model_dump())  # first, because it shows that the folder is a run if the process is killed
        changed = [] if newest is None else changes_on_resume(load_config(newest), cfg)
        append_line(run.starts, describe_start(accelerator, trainer.step, newest is not None, changed, initial))
    run.delete_results_after(trainer.step)
    log_plan(trainer, run)


def log_plan(trainer: Trainer, run: RunFolder) -> None:
    """Log the main settings of a run and the disk space that its checkpoints need. Refuse a disk without room for one."""
    cfg, net, data, train, device = trainer.cfg, trainer.net, trainer.dataset, trainer.cfg.train, trainer.device
    num_parameters = sum(p.numel() for p in net.parameters() if p.requires_grad)
    skipped = f"of {net.num_tokens} tokens ({cfg.model.selection}) skip blocks"
    routes = [f"{r.selection_ratio:.0%} {skipped} {r.start_layer_idx} to {r.end_layer_idx}" for r in net.router.routes]
    shape = f"{data.channels}x{data.height}x{data.width}"
    log.info("run    %s", run.path)
    log.info("model  %s, %.1fM parameters, %s", cfg.model.backbone, num_parameters / 1e6, ", ".join(routes) or "no routes")
    log.info("data   %s: %d latents %s, %d classes", data.path, len(data), shape, data.info.num_classes)
    if trainer.alignment is not None:
        log.info("align  block %d to %s, weight %g", cfg.alignment.block, cfg.alignment.encoder, cfg.alignment.weight)
    every, num_lengths = cfg.checkpoint.keep_every, len(train.ema_lengths)
    num_checkpoints = cfg.checkpoint.keep_last + 1 + (train.num_steps // every if every else 0)  # saving precedes deleting
    states = optimizers.state_after_step(trainer.optimizers, trainer.parameters).values()
    moments = sum(value.nbytes for state in states for value in state.values())
    size = (4 * (2 + num_lengths) * num_parameters + moments) / 1e9  # float32 weights, EMA, train.ema_lengths; the optimizer
    snapshots = 2 * num_lengths * (train.num_steps // train.ema_snapshot_every) * num_parameters / 1e9  # in float16
    needed, free = size * num_checkpoints + snapshots, shutil.disk_usage(run.path).free / 1e9
    log.info("disk   up to %.3g GB of checkpoints (%.3g GB each), %.3g GB free", needed, size, free)
    num_stored = len(store.list_steps(run.checkpoints))
    if trainer.step < train.num_steps and free < size and not num_stored:  # a save may remove stored ones first
        problem = f"the disk of {run.path} has {free:.3g} GB free, and a checkpoint needs {size:.3g} GB"
        raise UserError(f"{problem}; free space, or choose another output_dir=...")
    if needed > free + size * num_stored:
        message = "disk   room for only %d more checkpoints, and training ends when the disk is full: free space, or lower %s=%d"
        log.warning(message, free // size, "checkpoint.keep_last", cfg.checkpoint.keep_last)
    if trainer.step >= train.num_steps:
        log.info("this run is complete at step %d: train.num_steps=%d", trainer.step, train.num_steps)
        return
    schedule = f"batch {train.batch_size}, {train.optimizer}, lr {train.lr:g} ({train.schedule})"
    machine = f"{trainer.accelerator.num_processes} x {device.type}"
    numerics = [train.precision, *([f"tf32={cfg.machine.tf32}"] if device.type == "cuda" else [])]
    numerics += [f"compile={resolve_compile(cfg.machine.compile, device)}", *(["cuda_graphs=step"] if trainer.graph else [])]
    log.info("train  steps %d to %d, %s, %s, %s", trainer.step, train.num_steps, schedule, machine, ", ".join(numerics))
