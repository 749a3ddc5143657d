"""Inception against torch-fidelity's extractor, the classifier of the digits against labels, and lists of detectors."""

from __future__ import annotations

import hashlib
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, Malicious, checked
from safetensors.torch import load_file, save_file
from torch_fidelity import feature_extractor_inceptionv3 as port

from common.errors import UserError
from common.images import to_uint8
from evaluations import classifiers, inception
from evaluations.classifiers import DIGITS_WEIGHTS, ClassifierDetector
from evaluations.features import Features, extract_features, stored_statistics
from evaluations.images import open_images
from evaluations.inception import InceptionDetector
from evaluations.metrics import class_agreement
from sampling import evaluator

DIGITS = open_images(REPOSITORY / "evaluations" / "digits_reference.npz")


@pytest.fixture(scope="module")
def detector(inception_weights):
    return InceptionDetector(inception_weights)


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (3, 40, 50, 3), dtype=np.uint8)


def test_features_are_those_of_torch_fidelity_in_any_batches(inception_weights, detector, images):
    features = detector.features(images)
    names = ["2048", "logits_unbiased"]
    extractor = port.FeatureExtractorInceptionV3("check", names, feature_extractor_weights_path=inception_weights)
    kept = []
    # Before the ReLU, from hooks of this test on the convolution and the normalisation.
    extractor.Mixed_6d.branch1x1.bn.register_forward_hook(lambda module, inputs, output: kept.append(output.clone()))
    with torch.no_grad():
        pool, logits = extractor(torch.from_numpy(images).permute(0, 3, 1, 2))
    assert pool.std() > 0.1
    torch.testing.assert_close(features.pool, pool, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features.logits, logits, rtol=1e-5, atol=1e-5)
    first = [kept[0].relu()[:, channel] for channel in range(7)]  # [N, 192, 17, 17], flattened as NHWC
    torch.testing.assert_close(features.spatial, torch.stack(first, dim=-1).flatten(1), rtol=1e-5, atol=1e-5)
    assert features.spatial.shape == (3, 2023) and features.spatial.std() > 0.1
    (parts,) = extract_features([detector], (images[i : i + 2] for i in (0, 2)))
    for name, x in parts.tensors().items():
        torch.testing.assert_close(x, features.tensors()[name], rtol=1e-4, atol=1e-5)


def test_the_detector_hashes_its_weights_and_warns_of_unpublished_ones(inception_weights, caplog):
    sha256 = hashlib.sha256(inception_weights.read_bytes()).hexdigest()
    assert InceptionDetector(inception_weights).weights_hash == sha256
    assert "not the published Inception" in caplog.text


def test_statistics_of_the_published_inception_are_not_used_with_other_weights(detector, images, tmp_path):
    stored = {"mu": np.zeros(2048), "sigma": np.eye(2048)}
    np.savez(tmp_path / "both.npz", arr_0=images, **stored)
    np.savez(tmp_path / "statistics.npz", **stored)
    both, alone = (open_images(tmp_path / f"{name}.npz") for name in ("both", "statistics"))
    assert both.statistics["inception"] and stored_statistics(both, detector) == {}
    with pytest.raises(UserError, match="statistics.npz holds only statistics of the published inception, .*; give images"):
        stored_statistics(alone, detector)
    published = SimpleNamespace(name="inception", has_published_weights=True)
    assert stored_statistics(alone, published) is alone.statistics["inception"]


@pytest.mark.parametrize("change", [lambda x: x / 255, lambda x: x[..., :1], lambda x: x.transpose(0, 3, 1, 2)])
def test_images_that_are_not_uint8_rgb_are_refused(detector, images, change):
    with pytest.raises(UserError, match=r"a detector takes uint8 \[N, H, W, 3\]"):
        detector.features(change(images))


def test_bad_weights_are_refused_by_name_and_run_no_code(tmp_path):
    torch.save({"conv.weight": torch.zeros(3)}, tmp_path / "other.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    exploit = Malicious(exec, "raise SystemExit('the file ran code')")
    torch.save({"fc.weight": exploit}, tmp_path / "zip.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(exploit, protocol=2))
    for name in ("none.pth", "other.pth", "list.pth", "zip.pth", "plain.pth"):
        with pytest.raises(UserError, match=rf"{name} \(Inception's weights, .* cannot be read"):
            InceptionDetector(tmp_path / name)


def test_the_reference_of_the_digits_holds_the_images_that_training_decodes():
    shard = load_file(REPOSITORY / "latents" / "digits.safetensors")
    assert np.array_equal(next(DIGITS.batches(2000)), to_uint8(shard["latents"].float()).numpy())
    assert np.array_equal(DIGITS.labels, shard["labels"].numpy())


def test_the_detector_classifies_digits_in_any_batches():
    digits = ClassifierDetector("digits", DIGITS_WEIGHTS)
    whole, parts = digits.features(next(DIGITS.batches(2000))), extract_features([digits], DIGITS.batches(700))[0]
    torch.testing.assert_close(parts.pool, whole.pool, rtol=1e-5, atol=1e-5)
    assert whole.pool.shape == (1797, 64) and whole.logits.shape == (1797, 10) and whole.spatial is None
    assert class_agreement(whole.logits, torch.from_numpy(DIGITS.labels)) > 0.98


def test_images_of_another_size_and_other_weights_are_refused(tmp_path):
    with pytest.raises(UserError, match="images are 16x8 pixels; the digits detector takes 8x8"):
        ClassifierDetector("digits", DIGITS_WEIGHTS).features(np.zeros((1, 8, 16, 3), dtype=np.uint8))
    (tmp_path / "text").write_text("hello")
    save_file({"x": torch.zeros(1)}, tmp_path / "tensors")
    for name in ("text", "tensors", "none"):
        with pytest.raises(UserError, match=rf"evaluation.detector_weights=.*{name} cannot be read"):
            ClassifierDetector("digits", tmp_path / name)
    for name in ("small-fashion", "small-digits"):
        with pytest.raises(UserError, match=f"it belongs to digits, not to evaluation.detector={name}"):
            ClassifierDetector(name, DIGITS_WEIGHTS)


class Named:
    """A detector whose features are the pixels."""

    def __init__(self, name: str):
        self.name = name

    def features(self, batch):
        return Features(self.name, pool=torch.from_numpy(batch))


def test_several_detectors_see_each_batch_and_features_that_are_not_finite_are_refused():
    detectors, batches = [Named("a"), Named("b")], [np.ones((2, 3)), np.zeros((1, 3))]
    found = extract_features(detectors, iter(batches))
    assert [one.detector for one in found] == ["a", "b"]
    assert all(np.array_equal(one.pool, np.concatenate(batches)) for one in found)
    with pytest.raises(UserError, match="the a detector gives NaN or infinite pool features"):
        extract_features(detectors, [*batches, np.full((2, 3), np.nan)])


def test_in_a_list_the_file_of_weights_belongs_to_the_detector_of_small_pictures(monkeypatch):
    made = {}
    for module, name in ((inception, "InceptionDetector"), (classifiers, "ClassifierDetector")):
        monkeypatch.setattr(module, name, lambda *arguments, name=name: made.update({name: arguments[-2]}))
    monkeypatch.setattr(inception, "fetch_weights", lambda: "downloaded")
    for detector, expected in (("[inception,small-x]", ("downloaded", "a")), ("inception", ("a", "a"))):
        cfg = checked([f"evaluation.detector={detector}", "evaluation.detector_weights=a"])
        evaluator.build_detectors(cfg.evaluation, SimpleNamespace(device="cpu"))
        assert (made["InceptionDetector"], made.get("ClassifierDetector")) == expected
