"""Tars of latents: read by offset as exactly as native shards, and pickles run nothing."""

import io
import logging
import os
import pickle
import tarfile
import time

import numpy as np
import pytest
import torch

from latents import reader, webdataset
from latents.arrays import unpickle_array
from latents.detection import SD_SCALE, SD_VAE, detect
from latents.order import BatchOrder, read_batches
from latents.webdataset import TarIndex, TarLatents


def sd_moments(num_items, size=4, seed=0):
    """Like SD-VAE's: [N, 8, h, h] float32, means of standard deviation 5.5, log-variances of -20 to -9."""
    rng = np.random.default_rng(seed)
    means, log_variances = rng.normal(0, 5.5, (num_items, 4, size, size)), rng.uniform(-20, -9, (num_items, 4, size, size))
    return np.concatenate([means, log_variances], axis=1).astype(np.float32)


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def write_tar(file, members, format=tarfile.PAX_FORMAT):
    """Members (name, bytes), written as webdataset's TarWriter does: times are fractions, which need a pax header each."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w|", format=format) as tar:
        for name, payload in members:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(payload), 1700000000.25
            tar.addfile(member, io.BytesIO(payload))


def npy_members(latents, labels, start=0):
    for i, (latent, label) in enumerate(zip(latents, labels), start):
        yield f"{i:07d}.cls", str(label).encode()
        yield f"{i:07d}.latent.npy", npy(latent)


def pickle_members(latents, labels, start=0, protocol=4):
    """As MaskDiT's lmdb2wds.py: members in the order that webdataset sorts them into."""
    for i, (latent, label) in enumerate(zip(latents, labels), start):
        yield f"{i:07d}.cls", str(label).encode()
        yield f"{i:07d}.latent", pickle.dumps(latent, protocol)


def two_tars(folder, members=npy_members, num_items=11, **settings):
    """A folder of two tars; returns latents and labels."""
    latents, labels = sd_moments(num_items), np.arange(num_items) * 7 % 5
    write_tar(folder / "train-0000.tar", members(latents[:6], labels[:6], **settings))
    write_tar(folder / "train-0001.tar", members(latents[6:], labels[6:], start=6, **settings))
    return latents, labels


def no_flips(indices):
    return np.zeros(len(indices), dtype=bool)


@pytest.mark.parametrize(
    ("members", "settings"),
    [(npy_members, {})] + [(pickle_members, {"protocol": protocol}) for protocol in (3, 4, 5)],
)
def test_every_item_and_label_is_read_by_index(tmp_path, members, settings):
    latents, labels = two_tars(tmp_path, members, **settings)
    dataset = TarLatents(tmp_path, allow_pickle=True)
    assert len(dataset) == 11 and (dataset.channels, dataset.height, dataset.width) == (4, 4, 4)
    indices = np.array([10, 0, 6, 5, 0, 3])
    fetched, fetched_labels = dataset.fetch(indices, no_flips(indices))
    assert fetched.dtype == torch.float32 and np.array_equal(fetched.numpy(), latents[indices])
    assert np.array_equal(fetched_labels.numpy(), labels[indices]) and np.array_equal(dataset.labels, labels)
    assert not dataset.has_flips and [f.name for f in dataset.files] == ["train-0000.tar", "train-0001.tar"]


def test_large_arrays_are_found_outside_the_frames_of_their_pickles(tmp_path):
    latents = sd_moments(3, size=64)  # 128 KiB, above the 64 KiB from which a pickler writes data outside its frames
    for protocol in (4, 5):
        write_tar(tmp_path / str(protocol) / "a.tar", pickle_members(latents, [0, 1, 2], protocol=protocol))
        index = TarIndex.open(tmp_path / str(protocol), allow_pickle=True)
        assert not index.pickle_bytes.any() and np.array_equal(index.read(np.arange(3)), latents)


def test_pickles_of_an_older_numpy_are_read(tmp_path):
    latents = sd_moments(2)

    def old(payload):
        # numpy.core became numpy._core in NumPy 2. A frame's length and the name's own go down by one with it.
        payload = payload.replace(b"\x8c\x16numpy._core.multiarray", b"\x8c\x15numpy.core.multiarray")
        payload = payload.replace(b"\x8c\x13numpy._core.numeric", b"\x8c\x12numpy.core.numeric")
        return payload[:3] + (int.from_bytes(payload[3:11], "little") - 1).to_bytes(8, "little") + payload[11:]

    for protocol in (4, 5):
        payloads = [old(pickle.dumps(latent, protocol)) for latent in latents]
        assert b"numpy.core" in payloads[0]
        members = [(f"{i}.{end}", value) for i, p in enumerate(payloads) for end, value in (("latent", p), ("cls", b"1"))]
        write_tar(tmp_path / str(protocol) / "a.tar", members)
        assert np.array_equal(TarIndex.open(tmp_path / str(protocol), allow_pickle=True).read(np.arange(2)), latents)


