"""Labelled images to encode: a folder of class folders, a folder with a file of labels, or WebDataset tars."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import logging
import os
import posixpath
import re
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from common.errors import UserError
from common.files import is_hidden, list_images
from latents.contents import IMAGE_SUFFIXES, way_on
from latents.shards import spread_items
from latents.tars import COMPRESSED_SUFFIXES, MAX_LABEL, find_tars, read_samples

log = logging.getLogger(__name__)

LABEL_FILES = ("labels.csv", "labels.json", "dataset.json", "metadata.csv")
NAME_COLUMNS = ("file_name", "filename", "file", "path", "image", "name")
LABEL_COLUMNS = ("label", "class", "cls", "class_id", "target", "category")


def to_jpeg(pixels: np.ndarray) -> bytes:
    """uint8 [H, W, 3] -> a JPEG file of quality 95 with all of the colours' resolution."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", quality=95, subsampling=0)
    return file.getvalue()


class LabelledImages:
    """Images by number: their names relative to the path, labels [N] int64, and names of the classes where there are any."""

    def __init__(self, path: Path, names: list[str], labels: list[int], class_names: list[str] | None):
        self.path, self.names, self.class_names = path, names, class_names
        bad = next((i for i, label in enumerate(labels) if not 0 <= label <= MAX_LABEL), None)
        if bad is not None:
            raise UserError(f"{path}: {names[bad]} has the label {labels[bad]}; labels go from 0 to {MAX_LABEL}")
        self.labels = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.names)

    def open(self, index: int) -> Path | BinaryIO:
        """What `read_rgb` reads."""
        return self.path / self.names[index]

    def size(self, index: int) -> int:
        """In bytes; -1 for a file that cannot be opened, which encoding then names."""
        try:
            return (self.path / self.names[index]).stat().st_size
        except OSError:
            return -1

    def count_classes(self, num_classes: int | None) -> int:
        """`num_classes`, or as many as the class names or the labels need. Raises UserError where it is too small for them."""
        needed = len(self.class_names) if self.class_names else int(self.labels.max()) + 1
        if num_classes is not None and num_classes < needed:
            worst = int(self.labels.argmax())
            raise UserError(
                f"num_classes={num_classes}, but {self.names[worst]} has the label {self.labels[worst]}; "
                f"set num_classes={needed} or more"
            )
        return num_classes or needed

    def fingerprint(self, start: int, stop: int) -> str:
        """A hash of names, sizes in bytes and labels of images start .. stop - 1, and of the bytes of a few of them.

        Reading them all would take as long as encoding them.
        """
        digest = hashlib.blake2b(self.labels[start:stop].tobytes(), digest_size=16)
        for index in range(start, stop):
            digest.update(f"{self.names[index]}\0{self.size(index)}\0".encode(errors="surrogateescape"))
        for index in (start + spread_items(stop - start, 4)).tolist():
            with contextlib.suppress(OSError):  # encoding names what cannot be read
                image = self.open(index)
                digest.update(image.read_bytes() if isinstance(image, Path) else image.read())
        return digest.hexdigest()


