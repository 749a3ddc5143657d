"""LightningDiT, against its definition written once more, and names, counts and values written down by hand."""

import math

import pytest
import torch
from conftest import composed, metrics
from torch.nn import functional as F

import dit
from configs import schema
from extras import lightningdit
from extras.lightningdit import LightningDiT, LightningDiTBlock, RMSNorm, rotary_tables, rotate
from routing_module import Route, TokenRouter
from sampling.flops import block_flops
from training import checkpoint as checkpoints
from training.load import load_config, load_network

WIDTH, HEADS, DEPTH, GRID, CHANNELS, CLASSES = 48, 3, 4, 4, 3, 5  # heads of 16
N = GRID**2
ROUTES = {"dense": [], "one": [Route(0.5, 1, 2)], "two": [Route(0.25, 0, 0), Route(0.75, 2, 3)]}


def small(patch=2, **kwargs):
    torch.manual_seed(0)
    sizes = dict(patch_size=patch, in_channels=CHANNELS, num_classes=CLASSES, depth=DEPTH, width=WIDTH, num_heads=HEADS)
    return LightningDiT(input_size=patch * GRID, **sizes | kwargs)


def randomized(net):
    """No weight is zero, and no gain is one, so that every part matters."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=g) * 0.1)
    return net


def inputs(patch=2, batch=3):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(batch, CHANNELS, patch * GRID, patch * GRID, generator=g)
    return x, torch.rand(batch, generator=g), torch.arange(batch), torch.rand(batch, 2, N, generator=g)


# ----------------------------------------------------------------------------------------------------------------------
# The definition: float64, complex numbers for the rotation, a softmax that is written out, and tokens that skip are barred as
# keys and put back, instead of taken out.


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def normalize(x, gain):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


def modulation(w, name, c, count):
    return linear(w, f"{name}.adaLN_modulation.1", F.silu(c))[:, None].split(WIDTH, dim=2)[:count]


def turned(x):
    """(B, H, N, d): the pairs of neighbouring channels as complex numbers, times e^(i position frequency)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    num_frequencies = pairs.shape[-1] // 2
    frequencies = [10000 ** (-i / num_frequencies) for i in range(num_frequencies)]
    angles = torch.tensor(
        [[row * f for f in frequencies] + [column * f for f in frequencies] for row in range(GRID) for column in range(GRID)],
        dtype=torch.float64,
    )
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def fixed_positions():
    """Sines, then cosines, of the column in the first half of the channels and of the row in the second."""
    quarter = WIDTH // 4
    omega = [10000 ** (-i / quarter) for i in range(quarter)]
    rows = [
        [function(place * w) for place in (column, row) for function in (math.sin, math.cos) for w in omega]
        for row in range(GRID)
        for column in range(GRID)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def definition(w, x, t, y, windows):
    """Args:
    w: weights by their published names, float64.
    windows: (first block, last block, (B, N) bool: the tokens that skip).
    """
    patch = w["x_embedder.proj.weight"].shape[-1]
    h = F.conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=patch).flatten(2).mT + fixed_positions()
    angles = t[:, None] * 10000 ** (-torch.arange(128, dtype=torch.float64) / 128)
    c = linear(w, "t_embedder.mlp.2", F.silu(linear(w, "t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], 1))))
    c = c + w["y_embedder.embedding_table.weight"][y]
    for i in range(DEPTH):
        skips = [skip for first, last, skip in windows if first <= i <= last]
        before, name = h, f"blocks.{i}"
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation(w, name, c, 6)
        a = normalize(h, w[f"{name}.norm1.weight"]) * (1 + scale1) + shift1
        q, k, v = linear(w, f"{name}.attn.qkv", a).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        logits = turned(q) @ turned(k).mT / math.sqrt(q.shape[-1])
        for skip in skips:
            logits = logits.masked_fill(skip[:, None, None], -math.inf)
        attended = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
        h = h + gate1 * linear(w, f"{name}.attn.proj", attended)
        a = normalize(h, w[f"{name}.norm2.weight"]) * (1 + scale2) + shift2
        first_half, second_half = linear(w, f"{name}.mlp.w12", a).tensor_split(2, dim=2)
        h = h + gate2 * linear(w, f"{name}.mlp.w3", F.silu(first_half) * second_half)
        for skip in skips:
            h = torch.where(skip[..., None], before, h)
    shift, scale = modulation(w, "final_layer", c, 2)
    out = linear(w, "final_layer.linear", normalize(h, w["final_layer.norm_final.weight"]) * (1 + scale) + shift)
    return torch.einsum("brcpqk->bkrpcq", out.view(-1, GRID, GRID, patch, patch, CHANNELS)).flatten(2, 3).flatten(3)


def skipping(routes, scores):
    """The tokens with the lowest scores, of each route."""
    windows = []
    for i, route in enumerate(routes):
        lowest = scores[:, i].argsort(dim=1)[:, : int(N * route.selection_ratio)]
        skip = torch.zeros(len(scores), N, dtype=torch.bool).scatter(1, lowest, True)
        windows.append((route.start_layer_idx, route.end_layer_idx, skip))
    return windows


def with_gradients(out, x, weights):
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *weights])]


