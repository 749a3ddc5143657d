"""Inception against torch-fidelity's own extractor under the same random weights; no network is needed."""

from __future__ import annotations

import hashlib
import logging
import pickle
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from stand_ins import untrained_inception
from torch_fidelity import feature_extractor_inceptionv3 as port

from evaluations import detector as detectors
from evaluations.detector import InceptionDetector
from evaluations.features import Features, concatenate, extract


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A weights file of the real network's layout, with random numbers."""
    file = tmp_path_factory.mktemp("weights") / "random.pth"
    untrained_inception(file)
    return file


@pytest.fixture(scope="module")
def detector(weights):
    return InceptionDetector(weights)


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (3, 40, 50, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def features(detector, images):
    return detector.features(images)


def test_features_are_those_of_torch_fidelity(weights, images, features):
    names = ["2048", "logits_unbiased"]
    extractor = port.FeatureExtractorInceptionV3("check", names, feature_extractor_weights_path=weights)
    kept = []
    # Before the ReLU, computed from the convolution and the normalisation, whose hooks are not ours.
    extractor.Mixed_6d.branch1x1.bn.register_forward_hook(lambda module, inputs, output: kept.append(output.clone()))
    with torch.no_grad():
        pool, logits = extractor(torch.from_numpy(images).permute(0, 3, 1, 2))
    assert pool.std() > 0.1
    torch.testing.assert_close(features.pool, pool, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features.logits, logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features.logits, features.pool @ extractor.fc.weight.T, rtol=1e-4, atol=1e-5)
    spatial = kept[0].relu()  # [N, 192, 17, 17]
    assert features.spatial.shape == (3, 2023)
    for index in ((0, 0, 0, 0), (1, 3, 16, 2), (2, 6, 5, 11), (0, 2, 0, 16)):
        n, channel, row, column = index
        flat = (row * 17 + column) * 7 + channel  # NHWC, 7 channels
        assert features.spatial[n, flat].item() == pytest.approx(spatial[index].item(), abs=1e-5)
    assert features.spatial.double().sum().item() == pytest.approx(spatial[:, :7].double().sum().item(), rel=1e-5)
    assert spatial[:, :7].count_nonzero() > 0


def test_features_do_not_depend_on_the_batch(detector, images, features):
    (parts,) = extract([detector], (images[i : i + 2] for i in (0, 2)))
    for name, x in parts.tensors().items():
        torch.testing.assert_close(x, features.tensors()[name], rtol=1e-4, atol=1e-5)


def test_the_hash_is_of_the_weights_and_of_the_precision(weights, detector):
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert detector.weights_hash == sha256
    assert InceptionDetector(weights, precision="bf16").weights_hash == f"{sha256}-bf16"


def test_other_weights_than_the_published_ones_are_warned_of(weights, caplog):
    with caplog.at_level(logging.WARNING):
        InceptionDetector(weights)
    assert "not the published Inception" in caplog.text


def test_images_that_are_not_uint8_rgb_are_refused(detector, images):
    with pytest.raises(ValueError, match="images are torch.float64; a detector takes uint8"):
        detector.features(images / 255)
    with pytest.raises(ValueError, match="channels last"):
        detector.features(images[..., :1])
    with pytest.raises(ValueError, match="channels last"):
        detector.features(images.transpose(0, 3, 1, 2))


def test_bad_weights_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"evaluation\.weights=.*none\.pth does not exist"):
        InceptionDetector(tmp_path / "none.pth")
    (tmp_path / "text.pth").write_text("hello")
    with pytest.raises(ValueError, match=r"text\.pth cannot be read as PyTorch weights"):
        InceptionDetector(tmp_path / "text.pth")
    torch.save({"conv.weight": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"other\.pth holds the weights of another network"):
        InceptionDetector(tmp_path / "other.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(ValueError, match=r"list\.pth holds the weights of another network"):
        InceptionDetector(tmp_path / "list.pth")
    with pytest.raises(ValueError, match="precision='fp16' must be one of fp32, bf16"):
        InceptionDetector(tmp_path / "none.pth", precision="fp16")


class Exploit:
    def __reduce__(self):
        return exec, ("raise SystemExit('the file ran code')",)


def test_weights_that_would_run_code_are_refused(tmp_path):
    torch.save({"fc.weight": Exploit()}, tmp_path / "zip.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Exploit(), protocol=2))
    for name in ("zip.pth", "plain.pth"):
        with pytest.raises(ValueError, match="cannot be read as PyTorch weights"):
            InceptionDetector(tmp_path / name)


def test_offline_the_error_says_which_file_to_put_where(tmp_path, monkeypatch):
    def offline(url, timeout):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub" / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
    with pytest.raises(ValueError, match="no route to host") as error:
        InceptionDetector()
    assert f"put it at {file}, or set evaluation.weights=" in str(error.value)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not the published file"):
        InceptionDetector()


def test_a_download_is_checked_by_its_hash(tmp_path, monkeypatch):
    source = tmp_path / "source.pth"
    source.write_bytes(b"tampered with")
    monkeypatch.setattr(detectors, "WEIGHTS_URL", source.as_uri())
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="invalid hash value"):
        detectors.fetch_weights(show_progress=False)
    assert not detectors.cached_weights_file().exists()
    monkeypatch.setattr(detectors, "WEIGHTS_SHA256", hashlib.sha256(b"tampered with").hexdigest())
    assert detectors.fetch_weights(show_progress=False).read_bytes() == b"tampered with"


# ----------------------------------------------------------------------------------------------------------------------
# Sets of features.


def numbered(numbers: list[int]) -> Features:
    x = torch.tensor(numbers, dtype=torch.float32)[:, None]
    return Features("test", pool=x, logits=-x, spatial=x * 2)


def test_features_of_no_images_or_of_two_detectors_do_not_make_a_set():
    with pytest.raises(ValueError, match="no images"):
        concatenate([])
    other = Features("other", pool=torch.zeros(1, 1), logits=torch.zeros(1, 1))
    with pytest.raises(ValueError, match="different detectors"):
        concatenate([numbered([1]), other])


def test_features_that_are_not_finite_are_found_and_the_image_named():
    class Broken:
        name, weights_hash = "broken", ""

        def features(self, images):
            pool = torch.from_numpy(images[:, 0, 0].astype(np.float32))
            pool[pool == 77] = float("nan")
            return Features(self.name, pool=pool, logits=pool)

    images = np.zeros((9, 2, 2, 3), dtype=np.uint8)
    images[5] = 77
    with pytest.raises(ValueError, match="broken detector gives NaN or infinite pool features for image 5"):
        extract([Broken()], np.split(images, 3))
