"""Sizes and trainers for the tests of this folder."""

import contextlib
from dataclasses import dataclass
from functools import partial
from unittest import mock

import numpy as np
import torch
from accelerate.utils import set_seed
from conftest import forget_accelerate
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from extras.benchmarks.steps import compose_config
from latents.prepare.image_reader import to_jpeg
from latents.shards import ShardInfo, pack_images, write_shard
from runtime import compilation, machine
from training import build
from training.data import complete_config, open_training_latents
from training.trainer import Trainer


@dataclass(frozen=True)
class Size:
    backbone: str
    large_backbone: str
    data: str
    batch_size: int


FULL = Size("B/2", "DiT-XL/2", "data=imagenet256", 64)
SMALL = Size("XS/2", "DiT-XS/2", "data=digits", 4)  # on a CPU


def config_for(size, folder, *overrides):
    """Return the configuration of a run in bf16, with model=tread unless the overrides name a model."""
    own = ["train.precision=bf16", "machine.cpu_threads=1", f"train.batch_size={size.batch_size}", "data.num_workers=0"]
    if not any(override.startswith("model=") for override in overrides):
        own += ["model=tread", f"model.backbone=DiT-{size.backbone}"]
    return compose_config([size.data, *own, *overrides], folder)


def trainer_for(device, size, folder, *overrides):
    """Return a trainer. Its run has so many steps that it never ends."""
    forget_accelerate()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    cfg = config_for(size, folder, "train.num_steps=1000000000", *overrides)
    accelerator = machine.start_accelerator(cfg.machine.cpu_threads, tf32=cfg.machine.tf32, precision=cfg.train.precision)
    dataset = open_training_latents(cfg.data)
    cfg = complete_config(cfg, dataset)
    set_seed(cfg.seed)
    net, alignment = cfg.model.build(cfg.data), build.build_alignment(cfg, dataset, accelerator)
    trainer = Trainer(accelerator, cfg, net, build.build_ema(cfg.train, net), dataset, alignment)
    accelerator.free_memory()  # otherwise its references outlive the trainer
    return trainer


def keys_of_repa(size, folder):
    """Write a random encoder and a shard of noise images. Return the keys that train on them with alignment=repa."""
    import timm  # slow

    is_small = size.data == "data=digits"
    channels, side, classes, pixels = (1, 8, 10, 8) if is_small else (4, 32, 1000, 256)
    torch.manual_seed(0)
    encoder = "vit_tiny_patch16_224.augreg_in21k"
    save_file(timm.create_model(encoder).state_dict(), weights := folder / "encoder.safetensors")
    noise = np.random.default_rng(0).integers(0, 256, (size.batch_size, pixels, pixels, 3), dtype=np.uint8)
    info = ShardInfo("sample", 0.5, "none", resolution=pixels, num_classes=classes)
    latents, labels = torch.randn(len(noise), channels, side, side), torch.arange(len(noise)) % classes
    write_shard(folder / "data" / "a.safetensors", latents, labels, info, **pack_images([to_jpeg(image) for image in noise]))
    data = [f"data.path={folder / 'data'}", "sampling.autoencoder=none"]
    data += ["alignment=repa", f"alignment.encoder={encoder}", f"alignment.encoder_weights={weights}", "alignment.block=4"]
    return [*data, "alignment.projector_width=64"] if is_small else data  # 2048 take most of the time on a CPU


@contextlib.contextmanager
def exact_attention():
    """Inside the context, attention adds in a fixed order. Enter it after a trainer is built, or around a whole run.

    The compiler's cache on disk knows nothing of the attention kernel, so the context has a tag of its own there.
    """
    keeps_choice = mock.patch.object(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)  # choose_kernels calls it
    with sdpa_kernel(SDPBackend.MATH), keeps_choice, mock.patch.object(torch.compiler.config, "cache_key_tag", "exact attention"):
        yield


def compiler_for(device):
    """Return a patch of torch.compile. On a CPU it runs only Dynamo and AOTAutograd and generates no code."""
    compiler = torch.compile if device.type == "cuda" else partial(torch.compile, backend="aot_eager")
    return mock.patch.object(compilation.torch, "compile", compiler)
