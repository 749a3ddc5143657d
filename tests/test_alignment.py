"""Representation alignment: its loss and gradient, whole runs, and images in shards."""

import json
import math
import re
import shutil

import numpy as np
import pytest
import torch
from conftest import losses, make_shard, metrics, run_train, weights
from safetensors.torch import load_file, save_file

import dit
from checkpoints.checkpoint import read_checkpoint
from checkpoints.load import load_network
from common.errors import UserError
from extras import alignment
from extras.alignment import Alignment, ObservedNetwork, Projector, alignment_loss
from latents.dataset import LatentDataset
from latents.prepare.image_reader import to_jpeg
from latents.shards import ShardInfo, pack_images, write_shard
from routing_module import Route
from training.trainer import Trainer

CPU = torch.device("cpu")
ENCODER = "vit_tiny_patch16_224.augreg_in21k"


def tiny_network(routes=()):
    torch.manual_seed(0)
    sizes = dict(input_size=8, patch_size=2, in_channels=1, num_classes=3, depth=6, width=16, num_heads=2)
    return dit.DiT(**sizes, routes=routes, init="official_tread").train()


def batch(routes=()):
    """Return x, t, y and the other inputs of a training step."""
    g = torch.Generator().manual_seed(1)
    x, t = torch.randn(3, 1, 8, 8, generator=g), torch.rand(3, generator=g)
    draws = {"drop_labels": torch.zeros(3, dtype=torch.bool)} | ({"route_noise": torch.rand(3, 1, 16)} if routes else {})
    return x, t, torch.arange(3), draws


def cosine_by_hand(projected, patches, positions):
    """Return minus the mean cosine, computed in Python floats, token by token."""
    cosines = []
    for sample, patch_of, kept in zip(projected.tolist(), patches.tolist(), positions.tolist()):
        for token, position in zip(sample, kept):
            patch = patch_of[position]
            dot = sum(a * b for a, b in zip(token, patch))
            cosines.append(dot / math.sqrt(sum(a * a for a in token)) / math.sqrt(sum(b * b for b in patch)))
    return -sum(cosines) / len(cosines)


# ----------------------------------------------------------------------------------------------------------------------
# The loss.


def test_the_loss_is_minus_the_mean_cosine_of_each_token_and_the_patch_of_its_own_position():
    g = torch.Generator().manual_seed(4)
    patches, everywhere = torch.randn(2, 6, 7, generator=g), torch.arange(6).expand(2, 6)
    projected = torch.randn(2, 6, 7, generator=g)
    assert alignment_loss(projected, patches).item() == pytest.approx(cosine_by_hand(projected, patches, everywhere), abs=1e-6)
    assert alignment_loss(3 * patches, patches).item() == pytest.approx(-1, abs=1e-6)
    projected, ids_keep = projected[:, :3], torch.tensor([[0, 2, 5], [1, 3, 4]])  # in a window
    expected = cosine_by_hand(projected, patches, ids_keep)
    assert alignment_loss(projected, patches, ids_keep).item() == pytest.approx(expected, abs=1e-6)
    # A wrong gather would give the patches of the first tokens, or of the other sample.
    for wrong in (torch.arange(3).expand(2, 3), ids_keep.flip(0)):
        assert abs(alignment_loss(projected, patches, wrong).item() - expected) > 1e-3


def test_the_cosine_is_computed_in_float32():
    g = torch.Generator().manual_seed(5)
    projected, patches = (torch.randn(2, 5, 700, generator=g) for _ in range(2))
    loss = alignment_loss(projected.bfloat16(), patches.half())
    exact = alignment_loss(projected.bfloat16().double(), patches.half().double())
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), abs=1e-6)


def test_tokens_and_patches_of_other_positions_are_refused():
    with pytest.raises(ValueError, match=r"tokens \(2, 3, 7\) and patches \(2, 1, 7\) differ in shape"):
        alignment_loss(torch.ones(2, 3, 7), torch.ones(2, 1, 7))


