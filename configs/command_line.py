"""Run the jobs of Hydra, and print every user error as a single line."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, env_override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from common.errors import Diverged, UserError, first_line
from common.files import REPOSITORY
from common.progress import log_to_stderr
from configs.compose import explain, job_overrides, joblib_worker, parse_config, quote_letters
from configs.schema import TrainConfig
from configs.settings import S

log = logging.getLogger(__name__)

FULL_ERRORS = "HYDRA_FULL_ERROR"  # Hydra's environment variable, which all commands read
TRACEBACKS = "TREAD_TRACEBACKS"  # the user's value of FULL_ERRORS, for the jobs of a sweep: `guard` sets FULL_ERRORS
SEARCHERS = {"optuna", "ax", "nevergrad"}  # Hydra's sweepers that minimise what a job returns
# Packages whose errors concern the command line or a launcher's job, and have clear messages.
LAUNCHING = {"hydra", "hydra_plugins", "submitit", "joblib"}
_has_failed_run = False  # whether a run of this process's sweep failed


hydras_result = JobReturn.return_value


def read_result(job: JobReturn) -> object:
    """Return the result of a job, or raise its error. Hydra's own property also prints a line about a job that failed."""
    global _has_failed_run
    _has_failed_run |= job.status == JobStatus.FAILED
    with contextlib.redirect_stderr(io.StringIO()):
        return hydras_result.fget(job)


JobReturn.return_value = property(read_result, hydras_result.fset)


def guard(action: Callable[[], object], config_name: str | None = None) -> None:
    """Call `action`. Print a user error as one line and exit with code 1. HYDRA_FULL_ERROR=1 prints the traceback instead.

    Args:
        config_name: For a command that Hydra runs, the name of its file in configs/.
    """
    global _has_failed_run
    _has_failed_run = False
    wants_traceback = os.environ.get(FULL_ERRORS) == "1"
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the shell closed it (2>&-)
            setattr(sys, stream, open(os.devnull, "w"))
        getattr(sys, stream).reconfigure(errors="backslashreplace")  # for letters that the locale lacks
    if config_name is not None:
        sys.argv[1:] = map(quote_letters, sys.argv[1:])
    if not any(word.startswith(("-i", "--info")) for word in sys.argv[1:]):  # Hydra logs this text to stdout itself
        log_to_stderr()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may start background jobs with SIGINT ignored
    # Hydra raises errors instead of printing them, and submitit's jobs find our modules from any folder.
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    traces = {FULL_ERRORS: "1", TRACEBACKS: str(int(wants_traceback))}
    try:
        with exit_on_broken_pipe(), env_override({**traces, "PYTHONPATH": path}):
            action()
            leave_processes()
    except KeyboardInterrupt:
        sys.stderr.write("stopped; run the same command again to finish\n")  # not every command resumes
        sys.exit(128 + signal.SIGINT)
    except SystemExit as stop:  # a signal may have stopped a sweep
        if stop.code or not _has_failed_run:
            raise
    except Exception as error:
        text = explain_error(error, config_name)
        if text is None or wants_traceback:
            raise
        rank = os.environ.get("RANK")
        sys.exit(f"error{'' if rank is None else f' (process {rank})'}: {text}")
    if _has_failed_run:  # a signal, or a search that continues after failed runs
        sys.exit("error: runs of the sweep failed; their errors are logged above")


