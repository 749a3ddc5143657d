"""Find and decode image files, crop images as ADM does, convert images from and to uint8, and draw labelled grids."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont, ImageOps

from common.errors import UserError

if TYPE_CHECKING:  # commands that print their help import this module, and importing torch takes seconds
    from torch import Tensor

NOT_A_FILE = "it is not a regular file, or the link is broken"
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
OTHER_SUFFIXES = (".svg", ".svgz", ".heic", ".heif", ".avif", ".jxl")  # image formats that Pillow may not know
MODES = ("RGB", "1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr")  # modes with at most 8 bits per channel
# Folders of systems beside those of users: macOS in .zip files, Windows, fsck, file servers (thumbnails, bins, snapshots)
SYSTEM_FOLDERS = {"__macosx", "$recycle.bin", "recycler", "system volume information", "lost+found"}
SYSTEM_FOLDERS |= {"@eadir", "@recycle", "@recently-snapshot", "#recycle", "#snapshot"}
DRAWING = "inspect_{}.png"  # drawing that `prepare_latents.py inspect` writes into a folder of shards, named by 8 hex digits
DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")  # grey modes with more than 8 bits, which need a `value_range`


class Listing(NamedTuple):
    """Files below a folder. The paths are sorted, relative to the folder, and contain forward slashes."""

    images: list[str]  # files with a suffix in SUFFIXES
    unsupported: list[str]  # files with the suffix of another image format
    other_files: Counter[str]  # number of all other files by suffix
    problems: dict[str, str]  # path -> message


def list_images(folder: Path) -> Listing:
    """List the files below `folder`. The search follows links to folders and skips hidden names.

    Problems are broken links, links to a folder that contains the link, folders that cannot be read, and images that are pipes or
    devices.
    """
    images: list[str] = []
    unsupported: list[str] = []
    other_files: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    unsupported_suffixes = {*Image.registered_extensions(), *OTHER_SUFFIXES} - {*SUFFIXES}
    for name, entry in walk(folder, reasons):
        suffix = os.path.splitext(name)[1].lower()
        if suffix in SUFFIXES:
            images.append(name)
            if not (os.path.isfile(entry) if entry.is_symlink() else entry.is_file()):
                reasons[name] = f"cannot be read: {NOT_A_FILE}"
        elif is_broken_link(entry):  # it may stand for a folder
            reasons[name] = "is a broken link"
        elif suffix in unsupported_suffixes:
            unsupported.append(name)
        else:
            other_files[suffix or "no suffix"] += 1
    described = {name: f"{name or str(folder)[:200]} {reasons[name]}" for name in sorted(reasons)}
    return Listing(sorted(images), sorted(unsupported), other_files, described)


def walk(folder: Path, problems: dict[str, str]) -> Iterator[tuple[str, os.DirEntry]]:
    """Yield (relative path, entry) for everything below `folder` that is not a folder, in any order.

    The walk follows links to folders and skips hidden names. It adds {relative path: what is wrong} to `problems` for each link
    to a folder that contains the link, and for each folder that cannot be read.
    """
    folders: list[tuple[str, frozenset]] = [("", frozenset())]  # relative path, and identities of the folder's parents
    while folders:
        parent, identities = folders.pop()
        try:
            status = os.stat(folder / parent)
            if (identity := (status.st_dev, status.st_ino)) in identities:
                problems[parent[:-1]] = "is a link to a folder that contains it"
                continue
            entries = [entry for entry in os.scandir(folder / parent) if not is_hidden(entry.name)]
        except OSError as e:
            problems[parent[:-1]] = f"cannot be read: {e.strerror}"
            continue
        for entry in entries:
            if os.path.isdir(entry) if entry.is_symlink() else entry.is_dir():
                folders.append((f"{parent}{entry.name}/", identities | {identity}))
            else:
                yield parent + entry.name, entry


def is_broken_link(path: Path | os.DirEntry) -> bool:
    return path.is_symlink() and not os.path.exists(path)


def is_hidden(name: str) -> bool:
    """Return whether a file or folder with this name is no file of a user: a dot file, SYSTEM_FOLDERS, a drawing by `inspect`."""
    is_drawing = re.fullmatch(DRAWING.format("[0-9a-f]{8}"), name) is not None
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS or is_drawing


def hash_pixels(image: Image.Image | np.ndarray) -> int:
    """Return a 64-bit hash of an image's size and pixels, or of another array, which identifies equal ones."""
    values = np.ascontiguousarray(image)
    digest = hashlib.blake2b(repr(values.shape).encode(), digest_size=8)
    digest.update(values)
    return int.from_bytes(digest.digest(), "little", signed=True)


def are_same_colour(first: str, second: str) -> bool:
    """Return whether two colours are equal, such as white and #ffffff."""
    return ImageColor.getrgb(first) == ImageColor.getrgb(second)


