"""Compare the networks with an independent definition, and with names, counts and values written by hand."""

import math

import pytest
import torch
from definition import CLASSES, DEPTH, NETWORKS, ROUTES, WIDTH, N, inputs, normalized, randomized, small, worst_error

import dit
from edm import EDM
from extras import lightningdit
from extras.lightningdit import LightningDiT, RMSNorm, rotate
from routing_module import Route, TokenRouter


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize(("patch", "selection"), [(1, "uniform"), (2, "importance")])
def test_outputs_and_gradients_equal_those_of_the_definition(network, routes, patch, selection):
    net = randomized(small(network, patch, routes=routes, selection=selection)).train()
    assert worst_error(net, routes, patch, selection) < 1e-5


@pytest.mark.parametrize(
    ("backbone", "count"),
    [
        ("DiT-S/2", 32_858_896),
        ("DiT-B/2", 130_303_504),
        ("DiT-L/2", 457_824_272),
        ("DiT-XL/2", 674_816_272),
        ("LightningDiT-B/1", 130_359_584),
        ("LightningDiT-L/2", 458_087_520),
        ("LightningDiT-XL/1", 674_961_824),  # published as 675M
    ],
)
def test_numbers_of_trainable_parameters_equal_those_of_the_papers(backbone, count):
    module, shape = (lightningdit, (16, 32)) if "Lightning" in backbone else (dit, (32, 4))
    with torch.device("meta"):
        net = module.build(backbone, input_size=shape[0], in_channels=shape[1], num_classes=1000)
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == count
    if backbone == "DiT-XL/2":
        assert net.forward_flops() / 2e9 == pytest.approx(118.6, rel=0.01)  # the paper counts multiply-adds


def published_state_dict(network, channels=3, out_channels=6, patch=2):
    """Return a state dict with the names and shapes of a published checkpoint and random values."""
    D, layers, plain = WIDTH, {}, {"pos_embed": (1, N, WIDTH), "y_embedder.embedding_table.weight": (CLASSES + 1, WIDTH)}
    layers |= {"x_embedder.proj": (D, channels, patch, patch), "t_embedder.mlp.0": (D, 256), "t_embedder.mlp.2": (D, D)}
    layers |= {"final_layer.linear": (patch**2 * out_channels, D), "final_layer.adaLN_modulation.1": (2 * D, D)}
    for block in (f"blocks.{i}" for i in range(DEPTH)):
        layers |= {f"{block}.attn.qkv": (3 * D, D), f"{block}.attn.proj": (D, D), f"{block}.adaLN_modulation.1": (6 * D, D)}
        if network == "dit":
            layers |= {f"{block}.mlp.fc1": (4 * D, D), f"{block}.mlp.fc2": (D, 4 * D)}
        else:  # LightningDiT: its MLP is narrower, and its norms have gains
            layers |= {f"{block}.mlp.w12": (2 * 128, D), f"{block}.mlp.w3": (D, 128)}
            plain |= {f"{block}.norm1.weight": (D,), f"{block}.norm2.weight": (D,), "final_layer.norm_final.weight": (D,)}
            plain |= {"feat_rope.freqs_cos": (N, 16), "feat_rope.freqs_sin": (N, 16)}  # buffers in the published code
    for name, shape in layers.items():
        plain |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {name: torch.randn(shape) * 0.1 for name, shape in plain.items()}


@pytest.mark.parametrize("network", NETWORKS)
def test_published_checkpoints_load_strictly_and_edm_drops_their_extra_channels(network):
    net, state = small(NETWORKS[network], learn_sigma=True).eval(), published_state_dict(network)
    net.load_state_dict(state, strict=True)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    x, t, y, _ = inputs()
    assert net(x, t, y).shape == (3, 6, 8, 8) and EDM().denoise(net, x, t, y).shape == x.shape


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_at_initialization_every_block_is_the_identity_and_the_output_is_zero(network):
    net = small(network).eval()
    h, c, (x, t, y, _) = torch.randn(2, N, WIDTH), torch.randn(2, WIDTH), inputs()
    for block in net.blocks:
        assert torch.equal(block(h, c, *net.token_tables()), h)
    assert not net(x, t, y).any()
    state = net.state_dict()
    assert all((state[name] == 1).all() for name in state if "norm" in name)  # gains of LightningDiT


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_weights_are_initialized_as_in_dit_and_official_init_differs_only_in_modulation_and_output(network):
    zero, official = (small(network, num_classes=500, init=init).state_dict() for init in ("adaln_zero", "official_tread"))
    layers = [f"blocks.{i}.adaLN_modulation.1" for i in range(DEPTH)] + ["final_layer.adaLN_modulation.1", "final_layer.linear"]
    differing = {name for name in zero if not torch.equal(zero[name], official[name])}
    assert differing == {f"{layer}.weight" for layer in layers}
    for name, value in official.items():
        if name.startswith(("y_embedder", "t_embedder")) and name.endswith("weight"):
            assert value.std() == pytest.approx(0.02, rel=0.05)
        elif name.endswith("bias"):
            assert not value.any()
        elif name.endswith("weight") and "norm" not in name:  # Xavier-uniform
            fan_out, fan_in = value.flatten(1).shape
            assert 0.9 < value.abs().max() / math.sqrt(6 / (fan_in + fan_out)) <= 1


