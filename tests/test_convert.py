"""Latents in every format of another project become shards with the same items, and train."""

import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image
from test_formats import as_mean_and_std, write_fast_dit, write_lightningdit, write_lmdb, write_repa
from test_webdataset import npy_members, pickle_members, sd_moments, write_tar

import prepare_latents
from common.errors import UserError
from latents.autoencoders import SD_SCALE
from latents.dataset import LatentDataset
from latents.prepare import write
from latents.shards import latents_for_network

NUM_ITEMS = 23
LABELS = [(7 * i) % 10 for i in range(NUM_ITEMS)]


def convert(path, output, *settings):
    prepare_latents.main(["convert", f"path={path}", f"output={output}", "shard_size=10", *settings])
    return LatentDataset(output)


def fetch_all(dataset, flip=False):
    latents, labels = dataset.fetch(np.arange(len(dataset)), np.full(len(dataset), flip))
    return latents.float().numpy(), labels.tolist()


def lmdb_of(folder, moments):
    write_lmdb(folder, moments, LABELS)


def tars_of(folder, moments):
    write_tar(folder / "a.tar", pickle_members(moments[:12], LABELS[:12]))
    write_tar(folder / "b.tar", npy_members(moments[12:], LABELS[12:], start=12))


def fast_dit_of(folder, moments):
    files = [[i] for i in range(NUM_ITEMS - 3)] + [[NUM_ITEMS - 3, NUM_ITEMS - 2], [NUM_ITEMS - 1]]
    write_fast_dit(folder, moments[:, :4] * np.float32(SD_SCALE), LABELS, files)


def repa_of(folder, moments):
    write_repa(folder / "vae-sd", as_mean_and_std(moments), LABELS)


def lightningdit_of(folder, moments):
    samples = torch.from_numpy(moments[:, :4])
    write_lightningdit(folder / "latents_rank00_shard000.safetensors", samples[:12], LABELS[:12])
    write_lightningdit(folder / "latents_rank01_shard000.safetensors", samples[12:], LABELS[12:])


