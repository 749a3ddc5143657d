"""Reading and writing images: .npz files and folders, and errors for bad ones."""

from __future__ import annotations

import shutil
import zipfile

import numpy as np
import pytest
from conftest import encode, make_shard
from PIL import Image

import prepare_latents
from common.errors import UserError
from common.images import DRAWING, adm_center_crop
from evaluations.images import ImageFolder, NpzImages, open_images, read_ahead, write_npz
from latents.dataset import LatentDataset
from latents.image_sets import open_image_set
from sampling.evaluator import open_reference


def make_images(num: int = 7, height: int = 5, width: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num, height, width, 3), dtype=np.uint8)


def read(images, *args) -> np.ndarray:
    return np.concatenate(list(images.batches(*args)))


def test_images_are_read_as_they_were_written(tmp_path):
    images, labels = make_images(), np.arange(7)
    write_npz(tmp_path / "a.npz", iter(images), images.shape, labels)
    found = open_images(tmp_path / "a.npz")
    assert found.shape == images.shape and np.array_equal(found.labels, labels)
    assert np.array_equal(read(found, 3), images) and np.array_equal(read(found, 2, range(2, 5)), images[2:5])
    assert np.array_equal(read(found, 2, np.array([0, 1, 4, 6])), images[[0, 1, 4, 6]])
    with np.load(tmp_path / "a.npz") as plain:  # as other evaluators read it
        assert sorted(plain.files) == ["arr_0", "labels"]
        assert np.array_equal(plain["arr_0"], images)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_files_written_by_numpy_are_read_with_labels_as_adm_stores_them(tmp_path, save):
    images = make_images()
    save(tmp_path / "a.npz", images, np.arange(7, dtype=np.int32))
    found = NpzImages(tmp_path / "a.npz")
    assert np.array_equal(np.concatenate(list(read_ahead(found.batches(4, range(1, 7))))), images[1:])
    assert np.array_equal(read(found, 2, [1, 5, 6]), images[[1, 5, 6]])
    assert found.labels.tolist() == list(range(7)) and found.statistics == {}


