"""What the training step does to be fast, and what of it the machine at hand can do.

Parameter names and the values of parameters stay; what is computed stays the same up to rounding.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import math
import os
import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import dit
from errors import UserError

# train.precision: what accelerate calls it. fp8 is bf16 with other products in the blocks.
MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp8": "bf16"}
# train.attention: what torch calls the kernel. `auto` leaves the choice to torch.
ATTENTION_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FP8_CAPABILITY = (8, 9)  # Ada and Hopper are the first to multiply float8

# The results that `selective` keeps: matrix products and attention, which are slow to compute again. The rest (norms,
# modulation, activations) is most of the memory and little of the time.
_KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def checkpoint_activations(net: dit.DiT, what: str) -> None:
    """Have the backward compute again what the forward then need not keep.

    Args:
        what: `none`; `blocks` keeps the input of every block alone, for about a third more time; `selective` keeps matrix
            products and attention too (with compile=blocks, which hides them, it is the same as `blocks`).
    """
    if what == "none":
        return
    # Nothing in a block is random, so that there is no generator to rewind.
    settings = {"use_reentrant": False, "preserve_rng_state": False}
    if what == "selective":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(_KEPT))
    for block in net.blocks:
        block.forward = _checkpointed(block.forward, settings)


def _checkpointed(forward: Callable[..., Tensor], settings: dict) -> Callable[..., Tensor]:
    def checkpointed_forward(x: Tensor, c: Tensor) -> Tensor:
        return checkpoint(forward, x, c, **settings)

    return checkpointed_forward


def compile_network(net: dit.DiT, mode: str) -> None:
    """torch.compile, for the shapes of this run alone. It comes before `checkpoint_activations`.

    Args:
        mode: `none`; `blocks` compiles a block once for all that see as many tokens, soon done; any other is torch.compile's
            own, for the network as a whole.
    """
    if mode != "none":
        use_sigmoid_gelu(net)
    if mode == "blocks":
        for block in net.blocks:
            block.forward = torch.compile(block.forward, dynamic=False, fullgraph=True)
    elif mode != "none":
        net.compile(mode=mode, dynamic=False)


def attention_kernel(name: str) -> contextlib.AbstractContextManager:
    """A context in which attention prefers this kernel; for tensors that it does not know, float32 say, torch chooses another."""
    if name == "auto":
        return contextlib.nullcontext()
    if name == "math":
        return sdpa_kernel(SDPBackend.MATH)  # it knows all tensors; and a CPU has an order of its own
    others = [kernel for kernel in ATTENTION_KERNELS.values() if kernel is not ATTENTION_KERNELS[name]]
    return sdpa_kernel([ATTENTION_KERNELS[name], *others], set_priority=True)


def use_float8(net: dit.DiT, *, emulate: bool = False) -> None:
    """Have the four linear layers of each block compute their products in float8, forward and backward.

    Weights stay as they are; inputs, weights and gradients are scaled by their largest element as they are cast (torchao's
    `tensorwise` recipe). The block after a route, which is to run in float32, keeps its layers, and so do the small
    modulation layers, for which casting costs more than the product.

    Args:
        emulate: multiply rounded numbers in float32, on hardware without float8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for i, block in enumerate(net.blocks):
        if i not in net.fp32_layers:
            for module in (block.attn, block.mlp):
                convert_to_float8_training(module, config=Float8LinearConfig(emulate=emulate))


# ----------------------------------------------------------------------------------------------------------------------
# What the machine can do.


