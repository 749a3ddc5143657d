"""What a function needs is checked: a wrong argument raises an error, where it would give a wrong value without a word."""

from functools import partial

import numpy as np
import pytest
import torch
from conftest import make_shard

import guidance
from common.errors import UserError
from common.randomness import SeedRandom, StepRandom, class_of_seed
from dit import DiT
from edm import EDM
from edm.sampler import HeunSampler
from evaluations import metrics
from latents.autoencoders import from_uint8, to_uint8
from latents.order import BatchOrder, read_batches
from latents.shards import LatentDataset, draw_latents, mean_and_log_variance
from routing_module import Route, TokenRouter, num_kept_tokens
from sampling.sampler import ImageSampler, labelled_grid
from sit import SiT
from sit.sampler import FlowSampler
from training.ema import EMA

CPU = torch.device("cpu")
X, Y, LEVEL = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 2, 3]), torch.full((3,), 0.5)
FEATURES = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
TOKENS, IDS = torch.randn(3, 16, 6), torch.arange(8).expand(3, 8)
PIXELS = [np.full((8, 8, 3), 40 * i, dtype=np.uint8) for i in range(5)]


def refused(match, action, error=ValueError):
    with pytest.raises(error, match=match):
        action()


# ----------------------------------------------------------------------------------------------------------------------
# The network and its routes.


@pytest.fixture(scope="module")
def net():
    route = Route(0.5, 1, 2)
    return DiT(input_size=8, patch_size=2, in_channels=4, num_classes=10, depth=4, width=24, num_heads=3, routes=[route])


@pytest.mark.parametrize("name", ["t", "y", "drop_labels"])
def test_one_condition_does_not_serve_a_whole_batch(net, name):
    arguments = {"t": LEVEL, "y": Y, "drop_labels": torch.zeros(3, dtype=torch.bool)}
    arguments[name] = arguments[name][:1]
    refused(rf"{name} has shape \(1,\); 3 latents need \(3,\)", lambda: net.train()(X, **arguments))


def test_route_scores_are_those_of_the_routes(net):
    scores = torch.rand(3, 2, 16)
    refused(r"route_scores has shape \(3, 2, 16\); these routes need \(3, 1, 16\)", lambda: net(X, LEVEL, Y, route_scores=scores))


def test_a_router_of_another_depth_is_refused(net):
    router = TokenRouter([Route(0.5, 1, -1)], depth=3)
    call = lambda: net(X, LEVEL, Y, selection_ratios=0.5, router=router)  # noqa: E731
    refused("the router is for a network of 3 blocks, this one has 4", call)


@pytest.mark.parametrize("ratio", [1.0, 2.0, -0.5, float("nan")])
def test_a_ratio_that_leaves_no_token_is_refused(ratio):
    refused("selection_ratio=.* must be a number in .0, 1.", lambda: num_kept_tokens(16, ratio))
    refused("selection_ratio=.* must be a number in .0, 1.", lambda: TokenRouter.choose_ids_keep(TOKENS, ratio))


def test_at_least_one_token_stays_in_a_route():
    assert num_kept_tokens(1, 1 - 1e-16) == num_kept_tokens(3, 1 - 2**-53) == 1


@pytest.mark.parametrize("rule", [lambda x, u: x.abs(), lambda x, u: u[:1], lambda x, u: u[:, :10]])
def test_a_selection_rule_of_another_shape_is_refused(rule):
    refused("the selection rule gives scores of shape", lambda: TokenRouter.choose_ids_keep(TOKENS, 0.5, rule=rule))


def test_indices_of_another_batch_do_not_drop_samples():
    refused("ids_keep has shape .2, 8., but there are 3 samples", lambda: TokenRouter.start_route(TOKENS, IDS[:2]))


@pytest.mark.parametrize("kept, skipped, ids", [(3, 3, 1), (3, 6, 3), (1, 3, 3)])
def test_a_route_ends_with_its_own_batch(kept, skipped, ids):
    x, all_tokens = TOKENS[:kept, :8], torch.cat([TOKENS, TOKENS])[:skipped]
    refused("are not of one route", lambda: TokenRouter.end_route(x, all_tokens, IDS[:ids]))


def test_tokens_of_another_width_do_not_end_a_route():
    refused("are not of one route", lambda: TokenRouter.end_route(TOKENS[:, :8, :3], TOKENS, IDS))


