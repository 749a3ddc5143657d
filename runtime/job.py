"""The job that this process runs: its arguments, and the launcher that started the process."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

log = logging.getLogger(__name__)


def job_overrides() -> list[str]:
    """Return the arguments of the job that Hydra runs, with their interpolations as the user wrote them.

    Commands without Hydra, such as prepare_latents.py, have none.
    """
    if not HydraConfig.initialized():
        return []
    return OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)


def is_sweep() -> bool:
    """Return whether the job is one of a sweep of Hydra (-m)."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def command_of_run() -> list[str]:
    """Return the command line of this process. In a sweep of Hydra, it is the command of this run alone."""
    if is_sweep():
        return ["python", f"{HydraConfig.get().job.name}.py", *job_overrides()]
    return ["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]


def was_launched_with_others() -> bool:
    """Return whether a launcher started this process together with others."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def submitit_executor() -> str | None:
    """Return how submitit started this process, such as `slurm` or `local`, or None in any other process."""
    return os.environ.get("SUBMITIT_EXECUTOR")


def prepare_job() -> None:
    """Set the environment of a job that a launcher of Hydra started: torch's variables for submitit, one GPU for joblib."""
    if submitit_executor() and "RANK" not in os.environ:
        import submitit  # an optional package, which must be there in its own job

        if submitit.JobEnvironment().num_tasks > 1:
            # accelerate chooses the GPU by LOCAL_RANK, so every process must see all GPUs of its node.
            submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
    elif (worker := joblib_worker()) is not None:
        choose_gpu(worker)


def joblib_worker() -> int | None:
    """Return the number of this process among the workers of a joblib sweep, from 1, or None in any other process."""
    name, _, number = multiprocessing.current_process().name.partition("-")
    # A process that multiprocessing has started, such as LokyProcess-3, names its own workers LokyProcess-3:1.
    return int(number.rpartition(":")[2]) if name == "LokyProcess" else None


@functools.cache  # for all jobs of the worker
def choose_gpu(worker: int) -> None:
    """Let this process, a worker of a joblib sweep, use only one GPU. Workers with consecutive numbers use different GPUs."""
    import torch  # here, because --help and errors in keys do not need it
    from accelerate.utils import parse_flag_from_env

    num_gpus = torch.cuda.device_count()  # does not initialise CUDA, which would ignore later changes of the environment
    if num_gpus == 0 or parse_flag_from_env("ACCELERATE_USE_CPU"):
        return
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(num_gpus)))).split(",")[:num_gpus]
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu = gpus[worker % num_gpus]
    # joblib replaces a worker that ended by one with a higher number.
    shared = f", maybe with another worker, for example if hydra.launcher.n_jobs is above {num_gpus}" if worker > num_gpus else ""
    log.info("this worker uses GPU %s%s", gpu, shared)
