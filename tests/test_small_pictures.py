"""From a set of torchvision to a run that is judged by a classifier of that set."""

import hashlib
import json
import pickle
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, composed, forget_accelerate, metrics
from safetensors import safe_open

import prepare_latents
from common.errors import UserError
from configs import experiments, schema
from evaluations.classifiers import ClassifierDetector, train_detector
from evaluations.images import open_images
from evaluations.npz import write_npz
from evaluations.suite import evaluate
from latents.shards import LatentDataset, latents_for_network
from latents.statistics import ChannelStatistics
from sampling.detectors import build_detectors

DIGITS = REPOSITORY / "evaluations" / "digits_reference.npz"


def encode(name, root, output, *settings):
    forget_accelerate()
    arguments = {"images": f"torchvision:{name}", "root": root, "output": output, "autoencoder": "identity", "kind": "sample"}
    arguments |= {"resolution": 32, "num_workers": 0, "cpu_threads": 1, "shard_size": 500}
    arguments |= dict(setting.split("=", 1) for setting in settings)
    prepare_latents.main(["encode", *(f"{key}={value}" for key, value in arguments.items())])
    return output


def draw_pictures(num_images, size, num_classes=10):
    """(uint8 [N, size, size], labels): a bar of noise whose height is the class."""
    random = np.random.default_rng(0)
    labels = np.arange(num_images) % num_classes
    images = np.zeros((num_images, size, size), np.uint8)
    for image, label in zip(images, labels):
        image[2 * label : 2 * label + 4] = random.integers(100, 256, (4, size))
    return images, labels


@pytest.fixture(scope="module")
def fashion(tmp_path_factory):
    """(root, images, labels): made pictures in the files of Fashion-MNIST."""
    root = tmp_path_factory.mktemp("sets")
    images, labels = draw_pictures(1200, 28)
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, *images.shape) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, len(labels)) + labels.astype(np.uint8).tobytes())
    return root, images, labels


@pytest.fixture(scope="module")
def prepared(fashion, tmp_path_factory):
    """A folder with latents/, fashion.npz and fashion.safetensors, made by the documented commands."""
    folder = tmp_path_factory.mktemp("prepared")
    encode("FashionMNIST", fashion[0], folder / "latents", "pad=2", "grey=true", "sigma_data=0.5")
    prepare_latents.main(["reference", f"images={folder / 'latents'}", f"output={folder / 'fashion.npz'}", "statistics=false"])
    forget_accelerate()
    prepared = [f"reference={folder / 'fashion.npz'}", f"output={folder / 'fashion.safetensors'}"]
    prepare_latents.main(["detector", *prepared, "num_epochs=3", "cpu_threads=1"])
    return folder


# ----------------------------------------------------------------------------------------------------------------------
# Data.


def test_grey_pictures_are_padded_with_black_and_scaled_to_the_deviation_that_was_asked_for(fashion, prepared):
    _, images, labels = fashion
    dataset = LatentDataset(prepared / "latents")
    assert (len(dataset), dataset.channels, dataset.height) == (1200, 1, 32)
    assert np.array_equal(dataset.labels, labels) and dataset.class_names[9] == "Ankle boot"
    stored, _ = dataset.fetch(np.arange(1200), np.zeros(1200, bool))
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    assert torch.equal((stored[:, 0].float() * 127.5 + 127.5).round().byte(), torch.from_numpy(padded))
    assert stored[:, 0, 0].eq(-1).all()
    seen = ChannelStatistics()
    seen.add(latents_for_network(stored, dataset.info), "sample")
    assert seen.overall_std == pytest.approx(0.5, abs=1e-3)


