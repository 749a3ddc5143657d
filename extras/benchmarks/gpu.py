"""The whole verification on a GPU in one command, with one file of results: `make gpu`.

    make gpu                                           # tests/gpu and the benchmarks, under 15 minutes on an H100
    make gpu PYTHON=python ARGS="parts=tests"          # one part, with the Python that is there
    python -m extras.benchmarks.gpu size=small parts=step_b2  # tiny networks, to try it out; on a CPU too

Every part is a process of its own with a time limit. A part that fails is written down as failed, and the next one starts. The
files are written after every part; a later run on the same day renews its parts in them and keeps the others. The command fails
if one of its parts failed.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import chain, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal
from xml.etree import ElementTree

import torch

from common.errors import UserError
from common.files import read_lines
from configs import command_line as cli
from configs.settings import Positive, Settings, Text
from extras.benchmarks.harness import Report, Several, choose_device, emit, reason, run_python, table
from training.provenance import device_name

# name: seconds that it may take, on an H100 about double of what it needs.
LIMITS_SEC = {
    "tests": 480,
    "step_b2": 150,
    "step_xl2": 150,
    "step_xl2_fp8": 150,
    "graphs_b2": 210,
    "sampling_xl2": 90,
    "metrics": 60,
    "detector": 60,
}
BENCHMARKS = [name for name in LIMITS_SEC if name != "tests"]
CUDA_ALONE = {"step_xl2_fp8", "graphs_b2"}


class VerificationSettings(Settings):
    parts: Several[Literal[(*LIMITS_SEC, "benchmarks")]] = ["tests", "benchmarks"]  # benchmarks: all but the tests
    size: Literal["full", "small"] = "full"
    total_sec: Positive = 900.0  # a part that would start later is not started
    output: Text | None = None  # the file's name without its ending; null: extras/benchmarks/results/gpu_<device>_<date>


def plan(size: str, device: torch.device) -> dict[str, list[str]]:
    """The arguments of Python for each part; {output} stands for the name of its files, without an ending."""
    step = ["-m", "extras.benchmarks.train_step", f"device={device.type}", "output={output}", "plain=false"]
    sampling = ["-m", "extras.benchmarks.sampling", f"device={device.type}", "output={output}", "precision=bf16"]
    evaluation = ["-m", "extras.benchmarks.evaluation", f"device={device.type}"]
    pytest = ["-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", "--junitxml={output}.xml"]
    if size == "small":
        step += ["backbones=DiT-XS/2", "batch_size=4", "resolution=8", "rounds=1", "steps=1", "loop_steps=2", "cpu_threads=1"]
        few = ["num_samples=200", "num_references=100"]
        return {
            "tests": [*pytest, "tests/test_gpu_code.py"],
            "step_b2": [*step, "precision=bf16"],
            "step_xl2": [*step, "precision=bf16"],
            "step_xl2_fp8": [*step, "precision=fp8", "compile=blocks"],
            "graphs_b2": [*step, "precision=bf16", "compile=reduce-overhead"],
            "sampling_xl2": [*sampling, "backbone=DiT-XS/8", "batch_size=2", "num_steps=2", "rounds=1", "cpu_threads=1"],
            "metrics": [*evaluation, *few],
            "detector": [*evaluation, "part=detector", "batch_size=2", "num_batches=1", "image_size=32"],
        }
    step += ["rounds=3", "steps=20", "loop_steps=40", "overrides=[train.log_every=20]"]
    b2, xl2 = ["backbones=DiT-B/2", "batch_size=256"], ["backbones=DiT-XL/2", "batch_size=64"]
    return {
        "tests": [*pytest, "tests/gpu"],
        "step_b2": [*step, *b2, "precision=bf16", "compile=[none,blocks]"],
        "step_xl2": [*step, *xl2, "precision=bf16", "compile=blocks"],
        "step_xl2_fp8": [*step, *xl2, "precision=fp8", "compile=blocks"],
        "graphs_b2": [*step, *b2, "precision=bf16", "compile=reduce-overhead"],
        "sampling_xl2": [*sampling, "backbone=DiT-XL/2", "batch_size=32"],
        "metrics": evaluation,
        "detector": [*evaluation, "part=detector", "batch_size=128"],
    }


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, VerificationSettings)
    device = choose_device(None)
    if settings.output is None:
        name = re.sub(r"[^a-z0-9]+", "-", device_name(device).removeprefix("NVIDIA ").lower()).strip("-")
        small = "_small" if settings.size == "small" else ""
        output = f"extras/benchmarks/results/gpu_{name}{small}_{datetime.now(timezone.utc):%Y-%m-%d}"
        settings = settings.model_copy(update={"output": output})
    records: dict[str, list[dict]] = {}  # by part: its outcome, then its lines; those of earlier runs are kept
    for _, line in read_lines(Path(settings.output + ".jsonl")):
        if line and "part" in line:
            records.setdefault(line["part"], []).append(line)
    report = Report("Verification on a GPU", settings, device)
    commands, start_sec, failed = plan(settings.size, device), time.monotonic(), []
    wanted = [name for part in settings.parts for name in (BENCHMARKS if part == "benchmarks" else [part])]
    wanted = [name for name in wanted if device.type == "cuda" or name not in CUDA_ALONE]
    for name in wanted:
        left_sec = settings.total_sec - (time.monotonic() - start_sec)
        records[name] = run_part(name, commands[name], min(LIMITS_SEC[name], left_sec))
        emit(outcome := records[name][0])
        failed += [name] if outcome["problem"] else []
        report.save(list(chain(*records.values())), sections(records), [])
    emit(f"results: {settings.output}.md")
    if failed:
        raise UserError(f"failed: {', '.join(failed)}; {settings.output}.md says why")


def run_part(name: str, command: Sequence[str], limit_sec: float) -> list[dict]:
    """[its outcome, a line for each of its tests or results]."""
    if limit_sec <= 0:
        return [{"part": name, "problem": "not started: total_sec is over", "sec": 0.0}]
    start_sec = time.monotonic()
    with TemporaryDirectory() as folder:
        output = f"{folder}/{name}"
        code, written = run_python([argument.replace("{output}", output) for argument in command], limit_sec)
        lines = lines_of(output, written)
    problem = None if code == 0 else reason(code, written, limit_sec)
    if code == 1 and "outcome" in (lines or [{}])[0]:  # pytest's own code; a crash has another
        problem = f"{sum(line['outcome'] == 'failed' for line in lines)} of {len(lines)} tests failed"
    outcome = {"part": name, "problem": problem, "sec": time.monotonic() - start_sec, "command": shlex.join(["python", *command])}
    if problem:
        outcome["written"] = written[-4000:]
    return [outcome, *({"part": name} | line for line in lines)]


def lines_of(output: str, written: str) -> list[dict]:
    """What a part has found: its tests, the lines of its results or, where it has no files, those that it printed."""
    if Path(output + ".xml").exists():
        cases = ElementTree.parse(output + ".xml").getroot().iter("testcase")
        return [describe_test(case) for case in cases]
    # pytest was cut short, before its report.
    if tests := re.findall(r"^tests/\S+::(\S+) (PASSED|FAILED|ERROR|SKIPPED)?", written, re.MULTILINE):
        return [{"test": name, "outcome": outcome.lower() or "not done", "sec": None, "why": None} for name, outcome in tests]
    if Path(output + ".jsonl").exists():
        return [line for _, line in read_lines(Path(output + ".jsonl")) if line and "machine" not in line]
    printed = [json.loads(line) for line in written.splitlines() if re.fullmatch(r"\{.*\}", line)]
    return [line for line in printed if "machine" not in line]


def describe_test(case: ElementTree.Element) -> dict:
    """A test of pytest's report, with the first line of what went wrong."""
    outcome, why = "passed", None
    for tag in ("failure", "error", "skipped"):
        if (found := case.find(tag)) is not None:
            outcome, why = "skipped" if tag == "skipped" else "failed", (found.get("message") or "").partition("\n")[0]
    return {"test": case.get("name"), "outcome": outcome, "sec": float(case.get("time", 0)), "why": why}


def sections(records: dict[str, list[dict]]) -> list[str]:
    """Markdown: the outcomes, then the lines of each part in tables of equal columns."""
    outcomes = [lines[0] for lines in records.values()]
    written = [table(outcomes, left_out=("command", "written"))]
    for name, (outcome, *lines) in records.items():
        written.append(f"## {name}\n\n`{outcome.get('command', '')}`\n")
        written += [table(list(rows), left_out=("part",)) for _, rows in groupby(lines, key=lambda line: frozenset(line))]
        if "written" in outcome:
            written.append(f"```text\n{outcome['written']}\n```\n")
    return written


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
