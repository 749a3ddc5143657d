"""Representation alignment: the loss, where its gradient goes, whole runs, and images and features beside latents."""

import io
import json
import math
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import LAUNCH_2, TINY, composed, finish, forget_accelerate, losses, make_shard, metrics, start
from PIL import Image
from safetensors.torch import load_file, save_file

import dit
import prepare_latents
from common.errors import UserError
from common.randomness import SeedRandom
from configs import schema
from edm import EDM
from evaluations import digits_encoder
from evaluations.digits_encoder import DigitsEncoder
from extras.alignment import Alignment, Projector, TappedNetwork, alignment_loss
from extras.report import rows
from latents.autoencoders import to_uint8
from latents.shards import LatentDataset, ShardInfo, pack_images, write_shard
from latents.webdataset import TarLatents
from routing_module import Route
from sit import SiT
from training import build
from training.load import load_config, load_network

REPA = ["alignment=repa", "alignment.encoder=digits", "alignment.block=4", "alignment.projector_width=16"]
CPU = torch.device("cpu")


def tiny_network(routes=(), **settings):
    torch.manual_seed(0)
    sizes = dict(input_size=8, patch_size=2, in_channels=1, num_classes=3, depth=6, width=16, num_heads=2)
    net = dit.DiT(**sizes, routes=routes, init="official_tread", **settings).train()
    return net


def batch(num_items=3):
    g = torch.Generator().manual_seed(1)
    x, t = torch.randn(num_items, 1, 8, 8, generator=g), torch.rand(num_items, generator=g)
    return x, t, torch.arange(num_items) % 3, {"drop_labels": torch.zeros(num_items, dtype=torch.bool)}


def scores(num_items=3, num_routes=1, num_tokens=16):
    return torch.rand(num_items, num_routes, num_tokens, generator=torch.Generator().manual_seed(2))


def cosine_by_hand(projected, patches, positions):
    """Minus the mean cosine, in Python's own numbers, token by token."""
    cosines = []
    for sample, patch_of, kept in zip(projected.tolist(), patches.tolist(), positions.tolist()):
        for token, position in zip(sample, kept):
            patch = patch_of[position]
            dot = sum(a * b for a, b in zip(token, patch))
            cosines.append(dot / math.sqrt(sum(a * a for a in token)) / math.sqrt(sum(b * b for b in patch)))
    return -sum(cosines) / len(cosines)


# ----------------------------------------------------------------------------------------------------------------------
# The loss.


def test_the_loss_of_all_tokens_is_minus_the_mean_cosine():
    g = torch.Generator().manual_seed(3)
    projected, patches = torch.randn(2, 5, 7, generator=g), torch.randn(2, 5, 7, generator=g)
    everywhere = torch.arange(5).expand(2, 5)
    assert alignment_loss(projected, patches).item() == pytest.approx(cosine_by_hand(projected, patches, everywhere), abs=1e-6)
    assert alignment_loss(3 * patches, patches).item() == pytest.approx(-1, abs=1e-6)


def test_inside_a_route_each_token_meets_the_patch_of_its_own_position():
    g = torch.Generator().manual_seed(4)
    patches, ids_keep = torch.randn(2, 6, 7, generator=g), torch.tensor([[0, 2, 5], [1, 3, 4]])
    projected = torch.randn(2, 3, 7, generator=g)
    expected = cosine_by_hand(projected, patches, ids_keep)
    assert alignment_loss(projected, patches, ids_keep).item() == pytest.approx(expected, abs=1e-6)
    # What a wrong gather would give: the first tokens' patches, or those of the other sample.
    for wrong in (torch.arange(3).expand(2, 3), ids_keep.flip(0)):
        assert abs(alignment_loss(projected, patches, wrong).item() - expected) > 1e-3


