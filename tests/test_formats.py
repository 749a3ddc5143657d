"""Each format is written as the other project writes it, and read item by item."""

import json
import re
import zipfile

import lmdb
import numpy as np
import pytest
import torch
from conftest import make_shard
from safetensors.torch import save_file
from test_webdataset import npy_members, pickle_members, sd_moments, write_tar

from latents.detection import SD_SCALE, SD_VAE, detect
from latents.prepare.formats import FORMATS, open_latents


def write_lmdb(folder, latents, labels, length=None, leave_out=()):
    """As MaskDiT's extract_latent.py: arrays are put as they are, labels and length as text."""
    folder.mkdir(parents=True, exist_ok=True)
    with lmdb.open(str(folder), map_size=2**26) as env, env.begin(write=True) as txn:
        for i, (latent, label) in enumerate(zip(latents, labels)):
            txn.put(f"z-{i}".encode(), np.ascontiguousarray(latent))
            txn.put(f"y-{i}".encode(), str(label).encode())
        txn.put(b"length", str(len(labels) if length is None else length).encode())
        for key in leave_out:
            assert txn.delete(key.encode())
    (folder / "lock.mdb").unlink()  # as after a copy


def write_fast_dit(folder, latents, labels, files, name="imagenet256"):
    """As fast-DiT's extract_features.py: one file per step; `files` gives the items of each."""
    for part in ("features", "labels"):
        (folder / f"{name}_{part}").mkdir(parents=True, exist_ok=True)
    for i, items in enumerate(files):
        np.save(folder / f"{name}_features" / f"{i}.npy", latents[items])
        np.save(folder / f"{name}_labels" / f"{i}.npy", np.array(labels)[items])


def write_repa(folder, mean_std, labels):
    """As EDM2's dataset_tools.py encode: one file per item, dataset.json written last."""
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


def write_lightningdit(file, latents, flips, labels):
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"latents": latents, "latents_flip": flips, "labels": torch.tensor(labels)}, file)


def as_mean_and_std(moments):
    return np.concatenate([moments[:, :4], np.exp(moments[:, 4:] / 2)], axis=1)


def check(source, latents, labels, flips=None):
    """Every item, in one piece, one by one, and across the seams of files."""
    num = len(labels)
    assert source.labels.dtype == np.int64 and source.labels.tolist() == list(labels)
    assert tuple(source.shape) == latents.shape[1:] and source.has_flips == (flips is not None)
    for start, stop in [(0, num), (1, num - 1), (num // 2, num)] + [(i, i + 1) for i in range(num)]:
        read, read_flips = source.read(start, stop)
        assert read.dtype == torch.float32 and torch.equal(read, torch.as_tensor(latents[start:stop]))
        if flips is None:
            assert read_flips is None
        else:
            assert torch.equal(read_flips, torch.as_tensor(flips[start:stop]))


def settled(source, **settings):
    return detect(
        source.read_spread(), labels=source.labels, known_kind=source.known_kind,
        known_stored_scale=source.known_stored_scale, **settings,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# MaskDiT's LMDB.


def test_maskdit_items_are_read_in_numeric_order(tmp_path):
    latents, labels = sd_moments(12), [7, 0, 3] * 4
    write_lmdb(tmp_path / "train", latents, labels)
    before = sorted(f.name for f in (tmp_path / "train").iterdir())
    source = open_latents(tmp_path / "train")
    check(source, latents, labels)
    assert (source.name, source.known_kind, source.known_stored_scale) == ("MaskDiT LMDB", "moments", 1.0)
    assert sorted(f.name for f in (tmp_path / "train").iterdir()) == before == ["data.mdb"]
    check(open_latents(tmp_path / "train" / "data.mdb"), latents, labels)
    info, stored_scale, _ = settled(source)
    assert (info.kind, info.autoencoder, info.resolution, info.num_classes, stored_scale) == ("moments", SD_VAE, 32, 8, 1)


def test_the_mirrored_half_of_an_lmdb_becomes_the_flips(tmp_path):
    latents, labels = sd_moments(9), [1, 2, 0] * 3
    rng = np.random.default_rng(5)
    mirrored = latents[..., ::-1] + rng.normal(0, 2, latents.shape).astype(np.float32)  # mirrors only nearly, as encoders do
    write_lmdb(tmp_path, np.concatenate([latents, mirrored]), labels * 2)
    source = open_latents(tmp_path)
    check(source, latents, labels, mirrored)
    assert "latents_flip: the second 9 items (--xflip); the labels of the halves agree" in source.statements[0]


@pytest.mark.parametrize("second", ["unrelated", "the same again", "other labels"])
def test_other_second_halves_of_an_lmdb_stay_items(tmp_path, second):
    latents, labels = sd_moments(8, size=8), [1, 2] * 4
    halves = {"unrelated": sd_moments(8, size=8, seed=1), "the same again": latents, "other labels": latents[..., ::-1]}
    other = [2, 1] * 4 if second == "other labels" else labels
    write_lmdb(tmp_path, np.concatenate([latents, halves[second]]), labels + other)
    check(open_latents(tmp_path), np.concatenate([latents, halves[second]]), labels + other)


def test_the_folder_above_the_lmdb_is_refused_with_the_fix(tmp_path):
    write_lmdb(tmp_path / "train", sd_moments(1), [0])
    with pytest.raises(ValueError, match=r"holds no data.mdb; use train: .*/train"):
        open_latents(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no data.mdb$"):
        open_latents(tmp_path / "empty", format="maskdit_lmdb")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"leave_out": ["length"]}, "data.mdb has no length: the extraction was interrupted before it wrote it"),
        ({"leave_out": ["y-2"]}, "data.mdb has no y-2: but length is 4"),
        ({"leave_out": ["z-2"]}, "data.mdb has no z-2: an item is missing"),
        ({"length": 5}, "data.mdb has no y-4: but length is 5"),
        ({"length": "many"}, "length is b'many', not a whole number"),
        ({"length": 0}, r"holds no items \(length is 0\)"),
        ({"labels": [0, 1, "cat", 1]}, "y-2 is b'cat', not a whole number"),
    ],
)
def test_a_bad_lmdb_is_refused_by_name(tmp_path, settings, message):
    labels = settings.pop("labels", [0, 1, 2, 3])
    write_lmdb(tmp_path, sd_moments(4), labels, **settings)
    with pytest.raises(ValueError, match=message):
        open_latents(tmp_path).read(0, 4)


