"""Run a command of the project in a forked copy of this process, which has imported everything already: 0.6 s instead of 6.

A command runs in a folder of its own and writes to relative paths, so that two runs of it leave the same bytes. `contents`
compares what they left. `at_operation` acts at the k-th file operation of a command: it kills, signals, or lets it fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conftest import REPOSITORY, TINY

LIMIT_SEC = 60
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

# The commands of the drills; {inputs} is the folder that `inputs.make_inputs` fills.
_FEW = ["num_steps=2", "cpu_threads=1"]
_ENCODE = ["images={inputs}/images", "autoencoder=identity", "kind=sample", "resolution=8", "shard_size=4", "num_workers=0"]
TOOLS = {
    "train": [
        "train.py", *TINY, "name=run", "output_dir=.", "checkpoint.every=2", "checkpoint.keep_last=1", "sample.every=3",
        "sample.num_samples=3", "diffusion.sampler.num_steps=2",
    ],
    "sample": ["sample.py", "checkpoint={inputs}/run", "output=images", "seeds=0-3", "batch_size=2", *_FEW],
    "fid": [
        "fid.py", "checkpoint={inputs}/run", "output=scores", "num_samples=70", "batch_size=35", "guidance=cfg",
        "cfg_scale=[1.0,1.5]", "evaluation.detector=digits", *_FEW,
    ],
    "encode": ["prepare_latents.py", "encode", "output=latents", *_ENCODE, "cpu_threads=1"],
    "convert": [
        "prepare_latents.py", "convert", "path={inputs}/tars", "output=latents", "shard_size=4", "autoencoder=none",
        "kind=moments", "stored_scale=1", "scale_factor=0.1", "resolution=32",
    ],
    "reference": [
        "prepare_latents.py", "reference", "images={inputs}/images", "output=ref.npz", "statistics=false", "resolution=8",
    ],
}  # fmt: skip


class Failure(Exception):
    """A trial did not end as it has to."""


def expect(condition: object, what: str) -> None:
    if not condition:
        raise Failure(what)


# ----------------------------------------------------------------------------------------------------------------------
# Running.


@dataclass
class Outcome:
    code: int | None  # the exit code, minus the signal that ended it; None: the time was up
    output: str
    wall_sec: float
    peak_mib: float

    def expect_whole(self) -> None:
        """It did what it had to."""
        self.expect_no_traceback()
        expect(self.code == 0, f"ended with {self.code} instead of 0")

    def expect_no_traceback(self) -> None:
        expect(self.code is not None, "did not end in time")
        expect("Traceback (most recent" not in self.output, "a traceback")

    def expect_one_line(self, *words: str) -> None:
        """It ended with 1 and one line of error, which holds all words."""
        self.expect_no_traceback()
        expect(self.code == 1, f"ended with {self.code} instead of an error")
        start = self.output.find("error: ")
        error = self.output[start:].strip() if start >= 0 else ""
        expect(error, "no line of error")
        expect("\n" not in error, "more than one line of error")
        for word in words:
            expect(word in error, f"the error does not name {word!r}")


class Command:
    """A command that runs in a process (and session) of its own."""

    last: Command | None = None  # of this process, for reports

    def __init__(self, folder: Path, arguments: list[str], before: Callable[[], None] | None = None, **environment: str):
        self.outcome: Outcome | None = None
        self._printed = b""
        self._pipe, pipe = os.pipe()  # not a file: some commands may write no more than a few bytes to files
        os.set_blocking(self._pipe, False)
        folder.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush(), sys.stderr.flush()
        Command.last, self._start_sec = self, time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(folder, pipe, arguments, before, environment)
        os.close(pipe)

    def _become(
        self, folder: Path, pipe: int, arguments: list[str], before: Callable[[], None] | None, environment: dict[str, str]
    ) -> None:
        code = 1
        try:
            os.setsid()
            for signum in SIGNALS:
                signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
            os.dup2(pipe, 1), os.dup2(pipe, 2)
            os.chdir(folder)
            os.environ.update(environment)
            if before is not None:
                before()
            script, *sys.argv[1:] = arguments
            sys.argv[0] = str(REPOSITORY / script)
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
            if isinstance(e.code, str):
                os.write(2, f"{e.code}\n".encode())
        except BaseException:  # noqa: BLE001 (what Python does at the end of a program)
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)

    def output(self) -> str:
        """What it has printed until now."""
        if self.outcome is not None:
            return self.outcome.output
        with contextlib.suppress(BlockingIOError):
            while printed := os.read(self._pipe, 1 << 16):
                self._printed += printed
        return self._printed.decode(errors="replace")

    def is_running(self) -> bool:
        return self.outcome is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def finish(self, limit_sec: float = LIMIT_SEC) -> Outcome:
        if self.outcome is None:
            end_sec, pid = time.monotonic() + limit_sec, 0
            while not pid and time.monotonic() < end_sec:
                self.output()  # a full pipe would stop it
                pid, status, usage = os.wait4(self.pid, os.WNOHANG)
                time.sleep(0 if pid else 0.005)
            code = os.waitstatus_to_exitcode(status) if pid else None
            wall_sec = time.monotonic() - self._start_sec
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # what it left running, and itself if the time is up
            if not pid:
                _, _, usage = os.wait4(self.pid, 0)
            self.outcome = Outcome(code, self.output(), wall_sec, usage.ru_maxrss / 1024)
            os.close(self._pipe)
        return self.outcome


def wait_until(condition: Callable[[], object], what: str, limit_sec: float = LIMIT_SEC) -> None:
    end_sec = time.monotonic() + limit_sec
    while not condition():
        expect(time.monotonic() < end_sec, what)
        time.sleep(0.005)


def run(folder: Path, arguments: list[str], before: Callable[[], None] | None = None, limit_sec: float = LIMIT_SEC) -> Outcome:
    """Run `<script> <arguments>` in `folder`, after `before` has prepared its process."""
    return Command(folder, arguments, before).finish(limit_sec)


def tool(name: str, inputs: Path, *more: str) -> list[str]:
    """A command of TOOLS; later arguments replace earlier ones of the same key."""
    arguments = [argument.format(inputs=inputs) for argument in TOOLS[name]]
    keys = {argument.partition("=")[0] for argument in more}
    return [argument for argument in arguments if argument.partition("=")[0] not in keys] + list(more)


def import_what_commands_import(folder: Path, commands: list[list[str]]) -> None:
    """Import here what these commands import while they run, without running them here: their state stays theirs."""
    for number, arguments in enumerate(commands):
        file = folder / "modules"

        def tell(file=file) -> None:
            leave = os._exit
            os._exit = lambda code: (file.write_text(json.dumps(list(sys.modules))), leave(code))

        run(folder / f"warm_{number}", arguments, tell).expect_whole()
        for name in json.loads(file.read_text()):
            if name != "__main__":
                with contextlib.suppress(Exception):  # some exist only under certain conditions
                    importlib.import_module(name)


# ----------------------------------------------------------------------------------------------------------------------
# File operations.

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND


def at_operation(
    action: Callable[[], None], number: int = 0, pattern: str = "", journal: Path | None = None
) -> Callable[[], None]:
    """For `run(before=...)`: call `action` before the number-th file operation (from 1; 0: at none) whose line has `pattern`.

    Operations are what changes files below the working folder: opening to write, renaming, deleting, making folders, fsync.
    `journal` receives a line for each, before it happens.
    """

    def prepare() -> None:
        here, count, fsync = os.getcwd(), 0, os.fsync
        descriptor = None if journal is None else os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def hook(event: str, args: tuple) -> None:
            nonlocal count
            if event == "open":
                if not isinstance(args[0], str) or not isinstance(args[2], int) or not args[2] & _WRITES:
                    return
            elif event not in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.fsync"):
                return
            paths = [os.path.relpath(os.path.join(here, arg), here) for arg in args[:2] if isinstance(arg, str)]
            if event == "open":
                paths = paths[:1]
            line = re.sub(r"\.tmp_[0-9a-f]{16}_", ".tmp_", " ".join([event.removeprefix("os."), *paths]))
            if any(path.startswith("..") for path in paths) or not re.search(pattern, line):
                return
            count += 1
            if descriptor is not None:
                os.write(descriptor, f"{line}\n".encode())
            if count == number:
                action()

        def fsync_and_tell(file: int) -> None:
            hook("os.fsync", (os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}"),))
            fsync(file)

        sys.addaudithook(hook)
        os.fsync = fsync_and_tell

    return prepare


def die() -> None:
    os.killpg(0, signal.SIGKILL)


def send(signum: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


def fail_with(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


# ----------------------------------------------------------------------------------------------------------------------
# What a command left.

_TIMES = {"steps_per_sec", "images_per_sec", "evaluation_sec"}
_NOT_COMPARED = (".lock", "starts.jsonl")


def contents(folder: Path) -> dict[str, str]:
    """{path: hash of the content} of all files below; without times, and without the files that tell of starts."""
    found = {}
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or file.name.endswith(_NOT_COMPARED):
            continue
        if file.suffix == ".npz":  # a zip holds the time of its making
            with zipfile.ZipFile(file) as archive:
                blob = repr([(name, archive.read(name)) for name in archive.namelist()]).encode()
        elif file.suffix == ".jsonl":
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            blob = json.dumps([{key: value for key, value in line.items() if key not in _TIMES} for line in lines]).encode()
        else:
            blob = file.read_bytes()
        found[file.relative_to(folder).as_posix()] = hashlib.blake2b(blob, digest_size=8).hexdigest()
    return found


def expect_same(folder: Path, reference: Path) -> None:
    """Both folders hold the same, bit by bit."""
    ours, theirs = contents(folder), contents(reference)
    names = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    expect(not names, f"not as in an undisturbed run: {', '.join(names)}")
