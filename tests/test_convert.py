"""Every format of another project becomes shards that hold the same items, and the official trainer's tars train as they are."""

import json
import logging
import os
import re

import numpy as np
import pytest
import torch
from conftest import losses, make_shard
from PIL import Image
from safetensors.torch import save_file
from test_formats import as_mean_and_std, write_fast_dit, write_lightningdit, write_lmdb, write_repa, zip_of
from test_webdataset import npy_members, pickle_members, sd_moments, two_tars, write_tar

import prepare_latents
from common.errors import UserError
from latents.contents import way_on
from latents.detection import SD_SCALE
from latents.prepare import write
from latents.prepare.formats import MaskDiTLMDB
from latents.prepare.images import open_labelled_images
from latents.shards import LatentDataset, latents_for_network

NUM_ITEMS = 23
LABELS = [(7 * i) % 10 for i in range(NUM_ITEMS)]


def convert(path, output, *settings):
    prepare_latents.main(["convert", f"path={path}", f"output={output}", "shard_size=10", *settings])
    return LatentDataset(output)


def fetch_all(dataset, flip=False):
    latents, labels = dataset.fetch(np.arange(len(dataset)), np.full(len(dataset), flip))
    return latents.float().numpy(), labels.tolist()


def lmdb_of(folder, moments):
    write_lmdb(folder, np.concatenate([moments, moments[..., ::-1]]), LABELS * 2)


def tars_of(folder, moments):
    write_tar(folder / "a.tar", pickle_members(moments[:12], LABELS[:12]))
    write_tar(folder / "b.tar", npy_members(moments[12:], LABELS[12:], start=12))


def fast_dit_of(folder, moments):
    files = [[i] for i in range(NUM_ITEMS - 3)] + [[NUM_ITEMS - 3, NUM_ITEMS - 2], [NUM_ITEMS - 1]]
    write_fast_dit(folder, moments[:, :4] * np.float32(SD_SCALE), LABELS, files)


def repa_of(folder, moments):
    write_repa(folder / "vae-sd", as_mean_and_std(moments), LABELS)


def lightningdit_of(folder, moments):
    samples = torch.from_numpy(moments[:, :4].copy())
    write_lightningdit(folder / "latents_rank00.safetensors", samples[:12], samples[:12].flip(-1).contiguous(), LABELS[:12])
    write_lightningdit(folder / "latents_rank01.safetensors", samples[12:], samples[12:].flip(-1).contiguous(), LABELS[12:])


