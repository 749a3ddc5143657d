"""Latents as other projects store them, read in order for conversion to native shards.

| format | made by | holds |
|---|---|---|
| `maskdit_lmdb` | MaskDiT, extract_latent.py | `z-<i>` float32 moments, `y-<i>`, `length`; perhaps mirrored copies at the end |
| `webdataset` | MaskDiT's lmdb2wds.py, for the official TREAD trainer | tars of `<key>.latent` (a pickled array) or `.npy`, and `<key>.cls` |
| `fast_dit` | fast-DiT, extract_features.py | `<name>_features/<i>.npy`, samples x 0.18215, and `<name>_labels/<i>.npy` |
| `repa` | REPA and EDM2, dataset_tools.py encode | dataset.json, .npy files of mean and standard deviation; or a .zip of these |
| `lightningdit` | LightningDiT, extract_features.py | safetensors with `latents`, `latents_flip`, `labels`; latents_stats.pt |
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from common.errors import UserError, first_line
from common.files import hash_bytes
from evaluations.images import read_rgb
from latents.arrays import read_channel_statistics
from latents.autoencoders import SD_SCALE, SD_VAE, known_scale_and_factor
from latents.prepare.images import count_classes, read_dataset_json, to_jpeg
from latents.shards import ShardInfo, shard_files, spread_items
from latents.tars import index_tars


@contextlib.contextmanager
def _reading(path: object) -> Iterator[None]:
    """Whatever a file of others makes a parser raise becomes one line that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        raise UserError(f"{path} cannot be read: {type(e).__name__}: {first_line(e)}") from e


