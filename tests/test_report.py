"""The report: reading, grouping and comparing runs, against figures computed by hand, and its text."""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from checkpoints.checkpoint import read_config
from cli.compose import compose_overrides
from cli.hydra_setup import row_names
from common.errors import UserError
from evaluations.result_settings import sampler_for_results
from extras.report.__main__ import main
from extras.report.experiments import curve_measure, group
from extras.report.rows import change_words, changes_of, served_rows
from extras.report.runs import LOSS, Run, read_run, read_runs
from extras.report.tables import figure_text, guidance_table, results_table, speedup_table
from latents.autoencoders import SD_VAE

DIT, TREAD = "table2_dit_b2", "table2_dit_b2_tread"  # 400,000 steps of 256 images; the paper's FID: 43.47 and 21.34
ROUTE = "model.routes=[{selection_ratio:0.25,start_layer_idx:1,end_layer_idx:-2}]"


@functools.cache
def resolved(*overrides):
    return OmegaConf.to_container(compose_overrides(overrides), resolve=True)


def make_run(root, *overrides, name=None, fid=(), num_samples=50_000, speed=10.0, steps=400_000, metric="fid", **config):
    """Write a run with lines every 50,000 steps and return its folder. fid: {step: FID}. speed: steps per second."""
    stored = resolved(*overrides, f"output_dir={root}") | config
    folder = root / (name or stored["name"] + "".join(overrides[1:]).replace("/", "-"))
    folder.mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(stored), folder / "config.yaml")
    lines = [{"step": step, "loss": 1.0, "steps_per_sec": speed} for step in range(50_000, steps + 1, 50_000)]
    write(folder / "metrics.jsonl", *lines)
    for step, value in dict(fid).items():
        evaluate(folder, step, {metric: value}, num_samples=num_samples)
    start = {"step": 0, "time": "2026-01-02", "command": "python train.py", "commit": "0123abcd", "modified": True}
    write(folder / "starts.jsonl", start | {"device": "Example GPU", "num_processes": 8, "torch": "2.15"})
    return folder


def evaluate(folder, step, metrics, file=None, run=None, checkpoint=None, **settings):
    """Append the record of an evaluation of a run, without guidance unless `settings` say otherwise, and sampled as its row."""
    cfg = read_config(folder)
    how = {"weights": "ema", **sampler_for_results(cfg.sampler), "network_precision": cfg.sampling.precision}
    how |= {"num_samples": 50_000, "detector": "inception", "reference": "adm.npz", "reference_hash": "a" * 32}
    how |= {} if {"guidance", "cfg_scale"} & settings.keys() else {"cfg_scale": 1.0}
    record = {"run": run or folder.name, "step": step, "settings": how | settings, "metrics": metrics}
    write(file or folder / "evaluations" / "results.jsonl", record | ({"checkpoint": checkpoint} if checkpoint else {}))


def write(file, *lines):
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def runs(tmp_path):
    """Fixture: dense and routed, two seeds each. Dense ends best (40). Routed passes it between 100,000 (60) and 200,000 (20)."""
    root = tmp_path / "runs"
    for seed, shift in ((0, -1), (1, 1)):
        dense = {100_000: 80 + shift, 200_000: 60 + shift, 300_000: 50 + shift, 400_000: 40 + shift}
        routed = {100_000: 60 + shift, 200_000: 20 + shift, 300_000: 16 + shift, 400_000: 12 + shift}
        make_run(root, f"experiment={DIT}", f"seed={seed}", fid=dense)
        make_run(root, f"experiment={TREAD}", f"seed={seed}", fid=routed, speed=20.0)
    return root


def grouped(root):
    """Return the experiments of the only table."""
    (table,) = group(read_runs([root])[0])[0].values()
    return table


def rows(make_table, root):
    """Return {name of the row: its cells}."""
    table = make_table(grouped(root))
    return {next(iter(row.values())): row for row in table.rows}


def notes(make_table, root):
    return " ".join(make_table(grouped(root)).notes)


def test_seeds_form_one_experiment_with_mean_spread_and_the_papers_figure(runs):
    row = rows(results_table, runs)[DIT]
    # The mean and the standard deviation, sqrt(2), of 39 and 41. 400,000 steps of 256 images, at 10 steps per second.
    assert (row["Seeds"], row["fid"]) == ("0, 1", "40.00 ± 1.41 (paper 43.47, -8%)")
    assert (row["Step"], row["Images seen"], row["Hours"]) == ("400,000", "102,400,000", "11.1")
    assert rows(results_table, runs)[TREAD]["fid"] == "12.00 ± 1.41 (paper 21.34, -44%; dense 40.00, -70%)"


def test_a_speedup_is_measured_at_the_best_figure_that_both_reach(runs):
    row = rows(speedup_table, runs)[TREAD]
    # 40 is halfway between 60 at step 100,000 and 20 at step 200,000: 400 / 150. Hours: 40,000 s / 7,500 s.
    assert row["Best that both reach"] == "40.00 (fid of 50,000 samples)" and row["Reached"] == "step 150,000"
    assert (row["Dense"], row["Speedup in steps"], row["Speedup in hours"]) == (f"{DIT}, step 400,000", "2.67×", "5.33×")
    # One seed goes from 59 to 19, the other from 61 to 21. They cross 40 at 147,500 and 152,500.
    assert row["Routed seeds"] == "2 of 2 reach it, at step 147,500 to 152,500"