@pytest.mark.parametrize(
    ("make", "kind", "flips", "settings"),
    [
        (lmdb_of, "moments", False, []),
        (tars_of, "moments", False, ["kind=moments"]),
        (fast_dit_of, "sample", False, []),
        (repa_of, "moments", False, []),
        (lightningdit_of, "sample", True, []),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_item_of_another_format_is_converted_and_passes_inspection(tmp_path, make, kind, flips, settings, dtype, caplog):
    moments = sd_moments(NUM_ITEMS, size=8)
    (tmp_path / "theirs").mkdir()
    make(tmp_path / "theirs", moments)
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
    before = {file.name: file.read_bytes() for file in dataset.files}
    convert(tmp_path / "theirs", tmp_path / "ours", *settings, f"dtype={dtype}")  # again: nothing is left to do
    assert {file.name: file.read_bytes() for file in dataset.files} == before
    with caplog.at_level(logging.INFO):
        prepare_latents.main(["inspect", f"path={tmp_path / 'ours'}", "grid=none"])
    assert "no problems were found" in caplog.text


def test_converted_latents_without_images_are_compared_by_their_means(tmp_path, caplog):
    moments = sd_moments(NUM_ITEMS)
    moments[5, :4] = moments[3, :4]  # an equal mean in float16, with another variance
    lmdb_of(tmp_path / "in", moments)
    caplog.set_level("INFO")
    dataset = convert(tmp_path / "in", tmp_path / "out")
    assert "1 images are copies of earlier ones" in caplog.text
    assert dataset.image_hashes[3] == dataset.image_hashes[5] and len(np.unique(dataset.image_hashes)) == NUM_ITEMS - 1
    whole = convert(tmp_path / "in", tmp_path / "whole", "dtype=float32")
    assert whole.shared_with(dataset).all()


def test_values_that_cannot_be_stored_and_missing_settings_are_refused_before_anything_is_written(tmp_path):
    moments = sd_moments(NUM_ITEMS, size=8)
    tars_of(tmp_path, moments)
    out = tmp_path / "out"
    for settings, message in (
        ([], "give kind="),
        (["kind=moments", "num_classes=9"], "num_classes=9"),
        (["kind=moments", "num_classes=2000000"], "num_classes=2000000"),
        (["kind=moments", "resolution=100000"], "resolution=100000"),
        (["kind=moments", "keep_images=jpeg"], "keep_images=jpeg needs REPA.s folder images"),
    ):
        with pytest.raises(UserError, match=message):
            convert(tmp_path, out, *settings)
    assert not out.exists()
    moments[5, 0, 0, 0] = 1e6
    write_tar(tmp_path / "large" / "a.tar", npy_members(moments, LABELS))
    with pytest.raises(UserError, match="latents of item 5 hold NaN or infinity in torch.float16"):
        convert(tmp_path / "large", out, "kind=moments")


def test_a_wrong_scale_is_found_by_inspect(tmp_path):
    write_tar(tmp_path / "a.tar", npy_members(sd_moments(NUM_ITEMS, size=8)[:, :4] * np.float32(SD_SCALE), LABELS))
    convert(tmp_path / "a.tar", tmp_path / "wrong", "kind=sample", "scale=1")
    with pytest.raises(UserError, match="a standard deviation of 0.18.* cannot be right: .* or scale= of convert"):
        prepare_latents.main(["inspect", f"path={tmp_path / 'wrong'}", "grid=none"])
    convert(tmp_path / "a.tar", tmp_path / "right", "kind=sample", f"scale={SD_SCALE}")
    prepare_latents.main(["inspect", f"path={tmp_path / 'right'}", "grid=none"])


@pytest.mark.parametrize("make", [lmdb_of, fast_dit_of, repa_of, lightningdit_of])
def test_changed_values_under_the_same_names_are_another_data_set(tmp_path, make):
    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        make(tmp_path / name, sd_moments(NUM_ITEMS, size=8, seed=seed))
    convert(tmp_path / "a", tmp_path / "out")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with pytest.raises(UserError, match="already holds another data set .made of other items."):
        convert(tmp_path / "b", tmp_path / "out")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_scale_and_resolution_come_from_the_given_autoencoder(tmp_path):
    fast_dit_of(tmp_path / "theirs", sd_moments(NUM_ITEMS, size=8))
    with pytest.raises(UserError, match="give scale_factor=, resolution="):
        convert(tmp_path / "theirs", tmp_path / "out", "autoencoder=sd-vae:stabilityai/sdxl-vae")
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"scaling_factor": 0.25, "block_out_channels": [8, 8, 8]}')
    info = convert(tmp_path / "theirs", tmp_path / "ours", f"autoencoder=sd-vae:{tmp_path / 'vae'}").info
    assert (info.scale_factor, info.resolution) == (0.25, 32)
    (tmp_path / "vae" / "config.json").write_text('{"block_out_channels": [8, 8, 8, 8]}')
    info = convert(tmp_path / "theirs", tmp_path / "unscaled", f"autoencoder=sd-vae:{tmp_path / 'vae'}").info
    assert (info.scale_factor, info.resolution) == (0.18215, 64)
    shifted = {"scaling_factor": 1.5, "shift_factor": 0.25, "latent_channels": 4, "block_out_channels": [8, 8]}
    (tmp_path / "vae" / "config.json").write_text(json.dumps(shifted))
    info = convert(tmp_path / "theirs", tmp_path / "shifted", f"autoencoder=sd-vae:{tmp_path / 'vae'}").info
    assert (info.scale_factor, info.latents_mean, info.latents_std) == (1.5, [0.25] * 4, [1.0] * 4)
    info = convert(tmp_path / "theirs", tmp_path / "raw", f"autoencoder=sd-vae:{tmp_path / 'vae'}", "normalize=false").info
    assert (info.scale_factor, info.latents_mean, info.latents_std) == (1.5, None, None)


def lightningdit_with_statistics(folder, channels=4):
    """Write a folder like LightningDiT's extraction. Returns latents, mean and std, which differ between channels."""
    g = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.3, 4, channels).reshape(1, -1, 1, 1)
    latents = spread * torch.randn(NUM_ITEMS, channels, 8, 8, generator=g) + 3 * spread.flip(1) - 5
    write_lightningdit(folder / "latents_rank00_shard000.safetensors", latents[:12], LABELS[:12])
    write_lightningdit(folder / "latents_rank00_shard001.safetensors", latents[12:], LABELS[12:])
    mean, std = latents.mean(dim=[0, 2, 3], keepdim=True), latents.std(dim=[0, 2, 3], keepdim=True)
    torch.save({"mean": mean, "std": std}, folder / "latents_stats.pt")
    return latents, mean, std


