"""Make latent shards.

python prepare_latents.py digits output=<folder>     # the embedded digits, bit for bit as the repository ships them
"""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path

import torch

from evaluations.detector import InceptionDetector
from evaluations.images import open_images
from evaluations.reference import write_reference
from latents.shards import ShardInfo, write_shard

log = logging.getLogger("prepare_latents")


def digits(output: str) -> Path:
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
    file = Path(output) / "digits.safetensors"
    write_shard(file, latents, labels, info)
    return file


def reference(images: str, output: str, weights: str | None = None, statistics: str = "true") -> Path:
    """Write the images of a folder (or an .npz) as a reference batch: arr_0 and Inception's mu, sigma, mu_s, sigma_s.

    Args:
        images: a folder of PNG or JPEG files of one size; grey and RGBA ones are converted to RGB.
        weights: file of Inception's weights; downloaded when absent.
        statistics: `false` leaves them out: no Inception is needed, and every evaluation computes its own.
    """
    if statistics not in ("true", "false"):
        raise ValueError(f"statistics={statistics} is not accepted; use true | false")
    if not output.endswith(".npz"):
        raise ValueError(f"output={output} must end in .npz")
    image_set = open_images(images, convert_to_rgb=True)
    if len(image_set) < 2:
        raise ValueError(f"images={images} holds {len(image_set)} images; a reference needs at least 2")
    detector = InceptionDetector(weights) if statistics == "true" else None
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    write_reference(image_set, Path(output), detector)
    return Path(output)


COMMANDS = {"digits": digits, "reference": reference}


def main(arguments: list[str]) -> None:
    command, settings = arguments[0] if arguments else None, dict(a.partition("=")[::2] for a in arguments[1:])
    if command not in COMMANDS:
        raise ValueError(f"unknown command {command!r}; use one of {', '.join(COMMANDS)}")
    keys = inspect.signature(COMMANDS[command]).parameters
    wrong = [key for key, value in settings.items() if key not in keys or not value]
    missing = [name for name, p in keys.items() if p.default is inspect.Parameter.empty and name not in settings]
    if wrong or missing:
        problem = f"{wrong[0]} is not a key or has no value" if wrong else f"{missing[0]}= is missing"
        raise ValueError(f"{command}: {problem}; it takes {', '.join(f'{key}=' for key in keys)}")
    log.info("wrote %s", COMMANDS[command](**settings))


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
