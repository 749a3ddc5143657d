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
from collections.abc import Iterable
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from common.errors import UserError
from common.files import REPOSITORY
from configs import command_line
from configs.schema import FidConfig, TrainConfig, differences
from configs.settings import as_list


def main(cfg: FidConfig) -> float | None:
    """Evaluate every checkpoint with every combination of the listed settings, or a set of images (each is a point).

    Return the lowest value of the first metric, which sweepers minimise.
    """
    from checkpoints import store
    from checkpoints.load import load_config
    from common.images import are_same_colour
    from evaluations.results import format_settings, write_all
    from evaluations.suite import metrics_for
    from runtime.compilation import log_compile_mode
    from runtime.machine import start_accelerator
    from runtime.processes import check_shared, on_main
    from sampling.evaluator import open_on_all_processes, open_reference
    from sampling.points import PointEvaluator

    keys = [key for key in ("checkpoint", "checkpoints", "images") if getattr(cfg, key) is not None]
    if len(keys) != 1:
        raise UserError(f"give one of checkpoint=, checkpoints= and images=, not {' and '.join(keys) or 'none of them'}")
    if cfg.images and (refused := keys_of_sampling(cfg)):
        raise UserError(f"{refused[0]}= applies to sampling from a checkpoint, but images={cfg.images} exist already")
    accelerator = start_accelerator(cfg.cpu_threads, tf32=cfg.tf32)
    log_compile_mode("compile", cfg.compile, accelerator.device)

    # Only the main process looks for checkpoints, because others could find different ones while a run is still training.
    folders = on_main(lambda: resolve_checkpoints(cfg))
    for folder in folders:
        check_shared(folder / store.MANIFEST, keys[0])
    runs = {folder: load_config(folder) for folder in folders}
    images = None
    if cfg.images:
        settings = {"convert_to_rgb": cfg.convert_to_rgb, "background": cfg.evaluation.background or "white"}
        images = open_on_all_processes(cfg.images, "images", **settings)
    background = images.background if images else None
    filled = [with_settings_of_run(cfg, run) for run in runs.values()] or [with_settings_of_run(cfg, None, background)]
    for other in filled:
        if changed := differences(filled[0], other):
            raise UserError(f"the checkpoints have different evaluation settings ({'; '.join(changed)}); set them in the command")
    cfg = filled[0]
    if images is not None:
        if background is not None and not are_same_colour(background, cfg.evaluation.background):
            made = f"images={cfg.images} was made with background={background}"
            raise UserError(f"{made}, but evaluation.background={cfg.evaluation.background}")
        if len(images) == 0:
            raise UserError(f"images={cfg.images} holds statistics but no images")
    num_samples = cfg.num_samples or (50_000 if images is None else len(images))
    if images and num_samples > len(images):
        raise UserError(f"num_samples={num_samples}, but {cfg.images} holds {len(images)} images; make more, or lower it")
    if num_samples < 2:
        raise UserError(f"num_samples={num_samples}: a Frechet distance needs at least 2 images; papers use 50,000")

    # Open the reference.
    sizes = {run.data.resolution: folder for folder, run in runs.items()}
    if len(sizes) > 1:
        raise UserError(f"checkpoints of different resolutions need separate commands: {format_settings(sizes)}")
    resolution = images.shape[1] if images else next(iter(sizes))
    detectors = cfg.evaluation.all_detectors
    encoded_with = on_main(lambda: settings_of_latents(runs.values()))
    reference = open_reference(cfg.reference, "reference", detectors, resolution, cfg.evaluation.background, encoded_with)

    # Evaluate the points, and write the results.
    outputs = {folder: results_folder(folder) for folder in folders} or {None: folder_for_images(cfg.images)}
    if cfg.output:
        given = Path(cfg.output)
        outputs = dict.fromkeys(outputs, given.resolve() if given.is_symlink() else given)
    if images and images.path.resolve() in ((output := outputs[None]).resolve(), *output.resolve().parents):
        # Otherwise, results.png would become an image.
        raise UserError(f"output={output} is inside images={cfg.images}; give a folder elsewhere")
    evaluator = PointEvaluator(cfg, accelerator, folders, images, reference, outputs)
    evaluated, metric = evaluator.evaluate(evaluator.points(), num_samples), metrics_for(detectors[0])[0].name

    def write() -> float | None:
        table, lines = write_all(evaluated, metric)
        sys.stdout.write(table)
        return min((line["metrics"][metric] for line in lines if metric in line["metrics"]), default=None)

    return on_main(write)


