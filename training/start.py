"""Write the start of a run into its folder, check the disk space, and log the settings."""

from __future__ import annotations

import contextlib
import logging
import shutil

from torch import nn

from checkpoints import store
from checkpoints.checkpoint import Checkpoint, read_config
from checkpoints.provenance import describe_command
from checkpoints.run import RunFolder
from checkpoints.run_start import RunStart, changes_on_resume
from common.errors import UserError
from common.files import append_line
from configs.differences import differences, differences_by_role
from configs.schema import TrainConfig
from runtime.compilation import resolve_compile
from training import optimizers
from training.trainer import Trainer

log = logging.getLogger(__name__)


def begin_run(trainer: Trainer, run: RunFolder, start: RunStart) -> None:
    """Write config.yaml and starts.jsonl, delete results of steps that the run will repeat, and log the settings.

    What is in the way is renamed: damaged checkpoints, and results of another run.

    The main process calls this function. Only here, a new run creates its folder, so that an error before leaves none behind.
    Raises UserError if the disk has no room for a checkpoint, or if a new run's folder has been filled meanwhile.
    """
    cfg = trainer.cfg
    is_complete = trainer.step >= cfg.train.num_steps
    if start.resumes:
        for folder, problem in start.damaged.items():
            log.warning("%s; renamed to %s", problem, store.rename_damaged(folder))
        run.saved_mark.touch()  # a save that was killed may have left a checkpoint without this mark
    else:
        begin_new_run(run, cfg)
    if is_complete:
        restore_config(run, start.checkpoint)
    else:
        run.write_config(cfg.model_dump())  # first, because it shows that the folder is a run if the process is killed
        append_line(run.starts, describe_start(trainer, start))
    run.delete_results_after(trainer.step)
    log_model_and_data(trainer, run)
    if is_complete:
        log.info("this run is complete at step %d: train.num_steps=%d", trainer.step, cfg.train.num_steps)
    else:
        check_disk_space(trainer, run)
        log_training(trainer)


def begin_new_run(run: RunFolder, cfg: TrainConfig) -> None:
    """Create the folder of a new run, or rename what it holds of another run."""
    was_open = run.is_open  # otherwise, the folder did not exist when `decide_start` looked
    run.open()
    if store.list_steps(run.checkpoints) or (not was_open and run.has_results()):
        raise UserError(f"another process has trained {run.path} meanwhile, or copied a run there; run the same command again")
    if owner := owner_of_results(run, cfg):
        run.rename_results(owner)
    run.saved_mark.unlink(missing_ok=True)


def owner_of_results(run: RunFolder, cfg: TrainConfig) -> str | None:
    """Return whose results the folder of a run without checkpoints holds, in words.

    It is None if there are none, or only those of a start with equal settings that saved no checkpoint: they are made again.
    """
    if not run.has_results():
        return None
    with contextlib.suppress(UserError):  # the file is not a configuration
        if run.config.exists() and not differences(read_config(run.path), cfg):
            if (last := run.last_step_if_saved()) is None:
                return None
            return f"a run that reached step {last}, but none of its checkpoints; training starts over"
    return "a run with other settings"


def describe_start(trainer: Trainer, start: RunStart) -> dict[str, object]:
    """Return the line of starts.jsonl for this start."""
    line = {"step": trainer.step, "resumed": start.resumes, **describe_command(trainer.accelerator)}
    if start.resumes and (changes := changes_on_resume(start.checkpoint.config, trainer.cfg)):
        line["changed"] = [*map(str, changes)]
    if not start.resumes and (initial := start.checkpoint):
        line["init_from"] = {"checkpoint": str(initial.path.resolve()), "hash": initial.hash}
    return line


def restore_config(run: RunFolder, newest: Checkpoint) -> None:
    """Give the config.yaml of a complete run the settings of its newest checkpoint, if they determine other weights.

    A start with more steps may have written config.yaml, and have ended before it saved a checkpoint.
    """
    try:
        written = read_config(run.path)
    except UserError:  # the file is missing, or is not a configuration
        return
    if differences_by_role("report", "separates", written, newest.config):
        run.write_config(newest.config.model_dump())


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
