"""ADM's sample files: an .npz whose `arr_0` is uint8 [N, H, W, 3]."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def write_npz(path: Path, images: Iterable[np.ndarray], shape: tuple[int, int, int, int], labels: np.ndarray) -> None:
    """Write images one by one, so that 50,000 of them need no memory; the file appears when it is complete.

    Args:
        images: N arrays, uint8 [H, W, 3].
        shape: (N, H, W, 3).
        labels: [N] int64, stored as `labels`.
    """
    temporary = path.with_name(f".tmp_{path.name}")
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as f:
            np.lib.format.write_array_header_1_0(f, {"descr": "|u1", "fortran_order": False, "shape": shape})
            count = 0
            for image in images:
                if image.dtype != np.uint8 or image.shape != shape[1:]:
                    raise ValueError(f"image {count} is {image.dtype} {image.shape}, not uint8 {shape[1:]}")
                f.write(np.ascontiguousarray(image).data)
                count += 1
        if count != shape[0]:
            raise ValueError(f"{count} images instead of {shape[0]}")
        with archive.open("labels.npy", "w") as f:
            np.lib.format.write_array(f, np.asarray(labels, dtype=np.int64))
    os.replace(temporary, path)
