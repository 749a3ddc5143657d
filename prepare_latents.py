"""Make latent shards, from images or from other people's latents, and look at them.

    python prepare_latents.py encode images=imagenet/train output=latents/in256
    accelerate launch --multi_gpu --num_processes 8 prepare_latents.py encode images=imagenet/train output=latents/in256
    python prepare_latents.py convert path=imagenet256_latent_lmdb/train output=latents/in256
    python prepare_latents.py inspect path=latents/in256
    python prepare_latents.py synthetic num_items=4096 output=latents/random    # for benchmarks
    python prepare_latents.py digits output=<folder>     # the embedded digits, bit for bit as the repository ships them
    python prepare_latents.py reference images=<folder> output=<file.npz>       # for fid.py
    python prepare_latents.py detector reference=<file.npz> output=detectors/<set>.safetensors  # for small pictures
    python prepare_latents.py fetch                      # the SD-VAE and Inception, once where there is a network

`encode` and `convert` continue where they were stopped when the same command is given again.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch

from common.errors import UserError
from common.files import hash_bytes, whole_file
from common.progress import log_to_stderr, progress_bar
from configs import command_line as cli
from configs.schema import Autoencoder, Detectors, Precision
from configs.settings import BatchSize, Count, NumClasses, NumThreads, NumWorkers, Positive, Resolution, ShardSize, Text, Whole
from evaluations.classifiers import train_detector
from evaluations.images import open_images
from evaluations.inception import InceptionDetector, fetch_weights
from evaluations.reference import write_reference
from evaluations.vit import DINOV2_B, DINOv2Detector, find_encoder_weights
from latents import autoencoders
from latents.detection import SD_VAE, detect
from latents.prepare.encode import encode_images
from latents.prepare.formats import FORMATS, open_latents
from latents.prepare.generate import digits, synthetic
from latents.prepare.images import open_labelled_images
from latents.prepare.inspect import fetch_images, fetch_spread, inspect_latents
from latents.prepare.pixels import PixelShards
from latents.prepare.torchvision_sets import TORCHVISION, TorchvisionImages
from latents.prepare.write import SHARD_SIZE, SHARD_SIZE_OF_FEATURES, Dtype, Kind, ShardWriter, check_output
from latents.shards import LatentDataset, ShardInfo, pack_images, shard_files
from latents.webdataset import TarLatents
from sampling.sampler import labelled_grid
from training import machine
from training.build import build_encoder
from training.machine import cores_per_process

log = logging.getLogger("prepare_latents")


def encode(
    images: Text,
    output: Text,
    labels: Text = "auto",
    root: Text | None = None,
    split: Text | None = None,
    resolution: Resolution = 256,
    pad: Whole = 0,
    grey: bool = False,
    autoencoder: Autoencoder = SD_VAE,
    kind: Kind = "moments",
    flips: bool = False,
    keep_images: Literal["none", "jpeg"] = "none",
    features: bool = False,
    encoder: Text | None = None,
    encoder_weights: Text | None = None,
    features_grid: Count | None = None,
    normalize: bool = False,
    sigma_data: Positive | None = None,
    num_classes: NumClasses | None = None,
    precision: Precision = "fp32",
    dtype: Dtype = "float16",
    batch_size: BatchSize = 64,
    num_workers: NumWorkers | None = None,
    shard_size: ShardSize | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    seed: Whole = 0,
    cpu_threads: NumThreads | None = None,
    tf32: bool = True,
) -> None:
    """Encode images into a folder of shards, with as many processes as accelerate starts.

    Args:
        images: a folder with a folder per class (ImageNet's layout), a folder with a file of labels, WebDataset tars, or
            torchvision:<class of torchvision.datasets>.
        labels: auto | folders | none (one class) | a CSV or JSON file.
        root: of torchvision's sets: the folder that has the files, or gets them from the network; null: datasets.
        split: of torchvision's sets: train | test, or another that the set has; null: train.
        resolution: of the square that ADM's centre crop leaves, in pixels.
        pad: black pixels that are added to every side before the crop: pad=2 makes 32x32 of 28x28.
        grey: keep the brightness alone, as one channel, with autoencoder=identity.
        autoencoder: sd-vae:<hub id or folder>, va-vae:<file or folder>, or identity for pixels.
        kind: moments (mean and log-variance, sampled afresh at every read) or sample (drawn once, from `seed`).
        flips: encode the mirrored images as well.
        keep_images: none | jpeg: put the cropped images beside the latents, for alignment.
        features: put the patch tokens of `encoder` beside the latents, for alignment on small data.
        encoder: of the features: a vision transformer of timm, with the tag of its weights; null: DINOv2's ViT-B/14.
        encoder_weights: file of its weights; null: from the Hugging Face hub.
        features_grid: patches along one side of an image; null: half of the latents', as for networks with patches of 2.
        normalize: the network sees each channel with a mean of 0 and a standard deviation of 1, measured over all latents.
        sigma_data: the network sees all values with this standard deviation, measured over all latents: 0.5 for EDM and
            pixels; null: with the scale factor of the autoencoder.
        num_classes: null: as many as there are class names, or the largest label + 1.
        precision: of the autoencoder; bf16 is for GPUs.
        dtype: of the stored latents.
        num_workers: processes that read images, beside each process that encodes; null: its share of the cores.
        shard_size: images per shard: what is lost when the command is stopped, and what one process makes and holds in
            memory at a time; null: 4096, with features 512.
        on_error: stop | skip at an image that cannot be read; manifest.json lists what was skipped.
        tf32: on CUDA, compute products and convolutions of float32 in TF32.
    """
    # A process that is done waits for the slowest one, however long that takes.
    accelerator = machine.start_accelerator(cpu_threads, tf32=tf32, patience=timedelta(days=7))
    if autoencoder == "identity" and kind == "moments":
        raise UserError("kind=moments: pixels have no log-variance; use kind=sample with autoencoder=identity")
    if grey and autoencoder != "identity":
        raise UserError(f"grey=true: autoencoder={autoencoder} encodes RGB; leave out grey=true, or use autoencoder=identity")
    of_features = {"encoder": encoder, "encoder_weights": encoder_weights, "features_grid": features_grid}
    if not features and (given := [f"{key}={value}" for key, value in of_features.items() if value is not None]):
        raise UserError(f"{given[0]} is for features=true; add it, or leave out {' and '.join(given)}")
    if normalize and sigma_data is not None:
        raise UserError(f"normalize=true and sigma_data={sigma_data:g} are two ways to scale; give one of them")
    if images.startswith(TORCHVISION):
        if labels != "auto":
            raise UserError(f"labels={labels} is for folders of images; {images} has its own labels")
        with accelerator.local_main_process_first():  # one process of a machine downloads, the others find the files
            source = TorchvisionImages(images.removeprefix(TORCHVISION), root or "datasets", split or "train")
    elif given := [f"{key}={value}" for key, value in (("root", root), ("split", split)) if value]:
        raise UserError(f"{given[0]} is for images={TORCHVISION}<name>; leave it out")
    else:
        source = open_labelled_images(images, labels)
    if Path(images).resolve() in (Path(output).resolve(), *Path(output).resolve().parents):
        raise UserError(f"output={output} lies in images={images}; give a folder elsewhere")
    check_output(Path(output))
    if known := autoencoders.known_scale_and_factor(autoencoder):
        check_resolution(resolution, known[1])
    vae = autoencoders.build(autoencoder, accelerator.device, None, "autoencoder", precision)
    check_resolution(resolution, vae.factor)
    frozen = None
    if features:
        encoder = encoder or DINOV2_B
        grid = features_grid or max(resolution // vae.factor // 2, 1)
        frozen = build_encoder(encoder, encoder_weights, grid, accelerator, precision, "encoder")
    scale, num_classes = 1.0 if normalize else vae.scale_factor, source.count_classes(num_classes)
    info = ShardInfo(kind, scale, autoencoder, resolution, num_classes, encoder=encoder)
    settings = {
        "command": "encode",
        **asdict(info),
        "weights": vae.fingerprint(),
        "crop": "adm_center_crop",
        "flips": flips,
        "pad": pad or None,
        "grey": grey or None,
        "keep_images": None if keep_images == "none" else keep_images,
        "encoder_weights": frozen.weights_hash if frozen else None,
        "features_grid": frozen.grid if frozen else None,
        "normalize": normalize or None,
        "sigma_data": sigma_data,
        "precision": precision,
        "seed": seed if kind == "sample" else None,
    }
    shard_size = shard_size or (SHARD_SIZE_OF_FEATURES if features else SHARD_SIZE)
    writer = ShardWriter(output, settings, source.fingerprint, len(source), shard_size, dtype)
    num_workers = cores_per_process() if num_workers is None else num_workers
    how = dict(batch_size=batch_size, num_workers=num_workers, flips=flips, seed=seed, on_error=on_error, pad=pad, grey=grey)
    how |= dict(keep_images=keep_images == "jpeg", encoder=frozen)
    encode_images(source, vae, writer, info, accelerator, **how)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        writer.finish(source.class_names, normalize, sigma_data, source=images, crop=settings["crop"], precision=precision)
    accelerator.end_training()


def check_resolution(resolution: int, factor: int) -> None:
    if resolution % factor:
        raise UserError(f"resolution={resolution} is not a multiple of {factor}, the pixels along one side of a latent")


def convert(
    path: Text,
    output: Text,
    format: Literal[("auto", *FORMATS)] = "auto",
    kind: Kind | None = None,
    stored_scale: Positive | None = None,
    scale_factor: Positive | None = None,
    autoencoder: Autoencoder | None = None,
    resolution: Resolution | None = None,
    num_classes: NumClasses | None = None,
    normalize: bool | None = None,
    keep_images: Literal["none", "jpeg"] = "none",
    dtype: Dtype = "float16",
    shard_size: ShardSize = SHARD_SIZE,
    allow_pickle: bool = False,
) -> None:
    """Rewrite the latents of another project as shards. What is not given is detected and logged, or asked for.

    Args:
        path: where they are.
        format: auto | maskdit_lmdb | webdataset | fast_dit | repa | lightningdit.
        kind: moments | sample.
        stored_scale: what the stored values were multiplied by before they were stored (1, or 0.18215); shards hold them without.
        scale_factor: what the network's input is multiplied by.
        autoencoder: sd-vae:<hub id or folder>, va-vae:<file or folder>, identity, or none where nothing decodes them.
        resolution: of the images, in pixels.
        normalize: true: the network sees each channel with a mean of 0 and a standard deviation of 1, measured over all
            latents; null: so by LightningDiT's latents_stats.pt, where there is one; false: never.
        keep_images: none | jpeg: put the images that lie beside REPA's latents into the shards, for alignment.
        dtype: of the stored latents.
        allow_pickle: read pickled items; a restricted reader admits NumPy arrays and nothing else.
    """
    source = open_latents(path, format, allow_pickle)
    spread = source.read_spread()
    given = dict(kind=kind, stored_scale=stored_scale, scale_factor=scale_factor, autoencoder=autoencoder)
    given |= dict(resolution=resolution, num_classes=num_classes)
    told = source.channel_statistics if normalize is None else None
    known = dict(known_kind=source.known_kind, known_stored_scale=source.known_stored_scale)
    known["known_scale_factor"] = 1.0 if told or normalize else None
    info, stored_scale, statements = detect(spread, labels=source.labels, **given, **known)
    if told:
        mean, std = (tuple(value / stored_scale for value in values) for values in told)
        info = replace(info, latents_mean=mean, latents_std=std)
    statements = [*source.statements, *statements]
    for line in (f"{path}: {len(source.labels)} items, {source.name}", *statements):
        log.info("%s", line)
    settings = {"command": "convert", "format": source.name, **asdict(info), "stored_scale": stored_scale}
    settings["normalize"] = normalize or None
    settings["keep_images"] = None if keep_images == "none" else keep_images
    read_image = None if keep_images == "none" else source.find_images(info.resolution)
    # Names, sizes and labels can be equal where values differ, so some values are hashed as well.
    fingerprint = hash_bytes(f"{source.fingerprint()} {hash_bytes(spread.numpy().tobytes())}".encode())
    writer = ShardWriter(output, settings, lambda start, stop: fingerprint, len(source.labels), shard_size, dtype)
    writer.open()
    log.info("%d of %d shards to make", len(writer.missing()), len(writer.shards))
    for shard in progress_bar(writer.missing(), unit="shards"):
        latents, latents_flip = source.read(shard.start, shard.stop)
        if stored_scale != 1:
            latents, latents_flip = (None if x is None else x / stored_scale for x in (latents, latents_flip))
        shown = None if read_image is None else pack_images([read_image(item) for item in range(shard.start, shard.stop)])
        labels = torch.from_numpy(source.labels[shard.start : shard.stop])
        writer.write(shard, latents, labels, info, latents_flip, shown=shown)
    writer.finish(normalize=bool(normalize), source=path, detected=statements)


def inspect(
    path: Text,
    format: Literal["native", "webdataset"] = "native",
    autoencoder: Autoencoder | None = None,
    grid: Text = "auto",
    sigma_data: Positive = 0.5,
    kind: Kind | None = None,
    stored_scale: Positive | None = None,
    scale_factor: Positive | None = None,
    resolution: Resolution | None = None,
    num_classes: NumClasses | None = None,
    allow_pickle: bool = False,
    cpu_threads: NumThreads | None = None,
) -> None:
    """Read all latents once, print what is there, draw 16 of them; the exit code is not 0 when something is wrong.

    Args:
        path: a folder of shards, or a shard; with format=webdataset, of tars.
        autoencoder: decodes the grid; null: the one that the shards name.
        grid: auto (<path>/inspect_<data>.png), a file to write, or none.
        sigma_data: standard deviation that the diffusion assumes.
        kind, stored_scale, scale_factor, resolution, num_classes, allow_pickle: of tars, as for convert.
    """
    of_tars = dict(kind=kind, stored_scale=stored_scale, scale_factor=scale_factor, resolution=resolution)
    of_tars |= dict(num_classes=num_classes, allow_pickle=allow_pickle)
    if format == "native":
        given = [key for key, value in of_tars.items() if value not in (None, False)]
        if given:
            raise UserError(f"{given[0]}={of_tars[given[0]]} is for format=webdataset; native shards say it themselves")
        dataset = LatentDataset(path, check_folder=False, key="path")
    else:
        dataset = TarLatents(path, autoencoder=autoencoder, **of_tars)
        for line in dataset.statements:
            log.info("%s", line)
    autoencoder = autoencoder or dataset.info.autoencoder
    file = Path(grid) if grid not in ("auto", "none") else None
    if grid == "auto" and autoencoder != "none":
        folder = dataset.path if dataset.path.is_dir() else dataset.path.parent
        file = folder / f"inspect_{dataset.fingerprint()[:8]}.png"
    if file is not None:
        if grid != "auto" and file.exists():
            raise UserError(f"grid={file} exists; give another file, or remove it")
        device = machine.start_accelerator(cpu_threads).device
        try:
            decoder = autoencoders.build(autoencoder, device, dataset.channels, "autoencoder")
        except UserError as e:
            raise UserError(f"{e}; or leave the picture out: grid=none") from e
    found = inspect_latents(dataset, sigma_data)
    for line in found.lines:
        log.info("%s", line)
    if file is not None:
        latents, labels = fetch_spread(dataset)
        images, num_columns = list(autoencoders.to_uint8(decoder.decode(latents.to(device)).cpu()).numpy()), 4
        if format == "native" and dataset.stores_images:
            with contextlib.suppress(UserError):  # an image that cannot be read is among the problems
                pairs = list(zip(images, fetch_images(dataset)))  # beside what their latents decode to
                images, labels, num_columns = sum(pairs, ()), [label for label in labels for _ in range(2)], 8
        try:
            with whole_file(file) as f:
                labelled_grid(list(images), labels, num_columns).save(f)
            log.info("drew %d of them in %s", len(latents), file)
        except UserError as e:
            log.warning("%s; grid=<file> draws elsewhere", e)
    if found.problems:
        raise UserError(f"{path}: {len(found.problems)} problems", *(f"- {problem}" for problem in found.problems))
    log.info("nothing wrong was found")


def reference(
    images: Text,
    output: Text,
    resolution: Resolution | None = None,
    weights: Text | None = None,
    statistics: bool = True,
    detectors: Detectors | None = None,
    dinov2_weights: Text | None = None,
    cpu_threads: NumThreads | None = None,
) -> None:
    """Write the images of a folder (or an .npz) as a reference batch: arr_0 and Inception's mu, sigma, mu_s, sigma_s.

    With detectors=[inception,dinov2], also mu_dinov2 and sigma_dinov2.

    Args:
        images: a folder of PNG or JPEG files (grey and RGBA ones are converted to RGB), an .npz, or a folder of shards of
            pixels (encode autoencoder=identity), whose labels are kept.
        resolution: crop them to this size as encode does; null: they are of one size and taken as they are.
        weights: file of Inception's weights; downloaded when absent.
        statistics: `false` leaves them out: no Inception is needed, and every evaluation computes its own.
        detectors: whose statistics are written, of inception and dinov2; null: [inception].
        dinov2_weights: file of DINOv2's ViT-L/14; null: from the Hugging Face hub.
    """
    if not output.endswith(".npz"):
        raise UserError(f"output={output} must end in .npz")
    if Path(images).is_dir() and shard_files(Path(images)):
        if resolution is not None:
            raise UserError(f"resolution={resolution} is for folders of images; those in {images} have their size: leave it out")
        image_set = PixelShards(images)
    else:
        image_set = open_images(images, convert_to_rgb=True, crop=resolution)
    if len(image_set) < 2:
        raise UserError(f"images={images} holds {len(image_set)} images; a reference needs at least 2")
    if detectors and not statistics:
        raise UserError(f"detectors=[{','.join(detectors)}] and statistics=false exclude each other; leave one of them out")
    built = []
    if statistics:
        device = machine.start_accelerator(cpu_threads).device
        names = detectors or [InceptionDetector.name]
        if DINOv2Detector.name in names:
            built.append(DINOv2Detector(dinov2_weights, device))
        if InceptionDetector.name in names:
            built.append(InceptionDetector(weights, device))
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    write_reference(image_set, Path(output), built)
    log.info("wrote %s", output)


def detector(reference: Text, output: Text, num_epochs: Count = 8, cpu_threads: NumThreads | None = None) -> None:
    """Train a small classifier as the detector of small pictures: evaluation.detector=small-<set> evaluation.weights=<output>.

    A tenth of the images is held out; the file holds the accuracy on them. On a CPU, 60,000 images take some minutes.

    Args:
        reference: an .npz of images with labels, which `reference` makes of shards of pixels.
        output: detectors/<set>.safetensors; the set's name goes into those of the metrics: fd_<set>.
        num_epochs: over nine tenths of the images.
    """
    device = machine.start_accelerator(cpu_threads).device
    accuracy = train_detector(open_images(reference), Path(output), device, num_epochs)
    log.info("wrote %s: %.2f%% of the images held out get their own class", output, 100 * accuracy)


def fetch(autoencoder: Autoencoder = SD_VAE, encoder: Text | None = None) -> None:
    """Download the autoencoder and Inception into their caches, so that no other command needs a network.

    What is there already is checked, and not downloaded again.

    Args:
        encoder: timm's name of a vision transformer, to download as well: vit_large_patch14_dinov2.lvd142m for
            evaluation.detectors=[inception,dinov2].
    """

    def fetch_autoencoder() -> Path | None:
        folder = autoencoders.find(autoencoder, "autoencoder")
        autoencoders.build(autoencoder, torch.device("cpu"), None, "autoencoder")  # reads it whole
        return folder

    actions = [(autoencoder, fetch_autoencoder), ("Inception", fetch_weights)]
    if encoder is not None:
        actions.append((encoder, lambda: find_encoder_weights(encoder)))
    problems = []
    for name, action in actions:
        try:
            log.info("%s is complete: %s", name, action())
        except UserError as e:
            problems.append(str(e))
    if problems:
        raise UserError(*problems)


COMMANDS = {command.__name__: command for command in (encode, convert, inspect, synthetic, digits, reference, detector, fetch)}


def main(arguments: list[str]) -> None:
    cli.run_command(COMMANDS, __doc__, arguments)


if __name__ == "__main__":
    log_to_stderr()
    cli.guard(lambda: main(sys.argv[1:]))