@pytest.mark.parametrize("protocol", [0, 2])
def test_old_protocols_are_for_conversion_and_training_says_so(tmp_path, protocol):
    latents, _ = two_tars(tmp_path, pickle_members, protocol=protocol)
    assert np.array_equal(TarIndex.open(tmp_path, allow_pickle=True).read(np.arange(11)), latents)
    with pytest.raises(ValueError, match="train-0000.tar: 0000000.latent is a pickle of protocol 2.*prepare_latents.py convert"):
        TarLatents(tmp_path, allow_pickle=True)


def test_text_that_looks_like_bytes_is_not_taken_for_them(tmp_path):
    # Protocol 2 writes bytes as UTF-8 text. Zeros look the same in both, values of 128 and above do not.
    latents = np.stack([np.zeros((2, 2, 2), np.float32), np.full((2, 2, 2), np.float32(1.9))])
    write_tar(tmp_path / "a.tar", pickle_members(latents, [0, 1], protocol=2))
    assert np.array_equal(TarIndex.open(tmp_path, allow_pickle=True).read(np.arange(2)), latents)


def test_members_may_stand_in_any_order_among_others(tmp_path):
    latents = sd_moments(3)
    members = [
        ("README", b"of mine"), ("a/.hidden.latent.npy", b""), ("a/2.jpg", b"no image"), ("a/2.CLS.txt", b" 4\n"),
        ("a/2.latent.npy", npy(latents[0])), ("a/2.json", b"{}"), ("b/2.latent.npy", npy(latents[1])), ("b/2.cls", b"0"),
        ("1.latent", npy(latents[2])), ("1.cls", b"2"), ("0.json", b"{}"),
    ]  # fmt: skip
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        write_tar(tmp_path / f"{format}.tar", members, format)
        index = TarIndex.open(tmp_path / f"{format}.tar")
        assert np.array_equal(index.read(np.arange(3)), latents) and index.labels.tolist() == [4, 0, 2]
        assert index.name_of(1).endswith(f"{format}.tar: b/2.latent.npy")


def test_keys_may_recur_in_another_tar(tmp_path):
    latents = sd_moments(4)
    for i in range(2):
        write_tar(tmp_path / f"{i}.tar", npy_members(latents[2 * i : 2 * i + 2], [i, i]))
    assert TarIndex.open(tmp_path).labels.tolist() == [0, 0, 1, 1]


def test_more_tars_than_are_kept_open_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_OPEN_FILES", 2)
    latents = sd_moments(7)
    for i in range(7):
        write_tar(tmp_path / f"{i}.tar", npy_members(latents[i : i + 1], [i]))
    indices = np.array([6, 0, 3, 6, 1, 2, 5, 4])
    assert np.array_equal(TarIndex.open(tmp_path).read(indices), latents[indices])


# ----------------------------------------------------------------------------------------------------------------------
# What is detected.


def test_moments_are_detected_and_logged(tmp_path):
    two_tars(tmp_path)
    dataset = TarLatents(tmp_path)
    said = dict(kind="moments", scale_factor=SD_SCALE, autoencoder=SD_VAE, resolution=32, num_classes=5)
    assert vars(dataset.info) == said | dict(latents_mean=None, latents_std=None, encoder=None)
    assert dataset.stored_scale == 1
    said = "\n".join(dataset.statements)
    for part in ("kind=moments: 8 channels, the last 4 between -", "as log-variances are", "assumed, as latents have 4 channels"):
        assert part in said
    assert "num_classes=5: the largest label + 1" in said and "warning" not in said