def test_the_images_next_to_repas_latents_are_paired_with_them_by_their_order(tmp_path):
    rng, levels = np.random.default_rng(0), [20, 90, 160, 230]
    mean_std = np.abs(rng.standard_normal((4, 8, 4, 4))).astype(np.float32)
    mean_std[:, 0] = np.array(levels)[:, None, None]
    write_repa(tmp_path / "theirs" / "vae-sd", mean_std, [0, 1, 0, 1])
    pictures = tmp_path / "theirs" / "images"
    entries = []
    for i in (2, 0, 3, 1):  # dataset.json may list images in any order
        name = f"{i // 2:05d}/img{i:08d}.png"
        (pictures / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((32, 32, 3), levels[i], np.uint8)).save(pictures / name)
        entries.append([name, i % 2])
    (pictures / "dataset.json").write_text(json.dumps({"labels": entries}))
    dataset = convert(tmp_path / "theirs", tmp_path / "ours", "keep_images=jpeg")
    latents, labels, images = dataset.fetch_with_images(np.arange(4), np.zeros(4, dtype=bool))
    assert labels.tolist() == [0, 1, 0, 1] and latents[:, 0, 0, 0].tolist() == levels
    assert np.abs(images.numpy().astype(int).mean(axis=(1, 2, 3)) - levels).max() < 2
    entries[0][1] = 1
    (pictures / "dataset.json").write_text(json.dumps({"labels": entries}))
    with pytest.raises(UserError, match="do not hold the same items: their labels differ"):
        convert(tmp_path / "theirs", tmp_path / "other", "keep_images=jpeg")


def seen_by_network(dataset, flip=False):
    return latents_for_network(torch.from_numpy(fetch_all(dataset, flip)[0]), dataset.info)


def test_lightningdits_latents_are_normalised_by_its_own_statistics(tmp_path, caplog):
    latents, mean, std = lightningdit_with_statistics(tmp_path / "theirs", channels=32)
    with caplog.at_level(logging.INFO):
        dataset = convert(tmp_path / "theirs", tmp_path / "ours", "autoencoder=va-vae:vavae.pt", "dtype=float32")
        prepare_latents.main(["inspect", f"path={tmp_path / 'ours'}", "grid=none"])
    assert (dataset.info.scale_factor, dataset.info.autoencoder, dataset.info.resolution) == (1.0, "va-vae:vavae.pt", 128)
    for flip in (False, True):
        expected = ((latents.flip(-1) if flip else latents) - mean) / std
        assert torch.allclose(seen_by_network(dataset, flip), expected, atol=1e-6)
    assert "the network input has a standard deviation of 1.000 over all channels, 2.00 times sigma_data=0.5" in caplog.text


def test_convert_measures_statistics_itself_or_leaves_them_out(tmp_path):
    latents, mean, _ = lightningdit_with_statistics(tmp_path / "theirs")
    settings = ["autoencoder=none", "resolution=64", "dtype=float32"]
    with pytest.raises(UserError, match="give scale_factor="):
        convert(tmp_path / "theirs", tmp_path / "no", *settings, "normalize=false")
    plain = convert(tmp_path / "theirs", tmp_path / "plain", *settings, "normalize=false", "scale_factor=0.1")
    assert plain.info.latents_mean is None and torch.allclose(seen_by_network(plain), latents * 0.1)
    (tmp_path / "theirs" / "latents_stats.pt").unlink()
    measured = convert(tmp_path / "theirs", tmp_path / "measured", *settings, "normalize=true")
    assert np.allclose(measured.info.latents_mean, mean.flatten(), atol=1e-5)
    assert np.allclose(measured.info.latents_std, latents.std(dim=[0, 2, 3], correction=0), rtol=1e-5)
    with pytest.raises(UserError, match="already holds another data set .*normalize: True -> None"):
        convert(tmp_path / "theirs", tmp_path / "measured", *settings, "scale_factor=1.0")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_interrupted_normalising_is_completed_by_the_next_start(tmp_path, monkeypatch, number):
    lightningdit_with_statistics(tmp_path / "theirs")
    settings = ["autoencoder=none", "resolution=64", "normalize=true"]
    whole = convert(tmp_path / "theirs", tmp_path / "whole", *settings)
    files_written, write_atomically = [], write.write_atomically

    def stop_before_a_file(path, content):
        if path.suffix == ".safetensors":
            files_written.append(path)
            if len(files_written) == 3 + number + 1:  # the three shards are written first, and then each again
                raise KeyboardInterrupt
        write_atomically(path, content)

    monkeypatch.setattr(write, "write_atomically", stop_before_a_file)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "theirs", tmp_path / "stopped", *settings)
    monkeypatch.undo()
    stopped = convert(tmp_path / "theirs", tmp_path / "stopped", *settings)
    assert [file.read_bytes() for file in stopped.files] == [file.read_bytes() for file in whole.files]
    assert not list((tmp_path / "stopped").glob(".*"))
