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

import torch
import torch.distributed as dist

from cli.hydra_launchers import submitit_executor
from common.errors import UserError
from runtime import processes
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


def end_run_after_signal(step: int, is_complete: bool, is_signalled: bool, signum: int | None) -> int | None:
    """End a run that a signal stopped. Return the exit code of the command, or None if it returns the metric of its run.

    The exit code is 130 after Ctrl-C, and 0 after a cluster's signal, which is not an error. `signum` is the signal that this
    process received, and `is_signalled` tells whether any process received one.

    | run complete | signal | submitit's job | log                  | then                                                    |
    |--------------|--------|----------------|----------------------|---------------------------------------------------------|
    | no           | yes    | no             | stopped after step   | exit code                                               |
    | no           | yes    | yes            | stopped after step   | Slurm's kill, or submitit's handler, or the exit code   |
    | yes          | yes    | no             | this run is complete | exit code                                               |
    | yes          | yes    | yes            | none                 | metric, because other jobs have the sweep's other runs  |
    | yes          | no     | either         | none                 | metric                                                  |
    """
    if not is_complete:
        log.warning("stopped after step %d as requested; run the same command to resume", step)
        processes.destroy_process_groups()
        wait_to_be_killed(signum)
        call_previous_handler(signum)  # submitit's handler exits; wandb then uploads the rest, which can take long
    elif is_signalled and not submitit_executor():
        log.warning("this run is complete at step %d; a signal ends the command, and so a sweep", step)
        processes.destroy_process_groups()
    else:
        return None
    return 128 + signal.SIGINT if signum == signal.SIGINT else 0


def call_previous_handler(signum: int | None) -> None:
    """Call the handler that a warning signal had before training. submitit's handler requeues the job and exits."""
    if signum not in (None, *URGENT) and callable(handler := signal.getsignal(signum)):
        handler(signum, None)


def wait_to_be_killed(signum: int | None) -> None:
    """Wait after SIGTERM in submitit's jobs on Slurm, which sends it some time before it kills a job.

    Slurm requeues a preempted job that it killed, but counts one that ended by itself as complete.
    """
    if signum == signal.SIGTERM and submitit_executor() == "slurm":
        log.warning("the run is saved; waiting until Slurm ends this job, and requeues it if it was preempted")
        time.sleep(STOP_TIMEOUT.total_seconds())


class StopSignal:
    """A signal handler that tells every process consistently whether to stop training.

    The processes agree through all-reduces on the CPU, so every process must make the same calls in the same order:

    1. After each step, all call `poll`. It waits for the all-reduce of the previous call and starts the next one. No process
       waits for its accelerator, and all stop after the same step, which may be one step late.
    2. Before each batch of a hook that samples or evaluates, all call `poll_now`, which waits for its own all-reduce.
    3. After the last hook, all call `poll_now` again. No all-reduce is then left, and a signal during the last save counts.
    4. `close` ends the agreement, also after an error on one process alone.

    Python runs the handler between two bytecodes of the main thread, so signals during one long backward pass on a CPU count as
    one signal. On Linux, the process asks the kernel for a SIGRTMIN when the launcher that started the process exits.
    """

    def __init__(self):
        self.signum: int | None = None  # the first signal that this process received
        self._first_urgent_sec: float | None = None
        self._group = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=STOP_TIMEOUT)
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        # Do not handle warning signals that are ignored or that C code handles. For example, nohup ignores SIGHUP.
        signals = [s for s in STOP_SIGNALS if s in URGENT or signal.getsignal(s) not in (signal.SIG_IGN, None)]
        self._previous = {s: signal.signal(s, self._handle) for s in signals}
        if sys.platform == "linux" and any(name in os.environ for name in LAUNCHER_VARIABLES):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGRTMIN)
            if os.getppid() != _PARENT:
                self._handle(signal.SIGRTMIN, None)

    def _handle(self, signum: int, frame: object) -> None:
        if self.signum is None:
            self.signum = signum
            name = signal.Signals(signum).name.replace("SIGRTMIN", "the launcher has ended")
            log.info("%s: stopping after this step, with a checkpoint; a second SIGTERM or Ctrl-C ends at once", name)
        if signum in URGENT:
            now_sec = time.monotonic()
            self._first_urgent_sec = self._first_urgent_sec or now_sec
            if now_sec - self._first_urgent_sec > SAME_REQUEST_SEC:
                os._exit(128 + signum)

    def poll(self) -> bool:
        """Return whether any process had received a signal at the previous call. A single process needs no previous call."""
        is_signalled = self.signum is not None
        if self._group is None:
            return is_signalled
        answer = self._wait_for_answer()
        flag = torch.tensor([int(is_signalled)])
        self._pending = (dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True), flag)
        return answer

    def poll_now(self) -> bool:
        """Wait for all processes, and return whether any has received a signal."""
        answer = self.poll()
        return self._wait_for_answer() or answer

    def _wait_for_answer(self) -> bool:
        """Wait for the all-reduce of the last `poll`, and return its result, or False if there is none.

        Raises UserError if another process exited or did not call `poll` within STOP_TIMEOUT.
        """
        if self._pending is None:
            return False
        work, flag = self._pending
        self._pending = None
        try:
            work.wait()
        except RuntimeError as e:
            message = f"another process has ended, or has not answered for {STOP_TIMEOUT / timedelta(minutes=1):g} minutes"
            raise UserError(f"{message}; run the same command to resume: {e}") from e
        return bool(flag.item())

    def close(self) -> None:
        """Restore the previous signal handlers and free the process group. The runs of a sweep would use up the open files."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._group is not None:
            with contextlib.suppress(Exception):  # another process may have ended
                dist.destroy_process_group(self._group)
            self._group = None
