"""Work with Hydra's optional launchers, joblib and submitit, and with its searchers, such as Optuna."""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import os

from omegaconf import DictConfig

from common.errors import UserError
from common.files import REPOSITORY
from configs.schema import TrainConfig
from configs.settings import Settings

log = logging.getLogger(__name__)

SEARCHERS = {"optuna", "ax", "nevergrad"}  # Hydra's sweepers that minimise what a job returns


def check_hydra_launcher(hydra_cfg: DictConfig, is_sweep: bool) -> None:
    """Raise UserError if a launcher of Hydra starts no jobs, or if another launcher started the processes."""
    launcher = hydra_cfg.runtime.choices["hydra/launcher"]
    if launcher != "basic" and not is_sweep:
        raise UserError(f"hydra/launcher={launcher} starts jobs only with -m, and without it, this shell would do the work")
    if was_launched_with_others() and launcher != "basic":
        raise UserError(f"hydra/launcher={launcher} starts the processes itself; start the sweep with python")


def was_launched_with_others() -> bool:
    """Return whether a launcher started this process together with others."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_plain_sweep(hydra_cfg: DictConfig) -> bool:
    """Return whether this process runs the jobs of a sweep itself, one after another, and none is chosen by a search."""
    choices = hydra_cfg.runtime.choices
    return choices["hydra/launcher"] == "basic" and choices["hydra/sweeper"] == "basic"


def searcher_of(hydra_cfg: DictConfig) -> str | None:
    """Return the sweeper of a sweep if it searches for the lowest metric."""
    return next((name for name in SEARCHERS if f".hydra_{name}" in hydra_cfg.sweeper._target_), None)


def check_search(hydra_cfg: DictConfig, settings: Settings) -> None:
    """Raise UserError if a search would get no metric from its training runs."""
    if searcher_of(hydra_cfg) and isinstance(settings, TrainConfig) and not settings.is_evaluated:
        remedy = "set evaluation.every and evaluation.reference"
        raise UserError(f"a search needs a metric, but the runs have no evaluations; {remedy}")


def worst_metric(hydra_cfg: DictConfig) -> float | None:
    """Return the metric of a run that diverged, with which a search avoids its settings, or None if it is an error."""
    if searcher_of(hydra_cfg) not in ("optuna", "nevergrad"):  # Ax's model needs finite metrics
        return None
    return -math.inf if "max" in str(hydra_cfg.sweeper.get("direction")).lower() else math.inf


def python_path() -> str:
    """Return PYTHONPATH with this repository, in which the jobs of submitit find our modules from any folder."""
    return os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))


def submitit_executor() -> str | None:
    """Return how submitit started this process, such as `slurm` or `local`, or None in any other process."""
    return os.environ.get("SUBMITIT_EXECUTOR")


def logs_of_job() -> str:
    """Return the folder of the logs of a submitit job, as the end of an error message, or no text in any other process."""
    if not submitit_executor():
        return ""
    import submitit  # an optional package, which must be there in its own job

    return f" (logs: {submitit.JobEnvironment().paths.folder})"


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