def test_training_losses_are_not_compared_with_dense_runs(runs):
    experiments = [experiment for experiment in grouped(runs) if experiment.baseline]
    for experiment in experiments:
        assert experiment.baseline.curve(LOSS)
        step, values = [*experiment.curve(LOSS).items()][-1]
        assert "dense" not in figure_text(experiment, LOSS, step, values)
    assert experiments


def test_each_experiment_is_shown_unguided_and_at_its_best_guidance(runs):
    assert not rows(guidance_table, runs)  # all figures are unguided
    guided = {DIT: {1.25: 20.0, 1.5: 10.0, 2.0: 30.0}, TREAD: {1.25: 9.0, 1.5: 15.0, 2.0: 30.0}}
    for name, values in guided.items():
        for seed, shift in ((0, -1), (1, 1)):
            (folder,) = runs.glob(f"{name}_seed{seed}*")
            for scale, fid in values.items():
                evaluate(folder, 400_000, {"fid": fid + shift, "recall": 0.5}, cfg_scale=scale)
    table = guidance_table(grouped(runs))
    shown = [(row["Experiment"], row["Guidance"], row["fid"], row.get("recall")) for row in table.rows]
    assert shown == [
        (DIT, "none", "40.00 ± 1.41", None),
        (DIT, "cfg_scale 1.5", "10.00 ± 1.41", "0.500 ± 0.000"),
        (TREAD, "none", "12.00 ± 1.41", None),
        (TREAD, "cfg_scale 1.25", "9.00 ± 1.41", "0.500 ± 0.000"),
    ]
    assert f"{TREAD}: best of none, cfg_scale 1.25, cfg_scale 1.5, cfg_scale 2.0 by fid" in table.notes
    assert {row["Seeds"] for row in table.rows} == {"0, 1"}


def test_guidances_are_compared_on_the_seeds_that_have_all_of_them(runs):
    (first,), (second,) = (runs.glob(f"{DIT}_seed{seed}*") for seed in (0, 1))
    evaluate(first, 400_000, {"fid": 39.5}, cfg_scale=1.5)
    table = guidance_table(grouped(runs))  # 39.5 is below the mean of both seeds without guidance, but above the 39 of seed 0
    assert [(row["Seeds"], row["Guidance"], row["fid"]) for row in table.rows] == [("0", "none", "39.00")]
    for seed, folder in enumerate((first, second)):  # each seed has its own weak network
        weak = {"guidance": "sparse", "guidance.w": 2.0, "guidance.checkpoint": f"runs/x_seed{seed}/checkpoints/step_0050000"}
        evaluate(folder, 400_000, {"fid": 20.0 + seed}, **weak, **{"guidance.checkpoint_hash": f"of seed {seed}"})
    found = {row["Guidance"]: (row["Seeds"], row["fid"]) for row in results_table(grouped(runs)).rows if row["Experiment"] == DIT}
    assert found["guidance sparse, guidance.w 2.0, guidance.checkpoint runs/x/checkpoints/step_0050000"][0] == "0, 1"
    evaluate(second, 400_000, {"fid": 39.5}, cfg_scale=2.0)
    table = guidance_table(grouped(runs))
    assert not table.rows and table.notes[0].startswith(f"{DIT}: no seed has all of none, cfg_scale 1.5, ")


def test_runs_are_compared_with_dense_runs_on_the_same_latents(tmp_path, monkeypatch):
    fids = {("birds", DIT): 40.0, ("birds", TREAD): 30.0, ("cars", DIT): 120.0, ("cars", TREAD): 60.0}
    for (latents, row), fid in fids.items():
        make_run(tmp_path / latents, f"experiment={row}", fid={400_000: fid})
    monkeypatch.setattr(Run, "data_hash", property(lambda run: run.path.parent.name * 3))
    shown = {row["Experiment"]: row["fid"].split("; ")[-1].rstrip(")") for row in results_table(grouped(tmp_path)).rows}
    assert shown[f"{TREAD} on latents birdsbir"] == "dense 40.00, -25%"
    assert shown[f"{TREAD} on latents carscars"] == "dense 120.00, -50%"
    monkeypatch.setattr(Run, "data_hash", property(lambda run: run.path.parent.name if "tread" in run.path.name else None))
    assert [experiment.baseline is not None for experiment in grouped(tmp_path) if experiment.is_routed] == [True, True]


def test_a_run_that_a_resume_continued_with_another_setting_has_its_own_row(runs):
    first = next(runs.glob(f"{TREAD}_seed0*"))
    start = json.loads((first / "starts.jsonl").read_text())
    write(first / "starts.jsonl", *[start | {"step": 50_000, "resumed": True, "changed": ["train.lr: 0.0002 -> 0.0001"]}] * 2)
    shown = {row["Experiment"]: row["Seeds"] for row in results_table(grouped(runs)).rows}
    assert shown == {DIT: "0, 1", TREAD: "1", f"{TREAD}, resumed at step 50000: train.lr: 0.0002 -> 0.0001": "0"}


