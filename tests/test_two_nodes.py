"""Two processes that see other files: one error on both before any work, and never one that waits for the other."""

import json
import shutil
import socket

import pytest
from conftest import LAUNCH_2, finish, losses, run_train, start

from common.files import REPOSITORY
from evaluations.classifiers import DIGITS_WEIGHTS, ClassifierDetector
from evaluations.images import open_images
from evaluations.reference import features_of_images, write_cache


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """node0/ holds a run, node1/ does not, shared/ is read by both. `<name>_<rank>.json`: how each run of two_nodes.py ended."""
    folder = tmp_path_factory.mktemp("two_nodes")
    run_train(folder / "shared" / "runs", "one", "train.num_steps=3")
    shutil.copytree(folder / "shared", folder / "node0")
    damaged = folder / "node0" / "runs" / "damaged"
    shutil.copytree(folder / "node0" / "runs" / "one", damaged)
    (damaged / "checkpoints" / "step_0000003" / "manifest.json").write_text("{")
    (folder / "node1").mkdir()
    for node in ("node0", "node1"):
        shutil.copy(REPOSITORY / "evaluations" / "digits_reference.npz", folder / node / "reference.npz")
    reference, detector = open_images(folder / "node1" / "reference.npz"), ClassifierDetector("digits", DIGITS_WEIGHTS)
    write_cache(reference, detector, features_of_images(reference, [detector], 64, 0, len(reference))[0])
    (folder / "script.py").write_text(
        f"import sys; sys.path[:0] = [{str(REPOSITORY)!r}, {str(REPOSITORY / 'tests')!r}]\n"
        f"from pathlib import Path; import two_nodes; two_nodes.main(Path({str(folder)!r}))"
    )
    code, output = finish(start(str(folder / "script.py"), launcher=LAUNCH_2), timeout_sec=300)
    assert code == 0, output
    return folder


def ends(folder, name):
    """How a run ended, in the main process and in the other one."""
    return [json.loads((folder / f"{name}_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("name", "key", "used"),
    [
        ("resume", "output_dir", "runs/one/checkpoints/step_0000003"),
        ("resume_from", "resume", "runs/one/checkpoints/step_0000003"),
        ("init_from", "init_from", "runs/one/checkpoints/step_0000003"),
        ("sample", "checkpoint", "runs/one/checkpoints/step_0000003"),
        ("output", "output", "images"),
        ("autoguidance", "guidance.checkpoint", "runs/one/checkpoints/step_0000003"),
        ("fid", "checkpoint", "runs/one/checkpoints/step_0000003"),
        ("sweep", "checkpoints", "runs/one/checkpoints/step_0000003"),
    ],
)
def test_what_one_node_does_not_have_is_one_error_on_both(folder, name, key, used):
    host = socket.gethostname()
    message = (
        f"{key}: process 0, on {host}, uses {folder / 'node0' / used}; for process 1, on {host}, {folder / 'node1' / used} is "
        f"not there. Give {key} as an absolute path on a file system that all nodes share"
    )
    assert [end["error"] for end in ends(folder, name)] == [message, message]


def test_what_the_main_process_refuses_ends_the_others_too(folder):
    first, second = ends(folder, "damaged")
    assert "training does not silently start over" in first["error"] and second["error"] == first["error"]


def test_the_main_process_decides_whether_the_reference_is_cached(folder):
    num_images = len(open_images(folder / "node0" / "reference.npz"))
    for name, num_computed in (("cached_there", num_images), ("cached_here", 0)):
        first, second = ends(folder, name)
        assert first["error"] is None and second["error"] is None
        # Shares are of one length: one image may be computed twice. Each process also makes 2 of the 4 samples.
        assert first["computed"] == second["computed"] == -(-num_computed // 2) + 2


def test_a_shared_folder_is_all_that_two_nodes_need(folder):
    for name in ("shared", "resumed"):
        assert [end["error"] for end in ends(folder, name)] == [None, None]
    assert len(list((folder / "shared" / "images").glob("seed_*.png"))) == 3
    assert list(losses(folder / "shared" / "runs" / "one")) == [1, 2, 3, 4]
