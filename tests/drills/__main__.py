"""Drills: kill, damage, fill the disk, signal and deceive the commands of the project, and see that nothing is lost.

    python tests/drills                              # all of them; a table to the terminal
    python tests/drills only=kills,disk jobs=4       # some; trials that run at the same time (default 2)
    python tests/drills only=kills like="operation 7" seed=3     # trials whose name holds this; what is random
    python tests/drills table=table.md               # also write the table to a file

A drill is a module with `trials(inputs, shared)`, which yields (name, function) pairs. The function takes an empty folder and a
random.Random, and raises Failure when a command did not end as it has to. The folder of a trial that failed is kept.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork
os.environ["ACCELERATE_USE_CPU"] = "true"
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

import torch  # noqa: E402

torch.set_num_threads(1)

from commands import TOOLS, Command, Failure, import_what_commands_import, tool  # noqa: E402
from inputs import make_inputs  # noqa: E402

import dit  # noqa: E402
from common.files import markdown_table  # noqa: E402
from common.progress import progress_bar  # noqa: E402

DRILLS = {
    "kills": "SIGKILL at every file operation and at random times; then the same command again",
    "corruption": "checkpoints that are damaged, or whole by their hashes and wrong",
    "disk": "a full or failing disk under every file that is written",
    "interruptions": "SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2 to processes, launchers and ranks",
    "hostile": "files and settings made to execute, to escape, to exhaust or to confuse",
    "together": "the same command twice at the same time",
}
TAIL_LINES = 12
TRIALS: list[tuple] = []  # (drill, name, function), for the processes that are forked below


def main(only: str = ",".join(DRILLS), like: str = "", seed: str = "0", jobs: str = "2", table: str = "") -> int:
    start_sec, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="drills_"))
    dit.BACKBONES["DiT-XS/2"] = (12, 24, 3, 2)  # narrow: checkpoints of 1 MB are copied hundreds of times
    make_inputs(root / "inputs")
    import_what_commands_import(root, [tool(name, root / "inputs") for name in TOOLS])
    for drill in only.split(","):
        shared = root / f"{drill}_shared"
        shared.mkdir()
        found = importlib.import_module(drill).trials(root / "inputs", shared)
        TRIALS.extend((drill, name, function) for name, function in found if like in name)
    sys.stderr.write(f"{len(TRIALS)} trials in {root}\n")
    counts = {drill: [0, 0] for drill in only.split(",")}
    with multiprocessing.get_context("fork").Pool(int(jobs)) as pool:
        work = [(number, seed, str(root)) for number in range(len(TRIALS))]
        results = pool.imap_unordered(attempt, work)
        for number, failure in progress_bar(results, total=len(work), unit="trial"):
            drill, name, _ = TRIALS[number]
            counts[drill][0] += 1
            counts[drill][1] += bool(failure)
            if failure:
                sys.stderr.write(f"FAILED {drill}: {name}\n{failure}\n")
    rows = [[drill, DRILLS[drill], str(count), str(failed)] for drill, (count, failed) in counts.items()]
    text = markdown_table(["drill", "what happens", "trials", "failures"], rows)
    sys.stdout.write(f"{text}\n{time.monotonic() - start_sec:.0f} s\n")
    if table:
        Path(table).write_text(text)
    num_failed = sum(failed for _, failed in counts.values())
    if not num_failed:
        shutil.rmtree(root)
    return num_failed


def attempt(work: tuple[int, str, str]) -> tuple[int, str]:
    """(number of the trial, why it failed; empty: it did not)."""
    number, seed, root = work
    drill, name, function = TRIALS[number]
    folder = Path(root) / f"{drill}_{number}"
    folder.mkdir()
    Command.last = None
    try:
        function(folder, random.Random(f"{seed} {drill} {name}"))
    except Exception as e:  # noqa: BLE001 (a trial that fails for any reason is reported)
        why = f"  {e}" if isinstance(e, Failure) else traceback.format_exc()
        again = f"  again: python tests/drills only={drill} like={name!r} seed={seed}; left in {folder}"
        return number, "\n".join([why, again, last_lines()])
    shutil.rmtree(folder)
    return number, ""


def last_lines() -> str:
    lines = Command.last.output().splitlines()[-TAIL_LINES:] if Command.last else []
    return "\n".join(f"  | {line[:400]}" for line in lines)


if __name__ == "__main__":
    try:
        sys.exit(min(main(**dict(argument.split("=", 1) for argument in sys.argv[1:])), 1))
    except Failure as e:  # while the drills were prepared
        sys.exit(f"{e}\n{last_lines()}")
