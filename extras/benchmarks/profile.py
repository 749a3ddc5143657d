"""Where the time of a training step goes: the profiler's table, and what routing itself costs.

    python -m extras.benchmarks.profile                                        # DiT-S/2, batch 8, float32
    python -m extras.benchmarks.profile backbone=DiT-XL/2 batch_size=256 precision=bf16

The router's operations have names in the table, forward and backward (`routing: gather` and `routing: gather, backward`):
select (the random subset), gather (a route's start) and scatter (its end). On a GPU a name's time is that of the kernels it
launched. Not among them: the sum of the two gradients that meet at a route's start, one addition of a (B, N, D) tensor. The
step runs uncompiled: a compiler would merge these operations with their neighbours.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from configs import command_line as cli
from configs.settings import Count, Text
from extras.benchmarks.harness import Backbone, Report, open_accelerator, table, time_ms
from extras.benchmarks.trainers import MODELS, CommonSettings, data_overrides, open_trainer
from routing_module import TokenRouter
from training.trainer import Trainer

# The names in the table of the router's methods, and of their gradients: nothing else in the step gathers or scatters.
ROUTING = {"choose_ids_keep": "routing: select", "start_route": "routing: gather", "end_route": "routing: scatter"}
ROUTING_BACKWARD = {"GatherBackward0": "routing: gather, backward", "ScatterBackward0": "routing: scatter, backward"}


class ProfileSettings(CommonSettings):
    backbone: Backbone = "DiT-S/2"
    model: Literal[MODELS] = "tread"
    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    warmup: Count = 2  # steps before those that count
    steps: Count = 3  # that count
    num_rows: Count = 30  # of the table
    output: Text = "runs/benchmarks/profile"  # the files' name, without its ending


NOTES = """Milliseconds per step, and shares of it. `self_ms` is without the operations that an operation calls; `ms` and
`share` are with them, so that shares do not add up. On a CPU the profiler itself slows every operation down a little; on a GPU
the times are of kernels, and the step is the sum of all kernels.
"""


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, ProfileSettings)
    accelerator = open_accelerator(settings.device, settings.cpu_threads, settings.precision, settings.tf32)
    report = Report("Where a training step's time goes", settings, accelerator.device)
    with data_overrides(settings) as data:
        rows, step_ms = profile_steps(open_trainer(accelerator, settings, data, compile="none"), settings)
    routing = [row for row in rows if row["name"].startswith("routing: ")]
    share = sum(row["share"] for row in routing)
    most = sorted(rows, key=lambda row: -row["self_ms"])[: settings.num_rows]
    shown = most + [row for row in routing if row not in most]
    summary = (
        f"routing's own operations: {100 * share:.2f}% of a step of {step_ms:.4g} ms" if routing else "no routes in this step"
    )
    lines = [*rows, {"routing_share": share, "step_ms": step_ms}]
    report.save(lines, [NOTES, table(shown), f"{summary}\n"], [report.machine, *routing, summary])
    accelerator.end_training()


def profile_steps(trainer: Trainer, settings: ProfileSettings) -> tuple[list[dict], float]:
    """Every operation of the step, and the milliseconds of the step."""
    batches, device = trainer.batches(), trainer.device
    on_gpu = device.type == "cuda"

    def step() -> None:
        trainer.train_step(next(batches))

    named = {method: staticmethod(record_function(name)(getattr(TokenRouter, method))) for method, name in ROUTING.items()}
    with mock.patch.multiple(TokenRouter, **named):
        time_ms(step, settings.warmup, device)
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
            total_ms = sum(time_ms(step, settings.steps, device))
    events = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CPU]
    if on_gpu:
        total_ms = sum(event.self_device_time_total for event in events) / 1000
    rows = []
    for event in events:
        self_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        ms = (event.device_time_total if on_gpu else event.cpu_time_total) / 1000
        name = ROUTING_BACKWARD.get(event.key, event.key)
        row = {"name": name, "calls": event.count / settings.steps, "self_ms": self_us / settings.steps / 1000}
        rows.append(row | {"ms": ms / settings.steps, "share": ms / total_ms})
    return rows, total_ms / settings.steps


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
