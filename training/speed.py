"""What makes a training step fast, and whether the machine can do it.

Nothing here changes the names or values of parameters; results change by rounding only.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import shutil
import subprocess
import sysconfig
import warnings
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import dit
from common.errors import UserError

log = logging.getLogger(__name__)

# train.precision -> accelerate's name. fp8 is bf16 with float8 products in the blocks.
MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp8": "bf16"}
# train.attention -> torch's name. `auto` leaves the choice to torch.
ATTENTION_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # the modes of train.compile that record them on a GPU
FP8_CAPABILITY = (8, 9)  # Ada and Hopper are the first to multiply float8

# What `selective` keeps: matrix products and attention, which are slow to recompute. The rest (norms, modulation,
# activations) is most of the memory and little of the time.
SELECTIVELY_KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def checkpoint_activations(net: dit.DiT, what: str) -> None:
    """Recompute activations in the backward to save memory.

    Args:
        what: `none`; `blocks` keeps only the input of every block, for about a third more time; `selective` also keeps matrix
            products and attention (with compile=blocks, which hides them, it is the same as `blocks`).
    """
    if what == "none":
        return
    settings = {"use_reentrant": False, "preserve_rng_state": False}  # nothing in a block is random
    if what == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, SELECTIVELY_KEPT)
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, **settings)


def resolve_compile(mode: str, device: torch.device) -> str:
    """A mode of `compile_network`; `auto` is `blocks` on CUDA where its compilers are installed, and `none` elsewhere."""
    if mode != "auto":
        return mode
    return "blocks" if device.type == "cuda" and not _missing_for_triton() else "none"


def compile_network(net: dit.DiT, mode: str) -> None:
    """torch.compile for the shapes of this run. Call it before `checkpoint_activations`.

    Args:
        mode: `none`; `blocks` compiles once for all blocks that see the same number of tokens, which is quick; `segments`
            compiles each run of blocks between the ends of routes as one; any other is a mode of torch.compile, for the whole
            network. Not `auto`: see `resolve_compile`.
    """
    if mode == "none":
        return
    use_sigmoid_gelu(net)
    # All networks of a process compile DiTBlock.forward. Its variants are few: in training dense, routed and in float32; in
    # sampling one for each size of batch (ImageSampler fills up smaller ones). But 8 are soon reached, and more are an error.
    torch._dynamo.config.recompile_limit = 64
    # DDP's forward would cut what is compiled inside of it where its buckets of gradients end. Of a whole network that lets
    # communication overlap with the backward; blocks are small enough for that, and cuts only undo their fusion. This is a
    # setting of the process: the network that is trained, and compiled last, decides.
    torch._dynamo.config.optimize_ddp = mode not in ("blocks", "segments")
    if mode == "blocks":
        for block in net.blocks:
            block.forward = torch.compile(block.forward, dynamic=False, fullgraph=True)
    elif mode == "segments":
        net.run_blocks = torch.compile(net.run_blocks, dynamic=False, fullgraph=True)
    else:
        net.compile(mode=mode, dynamic=False)


def use_sigmoid_gelu(net: dit.DiT) -> None:
    """Compute every tanh GELU of the blocks by `sigmoid_gelu`."""
    for module in net.blocks.modules():
        if isinstance(module, nn.GELU) and module.approximate == "tanh":
            module.forward = sigmoid_gelu


def sigmoid_gelu(x: Tensor) -> Tensor:
    """GELU in its tanh approximation, 0.5 x (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), on CPUs as x sigmoid(2u).

    Compiled for a CPU, it saves 6% (DiT-S/2, batch 8) to 11% (DiT-XS/2, batch 64) of a step's CPU time in float32; uncompiled
    it costs more than torch's GELU.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return gelu(x, approximate="tanh")
    return x * torch.sigmoid(math.sqrt(8 / math.pi) * x * (1 + 0.044715 * x * x))


def attention_kernel(name: str) -> contextlib.AbstractContextManager:
    """A context in which attention prefers this kernel; torch takes another for tensors it does not support, such as float32."""
    if name == "auto":
        return contextlib.nullcontext()
    if name == "math":
        return sdpa_kernel(SDPBackend.MATH)  # it supports all tensors; and a CPU ignores the priority
    others = [kernel for kernel in ATTENTION_KERNELS.values() if kernel is not ATTENTION_KERNELS[name]]
    return sdpa_kernel([ATTENTION_KERNELS[name], *others], set_priority=True)


