"""Formats of other projects: each test writes files like that project and reads them item by item."""

import json
import os
import zipfile
from pathlib import Path

import lmdb
import numpy as np
import pytest
import torch
from conftest import make_shard
from safetensors.torch import save_file
from test_webdataset import check, npy_members, sd_moments, write_tar

from common.errors import UserError
from latents.autoencoders import SD_SCALE, SD_VAE
from latents.prepare import formats
from latents.prepare.convert import ConvertConfig, resolve_shard_info
from latents.prepare.formats import LatentSource, REPAFolder, open_latents


def write_lmdb(folder, latents, labels, length=None, leave_out=()):
    """Write an LMDB like MaskDiT's extract_latent.py: arrays as bytes, labels and length as text."""
    folder.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(folder), map_size=2**26) as env, env.begin(write=True) as txn:
        for i, (latent, label) in enumerate(zip(latents, labels)):
            txn.put(f"z-{i}".encode(), np.ascontiguousarray(latent))
            txn.put(f"y-{i}".encode(), str(label).encode())
        txn.put(b"length", str(len(labels) if length is None else length).encode())
        for key in leave_out:
            assert txn.delete(key.encode())
    (folder / "lock.mdb").unlink()  # as after copying the folder


def write_fast_dit(folder, latents, labels, files, name="imagenet256"):
    """Write files like fast-DiT's extract_features.py, one per step. `files` lists the items of each file."""
    for part in ("features", "labels"):
        (folder / f"{name}_{part}").mkdir(parents=True, exist_ok=True)
    for i, items in enumerate(files):
        np.save(folder / f"{name}_features" / f"{i}.npy", latents[items])
        np.save(folder / f"{name}_labels" / f"{i}.npy", np.array(labels)[items])


def write_repa(folder, mean_std, labels):
    """Write files like EDM2's dataset_tools.py encode: one per item, then dataset.json."""
    entries = []
    for i, (value, label) in enumerate(zip(mean_std, labels)):
        name = f"{i // 1000:05d}/img-mean-std-{i:08d}.npy"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / name, value)
        entries.append([name, int(label)])
    (folder / "dataset.json").write_text(json.dumps({"labels": entries}))


def zip_of(folder, file, prefix=""):
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, prefix + path.relative_to(folder).as_posix())


def write_lightningdit(file, latents, labels, flips=None):
    """Write files like LightningDiT's extract_features.py. With flips=None, the flips are the mirrored latents."""
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"latents": latents, "latents_flip": latents.flip(-1) if flips is None else flips, "labels": torch.tensor(labels)}
    about = {"total_size": str(len(latents)), "dtype": str(latents.dtype), "device": "cpu"}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, about)


def as_mean_and_std(moments):
    return np.concatenate([moments[:, :4], np.exp(moments[:, 4:] / 2)], axis=1)


def test_maskdit_items_are_read_in_numeric_order_and_nothing_is_written(tmp_path):
    latents, labels = sd_moments(12), [7, 0, 3] * 4
    labels[-1] = 5
    write_lmdb(tmp_path / "train", latents, labels)
    check(open_latents(tmp_path / "train"), latents, labels)
    assert [f.name for f in (tmp_path / "train").iterdir()] == ["data.mdb"]
    check(open_latents(tmp_path / "train" / "data.mdb"), latents, labels)


@pytest.mark.parametrize(
    "settings",
    [{"leave_out": ["length"]}, {"leave_out": ["y-2"]}, {"leave_out": ["z-2"]}, {"length": 5}, {"length": "x"}, {"length": 0}],
)
def test_a_bad_lmdb_is_refused_by_name(tmp_path, settings):
    write_lmdb(tmp_path, sd_moments(4), [0, 1, 2, 3], **settings)
    with pytest.raises(UserError, match=f"{tmp_path}.* cannot be read"):
        open_latents(tmp_path).read(0, 4)


