"""FD-DINOv2 and FID from one pass over the samples, with the same figures in training and fid.py. The encoder is tiny."""

import pytest
import torch
from conftest import REPOSITORY, evaluated, results, run_fid

from common.files import hash_file
from evaluations import vit
from evaluations.images import STATISTICS_KEYS, open_images, write_npz
from evaluations.metrics import frechet_distance
from evaluations.suite import compute_metrics, metrics_for
from evaluations.vit import DINOv2Detector

PUBLISHED = vit.DINOV2_L  # before a fixture replaces it with a tiny one


@pytest.fixture(autouse=True)
def tiny(tiny_encoder, monkeypatch):
    """Fixture: replaces DINOv2 with timm's test_vit, which has random weights, and returns the file of its weights."""
    monkeypatch.setattr(vit, "DINOV2_L", "test_vit.r160_in1k")
    monkeypatch.setitem(STATISTICS_KEYS, ("dinov2", "pool"), ("mu_dinov2", "sigma_dinov2", 64))
    return tiny_encoder


@pytest.fixture
def images():
    return next(open_images(REPOSITORY / "evaluations" / "digits_reference.npz").batches(90))


@pytest.fixture
def reference(tmp_path, images):
    write_npz(tmp_path / "reference.npz", iter(images[:12]), (12, 8, 8, 3))
    return tmp_path / "reference.npz"


def names_for(detector):
    return [metric.name for metric in metrics_for(detector)]


def test_fd_dinov2_is_the_frechet_distance_of_class_tokens(tiny, images):
    detector, other = DINOv2Detector(tiny), 255 - images
    expected = vit.Encoder("test_vit.r160_in1k", tiny, 224, preprocessing="edm2").encode(images)[0]
    first, second = (detector.features(x) for x in (images, other))
    assert torch.equal(first.pool, expected) and first.logits is None and first.detector == "dinov2"
    found = compute_metrics(first, second)
    assert list(found) == names_for("dinov2")
    assert found["fd_dinov2"] == frechet_distance(first.pool, second.pool) > 1


def test_the_published_detector_is_vit_l_14_of_dinov2_at_224_pixels():
    net, mean, std = vit._build(PUBLISHED, 224)
    assert net.embed_dim == 1024 and net.patch_embed.grid_size == (16, 16)
    assert mean == (0.485, 0.456, 0.406) and std == (0.229, 0.224, 0.225)


def test_training_and_fid_give_the_same_figures_for_both_detectors(train, tmp_path, reference, tiny, inception_weights):
    weights = [f"evaluation.detector_weights={inception_weights}", f"evaluation.dinov2_weights={tiny}"]
    settings = ["evaluation.every=1", "evaluation.num_samples=5", "sampler.num_steps=2", "sampling.batch_size=3", "guidance=none"]
    both = "evaluation.detector=[inception,dinov2]"
    run = train("run", *settings, *weights, both, f"evaluation.reference={reference}", "train.num_steps=1")
    (line,) = evaluated(run)
    in_training = line["metrics"]
    names = names_for("inception") + names_for("dinov2")
    assert (list(in_training), line["settings"]["num_samples"], line["settings"]["cfg_scale"]) == (names, 5, 1.0)

    def by_fid(*overrides):
        command = [
            f"checkpoint={run}",
            f"output={tmp_path / 'out'}",
            "evaluation.num_samples=5",
            "sampler.num_steps=2",
            "sampling.batch_size=3",
        ]
        run_fid(*command, *overrides)
        return results(tmp_path / "out")

    (point,) = by_fid()  # the run's detectors
    assert point["settings"]["detector"] == "inception+dinov2" and point["settings"]["dinov2_weights"] == hash_file(tiny)
    assert point["metrics"] == pytest.approx(in_training, rel=1e-4)
    _, alone = by_fid("evaluation.detector=dinov2")  # the command's detector replaces the two of the run
    assert [*alone["metrics"]] == names_for("dinov2")
    assert alone["metrics"]["fd_dinov2"] == pytest.approx(point["metrics"]["fd_dinov2"], rel=1e-6)
