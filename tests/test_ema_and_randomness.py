from functools import partial

import numpy as np
import pytest
import torch
from conftest import renew_manifest, weights
from scipy.special import expit
from scipy.stats import norm

from common.devices import copy_to_device
from common.errors import UserError
from common.randomness import SeedRandom
from edm import EDM
from sampling.sampler import draw_labels
from sit import SiT
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_constant_ema_equals_the_update_of_the_official_trainers_over_500_steps(dtype):
    """The update is ema = 0.9999 ema + 0.0001 weights, from a copy of the initial weights. Our averages are float32."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.SiLU(), torch.nn.Linear(16, 4))
    ema, optimizer = EMA(net, 0.9999, "constant"), torch.optim.AdamW(net.parameters(), lr=1e-2)
    initial = [p.detach().clone() for p in net.parameters()]
    official = [p.to(dtype, copy=True) for p in initial]
    for step in range(500):
        loss = (net(torch.randn(16, 8)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(step)
        for average, p in zip(official, net.parameters()):
            average.mul_(0.9999).add_(p.detach().to(dtype), alpha=1 - 0.9999)
    for own, average, first in zip(ema.averages.values(), official, initial):
        assert (own - average).abs().max() < 1e-5  # 500 steps round weights below 0.4 by at most 2^-24 of their value each
        assert (average - first).abs().max() > 1e-3
    # After 500 updates, the initial weights have a share of 0.9999^500 = 95%. With the warm-up, they have almost none.
    warm = EMA(net, 0.9999)
    warm.averages["0.weight"].fill_(1.0)
    next(net.parameters()).detach().zero_()
    for step in range(500):
        warm.update(step)
    assert warm.averages["0.weight"].max() < 1e-9


def test_a_run_has_the_ema_schedule_of_its_configuration(train):
    settings = ["train.num_steps=1", "train.ema_decay=0.75", "train.lr=1e-2"]
    warm, constant = train("warm", *settings), train("constant", *settings, "train.ema_schedule=constant")
    for name, trained in weights(warm, 1).items():
        assert torch.equal(trained, weights(constant, 1)[name])
        initial = 10 * weights(warm, 1, "ema")[name] - 9 * trained  # the warm-up's first decay is 1/10
        assert torch.allclose(weights(constant, 1, "ema")[name], 0.75 * initial + 0.25 * trained, atol=1e-5), name


def test_a_run_that_lacks_the_key_of_its_ema_schedule_resumes_with_its_warm_up_and_refuses_another_schedule(train):
    run = train("run", "train.num_steps=2")
    for file in (run / "config.yaml", run / "checkpoints" / "step_0000002" / "config.yaml"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if "ema_schedule" not in line))
        assert len(file.read_text().splitlines()) == len(lines) - 1
    renew_manifest(run / "checkpoints" / "step_0000002")
    with pytest.raises(UserError, match="train.ema_schedule: 'warmup' -> 'constant'"):
        train("run", "train.num_steps=3", "train.ema_schedule=constant")
    train("run", "train.num_steps=3")
    expected, resumed = weights(train("whole", "train.num_steps=3"), 3, "ema"), weights(run, 3, "ema")
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())


def draws(seed=0, step=0, stream="diffusion", rows=slice(0, 8)):
    random = StepRandom(seed, step, stream, 8, rows, CPU)
    return random.randn(2), random.rand()


def test_random_numbers_of_a_sample_do_not_depend_on_its_micro_batch():
    normal, uniform = draws()
    for rows in (slice(0, 4), slice(4, 8), slice(5, 6)):
        part_normal, part_uniform = draws(rows=rows)
        assert torch.equal(part_normal, normal[rows]) and torch.equal(part_uniform, uniform[rows])


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


@pytest.mark.parametrize(
    ("diffusion", "level_at"),
    [
        (EDM(P_mean=-0.4, P_std=0.8), lambda q: np.exp(-0.4 + 0.8 * norm.ppf(q))),
        (SiT(), lambda q: q),
        (SiT(timestep="logit_normal", logit_mean=-1.0, logit_std=2.0), lambda q: expit(-1 + 2 * norm.ppf(q))),
    ],
)
def test_noise_levels_are_drawn_with_their_quantiles_and_before_the_noise(diffusion, level_at):
    random, other, whole = (SeedRandom([3, 11, 5], CPU) for _ in range(3))
    levels, quantiles = diffusion.draw_levels(random)
    expected = other.rand().numpy() if diffusion == SiT() else norm.cdf(other.randn())
    assert quantiles.numpy() == pytest.approx(expected, abs=1e-6) and levels.numpy() == pytest.approx(
        level_at(expected), rel=1e-5
    )
    given = np.array([1e-4, 0.25, 0.5, 0.9999], dtype=np.float32)
    assert diffusion.levels_at(torch.from_numpy(given)).numpy() == pytest.approx(level_at(given), rel=1e-3)
    loss = partial(diffusion.loss, lambda x, t, y: x, torch.ones(3, 2, 1, 1), torch.zeros(3, dtype=torch.int64))
    found = loss(random, levels)
    assert torch.equal(found, loss(whole)) and torch.equal(random.randn(), whole.randn())  # without levels, it draws them
    assert not torch.equal(found, loss(other, diffusion.levels_at(quantiles / 2)))


def test_classes_of_seeds_are_uniform_or_exactly_balanced():
    seeds = range(700, 2700)
    drawn, in_turn = (torch.tensor(list(draw_labels(seeds, 5, how).values())) for how in ("random", "balanced"))
    assert torch.bincount(drawn).min() > 320 and torch.bincount(in_turn).tolist() == [400] * 5
    assert not torch.equal(drawn, in_turn) and draw_labels([2699], 5, "random") == {2699: drawn[-1].item()}


@pytest.mark.parametrize(("kind", "arguments"), [("cuda", {"non_blocking": True}), ("mps", {}), ("cpu", {})])
def test_only_copies_to_cuda_do_not_wait(kind, arguments, monkeypatch):
    x, calls = torch.zeros(2), []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: calls.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **arguments: calls.append((device.type, arguments)) or self)
    copy_to_device(x, torch.device(kind))
    assert calls == ["pinned"] * (kind == "cuda") + [(kind, arguments)]
