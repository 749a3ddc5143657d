"""Published weights become runs: their outputs are those of the published network, and every command reads them."""

import argparse
import json
import math
import os

import numpy as np
import pytest
import torch
from conftest import composed, finish, forget_accelerate, metrics, start
from PIL import Image
from safetensors.torch import save_file
from torch.nn import functional as F

from common.errors import UserError
from edm import EDM
from extras import lightningdit
from extras.ddpm import DDPM
from extras.weights import __main__ as prepare_checkpoint
from sit import SiT
from training import build, load
from training import checkpoint as checkpoints

WIDTH, DEPTH, HEADS, PATCH, CHANNELS, SIZE, CLASSES = 96, 12, 3, 2, 1, 8, 10  # DiT-XS/2 for the digits
PIXELS = ["autoencoder=identity", f"scale_factor={2 / 3}"]  # as the digits have them
LABELS = torch.tensor([0, 3, CLASSES])  # the last is the null class


def dit_weights(learn_sigma=False, width=WIDTH, depth=DEPTH, seed=0):
    """Random weights in facebookresearch/DiT's layout."""
    out = PATCH**2 * CHANNELS * (2 if learn_sigma else 1)
    layers = {
        "t_embedder.mlp.0": (width, 256),
        "t_embedder.mlp.2": (width, width),
        "final_layer.linear": (out, width),
        "final_layer.adaLN_modulation.1": (2 * width, width),
    }
    for i in range(depth):
        layers |= {
            f"blocks.{i}.attn.qkv": (3 * width, width),
            f"blocks.{i}.attn.proj": (width, width),
            f"blocks.{i}.mlp.fc1": (4 * width, width),
            f"blocks.{i}.mlp.fc2": (width, 4 * width),
            f"blocks.{i}.adaLN_modulation.1": (6 * width, width),
        }
    shapes = {
        "pos_embed": (1, (SIZE // PATCH) ** 2, width),
        "x_embedder.proj.weight": (width, CHANNELS, PATCH, PATCH),
        "x_embedder.proj.bias": (width,),
        "y_embedder.embedding_table.weight": (CLASSES + 1, width),
    }
    for name, shape in layers.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    g = torch.Generator().manual_seed(seed)
    scales = {name: 0.5 / math.sqrt(shape[-1]) if len(shape) == 2 else 0.1 for name, shape in shapes.items()}
    return {name: torch.randn(shape, generator=g) * scales[name] for name, shape in shapes.items()}


def published_output(w, x, t, y):
    """The published network (arXiv 2212.09748, section 3), written from its definition: every output channel."""

    def linear(name, h):
        return h @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(h, shift, scale):
        h = (h - h.mean(2, keepdim=True)) / (h.var(2, unbiased=False, keepdim=True) + 1e-6).sqrt()
        return h * (1 + scale[:, None]) + shift[:, None]

    B, grid, width = len(x), SIZE // PATCH, w["pos_embed"].shape[2]
    h = F.conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=PATCH).flatten(2).transpose(1, 2)
    h = h + w["pos_embed"]
    angles = t[:, None] * 10000 ** (-torch.arange(128, dtype=torch.float32) / 128)
    c = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], 1))))
    c = F.silu(c + w["y_embedder.embedding_table.weight"][y])
    for i in range(DEPTH):
        block = f"blocks.{i}"
        shift1, scale1, gate1, shift2, scale2, gate2 = linear(f"{block}.adaLN_modulation.1", c).chunk(6, 1)
        qkv = linear(f"{block}.attn.qkv", norm(h, shift1, scale1)).reshape(B, -1, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = ((q @ k.transpose(2, 3)) / math.sqrt(width // HEADS)).softmax(3) @ v
        h = h + gate1[:, None] * linear(f"{block}.attn.proj", attention.transpose(1, 2).reshape(B, -1, width))
        hidden = F.gelu(linear(f"{block}.mlp.fc1", norm(h, shift2, scale2)), approximate="tanh")
        h = h + gate2[:, None] * linear(f"{block}.mlp.fc2", hidden)
    shift, scale = linear("final_layer.adaLN_modulation.1", c).chunk(2, 1)
    tokens = linear("final_layer.linear", norm(h, shift, scale))
    pixels = tokens.reshape(B, grid, grid, PATCH, PATCH, -1)
    return torch.einsum("nhwpqc->nchpwq", pixels).reshape(B, -1, SIZE, SIZE)


def inputs(t=(0.05, 0.4, 0.9)):
    return torch.randn(3, CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(1)), torch.tensor(t), LABELS


@pytest.fixture
def import_file(tmp_path):
    """import_file(content, kind, *settings) -> (configuration, its checkpoint's folder)."""

    def run(content, kind, *settings, file="weights.pt", output="imported"):
        if file.endswith(".safetensors"):
            save_file(content, tmp_path / file)
        else:
            torch.save(content, tmp_path / file)
        prepare_checkpoint.main(["import", str(tmp_path / file), f"kind={kind}", f"output={tmp_path / output}", *settings])
        folder = checkpoints.find_checkpoint(tmp_path / output, "checkpoint")
        return load.load_config(folder), folder

    return run


def network(cfg, folder, weights="ema"):
    return load.load_network(folder, cfg, weights, torch.device("cpu"))


# ----------------------------------------------------------------------------------------------------------------------
# Each layout: outputs to 1e-5 of the published network's, and denoised estimates of its own formula.


@torch.no_grad()
@pytest.mark.parametrize("file", ["weights.pt", "weights.safetensors"])
def test_dit_keeps_its_outputs_and_predicts_noise(import_file, file):
    w = dit_weights(learn_sigma=True)
    cfg, folder = import_file(w, "dit", *PIXELS, file=file)
    assert cfg.model.backbone == "DiT-XS/2" and cfg.model.learn_sigma and cfg.diffusion.name == "ddpm"
    assert (cfg.data.in_channels, cfg.data.input_size, cfg.data.num_classes) == (1, 8, 10)
    assert (cfg.data.scale_factor, cfg.data.resolution, cfg.data.autoencoder) == (2 / 3, 8, "identity")
    assert folder.name == "step_0000000"
    x, t, y = inputs(t=(0.0, 400.0, 999.0))
    out, net = published_output(w, x, t, y), network(cfg, folder)
    assert (net(x, t, y) - out).abs().max() <= 1e-5
    a = torch.from_numpy(np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))[[0, 400, 999]]).float().reshape(3, 1, 1, 1)
    D_x, v = DDPM().denoise(net, x, t, y).chunk(2, dim=1)
    expected = (x - (1 - a).sqrt() * out[:, :1]) / a.sqrt()
    assert torch.allclose(D_x, expected, rtol=1e-4, atol=1e-3) and torch.allclose(v, (out[:, 1:] + 1) / 2, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("learn_sigma", [True, False])
def test_sits_clock_and_sign_are_turned_in_its_weights(import_file, learn_sigma):
    w = dit_weights(learn_sigma)
    cfg, folder = import_file({"ema": w, "model": w, "args": argparse.Namespace(lr=1e-4)}, "sit", *PIXELS)
    assert not cfg.model.learn_sigma and cfg.diffusion.name == "sit"
    assert (cfg.diffusion.sampler.num_steps, cfg.diffusion.sampler.solver) == (250, "euler_maruyama")
    x, t, y = inputs()
    velocity = published_output(w, x, 1 - t, y)[:, :1]  # data - noise, at SiT's time
    net = network(cfg, folder)
    assert net(x, t, y).shape == x.shape and (net(x, t, y) + velocity).abs().max() <= 1e-5
    assert (SiT().denoise(net, x, t, y) - (x + t.reshape(-1, 1, 1, 1) * velocity)).abs().max() <= 1e-5
    assert (net(x, t, y) - net(x, 1 - t, y)).abs().max() > 1e-3  # the clock matters to these weights


@torch.no_grad()
def test_repa_keeps_its_clock_and_its_projectors_are_set_aside(import_file):
    model, ema = dit_weights(seed=1), dit_weights(seed=2)
    projectors = {"projectors.0.0.weight": torch.ones(7, WIDTH), "projectors.0.0.bias": torch.ones(7)}
    cfg, folder = import_file({"model": model | projectors, "ema": ema | projectors, "opt": {}, "steps": 70}, "repa", *PIXELS)
    x, t, y = inputs()
    for weights, w in (("raw", model), ("ema", ema)):
        assert (network(cfg, folder, weights)(x, t, y) - published_output(w, x, t, y)).abs().max() <= 1e-5
    assert folder.name == "step_0000070" and cfg.diffusion.name == "sit" and cfg.train.num_steps == 70


def test_the_two_halves_of_repas_first_checkpoints_are_joined(import_file):
    w, legacy = dit_weights(), {}
    for name, value in w.items():
        parts = name.split(".")
        if parts[0] == "blocks" and int(parts[1]) >= 8:
            name = ".".join(["decoder_blocks", str(int(parts[1]) - 8), *parts[2:]])
        legacy[name] = value
    _, folder = import_file({"ema": legacy}, "repa", *PIXELS)
    stored = checkpoints.load_weights(folder, "ema")
    assert stored.keys() == w.keys() and all(torch.equal(stored[name], w[name]) for name in w)


@torch.no_grad()
def test_tread_brings_model_and_ema_and_its_step(import_file):
    model, ema = ({f"module.{name}": value for name, value in dit_weights(seed=seed).items()} for seed in (1, 2))
    stored = {"model_state_dict": model, "ema_state_dict": ema, "optimizer_state_dict": {"state": {}}, "step": 400}
    cfg, folder = import_file(stored, "tread", *PIXELS)
    assert cfg.model.name == "tread" and len(cfg.model.routes) == 1 and cfg.diffusion.name == "edm"
    x, sigma, y = inputs(t=(0.01, 0.7, 30.0))
    for weights, stored_as in (("raw", model), ("ema", ema)):
        w = {name.removeprefix("module."): value for name, value in stored_as.items()}
        s = sigma.reshape(-1, 1, 1, 1)
        F_x = published_output(w, x / (s**2 + 0.25).sqrt(), sigma.log() / 4, y)
        expected = 0.25 / (s**2 + 0.25) * x + s * 0.5 / (s**2 + 0.25).sqrt() * F_x
        assert (EDM().denoise(network(cfg, folder, weights), x, sigma, y) - expected).abs().max() <= 1e-5
    assert checkpoints.step_of(folder) == 400


@torch.no_grad()
def test_lightningdit_is_turned_as_sit_and_normalises_each_channel(import_file, tmp_path):
    published = lightningdit.build("LightningDiT-XS/1", input_size=4, in_channels=3, num_classes=5).eval()
    for p in published.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.1)
    torch.save(
        {"mean": torch.tensor([1.0, 2, 3]).reshape(1, 3, 1, 1), "std": torch.full((1, 3, 1, 1), 2.0)}, tmp_path / "stats.pt"
    )
    cfg, folder = import_file({"ema": published.state_dict()}, "lightningdit", f"latents_stats={tmp_path / 'stats.pt'}")
    assert cfg.model.backbone == "LightningDiT-XS/1" and cfg.data.autoencoder == "none"
    assert (cfg.data.scale_factor, cfg.data.resolution) == (1.0, 64)
    assert (cfg.data.latents_mean, cfg.data.latents_std) == ([1.0, 2.0, 3.0], [2.0] * 3)
    assert (cfg.diffusion.sampler.solver, cfg.diffusion.sampler.timestep_shift) == ("euler", 0.3)
    x, t, y = torch.randn(3, 3, 4, 4), torch.tensor([0.05, 0.4, 0.9]), torch.tensor([0, 2, 5])
    assert (network(cfg, folder)(x, t, y) + published(x, 1 - t, y)).abs().max() <= 1e-5
    with pytest.raises(UserError, match="latents_stats= is missing: .*give latents_stats.pt"):
        import_file({"ema": published.state_dict()}, "lightningdit", output="other")


def test_the_published_sizes_are_found_from_their_shapes(monkeypatch):
    from extras.weights.published import read_sizes

    w = {name: torch.empty(0) for name in dit_weights()} | {f"blocks.{i}.attn.qkv.bias": torch.empty(0) for i in range(28)}
    w |= {"pos_embed": torch.empty(1, 1024, 1152), "x_embedder.proj.weight": torch.empty(1152, 4, 2, 2)}
    w |= {"y_embedder.embedding_table.weight": torch.empty(1001, 1), "final_layer.linear.weight": torch.empty(32, 1152)}
    sizes = read_sizes("DiT-XL-2-512x512.pt", w, build.schema.FAMILIES["DiT"][0].BACKBONES)
    assert (sizes.backbone, sizes.input_size, sizes.in_channels) == ("DiT-XL/2", 64, 4)
    assert sizes.num_classes == 1000 and sizes.learn_sigma


# ----------------------------------------------------------------------------------------------------------------------
# The commands on an imported run.


def run_sample(checkpoint, output, *overrides):
    import sample as script

    forget_accelerate()
    script.main(composed([f"checkpoint={checkpoint}", f"output={output}", "cpu_threads=1", "num_steps=4", *overrides], "sample"))
    return {path.name: np.asarray(Image.open(path)).astype(int) for path in sorted(output.glob("seed_*.png"))}


def test_an_imported_and_a_native_checkpoint_of_equal_weights_give_the_same_images(import_file, train, tmp_path):
    native = train("native", "diffusion=sit", "train.num_steps=2", "train.lr=1e-2")
    weights = checkpoints.load_weights(checkpoints.find_checkpoint(native, "checkpoint"), "ema")
    _, imported = import_file({name: value.clone() for name, value in weights.items()}, "repa", *PIXELS)
    same = ["seeds=0-4", "batch_size=3", "solver=heun"]
    ours, theirs = (run_sample(folder, tmp_path / name, *same) for folder, name in ((native, "a"), (imported, "b")))
    assert ours.keys() == theirs.keys() and len(ours) == 5 and all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.parametrize("settings", [[], ["solver=ddim"], ["guidance=cfg", "cfg_scale=2", "guidance.channels=1"]])
def test_images_of_imported_dit_weights_do_not_depend_on_the_batch(import_file, tmp_path, settings):
    _, folder = import_file(dit_weights(learn_sigma=True), "dit", *PIXELS)
    together, apart = (
        run_sample(folder, tmp_path / f"batch{size}", "seeds=0-3", f"batch_size={size}", *settings) for size in (4, 1)
    )
    assert len({image.tobytes() for image in together.values()}) == 4
    for name in together:  # products of another batch size may round differently
        assert np.abs(together[name] - apart[name]).max() <= 1


def test_fid_and_the_report_read_an_imported_run(import_file, tmp_path, caplog):
    import fid as script
    from extras.report.runs import read_runs

    import_file(dit_weights(learn_sigma=True), "dit", *PIXELS)
    run = tmp_path / "imported"
    forget_accelerate()
    settings = [f"checkpoint={run}", "num_samples=8", "batch_size=8", "evaluation.detector=digits", "cpu_threads=1"]
    script.main(composed([*settings, "reference=evaluations/digits_reference.npz", "num_steps=250"], "fid"))
    (found,), problems = read_runs([run])
    assert not problems and found.step == 0 and any(name.startswith("fd_digits8/") for name in found.metrics)
    code, output = finish(start("-m", "extras.report", str(run), f"output={tmp_path / 'report.html'}"))
    assert code == 0, output


def test_a_run_of_imported_weights_without_a_score_says_so(import_file, tmp_path):
    from extras.report.runs import read_runs

    import_file(dit_weights(), "repa", *PIXELS)
    runs, problems = read_runs([tmp_path / "imported"])
    assert runs == [] and "holds no figures yet" in str(problems)


def test_autoguidance_takes_an_imported_network(import_file, tmp_path):
    import_file(dit_weights(seed=1), "repa", *PIXELS, output="good")
    import_file(dit_weights(seed=2), "repa", *PIXELS, output="weak")
    settings = ["seeds=0-1", "guidance=autoguidance", "guidance.w=2"]
    guided = run_sample(tmp_path / "good", tmp_path / "guided", *settings, f"guidance.checkpoint={tmp_path / 'weak'}")
    plain = run_sample(tmp_path / "good", tmp_path / "plain", "seeds=0-1")
    assert all((guided[name] != plain[name]).any() for name in plain)


def test_training_starts_from_imported_weights_with_init_from(import_file, train, tmp_path):
    _, folder = import_file(dit_weights(learn_sigma=True), "sit", *PIXELS)
    run = train("tuned", "diffusion=sit", f"init_from={tmp_path / 'imported'}", "train.num_steps=2", "train.lr=1e-9")
    assert len(metrics(run)) == 2
    ema = checkpoints.load_weights(checkpoints.find_checkpoint(run, "checkpoint"), "ema")
    imported = checkpoints.load_weights(folder, "ema")
    assert all(torch.allclose(ema[name], imported[name], atol=1e-6) for name in imported)


def test_the_ema_that_starts_from_imported_weights_has_no_warm_up(import_file, train, tmp_path):
    _, folder = import_file(dit_weights(), "repa", *PIXELS)
    run = train("tuned", "diffusion=sit", f"init_from={folder}", "train.num_steps=1", "train.lr=1e-2")
    after = checkpoints.find_checkpoint(run, "checkpoint")
    ema, raw, before = (
        checkpoints.load_weights(*one)["blocks.0.attn.qkv.weight"] for one in ((after, "ema"), (after, "raw"), (folder, "ema"))
    )
    assert torch.allclose(ema - before, 1e-4 * (raw - before), atol=1e-7) and (raw - before).abs().max() > 1e-3


def test_training_does_not_go_on_from_an_imported_checkpoint(import_file, train, tmp_path):
    import_file(dit_weights(), "repa", *PIXELS, output="run")
    wanted = rf"was imported from .*weights.pt \(kind=repa\): it has no optimizer .*: name=<another> init_from={tmp_path / 'run'}"
    with pytest.raises(UserError, match=wanted):
        train("run", "diffusion=sit")
    with pytest.raises(UserError, match=wanted):
        train("other", "diffusion=sit", f"resume={tmp_path / 'run'}")
    with pytest.raises(UserError, match="init_state=all needs an optimizer, .* set init_state=weights"):
        train("other", "diffusion=sit", f"init_from={tmp_path / 'run'}", "init_state=all")


def test_ddpm_is_not_trained(train):
    with pytest.raises(UserError, match="diffusion=ddpm is for sampling .* train with diffusion=edm or diffusion=sit"):
        train("run", "diffusion=ddpm")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["solver=heun"], r"solver='heun' is not accepted; use ancestral \| ddim"),
        (["num_steps=1001"], "num_steps=1001 is not accepted; use a whole number from 1 to 1000"),
        (["S_churn=1"], "S_churn=1 is not a setting of the sampler of diffusion=ddpm"),
    ],
)
def test_a_sampler_that_ddpm_does_not_have_is_refused(import_file, tmp_path, overrides, message):
    _, folder = import_file(dit_weights(learn_sigma=True), "dit", *PIXELS)
    with pytest.raises(UserError, match=message):
        run_sample(folder, tmp_path / "out", "seeds=0", *overrides)


