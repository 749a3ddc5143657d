"""Published weights become runs: outputs equal those of the published network, and every command reads them."""

import argparse
import logging
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import Malicious, encode, run_sample
from definition import definition
from PIL import Image
from safetensors.torch import save_file
from stand_ins import untrained_va_vae

import dit
from checkpoints import load, store
from checkpoints.checkpoint import read_checkpoint, resolve_checkpoint
from cli.arguments import run_command
from common.errors import UserError
from common.files import REPOSITORY
from edm import EDM
from extras import lightningdit
from extras.ddpm import DDPM
from extras.weights import importing
from extras.weights.__main__ import COMMANDS
from sit import SiT

WIDTH, DEPTH, HEADS, PATCH, CHANNELS, SIZE, CLASSES = 96, 12, 3, 2, 1, 8, 10  # DiT-XS/2 for the digits
PIXELS = {"autoencoder": "identity", "scale_factor": 2 / 3}  # as in the digits
# For two float32 networks with equal weights: 5 products and attention per block, sums of up to 4 * WIDTH terms, each rounded.
TOLERANCE = 7 * DEPTH * (4 * WIDTH) ** 0.5 * 2**-24


def dit_weights(learn_sigma=False, width=WIDTH, seed=0):
    """Return random weights in the layout of facebookresearch/DiT, which tests/test_dit.py defines."""
    sizes = dict(input_size=SIZE, patch_size=PATCH, in_channels=CHANNELS, num_classes=CLASSES, depth=DEPTH, num_heads=HEADS)
    net, g = dit.DiT(**sizes, width=width, learn_sigma=learn_sigma), torch.Generator().manual_seed(seed)
    for p in net.parameters():
        if p.requires_grad:
            p.data.normal_(std=0.5 / math.sqrt(p.shape[-1]) if p.ndim == 2 else 0.1, generator=g)
    return dict(net.state_dict())


def published_output(w, x, t, y):
    """Return all output channels of the published network, computed by tests/definition.py."""
    return definition({name: value.double() for name, value in w.items()}, x.double(), t.double(), y, depth=DEPTH).float()


def assert_same(a, b):
    """Check that the values are equal up to the order of float32 sums."""
    assert a.shape == b.shape and (a - b).abs().max() <= TOLERANCE * max(1, b.abs().max())


def inputs(*t):
    g = torch.Generator().manual_seed(1)
    return torch.randn(3, CHANNELS, SIZE, SIZE, generator=g), torch.tensor(t), torch.tensor([0, 3, CLASSES])  # the null class


@pytest.fixture
def import_file(tmp_path):
    """Fixture: import_file(content, kind, **settings) returns (configuration, folder of the checkpoint)."""

    def run(content, kind, file="weights.pt", output="imported", **settings):
        (save_file if file.endswith(".safetensors") else torch.save)(content, tmp_path / file)
        importing.import_weights(str(tmp_path / file), kind, str(tmp_path / output), **settings)
        checkpoint = resolve_checkpoint(tmp_path / output, "checkpoint")
        return checkpoint.config, checkpoint.path

    return run


def network(cfg, folder, weights="ema"):
    return load.load_network(read_checkpoint(folder), weights, torch.device("cpu"))


@torch.no_grad()
def test_imported_dit_keeps_its_outputs_and_predicts_noise(import_file):
    w = dit_weights(learn_sigma=True)
    cfg, folder = import_file(w, "dit", file="weights.safetensors", **PIXELS)
    assert cfg.model.backbone == "DiT-XS/2" and cfg.model.learn_sigma and cfg.diffusion.name == "ddpm"
    assert (cfg.data.in_channels, cfg.data.input_size, cfg.data.num_classes) == (1, 8, 10)
    assert (cfg.data.scale_factor, cfg.data.resolution, cfg.sampling.autoencoder) == (2 / 3, 8, "identity")
    assert folder.name == "step_0000000"
    x, t, y = inputs(0.0, 400.0, 999.0)
    out, net = published_output(w, x, t, y), network(cfg, folder)
    assert_same(net(x, t, y), out)
    a = torch.from_numpy(np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))[[0, 400, 999]]).float().reshape(3, 1, 1, 1)
    D_x, v = DDPM().denoise(net, x, t, y).chunk(2, dim=1)
    assert_same(D_x * a.sqrt(), x - (1 - a).sqrt() * out[:, :1])
    assert_same(v, (out[:, 1:] + 1) / 2)


