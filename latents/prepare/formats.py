"""Latents as other projects store them, read in order for conversion to native shards.

| format | made by | holds |
|---|---|---|
| `maskdit_lmdb` | MaskDiT, extract_latent.py | `z-<i>` float32 moments, `y-<i>`, `length`; perhaps mirrored copies at the end |
| `webdataset` | MaskDiT's lmdb2wds.py, for the official TREAD trainer | tars of `<key>.latent`, `<key>.cls` |
| `fast_dit` | fast-DiT, extract_features.py | `<name>_features/<i>.npy`, samples x 0.18215, and `<name>_labels/<i>.npy` |
| `repa` | REPA and EDM2, dataset_tools.py encode | dataset.json, .npy files of mean and standard deviation; or a .zip of these |
| `lightningdit` | LightningDiT, extract_features.py | safetensors with `latents`, `latents_flip`, `labels`; latents_stats.pt |
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import UserError
from common.files import hash_bytes, read_file
from common.progress import progress_bar
from evaluations.images import read_rgb
from latents.arrays import check_float, parse_npy, read_channel_statistics
from latents.contents import find_formats, way_on
from latents.detection import SD_SCALE
from latents.prepare.images import to_jpeg
from latents.shards import shard_files, spread_items
from latents.webdataset import TarIndex


class LatentSource:
    """Latents of another project; a subclass for each format, opened by `open_latents`.

    A subclass gives `_read(start, stop)`: [latents] or [latents, flips], float32, perhaps not finite; and
    `_name_of(item, flip)`, for messages.
    """

    name: str  # of the format
    labels: np.ndarray  # [N] int64
    shape: tuple[int, ...]  # (C, h, w) of an item as `read` gives it; 2C channels where items are moments
    identity: tuple  # names and sizes of the files, for the fingerprint
    has_flips = False  # `read` also gives latents of the mirrored images
    known_kind: str | None = None  # moments | sample, where the format says so
    known_stored_scale: float | None = None  # what the stored values were multiplied by, where the format says so
    channel_statistics: tuple[list[float], list[float]] | None = None  # mean and deviation of each stored channel, if known
    statements: list[str] = []  # what was detected on opening, for the log

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Items start .. stop - 1 as stored, float32 [b, *shape], and their mirror images where has_flips.

        Raises:
            UserError: an item that is missing, has another shape or type, or is not finite. The message names it.
        """
        latents = self._read(start, stop)
        for flip, values in enumerate(latents):
            # A sum is finite only if all values are, and cheap; float64 cannot overflow.
            if not np.isfinite(values.sum(dtype=np.float64)):
                bad = int(np.flatnonzero(~np.isfinite(values).all(axis=(1, 2, 3)))[0])
                raise UserError(f"{self._name_of(start + bad, flip)} holds NaN or Inf; make it again, or leave it out")
        return torch.from_numpy(latents[0]), torch.from_numpy(latents[1]) if self.has_flips else None

    def find_images(self, resolution: int) -> Callable[[int], bytes]:
        """What gives the image of an item, of `resolution` pixels, as a JPEG file. Raises UserError without images."""
        raise UserError(f"keep_images=jpeg needs the images beside the latents, as REPA keeps them, and {self.name} has none")

    def fingerprint(self) -> str:
        """A hash of names, sizes and labels: cheap, and another one for other data."""
        parts = "".join(map(repr, (self.name, self.shape, *self.identity)))
        return hash_bytes(parts.encode() + self.labels.tobytes())

    def read_spread(self, num_items: int = 256) -> Tensor:
        """[n, *shape] float32: items spread over the data, as `detection.detect` needs them."""
        return torch.cat([self.read(i, i + 1)[0] for i in spread_items(len(self.labels), num_items).tolist()])


