"""Average the losses between two metrics lines, in total and by noise level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

# Number of noise level bins for which losses are reported. Each bin is equally likely in training.
NUM_BINS = 10


class LossMeter:
    """The losses of the steps since the last metrics line. They remain on the device, so no training step waits for it.

    Args:
        names: Names of the losses in metrics lines.

    Attributes:
        sums: Sums of the losses over these steps, [len(names)].
        bin_sums: Sums and counts of the first loss by noise level bin (`sums_by_bin`), [2, NUM_BINS].
        num_steps: Number of these steps.
    """

    def __init__(self, names: Sequence[str], device: torch.device):
        self.names, self._device = names, device
        self.reset()

    def reset(self) -> None:
        self.sums = torch.zeros(len(self.names), device=self._device)
        self.bin_sums = torch.zeros(2, NUM_BINS, device=self._device)
        self.num_steps = 0

    def add_step(self, losses: Tensor) -> None:
        """Add the losses of a step, [len(names)]. The sums by noise level are added for each micro-batch."""
        self.sums += losses
        self.num_steps += 1

    def merge_processes(self, accelerator: Accelerator) -> list[float]:
        """Replace the sums by those of all processes. Return the mean of each loss over the steps and all processes.

        Every process must call this method. All of them then have the same `sums`, which are means over the processes. The main
        process has the `bin_sums` of all, and the others have zeros, so that a later call does not count them twice.
        """
        self.sums = accelerator.reduce(self.sums, "mean")
        bin_sums = accelerator.reduce(self.bin_sums, "sum")
        self.bin_sums = bin_sums if accelerator.is_main_process else torch.zeros_like(bin_sums)
        return (self.sums / max(self.num_steps, 1)).tolist()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores, by the names in `training.saving.TrainerState`. Call `merge_processes` before."""
        return {"loss_sums": self.sums.tolist(), "loss_count": self.num_steps, "bin_sums": self.bin_sums.tolist()}

    def load(self, loss_sums: Tensor, loss_count: int, bin_sums: Tensor, is_main_process: bool) -> None:
        """Continue from what `state` returned. As after `merge_processes`, only the main process has the sums by noise level."""
        self.sums.copy_(loss_sums)
        self.num_steps = loss_count
        if is_main_process:
            self.bin_sums.copy_(bin_sums)


def sums_by_bin(losses: Tensor, quantiles: Tensor) -> Tensor:
    """Sum and count losses [B] in each noise level bin, [2, NUM_BINS]. `quantiles` of the noise levels are [B]."""
    bins = (quantiles * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    is_in_bin = torch.arange(NUM_BINS, device=losses.device)[:, None] == bins  # [NUM_BINS, B]
    return torch.stack([torch.where(is_in_bin, losses, 0).sum(dim=1), is_in_bin.sum(dim=1)])


def means_by_bin(bin_sums: Tensor) -> list[float | None]:
    """Return the mean loss in each noise level bin, given the result of `sums_by_bin`. Bins without samples get None."""
    return [total / count if count else None for total, count in zip(*bin_sums.tolist())]
