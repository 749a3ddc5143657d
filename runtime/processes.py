"""Coordinate processes. One process can decide or compute alone while the other processes wait.

Processes wait in a gloo group with a long timeout. The NCCL timeout is short, because GPUs idle when a collective hangs.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UserError
from common.files import hash_file

# The timeout allows for slow work in one process (hashing or saving checkpoints on a slow file system, computing metrics) and for
# the drift between processes over 50,000 samples.
WAIT_TIMEOUT = timedelta(hours=2)
NEW_FILE_SEC = 60.0  # NFS clients show another node's new file after up to 30 s by default

T = TypeVar("T")
_group: dist.ProcessGroup | None = None  # the gloo group of all processes, or None for a single process
_timeout = WAIT_TIMEOUT  # the group's timeout


def init_gloo_group(num_processes: int, timeout: timedelta) -> None:
    """Create the gloo group of all processes, once per sweep.

    Raises UserError if accelerate uses fewer processes than were launched.
    """
    global _group, _timeout
    if _group is None and dist.is_available() and dist.is_initialized() and (launched := dist.get_world_size()) > 1:
        if launched != num_processes:  # each process would do all of the work, in the same folder
            raise UserError(f"accelerate sees no GPU for its {launched} processes; to train on CPUs, set ACCELERATE_USE_CPU=true")
        _timeout = timeout
        _group = dist.new_group(backend="gloo", timeout=timeout)


def destroy_process_groups() -> None:
    """Disconnect the processes at the end of a command. They cannot connect again."""
    global _group
    _group = None
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def on_main(action: Callable[[], T]) -> T:
    """Call `action` in the main process and return its result on every process. A UserError is also raised on every process."""
    if _group is None:
        return action()
    result = [None, None]  # the value and the error
    if dist.get_rank() == 0:
        try:
            result[0] = action()
        except UserError as e:
            result[1] = e
    dist.broadcast_object_list(result, src=0, group=_group)
    value, error = result
    if error is not None:
        raise error
    return value


def keep_on_main(action: Callable[[], T]) -> T | None:
    """Call `action` in the main process, which alone gets the result, such as images. Other processes return None.

    A UserError is also raised on every process.
    """
    kept: list[T] = []
    on_main(lambda: kept.append(action()))
    return kept[0] if kept else None


def barrier() -> None:
    """Wait until every process calls this function. After the timeout, an error on the main process names a missing process."""
    if _group is not None:
        dist.monitored_barrier(_group, _timeout)


def gather_lists(items: list[T]) -> list[T]:
    """Return the items of all processes, in the order of the processes, on every process."""
    if _group is None:
        return items
    gathered: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, items, group=_group)
    return [item for part in gathered for item in part]


def own_share(num_items: int) -> range:
    """Return the items that this process works on. `gather_lists` then returns the results for all items in order."""
    rank, num_processes = (0, 1) if _group is None else (dist.get_rank(), dist.get_world_size())
    return range(num_items * rank // num_processes, num_items * (rank + 1) // num_processes)


def gather_on_main(tensor: Tensor) -> list[Tensor]:
    """Gather tensors of equal shape from several processes in host memory on the main process. Other processes receive []."""
    tensor = tensor.cpu().contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(tensor, gathered, dst=0, group=_group)
    return gathered or []


def is_true_on_any(value: bool, timeout: timedelta) -> bool:
    """Return on every process whether `value` is true on any of them.

    Raises RuntimeError if a process has ended, or does not call this function within `timeout`.
    """
    if _group is None:
        return value
    result = torch.tensor([int(value)])
    dist.all_reduce(result, dist.ReduceOp.MAX, group=_group, async_op=True).wait(timeout)
    return bool(result.item())


def check_same_job(arguments: Sequence[str]) -> None:
    """Check that all processes run the same job. A random sweeper may draw other values in each process."""
    gathered = gather_lists([" ".join(arguments)])
    for rank, others in enumerate(gathered):
        if others != gathered[0]:
            raise UserError(f"process {rank} runs {others}, but process 0 runs {gathered[0]}; set hydra.sweeper.sampler.seed=0")


class FileFingerprint(NamedTuple):
    """What this process sees at a path of the user. On all processes, it must be the same."""

    key: str  # the key that names the path
    path: Path
    value: object


def fingerprint_file(key: str, file: Path) -> FileFingerprint:
    """Return what this process sees of a file."""
    return FileFingerprint(key, file, hash_file(file) if file.is_file() else "missing")


def fingerprint_folder(key: str, file: Path) -> FileFingerprint:
    """Return what this process sees of a small file, which shows whether all processes share its folder."""
    return fingerprint_file(key, file)._replace(path=file.parent)


def check_same_files(look: Callable[[], Sequence[FileFingerprint]]) -> None:
    """Check that all processes see the same. A single process does not call `look`, which may read files.

    On all processes, `look` returns equally many values, in the same order.

    Raises UserError on every process if a value differs from the main process's. The message names the key, hosts and paths.
    """
    if _group is None:
        return
    seen = look()
    gathered = gather_lists([(socket.gethostname(), [(value, os.path.abspath(path)) for _, path, value in seen])])
    main_host, main_values = gathered[0]
    for rank, (host, others) in enumerate(gathered):
        for (key, _, _), (value, path), (main_value, main_path) in zip(seen, others, main_values):
            if value != main_value:
                raise UserError(
                    f"{key}: process {rank} on {host} sees other content in {path} than process 0 on {main_host} in {main_path}; "
                    f"give {key} as an absolute path on a file system that all nodes share, or give all nodes equal copies"
                )


def check_new_file(key: str, file: Path) -> None:
    """Check that all processes see a file that the main process has just written.

    The others wait until their file system shows it, up to `NEW_FILE_SEC`.
    """

    def look() -> FileFingerprint:
        if file.parent.is_dir():
            os.listdir(file.parent)  # opening a folder makes an NFS client ask the server again
        return fingerprint_folder(key, file)

    if _group is not None:
        expected, deadline = on_main(look).value, time.monotonic() + NEW_FILE_SEC
        while look().value != expected and time.monotonic() < deadline:
            time.sleep(0.5)
    check_same_files(lambda: [look()])
