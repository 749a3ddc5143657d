"""What the commands of the drills read: a finished run, images, tars of latents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from commands import run, tool
from PIL import Image
from test_webdataset import two_tars


def make_inputs(folder: Path) -> None:
    """run/ with checkpoints of steps 2, 4 and 6; images/ with two classes; tars/."""
    rng = np.random.default_rng(0)
    for i in range(10):
        file = folder / "images" / ("ant", "bee")[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(file)
    two_tars(folder / "tars")
    run(folder, tool("train", folder, "checkpoint.keep_last=3", "train.lr=1e-2")).expect_whole()
