"""The optimizers that `train.optimizer` names: which parameters they get, and their state in checkpoints."""

import shutil

import pytest
import torch
from conftest import TINY, checked, losses, metrics, run_train, weights
from definition import small

from checkpoints import store
from checkpoints.checkpoint import read_checkpoint
from common.errors import UserError
from configs.differences import differences_by_role
from training.optimizers import OPTIMIZERS
from training.start import check_initial

ARGUMENTS = ["checkpoint.every=3", "train.warmup_steps=2", "train.schedule=cosine", "train.grad_clip_norm=0.5"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Fixture: a folder with a run of 6 steps for each optimizer."""
    folder = tmp_path_factory.mktemp("runs")
    for name in OPTIMIZERS:
        run_train(folder, name, f"train.optimizer={name}", *ARGUMENTS)
    return folder


def cut_at_3(runs, folder, name):
    """Copy a run into `folder` as if it had been killed after step 3. Return the copy and its checkpoint."""
    run = shutil.copytree(runs / name, folder / name)
    shutil.rmtree(run / "checkpoints" / store.folder_name(6))
    return run, run / "checkpoints" / store.folder_name(3)


def state_at(run, step):
    states = torch.load(run / "checkpoints" / store.folder_name(step) / "optimizer.pt")["state"]
    return {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}


def assert_same_end(one, two):
    assert losses(one) == losses(two) and list(losses(one)) == [1, 2, 3, 4, 5, 6]
    for values in ([weights(run, 6) for run in (one, two)], [state_at(run, 6) for run in (one, two)]):
        assert values[0].keys() == values[1].keys()
        assert all(torch.equal(values[0][name], value) for name, value in values[1].items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_parameter_belongs_to_one_optimizer(name):
    parameters = dict(small().named_parameters())
    chosen = ["train.lr=0.5", "train.weight_decay=0.25", "train.betas=[0.7,0.8]"]
    optimizers = OPTIMIZERS[name](checked([*TINY, *chosen]).train, parameters)
    given = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(given) == len(parameters) and set(given) == set(parameters.values())
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert {group["lr"] for group in groups} == {0.5}
    assert {group["weight_decay"] for group in groups if "weight_decay" in group} <= {0.25}
    assert {tuple(group["betas"]) for group in groups if "betas" in group} <= {(0.7, 0.8)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_equals_an_uninterrupted_one_exactly(runs, tmp_path, name):
    run, _ = cut_at_3(runs, tmp_path, name)
    run_train(tmp_path, name, f"train.optimizer={name}", *ARGUMENTS)
    assert_same_end(run, runs / name)
    assert [line["lr"] for line in metrics(run)][:2] == [1e-3, 2e-3] and losses(run)[6] != losses(run)[1]


def test_the_state_is_stored_by_parameter_name(runs):
    state = torch.load(runs / "adamw" / "checkpoints" / store.folder_name(6) / "optimizer.pt")["state"]
    shapes = {name: value.shape for name, value in weights(runs / "adamw", 6).items() if name != "pos_embed"}
    assert {name: values["exp_avg"].shape for name, values in state.items()} == shapes


def test_a_resume_or_a_start_with_the_state_of_another_optimizer_is_refused(runs):
    checkpoint = read_checkpoint(runs / "adamw" / "checkpoints" / store.folder_name(3))
    stored = checkpoint.config.model_copy(update={"init_state": "all"})
    other = stored.model_copy(update={"train": stored.train.model_copy(update={"optimizer": "sgd"})})
    assert differences_by_role("resume", "refuses", stored, other) == [("train.optimizer", "adamw", "sgd")]
    with pytest.raises(UserError, match="does not fit this configuration: train.optimizer: 'adamw' -> 'sgd'"):
        check_initial(checkpoint, other)
    check_initial(checkpoint, stored)


def test_muon_trains_the_matrices_of_attention_and_mlp_with_updates_of_the_size_of_adamws(runs):
    states = torch.load(runs / "muon" / "checkpoints" / store.folder_name(6) / "optimizer.pt")["state"]
    for name, value in weights(runs / "muon", 6).items():
        if name != "pos_embed":
            is_matrix = value.ndim == 2 and {"attn", "mlp"} & {*name.split(".")} != set() and name.startswith("blocks.")
            assert ("momentum_buffer" in states[name], "exp_avg" in states[name]) == (is_matrix, not is_matrix), name
    parameter = torch.nn.Parameter(torch.zeros(48, 16))
    train = checked([*TINY, "train.lr=1e-2"]).train
    optimizer, _ = OPTIMIZERS["muon"](train, {"blocks.0.attn.qkv.weight": parameter, "x": torch.nn.Parameter(torch.zeros(1))})
    parameter.grad = torch.randn(48, 16, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert parameter.square().mean().sqrt().item() == pytest.approx(0.2 * 1e-2, rel=0.3)  # AdamW's usual size is 0.2 to 0.4 lr


def test_a_new_optimizer_needs_one_line_in_the_table(tmp_path, monkeypatch):
    """Register SGD with momentum for biases and SGD without a state for the rest, and resume a run."""

    def sgd(train, parameters):
        biases = [p for name, p in parameters.items() if name.endswith("bias")]
        others = [p for name, p in parameters.items() if not name.endswith("bias")]
        return [torch.optim.SGD(biases, train.lr, momentum=0.9), torch.optim.SGD(others, train.lr)]

    monkeypatch.setitem(OPTIMIZERS, "adamw", sgd)
    run_train(tmp_path, "whole", *ARGUMENTS)
    run, _ = cut_at_3(tmp_path, tmp_path / "cut", "whole")
    run_train(tmp_path / "cut", "whole", *ARGUMENTS)
    assert_same_end(run, tmp_path / "whole")
    assert {name.rpartition(".")[2] for name in state_at(run, 6)} == {"momentum_buffer"}
