"""The same command twice in one folder at the same time: one works, the other says so in one line, or both are right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

from commands import TOOLS, Command, expect, expect_same, run, tool

NUM_EACH = 4


def trials(inputs: Path, shared: Path) -> Iterator[tuple]:
    for name in TOOLS:
        usual_sec = run(shared / name, tool(name, inputs)).wall_sec
        for number in range(NUM_EACH):
            yield f"{name} {number}", partial(start_two, name, inputs, shared / name, usual_sec)


def start_two(name: str, inputs: Path, reference: Path, usual_sec: float, folder: Path, rng: Random) -> None:
    out, arguments = folder / "out", tool(name, inputs)
    commands = [Command(out, arguments)]
    time.sleep(rng.choice([0, rng.uniform(0, usual_sec / 2)]))
    commands.append(Command(out, arguments))
    outcomes = [command.finish() for command in commands]
    for outcome, command in zip(outcomes, commands):
        Command.last = command
        outcome.expect_no_traceback()
        if outcome.code != 0:
            outcome.expect_one_line()
            expect("another process" in outcome.output or "exists" in outcome.output, "it does not say why it stopped")
    expect(any(outcome.code == 0 for outcome in outcomes), "neither did the work")
    expect_same(out, reference)  # nothing was computed twice