class FilesOfItems(LatentSource):
    """A format that keeps several items in a file. A subclass gives `_read_rows(number of the file, rows)`, as `_read`."""

    def _set_files(self, files: list[Path], labels: list[np.ndarray]) -> None:
        """`labels`: [B] of each file."""
        for file, values in zip(files, labels):
            if not np.issubdtype(values.dtype, np.integer):
                raise UserError(f"{file}: labels are {values.dtype}, not whole numbers")
        self.files, self.labels = files, np.concatenate(labels).astype(np.int64)
        self._first_item = np.cumsum([0] + [len(values) for values in labels])

    def _locate(self, item: int) -> tuple[int, int]:
        """(number of its file, its row in there)."""
        number = int(np.searchsorted(self._first_item, item, "right")) - 1
        return number, item - int(self._first_item[number])

    def _read(self, start: int, stop: int) -> list[np.ndarray]:
        parts = []
        while start < stop:
            number, row = self._locate(start)
            end = min(stop, int(self._first_item[number + 1]))
            parts.append(self._read_rows(number, slice(row, row + end - start)))
            start = end
        return [np.concatenate(part).astype(np.float32, copy=False) for part in zip(*parts)]


def _list_files(folder: Path) -> set[str]:
    """All below a folder, relative to it."""
    return {Path(root, name).relative_to(folder).as_posix() for root, _, names in os.walk(folder) for name in names}


def _number_of(name: str) -> int | None:
    """The number at the end of a file's name: 12 of img00000012.png."""
    found = re.search(r"(\d+)\.\w+$", name)
    return int(found[1]) if found else None


def _parse_latents(where: str, payload: bytes) -> np.ndarray:
    latents = parse_npy(where, payload)
    check_float(where, latents.dtype)
    return latents


# ----------------------------------------------------------------------------------------------------------------------


# Touches both ends of every value.
_READ_ALL = """
import os, sys, lmdb
with lmdb.open(sys.argv[1], subdir=os.path.isdir(sys.argv[1]), readonly=True, lock=False) as env, env.begin(buffers=True) as txn:
    for key, value in txn.cursor():
        bytes(value[:1]), bytes(value[-1:])
"""


