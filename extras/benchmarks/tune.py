"""The fastest settings of train.py for a network and a batch on this machine, found by trying them.

    python -m extras.benchmarks.tune model.backbone=DiT-S/2 train.batch_size=8
    python -m extras.benchmarks.tune model=tread data=imagenet256 model.backbone=DiT-XL/2 train.batch_size=256 train.precision=bf16

Give it the arguments of your run. A key that you give stays as you give it. Without data.path, it reads random latents of the
size of data=... Every row is a fresh process, so that one that crashes, runs out of memory or lacks a compiler is a row too.

The search is greedy: one key after another from the defaults, and a choice is kept where it is faster. The order goes from what
the rest depends on to what gives least:

1. processes: one per GPU; as many micro-batches as make the step fit into memory
2. train.precision, which decides the speed of every product, which kernels there are, and what a compiler can gain
3. train.compile, which removes passes over memory: they count the more, the faster the products are
4. train.attention: its kernels differ by precision
5. train.grad_accum_steps: smaller micro-batches may suit the caches, larger ones a GPU
6. with several processes train.parallel and train.gradient_precision: communication counts once the rest is fast

What a choice replaces is measured again after it, so that a busy minute decides nothing. At the end the fastest row and the
simplest of those close to it are measured again, in turns. A row wins over one with fewer changed keys only if it is faster by
2% and in every round. Precision changes results by rounding: give train.precision to keep yours.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from accelerate.utils import broadcast_object_list

from common.errors import UserError
from configs import command_line as cli
from configs.settings import Count, Positive, Settings, Text
from extras.benchmarks.harness import Report, choose_device, emit, open_accelerator, reason, run_python, table, time_ms
from extras.benchmarks.memory import peak_bytes
from extras.benchmarks.trainers import QUIET, compose_config, trainer_of, write_random_latents
from training.speed import FP8_CAPABILITY, resolve_compile

SAME_SPEED = 0.02  # two measurements of the same row differ by as much
CLOSE = 0.15  # to the fastest row: worth another measurement
NUM_CONFIRMED = 3
STEPS = 3, 1000  # timed in a row, at least and at most

Changes = tuple[tuple[str, str], ...]  # sorted (key, value) of train.py


class TuneSettings(Settings):
    sec_per_row: Positive = 5.0  # of timed steps, after the first two
    limit_sec: Positive = 300.0  # for a row, its start and compilation included
    rounds: Count = 2  # in which the fastest rows are measured again
    device: Literal["cpu", "cuda"] | None = None  # null: what accelerate chooses
    output: Text = "runs/benchmarks/tune"  # the files' name, without its ending


class RowSettings(Settings):
    """The arguments of a row's own process."""

    overrides: list[str]
    sec: Positive
    device: Literal["cpu", "cuda"]
    result: Text


NOTES = """Each row is a fresh process. `first_step_sec` is its first step, with compilation; `ms_per_step` the median of the
steps after the second, and of several such medians where a row was measured again; `peak_memory_mib` what is allocated at most
on the first GPU or, on a CPU, what the steps add to the process.
"""


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["row"]:  # started by `Search.measure`
        measure_row(cli.parse_arguments(arguments[1:], RowSettings))
        return
    own = [a for a in arguments if a in ("--help", "-h") or a.removeprefix("--").partition("=")[0] in TuneSettings.model_fields]
    settings = cli.parse_arguments(own, TuneSettings)
    given = [a for a in arguments if a not in own]
    with TemporaryDirectory() as folder:
        search = Search(settings, given, Path(folder))
        report = Report("The fastest settings", settings, search.device, arguments=given, num_processes=search.num_processes)
        command = search.command(search.run())
        rows = search.records()
        if (drift := search.drift()) > CLOSE:
            emit(f"warning: repeated rows differ by up to {drift:.0%}: the machine did other work; run it again when it is idle")
        report.save(rows, [NOTES, table(rows), f"Fastest: `{command}`\n"], [table(rows), f"fastest: {command}"])


