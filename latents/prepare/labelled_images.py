"""Find labelled images in class folders, in a folder with EDM's dataset.json, or in WebDataset tars."""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from common.errors import UserError
from common.files import regular_file
from common.images import (
    NOT_A_FILE,
    SUFFIXES,
    Listing,
    class_caption,
    is_broken_link,
    is_hidden,
    list_images,
)
from common.types import MAX_CLASSES
from latents.dataset import evenly_spaced_items
from latents.shards import Duplicates, LabelBy, Part
from latents.tars import TAR_NAME, TarMember, check_single_split, index_tars, splits_in_name

log = logging.getLogger(__name__)

VALIDATION_STRIDE = 20  # part=validation selects about one of 20 images for evaluation.validation


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
        file = folder / "dataset.json"
        content = (regular_file(file) if isinstance(file, Path) else file).read_bytes()
        entries = _DatasetJson.model_validate_json(content, strict=True).labels
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
        names: Image paths relative to `path`, all different. The path of an image in a tar is <name of the tar>/<member>,
            or <path of the tar>/<member> if several tars have the same name.
        labels: Class labels [N] in int64.
        all_labels: The labels of all images from which `select` selected, so that each part of a data set has all classes.
        class_names: Class names, or None if the class names are unknown.
        members: Where the images lie in tars, which are read without unpacking. None if each image is a file.
        unsupported: Image files in the folder whose format `encode` does not support.
        problems: Links, folders and images that cannot be read, and class folders without images, as {relative path: message}.
    """

    def __init__(
        self,
        path: Path,
        names: list[str],
        labels: np.ndarray | list[int],
        class_names: list[str] | None = None,
        members: list[TarMember] | None = None,
    ):
        self.path = path
        self.names = names
        self.class_names = class_names
        self.members = members
        self.labels = self.all_labels = np.asarray(labels, dtype=np.int64)
        self.unsupported: list[str] = []
        self.problems: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.names)

    def select(self, indices: Sequence[int]) -> LabelledImages:
        """Return the list of the images with the given indices."""
        selected = copy.copy(self)
        selected.names = [self.names[i] for i in indices]
        selected.labels = self.labels[indices]
        selected.members = None if self.members is None else [self.members[i] for i in indices]
        return selected

    def select_part(self, hashes: Sequence[int | None], part: Part, duplicates: Duplicates) -> LabelledImages:
        """Return the images of a part, and with duplicates=skip only the first of equal images.

        The hash of an image decides on its part. So equal images belong to one part, and no image moves to the other part if
        images are added or removed. Images without a hash cannot be read. They are selected, so that `encode` reports them.
        """
        kept: list[int] = []
        seen: set[int] = set()
        for index, image_hash in enumerate(hashes):
            if image_hash is not None:
                is_validation = image_hash % VALIDATION_STRIDE == 0
                is_skipped = duplicates == "skip" and image_hash in seen
                if part == ("train" if is_validation else "validation") or is_skipped:
                    continue
                seen.add(image_hash)
            kept.append(index)
        if not kept:
            raise UserError(
                f"images={self.path}: part={part} holds none of {len(self)} images (1 of {VALIDATION_STRIDE} is validation)"
            )
        log.info("%s: %d of %d images are used (part=%s, duplicates=%s)", self.path, len(kept), len(self), part, duplicates)
        return self.select(kept)

    def read(self, index: int) -> bytes:
        """Return the content of an image's file. Raises OSError if it cannot be read."""
        if self.members is not None:
            return self.members[index].read()
        file = self.path / self.names[index]
        if not file.is_file():  # reading a pipe could block forever
            raise OSError(errno.EINVAL, NOT_A_FILE)
        return file.read_bytes()

    def size(self, index: int) -> int:
        """Return the file size of an image in bytes."""
        return self.members[index].size if self.members is not None else (self.path / self.names[index]).stat().st_size

    def hash(self, start: int, stop: int) -> str:
        """Hash the names, file sizes and labels of images start .. stop - 1, and the content of up to four images.

        Hashing the content of all images would take as long as encoding the images.
        """
        digest = hashlib.blake2b(self.labels[start:stop].tobytes(), digest_size=16)
        spread = set((start + evenly_spaced_items(stop - start, 4)).tolist())
        for index in range(start, stop):
            with contextlib.suppress(OSError):  # `encode` later reports unreadable files
                digest.update(f"{self.names[index]}\0{self.size(index)}\0".encode(errors="surrogateescape"))
                if index in spread:
                    digest.update(self.read(index))
        return digest.hexdigest()


