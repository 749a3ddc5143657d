"""Compare outputs, gradients and images of a routed network on the device with those on the CPU in float32."""

import contextlib
import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import dit
from edm import EDM
from edm.sampler import HeunSampler
from extras import lightningdit
from gpu.runs import compiler_for
from guidance import classifier_free, sparse
from latents import autoencoders
from routing_module import Route
from runtime.compilation import compile_network
from runtime.machine import choose_kernels
from sampling.sampler import ImageSampler

# (lowest, highest) relative error of the output, and of all gradients as one vector. In fp32, only the order of sums differs.
# TF32 rounds the inputs of products to 11 bits (2^-12 = 0.02%), bfloat16 rounds every value to 8 bits (2^-9 = 0.2%). Errors add
# up over 12 blocks and average out in sums of many terms. An error above `lowest` shows that the precision was used.
ERRORS = {"fp32": (0, 5e-5), "tf32": (1e-5, 5e-3), "bf16": (1e-4, 0.02)}
GUIDANCES = [partial(classifier_free, cfg_scale=1.5), partial(sparse, w=1.5, r_strong=0.25, r_weak=0.75)]


@contextlib.contextmanager
def products(precision):
    """Inside the context, float32 products use TF32 if `precision` is tf32, and full precision otherwise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def random_network(size, family=dit):
    torch.manual_seed(0)
    name = f"{'DiT' if family is dit else 'LightningDiT'}-{size.backbone}"
    latent_size = 8 if size.data == "data=digits" else 32
    settings = dict(input_size=latent_size, in_channels=3, num_classes=10, routes=[Route(0.5, 2, -4)], init="official_tread")
    net = family.build(name, **settings).train()
    net.y_embedder.embedding_table.weight.data *= 50  # at the initial std of 0.02, labels and guidance would hardly matter
    return net


def output_and_gradients(net, device, precision, batch_size=2):
    net.zero_grad()
    g = torch.Generator().manual_seed(1)
    x, t = torch.randn(batch_size, 3, net.input_size, net.input_size, generator=g), torch.randn(batch_size, generator=g)
    y, scores = torch.arange(batch_size), torch.rand(batch_size, 1, net.num_tokens, generator=g)
    drop = torch.arange(batch_size) == 1
    x, t, y, drop, scores = (tensor.to(device) for tensor in (x, t, y, drop, scores))
    with products(precision):
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            out = net(x, t, y, drop_labels=drop, route_noise=scores)
        out.float().square().sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    return out.detach().float().cpu(), gradients.float().cpu()


@pytest.mark.parametrize(("family", "mode"), [(dit, "none"), (dit, "blocks"), (lightningdit, "none")])
@pytest.mark.parametrize("precision", ERRORS)
def test_outputs_and_gradients_are_as_wrong_as_the_precision_allows(device, size, precision, family, mode):
    if precision != "bf16" and (family, mode) != (dit, "none"):
        pytest.skip("others are compared in bfloat16, in which they are trained")
    if device.type == "cpu" and mode == "blocks":
        pytest.skip("tests/test_speed.py compares them on the CPU")
    net = random_network(size, family)
    expected = output_and_gradients(net, torch.device("cpu"), "fp32")
    fast = copy.deepcopy(net).to(device)
    with compiler_for(device):
        compile_network(fast, mode)
        got = output_and_gradients(fast, device, precision)
    lowest, highest = ERRORS[precision]
    for a, b in zip(got, expected):
        error = ((a - b).norm() / b.norm()).item()
        assert error <= highest
        assert error >= lowest or (precision == "tf32" and device.type == "cpu")  # a CPU has no TF32


@pytest.mark.parametrize("num_keys", [64, 192, 256])  # routes of 75%, 25% and 0% of 256 tokens; 64 and 192 are 64 modulo 128
def test_gradients_of_attention_are_finite_where_all_logits_are_far_below_zero(device, num_keys):
    choose_kernels(device, tf32=True)
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 8, 16, num_keys, 72, generator=g)
    qkv[0, ..., 0], qkv[1, ..., 0] = 32, -32  # logits are -32^2 / 72^0.5 = -121; the fault of cuDNN appears below -89
    q, k, v = (x.to(device, torch.bfloat16).requires_grad_() for x in qkv)
    scaled_dot_product_attention(q, k, v).float().square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("guidance", GUIDANCES)
@pytest.mark.parametrize(("precision", "mode"), [("fp32", "none"), ("bf16", "none"), ("bf16", "blocks")])
def test_the_same_seeds_give_the_images_of_the_cpu(device, size, precision, mode, guidance):
    if device.type == "cpu" and mode == "blocks":
        pytest.skip("inductor takes minutes on a CPU")
    net = random_network(size).eval()
    images, shape = [], {"in_channels": 3, "input_size": net.input_size, "num_classes": 10}
    data = SimpleNamespace(**shape, scale_factor=1.0, latents_mean=None, latents_std=None)
    for where, how in ((torch.device("cpu"), "fp32"), (device, precision)):
        compile_network(net, mode if how == "bf16" else "none")
        sampling = SimpleNamespace(precision=how, rounding="round")
        config = SimpleNamespace(diffusion=EDM(), sampler=HeunSampler(num_steps=4), data=data, sampling=sampling)
        sampler = ImageSampler(net.to(where), config, guidance, autoencoders.Identity(), where)
        with products("fp32"):
            images.append(sampler([5, 6], [1, 2]).astype(float))
    # Rounding may change a pixel by one of 256 levels. Mean errors: bfloat16 0.7 levels, no guidance 30, other labels 70.
    error = abs(images[0] - images[1]).mean()
    assert error < (0.1 if precision == "fp32" else 2), f"the images differ by {error:.2f} levels"
    assert images[0].std() > 10
