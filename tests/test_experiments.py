"""The papers' rows as named runs: each composes, builds and holds the paper's figures."""

import functools

import pytest
import torch
from conftest import checked, run_python
from omegaconf import OmegaConf

from cli.compose import compose_overrides
from cli.hydra_setup import row_names
from common.errors import UserError
from extras.report.rows import served_rows
from sampling.recipe import check_guidance

ROWS = row_names()
# One figure of each table, as printed in the papers: TREAD (arXiv 2501.04765), REPA (2410.06940) and SPRINT (2510.21986).
FID = {
    "table2_sit_b2_tread": 15.98, "selection_rate_75": 49.29, "placement_2_8": 49.89 - 21.87, "location_relative": 18.81,
    "lightning_xl1_tread": 3.71, "imagenet512_dit_b2_tread": 40.9, "repa_sit_xl2": 7.9, "sprint_sit_b2": 27.5,
    "final_xl2_tread_680": 3.93, "sparse_guidance_sit_xl2_tread": 4.89,
}  # fmt: skip
TABLES = [
    "table2", "selection_rate", "placement", "location", "lightning", "imagenet512", "repa", "sprint", "final", "sparse_guidance",
    "fashion",
]  # fmt: skip


def table_of(name):
    (table,) = (table for table in TABLES if name.startswith(f"{table}_"))
    return table


@functools.cache  # safe, because no test changes a configuration
def compose_experiment(name):
    return checked([f"experiment={name}"])