def keys_of_sampling(cfg: FidConfig) -> list[str]:
    """Return the keys that have no effect on images on disk, and that differ from their values in configs/."""
    default = OmegaConf.merge(*(OmegaConf.load(REPOSITORY / "configs" / f"{name}.yaml") for name in ("sampling", "fid")))
    typed = {key: value for key, value in cfg if key not in cfg.keys_for_images and value != default.get(key)}
    return [key for key, value in typed.items() if key != "guidance" or value[0].name != "none"]


def settings_of_latents(runs: Iterable[TrainConfig]) -> dict[str, object]:
    """Return the settings that encoded the runs' latents, if the latents are on this machine."""
    from latents.shards import read_manifest_at

    settings = {}
    for run in runs:
        with contextlib.suppress(UserError):  # a damaged manifest does not stop an evaluation
            settings |= read_manifest_at(run.data.path).get("settings", {})
    return settings


def resolve_checkpoints(cfg: FidConfig) -> list[Path]:
    """Find the checkpoints that the command names, and verify the files that sampling reads."""
    from checkpoints import store

    reads = store.files_for_sampling(as_list(cfg.weights), cfg.ema_length is not None)
    if cfg.checkpoints is None:
        return [store.resolve_checkpoint(Path(folder), "checkpoint", reads) for folder in as_list(cfg.checkpoint) if folder]
    folders = store.verify_all(Path(cfg.checkpoints) / "checkpoints", reads)
    if not folders:
        raise UserError(f"checkpoints={cfg.checkpoints} is not the folder of a run with checkpoints")
    return folders


def with_settings_of_run(cfg: FidConfig, run: TrainConfig | None, background: str | None = None) -> FidConfig:
    """Fill in unset evaluation settings from the run. `detector_weights` applies only to the run's own detector.

    Args:
        cfg: Settings of the command.
        run: Settings of the run, or None for images on disk.
        background: Colour behind these images, if it is known.
    """
    typed, stored = cfg.evaluation.model_dump(), run.evaluation.model_dump() if run else {}
    if typed["detector"] not in (None, stored.get("detector")):
        stored["detector_weights"] = None
    evaluation = {key: value or stored.get(key) for key, value in typed.items()}
    evaluation["background"] = evaluation["background"] or background or "white"
    update = {"evaluation": cfg.evaluation.model_copy(update=evaluation), "reference": evaluation["reference"]}
    return cfg.model_copy(update=update)


def folder_for_images(images: str) -> Path:
    """Return the folder for the results of images. They never lie next to the images, where a folder would become a class."""
    return Path("runs") / "evaluations" / Path(images).resolve().name


def results_folder(checkpoint: Path) -> Path:
    """Return <run>/evaluations for a checkpoint in a run, or a folder next to a checkpoint outside any run."""
    from checkpoints import store

    checkpoint = checkpoint.resolve()
    folder = (store.find_run(checkpoint) or checkpoint.parent) / "evaluations"
    if folder == REPOSITORY / "evaluations":  # this folder contains source code, not results
        return checkpoint.with_name(f"{checkpoint.name}_evaluations")
    return folder


@hydra.main(version_base="1.3", config_path="configs", config_name="fid")
def start(cfg: DictConfig) -> float | None:
    return command_line.run_job(main, cfg, FidConfig)


if __name__ == "__main__":
    command_line.guard(start, "fid")