def seen_by_layers(net, *args, **kwargs):
    """Return what each block and the final layer receive: (tokens, dtype of the conditioning, whether autocast is on)."""
    seen = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: seen.append((args[0], args[1].dtype, torch.is_autocast_enabled("cpu"))))
        for layer in (*net.blocks, net.final_layer)
    ]
    net(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return seen


def lengths(seen):
    return [h.shape[1] for h, *_ in seen]


def test_a_route_shortens_only_its_own_blocks_and_returns_skipping_tokens_unchanged():
    net = randomized(small(depth=6, routes=[Route(0.25, 2, -3)])).train()
    x, t, y, scores = inputs()
    seen = seen_by_layers(net, x, t, y, drop_labels=torch.zeros(3, dtype=torch.bool), route_noise=scores[:, :1])
    assert lengths(seen) == [16, 16, 12, 12, 16, 16, 16]
    before = net.blocks[1](seen[1][0], net.t_embedder(t) + net.y_embedder(y, None))
    for sample, kept in enumerate(TokenRouter.choose_ids_keep(seen[0][0], 0.25, noise=scores[:, 0]).tolist()):
        skipping = [i for i in range(16) if i not in kept]
        assert torch.equal(seen[4][0][sample, skipping], before[sample, skipping])
        assert torch.equal(seen[2][0][sample], before[sample, kept])


def test_evaluation_is_dense_unless_routing_is_requested_and_a_ratio_of_0_is_always_dense():
    x, t, y, _ = inputs()
    keep_all = torch.zeros(3, dtype=torch.bool)
    plain, routed = randomized(small()), randomized(small(routes=[Route(0.5, 1, 2)]))
    off = randomized(small(routes=[Route(0.0, 1, 2)]))
    assert torch.equal(off.train()(x, t, y, drop_labels=keep_all), plain.train()(x, t, y, drop_labels=keep_all))
    assert torch.equal(routed.eval()(x, t, y), plain.eval()(x, t, y))
    assert torch.equal(routed(x, t, y, selection_ratios=0.0), plain(x, t, y))
    assert lengths(seen_by_layers(routed, x, t, y, selection_ratios=[0.75])) == [16, 4, 4, 16, 16]


@pytest.mark.parametrize(("end", "fp32_layer"), [(2, 3), (-1, 4)])
def test_the_layer_after_a_route_runs_in_float32_under_mixed_precision(end, fp32_layer):
    x, t, y, _ = inputs()
    for ratio, fp32_after_route in ((0.5, True), (0.5, False), (0.0, True)):
        net = randomized(small(routes=[Route(ratio, 1, end)], fp32_after_route=fp32_after_route))
        expected = [fp32_layer] if fp32_after_route and ratio > 0 else []
        for is_training, ratios in ((True, None), (False, ratio)):  # in evaluation, sparse guidance gives the ratios
            with torch.autocast("cpu", torch.bfloat16):
                seen = seen_by_layers(net.train(is_training), x, t, y, selection_ratios=ratios)
            assert [i for i, (_, _, autocast) in enumerate(seen) if not autocast] == expected
            assert all(seen[i][0].dtype == seen[i][1] == torch.float32 for i in expected)


def test_labels_are_dropped_at_their_rate_in_training_and_never_in_evaluation():
    net, seen = small(class_dropout=0.3), []
    net.y_embedder.embedding_table.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x, t, y = torch.zeros(2000, 3, 8, 8), torch.zeros(2000), torch.full((2000,), 3)
    with torch.no_grad():
        net.train()(x, t, y, generator=torch.Generator().manual_seed(0))
        net.eval()(x, t, y)
    assert (seen[0] == CLASSES).float().mean().item() == pytest.approx(0.3, abs=0.04)
    assert torch.equal(seen[1], y)


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="latents of size 30 cannot be cut into patches of 4"):
        dit.build("DiT-S/4", input_size=30, in_channels=4, num_classes=10)
    x, t, y, _ = inputs()
    arguments = {"t": t, "y": y, "drop_labels": torch.zeros(3, dtype=torch.bool)}
    for name in arguments:  # one condition must not broadcast over the batch
        with pytest.raises(ValueError, match=rf"{name} has shape \(1,\); 3 latents need \(3,\)"):
            small()(x, **arguments | {name: arguments[name][:1]})


