"""The report: what is read, grouped and compared, by figures worked out by hand; the page, as HTML and as a picture."""

import base64
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from conftest import composed
from omegaconf import OmegaConf
from PIL import Image

from common.errors import UserError
from configs import schema
from extras.report.__main__ import main
from extras.report.charts import MAX_POINTS, Series, line_chart, linear_ticks, log_ticks, swept_curves, thin
from extras.report.experiments import by_number, curve_metric, first_reached, group, metric_order
from extras.report.page import load_templates
from extras.report.runs import read_runs
from extras.report.tables import equal_table, results_table, speedup_table

ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -4}
TABLE = "Table 2: backbones"


def make_run(root, name, *, experiment=None, routed=False, seed=0, steps=400, fid=(), speed=10.0, log_every=100, **config):
    """A run's folder as training leaves it.

    Args:
        fid: {step: fid5k/cfg1.0}.
        speed: steps per second.
    """
    folder = root / name
    (folder / "samples").mkdir(parents=True)
    stored = {
        "name": name,
        "seed": seed,
        "output_dir": str(root),
        "model": {"name": "tread" if routed else "dit", "backbone": "DiT-B/2", "routes": [ROUTE] if routed else []},
        "data": {"name": "imagenet256", "path": f"/data/{name}"},
        "train": {"num_steps": steps, "batch_size": 256},
        "diffusion": {"sampler": {"num_steps": 40, "S_churn": 0.0}},
        "eval": {"num_steps": None},
        **config,
    }
    if experiment is not None:
        stored["experiment"] = experiment
    OmegaConf.save(OmegaConf.create(stored), folder / "config.yaml")
    lines = []
    for step in range(log_every, steps + 1, log_every):
        loss = 0.5 + (0.2 if routed else 0.1) + 10 / (step + seed)
        lines.append({"step": step, "loss": loss, "steps_per_sec": speed, "images_per_sec": 256 * speed})
        if step in fid:
            lines.append({"step": step, "fid5k/cfg1.0": fid[step], "is5k/cfg1.0": 100 - fid[step], "evaluation_sec": 9.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = {"step": 0, "time": "2026-01-02T03:04:05+00:00", "command": f"accelerate launch train.py name={name}"}
    start |= {"commit": "0123456789abcdef", "modified": False, "device": "Example GPU", "num_processes": 8, "torch": "2.15"}
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    colour = (60 + 30 * seed, 120, 200) if routed else (200, 120, 60 + 30 * seed)
    Image.new("RGB", (64, 40), colour).save(folder / "samples" / f"step_{steps:07d}.png")
    return folder


def about(name, paper, baseline=None, table=TABLE):
    return {"name": name, "table": table, "paper": paper, "source": "TREAD, Table 2", "differs": "", "baseline": baseline}


@pytest.fixture
def runs(tmp_path):
    """Dense and routed, two seeds each. Dense is best at 400 steps: 40; routed passes 40 between 100 (60) and 200 (20)."""
    root = tmp_path / "runs"
    for seed, shift in ((0, -1), (1, 1)):
        dense = {100: 80 + shift, 200: 60 + shift, 300: 50 + shift, 400: 40 + shift}
        routed = {100: 60 + shift, 200: 20 + shift, 300: 16 + shift, 400: 12 + shift}
        make_run(root, f"dense_seed-{seed}", experiment=about("table2/dit", {"fid5k": 43.0}), seed=seed, fid=dense)
        named = about("table2/tread", {"fid5k": 10.0, "fid50k": 21.34}, "table2/dit")
        make_run(root, f"tread_seed-{seed}", experiment=named, routed=True, seed=seed, fid=routed, speed=20.0)
    return root


def table_of(root):
    tables = group(read_runs([root])[0])
    assert len(tables) == 1
    return next(iter(tables.values()))


def cells(table, label):
    row = next(row for row in table.rows if row[0] == label)
    return dict(zip(table.columns, row))


# ----------------------------------------------------------------------------------------------------------------------
# Reading and comparing.


def test_seeds_are_one_experiment_with_mean_spread_and_the_papers_figure_beside_it(runs):
    row = cells(results_table(table_of(runs)), "table2/dit")
    # Means of 39 and 41; standard deviation sqrt(2); 400 steps of 256 images; 400 / 10 s on 8 devices = 0.0889 h.
    assert row["Seeds"] == "2" and row["Measured"] == "40.00 ± 1.41" and row["Paper"] == "43.00"
    assert row["Difference"] == "−3.00 (−7%)" and row["Steps"] == "400" and row["Images seen"] == "102,400"
    assert row["Device hours"] == "0.0889" and row["Images/s"] == "2,560" and row["Commit"] == "01234567"


def test_a_routed_experiment_is_compared_with_its_dense_one(runs):
    table = table_of(runs)
    assert cells(results_table(table), "table2/tread")["Against dense"] == "−28.00 (−70%)"
    row = cells(speedup_table(table), "table2/tread")
    # 40 lies half-way between 60 at step 100 and 20 at step 200: step 150. 400 / 150; hours: 40 s / 7.5 s.
    assert row["Reached"] == "step 150" and row["Speedup in steps"] == "2.67×" and row["Speedup in hours"] == "5.33×"
    assert row["Best that both reach"] == "40.00 (dense best)" and row["Dense"] == "table2/dit, step 400"
    assert any("between 60.00 at step 100 and 20.00 at step 200" in note for note in speedup_table(table).notes)


@pytest.mark.parametrize(
    ("curve", "target", "sign", "reached"),
    [
        ([(100, 60.0), (200, 20.0)], 40.0, 1, 150.0),
        ([(100, 60.0), (200, 50.0)], 40.0, 1, None),
        ([(100, 30.0), (200, 20.0)], 40.0, 1, 100.0),
        ([(100, 60.0), (200, 40.0), (300, 70.0)], 40.0, 1, 200.0),
        ([(100, 10.0), (300, 50.0)], 40.0, -1, 250.0),  # more is better
    ],
)
def test_a_figure_is_first_reached_between_two_evaluations(curve, target, sign, reached):
    assert first_reached(curve, target, sign)[0] == reached


def test_where_routed_runs_do_not_reach_the_dense_best_their_own_is_compared(tmp_path):
    make_run(tmp_path, "dit", fid={100: 50.0, 200: 30.0, 400: 10.0})
    make_run(tmp_path, "tread", routed=True, fid={200: 30.0, 400: 20.0}, speed=20.0)
    row = cells(speedup_table(table_of(tmp_path)), "tread")  # without experiment.*, dense is what differs in routes alone
    # 20 lies half-way between 30 at step 200 and 10 at step 400: step 300, 30 s; the routed run's 400 steps take 20 s.
    assert row["Best that both reach"] == "20.00 (its own best)" and row["Dense"] == "dit, step 300"
    assert row["Reached"] == "step 400" and row["Speedup in steps"] == "0.75×" and row["Speedup in hours"] == "1.5×"


@pytest.mark.parametrize(
    ("dense", "routed", "words", "speedup"),
    [
        ({400: 30.0}, {100: 20.0, 400: 10.0}, ("dit, step 400", "at or before step 100"), "≥ 4×"),
        ({100: 20.0, 400: 10.0}, {400: 30.0}, ("dit, at or before step 100", "step 400"), "≤ 0.25×"),
        ({400: 10.0}, {400: 10.0}, ("dit, step 400", "step 400"), "1×"),
    ],
)
def test_a_figure_that_the_first_evaluation_surpasses_gives_a_bound(tmp_path, dense, routed, words, speedup):
    make_run(tmp_path, "dit", fid=dense)
    make_run(tmp_path, "tread", routed=True, fid=routed)
    table = speedup_table(table_of(tmp_path))
    row = cells(table, "tread")
    assert (row["Dense"], row["Reached"]) == words and row["Speedup in steps"] == speedup
    assert any("is already 20.00" in note for note in table.notes) == ("at or before" in " ".join(words))


@pytest.mark.parametrize(
    ("speed", "hours", "dense", "difference"),
    [
        (20.0, "0.00556", "60.00 ± 1.41 (step 200)", "−48.00 (−80%)"),  # 400 routed steps take the 20 s of 200 dense ones
        (16.0, "0.00694", "55.00 ± 1.41 (step 250)", "−43.00 (−78%)"),  # 25 s: half-way from 60 to 50
        (10.0, "0.0111", "40.00 ± 1.41 (step 400)", "−28.00 (−70%)"),
        (5.0, "0.0222", "—", "—"),  # the dense runs ended before
        (100.0, "0.00111", "—", "—"),  # and had not been evaluated yet
    ],
)
def test_routed_and_dense_are_compared_at_equal_steps_and_at_equal_time(runs, speed, hours, dense, difference):
    for seed in (0, 1):
        file = runs / f"tread_seed-{seed}" / "metrics.jsonl"
        file.write_text(file.read_text().replace('"steps_per_sec": 20.0', f'"steps_per_sec": {speed}'))
    row = cells(equal_table(table_of(runs)), "table2/tread")
    assert (row["Metric"], row["Step"], row["Seeds"]) == ("fid5k/cfg1.0", "400", "2")
    assert (row["Routed figure"], row["Dense, equal steps"]) == ("12.00 ± 1.41", "40.00 ± 1.41")
    assert row["Difference"] == "−28.00 (−70%)" and row["Routed hours"] == hours
    assert (row["Dense, equal time"], row["Difference in time"]) == (dense, difference)


def test_equal_steps_are_the_last_ones_that_both_have_and_every_seed_there_counts(runs):
    for seed, kept in ((0, 3), (1, 5)):  # evaluated until 100, and until 200
        file = runs / f"dense_seed-{seed}" / "metrics.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:kept]))
    table = equal_table(table_of(runs))
    row = cells(table, "table2/tread")
    assert (row["Step"], row["Seeds"]) == ("200", "2 routed, 1 dense")
    assert (row["Routed figure"], row["Dense, equal steps"]) == ("20.00 ± 1.41", "61.00")
    assert row["Dense, equal time"] == "81.00 (step 100)"
    assert any("table2/dit has been evaluated until step 200 of 400" in note for note in table.notes)
    for seed in (0, 1):
        file = runs / f"dense_seed-{seed}" / "metrics.jsonl"
        file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if "fid5k" not in line))
    assert cells(equal_table(table_of(runs)), "table2/tread")["Dense, equal steps"] == "—"


