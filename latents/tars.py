"""WebDataset tars: members that share a key form a sample. Damaged tars, and samples that would be left out, are errors."""

from __future__ import annotations

import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.progress import progress_bar

LABEL_EXTENSIONS = ("cls", "cls.txt")
TAR_NAME = re.compile(r"\.(tar(\..*)?|tgz)$", re.IGNORECASE)  # also compressed ones, which are refused rather than left out


@dataclass(frozen=True)
class TarItem:
    """A member of a tar, and its label."""

    file: Path
    name: str
    start: int  # of its bytes in the tar
    size: int
    label: int

    def read(self) -> bytes:
        with open(self.file, "rb") as f:
            f.seek(self.start)
            return f.read(self.size)


def find_tars(path: Path) -> list[Path]:
    """The tars in a folder and in those below it, sorted, or the one that `path` is."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [f for f in files if TAR_NAME.search(f.name) and not f.name.startswith(".")]


def index_tars(path: Path, extensions: tuple[str, ...]) -> list[TarItem]:
    """Every member with one of `extensions`, in the order of the tars, with the label of its key, <key>.cls.

    Raises:
        UserError: a tar that is compressed, truncated, damaged or followed by another; a key with a dot in it, that lacks one of
            its two members, or has two of a kind; a label that is no whole number.
    """
    tars = progress_bar(find_tars(path), desc="indexing", unit="tars", delay=1, leave=False)
    return [item for tar in tars for item in _index(tar, extensions)]


def _index(file: Path, extensions: tuple[str, ...]) -> list[TarItem]:
    members: dict[str, tuple[str, int, int]] = {}  # key -> name, start, size
    labels: dict[str, int] = {}
    known = (*extensions, *LABEL_EXTENSIONS)
    try:
        with tarfile.open(file, "r:") as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # tarfile keeps all, which is gigabytes for a large tar
                folder, slash, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                key, extension = folder + slash + stem, extension.lower()
                found = labels if extension in LABEL_EXTENSIONS else members
                if extension not in known and extension.endswith(tuple(f".{e}" for e in known)):
                    raise UserError(f"{file}: member {member.name} has a dot in its key, which ends at the first dot; rename it")
                if extension not in known or not member.isreg() or not stem:
                    continue
                if key in found:
                    raise UserError(f"{file}: the key {key} has two {extension} members")
                content = (member.name, member.offset_data, member.size)
                found[key] = int(tar.extractfile(member).read()) if found is labels else content
            tar.fileobj.seek(tar.offset)
            rest = tar.fileobj.read(2 * tarfile.RECORDSIZE)
    except UserError:
        raise
    except (tarfile.TarError, OSError, EOFError, ValueError) as e:
        raise UserError(f"{file} cannot be read as an uncompressed tar with whole numbers in .cls: {e}") from e
    # tarfile takes a damaged header for the end. The end of a whole tar is a block of zeros, and nothing comes after.
    if len(rest) < tarfile.BLOCKSIZE or any(rest):
        raise UserError(f"{file} is damaged, or followed by another tar, at byte {tar.offset}: no end of the archive")
    if unpaired := sorted(members.keys() ^ labels.keys()):
        raise UserError(f"{file}: the key {unpaired[0]} lacks its .cls, or its member of .{', .'.join(extensions)}")
    return [TarItem(file, *member, labels[key]) for key, member in members.items()]
