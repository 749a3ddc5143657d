"""sample.py: image i depends only on seed i, and no image is made twice or overwritten."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import checked, encode, renew_manifest, run_sample, run_train
from PIL import Image
from safetensors.torch import load_file, save_file

import dit
import guidance as guidances
from checkpoints.checkpoint import read_checkpoint
from checkpoints.load import load_network
from common.errors import UserError
from common.images import labelled_grid
from evaluations.result_settings import guidance_for_results
from latents import autoencoders
from latents.autoencoders import Identity
from runtime.compilation import compile_network
from sampling.sample_command import class_numbers
from sampling.sampler import ImageSampler
from training import hooks
from training.ema import EMA

FEW = ["sampler.num_steps=3", "machine.cpu_threads=1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Fixture: runs of two steps, so that the output layers are no longer zero. Tests do not write to them."""
    folder, settings = tmp_path_factory.mktemp("runs"), ["train.num_steps=2", "train.lr=1e-2"]
    return {
        "edm": run_train(folder, "edm", *settings, "checkpoint.every=1"),
        "sit": run_train(folder, "sit", *settings, "diffusion=sit"),
        "dense": run_train(folder, "dense", *settings, "model=dit", "model.backbone=DiT-XS/4"),
    }


@pytest.fixture
def sample(runs, tmp_path):
    def run(output, *overrides, checkpoint=None):
        where = [f"checkpoint={checkpoint or runs['edm']}", f"output={tmp_path / output}"]
        where += [] if any(override.startswith("guidance=") for override in overrides) else ["guidance=none"]
        run_sample(*where, *FEW, *overrides)
        return {path.name: np.asarray(Image.open(path)) for path in sorted((tmp_path / output).glob("seed_*.png"))}

    return run


def assert_same_images(first, second):
    assert first.keys() == second.keys() and len(first) > 0
    for name in first:
        # With another batch size, matrix products may round differently. A pixel may then change by 1 of 255.
        difference = np.abs(first[name].astype(int) - second[name].astype(int))
        assert difference.max() <= 1 and (difference > 0).mean() < 0.02, name


def assert_all_differ(first, second):
    assert all((first[name] != second[name]).any() for name in first)


def test_an_image_depends_on_its_seed_and_not_on_its_batch(sample):
    together = sample("together", "seeds=0-6")
    assert len({image.tobytes() for image in together.values()}) == 7
    assert_same_images(together, sample("apart", "seeds=0-6", "sampling.batch_size=2"))
    some = sample("some", "seeds=[5,2]", "sampling.batch_size=1")
    assert_same_images(some, {name: together[name] for name in some})
    assert_all_differ(some, sample("raw", "seeds=[5,2]", "sampling.weights=raw"))
    labels = [re.search(r"class_(\d+)", name)[1] for name in together]
    assert len(set(labels)) > 2  # random, but fixed by the seed


def test_churn_and_the_subsets_of_sparse_guidance_depend_on_the_seed_too(sample):
    churn, sparse = ["sampler.S_churn=2"], ["guidance=sparse", "guidance.w=2", "guidance.r_strong=0.25"]
    together = sample("together", "seeds=0-3", *churn, *sparse)
    assert_same_images(together, sample("apart", "seeds=0-3", "sampling.batch_size=1", *churn, *sparse))
    for name, settings in (("churn", churn), ("sparse", sparse)):
        assert_all_differ(together, sample(name, "seeds=0-3", *settings))


def test_sampling_logs_its_cost(sample, caplog):
    caplog.set_level("INFO")
    sample("sparse", "seeds=0-1", "guidance=sparse", "guidance.w=2", "guidance.r_strong=0.25")
    # Sampling with 3 noise levels takes 5 evaluations of two branches.
    assert re.search(r"cost     10 network evaluations and [\d.]+ GFLOPs per image", caplog.text)
    sample("interval", "seeds=0-1", "guidance=interval", "guidance.cfg_scale=2", "guidance.level_lo=0", "guidance.level_hi=0.01")
    assert "cost     7 network evaluations" in caplog.text  # both evaluations at the last level are guided


