"""Train a diffusion transformer, with or without token routing, on precomputed latents.

    python train.py model=tread                                  # the embedded digits, minutes on a laptop
    accelerate launch train.py model=tread                       # the same, with a process for each GPU
    python train.py model=dit                                    # the same network without routes
    python train.py model=tread data=imagenet256 data.path=latents/in256 model.backbone=DiT-XL/2
    python train.py model=tread name=mine train.num_steps=2000   # any key of configs/ can be set
    python train.py model=dit name=tuned init_from=runs/mine     # from the weights of another run, without routes

The run lives in runs/<name>/. The same command again goes on where it stopped.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from accelerate import Accelerator
from accelerate.utils import set_seed
from omegaconf import DictConfig

from common.errors import UserError
from common.progress import say_if_slow
from configs import command_line as cli
from configs import schema
from sampling.evaluator import Evaluator
from sampling.sampler import ImageSampler
from training import build, load, machine, memory, speed
from training import checkpoint as checkpoints
from training.ema import EMA
from training.provenance import describe_start
from training.resume import decide_together, find_initial, find_resume
from training.run import RunFolder
from training.trainer import Evaluation, Trainer

log = logging.getLogger("train")


def main(cfg: DictConfig) -> None:
    # Everything that can be wrong with the configuration, the data and the folder, before any slow work.
    cfg = schema.check(cfg, schema.TrainConfig)
    build.check_loss(cfg.diffusion)
    diffusion = build.build_diffusion(cfg.diffusion)
    with say_if_slow(log, "opening data.path=%s", cfg.data.path):
        cfg, dataset = build.open_data(cfg)
    build.check_alignment(cfg, dataset)
    accelerator = machine.start_accelerator(
        cfg.train.cpu_threads,
        tf32=cfg.train.tf32,
        mixed_precision=speed.MIXED_PRECISION[cfg.train.precision],
        log_with="wandb" if cfg.wandb.mode != "disabled" else None,
    )
    build.check_batch_size(cfg, accelerator.num_processes)
    build.check_parallel(cfg.train, accelerator.num_processes, accelerator.distributed_type)
    alignment = build.build_alignment(cfg, dataset, accelerator)
    memory_needed = memory.check_memory(cfg.train, lambda: build.build_network(cfg), accelerator, alignment)
    set_seed(cfg.seed)
    with say_if_slow(log, "building %s", cfg.model.backbone):
        net = build.build_network(cfg)
    speed.check_machine(cfg.train, net, accelerator.device)
    ema = EMA(net, cfg.train.ema_decay)
    sampler, evaluation = build_sampler_and_evaluation(cfg, ema, accelerator)

    run = RunFolder(cfg.output_dir, cfg.name)
    initial = find_initial(run, cfg.init_from, cfg.resume, accelerator)
    if initial is not None:
        stored, step = load.load_config(initial), checkpoints.step_of(initial)
        build.check_initial(stored, step, cfg, checkpoints.imported_from(initial))
    decide_together(run.open, accelerator)
    newest = find_resume(run, cfg.resume, accelerator)
    if newest is not None:
        build.check_resume(load.load_config(newest), cfg, newest)

    trainer = Trainer(accelerator, cfg, net, ema, diffusion, dataset, run, sampler, evaluation, alignment)
    if newest is not None:
        trainer.resume(newest)
    elif initial is not None:
        trainer.init_from(initial, cfg.init_state)
    if accelerator.is_main_process:
        run.keep_metrics_until(trainer.step)
        run.write_config(cfg.model_dump())
        if trainer.step < cfg.train.num_steps:
            run.log_start(describe_start(accelerator, trainer.step))
        describe(trainer, memory_needed)
    if cfg.wandb.mode != "disabled" and accelerator.is_main_process:
        settings = {"name": cfg.name, "mode": cfg.wandb.mode, "dir": str(run.path), "id": run.wandb_id(), "resume": "allow"}
        accelerator.init_trackers(cfg.wandb.project, cfg.model_dump(), init_kwargs={"wandb": settings})
        # By our steps and not by wandb's count, which ignores what goes back to an earlier step, as a resume does after a crash.
        for tracker in accelerator.trackers:
            tracker.tracker.define_metric("*", step_metric="step")

    trainer.train()
    accelerator.end_training()


def build_sampler_and_evaluation(
    cfg: schema.TrainConfig, ema: EMA, accelerator: Accelerator
) -> tuple[ImageSampler | None, Evaluation | None]:
    """(sampler of the grids, evaluation), both of the EMA's network; each None if the configuration asks for none."""
    if not (cfg.sample.every or cfg.eval.every):
        return None, None
    diffusion = build.build_diffusion(cfg.diffusion)
    guidance = cfg.guidance if cfg.sample.every else schema.NoGuidance(name="none")  # guidance.* is for the grids
    build.check_guidance(guidance, cfg, diffusion)
    build.warn_of_guidance(guidance, cfg)
    reference = None
    if cfg.eval.every:
        reference = build.open_reference(cfg.evaluation.reference, "evaluation.reference", cfg.evaluation.all_detectors)
    settings = load.find_second_checkpoint(guidance, cfg, accelerator)
    autoencoder = build.build_autoencoder(cfg, accelerator.device)
    compile_mode = speed.resolve_compile(cfg.train.compile, accelerator.device)
    if compile_mode != "none":
        compile_mode = "blocks"  # training's batches are of other sizes: CUDA graphs or a whole network would take long to make
        speed.compile_network(ema.net, compile_mode)
    options = {"diffusion": diffusion, "compile_mode": compile_mode, "precision": cfg.sample.precision}
    sampler = load.build_sampler(ema.net, cfg, settings, autoencoder, accelerator.device, **options)
    evaluation = None
    if cfg.eval.every:
        detectors = build.build_detectors(cfg.evaluation, accelerator)
        evaluator = Evaluator.open(accelerator, detectors, reference, cfg.eval.batch_size)
        samplers = {}
        for scale in cfg.eval.cfg_scales:
            guidance = schema.CFG(name="cfg", cfg_scale=scale)
            try:
                build.check_guidance(guidance, cfg, diffusion)
            except UserError as e:
                raise UserError(f"eval.cfg_scales={scale:g}: {e}; or set eval.cfg_scales=[1.0]") from e
            samplers[scale] = replace(
                sampler,
                guidance=build.build_guidance(guidance),
                diffusion=build.build_diffusion(cfg.diffusion, num_steps=cfg.eval.num_steps),
                weak=None,
                precision=cfg.eval.precision,
            )
        evaluation = Evaluation(evaluator, samplers)
    return sampler if cfg.sample.every else None, evaluation


