"""The embedded handwritten digits, as the repository ships them in latents/digits.safetensors."""

from __future__ import annotations

from pathlib import Path

import torch

from latents.shards import ShardInfo, write_shard


def write_digits(file: Path) -> None:
    """Write the handwritten digits of scikit-learn (UCI, CC BY 4.0; 1,797 images of 8x8 pixels, 0 to 16) as one shard.

    Latents are the pixels, mapped to [-1, 1]; a scale factor of 2/3 brings their standard deviation (0.75) to EDM's 0.5.
    """
    from sklearn.datasets import load_digits  # nothing else needs it

    data = load_digits()
    latents = torch.from_numpy(data.images / 8 - 1).to(torch.float16)[:, None]  # [1797, 1, 8, 8], exact in float16
    info = ShardInfo(kind="sample", scale_factor=2 / 3, autoencoder="identity", resolution=8, num_classes=10)
    write_shard(file, latents, torch.from_numpy(data.target).to(torch.int64), info)
