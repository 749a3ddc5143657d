"""The network, against names, counts and values written down by hand."""

import math
from functools import partial

import pytest
import torch
from timm.models.vision_transformer import Attention as TimmAttention

import dit
from edm import EDM
from routing_module import Route, TokenRouter
from training.speed import compile_network, sigmoid_gelu


def small(**kwargs):
    settings = dict(input_size=8, patch_size=2, in_channels=3, num_classes=5, depth=4, width=32, num_heads=2) | kwargs
    torch.manual_seed(0)
    return dit.DiT(**settings)


def inputs(batch=2, channels=3):
    g = torch.Generator().manual_seed(1)
    return torch.randn(batch, channels, 8, 8, generator=g), torch.randn(batch, generator=g), torch.arange(batch)


def randomized(net):
    """A network whose zero-initialised layers are random, so that every part matters."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=g) * 0.1)
    return net


@pytest.mark.parametrize(
    ("backbone", "count"),
    [("DiT-S/2", 32_858_896), ("DiT-B/2", 130_303_504), ("DiT-L/2", 457_824_272), ("DiT-XL/2", 674_816_272)],
)
def test_trainable_parameters_are_those_of_the_paper(backbone, count):
    with torch.device("meta"):
        net = dit.build(backbone, input_size=32, in_channels=4, num_classes=1000)
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == count


@pytest.mark.parametrize("size", dit.SIZES)
@pytest.mark.parametrize("patch", dit.PATCH_SIZES)
def test_every_backbone_builds_by_name_for_any_latents(size, patch):
    with torch.device("meta"):
        net = dit.build(f"DiT-{size}/{patch}", input_size=16, in_channels=7, num_classes=3)
        assert net.num_tokens == (16 // patch) ** 2
        x = torch.zeros(2, 7, 16, 16)
        assert net.eval()(x, torch.zeros(2), torch.zeros(2, dtype=torch.int64)).shape == x.shape


def test_unknown_backbone_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"model.backbone='DiT-H/2' is unknown; choose one of .*DiT-XL/2"):
        dit.build("DiT-H/2", input_size=32, in_channels=4, num_classes=10)


def test_latents_that_cannot_be_cut_into_patches_are_refused():
    with pytest.raises(ValueError, match="latents of size 30 cannot be cut into patches of 4"):
        dit.build("DiT-S/4", input_size=30, in_channels=4, num_classes=10)


def test_a_misspelt_keyword_is_refused():
    x, t, y = inputs()
    with pytest.raises(TypeError):
        small()(x, t, y, route_score=torch.rand(2, 1, 16))


def published_state_dict(depth=4, width=32, channels=3, classes=5, patch=2, tokens=16):
    """Names and shapes of a checkpoint of facebookresearch/DiT (learn_sigma=True), with random values."""
    out = patch * patch * channels * 2
    shapes = {
        "pos_embed": (1, tokens, width),
        "x_embedder.proj.weight": (width, channels, patch, patch),
        "x_embedder.proj.bias": (width,),
        "t_embedder.mlp.0.weight": (width, 256),
        "t_embedder.mlp.0.bias": (width,),
        "t_embedder.mlp.2.weight": (width, width),
        "t_embedder.mlp.2.bias": (width,),
        "y_embedder.embedding_table.weight": (classes + 1, width),
        "final_layer.linear.weight": (out, width),
        "final_layer.linear.bias": (out,),
        "final_layer.adaLN_modulation.1.weight": (2 * width, width),
        "final_layer.adaLN_modulation.1.bias": (2 * width,),
    }
    for i in range(depth):
        shapes |= {
            f"blocks.{i}.attn.qkv.weight": (3 * width, width),
            f"blocks.{i}.attn.qkv.bias": (3 * width,),
            f"blocks.{i}.attn.proj.weight": (width, width),
            f"blocks.{i}.attn.proj.bias": (width,),
            f"blocks.{i}.mlp.fc1.weight": (4 * width, width),
            f"blocks.{i}.mlp.fc1.bias": (4 * width,),
            f"blocks.{i}.mlp.fc2.weight": (width, 4 * width),
            f"blocks.{i}.mlp.fc2.bias": (width,),
            f"blocks.{i}.adaLN_modulation.1.weight": (6 * width, width),
            f"blocks.{i}.adaLN_modulation.1.bias": (6 * width,),
        }
    return {name: torch.randn(shape) * 0.1 for name, shape in shapes.items()}


def test_published_checkpoints_load_strictly_and_edm_drops_their_extra_channels():
    net = small(learn_sigma=True)
    net.load_state_dict(published_state_dict(), strict=True)
    x, _, y = inputs()
    assert net.eval()(x, torch.zeros(2), y).shape == (2, 6, 8, 8)
    assert EDM().denoise(net, x, torch.ones(2), y).shape == (2, 3, 8, 8)


def test_at_the_start_every_block_is_the_identity_and_the_output_is_zero():
    net = small().eval()
    x, t, y = inputs()
    h, c = torch.randn(2, 16, 32), torch.randn(2, 32)
    for block in net.blocks:
        assert torch.equal(block(h, c), h)
    assert torch.equal(net(x, t, y), torch.zeros(2, 3, 8, 8))


def test_official_init_leaves_modulation_and_output_non_zero_and_changes_nothing_else():
    zero, official = small().state_dict(), small(init="official_tread").state_dict()
    differing = {name for name in zero if not torch.equal(zero[name], official[name])}
    layers = [f"blocks.{i}.adaLN_modulation.1" for i in range(4)] + ["final_layer.adaLN_modulation.1", "final_layer.linear"]
    assert differing == {f"{layer}.weight" for layer in layers}
    bound = math.sqrt(6 / (32 + 6 * 32))  # Xavier-uniform
    weight = official["blocks.0.adaLN_modulation.1.weight"]
    assert 0.9 * bound < weight.abs().max() <= bound


def test_other_weights_start_as_dit_says():
    state = dit.DiT(input_size=8, patch_size=2, in_channels=3, num_classes=500, depth=1, width=64, num_heads=2).state_dict()
    for name in ("y_embedder.embedding_table.weight", "t_embedder.mlp.0.weight", "t_embedder.mlp.2.weight"):
        assert state[name].std() == pytest.approx(0.02, rel=0.05)
    assert state["blocks.0.attn.qkv.weight"].abs().max() <= math.sqrt(6 / (64 + 192))
    assert state["x_embedder.proj.weight"].abs().max() <= math.sqrt(6 / (64 + 3 * 4))
    assert all(not value.any() for name, value in state.items() if name.endswith("bias"))


def test_timestep_features_are_cosines_first():
    embedder = dit.TimestepEmbedder(8)
    seen = []
    embedder.mlp = torch.nn.Module()
    embedder.mlp.forward = lambda features: seen.append(features) or features
    embedder(torch.tensor([0.7, -2.0]))
    assert seen[0].shape == (2, 256)
    for i in (0, 1, 100):
        frequency = 10000 ** (-i / 128)
        assert seen[0][1, i].item() == pytest.approx(math.cos(-2.0 * frequency), abs=1e-6)
        assert seen[0][1, 128 + i].item() == pytest.approx(math.sin(-2.0 * frequency), abs=1e-6)


def test_positions_encode_the_column_first_and_are_not_trained():
    net = small()
    assert not net.pos_embed.requires_grad
    row, column, quarter = 3, 1, 8
    embedding = net.pos_embed[0, row * 4 + column]
    for i in (0, 1, 5):
        omega = 10000 ** (-i / quarter)
        expected = [math.sin(column * omega), math.cos(column * omega), math.sin(row * omega), math.cos(row * omega)]
        assert embedding[[i, quarter + i, 2 * quarter + i, 3 * quarter + i]].tolist() == pytest.approx(expected, abs=1e-6)


def test_unpatchify_puts_row_column_and_channel_where_they_belong():
    net = small()
    out = torch.zeros(1, 16, 2 * 2 * 3)
    out[0, 2 * 4 + 3, (1 * 2 + 0) * 3 + 2] = 1.0  # token at row 2, column 3; in it row 1, column 0, channel 2
    image = net.unpatchify(out)
    assert image.nonzero().tolist() == [[0, 2, 5, 6]]


def test_dropped_labels_are_the_null_class():
    net = randomized(small(routes=[])).train()
    x, t, y = inputs()
    dropped = net(x, t, y, drop_labels=torch.tensor([True, False]))
    null = net(x, t, torch.tensor([5, 1]), drop_labels=torch.tensor([False, False]))
    assert torch.equal(dropped, null)
    assert not torch.equal(dropped, net(x, t, y, drop_labels=torch.tensor([False, False])))


def test_labels_are_dropped_at_their_rate_in_training_and_never_in_evaluation():
    net = randomized(small(class_dropout=0.3))
    seen = []
    net.y_embedder.embedding_table.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x, t, y = torch.zeros(2000, 3, 8, 8), torch.zeros(2000), torch.full((2000,), 3)
    with torch.no_grad():
        net.train()(x, t, y, generator=torch.Generator().manual_seed(0))
        net.eval()(x, t, y)
    assert (seen[0] == 5).float().mean().item() == pytest.approx(0.3, abs=0.04)
    assert torch.equal(seen[1], y)
    with pytest.raises(ValueError, match="drop_labels is for training"):
        net(x, t, y, drop_labels=torch.zeros(2000, dtype=torch.bool))


def block_inputs(net, *args, **kwargs):
    """Forward, recording what every block and the final layer receive, and whether autocast is on."""
    seen = []
    layers = [*net.blocks, net.final_layer]
    hooks = [
        layer.register_forward_pre_hook(
            lambda module, hook_args: seen.append((hook_args[0], hook_args[1].dtype, torch.is_autocast_enabled("cpu")))
        )
        for layer in layers
    ]
    out = net(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    return out, seen


def test_a_route_shortens_its_window_only_and_skipping_tokens_leave_it_bit_identical():
    net = randomized(small(depth=6, routes=[Route(0.25, 2, -3)])).train()
    x, t, y = inputs()
    scores = torch.rand(2, 1, 16, generator=torch.Generator().manual_seed(3))
    _, seen = block_inputs(net, x, t, y, drop_labels=torch.zeros(2, dtype=torch.bool), route_scores=scores)
    assert [h.shape[1] for h, *_ in seen] == [16, 16, 12, 12, 16, 16, 16]
    kept = TokenRouter.choose_ids_keep(seen[0][0], 0.25, scores=scores[:, 0])
    for sample in range(2):
        skipping = [i for i in range(16) if i not in kept[sample].tolist()]
        # Before the window the tokens are what block 1 made of its input; block 4 must meet them unchanged.
        before = net.blocks[1](seen[1][0], net.t_embedder(t) + net.y_embedder(y, None))
        assert torch.equal(seen[4][0][sample, skipping], before[sample, skipping])
        assert not torch.equal(seen[4][0][sample, kept[sample]], before[sample, kept[sample]])


def test_routed_forward_equals_blocks_applied_by_hand():
    net = randomized(small(routes=[Route(0.5, 1, 2)])).train()
    x, t, y = inputs()
    scores = torch.rand(2, 1, 16, generator=torch.Generator().manual_seed(3))
    out = net(x, t, y, drop_labels=torch.zeros(2, dtype=torch.bool), route_scores=scores)
    c = net.t_embedder(t) + net.y_embedder(y, None)
    h = net.blocks[0](net.x_embedder(x) + net.pos_embed, c)
    for sample in range(2):  # sample by sample, with plain indexing
        keep = scores[sample, 0].argsort(descending=True)[:8].sort().values
        inside = h[sample : sample + 1, keep]
        for i in (1, 2):
            inside = net.blocks[i](inside, c[sample : sample + 1])
        full = h[sample : sample + 1].clone()
        full[0, keep] = inside[0]
        expected = net.unpatchify(net.final_layer(net.blocks[3](full, c[sample : sample + 1]), c[sample : sample + 1]))
        assert torch.allclose(out[sample], expected[0], atol=1e-5)


def test_two_routes_follow_one_another_with_their_own_scores():
    net = randomized(small(depth=6, routes=[Route(0.5, 0, 1), Route(0.25, 2, 4)])).train()
    x, t, y = inputs()
    _, seen = block_inputs(net, x, t, y, route_scores=torch.rand(2, 2, 16))
    assert [h.shape[1] for h, *_ in seen] == [8, 8, 12, 12, 12, 16, 16]


def test_importance_is_judged_by_the_tokens_that_arrive_at_the_route_half_by_chance_and_half_by_norm():
    x, t, y = inputs()
    scores = torch.rand(2, 2, 16, generator=torch.Generator().manual_seed(3))
    kept = {}
    for selection in ("uniform", "importance"):
        net = randomized(small(depth=6, routes=[Route(0.5, 0, 1), Route(0.25, 3, 4)], selection=selection)).train()
        _, seen = block_inputs(net, x, t, y, drop_labels=torch.zeros(2, dtype=torch.bool), route_scores=scores)
        arrived = net.blocks[2](seen[2][0], net.t_embedder(t) + net.y_embedder(y, None))  # all tokens, before block 3
        kept[selection] = [[i for i in range(16) if (arrived[b, i] == seen[3][0][b]).all(-1).any()] for b in range(2)]
    expected = []
    for b in range(2):
        norm = arrived[b].abs().sum(-1)
        score = 0.5 * scores[b, 1] + 0.5 * (norm - norm.min()) / (norm.max() - norm.min())
        expected.append(sorted(score.argsort(descending=True)[:12].tolist()))
    assert kept["importance"] == expected
    assert kept["uniform"] == [sorted(scores[b, 1].argsort(descending=True)[:12].tolist()) for b in range(2)]
    assert kept["importance"] != kept["uniform"]
    with pytest.raises(ValueError, match="model.selection='largest' is unknown; choose one of uniform, importance"):
        small(selection="largest")


def test_every_parameter_gets_a_gradient_through_a_route():
    net = randomized(small(routes=[Route(0.5, 1, 2)])).train()
    x, t, y = inputs()
    net(x, t, y).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters() if p.requires_grad)


def test_evaluation_is_dense_unless_routing_is_asked_for():
    routed, plain = randomized(small(routes=[Route(0.5, 1, 2)])).eval(), randomized(small()).eval()
    x, t, y = inputs()
    assert torch.equal(routed(x, t, y), plain(x, t, y))
    _, seen = block_inputs(routed, x, t, y, selection_ratios=[0.75])
    assert [h.shape[1] for h, *_ in seen] == [16, 4, 4, 16, 16]
    assert torch.equal(routed(x, t, y, selection_ratios=0.0), plain(x, t, y))


def test_a_ratio_of_zero_is_the_dense_network_in_training_too():
    routed, plain = randomized(small(routes=[Route(0.0, 1, 2)])).train(), randomized(small()).train()
    x, t, y = inputs()
    keep_all = torch.zeros(2, dtype=torch.bool)
    assert torch.equal(routed(x, t, y, drop_labels=keep_all), plain(x, t, y, drop_labels=keep_all))


@pytest.mark.parametrize(("end", "fp32_layer"), [(2, 3), (-1, 4)])
def test_the_layer_after_a_route_runs_in_float32_under_mixed_precision(end, fp32_layer):
    x, t, y = inputs()
    for fp32_after_route in (True, False):
        net = randomized(small(routes=[Route(0.5, 1, end)], fp32_after_route=fp32_after_route)).train()
        with torch.autocast("cpu", torch.bfloat16):
            _, seen = block_inputs(net, x, t, y)
        in_fp32 = [i for i, (h, c_dtype, autocast) in enumerate(seen) if not autocast]
        assert in_fp32 == ([fp32_layer] if fp32_after_route else [])
        for i in in_fp32:
            assert seen[i][0].dtype == seen[i][1] == torch.float32


def test_the_layer_after_a_route_of_another_router_runs_in_float32_too():
    x, t, y = inputs()
    net = randomized(small()).eval()
    with torch.autocast("cpu", torch.bfloat16):
        _, seen = block_inputs(net, x, t, y, selection_ratios=0.5, router=TokenRouter([Route(0.5, 1, 2)], len(net.blocks)))
    assert [i for i, (_, _, autocast) in enumerate(seen) if not autocast] == [3]


def outputs_and_gradients(net, x, t, y, scores):
    out = net(x, t, y, drop_labels=torch.zeros(len(x), dtype=torch.bool), route_scores=scores)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    gradients = torch.autograd.grad((out * weight).sum(), [x, *(p for p in net.parameters() if p.requires_grad)])
    return [out, *gradients]


def make_blocks_plain(net):
    """Blocks as DiT's own code writes them, with timm's attention and the same parameters."""

    def forward(block, x, c):
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = block.adaLN_modulation(c)[:, None].chunk(6, dim=2)
        x = x + gate_msa * block.attn(block.norm1(x) * (1 + scale_msa) + shift_msa)
        return x + gate_mlp * block.mlp(block.norm2(x) * (1 + scale_mlp) + shift_mlp)

    for block in net.blocks:
        attn = TimmAttention(block.attn.proj.in_features, block.attn.num_heads, qkv_bias=True)
        attn.qkv, attn.proj = block.attn.qkv, block.attn.proj
        block.attn, block.forward = attn, partial(forward, block)


@pytest.mark.parametrize("routes", [[], [Route(0.5, 1, 2)], [Route(0.25, 0, 0), Route(0.75, 2, 3)]])
def test_blocks_compute_what_the_plain_ones_compute_and_so_do_their_gradients(routes):
    x, t, y = inputs(batch=3)
    scores = torch.rand(3, len(routes), 16, generator=torch.Generator().manual_seed(3)) if routes else None
    net = randomized(small(routes=routes)).train()
    names = list(net.state_dict())
    fast = outputs_and_gradients(net, x.requires_grad_(), t, y, scores)
    make_blocks_plain(net)
    assert list(net.state_dict()) == names
    plain = outputs_and_gradients(net, x, t, y, scores)
    for a, b in zip(fast, plain):
        assert (a - b).norm() <= 1e-5 * b.norm()


def test_the_gelu_is_the_tanh_approximation_for_every_type_and_size_of_number():
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([-1e4, -1e-30, 0.0, 1e-30, 1e4])]).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, y_exact = sigmoid_gelu(x), torch.nn.functional.gelu(exact, approximate="tanh")
    assert torch.allclose(y.double(), y_exact, rtol=1e-6, atol=1e-6)
    slope, slope_exact = torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(y_exact.sum(), exact)[0]
    assert torch.allclose(slope.double(), slope_exact, rtol=1e-6, atol=2e-6)
    half = x.detach().bfloat16()
    assert torch.equal(sigmoid_gelu(half), torch.nn.functional.gelu(half, approximate="tanh"))


def test_compiled_networks_alone_get_the_gelu_that_compiles_well():
    net, plain = small(), small()
    compile_network(plain, "none")
    compile_network(net, "blocks")
    assert all(block.mlp.act.forward != sigmoid_gelu for block in plain.blocks)
    assert {block.mlp.act.forward for block in net.blocks} == {sigmoid_gelu}
    assert list(net.state_dict()) == list(plain.state_dict())


def test_patches_are_embedded_as_the_convolution_would_and_lie_in_order():
    embedder, x = dit.PatchEmbed(2, 3, 10), inputs()[0]
    tokens = embedder(x)
    assert torch.allclose(tokens, embedder.proj(x).flatten(2).transpose(1, 2), atol=1e-6)
    assert tokens.is_contiguous()


def test_latents_of_another_size_are_refused():
    with pytest.raises(ValueError, match="latents of 4x16, but the network is for input_size=8"):
        small()(torch.zeros(1, 3, 4, 16), torch.zeros(1), torch.zeros(1, dtype=torch.int64))
