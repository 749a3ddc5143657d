"""Training saves a checkpoint and stops after a signal, or when its launcher ends. A second signal ends it at once."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time

from runtime.machine import LAUNCHERS
from runtime.processes import on_any

log = logging.getLogger(__name__)

# Slurm and submitit send USR1 and USR2 as warnings, a closing terminal sends HUP. Windows has none of them.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
# A second one of these ends the run at once. The others are warnings, which a SIGTERM may follow while the run still saves.
URGENT = (signal.SIGTERM, signal.SIGINT)
# Terminal and launcher both forward a Ctrl-C: signals this close together are one request.
SAME_REQUEST_SEC = 1.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PARENT = os.getppid()  # read at the import: the launcher may end before training starts


class StopSignal:
    """Tells whether the run was asked to stop.

    Python calls the handler between two bytecodes of the main thread: on a CPU, signals within one long backward count as one.
    On Linux, the system sends SIGTERM when the launcher that started this process ends.
    """

    def __init__(self):
        self.signum: int | None = None  # the first signal
        self._first_urgent_sec: float | None = None
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
        """Whether any process was asked to stop. Every process must call this equally often. It does not wait for a GPU."""
        return on_any(self.signum is not None)

    def close(self) -> None:
        """Restore the previous handlers."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
