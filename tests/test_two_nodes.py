"""Two processes that see different files: both raise the same error before any work, and neither waits for the other."""

import json
import shutil

import numpy as np
import pytest
from conftest import losses, make_shard, run_train
from forked import launch
from PIL import Image
from two_nodes import HERE, run

from common.files import REPOSITORY
from evaluations.classifiers import DIGITS_WEIGHTS, ClassifierDetector
from evaluations.features import features_of_images, write_cache
from evaluations.images import open_images


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Fixture: node0/ holds a run, node1/ does not, both read shared/. `<name>_<rank>.json` holds each run's error."""
    folder = tmp_path_factory.mktemp("two_nodes")
    run_train(folder / "shared" / "runs", "one", "train.num_steps=3", "train.lr=1e-2")
    shutil.copytree(folder / "shared", folder / "node0")
    for i, image in enumerate(np.random.default_rng(0).integers(0, 256, (11, 12, 12, 3), dtype=np.uint8)):
        (file := folder / "shared" / "pictures" / "ab"[i % 2] / f"{i}.png").parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    damaged = folder / "node0" / "runs" / "damaged"
    shutil.copytree(folder / "node0" / "runs" / "one", damaged)
    (damaged / "checkpoints" / "step_0000003" / "manifest.json").write_text("{")
    (folder / "node1").mkdir()
    for i, node in enumerate(("node0", "node1")):
        shutil.copy(REPOSITORY / "evaluations" / "digits_reference.npz", folder / node / "reference.npz")
        np.savez(folder / node / "other.npz", arr_0=np.full((4, 8, 8, 3), i, dtype=np.uint8))
        (folder / node / "vae").write_text(f"weights {i}")
        shutil.copytree(folder / "shared" / "runs" / "one" / "checkpoints" / "step_0000003", folder / node / "copy")
        make_shard(folder / node / "data" / "a.safetensors", channels=1, size=8, num_classes=10, seed=i)
    (folder / "node1" / "copy" / "model.safetensors").unlink()
    reference, detector = open_images(folder / "node1" / "reference.npz"), ClassifierDetector("digits", DIGITS_WEIGHTS)
    cache = folder / "node1" / "scores" / "reference_features"
    write_cache(cache, reference, detector, features_of_images(reference, [detector], 64, range(len(reference)))[0])
    for outcome in launch(folder, ["tests/two_nodes.py", str(folder)], 2, limit_sec=300, small=False):
        outcome.expect_code(0)
    return folder


def errors(folder, name):
    """Return the errors of a run in both processes, the main process first."""
    return [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("resume", "output_dir"),
        ("new", "output_dir"),
        ("init_from", "init_from"),
        ("raw", "init_from"),
        ("sample", "checkpoint"),
        ("output", "output"),
        ("autoguidance", "guidance.checkpoint"),
        ("fid", "checkpoint"),
        ("sweep", "checkpoints"),
        ("data", "data.path"),
        ("reference", "evaluation.reference"),
        ("detector", "evaluation.detector_weights"),
        ("latents", "output"),
        ("weights", "autoencoder"),
    ],
)
def test_a_file_that_one_node_lacks_gives_the_same_error_on_both(folder, name, key):
    others = {
        "raw": "copy/model.safetensors",
        "new": "runs/new",
        "output": "images",
        "data": "data",
        "reference": "other.npz",
        "detector": "vae",
        "latents": "latents",
        "weights": "vae",
    }
    used = others.get(name, "runs/one/checkpoints/step_0000003")
    first, second = errors(folder, name)
    assert first == second and first.startswith(f"{key}: process 1 on ")
    assert f" sees other content in {folder}/node1/{used} than process 0 on " in first and f" in {folder}/node0/{used}; " in first


def test_an_error_of_the_main_process_is_raised_on_the_others_too(folder):
    first, second = errors(folder, "damaged")
    assert "training does not silently start over" in first and second == first


def test_a_shared_folder_is_all_that_two_nodes_need(folder):
    for name in ("new_shared", "cached_by_one", "shared", "encoded", "resumed"):
        assert errors(folder, name) == [None, None]
    assert list(losses(folder / "shared" / "runs" / "one")) == [1, 2, 3, 4]


def test_one_process_inspects_the_images_for_both(folder):
    first, second = (json.loads((folder / f"calls_{rank}.json").read_text()) for rank in (0, 1))
    assert first["size"] > 9 and second["size"] == 3  # one for each of three commands, to check that both see the same
    assert first["local_hash"] >= 1 and "local_hash" not in second


def test_two_processes_produce_the_same_images_figures_and_latents_as_one(folder, monkeypatch):
    monkeypatch.chdir(folder / "node0")
    run("cached_by_one", folder, f"checkpoint={HERE}", "output=alone")  # at step 3, because `resumed` continued the shared run
    run("shared", folder, f"checkpoint={HERE}", "output=images_alone")
    run("encoded", folder, "output=latents_alone")
    two, one = (
        {file.name: np.asarray(Image.open(file)).astype(int) for file in images.glob("*.png")}
        for images in (folder / "shared" / "images", folder / "node0" / "images_alone")
    )
    assert two.keys() == one.keys() and len(one) == 6 and (folder / "shared" / "images" / "samples_0-4.npz").exists()
    # Matrix products of another batch size may round differently, which may change a pixel by 1 of 255.
    assert max(np.abs(two[name] - image).max() for name, image in one.items()) <= 1
    two, one = (json.loads((folder / "node0" / name / "results.jsonl").read_text())["metrics"] for name in ("scores", "alone"))
    assert two == pytest.approx(one, rel=1e-4)
    two, one = (
        {file.name: file.read_bytes() for file in latents.iterdir()}
        for latents in (folder / "shared" / "latents", folder / "node0" / "latents_alone")
    )
    assert two == one and "manifest.json" in one and len(one) == 4
