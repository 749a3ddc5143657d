"""Make latent shards.

python prepare_latents.py digits output=<folder>     # the embedded digits, bit for bit as the repository ships them
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch

from latents.shards import ShardInfo, write_shard

log = logging.getLogger("prepare_latents")


def digits(output: Path) -> Path:
    """Write the handwritten digits of scikit-learn (UCI, CC BY 4.0; 1,797 images of 8x8 pixels, 0 to 16) as one shard.

    Latents are the pixels, mapped to [-1, 1]; a scale factor of 2/3 brings their standard deviation (0.75) to EDM's 0.5.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise ValueError("the digits come with scikit-learn: pip install scikit-learn") from e

    data = load_digits()
    latents = torch.from_numpy(data.images / 8 - 1).to(torch.float16)[:, None]  # [1797, 1, 8, 8], exact in float16
    labels = torch.from_numpy(data.target).to(torch.int64)
    info = ShardInfo(kind="sample", scale_factor=2 / 3, autoencoder="identity", resolution=8, num_classes=10)
    file = output / "digits.safetensors"
    write_shard(file, latents, labels, info)
    return file


COMMANDS = {"digits": digits}


def main(arguments: list[str]) -> None:
    command, settings = arguments[0] if arguments else None, dict(a.partition("=")[::2] for a in arguments[1:])
    if command not in COMMANDS:
        raise ValueError(f"unknown command {command!r}; use one of {', '.join(COMMANDS)}")
    if settings.keys() != {"output"} or not settings["output"]:
        raise ValueError(f"{command} takes output=<folder>, not {' '.join(arguments[1:]) or 'nothing'}")
    log.info("wrote %s", COMMANDS[command](Path(settings["output"])))


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