def test_noise_of_a_wrong_number_of_routes_and_an_unknown_initialization_are_refused():
    x, t, y, scores = inputs()
    for routes, wrong in (("one", scores), ("two", scores[:, :1]), ("two", scores[:1]), ("dense", scores), ("one", scores[:, 0])):
        with pytest.raises(ValueError, match=r"route_noise has shape .*; these latents, routes and tokens need \(3, "):
            small(routes=ROUTES[routes])(x, t, y, route_noise=wrong)
    with pytest.raises(ValueError, match="init='zero' must be adaln_zero or official_tread"):
        small(init="zero")


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_a_route_may_carry_no_token(network):
    """tests/test_train.py checks that new runs refuse such a route."""
    for ratio in (0.0, 0.06):
        net, (x, t, y, _) = small(network, routes=[Route(1 / 16, 0, 0), Route(ratio, 1, 2)]), inputs()
        assert lengths(seen_by_layers(net.eval(), x, t, y, selection_ratios=[0.0, 0.06])) == [16] * 5  # guidance may give any
        assert lengths(seen_by_layers(net.train(), x, t, y)) == [15] + [16] * 4


def test_a_route_end_of_another_class_gets_every_route_and_its_inputs():
    """The recipe in docs/extending.md: the signature of a route end, K = 0 at ratio 1, and None in evaluation at ratio 0."""
    calls = []

    class Sum(dit.RouteEnd):
        is_called_at_ratio_0 = True

        def forward(self, x, x_before, ids_keep, inputs=None):
            calls.append((x.shape[1], x_before.shape[1], ids_keep if ids_keep is None else ids_keep.shape[1], inputs))
            return x_before + (x if ids_keep is None else TokenRouter.end_route(x, x_before, ids_keep))

    class Summed(dit.DiT):
        route_end_class = Sum

    net, (x, t, y, _) = small(Summed, routes=ROUTES["two"]), inputs()
    assert net.state_dict().keys() == small().state_dict().keys()
    mark = torch.ones(3)
    net.train()(x, t, y, route_inputs=mark)
    net(x, t, y, selection_ratios=0.0)
    net.eval()(x, t, y, selection_ratios=[1.0, 0.0])
    assert calls == [(12, N, 12, mark), (4, N, 4, mark), *[(N, N, N, None)] * 2, (0, N, 0, None), (N, N, None, None)]


def test_embedded_patches_are_contiguous():
    assert dit.PatchEmbed(2, 3, 10)(inputs()[0]).is_contiguous()


# ----------------------------------------------------------------------------------------------------------------------
# LightningDiT only: rotary positions, norms and precision.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("error")  # torch warns if dtypes differ and its fused kernel cannot run
def test_the_norm_is_computed_in_float32_for_every_dtype_of_tokens_and_gain(dtype, weight_dtype):
    x, norm = (100 * torch.randn(5, 48)).to(dtype), RMSNorm(48, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(48) + 0.5)
    norm.to(weight_dtype)
    expected = normalized({"norm.weight": norm.weight.double()}, "norm", x.double()).to(dtype)
    torch.set_warn_always(True)  # warn at every call, not once per process
    got = norm(x)
    torch.set_warn_always(False)
    assert got.dtype == dtype
    assert torch.allclose(got, expected, rtol=1e-6) if dtype == torch.float32 else (got == expected).float().mean() > 0.99


def test_under_mixed_precision_queries_are_rotated_in_float32_and_tables_are_not_rounded(monkeypatch):
    seen = []

    def record(x, cos, sin):
        seen.append((x.dtype, cos.dtype, rotate(x, cos, sin).dtype))
        return rotate(x, cos, sin)

    monkeypatch.setattr(lightningdit, "rotate", record)
    net = randomized(small(LightningDiT, routes=ROUTES["one"])).train()
    x, t, y, scores = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        net(x, t, y, route_noise=scores[:, :1])
    in_bf16, in_fp32 = (torch.bfloat16, torch.float32, torch.float32), (torch.float32,) * 3
    assert seen == [in_bf16, in_bf16, in_bf16, in_fp32]  # the block after the route runs in float32


def test_position_tables_are_not_trained_and_head_widths_that_do_not_fit_them_are_refused():
    fixed = {name for name, p in small(LightningDiT).named_parameters() if not p.requires_grad}
    assert fixed == {"pos_embed", "feat_rope.freqs_cos", "feat_rope.freqs_sin"}
    with pytest.raises(ValueError, match="width=48 is no multiple of 4 x num_heads=8"):
        small(LightningDiT, num_heads=8)
