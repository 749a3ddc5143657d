"""The whole verification on a GPU, with one file of results: `make gpu`."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

import torch

from common.errors import UserError
from common.files import REPOSITORY, write_file

STEP, XL2 = "-m extras.benchmarks step rounds=3 steps=10 train.precision=bf16", "model.backbone=DiT-XL/2"
ALL_GPUS = "-m accelerate.commands.launch --multi_gpu --num_processes {num_gpus} --mixed_precision no --dynamo_backend no"
KINDS = "'variants=[model=dit, model=tread, model=tread {}]'"
PARALLEL = "'variants=[train.parallel=ddp, train.parallel=fsdp]'"
GUIDANCE = "diffusion.sampler.num_steps=10 sample.precision=bf16 'variants=[guidance=none, guidance=cfg, guidance=sparse]'"
# Part: the seconds that it may take, together less than ten minutes on one GPU, and the arguments of Python.
PARTS = {
    "tests": (250, "-m pytest -v -rs --tb=short -p no:cacheprovider --durations=10 tests/gpu"),
    "step_b2": (100, f"{STEP} model.backbone=DiT-B/2 train.batch_size=256 {KINDS.format('train.compile=none')}"),
    "step_xl2": (100, f"{STEP} {XL2} train.batch_size=64 {KINDS.format('train.activation_checkpointing=blocks')}"),
    "step_parallel": (100, f"{ALL_GPUS} {STEP} model=tread {XL2} {PARALLEL}"),
    "loader": (30, "-m extras.benchmarks loader steps=200 'variants=[data.num_workers=0, data.num_workers=4]'"),
    "sampling": (70, f"-m extras.benchmarks sampling rounds=2 steps=1 warmup=0 model=tread {XL2} {GUIDANCE}"),
    "evaluation": (30, "-m extras.benchmarks evaluation num_samples=10000"),
}


def gpu(parts: list[Literal[tuple(PARTS)]] = tuple(PARTS)) -> None:
    """tests/gpu and the benchmarks, into extras/benchmarks/results/gpu_<device>_<date>.md."""
    if not torch.cuda.is_available():
        raise UserError("gpu: torch sees no CUDA GPU on this machine")
    num_gpus = torch.cuda.device_count()
    device = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().removeprefix("NVIDIA ").lower())
    file = REPOSITORY / f"extras/benchmarks/results/gpu_{device}_{datetime.now(timezone.utc):%Y-%m-%d_%H%M}.md"
    wanted = [part for part in parts if num_gpus > 1 or "{num_gpus}" not in PARTS[part][1]]
    run_parts({part: (PARTS[part][0], PARTS[part][1].replace("{num_gpus}", str(num_gpus))) for part in wanted}, file)


def run_parts(parts: dict[str, tuple[float, str]], file: Path) -> None:
    """Run parts (the seconds that each may take, arguments of Python) one after another; write what they print into one file.

    The file is written after each part. One that fails is noted, and the next one starts; at the end it is a UserError.
    """
    sections, failed = [], []
    for name, (limit_sec, arguments) in parts.items():
        problem, output = run_python(arguments, limit_sec)
        failed += [name] if problem else []
        sections.append(f"## {name}: {problem or 'done'}\n\n    python {arguments}\n\n{output}\n")
        write_file(file, "\n".join(sections))
        sys.stdout.write(f"{name}: {problem or 'done'}\n")
    sys.stdout.write(f"results: {file}\n")
    if failed:
        raise UserError(f"failed: {', '.join(failed)}; {file} says why")


def run_python(arguments: str, limit_sec: float) -> tuple[str | None, str]:
    """(None, what it printed) or, if it fails or takes too long, (the reason, the end of what it wrote)."""
    with TemporaryFile() as out, TemporaryFile() as err:  # not pipes, which what a part leaves running would keep open
        # coreutils' timeout stops the launchers and compilers that a part started, too.
        command = ["timeout", "--kill-after=5", f"{limit_sec}", sys.executable, *shlex.split(arguments)]
        code = subprocess.run(command, cwd=REPOSITORY, stdout=out, stderr=err, check=False).returncode
        problem = f"stopped after {limit_sec:g} s" if code == 124 else f"exit code {code}" if code else None
        written = [file.seek(0) or file.read().decode(errors="replace") for file in (out, err)]
    return problem, f"```text\n{written[0][-4000:]}{written[1][-4000:]}\n```" if problem else written[0]
