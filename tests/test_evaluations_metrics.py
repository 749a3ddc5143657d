"""Compare the metrics with closed forms and with slow, obvious implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evaluations import metrics
from evaluations.features import Features
from evaluations.metrics import Statistics, statistics_of
from evaluations.suite import compute_metrics, jackknife, metrics_for


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


@pytest.mark.parametrize("chunk_size", [1, 60, 1008])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_every_chunk_size_gives_the_mean_and_covariance_of_numpy(chunk_size, offset):
    random = np.random.default_rng(chunk_size)
    x = random.standard_normal((1009, 17)) @ random.standard_normal((17, 17)) + offset
    result = statistics_of(torch.from_numpy(x), chunk_size)
    np.testing.assert_allclose(result.mu.numpy(), x.mean(0), rtol=1e-12, atol=1e-13)
    reference = np.cov(x - offset, rowvar=False)
    # At an offset of 1e6, the input itself is rounded to about 1e-10. A plain sum of x x^T would be wrong by 1e-3.
    tolerance = 1e-8 if offset else 1e-13
    np.testing.assert_allclose(result.sigma.numpy(), reference, rtol=0, atol=tolerance * np.abs(reference).max())


def gaussian(mu, sigma) -> Statistics:
    return Statistics(torch.as_tensor(mu, dtype=torch.float64), torch.as_tensor(sigma, dtype=torch.float64))


def test_gaussians_with_commuting_covariances_have_the_closed_form_distance():
    random = np.random.default_rng(0)
    basis = np.linalg.qr(random.standard_normal((40, 40)))[0]
    a, b = random.uniform(0.01, 5, 40), random.uniform(0.01, 5, 40)
    mu1, mu2 = random.standard_normal(40), random.standard_normal(40)
    expected = ((mu1 - mu2) ** 2).sum() + ((np.sqrt(a) - np.sqrt(b)) ** 2).sum()
    first, second = gaussian(mu1, basis * a @ basis.T), gaussian(mu2, basis * b @ basis.T)
    assert metrics.frechet_distance(first, second) == pytest.approx(expected, rel=1e-8)
    assert metrics.frechet_distance(second, first) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("n1", "n2"), [(500, 600), (20, 30), (20, 600), (500, 30), (40, 41), (41, 40)])
def test_every_way_to_compute_the_frechet_distance_agrees_with_its_definition(n1, n2):
    # n samples span at most n - 1 of 40 dimensions. An SVD of the cross product gives the trace of the root, by its definition.
    x, y = normal(5, n1, 40) * 2, normal(6, n2, 40) + 0.1
    xc, yc = (x - x.mean(0)) / (n1 - 1) ** 0.5, (y - y.mean(0)) / (n2 - 1) ** 0.5
    nuclear = np.linalg.norm((xc @ yc.T).numpy(), "nuc")
    expected = ((x.mean(0) - y.mean(0)).square().sum() + xc.square().sum() + yc.square().sum()).item() - 2 * nuclear
    assert metrics.frechet_distance(x, y) == pytest.approx(expected, rel=1e-9)
    assert metrics.frechet_distance(statistics_of(x), statistics_of(y)) == pytest.approx(expected, rel=1e-5)
    assert metrics.frechet_distance(x, x) == pytest.approx(0, abs=1e-6)
    if n1 <= 40:
        assert metrics.frechet_distance(x, statistics_of(y)) == pytest.approx(expected, rel=1e-6)


def plain_inception_score(logits: np.ndarray) -> float:
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return float(np.exp((p * (np.log(p) - np.log(p.mean(0)))).sum(1).mean()))


def test_the_inception_score_is_the_mean_over_consecutive_splits_and_a_short_split_counts_fully():
    logits = normal(8, 23, 6) * 3
    expected = np.mean([plain_inception_score(part.numpy()) for part in (logits[:10], logits[10:20], logits[20:])])
    assert metrics.inception_score(logits, split_size=10) == pytest.approx(expected, rel=1e-12)
    assert metrics.inception_score(logits.flip(0), split_size=10) != pytest.approx(expected, rel=1e-3)


def test_the_inception_score_is_1_for_equal_predictions_and_the_number_of_classes_for_certain_ones():
    sure = torch.eye(10).repeat(5, 1) * 2000  # the softmax underflows: log(softmax) would be -inf
    assert metrics.inception_score(sure) == pytest.approx(10, rel=1e-12)
    assert metrics.inception_score(torch.ones(50, 10)) == pytest.approx(1, rel=1e-12)
    assert metrics.inception_score(torch.tensor([[3000.0, 0.0]]).repeat(9, 1)) == pytest.approx(1, rel=1e-12)


def test_class_agreement_is_the_fraction_of_samples_classified_as_requested():
    logits = torch.eye(4)
    assert metrics.class_agreement(logits, torch.tensor([0, 1, 2, 0])) == 0.75
    with pytest.raises(ValueError, match="outside the detector's 4 classes"):
        metrics.class_agreement(logits, torch.tensor([0, 1, 2, 4]))


def brute_force(reference: np.ndarray, samples: np.ndarray, k: int = 3) -> tuple[float, float]:
    def distances(a, b):
        return ((a[:, None].astype(np.float64) - b[None].astype(np.float64)) ** 2).sum(2)

    def radii(x):
        return np.sort(distances(x, x), axis=1)[:, k]  # column 0 is the point itself

    d = distances(reference, samples)
    return (d <= radii(reference)[:, None]).any(0).mean(), (d <= radii(samples)[None]).any(1).mean()


@pytest.mark.parametrize("tile_size", [7, 1000])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_precision_and_recall_agree_with_brute_force_for_every_tile_size(tile_size, offset):
    # At an offset of 1000, |a|^2 + |b|^2 - 2ab has no correct digit in float32 unless the features are centred first.
    reference, samples = (normal(10, 211, 5).float() + offset), (normal(11, 157, 5).float() * 0.7 + 0.8 + offset)
    expected = brute_force(reference.numpy(), samples.numpy())
    assert 0.2 < min(expected) < max(expected) - 0.1 < 0.88
    assert metrics.precision_recall(reference, samples, tile_size=tile_size) == pytest.approx(expected, abs=1e-12)


def test_the_radii_of_a_reference_are_computed_once_and_change_nothing(monkeypatch):
    computed = []
    find = metrics.squared_radii
    monkeypatch.setattr(metrics, "squared_radii", lambda x, tile_size: computed.append(len(x)) or find(x, tile_size))
    pool = normal(10, 211, 5).float() + 1000
    reference = Features("dinov2", pool=pool)
    for seed in (11, 12):
        samples = Features("dinov2", pool=normal(seed, 157, 5).float() * 0.7 + 1000.8)
        found = compute_metrics(reference, samples)
        expected = brute_force(pool.numpy(), samples.pool.numpy())
        assert (found["precision_dinov2"], found["recall_dinov2"]) == pytest.approx(expected, abs=1e-12)
    assert computed == [211, 157, 157]
    # A selection of other points has other radii.
    assert len(reference.select(torch.arange(20)).squared_radii_on("cpu")) == 20


def test_a_point_on_the_border_of_a_ball_is_inside():
    near = torch.tensor([[0.0], [1.0], [2.0], [3.0]])  # the ball around 3 has radius 3 and ends at 6
    far = torch.tensor([[6.0], [100.0], [200.0], [300.0]])
    assert metrics.precision_recall(near, far) == (0.25, 1.0)
    assert metrics.precision_recall(far, near) == (1.0, 0.25)


@pytest.mark.parametrize("spectrum", ["equal", "decaying"])
def test_95_percent_intervals_of_the_jackknife_cover_the_mean_distance_at_this_sample_size(spectrum):
    """Compare 400 sample sets of one Gaussian with another known Gaussian. Intervals are Student's, with 9 degrees of freedom."""
    g, dim = torch.Generator().manual_seed(0), 16 if spectrum == "equal" else 64
    variances = torch.ones(dim).double() if spectrum == "equal" else 1 / torch.arange(1, dim + 1).double()
    known = Statistics(0.1 * variances.sqrt(), torch.diag(1.2 * variances))
    reference = Features("dinov2", pool=torch.empty(0, dim), statistics={"pool": known})
    draws = [Features("dinov2", pool=torch.randn(1000, dim, generator=g).double() * variances.sqrt()) for _ in range(400)]
    distances = torch.tensor([metrics.frechet_distance(known, one.pool) for one in draws])
    errors = torch.tensor([metrics.standard_error(jackknife(reference, one, None, 10)["fd_dinov2"]) for one in draws])
    covered = ((distances - distances.mean()).abs() < 2.262 * errors).double().mean()
    assert 0.93 < covered < 0.97
    assert 0.9 < errors.square().mean().sqrt() / distances.std() < 1.15


def test_the_jackknife_leaves_out_one_group_of_samples_and_labels_at_a_time():
    x, labels = torch.randn(25, 4, generator=torch.Generator().manual_seed(0)), torch.arange(25) % 2
    reference = Features("digits", pool=torch.randn(30, 4), logits=torch.randn(30, 4))
    found = jackknife(reference, Features("digits", pool=x, logits=x), labels, 10)
    assert list(found) == [metric.name for metric in metrics_for("digits") if metric.in_jackknife]
    assert {len(values) for values in found.values()} == {10}
    kept = torch.arange(25) >= 3  # 25 samples in 10 groups: five groups of 3, then five of 2
    assert found["fd_digits"][0] == pytest.approx(metrics.frechet_distance(reference.pool, x[kept]))
    assert found["class_agreement"][0] == pytest.approx(metrics.class_agreement(x[kept], labels[kept]))
    assert jackknife(reference, Features("digits", pool=x[:19], logits=x[:19]), None, 10) == {}
    labels[0] = -1  # only without the first group, the detector knows all labels
    assert "class_agreement" not in jackknife(reference, Features("digits", pool=x, logits=x), labels, 10)
