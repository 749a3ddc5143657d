"""Train a diffusion transformer, with or without token routing, on precomputed latents.

    python train.py model=tread                                  # train on the embedded digits, which takes minutes on a laptop
    accelerate launch train.py model=tread                       # the same training with one process per GPU
    python train.py model=dit                                    # train the same network without routes
    python train.py model=tread data=imagenet256 data.path=data/imagenet256 model.backbone=DiT-XL/2
    python train.py model=tread name=mine train.num_steps=2000   # set any key in configs/
    python train.py model=dit name=tuned init_from=runs/mine     # train without routes from another run's weights
    python train.py -m model=dit,tread seed=0,1,2                # train six runs one after another
    python train.py -m hydra/launcher=joblib hydra.launcher.n_jobs=2 model=dit,tread     # train two runs on two GPUs

The trainer saves the run in runs/<name>/. Running the same command again resumes training.
"""

from __future__ import annotations

import sys
from functools import partial

from cli import jobs
from common.errors import UserError
from configs.schema import TrainConfig


def main(cfg: TrainConfig) -> float | None:
    """Train a run. Return the metric of its last step that sweepers minimise, or None without evaluations."""
    # These imports are inside `main` because torch takes seconds to import. --help and errors in keys do not need torch.
    from accelerate.utils import set_seed

    from checkpoints.run import RunFolder
    from runtime import processes
    from runtime.compilation import check_machine
    from runtime.machine import start_accelerator
    from training import build, loop, tracking
    from training.data import complete_config, open_training_latents, open_validation, warn_of_unusual_scale
    from training.hooks import lowest_metric
    from training.loading import load_start
    from training.parallel import check_batch_divides
    from training.plan import plan_training
    from training.start import begin_run
    from training.stop import end_run_after_signal
    from training.summary import log_summary
    from training.trainer import Trainer

    # Check the configuration, the data and the checkpoints before any slow work.
    if cfg.diffusion.name == "ddpm":
        raise UserError("diffusion=ddpm is for sampling from imported weights and has no loss; train with diffusion=edm or sit")
    dataset = open_training_latents(cfg.data)
    cfg = complete_config(cfg, dataset)
    warn_of_unusual_scale(cfg, dataset)
    log_with = "wandb" if cfg.wandb.mode != "disabled" else None
    train, machine = cfg.train, cfg.machine
    accelerator = start_accelerator(machine.cpu_threads, tf32=machine.tf32, precision=train.precision, log_with=log_with)
    check_batch_divides(train, accelerator.num_processes)
    check_machine(cfg, accelerator.device, accelerator.num_processes)
    validation = open_validation(cfg, dataset)
    run = RunFolder(cfg.output_dir, cfg.name)
    plan = processes.on_main(partial(plan_training, cfg, run, dataset))
    processes.check_same_files(partial(plan.file_fingerprints, cfg, dataset, validation))

    # Build the network and everything that needs it.
    set_seed(cfg.seed)
    net = cfg.model.build(cfg.data)
    ema = build.build_ema(train, net)  # a copy of the network, made before the trainer compiles it
    hooks = build.build_hooks(cfg, plan, ema, run, validation, accelerator)
    alignment = build.build_alignment(cfg, dataset, accelerator)  # last, because loading the encoder takes long
    trainer = Trainer(accelerator, cfg, net, ema, dataset, alignment)

    # Load the checkpoint, and train.
    load_start(trainer, plan.start)
    processes.on_main(partial(begin_run, trainer, run, plan.start))
    processes.on_main(partial(log_summary, trainer, run))
    processes.check_new_file("output_dir", run.lock_path)
    if accelerator.is_main_process:
        tracking.init_trackers(accelerator, cfg, run)
    is_complete = loop.train(trainer, run, hooks)
    run.close()
    tracking.finish(accelerator)  # before the end of a submitit job, which waits to be killed, or exits when it is requeued
    exit_code = end_run_after_signal(trainer.stop, trainer.step, is_complete)
    if exit_code is not None:
        sys.exit(exit_code)  # also ends a sweep
    return processes.on_main(partial(lowest_metric, trainer, hooks))


if __name__ == "__main__":
    jobs.run_hydra(main, "config", TrainConfig)
