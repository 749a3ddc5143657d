"""What all benchmarks share: their settings, the clock, and files that say how a number came about.

A benchmark is a Settings class, which setup.cli.parse_arguments reads, and a function that measures. `Report` describes the
machine before the measurement; after it, it writes <output>.jsonl and <output>.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, TypeVar

import psutil
import torch
from accelerate import Accelerator
from pydantic import AfterValidator

from common.errors import UserError
from common.files import markdown_table, read_file, write_file
from configs import command_line as cli
from configs.schema import BACKBONES, flatten
from configs.settings import OneOrMany, Settings, one_of
from training import machine
from training.provenance import device_name, git_commit, launch_command
from training.speed import MIXED_PRECISION

# ----------------------------------------------------------------------------------------------------------------------
# Settings and start.

T = TypeVar("T")
Several = Annotated[OneOrMany[T], AfterValidator(lambda value: value if isinstance(value, list) else [value])]
Backbone = Annotated[str, one_of(BACKBONES)]


def choose_device(name: str | None) -> torch.device:
    """cpu | cuda; None: what there is."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but this machine has no CUDA device; use device=cpu")
    if name is None:
        machine.check_gpus()
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def open_accelerator(device: str | None, cpu_threads: int | None, precision: str, tf32: bool = True) -> Accelerator:
    """accelerate on the device that was asked for; None: on what it chooses."""
    choose_device(device)
    return machine.start_accelerator(cpu_threads, tf32=tf32, mixed_precision=MIXED_PRECISION[precision], cpu=device == "cpu")


def describe_machine(device: torch.device, settings: Settings) -> dict[str, object]:
    """Machine, versions, command, date and settings: the first line of every result."""
    commit, modified = git_commit()
    return {
        "machine": device_name(device),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "python": platform.python_version(),
        "revision": commit and commit[:7] + "+" * modified,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": re.sub(r"^python benchmarks/(\w+)\.py", r"python -m extras.benchmarks.\1", launch_command()),
        "settings": flatten(settings.model_dump()),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Measurements in processes of their own.


def arguments_for(settings: Settings, **changed: object) -> list[str]:
    """The command line of another run of the same benchmark: the keys that were given, with some changed."""
    given = settings.model_dump(exclude_unset=True) | changed
    return [f"{key}={json.dumps(value)}" for key, value in given.items()]


def run_python(arguments: Sequence[str], limit_sec: float) -> tuple[int | None, str]:
    """`python <arguments>` in a process of its own: (exit code, what it wrote). The code is None where it took too long."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cli.REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone
    )
    try:
        written, _ = process.communicate(timeout=limit_sec)
    except subprocess.TimeoutExpired:
        kill_with_children(process.pid)
        return None, process.communicate()[0]
    except BaseException:
        kill_with_children(process.pid)
        raise
    return process.returncode, written


def kill_with_children(pid: int) -> None:
    """End a process and all that it started: launchers and compilers put some of them into sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
        process = psutil.Process(pid)
        process.suspend()  # it starts no more
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()


def reason(code: int | None, written: str, limit_sec: float) -> str:
    """Why such a process failed, in one line."""
    if code is None:
        return f"not done after {limit_sec:.0f} s"
    if "OutOfMemoryError" in written or "out of memory" in written:
        return "out of memory"
    lines = [line for line in written.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"error|\w*(\.\w+)*(Error|Exception)\b", line)]
    said = (errors or lines or ["no output"])[-1]
    return f"exit code {code}: {said.removeprefix('error: ').partition(' [HYDRA_FULL_ERROR')[0]}"


# ----------------------------------------------------------------------------------------------------------------------
# The clock.


