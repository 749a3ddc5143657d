"""Read the latent formats of other projects. Each format has a class, from which `convert` reads the items in order."""

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

from common.errors import UserError, as_user_error
from common.files import hash_bytes, regular_file
from common.images import read_rgb
from latents.autoencoders import SD_SCALE
from latents.dataset import evenly_spaced_items
from latents.prepare.image_reader import to_jpeg
from latents.prepare.labelled_images import read_dataset_json
from latents.shards import LATENT_TENSORS, shard_files
from latents.tars import check_single_split, index_tars
from latents.torch_files import read_channel_statistics


class LatentSource:
    """Base class for latents of another project. `open_latents` selects the subclass.

    Subclasses implement `_open` and `_load`, which may raise any exception.
    """

    patterns: tuple[str, ...]  # patterns of the path itself, or of files in it, that identify the format
    file_patterns: tuple[str, ...] = ()  # patterns of a file with all items, which may also lie in folders of other formats
    labels: np.ndarray  # class labels [N] in int64
    items: Sequence  # name or position of each of the N items, which error messages show
    shape: tuple[int, ...]  # shape of an item: (C, h, w), or (2C, h, w) for moments
    has_flips = False  # whether `read` also returns the latents of the mirrored images
    kind: str | None = None  # `moments`, `sample`, or None if the format allows both
    scale: float | None = None  # factor that scaled the stored values, or None if the format allows any factor
    channel_statistics: tuple[list[float], list[float]] | None = None  # mean and std of each channel, if known
    log_message = ""  # message from `_open` for the log

    def __init__(self, path: Path):
        self.path = path
        with as_user_error(path):
            self._open()
            if not len(self.labels):
                raise ValueError("there are no items")
            self.shape = self._load(0)[0].shape

    def _open(self) -> None:
        """Open the files, and set `labels` and `items`."""
        raise NotImplementedError

    def _load(self, index: int) -> list[np.ndarray]:
        """Return an item's array and, if `has_flips` is True, the array of the mirrored image."""
        raise NotImplementedError

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """Read items start .. stop - 1 without rescaling: float32 `latents` [b, *shape] and, if has_flips, `latents_flip`."""
        latents = np.empty((1 + self.has_flips, stop - start, *self.shape), dtype=np.float32)
        for index in range(start, stop):
            with as_user_error(name := f"{self.path}: item {index} ({self.items[index]})"):
                arrays = [np.asarray(array, dtype=np.float32) for array in self._load(index)]
            if any(array.shape != self.shape or not np.isfinite(array).all() for array in arrays):
                raise UserError(f"{name} is {list(arrays[0].shape)} or not finite; need finite numbers {list(self.shape)}")
            latents[:, index - start] = arrays
        return dict(zip(LATENT_TENSORS, torch.from_numpy(latents)))

    def open_jpegs(self, resolution: int) -> Callable[[int], bytes]:
        """Return a function that returns an item's JPEG file of `resolution` pixels."""
        raise UserError(f"keep_images=jpeg needs REPA's folder images/ next to vae-sd/; {self.path} has none")

    def hash(self) -> str:
        """Hash the labels and 256 evenly spaced items, because reading all items would take as long as the conversion."""
        items = evenly_spaced_items(len(self.labels), 256).tolist()
        spread = [self.read(item, item + 1)["latents"].numpy().tobytes() for item in items]
        return hash_bytes(b"".join([f"{self.shape} {self.has_flips}".encode(), self.labels.tobytes(), *spread]))


