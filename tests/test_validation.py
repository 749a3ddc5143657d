"""The validation loss and losses by noise level equal their definition, and depend only on the weights."""

import shutil

import numpy as np
import pytest
import torch
from conftest import checked, encode, evaluated, losses, make_shard, metrics, run_train
from PIL import Image
from scipy.stats import norm

from checkpoints import store
from checkpoints.checkpoint import read_checkpoint
from checkpoints.load import load_network
from common.errors import Diverged, UserError
from common.randomness import derive_seed
from edm import EDM
from latents.dataset import LatentDataset
from training.data import open_validation

CPU = torch.device("cpu")
KEYS = ["sample_grid.every=0", "evaluation.every=3", "evaluation.reference=null", "train.lr=1e-2", "checkpoint.every=3"]


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """Fixture: a folder of 23 latents with the shape of the digits and another scale factor."""
    folder = tmp_path_factory.mktemp("held_out")
    make_shard(folder / "a.safetensors", num_items=23, channels=1, size=8, num_classes=10)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, held_out):
    return run_train(
        tmp_path_factory.mktemp("runs"), "whole", *KEYS, f"evaluation.validation={held_out}", "sampling.batch_size=7"
    )


def validations(run):
    return {line["step"]: line for line in evaluated(run) if "by_level" in line}