@contextlib.contextmanager
def exit_on_broken_pipe() -> Iterator[None]:
    """End the process quietly, as the system ends other programs, if the reader of stdout ends (`| head`)."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)
        if not output.poll(0):  # another pipe is broken
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def leave_processes() -> None:
    """Disconnect from the other processes, if a command has connected to them."""
    if processes := sys.modules.get("runtime.processes"):  # importing it takes seconds
        processes.leave()


def explain_error(error: Exception, config_name: str | None = None) -> str | None:
    """Return the message for the user that explains a user error, or None for any other error."""
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)]
    # OmegaConf works for Hydra or for our code.
    is_launching = next((package for package in reversed(packages) if package != "omegaconf"), "") in LAUNCHING
    if not is_launching and not isinstance(error, (UserError, HydraException, OmegaConfBaseException)):
        return None
    return str(error) if isinstance(error, UserError) else explain(error, sys.argv[1:], config_name or "config")


def run_job(main: Callable[[S], float | None], cfg: DictConfig, settings_class: type[S]) -> float | None:
    """Validate the configuration that Hydra composed for one job, and call `main`. Return the metric that `main` returns.

    In a sweep, an error ends only its job (`fail_in_sweep`).
    """
    log_to_stderr()
    context = HydraConfig.get()
    arguments, is_sweep = job_overrides(), context.mode == RunMode.MULTIRUN
    try:
        check_launcher(context, is_sweep)
        settings = parse_config(cfg, settings_class, arguments, not is_sweep)
        if searcher_of(context) and isinstance(settings, TrainConfig) and not settings.is_evaluated:
            remedy = "set evaluation.every and evaluation.reference"
            raise UserError(f"a search needs a metric, but the runs have no evaluations; {remedy}")
        metric = main(settings)
        if "SUBMITIT_EXECUTOR" in os.environ:
            leave_processes()
        return metric
    except SystemExit as stop:  # after a signal
        # The sweep's process would get this exit code, and no failure of another worker.
        sys.exit(stop.code if joblib_worker() is None else stop.code or 1)
    except Exception as error:
        if not is_sweep:
            raise
        failure = log_failure(error, arguments)
        has_diverged = isinstance(error, Diverged)
    # The error is gone here: Hydra keeps what a job raises until the sweep ends, and a traceback keeps all memory of the run.
    return fail_in_sweep(context, failure, has_diverged)


def is_connected() -> bool:
    """Return whether a launcher started this process together with others."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def searcher_of(context: DictConfig) -> str | None:
    """Return the sweeper that searches for the lowest metric, if Hydra runs a sweep with it."""
    is_sweep = context.mode == RunMode.MULTIRUN
    return next((name for name in SEARCHERS if is_sweep and f".hydra_{name}" in context.sweeper._target_), None)


def check_launcher(context: DictConfig, is_sweep: bool) -> None:
    """Raise UserError if a launcher of Hydra starts no jobs, or if another launcher started the processes."""
    launcher = context.runtime.choices["hydra/launcher"]
    if launcher != "basic" and not is_sweep:
        raise UserError(f"hydra/launcher={launcher} starts jobs only with -m, and without it, this shell would do the work")
    if is_connected() and launcher != "basic":
        raise UserError(f"hydra/launcher={launcher} starts the processes itself; start the sweep with python")


def log_failure(error: Exception, arguments: Sequence[str]) -> str:
    """Log the error of a job of a sweep, and return the message."""
    text = explain_error(error)
    failure = f"a run of the sweep failed: {' '.join(arguments)}: {text or f'{type(error).__name__}: {first_line(error)}'}"
    log.error("%s", failure, exc_info=text is None or os.environ.get(TRACEBACKS) == "1")
    return failure


def fail_in_sweep(context: DictConfig, failure: str, has_diverged: bool) -> float:
    """End a failed job of a sweep, which goes on with the next job and fails at its end.

    If the run diverged in a search by Optuna or Nevergrad, return the worst metric, so that the search avoids its settings. With
    several connected processes, the first error ends the sweep, because the others may still be executing the failed run.
    """
    global _has_failed_run
    if has_diverged and searcher_of(context) in ("optuna", "nevergrad"):  # Ax's model needs finite metrics
        return -math.inf if "max" in str(context.sweeper.get("direction")).lower() else math.inf
    if is_connected() and context.runtime.choices["hydra/launcher"] == "basic":
        sys.exit(1)
    _has_failed_run = True
    if "SUBMITIT_EXECUTOR" in os.environ:
        import submitit  # an optional package, which must be there in its own job

        failure += f" (logs: {submitit.JobEnvironment().paths.folder})"
    raise UserError(failure)