class Search:
    """The rows that were measured, and which to measure next.

    Attributes:
        given: arguments of train.py that stay.
        num_processes: one per GPU, as many as can share the batch.
        rows: what each row's processes reported, one for each measurement.
    """

    def __init__(self, settings: TuneSettings, given: Sequence[str], folder: Path):
        self.settings, self.given, self.folder = settings, list(given), folder
        self.device = choose_device(settings.device)
        self.train = compose_config(self.given).train
        self.own_data = self._random_latents()
        num_gpus = torch.cuda.device_count() if self.device.type == "cuda" else 1
        self.num_processes = max(n for n in range(1, num_gpus + 1) if self.train.batch_size % n == 0)
        self.rows: dict[Changes, list[dict]] = {}

    def _random_latents(self) -> list[str]:
        """The overrides that name the data, where `given` does not."""
        data = compose_config(self.given).data
        if data.path is not None:
            return []
        if data.input_size is None:
            raise UserError(f"data={data.name} does not say how large its latents are; give data.path=")
        write_random_latents(self.folder / "latents", max(2 * self.train.batch_size, 64), 8 * data.input_size, "moments")
        return [f"data.path={self.folder / 'latents'}"]

    # ------------------------------------------------------------------------------------------------------------------
    # The search.

    def run(self) -> Changes:
        """What to add to the given arguments. Raises UserError where no row runs."""
        best = self.fit_in_memory()
        best = self.best_of(best, [{"train.precision": choice} for choice in self.precisions()])
        best = self.best_of(best, [{"train.compile": choice} for choice in self.compile_modes()])
        graphs, autotune = ({"train.compile": mode} for mode in ("reduce-overhead", "max-autotune-no-cudagraphs"))
        default = self.ms(self.with_choice(best, {"train.compile": "default"}))
        if all(self.ms(self.with_choice(best, one)) < default for one in (graphs, autotune)):
            best = self.best_of(best, [{"train.compile": "max-autotune"}])  # both together, compiled for minutes
        if self.device.type == "cuda":  # a CPU has one fused kernel, which torch takes by itself
            best = self.best_of(best, [{"train.attention": kernel} for kernel in ("flash", "cudnn", "efficient")])
        best = self.climb(best)
        if self.num_processes > 1:
            mode = dict(best).get("train.compile", self.configured("train.compile"))
            sharded = {"train.parallel": "fsdp", "train.compile": mode if mode in ("none", "blocks") else "blocks"}
            best = self.best_of(best, [sharded, {"train.gradient_precision": "bf16"}])
        return self.confirm()

    def precisions(self) -> list[str]:
        if self.device.type == "cpu":
            return ["fp32", "bf16"]
        return ["bf16", *(["fp8"] if torch.cuda.get_device_capability() >= FP8_CAPABILITY else [])]

    def compile_modes(self) -> list[str]:
        """Not `max-autotune`, which is tried where it is likely to win."""
        on_gpu = ["reduce-overhead", "max-autotune-no-cudagraphs"] if self.device.type == "cuda" else []
        return ["none", "blocks", "segments", "default", *on_gpu]

    def fit_in_memory(self) -> Changes:
        """The fewest micro-batches that fit."""
        changes, num_micro_batches = (), self.train.grad_accum_steps
        while self.measure(changes).get("problem") == "out of memory":
            num_micro_batches *= 2
            if self.train.batch_size % (num_micro_batches * self.num_processes) or self.is_given("train.grad_accum_steps"):
                raise UserError(
                    f"train.batch_size={self.train.batch_size} in {num_micro_batches // 2} micro-batches does not fit into "
                    "memory; use a smaller batch, train.activation_checkpointing=blocks, or more train.grad_accum_steps"
                )
            changes = (("train.grad_accum_steps", str(num_micro_batches)),)
        return changes

    def climb(self, best: Changes) -> Changes:
        """More micro-batches, or fewer, as long as that is faster."""
        key = "train.grad_accum_steps"
        for factor in (2, 0.5):
            number = factor * int(dict(best).get(key, self.train.grad_accum_steps))
            while number >= 1 and self.train.batch_size % (int(number) * self.num_processes) == 0:
                following = self.best_of(best, [{key: str(int(number))}])
                if following == best:
                    break
                best, number = following, number * factor
        return best

    def best_of(self, best: Changes, choices: Sequence[dict[str, str]]) -> Changes:
        """The fastest of `best` and of it with one of the choices. Nothing is tried for a key that is given, or twice."""
        for choice in choices:
            candidate = self.with_choice(best, choice)
            if candidate not in self.rows and not any(self.is_given(key) for key, _ in set(candidate) - set(best)):
                self.measure(candidate)
        candidates = [candidate for choice in choices if (candidate := self.with_choice(best, choice)) in self.rows]
        fastest = min(candidates, key=self.ms, default=best)
        if self.ms(fastest) < (1 - SAME_SPEED) * self.ms(best) < inf:
            self.measure(best)  # it may have been slow because the machine did something else
        lowest = min(row.get("ms_per_step", inf) for row in self.rows.get(best, [{}]))
        return fastest if self.ms(fastest) < (1 - SAME_SPEED) * lowest else best

    def with_choice(self, best: Changes, choice: dict[str, str]) -> Changes:
        """A choice that the configuration has already is no change."""
        changes = dict(best) | choice
        return tuple(sorted((key, value) for key, value in changes.items() if self.configured(key) != value))

    def configured(self, key: str) -> str:
        """What a key of train.* is without changes; `auto` of train.compile is what it stands for."""
        value = getattr(self.train, key.removeprefix("train."))
        return resolve_compile(value, self.device) if key == "train.compile" else str(value)

    def is_given(self, key: str) -> bool:
        return any(argument.lstrip("+-").partition("=")[0] == key for argument in self.given)

    def confirm(self) -> Changes:
        """Measure the fastest and the simplest close to it again, in turns; the simplest that the fastest does not beat."""
        ordered = sorted((changes for changes in self.rows if self.ms(changes) < inf), key=self.ms)
        if not ordered:
            problems = "; ".join(dict.fromkeys(row["problem"] for rows in self.rows.values() for row in rows))
            raise UserError(f"no row could be measured: {problems}")
        close = [c for c in ordered[1:] if self.ms(c) <= (1 + CLOSE) * self.ms(ordered[0])]
        finalists = [ordered[0], *sorted(close, key=lambda c: (len(c), self.ms(c)))][:NUM_CONFIRMED]
        if len(finalists) == 1:
            return finalists[0]
        for changes in [c for _ in range(self.settings.rounds) for c in finalists]:
            self.measure(changes)
        again = {c: [row.get("ms_per_step", inf) for row in self.rows[c][-self.settings.rounds :]] for c in finalists}

        def beats(one: Changes, other: Changes) -> bool:
            ratios = [a / b for a, b in zip(again[one], again[other])]
            return median(ratios) < 1 - SAME_SPEED and max(ratios) < 1

        fastest = min(finalists, key=lambda c: median(again[c]))
        return min((c for c in finalists if c == fastest or not beats(fastest, c)), key=lambda c: (len(c), median(again[c])))

    # ------------------------------------------------------------------------------------------------------------------
    # Rows.

    def measure(self, changes: Changes) -> dict:
        """One measurement in a process of its own, or in one per GPU."""
        result = self.folder / "row.json"
        result.unlink(missing_ok=True)
        overrides = [*self.given, *self.own_data, *self._arguments(changes), f"output_dir={self.folder}"]
        row = {"overrides": overrides, "sec": self.settings.sec_per_row, "device": self.device.type, "result": str(result)}
        launcher = []
        if self.num_processes > 1:
            launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={self.num_processes}"]
            launcher += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
        arguments = [f"{key}={json.dumps(value)}" for key, value in row.items()]
        limit_sec = self.settings.limit_sec
        code, written = run_python([*launcher, "-m", "extras.benchmarks.tune", "row", *arguments], limit_sec)
        record = json.loads(result.read_text(encoding="utf-8")) if code == 0 else {"problem": reason(code, written, limit_sec)}
        self.rows.setdefault(changes, []).append(record)
        emit(f"{self._name(changes)}: " + (record.get("problem") or f"{record['images_per_sec']:.4g} images/s"))
        return record

    def ms(self, changes: Changes) -> float:
        """Milliseconds per step; infinite for a row that did not run."""
        return median([row.get("ms_per_step", inf) for row in self.rows.get(changes, [{}])])

    def drift(self) -> float:
        """The largest relative difference between two measurements of a row."""
        measured = [[row["ms_per_step"] for row in rows if "ms_per_step" in row] for rows in self.rows.values()]
        return max((max(times) / min(times) - 1 for times in measured if times), default=0.0)

    def records(self) -> list[dict[str, object]]:
        """The table: the rows in the order of their first measurement."""
        records = []
        for changes, rows in self.rows.items():
            record = {"changes": self._name(changes), "num_measured": len(rows)} | rows[-1]
            if self.ms(changes) < inf:
                record["ms_per_step"] = self.ms(changes)
                record["images_per_sec"] = 1000 * self.train.batch_size / self.ms(changes)
            records.append(record)
        return records

    def command(self, changes: Changes) -> str:
        """The command line of train.py with these changes."""
        launcher = ["python"]
        if self.num_processes > 1:
            launcher = ["accelerate", "launch", "--multi_gpu", "--num_processes", str(self.num_processes)]
        return shlex.join([*launcher, "train.py", *self.given, *self._arguments(changes)])

    @staticmethod
    def _arguments(changes: Changes) -> list[str]:
        return [f"{key}={value}" for key, value in changes]

    def _name(self, changes: Changes) -> str:
        return " ".join(self._arguments(changes)) or "as given"


def measure_row(settings: RowSettings) -> None:
    """Steps of the trainer of train.py with these arguments."""
    cfg = compose_config([*settings.overrides, *QUIET])
    accelerator = open_accelerator(settings.device, cfg.train.cpu_threads, cfg.train.precision, cfg.train.tf32)
    trainer = trainer_of(accelerator, cfg)
    batches, times_ms = trainer.batches(), []

    def step() -> None:
        trainer.train_step(next(batches))

    def steps() -> None:
        times_ms.extend(time_ms(step, 2, trainer.device))
        least, most = STEPS
        num_steps = broadcast_object_list([max(least, min(most, int(1000 * settings.sec / times_ms[1])))])[0]
        times_ms.extend(time_ms(step, num_steps, trainer.device))

    peak = peak_bytes(steps, trainer.device)
    record = {
        "ms_per_step": (ms := median(times_ms[2:])),
        "images_per_sec": 1000 * cfg.train.batch_size / ms,
        "first_step_sec": times_ms[0] / 1000,
        "peak_memory_mib": peak and peak / 2**20,
    }
    if accelerator.is_main_process:
        Path(settings.result).write_text(json.dumps(record), encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
