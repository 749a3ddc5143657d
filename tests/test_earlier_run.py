"""A run that an earlier version of the project wrote: it resumes, samples, and its images are found again.

earlier_run/ holds a run of 3 steps on the embedded digits, made before the configuration had types (with `TINY` of conftest.py
and the settings below), and what the same run gave when it went on to step 6 without a stop.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import composed, forget_accelerate, losses, run_train
from PIL import Image
from safetensors.torch import load_file

import dit

EARLIER = Path(__file__).parent / "earlier_run"
SETTINGS = [
    "model.routes=[{selection_ratio:0.5,start_layer_idx:0,end_layer_idx:1}]",
    "train.lr=1e-2",
    "diffusion.sampler.num_steps=3",
    "data.path=latents/digits.safetensors",
    "evaluation.reference=evaluations/digits_reference.npz",
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A copy of the earlier run; the network's name means the tiny one that it was trained with."""
    monkeypatch.setitem(dit.BACKBONES, "DiT-XS/2", (3, 16, 2, 2))
    monkeypatch.chdir(EARLIER.parent.parent)
    return Path(shutil.copytree(EARLIER / "run", tmp_path / "run"))


def test_it_resumes_as_if_it_had_never_stopped(run):
    run_train(run.parent, "run", *SETTINGS)
    expected = {
        line["step"]: line["loss"] for line in map(json.loads, (EARLIER / "uninterrupted.jsonl").read_text().splitlines())
    }
    assert losses(run) == pytest.approx(expected, rel=1e-5)
    weights = load_file(run / "checkpoints" / "step_0000006" / "model.safetensors")
    for name, value in load_file(EARLIER / "uninterrupted.safetensors").items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_another_seed_is_refused_by_its_key(run):
    with pytest.raises(ValueError, match="cannot go on under this configuration: seed: 0 -> 1"):
        run_train(run.parent, "run", *SETTINGS, "seed=1")


def sample(run, *overrides):
    import sample as script

    forget_accelerate()
    script.main(composed([f"checkpoint={run}", "classes=0-3", "guidance=cfg", "cpu_threads=1", *overrides], "sample"))


def test_its_images_are_found_and_new_ones_are_the_same(run):
    (folder,) = (run / "generated").iterdir()
    before = {file.name: file.stat().st_mtime_ns for file in folder.glob("seed_*.png")}
    sample(run, "seeds=0-3", "cfg_scale=2")
    assert list((run / "generated").iterdir()) == [folder]
    assert {file.name: file.stat().st_mtime_ns for file in folder.glob("seed_*.png")} == before
    sample(run, "seeds=0-3", "cfg_scale=2", f"output={run / 'again'}")
    for name in before:
        old, new = (np.asarray(Image.open(file / name)).astype(int) for file in (folder, run / "again"))
        assert abs(old - new).max() <= 1
