"""Files as every part of the project reads and writes them: whole or not at all, hashed, as JSON lines, as Markdown tables."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import os
import platform
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from filelock import lock_descriptor

from common.errors import UserError

log = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parent.parent
CHUNK_BYTES = 1 << 22
MAX_HOLDER_BYTES = 400  # of the words in a lock


@contextlib.contextmanager
def whole_file(path: Path, flush: bool = True) -> Iterator[IO[bytes]]:
    """A file to write to, which appears under its name only when it is complete and on the disk. Its folder is created.

    Args:
        flush: False leaves it to the system when the content reaches the disk: for many files that can be made again.

    Raises:
        UserError: it cannot be written. An earlier file of that name is untouched.
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
    """The cause of an error in writing, in words; with the free space, where the disk may be full."""
    reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    # Libraries that write by themselves (torch, safetensors) wrap the system's error in their own.
    if getattr(error, "errno", None) in (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with contextlib.suppress(OSError):
            folder = next(parent for parent in path.absolute().parents if parent.is_dir())
            reason += f"; {shutil.disk_usage(folder).free / 1e6:.0f} MB are free on the disk of {folder}"
    return reason


def remove_leftovers(folder: Path) -> None:
    """Remove what an interrupted process left half written or half deleted. Only for a folder that this process has locked."""
    for path in [*folder.glob(".tmp_*"), *folder.glob(".del_*")]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def read_file(path: Path, size: int = -1) -> bytes:
    """The content of a file, or its first `size` bytes. Raises UserError where it cannot be read."""
    try:
        with open(path, "rb") as f:
            return f.read(size)
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}") from e


def lock_file(path: Path, busy: str, remedy: str) -> IO[bytes]:
    """The opened file, locked until it is closed or this process ends, killed or not.

    Its content says who holds it. Its folder is created. On a file system without locks (some NFS and Lustre mounts) it warns
    and goes on.

    Args:
        busy, remedy: what another process does that holds the lock, and what helps; for the message.

    Raises:
        UserError: another process holds the lock; the message names it.
        OSError: the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b")
    try:
        is_ours = lock_descriptor(file.fileno(), blocking=False)
    except OSError as e:
        log.warning("%s cannot be locked (%s): make sure that no other process writes to this folder", path, e.strerror)
        return file
    if not is_ours:
        with file:
            file.seek(1)
            holder = file.read(MAX_HOLDER_BYTES).decode(errors="replace").strip()
        raise UserError(f"{busy} ({holder}); {remedy}" if holder else f"{busy}; {remedy}")
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    holder = f"process {os.getpid()} on {platform.node()}, since {since}: {shlex.join(sys.argv)}"
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
        file.truncate(0)
        file.write(b"\n" + holder.encode(errors="replace")[:MAX_HOLDER_BYTES])  # Windows locks the first byte, also for readers
        file.flush()
    return file


def lock_output(folder: Path, doing: str) -> IO[bytes]:
    """Create and lock the folder that a command's output= names, without what an interrupted one left; returns the lock.

    Args:
        doing: what the command does to the folder, for the message: `sampling into`.

    Raises:
        UserError: another process holds the lock, or the folder cannot be written to.
    """
    try:
        lock = lock_file(folder / ".lock", f"another process is {doing} {folder}", "wait for it, or choose another output=...")
    except OSError as e:
        raise UserError(f"cannot write to {folder} ({why_not_written(folder, e)}); choose another output=...") from e
    remove_leftovers(folder)
    return lock


def append_line(path: Path, record: dict) -> None:
    """Append one JSON object to a file of JSON lines. A last line that was cut off is not joined to it.

    Raises:
        UserError: the file cannot be written; it is as it was.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with open(path, "a+b") as f:
            f.seek(max(f.tell() - 1, 0))
            is_torn = f.read(1) not in (b"", b"\n")
            f.write((b"\n" if is_torn else b"") + json.dumps(record).encode() + b"\n")
    except OSError as e:
        with contextlib.suppress(OSError):  # it did not exist, say
            os.truncate(path, size)  # not half a line
        raise UserError(f"cannot write {path}: {why_not_written(path, e)}") from e


def read_lines(path: Path) -> Iterator[tuple[int, dict | None]]:
    """(line number, object) of a file of JSON lines; None for a line that is cut off, damaged or no object.

    A file that does not exist has no lines. Raises UserError where it cannot be read.
    """
    if not path.exists():
        return
    for number, line in enumerate(read_file(path).decode(errors="replace").splitlines(), start=1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        yield number, value if isinstance(value, dict) else None


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        UserError: it cannot be read, or is not JSON.
    """
    content = read_file(path)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is not JSON: {e}") from e


def with_sorted_header(blob: bytes) -> bytes:
    """The bytes of a safetensors file with the keys of its JSON header sorted: safetensors orders them anew in every run."""
    size = int.from_bytes(blob[:8], "little")
    header = json.dumps(json.loads(blob[8 : 8 + size]), sort_keys=True, separators=(",", ":"))
    return blob[:8] + header.encode().ljust(size) + blob[8 + size :]


def hash_bytes(blob: bytes) -> str:
    """32 hexadecimal digits (blake2b)."""
    return hashlib.blake2b(blob, digest_size=16).hexdigest()


def hash_file(path: Path) -> str:
    """`hash_bytes` of a file's content, read in chunks."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as f:
        while chunk := f.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class HashingFile(io.BufferedWriter):
    """A new file, opened for writing, that hashes what passes through it. Its writer must not seek; torch.save does not."""

    def __init__(self, path: Path):
        super().__init__(io.FileIO(path, "w"))
        self._digest = hashlib.blake2b(digest_size=16)

    def write(self, data) -> int:
        self._digest.update(data)
        return super().write(data)

    def hash(self) -> str:
        """`hash_bytes` of what was written so far."""
        return self._digest.hexdigest()


def list_images(folder: Path, suffixes: Sequence[str]) -> list[str]:
    """Paths of the images below a folder, relative to it, sorted, with forward slashes. Links to folders are followed.

    Raises:
        UserError: a link leads back to a folder that holds it.
    """
    names = []
    for root, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for link in (Path(root, name) for name in folders if os.path.islink(os.path.join(root, name))):
            if link.resolve() in (Path(root).resolve(), *Path(root).resolve().parents):
                raise UserError(f"{link} is a link to a folder that holds it; remove it")
        inside = Path(root).relative_to(folder)
        names += [(inside / n).as_posix() for n in files if not is_hidden(n) and n.lower().endswith(tuple(suffixes))]
    return sorted(names)


def is_hidden(name: str) -> bool:
    """Of a file or folder: hidden, or what macOS adds to a .zip. `list_images` leaves these out."""
    return name.startswith(".") or name == "__MACOSX"


def relative_path(path: str | Path) -> str:
    """The path from the working folder; on Windows, the whole path of what lies on another drive."""
    try:
        return os.path.relpath(path)
    except ValueError:
        return str(path)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]], escape: Callable[[str], str] = str) -> str:
    """A Markdown table, with a final newline. Bars and line breaks inside cells cannot break it.

    Args:
        rows: one cell for each column.
        escape: applied to every cell first, for text that must not be taken for HTML, say.
    """

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(escape(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n"

    return line(columns) + "|" + "---|" * len(columns) + "\n" + "".join(map(line, rows))
