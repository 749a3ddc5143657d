"""Sample images from a checkpoint.

    python sample.py checkpoint=runs/digits_tread seeds=0-49 classes=0-9
    python sample.py checkpoint=runs/digits_tread/checkpoints/step_0000800 guidance=cfg cfg_scale=2 num_steps=30
    accelerate launch --num_processes 8 sample.py checkpoint=runs/in256 seeds=0-49999 batch_size=128

Image i depends on seed i (and the settings) alone, not on the batch size or the number of processes. The same command
again makes the images that are missing. Output: a PNG per seed, a labelled grid and an .npz as ADM's evaluator reads it.
"""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from common.errors import UserError
from common.files import lock_output, whole_file, write_file
from common.progress import progress_bar
from common.randomness import class_of_seed
from configs import command_line as cli
from configs import schema
from evaluations.images import DECODE_ERRORS
from evaluations.npz import write_npz
from sampling.sampler import ImageSampler, describe_cost, labelled_grid
from training import build, load, machine
from training import checkpoint as checkpoints
from training.resume import check_shared, decide_together, find_checkpoint_together
from training.speed import check_compile

log = logging.getLogger("sample")

MAX_GRID_IMAGES = 100


def main(cfg: DictConfig) -> None:
    cfg = schema.check(cfg, schema.SampleConfig)
    accelerator = machine.start_accelerator(cfg.cpu_threads, tf32=cfg.tf32)
    check_compile("compile", cfg.compile, accelerator.device)
    checkpoint = find_checkpoint_together(cfg.checkpoint, "checkpoint", accelerator)
    run_cfg = load.load_config(checkpoint)
    guidance = build.with_scale(cfg.guidance, cfg.cfg_scale)
    diffusion = build.build_diffusion(run_cfg.diffusion, **{key: getattr(cfg, key) for key in schema.SAMPLER_OVERRIDES})
    build.check_guidance(guidance, run_cfg, diffusion)
    build.warn_of_guidance(guidance, run_cfg)
    guidance = load.find_second_checkpoint(guidance, run_cfg, accelerator)
    labels = labels_of_seeds(cfg, run_cfg.data.num_classes)
    second = {"content": checkpoints.identity(Path(guidance.checkpoint))} if guidance.name == "autoguidance" else {}
    settings = {
        "checkpoint": checkpoints.identity(checkpoint),
        "weights": cfg.weights,
        "classes": None if cfg.classes is None else schema.parse_numbers(cfg.classes),
        "autoencoder": cfg.autoencoder or run_cfg.data.autoencoder,
        # Without the keys that earlier versions did not have, where they are at their defaults: so their folders go on.
        "guidance": guidance.model_dump(exclude_defaults=True) | second,
        "sampler": type(run_cfg.diffusion.sampler)(**vars(diffusion.sampler)).model_dump(exclude_defaults=True),
        "precision": cfg.precision,
    }

    def choose_output() -> Path:
        return Path(cfg.output) if cfg.output else default_output(checkpoint, cfg.weights, settings)

    output = decide_together(choose_output, accelerator)
    locks: list[IO] = []  # of the main process
    decide_together(lambda: locks.append(open_output(output, settings)), accelerator)
    check_shared(output / "settings.yaml", "output", accelerator)
    files = {seed: output / f"seed_{seed:06d}_class_{label:03d}.png" for seed, label in labels.items()}
    missing = decide_together(lambda: [seed for seed, file in files.items() if not file.exists()], accelerator)
    log.info("%s: %d of %d images to make, in %s", checkpoint, len(missing), len(files), output)
    if missing:
        options = {"weights": cfg.weights, "diffusion": diffusion, "command": cfg}
        sampler = load.load_sampler(checkpoint, run_cfg, guidance, accelerator.device, **options)
        mine = missing[accelerator.process_index :: accelerator.num_processes]
        make_images(sampler, {seed: labels[seed] for seed in mine}, files, cfg.batch_size, accelerator.is_main_process)
        if mine:
            is_sparse = guidance.name == "sparse" and guidance.w != 1
            log.info("cost     %s", describe_cost(sampler, (guidance.r_strong, guidance.r_weak) if is_sparse else None))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_grid_and_npz(output, cfg, files, labels)
        locks[0].close()
    accelerator.end_training()


