"""Read uint8 RGB images in a fixed order from a folder or from an .npz file in ADM's format.

ADM's .npz files contain uint8 images [N, H, W, 3] in `arr_0`, labels in `arr_1`, and statistics of Inception's pooled features in
`mu` [2048] and `sigma` and of its spatial features in `mu_s` [2023] and `sigma_s`. `write_npz` stores the labels in `labels`, the
names of the classes in `class_names`, and the colour behind transparent images in `background`. The optional arrays `mu_dinov2`
[1024] and `sigma_dinov2` contain statistics of DINOv2's class token.
"""

from __future__ import annotations

import abc
import logging
import math
import os
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from common.errors import UserError, as_user_error, list_problems
from common.files import hash_bytes, open_atomically, read_yaml
from common.images import MODES, SUFFIXES, adm_center_crop, list_images, read_rgb
from common.types import check_colour
from evaluations.metrics import Statistics

log = logging.getLogger(__name__)

# (detector, layer) -> (key of the mean, key of the covariance, number of features)
STATISTICS_KEYS = {
    ("inception", "pool"): ("mu", "sigma", 2048),
    ("inception", "spatial"): ("mu_s", "sigma_s", 2023),
    ("dinov2", "pool"): ("mu_dinov2", "sigma_dinov2", 1024),
}

# Arrays of an .npz that no feature depends on. Results of images with labels store a hash of the class names, too.
UNHASHED_ARRAYS = ("background.npy", "class_names.npy")

SAMPLE_NAME = re.compile(r"(seed_\d+)_class_(\d+)")  # of an image that sample.py wrote


def evaluation_order(num_images: int) -> np.ndarray:
    """Return the order in which evaluations take images from a set on disk, int64 [N]: always the same random permutation.

    Files are often sorted by class, so the first images would not be a random sample. The order depends only on the size of the
    set, so that the images of two sets of equal size remain paired.
    """
    return np.random.default_rng(0).permutation(num_images)


class ImageSet(abc.ABC):
    """N images of one size, which are read in ascending order."""

    path: Path
    shape: tuple[int, ...]  # (N, H, W, 3), where N is 0 if only statistics are stored
    labels: np.ndarray | None = None  # class of each image [N], int64, or None if the classes are unknown
    class_names: list[str] | None = None  # names of the classes, or None if they are unknown
    statistics: Mapping[str, Mapping[str, Statistics]] = MappingProxyType({})  # as {detector: {layer: Statistics}}
    background: str | None = None  # colour behind transparent images, or None if it is unknown

    def __len__(self) -> int:
        return self.shape[0]

    @abc.abstractmethod
    def batches(self, batch_size: int, items: Sequence[int] | None = None) -> Iterator[np.ndarray]:
        """Yield the images with the ascending indices `items`, or all images, in uint8 batches [b, H, W, 3]."""

    @abc.abstractmethod
    def portable_hash(self) -> str:
        """Return a hash that is equal for a copy of the set on another machine."""

    def local_hash(self) -> str:
        """Return a hash that identifies the pixels and labels on this machine, for caches and results."""
        return self.portable_hash()

    def spot_check(self) -> object:
        """Read a little from the disk again, and return what is equal on all processes that see the same images."""
        return self.portable_hash()


NUM_LISTED = 10_000  # number of images from an unreadable one on that are read to list the unreadable ones together