def test_scaled_samples_are_read_as_the_autoencoder_makes_them(tmp_path):
    raw = sd_moments(20)[:, :4]
    for dtype in (np.float32, np.float16):
        folder = tmp_path / np.dtype(dtype).name
        stored = (raw * SD_SCALE).astype(dtype)
        write_tar(folder / "a.tar", npy_members(stored, range(20)))
        dataset = TarLatents(folder)
        assert (dataset.info.kind, dataset.stored_scale, dataset.channels) == ("sample", SD_SCALE, 4)
        fetched, _ = dataset.fetch(np.array([3, 19]), no_flips([3, 19]))
        assert fetched.dtype == torch.float32
        assert torch.equal(fetched, torch.from_numpy(stored[[3, 19]]).float() / SD_SCALE)


def test_unscaled_float16_stays_float16(tmp_path):
    stored = sd_moments(4).astype(np.float16)
    write_tar(tmp_path / "a.tar", npy_members(stored, range(4)))
    fetched, _ = TarLatents(tmp_path).fetch(np.array([1]), no_flips([1]))
    assert fetched.dtype == torch.float16 and np.array_equal(fetched.numpy(), stored[1:2])


def settle(latents, labels=(0, 1), **settings):
    return detect(torch.as_tensor(latents, dtype=torch.float32), labels=np.array(labels), **settings)


def test_what_is_given_goes_before_what_is_detected():
    latents = sd_moments(9)
    given = dict(kind="sample", scale_factor=0.3, autoencoder="mine", resolution=64, num_classes=10, stored_scale=2.0)
    info, stored_scale, statements = settle(latents, **given)
    assert vars(info) | {"stored_scale": stored_scale} == given | dict(latents_mean=None, latents_std=None, encoder=None)
    assert sum("as given" in s for s in statements) == 6
    assert any(s.startswith("warning: kind=sample, but the values look like kind=moments") for s in statements)


def test_scales_that_contradict_the_values_are_warned_about():
    _, _, statements = settle(sd_moments(9)[:, :4], kind="sample", known_stored_scale=SD_SCALE)
    assert any(s.startswith("warning: stored latents have a standard deviation of 5.") for s in statements)


@pytest.mark.parametrize(
    ("latents", "settings", "message"),
    [
        (np.full((2, 8, 4, 4), 3.0), {}, "cannot tell whether the 8 channels are .*set data.kind=sample or data.kind=moments"),
        (sd_moments(2)[:, :3], {"kind": "moments"}, "data.kind=moments needs an even number of channels .*not 3"),
        (sd_moments(2), {"kind": "mean"}, "data.kind=mean is not accepted; use sample | moments"),
        (sd_moments(2)[:, :4] * 0.5, {}, r"standard deviation of 2.*data.stored_scale=1 or data.stored_scale=0.18215"),
        (sd_moments(2), {"stored_scale": 0.18215}, "stored_scale=0.18215 .as given. does not go with kind=moments"),
        (sd_moments(2), {"stored_scale": -1.0}, "data.stored_scale=-1.0 must be a positive number"),
        (sd_moments(2)[:, :3], {}, "3 channels, which is not SD-VAE's 4; .*data.autoencoder=none where nothing decodes"),
        (np.ones((2, 1, 2, 2)) * [[[[3.0, -3]]]], {"autoencoder": "none"}, "data.scale_factor= is missing.* 0.1667 gives"),
        (np.ones((2, 1, 2, 2)), {"autoencoder": "none", "scale_factor": 1.0}, "data.resolution= is missing"),
        (sd_moments(2), {"num_classes": 1}, "the label of item 1 is 1, outside data.num_classes=1; set data.num_classes=2"),
        (sd_moments(2), {"labels": (0, -1)}, "the label of item 1 is -1"),
        (np.ones((2, 4, 4, 6)), {}, "latents of 4x6 are not square"),
        (np.full((2, 4, 4, 4), np.nan), {}, "hold NaN or Inf"),
    ],
)
def test_what_cannot_be_told_is_asked_for_by_name(latents, settings, message):
    with pytest.raises(ValueError, match=message):
        settle(latents, **settings, key_prefix="data.")


def test_moments_count_their_variance_in_the_scale_that_is_suggested():
    latents = np.concatenate([np.zeros((2, 2, 2, 2)), np.full((2, 2, 2, 2), np.log(4.0))], axis=1)
    with pytest.raises(ValueError, match="0.25 gives it the standard deviation 0.5"):
        settle(latents, kind="moments", autoencoder="none", resolution=2)


# ----------------------------------------------------------------------------------------------------------------------
# Pickles.


