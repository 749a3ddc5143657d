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
    """A set of torchvision.datasets, in its own order: that of the class `name`, `split` train | test or another that it has.

    Raises:
        UserError: no such set or split; neither in `root` nor downloaded; labels that are not a whole number per item.
    """

    def __init__(self, name: str, root: str | Path, split: str):
        self.dataset = _open(name, Path(root), split)
        known = [getattr(self.dataset, name) for name in ("targets", "labels", "_labels") if hasattr(self.dataset, name)]
        labels = np.asarray(known[0] if known else [label for _, label in self.dataset])  # the latter decodes every image
        if labels.shape != (len(self.dataset),) or not np.issubdtype(labels.dtype, np.integer):
            raise UserError(f"images={TORCHVISION}{name} has labels {labels.dtype} {list(labels.shape)}, not a class per image")
        classes = list(getattr(self.dataset, "classes", ()))
        are_names = len(classes) > labels.max() and all(isinstance(one, str) for one in classes)
        names = [f"{name}/{split}/{i}" for i in range(len(labels))]
        super().__init__(Path(root), names, labels, classes if are_names else None)

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
