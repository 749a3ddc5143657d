"""Latent formats of other projects, one class for each. `convert` reads the items in order and writes shards."""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from common.errors import UserError, reading
from common.files import hash_bytes
from common.images import read_rgb
from latents.autoencoders import SD_SCALE
from latents.prepare.images import read_dataset_json, to_jpeg
from latents.shards import shard_files, spread_items
from latents.tars import index_tars
from latents.torch_files import read_channel_statistics


class LatentSource:
    """Latents of another project. `open_latents` chooses the subclass.

    A subclass defines `_open()`, which sets `labels` and `items`, and `_load(number)`, which returns the array of an item and, if
    has_flips, the array of the mirrored image. Both may raise any error.
    """

    patterns: tuple[str, ...]  # file names by which the format is recognised
    labels: np.ndarray  # [N] int64
    items: Sequence  # [N], name or position of each item in the files, also for error messages
    shape: tuple[int, ...]  # shape of an item in `read`: (C, h, w), or (2C, h, w) for moments
    has_flips = False  # whether `read` also returns latents of the mirrored images
    kind: str | None = None  # moments or sample, if the format determines it
    scale: float | None = None  # factor that multiplied the stored values, if the format determines it
    channel_statistics: tuple[list[float], list[float]] | None = None  # mean and deviation of each channel, if known
    note = ""  # remark of `_open` for the log

    def __init__(self, path: Path):
        self.path = path
        with reading(path):
            self._open()
            if not len(self.labels):
                raise ValueError("there are no items")
            self.shape = self._load(0)[0].shape

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Read items start .. stop - 1 as stored: `latents`, float32 [b, *shape], and `latents_flip` if has_flips.

        Raises UserError if an item is missing or damaged, has another shape, or is not finite.
        """
        latents = np.empty((1 + self.has_flips, stop - start, *self.shape), dtype=np.float32)
        for number in range(start, stop):
            with reading(name := f"{self.path}: item {number} ({self.items[number]})"):
                arrays = [np.asarray(array, dtype=np.float32) for array in self._load(number)]
            if any(array.shape != self.shape or not np.isfinite(array).all() for array in arrays):
                raise UserError(f"{name} is {list(arrays[0].shape)} or not finite; need finite numbers {list(self.shape)}")
            latents[:, number - start] = arrays
        return dict(zip(("latents", "latents_flip"), torch.from_numpy(latents)))

    def find_images(self, resolution: int) -> Callable[[int], bytes]:
        """Return a function from item numbers to JPEG files of `resolution` pixels. Raises UserError if there are no images."""
        raise UserError(f"keep_images=jpeg needs REPA's folder images/ next to vae-sd/; {self.path} has none")

    def fingerprint(self) -> str:
        """Hash the labels and 256 items spread over the data. Reading all items would take as long as converting them."""
        spread = [self.read(i, i + 1)["latents"].numpy().tobytes() for i in spread_items(len(self.labels), 256).tolist()]
        return hash_bytes(b"".join([f"{self.shape} {self.has_flips}".encode(), self.labels.tobytes(), *spread]))


class MaskDiTLMDB(LatentSource):
    """LMDB of MaskDiT, a folder with data.mdb or a single file: moments [8, h, w] `z-<i>`, labels `y-<i>`, and `length`, N.

    With --xflip, MaskDiT appends the mirrored images as separate items. They also become separate items of the shards.

    LMDB maps its file into memory. If a copy is truncated, reading it ends the process (SIGBUS). Copy such a file again.
    """

    kind, scale = "moments", 1.0
    patterns = ("*.mdb",)

    def _open(self) -> None:
        import lmdb  # only this format needs it

        # Without a lock, LMDB writes nothing, so the folder may be read-only.
        options = {"subdir": self.path.is_dir(), "readonly": True, "lock": False, "readahead": False, "create": False}
        self.transaction = lmdb.open(str(self.path), **options).begin()
        self.items = range(int(self.transaction.get(b"length")))
        self.labels = np.array([int(self.transaction.get(f"y-{i}".encode())) for i in self.items], dtype=np.int64)

    def _load(self, number: int) -> list[np.ndarray]:
        value = self.transaction.get(f"z-{number}".encode())
        return [np.frombuffer(value, dtype="<f4").reshape(8, size := math.isqrt(len(value) // 32), size)]


class _ArrayUnpickler(pickle.Unpickler):
    """Reads a pickled NumPy array. It accepts only names that old and new NumPy write, because other pickles can run code."""

    ADMITTED = ("_reconstruct", "ndarray", "dtype", "_frombuffer")

    def find_class(self, module: str, name: str):
        if (module, name) != ("_codecs", "encode") and not (module.split(".")[0] == "numpy" and name in self.ADMITTED):
            raise ValueError(f"it refers to {module}.{name}, but only NumPy arrays are accepted")
        return super().find_class(module, name)


class Tars(LatentSource):
    """Uncompressed WebDataset tars, a folder or a file: `<key>.latent` (a pickled array), `.latent.npy` or `.npy`, and `.cls`.

    MaskDiT's lmdb2wds.py makes them for the official TREAD trainer.
    """

    patterns = ("[!.]*.tar",)

    def _open(self) -> None:
        self.items = index_tars(self.path, ("latent", "latent.npy", "npy"))
        self.labels = np.array([item.label for item in self.items], dtype=np.int64)

    def _load(self, number: int) -> list[np.ndarray]:
        content = io.BytesIO(self.items[number].read())
        return [np.load(content) if self.items[number].name.endswith(".npy") else _ArrayUnpickler(content).load()]


class FastDiTFolder(LatentSource):
    """fast-DiT files: `<name>_features/<i>.npy`, float32 [B, 4, h, w] times 0.18215, and `<name>_labels/<i>.npy`, int64 [B]."""

    kind, scale = "sample", SD_SCALE
    patterns = ("*_features",)

    def _open(self) -> None:
        folders = [self.path] if self.path.match("*_features") else list(self.path.glob("*_features"))
        if len(folders) != 1:
            raise UserError(f"{self.path} holds {len(folders)} folders <name>_features; give the path of one of them")
        features = folders[0]
        labels = features.with_name(f"{features.name.removesuffix('_features')}_labels")
        names = {file.name for folder in (features, labels) for file in folder.glob("*.npy")}
        names = sorted(names, key=lambda name: int(Path(name).stem))  # in numeric order, 2 comes before 10
        parts = [(features / name, np.load(labels / name)) for name in names]
        self.items = [(file, row) for file, values in parts for row in range(len(values))]
        self.labels = np.concatenate([values for _, values in parts]).astype(np.int64, casting="safe")

    def _load(self, number: int) -> list[np.ndarray]:
        file, row = self.items[number]
        return [np.load(file, mmap_mode="r")[row]]


class REPAFolder(LatentSource):
    """The folder `vae-sd/` of REPA and EDM2, its parent folder, or a .zip of either.

    dataset.json has "labels": [[name, label], ...]. Each .npy file holds mean and standard deviation, float32
    [8, h, w]. `read` returns mean and log-variance.
    """

    kind, scale = "moments", 1.0
    patterns = ("dataset.json", "vae-sd/dataset.json", "*.zip")

    def _open(self) -> None:
        root = zipfile.Path(self.path) if self.path.is_file() else self.path
        self.root = root if (root / "dataset.json").exists() else root / "vae-sd"
        self.items, self.labels = read_dataset_json(self.root)

    def _load(self, number: int) -> list[np.ndarray]:
        mean, std = np.split(np.load(io.BytesIO((self.root / self.items[number]).read_bytes())), 2)
        if (std < 0).any():
            raise ValueError("there are negative standard deviations")
        return [np.concatenate([mean, 2 * np.log(np.maximum(std, math.exp(-15)))])]  # log-variances are clamped at -30

    def find_images(self, resolution: int) -> Callable[[int], bytes]:
        """Read `images/` next to `vae-sd/`, which has its own dataset.json. As in REPA, both lists are sorted and then paired."""
        folder = Path(str(self.root)).parent / "images"
        with reading(folder):
            names, labels = read_dataset_json(folder)
        latent_order, image_order = np.argsort(self.items), np.argsort(names)
        if not np.array_equal(self.labels[latent_order], labels[image_order]):
            raise UserError(f"{folder} and {self.root} do not hold the same items: their labels differ")
        image_of = dict(zip(latent_order.tolist(), image_order.tolist()))

        def read_image(number: int) -> bytes:
            with reading(file := folder / names[image_of[number]]):
                image, _ = read_rgb(file)
                if image.size != (resolution, resolution):
                    raise ValueError(f"{image.width}x{image.height} pixels instead of {resolution}x{resolution}")
                return to_jpeg(np.asarray(image))

        return read_image


class LightningDiTFolder(LatentSource):
    """Unscaled samples of LightningDiT, a folder or a .safetensors file: `latents` [M, C, h, w], `latents_flip`, `labels` [M].

    LightningDiT normalises each channel by `mean` and `std` [1, C, 1, 1] of latents_stats.pt in the same folder.
    """

    kind, scale = "sample", 1.0
    patterns = ("[!.]*.safetensors",)

    def _open(self) -> None:
        self.items, labels = [], []
        for file in [self.path] if self.path.is_file() else shard_files(self.path):
            with reading(file), safe_open(file, framework="pt") as f:
                if "about" in (f.metadata() or {}):
                    raise UserError(f"{file} is a native shard, which training reads as it is")
                labels.append(f.get_tensor("labels").numpy())
                self.has_flips |= "latents_flip" in f.keys()  # noqa: SIM118 (not a dict)
            self.items += [(file, row) for row in range(len(labels[-1]))]
        self.labels = np.concatenate(labels).astype(np.int64, casting="safe")
        statistics = self.items[0][0].with_name("latents_stats.pt")
        self.note = f"{statistics}, with which LightningDiT normalises, is missing; normalize=true measures the statistics"
        if statistics.exists():
            self.channel_statistics = read_channel_statistics(statistics, len(self._load(0)[0]))
            self.note = f"latents_mean and latents_std come from {statistics.name}"

    def _load(self, number: int) -> list[np.ndarray]:
        file, row = self.items[number]
        with safe_open(file, framework="pt") as f:
            return [f.get_slice(name)[row].float().numpy() for name in ("latents", "latents_flip")[: 1 + self.has_flips]]


FORMATS = (MaskDiTLMDB, Tars, FastDiTFolder, REPAFolder, LightningDiTFolder)


def open_latents(path: str | Path) -> LatentSource:
    """Open latents of another project. The file names determine the format.

    Raises UserError if no format or several formats fit, or if a file is missing, damaged or in another format.
    """
    path = Path(path)
    fitting = [f for f in FORMATS if any(path.match(pattern) or any(path.glob(pattern)) for pattern in f.patterns)]
    if len(fitting) != 1:
        names = " and ".join(f.__name__ for f in fitting) or f"none of {', '.join(f.__name__ for f in FORMATS)}"
        raise UserError(f"path={path} looks like {names}; give the file or folder of one format, as docs/data.md names them")
    return fitting[0](path)
