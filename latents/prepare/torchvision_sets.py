"""The classification sets of torchvision as labelled images: images=torchvision:CIFAR10."""

from __future__ import annotations

import inspect
import io
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from common.errors import UserError, first_line
from latents.prepare.images import LabelledImages

TORCHVISION = "torchvision:"
CONNECT_SEC = 10.0  # without a byte, while torchvision downloads: it sets no limit itself


class TorchvisionImages(LabelledImages):
    """A set of torchvision.datasets, in its own order.

    Args:
        name: of its class, `CIFAR10`.
        root: folder of all sets, in which torchvision looks for the files of this one, or downloads them to.
        split: train | test, or another one that the class has.

    Raises:
        UserError: there is no such set or split; it is neither in `root` nor can it be downloaded; its items are no images with
            one whole number each as label.
    """

    def __init__(self, name: str, root: str | Path, split: str):
        offered = _find_classes()
        if name not in offered:
            raise UserError(
                f"images={TORCHVISION}{name}: torchvision has no such set of labelled images; use {' | '.join(offered)}"
            )
        key = f"images={TORCHVISION}{name}"
        self.dataset = _open(offered[name], key, Path(root), split)
        first = self.dataset[0]
        if not (isinstance(first, tuple) and isinstance(first[0], Image.Image)):
            raise UserError(f"{key}: its items are no images; use another set")
        labels = next((getattr(self.dataset, x) for x in ("targets", "labels", "_labels") if hasattr(self.dataset, x)), None)
        if labels is None:  # decodes every image
            labels = [self.dataset[i][1] for i in range(len(self.dataset))]
        labels = np.asarray(labels)
        if labels.shape != (len(self.dataset),) or not np.issubdtype(labels.dtype, np.integer):
            raise UserError(f"{key}: its labels are {labels.dtype} {list(labels.shape)}, not a whole number per image")
        classes = getattr(self.dataset, "classes", None)
        are_names = classes is not None and len(classes) > labels.max() and all(isinstance(one, str) for one in classes)
        names = [f"{name}/{split}/{i}" for i in range(len(labels))]
        super().__init__(Path(root), names, labels.tolist(), list(classes) if are_names else None)

    def open(self, index: int) -> BinaryIO:
        file = io.BytesIO()
        self.dataset[index][0].convert("RGB").save(file, "ppm")  # without compression
        file.seek(0)
        return file

    def size(self, index: int) -> int:
        return 0  # decoding all images would take as long as encoding them


def _find_classes() -> dict[str, type]:
    """The sets that can be downloaded and have a split, by name."""
    from torchvision import datasets  # slow to import; nothing else needs it

    known = {name: getattr(datasets, name) for name in datasets.__all__}
    parameters = {name: inspect.signature(one).parameters for name, one in known.items()}
    return {name: known[name] for name, has in parameters.items() if "download" in has and ("train" in has or "split" in has)}


def _open(of: type, key: str, root: Path, split: str):
    """The set from its files in `root`; where they are missing, they are downloaded to it."""
    if "split" in inspect.signature(of).parameters:
        choice = {"split": split}
    elif split in ("train", "test"):
        choice = {"train": split == "train"}
    else:
        raise UserError(f"split={split}: {key} has the splits train and test")
    try:
        try:
            return of(str(root), **choice, download=False)
        except RuntimeError:  # what all sets raise where files are missing
            with _impatient():
                return of(str(root), **choice, download=True)
    except ImportError as e:
        raise UserError(f"{key} needs a package: pip install {e.name or e}") from e
    except ValueError as e:
        raise UserError(f"{key} split={split}: {e}") from e
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as e:
        reason = first_line(e)
        raise UserError(
            f"{key} is not in root={root}, and cannot be downloaded ({reason}); run the same command where there is a network, "
            f"or put its unpacked files where torchvision.datasets.{of.__name__} has them, and give root=<folder>"
        ) from e


@contextmanager
def _impatient() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(CONNECT_SEC)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
