"""SiT against closed forms: one step by hand, and the exact velocity, flow and marginals of Gaussian data."""

import math

import numpy as np
import pytest
import torch
from test_edm import LABELS, MEAN, STD, GeneratorRandom, ListedRandom

from sit import SiT
from sit.sampler import FlowSampler


def gaussian_velocity(x, t, y=None):
    """E[eps - x | x_t] for N(MEAN, STD^2) data: x_t ~ N((1 - t) MEAN, (1 - t)^2 STD^2 + t^2), jointly normal with both."""
    t = t.double().reshape(-1, 1, 1, 1)
    variance = (1 - t) ** 2 * STD**2 + t**2
    centred = x.double() - (1 - t) * MEAN
    return t * centred / variance - (MEAN + (1 - t) * STD**2 * centred / variance)


def gaussian_posterior_mean(x, t, y):
    t = torch.as_tensor(t).double().reshape(-1, 1, 1, 1)
    return MEAN + (1 - t) * STD**2 * (x.double() - (1 - t) * MEAN) / ((1 - t) ** 2 * STD**2 + t**2)


def test_data_are_at_0_and_noise_at_1_and_the_network_gets_t_itself():
    x, eps = torch.tensor([[[[1.0, -2.0]]], [[[0.5, 4.0]]]]), torch.tensor([[[[3.0, 0.0]]], [[[-1.0, 1.0]]]])
    seen = {}

    def net(x, t, y, extra):
        seen.update(x=x, t=t, y=y, extra=extra)
        return torch.tensor([1.0, 9.0]).reshape(1, 2, 1, 1).expand(2, 2, 1, 2)  # the second channel must be ignored

    y, t = torch.tensor([4, 2]), torch.tensor([0.25, 0.5])
    loss = SiT().loss(net, x, y, ListedRandom(t, eps), extra=7)
    assert seen["x"].flatten().tolist() == pytest.approx([0.75 + 0.75, -1.5, 0.25 - 0.5, 2.5])
    assert seen["t"].tolist() == [0.25, 0.5] and seen["y"] is y and seen["extra"] == 7
    # The target eps - x is (2, 2) and (-1.5, -3).
    assert loss.tolist() == pytest.approx([(1 + 1) / 2, (2.5**2 + 4**2) / 2])


def test_logit_normal_times_are_the_sigmoid_of_the_scaled_draws():
    x, noise, seen = torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1, 1), []
    sit = SiT(timestep="logit_normal", logit_mean=-1.0, logit_std=2.0)
    sit.loss(lambda x, t, y: seen.append(t) or x, x, LABELS[:2], ListedRandom(torch.tensor([0.5, 1.0]), noise))
    assert seen[0].tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-1.0))])


def test_the_cosine_term_and_its_gradient_are_those_of_1_minus_the_cosine_over_channels():
    g = torch.Generator().manual_seed(0)
    x, eps, v = (torch.randn(3, 5, 2, 4, generator=g) for _ in range(3))
    t, v = torch.rand(3, generator=g), v.requires_grad_()
    a, b = v.detach().double().numpy(), (eps - x).double().numpy()
    norm_a, norm_b = (np.linalg.norm(c, axis=1, keepdims=True) for c in (a, b))
    cosine = (a * b).sum(1, keepdims=True) / (norm_a * norm_b)
    of_cosine = b / (norm_a * norm_b) - cosine * a / norm_a**2  # d cos / d a
    for weight in (0.0, 0.7):
        loss = SiT(cosine_weight=weight).loss(lambda x, t, y: v, x, LABELS[:3], ListedRandom(t, eps))
        assert np.allclose(loss.detach(), ((a - b) ** 2).mean((1, 2, 3)) + weight * (1 - cosine).mean((1, 2, 3)), atol=1e-6)
        (gradient,) = torch.autograd.grad(loss.sum(), v)
        assert np.allclose(gradient, 2 * (a - b) / 40 - weight * of_cosine / 8, atol=1e-6)


def test_denoise_gives_the_posterior_mean_for_the_exact_velocity_and_for_reversed_published_networks():
    def published(x, s, y):  # data at s = 1; it predicts data - noise
        return -gaussian_velocity(x, 1 - s, y)

    g = torch.Generator().manual_seed(0)
    x, t = torch.randn(4, 2, 3, 3, generator=g), torch.tensor([0.05, 0.3, 0.9, 1.0])
    for net in (gaussian_velocity, lambda x, t, y: -published(x, 1 - t, y)):
        D_x = SiT().denoise(net, x, t, LABELS)
        assert torch.allclose(D_x.double(), gaussian_posterior_mean(x, t, LABELS), atol=1e-6)
        assert torch.allclose(D_x[3], torch.full_like(D_x[3], MEAN), atol=1e-6)  # pure noise holds no information about the data


