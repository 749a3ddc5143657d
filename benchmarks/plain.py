"""The step that most published trainers run, for comparison: the same mathematics, none of the engineering."""

from __future__ import annotations

import torch

from training.ema import EMA
from training.loop import Trainer


class PlainEMA(EMA):
    """The same average, one parameter after the other in a Python loop."""

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        for average, parameter in zip(self._averages, self._parameters):
            average.mul_(decay).add_(parameter, alpha=1 - decay)


def make_plain(trainer: Trainer) -> None:
    """Give a new trainer, which must not be compiled, the loop EMA and an AdamW that is neither fused nor batched."""
    cfg = trainer.cfg.train
    trainer.ema = PlainEMA(trainer.net, cfg.ema_decay)
    optimizer = torch.optim.AdamW(
        [p for p in trainer.net.parameters() if p.requires_grad],
        lr=cfg.lr,
        betas=tuple(cfg.betas),
        weight_decay=cfg.weight_decay,
        foreach=False,
        fused=False,
    )
    trainer.optimizer = trainer.accelerator.prepare(optimizer)


def plain_step(trainer: Trainer, micro_batches) -> float:
    """The trainer's step, and the wait for its loss that a progress bar costs."""
    trainer.train_step(micro_batches)
    return trainer.loss_sum.item()