class MaskDiTLMDB(LatentSource):
    """MaskDiT's LMDB, the folder of data.mdb or a single file: moments [8, h, w] `z-<i>`, labels `y-<i>`, their number `length`.

    With --xflip MaskDiT stores the mirrored images after all others, and nothing marks them. If the labels of the halves
    agree and latents of the second half correlate with mirrored ones of the first, the second half becomes the flips. If
    they do not correlate, all stay items, with a warning.
    """

    name, known_kind, known_stored_scale = "MaskDiT LMDB", "moments", 1.0
    CHANNELS = 8

    def __init__(self, path: Path):
        self.path = path
        self.file = path if path.is_file() else path / "data.mdb"
        if not self.file.exists():
            below = [name for name in ("train", "val") if (path / name / "data.mdb").exists()]
            raise UserError(f"{path} holds no data.mdb" + (f"; use {below[0]}: {path / below[0]}" if below else ""))
        self._check_not_truncated()
        with self._open() as env, env.begin(buffers=True) as txn:
            length = self._number(txn, "length", "the extraction was interrupted before it wrote it; run it again")
            if length == 0:
                raise UserError(f"{self.file} holds no items (length is 0)")
            labels = np.array([self._number(txn, f"y-{i}", f"but length is {length}") for i in range(length)], dtype=np.int64)
            item_bytes = len(self._value(txn, "z-0", f"but length is {length}"))
            size = math.isqrt(item_bytes // (4 * self.CHANNELS))
            if item_bytes == 0 or item_bytes != 4 * self.CHANNELS * size**2:
                raise UserError(
                    f"{self.file}: z-0 has {item_bytes} bytes, which are not float32 moments [8, h, h] of an SD-VAE for any h; "
                    "float64 or samples [4, h, h] are not what MaskDiT writes"
                )
            self.shape = (self.CHANNELS, size, size)
            correlation = self._mirror_correlation(txn, labels)
        self.has_flips = correlation is not None and correlation > 0.5
        self.labels = labels[: length // 2] if self.has_flips else labels
        self.identity = self.file.stat().st_size, self.has_flips
        if self.has_flips:
            self.statements = [
                f"latents_flip: the second {len(self.labels)} items (--xflip); the labels of the halves agree, and latents "
                f"correlate by {correlation:.2f} with mirrored ones of the first half"
            ]
        elif correlation is not None:
            self.statements = [
                f"warning: the second {length // 2} items have the labels of the first in the same order, as --xflip stores "
                f"mirrored images, but their latents correlate by {correlation:.2f} with mirrored ones, not by more than 0.5: "
                "they stay items of their own. If you extracted with --xflip, the two halves are not of the same images: "
                "extract again. Otherwise this is no problem"
            ]

    def _read(self, start: int, stop: int) -> list[np.ndarray]:
        firsts = (0, len(self.labels))[: 1 + self.has_flips]
        with self._open() as env, env.begin(buffers=True) as txn:
            return [self._items(txn, range(first + start, first + stop)) for first in firsts]

    def _name_of(self, item: int, flip: int) -> str:
        return f"{self.file}: z-{item + flip * len(self.labels)}"

    def _open(self):
        import lmdb  # this format alone needs it

        try:
            # No lock: nothing is written to a folder that may be read-only, and nobody writes while this reads.
            # Opened for every read, which takes microseconds: LMDB allows a process one handle, and none across a fork.
            return lmdb.open(str(self.path), subdir=self.path.is_dir(), readonly=True, lock=False, readahead=False, create=False)
        except lmdb.Error as e:
            raise UserError(f"{self.file} cannot be opened as an LMDB: {e}") from e

    def _check_not_truncated(self) -> None:
        """Raises UserError where pages are missing that hold data.

        Size alone does not tell: LMDB may leave last pages unwritten that nothing refers to. Reading a page that is not there
        ends the process, so another process reads first where the file is short.
        """
        with self._open() as env:
            needed, found = (env.info()["last_pgno"] + 1) * env.stat()["psize"], self.file.stat().st_size
        if found < needed and subprocess.run([sys.executable, "-c", _READ_ALL, str(self.path)], capture_output=True).returncode:
            raise UserError(f"{self.file} is truncated: {found} of {needed} bytes; copy it again")

    def _value(self, txn, key: str, hint: str):
        import lmdb

        try:
            value = txn.get(key.encode())
        except lmdb.Error as e:
            raise UserError(f"{self.file} is damaged at {key} ({e}); copy it again") from e
        if value is None:
            raise UserError(f"{self.file} has no {key}: {hint}")
        return value

    def _number(self, txn, key: str, hint: str) -> int:
        text = bytes(self._value(txn, key, hint))
        if not text.isdigit():
            raise UserError(f"{self.file}: {key} is {text[:24]!r}, not a whole number")
        return int(text)

    def _items(self, txn, numbers: range) -> np.ndarray:
        latents = np.empty((len(numbers), *self.shape), dtype=np.float32)
        for row, number in zip(latents, numbers):
            value = self._value(txn, f"z-{number}", "an item is missing; run the extraction again")
            if len(value) != row.nbytes:
                hint = ", as many as float64 has" if len(value) == 2 * row.nbytes else ""
                raise UserError(
                    f"{self.file}: z-{number} has {len(value)} bytes{hint}, but z-0 has {row.nbytes} (float32 {list(self.shape)})"
                )
            row[:] = np.frombuffer(value, dtype="<f4").reshape(self.shape)
        return latents

    def _mirror_correlation(self, txn, labels: np.ndarray) -> float | None:
        """Median correlation of the means of item N/2 + i with the mirrored ones of item i; None where labels differ."""
        half = len(labels) // 2
        if len(labels) % 2 or not np.array_equal(labels[:half], labels[half:]):
            return None
        correlations = []
        for i in spread_items(half, 32).tolist():
            first, second = self._items(txn, range(i, half + i + 1, half))[:, : self.CHANNELS // 2]
            with np.errstate(invalid="ignore", divide="ignore"):  # constant latents correlate with nothing
                correlations.append(np.corrcoef(first[..., ::-1].ravel(), second.ravel())[0, 1])
        return float(np.median(np.nan_to_num(correlations)))


class Tars(LatentSource):
    """A folder of WebDataset tars, or one; see `latents.webdataset`."""

    name = "WebDataset tars"

    def __init__(self, path: Path, allow_pickle: bool = False):
        self._index = TarIndex.open(path, allow_pickle)
        self.labels, self.shape = self._index.labels, self._index.shape
        self.identity = ([(f.name, f.stat().st_size) for f in self._index.files],)

    def _read(self, start: int, stop: int) -> list[np.ndarray]:
        return [self._index.read(np.arange(start, stop)).astype(np.float32, copy=False)]

    def _name_of(self, item: int, flip: int) -> str:
        return self._index.name_of(item)


class FastDiTFolder(FilesOfItems):
    """fast-DiT's `<name>_features/<i>.npy`, float32 [B, 4, h, w] times 0.18215, and `<name>_labels/<i>.npy`, int64 [B]."""

    name, known_kind, known_stored_scale = "fast-DiT features", "sample", SD_SCALE

    def __init__(self, path: Path):
        self.features, labels_folder = self._find(path)
        numbers, label_numbers = self._numbers(self.features), self._numbers(labels_folder)
        unpaired = min(set(numbers) ^ set(label_numbers), default=None)
        if unpaired is not None:
            has, lacks = (self.features, labels_folder) if unpaired in numbers else (labels_folder, self.features)
            name = numbers.get(unpaired) or label_numbers[unpaired]
            raise UserError(
                f"{self.features} holds {len(numbers)} files and {labels_folder.name} {len(label_numbers)}: "
                f"{has.name}/{name} lacks its partner in {lacks}"
            )
        if not numbers:
            raise UserError(f"{self.features} holds no .npy files")
        names = [numbers[i] for i in sorted(numbers)]  # by number: 2 comes before 10
        label_files = [labels_folder / label_numbers[i] for i in sorted(numbers)]
        bar = progress_bar(label_files, desc="reading labels", unit="file", delay=1, leave=False)
        labels = [parse_npy(str(file), read_file(file)) for file in bar]
        for file, values in zip(label_files, labels):
            if values.ndim != 1:
                raise UserError(f"{file} is {values.dtype} {list(values.shape)}; need labels int64 [B]")
        self._set_files([self.features / name for name in names], labels)
        self.shape = ()
        self.shape = self._read_rows(0, slice(None))[0].shape[1:]
        spread = [self.files[i] for i in spread_items(len(names), 64)]
        self.identity = names, [file.stat().st_size for file in spread]

    @staticmethod
    def _find(path: Path) -> tuple[Path, Path]:
        ends = "_features"
        found = [path] if path.name.endswith(ends) else sorted(f for f in path.glob(f"*{ends}") if f.is_dir())
        if len(found) != 1:
            names = ", ".join(f.name for f in found) or "none"
            raise UserError(f"{path} must hold one folder <name>_features, but there are: {names}; give the path of one of them")
        labels = found[0].with_name(found[0].name.removesuffix(ends) + "_labels")
        if not labels.is_dir():
            raise UserError(f"{found[0]} has no folder of labels beside it: {labels} does not exist")
        return found[0], labels

    @staticmethod
    def _numbers(folder: Path) -> dict[int, str]:
        """Number -> name of the .npy files of a folder."""
        names = [e.name for e in os.scandir(folder) if e.name.endswith(".npy") and not e.name.startswith(".")]
        for name in names:
            if not name.removesuffix(".npy").isdecimal():
                raise UserError(f"{folder / name} is not named by a number, as fast-DiT names its files; move it elsewhere")
        numbers = {int(name.removesuffix(".npy")): name for name in names}
        if len(numbers) < len(names):
            raise UserError(f"{folder} holds files of the same number (as 1.npy and 01.npy are); keep one of each")
        return numbers

    def _read_rows(self, number: int, rows: slice) -> list[np.ndarray]:
        file = self.files[number]
        latents = _parse_latents(str(file), read_file(file))
        expected = (int(self._first_item[number + 1] - self._first_item[number]), *(self.shape or latents.shape[1:]))
        if latents.ndim != 4 or latents.shape != expected:
            need = "[B, C, h, w]" if latents.ndim != 4 else f"{list(expected)}, as its labels and {self.files[0].name} say"
            raise UserError(f"{file} is {latents.dtype} {list(latents.shape)}; need {need}")
        return [latents[rows]]

    def _name_of(self, item: int, flip: int) -> str:
        return str(self.files[self._locate(item)[0]])


class REPAFolder(LatentSource):
    """REPA's and EDM2's `vae-sd/`: dataset.json with "labels": [[name, label], ...], and .npy files float32 [8, h, w].

    That folder, the one that holds `vae-sd/`, or a .zip of either. The files hold mean and standard deviation; `read` gives
    mean and log-variance.
    """

    name, known_kind, known_stored_scale = "REPA / EDM2 mean and std", "moments", 1.0

    def __init__(self, path: Path):
        try:
            root = zipfile.Path(path) if path.is_file() else path  # read alike
        except zipfile.BadZipFile as e:
            raise UserError(f"{path} is truncated or not a .zip: {e}") from e
        self._root = root if (root / "dataset.json").exists() else root / "vae-sd"
        if not (self._root / "dataset.json").exists():
            raise UserError(f"{path} holds no dataset.json (nor vae-sd/dataset.json), which names the latents and their labels")
        self.path = path if path.is_file() else self._root
        self._names, self.labels = self._read_labels()
        files = self._list_files()
        for name in self._names:
            if name not in files or not name.endswith(".npy"):
                problem = "" if name in files else ", which is not there"
                problem += "" if name.endswith(".npy") else "; it names images: encode them instead"
                raise UserError(f"{self.path}: dataset.json names {name}{problem}")
        unnamed = sum(name.endswith(".npy") for name in files) - len(set(self._names))
        self.statements = [f"{unnamed} .npy files are not in dataset.json and are left out"] if unnamed else []
        first = self._load(0)
        self.shape = first.shape
        if len(self.shape) != 3 or self.shape[0] % 2:
            raise UserError(f"{self._name_of(0)} is {first.dtype} {list(self.shape)}; need [2C, h, w], mean and std")
        sized = [path] if path.is_file() else [self.path / name for name in self._names[:64]]
        self.identity = self._names, sum(file.stat().st_size for file in sized)

    def _read(self, start: int, stop: int) -> list[np.ndarray]:
        latents = np.empty((stop - start, *self.shape), dtype=np.float32)
        for item, row in enumerate(latents, start):
            value = self._load(item)
            if value.shape != self.shape:
                raise UserError(
                    f"{self._name_of(item)} is {value.dtype} {list(value.shape)}, but {self._names[0]} is {list(self.shape)}"
                )
            row[:] = value
        std = latents[:, self.shape[0] // 2 :]
        if (std < 0).any():
            bad = int(np.flatnonzero((std < 0).any(axis=(1, 2, 3)))[0])
            raise UserError(
                f"{self._name_of(start + bad)} holds negative values where standard deviations are expected; "
                "is it mean and log-variance?"
            )
        # The autoencoder clamps log-variances at -30.
        np.multiply(np.log(np.maximum(std, math.exp(-15))), 2, out=std)
        return [latents]

    def _name_of(self, item: int, flip: int = 0) -> str:
        return f"{self.path}: {self._names[item]}"

    def _list_files(self) -> set[str]:
        """All below the folder, relative to it."""
        if isinstance(self._root, zipfile.Path):
            return {name.removeprefix(self._root.at) for name in self._root.root.namelist() if name.startswith(self._root.at)}
        return _list_files(self.path)

    def _read_bytes(self, name: str) -> bytes:
        try:
            return (self._root / name).read_bytes()
        except (zipfile.BadZipFile, EOFError, OSError) as e:
            raise UserError(f"{self.path}: {name} is damaged: {e}") from e

    def _load(self, item: int) -> np.ndarray:
        return _parse_latents(self._name_of(item), self._read_bytes(self._names[item]))

    def find_images(self, resolution: int) -> Callable[[int], bytes]:
        """From `images/` beside `vae-sd/`, with a dataset.json of its own. As in REPA, files belong together by their order."""
        folder = self.path.parent / "images"
        if not (folder / "dataset.json").is_file():
            raise UserError(f"keep_images=jpeg needs {folder} with its dataset.json, as REPA's preprocessing writes it")
        names, labels = self._read_labels(folder)
        files = _list_files(folder)
        if missing := [name for name in names if name not in files]:
            raise UserError(f"{folder}: dataset.json names {missing[0]}, which is not there ({len(missing)} such files)")
        order, of_images = np.argsort(self._names), np.argsort(names)
        if not np.array_equal(self.labels[order], labels[of_images]):
            raise UserError(
                f"{folder} and {self.path} do not hold the same items: {len(names)} images and {len(order)} latents, or other "
                "labels; make both from one data set"
            )
        pairs = [(names[i], self._names[j]) for i, j in zip(of_images, order)]
        numbers = [tuple(map(_number_of, pair)) for pair in pairs]
        differing = [pair for pair, (ours, theirs) in zip(pairs, numbers) if None not in (ours, theirs) and ours != theirs]
        if differing:
            raise UserError(
                f"{folder} and {self.path} number their items differently: in order, {differing[0][0]} would belong to "
                f"{differing[0][1]}; make both from one data set"
            )
        image_of = np.empty(len(order), dtype=np.int64)
        image_of[order] = of_images

        def read_image(item: int) -> bytes:
            file = folder / names[image_of[item]]
            try:
                image = read_rgb(file)
            except ValueError as e:
                raise UserError(f"{file} cannot be read ({e}); mend it") from e
            if image.size != (resolution, resolution):
                raise UserError(f"{file} has {image.width}x{image.height} pixels instead of {resolution}x{resolution}")
            return to_jpeg(np.asarray(image))

        return read_image

    def _read_labels(self, images: Path | None = None) -> tuple[list[str], np.ndarray]:
        file = f"{images or self.path}: dataset.json"
        try:
            entries = json.loads((images / "dataset.json").read_bytes() if images else self._read_bytes("dataset.json"))["labels"]
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f'{file} is not {{"labels": [[name, label], ...]}}: {e!r}') from e
        if not entries:
            raise UserError(
                f'{file}: "labels" is null or empty; encode a data set that has labels (class folders, or labels in the '
                "dataset.json of its images)"
            )
        for entry in entries:
            if not (isinstance(entry, list) and list(map(type, entry)) == [str, int]):
                raise UserError(f"{file}: {str(entry)[:80]} is not [name, label] with a whole number as the label")
        return [name for name, _ in entries], np.array([label for _, label in entries], dtype=np.int64)


class LightningDiTFolder(FilesOfItems):
    """LightningDiT's safetensors, a folder or one: `latents` [M, C, h, w], `latents_flip`, `labels` [M]; unscaled samples.

    latents_stats.pt beside them holds `mean` and `std` [1, C, 1, 1] of each channel, by which LightningDiT normalises.
    """

    name, known_kind = "LightningDiT safetensors", "sample"

    def __init__(self, path: Path):
        files = [path] if path.is_file() else shard_files(path)
        if not files:
            raise UserError(f"{path} holds no *.safetensors")
        opened = [self._open(file) for file in files]
        for file, (names, shape, _) in zip(files, opened):
            if (names, shape) != opened[0][:2]:
                layout, first = (f"{', '.join(x[0])} {list(x[1])}" for x in ((names, shape), opened[0]))
                raise UserError(f"{file} does not belong with {files[0]}: {layout} against {first}")
        self._names, self.shape, _ = opened[0]
        self._set_files(files, [labels for *_, labels in opened])
        self.has_flips = "latents_flip" in self._names
        self.identity = self.has_flips, [(file.name, file.stat().st_size) for file in files]
        self._read_statistics(files[0].with_name("latents_stats.pt"))

    def _read_statistics(self, file: Path) -> None:
        if not file.exists():
            self.statements = [
                f"warning: {file} is not there: LightningDiT normalises each channel by its mean and standard deviation; "
                "normalize=true measures them"
            ]
            return
        self.channel_statistics = read_channel_statistics(file, self.shape[0])
        self.statements = [f"latents_mean and latents_std: those of {file.name}, by which the network's input is normalised"]

    @staticmethod
    def _open(file: Path) -> tuple[list[str], tuple[int, ...], np.ndarray]:
        """(names of the latents that it holds, shape of an item, labels)."""
        try:
            with safe_open(file, framework="pt") as f:
                metadata, held = f.metadata() or {}, {name: f.get_slice(name) for name in sorted(f.keys())}
                labels = f.get_tensor("labels").numpy() if "labels" in held else None
        except (SafetensorError, OSError) as e:
            raise UserError(f"{file} is truncated or not a safetensors file: {e}") from e
        if "kind" in metadata:
            raise UserError(f"{file} is a native shard, which training reads as it is")
        if not {"latents", "labels"} <= held.keys():
            raise UserError(f"{file} holds {', '.join(held) or 'nothing'}; need latents [M, C, h, w] and labels [M]")
        names = [name for name in ("latents", "latents_flip") if name in held]
        expected = held["latents"].get_shape()
        for name in names:
            where, shape, dtype = f"{file}: {name}", held[name].get_shape(), held[name].get_dtype()
            if dtype == "F64":
                check_float(where, np.dtype(np.float64))
            if dtype not in ("F32", "F16", "BF16") or len(shape) != 4 or 0 in shape:
                raise UserError(f"{where} is {dtype} {shape}; need float32, bfloat16 or float16 [M, C, h, w]")
            if shape != expected:
                raise UserError(f"{where} is {shape}, but latents are {expected}")
        if labels.shape != (expected[0],):
            raise UserError(f"{file}: {expected[0]} latents, but labels are {list(labels.shape)}")
        return names, tuple(expected[1:]), labels

    def _read_rows(self, number: int, rows: slice) -> list[np.ndarray]:
        with safe_open(self.files[number], framework="pt") as f:
            return [f.get_slice(name)[rows.start : rows.stop].float().numpy() for name in self._names]

    def _name_of(self, item: int, flip: int) -> str:
        number, row = self._locate(item)
        return f"{self.files[number]}: {self._names[flip]} of item {row}"


# ----------------------------------------------------------------------------------------------------------------------

FORMATS = {
    "maskdit_lmdb": MaskDiTLMDB,
    "webdataset": Tars,
    "fast_dit": FastDiTFolder,
    "repa": REPAFolder,
    "lightningdit": LightningDiTFolder,
}


def open_latents(path: str | Path, format: str = "auto", allow_pickle: bool = False) -> LatentSource:
    """Open latents of another project.

    Args:
        path: as the class of the format says.
        format: one of FORMATS, or `auto`: told from what the path holds.
        allow_pickle: read pickled arrays in tars, with an unpickler that admits nothing else.

    Raises:
        UserError: the path does not exist, or no format or several fit; files that are missing, truncated, damaged or of
            another format, labels that are not whole numbers, items of different shapes. The message names the file.
    """
    path = Path(path)
    if format not in ("auto", *FORMATS):
        raise UserError(f"format={format} is not accepted; use {' | '.join(('auto', *FORMATS))}")
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder (or file) that holds the latents")
    format = _detect_format(path) if format == "auto" else format
    return Tars(path, allow_pickle) if format == "webdataset" else FORMATS[format](path)


def _detect_format(path: Path) -> str:
    """The format that fits what a path holds. Raises UserError where none or several do."""
    fitting, held = find_formats(path)
    if "native" in fitting:
        raise UserError(f"path={path} {way_on(path, 'path')}")
    if fitting == ["images"]:
        raise UserError(f"path={path} holds no latents; it {way_on(path, 'path')}")
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UserError(f"{path} may be {' or '.join(fitting)}; say which with format=")
    more = f" and {len(held) - 8} more" if len(held) > 8 else ""
    raise UserError(
        f"{path} holds no latents that are known: looked for data.mdb (MaskDiT), *.tar (WebDataset), <name>_features/ "
        "(fast-DiT), dataset.json or vae-sd/dataset.json or a .zip (REPA, EDM2), *.safetensors (LightningDiT); "
        f"found {', '.join(held[:8]) or 'nothing'}{more}"
    )
