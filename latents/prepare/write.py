"""Writing a folder of shards: in pieces that survive an interruption, by one process or several, then its manifest.

Shard k holds the items k * shard_size .. (k + 1) * shard_size - 1 of the source, less those left out. A finished shard has a
record in .unfinished/; when all have one, the records become manifest.json and .unfinished/ goes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from errors import UserError
from latents import manifest
from latents.manifest import hash_of
from latents.shards import LatentDataset, ShardInfo, shard_bytes, shard_files, write_whole

log = logging.getLogger(__name__)

DTYPES = {"float16": torch.float16, "float32": torch.float32}


@dataclass
class ChannelStatistics:
    """Mean and standard deviation of each latent channel, in the units of the stored latents; of `moments`, of their samples.

    Attributes:
        count: values seen of each channel.
        sums, square_sums: [C] of these values.
    """

    count: int = 0
    sums: list[float] = field(default_factory=list)
    square_sums: list[float] = field(default_factory=list)

    def add(self, latents: Tensor, kind: str) -> None:
        """Take in latents [b, C or 2C, H, W]."""
        x = latents.double()
        variance = 0.0
        if kind == "moments":
            x, log_variance = x.chunk(2, dim=1)
            variance = log_variance.clamp(-30, 20).exp()
        self.merge(
            ChannelStatistics(
                x.shape[0] * x.shape[2] * x.shape[3],
                x.sum(dim=(0, 2, 3)).tolist(),
                (x.square() + variance).sum(dim=(0, 2, 3)).tolist(),
            )
        )

    def merge(self, other: ChannelStatistics) -> None:
        if other.count:
            zeros = [0.0] * len(other.sums)
            self.sums = [a + b for a, b in zip(self.sums or zeros, other.sums)]
            self.square_sums = [a + b for a, b in zip(self.square_sums or zeros, other.square_sums)]
            self.count += other.count

    @property
    def mean(self) -> list[float]:
        return [total / self.count for total in self.sums]

    @property
    def std(self) -> list[float]:
        return [max(square / self.count - mean**2, 0.0) ** 0.5 for square, mean in zip(self.square_sums, self.mean)]


@dataclass(frozen=True)
class Piece:
    """One shard to make, from the items start .. stop - 1 of the source; `source` is their hash."""

    number: int
    start: int
    stop: int
    source: str


class ShardWriter:
    """A folder of shards in the making.

    Args:
        output: the folder.
        settings: everything but the source that the latents depend on, of JSON's types: a folder is gone on with only under the
            same ones.
        source_of: (start, stop) -> a hash of these items of the source. Where it differs for a finished shard, that shard is
            made again; where it differs for all of them, the folder holds another data set.
        num_items: of the source.
        shard_size: items of the source that make one shard.
        dtype: `float16` or `float32`, in which latents are stored.

    Raises:
        UserError: the folder holds another data set, or shards that nothing is known about.
    """

    def __init__(
        self,
        output: str | Path,
        settings: dict,
        source_of: Callable[[int, int], str],
        num_items: int,
        shard_size: int,
        dtype: str = "float16",
    ):
        self.output = Path(output)
        self.dtype = DTYPES[dtype]
        self.settings = json.loads(json.dumps({**settings, "shard_size": shard_size, "dtype": dtype}))
        bounds = [(i, min(i + shard_size, num_items)) for i in range(0, num_items, shard_size)]
        self.pieces = [Piece(k, start, stop, source_of(start, stop)) for k, (start, stop) in enumerate(bounds)]
        self._unfinished = self.output / manifest.UNFINISHED
        self._lock = None
        self._check_folder()

    def _check_folder(self) -> None:
        if self.output.exists() and not self.output.is_dir():
            raise UserError(f"output={self.output} is a file; give a folder")
        stated = manifest.read_manifest(self.output)
        if stated is not None:
            found = stated.get("settings") or {}
            records = stated["shards"] + stated.get("empty_shards", [])
        elif self._settings_file.exists():
            found = json.loads(self._settings_file.read_text())
            records = [json.loads(file.read_text()) for file in self._unfinished.glob("[0-9]*.json")]
        else:
            found, records = self.settings, []
        changed = [
            f"{key}: {found.get(key)!r} -> {self.settings.get(key)!r}"
            for key in sorted({*found, *self.settings})
            if found.get(key) != self.settings.get(key)
        ]
        source_of = {piece.number: piece.source for piece in self.pieces}
        if records and not changed and all(source_of.get(record["number"]) != record.get("source") for record in records):
            changed = ["made of other items"]
        if changed:
            raise UserError(
                f"output={self.output} already holds another data set ({'; '.join(changed)}); choose another folder, "
                "or restore these settings to go on with that one"
            )
        known = {record["file"] for record in records} | {self._file(piece).name for piece in self.pieces}
        strange = [file for file in shard_files(self.output) if file.name not in known]
        if strange or (stated is None and not self._settings_file.exists() and shard_files(self.output)):
            name = (strange or shard_files(self.output))[0].name
            raise UserError(f"output={self.output} already holds {name}, which this command did not write; choose another folder")

    @property
    def _settings_file(self) -> Path:
        return self._unfinished / "settings.json"

    def _file(self, piece: Piece) -> Path:
        return self.output / f"latents_{piece.number:05d}.safetensors"

    def _record_file(self, piece: Piece) -> Path:
        return self._unfinished / f"{piece.number:05d}.json"

    def open(self) -> None:
        """Make the folder ready and look at what is there: finished shards are verified, changed ones set aside.

        By one process, before any calls `todo`.

        Raises:
            UserError: the folder cannot be written to, or another process is writing to it.
        """
        stated = manifest.read_manifest(self.output)
        try:
            self._unfinished.mkdir(parents=True, exist_ok=True)
            self._lock = open(self._unfinished / "lock", "w")
        except OSError as e:
            raise UserError(f"output={self.output} cannot be written to ({e.strerror}); choose another folder") from e
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the system when this process ends
        except (BlockingIOError, PermissionError) as e:
            raise UserError(f"another process is writing to output={self.output}; wait for it, or choose another folder") from e
        if stated is not None:  # complete once; as good as records
            for entry in stated["shards"] + stated.get("empty_shards", []):
                write_whole(self._unfinished / f"{entry['number']:05d}.json", json.dumps(entry).encode())
        write_whole(self._settings_file, json.dumps(self.settings, indent=1).encode())
        for piece in self.pieces:
            self._verify(piece)
        for file in self._unfinished.glob("[0-9]*.json"):
            if int(file.stem) >= len(self.pieces):  # the source has become shorter
                self._set_aside(self.output / (json.loads(file.read_text())["file"] or ""))
                file.unlink()
        if stated is not None and self.todo():
            (self.output / manifest.MANIFEST).unlink()  # what it says no longer holds; the records go on

    def _verify(self, piece: Piece) -> None:
        """Drop the record of a shard that is not what it says; without a record, the shard is made again."""
        record, file = self._record(piece), self._file(piece)
        if record is not None and record["source"] == piece.source:
            if record["file"] is None or (file.exists() and hash_of(file.read_bytes()) == record["hash"]):
                return
            reason = "is not as it was written"
        else:
            reason = "was made of other items than the source holds now"
        self._record_file(piece).unlink(missing_ok=True)
        self._set_aside(file, reason)

    def _set_aside(self, file: Path, reason: str = "was made of items that the source no longer holds") -> None:
        if file.is_file():
            aside = file.with_name(f".changed_{file.name}")
            log.warning("%s %s; set aside as %s", file, reason, aside.name)
            os.replace(file, aside)

    def _record(self, piece: Piece) -> dict | None:
        file = self._record_file(piece)
        return json.loads(file.read_text()) if file.exists() else None

    def todo(self, process_index: int = 0, num_processes: int = 1) -> list[Piece]:
        """This process's share of the shards that are missing: all ask before one writes."""
        return [p for p in self.pieces if not self._record_file(p).exists()][process_index::num_processes]

    def write(
        self,
        piece: Piece,
        latents: Tensor,
        labels: Tensor,
        info: ShardInfo,
        latents_flip: Tensor | None = None,
        left_out: list[dict] | None = None,
    ) -> None:
        """Write one shard and its record.

        Args:
            latents, latents_flip: [b, C or 2C, H, W] float32, as they come from the autoencoder.
            labels: [b] int64.
            left_out: what is missing and why, {"name", "problem"} each.

        Raises:
            UserError: as `write_shard` does; values that the type cannot hold are not finite.
        """
        record = {"number": piece.number, "source": piece.source, "file": None, "num_items": len(latents)}
        record["left_out"] = left_out or []
        if len(latents):
            stored = latents.to(self.dtype)
            stored_flip = None if latents_flip is None else latents_flip.to(self.dtype)
            for given, kept in ((latents, stored), (latents_flip, stored_flip)):
                if given is not None and given.isfinite().all() and not kept.isfinite().all():
                    raise UserError(f"latents up to {given.abs().max():.3g} do not fit float16; use dtype=float32")
            blob = shard_bytes(self._file(piece), stored, labels, info, stored_flip)
            exact, kept = (x.chunk(2, dim=1)[0] if info.kind == "moments" else x for x in (latents.double(), stored.double()))
            statistics, error = ChannelStatistics(), kept - exact
            statistics.add(stored, info.kind)
            record |= {
                "file": self._file(piece).name,
                "bytes": len(blob),
                "hash": hash_of(blob),
                "statistics": asdict(statistics),
                "storage_error": {
                    "max": error.abs().max().item(),
                    "square_sum": error.square().sum().item(),
                    "of": exact.square().sum().item(),
                },
            }
            # The record first: a shard under its final name always has one.
            write_whole(self._record_file(piece), json.dumps(record).encode())
            write_whole(self._file(piece), blob)
        else:
            write_whole(self._record_file(piece), json.dumps(record).encode())

    def finish(self, class_names: list[str] | None = None, **about: object) -> dict:
        """Write manifest.json, by one process after all have written their shards; returns what it says.

        Args:
            about: more to state (where the source was, how it was made).

        Raises:
            UserError: nothing was left of the source.
        """
        self._check_folder()  # nobody may have put shards of their own between ours
        records = [self._record(piece) for piece in self.pieces]
        shards = [record for record in records if record["file"] is not None]
        left_out = [entry for record in records for entry in record["left_out"]]
        if not shards:
            raise UserError(f"none of the {len(left_out)} items could be read; the first: {left_out[0]}")
        statistics, largest, square_sum, total = ChannelStatistics(), 0.0, 0.0, 0.0
        for record in shards:
            statistics.merge(ChannelStatistics(**record["statistics"]))
            error = record["storage_error"]
            largest, square_sum, total = max(largest, error["max"]), square_sum + error["square_sum"], total + error["of"]
        for file in self.output.glob(".tmp_*.safetensors"):
            file.unlink()  # of a process that was killed while it wrote
        dataset = LatentDataset(self.output, check_folder=False)  # all shards agree, or this says which does not
        stated = {
            "format": 1,
            "num_items": len(dataset),
            "fingerprint": dataset.fingerprint(),
            **asdict(dataset.info),
            "shape": [dataset.channels, dataset.height, dataset.width],
            "has_flips": dataset.has_flips,
            "mean": statistics.mean,
            "std": statistics.std,
            "storage_error": {
                "dtype": self.settings["dtype"],
                "max": largest,
                "relative_rms": (square_sum / (total or 1)) ** 0.5,
            },
            "class_names": class_names,
            "class_counts": torch.bincount(torch.from_numpy(dataset.labels), minlength=dataset.info.num_classes).tolist(),
            "left_out": left_out,
            **about,
            "settings": self.settings,
            "shards": shards,
            "empty_shards": [record for record in records if record["file"] is None],
        }
        write_whole(self.output / manifest.MANIFEST, json.dumps(stated, indent=1).encode())
        shutil.rmtree(self._unfinished)
        return stated
