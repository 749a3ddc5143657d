"""Write a folder of shards from one or several processes. An interrupted command can resume.

Shard k holds the items k * shard_size .. (k + 1) * shard_size - 1 of the source, without those that could not be read. Its header
stores the settings and a hash of the items, so resuming needs only the shards. When all shards exist, manifest.json lists them.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.errors import UserError
from common.files import lock_file, write_file
from common.progress import progress_bar
from latents.channel_statistics import channel_sums, mean_and_std, overall_std
from latents.shards import MANIFEST, UNFINISHED, LatentDataset, ShardInfo, is_intact, read_header, serialize_shard, shard_files

log = logging.getLogger(__name__)

Dtype = Literal["float16", "float32"]
SHARD_SIZE = 4096  # number of source items per shard (64 MiB for moments of 256x256 images)


@dataclass(frozen=True)
class PlannedShard:
    """A shard to make from the items start .. stop - 1 of the source."""

    file: Path
    start: int
    stop: int
    source: str  # hash of these items


class ShardWriter:
    """Writes the shards of a folder and, in the end, its manifest.

    Args:
        output: the folder.
        settings: all settings that the latents depend on, in JSON types. Resuming a folder requires identical settings.
        hash_items: a function (start, stop) that hashes items start .. stop - 1 of the source. If the hash of a finished shard
            differs, this shard is made again. If all hashes differ, the folder holds another data set.
        num_items: number of items in the source.
        shard_size: number of items of the source per shard.
        dtype: type of the stored latents.

    Raises:
        UserError: the folder holds another data set, or a shard that this command did not write.
    """

    def __init__(
        self, output: str, settings: dict, hash_items: Callable[[int, int], str], num_items: int, shard_size: int, dtype: Dtype
    ):
        self.output, self.dtype = Path(output), getattr(torch, dtype)
        self.settings = json.loads(json.dumps({**settings, "shard_size": shard_size, "dtype": dtype}))
        self.shards = []
        for number, start in enumerate(range(0, num_items, shard_size)):
            stop, file = min(start + shard_size, num_items), self.output / f"latents_{number:05d}.safetensors"
            self.shards.append(PlannedShard(file, start, stop, hash_items(start, stop)))
        self._planned = {(shard.file, shard.source) for shard in self.shards}
        self._read_sources()

    def _read_sources(self) -> set[tuple[Path, str]]:
        """List the shards in the folder, each with the hash of the items that it was made from.

        Raises UserError if a shard was made with other settings or by another program, or if all are made from other items.
        """
        sources, changed = set(), []
        for file in shard_files(self.output):
            provenance = read_header(file)[0].get("provenance")
            if provenance is None or not re.fullmatch(r"latents_\d{5,}\.safetensors", file.name):
                raise UserError(f"output={self.output} holds {file.name}, which this command did not write; choose another")
            sources.add((file, provenance["source"]))
            for key in sorted(self.settings | provenance["settings"]):
                before, now = provenance["settings"].get(key), self.settings.get(key)
                changed += [f"{key}: {before!r} -> {now!r}"] if before != now else []
        if sources and sources.isdisjoint(self._planned):
            changed.append("made of other items")
        if changed:
            differences = "; ".join(dict.fromkeys(changed))
            raise UserError(f"output={self.output} already holds another data set ({differences}); choose another folder")
        return sources

    def open(self) -> None:
        """Lock the folder, verify its shards, and rename those to make again. One process calls this, before any calls `missing`.

        Raises UserError if the folder cannot be written to, or another process is writing to it.
        """
        self._lock = lock_file(self.output / UNFINISHED, "writing to", "output")
        for file, source in sorted(self._read_sources()):  # reread, because the last holder of the lock may have written shards
            is_planned = (file, source) in self._planned
            if is_planned and is_intact(file):
                continue
            backup = file.with_name(f".changed_{file.name}")
            reason = "changed after it was written" if is_planned else "was made from other items than the source holds now"
            log.warning("%s %s; renamed to %s", file, reason, backup.name)
            os.replace(file, backup)
        if self.missing():
            (self.output / MANIFEST).unlink(missing_ok=True)

    def missing(self, process_index: int = 0, num_processes: int = 1) -> list[PlannedShard]:
        """Return this process's share of the missing shards. All processes must have called this before one writes."""
        return [shard for shard in self.shards if not shard.file.exists()][process_index::num_processes]

    def write(
        self, shard: PlannedShard, labels: Tensor, info: ShardInfo, tensors: dict[str, Tensor], left_out: Sequence[dict] = ()
    ) -> None:
        """Write a shard. Raises UserError if a shape, type or label is wrong, or a value is not finite.

        Args:
            labels: [b] int64.
            tensors: `latents` and optionally `latents_flip`, [b, C or 2C, H, W] float32; optionally images, from `pack_images`.
            left_out: {"name", "problem"} of each item that could not be read.
        """
        stored = {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in tensors.items()}
        provenance = {
            "settings": self.settings,
            "source": shard.source,
            "left_out": list(left_out),
            "sums": channel_sums(stored["latents"], info.kind).tolist(),
        }
        write_file(shard.file, serialize_shard(shard.file, info, provenance, labels=labels, **stored))

    def finish(
        self, class_names: list[str] | None = None, normalize: bool = False, sigma_data: float | None = None, **about: object
    ) -> None:
        """Write manifest.json and unlock the folder. One process calls this after all have written their shards.

        Args:
            normalize: whether to first store mean and standard deviation of each channel over all latents in the headers.
            sigma_data: if set, first store the scale factor that gives the network input this standard deviation.
            about: more entries for the manifest.

        Raises:
            UserError: no item could be read, a channel to scale is constant, or the folder holds shards of another program.
        """
        self._read_sources()
        provenance = [read_header(shard.file)[0]["provenance"] for shard in self.shards]
        left_out = [entry for shard in provenance for entry in shard["left_out"]]
        sums = np.sum([shard["sums"] for shard in provenance], axis=0)
        if not sums.any():
            raise UserError(f"none of the {len(left_out)} items could be read; the first: {left_out[0]}")
        mean, std = (values.tolist() for values in mean_and_std(sums))
        overall = overall_std(mean, std)
        if (normalize and not all(std)) or (sigma_data is not None and not overall):
            raise UserError("a channel is constant and cannot be scaled: leave out normalize=true or sigma_data=")
        if normalize:
            self._change_headers(latents_mean=tuple(mean), latents_std=tuple(std))
        if sigma_data is not None:
            self._change_headers(scale_factor=round(sigma_data / overall, 4))
        dataset = LatentDataset(self.output, check_folder=False)  # raises UserError if the shards differ
        manifest = {
            "num_items": len(dataset),
            **asdict(dataset.info),
            "shape": [dataset.channels, dataset.height, dataset.width],
            "mean": mean,
            "std": std,
            "class_names": class_names,
            "class_counts": np.bincount(dataset.labels, minlength=dataset.info.num_classes).tolist(),
            "left_out": left_out,
            **about,
            "settings": self.settings,
            "shards": dataset.hashes,
        }
        write_file(self.output / MANIFEST, json.dumps(manifest, indent=1))
        (self.output / UNFINISHED).unlink()
        self._lock.close()
        log.info("%d latents %s are in %d shards in %s", len(dataset), manifest["shape"], len(self.shards), self.output)
        if left_out:
            log.warning("left out %d, listed in %s; the first: %s", len(left_out), MANIFEST, left_out[0])

    def _change_headers(self, **entries: object) -> None:
        """Rewrite the shards with these entries of ShardInfo. If this is interrupted, the next start completes it."""
        for shard in progress_bar(self.shards, unit="shards", desc="headers"):
            info = LatentDataset(shard.file).info
            if (changed := replace(info, **entries)) != info:
                blob = serialize_shard(shard.file, changed, read_header(shard.file)[0]["provenance"], **load_file(shard.file))
                write_file(shard.file, blob)