def test_fast_dit_files_are_read_in_numeric_order_whatever_number_of_items_they_hold(tmp_path):
    latents, labels = sd_moments(12)[:, :4] * np.float32(SD_SCALE), list(range(12))
    write_fast_dit(tmp_path / "one", latents, labels, [slice(i, i + 1) for i in range(12)])
    check(open_latents(tmp_path / "one"), latents, labels)  # in text order, 10 would come before 2
    check(open_latents(tmp_path / "one" / "imagenet256_features"), latents, labels)
    write_fast_dit(tmp_path / "more", latents[:8], labels[:8], [slice(0, 2), slice(2, 4), slice(4, 7), slice(7, 8)])
    check(open_latents(tmp_path / "more"), latents[:8], labels[:8])


def features(folder, number, part="features"):
    return folder / f"imagenet256_{part}" / f"{number}.npy"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: features(p, 2, "labels").unlink(), "No such file.*imagenet256_labels/2.npy"),
        (lambda p: np.save(features(p, 2), np.zeros((1, 4, 8, 8), "f4")), r"item 2 .*2.npy.*\[4, 8, 8\].*need .*\[4, 4, 4\]"),
        (lambda p: np.save(features(p, 2), np.array([{}])), "item 2 .*cannot be read: .*object"),
        (lambda p: np.save(features(p, 2, "labels"), np.zeros(1)), "TypeError: Cannot cast .*float64.* to .*int64"),
        (lambda p: features(p, 2).write_bytes(features(p, 2).read_bytes()[:-9]), "item 2 .*cannot be read"),
        (lambda p: (p / "imagenet512_features").mkdir(), "holds 2 folders <name>_features; give the path of one"),
    ],
)
def test_bad_features_are_refused_by_name(tmp_path, damage, message):
    write_fast_dit(tmp_path, sd_moments(4)[:, :4], range(4), [slice(i, i + 1) for i in range(4)])
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        open_latents(tmp_path).read(0, 4)


def test_standard_deviations_become_log_variances(tmp_path):
    moments, labels = sd_moments(6), [12, 0, 3, 3, 1, 2]
    write_repa(tmp_path / "repa" / "vae-sd", as_mean_and_std(moments), labels)
    zip_of(tmp_path / "repa" / "vae-sd", tmp_path / "edm2.zip")
    zip_of(tmp_path / "repa" / "vae-sd", tmp_path / "repa.zip", prefix="vae-sd/")
    for path in ("repa", "repa/vae-sd", "edm2.zip", "repa.zip"):
        source = open_latents(tmp_path / path)
        read = source.read(1, 6)["latents"]
        assert source.labels.tolist() == labels and source.shape == (8, 4, 4)
        assert torch.equal(read[:, :4], torch.from_numpy(moments[1:, :4]))
        assert torch.allclose(read[:, 4:], torch.from_numpy(moments[1:, 4:]), atol=1e-5)
    write_repa(tmp_path / "zeros", np.zeros((1, 8, 2, 2), np.float32), [0])
    assert torch.allclose(open_latents(tmp_path / "zeros").read(0, 1)["latents"][:, 4:], torch.tensor(-30.0))  # clamped


def put(name, array):
    return lambda folder: np.save(folder / "00000" / f"img-mean-std-{name:08d}.npy", array)


def listing(text):
    return lambda folder: (folder / "dataset.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (listing('{"labels": null}'), 'dataset.json has "labels": null, so there are no classes'),
        (listing('{"labels": [["a.npy", 0.5]]}'), "dataset.json is not .*whole number"),
        (listing('{"labels": [["a.npy", 0]]}'), "No such file.*a.npy"),
        (listing('{"labels": []}'), "dataset.json lists nothing"),
        (listing('{"labels": [["00000000.npy", 0], ["00000000.npy", 1]]}'), "or an image twice"),
        (put(1, np.ones((8, 5, 5), "f4")), r"item 1 .*00000001.npy.*\[8, 5, 5\].*need .*\[8, 4, 4\]"),
        (put(1, np.full((8, 4, 4), -1, "f4")), "item 1 .*00000001.npy.*negative standard deviations"),
    ],
)
def test_bad_means_and_stds_are_refused_by_name(tmp_path, damage, message):
    write_repa(tmp_path, as_mean_and_std(sd_moments(3)), [0, 1, 2])
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        REPAFolder(tmp_path).read(0, 3)