def test_the_cosine_is_computed_in_float32():
    g = torch.Generator().manual_seed(5)
    projected, patches = (torch.randn(2, 5, 700, generator=g) for _ in range(2))
    loss = alignment_loss(projected.bfloat16(), patches.half())
    exact = alignment_loss(projected.bfloat16().double(), patches.half().double())
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), abs=1e-6)


def test_tokens_and_patches_of_other_positions_are_refused():
    with pytest.raises(ValueError, match=r"tokens \(2, 3, 7\) and patches \(2, 1, 7\) are not of the same positions"):
        alignment_loss(torch.ones(2, 3, 7), torch.ones(2, 1, 7))


# ----------------------------------------------------------------------------------------------------------------------
# The tap.


@pytest.mark.parametrize("tap", range(1, 7))
def test_the_tap_hands_out_the_tokens_after_its_block_and_changes_nothing(tap):
    net, (x, t, y, kwargs) = tiny_network([Route(0.5, 1, 3)]), batch()
    kwargs["route_scores"] = scores()
    seen = []
    for block in net.blocks:
        block.register_forward_hook(lambda _, args, out: seen.append(out))
    plain = net(x, t, y, **kwargs)
    seen.clear()
    out, tokens, ids_keep = net(x, t, y, tap=tap, **kwargs)
    assert torch.equal(out, plain)
    assert torch.equal(tokens, seen[tap - 1])
    if 2 <= tap <= 4:  # the route is blocks 1 to 3, counted from 0
        assert torch.equal(ids_keep, kwargs["route_scores"][:, 0].topk(8).indices.sort().values)
    else:
        assert ids_keep is None and tokens.shape == (3, 16, 16)


def test_a_tap_outside_of_the_network_is_refused():
    net, (x, t, y, kwargs) = tiny_network(), batch()
    for tap in (0, 7):
        with pytest.raises(ValueError, match=f"tap={tap} is outside a network of 6 blocks; use 1 to 6"):
            net(x, t, y, tap=tap, **kwargs)


@pytest.mark.parametrize("routes", [(), [Route(0.5, 1, 3)]])
def test_the_gradient_reaches_the_blocks_up_to_the_tap_and_none_after(routes):
    net, (x, t, y, kwargs) = tiny_network(routes), batch()
    projector = Projector(16, 8, 5)
    tapped = TappedNetwork(net, 3)
    if routes:
        kwargs["route_scores"] = scores()
    tapped(x, t, y, **kwargs)
    patches = torch.randn(3, 16, 5, generator=torch.Generator().manual_seed(6))
    alignment = Alignment(projector, lambda shown: shown, fetch=None, tap=3, weight=0.5)
    alignment.loss(projector, tapped, patches).backward()
    for i, block in enumerate(net.blocks):
        gradients = [p.grad for p in block.parameters()]
        if i < 3:
            assert all(g is not None and g.any() for g in gradients)
        else:
            assert gradients == [None] * len(gradients)
    assert net.final_layer.linear.weight.grad is None
    assert all(p.grad is not None and p.grad.any() for p in projector.parameters())


@pytest.mark.parametrize("diffusion", [EDM(), SiT()])
def test_a_diffusion_calls_a_tapped_network_as_it_calls_the_network(diffusion):
    net, (x, _, y, kwargs) = tiny_network(), batch()
    plain, tapped = (diffusion.loss(one, x, y, SeedRandom([1, 2, 3], CPU), **kwargs) for one in (net, TappedNetwork(net, 2)))
    assert torch.equal(plain, tapped)


# ----------------------------------------------------------------------------------------------------------------------
# Whole runs.


def final_weights(run, step=6, file="model.safetensors"):
    return load_file(run / "checkpoints" / f"step_{step:07d}" / file)


def assert_equal_weights(first, second):
    assert list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("off", ["alignment.weight=0", "alignment.stop_step=0"])
def test_alignment_that_is_off_is_bit_equal_to_none(train, off):
    none, zero = train("none", "train.grad_clip_norm=0.5"), train("zero", *REPA, off, "train.grad_clip_norm=0.5")
    assert losses(zero) == losses(none)
    assert_equal_weights(final_weights(zero), final_weights(none))
    assert_equal_weights(final_weights(zero, file="ema.safetensors"), final_weights(none, file="ema.safetensors"))