def test_a_compiled_network_sees_a_single_batch_size(monkeypatch):
    graphs, compile_function = [], torch.compile
    keep = lambda graph, inputs: graphs.append(graph) or graph  # noqa: E731
    monkeypatch.setattr(torch, "compile", partial(compile_function, backend=keep))
    torch.compiler.reset()
    net = dit.DiT(input_size=4, patch_size=2, in_channels=1, num_classes=3, depth=2, width=16, num_heads=2, init="official_tread")
    ema = EMA(net, 0.9)
    guidance = partial(guidances.classifier_free, cfg_scale=2.0)
    shape = ["data.in_channels=1", "data.input_size=4", "data.num_classes=3", "+data.scale_factor=1"]
    cfg = checked(["sampler.num_steps=2", "sampling.precision=fp32", *shape])
    with torch._dynamo.config.patch():
        plain = ImageSampler(ema.net, cfg, guidance, Identity(), torch.device("cpu"))
        expected = [plain([0, 1, 2], [0, 1, 2]), plain([3], [0])]
        compile_network(ema.net, "blocks")
        sampler = replace(plain, is_compiled=True)
        got = [sampler([0, 1, 2], [0, 1, 2]), sampler([3], [0])]
    for images, others in zip(got, expected, strict=True):
        assert images.shape == others.shape
        assert np.abs(images.astype(int) - others).max() <= 1
    assert len(graphs) == 1  # every step evaluates one batch of 3, with and without the label
    assert sampler.cost["network_evaluations"] == plain.cost["network_evaluations"]


def test_a_sit_run_samples_with_a_solver_whose_noise_depends_on_the_seed(runs, sample):
    sit, settings = runs["sit"], ["seeds=0-3", "sampler.solver=euler_maruyama"]
    assert_same_images(*(sample(f"batch_{size}", *settings, f"sampling.batch_size={size}", checkpoint=sit) for size in (4, 1)))


def test_autoguidance_takes_a_second_checkpoint_with_the_same_latents_and_diffusion(runs, sample):
    plain = sample("plain", "seeds=0-3")
    assert_same_images(plain, sample("itself", "seeds=0-3", "guidance=autoguidance", f"guidance.checkpoint={runs['edm']}"))
    assert_all_differ(plain, sample("guided", "seeds=0-3", "guidance=autoguidance", f"guidance.checkpoint={runs['dense']}"))
    for checkpoint, words in ((runs["sit"], "diffusion.name: 'sit' -> 'edm'"), ("nowhere", "guidance.checkpoint")):
        with pytest.raises(UserError, match=words):
            sample("wrong", "guidance=autoguidance", f"guidance.checkpoint={checkpoint}")


def test_the_weak_network_can_have_the_weights_without_averaging(runs, sample):
    weak = ["seeds=0-3", "guidance=autoguidance", f"guidance.checkpoint={runs['dense']}", "guidance.weights={}"]
    raw, ema = (sample(name, *weak[:3], weak[3].format(name)) for name in ("raw", "ema"))
    assert_all_differ(raw, ema)


def test_balanced_labels_have_every_class_equally_often(sample):
    for labels in ("balanced", "random"):
        classes = [int(name[18:21]) for name in sample(labels, "num_samples=30", f"sampling.labels={labels}")]
        assert (np.bincount(classes, minlength=10).tolist() == [3] * 10) == (labels == "balanced")
        given = sample(f"{labels}_given", "num_samples=6", f"sampling.labels={labels}", "classes=[3,7]")
        assert [int(name[18:21]) for name in given] == [3, 7, 3, 7, 3, 7]  # `classes` are balanced with any labels


def test_sparse_guidance_takes_an_earlier_checkpoint_and_moving_ratios(runs, sample, tmp_path, caplog):
    caplog.set_level("INFO")
    first, last = (runs["edm"] / "checkpoints" / f"step_000000{step}" for step in (1, 2))
    weak = [f"guidance.checkpoint={first}", "guidance.w=2"]
    auto = sample("auto", "seeds=0-3", "guidance=autoguidance", *weak, checkpoint=last)
    zero = sample("zero", "seeds=0-3", "guidance=sparse", *weak, "guidance.r_weak=0", checkpoint=last)
    assert_same_images(auto, zero)
    caplog.clear()
    moving = ["guidance.r_strong_last=0.6", "guidance.r_weak=0.6", "guidance.r_weak_last=0"]
    moved = [
        "guidance=sparse",
        *weak,
        *moving,
        "machine.compile=blocks",
    ]  # moving ratios are not compiled: each would need its own code
    together = sample("moved", "seeds=0-3", *moved, checkpoint=last)
    net = load_network(read_checkpoint(last), "ema", torch.device("cpu"))
    # Heun evaluates the second and third of 3 noise levels twice. Both networks have the same size.
    strong, weak_ratios = [0, 0.3, 0.3, 0.6, 0.6], [0.6, 0.3, 0.3, 0, 0]
    gflops = sum(net.forward_flops(ratio) for ratio in strong + weak_ratios) / 1e9
    assert f"cost     10 network evaluations and {gflops:.4g} GFLOPs per image" in caplog.text
    assert_same_images(together, sample("apart", "seeds=0-3", "sampling.batch_size=1", *moved, checkpoint=last))
    assert_all_differ(together, auto)
    with pytest.raises(UserError, match="was trained for other latents, classes or noise levels"):
        sample("wrong", "guidance=sparse", f"guidance.checkpoint={runs['sit']}", checkpoint=last)
    with pytest.raises(UserError, match="not 0 routes for 4 tokens and 1 routes for 16 tokens"):
        sample("dense", "guidance=sparse", f"guidance.checkpoint={runs['dense']}", checkpoint=last)


