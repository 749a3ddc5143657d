"""ADM's file format: an .npz whose `arr_0` is uint8 [N, H, W, 3], optionally with Inception statistics.

`mu` [2048] and `sigma` are of the pooled features, `mu_s` [2023] and `sigma_s` of the spatial ones. Ours beside ADM's:
`mu_dinov2` [1024] and `sigma_dinov2`, of DINOv2's class token. Labels are `labels` (as written here) or `arr_1` (as ADM's
samplers write them).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.files import hash_file, whole_file
from evaluations.statistics import Statistics

STATISTICS_KEYS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s"), "dinov2": ("mu_dinov2", "sigma_dinov2")}
MAX_SMALL_BYTES = 1 << 28  # of one of these; a million labels take 8 MB, the largest sigma 34
SMALL_ARRAYS = {"labels", "arr_1", *itertools.chain(*STATISTICS_KEYS.values())}  # the others are streamed or not read


def statistics_by_key(statistics: dict[str, Statistics]) -> dict[str, Tensor]:
    """Statistics of layers as arrays under ADM's names."""
    return {key: x for layer, known in statistics.items() for key, x in zip(STATISTICS_KEYS[layer], (known.mu, known.sigma))}


def write_npz(
    path: Path,
    images: Iterable[np.ndarray],
    shape: tuple[int, int, int, int],
    labels: np.ndarray | None = None,
    statistics: dict[str, Statistics] | None = None,
) -> None:
    """Write images one by one, so that 50,000 of them need no memory. The file appears when it is complete.

    Args:
        images: N arrays, uint8 [H, W, 3].
        shape: (N, H, W, 3).
        labels: [N] integers, stored as `labels`.
        statistics: `pool` and `spatial` of Inception, stored under ADM's names, and `dinov2`.

    Raises:
        UserError: images or labels of another shape, type or number; the file cannot be written.
    """
    if labels is not None and (np.shape(labels) != shape[:1] or not np.issubdtype(np.asarray(labels).dtype, np.integer)):
        raise UserError(f"labels are {np.asarray(labels).dtype} {list(np.shape(labels))}; need integers [{shape[0]}]")
    arrays = {} if labels is None else {"labels": np.asarray(labels, dtype=np.int64)}
    arrays |= {key: x.numpy() for key, x in statistics_by_key(statistics or {}).items()}
    with whole_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as f:
            np.lib.format.write_array_header_1_0(f, {"descr": "|u1", "fortran_order": False, "shape": shape})
            count = 0
            for image in images:
                if image.dtype != np.uint8 or image.shape != shape[1:]:
                    raise UserError(f"image {count} is {image.dtype} {image.shape}, not uint8 {shape[1:]}")
                f.write(np.ascontiguousarray(image).data)
                count += 1
        if count != shape[0]:
            raise UserError(f"{count} images instead of {shape[0]}")
        for key, array in arrays.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as f:
                np.lib.format.write_array(f, array)


