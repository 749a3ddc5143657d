"""Time and memory of the trainer's own step, dense and routed, against the arithmetic that it has to do.

    python -m benchmarks.train_step                                          # DiT-S/2, batch 8, float32
    python -m benchmarks.train_step 'backbones=[DiT-S/2,DiT-XL/2]' batch_size=256 precision=bf16 'compile=[none,default]'
    python -m benchmarks.train_step backbones=DiT-B/2 resolution=512 parts=true plain=false
    python -m benchmarks.train_step backbones=DiT-XS/2 resolution=8 batch_size=64    # the digits of `make demo`

Every combination of backbone, model and variant is a row. The rows of a backbone take turns, round by round, so that what else
the machine does hits all alike; on a GPU only the row whose turn it is holds memory there. The ratio of two rows is the
median over rounds of the ratio of their medians in the round.

A variant is a mode of train.compile, or `plain`: eager, the blocks as DiT's own code writes them, a Python loop for the EMA,
AdamW neither fused nor batched, and loss.item() in every step (benchmarks/plain.py). FLOPs are those of matrix products
(sampling/flops.py): a multiply-add counts 2, the backward twice the forward. MFU is FLOPs per second over those of the
fastest matrix product of the same type, which is measured before and after each turn: the median over rounds.

It writes <output>.jsonl and <output>.md; the last line sums up the ratios.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from hydra import compose, initialize_config_dir

import dit
from benchmarks.memory import PeakMemory, saved_for_backward
from benchmarks.plain import make_blocks_plain, make_trainer_plain, plain_step
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
from errors import UserError
from latents.shards import ShardInfo, write_shard
from sampling.flops import step_flops
from setup.schema import Accepts, choice, one_or_list, or_null, text, true_or_false, whole
from training import cli, config, engine
from training.run import RunFolder
from training.trainer import Trainer

MODELS = ("dit", "tread")
RESOLUTIONS = (8, 256, 512)
DEFAULTS = {
    "backbones": ["DiT-S/2"],
    "models": [*MODELS],
    "compile": ["none"],  # a row for each: none | blocks | default | reduce-overhead | max-autotune
    "plain": True,  # a row for the plain step
    "precision": "fp32",  # fp32 | bf16 | fp8 (with compile=blocks, say; plain is bf16 then, and the ceiling bf16's)
    "batch_size": 8,  # over all processes
    "resolution": 256,  # of the images: 256 | 512 (random latents of an SD-VAE, 1,000 classes) | 8 (the embedded digits)
    "rounds": 5,
    "steps": 3,  # timed in each turn
    "warmup": 2,  # untimed steps in a row's first turn, and on a GPU in every turn; on a CPU later turns have one
    "parts": False,  # forward, backward, optimiser, EMA and data apart, in steps of their own that wait after each part
    "device": None,  # cpu | cuda; null: what accelerate chooses
    "cpu_threads": None,  # as train.cpu_threads
    "num_workers": 0,  # as data.num_workers
    "overrides": [],  # more of the training configuration: [train.grad_clip_norm=1]
    "output": "runs/benchmarks/train_step",  # the files' name, without its ending
}
KEYS = {
    "backbones": one_or_list(choice(*dit.BACKBONES)),
    "models": one_or_list(choice(*MODELS)),
    "compile": one_or_list(config.TRAIN_KEYS["train.compile"]),
    "plain": true_or_false(),
    "precision": config.TRAIN_KEYS["train.precision"],
    "batch_size": whole(1),
    "resolution": Accepts(lambda v: v in RESOLUTIONS and not isinstance(v, bool), " | ".join(map(str, RESOLUTIONS))),
    "rounds": whole(1),
    "steps": whole(1),
    "warmup": whole(1),
    "parts": true_or_false(),
    "device": or_null(choice("cpu", "cuda")),
    "cpu_threads": or_null(whole(1)),
    "num_workers": whole(0),
    "overrides": Accepts(lambda v: isinstance(v, list) and all(isinstance(o, str) for o in v), "a list of key=value"),
    "output": text(),
}
PARTS = ("data", "forward", "backward", "optimiser", "ema")


def main(arguments: Sequence[str]) -> None:
    settings = parse_settings(arguments, DEFAULTS, KEYS)
    accelerator = open_accelerator(settings)
    if accelerator.is_main_process:
        prepare_output(settings["output"])
    machine = describe_machine(accelerator.device) | {"num_processes": accelerator.num_processes, "settings": settings}
    lines, sections, summary = [], [NOTES], []
    with tempfile.TemporaryDirectory() as folder:
        data = random_latents(Path(folder), settings)
        for backbone in settings["backbones"]:
            rows, ratios = measure_backbone(accelerator, backbone, data, settings)
            lines += [*rows, *ratios]
            sections += [f"## {backbone}\n", markdown_table([as_table_row(row) for row in rows]), markdown_table(ratios)]
            summary += map(ratios_in_words, ratios)
    if accelerator.is_main_process:
        last_line = "; ".join(summary)
        write_report(settings["output"], "Training step", machine, lines, [*sections, last_line + "\n"])
        emit(**machine)
        for line in lines:
            emit(**line)
        say(last_line)
    accelerator.end_training()


NOTES = """Times are milliseconds per step of the whole batch, medians with quartiles. FLOPs are of matrix products, a
multiply-add counted twice, forward and backward 3 times the forward. MFU: against the fastest matrix product of this type,
measured before and after each round's steps. Peak memory: on a GPU what is allocated at most, weights and states included; on
a CPU the most that a turn adds to the process. Saved: what the forward keeps for the backward, without the weights
(uncompiled rows).
"""


# ----------------------------------------------------------------------------------------------------------------------
# The trainers that are measured.


def open_accelerator(settings: dict) -> Accelerator:
    if settings["device"] == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but this machine has no CUDA device; use device=cpu")
    mixed_precision = engine.MIXED_PRECISION[settings["precision"]]
    return cli.start_accelerator(settings["cpu_threads"], mixed_precision=mixed_precision, cpu=settings["device"] == "cpu")


def random_latents(folder: Path, settings: dict) -> list[str]:
    """What of the training configuration says where the data are; random latents are written to `folder`."""
    if settings["resolution"] == 8:
        return ["data=digits"]
    size, num_items = settings["resolution"] // 8, max(2 * settings["batch_size"], 64)
    generator = torch.Generator().manual_seed(0)
    moments = torch.randn(num_items, 8, size, size, generator=generator).half()
    labels = torch.randint(0, 1000, (num_items,), generator=generator)
    info = ShardInfo("moments", 0.18215, "sd-vae:none", settings["resolution"], num_classes=1000)
    write_shard(folder / "random.safetensors", moments, labels, info)
    return [f"data=imagenet{settings['resolution']}", f"data.path={folder}"]


def open_trainer(accelerator: Accelerator, overrides: Sequence[str], *, plain: bool = False) -> Trainer:
    """A trainer of the project's configuration, as train.py opens it, with nothing beside the steps; or a plain one."""
    quiet = ["name=benchmark", "sample.every=0", "eval.every=0", f"train.num_steps={10**9}"]
    with initialize_config_dir(config.CONFIGS, version_base="1.3"):
        cfg = compose("config", [*overrides, *quiet])
    cfg = config.check(cfg, config.TRAIN_KEYS)
    if cfg.train.parallel != "ddp":
        raise UserError(
            f"train.parallel={cfg.train.parallel} cannot be measured here: rows take turns on the device, and a sharded trainer "
            "cannot leave it; use train.parallel=ddp"
        )
    diffusion, dataset = config.build_diffusion(cfg), config.open_data(cfg)
    config.check_batch_size(cfg, accelerator.num_processes)
    set_seed(cfg.seed)
    net = config.build_network(cfg)
    engine.check_machine(cfg.train, net, accelerator.device)
    if plain:
        make_blocks_plain(net)
    trainer = Trainer(accelerator, cfg, net, diffusion, dataset, RunFolder(cfg.output_dir, cfg.name))
    if plain:
        make_trainer_plain(trainer)
    return trainer


