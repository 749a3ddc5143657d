"""Find labelled images in class folders, in a folder with EDM's dataset.json, or in WebDataset tars."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
from PIL import Image, ImageOps
from pydantic import BaseModel, Field, ValidationError

from common.errors import UserError
from common.files import hash_bytes
from common.images import SUFFIXES, Listing, adm_center_crop, class_caption, is_broken_link, is_hidden, list_images, read_rgb
from latents.shards import MAX_CLASSES, evenly_spaced_items
from latents.tars import SPLITS, TAR_NAME, check_parts, index_tars, split_names

log = logging.getLogger(__name__)

VALIDATION_STRIDE = 20  # part=validation selects every 20th image for evaluation.validation


def to_jpeg(pixels: np.ndarray) -> bytes:
    """Compress uint8 pixels [H, W, 3] to a JPEG file with quality 95 and no chroma subsampling."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", quality=95, subsampling=0)
    return file.getvalue()


@dataclass(frozen=True)
class ImageReader:
    """Settings with which `encode` reads and crops an image. `EncodeConfig` documents them."""

    resolution: int
    background: str = "white"
    pad: int = 0
    grey: bool = False
    value_range: Sequence[float] | None = None

    def __call__(self, images: LabelledImages, number: int) -> tuple[np.ndarray, list[str]]:
        """Read an image and crop it to uint8 [R, R, 3]. Also return the notes of `read_rgb`."""
        image, notes = read_rgb(images.open(number), self.background, value_range=self.value_range)
        image = ImageOps.expand(image, self.pad)
        return adm_center_crop(image.convert("L").convert("RGB") if self.grey else image, self.resolution), notes


def count_classes(labels: np.ndarray, num_classes: int | None, class_names: list[str] | None = None) -> int:
    """Return `num_classes`, inferred from class names or labels if it is None."""
    if not 0 <= labels.min() <= labels.max() < MAX_CLASSES:
        raise UserError(f"labels run from {labels.min()} to {labels.max()}; they must be from 0 to {MAX_CLASSES - 1:,}")
    needed = len(class_names) if class_names else int(labels.max()) + 1
    if num_classes is not None and num_classes < needed:
        raise UserError(f"num_classes={num_classes}, but there are labels up to {needed - 1}")
    return num_classes or needed


class _DatasetJson(BaseModel):
    labels: list[tuple[str, Annotated[int, Field(ge=0, lt=MAX_CLASSES)]]] | None


def read_dataset_json(folder: Path) -> tuple[list[str], np.ndarray]:
    """Read (names, labels [N] int64) from EDM's dataset.json, {"labels": [[name, label], ...]}. `folder` may be a zipfile.Path.

    Raises UserError if the file has a different structure or no entries, or if it lists an image twice.
    """
    try:
        entries = _DatasetJson.model_validate_json((folder / "dataset.json").read_bytes(), strict=True).labels
    except ValidationError as e:
        raise UserError(f'{folder}/dataset.json is not {{"labels": [[name, whole number], ...]}}: {e.errors()[0]["msg"]}') from e
    if entries is None:
        raise UserError(f'{folder}/dataset.json has "labels": null, so there are no classes; `encode labels=none` makes one')
    if not entries or len(dict(entries)) < len(entries):
        raise UserError(f"{folder}/dataset.json lists nothing, or an image twice")
    return [name for name, _ in entries], np.array([label for _, label in entries], dtype=np.int64)


class LabelledImages:
    """A list of labelled images, which are accessed by index.

    Attributes:
        names: Image paths relative to `path`.
        labels: Class labels [N] in int64.
        all_labels: The labels of all images from which `keep` selected, so that each part of a data set has all classes.
        class_names: Class names, or None if the class names are unknown.
        unread: Image files in the folder whose format `encode` does not support.
        faults: Links, folders and images that cannot be read, and class folders without images, as {relative path: message}.
        listing: Hash of all names from which the images of a part were selected, or None if all images are used.
    """

    def __init__(self, path: Path, names: list[str], labels: np.ndarray | list[int], class_names: list[str] | None = None):
        self.path, self.names, self.class_names = path, names, class_names
        self.labels = self.all_labels = np.asarray(labels, dtype=np.int64)
        self.unread: list[str] = []
        self.faults: dict[str, str] = {}
        self.listing: str | None = None

    def __len__(self) -> int:
        return len(self.names)

    def keep(self, numbers: Sequence[int]) -> None:
        """Keep only the images with the given numbers."""
        self.names, self.labels = [self.names[i] for i in numbers], self.labels[numbers]

    def open(self, index: int) -> Path | BinaryIO:
        """Return the path or an open file of an image, both of which `read_rgb` accepts."""
        return self.path / self.names[index]

    def size(self, index: int) -> int:
        """Return the file size of an image in bytes."""
        return (self.path / self.names[index]).stat().st_size

    def fingerprint(self, start: int, stop: int) -> str:
        """Hash the names, file sizes and labels of images start .. stop - 1, and the content of up to four images.

        Hashing the content of all images would take as long as encoding the images.
        """
        digest = hashlib.blake2b(self.labels[start:stop].tobytes(), digest_size=16)
        spread = set((start + evenly_spaced_items(stop - start, 4)).tolist())
        for index in range(start, stop):
            with contextlib.suppress(OSError):  # `encode` later reports unreadable files
                digest.update(f"{self.names[index]}\0{self.size(index)}\0".encode(errors="surrogateescape"))
                if index in spread:
                    image = self.open(index)
                    if not isinstance(image, Path):
                        digest.update(image.read())
                    elif image.is_file():  # reading a pipe could block forever
                        digest.update(image.read_bytes())
        return digest.hexdigest()


