"""Time benchmark variants in turns, and print the results with the machine, versions and commit."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from accelerate import Accelerator

from checkpoints.provenance import describe_start
from evaluations.results import markdown_table

NOTES = """`ms`: the median of all timed calls. `kernel ms` (CUDA): the time in which the GPU computes during one call. If `ms` is
much longer, the GPU waits for the CPU, which starts the kernels. `images/s`: the rate of one process. `TFLOP/s`: its rate of
matrix products, which becomes the MFU if you divide it by the peak of the GPU. `time / first`: the median of the variant divided
by the median of the first variant in the same round. The table shows the median over rounds.
"""


def time_ms(action: Callable[[], object], repeats: int, device: torch.device, warmup: int = 0) -> list[float]:
    """Return the milliseconds of each of `repeats` calls after `warmup` untimed calls. On a GPU, use CUDA events for timing."""
    is_cuda, marks = device.type == "cuda", []

    def mark() -> None:
        marks.append(torch.cuda.Event(enable_timing=True) if is_cuda else time.perf_counter())
        if is_cuda:
            marks[-1].record()

    for _ in range(warmup):
        action()
    mark()
    for _ in range(repeats):
        action()
        mark()
    if is_cuda:
        torch.cuda.synchronize(device)
    return [start.elapsed_time(end) if is_cuda else 1000 * (end - start) for start, end in zip(marks, marks[1:])]


@dataclass
class TimedRow:
    """A variant and its measurements."""

    action: Callable[[], object]  # the call to time
    num_images: int  # images per call in this process
    flops_per_image: float  # FLOPs of matrix products, where a multiply-add counts as two
    columns: dict[str, object] = field(default_factory=dict)  # additional columns of the table
    turns: list[list[float]] = field(default_factory=list)  # milliseconds of each call, in one list per turn


def measure(
    openers: Mapping[str, Callable[[], TimedRow]], device: torch.device, rounds: int, steps: int, warmup: int
) -> list[dict[str, object]]:
    """Time variants in turns (A B A B), so that other load on the machine affects all variants. Return one record per variant.

    Args:
        openers: Functions that build the row of each variant. All rows stay on the device until the benchmark ends.
        steps: Number of timed calls in each of the `rounds` turns.
        warmup: Number of untimed calls before a variant's first turn.
    """
    rows = {name: open_row(opener, device, warmup) for name, opener in openers.items()}
    for _, (name, row) in itertools.product(range(rounds), rows.items()):
        row.turns.append(time_ms(row.action, steps, device, warmup=1))
        sys.stderr.write(f"{name}: {np.median(row.turns):.4g} ms\n")  # printed even if the benchmark stops early
    first = next(iter(rows.values()))
    return [{"variant": name} | summarise(row, first) for name, row in rows.items()]


def open_row(opener: Callable[[], TimedRow], device: torch.device, warmup: int) -> TimedRow:
    """Build a variant's row and warm it up.

    Add columns for the time of the first call and, on CUDA, the time in which the GPU computes and the peak memory.
    """
    is_cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if is_cuda else 0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    row = opener()
    row.columns["first call s"] = time_ms(row.action, 1, device)[0] / 1000
    time_ms(row.action, 0, device, warmup)
    if is_cuda:
        row.columns["peak GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        row.columns["kernel ms"] = measure_kernels_ms(row.action)
    return row


def measure_kernels_ms(action: Callable[[], object]) -> float:
    """Return the milliseconds in which the GPU computes during one call, without gaps between kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        action()
        torch.cuda.synchronize()
    # Annotations such as "Optimizer.step" span kernels that are events themselves.
    return sum(event.self_device_time_total for event in found.key_averages() if not event.is_user_annotation) / 1000


def summarise(row: TimedRow, first: TimedRow) -> dict[str, object]:
    """Return the table columns of a row. The relative time is computed against `first`, the row of the first variant."""
    ms = np.median(row.turns)
    images_per_sec = 1000 * row.num_images / ms
    columns = {"ms": ms, "images/s": images_per_sec, "GFLOP/image": row.flops_per_image / 1e9}
    columns["TFLOP/s"] = row.flops_per_image * images_per_sec / 1e12
    ratios = np.median(row.turns, axis=1) / np.median(first.turns, axis=1)
    return columns | {"time / first": np.median(ratios), "lowest, highest": [ratios.min(), ratios.max()]} | row.columns


def report(title: str, accelerator: Accelerator, records: Sequence[dict[str, object]]) -> None:
    """Print the results as Markdown: machine, versions, commit, command and date, followed by one row per record."""
    if not accelerator.is_main_process:
        return
    about = describe_start(accelerator, step=0)
    about["command"] = about["command"].replace("extras/benchmarks/__main__.py", "-m extras.benchmarks")
    header = [f"- {key}: {value}" for key, value in about.items() if key != "step"]
    columns = list(dict.fromkeys(key for record in records for key in record))
    table = markdown_table(columns, [[_cell(record.get(column)) for column in columns] for record in records])
    sys.stdout.write("\n".join([f"# {title}\n", *header, f"\n{NOTES}", table, ""]))


def _cell(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.4g}" if value < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)