def test_a_change_counts_only_if_the_steps_of_its_start_are_in_the_run(tmp_path):
    folder = make_run(tmp_path, f"experiment={TREAD}", name="a")
    start = json.loads((folder / "starts.jsonl").read_text())
    steps = {50_000: "first", 100_000: "kept", 200_000: "repeated", 150_000: "also kept", 400_000: "without a figure"}
    write(folder / "starts.jsonl", *[start | {"step": step, "resumed": True, "changed": [name]} for step, name in steps.items()])
    write(folder / "starts.jsonl", start | {"step": 400_000, "resumed": True})
    assert read_run(folder).changes_on_resume == ("at step 50000: first", "at step 100000: kept", "at step 150000: also kept")


def test_seeds_with_and_without_tracked_averages_are_one_experiment_and_have_the_papers_figure(tmp_path):
    for seed, more in ((0, []), (1, ["train.ema_lengths=[0.1]"])):
        make_run(tmp_path, f"experiment={DIT}", f"seed={seed}", *more, name=f"run{seed}", fid={400_000: 40.0})
    row = rows(results_table, tmp_path)[DIT]
    assert (row["Seeds"], row["fid"]) == ("0, 1", "40.00 ± 0.00 (paper 43.47, -8%)")


def test_metrics_of_different_seeds_have_rows_of_their_own(runs):
    folder = next(runs.glob(f"{DIT}_seed0*"))
    evaluate(folder, 400_000, {"fd_dinov2": 500.0})
    dense = [row for row in results_table(grouped(runs)).rows if row["Experiment"] == DIT]
    shown = [(row["Seeds"], "fid" in row, row.get("fd_dinov2")) for row in dense]
    assert shown == [("0, 1", True, None), ("0", False, "500.00")]


def test_runs_behind_links_are_read(runs, tmp_path):
    before = {run.path.name for run in read_runs([runs])[0]}
    first = next(runs.iterdir())
    first.rename(tmp_path / first.name)
    first.symlink_to(tmp_path / first.name)
    (runs / "again").symlink_to(runs)  # a link to a folder above
    found, problems = read_runs([runs])
    assert {run.path.name for run in found} == before and not problems


@pytest.mark.parametrize(
    ("dense", "routed", "reached", "speedup"),
    [
        # The best of the routed run, 20, is halfway between 30 and 10 of the dense run.
        ({2: 30.0, 4: 10.0}, {2: 30.0, 3: 20.0, 4: 40.0}, ("step 300,000", "step 300,000"), "1×"),
        ({4: 30.0}, {1: 20.0, 4: 10.0}, ("step 400,000", "at or before step 100,000"), "≥ 4×"),
        ({1: 20.0, 4: 10.0}, {4: 30.0}, ("at or before step 100,000", "step 400,000"), "≤ 0.25×"),
        ({4: 10.0}, {4: 10.0}, ("step 400,000", "step 400,000"), "1×"),
    ],
)
def test_the_speedup_is_a_bound_if_a_run_starts_below_the_figure(tmp_path, dense, routed, reached, speedup):
    for name, curve in ((DIT, dense), (TREAD, routed)):
        make_run(tmp_path, f"experiment={name}", fid={100_000 * step: value for step, value in curve.items()})
    row = rows(speedup_table, tmp_path)[TREAD]
    assert (row["Dense"], row["Reached"]) == (f"{DIT}, {reached[0]}", reached[1]) and row["Speedup in steps"] == speedup


def test_the_table_of_metrics_says_which_direction_is_better(tmp_path):
    for name, scores in ((DIT, {100_000: 20.0, 400_000: 60.0}), (TREAD, {100_000: 40.0, 200_000: 80.0})):
        make_run(tmp_path, f"experiment={name}", fid=scores, metric="inception_score")
    assert rows(speedup_table, tmp_path)[TREAD]["Reached"] == "step 150,000"


def test_the_mean_and_the_hours_use_the_seeds_that_trained_longest_and_the_machines_are_named(runs):
    for name in ("metrics.jsonl", "evaluations/results.jsonl"):
        file = next(runs.glob("*b2_seed1*")) / name
        file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if '"step": 400000' not in line))
    row = rows(results_table, runs)[DIT]
    assert (row["Seeds"], row["fid"]) == ("0", "39.00 (paper 43.47, -10%)")
    # The best of the other dense seed is 39, after 40,000 s. The routed mean reaches 39 at step 152,500, after 7,625 s.
    assert rows(speedup_table, runs)[TREAD]["Speedup in hours"] == "5.25×"
    start = json.loads((next(runs.glob("*tread*")) / "starts.jsonl").read_text())
    write(next(runs.glob("*tread*")) / "starts.jsonl", start | {"step": 50_000, "num_processes": 4, "device": "B"})
    assert f"{TREAD}: hours on 4 × B and 8 × Example GPU against hours on 8 × Example GPU" in notes(speedup_table, runs)


