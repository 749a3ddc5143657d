"""Compile blocks, checkpoint their activations, and check that the machine supports the settings.

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
        what: `none`, or `blocks`, which stores only the input of each block. Steps then take about a third longer.
    """
    if what == "blocks":
        for block in net.blocks:  # nothing in a block is random
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def resolve_compile(mode: str, device: torch.device) -> str:
    """Resolve `auto`: `blocks` on CUDA if torch.compile finds what it needs, otherwise `none`. Other modes are unchanged."""
    if mode != "auto":
        return mode
    # Triton compiles C code on this machine to launch its kernels.
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    can_compile = importlib.util.find_spec("triton") and compiler and headers.exists()
    return "blocks" if device.type == "cuda" and can_compile else "none"


def compile_network(net: dit.DiT, mode: str) -> None:
    """With mode `blocks`, compile every block. Blocks that see the same number of tokens share the compiled code.

    Call this before `checkpoint_activations`.
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
    """Check train.precision and train.compile before any slow work. Raises UserError if they do not fit the machine."""
    check_compile("train.compile", train.compile, device)
    if train.activation_memory_budget < 1 and resolve_compile(train.compile, device) == "none":
        raise UserError(f"train.activation_memory_budget={train.activation_memory_budget} needs train.compile=blocks")
    if device.type == "cuda" and train.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"train.precision=bf16: {torch.cuda.get_device_name(device)} has no bfloat16; use train.precision=fp32")


def check_compile(key: str, mode: str, device: torch.device) -> None:
    """Log that compilation takes a while, or warn if `auto` cannot compile on this GPU. `key` is named in the message."""
    if resolve_compile(mode, device) == "blocks":
        log.info("%s=%s: the first step takes about a minute longer, once", key, mode)
    elif mode == "auto" and device.type == "cuda":
        needs = "torch.compile needs triton, a C compiler (gcc) and Python's C headers (python3-dev)"
        log.warning("%s=auto does not compile, so steps are slower: %s", key, needs)
