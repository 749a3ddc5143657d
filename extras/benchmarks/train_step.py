"""Time and memory of the trainer's own step, dense and routed, against the arithmetic that it has to do.

    python -m extras.benchmarks.train_step                                          # DiT-S/2, batch 8, float32
    python -m extras.benchmarks.train_step 'backbones=[DiT-B/2,DiT-XL/2]' batch_size=64 precision=bf16 'compile=[none,blocks]'
    python -m extras.benchmarks.train_step backbones=DiT-XL/2 batch_size=256 precision=bf16 overrides='[train.grad_accum_steps=4]'
    python -m extras.benchmarks.train_step backbones=DiT-B/2 resolution=512 parts=true plain=false
    python -m extras.benchmarks.train_step backbones=DiT-XS/2 resolution=8 batch_size=64    # the digits of `make demo`

Every combination of backbone, model and variant is a row. The rows of a backbone take turns, round by round, so that whatever
else the machine does slows all of them; on a GPU only the row whose turn it is holds memory there, and with several processes
all of them. The ratio of two rows is the median over rounds of the ratio of their medians. NOTES says what the columns are.

CUDA graphs hold fixed addresses, so a row that records them, beside others, has a process of its own, which never leaves the
device. Its ratios are of medians of the whole measurement, not of rounds.

A variant is a mode of train.compile, or `plain`: eager, the blocks as DiT's own code writes them, a Python loop for the EMA,
AdamW neither fused nor batched, and loss.item() in every step (benchmarks/plain.py).
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from training.memory import saved_for_backward

from common.errors import UserError
from configs import command_line as cli
from configs.schema import Compile
from configs.settings import Count, Text, Whole
from extras.benchmarks.harness import (
    Backbone,
    Report,
    Several,
    arguments_for,
    open_accelerator,
    reason,
    run_python,
    table,
    time_ms,
    timed,
)
from extras.benchmarks.memory import peak_bytes
from extras.benchmarks.peaks import fastest_product, published_flops
from extras.benchmarks.trainers import MODELS, CommonSettings, data_overrides, open_trainer, run_loop
from sampling.flops import step_flops
from training.speed import CUDA_GRAPHS
from training.trainer import Trainer

# Left out of the Markdown table.
SHARED = ("backbone", "precision", "batch_size", "resolution", "ms_lowest", "num_timed", "ceiling_tflops_per_sec")
CHILD_LIMIT_SEC = 600
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
    loop_steps: Whole | None = None  # also timed through the whole of Trainer.train(); null: 50 on a GPU, none on a CPU
    parts: bool = False  # forward, backward, optimiser, EMA and data apart, in steps of their own that wait after each part
    num_workers: Whole = 0  # as data.num_workers
    output: Text = "runs/benchmarks/train_step"  # the files' name, without its ending


NOTES = """Times are milliseconds per step of the whole batch, medians with quartiles. FLOPs are of matrix products
(sampling/flops.py), a multiply-add counted twice, forward and backward 3 times the forward; tokens that skip a block do not
count in it. `mfu`: FLOPs per second over the dense peak that the vendor publishes for the device (benchmarks/peaks.py; for fp8
the peak of fp8), the number that papers state. `of_fastest_product`: over the FLOPs per second of the fastest matrix product of
this type, measured before and after each round's steps; the median over rounds. `first_step_sec`: with compilation, if any.
`loop_ms_per_step`: the same steps through the trainer's whole loop, with its log lines and without checkpoints; what it takes
longer than the step alone is the loop's own. Peak memory: on a GPU what is allocated at most, weights and states included; on a
CPU the most that a turn adds to the process. Saved: what the forward keeps for the backward, without the weights (uncompiled
rows).
"""


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, TrainStepSettings)
    accelerator = open_accelerator(settings.device, settings.cpu_threads, settings.precision, settings.tf32)
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
    variants = [*(["plain"] if settings.plain else []), *settings.compile]
    wanted, rows = list(itertools.product(variants, settings.models)), []
    for variant, model in wanted:
        if accelerator.device.type == "cuda" and variant in CUDA_GRAPHS and len(wanted) > 1:
            rows.append(measure_apart(accelerator, backbone, model, variant, settings))
            continue
        plain = variant == "plain"
        own = {"backbone": backbone, "model": model, "compile": "none" if plain else variant}
        if plain and settings.precision == "fp8":
            own["precision"] = "bf16"  # plain knows no float8
        trainer = open_trainer(accelerator, settings, data, plain, **own)
        rows.append(StepRow(trainer, model, variant, settings, is_alone=len(wanted) == 1))
    here = [row for row in rows if isinstance(row, StepRow)]
    for measure in (StepRow.take_turn, StepRow.take_loop_turn):
        for _, row in itertools.product(range(settings.rounds), here):
            row.on_device(measure)
    for row in here if settings.parts else ():
        row.on_device(StepRow.measure_parts)
    return [{"backbone": backbone, **row.record()} for row in rows], [{"backbone": backbone, **one} for one in compare(rows)]


def measure_apart(accelerator: Accelerator, backbone: str, model: str, variant: str, settings: TrainStepSettings):
    """A row that was measured in a process of its own, with the attributes of StepRow that are written and compared."""
    if accelerator.num_processes > 1:
        raise UserError(
            f"compile={variant} records CUDA graphs; with several processes it is measured alone, with models={model}"
        )
    row = SimpleNamespace(model=model, variant=variant, problem=None, loops_ms=[], saved_bytes=None)
    with TemporaryDirectory() as folder:
        output = f"{folder}/row"
        own = {"backbones": backbone, "models": model, "compile": variant, "plain": False, "output": output}
        code, written = run_python(["-m", "extras.benchmarks.train_step", *arguments_for(settings, **own)], CHILD_LIMIT_SEC)
        if code == 0:
            record = json.loads(Path(f"{output}.jsonl").read_text(encoding="utf-8").splitlines()[1])
        else:
            record = {"model": model, "variant": variant, "problem": reason(code, written, CHILD_LIMIT_SEC)}
    row.record = lambda: record
    row.problem = record.get("problem")
    if row.problem is None:
        row.rounds_ms, row.flops_per_image = [[record["ms_per_step"]]], 1e9 * record["gflops_per_image"]
        row.loops_ms = [record["loop_ms_per_step"]] if "loop_ms_per_step" in record else []
    return row


class StepRow:
    """A trainer and what its steps took.

    Attributes:
        first_step_sec: of the first step, compilation included.
        rounds_ms: for every round, the milliseconds of each step.
        loops_ms: for every round, the milliseconds per step of the trainer's whole loop.
        peak_flops: for every round, FLOPs per second of the fastest matrix product around these steps.
        peak_bytes: for every round; None where the system does not tell.
        parts_ms: median milliseconds of each part, where they were measured.
        problem: why the row was given up.
    """

    def __init__(self, trainer: Trainer, model: str, variant: str, settings: TrainStepSettings, is_alone: bool):
        self.trainer, self.model, self.variant, self.settings = trainer, model, variant, settings
        self.device, self.batches = trainer.device, trainer.batches()
        # DDP has hooks on the parameters, which would be lost on their way: its rows stay, and their memory cannot be told apart.
        is_one_of_several, has_ddp = self.device.type == "cuda" and not is_alone, trainer.accelerator.num_processes > 1
        self.moves, self.shares = is_one_of_several and not has_ddp, is_one_of_several and has_ddp
        self.away: list[Tensor] = []  # where `_tensors` go, in pinned memory: pageable memory would take longer than the steps
        self.published_flops = published_flops(self.device, settings.precision)
        self.flops_per_image = step_flops(trainer.net, routed=True)
        self.flops_per_step = self.flops_per_image * trainer.cfg.train.batch_size / trainer.accelerator.num_processes
        self.first_step_sec: float | None = None
        self.rounds_ms: list[list[float]] = []
        self.loops_ms: list[float] = []
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
            measure(self)
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
                self.trainer.loss_sums[0].item()  # the wait for the loss that a progress bar costs

        def round_of_steps() -> None:
            self._move(self.device)
            if is_first:
                self.first_step_sec = time_ms(step, 1, self.device)[0] / 1000
            self.rounds_ms.append(time_ms(step, self.settings.steps, self.device, warmup))

        num_rows = len(range(self.trainer.cfg.train.batch_size)[self.trainer.parts[0]]) * self.trainer.net.num_tokens
        ceiling = self.trainer.net.blocks[0], num_rows, self.settings.precision, self.device
        before = fastest_product(*ceiling)
        peak = peak_bytes(round_of_steps, self.device)
        self.peak_bytes.append(None if self.shares else peak)
        self.peak_flops.append((before + fastest_product(*ceiling)) / 2)
        if is_first and self.variant in ("none", "plain"):
            trainer, (micro_batch, *_) = self.trainer, next(self.batches)
            self.saved_bytes = saved_for_backward(
                trainer.net, lambda: sum(trainer.losses(trainer.parts[0], *micro_batch))
            ).total()

    def take_loop_turn(self) -> None:
        """The same through `Trainer.train()`: what it does around a step, a wait for the device say, is in no step alone."""
        num_steps = self.settings.loop_steps
        if num_steps is None:
            num_steps = 50 if self.device.type == "cuda" else 0
        if num_steps == 0 or self.variant == "plain":
            return
        self._move(self.device)
        run_loop(self.trainer, self.settings.warmup)
        self.loops_ms.append(time_ms(lambda: run_loop(self.trainer, num_steps), 1, self.device)[0] / num_steps)

    def measure_parts(self) -> None:
        """Each part with a wait for the device around it: the step as a whole is slower for it."""
        self._move(self.device)
        trainer, spent_ms = self.trainer, {part: [] for part in PARTS}
        methods = {
            "forward": (trainer, "losses"),
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
        if not self.moves:
            return
        tensors = self._tensors()
        if device.type == "cpu":
            self.away += [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors[len(self.away) :]]
            for tensor, away in zip(tensors, self.away):
                tensor.data = away.copy_(tensor.data, non_blocking=True)
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        else:
            for tensor in tensors:
                tensor.data = tensor.data.to(device, non_blocking=True)

    def _tensors(self) -> list[Tensor]:
        """Weights, averages and the optimiser's states, which come last: they are there from the first step on."""
        states = [t for state in self.trainer.optimizer.state.values() for t in state.values()]
        states = [t for t in states if torch.is_tensor(t) and t.ndim > 0]
        return [*self.trainer.net.parameters(), *self.trainer.ema.net.parameters(), *states]

    def record(self) -> dict[str, object]:
        """The row as it is written."""
        settings = self.settings
        identity = {"model": self.model, "variant": self.variant, "precision": settings.precision}
        identity |= {"batch_size": settings.batch_size, "resolution": settings.resolution}
        if self.problem:
            return identity | {"problem": self.problem}
        ms = np.concatenate(self.rounds_ms)
        low, middle, high = np.percentile(ms, (25, 50, 75)).tolist()
        of_fastest = 1000 * self.flops_per_step / np.median(self.rounds_ms, axis=1) / self.peak_flops
        loop = {"loop_ms_per_step": median(self.loops_ms)} if self.loops_ms else {}
        return identity | {
            "ms_per_step": middle,
            "ms_quartiles": [low, high],
            "ms_lowest": ms.min(),
            "num_timed": len(ms),
            "images_per_sec": 1000 * settings.batch_size / middle,
            "gflops_per_image": self.flops_per_image / 1e9,
            "tflops_per_sec": self.flops_per_step / middle / 1e9,
            "ceiling_tflops_per_sec": median(self.peak_flops) / 1e12,
            "mfu": self.published_flops and 1000 * self.flops_per_step / middle / self.published_flops,
            "of_fastest_product": np.median(of_fastest),
            "first_step_sec": self.first_step_sec,
            **loop,
            "peak_memory_mib": max((b / 2**20 for b in self.peak_bytes if b is not None), default=None),
            "saved_mib": None if self.saved_bytes is None else self.saved_bytes / 2**20,
            **self.parts_ms,
        }


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
            if dense.loops_ms and routed.loops_ms:
                line["loop_tread_over_dit"] = np.median(np.divide(routed.loops_ms, dense.loops_ms))
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
            + (f", loop tread/dit {line['loop_tread_over_dit']:.3f}" if "loop_tread_over_dit" in line else "")
        )
    for model in MODELS:
        if f"{model}_speed_over_plain" in line:
            words.append(f"{model} {line[f'{model}_speed_over_plain']:.2f} times as fast as plain")
    return f"{line['backbone']} {line['variant']}: {', '.join(words) or 'nothing to compare'}"


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