@torch.no_grad()
@pytest.mark.parametrize("learn_sigma", [True, False])
def test_importing_sit_reverses_its_time_and_sign_in_the_weights(import_file, learn_sigma):
    w = dit_weights(learn_sigma)
    cfg, folder = import_file({"ema": w, "model": w, "args": argparse.Namespace(lr=1e-4)}, "sit", **PIXELS)
    assert not cfg.model.learn_sigma and cfg.diffusion.name == "sit"
    assert (cfg.sampler.num_steps, cfg.sampler.solver) == (250, "euler_maruyama")
    x, t, y = inputs(0.05, 0.4, 0.9)
    velocity = published_output(w, x, 1 - t, y)[:, :1]  # data - noise, at SiT's time
    net = network(cfg, folder)
    assert_same(net(x, t, y), -velocity)
    assert_same(SiT().denoise(net, x, t, y), x + t.reshape(-1, 1, 1, 1) * velocity)
    assert (net(x, t, y) - net(x, 1 - t, y)).abs().max() > 10 * TOLERANCE  # with these weights, time matters


@torch.no_grad()
def test_importing_repa_keeps_its_time_and_leaves_out_its_projectors(import_file):
    model, ema = dit_weights(seed=1), dit_weights(seed=2)
    halves = {}  # REPA's first checkpoints name the blocks after the aligned one differently
    for name, value in ema.items():
        first, number, *rest = *name.split("."), ""
        is_later = first == "blocks" and int(number) >= 8
        halves[".".join(["decoder_blocks", str(int(number) - 8), *rest[:-1]]) if is_later else name] = value
    projectors = {"projectors.0.0.weight": torch.ones(7, WIDTH), "projectors.0.0.bias": torch.ones(7)}
    cfg, folder = import_file({"model": model | projectors, "ema": halves | projectors, "opt": {}, "steps": 70}, "repa", **PIXELS)
    x, t, y = inputs(0.05, 0.4, 0.9)
    for weights, w in (("raw", model), ("ema", ema)):
        assert_same(network(cfg, folder, weights)(x, t, y), published_output(w, x, t, y))
    assert folder.name == "step_0000070" and cfg.diffusion.name == "sit" and cfg.train.num_steps == 70


@torch.no_grad()
def test_an_imported_tread_checkpoint_has_raw_weights_an_ema_and_its_step(import_file):
    # As TREAD's trainer saves them: the network is inside the preconditioning, which is wrapped by DDP or compiled.
    first, second = "module._orig_mod.model.", "model."
    model = {f"{first}{name}": value for name, value in dit_weights(seed=1).items()}
    ema = {f"{second}{name}": value for name, value in dit_weights(seed=2).items()}
    stored = {"model_state_dict": model, "ema_state_dict": ema, "optimizer_state_dict": {"state": {}}, "step": 400}
    cfg, folder = import_file(stored, "tread", **PIXELS)
    assert cfg.model.name == "tread" and len(cfg.model.routes) == 1 and cfg.diffusion.name == "edm"
    x, sigma, y = inputs(0.01, 0.7, 30.0)
    s = sigma.reshape(-1, 1, 1, 1)
    for weights, seed in (("raw", 1), ("ema", 2)):
        w = dit_weights(seed=seed)
        F_x = published_output(w, x / (s**2 + 0.25).sqrt(), sigma.log() / 4, y)
        expected = 0.25 / (s**2 + 0.25) * x + s * 0.5 / (s**2 + 0.25).sqrt() * F_x
        assert_same(EDM().denoise(network(cfg, folder, weights), x, sigma, y), expected)
    assert read_checkpoint(folder).step == 400 and cfg.sampling.rounding == "truncate"
    with pytest.raises(UserError, match="output=.*imported exists"):  # nothing is overwritten
        import_file(stored, "tread", **PIXELS)