def test_a_papers_figure_is_shown_with_figures_of_as_many_samples_and_the_same_guidance(tmp_path):
    others = [{"num_steps": 4}, {"weights": "raw"}, {"ema_length": 0.1}, {"S_churn": 40.0}, {"network_precision": "fp32"}]
    for i, (step, how) in enumerate([(300_000, {}), *((400_000, how) for how in others)]):
        evaluate(make_run(tmp_path / str(i), f"experiment={TREAD}"), step, {"fid": 30.0}, **how)
        assert rows(results_table, tmp_path / str(i))[TREAD]["fid"] == "30.00"
    make_run(tmp_path / "few", f"experiment={TREAD}", fid={400_000: 30.0}, num_samples=5_000)
    row = rows(results_table, tmp_path / "few")[TREAD]
    assert row["fid"] == "30.00"
    folder = make_run(tmp_path / "guided", "experiment=final_xl2_dit", fid={7_000_000: 9.0})
    evaluate(folder, 7_000_000, {"fid": 2.0}, cfg_scale=1.5)
    cells = {row["Guidance"]: row["fid"] for row in results_table(grouped(tmp_path / "guided")).rows}
    assert cells == {"none": "9.00 (paper 9.62, -6%)", "cfg_scale 1.5": "2.00 (paper 2.27, -12%)"}


def test_a_row_takes_the_checkpoint_of_another_rows_run(tmp_path):
    curve = {300_000: 50.0, 400_000: 40.0}
    for name, shift in ((DIT, 0), (TREAD, -20)):
        make_run(tmp_path, f"experiment={name}", fid={step: fid + shift for step, fid in curve.items()})
    assert list(group(read_runs([tmp_path])[0])[0]) == ["Table 2: backbones"]  # no run belongs to another table
    make_run(tmp_path, "experiment=placement_0_10", fid={300_000: 55.0}, steps=300_000)
    tables, problems = group(read_runs([tmp_path])[0])
    assert not problems and list(tables) == ["Route placement", "Table 2: backbones"]
    placed = {row["Experiment"]: row for row in results_table(tables["Route placement"]).rows}
    assert placed["placement_baseline"]["fid"] == "50.00 (paper 49.89, +0%)"
    assert placed["placement_2_8"]["fid"] == "30.00 (paper 28.02, +7%; dense 50.00, -40%)"
    assert placed["placement_0_10"]["fid"] == "55.00 (paper 57.36, -4%; dense 50.00, +10%)"
    assert placed["placement_2_8"]["Step"] == "300,000"
    assert {e.label: e.changes for e in tables["Route placement"]} == {name: {} for name in placed}
    assert tables["Route placement"][0].row["differs"].endswith("these are figures of a run of table2_dit_b2")
    # A run of the row itself takes precedence, and runs with other settings, or without a figure at the step, do not serve.
    make_run(tmp_path, "experiment=placement_baseline", fid={300_000: 52.0}, steps=300_000)
    make_run(tmp_path, f"experiment={TREAD}", "seed=1", "train.lr=2e-4", fid=curve)
    make_run(tmp_path, f"experiment={DIT}", "seed=2", fid={400_000: 40.0})
    table = group(read_runs([tmp_path])[0])[0]["Route placement"]
    assert {e.label: [run.cfg.seed for run in e.runs] for e in table} == {name: [0] for name in placed}
    assert results_table(table).rows[0]["fid"] == "52.00 (paper 49.89, +4%)"


def test_every_row_that_takes_another_rows_checkpoint_trains_the_same_network_in_the_same_way(tmp_path):
    """The two rows differ only in the number of steps, or write the same route in another way."""
    served = served_rows()
    assert len(served) == 8
    for names in served.items():
        own, other = (resolved(f"experiment={name}") for name in names)
        depth = 28 if "XL" in own["model"]["backbone"] else 12
        for cfg in (own, other):
            for route in cfg["model"]["routes"]:
                route["end_layer_idx"] %= depth
        assert own["train"]["num_steps"] <= other["train"]["num_steps"]
        assert own["train"] | {"num_steps": 0} == other["train"] | {"num_steps": 0}
        keys = ("seed", "init_from", "diffusion", "alignment")
        assert {key: own[key] for key in keys} == {key: other[key] for key in keys}
        assert own["model"]["routes"] == other["model"]["routes"] and own["model"]["backbone"] == other["model"]["backbone"]
        kept = own["train"]["num_steps"] % other["checkpoint"]["keep_every"] == 0
        assert kept or own["train"]["num_steps"] == other["train"]["num_steps"]  # the last checkpoint is always kept


