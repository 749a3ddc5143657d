"""Sample images from a checkpoint.

    python sample.py checkpoint=runs/digits_tread seeds=0-49 classes=0-9
    python sample.py checkpoint=runs/digits_tread/checkpoints/step_0001000 guidance=cfg guidance.cfg_scale=2 sampler.num_steps=30
    accelerate launch --num_processes 8 sample.py checkpoint=runs/in256 seeds=0-49999 sampling.batch_size=128

An image depends on its seed and the settings. On a CPU, the batch size and the number of processes change pixels by at most one
grey level. The command writes a PNG per seed, a labelled grid and an .npz in ADM's format. Rerun it to add missing images.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
import numpy as np
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from common.errors import UserError, as_user_error
from common.files import (
    hash_bytes,
    is_leftover,
    lock_folder,
    open_atomically,
    read_yaml,
    refuse_link,
    regular_file,
    write_atomically,
)
from common.images import class_caption, labelled_grid
from common.progress import progress_bar
from configs import command_line
from configs.schema import ImageSettings, SampleConfig, differences, parse_numbers
from configs.settings import nearest, read_stored

if TYPE_CHECKING:
    from sampling.recipe import Recipe
    from sampling.sampler import ImageSampler

log = logging.getLogger("sample")

MAX_GRID_IMAGES = 100
_IMAGE = re.compile(r"(seed_\d{6,}_class_\d{3,})(_.*)?\.png")


def main(cfg: SampleConfig) -> None:
    """Find the checkpoint, sample the missing images and write the grid."""
    from checkpoints import store
    from checkpoints.load import load_class_names, load_config
    from checkpoints.resume import resolve_checkpoint_on_main
    from runtime.compilation import log_compile_mode
    from runtime.machine import start_accelerator, use_machine
    from runtime.processes import check_shared, on_main, wait_for_all
    from sampling.recipe import Recipe

    accelerator = start_accelerator(cfg.machine.cpu_threads)
    reads = store.files_for_sampling([cfg.sampling.weights or "ema"], cfg.sampling.ema_length is not None)
    checkpoint = resolve_checkpoint_on_main(cfg.checkpoint, "checkpoint", reads)
    run = load_config(checkpoint)
    cfg = cfg.of_run(run, store.read_step(checkpoint))
    use_machine(cfg.machine, accelerator.device)
    log_compile_mode(cfg.machine.compile, accelerator.device)
    recipe = Recipe.for_checkpoint(checkpoint, run, cfg)
    names = on_main(lambda: load_class_names(checkpoint))
    if cfg.classes is not None:
        cfg = cfg.model_copy(update={"classes": class_numbers(cfg.classes, names, run.data.path)})
    labels = choose_labels(cfg, run.data.num_classes)
    settings = settings_of_images(cfg, recipe)
    # The main process alone looks for the folder. Otherwise, NFS on the other nodes may remember for a while that it is missing.
    output = on_main(lambda: Path(cfg.output) if cfg.output else default_output(checkpoint, settings, recipe))
    with contextlib.ExitStack() as stack:
        on_main(lambda: stack.enter_context(open_output(output, settings, recipe)))
        check_shared(output / "settings.yaml", "output")
        files = on_main(lambda: name_files(output, labels, names))
        missing = on_main(lambda: [seed for seed, file in files.items() if not file.exists()])
        log.info("%s: %d of %d images to make, in %s", checkpoint, len(missing), len(files), output)
        if missing:
            sampler = recipe.load_sampler(accelerator.device, cfg.machine.compile)
            mine = missing[accelerator.process_index :: accelerator.num_processes]
            size, is_main = cfg.sampling.batch_size, accelerator.is_main_process
            make_images(sampler, {seed: labels[seed] for seed in mine}, files, size, is_main)
            cost = "%(network_evaluations)g network evaluations and %(gflops_per_image).4g GFLOPs per image"
            log.info(f"cost     {cost}", sampler.cost)
        wait_for_all()
        if accelerator.is_main_process:
            write_grid_and_npz(output, cfg.npz, files, labels, names)


def class_numbers(classes: list[int | str], names: list[str] | None, path: str | None) -> list[int]:
    """Replace names and ranges by class numbers. Text that is exactly the name of a class means this class, such as "2" or " a".

    Other text lists numbers, ranges and names, separated by commas.
    """
    known, numbers = {name: number for number, name in enumerate(names or ())}, []
    for entry in classes:
        if entry in known:
            numbers.append(known[entry])
            continue
        for part in str(entry).split(","):
            name = part.strip()
            if re.fullmatch(r"[\d\s-]*", part):
                try:
                    numbers += (found := parse_numbers(part))
                except ValueError as e:
                    raise UserError(f"classes: {e}") from e
                if swapped := [number for number in found if known.get(str(number), number) != number]:
                    message = "classes: %d is class number %d; 'classes=[\"%d\"]' means the class of this name, number %d"
                    log.warning(message, *swapped[:1] * 3, known[str(swapped[0])])
            elif names is None:
                reason = f"{name} is a name, but the latents at data.path={path} have no class names; give numbers"
                raise UserError(f"classes: {reason}")
            elif name in known:
                numbers.append(known[name])
            else:
                raise UserError(f"classes: no class has the name {name!r}{nearest(name, names)}")
    if len(set(numbers)) < len(numbers):
        raise UserError(f"classes={classes} repeats a class, or lists a class by number and by name")
    return numbers


def choose_labels(cfg: SampleConfig, num_classes: int) -> dict[int, int]:
    """Map each seed to a class. Seed i uses entry i mod length of `classes`. Without `classes`, `labels` chooses the classes."""
    from sampling.sampler import draw_labels

    if cfg.seeds and cfg.num_samples:
        raise UserError(f"seeds= and num_samples={cfg.num_samples} both choose the images: give one of them")
    seeds = cfg.seeds or range(cfg.num_samples or 50)
    if cfg.classes is None:
        return draw_labels(seeds, num_classes, cfg.sampling.labels)
    if max(cfg.classes) >= num_classes:
        raise UserError(f"classes: class {max(cfg.classes)} does not exist; the model knows 0 to {num_classes - 1}")
    labels = {seed: cfg.classes[seed % len(cfg.classes)] for seed in seeds}
    if (num_drawn := len(set(labels.values()))) < min(len(seeds), len(cfg.classes)):
        drawn = ", ".join(f"seed {seed}: class {label}" for seed, label in list(labels.items())[:4])
        message = "%d seeds draw only %d of %d classes, because seed i uses entry i mod %d of classes= (%s, ...)"
        log.warning(message, len(seeds), num_drawn, len(cfg.classes), len(cfg.classes), drawn)
    return labels


def name_files(output: Path, labels: dict[int, int], names: list[str] | None) -> dict[int, Path]:
    """Return the file of each seed, such as seed_000003_class_001_color.png.

    An existing image keeps its name, because earlier versions, and machines without the latents, omit the class name.
    """
    existing = {match[1]: output / match[0] for match in map(_IMAGE.fullmatch, os.listdir(output)) if match}
    files = {}
    for seed, label in labels.items():
        stem = f"seed_{seed:06d}_class_{label:03d}"
        name = re.sub(r"[^\w.-]+", "-", names[label])[:40].strip("-") if names and label < len(names) else ""
        files[seed] = existing.get(stem, output / f"{stem}{'_' if name else ''}{name}.png")
    return files


def settings_of_images(cfg: SampleConfig, recipe: Recipe) -> ImageSettings:
    """Return the settings for settings.yaml, which together with the seed determine an image. Hashes identify checkpoints."""
    sampling = recipe.sampling
    return ImageSettings(
        checkpoint=recipe.checkpoint_hash + (recipe.ema_hash or ""),
        weights=recipe.weights,
        ema_length=sampling.ema_length,
        labels=None if cfg.classes else sampling.labels,
        classes=cfg.classes,
        autoencoder=sampling.autoencoder,
        guidance=recipe.guidance.model_copy(update={"checkpoint": recipe.weak_hash}) if recipe.weak_hash else recipe.guidance,
        sampler=vars(recipe.sampler),
        precision=sampling.precision,
        rounding=sampling.rounding,
        autoencoder_hash=recipe.autoencoder_hash,
    )


def read_settings(folder: Path, recipe: Recipe) -> ImageSettings:
    """Read a folder's settings.yaml. Settings that it lacks have their defaults."""
    source = f"{folder / 'settings.yaml'} (choose another output=...)"
    stored = read_stored(read_yaml(folder / "settings.yaml", source), ImageSettings, source)
    return stored.model_copy(update={"sampler": vars(type(recipe.sampler)()) | stored.sampler})