# ----------------------------------------------------------------------------------------------------------------------
# What cannot be imported: one line, and nothing is written.


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def without(name):
    return {key: value for key, value in dit_weights().items() if key != name}


BAD = {
    "a tensor is missing": (
        without("blocks.3.mlp.fc1.bias"),
        r"lacks 1 tensors \(blocks.3.mlp.fc1.bias\), .* DiT-XS/2 .* give another kind=",
    ),
    "tensors are left over": (
        dit_weights() | {"projectors.0.bias": torch.ones(3)},
        r"holds, beside the network's, 1 tensors \(projectors",
    ),
    "a shape differs": (
        dit_weights() | {"x_embedder.proj.bias": torch.ones(7)},
        r"x_embedder.proj.bias has shape \[7\], and that of DiT-XS/2 has \[96\]",
    ),
    "another width": (
        dit_weights(width=100),
        r"has 12 blocks of width 100 and patches of 2; the backbones .* 12 x 96 / 1, .* give another kind=",
    ),
    "other positions": (
        dit_weights() | {"pos_embed": torch.ones(1, 15, 96)},
        "15 positions .* are not those of a DiT for square latents",
    ),
    "no positions": (dit_weights() | {"pos_embed": torch.ones(1, 0, 96)}, "0 positions .* are not those of a DiT"),
    "no classes": (
        dit_weights() | {"y_embedder.embedding_table.weight": torch.ones(1, 96)},
        r"weights.pt: y_embedder.embedding_table.weight has 1 rows .* trained with classes",
    ),
    "a learned sigma": (dit_weights(learn_sigma=True), "twice as many channels out as in, .* give kind=dit or kind=sit"),
    "no network": ({"a": torch.ones(2)}, "x_embedder.proj.weight is not there; it holds a, "),
    "a list": ([torch.ones(2)], "holds a list and no state dict"),
    "no tensors": ({"model": 3}, "'model' is no plain tensor of floats"),
    "one number that claims to be many": (
        dit_weights() | {"pos_embed": torch.zeros(1).expand(1, 10**9, 96)},
        "'pos_embed' is no plain tensor",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_other_contents_are_refused_in_one_line(import_file, tmp_path, case):
    content, message = BAD[case]
    with pytest.raises(UserError, match=message) as refused:
        import_file(content, "tread", *PIXELS)
    assert "\n" not in str(refused.value) and not (tmp_path / "imported").exists()
    assert not list(tmp_path.glob(".tmp_*"))


@pytest.mark.parametrize("new_format", [True, False])
def test_a_pickle_with_code_is_refused_and_nothing_runs(tmp_path, new_format):
    torch.save(
        {"model": dit_weights(), "extra": Evil(tmp_path / "pwned")},
        tmp_path / "evil.pt",
        _use_new_zipfile_serialization=new_format,
    )
    with pytest.raises(
        UserError, match="evil.pt is refused: it names posix.mkdir, .*other pickles can run code; where you trust"
    ) as refused:
        prepare_checkpoint.main(["import", str(tmp_path / "evil.pt"), "kind=dit", f"output={tmp_path / 'run'}"])
    assert "\n" not in str(refused.value) and not (tmp_path / "pwned").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize("file", ["weights.pt", "weights.safetensors"])
def test_a_file_that_was_cut_off_is_refused(tmp_path, file):
    (save_file if file.endswith("safetensors") else torch.save)(dit_weights(), tmp_path / file)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=rf"{file} is truncated or not a "):
        prepare_checkpoint.main(["import", str(tmp_path / file), "kind=dit", f"output={tmp_path / 'run'}"])


def test_nothing_is_overwritten(import_file, tmp_path):
    import_file(dit_weights(), "repa", *PIXELS)
    before = json.loads((tmp_path / "imported/checkpoints/step_0000000/manifest.json").read_text())
    with pytest.raises(UserError, match="output=.*imported exists, and nothing was written; give the folder of a new run"):
        import_file(dit_weights(seed=3), "repa", *PIXELS)
    assert json.loads((tmp_path / "imported/checkpoints/step_0000000/manifest.json").read_text()) == before


def test_an_import_that_was_killed_is_made_again(import_file, tmp_path):
    leftover = tmp_path / ".tmp_imported" / "checkpoints" / ".tmp_step_0000000"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    _, folder = import_file(dit_weights(), "repa", *PIXELS)
    checkpoints.verify(folder)
    assert not (tmp_path / ".tmp_imported").exists()
    assert sorted(path.name for path in (tmp_path / "imported").iterdir()) == ["checkpoints", "config.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["import", "weights.pt", "kind=unet", "output=x"],
            r"kind='unet' is not accepted; use dit \| sit \| repa \| tread \| lightningdit",
        ),
        (["import", "weights.pt", "kind=dit"], "import: output= is missing"),
        (["import", "nothing.pt", "kind=dit", "output=x"], "source=nothing.pt: there is no such file; give the path of a file"),
        (["import", "docs", "kind=dit", "output=x"], "source=docs is a folder; give the file of weights in it"),
        (["imports"], "unknown command 'imports'; use one of import"),
    ],
)
def test_a_wrong_command_line_is_answered(arguments, message):
    with pytest.raises(UserError, match=message):
        prepare_checkpoint.main(arguments)