def read_rgb(
    file: Path | BinaryIO,
    background: str = "white",
    modes: tuple[str, ...] = MODES,
    value_range: Sequence[float] | None = None,
) -> tuple[Image.Image, list[str]]:
    """Decode an image to 8-bit RGB and apply its EXIF orientation. Also return what a viewer of the file might miss.

    Args:
        background: Colour behind transparent pixels.
        modes: Accepted Pillow modes.
        value_range: For grey images with more than 8 bits, the values (low, high) that become black and white.

    Returns:
        The image, and a list of `transparent` (the background shows through), `multi_frame` (only the first page or frame of
        several is read) and `flat` (`value_range` made an image with different values a single grey level).

    Raises:
        ValueError: If the path is not a regular file, or if the Pillow mode is not in `modes`. Damaged files can raise any error.
    """
    if isinstance(file, Path) and not file.is_file():  # reading from a pipe could block forever
        raise ValueError(NOT_A_FILE)
    with Image.open(file) as image:
        notes = ["multi_frame"] if getattr(image, "is_animated", False) else []
        if image.mode not in (*modes, *DEEP_MODES):
            hint = "; convert_to_rgb=true of fid.py converts it" if image.mode in MODES else ""
            raise ValueError(f"Pillow's mode {image.mode} is not accepted (accepted: {', '.join(modes)}){hint}")
        image = ImageOps.exif_transpose(image)
    if image.mode in DEEP_MODES:
        image, is_flat = _to_grey(image, value_range)
        notes += ["flat"] if is_flat else []
    if not image.has_transparency_data:
        return image.convert("RGB"), notes
    layer = image.convert("RGBA")
    canvas = Image.new("RGBA", image.size, background)
    canvas.alpha_composite(layer)
    return canvas.convert("RGB"), notes + (["transparent"] if layer.getextrema()[3][0] < 255 else [])


def _to_grey(image: Image.Image, value_range: Sequence[float] | None) -> tuple[Image.Image, bool]:
    """Map a grey image with more than 8 bits linearly to 8 bits. Values outside `value_range` become black or white.

    If a value is transparent, the result has an alpha channel. Also return whether different values became a single grey level.
    """
    values = np.asarray(image, dtype=np.float64)  # Pillow's own extrema do not exist for big-endian images
    if value_range is None:
        message = f"Pillow's mode {image.mode} has more than 8 bits, and this image has values from {values.min():g} to"
        message += f" {values.max():g}"
        raise ValueError(f"{message}; value_range=[low,high] of prepare_latents.py maps low to black and high to white")
    low, high = value_range
    levels = (values - low) * (255 / (high - low))
    if not np.isfinite(levels).all():
        raise ValueError("the image holds NaN or infinity")
    pixels = np.clip(np.round(levels), 0, 255).astype(np.uint8)
    is_flat = bool(np.ptp(pixels) == 0 and np.ptp(values) > 0)
    if image.has_transparency_data:
        pixels = np.stack([pixels, np.where(values == image.info["transparency"], 0, 255).astype(np.uint8)], axis=-1)
    return Image.fromarray(pixels), is_flat


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
    left = (image.width - resolution) // 2
    top = (image.height - resolution) // 2
    return np.array(image.crop((left, top, left + resolution, top + resolution)))


def from_uint8(images: Tensor) -> Tensor:
    """Convert uint8 images [B, H, W, 3] to float32 images [B, 3, H, W] with values from -1 to 1."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


def to_uint8(images: Tensor, rounding: str = "round") -> Tensor:
    """Convert float32 images [B, 1 or 3, H, W] with values from -1 to 1 to uint8 RGB images [B, H, W, 3].

    Args:
        rounding: How to convert pixel values to integers. `round` rounds to the nearest integer, and `truncate` rounds down.

    Raises:
        UserError: If a value is NaN or infinite, because the conversion would silently turn the value into a valid pixel.
    """
    if not images.isfinite().all():
        raise UserError("decoded images hold NaN or infinity: the autoencoder overflows")
    levels = images * 127.5 + 127.5
    pixels = (levels.round() if rounding == "round" else levels).clamp(0, 255).byte()
    return pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous()


def labelled_grid(images: Sequence[np.ndarray], captions: Sequence[object], num_columns: int = 10) -> Image.Image:
    """Arrange images (uint8 [H, W, 3], equal sizes) in a grid with a caption above each. Enlarge images smaller than 64 pixels.

    A caption that is wider than its image is shortened. If the font lacks a letter, only the first word is drawn, which is the
    number of a class.
    """
    import matplotlib  # slow
    from matplotlib.ft2font import FT2Font

    file = os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    font = ImageFont.truetype(file, 10)
    known_letters = FT2Font(file).get_charmap()
    gap = 4
    caption_height = 14
    height, width = images[0].shape[:2]
    factor = -(-64 // min(height, width))
    height *= factor
    width *= factor
    num_columns = min(num_columns, len(images))
    num_rows = -(-len(images) // num_columns)
    size = num_columns * (width + gap) + gap, num_rows * (height + caption_height + gap) + gap
    grid = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(grid)
    for i, (image, caption) in enumerate(zip(images, captions)):
        x = gap + i % num_columns * (width + gap)
        y = gap + i // num_columns * (height + caption_height + gap)
        text = str(caption)
        if not {*map(ord, text)} <= known_letters.keys():
            text = text.partition(" ")[0]
        while 1 + draw.textlength(text, font) > width:
            text = text[:-1]
        draw.text((x + 1, y), text, fill="black", font=font)
        grid.paste(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC), (x, y + caption_height))
    return grid


def differing_class(names: Sequence[str] | None, others: Sequence[str] | None) -> str | None:
    """Return the first difference of two lists of class names, or None if they are equal or one list is unknown (None)."""
    pairs = () if names is None or others is None else enumerate(zip_longest(names, others))
    return next((f"class {number} is {name!r} and {other!r}" for number, (name, other) in pairs if name != other), None)


def class_caption(label: int, class_names: Sequence[str] | None) -> str:
    """Return the caption of an image in a grid: the class number, followed by the class name if it is known."""
    return f"{label} {class_names[label]}" if class_names and label < len(class_names) else str(label)
