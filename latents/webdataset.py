"""WebDataset tars of latents, as the official TREAD trainer reads them: indexed once by offset, then read like native shards.

A sample is two members of an uncompressed tar: `<key>.latent` (a pickled array) or `<key>.latent.npy`, float16 or float32
[C, h, w], and `<key>.cls` or `<key>.cls.txt`, the label as decimal text. Other members are ignored. The index knows where the
values of every sample lie in its tar, so that any item is one read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import tarfile
from pathlib import Path

import numpy as np
import torch
from filelock import lock_descriptor
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor
from tqdm import tqdm

from common.errors import UserError
from common.files import write_file
from common.progress import progress_bar
from latents.arrays import check_float, locate_in_pickle, locate_npy, unpickle_array
from latents.contents import find_formats, way_on
from latents.detection import detect
from latents.reader import FileReader
from latents.shards import spread_items
from latents.tars import Member, find_tars, read_samples

log = logging.getLogger(__name__)

LATENT_EXTENSIONS = ("latent", "latent.npy")
INDEX_FORMAT = "1"  # goes up with every change of what an index file holds
INDEX_ARRAYS = ("labels", "tar_of", "offsets", "pickle_bytes")


# ----------------------------------------------------------------------------------------------------------------------
# The index.


class TarIndex:
    """Where in which tar the values of every sample lie, and its label; `open` makes one.

    Attributes:
        dtype, shape: of every array, [C, h, w].
        labels: [N] int64.
        tar_of: [N] int32, number in `files`.
        offsets: [N] int64, of the first value, in bytes.
        pickle_bytes: [N] int64, 0; or the size of a pickle at that offset, of a protocol that does not store values as bytes.
        first_pickle: names the first member that is a pickle; empty where there is none.
    """

    def __init__(self, files: list[Path], arrays: dict[str, np.ndarray], dtype: np.dtype, shape: tuple, first_pickle: str):
        self.files, self.dtype, self.shape, self.first_pickle = files, np.dtype(dtype), tuple(shape), first_pickle
        self.labels, self.tar_of, self.offsets, self.pickle_bytes = (arrays[name] for name in INDEX_ARRAYS)
        self._item_bytes = self.dtype.itemsize * math.prod(self.shape)
        self._reader = FileReader(files)

    @classmethod
    def open(cls, path: str | Path, allow_pickle: bool = False, flag: str = "allow_pickle") -> TarIndex:
        """Read the index that lies beside the tars, or scan them and leave one; of several processes, one scans.

        Args:
            path: a folder of tars, or one tar.
            allow_pickle: read pickled arrays, with ArrayUnpickler; `flag` is the key that sets it, for the message.

        Raises:
            UserError: no tars; compressed or truncated ones; a sample without a latent or a label, or with two; pickles
                that are not allowed, or of more than an array; mixed shapes. The message names the tar and the member.
        """
        path = Path(path)
        files = find_tars(path)
        # Hidden, so that it is not taken for a shard.
        index_file = path.parent / f".{path.name}.latents-index" if path.is_file() else path / ".latents-index"
        index_file = index_file.with_name(f"{index_file.name}.safetensors")
        state = json.dumps([[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files])  # what an index belongs to
        index = cls._load(index_file, files, state)
        if index is None:
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(OSError):  # no permission to write, or a file system without locks: all scan
                    lock = stack.enter_context(open(index_file.with_suffix(".lock"), "ab"))
                    lock_descriptor(lock.fileno())
                    index = cls._load(index_file, files, state)
                if index is None:
                    index = cls._scan(files, allow_pickle, flag)
                    index._save(index_file, state)
        if index.first_pickle and not allow_pickle:
            raise UserError(_pickle_refused(str(files[0].parent / index.first_pickle), flag))
        return index

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, items: np.ndarray) -> np.ndarray:
        """[b] item numbers -> [b, C, h, w] as stored. Raises UserError where a tar was cut off, or cannot be read."""
        values = np.empty((len(items), *self.shape), dtype=self.dtype)
        rows = values.view(np.uint8).reshape(len(items), self._item_bytes)
        places = zip(rows, self.tar_of[items].tolist(), self.offsets[items].tolist(), self.pickle_bytes[items].tolist())
        for row, tar, offset, pickle_bytes in places:
            if pickle_bytes:
                payload = np.empty(pickle_bytes, dtype=np.uint8)
                self._reader.read_into(payload, tar, offset)
                row[:] = np.frombuffer(unpickle_array(str(self.files[tar]), payload.tobytes()).tobytes(), dtype=np.uint8)
            else:
                self._reader.read_into(row, tar, offset)
        return values

    def name_of(self, item: int) -> str:
        """The tar and the member that an item comes from, for messages: looked up in the tar, which takes a while."""
        file, offset = self.files[self.tar_of[item]], self.offsets[item]
        with tarfile.open(file, "r:") as tar:
            name = next((m.name for m in tar if m.offset_data <= offset < m.offset_data + m.size), f"offset {offset}")
        return f"{file}: {name}"

    @classmethod
    def _scan(cls, files: list[Path], allow_pickle: bool, flag: str) -> TarIndex:
        locator, parts, extensions = _ValueLocator(allow_pickle, flag), [], set()
        sizes = [file.stat().st_size for file in files]
        with progress_bar(total=sum(sizes), desc="indexing tars", unit="B", unit_scale=True, delay=1, leave=False) as bar:
            for file in files:
                parts.append(_scan_tar(file, locator, extensions, bar))
        labels, offsets, pickle_bytes = np.concatenate(parts).T.copy()
        if len(labels) == 0:
            held = ", ".join(f".{e}" for e in sorted(extensions)[:8]) or "nothing"
            raise UserError(
                f"{files[0].parent}: the tars hold no latents: need members <key>.latent or <key>.latent.npy, and <key>.cls; "
                f"these hold {held}"
            )
        tar_of = np.repeat(np.arange(len(files), dtype=np.int32), [len(part) for part in parts])
        # Without the folder, which may be moved with the index in it.
        first_pickle = locator.first_pickle.removeprefix(f"{files[0].parent}{os.sep}")
        arrays = dict(zip(INDEX_ARRAYS, (labels, tar_of, offsets, pickle_bytes)))
        return cls(files, arrays, locator.dtype, locator.shape, first_pickle)

    @classmethod
    def _load(cls, index_file: Path, files: list[Path], state: str) -> TarIndex | None:
        """None where there is no index, a damaged one, or that of other tars."""
        try:
            with safe_open(index_file, framework="np") as f:
                metadata = f.metadata() or {}
                if (metadata.get("index_format"), metadata.get("tars")) != (INDEX_FORMAT, state):
                    return None
                arrays = {name: f.get_tensor(name) for name in INDEX_ARRAYS}
            return cls(files, arrays, np.dtype(metadata["dtype"]), json.loads(metadata["shape"]), metadata["first_pickle"])
        except (SafetensorError, OSError, KeyError, ValueError):
            return None

    def _save(self, index_file: Path, state: str) -> None:
        metadata = {"index_format": INDEX_FORMAT, "tars": state, "dtype": self.dtype.str}
        metadata |= {"shape": json.dumps(self.shape), "first_pickle": self.first_pickle}
        try:
            write_file(index_file, save({name: getattr(self, name) for name in INDEX_ARRAYS}, metadata=metadata))
        except UserError as e:
            log.warning("cannot keep the index of the tars in %s (%s): every start scans them anew", index_file.parent, e)


class _ValueLocator:
    """Finds the values in members. Members of one size differ in their values alone, so all but the first few are not parsed."""

    def __init__(self, allow_pickle: bool, flag: str):
        self.allow_pickle, self.flag = allow_pickle, flag
        self.dtype: np.dtype | None = None
        self.shape: tuple[int, ...] = ()
        self.first_member = self.first_pickle = ""
        self._known: dict[int, tuple[bytes, bytes, int]] = {}  # size of a member -> its head, its tail, offset of the values

    def locate(self, where: str, member: Member) -> tuple[int, int]:
        """(offset in the tar of the values, 0); of a pickle that has to be read as one (its offset, its size).

        Raises:
            UserError: as `unpickle_array`; another shape or type than the members before; a pickle that is not allowed.
        """
        size = len(member.payload)
        head, tail, offset = self._known.get(size, (b"", b"", 0))
        if offset and (member.payload[: len(head)].tobytes(), member.payload[size - len(tail) :].tobytes()) == (head, tail):
            return member.start + offset, 0
        payload = member.payload.tobytes()
        if member.extension.endswith(".npy") or payload.startswith(b"\x93NUMPY"):
            dtype, shape, offset = locate_npy(where, payload)
            check_float(where, dtype)
        else:
            self.first_pickle = self.first_pickle or where
            if not self.allow_pickle:
                raise UserError(_pickle_refused(where, self.flag))
            values = unpickle_array(where, payload)
            dtype, shape, offset = values.dtype, values.shape, locate_in_pickle(payload, values.tobytes())
        if self.dtype is None:
            self.dtype, self.shape, self.first_member = dtype, tuple(shape), where
            if len(shape) != 3 or 0 in shape:
                raise UserError(f"{where} is {dtype} {list(shape)}; need [C, h, w]")
        if (dtype, shape) != (self.dtype, self.shape):
            raise UserError(
                f"{where} is {dtype} {list(shape)}, but {self.first_member} is {self.dtype} {list(self.shape)}; "
                "keep latents of one shape and type in a folder"
            )
        if offset is None:
            return member.start, size
        self._known[size] = payload[:offset], payload[offset + dtype.itemsize * math.prod(shape) :], offset
        return member.start + offset, 0


def _pickle_refused(where: str, flag: str) -> str:
    return (
        f"{where} is a pickle, and unpickling can run code that a file names; {flag}=true reads it with an unpickler that "
        "admits NumPy arrays alone and runs no code"
    )


def _scan_tar(file: Path, locator: _ValueLocator, extensions: set[str], bar: tqdm) -> np.ndarray:
    """[n, 3] int64: label, offset, pickle_bytes of the samples of a tar, in the order of their first members."""
    begin = bar.n

    def locate(member: Member) -> tuple[int, int]:
        bar.update(begin + member.start - bar.n)
        return locator.locate(f"{file}: member {member.name}", member)

    samples = read_samples(file, LATENT_EXTENSIONS, ".latent", locate, extensions.add)
    bar.update(begin + file.stat().st_size - bar.n)
    return np.array([(label, *place) for place, label in samples.values()], dtype=np.int64).reshape(-1, 3)


# ----------------------------------------------------------------------------------------------------------------------
# The data set.


class TarLatents:
    """All tars of a folder as one array of latents, read by index: what LatentDataset is for native shards.

    Args:
        path: a folder of uncompressed tars, or one tar.
        allow_pickle: read pickled arrays, with an unpickler that admits nothing else.
        key_prefix: goes before the keys in messages (`data.` in training).
        given: kind, stored_scale, scale_factor, autoencoder, resolution, num_classes, as for `detect`.

    Attributes:
        info, labels, channels, height, width: as of LatentDataset.
        stored_scale: what the stored values were multiplied by.
        statements: what was detected, and why; for the log.

    Raises:
        UserError: as `TarIndex.open` and `detect`.
    """

    has_flips, class_names = False, None

    def __init__(self, path: str | Path, *, allow_pickle: bool = False, key_prefix: str = "", **given):
        self.path = Path(path)
        if not self.path.exists():
            raise UserError(f"{key_prefix}path={self.path} does not exist; give a folder of uncompressed tars (*.tar)")
        fitting = find_formats(self.path)[0]
        if "webdataset" not in fitting and (fitting or self.path.is_dir()):
            ways = way_on(self.path, f"{key_prefix}path", f"{key_prefix}format")
            raise UserError(f"{key_prefix}path={self.path} holds no tars (*.tar); it {ways}")
        index = TarIndex.open(self.path, allow_pickle, f"{key_prefix}allow_pickle")
        if index.pickle_bytes.any():
            item = int(np.flatnonzero(index.pickle_bytes)[0])
            raise UserError(
                f"{index.name_of(item)} is a pickle of protocol 2 or older, whose values cannot be read by offset; make native "
                f"shards of the tars and train on those: python prepare_latents.py convert path={self.path} output=<folder> "
                "allow_pickle=true"
            )
        spread = spread_items(len(index), 256)
        sample = index.read(spread)
        bad = np.flatnonzero(~np.isfinite(sample).all(axis=(1, 2, 3)))
        if len(bad):
            raise UserError(f"{index.name_of(int(spread[bad[0]]))} holds NaN or Inf; make it again, or leave it out")
        detected = detect(torch.from_numpy(sample), labels=index.labels, key_prefix=key_prefix, **given)
        self.info, self.stored_scale, self.statements = detected
        self._index, self.files, self.labels = index, index.files, index.labels
        channels, self.height, self.width = index.shape
        self.channels = channels // 2 if self.info.kind == "moments" else channels

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: np.ndarray, flips: np.ndarray) -> tuple[Tensor, Tensor]:
        """[b] item numbers, [b] bool (all False: tars hold no mirrored latents) -> latents [b, C or 2C, h, w], labels [b] int64.

        Latents are as the autoencoder makes them: the stored values divided by stored_scale.
        """
        if len(indices) != len(flips) or flips.any():
            raise ValueError(f"{len(indices)} items with {len(flips)} flips; tars hold no mirrored latents")
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"items {indices.min()} to {indices.max()} are not all in 0 .. {len(self) - 1}")
        latents = torch.from_numpy(self._index.read(indices))
        if self.stored_scale != 1:
            latents = latents.float().div_(self.stored_scale)
        return latents, torch.from_numpy(self.labels[indices])

    def fingerprint(self) -> str:
        """A hash of the header, scale, sizes, labels and 64 latents spread over the data: other data, another value."""
        digest = hashlib.blake2b(digest_size=16)
        items_per_tar = np.bincount(self._index.tar_of, minlength=len(self.files)).tolist()
        digest.update(repr((self.info, self.stored_scale, self._index.dtype.str, self._index.shape, items_per_tar)).encode())
        digest.update(self.labels.tobytes())
        digest.update(self._index.read(spread_items(len(self), 64)).tobytes())
        return digest.hexdigest()
