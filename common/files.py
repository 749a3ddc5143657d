"""Helpers for regular files, atomic file writes, locks, hashes, JSON and YAML."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import yaml
from filelock import lock_descriptor
from omegaconf import OmegaConf

from common.errors import UserError, as_user_error, first_line

log = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parent.parent
FORMAT = 1  # format of runs and data folders; docs/architecture.md says when this number rises


def regular_file(path: Path) -> Path:
    """Return `path` if it is missing, a regular file or a link to one. Call this function before reading.

    Raises UserError for broken links and for other files, because reading a pipe or a device can block forever.
    """
    if os.path.lexists(path) and not os.path.isfile(path):
        raise UserError(f"{path} is not a regular file, or the link is broken")
    return path


def refuse_link(path: Path) -> Path:
    """Return `path`, which lies inside a run or an output folder. Raises UserError if it is a link.

    A folder that somebody copied or downloaded can contain links to anything. Writing through a link would change that.
    """
    if path.is_symlink():
        raise UserError(f"{path} is a link, and nothing is written through links inside {path.parent}; link that folder instead")
    return path


def make_folder(path: Path) -> None:
    """Create a folder inside a run or an output folder, if it is missing."""
    try:
        refuse_link(path).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"cannot write to {path}: {describe_write_error(path, e)}") from e


def _open_to_append(path: Path) -> IO[bytes]:
    """Open a file inside a run or an output folder for reading and appending. Raises UserError for links, pipes and devices."""
    return open(regular_file(refuse_link(path)), "a+b")


def describe_write_error(path: Path, error: Exception, needed_bytes: int | None = None) -> str:
    """Describe why a write failed. If the disk may be full, include the free space and, if given, the space that is needed."""
    # torch.save raises its own error while it handles the error from the disk.
    if not isinstance(error, OSError) and isinstance(error.__context__, OSError):
        error = error.__context__
    reason = getattr(error, "strerror", None) or first_line(error)
    if getattr(error, "errno", None) in (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with contextlib.suppress(OSError):
            folder = next(parent for parent in path.absolute().parents if parent.is_dir())
            needs = "" if needed_bytes is None else f"{needed_bytes / 1e6:.3g} MB are needed, and "
            reason += f"; {needs}{shutil.disk_usage(folder).free / 1e6:.0f} MB are free on the disk of {folder}"
            if hasattr(os, "statvfs") and (disk := os.statvfs(folder)).f_files and not disk.f_favail:
                reason += ", which has no room for another file (no free inodes)"
    return reason


@contextlib.contextmanager
def open_atomically(path: Path, flush: bool = True) -> Iterator[IO[bytes]]:
    """Open a temporary file, which is renamed to `path` when its content is complete and on disk. Create the folder.

    With flush=False, the system decides when the content reaches the disk. Use flush=False for files that can be recreated.
    Raises UserError if the file cannot be written. An earlier file at `path` then stays unchanged.
    """
    temporary = path.with_name(f".tmp_{secrets.token_hex(8)}_{path.name}")  # containers can have equal process ids
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as f:
            yield f
            f.flush()
            if flush:
                os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as e:
        raise UserError(f"cannot write {path}: {describe_write_error(path, e)}") from e
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write `content` to a file atomically."""
    with open_atomically(path) as f:
        f.write(content.encode() if isinstance(content, str) else content)


def is_leftover(name: str) -> bool:
    """Return whether `name` belongs to a temporary file or checkpoint folder from an interrupted write or removal."""
    return re.fullmatch(r"\.tmp_[0-9a-f]{16}_.+|\.(tmp|del)_step_\d{7,}", name) is not None


def remove_leftovers(folder: Path) -> None:
    """Remove incomplete files and folders that an interrupted process left behind. The caller must hold the folder's lock."""
    for path in [path for path in folder.glob(".*") if is_leftover(path.name)]:
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def lock_file(path: Path, activity: str, key: str, blocking: bool = False) -> IO[bytes]:
    """Create a file, lock it until it is closed or this process exits, and remove leftovers from the file's folder.

    On file systems without locks (some NFS and Lustre mounts), only log a warning.

    Args:
        activity, key: The error for a locked file names its owner, this activity ("sampling into") and the key to change.
        blocking: Wait until the file is unlocked.

    Raises:
        UserError: Another process holds the lock, or the folder is not writable.
    """
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _open_to_append(path)
    except OSError as e:
        raise UserError(f"cannot write to {folder}: {describe_write_error(path, e)}") from e
    try:
        is_locked = lock_descriptor(file.fileno(), blocking=blocking)
    except OSError as e:
        _warn_without_locks(folder, e.strerror)
        return file
    if not is_locked:
        with file:
            file.seek(1)
            holder = file.read().decode(errors="replace").strip()
            raise UserError(f"another process is {activity} {folder}: {holder}; wait for it, or choose another {key}=...")
    file.seek(0)
    if file.read(1) not in (b"", b"\n"):
        file.close()
        raise UserError(f"{path} was not written by this program, and a lock needs this name; choose another {key}=...")
    with contextlib.suppress(OSError):  # if the disk is full, the lock works without this text
        file.truncate(0)
        # Without a buffer, because closing the file would try again to write the text, and hide the error of the caller.
        os.write(file.fileno(), f"\nprocess {os.getpid()} on {platform.node()}".encode())  # Windows forbids reading byte 0
    remove_leftovers(folder)
    return file