class ImageFolder(ImageSet):
    """Image files in a folder and its subfolders, sorted by relative path. Hidden files are skipped.

    The class logs how many files it does not read. If sample.py wrote the images, their names contain the labels. Subfolders can
    hold the images of several sample.py commands with the same settings and other seeds.

    Args:
        convert_to_rgb: Whether to convert grey, palette, CMYK and RGBA images to RGB instead of rejecting such images.
        crop: Resolution of ADM's centre crop, which also converts images to RGB. If None, all images must have the same size.
        background: Background colour for transparent images.

    Attributes:
        files: Image paths in order.

    Raises:
        UserError: The folder contains no images, or an image cannot be used. The message names the folder or the image.
    """

    def __init__(self, path: str | Path, convert_to_rgb: bool = False, crop: int | None = None, background: str = "white"):
        self.path, self.crop, self.background = Path(path), crop, background
        self._modes = MODES if convert_to_rgb or crop else ("RGB",)
        listed = list_images(self.path)
        if listed.problems:
            raise UserError(f"{self.path}: {list_problems([*listed.problems.values()], 'repair or remove {}')}")
        sampled = self._sampled_folders(listed.images)
        grids = [name for name in listed.images if os.path.basename(name).startswith("grid_")]
        grids = {name for name in grids if not sampled.isdisjoint(Path(name).parents)}  # sample.py writes them next to its images
        self.files = [self.path / name for name in listed.images if name not in grids]
        if not self.files:
            raise UserError(f"{self.path} holds no images ({', '.join(SUFFIXES)})")
        if others := listed.other_files + Counter(Path(name).suffix for name in [*listed.unsupported, *grids]):
            left_out = ", ".join(f"{number} {suffix}" for suffix, number in others.most_common(5))
            log.info("%s: %d images are read; %d other files are not: %s", self.path, len(self.files), others.total(), left_out)
        matches = [SAMPLE_NAME.match(file.name) for file in self.files] if sampled else [None]
        if all(matches):
            self.labels = np.array([int(match[2]) for match in matches])
            seed, number = Counter(match[1] for match in matches).most_common(1)[0]
            if number > 1:
                raise UserError(f"{self.path} holds {number} images of {seed}; sample other seeds= in each folder")
        self._noted: dict[str, list[Path]] = defaultdict(list)  # images of the current pass by note of `read_rgb`
        self._portable_hash: str | None = None
        self.shape = ()  # unknown until the first image is read
        self.shape = (len(self.files), *self._read(self.files[0]).shape)

    def _sampled_folders(self, images: Iterable[str]) -> set[Path]:
        """Return the folders that sample.py filled with these images, relative to `path`.

        Raises UserError if their settings differ. Settings that only one folder stores are not compared, because a folder that
        was made before a key was added lacks it.
        """
        parents = {os.path.dirname(name) for name in images if SAMPLE_NAME.match(os.path.basename(name))}
        above = [(Path(parent), *Path(parent).parents) for parent in parents]
        with_settings = ([folder for folder in row if (self.path / folder / "settings.yaml").exists()] for row in above)
        folders = {found[0] for found in with_settings if found}  # the innermost ones
        first, *others = sorted(folders) or [None]
        for other in others:
            ours, theirs = (read_yaml(self.path / folder / "settings.yaml") for folder in (first, other))
            if changed := [key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]]:
                made = f"sample.py made the images in {first} and {other} with different {', '.join(sorted(changed))}"
                raise UserError(f"{self.path}: {made}; give one folder")
        return folders

    def batches(self, batch_size: int, items: Sequence[int] | None = None) -> Iterator[np.ndarray]:
        files = self.files if items is None else [self.files[i] for i in items]
        self._noted.clear()
        with ThreadPoolExecutor(8) as pool:
            for i in range(0, len(files), batch_size):
                try:
                    batch = np.stack(list(pool.map(self._read, files[i : i + batch_size])))
                except UserError:
                    self._list_unreadable(files[i : i + NUM_LISTED], pool)
                    raise  # the image can be read by now
                yield batch
        if files := self._noted["multi_frame"]:
            log.warning("%s: only the first page or frame of %d images is read, such as %s", self.path, len(files), min(files))
        if files := self._noted["transparent"]:
            log.info("%s: %s is behind %d transparent images, such as %s", self.path, self.background, len(files), min(files))
        if files := self._noted["enlarged"]:
            log.info("%s: %d images were enlarged to %d pixels, such as %s", self.path, len(files), self.crop, min(files))

    def _list_unreadable(self, files: Sequence[Path], pool: ThreadPoolExecutor) -> None:
        """Raise one UserError for all of these files that cannot be used."""

        def problem(file: Path) -> str | None:
            try:
                self._read(file)
            except UserError as e:
                return str(e)

        if problems := [text for text in pool.map(problem, files) if text is not None]:
            raise UserError(list_problems(problems, "repair or remove {}"))

    def portable_hash(self) -> str:
        """Hash the arguments, file names and file sizes. A copy of the folder on another machine has the same hash.

        Later calls return the same hash, because looking up every file takes long on a shared disk.
        """
        if self._portable_hash is None:
            sizes = []
            for file in self.files:
                with as_user_error(file):  # for example a file that was removed
                    sizes.append((file.relative_to(self.path).as_posix(), file.stat().st_size))
            self._portable_hash = hash_bytes(repr([self._modes, self.crop, self.background, sizes]).encode())
        return self._portable_hash

    def local_hash(self) -> str:
        """Hash the portable_hash and modification times. Hashing the contents would take as long as evaluating the images."""
        return hash_bytes(repr([self.portable_hash(), [file.stat().st_mtime_ns for file in self.files]]).encode())

    def spot_check(self) -> list[int | None]:
        """Return the sizes of ten files. A lookup of every file by every process would overload a shared disk."""
        some = [self.files[i] for i in np.linspace(0, len(self) - 1, 10).astype(int)]
        return [file.stat().st_size if file.is_file() else None for file in some]

    def _read(self, file: Path) -> np.ndarray:
        with as_user_error(file):
            image, notes = read_rgb(file, self.background, self._modes)
            notes += ["enlarged"] if self.crop and min(image.size) < self.crop else []
            for note in notes:
                self._noted[note].append(file)
            if self.crop is not None:
                return adm_center_crop(image, self.crop)
            if self.shape and (image.height, image.width) != self.shape[1:3]:
                size = f"{image.width}x{image.height} pixels, but the first image has {self.shape[2]}x{self.shape[1]}"
                raise ValueError(f"{size}; `prepare_latents.py reference resolution=...` crops images to one size")
            return np.array(image)


