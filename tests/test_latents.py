"""Shards: reading returns what was written, and errors name what is wrong."""

import errno
import json
import math
import os
import re
from dataclasses import asdict

import numpy as np
import pytest
import torch
from conftest import checked, make_shard
from safetensors.torch import load_file, save_file
from test_edm import ListedRandom

from common.errors import Unreadable, UserError
from common.images import to_uint8
from latents import autoencoders, shards
from latents.batches import BatchOrder
from latents.dataset import LatentDataset
from latents.shards import ShardInfo, is_intact, latents_for_network, restore_latents, write_shard
from training.data import open_training_latents, warn_of_unusual_scale

INFO = ShardInfo(kind="sample", scale_factor=0.5, autoencoder="identity", resolution=4, num_classes=3)
CPU = torch.device("cpu")


def test_a_shard_uses_the_documented_keys_and_header(tmp_path):
    file, statistics = tmp_path / "a.safetensors", dict(latents_mean=[0.1, -1 / 3], latents_std=[1e-7, 123456.789])
    latents, labels = make_shard(file, **statistics)
    tensors = load_file(file)
    assert torch.equal(tensors["latents"], latents) and torch.equal(tensors["labels"], labels)
    size = int.from_bytes(file.read_bytes()[:8], "little")
    about = json.loads(json.loads(file.read_bytes()[8 : 8 + size])["__metadata__"]["about"])
    assert re.fullmatch("[0-9a-f]{32}", about.pop("hash"))
    assert about == {
        "kind": "sample", "scale_factor": 0.5, "autoencoder": "identity", "resolution": 4, "num_classes": 3,
        "latents_mean": [0.1, -1 / 3], "latents_std": [1e-7, 123456.789],
    }  # fmt: skip
    info = LatentDataset(tmp_path).info
    assert (info.latents_mean, info.latents_std) == tuple(statistics.values())


def test_any_changed_byte_of_a_shard_is_found(tmp_path):
    file = tmp_path / "a.safetensors"
    make_shard(file, num_items=2, autoencoder="sd-vae:vä")
    good = file.read_bytes()
    assert is_intact(file)
    for old, new in ((b"0.5", b"0.5"), (b"0.5", b"0.6"), (good[-1:], bytes([good[-1] ^ 1]))):
        file.write_bytes(new.join(good.rsplit(old, 1)))
        assert is_intact(file) == (file.read_bytes() == good)


def test_a_shard_on_an_unreadable_disk_is_not_called_damaged(tmp_path, monkeypatch):
    make_shard(file := tmp_path / "a.safetensors")

    def fail(*args, **settings):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(shards, "load_file", fail)
    with pytest.raises(Unreadable, match="a.safetensors cannot be read: OSError: .*Input/output error"):
        is_intact(file)


def test_a_shard_may_be_empty_and_its_neighbours_keep_their_items(tmp_path):
    first, _ = make_shard(tmp_path / "a.safetensors", num_items=3, seed=1)
    write_shard(tmp_path / "b.safetensors", first[:0], torch.zeros(0, dtype=torch.int64), INFO)
    last, _ = make_shard(tmp_path / "c.safetensors", num_items=2, seed=2)
    indices = np.arange(5)
    assert torch.equal(LatentDataset(tmp_path).fetch(indices, indices < 0)[0], torch.cat([first, last]))


def test_items_are_fetched_by_index_across_shards_in_the_requested_order(tmp_path):
    first, first_labels = make_shard(tmp_path / "a.safetensors", num_items=5, seed=1, flips=True)
    second, second_labels = make_shard(tmp_path / "b.safetensors", num_items=3, seed=2, flips=True)
    (tmp_path / ".tmp_c.safetensors").write_bytes(b"half written")  # not part of the data
    dataset = LatentDataset(tmp_path)
    assert len(dataset) == 8 and (dataset.channels, dataset.height, dataset.width) == (2, 4, 4) and dataset.has_flips
    indices, flips = np.array([7, 0, 5, 4, 0]), np.array([False, True, True, False, False])
    latents, labels = dataset.fetch(indices, flips)
    both, both_labels = torch.cat([first, second]), torch.cat([first_labels, second_labels])
    expected = [both[i].flip(-1) if flip else both[i] for i, flip in zip(indices, flips)]
    assert torch.equal(latents, torch.stack(expected)) and torch.equal(labels, both_labels[indices])


