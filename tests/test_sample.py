"""sample.py: image i is a function of seed i, and nothing is made twice or overwritten."""

import re
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import LAUNCH_2, composed, finish, forget_accelerate, start
from PIL import Image

import dit
import guidance as guidances
from configs import schema
from latents.autoencoders import Identity
from sampling.sampler import ImageSampler
from training import build
from training import checkpoint as checkpoints
from training.ema import EMA
from training.speed import compile_network

FEW = ["num_steps=3", "cpu_threads=1"]


@pytest.fixture
def trained(train):
    """A run of two steps whose weights matter: the output layers of a fresh network are zero."""
    return train("run", "train.num_steps=2", "train.lr=1e-2")


@pytest.fixture
def sample(trained, tmp_path):
    import sample as script

    def run(output, *overrides, checkpoint=trained):
        forget_accelerate()
        script.main(composed([f"checkpoint={checkpoint}", f"output={tmp_path / output}", *FEW, *overrides], "sample"))
        return {path.name: np.asarray(Image.open(path)) for path in sorted((tmp_path / output).glob("seed_*.png"))}

    return run


def assert_same_images(first, second):
    assert first.keys() == second.keys() and len(first) > 0
    for name in first:
        # Matrix products of another batch size may round differently; a pixel may then move by one of 255.
        difference = np.abs(first[name].astype(int) - second[name].astype(int))
        assert difference.max() <= 1 and (difference > 0).mean() < 0.02, name


def test_an_image_depends_on_its_seed_and_not_on_its_batch(sample):
    together = sample("together", "seeds=0-6")
    assert len({image.tobytes() for image in together.values()}) == 7
    assert_same_images(together, sample("apart", "seeds=0-6", "batch_size=2"))
    some = sample("some", "seeds=[5,2]", "batch_size=1")
    assert_same_images(some, {name: together[name] for name in some})


def test_churn_and_guidance_depend_on_the_seed_too(sample):
    settings = ["S_churn=2", "guidance=cfg", "cfg_scale=2"]
    together = sample("together", "seeds=0-3", *settings)
    assert_same_images(together, sample("apart", "seeds=0-3", "batch_size=1", *settings))
    plain = sample("plain", "seeds=0-3")
    assert all((together[name] != plain[name]).any() for name in plain)


def test_a_compiled_network_samples_the_same_images(sample, monkeypatch):
    plain = sample("plain", "seeds=0-1")
    compiled = []
    compile_function = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiled.append(f) or compile_function(f, **how))
    assert_same_images(plain, sample("fast", "seeds=0-1", "compile=blocks"))
    assert len(compiled) == 12


def test_a_compiled_network_meets_one_size_of_batch_and_weights_that_come_and_go(monkeypatch):
    graphs, compile_function = [], torch.compile
    keep = lambda graph, inputs: graphs.append(graph) or graph  # noqa: E731
    monkeypatch.setattr(torch, "compile", partial(compile_function, backend=keep))
    torch.compiler.reset()
    net = dit.DiT(input_size=4, patch_size=2, in_channels=1, num_classes=3, depth=2, width=16, num_heads=2, init="official_tread")
    ema = EMA(net, 0.9)
    diffusion = build.build_diffusion(schema.check(composed(["diffusion.sampler.num_steps=2"]), schema.TrainConfig).diffusion)
    guidance = partial(guidances.cfg, cfg_scale=2.0)
    shape = {"latent_shape": (1, 4, 4), "num_classes": 3, "scale_factor": 1.0, "device": torch.device("cpu")}
    with torch._dynamo.config.patch():
        plain = ImageSampler(ema.net, diffusion, net.router, guidance, Identity(), **shape)
        expected = [plain([0, 1, 2], [0, 1, 2]), plain([3], [0])]
        compile_network(ema.net, "blocks")
        sampler = replace(plain, is_compiled=True)
        got = [sampler([0, 1, 2], [0, 1, 2]), sampler([3], [0])]
        ema.shard_like(net)  # as FSDP has it: the network has weights inside full_weights only
        for _ in range(2):
            with ema.full_weights():
                got.append(sampler([3], [0]))
    for images, others in zip(got, [*expected, expected[1], expected[1]]):
        assert images.shape == others.shape
        assert np.abs(images.astype(int) - others).max() <= 1
    assert len(graphs) == 1  # one batch of 3, with and without label, of every step
    assert sampler.evaluations_per_image == plain.evaluations_per_image


@pytest.mark.parametrize("subset", ["redraw", "fixed"])
def test_sparse_guidance_depends_on_the_seed_and_states_its_cost(sample, caplog, subset):
    caplog.set_level("INFO")
    settings = ["guidance=sparse", "guidance.w=2", "guidance.r_strong=0.25", f"guidance.subset={subset}"]
    together = sample("together", "seeds=0-3", *settings)
    # 3 noise levels are 5 evaluations of two branches.
    assert re.search(r"10 network evaluations and [\d.]+ GFLOPs per image; .* takes [\d.]+% fewer FLOPs than class", caplog.text)
    assert_same_images(together, sample("apart", "seeds=0-3", "batch_size=1", *settings))
    plain = sample("plain", "seeds=0-3")
    assert all((together[name] != plain[name]).any() for name in plain)