def test_the_validation_loss_equals_its_definition(run, held_out):
    dataset = LatentDataset(held_out)
    scale = LatentDataset("latents/digits.safetensors").info.scale_factor
    assert scale != dataset.info.scale_factor
    net = load_network(read_checkpoint(run / "checkpoints" / store.folder_name(6)), "ema", CPU).eval()
    sums, counts = np.zeros(10), np.zeros(10)
    for item in range(23):
        stored, label = dataset.fetch(np.array([item]), np.array([False]))
        quantile = (item % 10 + ((item // 10 + 0.5) * (5**0.5 - 1) / 2) % 1) / 10
        sigma = torch.tensor([float(np.exp(-1.2 + 1.2 * norm.ppf(quantile)))])
        noise = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(derive_seed("validation", item)))
        x = stored * scale
        with torch.no_grad():
            denoised = EDM().denoise(net, x + sigma * noise, sigma, label)
        weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
        sums[item % 10] += (weight * (denoised - x).square().mean()).item()
        counts[item % 10] += 1
    line = validations(run)[6]
    assert line["by_level"] == pytest.approx((sums / counts).tolist(), rel=1e-4)
    assert (
        line["metrics"] == {"validation_loss": pytest.approx(sums.sum() / 23, rel=1e-4)} and line["settings"]["num_samples"] == 23
    )


def test_batches_and_a_resume_do_not_change_the_validation_loss(run, tmp_path, held_out):
    cut = shutil.copytree(run, tmp_path / "cut")
    shutil.rmtree(cut / "checkpoints" / store.folder_name(6))
    run_train(tmp_path, "cut", *KEYS, f"evaluation.validation={held_out}", "sampling.batch_size=40")
    found, expected = validations(cut), validations(run)
    assert list(found) == list(expected) == [3, 6] and losses(cut) == losses(run)
    assert found[3] == expected[3]
    assert found[6]["by_level"] == pytest.approx(expected[6]["by_level"], rel=1e-5)
    lines = metrics(cut), evaluated(cut)
    run_train(tmp_path, "cut", *KEYS, f"evaluation.validation={held_out}", "sampling.batch_size=40")  # already complete
    assert (metrics(cut), evaluated(cut)) == lines


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_that_diverges_stores_no_validation_loss(tmp_path, held_out, every):
    keys = [*KEYS, f"evaluation.every={every}", "train.lr=1e30", "train.log_every=100", f"evaluation.validation={held_out}"]
    with pytest.raises(Diverged, match="the validation loss is (nan|inf) after step"):
        run_train(tmp_path, "run", *keys)
    assert not (tmp_path / "run" / "evaluations" / "results.jsonl").exists()


@pytest.mark.parametrize("diffusion", ["edm", "sit"])
def test_training_losses_by_level_average_to_the_loss_and_divide_the_noise_levels(tmp_path, monkeypatch, diffusion):
    import training.trainer as trainer

    seen, original = [], trainer.sums_by_bin
    monkeypatch.setattr(trainer, "sums_by_bin", lambda *args: seen.append(args) or original(*args))
    keys = [f"diffusion={diffusion}", "train.num_steps=4", "train.log_every=2", "train.grad_accum_steps=2", "checkpoint.every=3"]
    lines = [line["loss_by_level"] for line in metrics(run_train(tmp_path, "run", *keys))]
    for line, calls in zip(lines, (seen[:4], seen[4:])):
        values, quantiles = (torch.cat(column).tolist() for column in zip(*calls))
        level = [int(10 * q) for q in quantiles]
        expected = [[x for x, k in zip(values, level) if k == i] for i in range(10)]
        assert line == [pytest.approx(sum(x) / len(x), rel=1e-5) if x else None for x in expected] and None in line
    draw = torch.Generator().manual_seed(derive_seed(0, 0, "diffusion"))
    first = norm.cdf(torch.randn(4, generator=draw)) if diffusion == "edm" else torch.rand(4, generator=draw).numpy()
    assert torch.cat([q for _, q in seen[:2]]).numpy() == pytest.approx(first, abs=1e-6)
    cut = shutil.copytree(tmp_path / "run", tmp_path / "cut")
    shutil.rmtree(cut / "checkpoints" / store.folder_name(4))
    run_train(tmp_path, "cut", *keys)  # resumes at step 3, within the interval of the second line
    assert [line["loss_by_level"] for line in metrics(cut)] == lines


def test_latents_that_do_not_fit_are_refused(tmp_path, monkeypatch):
    make_shard(tmp_path / "other" / "a.safetensors", channels=2, size=8, num_classes=10)
    for value, words in (("other", "channels is 2, but 1 in data.path"), ("missing", "evaluation.validation: .* does not exist")):
        with pytest.raises(UserError, match=words):
            run_train(tmp_path, "run", *KEYS, f"evaluation.validation={tmp_path / value}")
    with pytest.raises(UserError, match="evaluation.validation=.* has no effect with evaluation.every=0"):
        run_train(tmp_path, "run", f"evaluation.validation={tmp_path / 'other'}")
    assert not (tmp_path / "run").exists()
    first, second = (LatentDataset(tmp_path / "other") for _ in range(2))
    first.class_names, second.class_names = ["cat", "dog"], ["dog", "fox"]
    monkeypatch.setattr("training.data.LatentDataset", lambda path: second)
    with pytest.raises(UserError, match="class_names is .'dog', 'fox'., but .'cat', 'dog'."):
        open_validation(checked([*KEYS, f"evaluation.validation={tmp_path / 'other'}"]), first)


def test_another_background_and_training_latents_are_said(tmp_path, caplog):
    for i in range(4):
        (file := tmp_path / "images" / f"{i % 2}" / f"{i}.png").parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGBA", (8, 8), (50 * i, 0, 0, 0)).save(file)
    folders = {name: tmp_path / name for name in ("white", "black", "copy")}
    for name, folder in folders.items():
        colour = f"background={name}" if name != "copy" else "background='#ffffff'"
        encode(tmp_path / "images", folder, "identity", "resolution=8", "dtype=float32", colour)
    make_shard(tmp_path / "mine" / "a.safetensors", channels=3, size=8, num_classes=2)  # nobody knows its background

    def open_with(validation, training="white"):
        keys = ["data=custom", f"data.path={tmp_path / training}", f"evaluation.validation={tmp_path / validation}"]
        return open_validation(checked([*KEYS, *keys, "model.backbone=DiT-XS/2"]), LatentDataset(tmp_path / training))

    with pytest.raises(
        UserError, match="evaluation.validation=.*black: it was encoded with background=black, but data.path=.*=white"
    ):
        open_with("black")
    assert open_with("copy") is not None and not [
        line for line in caplog.messages if "encoded with background" in line or "colour" in line
    ]
    open_with("mine")
    assert "mine does not say which colour is behind its transparent images; " in caplog.messages[-1]
    open_with("white", "mine")
    assert "mine does not say which colour" in caplog.messages[-1]
    open_with("white")
    assert "1 of the 1 shards of" in caplog.messages[-1] and "a loss on training latents" in caplog.messages[-1]


def test_training_and_validation_parts_share_no_image_and_together_hold_all(tmp_path, caplog):
    images, folders = tmp_path / "images", {}
    for i in range(60):
        file = images / f"class_{i % 2}" / f"{i:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (i // 3, 0, 0)).save(file)  # three copies of each, in both classes

    def encode_part(part, *settings):
        folders[part] = encode(images, tmp_path / part, "identity", "resolution=8", "dtype=float32", f"part={part}", *settings)
        return LatentDataset(folders[part])

    def open_parts():
        keys = ["data=custom", f"data.path={folders['train']}", f"evaluation.validation={folders['validation']}"]
        return open_validation(checked([*KEYS, *keys, "model.backbone=DiT-XS/2"]), LatentDataset(folders["train"]))

    train, validation, everything = (encode_part(part) for part in ("train", "validation", "all"))
    assert 0 < len(validation) < 20 and not set(train.image_hashes) & set(validation.image_hashes)
    assert sorted([*train.image_hashes, *validation.image_hashes]) == sorted(everything.image_hashes)
    assert train.info.num_classes == validation.info.num_classes == 2
    assert open_parts() is not None and not [line for line in caplog.messages if "training" in line]
    # Other images do not move an image to the other part.
    (images / "class_0" / "00.png").unlink()
    shutil.rmtree(folders["validation"])
    assert set(encode_part("validation").image_hashes) == set(validation.image_hashes) and open_parts() is not None
    assert not [line for line in caplog.messages if "training" in line]
    folders["validation"] = folders["all"]
    assert open_parts() is not None
    assert f"of the 60 images of {folders['all']} are also in data.path=" in caplog.messages[-1]
    for file in sorted(images.rglob("*.png"))[1:]:
        if file.name != "01.png":
            file.unlink()
    with pytest.raises(UserError, match="part=validation holds none of 2 images .1 of 20 is validation"):
        encode(images, tmp_path / "few", "identity", "resolution=8", "part=validation")
