"""Weights of other projects as runs of this one, and a run's weights for others.

    python -m extras.weights import source=DiT-XL-2-256x256.pt kind=dit output=runs/dit_xl2
    python -m extras.weights export checkpoint=runs/dit_xl2 output=exported/dit_xl2

`import` writes a run that sample.py, fid.py and init_from read. `export` writes a folder that diffusers loads:
DiffusionPipeline.from_pretrained("exported/dit_xl2", trust_remote_code=True). docs/weights.md says more about both.
"""

from __future__ import annotations

import sys

from configs import command_line

COMMANDS = {"import": "extras.weights.importing:import_weights", "export": "extras.weights.export:export_checkpoint"}

if __name__ == "__main__":
    command_line.guard(lambda: command_line.run_command(COMMANDS, __doc__, sys.argv[1:]))
