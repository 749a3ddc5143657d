"""Load a checkpoint's network."""

from __future__ import annotations

import gc
from functools import lru_cache

import torch

from checkpoints import store
from checkpoints.checkpoint import Checkpoint
from common.interfaces import WeightAverage
from dit import DiT
from runtime.compilation import compile_network, resolve_compile


@lru_cache(maxsize=2)  # sweeps reuse networks
def load_network(checkpoint: Checkpoint, weights: str | WeightAverage, device: torch.device, compile_mode: str = "none") -> DiT:
    """Load a checkpoint's network in evaluation mode.

    Args:
        weights: `ema` or `raw` for weights that the checkpoint stores, or an average of several checkpoints.
        compile_mode: Compilation mode (see `runtime.compilation.resolve_compile`).
    """
    gc.collect()  # compiled networks contain reference cycles, which would keep earlier networks on the device
    stored = store.load_weights(checkpoint.path, weights) if weights in store.WEIGHTS else weights.load()
    with torch.device("meta"):  # skip the random initialization
        net = checkpoint.config.model.build(checkpoint.config.data).eval().requires_grad_(False)
    store.check_tensors(checkpoint.path / store.WEIGHTS.get(weights, ""), stored, net.state_dict())
    net.to_empty(device=device).load_state_dict(stored)
    compile_network(net, resolve_compile(compile_mode, device))
    return net
