"""train.parallel=fsdp: the run of one process, with every process holding its part; checkpoints are whole."""

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import LAUNCH_2, LAUNCH_4, composed, finish, metrics, run_train, start
from fsdp_runs import BATCH, DENSE, LIGHTNING, TREAD, copy_until_step_10
from PIL import Image, ImageChops

from configs import schema
from training import build
from training import checkpoint as checkpoints
from training.load import load_config, load_network
from training.trainer import Trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder with the runs: `one` and `one_dense` of one process, and those of tests/fsdp_runs.py."""
    folder = tmp_path_factory.mktemp("runs")
    run_train(folder, "one", *BATCH, *TREAD)
    run_train(folder, "one_dense", *BATCH, *DENSE)
    run_train(folder, "one_lightning", *BATCH, *LIGHTNING)
    copy_until_step_10(folder / "one", folder / "cut")
    script = folder / "script.py"
    script.write_text(
        "import sys; sys.path[:0] = ['.', 'tests']\n"
        f"from pathlib import Path; import fsdp_runs; fsdp_runs.main(Path({str(folder)!r}))"
    )
    code, output = finish(start(str(script), launcher=LAUNCH_2), timeout_sec=900)
    assert code == 0, output
    copy_until_step_10(folder / "tread", folder / "node_after_all")
    return folder


@pytest.fixture(scope="module")
def node_runs(runs):
    """The same folder, with the runs of four processes."""
    code, output = finish(start(str(runs / "script.py"), launcher=LAUNCH_4), timeout_sec=900)
    assert code == 0, output
    return runs


def checkpoint(run, step):
    return checkpoints.load(run / "checkpoints" / checkpoints.folder_name(step))


def losses(run):
    """Without the lines of evaluations."""
    return {record["step"]: record["loss"] for record in metrics(run) if "loss" in record}


def norms(run):
    return {record["step"]: record["grad_norm"] for record in metrics(run) if "grad_norm" in record}


def assert_same_checkpoint(first, second, step):
    """Adam divides by small numbers at first: rounding grows to about 1e-5 of the largest weight."""
    a, b = checkpoint(first, step), checkpoint(second, step)
    for x, y in ((a.model, b.model), (a.ema, b.ema)):
        assert list(x) == list(y)
        assert all(torch.allclose(x[name], y[name], rtol=1e-4, atol=5e-5) for name in x)
    assert a.optimizer["param_groups"] == b.optimizer["param_groups"]
    assert list(a.optimizer["state"]) == list(b.optimizer["state"])
    for x, y in zip(a.optimizer["state"].values(), b.optimizer["state"].values()):
        assert list(x) == list(y) and {type(value) for value in y.values()} == {torch.Tensor}
        assert all(torch.allclose(x[key], y[key], rtol=1e-3, atol=1e-6) for key in x)
    assert a.state == b.state


@pytest.mark.parametrize(("one", "sharded"), [("one", "tread"), ("one_dense", "dense")])
def test_sharded_processes_give_the_losses_weights_and_average_of_one_process(runs, one, sharded):
    assert list(losses(runs / one)) == list(range(1, 21))
    assert losses(runs / sharded) == pytest.approx(losses(runs / one), rel=1e-5)
    assert len(norms(runs / one)) == (20 if one == "one_dense" else 0)
    assert norms(runs / sharded) == pytest.approx(norms(runs / one), rel=1e-5)
    assert_same_checkpoint(runs / one, runs / sharded, 20)


def test_the_rotary_tables_of_a_sharded_network_are_whole_in_its_average_too(runs):
    assert losses(runs / "lightning") == pytest.approx(losses(runs / "one_lightning"), rel=1e-5)
    assert_same_checkpoint(runs / "one_lightning", runs / "lightning", 5)
    grids = [Image.open(runs / name / "samples" / "step_0000005.png") for name in ("one_lightning", "lightning")]
    assert max(high for _, high in ImageChops.difference(*grids).getextrema()) <= 1


def test_grids_and_evaluations_are_those_of_one_process(runs):
    grids = [Image.open(runs / name / "samples" / "step_0000020.png") for name in ("one", "tread")]
    assert max(high for _, high in ImageChops.difference(*grids).getextrema()) <= 1
    one, sharded = (metrics(runs / name)[-1] for name in ("one", "tread"))
    assert {key for key in sharded if key.startswith("fd_digits5/")} == {"fd_digits5/cfg1.0", "fd_digits5/cfg1.5"}
    for key in sharded.keys() - {"evaluation_sec"}:
        assert sharded[key] == pytest.approx(one[key], rel=1e-3), key


def test_a_run_of_one_process_goes_on_sharded(runs):
    assert losses(runs / "cut") == pytest.approx(losses(runs / "one"), rel=1e-5)
    assert_same_checkpoint(runs / "one", runs / "cut", 20)
    assert (runs / "cut" / "samples" / "step_0000020.png").exists()


def test_a_sharded_run_goes_on_in_one_process_and_is_sampled_from_as_any_other(runs):
    copy_until_step_10(runs / "tread", runs / "back")
    run_train(runs, "back", *BATCH, *TREAD)
    assert losses(runs / "back") == pytest.approx(losses(runs / "one"), rel=1e-5)
    assert_same_checkpoint(runs / "one", runs / "back", 20)
    folder = runs / "tread" / "checkpoints" / "step_0000020"
    checkpoints.verify(folder)
    net = load_network(folder, load_config(folder), "ema", torch.device("cpu"))
    average = checkpoint(runs / "one", 20).ema
    assert all(torch.allclose(p, average[name], atol=5e-5) for name, p in net.named_parameters())


def test_a_sharded_run_starts_from_another_with_and_without_its_optimiser(runs):
    expected = losses(runs / "one")
    assert losses(runs / "branch") == pytest.approx({step: expected[step] for step in (11, 12)}, rel=1e-5)
    before, after = checkpoint(runs / "one", 10), checkpoint(runs / "tuned", 1)
    assert all(torch.allclose(before.model[name], after.model[name], atol=1e-7) for name in before.model)
    # The average goes on with the decay of its age, (1 + 10) / (10 + 10).
    for name, value in after.ema.items():
        assert torch.allclose(value, before.ema[name].lerp(after.model[name], 9 / 20), atol=1e-6), name


def test_compiled_and_checkpointed_blocks_give_the_same_losses(runs):
    expected = losses(runs / "one_dense")
    assert losses(runs / "compiled") == pytest.approx({step: expected[step] for step in (1, 2)}, rel=1e-5)


def test_bf16_gathers_rounded_blocks_and_gives_the_numbers_of_ddp(runs):
    assert losses(runs / "bf16_fsdp") == pytest.approx(losses(runs / "bf16_ddp"), rel=1e-5)
    assert_same_checkpoint(runs / "bf16_ddp", runs / "bf16_fsdp", 3)
    assert {value.dtype for value in checkpoint(runs / "bf16_fsdp", 3).model.values()} == {torch.float32}


def test_each_of_two_processes_holds_half(runs):
    records = [json.loads((runs / f"records_{rank}.json").read_text()) for rank in (0, 1)]
    for record in records:
        assert record["fsdp"] == pytest.approx(record["ddp"] / 2, rel=0.01)
    assert sum(record["fsdp"] for record in records) >= records[0]["ddp"]  # nothing is missing


def test_weights_that_are_gathered_twice_give_the_same_losses(runs):
    expected = losses(runs / "one_dense")
    assert losses(runs / "resharded") == pytest.approx({step: expected[step] for step in (1, 2)}, rel=1e-5)


def test_gradients_as_views_of_larger_buckets_give_the_numbers_of_ddps_defaults_bit_for_bit(runs):
    """With accumulation over two micro-batches, and with clipping."""
    record = json.loads((runs / "records_0.json").read_text())
    assert all(record["views"]) and not any(record["copies"])
    assert losses(runs / "views") == losses(runs / "copies") and norms(runs / "views") == norms(runs / "copies")
    a, b = checkpoint(runs / "views", 3), checkpoint(runs / "copies", 3)
    assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_bf16_gradients_differ_from_fp32_ones_by_their_rounding(runs, parallel):
    """In the step that starts from the same weights, Adam's first moment is a tenth of the gradient; bfloat16 keeps 8 bits."""
    a, b = (checkpoint(runs / name, 1).optimizer["state"] for name in ("fp32_gradients", f"bf16_gradients_{parallel}"))
    for x, y in zip((one["exp_avg"] for one in a.values()), (other["exp_avg"] for other in b.values())):
        assert (x - y).norm() <= 2**-7 * x.norm()
    assert not all(torch.equal(a[i]["exp_avg"], b[i]["exp_avg"]) for i in a)


