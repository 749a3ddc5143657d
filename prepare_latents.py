"""Make latent shards, from images or from other people's latents, and look at them.

    python prepare_latents.py encode images=imagenet/train output=latents/in256
    accelerate launch --multi_gpu --num_processes 8 prepare_latents.py encode images=imagenet/train output=latents/in256
    python prepare_latents.py convert path=imagenet256_latent_lmdb/train output=latents/in256
    python prepare_latents.py inspect path=latents/in256
    python prepare_latents.py synthetic num_items=4096 output=latents/random    # for benchmarks
    python prepare_latents.py digits output=<folder>     # the embedded digits, bit for bit as the repository ships them
    python prepare_latents.py reference images=<folder> output=<file.npz>       # for fid.py

`encode` and `convert` go on where they were stopped when the same command is given again.
"""

from __future__ import annotations

import inspect as introspection
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import yaml
from accelerate.utils import InitProcessGroupKwargs
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from errors import UserError
from evaluations.detector import InceptionDetector
from evaluations.images import open_images
from evaluations.reference import write_reference
from latents import autoencoders
from latents.detection import detect
from latents.manifest import hash_of
from latents.prepare.convert import FORMATS, open_foreign, sample_of
from latents.prepare.encode import encode_images
from latents.prepare.images import open_labelled_images
from latents.prepare.inspect import inspect_latents, items_to_draw
from latents.prepare.write import DTYPES, ShardWriter
from latents.progress import progress_bar
from latents.shards import KINDS, LatentDataset, ShardInfo, write_shard
from latents.webdataset import TarLatents
from sampling.sampler import labelled_grid
from setup.schema import AUTOENCODER, TRAIN_KEYS, Accepts, choice, number, or_null, text, true_or_false, whole
from setup import cli

log = logging.getLogger("prepare_latents")

SHARD_SIZE = 4096  # items of the source that make one shard: 64 MiB of moments at 256 pixels


def encode(
    images: str,
    output: str,
    labels: str = "auto",
    resolution: int = 256,
    autoencoder: str = "sd-vae:stabilityai/sd-vae-ft-ema",
    kind: str = "moments",
    flips: bool = False,
    num_classes: int | None = None,
    precision: str = "fp32",
    dtype: str = "float16",
    batch_size: int = 64,
    num_workers: int | None = None,
    shard_size: int = SHARD_SIZE,
    on_error: str = "stop",
    seed: int = 0,
    cpu_threads: int | None = None,
) -> None:
    """Encode images into a folder of shards, with as many processes as accelerate starts.

    Args:
        images: a folder with a folder per class (ImageNet's layout), a folder with a file of labels, or WebDataset tars.
        labels: auto | folders | none (one class) | a CSV or JSON file.
        resolution: of the square that ADM's centre crop leaves, in pixels.
        autoencoder: sd-vae:<hub id or folder>, or identity for pixels.
        kind: moments (mean and log-variance, sampled afresh at every read) or sample (drawn once, from `seed`).
        flips: encode the mirrored images as well.
        num_classes: null: as many as there are class names, or the largest label + 1.
        precision: of the autoencoder; bf16 is for GPUs.
        dtype: of the stored latents.
        num_workers: processes that read images, beside each process that encodes; null: its share of the cores.
        shard_size: images per shard: what is lost when the command is stopped, and what one process makes at a time.
        on_error: stop | skip at an image that cannot be read; manifest.json lists what was skipped.
    """
    # A process that is done waits for the slowest one, however long that takes.
    patience = InitProcessGroupKwargs(timeout=timedelta(days=7))
    accelerator = cli.start_accelerator(cpu_threads, kwargs_handlers=[patience])
    vae = autoencoders.build(autoencoder, accelerator.device, None, "autoencoder", precision)
    if resolution % vae.factor:
        raise UserError(f"resolution={resolution} is not a multiple of {vae.factor}, the pixels along one side of a latent")
    if autoencoder == "identity" and kind == "moments":
        raise UserError("kind=moments: pixels have no log-variance; use kind=sample with autoencoder=identity")
    source = open_labelled_images(images, labels)
    if Path(images).resolve() in (Path(output).resolve(), *Path(output).resolve().parents):
        raise UserError(f"output={output} lies in images={images}; give a folder elsewhere")
    info = ShardInfo(kind, vae.scale_factor, autoencoder, resolution, count_classes(source, num_classes))
    settings = {
        "command": "encode",
        **asdict(info),
        "weights": vae.fingerprint(),
        "crop": "adm_center_crop",
        "flips": flips,
        "precision": precision,
        "seed": seed if kind == "sample" else None,
    }
    writer = ShardWriter(output, settings, source.fingerprint, len(source), shard_size, dtype)
    accelerator.wait_for_everyone()  # all have looked before one changes the folder
    if accelerator.is_main_process:
        writer.open()
    accelerator.wait_for_everyone()
    pieces, num_missing = writer.todo(accelerator.process_index, accelerator.num_processes), len(writer.todo())
    accelerator.wait_for_everyone()
    log.info("%d images in %d classes", len(source), info.num_classes)
    log.info("%d of %d shards to make", num_missing, len(writer.pieces))
    waited = encode_images(
        source,
        vae,
        writer,
        pieces,
        info,
        device=accelerator.device,
        batch_size=batch_size,
        num_workers=cli.cores_per_process() if num_workers is None else num_workers,
        flips=flips,
        seed=seed,
        on_error=on_error,
        describe=f"process {accelerator.process_index + 1} of {accelerator.num_processes}"
        if accelerator.num_processes > 1
        else "",
    )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if pieces:
            log.info("waiting for images took %.0f%% of the time", 100 * waited)
        summarise(output, writer.finish(source.class_names, source=str(images), crop="adm_center_crop", precision=precision))
    accelerator.end_training()


