"""From features to named numbers; references and their cache."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import REPOSITORY, forget_accelerate
from safetensors.torch import load_file

from common.errors import UserError
from evaluations import features, metrics
from evaluations.classifiers import DIGITS_WEIGHTS, ClassifierDetector
from evaluations.features import Features
from evaluations.images import NpzImages, evaluation_order, open_images, write_npz
from evaluations.metrics import Statistics, statistics_of
from evaluations.suite import METRICS, compute_metrics, display_name, find_metric, format_metrics, metrics_for, small_set
from sampling import evaluator
from sampling.evaluator import open_reference


@pytest.fixture(scope="module")
def detector():
    return ClassifierDetector("digits", DIGITS_WEIGHTS)


@pytest.fixture(scope="module")
def digits():
    images = open_images(REPOSITORY / "evaluations" / "digits_reference.npz")
    return next(images.batches(2000)), torch.from_numpy(images.labels)


class FakeInception:
    """A cheap detector with Inception's sizes: fixed random projections of the pixels."""

    name = "inception"

    def __init__(self, weights_hash: str = "0"):
        self.weights_hash, self.num_images = weights_hash, 0
        self.projection = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 2048 + 2023 + 10)).astype(np.float32))

    def features(self, images) -> Features:
        self.num_images += len(images)
        x = torch.as_tensor(images).float().mean((1, 2)) @ self.projection / 100
        return Features(self.name, pool=x[:, :2048], spatial=x[:, 2048:4071], logits=x[:, 4071:])


def test_metrics_of_digits_have_their_own_names_and_are_perfect_for_a_set_against_itself(detector, digits):
    images, labels = digits
    whole = detector.features(images)
    result = compute_metrics(whole, whole, labels)
    assert list(result) == [metric.name for metric in metrics_for("digits")]
    assert result["fd_digits"] == pytest.approx(0, abs=1e-6)
    assert (result["precision_digits"], result["recall_digits"]) == (1, 1) and result["class_agreement"] > 0.97
    lacking = compute_metrics(whole, detector.features(images[(labels < 5).numpy()]))
    assert (lacking["precision_digits"], "class_agreement" in lacking) == (1, False) and lacking["recall_digits"] < 0.6


def inception_features(num: int, seed: int) -> Features:
    images = np.random.default_rng(seed).integers(0, 256, (num, 2, 2, 3), dtype=np.uint8)
    return FakeInception().features(images)


def test_inception_gives_five_metrics():
    first, second = inception_features(60, 0), inception_features(50, 1)
    result = compute_metrics(first, second)
    assert list(result) == ["fid", "sfid", "inception_score", "precision", "recall"]
    expected = [metrics.frechet_distance(*pair) for pair in ((first.pool, second.pool), (first.spatial, second.spatial))]
    assert [result["fid"], result["sfid"]] == expected


def test_stored_statistics_are_used_and_metrics_that_need_images_are_left_out_with_a_message(caplog):
    samples, other = inception_features(30, 1), inception_features(40, 2)
    only = Features("inception", pool=samples.pool[:0], statistics={"pool": statistics_of(other.pool)})
    with caplog.at_level("INFO"):
        result = compute_metrics(only, samples)
    assert list(result) == ["fid", "inception_score"]
    assert result["fid"] == pytest.approx(metrics.frechet_distance(other.pool, samples.pool), rel=1e-6)
    assert "no sfid, precision, recall" in caplog.text
    assert "fid" not in compute_metrics(inception_features(9, 0), inception_features(1, 1))  # one image has no covariance


def test_the_table_gives_each_detector_its_names_and_the_primary_one_first():
    assert [metric.name for metric in metrics_for("dinov2")] == ["fd_dinov2", "precision_dinov2", "recall_dinov2"]
    assert [metric.name for metric in metrics_for("small-cifar10")] == [
        "fd_cifar10", "precision_cifar10", "recall_cifar10", "class_agreement_cifar10",
    ]  # fmt: skip
    assert metrics_for("small-digits") == []  # its names would be those of the embedded digits
    sets = [small_set(name) for name in ("small-fashion", "inception", "small-", "fashion")]
    assert sets == ["fashion", None, None, None]
    assert [metric.name for metric in METRICS if metric.direction == "lower"] == ["fid", "sfid", "fd_{}"]
    assert find_metric("precision").detectors == ("inception",) and find_metric("precision_digits").name == "precision_{}"
    assert find_metric("loss") is None is find_metric("fid50k")


