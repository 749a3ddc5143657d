"""Record and log the settings with which a run starts."""

from __future__ import annotations

import logging
import shutil

from checkpoints.provenance import describe_start
from checkpoints.run import RunFolder
from common.files import append_line
from runtime.compilation import resolve_compile
from training.trainer import Trainer

log = logging.getLogger(__name__)


def record_start(trainer: Trainer, run: RunFolder) -> None:
    """Write config.yaml and starts.jsonl, delete results of steps that the run will repeat, log the settings and start wandb."""
    cfg, accelerator = trainer.cfg, trainer.accelerator
    if not accelerator.is_main_process:
        return
    run.keep_until(trainer.step)
    if trainer.step < cfg.train.num_steps:  # a complete run keeps its stored configuration
        run.write_config(cfg.model_dump())
        append_line(run.starts, describe_start(accelerator, trainer.step))
    log_plan(trainer, run)
    if cfg.wandb.mode != "disabled":
        settings = {"name": cfg.name, "mode": cfg.wandb.mode, "dir": str(run.path), "id": run.wandb_id(), "resume": "allow"}
        accelerator.init_trackers(cfg.wandb.project, cfg.model_dump(), init_kwargs={"wandb": settings})
        # Use the logged step as the axis. wandb's own step would ignore the steps that a run repeats after a crash.
        for tracker in accelerator.trackers:
            tracker.tracker.define_metric("*", step_metric="step")


def log_plan(trainer: Trainer, run: RunFolder) -> None:
    """Log the main settings of a run and the disk space that its checkpoints need."""
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
    bytes_per_parameter = 4 * (4 + num_lengths) * num_checkpoints  # float32 weights, EMA, two moments, train.ema_lengths
    bytes_per_parameter += 2 * num_lengths * (train.num_steps // train.ema_snapshot_every)  # float16 snapshots
    needed, free = bytes_per_parameter * num_parameters / 1e9, shutil.disk_usage(run.path).free / 1e9
    log.log(logging.WARNING if needed > free else logging.INFO, "disk   up to %.3g GB of checkpoints, %.3g GB free", needed, free)
    if trainer.step >= train.num_steps:
        log.info("this run is complete at step %d: train.num_steps=%d", trainer.step, train.num_steps)
        return
    schedule = f"batch {train.batch_size}, lr {train.lr:g} ({train.schedule})"
    machine = f"{trainer.accelerator.num_processes} x {device.type}"
    numerics = f"{train.precision}, tf32={train.tf32}, compile={resolve_compile(train.compile, device)}"
    log.info("train  steps %d to %d, %s, %s, %s", trainer.step, train.num_steps, schedule, machine, numerics)
