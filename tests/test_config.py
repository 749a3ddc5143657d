"""Every shipped configuration composes and builds; every wrong key or value is refused by name."""

import re
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, composed, finish, make_shard, start

from configs import schema
from configs.settings import unknown_key
from guidance import GUIDANCES, GuidanceInputs
from training import build

SD = dict(channels=4, kind="moments", num_classes=1000, scale_factor=0.18215, autoencoder="sd-vae:some/vae")


@pytest.mark.parametrize("model", ["dit", "tread"])
@pytest.mark.parametrize("diffusion", ["edm", "sit", "ddpm"])
@pytest.mark.parametrize("data", ["digits", "imagenet256", "imagenet512", "custom"])
def test_every_shipped_configuration_composes_and_builds(tmp_path, model, diffusion, data):
    overrides = [f"model={model}", f"diffusion={diffusion}", f"data={data}"]
    if data != "digits":
        make_shard(tmp_path / "x.safetensors", size=64 if data == "imagenet512" else 32, num_items=2, **SD)
        overrides.append(f"data.path={tmp_path}")
    cfg = schema.check(composed(overrides), schema.TrainConfig)
    cfg, dataset = build.open_data(cfg)
    with torch.device("meta"):
        net = build.build_network(cfg)
    assert len(net.router.routes) == (model == "tread")
    assert net.num_tokens == {"digits": 16, "imagenet512": 1024}.get(data, 256)
    assert type(build.build_diffusion(cfg.diffusion)).__name__.lower() == diffusion
    assert build.build_diffusion(cfg.diffusion).sampler.num_steps == (
        20 if data == "digits" else 250 if diffusion == "ddpm" else 40
    )
    assert cfg.name == f"{data}_{model}"
    assert cfg.data.autoencoder == dataset.info.autoencoder and cfg.data.scale_factor == dataset.info.scale_factor


def checked(*overrides):
    return schema.check(composed(overrides), schema.TrainConfig)


# What a guidance cannot know by itself.
TO_BE_SET = {
    "interval": ["guidance.level_lo=0.2", "guidance.level_hi=0.9"],
    "autoguidance": ["guidance.checkpoint=runs/other"],
}


@pytest.mark.parametrize("diffusion", ["edm", "sit", "ddpm"])
@pytest.mark.parametrize("name", GUIDANCES)
def test_every_shipped_guidance_composes_and_builds_for_every_diffusion(name, diffusion):
    to_be_set = TO_BE_SET.get(name, [])
    if diffusion == "ddpm":  # whose noise levels are timesteps
        to_be_set = [setting.replace("=0.2", "=200").replace("=0.9", "=900") for setting in to_be_set]
    cfg = checked(f"guidance={name}", f"diffusion={diffusion}", *to_be_set)
    build.check_guidance(cfg.guidance, cfg, build.build_diffusion(cfg.diffusion))

    def estimate(x, level, y, **routing):
        return x

    inputs = GuidanceInputs(estimate, 10, (1, 16), route_scores=lambda: torch.rand(1, 1, 16), weak=estimate)
    x, level, y = torch.ones(1, 1, 1, 1), torch.full((1,), 0.5), torch.ones(1, dtype=torch.int64)
    assert build.build_guidance(cfg.guidance)(inputs)(x, level, y).item() == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["guidance=interval"],
            r"guidance.level_lo=None is not accepted; use a noise level: sigma for diffusion=edm .* t for dif",
        ),
        (["guidance=autoguidance"], r"guidance.checkpoint=None is not accepted; use the folder of a checkpoint or of a run"),
        (["guidance=sparse", "guidance.r_strong=0.5"], r"guidance.r_strong=0.5 must be below guidance.r_weak=0.5 \(the strong"),
        (["guidance=sparse", "guidance.r_weak=1"], r"guidance.r_weak=1 is not accepted; use a number in \[0, 1\)"),
        (["guidance=sparse", "guidance.subset=some"], r"guidance.subset='some' is not accepted; use redraw \| fixed"),
        (
            ["guidance=sparse", "guidance.level_lo=2", "guidance.level_hi=1"],
            r"guidance.level_lo=2 must be below guidance.level_hi=1",
        ),
        (["guidance=cfg", "+guidance.w=1"], r"guidance.w is not a key of this guidance; it belongs to guidance=sparse and guid"),
        (
            ["diffusion=sit", "diffusion.timestep=cosine"],
            r"diffusion.timestep='cosine' is not accepted; use uniform \| logit_normal",
        ),
        (
            ["diffusion=sit", "diffusion.sampler.solver=dopri5"],
            r"solver='dopri5' is not accepted; use euler \| heun \| euler_maruyama",
        ),
        (["diffusion=sit", "diffusion.sampler.last_step_size=0"], r"last_step_size=0 is not accepted; use a number in \(0, 1\)"),
        (
            ["diffusion=sit", "+diffusion.sampler.S_churn=1"],
            r"diffusion.sampler.S_churn is not a key of this diffusion; it belongs to diffusion=edm",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        schema.check(composed(overrides), schema.TrainConfig)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["guidance.level_lo=0.2", "guidance.level_hi=100"],
            r"guidance.level_hi=100 is outside the sampler of diffusion=edm, whose sigma goes from 80 to 0.002",
        ),
        (
            ["diffusion=sit", "guidance.level_lo=0.28", "guidance.level_hi=2.9"],
            r"guidance.level_hi=2.9 is outside the sampler of diffusion=sit, whose t goes from 1 to 0.05; give t within it",
        ),
        (
            ["diffusion=sit", "guidance.level_lo=0.41", "guidance.level_hi=0.44"],
            r"hold none of the 20 noise levels of the sampler",
        ),
    ],
)
def test_an_interval_outside_the_noise_levels_of_the_sampler_is_refused(overrides, message):
    cfg = schema.check(composed(["guidance=interval", *overrides]), schema.TrainConfig)
    with pytest.raises(ValueError, match=message):
        build.check_guidance(cfg.guidance, cfg, build.build_diffusion(cfg.diffusion))


