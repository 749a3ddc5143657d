"""Let Hydra run the jobs of a command: a single one, or those of a sweep or a search (-m)."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import env_override
from hydra.types import RunMode
from omegaconf import DictConfig

from cli import hydra_launchers
from cli.compose import parse_config
from cli.hydra_errors import explain_hydra_error
from cli.hydra_setup import CONFIGS, quote_non_ascii
from cli.print_errors import FULL_ERRORS, disconnect_processes, run_and_print_errors, wants_tracebacks
from common.errors import Diverged, UserError, first_line
from common.progress import log_to_stderr
from configs.settings import S
from runtime.job import job_overrides, joblib_worker, submitit_executor, was_launched_with_others

log = logging.getLogger(__name__)


def run_hydra(main: Callable[[S], float | None], config_name: str, settings_class: type[S]) -> None:
    """Let Hydra run `main` once for each job of the command line, and print only the message of a user error.

    All errors of Hydra and of its plugins are user errors, because the errors of the jobs are kept and raised after Hydra has
    returned. If a job raised its error, Hydra would print a line about it, too, and would start no further batch of the sweep.

    Args:
        main: The command. It takes the validated settings, and returns the metric that sweepers minimise.
        config_name: The name of its file in configs/.
        settings_class: The class of its settings.
    """
    sys.argv[1:] = [word if word.startswith("-") else quote_non_ascii(word) for word in sys.argv[1:]]  # not --config-dir=...
    job_errors: list[Exception] = []  # of the jobs in this process
    full_errors = wants_tracebacks()  # here, because below, the variable is 1 for Hydra, which otherwise prints errors and exits

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)
    @functools.wraps(main)  # Hydra takes the job's name from the file of `main`
    def command(cfg: DictConfig) -> float | None:
        return run_job(main, cfg, settings_class, job_errors, full_errors)

    def run() -> None:
        try:
            with env_override({FULL_ERRORS: "1", "PYTHONPATH": hydra_launchers.python_path()}):
                command()
        except SystemExit as stop:  # after a signal
            if stop.code or not job_errors:
                raise
        except (UserError, BrokenPipeError):  # of a job in another process; the reader of --help has ended
            raise
        except Exception as error:
            raise UserError(explain_hydra_error(error, config_name)) from error
        if job_errors:
            raise job_errors[0]

    run_and_print_errors(run)


def run_job(
    main: Callable[[S], float | None], cfg: DictConfig, settings_class: type[S], job_errors: list[Exception], full_errors: bool
) -> float | None:
    """Validate the configuration that Hydra composed for one job, and call `main`. Return the metric that `main` returns.

    An error is added to `job_errors` for `run_hydra`. In a sweep, it ends only its job (`fail_in_sweep`), and `full_errors` logs
    the traceback of a user error, too. In processes of joblib and submitit, `job_errors` is a copy, so errors are also raised.
    """
    log_to_stderr()
    hydra_cfg = HydraConfig.get()
    is_sweep = hydra_cfg.mode == RunMode.MULTIRUN
    try:
        hydra_launchers.check_hydra_launcher(hydra_cfg, is_sweep)
        settings = parse_config(cfg, settings_class, job_overrides(), is_sweep=is_sweep)
        if is_sweep:
            hydra_launchers.check_search(hydra_cfg, settings)
        metric = main(settings)
        if submitit_executor():  # its process ends without `run_and_print_errors`
            disconnect_processes()
        return metric
    except SystemExit as stop:  # after a signal
        if stop.code == 0 and joblib_worker() is not None:
            sys.exit(1)  # the sweep's process gets this code, but maybe not the failure of another worker
        raise
    except Exception as error:  # noqa: BLE001 (run_hydra raises it again)
        if not is_sweep:
            job_errors.append(error)
            return None
        failure = log_failure(error, full_errors)
    # The error is gone here: its traceback would keep all memory of the run until the sweep ends.
    return fail_in_sweep(hydra_cfg, failure, job_errors)


def log_failure(error: Exception, full_errors: bool) -> UserError:
    """Log the error of a job of a sweep. Return an error of the same kind with the message, but without the traceback."""
    is_user_error = isinstance(error, UserError)
    reason = error if is_user_error else f"{type(error).__name__}: {first_line(error)}"
    message = f"a run of the sweep failed: {' '.join(job_overrides())}: {reason}"
    log.error("%s", message, exc_info=full_errors or not is_user_error)
    return (Diverged if isinstance(error, Diverged) else UserError)(f"{message}{hydra_launchers.logs_of_job()}")


def fail_in_sweep(hydra_cfg: DictConfig, failure: UserError, job_errors: list[Exception]) -> float | None:
    """End a failed job of a sweep (-m). An error that is kept goes to `job_errors`.

    | the job runs                                      | its failure                                                       |
    |---------------------------------------------------|-------------------------------------------------------------------|
    | in the process of a plain sweep                   | is kept, and ends the command after the last job                  |
    | in connected processes of accelerate              | ends the command: others may still be executing the failed run    |
    | in a process of joblib or submitit, or a search   | is raised: Hydra passes it to the process of the sweep            |
    | in a search by Optuna or Nevergrad, and diverged  | is the worst metric, so that the search avoids its settings       |
    """
    if isinstance(failure, Diverged) and (metric := hydra_launchers.worst_metric(hydra_cfg)) is not None:
        return metric
    if was_launched_with_others() and hydra_cfg.runtime.choices["hydra/launcher"] == "basic":
        sys.exit(1)
    job_errors.append(failure)
    if not hydra_launchers.is_plain_sweep(hydra_cfg):
        raise failure  # the process of the sweep, or its search, gets the error from Hydra
    return None
