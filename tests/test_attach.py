"""Compare routed networks of other libraries with full-length blocks that mask and restore the skipping tokens."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from networks import (
    GRID,
    NETWORKS,
    B,
    N,
    T,
    blocks_of,
    build,
    cached,
    call,
    difference,
    generator,
    normal,
    reference_error,
    run,
    skipped,
)

from extras.attach import Adapter, BlockList, TokenAxis, attach
from routing_module import SELECTIONS, GridRule, Route, importance_scores

ONE = [Route(0.5, 1, 3)]  # crosses from the first list of blocks to the second, if there are two
TWO = [Route(0.25, 0, 1), Route(0.5, 2, 2)]
VARIANTS = [(name, variant) for name in NETWORKS for variant in (False, True)[: 1 + NETWORKS[name].variant]]
TOLERANCE = 1e-5  # 4 float32 blocks differ by up to 4e-7; rotary positions of wrong tokens change them by 1e-4 or more


@pytest.mark.parametrize("routes", [ONE, TWO], ids=["one route", "two routes"])
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_a_routed_network_equals_full_length_blocks_with_skipping_tokens_masked_and_restored(name, variant, routes):
    case, network = NETWORKS[name], cached(name)
    inputs = case.inputs(variant)
    _, dense_grads = run(network, inputs)
    attachment = attach(network, routes)
    _, grads = run(network, inputs)
    for (_, _, skip), route in zip(skipped(attachment, case.num_tokens), routes):
        assert (skip.sum(1) == int(case.num_tokens * route.selection_ratio)).all() and not (skip == skip[0]).all()
    assert grads.keys() == dense_grads.keys()
    assert reference_error(network, case, inputs, attachment) < TOLERANCE


@pytest.mark.parametrize("name", ["Flux", "Flux2"])
def test_a_padding_mask_may_have_two_axes(name):
    case, network = NETWORKS[name], cached(name)
    padding = torch.arange(case.num_tokens + T) >= torch.arange(B)[:, None]  # one more token of text is padding in each sample
    outputs = []
    for mask in (padding, padding[:, None, None]):
        attachment = attach(network, ONE, generator=generator(3))
        outputs.append(call(network, case.inputs(False) | {"joint_attention_kwargs": {"attention_mask": mask}}))
        attachment.detach()
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", NETWORKS)
def test_evaluation_and_passes_without_gradients_are_bit_identical_to_the_plain_network(name):
    case, network = NETWORKS[name], cached(name)
    inputs = case.inputs(case.variant)
    expected = run(network.eval(), inputs)
    attachment = attach(network, ONE)
    assert difference(run(network, inputs), expected) == 0
    with torch.no_grad():
        assert torch.equal(call(network.train(), inputs), expected[0])
    assert attachment.ids_keep == (None,)
    assert not torch.equal(call(network, inputs), expected[0])  # with gradients, the pass is routed
    for module in network.modules():
        module.training = module is network.get_submodule(attachment.adapter.tokens_from)
    assert torch.equal(call(network, inputs), expected[0])  # frozen blocks in evaluation mode stay dense
    network.train()
    attachment.detach()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_layer_indices_count_across_all_lists_of_blocks():
    network = cached("Flux")  # 2 double and 2 single blocks
    attachment = attach(network, [Route(0.3, 0, 1), Route(0.7, -2, -1)])
    assert attachment.router.routes == (Route(0.3, 0, 1), Route(0.7, 2, 3))
    run(network, NETWORKS["Flux"].inputs(False))
    assert [ids.shape for ids in attachment.ids_keep] == [(B, N - 4), (B, N - 11)]
    attachment.detach()


def test_routes_networks_and_adapters_that_do_not_fit_are_refused():
    network = cached("PixArt")
    with pytest.raises(ValueError, match="end_layer_idx=4"):
        attach(network, [Route(0.5, 1, 4)])
    with pytest.raises(ValueError, match="does not know Linear.*adapter=.*dit.DiT.*ZImageTransformer2DModel"):
        attach(torch.nn.Linear(2, 2), ONE)
    with pytest.raises(ValueError, match="router.routes="):
        attach(build("DiT", routes=TWO), ONE)
    wrong = Adapter("pos_embed", (BlockList("transformer_blocks", "x"),))
    with pytest.raises(ValueError, match="BasicTransformerBlock has no argument {'x'}"):
        attach(network, ONE, adapter=wrong)
    with pytest.raises(ValueError, match=r"selection=grid needs the size of the token grid; use routing_module.GridRule\(rows"):
        attach(network, ONE, selection="grid")
    attachment = attach(network, ONE)
    with pytest.raises(ValueError, match="is routed already"):
        attach(network, ONE)
    attachment.detach()
    network, images = build("ZImage"), [normal(4, 1, 8, 8), normal(4, 1, 8, 4), normal(4, 1, 8, 8)]
    attach(network, ONE)
    with pytest.raises(ValueError, match="x holds images of shapes.*one size"):
        call(network, NETWORKS["ZImage"].inputs(False) | {"x": images})


def test_an_adapter_written_by_the_user_routes_their_own_network():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, states, positions):
            return states + self.linear(states) + positions

    class Mixer(torch.nn.ModuleDict):
        def forward(self, x, positions):
            x = self["embed"](x)
            for layer in self["layers"]:
                x = layer(x, positions)
            return x

    embed, layers = torch.nn.Linear(4, 4), torch.nn.ModuleList(Block() for _ in range(4))
    network = Mixer({"embed": embed, "layers": layers})
    adapter = Adapter("embed", (BlockList("layers", "states", axes=(TokenAxis("positions", dim=1),)),))
    attachment = attach(network, [Route(0.5, 1, 2)], adapter=adapter)
    x, positions = normal(2, 6, 4), normal(1, 6, 4, seed=2)
    output = network(x, positions)
    ((_, _, skips),) = skipped(attachment, 6)
    attachment.detach()
    once = layers[0](embed(x), positions)
    # These blocks do not mix tokens, so each token either passes through the two middle blocks or skips them.
    through = layers[3](layers[2](layers[1](once, positions), positions), positions)
    past = layers[3](once, positions)
    assert skips.sum(1).tolist() == [3, 3]
    assert torch.allclose(output, torch.where(skips[..., None], past, through), atol=1e-6)
    # A method of the network's own also routes in training, without the hooks of `__call__`.
    attachment = attach(network, [Route(0.5, 1, 2)], adapter=adapter)
    for is_training in (True, False):
        network.train(is_training).forward(x, positions)
        assert (attachment.ids_keep[0] is not None) == is_training


@pytest.mark.parametrize("name", ["PixArt", "Flux2", "ZImage"])
@pytest.mark.parametrize("inverse", [False, True])
def test_importance_selects_by_the_image_tokens_that_enter_the_route(name, inverse):
    case, network, arrived, layer = NETWORKS[name], cached(name), [], 2  # in Flux2, a single block with a joint sequence
    hook = blocks_of(network, case)[layer][0].register_forward_pre_hook(
        lambda module, args, kwargs: arrived.append(kwargs.get(case.argument, args[0] if args else None)), with_kwargs=True
    )
    rule = partial(importance_scores, weight=1.0, inverse=inverse)
    attachment = attach(network, [Route(0.5, layer, layer)], selection=rule)
    call(network, case.inputs(case.variant))
    (ids_keep,) = attachment.ids_keep
    attachment.detach()
    hook.remove()
    for b in range(B):
        first = (arrived[0].shape[1] - N) * case.text_first
        norms = arrived[0][b, first : first + N].abs().sum(-1)
        assert ids_keep[b].tolist() == sorted(norms.argsort(descending=not inverse)[: N // 2].tolist())


def test_a_rule_can_keep_all_reference_tokens_of_kontext_together_with_their_positions():
    """Kontext appends the tokens of a reference image to the noisy tokens. Their positions are 1 on the first axis."""
    case, network = replace(NETWORKS["Flux"], num_tokens=2 * N), build("Flux")
    inputs = case.inputs(False)
    positions = torch.cat([inputs["img_ids"], inputs["img_ids"] + torch.tensor([1.0, 0.0, 0.0])])
    inputs |= {"hidden_states": normal(B, 2 * N, 4), "img_ids": positions}
    attachment = attach(network, [Route(0.25, 0, 2)], selection=lambda x, uniform: uniform + (torch.arange(2 * N) >= N))
    call(network, inputs)
    ((_, _, skip),) = skipped(attachment, 2 * N)
    assert skip[:, :N].sum(1).tolist() == [N // 2] * B and not skip[:, N:].any()
    assert reference_error(network, case, inputs, attachment) < TOLERANCE


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("name", ["DiT", "LightningDiT"])
def test_our_own_networks_route_tokens_as_attach_does(name, selection):
    own, plain = build(name, routes=TWO, selection=selection), build(name)
    inputs = NETWORKS[name].inputs(False)
    rule = GridRule(GRID, GRID) if selection == "grid" else selection
    attach(plain, TWO, selection=rule, generator=generator(4))
    assert difference(run(plain, inputs), run(own, inputs | {"generator": generator(4)})) < TOLERANCE


def test_uniform_subsets_differ_between_samples_passes_and_routes_and_follow_the_generator():
    network, inputs = cached("PixArt"), NETWORKS["PixArt"].inputs(False)
    attachment, draws = attach(network, [Route(0.5, 0, 1), Route(0.5, 2, 3)]), []
    for seed in (1, 1, 2):
        attachment.generator = generator(seed)
        for _ in range(2):
            call(network, inputs)
            draws += [ids.tolist() for ids in attachment.ids_keep]
    attachment.detach()
    assert draws[:4] == draws[4:8]
    assert len({str(row) for subsets in draws[4:] for row in subsets}) == 8 * B


@pytest.mark.parametrize("name", ["Flux", "PixArt"])
def test_routing_can_be_forced_in_evaluation_for_sparse_guidance(name):
    case, network = NETWORKS[name], build(name).eval()
    inputs = case.inputs(False)
    attachment = attach(network, TWO)
    with torch.no_grad():
        dense = call(network, inputs)
        with attachment.routed([0.75, 0.0]):
            assert not torch.equal(call(network, inputs), dense)
        assert attachment.ids_keep[0].shape == (B, 4) and attachment.ids_keep[1] is None
        assert torch.equal(call(network, inputs), dense)
    with attachment.routed(0.0):  # forces dense passes in training
        assert difference(call(network.train(), inputs), dense) < TOLERANCE
    network.eval()
    with attachment.routed():
        assert reference_error(network, case, inputs, attachment) < TOLERANCE