@pytest.mark.parametrize("name", ["dataset.json", "data.mdb", "vae-sd/dataset.json"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_no_file_is_refused_by_name(tmp_path, name, make):
    (tmp_path / "vae-sd").mkdir()
    make(tmp_path / name)
    with pytest.raises(UserError, match=f"{name}.* is not a regular file"):
        open_latents(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lightningdit_latents_flips_and_labels_are_read(tmp_path, dtype):
    g = torch.Generator().manual_seed(0)
    latents, flips = (torch.randn(9, 32, 4, 4, generator=g).to(dtype) for _ in range(2))
    labels = [4, 2, 0, 1, 3, 3, 2, 1, 0]
    for shard, part in enumerate((slice(0, 4), slice(4, 5), slice(5, 9))):
        file = tmp_path / f"latents_rank00_shard{shard:03d}.safetensors"
        write_lightningdit(file, latents[part], labels[part], flips[part])
    source = open_latents(tmp_path)
    check(source, latents.float(), labels, flips.float())
    assert source.channel_statistics is None and "latents_stats.pt, with which LightningDiT normalises" in source.log_message


GOOD = {"latents": torch.zeros(2, 4, 4, 4), "latents_flip": torch.zeros(2, 4, 4, 4), "labels": torch.tensor([0, 1])}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"labels": None}, "b.safetensors cannot be read: .*labels"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "item 4 .*b.safetensors"),
        ({"latents_flip": None}, "item 2 .*b.safetensors.*latents_flip"),
        ({"latents_flip": torch.full((2, 4, 4, 4), torch.nan)}, "item 2 .*b.safetensors.*not finite"),
    ],
)
def test_bad_lightningdit_files_are_refused_by_name(tmp_path, tensors, message):
    save_file(GOOD, tmp_path / "a.safetensors")
    save_file({k: v for k, v in (GOOD | tensors).items() if v is not None}, tmp_path / "b.safetensors")
    with pytest.raises(UserError, match=message):
        source = open_latents(tmp_path)
        source.read(0, len(source.labels))


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ({"mean": torch.zeros(1, 3, 1, 1), "std": torch.ones(1, 3, 1, 1)}, "has 3 channels, and the latents have 4"),
        ({"mean": torch.zeros(1, 4, 1, 1)}, "does not hold the tensors mean and std"),
        (
            {"mean": torch.zeros(1, 4), "std": torch.tensor([[1, 0.5, 0, 1]])},
            ": mean and std of channel 2 are 0 and 0; need .* and std above 0",
        ),
        (
            {"mean": torch.tensor([[1, torch.nan, 0, 1]]), "std": torch.ones(1, 4)},
            ": mean and std of channel 1 are nan and 1; need finite",
        ),
        ({"mean": open}, "cannot be read: it is damaged, or holds objects other"),
    ],
)
def test_bad_statistics_of_lightningdit_are_refused_by_name(tmp_path, statistics, message):
    save_file(GOOD, tmp_path / "a.safetensors")
    torch.save(statistics, tmp_path / "latents_stats.pt")
    with pytest.raises(UserError, match=f"latents_stats.pt ?{message}"):
        open_latents(tmp_path)


