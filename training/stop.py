"""Save a checkpoint and stop training after a signal or when the launcher exits. A second signal ends the run immediately."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from datetime import timedelta

from common.errors import UserError
from runtime import processes
from runtime.job import submitit_executor
from runtime.machine import LAUNCHER_VARIABLES

log = logging.getLogger(__name__)

# Slurm and submitit send SIGUSR1 and SIGUSR2 as warnings, and a closing terminal sends SIGHUP. On Linux, the kernel sends
# SIGRTMIN when the launcher exits. After a Ctrl-C, that can take seconds, so it must not look like a second SIGTERM.
STOP_SIGNALS = [s for s in signal.Signals if s.name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGRTMIN")]
# A second urgent signal ends the run immediately. A first SIGTERM after a warning signal does not interrupt the checkpoint.
URGENT = (signal.SIGTERM, signal.SIGINT)
# The terminal and the launcher both forward Ctrl-C, so signals within this interval count as one request.
SAME_REQUEST_SEC = 1.0
STOP_TIMEOUT = timedelta(minutes=30)  # maximum time to wait for the slowest process
PR_SET_PDEATHSIG = 1  # defined in linux/prctl.h
_PARENT = os.getppid()  # read at import time, because the launcher may exit before training starts


def end_run_after_signal(stop: StopSignal, step: int, is_complete: bool) -> int | None:
    """End a run that a signal stopped. Return the exit code of the command, or None if it returns the metric of its run.

    The exit code is 130 after Ctrl-C, and 0 after a cluster's signal, which is not an error. If a signal arrives during the last
    save of a complete run, it ends the command, too, and so a sweep. In submitit's jobs, such a run returns its metric, because
    other jobs have the sweep's other runs.
    """
    if is_complete and (not stop.is_signalled or submitit_executor()):
        return None
    if is_complete:
        log.warning("this run is complete at step %d; a signal ends the command, and so a sweep", step)
    else:
        log.warning("stopped after step %d as requested; run the same command to resume", step)
    processes.destroy_process_groups()
    if submitit_executor():  # a complete run has returned above
        wait_to_be_killed(stop.signum)
        requeue_job(stop.signum)
    return 128 + signal.SIGINT if stop.signum == signal.SIGINT else 0


def wait_to_be_killed(signum: int | None) -> None:
    """Wait after SIGTERM in submitit's jobs on Slurm, which sends it some time before it kills a job.

    Slurm requeues a preempted job that it killed, but counts one that ended by itself as complete.
    """
    if signum == signal.SIGTERM and submitit_executor() == "slurm":
        log.warning("the run is saved; waiting until Slurm ends this job, and requeues it if it was preempted")
        time.sleep(STOP_TIMEOUT.total_seconds())


def requeue_job(signum: int | None) -> None:
    """After a warning signal, call submitit's handler, which requeues the job and exits."""
    if signum not in (None, *URGENT) and callable(handler := signal.getsignal(signum)):
        handler(signum, None)


class StopSignal:
    """Handlers of signals that ask training to stop, on which all processes agree. They are active in a `with` block.

    Python runs a handler between two bytecodes of the main thread, so signals during one long backward pass on a CPU count as
    one signal. On Linux, the process asks the kernel for a SIGRTMIN when the launcher that started the process exits.

    Attributes:
        signum: The first signal that this process received, or None.
        is_signalled: Whether any process had received a signal at the last `poll`. It is equal on all processes.
    """

    def __init__(self):
        self.signum: int | None = None
        self.is_signalled = False
        self._first_urgent_sec: float | None = None

    def __enter__(self) -> StopSignal:
        # Do not handle warning signals that are ignored or that C code handles. For example, nohup ignores SIGHUP.
        signals = [s for s in STOP_SIGNALS if s in URGENT or signal.getsignal(s) not in (signal.SIG_IGN, None)]
        self._previous = {s: signal.signal(s, self._handle) for s in signals}
        if sys.platform == "linux" and any(name in os.environ for name in LAUNCHER_VARIABLES):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGRTMIN)
            if os.getppid() != _PARENT:
                self._handle(signal.SIGRTMIN, None)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: object) -> None:
        if self.signum is None:
            self.signum = signum
            _print_request(signum)
        if signum in URGENT:
            now_sec = time.monotonic()
            self._first_urgent_sec = self._first_urgent_sec or now_sec
            if now_sec - self._first_urgent_sec > SAME_REQUEST_SEC:
                os._exit(128 + signum)

    def poll(self) -> bool:
        """Wait for all processes, and return whether any has received a signal.

        All processes must call this method at the same places: before each step, and in hooks that sample or evaluate before each
        batch. The processes agree on the CPU, so none waits for its accelerator.

        Raises UserError if another process exited or did not call `poll` within STOP_TIMEOUT.
        """
        try:
            self.is_signalled = processes.is_true_on_any(self.signum is not None, STOP_TIMEOUT)
        except RuntimeError as e:
            message = f"another process has ended, or has not answered for {STOP_TIMEOUT / timedelta(minutes=1):g} minutes"
            raise UserError(f"{message}; run the same command to resume: {e}") from e
        return self.is_signalled


def _print_request(signum: int) -> None:
    """Print that training stops, on the main process. A signal may interrupt the logging of another message, so do not log."""
    if os.environ.get("RANK", "0") == "0":
        name = signal.Signals(signum).name.replace("SIGRTMIN", "the launcher has ended")
        text = f"\n{name}: stopping after this step, with a checkpoint; a second SIGTERM or Ctrl-C ends at once\n"
        with contextlib.suppress(OSError):  # the run continues if stderr is closed
            os.write(sys.stderr.fileno(), text.encode())
