"""What Hydra's optional launchers, joblib and submitit, and its searchers, such as Optuna, need of the jobs of a sweep."""

from __future__ import annotations

import math
import os

from omegaconf import DictConfig

from common.errors import UserError
from common.files import REPOSITORY
from configs.schema import TrainConfig
from configs.settings import Settings
from runtime.job import submitit_executor, was_launched_with_others

SEARCHERS = {"optuna", "ax", "nevergrad"}  # Hydra's sweepers that minimise what a job returns


def check_hydra_launcher(hydra_cfg: DictConfig, is_sweep: bool) -> None:
    """Raise UserError if a launcher of Hydra starts no jobs, or if another launcher started the processes."""
    launcher = hydra_cfg.runtime.choices["hydra/launcher"]
    if launcher != "basic" and not is_sweep:
        raise UserError(f"hydra/launcher={launcher} starts jobs only with -m, and without it, this shell would do the work")
    if was_launched_with_others() and launcher != "basic":
        raise UserError(f"hydra/launcher={launcher} starts the processes itself; start the sweep with python")


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


def logs_of_job() -> str:
    """Return the folder of the logs of a submitit job, as the end of an error message, or no text in any other process."""
    if not submitit_executor():
        return ""
    import submitit  # an optional package, which must be there in its own job

    return f" (logs: {submitit.JobEnvironment().paths.folder})"
