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

It writes <output>.jsonl and <output>.md; the last line sums up.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import distributed

import dit
from benchmarks.report import describe_machine, emit, markdown_table, parse_settings, prepare_output, say, write_report
from benchmarks.train_step import KEYS as TRAIN_STEP_KEYS
from benchmarks.train_step import MODELS, StepClock, open_accelerator, open_trainer, random_latents, training_overrides
from errors import UserError
from setup.schema import TRAIN_KEYS, choice, or_null, whole
from training.trainer import Trainer

DEFAULTS = {
    "backbone": "DiT-S/2",
    "model": "tread",
    "precision": "fp32",  # fp32 | bf16
    "compile": "none",  # as train.compile
    "batch_size": None,  # over all processes; null: 8 in each
    "resolution": 256,  # 256 | 512 | 8, as for benchmarks.train_step
    "rounds": 5,
    "steps": 3,  # timed in each turn
    "warmup": 1,  # untimed steps in every turn
    "device": None,  # cpu | cuda; null: what accelerate chooses
    "cpu_threads": None,  # as train.cpu_threads
    "overrides": [],  # more of the training configuration
    "output": "runs/benchmarks/scaling",  # the files' name, without its ending
}
KEYS = {
    **{name: TRAIN_STEP_KEYS[name] for name in DEFAULTS if name in TRAIN_STEP_KEYS},
    "backbone": choice(*dit.BACKBONES),
    "model": choice(*MODELS),
    "compile": TRAIN_KEYS["train.compile"],
    "batch_size": or_null(whole(1)),
}
DDP_BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default
KINDS = ("alone", "apart", "together")


def main(arguments: Sequence[str]) -> None:
    settings = parse_settings(arguments, DEFAULTS, KEYS)
    accelerator = open_accelerator(settings)
    if accelerator.num_processes == 1:
        raise UserError(
            "benchmarks.scaling compares one process with several: "
            "accelerate launch --multi_gpu --num_processes 2 -m benchmarks.scaling"
        )
    settings["batch_size"] = settings["batch_size"] or 8 * accelerator.num_processes
    if accelerator.is_main_process:
        prepare_output(settings["output"])
    machine = describe_machine(accelerator.device) | {"num_processes": accelerator.num_processes, "settings": settings}
    with tempfile.TemporaryDirectory() as folder:
        data = random_latents(Path(folder), settings)
        of_run = settings | {"num_workers": 0}
        overrides = training_overrides(of_run, data, settings["backbone"], settings["model"], settings["compile"])
        trainer = open_trainer(accelerator, overrides)
        rounds = [measure_round(accelerator, trainer, settings) for _ in range(settings["rounds"])]
    summary = sum_up(rounds, settings["batch_size"], accelerator.num_processes)
    if accelerator.is_main_process:
        rows = [{"what": kind, "ms": statistics.median(r[kind] for r in rounds)} for kind in (*KINDS, "exchange")]
        last_line = scaling_in_words(summary, accelerator.num_processes)
        lines = [*({"round": i, **r} for i, r in enumerate(rounds)), summary]
        sections = [markdown_table(rows), markdown_table([summary]), last_line + "\n"]
        write_report(settings["output"], "Scaling", machine, lines, sections)
        emit(**machine)
        emit(**summary)
        say(last_line)
    accelerator.end_training()


def measure_round(accelerator: Accelerator, trainer: Trainer, settings: dict) -> dict[str, float]:
    """Milliseconds per step of each kind, and of the exchange by itself, as the first process sees them."""
    batches = trainer.batches()

    def step() -> None:
        trainer.train_step(next(batches))

    def alone() -> None:
        if accelerator.is_main_process:
            step()

    contexts = {"alone": accelerator.no_sync, "apart": accelerator.no_sync, "together": lambda model: contextlib.nullcontext()}
    found = {}
    for kind in KINDS:
        with contexts[kind](trainer.model):
            found[kind] = median_step_ms(accelerator, alone if kind == "alone" else step, settings)
    gradients = exchange_buffers(trainer)
    found["exchange"] = median_step_ms(accelerator, lambda: exchange(gradients), settings)
    return found


def median_step_ms(accelerator: Accelerator, action: Callable[[], None], settings: dict) -> float:
    for _ in range(settings["warmup"]):
        action()
    accelerator.wait_for_everyone()
    clock = StepClock(accelerator.device)
    for _ in range(settings["steps"]):
        action()
        clock.lap()
    milliseconds = statistics.median(clock.laps_ms())
    accelerator.wait_for_everyone()
    return milliseconds


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


def scaling_in_words(summary: dict[str, float], num_processes: int) -> str:
    return (
        f"{num_processes} processes: efficiency {summary['efficiency']:.3f} "
        f"({summary['efficiency_without_exchange']:.3f} without exchange); of {summary['exchange_ms']:.3g} ms of exchange "
        f"{summary['exposed_ms']:.3g} ms show, {100 * summary['hidden_share']:.0f}% hide behind the backward"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
