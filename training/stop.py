"""SIGTERM and SIGINT end training after the step, with a checkpoint; a second signal ends it at once."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

# Terminal and launcher both forward a Ctrl-C: signals this close together are one request.
SAME_REQUEST_SEC = 1.0


class StopSignal:
    """Whether a signal asked this run to stop, with the same answer on every process.

    The processes agree by an all-reduce on the CPU, started at one step and read at the next: none waits for an accelerator,
    and all stop after the same step.

    A thread counts the signals; the C-level handler wakes it. Python's own handlers run only between bytecodes of the main
    thread: two signals within one backward, which can take seconds on a CPU, would arrive late and as one.
    """

    def __init__(self):
        self._first_sec: float | None = None
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # These handlers only replace the default action.
        self._previous = {s: signal.signal(s, lambda signum, frame: None) for s in (signal.SIGTERM, signal.SIGINT)}

    def _listen(self) -> None:
        """Read one byte per signal, its number, until the writer is closed."""
        while received := self._reader.recv(1):
            signum, now_sec = received[0], time.monotonic()
            if signum not in (signal.SIGTERM, signal.SIGINT):
                continue
            if self._first_sec is None:
                self._first_sec = now_sec
                log.info("stopping after this step, with a checkpoint; a second signal ends at once")
            elif now_sec - self._first_sec > SAME_REQUEST_SEC:
                os._exit(128 + signum)
        self._reader.close()

    def requested(self) -> bool:
        """Whether to stop after this step. Every process must call it once per step."""
        here = self._first_sec is not None
        if self._group is None:
            return here
        answer = self.finish()
        flag = torch.tensor([int(here)])
        self._pending = (dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True), flag)
        return answer

    def finish(self) -> bool:
        """Wait for the all-reduce of the step before, and return its answer. Every process must call it after the last step."""
        if self._pending is None:
            return False
        work, flag = self._pending
        work.wait()
        self._pending = None
        return bool(flag.item())

    def close(self) -> None:
        """Restore the handlers from before."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
