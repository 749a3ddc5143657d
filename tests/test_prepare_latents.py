"""Encoding images gives shards with the autoencoder's latents, even after errors. tests/test_drills.py kills the command."""

import contextlib
import copy
import io
import json
import logging
import os
import re
import shutil
import tarfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import checked, encode, forget_accelerate, make_shard
from forked import launch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_webdataset import sd_moments, write_tar

import prepare_latents
from cli.print_errors import run_and_print_errors
from common.errors import UserError
from common.images import adm_center_crop, read_rgb
from common.randomness import SeedRandom
from evaluations.images import open_images
from latents import autoencoders
from latents.channel_statistics import are_mirrored
from latents.dataset import LatentDataset
from latents.prepare.inspect import open_originals
from latents.prepare.labelled_images import describe_classes, open_labelled_images
from latents.prepare.write import ShardFolder
from latents.shards import ShardInfo, latents_for_network, normalize_latents, write_shard
from training.data import complete_config, open_training_latents

RESOLUTION = 32
INFO = ShardInfo(kind="sample", scale_factor=0.5, autoencoder="identity", resolution=4, num_classes=3)


@pytest.fixture(scope="module")
def vae(vae):
    return f"sd-vae:{vae}"


def random_image(rng, mode="RGB", width=None, height=None):
    width, height = width or int(rng.integers(20, 150)), height or int(rng.integers(20, 150))
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    pixels = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels, mode)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Fixture: 40 images of several sizes and modes in three class folders."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    modes = ["RGB", "L", "RGBA", "CMYK", "LA", "P", "EXIF", "RGB"]
    for i in range(40):
        folder = root / ("ant", "bee", "cow")[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        mode = modes[i % len(modes)]
        if mode == "P":
            random_image(rng).convert("P").save(folder / f"{i:02}.png")
        elif mode == "EXIF":
            exif = Image.Exif()
            exif[0x0112] = 6  # rotated by 90 degrees
            random_image(rng, "RGB", 60, 40).save(folder / f"{i:02}.jpg", exif=exif)
        else:
            random_image(rng, mode).save(folder / f"{i:02}{'.jpg' if mode in ('CMYK', 'L') else '.png'}")
    return root


@pytest.fixture(scope="module")
def encoded(images, vae, tmp_path_factory):
    """Fixture: the folder with latents of `images` at default settings. Tests that write to it copy it first."""
    return encode(images, tmp_path_factory.mktemp("encoded") / "out", vae)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.glob("latents_*.safetensors")}


def test_stored_latents_equal_those_of_the_autoencoder(images, vae, tmp_path):
    dataset = LatentDataset(encode(images, tmp_path / "out", vae, "flips=true"))
    assert len(dataset) == 40 and len(dataset.files) == 5 and dataset.class_names == ["ant", "bee", "cow"]
    assert (dataset.info.kind, dataset.info.num_classes, dataset.info.autoencoder) == ("moments", 3, vae)
    assert dataset.info.scale_factor == 0.18215 and dataset.info.resolution == RESOLUTION
    files = sorted(file.relative_to(images).as_posix() for file in images.rglob("*.*"))
    assert dataset.labels.tolist() == [["ant", "bee", "cow"].index(name.split("/")[0]) for name in files]
    net = autoencoders.build(vae, torch.device("cpu"), 4).vae
    for index in (0, 7, 23, 39):
        pixels = torch.from_numpy(adm_center_crop(read_rgb(images / files[index])[0], RESOLUTION)).permute(2, 0, 1) / 127.5 - 1
        for flip in (False, True):
            stored, _ = dataset.fetch(np.array([index]), np.array([flip]))
            with torch.no_grad():
                posterior = net.encode(pixels[None].flip(-1) if flip else pixels[None]).latent_dist
            expected = torch.cat([posterior.mean, posterior.logvar], dim=1)
            assert torch.allclose(stored.float(), expected, rtol=2e-3, atol=1e-4)


def write_statistics(folder, num_channels):
    """Write a file in the format of LightningDiT's latents_stats.pt and return its path."""
    mean, std = torch.arange(float(num_channels)), torch.arange(1, num_channels + 1) / 2
    torch.save({"mean": mean.reshape(1, -1, 1, 1), "std": std.reshape(1, -1, 1, 1)}, file := folder / "stats.pt")
    return file


def test_encode_measures_mean_and_deviation_of_each_channel_or_reads_those_of_lightningdit(images, vae, encoded, tmp_path):
    plain = LatentDataset(encoded)
    measured = LatentDataset(encode(images, tmp_path / "measured", vae, "normalize=true"))
    taken = LatentDataset(encode(images, tmp_path / "taken", vae, f"latents_stats={write_statistics(tmp_path, 4)}"))
    manifest = json.loads((tmp_path / "measured" / "manifest.json").read_text())
    assert plain.info.latents_mean is None and plain.info.scale_factor == 0.18215 and measured.info.scale_factor == 1
    assert measured.info.latents_mean == manifest["mean"] and measured.info.latents_std == manifest["std"]
    assert (taken.info.scale_factor, taken.info.latents_mean, taken.info.latents_std) == (1, [0, 1, 2, 3], [0.5, 1, 1.5, 2])
    indices = np.arange(40)
    stored, *others = (dataset.fetch(indices, indices < 0)[0] for dataset in (plain, measured, taken))
    assert all(torch.equal(stored, other) for other in others)  # shards hold equal values; only their headers differ
    seen = latents_for_network(stored, measured.info, SeedRandom(list(range(40)), torch.device("cpu")))
    assert np.allclose(seen.mean(dim=(0, 2, 3)), 0, atol=0.1) and np.allclose(seen.std(dim=(0, 2, 3)), 1, atol=0.1)
    inspect(tmp_path / "measured", "grid=none", "sigma_data=1")


@pytest.mark.parametrize(
    ("entries", "mean", "std"),
    [
        ({"shift_factor": 0.5, "scaling_factor": 1.5}, [0.5] * 4, [1.0] * 4),  # as SD3 and FLUX.1
        ({"latents_mean": [0, 1, 2, 3], "latents_std": [2, 2, 4, 4], "scaling_factor": 0.5}, [0, 1, 2, 3], [2, 2, 4, 4]),
    ],
)
def test_an_autoencoders_own_statistics_scale_its_latents(images, vae, tmp_path, entries, mean, std):
    folder = shutil.copytree(vae.removeprefix("sd-vae:"), tmp_path / "vae")
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | entries))
    shifted = LatentDataset(encode(images, tmp_path / "shifted", f"sd-vae:{folder}"))
    info, scale = shifted.info, entries["scaling_factor"]
    assert (info.scale_factor, info.latents_mean, info.latents_std) == (scale, mean, std)
    expected = -torch.tensor(mean) / torch.tensor(std) * scale
    assert torch.allclose(normalize_latents(torch.zeros(1, 4, 2, 2), info)[0, :, 0, 0], expected.float())
    # Other statistics replace them.
    measured = LatentDataset(encode(images, tmp_path / "measured", f"sd-vae:{folder}", "normalize=true"))
    scaled = LatentDataset(encode(images, tmp_path / "scaled", f"sd-vae:{folder}", "sigma_data=0.5"))
    assert measured.info.latents_mean not in (None, mean) and measured.info.scale_factor == 1
    assert scaled.info.latents_mean is None and scaled.info.scale_factor != scale


def test_the_manifest_describes_the_latents(images, vae, encoded):
    manifest = json.loads((encoded / "manifest.json").read_text())
    expected = {"num_items": 40, "kind": "moments", "autoencoder": vae, "shape": [4, 16, 16], "source": str(images)}
    expected |= {"class_names": ["ant", "bee", "cow"], "class_counts": [14, 13, 13]}
    assert {key: manifest[key] for key in expected} == expected
    stored = LatentDataset(encoded).fetch(np.arange(40), np.zeros(40, dtype=bool))[0].double()
    mean, log_variance = stored.chunk(2, dim=1)
    samples = mean + (log_variance / 2).exp() * torch.randn(200, *mean.shape, generator=torch.Generator().manual_seed(0))
    assert np.allclose(manifest["mean"], mean.mean(dim=(0, 2, 3)), atol=1e-6)
    assert np.allclose(manifest["std"], samples.std(dim=(0, 1, 3, 4)), rtol=0.01)


