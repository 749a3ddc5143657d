import numpy as np
import pytest
import torch

from common.randomness import SeedRandom, StepRandom
from sampling.sampler import draw_labels
from training.ema import EMA

CPU = torch.device("cpu")


def test_ema_follows_a_loop_by_hand():
    net = torch.nn.Linear(2, 1)
    net.bias.requires_grad_(False)
    ema = EMA(net, decay=0.9)
    expected, fixed = net.weight.detach().double().clone(), net.bias.clone()
    for step in range(200):
        with torch.no_grad():
            net.weight.add_(torch.tensor([[0.1, -0.2]]) * (step % 3))
        ema.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * net.weight.detach().double()
    assert torch.allclose(ema.net.weight.double(), expected, atol=1e-5)
    assert torch.equal(ema.net.bias, fixed)
    assert not ema.net.training and not any(p.requires_grad for p in ema.net.parameters())


@pytest.mark.parametrize(
    ("num_updates_before", "expected"),
    [
        # Decays 1/10, 2/11, 3/12, and 0.3 in place of 4/13.
        (0, [0.9, 1.8, 3.45, 6.635]),
        # Decays 2/11, 3/12, and 0.3 from then on.
        (1, [9 / 11, 0.25 * 9 / 11 + 1.5, 0.3 * (0.25 * 9 / 11 + 1.5) + 2.8, 0.3 * (0.3 * (0.25 * 9 / 11 + 1.5) + 2.8) + 5.6]),
    ],
)
def test_the_first_averages_are_those_computed_by_hand(num_updates_before, expected):
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    ema, found = EMA(net, decay=0.3), []
    ema.num_updates_before = num_updates_before
    for step, value in enumerate((1, 2, 4, 8)):
        torch.nn.init.constant_(net.weight, value)
        ema.update(step)
        found.append(ema.averages["weight"].item())
    assert found == pytest.approx(expected, rel=1e-6)


def draws(seed=0, step=0, stream="diffusion", part=slice(0, 8)):
    random = StepRandom(seed, step, stream, 8, part, CPU)
    return random.randn(2), random.rand()


def test_a_sample_draws_the_same_whatever_part_of_the_batch_it_travels_in():
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


def test_sampling_draws_depend_on_the_seed_alone():
    together, alone = SeedRandom([3, 11, 5], CPU), SeedRandom(np.array([11]), CPU)
    for _ in range(2):
        assert torch.equal(alone.randn(4)[0], together.randn(4)[1])
    assert together.randn().shape == together.rand().shape == (3,)


def test_classes_of_seeds_are_uniform_or_exactly_balanced():
    seeds = range(700, 2700)
    drawn, in_turn = (torch.tensor(list(draw_labels(seeds, 5, how).values())) for how in ("random", "balanced"))
    assert torch.bincount(drawn).min() > 320 and torch.bincount(in_turn).tolist() == [400] * 5
    assert not torch.equal(drawn, in_turn) and draw_labels([2699], 5, "random") == {2699: drawn[-1].item()}
