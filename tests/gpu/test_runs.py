"""Whole runs of train.py on the device: resumed bit for bit, with grids and evaluations, and on two devices."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import LAUNCH_2, REPOSITORY, losses, metrics, run_train

from gpu.runs import data_keys


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(device, size, tmp_path):
    keys = [*data_keys(size, tmp_path), f"model.backbone={size.backbone}", f"train.batch_size={size.batch_size}"]
    keys += ["model=tread", "train.precision=bf16", "train.grad_clip_norm=1"]
    # Other kernels of attention add gradients in no fixed order, and what is compiled may choose other sizes of tiles.
    keys += ["train.attention=math", "train.compile=none"]
    whole = run_train(tmp_path, "whole", *keys, "train.num_steps=8")
    run_train(tmp_path, "parts", *keys, "train.num_steps=4")
    parts = run_train(tmp_path, "parts", *keys, "train.num_steps=8")
    assert losses(whole) == losses(parts)
    for name in ("model.safetensors", "ema.safetensors"):
        files = [run / "checkpoints" / "step_0000008" / name for run in (whole, parts)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_run_draws_grids_and_is_evaluated(device, tmp_path):
    looks = ["sample.every=4", "sample.num_samples=10", "eval.every=4", "eval.num_samples=20", "eval.batch_size=20"]
    run = run_train(tmp_path, "looks", *looks, "train.num_steps=4", "diffusion.sampler.num_steps=3", "train.precision=bf16")
    assert (run / "samples" / "step_0000004.png").exists()
    assert any(name.startswith("fd_digits") for record in metrics(run) for name in record)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_devices_learn_what_one_does(device, tmp_path, parallel):
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    if device.type == "cpu" and parallel == "fsdp":
        pytest.skip("tests/test_fsdp.py trains so on the CPU")
    keys = ["train.batch_size=8", "train.num_steps=4", "train.precision=fp32", "train.compile=none"]
    one = run_train(tmp_path, "one", *keys)
    own = ["train.log_every=1", "sample.every=0", "eval.every=0", "train.cpu_threads=1", f"output_dir={tmp_path}", "name=two"]
    subprocess.run(
        [sys.executable, *LAUNCH_2, "train.py", *keys, *own, f"train.parallel={parallel}"],
        cwd=REPOSITORY,
        env=os.environ | ({"ACCELERATE_USE_CPU": "true"} if device.type == "cpu" else {}),
        check=True,
        timeout=240,
    )
    two = losses(tmp_path / "two")
    assert len(two) == 4 and all(two[step] == pytest.approx(loss, rel=1e-3) for step, loss in losses(one).items())
