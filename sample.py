"""Sample images from a checkpoint.

    accelerate launch sample.py checkpoint=runs/digits_tread seeds=0-49 classes=0-9
    accelerate launch sample.py checkpoint=runs/digits_tread/checkpoints/step_0000800 guidance=cfg cfg_scale=2 num_steps=30
    accelerate launch --num_processes 8 sample.py checkpoint=runs/in256 seeds=0-49999 batch_size=128

Image i depends on seed i (and the settings) alone, not on the batch size or the number of processes. The same command
again makes the images that are missing. Output: a PNG per seed, a labelled grid and an .npz as ADM's evaluator reads it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import numpy as np
from accelerate.utils import broadcast_object_list
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from tqdm import tqdm

from evaluations.npz import write_npz
from training import checkpoint as checkpoints
from training import cli, config
from training.engine import check_compile
from training.randomness import class_of_seed
from training.run import naming
from training.sampling import ImageSampler, describe_cost, find_weak, labelled_grid, load_sampler, load_weak

log = logging.getLogger("sample")

MAX_GRID_IMAGES = 100


def main(cfg: DictConfig) -> None:
    cfg = config.check(cfg, config.SAMPLE_KEYS)
    accelerator = cli.start_accelerator(cfg.cpu_threads)
    check_compile("compile", cfg.compile, accelerator.device)
    # One process chooses: in a run that goes on, another could find a newer one.
    checkpoint = checkpoints.find_checkpoint(Path(cfg.checkpoint), "checkpoint") if accelerator.is_main_process else None
    checkpoint = broadcast_object_list([checkpoint])[0]
    run_cfg = checkpoints.load_config(checkpoint)
    guidance_settings(cfg)
    diffusion = config.build_diffusion(run_cfg, **{key: cfg[key] for key in config.SAMPLER_OVERRIDES})
    config.check_guidance(cfg.guidance, run_cfg, diffusion)
    config.warn_of_guidance(cfg.guidance, run_cfg)
    weak = find_weak(cfg.guidance, run_cfg, accelerator)
    labels = labels_of_seeds(cfg, run_cfg.data.num_classes)
    settings = {
        "checkpoint": checkpoints.identity(checkpoint),
        "weights": cfg.weights,
        "classes": None if cfg.classes is None else config.parse_numbers(cfg.classes),
        "autoencoder": cfg.autoencoder or run_cfg.data.autoencoder,
        "guidance": OmegaConf.to_container(cfg.guidance) | ({"content": checkpoints.identity(weak)} if weak else {}),
        "sampler": {key: getattr(diffusion.sampler, key) for key in run_cfg.diffusion.sampler},
        "precision": cfg.precision,
    }

    output = Path(cfg.output) if cfg.output else default_output(checkpoint, cfg, settings)
    if accelerator.is_main_process:
        open_output(output, settings)
    accelerator.wait_for_everyone()

    files = {seed: output / f"seed_{seed:06d}_class_{label:03d}.png" for seed, label in labels.items()}
    missing = [seed for seed, file in files.items() if not file.exists()]
    accelerator.wait_for_everyone()  # all processes look before the first one writes
    log.info("%s: %d of %d images to make, in %s", checkpoint, len(missing), len(files), output)
    if missing:
        sampler = load_sampler(
            checkpoint,
            cfg.weights,
            cfg.autoencoder,
            accelerator.device,
            cfg.compile,
            diffusion=diffusion,
            guide=config.build_guidance(cfg),
            precision=cfg.precision,
            weak=load_weak(cfg.guidance, accelerator.device, cfg.compile),
        )
        mine = missing[accelerator.process_index :: accelerator.num_processes]
        make_images(sampler, mine, labels, files, cfg.batch_size, show_progress=accelerator.is_main_process)
        if mine:
            log.info("cost     %s", describe_cost(sampler, cfg.guidance))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_grid_and_npz(output, cfg, files, labels)
    accelerator.end_training()


def guidance_settings(cfg: DictConfig) -> None:
    """cfg_scale is guidance.cfg_scale by its short name."""
    if cfg.cfg_scale is not None:
        if "cfg_scale" not in cfg.guidance:
            raise ValueError(
                f"cfg_scale={cfg.cfg_scale} needs guidance=cfg or guidance=interval, not guidance={cfg.guidance.name}"
                + (f"; its own scale is guidance.w={cfg.guidance.w}" if "w" in cfg.guidance else "")
            )
        cfg.guidance.cfg_scale = cfg.cfg_scale


def labels_of_seeds(cfg: DictConfig, num_classes: int) -> dict[int, int]:
    """The class of every seed: classes in turn, or a random class drawn from the seed."""
    seeds = config.parse_numbers(cfg.seeds)
    if cfg.classes is None:
        return {seed: class_of_seed(seed, num_classes) for seed in seeds}
    classes = config.parse_numbers(cfg.classes)
    if max(classes) >= num_classes:
        raise ValueError(f"classes={cfg.classes}: class {max(classes)} does not exist; the model knows 0 to {num_classes - 1}")
    return {seed: classes[seed % len(classes)] for seed in seeds}


def default_output(checkpoint: Path, cfg: DictConfig, settings: dict) -> Path:
    """<run>/generated/<step>_<weights>_<guidance>_<steps>_<hash of all settings>; beside a checkpoint that is in no run."""
    scale = cfg.guidance.get("cfg_scale", cfg.guidance.get("w"))
    scale = "" if scale is None else f"{scale:g}"
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=3).hexdigest()
    name = f"{checkpoint.name}_{cfg.weights}_{cfg.guidance.name}{scale}_{settings['sampler']['num_steps']}steps_{digest}"
    folder = checkpoint.resolve().parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "generated" / name


def open_output(output: Path, settings: dict) -> None:
    """Create the folder, or make sure that the images in it were made with the same settings."""
    file = output / "settings.yaml"
    current = OmegaConf.create(settings)
    if file.exists():
        changed = config.differences(OmegaConf.load(file), current, tuple(settings))
        if changed:
            raise ValueError(f"{output} holds images of other settings ({'; '.join(changed)}); choose another output=...")
        return
    if output.exists() and any(not path.name.startswith(".tmp_") for path in output.iterdir()):
        raise ValueError(f"output={output} is not empty and not made by sample.py; choose another folder")
    try:
        output.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".tmp_{file.name}")
        OmegaConf.save(current, temporary)
        os.replace(temporary, file)
    except OSError as e:
        raise ValueError(f"cannot write to {output} ({e.strerror}); choose another output=...") from e


def make_images(
    sampler: ImageSampler, seeds: list[int], labels: dict[int, int], files: dict[int, Path], batch_size: int, show_progress: bool
) -> None:
    """Sample this process's seeds and write one PNG each; a PNG that exists is whole."""
    with tqdm(total=len(seeds), unit="image", dynamic_ncols=True, disable=not show_progress) as bar:
        for start in range(0, len(seeds), batch_size):
            batch = seeds[start : start + batch_size]
            for seed, image in zip(batch, sampler(batch, [labels[seed] for seed in batch])):
                temporary = files[seed].with_name(f".tmp_{files[seed].name}")
                with naming(files[seed]):
                    Image.fromarray(image).save(temporary, format="PNG")
                    os.replace(temporary, files[seed])
            bar.update(len(batch))


def write_grid_and_npz(output: Path, cfg: DictConfig, files: dict[int, Path], labels: dict[int, int]) -> None:
    """grid_<seeds>.png with the first images, and samples_<seeds>.npz with all of them, in the order of the seeds."""
    spec = ",".join(map(str, cfg.seeds)) if OmegaConf.is_list(cfg.seeds) else str(cfg.seeds)
    if len(spec) > 40:
        spec = f"{len(files)}_{hashlib.blake2b(spec.encode(), digest_size=4).hexdigest()}"

    def read(seed: int) -> np.ndarray:
        return np.asarray(Image.open(files[seed]).convert("RGB"))

    shown = list(files)[:MAX_GRID_IMAGES]
    grid_file = output / f"grid_{spec}.png"
    labelled_grid([read(seed) for seed in shown], [labels[seed] for seed in shown]).save(grid_file)
    log.info("grid     %s", grid_file)
    if cfg.npz:
        npz_file = output / f"samples_{spec}.npz"
        with naming(npz_file):
            write_npz(npz_file, map(read, files), (len(files), *read(shown[0]).shape), np.array(list(labels.values())))
        log.info("npz      %s", npz_file)


if __name__ == "__main__":
    cli.run(main, "sample", config.SAMPLE_KEYS)
