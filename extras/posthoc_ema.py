"""Post-hoc EMA (EDM2, arXiv 2312.02696, section 3 and appendix C): the length of the average is chosen after training.

While a run trains, it tracks averages of a few lengths with power-function profiles, and stores snapshots of them. An average of
any length between is their weighted sum, whose weights are found by least squares over the profiles.

After t steps, a profile gives the weights of step k (counted from 1) the share (k^(gamma+1) - (k-1)^(gamma+1)) / t^(gamma+1).
A length is the standard deviation of k / t under this profile, in the limit of many steps.
"""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from common.errors import UserError
from common.files import hash_bytes, write_file
from sampling.processes import on_main
from training import checkpoint as checkpoints
from training.ema import EMA
from training.run import RunFolder
from training.sharding import full_tensor, local_shard
from training.trainer import Hook, Trainer

log = logging.getLogger(__name__)

FILE = "tracked_ema"  # of a checkpoint, with float32 averages; a snapshot has them in float16
SNAPSHOTS = "ema_snapshots"
NUM_CELLS = 10_000  # that the steps of a run are divided into, for the least squares


def gamma_of(length: float) -> float:
    """The exponent of a profile, from length^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3))."""
    s = length**-2
    return np.roots([1, 7, 16 - s, 12 - s]).real.max()


class TrackedEMA(EMA):
    """An EMA that also tracks averages of the given lengths: a foreach-lerp per length and step, and 4 bytes per parameter."""

    def __init__(self, net: nn.Module, decay: float, lengths: list[float]):
        super().__init__(net, decay)
        self.lengths = lengths

    @cached_property
    def tracked(self) -> dict[float, dict[str, Tensor]]:
        """By length and name. Made when it is first used, once the weights are on their device and sharded."""
        return {length: {name: torch.zeros_like(one) for name, (one, _) in self._pairs.items()} for length in self.lengths}

    @torch.no_grad()
    def update(self, step: int) -> None:
        super().update(step)
        weights = [local_shard(p) for _, p in self._pairs.values()]
        for length, averages in self.tracked.items():
            new = 1 - (step / (step + 1)) ** (gamma_of(length) + 1)  # 1 in the first step
            torch._foreach_lerp_([local_shard(average) for average in averages.values()], weights, new)

    def states(self) -> dict[str, dict[str, Tensor]]:
        tracked = {_key(length, name): x for length, averages in self.tracked.items() for name, x in averages.items()}
        return super().states() | {FILE: tracked}


def _key(length: float, name: str) -> str:
    return f"{length:g}/{name}"


class Snapshots(Hook):
    """Stores the tracked averages in <run>/ema_snapshots/step_N.safetensors, whole or not at all; nothing removes them."""

    def __init__(self, run: RunFolder, every: int):
        self.run, self.every = run, every

    def __call__(self, trainer: Trainer) -> None:
        file = self.run.path / SNAPSHOTS / f"{checkpoints.folder_name(trainer.step)}.safetensors"
        if trainer.step == trainer.first_step and on_main(file.exists):
            return
        is_main, tensors = trainer.accelerator.is_main_process, {}
        for name, average in trainer.ema.states()[FILE].items():
            full = full_tensor(average)  # every process helps to gather it
            if is_main:
                tensors[name] = full.half().cpu()
        on_main(lambda: write_file(file, save(tensors)))


def find_snapshots(folder: Path) -> dict[int, Path]:
    """The snapshots before a checkpoint's step, by step."""
    run, step = checkpoints.run_of(folder), checkpoints.step_of(folder)
    files = sorted((run / SNAPSHOTS).glob("step_*.safetensors")) if run else []
    steps = {int(file.stem.removeprefix("step_")): file for file in files}
    return {before: file for before, file in steps.items() if before < step}


def check_length(folder: Path, weights: str, length: float) -> str:
    """Make sure that a verified checkpoint can give an EMA of this length.

    Returns:
        What tells it from one made of other snapshots.

    Raises:
        UserError: the run tracked no averages, or none around this length; `weights` are not the EMA.
    """
    lengths = checkpoints.read_config(folder)["train"]["ema_lengths"]
    if weights != "ema":
        raise UserError(f"ema_length={length:g} needs weights=ema, not {weights}")
    if not (folder / f"{FILE}.safetensors").exists():
        raise UserError(
            f"ema_length={length:g}: {folder} is of a run without train.ema_lengths, which tracks averages from step 1"
        )
    if not min(lengths) <= length <= max(lengths):
        raise UserError(f"ema_length={length:g} is not between those that {folder} tracked: train.ema_lengths={lengths}")
    return hash_bytes(repr(list(find_snapshots(folder))).encode())[:8]


def average_of(folder: Path, length: float) -> dict[str, Tensor]:
    """The weights of a verified checkpoint's network with an EMA of this length, put together; see `check_length`."""
    step, lengths = checkpoints.step_of(folder), checkpoints.read_config(folder)["train"]["ema_lengths"]
    files = find_snapshots(folder) | {step: folder / f"{FILE}.safetensors"}
    factors, error = solve([(t, one) for t in files for one in lengths], (step, length))
    log.info("EMA of length %g from averages at %d steps; its profile is met to %.2g%%", length, len(files), 100 * error)
    weights = checkpoints.load_weights(folder, "ema")  # also what is not trained
    sums: dict[str, Tensor] = {}
    for i, file in enumerate(files.values()):
        with checkpoints.reading(file), safe_open(file, framework="pt") as f:
            for key in f.keys():  # noqa: SIM118 (not a dict)
                one, _, name = key.partition("/")
                factor = factors[i * len(lengths) + [f"{x:g}" for x in lengths].index(one)]
                sums.setdefault(name, torch.zeros(weights[name].shape)).add_(f.get_tensor(key), alpha=factor)
    return weights | sums


def solve(tracked: list[tuple[int, float]], wanted: tuple[int, float]) -> tuple[list[float], float]:
    """Factors whose sum of tracked profiles is nearest to the wanted one, and the distance left, relative to its norm.

    A profile is (steps, length); distances are those in L2, over NUM_CELLS cells of the run.
    """
    steps = [t for t, _ in tracked]
    edges = np.unique([*np.linspace(0, wanted[0], NUM_CELLS + 1).round(), *steps])

    def profile(t: int, length: float) -> np.ndarray:
        return np.diff((np.minimum(edges, t) / t) ** (gamma_of(length) + 1)) / np.sqrt(np.diff(edges))

    basis, target = np.stack([profile(*one) for one in tracked], axis=1), profile(*wanted)
    factors = np.linalg.lstsq(basis, target, rcond=None)[0]
    return factors.tolist(), float(np.linalg.norm(basis @ factors - target) / np.linalg.norm(target))