def test_levels_are_evenly_spaced_and_the_last_step_of_the_sde_has_its_own_size():
    assert FlowSampler(num_steps=4, solver="euler").noise_levels() == [1.0, 0.75, 0.5, 0.25, 0.0]
    sde = FlowSampler(num_steps=4, solver="euler_maruyama", last_step_size=0.1)
    assert sde.noise_levels() == pytest.approx([1.0, 0.7, 0.4, 0.1, 0.0])
    assert FlowSampler(num_steps=1, solver="euler_maruyama").noise_levels() == [1.0, 0.0]


def test_the_timestep_shift_equals_that_of_lightningdit_in_reversed_time():
    u = np.linspace(0, 1, 251)  # LightningDiT's time, from noise to data
    published = 0.3 * u / (1 + (0.3 - 1) * u)
    levels = FlowSampler(num_steps=250, timestep_shift=0.3).noise_levels()
    assert (levels[0], levels[-1]) == (1.0, 0.0) and np.allclose(levels, 1 - published, atol=1e-12)
    assert levels[125] == pytest.approx(0.5 / 0.65)  # more steps at high noise: the middle one is at t = 0.77


@pytest.mark.parametrize(("solver", "evaluations"), [("euler", 5), ("heun", 9), ("euler_maruyama", 5)])
def test_the_denoiser_is_called_at_the_levels_that_the_sampler_names(solver, evaluations):
    seen = []

    def denoiser(x, t, y):
        assert x.dtype == torch.float32 and isinstance(t, float) and y is LABELS
        seen.append(t)
        return gaussian_posterior_mean(x, t, y)

    sampler = FlowSampler(num_steps=5, solver=solver)
    out = sampler(denoiser, torch.randn(4, 1, 2, 2), LABELS, GeneratorRandom(4, 0))
    assert len(seen) == evaluations and out.dtype == torch.float32
    assert sorted(set(seen), reverse=True) == pytest.approx(sampler.evaluated_levels())


@pytest.mark.parametrize(("solver", "order", "shift"), [("euler", 1, 1.0), ("heun", 2, 1.0), ("heun", 2, 0.3)])
def test_ode_solvers_converge_to_the_exact_flow_at_their_order(solver, order, shift):
    """In the exact flow of Gaussian data, each point keeps its quantile."""
    noise, errors = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64), []
    for num_steps in (20, 40, 80) if shift == 1 else (80, 160, 320):
        out = FlowSampler(num_steps, solver, shift)(gaussian_posterior_mean, noise, LABELS)
        errors.append((out - (MEAN + STD * noise)).abs().max().item())
    assert [math.log2(a / b) for a, b in zip(errors, errors[1:])] == pytest.approx([order] * 2, abs=0.25)
    assert errors[-1] < {1: 0.05, 2: 0.002}[order]


def test_the_sde_reproduces_mean_and_variance():
    noise = torch.randn(20000, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    sampler = FlowSampler(num_steps=200, solver="euler_maruyama", last_step_size=0.01)
    out = sampler(gaussian_posterior_mean, noise, LABELS, GeneratorRandom(20000, 1))
    assert out.mean().item() == pytest.approx(MEAN, abs=0.015)
    assert out.std().item() == pytest.approx(STD, rel=0.03)
    assert (out - (MEAN + STD * noise)).abs().mean() > 0.1  # fresh noise replaced part of the initial noise


def test_the_sde_refuses_a_timestep_shift():
    with pytest.raises(ValueError, match="timestep_shift=0.3 .*euler_maruyama needs 1"):
        FlowSampler(solver="euler_maruyama", timestep_shift=0.3)


def test_one_step_of_the_sde_by_hand():
    x, z, seen = torch.tensor([[[[2.0]]]]), torch.tensor([[[[-1.0]]]]), []
    sampler = FlowSampler(num_steps=2, solver="euler_maruyama", last_step_size=0.5)

    def denoiser(x, t, y):
        seen.append(x.item())
        return torch.full_like(x, 0.5)

    assert sampler(denoiser, x, LABELS[:1], ListedRandom(z)).item() == 1.5
    # At t = 1: v = 1.5, score = -2, w/2 = 1, step 0.5: 2 - 0.5 (1.5 + 2), and sqrt(2 * 1 * 0.5) = 1 of noise.
    assert seen == [2.0, 0.25 - 1.0]
    # At t = 0.5: v = -2.5, score = 4, w/2 = 0.5, step 0.5, without noise: -0.75 - 0.5 (-2.5 - 2).
