"""prepare_checkpoint.py export: others load the folder with diffusers alone, and get the images of sample.py."""

import contextlib
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import get_args

import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from conftest import REPOSITORY, composed, forget_accelerate, make_shard, run_train
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image
from safetensors.torch import load_file

import dit
from common.errors import UserError
from common.files import append_line
from configs import schema
from extras.weights import __main__ as prepare_checkpoint
from extras.weights import source
from extras.weights.card import PAPERS, describe_figures, without_folders
from extras.weights.export import NETWORKS, describe_network, describe_sampling, push_folder
from training import build, load
from training import checkpoint as checkpoints

SEEDS, LABELS = [0, 1, 2], [2, 0, 1]
# Loads what sys.argv[1] lists, one after the other, and writes an .npy file of images (uint8) for each call.
LOADER = """
import importlib.util, json, sys
import numpy as np
for name in ("dit", "edm", "guidance", "weights", "setup"):
    assert importlib.util.find_spec(name) is None, name
from diffusers import DiffusionPipeline
loaded = {}
for folder, call, file in json.loads(sys.argv[1]):
    if folder not in loaded:
        loaded[folder] = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    if call is None:
        loaded[folder].save_pretrained(file)
    else:
        images = loaded[folder](**call, output_type="np").images
        np.save(file, (images * 255).round().astype(np.uint8))
"""


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    """The folder of a tiny AutoencoderKL whose images are not grey."""
    from diffusers import AutoencoderKL

    folder = tmp_path_factory.mktemp("vae")
    torch.manual_seed(0)
    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4, layers_per_block=1,
    ).save_pretrained(folder)  # fmt: skip
    return folder


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
    sit = ["model=lightningdit", "diffusion=sit", "data=custom", f"data.path={shards}", "guidance=none", "sample.every=0"]
    torch.manual_seed(0)
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 10, "learn_sigma": True}
    torch.save(dit.build("DiT-XS/2", **sizes, init="official_tread").state_dict(), folder / "published.pt")
    given = [f"{folder / 'published.pt'}", "kind=dit", f"output={folder / 'ddpm'}", "autoencoder=identity", "scale_factor=1"]
    prepare_checkpoint.main(["import", *given])
    return {
        "edm": run_train(folder, "edm", "model=tread", *few),
        "sit": run_train(folder, "sit", "model.backbone=LightningDiT-XS/2", *sit, *few),
        "ddpm": folder / "ddpm",
    }


@pytest.fixture(scope="module")
def exports(tmp_path_factory, runs):
    """The folder of each run's export."""
    folder = tmp_path_factory.mktemp("exports")
    for name, run in runs.items():
        prepare_checkpoint.main(["export", f"checkpoint={run}", f"output={folder / name}"])
    return {name: folder / name for name in runs}


def sample(run, folder, *overrides):
    """The images of sample.py for SEEDS and LABELS."""
    import sample as script

    forget_accelerate()
    where = [f"checkpoint={run}", f"output={folder}", "seeds=0-2", "classes=[2,0,1]", "cpu_threads=1"]
    script.main(composed([*where, *overrides], "sample"))
    return np.stack([np.asarray(Image.open(file)) for file in sorted(folder.glob("seed_*.png"))])


def load_elsewhere(folder, jobs, **environment):
    """Run LOADER in a process that has diffusers, but not the repository, with an empty cache.

    Args:
        jobs: name -> (what to load, keys of the call or the folder to save to).

    Returns:
        name -> the images of the call.
    """
    folder.mkdir()
    (folder / "loader.py").write_text(LOADER)
    listed = [
        [str(source), do if isinstance(do, dict) else None, str(folder / f"{name}.npy" if isinstance(do, dict) else do)]
        for name, (source, do) in jobs.items()
    ]
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    own = {"HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1", "NO_PROXY": "*", "no_proxy": "*"}
    command = [sys.executable, str(folder / "loader.py"), json.dumps(listed)]
    process = subprocess.run(command, cwd=folder, env=inherited | own | environment, capture_output=True, text=True, timeout=180)
    assert process.returncode == 0, process.stderr
    return {name: np.load(folder / f"{name}.npy") for name, (_, do) in jobs.items() if isinstance(do, dict)}


