"""Memory: of the process or the device, and of what a forward pass keeps for the backward."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn


def saved_for_backward(network: nn.Module, compute_loss: Callable[[], Tensor]) -> int:
    """Bytes that a forward pass keeps for the backward; weights do not count, casts of them do."""
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    saved: dict[int, int] = {}  # by address: everything that is kept is alive until the loss goes

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = compute_loss()
    del loss
    return sum(saved.values())


def peak_memory_gib() -> float:
    """Of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


class PeakMemory:
    """The most memory since its creation, beyond what was in use then. On a CPU: of the process, as Linux counts it."""

    STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        elif self.CLEAR.exists():
            release_freed_memory()
            self.CLEAR.write_text("5")  # the peak starts anew
            self.before = self._of_process("VmRSS")

    def peak_bytes(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return self._of_process("VmHWM") - self.before if self.CLEAR.exists() else None

    def _of_process(self, name: str) -> int:
        line = next(line for line in self.STATUS.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024


def release_freed_memory() -> None:
    """Give back to the system the memory that speed.use_cores keeps, so that one row's memory is not another's."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