def worst_error(net, routes, patch):
    """Of the output, and of the gradients of the latents and of every weight, relative to the largest value of each."""
    x, t, y, scores = inputs(patch)
    scores = scores[:, : len(routes)] if routes else None
    out = net(x.requires_grad_(), t, y, drop_labels=torch.zeros(len(x), dtype=torch.bool), route_scores=scores)
    got = with_gradients(out, x, [p for p in net.parameters() if p.requires_grad])
    w = {name: p.detach().double().requires_grad_(p.requires_grad) for name, p in net.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    expected = with_gradients(
        definition(w, x64, t.double(), y, skipping(routes, scores)), x64, [p for p in w.values() if p.requires_grad]
    )
    assert all(value.any() for value in expected)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected))


@pytest.mark.parametrize("patch", [1, 2])
@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES)
def test_outputs_and_gradients_are_those_of_the_definition(routes, patch):
    assert worst_error(randomized(small(patch, routes=routes)).train(), routes, patch) < 1e-5


def first_rows(x, ids_keep, start_route=TokenRouter.start_route):
    return x[:, : ids_keep.shape[1]] if x.shape[2] == WIDTH // HEADS else start_route(x, ids_keep)


def transpose_grid(net):
    for table in net.feat_rope.values():
        table.data = table.data.view(GRID, GRID, -1).transpose(0, 1).flatten(0, 1)


def pair_distant_channels(net):
    """The frequencies one after the other, as where channel i is turned with channel i + d/4, and not each of them twice."""
    for table in net.feat_rope.values():
        table.data = torch.cat([half[:, ::2].repeat(1, 2) for half in table.data.chunk(2, dim=1)], dim=1)


@pytest.mark.parametrize("wrong", ["tables of other tokens", "columns before rows", "distant pairs", "no rotation"])
def test_wrong_rotary_positions_do_not_pass_as_the_definition(wrong, monkeypatch):
    net = randomized(small(routes=ROUTES["one"])).train()
    if wrong == "tables of other tokens":
        monkeypatch.setattr(TokenRouter, "start_route", staticmethod(first_rows))
    elif wrong == "columns before rows":
        transpose_grid(net)
    elif wrong == "distant pairs":
        pair_distant_channels(net)
    else:
        monkeypatch.setattr(lightningdit, "rotate", lambda x, cos, sin: x)
    assert worst_error(net, ROUTES["one"], 2) > 1e-2


# ----------------------------------------------------------------------------------------------------------------------
# Names, counts and values.


