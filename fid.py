"""Evaluate checkpoints or images on disk with ADM's evaluation suite: FID, sFID, Inception Score, precision and recall.

    python fid.py checkpoint=runs/x                                            # measures what training measured
    python fid.py checkpoint=runs/x/checkpoints/step_0400000 evaluation.num_samples=50000 guidance=cfg guidance.cfg_scale=1.5
    python fid.py checkpoints=runs/x guidance=cfg guidance.cfg_scale=[1.0,1.25,1.5]     # a sweep
    python fid.py images=samples.npz evaluation.reference=references/VIRTUAL_imagenet256_labeled.npz

A key that the command does not set has the run's value. If keys have lists of values, the command evaluates all combinations and
writes a plot and tables with standard errors. The keys checkpoint, sampling.weights, sampling.ema_length and those of sampler and
guidance accept lists (sampler.num_steps=[20,40] guidance.w=[1.2,1.5]). Rerunning the command evaluates only the combinations that
have no results yet, from training or from fid.py.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable
from pathlib import Path

import hydra
from omegaconf import DictConfig

from common.errors import UserError
from common.files import REPOSITORY
from configs import command_line
from configs.schema import FidConfig, TrainConfig, differences
from configs.settings import as_list

log = logging.getLogger("fid")


def main(cfg: FidConfig) -> float | None:
    """Evaluate every checkpoint with every combination of the listed settings, or a set of images (each is a point).

    Return the lowest value of the first metric, which sweepers minimise.
    """
    from checkpoints import store
    from checkpoints.load import load_config
    from common.images import are_same_colour
    from evaluations.record import lowest
    from evaluations.suite import metrics_for
    from evaluations.tables import EvaluationTable, format_settings, write_tables
    from runtime.compilation import log_compile_mode
    from runtime.machine import start_accelerator, use_machine
    from runtime.processes import check_shared, on_main
    from sampling.evaluator import open_on_all_processes, open_reference
    from sampling.points import PointEvaluator, choose_recipes, point_of_images, points_of_recipes

    keys = [key for key in ("checkpoint", "checkpoints", "images") if getattr(cfg, key) is not None]
    if len(keys) != 1:
        raise UserError(f"give one of checkpoint=, checkpoints= and images=, not {' and '.join(keys) or 'none of them'}")
    if cfg.images and (refused := cfg.keys_of_sampling()):
        raise UserError(f"{refused[0]}= applies to sampling from a checkpoint, but images={cfg.images} exist already")
    accelerator = start_accelerator(cfg.machine.cpu_threads)

    # Take the settings that the command leaves open from the runs, or from the images. Only the main process looks for
    # checkpoints, because others could find different ones while a run is still training.
    folders = on_main(lambda: resolve_checkpoints(cfg))
    for folder in folders:
        check_shared(folder / store.MANIFEST, keys[0])
    images, recipes = None, choose_recipes(cfg, folders)
    if cfg.images:
        settings = {"convert_to_rgb": cfg.convert_to_rgb, "background": cfg.evaluation.background or "white"}
        images = open_on_all_processes(cfg.images, "images", **settings)
        if len(images) < 2:
            problem = "holds only one image, and a Frechet distance needs 2" if len(images) else "holds statistics but no images"
            raise UserError(f"images={cfg.images} {problem}")
    chosen = [own for own, _, _ in recipes] or [cfg.of_images(len(images), images.background)]
    for own in chosen:
        if changed := differences(
            *({"evaluation": one.evaluation.model_dump(exclude={"num_samples"})} for one in (chosen[0], own))
        ):
            raise UserError(f"the checkpoints have different evaluation settings ({'; '.join(changed)}); set them in the command")
    evaluation = chosen[0].evaluation
    if images is not None:
        if images.background is not None and not are_same_colour(images.background, evaluation.background):
            made = f"images={cfg.images} was made with background={images.background}"
            raise UserError(f"{made}, but evaluation.background={evaluation.background}")
        if evaluation.num_samples > len(images):
            problem = f"{cfg.images} holds {len(images)} images; make more, or lower it"
            raise UserError(f"evaluation.num_samples={evaluation.num_samples}, but {problem}")
    use_machine(chosen[0].machine, accelerator.device)
    log_compile_mode(chosen[0].machine.compile, accelerator.device)

    # Open the reference.
    runs = {folder: load_config(folder) for folder in folders}
    sizes = {run.data.resolution: folder for folder, run in runs.items()}
    if len(sizes) > 1:
        raise UserError(f"checkpoints of different resolutions need separate commands: {format_settings(sizes)}")
    resolution = images.shape[1] if images else next(iter(sizes))
    encoded_with = on_main(lambda: settings_of_latents(runs.values()))
    needs = evaluation.all_detectors, resolution, evaluation.background, encoded_with
    reference = open_reference(evaluation.reference, "evaluation.reference", *needs)

    formats = [{file.suffix.lower() in (".jpg", ".jpeg") for file in getattr(s, "files", ())} for s in (images, reference)]
    if {True} in formats and {False} in formats:
        message = "images=%s and evaluation.reference=%s: one set is JPEG and the other is not, which changes distances"
        log.warning(message, cfg.images, evaluation.reference)

    # Evaluate the points, and write the results.
    outputs = {folder: results_folder(folder) for folder in folders} or {None: folder_for_images(cfg.images)}
    if cfg.output:
        given = Path(cfg.output)
        outputs = dict.fromkeys(outputs, given.resolve() if given.is_symlink() else given)
    if images and images.path.resolve() in ((output := outputs[None]).resolve(), *output.resolve().parents):
        # Otherwise, results.png would become an image.
        raise UserError(f"output={output} is inside images={cfg.images}; give a folder elsewhere")
    points = [point_of_images(chosen[0], images, reference)] if images else points_of_recipes(recipes, reference)
    evaluated = PointEvaluator(accelerator, evaluation, points, reference, images, outputs, cfg.output is not None).evaluate()
    metric = metrics_for(evaluation.all_detectors[0])[0].name

    def write() -> float | None:
        for results in dict.fromkeys(results for _, results in evaluated):
            own = [(point.wanted, point.shown) for point, other in evaluated if other is results]
            write_tables(results, own, metric)
        found = [(record, point.shown) for point, results in evaluated if (record := results.find(point.wanted))]
        sys.stdout.write(EvaluationTable(*zip(*found), metric).terminal() if found else "")
        return lowest(record for record, _ in found)

    return on_main(write)


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

    reads = store.files_for_sampling(as_list(cfg.sampling.weights or "ema"), cfg.sampling.ema_length is not None)
    if cfg.checkpoints is None:
        return [store.resolve_checkpoint(Path(folder), "checkpoint", reads) for folder in as_list(cfg.checkpoint) if folder]
    folders = store.verify_all(Path(cfg.checkpoints) / "checkpoints", reads)
    if not folders:
        raise UserError(f"checkpoints={cfg.checkpoints} is not the folder of a run with checkpoints")
    return folders


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
