"""Let Hydra run the jobs of a command: a single one, or those of a sweep or a search (-m)."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable

import hydra
from hydra.core.utils import env_override
from omegaconf import DictConfig

from cli import hydra_launchers
from cli.compose import parse_config
from cli.hydra_errors import explain_hydra_error
from cli.hydra_setup import CONFIGS, accept_lazy_help, quote_non_ascii
from cli.print_errors import FULL_ERRORS, disconnect_processes, run_and_print_errors, wants_tracebacks
from common.errors import Diverged, UserError, first_line
from common.progress import log_to_stderr
from configs.settings import S
from runtime.job import is_sweep, job_overrides, joblib_worker, submitit_executor, was_launched_with_others

log = logging.getLogger(__name__)


def run_hydra(main: Callable[[S], float | None], config_name: str, settings_class: type[S]) -> None:
    """Let Hydra run `main` once for each job of the command line, and print only the message of a user error.

    `run_job` runs a job, and `end_job` decides what its error or a signal ends. All errors that Hydra raises become user errors:
    they are its own or those of its plugins, or a job's error that `end_job` raised, which is a user error already.

    Args:
        main: The command. It takes the validated settings, and returns the metric that sweepers minimise.
        config_name: The name of its file in configs/.
        settings_class: The class of its settings.
    """
    sys.argv[1:] = [word if word.startswith("-") else quote_non_ascii(word) for word in sys.argv[1:]]  # not --config-dir=...
    kept_errors: list[Exception] = []
    full_errors = wants_tracebacks()  # here, because below, the variable is 1 for Hydra, which otherwise prints errors and exits

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)
    @functools.wraps(main)  # Hydra takes the job's name from the file of `main`
    def command(cfg: DictConfig) -> float | None:
        return end_job(run_job(main, cfg, settings_class, full_errors), kept_errors)

    def run() -> None:
        try:
            with env_override({FULL_ERRORS: "1", "PYTHONPATH": hydra_launchers.python_path()}), accept_lazy_help():
                command()
        except SystemExit as stop:  # after a signal
            if stop.code or not kept_errors:
                raise
        except (UserError, BrokenPipeError):  # of a job; the reader of --help has ended
            raise
        except Exception as error:
            raise UserError(explain_hydra_error(error, config_name)) from error
        if kept_errors:
            raise kept_errors[0]

    run_and_print_errors(run)


def run_job(
    main: Callable[[S], float | None], cfg: DictConfig, settings_class: type[S], full_errors: bool
) -> float | None | Exception | SystemExit:
    """Call `main` with the configuration that Hydra composed for a job. Return its metric, its error, or its exit after a signal.

    In a sweep, errors are logged, and with `full_errors` also the tracebacks of user errors. What is returned then is a UserError
    without the traceback, which would keep all memory of the run until the sweep ends.
    """
    log_to_stderr()
    try:
        hydra_launchers.check_hydra_launcher()
        settings = parse_config(cfg, settings_class, job_overrides(), is_sweep=is_sweep())
        hydra_launchers.check_search(settings)
        metric = main(settings)
        if submitit_executor():  # its process ends without `run_and_print_errors`
            disconnect_processes()
        return metric
    except SystemExit as stop:
        return stop
    except Exception as error:  # noqa: BLE001 (end_job decides)
        return log_failure(error, full_errors) if is_sweep() else error


def log_failure(error: Exception, full_errors: bool) -> UserError:
    """Log the error of a job of a sweep. Return an error of the same kind with the message, but without the traceback."""
    is_user_error = isinstance(error, UserError)
    reason = error if is_user_error else f"{type(error).__name__}: {first_line(error)}"
    message = f"a run of the sweep failed: {' '.join(job_overrides())}: {reason}"
    log.error("%s", message, exc_info=full_errors or not is_user_error)
    return (Diverged if isinstance(error, Diverged) else UserError)(f"{message}{hydra_launchers.logs_of_job()}")


def end_job(outcome: float | None | Exception | SystemExit, kept_errors: list[Exception]) -> float | None:
    """Return the metric of a job to Hydra. A signal ends all jobs of this process, and an error has these consequences:

    | the job runs                                      | its error                                                         |
    |---------------------------------------------------|-------------------------------------------------------------------|
    | alone, or in the process of a plain sweep         | is kept, and ends the command after the last job                  |
    | in a sweep, in connected processes of accelerate  | ends the command: others may still be executing the failed run    |
    | in a process of joblib or submitit                | is raised: Hydra passes it to the process of the sweep            |
    | in a search, which may continue                   | is raised for the search, and kept                                |
    | in a search by Optuna or Nevergrad, and diverged  | is the worst metric, so that the search avoids its settings       |

    Errors are kept because Hydra would print a line about an error that is raised, and would start no further batch of a sweep.
    """
    if isinstance(outcome, SystemExit):
        # The process of a joblib sweep gets the code of a worker, but maybe not the failure of another worker.
        sys.exit(1 if outcome.code == 0 and joblib_worker() is not None else outcome.code)
    if not isinstance(outcome, Exception):
        return outcome
    if isinstance(outcome, Diverged) and (metric := hydra_launchers.worst_metric()) is not None:
        return metric
    if is_sweep() and was_launched_with_others() and hydra_launchers.hydra_launcher() == "basic":
        sys.exit(1)
    kept_errors.append(outcome)
    if hydra_launchers.passes_errors_on():
        raise outcome
    return None