@torch.no_grad()
def test_importing_lightningdit_reverses_time_and_sign_and_normalises_each_channel(import_file, tmp_path):
    torch.manual_seed(0)
    published = lightningdit.build("LightningDiT-XS/1", input_size=4, in_channels=3, num_classes=5).eval()
    for p in published.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.1)
    stats = {"mean": torch.tensor([1.0, 2, 3]).reshape(1, 3, 1, 1), "std": torch.full((1, 3, 1, 1), 2.0)}
    torch.save(stats, tmp_path / "stats.pt")
    content = {"ema": published.state_dict()}
    cfg, folder = import_file(content, "lightningdit", latents_stats=str(tmp_path / "stats.pt"))
    assert cfg.model.backbone == "LightningDiT-XS/1" and cfg.sampling.autoencoder == "none"
    assert (cfg.data.scale_factor, cfg.data.resolution) == (1.0, 64)
    assert (cfg.data.latents_mean, cfg.data.latents_std) == ([1.0, 2.0, 3.0], [2.0] * 3)
    assert (cfg.sampling.precision, cfg.sampling.precision, cfg.sampling.rounding) == ("fp32", "fp32", "round")
    assert (cfg.sampler.solver, cfg.sampler.timestep_shift) == ("euler", 0.3)
    x, t, y = torch.randn(3, 3, 4, 4), torch.tensor([0.05, 0.4, 0.9]), torch.tensor([0, 2, 5])
    assert_same(network(cfg, folder)(x, t, y), -published(x, 1 - t, y))
    with pytest.raises(UserError, match="latents_stats= is missing"):
        import_file(content, "lightningdit", output="other")


def test_lightningdits_weights_are_fine_tuned_on_images_that_were_encoded_with_its_statistics(import_file, train, tmp_path):
    untrained_va_vae(tmp_path / "vavae.pt")
    published = lightningdit.build("LightningDiT-XS/1", input_size=8, in_channels=4, num_classes=2)
    stats = {"mean": torch.arange(4.0).reshape(1, 4, 1, 1), "std": torch.full((1, 4, 1, 1), 2.0)}
    torch.save(stats, file := tmp_path / "stats.pt")
    cfg, _ = import_file({"ema": published.state_dict()}, "lightningdit", latents_stats=str(file))
    for i in range(4):
        image = tmp_path / "images" / "ab"[i % 2] / f"{i}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((32, 32), 50 + i).convert("RGB").save(image)
    for name, how in (("good", f"latents_stats={file}"), ("other", "normalize=true")):
        encode(tmp_path / "images", tmp_path / name, f"va-vae:{tmp_path / 'vavae.pt'}", "kind=sample", how)
    keys = ["model=lightningdit", "model.backbone=LightningDiT-XS/1", "diffusion=sit", "data=custom", "train.precision=fp32"]
    keys += ["train.num_steps=1", "guidance=none", f"init_from={tmp_path / 'imported'}"]
    assert resolve_checkpoint(train("tuned", *keys, f"data.path={tmp_path / 'good'}"), "checkpoint").step == 1
    with pytest.raises(UserError, match="init_from=.*imported does not fit this configuration: data.latents_mean: "):
        train("refused", *keys, f"data.path={tmp_path / 'other'}")


def images_of(checkpoint, output, *overrides):
    run_sample(f"checkpoint={checkpoint}", f"output={output}", "machine.cpu_threads=1", "sampler.num_steps=4", *overrides)
    return {path.name: np.asarray(Image.open(path)).astype(int) for path in sorted(output.glob("seed_*.png"))}


def test_an_imported_and_a_native_checkpoint_of_equal_weights_give_the_same_images(import_file, train, tmp_path):
    native = train("native", "diffusion=sit", "sampling.rounding=truncate", "train.num_steps=2", "train.lr=1e-2")
    weights = store.load_weights(resolve_checkpoint(native, "checkpoint").path, "ema")
    _, imported = import_file({name: value.clone() for name, value in weights.items()}, "repa", **PIXELS)
    same = ["seeds=0-4", "guidance=none", "sampling.batch_size=3", "sampler.solver=heun"]
    ours, theirs = (images_of(folder, tmp_path / name, *same) for folder, name in ((native, "a"), (imported, "b")))
    assert ours.keys() == theirs.keys() and len(ours) == 5 and all((ours[name] == theirs[name]).all() for name in ours)