def test_moments_are_sampled_then_normalised_and_scaled(tmp_path):
    stored = torch.tensor([2.0, math.log(9.0)]).reshape(1, 2, 1, 1)  # mean 2, variance 9
    info = ShardInfo(kind="moments", scale_factor=0.5, autoencoder="identity", resolution=1, num_classes=1)
    noise = ListedRandom(*(torch.full((1, 1, 1, 1), value) for value in (1.0, -2.0, 1.0)))
    assert latents_for_network(stored, info, noise).item() == pytest.approx((2 + 3 * 1.0) * 0.5)
    assert latents_for_network(stored, info, noise).item() == pytest.approx((2 - 3 * 2.0) * 0.5)
    info = ShardInfo("moments", 0.5, "identity", 1, 1, latents_mean=(4.0,), latents_std=(10.0,))
    assert latents_for_network(stored, info, noise).item() == pytest.approx((2 + 3 - 4) / 10 * 0.5)
    make_shard(tmp_path / "a.safetensors", channels=2, kind="moments")
    assert LatentDataset(tmp_path).channels == 2  # half of the stored channels


def test_each_channel_is_normalised_for_the_network_and_restored_for_the_autoencoder():
    info = ShardInfo("sample", 0.5, "none", 4, 3, latents_mean=(1.5, -20.0), latents_std=(0.25, 40.0))
    stored = torch.tensor([1.25, 1.5, -20.0, 60.0], dtype=torch.float16).reshape(1, 2, 1, 2)
    seen = latents_for_network(stored, info)
    assert seen.flatten().tolist() == [-0.5, 0.0, 0.0, 1.0] and seen.dtype == torch.float32
    assert torch.allclose(restore_latents(seen, info), stored.float())
    plain = ShardInfo("sample", 0.3, "none", 4, 3)
    x = torch.randn(2, 2, 3, 3)
    assert torch.equal(latents_for_network(x, plain), x * 0.3) and torch.equal(restore_latents(x, plain), x / 0.3)


def test_the_identity_changes_with_the_data(tmp_path):
    others = dict(b={}, c=dict(seed=1), d=dict(flips=True), e=dict(latents_mean=(0.1, 0.0), latents_std=(1.0, 1.0)))
    for name, settings in {"a": {}, **others}.items():
        make_shard(tmp_path / name / "x.safetensors", **settings)
    a, b, *differing = (LatentDataset(tmp_path / name).hash for name in "abcde")
    assert a == b and a not in differing


def changed(info=None, **tensors):
    """Return a function that writes a shard with other metadata or tensors than a valid one."""

    def write(file):
        good = {"latents": torch.zeros(2, 2, 4, 4), "labels": torch.zeros(2, dtype=torch.int64)}
        metadata = {"about": json.dumps(asdict(INFO) | (info or {}))}
        save_file({k: v for k, v in (good | tensors).items() if v is not None}, file, metadata=metadata)

    return write


def test_numbers_of_a_header_may_be_text(tmp_path):
    changed({"scale_factor": "0.5", "num_classes": "3", "resolution": "4", "latents_mean": ["0", 1], "latents_std": [1, "2"]})(
        file := tmp_path / "x.safetensors"
    )
    info = LatentDataset(file).info
    assert (info.scale_factor, info.num_classes, info.resolution) == (0.5, 3, 4)
    assert (info.latents_mean, info.latents_std) == ([0, 1], [1, 2])