def test_samples_are_drawn_once_and_depend_only_on_the_seed_and_the_image(images, vae, tmp_path):
    a = encode(images, tmp_path / "a", vae, "kind=sample")
    b = encode(images, tmp_path / "b", vae, "kind=sample", "seed=1")
    again = encode(images, tmp_path / "c", vae, "kind=sample", "batch_size=8")
    first, other, repeated = (LatentDataset(x).fetch(np.arange(40), np.zeros(40, dtype=bool))[0].float() for x in (a, b, again))
    assert LatentDataset(a).channels == 4 and (first - other).abs().mean() > 0.1
    assert torch.allclose(first, repeated, atol=2e-3)


def test_a_folder_is_locked_until_it_has_its_manifest_and_may_be_locked_again_at_once(tmp_path, monkeypatch):
    def open_folder():
        settings = {"shard_size": 2, "dtype": "float32"}
        return ShardFolder.open(tmp_path, INFO, settings, lambda start, stop: "hash", num_items=4, stack=stack)

    stack = contextlib.ExitStack()  # stays open, so that the locks of both folders are held
    first, opened = open_folder(), []
    for shard in first.missing:
        first.write(shard, {"labels": torch.tensor([0, 1]), "latents": torch.randn(2, 1, 4, 4)})
    before = contents(tmp_path)
    with pytest.raises(UserError, match="another process is writing to "):
        open_folder()
    remove = Path.unlink

    def open_another_at_once(file, missing_ok=False):
        remove(file, missing_ok)
        if file.name == ".unfinished":
            monkeypatch.undo()
            opened.append(open_folder())

    monkeypatch.setattr(Path, "unlink", open_another_at_once)
    first.finish()
    [second] = opened
    assert second.missing == []
    with pytest.raises(UserError, match="another process is writing to "):
        open_folder()
    second.finish()
    assert contents(tmp_path) == before and not list(tmp_path.glob(".*")) and len(LatentDataset(tmp_path)) == 4


def test_a_changed_shard_is_renamed_and_encoded_again(images, vae, encoded, tmp_path, caplog):
    folder = shutil.copytree(encoded, tmp_path / "out")
    before, file = contents(folder), folder / "latents_00001.safetensors"
    file.write_bytes(damaged := file.read_bytes()[:-1] + b"\x00")
    encode(images, folder, vae)
    assert "latents_00001.safetensors changed after it was written; renamed to" in caplog.text
    assert (folder / ".changed_latents_00001.safetensors").read_bytes() == damaged != before[file.name]
    assert contents(folder) == before and (folder / "manifest.json").exists()


def test_a_repaired_or_removed_image_changes_only_its_shard(images, vae, encoded, tmp_path, caplog):
    folder = shutil.copytree(images, tmp_path / "copy")
    file = folder / "cow" / "38.jpg"  # in the last of five shards
    good = file.read_bytes()
    file.write_bytes(good[:100])
    with pytest.raises(UserError, match=r"cow/38.jpg cannot be read: .*; repair it, or set on_error=skip .if you remove images"):
        encode(folder, tmp_path / "out", vae)
    with pytest.raises(UserError, match="is not finished: run the same prepare_latents.py command again to complete it"):
        LatentDataset(tmp_path / "out")
    finished = {f.name: f.stat().st_mtime_ns for f in (tmp_path / "out").glob("*.safetensors")}
    file.write_bytes(good)
    encode(folder, tmp_path / "out", vae)
    assert contents(tmp_path / "out") == contents(encoded) and len(finished) >= 3
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == at for name, at in finished.items())
    file.unlink()
    encode(folder, tmp_path / "out", vae)
    assert "latents_00004.safetensors was made from other items than the source holds now; renamed" in caplog.text
    assert len(LatentDataset(tmp_path / "out")) == 39
    assert all((tmp_path / "out" / name).stat().st_mtime_ns == at for name, at in finished.items())


def test_encode_refuses_a_folder_with_other_settings_images_weights_or_shards(images, vae, encoded, tmp_path, monkeypatch):
    out, others = shutil.copytree(encoded, tmp_path / "out"), shutil.copytree(images, tmp_path / "others")
    with pytest.raises(UserError, match=r"already holds another data set \(flips: False -> True\); choose another folder"):
        encode(images, out, vae, "flips=true")
    for file in sorted(others.rglob("*.*")):  # keep names, sizes and labels; change only the content
        blob = bytearray(file.read_bytes())
        blob[-20] ^= 255
        file.write_bytes(blob)
    with pytest.raises(UserError, match="already holds another data set .made of other items.; choose another folder"):
        encode(others, out, vae)
    net = copy.deepcopy(autoencoders.build(vae, torch.device("cpu")))  # other tests use the cached one
    net.vae.quant_conv.bias.add_(1.0)
    monkeypatch.setattr(autoencoders, "build", lambda *args, **settings: net)
    with pytest.raises(UserError, match="already holds another data set .weights: "):
        encode(images, out, vae)
    assert contents(out) == contents(encoded) and (out / "manifest.json").exists()
    make_shard(tmp_path / "mine" / "a.safetensors")
    with pytest.raises(UserError, match="holds a.safetensors, which this command did not write; choose another"):
        encode(images, tmp_path / "mine", vae)


def test_empty_paths_foreign_files_and_loops_of_links_are_refused(images, tmp_path):
    for settings, words in ((["images="], "images=''"), (["latents_stats="], "latents_stats=''"), (["output="], "output=''")):
        with pytest.raises(UserError, match=words):
            prepare_latents.main(["encode", f"images={images}", f"output={tmp_path / 'out'}", *settings])
    write_folder(tmp_path / "mine").joinpath("thesis.tex").touch()
    (tmp_path / "mine" / ".hidden").touch()
    with pytest.raises(UserError, match="mine holds thesis.tex, which this command did not write; choose another folder"):
        encode(images, tmp_path / "mine")
    (tmp_path / "mine" / "thesis.tex").unlink()
    folder = encode(images, tmp_path / "mine")
    (folder / "README").touch()  # beside shards, files of a user are welcome
    encode(images, folder)
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    arguments = ["encode", f"images={images}", f"output={tmp_path / 'a'}", "autoencoder=identity", "kind=sample"]
    with pytest.raises(SystemExit, match="^error: .*"):
        run_and_print_errors(lambda: prepare_latents.main(arguments))


def test_unreadable_images_can_be_skipped_and_are_counted(images, vae, encoded, tmp_path, caplog):
    folder, rng, whole = shutil.copytree(images, tmp_path / "bad"), np.random.default_rng(1), io.BytesIO()
    random_image(rng, width=1, height=50).save(folder / "ant" / "narrow.png")
    random_image(rng, width=90, height=90).save(whole, "jpeg")
    (folder / "bee" / "cut.jpg").write_bytes(whole.getvalue()[:-2000])
    Image.fromarray(rng.integers(0, 60000, (40, 40), dtype=np.uint16)).save(folder / "bee" / "deep.png")
    os.mkfifo(folder / "ant" / "+.png")  # a pipe as the first image, which the hash of the source reads
    (folder / "cow" / "text.png").write_text("not an image")
    out = LatentDataset(encode(folder, tmp_path / "out", vae, "on_error=skip"))
    left_out = json.loads((tmp_path / "out" / "manifest.json").read_text())["left_out"]
    names = ["ant/+.png", "ant/narrow.png", "bee/cut.jpg", "bee/deep.png", "cow/text.png"]
    assert [entry["name"] for entry in left_out] == names
    assert "ant/+.png cannot be read: it is not a regular file" in left_out[0]["problem"]
    assert "left out 5 (ant 2, bee 2, cow 1), listed in manifest.json; the first: ant/+.png cannot be read" in caplog.text
    every = np.arange(40), np.zeros(40, dtype=bool)
    assert torch.allclose(out.fetch(*every)[0].float(), LatentDataset(encoded).fetch(*every)[0].float(), atol=2e-3)
    originals = [open_originals(*pair) for pair in ((out, folder), (LatentDataset(encoded), images))]
    assert all(np.array_equal(*(source(item).pixels for source in originals)) for item in range(40))


