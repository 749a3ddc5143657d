"""Find labelled images in class folders, in a folder with EDM's dataset.json, or in WebDataset tars."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
from PIL import Image, ImageOps
from pydantic import BaseModel, Field, ValidationError

from common.errors import UserError
from common.images import SUFFIXES, adm_center_crop, is_hidden, list_images, read_rgb
from latents.shards import MAX_CLASSES, spread_items
from latents.tars import TAR_NAME, index_tars

log = logging.getLogger(__name__)

HOLD_OUT = 20  # part=validation selects every 20th image for eval.validation


def to_jpeg(pixels: np.ndarray) -> bytes:
    """Compress uint8 pixels [H, W, 3] to a JPEG file with quality 95 and no chroma subsampling."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", quality=95, subsampling=0)
    return file.getvalue()


def read_cropped(images: LabelledImages, number: int, resolution: int, background: str, pad: int, grey: bool) -> np.ndarray:
    """Read an image and crop it to uint8 [R, R, 3]. `EncodeConfig` documents `resolution`, `background`, `pad` and `grey`."""
    image = ImageOps.expand(read_rgb(images.open(number), background)[0], pad)
    return adm_center_crop(image.convert("L").convert("RGB") if grey else image, resolution)


def count_classes(labels: np.ndarray, num_classes: int | None, class_names: list[str] | None = None) -> int:
    """Return `num_classes`, inferred from class names or labels if it is None. Raise UserError if `num_classes` is too small."""
    if not 0 <= labels.min() <= labels.max() < MAX_CLASSES:
        raise UserError(f"labels run from {labels.min()} to {labels.max()}; they must be from 0 to {MAX_CLASSES - 1:,}")
    needed = len(class_names) if class_names else int(labels.max()) + 1
    if num_classes is not None and num_classes < needed:
        raise UserError(f"num_classes={num_classes}, but there are labels up to {needed - 1}")
    return num_classes or needed


class _DatasetJson(BaseModel):
    labels: list[tuple[str, Annotated[int, Field(ge=0, lt=MAX_CLASSES)]]]


def read_dataset_json(folder: Path) -> tuple[list[str], np.ndarray]:
    """Read (names, labels [N] int64) from EDM's dataset.json, {"labels": [[name, label], ...]}. `folder` may be a zipfile.Path.

    Raise UserError if the file has a different structure or no entries, or if it lists an image twice.
    """
    try:
        entries = _DatasetJson.model_validate_json((folder / "dataset.json").read_bytes(), strict=True).labels
    except ValidationError as e:
        raise UserError(f'{folder}/dataset.json is not {{"labels": [[name, whole number], ...]}}: {e.errors()[0]["msg"]}') from e
    if not entries or len(dict(entries)) < len(entries):
        raise UserError(f"{folder}/dataset.json lists nothing, or an image twice")
    return [name for name, _ in entries], np.array([label for _, label in entries], dtype=np.int64)


class LabelledImages:
    """A list of labelled images, which are accessed by index.

    Attributes:
        names: Image paths relative to `path`.
        labels: Class labels [N] in int64.
        class_names: Class names, or None if the class names are unknown.
        unread: Image files in the folder whose format `encode` does not support.
    """

    unread: list[str] = []

    def __init__(self, path: Path, names: list[str], labels: np.ndarray | list[int], class_names: list[str] | None = None):
        self.path, self.names, self.class_names = path, names, class_names
        self.labels = np.asarray(labels, dtype=np.int64)

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
        spread = set((start + spread_items(stop - start, 4)).tolist())
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
    """Images `<key>.jpg` (or another format) and text labels `<key>.cls` in WebDataset tars, which are read without unpacking."""

    def __init__(self, path: Path):
        self.items = index_tars(path, tuple(suffix[1:] for suffix in SUFFIXES))
        super().__init__(path, [f"{item.file.name}/{item.name}" for item in self.items], [item.label for item in self.items])

    def keep(self, numbers: Sequence[int]) -> None:
        super().keep(numbers)
        self.items = [self.items[i] for i in numbers]

    def size(self, index: int) -> int:
        return self.items[index].size

    def open(self, index: int) -> BinaryIO:
        return io.BytesIO(self.items[index].read())


def open_labelled_images(path: str | Path, labels: str = "auto", part: str = "all") -> LabelledImages:
    """Find images and their labels.

    Args:
        path: Folder of images, folder of WebDataset tars, or a single tar.
        labels: `none` assigns all images to one class. `auto` uses .cls files in tars, dataset.json, or the class folders.
        part: `validation` selects every HOLD_OUT-th image, `train` selects the other images, and `all` selects all images.

    Raises:
        UserError: If there are no images, if dataset.json lists a missing image, or if an image is outside the class folders.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"images={path} does not exist")
    names, unread = list_images(path) if path.is_dir() else ([], [])
    if names and any(TAR_NAME.search(f.name) for f in path.iterdir()):
        raise UserError(f"images={path} holds tars and images ({names[0]}, ...); put them into separate folders")
    if not names:
        images = TarImages(path)
    elif labels == "none":
        images = LabelledImages(path, names, [0] * len(names))
    elif (path / "dataset.json").is_file():
        images = _label_by_json(path, names)
    else:
        images = _label_by_folder(path, names)
    if not len(images):
        raise UserError(f"images={path} holds no images ({', '.join(SUFFIXES)}), nor tars of them")
    if labels == "none":
        images.labels[:] = 0
    if unread:
        log.warning("%s: %d images are not read, %s first; encode reads %s", path, len(unread), unread[0], ", ".join(SUFFIXES))
    images.unread = unread
    if part != "all":
        images.keep([i for i in range(len(images)) if (i % HOLD_OUT == HOLD_OUT - 1) == (part == "validation")])
        if not len(images):
            raise UserError(f"images={path}: part=validation takes every {HOLD_OUT}th image, but there are fewer")
    return images


def _label_by_json(path: Path, names: list[str]) -> LabelledImages:
    listed, labels = read_dataset_json(path)
    if missing := sorted(set(listed) - set(names)):
        raise UserError(f"{path / 'dataset.json'} lists {missing[0]}, which is not there ({len(missing)} such images)")
    if len(listed) < len(names):
        log.info("%s/dataset.json does not list %d of %d images: they are left out", path, len(names) - len(listed), len(names))
    order = np.argsort(listed)
    return LabelledImages(path, [listed[i] for i in order], labels[order])


def _label_by_folder(path: Path, names: list[str]) -> LabelledImages:
    """Label each image by its first-level folder below `path`. As in torchvision, number classes by sorted folder name."""
    loose = [name for name in names if "/" not in name]
    class_of = [name.partition("/")[0] for name in names]
    classes = sorted(set(class_of))
    if loose or len(classes) == 1:
        held = loose[0] if loose else f"{classes[0]}/ alone"
        raise UserError(f"images={path} must hold a folder per class, but holds {held}; set labels=none for a single class")
    if empty := sorted({f.name for f in path.iterdir() if f.is_dir() and not is_hidden(f.name)} - set(classes)):
        raise UserError(f"images={path}: {empty[0]}/ holds no images, and without it later classes get other labels; remove it")
    return LabelledImages(path, names, np.searchsorted(classes, class_of), classes)
