"""Memory of the process or the device."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import torch

PROCESS = Path("/proc/self")  # Linux alone has it


def peak_bytes(action: Callable[[], object], device: torch.device) -> int | None:
    """The most memory that an action adds to the device or, on a CPU, to this process; None where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        return torch.cuda.max_memory_allocated(device) - before
    if not (PROCESS / "clear_refs").exists():
        action()
        return None
    release_freed_memory()
    (PROCESS / "clear_refs").write_text("5", encoding="utf-8")  # the peak starts anew
    before = process_bytes("status", "VmRSS")
    action()
    return process_bytes("status", "VmHWM") - before


def process_bytes(file: str, field: str) -> int | None:
    """What a file in /proc/self tells of this process; None where there is none."""
    lines = (PROCESS / file).read_text(encoding="utf-8").splitlines() if (PROCESS / file).exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def release_freed_memory() -> None:
    """Give back to the system the memory that speed.use_cores keeps, so that one row's memory is not another's."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is not None:
        malloc_trim(0)
