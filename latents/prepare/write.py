"""Writing a folder of shards, by one process or several, so that an interrupted command can continue; then its manifest.

Shard k holds the items k * shard_size .. (k + 1) * shard_size - 1 of the source, less those left out. A finished shard has a
record in .unfinished/; when all have one, the records become manifest.json and .unfinished/ is removed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.errors import UserError
from common.files import hash_bytes, hash_file, lock_file, read_json, remove_leftovers, write_file
from common.progress import progress_bar
from latents.channel_statistics import channel_sums, mean_and_std, overall_std
from latents.shards import KINDS, MANIFEST, UNFINISHED, LatentDataset, ShardInfo, read_manifest, serialize_shard, shard_files

log = logging.getLogger(__name__)

DTYPES = {"float16": torch.float16, "float32": torch.float32}
Dtype = Literal[tuple(DTYPES)]
Kind = Literal[KINDS]
SHARD_SIZE = 4096  # items of the source that make one shard: 64 MiB of moments at 256 pixels


@dataclass(frozen=True)
class PlannedShard:
    """One shard to make, from the items start .. stop - 1 of the source; `source` is their hash."""

    number: int
    start: int
    stop: int
    source: str


class ShardWriter:
    """A folder of shards in the making.

    Args:
        output: the folder.
        settings: what the latents depend on besides the source, of JSON's types. Resuming a folder requires identical settings.
        hash_items: (start, stop) -> a hash of these items of the source. If it differs for a finished shard, that shard is made
            again. If it differs for all of them, the folder holds another data set.
        num_items: of the source.
        shard_size: items of the source that make one shard.
        dtype: in which latents are stored.

    Raises:
        UserError: the folder holds another data set, or shards that nothing is known about.
    """

    def __init__(
        self, output: str, settings: dict, hash_items: Callable[[int, int], str], num_items: int, shard_size: int, dtype: Dtype
    ):
        self.output = Path(output)
        self.dtype = DTYPES[dtype]
        self.settings = json.loads(json.dumps({**settings, "shard_size": shard_size, "dtype": dtype}))
        bounds = [(i, min(i + shard_size, num_items)) for i in range(0, num_items, shard_size)]
        self.shards = [PlannedShard(k, start, stop, hash_items(start, stop)) for k, (start, stop) in enumerate(bounds)]
        self._unfinished = self.output / UNFINISHED
        self._settings_file = self._unfinished / "settings.json"
        self._check_folder()

    def _check_folder(self) -> None:
        """Raises UserError where the folder holds anything but shards of these settings and items."""
        settings, records = {}, self._records()
        if manifest := read_manifest(self.output):
            settings, records = manifest["settings"], manifest["shards"]
        elif self._settings_file.exists():
            settings = read_json(self._settings_file)
        pairs = {key: (settings.get(key), self.settings.get(key)) for key in sorted({*settings, *self.settings})}
        changed = [f"{key}: {theirs!r} -> {ours!r}" for key, (theirs, ours) in pairs.items() if theirs != ours]
        if {(shard.number, shard.source) for shard in self.shards}.isdisjoint((r["number"], r["source"]) for r in records):
            changed.append("made of other items")
        if changed and records:  # without a finished shard, nothing is lost under other settings
            raise UserError(f"output={self.output} already holds another data set ({'; '.join(changed)}); choose another folder")
        known = {record["file"] for record in records} | ({self._file(s.number).name for s in self.shards} if settings else set())
        if strange := [file.name for file in shard_files(self.output) if file.name not in known]:
            raise UserError(f"output={self.output} holds {strange[0]}, which this command did not write; choose another folder")

    def _file(self, number: int) -> Path:
        return self.output / f"latents_{number:05d}.safetensors"

    def _record_file(self, number: int) -> Path:
        return self._unfinished / f"{number:05d}.json"

    def _records(self) -> list[dict]:
        return [read_json(file) for file in sorted(self._unfinished.glob("[0-9]*.json"))]

    def open(self) -> None:
        """Verify finished shards, and set changed ones aside. One process does, before any calls `missing`.

        Raises UserError where the folder cannot be written to, or another process is writing to it.
        """
        self._lock = lock_file(self._unfinished / "lock", "writing to", "output")
        remove_leftovers(self.output)
        manifest = read_manifest(self.output)  # under the lock: who held it before may just have written it
        for record in manifest["shards"] if manifest else []:
            self._write_record(record)
        write_file(self._settings_file, json.dumps(self.settings, indent=1))
        record_of = {record["number"]: record for record in self._records()}
        source_of = {shard.number: shard.source for shard in self.shards}
        for number in sorted(record_of.keys() | source_of.keys()):  # without a record, a shard is made again
            record, file = record_of.get(number), self._file(number)
            is_current = record is not None and record["source"] == source_of.get(number)
            if is_current and (record["file"] is None or (file.exists() and hash_file(file) == record["hash"])):
                continue
            self._record_file(number).unlink(missing_ok=True)
            if file.exists():
                aside = file.with_name(f".changed_{file.name}")
                reason = "not as it was written" if is_current else "of other items than the source holds now"
                log.warning("%s is %s; set aside as %s", file, reason, aside.name)
                os.replace(file, aside)
        if manifest is not None and self.missing():
            (self.output / MANIFEST).unlink()  # it is no longer true; the records hold what is

    def missing(self, process_index: int = 0, num_processes: int = 1) -> list[PlannedShard]:
        """This process's share of the shards that are missing. All processes ask before one writes."""
        return [shard for shard in self.shards if not self._record_file(shard.number).exists()][process_index::num_processes]

    def write(
        self,
        shard: PlannedShard,
        labels: Tensor,
        info: ShardInfo,
        tensors: dict[str, Tensor],
        left_out: Sequence[dict] = (),
        num_transparent: int = 0,
    ) -> None:
        """Write one shard and its record. Raises UserError as `write_shard` does.

        Args:
            labels: [b] int64.
            tensors: `latents` and perhaps `latents_flip`, [b, C or 2C, H, W] float32; perhaps the images, of `pack_images`.
            left_out: what is missing and why, {"name", "problem"} each.
            num_transparent: images that show the background.
        """
        record = {"number": shard.number, "source": shard.source, "file": None, "left_out": list(left_out)}
        record["num_transparent"] = num_transparent
        if not len(labels):
            self._write_record(record)
            return
        stored = {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in tensors.items()}
        record |= {"file": self._file(shard.number).name, "sums": channel_sums(stored["latents"], info.kind).tolist()}
        self._write_shard(record, info, labels=labels, **stored)

    def _write_shard(self, record: dict, info: ShardInfo, **tensors: Tensor) -> None:
        file = self.output / record["file"]
        blob = serialize_shard(file, info, **tensors)
        record |= {"bytes": len(blob), "hash": hash_bytes(blob)}
        file.unlink(missing_ok=True)  # with another header; after a kill, the shard is missing and not one of other data
        self._write_record(record)  # first: a shard under its final name always has one
        write_file(file, blob)

    def _write_record(self, record: dict) -> None:
        write_file(self._record_file(record["number"]), json.dumps(record))

    def finish(
        self, class_names: list[str] | None = None, normalize: bool = False, sigma_data: float | None = None, **about: object
    ) -> None:
        """Write manifest.json, by one process after all have written their shards. Raises UserError if nothing was left.

        With `normalize`, the headers first get the mean and the standard deviation of each channel, over all latents; with
        `sigma_data`, the scale factor that gives all values together this standard deviation. `about` goes into the manifest.
        """
        self._check_folder()  # nobody may have put shards of their own between ours
        records = [read_json(self._record_file(shard.number)) for shard in self.shards]
        shards = [record for record in records if record["file"] is not None]
        left_out = [entry for record in records for entry in record["left_out"]]
        if not shards:
            raise UserError(f"none of the {len(left_out)} items could be read; the first: {left_out[0]}")
        mean, std = (values.tolist() for values in mean_and_std(np.sum([record["sums"] for record in shards], axis=0)))
        overall = overall_std(mean, std)
        if (normalize and not all(std)) or (sigma_data is not None and not overall):
            raise UserError("a channel is constant and cannot be scaled: leave out normalize=true or sigma_data=")
        if normalize:
            self._change_headers(shards, latents_mean=tuple(mean), latents_std=tuple(std))
        if sigma_data is not None:
            self._change_headers(shards, scale_factor=round(sigma_data / overall, 4))
        dataset = LatentDataset(self.output, check_folder=False)  # all shards agree, or this says which does not
        manifest = {
            "num_items": len(dataset),
            "fingerprint": dataset.fingerprint,
            **asdict(dataset.info),
            "shape": [dataset.channels, dataset.height, dataset.width],
            "mean": mean,
            "std": std,
            "class_names": class_names,
            "class_counts": np.bincount(dataset.labels, minlength=dataset.info.num_classes).tolist(),
            "left_out": left_out,
            "num_transparent": (num_transparent := sum(record["num_transparent"] for record in records)),
            **about,
            "settings": self.settings,
            "shards": records,
        }
        write_file(self.output / MANIFEST, json.dumps(manifest, indent=1))
        self._close()
        log.info("%d latents %s are in %d shards in %s", len(dataset), manifest["shape"], len(shards), self.output)
        if num_transparent:
            log.info("%d images are transparent; they are on a background of %s", num_transparent, self.settings["background"])
        if left_out:
            log.warning("left out %d, listed in %s; the first: %s", len(left_out), MANIFEST, left_out[0])

    def _close(self) -> None:
        """Remove .unfinished/, the lock last. From then on another process may lock the folder anew; it finds the manifest."""
        for file in sorted(self._unfinished.iterdir(), key=lambda file: file.name == "lock"):
            file.unlink()
        self._lock.close()  # an open file keeps its folder on NFS
        with contextlib.suppress(OSError):  # another process has locked it
            self._unfinished.rmdir()

    def _change_headers(self, records: list[dict], **measured: object) -> None:
        """Write the shards again with other entries in their headers. Interrupted, it is done again from its start."""
        for record in progress_bar(records, unit="shards", desc="headers"):
            file = self.output / record["file"]
            old = LatentDataset(file).info
            if (info := replace(old, **measured)) != old:
                self._write_shard(record, info, **load_file(file))