class NpzImages(ImageSet):
    """Images in an .npz file. Batches are read directly from the file, so the images do not have to fit into memory.

    Raises:
        UserError: The file cannot be used, or its statistics are not finite. The message names the file and the array.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.shape = (0, 0, 0, 3)  # without images
        self.statistics: dict[str, dict[str, Statistics]] = {}
        with as_user_error(self.path), np.load(self.path, allow_pickle=False) as file:
            for (detector, layer), (mu, sigma, size) in STATISTICS_KEYS.items():
                if mu in file:
                    stored = Statistics(*(torch.from_numpy(file[key]).double() for key in (mu, sigma)))
                    if stored.mu.shape != (size,) or stored.sigma.shape != (size, size):
                        raise ValueError(f"{mu} and {sigma} must be [{size}] and [{size}, {size}]")
                    if not (stored.mu.isfinite().all() and stored.sigma.isfinite().all()):
                        raise ValueError(f"{mu} or {sigma} holds NaN or infinity")
                    self.statistics.setdefault(detector, {})[layer] = stored
            if "arr_0" in file or not self.statistics:
                with file.zip.open("arr_0.npy") as f:
                    np.lib.format.read_magic(f)
                    self.shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(f)
                    self._header_bytes = f.tell()
                if dtype != np.uint8 or len(self.shape) != 4 or min(self.shape) < 0 or self.shape[3] != 3 or fortran_order:
                    raise ValueError(f"arr_0 is {dtype} {list(self.shape)}; need uint8 [N, H, W, 3] in C order")
                if (size := file.zip.getinfo("arr_0.npy").file_size) < math.prod(self.shape):
                    raise ValueError(f"arr_0 is {list(self.shape)}, but has only {size} bytes")
            key = "labels" if "labels" in file else "arr_1"
            if key in file:
                self.labels = file[key].astype(np.int64, casting="same_kind")
                if self.labels.shape != self.shape[:1]:
                    raise ValueError(f"{key} is {list(self.labels.shape)}; need [{len(self)}]")
            if "class_names" in file:
                self.class_names = file["class_names"].tolist()
            if "background" in file:
                self.background = str(file["background"])
                check_colour(self.background)

    def batches(self, batch_size: int, items: Sequence[int] | None = None) -> Iterator[np.ndarray]:
        items = range(len(self)) if items is None else items
        size = int(np.prod(self.shape[1:]))  # of an image in bytes
        with as_user_error(self.path), zipfile.ZipFile(self.path) as archive, archive.open("arr_0.npy") as f:
            f.read(self._header_bytes)  # seeking would disable the checksum, since Python 3.12
            following = 0  # index of the image at the current position
            for i in range(0, len(items), batch_size):
                images = np.empty((len(items[i : i + batch_size]), *self.shape[1:]), dtype=np.uint8)
                for image, item in zip(images, items[i : i + batch_size]):
                    if item != following:  # without the checksum
                        f.seek(self._header_bytes + int(item) * size)
                    if f.readinto(image.reshape(-1).data) != size:  # ty: ignore[missing-attribute] (it is a ZipExtFile, not IO)
                        raise EOFError(f"arr_0 ends before image {item + 1} of {len(self)}")
                    following = item + 1
                yield images

    def portable_hash(self) -> str:
        """Hash the names, sizes and CRC-32 checksums that the archive lists for its arrays, except UNHASHED_ARRAYS.

        The checksums cover the contents of the arrays. A copy to which `prepare_latents.py reference` adds the colour, such as
        that of ADM's file, is the same reference.
        """
        with as_user_error(self.path), zipfile.ZipFile(self.path) as archive:
            entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
            return hash_bytes(repr([entry for entry in entries if entry[0] not in UNHASHED_ARRAYS]).encode())


def open_images(
    path: str | Path, convert_to_rgb: bool = False, crop: int | None = None, background: str = "white"
) -> ImageFolder | NpzImages:
    """Open a folder as an `ImageFolder`, or an .npz file as `NpzImages`."""
    path = Path(path)
    if path.is_dir():
        return ImageFolder(path, convert_to_rgb, crop, background)
    if not path.is_file() or path.suffix.lower() != ".npz":
        raise UserError(f"{path} is neither a folder of images nor an .npz")
    if crop is not None:
        raise UserError(f"resolution={crop} crops the images of a folder, but {path} is an .npz")
    return NpzImages(path)


def write_npz(
    path: Path,
    images: Iterable[np.ndarray],
    shape: tuple[int, ...],
    labels: np.ndarray | None = None,
    background: str | None = None,
    statistics: Mapping[str, Mapping[str, Statistics]] | None = None,
    class_names: Sequence[str] | None = None,
) -> None:
    """Write uint8 images [H, W, 3] to an .npz file one at a time, so the images do not have to fit into memory.

    `shape` is (N, H, W, 3), and `labels` has N integers. `background` is the colour behind transparent images, or None if it is
    unknown. `statistics` and `class_names` are those of `ImageSet`. An invalid image or a write error raises UserError and leaves
    no file.
    """
    arrays = {} if labels is None else {"labels": np.asarray(labels, dtype=np.int64)}
    arrays |= {} if background is None else {"background": np.asarray(background)}
    arrays |= {} if class_names is None else {"class_names": np.asarray(class_names, dtype=np.str_)}
    for detector, layers in (statistics or {}).items():
        for layer, stored in layers.items():
            arrays |= zip(STATISTICS_KEYS[detector, layer][:2], (stored.mu.numpy(), stored.sigma.numpy()))
    with open_atomically(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("arr_0.npy", "w", force_zip64=True) as f:
            np.lib.format.write_array_header_1_0(f, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for image in images:
                if image.dtype != np.uint8 or image.shape != shape[1:]:
                    raise UserError(f"{path}: an image is {image.dtype} {image.shape}, not uint8 {shape[1:]}")
                f.write(np.ascontiguousarray(image).data)
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as f:
                np.lib.format.write_array(f, array)


def read_ahead(batches: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the batches. A thread reads the next batch while the caller uses the current batch."""
    batches = iter(batches)
    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(next, batches, None)
        while (batch := upcoming.result()) is not None:
            upcoming = pool.submit(next, batches, None)
            yield batch
