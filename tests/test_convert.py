"""Every format of another project becomes shards that hold the same items, and the official trainer's tars train as they are."""

import json
import logging

import numpy as np
import pytest
import torch
from conftest import losses
from test_formats import as_mean_and_std, write_fast_dit, write_lightningdit, write_lmdb, write_repa
from test_webdataset import npy_members, pickle_members, sd_moments, two_tars, write_tar

import prepare_latents
from latents.detection import SD_SCALE
from latents.prepare.formats import MaskDiTLMDB
from latents.shards import LatentDataset

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
