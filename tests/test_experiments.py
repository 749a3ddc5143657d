"""The paper's rows as named runs: every one composes, builds and holds the paper's figure."""

import functools
import re

import pytest
import torch
from conftest import composed, make_shard

from configs import command_line as cli
from configs import experiments, schema
from extras.report import rows
from training import build
from training.checkpoint import list_steps

EXPERIMENTS = experiments.names()

# TREAD (arXiv 2501.04765): FID of 50,000 unguided samples at 400K iterations.
TABLE_2 = """
s2 68.40 47.04 57.60 38.08
b2 43.47 21.34 33.00 15.98
l2 23.33 9.10 18.80 5.91
xl2 19.47 7.38 17.20 4.89
"""
SELECTION_RATE = {0: 43.47, 25: 26.50, 50: 21.34, 75: 49.29}
# Changes of FID against 49.89, the dense network's.
PLACEMENT = {
    "0_2": 2.95, "0_3": 2.59, "0_4": 7.23, "0_5": 0.92, "0_6": -12.12, "0_7": -15.71, "0_8": -16.31, "0_9": -14.82,
    "0_10": 7.47, "7_8": 0.61, "6_8": 0.82, "5_8": -4.84, "4_8": -14.20, "3_8": -16.31, "2_8": -21.87, "1_8": -21.68,
}  # fmt: skip


@functools.cache  # a checked configuration is never written to
def compose_experiment(name):
    return schema.check(composed([f"experiment={name}"]), schema.TrainConfig)


