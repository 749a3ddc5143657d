"""Signals: training saves and leaves within seconds, whatever it does; nothing prints a traceback; the lock is free."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from commands import SIGNALS, TOOLS, Command, at_operation, expect, expect_same, run, send, tool, wait_until
from conftest import LAUNCH_2, REPOSITORY, finish, start
from filelock import lock_descriptor

from training import checkpoint as checkpoints

STOP_SEC = 5  # and one batch of sampling
BATCH_SEC = 0.5  # what `slowly` makes of a batch
SLOW = ["sample.num_samples=40", "sample.batch_size=1"]
EVAL = ["eval.every=3", "eval.num_samples=40", "eval.batch_size=1", "eval.num_steps=2", "sample.every=0"]
# What training does when the signal comes: (the call of it, its number, more settings, the steps of which one may be the last).
MOMENTS = {
    "while settings are read": ("setup.schema:check", 1, [], ()),
    "while the network is built": ("setup.build:build_network", 1, [], ()),
    "while the start is logged": ("training.run:RunFolder.log_start", 1, [], ()),
    "before the first step": ("training.trainer:Trainer.train_step", 1, [], (1,)),
    "in a step": ("training.trainer:Trainer.train_step", 4, [], (4,)),
    "in the last step": ("training.trainer:Trainer.train_step", 6, [], (6,)),
    "in a save": ("training.checkpoint:_write_files", 1, [], (2, 3)),
    "in a grid": ("sampling.sampler:ImageSampler.__call__", 2, SLOW, (3,)),
    "in an evaluation": ("sampling.sampler:ImageSampler.__call__", 2, EVAL, (3,)),
}
MOMENTS_OF_RANKS = ("in a step", "in a save", "in a grid", "in an evaluation")


def trials(inputs: Path, shared: Path) -> Iterator[tuple]:
    references = {}
    for more in ([], SLOW, EVAL):
        references[str(more)] = folder = shared / f"reference_{len(references)}"
        run(folder, tool("train", inputs, *more)).expect_whole()
    for moment, (call, number, more, steps) in MOMENTS.items():
        how = dict(call=call, number=number, arguments=tool("train", inputs, *more), steps=steps, reference=references[str(more)])
        for signum in SIGNALS:
            yield f"{signum.name} {moment}", partial(stop_training, signum, **how)
        yield f"two signals {moment}", partial(stop_at_once, **how)
    for name in TOOLS.keys() - {"train"}:
        run(shared / name, tool(name, inputs), at_operation(send(0), journal=shared / f"{name}.journal")).expect_whole()
        num_operations = len((shared / f"{name}.journal").read_text().splitlines())
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            for number in (1, num_operations // 2):
                how = dict(number=number, arguments=tool(name, inputs), reference=shared / name)
                yield f"{signum.name} to {name}, operation {number}", partial(stop_tool, signum, **how)
    for moment in MOMENTS_OF_RANKS:
        call, number, more, steps = MOMENTS[moment]
        for ranks in ([0], [1], [0, 1]):
            how = dict(call=call, number=number, arguments=tool("train", inputs, *more), steps=steps, ranks=ranks)
            yield f"SIGTERM to ranks {ranks} {moment}", partial(stop_ranks, signal.SIGTERM, **how)
    for signum in (*SIGNALS, signal.SIGKILL):
        for to in ("launcher", "rank") if signum in (signal.SIGTERM, signal.SIGKILL) else ("launcher",):
            yield f"{signum.name} to the {to} in a step", partial(stop_launched, signum, to, [])
    yield "SIGTERM to the launcher in an evaluation", partial(stop_launched, signal.SIGTERM, "launcher", LONG_EVAL)


# ----------------------------------------------------------------------------------------------------------------------
# One process, which sends the signals to itself.


def on_call(name: str, number: int, action: Callable[[], None]) -> Callable[[], None]:
    """For `run(before=...)`: at the number-th call of a function, act. Sampling takes BATCH_SEC per batch from then on."""

    def prepare() -> None:
        module, _, path = name.partition(":")
        *owners, attribute = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        function, count = getattr(owner, attribute), 0

        @functools.wraps(function)
        def wrapped(*args, **settings):
            nonlocal count
            count += 1
            if count == number:
                action()
            if attribute == "__call__" and count >= number:
                time.sleep(BATCH_SEC)
            return function(*args, **settings)

        setattr(owner, attribute, wrapped)

    return prepare


def stop_training(
    signum: int, folder: Path, rng: Random, call: str, number: int, arguments: list[str], steps: tuple[int, ...], reference: Path
) -> None:
    out, told = folder / "out", folder / "told"

    def tell_and_send() -> None:
        told.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signum)

    outcome = run(out, arguments, on_call(call, number, tell_and_send))
    took_sec = time.monotonic() - float(told.read_text())
    outcome.expect_no_traceback()
    if not steps:  # there is nothing to save yet
        expect(outcome.code in (0, 128 + signum, -signum), f"ended with {outcome.code}")
    else:
        expect(outcome.code == 0, f"ended with {outcome.code} instead of 0")
        expect_saved(out / "run", steps)
    expect(took_sec < STOP_SEC + BATCH_SEC, f"it was gone after {took_sec:.1f} s")
    run(out, arguments).expect_whole()
    expect_same(out, reference)


def stop_at_once(
    folder: Path, rng: Random, call: str, number: int, arguments: list[str], steps: tuple[int, ...], reference: Path
) -> None:
    """A second signal, more than a second later, ends a run that is stuck; a resume then loses no checkpoint."""

    def send_twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(3)

    out = folder / "out"
    outcome = run(out, arguments, on_call(call, number, send_twice))
    outcome.expect_no_traceback()
    expect(outcome.code in (128 + signal.SIGTERM, -signal.SIGTERM), f"ended with {outcome.code}")
    run(out, arguments).expect_whole()
    expect_same(out, reference)


def stop_tool(signum: int, folder: Path, rng: Random, number: int, arguments: list[str], reference: Path) -> None:
    out = folder / "out"
    outcome = run(out, arguments, at_operation(send(signum), number))
    outcome.expect_no_traceback()
    expect(outcome.code in (1, 128 + signum, -signum), f"ended with {outcome.code}")
    run(out, arguments).expect_whole()
    expect_same(out, reference)


def expect_saved(run_folder: Path, steps: tuple[int, ...]) -> None:
    newest, problems = checkpoints.find_newest(run_folder / "checkpoints")
    expect(newest is not None and checkpoints.step_of(newest) in steps, f"the newest checkpoint is {newest}, not of {steps}")
    expect(not problems, f"damaged checkpoints: {problems}")
    expect_unlocked(run_folder)


def expect_unlocked(run_folder: Path) -> None:
    with open(run_folder / ".lock", "ab") as file:
        expect(lock_descriptor(file.fileno(), blocking=False), "the run is still locked")


# ----------------------------------------------------------------------------------------------------------------------
# Two processes, without a launcher.


def start_ranks(out: Path, arguments: list[str], befores: list[Callable[[], None] | None]) -> list[Command]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ranks = [common | {"RANK": str(i), "LOCAL_RANK": str(i), "ACCELERATE_USE_CPU": "true"} for i in range(2)]
    return [Command(out, arguments, before, **environment) for before, environment in zip(befores, ranks)]


def stop_ranks(
    signum: int, folder: Path, rng: Random, call: str, number: int, arguments: list[str], steps: tuple[int, ...], ranks: list[int]
) -> None:
    # Both ranks are slowed, so that both calls come at the same time; rank 0 alone saves.
    told = folder / "told"

    def send_to_ranks() -> None:
        told.write_text(str(time.monotonic()))
        time.sleep(0.5)

    processes = start_ranks(
        folder / "out", arguments, [on_call(call, number, send_to_ranks), on_call(call, number, lambda: None)]
    )
    wait_until(lambda: told.exists() or not processes[0].is_running(), "the moment did not come")
    expect(told.exists(), "it ended before the moment came")
    for rank in ranks:
        os.kill(processes[rank].pid, signum)
    outcomes = [process.finish() for process in processes]
    took_sec = time.monotonic() - float(told.read_text())
    for rank, outcome in enumerate(outcomes):
        outcome.expect_no_traceback()
        expect(outcome.code == 0, f"rank {rank} ended with {outcome.code}")
    newest, _ = checkpoints.find_newest(folder / "out" / "run" / "checkpoints")
    # The ranks agree after a step, so one more may be done.
    latest = range(steps[0], steps[-1] + 3)
    expect(newest is not None and checkpoints.step_of(newest) in latest, f"the newest checkpoint is {newest}, not of {latest}")
    expect(took_sec < STOP_SEC + 2 * BATCH_SEC + 2, f"they were gone after {took_sec:.1f} s")
    for outcome in (process.finish() for process in start_ranks(folder / "out", arguments, [None, None])):
        outcome.expect_whole()


# ----------------------------------------------------------------------------------------------------------------------
# Two processes below `accelerate launch`.

LONG_EVAL = ["eval.every=3", "eval.num_samples=100000", "eval.batch_size=10", "eval.num_steps=4"]
LAUNCH_SEC = 120


def stop_launched(signum: int, to: str, more: list[str], folder: Path, rng: Random) -> None:
    arguments = tool(
        "train", Path(), f"output_dir={folder}", "train.num_steps=1000000", "checkpoint.every=1000", "sample.every=0"
    )
    launcher = start(*arguments, *more, launcher=LAUNCH_2, start_new_session=True)
    try:
        metrics = folder / "run" / "metrics.jsonl"
        ready = lambda: launcher.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") >= 3)  # noqa: E731
        wait_until(ready, "training did not start", LAUNCH_SEC)
        time.sleep(1)
        ranks = children_of(launcher.pid)
        expect(len(ranks) == 2, f"{len(ranks)} ranks run")
        os.kill(launcher.pid if to == "launcher" else ranks[1], signum)
        wait_until(lambda: not any(map(is_alive, ranks)), "ranks are still there after 20 s", 20)
        code, output = finish(launcher, 40)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    expect_unlocked(folder / "run")
    if signum != signal.SIGKILL:
        newest, problems = checkpoints.find_newest(folder / "run" / "checkpoints")
        expect(newest is not None and not problems, f"nothing was saved; the launcher printed\n{output[-1500:]}")
        frames = [line for line in output.splitlines() if f'File "{REPOSITORY}' in line and "site-packages" not in line]
        expect(not frames, f"a traceback\n{output[-1500:]}")  # the launcher prints one of its own for every signal


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