def test_items_of_other_sizes_in_an_lmdb_are_refused(tmp_path):
    latents = list(sd_moments(4))
    for name, bad, message in (
        ("shape", sd_moments(1, size=8)[0], r"z-1 has 2048 bytes, but z-0 has 512 \(float32 \[8, 4, 4\]\)"),
        ("float64", latents[1].astype(np.float64), "z-1 has 1024 bytes, as many as float64 has, but z-0 has 512"),
        ("nan", np.full_like(latents[1], np.nan), "z-1 holds NaN or Inf"),
    ):
        write_lmdb(tmp_path / name, [latents[0], bad, *latents[2:]], [0, 1, 2, 3])
        source = open_latents(tmp_path / name)
        with pytest.raises(ValueError, match=message):
            source.read(0, 4)
        assert torch.equal(source.read(2, 4)[0], torch.from_numpy(np.stack(latents[2:])))
    write_lmdb(tmp_path / "samples", sd_moments(2)[:, :4], [0, 1])
    with pytest.raises(ValueError, match=r"z-0 has 256 bytes, which are not float32 moments \[8, h, h\]"):
        open_latents(tmp_path / "samples")


@pytest.mark.parametrize("missing_bytes", [4096, 40_960, 262_144])
def test_an_lmdb_that_lacks_its_last_pages_is_refused_and_does_not_end_the_process(tmp_path, missing_bytes):
    write_lmdb(tmp_path, sd_moments(200, size=8), range(200))
    file = tmp_path / "data.mdb"
    file.write_bytes(file.read_bytes()[:-missing_bytes])
    with pytest.raises(ValueError, match="data.mdb is truncated"):
        open_latents(tmp_path)


def test_a_truncated_or_damaged_lmdb_is_refused_and_not_read(tmp_path):
    write_lmdb(tmp_path / "a", sd_moments(40, size=32), range(40))
    file = tmp_path / "a" / "data.mdb"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"data.mdb is truncated: \d+ of \d+ bytes; copy it again"):
        open_latents(tmp_path / "a")
    file.write_bytes(b"junk" * 10000)
    with pytest.raises(ValueError, match="data.mdb cannot be opened as an LMDB"):
        open_latents(tmp_path / "a")


