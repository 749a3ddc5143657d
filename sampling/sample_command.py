"""Plan and make the images of a sample.py command."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from omegaconf import OmegaConf
from PIL import Image

from checkpoints import store
from checkpoints.checkpoint import Checkpoint, resolve_checkpoint
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
from configs.differences import differences
from configs.sampling_schema import ImageSettings, SampleConfig, parse_numbers
from configs.schema import Labels
from configs.settings import did_you_mean, read_stored
from evaluations.images import write_npz
from evaluations.result_settings import sampler_for_results
from runtime.compilation import check_compile_mode
from runtime.processes import barrier
from sampling.recipe import Recipe
from sampling.sampler import ImageSampler, draw_labels

log = logging.getLogger(__name__)

MAX_GRID_IMAGES = 100
SETTINGS_FILE = "settings.yaml"  # file with the `ImageSettings` of a folder of images
_IMAGE = re.compile(r"(seed_\d{6,}_class_\d{3,})(_.*)?\.png")


@dataclass(frozen=True)
class SamplePlan:
    """What a sample.py command makes. The main process decides it for all processes.

    Attributes:
        labels: Class of each seed.
        output: Folder of the images.
        files: File of each seed.
        missing: Seeds whose files do not exist yet.
        npz: Whether to write all images to an .npz file, too.
    """

    recipe: Recipe
    labels: dict[int, int]
    output: Path
    files: dict[int, Path]
    missing: list[int]
    npz: bool


def plan_images(cfg: SampleConfig, device: torch.device, stack: contextlib.ExitStack) -> SamplePlan:
    """Find the checkpoint and the images to make. Open and lock the output folder until `stack` is closed."""
    files = store.files_for_sampling([cfg.sampling.weights or "ema"], cfg.sampling.ema_length is not None)
    checkpoint = resolve_checkpoint(Path(cfg.checkpoint), "checkpoint", files)
    names = checkpoint.class_names
    recipe = Recipe.for_checkpoint(checkpoint, cfg)
    config = recipe.config
    check_compile_mode(config.machine.compile, device)
    classes = cfg.classes and class_numbers(cfg.classes, names, config.data.path)
    labels = choose_labels(choose_seeds(cfg), classes, config.sampling.labels, config.data.num_classes)
    settings = settings_of_images(classes, recipe)
    output = Path(cfg.output) if cfg.output else default_output(checkpoint, settings, recipe)
    stack.enter_context(open_output(output, settings, recipe))
    files = name_files(output, labels, names)
    missing = [seed for seed, file in files.items() if not file.exists()]
    log.info("%s: %d of %d images to make, in %s", checkpoint.path, len(missing), len(files), output)
    return SamplePlan(recipe, labels, output, files, missing, cfg.npz)


def make_images(plan: SamplePlan, accelerator: Accelerator) -> None:
    """Sample the missing images, and write the grid and the .npz file. Every process must call this function."""
    if plan.missing:
        image_sampler = plan.recipe.load_image_sampler(accelerator.device, plan.recipe.config.machine.compile)
        mine = plan.missing[accelerator.process_index :: accelerator.num_processes]
        sample_files(image_sampler, mine, plan, show_progress=accelerator.is_main_process)
        cost = "%(network_evaluations)g network evaluations and %(gflops_per_image).4g GFLOPs per image"
        log.info(f"cost     {cost}", image_sampler.cost)
    barrier()
    if accelerator.is_main_process:
        write_grid_and_npz(plan)


def class_numbers(classes: list[int | str], names: list[str] | None, path: str | None) -> list[int]:
    """Replace names and ranges by class numbers. Text that is exactly the name of a class means this class, such as "2" or " a".

    Other text lists numbers, ranges and names, separated by commas.
    """
    known = {name: number for number, name in enumerate(names or ())}
    numbers = []
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
                raise UserError(f"classes: no class has the name {name!r}{did_you_mean(name, names)}")
    if len(set(numbers)) < len(numbers):
        raise UserError(f"classes={classes} repeats a class, or lists a class by number and by name")
    return numbers


def choose_seeds(cfg: SampleConfig) -> Sequence[int]:
    if cfg.seeds and cfg.num_samples:
        raise UserError(f"seeds= and num_samples={cfg.num_samples} both choose the images: give one of them")
    return cfg.seeds or range(cfg.num_samples or 50)


def choose_labels(seeds: Sequence[int], classes: list[int] | None, rule: Labels, num_classes: int) -> dict[int, int]:
    """Map each seed to a class. Seed i uses entry i mod length of `classes`. Without `classes`, the rule chooses the classes."""
    if classes is None:
        return draw_labels(seeds, num_classes, rule)
    if max(classes) >= num_classes:
        raise UserError(f"classes: class {max(classes)} does not exist; the model knows 0 to {num_classes - 1}")
    labels = {seed: classes[seed % len(classes)] for seed in seeds}
    if (num_drawn := len(set(labels.values()))) < min(len(seeds), len(classes)):
        drawn = ", ".join(f"seed {seed}: class {label}" for seed, label in list(labels.items())[:4])
        message = "%d seeds draw only %d of %d classes, because seed i uses entry i mod %d of classes= (%s, ...)"
        log.warning(message, len(seeds), num_drawn, len(classes), len(classes), drawn)
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


def settings_of_images(classes: list[int] | None, recipe: Recipe) -> ImageSettings:
    """Return the settings for settings.yaml, which together with the seed determine an image. Hashes identify checkpoints."""
    sampling = recipe.config.sampling
    return ImageSettings(
        checkpoint=recipe.checkpoint.hash + (recipe.average.hash if recipe.average else ""),
        weights=recipe.weights,
        ema_length=recipe.average and recipe.average.length,
        labels=None if classes else sampling.labels,
        classes=classes,
        autoencoder=sampling.autoencoder,
        guidance=recipe.guidance.model_copy(update={"checkpoint": recipe.weak.hash}) if recipe.weak else recipe.guidance,
        sampler=vars(recipe.config.sampler),
        precision=sampling.precision,
        rounding=sampling.rounding,
        autoencoder_hash=recipe.autoencoder_hash,
    )


def read_settings(folder: Path, recipe: Recipe) -> ImageSettings:
    """Read a folder's settings.yaml. Settings that it lacks have their defaults."""
    source = f"{folder / SETTINGS_FILE} (choose another output=...)"
    stored = read_stored(read_yaml(folder / SETTINGS_FILE, source), ImageSettings, source)
    return stored.model_copy(update={"sampler": vars(type(recipe.config.sampler)()) | stored.sampler})


