"""How fast training batches come from latent shards, what a worker takes, and how long a data set takes to open.

    python -m extras.benchmarks.loader                                  # 131,072 latents of 4x32x32 in float16, made for it
    python -m extras.benchmarks.loader path=latents/in256 'num_workers=[0,4]'
    python -m extras.benchmarks.loader format=webdataset path=imagenet256_latents_wds

Batches are shuffled over the whole data set as in training. The data are read once before, so that what is measured is the
reader and not the disk.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch

from common.files import hash_file
from configs import command_line as cli
from configs.settings import Accepts, Count, Settings, Text, Whole
from extras.benchmarks.harness import Report, Several, spread, table, time_ms
from extras.benchmarks.memory import process_bytes
from extras.benchmarks.trainers import write_random_latents
from latents.order import BatchOrder, read_batches
from latents.shards import KINDS, LatentDataset

CPU = torch.device("cpu")
OWN_MEMORY = ("smaps_rollup", "Private_Dirty")  # without files that the process has mapped


class LoaderSettings(Settings):
    path: Text | None = None  # null: shards are made for it and removed again
    format: Literal["native", "webdataset"] = "native"
    allow_pickle: bool = False
    num_items: Count = 131072  # of the shards that are made
    kind: Literal[KINDS] = "sample"
    batch_size: Count = 256
    num_workers: Several[Whole] = [0, 1, 2, 4]
    num_batches: Annotated[int, Accepts(lambda count: count >= 10, "a whole number of at least 10")] = 400  # of a round
    rounds: Count = 5
    large_items: Count = 1_300_000  # the size of the data set whose opening is timed: the same shards, named many times
    output: Text = "runs/benchmarks/loader"  # the files' name, without its ending


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, LoaderSettings)
    torch.set_num_threads(1)
    report = Report("Training batches", settings, CPU)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(settings.path or f"{folder}/shards")
        if settings.path is None:
            write_random_latents(path, settings.num_items, 256, settings.kind)
        is_native = settings.format == "native"
        dataset = LatentDataset(path)
        for file in dataset.files:  # have all of it in the page cache
            hash_file(file)
        batches = [measure_batches(dataset, settings, num_workers) for num_workers in settings.num_workers]
        opening = [measure_opening(dataset, Path(folder) / "large", settings)] if is_native else []
    lines = [*batches, *opening]
    report.save(lines, [table(batches), table(opening)], [report.machine, *lines])


def open_batches(dataset: LatentDataset, batch_size: int, num_steps: int, num_workers: int):
    order = BatchOrder(len(dataset), batch_size, 0, 0, num_steps, [slice(0, batch_size)], dataset.has_flips)
    return read_batches(dataset, order, num_workers, pin_memory=False)


def measure_batches(dataset: LatentDataset, settings: LoaderSettings, num_workers: int) -> dict[str, object]:
    """Latents per second of one process, after a tenth of a round to warm up."""
    warmup = settings.num_batches // 10
    before = process_bytes(*OWN_MEMORY)
    batches = open_batches(dataset, settings.batch_size, warmup + settings.rounds * settings.num_batches, num_workers)
    for _ in range(warmup):
        next(batches)

    def read_round() -> None:
        for _ in range(settings.num_batches):
            next(batches)

    rounds_ms = time_ms(read_round, settings.rounds, CPU)
    after = process_bytes(*OWN_MEMORY)
    batches.close()
    speeds = [1000 * settings.num_batches * settings.batch_size / ms for ms in rounds_ms]
    return {
        "num_workers": num_workers,
        **dict(zip(("latents_per_sec", "lowest", "highest"), map(round, spread(speeds)))),
        # Of all workers together, and the order of the epoch.
        "memory_mib": None if after is None else round((after - before) / 2**20, 1),
    }


def measure_opening(dataset: LatentDataset, folder: Path, settings: LoaderSettings) -> dict[str, object]:
    """From nothing to the first batch, of a folder that names the shards until it has as many items as were asked for."""
    folder.mkdir()
    num_items = num_shards = 0
    for file in itertools.cycle(dataset.files):
        (folder / f"{num_shards:06d}.safetensors").symlink_to(file.resolve())
        num_items, num_shards = num_items + len(LatentDataset(file)), num_shards + 1
        if num_items >= settings.large_items:
            break

    def open_and_read() -> None:
        large = LatentDataset(folder)
        large.fingerprint()
        next(open_batches(large, settings.batch_size, 1, 0))

    sec = [round(ms / 1000, 3) for ms in spread(time_ms(open_and_read, settings.rounds, CPU))]
    return {"num_items": num_items, "num_shards": num_shards, **dict(zip(("sec_to_first_batch", "lowest", "highest"), sec))}


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
