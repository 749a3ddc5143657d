"""How well more processes share a step, and how much of the gradients' exchange hides behind the backward.

    accelerate launch --multi_gpu --num_processes 2 -m benchmarks.scaling device=cpu     # DiT-S/2, batch 8 in each process
    accelerate launch --multi_gpu --num_processes 8 -m benchmarks.scaling backbone=DiT-XL/2 batch_size=256 precision=bf16

Three kinds of step take turns, round by round, each with the same images per process:

- `alone`: the first process only, without exchange, while the others wait;
- `apart`: all processes, without exchange: what they share is the machine;
- `together`: all processes, as they train.

Efficiency is the time of `alone` over that of `together`: 1 if N processes do N times the work. The exchange is also timed by
itself (as many bytes as there are gradients, in pieces of the size that DDP sends); hidden is the share of it that
`together` does not take longer than `apart`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from accelerate import Accelerator
from torch import distributed

from benchmarks.harness import Backbone, Report, open_accelerator, table, time_ms
from benchmarks.trainers import MODELS, StepSettings, data_overrides, open_trainer, step_overrides
from errors import UserError
from setup import cli
from setup.schema import Compile
from setup.settings import Count, Text
from training.trainer import Trainer


class ScalingSettings(StepSettings):
    backbone: Backbone = "DiT-S/2"
    model: Literal[MODELS] = "tread"
    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    compile: Compile = "none"  # as train.compile
    batch_size: Count | None = None  # over all processes; null: 8 in each
    rounds: Count = 5
    steps: Count = 3  # timed in each turn
    warmup: Count = 1  # untimed steps in every turn
    output: Text = "runs/benchmarks/scaling"  # the files' name, without its ending


DDP_BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default
KINDS = ("alone", "apart", "together")


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, ScalingSettings)
    accelerator = open_accelerator(settings.device, settings.cpu_threads, settings.precision)
    num_processes = accelerator.num_processes
    if num_processes == 1:
        raise UserError(
            "benchmarks.scaling compares one process with several: "
            "accelerate launch --multi_gpu --num_processes 2 -m benchmarks.scaling"
        )
    settings = settings.model_copy(update={"batch_size": settings.batch_size or 8 * num_processes})
    report = Report("Scaling", settings, accelerator.device, accelerator.is_main_process, num_processes=num_processes)
    with data_overrides(settings) as data:
        overrides = step_overrides(
            settings, data, settings.backbone, settings.model, precision=settings.precision, compile=settings.compile
        )
        trainer = open_trainer(accelerator, overrides)
        rounds = [measure_round(accelerator, trainer, settings) for _ in range(settings.rounds)]
    summary = sum_up(rounds, settings.batch_size, num_processes)
    rows = [{"what": kind, "ms": statistics.median(r[kind] for r in rounds)} for kind in (*KINDS, "exchange")]
    lines = [*({"round": i, **r} for i, r in enumerate(rounds)), summary]
    report.save_and_print(lines, [table(rows), table([summary])], in_words(summary, num_processes), printed=[summary])
    accelerator.end_training()


def measure_round(accelerator: Accelerator, trainer: Trainer, settings: ScalingSettings) -> dict[str, float]:
    """Milliseconds per step of each kind, and of the exchange by itself, as the first process sees them."""
    batches, gradients = trainer.batches(), exchange_buffers(trainer)

    def step() -> None:
        trainer.train_step(next(batches))

    def median_ms(action: Callable[[], None]) -> float:
        for _ in range(settings.warmup):
            action()
        accelerator.wait_for_everyone()
        milliseconds = statistics.median(time_ms(action, settings.steps, accelerator.device))
        accelerator.wait_for_everyone()
        return milliseconds

    with accelerator.no_sync(trainer.model):
        alone = median_ms(step if accelerator.is_main_process else lambda: None)
        apart = median_ms(step)
    together = median_ms(step)
    return {"alone": alone, "apart": apart, "together": together, "exchange": median_ms(lambda: exchange(gradients))}


def exchange_buffers(trainer: Trainer) -> list[torch.Tensor]:
    """As many numbers as there are gradients, in pieces of DDP's size."""
    total = sum(p.numel() for p in trainer.net.parameters() if p.requires_grad)
    size = DDP_BUCKET_BYTES // 4
    return [torch.zeros(min(size, total - start), device=trainer.device) for start in range(0, total, size)]


def exchange(gradients: Sequence[torch.Tensor]) -> None:
    for work in [distributed.all_reduce(piece, async_op=True) for piece in gradients]:
        work.wait()


def sum_up(rounds: Sequence[dict[str, float]], batch_size: int, num_processes: int) -> dict[str, float]:
    """Medians over rounds: within a round all kinds met the same machine."""

    def median_of(value: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(value, rounds))

    exposed = median_of(lambda r: r["together"] - r["apart"])
    exchanged = median_of(lambda r: r["exchange"])
    return {
        "images_per_sec": 1000 * batch_size / median_of(lambda r: r["together"]),
        "images_per_sec_alone": 1000 * batch_size / num_processes / median_of(lambda r: r["alone"]),
        "efficiency": median_of(lambda r: r["alone"] / r["together"]),
        "efficiency_without_exchange": median_of(lambda r: r["alone"] / r["apart"]),
        "exchange_ms": exchanged,
        "exposed_ms": exposed,
        "hidden_share": min(max(1 - exposed / exchanged, 0.0), 1.0),
    }


def in_words(summary: dict[str, float], num_processes: int) -> str:
    return (
        f"{num_processes} processes: efficiency {summary['efficiency']:.3f} "
        f"({summary['efficiency_without_exchange']:.3f} without exchange); of {summary['exchange_ms']:.3g} ms of exchange "
        f"{summary['exposed_ms']:.3g} ms show, {100 * summary['hidden_share']:.0f}% hide behind the backward"
    )


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