CALL = {"class_labels": LABELS, "seeds": SEEDS}
CASES = {  # run, keys of the pipeline's call, settings of sample.py
    "edm_default": ("edm", {}, ["guidance=cfg", "cfg_scale=1.5"]),  # the run's own guidance and steps
    "edm_unguided": ("edm", {"guidance_scale": 1}, []),
    "edm_churn": (
        "edm",
        {"guidance_scale": 3, "num_inference_steps": 4, "sampler": {"S_churn": 2.0}},
        ["guidance=cfg", "cfg_scale=3", "num_steps=4", "S_churn=2"],
    ),
    "ddpm_guided": (
        "ddpm",
        {"guidance_scale": 1.5, "num_inference_steps": 4},
        ["guidance=cfg", "cfg_scale=1.5", "num_steps=4"],
    ),
    "sit_default": ("sit", {}, []),
    "sit_sde": (
        "sit",
        {"guidance_scale": 40.0, "sampler": {"solver": "euler_maruyama"}},
        ["guidance=cfg", "cfg_scale=40", "solver=euler_maruyama"],
    ),
    "sit_shift": (
        "sit",
        {"guidance_scale": 40.0, "num_inference_steps": 2, "sampler": {"timestep_shift": 0.3}},
        ["guidance=cfg", "cfg_scale=40", "num_steps=2", "timestep_shift=0.3"],
    ),
    "sit_interval": (
        "sit",
        {"guidance_scale": 40.0, "guidance_interval": [0.4, 0.9], "guidance_channels": 3},
        ["guidance=interval", "cfg_scale=40", "guidance.level_lo=0.4", "guidance.level_hi=0.9", "guidance.channels=3"],
    ),
}


@pytest.fixture(scope="module")
def later(runs, tmp_path_factory):
    """An export of the EDM run by another version of the code: other guidance, and a network whose output is zero."""
    folder = tmp_path_factory.mktemp("later")
    changed = folder / "repository"
    for name in ("edm", "sit", "ddpm", "weights"):
        shutil.copytree(REPOSITORY / name, changed / name)
    for name in ("guidance.py", "randomness.py", "dit.py", "lightningdit.py", "routing_module.py", "LICENSE"):
        shutil.copy(REPOSITORY / name, changed)
    for name, old, new in (
        ("guidance.py", "guided = D_weak[:, :C] + scale", "guided = D_weak[:, :C] - scale"),
        ("dit.py", "else self.unpatchify(out)", "else self.unpatchify(out) * 0"),
    ):
        text = (changed / name).read_text()
        assert old in text
        (changed / name).write_text(text.replace(old, new))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "REPOSITORY", changed)
        prepare_checkpoint.main(["export", f"checkpoint={runs['edm']}", f"output={folder / 'export'}"])
    return folder / "export"


@pytest.fixture(scope="module")
def elsewhere(exports, later, tmp_path_factory):
    """The images that a process without the repository makes: two exports, a later one, one from a hub; they save themselves."""
    folder = tmp_path_factory.mktemp("elsewhere")
    cases = {name: (exports[run], CALL | call) for name, (run, call, _) in CASES.items()}
    cases |= {"later": (later, CALL), "edm_after_later": (exports["edm"], CALL), "hub": ("you/model", CALL)}
    saved = {run: folder / f"saved_{run}" for run in ("edm", "sit")}
    cases |= {f"save_{run}": (exports[run], saved[run]) for run in saved}
    with hub_that_holds(exports["sit"]) as url:
        images = load_elsewhere(folder / "first", cases, HF_ENDPOINT=url)
    # Another process, with nothing cached: what was saved, and the later export alone. No network, and none is asked for.
    again = {f"saved_{run}": (saved[run], CALL) for run in saved} | {"later_alone": (later, CALL)}
    return images | load_elsewhere(folder / "second", again, HF_HUB_OFFLINE="1")


