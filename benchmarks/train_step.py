"""Time and memory of the trainer's own step, dense and routed, against the arithmetic that it has to do.

    python -m benchmarks.train_step                                          # DiT-S/2, batch 8, float32
    python -m benchmarks.train_step 'backbones=[DiT-S/2,DiT-XL/2]' batch_size=256 precision=bf16 'compile=[none,default]'
    python -m benchmarks.train_step backbones=DiT-B/2 resolution=512 parts=true plain=false
    python -m benchmarks.train_step backbones=DiT-XS/2 resolution=8 batch_size=64    # the digits of `make demo`

Every combination of backbone, model and variant is a row. The rows of a backbone take turns, round by round, so that whatever
else the machine does slows all of them; on a GPU only the row whose turn it is holds memory there. The ratio of two rows is
the median over rounds of the ratio of their medians. NOTES says what the columns are.

A variant is a mode of train.compile, or `plain`: eager, the blocks as DiT's own code writes them, a Python loop for the EMA,
AdamW neither fused nor batched, and loss.item() in every step (benchmarks/plain.py).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Literal
from unittest import mock

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn.functional import linear

from benchmarks.harness import Backbone, Report, Several, open_accelerator, table, time_ms, timed
from benchmarks.memory import peak_bytes
from benchmarks.trainers import MODELS, CommonSettings, data_overrides, open_trainer
from sampling.flops import step_flops
from setup import cli
from setup.schema import Compile
from setup.settings import Count, Text, Whole
from training.memory import saved_for_backward
from training.trainer import Trainer

# Left out of the Markdown table.
SHARED = ("backbone", "precision", "batch_size", "resolution", "ms_lowest", "num_timed", "ceiling_tflops_per_sec")
PARTS = ("data", "forward", "backward", "optimiser", "ema")


class TrainStepSettings(CommonSettings):
    backbones: Several[Backbone] = ["DiT-S/2"]
    models: Several[Literal[MODELS]] = [*MODELS]
    compile: Several[Compile] = ["none"]  # a row for each
    plain: bool = True  # a row for the plain step
    precision: Literal["fp32", "bf16", "fp8"] = "fp32"  # fp8 with compile=blocks; plain and the fastest product are bf16 then
    rounds: Count = 5
    steps: Count = 3  # timed in each turn
    warmup: Count = 2  # untimed steps in a row's first turn, and on a GPU in every turn; on a CPU later turns have one
    parts: bool = False  # forward, backward, optimiser, EMA and data apart, in steps of their own that wait after each part
    num_workers: Whole = 0  # as data.num_workers
    output: Text = "runs/benchmarks/train_step"  # the files' name, without its ending


NOTES = """Times are milliseconds per step of the whole batch, medians with quartiles. FLOPs are of matrix products
(sampling/flops.py), a multiply-add counted twice, forward and backward 3 times the forward. MFU: FLOPs per second over those
of the fastest matrix product of this type, measured before and after each round's steps; the median over rounds. Peak memory:
on a GPU what is allocated at most, weights and states included; on a CPU the most that a turn adds to the process. Saved: what
the forward keeps for the backward, without the weights (uncompiled rows).
"""


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, TrainStepSettings)
    accelerator = open_accelerator(settings.device, settings.cpu_threads, settings.precision)
    is_main, num_processes = accelerator.is_main_process, accelerator.num_processes
    report = Report("Training step", settings, accelerator.device, is_main, num_processes=num_processes)
    lines, sections, words = [], [NOTES], []
    with data_overrides(settings) as data:
        for backbone in settings.backbones:
            records, ratios = measure_backbone(accelerator, backbone, data, settings)
            lines += [*records, *ratios]
            sections += [f"## {backbone}\n", table(records, SHARED), table(ratios)]
            words += map(describe_ratios, ratios)
            accelerator.free_memory()
            torch.compiler.reset()
    summary = "; ".join(words)
    report.save(lines, [*sections, f"{summary}\n"], [report.machine, *lines, summary])
    accelerator.end_training()


def measure_backbone(accelerator: Accelerator, backbone: str, data: Sequence[str], settings: TrainStepSettings) -> tuple:
    """(rows, ratios), as they are written."""
    variants, rows = [*(["plain"] if settings.plain else []), *settings.compile], []
    for variant, model in itertools.product(variants, settings.models):
        plain = variant == "plain"
        own = {"backbone": backbone, "model": model, "compile": "none" if plain else variant}
        if plain and settings.precision == "fp8":
            own["precision"] = "bf16"  # plain knows no float8
        rows.append(StepRow(open_trainer(accelerator, settings, data, plain, **own), model, variant, settings))
    for _, row in itertools.product(range(settings.rounds), rows):
        row.on_device(row.take_turn)
    for row in rows if settings.parts else ():
        row.on_device(row.measure_parts)
    return [{"backbone": backbone, **row.record()} for row in rows], [{"backbone": backbone, **one} for one in compare(rows)]


class StepRow:
    """A trainer and what its steps took.

    Attributes:
        rounds_ms: for every round, the milliseconds of each step.
        peak_flops: for every round, FLOPs per second of the fastest matrix product around these steps.
        peak_bytes: for every round; None where the system does not tell.
        parts_ms: median milliseconds of each part, where they were measured.
        problem: why the row was given up.
    """

    def __init__(self, trainer: Trainer, model: str, variant: str, settings: TrainStepSettings):
        self.trainer, self.model, self.variant, self.settings = trainer, model, variant, settings
        self.device, self.batches = trainer.device, trainer.batches()
        self.flops_per_image = step_flops(trainer.net, routed=True)
        self.flops_per_step = self.flops_per_image * trainer.cfg.train.batch_size / trainer.accelerator.num_processes
        self.rounds_ms: list[list[float]] = []
        self.peak_flops: list[float] = []
        self.peak_bytes: list[int | None] = []
        self.saved_bytes: int | None = None
        self.parts_ms: dict[str, float] = {}
        self.problem: str | None = None
        self._move(torch.device("cpu"))

    def on_device(self, measure) -> None:
        """Measure, then leave the device; give the row up where it does not fit in memory."""
        if self.problem is not None:
            return
        try:
            measure()
        except torch.OutOfMemoryError:
            self.problem = "out of memory"
            self.trainer.net.zero_grad(set_to_none=True)
        self._move(torch.device("cpu"))

    def take_turn(self) -> None:
        """The steps of a round."""
        is_first = not self.rounds_ms
        warmup = self.settings.warmup if is_first or self.device.type == "cuda" else 1

        def step() -> None:
            self.trainer.train_step(next(self.batches))
            if self.variant == "plain":
                self.trainer.loss_sum.item()  # the wait for the loss that a progress bar costs

        def round_of_steps() -> None:
            self._move(self.device)
            self.rounds_ms.append(time_ms(step, self.settings.steps, self.device, warmup))

        before = fastest_product(self.trainer, self.settings.precision)
        self.peak_bytes.append(peak_bytes(round_of_steps, self.device))
        self.peak_flops.append((before + fastest_product(self.trainer, self.settings.precision)) / 2)
        if is_first and self.variant in ("none", "plain"):
            trainer, (micro_batch, *_) = self.trainer, next(self.batches)
            self.saved_bytes = saved_for_backward(trainer.net, lambda: trainer.loss(trainer.parts[0], *micro_batch)).total()

    def measure_parts(self) -> None:
        """Each part with a wait for the device around it: the step as a whole is slower for it."""
        self._move(self.device)
        trainer, spent_ms = self.trainer, {part: [] for part in PARTS}
        methods = {
            "forward": (trainer, "loss"),
            "backward": (trainer.accelerator, "backward"),
            "optimiser": (trainer.optimizer, "step"),
            "ema": (trainer.ema, "update"),
        }
        with ExitStack() as stack:
            for part, (owner, name) in methods.items():
                timed_method = timed(getattr(owner, name), self.device, spent_ms[part])
                stack.enter_context(mock.patch.object(owner, name, timed_method))
            fetch = timed(lambda: next(self.batches), self.device, spent_ms["data"])
            for _ in range(self.settings.warmup + self.settings.steps):
                for spent in spent_ms.values():  # micro-batches add to it more than once in a step
                    spent.append(0.0)
                trainer.train_step(fetch())
        self.parts_ms = {f"{part}_ms": median(spent[self.settings.warmup :]) for part, spent in spent_ms.items()}

    def _move(self, device: torch.device) -> None:
        """Bring weights, averages and the optimiser's states to the device, or away from a GPU."""
        if self.device.type == "cpu":
            return
        states = self.trainer.optimizer.state.values()
        tensors = itertools.chain(
            self.trainer.net.parameters(),
            self.trainer.ema.net.parameters(),
            (t for state in states for t in state.values() if torch.is_tensor(t) and t.ndim > 0),
        )
        for tensor in tensors:
            tensor.data = tensor.data.to(device)
        if device.type == "cpu":
            torch.cuda.empty_cache()

    def record(self) -> dict[str, object]:
        """The row as it is written."""
        settings = self.settings
        identity = {"model": self.model, "variant": self.variant, "precision": settings.precision}
        identity |= {"batch_size": settings.batch_size, "resolution": settings.resolution}
        if self.problem:
            return identity | {"problem": self.problem}
        ms = np.concatenate(self.rounds_ms)
        low, middle, high = np.percentile(ms, (25, 50, 75)).tolist()
        mfu = 1000 * self.flops_per_step / np.median(self.rounds_ms, axis=1) / self.peak_flops
        return identity | {
            "ms_per_step": middle,
            "ms_quartiles": [low, high],
            "ms_lowest": ms.min(),
            "num_timed": len(ms),
            "images_per_sec": 1000 * settings.batch_size / middle,
            "gflops_per_image": self.flops_per_image / 1e9,
            "tflops_per_sec": self.flops_per_step / middle / 1e9,
            "ceiling_tflops_per_sec": median(self.peak_flops) / 1e12,
            "mfu": np.median(mfu),
            "peak_memory_mib": max((b / 2**20 for b in self.peak_bytes if b is not None), default=None),
            "saved_mib": None if self.saved_bytes is None else self.saved_bytes / 2**20,
            **self.parts_ms,
        }


