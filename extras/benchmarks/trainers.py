"""Trainers of the project's own configuration, for the benchmarks of a training step and of the loop around it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from common.errors import UserError
from configs import arguments, experiments, schema
from configs.settings import Count, Settings
from extras.benchmarks.plain import PlainEMA, make_blocks_plain, make_optimizer_plain
from latents.shards import ShardInfo, write_shard
from training import build, speed
from training.ema import EMA
from training.run import RunFolder
from training.trainer import Trainer

MODELS = ("dit", "tread")  # the dense network and the routed one, also of LightningDiT
SHARD_SIZE = 4096
# Keys of a benchmark that are keys of the training configuration.
TRAINING_KEYS = {"model": "model", "backbone": "model.backbone", "seed": "seed", "num_workers": "data.num_workers"}
TRAINING_KEYS |= {key: f"train.{key}" for key in ("batch_size", "precision", "compile", "tf32")}

# What a benchmark leaves out of a run: it ends where the measurement does.
QUIET = ["name=benchmark", "sample.every=0", "eval.every=0", f"train.num_steps={10**9}", f"checkpoint.every={10**9}"]


class CommonSettings(Settings):
    """The keys of every benchmark of a whole network."""

    batch_size: Count = 8  # over all processes
    resolution: Literal[8, 256, 512] = 256  # of the images: random latents of an SD-VAE, 1,000 classes; 8: the embedded digits
    device: Literal["cpu", "cuda"] | None = None  # null: what accelerate chooses
    cpu_threads: Count | None = None  # as train.cpu_threads
    tf32: bool = True  # as train.tf32
    overrides: list[str] = []  # more of the training configuration: [train.grad_clip_norm=1]


def compose_config(overrides: Sequence[str]) -> schema.TrainConfig:
    """The checked configuration of train.py with these overrides.

    Raises:
        UserError: an override that does not exist or is not accepted.
    """
    experiments.register(overrides)
    try:
        with initialize_config_dir(str(arguments.CONFIGS), version_base="1.3"):
            return schema.check(compose("config", list(overrides)), schema.TrainConfig)
    except HydraException as e:
        raise UserError(f"overrides: {arguments.explain(e, schema.TrainConfig)}") from e


def write_random_latents(folder: Path, num_items: int, resolution: int, kind: str) -> None:
    """Shards of random latents, as SD-VAE's of images of this resolution, of 1,000 classes."""
    channels, size = 8 if kind == "moments" else 4, resolution // 8
    generator = torch.Generator().manual_seed(0)
    info = ShardInfo(kind, 0.18215, "sd-vae:none", resolution, num_classes=1000)
    for start in range(0, num_items, SHARD_SIZE):
        count = min(SHARD_SIZE, num_items - start)
        latents = torch.randn(count, channels, size, size, generator=generator).half()
        labels = torch.randint(0, 1000, (count,), generator=generator)
        write_shard(folder / f"{start // SHARD_SIZE:05d}.safetensors", latents, labels, info)


@contextmanager
def data_overrides(settings: CommonSettings) -> Iterator[list[str]]:
    """The overrides that name the data and the folder of the runs. Random latents and runs exist inside the context only."""
    with TemporaryDirectory() as folder:
        data = ["data=digits"]
        if settings.resolution != 8:
            latents = Path(folder) / "latents"
            write_random_latents(latents, max(2 * settings.batch_size, 64), settings.resolution, "moments")
            data = [f"data=imagenet{settings.resolution}", f"data.path={latents}"]
        yield [*data, "data.num_workers=0", f"output_dir={folder}"]


def model_of(model: str, backbone: str) -> str:
    """model.name of the dense network or the routed one, one of MODELS, for this backbone."""
    _, names = schema.family_of(backbone)
    return names[MODELS.index(model)]


def open_trainer(accelerator: Accelerator, settings: CommonSettings, data: Sequence[str], plain: bool = False, **own) -> Trainer:
    """A trainer of a benchmark's settings, which can leave the device while another row has its turn.

    Args:
        settings: their TRAINING_KEYS count, then their `overrides`.
        data: from `data_overrides`.
        own: values of TRAINING_KEYS for this trainer.
    """
    values = {name: value for name, value in (settings.model_dump() | own).items() if name in TRAINING_KEYS}
    if "model" in values:
        values["model"] = model_of(values["model"], values["backbone"])
    overrides = [*data, *(f"{TRAINING_KEYS[name]}={value}" for name, value in values.items()), *settings.overrides]
    cfg = compose_config([*overrides, *QUIET])
    if cfg.train.parallel != "ddp":
        raise UserError(
            f"train.parallel={cfg.train.parallel} cannot be measured here: rows take turns on the device, and a sharded trainer "
            "cannot leave it; use train.parallel=ddp, or python -m extras.benchmarks.tune"
        )
    return trainer_of(accelerator, cfg, plain)


def trainer_of(accelerator: Accelerator, cfg: schema.TrainConfig, plain: bool = False) -> Trainer:
    """A trainer as train.py opens it, without samples and evaluations.

    Args:
        plain: with the blocks, the EMA and the optimiser of benchmarks/plain.py.
    """
    cfg, dataset = build.open_data(cfg)
    build.check_alignment(cfg, dataset)
    build.check_batch_size(cfg, accelerator.num_processes)
    build.check_parallel(cfg.train, accelerator.num_processes, accelerator.distributed_type)
    alignment = build.build_alignment(cfg, dataset, accelerator)
    set_seed(cfg.seed)
    net = build.build_network(cfg)
    speed.check_machine(cfg.train, net, accelerator.device)
    if plain:
        make_blocks_plain(net)
    ema = (PlainEMA if plain else EMA)(net, cfg.train.ema_decay)
    diffusion, run = build.build_diffusion(cfg.diffusion), RunFolder(cfg.output_dir, cfg.name)
    run.path.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(accelerator, cfg, net, ema, diffusion, dataset, run, alignment=alignment)
    if plain:
        make_optimizer_plain(trainer.optimizer)
    return trainer


def run_loop(trainer: Trainer, num_steps: int) -> None:
    """`num_steps` steps of `Trainer.train()`: with everything that the loop does around a step, and without a checkpoint."""
    batches, end = itertools.islice(trainer.batches(), num_steps), trainer.step + num_steps
    with mock.patch.object(trainer, "batches", lambda: batches), suppress(StopIteration):
        trainer.train()
    if trainer.step < end:  # the loop ends on a signal as on its last step
        raise KeyboardInterrupt