IMAGES, MU = make_images(), np.zeros(1024)
BAD_ARRAYS = {
    "missing": ({"images": IMAGES}, "arr_0.npy"),
    "objects": ({"arr_0": np.array([{}], dtype=object)}, r"need uint8 \[N, H, W, 3\]"),
    "float": ({"arr_0": IMAGES / np.float32(255)}, r"arr_0 is float32 .*need uint8 \[N, H, W, 3\]"),
    "rgba": ({"arr_0": np.concatenate([IMAGES, IMAGES[..., :1]], axis=3)}, "arr_0 is uint8 .7, 5, 6, 4.; need"),
    "fortran order": ({"arr_0": np.asfortranarray(IMAGES)}, "in C order"),
    "labels of other length": ({"arr_0": IMAGES, "labels": np.arange(3)}, r"labels is \[3\]; need \[7\]"),
    "labels of objects": ({"arr_0": IMAGES, "labels": np.array([None] * 7)}, "allow_pickle"),
    "mu alone": ({"arr_0": IMAGES, "mu_dinov2": MU}, "sigma_dinov2 is not a file"),
    "sizes": ({"mu_dinov2": MU, "sigma_dinov2": np.eye(4)}, r"mu_dinov2 and sigma_dinov2 must be \[1024\] and \[1024, 1024\]"),
    "NaN": ({"mu_dinov2": MU * np.nan, "sigma_dinov2": np.eye(1024)}, "mu_dinov2 or sigma_dinov2 holds NaN or infinity"),
    "infinity": ({"mu": np.zeros(2048), "sigma": np.diag(np.full(2048, np.inf))}, "mu or sigma holds NaN or infinity"),
    "colour": ({"arr_0": IMAGES, "background": np.asarray("whit")}, "unknown color specifier: 'whit'"),
    "transparent": ({"arr_0": IMAGES, "background": np.asarray("#ffffff80")}, "'#ffffff80' is transparent"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_a_bad_npz_is_refused_by_name(tmp_path, case):
    arrays, message = BAD_ARRAYS[case]
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(UserError, match=r"bad\.npz cannot be read: .*" + message):
        NpzImages(tmp_path / "bad.npz")


def test_paths_that_are_not_sets_of_images_are_refused_by_name(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name in ("text.npz", "none.npz", "text.txt", "empty"):
        with pytest.raises(UserError, match=f"{name}"):
            open_images(tmp_path / name)
    np.savez(tmp_path / "a.npz", IMAGES)
    with pytest.raises(UserError, match="resolution=64 crops the images of a folder"):
        open_images(tmp_path / "a.npz", crop=64)
    make_shard(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="resolution=64 crops the images of a folder, but .* holds shards"):
        open_image_set(tmp_path / "a.safetensors", crop=64)


def test_a_damaged_or_short_array_is_found_while_reading(tmp_path):
    images = make_images(50, 32, 32)
    np.savez(tmp_path / "a.npz", images)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[len(data) // 2] ^= 0xFF  # the checksum of the zip file detects it
    (tmp_path / "flipped.npz").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "a.npz") as whole, zipfile.ZipFile(tmp_path / "short.npz", "w") as short:
        short.writestr("arr_0.npy", whole.read("arr_0.npy")[:-100])
    with zipfile.ZipFile(tmp_path / "negative.npz", "w") as negative, negative.open("arr_0.npy", "w") as f:
        np.lib.format.write_array_header_1_0(f, {"descr": "|u1", "fortran_order": False, "shape": (-1, 8, 8, 3)})
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as huge, huge.open("arr_0.npy", "w") as f:
        np.lib.format.write_array_header_1_0(f, {"descr": "|u1", "fortran_order": False, "shape": (2**70, 8, 8, 3)})
    with pytest.raises(UserError, match=r"huge.npz cannot be read: arr_0 is \[1180591620717411303424, 8, 8, 3\], but has only 1"):
        open_images(tmp_path / "huge.npz")
    with pytest.raises(UserError, match=r"negative.npz cannot be read: arr_0 is uint8 \[-1, 8, 8, 3\]"):
        NpzImages(tmp_path / "negative.npz")
    for name, message in (("flipped", "CRC"), ("short", "arr_0 ends before image 50 of 50")):
        with pytest.raises(UserError, match=rf"{name}\.npz cannot be read: .*{message}"):
            read(NpzImages(tmp_path / f"{name}.npz"), 8)


def test_writing_refuses_float_images_and_leaves_no_file(tmp_path):
    with pytest.raises(UserError, match="an image is float64"):
        write_npz(tmp_path / "a.npz", iter(IMAGES / 255), IMAGES.shape)
    assert list(tmp_path.iterdir()) == []


def write_folder(folder, images: np.ndarray) -> list[str]:
    names = ["b/2.png", "a.png", "b/10.jpeg", "c.JPG", "B.png", "d.png", "e.png"][: len(images)]
    for name, image in zip(names, images):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / name)
    return names


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    images = make_images()
    names = write_folder(tmp_path, images)
    (tmp_path / ".hidden.png").write_text("")
    found = ImageFolder(tmp_path)
    assert found.shape == (7, 5, 6, 3)
    whole = read(found, 3)
    for i, name in enumerate(sorted(names)):
        if name.endswith(".png"):
            assert np.array_equal(whole[i], images[names.index(name)])
    assert np.array_equal(read(found, 2, range(1, 6)), whole[1:6])
    before = found.local_hash()
    assert ImageFolder(tmp_path).local_hash() == before
    Image.fromarray(make_images(1, seed=9)[0]).save(tmp_path / "f.png")
    assert ImageFolder(tmp_path).local_hash() != before


def test_the_grids_of_sample_py_are_not_samples_and_its_file_names_are_labels(tmp_path):
    names = ["seed_000000_class_007.png", "seed_000001_class_1000.png"]
    for name in (*names, "grid_0-1.png"):
        Image.fromarray(make_images(1)[0]).save(tmp_path / name)
    assert len(ImageFolder(tmp_path)) == 3  # without settings.yaml, any image of a user counts
    assert ImageFolder(tmp_path).labels is None
    (tmp_path / "settings.yaml").touch()
    assert [file.name for file in ImageFolder(tmp_path).files] == names
    assert ImageFolder(tmp_path).labels.tolist() == [7, 1000]
    Image.fromarray(make_images(1)[0]).save(tmp_path / "another.png")
    assert ImageFolder(tmp_path).labels is None


def test_several_folders_of_sample_py_are_one_set_if_they_share_settings_but_no_seed(tmp_path):
    for name, seed in (("first", 0), ("second", 50)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.yaml").write_text("weights: ema\n")
        for file in (f"seed_{seed:06d}_class_{seed + 3:03d}.png", f"grid_{seed}.png"):
            Image.fromarray(make_images(1)[0]).save(tmp_path / name / file)
    assert ImageFolder(tmp_path).labels.tolist() == [3, 53] and len(ImageFolder(tmp_path)) == 2
    (tmp_path / "second" / "settings.yaml").write_text("weights: ema\nautoencoder_hash: null\n")  # a key that was added later
    assert len(ImageFolder(tmp_path)) == 2
    (tmp_path / "second" / "3").mkdir()
    (tmp_path / "second" / "seed_000050_class_053.png").rename(tmp_path / "second" / "3" / "seed_000050_class_053.png")
    assert ImageFolder(tmp_path).labels.tolist() == [3, 53] and ImageFolder(tmp_path / "second").labels.tolist() == [53]
    (tmp_path / "second" / "settings.yaml").write_text("weights: raw\n")
    with pytest.raises(UserError, match=r"the images in first and second with different weights; give one folder"):
        ImageFolder(tmp_path)
    (tmp_path / "second" / "settings.yaml").write_text("weights: ema\n")
    shutil.copy(tmp_path / "first" / "seed_000000_class_003.png", tmp_path / "second")
    with pytest.raises(UserError, match=r"2 images of seed_000000; sample other seeds= in each folder"):
        ImageFolder(tmp_path)


def test_files_pages_and_frames_that_are_not_read_are_named(tmp_path, caplog):
    caplog.set_level("INFO")
    images = [Image.fromarray(image) for image in make_images(3)]
    images[0].save(tmp_path / "a.png")
    assert read(ImageFolder(tmp_path), 2).shape[0] == 1 and not caplog.messages
    images[0].save(tmp_path / "pages.tiff", save_all=True, append_images=images[1:])
    images[0].save(tmp_path / "frames.png", save_all=True, append_images=images[1:])
    images[0].save(tmp_path / "b.gif")
    for name in ("a.svg", "b.svg", "README"):
        (tmp_path / name).write_text("text")
    assert np.array_equal(read(ImageFolder(tmp_path), 2), np.stack([np.array(images[0])] * 3))
    assert "3 images are read; 4 other files are not: 2 .svg, 1 no suffix, 1 .gif" in caplog.text
    assert f"only the first page or frame of 2 images is read, such as {tmp_path / 'frames.png'}" in caplog.text


def test_shards_are_no_folder_of_images_even_after_inspect(tmp_path):
    pixels, latents = tmp_path / "pixels", tmp_path / "latents"
    make_shard(pixels / "a.safetensors", num_items=6, channels=3, size=8)
    make_shard(latents / "a.safetensors", channels=4, size=8, autoencoder="sd-vae:x", resolution=64)
    for folder in (pixels, latents):
        Image.fromarray(make_images(1)[0]).save(folder / DRAWING.format("0123abcd"))
    dataset = LatentDataset(pixels)
    expected = dataset.fetch_with_images(np.arange(6), np.zeros(6, dtype=bool))[2].numpy()
    reference = open_reference(str(pixels), "reference", ["inception"], resolution=8)
    assert np.array_equal(read(reference, 4), expected) and np.array_equal(read(reference, 2, [1, 4, 5]), expected[[1, 4, 5]])
    assert reference.labels.tolist() == dataset.labels.tolist() and reference.shape == (6, 8, 8, 3)
    assert open_image_set(pixels / "a.safetensors").local_hash() == reference.local_hash()
    with pytest.raises(UserError, match="latents holds latents of autoencoder=sd-vae:x, not images; .*prepare_latents.py ref"):
        open_reference(str(latents), "reference", ["inception"], resolution=64)
    with pytest.raises(UserError, match="holds no images"):  # the drawings are all that a reader of images could find
        open_images(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="is the folder of a run, which holds grids and plots"):
        open_image_set(tmp_path)


def test_the_background_travels_with_a_reference(tmp_path, caplog):
    def reference(source, name, *settings):
        prepare_latents.main(["reference", f"images={source}", f"output={tmp_path / name}", *settings])
        return str(tmp_path / name)

    def open_with(file, background):
        return open_reference(file, "reference", ["digits"], 8, background)

    images = tmp_path / "images"
    images.mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGBA", (8, 8), (200, 0, 0, 0)).save(images / name)
    black = reference(images, "black.npz", "background=black")
    assert read(open_with(black, "#000000"), 2).max() == 0 and read(open_with(str(images), "black"), 2).max() == 0
    with pytest.raises(UserError, match="was made with background=black, but evaluation.background=white; make it again with"):
        open_with(black, "white")
    assert open_images(reference(black, "copy.npz")).background == "black"
    with pytest.raises(UserError, match=r"background=red, but images=.*black.npz was made with background=black"):
        reference(black, "red.npz", "background=red")
    encode(images, tmp_path / "shards", "identity", "resolution=8", "background=black", "labels=none")
    assert open_images(reference(tmp_path / "shards", "from_shards.npz")).background == "black"
    with pytest.raises(UserError, match="was made with background=black, but evaluation.background=white"):
        open_with(str(tmp_path / "shards"), "white")
    assert open_images(reference(images, "white.npz")).background == "white" and not caplog.messages

    write_npz(old := tmp_path / "old.npz", iter(make_images(2, 8, 8)), (2, 8, 8, 3))  # without a colour, like ADM's files
    gaussian = {"mu": np.ones(2048), "sigma": np.eye(2048), "mu_s": np.ones(2023), "sigma_s": np.eye(2023)}
    np.savez(tmp_path / "adm.npz", arr_0=make_images(2, 8, 8), **gaussian)  # statistics of more images than the file holds
    copied = open_images(reference(tmp_path / "adm.npz", "adm_white.npz", "background=white"))
    assert copied.background == "white" and copied.statistics.keys() == {"inception"}
    for name, layer in zip(("mu", "mu_s"), ("pool", "spatial")):
        assert np.array_equal(copied.statistics["inception"][layer].mu.numpy(), gaussian[name])
        assert np.array_equal(copied.statistics["inception"][layer].sigma.numpy(), gaussian[name.replace("mu", "sigma")])
    open_with(str(old), "white")
    assert "old.npz does not say which colour is behind its transparent images; evaluation.background=white" in caplog.text
    assert open_images(reference(old, "stamped.npz", "background=blue")).background == "blue"
    assert open_images(tmp_path / "stamped.npz").local_hash() == open_images(old).local_hash()


def test_a_reference_with_class_names_is_the_same_reference_and_keeps_the_names(tmp_path):
    names, images = [" a", "", "größe", "2"], make_images(4, 8, 8)
    files = {known: tmp_path / f"{known}.npz" for known in (True, False)}
    for known, file in files.items():
        write_npz(file, iter(images), images.shape, np.arange(4), class_names=names if known else None)
    with_names, without = map(open_images, files.values())
    assert (with_names.class_names, without.class_names) == (names, None)
    assert with_names.local_hash() == without.local_hash()  # so that caches and results stay valid


def test_a_reference_of_one_image_is_refused_and_another_size_is_said(tmp_path, caplog):
    write_npz(tmp_path / "a.npz", iter(make_images(2, 8, 8)), (2, 8, 8, 3), background="white")
    open_reference(str(tmp_path / "a.npz"), "reference", ["digits"], 8)
    assert not caplog.messages
    open_reference(str(tmp_path / "a.npz"), "reference", ["inception"], 16)
    words = "holds images of 8x8 pixels, but the samples have a height of 16 pixels"
    assert words in caplog.text
    for detector in ("digits", "small-fashion"):
        with pytest.raises(UserError, match=f"{words}, and evaluation.detector={detector} takes images of one size"):
            open_reference(str(tmp_path / "a.npz"), "reference", ["inception", detector], 16)
    write_npz(tmp_path / "one.npz", iter(make_images(1, 8, 8)), (1, 8, 8, 3), background="white")
    with pytest.raises(UserError, match="one.npz holds only one image and no statistics of the digits detector"):
        open_reference(str(tmp_path / "one.npz"), "reference", ["digits"], 8)


def test_a_folder_of_reference_images_is_cropped_to_the_resolution_of_the_run_as_in_encode(tmp_path):
    write_folder(tmp_path, make_images(2, 40, 30))
    reference = open_reference(str(tmp_path), "reference", ["inception"], resolution=16)
    assert reference.shape == (2, 16, 16, 3)
    assert np.array_equal(read(reference, 2)[0], adm_center_crop(Image.open(tmp_path / "a.png"), 16))
    assert reference.local_hash() != open_images(tmp_path).local_hash()  # caches of features depend on it
    write_folder(tmp_path / "square", make_images(1, 16, 16))
    same = [open_images(tmp_path / "square", crop=crop) for crop in (None, 16)]
    assert np.array_equal(*(read(images, 1) for images in same))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_images_that_are_not_rgb_are_converted_only_when_asked(tmp_path, mode):
    write_folder(tmp_path, make_images(2))
    Image.fromarray(make_images(1)[0]).convert(mode).save(tmp_path / "other.png")
    with pytest.raises(UserError, match=rf"other\.png cannot be read: .* mode {mode} is not accepted .* convert_to_rgb=true"):
        read(open_images(tmp_path), 2)
    assert read(open_images(tmp_path, convert_to_rgb=True), 2).shape == (3, 5, 6, 3)
    Image.fromarray(np.full((5, 6), 40000, dtype=np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(UserError, match=r"deep\.png cannot be read: Pillow's mode I;16"):
        read(open_images(tmp_path, convert_to_rgb=True), 2)


def test_a_broken_image_and_an_image_of_another_size_are_named(tmp_path):
    write_folder(tmp_path, make_images(2, 64, 64))
    whole = (tmp_path / "a.png").read_bytes()
    for content in (whole[: len(whole) // 2], b"not a PNG"):
        (tmp_path / "c.png").write_bytes(content)
        with pytest.raises(UserError, match=r"c\.png cannot be read"):
            read(ImageFolder(tmp_path), 2)
    (tmp_path / "d.png").write_bytes(b"not a PNG")
    with pytest.raises(
        UserError, match=r"2 problems; repair or remove them:\n- .*c\.png cannot be read.*\n- .*d\.png cannot be read"
    ):
        read(ImageFolder(tmp_path), 2)
    (tmp_path / "d.png").unlink()
    Image.fromarray(make_images(1, 5, 7)[0]).save(tmp_path / "c.png")
    with pytest.raises(UserError, match=r"c\.png cannot be read: 7x5 pixels, but the first image has 64x64"):
        read(ImageFolder(tmp_path), 2)