@functools.cache  # once for each folder
def _warn_without_locks(folder: Path, reason: str) -> None:
    log.warning("files in %s cannot be locked (%s): make sure that no other process writes there", folder, reason)


@contextlib.contextmanager
def lock_folder(folder: Path, activity: str, key: str, settings_file: str = ".lock") -> Iterator[None]:
    """Create a folder and lock it in the `with` block, as `lock_file` does.

    If the folder was new and the block writes nothing but the file named `settings_file`, the folder is removed again.
    """
    created = missing_folders(folder)
    with lock_file(folder / ".lock", activity, key):
        try:
            yield
        finally:  # under the lock, as nobody else uses the folder
            with contextlib.suppress(OSError):
                if created and {*os.listdir(folder)} <= {".lock", settings_file}:
                    shutil.rmtree(folder)
                    remove_empty(*created[1:])


def missing_folders(folder: Path) -> list[Path]:
    """Return this folder and the folders above that do not exist, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(*folders: Path) -> None:
    """Remove folders that are empty, in this order, up to the first one that is not."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def append_line(path: Path, record: dict) -> None:
    """Append `record` as a line of JSON, and return when the line is on disk. Terminate an incomplete last line first."""
    try:
        with _open_to_append(path) as f:
            f.seek(max(f.tell() - 1, 0))
            is_incomplete = f.read(1) not in (b"", b"\n")
            f.write((b"\n" if is_incomplete else b"") + json.dumps(record).encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise UserError(f"cannot write {path}: {describe_write_error(path, e)}") from e


def read_lines(path: Path, parse: Callable[[dict], Any] | None = None, log_level: int = logging.WARNING) -> Iterator[Any]:
    """Yield the complete objects in a JSON-lines file. A missing file yields nothing.

    If `parse` is given, yield what it returns for each object. Objects for which it raises ValueError are left out, and one
    message at `log_level` names the file and the first line that was left out.
    """
    with as_user_error(path):
        content = regular_file(path).read_bytes() if path.exists() else b""
    left_out: list[str] = []
    for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
        try:
            if not isinstance(record := json.loads(line), dict):
                raise ValueError("it is not an object")
            if parse is not None:
                record = parse(record)
        except (ValueError, RecursionError) as e:
            left_out.append(f"line {number} is left out: {first_line(e)}")
        else:
            yield record
    if left_out and parse is not None:
        more = f" ({len(left_out) - 1} other lines are left out, too)" if left_out[1:] else ""
        log.log(log_level, "%s: %s%s", path, left_out[0], more)


def read_json(path: Path) -> Any:
    """Parse a JSON file."""
    with as_user_error(path):
        return json.loads(regular_file(path).read_bytes())


def read_yaml(path: Path, source: str | None = None) -> dict:
    """Parse a YAML file that contains a dictionary, without resolving interpolations.

    Aliases are refused, because nested aliases can stand for more values than fit into memory. No command writes aliases.
    Error messages name the file as `source`, or else by its path.
    """
    with as_user_error(source or path):
        text = regular_file(path).read_text(encoding="utf-8")
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ValueError("it contains YAML aliases")
        content = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else None
        if not isinstance(content, dict):
            raise ValueError("it holds no configuration")
        return content


def pop_format(content: dict, file: Path) -> None:
    """Remove the number `format` from the content of a file. Raise UserError for another number than FORMAT.

    A missing number means 1, because files of other programs have none.
    """
    if (found := content.pop("format", 1)) != FORMAT:
        raise UserError(f"{file} has format {found!r:.100}, but this version reads format {FORMAT}")


def hash_bytes(content: bytes) -> str:
    """Return the blake2b hash of the bytes as 32 hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def hash_file(path: Path) -> str:
    """Return the same hash as `hash_bytes` for a file's content, which is read in chunks."""
    digest = hashlib.blake2b(digest_size=16)
    with open(regular_file(path), "rb") as f:
        while chunk := f.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
