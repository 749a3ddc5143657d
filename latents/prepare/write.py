"""Write a folder of shards from one or several processes, and resume after an interruption.

Shard k contains items k * shard_size .. (k + 1) * shard_size - 1, except unreadable items. Each header stores the settings
and a hash of the items, so resuming requires only the shards. In a complete folder, manifest.json lists all shards.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.errors import UserError
from common.files import FORMAT, lock_file, write_atomically
from common.images import is_hidden
from common.progress import progress_bar
from latents.channel_statistics import channel_sums, mean_and_std, overall_std
from latents.dataset import LatentDataset
from latents.shards import (
    MANIFEST,
    UNFINISHED,
    ShardInfo,
    hash_latents,
    is_intact,
    read_header,
    read_manifest,
    serialize_shard,
    shard_files,
)

log = logging.getLogger(__name__)

Dtype = Literal["float16", "float32"]
SHARD_NAME = r"latents_\d{5,}\.safetensors"
SHARD_SIZE = 4096  # number of items per shard (64 MiB for moments of 256x256 images in float16)


@dataclass(frozen=True)
class PlannedShard:
    """A shard to create from items start .. stop - 1."""

    file: Path
    start: int
    stop: int
    items_hash: str  # hash of the items


@dataclass
class ShardFolder:
    """A folder that the main process has locked, and the shards that it shall hold.

    The main process opens the folder with `open`. The other processes get a copy, and call only `write`.
    """

    output: Path
    info: ShardInfo  # header of the shards
    settings: dict  # settings that the shards store, in JSON types
    shards: list[PlannedShard]  # all shards
    # The shards that `open` has found complete and up to date, and the names of the items that each has left out. If one of them
    # can be read now, call `rename_outdated`.
    finished: dict[PlannedShard, set[str]] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        output: str,
        info: ShardInfo,
        settings: dict,
        hash_items: Callable[[int, int], str],
        num_items: int,
        stack: contextlib.ExitStack,
    ) -> ShardFolder:
        """Plan the shards, lock the folder until `stack` is closed, and rename the shards that are damaged or out of date.

        Args:
            output: Folder for the shards.
            info: Header of the shards.
            settings: All settings that affect the shards. Resuming requires identical settings. This class reads `shard_size`
                (items per shard), `dtype` (of the stored latents), `normalize` (whether `finish` stores each channel's mean and
                standard deviation over all latents in the headers) and `sigma_data` (target standard deviation of the network
                input, for which `finish` stores the scale factor).
            hash_items: Function (start, stop) that hashes items start .. stop - 1. If the hash of a finished shard's items
                changes, the shard must be made again. If all hashes change, the folder holds another data set.
            num_items: Number of items.

        Raises:
            UserError: If the folder contains a different data set, or a shard that another program wrote.
        """
        shards = []
        for number, start in enumerate(range(0, num_items, settings["shard_size"])):
            stop = min(start + settings["shard_size"], num_items)
            file = Path(output) / f"latents_{number:05d}.safetensors"
            shards.append(PlannedShard(file, start, stop, hash_items(start, stop)))
        folder = cls(Path(output), info, json.loads(json.dumps(settings)), shards)
        records = folder._read_provenance()
        read_manifest(folder.output)  # raises UserError for a file of another program or format, which would be replaced
        stack.enter_context(lock_file(folder.lock_path, "writing to", "output"))  # after the checks, because it writes a file
        planned = folder._planned()
        outdated = {}
        for file, record in records.items():
            if (shard := planned.get((file, record["source"]))) is None:
                outdated[file] = "was made from other items than the source holds now"
            elif not is_intact(file):
                outdated[file] = "changed after it was written"
            else:
                folder.finished[shard] = {entry["name"] for entry in record["left_out"]}
        folder.rename_outdated(outdated)
        return folder

    @property
    def lock_path(self) -> Path:
        return self.output / UNFINISHED

    @property
    def missing(self) -> list[PlannedShard]:
        """The shards to make. `write` does not shorten this list."""
        return [shard for shard in self.shards if shard not in self.finished]

    def write(
        self,
        shard: PlannedShard,
        tensors: dict[str, Tensor],
        left_out: Mapping[str, str] | None = None,
        notes: Mapping[str, int] | None = None,
    ) -> None:
        """Write a shard.

        Args:
            tensors: `labels`, int64 [b], `latents` and optional `latents_flip`, float32 [b, C or 2C, H, W], optional images from
                `pack_images`, and optional `image_hashes`, int64 [b]. By default, the latents are hashed instead.
            left_out: {name: problem} of the unreadable items.
            notes: Number of items for each note of `common.images.read_rgb`.
        """
        dtype = getattr(torch, self.settings["dtype"])
        stored = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
        if "image_hashes" not in stored:
            stored["image_hashes"] = hash_latents(stored["latents"], self.info.kind)
        provenance = {
            "settings": self.settings,
            "source": shard.items_hash,
            "left_out": _as_entries(left_out or {}),
            "sums": channel_sums(stored["latents"], self.info.kind).tolist(),
        } | ({"notes": dict(notes)} if notes else {})
        write_atomically(shard.file, serialize_shard(shard.file, self.info, provenance, **stored))

    def rename_outdated(self, reasons: Mapping[Path, str]) -> None:
        """Rename the files in `reasons`, which are then no longer finished. Remove the manifest if shards are missing."""
        for file, reason in reasons.items():
            backup = file.with_name(f".changed_{file.name}")
            log.warning("%s %s; renamed to %s", file, reason, backup.name)
            os.replace(file, backup)
        self.finished = {shard: names for shard, names in self.finished.items() if shard.file not in reasons}
        if self.missing:
            (self.output / MANIFEST).unlink(missing_ok=True)

    def _planned(self) -> dict[tuple[Path, str], PlannedShard]:
        return {(shard.file, shard.items_hash): shard for shard in self.shards}

    def _read_provenance(self) -> dict[Path, dict]:
        """Return the provenance of each shard in the folder.

        Raises UserError if another program wrote a shard, if shards have different settings, if all have different items, or if
        there are only other files.
        """
        provenance = {file: read_header(file).get("provenance") for file in shard_files(self.output)}
        others = [f.name for f, record in provenance.items() if record is None or not re.fullmatch(SHARD_NAME, f.name)]
        if not provenance and self.output.is_dir():
            others = sorted(f.name for f in self.output.iterdir() if not is_hidden(f.name) and f.name != MANIFEST)
        if others:
            raise UserError(f"output={self.output} holds {others[0]}, which this command did not write; choose another folder")
        changed = [change for record in provenance.values() for change in self._changed_settings(record)]
        if provenance and self._planned().keys().isdisjoint((file, record["source"]) for file, record in provenance.items()):
            changed.append("made of other items")
        if changed:
            differences = "; ".join(dict.fromkeys(changed))
            raise UserError(f"output={self.output} already holds another data set ({differences}); choose another folder")
        return provenance

    def _changed_settings(self, record: dict) -> Iterator[str]:
        settings = self.settings
        for key in sorted(settings | record["settings"]):
            before, now = record["settings"].get(key), settings.get(key)
            # Without value_range, no image of a shard has more than 8 bits, except those that are left out.
            is_unused = key == "value_range" and before is None and not record["left_out"]
            if before != now and not is_unused:
                yield f"{key}: {before!r} -> {now!r}"

    def finish(
        self,
        class_names: list[str] | None = None,
        problems: Mapping[str, str] | None = None,
        **entries: object,
    ) -> None:
        """Write the scale of all latents into the shards, write manifest.json and remove the lock file.

        Call this method after all shards are written.

        Args:
            problems: {name: problem} of the links and folders that are left out.
            entries: Additional entries of the manifest.

        Raises:
            UserError: If no item is readable, a channel to scale is constant, or the folder contains another program's shards.
        """
        self._read_provenance()
        provenance = [read_header(shard.file)["provenance"] for shard in self.shards]
        left_out = {entry["name"]: entry["problem"] for record in provenance for entry in record["left_out"]}
        left_out |= {name: problem for name, problem in (problems or {}).items() if name not in left_out}
        first_problem = next(iter(left_out.values()), None)
        sums = np.sum([record["sums"] for record in provenance], axis=0)
        if not sums.any():
            raise UserError(f"none of the {len(left_out)} items could be read; the first: {first_problem}")
        mean, std = (values.tolist() for values in mean_and_std(sums))
        self._store_scale(mean, std)
        dataset = LatentDataset(self.output, check_folder=False)  # raises UserError if the shards are inconsistent
        notes = sum((Counter(record.get("notes", {})) for record in provenance), Counter())
        if (hashes := dataset.image_hashes) is not None and len(np.unique(hashes)) < len(hashes):
            notes["copies"] = len(hashes) - len(np.unique(hashes))
        manifest = {
            "format": FORMAT,
            "num_items": len(dataset),
            **asdict(dataset.info),
            "shape": [dataset.channels, dataset.height, dataset.width],
            "mean": mean,
            "std": std,
            "class_names": class_names,
            "class_counts": np.bincount(dataset.labels, minlength=dataset.info.num_classes).tolist(),
            "left_out": _as_entries(left_out),
            "notes": notes,
            **entries,
            "settings": self.settings,
            "shards": dataset.hashes,
        }
        write_atomically(self.output / MANIFEST, json.dumps(manifest, indent=1))
        self.lock_path.unlink()
        log.info("%d latents %s are in %d shards in %s", len(dataset), manifest["shape"], len(self.shards), self.output)
        log_notes(manifest)
        if left_out:
            log.warning("left out %s, listed in %s; the first: %s", count_left_out(left_out), MANIFEST, first_problem)

    def _store_scale(self, mean: list[float], std: list[float]) -> None:
        """Store what scales all latents in the headers. After an interruption, the next run rewrites the remaining shards."""
        normalize, sigma_data = self.settings.get("normalize"), self.settings.get("sigma_data")
        overall = overall_std(mean, std)
        if (normalize and not all(std)) or (sigma_data is not None and not overall):
            raise UserError("a channel is constant and cannot be scaled: leave out normalize=true or sigma_data=")
        scale = {"latents_mean": mean, "latents_std": std} if normalize else {}
        scale |= {"scale_factor": round(sigma_data / overall, 4)} if sigma_data is not None else {}
        for shard in progress_bar(self.shards, unit="shards", desc="headers") if scale else ():
            info = LatentDataset(shard.file).info
            if (changed := replace(info, **scale)) != info:
                blob = serialize_shard(shard.file, changed, read_header(shard.file)["provenance"], **load_file(shard.file))
                write_atomically(shard.file, blob)


def _as_entries(problems: Mapping[str, str]) -> list[dict[str, str]]:
    """Return {name: problem} as shards and manifests store it."""
    return [{"name": name, "problem": problem} for name, problem in problems.items()]


def count_left_out(names: Collection[str]) -> str:
    """Return the number of items with these names, in total and in each class folder, such as `5 (ant 2, bee 3)`."""
    folders = Counter(name.partition("/")[0] for name in names if "/" in name)
    counts = ", ".join(f"{name} {count}" for name, count in folders.most_common(10))
    more = f", and {len(folders) - 10} more" if len(folders) > 10 else ""
    return f"{len(names)}" + (f" ({counts}{more})" if folders else "")


def log_notes(manifest: dict) -> None:
    """Log how many images `encode` changed (background, first frame, enlarged, grey levels), and how many are copies."""
    notes = manifest.get("notes", {})
    if count := notes.get("copies"):
        log.info("%d images are copies of earlier ones; duplicates=skip of encode leaves them out", count)
    if count := notes.get("enlarged"):
        log.info("%d images have fewer pixels than resolution=%d and were enlarged", count, manifest["resolution"])
    if count := notes.get("transparent"):
        log.info("%d images are transparent; their background is %s (background=)", count, manifest["settings"].get("background"))
    if count := notes.get("multi_frame"):
        log.info("%d images have further pages or frames, of which only the first is used", count)
    if count := notes.get("flat"):
        used = manifest["settings"].get("value_range")
        log.warning("%d images became a single grey level, because value_range=%s does not fit their values", count, used)
