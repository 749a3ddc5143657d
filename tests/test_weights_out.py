"""`python -m extras.weights export`: others load the folder with diffusers alone, and get the images of sample.py."""

import ast
import importlib
import json
import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, make_shard, run_sample, run_train
from PIL import Image
from safetensors.torch import load_file

import dit
from checkpoints import store
from common.errors import UserError
from configs import schema
from extras.weights import export
from extras.weights.export import export_checkpoint, join_source
from extras.weights.importing import import_weights

# Loads what sys.argv[1] lists, one after the other, and writes an .npy file of images (uint8) for each call.
LOADER = """
import importlib.util, json, sys
import numpy as np
for name in ("dit", "edm", "guidance", "extras", "common"):
    assert importlib.util.find_spec(name) is None, name
from diffusers import DiffusionPipeline
loaded = {}
for folder, call, file in json.loads(sys.argv[1]):
    if folder not in loaded:
        loaded[folder] = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    images = loaded[folder](class_labels=[2, 0, 1], seeds=[0, 1, 2], **call, output_type="np").images
    np.save(file, (images * 255).round().astype(np.uint8))
"""
CASES = {  # run, keys of the pipeline's call, settings of sample.py
    "edm_default": ("edm", {}, ["guidance=cfg", "cfg_scale=1.5"]),  # the run's own guidance and steps
    "edm_churn": (
        "edm", {"guidance_scale": 3, "num_inference_steps": 4, "sampler": {"S_churn": 2.0}},
        ["guidance=cfg", "cfg_scale=3", "num_steps=4", "S_churn=2"],
    ),
    "ddpm": ("ddpm", {"guidance_scale": 1.5, "num_inference_steps": 4}, ["guidance=cfg", "cfg_scale=1.5", "num_steps=4"]),
    "sit_default": ("sit", {}, []),
    "sit_interval": (
        "sit", {"guidance_scale": 40.0, "guidance": {"level_lo": 0.4, "level_hi": 0.9, "channels": 3}},
        ["guidance=interval", "cfg_scale=40", "guidance.level_lo=0.4", "guidance.level_hi=0.9", "guidance.channels=3"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, vae):
    """{"edm": a routed run on digits, "sit": LightningDiT on normalised latents, "ddpm": imported}; no output is zero."""
    folder = tmp_path_factory.mktemp("runs")
    shards = folder / "shards"
    shards.mkdir()
    info = {"autoencoder": f"sd-vae:{vae}", "scale_factor": 0.5, "resolution": 16, "num_classes": 3}
    info |= {"latents_mean": (0.5, -1.0, 0.0, 2.0), "latents_std": (1.0, 2.0, 0.5, 1.5)}
    make_shard(shards / "a.safetensors", channels=4, size=8, **info)
    few = ["train.num_steps=2", "train.lr=1e-2", "diffusion.sampler.num_steps=3"]
    sit = ["model=lightningdit", "diffusion=sit", "guidance=none", "sample.every=0", "train.precision=fp32"]
    sit += ["data=custom", f"data.path={shards}"]
    torch.manual_seed(0)
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 10, "learn_sigma": True}
    torch.save(dit.build("DiT-XS/2", **sizes, init="official_tread").state_dict(), folder / "published.pt")
    import_weights(str(folder / "published.pt"), "dit", str(folder / "ddpm"), autoencoder="identity", scale_factor=1.0)
    return {
        "edm": run_train(folder, "edm", "model=tread", "sample.rounding=truncate", *few),
        "sit": run_train(folder, "sit", "model.backbone=LightningDiT-XS/2", *sit, *few),
        "ddpm": folder / "ddpm",
    }


@pytest.fixture(scope="module")
def exports(tmp_path_factory, runs):
    """The folder of each run's export."""
    folder = tmp_path_factory.mktemp("exports")
    for name, run in runs.items():
        export_checkpoint(str(run), str(folder / name))
    return {name: folder / name for name in runs}


@pytest.fixture(scope="module")
def elsewhere(exports, tmp_path_factory):
    """The images of CASES, made by a process that has diffusers, but not the repository, in an empty folder without a network."""
    folder = tmp_path_factory.mktemp("elsewhere")
    jobs = [[str(exports[run]), call, str(folder / f"{name}.npy")] for name, (run, call, _) in CASES.items()]
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    own = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOADER, json.dumps(jobs)]
    process = subprocess.run(command, cwd=folder, env=inherited | own, capture_output=True, text=True, timeout=180)
    assert process.returncode == 0, process.stderr
    return {name: np.load(folder / f"{name}.npy").astype(int) for name in CASES}