def test_the_test_split_and_colour_can_be_chosen_and_the_own_scale_is_kept(fashion, tmp_path):
    dataset = LatentDataset(encode("FashionMNIST", fashion[0], tmp_path / "out", "split=test"))
    assert (len(dataset), dataset.channels, dataset.info.scale_factor) == (1200, 3, 1.0)


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """(root, images [N, 32, 32, 3], labels): made pictures in the files of CIFAR-10, whose sums torchvision compares."""
    from torchvision.datasets import CIFAR10

    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    images = np.random.default_rng(0).integers(0, 256, (60, 3, 32, 32), dtype=np.uint8)
    labels = [i % 10 for i in range(60)]

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, hashlib.md5((folder / name).read_bytes()).hexdigest()]

    parts = [slice(10 * i, 10 * i + 10) for i in range(6)]
    files = [write(f"part_{i}", {"data": images[part].reshape(10, -1), "labels": labels[part]}) for i, part in enumerate(parts)]
    name, md5 = write("batches.meta", {"label_names": [f"class {i}" for i in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", files[:5])
    monkeypatch.setattr(CIFAR10, "test_list", files[5:])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": md5})
    return tmp_path, images.transpose(0, 2, 3, 1), labels


def test_pictures_in_colour_keep_their_pixels_labels_and_class_names(cifar10, tmp_path):
    root, images, labels = cifar10
    dataset = LatentDataset(encode("CIFAR10", root, tmp_path / "out"))
    assert dataset.labels.tolist() == labels[:50] and dataset.class_names[3] == "class 3"
    prepare_latents.main(["reference", f"images={tmp_path / 'out'}", f"output={tmp_path / 'r.npz'}", "statistics=false"])
    reference = open_images(tmp_path / "r.npz")
    assert np.array_equal(next(reference.batches(50)), images[:50]) and reference.labels.tolist() == labels[:50]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Cifar", [], r"torchvision:Cifar: torchvision has no such set of labelled images; use CIFAR10 \| CIFAR100"),
        ("CocoCaptions", [], "no such set of labelled images"),
        ("FashionMNIST", ["split=val"], "split=val: images=torchvision:FashionMNIST has the splits train and test"),
        ("STL10", ["split=val"], "images=torchvision:STL10 split=val: Unknown value 'val'"),
        ("FashionMNIST", ["labels=none"], "labels=none is for folders of images"),
        ("FashionMNIST", ["normalize=true", "sigma_data=0.5"], "normalize=true and sigma_data=0.5 are two ways to scale"),
        ("FashionMNIST", ["grey=true", "autoencoder=sd-vae:x", "kind=moments"], "grey=true: autoencoder=sd-vae:x encodes RGB"),
    ],
)
def test_what_a_set_does_not_have_is_refused(fashion, tmp_path, name, settings, message):
    with pytest.raises(UserError, match=message):
        encode(name, fashion[0], tmp_path / "out", *settings)


# ----------------------------------------------------------------------------------------------------------------------
# The detector.


def test_the_detector_knows_the_classes_and_says_how_often_it_is_right(prepared):
    reference = open_images(prepared / "fashion.npz")
    detector = ClassifierDetector("small-fashion", prepared / "fashion.safetensors")
    images = next(reference.batches(300))
    features = detector.features(images)
    assert features.pool.shape == (300, 128) and features.logits.shape == (300, 10)
    labels = torch.from_numpy(reference.labels[:300])
    values = evaluate(features, features, labels)
    assert list(values) == ["fd_fashion", "class_agreement_fashion"]
    assert values["fd_fashion"] == pytest.approx(0, abs=1e-3) and values["class_agreement_fashion"] > 0.9
    noise = np.random.default_rng(0).integers(0, 256, images.shape, dtype=np.uint8)
    assert evaluate(features, detector.features(noise), labels)["fd_fashion"] > 1
    with safe_open(prepared / "fashion.safetensors", framework="pt") as f:
        assert json.loads(f.metadata()["about"])["held_out_accuracy"] > 0.9


def test_training_the_detector_again_gives_the_same_file(prepared, tmp_path):
    for folder in "ab":
        train_detector(open_images(prepared / "fashion.npz"), tmp_path / folder / "fashion.safetensors", torch.device("cpu"), 1)
    assert (tmp_path / "a" / "fashion.safetensors").read_bytes() == (tmp_path / "b" / "fashion.safetensors").read_bytes()


def test_the_detector_of_the_digits_comes_from_the_same_command(tmp_path):
    accuracy = train_detector(open_images(DIGITS), tmp_path / "digits.safetensors", torch.device("cpu"), 4)
    assert accuracy > 0.9 and ClassifierDetector("digits", tmp_path / "digits.safetensors")


def test_a_small_detector_needs_its_weights():
    settings = schema.check(composed(["evaluation.detector=small-fashion"]), schema.TrainConfig).evaluation
    with pytest.raises(UserError, match="evaluation.detector=small-fashion needs evaluation.weights="):
        build_detectors(settings, SimpleNamespace(device=torch.device("cpu")))


@pytest.mark.parametrize("output", ["Fashion.safetensors", "dinov2.safetensors", "fashion.npz"])
def test_a_detector_needs_a_new_file_with_the_name_of_a_set(prepared, output):
    with pytest.raises(UserError, match=f"output=.*{output} must be a new file named after the set"):
        train_detector(open_images(prepared / "fashion.npz"), prepared / output, torch.device("cpu"), 1)


def test_a_detector_needs_labels_and_1000_images(tmp_path):
    images = np.zeros((999, 16, 16, 3), np.uint8)
    for labels in (None, np.zeros(999, int)):
        write_npz(tmp_path / "a.npz", images, images.shape, labels)
        with pytest.raises(UserError, match="holds 999 images of 16x16 pixels; a detector of small pictures needs"):
            train_detector(open_images(tmp_path / "a.npz"), tmp_path / "a.safetensors", torch.device("cpu"), 1)


# ----------------------------------------------------------------------------------------------------------------------
# The rows.


def test_a_row_trains_and_is_judged_along_the_way(prepared, train):
    files = [f"data.path={prepared / 'latents'}", f"evaluation.weights={prepared / 'fashion.safetensors'}"]
    files += [f"evaluation.reference={prepared / 'fashion.npz'}", "train.compile=none", "sample.every=0", "train.cpu_threads=1"]
    few = ["train.num_steps=2", "train.batch_size=4", "eval.every=1", "eval.num_samples=6", "eval.num_steps=2"]
    run = train("fashion", "experiment=fashion/dit_xs4_tread", *files, *few, "checkpoint.every=2")
    scores = [record["metrics"] for record in metrics(run) if "metrics" in record]
    assert [list(one) for one in scores] == 2 * [["fd_fashion", "class_agreement_fashion"]]


def test_the_rows_have_the_papers_route_and_number_of_tokens():
    rows = {row.name: row for row in experiments.ROWS if row.name.startswith(("fashion/", "cifar10/"))}
    assert len(rows) == 10
    for name, row in rows.items():
        cfg = schema.check(composed([f"experiment={name}"]), schema.TrainConfig)
        assert cfg.eval.every and cfg.train.num_steps % cfg.eval.every == 0 and cfg.eval.cfg_scales == [1.0]
        patch_size = schema.BACKBONES[cfg.model.backbone][-1]
        assert (cfg.data.input_size // patch_size) ** 2 == (64 if "xs4" in name else 256)
        assert bool(cfg.model.routes) == name.endswith("_tread") == (row.baseline is not None)
