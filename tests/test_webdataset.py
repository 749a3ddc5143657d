"""Tars of latents: every item is read or named in an error, and pickles run no code."""

import io
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch
from conftest import Malicious

from common.errors import UserError
from latents.prepare.convert import ConvertConfig, convert
from latents.prepare.formats import Tars
from latents.tars import check_single_split


def sd_moments(num_items, size=4, seed=0):
    """Return moments like those of SD-VAE, [N, 8, h, h] float32: means with deviation 5.5, log-variances -20 to -9."""
    rng = np.random.default_rng(seed)
    means, log_variances = rng.normal(0, 5.5, (num_items, 4, size, size)), rng.uniform(-20, -9, (num_items, 4, size, size))
    return np.concatenate([means, log_variances], axis=1).astype(np.float32)


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def write_tar(file, members, format=tarfile.PAX_FORMAT):
    """Write members (name, bytes) like webdataset's TarWriter: times are fractions, so each member has a pax header."""
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
    """Yield members like those of MaskDiT's lmdb2wds.py, in the order into which webdataset sorts them."""
    for i, (latent, label) in enumerate(zip(latents, labels), start):
        yield f"{i:07d}.cls", str(label).encode()
        yield f"{i:07d}.latent", pickle.dumps(latent, protocol)


def two_tars(folder, members=npy_members, num_items=11, **settings):
    """Write a folder of two tars. Returns latents and labels."""
    latents, labels = sd_moments(num_items), np.arange(num_items) * 7 % 5
    write_tar(folder / "train-0000.tar", members(latents[:6], labels[:6], **settings))
    write_tar(folder / "train-0001.tar", members(latents[6:], labels[6:], start=6, **settings))
    return latents, labels


