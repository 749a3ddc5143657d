"""Hooks that write metrics, sample grids and evaluation results between training steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from checkpoints import store
from checkpoints.run import RunFolder
from common.files import append_line, open_atomically
from common.images import class_caption, labelled_grid
from common.interruption import until_stopped
from common.progress import progress_bar
from evaluations.results import guidance_fields
from evaluations.suite import display_name, format_metrics
from runtime.processes import keep_on_main, on_main
from sampling.evaluator import Evaluator, hash_weights
from sampling.recipe import sampler_settings, with_sampler
from sampling.sampler import ImageSampler, draw_labels
from training.metrics import STEP_METRICS
from training.tracking import track, track_grid
from training.trainer import Hook, Trainer

log = logging.getLogger(__name__)


@dataclass
class LogMetrics(Hook):
    """A hook that writes a training line with losses, speed and `STEP_METRICS` to metrics.jsonl and to Weights & Biases."""

    run: RunFolder
    every: int
    check: Callable[[], None]  # function that raises UserError if a checkpoint could not be written
    measured: dict[str, Tensor] = field(default_factory=dict, init=False)  # the `STEP_METRICS` of the last step

    def measure(self, trainer: Trainer) -> None:
        self.measured = {name: metric(trainer) for name, metric in STEP_METRICS.items()}

    def __call__(self, trainer: Trainer) -> None:
        self.check()
        if trainer.step == trainer.first_step:
            return
        record = trainer.pop_metrics() | {name: float(value) for name, value in self.measured.items()}
        on_main(partial(append_line, self.run.metrics, record))  # a full disk is one line on every process
        track(trainer.accelerator, record)


@dataclass
class SampleGrids(Hook):
    """A hook that saves EMA network samples as grids in samples/step_N.png. Image i has seed i and class i mod num_classes.

    The main process samples the images while the other processes wait.
    """

    run: RunFolder
    every: int
    sampler: ImageSampler
    runs_network = True

    def __call__(self, trainer: Trainer) -> None:
        file = self.run.samples / f"{store.folder_name(trainer.step)}.png"
        if on_main(file.exists):
            return
        accelerator, size = trainer.accelerator, trainer.cfg.sample.batch_size
        seeds = list(range(trainer.cfg.sample.num_samples))
        labels = [seed % self.sampler.data.num_classes for seed in seeds]
        starts, is_silent = range(0, len(seeds), size), not accelerator.is_main_process
        bar = progress_bar(starts, desc="grid", unit="batch", leave=False, disable=is_silent)
        images = []  # filled only on the main process
        for start in until_stopped(bar, trainer.stop.poll_now):
            batch = slice(start, start + size)
            sampled = keep_on_main(partial(self.sampler, seeds[batch], labels[batch]))
            images.extend([] if sampled is None else sampled)

        def save() -> None:
            names = trainer.dataset.class_names
            grid = labelled_grid(images, [class_caption(label, names) for label in labels])
            with open_atomically(file) as f:
                grid.save(f, format="PNG")
            track_grid(accelerator, trainer.step, grid)

        on_main(save)


@dataclass
class EvaluationHook(Hook):
    """A hook that scores the EMA network and appends the scores to metrics.jsonl, unless the file already contains them.

    Subclasses define two methods. `identify` returns the identifying fields for each metrics line of the current step. `evaluate`
    returns the remaining fields of a line, and a mapping from display names to scores. Every process calls `evaluate`.
    """

    run: RunFolder
    every: int
    runs_network = True

    def __call__(self, trainer: Trainer) -> None:
        for key_fields in on_main(partial(self.identify, trainer)):
            if on_main(partial(self.run.has_evaluation, key_fields)):
                continue
            start_sec = time.perf_counter()
            fields, displayed = self.evaluate(trainer, key_fields)
            line = key_fields | fields | {"evaluation_sec": time.perf_counter() - start_sec}
            on_main(partial(append_line, self.run.metrics, line))
            log.info("step %d: %s", trainer.step, format_metrics(displayed))
            lists = {key: value for key, value in fields.items() if key != "metrics"}
            track(trainer.accelerator, {"step": trainer.step} | displayed | lists)


@dataclass
class SampleEvaluation(EvaluationHook):
    """A hook that evaluates samples and writes one metrics line for each guidance.

    Attributes:
        samplers: Mapping from the items of `sampling.recipe.guidance_settings` to image sampler.
        reference_hash: The reference's `quick_fingerprint`.
    """

    evaluator: Evaluator
    samplers: Mapping[tuple[tuple[str, object], ...], ImageSampler]
    reference_hash: str

    def identify(self, trainer: Trainer) -> list[dict]:
        """Return identifying fields for each guidance. `settings` contains keys that affect metrics, as in `fid.py`."""
        cfg, step = trainer.cfg, trainer.step
        diffusion = with_sampler(cfg.diffusion, {"num_steps": cfg.eval.num_steps})
        settings = {"weights": "ema", **sampler_settings(diffusion), "precision": cfg.eval.precision, "labels": cfg.eval.labels}
        settings |= {"detector": "+".join(cfg.evaluation.all_detectors), "reference": Path(cfg.evaluation.reference).name}
        settings |= hash_weights(cfg.evaluation)
        # Earlier versions did not store these settings, so their usual values have no entry.
        if cfg.sample.rounding != "round":
            settings["rounding"] = cfg.sample.rounding
        if cfg.data.autoencoder != trainer.dataset.info.autoencoder:
            settings["autoencoder"] = cfg.data.autoencoder
        num_samples = (step == cfg.train.num_steps and cfg.eval.final_num_samples) or cfg.eval.num_samples
        common = {"step": step, "num_samples": num_samples, "settings": settings, "reference_hash": self.reference_hash}
        return [{**common, **dict(guidance)} for guidance in self.samplers]

    def evaluate(self, trainer: Trainer, key_fields: dict) -> tuple[dict, dict[str, float]]:
        guidance = guidance_fields(key_fields)
        num_samples, sampler = key_fields["num_samples"], self.samplers[tuple(guidance.items())]
        labels = draw_labels(range(num_samples), sampler.data.num_classes, trainer.cfg.eval.labels)
        features = self.evaluator.features_of_samples(sampler, labels, trainer.stop.poll_now)
        metrics = on_main(partial(self.evaluator.evaluate, features, list(labels.values())))
        scale = float(guidance.get("cfg_scale", guidance.get("guidance.w")))
        suffix = f"{guidance.get('guidance', 'cfg')}{scale}"  # such as cfg1.5
        suffix += f"_channels{channels}" if (channels := guidance.get("guidance.channels")) else ""
        named = {f"{display_name(metric, num_samples)}/{suffix}": value for metric, value in metrics.items()}
        return {"metrics": metrics}, named