def cut_off(file):
    changed()(file)
    os.truncate(file, file.stat().st_size - 300)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (cut_off, "is truncated or not a safetensors file"),
        (changed({"scale_factor": float("nan")}), "in its header, scale_factor=nan: Input should be "),
        (changed({"kind": "mean"}), "in its header, kind='mean': Input should be 'sample' or 'moments'"),
        (changed({"latents_mean": [0, 0]}), "in its header, latents_mean and latents_std need a number for each channel"),
        (changed({"latents_mean": [0, 0], "latents_std": [1, 0]}), r"in its header, latents_std\[1\]=0: "),
        (changed({"latents_mean": [0, float("nan")], "latents_std": [1, 1]}), r"in its header, latents_mean\[1\]=nan: "),
        (changed({"latents_mean": [0], "latents_std": [1]}), "needs latents_mean and latents_std of 2 channels"),
        (changed(labels=torch.tensor([0, 3])), "needs labels from 0 to 2"),
        (changed(labels=torch.tensor([-1, 0])), "needs labels from 0 to 2"),
        (changed(labels=torch.tensor([0])), r"needs labels \[M\] of int64"),
        (changed(labels=None), "needs latents and labels"),
        (changed(latents=torch.zeros(2, 2, 4, 4, dtype=torch.int64)), r"needs latents \[M, C, H, W\] of float16 or float32"),
        (changed(latents=torch.zeros(2, 0, 4, 4)), r"needs latents \[M, C, H, W\] with C, H and W above 0"),
        (lambda file: os.mkfifo(file), "is not a regular file, or the link is broken"),
        (lambda file: file.symlink_to("nowhere"), "is not a regular file, or the link is broken"),
        (changed(latents=torch.zeros(2, 4, 4)), r"latents torch.float32 \[2, 4, 4\].*needs latents \[M, C, H, W\]"),
        (changed(latents_flip=torch.zeros(1, 2, 4, 4)), "needs latents_flip like latents"),
        (changed(images=torch.zeros(9, dtype=torch.uint8)), r"needs image_offsets \[M \+ 1\]"),
        (changed(latents=torch.zeros(2, 2, 4, 4).half()), "does not belong with .*a.safetensors"),
        (changed(latents=torch.zeros(2, 2, 5, 5)), "does not belong with .*a.safetensors"),
        (changed({"scale_factor": 0.25}), "does not belong with .*a.safetensors"),
        (changed({"latents_mean": [0, 0], "latents_std": [1, 1]}), "does not belong with .*a.safetensors: .*latents_mean"),
    ],
)
def test_a_bad_shard_is_refused_by_name(tmp_path, write, message):
    make_shard(tmp_path / "a.safetensors")
    write(tmp_path / "b.safetensors")
    with pytest.raises(UserError, match=f"b.safetensors .*{message}") as refused:
        LatentDataset(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ([], "missing keys: shards, settings.;"),
        ({"settings": {}}, "missing keys: shards.;"),
        ({"shards": 3, "settings": {}}, "shards=3: Input should be"),
        ({"shards": {"a": 1}, "settings": {}}, "shards.a=1: Input should be"),
        ({"shards": {f"{i}": i for i in range(30)}, "settings": 3}, "shards.0=0: .*; shards.19=19: [^;]*; and 11 more.;"),
        ({"shards": {}, "settings": {"background": 3}}, "settings.background=3: "),
        ({"shards": {}, "settings": {"part": "half"}}, "settings.part='half': Input should be 'all', "),
        ({"shards": {}, "settings": {}, "class_names": [1]}, r"class_names\[0\]=1: Input should be a valid string\);"),
        ({"shards": {}, "settings": {}, "left_out": [{"name": "a"}]}, r"missing keys: left_out\[0\].problem\);"),
    ],
)
def test_a_manifest_with_other_types_is_refused_by_name(tmp_path, manifest, message):
    make_shard(tmp_path / "a.safetensors")
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=rf"manifest.json is not a manifest of latent shards \({message}") as refused:
        LatentDataset(tmp_path)
    assert "\n" not in str(refused.value)


def test_the_error_about_a_long_manifest_is_short(tmp_path):
    make_shard(tmp_path / "a.safetensors")
    (tmp_path / "manifest.json").write_text(json.dumps({"shards": {}, "settings": {}, "left_out": [{"name": "a"}] * 5000}))
    with pytest.raises(UserError, match=r"missing keys: left_out\[0\].problem, .*, and 4900 more\);") as refused:
        LatentDataset(tmp_path)
    assert len(str(refused.value)) < 3000