def training_overrides(settings: dict, data: Sequence[str], backbone: str, model: str, compile_mode: str) -> list[str]:
    return [
        f"model={model}",
        *data,
        f"model.backbone={backbone}",
        f"data.num_workers={settings['num_workers']}",
        f"train.batch_size={settings['batch_size']}",
        f"train.precision={settings['precision']}",
        f"train.compile={compile_mode}",
        *settings["overrides"],
    ]


class Row:
    """A trainer, and what its steps took.

    Attributes:
        rounds_ms: for every round, the milliseconds of each of its steps.
        ceilings: for every round, FLOPs per second of the fastest matrix product around these steps.
        peak_bytes: of the turns; None where the system does not say.
        parts_ms: median milliseconds of each part, when they were measured.
        problem: why it was given up.
    """

    def __init__(self, trainer: Trainer, backbone: str, model: str, variant: str):
        self.trainer, self.backbone, self.model, self.variant = trainer, backbone, model, variant
        self.device = trainer.device
        self.batches = trainer.batches()
        self.flops_per_image = step_flops(trainer.net, routed=True)
        self.rounds_ms: list[list[float]] = []
        self.ceilings: list[float] = []
        self.peak_bytes: int | None = None
        self.saved_bytes: int | None = None
        self.parts_ms: dict[str, float] = {}
        self.problem: str | None = None
        self._move(torch.device("cpu"))

    def step(self) -> None:
        micro_batches = next(self.batches)
        if self.variant == "plain":
            plain_step(self.trainer, micro_batches)
        else:
            self.trainer.train_step(micro_batches)

    def turn(self, settings: dict, ceiling: Ceiling) -> None:
        """A round's steps; a row that does not fit in the memory is given up."""
        try:
            is_first = not self.rounds_ms
            before = ceiling.measure()
            memory = PeakMemory(self.device)
            self._move(self.device)
            for _ in range(settings["warmup"] if is_first or self.device.type == "cuda" else 1):
                self.step()
            clock = StepClock(self.device)
            for _ in range(settings["steps"]):
                self.step()
                clock.lap()
            self.rounds_ms.append(clock.laps_ms())
            self.peak_bytes = max((b for b in (self.peak_bytes, memory.peak_bytes()) if b is not None), default=None)
            self.ceilings.append((before + ceiling.measure()) / 2)
            if is_first and self.variant in ("none", "plain"):
                trainer, (micro_batch, *_) = self.trainer, next(self.batches)
                self.saved_bytes = saved_for_backward(trainer.net, lambda: trainer.loss(trainer.parts[0], *micro_batch))
        except torch.OutOfMemoryError:
            self.problem = "out of memory"
            self.trainer.net.zero_grad(set_to_none=True)
        self._move(torch.device("cpu"))

    def measure_parts(self, settings: dict) -> None:
        """Each part with a wait for the device around it: the step as a whole is slower for it."""
        self._move(self.device)
        trainer, spent_sec = self.trainer, defaultdict(list)
        places = [
            (trainer, "loss", "forward"),
            (trainer.accelerator, "backward", "backward"),
            (trainer.optimizer, "step", "optimiser"),
            (trainer.ema, "update", "ema"),
        ]
        with ExitStack() as stack:
            for target, name, part in places:
                timed_method = self._timed(getattr(target, name), spent_sec[part])
                stack.enter_context(mock.patch.object(target, name, timed_method))
            fetch = self._timed(lambda: next(self.batches), spent_sec["data"])
            for _ in range(settings["warmup"] + settings["steps"]):
                for part in PARTS:
                    spent_sec[part].append(0.0)
                trainer.train_step(fetch())
        self.parts_ms = {part: 1000 * statistics.median(spent_sec[part][settings["warmup"] :]) for part in PARTS}
        self._move(torch.device("cpu"))

    def _timed(self, method: Callable, spent_sec: list[float]) -> Callable:
        """The same method, adding its time to the last entry (micro-batches call it more than once in a step)."""

        def timed_method(*args, **kwargs):
            synchronise(self.device)
            start_sec = time.perf_counter()
            result = method(*args, **kwargs)
            synchronise(self.device)
            spent_sec[-1] += time.perf_counter() - start_sec
            return result

        return timed_method

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

    def ms_per_step(self) -> float:
        return statistics.median(itertools.chain(*self.rounds_ms))

    def mfu(self) -> float:
        """Median over rounds: steps and matrix products of a round met the same machine."""
        return statistics.median(
            1000 * self.flops_per_step() / statistics.median(ms) / ceiling for ms, ceiling in zip(self.rounds_ms, self.ceilings)
        )

    def flops_per_step(self) -> float:
        """Of one process."""
        return self.flops_per_image * self.trainer.cfg.train.batch_size / self.trainer.accelerator.num_processes

    def record(self, settings: dict) -> dict[str, object]:
        """The row as it is written."""
        identity = {"backbone": self.backbone, "model": self.model, "variant": self.variant}
        identity |= {name: settings[name] for name in ("precision", "batch_size", "resolution")}
        if self.problem:
            return identity | {"problem": self.problem}
        ms = sorted(itertools.chain(*self.rounds_ms))
        low, _, high = statistics.quantiles(ms, n=4, method="inclusive") if len(ms) > 1 else ms * 3
        images_per_sec = 1000 * settings["batch_size"] / self.ms_per_step()
        return identity | {
            "ms_per_step": self.ms_per_step(),
            "ms_quartiles": [low, high],
            "ms_lowest": ms[0],
            "num_timed": len(ms),
            "images_per_sec": images_per_sec,
            "gflops_per_image": self.flops_per_image / 1e9,
            "tflops_per_sec": self.flops_per_step() / self.ms_per_step() / 1e9,
            "ceiling_tflops_per_sec": statistics.median(self.ceilings) / 1e12,
            "mfu": self.mfu(),
            "peak_memory_mib": None if self.peak_bytes is None else self.peak_bytes / 2**20,
            "saved_mib": None if self.saved_bytes is None else self.saved_bytes / 2**20,
            **{f"{part}_ms": ms for part, ms in self.parts_ms.items()},
        }


