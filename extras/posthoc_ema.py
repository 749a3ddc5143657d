"""Post-hoc EMA (EDM2, arXiv 2312.02696, section 3 and appendix C): the length of the average is chosen after training.

While a run trains, it tracks averages of a few lengths with power-function profiles, and stores snapshots of them. An average of
any length between is their weighted sum, whose weights are found by least squares over the profiles.

After t steps, a profile gives the weights of step k (counted from 1) the share (k^(gamma+1) - (k-1)^(gamma+1)) / t^(gamma+1).
A length is the standard deviation of k / t under this profile, in the limit of many steps.
"""

from __future__ import annotations

import logging
import re
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from checkpoints import store
from checkpoints.run import RunFolder
from common.errors import UserError, reading
from common.files import hash_bytes, hash_file, write_file
from runtime.processes import on_main
from training.ema import EMA
from training.sharding import full_tensor, local_shard
from training.trainer import Hook, Trainer

log = logging.getLogger(__name__)

FILE = "tracked_ema"  # of a checkpoint, with float32 averages; a snapshot has them in float16
SNAPSHOTS = "ema_snapshots"
MAX_ERROR = 0.1  # of a profile, relative to its norm: an average that is further off is refused
NUM_CELLS = 10_000  # that the steps of a run are divided into, for the least squares


@cache
def gamma_of(length: float) -> float:
    """The exponent of a profile, from length^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3))."""
    s = length**-2
    return np.roots([1, 7, 16 - s, 12 - s]).real.max()


class TrackedEMA(EMA):
    """An EMA that also tracks averages of the given lengths: a foreach-lerp per length and step, and 4 bytes per parameter."""

    def __init__(self, net: nn.Module, decay: float, lengths: list[float]):
        if len({f"{length:g}" for length in lengths}) < len(lengths):
            raise UserError(f"train.ema_lengths={lengths} names a length twice")
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
        tracked = {f"{length:g}/{name}": x for length, averages in self.tracked.items() for name, x in averages.items()}
        return super().states() | {FILE: tracked}


class Snapshots(Hook):
    """Stores the tracked averages in <run>/ema_snapshots, whole or not at all; removes those after the step of a resume."""

    def __init__(self, run: RunFolder, every: int):
        self.run, self.every, self._is_first = run, every, True

    def __call__(self, trainer: Trainer) -> None:
        is_main, tensors = trainer.accelerator.is_main_process, {}
        if trainer.step == trainer.first_step and on_main(lambda: trainer.step in list_snapshots(self.run.path)):
            return
        for name, average in trainer.ema.states()[FILE].items():
            full = full_tensor(average)  # every process helps to gather it
            if is_main:
                tensors[name] = full.half().cpu()
        on_main(lambda: self._write(trainer, tensors))
        self._is_first = False

    def _write(self, trainer: Trainer, tensors: dict[str, Tensor]) -> None:
        if wrong := [name for name, average in tensors.items() if not average.isfinite().all()]:
            raise UserError(f"step {trainer.step}: the tracked average {wrong[0]} is not finite in float16; nothing was written")
        content = save(tensors)
        for step, file in list_snapshots(self.run.path).items() if self._is_first else ():
            if step > trainer.first_step:  # of what was trained before a resume from an earlier step
                file.unlink()
        name = f"{store.folder_name(trainer.step)}_{hash_bytes(content)}.safetensors"
        write_file(self.run.path / SNAPSHOTS / name, content)


def list_snapshots(run: Path | None) -> dict[int, Path]:
    """By step. A name ends with the hash of the content."""
    found = re.compile(r"step_(\d{7,})_[0-9a-f]{32}\.safetensors")
    names = [(match, file) for file in (run / SNAPSHOTS).glob("*") if (match := found.fullmatch(file.name))] if run else []
    return dict(sorted((int(match[1]), file) for match, file in names))


def open_profiles(folder: Path, length: float) -> tuple[dict[int, Path], list[float], list[float], float]:
    """The files with averages up to a checkpoint's step, by step, their lengths, and what `solve` gives for this length."""
    step, lengths = store.step_of(folder), store.read_config(folder)["train"]["ema_lengths"]
    files = {t: file for t, file in list_snapshots(store.run_of(folder)).items() if t < step}
    files[step] = folder / f"{FILE}.safetensors"
    return files, lengths, *solve([(t, one) for t in files for one in lengths], (step, length))


def check_length(folder: Path, weights: str, length: float) -> str:
    """Make sure that a verified checkpoint can give an EMA of this length.

    Returns:
        What tells it from one made of other snapshots.

    Raises:
        UserError: the run tracked no averages, none around this length, or has too few snapshots; `weights` are not the EMA.
    """
    if weights != "ema":
        raise UserError(f"ema_length={length:g} needs weights=ema, not {weights}")
    if not (folder / f"{FILE}.safetensors").exists():
        raise UserError(f"ema_length={length:g}: {folder} is of a run without train.ema_lengths, which track averages")
    files, lengths, _, error = open_profiles(folder, length)
    if not min(lengths) <= length <= max(lengths):
        raise UserError(f"ema_length={length:g} is not between those that {folder} tracked: train.ema_lengths={lengths}")
    if error > MAX_ERROR:
        found = f"{len(files) - 1} snapshots before it in ema_snapshots/ of its run meet the profile only to {error:.0%}"
        raise UserError(f"ema_length={length:g}: for {folder}, the {found}; a run needs more (train.ema_snapshot_every)")
    return hash_bytes(repr([file.name for file in files.values()]).encode())[:8]


def average_of(folder: Path, length: float) -> dict[str, Tensor]:
    """The weights of a verified checkpoint's network with an EMA of this length, put together by one process for all."""
    sums: dict[str, Tensor] = {}

    def add_up() -> list[str]:
        files, lengths, factors, error = open_profiles(folder, length)
        log.info("EMA of length %g from averages at %d steps; its profile is met to %.2g%%", length, len(files), 100 * error)
        for i, file in enumerate(files.values()):
            with reading(file), safe_open(file, framework="pt") as f:
                if file.parent != folder and hash_file(file) != file.stem.rpartition("_")[2]:
                    raise ValueError("it was altered: its hash is not the one in its name; remove it")
                for key in f.keys():  # noqa: SIM118 (not a dict)
                    one, _, name = key.partition("/")
                    factor = factors[i * len(lengths) + [f"{x:g}" for x in lengths].index(one)]
                    x = f.get_tensor(key)
                    sums.setdefault(name, torch.zeros(x.shape)).add_(x, alpha=factor)
        return list(sums)

    names = on_main(add_up)
    averages = {name: on_main(lambda name=name: sums[name]) for name in names}
    return store.load_weights(folder, "ema") | averages  # the former also has what is not trained


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
