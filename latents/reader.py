"""Read parts of many files in any order. Error messages name the file that is truncated or unreadable."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import numpy as np

from common.errors import UserError
from common.files import regular_file

MAX_OPEN_FILES = 512  # `FileReader` closes the least recently used file beyond this number, which is half of the default limit


class FileReader:
    """Reads parts of files, which are identified by their index in `files`. Several threads may share a reader.

    The reader does not use memory mapping. Reading a truncated memory-mapped file would kill the process (SIGBUS), and the first
    access to a memory-mapped region would read up to a megabyte.
    """

    def __init__(self, files: Sequence[Path]):
        self.files = files
        # Python closes an evicted file when no thread uses it.
        self._open = functools.lru_cache(maxsize=MAX_OPEN_FILES)(lambda path: FileIO(regular_file(path)))

    def __reduce__(self) -> tuple:
        return FileReader, (self.files,)  # another process opens the files itself

    def read_into(self, part: np.ndarray, file_idx: int, offset: int) -> None:
        """Read file `file_idx` at byte `offset` into `part`, uint8 [n]."""
        path = self.files[file_idx]
        try:
            file = self._open(path)
            num_read = 0  # some file systems return fewer bytes than requested
            while num_read < len(part) and (count := os.preadv(file.fileno(), (part[num_read:],), offset + num_read)):
                num_read += count
        except OSError as e:
            raise UserError(f"cannot read {path}: {e.strerror}") from e
        if num_read < len(part):
            raise UserError(f"{path} is truncated: it ends before byte {offset + len(part)}; restore it")