# ----------------------------------------------------------------------------------------------------------------------
# Measuring.


def measure_backbone(accelerator: Accelerator, backbone: str, data: Sequence[str], settings: dict) -> tuple[list, list]:
    """(rows, ratios), as they are written."""
    variants = [*(["plain"] if settings["plain"] else []), *settings["compile"]]
    rows = []
    for variant, model in itertools.product(variants, settings["models"]):
        plain = variant == "plain"
        overrides = training_overrides(settings, data, backbone, model, "none" if plain else variant)
        if plain and settings["precision"] == "fp8":
            overrides.append("train.precision=bf16")  # float8 is of the engine that it is compared with
        trainer = open_trainer(accelerator, overrides, plain=plain)
        rows.append(Row(trainer, backbone, model, variant))
    ceiling = Ceiling(accelerator.device, settings, rows[0].trainer)
    for _ in range(settings["rounds"]):
        for row in rows:
            if row.problem is None:
                row.turn(settings, ceiling)
    for row in rows if settings["parts"] else ():
        if row.problem is None:
            row.measure_parts(settings)
    records = [row.record(settings) for row in rows]
    ratios = compare(rows)
    for row in rows:
        del row.trainer, row.batches
    accelerator.free_memory()
    torch.compiler.reset()
    return records, ratios


