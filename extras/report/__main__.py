"""Print Markdown tables that compare the figures of runs with the paper and with dense runs.

    python -m extras.report runs/                              # prints the tables
    python -m extras.report runs/ more_runs/ > table2.md

The report reads config.yaml, metrics.jsonl, starts.jsonl and evaluations/results.jsonl of every run in the folders. It writes no
files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cli.arguments import HELP
from cli.print_errors import run_and_print_errors
from common.errors import UserError
from extras.report.experiments import Experiment, group
from extras.report.rows import change_words
from extras.report.runs import read_runs
from extras.report.tables import guidance_table, machine_of, results_table, speedup_table

NOTES = """## How to read this

- A row is an experiment (runs that differ only in seed, paths and logging) and one way to measure it. Figures and hours are
  means over the seeds that trained longest. ± is the standard deviation (n − 1).
- Two figures can be compared only if the columns Samples, Guidance and Measured with are equal.
- The figures at the best guidance are a little too good, because the same samples chose the guidance.
- Hours do not count checkpoints, grids and evaluations. Compare them only between runs that had the same machine to themselves.
- Speedups interpolate linearly between two evaluations. With ≥ or ≤, the first evaluation is already better than the figure. The
  paper's headline, for DiT-XL/2 on ImageNet-256 against 400,000 dense steps, is 14×.
"""


def main(arguments: Sequence[str]) -> None:
    if HELP & {*arguments}:
        sys.stdout.write(__doc__)
        return
    folders = [Path(argument) for argument in arguments]
    if wrong := [folder for folder in folders if not folder.is_dir()]:
        raise UserError(f"{wrong[0]} is not a folder; give folders of runs")
    runs, problems = read_runs(folders)
    tables, repeated = group(runs)
    left_out = "".join(f"- {file}: {reason}\n" for file, reason in (problems | repeated).items())
    if not runs:
        raise UserError(f"no runs in {' '.join(arguments) or 'no folder'}; give folders of runs\n{left_out}")
    parts = []
    for name, experiments in tables.items():
        made = [results_table(experiments), guidance_table(experiments), speedup_table(experiments)]
        parts += [f"## {name}\n", *(table.markdown() for table in made if table.rows or table.notes), *describe_runs(experiments)]
    parts += [f"## Left out\n\n{left_out}"] if left_out else []
    sys.stdout.write("\n".join([*parts, NOTES]))


def describe_runs(experiments: Sequence[Experiment]) -> Iterator[str]:
    """Yield lines that describe each experiment: differences from its row and from the paper, and all starts of its runs."""
    yield "### How these runs were made\n"
    for experiment in experiments:
        yield f"- {experiment.label}"
        if experiment.changes:
            yield f"  - differs from its row: {change_words(experiment.changes)}"
        for key in ("source", "differs"):
            if experiment.row.get(key):
                yield f"  - {key}: {experiment.row[key]}"
        for run in experiment.runs:
            yield f"  - {run.path.name}, step {run.step:,} of {run.cfg.train.num_steps:,}"
            for start in run.starts:
                commit = f"commit {start['commit']}{' with local changes' if start['modified'] else ''}"
                machine = f"{machine_of(start)}, torch {start['torch']}, {commit}, {start['time']}"
                yield f"    - `{start['command']}` from step {start['step']:,} on {machine}"
    yield ""


if __name__ == "__main__":
    run_and_print_errors(lambda: main(sys.argv[1:]))
