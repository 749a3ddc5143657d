"""Reading and writing images: .npz files and folders, and what is said of bad ones."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from evaluations.images import ImageFolder, open_images, read_ahead
from evaluations.npz import NpzImages, write_npz
from evaluations.statistics import Statistics


def make_images(num: int = 7, height: int = 5, width: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num, height, width, 3), dtype=np.uint8)


def make_statistics(dim: int, seed: int = 0) -> Statistics:
    x = np.random.default_rng(seed).standard_normal((3 * dim, dim))
    return Statistics(torch.from_numpy(x.mean(0)), torch.from_numpy(np.cov(x, rowvar=False)))


# ----------------------------------------------------------------------------------------------------------------------
# .npz


def test_what_is_written_is_read_back(tmp_path):
    images, labels = make_images(), np.arange(7)
    statistics = {"pool": make_statistics(4), "spatial": make_statistics(3)}
    write_npz(tmp_path / "a.npz", iter(images), images.shape, labels, statistics)
    read = open_images(tmp_path / "a.npz")
    assert read.shape == images.shape
    assert np.array_equal(np.concatenate(list(read.batches(3))), images)
    assert np.array_equal(np.concatenate(list(read.batches(2, start=2, stop=5))), images[2:5])
    assert np.array_equal(read.labels, labels)
    assert set(read.statistics) == {"pool", "spatial"}
    for layer, expected in statistics.items():
        assert torch.equal(read.statistics[layer].mu, expected.mu)
        assert torch.equal(read.statistics[layer].sigma, expected.sigma)
    with np.load(tmp_path / "a.npz") as plain:  # what any other evaluator sees
        assert sorted(plain.files) == ["arr_0", "labels", "mu", "mu_s", "sigma", "sigma_s"]
        assert np.array_equal(plain["arr_0"], images)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_files_of_numpy_are_read_with_adms_labels(tmp_path, save):
    images = make_images()
    save(tmp_path / "a.npz", images, np.arange(7, dtype=np.int32))
    read = NpzImages(tmp_path / "a.npz")
    assert np.array_equal(np.concatenate(list(read_ahead(read.batches(4, start=1)))), images[1:])
    assert read.labels.tolist() == list(range(7))
    assert read.statistics == {}


def test_a_file_with_statistics_only_has_no_images(tmp_path):
    known = make_statistics(4)
    np.savez(tmp_path / "a.npz", mu=known.mu.numpy().astype(np.float32), sigma=known.sigma.numpy())
    read = NpzImages(tmp_path / "a.npz")
    assert len(read) == 0
    assert read.statistics["pool"].mu.dtype == torch.float64


IMAGES = make_images()
BAD_ARRAYS = {
    "missing": ({"images": IMAGES}, r"holds images; need arr_0"),
    "float": ({"arr_0": IMAGES / np.float32(255)}, r"arr_0 is float32 .*need uint8 .*scale floats"),
    "int64": ({"arr_0": IMAGES.astype(np.int64)}, r"arr_0 is int64 .*need uint8"),
    "grey": ({"arr_0": IMAGES[..., 0]}, r"grey images; need \[N, H, W, 3\]"),
    "grey with a channel": ({"arr_0": IMAGES[..., :1]}, r"grey images"),
    "rgba": ({"arr_0": np.concatenate([IMAGES, IMAGES[..., :1]], axis=3)}, r"RGBA images.*arr\[\.\.\., :3\]"),
    "channels first": ({"arr_0": IMAGES.transpose(0, 3, 1, 2).copy()}, r"channels first.*transpose"),
    "fortran order": ({"arr_0": np.asfortranarray(IMAGES)}, r"Fortran order"),
    "no images": ({"arr_0": IMAGES[:0]}, r"holds no images"),
    "two axes": ({"arr_0": IMAGES[:, 0, :, 0]}, r"need uint8 \[N, H, W, 3\]"),
    "objects": ({"arr_0": np.array([IMAGES[0], "x"], dtype=object)}, r"arr_0 is object"),
    "labels of other length": ({"arr_0": IMAGES, "labels": np.arange(3)}, r"labels is int64 \[3\]; need integers \[7\]"),
    "labels of objects": ({"arr_0": IMAGES, "labels": np.array([None] * 7)}, r"allow_pickle"),
    "mu alone": ({"arr_0": IMAGES, "mu": np.zeros(3)}, r"holds mu but no sigma"),
    "sigma_s alone": ({"arr_0": IMAGES, "sigma_s": np.eye(3)}, r"holds sigma_s but no mu_s"),
    "sizes": ({"arr_0": IMAGES, "mu": np.zeros(3), "sigma": np.eye(4)}, r"mu, sigma: mu \[3\] and sigma \[4, 4\] must be"),
    "nan": ({"arr_0": IMAGES, "mu_s": np.full(3, np.nan), "sigma_s": np.eye(3)}, r"mu_s, sigma_s: .*NaN"),
    "whole statistics": ({"arr_0": IMAGES, "mu": np.zeros(3, int), "sigma": np.eye(3)}, r"mu is int64.*need floats"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_a_bad_npz_is_refused_by_name(tmp_path, case):
    arrays, message = BAD_ARRAYS[case]
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=r"bad\.npz.*" + message):
        NpzImages(tmp_path / "bad.npz")


def test_zeros_and_ones_are_not_taken_for_images(tmp_path):
    np.savez(tmp_path / "a.npz", (IMAGES > 127).astype(np.uint8))
    with pytest.raises(ValueError, match=r"a\.npz: no pixel of arr_0 is above 1; need 0 to 255"):
        list(NpzImages(tmp_path / "a.npz").batches(4))


def test_more_images_than_there_are_cannot_be_asked_for(tmp_path):
    np.savez(tmp_path / "a.npz", IMAGES)
    with pytest.raises(ValueError, match=r"a\.npz holds 7 images, but 8 were asked for"):
        next(NpzImages(tmp_path / "a.npz").batches(4, stop=8))


def test_a_file_that_is_not_a_zip_or_does_not_exist_is_named(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(ValueError, match=r"text\.npz is damaged or not an \.npz"):
        NpzImages(tmp_path / "text.npz")
    with pytest.raises(ValueError, match=r"nothing\.npz does not exist"):
        open_images(tmp_path / "nothing.npz")
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ValueError, match="neither a folder"):
        open_images(tmp_path / "a.txt")


def test_a_damaged_or_short_array_is_found_while_reading(tmp_path):
    images = make_images(50, 32, 32)
    np.savez(tmp_path / "a.npz", images)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[len(data) // 2] ^= 0xFF  # the zip's checksum tells
    (tmp_path / "flipped.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"flipped\.npz is damaged"):
        list(NpzImages(tmp_path / "flipped.npz").batches(8))
    with zipfile.ZipFile(tmp_path / "a.npz") as whole, zipfile.ZipFile(tmp_path / "short.npz", "w") as short:
        short.writestr("arr_0.npy", whole.read("arr_0.npy")[:-100])
    with pytest.raises(ValueError, match=r"short\.npz is truncated: its arr_0 ends before image 50 of 50"):
        list(NpzImages(tmp_path / "short.npz").batches(8))


def test_writing_refuses_other_images_and_leaves_no_file(tmp_path):
    for images, message in ((IMAGES[:6], "6 images instead of 7"), (IMAGES / 255, "image 0 is float64")):
        with pytest.raises(ValueError, match=message):
            write_npz(tmp_path / "a.npz", iter(images), IMAGES.shape)
        assert not (tmp_path / "a.npz").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Folders.


def write_folder(folder, images: np.ndarray) -> list[str]:
    names = ["b/2.png", "a.png", "b/10.jpeg", "c.JPG", "B.png", "d.png", "e.png"][: len(images)]
    for name, image in zip(names, images):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / name, quality=100)
    return names


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    images = make_images()
    names = write_folder(tmp_path, images)
    (tmp_path / ".tmp_x.png").write_bytes(b"")  # what another process has not finished
    (tmp_path / "notes.txt").write_text("")
    read = open_images(tmp_path)
    assert [file.relative_to(tmp_path).as_posix() for file in read.files] == sorted(names)
    assert read.shape == (7, 5, 6, 3)
    batches = list(read_ahead(read.batches(3)))
    assert [len(batch) for batch in batches] == [3, 3, 1]
    stacked = np.concatenate(batches)
    for i, name in enumerate(sorted(names)):
        if name.endswith(".png"):
            assert np.array_equal(stacked[i], images[names.index(name)])
    assert np.array_equal(np.concatenate(list(read.batches(2, start=1, stop=6))), stacked[1:6])


def test_a_changed_folder_has_another_fingerprint(tmp_path):
    write_folder(tmp_path, make_images())
    before = ImageFolder(tmp_path).fingerprint()
    assert ImageFolder(tmp_path).fingerprint() == before
    Image.fromarray(make_images(1, seed=9)[0]).save(tmp_path / "f.png")
    assert ImageFolder(tmp_path).fingerprint() != before


def test_images_of_mixed_sizes_are_refused_by_name(tmp_path):
    write_folder(tmp_path, make_images())
    Image.fromarray(make_images(1, 5, 7)[0]).save(tmp_path / "odd.png")
    with pytest.raises(ValueError, match=r"odd\.png is 7x5 pixels, but 7 of 8 images .* are 6x5"):
        ImageFolder(tmp_path)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "LA"])
def test_images_that_are_not_rgb_are_converted_only_when_asked(tmp_path, mode):
    write_folder(tmp_path, make_images(2))
    Image.fromarray(make_images(1)[0]).convert(mode).save(tmp_path / "other.png")
    with pytest.raises(ValueError, match=rf"other\.png has mode {mode}, not 8-bit RGB"):
        open_images(tmp_path)
    read = open_images(tmp_path, convert_to_rgb=True)
    assert next(read.batches(3)).shape == (3, 5, 6, 3)


def test_sixteen_bit_images_are_refused_even_then(tmp_path):
    Image.fromarray(np.full((5, 6), 40000, dtype=np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(ValueError, match=r"deep\.png has mode I;16"):
        open_images(tmp_path, convert_to_rgb=True)


def test_a_broken_png_is_named(tmp_path):
    write_folder(tmp_path, make_images(2, 64, 64))
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "broken.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"broken\.png is broken"):
        list(ImageFolder(tmp_path).batches(2))
    (tmp_path / "broken.png").write_bytes(b"not a PNG")
    with pytest.raises(ValueError, match=r"broken\.png is broken or not an image"):
        ImageFolder(tmp_path)


def test_an_empty_folder_a_missing_one_and_too_few_images_are_said(tmp_path):
    with pytest.raises(ValueError, match="holds no images"):
        open_images(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        ImageFolder(tmp_path / "missing")
    write_folder(tmp_path, make_images())
    with pytest.raises(ValueError, match="holds 7 images, but 50 were asked for"):
        next(ImageFolder(tmp_path).batches(4, stop=50))
