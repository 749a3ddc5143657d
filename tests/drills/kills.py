"""A command that was killed loses nothing, and the same command again leaves what an undisturbed run leaves."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

from commands import TOOLS, Command, at_operation, die, expect, expect_same, run, tool

from training import checkpoint as checkpoints

NUM_RANDOM = 15


def trials(inputs: Path, shared: Path) -> Iterator[tuple]:
    for name in TOOLS:
        journal, arguments = shared / f"{name}.journal", tool(name, inputs)
        whole = run(shared / name, arguments, at_operation(die, journal=journal))
        whole.expect_whole()
        lines = journal.read_text().splitlines()
        how = dict(arguments=arguments, reference=shared / name)
        for number, line in enumerate(lines, start=1):
            yield f"{name}, operation {number} of {len(lines)}: {line}", partial(kill_at_operation, number, **how)
        if name == "train":
            for number in range(NUM_RANDOM):
                yield f"{name}, random times {number}", partial(kill_at_random_times, whole.wall_sec, **how)


def kill_at_operation(number: int, folder: Path, rng: Random, arguments: list[str], reference: Path) -> None:
    journal = folder / "journal"
    run(folder / "out", arguments, at_operation(die, number, journal=journal))
    expect_nothing_lost(folder / "out", journal.read_text().splitlines())
    expect_finished(folder / "out", arguments, reference)


def expect_finished(out: Path, arguments: list[str], reference: Path) -> None:
    if arguments[1] == "reference":  # it has no folder of its own to lock, where it could remove what a kill has left
        for leftover in out.glob(".tmp_*"):
            leftover.unlink()
        if (out / "ref.npz").exists():  # it was finished, and the command would refuse to write it again
            return expect_same(out, reference)
    run(out, arguments).expect_whole()
    kept = {path.name for path in reference.glob("run/checkpoints/*")}
    for path in out.glob("run/checkpoints/step_*"):
        if path.name not in kept:  # the kill came before an old checkpoint was deleted
            checkpoints.verify(path)
            shutil.rmtree(path)
    expect_same(out, reference)


def expect_nothing_lost(out: Path, journal: list[str]) -> None:
    """The newest checkpoint that was renamed to its final name before the last operation is there, and verifies."""
    final = [line.split()[-1] for line in journal[:-1] if line.startswith("rename ")]
    steps = [Path(path).name for path in final if Path(path).name.startswith("step_")]
    if steps and Path(final[-1]).suffix != ".png":
        newest, _ = checkpoints.find_newest(out / "run" / "checkpoints")
        expect(newest is not None and newest.name >= max(s for s in steps if "." not in s), f"{steps} were saved, now {newest}")


def kill_at_random_times(usual_sec: float, folder: Path, rng: Random, arguments: list[str], reference: Path) -> None:
    """Three kills, then an end."""
    for _ in range(3):
        command = Command(folder / "out", arguments)
        time.sleep(rng.uniform(0.2, 1) * usual_sec)
        command.finish(limit_sec=0)
    expect_finished(folder / "out", arguments, reference)
