"""SIGTERM and SIGINT end training after the step, with a checkpoint; a second signal ends it at once."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import torch
import torch.distributed as dist

# A terminal and a launcher both pass on one Ctrl-C: signals this close together are one request.
SAME_REQUEST_SEC = 1.0


class StopSignal:
    """Whether to stop, the same answer in every process.

    The processes agree by an all-reduce on the CPU that is started at one step and read at the next: nobody waits for an
    accelerator, and all of them stop after the same step.

    Signals are counted by a thread that the C-level handler wakes. Python's own handlers run between two bytecodes of the main
    thread alone: two signals within one backward, which can take seconds on a CPU, would be one to them, and late.
    """

    def __init__(self):
        self._first_sec: float | None = None
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Only against the default action.
        self._previous = {s: signal.signal(s, lambda signum, frame: None) for s in (signal.SIGTERM, signal.SIGINT)}

    def _listen(self) -> None:
        """A byte comes for every signal, with its number; nothing once the writer is closed."""
        while received := self._reader.recv(1):
            if (signum := received[0]) in (signal.SIGTERM, signal.SIGINT):
                self._count(signum)
        self._reader.close()

    def _count(self, signum: int) -> None:
        now_sec = time.monotonic()
        if self._first_sec is None:
            self._first_sec = now_sec
        elif now_sec - self._first_sec > SAME_REQUEST_SEC:
            os._exit(128 + signum)

    def requested(self) -> bool:
        """To be called once per step by every process."""
        here = self._first_sec is not None
        if self._group is None:
            return here
        answer = self._wait()
        flag = torch.tensor([int(here)])
        self._pending = (dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True), flag)
        return answer

    def _wait(self) -> bool:
        if self._pending is None:
            return False
        work, flag = self._pending
        work.wait()
        self._pending = None
        return bool(flag.item())

    def finish(self) -> None:
        """To be called by every process after the last step: no answer may be under way when processes leave."""
        self._wait()

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._writer.close()
