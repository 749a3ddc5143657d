"""Evaluate checkpoints or images on disk with ADM's evaluation suite: FID, sFID, Inception Score, precision and recall.

    python fid.py checkpoint=runs/x/checkpoints/step_0400000 reference=references/VIRTUAL_imagenet256_labeled.npz \\
        num_samples=50000 guidance=cfg cfg_scale=1.5
    python fid.py checkpoints=runs/x num_samples=5000 guidance=cfg cfg_scale=[1.0,1.25,1.5]     # a sweep
    python fid.py images=samples.npz reference=references/VIRTUAL_imagenet256_labeled.npz

If keys have lists of values, the command evaluates all combinations and writes a plot and tables with standard errors. The keys
checkpoint, weights, cfg_scale and ema_length accept lists, as do sampler settings (num_steps=[20,40]) and guidance settings
(guidance.w=[1.2,1.5]). Rerunning the command evaluates only the combinations that have no results yet.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from common.errors import UserError
from common.files import REPOSITORY, lock_file
from configs import command_line
from configs.schema import FidConfig, TrainConfig, differences
from configs.settings import as_list


def main(cfg: FidConfig) -> float | None:
    """Evaluate all points of the command. Return the lowest value of the first metric, which sweepers minimise."""
    from checkpoints import store
    from checkpoints.load import load_config
    from evaluations.images import open_images
    from evaluations.results import in_words
    from evaluations.suite import metrics_for
    from runtime.compilation import check_compile
    from runtime.machine import start_accelerator
    from runtime.processes import check_same, check_shared, on_main
    from sampling.evaluator import open_reference
    from sampling.judge import Judge

    # Find the checkpoints, or open the images.
    given = [key for key in ("checkpoint", "checkpoints", "images") if getattr(cfg, key) is not None]
    if len(given) != 1:
        raise UserError(f"give one of checkpoint=, checkpoints= and images=, not {' and '.join(given) or 'none of them'}")
    of_sampler = [key for key in ("cfg_scale", "ema_length", *cfg.model_extra) if getattr(cfg, key) is not None]
    of_sampler += ["guidance"] if cfg.guidance[0].name != "none" else []
    if cfg.images and of_sampler:
        raise UserError(f"{of_sampler[0]}= applies to sampling from a checkpoint, but images={cfg.images} exist already")
    accelerator = start_accelerator(cfg.cpu_threads, tf32=cfg.tf32)
    check_compile("compile", cfg.compile, accelerator.device)
    # Only rank 0 looks for checkpoints, because ranks could find different checkpoints while a run is still training.
    folders = on_main(lambda: find_checkpoints(cfg))
    for folder in folders:
        check_shared(folder / store.MANIFEST, given[0])
    runs = {folder: load_config(folder) for folder in folders}
    filled = [with_settings_of_run(cfg, run) for run in runs.values()] or [with_settings_of_run(cfg, None)]
    for other in filled:
        if changed := differences(filled[0], other):
            raise UserError(f"the checkpoints have different evaluation settings ({'; '.join(changed)}); set them in the command")
    cfg = filled[0]
    images = open_images(cfg.images, cfg.convert_to_rgb, background=cfg.evaluation.background) if cfg.images else None
    if images is not None:
        check_same(images.quick_fingerprint(), "images", images.path)
        if len(images) == 0:
            raise UserError(f"images={cfg.images} holds statistics but no images")
    num_samples = cfg.num_samples or (50_000 if images is None else len(images))
    if images and num_samples > len(images):
        raise UserError(f"num_samples={num_samples}, but {cfg.images} holds {len(images)} images; make more or lower it")

    # Open the reference.
    sizes = {run.data.resolution: folder for folder, run in runs.items()}
    if len(sizes) > 1:
        raise UserError(f"checkpoints of different resolutions need separate commands: {in_words(sizes)}")
    resolution = images.shape[1] if images else next(iter(sizes))
    detectors = cfg.evaluation.all_detectors
    reference = open_reference(cfg.reference, "reference", detectors, resolution, cfg.evaluation.background)

    # Evaluate the points, and write the results.
    output = Path(cfg.output) if cfg.output else default_folder(cfg, folders)
    judge = Judge(cfg, accelerator, folders, images, reference, output)
    points = judge.points()
    with contextlib.ExitStack() as stack:

        def lock() -> None:
            stack.enter_context(lock_file(output / ".lock", "evaluating into", "output"))

        on_main(lock)
        results, metric = judge(points, num_samples), metrics_for(detectors[0])[0].name

        def write() -> float | None:
            sys.stdout.write(results.write([point for point, _ in points], metric))
            values = [results.find(point)["metrics"].get(metric) for point, _ in points]
            return min((value for value in values if value is not None), default=None)

        return on_main(write)


def find_checkpoints(cfg: FidConfig) -> list[Path]:
    """Find the checkpoints that the command names, and verify their files."""
    from checkpoints import store

    if cfg.checkpoints is None:
        return [store.find_checkpoint(Path(folder), "checkpoint") for folder in as_list(cfg.checkpoint) if folder]
    folders = list(store.list_steps(Path(cfg.checkpoints) / "checkpoints").values())
    if not folders:
        raise UserError(f"checkpoints={cfg.checkpoints} is not the folder of a run with checkpoints")
    for folder in folders:
        store.verify(folder)
    return folders


def with_settings_of_run(cfg: FidConfig, run: TrainConfig | None) -> FidConfig:
    """Fill in unset evaluation settings from the run. `detector_weights` applies only to the run's own detector."""
    given, stored = cfg.evaluation.model_dump(), run.evaluation.model_dump() if run else {}
    if given["detector"] not in (None, stored.get("detector")):
        stored["detector_weights"] = None
    evaluation = {key: value or stored.get(key) for key, value in given.items()}
    evaluation["background"] = evaluation["background"] or "white"
    update = {"evaluation": cfg.evaluation.model_copy(update=evaluation), "reference": cfg.reference or stored.get("reference")}
    return cfg.model_copy(update=update)


def default_folder(cfg: FidConfig, folders: list[Path]) -> Path:
    """Return <images>_evaluations for images, <run>/evaluations for a run, or a folder next to a checkpoint outside any run."""
    from checkpoints import store

    if not folders:
        images = Path(cfg.images).resolve()
        return images.with_name(f"{images.name}_evaluations")
    checkpoint = folders[0].resolve()
    folder = (store.find_run(checkpoint) or checkpoint.parent) / "evaluations"
    if folder == REPOSITORY / "evaluations":  # this folder contains source code, not results
        return checkpoint.with_name(f"{checkpoint.name}_evaluations")
    return folder


@hydra.main(version_base="1.3", config_path="configs", config_name="fid")
def start(cfg: DictConfig) -> float | None:
    return command_line.run_job(main, cfg, FidConfig)


if __name__ == "__main__":
    command_line.guard(start, "fid")
