"""Routing of networks that are not ours, against full-length blocks in which skipping tokens are barred and restored."""

import pytest
import torch
from conftest import finish, start
from networks import (
    NETWORKS,
    B,
    N,
    T,
    blocks_of,
    cached_network,
    call,
    normal,
    reference,
    run,
    text_mask,
    windows_of,
    worst_difference,
)

import dit
from extras import lightningdit
from extras.attach import PRESETS, Adapter, BlockList, TokenAxis, attach, attached
from extras.attach import hooks as hooks_module
from routing_module import SELECTIONS, Route

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


def mask_of_keys():
    """(B, 1, 1, T + N), for text of different lengths."""
    return torch.cat([text_mask(True), torch.ones(B, N, dtype=torch.bool)], dim=1)[:, None, None]


def mask_of_pairs(length):
    """(length, length), of queries and keys."""
    return (normal(length, length) > -1) | torch.eye(length, dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("Flux", lambda: {"controlnet_block_samples": [normal(B, N, 32, seed=6)], "controlnet_single_block_samples": None}),
        ("SD3", lambda: {"skip_layers": [2]}),
        ("Flux", lambda: {"joint_attention_kwargs": {"attention_mask": mask_of_keys()}}),
        ("Flux2", lambda: {"joint_attention_kwargs": {"attention_mask": mask_of_pairs(T + N)}}),
        ("timm", lambda: {"attn_mask": mask_of_pairs(1 + 2 + N)}),  # a class and two register tokens
        ("timm", lambda: {"is_causal": True}),
    ],
    ids=["residuals of a ControlNet", "skipped layers", "mask of keys", "mask of queries and keys", "timm's mask", "causal"],
)
def test_what_is_added_masked_or_left_out_is_so_for_the_right_tokens(name, extra):
    case, network = NETWORKS[name], cached_network(name)
    inputs = case.inputs(False) | extra()
    attachment = attach(network, ONE)
    output, grads = run(network, inputs)
    windows = windows_of(attachment)
    attachment.detach()
    with reference(network, case, windows):
        expected, expected_grads = run(network, inputs)
    assert worst_difference(output, expected) < 1e-5
    assert max(worst_difference(grads[key], expected_grads[key]) for key in expected_grads) < 1e-5


def test_routing_imports_none_of_the_libraries_whose_networks_it_routes():
    code = "import sys, attach; assert not {'diffusers', 'peft', 'timm', 'torchao'} & set(sys.modules)"
    code, output = finish(start("-c", code))
    assert code == 0, output


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


@pytest.mark.parametrize("wrong", ["the first positions", "the skipping positions"])
@pytest.mark.parametrize("name", [name for name in NETWORKS if NETWORKS[name].positions])
def test_the_reference_notices_rotary_positions_of_other_tokens(name, wrong, monkeypatch):
    case, network = NETWORKS[name], cached_network(name)
    inputs = case.inputs(False)
    gather = hooks_module.gather_axis

    def gather_others(x, index, dim, shared):
        if not (torch.is_tensor(x) and (x.is_complex() or x.shape[-1] == 16)):  # not a table of positions
            return gather(x, index, dim, shared)
        length, num_kept = x.shape[dim], index.shape[1]
        if wrong == "the first positions":
            index = torch.arange(num_kept).expand_as(index)
        else:
            others = [sorted(set(range(length)) - set(row.tolist())) for row in index]
            index = index.clone()
            for b, ids in enumerate(others):
                index[b, -len(ids) :] = torch.tensor(ids)[:num_kept]
        return gather(x, index, dim, shared)

    monkeypatch.setattr(hooks_module, "gather_axis", gather_others)
    attachment = attach(network, ONE)
    output, _ = run(network, inputs)
    windows = windows_of(attachment, case.num_tokens)
    attachment.detach()
    with reference(network, case, windows):
        expected, _ = run(network, inputs)
    assert worst_difference(output, expected) > 1e-4


