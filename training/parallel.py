"""Set up training with DDP. Each process has a complete copy of the weights and trains on a part of each global batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch._functorch.config
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from common.errors import UserError
from configs.schema import Train, TrainConfig
from runtime.compilation import checkpoint_activations, compile_network, resolve_compile


def check_batch_divides(train: Train, num_processes: int) -> None:
    """Raise UserError if the global batch cannot be divided among the processes into equal micro-batches."""
    parts = num_processes * train.grad_accum_steps
    if train.batch_size % parts:
        divisor = f"{num_processes} processes x train.grad_accum_steps={train.grad_accum_steps} = {parts} parts"
        raise UserError(f"train.batch_size={train.batch_size} is not divisible by {divisor}")


def prepare_modules(
    accelerator: Accelerator, cfg: TrainConfig, modules: Mapping[str, nn.Module], ema_net: nn.Module
) -> dict[str, nn.Module]:
    """Move the modules to the device, set up block compilation and activation checkpointing, and wrap the modules in DDP.

    Args:
        modules: `net` and, with alignment, `projector`. The weights must be equal on all processes.
        ema_net: The EMA network, which is only moved to the device.
    """
    net, device, train = modules["net"], accelerator.device, cfg.train
    for module in (*modules.values(), ema_net):
        module.to(device)
    # torch.compile reads the memory budget when it compiles a block for the first time. The budget and the compiled blocks are
    # global, so a run in a sweep with another budget must compile them again.
    if torch._functorch.config.activation_memory_budget != train.activation_memory_budget:
        torch._functorch.config.activation_memory_budget = train.activation_memory_budget
        torch.compiler.reset()
    checkpoint_activations(net, train.activation_checkpointing)
    compile_network(net, resolve_compile(cfg.machine.compile, device))
    # Use one gradient bucket per block (91 MiB for DiT-XL/2), but at least DDP's default of 25 MiB. DDP reduces each full bucket
    # during the backward pass, except the last bucket. DDP adds gradients until a bucket reaches the size limit, so the limit is
    # rounded down. Storing gradients as views of the buckets avoids a copy.
    bucket_mib = max(25, sum(p.nbytes for p in net.blocks[0].parameters()) // 2**20)
    accelerator.ddp_handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
    return {name: accelerator.prepare(module) for name, module in modules.items()}