# ----------------------------------------------------------------------------------------------------------------------
# WebDataset.


@pytest.mark.parametrize("members", [npy_members, pickle_members])
def test_tars_are_read_in_order(tmp_path, members):
    latents, labels = sd_moments(7), [3, 1, 2, 0, 1, 2, 2]
    write_tar(tmp_path / "a.tar", members(latents[:4], labels[:4]))
    write_tar(tmp_path / "b.tar", members(latents[4:], labels[4:], start=4))
    source = open_latents(tmp_path, allow_pickle=True)
    check(source, latents, labels)
    assert source.known_kind is source.known_stored_scale is None
    check(open_latents(tmp_path / "b.tar", allow_pickle=True), latents[4:], labels[4:])


def test_old_pickles_and_half_precision_are_converted(tmp_path):
    latents = sd_moments(3).astype(np.float16)
    write_tar(tmp_path / "a.tar", pickle_members(latents, [0, 1, 2], protocol=2))
    check(open_latents(tmp_path, allow_pickle=True), latents.astype(np.float32), [0, 1, 2])


def test_pickles_in_tars_need_the_flag(tmp_path):
    write_tar(tmp_path / "a.tar", pickle_members(sd_moments(1), [0]))
    with pytest.raises(ValueError, match="a.tar: member 0000000.latent is a pickle.*; allow_pickle=true reads it"):
        open_latents(tmp_path)


def test_nan_in_a_tar_is_named(tmp_path):
    latents = sd_moments(5)
    latents[3, 0, 1, 1] = np.inf
    write_tar(tmp_path / "a.tar", npy_members(latents, range(5)))
    with pytest.raises(ValueError, match="a.tar: 0000003.latent.npy holds NaN or Inf"):
        open_latents(tmp_path).read(1, 5)


# ----------------------------------------------------------------------------------------------------------------------
# fast-DiT.


def test_fast_dit_files_are_read_in_numeric_order(tmp_path):
    latents, labels = sd_moments(12)[:, :4] * np.float32(SD_SCALE), list(range(12))
    write_fast_dit(tmp_path, latents, labels, [slice(i, i + 1) for i in range(12)])
    source = open_latents(tmp_path)
    check(source, latents, labels)  # as text, 10 would come before 2
    check(open_latents(tmp_path / "imagenet256_features"), latents, labels)
    info, stored_scale, statements = settled(source)
    assert (info.kind, stored_scale, info.scale_factor) == ("sample", SD_SCALE, SD_SCALE)
    assert not any("warning" in s for s in statements)


def test_fast_dit_files_may_hold_several_items(tmp_path):
    latents, labels = sd_moments(8)[:, :4], [5, 4, 3, 2, 1, 0, 6, 7]
    write_fast_dit(tmp_path, latents, labels, [slice(0, 2), slice(2, 4), slice(4, 7), slice(7, 8)], name="imagenet512")
    check(open_latents(tmp_path), latents, labels)


def features(tmp_path, number):
    return tmp_path / "imagenet256_features" / f"{number}.npy"


