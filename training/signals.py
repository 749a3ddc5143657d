"""SIGTERM and SIGINT end training after the step, with a checkpoint; a second signal ends it at once."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist

# A terminal and a launcher both pass on one Ctrl-C: signals this close together are one request.
SAME_REQUEST_SEC = 1.0


class StopSignal:
    """Whether to stop, the same answer in every process.

    The processes agree by an all-reduce on the CPU that is started at one step and read at the next: nobody waits for an
    accelerator, and all of them stop after the same step.
    """

    def __init__(self):
        self._first_sec: float | None = None
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None
        self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}

    def _handle(self, signum: int, frame) -> None:
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
