"""Guidance by its identities: what each is equal to where its scale, its interval or its ratios switch it off."""

import pytest
import torch
from conftest import composed

import dit
import guidance
from common.errors import UserError
from common.randomness import SeedRandom
from configs import schema
from edm import EDM
from guidance import GuidanceInputs
from routing_module import Route
from sampling.flops import block_flops, forward_flops, sparse_saving
from sit import SiT
from training import build

NUM_CLASSES = 7


class Recorder:
    """A denoise function that is linear in the label and in the fraction that skips, and remembers its calls."""

    def __init__(self):
        self.calls = []

    def __call__(self, x, level, y, *, selection_ratios=None, route_scores=None):
        self.calls.append({"x": x, "level": level, "y": y.tolist(), "ratio": selection_ratios, "scores": route_scores})
        scores = 0 if route_scores is None else route_scores.mean(dim=(1, 2)).reshape(-1, 1, 1, 1)
        return x * level.reshape(-1, 1, 1, 1) + y.reshape(-1, 1, 1, 1) - 10 * (selection_ratios or 0) * (1 + scores)


class Scores:
    """Prepared route scores: 1, 2, ... with each call."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1
        return torch.full((2, 1, 4), float(self.count))


def arguments(level=2.0):
    return torch.randn(2, 1, 2, 2), torch.full((2,), level), torch.tensor([1, 4])


def make_inputs(denoise, **kwargs):
    return GuidanceInputs(denoise, NUM_CLASSES, (1, 4), route_scores=kwargs.pop("scores", Scores()), **kwargs)


SPARSE = dict(w=1.5, r_strong=0.25, r_weak=0.5, subset="redraw")


def test_no_guidance_is_the_conditional_estimate():
    denoise, (x, level, y) = Recorder(), arguments()
    assert torch.equal(guidance.none(make_inputs(denoise))(x, level, y), denoise(x, level, y))


def test_cfg_extrapolates_from_the_null_class_in_one_batched_call():
    denoise, (x, level, y) = Recorder(), arguments()
    D = guidance.cfg(make_inputs(denoise), cfg_scale=1.5)(x, level, y)
    assert len(denoise.calls) == 1
    assert denoise.calls[0]["y"] == [1, 4, NUM_CLASSES, NUM_CLASSES]
    null, label = Recorder()(x, level, torch.full((2,), NUM_CLASSES)), Recorder()(x, level, y)
    assert torch.allclose(D, null + 1.5 * (label - null))


def test_cfg_scale_1_equals_no_guidance_and_0_is_unconditional():
    x, level, y = arguments()
    off = Recorder()
    assert torch.equal(guidance.cfg(make_inputs(off), cfg_scale=1.0)(x, level, y), Recorder()(x, level, y))
    assert len(off.calls[0]["x"]) == 2  # no second branch is paid for
    unconditional = Recorder()(x, level, torch.full((2,), NUM_CLASSES))
    assert torch.allclose(guidance.cfg(make_inputs(Recorder()), cfg_scale=0.0)(x, level, y), unconditional)


@pytest.mark.parametrize("bounds", [dict(level_lo=0, level_hi=80.0), dict(level_lo=None, level_hi=None)])
@pytest.mark.parametrize("level", [0.002, 2.0, 80.0])
def test_an_interval_over_everything_is_cfg(bounds, level):
    x, level, y = arguments(level)
    everywhere = guidance.interval(make_inputs(Recorder()), cfg_scale=1.5, **bounds)(x, level, y)
    assert torch.equal(everywhere, guidance.cfg(make_inputs(Recorder()), cfg_scale=1.5)(x, level, y))


@pytest.mark.parametrize(("level", "num_rows"), [(0.1, 2), (0.3, 2), (0.31, 4), (0.7, 4), (0.71, 2), (5.0, 2)])
def test_an_interval_pays_for_the_second_branch_inside_only_above_its_lower_bound_up_to_its_upper(level, num_rows):
    denoise, (x, level, y) = Recorder(), arguments(level)
    D = guidance.interval(make_inputs(denoise), cfg_scale=2.0, level_lo=0.3, level_hi=0.7)(x, level, y)
    assert [len(call["x"]) for call in denoise.calls] == [num_rows]
    assert torch.equal(D, Recorder()(x, level, y)) == (num_rows == 2)


@pytest.mark.parametrize(("name", "bounds"), [("cfg", {}), ("interval", dict(level_lo=0.0, level_hi=3.0))])
def test_guidance_of_the_first_channels_leaves_the_label_estimate_in_the_others(name, bounds):
    x, level, y = torch.randn(2, 5, 2, 2), torch.full((2,), 2.0), torch.tensor([1, 4])
    guide = guidance.GUIDANCES[name]
    some = guide(make_inputs(Recorder()), cfg_scale=1.5, channels=3, **bounds)(x, level, y)
    every = guide(make_inputs(Recorder()), cfg_scale=1.5, **bounds)(x, level, y)
    assert torch.equal(some[:, :3], every[:, :3]) and not torch.equal(some[:, 3:], every[:, 3:])
    assert torch.equal(some[:, 3:], Recorder()(x, level, y)[:, 3:])
    assert torch.equal(guide(make_inputs(Recorder()), cfg_scale=1.5, channels=5, **bounds)(x, level, y), every)


def test_guidance_of_the_first_channels_is_that_of_the_published_codes_velocity():
    """LightningDiT's forward_with_cfg: data at u = 1, guided where u >= 0.11, the velocity data - noise of three channels."""
    g = torch.Generator().manual_seed(0)
    x, of_label, of_null = (torch.randn(2, 5, 2, 2, generator=g) for _ in range(3))
    y = torch.tensor([1, 4])

    def published(u):
        guided = of_null[:, :3] + 6.7 * (of_label[:, :3] - of_null[:, :3])
        return torch.cat([of_label[:, :3] if u < 0.11 else guided, of_label[:, 3:]], dim=1)

    def net(x, t, y):  # ours has the other sign and clock
        return -torch.where(
            (y == NUM_CLASSES).reshape(-1, 1, 1, 1), of_null.repeat(len(x) // 2, 1, 1, 1), of_label.repeat(len(x) // 2, 1, 1, 1)
        )

    for u in (0.0, 0.1, 0.1099, 0.11, 0.5, 0.99):
        t = torch.full((2,), 1 - u)
        inputs = make_inputs(lambda x, t, y: SiT().denoise(net, x, t, y))
        D = guidance.interval(inputs, cfg_scale=6.7, level_lo=0.0, level_hi=0.89, channels=3)(x, t, y)
        assert torch.allclose(D, x + (1 - u) * published(u), atol=1e-5), u


def test_sparse_guidance_extrapolates_from_the_weak_branch_with_the_label_in_both():
    denoise, (x, level, y) = Recorder(), arguments()
    D = guidance.sparse(make_inputs(denoise), **SPARSE)(x, level, y)
    assert [call["y"] for call in denoise.calls] == [[1, 4], [1, 4]]
    assert [call["ratio"] for call in denoise.calls] == [0.25, 0.5]
    assert torch.equal(denoise.calls[0]["scores"], denoise.calls[1]["scores"])  # what stays in the weak stays in the strong
    plain = Recorder()(x, level, y)
    weak, strong = plain - 5.0 * 2, plain - 2.5 * 2
    assert torch.allclose(D, weak + 1.5 * (strong - weak))


def test_the_strong_branch_with_ratio_0_is_the_dense_network():
    denoise, (x, level, y) = Recorder(), arguments()
    guidance.sparse(make_inputs(denoise), **SPARSE | dict(r_strong=0.0))(x, level, y)
    assert [call["ratio"] for call in denoise.calls] == [None, 0.5] and denoise.calls[0]["scores"] is None


@pytest.mark.parametrize("r_strong", [0.0, 0.25])
def test_w_1_switches_sparse_guidance_off_and_leaves_the_strong_branch(r_strong):
    denoise, (x, level, y) = Recorder(), arguments()
    D = guidance.sparse(make_inputs(denoise), **SPARSE | dict(w=1.0, r_strong=r_strong))(x, level, y)
    assert len(denoise.calls) == 1
    assert torch.allclose(D, Recorder()(x, level, y) - 10 * r_strong * 2)


def test_equal_ratios_under_a_fixed_subset_are_that_branch():
    x, level, y = arguments()
    settings = dict(w=3.0, r_strong=0.5, r_weak=0.5, subset="fixed")
    D = guidance.sparse(make_inputs(Recorder()), **settings)(x, level, y)
    assert torch.allclose(D, Recorder()(x, level, y, selection_ratios=0.5, route_scores=torch.ones(2, 1, 4)))


@pytest.mark.parametrize(("subset", "values"), [("redraw", [1, 2, 3]), ("fixed", [1, 1, 1])])
def test_the_subset_is_redrawn_at_every_evaluation_or_fixed(subset, values):
    denoise = Recorder()
    denoiser = guidance.sparse(make_inputs(denoise), **SPARSE | dict(subset=subset, r_strong=0.0))
    for _ in values:
        denoiser(*arguments())
    assert [call["scores"].mean().item() for call in denoise.calls if call["ratio"]] == values


def test_sparse_guidance_in_an_interval_is_the_strong_branch_elsewhere():
    settings = SPARSE | dict(r_strong=0.0, level_lo=0.3, level_hi=0.7)
    for level, num_calls in ((0.3, 1), (0.5, 2), (0.7, 2), (0.8, 1)):
        denoise = Recorder()
        guidance.sparse(make_inputs(denoise), **settings)(*arguments(level))
        assert [call["ratio"] for call in denoise.calls] == [None, 0.5][:num_calls]


def test_sparse_guidance_needs_routes():
    with pytest.raises(ValueError, match="guidance=sparse needs a network with routes; use guidance=cfg"):
        guidance.sparse(GuidanceInputs(Recorder(), NUM_CLASSES), **SPARSE)


def test_autoguidance_extrapolates_from_the_second_network():
    denoise, weak, (x, level, y) = Recorder(), Recorder(), arguments()
    D = guidance.autoguidance(make_inputs(denoise, weak=lambda x, level, y: weak(x, level, y) - 1), w=2.0)(x, level, y)
    assert torch.allclose(D, Recorder()(x, level, y) + 1)
    assert denoise.calls[0]["y"] == weak.calls[0]["y"] == [1, 4]


def test_autoguidance_by_the_network_itself_or_with_w_1_is_no_guidance():
    x, level, y = arguments()
    itself = guidance.autoguidance(make_inputs(Recorder(), weak=Recorder()), w=2.5)(x, level, y)
    assert torch.allclose(itself, Recorder()(x, level, y))
    weak = Recorder()
    assert torch.equal(guidance.autoguidance(make_inputs(Recorder(), weak=weak), w=1.0)(x, level, y), Recorder()(x, level, y))
    assert weak.calls == []  # not paid for
    guidance.autoguidance(make_inputs(Recorder(), weak=weak), w=2.0, level_lo=3.0)(x, level, y)
    assert weak.calls == []
    with pytest.raises(ValueError, match="guidance=autoguidance needs a second network: guidance.checkpoint="):
        guidance.autoguidance(make_inputs(Recorder()), w=2.0)


# ----------------------------------------------------------------------------------------------------------------------
# With a network.


def small_net():
    torch.manual_seed(0)
    net = dit.DiT(
        input_size=8, patch_size=2, in_channels=1, num_classes=NUM_CLASSES, depth=4, width=32, num_heads=2,
        routes=[Route(0.5, 1, 2)], init="official_tread",
    )  # fmt: skip
    return net.eval().requires_grad_(False)


def sampled(diffusion, name, seeds=(3, 5), net=None, **settings):
    """Images of a small random network under a guidance."""
    net = net or small_net()
    random, subsets = (SeedRandom(seeds, torch.device("cpu"), stream) for stream in ("sample", "routes"))
    shape = (len(net.router.routes), net.num_tokens)

    def denoise(x, level, y, **routing):
        return diffusion.denoise(net, x, level, y, **routing)

    inputs = GuidanceInputs(denoise, NUM_CLASSES, shape, route_scores=lambda: subsets.rand(*shape), weak=denoise)
    y = torch.tensor([seed % NUM_CLASSES for seed in seeds])
    return diffusion.sample(guidance.GUIDANCES[name](inputs, **settings), random.randn(1, 8, 8), y, random)


def diffusions():
    from edm.sampler import HeunSampler
    from sit.sampler import FlowSampler

    return [EDM(sampler=HeunSampler(num_steps=4)), SiT(sampler=FlowSampler(num_steps=4))]


@pytest.mark.parametrize("diffusion", diffusions(), ids=["edm", "sit"])
def test_the_identities_hold_for_whole_trajectories_of_every_diffusion(diffusion):
    top = diffusion.sampler.evaluated_levels()[0]
    plain, guided = sampled(diffusion, "none"), sampled(diffusion, "cfg", cfg_scale=2.0)
    assert (plain - guided).abs().max() > 1e-3
    assert torch.equal(sampled(diffusion, "cfg", cfg_scale=1.0), plain)
    assert torch.equal(sampled(diffusion, "interval", cfg_scale=2.0, level_lo=0.0, level_hi=top), guided)
    sparse = sampled(diffusion, "sparse", w=2.0, r_strong=0.0, r_weak=0.5, subset="redraw")
    assert (sparse - plain).abs().max() > 1e-3
    assert torch.equal(sampled(diffusion, "sparse", w=1.0, r_strong=0.0, r_weak=0.5, subset="redraw"), plain)
    assert torch.allclose(sampled(diffusion, "autoguidance", w=2.0), plain, atol=1e-5)


@pytest.mark.parametrize("subset", ["redraw", "fixed"])
def test_the_subset_of_an_image_is_a_function_of_its_seed(subset):
    settings = dict(w=2.0, r_strong=0.25, r_weak=0.5, subset=subset)
    for diffusion in diffusions():
        together = sampled(diffusion, "sparse", seeds=(3, 5, 8), **settings)
        alone = [sampled(diffusion, "sparse", seeds=(seed,), **settings) for seed in (3, 5, 8)]
        assert torch.allclose(together, torch.cat(alone), rtol=1e-3, atol=1e-3), (together - torch.cat(alone)).abs().max()


def test_flops_are_those_counted_by_hand():
    net = small_net()
    D, N = 32, 16
    block = block_flops(net.blocks[0], N)
    assert block == 2 * N * 12 * D * D + 4 * N * N * D + 2 * 6 * D * D
    few = 2 * 8 * 12 * D * D + 4 * 8 * 8 * D + 2 * 6 * D * D
    rest = 2 * N * D * 4 + 2 * (256 * D + D * D) + 2 * 2 * D * D + 2 * N * D * 4
    assert forward_flops(net) == 4 * block + rest
    assert forward_flops(net, 0.5) == forward_flops(net, None) == 2 * block + 2 * few + rest
    assert sparse_saving(net, 0.0, 0.5) == pytest.approx((block - few) / (4 * block + rest))
    assert sparse_saving(net, 0.0, 0.0) == 0


def test_sparse_guidance_of_the_papers_network_saves_about_a_fifth():
    with torch.device("meta"):
        net = dit.build("DiT-XL/2", input_size=32, in_channels=4, num_classes=1000, routes=[Route(0.5, 2, -4)])
    assert forward_flops(net) / 2e9 == pytest.approx(118.6, rel=0.01)  # published in multiply-adds
    assert 0.19 < sparse_saving(net, 0.0, 0.5) < 0.22


# ----------------------------------------------------------------------------------------------------------------------
# Of a run: what train.py, sample.py and fid.py check before any work.


def run_settings(*overrides):
    cfg = schema.check(composed(overrides), schema.TrainConfig)
    return cfg, build.build_diffusion(cfg.diffusion)


@pytest.mark.parametrize(("name", "bounds"), [("cfg", []), ("interval", ["guidance.level_lo=0.3", "guidance.level_hi=3.0"])])
def test_guidance_by_a_null_class_that_was_never_trained_is_refused(name, bounds):
    cfg, diffusion = run_settings("model.class_dropout=0.0", f"guidance={name}", *bounds)
    for scale in (0.0, 1.5):
        message = rf"guidance={name} with cfg_scale={scale:g} needs the null class, .*class_dropout=0\. Use guidance=none"
        with pytest.raises(UserError, match=message):
            build.check_guidance(cfg.guidance.model_copy(update={"cfg_scale": scale}), cfg, diffusion)
    build.check_guidance(cfg.guidance.model_copy(update={"cfg_scale": 1.0}), cfg, diffusion)  # off


@pytest.mark.parametrize(("name", "bounds"), [("cfg", []), ("interval", ["guidance.level_lo=0.3", "guidance.level_hi=3.0"])])
def test_guidance_of_more_channels_than_the_latents_have_is_refused(name, bounds):
    shape = ["data=imagenet256", f"guidance={name}", *bounds]
    for channels in (1, 4, "null"):
        cfg, diffusion = run_settings(*shape, f"guidance.channels={channels}")
        build.check_guidance(cfg.guidance, cfg, diffusion)
    cfg, diffusion = run_settings(*shape, "guidance.channels=5")
    with pytest.raises(UserError, match="guidance.channels=5, but the latents have 4 channels; give at most as many, or"):
        build.check_guidance(cfg.guidance, cfg, diffusion)
    with pytest.raises(UserError, match="guidance.channels=0 is not accepted"):
        run_settings(*shape, "guidance.channels=0")


def test_guidance_that_keeps_the_label_needs_no_null_class():
    for name in ("none", "sparse"):
        cfg, diffusion = run_settings("model.class_dropout=0.0", f"guidance={name}")
        build.check_guidance(cfg.guidance, cfg, diffusion)
    cfg, diffusion = run_settings("guidance=cfg")  # trained with class_dropout=0.1
    build.check_guidance(cfg.guidance, cfg, diffusion)
