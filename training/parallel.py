"""Training in several processes with DDP: every process holds a copy of the weights and trains on a part of each batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch._functorch.config
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from common.errors import UserError
from configs.schema import Train
from runtime.compilation import checkpoint_activations, compile_network, resolve_compile


def check_processes(train: Train, num_processes: int, launched_as: str) -> None:
    """Compare train.* with the processes and accelerate's distributed_type.

    Raises UserError if the global batch cannot be divided, or if accelerate would shard the model.
    """
    parts = num_processes * train.grad_accum_steps
    if train.batch_size % parts:
        raise UserError(
            f"train.batch_size={train.batch_size} is not divisible by {num_processes} processes x "
            f"train.grad_accum_steps={train.grad_accum_steps} = {parts} parts"
        )
    if launched_as in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise UserError(f"accelerate was launched with {launched_as}, which this trainer does not support; launch it without")


def prepare(accelerator: Accelerator, train: Train, modules: Sequence[nn.Module], ema_net: nn.Module) -> list[nn.Module]:
    """Move the modules to the device, compile and checkpoint the network's blocks, and wrap the modules in DDP.

    Args:
        modules: the network and, with alignment, its projector. Their weights are equal on every process.
        ema_net: is moved to the device.
    """
    net, device = modules[0], accelerator.device
    for module in (*modules, ema_net):
        module.to(device)
    # torch.compile reads this budget at the first step. It holds for the whole process, so each run of a sweep sets it.
    torch._functorch.config.activation_memory_budget = train.activation_memory_budget
    compile_network(net, resolve_compile(train.compile, device))
    checkpoint_activations(net, train.activation_checkpointing)
    # One bucket per block (91 MiB for DiT-XL/2), never below DDP's default. DDP reduces a bucket as soon as it is full. Only the
    # last one cannot overlap with the backward. A bucket ends with the gradient that fills it, so the size is rounded down.
    # Gradients are views of the buckets, which saves a copy.
    bucket_mib = max(25, sum(p.nbytes for p in net.blocks[0].parameters()) // 2**20)
    accelerator.ddp_handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
    return [accelerator.prepare(module) for module in modules]
