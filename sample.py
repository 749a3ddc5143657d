"""Sample images from a checkpoint.

    python sample.py checkpoint=runs/digits_tread seeds=0-49 classes=0-9
    python sample.py checkpoint=runs/digits_tread/checkpoints/step_0001000 guidance=cfg cfg_scale=2 num_steps=30
    accelerate launch --num_processes 8 sample.py checkpoint=runs/in256 seeds=0-49999 batch_size=128

An image depends on its seed and the settings, not on the number of processes. On a CPU, the batch size changes pixels by at most
one grey level. The command writes a PNG per seed, a labelled grid and an .npz in ADM's format. Rerun it to add missing images.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING

import hydra
import numpy as np
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from common.errors import UserError, as_user_error
from common.files import hash_bytes, is_leftover, lock_file, open_atomically, write_atomically
from common.images import labelled_grid
from common.progress import progress_bar
from configs import command_line
from configs.schema import SampleConfig, differences

if TYPE_CHECKING:
    from sampling.recipe import Recipe
    from sampling.sampler import ImageSampler

log = logging.getLogger("sample")

MAX_GRID_IMAGES = 100


def main(cfg: SampleConfig) -> None:
    from checkpoints.load import load_config
    from checkpoints.resume import find_checkpoint_on_main
    from runtime.compilation import check_compile
    from runtime.machine import start_accelerator
    from runtime.processes import check_shared, on_main, wait_for_all
    from sampling.recipe import Recipe

    accelerator = start_accelerator(cfg.cpu_threads, tf32=cfg.tf32)
    check_compile("compile", cfg.compile, accelerator.device)
    checkpoint = find_checkpoint_on_main(cfg.checkpoint, "checkpoint")
    run = load_config(checkpoint)
    recipe = Recipe.for_checkpoint(checkpoint, cfg, run.sample.precision)
    labels = choose_labels(cfg, run.data.num_classes)
    settings = settings_of_images(cfg, recipe)
    output = Path(cfg.output) if cfg.output else default_output(checkpoint, settings)
    locks: list[IO] = []  # contains the folder lock on the main process and is empty on other processes
    on_main(lambda: locks.append(open_output(output, settings)))
    check_shared(output / "settings.yaml", "output")
    files = {seed: output / f"seed_{seed:06d}_class_{label:03d}.png" for seed, label in labels.items()}
    missing = on_main(lambda: [seed for seed, file in files.items() if not file.exists()])
    log.info("%s: %d of %d images to make, in %s", checkpoint, len(missing), len(files), output)
    if missing:
        sampler = recipe.load(accelerator.device, cfg.compile)
        mine = missing[accelerator.process_index :: accelerator.num_processes]
        make_images(sampler, {seed: labels[seed] for seed in mine}, files, cfg.batch_size, accelerator.is_main_process)
        log.info("cost     %(network_evaluations)g network evaluations and %(gflops_per_image).4g GFLOPs per image", sampler.cost)
    wait_for_all()
    if accelerator.is_main_process:
        write_grid_and_npz(output, cfg.npz, files, labels)
        locks[0].close()


def choose_labels(cfg: SampleConfig, num_classes: int) -> dict[int, int]:
    """Map each seed to a class. Seeds cycle through `classes` if it is set. Otherwise, `draw_labels` chooses the classes."""
    from sampling.sampler import draw_labels

    if cfg.seeds and cfg.num_samples:
        raise UserError(f"seeds= and num_samples={cfg.num_samples} both choose the images: give one of them")
    seeds = cfg.seeds or range(cfg.num_samples or 50)
    if cfg.classes is None:
        return draw_labels(seeds, num_classes, cfg.labels)
    if max(cfg.classes) >= num_classes:
        raise UserError(f"classes: class {max(cfg.classes)} does not exist; the model knows 0 to {num_classes - 1}")
    return {seed: cfg.classes[seed % len(cfg.classes)] for seed in seeds}


def settings_of_images(cfg: SampleConfig, recipe: Recipe) -> dict:
    """Return the settings for settings.yaml, which together with the seed determine an image. Hashes identify checkpoints."""
    guidance = recipe.guidance.model_dump()
    return {
        "checkpoint": recipe.content,
        "weights": recipe.weights,
        "ema_length": cfg.ema_length,
        "labels": None if cfg.classes else cfg.labels,
        "classes": cfg.classes,
        "autoencoder": recipe.autoencoder,
        "guidance": guidance | ({"checkpoint": "as above"} if "checkpoint" in guidance else {}),
        "sampler": vars(recipe.diffusion.sampler),
        "precision": recipe.precision,
    }


def default_output(checkpoint: Path, settings: dict) -> Path:
    """Return generated/<step>_<weights>_<guidance>_<steps>_<hash> in the run folder, or next to a checkpoint outside any run."""
    from checkpoints import store

    guidance = settings["guidance"]
    scale = "".join(f"{guidance[key]:g}" for key in ("cfg_scale", "w") if key in guidance)
    parent = (store.find_run(checkpoint) or checkpoint.resolve().parent) / "generated"
    digest = hash_bytes(json.dumps(settings).encode())[:6]
    steps = settings["sampler"]["num_steps"]
    return parent / f"{checkpoint.name}_{settings['weights']}_{guidance['name']}{scale}_{steps}steps_{digest}"


def open_output(output: Path, settings: dict) -> IO[bytes]:
    """Open the output folder and return its lock. Raises UserError for unrelated files or images with other settings."""
    file = output / "settings.yaml"
    held = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if file.name not in held and not all(name == ".lock" or is_leftover(name) for name in held):
        raise UserError(f"output={output} is not empty and was not made by sample.py; choose another folder")
    lock = lock_file(output / ".lock", "sampling into", "output")
    if not file.exists():
        write_atomically(file, OmegaConf.to_yaml(OmegaConf.create(settings)))
        return lock
    with as_user_error(f"{file} (choose another output=...)"):
        changed = differences(OmegaConf.to_container(OmegaConf.load(file)), settings)
    if changed:
        raise UserError(f"{output} holds images with other settings ({'; '.join(changed)}); choose another output=...")
    return lock


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


def write_grid_and_npz(output: Path, npz: bool, files: dict[int, Path], labels: dict[int, int]) -> None:
    """Write the first images to grid_<seeds>.png and, if `npz` is true, all images to samples_<seeds>.npz in `files` order."""
    from evaluations.images import write_npz

    seeds = list(files)
    spec = f"{seeds[0]}-{seeds[-1]}"
    if seeds != list(range(seeds[0], seeds[-1] + 1)):
        spec = f"{len(seeds)}_{hash_bytes(repr(seeds).encode())[:8]}"

    def read(seed: int) -> np.ndarray:
        with as_user_error(f"{files[seed]} (remove it and run the same command to make it again)"):
            return np.asarray(Image.open(files[seed]).convert("RGB"))

    shown = seeds[:MAX_GRID_IMAGES]
    grid = labelled_grid([read(seed) for seed in shown], [labels[seed] for seed in shown])
    with open_atomically(output / f"grid_{spec}.png") as f:
        grid.save(f, format="PNG")
    log.info("grid     %s", output / f"grid_{spec}.png")
    if npz:
        npz_file = output / f"samples_{spec}.npz"
        write_npz(npz_file, map(read, files), (len(files), *read(shown[0]).shape), np.array(list(labels.values())))
        log.info("npz      %s", npz_file)


@hydra.main(version_base="1.3", config_path="configs", config_name="sample")
def start(cfg: DictConfig) -> None:
    command_line.run_job(main, cfg, SampleConfig)


if __name__ == "__main__":
    command_line.guard(start, "sample")
