"""Sets of uint8 images on disk, read in batches in a fixed order: a folder of PNG and JPEG files, or an .npz."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from common.errors import UserError
from common.files import hash_bytes
from evaluations.npz import NpzImages

SUFFIXES = (".png", ".jpg", ".jpeg")
CONVERTIBLE_MODES = ("1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr")  # 8 bits or fewer: converting loses no range
DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)  # what Pillow raises on damaged files


def list_images(folder: Path, suffixes: Sequence[str]) -> list[str]:
    """Paths of the images below a folder, relative to it, sorted, with forward slashes. Links to folders are followed.

    Hidden files and folders, and what macOS adds to a .zip, are left out. UserError for a link to a folder that holds it.
    """
    names = []
    for root, folders, files in os.walk(folder, followlinks=True):
        here = Path(root)
        if here.resolve() in map(Path.resolve, here.parents):
            raise UserError(f"{here} is a link to a folder that holds it; remove it")
        folders[:] = [name for name in folders if not is_hidden(name)]
        found = [name for name in files if not is_hidden(name) and name.lower().endswith(tuple(suffixes))]
        names += [(here / name).relative_to(folder).as_posix() for name in found]
    return sorted(names)


def is_hidden(name: str) -> bool:
    """Whether `list_images` leaves out a file or folder of this name."""
    return name.startswith(".") or name == "__MACOSX"


def adm_center_crop(image: Image.Image, resolution: int) -> np.ndarray:
    """The square crop that ADM trains on and takes its reference batches from (arXiv 2105.05233), as DiT and SiT do.

    A box filter halves the image (RGB) while its shorter side has 2 * resolution pixels or more. A bicubic filter then scales
    the shorter side to the resolution, and the centre is cut out: uint8 [resolution, resolution, 3].
    """
    while min(image.size) >= 2 * resolution:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    factor = resolution / min(image.size)
    image = image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)
    left, top = (image.width - resolution) // 2, (image.height - resolution) // 2
    return np.array(image.crop((left, top, left + resolution, top + resolution)))


def read_rgb(file: str | Path | BinaryIO) -> Image.Image:
    """Decode an image, upright as its EXIF says, as 8-bit RGB (alpha is dropped).

    Raises UserError where it cannot be decoded, has more than 8 bits a channel, or is too small or too narrow to crop.
    """
    try:
        with Image.open(file) as image:
            if image.mode not in ("RGB", *CONVERTIBLE_MODES):
                raise UserError(f"mode {image.mode} is not one of 8 bits a channel")
            short, long = sorted(image.size)
            if short < 8 or long > 100 * short:  # to enlarge it would need gigabytes
                raise UserError(f"{image.width}x{image.height} pixels: the shorter side must have 8, and 1% of the longer one")
            return ImageOps.exif_transpose(image).convert("RGB")
    # The EXIF of a damaged file may hold anything: TypeError, AttributeError.
    except (*DECODE_ERRORS, Image.DecompressionBombError, TypeError, AttributeError, LookupError, ArithmeticError) as e:
        raise UserError(str(e) or type(e).__name__) from e


class ImageFolder:
    """PNG and JPEG files of one size below a folder, sorted by their path relative to it. Hidden files are left out.

    Args:
        convert_to_rgb: convert grey, palette, CMYK and RGBA images (dropping alpha) instead of refusing them.
        crop: crop images of any size to this resolution, as ADM does.

    Attributes:
        shape: (N, H, W, 3).
        files: in order.
    """

    def __init__(self, path: str | Path, convert_to_rgb: bool = False, crop: int | None = None):
        self.path, self.convert_to_rgb, self.crop, self.shape = Path(path), convert_to_rgb, crop, ()
        self.files = [self.path / name for name in list_images(self.path, SUFFIXES)]
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

    def fingerprint(self) -> str:
        """Number of files and a hash of their names, sizes and times of change; reading them would take as long as their use."""
        stats = [(file.relative_to(self.path).as_posix(), file.stat()) for file in self.files]
        return f"{len(self)}-{hash_bytes(repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]).encode())}"

    def _read(self, file: Path) -> np.ndarray:
        try:
            if self.crop is not None:
                return adm_center_crop(read_rgb(file), self.crop)
            with Image.open(file) as image:
                if image.mode != "RGB" and not (self.convert_to_rgb and image.mode in CONVERTIBLE_MODES):
                    raise ValueError(f"mode {image.mode}, not 8-bit RGB")
                if self.shape and (image.height, image.width) != self.shape[1:3]:
                    raise ValueError(f"{image.width}x{image.height} pixels; all must be of one size")
                return np.array(image.convert("RGB"))
        except DECODE_ERRORS as e:  # and read_rgb's UserError
            raise UserError(f"{file} cannot be used ({e})") from e


ImageSet = NpzImages | ImageFolder


def open_images(path: str | Path, convert_to_rgb: bool = False, crop: int | None = None) -> ImageSet:
    """A folder, with the arguments of `ImageFolder`, or an .npz, which must be RGB and of one size."""
    path = Path(path)
    if path.is_dir():
        return ImageFolder(path, convert_to_rgb, crop)
    if not path.is_file() or path.suffix.lower() != ".npz":
        raise UserError(f"{path} is neither a folder of PNG or JPEG images nor an .npz")
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