def test_pickles_need_the_flag_whether_or_not_the_tars_are_indexed(tmp_path):
    two_tars(tmp_path / "in", pickle_members)
    message = "in/train-0000.tar: member 0000000.latent is a pickle, and unpickling can run code .*data.allow_pickle=true"
    with pytest.raises(ValueError, match=message):
        TarLatents(tmp_path / "in", key_prefix="data.")
    TarLatents(tmp_path / "in", allow_pickle=True)
    (tmp_path / "in").rename(tmp_path / "moved_in")
    with pytest.raises(ValueError, match="moved_" + message):
        TarLatents(tmp_path / "moved_in", key_prefix="data.")


class Malicious:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, protocol):
    victim = tmp_path / "victim"
    for function, arguments in ((os.system, (f"touch {victim}",)), (eval, (f"open({str(victim)!r}, 'w')",))):
        payload = pickle.dumps(Malicious(function, *arguments), protocol)
        write_tar(tmp_path / "a.tar", [("0.latent", payload), ("0.cls", b"0")])
        name = r"builtins?__?\.eval|builtins\.eval" if function is eval else r"(posix|nt)\.system"
        with pytest.raises(ValueError, match=f"a.tar: member 0.latent is refused.*({name}).*only NumPy arrays are admitted"):
            TarLatents(tmp_path, allow_pickle=True)
        assert not victim.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((1, 2, 2)), "float64; latents are float32 or float16: save it again with .astype"),
        (np.zeros((1, 2, 2), ">f4"), "array of type >f4"),
        (np.zeros((1, 2, 2), np.int64), "array of type <i8"),
        (np.array([Malicious(os.system, "true"), None], dtype=object), r"names (posix|nt)\.system"),
        (np.array([None, 1], dtype=object), r"array of type \|O8"),
        (np.asfortranarray(np.arange(8, dtype=np.float32).reshape(2, 2, 2)), "Fortran order"),
        (np.float32(3), "names numpy.*scalar"),
        ({"latent": np.zeros(3, np.float32)}, "not of a NumPy array"),
        (np.dtype("f4"), "not of a NumPy array"),
        (np.ndarray, "not of a NumPy array"),
        (b"bytes", "not of a NumPy array"),
        (torch.zeros(2), "names torch"),
    ],
)
def test_pickles_of_anything_but_a_float_array_are_refused(value, message):
    for protocol in (2, 4, 5):
        with pytest.raises(ValueError, match="^x (is|does).*" + message):
            unpickle_array("x", pickle.dumps(value, protocol))


def test_damaged_pickles_are_refused():
    good = pickle.dumps(sd_moments(1)[0], 4)
    for payload in (b"", b"not a pickle", good[:40], good[:-20], b"\x80\x04N."):
        with pytest.raises(ValueError, match="^x is "):
            unpickle_array("x", payload)
    # What the array says of itself is not believed: four values, said to be five.
    lying = pickle.dumps(np.zeros(4, np.float32), 4).replace(b"K\x04\x85", b"K\x05\x85")
    with pytest.raises(ValueError, match="x does not hold an array of the shape that it names"):
        unpickle_array("x", lying)


# ----------------------------------------------------------------------------------------------------------------------
# Bad tars.


def good_members():
    return list(npy_members(sd_moments(3), [0, 1, 2]))


def replaced(name, payload):
    return [(n, payload if n == name else p) for n, p in good_members()]


