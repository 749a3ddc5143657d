"""From a set of torchvision to a run that is judged by a classifier of that set."""

import hashlib
import pickle
import shutil
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, composed, forget_accelerate, metrics
from PIL import Image
from safetensors import safe_open

import prepare_latents
from common.errors import UserError
from configs import experiments, schema
from evaluations.images import open_images
from evaluations.small_detector import SmallDetector, train_detector
from evaluations.suite import evaluate, find_metric, format_metric, metrics_of
from latents.shards import LatentDataset, latents_for_network
from latents.statistics import ChannelStatistics
from training import build

FASHION_CLASSES = 10


def encode(name, root, output, *settings):
    forget_accelerate()
    arguments = {"images": f"torchvision:{name}", "root": root, "output": output, "autoencoder": "identity", "kind": "sample"}
    arguments |= {"resolution": 32, "num_workers": 0, "cpu_threads": 1, "shard_size": 500}
    arguments |= dict(setting.split("=", 1) for setting in settings)
    prepare_latents.main(["encode", *(f"{key}={value}" for key, value in arguments.items())])
    return output


def draw_pictures(num_images, size, num_classes=FASHION_CLASSES):
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
    arguments = [
        f"reference={folder / 'fashion.npz'}",
        f"output={folder / 'fashion.safetensors'}",
        "num_epochs=3",
        "cpu_threads=1",
    ]
    prepare_latents.main(["detector", *arguments])
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


def test_another_data_set_of_the_same_sizes_is_not_mixed_in(fashion, prepared, tmp_path):
    root = tmp_path / "sets"
    shutil.copytree(fashion[0], root)
    file = root / "FashionMNIST" / "raw" / "train-images-idx3-ubyte"
    content = bytearray(file.read_bytes())
    content[16:] = bytes(255 - value for value in content[16:])
    file.write_bytes(content)
    shutil.copytree(prepared / "latents", tmp_path / "latents")
    with pytest.raises(UserError, match="already holds another data set .made of other items."):
        encode("FashionMNIST", root, tmp_path / "latents", "pad=2", "grey=true", "sigma_data=0.5")


def test_without_files_and_without_a_network_one_line_says_what_to_do(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("Network is unreachable")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(UserError, match=r"images=torchvision:CIFAR10 is not in root=.*cannot be downloaded \(.*unreachable") as e:
        encode("CIFAR10", tmp_path / "sets", tmp_path / "out")
    assert "\n" not in str(e.value) and not (tmp_path / "out").exists()


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


def test_keys_of_torchvision_are_refused_for_folders(tmp_path):
    with pytest.raises(UserError, match="split=test is for images=torchvision:<name>"):
        prepare_latents.main(["encode", f"images={tmp_path}", f"output={tmp_path / 'out'}", "split=test", "cpu_threads=1"])


def test_a_folder_of_pictures_can_be_padded_and_made_grey_too(tmp_path):
    (tmp_path / "in").mkdir()
    Image.fromarray(np.full((28, 28, 3), (200, 100, 0), np.uint8)).save(tmp_path / "in" / "a.png")
    arguments = [f"images={tmp_path / 'in'}", f"output={tmp_path / 'out'}", "labels=none", "autoencoder=identity", "kind=sample"]
    forget_accelerate()
    prepare_latents.main(["encode", *arguments, "resolution=32", "pad=2", "grey=true", "num_workers=0", "cpu_threads=1"])
    stored, _ = LatentDataset(tmp_path / "out").fetch(np.array([0]), np.array([False]))
    grey = round(0.299 * 200 + 0.587 * 100) / 127.5 - 1
    assert stored[0, 0, 2:30, 2:30].float().sub(grey).abs().max() < 1e-2
    assert stored[0, 0, :2].eq(-1).all()


def test_constant_pictures_cannot_be_scaled(tmp_path):
    (tmp_path / "in").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "in" / "a.png")
    arguments = [f"images={tmp_path / 'in'}", f"output={tmp_path / 'out'}", "labels=none", "autoencoder=identity", "kind=sample"]
    forget_accelerate()
    with pytest.raises(UserError, match="all values are equal and cannot be scaled; leave out sigma_data="):
        prepare_latents.main(["encode", *arguments, "resolution=32", "sigma_data=0.5", "num_workers=0", "cpu_threads=1"])


# ----------------------------------------------------------------------------------------------------------------------
# The detector.


def test_the_detector_knows_the_classes_and_says_how_often_it_is_right(prepared):
    reference = open_images(prepared / "fashion.npz")
    detector = SmallDetector("small-fashion", prepared / "fashion.safetensors")
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
        assert float(f.metadata()["held_out_accuracy"]) > 0.9


def test_training_the_detector_again_gives_the_same_file(prepared, tmp_path):
    for folder in "ab":
        train_detector(open_images(prepared / "fashion.npz"), tmp_path / folder / "fashion.safetensors", torch.device("cpu"), 1)
    assert (tmp_path / "a" / "fashion.safetensors").read_bytes() == (tmp_path / "b" / "fashion.safetensors").read_bytes()