def test_a_manifest_that_is_a_pipe_or_a_broken_link_is_refused_at_once(tmp_path):
    make_shard(tmp_path / "a.safetensors")
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(UserError, match="manifest.json is not a regular file"):
        LatentDataset(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").symlink_to("nowhere")
    with pytest.raises(UserError, match="manifest.json is not a regular file, or the link is broken"):
        LatentDataset(tmp_path)


def test_a_bad_shard_is_not_written_and_an_existing_one_is_not_overwritten(tmp_path):
    latents, labels = torch.zeros(3, 2, 4, 4), torch.tensor([0, 1, 2])
    bad = latents.clone()
    bad[1, 0, 2, 2] = float("nan")
    for arguments, message in (
        ((latents, labels + 1), "needs labels from 0 to 2"),
        ((latents, labels.int()), "labels torch.int32"),
        ((latents.bfloat16(), labels), "latents torch.bfloat16"),
        ((bad, labels), "latents of item 1 hold NaN or infinity"),
    ):
        with pytest.raises(UserError, match=message):
            write_shard(tmp_path / "a.safetensors", *arguments, INFO)
    with pytest.raises(UserError, match=f"{tmp_path} holds no latent shards"):
        LatentDataset(tmp_path)
    write_shard(tmp_path / "a.safetensors", latents, labels, INFO)
    with pytest.raises(UserError, match="a.safetensors exists; nothing was written"):
        write_shard(tmp_path / "a.safetensors", latents + 1, labels, INFO)
    assert torch.equal(load_file(tmp_path / "a.safetensors")["latents"], latents)


# ----------------------------------------------------------------------------------------------------------------------
# The order of the items in training.


def order(num_items=10, batch_size=4, seed=0, images_seen=0, num_batches=5, slices=(slice(0, 4),), with_flips=False):
    return BatchOrder(num_items, batch_size, seed, images_seen, num_batches, list(slices), with_flips)


def test_every_epoch_is_a_permutation_even_if_a_batch_spans_two_epochs():
    stream = np.concatenate([indices for indices, _ in order()])  # 5 steps of 4 = 2 epochs of 10
    assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))
    assert list(stream[:10]) != list(stream[10:])
    assert list(stream) == list(np.concatenate([indices for indices, _ in order()]))
    assert list(stream) != list(np.concatenate([indices for indices, _ in order(seed=1)]))
    indices, _ = order(num_items=3, batch_size=8, slices=[slice(0, 8)]).global_batch(0)
    assert sorted(np.bincount(indices, minlength=3)) == [2, 3, 3]  # two epochs and a part of the third


def test_the_order_resumes_at_any_step_and_slices_make_up_the_global_batch():
    whole = [indices.tolist() for indices, _ in order()]
    assert [indices.tolist() for indices, _ in order(images_seen=12, num_batches=2)] == whole[3:]
    halves = [[i.tolist() for i, _ in order(slices=[part])] for part in (slice(0, 2), slice(2, 4))]  # two processes
    assert [a + b for a, b in zip(*halves)] == whole
    micro = [i.tolist() for i, _ in order(slices=[slice(0, 2), slice(2, 4)])]  # two micro-batches
    assert [a + b for a, b in zip(micro[::2], micro[1::2])] == whole


def test_another_batch_size_continues_the_epoch_after_the_images_that_were_seen():
    whole = np.concatenate([indices for indices, _ in order()])
    for size in (2, 8):
        later = order(batch_size=size, slices=[slice(0, size)], images_seen=12).global_batch(0)[0]
        assert later.tolist() == whole[12 : 12 + size].tolist()


def test_flips_are_drawn_again_in_each_epoch():
    coins = order(num_items=1000, batch_size=1000, slices=[slice(0, 1000)], num_batches=2, with_flips=True)
    first, second = (flips for _, flips in coins)
    assert abs(first.mean() - 0.5) < 0.05 and (first != second).any()
    assert not np.concatenate([flips for _, flips in order()]).any()


# ----------------------------------------------------------------------------------------------------------------------
# Autoencoders.