@pytest.mark.parametrize("case", CASES)
def test_diffusers_alone_makes_the_images_of_sample_py(runs, elsewhere, tmp_path, case):
    run, _, settings = CASES[case]
    where = [f"checkpoint={runs[run]}", f"output={tmp_path}", "seeds=0-2", "classes=[2,0,1]", "cpu_threads=1"]
    run_sample(*where, *settings)
    images = np.stack([np.asarray(Image.open(file)).astype(int) for file in sorted(tmp_path.glob("seed_*.png"))])
    assert images.shape == elsewhere[case].shape and np.abs(images - elsewhere[case]).max() <= 1 and images.std() > 1
    others = [name for name in CASES if name != case and CASES[name][0] == run]
    assert all(np.abs(elsewhere[case] - elsewhere[other]).max() > 1 for other in others)  # the settings matter


@pytest.fixture
def pipeline(exports, tmp_path, monkeypatch):
    """The loaded export of the EDM run, in this process."""
    import diffusers.utils.dynamic_modules_utils as dynamic
    from diffusers import DiffusionPipeline

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return DiffusionPipeline.from_pretrained(exports["edm"], trust_remote_code=True)


def test_a_call_takes_a_generator_labels_of_any_form_and_bfloat16(pipeline):
    def generator():
        return torch.Generator().manual_seed(1)

    first = pipeline(torch.tensor([3, 4]), generator=generator(), output_type="np").images
    assert first.shape == (2, 8, 8, 3) and first.dtype == np.float32 and first.min() >= 0 and first.max() <= 1
    assert np.array_equal(first, pipeline([3, 4], generator=generator(), output_type="np").images)
    alone = pipeline(3, generator=generator(), output_type="np").images  # the first seed that the generator draws
    # A batch of another size adds up float32 sums in another order. Each of the 12 blocks is a chain of 7 products of up to 384
    # terms. Three steps of Heun evaluate the network 5 times, and guidance counts its two estimates 1.5 and 0.5 times.
    assert np.abs(alone - first[:1]).max() < 5 * (1.5 + 0.5) * 7 * 12 * 384**0.5 * 2**-24  # 0.001: a quarter of a grey level
    assert np.abs(first[1] - first[0]).max() > 0.1
    image = pipeline(3, seeds=4).images[0]
    assert image.size == (8, 8) and image.mode == "RGB"
    assert pipeline(3, seeds=4, output_type="latent").images.shape == (1, 1, 8, 8)
    for seeds in (np.int64(4), np.array([4]), torch.tensor([4])):
        assert np.array_equal(pipeline(3, seeds=seeds).images[0], image)
    guided = pipeline(3, seeds=4, guidance_scale=4.0, output_type="np").images
    rounded = pipeline.to(torch.bfloat16)(3, seeds=4, guidance_scale=4.0, output_type="np").images
    assert not np.array_equal(rounded, guided) and np.abs(rounded - guided).max() < 0.1


def test_images_are_rounded_or_truncated_as_the_run_does(pipeline):
    levels = pipeline([3, 4], seeds=[0, 1], output_type="np").images * 255
    for rounding, expected in (("truncate", np.floor), ("round", np.round)):
        images = np.stack(pipeline([3, 4], seeds=[0, 1]).images)
        assert pipeline.config.rounding == rounding and (images == expected(levels)).mean() > 0.98
        pipeline.register_to_config(rounding="round")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"class_labels": 11}, ValueError, "class_labels=11: give labels from 0 to 10"),
        ({"class_labels": [0.5]}, ValueError, r"class_labels=\[0.5\]: give labels"),
        ({"class_labels": [1, 2], "seeds": [1]}, ValueError, "shape"),
        ({"class_labels": [1, 2], "seeds": "12"}, TypeError, "integer"),
        ({"class_labels": 1, "seeds": [0.5]}, TypeError, "integer"),
        ({"class_labels": 1, "sampler": {"solver": "heun"}}, ValueError, "solver"),
        ({"class_labels": 1, "guidance": {"level_lo": 2.0, "level_hi": 1.0}}, ValueError, "level_lo=2.0 must be below level_hi"),
    ],
)
def test_a_call_that_cannot_be_answered_says_why(pipeline, call, error, message):
    with pytest.raises(error, match=message):
        pipeline(**call)


