"""Measure the validation loss, which is the loss of the EMA network without routes on held-out latents."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.errors import Diverged
from common.interruption import until_stopped
from common.progress import progress_bar
from common.randomness import SeedRandom
from evaluations.record import EvaluationRecord, PlannedEvaluation
from latents.dataset import LatentDataset
from latents.shards import latents_for_network
from training.hooks import EvaluationHook
from training.losses import NUM_BINS, means_by_bin, sums_by_bin
from training.trainer import Trainer


def even_quantiles(items: np.ndarray) -> Tensor:
    """Return the quantiles of the noise levels of items 0, 1, ... of a data set, which cover the distribution evenly.

    The noise level of item i lies in bin i mod NUM_BINS of the distribution. A golden-ratio sequence spaces the noise levels of
    each bin evenly.
    """
    positions = (items // NUM_BINS + 0.5) * ((5**0.5 - 1) / 2) % 1
    return torch.from_numpy((items % NUM_BINS + positions) / NUM_BINS).float()


@dataclass
class ValidationLossHook(EvaluationHook):
    """A hook that measures the mean validation loss and the mean loss in each noise level bin.

    Item i always has the same noise and the same noise level, which is a fixed quantile of the noise levels in training.
    Therefore, the noise does not depend on the seed, the step, the batch size or the number of processes.
    """

    dataset: LatentDataset

    def planned(self, trainer: Trainer) -> PlannedEvaluation:
        settings = {"weights": "ema", "cfg_scale": 1.0, "network_precision": trainer.cfg.sampling.precision}
        settings |= {"num_samples": len(self.dataset), "latents": self.dataset.hash}
        return PlannedEvaluation(run=trainer.cfg.name, step=trainer.step, settings=settings)

    def evaluate(self, trainer: Trainer, planned: PlannedEvaluation) -> EvaluationRecord:
        start_sec = time.perf_counter()
        sums = trainer.accelerator.reduce(self.measure_bins(trainer), reduction="sum")
        loss = float(sums[0].sum() / sums[1].sum())
        if not math.isfinite(loss):
            raise Diverged(f"the validation loss is {loss} after step {trainer.step}; earlier checkpoints are intact")
        return planned.with_figures({"validation_loss": loss}, time.perf_counter() - start_sec, by_level=means_by_bin(sums))

    @torch.no_grad()
    def measure_bins(self, trainer: Trainer) -> Tensor:
        """Sum and count this process's validation losses in each noise level bin. Return a [2, NUM_BINS] tensor."""
        cfg, data, device, accelerator = trainer.cfg, self.dataset, trainer.device, trainer.accelerator
        # All batches have the same size, because each new size triggers a compilation. Repeated items at the end are ignored.
        size = cfg.sampling.batch_size
        starts = range(0, len(data), accelerator.num_processes * size)
        bar = progress_bar(starts, desc="validation", unit="batch", leave=False, disable=not accelerator.is_main_process)
        sums = torch.zeros(2, NUM_BINS, device=device)
        for start in until_stopped(bar, trainer.stop.poll):
            batch = start + accelerator.process_index * size + np.arange(size)
            items, is_counted = batch % len(data), torch.from_numpy(batch < len(data)).to(device)
            stored, labels = (x.to(device) for x in data.fetch(items))
            # Normalized with the statistics of the training latents.
            x = latents_for_network(stored, trainer.dataset.info, SeedRandom(items, device, "validation latents"))
            random, quantiles = SeedRandom(items, device, "validation"), even_quantiles(items).to(device)
            levels = cfg.diffusion.levels_at(quantiles)
            with torch.autocast(device.type, torch.bfloat16, enabled=cfg.sampling.precision == "bf16"):
                losses = cfg.diffusion.loss(trainer.ema.net, x, labels, random, levels)
            sums += sums_by_bin(losses[is_counted], quantiles[is_counted])
        return sums
