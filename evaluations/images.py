"""Sets of uint8 images on disk, read in batches in a fixed order: a folder of them, or ADM's .npz.

ADM's .npz holds `arr_0`, uint8 [N, H, W, 3], labels as `arr_1`, and statistics of features: `mu` [2048] and `sigma` of
Inception's pooled features, `mu_s` [2023] and `sigma_s` of its spatial ones. `labels` may stand for `arr_1`, as in files of this
project, and `mu_dinov2` [1024] and `sigma_dinov2` for statistics of DINOv2's class token.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from common.errors import UserError, reading
from common.files import hash_bytes, hash_file, whole_file
from common.images import CONVERTIBLE_MODES, SUFFIXES, adm_center_crop, list_images, open_image, read_rgb, to_rgb
from evaluations.metrics import Statistics

# (detector, layer) -> names of mean and covariance, number of features
STATISTICS_KEYS = {
    ("inception", "pool"): ("mu", "sigma", 2048),
    ("inception", "spatial"): ("mu_s", "sigma_s", 2023),
    ("dinov2", "pool"): ("mu_dinov2", "sigma_dinov2", 1024),
}


class ImageFolder:
    """Image files of one size below a folder, sorted by their path relative to it. Hidden files are left out.

    Args:
        convert_to_rgb: convert grey, palette, CMYK and RGBA images instead of refusing them.
        crop: crop images of any size to this resolution, as ADM does.
        background: the colour behind transparent images, which `convert_to_rgb` and `crop` accept.

    Attributes:
        shape: (N, H, W, 3).
        files: in order.
    """

    def __init__(
        self, path: str | Path, convert_to_rgb: bool = False, crop: int | None = None, background: str = "white"
    ):
        self.path, self.convert_to_rgb, self.crop, self.background = Path(path), convert_to_rgb, crop, background
        self.shape = ()  # unknown until the first image is read
        self.files = [self.path / name for name in list_images(self.path)]
        if (self.path / "settings.yaml").exists():  # of sample.py, whose grids lie beside its images
            self.files = [file for file in self.files if not file.name.startswith("grid_")]
        if not self.files:
            raise UserError(f"{self.path} holds no images ({', '.join(SUFFIXES)})")
        self.shape = (len(self.files), *self._read(self.files[0]).shape)
        self.labels, self.statistics = None, {}  # an .npz may hold both

    def __len__(self) -> int:
        return self.shape[0]

    def batches(self, batch_size: int, start: int = 0, stop: int | None = None) -> Iterator[np.ndarray]:
        """As `NpzImages.batches`; errors name the file that cannot be decoded."""
        files = self.files[start:stop]
        with ThreadPoolExecutor(8) as pool:
            for i in range(0, len(files), batch_size):
                yield np.stack(list(pool.map(self._read, files[i : i + batch_size])))

    def outline(self) -> list:
        """Equal for equal copies on other machines: the names, and the sizes in bytes of a few files."""
        names = [file.relative_to(self.path).as_posix() for file in self.files]
        return [self.crop, names, *(file.stat().st_size for file in self.files[:: len(self) // 64 + 1])]

    def fingerprint(self) -> str:
        """Number of files and a hash of their names, sizes and times of change; reading them would take as long as their use."""
        stats = [(file.relative_to(self.path).as_posix(), file.stat()) for file in self.files]
        digest = hash_bytes(repr([(name, found.st_size, found.st_mtime_ns) for name, found in stats]).encode())
        how = f"-{self.background}" if self.convert_to_rgb or self.crop else ""
        return f"{len(self)}-{digest}{'' if self.crop is None else f'-crop{self.crop}'}{how}"

    def _read(self, file: Path) -> np.ndarray:
        with reading(file):
            if self.crop is not None:
                return adm_center_crop(read_rgb(file, self.background)[0], self.crop)
            with open_image(file) as image:
                if image.mode not in (CONVERTIBLE_MODES if self.convert_to_rgb else ("RGB",)):
                    raise ValueError(f"mode {image.mode}, not 8-bit RGB")
                if self.shape and (image.height, image.width) != self.shape[1:3]:
                    how = "all must be of one size; `prepare_latents.py reference resolution=...` crops them"
                    raise ValueError(f"{image.width}x{image.height} pixels; {how}")
                return np.array(to_rgb(image, self.background)[0])


def write_npz(
    path: Path, images: Iterable[np.ndarray], shape: tuple[int, int, int, int], labels: np.ndarray | None = None
) -> None:
    """Write images one by one, so that 50,000 of them need no memory. The file appears when it is complete.

    Args:
        images: N arrays, uint8 [H, W, 3].
        shape: (N, H, W, 3).
        labels: [N] integers.

    Raises:
        UserError: images of another shape or type; the file cannot be written.
    """
    with whole_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as f:
            np.lib.format.write_array_header_1_0(f, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for image in images:
                if image.dtype != np.uint8 or image.shape != shape[1:]:
                    raise UserError(f"{path}: an image is {image.dtype} {image.shape}, not uint8 {shape[1:]}")
                f.write(np.ascontiguousarray(image).data)
        if labels is not None:
            with archive.open("labels.npy", "w") as f:
                np.lib.format.write_array(f, np.asarray(labels, dtype=np.int64))


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
        self._hash: str | None = None
        with reading(self.path), np.load(self.path, allow_pickle=False) as file:
            for layer, (mu, sigma, size) in STATISTICS_KEYS.items():
                if mu in file:
                    known = Statistics(*(torch.from_numpy(file[key]).double() for key in (mu, sigma)))
                    if known.mu.shape != (size,) or known.sigma.shape != (size, size):
                        raise ValueError(f"{mu} and {sigma} must be [{size}] and [{size}, {size}]")
                    self.statistics[layer] = known
            if "arr_0" in file or not self.statistics:
                with file.zip.open("arr_0.npy") as f:
                    np.lib.format.read_magic(f)
                    self.shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(f)
                    self._header_bytes = f.tell()
                if dtype != np.uint8 or len(self.shape) != 4 or min(self.shape) < 0 or self.shape[3] != 3 or fortran_order:
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
        with reading(self.path), zipfile.ZipFile(self.path) as archive, archive.open("arr_0.npy") as f:
            f.seek(self._header_bytes + start * int(np.prod(self.shape[1:])))
            for i in range(start, stop, batch_size):
                images = np.empty((min(batch_size, stop - i), *self.shape[1:]), dtype=np.uint8)
                if f.readinto(images.reshape(-1).data) != images.nbytes:
                    raise EOFError(f"arr_0 ends before image {i + len(images)} of {len(self)}")
                yield images

    def outline(self) -> list:
        """Equal for equal copies on other machines: the checksums that the zip archive stores."""
        with reading(self.path), zipfile.ZipFile(self.path) as archive:
            return [(entry.filename, entry.CRC) for entry in archive.infolist()]

    def fingerprint(self) -> str:
        """Size and hash of the file."""
        self._hash = self._hash or hash_file(self.path)  # once: a search asks at every point
        return f"{self.path.stat().st_size}-{self._hash}"


# Either of them.
ImageSet = NpzImages | ImageFolder


def open_images(
    path: str | Path, convert_to_rgb: bool = False, crop: int | None = None, background: str = "white"
) -> ImageSet:
    """A folder, with the arguments of `ImageFolder`, or an .npz, which must be RGB and of one size."""
    path = Path(path)
    if path.is_dir():
        return ImageFolder(path, convert_to_rgb, crop, background)
    if not path.is_file() or path.suffix.lower() != ".npz":
        raise UserError(f"{path} is neither a folder of images nor an .npz")
    if crop is not None:
        raise UserError(f"resolution={crop} crops the images of a folder; those of {path} are taken as they are")
    return NpzImages(path)


def read_ahead(batches: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The same batches, the next one being read while this one is in use."""
    batches = iter(batches)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, batches, None)
        while (current := following.result()) is not None:
            following = pool.submit(next, batches, None)
            yield current