def test_hours_are_those_of_the_seeds_that_the_figure_is_of(runs):
    file = runs / "dense_seed-1" / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:5]))
    # The other seed's best is 39, after 40 s; the routed mean is there at step 152.5, after 7.625 s.
    assert cells(speedup_table(table_of(runs)), "table2/tread")["Speedup in hours"] == "5.25×"


def test_a_speedup_says_of_which_dense_figures_and_machines_it_is(runs):
    for seed in (0, 1):
        file = runs / f"dense_seed-{seed}" / "metrics.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))  # all steps, without the last evaluation
        file = runs / f"tread_seed-{seed}" / "starts.jsonl"
        file.write_text(file.read_text().replace('"num_processes": 8', '"num_processes": 4'))
    notes = " ".join(speedup_table(table_of(runs)).notes)
    assert "table2/dit has been evaluated until step 300 of 400: its figures so far" in notes
    assert "table2/tread: hours on 4 × Example GPU against hours on 8 × Example GPU" in notes


def test_seeds_that_start_from_runs_of_their_own_are_one_experiment_without_a_speedup(runs):
    for seed in (0, 1):
        named = about("final/tuned", {"fid5k": 3.0}, "table2/dit")
        init = f"{runs}/tread_seed-{seed}"
        make_run(runs, f"tuned_seed-{seed}", experiment=named, seed=seed, fid={400: 5.0 + seed}, init_from=init)
    table = table_of(runs)
    assert cells(results_table(table), "final/tuned")["Measured"] == "5.50 ± 0.71"
    assert any("final/tuned: started from tread, whose training is not in" in note for note in results_table(table).notes)
    assert [row[0] for row in speedup_table(table).rows] == ["table2/tread"]


