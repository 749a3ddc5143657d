"""Compilation and activation checkpointing of blocks, and checks that the machine supports the settings.

Nothing here changes names or values of parameters. Results change by rounding only.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

import dit
from common.errors import UserError

log = logging.getLogger(__name__)


def checkpoint_activations(net: dit.DiT, what: str) -> None:
    """Recompute activations in the backward to save memory.

    Args:
        what: `none`, or `blocks`: store only each block's input; steps take about a third longer.
    """
    if what == "blocks":
        for block in net.blocks:  # nothing in a block is random
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def resolve_compile(mode: str, device: torch.device) -> str:
    """`none` or `blocks`; `auto` is `blocks` on CUDA where its compilers are installed, and `none` elsewhere."""
    if mode != "auto":
        return mode
    return "blocks" if device.type == "cuda" and not _missing_for_triton() else "none"


def compile_network(net: dit.DiT, mode: str) -> None:
    """torch.compile every block: once for all blocks that see the same number of tokens. Call it before `checkpoint_activations`.

    Args:
        mode: `none` or `blocks`.
    """
    if mode == "none":
        return
    # All networks of a process share the compiled variants of DiTBlock.forward: dense, routed and float32 in training, and one
    # for each batch size in sampling (ImageSampler pads smaller batches). More than the default limit of 8 is an error.
    torch._dynamo.config.recompile_limit = 64
    # DDP would split blocks where its buckets end, which undoes kernel fusion. Whole blocks are small enough to overlap.
    torch._dynamo.config.optimize_ddp = False
    for block in net.blocks:
        block.forward = torch.compile(block.forward, dynamic=False, fullgraph=True)


def check_machine(train, device: torch.device) -> None:
    """Check train.precision and train.compile before any slow work. Raises UserError if the machine cannot do it."""
    check_compile("train.compile", train.compile, device)
    if train.activation_memory_budget < 1 and resolve_compile(train.compile, device) == "none":
        raise UserError(f"train.activation_memory_budget={train.activation_memory_budget} needs train.compile=blocks")
    if device.type == "cuda" and train.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"train.precision=bf16: {torch.cuda.get_device_name(device)} has no bfloat16; use train.precision=fp32")


def check_compile(key: str, mode: str, device: torch.device) -> None:
    """Log that compilation takes a while, or warn if `auto` would compile but cannot.

    Raises UserError if `blocks` needs a compiler that is not installed; `key` is named in the message.
    """
    missing = _missing_for_triton() if device.type == "cuda" else None
    if mode == "auto" and missing:
        log.warning("%s=auto does not compile, so steps are slower: torch.compile needs %s", key, missing)
    if resolve_compile(mode, device) == "none":
        return
    if device.type == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        missing = "a C++ compiler, which is not installed; install g++"
    if missing:
        raise UserError(f"{key}={mode} needs {missing}, or use {key}=none")
    log.info("%s=%s: the first step takes about a minute longer, once", key, mode)


def _missing_for_triton() -> str | None:
    """What torch.compile lacks on a GPU, in words. Triton compiles C code on this machine to launch its kernels."""
    if importlib.util.find_spec("triton") is None:
        return "triton, which is not installed; install it (pip install triton)"
    if not (shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")):
        return "a C compiler, which is not installed; install gcc"
    if not Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists():
        return "Python's C headers, which are not installed; install python3-dev"
    return None
