"""Create latent shards from images or from published latents, and inspect shards.

    python prepare_latents.py encode images=imagenet/train output=data/imagenet256
    accelerate launch --multi_gpu --num_processes 8 prepare_latents.py encode images=imagenet/train output=data/imagenet256
    python prepare_latents.py convert path=imagenet256_latent_lmdb/train output=data/imagenet256
    python prepare_latents.py inspect path=data/imagenet256
    python prepare_latents.py reference images=<folder> output=<file.npz>       # write a reference for fid.py
    python prepare_latents.py detector reference=<file.npz> output=detectors/<set>.safetensors  # train a detector
    python prepare_latents.py fetch                      # download the SD-VAE and Inception (needs internet access)

To resume an interrupted `encode` or `convert`, run the same command again.
"""

from __future__ import annotations

import sys

from cli.arguments import run_command
from cli.print_errors import run_and_print_errors

COMMANDS = {
    "encode": "latents.prepare.encode:encode",
    "convert": "latents.prepare.convert:convert",
    "inspect": "latents.prepare.inspect:inspect",
    "reference": "latents.prepare.reference:reference",
    "detector": "latents.prepare.reference:detector",
    "fetch": "latents.prepare.fetch:fetch",
}
KEYS = {"encode": "latents.prepare.encode_plan:EncodeConfig", "convert": "latents.prepare.convert:ConvertConfig"}


def main(arguments: list[str]) -> None:
    run_command(COMMANDS, __doc__, arguments, KEYS)


if __name__ == "__main__":
    run_and_print_errors(lambda: main(sys.argv[1:]))
