"""The validation loss: the loss of the EMA's network, without routes, on latents that training does not see."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from checkpoints.run import RunFolder
from common.files import append_line
from common.progress import progress_bar
from common.randomness import EvenRandom, SeedRandom
from latents.shards import LatentDataset, latents_for_network
from runtime.processes import on_main
from sampling.evaluator import until_stopped
from training.hooks import identify_validation, track
from training.trainer import Hook, Trainer, means_by_level, sums_by_level

log = logging.getLogger(__name__)


@dataclass
class Validation(Hook):
    """The validation loss at each evaluation: a line of metrics.jsonl with its mean and its means by noise level.

    Item i always has the same noise level (a quantile of the levels of training) and the same noise. So the loss does not
    depend on seed, step, batch size or number of processes.
    """

    run: RunFolder
    dataset: LatentDataset
    every: int

    def __call__(self, trainer: Trainer) -> None:
        about = identify_validation(trainer.cfg, self.dataset, trainer.step)
        if on_main(partial(self.run.has_evaluation, about)):
            return
        start_sec = time.perf_counter()
        with trainer.ema.full_weights():
            sums = trainer.accelerator.reduce(self.level_sums(trainer), reduction="sum")
        loss = float(sums[0].sum() / sums[1].sum())
        by_level = {"validation_loss_by_level": means_by_level(sums)}
        if trainer.accelerator.is_main_process:
            seconds = {"evaluation_sec": time.perf_counter() - start_sec}
            append_line(self.run.metrics, about | {"metrics": {"validation_loss": loss}, **by_level, **seconds})
            log.info("step %d: validation loss %.4g", trainer.step, loss)
        track(trainer.accelerator, {"step": trainer.step, "validation_loss": loss, **by_level})

    @torch.no_grad()
    def level_sums(self, trainer: Trainer) -> Tensor:
        """Sums and counts [2, NUM_LEVELS] of this process's share of the items."""
        cfg, data, device, accelerator = trainer.cfg, self.dataset, trainer.device, trainer.accelerator
        size, num_processes = cfg.eval.batch_size, accelerator.num_processes
        num_batches = -(-len(data) // (num_processes * size))
        items = np.arange(len(data))[accelerator.process_index :: num_processes]
        # All batches have one size, because each size is compiled anew: the last ones repeat items, which do not count.
        batches = np.resize(items, (num_batches, size))
        num_counted = [min(size, max(len(items) - i * size, 0)) for i in range(num_batches)]
        sums = sums_by_level(torch.empty(0, device=device), torch.empty(0, device=device))
        bar = progress_bar(batches, desc="validation", unit="batch", leave=False, disable=not accelerator.is_main_process)
        for batch, count in zip(until_stopped(bar, trainer.stop.requested_now), num_counted):
            stored, labels = (x.to(device) for x in data.fetch(batch, np.zeros(size, dtype=bool)))
            x = latents_for_network(stored, data.info, SeedRandom(batch, device, "validation latents"))
            random = EvenRandom(batch, device, "validation")
            with torch.autocast(device.type, torch.bfloat16, enabled=cfg.eval.precision == "bf16"):
                losses = cfg.diffusion.loss(trainer.ema.net, x, labels, random)
            sums += sums_by_level(losses[:count], random.quantiles[:count])
        return sums
