"""Benchmark the training step for different variants of a train.py configuration."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from cli.compose import compose_overrides, parse_config
from common.errors import UserError
from common.files import make_folder
from common.types import PositiveInt, Text
from configs import schema
from extras.benchmarks.harness import TimedVariant, measure, report, time_ms
from latents.shards import ShardInfo, write_shard
from runtime import compilation, machine
from training import build
from training.data import complete_config, open_training_latents
from training.trainer import Trainer


def compose_config(overrides: Sequence[str], folder: Path) -> schema.TrainConfig:
    """Compose a train.py configuration from `overrides`, without grids and evaluations. The default data set is imagenet256.

    Without data.path, the configuration uses random latents in `folder`.
    """
    defaults = ["name=benchmark", f"output_dir={folder}", "sample_grid.every=0", "evaluation.every=0"]
    if not any(override.startswith(("data=", "experiment=")) for override in overrides):
        defaults.append("data=imagenet256")
    cfg = parse_config(compose_overrides([*defaults, *overrides]), schema.TrainConfig)
    if cfg.data.path is None:
        path = write_random_latents(folder, cfg.data, max(2 * cfg.train.batch_size, 64))
        cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"path": str(path)})})
    return cfg


def write_random_latents(folder: Path, data: schema.Data, num_items: int) -> Path:
    """Write a shard of random moments with the shape and number of classes from data.* and the scale factor of SD-VAE."""
    file = folder / f"{num_items}x{data.in_channels}x{data.input_size}.safetensors"
    if not file.exists():
        shape = (num_items, 2 * data.in_channels, data.input_size, data.input_size)
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
        info = ShardInfo("moments", 0.18215, "none", resolution=8 * data.input_size, num_classes=data.num_classes)
        write_shard(file, latents, torch.arange(num_items) % data.num_classes, info)
    return file


def start_for(cfg: schema.TrainConfig) -> Accelerator:
    return machine.start_accelerator(cfg.machine.cpu_threads, tf32=cfg.machine.tf32, precision=cfg.train.precision)


def build_step(accelerator: Accelerator, cfg: schema.TrainConfig) -> TimedVariant:
    """Build the training step of train.py (data, forward, backward, optimizer, EMA) without hooks."""
    dataset = open_training_latents(cfg.data)
    cfg = complete_config(cfg, dataset)
    cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"num_steps": 10**9})})  # more steps than a benchmark runs
    set_seed(cfg.seed)
    compilation.check_machine(cfg, accelerator.device, accelerator.num_processes)
    net, alignment = cfg.model.build(cfg.data), build.build_alignment(cfg, dataset, accelerator)
    trainer = Trainer(accelerator, cfg, net, build.build_ema(cfg.train, net), dataset, alignment)
    accelerator.free_memory()  # otherwise, the accelerator's references would outlive the trainer
    batches = trainer.batches()
    num_images = cfg.train.batch_size // accelerator.num_processes
    # For each matrix product in the forward pass, the backward pass computes two, for the gradients of input and weight.
    return TimedVariant(lambda: trainer.train_step(next(batches)), num_images, 3 * trainer.net.forward_flops())


def step(
    variants: list[str] = ("",),
    overrides: list[str] = (),
    rounds: PositiveInt = 5,
    steps: PositiveInt = 3,
    warmup: int = 2,
    turns: Text | None = None,
) -> list[dict[str, object]]:
    """Time the training step of each variant (train.py arguments separated by spaces). `overrides` apply to all variants.

    `turns` is a JSON file for the time of every step.
    """
    with TemporaryDirectory() as folder:
        cfgs = {variant: compose_config([*overrides, *shlex.split(variant)], Path(folder)) for variant in variants}
        keys = ("train.precision", "train.activation_memory_budget", "machine.tf32", "machine.cpu_threads")
        if len({attrgetter(*keys)(cfg) for cfg in cfgs.values()}) > 1:
            raise UserError(f"variants cannot differ in {', '.join(keys)}, which hold for the whole process")
        accelerator = start_for(cfgs[variants[0]])
        builders = {variant or "as given": partial(build_step, accelerator, cfg) for variant, cfg in cfgs.items()}
        records = measure(builders, accelerator.device, rounds, steps, warmup, turns and Path(turns))
        report("Step", accelerator, records)
    return records


def profile(variants: list[str] = ("",), overrides: list[str] = (), steps: PositiveInt = 3, traces: Text | None = None) -> None:
    """Print the operations that take the most time in `steps` training steps of each variant.

    `traces` is a folder for one timeline per variant (<number>.json.gz), which https://ui.perfetto.dev shows.
    """
    with TemporaryDirectory() as folder:
        for number, variant in enumerate(variants):
            cfg = compose_config([*overrides, *shlex.split(variant)], Path(folder))
            accelerator = start_for(cfg)
            variant_step = build_step(accelerator, cfg)
            time_ms(variant_step.action, 0, accelerator.device, warmup=3)  # compiles the step before profiling starts
            with torch.profiler.profile() as profiled:
                time_ms(variant_step.action, steps, accelerator.device)
            if traces is not None:
                make_folder(Path(traces))
                profiled.export_chrome_trace(str(Path(traces, f"{number}.json.gz")))
            order = f"self_{accelerator.device.type}_time_total"
            table = profiled.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=80)
            sys.stdout.write(f"# {variant}\n\n```text\n{table}\n```\n")
            sys.stdout.flush()  # printed even if the next variant is stopped
            del variant_step
            gc.collect()
