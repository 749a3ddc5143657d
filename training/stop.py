"""A signal, or the end of the launcher, asks training to save a checkpoint and leave; a second signal ends it at once."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from common.errors import UserError

log = logging.getLogger(__name__)

# Slurm and submitit warn with USR1 and USR2, a terminal that closes with HUP. Windows has neither.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
# A second one of these ends the run at once. The others are warnings, which a SIGTERM may follow while the run still saves.
URGENT = (signal.SIGTERM, signal.SIGINT)
# Terminal and launcher both forward a Ctrl-C: signals this close together are one request.
SAME_REQUEST_SEC = 1.0
CHECK_PARENT_SEC = 1.0
PATIENCE = timedelta(minutes=30)  # between two calls of one process and of the slowest

# Set by torch's elastic launcher, and by accelerate's for one process.
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND")
_PARENT = os.getppid()  # read at the import: the launcher may end before training starts


class StopSignal:
    """Whether this run was asked to stop, with the same answer on every process.

    The processes agree by an all-reduce on the CPU, started at one step and read at the next: none waits for an accelerator,
    and all stop after the same step.

    A thread counts the signals; the C-level handler wakes it. Python's own handlers run only between bytecodes of the main
    thread: two signals within one backward, which can take seconds on a CPU, would arrive late and as one. The thread also
    notices when the launcher that started this process has ended.
    """

    def __init__(self):
        self._asked = False
        self.signum: int | None = None  # that this process was first asked to stop by
        self._group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        # A warning that somebody handles or ignores already stays theirs: nohup ignores SIGHUP.
        self._signals = [s for s in STOP_SIGNALS if s in URGENT or signal.getsignal(s) == signal.SIG_DFL]
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(CHECK_PARENT_SEC)
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # These handlers only replace the default action.
        self._previous = {s: signal.signal(s, lambda signum, frame: None) for s in self._signals}

    def _listen(self) -> None:
        """Read one byte per signal, its number, until the writer is closed."""
        has_launcher = any(name in os.environ for name in LAUNCHERS)
        first_urgent_sec = None
        while True:
            try:
                received = self._reader.recv(1)
            except TimeoutError:
                if has_launcher and os.getppid() != _PARENT:
                    self._ask("the launcher has ended")
                continue
            if not received:
                break
            if received[0] not in self._signals:
                continue
            self.signum = self.signum or received[0]
            self._ask(signal.Signals(received[0]).name)
            if received[0] in URGENT:
                now_sec = time.monotonic()
                first_urgent_sec = first_urgent_sec or now_sec
                if now_sec - first_urgent_sec > SAME_REQUEST_SEC:
                    os._exit(128 + received[0])
        self._reader.close()

    def _ask(self, reason: str) -> None:
        if not self._asked:
            self._asked = True
            log.info("%s: stopping after this step, with a checkpoint; a second SIGTERM or Ctrl-C ends at once", reason)

    def requested(self) -> bool:
        """Whether to stop after this step. Every process must call it once per step. It may answer one step late."""
        here = self._asked
        if self._group is None:
            return here
        answer = self.finish()
        flag = torch.tensor([int(here)])
        self._pending = (dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True), flag)
        return answer

    def requested_now(self) -> bool:
        """`requested` without the delay: it waits for the other processes. For batches of samples, which take seconds."""
        return self.requested() or self.finish()

    def finish(self) -> bool:
        """Wait for the all-reduce of the step before, and return its answer. Every process must call it after the last step.

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
            words = f"another process has ended, or does not come for {PATIENCE / timedelta(minutes=1):g} minutes"
            raise UserError(f"{words}; the same command resumes the run: {e}") from e
        return bool(flag.item())

    def close(self) -> None:
        """Restore the handlers from before."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
        # A thread that outlives its owner frees the process group, and one that frees it while Python ends aborts the process.
        self._thread.join()
