"""The paper's rows as named runs: every one composes, builds and holds the paper's figures."""

import functools

import pytest
import torch
from conftest import checked, composed, make_shard
from hydra.core.config_store import ConfigStore

from checkpoints.load import build_network
from common.errors import UserError
from configs.compose import register
from configs.experiments import ROWS, TABLES
from extras.report.experiments import change_words, changes_of
from extras.report.runs import LOSS, read_run

# TREAD (arXiv 2501.04765): FID of 50,000 unguided samples at 400K iterations.
TABLE_2 = {  # EDM without and with routes, SiT without and with routes
    "s2": (68.40, 47.04, 57.60, 38.08), "b2": (43.47, 21.34, 33.00, 15.98),
    "l2": (23.33, 9.10, 18.80, 5.91), "xl2": (19.47, 7.38, 17.20, 4.89),
}  # fmt: skip
SELECTION_RATE = {0: 43.47, 25: 26.50, 50: 21.34, 75: 49.29}
# Changes of FID against 49.89, the dense network's.
PLACEMENT = {
    "0_2": 2.95, "0_3": 2.59, "0_4": 7.23, "0_5": 0.92, "0_6": -12.12, "0_7": -15.71, "0_8": -16.31, "0_9": -14.82,
    "0_10": 7.47, "7_8": 0.61, "6_8": 0.82, "5_8": -4.84, "4_8": -14.20, "3_8": -16.31, "2_8": -21.87, "1_8": -21.68,
}  # fmt: skip
FINAL = {  # FID, sFID, IS, precision and recall, unguided and guided
    "dit": ((9.62, 6.85, 121.50, 0.67, 0.67), (2.27, 4.60, 278.24, 0.83, 0.57)),
    "tread_160": ((4.96, 6.83, 192.49, 0.79, 0.54), ()),
    "tread_680": ((3.93, 7.32, 211.35, 0.76, 0.60), ()),
    "tread_finetune_220": ((), (2.76, 4.61, 252.78, 0.83, 0.57)),
    "tread_finetune_740": ((), (2.09, 4.46, 269.07, 0.81, 0.62)),
    "tread_finetune_740_interval": ((), (1.69, 4.73, 292.66, 0.81, 0.63)),
}
# The other placements differ from these in their two blocks alone.
COMPOSED = [name for name in ROWS if "placement/" not in name or name.endswith(("baseline", "/0_10", "/7_8"))]


@functools.cache  # a checked configuration is never written to
def compose_experiment(name):
    return checked([f"experiment={name}"])