def open_labelled_images(path: str | Path, label_by: LabelBy = "auto", needs_labels: bool = True) -> LabelledImages:
    """Find images and their labels, and log what is left out.

    Args:
        path: Folder of images, folder of WebDataset tars, or a single tar.
        label_by: `none` assigns all images to one class. `auto` uses .cls files in tars, dataset.json, or the class folders.
            `first_level` is like `auto`, but the classes are the first-level folders, with all that is below them, and the tars
            may belong to several parts of a data set.
        needs_labels: If false, find the same images, but accept folders that are no classes and tars without .cls files. The
            labels may then be 0.

    Raises:
        UserError: If there are no images, if dataset.json lists a missing image, or if the folders that hold images are no
            classes, or the tars belong to several parts of a data set.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"images={path} does not exist")
    if path.suffix.lower() == ".zip":
        raise UserError(f"images={path} is a .zip; unpack it, and give the folder")
    listed = list_images(path) if path.is_dir() else Listing([], [], Counter(), {})
    if listed.images and any(TAR_NAME.search(f.name) for f in path.iterdir()):
        raise UserError(f"images={path} holds tars and images ({listed.images[0]}, ...); put them into separate folders")
    is_labelled = needs_labels and label_by != "none"
    if not listed.images:
        if is_labelled and label_by == "auto":
            check_single_split(path, "or set labels=first_level to use all")
        images = _find_in_tars(path, is_labelled)
    elif label_by != "none" and os.path.lexists(path / "dataset.json"):
        images = _label_by_json(path, listed.images)
    elif is_labelled:
        images = _label_by_folder(path, listed, label_by == "first_level")
    else:
        images = LabelledImages(path, listed.images, [0] * len(listed.images))
    if not len(images):
        raise UserError(f"images={path} holds no images ({', '.join(SUFFIXES)}), nor tars of them")
    _log_left_out(path, listed)
    images.unsupported, images.problems = listed.unsupported, listed.problems | images.problems
    return images


def _find_in_tars(path: Path, is_labelled: bool) -> LabelledImages:
    """List the images `<key>.jpg` (or another format) in WebDataset tars, and their labels `<key>.cls`.

    If `is_labelled` is false, all labels are 0, and the tars need no `.cls`.
    """
    members = index_tars(path, tuple(suffix[1:] for suffix in SUFFIXES), is_labelled)
    folder = path if path.is_dir() else path.parent
    files = {member.file for member in members}
    are_told_apart = len({file.name for file in files}) == len(files)
    tars = {file: file.name if are_told_apart else file.relative_to(folder).as_posix() for file in files}
    names = [f"{tars[member.file]}/{member.name}" for member in members]
    return LabelledImages(path, names, [member.label for member in members], members=members)


def _log_left_out(path: Path, listed: Listing) -> None:
    if listed.unsupported:
        message = "%s: %d images are not read, %s first (%s); encode reads %s"
        counts = _count(Path(name).suffix.lower() for name in listed.unsupported)
        log.warning(message, path, len(listed.unsupported), listed.unsupported[0], counts, ", ".join(SUFFIXES))
    if listed.images and listed.other_files:
        counts = _count(listed.other_files.elements())
        log.info("%s: %d files that are not images are left out (%s)", path, listed.other_files.total(), counts)


def _count(values: Iterable[str]) -> str:
    """Return each value with its number of occurrences, such as `.gif 2, .svg 1`. The most frequent value comes first."""
    return ", ".join(f"{value} {count}" for value, count in Counter(values).most_common(8))


def _label_by_json(path: Path, names: list[str]) -> LabelledImages:
    """Label the images that dataset.json lists, sorted by name. Raises UserError if it lists an image that is not in `names`."""
    listed, labels = read_dataset_json(path)
    if missing := sorted(set(listed) - set(names)):
        raise UserError(f"{path / 'dataset.json'} lists {missing[0]}, which is not there ({len(missing)} such images)")
    if len(listed) < len(names):
        log.info("%s/dataset.json does not list %d of %d images: they are left out", path, len(names) - len(listed), len(names))
    order = np.argsort(listed)
    return LabelledImages(path, [listed[i] for i in order], labels[order])


MAX_SPLITS = 6  # a data set with more first-level folders has classes there, such as "bullet train" and "test tube"
_EDM_NAME = re.compile(r"\d{5}/img\d{8}\.\w+")  # name of an image that EDM's dataset_tool.py wrote


def _label_by_folder(path: Path, listed: Listing, by_first_level: bool) -> LabelledImages:
    """Label each image by the folder that holds it, or by its first-level folder. Class folders without images are problems.

    As in torchvision, number the classes by their sorted names.
    """
    names = listed.images
    folders = [os.path.dirname(name) for name in names]
    if by_first_level:
        folders = [folder.partition("/")[0] for folder in folders]
    if "" in folders or len(set(folders)) == 1:
        example = names[folders.index("")] if "" in folders else f"images in {folders[0]}/ alone"
        raise UserError(f"images={path} must hold a folder per class, but holds {example}; set labels=none for a single class")
    if not by_first_level:
        _check_class_folders(path, names, sorted(set(folders)))
    class_of = [os.path.basename(folder) for folder in folders]
    classes = sorted(set(class_of))
    images = LabelledImages(path, names, np.searchsorted(classes, class_of), classes)
    for folder in path.glob("/".join(["*"] * len(folders[0].split("/")))):
        name = folder.relative_to(path).as_posix()
        is_folder = folder.is_dir() or (is_broken_link(folder) and name not in names)
        if is_folder and folder.name not in classes and not is_hidden(folder.name):
            problem = listed.problems.get(name, f"{name}/ holds no images")
            images.problems[name] = f"{problem}, and without it later classes get other labels"
    return images


def _check_class_folders(path: Path, names: list[str], folders: list[str]) -> None:
    """Raise UserError if `folders`, which hold the images, are parts of a data set, at several depths, or of equal names."""
    first_level = sorted({folder.partition("/")[0] for folder in folders})
    by_depth = sorted(names, key=lambda name: name.count("/"))
    by_name = sorted(folders, key=os.path.basename)
    if len({part for name in first_level for part in splits_in_name(name)}) > 1 and len(first_level) <= MAX_SPLITS:
        part = next((name for name in first_level if "train" in splits_in_name(name)), first_level[0])
        held = f"{', '.join(first_level)}, which are parts of a data set; give images={path / part}"
    elif by_depth[0].count("/") < by_depth[-1].count("/"):
        held = f"images at several depths ({by_depth[0]}, {by_depth[-1]}); put all images into folders of one depth"
    elif same := [pair for pair in pairwise(by_name) if os.path.basename(pair[0]) == os.path.basename(pair[1])]:
        held = f"folders of equal names ({', '.join(same[0])}); give one of the folders above them"
    elif all(map(_EDM_NAME.fullmatch, names)):
        held = f"EDM's folders ({folders[0]}, ...) without their dataset.json; add it, set labels=none for a single class"
    else:
        return
    remedy = f"set labels=first_level to make {', '.join(first_level[:3])}{', ...' * (len(first_level) > 3)} the classes"
    raise UserError(f"images={path} holds {held}, or {remedy}")


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