class LatentSource:
    """Latents of another project, opened by `open_latents`; a subclass for each format.

    A subclass gives `_open()`, which sets labels and shape, and `_read(start, stop)`: [latents] or [latents, flips], arrays of
    these items. Both may raise anything.
    """

    name: str  # of the format
    signs: tuple[str, ...]  # patterns of names: what such a folder is called or holds
    labels: np.ndarray  # [N] int64
    shape: tuple[int, ...]  # (C, h, w) of an item as `read` gives it; 2C channels where items are moments
    has_flips = False  # `read` also gives latents of the mirrored images
    kind: str | None = None  # moments | sample, where the format says so
    scale: float | None = None  # what the stored values were multiplied by, where the format says so
    channel_statistics: tuple[list[float], list[float]] | None = None  # mean and deviation of each stored channel, if known
    statements: tuple[str, ...] = ()  # what was found on opening, for the log

    def __init__(self, path: Path):
        self.path = path
        with _reading(path):
            self._open()

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Items start .. stop - 1 as stored, float32 [b, *shape], and their mirror images where has_flips.

        Raises:
            UserError: an item that is missing or damaged, has another shape, or is not finite.
        """
        items = f"{self.path}: items {start} to {stop - 1}"
        with _reading(items):
            latents = [np.asarray(part, dtype=np.float32) for part in self._read(start, stop)]
        for part in latents:
            # A sum is finite only if all values are, and cheap; float64 cannot overflow.
            if part.shape != (stop - start, *self.shape) or not np.isfinite(part.sum(dtype=np.float64)):
                raise UserError(f"{items} are {list(part.shape)} or hold NaN; need finite numbers, {list(self.shape)} each")
        return torch.from_numpy(latents[0]), torch.from_numpy(latents[1]) if self.has_flips else None

    def find_images(self, resolution: int) -> Callable[[int], bytes]:
        """What gives the image of an item, of `resolution` pixels, as a JPEG file. Raises UserError without images."""
        raise UserError(f"keep_images=jpeg needs the images beside the latents, as REPA keeps them, and {self.name} has none")

    def fingerprint(self) -> str:
        """A hash of the labels and of items spread over the data: cheap, and another one for other data."""
        spread = [self.read(i, i + 1)[0].numpy().tobytes() for i in spread_items(len(self.labels), 256).tolist()]
        return hash_bytes(b"".join([f"{self.name} {self.shape} {self.has_flips}".encode(), self.labels.tobytes(), *spread]))


class MaskDiTLMDB(LatentSource):
    """MaskDiT's LMDB, the folder of data.mdb or a single file: moments [8, h, w] `z-<i>`, labels `y-<i>`, their number `length`.

    With --xflip MaskDiT stores the mirrored images after all others, and nothing marks them. If the labels of the halves
    agree and latents of the second half correlate with mirrored ones of the first, the second half becomes the flips.

    LMDB maps its file into memory: where a copy lacks pages at its end, reading them ends the process (SIGBUS). Copy it again.
    """

    name, kind, scale = "MaskDiT LMDB", "moments", 1.0
    signs = ("*.mdb",)

    def _open(self) -> None:
        with self._transaction() as txn:
            length = int(txn.get(b"length"))
            labels = np.array([int(txn.get(f"y-{i}".encode())) for i in range(length)], dtype=np.int64)
            size = math.isqrt(len(txn.get(b"z-0")) // (4 * 8))
        self.shape, self.labels, half = (8, size, size), labels, length // 2
        if length % 2 or not np.array_equal(labels[:half], labels[half:]):
            return
        correlations = []
        for i in spread_items(half, 32).tolist():
            first, second = self._items([i, half + i])[:, :4]
            with np.errstate(invalid="ignore", divide="ignore"):  # constant latents correlate with nothing
                correlations.append(np.corrcoef(first[..., ::-1].ravel(), second.ravel())[0, 1])
        correlation = float(np.median(np.nan_to_num(correlations)))
        self.has_flips = correlation > 0.5
        self.labels = labels[:half] if self.has_flips else labels
        taken = "they become latents_flip" if self.has_flips else "warning: they stay items of their own"
        self.statements = (
            f"the second {half} items have the labels of the first, as --xflip stores mirrored images, and correlate by "
            f"{correlation:.2f} with mirrored ones: {taken}",
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator:
        import lmdb  # this format alone needs it

        # No lock: nothing is written to a folder that may be read-only, and nobody writes while this reads.
        # Opened for every read, which takes microseconds: LMDB allows a process one handle, and none across a fork.
        how = {"readonly": True, "lock": False, "readahead": False, "create": False}
        with lmdb.open(str(self.path), subdir=self.path.is_dir(), **how) as env, env.begin() as txn:
            yield txn

    def _items(self, numbers: Iterable[int]) -> np.ndarray:
        with self._transaction() as txn:
            return np.stack([np.frombuffer(txn.get(f"z-{i}".encode()), dtype="<f4").reshape(self.shape) for i in numbers])

    def _read(self, start: int, stop: int) -> list[np.ndarray]:
        firsts = (0, len(self.labels))[: 1 + self.has_flips]
        return [self._items(range(first + start, first + stop)) for first in firsts]


class _ArrayUnpickler(pickle.Unpickler):
    """Reads a pickled NumPy array. It names these functions, of old and new NumPy; whatever else a pickle names is refused."""

    ADMITTED = ("_reconstruct", "ndarray", "dtype", "_frombuffer")

    def find_class(self, module: str, name: str):
        if (module, name) != ("_codecs", "encode") and not (module.split(".")[0] == "numpy" and name in self.ADMITTED):
            raise pickle.UnpicklingError(f"it names {module}.{name}, and only NumPy arrays are admitted")
        return super().find_class(module, name)


class Tars(LatentSource):
    """A folder of uncompressed WebDataset tars, or one: `<key>.latent` (a pickled array), `.latent.npy` or `.npy`, and `<key>.cls`."""

    name, signs = "WebDataset tars", ("[!.]*.tar",)

    def _open(self) -> None:
        self.items = index_tars(self.path, ("latent", "latent.npy", "npy"))
        self.labels = np.array([item.label for item in self.items], dtype=np.int64)
        self.shape = self._load(0).shape

    def _load(self, item: int) -> np.ndarray:
        member = self.items[item]
        with _reading(f"{member.file}: {member.name}"):
            content = io.BytesIO(member.read())
            return np.load(content) if member.name.endswith(".npy") else _ArrayUnpickler(content).load()

    def _read(self, start: int, stop: int) -> list[np.ndarray]:
        return [np.stack([self._load(item) for item in range(start, stop)])]


class FilesOfItems(LatentSource):
    """A format that keeps several items in a file. A subclass gives `_read_rows(file, rows)`, as `_read`."""

    def _set_files(self, files: list[Path], labels: list[np.ndarray]) -> None:
        """`labels`: [B] of each file."""
        self.files, self.labels = files, np.concatenate(labels).astype(np.int64, casting="safe")
        self._first_item = np.cumsum([0] + [len(values) for values in labels])
        self.shape = self._read_rows(files[0], slice(0, 1))[0].shape[1:]

    def _read(self, start: int, stop: int) -> list[np.ndarray]:
        first, last = np.searchsorted(self._first_item, start, "right") - 1, np.searchsorted(self._first_item, stop, "left")
        parts = []
        for number in range(first, last):
            begin, end = self._first_item[number : number + 2].tolist()
            with _reading(self.files[number]):
                parts.append(self._read_rows(self.files[number], slice(max(start - begin, 0), min(stop, end) - begin)))
        return [np.concatenate(part) for part in zip(*parts)]


class FastDiTFolder(FilesOfItems):
    """fast-DiT's `<name>_features/<i>.npy`, float32 [B, 4, h, w] times 0.18215, and `<name>_labels/<i>.npy`, int64 [B]."""

    name, kind, scale = "fast-DiT features", "sample", SD_SCALE
    signs = ("*_features",)

    def _open(self) -> None:
        found = [self.path] if self.path.match("*_features") else list(self.path.glob("*_features"))
        if len(found) != 1:
            raise UserError(f"{self.path} holds {len(found)} folders <name>_features; give the path of one of them")
        labels = found[0].with_name(f"{found[0].name.removesuffix('_features')}_labels")
        files, of_labels = ({int(file.stem): file for file in folder.glob("*.npy")} for folder in (found[0], labels))
        if unpaired := sorted(files.keys() ^ of_labels.keys()):
            raise UserError(f"{unpaired[0]}.npy is not in both of {found[0]} and {labels}")
        numbers = sorted(files)  # 2 comes before 10
        self._set_files([files[i] for i in numbers], [np.load(of_labels[i]) for i in numbers])

    def _read_rows(self, file: Path, rows: slice) -> list[np.ndarray]:
        return [np.load(file, mmap_mode="r")[rows]]


