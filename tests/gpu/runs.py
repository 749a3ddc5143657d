"""Sizes of the tests of this folder, and trainers for them."""

from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from conftest import forget_accelerate

from extras.benchmarks.harness import open_accelerator
from extras.benchmarks.trainers import QUIET, compose_config, trainer_of, write_random_latents
from training import speed


@dataclass(frozen=True)
class Size:
    backbone: str
    large_backbone: str
    batch_size: int
    resolution: int  # of the images; 8: the embedded digits


FULL = Size("DiT-S/2", "DiT-XL/2", 64, 256)
SMALL = Size("DiT-XS/2", "DiT-XS/2", 4, 8)


def data_keys(size, folder):
    """Overrides: the embedded digits, or random latents in `folder`."""
    if size.resolution == 8:
        return ["data=digits"]
    latents = folder / "latents"
    if not latents.exists():
        write_random_latents(latents, 4 * size.batch_size, size.resolution, "moments")
    return [f"data=imagenet{size.resolution}", f"data.path={latents}", "data.num_workers=0"]


def open_trainer(device, size, folder, *overrides, backbone=None):
    """A trainer in bf16, logging to `folder`; model=tread unless the overrides say more."""
    forget_accelerate()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    own = [f"model.backbone={backbone or size.backbone}", f"train.batch_size={size.batch_size}", "train.precision=bf16"]
    own += ["train.cpu_threads=1", f"output_dir={folder}"]
    cfg = compose_config([*data_keys(size, folder), *own, *overrides, *QUIET])
    return trainer_of(open_accelerator(device.type, cfg.train.cpu_threads, cfg.train.precision), cfg)


def compiler_for(device):
    """On a CPU nothing is generated: dynamo and autograd's part of the compiler are what is looked at there."""
    compiler = torch.compile if device.type == "cuda" else partial(torch.compile, backend="aot_eager")
    return mock.patch.object(speed.torch, "compile", compiler)
