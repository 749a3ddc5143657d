"""Whole runs of train.py on the device: resumed bit for bit, with grids and evaluations, and on two devices."""

import subprocess
import sys

import pytest
import torch
from conftest import LAUNCH_2, REPOSITORY, losses, run_train
from torch.nn.attention import SDPBackend, sdpa_kernel


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(device, tmp_path):
    keys = ["model=tread", "model.backbone=DiT-XS/2", "train.precision=bf16", "train.grad_clip_norm=1", "checkpoint.every=4"]
    keys += ["train.compile=none"]  # what is compiled may choose other sizes of tiles
    with sdpa_kernel(SDPBackend.MATH):  # other kernels of attention add gradients in no fixed order
        whole = run_train(tmp_path, "whole", *keys, "train.num_steps=8")
        run_train(tmp_path, "parts", *keys, "train.num_steps=4")
        parts = run_train(tmp_path, "parts", *keys, "train.num_steps=8")
    assert losses(whole) == losses(parts)
    # The one of step 4 was written while `whole` went on, and after `parts` had ended.
    for name in ("step_0000004/model.safetensors", "step_0000008/model.safetensors", "step_0000008/ema.safetensors"):
        assert (whole / "checkpoints" / name).read_bytes() == (parts / "checkpoints" / name).read_bytes()


def test_a_run_draws_grids_and_is_evaluated(device, tmp_path):
    looks = ["sample.every=4", "sample.num_samples=10", "eval.every=4", "eval.num_samples=20", "eval.batch_size=20"]
    run = run_train(tmp_path, "looks", *looks, "train.num_steps=4", "diffusion.sampler.num_steps=3", "train.precision=bf16")
    assert (run / "samples" / "step_0000004.png").exists()
    assert "fd_digits" in (run / "metrics.jsonl").read_text()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_devices_learn_what_one_does(device, tmp_path, parallel):
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed; tests/test_train.py and tests/test_fsdp.py train so on a CPU")
    keys = ["train.batch_size=8", "train.num_steps=4", "train.precision=fp32", "train.tf32=false", "train.compile=none"]
    keys += ["train.grad_accum_steps=2", "train.grad_clip_norm=1"]
    one = run_train(tmp_path, "one", *keys)
    own = ["train.log_every=1", "sample.every=0", "eval.every=0", "train.cpu_threads=1", f"output_dir={tmp_path}", "name=two"]
    command = [sys.executable, *LAUNCH_2, "train.py", *keys, *own, f"train.parallel={parallel}"]
    subprocess.run(command, cwd=REPOSITORY, check=True, timeout=120)
    two = losses(tmp_path / "two")
    assert len(two) == 4 and all(two[step] == pytest.approx(loss, rel=1e-3) for step, loss in losses(one).items())
