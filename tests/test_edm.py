"""EDM against closed forms: Table 1 by hand, and the exact probability-flow solution of a Gaussian."""

import math

import pytest
import torch

from edm import EDM
from edm.sampler import HeunSampler

MEAN, STD = 0.3, 0.5  # the toy data: one Gaussian
LABELS = torch.zeros(4, dtype=torch.int64)


class ListedRandom:
    """Returns prepared tensors in order instead of random ones."""

    def __init__(self, *tensors):
        self.tensors = list(tensors)

    def randn(self, *shape):
        tensor = self.tensors.pop(0)
        assert tensor.shape[1:] == shape
        return tensor

    rand = randn


class GeneratorRandom:
    """Draws normal numbers from a seeded generator and counts its calls."""

    def __init__(self, batch, seed):
        self.batch, self.generator, self.count = batch, torch.Generator().manual_seed(seed), 0

    def randn(self, *shape):
        self.count += 1
        return torch.randn(self.batch, *shape, generator=self.generator)


def test_denoise_scales_input_and_output_of_the_network():
    x, y = torch.full((1, 2, 1, 1), 3.0), torch.tensor([4])
    seen = {}

    def net(x, t, y, extra):
        seen.update(x=x, t=t, y=y, extra=extra)
        return torch.full((1, 4, 1, 1), 2.0)

    D_x = EDM(sigma_data=0.9).denoise(net, x, torch.tensor([1.2]), y, extra=7)  # 0.9^2 + 1.2^2 = 1.5^2
    assert seen["x"].flatten().tolist() == pytest.approx([3 / 1.5] * 2)
    assert seen["t"].tolist() == pytest.approx([math.log(1.2) / 4])
    assert seen["y"] is y and seen["extra"] == 7
    assert D_x.shape == x.shape
    assert D_x.flatten().tolist() == pytest.approx([3 * 0.81 / 2.25 + 2 * 1.08 / 1.5] * 2)


def test_loss_is_the_weighted_squared_error_per_sample():
    edm = EDM(sigma_data=0.7, P_mean=-1.0, P_std=2.0)
    x = torch.tensor([[[[1.0, -1.0]]], [[[0.5, 2.0]]]])
    draws, noise = torch.tensor([0.5, 1.0]), torch.tensor([[[[1.0, 2.0]]], [[[-1.0, 0.0]]]])
    loss = edm.loss(lambda x, t, y: torch.zeros_like(x), x, LABELS[:2], ListedRandom(draws, noise))
    expected = []
    for sigma, clean, eps in ((1.0, (1.0, -1.0), (1.0, 2.0)), (math.e, (0.5, 2.0), (-1.0, 0.0))):
        c_skip, weight = 0.49 / (sigma**2 + 0.49), (sigma**2 + 0.49) / (0.7 * sigma) ** 2
        expected.append(weight * sum((c_skip * (a + sigma * b) - a) ** 2 for a, b in zip(clean, eps)) / 2)
    assert loss.tolist() == pytest.approx(expected, rel=1e-5)


def test_noise_levels_follow_equation_5():
    levels = HeunSampler(num_steps=3, sigma_min=1.0, sigma_max=27.0, rho=3.0).noise_levels()
    assert levels == pytest.approx([27.0, 8.0, 1.0, 0.0])
    assert HeunSampler(num_steps=1).noise_levels() == pytest.approx([80.0, 0.0])


def gaussian_denoiser(x, sigma, y):
    """Return the posterior mean of N(MEAN, STD^2) data."""
    s2 = sigma**2
    return (STD**2 * x.double() + s2 * MEAN) / (STD**2 + s2)


def test_sampler_converges_to_the_exact_solution_at_second_order():
    noise = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = MEAN + (10.0 * noise - MEAN) * STD / math.sqrt(STD**2 + 10.0**2)
    errors = [
        (HeunSampler(num_steps, sigma_max=10.0)(gaussian_denoiser, noise, LABELS) - exact).abs().max().item()
        for num_steps in (24, 48, 96)
    ]
    assert errors[2] < 2e-3
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.15)


def test_churn_keeps_the_distribution_of_the_data():
    noise = torch.randn(20000, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    out = HeunSampler(num_steps=80, S_churn=40.0)(gaussian_denoiser, noise, LABELS, GeneratorRandom(20000, 1))
    assert out.mean().item() == pytest.approx(MEAN, abs=0.02)
    assert out.std().item() == pytest.approx(STD, rel=0.03)
    deterministic = HeunSampler(num_steps=80)(gaussian_denoiser, noise, LABELS)
    assert (out - deterministic).abs().mean() > 0.1


@pytest.mark.parametrize("churn", [0.0, 4.0])
def test_the_sampler_lists_the_levels_that_it_evaluates_and_adds_noise_between_s_min_and_s_max(churn):
    sampler, random, seen = HeunSampler(num_steps=8, S_churn=churn, S_min=0.05, S_max=20.0), GeneratorRandom(4, 0), []

    def denoiser(x, sigma, y):
        assert x.dtype == torch.float32 and isinstance(sigma, float) and y is LABELS
        seen.append(sigma)
        return gaussian_denoiser(x, sigma, y)

    out = sampler(denoiser, torch.randn(4, 1, 2, 2), LABELS, random)
    assert len(seen) == 15 and out.dtype == torch.float32
    assert sorted(set(seen), reverse=True) == pytest.approx(sampler.evaluated_levels())
    inside = sum(0.05 <= level <= 20.0 for level in sampler.noise_levels()[:-1])
    assert random.count == (inside if churn else 0) and 0 < inside < 8


def test_every_step_gets_its_share_of_the_churn_below_the_limit():
    # Algorithm 2: gamma = S_churn / num_steps = 2 / 8 is below its limit of sqrt(2) - 1. S_churn itself is above the limit.
    sampler, calls = HeunSampler(num_steps=8, S_churn=2.0, S_noise=1.5), []

    def denoiser(x, sigma, y):
        calls.append((x[0].item(), sigma))
        return torch.zeros_like(x)

    sampler(denoiser, torch.full((1, 1, 1, 1), 3.0), LABELS[:1], ListedRandom(*[torch.ones(1, 1, 1, 1)] * 8))
    euler_steps = [sigma for _, sigma in calls[::2]]  # every second call belongs to the correction
    assert euler_steps == pytest.approx([1.25 * sigma for sigma in sampler.noise_levels()[:-1]])
    assert calls[0][0] == pytest.approx(3.0 * 80 + 1.5 * math.sqrt((1.25 * 80) ** 2 - 80**2))
    assert HeunSampler(num_steps=8, S_churn=8.0).sigma_hat(10.0) == pytest.approx(10 * math.sqrt(2))
