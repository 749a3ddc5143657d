"""LightningDiT beside what test_dit.py compares of both networks: rotary positions, norms and precision."""

import pytest
import torch
from definition import ROUTES, inputs, normalized, randomized, small

from extras import lightningdit
from extras.lightningdit import LightningDiT, RMSNorm, rotate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("error")  # torch warns that types which differ miss its fused kernel
def test_the_norm_is_computed_in_float32_for_every_type_of_tokens_and_gain(dtype, weight_dtype):
    x, norm = (100 * torch.randn(5, 48)).to(dtype), RMSNorm(48, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(48) + 0.5)
    norm.to(weight_dtype)
    expected = normalized({"norm.weight": norm.weight.double()}, "norm", x.double()).to(dtype)
    torch.set_warn_always(True)  # not only once per process
    got = norm(x)
    torch.set_warn_always(False)
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