def count_classes(source, num_classes: int | None) -> int:
    """The number of classes, checked against the labels."""
    found = len(source.class_names) if source.class_names else int(source.labels.max()) + 1
    if num_classes is not None and num_classes < found:
        worst = int(source.labels.argmax())
        raise UserError(
            f"num_classes={num_classes}, but {source.names[worst]} has the label {source.labels[worst]}; "
            f"set num_classes={found} or more"
        )
    return num_classes or found


def convert(
    path: str,
    output: str,
    format: str = "auto",
    kind: str | None = None,
    stored_scale: float | None = None,
    scale_factor: float | None = None,
    autoencoder: str | None = None,
    resolution: int | None = None,
    num_classes: int | None = None,
    dtype: str = "float16",
    shard_size: int = SHARD_SIZE,
    allow_pickle: bool = False,
) -> None:
    """Rewrite the latents of another project as shards. What is not given is detected, and said; or asked for.

    Args:
        path: where they are.
        format: auto | maskdit_lmdb | webdataset | fast_dit | repa | lightningdit.
        kind: moments | sample.
        stored_scale: what the stored values were multiplied by before they were stored (1, or 0.18215); shards hold them without.
        scale_factor: what the network's input is multiplied by.
        autoencoder: sd-vae:<hub id or folder>, identity, or none where nothing decodes them.
        resolution: of the images, in pixels.
        dtype: of the stored latents.
        allow_pickle: read pickled items; a restricted reader admits NumPy arrays and nothing else.
    """
    source = open_foreign(path, format, allow_pickle)
    sample = sample_of(source)
    info, stored_scale, statements = detect(
        sample,
        labels=source.labels,
        kind=kind,
        stored_scale=stored_scale,
        scale_factor=scale_factor,
        autoencoder=autoencoder,
        resolution=resolution,
        num_classes=num_classes,
        fixed_kind=source.fixed_kind,
        known_stored_scale=source.known_stored_scale,
    )
    statements = [*source.statements, *statements]
    for line in (f"{path}: {len(source.labels)} items, {source.describe}", *statements):
        log.info("%s", line)
    settings = {"command": "convert", "format": source.describe, **asdict(info), "stored_scale": stored_scale}
    # Names, sizes and labels are the same for other values of them: a look at the values as well.
    of_all = hash_of(f"{source.fingerprint()} {hash_of(sample.numpy().tobytes())}".encode())
    writer = ShardWriter(output, settings, lambda start, stop: of_all, len(source.labels), shard_size, dtype)
    writer.open()
    log.info("%d of %d shards to make", len(writer.todo()), len(writer.pieces))
    for piece in progress_bar(writer.todo(), unit="shards"):
        latents, latents_flip = source.read(piece.start, piece.stop)
        if stored_scale != 1:
            latents, latents_flip = (None if x is None else x / stored_scale for x in (latents, latents_flip))
        writer.write(piece, latents, torch.from_numpy(source.labels[piece.start : piece.stop]), info, latents_flip)
    summarise(output, writer.finish(source=str(path), detected=statements))