class TarImages(LabelledImages):
    """Images `<key>.jpg` (or another format) and text labels `<key>.cls` in WebDataset tars, which are read without unpacking.

    If `is_labelled` is false, all labels are 0, and the tars need no `.cls`.
    """

    def __init__(self, path: Path, is_labelled: bool = True):
        self.items = index_tars(path, tuple(suffix[1:] for suffix in SUFFIXES), is_labelled)
        super().__init__(path, [f"{item.file.name}/{item.name}" for item in self.items], [item.label for item in self.items])

    def keep(self, numbers: Sequence[int]) -> None:
        super().keep(numbers)
        self.items = [self.items[i] for i in numbers]

    def size(self, index: int) -> int:
        return self.items[index].size

    def open(self, index: int) -> BinaryIO:
        return io.BytesIO(self.items[index].read())


def open_labelled_images(path: str | Path, labels: str = "auto", part: str = "all") -> LabelledImages:
    """Find images and their labels, and log what is left out.

    Args:
        path: Folder of images, folder of WebDataset tars, or a single tar.
        labels: `none` assigns all images to one class. `auto` uses .cls files in tars, dataset.json, or the class folders.
            `first_level` is like `auto`, but accepts class folders whose subfolders look like classes, and tars of several parts
            of a data set.
        part: `validation` selects one of every VALIDATION_STRIDE images, `train` selects the others, and `all` selects all.

    Raises:
        UserError: If there are no images, if dataset.json lists a missing image, if an image is outside the class folders, or if
            the class folders or the tars look like the parts of a data set.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"images={path} does not exist")
    if path.suffix.lower() == ".zip":
        raise UserError(f"images={path} is a .zip; unpack it, and give the folder")
    faults: dict[str, str] = {}
    names, unread, others = list_images(path, faults) if path.is_dir() else Listing([], [], Counter())
    if names and any(TAR_NAME.search(f.name) for f in path.iterdir()):
        raise UserError(f"images={path} holds tars and images ({names[0]}, ...); put them into separate folders")
    if not names:
        if labels == "auto":
            check_parts(path, "or set labels=first_level to use all")
        images = TarImages(path, labels != "none")
    elif labels == "none":
        images = LabelledImages(path, names, [0] * len(names))
    elif (path / "dataset.json").is_file():
        images = _label_by_json(path, names)
    else:
        images = _label_by_folder(path, names, labels, faults)
    if not len(images):
        raise UserError(f"images={path} holds no images ({', '.join(SUFFIXES)}), nor tars of them")
    if unread:
        counts = _count(Path(name).suffix.lower() for name in unread)
        reads = ", ".join(SUFFIXES)
        log.warning("%s: %d images are not read, %s first (%s); encode reads %s", path, len(unread), unread[0], counts, reads)
    if names and others:
        log.info("%s: %d files that are not images are left out (%s)", path, others.total(), _count(others.elements()))
    images.unread, images.faults = unread, faults
    if part != "all":
        images.listing = hash_bytes("\0".join(images.names).encode(errors="surrogateescape"))
        images.keep([i for i in range(len(images)) if (i % VALIDATION_STRIDE == VALIDATION_STRIDE - 1) == (part == "validation")])
        if not len(images):
            raise UserError(f"images={path}: part=validation takes every {VALIDATION_STRIDE}th image, but there are fewer")
    return images


def _count(values: Iterable[str]) -> str:
    """Return each value with its number of occurrences, such as `.gif 2, .svg 1`. The most frequent value comes first."""
    return ", ".join(f"{value} {count}" for value, count in Counter(values).most_common(8))


def _label_by_json(path: Path, names: list[str]) -> LabelledImages:
    listed, labels = read_dataset_json(path)
    if missing := sorted(set(listed) - set(names)):
        raise UserError(f"{path / 'dataset.json'} lists {missing[0]}, which is not there ({len(missing)} such images)")
    if len(listed) < len(names):
        log.info("%s/dataset.json does not list %d of %d images: they are left out", path, len(names) - len(listed), len(names))
    order = np.argsort(listed)
    return LabelledImages(path, [listed[i] for i in order], labels[order])


MAX_PARTS = 6  # a data set with more first-level folders has classes there, such as "bullet train" and "test tube"
_BUCKET = re.compile(r"\d+|[0-9a-f]{1,2}")  # names of subfolders that only keep folders small, such as 00017 or a3


def _label_by_folder(path: Path, names: list[str], labels: str, faults: dict[str, str]) -> LabelledImages:
    """Label each image by its first-level folder below `path`. As in torchvision, number classes by sorted folder name."""
    loose = [name for name in names if "/" not in name]
    class_of = [name.partition("/")[0] for name in names]
    classes = sorted(set(class_of))
    found = [f for f in path.iterdir() if not is_hidden(f.name)]
    empty = sorted({f.name for f in found if f.is_dir() or (is_broken_link(f) and f.name not in names)} - set(classes))
    if loose or len(classes) == 1:
        example = loose[0] if loose else f"images in {classes[0]}/ alone" + (f", and none in {empty[0]}/" if empty else "")
        inner = f"give images={path / classes[0]}, or " if len(_subfolders(names)) > 1 and not loose else ""
        message = f"images={path} must hold a folder per class, but holds {example}"
        raise UserError(f"{message}; {inner}set labels=none for a single class")
    if labels != "first_level":
        _check_levels(path, names, classes)
    for name in empty:
        problem = faults.get(name, f"{name}/ holds no images")
        faults[name] = f"{problem}, and without it later classes get other labels"
    return LabelledImages(path, names, np.searchsorted(classes, class_of), classes)


def _check_levels(path: Path, names: list[str], classes: list[str]) -> None:
    """Raise UserError if the first-level folders are the parts of a data set, or only hold folders that look like classes."""
    parts = [name.split("/") for name in names]
    deeper = [part for part in parts if len(part) > 2]
    is_nested = len(deeper) == len(parts) and len(_subfolders(names)) > 1
    first = next((name for name in classes if "train" in split_names(name)), classes[0])
    otherwise = f"or set labels=first_level to make {classes[0]}, {classes[1]}, ... the classes"
    found = {part for name in classes for part in split_names(name)}
    if SPLITS.keys() >= {name.lower() for name in classes} or (len(found) > 1 and len(classes) <= MAX_PARTS):
        give = f"images={path / first}" + ("" if deeper else " labels=none")
        raise UserError(f"images={path} holds {', '.join(classes)}, which are parts of a data set; give {give}, {otherwise}")
    if is_nested:
        examples = ", ".join(f"{part[0]}/{part[1]}" for part in (deeper[0], deeper[-1]))
        message = f"images={path}: its folders hold no images themselves, but folders that look like classes ({examples}, ...)"
        raise UserError(f"{message}; give the folder that holds the classes, such as images={path / first}, {otherwise}")
    if deeper:
        log.info("%s: the first level of folders are the classes; %d images are in folders below", path, len(deeper))


def _subfolders(names: list[str]) -> set[str]:
    """Return the names of second-level folders that hold images and look like classes."""
    return {parts[1] for name in names if len(parts := name.split("/")) > 2 and not _BUCKET.fullmatch(parts[1])}


def describe_classes(images: LabelledImages) -> str:
    """Return the numbers, names and image counts of the classes (the first and the last three if there are many)."""
    names = images.class_names or []
    counts = np.bincount(images.labels, minlength=len(names))
    is_long = len(counts) > 8
    listed = [0, 1, 2, *range(len(counts) - 3, len(counts))] if is_long else range(len(counts))
    rows = [f"{class_caption(label, names)} ({counts[label]} images)" for label in listed]
    text = "classes: " + ", ".join([*rows[:3], "...", *rows[3:]] if is_long else rows)

    def by_number(name: str) -> list:
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]

    swapped = [f"{a} comes before {b}" for a, b in pairwise(names) if by_number(a) > by_number(b)]
    return text + (f"; the folders are sorted as text, so {swapped[0]}" if swapped else "")
