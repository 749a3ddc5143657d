"""Images on disk and in memory: finding, opening, cropping and arranging them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from common.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
CONVERTIBLE_MODES = ("RGB", "1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr")  # 8 bits or fewer: converting loses no range


def list_images(folder: Path) -> list[str]:
    """Paths of the images below a folder, relative to it, sorted, with forward slashes. Links to folders are followed.

    Hidden files and folders, and what macOS adds to a .zip, are left out. UserError for a link to a folder that holds it.
    """
    return list_files(folder)[0]


def list_files(folder: Path) -> tuple[list[str], list[str]]:
    """`list_images`, and the paths of other files whose suffix Pillow knows as that of an image."""
    names, unread, suffixes = [], [], tuple(Image.registered_extensions().keys() - {*SUFFIXES})
    for root, folders, files in os.walk(folder, followlinks=True):
        here = Path(root)
        if here.resolve() in map(Path.resolve, here.parents):
            raise UserError(f"{here} is a link to a folder that holds it; remove it")
        folders[:] = [name for name in folders if not is_hidden(name)]
        for found, endings in ((names, SUFFIXES), (unread, suffixes)):
            kept = [name for name in files if not is_hidden(name) and name.lower().endswith(endings)]
            found += [(here / name).relative_to(folder).as_posix() for name in kept]
    return sorted(names), sorted(unread)


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


def is_regular(file: Path) -> bool:
    """Whether it is neither a pipe nor a device, which could be read for ever. Raises OSError if there is no such file."""
    return stat.S_ISREG(file.stat().st_mode)


def open_image(file: str | Path | BinaryIO) -> Image.Image:
    """Pillow's image, not decoded yet. Raises ValueError for a pipe or a device."""
    if isinstance(file, (str, Path)) and not is_regular(Path(file)):
        raise ValueError("it is not a regular file")
    return Image.open(file)


def to_rgb(image: Image.Image, background: str) -> tuple[Image.Image, bool]:
    """An image as 8-bit RGB on a background of this colour, and whether the background shows through."""
    if not image.has_transparency_data:
        return image.convert("RGB"), False
    layer = image.convert("RGBA")
    canvas = Image.new("RGBA", image.size, background)
    canvas.alpha_composite(layer)
    return canvas.convert("RGB"), layer.getextrema()[3][0] < 255


def read_rgb(file: str | Path | BinaryIO, background: str = "white") -> tuple[Image.Image, bool]:
    """Decode an image, upright as its EXIF says; the result of `to_rgb`.

    Raises ValueError for more than 8 bits a channel, or too small or narrow an image to crop; for a damaged file, anything.
    """
    with open_image(file) as image:
        if image.mode not in CONVERTIBLE_MODES:
            raise ValueError(f"mode {image.mode} is not one of 8 bits a channel")
        short, long = sorted(image.size)
        if short < 8 or long > 100 * short:  # to enlarge it would need gigabytes
            raise ValueError(f"{image.width}x{image.height} pixels: the shorter side must have 8, and 1% of the longer one")
        return to_rgb(ImageOps.exif_transpose(image), background)


def labelled_grid(images: list[np.ndarray], labels: list[int], num_columns: int = 10, min_pixels: int = 64) -> Image.Image:
    """Images (uint8 [H, W, 3], all of one size) side by side, each below its label, with sides of at least min_pixels."""
    height, width = images[0].shape[:2]
    factor = -(-min_pixels // min(height, width))
    height, width, gap, caption = height * factor, width * factor, 4, 14
    num_columns = min(num_columns, len(images))
    num_rows = -(-len(images) // num_columns)
    grid = Image.new("RGB", (num_columns * (width + gap) + gap, num_rows * (height + caption + gap) + gap), "white")
    draw = ImageDraw.Draw(grid)
    for i, (image, label) in enumerate(zip(images, labels)):
        x, y = gap + i % num_columns * (width + gap), gap + i // num_columns * (height + caption + gap)
        draw.text((x + 1, y), str(label), fill="black")
        grid.paste(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC), (x, y + caption))
    return grid