def test_presets_are_those_of_the_paper_and_of_simpletuners_documentation():
    assert {
        name: [(r.selection_ratio, r.start_layer_idx, r.end_layer_idx) for r in routes] for name, routes in PRESETS.items()
    } == {
        "paper": [(0.5, 2, -4)],
        "balanced": [(0.5, 2, -2)],
        "fastest": [(0.7, 1, -1)],
        "high_resolution": [(0.6, 2, -3)],
        "lora": [(0.4, 3, -4)],
        "masked": [(0.7, 2, -2)],
    }


def test_a_tread_config_of_simpletuner_is_accepted_as_it_is_and_counts_through_all_lists_of_blocks():
    network = cached_network("Flux")  # 3 double and 3 single blocks
    config = {
        "routes": [
            {"selection_ratio": 0.3, "start_layer_idx": 1, "end_layer_idx": 2},
            {"selection_ratio": 0.7, "start_layer_idx": -3, "end_layer_idx": -1},
        ]
    }
    attachment = attach(network, {"tread_config": config})  # with its own name around it, as its documentation prints it
    assert attachment.router.routes == (Route(0.3, 1, 2), Route(0.7, 3, 5))
    attachment.detach()
    attachment = attach(network, config)
    assert attachment.router.routes == (Route(0.3, 1, 2), Route(0.7, 3, 5))
    run(network, NETWORKS["Flux"].inputs(False))
    assert attachment.statistics.num_kept == (N - 4, N - 11)
    attachment.detach()
    attachment = attach(network, "balanced")
    assert attachment.router.routes == (Route(0.5, 2, 4),)
    attachment.detach()


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([], "requires you to configure the routes"),
        (None, "requires you to configure the routes"),
        ({}, "requires you to configure the routes"),
        ({"routes": []}, "requires you to configure the routes"),
        ("quickest", "routes='quickest' is no preset; choose one of paper, balanced"),
        ({"routes": [{"selection_ratio": 0.5, "start_layer_idx": 2}]}, r"routes\[0\] needs end_layer_idx"),
        (
            [{"selection_ration": 0.5, "start_layer_idx": 2, "end_layer_idx": 3}],
            r"routes\[0\] has the unknown key 'selection_ration'",
        ),
        ({"router": []}, "tread_config has the unknown key 'router'"),
        ({"tread_config": {"router": []}}, "tread_config has the unknown key 'router'"),
        (5, "routes=5 must be a list of .*selection_ratio"),
        ([0.5], r"routes\[0\]=0.5 must be a Route or a mapping"),
        ([Route(0.5, 1, 6)], r"routes\[0\].end_layer_idx=6 does not exist in a network of 6 blocks"),
        ([Route(1.0, 1, 2)], r"routes\[0\].selection_ratio=1.0 must be a number in \[0, 1\)"),
    ],
)
def test_routes_that_cannot_be_are_refused_with_the_reason(routes, message):
    network = cached_network("PixArt")
    with pytest.raises(ValueError, match=message):
        attach(network, routes)
    assert attached(network) is None


def test_networks_that_cannot_be_routed_are_refused_with_the_reason():
    class SanaTransformer2DModel(torch.nn.Module):
        pass

    with pytest.raises(ValueError, match="cannot be routed: the feed-forward of its blocks is a convolution over the full grid"):
        attach(SanaTransformer2DModel(), "balanced")
    with pytest.raises(
        ValueError, match="Linear is not known; known are DiT, LightningDiT, Flux.*VisionTransformer.*pass attach.*adapter="
    ):
        attach(torch.nn.Linear(2, 2), "balanced")
    routed = dit.DiT(
        input_size=8, patch_size=2, in_channels=4, num_classes=3, depth=6, width=32, num_heads=2, routes=[Route(0.5, 1, 3)]
    )
    with pytest.raises(ValueError, match="it has routes of its own; build it with routes="):
        attach(routed, "balanced")
    from timm.models.vision_transformer import VisionTransformer

    thrown = VisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=6, num_heads=2, patch_drop_rate=0.5)
    with pytest.raises(ValueError, match="patch_drop_rate > 0 throws tokens away"):
        attach(thrown, "balanced")


