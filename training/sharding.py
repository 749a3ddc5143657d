"""FSDP2: weights, gradients, AdamW's states and the averages, of which every process holds its own part.

Through torch's `fully_shard` and not through accelerate's plugin for it, which gives all units one precision (the block
after a route has its own), builds its device mesh without looking at the accelerator's device and knows no averages.

A sharded tensor is a DTensor, cut along its first dimension. torch.distributed.fsdp and .tensor are imported where they
are used: that takes seconds, which train.parallel=ddp need not wait for.
"""

from __future__ import annotations

import torch
from torch import Tensor

import dit


def shard(net: dit.DiT, device: torch.device, num_processes: int, precision: str) -> None:
    """Keep this process's part of every trained parameter, on `device`. Each block is a unit of communication, the rest is one.

    The weights are gathered before a unit computes, in the forward and again in the backward, and its gradients are averaged
    and cut as soon as they are there, while the backward of the unit before it goes on.

    It comes after `compile_network` and `checkpoint_activations`: the gathering is then outside of what is compiled or
    computed again.

    Args:
        net: with the same values on every process.
        num_processes: all of the run.
        precision: train.precision. The parts are float32, and autocast decides on the precision as it does without shards.
            With bf16, what a block gathers is rounded before it travels: its parameters are those of linear layers alone,
            which autocast would round to the same values, so that half of the communication gives the same numbers. Blocks
            after a route (net.fp32_layers) and all outside the blocks travel in float32. Gradients are averaged in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (num_processes,))
    in_bf16 = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for i, block in enumerate(net.blocks):
        rounded = precision == "bf16" and i not in net.fp32_layers
        # The last block is the first that the backward needs.
        keep_gathered = i == len(net.blocks) - 1
        policy = in_bf16 if rounded else MixedPrecisionPolicy()
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_gathered)
    # What is not trained (the positions) is small, and its first dimension, 1, cannot be cut: whole everywhere.
    fixed = {p for p in net.parameters() if not p.requires_grad}
    fully_shard(net, mesh=mesh, ignored_params=fixed)
    for p in fixed:
        p.data = p.data.to(device)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, any other as it is; memory is shared with it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def all_parts(tensor: Tensor) -> Tensor:
    """A sharded tensor whole, on its device; any other as it is. All processes have to call it, to send their parts."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part_like(whole: Tensor, tensor: Tensor) -> Tensor:
    """`whole`, which every process has, cut and placed like `tensor`; as it is, where that is not sharded."""
    if not hasattr(tensor, "to_local"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    # None: no process sends, each cuts its own. The part is a view, which would keep all of `whole` in memory.
    part = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    settings = {"run_check": False, "shape": part.shape, "stride": part.stride()}
    return DTensor.from_local(part.to_local().clone(), part.device_mesh, part.placements, **settings)


@torch.no_grad()
def gathered(state: object, keep: bool) -> object:
    """A state dict (of networks or optimisers) with every sharded tensor whole on the CPU; None in its place without `keep`.

    All processes have to call it. They gather one tensor after the other, so that none needs room for more than that one.
    torch.distributed.checkpoint.state_dict does the same, but names an optimiser's states otherwise than the optimiser.
    """
    if isinstance(state, dict):
        return {key: gathered(value, keep) for key, value in state.items()}
    if isinstance(state, list):
        return [gathered(value, keep) for value in state]
    if not hasattr(state, "full_tensor"):
        return state
    whole = all_parts(state)
    return whole.cpu() if keep else None