def test_metrics_of_a_set_have_names_directions_and_an_order():
    assert [metric.name for metric in metrics_of("small-fashion")] == ["fd_fashion", "class_agreement_fashion"]
    assert find_metric("fd_fashion1k/cfg1.0") is find_metric("fd_fashion") is metrics_of("small-fashion")[0]
    assert (find_metric("fd_fashion").direction, find_metric("class_agreement_fashion500").direction) == ("lower", "higher")
    assert format_metric("class_agreement_fashion1k/cfg1.0", 0.81234) == "0.812"
    assert metrics_of("small-cifar10") == metrics_of("fashion") == []


def test_the_detector_of_another_set_and_another_size_are_refused(prepared):
    file = prepared / "fashion.safetensors"
    with pytest.raises(UserError, match="fashion.safetensors is of evaluation.detector=small-fashion, not small-other"):
        SmallDetector("small-other", file)
    with pytest.raises(UserError, match="images are 28x28 pixels; the small-fashion detector takes 32x32"):
        SmallDetector("small-fashion", file).features(np.zeros((1, 28, 28, 3), np.uint8))
    with pytest.raises(UserError, match=r"evaluation.weights=.*fashion.npz is no detector .*make it: python prepare_latents.py"):
        SmallDetector("small-fashion", prepared / "fashion.npz")
    with pytest.raises(UserError, match=r"'small-cifar10' is not accepted; use inception \| dinov2 \| digits \| small-"):
        schema.check(composed(["evaluation.detector=small-cifar10"]), schema.TrainConfig)
    settings = schema.check(composed(["evaluation.detector=small-fashion"]), schema.TrainConfig).evaluation
    with pytest.raises(UserError, match="evaluation.detector=small-fashion needs evaluation.weights=<its file>; make it"):
        build.build_detectors(settings, SimpleNamespace(device=torch.device("cpu")))


def test_a_reference_that_cannot_train_a_detector_is_refused(prepared, tmp_path):
    digits = REPOSITORY / "evaluations" / "digits_reference.npz"
    for reference, output, message in (
        (digits, "digits.safetensors", "must be named after the set"),  # would be taken for the embedded ones
        (digits, "cifar10.safetensors", "must be named after the set, in small letters without digits"),
        (digits, "x.safetensors", "holds 1797 images of 8x8 pixels; a detector of small pictures needs 1,000 or more"),
        (prepared / "fashion.npz", "fashion.npz", "must be named after the set"),
    ):
        forget_accelerate()
        with pytest.raises(UserError, match=message):
            prepare_latents.main(["detector", f"reference={reference}", f"output={tmp_path / output}", "cpu_threads=1"])


def test_shards_of_latents_make_no_reference(tmp_path):
    prepare_latents.main(["synthetic", "num_items=4", "size=4", f"output={tmp_path / 'random'}"])
    with pytest.raises(UserError, match="holds latents of none; give the images that they were made of, or shards of pixels"):
        prepare_latents.main(["reference", f"images={tmp_path / 'random'}", f"output={tmp_path / 'r.npz'}"])


# ----------------------------------------------------------------------------------------------------------------------
# The rows.


def test_a_row_trains_and_is_judged_along_the_way(prepared, train):
    files = [f"data.path={prepared / 'latents'}", f"evaluation.weights={prepared / 'fashion.safetensors'}"]
    files += [f"evaluation.reference={prepared / 'fashion.npz'}", "train.compile=none", "train.cpu_threads=1"]
    few = [
        "train.num_steps=2",
        "train.batch_size=4",
        "train.log_every=1",
        "eval.every=1",
        "eval.num_samples=6",
        "eval.num_steps=2",
    ]
    run = train("fashion", "experiment=fashion/dit_xs4_tread", *files, *few, "sample.every=0", "checkpoint.every=2")
    names = [name for record in metrics(run) for name in record if name.startswith(("fd_", "class_"))]
    assert names == 2 * ["fd_fashion6/cfg1.0", "class_agreement_fashion6/cfg1.0"]


def test_the_rows_have_the_papers_route_and_number_of_tokens():
    rows = {row.name: row for row in experiments.ROWS.values() if row.name.startswith(("fashion/", "cifar10/"))}
    assert len(rows) == 10
    for name, row in rows.items():
        cfg = schema.check(composed([f"experiment={name}"]), schema.TrainConfig)
        assert cfg.eval.every and cfg.train.num_steps % cfg.eval.every == 0 and cfg.eval.cfg_scales == [1.0]
        patch_size = schema.BACKBONES[cfg.model.backbone][-1]
        assert (cfg.data.input_size // patch_size) ** 2 == (64 if "xs4" in name else 256)
        assert bool(cfg.model.routes) == name.endswith("_tread") == (row.baseline is not None)
        with pytest.raises(UserError, match=r"data.path=latents/.* does not exist; to make it: python prepare_latents.py encode"):
            build.open_data(cfg)


def test_the_command_for_the_data_of_a_row_is_one_that_encode_accepts(fashion, tmp_path):
    cfg = schema.check(composed(["experiment=fashion/dit_xs2", f"data.path={tmp_path / 'out'}"]), schema.TrainConfig)
    words = build.command_for(cfg.data).split()
    assert words[:2] == ["python", "prepare_latents.py"]
    forget_accelerate()
    prepare_latents.main([*words[2:], f"root={fashion[0]}", "num_workers=0", "cpu_threads=1"])
    _, dataset = build.open_data(cfg)
    assert len(dataset) == 1200