def test_an_adapter_that_does_not_fit_and_a_second_attachment_are_refused():
    network = cached_network("PixArt")
    blocks = (BlockList("transformer_blocks"),)
    for adapter, message in (
        (Adapter("PixArt", "pos_embedding", blocks), "has no 'pos_embedding', which its adapter counts tokens by"),
        (Adapter("PixArt", "pos_embed", (BlockList("layers"),)), "has no list of blocks 'layers'"),
        (Adapter("PixArt", "pos_embed", (BlockList("transformer_blocks", "x"),)), "takes hidden_states, .* and no 'x'"),
    ):
        with pytest.raises(ValueError, match=message):
            attach(network, "balanced", adapter=adapter)
    with pytest.raises(ValueError, match="layout='texts'"):
        Adapter("PixArt", "pos_embed", (BlockList("transformer_blocks", layout="texts"),))
    attachment = attach(network, "balanced")
    with pytest.raises(ValueError, match="is routed already; detach"):
        attach(network, "balanced")
    attachment.detach()
    attachment.detach()
    with pytest.raises(ValueError, match="selection='random' is unknown; choose one of uniform, importance"):
        attach(network, "balanced", selection="random")
    with pytest.raises(ValueError, match="inverse=True has no meaning for selection='uniform'"):
        attach(network, "balanced", inverse=True)
    with pytest.raises(ValueError, match=r"importance_weight=2 must be in \[0, 1\]"):
        attach(network, "balanced", selection="importance", importance_weight=2)
    with pytest.raises(ValueError, match=r"importance_weight=0.7 has no meaning for selection='uniform'"):
        attach(network, "balanced", importance_weight=0.7)


def test_a_network_of_ones_own_is_routed_by_describing_it():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, states, positions):
            assert states.shape[1] == positions.shape[1]
            return states + self.linear(states) + positions

    class Mixer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = torch.nn.Linear(4, 4), torch.nn.ModuleList(Block() for _ in range(4))

        def forward(self, x, positions):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x, positions)
            return x

    network = Mixer()
    axes = (TokenAxis("positions", dim=1),)
    attachment = attach(
        network, [Route(0.5, 1, 2)], adapter=Adapter("Mixer", "embed", (BlockList("layers", "states", axes=axes),))
    )
    x, positions = normal(2, 6, 4), normal(1, 6, 4, seed=2)
    output = network(x, positions)
    stays = torch.zeros(2, 6, dtype=torch.bool).scatter(1, attachment.ids_keep[0], True)
    attachment.detach()
    once = network.layers[0](network.embed(x), positions)
    # Nothing mixes tokens here, so every token is either through the two middle blocks or past them.
    through = network.layers[3](network.layers[2](network.layers[1](once, positions), positions), positions)
    past = network.layers[3](once, positions)
    assert stays.sum(1).tolist() == [3, 3]
    assert torch.allclose(output, torch.where(stays[..., None], through, past), atol=1e-6)


