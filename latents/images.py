"""Labelled images to encode: a folder of class folders, a folder with a file of labels, or WebDataset tars."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import os
import tarfile
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from evaluations.images import CONVERTIBLE_MODES, DECODE_ERRORS
from latents.webdataset import LABEL_EXTENSIONS, find_tars

log = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
LABEL_FILES = ("labels.csv", "labels.json", "dataset.json", "metadata.csv")
NAME_COLUMNS = ("file_name", "filename", "file", "path", "image", "name")
LABEL_COLUMNS = ("label", "class", "cls", "class_id", "target", "category")
MIN_SIDE = 8
MAX_ASPECT = 100  # the crop enlarges the shorter side to the resolution: beyond this it would need gigabytes


def read_rgb(file: str | Path | BinaryIO) -> Image.Image:
    """Decode an image, upright as its EXIF says, as 8-bit RGB (alpha is dropped).

    Raises:
        ValueError: it cannot be decoded, has more than 8 bits a channel, or is too small or too narrow to crop.
    """
    try:
        with Image.open(file) as image:
            if image.mode not in ("RGB", *CONVERTIBLE_MODES):
                raise ValueError(f"mode {image.mode} is not one of 8 bits a channel")
            width, height = image.size
            if min(width, height) < MIN_SIDE or max(width, height) > MAX_ASPECT * min(width, height):
                raise ValueError(
                    f"{width}x{height} pixels: the shorter side must have {MIN_SIDE} or more and the longer one at most "
                    f"{MAX_ASPECT} times as many"
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except (*DECODE_ERRORS, Image.DecompressionBombError) as e:
        raise ValueError(str(e) or type(e).__name__) from e


class LabelledImages:
    """Images by number, each with a label.

    Attributes:
        names: of the images, relative to the path, in order.
        labels: [N] int64.
        class_names: by label, or None where classes have no names.
    """

    def __init__(self, path: Path, names: list[str], sizes: list[int], labels: list[int], class_names: list[str] | None):
        self.path, self.names, self.class_names = path, names, class_names
        self.labels = np.array(labels, dtype=np.int64)
        self._sizes = sizes
        if len(self.labels) and self.labels.min() < 0:
            worst = int(self.labels.argmin())
            raise ValueError(f"{path}: {names[worst]} has the label {self.labels[worst]}; labels are 0 or more")

    def __len__(self) -> int:
        return len(self.names)

    def open(self, index: int) -> Path | BinaryIO:
        """What `read_rgb` reads."""
        return self.path / self.names[index]

    def fingerprint(self) -> str:
        """A hash of names, sizes in bytes and labels: reading all images would take hours."""
        digest = hashlib.blake2b(digest_size=16)
        for name, size in zip(self.names, self._sizes):
            digest.update(f"{name}\0{size}\0".encode())
        digest.update(self.labels.tobytes())
        return digest.hexdigest()


def open_labelled_images(path: str | Path, labels: str = "auto") -> LabelledImages:
    """Find the images and their labels.

    Args:
        path: a folder of images; a folder of WebDataset tars, or one tar.
        labels: `auto` (a file of labels in the folder, else class folders), `folders`, `none` (one class), or a CSV or JSON file.

    Raises:
        ValueError: no images, images without labels where all need one, or a label for an image that is not there.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"images={path} does not exist; give a folder of images or WebDataset tars")
    if path.is_file() or any(path.glob("*.tar")):
        if labels != "auto":
            raise ValueError(f"labels={labels} is for folders of images; the labels of tars are in their .cls members")
        return TarImages(path)
    names = sorted(find_images(path))
    if not names:
        raise ValueError(f"images={path} holds no images ({', '.join(SUFFIXES)}) and no tars")
    label_file = next((path / name for name in LABEL_FILES if (path / name).is_file()), None)
    if labels == "none":
        return LabelledImages(path, names, _sizes(path, names), [0] * len(names), None)
    if labels not in ("auto", "folders"):
        return _with_label_file(path, names, Path(labels))
    if labels == "auto" and label_file is not None:
        return _with_label_file(path, names, label_file)
    return _with_class_folders(path, names)


