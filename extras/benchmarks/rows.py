"""What is measured: training steps, batches of latents, batches of samples, and the evaluation suite."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from hydra.errors import HydraException

from checkpoints import load
from common.errors import UserError
from common.types import Count, Whole
from configs import schema
from configs.command_line import check
from configs.compose import compose_overrides
from evaluations.features import Features
from evaluations.suite import evaluate
from extras.benchmarks.harness import TimedRow, measure, report
from latents import autoencoders
from latents.shards import ShardInfo, write_shard
from runtime import compilation, machine
from runtime.processes import leave
from sampling.flops import forward_flops
from sampling.recipe import Recipe
from training import build
from training.trainer import Trainer


def compose_config(overrides: Sequence[str], folder: Path) -> schema.TrainConfig:
    """The configuration of train.py with these arguments, without looks at samples; data=imagenet256 unless they say otherwise.

    Without data.path, random latents are made in `folder`. Raises UserError for an argument that is not accepted.
    """
    own = ["name=benchmark", f"output_dir={folder}", "sample.every=0", "eval.every=0"]
    if not any(override.startswith(("data=", "experiment=")) for override in overrides):
        own.append("data=imagenet256")
    try:
        cfg = check(compose_overrides([*own, *overrides]), schema.TrainConfig)
    except HydraException as e:
        raise UserError(str(e).replace("\n", " ")) from e
    if cfg.data.path is None:
        path = write_random_latents(folder, cfg.data, max(2 * cfg.train.batch_size, 64))
        cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"path": str(path)})})
    return cfg


def write_random_latents(folder: Path, data: schema.Data, num_items: int) -> Path:
    """A shard of random moments of data.*'s shape and classes, as an SD-VAE's."""
    file = folder / f"{num_items}x{data.in_channels}x{data.input_size}.safetensors"
    if not file.exists():
        shape = (num_items, 2 * data.in_channels, data.input_size, data.input_size)
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
        about = {"kind": "moments", "scale_factor": 0.18215, "autoencoder": "none", "resolution": 8 * data.input_size}
        info = ShardInfo(**about, num_classes=data.num_classes)
        write_shard(file, latents, torch.arange(num_items) % data.num_classes, info)
    return file


def open_accelerator(cfg: schema.TrainConfig) -> Accelerator:
    """accelerate as train.py starts it, without trackers."""
    return machine.start_accelerator(cfg.train.cpu_threads, tf32=cfg.train.tf32, precision=cfg.train.precision)


def open_trainer(accelerator: Accelerator, cfg: schema.TrainConfig) -> Trainer:
    """A trainer as train.py makes it, without hooks and without an end."""
    cfg, dataset = build.open_data(cfg)
    cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"num_steps": 10**9})})
    set_seed(cfg.seed)
    compilation.check_machine(cfg.train, accelerator.device)
    net, alignment = load.build_network(cfg), build.build_alignment(cfg, dataset, accelerator)
    trainer = Trainer(accelerator, cfg, net, build.build_ema(cfg.train, net), dataset, alignment)
    accelerator.free_memory()  # it would keep a trainer that is given up
    return trainer


def open_step(accelerator: Accelerator, cfg: schema.TrainConfig) -> TimedRow:
    """The trainer's step: data, forward, backward, optimizer and EMA."""
    trainer = open_trainer(accelerator, cfg)
    batches = trainer.batches()
    num_images = cfg.train.batch_size // accelerator.num_processes
    # For each product of the forward, the backward computes two: for the gradients of the input and of the weight.
    return TimedRow(lambda: trainer.train_step(next(batches)), num_images, 3 * forward_flops(trainer.net, None))


def open_loader(accelerator: Accelerator, cfg: schema.TrainConfig) -> TimedRow:
    """A batch of latents, shuffled over the whole data set as in training. After the first epoch it comes from memory."""
    batches = open_trainer(accelerator, cfg).batches()
    return TimedRow(lambda: next(batches), cfg.train.batch_size // accelerator.num_processes)


def open_sampling(accelerator: Accelerator, cfg: schema.TrainConfig) -> TimedRow:
    """sample.batch_size images of an untrained network, with guidance.*; they are decoded if data.autoencoder is set."""
    cfg, _ = build.open_data(cfg)
    device, data, seeds = accelerator.device, cfg.data, list(range(cfg.sample.batch_size))
    net = load.build_network(cfg).to(device).eval().requires_grad_(False)
    compile_mode = compilation.resolve_compile(cfg.train.compile, device)
    compilation.compile_network(net, compile_mode)
    decoder = SimpleNamespace(decode=lambda latents: latents[:, :3])
    if data.autoencoder != "none":
        decoder = autoencoders.build(data.autoencoder, device, data.in_channels)
    sampler = Recipe.in_training(cfg, cfg.guidance, cfg.sample.precision).sampler(net, decoder, device, compile_mode)

    def sample() -> None:
        sampler(seeds, [seed % data.num_classes for seed in seeds])
        row.flops_per_image = 1e9 * sampler.cost["gflops_per_image"]
        row.found["evaluations/image"] = sampler.cost["network_evaluations"]

    row = TimedRow(sample, len(seeds))
    return row


OPENERS = {"step": open_step, "loader": open_loader, "sampling": open_sampling}


def compare(
    what: str, variants: list[str] = ("",), overrides: list[str] = (), rounds: Count = 5, steps: Count = 3, warmup: Whole = 2
) -> list[dict[str, object]]:
    """Measure and report a row for each variant, which is arguments of train.py separated by spaces; `overrides` hold for all."""
    with TemporaryDirectory() as folder:
        cfgs = {variant: compose_config([*overrides, *shlex.split(variant)], Path(folder)) for variant in variants}
        if len({(cfg.train.precision, cfg.train.tf32, cfg.train.cpu_threads) for cfg in cfgs.values()}) > 1:
            raise UserError("variants: train.precision, tf32 and cpu_threads are of the process; measure their values apart")
        accelerator = open_accelerator(cfgs[variants[0]])
        openers = {variant or "as given": partial(OPENERS[what], accelerator, cfg) for variant, cfg in cfgs.items()}
        records = measure(openers, accelerator.device, rounds, steps, warmup)
        report(what.capitalize(), accelerator, records)
    leave()
    return records


def evaluation(num_samples: Count = 50000, num_references: Count = 10000) -> list[dict[str, object]]:
    """All metrics from features of Inception's sizes, random ones: nothing is downloaded."""

    def features(num: int, seed: int) -> Features:
        generator = torch.Generator().manual_seed(seed)
        sizes = {"pool": 2048, "spatial": 2023, "logits": 1008}
        return Features("inception", **{name: 0.4 * torch.randn(num, dim, generator=generator) for name, dim in sizes.items()})

    accelerator = machine.start_accelerator(None)
    reference, samples = features(num_references, 0), features(num_samples, 1)
    row = TimedRow(lambda: evaluate(reference, samples, device=accelerator.device), num_samples)
    records = measure({f"{num_samples} samples": lambda: row}, accelerator.device, rounds=1, steps=1, warmup=0)
    report("Metrics from features", accelerator, records)
    return records
