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
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING

from common.errors import UserError, list_faults
from common.files import open_atomically
from common.images import DRAWING, class_caption, labelled_grid, to_uint8
from common.types import AutoencoderSpec, Colour, PositiveFloat, PositiveInt, Text
from configs import command_line

if TYPE_CHECKING:
    from latents.prepare.encode import EncodeConfig

log = logging.getLogger("prepare_latents")


def encode(cfg: EncodeConfig) -> None:
    """Encode images into a folder of shards. All processes that accelerate starts share the work."""
    from latents import autoencoders
    from latents.prepare.encode import (
        MAY_CHANGE_ON_RESUME,
        REPAIR_IN_SHARDS,
        encode_images,
        image_reader,
        open_folder,
        refuse_faults,
    )
    from latents.prepare.images import LabelledImages, count_classes, describe_classes, hash_images, open_labelled_images
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
    if len(ways := [key for key in ("normalize", "sigma_data", "latents_stats", "scale_factor") if getattr(cfg, key)]) > 1:
        raise UserError(f"{'= and '.join(ways)}= all scale the latents; give one of them")

    def find_images() -> LabelledImages:
        images = open_labelled_images(cfg.images, cfg.labels)
        refuse_faults(images, cfg)
        return images

    # Only the main process lists the images, so that the others do not look up every file on a shared disk.
    source = processes.on_main(find_images)
    processes.check_same(source.fingerprint(0, 1), "images", Path(cfg.images))
    if Path(cfg.images).resolve() in (Path(cfg.output).resolve(), *Path(cfg.output).resolve().parents):
        raise UserError(f"output={cfg.output} is inside images={cfg.images}; give a folder elsewhere")
    try:
        vae = autoencoders.build(cfg.autoencoder, accelerator.device, precision=cfg.precision)
    except UserError as e:
        raise UserError(f"{e}; or set autoencoder=identity, which keeps pixels and needs no weights") from e
    if cfg.resolution % vae.downsampling:
        raise UserError(f"resolution={cfg.resolution} is not a multiple of {vae.downsampling}, the downsampling factor")
    if cfg.part != "all" or cfg.duplicates == "skip":
        rank, num_processes = accelerator.process_index, accelerator.num_processes
        share = range(len(source) * rank // num_processes, len(source) * (rank + 1) // num_processes)
        hashes = processes.gather_lists(hash_images(source, image_reader(cfg), share, cfg.num_workers))
        source.choose(hashes, cfg.part, cfg.duplicates)
    num_classes = count_classes(source.all_labels, cfg.num_classes, source.class_names)
    log.info("%s", describe_classes(source))
    scale_factor, _, *statistics = vae.scaling
    if cfg.latents_stats or cfg.normalize or cfg.sigma_data:  # these replace the autoencoder's own statistics
        statistics = read_channel_statistics(Path(cfg.latents_stats), vae.channels) if cfg.latents_stats else ()
        scale_factor = scale_factor if cfg.sigma_data else 1.0
    info = ShardInfo(cfg.kind, cfg.scale_factor or scale_factor, cfg.autoencoder, cfg.resolution, num_classes, *statistics)
    settings = {name: value for name, value in asdict(cfg).items() if name not in MAY_CHANGE_ON_RESUME}
    if cfg.duplicates == "keep":
        del settings["duplicates"]  # shards of earlier versions lack the key
    settings |= {"command": "encode", **asdict(info), "weights": vae.fingerprint(), "crop": "adm_center_crop"}

    def hash_items(*bounds: int) -> str:
        return processes.on_main(lambda: source.fingerprint(*bounds))

    writer = ShardWriter(cfg.output, settings, hash_items, len(source), cfg.shard_size, cfg.dtype)
    processes.wait_for_all()  # no process changes the folder before every process has checked it
    # Only the main process looks at the folder, because the file systems of other nodes may see it as it was before.
    missing, unreadable = processes.on_main(lambda: open_folder(source, writer, cfg))
    counts = len(source), num_classes, len(missing), len(writer.shards)
    log.info("%d images in %d classes; %d of %d shards to make", *counts)
    share = missing[accelerator.process_index :: accelerator.num_processes]
    # The error comes after every process has made its shards, because it ends all processes.
    unreadable += processes.gather_lists(encode_images(source, vae, writer, share, info, cfg, accelerator))
    if unreadable:
        raise UserError(list_faults([entry["problem"] for entry in unreadable], REPAIR_IN_SHARDS))
    entries = {"source": cfg.images, "unread": source.unread}
    processes.on_main(lambda: writer.finish(source.class_names, cfg.normalize, cfg.sigma_data, source.faults, **entries))
    processes.leave()


def inspect(
    path: Text,
    images: Text | None = None,
    autoencoder: AutoencoderSpec | None = None,
    other: Text | None = None,
    grid: Text = "auto",
    sigma_data: PositiveFloat = 0.5,
    cpu_threads: PositiveInt | None = None,
) -> None:
    """Read all latents, print a summary, and save a grid of 16 decoded latents. Exit with code 1 if there are problems.

    Args:
        path: Folder of shards, or a single shard.
        images: Folder of the encoded images. If `images` is set, the command compares all latents with these images, and the grid
            shows the original images next to the decoded latents.
        other: Folder of shards. If `other` is set, images that are in both folders are a problem.
        autoencoder: Autoencoder that decodes the latents for the grid. By default, the shards determine the autoencoder.
        grid: Image file to write. `auto` writes <path>/inspect_<hash>.png, and `none` disables the grid.
        sigma_data: Standard deviation of the network input that the diffusion assumes.
    """
    from latents import autoencoders
    from latents.prepare.inspect import SourceImages, fetch_images, fetch_spread, find_problems, find_shared
    from latents.shards import LatentDataset, evenly_spaced_items
    from runtime.machine import start_accelerator

    dataset = LatentDataset(path, check_folder=False)
    autoencoder = autoencoder or dataset.info.autoencoder
    file = Path(grid)
    if grid == "auto":
        folder = dataset.path if dataset.path.is_dir() else dataset.path.parent
        file = folder / DRAWING.format(dataset.fingerprint[:8])
    elif file.exists():
        raise UserError(f"grid={file} exists; give another file, or remove it")
    is_drawn = grid != "none" and (grid != "auto" or autoencoder != "none")
    decoder, device = None, start_accelerator(cpu_threads).device
    if is_drawn or (images is not None and dataset.info.autoencoder != "identity"):
        decoder = autoencoders.build(autoencoder, device, dataset.channels)
    shared = [] if other is None else find_shared(dataset, LatentDataset(other, check_folder=False))
    source = None if images is None else SourceImages(dataset, images)
    problems = find_problems(dataset, sigma_data, source, decoder, device) + shared
    if is_drawn:
        latents, labels = fetch_spread(dataset)
        labels = [class_caption(label, dataset.class_names) for label in labels]
        decoded, num_columns = list(to_uint8(decoder.decode(latents.to(device)).cpu()).numpy()), 4
        originals = (
            None if source is None else [source.read(item).pixels for item in evenly_spaced_items(len(dataset), len(labels))]
        )
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


def reference(images: Text, output: Text, resolution: PositiveInt | None = None, background: Colour | None = None) -> None:
    """Write images to an .npz file, which fid.py uses as a reference. The first evaluation caches the features of the reference.

    Args:
        images: Folder of images, .npz file, or folder of pixel shards. The command copies labels from an .npz file or shards.
        resolution: Crop size in pixels for a folder of images, as in `encode`. By default, all images must have the same size.
        background: Background colour for transparent images in a folder (default: white), which the .npz file stores. For an .npz
            file or shards, the colour with which they were made.
    """
    from common.images import are_same_colour
    from evaluations.images import read_ahead, write_npz
    from latents.image_sets import holds_shards, open_image_set

    if not output.endswith(".npz") or Path(output).exists():
        raise UserError(f"output={output} {'exists; give a new file' if Path(output).exists() else 'must end in .npz'}")
    if holds_shards(images) and resolution is not None:
        raise UserError(f"resolution={resolution} crops the images of a folder, but images={images} holds shards")
    source = open_image_set(images, convert_to_rgb=True, crop=resolution, background=background or "white")
    if background and source.background and not are_same_colour(background, source.background):
        raise UserError(f"background={background}, but images={images} was made with background={source.background}")
    pixels = (image for batch in read_ahead(source.batches(64)) for image in batch)
    with ended_by_ctrl_c():
        stored = source.labels, source.background or background, source.statistics, source.class_names
        write_npz(Path(output), pixels, source.shape, *stored)
    log.info("wrote %s", output)


@contextlib.contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
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
    from evaluations.classifiers import train_detector
    from latents.image_sets import open_image_set
    from runtime.machine import start_accelerator

    device = start_accelerator(cpu_threads).device
    with ended_by_ctrl_c():
        accuracy = train_detector(open_image_set(reference), Path(output), device, num_epochs)
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