def paper_fid(name, metric="fid50k/cfg1.0"):
    return compose_experiment(name).experiment.paper[metric]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_builds(name):
    cfg = compose_experiment(name)
    assert cfg.experiment.name == name and cfg.name == f"{name.replace('/', '_')}_seed0"
    assert cfg.experiment.baseline is None or cfg.experiment.baseline in EXPERIMENTS
    assert bool(cfg.model.routes) == cfg.model.name.endswith("tread") and cfg.model.init == "adaln_zero"
    with torch.device("meta"):  # shapes and routes, without the memory of an XL
        net = build.build_network(cfg)
    assert net.num_tokens == (cfg.data.input_size // net.patch_size) ** 2
    build.build_diffusion(cfg.diffusion)
    build.build_guidance(cfg.guidance)


def test_no_two_experiments_have_the_same_name_or_run():
    assert len({name.replace("/", "_") for name in EXPERIMENTS}) == len(EXPERIMENTS) == 92


def test_registering_the_experiments_again_changes_nothing():
    before = composed(["experiment=final/xl2_tread_finetune_220"])
    experiments.register()
    assert composed(["experiment=final/xl2_tread_finetune_220"]) == before


def test_experiments_on_imagenet_are_evaluated_along_the_way_and_with_the_papers_number_of_samples_at_the_end():
    for name in EXPERIMENTS:
        cfg = compose_experiment(name)
        if name.startswith("digits/"):
            assert cfg.eval.every == 120
            continue
        if name.startswith("fashion/"):
            assert (cfg.eval.every, cfg.eval.num_samples, cfg.train.num_steps) == (1_000, 1_000, 6_000)
            continue
        every = {"final": 100_000, "lightning": 10_000, "cifar10": 10_000}.get(name.partition("/")[0], 50_000)
        assert (cfg.eval.every, cfg.eval.num_samples) == (every, 5_000)
        assert cfg.train.num_steps % cfg.eval.every == 0
        num_samples = "10k" if cfg.eval.final_num_samples == 10_000 else "50k"
        assert all(f"{num_samples}/" in metric for metric in cfg.experiment.paper)
        assert cfg.eval.final_num_samples == (10_000 if name.startswith("imagenet512/") else 50_000)


def test_what_a_row_says_follows_the_settings_on_top():
    cfg = composed(["experiment=digits/selection_rate/50", "seed=2", "train.num_steps=77", "train.batch_size=8"])
    assert cfg.name == "digits_selection_rate_50_seed2" and cfg.experiment.differs.endswith(", 77 steps of 8 images")
    cfg = composed(["experiment=final/xl2_tread_finetune_740", "seed=2", "output_dir=elsewhere"])
    assert cfg.init_from == "elsewhere/final_xl2_tread_680_seed2"


def test_table_2_states_the_papers_figures():
    for line in TABLE_2.split("\n")[1:-1]:
        size, *figures = line.split()
        for name, figure in zip(("dit_{}", "dit_{}_tread", "sit_{}", "sit_{}_tread"), figures):
            name = f"table2/{name.format(size)}"
            cfg = compose_experiment(name)
            assert paper_fid(name) == float(figure)
            assert cfg.model.backbone == f"DiT-{size[:-1].upper()}/2"
            assert cfg.diffusion.name == ("sit" if "sit" in name else "edm")
            assert (cfg.train.num_steps, cfg.train.batch_size, cfg.train.lr, cfg.train.ema_decay) == (400_000, 256, 1e-4, 0.9999)
            assert (cfg.eval.final_num_samples, list(cfg.eval.cfg_scales)) == (50_000, [1.0])


def test_the_ablations_state_the_papers_figures_and_routes():
    for rate, fid in SELECTION_RATE.items():
        cfg = compose_experiment(f"selection_rate/{rate}")
        assert paper_fid(f"selection_rate/{rate}") == fid
        assert [route["selection_ratio"] for route in cfg.model.routes] == ([rate / 100] if rate else [])
    assert paper_fid("placement/baseline") == 49.89
    assert sum(name.startswith("placement/") for name in EXPERIMENTS) == 1 + len(PLACEMENT)
    for route, change in PLACEMENT.items():
        cfg = compose_experiment(f"placement/{route}")
        assert paper_fid(f"placement/{route}") == pytest.approx(49.89 + change)
        assert f"{cfg.model.routes[0]['start_layer_idx']}_{cfg.model.routes[0]['end_layer_idx']}" == route
    assert (paper_fid("location/relative"), paper_fid("location/absolute")) == (18.81, 7.38)
    assert (paper_fid("imagenet512/dit_b2", "fid10k/cfg1.0"), paper_fid("imagenet512/dit_b2_tread", "fid10k/cfg1.0")) == (
        62.8,
        40.9,
    )
    assert (paper_fid("lightning/xl1"), paper_fid("lightning/xl1_tread")) == (5.14, 3.71)


def test_the_lightning_rows_are_trained_and_sampled_as_published():
    """By configs/lightningdit_xl_vavae_f16d32.yaml of LightningDiT; the times in this project's clock."""
    for name in ("lightning/xl1", "lightning/xl1_tread"):
        cfg = compose_experiment(name)
        train, diffusion, data = cfg.train, cfg.diffusion, cfg.data
        assert (cfg.model.backbone, data.in_channels, data.input_size, data.num_classes) == ("LightningDiT-XL/1", 32, 16, 1000)
        assert (train.num_steps, train.batch_size, train.lr, train.betas) == (80_000, 1024, 2e-4, [0.9, 0.95])
        assert (train.weight_decay, train.grad_clip_norm, train.ema_decay, train.precision) == (0, None, 0.9999, "bf16")
        assert (diffusion.timestep, diffusion.logit_mean, diffusion.logit_std) == ("logit_normal", 0, 1)
        assert (diffusion.cosine_weight, cfg.model.class_dropout, cfg.model.learn_sigma) == (1, 0.1, False)
        sampler = diffusion.sampler
        assert (sampler.solver, sampler.num_steps, sampler.timestep_shift) == ("euler", 249, 0.3)
    route = {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -4}
    assert compose_experiment("lightning/xl1").model.routes == []
    assert compose_experiment("lightning/xl1_tread").model.routes == [route]


def test_the_final_comparison_states_the_papers_figures():
    rows = {
        ("xl2_dit", "cfg1.0"): (9.62, 6.85, 121.50, 0.67, 0.67),
        ("xl2_tread_160", "cfg1.0"): (4.96, 6.83, 192.49, 0.79, 0.54),
        ("xl2_tread_680", "cfg1.0"): (3.93, 7.32, 211.35, 0.76, 0.60),
        ("xl2_dit", "guided"): (2.27, 4.60, 278.24, 0.83, 0.57),
        ("xl2_tread_finetune_220", "guided"): (2.76, 4.61, 252.78, 0.83, 0.57),
        ("xl2_tread_finetune_740", "guided"): (2.09, 4.46, 269.07, 0.81, 0.62),
        ("xl2_tread_finetune_740_interval", "guided"): (1.69, 4.73, 292.66, 0.81, 0.63),
    }
    for (name, guidance), figures in rows.items():
        paper = compose_experiment(f"final/{name}").experiment.paper
        names = ("fid", "sfid", "inception_score", "precision", "recall")
        assert tuple(paper[f"{metric}50k/{guidance}"] for metric in names) == figures


def test_an_experiment_without_its_data_says_which_command_makes_them(train):
    for name, made in (("table2/dit_b2", "output=latents/imagenet256, or"), ("imagenet512/dit_b2", "512 resolution=512, or")):
        with pytest.raises(ValueError, match=f"does not exist; to make it: accelerate launch prepare_latents.py encode .*{made}"):
            train("x", f"experiment={name}")
    made = "prepare_latents.py convert path=.* output=latents/vavae_imagenet256 autoencoder=va-vae:<file of VA-VAE's weights>, or"
    with pytest.raises(ValueError, match=made):
        train("x", "experiment=lightning/xl1")
    with pytest.raises(ValueError, match="to make it: python prepare_latents.py digits output=nowhere, or"):
        train("x", "experiment=digits/table2/dit_xs2", "data.path=nowhere")


def test_fine_tuning_asks_for_what_it_starts_from(train, tmp_path):
    make_shard(tmp_path / "shard.safetensors", channels=4, size=32, num_classes=1000)
    settings = [f"data.path={tmp_path}", "model.backbone=DiT-XS/8", "eval.every=0", "train.precision=fp32"]
    with pytest.raises(ValueError, match="init_from: .*final_xl2_tread_160_seed0 is not a folder"):
        train("x", "experiment=final/xl2_tread_finetune_220", *settings)


def test_an_experiment_of_the_digits_runs_and_says_in_its_folder_what_it_is(train):
    run = train("selection", "experiment=digits/selection_rate/50", "train.num_steps=2")
    stored = (run / "config.yaml").read_text()
    assert "name: digits/selection_rate/50" in stored and "baseline: digits/selection_rate/0" in stored
    assert 2 in list_steps(run / "checkpoints")
    assert re.search(r"selection_ratio: 0.5", stored)


# ----------------------------------------------------------------------------------------------------------------------
# What is not the row.


def changes(*overrides, **stored):
    """What a run changed of its row; `stored` stands in its config.yaml beside that."""
    cfg = schema.check(composed(overrides), schema.TrainConfig)
    return rows.changes_of(cfg.experiment.name, schema.flatten(cfg.model_dump()) | stored)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.backbone=DiT-XS/2"], {"model.backbone": ("DiT-B/2", "DiT-XS/2")}),
        (["train.batch_size=8", "eval.num_steps=18"], {"train.batch_size": (256, 8), "eval.num_steps": (None, 18)}),
        # A choice of a group stands for all that it brings, and what is set on top of it is there as well.
        (["model=dit"], {"model": ("tread", "dit")}),
        (["diffusion=sit"], {"diffusion": ("edm", "sit")}),
        (
            ["diffusion=sit", "diffusion.timestep=logit_normal"],
            {"diffusion": ("edm", "sit"), "diffusion.timestep": ("uniform", "logit_normal")},
        ),
        (["data=imagenet512"], {"data": ("imagenet256", "imagenet512")}),
        (["data.name=mine"], {"data.name": ("imagenet256", "mine")}),
    ],
)
def test_what_a_run_changed_of_its_row_is_found(overrides, expected):
    assert changes("experiment=table2/dit_b2_tread", *overrides) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["seed=3", "name=mine", "output_dir=elsewhere", "data.path=/scratch/latents", "data.num_workers=9"],
        ["train.compile=blocks", "train.grad_accum_steps=4", "checkpoint.every=7", "eval.every=0", "guidance=cfg"],
        ["model.name=dit"],  # the routes are what is trained
    ],
)
def test_what_says_where_a_run_is_and_how_fast_changes_no_row(overrides):
    assert changes("experiment=table2/dit_b2_tread", *overrides) == {}


