"""Find and decode image files, crop images as ADM does, and draw labelled grids."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from common.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
MODES = ("RGB", "1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr")  # modes with at most 8 bits per channel


def list_images(folder: Path) -> tuple[list[str], list[str]]:
    """List the files below `folder` that have a suffix in SUFFIXES, and the files with other image suffixes that Pillow knows.

    The paths are sorted, relative to `folder`, and contain forward slashes. The search follows links to folders and skips hidden
    names. Raises UserError if a link points to a folder that contains the link, or if a folder cannot be read.
    """
    files = []

    def fail(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}")

    for root, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        parent = Path(root)
        if parent.is_symlink() and parent.resolve() in map(Path.resolve, parent.parents):  # only links can make a loop
            raise UserError(f"{parent} is a link to a folder that contains it; remove the link")
        folders[:] = [name for name in folders if not is_hidden(name)]
        files += [(parent / name).relative_to(folder).as_posix() for name in names if not is_hidden(name)]
    others = tuple(Image.registered_extensions().keys() - {*SUFFIXES})
    images, unread = (sorted(file for file in files if file.lower().endswith(endings)) for endings in (SUFFIXES, others))
    return images, unread


def is_hidden(name: str) -> bool:
    """Return whether `list_images` skips a name. The skipped names are dot files and the folder that macOS adds to .zip files."""
    return name.startswith(".") or name == "__MACOSX"


def read_rgb(file: Path | BinaryIO, background: str = "white", modes: tuple[str, ...] = MODES) -> tuple[Image.Image, bool]:
    """Decode an image to 8-bit RGB and apply its EXIF orientation. Also return whether the background shows through.

    Raises ValueError if the path is not a regular file or the Pillow mode is not in `modes`. Damaged files can raise any error.
    """
    if isinstance(file, Path) and not file.is_file():  # reading from a pipe could block forever
        raise ValueError("it is not a regular file, or is missing")
    with Image.open(file) as image:
        if image.mode not in modes:
            raise ValueError(f"Pillow's mode {image.mode} is not accepted: {', '.join(modes)}")
        image = ImageOps.exif_transpose(image)
    if not image.has_transparency_data:
        return image.convert("RGB"), False
    layer = image.convert("RGBA")
    canvas = Image.new("RGBA", image.size, background)
    canvas.alpha_composite(layer)
    return canvas.convert("RGB"), layer.getextrema()[3][0] < 255


def adm_center_crop(image: Image.Image, resolution: int) -> np.ndarray:
    """Crop an RGB image to a square, uint8 [resolution, resolution, 3], as ADM (arXiv 2105.05233), DiT and SiT do.

    A box filter halves the image while its shorter side has at least 2 * resolution pixels. A bicubic filter then scales the
    shorter side to `resolution` before the centre crop. Raises ValueError for images that are too small or too narrow.
    """
    short, long = sorted(image.size)
    if short < 8 or long > 100 * short:  # enlarging a narrow image could take gigabytes
        raise ValueError(f"{image.width}x{image.height} pixels; the shorter side needs 8 pixels and 1% of the longer side")
    while min(image.size) >= 2 * resolution:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    factor = resolution / min(image.size)
    image = image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)
    left, top = (image.width - resolution) // 2, (image.height - resolution) // 2
    return np.array(image.crop((left, top, left + resolution, top + resolution)))


def labelled_grid(images: list[np.ndarray], labels: list[int], num_columns: int = 10) -> Image.Image:
    """Arrange images (uint8 [H, W, 3], equal sizes) in a grid with a label above each. Enlarge images smaller than 64 pixels."""
    height, width = images[0].shape[:2]
    factor = -(-64 // min(height, width))
    height, width, gap, caption = height * factor, width * factor, 4, 14
    num_columns = min(num_columns, len(images))
    num_rows = -(-len(images) // num_columns)
    grid = Image.new("RGB", (num_columns * (width + gap) + gap, num_rows * (height + caption + gap) + gap), "white")
    for i, (image, label) in enumerate(zip(images, labels)):
        x, y = gap + i % num_columns * (width + gap), gap + i // num_columns * (height + caption + gap)
        ImageDraw.Draw(grid).text((x + 1, y), str(label), fill="black")
        grid.paste(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC), (x, y + caption))
    return grid
