"""What Hydra's optional launchers, joblib and submitit, and its searchers, such as Optuna, need of the jobs of a sweep."""

from __future__ import annotations

import math
import os

from hydra.core.hydra_config import HydraConfig

from common.errors import UserError
from common.files import REPOSITORY
from configs.schema import TrainConfig
from configs.settings import Settings
from runtime.job import is_sweep, submitit_executor, was_launched_with_others

SEARCHERS = {"optuna", "ax", "nevergrad"}  # Hydra's sweepers that minimise what a job returns


def hydra_launcher() -> str:
    """Return the launcher of Hydra that starts the jobs. With `basic`, this process runs them itself, one after another."""
    return HydraConfig.get().runtime.choices["hydra/launcher"]


def check_hydra_launcher() -> None:
    """Raise UserError if a launcher of Hydra starts no jobs, or if another launcher started the processes."""
    launcher = hydra_launcher()
    if launcher != "basic" and not is_sweep():
        raise UserError(f"hydra/launcher={launcher} starts jobs only with -m, and without it, this shell would do the work")
    if was_launched_with_others() and launcher != "basic":
        raise UserError(f"hydra/launcher={launcher} starts the processes itself; start the sweep with python")


def passes_errors_on() -> bool:
    """Return whether Hydra passes the error of a job on, to the process of the sweep or to a search."""
    return is_sweep() and (hydra_launcher(), HydraConfig.get().runtime.choices["hydra/sweeper"]) != ("basic", "basic")


def searcher() -> str | None:
    """Return the sweeper of a sweep if it searches for the lowest metric."""
    return next((name for name in SEARCHERS if is_sweep() and f".hydra_{name}" in HydraConfig.get().sweeper._target_), None)


def check_search(settings: Settings) -> None:
    """Raise UserError if a search would get no metric from its training runs."""
    if searcher() and isinstance(settings, TrainConfig) and not settings.is_evaluated:
        remedy = "set evaluation.every and evaluation.reference"
        raise UserError(f"a search needs a metric, but the runs have no evaluations; {remedy}")


def worst_metric() -> float | None:
    """Return the metric of a run that diverged, with which a search avoids its settings, or None if it is an error."""
    if searcher() not in ("optuna", "nevergrad"):  # Ax's model needs finite metrics
        return None
    return -math.inf if "max" in str(HydraConfig.get().sweeper.get("direction")).lower() else math.inf


def python_path() -> str:
    """Return PYTHONPATH with this repository, in which the jobs of submitit find our modules from any folder."""
    return os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))


def logs_of_job() -> str:
    """Return the folder of the logs of a submitit job, as the end of an error message, or no text in any other process."""
    if not submitit_executor():
        return ""
    import submitit  # an optional package, which must be there in its own job

    return f" (logs: {submitit.JobEnvironment().paths.folder})"
