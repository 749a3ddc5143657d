"""Public objects refuse arguments that would silently give a wrong result."""

import inspect
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common.interfaces import Diffusion, Sampler, TokenAlignment, WeightAverage
from edm import EDM
from edm.sampler import HeunSampler
from extras.alignment import Alignment
from extras.ddpm import DDPM, AncestralSampler
from extras.posthoc_ema import Average
from latents.dataset import LatentDataset
from sit import SiT
from sit.sampler import FlowSampler

X, T = torch.randn(3, 4, 8, 8), torch.zeros(3)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        (HeunSampler, dict(num_steps=0, sigma_min=90.0, sigma_max=math.inf, rho=0.0, S_churn=-1.0, S_min=math.nan)),
        (HeunSampler, dict(num_steps=10**6, sigma_min=0.0, S_noise=math.nan, S_max=-1.0)),
        (FlowSampler, dict(num_steps=0, solver="rk4", timestep_shift=0.0)),
        (FlowSampler, dict(num_steps=10**6, last_step_size=1.0)),
        (AncestralSampler, dict(num_steps=1001, solver="heun")),
        (EDM, dict(sigma_data=0.0, P_std=0.0, P_mean=math.nan)),
        (SiT, dict(timestep="lognormal", logit_mean=math.inf, logit_std=0.0, cosine_weight=-1.0)),
    ],
)
def test_wrong_settings_of_diffusions_and_samplers_are_refused_by_name(settings, wrong):
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            settings(**{name: value})


@pytest.mark.parametrize("diffusion", [EDM(), SiT(), DDPM()])
def test_a_network_output_that_would_broadcast_is_refused(diffusion):
    for net in (lambda x, t, y: x[:, :1], lambda x, t, y: x[:1], lambda x, t, y: x[..., :1]):
        with pytest.raises(ValueError, match="the network returns .* for latents"):
            diffusion.denoise(net, X, T, T)


def members(interface):
    return {name for name in {**vars(interface), **interface.__annotations__} if not name.startswith("_")}


def refused_calls(part, interface):
    """Return the methods of `interface` that `part` has with other parameters, so that the core's call would be a TypeError."""
    for name in [*members(interface), *({"__call__"} & vars(interface).keys())]:
        method = getattr(part, name, None)
        if not callable(getattr(interface, name, None)) or method is None:
            continue
        parameters = [*inspect.signature(getattr(interface, name)).parameters.values()][1:]
        positional = [p.name for p in parameters if p.kind == p.POSITIONAL_ONLY]
        named = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
        for values, keywords in ((positional, named), (positional + named, [])):
            try:
                inspect.signature(method).bind(*values, **dict.fromkeys(keywords))
            except TypeError as e:
                yield f"{type(part).__name__}.{name}: {e}"


def test_the_parts_that_a_key_selects_have_what_the_core_expects_of_them():
    projector, average = torch.nn.Linear(2, 2), Average(None, 0.1, files=(), factors=(), error=0.0)
    alignment = Alignment(projector, encode=lambda images: images, fetch=LatentDataset.fetch_with_images, block=1)
    parts = [(EDM(), Diffusion), (SiT(), Diffusion), (average, WeightAverage), (alignment, TokenAlignment)]
    parts += [(sampler(), Sampler) for sampler in (HeunSampler, FlowSampler, AncestralSampler)]
    assert [name for part, interface in parts for name in members(interface) if not hasattr(part, name)] == []
    assert [problem for part, interface in parts for problem in refused_calls(part, interface)] == []
    assert [*refused_calls(SimpleNamespace(load=lambda folder: {}), WeightAverage)]  # `load` takes no argument
    assert [*refused_calls(SimpleNamespace(__call__=lambda denoiser: denoiser), Sampler)]
    of_training = {name for name in members(Diffusion) if not hasattr(DDPM(), name)}
    assert of_training == {"draw_levels", "levels_at", "loss"}  # train.py refuses diffusion=ddpm


@pytest.mark.parametrize("diffusion", [EDM(), SiT(), DDPM()])
def test_a_number_is_the_noise_level_of_all_samples(diffusion):
    def net(x, t, y):
        assert t.shape == (len(x),) and t.dtype == torch.float32
        return x * t.reshape(-1, 1, 1, 1)

    level = 3.0 if isinstance(diffusion, DDPM) else 0.7
    D_x = diffusion.denoise(net, X, level, T)
    assert torch.equal(D_x, diffusion.denoise(net, X, torch.full((len(X),), level), T)) and not torch.equal(D_x, X)


def test_samplers_accept_numbers_of_numpy():
    assert HeunSampler(num_steps=np.int64(20), rho=np.float64(7)) == HeunSampler(num_steps=20)
