"""ADM's file format: an .npz whose `arr_0` is uint8 [N, H, W, 3], optionally with statistics of features.

`mu` [2048] and `sigma` are of Inception's pooled features, `mu_s` [2023] and `sigma_s` of its spatial ones. Ours beside ADM's:
`mu_dinov2` [1024] and `sigma_dinov2`, of DINOv2's class token. Labels are `labels` (as written here) or `arr_1` (as ADM's
samplers write them).
"""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError
from common.files import hash_file, whole_file
from evaluations.metrics import Statistics

# (detector, layer) -> names of mean and covariance, number of features
STATISTICS_KEYS = {
    ("inception", "pool"): ("mu", "sigma", 2048),
    ("inception", "spatial"): ("mu_s", "sigma_s", 2023),
    ("dinov2", "pool"): ("mu_dinov2", "sigma_dinov2", 1024),
}


def write_npz(
    path: Path,
    images: Iterable[np.ndarray],
    shape: tuple[int, int, int, int],
    labels: np.ndarray | None = None,
    statistics: dict[tuple[str, str], Statistics] | None = None,
) -> None:
    """Write images one by one, so that 50,000 of them need no memory. The file appears when it is complete.

    Args:
        images: N arrays, uint8 [H, W, 3].
        shape: (N, H, W, 3).
        labels: [N] integers, stored as `labels`.
        statistics: by (detector, layer), as in STATISTICS_KEYS.

    Raises:
        UserError: images of another shape or type; the file cannot be written.
    """
    arrays = {} if labels is None else {"labels": np.asarray(labels, dtype=np.int64)}
    for layer, known in (statistics or {}).items():
        mu, sigma, _ = STATISTICS_KEYS[layer]
        arrays |= {mu: known.mu.numpy(), sigma: known.sigma.numpy()}
    with whole_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as f:
            np.lib.format.write_array_header_1_0(f, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for image in images:
                if image.dtype != np.uint8 or image.shape != shape[1:]:
                    raise UserError(f"{path}: an image is {image.dtype} {image.shape}, not uint8 {shape[1:]}")
                f.write(np.ascontiguousarray(image).data)
        for key, array in arrays.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as f:
                np.lib.format.write_array(f, array)


class NpzImages:
    """The images of an .npz, streamed from the zip, never loaded whole.

    Attributes:
        shape: (N, H, W, 3); N = 0 where the file holds statistics only.
        labels: [N] int64, or None.
        statistics: by (detector, layer), as far as the file holds them.

    Raises:
        UserError: it cannot be used; the message names the file and the key.
    """

    def __init__(self, path: str | Path):
        self.path, self.shape, self.labels, self.statistics = Path(path), (0, 0, 0, 3), None, {}
        with _errors_of(self.path), np.load(self.path, allow_pickle=False) as file:
            for layer, (mu, sigma, size) in STATISTICS_KEYS.items():
                if mu in file:
                    known = Statistics(*(torch.from_numpy(file[key]).double() for key in (mu, sigma)))
                    is_finite = (known.mu.sum() + known.sigma.sum()).isfinite()
                    if known.mu.shape != (size,) or known.sigma.shape != (size, size) or not is_finite:
                        raise ValueError(f"{mu} and {sigma} must be [{size}] and [{size}, {size}], and finite")
                    self.statistics[layer] = known
            if "arr_0" in file or not self.statistics:
                with file.zip.open("arr_0.npy") as f:
                    np.lib.format.read_magic(f)
                    self.shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(f)
                if dtype != np.uint8 or len(self.shape) != 4 or self.shape[3] != 3 or fortran_order:
                    raise ValueError(f"arr_0 is {dtype} {list(self.shape)}; need uint8 [N, H, W, 3] in C order")
            key = "labels" if "labels" in file else "arr_1"
            if key in file:
                self.labels = file[key].astype(np.int64, casting="same_kind")
                if self.labels.shape != self.shape[:1]:
                    raise ValueError(f"{key} is {list(self.labels.shape)}; need [{len(self)}]")

    def __len__(self) -> int:
        return self.shape[0]

    def batches(self, batch_size: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Images start .. stop - 1 in order, uint8 [b, H, W, 3] each."""
        stop = len(self) if stop is None else stop
        with _errors_of(self.path), zipfile.ZipFile(self.path) as archive, archive.open("arr_0.npy") as f:
            np.lib.format.read_magic(f)
            np.lib.format.read_array_header_1_0(f)
            f.seek(start * int(np.prod(self.shape[1:])), os.SEEK_CUR)
            for i in range(start, stop, batch_size):
                images = np.empty((min(batch_size, stop - i), *self.shape[1:]), dtype=np.uint8)
                if f.readinto(images.reshape(-1).data) != images.nbytes:
                    raise EOFError(f"arr_0 ends before image {i + len(images)} of {len(self)}")
                yield images

    def fingerprint(self) -> str:
        """Size and hash of the file."""
        return f"{self.path.stat().st_size}-{hash_file(self.path)}"


@contextlib.contextmanager
def _errors_of(path: Path):
    """Turn the errors of NumPy and zipfile about a file into a UserError that names it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise UserError(f"{path}: {e}") from e
