"""Reading at random places of many files. A file that is cut off or cannot be read is an error that names it."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.errors import UserError

MAX_OPEN_FILES = 512  # of the 1,024 that a process may have open by default; what is beyond is opened anew at every read
_seek_lock = threading.Lock()


class _File:
    """An open file, closed when nobody uses it any more: another thread may still read what the cache of open files dropped."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))

    def __del__(self):
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class FileReader:
    """Reads parts of files by number, from any number of threads.

    Files are read and not mapped. In a mapped file, what was cut off and errors of the disk kill the process with SIGBUS, and
    each first touch of a page reads up to a megabyte around it.
    """

    def __init__(self, files: Sequence[Path]):
        self.files = files
        self._open = functools.lru_cache(maxsize=MAX_OPEN_FILES)(_File)

    def read_into(self, part: np.ndarray, number: int, offset: int) -> None:
        """Fill `part`, uint8 [n], with the bytes of file `number` from `offset` on.

        Raises:
            UserError: the file ends before, or cannot be read.
        """
        path = self.files[number]
        try:
            file = self._open(path)
            num_read = count = _read_at(file.descriptor, part, offset)
            while num_read < len(part) and count:  # some file systems give less than was asked for
                count = _read_at(file.descriptor, part[num_read:], offset + num_read)
                num_read += count
            if num_read < len(part):
                raise UserError(
                    f"{path} is truncated: it ends at byte {os.fstat(file.descriptor).st_size}, and latents are expected up to "
                    f"byte {offset + len(part)}; restore it and run the same command again"
                )
        except OSError as e:
            raise UserError(f"cannot read {path}: {e.strerror}") from e


def _read_at(descriptor: int, part: np.ndarray, offset: int) -> int:
    """The number of bytes read into `part`: fewer than asked for where the file ends."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, (part,), offset)
    with _seek_lock:  # Windows
        os.lseek(descriptor, offset, os.SEEK_SET)
        content = os.read(descriptor, len(part))
    part[: len(content)] = np.frombuffer(content, dtype=np.uint8)
    return len(content)