def default_output(checkpoint: Path, settings: ImageSettings, recipe: Recipe) -> Path:
    """Return the folder with these settings in <run>/generated, or in a folder next to a checkpoint outside any run.

    A new folder is <step>_<weights>_<guidance>_<steps>_<hash>, where the hash is of the settings that differ from their defaults.
    """
    from checkpoints import store
    from sampling.recipe import sampler_settings

    guidance, steps = settings.guidance, settings.sampler["num_steps"]
    scale = "".join(f"{getattr(guidance, key):g}" for key in ("cfg_scale", "w") if hasattr(guidance, key))
    parent = refuse_link((store.find_run(checkpoint) or checkpoint.resolve().parent) / "generated")
    name = f"{checkpoint.name}_{settings.weights}_{guidance.name}{scale}_{steps}steps_"
    for folder in sorted(parent.iterdir() if parent.is_dir() else ()):
        with contextlib.suppress(UserError):  # other folders
            if folder.name.startswith(name) and read_settings(folder, recipe) == settings:
                return folder
    changed = settings.model_dump(exclude_defaults=True) | {"sampler": sampler_settings(recipe.sampler)}
    return parent / f"{name}{hash_bytes(json.dumps(changed).encode())[:6]}"


@contextlib.contextmanager
def open_output(output: Path, settings: ImageSettings, recipe: Recipe) -> Iterator[None]:
    """Open and lock the output folder, which must be new, or hold images with the same settings."""
    file = output / "settings.yaml"
    contents = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if file.name not in contents and not all(name == ".lock" or is_leftover(name) for name in contents):
        raise UserError(f"output={output} is not empty and was not made by sample.py; choose another folder")
    with lock_folder(output, "sampling into", "output", settings=file.name):
        if not file.exists():
            write_atomically(file, OmegaConf.to_yaml(OmegaConf.create(settings.model_dump())))
        elif changed := differences(read_settings(output, recipe), settings):
            raise UserError(f"{output} holds images with other settings ({'; '.join(changed)}); choose another output=...")
        yield