def test_names_and_values_are_shown_in_readable_form():
    assert [display_name("fid", 50_000), display_name("fd_digits", 250)] == ["fid50k", "fd_digits250"]
    assert display_name("fd_dinov2", 5_000) == "fd_dinov2_5k"
    assert format_metrics({"fid": 12.34567, "recall": 0.34567, "loss": 12.34567}) == "fid 12.35, recall 0.346, loss 12.35"


@pytest.fixture
def npz(tmp_path):
    images = np.random.default_rng(3).integers(0, 256, (20, 2, 2, 3), dtype=np.uint8)
    write_npz(tmp_path / "reference.npz", iter(images), images.shape)
    return tmp_path / "reference.npz"


def load(file, detector) -> Features:
    """Return the features of a reference, as an evaluator loads them."""
    forget_accelerate()
    images = open_reference(str(file), "reference", [detector.name])
    return evaluator.Evaluator(Accelerator(cpu=True), [detector], images, 8, file.parent / "cache").references[0]


def test_a_reference_is_computed_once_and_again_for_changed_images_other_weights_and_a_damaged_cache(npz):
    detector = FakeInception()
    first, second = load(npz, detector), load(npz, detector)
    assert detector.num_images == 20
    assert all(torch.equal(second.tensors()[name], x) for name, x in first.tensors().items())
    other, size = FakeInception(weights_hash="1"), npz.stat().st_size
    load(npz, other)
    assert other.num_images == 20
    images = np.full((20, 2, 2, 3), 200, dtype=np.uint8)  # the same size on disk
    write_npz(npz, iter(images), images.shape)
    assert npz.stat().st_size == size
    assert torch.equal(load(npz, other).pool, other.features(images).pool) and other.num_images == 60
    for file in npz.parent.glob("cache/reference.npz_inception_*.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    load(npz, other)
    assert other.num_images == 80 and "pool" in load_file(max(npz.parent.glob("cache/*"), key=lambda file: file.stat().st_size))


def test_a_folder_that_cannot_be_written_to_costs_only_the_cache(npz, caplog, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert len(load(npz, FakeInception())) == 20
    assert "computed at every start" in caplog.text and not list(npz.parent.glob("cache/*"))


def test_statistics_of_a_large_reference_are_computed_once_and_cached(detector, digits, tmp_path, monkeypatch):
    write_npz(tmp_path / "digits.npz", iter(digits[0][:200]), (200, 8, 8, 3))
    first = load(tmp_path / "digits.npz", detector)
    monkeypatch.setattr(features, "statistics_of", None)  # not to be called again
    second = load(tmp_path / "digits.npz", detector)
    assert torch.equal(statistics_of(second.pool).sigma, second.statistics["pool"].sigma)
    assert torch.equal(first.statistics["pool"].mu, second.statistics["pool"].mu)


def test_stored_statistics_are_used_only_for_their_detector(tmp_path, npz, detector):
    file, inception, pool = tmp_path / "with.npz", FakeInception(), {"mu": np.zeros(2048), "sigma": np.eye(2048)}
    dinov2 = {"mu_dinov2": np.ones(1024), "sigma_dinov2": np.diag(np.arange(1024.0))}
    np.savez(file, next(NpzImages(npz).batches(20)), **pool, mu_s=np.ones(2023), sigma_s=np.eye(2023), **dinov2)
    widths = {layer: len(stored.mu) for layer, stored in NpzImages(file).statistics["inception"].items()}
    assert widths == {"pool": 2048, "spatial": 2023}
    assert torch.equal(NpzImages(file).statistics["dinov2"]["pool"].sigma.diag(), torch.arange(1024).double())
    assert torch.equal(load(file, inception).statistics["pool"].sigma, torch.eye(2048).double())
    assert "digits" not in NpzImages(file).statistics
    np.savez(tmp_path / "alone.npz", **pool)
    alone = load(tmp_path / "alone.npz", inception)
    assert len(alone) == 0 and set(alone.statistics) == {"pool"}
    assert not list(tmp_path.glob("cache/alone.npz*"))
    with pytest.raises(UserError, match=r"reference=.*alone.npz holds no images and no statistics of the digits detector"):
        load(tmp_path / "alone.npz", detector)
    with pytest.raises(UserError, match="evaluation.reference: is not set"):
        open_reference(None, "evaluation.reference", [])


@pytest.fixture(scope="module")
def on_disk(detector, digits, tmp_path_factory):
    """Fixture: on_disk(order) returns (evaluator, set) for 500 digits in this order, as an .npz with labels."""
    folder, (images, labels) = tmp_path_factory.mktemp("on_disk"), digits
    write_npz(folder / "reference.npz", iter(images), images.shape, background="white")
    forget_accelerate()
    reference = open_reference(str(folder / "reference.npz"), "reference", ["digits"], 8)
    metrics_of = evaluator.Evaluator(Accelerator(cpu=True), [detector], reference, 64, folder / "cache")

    def make(order):
        write_npz(folder / "set.npz", iter(images[order]), images[order].shape, labels.numpy()[order])
        return metrics_of, NpzImages(folder / "set.npz")

    return make


def test_an_image_set_in_the_order_of_its_classes_has_the_figures_of_the_mixed_set(on_disk, digits):
    mixed = np.random.default_rng(5).permutation(1797)[:500]
    figures = {}
    for name, order in (("mixed", mixed), ("sorted", mixed[np.argsort(digits[1].numpy()[mixed], kind="stable")])):
        metrics_of, images = on_disk(order)
        (whole, labels), (part, few) = metrics_of.features_of_set(images, 500), metrics_of.features_of_set(images, 100)
        assert torch.equal(part[0].pool, whole[0].pool[:100]) and np.array_equal(few, labels[:100])
        values = metrics_of.compute_metrics(whole, labels)
        error = metrics.standard_error(metrics_of.jackknife(whole, labels, 10)["fd_digits"])
        score = metrics.inception_score(whole[0].logits, split_size=50)
        figures[name] = values["fd_digits"], error, metrics_of.compute_metrics(part, few)["fd_digits"], score
        assert values["class_agreement"] > 0.97  # the labels follow their images
    (fd, error, fd_of_part, score), in_order = figures["mixed"], figures["sorted"]
    assert in_order[0] == pytest.approx(fd, rel=1e-6)  # 26.57 and 615.63 instead of 3.66 and 24.31 before
    assert 1 / 3 < in_order[1] / error < 3 and in_order[2] < 3 * fd_of_part and in_order[3] == pytest.approx(score, rel=0.1)


def test_the_order_of_a_set_is_fixed_and_a_part_is_read_forwards_by_all_processes(on_disk, detector, digits, monkeypatch):
    order = evaluation_order(60)
    assert order[:4].tolist() == [16, 27, 20, 8] and sorted(order) == [*range(60)]
    metrics_of, images = on_disk(np.arange(60))
    expected = detector.features(digits[0][order[:40]]).pool
    ranges = []

    def in_three_processes(accelerator, count, compute):
        ranges.append(count)
        parts = [compute(start, min(start + 14, count)) for start in range(0, count, 14)]
        return features.join_features(parts)

    torch.testing.assert_close(metrics_of.features_of_set(images, 40)[0][0].pool, expected)
    monkeypatch.setattr(evaluator, "compute_on_all_processes", in_three_processes)
    torch.testing.assert_close(metrics_of.features_of_set(images, 40)[0][0].pool, expected)
    assert ranges == [40]


def test_labels_that_a_detector_does_not_know_and_infinite_values_are_left_out(detector, digits, caplog):
    caplog.set_level("INFO")
    samples = detector.features(digits[0][:50])
    assert "class_agreement" not in compute_metrics(samples, samples, digits[1][:50] + 10)
    assert "no class_agreement: missing images" in caplog.text
    far = Statistics(torch.full((64,), 1e200, dtype=torch.float64), torch.eye(64, dtype=torch.float64))
    huge = Features("digits", pool=samples.pool[:0], statistics={"pool": far})
    assert "fd_digits" not in compute_metrics(huge, samples) and "no fd_digits: the value is NaN or infinite" in caplog.text


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8])
def test_features_that_four_processes_compute_are_those_of_one_process_in_order(monkeypatch, count):
    lengths, gathered = set(), {1: [], 3: []}  # by number of features

    def compute(start, stop):
        """Compute features as `Evaluator` does for images: no process reads beyond the last image."""
        lengths.add(stop - start)
        items = torch.arange(min(start, count - 1), min(stop, count)) if count else torch.empty(0)
        return [Features("d", pool=items[:, None].float(), spatial=items[:, None].repeat(1, 3).float())]

    def gather(tensor):
        parts = gathered[tensor.shape[1]]
        parts.insert(0, tensor)
        assert len({len(part) for part in parts}) == 1
        return parts if len(parts) == 4 else []

    monkeypatch.setattr(evaluator, "gather_on_main", gather)
    for rank in (3, 2, 1, 0):  # the main process gathers last
        accelerator = SimpleNamespace(num_processes=4, process_index=rank, is_main_process=rank == 0)
        found = evaluator.compute_on_all_processes(accelerator, count, compute)
        assert len(found) == (rank == 0) and len(lengths) == 1  # all processes call collectives equally often
    assert found[0].pool.flatten().tolist() == [*range(count)] and found[0].spatial.shape == (count, 3)
