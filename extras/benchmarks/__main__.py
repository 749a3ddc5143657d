"""Measure how long a training step takes on this machine.

    python -m extras.benchmarks step 'variants=["model=dit","model=tread"]' model.backbone=DiT-S/2 train.batch_size=8
    python -m extras.benchmarks step 'variants=["model=dit","model=tread machine.compile=blocks"]' train.precision=fp32
    accelerate launch --multi_gpu --num_processes 8 -m extras.benchmarks step model=tread train.batch_size=256
    python -m extras.benchmarks profile model=tread      # the operations that take the most time
    python -m extras.benchmarks machine                  # how fast the CPU starts kernels; also: update, attention, denoiser

`variants`, `rounds`, `steps`, `warmup`, `turns` and `traces` are benchmark keys. All other keys are train.py keys. A variant
consists of one or more train.py arguments, separated by spaces. By default, the benchmark times the given configuration. Without
data.path, it uses random latents, for which data=custom needs its shape. Variants run in turns. The benchmark prints Markdown to
stdout: machine, versions, commit, command and date, followed by one row per variant. `make gpu` runs tests/gpu and these
benchmarks, and writes one results file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cli.arguments import HELP, run_command
from cli.print_errors import run_and_print_errors

STEPS = "extras.benchmarks.steps"
KERNELS = "extras.benchmarks.kernels"
COMMANDS = {
    "step": f"{STEPS}:step", "profile": f"{STEPS}:profile",
    "machine": f"{KERNELS}:machine", "update": f"{KERNELS}:update", "attention": f"{KERNELS}:attention",
    "denoiser": f"{KERNELS}:denoiser",
}  # fmt: skip
OWN_KEYS = ("variants", "rounds", "steps", "warmup", "turns", "traces")


def main(arguments: Sequence[str]) -> None:
    name, *settings = arguments or ["--help"]
    further = {}
    if name in ("step", "profile") and not HELP & {*settings}:
        further["overrides"] = [argument for argument in settings if argument.partition("=")[0] not in OWN_KEYS]
        settings = [argument for argument in settings if argument not in further["overrides"]]
    run_command(COMMANDS, __doc__, [name, *settings], **further)


if __name__ == "__main__":
    run_and_print_errors(lambda: main(sys.argv[1:]))
