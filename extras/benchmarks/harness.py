"""Time benchmark variants in turns, and print the results with the machine, versions and commit."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from checkpoints.provenance import describe_command
from common.files import write_atomically
from evaluations.tables import markdown_table

NOTES = """`ms`: the median of all timed calls. `kernel ms` (CUDA): the time in which the GPU computes during one call. If `ms` is
much longer, the GPU waits for the CPU, which starts the kernels. `host ms` (CUDA): the time that the CPU needs to start one call,
at most. `peak GiB`, `reserved GiB` (CUDA): allocated and reserved memory; only the latter contains the activations in CUDA
graphs. `images/s`: the rate of one process. `TFLOP/s`: its rate of matrix products, which becomes the MFU if you divide it by the
peak of the GPU. `time / first`: the median of the variant divided by the median of the first variant in the same round. The table
shows the median over rounds.
"""


def time_ms(action: Callable[[], object], repeats: int, device: torch.device, warmup: int = 0) -> list[float]:
    """Return the milliseconds of each of `repeats` calls after `warmup` untimed calls. On a GPU, use CUDA events for timing."""
    is_cuda = device.type == "cuda"
    marks: list = []  # CUDA events, or seconds

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
class TimedVariant:
    """A variant and its measurements."""

    action: Callable[[], object]  # the call to time
    num_images: int  # images per call in this process
    flops_per_image: float  # FLOPs of matrix products, where a multiply-add counts as two
    columns: dict[str, object] = field(default_factory=dict)  # additional columns of the table
    turns: list[list[float]] = field(default_factory=list)  # milliseconds of each call, in one list per turn


def measure(
    builders: Mapping[str, Callable[[], TimedVariant]],
    device: torch.device,
    rounds: int,
    steps: int,
    warmup: int,
    turns_file: Path | None = None,
) -> list[dict[str, object]]:
    """Time variants in turns (A B A B), so that other load on the machine affects all variants. Return one record per variant.

    Args:
        builders: Functions that build each variant. All variants stay on the device until the benchmark ends.
        steps: Number of timed calls in each of the `rounds` turns.
        warmup: Number of untimed calls before a variant's first turn.
        turns_file: JSON file for the milliseconds of each call by variant, in one list per turn.
    """
    variants = {name: build_and_warm_up(builder, device, warmup) for name, builder in builders.items()}
    for _, (name, variant) in itertools.product(range(rounds), variants.items()):
        variant.turns.append(time_ms(variant.action, steps, device, warmup=1))
        sys.stderr.write(f"{name}: {np.median(variant.turns):.4g} ms\n")  # printed even if the benchmark stops early
        if turns_file is not None:
            write_atomically(turns_file, json.dumps({name: variant.turns for name, variant in variants.items()}))
    first = next(iter(variants.values()))
    return [{"variant": name} | summarise(variant, first) for name, variant in variants.items()]


def build_and_warm_up(builder: Callable[[], TimedVariant], device: torch.device, warmup: int) -> TimedVariant:
    """Build a variant and warm it up.

    Add columns for the time of the first call and, on CUDA, for the times in which the GPU computes and the CPU starts kernels,
    and for the peak memory.
    """
    is_cuda = device.type == "cuda"
    if is_cuda:
        gc.collect()
        torch.cuda.empty_cache()  # otherwise, cached memory of earlier variants would not count as reserved
        allocated_before, reserved_before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
    variant = builder()
    variant.columns["first call s"] = time_ms(variant.action, 1, device)[0] / 1000
    time_ms(variant.action, 0, device, warmup)
    if is_cuda:
        variant.columns["peak GiB"] = (torch.cuda.max_memory_allocated() - allocated_before) / 2**30
        variant.columns["reserved GiB"] = (torch.cuda.max_memory_reserved() - reserved_before) / 2**30
        variant.columns["kernel ms"] = measure_kernels_ms(variant.action)
        variant.columns["host ms"] = float(np.median([measure_host_ms(variant.action) for _ in range(5)]))
    return variant


def measure_host_ms(action: Callable[[], object]) -> float:
    """Return the milliseconds that one call takes on the CPU, without waiting for the GPU, which is idle before the call."""
    torch.cuda.synchronize()
    start_sec = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - start_sec)


def measure_kernels_ms(action: Callable[[], object]) -> float:
    """Return the milliseconds in which the GPU computes during one call, without gaps between kernels.

    Communication between GPUs is left out, because it overlaps with computation and waits for slower processes.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        action()
        torch.cuda.synchronize()
    # Annotations such as "Optimizer.step" span kernels that are events themselves.
    events = [event for event in profile.key_averages() if not event.is_user_annotation and "nccl" not in event.key.lower()]
    return sum(event.self_device_time_total for event in events) / 1000


def summarise(variant: TimedVariant, first: TimedVariant) -> dict[str, object]:
    """Return the table columns of a variant. The relative time is computed against `first`, the first variant."""
    ms = np.median(variant.turns)
    images_per_sec = 1000 * variant.num_images / ms
    columns = {"ms": ms, "images/s": images_per_sec, "GFLOP/image": variant.flops_per_image / 1e9}
    columns["TFLOP/s"] = variant.flops_per_image * images_per_sec / 1e12
    ratios = np.median(variant.turns, axis=1) / np.median(first.turns, axis=1)
    return columns | {"time / first": np.median(ratios), "lowest, highest": [ratios.min(), ratios.max()]} | variant.columns


def report(title: str, accelerator: Accelerator, records: Sequence[dict[str, object]]) -> None:
    """Print the results as Markdown: machine, versions, commit, command and date, followed by one row per record."""
    if not accelerator.is_main_process:
        return
    command = describe_command(accelerator)
    command["command"] = command["command"].replace("extras/benchmarks/__main__.py", "-m extras.benchmarks")
    header = [f"- {key}: {value}" for key, value in command.items()]
    columns = list(dict.fromkeys(key for record in records for key in record))
    table = markdown_table(columns, [[_cell(record.get(column)) for column in columns] for record in records])
    sys.stdout.write("\n".join([f"# {title}\n", *header, f"\n{NOTES}", table, ""]))


def _cell(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.4g}" if value < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)