def open_labelled_images(path: str | Path, labels: str = "auto") -> LabelledImages:
    """Find the images and their labels.

    Args:
        path: a folder of images; a folder of WebDataset tars, or one tar.
        labels: `auto` (a file of labels in the folder, else class folders), `folders`, `none` (one class), or a CSV or JSON file.

    Raises:
        UserError: no images, images without labels where all need one, or a label for an image that is not there.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"images={path} does not exist; give a folder of images or WebDataset tars")
    if path.is_file() and path.suffix.lower() != ".tar":
        raise UserError(f"images={path} is a file; give a folder of images, or a tar")
    names = [] if path.is_file() else list_images(path, IMAGE_SUFFIXES)
    tars = path.is_file() or any(f.suffix.lower() == ".tar" and not f.name.startswith(".") for f in path.iterdir())
    if tars and names:
        raise UserError(f"images={path} holds tars and images ({names[0]}, ...); put them into folders of their own")
    if tars:
        if labels != "auto":
            raise UserError(f"labels={labels} is for folders of images; the labels of tars are in their .cls members")
        return TarImages(path)
    if not names:
        if any(f.name.lower().endswith(COMPRESSED_SUFFIXES) for f in path.iterdir()):
            find_tars(path)  # raises an error that says what to do
        raise UserError(f"images={path} holds no images ({', '.join(IMAGE_SUFFIXES)}) and no tars; it {way_on(path, 'images')}")
    if labels == "none":
        return LabelledImages(path, names, [0] * len(names), None)
    if labels == "auto":
        label_file = next((path / name for name in LABEL_FILES if (path / name).is_file()), None)
    else:
        label_file = Path(labels) if labels != "folders" else None
    return _label_by_folder(path, names) if label_file is None else _label_by_file(path, names, label_file)


def _label_by_folder(path: Path, names: list[str]) -> LabelledImages:
    """The first folder below `path` is the class; classes are numbered in the order of their names, as everywhere."""
    loose = [name for name in names if "/" not in name]
    if loose:
        raise UserError(
            f"images={path}: {loose[0]} lies in no class folder; put images into a folder per class, give "
            "labels=<CSV or JSON file>, or labels=none for a single class"
        )
    classes = sorted({name.partition("/")[0] for name in names})
    if len(classes) == 1:
        raise UserError(
            f"images={path} holds the one class folder {classes[0]!r}; if the classes are inside it, give "
            f"images={path / classes[0]}; for a single class, labels=none"
        )
    empty = sorted({f.name for f in path.iterdir() if f.is_dir() and not is_hidden(f.name)} - set(classes))
    if empty:
        raise UserError(
            f"images={path}: the class folder {empty[0]!r} holds no images ({', '.join(IMAGE_SUFFIXES)}), and leaving it out "
            "would shift the labels of the classes after it; remove it, or convert what it holds"
        )
    number = {name: i for i, name in enumerate(classes)}
    return LabelledImages(path, names, [number[name.partition("/")[0]] for name in names], classes)


def _label_by_file(path: Path, names: list[str], file: Path) -> LabelledImages:
    """Only images that the file lists are taken."""
    label_of = read_labels(file)
    missing = [name for name in label_of if not os.path.isfile(path / name)]  # False for a name that no file can have
    if missing:
        raise UserError(f"{file} lists {missing[0]}, which is not in {path} ({len(missing)} of {len(label_of)} are missing)")
    unlabelled = [name for name in names if name not in label_of]
    if unlabelled:
        log.warning("%d images of %s have no label in %s and are left out: %s, ...", len(unlabelled), path, file, unlabelled[0])
    names = sorted(label_of)
    labels, class_names = [label_of[name] for name in names], None
    values = [_parse_label_value(label) for label in labels]
    kinds = {type(value) for value in values}
    for name, label, value in zip(names, labels, values):
        if int in kinds and not isinstance(value, int):
            raise UserError(f"{file}: {name} has the label {label!r}, where others have whole numbers; mend it")
        if value is None:
            raise UserError(f"{file}: {name} has the label {label!r}, which is neither a whole number nor a name")
    if str in kinds:
        class_names = sorted(set(values))
        number_of = {name: i for i, name in enumerate(class_names)}
        values = [number_of[value] for value in values]
    return LabelledImages(path, names, values, class_names)


def _parse_label_value(label: str | float) -> int | str | None:
    """The number of 3, "3" and the "3.0" of tables with missing values; a class name as it is; None for other numbers."""
    whole = None if isinstance(label, bool) else re.fullmatch(r"(-?\d{1,18})(\.0*)?", str(label))
    if whole:
        return int(whole[1])
    try:
        float(label)
    except ValueError:
        return label
    return None


def read_labels(file: Path) -> dict[str, str | int]:
    """{name of the image: label} from a CSV file with a header, or from JSON.

    JSON may be {"name": label}, [["name", label], ...], or either of them under the key "labels" (the dataset.json of EDM).

    Raises:
        UserError: another form; a name that comes twice with different labels.
    """
    parse = {".csv": _parse_csv, ".json": _parse_json}.get(file.suffix.lower())
    try:
        text = file.read_text(encoding="utf-8-sig")  # spreadsheets begin their files with a mark of the byte order
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"labels={file} cannot be read: {e}") from e
    if parse is None:
        raise UserError(f"labels={file} must be auto, folders, none, or a .csv or .json file")
    label_of: dict[str, str | int] = {}
    for name, label in parse(file, text):
        name = posixpath.normpath(name)
        if label_of.setdefault(name, label) != label:
            raise UserError(f"{file}: {name} has the labels {label_of[name]!r} and {label!r}")
    if not label_of:
        raise UserError(f"{file} lists no images")
    return label_of


def _parse_csv(file: Path, text: str) -> list[tuple[str, str]]:
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True, strict=True, restval="")
    try:
        rows, header = [(reader.line_num, row) for row in reader], reader.fieldnames or []
    except csv.Error as e:
        raise UserError(f"{file} is not CSV: {e}") from e
    column_of = {name.strip().lower(): name for name in header}
    columns = [next((column_of[name] for name in known if name in column_of), None) for known in (NAME_COLUMNS, LABEL_COLUMNS)]
    if None in columns:
        raise UserError(f"{file} needs a header with the columns file_name,label; found {', '.join(header) or 'nothing'}")
    pairs = [tuple(row[column].strip() for column in columns) for _, row in rows]
    for (number, _), pair in zip(rows, pairs):
        if not all(pair):
            raise UserError(f"{file}, line {number}: the file name or the label is missing")
    return pairs


def _parse_json(file: Path, text: str) -> list[tuple[str, str | int]]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file} is not JSON: {e}") from e
    if isinstance(content, dict) and "labels" in content:
        content = content["labels"]
    pairs = list(content.items()) if isinstance(content, dict) else content
    is_pairs = isinstance(pairs, list) and all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs)
    if not (is_pairs and all(isinstance(name, str) and isinstance(label, (str, int, float)) for name, label in pairs)):
        raise UserError(f'{file} must hold {{"name": label, ...}} or [["name", label], ...], alone or under "labels"')
    return pairs


class TarImages(LabelledImages):
    """WebDataset tars: `<key>.jpg` (or another image) with `<key>.cls`, the label as text. Read in place, not unpacked.

    Raises:
        UserError: no tars, compressed or damaged ones; an image without a label or a label without an image, by name.
    """

    def __init__(self, path: Path):
        names, labels, self._where = [], [], []
        extensions = tuple(suffix[1:] for suffix in IMAGE_SUFFIXES)
        for tar in find_tars(path):
            for member, label in read_samples(tar, extensions, ".jpg (or other image)", lambda member: member).values():
                names.append(f"{tar.name}/{member.name}")
                labels.append(label)
                self._where.append((tar, member.start, len(member.payload)))
        if not names:
            raise UserError(f"images={path}: the tars hold no images ({', '.join(IMAGE_SUFFIXES)})")
        super().__init__(path, names, labels, None)

    def size(self, index: int) -> int:
        return self._where[index][2]

    def open(self, index: int) -> BinaryIO:
        tar, offset, size = self._where[index]
        with open(tar, "rb") as f:
            f.seek(offset)
            return io.BytesIO(f.read(size))
