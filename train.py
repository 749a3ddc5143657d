"""Train a diffusion transformer, with or without token routing, on precomputed latents.

    python train.py model=tread                                  # the embedded digits, minutes on a laptop
    accelerate launch train.py model=tread                       # the same, with a process for each GPU
    python train.py model=dit                                    # the same network without routes
    python train.py model=tread data=imagenet256 data.path=data/imagenet256 model.backbone=DiT-XL/2
    python train.py model=tread name=mine train.num_steps=2000   # any key of configs/ can be set
    python train.py model=dit name=tuned init_from=runs/mine     # from the weights of another run, without routes
    python train.py -m model=dit,tread seed=0,1,2                # six runs, one after another

The run lives in runs/<name>/. The same command again resumes it.
"""

from __future__ import annotations

from configs import command_line

if __name__ == "__main__":  # before torch, whose import takes seconds that --help and a wrong key need not wait for
    command_line.run("train:main", "config", "configs.schema:TrainConfig", __doc__, at_end="sampling.processes:leave")

import logging
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

from common.errors import UserError
from common.files import append_line
from common.progress import say_if_slow
from configs import schema
from sampling.evaluator import Evaluator, build_detectors, open_reference
from sampling.flops import count_evaluations, forward_flops
from sampling.processes import check_same, leave, on_main
from sampling.sampler import sampler_with
from training import build, load, machine, saving, speed
from training import checkpoint as checkpoints
from training.ema import EMA
from training.hooks import Evaluations, Grids, Metrics, has_all
from training.provenance import describe_start
from training.resume import find_initial, find_resume
from training.run import RunFolder
from training.sharding import check_processes
from training.trainer import Hook, Trainer

log = logging.getLogger("train")


def main(cfg: schema.TrainConfig) -> None:
    # Check the configuration, the data and the folder before any slow work.
    if cfg.diffusion.name == "ddpm":
        raise UserError("diffusion=ddpm is for sampling from imported weights and has no loss; train with diffusion=edm or sit")
    with say_if_slow(log, "opening data.path=%s", cfg.data.path):
        cfg, dataset = build.open_data(cfg)
    accelerator = machine.start_accelerator(
        cfg.train.cpu_threads,
        tf32=cfg.train.tf32,
        precision=cfg.train.precision,
        log_with="wandb" if cfg.wandb.mode != "disabled" else None,
    )
    check_same(dataset.identity, "data.path", dataset.path)
    check_processes(cfg.train, accelerator.num_processes, accelerator.distributed_type)
    speed.check_machine(cfg.train, accelerator.device)
    alignment = build.build_alignment(cfg, dataset, accelerator)
    set_seed(cfg.seed)
    with say_if_slow(log, "building %s", cfg.model.backbone):
        net = build.build_network(cfg)
    ema = build.build_ema(cfg.train, net)
    run = RunFolder(cfg.output_dir, cfg.name)
    # A repeated sweep holds complete runs, which need no autoencoder and no detector.
    hooks = [] if on_main(partial(has_all, run, cfg)) else build_hooks(cfg, ema, run, accelerator)

    initial = find_initial(run, cfg.init_from, cfg.resume)
    if initial is not None:
        build.check_initial(load.load_config(initial), checkpoints.step_of(initial), cfg, checkpoints.imported_from(initial))
    on_main(run.open)
    newest = find_resume(run, cfg.resume)
    if newest is not None:
        build.check_resume(load.load_config(newest), cfg, newest)
    if not hooks and checkpoints.step_of(newest) < cfg.train.num_steps:  # the last checkpoint is damaged
        hooks = build_hooks(cfg, ema, run, accelerator)

    trainer = Trainer(accelerator, cfg, net, ema, dataset, alignment, hooks)
    if newest is not None:
        saving.resume(trainer, newest)
    elif initial is not None:
        saving.init_from(trainer, initial, cfg.init_state)
    if accelerator.is_main_process:
        run.keep_until(trainer.step)
        run.write_config(cfg.model_dump())
        if trainer.step < cfg.train.num_steps:
            append_line(run.starts, describe_start(accelerator, trainer.step))
        describe(trainer, run)
        if cfg.wandb.mode != "disabled":
            start_wandb(accelerator, cfg, run)
    is_complete = trainer.train()
    run.close()
    for tracker in accelerator.trackers:
        tracker.finish()
    if not is_complete:
        log.warning("stopped after step %d as requested; run the same command to resume", trainer.step)
        leave()
        # This also ends a sweep, and Ctrl-C a shell's loop around the command; a cluster's signals are no error.
        sys.exit(128 + signal.SIGINT if trainer.stopped_by == signal.SIGINT else 0)