def test_the_dense_runs_are_those_that_differ_least_and_what_differs_is_said(tmp_path):
    small, large = ({"num_steps": 400, "batch_size": size} for size in (128, 256))
    make_run(tmp_path, "a", experiment=about("d", {}), fid={400: 30.0}, train=small)
    make_run(tmp_path, "r", experiment=about("r", {}, "d"), routed=True, fid={400: 15.0})
    table = results_table(table_of(tmp_path))
    assert cells(table, "r")["Against dense"] == "−15.00 (−50%)"
    assert "r: its dense runs differ in more than routes: train.batch_size=128 instead of 256" in table.notes
    make_run(tmp_path, "b", experiment=about("d", {}), fid={400: 20.0}, train=large)
    table = results_table(table_of(tmp_path))
    assert cells(table, "r")["Against dense"] == "−5.00 (−25%)" and not any("more than routes" in note for note in table.notes)


# ----------------------------------------------------------------------------------------------------------------------
# What is not the paper's row.


def make_row(root, row, *overrides, fid=(), **config):
    """A run of one of the paper's rows, with other settings on top, 400 steps long unless they say otherwise."""
    cfg = schema.check(composed([f"experiment={row}", *overrides]), schema.TrainConfig).model_dump()
    return make_run(root, cfg.pop("name") + "".join(overrides).replace("/", "-"), fid=fid, **cfg | config)


def figures(table):
    return {row[0]: dict(zip(table.columns, row)) for row in table.rows}


TREAD_B2, DIT_B2 = "table2/dit_b2_tread", "table2/dit_b2"


@pytest.mark.parametrize("changed", ["model.backbone=DiT-XS/2", "train.batch_size=8"])
def test_a_run_that_changed_its_row_keeps_no_figure_of_the_paper_and_stands_in_a_row_of_its_own(tmp_path, changed):
    short = changed.partition(".")[2]
    make_row(tmp_path, TREAD_B2, fid={400: 25.0})
    make_row(tmp_path, TREAD_B2, changed, fid={400: 90.0})
    (table,) = group(read_runs([tmp_path])[0]).values()
    rows = figures(results_table(table))
    assert rows[TREAD_B2]["Paper"] == "21.34 [fid50k/cfg1.0]" and rows[TREAD_B2]["Measured"] == "25.00"
    own = rows[f"{TREAD_B2} with {short}"]
    assert (own["Measured"], own["Paper"], own["Difference"]) == ("90.00", "—", "—")
    main([str(tmp_path)])
    for file in ("report.html", "report.md"):
        text = (tmp_path / file).read_text().replace("<wbr>", "")
        assert f"not the row itself: {changed} instead of " in text


def test_a_changed_run_alone_does_not_choose_the_papers_metric(tmp_path):
    make_row(tmp_path, TREAD_B2, "train.batch_size=8", fid={400: 90.0})
    table = results_table(table_of(tmp_path))
    assert "Paper" not in table.columns and "Difference" not in table.columns
    (experiment,) = table_of(tmp_path)
    assert experiment.comparisons() == [] and "source" not in experiment.about


def test_a_run_that_changed_its_row_is_compared_only_with_dense_runs_that_changed_theirs_alike(tmp_path):
    small = "model.backbone=DiT-XS/2"
    make_row(tmp_path, DIT_B2, fid={400: 40.0})
    make_row(tmp_path, TREAD_B2, small, fid={400: 80.0})
    (dense, routed) = table_of(tmp_path)
    assert routed.baseline is None
    make_row(tmp_path, DIT_B2, small, fid={400: 100.0})
    rows = figures(results_table(table_of(tmp_path)))
    assert rows[f"{TREAD_B2} with backbone=DiT-XS/2"]["Against dense"] == "−20.00 (−20%)"
    # And what is as the paper has it only with what is, too.
    make_row(tmp_path, TREAD_B2, fid={400: 30.0})
    rows = figures(results_table(table_of(tmp_path)))
    assert rows[TREAD_B2]["Against dense"] == "−10.00 (−25%)"
    for folder in tmp_path.glob("table2_dit_b2_seed0"):
        shutil.rmtree(folder)
    assert next(e for e in table_of(tmp_path) if e.label == TREAD_B2).baseline is None


def test_other_routes_are_compared_with_the_rows_dense_run_and_another_length_is_said(tmp_path):
    route = "model.routes=[{selection_ratio:0.25,start_layer_idx:1,end_layer_idx:-2}]"
    make_row(tmp_path, DIT_B2, fid={400: 40.0})
    make_row(tmp_path, TREAD_B2, route, fid={400: 30.0})
    make_row(tmp_path, TREAD_B2, "train.num_steps=500000", fid={400: 20.0})
    table = results_table(table_of(tmp_path))
    against = {label: row["Against dense"] for label, row in figures(table).items() if "tread" in label}
    routes = "routes=[{selection_ratio:0.25,start_layer_idx:1,end_layer_idx:-2}]"
    assert against == {
        f"{TREAD_B2} with {routes}": "−10.00 (−25%)",
        f"{TREAD_B2} with train.num_steps=500000": "−20.00 (−50%)",
    }
    notes = [note for note in table.notes if "more than routes" in note]
    assert len(notes) == 1 and "train.num_steps=400000 instead of 500000" in notes[0]