def time_ms(action: Callable[[], object], repeats: int, device: torch.device, warmup: int = 0) -> list[float]:
    """Milliseconds of each of `repeats` calls, after `warmup` calls that do not count.

    On a CUDA device its own clock measures, and nobody waits for the device between the calls.
    """

    def synchronise() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def now() -> float | torch.cuda.Event:
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        synchronise()
        return time.perf_counter()

    for _ in range(warmup):
        action()
    synchronise()
    marks = [now()]
    for _ in range(repeats):
        action()
        marks.append(now())
    synchronise()
    elapsed_ms = torch.cuda.Event.elapsed_time if device.type == "cuda" else lambda start, end: 1000 * (end - start)
    return [elapsed_ms(start, end) for start, end in zip(marks, marks[1:])]


def timed(function: Callable, device: torch.device, spent_ms: list[float]) -> Callable:
    """The same function; every call adds its milliseconds to the last entry of `spent_ms`, and waits for the device."""

    def timed_function(*args, **kwargs):
        results = []
        spent_ms[-1] += time_ms(lambda: results.append(function(*args, **kwargs)), 1, device)[0]
        return results[0]

    return timed_function


def spread(values: Sequence[float]) -> list[float]:
    """[median, lowest, highest]."""
    return [statistics.median(values), min(values), max(values)]


# ----------------------------------------------------------------------------------------------------------------------
# Results.


class Report:
    """<output>.jsonl and <output>.md, and the lines on stdout.

    Args:
        settings: with a key `output`, the files' name without its ending.
        is_main: of several processes, which alone writes and prints.
        about: more about the machine.

    Raises:
        UserError: the files cannot be written. They are created before the measurement, to know in time.
    """

    def __init__(self, title: str, settings: Settings, device: torch.device, is_main: bool = True, **about: object):
        self.title, self.output, self.is_main = title, settings.output, is_main
        if self.output.endswith("/") or Path(self.output).is_dir():
            folder = self.output.rstrip("/")
            raise UserError(f"output={self.output} is a folder; give the name of the files in it: output={folder}/results")
        old = [Path(self.output + ending) for ending in (".jsonl", ".md")]  # an interrupted measurement leaves them as they are
        self._write(*(read_file(file).decode() if file.exists() else "" for file in old))
        machine = describe_machine(device, settings)
        described = machine.pop("settings")
        self.machine = machine | about | {"settings": described}

    def save(self, lines: Sequence[dict], sections: Sequence[str], printed: Sequence[dict | str]) -> None:
        """Write JSON lines and sections of Markdown, each after the machine; print what is to be printed."""
        header = "".join(f"- {key}: {f'`{value}`' if key == 'command' else value}\n" for key, value in self.machine.items())
        markdown = "\n".join([f"# {self.title}\n", header, *sections])
        self._write("".join(as_json(line) + "\n" for line in [self.machine, *lines]), markdown)
        for line in printed if self.is_main else ():
            emit(line)

    def _write(self, json_lines: str, markdown: str) -> None:
        try:
            for ending, text in ((".jsonl", json_lines), (".md", markdown)) if self.is_main else ():
                write_file(Path(self.output + ending), text)
        except UserError as e:
            raise UserError(f"output={self.output}: {e}; choose another output=...") from e


def table(rows: Sequence[dict[str, object]], left_out: Sequence[str] = ()) -> str:
    """A Markdown table with a column for every key of any row; numbers with four digits, absent values empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in left_out))

    def cell(value: object) -> str:
        if isinstance(value, list):
            return " to ".join(map(cell, value))
        if isinstance(value, float):
            return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
        return "" if value is None else str(value)

    return markdown_table(columns, [[cell(row.get(column)) for column in columns] for row in rows])


def emit(line: dict[str, object] | str) -> None:
    """A line on stdout: JSON, or text as it is."""
    sys.stdout.write((line if isinstance(line, str) else as_json(line)) + "\n")
    sys.stdout.flush()


def as_json(line: dict[str, object]) -> str:
    """Numbers with five digits: no clock here is better than that."""
    return json.dumps(json.loads(json.dumps(line), parse_float=lambda number: float(f"{float(number):.5g}")))