def find_images(folder: Path) -> list[str]:
    """All images below a folder, relative to it; hidden files and folders are left out, links to folders followed."""
    names = []
    for where, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(where).relative_to(folder)
        names += [(inside / f).as_posix() for f in files if f.lower().endswith(SUFFIXES) and not f.startswith(".")]
    return names


def _sizes(path: Path, names: list[str]) -> list[int]:
    return [(path / name).stat().st_size for name in names]


def _with_class_folders(path: Path, names: list[str]) -> LabelledImages:
    """The first folder below `path` is the class; classes are numbered in the order of their names, as everywhere."""
    loose = [name for name in names if "/" not in name]
    if loose:
        raise ValueError(
            f"images={path}: {loose[0]} lies in no class folder; put images into a folder per class, give "
            "labels=<CSV or JSON file>, or labels=none for a single class"
        )
    classes = sorted({name.partition("/")[0] for name in names})
    if len(classes) == 1:
        raise ValueError(
            f"images={path} holds the one class folder {classes[0]!r}; if the classes are inside it, give "
            f"images={path / classes[0]}; for a single class, labels=none"
        )
    number = {name: i for i, name in enumerate(classes)}
    return LabelledImages(path, names, _sizes(path, names), [number[name.partition("/")[0]] for name in names], classes)


def _with_label_file(path: Path, names: list[str], file: Path) -> LabelledImages:
    """Only images that the file lists are taken."""
    label_of = read_labels(file)
    missing = [name for name in label_of if not (path / name).is_file()]
    if missing:
        raise ValueError(f"{file} lists {missing[0]}, which is not in {path} ({len(missing)} of {len(label_of)} are missing)")
    unlabelled = [name for name in names if name not in label_of]
    if unlabelled:
        log.warning("%d images of %s have no label in %s and are left out: %s, ...", len(unlabelled), path, file, unlabelled[0])
    names = sorted(label_of)
    labels, class_names = [label_of[name] for name in names], None
    if not all(_is_whole(label) for label in labels):
        class_names = sorted(set(map(str, labels)))
        number = {name: i for i, name in enumerate(class_names)}
        labels = [number[str(label)] for label in labels]
    return LabelledImages(path, names, _sizes(path, names), list(map(int, labels)), class_names)


def _is_whole(label: object) -> bool:
    return not isinstance(label, bool) and str(label).removeprefix("-").isdecimal()