def test_the_first_loss_is_that_without_alignment_and_later_ones_are_not(train):
    none, repa = train("none"), train("repa", *REPA)
    assert losses(repa)[1] == pytest.approx(losses(none)[1], rel=1e-6)  # logged without alignment's part
    assert losses(repa)[6] != losses(none)[6]


def test_tokens_learn_to_resemble_the_encoders(train):
    run = train("run", *REPA, "train.num_steps=40", "train.batch_size=32", "checkpoint.every=40")
    aligned = [record["alignment_loss"] for record in metrics(run)]
    assert sum(aligned[-5:]) < sum(aligned[:5]) - 5 * 0.1 and all(-0.5 <= value <= 0.5 for value in aligned)


@pytest.mark.parametrize(
    "extra",
    [
        ["model=dit", "diffusion=sit"],
        ["alignment.stop_step=3", "train.grad_clip_norm=0.5", "train.grad_accum_steps=2"],
        ["alignment.stop_step=5", "data.num_workers=1", "train.precision=bf16", "alignment.block=9"],
        ["train.activation_checkpointing=blocks", "model=lightningdit_tread", "train.log_every=4", "checkpoint.every=3"],
    ],
)
def test_a_resumed_aligned_run_equals_an_uninterrupted_one_exactly(train, extra):
    whole = train("whole", *REPA, *extra)
    cut = train("cut", *REPA, "train.num_steps=4", *extra)
    train("cut", *REPA, *extra)
    shared = [4, 6] if "train.log_every=4" in extra else [1, 2, 3, 4, 5, 6]
    assert [metrics(cut)[i]["step"] for i in range(len(shared))] == shared
    assert losses(cut) == losses(whole)
    assert_equal_weights(final_weights(cut), final_weights(whole))
    assert_equal_weights(final_weights(cut, file="projector.safetensors"), final_weights(whole, file="projector.safetensors"))


def test_micro_batches_do_not_change_an_aligned_run(train):
    plain, split = train("plain", *REPA), train("split", *REPA, "train.grad_accum_steps=4", "data.num_workers=1")
    assert losses(split) == pytest.approx(losses(plain), rel=1e-5)
    found, expected = ([record["alignment_loss"] for record in metrics(run)] for run in (split, plain))
    assert found == pytest.approx(expected, rel=1e-4)


def test_the_projector_lies_beside_a_model_that_a_plain_network_loads(train):
    run = train("run", *REPA)
    folder = run / "checkpoints" / "step_0000006"
    assert "projector.safetensors" in json.loads((folder / "manifest.json").read_text())
    cfg = load_config(folder)
    net = load_network(folder, cfg, "ema", CPU)
    assert net.state_dict().keys() == final_weights(run).keys()
    assert list(load_file(folder / "projector.safetensors")) == ["0.bias", "0.weight", "2.bias", "2.weight", "4.bias", "4.weight"]
    without = train("without")
    assert not (without / "checkpoints" / "step_0000006" / "projector.safetensors").exists()


def test_another_run_starts_from_an_aligned_ones_weights_and_from_all_of_it_only_with_its_alignment(train):
    first = train("first", *REPA)
    train("second", f"init_from={first}")
    train("third", *REPA, f"init_from={first}", "alignment.projector_width=24")
    train("fourth", *REPA, f"init_from={first}", "init_state=all", "train.num_steps=8")
    with pytest.raises(UserError, match="goes on with the optimizer of its projector: .*alignment.name: 'repa' -> 'none'"):
        train("fifth", f"init_from={first}", "init_state=all", "train.num_steps=8")