@pytest.mark.parametrize(
    ("make", "kind", "flips", "settings"),
    [
        (lmdb_of, "moments", True, []),
        (tars_of, "moments", False, ["allow_pickle=true"]),
        (fast_dit_of, "sample", False, []),
        (repa_of, "moments", False, []),
        (lightningdit_of, "sample", True, []),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_item_of_another_projects_format_is_converted(tmp_path, make, kind, flips, settings, dtype, caplog):
    moments = sd_moments(NUM_ITEMS, size=8)
    (tmp_path / "theirs").mkdir()
    make(tmp_path / "theirs", moments)
    with caplog.at_level(logging.INFO):
        dataset = convert(tmp_path / "theirs", tmp_path / "ours", *settings, f"dtype={dtype}")
    expected = moments if kind == "moments" else moments[:, :4]
    latents, labels = fetch_all(dataset)
    tolerance = dict(rtol=2**-10, atol=1e-6) if dtype == "float16" else dict(rtol=1e-5, atol=1e-6)
    assert np.allclose(latents, expected, **tolerance) and labels == LABELS
    assert dataset.has_flips == flips
    if flips:
        assert np.allclose(fetch_all(dataset, flip=True)[0], expected[..., ::-1], **tolerance)
    info = dataset.info
    assert (info.kind, info.scale_factor, info.resolution, info.num_classes) == (kind, SD_SCALE, 64, 10)
    assert info.autoencoder == "sd-vae:stabilityai/sd-vae-ft-ema" and len(dataset.files) == 3
    manifest = json.loads((tmp_path / "ours" / "manifest.json").read_text())
    assert any(line.startswith(f"kind={kind}") for line in manifest["detected"]) and f"kind={kind}" in caplog.text
    convert(tmp_path / "theirs", tmp_path / "ours", *settings, f"dtype={dtype}")  # again: finds everything done


def test_a_conversion_goes_on_where_it_stopped(tmp_path, monkeypatch):
    lmdb_of(tmp_path / "theirs", sd_moments(NUM_ITEMS, size=8))
    convert(tmp_path / "theirs", tmp_path / "whole")
    read, calls = MaskDiTLMDB.read, []

    def failing(self, start, stop):
        if (start, stop) == (10, 20):
            raise OSError("the disk went away")
        return read(self, start, stop)

    def counting(self, start, stop):
        calls.append((start, stop))
        return read(self, start, stop)

    monkeypatch.setattr(MaskDiTLMDB, "read", failing)
    with pytest.raises(OSError, match="the disk went away"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    monkeypatch.setattr(MaskDiTLMDB, "read", counting)
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert [part for part in calls if part[1] - part[0] > 1] == [(10, 20), (20, 23)]  # single items are only looked at
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes()


def test_what_cannot_be_stored_or_known_is_refused_before_anything_is_written(tmp_path):
    moments = sd_moments(NUM_ITEMS, size=8)
    tars_of(tmp_path, moments)
    out = tmp_path / "out"
    for settings, message in (
        ([], "is a pickle, and unpickling can run code .* allow_pickle=true"),
        (["allow_pickle=true", "num_classes=9"], "num_classes=9"),
        (["allow_pickle=true", "format=fast_dit"], "features"),
        (["allow_pickle=yes please"], r"allow_pickle='yes please' is not accepted; use true \| false"),
        (["allow_pickle=true", "autoencoder=none"], "scale_factor= is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(tmp_path, out, *settings)
    assert not out.exists()
    moments[5, 0, 0, 0] = 1e6
    write_tar(tmp_path / "large" / "a.tar", npy_members(moments, LABELS))
    with pytest.raises(ValueError, match=r"latents up to 1e\+06 do not fit float16; use dtype=float32"):
        convert(tmp_path / "large", out, "kind=moments", "stored_scale=1")


# ----------------------------------------------------------------------------------------------------------------------
# Training on tars as they are.


def test_tars_train_as_their_conversion_does(tmp_path, train):
    two_tars(tmp_path / "tars", members=pickle_members, num_items=NUM_ITEMS)
    convert(tmp_path / "tars", tmp_path / "ours", "dtype=float32", "allow_pickle=true")
    data = ["data=custom", "model.backbone=DiT-XS/2", "train.precision=fp32"]
    tars = [*data, f"data.path={tmp_path / 'tars'}", "data.format=webdataset", "data.allow_pickle=true"]
    straight = losses(train("tars", *tars, "data.num_workers=2"))
    assert len(straight) == 6
    assert straight == losses(train("shards", *data, f"data.path={tmp_path / 'ours'}"))
    train("stopped", *tars, "train.num_steps=3")
    assert losses(train("stopped", *tars)) == straight


def test_training_settles_what_tars_do_not_say(tmp_path, train):
    samples = sd_moments(NUM_ITEMS, size=8)[:, :4] * np.float32(0.5)  # by a scale that nobody uses
    write_tar(tmp_path / "a.tar", npy_members(samples, LABELS))
    data = ["data=custom", f"data.path={tmp_path}", "data.format=webdataset", "model.backbone=DiT-XS/2", "train.precision=fp32"]
    with pytest.raises(ValueError, match="data.stored_scale=1 "):
        train("a", *data)
    assert len(losses(train("b", *data, "data.stored_scale=0.5"))) == 6
    with pytest.raises(ValueError, match="data.stored_scale=0.5 .as given. does not go with kind=moments"):
        train("c", *data, "data.stored_scale=0.5", "data.kind=moments", "data.autoencoder=none", "data.scale_factor=1")


def test_native_shards_disagree_with_other_settings_by_name(tmp_path, train):
    convert_me = sd_moments(NUM_ITEMS, size=8)
    write_tar(tmp_path / "tars" / "a.tar", npy_members(convert_me, LABELS))
    convert(tmp_path / "tars", tmp_path / "ours")
    data = ["data=custom", f"data.path={tmp_path / 'ours'}", "model.backbone=DiT-XS/2"]
    for setting, message in (
        ("data.kind=sample", "data.kind=sample, but the latents of .*ours say moments; set data.kind=moments"),
        ("data.scale_factor=1", "data.scale_factor=1.0, but the latents of .*ours say 0.18215"),
        ("data.stored_scale=1", "data.stored_scale=1.0 is for data.format=webdataset"),
        ("data.resolution=256", "data.resolution=256, but .* say 64"),
        ("data.format=lmdb", r"data.format='lmdb' is not accepted; use native \| webdataset"),
        ("data.format=webdataset", "holds no tars"),
    ):
        with pytest.raises(ValueError, match=message):
            train("run", *data, setting)


@pytest.mark.parametrize("make", [lmdb_of, fast_dit_of, repa_of, lightningdit_of])
def test_other_values_under_the_same_names_are_another_data_set(tmp_path, make):
    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        make(tmp_path / name, sd_moments(NUM_ITEMS, size=8, seed=seed))
    convert(tmp_path / "a", tmp_path / "out")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match="already holds another data set .made of other items."):
        convert(tmp_path / "b", tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_an_autoencoder_that_is_not_known_is_not_taken_for_stable_diffusions(tmp_path):
    fast_dit_of(tmp_path / "theirs", sd_moments(NUM_ITEMS, size=8))
    with pytest.raises(ValueError, match="scale_factor= is missing: .*autoencoder=sd-vae:stabilityai/sdxl-vae is not known"):
        convert(tmp_path / "theirs", tmp_path / "out", "autoencoder=sd-vae:stabilityai/sdxl-vae")
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"scaling_factor": 0.25, "block_out_channels": [8, 8, 8]}')
    info = convert(tmp_path / "theirs", tmp_path / "ours", f"autoencoder=sd-vae:{tmp_path / 'vae'}").info
    assert (info.scale_factor, info.resolution) == (0.25, 32)


# ----------------------------------------------------------------------------------------------------------------------
# From what another project or a camera wrote to a first step.


def edm2_zip_of(folder, moments):
    repa_of(folder / "unpacked", moments)
    zip_of(folder / "unpacked" / "vae-sd", folder / "edm2.zip")


@pytest.mark.parametrize("make", [lmdb_of, tars_of, fast_dit_of, repa_of, edm2_zip_of, lightningdit_of])
def test_latents_of_every_project_are_converted_found_sound_and_trained_on(tmp_path, train, make, caplog):
    moments = sd_moments(NUM_ITEMS, size=8)
    make(tmp_path / "theirs", moments)
    path = next((tmp_path / "theirs").glob("*.zip"), tmp_path / "theirs")
    dataset = convert(path, tmp_path / "ours", *(["allow_pickle=true"] if make is tars_of else []))
    latents, labels = fetch_all(dataset)
    assert np.allclose(latents, moments[:, : latents.shape[1]], rtol=2**-10, atol=1e-6) and labels == LABELS
    with caplog.at_level(logging.INFO):
        prepare_latents.main(["inspect", f"path={tmp_path / 'ours'}", "grid=none"])
    assert "nothing wrong was found" in caplog.text and "checksums agree" in caplog.text
    data = ["data=custom", f"data.path={tmp_path / 'ours'}", "model.backbone=DiT-XS/8", "train.precision=fp32"]
    assert len(losses(train("run", *data, "train.num_steps=3"))) == 3


def test_images_in_class_folders_are_encoded_found_sound_and_trained_on(tmp_path, train, caplog):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        folder = tmp_path / "images" / ("cat", "dog")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i}.png")
    settings = ["autoencoder=identity", "kind=sample", "resolution=8", "dtype=float32", "num_workers=0", "cpu_threads=1"]
    prepare_latents.main(["encode", f"images={tmp_path / 'images'}", f"output={tmp_path / 'ours'}", *settings])
    latents, labels = fetch_all(LatentDataset(tmp_path / "ours"))
    expected = np.concatenate([pixels[0::2], pixels[1::2]]).transpose(0, 3, 1, 2) / 127.5 - 1
    assert np.allclose(latents, expected, atol=1e-6) and labels == [0, 0, 0, 1, 1, 1]
    with caplog.at_level(logging.INFO):
        prepare_latents.main(["inspect", f"path={tmp_path / 'ours'}", "grid=none"])
    assert "nothing wrong was found" in caplog.text
    data = ["data=custom", f"data.path={tmp_path / 'ours'}", "model.backbone=DiT-XS/8", "train.precision=fp32"]
    assert len(losses(train("run", *data, "train.num_steps=3"))) == 3


# ----------------------------------------------------------------------------------------------------------------------
# Paths that hold something else: the message says what to type, and that is accepted.


def images_of(folder, _):
    (folder / "n01440764").mkdir(parents=True)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / "n01440764" / "0.JPEG")


@pytest.mark.parametrize(
    ("make", "held", "command"),
    [
        (lmdb_of, "an LMDB of MaskDiT", "convert"),
        (tars_of, "WebDataset tars: give {format}=webdataset, which reads them as they are, or", "convert"),
        (fast_dit_of, "features of fast-DiT", "convert"),
        (repa_of, "latents of REPA or EDM2", "convert"),
        (lightningdit_of, "safetensors without a header of ours, such as LightningDiT's", "convert"),
        (images_of, "images", "encode"),
    ],
)
def test_a_path_that_holds_no_shards_is_answered_with_the_command_that_reads_it(tmp_path, train, make, held, command):
    theirs = tmp_path / "their data"
    theirs.mkdir()
    make(theirs, sd_moments(NUM_ITEMS, size=8))
    key = {"convert": "path", "encode": "images"}[command]
    typed = f"python prepare_latents.py {command} '{key}={theirs}' 'output=latents/their data_shards'"
    for format_key, call in (
        ("data.format", lambda: train("run", "data=custom", f"data.path='{theirs}'")),
        ("format", lambda: prepare_latents.main(["inspect", f"path={theirs}"])),
    ):
        with pytest.raises(UserError, match=f"{re.escape(held.format(format=format_key))}.* {re.escape(typed)}$"):
            call()
    if command == "convert":
        convert(theirs, tmp_path / "ours", *(["allow_pickle=true"] if make is tars_of else []))
        with pytest.raises(
            UserError, match=r"images=.* holds no images .* and no tars; it holds|member; it holds .latent: `encode`"
        ):
            open_labelled_images(theirs)
    else:
        with pytest.raises(
            UserError, match=f"path={re.escape(str(theirs))} holds no latents; it holds images: encode them: python"
        ):
            convert(theirs, tmp_path / "ours")


def test_other_paths_are_answered_with_what_they_hold(tmp_path, train):
    (tmp_path / "native" / "in256").mkdir(parents=True)
    make_shard(tmp_path / "native" / "in256" / "a.safetensors")
    lmdb_of(tmp_path / "maskdit" / "train", sd_moments(NUM_ITEMS, size=8))
    (tmp_path / "empty").mkdir()
    for settings, message in (
        (["path=native"], "holds no latents itself, but .*in256 does: data.path=.*in256$"),
        (["path=empty"], "it holds neither latents nor images; found nothing$"),
        (["path=maskdit"], "holds an LMDB of MaskDiT: .* convert path=.*maskdit/train output=latents/maskdit_shards$"),
        (["path=native/in256", "format=webdataset"], "holds no tars .* native latent shards: leave out data.format=webdataset$"),
        (["path=maskdit/train", "format=webdataset"], "holds no tars .* convert path=.*maskdit/train"),
    ):
        with pytest.raises(UserError, match=message):
            train("run", "data=custom", *(f"data.{s}".replace("path=", f"path={tmp_path}/") for s in settings))


def test_what_a_folder_holds_is_told_from_a_few_names(tmp_path, monkeypatch):
    for i in range(300):
        (tmp_path / "classes" / f"n{i:03d}").mkdir(parents=True)
        (tmp_path / "classes" / f"n{i:03d}" / "0.JPEG").touch()
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: listed.append(str(folder)) or scandir(folder))
    assert "holds images" in way_on(tmp_path / "classes", "data.path")
    assert len(listed) < 8 and listed.count(str(tmp_path / "classes")) <= 2


# ----------------------------------------------------------------------------------------------------------------------
# Messages that agree with each other.


def test_moments_imply_their_scale_whatever_their_deviation(tmp_path, train, caplog):
    moments = sd_moments(NUM_ITEMS, size=8)
    moments[:, :4] *= 0.5  # 2.7: SD-VAE's are 4 to 7, or 0.6 to 1.4 once scaled
    write_tar(tmp_path / "tars" / "a.tar", npy_members(moments, LABELS))
    moments[:, :4] *= 0.1
    write_tar(tmp_path / "small" / "a.tar", npy_members(moments, LABELS))
    data = ["data=custom", "data.format=webdataset", "model.backbone=DiT-XS/8", "train.precision=fp32", "train.num_steps=1"]
    for name, is_warned in (("tars", False), ("small", True)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            train(name, *data, f"data.path={tmp_path / name}")
        assert "stored_scale=1: moments are stored as the autoencoder makes them" in caplog.text
        assert ("but SD-VAE makes 4 to 7; check data.kind and data.autoencoder" in caplog.text) == is_warned
    assert convert(tmp_path / "small", tmp_path / "ours").info.kind == "moments"


def test_the_scale_factor_that_convert_advises_is_the_one_that_inspect_finds_right(tmp_path, caplog):
    samples = torch.from_numpy(sd_moments(NUM_ITEMS, size=8)[:, :4] + np.float32([[[[-9]], [[3]], [[0]], [[20]]]]))
    write_lightningdit(tmp_path / "theirs" / "a.safetensors", samples, samples.flip(-1).contiguous(), LABELS)
    settings = ["autoencoder=none", "resolution=64", "dtype=float32"]
    with pytest.raises(UserError, match="scale_factor= is missing") as refused:
        convert(tmp_path / "theirs", tmp_path / "ours", *settings)
    advised = re.search(r"([\d.]+) gives it the standard deviation 0.5", str(refused.value))[1]
    convert(tmp_path / "theirs", tmp_path / "ours", *settings, f"scale_factor={advised}")
    with caplog.at_level(logging.INFO):
        prepare_latents.main(["inspect", f"path={tmp_path / 'ours'}"])
    assert "the network sees a standard deviation of 0.500 over all channels, 1.00 times sigma_data" in caplog.text


def lightningdit_with_statistics(folder, channels=4, num_items=NUM_ITEMS):
    """A folder as LightningDiT's extraction writes it; returns latents, mean and std. Channels differ in both."""
    g = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.3, 4, channels).reshape(1, -1, 1, 1)
    latents = spread * torch.randn(num_items, channels, 8, 8, generator=g) + 3 * spread.flip(1) - 5
    labels = [i % 10 for i in range(num_items)]
    for number, part in enumerate((slice(0, 12), slice(12, None))):
        about = {"total_size": str(len(latents[part])), "dtype": "torch.float32", "device": "cpu"}
        tensors = {"latents": latents[part], "latents_flip": latents[part].flip(-1), "labels": torch.tensor(labels[part])}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: x.contiguous() for name, x in tensors.items()}, folder / f"latents_rank00_shard{number:03d}.safetensors", about
        )
    mean, std = latents.mean(dim=[0, 2, 3], keepdim=True), latents.std(dim=[0, 2, 3], keepdim=True)
    torch.save({"mean": mean, "std": std}, folder / "latents_stats.pt")
    return latents, mean, std


