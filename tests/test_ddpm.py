"""DDPM's chain, against the published schedule in NumPy, and against data with a known chain."""

import numpy as np
import pytest
import torch
from test_edm import LABELS, MEAN, STD

import guidance
from common.randomness import SeedRandom
from extras.ddpm import DDPM, AncestralSampler, alpha_bars, log_variance_bounds
from guidance import GuidanceInputs


def test_the_schedule_is_the_linear_schedule_of_ddpm():
    betas = np.linspace(0.0001, 0.02, 1000, dtype=np.float64)
    assert np.allclose(alpha_bars(), np.cumprod(1.0 - betas), rtol=1e-14, atol=0)
    assert alpha_bars()[0] == 1 - 0.0001 and alpha_bars()[999] == pytest.approx(4.0358e-5, rel=1e-4)


def test_the_visited_timesteps_equal_those_of_the_published_respacing():
    steps = AncestralSampler(num_steps=250).timesteps()
    assert len(set(steps)) == 250 and steps[:7] == [0, 4, 8, 12, 16, 20, 24] and steps[-3:] == [991, 995, 999]
    gaps = np.diff(steps)
    assert (gaps == 4).sum() == 246 and (gaps == 5).sum() == 3
    assert AncestralSampler(num_steps=3).timesteps() == [0, 500, 999]  # 499.5 is rounded to the even number
    assert AncestralSampler(num_steps=1).timesteps() == [0]
    assert AncestralSampler(num_steps=4).evaluated_levels() == [999.0, 666.0, 333.0, 0.0]


@pytest.mark.parametrize("num_steps", [250, 1000])
def test_the_bounds_of_the_variance_are_the_posterior_variance_and_beta(num_steps):
    kept = alpha_bars()[AncestralSampler(num_steps=num_steps).timesteps()]
    before = np.append(1.0, kept[:-1])
    betas = 1 - kept / before
    posterior = betas * (1 - before) / (1 - kept)
    bounds = np.exp(log_variance_bounds([1.0, *kept]))
    assert np.allclose(bounds[1:, 0], posterior[1:], rtol=1e-10) and np.allclose(bounds[:, 1], betas, rtol=1e-10)
    assert posterior[0] == 0 and bounds[0, 0] == pytest.approx(posterior[1])  # clipped


def gaussian_denoiser(timesteps, share_of_beta=None):
    """Return a denoiser with the exact E[x | x_t] of the toy data. Its variance is exact unless `share_of_beta` is given."""
    kept = np.append(1.0, alpha_bars()[timesteps])
    bounds = log_variance_bounds(kept.tolist())

    def denoiser(x, t, y):
        i = timesteps.index(int(t)) + 1
        a, before = kept[i], kept[i - 1]
        gain = np.sqrt(a) * STD**2 / (a * STD**2 + 1 - a)
        D_x = MEAN + gain * (x - np.sqrt(a) * MEAN)
        # Var(x_prev | x_t) = posterior variance + c1^2 Var(x | x_t)
        beta = 1 - a / before
        c1 = np.sqrt(before) * beta / (1 - a)
        variance = beta * (1 - before) / (1 - a) + c1**2 * STD**2 * (1 - a) / (a * STD**2 + 1 - a)
        low, high = bounds[i - 1]
        v = (np.log(variance) - low) / (high - low) if high > low else 0.0
        return torch.cat([D_x, torch.full_like(D_x, v if share_of_beta is None else share_of_beta)], dim=1)

    return denoiser


def moments(sampler, denoiser, num_samples=20000):
    noise = torch.randn(1, 1, 1, num_samples, generator=torch.Generator().manual_seed(0))
    x = sampler(denoiser, noise, LABELS[:1], SeedRandom([5], torch.device("cpu")))
    return x.mean().item(), x.std().item()


def test_ancestral_steps_reproduce_the_data_with_the_exact_variance_and_not_with_another():
    for num_steps in (20, 250):
        sampler = AncestralSampler(num_steps)
        mean, std = moments(sampler, gaussian_denoiser(sampler.timesteps()))
        assert mean == pytest.approx(MEAN, abs=0.012) and std == pytest.approx(STD, rel=0.02)
    sampler = AncestralSampler(20)
    beta, posterior = (gaussian_denoiser(sampler.timesteps(), share_of_beta=share) for share in (1.0, 0.0))
    assert moments(sampler, posterior)[1] < 0.97 * STD and moments(sampler, beta)[1] > 1.03 * STD
    assert moments(sampler, lambda x, t, y: beta(x, t, y)[:, :1]) == moments(sampler, beta)  # beta without a learned variance


def test_ddim_is_the_exact_map_between_the_gaussians():
    sampler = AncestralSampler(1000, "ddim")
    noise = torch.linspace(-2, 2, 9).reshape(1, 1, 1, 9)
    x = sampler(gaussian_denoiser(sampler.timesteps()), noise, LABELS[:1])
    assert torch.allclose(x, MEAN + STD * noise, atol=0.01)


def test_denoise_removes_the_predicted_noise_and_scales_the_learned_variance():
    g = torch.Generator().manual_seed(0)
    data, eps, v = (torch.randn(4, 2, 3, 3, generator=g) for _ in range(3))
    t = torch.tensor([0.0, 4.0, 500.0, 999.0])
    a = torch.from_numpy(alpha_bars()[[0, 4, 500, 999]]).reshape(4, 1, 1, 1)
    noisy = (a.sqrt() * data + (1 - a).sqrt() * eps).float()

    def net(x, seen, y):
        assert torch.equal(seen, t)
        return torch.cat([eps, v], dim=1)

    D_x, share = DDPM().denoise(net, noisy, t, LABELS).chunk(2, dim=1)
    assert torch.allclose(share, (v + 1) / 2)
    assert torch.allclose(D_x[:3], data[:3], atol=2e-6) and torch.allclose(D_x[3], data[3], atol=2e-4)


def test_guidance_takes_the_learned_variance_from_the_conditional_estimate():
    def denoise(x, level, y):
        label = y.reshape(-1, 1, 1, 1).float()
        return torch.cat([x + label, x - label], dim=1)

    guided = guidance.classifier_free(GuidanceInputs(denoise, num_classes=7), cfg_scale=3.0)
    x, y = torch.zeros(2, 2, 1, 1), torch.tensor([1, 2])
    D_x, share = guided(x, 1.0, y).chunk(2, dim=1)
    assert D_x.flatten(1).tolist() == [[7 + 3 * (1 - 7)] * 2, [7 + 3 * (2 - 7)] * 2]
    assert share.flatten(1).tolist() == [[-1.0] * 2, [-2.0] * 2]