class MaskDiTLMDB(LatentSource):
    """MaskDiT's LMDB (a folder with data.mdb or a single file) with moments `z-<i>` [8, h, w], labels `y-<i>` and `length`, N.

    With --xflip, MaskDiT appends mirrored images as separate items. `convert` also stores the mirrored images as separate items.

    LMDB maps its file into memory, so reading a truncated file kills the process (SIGBUS). Copy a truncated file again.
    """

    kind, scale = "moments", 1.0
    patterns = ("[!.]*.mdb",)

    def _open(self) -> None:
        import lmdb  # only this format requires lmdb

        regular_file(self.path / "data.mdb" if self.path.is_dir() else self.path)
        # Disable the lock, so that LMDB writes nothing and can open read-only folders.
        options = {"subdir": self.path.is_dir(), "readonly": True, "lock": False, "readahead": False, "create": False}
        self.transaction = lmdb.open(str(self.path), **options).begin()
        self.items = range(int(self.transaction.get(b"length")))
        self.labels = np.array([int(self.transaction.get(f"y-{i}".encode())) for i in self.items], dtype=np.int64)

    def _load(self, index: int) -> list[np.ndarray]:
        value = self.transaction.get(f"z-{index}".encode())
        return [np.frombuffer(value, dtype="<f4").reshape(8, size := math.isqrt(len(value) // 32), size)]


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickle a NumPy array. Accept only names in pickles of old and new NumPy versions, because other pickles can run code."""

    ADMITTED = ("_reconstruct", "ndarray", "dtype", "_frombuffer")

    def find_class(self, module: str, name: str):
        if (module, name) != ("_codecs", "encode") and not (module.split(".")[0] == "numpy" and name in self.ADMITTED):
            raise ValueError(f"it refers to {module}.{name}, but only NumPy arrays are accepted")
        return super().find_class(module, name)


class Tars(LatentSource):
    """One or more uncompressed WebDataset tars with `<key>.latent` (a pickled array), `.latent.npy` or `.npy`, and `<key>.cls`.

    MaskDiT's lmdb2wds.py creates such tars for the official TREAD trainer.
    """

    patterns = ("[!.]*.tar",)

    def _open(self) -> None:
        check_single_split(self.path, "or rename the tars to use them together")
        self.items = index_tars(self.path, ("latent", "latent.npy", "npy"))
        self.labels = np.array([item.label for item in self.items], dtype=np.int64)

    def _load(self, index: int) -> list[np.ndarray]:
        content = io.BytesIO(self.items[index].read())
        return [np.load(content) if self.items[index].name.endswith(".npy") else _ArrayUnpickler(content).load()]


class FastDiTFolder(LatentSource):
    """fast-DiT's latents `<name>_features/<i>.npy`, float32 [B, 4, h, w], and labels `<name>_labels/<i>.npy`, int64 [B]."""

    kind, scale = "sample", SD_SCALE  # fast-DiT has multiplied the latents by 0.18215
    patterns = ("*_features",)

    def _open(self) -> None:
        folders = [self.path] if self.path.match("*_features") else list(self.path.glob("*_features"))
        if len(folders) != 1:
            raise UserError(f"{self.path} holds {len(folders)} folders <name>_features; give the path of one of them")
        features = folders[0]
        labels = features.with_name(f"{features.name.removesuffix('_features')}_labels")
        names = {file.name for folder in (features, labels) for file in folder.glob("*.npy")}
        names = sorted(names, key=lambda name: int(Path(name).stem))  # sort numerically, so that 2 comes before 10
        parts = [(features / name, np.load(regular_file(labels / name))) for name in names]
        self.items = [(file, row) for file, values in parts for row in range(len(values))]
        self.labels = np.concatenate([values for _, values in parts]).astype(np.int64, casting="safe")

    def _load(self, index: int) -> list[np.ndarray]:
        file, row = self.items[index]
        return [np.load(regular_file(file), mmap_mode="r")[row]]


class REPAFolder(LatentSource):
    """Folder `vae-sd/` of REPA and EDM2, its parent folder, or a .zip file of one of these folders.

    dataset.json contains "labels": [[name, label], ...]. Each .npy file contains a mean and a standard deviation, float32
    [8, h, w]. `read` converts the standard deviation to a log-variance.
    """

    kind, scale = "moments", 1.0
    patterns, file_patterns = ("dataset.json", "vae-sd/dataset.json"), ("*.zip",)

    def _open(self) -> None:
        root = zipfile.Path(self.path) if self.path.is_file() else self.path
        self.root = root if (root / "dataset.json").exists() else root / "vae-sd"
        self.items, self.labels = read_dataset_json(self.root)

    def _load(self, index: int) -> list[np.ndarray]:
        file = self.root / self.items[index]
        content = (regular_file(file) if isinstance(file, Path) else file).read_bytes()
        mean, std = np.split(np.load(io.BytesIO(content)), 2)
        if (std < 0).any():
            raise ValueError("there are negative standard deviations")
        return [np.concatenate([mean, 2 * np.log(np.maximum(std, math.exp(-15)))])]  # clamp log-variances at -30

    def open_jpegs(self, resolution: int) -> Callable[[int], bytes]:
        """Read images from `images/` next to `vae-sd/`. Like REPA, sort the names in both dataset.json files and pair them."""
        folder = Path(str(self.root)).parent / "images"
        with as_user_error(folder):
            names, labels = read_dataset_json(folder)
        latent_order, image_order = np.argsort(self.items), np.argsort(names)
        if not np.array_equal(self.labels[latent_order], labels[image_order]):
            raise UserError(f"{folder} and {self.root} do not hold the same items: their labels differ")
        image_of = dict(zip(latent_order.tolist(), image_order.tolist()))

        def read_image(index: int) -> bytes:
            with as_user_error(file := folder / names[image_of[index]]):
                image, _ = read_rgb(file)
                if image.size != (resolution, resolution):
                    raise ValueError(f"{image.width}x{image.height} pixels instead of {resolution}x{resolution}")
                return to_jpeg(np.asarray(image))

        return read_image


class LightningDiTFolder(LatentSource):
    """One or more LightningDiT .safetensors files with unscaled `latents` [M, C, h, w], `labels` [M] and optional `latents_flip`.

    LightningDiT normalises each channel with `mean` and `std` [1, C, 1, 1] from latents_stats.pt in the same folder.
    """

    kind, scale = "sample", 1.0
    patterns = ("[!.]*.safetensors",)

    def _open(self) -> None:
        self.items = []
        labels: list[np.ndarray] = []
        for file in shard_files(self.path):
            with as_user_error(file), safe_open(regular_file(file), framework="pt") as f:
                if "about" in (f.metadata() or {}):
                    raise UserError(f"{file} is a native shard, which training reads as it is")
                labels.append(f.get_tensor("labels").numpy())
                self.has_flips |= "latents_flip" in f.keys()  # noqa: SIM118 (not a dict)
            self.items += [(file, row) for row in range(len(labels[-1]))]
        self.labels = np.concatenate(labels).astype(np.int64, casting="safe")
        statistics = self.items[0][0].with_name("latents_stats.pt")
        self.log_message = f"{statistics}, with which LightningDiT normalises, is missing; normalize=true measures the statistics"
        if statistics.exists():
            self.channel_statistics = read_channel_statistics(statistics, len(self._load(0)[0]))
            self.log_message = f"latents_mean and latents_std come from {statistics.name}"

    def _load(self, index: int) -> list[np.ndarray]:
        file, row = self.items[index]
        with safe_open(file, framework="pt") as f:
            return [f.get_slice(name)[row].float().numpy() for name in LATENT_TENSORS[: 1 + self.has_flips]]


FORMATS = (MaskDiTLMDB, Tars, FastDiTFolder, REPAFolder, LightningDiTFolder)


def open_latents(path: str | Path) -> LatentSource:
    """Open latents of another project. The file names determine the format."""
    path = Path(path)

    def fits(candidate: type[LatentSource]) -> bool:
        matches = map(path.match, (*candidate.patterns, *candidate.file_patterns))
        return any(matches) or any(any(path.glob(pattern)) for pattern in candidate.patterns)

    fitting = [candidate for candidate in FORMATS if fits(candidate)]
    if len(fitting) != 1:
        names = " and ".join(kind.__name__ for kind in fitting) or f"none of {', '.join(kind.__name__ for kind in FORMATS)}"
        raise UserError(f"path={path} looks like {names}; give the file or folder of one format, as docs/data.md names them")
    return fitting[0](path)
