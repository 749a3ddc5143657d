"""From images to named numbers, with the detector of the embedded digits; references and their cache."""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from safetensors import safe_open
from safetensors.torch import load_file

from common.errors import UserError
from evaluations import digits_detector, metrics, reference, suite
from evaluations.digits_detector import DigitsDetector
from evaluations.features import Features, concatenate, extract
from evaluations.images import open_images
from evaluations.npz import NpzImages, write_npz
from evaluations.statistics import Statistics, statistics_of
from evaluations.suite import (
    METRICS,
    MetricName,
    caveats,
    evaluate,
    find_metric,
    format_metric,
    metric_name,
    metrics_of,
    read_metric_name,
)
from latents.autoencoders import to_uint8


@pytest.fixture(scope="module")
def detector():
    return DigitsDetector()


@pytest.fixture(scope="module")
def digits():
    images, labels = digits_detector.load_digits()
    return images.numpy(), labels


class FakeInception:
    """Features that are cheap and of Inception's sizes: fixed random projections of the pixels."""

    name = "inception"

    def __init__(self, weights_hash: str = "0"):
        self.weights_hash, self.num_images = weights_hash, 0
        self.projection = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 2048 + 2023 + 10)).astype(np.float32))

    def features(self, images) -> Features:
        self.num_images += len(images)
        x = torch.as_tensor(images).float().mean((1, 2)) @ self.projection / 100
        return Features(self.name, pool=x[:, :2048], spatial=x[:, 2048:4071], logits=x[:, 4071:])


# ----------------------------------------------------------------------------------------------------------------------
# The digits' detector.


def test_the_detector_classifies_digits_it_was_not_trained_on(detector, digits):
    images, labels = digits
    _, held_out = digits_detector.split(len(images))
    agreement = metrics.class_agreement(detector.features(images[held_out.numpy()]).logits, labels[held_out])
    assert agreement >= 0.97
    with safe_open(digits_detector.WEIGHTS_FILE, framework="pt") as f:
        assert agreement == pytest.approx(float(f.metadata()["held_out_accuracy"]), abs=0.003)  # as measured when it was made


def test_the_reference_of_the_digits_holds_what_training_decodes():
    images, labels = digits_detector.load_digits()
    shard = load_file(REPOSITORY / "latents" / "digits.safetensors")
    assert torch.equal(images, to_uint8(shard["latents"].float()))
    assert torch.equal(labels, shard["labels"])


def test_training_the_detector_again_gives_an_equally_good_one_every_time():
    net, accuracy = digits_detector.train(num_epochs=4)
    again, _ = digits_detector.train(num_epochs=4)
    assert accuracy > 0.9
    for name, weight in net.state_dict().items():
        torch.testing.assert_close(weight, again.state_dict()[name], rtol=0, atol=1e-5, msg=name)


def test_features_do_not_depend_on_the_batch(detector, digits):
    images = digits[0][:50]
    whole = detector.features(images)
    (parts,) = extract([detector], np.split(images, [1, 20]))
    torch.testing.assert_close(parts.pool, whole.pool, rtol=1e-5, atol=1e-5)
    assert whole.pool.shape == (50, 64)
    assert whole.logits.shape == (50, 10)
    assert whole.spatial is None


def test_images_of_another_size_and_other_weights_are_refused(detector, tmp_path):
    with pytest.raises(ValueError, match="images are 16x8 pixels; the digits detector takes 8x8"):
        detector.features(np.zeros((1, 8, 16, 3), dtype=np.uint8))
    (tmp_path / "a.safetensors").write_text("hello")
    for name in ("a.safetensors", "none.safetensors"):
        with pytest.raises(ValueError, match=rf"{name} is no digits detector"):
            DigitsDetector(weights=tmp_path / name)


# ----------------------------------------------------------------------------------------------------------------------
# All numbers.


def test_digits_get_their_own_names_and_a_set_is_perfect_against_itself(detector, digits):
    images, labels = digits
    features = detector.features(images)
    result = evaluate(features, features, labels)
    assert list(result) == ["fd_digits", "precision_digits", "recall_digits", "class_agreement"]
    assert result["fd_digits"] == pytest.approx(0, abs=1e-6)
    assert (result["precision_digits"], result["recall_digits"]) == (1, 1)
    assert result["class_agreement"] > 0.97