def test_sparse_guidance_with_one_network_and_constant_ratios_keeps_the_names_of_earlier_results():
    (settings,) = checked(["guidance=sparse"]).guidance
    own = {"level_lo": None, "level_hi": None, "w": 1.5, "r_strong": 0.0, "r_weak": 0.5}
    stored = settings.model_dump(exclude_defaults=True)  # a new key must not change the hash in a folder's name
    assert list(stored.items()) == list(own.items())[:2] + [("name", "sparse")] + list(own.items())[2:]
    assert guidance_for_results(settings) == {"guidance": "sparse", **{f"guidance.{key}": value for key, value in own.items()}}
    other = settings.model_copy(update={"r_weak_last": 0.75, "weights": "raw"})
    new = {"guidance.r_weak_last": 0.75, "guidance.weights": "raw"}
    assert guidance_for_results(other) == guidance_for_results(settings) | new


def test_the_npz_has_adms_format(sample, tmp_path):
    images = sample("out", "seeds=0-4", "classes=[3,7]")
    with np.load(tmp_path / "out" / "samples_0-4.npz") as file:
        assert file["arr_0"].shape == (5, 8, 8, 3) and file["arr_0"].dtype == np.uint8
        assert file["labels"].tolist() == [3, 7, 3, 7, 3] and file["labels"].dtype == np.int64
        assert np.array_equal(file["arr_0"], np.stack(list(images.values())))
    assert list(images) == [f"seed_{seed:06d}_class_{label:03d}.png" for seed, label in enumerate([3, 7, 3, 7, 3])]


@pytest.fixture(scope="module")
def named(runs, tmp_path_factory):
    """Fixture: a run whose latents have class names."""
    folder = tmp_path_factory.mktemp("named")
    rng = np.random.default_rng(0)
    for name in ("black, white", "color", "red"):
        (folder / "images" / name).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / "images" / name / f"{i}.png")
    encode(folder / "images", folder / "latents", "identity", "resolution=8")
    settings = ["model.backbone=DiT-XS/4", "train.num_steps=2", "sample_grid.every=2", "sample_grid.num_samples=3"]
    with pytest.MonkeyPatch.context() as patch:
        captions = []
        patch.setattr(hooks, "labelled_grid", lambda images, texts: captions.append(texts) or labelled_grid(images, texts))
        run = run_train(folder, "run", "data=custom", f"data.path={folder / 'latents'}", *settings)
    assert captions == [["0 black, white", "1 color", "2 red"]] * len(captions) and captions
    return run


def test_class_names_are_in_file_names_and_grids_and_choose_classes(named, sample, tmp_path, monkeypatch):
    captions, grid = [], labelled_grid
    monkeypatch.setattr(
        "sampling.sample_command.labelled_grid", lambda images, texts: captions.append(texts) or grid(images, texts)
    )
    images = sample("out", "seeds=0-3", "classes=[color,0]", checkpoint=named)
    assert list(images) == [f"seed_{i:06d}_class_{('001_color', '000_black-white')[i % 2]}.png" for i in range(4)]
    assert captions == [["1 color", "0 black, white"] * 2]
    for name, message in (("colour", "no class has the name 'colour'; nearest: color"), ("[1,color]", "by number and by name")):
        with pytest.raises(UserError, match=message):
            sample("other", "seeds=0-3", f"classes={name}", checkpoint=named)
    with pytest.raises(UserError, match="checkpoint: .*latents holds latents, not a checkpoint; give the folder of a run"):
        sample("other", "seeds=0-3", checkpoint=named.parent / "latents")
    for file in (tmp_path / "out").glob("seed_*"):  # as earlier versions named the files
        file.rename(file.with_name(re.sub(r"(class_[0-9]+).*", r"\1.png", file.name)))
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("seed_*")}
    assert list(sample("out", "seeds=0-3", "classes=[1,0]", checkpoint=named)) == sorted(before)
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("seed_*")} == before


