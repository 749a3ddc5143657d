"""Plan `prepare_latents.py encode`: its settings, the images to encode, and the shards to make."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field

from common.errors import UserError, list_problems
from common.progress import progress_bar
from common.types import Colour, NonNegativeInt, PositiveFloat, PositiveInt, Range, Text
from latents import autoencoders
from latents.autoencoders import SD_VAE, Autoencoder
from latents.batches import map_ahead
from latents.prepare.image_reader import ImageReader
from latents.prepare.labelled_images import LabelledImages, count_classes, describe_classes, open_labelled_images
from latents.prepare.write import SHARD_SIZE, Dtype, ShardFolder
from latents.shards import Duplicates, Kind, LabelBy, NumClasses, Part, Resolution, ShardInfo
from latents.torch_files import read_channel_statistics
from runtime.processes import FileFingerprint, gather_lists, own_share

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodeConfig:
    """Keys of `prepare_latents.py encode`."""

    images: Text  # folder with one subfolder per class (as in ImageNet) or with EDM's dataset.json, or WebDataset tars
    output: Text  # folder for the shards
    # `auto` makes the folders that hold the images the classes. `first_level` makes the first level of folders the classes, and
    # accepts tars of several parts of a data set. `none` assigns all images to a single class.
    labels: LabelBy = "auto"
    # `validation` selects about one of 20 images and `train` selects the others. Equal images belong to the same part.
    part: Part = "all"
    duplicates: Duplicates = "keep"  # whether to leave out images that equal an earlier one (`skip`)
    resolution: Resolution = 256  # height and width in pixels after ADM's centre crop (at most 65,536)
    pad: NonNegativeInt = 0  # number of black pixels to add on each side before the crop (2 pads 28x28 to 32x32)
    background: Colour = "white"  # background colour for transparent images, either a name or #rrggbb
    # Grey images with more than 8 bits (16-bit PNG, float TIFF) need the values that become black and white, such as [0,65535].
    value_range: Range | None = None
    grey: bool = False  # whether to convert images to one grey channel (requires autoencoder=identity)
    autoencoder: Annotated[str, Field(pattern="^(identity|(sd|va)-vae:.+)$")] = SD_VAE
    kind: Kind = "moments"  # `moments` (mean and log-variance, from which the trainer samples) or `sample` (drawn once by `seed`)
    flips: bool = False  # true also encodes the mirrored images
    keep_images: Literal["none", "jpeg"] = "none"  # `jpeg` also stores the cropped images for alignment
    normalize: bool = False  # whether to normalise each network input channel to mean 0 and standard deviation 1 over all latents
    latents_stats: Text | None = None  # LightningDiT's latents_stats.pt, which contains statistics to normalise each channel
    sigma_data: PositiveFloat | None = None  # target standard deviation of the network input (EDM: 0.5), which sets scale_factor
    scale_factor: PositiveFloat | None = None  # factor of another data set, so that init_from= can continue on this one
    num_classes: NumClasses | None = None  # number of classes, at most 1,000,000 (default: from class names or labels)
    precision: Literal["fp32", "bf16"] = "fp32"  # precision of the autoencoder (bf16 is intended for GPUs)
    dtype: Dtype = "float16"  # data type of the stored latents
    seed: NonNegativeInt = 0  # random seed for kind=sample
    shard_size: PositiveInt = SHARD_SIZE  # images per shard (a process holds up to two in memory, and loses them if interrupted)
    # `stop` lists what cannot be read in one error, after all other shards are made. `skip` leaves it out, and manifest.json
    # lists it: images, links, folders, and class folders without images.
    on_error: Literal["stop", "skip"] = "stop"
    batch_size: PositiveInt = 64  # batch size per process
    num_workers: NonNegativeInt | None = None  # number of reading threads per process (default: an equal share of the CPU cores)
    cpu_threads: PositiveInt | None = None  # number of torch's threads per process (default: an equal share of the CPU cores)
    tf32: bool = True  # whether CUDA uses TF32 for float32 matrix products and convolutions


# Keys that the settings in shards leave out. Some may change when `encode` resumes. Item hashes cover the images and labels.
# ShardInfo holds the values of the others, which may not change: scale_factor, and the statistics of latents_stats.
NOT_IN_SETTINGS = {"images", "output", "labels", "latents_stats", "on_error", "batch_size", "num_workers", "cpu_threads"}
NOT_IN_SETTINGS |= {"scale_factor"}
REPAIR = "repair or remove {}, or set on_error=skip"
NUM_CHECKED = 10_000  # number of images that `find_unreadable` reads


def check_settings(cfg: EncodeConfig) -> None:
    """Raise UserError if two settings exclude each other."""
    if cfg.autoencoder == "identity" and cfg.kind == "moments":
        raise UserError("kind=moments: pixels have no log-variance; use kind=sample with autoencoder=identity")
    if cfg.grey and cfg.autoencoder != "identity":
        raise UserError(f"grey=true: autoencoder={cfg.autoencoder} encodes RGB; use autoencoder=identity")
    scaling_keys = [key for key in ("normalize", "sigma_data", "latents_stats", "scale_factor") if getattr(cfg, key)]
    if len(scaling_keys) > 1:
        raise UserError(f"{'= and '.join(scaling_keys)}= all scale the latents; give one of them")
    if Path(cfg.images).resolve() in (Path(cfg.output).resolve(), *Path(cfg.output).resolve().parents):
        raise UserError(f"output={cfg.output} is inside images={cfg.images}; give a folder elsewhere")


def list_and_check_images(cfg: EncodeConfig) -> LabelledImages:
    """List the images. If there are problems and on_error=stop, raise UserError, which also names unreadable images."""
    images = open_labelled_images(cfg.images, cfg.labels)
    if images.problems and cfg.on_error == "stop":
        problems = images.problems | find_unreadable(images, cfg)
        raise UserError(f"images={cfg.images}: {list_problems([*problems.values()], REPAIR)}")
    return images


def find_unreadable(images: LabelledImages, cfg: EncodeConfig) -> dict[str, str]:
    """Read the first NUM_CHECKED images. Return {name: problem} of the unreadable ones. `encode_images` finds the others."""
    names = images.names[:NUM_CHECKED]
    errors = map_ahead(image_reader(images, cfg).error_of, range(len(names)), cfg.num_workers)
    errors = list(progress_bar(errors, total=len(names), unit="images", desc="checking"))
    return {name: error for name, error in zip(names, errors) if error is not None}


def select_images(images: LabelledImages, cfg: EncodeConfig) -> LabelledImages:
    """Return the images that `part` and `duplicates` select. If they do not select all, every process hashes a share of them."""
    if cfg.part == "all" and cfg.duplicates == "keep":
        return images
    hashes = gather_lists(image_reader(images, cfg).hashes(own_share(len(images)), cfg.num_workers))
    return images.select_part(hashes, cfg.part, cfg.duplicates)


def load_autoencoder(cfg: EncodeConfig, device: torch.device) -> Autoencoder:
    """Build the autoencoder, and check that it accepts images of `cfg.resolution`."""
    try:
        vae = autoencoders.build(cfg.autoencoder, device, precision=cfg.precision)
    except UserError as e:
        raise UserError(f"{e}; or set autoencoder=identity, which keeps pixels and needs no weights") from e
    if cfg.resolution % (factor := vae.scaling.downsampling):
        raise UserError(f"resolution={cfg.resolution} is not a multiple of {factor}, the downsampling factor")
    return vae


def fingerprint_inputs(images: LabelledImages, weights_hash: str, cfg: EncodeConfig) -> list[FileFingerprint]:
    """Return what this process sees of the images and of the autoencoder's weights."""
    weights = FileFingerprint("autoencoder", Path(cfg.autoencoder.partition(":")[2]), weights_hash)
    return [FileFingerprint("images", Path(cfg.images), images.hash(0, 1)), weights]


