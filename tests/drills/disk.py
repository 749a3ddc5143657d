"""A disk that is full or fails: what was there stays, one line names the file and the cause, and the next try succeeds."""

from __future__ import annotations

import errno
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

from commands import REPOSITORY, Outcome, at_operation, contents, die, expect, expect_same, fail_with, run, tool

from training import checkpoint as checkpoints

# What commands write, in the words of `at_operation`.
WRITTEN = {
    "train": [
        "config.yaml", "metrics.jsonl", "starts.jsonl", "model.safetensors", "ema.safetensors", "optimizer.pt", "state.json",
        "manifest.json", "step_0000003.png", "rename run/checkpoints", "mkdir run/checkpoints/",
    ],
    "sample": ["settings.yaml", "seed_000000", "grid_0-3.png", "samples_0-3.npz"],
    "fid": ["results.jsonl", "results.csv", "results.md", "results.png"],
    "encode": [".unfinished", "latents_00000.safetensors", "latents/manifest.json"],
    "convert": ["latents_00001.safetensors", "latents/manifest.json"],
    "reference": ["ref.npz"],
}  # fmt: skip
# How the error names it, where not by the last part.
NAMED = {".unfinished": "latents", "rename run/checkpoints": "step_0000002", "mkdir run/checkpoints/": "run"}
FIRST = {"metrics.jsonl": 2}  # the first operation on it creates it, to see whether the folder can be written to
FAULTS = {errno.ENOSPC: ("No space left", "free"), errno.EIO: ("Input/output error",), errno.EDQUOT: ("quota",)}
SIZES = {  # bytes to which files may grow
    "train": [1000, 10_000, 100_000, 500_000], "sample": [100, 300, 1000], "fid": [100, 1000, 5000], "encode": [100, 1000],
    "convert": [500, 4000], "reference": [100, 1000],
}  # fmt: skip


def trials(inputs: Path, shared: Path) -> Iterator[tuple]:
    for name, files in WRITTEN.items():
        run(shared / name, tool(name, inputs)).expect_whole()
        how = dict(arguments=tool(name, inputs), reference=shared / name)
        for file in files:
            for number in FAULTS if file == files[0] or name == "train" else [errno.ENOSPC]:
                yield f"{name}, {errno.errorcode[number]} for {file}", partial(fail_at_file, file, number, **how)
        for size in SIZES[name]:
            yield f"{name}, files of {size} bytes at most", partial(fail_beyond, size, **how)
    for number in FAULTS:
        yield (
            f"fid, {errno.errorcode[number]} for the cache of the reference",
            partial(fail_at_cache, number, tool("fid", inputs)),
        )


def fail_at_file(file: str, number: int, folder: Path, rng: Random, arguments: list[str], reference: Path) -> None:
    """What comes before the first operation on `file` is there; then this operation fails."""
    out, first = folder / "out", FIRST.get(file, 1)
    # Not when what an earlier kill left is deleted.
    pattern = file if " " in file else f"(open|mkdir|fsync|rename) .*{re.escape(file)}"
    run(out, arguments, at_operation(die, first, pattern))
    before = contents(out)
    outcome = run(out, arguments, at_operation(fail_with(number), first, pattern))
    outcome.expect_one_line(NAMED.get(file, Path(file).name), *FAULTS[number])
    expect_no_loss(before, out, arguments, reference)


def at_most(size: int) -> Callable[[], None]:
    """Writing to a file beyond this fails as on a full disk, in every library."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


def fail_beyond(size: int, folder: Path, rng: Random, arguments: list[str], reference: Path) -> None:
    outcome = run(folder / "out", arguments, at_most(size))
    if outcome.code == 0:
        expect_same(folder / "out", reference)
        return
    outcome.expect_one_line("File too large")
    names = [Path(name).name for name in contents(reference)] + ["settings.json", ".json"]
    expect(any(name in outcome.output[outcome.output.find("error: ") :] for name in names), "the error names no file")
    expect_no_loss({}, folder / "out", arguments, reference)


def expect_no_loss(before: dict[str, str], out: Path, arguments: list[str], reference: Path) -> None:
    """Finished files are untouched, nothing half-written remains, and the same command again ends well."""
    final, now = contents(reference), contents(out)
    lost = [name for name, content in before.items() if final.get(name) == content != now.get(name)]
    expect(not lost, f"lost: {', '.join(lost)}")
    steps = out / "run" / "checkpoints"
    if any("/step_" in name and "manifest" in name and ".tmp" not in name for name in before):
        expect(checkpoints.find_newest(steps)[0] is not None, "no whole checkpoint is left")
    run(out, arguments).expect_whole()
    expect_same(out, reference)


def fail_at_cache(number: int, arguments: list[str], folder: Path, rng: Random) -> None:
    """Without its cache, an evaluation takes longer, and warns."""
    out = folder / "out"
    out.mkdir()
    shutil.copy(REPOSITORY / "evaluations" / "digits_reference.npz", out / "ref.npz")
    outcome: Outcome = run(out, [*arguments, "reference=ref.npz"], at_operation(fail_with(number), 1, "-features"))
    outcome.expect_whole()
    expect("-features" in outcome.output and FAULTS[number][0] in outcome.output, "no warning names the file and the cause")
