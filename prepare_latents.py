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

import contextlib
import logging
import sys
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING

import numpy as np

from common.errors import UserError
from common.files import open_atomically
from common.images import labelled_grid
from common.types import AutoencoderSpec, Colour, PositiveFloat, PositiveInt, Text
from configs import command_line

if TYPE_CHECKING:
    from latents.prepare.encode import EncodeConfig

log = logging.getLogger("prepare_latents")


def encode(cfg: EncodeConfig) -> None:
    """Encode images into a folder of shards. All processes that accelerate starts share the work."""
    from latents import autoencoders
    from latents.prepare.encode import NOT_IN_LATENTS, encode_images
    from latents.prepare.images import count_classes, open_labelled_images
    from latents.prepare.write import ShardWriter
    from latents.shards import ShardInfo
    from latents.torch_files import read_channel_statistics
    from runtime import processes
    from runtime.machine import cores_per_process, start_accelerator

    cfg = replace(cfg, num_workers=cores_per_process() if cfg.num_workers is None else cfg.num_workers)
    # Use a long timeout, because processes that finish early wait for the slowest process.
    accelerator = start_accelerator(cfg.cpu_threads, tf32=cfg.tf32, timeout=timedelta(days=7))
    if cfg.autoencoder == "identity" and cfg.kind == "moments":
        raise UserError("kind=moments: pixels have no log-variance; use kind=sample with autoencoder=identity")
    if cfg.grey and cfg.autoencoder != "identity":
        raise UserError(f"grey=true: autoencoder={cfg.autoencoder} encodes RGB; use autoencoder=identity")
    if len(ways := [key for key in ("normalize", "sigma_data", "latents_stats") if getattr(cfg, key)]) > 1:
        raise UserError(f"{'= and '.join(ways)}= all scale the latents; give one of them")
    # Only rank 0 lists the images, so that the other ranks do not look up every file on a shared disk.
    source = processes.on_main(lambda: open_labelled_images(cfg.images, cfg.labels, cfg.part))
    processes.check_same(source.fingerprint(0, 1), "images", Path(cfg.images))
    if Path(cfg.images).resolve() in (Path(cfg.output).resolve(), *Path(cfg.output).resolve().parents):
        raise UserError(f"output={cfg.output} is inside images={cfg.images}; give a folder elsewhere")
    try:
        vae = autoencoders.build(cfg.autoencoder, accelerator.device, precision=cfg.precision)
    except UserError as e:
        raise UserError(f"{e}; or set autoencoder=identity, which keeps pixels and needs no weights") from e
    if cfg.resolution % vae.downsampling:
        raise UserError(f"resolution={cfg.resolution} is not a multiple of {vae.downsampling}, the downsampling factor")
    num_classes = count_classes(source.labels, cfg.num_classes, source.class_names)
    statistics = read_channel_statistics(Path(cfg.latents_stats), vae.channels) if cfg.latents_stats else ()
    scale_factor = 1.0 if cfg.normalize or statistics else vae.scale_factor
    info = ShardInfo(cfg.kind, scale_factor, cfg.autoencoder, cfg.resolution, num_classes, *statistics)
    settings = {name: value for name, value in asdict(cfg).items() if name not in NOT_IN_LATENTS}
    settings |= {"command": "encode", **asdict(info), "weights": vae.fingerprint(), "crop": "adm_center_crop"}

    def hash_items(*bounds: int) -> str:
        return processes.on_main(lambda: source.fingerprint(*bounds))

    writer = ShardWriter(cfg.output, settings, hash_items, len(source), cfg.shard_size, cfg.dtype)
    encode_images(source, vae, writer, info, cfg, accelerator)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        writer.finish(source.class_names, cfg.normalize, cfg.sigma_data, source=cfg.images, unread=source.unread)
    processes.leave()


