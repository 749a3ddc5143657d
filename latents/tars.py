"""WebDataset tars: members that share a key form a sample. Damaged tars, and tars that would be left out, are errors."""

from __future__ import annotations

import mmap
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from common.errors import UserError
from common.files import read_file

# First bytes. A tar begins with the name of a member, which may be BZh...: bzip2's letters alone do not tell.
COMPRESSED = re.compile(rb"(?P<gzip>\x1f\x8b)|(?P<bzip2>BZh[1-9]1AY&SY)|(?P<xz>\xfd7zXZ\x00)|(?P<zstd>\x28\xb5\x2f\xfd)")
COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
LABEL_EXTENSIONS = ("cls", "cls.txt")
MAX_LABEL = 10**7  # what is larger is no class number; tables over all classes would not fit into memory
T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """A file in a tar."""

    name: str
    key: str  # folder and name up to the first dot
    extension: str  # what follows that dot, in lower case
    start: int  # where its bytes begin in the tar
    payload: np.ndarray  # its bytes, uint8 [size], a view of the mapped tar


def find_tars(path: Path) -> list[Path]:
    """The tars of a folder, sorted by name, or the one that `path` is.

    Raises:
        UserError: there are none, some are compressed, or some lie in folders below.
    """
    entries = [path] if path.is_file() else sorted(f for f in path.iterdir() if not f.name.startswith(".") and f.is_file())
    compressed = [f for f in entries if f.name.lower().endswith(COMPRESSED_SUFFIXES)]
    tars = [f for f in entries if f.suffix.lower() == ".tar" or f == path]
    for file in compressed + tars:
        found = COMPRESSED.match(read_file(file, 10))
        if found or file in compressed:
            kind = f" ({found.lastgroup})" if found else ""
            raise UserError(f"{file} is compressed{kind}, so that items cannot be read by offset; decompress it first")
    if path.is_dir():
        below = next((f for f in path.glob("*/*") if f.suffix.lower() == ".tar" and not f.name.startswith(".")), None)
        if below is not None:
            raise UserError(f"{below} lies in a folder below {path}; give one folder of tars, or put (or link) all into one")
    if not tars:
        raise UserError(f"{path} holds no tars (*.tar)")
    return tars


def map_file(file: Path) -> np.ndarray:
    """The bytes of a file, memory-mapped: uint8 [size]."""
    with open(file, "rb") as f:
        return np.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)


def walk_tar(file: Path, known: tuple[str, ...], ignored: Callable[[str], None]) -> Iterator[Member]:
    """The members whose extension is one of `known`, in order; `ignored` is called with the extension of every other one.

    Raises:
        UserError: the tar is truncated, damaged or followed by another; a member is a link, or has a dot in its key.
    """
    truncated = f"{file} is truncated or damaged (%s); copy or make it again"
    size = file.stat().st_size
    if size == 0:
        raise UserError(truncated % "it is empty")
    content = map_file(file)
    try:
        with tarfile.open(file, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # tarfile keeps all, which is gigabytes for a large tar
                folder, slash, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                extension = extension.lower()
                if not stem or member.isdir():
                    continue
                if extension not in known:
                    if extension.endswith(tuple(f".{e}" for e in known)):
                        raise UserError(
                            f"{file}: member {member.name} has a dot in its key, which ends at the first dot; rename it"
                        )
                    ignored(extension)
                    continue
                if not member.isreg() or member.issparse():
                    raise UserError(f"{file}: member {member.name} is a link or sparse; make the tar again of plain files")
                stop = member.offset_data + member.size
                if stop > size:
                    raise UserError(truncated % f"{member.name} goes past its end")
                yield Member(
                    member.name, folder + slash + stem, extension, member.offset_data, content[member.offset_data : stop]
                )
            # tarfile takes a damaged header for the end; the end of a whole tar is a block of zeros, and nothing comes after.
            rest = content[tar.offset :]
            if len(rest) < tarfile.BLOCKSIZE or rest[: tarfile.BLOCKSIZE].any():
                raise UserError(truncated % f"no end of the archive at byte {tar.offset}")
            if rest.any():
                raise UserError(f"{file}: something follows the end of the archive, another tar perhaps; take them apart")
    except tarfile.TarError as e:
        raise UserError(truncated % e) from e


def read_samples(
    file: Path,
    extensions: tuple[str, ...],
    kind: str,
    read: Callable[[Member], T],
    ignored: Callable[[str], None] = lambda _: None,
) -> dict[str, tuple[T, int]]:
    """{key: (what `read` makes of the member with one of `extensions`, label)}, in the order of first members.

    Args:
        kind: names these members in messages.
        ignored: called with the extension of every member that is neither such nor a label.

    Raises:
        UserError: as `walk_tar`; a label that is no whole number, a key that has two members of a kind, or none.
    """
    samples: dict[str, list] = {}
    others: set[str] = set()

    def note(extension: str) -> None:
        others.add(extension)
        ignored(extension)

    for member in walk_tar(file, extensions + LABEL_EXTENSIONS, note):
        where, is_label = f"{file}: member {member.name}", member.extension in LABEL_EXTENSIONS
        sample = samples.setdefault(member.key, [None, None])
        if sample[is_label] is not None:
            raise UserError(f"{where}: the key has a second {member.extension}; keys must differ within a tar")
        sample[is_label] = _parse_label(where, member.payload[:65].tobytes()) if is_label else read(member)
    for key, sample in samples.items():
        if None in sample:
            has, lacks = (kind, ".cls") if sample[1] is None else (".cls", kind)
            hint = "make the tar again"
            if others and sample[0] is None:
                held = ", ".join(f".{extension}" for extension in sorted(others)[:4])
                hint = f"it holds {held}: `encode` reads tars of images, `convert` and data.format=webdataset those of .latent"
            raise UserError(f"{file}: sample {key} has a {has} but no {lacks} member; {hint}")
    return {key: tuple(sample) for key, sample in samples.items()}


def _parse_label(where: str, text: bytes) -> int:
    stripped = text.strip()
    if len(text) > 64 or not stripped.isdigit() or int(stripped) > MAX_LABEL:
        raise UserError(f"{where} holds {text[:24]!r}, not a label (a whole number from 0 to {MAX_LABEL})")
    return int(stripped)