def seen_by_network(dataset, flip=False):
    stored, _ = dataset.fetch(np.arange(len(dataset)), np.full(len(dataset), flip))
    return latents_for_network(stored, dataset.info)


def test_lightningdits_latents_are_normalised_by_its_own_statistics(tmp_path, caplog):
    latents, mean, std = lightningdit_with_statistics(tmp_path / "theirs", channels=32)
    with caplog.at_level(logging.INFO):
        dataset = convert(tmp_path / "theirs", tmp_path / "ours", "autoencoder=va-vae:vavae.pt", "dtype=float32")
    assert "latents_mean and latents_std: those of latents_stats.pt" in caplog.text
    assert (dataset.info.scale_factor, dataset.info.autoencoder, dataset.info.resolution) == (1.0, "va-vae:vavae.pt", 128)
    for flip in (False, True):
        expected = ((latents.flip(-1) if flip else latents) - mean) / std
        assert torch.allclose(seen_by_network(dataset, flip), expected, atol=1e-6)
    assert seen_by_network(dataset).std().item() == pytest.approx(1.0, abs=1e-3)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        prepare_latents.main(["inspect", f"path={tmp_path / 'ours'}", "grid=none"])
    assert "after (x - latents_mean) / latents_std of each channel" in caplog.text
    assert "the network sees a standard deviation of 1.000 over all channels, 2.00 times sigma_data=0.5" in caplog.text