FORTRAN = np.asfortranarray(sd_moments(1)[0])


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (good_members()[:-1], "a.tar: sample 0000002 has a .cls but no .latent member"),
        (good_members()[1:], "a.tar: sample 0000000 has a .latent but no .cls member"),
        (good_members() + good_members()[1:2], "member 0000000.latent.npy: the key has a second latent.npy"),
        (good_members() + [("0000001.cls.txt", b"1")], "member 0000001.cls.txt: the key has a second cls.txt"),
        (replaced("0000001.cls", b"cat"), "member 0000001.cls holds b'cat', not a label"),
        (replaced("0000001.cls", b"1.0"), "holds b'1.0', not a label"),
        (replaced("0000001.cls", b"-1"), "holds b'-1', not a label"),
        (replaced("0000001.cls", b""), "holds b'', not a label"),
        (replaced("0000001.latent.npy", npy(sd_moments(1)[0].astype(np.float64))), "0000001.latent.npy is float64; latents are"),
        (replaced("0000001.latent.npy", npy(sd_moments(1)[0].astype(np.int32))), "0000001.latent.npy is int32; latents are"),
        (replaced("0000001.latent.npy", npy(FORTRAN)), "0000001.latent.npy is in Fortran order"),
        (replaced("0000001.latent.npy", npy(sd_moments(1)[0])[:-4]), "0000001.latent.npy is truncated"),
        (replaced("0000001.latent.npy", b"nothing"), "0000001.latent.npy is not in .npy format"),
        (replaced("0000001.latent.npy", npy(np.array([{}], dtype=object))), "0000001.latent.npy is object; latents are"),
        (
            replaced("0000001.latent.npy", npy(sd_moments(1, size=8)[0])),
            r"0000001.latent.npy is float32 \[8, 8, 8\], but .*0000000.latent.npy is float32 \[8, 4, 4\]",
        ),
        (replaced("0000001.latent.npy", npy(sd_moments(1)[0].astype(np.float16))), "is float16 .*, but .* is float32"),
        ([("0.latent.npy", npy(sd_moments(2))), ("0.cls", b"0")], r"0.latent.npy is float32 \[2, 8, 4, 4\]; need \[C, h, w\]"),
        ([("0.jpg", b"image"), ("0.json", b"{}")], "the tars hold no latents: .*these hold .jpg, .json"),
    ],
)
def test_bad_members_are_named(tmp_path, members, message):
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(ValueError, match=message):
        TarIndex.open(tmp_path)
    assert not (tmp_path / ".latents-index.safetensors").exists()


def test_nan_is_named_by_its_member(tmp_path):
    latents = sd_moments(4)
    latents[2, 1, 0, 0] = np.nan
    write_tar(tmp_path / "a.tar", npy_members(latents, range(4)))
    with pytest.raises(ValueError, match="a.tar: 0000002.latent.npy holds NaN or Inf"):
        TarLatents(tmp_path)