def fastest_product(trainer: Trainer, precision: str) -> float:
    """FLOPs per second of the fastest x W^T of this type: squares, and the network's own layers; each the median of 5."""
    device, block = trainer.device, trainer.net.blocks[0]
    num_rows = len(range(trainer.cfg.train.batch_size)[trainer.parts[0]]) * trainer.net.num_tokens
    if device.type != "cuda":
        num_rows = min(num_rows, 4096)  # as fast as more rows, and sooner done
    squares = (4096, 8192) if device.type == "cuda" else (1024, 2048)
    layers = (block.attn.qkv, block.mlp.fc1, block.mlp.fc2)
    shapes = [*((n, n, n) for n in squares), *((num_rows, layer.in_features, layer.out_features) for layer in layers)]
    like = {"device": device, "dtype": torch.float32 if precision == "fp32" else torch.bfloat16}

    def flops_per_sec(m: int, k: int, n: int) -> float:
        x, weight = torch.randn(m, k, **like), torch.randn(n, k, **like)
        return 2000 * m * k * n / median(time_ms(lambda: linear(x, weight), 5, device, warmup=1))

    return max(flops_per_sec(*shape) for shape in shapes)


def compare(rows: Sequence[StepRow]) -> list[dict[str, object]]:
    """For every variant: routed against dense, and both against the plain step."""
    by_name = {(row.model, row.variant): row for row in rows if row.problem is None}

    def ratio_of_times(first: StepRow, second: StepRow) -> float:
        return np.median(np.median(first.rounds_ms, axis=1) / np.median(second.rounds_ms, axis=1))

    lines = []
    for variant in dict.fromkeys(row.variant for row in rows):
        line = {"variant": variant}
        dense, routed = (by_name.get((model, variant)) for model in MODELS)
        if dense and routed:
            line["time_tread_over_dit"] = ratio_of_times(routed, dense)
            line["flops_tread_over_dit"] = routed.flops_per_image / dense.flops_per_image
            line["time_over_flops"] = line["time_tread_over_dit"] / line["flops_tread_over_dit"]
            if dense.saved_bytes and routed.saved_bytes:
                line["saved_tread_over_dit"] = routed.saved_bytes / dense.saved_bytes
        for model in MODELS:
            row, plain = by_name.get((model, variant)), by_name.get((model, "plain"))
            if row and plain and variant != "plain":
                line[f"{model}_speed_over_plain"] = 1 / ratio_of_times(row, plain)
        lines.append(line)
    return lines


def describe_ratios(line: dict[str, object]) -> str:
    words = []
    if "time_tread_over_dit" in line:
        words.append(
            f"step time tread/dit {line['time_tread_over_dit']:.3f}, FLOPs tread/dit {line['flops_tread_over_dit']:.3f} "
            f"(quotient {line['time_over_flops']:.3f})"
        )
    for model in MODELS:
        if f"{model}_speed_over_plain" in line:
            words.append(f"{model} {line[f'{model}_speed_over_plain']:.2f} times as fast as plain")
    return f"{line['backbone']} {line['variant']}: {', '.join(words) or 'nothing to compare'}"


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