def test_two_nodes_that_shard_within_give_the_losses_and_weights_of_one_process(node_runs):
    runs = node_runs
    assert losses(runs / "node") == pytest.approx(losses(runs / "one"), rel=1e-5)
    assert_same_checkpoint(runs / "one", runs / "node", 20)
    expected = {step: norms(runs / "one_dense")[step] for step in range(1, 6)}  # clipped, over both dimensions of the mesh
    assert norms(runs / "node_dense") == pytest.approx(expected, rel=1e-5)


def test_each_process_of_a_node_holds_its_share_of_the_node(node_runs):
    two, four = (json.loads((node_runs / f"records_{n}.json").read_text()) for n in ("0", "node_0"))
    assert four["node"] == pytest.approx(two["ddp"] / 2, rel=0.01)


@pytest.mark.parametrize("run", ["node_after_all", "all_after_node", "ddp_after_node"])
def test_a_run_goes_on_under_another_way_of_sharding(node_runs, run):
    assert losses(node_runs / run) == pytest.approx(losses(node_runs / "one"), rel=1e-5)
    assert_same_checkpoint(node_runs / "one", node_runs / run, 20)


@pytest.mark.parametrize(("name", "last_good"), [("weights", 1), ("loss", 1)])
def test_values_that_are_not_finite_on_one_process_stop_all_with_the_last_good_checkpoint(runs, name, last_good):
    for rank in (0, 1):
        record = json.loads((runs / f"records_{rank}.json").read_text())[name]
        assert "not finite since step 2" in record and f"step_{last_good:07d}" in record
    assert list(checkpoints.list_steps(runs / f"spoiled_{name}" / "checkpoints")) == [last_good]


