"""Training in several processes: DDP, or FSDP2, where every process holds a shard of weights, gradients, states and EMA.

FSDP uses torch's `fully_shard`. accelerate's plugin gives all units one precision (the block after a route has its own), builds
its device mesh without regard to the accelerator's device, and does not shard the EMA.

A sharded tensor is a DTensor, split along its first dimension. torch.distributed.fsdp and .tensor take seconds to import, so
only the functions that need them do it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch._functorch.config
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from common.errors import UserError
from configs.schema import Train
from runtime.compilation import checkpoint_activations, compile_network, resolve_compile


def check_processes(train: Train, num_processes: int, launched_as: str) -> None:
    """Compare train.* with the processes and accelerate's distributed_type.

    Raises:
        UserError: the global batch is not divisible; FSDP with one process, or with unequal numbers per node.
    """
    parts = num_processes * train.grad_accum_steps
    if train.batch_size % parts:
        raise UserError(
            f"train.batch_size={train.batch_size} is not divisible by {num_processes} processes x "
            f"train.grad_accum_steps={train.grad_accum_steps} = {parts} parts"
        )
    if launched_as in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise UserError(f"accelerate was launched with {launched_as}; launch it without, and set train.parallel=fsdp to shard")
    if train.parallel == "fsdp" and (num_processes == 1 or num_processes % processes_per_node(num_processes)):
        raise UserError(
            f"train.parallel=fsdp needs several processes, equally many on each node; found {num_processes}, with "
            f"{processes_per_node(num_processes)} on this node. Use train.parallel=ddp"
        )


def processes_per_node(num_processes: int) -> int:
    """The number that the launcher gives; without a launcher, all processes."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))


def prepare(accelerator: Accelerator, train: Train, modules: Sequence[nn.Module], ema) -> list[nn.Module]:
    """The modules as they are trained: on the device, compiled, checkpointed, and wrapped in DDP or sharded by FSDP.

    Args:
        modules: the network comes first. Every process has equal weights.
        ema: the network's `EMA`. It is moved or sharded together with the network.
    """
    net, device = modules[0], accelerator.device
    if train.parallel == "ddp":
        for module in (*modules, ema.net):
            module.to(device)
    # torch.compile reads this budget at the first step. It holds for the whole process, so each run of a sweep sets it.
    torch._functorch.config.activation_memory_budget = train.activation_memory_budget
    compile_network(net, resolve_compile(train.compile, device))
    checkpoint_activations(net, train.activation_checkpointing)
    if train.parallel == "fsdp":  # moves one block at a time to the device
        shard_network(modules, device, accelerator.num_processes, train.precision)
        ema.shard_like(net)
        # evaluation_mode: accelerate adds autocast, but no DDP.
        return [accelerator.prepare_model(module, device_placement=False, evaluation_mode=True) for module in modules]
    # One bucket per block (91 MiB for DiT-XL/2), never below DDP's default. DDP reduces a bucket as soon as it is full. Only the
    # last one cannot overlap with the backward. A bucket ends with the gradient that fills it, so the size is rounded down.
    # Gradients are views of the buckets, which saves a copy.
    bucket_mib = max(25, sum(p.nbytes for p in net.blocks[0].parameters()) // 2**20)
    accelerator.ddp_handler = DistributedDataParallelKwargs(gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
    return [accelerator.prepare(module) for module in modules]


def shard_network(modules: Sequence[nn.Module], device: torch.device, num_processes: int, precision: str) -> None:
    """Shard the trained parameters on `device`: one FSDP unit per block, one for the rest, and one for every other module.

    Weights are sharded within a node and replicated across nodes. FSDP gathers a unit before it computes and keeps it until the
    backward. While the backward of the next unit runs, it averages and shards the gradients, in float32. Call this after
    `compile_network` and `checkpoint_activations`, so that neither contains the communication.

    Args:
        precision: with bf16, blocks are gathered in bfloat16, which halves the communication. The numbers stay the same, since
            autocast rounds the weights of linear layers anyway (only the gains of LightningDiT's norms are rounded more). Blocks
            after a route (net.fp32_layers) and everything outside the blocks are gathered in float32. Shards are float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    net, *others = modules
    size = processes_per_node(num_processes)
    if 1 < size < num_processes:  # fully_shard shards over the second dimension, and averages gradients over both
        mesh = init_device_mesh(device.type, (num_processes // size, size), mesh_dim_names=("nodes", "processes"))
    else:
        mesh = init_device_mesh(device.type, (num_processes,))
    in_fp32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    in_bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for i, block in enumerate(net.blocks):
        policy = in_bf16 if precision == "bf16" and i not in net.fp32_layers else in_fp32
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    # Every process holds the positions: they are small, not trained, and their first dimension, 1, cannot be split.
    fixed = {p for p in net.parameters() if not p.requires_grad}
    fully_shard(net, mesh=mesh, mp_policy=in_fp32, ignored_params=fixed)
    for module in others:
        fully_shard(module, mesh=mesh, mp_policy=in_fp32)
    for p in fixed:
        p.data = p.data.to(device)


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard, which shares memory with `tensor`; a plain tensor is returned as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor, gathered on its device; a plain tensor is returned as it is. Every process must call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distribute_like(full: Tensor, like: Tensor) -> Tensor:
    """A copy of `full`, which every process holds, on the device of `like` and with its sharding."""
    if not hasattr(like, "to_local"):
        return full.to(like.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: every process cuts its own shard, without communication. The clone allows `full` to be freed.
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).clone()


@torch.no_grad()
def copy_state_dict(state: object, keep: bool) -> object:
    """A copy in host memory of a state dict of a network or optimizer, with sharded tensors gathered. Every process must call it.

    Tensors are gathered one at a time, so the device needs memory for only one. torch.distributed.checkpoint.state_dict does
    the same, but renames the states of the optimizer. Copies from CUDA may still run on return: synchronize before reading them.

    Args:
        keep: if False, return None in place of each tensor.
    """
    if isinstance(state, dict):
        return {key: copy_state_dict(value, keep) for key, value in state.items()}
    if isinstance(state, list):
        return [copy_state_dict(value, keep) for value in state]
    if not isinstance(state, Tensor):
        return state
    full = full_tensor(state)
    if not keep:
        return None
    # Copies to pinned memory are several times faster. torch caches such memory, so the next checkpoint uses it again.
    copy = torch.empty(full.shape, dtype=full.dtype, device="cpu", pin_memory=full.is_cuda)
    return copy.copy_(full, non_blocking=True)
