"""Hooks that write lines of metrics, grids of samples and evaluations between steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError
from common.files import append_line, whole_file
from common.progress import progress_bar
from configs.schema import TrainConfig
from evaluations.images import labelled_grid
from evaluations.suite import display_name, format_metrics
from sampling.evaluator import Evaluator, hash_weights, until_stopped
from sampling.processes import gather_on_main, on_main
from sampling.sampler import ImageSampler, labels_of, sampler_with, settings_of_sampler
from training import checkpoint as checkpoints
from training.run import RunFolder
from training.trainer import MAX_LOSS, NEVER, Hook, Trainer

log = logging.getLogger(__name__)


def reduce_losses(trainer: Trainer) -> list[float]:
    """Mean losses over all processes since the last line of metrics. Raises UserError if the run has diverged."""
    accelerator = trainer.accelerator
    first_bad = int(accelerator.gather(trainer.first_bad_step.reshape(1)).min())
    trainer.loss_sums = accelerator.reduce(trainer.loss_sums, reduction="mean")
    if first_bad < NEVER:
        raise UserError(
            f"the loss is NaN, infinite or above {MAX_LOSS:g} since step {first_bad}; earlier checkpoints are intact. Look "
            f"at the latents of {trainer.dataset.path}, lower train.lr={trainer.cfg.train.lr}, or set train.grad_clip_norm"
        )
    return (trainer.loss_sums / max(trainer.loss_count, 1)).tolist()


@dataclass
class Metrics(Hook):
    """A line of metrics.jsonl, and of Weights & Biases."""

    run: RunFolder
    every: int
    check: Callable[[], None]  # raises the error of a checkpoint soon after it could not be written

    def __call__(self, trainer: Trainer) -> None:
        self.check()
        if trainer.clock.num_steps == 0:  # at a start
            return
        losses, steps_per_sec, train = reduce_losses(trainer), trainer.clock.steps_per_sec(), trainer.cfg.train
        images = trainer.step * train.batch_size
        record = {
            "step": trainer.step,
            **dict(zip(("loss", "alignment_loss"), losses)),
            "lr": trainer.optimizer.param_groups[0]["lr"],
            "steps_per_sec": steps_per_sec,
            "images_per_sec": steps_per_sec * train.batch_size,
            "images_seen": images,
            "epoch": images / len(trainer.dataset),
        }
        if trainer.grad_norm is not None:
            record["grad_norm"] = float(trainer.grad_norm)
        if trainer.device.type == "cuda":
            record["peak_memory_gib"] = torch.cuda.max_memory_allocated(trainer.device) / 2**30
        if trainer.accelerator.is_main_process:
            append_line(self.run.metrics, record)
        trainer.accelerator.log(record)
        trainer.loss_sums, trainer.loss_count = torch.zeros_like(trainer.loss_sums), 0
        trainer.clock.restart()
        # Shown when the bar is drawn next.
        trainer.bar.set_postfix({"loss": f"{losses[0]:.4f}", "images/s": f"{record['images_per_sec']:.0f}"}, refresh=False)


def grid_file(run: RunFolder, step: int) -> Path:
    return run.samples / f"{checkpoints.folder_name(step)}.png"


@dataclass
class Grids(Hook):
    """samples/step_N.png, from the EMA. Image i has seed i and class i mod num_classes. The processes share the work."""

    run: RunFolder
    sampler: ImageSampler
    every: int

    def __call__(self, trainer: Trainer) -> None:
        file = grid_file(self.run, trainer.step)
        accelerator, is_main = trainer.accelerator, trainer.accelerator.is_main_process
        if on_main(file.exists):
            return
        num_samples, size = trainer.cfg.sample.num_samples, trainer.cfg.sample.batch_size
        labels = [seed % self.sampler.data.num_classes for seed in range(num_samples)]
        length = -(-num_samples // accelerator.num_processes)  # equal shares can be gathered; the last repeat an image
        start = accelerator.process_index * length
        seeds = [min(seed, num_samples - 1) for seed in range(start, start + length)]
        with trainer.ema.full_weights():
            parts = [seeds[i : i + size] for i in range(0, length, size)]
            bar = progress_bar(parts, desc="grid", unit="batch", leave=False, disable=not is_main)
            batches = until_stopped(bar, trainer.stop.requested_now)
            own = np.concatenate([self.sampler(part, [labels[seed] for seed in part]) for part in batches])
        images = [image.numpy() for part in gather_on_main(torch.from_numpy(own)) for image in part]
        if is_main:
            grid = labelled_grid(images[:num_samples], labels)
            with whole_file(file) as f:
                grid.save(f, format="PNG")
            for tracker in accelerator.trackers:
                tracker.log_images({"samples": [grid]}, commit=False)
                tracker.log({"step": trainer.step})


@dataclass
class Evaluations(Hook):
    """Scores of the EMA: a line of metrics.jsonl for each guidance scale.

    Attributes:
        samplers: by guidance scale.
    """

    run: RunFolder
    evaluator: Evaluator
    samplers: Mapping[float, ImageSampler]
    every: int

    def __call__(self, trainer: Trainer) -> None:
        cfg, accelerator, step = trainer.cfg.eval, trainer.accelerator, trainer.step
        for about in on_main(partial(identify_evaluations, trainer.cfg, step)):
            num_samples, cfg_scale = about["num_samples"], about["cfg_scale"]
            sampler = self.samplers[cfg_scale]
            if on_main(partial(self.run.has_evaluation, about)):
                continue
            start_sec = time.perf_counter()
            labels = labels_of(range(num_samples), sampler.data.num_classes, cfg.labels)
            with trainer.ema.full_weights():
                features = self.evaluator.features_of_samples(sampler, labels, trainer.stop.requested_now)
            metrics = on_main(partial(self.evaluator.evaluate, features, list(labels.values())))
            named = {display_name(metric, num_samples, cfg_scale): value for metric, value in metrics.items()}
            if accelerator.is_main_process:
                seconds = time.perf_counter() - start_sec
                append_line(self.run.metrics, about | {"metrics": metrics, "evaluation_sec": seconds})
                log.info("step %d: %s", step, format_metrics(named))
            accelerator.log({"step": step, **named})

def identify_evaluations(cfg: TrainConfig, step: int) -> list[dict]:
    """What identifies the evaluations of a step, one for each guidance scale, as metrics.jsonl holds it.

    `how` holds what else the figures depend on; a resume may change it. Its keys are those of fid.py's results.
    """
    diffusion = sampler_with(cfg.diffusion, num_steps=cfg.eval.num_steps)
    how = {"weights": "ema", **settings_of_sampler(diffusion), "precision": cfg.eval.precision, "labels": cfg.eval.labels}
    how |= {"detector": "+".join(cfg.evaluation.all_detectors), "reference": Path(cfg.evaluation.reference or "").name}
    how |= hash_weights(cfg.evaluation)
    num_samples = cfg.eval.closing_num_samples if step == cfg.train.num_steps else cfg.eval.num_samples
    return [{"step": step, "num_samples": num_samples, "cfg_scale": scale, "how": how} for scale in cfg.eval.cfg_scales]


def has_all(run: RunFolder, cfg: TrainConfig) -> bool:
    """Whether a run has the checkpoint, the grid and the evaluations of its last step, by their names."""
    step = cfg.train.num_steps
    if step not in checkpoints.list_steps(run.checkpoints):
        return False
    has_grid = not cfg.sample.every or grid_file(run, step).exists()
    return has_grid and (not cfg.eval.every or all(map(run.has_evaluation, identify_evaluations(cfg, step))))