# ----------------------------------------------------------------------------------------------------------------------
# Diffusions, samplers, guidance.


@pytest.mark.parametrize("diffusion", [EDM(), SiT()])
@pytest.mark.parametrize("net", [lambda x, t, y: x[:, :1], lambda x, t, y: x[:1], lambda x, t, y: x[..., :1]])
def test_the_output_of_a_network_does_not_broadcast(diffusion, net):
    refused("the network makes .* of latents", lambda: diffusion.denoise(net, X, LEVEL, Y))


@pytest.mark.parametrize("diffusion", [EDM(), SiT()])
def test_noise_levels_and_draws_are_one_per_sample(diffusion):
    net = lambda x, t, y: x  # noqa: E731
    refused(r"has shape \(3,\); 1 latents need \(1,\)", lambda: diffusion.denoise(net, X[:1], LEVEL, Y))
    refused(r"has shape \(1,\); 3 latents need \(3,\)", lambda: diffusion.loss(net, X, Y, SeedRandom([1], CPU)))


@pytest.mark.parametrize("settings", [{"num_steps": 0}, {"sigma_min": 90}, {"sigma_min": 0}, {"S_churn": -1}, {"rho": 0}])
def test_settings_of_the_heun_sampler_are_checked(settings):
    refused("needs num_steps >= 1, 0 < sigma_min <= sigma_max", lambda: HeunSampler(**settings))


@pytest.mark.parametrize(
    "settings", [{"num_steps": 0}, {"last_step": "tweedy"}, {"solver": "rk4"}, {"last_step_size": 2}, {"diffusion_form": "sin"}]
)
def test_settings_of_the_flow_sampler_are_checked(settings):
    refused("is unknown; choose one of|needs num_steps >= 1", lambda: FlowSampler(**settings))


def test_settings_of_the_diffusions_are_checked():
    refused("timestep='lognormal' is unknown; choose one of uniform, logit_normal", lambda: SiT(timestep="lognormal"))
    refused("sigma_data=-1 must be above 0", lambda: EDM(sigma_data=-1))


INPUTS = guidance.GuidanceInputs(lambda x, level, y, **routing: x, 10, (1, 16), lambda: torch.rand(3, 1, 16))


@pytest.mark.parametrize("scale", [float("nan"), "1.5", torch.tensor([1.0, 1.5, 2.0])])
def test_a_guidance_scale_is_one_number(scale):
    refused("must be one finite number, for all samples", lambda: guidance.cfg(INPUTS, cfg_scale=scale))


def test_guidance_of_mixed_noise_levels_is_refused():
    denoiser = guidance.interval(INPUTS, cfg_scale=2.0, level_lo=0.2, level_hi=0.4)
    refused("a batch holds noise levels on both sides", lambda: denoiser(X, torch.tensor([0.3, 0.5, 0.1]), Y))


def test_bounds_that_leave_nothing_between_them_are_refused():
    refused("must be below level_hi=0.4", lambda: guidance.interval(INPUTS, cfg_scale=2.0, level_lo=0.6, level_hi=0.4))


@pytest.mark.parametrize("change", [{"r_strong": 0.6}, {"subset": "fresh"}, {"r_weak": 1.0}])
def test_settings_of_sparse_guidance_are_checked(change):
    settings = {"w": 2.0, "r_strong": 0.0, "r_weak": 0.4, "subset": "redraw"} | change
    refused("need 0 <= r_strong <= r_weak < 1 and one of", lambda: guidance.sparse(INPUTS, **settings))


# ----------------------------------------------------------------------------------------------------------------------
# Random numbers, EMA.


def test_a_seed_is_the_same_number_in_every_type():
    assert class_of_seed(np.int64(5), 1000) == class_of_seed(5, 1000) == class_of_seed(torch.tensor(5), 1000)
    assert torch.equal(SeedRandom(np.array([1, 2]), CPU).randn(3), SeedRandom([1, 2], CPU).randn(3))
    first, second = (StepRandom(seed, 1, "a", 4, slice(0, 4), CPU).rand() for seed in (np.int64(7), 7))
    assert torch.equal(first, second)


def test_a_seed_is_no_float():
    refused("float", lambda: class_of_seed(5.0, 1000), TypeError)
    refused("float", lambda: SeedRandom([1.0], CPU), TypeError)


def test_both_sources_draw_one_number_per_sample():
    assert SeedRandom([1, 2], CPU).randn().shape == SeedRandom([1, 2], CPU).rand().shape == (2,)


