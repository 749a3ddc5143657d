"""Weights of other projects as runs of ours, and a run's weights for others.

    python -m extras.weights import DiT-XL-2-256x256.pt kind=dit output=runs/dit_xl2
    python -m extras.weights import nyu-visionx/SiT-collections/SiT-XL-2-256.pt kind=sit output=runs/sit_xl2    # of the hub
    python -m extras.weights export checkpoint=runs/in256 output=exported/in256
    python -m extras.weights export checkpoint=runs/in256 output=exported/in256 push=you/in256   # and upload them

`import` writes a run that sample.py, fid.py and init_from read. `export` writes a folder that diffusers loads:
DiffusionPipeline.from_pretrained("exported/in256", trust_remote_code=True). docs/weights.md says more about both.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Literal

from common.progress import log_to_stderr
from configs import command_line as cli
from configs.schema import Autoencoder, Checkpoint, Weights
from configs.settings import Positive, Resolution, Text, Whole
from extras.weights.export import check_hub, check_output_folder, export_checkpoint, push_folder
from extras.weights.importing import Latents, import_published
from extras.weights.published import KINDS_OF_WEIGHTS
from training import checkpoint as checkpoints

log = logging.getLogger("prepare_checkpoint")


def import_weights(
    source: Text,
    kind: Literal[tuple(KINDS_OF_WEIGHTS)],
    output: Text,
    step: Whole | None = None,
    autoencoder: Autoencoder | None = None,
    scale_factor: Positive | None = None,
    resolution: Resolution | None = None,
    latents_stats: Text | None = None,
) -> None:
    """Write published weights as a run: sizes come from the tensors' shapes, the sampler is that of the published scores.

    Args:
        source: a file (.pt or .safetensors), or of the Hugging Face hub <owner>/<name> or <owner>/<name>/<file>.
        kind: whose layout, clock and diffusion it has: dit | sit | repa | tread | lightningdit.
        output: the folder of the new run.
        step: optimizer steps that it was trained for; null: what the file says, else 0.
        autoencoder: decodes its latents; null: the SD-VAE, and for lightningdit none, which each command can name.
        scale_factor: what its latents are multiplied by; null: that of the autoencoder.
        resolution: of its images, in pixels; null: that of the autoencoder.
        latents_stats: of lightningdit, its latents_stats.pt, or none for weights trained without normalisation of channels.
    """
    latents = Latents(autoencoder, scale_factor, resolution, latents_stats)
    checkpoint = import_published(source, kind, Path(output), step, latents)
    log.info("wrote %s; sample from it: python sample.py checkpoint=%s", checkpoint, output)


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


COMMANDS = {"import": import_weights, "export": export}


def main(arguments: list[str]) -> None:
    if len(arguments) > 1 and arguments[0] == "import" and not (arguments[1].startswith("-") or "=" in arguments[1]):
        arguments = ["import", f"source={arguments[1]}", *arguments[2:]]
    cli.run_command(COMMANDS, __doc__, arguments)


if __name__ == "__main__":
    log_to_stderr()
    cli.guard(lambda: main(sys.argv[1:]))
