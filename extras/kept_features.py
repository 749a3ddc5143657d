"""Features of samples, kept beside the results of fid.py: a new metric, reference or number of samples needs no new images."""

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

STRETCH = 5000  # seeds in a file: what a stopped evaluation loses at most


def read_kept(folder: Path, detectors: Sequence[str], seed: int, last: int) -> tuple[list[Features], dict[str, float]]:
    """Features of `seed` and of what follows in its file, before `last`, and the cost of an image; empty if none are kept."""
    for file in folder.glob("[0-9]*.safetensors"):  # <first seed>-<seed after the last>-<hash of the content>, whole or absent
        first, end, digest = file.stem.split("-")
        if not int(first) <= seed < int(end) or hash_file(file) != digest:  # what is damaged is made again
            continue
        with safe_open(file, framework="pt") as f:
            found: dict[str, dict[str, torch.Tensor]] = {detector: {} for detector in detectors}
            for key in f.keys():  # noqa: SIM118 (not a dict)
                detector, _, name = key.partition(".")
                found[detector][name] = f.get_slice(key)[seed - int(first) : last - int(first)]
            return [Features(one, **tensors) for one, tensors in found.items()], json.loads(f.metadata()["cost"])
    return [], {}


def keep(folder: Path, seed: int, features: Sequence[Features], cost: dict[str, float]) -> None:
    tensors = {f"{one.detector}.{name}": x for one in features for name, x in one.tensors().items()}
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
    """`Evaluator.features_of_samples` of consecutive seeds, sampled where they are not kept; and the cost of an image.

    Args:
        load_sampler: called once, and only if features are missing.
        folder: with a folder for each content of `depends_on`: all that features depend on, beside the detectors' weights.
    """
    digest = hash_bytes(json.dumps([depends_on, [one.weights_hash for one in evaluator.detectors]]).encode())[:16]
    folder, detectors = folder / digest, [one.name for one in evaluator.detectors]
    on_main(lambda: remove_leftovers(folder))
    parts, seed, last, sampler = [], min(labels), max(labels) + 1, None
    while seed < last:
        features, cost = read_kept(folder, detectors, seed, last) if evaluator.accelerator.is_main_process else ([], {})
        count = on_main(lambda found=features: len(found[0]) if found else 0)
        if count == 0:
            sampler = sampler or load_sampler()
            count = min(STRETCH - seed % STRETCH, last - seed)  # to the end of its file
            missing = {one: labels[one] for one in range(seed, seed + count)}
            features, cost = evaluator.features_of_samples(sampler, missing, name=name), sampler.cost
            on_main(partial(keep, folder, seed, features, cost))
        parts.append(features)
        seed += count
    return join_features(parts), cost
