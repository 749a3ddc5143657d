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
from accelerate import Accelerator

from checkpoints import store
from checkpoints.run import RunFolder
from common.files import append_line, whole_file
from common.images import labelled_grid
from common.progress import progress_bar
from configs.schema import TrainConfig
from evaluations.suite import display_name, format_metrics
from latents.shards import LatentDataset
from runtime.processes import gather_on_main, on_main
from sampling.evaluator import Evaluator, hash_weights, until_stopped
from sampling.recipe import name_sampler, with_sampler
from sampling.sampler import ImageSampler, draw_labels
from training.trainer import Hook, Trainer

log = logging.getLogger(__name__)


@dataclass
class Metrics(Hook):
    """A line of metrics.jsonl, and of Weights & Biases."""

    run: RunFolder
    every: int
    check: Callable[[], None]  # raises the error of a checkpoint soon after it could not be written

    def __call__(self, trainer: Trainer) -> None:
        self.check()
        if trainer.record is None or trainer.record["step"] != trainer.step:  # when training starts
            return
        if trainer.accelerator.is_main_process:
            append_line(self.run.metrics, trainer.record)
        track(trainer.accelerator, trainer.record)


def track(accelerator: Accelerator, record: dict) -> None:
    """Log a record to Weights & Biases; a value by noise level as `name/0` to `name/9`."""
    lists = {key: value for key, value in record.items() if isinstance(value, list)}
    by_level = {f"{key}/{level}": value for key, values in lists.items() for level, value in enumerate(values)}
    accelerator.log({key: value for key, value in (record | by_level).items() if key not in lists and value is not None})


def grid_file(run: RunFolder, step: int) -> Path:
    return run.samples / f"{store.folder_name(step)}.png"


@dataclass
class Grids(Hook):
    """Grids of samples from the EMA, samples/step_N.png. Image i has seed i and class i mod num_classes."""

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
        length = -(-num_samples // accelerator.num_processes)  # gathering needs equal shares, so the last shares repeat an image
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
            labels = draw_labels(range(num_samples), sampler.data.num_classes, cfg.labels)
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
    """The records that identify the evaluations of a step, one for each guidance scale, in metrics.jsonl; [] without a reference.

    `settings` holds the other keys that affect metrics and that a resume may change, named as in fid.py's results.
    """
    if cfg.evaluation.reference is None:
        return []
    diffusion = with_sampler(cfg.diffusion, {"num_steps": cfg.eval.num_steps})
    settings = {"weights": "ema", **name_sampler(diffusion), "precision": cfg.eval.precision, "labels": cfg.eval.labels}
    settings |= {"detector": "+".join(cfg.evaluation.all_detectors), "reference": Path(cfg.evaluation.reference).name}
    settings |= hash_weights(cfg.evaluation)
    num_samples = (step == cfg.train.num_steps and cfg.eval.final_num_samples) or cfg.eval.num_samples
    return [{"step": step, "num_samples": num_samples, "cfg_scale": scale, "settings": settings} for scale in cfg.eval.cfg_scales]


def identify_validation(cfg: TrainConfig, dataset: LatentDataset, step: int) -> dict:
    """The record that identifies the validation of a step in metrics.jsonl, with the keys of an evaluation."""
    settings = {"weights": "ema", "precision": cfg.eval.precision, "latents": dataset.identity}
    return {"step": step, "num_samples": len(dataset), "cfg_scale": 1.0, "settings": settings}


def is_complete(run: RunFolder, cfg: TrainConfig, validation: LatentDataset | None) -> bool:
    """Whether a run has an intact checkpoint, the grid, the evaluations and the validation of its last step."""
    step = cfg.train.num_steps
    try:
        store.verify(store.list_steps(run.checkpoints)[step])
    except (KeyError, store.Damaged):
        return False
    has_grid = not cfg.sample.every or grid_file(run, step).exists()
    evaluations = identify_evaluations(cfg, step) + ([identify_validation(cfg, validation, step)] if validation else [])
    return has_grid and (not cfg.eval.every or all(map(run.has_evaluation, evaluations)))