@pytest.mark.parametrize("part", [slice(0, 9), slice(8, 12), slice(2, 2), 3])
def test_rows_beyond_the_batch_are_refused(part):
    refused("are not rows of a batch of 8", lambda: StepRandom(0, 0, "a", 8, part, CPU))
    refused("are not rows of a batch of 8", lambda: BatchOrder(16, 8, 0, 0, 1, [part], with_flips=False))


def test_an_ema_refuses_other_weights_and_steps():
    ema = EMA(torch.nn.Linear(2, 2), 0.9)
    refused("step=-1 must be 0 or more", lambda: ema.update(-1))
    refused(
        "the average of weight is .2, 2. here and .1,. in", lambda: ema.load({"weight": torch.zeros(1), "bias": torch.zeros(2)})
    )
    loaded = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2), "more": torch.zeros(1)}
    refused("the average of more is nothing here", lambda: ema.load(loaded))
    refused("decay=2.0 must be in", lambda: EMA(torch.nn.Linear(2, 2), 2.0))


# ----------------------------------------------------------------------------------------------------------------------
# Latents and images.


def test_a_batch_of_items_that_do_not_exist_is_refused(tmp_path):
    make_shard(tmp_path / "a.safetensors", num_items=10)
    dataset, none = LatentDataset(tmp_path), np.zeros(1, dtype=bool)
    for item in (-1, 10):
        refused(f"items {item} to {item} are not all in 0 .. 9", partial(dataset.fetch, np.array([item]), none), IndexError)
    refused("3 items with 1 flips", lambda: dataset.fetch(np.arange(3), none))  # the others would be what memory held
    refused("mirrored latents are there: False", lambda: dataset.fetch(np.arange(1), ~none))


def test_an_order_of_another_data_set_is_refused(tmp_path):
    make_shard(tmp_path / "a.safetensors", num_items=10)
    order = BatchOrder(8, 4, 0, 0, 1, [slice(0, 4)], with_flips=False)
    refused(
        "the order is of 8 items, the data set holds 10", lambda: next(read_batches(LatentDataset(tmp_path), order, 0, False))
    )
    refused("batch_size=0 must be at least 1", lambda: BatchOrder(8, 0, 0, 0, 1, [slice(0, 4)], with_flips=False))


def test_moments_are_pairs_of_channels_and_need_random_numbers():
    refused("kind='moment' does not fit 4 channels", lambda: mean_and_log_variance(X, "moment"))
    refused("kind='moments' does not fit 3 channels", lambda: mean_and_log_variance(X[:, :3], "moments"))
    refused("moments are sampled: pass random", lambda: draw_latents(X, "moments"))


def test_images_that_hold_nan_do_not_become_black():
    refused("decoded images hold NaN or infinity", lambda: to_uint8(torch.full((1, 3, 2, 2), float("nan"))), UserError)


def test_pixels_are_not_scaled_twice():
    refused("images are torch.uint8; need floats", lambda: to_uint8(torch.full((1, 3, 2, 2), 200, dtype=torch.uint8)))
    refused("need uint8 .B, H, W, 3.", lambda: from_uint8(torch.rand(1, 8, 8, 3)))
    refused("need uint8 .B, H, W, 3.", lambda: from_uint8(torch.zeros(1, 3, 8, 8, dtype=torch.uint8)))


def test_a_grid_shows_every_image_with_its_label():
    refused("5 images .* do not fit 1 labels", lambda: labelled_grid(PIXELS, [1]))
    refused("2 images of shapes .* do not fit", lambda: labelled_grid([PIXELS[0], PIXELS[0][:4]], [1, 2]))


# ----------------------------------------------------------------------------------------------------------------------
# Metrics.


def test_precision_and_recall_of_half_precision_do_not_overflow():
    g = torch.Generator().manual_seed(0)
    reference, samples = (100 * torch.randn(60, 64, generator=g).half() for _ in range(2))  # squared norms of 640,000
    assert metrics.precision_recall(reference, samples) == metrics.precision_recall(reference.double(), samples.double())


def test_a_sampler_refuses_labels_that_the_network_does_not_know():
    sampler = ImageSampler(*[None] * 6, num_classes=10, scale_factor=1.0, device=CPU)
    for labels in ([1, 11], [-1, 2], [1]):
        refused("2 seeds need as many labels, each 0 to 10", partial(sampler, [0, 1], labels))