def inspect(
    path: str,
    format: str = "native",
    autoencoder: str | None = None,
    grid: str = "auto",
    sigma_data: float = 0.5,
    min_items_per_class: int = 1,
    kind: str | None = None,
    stored_scale: float | None = None,
    scale_factor: float | None = None,
    resolution: int | None = None,
    num_classes: int | None = None,
    allow_pickle: bool = False,
    cpu_threads: int | None = None,
) -> None:
    """Read all latents once, print what is there, draw 16 of them; the exit code is not 0 when something is wrong.

    Args:
        path: a folder of shards, or a shard; with format=webdataset, of tars.
        autoencoder: decodes the grid; null: the one that the shards name.
        grid: auto (<path>/inspect_<data>.png), a file to write, or none.
        sigma_data: standard deviation that the diffusion assumes.
        min_items_per_class: fewer are a problem.
        kind, stored_scale, scale_factor, resolution, num_classes, allow_pickle: of tars, as for convert.
    """
    settings = dict(kind=kind, stored_scale=stored_scale, scale_factor=scale_factor, resolution=resolution)
    settings |= dict(num_classes=num_classes, allow_pickle=allow_pickle or None)
    if format == "native":
        given = [key for key, value in settings.items() if value is not None]
        if given:
            raise UserError(f"{given[0]}={settings[given[0]]} is for format=webdataset; native shards say it themselves")
        dataset = LatentDataset(path, check_folder=False, key="path")
    else:
        dataset = TarLatents(path, autoencoder=autoencoder, **settings | dict(allow_pickle=allow_pickle))
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
        device = cli.start_accelerator(cpu_threads).device
        try:
            decoder = autoencoders.build(autoencoder, device, dataset.channels, "autoencoder")
        except ValueError as e:
            raise UserError(f"{e}; or leave the picture out: grid=none") from e
    found = inspect_latents(dataset, sigma_data, min_items_per_class)
    for line in found.lines:
        log.info("%s", line)
    if file is not None:
        latents, labels = items_to_draw(dataset)
        images = autoencoders.to_uint8(decoder.decode(latents.to(device)).cpu()).numpy()
        try:
            labelled_grid(list(images), labels, num_columns=4).save(file)
            log.info("drew %d of them in %s", len(labels), file)
        except OSError as e:
            log.warning("%s cannot be written (%s); grid=<file> draws elsewhere", file, e.strerror)
    if found.problems:
        raise UserError(f"{path}: {len(found.problems)} problems\n" + "\n".join(f"- {problem}" for problem in found.problems))
    log.info("nothing wrong was found")


def synthetic(
    output: str,
    num_items: int,
    channels: int = 4,
    size: int = 32,
    num_classes: int = 1000,
    kind: str = "sample",
    flips: bool = False,
    dtype: str = "float16",
    shard_size: int = SHARD_SIZE,
    seed: int = 0,
) -> None:
    """Random latents for benchmarks: the network sees normal numbers of standard deviation 0.5; labels go round the classes."""
    info = ShardInfo(kind, 0.5, "none", 8 * size, min(num_classes, num_items))
    settings = {"command": "synthetic", **asdict(info), "channels": channels, "flips": flips, "seed": seed}
    writer = ShardWriter(output, settings, lambda start, stop: f"{start}-{stop}", num_items, shard_size, dtype)
    writer.open()
    for piece in progress_bar(writer.todo(), unit="shards"):
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence([seed, piece.number]).generate_state(1)[0]))
        latents = torch.randn(piece.stop - piece.start, channels, size, size, generator=generator)
        if kind == "moments":
            latents = torch.cat([latents, torch.full_like(latents, -12.0)], dim=1)
        labels = torch.arange(piece.start, piece.stop) % info.num_classes
        writer.write(piece, latents, labels, info, latents.flip(-1) if flips else None)
    summarise(output, writer.finish())


def summarise(output: str, stated: dict) -> None:
    """What was written, in a few lines."""
    error = stated["storage_error"]
    log.info("%d latents %s are in %d shards in %s", stated["num_items"], stated["shape"], len(stated["shards"]), output)
    if stated["left_out"]:
        first = stated["left_out"][0]
        log.info("left out %d, first %s (%s); manifest.json lists them", len(stated["left_out"]), first["name"], first["problem"])
    log.info("mean per channel %s, std %s", *(", ".join(f"{value:.3f}" for value in stated[name]) for name in ("mean", "std")))
    moved = f"{error['relative_rms']:.2g} of their size (rms), at most {error['max']:.2g}"
    log.info("rounding to %s moved values by %s", error["dtype"], moved)


def digits(output: str) -> None:
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