def test_what_the_data_fill_in_changes_no_row_and_what_the_row_states_does():
    filled = {"data.kind": "moments", "data.scale_factor": 0.18215, "data.resolution": 256, "data.autoencoder": "sd-vae:a/b"}
    assert changes("experiment=table2/dit_b2", **filled) == {}
    filled = {"data.latents_mean": [0.1] * 32, "data.latents_std": [2.0] * 32, "data.autoencoder": "va-vae:a.pt"}
    assert changes("experiment=lightning/xl1", **filled) == {}
    assert changes("experiment=lightning/xl1", **{"data.in_channels": 16}) == {"data.in_channels": (32, 16)}


def test_the_same_run_in_another_folder_or_of_another_seed_is_what_a_row_starts_from():
    row = "experiment=final/xl2_tread_finetune_220"
    assert changes(row, "output_dir=elsewhere", "seed=2") == {}
    assert changes(row, "init_from=/sweep/final_xl2_tread_160_seed-0") == {}
    assert changes(row, "init_from=runs/mine")["init_from"] == ("final_xl2_tread_160", "mine")


def test_a_row_of_another_version_and_keys_that_a_run_does_not_know_are_not_compared():
    assert rows.changes_of("table9/dit", {"train.lr": 1.0}) is None
    assert rows.changes_of("table2/dit_b2", {"train.lr": 1.0, "model.name": ["a"]}) == {"train.lr": (1e-4, 1.0)}