@pytest.mark.parametrize("name", COMPOSED)
def test_every_experiment_composes_and_builds(name):
    cfg = compose_experiment(name)
    assert cfg.experiment["name"] == name and cfg.name == f"{name.replace('/', '_')}_seed0"
    assert cfg.experiment["baseline"] in (None, *ROWS)
    assert bool(cfg.model.routes) == cfg.model.name.endswith(("tread", "sprint")) and cfg.model.init == "adaln_zero"
    with torch.device("meta"):  # shapes and routes, without the memory of an XL
        net = build_network(cfg)
    assert net.num_tokens == (cfg.data.input_size // net.patch_size) ** 2


def test_no_two_rows_share_a_name_or_run_and_only_the_named_ones_are_registered():
    assert len({name.replace("/", "_") for name in ROWS}) == len([row for table in TABLES for row in table()]) == 66

    def registered(*overrides):
        register(overrides)
        return ConfigStore.instance().repo.get("experiment", {})

    assert registered("seed=1") == registered("experiment=null") == {}
    found = registered("experiment=table2/dit_b2,selection_rate/50", "seed=0,1")
    with pytest.raises(UserError, match="experiment=table2/dit_b3 is not a row .*nearest: table2/dit_b2"):
        register(["experiment=table2/dit_b3"])
    assert {*found} == {"table2", "selection_rate"} and [*found["table2"]] == ["dit_b2.yaml"]


def test_experiments_are_evaluated_along_the_way_and_with_the_papers_number_of_samples_at_the_end():
    along = {"fashion": (1_000, 1_000), "final": (100_000, 5_000), "lightning": (10_000, 5_000)}
    for name in COMPOSED:
        cfg, table, row = compose_experiment(name), name.partition("/")[0], ROWS[name]
        assert (cfg.eval.every, cfg.eval.num_samples) == along.get(table, (50_000, 5_000)) and cfg.eval.cfg_scales == [1.0]
        if table != "fashion":
            assert cfg.train.num_steps % cfg.eval.every == 0 and cfg.eval.final_num_samples == row.num_samples


def test_what_a_row_says_follows_the_settings_on_top():
    cfg = composed(["experiment=fashion/dit_xs4_tread", "seed=2", "train.num_steps=77", "train.batch_size=8"])
    assert cfg.name == "fashion_dit_xs4_tread_seed2" and ", 77 steps of 8 images" in cfg.experiment.differs
    cfg = composed(["experiment=final/xl2_tread_finetune_740", "seed=2", "output_dir=elsewhere"])
    assert cfg.init_from == "elsewhere/final_xl2_tread_680_seed2"


def test_table_2_states_the_papers_figures():
    for size, figures in TABLE_2.items():
        for name, figure in zip(("dit_{}", "dit_{}_tread", "sit_{}", "sit_{}_tread"), figures):
            cfg = compose_experiment(f"table2/{name.format(size)}")
            assert cfg.experiment["paper"] == {"fid": figure} and cfg.experiment["num_samples"] == 50_000
            diffusion = "sit" if "sit" in name else "edm"
            assert (cfg.model.backbone, cfg.diffusion.name) == (f"DiT-{size[:-1].upper()}/2", diffusion)
            assert (cfg.train.num_steps, cfg.train.batch_size, cfg.train.lr, cfg.train.ema_decay) == (400_000, 256, 1e-4, 0.9999)


def test_the_ablations_state_the_papers_figures_and_routes():
    for rate, fid in SELECTION_RATE.items():
        assert ROWS[f"selection_rate/{rate}"].paper == {"fid": fid}
        routes = ROWS[f"selection_rate/{rate}"].overrides.get("model.routes", [])
        assert [route["selection_ratio"] for route in routes] == ([rate / 100] if rate else [])
    assert ROWS["placement/baseline"].paper == {"fid": 49.89}
    assert sum(name.startswith("placement/") for name in ROWS) == 1 + len(PLACEMENT)
    for name, change in PLACEMENT.items():
        (route,) = ROWS[f"placement/{name}"].overrides["model.routes"]
        assert ROWS[f"placement/{name}"].paper["fid"] == pytest.approx(49.89 + change)
        assert f"{route['start_layer_idx']}_{route['end_layer_idx']}" == name
    others = {"location/relative": 18.81, "location/absolute": 7.38, "lightning/xl1": 5.14, "lightning/xl1_tread": 3.71}
    others |= {"imagenet512/dit_b2": 62.8, "imagenet512/dit_b2_tread": 40.9, "repa/sit_b2": 24.4, "repa/sit_xl2": 7.9}
    others |= {"sprint/sit_b2": 27.5, "sprint/sit_xl2": 9.30}
    assert {name: ROWS[name].paper["fid"] for name in others} == others
    assert {name for name, row in ROWS.items() if row.num_samples == 10_000} == {"imagenet512/dit_b2", "imagenet512/dit_b2_tread"}


def test_the_final_comparison_states_the_papers_figures():
    rows = {name.removeprefix("final/xl2_"): row for name, row in ROWS.items() if name.startswith("final/") or row.paper_guided}
    assert {name: (tuple(row.paper.values()), tuple(row.paper_guided.values())) for name, row in rows.items()} == FINAL
    names = ["fid", "sfid", "inception_score", "precision", "recall"]
    assert [*rows["dit"].paper] == [*rows["dit"].paper_guided] == names


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
        routes = [(one.selection_ratio, one.start_layer_idx, one.end_layer_idx) for one in cfg.model.routes]
        assert routes == ([(0.5, 2, -4)] if name.endswith("tread") else [])


def test_an_experiment_runs_and_the_report_knows_it_by_its_folder(train, tmp_path):
    make_shard(tmp_path / "data" / "a.safetensors", channels=1, size=32, num_classes=10)
    row, keys = "fashion/dit_xs4_tread", [f"data.path={tmp_path / 'data'}", "train.compile=none"]
    run = read_run(train("selection", f"experiment={row}", *keys, "train.num_steps=2"))
    assert run.row["name"] == row and run.row["baseline"] == "fashion/dit_xs4"
    assert "train.num_steps=2 instead of 6000, train.batch_size=4 instead of 64" in change_words(changes_of(run))
    assert [*run.figures[LOSS]] == [*run.speeds] == [1, 2] and run.clock[1][-1] > 0