def labels_of_seeds(cfg: schema.SampleConfig, num_classes: int) -> dict[int, int]:
    """The class of every seed: classes in turn, or a random class drawn from the seed."""
    seeds = schema.parse_numbers(cfg.seeds)
    if cfg.classes is None:
        return {seed: class_of_seed(seed, num_classes) for seed in seeds}
    classes = schema.parse_numbers(cfg.classes)
    if max(classes) >= num_classes:
        raise UserError(f"classes={cfg.classes}: class {max(classes)} does not exist; the model knows 0 to {num_classes - 1}")
    return {seed: classes[seed % len(classes)] for seed in seeds}


def default_output(checkpoint: Path, weights: str, settings: dict) -> Path:
    """<run>/generated/<step>_<weights>_<guidance>_<steps>_<hash of all settings>; beside a checkpoint that is in no run."""
    guidance = settings["guidance"]
    scale = "".join(f"{guidance[key]:g}" for key in ("cfg_scale", "w") if key in guidance)
    parent = (checkpoints.run_of(checkpoint) or checkpoint.resolve().parent) / "generated"
    name = f"{checkpoint.name}_{weights}_{guidance['name']}{scale}_{settings['sampler']['num_steps']}steps"
    # An earlier version hashed cfg_scale=2 and 2.0 differently: its folder is found by what it says.
    same = [file.parent for file in parent.glob(f"{name}_*/settings.yaml") if not schema.differences(read_yaml(file), settings)]
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=3).hexdigest()
    return same[0] if same else parent / f"{name}_{digest}"


def read_yaml(file: Path) -> dict:
    return OmegaConf.to_container(OmegaConf.load(file))


def open_output(output: Path, settings: dict) -> IO[bytes]:
    """Create the folder, or make sure that the images in it were made with the same settings; returns its lock."""
    file = output / "settings.yaml"
    held = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if file.name not in held and not all(name == ".lock" or name.startswith(".tmp_") for name in held):
        raise UserError(f"output={output} is not empty and not made by sample.py; choose another folder")
    lock = lock_output(output, "sampling into")
    if file.exists():
        if changed := schema.differences(read_yaml(file), settings):
            raise UserError(f"{output} holds images of other settings ({'; '.join(changed)}); choose another output=...")
        return lock
    try:
        write_file(file, OmegaConf.to_yaml(OmegaConf.create(settings)))
    except UserError as e:
        raise UserError(f"{e}; choose another output=...") from e
    return lock


def make_images(
    sampler: ImageSampler, labels: dict[int, int], files: dict[int, Path], batch_size: int, show_progress: bool
) -> None:
    """Sample this process's seeds, {seed: label}, and write one PNG each; a PNG that exists is whole."""

    def write(seed: int, image: np.ndarray) -> None:
        with whole_file(files[seed], flush=False) as f:  # to flush each would take longer than to write it
            Image.fromarray(image).save(f, format="PNG")

    seeds, writing = list(labels), iter(())
    with progress_bar(total=len(seeds), unit="image", disable=not show_progress) as bar, ThreadPoolExecutor() as threads:
        for start in range(0, len(seeds), batch_size):
            batch = seeds[start : start + batch_size]
            images = sampler(batch, [labels[seed] for seed in batch])
            list(writing)  # the batch before was written beside this one; its errors are raised here
            writing = threads.map(write, batch, images)
            bar.update(len(batch))
        list(writing)


def write_grid_and_npz(output: Path, cfg: schema.SampleConfig, files: dict[int, Path], labels: dict[int, int]) -> None:
    """grid_<seeds>.png with the first images, and samples_<seeds>.npz with all of them, in the order of the seeds."""
    spec = ",".join(map(str, cfg.seeds)) if isinstance(cfg.seeds, list) else str(cfg.seeds)
    if len(spec) > 40:
        spec = f"{len(files)}_{hashlib.blake2b(spec.encode(), digest_size=4).hexdigest()}"

    def read(seed: int) -> np.ndarray:
        try:
            return np.asarray(Image.open(files[seed]).convert("RGB"))
        except DECODE_ERRORS as e:
            raise UserError(f"{files[seed]} cannot be read ({e}); remove it, and the same command makes it again") from e

    shown = list(files)[:MAX_GRID_IMAGES]
    grid_file = output / f"grid_{spec}.png"
    grid = labelled_grid([read(seed) for seed in shown], [labels[seed] for seed in shown])
    with whole_file(grid_file) as f:
        grid.save(f, format="PNG")
    log.info("grid     %s", grid_file)
    if cfg.npz:
        npz_file = output / f"samples_{spec}.npz"
        write_npz(npz_file, map(read, files), (len(files), *read(shown[0]).shape), np.array(list(labels.values())))
        log.info("npz      %s", npz_file)


if __name__ == "__main__":
    cli.run(main, "sample", schema.SampleConfig)
