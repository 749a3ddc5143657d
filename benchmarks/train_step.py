"""Time and memory of the trainer's own step, dense and routed, against the arithmetic that it has to do.

    python -m benchmarks.train_step                                          # DiT-S/2, batch 8, float32
    python -m benchmarks.train_step 'backbones=[DiT-S/2,DiT-XL/2]' batch_size=256 precision=bf16 'compile=[none,default]'
    python -m benchmarks.train_step backbones=DiT-B/2 resolution=512 parts=true plain=false
    python -m benchmarks.train_step backbones=DiT-XS/2 resolution=8 batch_size=64    # the digits of `make demo`

Every combination of backbone, model and variant is a row. The rows of a backbone take turns, round by round, so that whatever
else the machine does slows all of them; on a GPU only the row whose turn it is holds memory there. The ratio of two rows is
the median over rounds of the ratio of their medians.

A variant is a mode of train.compile, or `plain`: eager, the blocks as DiT's own code writes them, a Python loop for the EMA,
AdamW neither fused nor batched, and loss.item() in every step (benchmarks/plain.py). FLOPs are those of matrix products
(sampling/flops.py): a multiply-add counts 2, the backward twice the forward. MFU is FLOPs per second over those of the
fastest matrix product of the same type, measured before and after each turn: the median over rounds.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal
from unittest import mock

import torch
from accelerate import Accelerator
from torch.nn.functional import linear

from benchmarks.harness import Backbone, Report, Several, open_accelerator, quartiles, ratios, table, time_ms, timed
from benchmarks.memory import PeakMemory, saved_for_backward
from benchmarks.plain import plain_step
from benchmarks.trainers import MODELS, StepSettings, data_overrides, open_trainer, step_overrides
from sampling.flops import step_flops
from setup import cli
from setup.schema import Compile
from setup.settings import Count, Text, Whole
from training.trainer import Trainer

# Left out of the Markdown table.
SHARED = ("backbone", "precision", "batch_size", "resolution", "ms_lowest", "num_timed", "ceiling_tflops_per_sec")
PARTS = ("data", "forward", "backward", "optimiser", "ema")


class TrainStepSettings(StepSettings):
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


NOTES = """Times are milliseconds per step of the whole batch, medians with quartiles. FLOPs are of matrix products, a
multiply-add counted twice, forward and backward 3 times the forward. MFU: against the fastest matrix product of this type,
measured before and after each round's steps. Peak memory: on a GPU what is allocated at most, weights and states included; on
a CPU the most that a turn adds to the process. Saved: what the forward keeps for the backward, without the weights
(uncompiled rows).
"""


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, TrainStepSettings)
    accelerator = open_accelerator(settings.device, settings.cpu_threads, settings.precision)
    report = Report(
        "Training step", settings, accelerator.device, accelerator.is_main_process, num_processes=accelerator.num_processes
    )
    lines, sections, summary = [], [NOTES], []
    with data_overrides(settings) as data:
        data.append(f"data.num_workers={settings.num_workers}")
        for backbone in settings.backbones:
            rows, compared = measure_backbone(accelerator, backbone, data, settings)
            lines += [*rows, *compared]
            sections += [f"## {backbone}\n", table(rows, SHARED), table(compared)]
            summary += map(ratios_in_words, compared)
    report.save_and_print(lines, sections, "; ".join(summary))
    accelerator.end_training()


def measure_backbone(accelerator: Accelerator, backbone: str, data: Sequence[str], settings: TrainStepSettings) -> tuple:
    """(rows, ratios), as they are written."""
    variants, rows = [*(["plain"] if settings.plain else []), *settings.compile], []
    for variant, model in itertools.product(variants, settings.models):
        plain = variant == "plain"
        precision = "bf16" if plain and settings.precision == "fp8" else settings.precision  # plain knows no float8
        mode = "none" if plain else variant
        overrides = step_overrides(settings, data, backbone, model, precision=precision, compile=mode)
        rows.append(Row(open_trainer(accelerator, overrides, plain=plain), backbone, model, variant))
    shapes = product_shapes(rows[0].trainer)
    for _ in range(settings.rounds):
        for row in rows:
            row.guard_memory(row.take_turn, settings, shapes)
    for row in rows if settings.parts else ():
        row.guard_memory(row.measure_parts, settings)
    records, compared = [row.record(settings) for row in rows], compare(rows)
    for row in rows:
        del row.trainer, row.batches
    accelerator.free_memory()
    torch.compiler.reset()
    return records, compared


class Row:
    """A trainer and what its steps took.

    Attributes:
        rounds_ms: for every round, the milliseconds of each step.
        peak_flops: for every round, FLOPs per second of the fastest matrix product around these steps.
        peak_bytes: the most of all turns; None where the system does not tell.
        parts_ms: median milliseconds of each part, where they were measured.
        problem: why the row was given up.
    """

    def __init__(self, trainer: Trainer, backbone: str, model: str, variant: str):
        self.trainer, self.backbone, self.model, self.variant = trainer, backbone, model, variant
        self.device, self.batches = trainer.device, trainer.batches()
        self.flops_per_image = step_flops(trainer.net, routed=True)
        self.flops_per_step = self.flops_per_image * trainer.cfg.train.batch_size / trainer.accelerator.num_processes
        self.rounds_ms: list[list[float]] = []
        self.peak_flops: list[float] = []
        self.peak_bytes: int | None = None
        self.saved_bytes: int | None = None
        self.parts_ms: dict[str, float] = {}
        self.problem: str | None = None
        self._move(torch.device("cpu"))

    def step(self) -> None:
        run = plain_step if self.variant == "plain" else Trainer.train_step
        run(self.trainer, next(self.batches))

    def guard_memory(self, measure, *args) -> None:
        """Measure, on the device; give the row up where it does not fit in memory."""
        if self.problem is not None:
            return
        try:
            measure(*args)
        except torch.OutOfMemoryError:
            self.problem = "out of memory"
            self.trainer.net.zero_grad(set_to_none=True)
        self._move(torch.device("cpu"))

    def take_turn(self, settings: TrainStepSettings, shapes: Sequence[tuple[int, int, int]]) -> None:
        """The steps of a round."""
        is_first = not self.rounds_ms
        before = fastest_product(shapes, settings.precision, self.device)
        memory = PeakMemory(self.device)
        self._move(self.device)
        warmup = settings.warmup if is_first or self.device.type == "cuda" else 1
        self.rounds_ms.append(time_ms(self.step, settings.steps, self.device, warmup))
        self.peak_bytes = max((b for b in (self.peak_bytes, memory.peak_bytes()) if b is not None), default=None)
        self.peak_flops.append((before + fastest_product(shapes, settings.precision, self.device)) / 2)
        if is_first and self.variant in ("none", "plain"):
            trainer, (micro_batch, *_) = self.trainer, next(self.batches)
            self.saved_bytes = saved_for_backward(trainer.net, lambda: trainer.loss(trainer.parts[0], *micro_batch))

    def measure_parts(self, settings: TrainStepSettings) -> None:
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
            for _ in range(settings.warmup + settings.steps):
                for spent in spent_ms.values():  # micro-batches add to it more than once in a step
                    spent.append(0.0)
                trainer.train_step(fetch())
        self.parts_ms = {part: statistics.median(spent[settings.warmup :]) for part, spent in spent_ms.items()}

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

    def record(self, settings: TrainStepSettings) -> dict[str, object]:
        """The row as it is written."""
        identity = {"backbone": self.backbone, "model": self.model, "variant": self.variant}
        identity |= {name: getattr(settings, name) for name in ("precision", "batch_size", "resolution")}
        if self.problem:
            return identity | {"problem": self.problem}
        ms = list(itertools.chain(*self.rounds_ms))
        low, median, high = quartiles(ms)
        flops_per_sec = [1000 * self.flops_per_step / statistics.median(of_round) for of_round in self.rounds_ms]
        return identity | {
            "ms_per_step": median,
            "ms_quartiles": [low, high],
            "ms_lowest": min(ms),
            "num_timed": len(ms),
            "images_per_sec": 1000 * settings.batch_size / median,
            "gflops_per_image": self.flops_per_image / 1e9,
            "tflops_per_sec": self.flops_per_step / median / 1e9,
            "ceiling_tflops_per_sec": statistics.median(self.peak_flops) / 1e12,
            "mfu": statistics.median(ratios(flops_per_sec, self.peak_flops)),
            "peak_memory_mib": None if self.peak_bytes is None else self.peak_bytes / 2**20,
            "saved_mib": None if self.saved_bytes is None else self.saved_bytes / 2**20,
            **{f"{part}_ms": ms for part, ms in self.parts_ms.items()},
        }


# ----------------------------------------------------------------------------------------------------------------------
# The fastest matrix product.


def product_shapes(trainer: Trainer) -> list[tuple[int, int, int]]:
    """(rows, inputs, outputs) of the products x W^T to try: squares, and those of the network's own layers."""
    on_gpu, block = trainer.device.type == "cuda", trainer.net.blocks[0]
    num_rows = len(range(trainer.cfg.train.batch_size)[trainer.parts[0]]) * trainer.net.num_tokens
    if not on_gpu:
        num_rows = min(num_rows, 4096)  # as fast as more rows, and sooner done
    layers = (block.attn.qkv, block.mlp.fc1, block.mlp.fc2)
    squares = (4096, 8192) if on_gpu else (1024, 2048)
    return [*((n, n, n) for n in squares), *((num_rows, layer.in_features, layer.out_features) for layer in layers)]


def fastest_product(shapes: Sequence[tuple[int, int, int]], precision: str, device: torch.device) -> float:
    """FLOPs per second of the fastest shape, each by the median of 5."""
    like = {"device": device, "dtype": torch.float32 if precision == "fp32" else torch.bfloat16}

    def flops_per_sec(m: int, k: int, n: int) -> float:
        x, weight = torch.randn(m, k, **like), torch.randn(n, k, **like)
        return 2000 * m * k * n / statistics.median(time_ms(lambda: linear(x, weight), 5, device, warmup=1))

    return max(flops_per_sec(*shape) for shape in shapes)


# ----------------------------------------------------------------------------------------------------------------------
# Comparison.


def compare(rows: Sequence[Row]) -> list[dict[str, object]]:
    """For every variant: routed against dense, and both against the plain step."""
    by_name = {(row.model, row.variant): row for row in rows if row.problem is None}
    lines = []
    for variant in dict.fromkeys(row.variant for row in rows):
        line = {"backbone": rows[0].backbone, "variant": variant}
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


def ratio_of_times(first: Row, second: Row) -> float:
    return statistics.median(ratios(*(list(map(statistics.median, row.rounds_ms)) for row in (first, second))))


def ratios_in_words(line: dict[str, object]) -> str:
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