def read_labels(file: Path) -> dict[str, str | int]:
    """{name of the image: label} from a CSV file with a header, or from JSON.

    JSON may be {"name": label}, [["name", label], ...], or either of them under the key "labels" (the dataset.json of EDM).

    Raises:
        ValueError: another form; a name that comes twice with different labels.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # spreadsheets begin their files with a mark of the byte order
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"labels={file} cannot be read: {e}") from e
    if file.suffix.lower() == ".csv":
        pairs = _pairs_of_csv(file, text)
    elif file.suffix.lower() == ".json":
        pairs = _pairs_of_json(file, text)
    else:
        raise ValueError(f"labels={file} must be auto, folders, none, or a .csv or .json file")
    label_of: dict[str, str | int] = {}
    for name, label in pairs:
        if label_of.setdefault(name, label) != label:
            raise ValueError(f"{file}: {name} has the labels {label_of[name]!r} and {label!r}")
    if not label_of:
        raise ValueError(f"{file} lists no images")
    return label_of


def _pairs_of_csv(file: Path, text: str) -> list[tuple[str, str]]:
    rows = csv.DictReader(io.StringIO(text))
    columns = {(column or "").strip().lower(): column for column in rows.fieldnames or []}
    name_column = next((columns[c] for c in NAME_COLUMNS if c in columns), None)
    label_column = next((columns[c] for c in LABEL_COLUMNS if c in columns), None)
    if name_column is None or label_column is None:
        raise ValueError(
            f"{file} needs a header with the columns file_name,label; found {', '.join(rows.fieldnames or []) or 'nothing'}"
        )
    pairs = [(row[name_column], row[label_column]) for row in rows]
    for number, (name, label) in enumerate(pairs, start=2):
        if not name or not (label or "").strip():
            raise ValueError(f"{file}, line {number}: the file name or the label is missing")
    return [(name.strip(), label.strip()) for name, label in pairs]


def _pairs_of_json(file: Path, text: str) -> list[tuple[str, str | int]]:
    wrong = ValueError(f'{file} must hold {{"name": label, ...}} or [["name", label], ...], alone or under "labels"')
    try:
        content = json.loads(text)
    except ValueError as e:
        raise ValueError(f"{file} is not JSON: {e}") from e
    if isinstance(content, dict) and "labels" in content:
        content = content["labels"]
    pairs = list(content.items()) if isinstance(content, dict) else content
    if not isinstance(pairs, list) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
        raise wrong
    if not all(isinstance(name, str) and isinstance(label, (str, int)) for name, label in pairs):
        raise wrong
    return [(name, label) for name, label in pairs]


class TarImages(LabelledImages):
    """WebDataset tars: `<key>.jpg` (or another image) with `<key>.cls`, the label as text. Read in place, not unpacked.

    Raises:
        ValueError: no tars, compressed or truncated ones; an image without a label or a label without an image, by name.
    """

    def __init__(self, path: Path):
        names, sizes, labels, self._where = [], [], [], []
        for tar in find_tars(path):
            images, label_of = _members(tar)
            lacking = sorted(images.keys() ^ label_of.keys())
            if lacking:
                has, lacks = (
                    ("an image", "label (.cls)") if lacking[0] in images else ("a label", f"image ({', '.join(SUFFIXES)})")
                )
                raise ValueError(f"{tar}: {lacking[0]} has {has} but no {lacks}")
            for key, member in images.items():
                names.append(f"{tar.name}/{member.name}")
                sizes.append(member.size)
                labels.append(label_of[key])
                self._where.append((tar, member.offset_data, member.size))
        if not names:
            raise ValueError(f"images={path}: the tars hold no images ({', '.join(SUFFIXES)})")
        super().__init__(path, names, sizes, labels, None)

    def open(self, index: int) -> BinaryIO:
        tar, offset, size = self._where[index]
        with open(tar, "rb") as f:
            f.seek(offset)
            return io.BytesIO(f.read(size))


def _members(file: Path) -> tuple[dict[str, tarfile.TarInfo], dict[str, int]]:
    """{key: image} and {key: label} of a tar."""
    images: dict[str, tarfile.TarInfo] = {}
    label_of: dict[str, int] = {}
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                folder, slash, name = member.name.rpartition("/")
                stem, _, extension = name.partition(".")
                key = folder + slash + stem
                if member.offset_data + member.size > file.stat().st_size:
                    raise ValueError(f"{file} is truncated: {member.name} goes past its end; copy it again")
                if f".{extension.lower()}" in SUFFIXES:
                    if key in images:
                        raise ValueError(f"{file}: {member.name} is a second image of {key}; keys must differ within a tar")
                    images[key] = member
                elif extension.lower() in LABEL_EXTENSIONS:
                    text = tar.extractfile(member).read()
                    if not text.strip().isdigit():
                        raise ValueError(f"{file}: {member.name} holds {text[:24]!r}, not a label (a whole number, 0 or more)")
                    label_of[key] = int(text)
    except tarfile.TarError as e:
        raise ValueError(f"{file} is truncated or damaged ({e}); copy it again") from e
    return images, label_of
