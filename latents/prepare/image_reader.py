"""Read and crop the images that `latents.prepare.labelled_images` has found."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from common.errors import UserError, as_user_error
from common.images import adm_center_crop, hash_pixels, read_rgb
from common.progress import progress_bar
from latents.batches import map_ahead
from latents.prepare.labelled_images import LabelledImages


def to_jpeg(pixels: np.ndarray) -> bytes:
    """Compress uint8 pixels [H, W, 3] to a JPEG file with quality 95 and no chroma subsampling."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", quality=95, subsampling=0)
    return file.getvalue()


@contextlib.contextmanager
def _as_user_error(name: str) -> Iterator[None]:
    """Convert any error to a UserError that names an image. Errors of files hold no other path, because shards store them."""
    with as_user_error(name):
        try:
            yield
        except OSError as e:
            reason = "cannot identify image file" if isinstance(e, UnidentifiedImageError) else e.strerror
            if reason is None:  # it is Pillow's own error, without a path
                raise
            raise ValueError(reason) from e


class ReadImage(NamedTuple):
    """An image that `ImageReader` has read and cropped."""

    pixels: np.ndarray  # cropped, uint8 [R, R, 3]
    image_hash: int  # of the whole image, so that it does not depend on the resolution
    notes: list[str]  # of `read_rgb`, and `enlarged` if the image has fewer pixels than `resolution`


@dataclass(frozen=True)
class ImageReader:
    """Reads and crops images, as `encode` does. `EncodeConfig` documents the settings."""

    images: LabelledImages
    resolution: int
    background: str = "white"
    pad: int = 0
    grey: bool = False
    value_range: Sequence[float] | None = None

    def __call__(self, index: int) -> ReadImage:
        """Read and crop an image. Raises UserError, which names the image, if it cannot be read."""
        with _as_user_error(self.images.names[index]):
            image, notes = self._decode(index)
            image_hash = hash_pixels(image)
            image = ImageOps.expand(image, self.pad)
            notes += ["enlarged"] if min(image.size) < self.resolution else []
            pixels = adm_center_crop(image.convert("L").convert("RGB") if self.grey else image, self.resolution)
            return ReadImage(pixels, image_hash, notes)

    def error_of(self, index: int) -> str | None:
        """Return why an image cannot be read, or None if it can be read."""
        try:
            self(index)
        except UserError as e:
            return str(e)

    def hash(self, index: int) -> int | None:
        """Return the hash of an image, or None if it cannot be read."""
        try:
            with _as_user_error(self.images.names[index]):
                return hash_pixels(self._decode(index)[0])
        except UserError:
            return None

    def hashes(self, indices: Sequence[int], num_threads: int) -> list[int | None]:
        """Read some of the images and return their hashes, or None for those that cannot be read."""
        hashes = map_ahead(self.hash, indices, num_threads)
        return list(progress_bar(hashes, total=len(indices), unit="images", desc="comparing images"))

    def _decode(self, index: int) -> tuple[Image.Image, list[str]]:
        return read_rgb(io.BytesIO(self.images.read(index)), self.background, value_range=self.value_range)