def test_a_resume_without_the_alignment_or_its_projector_is_refused(train):
    run = train("run", *REPA, "train.num_steps=4")
    with pytest.raises(UserError, match="alignment.name: 'repa' -> 'none'"):
        train("run")
    with pytest.raises(UserError, match="alignment.weight: 0.5 -> 0.25"):
        train("run", *REPA, "alignment.weight=0.25")
    assert load_config(run / "checkpoints" / "step_0000004").alignment.weight == 0.5


def test_a_resume_with_other_weights_of_the_encoder_is_refused(train, monkeypatch, tmp_path):
    run = train("run", *REPA, "train.num_steps=4")
    weights = load_file(digits_encoder.ENCODER_FILE)
    save_file({name: 2 * value for name, value in weights.items()}, tmp_path / "other.safetensors")
    monkeypatch.setattr(digits_encoder, "ENCODER_FILE", tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=f"{run}.* alignment.weights=None are other weights of the encoder"):
        train("run", *REPA)


def test_checkpoints_from_before_alignment_have_none():
    stored = schema.TrainConfig.model_fields["alignment"].default
    assert stored.name == "none"


def test_two_processes_give_the_aligned_losses_of_one(train, tmp_path):
    extra = [*REPA, "train.batch_size=8", "train.num_steps=12", "alignment.stop_step=8", "train.grad_clip_norm=0.5"]
    extra += ["train.log_every=4", "checkpoint.every=6", "checkpoint.keep_last=2"]
    for _ in range(2):
        code, output = finish(start("train.py", *TINY, f"output_dir={tmp_path}", "name=two", *extra, launcher=LAUNCH_2))
        assert code == 0, output
        shutil.rmtree(tmp_path / "two" / "checkpoints" / "step_0000012")  # it goes on from between two lines of metrics
    one = train("one", *extra)
    for name in ("loss", "alignment_loss"):
        found, expected = ([record[name] for record in metrics(run)] for run in (tmp_path / "two", one))
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert expected[-1] == 0 != expected[0]
    accumulated = [*extra, "train.parallel=fsdp", "train.grad_accum_steps=2"]
    code, output = finish(start("train.py", *TINY, f"output_dir={tmp_path}", "name=fsdp", *accumulated, launcher=LAUNCH_2))
    assert code == 0, output
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(one), rel=1e-5)
    projectors = (final_weights(run, 12, "projector.safetensors") for run in (tmp_path / "fsdp", one))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=5e-5) for a, b in zip(*(p.values() for p in projectors)))


# ----------------------------------------------------------------------------------------------------------------------
# What the encoder is shown: images and features beside latents.


def smooth_images(num_items, size=16):
    """uint8 [num_items, size, size, 3] that JPEG keeps well, brighter to the right."""
    rows, columns = np.meshgrid(np.linspace(0, 1, size), np.linspace(0, 1, size), indexing="ij")
    values = [np.stack([columns * 255, rows * 10 * i, np.full_like(rows, 20 * i)], axis=-1) for i in range(num_items)]
    return np.stack(values).astype(np.uint8)


