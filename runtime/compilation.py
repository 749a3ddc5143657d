"""Compile blocks, checkpoint their activations, and check that the machine supports the settings.

The functions in this module do not change parameter names or values. They change results only by rounding.
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
from configs.schema import TrainConfig

log = logging.getLogger(__name__)


def checkpoint_activations(net: dit.DiT, mode: str) -> None:
    """If `mode` is `blocks`, store only each block's input for the backward pass. A step computes a third more FLOPs.

    Call this function before `compile_network`, so that the compiled block contains the recomputation. Otherwise, Python would
    handle every stored tensor, and call the compiled block a second time in the backward pass.
    """
    if mode == "blocks":
        for block in net.blocks:  # blocks use no random numbers
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def resolve_compile(mode: str, device: torch.device) -> str:
    """Resolve `auto` to `blocks` if torch.compile can run on CUDA, otherwise to `none`. Return other modes unchanged.

    Raises UserError if the mode is `blocks`, and torch.compile cannot run.
    """
    if mode == "auto":
        return "blocks" if device.type == "cuda" and not missing_for_compile(device) else "none"
    if mode == "blocks" and (missing := missing_for_compile(device)):
        raise UserError(f"machine.compile=blocks needs {missing}; install it, or set machine.compile=none")
    return mode


def missing_for_compile(device: torch.device) -> str | None:
    """Return what torch.compile lacks on this machine, or None."""
    if device.type != "cuda":  # torch compiles C++ code (CXX is its variable, too)
        has_compiler = any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++")))
        return None if has_compiler else "a C++ compiler (g++)"
    # Triton needs a C compiler on this machine for the code that launches its kernels.
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    can_compile = importlib.util.find_spec("triton") and compiler and headers.exists()
    return None if can_compile else "triton, a C compiler (gcc) and Python's C headers (python3-dev)"


def compile_network(net: dit.DiT, mode: str) -> None:
    """Compile every block if `mode` is `blocks`. Blocks that receive the same number of tokens share their compiled code."""
    if mode == "none":
        return
    # All networks in a process share the compiled DiTBlock.forward variants. Training needs dense, routed and float32 variants.
    # Sampling needs one variant per batch size (ImageSampler pads smaller batches). The runs of a sweep may add many more, and
    # exceeding the limit (by default 8, and 256 for all variants together) is an error.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    # Dynamo would split blocks at DDP buckets and prevent kernel fusion. Complete blocks still overlap with communication.
    torch._dynamo.config.optimize_ddp = False
    for block in net.blocks:
        block.forward = torch.compile(block.forward, dynamic=False, fullgraph=True)


def why_no_cuda_graph(device: torch.device, num_processes: int) -> str | None:
    """Return why training steps cannot run as CUDA graphs (training/step_graph.py), or None if they can."""
    if device.type != "cuda":
        return "there is no GPU"
    if num_processes > 1:
        return "training runs in several processes"
    if os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1":
        return "TORCHINDUCTOR_CUDAGRAPHS=1 already captures each block"
    return None


def check_machine(cfg: TrainConfig, device: torch.device, num_processes: int) -> None:
    """Check compilation and precision settings before any slow work. Raises UserError if the machine does not support them."""
    train = cfg.train
    check_compile_mode(cfg.machine.compile, device)
    if train.cuda_graphs == "step" and (reason := why_no_cuda_graph(device, num_processes)):
        raise UserError(f"train.cuda_graphs=step: {reason}; set train.cuda_graphs=none")
    if train.activation_memory_budget < 1 and resolve_compile(cfg.machine.compile, device) == "none":
        raise UserError(f"train.activation_memory_budget={train.activation_memory_budget} needs machine.compile=blocks")
    if device.type == "cuda" and train.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"train.precision=bf16: {torch.cuda.get_device_name(device)} has no bfloat16; use train.precision=fp32")


def check_compile_mode(mode: str, device: torch.device) -> None:
    """Raise UserError if blocks cannot be compiled. Log that compiling slows the first step, or that `auto` does not compile."""
    if resolve_compile(mode, device) == "blocks":
        log.info("machine.compile=%s: the first step takes up to a minute longer, once", mode)
    elif mode == "auto" and device.type == "cuda":
        log.warning("machine.compile=auto does not compile, so steps are slower: it needs %s", missing_for_compile(device))