def test_images_of_imported_dit_weights_do_not_depend_on_the_batch(import_file, tmp_path):
    _, folder = import_file(dit_weights(learn_sigma=True), "dit", **PIXELS)
    guided = ["seeds=0-3", "guidance=cfg", "guidance.cfg_scale=2", "guidance.channels=1"]
    together, apart = (images_of(folder, tmp_path / f"batch{size}", f"sampling.batch_size={size}", *guided) for size in (4, 1))
    assert len({image.tobytes() for image in together.values()}) == 4
    for name in together:  # matrix products of another batch size may round differently
        assert np.abs(together[name] - apart[name]).max() <= 1


def test_training_starts_from_imported_weights_and_their_ema_has_no_warm_up(import_file, train):
    _, folder = import_file(dit_weights(learn_sigma=True), "sit", **PIXELS)
    run = train("tuned", "diffusion=sit", f"init_from={folder}", "train.num_steps=1", "train.lr=1e-2")
    after = resolve_checkpoint(run, "checkpoint").path
    ema, raw, before = (
        store.load_weights(*one)["blocks.0.attn.qkv.weight"] for one in ((after, "ema"), (after, "raw"), (folder, "ema"))
    )
    assert torch.allclose(ema - before, 1e-4 * (raw - before), atol=1e-7) and (raw - before).abs().max() > 1e-3


def test_training_does_not_resume_from_an_imported_checkpoint(import_file, train, tmp_path):
    import_file(dit_weights(), "repa", output="run", **PIXELS)
    with pytest.raises(UserError, match=rf"was imported from .*weights.pt \(kind=repa\).* init_from={tmp_path / 'run'}"):
        train("run", "diffusion=sit")
    with pytest.raises(UserError, match="init_state=all"):
        train("other", "diffusion=sit", f"init_from={tmp_path / 'run'}", "init_state=all")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (dit_weights() | {"x_embedder.proj.bias": torch.ones(7)}, r"x_embedder.proj.bias is \[7\]"),
        (dit_weights() | {"pos_embed": torch.ones(1, 15, WIDTH)}, r"pos_embed is \[1, 15, 96\]"),
        (dit_weights(width=100), "12 x 100 / 2; .* 12 x 96 / 2"),
        (dit_weights() | {"final_layer.linear.bias": torch.full((4,), math.nan)}, "final_layer.linear.bias holds NaN"),
        ({"model": dit_weights(), "args": {"num_classes": 7}}, "a label table of 11 rows, .* num_classes=10 or 11, not 7"),
        (dit_weights(learn_sigma=True), "twice as many channels out as in"),
        ({"a": torch.ones(2)}, r"is not a DiT .*x_embedder.proj.weight.* it holds a, "),
        ([torch.ones(2)], "holds no state dict"),
        ({0: torch.ones(2)}, "weights.pt holds no state dict; give a file that maps names to tensors"),
        ({"model": dit_weights(), "ema": 3}, "holds no state dict"),
    ],
)
def test_other_contents_are_refused_in_one_line(import_file, tmp_path, content, message):
    with pytest.raises(UserError, match=message) as refused:
        import_file(content, "tread", **PIXELS)
    assert "\n" not in str(refused.value) and not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("kind", "learn_sigma", "settings", "message"),
    [
        (
            "dit",
            False,
            PIXELS,
            "only as many channels out as in, which fits kind=sit or repa or tread or lightningdit, not kind=dit",
        ),
        (
            "dit",
            True,
            {},
            "is for latents with 1 channels, and autoencoder=sd-vae:stabilityai/sd-vae-ft-ema has 4; set autoencoder=",
        ),
        (
            "tread",
            False,
            {"autoencoder": "sd-vae:stabilityai/sd-vae-ft-mse"},
            "autoencoder=sd-vae:stabilityai/sd-vae-ft-mse has 4;",
        ),
    ],
)
def test_weights_that_do_not_fit_the_kind_or_the_autoencoder_are_refused(
    import_file, tmp_path, kind, learn_sigma, settings, message
):
    with pytest.raises(UserError, match=message):
        import_file(dit_weights(learn_sigma), kind, **settings)
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("kind", ["dit", "sit", "tread"])
@pytest.mark.parametrize("name", ["ema.safetensors", "model.safetensors"])
def test_a_file_of_our_own_checkpoints_is_not_imported(import_file, tmp_path, kind, name):
    _, folder = import_file(dit_weights(), "tread", **PIXELS)
    with pytest.raises(UserError, match=f"^source={folder / name} belongs to a checkpoint of this project; use it as it is"):
        importing.import_weights(str(folder / name), kind, str(tmp_path / "new"), **PIXELS)
    (folder / "manifest.json").write_text('{"files": 1}')  # of another program
    importing.import_weights(str(folder / name), "tread", str(tmp_path / "new"), **PIXELS)