@pytest.mark.parametrize(
    ("backbone", "count", "hidden"),
    [
        ("LightningDiT-B/1", 130_359_584, 2048),
        ("LightningDiT-L/2", 458_087_520, 2730),
        ("LightningDiT-XL/1", 674_961_824, 3072),  # published as 675M
    ],
)
def test_sizes_are_those_of_the_published_networks(backbone, count, hidden):
    with torch.device("meta"):
        net = lightningdit.build(backbone, input_size=16, in_channels=32, num_classes=1000)
    assert net.blocks[0].mlp.w12.out_features == 2 * hidden and net.blocks[0].mlp.w3.in_features == hidden
    # A block: modulation, attention and MLP with their biases, and two gains.
    D, patch = net.pos_embed.shape[-1], int(backbone[-1])
    block = 6 * D * (D + 1) + 4 * D * (D + 1) + 2 * hidden * (D + 1) + D * (hidden + 1) + 2 * D
    embedders = D * (32 * patch**2 + 1) + D * (256 + 1) + D * (D + 1) + 1001 * D
    final = 2 * D * (D + 1) + 32 * patch**2 * (D + 1) + D
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == count == len(net.blocks) * block + embedders + final


@pytest.mark.parametrize("backbone", lightningdit.BACKBONES)
def test_every_backbone_builds_by_name(backbone):
    with torch.device("meta"):
        net = lightningdit.build(backbone, input_size=4, in_channels=7, num_classes=3).eval()
        x = torch.zeros(2, 7, 4, 4)
        assert net(x, torch.zeros(2), torch.zeros(2, dtype=torch.int64)).shape == x.shape


def test_an_unknown_backbone_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"model.backbone='LightningDiT-H/1' is unknown; choose one of .*LightningDiT-XL/1"):
        lightningdit.build("LightningDiT-H/1", input_size=16, in_channels=32, num_classes=10)


def test_heads_that_two_axes_of_pairs_do_not_fill_are_refused():
    with pytest.raises(ValueError, match="width=48 makes 8 heads of 6; rotary positions need a multiple of 4"):
        small(num_heads=8)


