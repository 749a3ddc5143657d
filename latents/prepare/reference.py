"""Implement `prepare_latents.py reference` and `detector`, which make references and detectors for fid.py."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGINT

from common.errors import UserError
from common.images import are_same_colour
from common.types import Colour, PositiveInt, Text
from evaluations.classifiers import train_detector
from evaluations.images import read_ahead, write_npz
from latents.image_sets import open_image_set
from runtime.machine import start_accelerator

log = logging.getLogger(__name__)


def reference(images: Text, output: Text, resolution: PositiveInt | None = None, background: Colour | None = None) -> None:
    """Write images to an .npz file, which fid.py uses as a reference. The first evaluation caches the features of the reference.

    Args:
        images: Folder of images, .npz file, or folder of pixel shards. The command copies labels from an .npz file or shards.
        resolution: Crop size in pixels for a folder of images, as in `encode`. By default, all images must have the same size.
        background: Background colour for transparent images in a folder (default: white), which the .npz file stores. For an .npz
            file or shards, the colour with which they were made.
    """
    if not output.endswith(".npz") or Path(output).exists():
        raise UserError(f"output={output} {'exists; give a new file' if Path(output).exists() else 'must end in .npz'}")
    image_set = open_image_set(images, convert_to_rgb=True, crop=resolution, background=background or "white")
    if background and image_set.background and not are_same_colour(background, image_set.background):
        raise UserError(f"background={background}, but images={images} was made with background={image_set.background}")
    pixels = (image for batch in read_ahead(image_set.batches(64)) for image in batch)
    with reporting_ctrl_c():
        stored = image_set.labels, image_set.background or background, image_set.statistics, image_set.class_names
        write_npz(Path(output), pixels, image_set.shape, *stored)
    log.info("wrote %s", output)


@contextlib.contextmanager
def reporting_ctrl_c() -> Iterator[None]:
    """Say after Ctrl-C that nothing was written. Unlike the other commands, the `with` block cannot resume."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("stopped; nothing was written\n")
        sys.exit(128 + SIGINT)


def detector(reference: Text, output: Text, num_epochs: PositiveInt = 8, cpu_threads: PositiveInt | None = None) -> None:
    """Train a small classifier on small labelled images. Set evaluation.detector=small-<set> to use the classifier as a detector.

    Args:
        output: Weights file detectors/<set>.safetensors. The file name determines the metric name fd_<set>.
    """
    device = start_accelerator(cpu_threads).device
    with reporting_ctrl_c():
        accuracy = train_detector(open_image_set(reference), Path(output), device, num_epochs)
    log.info("wrote %s: %.2f%% accuracy on the held-out images", output, 100 * accuracy)