def test_an_interval_of_nothing_more_than_the_last_level_costs_one_more_evaluation(sample, caplog):
    caplog.set_level("INFO")
    sample("out", "seeds=0-1", "guidance=interval", "cfg_scale=2", "guidance.level_lo=0", "guidance.level_hi=0.01")
    assert "cost     7 network evaluations" in caplog.text  # the last level is evaluated twice


def test_a_sit_run_samples_with_every_solver_and_refuses_edms_settings(train, sample):
    sit = train("sit", "diffusion=sit", "train.num_steps=2", "train.lr=1e-2")
    images = {}
    for solver in ("euler", "heun", "euler_maruyama"):
        images[solver] = sample(solver, "seeds=0-3", f"solver={solver}", checkpoint=sit)
        assert_same_images(images[solver], sample(f"{solver}_1", "seeds=0-3", "batch_size=1", f"solver={solver}", checkpoint=sit))
    guided = sample("cfg", "seeds=0-3", "guidance=cfg", "cfg_scale=3", checkpoint=sit)
    assert all((guided[name] != images["heun"][name]).any() for name in guided)
    with pytest.raises(ValueError, match="S_churn=2 is not a setting of the sampler of diffusion=sit"):
        sample("churn", "S_churn=2", checkpoint=sit)
    with pytest.raises(ValueError, match="solver=euler is not a setting of the sampler of diffusion=edm"):
        sample("solver", "solver=euler")
    with pytest.raises(
        ValueError, match="guidance.level_hi=2 is outside the sampler of diffusion=sit, whose t goes from 1 to 0.333"
    ):
        sample("interval", "guidance=interval", "guidance.level_lo=0", "guidance.level_hi=2", checkpoint=sit)


def test_autoguidance_takes_a_second_checkpoint_of_the_same_latents_and_diffusion(train, sample, trained, tmp_path):
    plain = sample("plain", "seeds=0-3")
    itself = sample("itself", "seeds=0-3", "guidance=autoguidance", f"guidance.checkpoint={trained}")
    assert_same_images(plain, itself)
    weak = train("weak", "train.num_steps=1", "train.lr=1e-2", "model.backbone=DiT-XS/4", "model=dit")
    guided = sample("guided", "seeds=0-3", "guidance=autoguidance", f"guidance.checkpoint={weak}")
    assert all((guided[name] != plain[name]).any() for name in plain)
    sit = train("sit", "train.num_steps=1", "diffusion=sit")
    for checkpoint, message in (
        (sit, "guidance.checkpoint=.*sit has diffusion.name=sit, and the network that it is to guide edm"),
        (tmp_path / "nowhere", "guidance.checkpoint: .*nowhere is not a folder"),
    ):
        with pytest.raises(ValueError, match=message):
            sample("wrong", "guidance=autoguidance", f"guidance.checkpoint={checkpoint}")


def test_sparse_guidance_of_a_network_without_routes_uses_treads_and_warns(train, sample, caplog):
    dense = train("dense", "model=dit", "train.num_steps=2", "train.lr=1e-2")
    plain = sample("plain", "seeds=0-1", checkpoint=dense)
    sparse = sample("sparse", "seeds=0-1", "guidance=sparse", "guidance.w=3", checkpoint=dense)
    assert all((sparse[name] != plain[name]).any() for name in plain)
    assert "trained without routes" in caplog.text and "skip blocks 2 to -4" in caplog.text


def test_two_processes_make_the_images_of_one(sample, trained, tmp_path):
    one = sample("one", "seeds=0-4", "classes=0-9")
    output = tmp_path / "two"
    arguments = ["sample.py", f"checkpoint={trained}", f"output={output}", "seeds=0-4", "classes=0-9", *FEW]
    code, text = finish(start(*arguments, launcher=LAUNCH_2))
    assert code == 0, text
    two = {path.name: np.asarray(Image.open(path)) for path in sorted(output.glob("seed_*.png"))}
    assert_same_images(one, two)
    assert (output / "samples_0-4.npz").exists() and (output / "grid_0-4.png").exists()


def test_the_npz_is_what_adm_reads(sample, tmp_path):
    images = sample("out", "seeds=0-4", "classes=[3,7]")
    with np.load(tmp_path / "out" / "samples_0-4.npz") as file:
        assert file["arr_0"].shape == (5, 8, 8, 3) and file["arr_0"].dtype == np.uint8
        assert file["labels"].tolist() == [3, 7, 3, 7, 3] and file["labels"].dtype == np.int64
        assert np.array_equal(file["arr_0"], np.stack(list(images.values())))
    assert list(images) == [f"seed_{seed:06d}_class_{label:03d}.png" for seed, label in enumerate([3, 7, 3, 7, 3])]
    assert Image.open(tmp_path / "out" / "grid_0-4.png").size[0] > 5 * 64


