"""Compiled and checkpointed networks against the plain one: the same values and gradients, and no compilation twice."""

import copy

import pytest
import torch

import dit
from routing_module import Route
from training.engine import checkpoint_activations, compile_network


@pytest.fixture
def net():
    torch.manual_seed(0)
    settings = dict(input_size=8, patch_size=2, in_channels=3, num_classes=5, depth=6, width=32, num_heads=2)
    net = dit.DiT(**settings, routes=[Route(0.5, 1, 3)], init="official_tread")
    return net.train()


def outputs_and_gradients(net, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, t, y = torch.randn(2, 3, 8, 8, generator=g), torch.randn(2, generator=g), torch.arange(2)
    drop, scores = torch.tensor([True, False]), torch.rand(2, 1, 16, generator=g)
    out = net(x, t, y, drop_labels=drop, route_scores=scores)
    return [out, *torch.autograd.grad(out.square().sum(), [p for p in net.parameters() if p.requires_grad])]


@pytest.mark.parametrize("what", ["blocks", "selective"])
def test_checkpointing_changes_no_bit_and_computes_blocks_again(net, what):
    plain = outputs_and_gradients(net)
    names, calls = list(net.state_dict()), []
    for block in net.blocks:
        block.mlp.act.register_forward_hook(lambda *args: calls.append(1))
    checkpoint_activations(net, what)
    assert all(torch.equal(a, b) for a, b in zip(outputs_and_gradients(net), plain))
    assert len(calls) == 2 * len(net.blocks)
    assert list(net.state_dict()) == names


def test_without_checkpointing_nothing_is_computed_twice(net):
    calls = []
    net.blocks[0].mlp.act.register_forward_hook(lambda *args: calls.append(1))
    checkpoint_activations(net, "none")
    outputs_and_gradients(net)
    assert calls == [1]


@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_compiled_blocks_agree_with_plain_ones_and_are_compiled_once(net, checkpointing):
    plain = [outputs_and_gradients(net, seed) for seed in range(3)]
    fast = copy.deepcopy(net)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_network(fast, "blocks")
    checkpoint_activations(fast, checkpointing)
    compiled = [outputs_and_gradients(fast, 0)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled += [outputs_and_gradients(fast, seed) for seed in (1, 2)]
    for got, expected in zip(compiled, plain):
        for a, b in zip(got, expected):
            assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7
    # Dense, dense without a gradient for its input, and routed: not once for every block.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    assert list(fast.state_dict()) == list(net.state_dict())
