"""The commands `synthetic` and `digits`: shards of random latents for benchmarks, and of the embedded handwritten digits."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from common.errors import UserError
from common.progress import progress_bar
from configs.settings import LatentSize, NumClasses, ShardSize, Text, Whole
from latents.prepare.write import SHARD_SIZE, Dtype, Kind, ShardWriter
from latents.shards import ShardInfo, write_shard

log = logging.getLogger(__name__)


def synthetic(
    output: Text,
    num_items: Annotated[int, Field(ge=1, le=10**9)],
    channels: LatentSize = 4,
    size: LatentSize = 32,
    num_classes: NumClasses = 1000,
    kind: Kind = "sample",
    flips: bool = False,
    dtype: Dtype = "float16",
    shard_size: ShardSize = SHARD_SIZE,
    seed: Whole = 0,
) -> None:
    """Write random latents for benchmarks: the network sees a standard deviation of 0.5; item i has label i mod num_classes."""
    info = ShardInfo(kind, 0.5, "none", 8 * size, min(num_classes, num_items))
    settings = {"command": "synthetic", **asdict(info), "channels": channels, "flips": flips, "seed": seed}
    writer = ShardWriter(output, settings, lambda start, stop: f"{start}-{stop}", num_items, shard_size, dtype)
    writer.open()
    for shard in progress_bar(writer.missing(), unit="shards"):
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence([seed, shard.number]).generate_state(1)[0]))
        latents = torch.randn(shard.stop - shard.start, channels, size, size, generator=generator)
        if kind == "moments":
            latents = torch.cat([latents, torch.full_like(latents, -12.0)], dim=1)
        labels = torch.arange(shard.start, shard.stop) % info.num_classes
        writer.write(shard, latents, labels, info, latents.flip(-1) if flips else None)
    writer.finish()


def digits(output: Text) -> None:
    """Write the handwritten digits of scikit-learn (UCI, CC BY 4.0; 1,797 images of 8x8 pixels, 0 to 16) as one shard.

    Latents are the pixels, mapped to [-1, 1]; a scale factor of 2/3 brings their standard deviation (0.75) to EDM's 0.5.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise UserError("the digits come with scikit-learn: pip install scikit-learn") from e

    data = load_digits()
    latents = torch.from_numpy(data.images / 8 - 1).to(torch.float16)[:, None]  # [1797, 1, 8, 8], exact in float16
    labels = torch.from_numpy(data.target).to(torch.int64)
    info = ShardInfo(kind="sample", scale_factor=2 / 3, autoencoder="identity", resolution=8, num_classes=10)
    file = Path(output) / "digits.safetensors"
    write_shard(file, latents, labels, info)
    log.info("wrote %s", file)