def test_a_routed_row_without_its_route_is_no_routed_run_of_the_row(tmp_path):
    make_row(tmp_path, DIT_B2, fid={400: 40.0})
    make_row(tmp_path, TREAD_B2, "model=dit", fid={400: 41.0})
    labels = {experiment.label: experiment for experiment in table_of(tmp_path)}
    assert labels.keys() == {DIT_B2, f"{TREAD_B2} with model=dit"}
    assert all(experiment.baseline is None for experiment in labels.values())


def test_an_unfinished_run_of_a_row_stays_in_its_row_and_is_said_to_be(tmp_path):
    make_row(tmp_path, TREAD_B2, fid={400: 25.0})
    table = results_table(table_of(tmp_path))
    assert [row[0] for row in table.rows] == [TREAD_B2] and any("is unfinished, at step 400 of 400,000" in n for n in table.notes)


def test_many_changes_are_counted_in_the_label_and_listed_where_it_is_said_what_differs(tmp_path):
    changed = ["model.backbone=DiT-XS/2", "train.batch_size=8", "train.lr=1e-3", "train.ema_decay=0.9", "diffusion=sit"]
    make_row(tmp_path, TREAD_B2, *changed)
    (experiment,) = table_of(tmp_path)
    assert experiment.label == f"{TREAD_B2} with diffusion=sit, backbone=DiT-XS/2, batch_size=8 and 2 more"
    assert "train.ema_decay=0.9 instead of 0.9999, train.lr=0.001 instead of 0.0001" in experiment.about["differs"]


def test_a_row_that_this_version_does_not_have_is_said_to_be_unknown(tmp_path):
    make_run(tmp_path, "a", experiment=about("table9/dit", {"fid5k": 20.0}), fid={400: 30.0})
    table = results_table(table_of(tmp_path))
    assert cells(table, "table9/dit")["Paper"] == "20.00"
    assert any("this version has no row table9/dit: whether these runs are what it was cannot be seen" in n for n in table.notes)


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["digits_tread_seed0", "digits_tread_s1"], "digits_tread"),
        (["digits_tread_seed-0", "digits_tread_seed-1"], "digits_tread"),
        (["digits_seed0_tread", "digits_seed1_tread"], "digits_tread"),
        (["tread", "tread_seed1", "tread-2"], "tread"),
        (["xl", "xl_2"], "xl"),
        (["lr_1e-3_seed0", "lr_1e-3_seed1"], "lr_1e-3"),
        (["digits_tread_first", "digits_tread_again"], "digits_tread"),
        (["run1", "rerun"], "imagenet256 dit DiT-B/2"),
        (["r1", "r2"], "imagenet256 dit DiT-B/2"),
        (["my_first", "my_second"], "imagenet256 dit DiT-B/2"),
        (["seed0", "seed1"], "imagenet256 dit DiT-B/2"),
        (["0", "1"], "imagenet256 dit DiT-B/2"),
        (["a b", "a b 2"], "a b"),
        (["only_seed0"], "only_seed0"),
    ],
)
def test_runs_that_are_joined_are_named_after_what_they_share(tmp_path, names, label):
    for seed, name in enumerate(names):
        make_run(tmp_path, name, seed=seed, steps=100)
    (experiment,) = table_of(tmp_path)
    assert experiment.label == label


def test_runs_of_the_same_seed_are_said_to_be(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path, name, experiment=about("d", {}), fid={400: 30.0})
    assert any("several runs have the same seed" in note for note in results_table(table_of(tmp_path)).notes)


def test_curves_and_speedups_are_of_the_sample_count_that_was_evaluated_often(runs):
    for name in ("dense_seed-0", "dense_seed-1", "tread_seed-0", "tread_seed-1"):
        with open(runs / name / "metrics.jsonl", "a") as f:
            f.write(json.dumps({"step": 400, "fid50k/cfg1.0": 30.0, "evaluation_sec": 1.0}) + "\n")
    table = table_of(runs)
    assert curve_metric(table) == "fid5k/cfg1.0" and cells(speedup_table(table), "table2/tread")["Reached"] == "step 150"


def test_the_table_of_metrics_says_which_direction_is_better(runs):
    def rename(old, new):
        for file in runs.glob("*/metrics.jsonl"):
            file.write_text(file.read_text().replace(old, new))

    rename('"fid5k/cfg1.0"', '"no_metric"')
    rename('"is5k/cfg1.0"', '"inception_score5k/cfg1.0"')
    # Scores of 40 at 100 steps and 80 at 200; the dense runs' best is 60, at 400.
    assert cells(speedup_table(table_of(runs)), "table2/tread")["Reached"] == "step 150"
    rename("inception_score5k", "unknown5k")
    table = speedup_table(table_of(runs))
    assert table.rows == [] and any("does not say which direction of unknown5k/cfg1.0 is better" in note for note in table.notes)


