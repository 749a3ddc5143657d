"""How fast training batches come from latent shards, what a worker takes, and how long a data set takes to open.

    python -m benchmarks.loader                                  # 131,072 latents of 4x32x32 in float16, made for it
    python -m benchmarks.loader path=latents/in256 num_workers=[0,4]
    python -m benchmarks.loader format=webdataset path=imagenet256_latents_wds

Batches are shuffled over the whole data set as in training. The data are read once before, so that what is measured is the
reader and not the disk. It prints a JSON line per measurement, and writes <output>.jsonl and <output>.md.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import prepare_latents
from benchmarks.report import describe_machine, emit, markdown_table, parse_settings, prepare_output, write_report
from latents.order import BatchOrder, read_batches
from latents.shards import KINDS, LatentDataset
from latents.webdataset import TarLatents
from setup.schema import TRAIN_KEYS, choice, one_or_list, open_latents, or_null, text, true_or_false, whole

DEFAULTS = {
    "path": None,  # null: shards are made for it and removed again
    "format": "native",
    "allow_pickle": False,
    "num_items": 131072,  # of the shards that are made
    "kind": "sample",
    "batch_size": 256,
    "num_workers": [0, 1, 2, 4],
    "num_batches": 400,  # of a round
    "rounds": 5,
    "large_items": 1_300_000,  # the size of the data set whose opening is timed: the same shards, named many times
    "output": "runs/benchmarks/loader",  # the files' name, without its ending
}
KEYS = {
    "path": or_null(text()),
    "format": TRAIN_KEYS["data.format"],
    "allow_pickle": true_or_false(),
    "num_items": whole(1),
    "kind": choice(*KINDS),
    "batch_size": whole(1),
    "num_workers": one_or_list(whole(0)),
    "num_batches": whole(10),
    "rounds": whole(1),
    "large_items": whole(1),
    "output": text(),
}


def main(arguments: Sequence[str]) -> None:
    settings = parse_settings(arguments, DEFAULTS, KEYS)
    prepare_output(settings["output"])
    torch.set_num_threads(1)
    machine = describe_machine(torch.device("cpu")) | {"settings": settings}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(settings["path"] or Path(folder) / "shards")
        if settings["path"] is None:
            prepare_latents.synthetic(str(path), settings["num_items"], kind=settings["kind"])
        keys = {"allow_pickle": settings["allow_pickle"]} if settings["format"] == "webdataset" else {}
        dataset = open_latents(path, settings["format"], **keys)
        read_once(dataset)
        batches = [measure_batches(dataset, settings, num_workers) for num_workers in settings["num_workers"]]
        opening = [measure_opening(dataset, Path(folder) / "large", settings)] if settings["format"] == "native" else []
    write_report(
        settings["output"], "Training batches", machine, [*batches, *opening], [markdown_table(batches), markdown_table(opening)]
    )
    emit(**machine)
    for line in (*batches, *opening):
        emit(**line)


def read_once(dataset: LatentDataset | TarLatents) -> None:
    """Have the whole data set in the page cache."""
    for start in range(0, len(dataset), 4096):
        indices = np.arange(start, min(start + 4096, len(dataset)))
        dataset.fetch(indices, np.zeros(len(indices), dtype=bool))


def measure_batches(dataset: LatentDataset | TarLatents, settings: dict, num_workers: int) -> dict[str, object]:
    """Latents per second of one process, after a tenth of a round to warm up."""
    batch_size, num_batches, rounds = settings["batch_size"], settings["num_batches"], settings["rounds"]
    warm_up = num_batches // 10
    num_steps = warm_up + rounds * num_batches
    order = BatchOrder(len(dataset), batch_size, 0, 0, num_steps, [slice(0, batch_size)], dataset.has_flips)
    before_mib = own_memory_mib()
    batches = read_batches(dataset, order, num_workers, pin_memory=False)
    for _ in range(warm_up):
        next(batches)
    speeds = []
    for _ in range(rounds):
        start_sec = time.perf_counter()
        for _ in range(num_batches):
            next(batches)
        speeds.append(num_batches * batch_size / (time.perf_counter() - start_sec))
    memory_mib = own_memory_mib() - before_mib
    batches.close()
    return {
        "num_workers": num_workers,
        "latents_per_sec": round(statistics.median(speeds)),
        "lowest": round(min(speeds)),
        "highest": round(max(speeds)),
        "memory_mib": round(memory_mib, 1),  # of all workers together, and the order of the epoch
    }


def own_memory_mib() -> float:
    """Memory of this process, without files that it has mapped (Linux; elsewhere NaN)."""
    file = Path("/proc/self/smaps_rollup")
    if not file.exists():
        return float("nan")
    fields = {line.split()[0]: int(line.split()[1]) for line in file.read_text().splitlines()[1:]}
    return fields["Private_Dirty:"] / 1024


def measure_opening(dataset: LatentDataset, folder: Path, settings: dict) -> dict[str, object]:
    """From nothing to the first batch, of a folder that names the shards until it has as many items as were asked for."""
    folder.mkdir()
    num_items = number = 0
    items_of = [len(LatentDataset(file)) for file in dataset.files]
    while num_items < settings["large_items"]:
        which = number % len(dataset.files)
        (folder / f"{number:06d}.safetensors").symlink_to(dataset.files[which].resolve())
        num_items, number = num_items + items_of[which], number + 1
    times = []
    for _ in range(settings["rounds"]):
        start_sec = time.perf_counter()
        large = LatentDataset(folder)
        large.fingerprint()
        order = BatchOrder(len(large), settings["batch_size"], 0, 0, 1, [slice(0, settings["batch_size"])], large.has_flips)
        next(read_batches(large, order, 0, pin_memory=False))
        times.append(time.perf_counter() - start_sec)
    return {
        "num_items": num_items,
        "num_shards": number,
        "sec_to_first_batch": round(statistics.median(times), 3),
        "lowest": round(min(times), 3),
        "highest": round(max(times), 3),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