def plan_shards(
    images: LabelledImages, vae: Autoencoder, weights_hash: str, cfg: EncodeConfig, stack: contextlib.ExitStack
) -> tuple[ShardFolder, dict[str, str]]:
    """Lock the output folder until `stack` is closed, rename shards that are out of date, and find the missing shards.

    Return the folder, and what `recheck_left_out` returns.
    """
    info = plan_shard_info(images, vae, cfg)
    settings = {name: value for name, value in asdict(cfg).items() if name not in NOT_IN_SETTINGS}
    if cfg.duplicates == "keep":
        del settings["duplicates"]  # shards of earlier versions lack the key
    settings |= {"command": "encode", **asdict(info), "weights": weights_hash, "crop": "adm_center_crop"}
    folder = ShardFolder.open(cfg.output, info, settings, images.hash, len(images), stack)
    still_unreadable = recheck_left_out(folder, images, cfg)
    num_missing = len(folder.missing)
    log.info("%d images in %d classes; %d of %d shards to make", len(images), info.num_classes, num_missing, len(folder.shards))
    return folder, still_unreadable


def recheck_left_out(folder: ShardFolder, images: LabelledImages, cfg: EncodeConfig) -> dict[str, str]:
    """Read the images again that finished shards have left out, and rename the shards for which one can be read now.

    With on_error=stop, return {name: problem} of those that are still unreadable. If there are any, no shard is renamed, because
    a command that ends with an error makes no shard again.
    """
    read_image = image_reader(images, cfg)
    outdated: dict[Path, str] = {}
    unreadable: dict[str, str] = {}
    for shard, left_out in folder.finished.items():
        for index in (i for i in range(shard.start, shard.stop) if images.names[i] in left_out):
            if (error := read_image.error_of(index)) is None:
                outdated.setdefault(shard.file, f"left out {images.names[index]}, which can be read now")
            elif cfg.on_error == "stop":
                unreadable[images.names[index]] = error
    if not unreadable:
        folder.rename_outdated(outdated)
    return unreadable


def plan_shard_info(images: LabelledImages, vae: Autoencoder, cfg: EncodeConfig) -> ShardInfo:
    """Return the header of the shards, and log the classes. The user's statistics replace the autoencoder's own.

    Raises UserError if labels, `num_classes` or `latents_stats` do not fit.
    """
    num_classes = count_classes(images.all_labels, cfg.num_classes, images.class_names)
    log.info("%s", describe_classes(images))
    scale_factor, _, mean, std = vae.scaling
    if cfg.latents_stats:
        scale_factor = 1.0
        mean, std = read_channel_statistics(Path(cfg.latents_stats), vae.channels)
    elif cfg.normalize or cfg.sigma_data:  # `ShardFolder.finish` stores the measured statistics or scale factor
        scale_factor = 1.0 if cfg.normalize else scale_factor
        mean = std = None
    return ShardInfo(cfg.kind, cfg.scale_factor or scale_factor, cfg.autoencoder, cfg.resolution, num_classes, mean, std)


def image_reader(images: LabelledImages, cfg: EncodeConfig) -> ImageReader:
    return ImageReader(images, cfg.resolution, cfg.background, cfg.pad, cfg.grey, cfg.value_range)
