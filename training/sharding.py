"""FSDP2: every process holds a shard of weights, gradients, AdamW's states and EMA.

It uses torch's `fully_shard`, not accelerate's plugin, which gives all units one precision (the block after a route has
its own), builds its device mesh without regard to the accelerator's device and knows no EMA.

A sharded tensor is a DTensor, split along its first dimension. torch.distributed.fsdp and .tensor are imported where they
are used: that takes seconds, which train.parallel=ddp need not spend.
"""

from __future__ import annotations

import torch
from torch import Tensor

import dit


def shard_network(net: dit.DiT, device: torch.device, num_processes: int, precision: str) -> None:
    """Shard the trained parameters over all processes, on `device`: one FSDP unit per block, and one for the rest.

    FSDP gathers the weights of a unit before it computes, and averages and shards its gradients while the backward of the
    next unit runs. Call it after `compile_network` and `checkpoint_activations`, so that neither contains the communication.

    Args:
        net: with the same values on every process.
        precision: train.precision. Shards are float32, and autocast works as without FSDP. With bf16, blocks are gathered in
            bfloat16: their parameters belong to linear layers, which autocast would round to the same values, so half of the
            communication gives the same numbers. Blocks after a route (net.fp32_layers) and everything outside the blocks
            are gathered in float32. Gradients are averaged in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (num_processes,))
    in_bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for i, block in enumerate(net.blocks):
        policy = in_bf16 if precision == "bf16" and i not in net.fp32_layers else MixedPrecisionPolicy()
        is_last = i == len(net.blocks) - 1  # the backward needs it first: it stays gathered
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not is_last)
    # The positions are not trained and small, and their first dimension, 1, cannot be split: every process holds them.
    fixed = {p for p in net.parameters() if not p.requires_grad}
    fully_shard(net, mesh=mesh, ignored_params=fixed)
    for p in fixed:
        p.data = p.data.to(device)


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard, which shares memory with `tensor`; a plain tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered on its device; a plain tensor as it is. Every process must call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distribute_like(full: Tensor, like: Tensor) -> Tensor:
    """`full`, which every process has, sharded like `like`; unchanged if `like` is a plain tensor."""
    if not hasattr(like, "to_local"):
        return full
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: no communication, every process cuts its own shard. It is a view; the clone lets `full` be freed.
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None).clone()


@torch.no_grad()
def gather_state_dict(state: object, keep: bool) -> object:
    """A state dict of a network or optimizer with its sharded tensors gathered on the CPU; without `keep`, None in their place.

    Every process must call it. Tensors are gathered one at a time, so that a device needs room for one only.
    torch.distributed.checkpoint.state_dict does the same, but renames the states of the optimizer.
    """
    if isinstance(state, dict):
        return {key: gather_state_dict(value, keep) for key, value in state.items()}
    if isinstance(state, list):
        return [gather_state_dict(value, keep) for value in state]
    if not hasattr(state, "full_tensor"):
        return state
    full = state.full_tensor()
    return full.cpu() if keep else None
