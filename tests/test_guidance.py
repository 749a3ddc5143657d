"""Guidance equals its definition. If scale, interval or ratios switch it off, it equals the estimate without guidance."""

import itertools

import pytest
import torch

import guidance
from guidance import GuidanceInputs

NUM_CLASSES = 7
X, LEVEL, Y = torch.randn(2, 5, 2, 2, generator=torch.Generator().manual_seed(0)), torch.full((2,), 2.0), torch.tensor([1, 4])


class Recorder:
    """A denoise function that is linear in the label and in the fraction of skipping tokens. It records its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, x, level, y, *, selection_ratios=None, route_noise=None):
        self.calls.append({"x": x, "level": level, "y": y.tolist(), "ratio": selection_ratios, "scores": route_noise})
        scores = 0 if route_noise is None else route_noise.mean(dim=(1, 2)).reshape(-1, 1, 1, 1)
        return x * level.reshape(-1, 1, 1, 1) + y.reshape(-1, 1, 1, 1) - 10 * (selection_ratios or 0) * (1 + scores)


LABEL, NULL = Recorder()(X, LEVEL, Y), Recorder()(X, LEVEL, torch.full_like(Y, NUM_CLASSES))


def make_inputs(denoise, routes=1, **kwargs):
    """Return guidance inputs whose route scores are 1, 2, ... at successive calls."""
    scores = (torch.full((2, 1, 4), float(count)) for count in itertools.count(1))
    return GuidanceInputs(denoise, NUM_CLASSES, (routes, 4), draw_route_noise=lambda: next(scores), **kwargs)


SPARSE = dict(w=1.5, r_strong=0.25, r_weak=0.5)


def guided(name, level=2.0, weak=None, **settings):
    """Return D_x at (X, level, Y) and the calls of the network."""
    denoise = Recorder()
    D_x = guidance.GUIDANCES[name](make_inputs(denoise, weak=weak), **settings)(X, torch.full((2,), level), Y)
    return D_x, denoise.calls


def test_cfg_extrapolates_from_the_null_class_in_one_batched_call():
    D, calls = guided("cfg", cfg_scale=1.5)
    assert len(calls) == 1 and calls[0]["y"] == [1, 4, NUM_CLASSES, NUM_CLASSES]
    assert torch.allclose(D, NULL + 1.5 * (LABEL - NULL))


def test_cfg_scale_1_is_no_guidance_scale_0_is_unconditional_and_an_interval_of_all_levels_is_cfg():
    D, calls = guided("cfg", cfg_scale=1.0)
    assert torch.equal(D, LABEL) and len(calls[0]["x"]) == 2  # the second branch is not evaluated
    assert torch.equal(guided("none")[0], LABEL) and torch.allclose(guided("cfg", cfg_scale=0.0)[0], NULL)
    for level in (0.002, 80.0):
        everywhere = guided("interval", level, cfg_scale=1.5, level_lo=0.0, level_hi=80.0)[0]
        assert torch.equal(everywhere, guided("cfg", level, cfg_scale=1.5)[0])


@pytest.mark.parametrize(("level", "num_rows"), [(0.1, 2), (0.3, 2), (0.31, 4), (0.7, 4), (0.71, 2)])
def test_an_interval_evaluates_the_second_branch_only_above_level_lo_and_up_to_level_hi(level, num_rows):
    D, calls = guided("interval", level, cfg_scale=2.0, level_lo=0.3, level_hi=0.7)
    assert [len(call["x"]) for call in calls] == [num_rows]
    assert torch.equal(D, Recorder()(X, torch.full((2,), level), Y)) == (num_rows == 2)
    _, calls = guided("sparse", level, **SPARSE | dict(r_strong=0.0, level_lo=0.3, level_hi=0.7))
    assert [call["ratio"] for call in calls] == [0.0, 0.5][: num_rows // 2]  # outside, only the strong branch runs


def test_guidance_of_the_first_channels_leaves_the_other_channels_without_guidance():
    some, every = (guided("cfg", cfg_scale=1.5, channels=channels)[0] for channels in (3, 5))
    assert torch.equal(every, guided("cfg", cfg_scale=1.5)[0])
    assert torch.equal(some[:, :3], every[:, :3]) and torch.equal(some[:, 3:], LABEL[:, 3:])


def test_sparse_guidance_extrapolates_from_the_weak_branch_and_both_branches_get_the_label():
    D, calls = guided("sparse", **SPARSE)
    assert [call["y"] for call in calls] == [[1, 4], [1, 4]] and [call["ratio"] for call in calls] == [0.25, 0.5]
    assert torch.equal(calls[0]["scores"], calls[1]["scores"])  # the strong branch keeps all tokens that the weak branch keeps
    weak, strong = LABEL - 5.0 * 2, LABEL - 2.5 * 2
    assert torch.allclose(D, weak + 1.5 * (strong - weak))


@pytest.mark.parametrize("r_strong", [0.0, 0.25])
def test_w_1_switches_sparse_guidance_off_and_leaves_the_strong_branch(r_strong):
    D, calls = guided("sparse", **SPARSE | dict(w=1.0, r_strong=r_strong))
    assert [call["ratio"] for call in calls] == [r_strong]
    assert torch.allclose(D, LABEL - 10 * r_strong * 2)


def test_sparse_guidance_draws_a_new_subset_of_tokens_at_every_evaluation():
    denoise = Recorder()
    denoiser = guidance.sparse(make_inputs(denoise), **SPARSE | dict(r_strong=0.0))
    for _ in range(3):
        denoiser(X, LEVEL, Y)
    assert [call["scores"].mean().item() for call in denoise.calls if call["ratio"]] == [1, 2, 3]


def test_autoguidance_extrapolates_from_a_second_network_and_skips_it_when_switched_off():
    weak = Recorder()
    D, calls = guided("autoguidance", weak=lambda x, level, y: weak(x, level, y) - 1, w=2.0)
    assert torch.allclose(D, LABEL + 1) and calls[0]["y"] == weak.calls[0]["y"] == [1, 4]
    for off in (dict(w=1.0), dict(w=2.0, level_lo=3.0)):
        assert torch.equal(guided("autoguidance", weak=weak, **off)[0], LABEL)
    assert len(weak.calls) == 1  # the second network did not run again


BOUNDS = dict(level_lo=0.6, level_hi=0.4)


@pytest.mark.parametrize(
    ("name", "settings", "routes", "message"),
    [
        ("sparse", SPARSE, 0, "guidance=sparse needs a network with routes"),
        ("sparse", SPARSE | dict(r_strong=0.5), 1, "r_weak=0.5 must leave fewer of the 4 tokens than r_strong=0.5"),
        ("sparse", SPARSE | dict(r_strong=0.25, r_weak=0.3), 1, "r_weak=0.3 must leave fewer"),  # both branches keep 3 of 4
        ("sparse", SPARSE | dict(r_weak=1.5), 1, "selection_ratio=1.5 must be a number in"),
        ("autoguidance", dict(w=2.0), 0, "guidance=autoguidance needs a second network: guidance.checkpoint="),
        ("interval", dict(cfg_scale=1.5) | BOUNDS, 0, "level_lo=0.6 must be below level_hi=0.4"),
        ("sparse", SPARSE | BOUNDS, 1, "level_lo=0.6 must be below level_hi=0.4"),
    ],
)
def test_settings_that_cannot_guide_are_refused_before_the_first_evaluation(name, settings, routes, message):
    with pytest.raises(ValueError, match=message):
        guidance.GUIDANCES[name](make_inputs(Recorder(), routes), **settings)


def test_a_batch_with_noise_levels_inside_and_outside_the_interval_is_refused():
    denoiser = guidance.cfg(make_inputs(Recorder()), cfg_scale=2.0, level_lo=0.2, level_hi=0.4)
    with pytest.raises(ValueError, match="a batch has noise levels inside and outside"):
        denoiser(X, torch.tensor([0.3, 0.5]), Y)