def labels_file(tmp_path, number):
    return tmp_path / "imagenet256_labels" / f"{number}.npy"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda p: labels_file(p, 2).unlink(),
            "features holds 4 files and imagenet256_labels 3: imagenet256_features/2.npy lacks",
        ),
        (lambda p: features(p, 1).unlink(), "features holds 3 files and imagenet256_labels 4: imagenet256_labels/1.npy lacks"),
        (lambda p: features(p, 1).rename(features(p, 9)), "imagenet256_labels/1.npy lacks its partner in .*_features"),
        (lambda p: features(p, 1).rename(features(p, "one")), "one.npy is not named by a number"),
        (lambda p: np.save(features(p, "01"), 0), "files of the same number"),
        (lambda p: np.save(features(p, 2), np.zeros((1, 4, 4, 4))), "2.npy is float64; latents are float32 or float16"),
        (
            lambda p: np.save(features(p, 2), np.zeros((1, 4, 8, 8), "f4")),
            r"2.npy is float32 \[1, 4, 8, 8\]; need \[1, 4, 4, 4\]",
        ),
        (lambda p: np.save(features(p, 2), np.zeros((2, 4, 4, 4), "f4")), r"2.npy is .*; need \[1, 4, 4, 4\], as its labels"),
        (lambda p: np.save(features(p, 0), np.zeros((4, 4, 4), "f4")), r"0.npy is .*; need \[B, C, h, w\]"),
        (lambda p: np.save(features(p, 2), np.full((1, 4, 4, 4), np.nan, "f4")), "features/2.npy holds NaN or Inf"),
        (lambda p: np.save(features(p, 2), np.array([{}])), "2.npy holds Python objects"),
        (lambda p: np.save(labels_file(p, 2), np.zeros(1)), "2.npy: labels are float64, not whole numbers"),
        (lambda p: np.save(labels_file(p, 2), 3), r"labels/2.npy is int64 \[\]; need labels"),
        (lambda p: features(p, 2).write_bytes(features(p, 2).read_bytes()[:-9]), "2.npy is truncated"),
        (lambda p: labels_file(p, 0).parent.rename(p / "other"), "imagenet256_labels does not exist"),
        (lambda p: (p / "imagenet512_features").mkdir(), "there are: imagenet256_features, imagenet512_features; give the path"),
    ],
)
def test_bad_features_are_refused_by_name(tmp_path, damage, message):
    write_fast_dit(tmp_path, sd_moments(4)[:, :4], range(4), [slice(i, i + 1) for i in range(4)])
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_latents(tmp_path).read(0, 4)


# ----------------------------------------------------------------------------------------------------------------------
# REPA and EDM2.


def test_standard_deviations_become_log_variances(tmp_path):
    moments, labels = sd_moments(6), [12, 0, 3, 3, 1, 2]
    write_repa(tmp_path / "vae-sd", as_mean_and_std(moments), labels)
    (tmp_path / "images").mkdir()
    zip_of(tmp_path / "vae-sd", tmp_path / "edm2.zip")
    zip_of(tmp_path / "vae-sd", tmp_path / "repa.zip", prefix="vae-sd/")
    for path in (tmp_path / "vae-sd", tmp_path / "edm2.zip", tmp_path / "repa.zip"):
        source = open_latents(path)
        read, flips = source.read(1, 6)
        assert flips is None and source.labels.tolist() == labels and source.shape == (8, 4, 4)
        assert torch.equal(read[:, :4], torch.from_numpy(moments[1:, :4]))
        assert torch.allclose(read[:, 4:], torch.from_numpy(moments[1:, 4:]), atol=1e-5)
        info, stored_scale, statements = settled(source)
        assert (info.kind, stored_scale) == ("moments", 1) and not any("warning" in s for s in statements)
    assert open_latents(tmp_path, format="repa").labels.tolist() == labels  # the folder of images/ and vae-sd/
    (tmp_path / "edm2.zip").unlink()
    (tmp_path / "repa.zip").unlink()
    assert open_latents(tmp_path).name == "REPA / EDM2 mean and std"


def test_a_standard_deviation_of_0_stays_finite(tmp_path):
    write_repa(tmp_path, np.zeros((1, 8, 2, 2), np.float32), [0])
    read, _ = open_latents(tmp_path).read(0, 1)
    assert torch.allclose(read[:, 4:], torch.tensor(-30.0))  # where the autoencoder clamps


def rewrite(**changes):
    def damage(folder):
        (folder / "dataset.json").write_text(json.dumps(json.loads((folder / "dataset.json").read_text()) | changes))

    return damage


