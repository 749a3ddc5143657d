"""Reading and writing of files: whole or not at all, locked, hashed, as JSON lines."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from filelock import lock_descriptor

from common.errors import UserError, first_line

log = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parent.parent
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def whole_file(path: Path, flush: bool = True) -> Iterator[IO[bytes]]:
    """A file to write to. It appears under its name only when it is complete and on the disk. Its folder is created.

    Args:
        flush: False lets the system choose when the content reaches the disk: for many files that can be made again.

    Raises:
        UserError: the file cannot be written. An earlier file of that name is untouched.
    """
    temporary = path.with_name(f".tmp_{secrets.token_hex(8)}_{path.name}")  # process ids repeat: containers share folders
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as f:
            yield f
            f.flush()
            if flush:
                os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as e:
        raise UserError(f"cannot write {path}: {why_not_written(path, e)}") from e
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_file(path: Path, content: bytes | str) -> None:
    """Write a file as a whole. Raises UserError as `whole_file` does."""
    with whole_file(path) as f:
        f.write(content.encode() if isinstance(content, str) else content)


def why_not_written(path: Path, error: Exception) -> str:
    """The cause of an error in writing, in words; with the free space where the disk may be full."""
    # torch.save raises an error of its own while it handles the disk's.
    if not isinstance(error, OSError) and isinstance(error.__context__, OSError):
        error = error.__context__
    reason = getattr(error, "strerror", None) or first_line(error)
    if getattr(error, "errno", None) in (None, *_FULL):
        with contextlib.suppress(OSError):
            folder = next(parent for parent in path.absolute().parents if parent.is_dir())
            reason += f"; {shutil.disk_usage(folder).free / 1e6:.0f} MB are free on the disk of {folder}"
    return reason


# Names of half-written files (`whole_file`) and of half-written or half-deleted checkpoints (checkpoints/store.py).
_LEFTOVER = re.compile(r"\.tmp_[0-9a-f]{16}_.+|\.(tmp|del)_step_\d{7,}")


def is_leftover(name: str) -> bool:
    """Whether an interrupted command leaves files or folders of this name; all others are the user's."""
    return _LEFTOVER.fullmatch(name) is not None


def remove_leftovers(folder: Path) -> None:
    """Remove what an interrupted process left half written or half deleted. Only for a folder that this process has locked."""
    for path in [path for path in folder.glob(".*") if is_leftover(path.name)]:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def read_file(path: Path) -> bytes:
    """The content of a file. Raises UserError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from e


def lock_file(path: Path, doing: str, key: str) -> IO[bytes]:
    """Create the file, with its folder, and lock it until it is closed or this process ends, killed or not.

    What an interrupted process left in the folder is removed. On a file system without locks (some NFS and Lustre mounts) it
    warns and goes on.
    Raises UserError: another process is `doing` ("sampling into") the folder, and another `key` helps; or it is not writable.
    """
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b")
    except OSError as e:
        raise UserError(f"cannot write to {folder}: {why_not_written(path, e)}") from e
    try:
        is_ours = lock_descriptor(file.fileno(), blocking=False)
    except OSError as e:
        log.warning("%s cannot be locked (%s): make sure that no other process writes to this folder", path, e.strerror)
        return file
    if not is_ours:
        with file:
            file.seek(1)
            holder = file.read().decode(errors="replace").strip()
            raise UserError(f"another process is {doing} {folder} ({holder}); wait for it, or choose another {key}=...")
    holder = f"process {os.getpid()} on {platform.node()}, since {datetime.now():%Y-%m-%d %H:%M:%S}: {shlex.join(sys.argv)}"
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
        file.truncate(0)
        file.write(b"\n" + holder[:400].encode())  # Windows locks the first byte, also for readers
        file.flush()
    remove_leftovers(folder)
    return file


def append_line(path: Path, record: dict) -> None:
    """Append one JSON object to a file of JSON lines. A line that was cut off before stays a line of its own.

    Raises UserError where the file cannot be written.
    """
    try:
        with open(path, "a+b") as f:
            f.seek(max(f.tell() - 1, 0))
            is_torn = f.read(1) not in (b"", b"\n")
            f.write((b"\n" if is_torn else b"") + json.dumps(record).encode() + b"\n")
    except OSError as e:
        raise UserError(f"cannot write {path}: {why_not_written(path, e)}") from e


def read_lines(path: Path) -> Iterator[dict]:
    """The objects of a file of JSON lines, without lines that were cut off. UserError: it exists and cannot be read."""
    for line in read_file(path).decode(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            if isinstance(value := json.loads(line), dict):
                yield value


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises UserError where it cannot be read, or is not JSON."""
    try:
        return json.loads(read_file(path))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not JSON: {e}") from e


def hash_bytes(blob: bytes) -> str:
    """32 hexadecimal digits (blake2b)."""
    return hashlib.blake2b(blob, digest_size=16).hexdigest()


def hash_file(path: Path) -> str:
    """`hash_bytes` of a file's content, read in chunks."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as f:
        while chunk := f.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