def check(source, latents, labels, flips=None):
    """Compare every item, read at once, one by one, and across files."""
    num = len(labels)
    assert source.labels.dtype == np.int64 and source.labels.tolist() == list(labels)
    assert tuple(source.shape) == latents.shape[1:] and source.has_flips == (flips is not None)
    for start, stop in [(0, num), (1, num - 1), (num // 2, num)] + [(i, i + 1) for i in range(num)]:
        read = source.read(start, stop)
        assert list(read) == ["latents", "latents_flip"][: 1 + (flips is not None)]
        for name, expected in zip(read, (latents, flips)):
            assert read[name].dtype == torch.float32 and torch.equal(read[name], torch.as_tensor(expected[start:stop]))


@pytest.mark.parametrize(
    ("members", "settings"),
    [(npy_members, {})] + [(pickle_members, {"protocol": protocol}) for protocol in (0, 2, 5)],
)
def test_every_item_and_label_is_read(tmp_path, members, settings):
    latents, labels = two_tars(tmp_path, members, **settings)
    check(Tars(tmp_path), latents, labels)
    check(Tars(tmp_path / "train-0001.tar"), latents[6:], labels[6:])


def test_pickles_of_an_older_numpy_and_half_precision_are_read(tmp_path):
    latents, labels = sd_moments(3).astype(np.float16), [2, 0, 1]
    for core in (b"numpy.core", b"numpy._core"):
        members = pickle_members(latents, labels, protocol=2)
        members = [(name, p.replace(b"numpy._core", core).replace(b"numpy.core", core)) for name, p in members]
        write_tar(tmp_path / "a.tar", members)
        check(Tars(tmp_path), latents.astype(np.float32), labels)


def test_tars_of_several_parts_of_a_data_set_are_refused(tmp_path):
    latents, labels = sd_moments(2), [0, 1]

    def write(folder, *names):
        for name in names:
            write_tar(tmp_path / folder / name, npy_members(latents, labels))
        return tmp_path / folder

    for folder, *names in (
        ("a", "in1k-train-0000.tar", "in1k-validation-00.tar"),
        ("b", "Training_0.tar", "test.tar"),
        ("c", "train/00.tar", "val/00.tar"),
    ):
        words = f"several parts of a data set .{names[0]}, {names[1]}.; give a folder with one part, or"
        with pytest.raises(UserError, match=words):
            check_single_split(write(folder, *names), "or")
    with pytest.raises(UserError, match="several parts of a data set .*, or rename the tars to use them together"):
        convert(ConvertConfig(str(tmp_path / "a"), str(tmp_path / "out"), kind="moments"))
    check_single_split(write("d", "train-0.tar", "training/latest.tar", "more.tar"), "")
    check_single_split(write("e", "test-data/train-0.tar", "test-data/train-1.tar"), "")


def test_members_may_have_any_order_and_tars_may_be_in_subfolders(tmp_path):
    latents, labels = sd_moments(4), [3, 1, 0, 2]
    members = sorted(npy_members(latents, labels), key=lambda member: member[0].rpartition(".")[2], reverse=True)
    write_tar(tmp_path / "below" / "a.TAR", [("n01/0000000.json", b"{}"), *members, ("README", b"text")])
    write_tar(tmp_path / "below" / "b.tar", npy_members(latents, labels))  # the same keys in another tar
    source = Tars(tmp_path / "below")
    assert source.labels.tolist() == labels * 2
    assert torch.equal(source.read(3, 5)["latents"], torch.from_numpy(latents[[3, 0]]))
    assert Tars(tmp_path).labels.tolist() == labels * 2


@pytest.mark.parametrize("protocol", [0, 4])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, protocol):
    victim = tmp_path / "victim"
    inside = np.array([Malicious(os.system, f"touch {victim}"), None], dtype=object)
    for value in (Malicious(os.system, f"touch {victim}"), Malicious(eval, f"open({str(victim)!r}, 'w')"), inside):
        write_tar(tmp_path / "a.tar", [("0.latent", pickle.dumps(value, protocol)), ("0.cls", b"0")])
        with pytest.raises(UserError, match=r"it refers to .*(system|eval), but only NumPy arrays are accepted"):
            Tars(tmp_path)
        assert not victim.exists()


def good_members():
    return list(npy_members(sd_moments(3), [0, 1, 2]))


def pickled(payload):
    return good_members() + [("0000003.latent", payload), ("0000003.cls", b"0")]


def replaced(name, payload):
    return [(n, payload if n == name else p) for n, p in good_members()]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (good_members()[:-1], "a.tar: the key 0000002 lacks"),
        (good_members() + [("0000001.npy", b"")], "0000001.latent.npy and 0000001.npy share a key; keep one of them"),
        (good_members()[1:], "a.tar: the key 0000000 lacks its .cls"),
        (good_members() + [("1.5.latent", b"")], "member 1.5.latent has a dot in its key"),
        (replaced("0000001.cls", b"cat"), "a.tar .*whole numbers in .cls. cannot be read: .*'cat'"),
        (replaced("0000001.latent.npy", npy(sd_moments(1)[0])[:-4]), "item 1 .*0000001.latent.npy"),
        (replaced("0000001.latent.npy", b"nothing"), "item 1 .*0000001.latent.npy.*pickle"),
        (replaced("0000001.latent.npy", npy(np.array([{}], dtype=object))), "item 1 .*0000001.latent.npy.*allow_pickle"),
        (replaced("0000001.latent.npy", npy(sd_moments(1, size=8)[0])), r"0000001.latent.npy.*\[8, 8, 8\].*need .*\[8, 4, 4\]"),
        (replaced("0000002.latent.npy", npy(np.full((8, 4, 4), np.nan))), "item 2 .*0000002.latent.npy.*not finite"),
        ([("0.jpg", b"image"), ("0.json", b"{}")], "cannot be read"),
        (pickled(pickle.dumps({"latent": np.zeros(3)})), "item 3 .*0000003.latent"),
        (pickled(pickle.dumps(torch.zeros(2))), "item 3 .*0000003.latent.*only NumPy arrays are accepted"),
        (pickled(pickle.dumps(sd_moments(1)[0])[:-20]), "item 3 .*0000003.latent"),
    ],
)
def test_bad_members_are_named(tmp_path, members, message):
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(UserError, match=message):
        Tars(tmp_path).read(0, len(members) // 2)


def test_tars_that_are_truncated_damaged_or_joined_are_refused(tmp_path):
    write_tar(tmp_path / "whole.tar", good_members())
    whole = (tmp_path / "whole.tar").read_bytes()
    with tarfile.open(tmp_path / "whole.tar") as tar:
        ends = [m.offset_data + m.size for m in tar]
    (tmp_path / "whole.tar").unlink()
    padded = [-(-end // 512) * 512 for end in ends]  # cut between two members: tarfile would take the rest for a whole tar
    contents = [whole[:size] for size in (0, 100, 512, 700, ends[1] - 5, ends[-1] - 1, *padded)]
    contents += [whole[: padded[2]] + b"garbage " * 64 + whole[padded[2] + 512 :], whole + whole]
    for content in contents:
        (tmp_path / "a.tar").write_bytes(content)
        with pytest.raises(UserError, match="a.tar .*(cannot be read|is damaged)"):
            Tars(tmp_path)


def test_compressed_tars_are_refused_and_not_left_out(tmp_path):
    for name in ("b.tar.gz", "b.tgz", "b.tar"):  # the last name does not show the compression
        two_tars(tmp_path / name)
        with tarfile.open(tmp_path / name / name, "w:gz") as tar:
            tar.addfile(tarfile.TarInfo("x"))
        with pytest.raises(UserError, match=f"{name} .an uncompressed tar .* cannot be read"):
            Tars(tmp_path / name)
