"""After a signal, or when the launcher ends, training saves a checkpoint and stops; a second signal ends it at once."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from common.errors import UserError
from runtime.machine import LAUNCHERS

log = logging.getLogger(__name__)

# Slurm and submitit send USR1 and USR2 as warnings, a closing terminal sends HUP. Windows has none of them.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
# A second one of these ends the run at once. The others are warnings, which a SIGTERM may follow while the run still saves.
URGENT = (signal.SIGTERM, signal.SIGINT)
# Terminal and launcher both forward a Ctrl-C: signals this close together are one request.
SAME_REQUEST_SEC = 1.0
PATIENCE = timedelta(minutes=30)  # how long a process waits for the slowest one
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PARENT = os.getppid()  # read at the import: the launcher may end before training starts


class StopSignal:
    """Tells whether the run was asked to stop, with the same answer on every process.

    The processes agree by an all-reduce on the CPU, which starts in one step and is read in the next. No process waits for an
    accelerator, and all stop after the same step.

    Python calls the handler between two bytecodes of the main thread: on a CPU, signals within one long backward count as one.
    On Linux, the system sends SIGTERM when the launcher that started this process ends.
    """

    def __init__(self):
        self.signum: int | None = None  # the first signal
        self._first_urgent_sec: float | None = None
        self._group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        # Do not change warning signals that are already handled or ignored: nohup ignores SIGHUP.
        signals = [s for s in STOP_SIGNALS if s in URGENT or signal.getsignal(s) == signal.SIG_DFL]
        self._previous = {s: signal.signal(s, self._handle) for s in signals}
        if sys.platform == "linux" and any(name in os.environ for name in LAUNCHERS):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != _PARENT:
                self._handle(signal.SIGTERM, None)

    def _handle(self, signum: int, frame: object) -> None:
        if self.signum is None:
            self.signum = signum
            name = signal.Signals(signum).name
            log.info("%s: stopping after this step, with a checkpoint; a second SIGTERM or Ctrl-C ends at once", name)
        if signum in URGENT:
            now_sec = time.monotonic()
            self._first_urgent_sec = self._first_urgent_sec or now_sec
            if now_sec - self._first_urgent_sec > SAME_REQUEST_SEC:
                os._exit(128 + signum)

    def requested(self) -> bool:
        """Return whether to stop after this step. Every process must call it once per step. It may answer one step late."""
        here = self.signum is not None
        if self._group is None:
            return here
        answer = self.finish()
        flag = torch.tensor([int(here)])
        self._pending = (dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True), flag)
        return answer

    def requested_now(self) -> bool:
        """Like `requested`, but waits for all processes instead of answering a step late. For slow batches of samples."""
        return self.requested() or self.finish()

    def finish(self) -> bool:
        """Wait for the previous step's all-reduce and return its answer. Every process must call it after the last step.

        Raises:
            UserError: a process did not call `requested` within PATIENCE, or has ended.
        """
        if self._pending is None:
            return False
        work, flag = self._pending
        self._pending = None
        try:
            work.wait()
        except RuntimeError as e:
            words = f"another process has ended, or has not answered for {PATIENCE / timedelta(minutes=1):g} minutes"
            raise UserError(f"{words}; run the same command to resume: {e}") from e
        return bool(flag.item())

    def close(self) -> None:
        """Restore the previous handlers."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
