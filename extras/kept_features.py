"""Features of samples, stored next to the results of fid.py, so that a new metric, reference or sample count reuses them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

from common.files import hash_bytes, hash_file, remove_leftovers, write_file
from evaluations.features import Features, join_features
from runtime.processes import on_main
from sampling.evaluator import Evaluator
from sampling.sampler import ImageSampler

STRETCH = 5000  # seeds per file: the most that an interrupted evaluation loses


def read_kept(folder: Path, detectors: Sequence[str], seed: int, last: int) -> tuple[list[Features], dict[str, float]]:
    """(features of the seeds from `seed` to the end of its file or `last`, cost per image); empty if there is no file."""
    for file in folder.glob("[0-9]*.safetensors"):  # <first seed>-<seed after the last>-<hash of the content>, whole or absent
        first, end, digest = file.stem.split("-")
        if not int(first) <= seed < int(end) or hash_file(file) != digest:  # a damaged file is computed again
            continue
        with safe_open(file, framework="pt") as f:
            found: dict[str, dict[str, torch.Tensor]] = {detector: {} for detector in detectors}
            for key in f.keys():  # noqa: SIM118 (not a dict)
                detector, _, name = key.partition(".")
                found[detector][name] = f.get_slice(key)[seed - int(first) : last - int(first)]
            return [Features(detector, **tensors) for detector, tensors in found.items()], json.loads(f.metadata()["cost"])
    return [], {}


def write_kept(folder: Path, seed: int, features: Sequence[Features], cost: dict[str, float]) -> None:
    """Write the features of seeds from `seed` on, one entry of `features` per detector."""
    tensors = {f"{entry.detector}.{name}": x for entry in features for name, x in entry.tensors().items()}
    content = save(tensors, {"cost": json.dumps(cost)})
    write_file(folder / f"{seed:09d}-{seed + len(features[0]):09d}-{hash_bytes(content)}.safetensors", content)


def features_of_samples(
    evaluator: Evaluator,
    load_sampler: Callable[[], ImageSampler],
    labels: Mapping[int, int],
    name: str,
    folder: Path,
    depends_on: list,
) -> tuple[list[Features], dict[str, float]]:
    """`Evaluator.features_of_samples` for consecutive seeds, which samples only missing ones; and the cost per image.

    Args:
        load_sampler: called once, and only if features are missing.
        labels: seed -> class label.
        folder: gets a subfolder per value of `depends_on`.
        depends_on: everything that determines the features, besides seeds and detectors.
    """
    digest = hash_bytes(json.dumps([depends_on, [detector.weights_hash for detector in evaluator.detectors]]).encode())[:16]
    folder, detectors = folder / digest, [detector.name for detector in evaluator.detectors]
    on_main(lambda: remove_leftovers(folder))
    parts, seed, last, sampler = [], min(labels), max(labels) + 1, None
    while seed < last:
        features, cost = read_kept(folder, detectors, seed, last) if evaluator.accelerator.is_main_process else ([], {})
        count = on_main(lambda found=features: len(found[0]) if found else 0)
        if count == 0:
            sampler = sampler or load_sampler()
            count = min(STRETCH - seed % STRETCH, last - seed)  # to the end of its file
            missing = {s: labels[s] for s in range(seed, seed + count)}
            features, cost = evaluator.features_of_samples(sampler, missing, name=name), sampler.cost
            on_main(partial(write_kept, folder, seed, features, cost))
        parts.append(features)
        seed += count
    return join_features(parts), cost