def reference(
    images: str, output: str, resolution: int | None = None, weights: str | None = None, statistics: bool = True
) -> None:
    """Write the images of a folder (or an .npz) as a reference batch: arr_0 and Inception's mu, sigma, mu_s, sigma_s.

    Args:
        images: a folder of PNG or JPEG files; grey and RGBA ones are converted to RGB.
        resolution: crop them to this size as encode does; null: they are of one size and taken as they are.
        weights: file of Inception's weights; downloaded when absent.
        statistics: `false` leaves them out: no Inception is needed, and every evaluation computes its own.
    """
    if not output.endswith(".npz"):
        raise UserError(f"output={output} must end in .npz")
    image_set = open_images(images, convert_to_rgb=True, crop=resolution)
    if len(image_set) < 2:
        raise UserError(f"images={images} holds {len(image_set)} images; a reference needs at least 2")
    detector = InceptionDetector(weights) if statistics else None
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    write_reference(image_set, Path(output), detector)
    log.info("wrote %s", output)


# ----------------------------------------------------------------------------------------------------------------------
# The command line.


@dataclass(frozen=True)
class Command:
    """A function, and what each of its arguments accepts."""

    run: Callable[..., None]
    keys: dict[str, Accepts]


_THREADS = {"cpu_threads": or_null(whole(1))}
_STORED = {"dtype": choice(*DTYPES), "shard_size": whole(1)}
_DETECTED = {
    key: TRAIN_KEYS[f"data.{key}"]
    for key in ("kind", "stored_scale", "scale_factor", "autoencoder", "resolution", "num_classes", "allow_pickle")
}
COMMANDS = {
    "encode": Command(
        encode,
        {
            "images": text(),
            "output": text(),
            "labels": text(),
            "resolution": whole(1),
            "autoencoder": AUTOENCODER,
            "kind": choice(*KINDS),
            "flips": true_or_false(),
            "num_classes": or_null(whole(1)),
            "precision": choice("fp32", "bf16"),
            "batch_size": whole(1),
            "num_workers": or_null(whole(0)),
            "on_error": choice("stop", "skip"),
            "seed": whole(0),
            **_STORED,
            **_THREADS,
        },
    ),
    "convert": Command(
        convert,
        {
            "path": text(),
            "output": text(),
            "format": choice("auto", *FORMATS),
            **_DETECTED,
            **_STORED,
        },
    ),
    "inspect": Command(
        inspect,
        {
            "path": text(),
            "format": choice("native", "webdataset"),
            "grid": text(),
            "sigma_data": number(0, above=True, below=True),
            "min_items_per_class": whole(0),
            **_DETECTED,
            **_THREADS,
        },
    ),
    "synthetic": Command(
        synthetic,
        {
            "output": text(),
            "num_items": whole(1),
            "channels": whole(1),
            "size": whole(1),
            "num_classes": whole(1),
            "kind": choice(*KINDS),
            "flips": true_or_false(),
            "seed": whole(0),
            **_STORED,
        },
    ),
    "digits": Command(digits, {"output": text()}),
    "reference": Command(
        reference,
        {
            "images": text(),
            "output": text(),
            "resolution": or_null(whole(1)),
            "weights": or_null(text()),
            "statistics": true_or_false(),
        },
    ),
}


def main(arguments: list[str]) -> None:
    name, *settings = arguments or ["--help"]
    if name in ("--help", "-h", "help"):
        sys.stdout.write(__doc__)
        return
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}; use one of {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    defaults = {p.name: p.default for p in introspection.signature(command.run).parameters.values()}
    values = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in command.keys or not value:
            usage = ", ".join(f"{k}=" if d is introspection.Parameter.empty else f"[{k}=]" for k, d in defaults.items())
            raise UserError(f"{name}: {key} is not a key or has no value; it takes {usage}")
        if key in values:
            raise UserError(f"{name}: {key} is given twice")
        values[key] = parse(key, value, command.keys[key])
    missing = [key for key, default in defaults.items() if default is introspection.Parameter.empty and key not in values]
    if missing:
        raise UserError(f"{name}: {missing[0]}= is missing; it accepts {command.keys[missing[0]].words}")
    command.run(**values)


def parse(key: str, value: str, accepts: Accepts) -> object:
    """The value of a key: as YAML reads it where that is accepted, else as the text that it is."""
    try:
        read = OmegaConf.to_container(OmegaConf.from_dotlist([f"key={value}"]))["key"]
    except (yaml.YAMLError, OmegaConfBaseException):
        read = value
    for candidate in (read, value):
        if accepts.test(candidate):
            return candidate
    raise UserError(f"{key}={value} is not accepted; use {accepts.words}")


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        cli.guard(lambda: main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on where it was")
