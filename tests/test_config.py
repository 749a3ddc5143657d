"""Every shipped configuration composes and builds; every wrong key or value is refused by name."""

import re
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, composed, finish, make_shard, start

from training import config

SD = dict(channels=4, kind="moments", num_classes=1000, scale_factor=0.18215, autoencoder="sd-vae:some/vae")


@pytest.mark.parametrize("model", ["dit", "tread"])
@pytest.mark.parametrize("guidance", ["none", "cfg"])
@pytest.mark.parametrize("data", ["digits", "imagenet256", "imagenet512", "custom"])
def test_every_shipped_configuration_composes_and_builds(tmp_path, model, guidance, data):
    overrides = [f"model={model}", f"guidance={guidance}", f"data={data}"]
    if data != "digits":
        make_shard(tmp_path / "x.safetensors", size=64 if data == "imagenet512" else 32, num_items=2, **SD)
        overrides.append(f"data.path={tmp_path}")
    cfg = config.check(composed(overrides), config.TRAIN_KEYS)
    dataset = config.open_data(cfg)
    with torch.device("meta"):
        net = config.build_network(cfg)
    assert len(net.router.routes) == (model == "tread")
    assert net.num_tokens == {"digits": 16, "imagenet512": 1024}.get(data, 256)
    config.build_diffusion(cfg)
    denoiser = config.build_guidance(cfg)(lambda x, sigma, y: x, dataset.info.num_classes)
    assert denoiser(torch.ones(1, 1, 1, 1), torch.ones(1), torch.ones(1, dtype=torch.int64)).item() == 1
    assert cfg.name == f"{data}_{model}"
    assert cfg.data.autoencoder == dataset.info.autoencoder and cfg.data.scale_factor == dataset.info.scale_factor


def test_the_paper_is_the_default_away_from_the_digits():
    cfg = composed(["data=imagenet256"])
    assert cfg.model.routes == [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -4}]
    assert (cfg.train.lr, cfg.train.batch_size, cfg.train.num_steps) == (1e-4, 256, 400_000)
    assert (cfg.train.ema_decay, cfg.model.class_dropout, cfg.train.precision) == (0.9999, 0.1, "bf16")
    assert (cfg.diffusion.P_mean, cfg.diffusion.P_std, cfg.diffusion.sigma_data) == (-1.2, 1.2, 0.5)
    assert cfg.diffusion.sampler.num_steps == 40


def test_dit_is_tread_without_routes():
    dit, tread = (composed([f"model={model}"]) for model in ("dit", "tread"))
    assert config.differences(dit, tread, ("model",)) == [
        "model.name: 'dit' -> 'tread'",
        "model.routes: [] -> [{'selection_ratio': 0.5, 'start_layer_idx': 2, 'end_layer_idx': -4}]",
    ]