def test_the_digits_distance_grows_with_noise(detector, digits):
    images, _ = digits
    first, second = detector.features(images[::2]), images[1::2]
    random = np.random.default_rng(0)
    distances = []
    for strength in (0, 20, 50, 120):
        noisy = (second + random.standard_normal((*second.shape[:3], 1)) * strength).round().clip(0, 255).astype(np.uint8)
        distances.append(evaluate(first, detector.features(noisy))["fd_digits"])
    assert distances == sorted(distances)
    assert distances[-1] > 10 * distances[0]


def test_one_missing_class_lowers_recall_but_not_precision(detector, digits):
    images, labels = digits
    first, second = detector.features(images[::2]), detector.features(images[1::2][(labels[1::2] < 5).numpy()])
    result = evaluate(first, second)
    assert result["precision_digits"] > 0.75
    assert result["recall_digits"] < 0.6
    swapped = evaluate(second, first)
    assert (swapped["precision_digits"], swapped["recall_digits"]) == (result["recall_digits"], result["precision_digits"])
    assert "class_agreement" not in result


def test_asking_for_other_classes_lowers_the_agreement(detector, digits):
    features, labels = detector.features(digits[0]), digits[1]
    assert evaluate(features, features, (labels + 1) % 10)["class_agreement"] < 0.05


def test_the_first_metric_of_a_detector_is_its_primary_one_and_distances_are_better_when_lower():
    assert [metrics_of(detector)[0].name for detector in ("inception", "digits")] == ["fid", "fd_digits"]
    assert {METRICS[name].direction for name in ("fid", "sfid", "fd_digits")} == {"lower"}
    others = ("inception_score", "precision", "recall", "precision_digits", "recall_digits", "class_agreement")
    assert {METRICS[name].direction for name in others} == {"higher"}
    assert metrics_of("another") == []


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("fid50k/cfg1.0", ("fid", 50_000, "cfg1.0")),
        ("sfid5k/cfg1.25", ("sfid", 5_000, "cfg1.25")),
        ("fd_digits250/sparse,0.0,0.5,1.5", ("fd_digits", 250, "sparse,0.0,0.5,1.5")),
        ("precision_digits1500/guided", ("precision_digits", 1_500, "guided")),
        ("fd_dinov2_50k/cfg1.0", ("fd_dinov2", 50_000, "cfg1.0")),
        ("recall_dinov2_70/cfg1.5", ("recall_dinov2", 70, "cfg1.5")),
    ],
)
def test_full_names_are_read_as_they_are_made(name, parts):
    assert read_metric_name(name) == MetricName(*parts)
    assert metric_name(*parts) == name
    assert find_metric(name) is METRICS[parts[0]]


def test_a_name_without_guidance_and_a_plain_one_are_found_and_other_columns_are_no_metrics():
    assert read_metric_name("fd_digits250") == MetricName("fd_digits", 250, "")
    assert find_metric("fd_digits250") is find_metric("fd_digits") is METRICS["fd_digits"]
    assert read_metric_name("fd_dinov2") is None and find_metric("fd_dinov2") is METRICS["fd_dinov2"]
    assert read_metric_name("fid_clip5k/cfg1.0") == MetricName("fid_clip", 5_000, "cfg1.0")  # of another table
    for name in ("loss", "step", "images_per_sec", "fid_clip5k/cfg1.0", "fid/cfg1.0"):
        assert find_metric(name) is None


def test_values_are_formatted_as_the_table_says():
    assert [format_metric(name, 12.34567) for name in ("fid50k/cfg1.0", "recall", "loss")] == ["12.35", "12.346", "12.35"]


def inception_features(num: int, seed: int) -> Features:
    images = np.random.default_rng(seed).integers(0, 256, (num, 2, 2, 3), dtype=np.uint8)
    return FakeInception().features(images)


@pytest.fixture
def forget_caveats():
    """A caveat is logged once in a process; the test is to see it."""
    suite._warn_once.cache_clear()