def test_the_scale_of_an_unknown_autoencoder_is_asked_for(import_file):
    with pytest.raises(UserError, match="scale_factor= is missing: autoencoder=sd-vae:somebody/vae does not say it"):
        import_file(dit_weights(), "repa", "autoencoder=sd-vae:somebody/vae")
    given = ["autoencoder=sd-vae:somebody/vae", "scale_factor=0.3", "resolution=128"]
    cfg, _ = import_file(dit_weights(), "repa", *given)
    assert (cfg.data.scale_factor, cfg.data.resolution) == (0.3, 128)


def test_a_hub_that_does_not_answer_is_said_within_seconds(monkeypatch, tmp_path):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    wanted = "source=hust/dit/w.pt: there is no such file, .* it cannot be downloaded .Name or service not known.; download it"
    with pytest.raises(UserError, match=wanted):
        prepare_checkpoint.main(["import", "hust/dit/w.pt", "kind=dit", f"output={tmp_path / 'run'}"])


def test_a_model_of_the_hub_is_found_by_its_only_file_or_asked_for(monkeypatch, tmp_path):
    import huggingface_hub

    class Listing:
        def __init__(self, *names):
            self.siblings = [argparse.Namespace(rfilename=name) for name in names]

    torch.save(dit_weights(), tmp_path / "weights.pt")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repository, name: str(tmp_path / name))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: Listing("README.md", "weights.pt"))
    prepare_checkpoint.main(["import", "somebody/dit", "kind=repa", f"output={tmp_path / 'run'}", *PIXELS])
    assert checkpoints.find_checkpoint(tmp_path / "run", "checkpoint").name == "step_0000000"
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: Listing("a.pt", "b/c.safetensors"))
    with pytest.raises(UserError, match="the model somebody/dit of the hub holds a.pt, b/c.safetensors; give one of them"):
        prepare_checkpoint.main(["import", "somebody/dit", "kind=repa", f"output={tmp_path / 'other'}"])