def test_figures_with_sparse_guidance_are_compared_with_the_papers_method(tmp_path):
    folder = make_run(tmp_path, "experiment=sparse_guidance_sit_xl2_tread", steps=2_000_000)
    sparse = {"guidance": "sparse", "guidance.level_lo": None, "guidance.w": 1.5}
    flops = sparse | {"guidance.r_strong": 0.5, "guidance.r_weak": 0.9}
    fid = sparse | {"guidance.r_strong": 0.0, "guidance.r_weak": 0.6, "guidance.r_strong_last": 0.6, "guidance.r_weak_last": 0.0}
    fid |= {"guidance.checkpoint": "/runs/x/checkpoints/step_0050000"}
    other, bounded = flops | {"guidance.r_weak": 0.5}, flops | {"guidance.level_lo": 0.3}  # not the paper's
    for step, shift in ((800_000, 1), (2_000_000, 0)):
        for guidance, value in (({"cfg_scale": 1.5}, 2.57), (flops, 2.14), (fid, 1.58), (other, 3.0), (bounded, 2.14)):
            evaluate(folder, step, {"fid": value + shift}, **guidance)
    (table,) = group(read_runs([tmp_path])[0])[0].values()
    found = [(row["Experiment"].removeprefix("sparse_guidance_"), row["fid"]) for row in results_table(table).rows]
    assert found == [
        ("sit_xl2_tread", "2.57 (paper 2.57, +0%)"),
        ("sit_xl2_tread", "2.14 (paper 2.14, +0%)"),
        ("sit_xl2_tread", "1.58 (paper 1.58, +0%)"),
        ("sit_xl2_tread", "3.00"),
        ("sit_xl2_tread", "2.14"),
        ("sit_xl2_tread_160", "3.57 (paper 2.95, +21%)"),
        ("sit_xl2_tread_160", "3.14"),
        ("sit_xl2_tread_160", "2.58 (paper 2.07, +25%)"),
        ("sit_xl2_tread_160", "4.00"),
        ("sit_xl2_tread_160", "3.14"),
    ]


def test_figures_of_different_autoencoders_are_not_compared(tmp_path):
    make_run(tmp_path, "model=dit", "data=imagenet256", name="d")
    decoders = [
        {},
        {"autoencoder": SD_VAE},
        {"autoencoder": "sd-vae:x"},
        {"autoencoder": "sd-vae:a/b", "autoencoder_hash": "c" * 32},
    ]
    for number, decoder in enumerate(decoders, 1):
        evaluate(tmp_path / "d", 400_000, {"fid": float(number)}, **decoder)
    evaluate(tmp_path / "d", 300_000, {"fid": 5.0}, autoencoder="sd-vae:elsewhere", autoencoder_hash="c" * 32)
    (run,) = read_runs([tmp_path])[0]
    figures = {measure.measured_with: values for measure, values in run.figures.items() if measure.metric == "fid"}
    assert [*figures.values()] == [{400_000: 2.0}, {400_000: 3.0}, {400_000: 4.0, 300_000: 5.0}]
    texts = [*figures]
    assert "autoencoder" not in texts[0] and "autoencoder sd-vae:x" in texts[1] and f"autoencoder {'c' * 32}" in texts[2]


def test_the_interval_of_the_last_row_has_its_own_figure(tmp_path):
    folder = make_run(tmp_path, "experiment=final_xl2_tread_finetune_740", steps=300_000)
    interval = {"guidance": "interval", "cfg_scale": 1.5, "guidance.level_lo": 0.28, "guidance.level_hi": 2.9}
    for guidance, value in (({"cfg_scale": 1.5}, 2.2), (interval, 1.8)):
        evaluate(folder, 300_000, {"fid": value}, **guidance)
    (table,) = group(read_runs([tmp_path])[0])[0].values()
    found = [row["fid"] for row in results_table(table).rows]
    assert found == ["2.20 (paper 2.09, +5%)", "1.80", "2.20", "1.80 (paper 1.69, +7%)"]  # the interval's row takes the same run


def test_curves_and_speedups_use_the_sample_count_that_was_evaluated_often(runs):
    for folder in runs.iterdir():
        file = folder / "evaluations" / "results.jsonl"
        file.write_text(file.read_text().replace('"num_samples": 50000', '"num_samples": 5000'))
        evaluate(folder, 400_000, {"fid": 30.0})
    dense, routed = grouped(runs)
    assert curve_measure(dense, routed).num_samples == 5_000
    assert rows(speedup_table, runs)[TREAD]["Reached"] == "step 150,000"


def test_runs_without_a_row_are_compared_with_the_dense_run_of_the_same_settings(tmp_path):
    make_run(tmp_path, "model=dit", "data=imagenet256", name="d", fid={400_000: 30.0})
    make_run(tmp_path, "model=tread", "data=imagenet256", name="r_seed0", fid={400_000: 15.0})
    make_run(tmp_path, "model=tread", "data=imagenet256", "train.batch_size=8", name="s", fid={400_000: 10.0})
    found = rows(results_table, tmp_path)
    assert (found["r"]["fid"], found["s"]["fid"]) == ("15.00 (dense 30.00, -50%)", "10.00")


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (["model.backbone=DiT-XS/2"], "model.backbone=DiT-XS/2 instead of DiT-B/2"),
        (["train.batch_size=8", "sampler.num_steps=18"], "train.batch_size=8 instead of 256"),
        (
            ["train.lr=1e-4", "seed=3", "name=mine", "output_dir=elsewhere", "data.path=x", "evaluation.every=0", "guidance=cfg"],
            "",
        ),
    ],
)
def test_the_settings_that_a_run_changed_in_its_row_are_found(tmp_path, overrides, changed):
    run = read_run(make_run(tmp_path, f"experiment={TREAD}", *overrides, name="a"))
    assert change_words(changes_of(run)) == changed