def test_keys_with_a_role_make_another_experiment_and_younger_ones_have_their_default(tmp_path):
    old = {"name": "dit", "backbone": "DiT-B/2", "routes": []}
    make_run(tmp_path, "old_seed-0", fid={400: 30.0}, model=old)
    watched = {"num_steps": 400, "batch_size": 256, "compile": "blocks", "grad_accum_steps": 4}
    make_run(tmp_path, "new_seed-1", seed=1, fid={400: 40.0}, model=old | {"selection": "uniform"}, init_from=None, train=watched)
    (experiment,) = table_of(tmp_path)
    assert [run.name for run in experiment.runs] == ["new_seed-1", "old_seed-0"]
    make_run(tmp_path, "other_seed-2", seed=2, fid={400: 50.0}, model=old | {"selection": "importance"})
    assert [len(experiment.runs) for experiment in table_of(tmp_path)] in ([2, 1], [1, 2])


def test_a_paper_figure_of_another_sample_count_is_shown_and_not_compared(tmp_path):
    make_run(tmp_path, "a", experiment=about("a", {"fid50k": 21.34}), fid={400: 30.0})
    row = cells(results_table(table_of(tmp_path)), "a")
    assert (row["Measured"], row["Paper"]) == ("30.00", "21.34 [fid50k]")
    assert row["Difference"] == "not comparable: other sample count"


def test_runs_of_other_settings_are_not_averaged(tmp_path):
    make_run(tmp_path, "a", fid={400: 30.0})
    make_run(tmp_path, "b", seed=1, fid={400: 50.0}, train={"num_steps": 400, "batch_size": 128})
    labels = {row[0]: row[2] for row in results_table(table_of(tmp_path)).rows}
    assert labels == {"a": "30.00", "b": "50.00"}


def test_the_mean_is_over_seeds_that_got_to_the_same_step(runs):
    lines = (runs / "dense_seed-1" / "metrics.jsonl").read_text().splitlines()
    (runs / "dense_seed-1" / "metrics.jsonl").write_text("\n".join(lines[:5]) + "\n")
    table = results_table(table_of(runs))
    assert cells(table, "table2/dit")["Measured"] == "39.00"
    assert any("dense_seed-1 is unfinished, at step 300 of 400" in note for note in table.notes)
    assert any("is of 1 of 2 runs" in note for note in table.notes)


def test_a_resumed_run_counts_the_devices_of_each_start(tmp_path):
    folder = make_run(tmp_path, "a")
    first = json.loads((folder / "starts.jsonl").read_text())
    second = first | {"step": 300, "num_processes": 4, "command": "accelerate launch train.py resumed", "modified": True}
    (folder / "starts.jsonl").write_text(json.dumps(first) + "\n" + json.dumps(second) + "\n")
    run = read_runs([tmp_path])[0][0]
    assert run.device_hours == pytest.approx((300 * 8 + 100 * 4) / 10 / 3600)
    assert run.hours_at(250) == pytest.approx(25 / 3600)
    assert cells(results_table(table_of(tmp_path)), "a")["Commit"] == "01234567, 01234567 + changes"


def test_hours_of_a_run_without_starts_are_marked(tmp_path):
    (make_run(tmp_path, "a") / "starts.jsonl").unlink()
    table = results_table(table_of(tmp_path))
    assert cells(table, "a")["Device hours"] == "0.0111*" and cells(table, "a")["Commit"] == "not recorded"
    assert any(note.startswith("* Hours of training") for note in table.notes)


def test_results_of_fid_count_for_the_run_whose_checkpoint_they_name(tmp_path):
    folder = make_run(tmp_path, "a", fid={200: 50.0})
    point = {"checkpoint": "elsewhere/a/checkpoints/step_0000400", "weights": "ema", "num_steps": 40, "S_churn": 0.0}
    point |= {"num_samples": 5000, "cfg_scale": 1.0}
    lines = [{"point": point, "metrics": {"fid": 30.0}}, {"point": point | {"num_steps": 20}, "metrics": {"fid": 33.0}}]
    for w, value in ((1.2, 29.0), (1.5, 28.0)):  # another guidance, under a name of its own
        lines.append({"point": point | {"guidance": "sparse", "guidance.w": w}, "metrics": {"fid": value}})
    lines += [{"point": point | {"checkpoint": "runs/gone/checkpoints/step_0000400"}, "metrics": {"fid": 1.0}}]
    (tmp_path / "evaluations").mkdir()
    file = tmp_path / "evaluations" / "results.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs, problems = read_runs([tmp_path])
    figures = {name: runs[0].series[name][400] for name in runs[0].metrics if 400 in runs[0].series[name]}
    assert figures == {"fid5k/cfg1.0": 30.0, "fid5k/sparse,1.2,1.0": 29.0, "fid5k/sparse,1.5,1.0": 28.0}
    assert len(runs[0].points) == 4
    assert problems == {str(file): ["1 results of runs/gone/checkpoints/step_0000400, which is no run here"]}
    page = (main([str(folder.parent)]), (tmp_path / "report.html").read_text())[1]
    assert "Sweep of num_steps" in page and "Sweep of guidance.w" in page


def test_evaluations_of_training_and_of_fid_with_its_solver_are_one_curve(tmp_path):
    folder = make_run(tmp_path, "a", diffusion={"name": "sit", "sampler": {"num_steps": 40, "solver": "heun"}})
    own = {"step": 400, "fid5k/cfg1.0": 30.0, "fid5k/cfg1.5": 20.0, "evaluation_sec": 9.0}
    with open(folder / "metrics.jsonl", "a") as f:
        f.write(json.dumps(own) + "\n")
    point = {"checkpoint": f"{folder}/checkpoints/step_0000400", "weights": "ema", "num_steps": 40, "solver": "heun"}
    point |= {"num_samples": 5000}
    lines = [{"point": point | {"cfg_scale": scale}, "metrics": {"fid": value}} for scale, value in ((3.0, 10.0), (4.0, 15.0))]
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = swept_curves(read_runs([tmp_path])[0], "fid5k")
    assert curves == [("cfg_scale", [(1.0, 30.0), (1.5, 20.0), (3.0, 10.0), (4.0, 15.0)], "")]


