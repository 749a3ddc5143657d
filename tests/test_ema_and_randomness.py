import numpy as np
import pytest
import torch
from scipy.stats import norm

from common.randomness import SeedRandom
from sampling.sampler import draw_labels
from training.ema import EMA
from training.trainer import StepRandom

CPU = torch.device("cpu")


@pytest.mark.parametrize("num_updates_before", [0, 3])
def test_the_ema_follows_a_loop_by_hand(num_updates_before):
    net = torch.nn.Linear(2, 1)
    net.bias.requires_grad_(False)
    ema = EMA(net, decay=0.9)
    ema.num_updates_before = num_updates_before
    expected, fixed = net.weight.detach().double().clone(), net.bias.clone()
    for step in range(200):
        with torch.no_grad():
            net.weight.add_(torch.tensor([[0.1, -0.2]]) * (step % 3 - 1))
        ema.update(step)
        decay = min(0.9, (1 + num_updates_before + step) / (10 + num_updates_before + step))  # 1/10, 2/11, 3/12, ...
        expected = decay * expected + (1 - decay) * net.weight.detach().double()
        assert torch.allclose(ema.net.weight.double(), expected, atol=1e-5), step
    assert torch.equal(ema.net.bias, fixed)
    assert not ema.net.training and not any(p.requires_grad for p in ema.net.parameters())


def draws(seed=0, step=0, stream="diffusion", part=slice(0, 8)):
    random = StepRandom(seed, step, stream, 8, part, CPU)
    return random.randn(2), random.rand()


def test_random_numbers_of_a_sample_do_not_depend_on_its_micro_batch():
    normal, uniform = draws()
    for part in (slice(0, 4), slice(4, 8), slice(5, 6)):
        part_normal, part_uniform = draws(part=part)
        assert torch.equal(part_normal, normal[part]) and torch.equal(part_uniform, uniform[part])


def test_seeds_steps_and_streams_are_independent_and_a_seed_is_the_same_number_in_every_type():
    base = draws()[0]
    assert torch.equal(draws()[0], base) and torch.equal(draws(seed=np.int64(0))[0], base)
    for other in (draws(seed=1), draws(step=1), draws(stream="routes")):
        assert not torch.equal(other[0], base)
    first, second, third = (draw_labels([seed], 1000, "random").popitem()[1] for seed in (np.int64(5), 5, torch.tensor(5)))
    assert first == second == third
    for draw in (lambda: draw_labels([5.0], 1000, "random"), lambda: SeedRandom([1.0], CPU)):
        with pytest.raises(TypeError, match="float"):
            draw()


def test_sampling_draws_depend_on_the_seed_alone():
    together, alone = SeedRandom([3, 11, 5], CPU), SeedRandom(np.array([11]), CPU)
    for _ in range(2):
        assert torch.equal(alone.randn(4)[0], together.randn(4)[1])
    assert together.randn().shape == SeedRandom([3, 11, 5], CPU).rand().shape == (3,)


@pytest.mark.parametrize("distribution", ["normal", "uniform"])
def test_only_the_named_draw_stores_the_quantiles_of_the_noise_levels(distribution):
    random, other = SeedRandom([3, 11, 5], CPU), SeedRandom([3, 11, 5], CPU)
    random.randn(), random.rand(), random.rand()  # draws without a shape
    assert random.quantiles is None
    other.randn(), other.rand(), other.rand()
    numbers = random.noise_level(distribution)
    assert torch.equal(numbers, other.randn() if distribution == "normal" else other.rand())
    expected = norm.cdf(numbers) if distribution == "normal" else numbers
    assert random.quantiles.numpy() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(RuntimeError, match="a second call of noise_level"):
        random.noise_level(distribution)


def test_classes_of_seeds_are_uniform_or_exactly_balanced():
    seeds = range(700, 2700)
    drawn, in_turn = (torch.tensor(list(draw_labels(seeds, 5, how).values())) for how in ("random", "balanced"))
    assert torch.bincount(drawn).min() > 320 and torch.bincount(in_turn).tolist() == [400] * 5
    assert not torch.equal(drawn, in_turn) and draw_labels([2699], 5, "random") == {2699: drawn[-1].item()}