def published_shapes(patch=2, hidden=128):
    """Names and shapes of a published state dict: buffers of the rotary positions too, no gain or bias beside these."""
    shapes = {
        "pos_embed": (1, N, WIDTH),
        "x_embedder.proj.weight": (WIDTH, CHANNELS, patch, patch),
        "x_embedder.proj.bias": (WIDTH,),
        "t_embedder.mlp.0.weight": (WIDTH, 256),
        "t_embedder.mlp.0.bias": (WIDTH,),
        "t_embedder.mlp.2.weight": (WIDTH, WIDTH),
        "t_embedder.mlp.2.bias": (WIDTH,),
        "y_embedder.embedding_table.weight": (CLASSES + 1, WIDTH),
        "feat_rope.freqs_cos": (N, WIDTH // HEADS),
        "feat_rope.freqs_sin": (N, WIDTH // HEADS),
        "final_layer.norm_final.weight": (WIDTH,),
        "final_layer.linear.weight": (patch * patch * CHANNELS, WIDTH),
        "final_layer.linear.bias": (patch * patch * CHANNELS,),
        "final_layer.adaLN_modulation.1.weight": (2 * WIDTH, WIDTH),
        "final_layer.adaLN_modulation.1.bias": (2 * WIDTH,),
    }
    for i in range(DEPTH):
        shapes |= {
            f"blocks.{i}.norm1.weight": (WIDTH,),
            f"blocks.{i}.attn.qkv.weight": (3 * WIDTH, WIDTH),
            f"blocks.{i}.attn.qkv.bias": (3 * WIDTH,),
            f"blocks.{i}.attn.proj.weight": (WIDTH, WIDTH),
            f"blocks.{i}.attn.proj.bias": (WIDTH,),
            f"blocks.{i}.norm2.weight": (WIDTH,),
            f"blocks.{i}.mlp.w12.weight": (2 * hidden, WIDTH),
            f"blocks.{i}.mlp.w12.bias": (2 * hidden,),
            f"blocks.{i}.mlp.w3.weight": (WIDTH, hidden),
            f"blocks.{i}.mlp.w3.bias": (WIDTH,),
            f"blocks.{i}.adaLN_modulation.1.weight": (6 * WIDTH, WIDTH),
            f"blocks.{i}.adaLN_modulation.1.bias": (6 * WIDTH,),
        }
    return shapes


def test_published_weights_load_strictly_and_bring_their_own_tables():
    g = torch.Generator().manual_seed(3)
    published = {name: torch.randn(shape, generator=g) * 0.1 for name, shape in published_shapes().items()}
    net = small()
    net.load_state_dict(published, strict=True)
    assert net.state_dict().keys() == published.keys()
    assert torch.equal(net.token_tables()[1][0], published["feat_rope.freqs_sin"])
    x, t, y, _ = inputs()
    assert net.eval()(x, t, y).shape == x.shape


def test_the_tables_of_the_published_network_at_some_places():
    cos, sin = rotary_tables(16, 72)
    assert cos.shape == sin.shape == (256, 72)
    row, column = 5, 11
    for pair in (0, 1, 17):  # of the 18 pairs of each axis
        for half, position in ((0, row), (36, column)):
            angle = position * 10000 ** (-pair / 18)
            for channel in (half + 2 * pair, half + 2 * pair + 1):
                assert cos[16 * row + column, channel].item() == pytest.approx(math.cos(angle), abs=1e-6)
                assert sin[16 * row + column, channel].item() == pytest.approx(math.sin(angle), abs=1e-6)
    wide = rotary_tables(32, 72)[0].view(32, 32, 72)
    assert torch.equal(wide[:16, :16], cos.view(16, 16, 72))  # a larger grid goes on counting; it is not compressed


def test_rotation_turns_pairs_and_keeps_the_precision_of_the_tables():
    x = torch.tensor([[1.0, 0.0, 0.0, 2.0]])
    quarter_turn = torch.zeros(1, 4), torch.ones(1, 4)
    assert torch.equal(rotate(x, *quarter_turn), torch.tensor([[0.0, 1.0, -2.0, 0.0]]))
    assert rotate(x.bfloat16(), *quarter_turn).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_computed_in_float32_for_every_type_of_tokens_and_gain(dtype, weight_dtype):
    x, norm = (100 * torch.randn(5, 48)).to(dtype), RMSNorm(48, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(48) + 0.5)
    norm.to(weight_dtype)
    expected = normalize(x.double(), norm.weight.double()).to(dtype)
    got = norm(x)
    assert got.dtype == dtype
    assert torch.allclose(got, expected, rtol=1e-6) if dtype == torch.float32 else (got == expected).float().mean() > 0.99


def test_under_mixed_precision_queries_are_turned_in_float32_and_tables_are_not_rounded(monkeypatch):
    seen = []

    def record(x, cos, sin):
        seen.append((x.dtype, cos.dtype, rotate(x, cos, sin).dtype))
        return rotate(x, cos, sin)

    monkeypatch.setattr(lightningdit, "rotate", record)
    net = randomized(small(routes=ROUTES["one"])).train()
    x, t, y, scores = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        net(x, t, y, route_scores=scores[:, :1])
    in_bf16, in_fp32 = (torch.bfloat16, torch.float32, torch.float32), (torch.float32,) * 3
    assert seen == [in_bf16, in_bf16, in_bf16, in_fp32]  # the block after the route runs in float32


def test_it_starts_as_dit_does_with_gains_of_one():
    net = small().eval()
    h, c, tables = torch.randn(2, N, WIDTH), torch.randn(2, WIDTH), net.token_tables()
    for block in net.blocks:
        assert torch.equal(block(h, c, *tables), h)
    x, t, y, _ = inputs()
    assert not net(x, t, y).any()
    state = net.state_dict()
    assert all((state[name] == 1).all() for name in state if "norm" in name)
    assert 0.9 < state["blocks.0.mlp.w12.weight"].abs().max() / math.sqrt(6 / (WIDTH + 256)) <= 1  # Xavier-uniform
    official = small(init="official_tread").state_dict()
    assert official["final_layer.linear.weight"].any() and official["blocks.3.adaLN_modulation.1.weight"].any()


def test_every_weight_gets_a_gradient_through_a_route_and_the_tables_get_none():
    net = randomized(small(routes=ROUTES["one"])).train()
    x, t, y, _ = inputs()
    net(x, t, y).square().sum().backward()
    fixed = {name for name, p in net.named_parameters() if not p.requires_grad}
    assert fixed == {"pos_embed", "feat_rope.freqs_cos", "feat_rope.freqs_sin"}
    assert all((p.grad is None) == (name in fixed) and (name in fixed or p.grad.any()) for name, p in net.named_parameters())


def test_flops_of_a_block_are_those_counted_by_hand():
    D, hidden = WIDTH, 128
    per_token = 4 * D * D + 3 * D * hidden
    assert block_flops(LightningDiTBlock(D, HEADS), N) == 2 * N * per_token + 4 * N * N * D + 2 * 6 * D * D


def test_dit_hands_its_blocks_no_tables():
    net = dit.DiT(
        input_size=8, patch_size=2, in_channels=3, num_classes=5, depth=2, width=32, num_heads=2, routes=[Route(0.5, 0, 1)]
    )
    seen = []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda module, args: seen.append(len(args)))
    net.train()(torch.zeros(2, 3, 8, 8), torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    assert seen == [2, 2]


# ----------------------------------------------------------------------------------------------------------------------
# Configuration and runs.


@pytest.mark.parametrize(
    ("choices", "backbone"),
    [
        (["model=lightningdit"], "LightningDiT-XS/2"),
        (["model=tread"], "DiT-XS/2"),
        (["model=lightningdit_tread", "data=custom"], "LightningDiT-B/1"),
        (["model=lightningdit_tread", "model.backbone=LightningDiT-XL/1"], "LightningDiT-XL/1"),
    ],
)
def test_the_backbone_is_of_the_chosen_model(choices, backbone):
    assert schema.check(composed(choices), schema.TrainConfig).model.backbone == backbone


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            ["model=lightningdit", "model.backbone=DiT-S/2"],
            "model.backbone=DiT-S/2 is for model=dit or model=tread; use that, or one for model=lightningdit: LightningDiT-XS/1",
        ),
        (
            ["model=tread", "model.backbone=LightningDiT-B/1"],
            "model.backbone=LightningDiT-B/1 is for model=lightningdit or model=lightningdit_tread; use that, or one for "
            "model=tread: DiT-XS/1, ",
        ),
        (["model=lightningdit", "model.backbone=LightningDiT-XL1"], "is not accepted; .*; nearest: LightningDiT-XL/1, "),
        (["model=lightningdit", "model.backbone=LightningDiT-XL/4"], "is not accepted; .*; nearest: LightningDiT-XL/2, "),
    ],
)
def test_a_backbone_of_another_model_is_refused_with_those_that_fit(choices, message):
    with pytest.raises(ValueError, match=message):
        schema.check(composed(choices), schema.TrainConfig)


