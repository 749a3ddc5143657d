"""FD-DINOv2 beside FID: one pass over the samples, the same figures in training and by fid.py. A tiny encoder stands in."""

import json

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, composed, forget_accelerate, metrics
from scipy.linalg import sqrtm
from stand_ins import untrained_encoder, untrained_inception

import fid as fid_script
import prepare_latents
from common.errors import UserError
from configs import schema
from evaluations import dinov2_detector, encoders, reference
from evaluations.dinov2_detector import DINOv2Detector
from evaluations.features import Features, extract
from evaluations.images import open_images
from evaluations.npz import write_npz
from evaluations.suite import evaluate, find_metric, format_metric
from extras.report import __main__ as report
from training import build

PUBLISHED = dinov2_detector.DINOV2  # before a tiny one takes its place
BOTH = "evaluation.detectors=[inception,dinov2]"


@pytest.fixture(autouse=True)
def tiny(tmp_path_factory, monkeypatch):
    """timm's test_vit with random weights in place of DINOv2; gives its file."""
    monkeypatch.setattr(dinov2_detector, "DINOV2", "test_vit.r160_in1k")
    monkeypatch.setitem(reference.STORED_SIZES, "dinov2", 64)
    return untrained_encoder(tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture(scope="module")
def inception(tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "inception.pth"
    untrained_inception(file)
    return file


@pytest.fixture
def images():
    with np.load(REPOSITORY / "evaluations" / "digits_reference.npz") as stored:
        return stored["arr_0"][:90]


@pytest.fixture
def npz(tmp_path, images):
    write_npz(tmp_path / "reference.npz", iter(images[:80]), (80, 8, 8, 3))
    return tmp_path / "reference.npz"


def frechet_by_numpy(first: np.ndarray, second: np.ndarray) -> float:
    first, second = first.astype(np.float64), second.astype(np.float64)
    (mu1, sigma1), (mu2, sigma2) = ((x.mean(0), np.cov(x, rowvar=False)) for x in (first, second))
    return float(((mu1 - mu2) ** 2).sum() + np.trace(sigma1 + sigma2 - 2 * sqrtm(sigma1 @ sigma2).real))


def test_fd_dinov2_is_the_frechet_distance_of_class_tokens(tiny, images):
    detector, other = DINOv2Detector(tiny), 255 - images
    expected = [encoders.Encoder("test_vit.r160_in1k", tiny, 224, positions="dinov2").encode(x)[0] for x in (images, other)]
    first, second = (detector.features(x) for x in (images, other))
    assert torch.equal(first.pool, expected[0]) and first.logits is None and first.detector == "dinov2"
    found = evaluate(first, second)
    assert list(found) == ["fd_dinov2", "precision_dinov2", "recall_dinov2"]
    distance = frechet_by_numpy(first.pool.numpy(), second.pool.numpy())
    assert distance > 1 and found["fd_dinov2"] == pytest.approx(distance, rel=1e-5)
    assert find_metric("fd_dinov2_50k/cfg1.0").direction == "lower" and format_metric("fd_dinov2_5k/cfg1.5", 78.126) == "78.13"


def test_the_published_detector_is_vit_l_14_of_dinov2_at_224_pixels():
    import timm

    name = PUBLISHED
    with torch.device("meta"):
        net = timm.create_model(name, img_size=dinov2_detector.INPUT_SIZE, num_classes=0)
    assert net.embed_dim == dinov2_detector.DINOV2_WIDTH and net.patch_embed.grid_size == (16, 16)
    published = timm.get_pretrained_cfg(name)
    assert published.mean == (0.485, 0.456, 0.406) and published.std == (0.229, 0.224, 0.225)


def test_several_detectors_see_each_batch_once():
    class Of:
        def __init__(self, name):
            self.name, self.weights_hash = name, "0"

        def features(self, batch):
            seen.append((self.name, len(batch)))
            return Features(self.name, pool=torch.as_tensor(batch).float())

    seen = []
    first, second = extract([Of("a"), Of("b")], iter([np.ones((2, 3)), np.zeros((1, 3))]))
    assert seen == [("a", 2), ("b", 2), ("a", 1), ("b", 1)]
    assert torch.equal(first.pool, second.pool) and (first.detector, second.detector, len(first)) == ("a", "b", 3)


def test_training_and_fid_give_the_same_figures_of_both_detectors(train, tmp_path, npz, tiny, inception, caplog):
    weights = [f"evaluation.weights={inception}", f"evaluation.dinov2_weights={tiny}"]
    settings = ["eval.every=1", "eval.num_samples=6", "eval.num_steps=2", "eval.batch_size=3", "eval.cfg_scales=[1.0]"]
    run = train("run", *settings, *weights, BOTH, f"evaluation.reference={npz}", "train.num_steps=1")
    (in_training,) = [record for record in metrics(run) if "evaluation_sec" in record]
    names = ["fid", "sfid", "inception_score", "precision", "recall"]
    names = [f"{name}6" for name in names] + [f"{name}_6" for name in ("fd_dinov2", "precision_dinov2", "recall_dinov2")]
    assert [name for name in in_training if "/" in name] == [f"{name}/cfg1.0" for name in names]

    def by_fid(*overrides):
        forget_accelerate()
        command = [
            f"checkpoint={run}",
            f"output={tmp_path / 'out'}",
            "num_samples=6",
            "num_steps=2",
            "batch_size=3",
            "cpu_threads=1",
        ]
        fid_script.main(composed([*command, *overrides], "fid"))
        return [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]

    (line,) = by_fid()  # the run's detectors
    assert line["point"]["detector"] == "inception+dinov2" and line["point"]["dinov2_weights"] == str(tiny)
    assert [*line["metrics"].values()] == pytest.approx([in_training[f"{name}/cfg1.0"] for name in names], rel=1e-4)
    assert "fd_dinov2" in (tmp_path / "out" / "results.md").read_text()
    assert len(by_fid()) == 1
    report.main([str(run), f"output={tmp_path / 'report.html'}"])
    assert f"| fd_dinov2_6/cfg1.0 | {in_training['fd_dinov2_6/cfg1.0']:.2f} |" in (tmp_path / "report.md").read_text()
    _, alone = by_fid("evaluation.detector=dinov2")  # the command's one replaces the run's two
    assert [*alone["metrics"]] == ["fd_dinov2", "precision_dinov2", "recall_dinov2"]
    assert alone["metrics"]["fd_dinov2"] == pytest.approx(line["metrics"]["fd_dinov2"], rel=1e-6)


def test_statistics_of_both_detectors_are_written_and_used(tmp_path, images, npz, tiny, inception):
    forget_accelerate()
    written = tmp_path / "both.npz"
    command = ["reference", f"images={npz}", f"output={written}", f"weights={inception}", "detectors=[inception,dinov2]"]
    prepare_latents.main([*command, f"dinov2_weights={tiny}", "cpu_threads=1"])
    with np.load(written) as stored:
        keys = ["arr_0", "mu", "mu_dinov2", "mu_s", "sigma", "sigma_dinov2", "sigma_s"]
        assert sorted(stored.files) == keys and stored["mu_dinov2"].shape == (64,)
        np.savez(tmp_path / "statistics.npz", mu_dinov2=stored["mu_dinov2"], sigma_dinov2=stored["sigma_dinov2"])
        np.savez(tmp_path / "adm.npz", mu=stored["mu"], sigma=stored["sigma"])
    detector, samples = DINOv2Detector(tiny), DINOv2Detector(tiny).features(images[60:])
    whole = reference.load_reference(open_images(npz), detector)
    alone = reference.load_reference(open_images(tmp_path / "statistics.npz"), detector)
    assert len(alone) == 0
    assert evaluate(alone, samples)["fd_dinov2"] == pytest.approx(evaluate(whole, samples)["fd_dinov2"], rel=1e-6)
    with pytest.raises(UserError, match=r"adm.npz holds statistics of other detectors and no images: the dinov2 detector"):
        reference.load_reference(open_images(tmp_path / "adm.npz"), detector)


def test_what_is_wrong_is_said_before_slow_work(tmp_path, npz, monkeypatch):
    evaluation = lambda *overrides: schema.check(composed(overrides), schema.TrainConfig).evaluation  # noqa: E731
    assert evaluation("evaluation.detectors=[inception,dinov2]").all_detectors == ["inception", "dinov2"]
    assert evaluation("evaluation.detector=dinov2").all_detectors == ["dinov2"] and evaluation().all_detectors == ["digits"]
    for overrides, message in (
        (["evaluation.detectors=[inception,inception]"], r"evaluation.detectors=\['inception', 'inception'\] is not accepted"),
        (["evaluation.detectors=[digits]"], r"is not accepted; use a list of inception, dinov2 or both: \[inception,dinov2\]"),
        (["evaluation.detectors=[]"], r"evaluation.detectors=\[\] is not accepted"),
    ):
        with pytest.raises(UserError, match=message):
            evaluation(*overrides)
    monkeypatch.setattr(encoders, "_build", None)  # which imports timm
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    missing = evaluation("evaluation.detector=dinov2", "evaluation.dinov2_weights=nowhere.pth")
    from accelerate import Accelerator

    forget_accelerate()
    with pytest.raises(UserError, match=r"evaluation.dinov2_weights=nowhere.pth is not a file; put model.safetensors of timm/"):
        build.build_detectors(missing, Accelerator(cpu=True))
    command = ["reference", f"images={npz}", f"output={tmp_path / 'a.npz'}"]
    with pytest.raises(UserError, match=r"^dinov2_weights=nowhere.pth is not a file"):
        prepare_latents.main([*command, "detectors=[dinov2]", "dinov2_weights=nowhere.pth", "cpu_threads=1"])
    with pytest.raises(UserError, match=r"detectors=\[dinov2\] and statistics=false exclude each other"):
        prepare_latents.main([*command, "detectors=[dinov2]", "statistics=false"])
    assert not (tmp_path / "a.npz").exists()