@pytest.mark.parametrize("name", EXPERIMENTS[::7])
def test_a_row_is_itself(name):
    cfg = compose_experiment(name)
    assert rows.changes_of(name, schema.flatten(cfg.model_dump())) == {}


ROUTE = "model.routes=[{selection_ratio:0.5,start_layer_idx:1,end_layer_idx:-2}]"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["model=tread"], "digits_tread"),
        (["model=dit", "model.backbone=DiT-S/2"], "digits_dit"),
        (["model=lightningdit_tread"], "digits_lightningdit_tread"),
        (["model=lightningdit_tread", "model.routes=[]"], "digits_lightningdit"),
        (["model=dit", ROUTE], "digits_tread"),
        (["model=tread", "model.routes=[]"], "digits_dit"),
        (["model=tread", "model.routes=[{selection_ratio:0,start_layer_idx:1,end_layer_idx:-2}]"], "digits_dit"),
        (["model=dit", ROUTE, "name=mine"], "mine"),
        (["model=dit", ROUTE, "name=digits_dit"], "digits_dit"),
        (["experiment=table2/dit_b2_tread"], "table2_dit_b2_tread_seed0"),
        (["experiment=table2/dit_b2_tread", "train.num_steps=500000", "train.lr=1e-3"], "table2_dit_b2_tread_seed0"),
        (["experiment=table2/dit_b2_tread", "model=dit"], "table2_dit_b2_tread_seed0_model-dit"),
        (["experiment=table2/dit_b2_tread", "model=dit", "name=table2_dit_b2_tread_seed0"], "table2_dit_b2_tread_seed0"),
        (
            ["experiment=lightning/xl1_tread", "model.backbone=LightningDiT-XS/2", "train.batch_size=8", "seed=4"],
            "lightning_xl1_tread_seed4_backbone-LightningDiT-XS-2_batch_size-8",
        ),
    ],
)
def test_the_default_name_says_what_a_run_is(overrides, name):
    raw = composed(overrides)
    assert rows.name_run(raw, schema.check(raw, schema.TrainConfig))[0].name == name


def test_long_lists_of_changes_and_lists_as_values_are_folders_names_too():
    one, two = (["experiment=table2/dit_b2", "model.class_dropout=0.2", ROUTE.replace("-2", end)] for end in ("-2", "-3"))
    more = ["model.init=official_tread", "model.fp32_after_route=false", "diffusion.P_mean=-0.41234", "diffusion.P_std=1.3123"]
    names = []
    for overrides in (one, two, [*one, *more]):
        raw = composed(overrides)
        names.append(rows.name_run(raw, schema.check(raw, schema.TrainConfig))[0].name)
    assert len({*names}) == 3 and all(re.fullmatch(r"table2_dit_b2_seed0_[\w.-]+", name) and len(name) <= 120 for name in names)


def test_training_says_that_a_run_is_not_its_row_and_what_a_routed_dit_is(train, caplog):
    caplog.set_level("INFO")
    train("x", "experiment=digits/selection_rate/50")
    said = (
        "not the row digits/selection_rate/50: train.batch_size=4 instead of 64, train.num_steps=6 instead of 300; reports give"
    )
    assert caplog.text.count(said) == 1
    caplog.clear()
    train("y", "model=dit", ROUTE, "train.num_steps=1")
    assert "model=dit with model.routes=... is a routed network: the run is named y" in caplog.text
    caplog.clear()
    train("z", "model=tread", "train.num_steps=1")
    assert "not the row" not in caplog.text and "the run is named" not in caplog.text


def test_the_name_is_found_inside_hydra_too_where_a_row_is_composed_beside_the_run(monkeypatch):
    found = []

    def main(raw):
        found.append(rows.name_run(raw, schema.check(raw, schema.TrainConfig))[0].name)

    rows.compose_row.cache_clear()
    rows.row_identity.cache_clear()
    monkeypatch.setattr("sys.argv", ["train.py", "experiment=digits/selection_rate/50", "train.batch_size=8", "diffusion=sit"])
    cli.run(main, "config", schema.TrainConfig)
    assert found == ["digits_selection_rate_50_seed0_diffusion-sit_batch_size-8"]