def test_files_that_hold_no_weights_are_refused_and_no_code_in_them_runs(tmp_path):
    torch.save({"model": dit_weights(), "extra": Malicious(os.mkdir, str(tmp_path / "pwned"))}, tmp_path / "evil.pt")
    (tmp_path / "pointer.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    save_file(dit_weights(), tmp_path / "cut.safetensors")
    os.truncate(tmp_path / "cut.safetensors", 10_000)
    for name, message in (
        ("evil.pt", "cannot be read: it is damaged, or holds objects other"),
        ("pointer.pt", "is not a file of torch.save, .* it begins with b'version https://git-lfs.github"),
        ("cut.safetensors", "cannot be read"),
        ("nothing.pt", "cannot be read: FileNotFoundError"),
    ):
        with pytest.raises(UserError, match=f"{name} {message}"):
            importing.import_weights(str(tmp_path / name), "dit", str(tmp_path / "run"))
    assert not (tmp_path / "pwned").exists() and not (tmp_path / "run").exists()


@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "settings", "arguments", "expected"),
    [
        (11, {}, {}, (10, 0.1)),
        (10, {"num_classes": 10}, {}, (10, 0.0)),
        (10, {}, {"num_classes": 10}, (10, 0.0)),
        (11, {"num_classes": 11}, {"num_classes": 10}, (11, 0.0)),
        (1, {}, {}, (1, 0.0)),
    ],
)
def test_a_label_table_without_a_null_class_imports_and_is_not_guided(
    import_file, tmp_path, caplog, rows, settings, arguments, expected
):
    caplog.set_level(logging.INFO)
    w = dit_weights() | {"y_embedder.embedding_table.weight": torch.randn(rows, WIDTH)}
    content = {"model": w, "args": argparse.Namespace(**arguments)}
    cfg, folder = import_file(content, "repa", **PIXELS, **settings)
    assert (cfg.data.num_classes, cfg.model.class_dropout) == expected
    assert f"{expected[0]} classes {'and' if expected[1] else 'without'} a null class" in caplog.text
    x, t, _ = inputs(0.05, 0.4, 0.9)
    y = torch.tensor([0, rows // 2, expected[0] - 1])
    assert_same(network(cfg, folder)(x, t, y), published_output(w, x, t, y))
    if not expected[1]:
        with pytest.raises(UserError, match="needs the null class"):
            images_of(folder, tmp_path / "images", "guidance=cfg", "guidance.cfg_scale=2")


@pytest.mark.parametrize(
    ("kind", "arguments", "refused"),
    [
        ("sit", {"path_type": "GVP", "prediction": "velocity"}, "path_type=GVP; only linear can be sampled"),
        ("sit", {"path_type": "Linear", "prediction": "noise"}, "prediction=noise; only v or velocity can be sampled"),
        ("repa", {"path_type": "cosine", "prediction": "v"}, "path_type=cosine"),
        ("lightningdit", {"path_type": "GVP", "prediction": "velocity"}, "path_type=GVP"),
        ("sit", {"path_type": "Linear", "prediction": "velocity"}, None),
        ("repa", {"path_type": "linear", "prediction": "v"}, None),
    ],
)
def test_weights_of_another_path_or_prediction_are_refused(import_file, kind, arguments, refused):
    stored = {"config": {"transport": arguments}} if kind == "lightningdit" else {"args": argparse.Namespace(**arguments)}
    content = {"model": dit_weights()} | stored
    if refused is None:
        import_file(content, kind, **PIXELS)
    else:
        with pytest.raises(UserError, match=f"was trained with {refused}"):
            import_file(content, kind, **PIXELS)


def test_a_resolution_that_contradicts_the_latents_is_refused(import_file):
    with pytest.raises(UserError, match="resolution=16, but .*weights.pt is for 8 latents a side, each of 1 pixels"):
        import_file(dit_weights(), "repa", resolution=16, **PIXELS)
    with pytest.raises(UserError, match="resolution=60, but .* 8 latents a side, each of a whole number of pixels"):
        import_file(dit_weights(), "repa", autoencoder="none", scale_factor=1.0, resolution=60)
    cfg, _ = import_file(dit_weights(), "repa", autoencoder="none", scale_factor=1.0, resolution=64)
    assert cfg.data.resolution == 64


def test_the_scale_of_an_unknown_autoencoder_must_be_given(import_file):
    with pytest.raises(UserError, match="autoencoder=sd-vae:somebody/vae needs scale_factor= and resolution="):
        import_file(dit_weights(), "repa", autoencoder="sd-vae:somebody/vae")
    cfg, _ = import_file(dit_weights(), "repa", autoencoder="sd-vae:somebody/vae", scale_factor=0.3, resolution=128)
    assert (cfg.data.scale_factor, cfg.data.resolution) == (0.3, 128)


def test_the_command_line_imports(tmp_path, caplog):
    torch.save(dit_weights(learn_sigma=True), tmp_path / "weights.pt")
    settings = ["kind=dit", f"output={tmp_path / 'run'}", "autoencoder=identity", f"scale_factor={2 / 3}"]
    with caplog.at_level(logging.INFO):
        run_command(COMMANDS, "", ["import", f"source={tmp_path / 'weights.pt'}", *settings])
    assert "DiT-XS/2 for latents of 1x8x8, 10 classes and a null class, in" in caplog.text


def test_the_script_in_the_documentation_samples_a_run_without_the_rest_of_the_project(train, tmp_path):
    """The script runs on a digits run, in a folder with only the files that the page names."""
    run = train("run", "train.num_steps=1", "train.lr=1e-2")
    text = (REPOSITORY / "docs" / "weights.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    sizes = {"DiT-B/2": "DiT-XS/2", "input_size=32": "input_size=8", "in_channels=4": "in_channels=1"}
    sizes |= {
        "num_classes=1000": "num_classes=10",
        "[207, 360]": "[3, 7]",
        "(2, 4, 32, 32)": "(2, 1, 8, 8)",
        "runs/in256/checkpoints/step_0400000": "ema",
    }
    for published, small in sizes.items():
        assert published in script
        script = script.replace(published, small)
    for name in ("dit.py", "routing_module.py"):
        shutil.copy(REPOSITORY / name, tmp_path)
    for name in ("common", "edm"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    shutil.copytree(run / "checkpoints" / "step_0000001", tmp_path / "ema")
    lines = ["torch.manual_seed(0)", script, "torch.save((latents, noise), 'latents.pt')"]
    (tmp_path / "script.py").write_text(script.splitlines()[0] + "\n" + "\n".join(lines))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    latents, noise = torch.load(tmp_path / "latents.pt")
    net, edm = load.load_network(read_checkpoint(run / "checkpoints" / "step_0000001"), "ema", torch.device("cpu")), EDM()
    expected = edm.Sampler()(lambda x, sigma, y: edm.denoise(net, x, sigma, y), noise, torch.tensor([3, 7]))
    assert torch.allclose(latents, expected, atol=1e-4) and latents.std() > 0.1
