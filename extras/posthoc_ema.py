"""Post-hoc EMA, which allows users to choose the EMA length after training (EDM2, arXiv 2312.02696, section 3, appendix C).

During training, a run tracks weight averages with power-function profiles of a few lengths and saves snapshots of the averages.
An average of any length between the tracked lengths is a weighted sum of snapshots. Least squares over the profiles determines
the factors of the sum. The factors are then divided by their total, so that the result is an average.

After t steps, the weights of step k (counted from 1) have the share (k^(gamma+1) - (k-1)^(gamma+1)) / t^(gamma+1) in the average.
The length of a profile is the standard deviation of k / t in the limit of many steps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from checkpoints import store
from checkpoints.checkpoint import Checkpoint
from checkpoints.run import list_snapshots
from common.errors import UserError, as_user_error
from common.files import hash_bytes, hash_file, regular_file
from runtime.processes import on_main

log = logging.getLogger(__name__)

TRACKED_EMA = "tracked_ema"  # file name in checkpoints, which store averages in float32 (snapshots use float16)
MAX_ERROR = 0.1  # largest accepted profile error, relative to the norm of the profile
NUM_CELLS = 10_000  # number of cells into which least squares divides the run's steps


@cache
def gamma_from_length(length: float) -> float:
    """Solve length^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) for gamma, the exponent of the profile."""
    s = length**-2
    return np.roots([1, 7, 16 - s, 12 - s]).real.max()


def find_average(checkpoint: Checkpoint, weights: str, length: float) -> Average:
    """Return the EMA of this length for a checkpoint, which is not computed yet, from the averages at its step and before.

    Raises:
        UserError: If the run tracked no averages around this length or saved too few snapshots, or if `weights` is not `ema`.
    """
    folder = checkpoint.path
    if weights != "ema":
        raise UserError(f"sampling.ema_length={length:g} needs sampling.weights=ema, not {weights}")
    if f"{TRACKED_EMA}.safetensors" not in store.read_listed_hashes(folder):
        raise UserError(
            f"sampling.ema_length={length:g}: {folder} belongs to a run without train.ema_lengths, so it tracked no averages"
        )
    step, lengths = checkpoint.step, checkpoint.config.train.ema_lengths
    if not min(lengths) <= length <= max(lengths):
        raise UserError(f"sampling.ema_length={length:g} is outside the range that {folder} tracked: train.ema_lengths={lengths}")
    files = {t: file for t, file in list_snapshots(checkpoint.run_folder) if t < step}
    files[step] = folder / f"{TRACKED_EMA}.safetensors"
    factors, error = fit_profile([(t, x) for t in files for x in lengths], (step, length))
    if error > MAX_ERROR:
        reason = f"{folder} has {len(files) - 1} earlier snapshots, which give its profile with an error of {error:.0%}"
        remedy = "a run needs more (train.ema_snapshot_every)"
        raise UserError(f"sampling.ema_length={length:g}: {reason}, more than {MAX_ERROR:.0%}; {remedy}")
    return Average(checkpoint, length, (*files.values(),), (*factors,), error)


@dataclass(frozen=True)
class Average:
    """An EMA of a chosen length for a checkpoint. `load_network` accepts an `Average` instead of `ema` or `raw`.

    Attributes:
        files: Files of tracked averages, from which the EMA is computed.
        factors: Factors of the averages in the files: for each file, one for each length in train.ema_lengths.
        error: Error of the profile, relative to its norm.
    """

    checkpoint: Checkpoint
    length: float
    files: tuple[Path, ...]
    factors: tuple[float, ...]
    error: float

    @property
    def hash(self) -> str:
        """A hash of the files' names. Names of snapshots contain a hash of the content; the checkpoint has its own hash."""
        return hash_bytes(repr([file.name for file in self.files]).encode())[:8]

    def load(self) -> dict[str, Tensor]:
        """Load the averaged weights. The main process computes the averages and broadcasts them."""
        sums: dict[str, Tensor] = {}

        def add_up() -> list[str]:
            message = "EMA of length %g from averages at %d steps; error of its profile %.2g%%"
            log.info(message, self.length, len(self.files), 100 * self.error)
            lengths = [f"{length:g}" for length in self.checkpoint.config.train.ema_lengths]
            factors = dict(zip(product(self.files, lengths), self.factors))
            for file in self.files:
                with as_user_error(file), safe_open(regular_file(file), framework="pt") as f:
                    if file.parent != self.checkpoint.path and hash_file(file) != file.stem.rpartition("_")[2]:
                        raise ValueError("its hash differs from the one in its name; remove the file")
                    for key in f.keys():  # noqa: SIM118 (not a dict)
                        tracked, _, name = key.partition("/")
                        x = f.get_tensor(key)
                        sums.setdefault(name, torch.zeros(x.shape)).add_(x, alpha=factors[file, tracked])
            return list(sums)

        averages = {name: on_main(lambda name=name: sums[name]) for name in on_main(add_up)}
        return store.load_weights(self.checkpoint.path, "ema") | averages  # tensors that are not trained come from the EMA file


def fit_profile(tracked: list[tuple[int, float]], wanted: tuple[int, float]) -> tuple[list[float], float]:
    """Fit the wanted profile with a weighted sum of the tracked profiles. Return the factors and the relative L2 error.

    Each profile is specified as (number of steps, length).
    """
    steps = [t for t, _ in tracked]
    edges = np.unique([*np.linspace(0, wanted[0], NUM_CELLS + 1).round(), *steps])

    def profile(t: int, length: float) -> np.ndarray:
        return np.diff((np.minimum(edges, t) / t) ** (gamma_from_length(length) + 1)) / np.sqrt(np.diff(edges))

    basis, target = np.stack([profile(*key) for key in tracked], axis=1), profile(*wanted)
    factors = np.linalg.lstsq(basis, target, rcond=None)[0]
    factors /= factors.sum()
    return factors.tolist(), float(np.linalg.norm(basis @ factors - target) / np.linalg.norm(target))