def test_inception_gets_the_five_names_with_warnings_about_too_few_samples(caplog, forget_caveats):
    first, second = inception_features(60, 0), inception_features(50, 1)
    with caplog.at_level(logging.WARNING):
        result = evaluate(first, second)
    assert list(result) == ["fid", "sfid", "inception_score", "precision", "recall"]
    assert result["fid"] == pytest.approx(metrics.frechet_distance(first.pool, second.pool), rel=1e-12)
    assert result["sfid"] == pytest.approx(metrics.frechet_distance(first.spatial, second.spatial), rel=1e-12)
    assert result["fid"] != pytest.approx(result["sfid"])
    assert "FID and sFID from 50 samples, fewer than the 2048 features" in caplog.text
    assert "Inception Score from 50 samples, less than a split of 5000" in caplog.text


def test_enough_samples_need_no_caveat_and_a_short_last_split_does():
    enough = Features("inception", pool=torch.zeros(10000, 2048), logits=torch.zeros(10000, 4))
    assert caveats(enough, enough) == []
    more = Features("inception", pool=torch.zeros(10001, 2048), logits=torch.zeros(10001, 4))
    assert len(caveats(enough, more)) == 1
    assert "last split holds 1 of 5000" in caveats(enough, more)[0]


def test_features_of_different_detectors_are_not_compared(detector, digits):
    with pytest.raises(ValueError, match="features of inception, the samples of digits"):
        evaluate(inception_features(9, 0), detector.features(digits[0][:9]))


def small_statistics(features: Features) -> dict[str, Statistics]:
    return {"pool": statistics_of(features.pool), "spatial": statistics_of(features.spatial)}


def test_stored_statistics_are_used_and_those_without_images_have_no_precision(caplog, forget_caveats):
    samples, other = inception_features(30, 1), inception_features(40, 2)
    known = small_statistics(other)
    only = Features("inception", pool=samples.pool[:0], logits=samples.logits[:0], spatial=samples.spatial[:0], statistics=known)
    with caplog.at_level(logging.WARNING):
        result = evaluate(only, samples)
    assert list(result) == ["fid", "sfid", "inception_score"]
    assert result["fid"] == pytest.approx(metrics.frechet_distance(other.pool, samples.pool), rel=1e-6)
    assert result["sfid"] == pytest.approx(metrics.frechet_distance(other.spatial, samples.spatial), rel=1e-6)
    assert "no precision and recall" in caplog.text


# ----------------------------------------------------------------------------------------------------------------------
# References.


@pytest.fixture
def npz(tmp_path):
    images = np.random.default_rng(3).integers(0, 256, (20, 2, 2, 3), dtype=np.uint8)
    write_npz(tmp_path / "reference.npz", iter(images), images.shape)
    return tmp_path / "reference.npz"


def test_a_reference_is_put_through_the_detector_once(npz):
    detector = FakeInception()
    first = reference.load_reference(NpzImages(npz), detector, batch_size=8)
    assert detector.num_images == 20
    second = reference.load_reference(NpzImages(npz), detector)
    assert detector.num_images == 20
    for name, x in first.tensors().items():
        assert torch.equal(second.tensors()[name], x)
    assert [file.name for file in npz.parent.iterdir() if file != npz] == ["reference.npz.inception-features.safetensors"]


def test_changed_images_or_weights_are_computed_again(npz):
    reference.load_reference(NpzImages(npz), FakeInception())
    other = FakeInception(weights_hash="1")
    reference.load_reference(NpzImages(npz), other)
    assert other.num_images == 20
    data = bytearray(npz.read_bytes())
    images = np.full((20, 2, 2, 3), 200, dtype=np.uint8)  # of the same size on disk
    write_npz(npz, iter(images), images.shape)
    assert npz.stat().st_size == len(data)
    features = reference.load_reference(NpzImages(npz), other)
    assert other.num_images == 40
    assert torch.equal(features.pool, other.features(images).pool)


def test_a_damaged_cache_is_replaced(npz, caplog):
    detector = FakeInception()
    reference.load_reference(NpzImages(npz), detector)
    file = reference.cache_file(NpzImages(npz), detector)
    file.write_bytes(file.read_bytes()[:1000])
    with caplog.at_level(logging.WARNING):
        reference.load_reference(NpzImages(npz), detector)
    assert "cannot be read" in caplog.text
    assert detector.num_images == 40
    assert "pool" in load_file(file)