def test_every_key_has_a_comment():
    for file in (REPOSITORY / "configs").rglob("*.yaml"):
        own_words = {"name:", "sampler:", "dir:", "output_subdir:", "P_std:"}
        for line in file.read_text().splitlines():
            key = line.split("#")[0].strip()
            is_value = ":" in key and not key.endswith(":") and not key.startswith(("-", "defaults"))
            if is_value and key.split()[0] not in own_words and file.parent.name != "data":
                assert "#" in line, f"{file.relative_to(REPOSITORY)}: {line}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+train.lrr=1", r"train.lrr is not a key of the configuration; accepted: train.lr"),
        ("+zzz=1", r"zzz is not a key of the configuration; accepted: "),
        ("train.lr=fast", r"train.lr='fast' is not accepted; use a number in \(0, inf\)"),
        ("train.lr=0", r"train.lr=0 is not accepted"),
        ("train.lr=nan", r"train.lr=nan is not accepted"),
        ("train.batch_size=2.5", r"train.batch_size=2.5 is not accepted; use a whole number of at least 1"),
        ("train.batch_size=true", r"train.batch_size=True is not accepted"),
        ("train.precision=fp16", r"train.precision='fp16' is not accepted; use fp32 \| bf16"),
        ("train.compile=always", r"train.compile='always' is not accepted; use none \| blocks \| default"),
        (
            "train.activation_checkpointing=all",
            r"train.activation_checkpointing='all' is not accepted; use none \| blocks \| select",
        ),
        ("train.betas=[0.9]", r"train.betas=\[0.9\] is not accepted; use two numbers"),
        ("train.grad_clip_norm=-1", r"train.grad_clip_norm=-1 is not accepted; .* or null"),
        ("checkpoint.keep_last=0", r"checkpoint.keep_last=0 is not accepted"),
        ("model.backbone=DiT-H/2", r"model.backbone='DiT-H/2' is not accepted; use DiT-XS/2 \| .*DiT-XL/8"),
        ("model.init=zeros", r"model.init='zeros' is not accepted; use adaln_zero \| official_tread"),
        ("model.routes=[{selection_ratio:0.5}]", r"model.routes=.* use a list of routes, each with selection_ratio, start"),
        ("wandb.mode=maybe", r"wandb.mode='maybe' is not accepted; use disabled \| offline \| online"),
        ("data.autoencoder='sd-vae:'", r"data.autoencoder='sd-vae:' is not accepted"),
        ("data.autoencoder=vqgan", r"data.autoencoder='vqgan' is not accepted; use identity \| none \| sd-vae:"),
        ("name=a/b", r"name='a/b' is not accepted"),
        ("seed=-1", r"seed=-1 is not accepted"),
        ("diffusion.sampler.S_churn=-1", r"diffusion.sampler.S_churn=-1 is not accepted"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_what_is_accepted(override, message):
    with pytest.raises(ValueError, match=message):
        config.check(composed([override]), config.TRAIN_KEYS)


def test_noise_levels_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match=r"sigma_min=90.0 must be below sigma_max=80.0"):
        config.build_diffusion(composed(["diffusion.sampler.sigma_min=90.0"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.path=null", "data.path is not set"),
        ("data.path=/nonexistent", "data.path=/nonexistent does not exist"),
        ("data.in_channels=4", "data.in_channels=4, but the latents of .* have 1 channels"),
        ("data.input_size=32", "data.input_size=32, but the latents of .* say 8"),
        ("data.num_classes=1000", "data.num_classes=1000, but the latents of .* say 10"),
    ],
)
def test_data_that_do_not_fit_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        config.open_data(config.check(composed([override]), config.TRAIN_KEYS))


def test_moments_passed_off_as_samples_are_recognised(tmp_path):
    make_shard(tmp_path / "x.safetensors", channels=8, size=32, num_classes=1000, num_items=2)
    with pytest.raises(ValueError, match="have 8 channels; they look like moments"):
        config.open_data(composed(["data=imagenet256", f"data.path={tmp_path}"]))


def test_what_the_configuration_leaves_open_comes_from_the_shards(tmp_path):
    make_shard(tmp_path / "x.safetensors", channels=6, size=4, num_classes=7, num_items=2)
    cfg = composed([f"data.path={tmp_path}", "data.in_channels=null", "data.input_size=null", "data.num_classes=null"])
    cfg = config.check(cfg, config.TRAIN_KEYS)
    config.open_data(cfg)
    assert (cfg.data.in_channels, cfg.data.input_size, cfg.data.num_classes) == (6, 4, 7)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"train.batch_size=64 does not divide by 3 processes x train.grad_accum_steps=2 = 6"):
        config.check_batch_size(composed(["train.grad_accum_steps=2"]), num_processes=3)


@pytest.mark.parametrize(
    ("spec", "numbers"), [("0-3,7", [0, 1, 2, 3, 7]), ("5", [5]), (12, [12]), ([3, "5-6"], [3, 5, 6]), (" 1, 3-4 ", [1, 3, 4])]
)
def test_numbers_and_ranges_are_parsed(spec, numbers):
    assert config.parse_numbers(spec) == numbers


@pytest.mark.parametrize("spec", ["", "a", "3-", "-3", "1,,2", "1-3,2", "1.5", "2-1-0", "5-2"])
def test_other_lists_are_refused(spec):
    with pytest.raises(ValueError, match="is not a list of numbers|names a number twice"):
        config.parse_numbers(spec)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("train.lrr=1", "error: train.lrr is not a key of the configuration; accepted: train.lr"),
        ("model=vit", "error: .*model/vit.*Available options.*dit.*tread"),
    ],
)
def test_the_command_line_says_it_in_one_line_and_exits_with_1(argument, message, tmp_path):
    code, output = finish(start("train.py", argument, f"output_dir={tmp_path}"))
    assert code == 1
    assert re.search(message, output), output
    assert "Traceback" not in output and len(output.splitlines()) == 1
    assert list(Path(tmp_path).iterdir()) == []
