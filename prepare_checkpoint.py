"""Weights of other projects as runs of ours.

    python prepare_checkpoint.py import DiT-XL-2-256x256.pt kind=dit output=runs/dit_xl2
    python prepare_checkpoint.py import source=nyu-visionx/SiT-collections/SiT-XL-2-256.pt kind=sit output=runs/sit_xl2

docs/weights.md says what the files of each kind look like and how to check their published FID.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":  # Ctrl-C during the imports, which take seconds, ends without a traceback; afterwards see setup/cli.py
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import logging
import sys
from pathlib import Path
from typing import Literal

from errors import UserError
from setup import cli
from setup.schema import Autoencoder
from setup.settings import Positive, Resolution, Text, Whole
from weights.importing import Latents, import_published
from weights.published import KINDS_OF_WEIGHTS

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


COMMANDS = {"import": import_weights}


def main(arguments: list[str]) -> None:
    name, *settings = arguments or ["--help"]
    if name in ("--help", "-h", "help"):
        sys.stdout.write(__doc__)
        return
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}; use one of {', '.join(COMMANDS)}")
    if name == "import" and settings and not settings[0].startswith("-") and "=" not in settings[0]:
        settings[0] = f"source={settings[0]}"
    command = COMMANDS[name]
    command(**dict(cli.parse_arguments(settings, cli.settings_of(command), command=name)))


if __name__ == "__main__":
    cli.log_to_stderr()
    cli.guard(lambda: main(sys.argv[1:]))