# ---- selection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PixArt", "Flux2", "Lumina2", "ZImage", "timm"])
@pytest.mark.parametrize("inverse", [False, True])
def test_importance_selects_by_the_image_tokens_that_arrive_at_the_route(name, inverse):
    case, network = NETWORKS[name], cached_network(name)
    padded = case.padded_text
    start = 4  # in the single blocks of Flux2: a joint sequence
    arrived = []
    block = blocks_of(network, case)[start][0]
    hook = block.register_forward_pre_hook(
        lambda module, args, kwargs: arrived.append(kwargs.get(case.argument, args[0] if args else None)), with_kwargs=True
    )
    attachment = attach(network, [Route(0.5, start, start)], selection="importance", importance_weight=1.0, inverse=inverse)
    call(network, case.inputs(padded))
    (ids_keep,) = attachment.ids_keep
    attachment.detach()
    hook.remove()
    for b in range(B):
        first = case.first_image_token(padded)[b] if case.first_image_token else (arrived[0].shape[1] - N) * case.text_first
        norms = arrived[0][b, first : first + N].abs().sum(-1)
        assert ids_keep[b].tolist() == sorted(norms.argsort(descending=not inverse)[: N // 2].tolist())


def test_importance_equals_the_reference_for_the_subset_that_it_chose():
    case, network = NETWORKS["Flux"], cached_network("Flux")
    for per_sample in (True, False):
        attachment = attach(network, TWO, selection="importance", importance_weight=0.7, per_sample=per_sample)
        output, _ = run(network, case.inputs(False))
        windows = windows_of(attachment)
        attachment.detach()
        with reference(network, case, windows):
            assert worst_difference(output, run(network, case.inputs(False))[0]) < 1e-5
        assert all((skip == skip[0]).all() for *_, skip in windows) == (not per_sample)


@pytest.mark.parametrize("selection", ["uniform", "importance"])
@pytest.mark.parametrize("per_sample", [True, False])
def test_forced_tokens_never_skip_the_count_is_raised_for_the_batch_and_the_saving_is_reported(selection, per_sample):
    case, network = NETWORKS["Flux2"], cached_network("Flux2")
    mask = torch.zeros(B, N, dtype=torch.bool)
    mask[0, 2:14] = True  # 12 of 16: more than half
    mask[1, 15] = True
    attachment = attach(network, [Route(0.5, 1, 3), Route(0.125, 4, 4)], selection=selection, per_sample=per_sample)
    with attachment.force_keep(mask):
        run(network, case.inputs(False))
    ids_keep, statistics = attachment.ids_keep, attachment.statistics
    expected = 12 if per_sample else 13  # one subset for the batch holds what any sample forces
    assert statistics.num_tokens == 16 and statistics.num_requested == (8, 14) and statistics.num_kept == (expected, 14)
    assert statistics.requested_saving == (8 * 3 + 2) / (16 * 6)
    assert statistics.saving == ((16 - expected) * 3 + 2) / (16 * 6)
    for ids in ids_keep:
        stays = torch.zeros(B, N, dtype=torch.bool).scatter(1, ids, True)
        assert stays[mask].all()
    run(network, case.inputs(False))
    assert attachment.statistics.num_kept == (8, 14)  # outside of the context nothing is forced
    with attachment.force_keep(torch.ones(B, N)):  # everything forced: the dense network
        output, _ = run(network, case.inputs(False))
    assert attachment.statistics.saving == 0 and attachment.ids_keep == (None, None)
    wrong = r"force_keep has shape \(3, 15\); the network has \(3, 16\) image tokens"
    with pytest.raises(ValueError, match=wrong), attachment.force_keep(mask[:, :15]):
        call(network, case.inputs(False))
    wrong = r"force_keep has shape \(3, 4, 4\); it needs \(batch, image tokens\)"
    with pytest.raises(ValueError, match=wrong), attachment.force_keep(mask.reshape(B, 4, 4)):
        pass
    for wrong in (mask.to("meta"), mask.tolist()):
        with pytest.raises(ValueError, match="force_keep got .* without values"), attachment.force_keep(wrong):
            pass
    call(network, case.inputs(False))
    assert attachment.statistics.num_kept == (8, 14)  # a mask that was refused is not in force
    attachment.detach()
    assert torch.equal(output, run(network, case.inputs(False))[0])


def test_reference_images_can_be_kept_in_every_route():
    case, network = NETWORKS["QwenImage, edit"], cached_network("QwenImage, edit")
    mask = torch.arange(2 * N)[None].expand(B, -1) >= N  # the second image
    attachment = attach(network, [Route(0.25, 1, 4)])
    with attachment.force_keep(mask):
        run(network, case.inputs(False))
    (ids_keep,) = attachment.ids_keep
    attachment.detach()
    assert all(set(range(N, 2 * N)) <= set(ids) for ids in ids_keep.tolist())


def test_uniform_subsets_differ_between_samples_passes_and_routes_and_follow_the_generator():
    network, inputs = cached_network("PixArt"), NETWORKS["PixArt"].inputs(False)
    draws = []
    for seed in (1, 1, 2):
        attachment = attach(network, [Route(0.5, 1, 2), Route(0.5, 3, 4)], generator=torch.Generator().manual_seed(seed))
        call(network, inputs)
        first = attachment.ids_keep
        call(network, inputs)
        draws.append([*first, *attachment.ids_keep])
        attachment.detach()
    assert all(torch.equal(a, b) for a, b in zip(draws[0], draws[1]))
    different = {str(ids.tolist()) for ids in (*draws[0], *draws[2])}
    assert len(different) == 8
    assert len({str(row) for row in draws[0][0].tolist()}) == B


@pytest.mark.parametrize("name", ["Flux", "timm"])
def test_routing_can_be_forced_in_evaluation_for_sparse_guidance(name):
    case, network = NETWORKS[name], cached_network(name)
    inputs = case.inputs(False)
    attachment = attach(network, TWO)
    try:
        network.eval()
        with torch.no_grad():
            dense = call(network, inputs)
            with attachment.routed([0.75, 0.0]):
                weak = call(network, inputs)
                windows = windows_of(attachment) if attachment.ids_keep[1] is not None else None
                assert windows is None and attachment.statistics.num_kept == (4, 16)
            with attachment.routed():
                own = call(network, inputs)
                assert attachment.statistics.num_kept == (12, 8)
                windows = windows_of(attachment)
            assert torch.equal(call(network, inputs), dense)
        with pytest.raises(ValueError, match="one ratio for each of 2 routes"), attachment.routed([0.5]):
            pass
        attachment.detach()
        with torch.no_grad(), reference(network, case, windows):
            assert worst_difference(own, call(network, inputs)) < 1e-5
        assert not torch.equal(weak, dense)
    finally:
        network.train()
        attachment.detach()
    attachment = attach(network, TWO)
    with attachment.routed(0.0):  # and off in training
        assert torch.allclose(call(network, inputs), dense, atol=1e-6)
    attachment.detach()


@pytest.mark.parametrize("network", [dit.DiT, lightningdit.LightningDiT])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_our_own_networks_route_themselves_as_attach_routes_them(network, selection):
    settings = dict(input_size=8, patch_size=2, in_channels=4, num_classes=3, depth=6, width=32, num_heads=2, class_dropout=0.0)
    own = network(**settings, routes=TWO, selection=selection)
    plain = network(**settings)
    plain.load_state_dict(cached_network(network.__name__).state_dict())
    own.load_state_dict(plain.state_dict())
    inputs = NETWORKS[network.__name__].inputs(False)
    attach(plain, TWO, selection=selection, generator=torch.Generator().manual_seed(4))
    g = torch.Generator().manual_seed(4)
    expected, expected_grads = run(own, inputs | {"generator": g})
    output, grads = run(plain, inputs)
    assert worst_difference(output, expected) < 1e-6
    assert max(worst_difference(grads[name], expected_grads[name]) for name in grads) < 1e-6


def test_z_image_refuses_what_has_no_one_grid_of_tokens():
    network, inputs = cached_network("ZImage"), NETWORKS["ZImage"].inputs(False)
    attachment = attach(network, ONE)
    with pytest.raises(ValueError, match="a routed batch needs one size"):
        network(**inputs | {"x": [normal(4, 1, 8, 8), normal(4, 1, 8, 4), normal(4, 1, 8, 8)]})
    with pytest.raises(ValueError, match="omni mode"):
        network(**inputs | {"x": [[normal(4, 1, 8, 8)]] * B})
    attachment.detach()


def test_positions_of_a_routed_block_answer_only_what_attention_asks():
    table = hooks_module.PositionsPerSample(normal(2, 5, 4))
    assert table.shape == (5, 4) and table.ndim == 2 and table.dtype == torch.float32 and table.device.type == "cpu"
    assert table[None, :, None, :].shape == (2, 5, 1, 4) and table[None, None].shape == (2, 1, 5, 4)
    assert table.unsqueeze(1).shape == (2, 5, 1, 4) and table.float().to("cpu")[None].shape == (2, 5, 4)
    for wrong in (lambda: table[0], lambda: table[None, :3], lambda: table[:, None], lambda: table.unsqueeze(0)):
        with pytest.raises(TypeError, match="positions of a routed block"):
            wrong()