def test_settings_filled_in_from_the_data_and_the_initial_weights_do_not_change_a_row(tmp_path):
    row = "experiment=final_xl2_tread_finetune_220"
    data = resolved(row)["data"] | {"resolution": 256, "scale_factor": 0.18215}
    for seed in (0, 2):
        make_run(tmp_path, row, f"seed={seed}", data=data, init_from=f"{tmp_path}/final_xl2_tread_160_seed{seed}")
    (experiment,) = grouped(tmp_path)
    assert experiment.changes == {} and len(experiment.runs) == 2
    run = read_run(make_run(tmp_path, row, name="other", init_from="runs/mine"))
    assert [*changes_of(run)] == ["init_from"]


@pytest.mark.parametrize("name", row_names()[::9])
def test_a_run_of_an_unchanged_row_has_no_changes(name, tmp_path):
    assert changes_of(read_run(make_run(tmp_path, f"experiment={name}"))) == {}


def test_a_run_with_a_changed_row_has_its_own_line_and_is_compared_only_with_equal_changes(tmp_path):
    small, label = "model.backbone=DiT-XS/2", f"{TREAD} with model.backbone=DiT-XS/2"
    make_run(tmp_path, f"experiment={DIT}", fid={400_000: 40.0})
    make_run(tmp_path, f"experiment={TREAD}", fid={400_000: 25.0})
    make_run(tmp_path, f"experiment={TREAD}", small, fid={400_000: 80.0})
    found = rows(results_table, tmp_path)
    assert found[TREAD]["fid"] == "25.00 (paper 21.34, +17%; dense 40.00, -38%)" and found[label]["fid"] == "80.00"
    make_run(tmp_path, f"experiment={DIT}", small, fid={400_000: 100.0})
    found = rows(results_table, tmp_path)
    assert found[label]["fid"] == "80.00 (dense 100.00, -20%)" and "dense 40.00" in found[TREAD]["fid"]


def test_runs_with_other_routes_are_compared_with_the_dense_run_of_the_row_and_another_length_is_named(tmp_path):
    make_run(tmp_path, f"experiment={DIT}", fid={400_000: 40.0})
    make_run(tmp_path, f"experiment={TREAD}", ROUTE, fid={400_000: 30.0})
    make_run(tmp_path, f"experiment={TREAD}", "train.num_steps=500000", fid={400_000: 20.0})
    make_run(tmp_path, f"experiment={TREAD}", "model=dit", fid={400_000: 41.0})  # dense, so not compared with a dense run
    found = rows(results_table, tmp_path)
    cells = sorted(row["fid"] for row in found.values())
    assert cells == ["20.00 (dense 40.00, -50%)", "30.00 (dense 40.00, -25%)", "40.00 (paper 43.47, -8%)", "41.00"]
    assert notes(results_table, tmp_path).count("differ in more than routes: train.num_steps=400000 instead of 500000") == 1


def test_without_evaluations_and_from_other_weights_there_is_no_speedup(tmp_path):
    for name in (DIT, TREAD):
        make_run(tmp_path / "new", f"experiment={name}")
    assert rows(speedup_table, tmp_path / "new") == {} and "fid" not in rows(results_table, tmp_path / "new")[DIT]
    tmp_path /= "final"
    make_run(tmp_path, "experiment=final_xl2_dit", fid={400_000: 10.0})
    make_run(tmp_path, "experiment=final_xl2_tread_finetune_220", fid={400_000: 5.0})
    assert rows(speedup_table, tmp_path) == {}
    assert "started from " in notes(results_table, tmp_path)
    assert "whose training is not in the steps and hours" in notes(results_table, tmp_path)
    make_run(tmp_path / "all", "experiment=final_xl2_tread_finetune_220", "init_state=all")  # without evaluations, too
    assert "whose training is not in the hours" in notes(results_table, tmp_path / "all")


def test_evaluations_count_for_the_run_that_they_name(tmp_path, caplog):
    run = make_run(tmp_path, f"experiment={TREAD}", name="a", fid={400_000: 50.0})
    file = tmp_path / "output" / "results.jsonl"  # of output=
    write(file, {"theirs": 1}, {"settings": "theirs"})
    sparse = {"guidance": "sparse", "guidance.w": 1.5}
    for i, (name, settings) in enumerate((("a", {}), ("a", {"num_steps": 20}), ("a", sparse), ("gone", {}))):
        evaluate(run, 400_000, {"fid": 30.0 + i}, file, name, "c", reference="abc", **settings)
    write(file, {"settings": {"images": "x.npz", "num_samples": 9}, "metrics": {"fid": 1.0}})
    runs, problems = read_runs([tmp_path])
    found = {(m.guidance, m.measured_with): values for m, values in runs[0].figures.items() if "reference abc" in m.measured_with}
    how = "weights ema, reference abc aaaaaaaa"
    assert found == {
        ("none", f"network_precision bf16, num_steps 40, {how}"): {400_000: 30.0},
        ("none", f"network_precision bf16, num_steps 20, {how}"): {400_000: 31.0},
        ("guidance sparse, guidance.w 1.5", f"network_precision bf16, num_steps 40, {how}"): {400_000: 32.0},
    }
    assert problems == {str(file): "results of gone, which is no run here"}
    assert any(
        f"{file}: line 1 is left out: " in text and "(1 other lines are left out, too)" in text for text in caplog.messages
    )


