"""Check how this process was launched, and warn about what the launcher was told in vain or left out."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from accelerate.utils import parse_flag_from_env

from common.errors import UserError
from runtime.job import submitit_executor

log = logging.getLogger(__name__)

NVIDIA_DEVICE = Path("/dev/nvidiactl")  # exists on Linux if the NVIDIA driver is loaded


def check_accelerate_settings(precision: str) -> None:
    """Warn about settings of `accelerate launch` and its configuration file that this project has keys for, and ignores.

    Raises UserError if accelerate would divide the network among processes.
    """
    ours = {
        "MIXED_PRECISION": ("train.precision or sampling.precision", ("no", precision)),
        "GRADIENT_ACCUMULATION_STEPS": ("train.grad_accum_steps", ("1",)),
        "DYNAMO_BACKEND": ("machine.compile", ("no",)),
    }
    for name, (key, agreeing) in ours.items():
        if (given := os.environ.get(f"ACCELERATE_{name}", agreeing[0]).lower()) not in agreeing:
            log.warning("accelerate's %s=%s has no effect: %s counts", name.lower(), given, key)
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise UserError(f"accelerate was launched with {name}, but this project supports only DDP; launch it without")


def check_gpus() -> None:
    """Raise UserError if torch cannot use this machine's NVIDIA GPU, because accelerate would silently use the CPU."""
    hides = submitit_executor() == "local" and os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if hides and torch.version.cuda and NVIDIA_DEVICE.exists() and not parse_flag_from_env("ACCELERATE_USE_CPU"):
        remedy = "set hydra.launcher.gpus_per_node, or ACCELERATE_USE_CPU=true to use the CPU"
        raise UserError(f"hydra/launcher=submitit_local hides all GPUs by default; {remedy}")
    # Slurm sets CUDA_VISIBLE_DEVICES=NoDevFiles in jobs without a GPU.
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles") or parse_flag_from_env("ACCELERATE_USE_CPU")
    if torch.version.cuda and not is_hidden and not torch.cuda.is_available() and NVIDIA_DEVICE.exists():
        raise UserError(
            f"torch {torch.__version__} cannot use this machine's NVIDIA GPU: update the driver for CUDA {torch.version.cuda}, "
            "install a torch for an older CUDA, or set ACCELERATE_USE_CPU=true to use the CPU"
        )


def warn_about_launch(num_visible: int) -> None:
    """Warn if a launcher started fewer processes, or gives this process fewer cores, than the user asked for.

    Also warn if srun started several tasks that do not know of each other, which can be meant.

    Args:
        num_visible: The number of CPU cores on which this process may run.
    """
    # accelerate's launcher for a single process sets MASTER_PORT only if the user asked for several processes.
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        log.warning("accelerate launch started only one process; to start several on a CPU, add --multi_gpu")
    num_tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    if num_tasks.isdecimal() and int(num_tasks) > 1 and "RANK" not in os.environ:
        remedy = "for a common run, set RANK, LOCAL_RANK and WORLD_SIZE as docs/speed_and_clusters.md does"
        log.warning("srun started %s tasks, and each of them works alone: %s", num_tasks, remedy)
    asked = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if asked.isdecimal() and int(asked) > num_visible:  # srun may not pass --cpus-per-task on
        remedy = "give srun --cpus-per-task, or export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK in the job's script"
        log.warning("this task has %d of the %s CPU cores in --cpus-per-task: %s", num_visible, asked, remedy)