def describe(trainer: Trainer, memory_needed: str) -> None:
    """What is about to run, in a few lines."""
    cfg, net, data = trainer.cfg, trainer.net, trainer.dataset
    num_parameters = sum(p.numel() for p in net.parameters() if p.requires_grad)
    routes = [
        f"{r.selection_ratio:.0%} of {net.num_tokens} tokens skip blocks {r.start_layer_idx} to {r.end_layer_idx}"
        for r in net.router.routes
    ]
    shape = f"{data.channels}x{data.height}x{data.width}"
    size = f"batch {cfg.train.batch_size}, {trainer.accelerator.num_processes} x {trainer.device.type}, {cfg.train.precision}"
    if trainer.device.type == "cuda" and cfg.train.tf32:
        size += ", tf32"
    if (mode := speed.resolve_compile(cfg.train.compile, trainer.device)) != "none":
        size += f", compiled ({mode})"
    if trainer.is_sharded:
        size += ", sharded (fsdp)"
    log.info("run    %s", trainer.run.path)
    log.info("model  %s, %.1fM parameters, %s", cfg.model.backbone, num_parameters / 1e6, ", ".join(routes) or "no routes")
    log.info("data   %s: %d latents %s, %d classes", data.path, len(data), shape, data.info.num_classes)
    if trainer.alignment is not None:
        until = "" if cfg.alignment.stop_step is None else f" until step {cfg.alignment.stop_step}"
        log.info("align  block %d to %s, weight %g%s", cfg.alignment.block, cfg.alignment.encoder, cfg.alignment.weight, until)
    for line in data.statements:
        log.log(logging.WARNING if line.startswith("warning:") else logging.INFO, "       %s", line)
    if trainer.step < cfg.train.num_steps:
        log.info("train  steps %d to %d, %s", trainer.step, cfg.train.num_steps, size)
        log.info("memory %s", memory_needed)
    else:
        log.info("this run is complete at step %d; raise train.num_steps=%d to go on", trainer.step, cfg.train.num_steps)


if __name__ == "__main__":
    cli.run(main, "config", schema.TrainConfig)