def use_float8(net: dit.DiT, *, emulate: bool = False) -> None:
    """Compute the products of the linear layers of each block's attention and MLP in float8, forward and backward.

    Weights stay float32. Inputs, weights and gradients are scaled by their largest element when they are cast (torchao's
    `tensorwise` recipe). Blocks after a route, which run in float32, are left out, and so are the small modulation layers,
    where a cast costs more than the product. So are layers with a side that is no multiple of 16, which float8 products need: the
    MLP of LightningDiT-L.

    Args:
        emulate: multiply rounded numbers in float32, on hardware without float8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for i, block in enumerate(net.blocks):
        if i not in net.fp32_layers:
            for module in (block.attn, block.mlp):
                config = Float8LinearConfig(emulate=emulate)
                convert_to_float8_training(module, module_filter_fn=lambda layer, _: fits_float8(layer), config=config)


def fits_float8(layer: nn.Linear) -> bool:
    return layer.in_features % 16 == layer.out_features % 16 == 0


# ----------------------------------------------------------------------------------------------------------------------
# What the machine can do.


def check_machine(train, net: dit.DiT, device: torch.device) -> None:
    """Check precision, attention kernel and compilation (train.* of the configuration) before any slow work.

    Raises UserError if the machine lacks what a key asks for, with the key and what the machine has.
    """
    precision, name, is_cuda = train.precision, train.attention, device.type == "cuda"
    mode = check_compile("train.compile", train.compile, device)
    if is_cuda and precision != "fp32" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"train.precision={precision}: {_describe(device)} has no bfloat16; use train.precision=fp32")
    if precision == "fp8":
        if not is_cuda or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            raise UserError(
                f"train.precision=fp8 needs a GPU of compute capability {'.'.join(map(str, FP8_CAPABILITY))} or more (Ada, "
                f"Hopper or newer); this run is on {_describe(device)}, which has fp32 and bf16"
            )
        if importlib.util.find_spec("torchao") is None:
            raise UserError("train.precision=fp8 needs torchao, which is not installed: pip install torchao")
        if mode == "none":
            raise UserError(
                "train.precision=fp8 is slower than bf16 unless casts and scales are compiled into the products; "
                "add train.compile=blocks, or use train.precision=bf16"
            )
    if name != "auto":
        attention = net.blocks[0].attn
        head_width = attention.qkv.in_features // attention.num_heads
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        x = torch.zeros(1, 1, 64, head_width, dtype=dtype, device=device, requires_grad=True)
        usable = [key for key, kernel in ATTENTION_KERNELS.items() if _can_run(kernel, x)]
        if name not in usable:
            raise UserError(
                f"train.attention={name} is not there for {dtype} and heads of {head_width} on {_describe(device)}, "
                f"which has {', '.join(usable)}; or leave the choice to torch: train.attention=auto"
            )
    if is_cuda and mode in CUDA_GRAPHS and train.grad_accum_steps > 1:
        raise UserError(
            f"train.compile={mode} records CUDA graphs, whose gradients the next micro-batch would overwrite, and "
            f"train.grad_accum_steps={train.grad_accum_steps}; use train.compile=max-autotune-no-cudagraphs or blocks, or "
            "train.grad_accum_steps=1"
        )


def _can_run(kernel: SDPBackend, x: Tensor) -> bool:
    try:
        # With one kernel allowed, torch raises if it cannot run. It also warns of the reasons, which would be noise.
        with sdpa_kernel(kernel), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scaled_dot_product_attention(x, x, x)
    except RuntimeError:
        return False
    return True


def check_compile(key: str, mode: str, device: torch.device) -> str:
    """`resolve_compile`, with a line about the wait, or a warning where `auto` would compile but cannot.

    Raises UserError if another mode needs a compiler that is not installed; `key` is named in the message.
    """
    missing = _missing_for_triton() if device.type == "cuda" else None
    if mode == "auto":
        if missing:
            log.warning("%s=auto compiles nothing, which makes steps slower: torch.compile needs %s", key, missing)
        mode = resolve_compile(mode, device)
    if mode == "none":
        return mode
    if mode == "reduce-overhead" and device.type != "cuda":
        raise UserError(
            f"{key}=reduce-overhead records CUDA graphs, and this run is on {_describe(device)}; use blocks or default"
        )
    if missing:
        raise UserError(f"{key}={mode} on a GPU needs {missing}, or use {key}=none")
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as e:
            raise UserError(
                f"{key}={mode} on a CPU needs a C++ compiler, which is not installed; install g++, or use {key}=none"
            ) from e
    log.info("%s=%s: the first step takes about a minute longer, once", key, mode)
    return mode


@cache
def _missing_for_triton() -> str | None:
    """What torch.compile lacks on a GPU, in words. Triton starts its kernels by C code that it compiles on this machine."""
    if importlib.util.find_spec("triton") is None:
        return "triton, which is not installed; install it (pip install triton)"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "a C compiler, which is not installed; install gcc"
    include = sysconfig.get_path("include", "posix_prefix")
    try:
        subprocess.run(
            [compiler, f"-I{include}", "-fsyntax-only", "-include", "Python.h", "-x", "c", os.devnull],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return f"Python's C headers, which {compiler} does not find; install them (python3-dev)"
    return None


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return f"the {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