def inspect(
    path: Text,
    images: Text | None = None,
    autoencoder: AutoencoderSpec | None = None,
    grid: Text = "auto",
    sigma_data: PositiveFloat = 0.5,
    cpu_threads: PositiveInt | None = None,
) -> None:
    """Read all latents, print a summary, and save a grid of 16 decoded latents. Exit with code 1 if there are problems.

    Args:
        path: Folder of shards, or a single shard.
        images: Folder of the encoded images. If `images` is set, the grid shows the original images next to the decoded latents.
        autoencoder: Autoencoder that decodes the latents for the grid. By default, the shards determine the autoencoder.
        grid: Image file to write. `auto` writes <path>/inspect_<hash>.png, and `none` disables the grid.
        sigma_data: Standard deviation of the network input that the diffusion assumes.
    """
    from latents import autoencoders
    from latents.prepare.inspect import fetch_images, fetch_originals, fetch_spread, find_problems
    from latents.shards import LatentDataset
    from runtime.machine import start_accelerator

    dataset = LatentDataset(path, check_folder=False)
    autoencoder = autoencoder or dataset.info.autoencoder
    file = Path(grid)
    if grid == "auto":
        folder = dataset.path if dataset.path.is_dir() else dataset.path.parent
        file = folder / f"inspect_{dataset.fingerprint[:8]}.png"
    elif file.exists():
        raise UserError(f"grid={file} exists; give another file, or remove it")
    is_drawn = grid != "none" and (grid != "auto" or autoencoder != "none")
    if is_drawn:
        device = start_accelerator(cpu_threads).device
        decoder = autoencoders.build(autoencoder, device, dataset.channels)
        originals = None if images is None else fetch_originals(dataset, images)
    problems = find_problems(dataset, sigma_data)
    if is_drawn:
        latents, labels = fetch_spread(dataset)
        decoded, num_columns = list(autoencoders.to_uint8(decoder.decode(latents.to(device)).cpu()).numpy()), 4
        if originals is None and dataset.has_jpegs:
            with contextlib.suppress(UserError):  # find_problems already reports unreadable images
                originals = fetch_images(dataset)
        if originals is not None:
            decoded, labels = sum(zip(decoded, originals), ()), [label for label in labels for _ in range(2)]
            num_columns = 8
        try:
            with open_atomically(file) as f:
                labelled_grid(decoded, labels, num_columns).save(f)
            log.info("drew %d latents in %s", len(latents), file)
        except UserError as e:
            log.warning("%s; grid=<file> sets another file", e)
    if problems:
        raise UserError("\n- ".join([f"{path}: {len(problems)} problems", *problems]))
    log.info("no problems were found")


def reference(images: Text, output: Text, resolution: PositiveInt | None = None, background: Colour = "white") -> None:
    """Write images to an .npz file, which fid.py uses as a reference. The first evaluation caches the features of the reference.

    Args:
        images: Folder of images, .npz file, or folder of pixel shards. The command copies labels from an .npz file or shards.
        resolution: Crop size in pixels for a folder of images, as in `encode`. By default, all images must have the same size.
        background: Background colour for transparent images.
    """
    from evaluations.images import open_images, read_ahead, write_npz
    from latents.shards import LatentDataset, shard_files

    if not output.endswith(".npz") or Path(output).exists():
        raise UserError(f"output={output} {'exists; give a new file' if Path(output).exists() else 'must end in .npz'}")
    if Path(images).is_dir() and shard_files(Path(images)):
        dataset = LatentDataset(images)
        if dataset.info.autoencoder != "identity" or resolution is not None:
            held = f"images={images} holds shards of {dataset.info.autoencoder}"
            raise UserError(f"{held}; give images, or shards of identity without resolution=")
        stretches = np.split(np.arange(len(dataset)), range(64, len(dataset), 64))
        batches = (dataset.fetch_with_images(items, np.zeros(len(items), dtype=bool))[2].numpy() for items in stretches)
        shape, labels = (len(dataset), dataset.height, dataset.width, 3), dataset.labels
    else:
        image_set = open_images(images, convert_to_rgb=True, crop=resolution, background=background)
        batches, shape, labels = image_set.batches(64), image_set.shape, image_set.labels
    write_npz(Path(output), (image for batch in read_ahead(batches) for image in batch), shape, labels)
    log.info("wrote %s", output)


def detector(reference: Text, output: Text, num_epochs: PositiveInt = 8, cpu_threads: PositiveInt | None = None) -> None:
    """Train a small classifier on small labelled images. Set evaluation.detector=small-<set> to use the classifier as a detector.

    Args:
        output: Weights file detectors/<set>.safetensors. The file name determines the metric name fd_<set>.
    """
    from evaluations.classifiers import train_detector
    from evaluations.images import open_images
    from runtime.machine import start_accelerator

    device = start_accelerator(cpu_threads).device
    try:
        accuracy = train_detector(open_images(reference), Path(output), device, num_epochs)
    except KeyboardInterrupt:  # unlike the other commands, this one cannot resume
        sys.stderr.write("stopped; nothing was written\n")
        sys.exit(128 + SIGINT)
    log.info("wrote %s: %.2f%% accuracy on the held-out images", output, 100 * accuracy)


COMMANDS = {
    "encode": "prepare_latents:encode",
    "convert": "latents.prepare.convert:convert",
    "inspect": "prepare_latents:inspect",
    "reference": "prepare_latents:reference",
    "detector": "prepare_latents:detector",
    "fetch": "latents.prepare.fetch:fetch",
}
KEYS = {"encode": "latents.prepare.encode:EncodeConfig", "convert": "latents.prepare.convert:ConvertConfig"}


def main(arguments: list[str]) -> None:
    command_line.run_command(COMMANDS, __doc__, arguments, KEYS)


if __name__ == "__main__":
    command_line.guard(lambda: main(sys.argv[1:]))
