"""Set up accelerate with one GPU per process, and choose the number of CPU threads and the CUDA kernels."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, is_initialized
from accelerate.utils import InitProcessGroupKwargs

from common.errors import UserError, first_line
from common.progress import log_if_slow, log_to_stderr
from configs.schema import Machine
from runtime import processes
from runtime.job import job_overrides, prepare_job, submitit_executor
from runtime.launch_checks import check_accelerate_settings, check_gpus, warn_about_launch

log = logging.getLogger(__name__)

# Timeout of collectives: long enough for compilation and loading, and short enough to end an NCCL hang, which idles all GPUs.
# While one process works alone, the other processes wait in runtime/processes.py, which has its own timeout.
COLLECTIVE_TIMEOUT = timedelta(minutes=20)
# torch's elastic launcher sets TORCHELASTIC_RUN_ID. accelerate's launcher for one process sets ACCELERATE_DYNAMO_BACKEND.
LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND")


def start_accelerator(
    cpu_threads: int | None, *, tf32: bool = True, precision: str = "fp32", timeout: timedelta = COLLECTIVE_TIMEOUT, **kwargs
) -> Accelerator:
    """Start accelerate, and choose this process's CPU threads and kernels. Processes other than the main one log only errors.

    `precision` (`fp32` or `bf16`) applies to the networks that accelerate prepares. After `timeout`, a collective fails.
    accelerate receives `kwargs`.
    """
    prepare_process()
    check_accelerate_settings(precision)
    check_gpus()
    # Counted before accelerate, which may bind the process to the cores of its GPU.
    num_cores, num_visible = cores_per_process(), visible_cores()
    accelerator = connect_accelerator(precision, timeout, **kwargs)
    log_to_stderr()
    if not accelerator.is_main_process:
        logging.getLogger().setLevel(logging.ERROR)
    warn_about_launch(num_visible)
    choose_threads(cpu_threads, num_cores)
    choose_kernels(accelerator.device, tf32)
    return accelerator


def prepare_process() -> None:
    """Do what must come before torch connects this process to others, and set the environment of a job of a sweep."""
    if torch.distributed.is_available():
        # Import torch.distributed.nn.functional before a process group exists. If AdamW imports the module later, its default
        # arguments keep the process group alive forever. gloo's threads can then abort the process when it exits.
        importlib.import_module("torch.distributed.nn.functional")
    prepare_job()


def connect_accelerator(precision: str, timeout: timedelta, **kwargs) -> Accelerator:
    """Start accelerate, which connects this process with the others, and check that all of them run the same job."""
    # In a sweep, reset the accelerate state from the previous run. The processes stay connected.
    if is_initialized():
        gc.collect()  # free the previous run's networks, which reference cycles keep alive
    AcceleratorState._reset_state()
    GradientState._reset_state()
    # accelerate must not compile networks, because runtime/compilation.py compiles the blocks.
    kwargs |= {"mixed_precision": "no" if precision == "fp32" else precision, "dynamo_backend": "no"}
    with reporting_connection(timeout):
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)], **kwargs)
    processes.init_gloo_group(accelerator.num_processes, max(timeout, processes.WAIT_TIMEOUT))
    processes.check_same_job(job_overrides())
    return accelerator


@contextlib.contextmanager
def reporting_connection(timeout: timedelta) -> Iterator[None]:
    """While the `with` block waits for other processes, log what it waits for. Raises UserError if they cannot be reached.

    Variables of a launcher that has ended, such as WORLD_SIZE in a shell, make a single process wait for others.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size in ("", "1"):
        yield
        return
    where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    rank = os.environ.get("RANK", "?")
    slow = {} if rank == "0" else {"after_sec": 30.0, "log_level": logging.ERROR}  # other processes log only errors
    waiting = f"process {rank} waits for all WORLD_SIZE={size} processes at {where}"
    hint = "to start without a launcher, unset WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
    try:
        with log_if_slow(log, "%s, for at most %d minutes; %s", waiting, timeout / timedelta(minutes=1), hint, **slow):
            yield
    except (torch.distributed.DistError, ValueError) as e:  # ValueError: a variable is missing or not a number
        if torch.distributed.is_initialized():  # the processes are connected, so it is another error of accelerate
            raise
        raise UserError(f"{waiting}: {first_line(e)}; {hint}") from e


def apply_machine_settings(machine: Machine, device: torch.device) -> None:
    """Use the settings of the group machine that a command has taken from a run, after `start_accelerator`."""
    if machine.cpu_threads is not None:
        torch.set_num_threads(machine.cpu_threads)
    choose_kernels(device, machine.tf32)


def choose_threads(cpu_threads: int | None, num_cores: int) -> None:
    """Set the number of CPU threads of torch, by default the cores of this process, and of processes of its compiler."""
    # `accelerate launch` sets OMP_NUM_THREADS=1, which would leave the other cores idle in evaluations.
    torch.set_num_threads(cpu_threads or num_cores)
    # By default, torch's compiler starts up to 32 processes per GPU.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(8, num_cores)))


def choose_kernels(device: torch.device, tf32: bool) -> None:
    """On CUDA, allow or forbid TF32 (10 mantissa bits) in float32 products and convolutions. Disable a faulty attention kernel.

    torch 2.15 warns that before cuDNN 9.26, its attention can return NaN gradients on an H100 if the key count is 64 modulo 128.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        is_sound = (torch.backends.cudnn.version() or 0) >= 92600
        torch.backends.cuda.enable_cudnn_sdp(is_sound)
        torch.compiler.config.cache_key_tag = f"cudnn_sdp={is_sound}"  # without a tag, torch's graph cache ignores this choice


def visible_cores() -> int:
    """Return the number of CPU cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_per_process() -> int:
    """Return OMP_NUM_THREADS if the user set it. Otherwise divide the number of cores by the number of processes on this node.

    In submitit's jobs on Slurm, each process is a task with cores of its own.
    """
    num_threads = os.environ.get("OMP_NUM_THREADS", "")
    if num_threads.isdecimal() and int(num_threads) > 0 and not any(name in os.environ for name in LAUNCHER_VARIABLES):
        return int(num_threads)
    num_cores = visible_cores()
    cpus_per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    # Slurm may have bound the process to its own cores.
    if submitit_executor() == "slurm" and cpus_per_task.isdecimal():
        return max(1, min(num_cores, int(cpus_per_task)))
    return max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
