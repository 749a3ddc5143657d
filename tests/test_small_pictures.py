"""From a folder of small grey pictures to a run that a classifier of these pictures evaluates."""

import hashlib
import json
import re
import struct

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, encode, evaluated, forget_accelerate, run_fid
from safetensors import safe_open
from safetensors.torch import load_file, save

import prepare_latents
from common.errors import UserError
from evaluations.classifiers import ClassifierDetector, _split, train_detector
from evaluations.images import open_images, write_npz
from evaluations.suite import compute_metrics, metrics_for
from extras.report.rows import change_words, changes_of
from extras.report.runs import LOSS, read_run
from latents.channel_statistics import channel_sums, mean_and_std, overall_std
from latents.dataset import LatentDataset
from latents.shards import latents_for_network

NAMES = [metric.name for metric in metrics_for("small-fashion")]


@pytest.fixture(scope="module")
def fashion(tmp_path_factory):
    """Fixture: (folder of Fashion-MNIST's files, images, labels). An image is a bar of noise. Its row depends on the class."""
    root, random = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    images, labels = np.zeros((1200, 28, 28), np.uint8), np.arange(1200) % 10
    for image, label in zip(images, labels):
        image[2 * label : 2 * label + 4] = random.integers(100, 256, (4, 28))
    raw = root / "datasets" / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, *images.shape) + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, len(labels)) + labels.astype(np.uint8).tobytes())
    return root, images, labels