# ----------------------------------------------------------------------------------------------------------------------
# The tokens after a block.


@pytest.mark.parametrize("number", range(1, 7))
def test_observing_the_tokens_after_a_block_changes_nothing(number):
    routes, seen = [Route(0.5, 1, 3)], []
    net, (x, t, y, kwargs) = tiny_network(routes), batch(routes)
    for block in net.blocks:
        block.register_forward_hook(lambda _, args, out: seen.append(out))
    plain = net(x, t, y, **kwargs)
    seen.clear()
    observed = ObservedNetwork(net, number)
    assert torch.equal(observed(x, t, y, **kwargs), plain)
    assert torch.equal(observed.tokens, seen[number - 1])
    if 2 <= number <= 4:  # the route is blocks 1 to 3, counted from 0
        assert torch.equal(observed.ids_keep, kwargs["route_noise"][:, 0].topk(8).indices.sort().values)
    else:
        assert observed.ids_keep is None and observed.tokens.shape == (3, 16, 16)


@pytest.mark.parametrize("routes", [(), [Route(0.5, 1, 3)]])
def test_the_gradient_reaches_the_blocks_up_to_the_aligned_one_and_none_after(routes):
    net, (x, t, y, kwargs) = tiny_network(routes), batch(routes)
    projector, observed = Projector(16, 8, 5), ObservedNetwork(net, 3)
    observed(x, t, y, **kwargs)
    patches = torch.randn(3, 16, 5, generator=torch.Generator().manual_seed(6))
    alignment = Alignment(projector, encode=None, fetch=None, block=3, weight=0.3)
    loss = alignment.loss(projector, observed, patches)
    assert loss.item() == pytest.approx(0.3 * alignment_loss(projector(observed.tokens), patches, observed.ids_keep).item())
    loss.backward()
    for i, block in enumerate(net.blocks):
        gradients = [p.grad for p in block.parameters()]
        if i < 3:
            assert all(g is not None and g.any() for g in gradients)
        else:
            assert gradients == [None] * len(gradients)
    assert net.final_layer.linear.weight.grad is None
    assert all(p.grad is not None and p.grad.any() for p in projector.parameters())


# ----------------------------------------------------------------------------------------------------------------------
# Images stored with latents.


def smooth_images(num_items, size=16):
    """Return smooth images, uint8 [num_items, size, size, 3], which JPEG hardly changes. They are brighter on the right."""
    rows, columns = np.meshgrid(np.linspace(0, 1, size), np.linspace(0, 1, size), indexing="ij")
    values = [np.stack([columns * 255, rows * 10 * i, np.full_like(rows, 20 * i)], axis=-1) for i in range(num_items)]
    return np.stack(values).astype(np.uint8)


INFO = ShardInfo(kind="sample", scale_factor=0.5, autoencoder="none", resolution=16, num_classes=3)


def write_shard_with_images(file, jpegs):
    """Write a shard of random latents [3, 8, 8] with these image files."""
    latents = torch.randn(len(jpegs), 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(len(jpegs)) % 3
    write_shard(file, latents, labels, INFO, latents_flip=latents.flip(-1), **pack_images(jpegs))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (b"no image", "UnidentifiedImageError"),
        (to_jpeg(smooth_images(1)[0])[:99], "OSError"),
        (to_jpeg(smooth_images(1, 8)[0]), "8x8 pixels"),
    ],
)
def test_a_damaged_image_or_one_of_another_size_is_named_in_the_error(tmp_path, second, message):
    write_shard_with_images(tmp_path / "a.safetensors", [to_jpeg(smooth_images(1)[0]), second])
    dataset = LatentDataset(tmp_path)
    dataset.fetch_with_images(np.array([0]), np.array([False]))
    with pytest.raises(UserError, match=f"image 1 cannot be read: .*{message}"):
        dataset.fetch_with_images(np.array([0, 1]), np.array([False, False]))


