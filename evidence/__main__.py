"""Train and evaluate the networks of evidence/README.md, and print its tables.

    python -m evidence tables                              # the tables of all Fashion-MNIST runs, from the files of results/
    python -m evidence tables pictures=evidence/pictures   # also draw the plots of the page
    python -m evidence guided jobs=2                       # the runs of fashion_guided_time.md, two at a time
    python -m evidence time_256 jobs=2                     # the runs of fashion_256_time.md
    python -m evidence collect output=new.jsonl            # all evaluations of runs/, as in fashion_guided_time.jsonl

`guided` and `time_256` can be stopped and repeated at any time. For each run, they start `train_and_evaluate` in a process of its
own.
"""

from __future__ import annotations

import sys

from cli.arguments import run_command
from cli.print_errors import run_and_print_errors

TABLES = "evidence.tables"
COMMANDS = {
    "tables": f"{TABLES}:show_all", "collect": f"{TABLES}:collect",
    "guided": "evidence.guided:guided", "time_256": "evidence.time_256:time_256",
    "train_and_evaluate": "evidence.runs:train_and_evaluate",
}  # fmt: skip

if __name__ == "__main__":
    run_and_print_errors(lambda: run_command(COMMANDS, __doc__, sys.argv[1:]))
