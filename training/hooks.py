"""Hooks, which the training loop calls between steps: they sample grids and evaluate the network."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from checkpoints import store
from checkpoints.run import RunFolder
from common.files import open_atomically
from common.images import class_caption, labelled_grid
from common.interruption import until_stopped
from common.progress import progress_bar
from evaluations.record import EvaluationRecord, PlannedEvaluation, Results, lowest_figure
from evaluations.suite import display_name, format_metrics, primary_metric
from runtime.processes import keep_on_main, on_main
from sampling.evaluator import Evaluator
from sampling.sampler import ImageSampler
from sampling.score import score_samples
from training.tracking import track, track_grid
from training.trainer import Trainer

log = logging.getLogger(__name__)


class Hook:
    """A callback that the training loop calls every `every` steps and after the last step, or never if `every` is 0.

    When a run resumes, the loop calls the hooks that are due at its step again, because a signal may have interrupted them.
    Hooks can read the trainer's state, but must not change the weights or the optimizer.
    """

    every: int

    def __call__(self, trainer: Trainer) -> None:
        raise NotImplementedError


@dataclass
class SampleGridHook(Hook):
    """A hook that saves EMA network samples as grids in samples/step_N.png. Image i has seed i and class i mod num_classes.

    The main process samples the images while the other processes wait.
    """

    run: RunFolder
    every: int
    image_sampler: ImageSampler

    def __call__(self, trainer: Trainer) -> None:
        file = self.run.samples / f"{store.folder_name(trainer.step)}.png"
        if on_main(file.exists):
            return
        accelerator, size = trainer.accelerator, trainer.cfg.sampling.batch_size
        seeds = list(range(trainer.cfg.sample_grid.num_samples))
        labels = [seed % trainer.cfg.data.num_classes for seed in seeds]
        starts, is_silent = range(0, len(seeds), size), not accelerator.is_main_process
        bar = progress_bar(starts, desc="grid", unit="batch", leave=False, disable=is_silent)
        images = []  # filled only on the main process
        for start in until_stopped(bar, trainer.stop.poll):
            batch = slice(start, start + size)
            sampled = keep_on_main(partial(self.image_sampler, seeds[batch], labels[batch]))
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
    """A hook that makes one evaluation of the EMA network and stores its record, unless the run has the record already.

    Subclasses define two methods. `planned` returns what to evaluate at the current step. `evaluate` returns the record with
    the figures. Every process calls `evaluate`.
    """

    results: Results
    every: int

    def planned(self, trainer: Trainer) -> PlannedEvaluation:
        raise NotImplementedError

    def evaluate(self, trainer: Trainer, planned: PlannedEvaluation) -> EvaluationRecord:
        raise NotImplementedError

    def name_in_log(self, metric: str, planned: PlannedEvaluation) -> str:
        """Return the name of a metric in logs and in Weights & Biases."""
        return metric

    def __call__(self, trainer: Trainer) -> None:
        planned = self.planned(trainer)
        if on_main(lambda: self.results.find(planned) is not None):
            return
        record = self.evaluate(trainer, planned)
        on_main(partial(self.results.add, record))
        metrics = {self.name_in_log(name, planned): value for name, value in record.metrics.items()}
        log.info("step %d: %s", trainer.step, format_metrics(metrics))
        track(trainer.accelerator, {"step": trainer.step} | metrics | {"validation_loss_by_level": record.by_level})


def lowest_metric(trainer: Trainer, hooks: Iterable[Hook]) -> float | None:
    """Return the metric of the last evaluations that sweepers minimise (`record.lowest_figure`), or None without any."""
    records = [hook.results.find(hook.planned(trainer)) for hook in hooks if isinstance(hook, EvaluationHook)]
    metric = primary_metric(trainer.cfg.evaluation.all_detectors)
    return lowest_figure((record for record in records if record is not None), metric)


def names_of_guidances(guidances: Sequence[Mapping[str, object]]) -> list[str]:
    """Return a name for each guidance of a run, such as `cfg1.5` or `cfg1.5_channels3`.

    Only guidances that would otherwise have equal names also name the checkpoint of their weak network.
    """

    def name(guidance: Mapping[str, object], *left_out: str) -> str:
        scale = float(guidance.get("cfg_scale", guidance.get("guidance.w")))
        left_out += ("guidance", "cfg_scale", "guidance.w", "guidance.checkpoint_hash")
        others = [f"_{key.removeprefix('guidance.')}{value}" for key, value in guidance.items() if key not in left_out]
        return f"{guidance.get('guidance', 'cfg')}{scale}{''.join(others)}"

    usual = [name(guidance, "guidance.checkpoint") for guidance in guidances]
    return [name(guidance) if usual.count(short) > 1 else short for guidance, short in zip(guidances, usual)]


@dataclass
class SampleEvaluationHook(EvaluationHook):
    """A hook that scores samples of one guidance.

    Attributes:
        evaluation: What the hook measures, except the step and the number of samples, which depends on it.
        name: Name of the guidance in logs (see `names_of_guidances`).
    """

    evaluator: Evaluator
    image_sampler: ImageSampler
    evaluation: PlannedEvaluation
    name: str

    def planned(self, trainer: Trainer) -> PlannedEvaluation:
        num_samples = trainer.cfg.evaluation.at_step(trainer.step, trainer.cfg.train.num_steps).num_samples
        settings = self.evaluation.settings | {"num_samples": num_samples}
        return self.evaluation.model_copy(update={"step": trainer.step, "settings": settings})

    def evaluate(self, trainer: Trainer, planned: PlannedEvaluation) -> EvaluationRecord:
        return score_samples(self.evaluator, self.image_sampler, planned, trainer.dataset.class_names, trainer.stop.poll)[0]

    def name_in_log(self, metric: str, planned: PlannedEvaluation) -> str:
        """Return a name such as `fid5k/cfg1.5`."""
        return f"{display_name(metric, planned.settings['num_samples'])}/{self.name}"