def test_a_checkpoint_has_its_class_names_without_the_latents(named, sample, tmp_path):
    folder = shutil.copytree(named / "checkpoints" / "step_0000002", tmp_path / "copy")
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace(str(named.parent / "latents"), str(tmp_path / "nowhere")))
    renew_manifest(folder)
    assert [*sample("out", "seeds=0", "classes=color", checkpoint=folder)] == ["seed_000000_class_001_color.png"]
    with np.load(tmp_path / "out" / "samples_0-0.npz") as file:
        assert file["class_names"].tolist() == ["black, white", "color", "red"]


def test_names_of_other_latents_at_the_same_path_are_not_those_of_the_classes(named, sample, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    named = shutil.copytree(named, named.parent / "older")
    for folder in (named / "checkpoints").iterdir():  # as earlier versions wrote it
        state = json.loads((folder / "state.json").read_text())
        assert state.pop("class_names") == ["black, white", "color", "red"]
        (folder / "state.json").write_text(json.dumps(state))
        renew_manifest(folder)
    assert "seed_000000_class_001_color.png" in sample("before", "seeds=0", "classes=[color]", checkpoint=named)
    images = shutil.copytree(named.parent / "images", tmp_path / "images")
    shutil.copytree(images / "red", images / "a new first class")
    latents = named.parent / "latents"
    latents.rename(tmp_path / "kept")
    encode(images, latents, "identity", "resolution=8")
    try:
        with pytest.raises(UserError, match="classes: color is a name, but"):
            sample("out", "seeds=0-3", "classes=[color]", checkpoint=named)
        assert "latents holds other latents than this run's, so its class names are not used" in caplog.text
        assert "seed_000000_class_001.png" in sample("out", "seeds=0-3", "classes=[1]", checkpoint=named)
    finally:
        shutil.rmtree(latents)
        (tmp_path / "kept").rename(latents)


NAMES = ["10", " a", "2", "0-1", "b, c", "0"]


@pytest.mark.parametrize(
    ("typed", "numbers", "said"),
    [
        ("classes=2", [2], ""),  # class 2 has this name
        ("classes=0", [0], "0 is class number 0; 'classes=[\"0\"]' means the class of this name, number 5"),
        ("classes=[0-2,4]", [0, 1, 2, 4], "0 is class number 0"),
        ('classes="0"', [5], ""),
        ('classes=["10",1]', [0, 1], ""),
        ("classes=' a'", [1], ""),
        ("classes='b, c'", [4], ""),
        ("classes=0-1", [3], ""),  # the name of a class
        ("classes=03", [3], ""),
        ("classes='2-4, 5'", [2, 3, 4, 5], ""),
    ],
)
def test_a_number_is_a_class_and_text_in_quotes_may_be_its_name(typed, numbers, said, caplog):
    classes = checked(["checkpoint=x", typed], "sample").classes
    assert class_numbers(classes, NAMES, "x") == numbers
    assert said in caplog.text and bool(said) == bool(caplog.text)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("a", "no class has the name 'a'"),
        ("5-", "'5-' is not a list"),
        ("-1", "'-1' is not a list"),
        ("[0,'10']", "repeats a class"),
    ],
)
def test_classes_that_do_not_exist_are_refused(typed, words):
    with pytest.raises(UserError, match=f"^classes.*{words}"):
        class_numbers(checked(["checkpoint=x", f"classes={typed}"], "sample").classes, NAMES, "x")


def test_classes_by_name_need_latents_with_names(sample):
    with pytest.raises(UserError, match="classes: color is a name, but the latents at data.path=.* have no class names"):
        sample("out", "seeds=0-3", "classes=color")


def test_seeds_that_draw_few_of_the_classes_are_said(sample, caplog):
    images = sample("out", "seeds=[0,10,20,30]", "classes=0-9")
    assert [name[-7:-4] for name in images] == ["000"] * 4
    assert "4 seeds draw only 1 of 10 classes, because seed i uses entry i mod 10 of classes= (seed 0: class 0, " in caplog.text
    caplog.clear()
    sample("even", "seeds=0-3", "classes=0-9")
    assert "seeds draw only" not in caplog.text


def test_interrupted_sampling_continues_with_the_missing_seeds(sample, tmp_path):
    before = sample("out", "seeds=0-4")
    names = sorted(before)
    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in names}
    (tmp_path / "out" / names[3]).unlink()
    (tmp_path / "out" / f".tmp_0123456789abcdef_{names[4]}").write_bytes(b"torn")
    assert_same_images(before, sample("out", "seeds=0-4"))
    assert [name for name in names if (tmp_path / "out" / name).stat().st_mtime_ns != times[name]] == [names[3]]
    with pytest.raises(UserError, match="sampler.S_churn: 0.0 -> 2"):
        sample("out", "seeds=0-1", "sampler.S_churn=2")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="mine is not empty"):
        sample("mine", "seeds=0-1")