def default_output(checkpoint: Checkpoint, settings: ImageSettings, recipe: Recipe) -> Path:
    """Return the folder with these settings in <run>/generated, or in a folder next to a checkpoint outside any run.

    A new folder is <step>_<weights>_<guidance>_<steps>_<hash>, where the hash is of the settings that differ from their defaults.
    """
    guidance, steps = settings.guidance, settings.sampler["num_steps"]
    scale = "".join(f"{getattr(guidance, key):g}" for key in ("cfg_scale", "w") if hasattr(guidance, key))
    parent = refuse_link((checkpoint.run_folder or checkpoint.path.resolve().parent) / "generated")
    name = f"{checkpoint.path.name}_{settings.weights}_{guidance.name}{scale}_{steps}steps_"
    for folder in sorted(parent.iterdir() if parent.is_dir() else ()):
        with contextlib.suppress(UserError):  # other folders
            if folder.name.startswith(name) and read_settings(folder, recipe) == settings:
                return folder
    changed = settings.model_dump(exclude_defaults=True) | {"sampler": sampler_for_results(recipe.config.sampler)}
    return parent / f"{name}{hash_bytes(json.dumps(changed).encode())[:6]}"


@contextlib.contextmanager
def open_output(output: Path, settings: ImageSettings, recipe: Recipe) -> Iterator[None]:
    """Open and lock the output folder, which must be new, or hold images with the same settings."""
    file = output / SETTINGS_FILE
    contents = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if file.name not in contents and not all(name == ".lock" or is_leftover(name) for name in contents):
        raise UserError(f"output={output} is not empty and was not made by sample.py; choose another folder")
    with lock_folder(output, "sampling into", "output", settings_file=file.name):
        if not file.exists():
            write_atomically(file, OmegaConf.to_yaml(OmegaConf.create(settings.model_dump())))
        elif changed := differences(read_settings(output, recipe), settings):
            raise UserError(
                f"{output} holds images with other settings ({'; '.join(map(str, changed))}); choose another output=..."
            )
        yield


def sample_files(image_sampler: ImageSampler, seeds: list[int], plan: SamplePlan, show_progress: bool) -> None:
    """Sample an image for each seed and write a PNG file. A PNG file appears only when complete."""

    def write(seed: int, image: np.ndarray) -> None:
        with open_atomically(plan.files[seed], flush=False) as f:  # flushing a file to disk takes longer than writing it
            Image.fromarray(image).save(f, format="PNG")

    batch_size = plan.recipe.config.sampling.batch_size
    writing = iter(())  # of the previous batch
    bar = progress_bar(total=len(seeds), unit="image", disable=not show_progress)
    with bar, ThreadPoolExecutor() as threads:
        for start in range(0, len(seeds), batch_size):
            batch = seeds[start : start + batch_size]
            images = image_sampler(batch, [plan.labels[seed] for seed in batch])
            list(writing)  # wait until the previous batch is written, and raise any write error
            writing = threads.map(write, batch, images)
            bar.update(len(batch))
        list(writing)


def write_grid_and_npz(plan: SamplePlan) -> None:
    """Write the first images to grid_<seeds>.png and, if `npz` is true, all images to samples_<seeds>.npz."""
    output, files, labels, names = plan.output, plan.files, plan.labels, plan.recipe.checkpoint.class_names
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
    if plan.npz:
        npz_file = output / f"samples_{spec}.npz"
        shape = len(files), *read(grid_seeds[0]).shape
        write_npz(npz_file, map(read, files), shape, np.array(list(labels.values())), class_names=names)
        log.info("npz      %s", npz_file)