def test_the_hash_of_a_checkpoint_tells_whose_evaluation_it_is(tmp_path, monkeypatch):
    folders = [make_run(tmp_path, f"experiment={TREAD}", f"seed={i}", name=f"run{i}") for i in (0, 1)]
    hashes = {"run0": {400_000: "hash 0"}, "run1": {400_000: "hash 1"}}
    monkeypatch.setattr(Run, "checkpoint_hashes", property(lambda run: hashes.get(run.path.name, {})))

    def found(*folders):
        runs, problems = read_runs(folders)
        figures = {run.path.name: [v[400_000] for m, v in run.figures.items() if m.metric == "fid"] for run in runs}
        return figures, [*problems.values()]

    # One command with output= evaluated both runs, and their names do not count.
    output = tmp_path / "output" / "results.jsonl"
    for i in (0, 1):
        evaluate(folders[i], 400_000, {"fid": 30.0 + i}, output, "renamed since then", f"hash {i}")
    assert found(tmp_path) == ({"run0": [30.0], "run1": [31.0]}, [])
    output.unlink()
    # A checkpoint of the same step with another hash shows that the results are not the run's.
    evaluate(folders[0], 400_000, {"fid": 32.0}, checkpoint="another hash")
    evaluate(folders[1], 400_000, {"fid": 33.0}, run="name of before")  # of training
    assert found(tmp_path) == ({"run0": [], "run1": [33.0]}, ["results of run0, for another checkpoint at step 400000"])
    # If the checkpoints are gone, the results in a run's folder are the run's. Those that train.py renamed are not.
    hashes.clear()
    evaluate(folders[1], 400_000, {"fid": 34.0}, folders[1] / "evaluations_earlier_0123abcd" / "results.jsonl")
    assert found(tmp_path) == ({"run0": [32.0], "run1": [33.0]}, [])
    # A record without a hash counts only in the folder of its run.
    evaluate(folders[1], 400_000, {"fid": 35.0}, output)
    assert found(tmp_path) == ({"run0": [32.0], "run1": [33.0]}, ["results of run1, for another checkpoint at step 400000"])


def test_settings_that_are_lists_tell_measures_apart(tmp_path):
    folder = make_run(tmp_path, f"experiment={TREAD}", fid={400_000: 20.0})
    for timesteps, fid in (([1, 2], 30.0), ([1, 3], 31.0)):  # of somebody's own sampler
        evaluate(folder, 400_000, {"fid": fid}, timesteps=timesteps)
    found = {row["Measured with"]: row["fid"] for row in results_table(grouped(tmp_path)).rows}
    assert sorted(found.values()) == ["20.00 (paper 21.34, -6%)", "30.00", "31.00"]
    assert any("timesteps [1, 2]" in measured for measured in found)


def test_a_run_that_resumed_with_another_sampler_stays_in_its_experiment(tmp_path):
    for seed, num_steps in ((0, 40), (1, 20)):
        folder = make_run(tmp_path, f"experiment={TREAD}", f"seed={seed}", f"sampler.num_steps={num_steps}", name=f"run{seed}")
        evaluate(folder, 400_000, {"fid": 20.0 + seed}, num_steps=40)
    (experiment,) = grouped(tmp_path)
    assert experiment.changes == {} and len(experiment.runs) == 2
    assert rows(results_table, tmp_path)[TREAD]["fid"] == "20.50 ± 0.71 (paper 21.34, -4%)"


def test_figures_of_references_with_equal_names_are_compared_only_if_the_hashes_are_equal(tmp_path):
    for name, digest in ((DIT, "a" * 32), (TREAD, "b" * 32)):
        folder = make_run(tmp_path, f"experiment={name}", "train.batch_size=128")
        evaluate(folder, 400_000, {"fid": 30.0}, reference_hash=digest)
        evaluate(folder, 400_000, {"fid": 20.0}, reference_hash=digest, cfg_scale=2.0, checkpoint="c")
        evaluate(folder, 400_000, {"recall": 0.5}, reference_hash=digest, checkpoint="c")
    cells = {(row["Experiment"].split()[0], row["Guidance"]): row for row in results_table(grouped(tmp_path)).rows}
    assert cells[TREAD, "none"]["fid"] == "30.00" and "reference adm.npz bbbbbbbb" in cells[TREAD, "none"]["Measured with"]
    assert cells[TREAD, "none"]["recall"] == "0.500"  # no settings besides the reference differ, so it is the same row
    assert cells[TREAD, "cfg_scale 2.0"]["fid"] == "20.00"


def test_starts_of_an_earlier_run_with_the_same_name_are_not_the_runs(tmp_path):
    folder = make_run(tmp_path, f"experiment={TREAD}", name="a", fid={400_000: 50.0})
    start = json.loads((folder / "starts.jsonl").read_text())
    begins, resumes = start | {"resumed": False}, start | {"resumed": True}
    second = [begins | {"command": "second"}, resumes | {"step": 100_000}]
    write(folder / "starts.jsonl", begins, resumes | {"step": 300_000}, *second)
    assert [(line["step"], line["command"]) for line in read_run(folder).starts] == [
        (0, "second"),
        (100_000, "python train.py"),
    ]


