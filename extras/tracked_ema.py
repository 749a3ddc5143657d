"""Track weight averages during training and save snapshots of the averages for extras/posthoc_ema.py."""

from __future__ import annotations

from functools import cached_property

import torch
from safetensors.torch import save
from torch import Tensor, nn

from checkpoints import store
from checkpoints.run import RunFolder, list_snapshots
from common.errors import UserError
from common.files import hash_bytes, write_atomically
from extras.posthoc_ema import TRACKED_EMA, gamma_from_length
from runtime.processes import on_main
from training.ema import EMA
from training.hooks import Hook
from training.trainer import Trainer


class TrackedEMA(EMA):
    """An EMA that also tracks one average per length. Each average needs a foreach-lerp per step and 4 bytes per parameter."""

    def __init__(self, net: nn.Module, decay: float, lengths: list[float], schedule: str = "warmup"):
        if len({f"{length:g}" for length in lengths}) < len(lengths):
            raise UserError(f"train.ema_lengths={lengths} repeats a length; give different lengths")
        super().__init__(net, decay, schedule)
        self.lengths = lengths

    @cached_property
    def tracked(self) -> dict[float, dict[str, Tensor]]:
        """Return the averages by length and parameter name. They are created on first access, on the device of the weights."""
        return {length: {name: torch.zeros_like(self.averages[name]) for name in self._trained} for length in self.lengths}

    @torch.no_grad()
    def update(self, step: int) -> None:
        super().update(step)
        weights = [*self._trained.values()]
        for length, averages in self.tracked.items():
            new = 1 - (step / (step + 1)) ** (gamma_from_length(length) + 1)  # equals 1 in the first step
            torch._foreach_lerp_([*averages.values()], weights, new)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        tracked = {f"{length:g}/{name}": x for length, averages in self.tracked.items() for name, x in averages.items()}
        return super().tensors() | {TRACKED_EMA: tracked}


class SnapshotHook(Hook):
    """A hook that saves the tracked averages in <run>/ema_snapshots."""

    def __init__(self, run: RunFolder, every: int):
        self.run, self.every = run, every

    def __call__(self, trainer: Trainer) -> None:
        on_main(lambda: self._write(trainer))

    def _write(self, trainer: Trainer) -> None:
        if trainer.step == trainer.first_step and trainer.step in dict(list_snapshots(self.run.path)):
            return
        content = save({name: average.half().cpu() for name, average in trainer.ema.tensors()[TRACKED_EMA].items()})
        name = f"{store.folder_name(trainer.step)}_{hash_bytes(content)}.safetensors"
        write_atomically(self.run.snapshots / name, content)
