"""Measure how long a training step takes on this machine.

    python -m extras.benchmarks step 'variants=[model=dit,model=tread]' model.backbone=DiT-S/2 train.batch_size=8
    python -m extras.benchmarks step 'variants=[model=dit,model=tread train.compile=blocks]' train.precision=fp32
    accelerate launch --multi_gpu --num_processes 8 -m extras.benchmarks step model=tread train.batch_size=256
    python -m extras.benchmarks profile model=tread      # the operations that take the most time
    python -m extras.benchmarks evidence                 # the tables of our runs on Fashion-MNIST
    python -m extras.benchmarks collect runs=runs        # all evaluations of such runs, as extras/benchmarks/results holds them

`variants`, `rounds`, `steps` and `warmup` are keys of the benchmark; all others are keys of train.py. A variant is one or more
arguments of train.py, separated by spaces. Without variants, the given configuration is timed, and without data.path, on random
latents. Results are Markdown on stdout: machine, versions, commit, command and date, then a row per variant. Variants take turns.
`make gpu` runs tests/gpu and these benchmarks and writes one file of results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from configs import command_line as cli

ROWS = "extras.benchmarks.rows"
EVIDENCE = "extras.benchmarks.evidence"
COMMANDS = {
    "step": f"{ROWS}:step", "profile": f"{ROWS}:profile", "evidence": f"{EVIDENCE}:evidence", "collect": f"{EVIDENCE}:collect",
}  # fmt: skip
OWN_KEYS = ("variants", "rounds", "steps", "warmup")


def main(arguments: Sequence[str]) -> None:
    name, *settings = arguments or ["--help"]
    if name in ("step", "profile") and not cli.HELP & {*settings}:
        own = [argument for argument in settings if argument.partition("=")[0] in OWN_KEYS]
        others = [argument for argument in settings if argument not in own]
        settings = [*own, f"overrides={json.dumps(others)}"]
    cli.run_command(COMMANDS, __doc__, [name, *settings])


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
