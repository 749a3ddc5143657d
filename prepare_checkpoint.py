"""Give a run's weights away.

    python prepare_checkpoint.py export checkpoint=runs/in256 output=exported/in256
    python prepare_checkpoint.py export checkpoint=runs/in256 output=exported/in256 push=you/in256   # and upload them

`export` writes a folder that diffusers loads: DiffusionPipeline.from_pretrained("exported/in256", trust_remote_code=True).
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # Ctrl-C during the imports, which take seconds, ends without a traceback; afterwards see setup/cli.py
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import logging
import sys
from pathlib import Path

from setup import cli
from setup.schema import Autoencoder, Checkpoint, Weights
from setup.settings import Text
from training import checkpoint as checkpoints
from weights.export import check_hub, check_output_folder, export_checkpoint, push_folder

log = logging.getLogger("prepare_checkpoint")


def export(
    checkpoint: Checkpoint,
    output: Text,
    weights: Weights = "ema",
    autoencoder: Autoencoder | None = None,
    license: Text | None = None,
    push: Text | None = None,
    private: bool = True,
) -> None:
    """Write a checkpoint as a folder that diffusers loads, with a model card.

    Args:
        checkpoint: a run's folder (its newest good checkpoint) or a checkpoint's folder.
        output: a folder that does not exist yet, or is empty.
        weights: ema | raw.
        autoencoder: null keeps the run's. It is saved with the network.
        license: of the weights, for the model card: a name that the hub knows, mit or cc-by-nc-4.0, say.
        push: the hub's name to upload the folder to, you/model.
        private: whether the hub shows a new repository to you alone.
    """
    check_output_folder(Path(output))
    if push:
        check_hub(push)
    folder = checkpoints.find_checkpoint(Path(checkpoint), "checkpoint")
    export_checkpoint(folder, Path(output), weights, autoencoder, license, push)
    log.info("exported %s to %s", folder, output)
    if push:
        log.info("uploaded to %s", push_folder(Path(output), push, private))


COMMANDS = {"export": export}


def main(arguments: list[str]) -> None:
    cli.run_command(COMMANDS, __doc__, arguments)


if __name__ == "__main__":
    cli.log_to_stderr()
    cli.guard(lambda: main(sys.argv[1:]))