@pytest.mark.parametrize("name", ROWS)
def test_every_experiment_composes_and_builds(name):
    cfg = compose_experiment(name)
    assert cfg.experiment["name"] == name and cfg.name == f"{name}_seed0"
    assert cfg.experiment["baseline"] in (None, *ROWS) and cfg.experiment["checkpoint_of"] in (None, *ROWS)
    assert bool(cfg.model.routes) == cfg.model.name.endswith(("tread", "sprint")) and cfg.model.init == "adaln_zero"
    with torch.device("meta"):  # shapes and routes, without the memory of a DiT-XL
        net = cfg.model.build(cfg.data)
    assert net.num_tokens == (cfg.data.input_size // net.patch_size) ** 2


def test_all_rows_are_there_and_an_unknown_row_is_refused():
    assert len(ROWS) == 68
    assert compose_overrides(["seed=1"]).experiment is None
    for unknown in ("table2_dit_b3", "table2_dit-b2", "tabel2_dit_b2", "table2/dit_b2"):
        with pytest.raises(UserError, match=f"experiment={unknown} is not in .*nearest: table2_dit_b2"):
            compose_overrides([f"experiment={unknown}"])


def test_rows_are_a_group_whose_values_come_after_those_of_other_groups_and_before_other_arguments():
    for overrides in (["train.lr=3e-4", "experiment=lightning_xl1_tread"], ["experiment=lightning_xl1_tread", "train.lr=3e-4"]):
        cfg = compose_overrides([*overrides, "model=lightningdit"])
        assert (cfg.data.name, cfg.diffusion.name, cfg.data.in_channels) == ("vavae_imagenet256", "sit", 32)
        assert (cfg.model.name, cfg.model.backbone, cfg.model.fp32_after_route) == ("lightningdit", "LightningDiT-XL/1", False)
        assert (cfg.train.lr, cfg.experiment.name) == (3e-4, "lightning_xl1_tread")


def test_a_users_own_experiment_works_beside_the_rows(tmp_path):
    (tmp_path / "experiment").mkdir()
    mine = "# @package _global_\ndefaults: [table2_dit_b2_tread, override /model: dit, _self_]\nname: mine\ntrain: {lr: 3e-4}"
    (tmp_path / "experiment" / "mine.yaml").write_text(mine)
    code, output = run_python("train.py", "--config-dir", tmp_path, "experiment=mine", "--cfg=job")
    cfg = OmegaConf.create(output)
    assert code == 0 and (cfg.name, cfg.model.name, cfg.train.lr, cfg.data.name) == ("mine", "dit", 3e-4, "imagenet256")
    code, output = run_python("train.py", "--config-dir", tmp_path, "experiment=mime")
    assert code == 1 and "experiment=mime is not in" in output


def test_experiments_are_evaluated_during_training_and_at_the_end_with_the_papers_number_of_samples():
    along = {"fashion": (1_000, 1_000), "final": (100_000, 5_000), "lightning": (10_000, 5_000)}
    along["sparse_guidance"] = along["final"]
    for name in ROWS:
        cfg, table = compose_experiment(name), table_of(name)
        assert (cfg.evaluation.every, cfg.evaluation.num_samples) == along.get(table, (50_000, 5_000))
        assert [one.name for one in cfg.guidance] == ["none"]
        if table != "fashion":
            assert (
                cfg.train.num_steps % cfg.evaluation.every == 0
                and cfg.evaluation.final_num_samples == cfg.experiment["num_samples"]
            )


def test_the_description_of_a_row_follows_its_overrides():
    cfg = compose_overrides(["experiment=fashion_dit_xs4_tread", "seed=2", "train.num_steps=77", "train.batch_size=8"])
    assert cfg.name == "fashion_dit_xs4_tread_seed2" and "77 steps of 8 images" in cfg.experiment.differs
    cfg = compose_overrides(["experiment=final_xl2_tread_finetune_740", "seed=2", "output_dir=elsewhere"])
    assert cfg.init_from == "elsewhere/final_xl2_tread_680_seed2"


def test_a_row_of_each_table_holds_the_papers_figure():
    rows = {name: compose_experiment(name).experiment for name in ROWS}
    assert {name: rows[name]["paper"]["fid"] for name in FID} == pytest.approx(FID)
    assert {table_of(name) for name in ROWS} == {table_of(name) for name in FID} | {"fashion"}
    names = ["fid", "sfid", "inception_score", "precision", "recall"]
    assert rows["final_xl2_tread_finetune_740"]["paper_guided"] == dict(zip(names, (2.09, 4.46, 269.07, 0.81, 0.62)))
    interval = rows["final_xl2_tread_finetune_740_interval"]["paper_by_guidance"]["guidance=interval"]
    assert interval == dict(zip(names, (1.69, 4.73, 292.66, 0.81, 0.63)))
    assert [*rows["final_xl2_dit"]["paper"]] == [*rows["final_xl2_dit"]["paper_guided"]] == names
    of_10_000 = {name for name, row in rows.items() if row["num_samples"] == 10_000}
    assert of_10_000 == {"imagenet512_dit_b2", "imagenet512_dit_b2_tread"}


def test_the_report_finds_the_rows_whose_checkpoint_another_row_trains():
    """It reads `checkpoint_of` in the row's own file, so no row may get the key from another file."""
    composed = {name: compose_experiment(name).experiment["checkpoint_of"] for name in ROWS}
    assert served_rows() == {name: row for name, row in composed.items() if row is not None}


@pytest.mark.parametrize("name", ROWS)
def test_the_rows_average_and_sample_as_their_sources_do(name):
    """Official TREAD, SiT, REPA and LightningDiT hold the EMA's decay constant. TREAD and SPRINT sample under bf16."""
    cfg, table = compose_experiment(name), table_of(name)
    assert cfg.train.ema_schedule == ("warmup" if table == "fashion" else "constant")
    assert cfg.train.precision == ("fp32" if table == "fashion" else "bf16")
    precision = "fp32" if table in ("fashion", "lightning", "repa") else "bf16"
    assert cfg.sampling.precision == precision
    assert cfg.train.lr == {"lightning": 2e-4, "fashion": cfg.train.lr}.get(table, 1e-5 if "finetune" in name else 1e-4)


def test_the_row_of_sparse_guidance_is_sampled_as_published_and_its_commands_compose():
    """SiT-XL/2 with TREAD's route, Euler, 40 steps. SG_FLOPS is one network, SG_FID an earlier checkpoint and moving ratios."""
    cfg = compose_experiment("sparse_guidance_sit_xl2_tread")
    sampler, (route,) = cfg.sampler, cfg.model.routes
    assert (cfg.model.backbone, cfg.diffusion.name, cfg.train.num_steps) == ("DiT-XL/2", "sit", 2_000_000)
    assert (sampler.solver, sampler.num_steps, sampler.timestep_shift) == ("euler", 40, 1)
    assert (route.selection_ratio, route.start_layer_idx, route.end_layer_idx % 28) == (0.5, 2, 24)
    assert 50_000 % cfg.checkpoint.keep_every == 0 and (cfg.train.lr, cfg.train.batch_size) == (1e-4, 256)
    by_guidance = cfg.experiment["paper_by_guidance"]
    assert [figures["fid"] for figures in by_guidance.values()] == [2.14, 1.58] and cfg.experiment["paper_guided"]["fid"] == 2.57
    flops, fid = (checked(["checkpoint=x", *words.split()], "fid").guidance[0] for words in by_guidance)
    assert (flops.r_strong, flops.r_weak, flops.has_moving_ratios, flops.checkpoint) == (0.5, 0.9, False, None)
    assert (fid.r_strong, fid.r_strong_last, fid.r_weak, fid.r_weak_last) == (0.0, 0.6, 0.6, 0.0)
    check_guidance(cfg, flops)
    earlier = compose_experiment("sparse_guidance_sit_xl2_tread_160").experiment
    assert [figures["fid"] for figures in earlier["paper_by_guidance"].values()] == [2.07]
    assert earlier["paper_guided"]["fid"] == 2.95


@pytest.mark.parametrize("size", ["s2", "b2", "l2", "xl2"])
def test_the_rows_of_table_2_train_the_network_in_their_name_as_the_paper_does(size):
    for name, diffusion in (("dit_{}", "edm"), ("dit_{}_tread", "edm"), ("sit_{}", "sit"), ("sit_{}_tread", "sit")):
        cfg = compose_experiment(f"table2_{name.format(size)}")
        assert (cfg.model.backbone, cfg.diffusion.name) == (f"DiT-{size[:-1].upper()}/2", diffusion)
        assert (cfg.train.num_steps, cfg.train.batch_size, cfg.train.lr, cfg.train.ema_decay) == (400_000, 256, 1e-4, 0.9999)
        assert cfg.experiment["num_samples"] == 50_000


def test_the_rows_of_the_ablations_have_the_routes_in_their_names():
    for name in ROWS:
        table = table_of(name)
        words = name.removeprefix(f"{table}_")
        if table == "selection_rate":
            routes = compose_experiment(name).model.routes
            assert [route.selection_ratio for route in routes] == ([int(words) / 100] if words != "0" else [])
        elif table == "placement" and words != "baseline":
            (route,) = compose_experiment(name).model.routes
            assert f"{route.start_layer_idx}_{route.end_layer_idx}" == words
    assert not compose_experiment("placement_baseline").model.routes


def test_the_rows_of_lightningdit_and_sprint_are_trained_as_published():
    """From LightningDiT's configs/lightningdit_xl_vavae_f16d32.yaml and SPRINT's configuration, with t as in this project."""
    lightning, sprint = ("XL/1", 80_000, 1024, 2e-4, [0.9, 0.95], None, 1), (400_000, 256, 1e-4, [0.9, 0.999], 1, 0)
    for name, published, routes in (
        ("lightning_xl1", lightning, []),
        ("lightning_xl1_tread", lightning, [(0.5, 2, -4)]),
        ("sprint_sit_b2_dense", ("B/2", *sprint), []),
        ("sprint_sit_b2", ("B/2", *sprint), [(0.75, 2, -3)]),
        ("sprint_sit_xl2_dense", ("XL/2", *sprint), []),
        ("sprint_sit_xl2", ("XL/2", *sprint), [(0.75, 2, -3)]),
    ):
        cfg = compose_experiment(name)
        train, diffusion, data, sampler = cfg.train, cfg.diffusion, cfg.data, cfg.sampler
        steps = (train.num_steps, train.batch_size, train.lr, train.betas, train.grad_clip_norm)
        assert (cfg.model.backbone.removeprefix("LightningDiT-"), *steps, diffusion.cosine_weight) == published
        assert (train.weight_decay, train.ema_decay, train.precision) == (0, 0.9999, "bf16")
        assert (diffusion.timestep, diffusion.logit_mean, diffusion.logit_std) == ("logit_normal", 0, 1)
        assert (cfg.model.class_dropout, cfg.model.learn_sigma) == (0.1, False)
        assert [(one.selection_ratio, one.start_layer_idx, one.end_layer_idx) for one in cfg.model.routes] == routes
        if published == lightning:
            assert (data.in_channels, data.input_size, data.num_classes) == (32, 16, 1000)
            assert (sampler.solver, sampler.num_steps, sampler.timestep_shift) == ("euler", 249, 0.3)
