"""A second implementation of DiT and LightningDiT, for comparison: float64, an explicit softmax, complex numbers for the
rotation. It masks skipped tokens as keys and restores them after each block, instead of removing them."""

import itertools
import math

import torch
from torch.nn import functional as F

from dit import DiT
from extras.lightningdit import LightningDiT
from extras.sprint import SPRINT
from routing_module import Route

WIDTH, HEADS, DEPTH, GRID, CHANNELS, CLASSES = 48, 3, 4, 4, 3, 5  # heads of 16
N = GRID**2
NETWORKS = {"dit": DiT, "lightningdit": LightningDiT}
ROUTES = {"dense": [], "one": [Route(0.5, 1, 2)], "two": [Route(0.25, 0, 0), Route(0.75, 2, 3)]}


def small(network=DiT, patch=2, **settings):
    torch.manual_seed(0)
    sizes = dict(patch_size=patch, in_channels=CHANNELS, num_classes=CLASSES, depth=DEPTH, width=WIDTH, num_heads=HEADS)
    return network(input_size=patch * GRID, **sizes | settings)


def randomized(net):
    """Add noise to all trained weights and return the network. No weight is zero and no gain is one: every part matters."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=g) * 0.1)
    return net


def inputs(patch=2, batch=3):
    """Return latents, noise levels, labels, and scores of two routes."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(batch, CHANNELS, patch * GRID, patch * GRID, generator=g)
    return x, torch.rand(batch, generator=g), torch.arange(batch), torch.rand(batch, 2, N, generator=g)


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def normalized(w, name, x):
    """Apply RMSNorm if there is a gain, otherwise LayerNorm."""
    if f"{name}.weight" in w:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x):
    """Rotate x (B, H, N, d): pairs of neighbouring channels are complex numbers, multiplied by e^(i position frequency)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    frequencies = [10000 ** (-i / (pairs.shape[-1] // 2)) for i in range(pairs.shape[-1] // 2)]
    rows = [[p * f for p in (row, column) for f in frequencies] for row in range(GRID) for column in range(GRID)]
    angles = torch.tensor(rows, dtype=torch.float64)
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def fixed_positions(width):
    """Return sines, then cosines, of the column in the first half of the channels and of the row in the second."""
    omega = [10000 ** (-i / (width // 4)) for i in range(width // 4)]
    rows = [
        [function(place * w) for place in (column, row) for function in (math.sin, math.cos) for w in omega]
        for row in range(GRID)
        for column in range(GRID)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def skipping(h, route, uniform, selection):
    """Return (B, N) bool, true for the tokens with the lowest scores; for `grid`, with ratios of quarters, in each 2x2 group."""
    if selection == "grid":
        skip = torch.zeros(len(h), N, dtype=torch.bool)
        for sample, corner in itertools.product(range(len(h)), range(N)):
            if corner // GRID % 2 == corner % GRID % 2 == 0:
                group = [corner, corner + 1, corner + GRID, corner + GRID + 1]
                group.sort(key=lambda token: uniform[sample, token].item())
                skip[sample, group[: int(4 * route.selection_ratio)]] = True
        return skip
    score = uniform.double()
    if selection == "importance":
        norm = h.detach().abs().sum(-1)
        low, high = norm.min(1, keepdim=True).values, norm.max(1, keepdim=True).values
        score = (score + (norm - low) / (high - low)) / 2
    lowest = score.argsort(dim=1)[:, : int(N * route.selection_ratio)]
    return torch.zeros(len(h), N, dtype=torch.bool).scatter(1, lowest, True)


def definition(w, x, t, y, routes=(), scores=None, selection="uniform", drop_paths=None, depth=DEPTH):
    """Return the output in float64 for weights with the published names. A route end that has weights works as in SPRINT."""
    rotary, patch = "feat_rope.freqs_cos" in w, w["x_embedder.proj.weight"].shape[-1]
    h = F.conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=patch).flatten(2).mT
    h = h + fixed_positions(h.shape[2])
    angles = t[:, None] * 10000 ** (-torch.arange(128, dtype=torch.float64) / 128)
    c = linear(w, "t_embedder.mlp.2", F.silu(linear(w, "t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], 1))))
    c = F.silu(c + w["y_embedder.embedding_table.weight"][y])
    skip = None
    for i in range(depth):
        for number, route in enumerate(routes):
            if route.start_layer_idx == i:
                skip, last = skipping(h, route, scores[:, number], selection), route.end_layer_idx
                end, entered = f"route_end_modules.{route.start_layer_idx}_{last}", h
        before, name = h, f"blocks.{i}"
        shift1, scale1, gate1, shift2, scale2, gate2 = linear(w, f"{name}.adaLN_modulation.1", c)[:, None].chunk(6, dim=2)
        a = normalized(w, f"{name}.norm1", h) * (1 + scale1) + shift1
        q, k, v = linear(w, f"{name}.attn.qkv", a).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        logits = (turned(q) @ turned(k).mT if rotary else q @ k.mT) / math.sqrt(q.shape[-1])
        if skip is not None:
            logits = logits.masked_fill(skip[:, None, None], -math.inf)
        h = h + gate1 * linear(w, f"{name}.attn.proj", (logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        a = normalized(w, f"{name}.norm2", h) * (1 + scale2) + shift2
        if rotary:
            first, second = linear(w, f"{name}.mlp.w12", a).tensor_split(2, dim=2)
            a = linear(w, f"{name}.mlp.w3", F.silu(first) * second)
        else:
            a = linear(w, f"{name}.mlp.fc1", a)
            a = linear(w, f"{name}.mlp.fc2", a / 2 * (1 + (math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)).tanh()))
        h = h + gate2 * a
        if skip is not None:
            h = torch.where(skip[..., None], before, h)
            if i == last and f"{end}.mask_token" in w:
                h = torch.where((skip | drop_paths[:, None])[..., None], w[f"{end}.mask_token"], h)
                h = linear(w, f"{end}.proj", torch.cat([entered, h], dim=2))
            skip = skip if i < last else None
    shift, scale = linear(w, "final_layer.adaLN_modulation.1", c)[:, None].chunk(2, dim=2)
    out = linear(w, "final_layer.linear", normalized(w, "final_layer.norm_final", h) * (1 + scale) + shift)
    return torch.einsum("brcpqk->bkrpcq", out.view(len(x), GRID, GRID, patch, patch, -1)).flatten(2, 3).flatten(3)


def with_gradients(out, x, weights):
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), [x, *weights])]


def worst_error(net, routes, patch=2, selection="uniform"):
    """Return the largest error of the output and all gradients (latents, weights), each relative to its largest value."""
    x, t, y, scores = inputs(patch)
    dropped = torch.tensor([False, True, False])
    drops = {"drop_labels": dropped} | ({"drop_paths": dropped.roll(1)} if isinstance(net, SPRINT) else {})
    out = net(x.requires_grad_(), t, y, **drops, route_noise=scores[:, : len(routes)])
    got = with_gradients(out, x, [p for p in net.parameters() if p.requires_grad])
    w = {name: p.detach().double().requires_grad_(p.requires_grad) for name, p in net.named_parameters()}
    x, y = x.detach().double().requires_grad_(), y.masked_fill(dropped, CLASSES)
    out = definition(w, x, t.double(), y, routes, scores, selection, drops.get("drop_paths"))
    expected = with_gradients(out, x, [p for p in w.values() if p.requires_grad])
    assert all(value.any() for value in expected)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected, strict=True))