def test_a_routed_run_trains_checkpoints_resumes_and_is_sampled_with_sparse_guidance(train):
    settings = ["model=lightningdit_tread", "train.num_steps=30", "train.batch_size=16", "checkpoint.every=20"]
    settings += ["guidance=sparse", "sample.every=30", "sample.num_samples=2", "diffusion.sampler.num_steps=2"]
    run = train("run", *settings)
    losses = {record["step"]: record["loss"] for record in metrics(run) if "loss" in record}
    assert sum(losses[step] for step in range(26, 31)) < 0.8 * sum(losses[step] for step in range(1, 6))
    assert (run / "samples" / "step_0000030.png").exists()
    last = run / "checkpoints" / "step_0000030"
    stored, average = checkpoints.load_weights(last, "raw"), checkpoints.load_weights(last, "ema")
    net = load_network(last, load_config(last), "ema", torch.device("cpu"))
    assert type(net) is LightningDiT and stored.keys() == average.keys() == net.state_dict().keys()
    assert torch.equal(average["feat_rope.freqs_cos"], rotary_tables(4, 32)[0])
    (run / "checkpoints" / "step_0000030").rename(run / "gone")
    train("run", *settings)
    again = checkpoints.load_weights(last, "raw")
    assert all(torch.equal(again[name], stored[name]) for name in stored)
