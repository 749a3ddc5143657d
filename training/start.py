"""What a run writes and logs when it starts."""

from __future__ import annotations

import logging
import shutil

from accelerate import Accelerator
from torch import nn

from checkpoints.provenance import describe_start
from checkpoints.run import RunFolder
from common.files import append_line
from configs.schema import TrainConfig
from runtime.compilation import resolve_compile
from sampling.flops import count_evaluations, forward_flops
from sampling.recipe import with_sampler
from training.trainer import Trainer

log = logging.getLogger(__name__)


def record(trainer: Trainer, run: RunFolder) -> None:
    """Write config.yaml and a line of starts.jsonl, drop metrics of steps that will be repeated, log the settings, open wandb."""
    cfg, accelerator = trainer.cfg, trainer.accelerator
    if not accelerator.is_main_process:
        return
    run.keep_until(trainer.step)
    if trainer.step < cfg.train.num_steps:  # otherwise the run is complete, and its configuration stays
        run.write_config(cfg.model_dump())
        append_line(run.starts, describe_start(accelerator, trainer.step))
    describe(trainer, run)
    if cfg.wandb.mode != "disabled":
        start_wandb(accelerator, cfg, run)


def describe(trainer: Trainer, run: RunFolder) -> None:
    """Log the run's settings."""
    cfg, net, data = trainer.cfg, trainer.net, trainer.dataset
    num_parameters = sum(p.numel() for p in net.parameters() if p.requires_grad)
    skipped = f"of {net.num_tokens} tokens ({cfg.model.selection}) skip blocks"
    routes = [f"{r.selection_ratio:.0%} {skipped} {r.start_layer_idx} to {r.end_layer_idx}" for r in net.router.routes]
    shape = f"{data.channels}x{data.height}x{data.width}"
    rate = f"lr {cfg.train.lr:g}" + (f" ({cfg.train.schedule})" if cfg.train.schedule != "constant" else "")
    machine = f"{trainer.accelerator.num_processes} x {trainer.device.type}"
    settings = [f"batch {cfg.train.batch_size}", rate, machine, cfg.train.precision]
    settings += ["tf32"] if trainer.device.type == "cuda" and cfg.train.tf32 else []
    settings += ["compiled"] if resolve_compile(cfg.train.compile, trainer.device) == "blocks" else []
    settings += ["sharded (fsdp)"] if cfg.train.parallel == "fsdp" else []
    log.info("run    %s", run.path)
    log.info("model  %s, %.1fM parameters, %s", cfg.model.backbone, num_parameters / 1e6, ", ".join(routes) or "no routes")
    log.info("data   %s: %d latents %s, %d classes", data.path, len(data), shape, data.info.num_classes)
    if trainer.alignment is not None:
        log.info("align  block %d to %s, weight %g", cfg.alignment.block, cfg.alignment.encoder, cfg.alignment.weight)
    needed, free = cfg.checkpoints_gb(num_parameters), shutil.disk_usage(run.path).free / 1e9
    log.log(logging.WARNING if needed > free else logging.INFO, "disk   up to %.3g GB of checkpoints, %.3g GB free", needed, free)
    if trainer.step < cfg.train.num_steps:
        log.info("train  steps %d to %d, %s", trainer.step, cfg.train.num_steps, ", ".join(settings))
        if cfg.eval.every and cfg.evaluation.reference:
            log.info("eval   %s", describe_evaluations(cfg, net, trainer.step))
    else:
        log.info("this run is complete at step %d: train.num_steps=%d", trainer.step, cfg.train.num_steps)


def describe_evaluations(cfg: TrainConfig, net: nn.Module, step: int) -> str:
    """The evaluations after `step`, and how many steps of training take as many FLOPs."""
    last, scales = cfg.train.num_steps, ", ".join(f"{scale:g}" for scale in cfg.eval.cfg_scales)
    closing = cfg.eval.final_num_samples or cfg.eval.num_samples
    num_earlier = sum(t > step for t in range(cfg.eval.every, last, cfg.eval.every))
    num_samples = (num_earlier * cfg.eval.num_samples + closing) * sum(1 + (scale != 1) for scale in cfg.eval.cfg_scales)
    diffusion = with_sampler(cfg.diffusion, {"num_steps": cfg.eval.num_steps})
    sampling = num_samples * count_evaluations(diffusion) * forward_flops(net)
    num_steps = sampling / (3 * cfg.train.batch_size * forward_flops(net, None))  # a backward costs two forwards
    words = f"{closing:,} samples at step {last}, for each scale of {scales}"
    words += f", and {cfg.eval.num_samples:,} at {num_earlier} steps before" if num_earlier else ""
    return f"{words}; by FLOPs, this sampling takes as long as {num_steps:,.0f} steps"


def start_wandb(accelerator: Accelerator, cfg: TrainConfig, run: RunFolder) -> None:
    settings = {"name": cfg.name, "mode": cfg.wandb.mode, "dir": str(run.path), "id": run.wandb_id(), "resume": "allow"}
    accelerator.init_trackers(cfg.wandb.project, cfg.model_dump(), init_kwargs={"wandb": settings})
    # Use our step as the axis: wandb's own ignores rows of earlier steps, which a resume after a crash writes.
    for tracker in accelerator.trackers:
        tracker.tracker.define_metric("*", step_metric="step")