def test_a_null_class_that_was_never_trained_is_not_used(pipeline):
    pipeline.register_to_config(null_class=None)
    pipeline(1, seeds=1, guidance_scale=1)
    with pytest.raises(ValueError, match="guidance_scale=1.5 needs the null class, which was never trained: use 1"):
        pipeline(1, seeds=1)


def test_an_export_holds_the_ema_or_the_raw_weights_and_no_private_paths(runs, exports, tmp_path):
    (checkpoint,) = store.list_steps(runs["sit"] / "checkpoints").values()
    export_checkpoint(str(checkpoint), str(tmp_path / "raw"), weights="raw")
    for folder, weights in ((exports["sit"], "ema"), (tmp_path / "raw", "raw")):
        stored = store.load_weights(checkpoint, weights)
        exported = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
        assert exported.keys() == stored.keys() and all(torch.equal(exported[name], stored[name]) for name in stored)
    names = {file.relative_to(exports["sit"]).as_posix() for file in exports["sit"].rglob("*") if file.is_file()}
    code = {name for name in names if name.endswith(".py")}
    assert {name.partition("_")[0] for name in code} == {"pipeline", "transformer/pipeline"} and names - code == {
        "README.md", "model_index.json", "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors", "vae/config.json", "vae/diffusion_pytorch_model.safetensors",
    }  # fmt: skip
    for name in names - {name for name in names if name.endswith(".safetensors")}:
        text = (exports["sit"] / name).read_text()
        assert str(tmp_path.parent) not in text and str(REPOSITORY) not in text, name
        assert name not in code or "Permission is hereby granted, free of charge" in text


def test_the_card_says_where_the_weights_come_from(exports):
    cards = [(exports[name] / "README.md").read_text() for name in ("edm", "ddpm")]
    assert "ema weights after 2 steps" in cards[0] and "ema weights of " in cards[1] and "(kind=dit)" in cards[1]


def test_every_diffusion_and_network_of_the_configuration_can_be_exported():
    from extras.weights import pipeline

    assert {file.stem for file in (REPOSITORY / "configs" / "diffusion").glob("*.yaml")} == pipeline.DIFFUSIONS.keys()
    modules = [importlib.import_module(module) for name, module in schema.NETWORKS.items() if not name.endswith("sprint")]
    backbones = [name for module in modules for name in module.BACKBONES]
    assert all(hasattr(pipeline, f"{name.partition('-')[0]}Model") for name in backbones)


def test_the_joined_file_imports_nothing_of_the_project_and_defines_no_name_twice():
    _, text = join_source("extras.weights.pipeline")
    imported, defined = set(), Counter()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {node.module} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
    assert not [name for name in imported if any(REPOSITORY.glob(f"{name.split('.')[0]}*"))]
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        defined.update(name for target in targets if (name := getattr(target, "id", getattr(target, "name", None))))
    # dit.py and lightningdit.py have constructors by name, which the classes of the export do not call.
    assert {name for name, count in defined.items() if count > 1} <= {"build", "BACKBONES"}


def test_the_name_of_a_joined_file_says_its_content(tmp_path, monkeypatch):
    for name in ("LICENSE", "b.py"):
        (tmp_path / name).write_text("x = 2\n")
    (tmp_path / "a.py").write_text("from b import (\n    x,\n)\n\ny = x\n")
    monkeypatch.setattr(export, "REPOSITORY", tmp_path)
    first, text = join_source("a")
    assert text.index("x = 2") < text.index("y = x") and "import (" not in text
    (tmp_path / "b.py").write_text("x = 3\n")
    assert first.startswith("a_") and join_source("a")[0] not in (first, "a_")


def test_export_leaves_nothing_if_a_setting_is_wrong_and_overwrites_nothing(runs, vae, tmp_path):
    for checkpoint, autoencoder, message in (
        ("nowhere", None, "checkpoint: nowhere is not the folder"),
        (str(runs["edm"]), f"sd-vae:{vae}", "has 4 channels, and the latents have 1"),
    ):
        with pytest.raises(UserError, match=message):
            export_checkpoint(checkpoint, str(tmp_path / "out"), autoencoder=autoencoder)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=f"output={tmp_path} exists; give a new folder"):
        export_checkpoint(str(runs["edm"]), str(tmp_path))