def test_latents_of_no_format_or_several_are_refused_and_native_shards_are_not_converted(tmp_path):
    make_shard(tmp_path / "native" / "a.safetensors")
    with pytest.raises(UserError, match="a.safetensors is a native shard, which training reads as it is"):
        open_latents(tmp_path / "native")
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UserError, match=f"path={path} looks like none of MaskDiTLMDB, Tars, .*; give the file or folder"):
            open_latents(path)
    save_file(GOOD, tmp_path / "a.safetensors")
    write_tar(tmp_path / "a.tar", npy_members(sd_moments(1), [0]))
    with pytest.raises(UserError, match="looks like Tars and LightningDiTFolder; give the file or folder of one format"):
        open_latents(tmp_path)
    assert open_latents(tmp_path / "a.safetensors").kind == "sample"


def test_a_format_that_is_one_file_does_not_make_folders_of_other_formats_ambiguous(tmp_path, monkeypatch):
    class OneFile(LatentSource):
        patterns, file_patterns, kind = (), ("*.h5",), "sample"

        def _open(self):
            self.items, self.labels = [0], np.zeros(1, dtype=np.int64)

        def _load(self, number):
            return [np.zeros((4, 2, 2), dtype=np.float32)]

    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, OneFile))
    save_file(GOOD, tmp_path / "a.safetensors")
    write_lmdb(tmp_path / "lmdb", sd_moments(2), [0, 1])
    write_fast_dit(tmp_path / "fast", sd_moments(2)[:, :4], [0, 1], [[0, 1]])
    for folder, expected in (
        (tmp_path, "LightningDiTFolder"),
        (tmp_path / "lmdb", "MaskDiTLMDB"),
        (tmp_path / "fast", "FastDiTFolder"),
    ):
        (folder / "more.h5").touch()
        zip_of(tmp_path / "lmdb", folder / "backup.zip")
        assert type(open_latents(folder)).__name__ == expected
        assert isinstance(open_latents(folder / "more.h5"), OneFile)


def test_a_setting_that_a_format_does_not_hold_is_asked_for_by_its_key(tmp_path):
    def describe(source, kind=None, scale=None, autoencoder=None, **keys):
        return resolve_shard_info(source, ConvertConfig("in", "out", kind, scale, autoencoder=autoencoder, **keys))

    write_tar(tmp_path / "a.tar", npy_members(sd_moments(2), [0, 1]))
    write_tar(tmp_path / "samples" / "a.tar", npy_members(sd_moments(2)[:, :4], [0, 1]))
    write_tar(tmp_path / "odd" / "a.tar", npy_members(sd_moments(2)[:, :3], [0, 1]))
    tars, samples, odd = (open_latents(tmp_path / name) for name in ("a.tar", "samples", "odd"))
    info, scale = describe(samples, "sample", 0.5, "none", scale_factor=2.0, resolution=4)
    assert (info.kind, info.autoencoder, info.scale_factor, info.resolution, scale) == ("sample", "none", 2.0, 4, 0.5)
    for message, source, given in (
        ("give kind=, ", tars, {}),
        ("give scale=, ", samples, {"kind": "sample"}),
        ("kind=sample, but 8 channels .*: give kind=moments, or autoencoder=", tars, {"kind": "sample", "scale": 1.0}),
        ("kind=sample, but 8 channels", tars, {"kind": "sample", "scale": 1.0, "autoencoder": SD_VAE}),
        ("kind=moments, but 4 channels .*: give kind=sample and scale=, or", samples, {"kind": "moments"}),
        ("give autoencoder=, scale_factor=, resolution=, ", odd, {"kind": "sample", "scale": 1.0}),
        ("give scale_factor=, resolution=, ", tars, {"kind": "moments", "autoencoder": "none"}),
        ("scale=0.5: they must be square, and moments unscaled", tars, {"kind": "moments", "scale": 0.5}),
        (
            "they must be square, .* with mean and log-variance",
            odd,
            {"kind": "moments", "autoencoder": "none", "scale_factor": 1.0, "resolution": 4},
        ),
        ("num_classes=1, but there are labels up to 1", tars, {"kind": "moments", "num_classes": 1}),
    ):
        with pytest.raises(UserError, match=message):
            describe(source, **given)