def put(name, array):
    return lambda folder: np.save(folder / "00000" / f"img-mean-std-{name:08d}.npy", array)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rewrite(labels=None), r'dataset.json: "labels" is null or empty; encode a data set that has labels'),
        (rewrite(labels=[["a.npy", [0, 1]]]), r"\['a.npy', \[0, 1\]\] is not \[name, label\]"),
        (rewrite(labels=[["a.npy", 0.5]]), "is not .name, label. with a whole number"),
        (rewrite(labels=[["a.npy", 0]]), "dataset.json names a.npy, which is not there$"),
        (rewrite(labels=[["a.png", 0]]), "names a.png, which is not there; it names images: encode them"),
        (lambda f: (f / "dataset.json").write_text("[]"), "dataset.json is not {.labels"),
        (lambda f: (f / "dataset.json").write_text("{"), "dataset.json is not {.labels"),
        (lambda f: (f / "dataset.json").unlink(), "holds no dataset.json"),
        (put(1, np.ones((8, 4, 4))), "img-mean-std-00000001.npy is float64; latents are"),
        (put(1, np.ones((8, 5, 5), "f4")), r"00000001.npy is float32 \[8, 5, 5\], but .*0.npy is \[8, 4, 4\]"),
        (put(0, np.ones((3, 5, 5), "f4")), r"00000000.npy is float32 \[3, 5, 5\]; need \[2C, h, w\]"),
        (put(1, np.full((8, 4, 4), np.nan, "f4")), "00000001.npy holds NaN or Inf"),
        (put(1, np.full((8, 4, 4), -1, "f4")), "00000001.npy holds negative values where standard deviations are expected"),
    ],
)
def test_bad_means_and_stds_are_refused_by_name(tmp_path, damage, message):
    write_repa(tmp_path, as_mean_and_std(sd_moments(3)), [0, 1, 2])
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_latents(tmp_path, format="repa").read(0, 3)


def test_files_that_dataset_json_leaves_out_are_logged(tmp_path):
    write_repa(tmp_path, as_mean_and_std(sd_moments(3)), [0, 1, 2])
    put(3, as_mean_and_std(sd_moments(1))[0])(tmp_path)
    assert open_latents(tmp_path).statements == ["1 .npy files are not in dataset.json and are left out"]


def test_a_damaged_zip_is_refused_by_name(tmp_path):
    write_repa(tmp_path / "in", as_mean_and_std(sd_moments(3)), [0, 1, 2])
    zip_of(tmp_path / "in", tmp_path / "a.zip")
    whole = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "a.zip").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="a.zip is truncated or not a .zip"):
        open_latents(tmp_path / "a.zip")
    place = whole.index(b"\x93NUMPY") + 300
    (tmp_path / "a.zip").write_bytes(whole[:place] + b"????" + whole[place + 4 :])
    with pytest.raises(ValueError, match="a.zip: 00000/img-mean-std-00000000.npy is damaged: Bad CRC"):
        open_latents(tmp_path / "a.zip")


# ----------------------------------------------------------------------------------------------------------------------
# LightningDiT.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lightningdit_latents_flips_and_labels_are_read(tmp_path, dtype):
    g = torch.Generator().manual_seed(0)
    latents, flips = (torch.randn(9, 32, 4, 4, generator=g).to(dtype) for _ in range(2))
    labels = [4, 2, 0, 1, 3, 3, 2, 1, 0]
    for shard, part in enumerate((slice(0, 4), slice(4, 5), slice(5, 9))):
        file = tmp_path / f"latents_rank00_shard{shard:03d}.safetensors"
        write_lightningdit(file, latents[part].clone(), flips[part].clone(), labels[part])
    source = open_latents(tmp_path)
    check(source, latents.float(), labels, flips.float())
    assert source.channel_statistics is None
    assert source.statements[0].startswith(f"warning: {tmp_path / 'latents_stats.pt'} is not there: LightningDiT normalises")
    with pytest.raises(ValueError, match="latents have 32 channels.*autoencoder=none"):
        settled(source)
    with pytest.raises(ValueError, match="scale_factor= is missing: .*; 0.5[0-9]* gives it the standard deviation 0.5"):
        settled(source, autoencoder="none")
    info, stored_scale, _ = settled(source, autoencoder="none", scale_factor=0.5, resolution=64)
    assert (info.kind, stored_scale, info.num_classes) == ("sample", 1, 5)


