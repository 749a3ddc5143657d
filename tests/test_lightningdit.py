"""LightningDiT beside what test_dit.py compares of both networks: rotary positions, norms and precision."""

import pytest
import torch
from definition import GRID, HEADS, ROUTES, WIDTH, inputs, normalized, randomized, small, worst_error

from extras import lightningdit
from extras.lightningdit import LightningDiT, RMSNorm, rotate
from routing_module import TokenRouter


def first_rows(x, ids_keep, start_route=TokenRouter.start_route):
    return x[:, : ids_keep.shape[1]] if x.shape[2] == WIDTH // HEADS else start_route(x, ids_keep)


def transpose_grid(table):
    return table.view(GRID, GRID, -1).transpose(0, 1).flatten(0, 1)


def pair_distant_channels(table):
    """The frequencies one after the other, as where channel i is turned with channel i + d/4, and not each of them twice."""
    return torch.cat([half[:, ::2].repeat(1, 2) for half in table.chunk(2, dim=1)], dim=1)


@pytest.mark.parametrize("wrong", ["tables of other tokens", transpose_grid, pair_distant_channels, "no rotation"])
def test_wrong_rotary_positions_do_not_pass_as_the_definition(wrong, monkeypatch):
    net = randomized(small(LightningDiT, routes=ROUTES["one"])).train()
    if wrong == "tables of other tokens":
        monkeypatch.setattr(TokenRouter, "start_route", staticmethod(first_rows))
    elif wrong == "no rotation":
        monkeypatch.setattr(lightningdit, "rotate", lambda x, cos, sin: x)
    else:
        for table in net.feat_rope.values():
            table.data = wrong(table.data)
    assert worst_error(net, ROUTES["one"]) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_computed_in_float32_for_every_type_of_tokens_and_gain(dtype, weight_dtype):
    x, norm = (100 * torch.randn(5, 48)).to(dtype), RMSNorm(48, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(48) + 0.5)
    norm.to(weight_dtype)
    expected = normalized({"norm.weight": norm.weight.double()}, "norm", x.double()).to(dtype)
    got = norm(x)
    assert got.dtype == dtype
    assert torch.allclose(got, expected, rtol=1e-6) if dtype == torch.float32 else (got == expected).float().mean() > 0.99


def test_under_mixed_precision_queries_are_turned_in_float32_and_tables_are_not_rounded(monkeypatch):
    seen = []

    def record(x, cos, sin):
        seen.append((x.dtype, cos.dtype, rotate(x, cos, sin).dtype))
        return rotate(x, cos, sin)

    monkeypatch.setattr(lightningdit, "rotate", record)
    net = randomized(small(LightningDiT, routes=ROUTES["one"])).train()
    x, t, y, scores = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        net(x, t, y, route_scores=scores[:, :1])
    in_bf16, in_fp32 = (torch.bfloat16, torch.float32, torch.float32), (torch.float32,) * 3
    assert seen == [in_bf16, in_bf16, in_bf16, in_fp32]  # the block after the route runs in float32


def test_the_tables_are_not_trained_and_heads_that_they_do_not_fill_are_refused():
    fixed = {name for name, p in small(LightningDiT).named_parameters() if not p.requires_grad}
    assert fixed == {"pos_embed", "feat_rope.freqs_cos", "feat_rope.freqs_sin"}
    with pytest.raises(ValueError, match="width=48 is no multiple of 4 x num_heads=8"):
        small(LightningDiT, num_heads=8)
