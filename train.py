"""Train a diffusion transformer, with or without token routing, on precomputed latents.

    accelerate launch train.py model=tread                                  # the embedded digits, minutes on a laptop
    accelerate launch train.py model=dit                                    # the same network without routes
    accelerate launch train.py model=tread data=imagenet256 data.path=latents/in256 model.backbone=DiT-XL/2
    accelerate launch train.py model=tread name=mine train.num_steps=2000   # any key of configs/ can be set
    accelerate launch train.py model=dit name=tuned init_from=runs/mine     # from the weights of another run, without routes

The run lives in runs/<name>/. The same command again goes on where it stopped.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from omegaconf import DictConfig, OmegaConf

from latents import autoencoders
from training import checkpoint as checkpoints
from training import cli, config, engine
from training.evaluation import Evaluator, build_detector, open_reference
from training.loop import Trainer
from training.provenance import describe_start
from training.run import RunFolder, naming
from training.sampling import build_sampler, find_weak, load_weak

log = logging.getLogger("train")


def main(cfg: DictConfig) -> None:
    # Everything that can be wrong with the configuration, the data and the folder, before any slow work.
    cfg = config.check(cfg, config.TRAIN_KEYS)
    diffusion = config.build_diffusion(cfg)
    dataset = config.open_data(cfg)
    accelerator = cli.start_accelerator(
        cfg.train.cpu_threads,
        mixed_precision=engine.MIXED_PRECISION[cfg.train.precision],
        log_with="wandb" if cfg.wandb.mode != "disabled" else None,
    )
    config.check_batch_size(cfg, accelerator.num_processes)
    config.check_parallel(cfg, accelerator.num_processes, accelerator.distributed_type)
    set_seed(cfg.seed)
    net = config.build_network(cfg)
    engine.check_machine(cfg.train, net, accelerator.device)
    looks_at_samples = cfg.sample.every or cfg.eval.every
    autoencoder = build_autoencoder(cfg, accelerator) if looks_at_samples else None
    evaluator = open_evaluator(cfg, accelerator) if cfg.eval.every else None

    weak = None
    if looks_at_samples:
        config.check_guidance(cfg.guidance, cfg, diffusion)
        config.warn_of_guidance(cfg.guidance, cfg)
        find_weak(cfg.guidance, cfg, accelerator)
        weak = load_weak(cfg.guidance, accelerator.device)

    run = RunFolder(cfg.output_dir, cfg.name)
    initial = find_initial(cfg, run, accelerator)
    if accelerator.is_main_process:
        run.open()
    accelerator.wait_for_everyone()

    trainer = Trainer(accelerator, cfg, net, diffusion, dataset, run)
    if autoencoder is not None:
        guide = config.build_guidance(cfg)
        looks = {"diffusion": diffusion, "guide": guide, "weak": weak}
        sampler = build_sampler(trainer.ema.net, cfg, autoencoder, accelerator.device, **looks)
        trainer.sampler = sampler if cfg.sample.every else None
        trainer.evaluator = evaluator
        trainer.evaluation_sampler = replace(sampler, diffusion=config.build_diffusion(cfg, num_steps=cfg.eval.num_steps))
    resume(trainer, cfg.resume)
    if initial is not None:
        trainer.init_from(initial, cfg.init_state)
    if accelerator.is_main_process:
        with naming(run.path / "config.yaml"):
            OmegaConf.save(cfg, run.path / "config.yaml")
        if trainer.step < cfg.train.num_steps:
            run.log_start(describe_start(accelerator, trainer.step))
        describe(trainer)
    wandb_settings = {"name": cfg.name, "mode": cfg.wandb.mode, "dir": str(run.path)}
    accelerator.init_trackers(cfg.wandb.project, OmegaConf.to_container(cfg), init_kwargs={"wandb": wandb_settings})

    trainer.train()
    accelerator.end_training()


def build_autoencoder(cfg: DictConfig, accelerator: Accelerator) -> autoencoders.Autoencoder:
    try:
        return autoencoders.build(cfg.data.autoencoder, accelerator.device, cfg.data.in_channels, "data.autoencoder")
    except ValueError as e:
        raise ValueError(f"{e}; or train without looking at samples: sample.every=0 eval.every=0") from e


def open_evaluator(cfg: DictConfig, accelerator: Accelerator) -> Evaluator:
    """The detector and the reference, loaded before training: what is missing is found now and not 50,000 steps later."""
    reference = open_reference(cfg.evaluation.reference, "evaluation.reference")
    return Evaluator.open(accelerator, build_detector(cfg.evaluation, accelerator), reference, cfg.eval.batch_size)


def resume(trainer: Trainer, where: str) -> None:
    """resume=auto | never | <folder of a checkpoint>."""
    root, accelerator = trainer.run.checkpoints, trainer.accelerator
    newest = max(checkpoints.list_steps(root), default=None)
    folder = None
    if where == "never":
        if newest is not None:
            raise ValueError(f"resume=never, but {root} holds checkpoints; choose another name=..., or resume=auto")
    elif where == "auto":
        folder = newest_checkpoint(trainer)
    else:
        folder = Path(where)
        checkpoints.verify(folder)
        if newest is not None and newest > checkpoints.step_of(folder):
            raise ValueError(
                f"resume={where}, but {root} already holds step {newest}, which going on from there would overwrite; "
                "choose another name=..."
            )
    if folder is not None:
        trainer.resume(folder)
        log.info("resumed from %s", folder)
    if accelerator.is_main_process:
        trainer.run.keep_metrics_until(trainer.step)


def find_initial(cfg: DictConfig, run: RunFolder, accelerator: Accelerator) -> Path | None:
    """The verified checkpoint that init_from names, for a run that starts; a run that goes on has weights of its own.

    Raises:
        ValueError: there is none, or it is of another architecture; nothing is left to do.
    """
    if cfg.init_from is None:
        return None
    found = None
    if accelerator.is_main_process:
        if checkpoints.list_steps(run.checkpoints) or cfg.resume not in ("auto", "never"):
            log.info("init_from=%s is not read again: the run goes on from a checkpoint of its own", cfg.init_from)
        else:
            found = checkpoints.find_checkpoint(Path(cfg.init_from), "init_from")
            config.check_initial(checkpoints.load_config(found), checkpoints.step_of(found), cfg)
    return broadcast_object_list([found])[0]


def newest_checkpoint(trainer: Trainer) -> Path | None:
    """The newest good checkpoint of the run, the same for all processes; bad ones after it are set aside."""
    found = None
    if trainer.accelerator.is_main_process:
        folder, problems = checkpoints.find_newest(trainer.run.checkpoints)
        for bad, problem in problems.items():
            log.warning("%s; set aside as %s", problem, checkpoints.set_aside(bad))
        found = folder
    return broadcast_object_list([found])[0]


def describe(trainer: Trainer) -> None:
    """What is about to run, in a few lines."""
    cfg, net, data = trainer.cfg, trainer.net, trainer.dataset
    num_parameters = sum(p.numel() for p in net.parameters() if p.requires_grad)
    routes = [
        f"{r.selection_ratio:.0%} of {net.num_tokens} tokens skip blocks {r.start_layer_idx} to {r.end_layer_idx}"
        for r in net.router.routes
    ]
    shape = f"{data.channels}x{data.height}x{data.width}"
    size = f"batch {cfg.train.batch_size}, {trainer.accelerator.num_processes} x {trainer.device.type}, {cfg.train.precision}"
    if trainer.is_sharded:
        size += ", sharded (fsdp)"
    log.info("run    %s", trainer.run.path)
    log.info("model  %s, %.1fM parameters, %s", cfg.model.backbone, num_parameters / 1e6, ", ".join(routes) or "no routes")
    log.info("data   %s: %d latents %s, %d classes", data.path, len(data), shape, data.info.num_classes)
    for line in data.statements:
        log.log(logging.WARNING if line.startswith("warning:") else logging.INFO, "       %s", line)
    if trainer.step < cfg.train.num_steps:
        log.info("train  steps %d to %d, %s", trainer.step, cfg.train.num_steps, size)
    else:
        log.info("this run is complete at step %d; raise train.num_steps=%d to go on", trainer.step, cfg.train.num_steps)


if __name__ == "__main__":
    cli.run(main, "config", config.TRAIN_KEYS)
