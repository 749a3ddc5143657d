"""Sizes of the tests of this folder, and trainers for them."""

from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from conftest import forget_accelerate

from extras.benchmarks.rows import compose_config, open_accelerator, open_trainer
from training import speed


@dataclass(frozen=True)
class Size:
    backbone: str
    large_backbone: str
    data: str
    batch_size: int


FULL = Size("S/2", "DiT-XL/2", "data=imagenet256", 64)
SMALL = Size("XS/2", "DiT-XS/2", "data=digits", 4)  # on a CPU


def trainer_for(device, size, folder, *overrides):
    """A trainer in bf16 without hooks; model=tread unless the overrides name a model."""
    forget_accelerate()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    own = ["train.precision=bf16", "train.cpu_threads=1", f"train.batch_size={size.batch_size}", "data.num_workers=0"]
    if not any(override.startswith("model=") for override in overrides):
        own += ["model=tread", f"model.backbone=DiT-{size.backbone}"]
    cfg = compose_config([size.data, *own, *overrides], folder)
    return open_trainer(open_accelerator(cfg), cfg)


def compiler_for(device):
    """On a CPU nothing is generated: dynamo and autograd's part of the compiler are what is looked at there."""
    compiler = torch.compile if device.type == "cuda" else partial(torch.compile, backend="aot_eager")
    return mock.patch.object(speed.torch, "compile", compiler)
