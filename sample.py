"""Sample images from a checkpoint.

    python sample.py checkpoint=runs/digits_tread seeds=0-49 classes=0-9
    python sample.py checkpoint=runs/digits_tread/checkpoints/step_0001000 guidance=cfg guidance.cfg_scale=2 sampler.num_steps=30
    accelerate launch --num_processes 8 sample.py checkpoint=runs/in256 seeds=0-49999 sampling.batch_size=128

An image depends on its seed and the settings. On a CPU, the batch size and the number of processes change pixels by at most one
grey level. The command writes a PNG per seed, a labelled grid and an .npz in ADM's format. Rerun it to add missing images.
"""

from __future__ import annotations

import contextlib
from functools import partial

from cli import jobs
from configs.sampling_schema import SampleConfig


def main(cfg: SampleConfig) -> None:
    """Sample the images that are missing in the output folder, and write the grid."""
    from runtime.machine import apply_machine_settings, start_accelerator
    from runtime.processes import check_new_file, check_same_files, on_main
    from sampling.recipe import fingerprint_files_of
    from sampling.sample_command import SETTINGS_FILE, make_images, plan_images

    accelerator = start_accelerator(cfg.machine.cpu_threads)
    with contextlib.ExitStack() as stack:  # the main process locks the output folder
        plan = on_main(partial(plan_images, cfg, accelerator.device, stack))
        check_same_files(partial(fingerprint_files_of, [plan.recipe]))
        check_new_file("output", plan.output / SETTINGS_FILE)
        apply_machine_settings(plan.recipe.config.machine, accelerator.device)
        make_images(plan, accelerator)


if __name__ == "__main__":
    jobs.run_hydra(main, "sample", SampleConfig)
