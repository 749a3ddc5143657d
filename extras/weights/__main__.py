"""Import published weights from other projects as runs.

    python -m extras.weights import source=DiT-XL-2-256x256.pt kind=dit output=runs/dit_xl2

`import` writes a run folder that sample.py, fid.py and init_from can read. See docs/weights.md.
"""

from __future__ import annotations

import sys

from cli.arguments import run_command
from cli.print_errors import run_and_print_errors

COMMANDS = {"import": "extras.weights.importing:import_weights"}

if __name__ == "__main__":
    run_and_print_errors(lambda: run_command(COMMANDS, __doc__, sys.argv[1:]))