def test_sparse_guidance_whose_branches_keep_the_same_tokens_is_refused():
    cfg = schema.check(composed(["guidance=sparse", "guidance.r_weak=0.05"]), schema.TrainConfig)
    with pytest.raises(ValueError, match=r"r_strong=0.0 and guidance.r_weak=0.05 both keep 16 of the 16 tokens of DiT-XS/2"):
        build.check_guidance(cfg.guidance, cfg, build.build_diffusion(cfg.diffusion))


def test_an_interval_may_end_at_the_first_noise_level():
    for diffusion, top in (("edm", 80), ("sit", 1)):
        settings = ["guidance=interval", "guidance.level_lo=0", f"guidance.level_hi={top}"]
        cfg = checked(f"diffusion={diffusion}", *settings)
        build.check_guidance(cfg.guidance, cfg, build.build_diffusion(cfg.diffusion))


def test_sparse_guidance_of_a_network_without_routes_is_warned_of_with_the_reason(caplog):
    for model, num_warnings in (("tread", 0), ("dit", 1)):
        cfg = checked(f"model={model}", "guidance=sparse")
        build.warn_of_guidance(cfg.guidance, cfg)
        assert len(caplog.records) == num_warnings
    assert "trained without routes: it never saw a part of its tokens skip" in caplog.text


def test_a_setting_of_another_diffusions_sampler_is_refused():
    with pytest.raises(
        ValueError, match=r"S_churn=2 is not a setting of the sampler of diffusion=sit, .*leave it out. It has num_steps"
    ):
        build.build_diffusion(checked("diffusion=sit").diffusion, S_churn=2)
    with pytest.raises(ValueError, match=r"solver=euler is not a setting of the sampler of diffusion=edm"):
        build.build_diffusion(checked().diffusion, solver="euler")
    sit = checked("diffusion=sit").diffusion
    assert build.build_diffusion(sit, S_churn=None, num_steps=7, solver="euler").sampler.num_steps == 7


def test_the_paper_is_the_default_away_from_the_digits():
    cfg = checked("data=imagenet256")
    assert cfg.model.routes == [{"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -4}]
    assert (cfg.train.lr, cfg.train.batch_size, cfg.train.num_steps) == (1e-4, 256, 400_000)
    assert (cfg.train.ema_decay, cfg.model.class_dropout, cfg.train.precision) == (0.9999, 0.1, "bf16")
    assert (cfg.diffusion.P_mean, cfg.diffusion.P_std, cfg.diffusion.sigma_data) == (-1.2, 1.2, 0.5)
    assert cfg.diffusion.sampler.num_steps == 40


def test_dit_is_tread_without_routes():
    dit, tread = (checked(f"model={model}") for model in ("dit", "tread"))
    assert schema.differences(dit, tread, schema.SAME_RUN) == [
        "model.name: 'dit' -> 'tread'",
        "model.routes: [] -> [{'selection_ratio': 0.5, 'start_layer_idx': 2, 'end_layer_idx': -4}]",
    ]


def test_every_key_has_a_comment():
    for file in (REPOSITORY / "configs").rglob("*.yaml"):
        if (
            "experiment" in file.relative_to(REPOSITORY).parts
        ):  # choices of values for keys that are commented where they are defined
            continue
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
        ("train.batch_size=2.5", r"train.batch_size=2.5 is not accepted; use a whole number from 1 to 1048576"),
        ("train.batch_size=true", r"train.batch_size=True is not accepted"),
        ("train.precision=fp16", r"train.precision='fp16' is not accepted; use fp32 \| bf16 \| fp8"),
        ("train.attention=triton", r"train.attention='triton' is not accepted; use auto \| flash \| cudnn \| efficient \| math"),
        ("train.compile=always", r"train.compile='always' is not accepted; use auto \| none \| blocks \| segments"),
        (
            "train.activation_checkpointing=all",
            r"train.activation_checkpointing='all' is not accepted; use none \| blocks \| select",
        ),
        ("train.betas=[0.9]", r"train.betas=\[0.9\] is not accepted; use two numbers"),
        ("train.grad_clip_norm=-1", r"train.grad_clip_norm=-1 is not accepted; .* or null"),
        ("checkpoint.keep_last=0", r"checkpoint.keep_last=0 is not accepted"),
        ("model.backbone=DiT-H/2", r"model.backbone='DiT-H/2' is not accepted; use DiT-XS/1 \| .*DiT-XL/8"),
        ("model.backbone=dit-xl2", r"model.backbone='dit-xl2' is not accepted; .*; nearest: DiT-XL/2, "),
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
        schema.check(composed([override]), schema.TrainConfig)


def test_noise_levels_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match=r"sigma_min=90.0 must be below sigma_max=80.0"):
        build.build_diffusion(checked("diffusion.sampler.sigma_min=90.0").diffusion)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.path=null", "data.path is not set: .* to make it: python prepare_latents.py digits output=latents/digits"),
        ("data.path=/nonexistent", "data.path=/nonexistent does not exist"),
        ("data.in_channels=4", "data.in_channels=4, but the latents of .* have 1 channels"),
        ("data.input_size=32", "data.input_size=32, but the latents of .* say 8"),
        ("data.num_classes=1000", "data.num_classes=1000, but the latents of .* say 10"),
    ],
)
def test_data_that_do_not_fit_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        build.open_data(schema.check(composed([override]), schema.TrainConfig))


