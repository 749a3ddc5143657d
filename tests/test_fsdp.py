"""train.parallel=fsdp: every process holds a shard, the numbers are those of one process, and checkpoints hold full tensors."""

import json

import pytest
import torch
from conftest import checked, losses, make_shard, metrics, run_train
from forked import launch
from fsdp_runs import BATCH, DENSE, LIGHTNING, TREAD, copy_until_step_2, half_of_the_blocks
from gpu.runs import SMALL, keys_of_repa
from PIL import Image, ImageChops
from safetensors.torch import load_file

from checkpoints import store
from checkpoints.load import load_network
from common.errors import UserError
from extras.posthoc_ema import list_snapshots
from training.sharding import check_processes


@pytest.fixture(scope="module", autouse=True)
def shallow():
    with half_of_the_blocks():
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder with the runs: those of one process, and those of tests/fsdp_runs.py."""
    folder = tmp_path_factory.mktemp("runs")
    make_shard(folder / "validation" / "a.safetensors", num_items=7, channels=1, size=8, num_classes=10)
    run_train(folder, "one", *BATCH, *TREAD, f"eval.validation={folder / 'validation'}")
    run_train(folder, "one_dense", *BATCH, *DENSE)
    run_train(folder, "one_lightning", *BATCH, *LIGHTNING)
    keys = keys_of_repa(SMALL, folder)
    run_train(folder, "one_aligned", *BATCH, *keys)
    (folder / "repa.json").write_text(json.dumps(keys))
    copy_until_step_2(folder / "one", folder / "cut")
    for num_processes in (2, 4):
        for outcome in launch(folder, ["tests/fsdp_runs.py", str(folder)], num_processes, limit_sec=900, small=False):
            outcome.expect_code(0)
    return folder


def checkpoint(run, step):
    return store.load(run / "checkpoints" / store.folder_name(step))


def norms(run):
    return {record["step"]: record["grad_norm"] for record in metrics(run) if "grad_norm" in record}


def assert_same_checkpoint(first, second, step):
    """Adam divides by small numbers at first: rounding grows to about 1e-5 of the largest weight."""
    a, b = checkpoint(first, step), checkpoint(second, step)
    for x, y in ((a.model, b.model), (a.ema, b.ema), (a.tracked_ema or {}, b.tracked_ema or {})):
        assert list(x) == list(y)
        assert all(torch.allclose(x[name], y[name], rtol=1e-4, atol=5e-5) for name in x)
    assert a.optimizer["param_groups"] == b.optimizer["param_groups"]
    assert list(a.optimizer["state"]) == list(b.optimizer["state"])
    for x, y in zip(a.optimizer["state"].values(), b.optimizer["state"].values()):
        assert list(x) == list(y) and {type(value) for value in y.values()} == {torch.Tensor}
        assert all(torch.allclose(x[key], y[key], rtol=1e-3, atol=1e-6) for key in x)
    assert a.state == b.state


@pytest.mark.parametrize(
    ("one", "sharded"),
    [
        ("one", "tread"),
        ("one_dense", "dense"),
        ("one_lightning", "lightning"),
        ("one", "cut"),  # resumes a checkpoint of one process
        ("one", "node"),  # two nodes; each shards within itself
        ("one", "ddp_after_tread"),  # resumes a checkpoint of sharded processes
        ("one_dense", "ddp"),
        ("one_aligned", "aligned"),
    ],
)
def test_sharded_processes_give_the_losses_weights_and_average_of_one_process(runs, one, sharded):
    assert list(losses(runs / one)) == [1, 2, 3, 4]
    assert losses(runs / sharded) == pytest.approx(losses(runs / one), rel=1e-5)
    assert norms(runs / sharded) == pytest.approx(norms(runs / one), rel=1e-5)
    assert_same_checkpoint(runs / one, runs / sharded, 4)
    if one not in ("one_dense", "one_aligned") and sharded != "cut":
        grids = [Image.open(runs / name / "samples" / "step_0000004.png") for name in (one, sharded)]
        assert max(high for _, high in ImageChops.difference(*grids).getextrema()) <= 1


def test_gradients_are_clipped_by_their_norm_over_all_nodes(runs):
    assert norms(runs / "node_dense") == pytest.approx(norms(runs / "one_dense"), rel=1e-5)


@pytest.mark.parametrize("name", ["tread", "ddp_after_tread"])
def test_losses_by_level_are_those_of_one_process(runs, name):
    for key in ("validation_loss_by_level", "loss_by_level"):
        expected, found = ([line[key] for line in metrics(runs / run) if key in line][-1] for run in ("one", name))
        # None: no sample had such a noise level. The 7 items of the validation leave three levels out.
        assert [x is None for x in found] == [x is None for x in expected] and None in expected
        assert [x for x in found if x] == pytest.approx([x for x in expected if x], rel=1e-4)


def test_evaluations_are_those_of_one_process(runs):
    names = ("one", "tread", "node", "ddp_after_tread")
    one, *others = ([r for r in metrics(runs / name) if "fd_digits" in r.get("metrics", ())] for name in names)
    for other in others:
        assert len(one) == len(other) == 2
        for ours, theirs in zip(one, other):
            assert theirs["metrics"] == pytest.approx(ours["metrics"], rel=1e-3) and theirs["cfg_scale"] == ours["cfg_scale"]


def test_a_network_is_loaded_from_the_checkpoint_of_a_sharded_run_as_from_any_other(runs):
    folder = runs / "tread" / "checkpoints" / "step_0000004"
    store.verify(folder)
    net = load_network(folder, "ema", torch.device("cpu"))
    average = checkpoint(runs / "one", 4).ema
    assert all(torch.allclose(p, average[name], atol=5e-5) for name, p in net.named_parameters())


def test_snapshots_of_a_sharded_run_are_those_of_one_process(runs):
    for step in (2, 4):
        one, sharded = (load_file(list_snapshots(runs / name)[step]) for name in ("one", "tread"))
        assert list(one) == list(sharded) and len(one) > 2
        assert all(torch.allclose(one[name], sharded[name], atol=1e-3) for name in one)  # float16


def test_a_sharded_run_starts_from_another_with_its_optimizer(runs):
    expected = losses(runs / "one")
    assert losses(runs / "branch") == pytest.approx({step: expected[step] for step in (3, 4)}, rel=1e-5)


def test_compiled_and_checkpointed_blocks_give_the_same_losses(runs):
    expected = losses(runs / "one_dense")
    assert losses(runs / "compiled") == pytest.approx({step: expected[step] for step in (1, 2)}, rel=1e-5)


def test_bf16_gathers_rounded_blocks_and_gives_the_numbers_of_ddp(runs):
    assert losses(runs / "bf16_fsdp") == pytest.approx(losses(runs / "bf16_ddp"), rel=1e-5)
    assert_same_checkpoint(runs / "bf16_ddp", runs / "bf16_fsdp", 3)
    assert {value.dtype for value in checkpoint(runs / "bf16_fsdp", 3).model.values()} == {torch.float32}


def test_each_process_of_a_node_holds_its_share(runs):
    two = [json.loads((runs / f"records_two_{rank}.json").read_text()) for rank in (0, 1)]
    node = json.loads((runs / "records_four_0.json").read_text())["node"]
    for record in two:
        assert record["fsdp"] == pytest.approx(record["ddp"] / 2, rel=0.01)
    assert sum(record["fsdp"] for record in two) >= two[0]["ddp"]  # nothing is missing
    assert node == pytest.approx(two[0]["ddp"] / 2, rel=0.01)


def test_only_the_group_for_long_waits_has_a_long_timeout(runs):
    timeouts = json.loads((runs / "records_four_0.json").read_text())["timeouts"]
    # Two groups of the mesh with gloo's default, the default group, and the one of runtime/processes.py.
    assert timeouts == [[2, 30 * 60], [2, 30 * 60], [4, 20 * 60], [4, 30 * 60], [4, 2 * 60 * 60]]


def test_what_goes_wrong_on_one_process_stops_all(runs):
    main, other = (json.loads((runs / f"records_two_{rank}.json").read_text()) for rank in (0, 1))
    assert "not finite after step 2" in main["spoiled"] and "not finite after step 2" in other["spoiled"]
    assert list(store.list_steps(runs / "spoiled" / "checkpoints")) == [1]
    assert main["unwritten"] == other["unwritten"] == "no room for step 1"


def test_processes_that_do_not_fit_are_refused(monkeypatch):
    def check(overrides, num_processes, launched_as="MULTI_GPU"):
        check_processes(checked(overrides).train, num_processes, launched_as)

    for overrides, num_processes, per_node, words in (
        (["train.parallel=fsdp"], 1, 1, "train.parallel=fsdp needs several"),
        (["train.parallel=fsdp", "train.batch_size=12"], 6, 4, "found 6, with 4 on this node"),
        (["train.grad_accum_steps=2"], 3, 3, "train.batch_size=64 .*3 processes x train.grad_accum_steps=2 = 6"),
    ):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
        with pytest.raises(UserError, match=words):
            check(overrides, num_processes)
    with pytest.raises(UserError, match="launched with FSDP"):
        check([], 2, "FSDP")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check(["train.parallel=fsdp"], 4)