def test_identity_latents_become_the_pixels_of_the_images_and_are_clamped():
    pixels = torch.tensor([[0, 128], [255, 3]], dtype=torch.float32)
    images = to_uint8(autoencoders.build("identity", CPU, 1).decode((pixels / 127.5 - 1)[None, None]))
    assert images.shape == (1, 2, 2, 3) and images.dtype == torch.uint8
    assert images[0, :, :, 0].tolist() == pixels.tolist() and torch.equal(images[..., 0], images[..., 2])
    assert to_uint8(torch.tensor([[[[-3.0, 3.0]]]]))[0, 0, :, 0].tolist() == [0, 255]
    between = torch.tensor([[[[-3.0, 9.6 / 127.5 - 1, 3.0]]]])
    assert [to_uint8(between, how)[0, 0, 1, 0].item() for how in ("round", "truncate")] == [10, 9]
    assert to_uint8(between, "truncate")[0, 0, :, 0].tolist() == [0, 9, 255]
    with pytest.raises(UserError, match="decoded images hold NaN"):
        to_uint8(torch.full((1, 3, 2, 2), math.nan))


def test_an_sd_vae_loads_from_a_local_folder_and_processes_large_batches_in_slices(tmp_path, monkeypatch):
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    kl = AutoencoderKL(block_out_channels=(8,), latent_channels=4, norm_num_groups=4).eval()
    kl.save_pretrained(tmp_path / "vae")
    vae = autoencoders.build(f"sd-vae:{tmp_path / 'vae'}", CPU, 4)
    latents, images = torch.randn(5, 4, 4, 4), torch.randn(5, 3, 4, 4)
    assert torch.allclose(vae.decode(latents), kl.decode(latents).sample, atol=1e-6)
    for method, name, limit, batch in (
        (vae.decode, "decode", "MAX_DECODED_PIXELS", latents),
        (vae.encode_moments, "encode", "MAX_ENCODED_PIXELS", images),
    ):
        whole, sizes, run_part = method(batch), [], getattr(vae.vae, name)
        monkeypatch.setattr(vae.vae, name, lambda part, s=sizes, run=run_part: s.append(len(part)) or run(part))
        for num_pixels, expected in ((32, [2, 2, 1]), (1, [1] * 5)):
            sizes.clear()
            monkeypatch.setattr(autoencoders, limit, num_pixels)
            assert torch.allclose(method(batch), whole, atol=1e-6) and sizes == expected


def test_a_missing_autoencoder_and_a_wrong_number_of_channels_are_refused(tmp_path):
    for spec, message in (
        (f"sd-vae:{tmp_path / 'nowhere'}", "autoencoder=sd-vae:.*nowhere: there is no such folder"),
        ("identity", "autoencoder=identity shows latents as pixels, which have 1 or 3 channels, not 4"),
        ("none", "autoencoder=none: the shards name none; set sampling.autoencoder="),
    ):
        with pytest.raises(UserError, match=message):
            autoencoders.build(spec, CPU, 4)


def test_replacing_any_shard_changes_the_identity_even_without_hashes_in_the_headers(tmp_path):
    for i in range(100):
        make_shard(tmp_path / f"{i:03}.safetensors", num_items=5, num_classes=1, seed=i)
    hashes = [LatentDataset(tmp_path).hash]
    (tmp_path / "057.safetensors").unlink()
    latents, labels = make_shard(tmp_path / "057.safetensors", num_items=5, num_classes=1, seed=1000)
    hashes.append(LatentDataset(tmp_path).hash)
    metadata = {"about": json.dumps(asdict(LatentDataset(tmp_path).info))}
    for value in (1.0, 2.0):
        latents[3, 0, 2, 2] = value
        save_file({"latents": latents, "labels": labels}, tmp_path / "057.safetensors", metadata=metadata)
        hashes.append(LatentDataset(tmp_path).hash)
    assert len(set(hashes)) == 4


@pytest.mark.parametrize(("scale_factor", "warns"), [(0.02, True), (0.5, False), (1.9, False), (10.0, True)])
def test_an_unusual_scale_gives_a_warning(tmp_path, caplog, scale_factor, warns):
    make_shard(tmp_path / "a.safetensors", scale_factor=scale_factor)  # latents with a standard deviation of 1
    cfg = checked(["data=custom", f"data.path={tmp_path}"])
    warn_of_unusual_scale(cfg, open_training_latents(cfg.data))
    assert ("the network sees latents with a standard deviation of" in caplog.text) == warns