def test_moments_passed_off_as_samples_are_recognised(tmp_path):
    make_shard(tmp_path / "x.safetensors", channels=8, size=32, num_classes=1000, num_items=2)
    with pytest.raises(ValueError, match="have 8 channels; they look like moments .* make the shards again with kind=moments"):
        build.open_data(checked("data=imagenet256", f"data.path={tmp_path}"))


def test_what_the_configuration_leaves_open_comes_from_the_shards(tmp_path):
    make_shard(tmp_path / "x.safetensors", channels=6, size=4, num_classes=7, num_items=2)
    given = checked(f"data.path={tmp_path}", "data.in_channels=null", "data.input_size=null", "data.num_classes=null")
    cfg, _ = build.open_data(given)
    assert given.data.in_channels is None  # a checked configuration is never written to
    assert (cfg.data.in_channels, cfg.data.input_size, cfg.data.num_classes) == (6, 4, 7)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"train.batch_size=64 does not divide by 3 processes x train.grad_accum_steps=2 = 6"):
        build.check_batch_size(checked("train.grad_accum_steps=2"), num_processes=3)


@pytest.mark.parametrize(
    ("spec", "numbers"), [("0-3,7", [0, 1, 2, 3, 7]), ("5", [5]), (12, [12]), ([3, "5-6"], [3, 5, 6]), (" 1, 3-4 ", [1, 3, 4])]
)
def test_numbers_and_ranges_are_parsed(spec, numbers):
    assert schema.parse_numbers(spec) == numbers


@pytest.mark.parametrize("spec", ["", "a", "3-", "-3", "1,,2", "1-3,2", "1.5", "2-1-0", "5-2"])
def test_other_lists_are_refused(spec):
    with pytest.raises(ValueError, match="is not a list of numbers|names a number twice"):
        schema.parse_numbers(spec)


def test_a_typo_in_a_key_of_a_choice_is_answered_with_the_nearest_ones():
    unknown = unknown_key("diffusion.P_meen", schema.TrainConfig)
    assert unknown.startswith("diffusion.P_meen is not a key of the configuration; accepted: diffusion.P_mean")
    assert "accepted: diffusion.sampler.solver" in unknown_key("diffusion.sampler.solvers", schema.TrainConfig)
    assert "accepted: guidance.cfg_scale" in unknown_key("guidance.cfg_scal", schema.SampleConfig)
    assert unknown_key("train.path", schema.TrainConfig).endswith("accepted: data.path")


def test_weights_for_latents_of_another_scale_are_refused():
    stored, cfg = (checked("init_from=runs/other", f"data.scale_factor={scale}") for scale in (0.5, 0.25))
    with pytest.raises(ValueError, match="init_from=runs/other: .*data.scale_factor: 0.5 -> 0.25"):
        build.check_initial(stored, 1, cfg)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("train.lrr=1", "error: train.lrr is not a key of the configuration; accepted: train.lr"),
        ("model=vit", "error: model=vit is not a choice; accepted: dit, lightningdit, lightningdit_tread, tread"),
    ],
)
def test_the_command_line_says_it_in_one_line_and_exits_with_1(argument, message, tmp_path):
    code, output = finish(start("train.py", argument, f"output_dir={tmp_path}"))
    assert code == 1
    assert re.search(message, output), output
    assert "Traceback" not in output and len(output.splitlines()) == 1
    assert list(Path(tmp_path).iterdir()) == []
