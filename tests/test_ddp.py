"""Training on two processes gives the same losses, weights, averages, grids and evaluations as training on one."""

import json
import shutil

import pytest
import torch
from conftest import checked, evaluated, losses, make_shard, metrics, run_train
from ddp_runs import BATCH, DENSE, LEVELS, MUON, SPRINT, TREAD
from forked import launch
from gpu.runs import SMALL, keys_of_repa
from PIL import Image, ImageChops
from safetensors.torch import load_file

from checkpoints import store
from checkpoints.run import list_snapshots
from common.errors import UserError
from training.parallel import check_batch_divides


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Fixture: the folder with the runs of one process, and the runs that two processes make in tests/ddp_runs.py."""
    folder = tmp_path_factory.mktemp("runs")
    make_shard(folder / "validation" / "a.safetensors", num_items=7, channels=1, size=8, num_classes=10)
    run_train(folder, "one_tread", *TREAD, f"evaluation.validation={folder / 'validation'}")
    run_train(folder, "one_dense", *DENSE)
    run_train(folder, "one_sprint", *SPRINT)
    run_train(folder, "one_muon", *MUON)
    run_train(folder, "one_levels", *LEVELS)
    keys = keys_of_repa(SMALL, folder)
    run_train(folder, "one_aligned", *BATCH, *keys)
    (folder / "repa.json").write_text(json.dumps(keys))
    shutil.copytree(folder / "one_tread", folder / "cut")  # as if the run had been killed soon after step 2
    shutil.rmtree(folder / "cut" / "checkpoints" / "step_0000004")
    shutil.rmtree(folder / "cut" / "samples")
    for outcome in launch(folder, ["tests/ddp_runs.py", str(folder)], 2, limit_sec=600, small=False):
        outcome.expect_code(0)
    return folder


def checkpoint(run, step):
    return store.load(run / "checkpoints" / store.folder_name(step))


def state(run, step):
    return store.read_state(run / "checkpoints" / store.folder_name(step))


def norms(run):
    return {record["step"]: record["grad_norm"] for record in metrics(run) if "grad_norm" in record}


def assert_same_checkpoint(first, second, step):
    """Assert equality up to rounding. Adam first divides by small numbers, so errors grow to about 1e-5 of the largest weight."""
    a, b = checkpoint(first, step), checkpoint(second, step)
    assert a.keys() == b.keys()
    for x, y in ((a[file], b[file]) for file in a.keys() - {"optimizer"}):
        assert list(x) == list(y)
        assert all(torch.allclose(x[name], y[name], rtol=1e-4, atol=5e-5) for name in x)
    assert list(a["optimizer"]["state"]) == list(b["optimizer"]["state"])
    for x, y in zip(a["optimizer"]["state"].values(), b["optimizer"]["state"].values()):
        assert list(x) == list(y) and {type(value) for value in y.values()} == {torch.Tensor}
        assert all(torch.allclose(x[key], y[key], rtol=1e-3, atol=1e-6) for key in x)
    assert state(first, step) == state(second, step)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("one_tread", "tread"),
        ("one_tread", "cut"),  # resumes a checkpoint of a single process
        ("one_dense", "dense"),
        ("one_sprint", "sprint"),
        ("one_aligned", "aligned"),
    ],
)
def test_two_processes_give_the_same_losses_weights_and_averages_as_one(runs, one, two):
    assert list(losses(runs / one)) == [1, 2, 3, 4]
    assert losses(runs / two) == pytest.approx(losses(runs / one), rel=1e-5)
    assert list(norms(runs / one)) == [1, 2, 3, 4]
    assert norms(runs / two) == pytest.approx(norms(runs / one), rel=1e-5)
    assert_same_checkpoint(runs / one, runs / two, 4)
    if two in ("tread", "cut", "sprint"):
        grids = [Image.open(runs / name / "samples" / "step_0000004.png") for name in (one, two)]
        assert max(high for _, high in ImageChops.difference(*grids).getextrema()) <= 1


def test_muon_on_two_processes_equals_muon_on_one_up_to_the_rounding_of_its_bfloat16_products(runs):
    assert losses(runs / "muon") == pytest.approx(losses(runs / "one_muon"), rel=1e-3)
    a, b, earlier = checkpoint(runs / "one_muon", 4), checkpoint(runs / "muon", 4), checkpoint(runs / "one_muon", 2)
    assert list(a["optimizer"]["state"]) == list(b["optimizer"]["state"])
    assert state(runs / "one_muon", 4) == state(runs / "muon", 4)
    # Each of Muon's five iterations multiplies the rounding of small singular values by 3.4, so that bfloat16's 0.4% can become
    # several percent of an update.
    for name, value in a["model"].items():
        assert (value - b["model"][name]).norm() <= 0.2 * (value - earlier["model"][name]).norm() + 1e-6, name


def test_losses_by_noise_level_equal_those_of_one_process(runs):
    for key, read in (("by_level", evaluated), ("loss_by_level", metrics)):
        expected, found = ([line[key] for line in read(runs / run) if key in line][-1] for run in ("one_tread", "tread"))
        # None means that no sample had such a noise level. The 7 validation items have no sample at three levels.
        assert [x is None for x in found] == [x is None for x in expected] and None in expected
        assert [x for x in found if x] == pytest.approx([x for x in expected if x], rel=1e-4)


def test_losses_by_noise_level_stay_correct_if_another_number_of_processes_resumes(runs, tmp_path):
    run = shutil.copytree(runs / "levels", tmp_path / "levels")
    shutil.rmtree(run / "checkpoints" / "step_0000004")  # step 2 lies within the interval of the only training line
    state = json.loads((run / "checkpoints" / "step_0000002" / "state.json").read_text())
    assert sum(state["bin_sums"][1]) == 2 * 8
    run_train(tmp_path, "levels", *LEVELS)
    ((expected,), (found,)) = (metrics(folder) for folder in (runs / "one_levels", run))
    assert [x is None for x in found["loss_by_level"]] == [x is None for x in expected["loss_by_level"]]
    pairs = [(x, y) for x, y in zip(found["loss_by_level"], expected["loss_by_level"]) if x is not None]
    assert len(pairs) > 5 and all(x == pytest.approx(y, rel=1e-4) for x, y in pairs)


def test_evaluations_equal_those_of_one_process(runs):
    one, two = ([r for r in evaluated(runs / name) if "fd_digits" in r["metrics"]] for name in ("one_tread", "tread"))
    assert len(one) == len(two) == 2
    for ours, theirs in zip(one, two):
        assert theirs["metrics"] == pytest.approx(ours["metrics"], rel=1e-3) and theirs["settings"] == ours["settings"]


def test_ema_snapshots_equal_those_of_one_process(runs):
    for step in (2, 4):
        one, two = (load_file(dict(list_snapshots(runs / name))[step]) for name in ("one_tread", "tread"))
        assert list(one) == list(two) and len(one) > 2
        assert all(torch.allclose(one[name], two[name], atol=1e-3) for name in one)  # float16


def test_compiled_and_checkpointed_blocks_give_the_same_losses(runs):
    expected = losses(runs / "one_dense")
    assert losses(runs / "compiled") == pytest.approx({step: expected[step] for step in (1, 2)}, rel=1e-5)


def test_both_processes_end_if_the_main_process_cannot_write_a_checkpoint(runs):
    records = [json.loads((runs / f"records_{rank}.json").read_text()) for rank in (0, 1)]
    assert [record["unwritten"] for record in records] == ["no room for step 1"] * 2


def test_only_the_group_for_long_waits_has_a_long_timeout(runs):
    # The process groups of accelerate and runtime/processes.py, in this order.
    records = json.loads((runs / "records_0.json").read_text())
    assert records["timeouts_sec"] == [20 * 60, 2 * 60 * 60]
    assert records["new_groups_sec"] == [2 * 60 * 60]  # the stop signal waits in this group, with a timeout of its own


def test_a_number_of_processes_that_does_not_fit_is_refused():
    train = checked(["train.grad_accum_steps=2"]).train
    with pytest.raises(UserError, match="train.batch_size=64 .*3 processes x train.grad_accum_steps=2 = 6"):
        check_batch_divides(train, 3)
