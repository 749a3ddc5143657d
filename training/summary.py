"""Log what a run trains, on what and for how long, and check that its checkpoints fit on the disk."""

from __future__ import annotations

import logging
import shutil

from torch import nn

from checkpoints import store
from checkpoints.run import RunFolder
from common.errors import UserError
from runtime.compilation import resolve_compile
from training import optimizers
from training.trainer import Trainer

log = logging.getLogger(__name__)


def log_summary(trainer: Trainer, run: RunFolder) -> None:
    """Log the settings of a run that is about to train, or that it is complete. The main process calls this function.

    Raises UserError if the disk has no room for a checkpoint.
    """
    log_model_and_data(trainer, run)
    if trainer.step >= trainer.cfg.train.num_steps:
        log.info("this run is complete at step %d: train.num_steps=%d", trainer.step, trainer.cfg.train.num_steps)
    else:
        check_disk_space(trainer, run)
        log_training(trainer)


def log_model_and_data(trainer: Trainer, run: RunFolder) -> None:
    cfg, net, data = trainer.cfg, trainer.net, trainer.dataset
    skipped = f"of {net.num_tokens} tokens ({cfg.model.selection}) skip blocks"
    routes = [f"{r.selection_ratio:.0%} {skipped} {r.start_layer_idx} to {r.end_layer_idx}" for r in net.router.routes]
    shape = f"{data.channels}x{data.height}x{data.width}"
    millions = num_trained_parameters(net) / 1e6
    log.info("run    %s", run.path)
    log.info("model  %s, %.1fM parameters, %s", cfg.model.backbone, millions, ", ".join(routes) or "no routes")
    log.info("data   %s: %d latents %s, %d classes", data.path, len(data), shape, data.info.num_classes)
    if trainer.alignment is not None:
        log.info("align  block %d to %s, weight %g", cfg.alignment.block, cfg.alignment.encoder, cfg.alignment.weight)


def log_training(trainer: Trainer) -> None:
    cfg, train, device = trainer.cfg, trainer.cfg.train, trainer.device
    schedule = f"batch {train.batch_size}, {train.optimizer}, lr {train.lr:g} ({train.schedule})"
    machine = f"{trainer.accelerator.num_processes} x {device.type}"
    numerics = [train.precision, *([f"tf32={cfg.machine.tf32}"] if device.type == "cuda" else [])]
    numerics += [f"compile={resolve_compile(cfg.machine.compile, device)}", *(["cuda_graphs=step"] if trainer.graph else [])]
    log.info("train  steps %d to %d, %s, %s, %s", trainer.step, train.num_steps, schedule, machine, ", ".join(numerics))


def check_disk_space(trainer: Trainer, run: RunFolder) -> None:
    """Log the disk space that the checkpoints of a run need, and warn if there is less.

    Raises UserError if the disk has no room for a checkpoint and holds none: a save may remove stored ones first.
    """
    cfg, train = trainer.cfg, trainer.cfg.train
    every = cfg.checkpoint.keep_every
    stored_steps = store.list_steps(run.checkpoints)
    num_checkpoints = cfg.checkpoint.keep_last + 1 + (train.num_steps // every if every else 0)  # saving precedes deleting
    # Checkpoints that only another keep_every keeps.
    num_checkpoints += sum(store.is_kept(*item, 0) and not (every and item[0] % every == 0) for item in stored_steps.items())
    moments = optimizers.expected_state(train, trainer.parameters)  # the optimizers have none before the first step
    size = store.num_bytes({**trainer.tensors(), "optimizer": moments}) / 1e9
    averages = len(train.ema_lengths) * num_trained_parameters(trainer.net)
    snapshots = 2 * averages * (train.num_steps // train.ema_snapshot_every) / 1e9  # in float16
    needed = size * num_checkpoints + snapshots
    free = shutil.disk_usage(run.path).free / 1e9
    log.info("disk   up to %.3g GB of checkpoints (%.3g GB each), %.3g GB free", needed, size, free)
    stored = size * len(stored_steps) + sum(file.stat().st_size for file in run.snapshots.glob("step_*")) / 1e9
    if free < size and not stored_steps:
        problem = f"the disk of {run.path} has {free:.3g} GB free, and a checkpoint needs {size:.3g} GB"
        raise UserError(f"{problem}; free space, or choose another output_dir=...")
    if needed > free + stored:
        kept = f"checkpoint.keep_last={cfg.checkpoint.keep_last}, checkpoint.keep_every={every}"
        message = "disk   room for only %d more checkpoints, and training ends when the disk is full: free space, or keep fewer"
        log.warning(f"{message} (%s)", free // size, kept)


def num_trained_parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters() if p.requires_grad)
