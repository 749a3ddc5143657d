"""Routes and the router, against positions and gradients computed by hand."""

from functools import partial

import pytest
import torch

from routing_module import SELECTIONS, Route, TokenRouter, build_rule, importance_scores, num_kept_tokens

B, N, D = 2, 6, 3
IDS_KEEP = torch.tensor([[1, 3, 5], [0, 2, 4]])


def tokens():
    return torch.arange(B * N * D, dtype=torch.float32).reshape(B, N, D)


def test_the_number_of_skipped_tokens_is_rounded_down_and_a_ratio_below_1_keeps_a_token():
    ratios = ((16, 0.5), (7, 0.5), (256, 0.75), (10, 0.0), (3, 0.9), (3, 1.0))
    assert [num_kept_tokens(n, r) for n, r in ratios] == [8, 4, 64, 10, 1, 0]
    assert num_kept_tokens(1, 1 - 1e-16) == num_kept_tokens(3, 1 - 2**-53) == 1
    for ratio in (1.1, 2.0, -0.5, float("nan")):
        with pytest.raises(ValueError, match=r"selection_ratio=.* must be a number in \[0, 1\]"):
            num_kept_tokens(16, ratio)


def test_the_highest_scores_of_each_sample_stay_in_ascending_positions():
    scores = torch.tensor([[0.1, 0.9, 0.2, 0.8, 0.3, 0.7], [0.6, 0.1, 0.5, 0.2, 0.9, 0.3]])
    assert torch.equal(TokenRouter.choose_ids_keep(tokens(), 0.5, noise=scores), IDS_KEEP)


def test_the_choice_is_uniform_over_positions_differs_between_samples_and_follows_its_generator():
    x = torch.zeros(4000, 8, 1)
    first, second, other = (
        TokenRouter.choose_ids_keep(x, 0.25, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)
    counts = torch.bincount(first.flatten(), minlength=8) / 4000
    assert (counts - 0.75).abs().max() < 0.03  # four standard deviations of a fraction of 4,000 draws
    assert len({tuple(row) for row in first.tolist()}) == 28  # every subset of 6 of 8 occurs


def test_importance_with_full_weight_keeps_exactly_the_largest_l1_norms_and_inverse_the_smallest():
    norms = torch.tensor([[5.0, 1.0, 9.0, 3.0, 7.0, 2.0], [0.6, 0.1, 0.2, 0.5, 0.4, 0.3]])
    x = norms[..., None] / 3 * torch.tensor([1.0, -1.0, 1.0])  # (2, 6, 3) tokens with these L1-norms
    chance = torch.rand(2, 6, generator=torch.Generator().manual_seed(0))
    for inverse, expected in ((False, [[0, 2, 4], [0, 3, 4]]), (True, [[1, 3, 5], [1, 2, 5]])):
        rule = partial(importance_scores, weight=1.0, inverse=inverse)
        assert TokenRouter.choose_ids_keep(x, 0.5, noise=chance, rule=rule).tolist() == expected


def test_importance_is_normalised_per_sample_and_mixed_with_chance():
    x = torch.tensor([[[2.0], [-4.0], [3.0]], [[200.0], [400.0], [300.0]]], requires_grad=True)
    chance = torch.tensor([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]])
    scores = importance_scores(x, chance, 0.25)
    assert torch.allclose(scores, 0.75 * chance + 0.25 * torch.tensor([[0.0, 1.0, 0.5]])) and not scores.requires_grad
    equal = importance_scores(torch.ones(1, 3, 2), chance[:1])  # with equal norms, the choice is random
    assert torch.allclose(equal, 0.5 * chance[:1])


@pytest.mark.parametrize("name", SELECTIONS)
def test_every_rule_gives_finite_scores_of_the_tokens_shape_without_a_gradient(name):
    x = torch.rand(B, 24, D, requires_grad=True)
    scores = build_rule(name, grid=(4, 6))(x, torch.rand(B, 24))
    assert scores.shape == (B, 24) and scores.isfinite().all() and not scores.requires_grad


def test_kept_tokens_return_to_their_positions_and_skipped_tokens_are_bit_identical():
    x = tokens()
    kept = TokenRouter.start_route(x, IDS_KEEP)
    assert torch.equal(kept, torch.stack([x[0, [1, 3, 5]], x[1, [0, 2, 4]]]))
    before = x.clone()
    out = TokenRouter.end_route(kept + 100, x, IDS_KEEP)
    assert torch.equal(x, before)  # not in place
    moved = torch.tensor([[0, 100, 0, 100, 0, 100], [100, 0, 100, 0, 100, 0]])[..., None]
    assert torch.equal(out, x + moved)


def test_negative_indices_count_from_the_end():
    assert TokenRouter([Route(0.5, 2, -4)], depth=12).routes == (Route(0.5, 2, 8),)
    assert TokenRouter([Route(0.0, -12, -12), Route(0.5, -11, -1)], depth=12).routes == (Route(0.0, 0, 0), Route(0.5, 1, 11))


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([Route(0.5, 2, 12)], r"routes\[0\].end_layer_idx=12 .* 12 blocks; use -12 to 11"),
        ([Route(0.5, -13, 3)], r"routes\[0\].start_layer_idx=-13"),
        ([Route(0.5, 8, 2)], r"routes\[0\] ends with block 2, before it starts with block 8"),
        ([Route(0.5, 2, 5), Route(0.5, 5, 8)], r"routes\[1\] starts with block 5, but routes\[0\] ends with block 5"),
        ([Route(1.0, 2, 8)], r"routes\[0\].selection_ratio=1 keeps no token"),
        ([Route(float("nan"), 2, 8)], "selection_ratio=nan"),
    ],
)
def test_a_route_that_does_not_fit_is_refused_by_name(routes, message):
    with pytest.raises(ValueError, match=message):
        TokenRouter(routes, depth=12)


def test_ratios_can_be_replaced_for_all_routes_or_one_by_one():
    router = TokenRouter([Route(0.5, 1, 2), Route(0.25, 4, 5)], depth=8)
    assert router.selection_ratios() == (0.5, 0.25)
    assert router.selection_ratios(0.75) == (0.75, 0.75)
    assert router.selection_ratios([0.0, 0.5]) == (0.0, 0.5)
    with pytest.raises(ValueError, match="one ratio for each of 2 routes"):
        router.selection_ratios([0.5])
    with pytest.raises(ValueError, match=r"selection_ratios\[1\]=1.5"):
        router.selection_ratios([0.5, 1.5])


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (r"noise has shape \(2, 5\), the tokens", lambda: TokenRouter.choose_ids_keep(tokens(), 0.5, noise=torch.zeros(2, 5))),
        ("rule returns scores of shape", lambda: TokenRouter.choose_ids_keep(tokens(), 0.5, rule=lambda x, u: u[:, :4])),
        ("ids_keep has shape .1, 3., but there are 2", lambda: TokenRouter.start_route(tokens(), IDS_KEEP[:1])),
        ("do not belong to one route", lambda: TokenRouter.end_route(tokens()[:, :3], tokens(), IDS_KEEP[:1])),
        ("do not belong to one route", lambda: TokenRouter.end_route(tokens()[:, :3], torch.cat([tokens()] * 2), IDS_KEEP)),
        ("do not belong to one route", lambda: TokenRouter.end_route(tokens()[:, :3, :1], tokens(), IDS_KEEP)),
    ],
)
def test_tensors_that_would_broadcast_or_drop_samples_are_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()