def test_statistics_of_other_latents_are_found_by_inspect(tmp_path):
    _, mean, std = lightningdit_with_statistics(tmp_path / "theirs")
    for name, wrong in (("a", {"mean": mean, "std": std * 1.5}), ("b", {"mean": mean + std, "std": std})):
        torch.save(wrong, tmp_path / "theirs" / "latents_stats.pt")
        convert(tmp_path / "theirs", tmp_path / name, "autoencoder=none", "resolution=64")
        with pytest.raises(
            UserError, match="latents_mean and latents_std are not of these latents: after them, 4 channels have no mean"
        ):
            prepare_latents.main(["inspect", f"path={tmp_path / name}"])


def test_convert_measures_statistics_itself_or_leaves_them_out(tmp_path):
    latents, mean, std = lightningdit_with_statistics(tmp_path / "theirs")
    settings = ["autoencoder=none", "resolution=64", "dtype=float32"]
    with pytest.raises(UserError, match="scale_factor= is missing"):
        convert(tmp_path / "theirs", tmp_path / "no", *settings, "normalize=false")
    plain = convert(tmp_path / "theirs", tmp_path / "plain", *settings, "normalize=false", "scale_factor=0.1")
    assert plain.info.latents_mean is None and torch.allclose(seen_by_network(plain), latents * 0.1)
    (tmp_path / "theirs" / "latents_stats.pt").unlink()
    measured = convert(tmp_path / "theirs", tmp_path / "measured", *settings, "normalize=true")
    assert np.allclose(measured.info.latents_mean, mean.flatten(), atol=1e-5)
    assert np.allclose(measured.info.latents_std, latents.std(dim=[0, 2, 3], correction=0), rtol=1e-5)
    before = {file.name: file.read_bytes() for file in measured.files}
    convert(tmp_path / "theirs", tmp_path / "measured", *settings, "normalize=true")  # finished: nothing changes
    assert {file.name: file.read_bytes() for file in measured.files} == before
    prepare_latents.main(["inspect", f"path={tmp_path / 'measured'}"])
    with pytest.raises(UserError, match="already holds another data set .*normalize: True -> None"):
        convert(tmp_path / "theirs", tmp_path / "measured", *settings, "scale_factor=1.0")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_normalising_that_was_interrupted_is_done_to_the_end(tmp_path, monkeypatch, number):
    lightningdit_with_statistics(tmp_path / "theirs")
    settings = ["autoencoder=none", "resolution=64", "normalize=true"]
    whole = convert(tmp_path / "theirs", tmp_path / "whole", *settings)
    files_written, write_file = [], write.write_file

    def stop_before_a_file(path, content):
        if path.suffix == ".safetensors":
            files_written.append(path)
            if len(files_written) == 3 + number + 1:  # the three shards, and then each once more
                raise KeyboardInterrupt
        write_file(path, content)

    monkeypatch.setattr(write, "write_file", stop_before_a_file)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "theirs", tmp_path / "stopped", *settings)
    monkeypatch.undo()
    stopped = convert(tmp_path / "theirs", tmp_path / "stopped", *settings)
    assert [file.read_bytes() for file in stopped.files] == [file.read_bytes() for file in whole.files]