def jpeg(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", quality=95, subsampling=0)
    return file.getvalue()


def shards_with_images(folder, num_items=6, flips=True, **info):
    """Two shards of latents [3, 8, 8] of images of 16x16 pixels; returns the images."""
    images, g = smooth_images(num_items), torch.Generator().manual_seed(0)
    latents, labels = torch.randn(num_items, 3, 8, 8, generator=g), torch.arange(num_items) % 3
    about = ShardInfo(**dict(kind="sample", scale_factor=0.5, autoencoder="none", resolution=16, num_classes=3) | info)
    for part in (slice(0, 4), slice(4, num_items)):
        shown = pack_images([jpeg(image) for image in images[part]])
        flipped = latents[part].flip(-1) if flips else None
        write_shard(folder / f"{part.start}.safetensors", latents[part], labels[part], about, flipped, shown)
    return images


def test_images_are_read_by_index_from_all_shards_and_mirrored_with_their_latents(tmp_path):
    images = shards_with_images(tmp_path)
    dataset = LatentDataset(tmp_path)
    indices, flips = np.array([5, 0, 3, 4]), np.array([False, True, False, True])
    latents, labels, shown = dataset.fetch_with_images(indices, flips)
    assert shown.shape == (4, 16, 16, 3) and shown.dtype == torch.uint8
    for pixels, index, flip in zip(shown.numpy().astype(int), indices, flips):
        expected = images[index][:, ::-1] if flip else images[index]
        assert np.abs(pixels - expected).mean() < 3
        assert np.abs(pixels[:, ::-1] - expected).mean() > 30
    plain = dataset.fetch(indices, flips)
    assert torch.equal(latents, plain[0]) and torch.equal(labels, plain[1])


def test_latents_that_are_pixels_are_their_own_images(tmp_path):
    latents, _ = make_shard(tmp_path / "a.safetensors", channels=1, size=8, flips=True)
    dataset = LatentDataset(tmp_path)
    _, _, shown = dataset.fetch_with_images(np.array([3, 2]), np.array([False, True]))
    expected = torch.stack([latents[3, 0], latents[2, 0].flip(-1)]).clamp(-1, 1)
    assert torch.equal(shown, ((expected + 1) * 127.5).round().to(torch.uint8)[..., None].expand(-1, -1, -1, 3))


def test_other_images_are_another_data_set(tmp_path):
    for name, shift in (("a", 0), ("b", 9)):
        shown = pack_images([jpeg(image + shift) for image in smooth_images(4)])
        about = ShardInfo("sample", 0.5, "none", 16, 3)
        write_shard(
            tmp_path / name / "a.safetensors", torch.ones(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64), about, None, shown
        )
    first, second = (LatentDataset(tmp_path / name).fingerprint() for name in "ab")
    assert first != second


def test_images_that_do_not_belong_to_the_latents_are_refused(tmp_path):
    latents, labels, about = torch.ones(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64), ShardInfo("sample", 0.5, "none", 16, 3)
    packed = pack_images([jpeg(image) for image in smooth_images(3)])
    with pytest.raises(UserError, match="image_offsets do not cut images into 2 files"):
        write_shard(tmp_path / "a.safetensors", latents, labels, about, None, packed)
    with pytest.raises(UserError, match="holds one of images and image_offsets; need both"):
        write_shard(tmp_path / "a.safetensors", latents, labels, about, None, {"images": packed["images"]})
    with pytest.raises(UserError, match="features and the header's encoder=None do not belong together"):
        write_shard(tmp_path / "a.safetensors", latents, labels, about, None, {"features": torch.ones(2, 4, 5).half()})
    broken = pack_images([b"not a picture", jpeg(smooth_images(1, size=8)[0])])
    write_shard(tmp_path / "a.safetensors", latents, labels, about, None, broken)
    dataset = LatentDataset(tmp_path)
    for index, message in ((0, "image 0 is no JPEG file"), (1, "image 1 has 8x8 pixels instead of 16x16")):
        with pytest.raises(UserError, match=message):
            dataset.fetch_with_images(np.array([index]), np.array([False]))


def folder_of_images(path, num_items=6):
    for i, image in enumerate(smooth_images(num_items, size=16)):
        file = path / f"class{i % 2}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return path


def test_encode_keeps_images_and_features_and_a_change_of_header_keeps_them_too(tmp_path):
    source = folder_of_images(tmp_path / "images")
    encode = partial(prepare_latents.encode, str(source), resolution=8, autoencoder="identity", kind="sample", num_workers=0)
    # sigma_data writes the headers again; shards of 4 make two of them.
    how = dict(flips=True, keep_images="jpeg", features=True, encoder="digits", shard_size=4, batch_size=3, sigma_data=0.5)
    forget_accelerate()
    encode(str(tmp_path / "out"), **how, cpu_threads=1)
    dataset = LatentDataset(tmp_path / "out")
    assert dataset.stores_images and dataset.features_shape == (16, 48) and dataset.info.encoder == "digits"
    everything = np.arange(6)
    for flip in (False, True):
        flips = np.full(6, flip)
        stored, _, pixels = dataset.fetch_with_images(everything, flips)
        exact = to_uint8(stored.float())
        assert (pixels.int() - exact.int()).abs().float().mean() < 4
        features = dataset.fetch_with_features(everything, flips)[2]
        assert torch.allclose(features.float(), DigitsEncoder().encode(exact)[1], atol=0.02)
    forget_accelerate()
    with pytest.raises(UserError, match="already holds another data set .*keep_images: 'jpeg' -> None"):
        encode(str(tmp_path / "out"), **how | {"keep_images": "none"}, cpu_threads=1)


def test_inspect_draws_the_images_beside_what_the_latents_decode_to_and_names_a_broken_one(tmp_path, caplog):
    source = folder_of_images(tmp_path / "images")
    forget_accelerate()
    how = dict(resolution=8, autoencoder="identity", kind="sample", num_workers=0, keep_images="jpeg", cpu_threads=1)
    prepare_latents.encode(str(source), str(tmp_path / "out"), **how)
    with caplog.at_level("INFO"):
        prepare_latents.inspect(str(tmp_path / "out"), grid=str(tmp_path / "grid.png"), cpu_threads=1, sigma_data=0.8)
    assert "with images, as JPEG files" in caplog.text
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.width == 8 * (64 + 4) + 4  # pairs: 8 columns
    about = ShardInfo("sample", 0.5, "none", 16, 3)
    shown = pack_images([b"not a picture"] * 4)
    g = torch.Generator().manual_seed(0)
    write_shard(tmp_path / "bad.safetensors", torch.randn(4, 3, 8, 8, generator=g), torch.arange(4) % 3, about, None, shown)
    with pytest.raises(UserError) as error:
        prepare_latents.inspect(str(tmp_path / "bad.safetensors"), grid="none", cpu_threads=1)
    assert "image 0 is no JPEG file" in "\n".join(map(str, error.value.args))


def repa_folder(path, num_items=5):
    """REPA's images/ and vae-sd/, each listed in an order of its own."""
    images, g = smooth_images(num_items), np.random.default_rng(0)
    (path / "vae-sd" / "00000").mkdir(parents=True)
    (path / "images" / "00000").mkdir(parents=True)
    labels = {i: int(i % 3) for i in range(num_items)}
    for i in range(num_items):
        moments = np.concatenate([g.normal(size=(4, 2, 2)) * 5, np.ones((4, 2, 2))]).astype(np.float32)
        np.save(path / "vae-sd" / "00000" / f"img-mean-std-{i:08d}.npy", moments)
        Image.fromarray(images[i]).save(path / "images" / "00000" / f"img{i:08d}.png")
    listed = {"vae-sd": (range(num_items), "img-mean-std-{:08d}.npy"), "images": (reversed(range(num_items)), "img{:08d}.png")}
    for folder, (numbers, name) in listed.items():
        entries = [[f"00000/{name.format(i)}", labels[i]] for i in numbers]
        (path / folder / "dataset.json").write_text(json.dumps({"labels": entries}))
    return images


def test_convert_brings_the_images_that_lie_beside_repas_latents(tmp_path):
    images, other = repa_folder(tmp_path / "repa"), dict(autoencoder="none", scale_factor=0.1)
    convert = partial(prepare_latents.convert, str(tmp_path / "repa"), resolution=16, keep_images="jpeg", **other)
    convert(str(tmp_path / "out"), shard_size=2)
    dataset = LatentDataset(tmp_path / "out")
    shown = dataset.fetch_with_images(np.arange(5), np.zeros(5, dtype=bool))[2].numpy().astype(int)
    for pixels, expected in zip(shown, images):
        assert np.abs(pixels - expected).mean() < 3
    with pytest.raises(UserError, match="has 16x16 pixels instead of 32x32"):
        convert(str(tmp_path / "other"), resolution=32)
    folder = tmp_path / "repa" / "images"
    file, image = folder / "dataset.json", folder / "00000" / "img00000004.png"
    listed = file.read_text()
    file.write_text(listed.replace("img00000004", "img00000007"))
    image.rename(image.with_name("img00000007.png"))
    with pytest.raises(UserError, match="number their items differently: in order, 00000/img00000007.png would .*00000004.npy"):
        convert(str(tmp_path / "another"))
    file.write_text(listed)
    with pytest.raises(UserError, match=r"dataset.json names 00000/img00000004.png, which is not there \(1 such files\)"):
        convert(str(tmp_path / "another"))
    image.with_name("img00000007.png").rename(image)
    file.write_text(listed.replace(", 2]", ", 1]"))
    with pytest.raises(UserError, match="do not hold the same items: 5 images and 5 latents, or other labels"):
        convert(str(tmp_path / "another"))
    shutil.rmtree(tmp_path / "repa" / "images")
    with pytest.raises(UserError, match="keep_images=jpeg needs .*images with its dataset.json"):
        convert(str(tmp_path / "another"))


# ----------------------------------------------------------------------------------------------------------------------
# Runs on shards, and what is refused before them.

SHARDS = ["data.in_channels=3", "data.num_classes=3", "data.autoencoder=none", *REPA]


def test_a_run_on_features_equals_one_that_computes_them(train, tmp_path):
    make_shard(tmp_path / "pixels" / "a.safetensors", channels=1, size=8, num_classes=10)
    dataset = LatentDataset(tmp_path / "pixels")
    stored, labels, images = dataset.fetch_with_images(np.arange(24), np.zeros(24, dtype=bool))
    features = DigitsEncoder().encode(images)[1].half()
    info = replace(dataset.info, encoder="digits")
    write_shard(tmp_path / "features" / "a.safetensors", stored, labels, info, None, {"features": features})
    computed, read = (train(name, *REPA, f"data.path={tmp_path / name}") for name in ("pixels", "features"))
    found, expected = ([record["alignment_loss"] for record in metrics(run)] for run in (read, computed))
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_run_on_images_reads_them_in_threads_and_aligns_to_a_vision_transformer_of_timm(train, tmp_path):
    import timm  # slow to import

    name = "vit_tiny_patch16_224.augreg_in21k"
    torch.manual_seed(0)
    save_file(timm.create_model(name, pretrained=False, num_classes=0).state_dict(), tmp_path / "vit.safetensors")
    shards_with_images(tmp_path / "data")
    settings = [
        *SHARDS,
        f"data.path={tmp_path / 'data'}",
        f"alignment.encoder={name}",
        f"alignment.weights={tmp_path / 'vit.safetensors'}",
    ]
    plain, threads = train("plain", *settings), train("threads", *settings, "data.num_workers=2", "train.grad_accum_steps=2")
    aligned, again = ([record["alignment_loss"] for record in metrics(run)] for run in (plain, threads))
    assert again == pytest.approx(aligned, rel=1e-3) and aligned[-1] < aligned[0]
    wrong = tmp_path / "wrong.safetensors"
    save_file({"weight": torch.ones(2)}, wrong)
    with pytest.raises(UserError, match=f"alignment.weights: {wrong} holds the weights of another network than {name}"):
        train("wrong", *settings, f"alignment.weights={wrong}")
    with pytest.raises(UserError, match="alignment.weights=nowhere is not a file"):
        train("nowhere", *settings, "alignment.weights=nowhere")


def test_shards_without_images_say_how_to_make_them_before_anything_is_written(train, tmp_path):
    make_shard(tmp_path / "old" / "a.safetensors", channels=3, size=8, autoencoder="none")
    with pytest.raises(
        UserError,
        match="needs the images of the latents, and .*old holds neither images nor features; make other shards: "
        "python prepare_latents.py encode images=<folder of images> output=<another folder> resolution=8 keep_images=jpeg .*"
        "features=true encoder=digits features_grid=4",
    ):
        train("run", *SHARDS, f"data.path={tmp_path / 'old'}")
    assert not (tmp_path / "run").exists()
    train("off", *SHARDS, f"data.path={tmp_path / 'old'}", "alignment.weight=0", "train.num_steps=1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("alignment.block=13", "alignment.block=13 is beyond the 12 blocks of DiT-XS/2; give 1 to 12"),
        ("alignment.block=0", "alignment.block=0 is not accepted; .* a whole number of at least 1"),
        ("alignment.weight=-1", "alignment.weight=-1"),
        (
            "model.backbone=DiT-XS/4",
            r"alignment.encoder=digits has weights of its own and 4x4 patches, which do not fit 2x2 tokens",
        ),
        (
            "alignment.encoder=resnet50",
            r"alignment.encoder=resnet50 has no patches of a known size \(_patch<N>_\) in its name; use vit_base_patch14_dinov2",
        ),
        ("alignment.depth=3", "alignment.depth is not a key of the configuration; accepted: "),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(train, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        train("run", *REPA, *([f"+{change}"] if "depth" in change else [change]))
    assert not (tmp_path / "run").exists()


def test_features_of_another_grid_or_encoder_are_refused(train, tmp_path):
    latents, labels = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    for encoder, num_patches in (("digits", 9), ("other", 16)):
        info = ShardInfo("sample", 0.5, "none", 16, 3, encoder=encoder)
        shown = {"features": torch.ones(6, num_patches, 5).half()}
        write_shard(tmp_path / encoder / "a.safetensors", latents, labels, info, None, shown)
    with pytest.raises(UserError, match="holds 9 features for each image, and DiT-XS/2 has 16 tokens; .* features_grid=4"):
        train("run", *SHARDS, f"data.path={tmp_path / 'digits'}")
    with pytest.raises(UserError, match="needs the images of the latents, and .* holds features of other"):
        train("run", *SHARDS, f"data.path={tmp_path / 'other'}")
    with pytest.raises(
        UserError, match="alignment.weights=mine: .*other holds the encoder's features.* leave alignment.weights out"
    ):
        train("run", *SHARDS, "alignment.encoder=other", f"data.path={tmp_path / 'other'}", "alignment.weights=mine")


def test_the_digits_encoder_is_refused_for_larger_images(train, tmp_path):
    shards_with_images(tmp_path / "larger")
    with pytest.raises(UserError, match="alignment.encoder=digits sees images of 8x8 pixels, and those of .*larger have 16; use"):
        train("run", *SHARDS, f"data.path={tmp_path / 'larger'}")


@pytest.mark.parametrize("key", ["encoder", "encoder_weights", "features_grid"])
def test_encode_refuses_what_is_for_features_without_them(key, tmp_path):
    with pytest.raises(UserError, match=f"{key}=5 is for features=true; add it, or leave out {key}=5"):
        prepare_latents.encode("images", str(tmp_path / "out"), **{key: 5})


def test_tars_are_refused_for_alignment():
    cfg, tars = schema.check(composed([*REPA, "data.format=webdataset"]), schema.TrainConfig), object.__new__(TarLatents)
    tars.info = ShardInfo("moments", 0.18215, "sd-vae:x", 256, 1000)
    with pytest.raises(UserError, match="needs images or features beside the latents, and tars hold none; make native shards"):
        build.check_alignment(cfg, tars)


def test_a_row_with_alignment_is_a_row_of_its_own_and_says_so_in_its_name(train):
    cfg = composed(["experiment=repa/sit_b2_tread"])
    assert (cfg.alignment.block, cfg.alignment.weight, cfg.alignment.projector_width) == (4, 0.5, 2048)
    assert composed(["experiment=repa/sit_xl2"]).alignment.block == 8
    named, _ = rows.name_run(*(checked := composed(REPA), schema.check(checked, schema.TrainConfig)))
    assert named.name == "digits_tread_repa"