class REPAFolder(LatentSource):
    """REPA's and EDM2's `vae-sd/`: dataset.json with "labels": [[name, label], ...], and .npy files float32 [8, h, w].

    That folder, the one that holds `vae-sd/`, or a .zip of either. The files hold mean and standard deviation; `read` gives
    mean and log-variance.
    """

    name, kind, scale = "REPA / EDM2 mean and std", "moments", 1.0
    signs = ("dataset.json", "vae-sd/dataset.json", "*.zip")

    def _open(self) -> None:
        root = zipfile.Path(self.path) if self.path.is_file() else self.path  # read alike
        self.root = root if (root / "dataset.json").exists() else root / "vae-sd"
        self.names, self.labels = read_dataset_json(self.root)
        self.shape = self._load(0).shape

    def _load(self, item: int) -> np.ndarray:
        with _reading(f"{self.root}/{self.names[item]}"):
            return np.load(io.BytesIO((self.root / self.names[item]).read_bytes()))

    def _read(self, start: int, stop: int) -> list[np.ndarray]:
        mean, std = np.split(np.stack([self._load(item) for item in range(start, stop)]), 2, axis=1)
        if (std < 0).any():
            raise UserError(f"{self.root}: items {start} to {stop - 1} hold negative standard deviations")
        # The autoencoder clamps log-variances at -30.
        return [np.concatenate([mean, 2 * np.log(np.maximum(std, math.exp(-15)))], axis=1)]

    def find_images(self, resolution: int) -> Callable[[int], bytes]:
        """From `images/` beside `vae-sd/`, with a dataset.json of its own. As in REPA, files belong together by their order."""
        folder = Path(str(self.root)).parent / "images"
        with _reading(folder):
            names, labels = read_dataset_json(folder)
        order, of_images = np.argsort(self.names), np.argsort(names)
        if not np.array_equal(self.labels[order], labels[of_images]):
            raise UserError(f"{folder} and {self.root} do not hold the same items: their labels differ")
        image_of = dict(zip(order.tolist(), of_images.tolist()))

        def read_image(item: int) -> bytes:
            with _reading(file := folder / names[image_of[item]]):
                image = read_rgb(file)
            if image.size != (resolution, resolution):
                raise UserError(f"{file} has {image.width}x{image.height} pixels instead of {resolution}x{resolution}")
            return to_jpeg(np.asarray(image))

        return read_image