def test_a_folder_that_cannot_be_written_to_costs_only_the_cache(npz, caplog, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        features = reference.load_reference(NpzImages(npz), FakeInception())
    assert len(features) == 20
    assert "computed at every start" in caplog.text
    assert list(npz.parent.iterdir()) == [npz]


def test_two_writers_of_a_cache_with_one_process_id_use_two_temporary_files(npz, monkeypatch):
    temporary = []
    replace = os.replace
    monkeypatch.setattr(os, "getpid", lambda: 7)  # as in two containers
    monkeypatch.setattr(os, "replace", lambda source, target: temporary.append(source) or replace(source, target))
    images, detector = NpzImages(npz), FakeInception()
    (features,) = reference.features_of_images(images, [detector])
    for _ in range(2):
        reference.write_cache(images, detector, features)
    assert len({*temporary}) == 2 and {file.parent for file in temporary} == {npz.parent}
    assert torch.equal(reference.read_cache(images, detector).pool, features.pool)


def test_statistics_of_a_large_reference_are_computed_once_and_cached(detector, digits, tmp_path, monkeypatch):
    images = digits[0][:200]
    write_npz(tmp_path / "digits.npz", iter(images), images.shape)
    first = reference.load_reference(open_images(tmp_path / "digits.npz"), detector)
    monkeypatch.setattr(reference, "statistics_of", None)  # not to be called again
    second = reference.load_reference(open_images(tmp_path / "digits.npz"), detector)
    expected = np.cov(second.pool.double().numpy(), rowvar=False)
    np.testing.assert_allclose(second.statistics["pool"].sigma.numpy(), expected, rtol=1e-9, atol=1e-12)
    samples = detector.features(digits[0][200:500])
    with_cache, without = evaluate(second, samples)["fd_digits"], metrics.frechet_distance(second.pool, samples.pool)
    assert with_cache == pytest.approx(without, rel=1e-9)
    assert torch.equal(first.statistics["pool"].mu, second.statistics["pool"].mu)


def test_features_can_be_computed_by_several_processes(npz):
    def shared(images, detectors, batch_size):
        shares = ((0, 13), (13, 20))
        return [concatenate(reference.features_of_images(images, detectors, batch_size, *share)[0] for share in shares)]

    features = reference.load_reference(NpzImages(npz), FakeInception(), batch_size=3, compute=shared)
    (alone,) = reference.features_of_images(NpzImages(npz), [FakeInception()])
    torch.testing.assert_close(features.pool, alone.pool)


def test_stored_statistics_of_a_reference_are_inceptions_only(tmp_path, detector, digits):
    images = digits[0][:20]
    file = tmp_path / "reference.npz"
    reference.write_reference(open_written(tmp_path, images), file, [FakeInception()])
    stored = NpzImages(file).statistics
    assert [len(known.mu) for known in stored.values()] == [2048, 2023]
    features = reference.load_reference(NpzImages(file), FakeInception())
    assert torch.equal(features.statistics["pool"].sigma, stored["pool"].sigma)
    assert reference.load_reference(NpzImages(file), detector).statistics == {}
    with pytest.raises(UserError, match=r"reference\.npz exists"):
        reference.write_reference(NpzImages(file), file)


def open_written(folder, images: np.ndarray) -> NpzImages:
    write_npz(folder / "images.npz", iter(images), images.shape)
    return NpzImages(folder / "images.npz")


def test_stored_statistics_of_another_size_are_refused(tmp_path):
    images = np.random.default_rng(4).integers(0, 256, (9, 2, 2, 3), dtype=np.uint8)
    known = {"pool": Statistics(torch.zeros(64), torch.eye(64))}
    write_npz(tmp_path / "a.npz", iter(images), images.shape, statistics=known)
    with pytest.raises(ValueError, match=r"a\.npz: mu has 64 entries, Inception's pool features 2048"):
        reference.load_reference(NpzImages(tmp_path / "a.npz"), FakeInception())


def test_a_reference_of_statistics_only_has_no_images_and_no_cache(tmp_path):
    np.savez(tmp_path / "a.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    features = reference.load_reference(NpzImages(tmp_path / "a.npz"), FakeInception())
    assert len(features) == 0
    assert set(features.statistics) == {"pool"}
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]
