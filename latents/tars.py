"""Index WebDataset tars, whose members with the same key form a sample. Damaged tars and incomplete samples raise UserError."""

from __future__ import annotations

import re
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common.errors import UserError, as_user_error
from common.files import regular_file
from common.images import is_hidden, walk
from common.progress import progress_bar

LABEL_EXTENSIONS = ("cls", "cls.txt")
# Words in names of files and folders, and the splits of a data set that they stand for.
SPLITS = {"train": "train", "training": "train", "val": "validation", "valid": "validation", "validation": "validation"}
SPLITS |= {"test": "test", "testing": "test"}
TAR_NAME = re.compile(r"\.(tar(\..*)?|tgz)$", re.IGNORECASE)  # also matches compressed tars, so that `index_tars` rejects them


@dataclass(frozen=True)
class TarMember:
    """A member of a tar archive and its label."""

    file: Path  # path of the tar archive
    name: str
    start: int  # offset of the member in the archive, in bytes
    size: int  # size of the member in bytes
    label: int

    def read(self) -> bytes:
        with open(regular_file(self.file), "rb") as f:
            f.seek(self.start)
            return f.read(self.size)


def index_tars(path: Path, extensions: tuple[str, ...], is_labelled: bool = True) -> list[TarMember]:
    """List the members with one of `extensions` in a tar, or in all tars below a folder, sorted by path. Labels are in <key>.cls.

    If `is_labelled` is false, no .cls is read, and all labels are 0.

    Raises UserError if a tar is compressed or damaged, or if another tar follows in the same file. Also raises UserError if a key
    contains a dot, if a key has no label, no member or two members, or if a label is not an integer.
    """
    tars = list_tars(path)
    bar = progress_bar(tars, desc="indexing", unit="tars", delay=1, leave=False)
    return [item for tar in bar for item in _index(tar, extensions, is_labelled)]


def list_tars(path: Path) -> list[Path]:
    """Return a tar, or all tars below a folder, sorted by path. Follow links to folders, and skip hidden names.

    Raises UserError if a folder cannot be read, or contains a link to a folder above.
    """
    if path.is_file():
        return [path]
    problems: dict[str, str] = {}
    tars = sorted(path / name for name, entry in walk(path, problems) if TAR_NAME.search(entry.name))
    if problems:
        name = min(problems)
        raise UserError(f"{path / name} {problems[name]}; remove it")
    return tars


def splits_in_name(name: str) -> frozenset[str]:
    """Return the splits of a data set that the words in a name stand for."""
    return frozenset(SPLITS[word] for word in re.split(r"[\W\d_]+", name.lower()) if word in SPLITS)


def check_single_split(path: Path, remedy: str) -> None:
    """Raise UserError if the names of the tars below `path` contain different splits of a data set, such as train and val."""
    first: dict[frozenset[str], str] = {}  # the first tar for each set of splits that a name contains
    for name in (tar.relative_to(path).as_posix() for tar in list_tars(path) if tar != path):
        first.setdefault(splits_in_name(name), name)
    first.pop(frozenset(), None)
    if len(first) > 1:
        examples = ", ".join(first.values())
        raise UserError(f"{path} holds tars of several parts of a data set ({examples}); give a folder with one part, {remedy}")


def _index(file: Path, extensions: tuple[str, ...], is_labelled: bool) -> list[TarMember]:
    members: dict[str, tuple[str, int, int]] = {}  # maps each key to (name, start, size)
    labels: dict[str, int] = {}
    known = (*extensions, *LABEL_EXTENSIONS) if is_labelled else extensions
    with as_user_error(f"{file} (an uncompressed tar with whole numbers in .cls)"), tarfile.open(regular_file(file), "r:") as tar:
        while (member := tar.next()) is not None:
            # tarfile would otherwise cache all members, which takes gigabytes for a large tar.
            tar.members.clear()  # ty: ignore[missing-attribute] (its types leave `members` out)
            if any(is_hidden(part) for part in PurePosixPath(member.name).parts):
                continue
            folder, slash, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            key = folder + slash + stem
            extension = extension.lower()
            if extension not in known and extension.endswith(tuple(f".{e}" for e in known)):
                raise UserError(f"{file}: member {member.name} has a dot in its key, which ends at the first dot; rename it")
            if extension in LABEL_EXTENSIONS and is_labelled:
                labels[key] = int(tar.extractfile(member).read())
            elif extension in extensions:
                if key in members:
                    raise UserError(f"{file}: {members[key][0]} and {member.name} share a key; keep one of them")
                members[key] = member.name, member.offset_data, member.size
        tar.fileobj.seek(tar.offset)
        rest = tar.fileobj.read(2 * tarfile.RECORDSIZE)
    # tarfile treats a damaged header as the end of the archive. The actual end of an archive consists of blocks of zeros.
    if len(rest) < tarfile.BLOCKSIZE or any(rest):
        raise UserError(f"{file} is damaged, or followed by another tar, at byte {tar.offset}: no end of the archive")
    if is_labelled and (unpaired := sorted(members.keys() ^ labels.keys())):
        raise UserError(f"{file}: the key {unpaired[0]} lacks its .cls, or its member of .{', .'.join(extensions)}")
    return [TarMember(file, *member, labels.get(key, 0)) for key, member in members.items()]
