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

import sys
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import distributed

from common.errors import UserError
from configs import command_line as cli
from configs.schema import Compile
from configs.settings import Count, Text
from extras.benchmarks.harness import Backbone, Report, open_accelerator, table, time_ms
from extras.benchmarks.trainers import MODELS, CommonSettings, data_overrides, open_trainer
from training.sharding import bucket_mib
from training.trainer import Trainer


class ScalingSettings(CommonSettings):
    backbone: Backbone = "DiT-S/2"
    model: Literal[MODELS] = "tread"
    precision: Literal["fp32", "bf16", "fp8"] = "fp32"
    compile: Compile = "none"  # as train.compile
    batch_size: Count | None = None  # over all processes; null: 8 in each
    rounds: Count = 5
    steps: Count = 3  # timed in each turn
    warmup: Count = 1  # untimed steps in every turn
    output: Text = "runs/benchmarks/scaling"  # the files' name, without its ending


KINDS = ("alone", "apart", "together", "exchange")


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, ScalingSettings)
    accelerator = open_accelerator(settings.device, settings.cpu_threads, settings.precision, settings.tf32)
    num_processes = accelerator.num_processes
    if num_processes == 1:
        raise UserError(
            "benchmarks.scaling compares one process with several: "
            "accelerate launch --multi_gpu --num_processes 2 -m benchmarks.scaling"
        )
    settings = settings.model_copy(update={"batch_size": settings.batch_size or 8 * num_processes})
    report = Report("Scaling", settings, accelerator.device, accelerator.is_main_process, num_processes=num_processes)
    with data_overrides(settings) as data:
        trainer = open_trainer(accelerator, settings, data)
        rounds = [measure_round(accelerator, trainer, settings) for _ in range(settings.rounds)]
    sums = sum_up(rounds, settings.batch_size, num_processes)
    rows = [{"what": kind, "ms": float(np.median([r[kind] for r in rounds]))} for kind in KINDS]
    summary = (
        f"{num_processes} processes: efficiency {sums['efficiency']:.3f} "
        f"({sums['efficiency_without_exchange']:.3f} without exchange); of {sums['exchange_ms']:.3g} ms of exchange "
        f"{sums['exposed_ms']:.3g} ms show, {100 * sums['hidden_share']:.0f}% hide behind the backward"
    )
    lines = [*({"round": i, **r} for i, r in enumerate(rounds)), sums]
    report.save(lines, [table(rows), table([sums]), f"{summary}\n"], [report.machine, sums, summary])
    accelerator.end_training()


def measure_round(accelerator: Accelerator, trainer: Trainer, settings: ScalingSettings) -> dict[str, float]:
    """Milliseconds per step of each kind, and of the exchange by itself, as the first process sees them."""
    batches = trainer.batches()
    num_gradients = sum(p.numel() for p in trainer.net.parameters() if p.requires_grad)
    gradients = torch.zeros(num_gradients, device=trainer.device).split(bucket_mib(trainer.net) * 2**20 // 4)

    def step() -> None:
        trainer.train_step(next(batches))

    def exchange() -> None:
        for work in [distributed.all_reduce(piece, async_op=True) for piece in gradients]:
            work.wait()

    def median_ms(action: Callable[[], None]) -> float:
        for _ in range(settings.warmup):
            action()
        accelerator.wait_for_everyone()
        milliseconds = float(np.median(time_ms(action, settings.steps, accelerator.device)))
        accelerator.wait_for_everyone()
        return milliseconds

    with accelerator.no_sync(trainer.model):
        alone = median_ms(step if accelerator.is_main_process else lambda: None)
        apart = median_ms(step)
    return {"alone": alone, "apart": apart, "together": median_ms(step), "exchange": median_ms(exchange)}


def sum_up(rounds: Sequence[dict[str, float]], batch_size: int, num_processes: int) -> dict[str, float]:
    """Medians over rounds: within a round all kinds met the same machine."""
    alone, apart, together, exchange = (np.array([r[kind] for r in rounds]) for kind in KINDS)
    exposed_ms, exchange_ms = np.median(together - apart), np.median(exchange)
    sums = {
        "images_per_sec": 1000 * batch_size / np.median(together),
        "images_per_sec_alone": 1000 * batch_size / num_processes / np.median(alone),
        "efficiency": np.median(alone / together),
        "efficiency_without_exchange": np.median(alone / apart),
        "exchange_ms": exchange_ms,
        "exposed_ms": exposed_ms,
        "hidden_share": np.clip(1 - exposed_ms / exchange_ms, 0, 1),
    }
    return {name: float(value) for name, value in sums.items()}


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
