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

from functools import partial

from cli import jobs
from common.errors import UserError
from configs.sampling_schema import FidConfig


def main(cfg: FidConfig) -> float | None:
    """Evaluate every checkpoint with every combination of the listed settings, or a set of images on disk.

    Return the lowest value of the first metric, which sweepers minimise.
    """
    from runtime.compilation import check_compile_mode
    from runtime.machine import apply_machine_settings, start_accelerator
    from runtime.processes import check_same_files, on_main
    from sampling.fid_images import evaluate_images, plan_image_set
    from sampling.fid_plan import plan_checkpoints
    from sampling.fid_run import evaluate_points, write_results

    keys = [key for key in ("checkpoint", "checkpoints", "images") if getattr(cfg, key) is not None]
    if len(keys) != 1:
        raise UserError(f"give one of checkpoint=, checkpoints= and images=, not {' and '.join(keys) or 'none of them'}")
    if cfg.images and (refused := cfg.keys_of_sampling()):
        raise UserError(f"{refused[0]}= applies to sampling from a checkpoint, but images={cfg.images} exist already")
    accelerator = start_accelerator(cfg.machine.cpu_threads)
    plan_command, evaluate = (plan_image_set, evaluate_images) if cfg.images else (plan_checkpoints, evaluate_points)
    plan = on_main(partial(plan_command, cfg))
    check_same_files(plan.file_fingerprints)
    check_compile_mode(plan.machine.compile, accelerator.device)
    apply_machine_settings(plan.machine, accelerator.device)
    evaluate(plan, accelerator)
    return on_main(partial(write_results, plan.rows, plan.evaluation))


if __name__ == "__main__":
    jobs.run_hydra(main, "fid", FidConfig)