GOOD = {"latents": torch.zeros(2, 4, 4, 4), "latents_flip": torch.zeros(2, 4, 4, 4), "labels": torch.tensor([0, 1])}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"latents": torch.zeros(2, 4, 4, 4).double()}, "b.safetensors: latents is float64; latents are"),
        ({"latents": torch.zeros(2, 4, 4, 4).int()}, "b.safetensors: latents is I32"),
        ({"latents": torch.zeros(2, 4, 4)}, r"b.safetensors: latents is F32 \[2, 4, 4\]; need"),
        ({"labels": None}, "b.safetensors holds latents, latents_flip; need latents .* and labels"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"b.safetensors: 2 latents, but labels are \[3\]"),
        ({"labels": torch.zeros(2)}, "b.safetensors: labels are float32, not whole numbers"),
        ({"latents_flip": torch.zeros(1, 4, 4, 4)}, r"latents_flip is \[1, 4, 4, 4\], but latents are \[2, 4, 4, 4\]"),
        ({"latents_flip": None}, "b.safetensors does not belong with .*a.safetensors"),
        (
            {n: torch.zeros(2, 4, 8, 8) for n in ("latents", "latents_flip")},
            r"b.safetensors does not belong .* \[4, 8, 8\] against",
        ),
        ({"latents_flip": torch.full((2, 4, 4, 4), torch.nan)}, "b.safetensors: latents_flip of item 0 holds NaN or Inf"),
    ],
)
def test_bad_lightningdit_files_are_refused_by_name(tmp_path, tensors, message):
    save_file(GOOD, tmp_path / "a.safetensors")
    save_file({k: v for k, v in (GOOD | tensors).items() if v is not None}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match=message):
        open_latents(tmp_path).read(0, 4)


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ({"mean": torch.zeros(1, 3, 1, 1), "std": torch.ones(1, 3, 1, 1)}, "must hold mean and std, 4 finite numbers each"),
        ({"mean": torch.zeros(1, 4, 1, 1), "std": torch.zeros(1, 4, 1, 1)}, "must hold mean and std, 4 finite numbers each"),
        ({"mean": torch.zeros(1, 4, 1, 1)}, "must hold mean and std"),
        ([1.0], "must hold mean and std"),
        ({"mean": open}, "is refused: it names .*open, and only tensors are admitted"),
    ],
)
def test_bad_statistics_of_lightningdit_are_refused_by_name(tmp_path, statistics, message):
    save_file(GOOD, tmp_path / "a.safetensors")
    torch.save(statistics, tmp_path / "latents_stats.pt")
    with pytest.raises(ValueError, match=f"latents_stats.pt {message}") as refused:
        open_latents(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_truncated_safetensors_file_is_refused_by_name(tmp_path):
    save_file(GOOD, tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-7])
    with pytest.raises(ValueError, match="a.safetensors is truncated or not a safetensors file"):
        open_latents(tmp_path)


def test_native_shards_are_not_converted(tmp_path):
    make_shard(tmp_path / "a.safetensors")
    with pytest.raises(
        ValueError,
        match="path=.* holds native latent shards: training reads them as they are: python train.py data=custom data.path=",
    ):
        open_latents(tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# All of them.


def test_what_fits_no_format_is_refused_with_what_was_looked_for_and_found(tmp_path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        open_latents(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no latents that are known: looked for data.mdb .MaskDiT.*; found nothing"):
        open_latents(tmp_path)
    for i in range(10):
        (tmp_path / f"{i}.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"found 0.txt, .*, 7.txt and 2 more"):
        open_latents(tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"format=zip is not accepted; use auto | {' | '.join(FORMATS)}")):
        open_latents(tmp_path, format="zip")


def test_a_folder_that_fits_several_formats_needs_the_flag(tmp_path):
    save_file(GOOD, tmp_path / "a.safetensors")
    write_tar(tmp_path / "a.tar", npy_members(sd_moments(1), [0]))
    with pytest.raises(ValueError, match="may be webdataset or lightningdit; say which with format="):
        open_latents(tmp_path)
    assert open_latents(tmp_path, format="lightningdit").name == "LightningDiT safetensors"
    assert open_latents(tmp_path, format="webdataset").name == "WebDataset tars"


def test_fingerprints_of_sources_change_with_the_data(tmp_path):
    def write(folder, labels):
        latents = sd_moments(2)
        write_lmdb(folder / "lmdb", latents, labels)
        write_tar(folder / "tars" / "a.tar", npy_members(latents, labels))
        write_fast_dit(folder / "fast_dit", latents, labels, [slice(0, 1), slice(1, 2)])
        write_repa(folder / "repa", as_mean_and_std(latents), labels)
        write_lightningdit(folder / "lightning" / "a.safetensors", GOOD["latents"], GOOD["latents_flip"], labels)

    for name, labels in (("a", [0, 1]), ("b", [0, 1]), ("c", [1, 0])):
        write(tmp_path / name, labels)
    prints = [[open_latents(p).fingerprint() for p in sorted((tmp_path / name).iterdir())] for name in "abc"]
    assert prints[0] == prints[1] and len(set(prints[0] + prints[2])) == 10
