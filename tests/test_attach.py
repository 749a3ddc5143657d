"""Routing of networks that are not ours, against full-length blocks in which skipping tokens are barred and restored."""

import pytest
import torch
from networks import NETWORKS, blocks_of, cached_network, call, reference, run, windows_of, worst_difference

from routing_module import Route, attach

ONE = [Route(0.5, 1, 4)]  # crosses from one list of blocks to the next where there are two
TWO = [Route(0.25, 0, 2), Route(0.5, 3, 4)]


# Padded text only where the network takes a mask or lengths of it.
TEXTS = [pytest.param(name, padded, id=name + " padded" * padded) for name in NETWORKS for padded in (False, True)]
TEXTS = [case for case in TEXTS if not case.values[1] or NETWORKS[case.values[0]].padded_text]


@pytest.mark.parametrize("routes", [ONE, TWO], ids=["one route", "two routes"])
@pytest.mark.parametrize("per_sample", [True, False], ids=["subset per sample", "shared subset"])
@pytest.mark.parametrize(("name", "padded"), TEXTS)
def test_a_routed_network_equals_full_length_blocks_with_skipping_tokens_barred_and_restored(name, per_sample, routes, padded):
    case, network = NETWORKS[name], cached_network(name)
    inputs = case.inputs(padded)
    _, dense_grads = run(network, inputs)

    attachment = attach(network, routes, per_sample=per_sample, generator=torch.Generator().manual_seed(5))
    output, grads = run(network, inputs)
    windows = windows_of(attachment, case.num_tokens)
    attachment.detach()

    assert attachment.ids_keep == ()  # nothing is held after detach
    for (_, _, skip), route in zip(windows, routes):
        assert (skip.sum(1) == int(case.num_tokens * route.selection_ratio)).all()
        assert (skip == skip[0]).all() == (not per_sample)
    with reference(network, case, windows, padded):
        expected, expected_grads = run(network, inputs)
    assert worst_difference(output, expected) < 1e-5
    assert grads.keys() == expected_grads.keys() == dense_grads.keys()
    worst = {name: worst_difference(grads[name], expected_grads[name]) for name in grads}
    assert max(worst.values()) < 1e-5, max(worst.items(), key=lambda item: item[1])


@pytest.mark.parametrize("name", NETWORKS)
def test_tokens_that_skip_are_bit_identical_after_the_route(name):
    case, network = NETWORKS[name], cached_network(name)
    seen = []
    hooks = []
    for block, _ in blocks_of(network, case)[1:5]:
        hooks.append(
            block.register_forward_pre_hook(
                lambda module, args, kwargs: seen.append(kwargs.get(case.argument, args[0] if args else None)),
                with_kwargs=True,
            )
        )
    attachment = attach(network, ONE)
    for block, output_index in blocks_of(network, case)[1:5]:
        hooks.append(
            block.register_forward_hook(
                lambda module, args, output, i=output_index: seen.append(output if i is None else output[i])
            )
        )
    call(network, case.inputs(False))
    (_, _, skip), *_ = windows_of(attachment, case.num_tokens)
    attachment.detach()
    for hook in hooks:
        hook.remove()
    for before, after in zip(seen[::2], seen[1::2]):
        image = slice(before.shape[1] - case.num_tokens, None) if case.text_first else slice(0, case.num_tokens)
        before, after = before[:, image], after[:, image]
        assert torch.equal(before[skip], after[skip])
        assert not (before[~skip] == after[~skip]).all(-1).any()


@pytest.mark.parametrize("name", NETWORKS)
def test_evaluation_and_passes_without_gradients_are_bit_identical_to_the_plain_network(name):
    case, network = NETWORKS[name], cached_network(name)
    inputs = case.inputs(case.padded_text)
    try:
        expected, expected_grads = run(network.eval(), inputs)
        attachment = attach(network, ONE)
        output, grads = run(network, inputs)
        assert torch.equal(output, expected)
        assert all(torch.equal(grads[key], expected_grads[key]) for key in expected_grads)
        network.train()
        with torch.no_grad():
            assert torch.equal(call(network, inputs), expected)
        assert attachment.statistics is None
        assert not torch.equal(call(network, inputs), expected)  # and with gradients it is routed
        attachment.detach()
        assert torch.equal(run(network, inputs)[0], expected)
    finally:
        network.train()