def test_lines_with_other_contents_are_left_out_and_named(runs, caplog):
    expected = rows(results_table, runs)
    assert not caplog.messages
    folder = next(runs.glob("*b2_seed0*"))
    start, (training, *_) = {"step": 0}, (json.loads(line) for line in open(folder / "metrics.jsonl"))
    write(folder / "starts.jsonl", start)
    later = training | {"step": 500_000}
    write(folder / "metrics.jsonl", later | {"loss": float("nan")}, later | {"steps_per_sec": 0}, later | {"step": "500000"})
    write(folder / "metrics.jsonl", {"metrics": 3}, {"their": "line"})
    assert rows(results_table, runs) == expected
    first, second = sorted(line for line in caplog.messages if folder.name in line)[:2]
    assert re.search(r"metrics.jsonl: line \d+ is left out: loss=nan: Input should be a finite.* \(4 other lines", first)
    assert re.search(r"starts.jsonl: line 2 is left out: .*time= is missing", second)


def test_fractions_are_compared_by_their_difference(tmp_path):
    make_run(tmp_path, f"experiment={DIT}", fid={400_000: 0.0098}, metric="precision", num_samples=500)
    make_run(tmp_path, f"experiment={TREAD}", fid={400_000: 0.0501}, metric="precision", num_samples=500)
    assert rows(results_table, tmp_path)[TREAD]["precision"] == "0.050 (dense 0.010, +0.040)"


def test_the_hours_of_a_resumed_run_follow_the_speed_in_each_of_its_lines(tmp_path):
    folder = make_run(tmp_path, f"experiment={TREAD}", steps=100_000)
    write(folder / "metrics.jsonl", {"step": 120_000, "loss": 1.0, "steps_per_sec": 5.0})
    run = read_run(folder)
    assert run.clock == ([0, 50_000, 100_000, 120_000], pytest.approx([0, 5_000 / 3600, 10_000 / 3600, 14_000 / 3600]))
    assert run.hours_at(110_000) == pytest.approx(12_000 / 3600)


def test_unreadable_runs_are_listed_and_the_others_are_shown(runs):
    with open(next(runs.glob("*b2_seed0*")) / "evaluations" / "results.jsonl", "a") as f:
        f.write(
            '{"step": 500000, "metrics": {"fid": NaN}, "settings": {"num_samples": 50000, "cfg_scale": 1.0}}\n'
            '{"step": 500000, "lo'
        )
    for name, text in (("torn", "train: ["), ("foreign", "epochs: 3\n"), ("list", "- 3\n")):
        (runs / name).mkdir()
        (runs / name / "config.yaml").write_text(text)
    (make_run(runs, "model=dit", name="empty") / "metrics.jsonl").write_text("")
    found, problems = read_runs([runs, runs])
    assert len(found) == 4 and rows(results_table, runs)[DIT]["fid"].startswith("40.00 ± 1.41 ")
    said = {Path(path).relative_to(runs).parts[0]: words for path, words in problems.items()}
    assert said.keys() == {"torn", "foreign", "list", "empty"} and said["empty"] == "no figures yet"
    assert all(said[name].startswith("it cannot be read: ") for name in ("torn", "foreign", "list"))
    assert re.search("unknown keys: epochs; missing keys: name, output_dir, .*, wandb$", said["foreign"])


def test_the_report_holds_tables_rows_commands_and_machines(runs, capsys):
    main([str(runs)])
    text = capsys.readouterr().out
    assert "\n  - source: TREAD, Table 2" in text
    assert "| 40.00 ± 1.41 (paper 43.47, -8%) |" in text and "| 2.67× |" in text and "Left out" not in text
    assert "`python train.py` from step 0 on 8 × Example GPU" in text and "commit 0123abcd with local changes" in text


def test_arguments_that_cannot_work_are_refused(tmp_path):
    for message, arguments in (("no runs in no folder", []), ("nowhere is not a folder", ["nowhere"])):
        with pytest.raises(UserError, match=message):
            main(arguments)
    (tmp_path / "config.yaml").write_text("epochs: 3")
    with pytest.raises(UserError, match=f"no runs in {tmp_path}; give folders of runs\n- .*config.yaml: it cannot be read: unkn"):
        main([str(tmp_path)])


def test_among_runs_with_the_same_settings_and_seed_the_longest_counts_and_the_others_are_named(runs, capsys):
    copy = shutil.copytree(min(runs.iterdir()), runs / "a_copy_that_stopped")
    for name, number in (("metrics.jsonl", 4), ("evaluations/results.jsonl", 2)):  # until step 200,000
        (copy / name).write_text("".join((copy / name).read_text().splitlines(keepends=True)[:number]))
    main([str(runs)])
    output = capsys.readouterr().out
    assert re.search(r"^- .*a_copy_that_stopped: it has the settings and the seed of .*/table2_dit_b2_seed0.*$", output, re.M)
    assert "| 0, 1 |" in output and "| 0, 0 |" not in output and "| 0, 0, 1 |" not in output
