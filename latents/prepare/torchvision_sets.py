"""The classification sets of torchvision as labelled images: images=torchvision:CIFAR10."""

from __future__ import annotations

import inspect
import io
import pickle
from pathlib import Path
from typing import BinaryIO

import numpy as np

from common.errors import UserError, first_line
from latents.prepare.images import LabelledImages

TORCHVISION = "torchvision:"


class TorchvisionImages(LabelledImages):
    """A set of torchvision.datasets, in its own order.

    Args:
        name: of its class, `CIFAR10`.
        root: folder of all sets, in which torchvision looks for the files of this one, or downloads them to.
        split: train | test, or another one that the class has.

    Raises:
        UserError: there is no such set or split; it is neither in `root` nor can it be downloaded; its items have no single whole
            number as label.
    """

    def __init__(self, name: str, root: str | Path, split: str):
        self.dataset = _open(name, Path(root), split)
        labels = next((getattr(self.dataset, x) for x in ("targets", "labels", "_labels") if hasattr(self.dataset, x)), None)
        if labels is None:  # decodes every image
            labels = [self.dataset[i][1] for i in range(len(self.dataset))]
        labels = np.asarray(labels)
        if labels.shape != (len(self.dataset),) or not np.issubdtype(labels.dtype, np.integer):
            raise UserError(f"images={TORCHVISION}{name} has labels {labels.dtype} {list(labels.shape)}, not a class per image")
        classes = getattr(self.dataset, "classes", None)
        are_names = classes is not None and len(classes) > labels.max() and all(isinstance(one, str) for one in classes)
        names = [f"{name}/{split}/{i}" for i in range(len(labels))]
        super().__init__(Path(root), names, labels, list(classes) if are_names else None)

    def open(self, index: int) -> BinaryIO:
        file = io.BytesIO()
        self.dataset[index][0].convert("RGB").save(file, "ppm")  # without compression
        file.seek(0)
        return file

    def size(self, index: int) -> int:
        return 0  # decoding all images would take as long as encoding them


def _open(name: str, root: Path, split: str):
    """The set from its files in `root`; where they are missing, they are downloaded to it."""
    from torchvision import datasets  # slow to import; nothing else needs it

    key = f"images={TORCHVISION}{name}"
    of = getattr(datasets, name, None) if name in datasets.__all__ else None
    takes = inspect.signature(of).parameters if of else {}
    if "download" not in takes or not {"split", "train"} & takes.keys():
        raise UserError(f"{key}: torchvision.datasets has no such set that can be downloaded and has a split")
    if "split" not in takes and split not in ("train", "test"):
        raise UserError(f"split={split}: {key} has the splits train and test")
    choice = {"split": split} if "split" in takes else {"train": split == "train"}
    try:
        try:
            return of(str(root), **choice, download=False)
        except RuntimeError:  # what all sets raise where files are missing
            return of(str(root), **choice, download=True)
    except (ImportError, ValueError, OSError, RuntimeError, pickle.UnpicklingError, EOFError) as e:
        raise UserError(f"{key} split={split} can be neither read from root={root} nor downloaded to it: {first_line(e)}") from e
