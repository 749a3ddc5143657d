"""How fast training batches come from latent shards, what a worker takes, and how long a data set takes to open.

    python -m benchmarks.loader                                  # 131,072 latents of 4x32x32 in float16, made for it
    python -m benchmarks.loader path=latents/in256 num_workers=[0,4]
    python -m benchmarks.loader format=webdataset path=imagenet256_latents_wds

Batches are shuffled over the whole data set as in training. The data are read once before, so that what is measured is the
reader and not the disk. One JSON line a measurement, with the machine and the versions in the first.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from omegaconf import OmegaConf

import prepare_latents
from benchmarks.report import emit
from latents.order import BatchOrder, read_batches
from latents.shards import LatentDataset
from training.config import open_latents

SETTINGS = {
    "path": None,  # null: shards are made for it and removed again
    "format": "native",
    "num_items": 131072,  # of the shards that are made
    "kind": "sample",
    "batch_size": 256,
    "num_workers": [0, 1, 2],
    "num_batches": 400,  # of a round
    "rounds": 5,
    "large_items": 1_300_000,  # the size of the data set whose opening is timed: the same shards, named many times
}


def main(arguments: list[str]) -> None:
    given = OmegaConf.from_dotlist(arguments)
    unknown = given.keys() - SETTINGS.keys()
    if unknown:
        raise ValueError(f"unknown {', '.join(sorted(map(str, unknown)))}; the settings are {', '.join(SETTINGS)}")
    settings = OmegaConf.merge(SETTINGS, given)
    torch.set_num_threads(1)
    emit(
        machine=platform.processor() or platform.machine(),
        num_cores=os.cpu_count(),
        python=platform.python_version(),
        torch=torch.__version__,
        settings=OmegaConf.to_container(settings),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(settings.path or folder) if settings.path else Path(folder) / "shards"
        if settings.path is None:
            prepare_latents.synthetic(str(path), settings.num_items, kind=settings.kind)
        dataset = open_latents(path, settings.format)
        read_once(dataset)
        for num_workers in settings.num_workers:
            measure_batches(dataset, settings, num_workers)
        if settings.format == "native":
            measure_opening(dataset, Path(folder) / "large", settings)


def read_once(dataset) -> None:
    """Have the whole data set in the page cache."""
    for start in range(0, len(dataset), 4096):
        indices = np.arange(start, min(start + 4096, len(dataset)))
        dataset.fetch(indices, np.zeros(len(indices), dtype=bool))


def measure_batches(dataset, settings, num_workers: int) -> None:
    """Latents per second of one process, after a tenth of a round to warm up."""
    warm_up = settings.num_batches // 10
    num_steps = warm_up + settings.rounds * settings.num_batches
    order = BatchOrder(len(dataset), settings.batch_size, 0, 0, num_steps, [slice(0, settings.batch_size)], dataset.has_flips)
    before_mib = own_memory_mib()
    batches = read_batches(dataset, order, num_workers, pin_memory=False)
    for _ in range(warm_up):
        next(batches)
    speeds = []
    for _ in range(settings.rounds):
        start_sec = time.perf_counter()
        for _ in range(settings.num_batches):
            next(batches)
        speeds.append(settings.num_batches * settings.batch_size / (time.perf_counter() - start_sec))
    emit(
        what="training batches",
        num_workers=num_workers,
        latents_per_sec=round(statistics.median(speeds)),
        lowest=round(min(speeds)),
        highest=round(max(speeds)),
        memory_mib=round(own_memory_mib() - before_mib, 1),  # of all workers together, and the order of the epoch
    )
    batches.close()


def own_memory_mib() -> float:
    """Memory of this process, without files that it has mapped (Linux; elsewhere NaN)."""
    file = Path("/proc/self/smaps_rollup")
    if not file.exists():
        return float("nan")
    fields = {line.split()[0]: int(line.split()[1]) for line in file.read_text().splitlines()[1:]}
    return fields["Private_Dirty:"] / 1024


def measure_opening(dataset: LatentDataset, folder: Path, settings) -> None:
    """From nothing to the first batch, of a folder that names the shards until it has as many items as were asked for."""
    folder.mkdir()
    num_items = number = 0
    sizes = np.diff([*dataset._first_item])
    while num_items < settings.large_items:
        file = dataset.files[number % len(dataset.files)]
        (folder / f"{number:06d}.safetensors").symlink_to(file.resolve())
        num_items += int(sizes[number % len(sizes)])
        number += 1
    times = []
    for _ in range(settings.rounds):
        start_sec = time.perf_counter()
        large = LatentDataset(folder)
        large.fingerprint()
        order = BatchOrder(len(large), settings.batch_size, 0, 0, 1, [slice(0, settings.batch_size)], large.has_flips)
        next(read_batches(large, order, 0, pin_memory=False))
        times.append(time.perf_counter() - start_sec)
    emit(
        what="from opening the folder to the first batch",
        num_items=num_items,
        num_shards=number,
        sec=round(statistics.median(times), 3),
        lowest=round(min(times), 3),
        highest=round(max(times), 3),
    )


if __name__ == "__main__":
    main(sys.argv[1:])