def test_the_command_line_imports(tmp_path):
    torch.save(dit_weights(learn_sigma=True), tmp_path / "weights.pt")
    code, output = finish(
        start("prepare_checkpoint.py", "import", str(tmp_path / "weights.pt"), "kind=dit", f"output={tmp_path / 'run'}", *PIXELS)
    )
    assert code == 0 and "DiT-XS/2 for latents of 1x8x8, 10 classes" in output, output


def test_imported_dit_weights_can_be_exported_for_diffusers(import_file, tmp_path, monkeypatch):
    import diffusers.utils.dynamic_modules_utils as dynamic
    from diffusers import DiffusionPipeline

    _, folder = import_file(dit_weights(learn_sigma=True), "dit", *PIXELS)
    prepare_checkpoint.main(["export", f"checkpoint={folder}", f"output={tmp_path / 'exported'}"])
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    call = {"class_labels": [3, 7], "seeds": [0, 1], "num_inference_steps": 4, "guidance_scale": 2.0}
    theirs = (pipeline(**call, output_type="np").images * 255).round().astype(int)
    settings = ["seeds=0-1", "classes=[3,7]", "guidance=cfg", "cfg_scale=2"]
    ours = np.stack(list(run_sample(folder, tmp_path / "ours", *settings).values()))
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "imported from weights.pt (kind=dit)" in card and "AdamW" not in card and str(tmp_path) not in card
    assert np.abs(ours - theirs).max() <= 1