def build_hooks(cfg: schema.TrainConfig, ema: EMA, run: RunFolder, accelerator: Accelerator) -> list[Hook]:
    """The hooks that run between steps. Grids and evaluations sample from the EMA's network."""
    checkpoint = saving.Saving(run, cfg.checkpoint.every, cfg.checkpoint.keep_last, cfg.checkpoint.keep_every)
    hooks = [Metrics(run, cfg.train.log_every, partial(checkpoint.check, wait=False)), checkpoint]
    if cfg.train.ema_lengths:
        from extras import posthoc_ema  # the registry's line

        hooks.append(posthoc_ema.Snapshots(run, cfg.train.ema_snapshot_every))
    if not (cfg.sample.every or cfg.eval.every):
        return hooks
    guidance = cfg.guidance if cfg.sample.every else schema.NoChoice(name="none")  # guidance.* is for the grids
    load.check_guidance(guidance, cfg, cfg.diffusion)
    if cfg.eval.every:
        judged = cfg.evaluation.all_detectors, cfg.data.resolution, cfg.evaluation.background
        reference = open_reference(cfg.evaluation.reference, "evaluation.reference", *judged)
    autoencoder = build.build_autoencoder(cfg, accelerator.device)
    compile_mode = speed.resolve_compile(cfg.train.compile, accelerator.device)
    speed.compile_network(ema.net, compile_mode)
    guidance = load.find_second_checkpoint(guidance, cfg)
    options = {"diffusion": cfg.diffusion, "compile_mode": compile_mode, "precision": cfg.sample.precision}
    sampler = load.build_sampler(ema.net, cfg, guidance, autoencoder, accelerator.device, **options)
    if cfg.sample.every:
        hooks.append(Grids(run, sampler, cfg.sample.every))
    if cfg.eval.every:
        diffusion = sampler_with(cfg.diffusion, num_steps=cfg.eval.num_steps)
        samplers = {}
        for scale in cfg.eval.cfg_scales:
            scaled = schema.CFG(name="cfg", cfg_scale=scale)
            load.check_guidance(scaled, cfg, diffusion)
            own = {"guidance": load.build_guidance(scaled), "diffusion": diffusion, "weak": None}
            samplers[scale] = replace(sampler, **own, precision=cfg.eval.precision)
        detectors = build_detectors(cfg.evaluation, accelerator)
        evaluator = Evaluator(accelerator, detectors, reference, cfg.eval.batch_size, run.path.parent / "reference_features")
        hooks.append(Evaluations(run, evaluator, samplers, cfg.eval.every))
    return hooks


def describe_evaluations(cfg: schema.TrainConfig, net: nn.Module, step: int) -> str:
    """The evaluations after `step`, and how many steps of training take as many FLOPs."""
    last, scales = cfg.train.num_steps, ", ".join(f"{scale:g}" for scale in cfg.eval.cfg_scales)
    closing = cfg.eval.closing_num_samples
    num_earlier = sum(t > step for t in range(cfg.eval.every, last, cfg.eval.every))
    num_samples = (num_earlier * cfg.eval.num_samples + closing) * sum(1 + (scale != 1) for scale in cfg.eval.cfg_scales)
    diffusion = sampler_with(cfg.diffusion, num_steps=cfg.eval.num_steps)
    sampling = num_samples * count_evaluations(diffusion) * forward_flops(net)
    num_steps = sampling / (3 * cfg.train.batch_size * forward_flops(net, None))  # a backward costs two forwards
    words = f"{closing:,} samples at step {last}, for each scale of {scales}"
    words += f", and {cfg.eval.num_samples:,} at {num_earlier} steps before" if num_earlier else ""
    return f"{words}; by FLOPs, this sampling takes as long as {num_steps:,.0f} steps"


def start_wandb(accelerator: Accelerator, cfg: schema.TrainConfig, run: RunFolder) -> None:
    settings = {"name": cfg.name, "mode": cfg.wandb.mode, "dir": str(run.path), "id": run.wandb_id(), "resume": "allow"}
    accelerator.init_trackers(cfg.wandb.project, cfg.model_dump(), init_kwargs={"wandb": settings})
    # Our own step is the axis: wandb's count ignores rows of an earlier step, which a resume after a crash writes.
    for tracker in accelerator.trackers:
        tracker.tracker.define_metric("*", step_metric="step")


def describe(trainer: Trainer, run: RunFolder) -> None:
    """Log what is about to run."""
    cfg, net, data = trainer.cfg, trainer.net, trainer.dataset
    num_parameters = sum(p.numel() for p in net.parameters() if p.requires_grad)
    kind = f"({cfg.model.selection}, {cfg.model.fusion})"
    routes = [
        f"{r.selection_ratio:.0%} of {net.num_tokens} tokens skip blocks {r.start_layer_idx} to {r.end_layer_idx} {kind}"
        for r in net.router.routes
    ]
    shape = f"{data.channels}x{data.height}x{data.width}"
    rate = f"lr {cfg.train.lr:g}" + (f" ({cfg.train.schedule})" if cfg.train.schedule != "constant" else "")
    machine_words = f"{trainer.accelerator.num_processes} x {trainer.device.type}"
    how = [f"batch {cfg.train.batch_size}", rate, machine_words, cfg.train.precision]
    how += ["tf32"] if trainer.device.type == "cuda" and cfg.train.tf32 else []
    how += ["compiled"] if speed.resolve_compile(cfg.train.compile, trainer.device) == "blocks" else []
    how += ["sharded (fsdp)"] if cfg.train.parallel == "fsdp" else []
    log.info("run    %s", run.path)
    log.info("model  %s, %.1fM parameters, %s", cfg.model.backbone, num_parameters / 1e6, ", ".join(routes) or "no routes")
    log.info("data   %s: %d latents %s, %d classes", data.path, len(data), shape, data.info.num_classes)
    if trainer.alignment is not None:
        log.info("align  block %d to %s, weight %g", cfg.alignment.block, cfg.alignment.encoder, cfg.alignment.weight)
    needed, free = cfg.checkpoints_gb(num_parameters), shutil.disk_usage(run.path).free / 1e9
    log.log(logging.WARNING if needed > free else logging.INFO, "disk   up to %.3g GB of checkpoints, %.3g GB free", needed, free)
    if trainer.step < cfg.train.num_steps:
        log.info("train  steps %d to %d, %s", trainer.step, cfg.train.num_steps, ", ".join(how))
        if cfg.eval.every:
            log.info("eval   %s", describe_evaluations(cfg, net, trainer.step))
    else:
        log.info("this run is complete at step %d: train.num_steps=%d", trainer.step, cfg.train.num_steps)