def test_halves_with_equal_labels_that_are_no_mirror_images_are_asked_about(tmp_path, caplog):
    moments = sd_moments(2 * NUM_ITEMS, size=8)
    write_lmdb(tmp_path / "theirs", moments, LABELS * 2)
    with caplog.at_level(logging.INFO):
        dataset = convert(tmp_path / "theirs", tmp_path / "ours")
    assert len(dataset) == 2 * NUM_ITEMS and not dataset.has_flips
    assert "warning: the second 23 items have the labels of the first in the same order, as --xflip stores" in caplog.text


def test_a_dtype_that_the_error_advises_may_be_given_for_the_same_output(tmp_path):
    moments = sd_moments(NUM_ITEMS, size=8)
    for name, item in (("first", 5), ("second", 15)):
        large = moments.copy()
        large[item, 0, 0, 0] = 1e6
        write_tar(tmp_path / name / "a.tar", npy_members(large, LABELS))
    with pytest.raises(UserError, match=r"do not fit float16; use dtype=float32$"):
        convert(tmp_path / "first", tmp_path / "out", "kind=moments")
    assert len(convert(tmp_path / "first", tmp_path / "out", "kind=moments", "dtype=float32")) == NUM_ITEMS
    with pytest.raises(UserError, match=r"use dtype=float32, and another output= than that of the shards that are finished$"):
        convert(tmp_path / "second", tmp_path / "other", "kind=moments")


def test_a_scale_for_evaluation_without_a_null_class_is_refused_with_the_key_to_set(train):
    with pytest.raises(UserError, match=r"eval.cfg_scales=1.5: .* or set eval.cfg_scales=\[1.0\]"):
        train("run", "model.class_dropout=0", "eval.every=6", "eval.cfg_scales=[1.5]")