def test_latents_that_are_pixels_are_their_own_images(tmp_path):
    latents, _ = make_shard(tmp_path / "a.safetensors", channels=1, size=8, flips=True)
    dataset = LatentDataset(tmp_path)
    _, _, shown = dataset.fetch_with_images(np.array([3, 2]), np.array([False, True]))
    expected = torch.stack([latents[3, 0], latents[2, 0].flip(-1)]).clamp(-1, 1)
    assert torch.equal(shown, ((expected + 1) * 127.5).round().to(torch.uint8)[..., None].expand(-1, -1, -1, 3))


def test_shards_with_other_images_are_another_data_set(tmp_path):
    for name, shift in (("a", 0), ("b", 9)):
        write_shard_with_images(tmp_path / name / "a.safetensors", [to_jpeg(image + shift) for image in smooth_images(4)])
    first, second = (LatentDataset(tmp_path / name).hash for name in "ab")
    assert first != second


# ----------------------------------------------------------------------------------------------------------------------
# Whole runs.


@pytest.fixture(scope="module")
def repa(tmp_path_factory):
    """Return the settings of a run that aligns tokens to an untrained vision transformer of timm."""
    import timm  # slow to import

    folder = tmp_path_factory.mktemp("repa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_file(timm.create_model(ENCODER, pretrained=False, num_classes=0).state_dict(), folder / "vit.safetensors")
    write_shard_with_images(folder / "data" / "a.safetensors", [to_jpeg(image) for image in smooth_images(6)])
    data = ["data=custom", f"data.path={folder / 'data'}", "data.num_workers=0", "model.backbone=DiT-XS/2"]
    data += ["train.precision=fp32", "train.lr=2e-3", "checkpoint.keep_every=0"]
    own = ["alignment=repa", f"alignment.encoder={ENCODER}", f"alignment.encoder_weights={folder / 'vit.safetensors'}"]
    return [*data, *own, "alignment.block=4", "alignment.projector_width=16"]


@pytest.fixture(scope="module")
def aligned(repa, tmp_path_factory):
    return run_train(tmp_path_factory.mktemp("runs"), "aligned", *repa, "checkpoint.every=3")


def alignment_losses(run):
    return [record.get("alignment_loss") for record in metrics(run)]


def test_alignment_decreases_its_loss_and_leaves_the_first_diffusion_loss_unchanged(repa, aligned, train):
    found = alignment_losses(aligned)
    assert found[-1] < found[0] < 0.5
    twice = train("twice", *repa, "alignment.weight=1.0", "train.num_steps=1")
    assert alignment_losses(twice)[0] == pytest.approx(2 * found[0])  # the default is 0.5
    plain = train("plain", *repa[:7])
    assert losses(aligned)[1] == losses(plain)[1] and losses(aligned)[6] != losses(plain)[6]


def test_a_run_with_block_8_aligns_the_tokens_after_block_8_and_no_others(repa, train, monkeypatch):
    outputs, observed, train_step, loss = [], [], Trainer.train_step, Alignment.loss

    def record_outputs(trainer, *args):
        for block in trainer.net.blocks:
            block.register_forward_hook(lambda _, args, out: outputs.append(out))
        return train_step(trainer, *args)

    def record_tokens(alignment, projector, net, shown):
        observed.append(net.tokens)
        return loss(alignment, projector, net, shown)

    monkeypatch.setattr(Trainer, "train_step", record_outputs)
    monkeypatch.setattr(Alignment, "loss", record_tokens)
    train("run", *repa, "alignment.block=8", "train.num_steps=1", "model.init=official_tread")  # no block is the identity
    (tokens,) = observed
    same = [number for number, out in enumerate(outputs, 1) if out.shape == tokens.shape and torch.equal(out, tokens)]
    assert len(outputs) == 12 and same == [8]


def test_a_resumed_aligned_run_equals_an_uninterrupted_one_exactly(repa, aligned, train, tmp_path):
    shutil.copytree(aligned, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_0000006")
    cut = train("cut", *repa, "data.num_workers=2")
    assert losses(cut) == losses(aligned) and alignment_losses(cut) == alignment_losses(aligned)
    for file in ("model", "projector"):
        first, second = weights(aligned, 6, file), weights(cut, 6, file)
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_projector_has_its_own_file_and_the_model_loads_without_it(repa, aligned, train):
    folder = aligned / "checkpoints" / "step_0000006"
    net = load_network(read_checkpoint(folder), "raw", CPU)
    assert not any("projector" in name for name in net.state_dict())
    projector = load_file(folder / "projector.safetensors")
    shapes = [tuple(value.shape) for name, value in sorted(projector.items()) if "weight" in name]
    assert shapes == [(16, 96), (16, 16), (192, 16)]
    plain = train("from_aligned", *repa[:7], f"init_from={aligned}", "train.num_steps=1")
    assert "alignment_loss" not in metrics(plain)[0]


def test_the_size_of_a_checkpoint_counts_the_projector(repa, train, caplog):
    caplog.set_level("INFO")
    run = train("run", *repa, "alignment.projector_width=1024", "train.num_steps=1")
    folder = run / "checkpoints" / "step_0000001"
    saved = sum(file.stat().st_size for file in folder.iterdir())
    assert (folder / "projector.safetensors").stat().st_size > 0.1 * saved
    size = float(re.search(r"checkpoints \((\S+) GB each\)", caplog.text)[1])
    assert size == pytest.approx(saved / 1e9, rel=0.02)


def test_a_resume_with_another_precision_keeps_the_encoder(repa, aligned, train, tmp_path):
    shutil.copytree(aligned, tmp_path / "run")
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_0000006" / "state.json").read_text())
    run = train("run", *repa, "train.precision=bf16", "train.num_steps=7", "resume=changed")
    train("run", *repa, "train.num_steps=8", "resume=changed")
    later = json.loads((run / "checkpoints" / "step_0000007" / "state.json").read_text())
    assert later["encoder_hash"] == f"{state['encoder_hash']}-bf16" and [*losses(run)] == [*range(1, 9)]


def test_a_resume_with_other_weights_of_the_encoder_or_without_alignment_is_refused(repa, aligned, train, tmp_path):
    shutil.copytree(aligned, tmp_path / "run")
    other = load_file(repa[9].partition("=")[2])
    save_file({name: value + 1e-3 for name, value in other.items()}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match="alignment.encoder_weights"):
        train("run", *repa, f"alignment.encoder_weights={tmp_path / 'other.safetensors'}")
    with pytest.raises(UserError, match="alignment.name"):
        train("run", *repa[:7])


def test_impossible_settings_and_shards_without_images_are_refused_before_anything_is_written(repa, train, tmp_path):
    make_shard(tmp_path / "data" / "a.safetensors", channels=3, size=8, autoencoder="none")
    for change, words in (
        ("alignment.block=13", "alignment.block=13 .*12 blocks"),
        ("alignment.encoder=resnet50", "alignment.encoder=resnet50"),
        ("alignment.encoder_weights=nowhere", "alignment.encoder_weights: nowhere"),
        (f"data.path={tmp_path / 'data'}", "keep_images=jpeg"),
    ):
        with pytest.raises(UserError, match=words):
            train("run", *repa, change)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "key", ["model.routes=[{selection_ratio:0.5,start_layer_idx:2,end_layer_idx:40}]", "evaluation.reference=nowhere"]
)
def test_a_wrong_route_or_reference_is_refused_before_the_encoder_is_loaded(repa, train, monkeypatch, key):
    monkeypatch.setattr(alignment, "Encoder", None)  # calling it would raise TypeError
    evaluated = ["evaluation.every=1", "evaluation.detector=digits"] if "reference" in key else []
    with pytest.raises(UserError, match="end_layer_idx=40" if "routes" in key else "evaluation.reference"):
        train("run", *repa, *evaluated, key)