class LightningDiTFolder(FilesOfItems):
    """LightningDiT's safetensors, a folder or one: `latents` [M, C, h, w], `latents_flip`, `labels` [M]; unscaled samples.

    latents_stats.pt beside them holds `mean` and `std` [1, C, 1, 1] of each channel, by which LightningDiT normalises.
    """

    name, kind, scale = "LightningDiT safetensors", "sample", 1.0
    signs = ("[!.]*.safetensors",)

    def _open(self) -> None:
        files, labels, names = [self.path] if self.path.is_file() else shard_files(self.path), [], set()
        for file in files:
            with _reading(file), safe_open(file, framework="pt") as f:
                if "kind" in (f.metadata() or {}):
                    raise UserError(f"{file} is a native shard, which training reads as it is")
                labels.append(f.get_tensor("labels").numpy())
                names.add("latents_flip" in f.keys())  # noqa: SIM118 (not a dict)
        if len(names) != 1:
            raise UserError(f"{self.path}: some of the files hold latents_flip, and others do not")
        self.has_flips = names.pop()
        self._set_files(files, labels)
        statistics = files[0].with_name("latents_stats.pt")
        if statistics.exists():
            self.channel_statistics = read_channel_statistics(statistics, self.shape[0])
            self.statements = (f"latents_mean and latents_std: those of {statistics.name}, by which the network's input is normalised",)
        else:
            self.statements = (f"warning: {statistics} is not there, by which LightningDiT normalises; normalize=true measures it",)

    def _read_rows(self, file: Path, rows: slice) -> list[np.ndarray]:
        with safe_open(file, framework="pt") as f:
            return [f.get_slice(name)[rows].float().numpy() for name in ("latents", "latents_flip")[: 1 + self.has_flips]]


FORMATS = {
    "maskdit_lmdb": MaskDiTLMDB,
    "webdataset": Tars,
    "fast_dit": FastDiTFolder,
    "repa": REPAFolder,
    "lightningdit": LightningDiTFolder,
}


def open_latents(path: str | Path, format: str = "auto") -> LatentSource:
    """Open latents of another project.

    Args:
        path: as the class of the format says.
        format: one of FORMATS, or `auto`: the one whose signs the path shows.

    Raises:
        UserError: no format or several fit; files that are missing, damaged or of another format. The message names the file.
    """
    path = Path(path)
    if format == "auto":
        fitting = [
            name for name, of in FORMATS.items() if any(path.match(sign) or any(path.glob(sign)) for sign in of.signs)
        ]
        if len(fitting) != 1:
            known = ", ".join(f"{name} ({' or '.join(of.signs)})" for name, of in FORMATS.items())
            raise UserError(f"path={path} holds {' and '.join(fitting) or 'none'} of the known formats; format= takes {known}")
        format = fitting[0]
    return FORMATS[format](path)


def describe_latents(
    source: LatentSource,
    kind: str | None,
    scale: float | None,
    scale_factor: float | None,
    autoencoder: str | None,
    resolution: int | None,
    num_classes: int | None,
    normalize: bool | None,
) -> tuple[ShardInfo, float]:
    """The header of the shards to make, and what the stored values were multiplied by: as given, or as the format says.

    Args:
        normalize: None: by the statistics that come with the format, where there are any.

    Raises:
        UserError: neither says it (the message names the key), or what they say does not fit the latents.
    """

    def need(value, key: str, why: str):
        if value is None:
            raise UserError(f"{key}= is missing: {why}")
        return value

    kind = need(kind or source.kind, "kind", f"{source.name} hold samples or moments (mean and log-variance), and do not say which")
    channels, height, width = source.shape
    scale = scale or source.scale or (1.0 if kind == "moments" else None)
    scale = need(scale, "scale", f"what samples in {source.name} were multiplied by: 1, or {SD_SCALE} for scaled SD-VAE latents")
    if height != width or (kind == "moments" and (scale != 1 or channels % 2)):
        raise UserError(f"{source.path}: latents {list(source.shape)}, kind={kind}, scale={scale:g}: need square ones, and of moments "
                        "mean and log-variance for each channel, unscaled")
    channels //= 2 if kind == "moments" else 1
    autoencoder = autoencoder or (SD_VAE if channels == 4 else None)
    why = f"kind={kind} makes {channels} channels, and SD-VAE has 4; give va-vae:<file>, sd-vae:<folder> or none"
    factor, pixels = known_scale_and_factor(need(autoencoder, "autoencoder", why)) or (None, None)
    statistics = source.channel_statistics if normalize is None else None
    scale_factor = scale_factor or (1.0 if statistics or normalize else factor)
    info = ShardInfo(
        kind,
        need(scale_factor, "scale_factor", f"the network sees latents x scale_factor, and that of {autoencoder} is not known"),
        autoencoder,
        need(resolution or (pixels and pixels * height), "resolution", f"pixels of the images; {autoencoder} does not say"),
        count_classes(source.labels, num_classes),
        *(tuple(value / scale for value in values) for values in statistics or ()),
    )
    return info, scale
