"""Where the time of a training step goes: the profiler's table, and what routing itself costs.

    python -m benchmarks.profile                                        # DiT-S/2, batch 8, float32
    python -m benchmarks.profile backbone=DiT-XL/2 batch_size=256 precision=bf16

The router's operations are named from here, forward and backward: select (the random subset), gather (a route's start) and
scatter (its end). Each is one range in the table, `routing: gather` and `routing: gather, backward`; on a GPU a range's time is
that of the kernels it launched. Not in them: the sum of the two gradients that meet at a route's start, one addition of a
(B, N, D) tensor. The step runs uncompiled: a compiler would merge these operations with their neighbours.

It writes <output>.jsonl and <output>.md; the last line is routing's share of the step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch.autograd.graph import Node
from torch.profiler import ProfilerActivity, profile, record_function

import dit
from benchmarks.report import (
    describe_machine,
    emit,
    markdown_table,
    parse_settings,
    prepare_output,
    say,
    synchronise,
    write_report,
)
from benchmarks.train_step import KEYS as TRAIN_STEP_KEYS
from benchmarks.train_step import open_accelerator, open_trainer, random_latents, training_overrides
from routing_module import TokenRouter
from setup.schema import choice, whole
from training.trainer import Trainer

DEFAULTS = {
    "backbone": "DiT-S/2",
    "model": "tread",
    "precision": "fp32",  # fp32 | bf16
    "batch_size": 8,
    "resolution": 256,  # 256 | 512 | 8, as for benchmarks.train_step
    "warmup": 2,  # steps before those that count
    "steps": 3,  # that count
    "num_rows": 30,  # of the table
    "device": None,  # cpu | cuda; null: what accelerate chooses
    "cpu_threads": None,  # as train.cpu_threads
    "overrides": [],  # more of the training configuration
    "output": "runs/benchmarks/profile",  # the files' name, without its ending
}
KEYS = {
    "backbone": choice(*dit.BACKBONES),
    "model": choice("dit", "tread"),
    "num_rows": whole(1),
    **{name: TRAIN_STEP_KEYS[name] for name in DEFAULTS if name in TRAIN_STEP_KEYS},
}
# What the router's methods are called in the table.
ROUTING = {"choose_ids_keep": "routing: select", "start_route": "routing: gather", "end_route": "routing: scatter"}


def main(arguments: Sequence[str]) -> None:
    settings = parse_settings(arguments, DEFAULTS, KEYS)
    accelerator = open_accelerator(settings)
    prepare_output(settings["output"])
    machine = describe_machine(accelerator.device) | {"settings": settings}
    with tempfile.TemporaryDirectory() as folder:
        data = random_latents(Path(folder), settings)
        overrides = training_overrides(settings | {"num_workers": 0}, data, settings["backbone"], settings["model"], "none")
        trainer = open_trainer(accelerator, overrides)
        rows, step_ms = profile_steps(trainer, settings)
    routing = [row for row in rows if row["name"].startswith("routing: ")]
    share = sum(row["share"] for row in routing)
    summary = (
        f"routing's own operations: {100 * share:.2f}% of a step of {step_ms:.4g} ms" if routing else "no routes in this step"
    )
    emit(**machine)
    for row in routing:
        emit(**row)
    most = sorted(rows, key=lambda row: -row["self_ms"])[: settings["num_rows"]]
    table = most + [row for row in routing if row not in most]
    lines = [*rows, {"routing_share": share, "step_ms": step_ms}]
    sections = [f"{NOTES}\n", markdown_table(table), f"{summary}\n"]
    write_report(settings["output"], "Where a training step's time goes", machine, lines, sections)
    say(summary)
    accelerator.end_training()


NOTES = """Milliseconds per step, and shares of it. `self_ms` is without the operations that an operation calls; `ms` and
`share` are with them, so that shares do not add up. On a CPU the profiler itself slows every operation down a little; on a GPU
the times are of kernels, and the step is the sum of all kernels."""


def profile_steps(trainer: Trainer, settings: dict) -> tuple[list[dict], float]:
    """Every operation of the step, and the milliseconds of the step."""
    batches, device = trainer.batches(), trainer.device
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with routing_named():
        for _ in range(settings["warmup"]):
            trainer.train_step(next(batches))
        synchronise(device)
        with profile(activities=activities) as profiler:
            start_sec = time.perf_counter()
            for _ in range(settings["steps"]):
                trainer.train_step(next(batches))
            synchronise(device)
            total_us = 1e6 * (time.perf_counter() - start_sec)
    events = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CPU]
    if device.type == "cuda":
        total_us = sum(event.self_device_time_total for event in events)
    rows = []
    for event in events:
        self_us = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        us = event.device_time_total if device.type == "cuda" else event.cpu_time_total
        row = {"name": event.key, "calls": event.count / settings["steps"], "self_ms": self_us / settings["steps"] / 1000}
        rows.append(row | {"ms": us / settings["steps"] / 1000, "share": us / total_us})
    return rows, total_us / settings["steps"] / 1000


# ----------------------------------------------------------------------------------------------------------------------
# Names for the router's operations.


@contextmanager
def routing_named():
    """Within it, every router's operations and their gradients are ranges of the profiler."""
    with ExitStack() as stack:
        for method, name in ROUTING.items():
            replacement = staticmethod(named(getattr(TokenRouter, method), name))
            stack.enter_context(mock.patch.object(TokenRouter, method, replacement))
        yield


def named(operation: Callable, name: str) -> Callable:
    def named_operation(*args, **kwargs):
        with record_function(name):
            result = operation(*args, **kwargs)
        inputs = {arg.grad_fn for arg in args if torch.is_tensor(arg)}
        for node in nodes_until(result.grad_fn, inputs):
            name_backward(node, f"{name}, backward")
        return result

    return named_operation


def nodes_until(last: Node | None, inputs: set[Node | None]) -> list[Node]:
    """The nodes of the graph that an operation added: from its result back to its inputs."""
    found, waiting = [], [last]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in inputs and node not in found:
            found.append(node)
            waiting += [previous for previous, _ in node.next_functions]
    return found


def name_backward(node: Node, name: str) -> None:
    """Open a range before the node computes its gradients, and close it after."""
    ranges = []

    def open_range(grad_outputs) -> None:
        ranges.append(record_function(name))
        ranges[-1].__enter__()

    def close_range(grad_inputs, grad_outputs) -> None:
        ranges.pop().__exit__(None, None, None)

    node.register_prehook(open_range)
    node.register_hook(close_range)


if __name__ == "__main__":
    main(sys.argv[1:])
