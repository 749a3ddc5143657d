"""Read parts of many files in any order. Errors name the file that is truncated or cannot be read."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import numpy as np

from common.errors import UserError

MAX_OPEN_FILES = 512  # half of the default limit of a process; beyond it, the least recently used file is closed


class FileReader:
    """Reads parts of numbered files. Any number of threads may use it.

    Files are not memory-mapped. Reading a truncated mapped file kills the process (SIGBUS), and a first access reads up to a
    megabyte.
    """

    def __init__(self, files: Sequence[Path]):
        self.files = files
        self._open = functools.lru_cache(maxsize=MAX_OPEN_FILES)(FileIO)  # a dropped file is closed once its readers finish

    def read_into(self, part: np.ndarray, number: int, offset: int) -> None:
        """Fill `part`, uint8 [n], from byte `offset` of file `number`. Raises UserError if it is truncated or cannot be read."""
        path = self.files[number]
        try:
            file = self._open(path)
            num_read = count = os.preadv(file.fileno(), (part,), offset)
            while num_read < len(part) and count:  # some file systems return fewer bytes than requested
                num_read += (count := os.preadv(file.fileno(), (part[num_read:],), offset + num_read))
        except OSError as e:
            raise UserError(f"cannot read {path}: {e.strerror}") from e
        if num_read < len(part):
            raise UserError(f"{path} is truncated: it ends before byte {offset + len(part)}; restore it")