def test_the_default_folder_is_named_after_the_settings(runs, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(runs["edm"], copy)
    for scale in ("2", "2.0", "3"):
        run_sample(f"checkpoint={copy}", *FEW, "seeds=0-1", "guidance=cfg", f"guidance.cfg_scale={scale}")
    names = sorted(path.name[:-6] for path in (copy / "generated").iterdir())
    assert names == ["step_0000002_ema_cfg2_3steps_", "step_0000002_ema_cfg3_3steps_"]


def test_images_of_another_decoder_do_not_join_a_folder(sample, tmp_path, monkeypatch):
    def use(hash_):
        monkeypatch.setattr(autoencoders, "hash_local_files", lambda spec: hash_)

    use("a" * 32)
    sample("new", "seeds=0")
    use("b" * 32)
    with pytest.raises(UserError, match="holds images with other settings .autoencoder_hash: 'aaa.*' -> 'bbb.*; choose another"):
        sample("new", "seeds=0-1")


def test_a_checkpoint_folder_alone_is_enough(runs, sample, tmp_path):
    shutil.copytree(runs["edm"] / "checkpoints" / "step_0000002", tmp_path / "alone")
    assert_same_images(sample("from_run", "seeds=0-1"), sample("from_folder", "seeds=0-1", checkpoint=tmp_path / "alone"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["guidance.cfg_scale=2", "guidance=sparse"], "guidance.cfg_scale is a key of guidance=cfg or interval or path_drop or"),
        (["guidance=cfg", "guidance.cfg_scale=[2,3]"], "cfg_scale=.2, 3.: Input should be a valid number"),
        (["classes=[3,10]"], "class 10 .*0 to 9"),
        (["seeds=5-"], "seeds: '5-'"),
        (["checkpoint=null"], "checkpoint is not set"),
        (["checkpoint=latents/digits.safetensors"], "digits.safetensors is not the folder of a run"),
        (["seeds=0-3", "num_samples=4"], "seeds= and num_samples=4"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_written(sample, tmp_path, overrides, words):
    with pytest.raises(UserError, match=words):
        sample("out", *overrides)
    assert not (tmp_path / "out").exists()


def test_grids_show_every_image_with_its_label():
    grid = labelled_grid([np.full((8, 8, 3), 200, dtype=np.uint8)] * 3, [1, 2, 3], num_columns=2)
    pixels = np.asarray(grid)
    assert grid.size == (2 * 68 + 4, 2 * 82 + 4)
    tiles = [(0, 0), (0, 1), (1, 0), (1, 1)]
    centres = [pixels[4 + r * 82 + 14 + 32, 4 + c * 68 + 32].tolist() for r, c in tiles]
    assert centres == [[200] * 3] * 3 + [[255] * 3]
    captions = [pixels[4 + r * 82 : 4 + r * 82 + 14, 4 + c * 68 : 40 + c * 68] for r, c in tiles]
    assert [bool((caption < 128).any()) for caption in captions] == [True, True, True, False]
    white = [np.full((8, 8, 3), 255, dtype=np.uint8)] * 2
    wide = np.asarray(labelled_grid(white, [f"{'long name ' * 9}", "字"]))
    assert (wide[4:18, 4:68] < 128).any() and (wide[4:18, 68:72] == 255).all()  # the caption ends with its image
    drawn = [np.asarray(labelled_grid(white[:1], [text])).tobytes() for text in ("1 字", "1", "1 ö", "1 ж", "1 ü")]
    assert drawn[0] == drawn[1] and len({*drawn}) == 4


def test_nan_from_the_network_and_a_damaged_settings_file_are_reported(runs, sample, tmp_path):
    folder = shutil.copytree(runs["edm"] / "checkpoints" / "step_0000002", tmp_path / "copy")
    save_file({name: x * np.nan for name, x in load_file(folder / "ema.safetensors").items()}, folder / "ema.safetensors")
    renew_manifest(folder)
    with pytest.raises(UserError, match="the network returns NaN or infinity with sampling.precision=fp32"):
        sample("out", "seeds=0", checkpoint=folder)
    assert not (tmp_path / "out").exists()  # a command that fails leaves no empty folder
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "settings.yaml").write_text("guidance: {na")
    with pytest.raises(UserError, match="settings.yaml .choose another output=.* cannot be read: "):
        sample("out", "seeds=0", checkpoint=folder)