@pytest.mark.parametrize(("every", "step"), [(1, 1), (100, 3)])
def test_a_checkpoint_that_the_main_process_cannot_write_ends_all(runs, every, step):
    main, other = (json.loads((runs / f"records_{rank}.json").read_text())[f"unwritten_{every}"] for rank in (0, 1))
    assert (main, other) == (f"no room for step {step}", "the main process could not write the checkpoint")


# ----------------------------------------------------------------------------------------------------------------------
# What is refused, before any work.


def test_one_process_has_nothing_to_shard(train, tmp_path):
    message = "train.parallel=fsdp .*there is one process; start more .*--num_processes 2.* or set train.parallel=ddp"
    with pytest.raises(ValueError, match=message):
        train("run", "train.parallel=fsdp")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"train.parallel='zero' is not accepted; use ddp \| fsdp"):
        train("run", "train.parallel=zero")


def train_settings(overrides=()):
    return schema.check(composed(overrides), schema.TrainConfig).train


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_a_network_compiled_as_a_whole_is_refused(mode):
    train = train_settings(["train.parallel=fsdp", f"train.compile={mode}"])
    with pytest.raises(ValueError, match=rf"train.compile={mode} is not accepted with train.parallel=fsdp.*use none \| blocks"):
        build.check_parallel(train, 2, "MULTI_GPU")


def test_nodes_are_for_fsdp_with_several_processes_on_each(monkeypatch):
    node = ["train.fsdp_shard=node"]
    with pytest.raises(ValueError, match=r"train.fsdp_shard=node .* train.parallel=ddp; add train.parallel=fsdp"):
        build.check_parallel(train_settings(node), 4, "MULTI_GPU")
    for per_node, num_processes in ((1, 4), (4, 6)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
        with pytest.raises(ValueError, match=f"{num_processes} processes in all and {per_node} on .*use train.fsdp_shard=all"):
            build.check_parallel(train_settings([*node, "train.parallel=fsdp"]), num_processes, "MULTI_GPU")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    build.check_parallel(train_settings([*node, "train.parallel=fsdp"]), 4, "MULTI_GPU")


def test_an_old_torch_is_named(monkeypatch):
    train = train_settings(["train.parallel=fsdp"])
    build.check_parallel(train, 2, "MULTI_GPU")
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.6.0"))
    with pytest.raises(ValueError, match="train.parallel=fsdp needs torch 2.11 or newer.*this is torch 2.6.0"):
        build.check_parallel(train, 2, "MULTI_GPU")
    build.check_parallel(train_settings(), 2, "MULTI_GPU")


def test_the_launchers_own_sharding_is_refused():
    with pytest.raises(ValueError, match="launched with FSDP.*set train.parallel=fsdp"):
        build.check_parallel(train_settings(), 2, "FSDP")


def test_out_of_memory_proposes_it_where_it_would_help():
    def message(num_processes, parallel):
        cfg = composed([f"train.parallel={parallel}"])
        accelerator, net = SimpleNamespace(num_processes=num_processes), SimpleNamespace(num_tokens=16)
        trainer = SimpleNamespace(cfg=cfg, accelerator=accelerator, net=net, step=0, is_sharded=parallel == "fsdp")
        return Trainer._out_of_memory(trainer)

    assert message(2, "ddp").endswith(", train.parallel=fsdp")
    assert "fsdp" not in message(1, "ddp") and "fsdp" not in message(2, "fsdp")
