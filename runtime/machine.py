"""Start a command on a machine: set up accelerate, one GPU per process, CPU threads and kernels."""

from __future__ import annotations

import gc
import importlib
import logging
import os
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, is_initialized
from accelerate.utils import InitProcessGroupKwargs, parse_flag_from_env

from common.errors import UserError
from common.progress import log_to_stderr
from runtime import processes

log = logging.getLogger(__name__)

# Timeout of a collective: long enough for a process that compiles or loads slowly, short enough to end a hang of NCCL, in which
# all GPUs idle. While one process works alone, the others wait in runtime/processes.py, which has its own timeout.
EXCHANGE_TIMEOUT = timedelta(minutes=20)
# Set by torch's elastic launcher, and by accelerate's for one process.
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND")
NVIDIA_DEVICE = Path("/dev/nvidiactl")  # on Linux, wherever the driver is loaded


def start_accelerator(
    cpu_threads: int | None, *, tf32: bool = True, precision: str = "fp32", timeout: timedelta = EXCHANGE_TIMEOUT, **settings
) -> Accelerator:
    """Start accelerate, and set this process's share of the cores, its kernels, and messages from the main process only.

    Args:
        precision: `fp32` or `bf16`, for the networks that accelerate prepares.
        timeout: a process that waits this long in a collective ends with an error.
    """
    if torch.distributed.is_available():
        # Import it before there is a process group. AdamW would import it later, and the default arguments of its functions would
        # keep the current group alive forever; gloo's threads can then abort the process at its end.
        importlib.import_module("torch.distributed.nn.functional")
    check_gpus()
    # In a sweep, reset what the previous run left; the processes stay connected.
    if is_initialized():
        gc.collect()  # the networks of that run are in reference cycles
    AcceleratorState._reset_state()
    GradientState._reset_state()
    # accelerate must not compile: runtime/compilation.py does.
    settings |= {"mixed_precision": "no" if precision == "fp32" else precision, "dynamo_backend": "no"}
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)], **settings)
    processes.connect()
    log_to_stderr()
    # The launcher for one process sets the port only if the user asked for several processes.
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        log.warning("accelerate launch started one process although it was asked for several; on a CPU, add --multi_gpu")
    if not accelerator.is_main_process:
        logging.getLogger().setLevel(logging.ERROR)
    # `accelerate launch` sets OMP_NUM_THREADS=1, which would leave the other cores idle in evaluations.
    torch.set_num_threads(cpu_threads or cores_per_process())
    # torch's compiler would start up to 32 processes for each GPU.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(8, cores_per_process())))
    choose_kernels(accelerator.device, tf32)
    return accelerator


def check_gpus() -> None:
    """Raises UserError if torch cannot use this machine's NVIDIA GPU. Otherwise accelerate would silently use the CPU."""
    # Slurm sets NoDevFiles in a job without a GPU.
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles") or parse_flag_from_env("ACCELERATE_USE_CPU")
    if torch.version.cuda and not is_hidden and not torch.cuda.is_available() and NVIDIA_DEVICE.exists():
        raise UserError(
            f"torch {torch.__version__} cannot use this machine's NVIDIA GPU: update the driver for CUDA {torch.version.cuda}, "
            "install a torch for an older CUDA, or set ACCELERATE_USE_CPU=true to use the CPU"
        )


def choose_kernels(device: torch.device, tf32: bool) -> None:
    """On CUDA, allow TF32 (10 bits of mantissa) for float32 products and convolutions, or forbid it; avoid a faulty attention.

    On an H100, torch prefers cuDNN's attention. Before 9.26, its backward can give NaN if the number of keys is 64 modulo 128.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        is_sound = (torch.backends.cudnn.version() or 0) >= 92600
        torch.backends.cuda.enable_cudnn_sdp(is_sound)
        torch.compiler.config.cache_key_tag = f"cudnn_sdp={is_sound}"  # torch's cache of compiled graphs ignores this choice


def cores_per_process() -> int:
    """Return OMP_NUM_THREADS if the user has set it. Otherwise divide the cores by the number of processes on this node."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0 and not any(name in os.environ for name in LAUNCHERS):
        return int(given)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