class StepClock:
    """Milliseconds from lap to lap. On a GPU its own clock measures, and nobody waits for it before the end."""

    def __init__(self, device: torch.device):
        self.device = device
        synchronise(device)
        self.marks = [self._now()]

    def _now(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self) -> None:
        self.marks.append(self._now())

    def laps_ms(self) -> list[float]:
        synchronise(self.device)
        if self.device.type == "cuda":
            return [start.elapsed_time(end) for start, end in itertools.pairwise(self.marks)]
        return [1000 * (end - start) for start, end in itertools.pairwise(self.marks)]


class Ceiling:
    """The fastest matrix product, x W^T, of the run's type: squares, and the shapes of the network's own layers."""

    def __init__(self, device: torch.device, settings: dict, trainer: Trainer):
        self.device = device
        self.dtype = torch.float32 if settings["precision"] == "fp32" else torch.bfloat16
        num_rows = len(range(settings["batch_size"])[trainer.parts[0]]) * trainer.net.num_tokens
        block = trainer.net.blocks[0]
        squares = (4096, 8192) if device.type == "cuda" else (1024, 2048)
        if device.type != "cuda":
            num_rows = min(num_rows, 4096)  # as fast as more rows, and sooner done
        layers = (block.attn.qkv, block.mlp.fc1, block.mlp.fc2)
        self.shapes = [*((n, n, n) for n in squares), *((num_rows, layer.in_features, layer.out_features) for layer in layers)]

    def measure(self) -> float:
        """FLOPs per second of the fastest shape, each by the median of 5."""
        return max(self._flops_per_sec(*shape) for shape in self.shapes)

    def _flops_per_sec(self, m: int, k: int, n: int) -> float:
        x = torch.randn(m, k, device=self.device, dtype=self.dtype)
        weight = torch.randn(n, k, device=self.device, dtype=self.dtype)
        torch.nn.functional.linear(x, weight)
        clock = StepClock(self.device)
        for _ in range(5):
            torch.nn.functional.linear(x, weight)
            clock.lap()
        return 2000 * m * k * n / statistics.median(clock.laps_ms())