def test_what_is_torn_unfinished_or_of_another_version_is_listed_and_the_rest_is_shown(runs):
    with open(runs / "dense_seed-0" / "metrics.jsonl", "a") as f:
        f.write('{"step": 500, "lo')
    make_run(runs, "no_config", fid={400: 1.0})
    (runs / "no_config" / "config.yaml").unlink()
    (make_run(runs, "bad_config") / "config.yaml").write_text("train: [")
    (make_run(runs, "foreign") / "config.yaml").write_text("epochs: 3\n")
    (make_run(runs, "empty") / "metrics.jsonl").write_text("")
    (make_run(runs, "other_lines") / "metrics.jsonl").write_text('{"iteration": 3}\n[1]\n')
    old = make_run(runs, "old", train={"num_steps": "many"})
    (make_run(runs, "nan") / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1.0}\n')
    (runs / "notes.txt").write_text("not a run")
    found, problems = read_runs([runs])
    assert {run.name for run in found} == {"dense_seed-0", "dense_seed-1", "tread_seed-0", "tread_seed-1", "old", "nan"}
    said = {path.rpartition("/")[2]: "; ".join(reasons) for path, reasons in problems.items()}
    assert said["dense_seed-0"] == "metrics.jsonl: left out line 9 (cut off or damaged)"
    assert said["no_config"].startswith("no config.yaml") and "cannot be read" in said["bad_config"]
    assert "not a configuration of train.py" in said["foreign"] and said["empty"].endswith("holds no figures yet")
    assert (
        "another version" in said["other_lines"] and "no train.num_steps" in said["old"] and "not a finite number" in said["nan"]
    )
    main([str(runs)])
    page = (runs / "report.html").read_text()
    assert all(words in page for words in ("no config.yaml", "cut off or damaged", "holds no figures yet")) and old.name in page


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("config.yaml", {"model": {"routes": 3}}, None),
        ("config.yaml", {"diffusion": {"sampler": {"num_steps": []}}}, None),
        ("config.yaml", {"train": {"num_steps": 400, "batch_size": 10**400}}, "has no train.batch_size"),
        ("config.yaml", {"experiment": {"name": ["a"], "paper": {"fid5k": 10**400}}}, "experiment.name is not a text"),
        ("config.yaml", {"experiment": {"name": "a", "paper": "good"}}, "experiment.paper is not a mapping"),
        ("metrics.jsonl", {"step": 10**400, "loss": 1.0}, "left out line 9"),
        ("starts.jsonl", {"step": 100, "num_processes": "two"}, "num_processes=two is not a number of processes"),
        ("starts.jsonl", {"step": 100, "num_processes": None}, "num_processes=None"),
        ("evaluations/results.jsonl", {"point": {"checkpoint": 3}, "metrics": {}}, "which is no run here"),
        ("evaluations/results.jsonl", {"point": {"cfg_scale": "x", "num_samples": 5}, "metrics": {}}, "which is no run here"),
        ("evaluations/results.jsonl", {"point": {"cfg_scale": float("inf"), "num_samples": 5}, "metrics": {}}, "no run here"),
    ],
)
def test_values_of_the_wrong_kind_end_no_report(runs, file, line, said):
    folder = runs / "tread_seed-0"
    if file == "config.yaml":
        stored = OmegaConf.to_container(OmegaConf.load(folder / file))
        OmegaConf.save(OmegaConf.create(stored | line), folder / file)
    else:
        (folder / file).parent.mkdir(exist_ok=True)
        if "point" in line and "checkpoint" not in line["point"]:
            line["point"]["checkpoint"] = str(folder / "checkpoints" / "step_0000400")
        with open(folder / file, "a") as f:
            f.write(json.dumps(line) + "\n")
    main([str(runs)])
    page = (runs / "report.html").read_text()
    assert "tread_<wbr>seed-0" in page and (said is None or said.replace("_", "_<wbr>") in page)


def test_labels_with_numbers_are_sorted_by_them():
    labels = ["placement/10_2", "placement/2_10", "placement/baseline", "placement/2_8"]
    assert sorted(labels, key=by_number) == ["placement/2_8", "placement/2_10", "placement/10_2", "placement/baseline"]


def test_metrics_are_ordered_with_unguided_fid_of_many_samples_first():
    names = ["is5k/cfg1.0", "fid5k/cfg1.5", "fid5k/cfg1.0", "fid50k/cfg1.0", "fd_digits250/cfg1.0"]
    assert sorted(names, key=metric_order) == [names[3], names[2], names[1], names[4], names[0]]


# ----------------------------------------------------------------------------------------------------------------------
# Files.