@pytest.mark.parametrize("autoencoder", ["identity", None])
def test_a_shard_without_any_readable_image_is_empty_and_is_not_encoded_again(images, vae, tmp_path, autoencoder):
    folder = shutil.copytree(images, tmp_path / "images")
    names = open_labelled_images(folder).names
    for name in names[8:16]:
        (folder / name).write_text("not an image")
    settings = ["on_error=skip", "kind=sample", "flips=true", "keep_images=jpeg"]
    out = encode(folder, tmp_path / "out", autoencoder or vae, *settings)
    before = {file.name: file.stat().st_mtime_ns for file in out.glob("latents_*")}
    dataset = LatentDataset(encode(folder, out, autoencoder or vae, *settings))
    assert {file.name: file.stat().st_mtime_ns for file in out.glob("latents_*")} == before and len(before) == 5
    assert len(dataset) == 32 and len(dataset.fetch_with_images(np.arange(32), np.ones(32, dtype=bool))[2]) == 32
    for name in names:
        (folder / name).write_text("not an image")
    with pytest.raises(UserError, match="none of the 40 items could be read; the first: ant/.* cannot be read"):
        encode(folder, tmp_path / "none", autoencoder or vae, *settings)


def test_all_problems_of_a_folder_are_listed_at_once_or_skipped(images, tmp_path, caplog):
    folder = shutil.copytree(images, tmp_path / "images")
    (folder / "bee" / "loop").symlink_to(folder)
    (folder / "cow" / "broken.png").symlink_to("nowhere.png")
    (folder / "dog").mkdir()
    (folder / "aardvark").symlink_to("disk_that_is_not_mounted")
    (folder / "bee" / "more").symlink_to("disk_that_is_not_mounted")
    (folder / "ant" / "text.png").write_text("not an image")
    problems = [
        "aardvark is a broken link, and without it later classes get other labels",
        "bee/loop is a link to a folder that contains it",
        "bee/more is a broken link",
        "cow/broken.png cannot be read: it is not a regular file, or the link is broken",
        "dog/ holds no images, and without it later classes get other labels",
        "ant/text.png cannot be read: cannot identify image file",
    ]
    with pytest.raises(UserError, match="images=.*: 6 problems; repair or remove them, or set on_error=skip:") as refused:
        encode(folder, tmp_path / "out")
    assert all(
        line.startswith(f"- {problem}") for line, problem in zip(str(refused.value).splitlines()[1:], problems, strict=True)
    )
    assert not (tmp_path / "out").exists()
    dataset = LatentDataset(encode(folder, tmp_path / "out", "identity", "on_error=skip"))
    assert len(dataset) == 40 and dataset.class_names == ["ant", "bee", "cow"]
    left_out = json.loads((tmp_path / "out" / "manifest.json").read_text())["left_out"]
    assert sorted(entry["name"] for entry in left_out) == [
        "aardvark", "ant/text.png", "bee/loop", "bee/more", "cow/broken.png", "dog",
    ]  # fmt: skip
    caplog.clear()
    caplog.set_level("INFO")
    inspect(tmp_path / "out", "grid=none", f"images={folder}")
    assert "6 (bee 2, ant 1, cow 1) items could not be read" in caplog.text
    assert "40 of 40 decoded latents match their image" in caplog.text


def test_shards_do_not_depend_on_where_unreadable_images_lie_nor_on_the_process_that_reads_them(images, tmp_path):
    png = (images / "ant" / "00.png").read_bytes()
    members = [
        (f"{i}.{key}", x) for i, content in enumerate((png, b"not an image")) for key, x in (("png", content), ("cls", b"0"))
    ]
    for folder in ("tars", "copied_tars"):
        write_tar(tmp_path / folder / "0.tar", members)
    for folder in ("images", "copy"):
        shutil.copytree(images, tmp_path / folder)
        (tmp_path / folder / "bee" / "text.png").write_text("not an image")
    here, there, tars, copied_tars = (
        contents(encode(tmp_path / folder, tmp_path / f"{folder}_out", "identity", "on_error=skip"))
        for folder in ("images", "copy", "tars", "copied_tars")
    )
    assert here == there and tars == copied_tars


def test_unreadable_images_are_listed_together_after_all_other_shards_are_made(images, tmp_path):
    folder = shutil.copytree(images, tmp_path / "images")
    names = open_labelled_images(folder).names
    for name in (names[1], names[2], names[30]):  # in the shards 0 and 3 of five
        (folder / name).write_text("not an image")
    with pytest.raises(UserError, match="^3 problems; repair them, or set on_error=skip .*:\n- ") as refused:
        encode(folder, tmp_path / "out")
    lines = str(refused.value).splitlines()[1:]
    del refused  # its traceback holds the lock of the folder
    assert [line.split()[1] for line in lines] == [names[1], names[2], names[30]]
    made = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.safetensors")}
    assert list(map(int, (name[8:13] for name in sorted(made)))) == [1, 2, 4]
    for name in (names[1], names[2], names[30]):
        shutil.copy(images / name, folder / name)
    encode(folder, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in made} == made
    assert contents(tmp_path / "out") == contents(encode(images, tmp_path / "clean"))


def test_images_that_were_left_out_and_can_be_read_again_are_encoded_by_the_same_command(images, tmp_path, caplog):
    folder = shutil.copytree(images, tmp_path / "images")
    names = open_labelled_images(folder).names
    damaged = [names[1], names[3], names[30]]  # not among the images whose contents the hash of a shard covers
    for name in damaged:
        (folder / name).write_bytes(bytes((images / name).stat().st_size))
    encode(folder, tmp_path / "out", "identity", "on_error=skip")
    with pytest.raises(
        UserError, match=rf"^3 problems; .*\n- {damaged[0]} cannot .*\n- {damaged[1]} cannot .*\n- {damaged[2]} "
    ) as refused:
        encode(folder, tmp_path / "out", "identity")
    del refused
    assert len(LatentDataset(tmp_path / "out")) == 37  # the folder stays usable
    made = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("*.safetensors")}
    for name in damaged[::2]:
        shutil.copy(images / name, folder / name)
    dataset = LatentDataset(encode(folder, tmp_path / "out", "identity", "on_error=skip"))
    assert (
        len(dataset) == 39 and f"left out {damaged[0]}, which can be read now; renamed to .changed_latents_00000" in caplog.text
    )
    again = {file.name for file in dataset.files if file.stat().st_mtime_ns != made[file.name]}
    assert again == {"latents_00000.safetensors", "latents_00003.safetensors"}
    shutil.copy(images / damaged[1], folder / damaged[1])
    encode(folder, tmp_path / "out", "identity")
    assert contents(tmp_path / "out") == contents(encode(images, tmp_path / "clean", "identity"))