def check_machine(train, net: dit.DiT, device: torch.device) -> None:
    """Precision, attention kernel and compilation of the run, before any slow work.

    Args:
        train: train.* of the configuration.

    Raises:
        UserError: the machine lacks what a key asks for; it names the key, and what there is.
    """
    _check_precision(train.precision, device)
    attn = net.blocks[0].attn
    _check_attention(train.attention, train.precision, attn.qkv.in_features // attn.num_heads, device)
    check_compile("train.compile", train.compile, device)
    if train.precision == "fp8" and train.compile == "none":
        raise UserError(
            "train.precision=fp8 is slower than bf16 unless casts and scales are compiled into the products; "
            "add train.compile=blocks, or use train.precision=bf16"
        )


def _check_precision(precision: str, device: torch.device) -> None:
    if device.type == "cuda" and precision != "fp32" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"train.precision={precision}: {_name(device)} has no bfloat16; use train.precision=fp32")
    if precision == "fp8":
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            raise UserError(
                f"train.precision=fp8 needs a GPU of compute capability {'.'.join(map(str, FP8_CAPABILITY))} or more (Ada, "
                f"Hopper or newer); this run is on {_name(device)}, which has fp32 and bf16"
            )
        if importlib.util.find_spec("torchao") is None:
            raise UserError("train.precision=fp8 needs torchao, which is not installed: pip install torchao")


def _check_attention(name: str, precision: str, head_width: int, device: torch.device) -> None:
    if name == "auto":
        return
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    usable = [kernel for kernel in ATTENTION_KERNELS if _runs(ATTENTION_KERNELS[kernel], head_width, dtype, device)]
    if name not in usable:
        raise UserError(
            f"train.attention={name} is not there for {dtype} and heads of {head_width} on {_name(device)}, "
            f"which has {', '.join(usable)}; or leave the choice to torch: train.attention=auto"
        )


def _runs(kernel: SDPBackend, head_width: int, dtype: torch.dtype, device: torch.device) -> bool:
    x = torch.zeros(1, 1, 64, head_width, dtype=dtype, device=device, requires_grad=True)
    try:
        # One kernel alone is an error where it is missing; torch warns of its reasons too, which nobody asked for.
        with sdpa_kernel(kernel), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaled_dot_product_attention(x, x, x)
    except RuntimeError:
        return False
    return True


def check_compile(key: str, mode: str, device: torch.device) -> None:
    """The compiler that a mode of `compile_network` needs.

    Raises:
        UserError: it is not there; `key` is the setting that the message names.
    """
    if mode == "none":
        return
    if mode == "reduce-overhead" and device.type != "cuda":
        raise UserError(f"{key}=reduce-overhead records CUDA graphs, and this run is on {_name(device)}; use blocks or default")
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UserError(f"{key}={mode} on a GPU needs triton, which is not installed; use {key}=none")
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as e:
            raise UserError(
                f"{key}={mode} on a CPU needs a C++ compiler, which is not installed; install g++, or use {key}=none"
            ) from e


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return f"the {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


# ----------------------------------------------------------------------------------------------------------------------
# The machine's cores and memory.


def use_cores(device: torch.device, cpu_threads: int | None) -> None:
    """Let a process that computes on the CPU use its share of the cores, and the same memory in every step.

    `accelerate launch` sets OMP_NUM_THREADS=1 unless told otherwise, which leaves the other cores idle.

    Args:
        cpu_threads: of this process; None: the machine's cores divided by the processes on it.
    """
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads or cores_per_process())
        keep_freed_memory()


def cores_per_process() -> int:
    """The machine's cores divided by the processes that accelerate started on it, at least 1."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def keep_freed_memory() -> None:
    """Have the C library hand freed memory to the next allocation instead of back to the system.

    Otherwise every large tensor of every step is mapped afresh, and the system clears it page by page: 4 to 12% of a step.
    Only glibc has this setting; elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_MMAP_MAX, 0)


# ----------------------------------------------------------------------------------------------------------------------
# GELU in compiled blocks on a CPU.


def use_sigmoid_gelu(net: dit.DiT) -> None:
    """Replace every tanh GELU of the blocks by one that is faster once it is compiled for a CPU. No parameter changes."""
    for module in list(net.blocks.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.GELU) and child.approximate == "tanh":
                setattr(module, name, SigmoidGELU())


class SigmoidGELU(nn.Module):
    """GELU in its tanh approximation, 0.5 x (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), written as x sigmoid(2u).

    Compiled for a CPU, it saves 6% (DiT-S/2, batch 8) to 11% (DiT-XS/2, batch 64) of a step's CPU time in float32; uncompiled
    it costs more than torch's GELU.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return gelu(x, approximate="tanh")
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * x * (1 + 0.044715 * x * x))