def test_truncated_tars_are_refused_wherever_they_end(tmp_path):
    write_tar(tmp_path / "whole.tar", good_members())
    whole = (tmp_path / "whole.tar").read_bytes()
    with tarfile.open(tmp_path / "whole.tar") as tar:
        ends = [m.offset_data + m.size for m in tar]
    (tmp_path / "whole.tar").unlink()
    padded = [-(-end // 512) * 512 for end in ends]  # cut between two members, tarfile alone takes what is left for whole
    for size in (0, 100, 512, 700, ends[1] - 5, ends[-1] - 1, *padded):
        (tmp_path / "a.tar").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="a.tar is truncated or damaged"):
            TarIndex.open(tmp_path)
    (tmp_path / "a.tar").write_bytes(whole[: padded[2]] + b"garbage " * 64 + whole[padded[2] + 512 :])
    with pytest.raises(ValueError, match="a.tar is truncated or damaged"):
        TarIndex.open(tmp_path)


def test_links_are_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        member = tarfile.TarInfo("0.latent.npy")
        member.type, member.linkname = tarfile.SYMTYPE, "elsewhere"
        tar.addfile(member)
    with pytest.raises(ValueError, match="member 0.latent.npy is a link or sparse"):
        TarIndex.open(tmp_path)


def test_compressed_tars_are_refused_with_the_fix(tmp_path):
    for name in ("a.tar.gz", "a.tgz", "a.tar"):  # the last says nothing of its compression
        folder = tmp_path / name
        folder.mkdir()
        with tarfile.open(folder / name, "w:gz") as tar:
            tar.addfile(tarfile.TarInfo("x"))
        with pytest.raises(ValueError, match=rf"{name} is compressed \(gzip\).*decompress it first"):
            TarIndex.open(folder)


def test_a_tar_whose_first_member_begins_like_bzip2_is_read(tmp_path):
    latents = sd_moments(2)
    members = [(name.replace("000000", "BZh"), payload) for name, payload in npy_members(latents, [0, 1])]
    write_tar(tmp_path / "a.tar", members, tarfile.USTAR_FORMAT)
    assert (tmp_path / "a.tar").read_bytes().startswith(b"BZh0.cls")
    assert np.array_equal(TarIndex.open(tmp_path).read(np.arange(2)), latents)
    with tarfile.open(tmp_path / "b.tar", "w:bz2") as tar:
        tar.addfile(tarfile.TarInfo("x"))
    with pytest.raises(ValueError, match=r"b.tar is compressed \(bzip2\)"):
        TarIndex.open(tmp_path)


def test_folders_without_tars_are_refused(tmp_path):
    with pytest.raises(ValueError, match="data.path=.*nowhere does not exist"):
        TarLatents(tmp_path / "nowhere", key_prefix="data.")
    with pytest.raises(ValueError, match="holds no tars"):
        TarLatents(tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# The index.


@pytest.fixture
def scans(monkeypatch):
    """A list that grows by the name of every tar that is scanned."""
    scanned, scan = [], webdataset._scan_tar

    def counted(file, *rest):
        scanned.append(file.name)
        return scan(file, *rest)

    monkeypatch.setattr(webdataset, "_scan_tar", counted)
    return scanned


def test_tars_are_scanned_once(tmp_path, scans):
    two_tars(tmp_path)
    first = TarLatents(tmp_path).fingerprint()
    assert scans == ["train-0000.tar", "train-0001.tar"]
    assert TarLatents(tmp_path).fingerprint() == first and len(scans) == 2
    assert sorted(f.name for f in tmp_path.iterdir() if not f.name.startswith(".")) == scans
    TarLatents(tmp_path / "train-0001.tar")  # a tar of its own has an index of its own
    TarLatents(tmp_path)
    assert len(scans) == 3


def test_the_index_is_rebuilt_when_a_tar_changes(tmp_path, scans):
    latents, labels = two_tars(tmp_path)
    before = TarLatents(tmp_path).fingerprint()
    write_tar(tmp_path / "train-0001.tar", npy_members(latents[6:], labels[6:] + 1))
    os.utime(tmp_path / "train-0001.tar", ns=(0, time.time_ns() + 10**9))  # the same size, at another time
    dataset = TarLatents(tmp_path)
    assert len(scans) == 4 and dataset.labels.tolist() == [*labels[:6], *labels[6:] + 1]
    assert dataset.fingerprint() != before
    (tmp_path / "train-0000.tar").unlink()
    assert TarLatents(tmp_path).labels.tolist() == (labels[6:] + 1).tolist()


def test_a_damaged_index_is_made_again(tmp_path, scans):
    latents, _ = two_tars(tmp_path)
    TarLatents(tmp_path)
    index = tmp_path / ".latents-index.safetensors"
    for damaged in (b"", b"junk" * 100, index.read_bytes()[:-50]):
        index.write_bytes(damaged)
        assert np.array_equal(TarIndex.open(tmp_path).read(np.arange(11)), latents)
    assert len(scans) == 8


def test_a_folder_that_cannot_be_written_to_costs_only_time(tmp_path, scans, caplog):
    two_tars(tmp_path)
    # Permissions do not stop root, who runs many a container: folders stand where the files should go.
    for name in (".latents-index.lock", ".latents-index.safetensors"):
        (tmp_path / name / "x").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert len(TarLatents(tmp_path)) == len(TarLatents(tmp_path)) == 11
    assert len(scans) == 4 and "cannot keep the index of the tars in" in caplog.text
    assert not list(tmp_path.glob(".*tmp*"))


def test_of_several_processes_one_scans(tmp_path, scans, monkeypatch):
    two_tars(tmp_path)
    lock = webdataset.lock_descriptor

    def as_if_waited_for(*arguments):
        """Another process holds the lock, and leaves an index."""
        monkeypatch.setattr(webdataset, "lock_descriptor", lock)
        TarIndex.open(tmp_path)
        lock(*arguments)

    monkeypatch.setattr(webdataset, "lock_descriptor", as_if_waited_for)
    assert len(TarIndex.open(tmp_path)) == 11 and len(scans) == 2


# ----------------------------------------------------------------------------------------------------------------------
# In training.


def test_loader_workers_do_not_change_the_batches_of_tars(tmp_path):
    two_tars(tmp_path)
    dataset = TarLatents(tmp_path)
    order = BatchOrder(len(dataset), 4, seed=0, start_step=0, num_steps=5, slices=[slice(0, 4)], with_flips=dataset.has_flips)
    with_workers, without = (list(read_batches(dataset, order, num_workers, pin_memory=False)) for num_workers in (2, 0))
    assert len(with_workers) == len(without) == 5
    for (a, a_labels), (b, b_labels) in zip(with_workers, without):
        assert torch.equal(a, b) and torch.equal(a_labels, b_labels)


def test_a_fingerprint_of_tars_changes_with_the_data_and_not_with_the_place(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tar(tmp_path / name / "x.tar", npy_members(sd_moments(9, seed=seed), range(9)))
    a, b, c = (TarLatents(tmp_path / name).fingerprint() for name in "abc")
    assert a == b != c