class NpzImages:
    """The images of an .npz, streamed from the zip, never loaded whole.

    Attributes:
        shape: (N, H, W, 3); N = 0 where the file holds statistics only.
        labels: [N] int64, or None.
        statistics: `pool` and `spatial` of Inception and `dinov2`, as far as the file holds them.

    Raises:
        UserError: it cannot be used; the message names the file and the key.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with _errors_of(self.path), zipfile.ZipFile(self.path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}
            arrays = {name: _read_array(archive, name) for name in names & SMALL_ARRAYS}
            self.statistics = self._check_statistics(arrays)
            if "arr_0" in names:
                with archive.open("arr_0.npy") as f:
                    self.shape = self._check_header(*_read_header(f))
            elif self.statistics.keys() & {"pool", "dinov2"}:
                self.shape = (0, 0, 0, 3)
            else:
                held = ", ".join(sorted(names)) or "nothing"
                raise UserError(f"{self.path} holds {held}; need arr_0 (uint8 [N, H, W, 3]), or mu and sigma")
        key = "labels" if "labels" in arrays else "arr_1"
        self.labels = arrays.get(key)
        if self.labels is not None:
            if self.labels.shape != self.shape[:1] or not np.issubdtype(self.labels.dtype, np.integer):
                found = f"{self.labels.dtype} {list(self.labels.shape)}"
                raise UserError(f"{self.path}: {key} is {found}; need integers [{len(self)}]")
            self.labels = self.labels.astype(np.int64)

    def __len__(self) -> int:
        return self.shape[0]

    def batches(self, batch_size: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """Images start .. stop - 1 in order, uint8 [b, H, W, 3] each.

        Raises UserError also where no pixel is above 1: that is what 0..1 floats cast to uint8 look like.
        """
        stop, brightest = check_range(self, batch_size, start, stop), 0
        with _errors_of(self.path), zipfile.ZipFile(self.path) as archive, archive.open("arr_0.npy") as f:
            _read_header(f)
            f.seek(start * int(np.prod(self.shape[1:])), os.SEEK_CUR)
            for i in range(start, stop, batch_size):
                images = np.empty((min(batch_size, stop - i), *self.shape[1:]), dtype=np.uint8)
                if f.readinto(images.reshape(-1).data) != images.nbytes:
                    raise UserError(f"{self.path} is truncated: its arr_0 ends before image {i + len(images)} of {len(self)}")
                brightest = max(brightest, int(images.max()))
                yield images
        if stop > start and brightest <= 1:
            raise UserError(f"{self.path}: no pixel of arr_0 is above {brightest}; need 0 to 255 (scale before casting)")

    def fingerprint(self) -> str:
        """Size and hash of the file."""
        return f"{self.path.stat().st_size}-{hash_file(self.path)}"

    def _check_header(self, shape: tuple[int, ...], fortran_order: bool, dtype: np.dtype) -> tuple[int, int, int, int]:
        H, W, C = shape[1:] if len(shape) == 4 else (0, 0, 0)
        problems = {
            "; need uint8 images of 0 to 255 (scale floats to 0..255, round, and cast)": dtype != np.uint8,
            ": grey images; need [N, H, W, 3] (repeat the channel three times)": len(shape) == 3 or C == 1,
            ": RGBA images; need [N, H, W, 3] (drop the alpha channel: arr[..., :3])": C == 4,
            ": channels first; need [N, H, W, 3] (arr.transpose(0, 2, 3, 1))": H == 3 and C != 3,
            "; need uint8 [N, H, W, 3]": C != 3 or min(H, W) < 1,
            ": it holds no images": 0 in shape,
            " in Fortran order, which cannot be streamed; save np.ascontiguousarray(arr)": fortran_order,
        }
        for problem, is_there in problems.items():
            if is_there:
                raise UserError(f"{self.path}: arr_0 is {dtype} {list(shape)}{problem}")
        return shape

    def _check_statistics(self, arrays: dict[str, np.ndarray]) -> dict[str, Statistics]:
        statistics = {}
        for layer, keys in STATISTICS_KEYS.items():
            held = [key for key in keys if key in arrays]
            for key in keys if held else ():
                if key not in held:
                    raise UserError(f"{self.path} holds {held[0]} but no {key}; both are needed")
                if not np.issubdtype(arrays[key].dtype, np.floating):
                    raise UserError(f"{self.path}: {key} is {arrays[key].dtype}; need floats")
            if held:
                try:
                    statistics[layer] = Statistics(*(torch.from_numpy(arrays[key].astype(np.float64)) for key in keys))
                except UserError as e:
                    raise UserError(f"{self.path}: {', '.join(keys)}: {e}") from e
        return statistics


def check_range(images, batch_size: int, start: int, stop: int | None) -> int:
    """`stop`, or the number of images for None. Raises UserError where a set holds fewer, ValueError for what is no range."""
    if batch_size < 1 or start < 0 or (stop is not None and stop < start):
        raise ValueError(f"images {start} to {stop} in batches of {batch_size}: need batch_size >= 1 and 0 <= start <= stop")
    if stop is not None and stop > len(images):
        raise UserError(f"{images.path} holds {len(images)} images, but {stop} were asked for; ask for fewer or make more")
    return len(images) if stop is None else stop


@contextlib.contextmanager
def _errors_of(path: Path):
    """Turn the errors of zipfile and NumPy about a damaged file into a UserError that names the file."""
    try:
        yield
    except UserError:
        raise
    # MemoryError: of a header that names a trillion values.
    except (
        zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, MemoryError, RecursionError, tokenize.TokenError,
    ) as e:  # fmt: skip
        raise UserError(f"{path} is damaged or not an .npz file ({e}); copy or download it again") from e
    except ValueError as e:  # NumPy's
        raise UserError(f"{path}: {e}") from e


def _read_array(archive: zipfile.ZipFile, key: str) -> np.ndarray:
    num_bytes = archive.getinfo(f"{key}.npy").file_size
    if num_bytes > MAX_SMALL_BYTES:
        raise UserError(f"{archive.filename}: {key} unpacks to {num_bytes / 1e9:.3g} GB, which labels and statistics never need")
    with archive.open(f"{key}.npy") as f:
        return np.lib.format.read_array(f, allow_pickle=False)


def _read_header(f) -> tuple[tuple[int, ...], bool, np.dtype]:
    """shape, fortran_order, dtype of an array in .npy format; leaves the file at the first value."""
    if np.lib.format.read_magic(f) == (1, 0):
        return np.lib.format.read_array_header_1_0(f)
    return np.lib.format.read_array_header_2_0(f)
