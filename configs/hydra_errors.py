"""Get the errors of a command and of its jobs out of Hydra, which would print them itself or lose them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

from hydra.core.utils import JobReturn, JobRuntime, env_override

from configs.guard import FULL_ERRORS, wants_tracebacks


@contextlib.contextmanager
def raise_errors() -> Iterator[None]:
    """Let Hydra raise errors in the `with` block.

    Hydra prints an error itself and exits, unless HYDRA_FULL_ERROR=1. It offers no other way to get the error. The jobs need the
    value that the user set, for their logs. Every launcher copies Hydra's JobRuntime to its processes.
    """
    JobRuntime.instance().set(FULL_ERRORS, wants_tracebacks())
    with env_override({FULL_ERRORS: "1"}):
        yield


class JobFailures:
    """Notes whether a job fails that Hydra runs in the `with` block, here or in another process (`has_failed`).

    Hydra stores what a job returns or raises in `JobReturn.return_value`, and raises the error again when the sweep reads it.
    This property is replaced here, for two reasons. Reading an error also prints "Error executing job with overrides: [...]",
    beside the one line that the user needs. And a sweep with failed runs would exit with 0 if a signal stops it before it reads
    them, or if Optuna goes on without them (hydra.sweeper.max_failure_rate). Hydra's callbacks do not serve: `on_job_end` is
    called in the process of the job, perhaps on another node, and `on_multirun_end` gets no results.
    """

    def __init__(self):
        self.has_failed = False
        self._property = JobReturn.return_value

    def __enter__(self) -> JobFailures:
        JobReturn.return_value = property(self.read, self.store)
        return self

    def __exit__(self, *_: object) -> None:
        JobReturn.return_value = self._property

    def store(self, job: JobReturn, value: object) -> None:
        if isinstance(value, Exception):
            self.has_failed = True
        self._property.fset(job, value)

    def read(self, job: JobReturn) -> object:
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                return self._property.fget(job)
        except Exception:  # a job in another process was not stored here
            self.has_failed = True
            raise