@pytest.fixture(scope="module")
def prepared(fashion, tmp_path_factory):
    """Fixture: a folder with latents/, fashion.npz and fashion.safetensors, made by the documented commands."""
    folder = tmp_path_factory.mktemp("prepared")
    (program,) = re.findall(r"```python\n(import hashlib\n.*?)```", (REPOSITORY / "docs" / "data.md").read_text(), re.DOTALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(fashion[0])
        exec(program, {})
    grey = ["pad=2", "grey=true", "sigma_data=0.5", "shard_size=500", "batch_size=64"]
    encode(fashion[0] / "datasets" / "fashion", folder / "latents", "identity", *grey)
    prepare_latents.main(["reference", f"images={folder / 'latents'}", f"output={folder / 'fashion.npz'}"])
    forget_accelerate()
    prepared = [f"reference={folder / 'fashion.npz'}", f"output={folder / 'fashion.safetensors'}"]
    prepare_latents.main(["detector", *prepared, "num_epochs=3", "cpu_threads=1"])
    return folder


def test_grey_pictures_are_padded_with_black_and_scaled_to_the_requested_deviation(fashion, prepared):
    _, images, labels = fashion
    names = [f"{label}/{hashlib.sha256(image.tobytes()).hexdigest()}" for image, label in zip(images, labels)]
    order = np.argsort(names)  # the order in which a folder is read
    images, labels = images[order], labels[order]
    dataset = LatentDataset(prepared / "latents")
    assert (len(dataset), dataset.channels, dataset.height) == (1200, 1, 32)
    assert np.array_equal(dataset.labels, labels) and dataset.class_names[9] == "09"
    stored, _ = dataset.fetch(np.arange(1200), np.zeros(1200, bool))
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    assert torch.equal((stored[:, 0].float() * 127.5 + 127.5).round().byte(), torch.from_numpy(padded))
    assert stored[:, 0, 0].eq(-1).all()
    sums = channel_sums(latents_for_network(stored, dataset.info), "sample")
    assert overall_std(*mean_and_std(sums)) == pytest.approx(0.5, abs=1e-3)


def test_the_detector_knows_the_classes_and_stores_its_accuracy(prepared):
    reference = open_images(prepared / "fashion.npz")
    detector = ClassifierDetector("small-fashion", prepared / "fashion.safetensors")
    images = next(reference.batches(300))
    features = detector.features(images)
    values = compute_metrics(features, features, torch.from_numpy(reference.labels[:300]))
    assert list(values) == NAMES and values["precision_fashion"] == values["recall_fashion"] == 1
    assert values["fd_fashion"] == pytest.approx(0, abs=1e-3) and values["class_agreement_fashion"] > 0.9
    noise = np.random.default_rng(0).integers(0, 256, images.shape, dtype=np.uint8)
    assert compute_metrics(features, detector.features(noise))["fd_fashion"] > 1
    with safe_open(prepared / "fashion.safetensors", framework="pt") as f:
        assert json.loads(f.metadata()["about"])["held_out_accuracy"] > 0.9


def test_agreement_needs_a_detector_of_the_same_classes_in_the_same_order(prepared, train, tmp_path, caplog):
    """The reference and the detector got the names from the latents. Without names, only the number of classes is compared."""
    names = LatentDataset(prepared / "latents").class_names
    with safe_open(prepared / "fashion.safetensors", framework="pt") as f:
        header = json.loads(f.metadata()["about"])
    reference = open_images(prepared / "fashion.npz")
    assert names == header["class_names"] == reference.class_names == [f"{i:02d}" for i in range(10)]
    file, tensors = tmp_path / "fashion.safetensors", load_file(prepared / "fashion.safetensors")
    pixels = next(reference.batches(40))
    write_npz(tmp_path / "nameless.npz", pixels, pixels.shape, reference.labels[:40])
    settings = [f"evaluation.reference={tmp_path / 'nameless.npz'}", "evaluation.detector=small-fashion", "machine.cpu_threads=1"]
    settings += [f"evaluation.detector_weights={file}", "evaluation.num_samples=20"]
    run_settings = [f"data.path={prepared / 'latents'}", "data=custom", "model.backbone=DiT-XS/4", "train.num_steps=1"]
    run_settings += ["evaluation.every=1", "sampler.num_steps=1", "guidance=none", *settings]
    rotated, shards = [*names[1:], names[0]], f"images={prepared / 'latents'}"
    for number, (source, trained_on, differing) in enumerate(
        (
            (shards, names, None),
            (shards, None, None),  # the detectors of earlier versions
            (shards, rotated, "class 0 is '01' and '00'"),
            (shards, names[:9], "class 9 is None and '09'"),
            (f"images={prepared / 'fashion.npz'}", rotated, "class 0 is '01' and '00'"),
            (f"images={tmp_path / 'nameless.npz'}", rotated, None),
            ("train", rotated, "class 0 is '01' and '00'"),
            (f"checkpoint={tmp_path / 'run'}", names[:9], "class 9 is None and '09'"),
            (f"checkpoint={tmp_path / 'run'}", names, None),
        )
    ):
        file.write_bytes(save(tensors, metadata={"about": json.dumps({**header, "class_names": trained_on})}))
        caplog.clear()
        if source == "train":
            (record,) = evaluated(train("run", *run_settings))
        else:
            run_fid(source, *settings, f"output={(output := tmp_path / f'output_{number}')}")
            (record,) = map(json.loads, (output / "results.jsonl").read_text().splitlines())
        assert "fd_fashion" in record["metrics"]
        for values in (record["metrics"], *([record["jackknife"]] if source != "train" else [])):
            assert ("class_agreement_fashion" in values) == (differing is None)
        lines = [line for line in caplog.messages if line.startswith("no class agreement: the small-fashion detector")]
        assert [line.rpartition(": ")[2] for line in lines] == ([differing] if differing else [])


def test_training_the_detector_of_the_digits_again_gives_the_same_file(tmp_path):
    digits = open_images(REPOSITORY / "evaluations" / "digits_reference.npz")
    files = [tmp_path / folder / "digits.safetensors" for folder in "ab"]
    for file in files:
        train_detector(digits, file, torch.device("cpu"), 1)
    assert files[0].read_bytes() == files[1].read_bytes() and ClassifierDetector("digits", files[0]).name == "digits"


def test_copies_are_not_on_both_sides_of_the_detectors_split(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (700, 8, 8, 3), dtype=np.uint8)
    copies = np.concatenate([images, images])
    held_out, training = _split(copies, 140)
    assert sorted([*held_out.tolist(), *training.tolist()]) == list(range(1400)) and 140 < len(held_out) < 420
    assert not {*(held_out % 700).tolist()} & {*(training % 700).tolist()}
    shuffled = np.random.default_rng(0).permutation(700)
    assert np.array_equal(np.concatenate(_split(images, 70)), shuffled) and len(_split(images, 70)[0]) == 70
    write_npz(tmp_path / "a.npz", np.zeros((1000, 8, 8, 3), np.uint8), (1000, 8, 8, 3), np.arange(1000) % 10)
    with pytest.raises(UserError, match="too many of its 1,000 images are equal"):
        train_detector(open_images(tmp_path / "a.npz"), tmp_path / "a.safetensors", torch.device("cpu"), 1)


def test_a_detector_needs_a_new_file_with_the_name_of_a_set_and_1000_images(prepared, tmp_path):
    for output in ("Fashion.safetensors", "dinov2.safetensors", "fashion.npz"):
        with pytest.raises(UserError, match=f"output=.*{output} must be a new file named after the set: <a lower-case"):
            train_detector(open_images(prepared / "fashion.npz"), prepared / output, torch.device("cpu"), 1)
    few, no_labels = "it holds 999 images; a detector needs at least 1,000", "it holds no labels; make it from"
    for name, shape, labels, words in (
        ("a", (999, 16, 16, 3), np.zeros(999, int), few),
        ("b", (1000, 16, 16, 3), None, no_labels),
        ("c", (999, 16, 8, 3), None, f"{few}; its images have 8x16 pixels; a detector needs squares of at most 128; {no_labels}"),
    ):
        write_npz(tmp_path / f"{name}.npz", np.zeros(shape, np.uint8), shape, labels)
        with pytest.raises(UserError, match=rf"{name}.npz: {words}"):
            train_detector(open_images(tmp_path / f"{name}.npz"), tmp_path / "a.safetensors", torch.device("cpu"), 1)
    words = "its images have 32x32 pixels; digits.safetensors needs 8x8, other names squares of at most 128"
    with pytest.raises(UserError, match=words):
        train_detector(open_images(prepared / "fashion.npz"), tmp_path / "digits.safetensors", torch.device("cpu"), 1)
    write_npz(tmp_path / "d.npz", np.zeros((1000, 8, 8, 3), np.uint8), (1000, 8, 8, 3), np.arange(1000) % 12)
    with pytest.raises(UserError, match="d.npz: it has 12 classes; digits.safetensors needs at most 10$"):
        train_detector(open_images(tmp_path / "d.npz"), tmp_path / "digits.safetensors", torch.device("cpu"), 1)


@pytest.mark.parametrize(("lowest", "highest"), [(-1, 9), (-2, -1), (0, 10**6), (3, 2**62)])
def test_labels_that_number_no_classes_are_refused(tmp_path, lowest, highest):
    labels = np.where(np.arange(1000) % 2, lowest, highest)
    write_npz(tmp_path / "a.npz", np.zeros((1000, 8, 8, 3), np.uint8), (1000, 8, 8, 3), labels)
    with pytest.raises(UserError, match=f"reference=.*a.npz: its labels run from {lowest} to {highest}; .* from 0 to 999,999$"):
        prepare_latents.main(["detector", f"reference={tmp_path / 'a.npz'}", f"output={tmp_path / 'a.safetensors'}"])


def test_a_row_is_trained_and_evaluated_and_appears_in_the_report(fashion, prepared, train):
    files = [f"data.path={prepared / 'latents'}", f"evaluation.detector_weights={prepared / 'fashion.safetensors'}"]
    files += [
        f"evaluation.reference={prepared / 'fashion.npz'}",
        "machine.compile=none",
        "sample_grid.every=0",
        "machine.cpu_threads=1",
    ]
    few = ["train.num_steps=2", "train.batch_size=4", "evaluation.every=1", "evaluation.num_samples=6", "sampler.num_steps=2"]
    run = train("any_name", "experiment=fashion_dit_xs4_tread", *files, *few, "checkpoint.every=2")
    scores = [record["metrics"] for record in evaluated(run)]
    assert [list(one) for one in scores] == 2 * [NAMES]
    # A folder as the reference would be compared without the padding.
    pictures = fashion[0] / "datasets" / "fashion"
    words = "reference={}: the training images were encoded with pad=2, but a folder is only cropped; use shards of pixels"
    with pytest.raises(UserError, match=words.format(pictures)):
        run_fid(f"checkpoint={run}", f"evaluation.reference={pictures}", "evaluation.num_samples=6", "machine.cpu_threads=1")
    with pytest.raises(UserError, match="evaluation." + words.format(pictures)):
        train("folder", "experiment=fashion_dit_xs4_tread", *files, *few, f"evaluation.reference={pictures}")
    found = read_run(run)
    assert (found.row["name"], found.row["baseline"]) == ("fashion_dit_xs4_tread", "fashion_dit_xs4")
    assert "train.num_steps=2 instead of 6000, train.batch_size=4 instead of 64" in change_words(changes_of(found))
    assert [*found.figures[LOSS]] == [*found.speeds] == [1, 2] and found.clock[1][-1] > 0