def test_a_report_replaces_its_own_and_nothing_else(runs, tmp_path, capsys):
    page = tmp_path / "out" / "a.html"
    main([str(runs), f"output={page}", "title=One & <two>"])
    first = page.read_text()
    assert "<h1>One &amp; &lt;two&gt;</h1>" in first and "4 runs in" in capsys.readouterr().out
    assert "\n# One &amp; &lt;two&gt;\n" in page.with_suffix(".md").read_text()
    main([str(runs), f"output={page}"])
    assert page.read_text() != first and sorted(p.name for p in page.parent.iterdir()) == ["a.html", "a.md"]
    (page.parent / "a.md").write_text("my notes")
    before = page.read_text()
    with pytest.raises(ValueError, match=r"a\.md was not written by this program"):
        main([str(runs), f"output={page}"])
    assert page.read_text() == before and (page.parent / "a.md").read_text() == "my notes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the folder of runs"),
        (["nowhere"], "nowhere is not a folder"),
        (["{runs}", "outptu=a.html"], "report: outptu is not a key"),
        (["{runs}", "output=a.pdf"], "use output=a.html"),
        (["{empty}"], "no run can be read below .*empty"),
        (
            ["{runs}/tread_seed-0/metrics.jsonl"],
            "is not a folder; it is a file; give its folder: python -m extras.report .*/tread_seed-0$",
        ),
        (["{runs}/tread_seed-0/checkpoints"], "no run .*; give the run's folder: python -m extras.report .*/tread_seed-0$"),
        (["{runs}/tread_seed-0/checkpoints/step_1"], "no run .*; give the run's folder: python -m extras.report .*/tread_seed-0$"),
        (["{runs}", "output={empty}"], "output=.*empty is a folder; use output=.*empty/report.html"),
        (["{runs}", "--titel", "x"], "--titel is not an option; beside folders there are output=<file.html> and title=<text>"),
        (["runs={runs}"], "runs=.*: give the folder alone: python -m extras.report .*runs$"),
    ],
)
def test_arguments_that_cannot_work_are_refused(runs, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (runs / "tread_seed-0" / "checkpoints" / "step_1").mkdir(parents=True)
    with pytest.raises(ValueError, match=message):
        main([argument.format(runs=runs, empty=tmp_path / "empty") for argument in arguments])


def test_the_markdown_holds_tables_commands_and_commits(runs):
    main([str(runs)])
    text = (runs / "report.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows[:4]}) == 1
    assert "| table2/tread | 2 | 12.00 ± 1.41 | 10.00 | +2.00 (+20%) |" in text
    assert "`accelerate launch train.py name=tread_seed-1`" in text and "commit 0123456789ab," in text


# ----------------------------------------------------------------------------------------------------------------------
# The page.

VOID = {"meta", "img", "wbr", "br", "link", "input", "hr", "col"}


class Page(HTMLParser):
    """Checks that tags are balanced; collects attributes and ids."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.tags = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


def test_the_page_is_balanced_accessible_and_needs_nothing_beside_it(runs):
    main([str(runs)])
    text = (runs / "report.html").read_text()
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags} and "link" not in {tag for tag, _ in page.tags}
    for name, value in page.attributes:
        assert name not in ("src", "href", "srcset", "xlink:href") or value.startswith(("data:image/", "#")), (name, value)
    assert not re.search(r"https?://|@import|url\(", text)
    identifiers = [value for name, value in page.attributes if name == "id"]
    assert len(set(identifiers)) == len(identifiers)
    named = [identifier for name, value in page.attributes if name == "aria-labelledby" for identifier in value.split()]
    assert named and set(named) <= set(identifiers)
    assert {value[1:] for name, value in page.attributes if name == "href"} <= set(identifiers)
    assert all(attributes.get("alt") for tag, attributes in page.tags if tag == "img")
    assert all(attributes.get("scope") in ("col", "row") for tag, attributes in page.tags if tag == "th")
    assert sum(tag == "img" for tag, _ in page.tags) == 2 and sum(a.get("class") == "chart" for _, a in page.tags) == 4


def test_names_and_settings_of_others_stay_text(tmp_path):
    name = """<b>'"&"""
    make_run(tmp_path, name, experiment=about(f"{name}<i>", {"fid5k": 1.0}, table="<u>"), fid={200: 3.0, 400: 2.0})
    (make_run(tmp_path, "<s>") / "config.yaml").unlink()
    main([str(tmp_path), "title=<h6>"])
    for file in ("report.html", "report.md"):
        text = (tmp_path / file).read_text()
        assert not re.search("<(b|i|u|s|h6)>", re.sub("`[^`]*`", "", text))  # between backticks, Markdown is text as well
        assert "&lt;b&gt;" in text and "&lt;i&gt;" in text and "&lt;u&gt;" in text and "&lt;h6&gt;" in text
    Page((tmp_path / "report.html").read_text())


def test_large_grids_are_embedded_smaller(runs, tmp_path):
    noise = Image.frombytes("RGB", (1500, 400), os.urandom(1500 * 400 * 3))
    noise.save(runs / "dense_seed-0" / "samples" / "step_0000400.png")
    (runs / "tread_seed-0" / "samples" / "step_0000400.png").write_bytes(b"torn")
    main([str(runs)])
    page = (runs / "report.html").read_text()
    assert page.count("data:image/") == 1 and ".png is not a readable image" in page
    data = base64.b64decode(re.search(r"data:image/jpeg;base64,([^\"]+)", page).group(1))
    (tmp_path / "a.jpg").write_bytes(data)
    assert Image.open(tmp_path / "a.jpg").size == (900, 240)


def test_a_chart_has_the_points_where_they_belong():
    chart = line_chart([Series("a", ((0, 1.0), (100, 2.0)))], "c", "title", "steps", "fid", markers=True)
    assert chart.path(chart.series[0].points) == "52.0,228.0 420.0,12.0"  # the corners of the plot: ticks are 0 .. 100 and 1 .. 2
    assert "a: from 1 at 0 to 2 at 100 steps." in chart.description
    assert line_chart([Series("a", ())], "c", "t", "x", "y", markers=True) is None


def test_the_page_draws_a_line_through_its_points(tmp_path):
    make_run(tmp_path, "a", fid={100: 40.0, 200: 30.0, 300: 20.0, 400: 20.0}, log_every=50)
    main([str(tmp_path)])
    charts = re.findall(r"<svg class=\"chart\".*?</svg>", (tmp_path / "report.html").read_text(), re.DOTALL)
    lines = [re.search(r'<polyline class="line c0 dashed" points="([^"]+)"', chart).group(1).split() for chart in charts]
    assert [len(line) for line in lines] == [4, 4, 8, 8]
    # 368 units are 400 steps and 216 are 40 .. 20, from the corner at 52, 228.
    assert lines[0] == ["144.0,12.0", "236.0,120.0", "328.0,228.0", "420.0,228.0"]
    assert charts[0].count("<circle") == 4 and "<circle" not in charts[2]


def test_charts_are_files_of_their_own_too(tmp_path):
    runs, figures = tmp_path / "runs", tmp_path / "figures"
    make_run(runs, "a<b", fid={100: 40.0, 400: 20.0})
    main([str(runs), f"charts={figures}"])
    names = sorted(file.name for file in figures.iterdir())
    assert len(names) == 4 and "fid5k-cfg1.0-against-steps.svg" in names[1]
    for file in figures.iterdir():
        root = ElementTree.parse(file).getroot()
        assert root.tag.endswith("svg") and "a<b" in "".join(root.itertext())
        assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 1
    main([str(runs), f"charts={figures}"])  # replaces its own, and nobody else's
    (figures / names[0]).write_text("<svg/>")
    with pytest.raises(UserError, match="was not written by this program and stays as it is"):
        main([str(runs), f"charts={figures}"])
    with pytest.raises(UserError, match="charts=.* is a file; give a folder"):
        main([str(runs), f"charts={runs / 'report.html'}"])


def test_class_agreement_is_drawn_beside_its_distance(tmp_path):
    run = make_run(tmp_path, "a", fid={100: 40.0, 400: 20.0})
    file = run / "metrics.jsonl"
    file.write_text(
        re.sub(r'"fid5k/cfg1.0": ([0-9.]+)', r'"fd_x5k/cfg1.0": \1, "class_agreement_x5k/cfg1.0": 0.5', file.read_text())
    )
    main([str(tmp_path)])
    titles = re.findall(r"<figcaption>([^ ]+) against", re.sub("<wbr>", "", (tmp_path / "report.html").read_text()))
    assert titles[:4] == ["fd_x5k/cfg1.0"] * 2 + ["class_agreement_x5k/cfg1.0"] * 2


@pytest.mark.parametrize(("low", "high", "ticks"), [(0, 100, [0, 20, 40, 60, 80, 100]), (3, 3, [3, 4]), (0.31, 0.58, None)])
def test_ticks_are_round_and_enclose_the_values(low, high, ticks):
    found = linear_ticks(low, high)
    assert ticks is None or found == ticks
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 8


def test_logarithmic_ticks_enclose_the_values():
    assert log_ticks(4, 70) == [2, 5, 10, 20, 50, 100]
    assert log_ticks(0.001, 5000)[0] <= 0.001 and log_ticks(0.001, 5000)[-1] >= 5000


def test_long_lines_are_averaged():
    one = thin(Series("a", tuple((float(i), float(i)) for i in range(1000))))
    assert len(one.points) <= MAX_POINTS and one.points[0] == (3.0, 3.0)  # the mean of 0 .. 6


LONG = "inception_score50k/interval,0.28,2.9,1.5,of_a_detector_with_a_long_name"


def test_the_label_of_the_vertical_axis_is_above_all_ticks_and_within_the_chart(tmp_path):
    for values in ((0.00012, 0.0009), (-12345.6, 9e9), (1e-7, 1.0)):
        chart = line_chart([Series("a", ((0, values[0]), (9, values[1])))], "c", "t", "steps", LONG, markers=True)
        text = load_templates().from_string('{% from "chart.svg.j2" import draw %}{{ draw(chart) }}').render(chart=chart)
        x, y, label = re.search(r'<text class="axis" x="([^"]+)" y="([^"]+)">([^<]+)<', text).groups()
        left, top, width, _ = map(float, re.search(r'viewBox="([^"]+)"', text).group(1).split())
        ticks = re.findall(r'x="([^"]+)" y="([^"]+)" text-anchor="end">([^<]+)<', text)
        assert float(y) < min(float(tick_y) for _, tick_y, _ in ticks) - 10 and float(y) - 12.5 >= top
        assert float(x) + 7.5 * len(label) <= left + width and label.startswith("inception_score50k/") and "…" in label
        assert all(float(tick_x) - 7 * len(tick) >= left for tick_x, _, tick in ticks)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --hide-scrollbars"


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_the_screen_in_chromium(runs, tmp_path, width):
    main([str(runs)])
    # A frame is as narrow as a phone, which Chromium's own window cannot be. The page's script-free layout is measured from it.
    frame = f'<iframe id="f" src="{(runs / "report.html").as_uri()}" style="border:0;width:{width}px;height:2000px"></iframe>'
    report = (
        "document.title=[f.contentDocument.documentElement.scrollWidth,f.contentDocument.querySelectorAll('svg.chart').length]"
    )
    (tmp_path / "frame.html").write_text(f'<body style="margin:0">{frame}<script>f.onload=()=>{{{report}}}</script>')
    flags = [*FLAGS.split(), "--disable-component-update", "--disable-sync", "--allow-file-access-from-files"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,2000", "--virtual-time-budget=2000"]
    picture = tmp_path / "page.png"
    address = (tmp_path / "frame.html").as_uri()
    dom = subprocess.run([CHROMIUM, *flags, "--dump-dom", address], capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"<title>{width},4</title>" in dom, dom[-500:]
    subprocess.run([CHROMIUM, *flags, f"--screenshot={picture}", address], capture_output=True, timeout=60, check=True)
    with Image.open(picture) as image:
        colours = image.convert("RGB").crop((0, 0, width, 2000)).getcolors(1 << 24)
    assert len(colours) > 20  # text, lines and images, and not a blank page
