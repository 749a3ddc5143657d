"""Routes and the router, against positions and gradients computed by hand."""

import pytest
import torch

from routing_module import Route, TokenRouter, importance_scores, num_kept_tokens

B, N, D = 2, 6, 3


def tokens():
    return torch.arange(B * N * D, dtype=torch.float32).reshape(B, N, D)


def test_lowest_number_of_tokens_skips_is_the_integer_part():
    assert [num_kept_tokens(n, r) for n, r in ((16, 0.5), (7, 0.5), (256, 0.75), (10, 0.0), (3, 0.9))] == [8, 4, 64, 10, 1]


def test_mask_keeps_the_highest_scores_of_each_sample_in_ascending_positions():
    scores = torch.tensor([[0.1, 0.9, 0.2, 0.8, 0.3, 0.7], [0.6, 0.1, 0.5, 0.2, 0.9, 0.3]])
    ids_keep = TokenRouter.choose_ids_keep(tokens(), 0.5, scores=scores)
    assert ids_keep.tolist() == [[1, 3, 5], [0, 2, 4]]


def test_mask_is_uniform_over_positions_and_differs_between_samples():
    x = torch.zeros(4000, 8, 1)
    ids_keep = TokenRouter.choose_ids_keep(x, 0.25, generator=torch.Generator().manual_seed(0))
    assert ids_keep.shape == (4000, 6)
    counts = torch.bincount(ids_keep.flatten(), minlength=8) / 4000
    assert (counts - 0.75).abs().max() < 0.03  # four standard deviations of a share of 4,000 draws
    assert len({tuple(row) for row in ids_keep.tolist()}) == 28  # every subset of 6 of 8 occurs


def test_mask_follows_its_generator():
    first, second, other = (
        TokenRouter.choose_ids_keep(tokens(), 0.5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_importance_with_full_weight_keeps_exactly_the_largest_l1_norms_and_inverse_the_smallest():
    norms = torch.tensor([[5.0, 1.0, 9.0, 3.0, 7.0, 2.0], [0.6, 0.1, 0.2, 0.5, 0.4, 0.3]])
    signs = torch.tensor([1.0, -1.0, 1.0])
    x = norms[..., None] / 3 * signs  # (2, 6, 3) tokens with these L1-norms
    chance = torch.rand(2, 6, generator=torch.Generator().manual_seed(0))
    largest = TokenRouter.keep_highest(importance_scores(x, chance, 1.0), 3)
    assert largest.tolist() == [[0, 2, 4], [0, 3, 4]]
    smallest = TokenRouter.keep_highest(importance_scores(x, chance, 1.0, inverse=True), 3)
    assert smallest.tolist() == [[1, 3, 5], [1, 2, 5]]


def test_importance_is_normalised_per_sample_and_mixed_with_chance():
    x = torch.tensor([[[2.0], [-4.0], [3.0]], [[200.0], [400.0], [300.0]]])
    chance = torch.tensor([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]])
    expected = 0.75 * chance + 0.25 * torch.tensor([[0.0, 1.0, 0.5]])
    assert torch.allclose(importance_scores(x, chance, 0.25), expected)
    assert torch.equal(importance_scores(x, chance, 0.0), chance)
    equal = importance_scores(torch.ones(1, 3, 2), chance[:1], 0.5)  # equal norms leave the choice to chance
    assert torch.allclose(equal, 0.5 * chance[:1])


def test_routed_tokens_return_to_their_positions_and_the_others_are_bit_identical():
    x, ids_keep = tokens(), torch.tensor([[1, 3, 5], [0, 2, 4]])
    kept = TokenRouter.start_route(x, ids_keep)
    assert torch.equal(kept, torch.stack([x[0, [1, 3, 5]], x[1, [0, 2, 4]]]))
    before = x.clone()
    out = TokenRouter.end_route(kept + 100, x, ids_keep)
    assert torch.equal(x, before)  # out of place
    assert torch.equal(out[0, [0, 2, 4]], x[0, [0, 2, 4]]) and torch.equal(out[1, [1, 3, 5]], x[1, [1, 3, 5]])
    assert torch.equal(out[0, [1, 3, 5]], x[0, [1, 3, 5]] + 100) and torch.equal(out[1, [0, 2, 4]], x[1, [0, 2, 4]] + 100)


def test_gradients_reach_routed_and_skipping_tokens():
    x = tokens().requires_grad_()
    ids_keep = torch.tensor([[1, 3, 5], [0, 2, 4]])
    weight = torch.arange(1.0, B * N * D + 1).reshape(B, N, D)
    out = TokenRouter.end_route(3 * TokenRouter.start_route(x, ids_keep), x, ids_keep)
    (out * weight).sum().backward()
    factor = torch.tensor([[1, 3, 1, 3, 1, 3], [3, 1, 3, 1, 3, 1]])[..., None]
    assert torch.equal(x.grad, weight * factor)


def test_anything_with_a_token_axis_can_be_gathered():
    ids_keep = torch.tensor([[0, 4], [1, 5]])
    positions = torch.arange(B * N).reshape(B, N)
    assert TokenRouter.start_route(positions, ids_keep).tolist() == [[0, 4], [7, 11]]
    rope = torch.arange(B * N * 4).reshape(B, N, 2, 2)
    assert torch.equal(TokenRouter.start_route(rope, ids_keep)[1, 0], rope[1, 1])


def test_negative_indices_count_from_the_end():
    assert TokenRouter([Route(0.5, 2, -4)], depth=12).routes == (Route(0.5, 2, 8),)
    assert TokenRouter([Route(0.5, -10, -1)], depth=12).routes == (Route(0.5, 2, 11),)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ([Route(0.5, 2, 12)], r"routes\[0\].end_layer_idx=12 does not exist in a network of 12 blocks; use -12 to 11"),
        ([Route(0.5, -13, 3)], r"routes\[0\].start_layer_idx=-13"),
        ([Route(0.5, 8, 2)], r"start_layer_idx=8 .* comes after end_layer_idx=2"),
        ([Route(0.5, 2, 5), Route(0.5, 5, 8)], r"routes\[1\] starts at block 5, but routes\[0\] ends at block 5"),
        ([Route(0.5, 6, 8), Route(0.5, 1, 3)], r"list the routes in order"),
        ([Route(1.0, 2, 8)], r"routes\[0\].selection_ratio=1.0 must be a number in \[0, 1\)"),
        ([Route(-0.1, 2, 8)], r"selection_ratio=-0.1"),
        ([Route(float("nan"), 2, 8)], r"selection_ratio=nan"),
        ([Route(0.5, 2.5, 8)], r"start_layer_idx=2.5 must be a whole number"),
        ([Route("half", 2, 8)], r"selection_ratio='half'"),
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


def test_scores_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"scores have shape \(2, 5\), the tokens need \(2, 6\)"):
        TokenRouter.choose_ids_keep(tokens(), 0.5, scores=torch.zeros(2, 5))