def test_every_process_makes_its_shards_before_unreadable_images_end_all(tmp_path):
    for i in range(16):
        (tmp_path / "pictures" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        random_image(np.random.default_rng(i)).save(tmp_path / "pictures" / "ab"[i % 2] / f"{i:02}.png")
    for name in ("a/00.png", "b/15.png"):  # in the first shard of process 0, and in the last shard of process 1
        (tmp_path / "pictures" / name).write_text("broken")
    settings = ["images=pictures", "output=latents", "autoencoder=identity", "kind=sample", "resolution=32", "shard_size=2"]
    for outcome in launch(tmp_path, ["prepare_latents.py", "encode", *settings, "cpu_threads=1", "num_workers=0"], 2):
        outcome.expect_code(1)
        assert "2 problems; " in outcome.output and "a/00.png" in outcome.output and "b/15.png" in outcome.output
    assert len(list((tmp_path / "latents").glob("latents_*.safetensors"))) == 6


def test_images_are_read_by_threads(images, tmp_path, monkeypatch):
    expected = contents(encode(images, tmp_path / "one"))

    def no_process():
        raise AssertionError("worker processes hang if /dev/shm is full")

    monkeypatch.setattr(os, "fork", no_process)
    assert contents(encode(images, tmp_path / "two", "identity", "num_workers=2")) == expected


def test_the_scale_factor_of_another_data_set_can_be_given(images, tmp_path, train):
    first = LatentDataset(encode(images, tmp_path / "first", "identity", "sigma_data=0.5")).info
    second = LatentDataset(encode(images, tmp_path / "second", "identity", f"scale_factor={first.scale_factor}")).info
    assert second == first and first.scale_factor != 1
    with pytest.raises(UserError, match="sigma_data= and scale_factor= all scale the latents"):
        encode(images, tmp_path / "third", "identity", "sigma_data=0.5", "scale_factor=1")
    encode(images, tmp_path / "plain", "identity")
    settings = ["data=custom", "model.backbone=DiT-XS/8", "train.num_steps=1", "sample_grid.every=0"]
    run = train("run", f"data.path={tmp_path / 'first'}", *settings)
    words = f"data.scale_factor: .*; `prepare_latents.py encode scale_factor={first.scale_factor:g}` gives new latents this"
    with pytest.raises(UserError, match=words):
        train("tuned", f"data.path={tmp_path / 'plain'}", f"init_from={run}", *settings)
    train("tuned", f"data.path={tmp_path / 'second'}", f"init_from={run}", *settings)


def test_the_transparent_value_of_a_grey_png_gets_the_background_with_8_and_with_16_bits(tmp_path):
    values = np.arange(64).reshape(8, 8)
    expected = np.where(values == 5, 200, values)
    for name, stored, transparent in (("8", values.astype(np.uint8), 5), ("16", (values * 257).astype(np.uint16), 5 * 257)):
        Image.fromarray(stored).save(file := tmp_path / f"{name}.png", transparency=transparent)
        image, notes = read_rgb(file, "rgb(200, 200, 200)", value_range=(0, 65535))
        assert np.array_equal(np.asarray(image)[..., 0], expected) and notes == ["transparent"]
    Image.fromarray((values * 257).astype(np.uint16)).save(file, transparency=64 * 257)  # which no pixel has
    image, notes = read_rgb(file, "black", value_range=(0, 65535))
    assert np.array_equal(np.asarray(image)[..., 0], values) and notes == []


def test_grey_images_with_more_than_8_bits_need_the_values_of_black_and_white(tmp_path, caplog):
    values = np.linspace(1000, 3000, 64).reshape(8, 8)
    for name, pixels in (("a/deep.png", values.astype(np.uint16)), ("b/float.tiff", values.astype(np.float32))):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "images" / name)
    settings = ["resolution=8", "dtype=float32", "grey=true"]
    with pytest.raises(UserError, match="values from 1000 to 3000; value_range=.low,high. of prepare_latents.py maps low to"):
        encode(tmp_path / "images", tmp_path / "out", "identity", *settings)
    # With shards of one image each, the command with value_range= keeps the shards of images with 8 bits.
    Image.fromarray(np.full((8, 8, 3), 7, np.uint8)).save(tmp_path / "images" / "a" / "usual.png")
    with pytest.raises(UserError, match="2 problems; repair them"):
        encode(tmp_path / "images", tmp_path / "kept", "identity", *settings, "shard_size=1")
    (made,) = (tmp_path / "kept").glob("*.safetensors")
    at = made.stat().st_mtime_ns
    kept = encode(tmp_path / "images", tmp_path / "kept", "identity", *settings, "shard_size=1", "value_range=[1500,2500]")
    assert len(LatentDataset(kept)) == 3 and made.stat().st_mtime_ns == at
    encode(tmp_path / "images", tmp_path / "kept", "identity", *settings, "shard_size=1", "value_range=[1500,2500]")
    (tmp_path / "images" / "a" / "usual.png").unlink()
    for wrong in ("[2500,1500]", "[1]"):
        with pytest.raises(UserError, match="value_range"):
            encode(tmp_path / "images", tmp_path / "out", "identity", f"value_range={wrong}")
    dataset = LatentDataset(encode(tmp_path / "images", tmp_path / "new", "identity", *settings, "value_range=[1500,2500]"))
    pixels = dataset.fetch_with_images(np.arange(2), np.zeros(2, dtype=bool))[2][..., 0].numpy().astype(int)
    expected = np.clip((values - 1500) / 1000 * 255, 0, 255)
    assert np.abs(pixels - expected).max() <= 1.01 and pixels.min() == 0 and pixels.max() == 255
    assert (open_originals(dataset, str(tmp_path / "images"))(1).pixels[..., 0] == pixels[1]).all()
    assert "grey level" not in caplog.text
    Image.fromarray((values / 3000).astype(np.float32)).save(tmp_path / "images" / "b" / "up_to_1.tiff")
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(tmp_path / "images" / "b" / "uniform.png")
    Image.fromarray(values.astype(np.uint16)).convert("I;16B").save(tmp_path / "images" / "a" / "big_endian.tiff")
    folder = encode(tmp_path / "images", tmp_path / "both", "identity", *settings, "value_range=[1500,2500]")
    assert "1 images became a single grey level, because value_range=[1500.0, 2500.0] does not fit their values" in caplog.text
    assert json.loads((folder / "manifest.json").read_text())["notes"] == {"flat": 1, "copies": 2}


# ----------------------------------------------------------------------------------------------------------------------
# Images and labels.