# ----------------------------------------------------------------------------------------------------------------------
# What it comes to.


def compare(rows: Sequence[Row]) -> list[dict[str, object]]:
    """For every variant: routed against dense, and both against the plain step."""
    by_name = {(row.model, row.variant): row for row in rows if row.problem is None}
    ratios = []
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
        ratios.append(line)
    return ratios


def ratio_of_times(first: Row, second: Row) -> float:
    """Median over rounds: within a round both met the same machine."""
    medians = (map(statistics.median, row.rounds_ms) for row in (first, second))
    return statistics.median(a / b for a, b in zip(*medians))


def ratios_in_words(ratios: dict[str, object]) -> str:
    words = []
    if "time_tread_over_dit" in ratios:
        words.append(
            f"step time tread/dit {ratios['time_tread_over_dit']:.3f}, FLOPs tread/dit {ratios['flops_tread_over_dit']:.3f} "
            f"(quotient {ratios['time_over_flops']:.3f})"
        )
    for model in MODELS:
        if f"{model}_speed_over_plain" in ratios:
            words.append(f"{model} {ratios[f'{model}_speed_over_plain']:.2f} times as fast as plain")
    return f"{ratios['backbone']} {ratios['variant']}: {', '.join(words) or 'nothing to compare'}"


def as_table_row(row: dict[str, object]) -> dict[str, object]:
    """A row of the table: what the whole run shares is left out."""
    shared = ("backbone", "precision", "batch_size", "resolution", "ms_lowest", "num_timed", "ceiling_tflops_per_sec")
    short = {name: value for name, value in row.items() if name not in shared}
    if "ms_quartiles" in short:
        short["ms_quartiles"] = " to ".join(f"{ms:.4g}" for ms in row["ms_quartiles"])
    return short


if __name__ == "__main__":
    main(sys.argv[1:])
