"""Post-hoc EMA (EDM2, arXiv 2312.02696, section 3 and appendix C): the length of the average is chosen after training.

During training, a run tracks averages with power-function profiles of a few lengths and stores snapshots of them. An average of
any length between them is a weighted sum of snapshots. Least squares over the profiles gives the factors, which are then divided
by their sum to make it an average.

After t steps, a profile gives the weights of step k (counted from 1) the share (k^(gamma+1) - (k-1)^(gamma+1)) / t^(gamma+1).
A length is the standard deviation of k / t under this profile, in the limit of many steps.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from checkpoints import store
from common.errors import UserError, reading
from common.files import hash_bytes, hash_file
from runtime.processes import on_main

log = logging.getLogger(__name__)

FILE = "tracked_ema"  # in a checkpoint, with averages in float32 (float16 in snapshots)
SNAPSHOTS = "ema_snapshots"
MAX_ERROR = 0.1  # largest accepted error of a profile, relative to its norm
NUM_CELLS = 10_000  # cells over the steps of the run, on which least squares compares profiles


@cache
def gamma_from_length(length: float) -> float:
    """Solve length^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) for gamma, the exponent of a profile."""
    s = length**-2
    return np.roots([1, 7, 16 - s, 12 - s]).real.max()


def list_snapshots(run: Path | None) -> dict[int, Path]:
    """List the snapshots, sorted: step -> file. A file's name holds its step and the hash of its content."""
    pattern = re.compile(r"step_(\d{7,})_[0-9a-f]{32}\.safetensors")
    files = (run / SNAPSHOTS).glob("*") if run else ()
    return dict(sorted((int(match[1]), file) for file in files if (match := pattern.fullmatch(file.name))))


def open_profiles(folder: Path, length: float) -> tuple[dict[int, Path], list[float], list[float], float]:
    """Return step -> file of averages up to the checkpoint's step, their lengths, and the factors and error of `solve`."""
    step, lengths = store.read_step(folder), store.read_config(folder)["train"]["ema_lengths"]
    files = {t: file for t, file in list_snapshots(store.find_run(folder)).items() if t < step}
    files[step] = folder / f"{FILE}.safetensors"
    return files, lengths, *solve([(t, x) for t in files for x in lengths], (step, length))


def check_length(folder: Path, weights: str, length: float) -> str:
    """Check that a verified checkpoint can give an EMA of this length.

    Returns:
        A hash of the snapshots that it is computed from.

    Raises:
        UserError: the run tracked no averages around this length or has too few snapshots, or `weights` is not `ema`.
    """
    if weights != "ema":
        raise UserError(f"ema_length={length:g} needs weights=ema, not {weights}")
    if not (folder / f"{FILE}.safetensors").exists():
        raise UserError(f"ema_length={length:g}: {folder} belongs to a run without train.ema_lengths, which track averages")
    files, lengths, _, error = open_profiles(folder, length)
    if not min(lengths) <= length <= max(lengths):
        raise UserError(f"ema_length={length:g} is outside the range that {folder} tracked: train.ema_lengths={lengths}")
    if error > MAX_ERROR:
        found = f"{folder} has {len(files) - 1} earlier snapshots, which give its profile with an error of {error:.0%}"
        raise UserError(f"ema_length={length:g}: {found}, more than {MAX_ERROR:.0%}; a run needs more (train.ema_snapshot_every)")
    return hash_bytes(repr([file.name for file in files.values()]).encode())[:8]


@dataclass(frozen=True)
class Average:
    """An EMA of this length for a verified checkpoint. `load_network` accepts it instead of `ema` or `raw`."""

    folder: Path
    length: float

    def load(self) -> dict[str, Tensor]:
        """Load the network's weights. Rank 0 computes them for all ranks."""
        sums: dict[str, Tensor] = {}

        def add_up() -> list[str]:
            files, lengths, factors, error = open_profiles(self.folder, self.length)
            words = "EMA of length %g from averages at %d steps; error of its profile %.2g%%"
            log.info(words, self.length, len(files), 100 * error)
            keys = [f"{length:g}" for length in lengths]
            for i, file in enumerate(files.values()):
                with reading(file), safe_open(file, framework="pt") as f:
                    if file.parent != self.folder and hash_file(file) != file.stem.rpartition("_")[2]:
                        raise ValueError("its hash differs from the one in its name; remove the file")
                    for key in f.keys():  # noqa: SIM118 (not a dict)
                        tracked, _, name = key.partition("/")
                        x = f.get_tensor(key)
                        sums.setdefault(name, torch.zeros(x.shape)).add_(x, alpha=factors[i * len(keys) + keys.index(tracked)])
            return list(sums)

        averages = {name: on_main(lambda name=name: sums[name]) for name in on_main(add_up)}
        return store.load_weights(self.folder, "ema") | averages  # untrained tensors come from the EMA


def solve(tracked: list[tuple[int, float]], wanted: tuple[int, float]) -> tuple[list[float], float]:
    """Find factors for a weighted sum of tracked profiles that is nearest to the wanted profile, and its relative L2 error.

    A profile is given as (steps, length).
    """
    steps = [t for t, _ in tracked]
    edges = np.unique([*np.linspace(0, wanted[0], NUM_CELLS + 1).round(), *steps])

    def profile(t: int, length: float) -> np.ndarray:
        return np.diff((np.minimum(edges, t) / t) ** (gamma_from_length(length) + 1)) / np.sqrt(np.diff(edges))

    basis, target = np.stack([profile(*key) for key in tracked], axis=1), profile(*wanted)
    factors = np.linalg.lstsq(basis, target, rcond=None)[0]
    factors /= factors.sum()
    return factors.tolist(), float(np.linalg.norm(basis @ factors - target) / np.linalg.norm(target))
