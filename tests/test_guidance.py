"""Guidance equals its definition. If scale, interval or ratios switch it off, it equals the estimate without guidance."""

import itertools
import math
import warnings

import pytest
import torch
from definition import CLASSES, N, definition, inputs, randomized, small

import dit
import guidance
from edm import EDM
from edm.sampler import HeunSampler
from guidance import GuidanceInputs
from routing_module import Route, num_kept_tokens
from sit import SiT
from sit.sampler import FlowSampler

NUM_CLASSES = 7
X, LEVEL, Y = torch.randn(2, 5, 2, 2, generator=torch.Generator().manual_seed(0)), 2.0, torch.tensor([1, 4])


class Recorder:
    """A denoise function that is linear in the label and in the fraction of skipping tokens. It records its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, x, level, y, *, selection_ratios=None, route_noise=None):
        self.calls.append({"x": x, "level": level, "y": y.tolist(), "ratio": selection_ratios, "scores": route_noise})
        scores = 0 if route_noise is None else route_noise.mean(dim=(1, 2)).reshape(-1, 1, 1, 1)
        return x * level + y.reshape(-1, 1, 1, 1) - 10 * (selection_ratios or 0) * (1 + scores)


LABEL, NULL = Recorder()(X, LEVEL, Y), Recorder()(X, LEVEL, torch.full_like(Y, NUM_CLASSES))


def make_inputs(denoise, routes=1, **kwargs):
    """Return guidance inputs whose route scores are 1, 2, ... at successive calls."""
    scores = (torch.full((2, 1, 4), float(count)) for count in itertools.count(1))
    return GuidanceInputs(denoise, NUM_CLASSES, (routes, 4), draw_route_noise=lambda: next(scores), **kwargs)


SPARSE = dict(w=1.5, r_strong=0.25, r_weak=0.5)


def guided(name, level=2.0, weak=None, **settings):
    """Return D_x at (X, level, Y) and the calls of the network."""
    denoise = Recorder()
    D_x = guidance.GUIDANCES[name](make_inputs(denoise, weak=weak), **settings)(X, level, Y)
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


@pytest.mark.parametrize(("level", "num_rows"), [(0.1, 2), (0.3, 2), (0.1 + 0.2, 2), (0.31, 4), (0.7, 4), (0.71, 2)])
def test_an_interval_evaluates_the_second_branch_only_above_level_lo_and_up_to_level_hi(level, num_rows):
    D, calls = guided("interval", level, cfg_scale=2.0, level_lo=0.3, level_hi=0.7)
    assert [len(call["x"]) for call in calls] == [num_rows]
    assert torch.equal(D, Recorder()(X, level, Y)) == (num_rows == 2)
    _, calls = guided("sparse", level, **SPARSE | dict(r_strong=0.0, level_lo=0.3, level_hi=0.7))
    assert [call["ratio"] for call in calls] == [0.0, 0.5][: num_rows // 2]  # outside, only the strong branch runs


def test_a_bound_above_all_float32_numbers_is_no_bound():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bounded = guided("interval", 80.0, cfg_scale=1.5, level_lo=0.0, level_hi=1e39)[0]
    assert torch.equal(bounded, guided("cfg", 80.0, cfg_scale=1.5)[0])


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
        ("sparse", SPARSE | dict(r_strong=0.5), 1, "r_weak=0.5 must keep fewer of the 4 tokens than r_strong=0.5"),
        ("sparse", SPARSE | dict(r_strong=0.25, r_weak=0.3), 1, "r_weak=0.3 must keep fewer"),  # both branches keep 3 of 4
        ("sparse", SPARSE | dict(r_weak=1.5), 1, "selection_ratio=1.5 must be a number in"),
        ("sparse", SPARSE | dict(r_weak_last=0.3), 1, "the noise levels of the sampler"),
        ("autoguidance", dict(w=2.0), 0, "guidance=autoguidance needs a second network: guidance.checkpoint="),
        ("interval", dict(cfg_scale=1.5) | BOUNDS, 0, "level_lo=0.6 must be below level_hi=0.4"),
        ("sparse", SPARSE | BOUNDS, 1, "level_lo=0.6 must be below level_hi=0.4"),
    ],
)
def test_settings_that_cannot_guide_are_refused_before_the_first_evaluation(name, settings, routes, message):
    with pytest.raises(ValueError, match=message):
        guidance.GUIDANCES[name](make_inputs(Recorder(), routes), **settings)


MOVING = dict(
    w=1.7, r_strong=0.05, r_strong_last=0.4, r_weak=0.45, r_weak_last=0.85
)  # for N=16, no ratio is near a multiple of 1/N
CROSSING = dict(w=1.7, r_strong=0.0, r_strong_last=0.6, r_weak=0.6, r_weak_last=0.0)


class Setup:
    """A network of one route, an earlier one, a diffusion, and the noise of the routes at each evaluation."""

    def __init__(self, name, solver, num_steps=5):
        torch.manual_seed(3)
        self.nets = [randomized(small(routes=[Route(0.5, 1, 2)])).eval() for _ in range(2)]
        with torch.no_grad():
            for p in self.nets[1].parameters():
                p.mul_(0.9 if p.requires_grad else 1)
        self.sampler = HeunSampler(num_steps) if name == "edm" else FlowSampler(num_steps, solver)
        self.name, self.solver, self.num_steps = name, solver, num_steps
        self.diffusion = EDM() if name == "edm" else SiT()
        self.noise, _, self.y, _ = inputs()
        self.scores = torch.rand(20, len(self.y), 1, N)

    @torch.no_grad()
    def sample(self, method, num_networks, **settings):
        """Return latents by the project's network, guidance and sampler."""
        scores = iter(self.scores)
        denoisers = [lambda *batch, net=net, **routing: self.diffusion.denoise(net, *batch, **routing) for net in self.nets]
        levels, weak = self.sampler.evaluated_levels(), denoisers[1] if num_networks == 2 else None
        about = GuidanceInputs(denoisers[0], CLASSES, (1, N), lambda: next(scores), weak, (1, N), levels)
        return self.sampler(guidance.GUIDANCES[method](about, **settings), self.noise, self.y)

    @torch.no_grad()
    def sample_by_definition(self, num_networks, *, w, low=-1.0, high=math.inf, **ratios):
        """Return latents by the papers' formulas in float64, step by step."""
        n, scores = self.num_steps, iter(self.scores)
        if self.name == "edm":
            levels = [(80 ** (1 / 7) + i / (n - 1) * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7 for i in range(n)] + [0]
        else:
            levels = [(n - i) / n for i in range(n)] + [0]
        weights = [{name: p.double() for name, p in net.named_parameters()} for net in self.nets]

        def ratio(name, i):
            first, last = ratios[name], ratios.get(f"{name}_last", ratios[name])
            return last + (first - last) * (1 + math.cos(math.pi * i / (n - 1))) / 2

        def network(w, x, level, ratio, noise):
            routes, repeated = ([Route(ratio, 1, 2)] if ratio else []), torch.full((len(x),), level, dtype=torch.float64)
            if self.name == "sit":
                return x - level * definition(w, x, repeated, self.y, routes, noise)
            var, root = 0.25 + level**2, math.sqrt(0.25 + level**2)
            out = definition(w, x / root, repeated.log() / 4, self.y, routes, noise)
            return 0.25 / var * x + level * 0.5 / root * out

        def slope(x, i):
            strong, weak, noise = ratio("r_strong", i), ratio("r_weak", i), None
            is_guided = low < levels[i] <= high
            if strong or (is_guided and weak):
                noise = next(scores)
            D = network(weights[0], x, levels[i], strong, noise)
            if is_guided:
                D_weak = network(weights[num_networks - 1], x, levels[i], weak, noise)
                D = D_weak + w * (D - D_weak)
            return (x - D) / levels[i]

        x = self.noise.double() * levels[0]
        for i in range(n):
            step, d = levels[i + 1] - levels[i], slope(x, i)
            if self.solver == "heun" and i + 1 < n:
                d = (d + slope(x + step * d, i + 1)) / 2  # the second evaluation has the ratios of its noise level
            x = x + step * d
        return x


@pytest.mark.parametrize(("name", "solver"), [("edm", "heun"), ("sit", "heun"), ("sit", "euler")])
@pytest.mark.parametrize(
    ("num_networks", "settings"),
    [
        (1, SPARSE),
        (1, SPARSE | dict(r_strong=0.0)),
        (1, MOVING),
        (1, SPARSE | dict(r_strong=0.05, r_strong_last=0.3)),
        (2, SPARSE | dict(r_strong=0.5, r_weak=0.25)),
        (2, CROSSING),
        (2, dict(w=0.6, r_strong=0.3, r_weak=0.0, r_weak_last=0.9)),
    ],
)
def test_sampling_with_sparse_guidance_equals_its_definition_in_float64(name, solver, num_networks, settings):
    setup = Setup(name, solver)
    for low, high in ((None, None), (0.3, 30.0 if name == "edm" else 0.9)):
        got = setup.sample("sparse", num_networks, **settings, level_lo=low, level_hi=high)
        bounds = {} if low is None else dict(low=low, high=high)
        expected = setup.sample_by_definition(num_networks, **settings, **bounds)
        assert (got - expected).abs().max() < 5e-5 * expected.abs().max()
        other = setup.sample("sparse", num_networks, **settings | dict(w=settings["w"] + 0.1), level_lo=low, level_hi=high)
        assert (other - expected).abs().max() > 2e-3 * expected.abs().max()  # the tolerance is far below an effect


def test_sparse_guidance_with_a_second_network_and_no_skipping_tokens_is_autoguidance_to_the_bit():
    for name, solver in (("edm", "heun"), ("sit", "euler")):
        setup, none = Setup(name, solver), dict(r_strong=0.0, r_weak=0.0)
        assert torch.equal(setup.sample("sparse", 2, w=1.7, **none), setup.sample("autoguidance", 2, w=1.7))
        moving = none | dict(r_strong_last=0.0, r_weak_last=0.0)
        assert torch.equal(setup.sample("sparse", 2, w=1.7, **moving), setup.sample("autoguidance", 2, w=1.7))


def test_ratios_move_from_exactly_the_first_to_exactly_the_last_value_by_half_a_cosine():
    assert guidance.cosine_schedule(0.6, 0.0, 3) == pytest.approx([0.6, 0.3, 0.0])
    for first, last in ((0.1, 0.5), (0.7, 0.5), (0.6, 0.0), (0.0, 0.3)):
        ratios = guidance.cosine_schedule(first, last, 40)
        assert (ratios[0], ratios[-1]) == (first, last) and sorted(ratios, reverse=first > last) == ratios
        assert sum(ratios) / 40 == pytest.approx((first + last) / 2)
    assert guidance.cosine_schedule(0.3, None, 4) == [0.3] * 4 and guidance.cosine_schedule(0.3, 0.9, 1) == [0.3]


@pytest.mark.parametrize(
    ("settings", "weak_shape", "message"),
    [
        (
            MOVING | dict(r_weak_last=0.4),
            None,
            "r_weak=0.4 must keep fewer of the 16 tokens than r_strong=0.4 at each",
        ),
        (CROSSING, None, "r_weak=0.3 must keep fewer of the 16 tokens than r_strong=0.3 at each"),
        (CROSSING, (1, 64), "not 1 routes for 64 tokens and 1 routes for 16 tokens"),
        (SPARSE, (0, 16), "not 0 routes for 16 tokens and 1 routes for 16 tokens"),
    ],
)
def test_ratios_that_do_not_fit_the_networks_are_refused(settings, weak_shape, message):
    about = GuidanceInputs(
        Recorder(), NUM_CLASSES, (1, 16), None, weak_shape and Recorder(), weak_shape or (0, 0), (3.0, 2.0, 1.0)
    )
    with pytest.raises(ValueError, match=message):
        guidance.sparse(about, **settings)


def test_a_network_without_routes_guides_with_a_second_network_if_no_tokens_skip():
    about = GuidanceInputs(Recorder(), NUM_CLASSES, (0, 16), None, Recorder(), (0, 16))
    assert torch.equal(guidance.sparse(about, w=2.0, r_strong=0.0, r_weak=0.0)(X, LEVEL, Y), LABEL)
    with pytest.raises(ValueError, match="needs a network with routes"):
        guidance.sparse(about, w=2.0, r_strong=0.5, r_weak=0.0)


def test_a_dense_second_network_gets_no_noise_of_routes_that_it_lacks():
    strong, weak = Recorder(), Recorder()
    guidance.sparse(make_inputs(strong, weak=weak, weak_route_noise_shape=(0, 4)), w=2.0, r_strong=0.5, r_weak=0.0)(X, LEVEL, Y)
    assert strong.calls[0]["scores"] is not None and weak.calls[0]["scores"] is None


@pytest.mark.parametrize(
    ("method", "num_networks", "settings", "published"),
    [
        ("none", 1, {}, 114.42),
        ("cfg", 1, dict(cfg_scale=1.5), 228.84),
        ("sparse", 1, dict(w=1.5, r_strong=0.5, r_weak=0.9), 97.67),  # SG_FLOPS
        ("sparse", 2, dict(w=1.5, r_strong=0.0, r_strong_last=0.6, r_weak=0.6, r_weak_last=0.0), 173.16),  # SG_FID
    ],
)
def test_a_step_of_sit_xl2_costs_the_published_flops(method, num_networks, settings, published):
    """arXiv 2601.01608 counts a multiply-add as one operation and leaves out the two matrix products inside attention."""
    with torch.device("meta"):
        net = dit.build("DiT-XL/2", input_size=32, in_channels=4, num_classes=1000, routes=[Route(0.5, 2, -4)])
    tokens, calls, sampler = net.num_tokens, [], FlowSampler(40, "euler")

    def denoise(x, level, y, *, selection_ratios=0.0, route_noise=None):
        calls.extend([selection_ratios] * (len(x) // 2))
        return x

    about = GuidanceInputs(
        denoise, 1000, (1, tokens), lambda: None, denoise if num_networks == 2 else None, (1, tokens), sampler.evaluated_levels()
    )
    sampler(guidance.GUIDANCES[method](about, **settings), torch.zeros(2, 4, 2, 2), torch.tensor([1, 4]))
    kept = [num_kept_tokens(tokens, ratio) for ratio in calls]
    attention = sum(4 * 1152 * (5 * tokens**2 + 23 * K**2) for K in kept)  # 5 blocks outside the route, 23 inside
    multiply_adds = (sum(net.forward_flops(ratio) for ratio in calls) - attention) / 2
    assert multiply_adds / 40 / 1e9 == pytest.approx(published, rel=0.01)