def make_images(
    sampler: ImageSampler, labels: dict[int, int], files: dict[int, Path], batch_size: int, show_progress: bool
) -> None:
    """Sample an image for each entry {seed: label} of `labels` and write a PNG file. A PNG file appears only when complete."""

    def write(seed: int, image: np.ndarray) -> None:
        with open_atomically(files[seed], flush=False) as f:  # flushing a file to disk takes longer than writing it
            Image.fromarray(image).save(f, format="PNG")

    seeds, writing = list(labels), iter(())
    bar = progress_bar(total=len(seeds), unit="image", disable=not show_progress)
    with bar, ThreadPoolExecutor() as threads:
        for start in range(0, len(seeds), batch_size):
            batch = seeds[start : start + batch_size]
            images = sampler(batch, [labels[seed] for seed in batch])
            list(writing)  # wait until the previous batch is written, and raise any write error
            writing = threads.map(write, batch, images)
            bar.update(len(batch))
        list(writing)


def write_grid_and_npz(
    output: Path, npz: bool, files: dict[int, Path], labels: dict[int, int], names: list[str] | None = None
) -> None:
    """Write the first images to grid_<seeds>.png and, if `npz` is true, all images to samples_<seeds>.npz in `files` order."""
    from evaluations.images import write_npz

    seeds = list(files)
    spec = f"{seeds[0]}-{seeds[-1]}"
    if seeds != list(range(seeds[0], seeds[-1] + 1)):
        spec = f"{len(seeds)}_{hash_bytes(repr(seeds).encode())[:8]}"

    os.listdir(output)  # with this, NFS forgets that images of other nodes were missing

    def read(seed: int) -> np.ndarray:
        with as_user_error(f"{files[seed]} (remove it and run the same command to make it again)"):
            return np.asarray(Image.open(regular_file(files[seed])).convert("RGB"))

    grid_seeds = seeds[:MAX_GRID_IMAGES]
    grid = labelled_grid([read(seed) for seed in grid_seeds], [class_caption(labels[seed], names) for seed in grid_seeds])
    with open_atomically(output / f"grid_{spec}.png") as f:
        grid.save(f, format="PNG")
    log.info("grid     %s", output / f"grid_{spec}.png")
    if npz:
        npz_file = output / f"samples_{spec}.npz"
        shape = len(files), *read(grid_seeds[0]).shape
        write_npz(npz_file, map(read, files), shape, np.array(list(labels.values())), class_names=names)
        log.info("npz      %s", npz_file)


@hydra.main(version_base="1.3", config_path="configs", config_name="sample")
def start(cfg: DictConfig) -> None:
    command_line.run_job(main, cfg, SampleConfig)


if __name__ == "__main__":
    command_line.guard(start, "sample")