def test_interrupted_sampling_goes_on_with_the_missing_seeds(sample, tmp_path):
    before = sample("out", "seeds=0-4")
    names = sorted(before)
    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in names}
    (tmp_path / "out" / names[3]).unlink()
    (tmp_path / "out" / f".tmp_{names[4]}").write_bytes(b"torn")
    assert_same_images(before, sample("out", "seeds=0-4"))
    assert [name for name in names if (tmp_path / "out" / name).stat().st_mtime_ns != times[name]] == [names[3]]


def test_images_of_other_settings_are_not_mixed(sample, tmp_path):
    sample("out", "seeds=0-1")
    with pytest.raises(ValueError, match=r"holds images of other settings \(sampler.S_churn: 0.0 -> 2.*choose another output="):
        sample("out", "seeds=0-1", "S_churn=2")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="is not empty and not made by sample.py"):
        sample("mine", "seeds=0-1")


def test_a_checkpoint_folder_alone_is_enough(sample, trained, tmp_path):
    (newest,) = checkpoints.list_steps(trained / "checkpoints").values()
    from_run = sample("from_run", "seeds=0-1")
    shutil.move(newest, tmp_path / "alone")
    shutil.rmtree(trained)
    assert_same_images(from_run, sample("from_folder", "seeds=0-1", checkpoint=tmp_path / "alone"))


def test_raw_and_ema_weights_differ(sample):
    ema, raw = sample("ema", "seeds=0-1"), sample("raw", "seeds=0-1", "weights=raw")
    assert any((ema[name] != raw[name]).any() for name in set(ema) & set(raw))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cfg_scale=2", "guidance=sparse"], "cfg_scale=2 needs guidance=cfg .*its own scale is guidance.w=1.5"),
        (["guidance=sparse", "guidance.r_strong=0.6"], "guidance.r_strong=0.6 must be below guidance.r_weak=0.5"),
        (["cfg_scale=2"], "cfg_scale=2 needs guidance=cfg or guidance=interval, not guidance=none"),
        (["classes=[3,10]"], "class 10 does not exist; the model knows 0 to 9"),
        (["seeds=5-"], "seeds='5-' is not accepted; use numbers and ranges"),
        (["weights=best"], r"weights='best' is not accepted; use ema \| raw"),
        (["batch_size=0"], "batch_size=0 is not accepted"),
        (["compile=reduce-overhead"], "^compile=reduce-overhead records CUDA graphs, .* on the cpu; use blocks or default"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(sample, tmp_path, overrides, message):
    with pytest.raises(ValueError, match=message):
        sample("out", *overrides)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_missing_or_altered_is_refused(sample, trained, tmp_path):
    with pytest.raises(ValueError, match="checkpoint=None is not accepted; use the folder of a checkpoint"):
        sample("out", "checkpoint=null")
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        sample("out", checkpoint=tmp_path / "nowhere")
    (newest,) = checkpoints.list_steps(trained / "checkpoints").values()
    (newest / "ema.safetensors").unlink()
    with pytest.raises(ValueError, match="ema.safetensors is missing"):
        sample("out", checkpoint=newest)
    assert not (tmp_path / "out").exists()


def test_labels_are_random_but_fixed_by_the_seed(sample):
    first, second = sample("a", "seeds=0-9"), sample("b", "seeds=9-9")
    labels = [re.search(r"class_(\d+)", name)[1] for name in first]
    assert len(set(labels)) > 3 and list(second)[0] == list(first)[9]


def test_large_npz_files_are_streamed_and_checked(tmp_path):
    from evaluations.npz import write_npz

    images = [np.full((2, 2, 3), i, dtype=np.uint8) for i in range(3)]
    write_npz(tmp_path / "a.npz", iter(images), (3, 2, 2, 3), np.arange(3))
    with np.load(tmp_path / "a.npz") as file:
        assert np.array_equal(file["arr_0"], np.stack(images))
    with pytest.raises(ValueError, match="2 images instead of 3"):
        write_npz(tmp_path / "b.npz", iter(images[:2]), (3, 2, 2, 3), np.arange(3))
    with pytest.raises(ValueError, match="image 0 is float32"):
        write_npz(tmp_path / "c.npz", iter([images[0].astype(np.float32)]), (1, 2, 2, 3), np.arange(1))
    assert not (tmp_path / "b.npz").exists()


def test_grids_show_every_image_with_its_label():
    from sampling.sampler import labelled_grid

    grid = labelled_grid([np.full((8, 8, 3), 200, dtype=np.uint8)] * 3, [1, 2, 3], num_columns=2)
    pixels = np.asarray(grid)
    assert grid.size == (2 * 68 + 4, 2 * 82 + 4)
    tiles = [(0, 0), (0, 1), (1, 0), (1, 1)]
    centres = [pixels[4 + r * 82 + 14 + 32, 4 + c * 68 + 32].tolist() for r, c in tiles]
    assert centres == [[200] * 3] * 3 + [[255] * 3]
    captions = [pixels[4 + r * 82 : 4 + r * 82 + 14, 4 + c * 68 : 40 + c * 68] for r, c in tiles]
    assert [caption.min() < 100 for caption in captions] == [True, True, True, False]
