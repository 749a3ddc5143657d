"""Several processes: the settings of DDP, and FSDP2, where every process holds a shard of weights, gradients, states and EMA.

FSDP uses torch's `fully_shard`, not accelerate's plugin, which gives all units one precision (the block after a route has
its own), builds its device mesh without regard to the accelerator's device and knows no EMA.

A sharded tensor is a DTensor, split along its first dimension. torch.distributed.fsdp and .tensor are imported where they
are used: that takes seconds, which train.parallel=ddp need not spend.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import Tensor, nn

import dit


def ddp_settings(net: dit.DiT, gradient_precision: str) -> DistributedDataParallelKwargs:
    """How DDP averages gradients: buckets of about one block, and gradients that are views of them.

    Views save a copy of all gradients in memory, and the copy back from the buckets at every step. A bucket is sent as soon as
    its gradients are there. Larger buckets reach more of a link's bandwidth; the last one cannot hide behind the backward, so
    it should be a small part of the whole.

    Args:
        gradient_precision: train.gradient_precision. With bf16, DDP rounds gradients to bfloat16 and averages them in it.
    """
    hooks = {"fp32": DDPCommunicationHookType.NO, "bf16": DDPCommunicationHookType.BF16}
    return DistributedDataParallelKwargs(
        gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib(net), comm_hook=hooks[gradient_precision]
    )


def bucket_mib(net: dit.DiT) -> int:
    """MiB of one block's gradients (DiT-XL/2: 92), and at least DDP's default of 25."""
    return max(25, math.ceil(sum(p.nbytes for p in net.blocks[0].parameters()) / 2**20))


def num_shards(train, num_processes: int) -> int:
    """Processes over which FSDP cuts weights and states (train.* of the configuration): all of them, or those of a node."""
    return processes_per_node(num_processes) if train.fsdp_shard == "node" else num_processes


def processes_per_node(num_processes: int) -> int:
    """As the launcher says; without a launcher, all of them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_processes))


def shard_network(modules: Sequence[nn.Module], device: torch.device, num_processes: int, train) -> None:
    """Shard the trained parameters on `device`: one FSDP unit per block, one for the rest, and one for every other module.

    FSDP gathers the weights of a unit before it computes, and averages and shards its gradients while the backward of the
    next unit runs. Call it after `compile_network` and `checkpoint_activations`, so that neither contains the communication.

    Args:
        modules: the network first, with the same values on every process.
        train: train.* of the configuration.
            precision: shards are float32, and autocast works as without FSDP. With bf16, blocks are gathered in bfloat16: their
            parameters belong to linear layers, which autocast would round to the same values, so half of the communication
            gives the same numbers. (The gains of LightningDiT's norms are rounded here only.) With fp8 too, where the cast to
            float8 then starts from bfloat16. Blocks after a route (net.fp32_layers) and everything outside the blocks are
            gathered in float32.
            gradient_precision: gradients are averaged in it.
            fsdp_reshard: `after_forward` gathers weights for the forward and again for the backward; `after_backward` once.
            fsdp_shard: over `all` processes, or over those of a `node`, with a copy on every node.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    net, *others = modules
    size = num_shards(train, num_processes)
    # Of a mesh of two dimensions, fully_shard shards over the second, and averages gradients over both.
    if size < num_processes:
        mesh = init_device_mesh(device.type, (num_processes // size, size), mesh_dim_names=("nodes", "processes"))
    else:
        mesh = init_device_mesh(device.type, (num_processes,))
    reduce_dtype = torch.bfloat16 if train.gradient_precision == "bf16" else torch.float32
    in_fp32 = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    in_bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for i, block in enumerate(net.blocks):
        policy = in_bf16 if train.precision != "fp32" and i not in net.fp32_layers else in_fp32
        is_last = i == len(net.blocks) - 1  # the backward needs it first: it stays gathered
        fully_shard(
            block, mesh=mesh, mp_policy=policy, reshard_after_forward=train.fsdp_reshard == "after_forward" and not is_last
        )
    # The positions are not trained and small, and their first dimension, 1, cannot be split: every process holds them.
    fixed = {p for p in net.parameters() if not p.requires_grad}
    fully_shard(net, mesh=mesh, mp_policy=in_fp32, ignored_params=fixed)
    for module in others:
        fully_shard(module, mesh=mesh, mp_policy=in_fp32)
    for p in fixed:
        p.data = p.data.to(device)


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard, which shares memory with `tensor`; a plain tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered on its device; a plain tensor as it is. Every process must call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distribute_like(full: Tensor, like: Tensor) -> Tensor:
    """A copy of `full`, which every process has, on the device of `like` and sharded as it is."""
    if not hasattr(like, "to_local"):
        return full.to(like.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: no communication, every process cuts its own shard. It is a view; the clone lets `full` be freed.
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).clone()


@torch.no_grad()
def copy_state_dict(state: object, keep: bool, into: object = None) -> object:
    """A copy in host memory of a state dict of a network or optimizer, with sharded tensors gathered. Every process must call it.

    Tensors are gathered one at a time, so that a device needs room for one only. torch.distributed.checkpoint.state_dict does
    the same, but renames the states of the optimizer. Copies from CUDA may still be under way at the return: synchronize first.

    Args:
        keep: without it, None takes the place of tensors.
        into: an earlier copy of the same state dict, whose memory is used again: new memory costs more than the copy.
    """
    if isinstance(state, dict):
        return {key: copy_state_dict(value, keep, into.get(key) if into else None) for key, value in state.items()}
    if isinstance(state, list):
        return [copy_state_dict(value, keep) for value in state]
    if not isinstance(state, Tensor):
        return state
    full = full_tensor(state)
    if not keep:
        return None
    if into is None:  # pinned memory is copied to several times as fast
        into = torch.empty(full.shape, dtype=full.dtype, device="cpu", pin_memory=full.is_cuda)
    return into.copy_(full, non_blocking=True)