def test_the_crop_equals_adms_crop():
    # ADM's crop by hand: for resolution 16, 100x70 is halved twice by averaging (50x35, 25x17) and then scaled bicubically.
    pixels = np.random.default_rng(0).integers(0, 256, (70, 100, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    halved = image.resize((50, 35), Image.Resampling.BOX).resize((25, 17), Image.Resampling.BOX)
    scaled = np.asarray(halved.resize((round(25 * 16 / 17), 16), Image.Resampling.BICUBIC))
    left = (scaled.shape[1] - 16) // 2
    assert np.array_equal(adm_center_crop(image, 16), scaled[:, left : left + 16])
    assert np.array_equal(adm_center_crop(Image.fromarray(pixels[:16, :16]), 16), pixels[:16, :16])
    assert adm_center_crop(Image.fromarray(pixels[:8, :9]), 16).shape == (16, 16, 3)


def test_images_are_read_upright_and_in_colour(tmp_path):
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[:, :30] = 250  # the left half is bright
    exif = Image.Exif()
    exif[0x0112] = 6  # EXIF: turn clockwise, so that the left half becomes the upper half
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    turned = np.asarray(read_rgb(tmp_path / "a.png")[0])
    assert turned.shape == (60, 40, 3) and turned[:30].min() == 250 and turned[30:].max() == 0


def test_further_pages_and_frames_are_counted(tmp_path, caplog):
    pages = [Image.new("RGB", (8, 8), (value, 0, 0)) for value in (50, 250)]
    for name in ("a/pages.tiff", "b/frames.webp", "b/apng.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        pages[0].save(tmp_path / "images" / name, save_all=True, append_images=pages[1:])
    for suffix in ("tiff", "webp", "png"):
        pages[0].save(tmp_path / "images" / "a" / f"single.{suffix}")
    caplog.set_level("INFO")
    folder = encode(tmp_path / "images", tmp_path / "out", "identity", "resolution=8")
    assert json.loads((folder / "manifest.json").read_text())["notes"] == {"multi_frame": 3, "copies": 3}
    assert "3 images have further pages or frames, of which only the first is used" in caplog.text
    assert LatentDataset(folder).fetch_with_images(np.arange(6), np.zeros(6, dtype=bool))[2].max() < 80


def test_labels_come_from_edms_dataset_json_or_all_images_get_one_class(tmp_path):
    for i in range(4):
        random_image(np.random.default_rng(0)).save(tmp_path / f"{i}.png")
    assert open_labelled_images(tmp_path, label_by="none").labels.tolist() == [0, 0, 0, 0]
    for pairs, message in (
        ([["4.png", 0]], "lists 4.png, which is not there"),
        ([["0.png", 0.5]], "is not .*whole number"),
        ([["0.png", -1]], "is not .*Input should be .*0"),
        ([["0.png", 10**6]], "is not .*Input should be .*1000000"),
        ([["0.png", 10**30]], "is not .*Input should be .*1000000"),
    ):
        (tmp_path / "dataset.json").write_text(json.dumps({"labels": pairs}))
        with pytest.raises(UserError, match=f"dataset.json {message}"):
            open_labelled_images(tmp_path)
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": None}))
    with pytest.raises(UserError, match='dataset.json has "labels": null, so there are no classes; `encode labels=none` makes'):
        open_labelled_images(tmp_path)
    (tmp_path / "dataset.json").unlink()
    os.mkfifo(tmp_path / "dataset.json")  # reading it would never end
    with pytest.raises(UserError, match="dataset.json is not a regular file"):
        open_labelled_images(tmp_path)
    (tmp_path / "dataset.json").unlink()
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": [("2.png", 7), ("0.png", 3), ("1.png", 7)]}))
    found = open_labelled_images(tmp_path)
    assert found.names == ["0.png", "1.png", "2.png"] and found.labels.tolist() == [3, 7, 7] and found.class_names is None


def write_image_tars(folder, rng):
    for t in range(2):
        members = []
        for i in range(3):
            random_image(rng, width=40, height=40).save(buffer := io.BytesIO(), "png")
            payloads = {"png": buffer.getvalue(), "cls": str((t + i) % 3).encode(), "json": b"{}"}
            members += [(f"{t}{i:06}.{extension}", payload) for extension, payload in payloads.items()]
        write_tar(folder / f"{t}.tar", members)
    return folder


@pytest.mark.parametrize("autoencoder", ["identity", None])
def test_kept_images_belong_to_their_latents(images, vae, tmp_path, autoencoder):
    folder = shutil.copytree(images, tmp_path / "images")
    (folder / "bee" / "00.png").write_text("left out")  # must not shift the images after it
    settings = ["keep_images=jpeg", "on_error=skip", "flips=true", "kind=sample", "dtype=float32"]
    dataset = LatentDataset(encode(folder, tmp_path / "out", autoencoder or vae, *settings))
    left_out = json.loads((tmp_path / "out" / "manifest.json").read_text())["left_out"]
    assert [entry["name"] for entry in left_out] == ["bee/00.png"] and dataset.has_jpegs
    files = [file for file in sorted(folder.rglob("*.*")) if file.name != "00.png" or file.parent.name != "bee"]
    indices = np.random.default_rng(0).permutation(len(files))  # across shards; odd indices are mirrored
    flips = indices % 2 == 1
    latents, labels, found = dataset.fetch_with_images(indices, flips)
    assert all(torch.equal(a, b) for a, b in zip(dataset.fetch(indices, flips), (latents, labels))) and found.dtype == torch.uint8
    for image, index, flip in zip(found.numpy().astype(int), indices, flips):
        error = np.abs(image - adm_center_crop(read_rgb(files[index])[0], RESOLUTION)[:, :: -1 if flip else 1]).mean()
        assert error < (1 if autoencoder else 12), files[index]  # stored pixels with identity, else JPEG files


def test_images_are_read_from_tars(tmp_path, vae):
    folder = write_image_tars(tmp_path / "tars", np.random.default_rng(0))
    found = open_labelled_images(folder)
    assert found.labels.tolist() == [0, 1, 2, 1, 2, 0]
    with tarfile.open(folder / "1.tar") as tar:
        expected = np.asarray(Image.open(tar.extractfile("1000001.png")))
    assert np.array_equal(np.asarray(read_rgb(io.BytesIO(found.read(4)))[0]), expected)
    found = found.select([4])
    assert np.array_equal(np.asarray(read_rgb(io.BytesIO(found.read(0)))[0]), expected)
    assert LatentDataset(encode(folder, tmp_path / "out", vae)).labels.tolist() == [0, 1, 2, 1, 2, 0]
    # As in folders of images, links are followed and hidden folders are not, such as that of a download from the hub.
    (tmp_path / "linked" / ".cache").mkdir(parents=True)
    (tmp_path / "linked" / ".cache" / "0.tar.lock").touch()
    (tmp_path / "linked" / "more").symlink_to(folder)
    assert len(open_labelled_images(tmp_path / "linked")) == 6
    (tmp_path / "linked" / "loop").symlink_to(tmp_path / "linked")
    with pytest.raises(UserError, match="linked/loop is a link to a folder that contains it"):
        open_labelled_images(tmp_path / "linked")
    one_class = LatentDataset(encode(folder, tmp_path / "one", vae, "labels=none"))
    assert not one_class.labels.any() and one_class.info.num_classes == 1
    buffer = io.BytesIO()
    Image.fromarray(expected).save(buffer, "png")
    of_a_system = ["._1000000.png", "__MACOSX/._1000000.cls", "./@eaDir/1000000.png/thumbnail.png"]
    write_tar(folder / "2.tar", [(name, b"") for name in of_a_system])
    assert len(open_labelled_images(folder)) == 6
    write_tar(folder / "2.tar", [("0.png", buffer.getvalue()), ("0.txt", b"a caption"), ("1.png", buffer.getvalue())])
    with pytest.raises(UserError, match="2.tar: the key 0 lacks its .cls"):
        open_labelled_images(folder)
    unlabelled = open_labelled_images(folder, "none")
    assert unlabelled.labels.tolist() == [0] * 8 and np.array_equal(
        np.asarray(read_rgb(io.BytesIO(unlabelled.read(7)))[0]), expected
    )
    write_tar(folder / "2.tar", [("0.png", expected.tobytes()), ("0.cls", b"-1")])
    with pytest.raises(UserError, match="labels run from -1 to 2; they must be from 0 to 999,999"):
        encode(folder, tmp_path / "negative", vae)


def test_tars_of_equal_names_in_several_folders_are_told_apart(tmp_path, caplog):
    for folder in "ab":
        write_image_tars(tmp_path / "tars" / folder, np.random.default_rng(ord(folder)))
    images = open_labelled_images(tmp_path / "tars")
    assert len(images.members) == 12
    bad, at = tmp_path / "tars" / "a" / "0.tar", images.members[1].start
    bad.write_bytes(bad.read_bytes()[:at] + bytes(100) + bad.read_bytes()[at + 100 :])
    found = open_labelled_images(tmp_path / "tars")
    assert len({*found.names}) == 12 and found.names[1] == "a/0.tar/0000001.png"
    for folder in (tmp_path / "tars" / "a", bad):
        assert open_labelled_images(folder).names[1] == "0.tar/0000001.png"
    out = encode(tmp_path / "tars", tmp_path / "out", "identity", "on_error=skip")
    made = {file.name: file.stat().st_mtime_ns for file in out.glob("latents_*")}
    encode(tmp_path / "tars", out, "identity", "on_error=skip")
    assert {file.name: file.stat().st_mtime_ns for file in out.glob("latents_*")} == made
    caplog.set_level("INFO")
    inspect(out, "grid=none", f"images={tmp_path / 'tars'}")
    assert "11 of 11 decoded latents match their image" in caplog.text


def test_a_truncated_tar_and_a_folder_of_tars_and_images_are_refused(tmp_path):
    folder = write_image_tars(tmp_path / "tars", np.random.default_rng(0))
    (folder / "0.tar").write_bytes((folder / "0.tar").read_bytes()[:-11_000])  # cuts off the end with the last label
    with pytest.raises(UserError, match="0.tar "):
        open_labelled_images(folder)
    random_image(np.random.default_rng(0)).save(folder / "a.png")
    with pytest.raises(UserError, match="holds tars and images .a.png, ...."):
        open_labelled_images(folder)


def write_folder(folder):
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_images(root, *names):
    for number, name in enumerate(names):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(write_folder((root / name).parent) / Path(name).name, format="PNG")
    return root


def test_the_folders_that_hold_the_images_are_the_classes_at_any_depth(tmp_path):
    write_images(tmp_path, "set/bee/b.png", "set/ant/a.png", "notes/readme.txt", "@eaDir/ant/a.png", "set/$RECYCLE.BIN/x.png")
    (tmp_path / "set" / "cow").mkdir()
    (tmp_path / "set" / "dog").symlink_to("nowhere")
    found = open_labelled_images(tmp_path)
    assert found.class_names == ["ant", "bee"] and found.labels.tolist() == [0, 1] == [
        *map(found.class_names.index, ("ant", "bee"))
    ]
    assert sorted(found.problems) == ["set/cow", "set/dog"]
    assert open_labelled_images(tmp_path / "set").class_names == found.class_names
    write_images(tmp_path, "plants/rose/a.png")
    found = open_labelled_images(tmp_path)
    assert found.class_names == ["ant", "bee", "rose"] and found.labels.tolist() == [2, 0, 1]
    assert open_labelled_images(tmp_path, "first_level").class_names == ["plants", "set"]


def test_images_without_class_folders_and_class_folders_without_images_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds no images .*, nor tars of them"):
        open_labelled_images(tmp_path)
    (tmp_path / "train").mkdir()
    for name, held in (("train/a.png", "images in train/ alone"), ("a.png", "a.png")):
        random_image(np.random.default_rng(0)).save(tmp_path / name)
        with pytest.raises(UserError, match=f"must hold a folder per class, but holds {held}; .*labels=none"):
            open_labelled_images(tmp_path)
    for folder in ("__MACOSX", "zebra", "axolotl"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a.png").rename(tmp_path / "zebra" / "a.png")
    (tmp_path / "axolotl" / "a.gif").write_text("")
    assert open_labelled_images(tmp_path).problems == {
        "axolotl": "axolotl/ holds no images, and without it later classes get other labels"
    }
    (tmp_path / "zebra").rename(tmp_path / "val")
    (tmp_path / "axolotl" / "a.gif").unlink()
    with pytest.raises(UserError, match="holds train, val, which are parts of a data set; give images=.*/train, or set labels="):
        open_labelled_images(tmp_path)
    assert open_labelled_images(tmp_path, "first_level").class_names == ["train", "val"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train/cat/a", "train/dog/a", "val/cat/a", "val/dog/a"], "parts of a data set; give images=.*/train, or set labels="),
        (["ILSVRC_img_train/n01/a", "ILSVRC_img_val/a"], "parts of a data set; give images=.*/ILSVRC_img_train, or set labels="),
        (["Train/00/a", "Test/00/a"], "parts of a data set; give images=.*/Train, or set labels=first_level to make Test, Train"),
        (
            ["cat/00/a", "cat/01/a", "dog/00/a"],
            "folders of equal names .cat/00, dog/00.; .*, or set labels=first_level to make cat, dog",
        ),
        (["cat/a", "dog/small/a"], r"images at several depths .cat/a.png, dog/small/a.png.; .*, or set labels=first_level"),
        (["00000/img00000000", "00001/img00000001"], "EDM's folders .00000, .*without their dataset.json"),
    ],
)
def test_folders_above_the_class_folders_are_refused(tmp_path, names, message):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    with pytest.raises(UserError, match=message):
        open_labelled_images(tmp_path)
    assert len(open_labelled_images(tmp_path, "first_level").class_names) == 2


def test_the_first_level_of_folders_can_be_the_classes_and_the_order_of_numbered_classes_is_logged(tmp_path, caplog):
    caplog.set_level("INFO")
    for label in range(11):
        for name in (f"{label}/000/a.png", f"{label}/001/b.png", f"{label}/001/c.png")[: 1 + label % 3]:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "notes.txt").touch()
    words = describe_classes(open_labelled_images(tmp_path, "first_level"))
    assert words == (
        "classes: 0 0 (1 images), 1 1 (2 images), 2 10 (2 images), ..., 8 7 (2 images), 9 8 (3 images), 10 9 (1 images); "
        "the folders are sorted as text, so 10 comes before 2"
    )
    assert "1 files that are not images are left out (.txt 1)" in caplog.text
    (tmp_path / "a.zip").touch()
    with pytest.raises(UserError, match="a.zip is a .zip; unpack it"):
        open_labelled_images(tmp_path / "a.zip")


def test_a_manifest_of_another_program_is_not_replaced_and_a_missing_one_is_said(images, tmp_path, caplog):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text('{"theirs": 1}')
    with pytest.raises(UserError, match="data/manifest.json is not a manifest of latent shards"):
        encode(images, tmp_path / "data")
    assert (tmp_path / "data" / "manifest.json").read_text() == '{"theirs": 1}'
    (encode(images, tmp_path / "out") / "manifest.json").unlink()
    caplog.clear()
    LatentDataset(tmp_path / "out")
    assert "out has no manifest.json: if it is a copy, copy it completely, or shards may be missing" in caplog.text


def test_encode_refuses_arguments_that_do_not_fit(images, vae, tmp_path):
    out = tmp_path / "out"
    for settings, message in (
        (["num_classes=2"], "num_classes=2, but there are labels up to 2"),
        (["resolution=33"], "resolution=33 is not a multiple of 2"),
        (["autoencoder=identity"], "kind=moments: pixels have no log-variance"),
        (["grey=true"], "grey=true: autoencoder=.* encodes RGB"),
        (["background="], "background: there is no colour; put quotes around #"),
        (["normalize=true", "sigma_data=0.5"], "normalize= and sigma_data= all scale the latents"),
        ([f"latents_stats={write_statistics(tmp_path, 3)}"], "stats.pt has 3 channels, and the latents have 4"),
        ([f"images={tmp_path / 'nowhere'}"], "images=.*nowhere does not exist"),
        ([f"output={images / 'latents'}"], "is inside images="),
    ):
        with pytest.raises(UserError, match=message):
            encode(images, out, vae, *settings)
    assert not out.exists()


# ----------------------------------------------------------------------------------------------------------------------
# The command inspect, and the manifest.


def inspect(path, *settings):
    forget_accelerate()
    prepare_latents.main(["inspect", f"path={path}", "cpu_threads=1", *settings])


def test_good_latents_pass_inspection_and_are_drawn(images, vae, tmp_path, caplog):
    folder = encode(images, tmp_path / "out", vae, "num_classes=9")  # the folder has three classes
    with caplog.at_level(logging.INFO):
        inspect(folder, "sigma_data=0.1")  # the small autoencoder's latents have a small deviation
    for line in (
        "40 latents 4x16x16 in 5 files",
        "latents of mirrored images: False",
        "kind='moments', scale_factor=0.18215",
        "3 classes of 13 to 14 items; smallest: 1 (bee) 13, 2 (cow) 13, 0 (ant) 14",
        "no problems were found",
    ):
        assert line in caplog.text
    picture = Image.open(next(folder.glob("inspect_*.png")))
    assert picture.size == (4 * (64 + 4) + 4, 4 * (64 + 14 + 4) + 4)
    inspect(folder, "sigma_data=0.1")  # a second call draws the same picture
    with pytest.raises(UserError, match="grid=.*exists; give another file"):
        inspect(folder, f"grid={next(folder.glob('inspect_*.png'))}")
    with pytest.raises(UserError, match="grid=true must end in .png"):
        inspect(folder, "grid=true")
    with pytest.raises(UserError, match="nowhere does not exist"):
        inspect(tmp_path / "nowhere")


def test_the_originals_are_drawn_next_to_the_decoded_latents(images, tmp_path):
    pixels = encode(images, tmp_path / "pixels", "identity", "pad=9", "grey=true")
    inspect(pixels, f"images={images}", f"grid={tmp_path / 'pairs.png'}")
    pairs = np.asarray(Image.open(tmp_path / "pairs.png")).astype(int)
    assert pairs.shape[:2] == (4 * (64 + 14 + 4) + 4, 8 * (64 + 4) + 4)
    for row, column in ((0, 0), (3, 6)):  # identity decodes to the original, up to rounding to float16
        y, x = 4 + row * 82 + 14, 4 + column * 68
        decoded, original = pairs[y : y + 64, x : x + 64], pairs[y : y + 64, x + 68 : x + 132]
        assert np.abs(decoded - original).max() <= 2 and original.std() > 10
    few = shutil.copytree(images, tmp_path / "few")
    shutil.rmtree(few / "ant")
    with pytest.raises(UserError, match="holds 26 images, but .*pixels holds 40 latents"):
        inspect(pixels, f"images={few}")
    first = pixels / "latents_00000.safetensors"
    tensors, metadata = load_file(first), safe_open(first, "pt").metadata()
    tensors["latents"][0, 0, 0, 0] = float("inf")
    save_file(tensors, first, metadata=metadata)
    assert "1 items hold NaN or Inf, 0 first" in problems_of(pixels, f"grid={tmp_path / 'drawn.png'}")
    assert (tmp_path / "drawn.png").exists()


def problems_of(path, *settings):
    with pytest.raises(ValueError) as error:
        inspect(path, *(settings or ["grid=none"]))
    return str(error.value)


def test_inspection_finds_problems(tmp_path):
    latents, labels = make_shard(tmp_path / "a.safetensors", num_items=30)
    labels[:] = torch.arange(30) % 2  # no item of class 2
    latents[4, 0, 1, 1] = float("nan")
    metadata = {"about": json.dumps(asdict(INFO))}
    save_file({"latents": latents * 20, "labels": labels}, tmp_path / "a.safetensors", metadata=metadata)
    found = problems_of(tmp_path)
    assert "3 problems" in found and "1 items hold NaN or Inf, 4 first" in found
    assert "1 of 3 classes have no item: 2 0" in found
    assert re.search(
        r"a standard deviation of (9|10)\.\d+ over all channels, (19|20)\.\d+ times sigma_data=0.5, cannot be right: .*\(0.5\)",
        found,
    )


def test_the_validation_part_may_lack_small_classes(tmp_path, caplog):
    for name, number in (("a", 45), ("b", 3), ("c", 20)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(number):
            random_image(np.random.default_rng([number, i]), width=8, height=8).save(tmp_path / "images" / name / f"{i:02}.png")
    encode(tmp_path / "images", tmp_path / "out", "identity", "resolution=8", "part=validation")
    caplog.set_level("INFO")
    inspect(tmp_path / "out", "grid=none")
    assert "1 of 3 classes have no item: 1 (b) 0" in caplog.text


def test_inspection_distinguishes_mirrored_latents_from_copies_and_finds_a_duplicate_shard(tmp_path):
    latents, labels = make_shard(tmp_path / "good" / "a.safetensors", num_items=30, flips=True)
    inspect(tmp_path / "good", "grid=none")
    write_shard(tmp_path / "bad" / "a.safetensors", latents, labels, INFO, latents_flip=latents.clone())
    assert "latents_flip do not resemble the mirrored latents" in problems_of(tmp_path / "bad")
    for seed in range(1, 6):
        other = torch.randn(latents.shape, generator=torch.Generator().manual_seed(seed))
        assert not are_mirrored(latents, other) and are_mirrored(latents, latents.flip(-1) + 0.5 * other)
    shutil.copy(tmp_path / "good" / "a.safetensors", tmp_path / "good" / "b.safetensors")
    assert "b.safetensors is a copy of a.safetensors" in problems_of(tmp_path / "good")


def test_inspection_finds_constant_and_repeated_images_of_each_class(tmp_path, caplog):
    rng = np.random.default_rng(0)
    for name in ("blank", "fine", "mixed"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(250):
            image = Image.new("RGBA", (8, 8), (0, 0, 0, 0)) if name == "blank" else random_image(rng, "RGB", 8, 8)
            image.save(tmp_path / "images" / name / f"{i:03}.png")
    copies = [("mixed/000", "mixed/001"), ("mixed/002", "mixed/003"), ("mixed/002", "mixed/004"), ("mixed/100", "fine/200")]
    for source, target in copies:
        shutil.copy(tmp_path / "images" / f"{source}.png", tmp_path / "images" / f"{target}.png")
    caplog.set_level("INFO")
    folder = encode(tmp_path / "images", tmp_path / "out", "identity", "resolution=8", "shard_size=100")
    assert "classes: 0 blank (250 images), 1 fine (250 images), 2 mixed (250 images)" in caplog.text
    assert "250 images are transparent; their background is white (background=)" in caplog.text
    assert json.loads((folder / "manifest.json").read_text())["notes"] == {"transparent": 250, "copies": 253}
    found = problems_of(folder)
    assert "2 problems" in found
    assert "class 0 blank: of 250 images, 250 are constant (item 0), 249 repeat images of the class (item 1 equals 0)" in found
    assert "class 2 mixed: of 250 images, 3 repeat images of the class (item 501 equals 500), 1 equal images of" in found
    few = "class 1 fine: of 250 images, 1 equal images of another class (item 450 equals 600)"
    assert few in caplog.text and few not in found


class Halved:
    """An autoencoder whose latents are the means of 2x2 pixels."""

    scaling, channels = autoencoders.Scaling(1.0, 2), 3

    def hash(self):
        return "halved"

    def encode_moments(self, images):
        means = torch.nn.functional.avg_pool2d(images, 2)
        return torch.cat([means, torch.full_like(means, -20)], dim=1)

    def decode(self, latents):
        return latents.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


def test_copies_are_counted_left_out_and_found_in_another_folder(images, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(autoencoders, "build", lambda *args, **settings: Halved())
    folder = shutil.copytree(images, tmp_path / "images")
    for name in ("ant/copy.png", "bee/copy.png"):  # another file of the same pixels, also in another class
        Image.open(folder / "ant" / "00.png").save(folder / name, compress_level=1)
    for name in ("ant/tiny.png", "bee/tiny.png"):  # equal images that can be read, but not be cropped
        Image.new("RGB", (2, 2)).save(folder / name)
    caplog.set_level("INFO")
    keep, skip = (
        encode(folder, tmp_path / name, "sd-vae:halved", f"duplicates={name}", "on_error=skip") for name in ("keep", "skip")
    )
    assert "2 images are copies of earlier ones; duplicates=skip of encode leaves them out" in caplog.text
    assert "41 of 44 images are used (part=all, duplicates=skip)" in caplog.text
    assert json.loads((keep / "manifest.json").read_text())["notes"]["copies"] == 2 and len(LatentDataset(keep)) == 42
    dataset, clean = LatentDataset(skip), LatentDataset(encode(images, tmp_path / "clean", "identity", "resolution=16"))
    assert "copies" not in json.loads((skip / "manifest.json").read_text())["notes"]
    # The hash is of the image and not of its latent or its crop.
    assert dataset.image_hashes.tolist() == clean.image_hashes.tolist() and len({*dataset.image_hashes.tolist()}) == 40
    inspect(skip, f"images={folder}", "grid=none")
    found = problems_of(skip, f"other={tmp_path / 'clean'}", "grid=none")
    assert f"40 of 40 images are also in {tmp_path / 'clean'} (item 0 is its item 0)" in found
    others = encode(write_images(tmp_path / "others", "a/0.png", "b/1.png"), tmp_path / "colours", "identity", "resolution=8")
    inspect(skip, f"other={others}", "grid=none")
    make_shard(tmp_path / "mine" / "a.safetensors")
    with pytest.raises(UserError, match="mine holds no hashes of images; make it again with encode or convert"):
        inspect(skip, f"other={tmp_path / 'mine'}", "grid=none")


def test_a_replaced_image_of_nearly_equal_content_does_not_match_its_latent(images, tmp_path, monkeypatch):
    monkeypatch.setattr(autoencoders, "build", lambda *args, **settings: Halved())
    folder = shutil.copytree(images, tmp_path / "images")
    out = encode(folder, tmp_path / "out", "sd-vae:halved")
    image = Image.open(file := folder / "ant" / "00.png")
    pixels = np.array(image)
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(file)
    assert "1 of 40 decoded latents do not match their image: ant/00.png (item 0)" in problems_of(
        out, f"images={folder}", "grid=none"
    )
    # `convert` knows no images, and stores hashes of latents.
    manifest = out / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"command": "encode"', '"command": "convert"'))
    inspect(out, f"images={folder}", "grid=none")


def test_inspection_lists_the_images_that_encode_lists_whatever_their_labels(images, tmp_path):
    nested = tmp_path / "pictures"
    shutil.copytree(images, nested / "train")  # the classes lie below a folder that is no class
    inspect(encode(nested, tmp_path / "nested"), f"images={nested}", "grid=none")
    unlabelled = tmp_path / "unlabelled"
    unlabelled.mkdir()
    for i, file in enumerate(sorted(images.glob("*/*.png"))):
        shutil.copy(file, unlabelled / f"{i}.png")
    out = encode(unlabelled, tmp_path / "out", "identity", "labels=none", "num_classes=10")
    assert "1 problems\n- 9 of 10 classes have no item" in problems_of(out, f"images={unlabelled}", "grid=none")
    levels = write_images(tmp_path / "levels", "ant/a.png", "bee/small/b.png")  # no classes unless labels=first_level
    out = encode(levels, tmp_path / "first", "identity", "labels=first_level")
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["label_by"]  # as in earlier versions
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert open_originals(LatentDataset(out), str(levels)).images.names == ["ant/a.png", "bee/small/b.png"]


def test_inspection_knows_whether_encode_read_dataset_json(images, tmp_path, caplog):
    caplog.set_level("INFO")
    folder = shutil.copytree(images, tmp_path / "images")
    names = open_labelled_images(folder).names
    (folder / "dataset.json").write_text(json.dumps({"labels": [(name, 0) for name in names[4:]]}))
    listed = encode(folder, tmp_path / "listed", "identity")
    inspect(listed, f"images={folder}", "grid=none")
    assert "36 of 36 decoded latents match their image" in caplog.text
    all_images = encode(folder, tmp_path / "all", "identity", "labels=none", "num_classes=2")
    problems = "1 problems\n- 1 of 2 classes have no item: 1 0"
    assert problems_of(all_images, f"images={folder}", "grid=none").endswith(problems)
    assert "40 of 40 decoded latents match their image" in caplog.text
    inspect(encode(folder, tmp_path / "one", "identity", "labels=none"), f"images={folder}", "grid=none")
    for out in (tmp_path / "one", listed):  # manifests of earlier versions lack the entry: one class means labels=none
        manifest = json.loads((out / "manifest.json").read_text())
        del manifest["label_by"]
        (out / "manifest.json").write_text(json.dumps(manifest))
    inspect(tmp_path / "one", f"images={folder}", "grid=none")
    with pytest.raises(UserError, match="holds 40 images, but .*listed holds 36 latents"):
        inspect(listed, f"images={folder}", "grid=none")


def test_enlarged_images_are_counted(tmp_path, caplog):
    caplog.set_level("INFO")
    for i, size in enumerate((8, 31, 32, 64)):
        random_image(np.random.default_rng(i), "RGB", 2 * size, size).save(
            write_folder(tmp_path / "images" / f"{i % 2}") / f"{i}.png"
        )
    encode(tmp_path / "images", tmp_path / "out", "identity")
    assert "2 images have fewer pixels than resolution=32 and were enlarged" in caplog.text
    assert len(list(open_images(tmp_path / "images", crop=32).batches(4))) == 1
    assert "2 images were enlarged to 32 pixels, such as " in caplog.text


def replace_three(images, folder):
    """Copy `images` and replace three of them by others. Returns the names of the three."""
    shutil.copytree(images, folder)
    names = open_labelled_images(folder).names[3::13][:3]
    for name in names:
        Image.new("RGB", (64, 64), (255, 0, 255)).save(folder / name)
    return names


@pytest.mark.parametrize("kind", ["moments", "sample"])
def test_copies_of_an_image_are_found_in_latents_of_an_autoencoder(images, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(autoencoders, "build", lambda *args, **settings: Halved())
    folder = shutil.copytree(images, tmp_path / "images")
    shutil.copy(folder / open_labelled_images(folder).names[5], folder / "cow" / "z.png")  # Pillow ignores the suffix
    found = problems_of(encode(folder, tmp_path / "out", "sd-vae:halved", f"kind={kind}"))
    assert "class 0 ant: of 14 images, 1 equal images of another class (item 5 equals 40)" in found
    assert "class 2 cow: of 14 images, 1 equal images of another class (item 40 equals 5)" in found
    name = open_labelled_images(folder).names[5]
    found = problems_of(tmp_path / "out", f"images={folder}", "grid=none")
    assert f"class 2 cow: of 14 images, 1 equal images of another class (item 40 cow/z.png equals 5 {name})" in found


@pytest.mark.parametrize("autoencoder", ["identity", "sd-vae:halved"])
def test_inspection_compares_all_images_with_their_latents(images, tmp_path, monkeypatch, caplog, autoencoder):
    if autoencoder != "identity":
        monkeypatch.setattr(autoencoders, "build", lambda *args, **settings: Halved())
    caplog.set_level("INFO")
    folder = encode(images, tmp_path / "out", autoencoder)
    inspect(folder, f"images={images}", "grid=none")
    assert "40 of 40 decoded latents match their image" in caplog.text
    names = replace_three(images, tmp_path / "others")
    found = problems_of(folder, f"images={tmp_path / 'others'}", "grid=none")
    different = f"{names[0]} (item 3), {names[1]} (item 16), {names[2]} (item 29)"
    assert f"3 of 40 decoded latents do not match their image: {different}" in found


def test_inspection_refuses_an_autoencoder_that_decodes_to_another_size(images, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(autoencoders, "build", lambda *args, **settings: Halved())
        folder = encode(images, tmp_path / "out", "sd-vae:halved")
    with pytest.raises(UserError, match=r"autoencoder=identity decodes to a height of \d+, but the images have \d+"):
        inspect(folder, f"images={images}", "autoencoder=identity", "grid=none")


def test_moments_that_are_declared_as_samples_are_found(tmp_path):
    moments = torch.from_numpy(sd_moments(64))
    info = ShardInfo("sample", 0.18215, "sd-vae:stabilityai/sd-vae-ft-ema", 32, 1)
    write_shard(tmp_path / "a.safetensors", moments, torch.zeros(64, dtype=torch.int64), info)
    found = problems_of(tmp_path)
    assert "1 problems" in found and "the last 4 of 8 channels look like log-variances (mean -14.5), so these" in found


def test_shards_that_differ_from_the_manifest_are_named(images, tmp_path):
    encode(images, tmp_path, "identity", "resolution=8")
    file = tmp_path / "latents_00002.safetensors"
    blob = file.read_bytes()

    def problems():
        with pytest.raises(UserError, match="the shards are not those that manifest.json lists; run inspect to find"):
            LatentDataset(tmp_path)
        return problems_of(tmp_path)

    file.write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    assert "latents_00002.safetensors: its checksum differs" in problems_of(tmp_path)
    file.write_bytes((tmp_path / "latents_00001.safetensors").read_bytes())
    assert "latents_00002.safetensors is not a file that manifest.json lists" in problems()
    file.unlink()
    assert "latents_00002.safetensors is missing" in problems()
    file.write_bytes(blob)
    (tmp_path / "mine.safetensors").write_bytes(blob)
    assert "mine.safetensors is not a file that manifest.json lists" in problems()
    (tmp_path / "mine.safetensors").unlink()
    assert len(LatentDataset(tmp_path)) == 40
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="manifest.json is not a manifest of latent shards"):
        LatentDataset(tmp_path)


def test_transparent_images_get_a_background_and_files_that_are_not_read_are_named(tmp_path, caplog):
    for name, alpha in (("a/clear", 0), ("a/half", 51), ("b/opaque", 255)):
        (file := tmp_path / "images" / f"{name}.png").parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGBA", (8, 8), (200, 0, 0, alpha)).save(file)
    palette = Image.new("P", (8, 8))
    palette.save(tmp_path / "images" / "b" / "palette.png", transparency=0)
    palette.save(tmp_path / "images" / "b" / "unread.gif")
    (tmp_path / "images" / "b" / "unread.svg").touch()
    caplog.set_level("INFO")
    images, settings = tmp_path / "images", ["resolution=8", "dtype=float32"]
    encode(images, tmp_path / "white", "identity", *settings, "shard_size=2")
    manifest = json.loads((tmp_path / "white" / "manifest.json").read_text())
    assert (manifest["unread"], manifest["settings"]["background"]) == (["b/unread.gif", "b/unread.svg"], "white")
    assert "2 images are not read, b/unread.gif first (.gif 1, .svg 1)" in caplog.text
    assert "3 images are transparent; their background is white (background=)" in caplog.text
    pixels = LatentDataset(tmp_path / "white").fetch_with_images(np.arange(4), np.zeros(4, dtype=bool))[2][:, 4, 4].tolist()
    assert pixels == [[255, 255, 255], [244, 204, 204], [200, 0, 0], [255, 255, 255]]
    encode(images, tmp_path / "blue", "identity", *settings, "background='#0000ff'")
    given = checked(["data=custom", f"data.path={tmp_path / 'blue'}", "model.backbone=DiT-XS/2"])
    cfg = complete_config(given, dataset := open_training_latents(given.data))
    assert (dataset.channels, dataset.info.scale_factor) == (3, 1.0)
    assert cfg.evaluation.background == "#0000ff"  # also for a folder of reference images
    read = next(open_images(images, crop=8, background=cfg.evaluation.background).batches(4))
    assert (read == dataset.fetch_with_images(np.arange(4), np.zeros(4, dtype=bool))[2].numpy()).all()
    assert list(open_images(images, crop=8, background="#0000ff").batches(4))
    assert "#0000ff is behind 3 transparent images, such as" in caplog.text
    assert all((open_originals(dataset, str(images))(item).pixels == image).all() for item, image in enumerate(read))
    assert (next(open_images(images, convert_to_rgb=True).batches(4))[:, 4, 4] == pixels).all()
    white, black = (open_images(images, crop=8, background=name).local_hash() for name in ("white", "black"))
    assert white != black
    with pytest.raises(UserError, match="background: unknown color specifier: 'whit'"):
        encode(images, tmp_path / "x", "identity", *settings, "background=whit")
    os.mkfifo(images / "x.png")
    with pytest.raises(UserError, match="x.png cannot be read: it is not a regular file"):
        list(open_images(images, crop=8).batches(2))