@contextlib.contextmanager
def hub_that_holds(folder):
    """The address of a hub with one model, you/model."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    files = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    about = {"id": "you/model", "sha": commit, "siblings": [{"rfilename": name} for name in files]}
    tree = [{"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()} for n, b in files.items()]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path, api = self.path.partition("?")[0], "/api/models/you/model"
            content = None
            if path in (api, f"{api}/revision/{commit}", f"{api}/revision/main"):
                content = json.dumps(about).encode()
            elif path.startswith(f"{api}/tree/"):
                content = json.dumps(tree).encode()
            elif path.startswith("/you/model/resolve/"):
                content = files.get(path.split("/", 5)[5])
            self.send_response(404 if content is None else 200)
            content = content or b""
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Type", "application/json" if path.startswith("/api/") else "application/octet-stream")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def assert_same_images(first, second):
    assert first.shape == second.shape and first.dtype == second.dtype == np.uint8
    assert np.abs(first.astype(int) - second).max() <= 1 and first.std() > 1


@pytest.mark.parametrize("case", CASES)
def test_diffusers_alone_makes_the_images_of_sample_py(runs, elsewhere, tmp_path, case):
    run, _, settings = CASES[case]
    assert_same_images(elsewhere[case], sample(runs[run], tmp_path / "out", *settings))
    others = [name for name in CASES if name != case and CASES[name][0] == run]
    assert all(np.abs(elsewhere[case].astype(int) - elsewhere[other]).max() > 1 for other in others)  # the settings matter


@pytest.mark.parametrize("run", ["edm", "sit"])
def test_a_loaded_pipeline_saves_itself_with_its_code(elsewhere, run):
    assert np.array_equal(elsewhere[f"saved_{run}"], elsewhere[f"{run}_default"])


def test_other_code_of_a_later_export_is_never_mixed_with_that_of_an_earlier_one(elsewhere):
    assert np.array_equal(elsewhere["edm_after_later"], elsewhere["edm_default"])
    assert np.array_equal(elsewhere["later"], elsewhere["later_alone"])
    assert np.abs(elsewhere["later"].astype(int) - elsewhere["edm_default"]).max() > 1


def test_a_pipeline_loads_from_the_hub_with_nothing_beside_what_diffusers_downloads(elsewhere):
    assert np.array_equal(elsewhere["hub"], elsewhere["sit_default"])


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
    own = pipeline(3, generator=[generator()], output_type="np").images
    assert np.abs(own - first[:1]).max() < 1e-5  # the first seed that the generator draws
    (images,) = pipeline(3, seeds=4, return_dict=False)
    assert images[0].size == (8, 8) and images[0].mode == "RGB"
    assert pipeline(3, seeds=4, output_type="latent").images.shape == (1, 1, 8, 8)
    for seeds in (np.int64(4), np.array([4]), torch.tensor([4])):
        assert np.array_equal(pipeline(3, seeds=seeds).images[0], images[0])
    guided = pipeline(3, seeds=4, guidance_scale=4.0, output_type="np").images
    assert not np.array_equal(guided, pipeline(3, seeds=4, guidance_scale=4.0, null_class=5, output_type="np").images)
    rounded = pipeline.to(torch.bfloat16)(3, seeds=4, guidance_scale=4.0, output_type="np").images
    assert not np.array_equal(rounded, guided) and np.abs(rounded - guided).max() < 0.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"class_labels": 11}, r"class_labels=11: give one label or several, each 0 to 10"),
        ({"class_labels": [0.5]}, r"class_labels=\[0.5\]: give one label"),
        ({"class_labels": []}, "give one label or several"),
        ({"class_labels": [1, 2], "seeds": [1]}, "2 class labels need as many seeds, not 1"),
        ({"class_labels": True}, "class_labels=True: give one label"),
        ({"class_labels": [1, 2], "seeds": "12"}, "seeds=12: give one integer per image"),
        ({"class_labels": 1, "seeds": [0.5]}, r"seeds=\[0.5\]: give one integer per image"),
        ({"class_labels": 1, "guidance_scale": 2.0, "null_class": 11}, "null_class=11: give a label, 0 to 10"),
        ({"class_labels": 1, "sampler": {"noise_levels": 3}}, "noise_levels is not a setting of HeunSampler"),
        ({"class_labels": 1, "sampler": {"solver": "heun"}}, "solver is not a setting of HeunSampler"),
        ({"class_labels": 1, "guidance_scale": 2.0, "guidance_channels": 2}, "guidance_channels=2: the latents have 1 channels"),
        ({"class_labels": 1, "guidance_interval": (2.0, 1.0)}, "level_lo=2.0 must be below level_hi=1.0"),
    ],
)
def test_a_call_that_cannot_be_answered_says_why(pipeline, call, message):
    with pytest.raises(ValueError, match=message):
        pipeline(**call)


def test_a_null_class_that_was_never_trained_is_not_used(pipeline):
    pipeline.register_to_config(null_class=None)
    pipeline(1, seeds=1, guidance_scale=1)
    with pytest.raises(ValueError, match="guidance_scale=1.5 needs the null class, which was never trained: use 1"):
        pipeline(1, seeds=1)


def test_pushing_while_saving_is_refused_because_the_code_would_be_left_out(pipeline, tmp_path):
    with pytest.raises(ValueError, match=r"without its code; call pipeline.push_to_hub\(repo_id\)"):
        pipeline.save_pretrained(tmp_path / "saved", push_to_hub=True)
    assert not (tmp_path / "saved").exists()


# ----------------------------------------------------------------------------------------------------------------------
# What an export holds.


def test_an_export_holds_the_ema_or_the_raw_weights_under_their_names_and_no_private_paths(runs, exports, tmp_path):
    (checkpoint,) = checkpoints.list_steps(runs["sit"] / "checkpoints").values()
    prepare_checkpoint.main(["export", f"checkpoint={checkpoint}", f"output={tmp_path / 'raw'}", "weights=raw"])
    for folder, weights in ((exports["sit"], "ema"), (tmp_path / "raw", "raw")):
        stored = checkpoints.load_weights(checkpoint, weights)
        exported = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
        assert exported.keys() == stored.keys() and all(torch.equal(exported[name], stored[name]) for name in stored)
    names = {file.relative_to(exports["sit"]).as_posix() for file in exports["sit"].rglob("*") if file.is_file()}
    code = {name for name in names if name.endswith(".py")}
    assert len(code) == 2 and names - code == {
        "README.md", "model_index.json", "training.yaml", "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors", "vae/config.json", "vae/diffusion_pytorch_model.safetensors",
    }  # fmt: skip
    for name in names - {name for name in names if name.endswith(".safetensors")}:
        text = (exports["sit"] / name).read_text()
        assert str(tmp_path.parent) not in text and str(REPOSITORY) not in text, name
        assert name not in code or "Permission is hereby granted, free of charge" in text
    training = yaml.safe_load((exports["sit"] / "training.yaml").read_text())
    assert training["train.lr"] == 0.01 and training["data.autoencoder"].startswith("sd-vae:") and "data.path" not in training


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("sd-vae:/models/vae", "sd-vae:vae"),
        ("sd-vae:stabilityai/sd-vae-ft-ema", "sd-vae:stabilityai/sd-vae-ft-ema"),
        ("/data/ref.npz", "ref.npz"),
        ("C:\\data\\ref.npz", "ref.npz"),
        (None, None),
    ],
)
def test_of_an_absolute_path_the_public_sees_the_name(value, shown):
    assert without_folders({"key": value}) == {"key": shown}


def test_an_export_describes_network_guidance_and_null_class_of_its_run(runs):
    (checkpoint,) = checkpoints.list_steps(runs["edm"] / "checkpoints").values()
    cfg = load.load_config(checkpoint)
    assert (
        describe_sampling(cfg)["guidance"] == {"cfg_scale": 1.5, "channels": None} and describe_sampling(cfg)["null_class"] == 10
    )
    no_null = cfg.model_copy(update={"model": cfg.model.model_copy(update={"class_dropout": 0.0})})
    assert describe_sampling(no_null)["null_class"] is None
    json.dumps(describe_sampling(cfg), allow_nan=False)
    from extras.weights.network import DiTModel

    for learn_sigma in (False, True):
        net = build.build_network(cfg.model_copy(update={"model": cfg.model.model_copy(update={"learn_sigma": learn_sigma})}))
        made = DiTModel(**describe_network(net))
        shapes = [{name: x.shape for name, x in one.state_dict().items()} for one in (made, net)]
        assert shapes[0] == shapes[1] and made.config.learn_sigma == learn_sigma


def test_every_network_and_diffusion_of_the_configuration_can_be_exported():
    from extras.weights import network, pipeline

    diffusions = [get_args(one.model_fields["name"].annotation)[0] for one in get_args(get_args(schema.Diffusion)[0])]
    assert sorted(diffusions) == sorted(pipeline.DIFFUSIONS) == sorted(PAPERS)
    assert all(hasattr(network, name) for name in NETWORKS.values()) and NETWORKS.keys() == {"DiT", "LightningDiT"}


def test_imported_weights_are_said_to_be_imported_and_not_to_be_trained_here(exports):
    card = (exports["ddpm"] / "README.md").read_text()
    assert "The weights were imported from published.pt (kind=dit). Its authors say how they were trained." in card
    assert "AdamW" not in card and "learning rate" not in card and "Nothing was measured" in card
    training = yaml.safe_load((exports["ddpm"] / "training.yaml").read_text())
    assert training["diffusion.name"] == "ddpm" and not any(key.startswith("train.") for key in training)


def test_a_network_that_diffusers_has_no_class_for_is_named(runs, tmp_path, monkeypatch):
    monkeypatch.delitem(NETWORKS, "DiT")
    with pytest.raises(UserError, match="export has no class for diffusers of the network DiT; write one in weights/network.py"):
        export(runs["edm"], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_files_that_give_one_name_two_meanings_are_not_joined(tmp_path, monkeypatch):
    for name, text in {
        "a.py": "from b import f\nx = 1\n",
        "b.py": "x = 2\n\n\ndef f():\n    return x\n",
        "c.py": "import b\n",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "LICENSE").write_text("MIT")
    monkeypatch.setattr(source, "REPOSITORY", tmp_path)
    with pytest.raises(AssertionError, match="a gives x another meaning than the files before it"):
        source.join_source("a", "Title.")
    with pytest.raises(AssertionError, match="line 1 imports b as a whole; exports need `from b import ...`"):
        source.join_source("c", "Title.")
    name, text = source.join_source("b", "Title.")
    assert name.startswith("b_") and "b.py" in text and text.endswith("return x\n")


# ----------------------------------------------------------------------------------------------------------------------
# The model card.


def fid_line(content, checkpoint="/secret/checkpoints/step_0000002", **settings):
    point = {"checkpoint": checkpoint, "weights": "ema", "cfg_scale": 1.5, "num_steps": 40, "num_samples": 50000}
    point |= {"reference": "/secret/VIRTUAL.npz", "autoencoder": None, "content": content}
    return {"point": point | settings, "metrics": {"fid": 3.7123, "recall": 0.6049}}


def test_a_card_shows_what_was_measured_of_these_weights_with_its_conditions_and_nothing_else(runs, tmp_path):
    run = tmp_path / "measured"
    shutil.copytree(runs["edm"], run)
    (checkpoint,) = checkpoints.list_steps(run / "checkpoints").values()
    cfg, own = load.load_config(checkpoint), checkpoints.identity(checkpoint)
    assert describe_figures(checkpoint, cfg, "ema") == "Nothing was measured of these weights.\n"
    results = run / "evaluations" / "sweep" / "results.jsonl"
    results.parent.mkdir(parents=True)
    append_line(results, fid_line(own))
    append_line(results, fid_line(own, cfg_scale=4.75, weights="raw"))
    append_line(results, fid_line("another checkpoint", cfg_scale=5.75))
    append_line(run / "metrics.jsonl", {"step": 2, "loss": 0.125, "fd_digits250/cfg1.0": 8.25, "fd_digits250/cfg2.0": 9.5})
    append_line(run / "metrics.jsonl", {"step": 1, "fd_digits250/cfg1.0": 11.75})

    def table(weights):
        lines = [line for line in describe_figures(checkpoint, cfg, weights).splitlines() if line.startswith("|")]
        header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
        return [{name: cell for name, cell in zip(header, row) if cell} for row in rows]

    of_fid, *of_training = table("ema")
    assert of_fid == {
        "fid": "3.71", "recall": "0.605", "measured by": "fid.py", "weights": "ema", "cfg_scale": "1.5", "num_steps": "40",
        "num_samples": "50000", "reference": "VIRTUAL.npz",
    }  # fmt: skip
    shared = {
        "measured by": "train.py", "weights": "ema", "num_steps": "3", "S_churn": "0.0", "num_samples": "250",
        "precision": "fp32", "detector": "digits", "detector_precision": "fp32", "reference": "digits_reference.npz",
    }  # fmt: skip
    assert of_training == [shared | {"fd_digits": v, "cfg_scale": scale} for v, scale in (("8.25", "1.0"), ("9.50", "2.0"))]
    assert [row["cfg_scale"] for row in table("raw")] == ["4.75"]

    prepare_checkpoint.main(["export", f"checkpoint={run}", f"output={tmp_path / 'out'}", "license=cc-by-nc-4.0"])
    card = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "cc-by-nc-4.0" and card.data.library_name == "diffusers" and "tread" in card.data.tags
    assert "| 3.71 | 0.605 |" in card.text and "5.75" not in card.text and "secret" not in card.text and "0.125" not in card.text
    assert "DiT-XS/2" in card.text and "step 2 of 2, 8 images in batches of 4" in card.text
    assert "0.5 of the tokens, blocks 2 to -4" in card.text and "The weights have the licence `cc-by-nc-4.0`" in card.text
    (start,) = (json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines())
    assert f"device {start['device']}" in card.text and f"torch {start['torch']}" in card.text


def test_the_card_of_a_checkpoint_that_lies_in_no_run_claims_nothing(runs, tmp_path):
    (checkpoint,) = checkpoints.list_steps(runs["sit"] / "checkpoints").values()
    shutil.copytree(checkpoint, tmp_path / "alone")
    prepare_checkpoint.main(["export", f"checkpoint={tmp_path / 'alone'}", f"output={tmp_path / 'out'}"])
    text = (tmp_path / "out" / "README.md").read_text()
    assert (
        "Nothing was measured of these weights." in text and "Started at" not in text and "licence of the weights is not" in text
    )
    assert "latents of 4x8x8 for images of 16x16" in text and "TREAD" not in text


# ----------------------------------------------------------------------------------------------------------------------
# The hub, and what can go wrong.


class Hub:
    """In place of huggingface_hub.HfApi; `asked` is what it was told to do."""

    asked: list = []
    fails: Exception | None = None

    def whoami(self):
        return {"name": "you"}

    def create_repo(self, repo_id, *, private, exist_ok):
        assert exist_ok
        self.asked.append(("create", repo_id, private))
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, *, repo_id, folder_path, commit_message, delete_patterns):
        if self.fails:
            raise self.fails
        names = sorted(file.relative_to(folder_path).as_posix() for file in Path(folder_path).rglob("*") if file.is_file())
        self.asked.append(("upload", repo_id, names, delete_patterns))


@pytest.fixture
def hub(monkeypatch):
    fake = type("HubOfThisTest", (Hub,), {"asked": []})
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    return fake


def export(run, output, *settings):
    prepare_checkpoint.main(["export", f"checkpoint={run}", f"output={output}", *settings])


def test_push_creates_a_private_repository_and_uploads_the_folder(runs, hub, tmp_path, caplog):
    caplog.set_level("INFO")
    export(runs["edm"], tmp_path / "out", "push=you/model")
    create, (_, repo_id, names, gone) = hub.asked
    assert create == ("create", "you/model", True) and repo_id == "you/model" and gone == ["*.py", "*/*.py"]
    assert names == sorted(
        file.relative_to(tmp_path / "out").as_posix() for file in (tmp_path / "out").rglob("*") if file.is_file()
    )
    assert "uploaded to https://huggingface.co/you/model" in caplog.text
    assert 'from_pretrained("you/model"' in (tmp_path / "out" / "README.md").read_text()
    export(runs["edm"], tmp_path / "public", "push=you/model", "private=false")
    assert hub.asked[2] == ("create", "you/model", False)


def test_an_upload_that_fails_leaves_the_folder_and_says_how_to_go_on(hub, tmp_path):
    hub.fails = OSError("no route to host")
    with pytest.raises(
        UserError, match=r"push=you/model failed \(no route to host\); .*out is complete: `hf upload you/model .*out \.`"
    ):
        push_folder(tmp_path / "out", "you/model", True)


def refused(status):
    class Answer:
        status_code, headers = status, {}
        request = None

    error = HfHubHTTPError.__new__(HfHubHTTPError)
    Exception.__init__(error, f"{status} from the hub")
    error.response = Answer
    return error


@pytest.mark.parametrize(
    ("setting", "token", "answer", "message"),
    [
        (
            "push=you/model",
            None,
            None,
            "push=you/model: there is no token of the Hugging Face hub; run `hf auth login`, or set HF_TOKEN",
        ),
        ("push=a b", "t", None, "push=a b is not a name on the Hugging Face hub, such as you/model"),
        ("push=you/model", "t", refused(401), "the hub does not accept your token; run `hf auth login`"),
        (
            "push=you/model",
            "t",
            refused(503),
            r"the hub cannot be reached \(503 from the hub\); leave push out, and run `hf upload`",
        ),
        ("push=you/model", "t", OSError("no network"), r"the hub cannot be reached \(no network\); leave push out"),
    ],
)
def test_a_push_that_cannot_work_ends_before_any_slow_work(runs, hub, tmp_path, monkeypatch, setting, token, answer, message):
    def whoami(self):
        raise answer

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    monkeypatch.setattr(hub, "whoami", whoami)
    with pytest.raises(UserError, match=message) as error:
        export(runs["edm"], tmp_path / "out", setting)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists() and hub.asked == []


def test_offline_a_push_is_refused_at_once(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    with pytest.raises(UserError, match="push=you/model: HF_HUB_OFFLINE=1 forbids it; unset it, or leave push out"):
        export(runs["edm"], tmp_path / "out", "push=you/model")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["colour=red"], "export: colour is not a key or has no value; it takes checkpoint=, output=, "),
        (["weights=best"], "weights='best' is not accepted; use ema | raw"),
        (["checkpoint=nowhere"], "checkpoint: nowhere is not a folder"),
        (["autoencoder=none"], "autoencoder=none: nothing is known that decodes these latents"),
        (["autoencoder=sd-vae:VAE"], "autoencoder: sd-vae:.* decodes 4 channels, but the latents have 1"),
    ],
)
def test_wrong_settings_end_in_one_line_and_leave_nothing(runs, vae, tmp_path, settings, message):
    settings = [setting.replace("VAE", str(vae)) for setting in settings]
    where = [] if settings[0].startswith("checkpoint") else [f"checkpoint={runs['edm']}"]
    with pytest.raises(UserError, match=message) as error:
        prepare_checkpoint.main(["export", *where, f"output={tmp_path / 'out'}", *settings])
    assert "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


def test_export_overwrites_nothing_and_takes_an_empty_folder(runs, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("mine", "file"):
        with pytest.raises(UserError, match=f"output=.*{name} is not empty; export overwrites nothing: give another folder"):
            export(runs["edm"], tmp_path / name)
    (tmp_path / "empty").mkdir()
    export(runs["edm"], tmp_path / "empty")
    assert (tmp_path / "empty" / "model_index.json").exists()
    with pytest.raises(UserError, match="empty is not empty"):
        export(runs["edm"], tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "mine"]
