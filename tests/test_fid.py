"""Evaluation during training and fid.py give the same figures. fid.py keeps finished points."""

import csv
import itertools
import json
import os
import random
import re
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from conftest import REPOSITORY, checked, file_size_limit, losses, renew_manifest, results, run_fid, run_sample, run_train
from PIL import Image
from safetensors.torch import save

from checkpoints import load, store
from checkpoints.checkpoint import Checkpoint
from common.errors import UserError
from common.files import append_line, lock_file
from configs import schema
from evaluations import record as record_module
from evaluations.classifiers import SmallNet
from evaluations.images import open_images, write_npz
from evaluations.metrics import standard_error
from evaluations.record import EvaluationRecord, PlannedEvaluation, Results, lowest_figure, read_records
from evaluations.suite import metrics_for
from evaluations.tables import ResultsTable, columns_of, differ_significantly, write_tables
from extras.report.runs import read_runs
from latents import autoencoders
from sampling import fid_images, fid_plan, fid_run
from sampling.evaluator import hash_weights, open_reference
from sampling.sampler import ImageSampler
from training import hooks
from training.trainer import Trainer

NAMES = [metric.name for metric in metrics_for("digits")]
EVAL = [
    "evaluation.every=2",
    "evaluation.num_samples=70",
    "sampler.num_steps=2",
    "sampling.batch_size=35",
    "train.num_steps=4",
    "train.lr=1e-2",
]
FID = ["evaluation.num_samples=70", "sampling.batch_size=35", "machine.cpu_threads=1"]
REFERENCE = f"evaluation.reference={REPOSITORY / 'evaluations' / 'digits_reference.npz'}"


def records(run):
    return read_records(run / "evaluations" / "results.jsonl")


def evaluations(run):
    """Return {(step, cfg_scale): metrics} of the evaluations that training made."""
    return {(r.step, r.settings["cfg_scale"]): r.metrics for r in records(run) if r.checkpoint is None}


def record(name, value, groups=(), **settings):
    """Return the record of a set of images with one metric."""
    settings = {"images": name, "images_hash": f"content of {name}", "num_samples": 70, "detector": "x"} | settings
    return EvaluationRecord(settings=settings, metrics={"fid": value}, jackknife={"fid": [*groups]} if groups else {})


def wanted(done):
    return PlannedEvaluation(**done.model_dump(include={*PlannedEvaluation.model_fields}))


@pytest.fixture(scope="module")
def edm(tmp_path_factory):
    return run_train(tmp_path_factory.mktemp("edm"), "run", *EVAL, "checkpoint.every=2")


@pytest.fixture(scope="module")
def sit(tmp_path_factory):
    return run_train(tmp_path_factory.mktemp("sit"), "run", "diffusion=sit", *EVAL)


def draw(monkeypatch, numbers):
    """Replace the random numbers that determine the order of the points. Increasing numbers keep the order of the command."""
    monkeypatch.setattr(random.SystemRandom, "random", lambda self: next(numbers))


@pytest.fixture
def fid(tmp_path, monkeypatch):
    """Fixture: fid(output, *overrides) runs fid.py, which evaluates in order, and returns the lines of results.jsonl."""
    draw(monkeypatch, itertools.count())

    def run(output, *overrides):
        sampler = [] if any(override.startswith("images=") for override in overrides) else ["sampler.num_steps=2"]
        sampler += [] if not sampler or any(override.startswith("guidance=") for override in overrides) else ["guidance=none"]
        run_fid(f"output={tmp_path / output}", *FID, *sampler, *overrides)
        return results(tmp_path / output)

    return run


def test_training_evaluates_every_guidance_of_its_lists_with_the_figures_of_fid(fid, tmp_path):
    sparse = ["guidance=sparse", "guidance.w=[1.0,1.7]", "guidance.r_strong=0.25", "guidance.r_weak=0.75"]
    run = run_train(tmp_path, "run", *EVAL, "train.num_steps=2", *sparse)
    assert [r.settings["guidance.w"] for r in records(run)] == [1.0, 1.7]
    lines = fid("out", f"checkpoint={run}", *sparse)
    for line, own in zip(lines, records(run), strict=True):
        assert line["settings"] == own.settings and line["metrics"] == pytest.approx(own.metrics, rel=1e-4)
    (read,), _ = read_runs([run])
    words = {measure.guidance for measure in read.figures if measure.metric == "fd_digits"}
    assert len(words) == 2 and any("guidance sparse, guidance.w 1.7" in text for text in words)
    run_train(tmp_path, "run", *EVAL, "train.num_steps=2", *sparse)
    assert len(records(run)) == 2  # all evaluations were found
    run_train(tmp_path, "run", *EVAL, "train.num_steps=2", "guidance=cfg", "guidance.cfg_scale=[1.0,1.7]")
    assert [r.settings.get("cfg_scale") for r in records(run)] == [None, None, 1.0, 1.7]


def test_each_guidance_of_a_list_is_sampled_by_its_own_sampler_if_one_lacks_a_setting_of_the_other(train, fid):
    lists = ["guidance=sparse", "guidance.level_hi=[null,1.0]"]
    run = train("run", *EVAL, "train.num_steps=2", *lists)
    lines = fid("out", f"checkpoint={run}", *lists)
    assert [line["cost"] for line in lines] == [own.cost for own in records(run)] and lines[0]["cost"] != lines[1]["cost"]
    assert [line["metrics"] for line in lines] == [pytest.approx(own.metrics, rel=1e-4) for own in records(run)]


def test_each_guidance_of_a_run_has_a_name_of_its_own_in_logs_and_weights_and_biases(edm, train, monkeypatch):
    tracked = []
    monkeypatch.setattr(hooks, "track", lambda accelerator, values: tracked.extend(values))
    early, last = (str(edm / "checkpoints" / store.folder_name(step)) for step in (2, 4))

    def names(run, *guidance):
        tracked.clear()
        train(run, *EVAL, "evaluation.num_samples=4", "train.num_steps=2", *guidance)
        return [name.removeprefix("fd_digits4/") for name in tracked if name.startswith("fd_digits")]

    auto = ["guidance=autoguidance", "guidance.w=2"]
    assert names("cfg", "guidance=unguided_and_cfg") == ["cfg1.0", "cfg1.5"]
    assert names("channels", "guidance=cfg", "guidance.channels=[null,1]") == ["cfg1.5", "cfg1.5_channels1"]
    assert names("one", *auto, f"guidance.checkpoint={early}") == ["autoguidance2.0_weightsema"]
    both = names("both", *auto, f"guidance.checkpoint=[{early},{last}]")  # they differ in nothing else
    assert both == [f"autoguidance2.0_checkpoint{weak}_weightsema" for weak in (early, last)]


def test_a_backup_of_a_checkpoint_does_not_have_the_figures_of_training(edm, tmp_path, caplog):
    run = shutil.copytree(edm, tmp_path / "run")
    shutil.copytree(run / "checkpoints" / "step_0000004", run / "checkpoints" / "backup")
    caplog.set_level("INFO")
    for folder, number in (("step_0000004", 0), ("backup", 2)):
        run_fid(f"checkpoint={run / 'checkpoints' / folder}", "machine.cpu_threads=1")
        assert f"{number} of 2 evaluations to do" in caplog.text
        caplog.clear()


def test_a_reference_that_changes_during_training_does_not_change_what_the_figures_say(train, tmp_path, monkeypatch):
    reference, step = shutil.copy(REPOSITORY / REFERENCE.partition("=")[2], tmp_path / "reference.npz"), Trainer.train_step

    def remove_and_step(trainer, *args):
        Path(reference).unlink(missing_ok=True)
        return step(trainer, *args)

    monkeypatch.setattr(Trainer, "train_step", remove_and_step)
    run = train("run", *EVAL, "guidance=none", f"evaluation.reference={reference}")
    assert len({r.settings["reference_hash"] for r in records(run)}) == 1 and len(records(run)) == 2


def test_fid_measures_what_training_measured_so_that_nothing_is_left_to_do(train, caplog, capsys):
    keys = [*EVAL, "checkpoint.every=2", "evaluation.final_num_samples=80", "evaluation.first_seed=5", "sampling.labels=balanced"]
    run = train("run", *keys)
    assert [r.settings["num_samples"] for r in records(run)] == [70, 70, 80, 80]
    caplog.set_level("INFO")
    for named, number, counted in (("checkpoint", 2, "80"), ("checkpoints", 4, "70 and 80")):
        run_fid(f"{named}={run}", "machine.cpu_threads=1")
        assert f"0 of {number} evaluations to do, of {counted} samples, in {run / 'evaluations'}" in caplog.messages[-1]
        head, *rows = capsys.readouterr().out.splitlines()
        assert len(rows) == number and "num_samples" in head.split() and "fd_digits" in head
    (read,), problems = read_runs([run])
    assert not problems and len(records(run)) == 4
    assert sum(len(curve) for measure, curve in read.figures.items() if measure.metric == "fd_digits") == 4  # each once


def test_a_run_that_repeats_steps_evaluates_them_again_and_keeps_the_results_of_fid(train):
    run = train("run", *EVAL, "checkpoint.every=2", "guidance=none")
    run_fid(f"checkpoints={run}", "guidance=cfg", "machine.cpu_threads=1")
    before = records(run)
    assert [(r.step, r.checkpoint is None) for r in before] == [(2, True), (4, True), (2, False), (4, False)] or len(before) == 4
    shutil.rmtree(run / "checkpoints" / "step_0000004")
    train("run", *EVAL, "checkpoint.every=2", "guidance=none")
    after = records(run)
    assert [(r.step, r.metrics) for r in after if r.checkpoint is None] == [
        (r.step, r.metrics) for r in before if r.checkpoint is None
    ]
    assert [r for r in after if r.checkpoint] == [r for r in before if r.checkpoint]


def test_training_is_the_same_with_and_without_evaluation(edm, train):
    without = train("without", *EVAL, "evaluation.every=0")
    assert losses(edm) == losses(without)
    assert list(evaluations(edm)) == [(2, 1.0), (2, 1.5), (4, 1.0), (4, 1.5)]
    assert all(list(found) == NAMES for found in evaluations(edm).values())


def test_an_interrupted_evaluation_is_completed_by_the_next_start(edm, train):
    run = train("run", *EVAL)
    file = run / "evaluations" / "results.jsonl"
    file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    train("run", *EVAL)
    assert evaluations(run) == evaluations(edm)
    before = file.read_text()
    train("run", *EVAL)
    assert file.read_text() == before


def test_fid_gives_the_figures_of_training_and_sweeps_keep_finished_points(edm, fid, tmp_path):
    sweep = [f"checkpoints={edm}", "guidance=cfg"]
    first = fid("out", *sweep, "guidance.cfg_scale=1.5")
    lines = fid("out", *sweep, "guidance.cfg_scale=[1.0,1.5]")
    assert len(first) == 2 and len(lines) == 4 and lines[:2] == first
    for line in lines:
        expected = evaluations(edm)[line["step"], line["settings"]["cfg_scale"]]
        assert line["metrics"] == pytest.approx(expected, rel=1e-4)
    with open(tmp_path / "out" / "results.csv") as f:
        rows = list(csv.DictReader(f))
    swept = [(row["run"], row["step"], row["cfg_scale"]) for row in rows]
    assert swept == [("run", "2", "1.0"), ("run", "2", "1.5"), ("run", "4", "1.0"), ("run", "4", "1.5")]  # in the command's order
    (run,), _ = read_runs([edm, tmp_path / "out"])  # the report has one row for figures of training and of fid.py
    assert len([measure for measure in run.figures if measure.metric == "fd_digits"]) == 2
    best = min(rows, key=lambda row: float(row["fd_digits"]))
    assert {(row["reference"], row["detector"]) for row in rows} == {("digits_reference.npz", "digits")}
    assert {row["network_precision"] for row in rows} == {"fp32"}
    assert [row["best"] for row in rows] == ["*" if row is best else "~" for row in rows]  # 70 samples: no significant difference
    fid("out", f"checkpoint={edm}", "evaluation.num_samples=35")  # a point with another number of samples is not compared
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 6
    fid("out", *sweep, "guidance.cfg_scale=[1.0,1.5]")
    assert (tmp_path / "out" / "results.md").read_text().count("\n") == 9
    assert Image.open(tmp_path / "out" / "results.png").size[0] > 300


def test_a_renamed_run_keeps_its_results_and_fid_prints_the_settings_that_differ(edm, fid, tmp_path, capsys, monkeypatch):
    shutil.copytree(edm, tmp_path / "runs" / "first", ignore=shutil.ignore_patterns("evaluations"))
    monkeypatch.chdir(tmp_path)
    points = ["guidance=cfg", "guidance.cfg_scale=[1.0,1.5]", *FID]
    run_fid("checkpoint=runs/first", *points)
    head, *rows = capsys.readouterr().out.splitlines()
    assert (
        head.split()[:3] == ["cfg_scale", "num_samples", "best"]
        and "fd_digits" in head
        and "detector" not in head
        and len(rows) == 2
    )
    assert [file.name[:27] for file in Path("runs/reference_features").iterdir()] == ["digits_reference.npz_digits_"[:27]]
    Path("runs/first").rename("runs/second")
    spellings = ("runs/second", str(tmp_path / "runs" / "second"), "runs/../runs/second/checkpoints/step_0000004")
    for spelling in (*spellings, f"[{','.join(spellings)}]"):
        run_fid(f"checkpoint={spelling}", *points)
    assert len((tmp_path / "runs/second/evaluations/results.jsonl").read_text().splitlines()) == 2
    shutil.copytree("runs/second", "copies/second")
    first, second = (read_runs([tmp_path / name])[0][0] for name in ("runs", "copies"))
    assert first.figures == second.figures and not read_runs([tmp_path])[1]
    (run,), problems = read_runs([tmp_path / "runs"])
    guided = {measure.guidance for measure in run.figures if measure.num_samples == 70 and "reference" in measure.measured_with}
    assert not problems and "cfg_scale 1.5" in guided


def test_a_changed_detector_file_or_reference_makes_the_next_start_evaluate_again(train, tmp_path):
    about = {"about": json.dumps({"detector": "small-mine", "resolution": 8, "num_classes": 10})}
    (weights := tmp_path / "mine.safetensors").write_bytes(save(SmallNet(10).state_dict(), about))
    detector = ["evaluation.detector=small-mine", f"evaluation.detector_weights={weights}"]
    settings = [*EVAL, "train.num_steps=1", "guidance=none", *detector]
    run = train("run", *settings)
    weights.write_bytes(save(SmallNet(10).state_dict(), about))  # other random weights
    train("run", *settings)
    assert len({r.settings["detector_weights"] for r in records(run)}) == 2
    arrays = dict(np.load(REPOSITORY / REFERENCE.partition("=")[2]))
    np.savez(tmp_path / "digits_reference.npz", **arrays | {"arr_0": 255 - arrays["arr_0"]})
    settings.append(f"evaluation.reference={tmp_path / 'digits_reference.npz'}")
    train("run", *settings)
    assert len(records(run)) == 3
    train("run", *settings, "sampling.rounding=truncate")  # the images change, too
    assert [r.settings["rounding"] for r in records(run)] == 3 * ["round"] + ["truncate"]
    assert records(run)[3].metrics != records(run)[2].metrics


def test_only_weights_that_a_detector_loads_tell_evaluations_apart(tmp_path):
    for key in ("detector_weights", "dinov2_weights"):
        (tmp_path / key).write_text(key)

    def hashed(*detectors):
        files = {key: str(tmp_path / key) for key in ("detector_weights", "dinov2_weights")}
        others = {"num_samples": 2, "first_seed": 0, "background": "white", "reference": None}
        return {*hash_weights(schema.SharedEvaluationSettings(detector=[*detectors], **files, **others))}

    assert hashed("digits") == set() and hashed("digits", "dinov2") == {"dinov2_weights"}
    assert hashed("inception") == hashed("small-mine", "digits") == {"detector_weights"}
    assert hashed("inception", "dinov2") == {"detector_weights", "dinov2_weights"}


def test_an_incomplete_line_of_results_is_ignored_and_the_next_line_is_not_joined_to_it(tmp_path):
    first, second = record("a.npz", 1.0), record("b.npz", 2.0)
    Results(tmp_path).add(first)
    with open(tmp_path / "results.jsonl", "a") as f:
        f.write('{"settings": {"images": "b.npz"}')
    results = Results(tmp_path)
    assert results.find(wanted(first)) == first and not results.find(wanted(second))
    results.add(second)
    results = Results(tmp_path)
    assert results.find(wanted(first)) and results.find(wanted(second))
    assert results.find(record("moved.npz", 0.0, images_hash="content of a.npz")) == first
    assert results.find(record("a.npz", 0.0, num_samples=71)) is None
    assert results.find(record("a.npz", 0.0, images_hash="other images")) is None
    (tmp_path / "results.jsonl").rename(tmp_path / "results.md")
    with pytest.raises(UserError, match="results.md was not written by fid.py"):
        Results(tmp_path).ensure_writable()


def test_results_that_another_process_replaces_by_as_many_bytes_are_read_again(tmp_path):
    first, second = record("a.npz", 1.0), record("b.npz", 2.0)
    results = Results(tmp_path)
    results.add(first)
    size = results.file.stat().st_size
    results.file.write_text(results.file.read_text().replace("a.npz", "b.npz").replace("1.0", "2.0"))
    os.utime(results.file, ns=(0, 1))  # some file systems store the time of a change in steps of milliseconds
    assert results.file.stat().st_size == size
    assert results.records == [second] and results.find(wanted(second)) == second and results.find(wanted(first)) is None


def test_a_thread_finds_a_record_while_another_thread_reads_the_file_again(tmp_path, monkeypatch):
    """fid.py stores a record in a thread, while the main thread looks up the next one."""
    first, second = record("a.npz", 1.0), record("b.npz", 2.0)
    results, found, read_again = Results(tmp_path), [], record_module.read_records
    results.add(first)
    Results(tmp_path).add(second)

    def read(*arguments):
        if not found:
            found.append(None)
            found.append(results.find(wanted(second)))  # as the other thread
        return read_again(*arguments)

    monkeypatch.setattr(record_module, "read_records", read)
    assert results.find(wanted(second)) == second and found == [None, second]


def test_settings_that_are_lists_tell_evaluations_apart(tmp_path):
    """So somebody's own sampler can have such a setting."""
    stored = record("a.npz", 1.0, timesteps=[1, 2])
    Results(tmp_path).add(stored)
    assert Results(tmp_path).find(record("a.npz", 0.0, timesteps=(1, 2))) == stored
    assert Results(tmp_path).find(record("a.npz", 0.0, timesteps=[1, 3])) is None


def test_usual_values_compare_as_if_they_were_missing(tmp_path):
    """So a setting can be added to format 1: older records lack it and meant its usual value."""
    older, newer = record("a.npz", 1.0), record("a.npz", 0.0, labels="random", first_seed=0, rounding="round")
    Results(tmp_path).add(older)
    assert Results(tmp_path).find(newer) == older
    assert Results(tmp_path).find(record("a.npz", 0.0, labels="balanced")) is None


def test_a_record_without_a_hash_counts_only_for_its_step_in_the_folder_of_its_run(tmp_path):
    of_run = {"settings": {"num_samples": 70, "detector": "x"}}
    planned = partial(PlannedEvaluation, **of_run)
    trained = EvaluationRecord(run="old name", step=2, metrics={"fid": 1.0}, **of_run)
    Results(tmp_path / "run" / "evaluations", tmp_path / "run").add(trained)
    own = Results(tmp_path / "run" / "evaluations", tmp_path / "run")
    assert own.find(planned(run="run", step=2, checkpoint="hash")) == trained
    assert own.find(planned(run="run", step=3, checkpoint="hash")) is None
    assert own.find(planned(run="another", step=2, checkpoint="hash")) is None
    assert Results(tmp_path / "run" / "evaluations").find(planned(run="run", step=2, checkpoint="hash")) is None
    hashed = EvaluationRecord(run="run", step=4, checkpoint="hash", metrics={"fid": 2.0}, **of_run)
    own.add(hashed)
    assert own.find(planned(run="moved", step=4, checkpoint="hash")) == hashed
    assert own.find(planned(run="run", step=4)) is None  # training repeats the step, perhaps with other settings
    assert lowest_figure([trained, hashed], "fid") == 1.0 and lowest_figure([], "fid") is None
    loss = EvaluationRecord(run="run", step=4, settings={"latents": "x"}, metrics={"validation_loss": 0.1})
    assert lowest_figure([loss, hashed], "fid") == 2.0 and lowest_figure([loss], "fid") == 0.1
    without_fid = hashed.model_copy(update={"metrics": {"precision": 0.1}})  # its FID was not finite
    assert lowest_figure([without_fid, hashed], "fid") == 2.0 and lowest_figure([loss, without_fid], "fid") is None


def test_a_replaced_autoencoder_is_evaluated_again_and_equal_looking_lines_show_hashes(edm, fid, tmp_path, monkeypatch):
    assert len(fid("out", f"checkpoint={edm}")) == 1
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    hashes = [autoencoders.hash_local_files(f"sd-vae:{tmp_path / 'vae'}")]
    (tmp_path / "vae" / "config.json").write_text('{"other": 1}')
    hashes.append(autoencoders.hash_local_files(f"sd-vae:{tmp_path / 'vae'}"))
    assert hashes[0] != hashes[1] and autoencoders.hash_local_files("sd-vae:stabilityai/sd-vae-ft-ema") is None
    assert autoencoders.hash_local_files("identity") is None is autoencoders.hash_local_files("none")
    monkeypatch.setattr(autoencoders, "hash_local_files", lambda spec: hashes[0])
    assert len(fid("out", f"checkpoint={edm}")) == 2
    for number, hash_ in enumerate(hashes, 1):
        monkeypatch.setattr(autoencoders, "hash_local_files", lambda spec, hash_=hash_: hash_)
        for _ in range(2):
            assert len(fid("new", f"checkpoint={edm}")) == number
    table = (tmp_path / "new" / "results.md").read_text()
    assert all(hash_[:8] in table for hash_ in hashes) and "reference_hash" not in table
    assert hashes[0] in (tmp_path / "new" / "results.csv").read_text()


def test_each_run_keeps_its_own_results_if_a_command_compares_several(edm, sit, tmp_path, monkeypatch, capsys):
    runs = [tmp_path / name for name in ("a", "b")]
    for run, source in zip(runs, (edm, sit)):
        shutil.copytree(source, run, ignore=shutil.ignore_patterns("evaluations"))

    def stored(run):
        lines = (run / "evaluations" / "results.jsonl").read_text().splitlines()
        return {json.loads(line)["run"]: json.loads(line)["metrics"] for line in lines}

    def evaluate(*names):
        capsys.readouterr()
        run_fid(f"checkpoint=[{','.join(str(tmp_path / name) for name in names)}]", *FID, "sampler.num_steps=2", "guidance=none")
        return capsys.readouterr().out

    both = evaluate("a", "b")
    assert [line.split()[0] for line in both.splitlines()[1:]] == ["a", "b"]
    assert [list(stored(run)) for run in runs] == [["a"], ["b"]]
    for run in runs:  # each folder is as a command for its run alone leaves it
        text = (run / "evaluations" / "results.md").read_text()
        assert f"| {run.name} |" in text and text.count("\n") == 3 and not (run / "evaluations" / "results.png").exists()
    (read,), problems = read_runs([runs[1]])
    assert not problems and 70 in {measure.num_samples for measure in read.figures}

    monkeypatch.setattr(fid_run.PointRunner, "evaluate", lambda *arguments: pytest.fail("this point has a result"))
    assert evaluate("b").count("\n") == 2 and evaluate("a", "b") == both
    assert [line.split()[0] for line in evaluate("b", "a").splitlines()[1:]] == ["b", "a"]
    assert [list(stored(run)) for run in runs] == [["a"], ["b"]]


def test_output_takes_the_results_and_tables_of_several_runs(edm, sit, fid, tmp_path):
    runs = [shutil.copytree(run, tmp_path / name) for run, name in ((edm, "a"), (sit, "b"))]
    lines = fid("out", f"checkpoint=[{runs[0]},{runs[1]}]", "evaluation.num_samples=4")
    assert [line["run"] for line in lines] == ["a", "b"]
    text = (tmp_path / "out" / "results.md").read_text()
    assert "\n| a |" in text and "\n| b |" in text and (tmp_path / "out" / "results.png").exists()
    assert not [*tmp_path.glob("[ab]/evaluations/results.md")]


def test_a_run_whose_folder_takes_no_results_or_has_the_checkpoints_of_another_does_not_stop_a_comparison(
    edm, sit, tmp_path, monkeypatch, caplog, capsys
):
    runs = [tmp_path / name for name in ("a", "b", "copy")]
    for run, source in zip(runs, (edm, sit, edm)):
        shutil.copytree(source, run, ignore=shutil.ignore_patterns("evaluations"))
    own = runs[1] / "evaluations"
    lines = tmp_path / "a" / "evaluations" / "results.jsonl"
    command = [f"checkpoint=[{','.join(map(str, runs))}]", *FID, "sampler.num_steps=2", "guidance=none"]

    def at_locking():
        own.mkdir()
        (own / ".evaluating").touch()  # in a folder that another user may not write to, mkdir fails as well

    def at_opening():
        own.symlink_to(tmp_path)

    def at_storing():
        def full(path, record):
            if path.parent == own:
                raise UserError(f"{path}: the disk is full")
            append_line(path, record)

        monkeypatch.setattr("evaluations.record.append_line", full)

    for prepare in (at_locking, at_opening, at_storing):
        caplog.clear()
        capsys.readouterr()
        prepare()
        run_fid(*command)
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["run", "a", "b"]
        assert [json.loads(line)["run"] for line in lines.read_text().splitlines()] == ["a"]
        assert len([text for text in caplog.messages if "are printed, but not stored" in text]) == 1
        assert not (own / "results.md").exists() and not (runs[2] / "evaluations").exists()
        own.unlink() if own.is_symlink() else shutil.rmtree(own)
        shutil.rmtree(lines.parent)
    run_fid(
        f"checkpoint={runs[2]}", *FID, "sampler.num_steps=2", "guidance=none"
    )  # equal weights have one result, which is not in the copy


def table_of(results, own):
    write_tables(results, [(done, columns_of(done)) for done in own], "fid")
    return ResultsTable(own, [columns_of(done) for done in own], "fid").terminal()


def test_a_point_that_two_commands_evaluate_is_stored_once_and_the_tables_of_the_last_one_have_all(tmp_path):
    first, second = record("a", 1.0, (1.0, 2.0), number=1), record("bb", 2.0, (1.0, 2.0), number=2)
    ours, theirs = Results(tmp_path), Results(tmp_path)
    ours.add(first)
    assert theirs.find(wanted(first)).metrics == {"fid": 1.0}
    theirs.add(first.model_copy(update={"metrics": {"fid": 3.0}}))
    theirs.add(second)
    assert [done.metrics["fid"] for done in ours.records] == [1.0, 2.0]
    assert "1.00 ± 0.50" in (table := table_of(ours, [first, second])) and "2.00 ± 0.50" in table
    assert (tmp_path / "results.png").exists()


def test_a_command_skips_the_points_that_another_one_stores_meanwhile(edm, fid, monkeypatch, caplog):
    sweep, score, evaluated = ["out", f"checkpoints={edm}", "evaluation.num_samples=4"], fid_run.PointRunner.evaluate, []

    def recorded(runner, point, *others):
        evaluated.append(point.planned.step)
        if len(evaluated) == 1:  # another command runs from its start to its end
            fid(*sweep)
        return score(runner, point, *others)

    monkeypatch.setattr(fid_run.PointRunner, "evaluate", recorded)
    caplog.set_level("INFO")
    lines = fid(*sweep)
    assert evaluated == [2, 2, 4] and [line["step"] for line in lines] == [2, 4]
    assert len([text for text in caplog.messages if "another command has stored this point" in text]) == 1


def test_points_are_evaluated_in_a_random_order_network_by_network_and_listed_as_the_command_lists_them(
    edm, monkeypatch, tmp_path, capsys
):
    sweep = [
        f"checkpoints={edm}",
        "guidance=cfg",
        "guidance.cfg_scale=[1.0,1.5]",
        "evaluation.num_samples=4",
        f"output={tmp_path / 'out'}",
    ]
    draw(monkeypatch, itertools.count(0, -1))
    run_fid(*sweep, "sampler.num_steps=2", "machine.cpu_threads=1")
    stored = read_records(tmp_path / "out" / "results.jsonl")
    assert [(r.step, r.settings["cfg_scale"]) for r in stored] == [(4, 1.5), (4, 1.0), (2, 1.5), (2, 1.0)]
    printed = [tuple(line.split()[:2]) for line in capsys.readouterr().out.splitlines()]
    assert printed == [("step", "cfg_scale"), ("2", "1"), ("2", "1.5"), ("4", "1"), ("4", "1.5")]
    monkeypatch.undo()
    orders = []
    for _ in range(2):
        random.seed(0)  # a seed, for example of a sweeper, does not give two commands the same order
        listed = [SimpleNamespace(number=i, recipe=SimpleNamespace(weights_source=i // 5)) for i in range(20)]
        orders.append([listed.index(point) for point in fid_plan.in_random_order(listed)])
        assert sorted(orders[-1]) == [*range(20)] and len([*itertools.groupby(orders[-1], lambda i: i // 5)]) == 4
    assert orders[0] != orders[1]


def test_a_result_that_cannot_be_stored_ends_the_command(edm, fid, monkeypatch, tmp_path, caplog):
    def full(path, record):
        raise UserError("the disk is full")

    caplog.set_level("INFO")
    monkeypatch.setattr("evaluations.record.append_line", full)
    with pytest.raises(UserError, match="the disk is full"):
        fid("out", f"checkpoints={edm}", "evaluation.num_samples=4")
    assert re.search(r"step \d: fd_digits [\d.]+, ", caplog.text)  # the figures are not lost
    (tmp_path / "file").touch()
    monkeypatch.setattr(fid_run.PointRunner, "evaluate", lambda *arguments: pytest.fail("this is known before any work"))
    with pytest.raises(UserError, match="cannot write to .*file/out: Not a directory"):
        fid("file/out", f"checkpoints={edm}")
    with file_size_limit(1000), pytest.raises(UserError, match="cannot write to .*full: File too large; .* MB are free"):
        fid("full", f"checkpoints={edm}")


def test_a_folder_that_a_trainer_locks_can_take_results(edm, fid, tmp_path):
    with lock_file(tmp_path / "out" / ".lock", "training in", "name"):
        assert len(fid("out", f"checkpoint={edm}")) == 1


def test_lines_that_are_no_results_are_left_out_with_one_warning(tmp_path, caplog):
    done = record("a.npz", 1.0, (1.0, 2.0))
    Results(tmp_path).add(done)
    good = json.loads((tmp_path / "results.jsonl").read_text())
    infinite, no_groups = good | {"metrics": {"fid": float("nan")}}, good | {"jackknife": {"fid": []}}
    bad = [infinite, no_groups, {"theirs": 1}, [3], good | {"settings": "text"}, good | {"metrics": {"fid": "1.0"}}]
    lines = [json.dumps(line) for line in bad]
    (tmp_path / "results.jsonl").write_text("\n".join([*lines[:3], "theirs", "[" * 100_000, *lines[3:], json.dumps(good), ""]))
    results = Results(tmp_path)
    assert results.records == [done] and results.find(wanted(done)) == done
    for name in ("b.npz", "c.npz"):  # results without standard errors: nothing says whether they are worse
        results.add(record(name, 2.0))
    write_tables(results, [(done, columns_of(done))], "fid")
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [(row["images"], row["best"]) for row in rows] == [("a.npz", "*"), ("b.npz", "?"), ("c.npz", "?")]
    (warning,) = caplog.messages
    assert warning.startswith(f"{tmp_path / 'results.jsonl'}: line 1 is left out: metrics.fid=nan: ")
    assert warning.endswith("(7 other lines are left out, too)")
    assert "1.00 ± 0.50" in table_of(results, [done])


def test_a_result_that_could_not_be_stored_is_still_known_when_another_process_stores_one(tmp_path, monkeypatch, caplog):
    unstored, stored = record("a.npz", 1.0), record("b.npz", 2.0)
    results = Results(tmp_path, is_optional=True)
    with monkeypatch.context() as patch:
        patch.setattr("evaluations.record.append_line", mock.Mock(side_effect=UserError("full")))
        results.add(unstored)
    assert "full; the results of this run are printed, but not stored" in caplog.text
    assert results.records == [unstored] and results.find(wanted(unstored)) == unstored
    Results(tmp_path).add(stored)
    assert results.records == [stored, unstored] and results.find(wanted(unstored)) == unstored
    assert results.find(wanted(stored)) == stored


def test_a_results_file_that_is_a_link_is_refused_before_the_evaluations(tmp_path):
    (tmp_path / "results.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    with pytest.raises(UserError, match="results.jsonl is a link, and nothing is written through links"):
        Results(tmp_path).ensure_writable()


def test_a_command_that_fails_leaves_no_folder(edm, fid, tmp_path, monkeypatch):
    def failing(*arguments, **settings):
        raise UserError("the autoencoder is missing")

    monkeypatch.setattr(autoencoders, "build", failing)
    for run in (run_fid, run_sample):
        with pytest.raises(UserError, match="the autoencoder is missing"):
            run(f"checkpoint={edm}", f"output={tmp_path / 'new' / 'out'}", "sampler.num_steps=3", "machine.cpu_threads=1")
        assert not (tmp_path / "new").exists()


def test_a_checkpoint_that_training_removes_is_left_out_of_a_sweep_and_ends_a_command_for_it_alone(
    edm, fid, tmp_path, monkeypatch, caplog
):
    run = shutil.copytree(edm, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations"))
    newest, load_weights, removes = run / "checkpoints" / "step_0000004", store.load_weights, ["ema", "raw"]

    def restore():
        shutil.copytree(edm / "checkpoints" / "step_0000004", newest, dirs_exist_ok=True)
        load.load_network.cache_clear()

    def removed_meanwhile(folder, weights):
        if weights in removes:
            shutil.rmtree(newest, ignore_errors=True)
        return load_weights(folder, weights)

    restore()
    monkeypatch.setattr(store, "load_weights", removed_meanwhile)
    lines = fid("all", f"checkpoints={run}", "evaluation.num_samples=4", "sampling.weights=[ema,raw]")
    assert [line["step"] for line in lines] == [2, 2] and (tmp_path / "all" / "results.png").exists()
    assert caplog.messages.count(f"{newest} was removed meanwhile; this point is left out") == 2

    words = "^[^ ]*step_0000004 was removed while it was read; run the same command again$"
    seeds = [f"checkpoint={run}", "seeds=0-1", "sampler.num_steps=2", "machine.cpu_threads=1"]
    restore()
    with pytest.raises(UserError, match=words):
        fid("newest", f"checkpoint={run}", "evaluation.num_samples=4")
    (line,) = fid("newest", f"checkpoint={run}", "evaluation.num_samples=4")
    assert line["step"] == 2
    restore()
    with pytest.raises(UserError, match=words):
        run_sample(*seeds)
    run_sample(*seeds)
    assert [folder.name[:12] for folder in (run / "generated").iterdir()] == ["step_0000002"]
    with pytest.raises(UserError, match="checkpoint: .*step_0000004 is not the folder of a run or of a complete checkpoint"):
        fid("gone", f"checkpoint={newest}")

    restore()
    removes.remove("ema")
    sweep = [
        f"checkpoint={run}",
        "evaluation.num_samples=4",
        "sampling.weights=[ema,raw]",
        "guidance=cfg",
        "guidance.cfg_scale=[1.0,1.5]",
    ]
    with pytest.raises(UserError, match=words):
        fid("sweep", *sweep)
    restore()
    removes.clear()
    lines = fid("sweep", *sweep)  # finished points are kept
    assert [(line["step"], line["settings"]["weights"]) for line in lines] == 2 * [(4, "ema")] + 2 * [(4, "raw")]


def test_by_default_results_go_to_the_run_or_below_runs_and_never_to_images_or_source_files(fid, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert fid_images.folder_for_images(str(tmp_path / "samples.npz")) == Path("runs") / "evaluations" / "samples.npz"
    for i in range(2):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"output=runs/evaluations/.* is inside images=\."):
        run_fid("images=.", REFERENCE, "evaluation.detector=digits", "machine.cpu_threads=1")
    monkeypatch.chdir(REPOSITORY)
    in_run, copied = tmp_path / "run" / "checkpoints" / "step_0000004", tmp_path / "copies" / "step_0000004"
    folders = [fid_plan.results_folder(Checkpoint(folder, "", 4, None, {})) for folder in (in_run, copied)]
    assert folders == [tmp_path / "run" / "evaluations", tmp_path / "copies" / "evaluations"]
    for folder in (Path("step_0000004"), Path("checkpoints/step_0000004")):
        found = fid_plan.results_folder(Checkpoint(folder, "", 4, None, {}))
        assert found == REPOSITORY / folder.parent / "step_0000004_evaluations"


def test_a_sit_run_is_evaluated_in_training_and_swept_over_solvers_and_guidance(sit, fid, tmp_path):
    lines = fid("out", f"checkpoint={sit}", "sampler.solver=[heun,euler]")
    assert lines[0]["metrics"] == pytest.approx(evaluations(sit)[4, 1.0], rel=1e-4)
    assert [line["cost"]["network_evaluations"] for line in lines] == [3, 2]
    sparse = fid("out", f"checkpoint={sit}", "guidance=sparse", "guidance.w=[1,2]")[2:]
    assert [(line["settings"]["guidance"], line["settings"]["guidance.w"]) for line in sparse] == [
        ("sparse", 1.0),
        ("sparse", 2.0),
    ]
    assert [line["cost"]["network_evaluations"] for line in sparse] == [3, 6]
    assert sparse[0]["metrics"] == pytest.approx(lines[0]["metrics"], rel=1e-4)  # w=1 with r_strong=0 is no guidance
    assert 0.5 < sparse[1]["cost"]["gflops_per_image"] / sparse[0]["cost"]["gflops_per_image"] / 2 < 1
    assert len(fid("out", f"checkpoint={sit}", "guidance=sparse", "guidance.w=[1,2]")) == 4  # all points were finished


def test_a_sweep_covers_checkpoints_of_two_diffusions_and_autoguidance_loads_a_second_network(edm, sit, fid, tmp_path):
    lines = fid("out", f"checkpoint=[{edm},{sit}]", "sampler.num_steps=[1,2]", "evaluation.num_samples=2")
    assert [line["settings"]["num_steps"] for line in lines] == [1, 2, 1, 2]
    (line,) = fid("euler", f"checkpoint={sit}", "sampler.solver=euler", "evaluation.num_samples=2")
    assert line["settings"]["solver"] == line["settings"]["solver"] == "euler"
    assert (tmp_path / "out" / "results.png").exists()
    (line,) = fid("auto", f"checkpoint={edm}", "guidance=autoguidance", f"guidance.checkpoint={edm}", "evaluation.num_samples=2")
    assert line["settings"]["guidance.checkpoint"].endswith("step_0000004") and line["cost"]["network_evaluations"] == 6
    with pytest.raises(UserError, match="sampler.S_churn is not a key"):
        fid("churn", f"checkpoint=[{edm},{sit}]", "sampler.S_churn=1")


def test_images_on_disk_get_the_figures_of_the_same_samples_from_a_checkpoint(edm, fid, tmp_path):
    from_checkpoint = fid("a", f"checkpoint={edm}")[0]["metrics"]
    settings = ["seeds=0-69", "guidance=none", "sampler.num_steps=2", "sampling.batch_size=35", "machine.cpu_threads=1"]
    run_sample(f"checkpoint={edm}", f"output={tmp_path / 'samples'}", *settings)
    digits = ["evaluation.detector=digits", REFERENCE]
    from_npz = fid("b", f"images={tmp_path / 'samples' / 'samples_0-69.npz'}", *digits)[0]["metrics"]
    assert from_npz == pytest.approx(from_checkpoint, rel=1e-4)
    assert fid("c", f"images={tmp_path / 'samples'}", *digits)[0]["metrics"] == from_npz  # the file names hold the labels


def test_images_with_other_class_names_are_evaluated_again(fid, tmp_path):
    pixels, labels = np.random.default_rng(0).integers(0, 256, (70, 8, 8, 3), dtype=np.uint8), np.arange(70) % 10

    def number_of_records(class_names, labels):
        write_npz(tmp_path / "a.npz", iter(pixels), pixels.shape, labels, class_names=class_names)
        settings = [f"images={tmp_path / 'a.npz'}", REFERENCE, "evaluation.detector=digits"]
        return len(fid("names", *settings))

    names = [f"{i}" for i in range(10)]
    assert [number_of_records(x, labels) for x in (None, names, names, names[::-1])] == [1, 2, 2, 3]
    assert [number_of_records(x, None) for x in (names, names[::-1])] == [4, 4]  # nothing depends on the names


def test_jpeg_files_against_others_are_said(fid, tmp_path, caplog):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
    for suffix in ("jpg", "png", "JPEG"):
        (tmp_path / suffix).mkdir()
        for number, image in enumerate(pixels):
            Image.fromarray(image).save(tmp_path / suffix / f"{number:02}.{suffix}")
    words = "one set is JPEG and the other is not, which changes distances"
    for images, reference, is_said in (("jpg", "png", True), ("png", "jpg", True), ("png", "png", False), ("jpg", "JPEG", False)):
        caplog.clear()
        sets = [f"images={tmp_path / images}", f"evaluation.reference={tmp_path / reference}", "evaluation.detector=digits"]
        fid(f"{images}_{reference}", *sets, "evaluation.num_samples=20")
        assert (words in caplog.text) == is_said


def test_images_that_state_their_background_need_a_reference_with_the_same_one(fid, tmp_path):
    digits = open_images(REPOSITORY / "evaluations" / "digits_reference.npz")
    sets = {}
    for colour in ("lightblue", "white"):
        sets[colour] = tmp_path / f"{colour}.npz"
        each = (image for batch in digits.batches(500) for image in batch)
        write_npz(sets[colour], each, digits.shape, digits.labels, background=colour)
    blue, white = (f"evaluation.reference={file}" for file in sets.values())
    images = [f"images={sets['lightblue']}", "evaluation.detector=digits"]
    assert fid("blue", *images, blue)[0]["metrics"]["precision_digits"] == 1
    with pytest.raises(UserError, match="white.npz was made with background=white, but evaluation.background=lightblue"):
        fid("white", *images, white)
    with pytest.raises(UserError, match="^images=.*lightblue.npz was made with background=lightblue, but .*background=white"):
        fid("white", *images, white, "evaluation.background=white")


def test_weights_raw_evaluates_the_network_instead_of_its_ema(edm, fid, tmp_path):
    ema, raw = fid("both", f"checkpoint={edm}", "sampling.weights=[ema,raw]")
    copy = shutil.copytree(edm, tmp_path / "copy") / "checkpoints" / "step_0000004"
    shutil.copy(copy / "model.safetensors", copy / "ema.safetensors")
    renew_manifest(copy)
    (as_ema,) = fid("copy", f"checkpoint={copy}")
    assert as_ema["metrics"] == raw["metrics"] != ema["metrics"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "one of checkpoint=, checkpoints= and images="),
        (["images=a.npz", "checkpoint=b"], "checkpoint and images"),
        (["checkpoints=nowhere"], "checkpoints=nowhere"),
        (["images=evaluations/digits_reference.npz"], "reference"),
        (["images={here}/statistics.npz", REFERENCE], "holds statistics but no images"),
        (["images=/nonexistent.npz", REFERENCE], "^images: /nonexistent.npz"),
        (
            ["images=evaluations/digits_reference.npz", REFERENCE, "evaluation.num_samples=1798"],
            "evaluation.num_samples=1798.*1797",
        ),
        (
            ["images=evaluations/digits_reference.npz", REFERENCE, "evaluation.num_samples=1"],
            "evaluation.num_samples=1: .*greater than or equal to 2",
        ),
        (["images=a.npz", "guidance=cfg", "guidance.cfg_scale=2"], "guidance= applies to sampling"),
        (["images=a.npz", "sampling.ema_length=0.1"], "sampling.ema_length= applies to sampling"),
        (["images=a.npz", "sampler.num_steps=3"], "sampler.num_steps= applies to sampling"),
        (["images=a.npz", "guidance=cfg"], "guidance= applies to sampling"),
        (["images=a.npz", "sampling.weights=raw"], "sampling.weights= applies to sampling"),
        (["images=a.npz", "evaluation.first_seed=3"], "evaluation.first_seed= applies to sampling"),
        (["images=a.npz", "sampling.autoencoder=identity"], "sampling.autoencoder= applies to sampling"),
        (["images=a.npz", "sampling.precision=fp32"], "sampling.precision= applies to sampling"),
        (["images=a.npz", "sampling.labels=balanced"], "sampling.labels= applies to sampling"),
        (["images=a.npz", "machine.compile=blocks"], "machine.compile= applies to sampling"),
        (["images=a.npz", "+jitter=1"], "^jitter is not a key$"),
        (
            ["checkpoint={edm}", "sampler.jitter=1"],
            "sampler.jitter is not a key of the sampler of diffusion=edm, which has num_steps",
        ),
        (["checkpoint=a", "guidance.cfg_scale=[1.0,2.0]"], "guidance.cfg_scale is a key of guidance=cfg or interval or"),
        (["images=a.npz", "sampling.weights=[ema,best]"], r"^sampling.weights\[1\]='best'"),
        (["checkpoint=a", "sampling.weights=[]"], r"sampling.weights=\[\]: .*at least 1 item"),
        (["checkpoint={edm}", "sampler.num_steps=[]"], r"num_steps=\[\] lists no value"),
        (["checkpoint=a", "guidance=sparse", "guidance.w=[]"], r"guidance: w=\[\] lists no value"),
        (["checkpoint=[{edm},{other}]"], "checkpoints of different resolutions need separate commands: 8 .*, 16 "),
        (["checkpoint=[{edm},{other}]"], "different .* .evaluation.reference: .*/digits_reference.npz' -> .*/other.npz'"),
    ],
)
def test_wrong_settings_are_refused_before_any_work(fid, edm, tmp_path, monkeypatch, overrides, words):
    monkeypatch.chdir(REPOSITORY)
    np.savez(tmp_path / "statistics.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    if "{other}" in "".join(overrides):
        other = shutil.copytree(edm / "checkpoints" / "step_0000004", tmp_path / "step_0000004")
        config = (other / "config.yaml").read_text()
        change = ("/digits_reference.npz", "/other.npz") if "reference" in words else ("resolution: 8", "resolution: 16")
        (other / "config.yaml").write_text(config.replace(*change))
        renew_manifest(other)
    overrides = [word.format(here=tmp_path, edm=edm, other=tmp_path / "step_0000004") for word in overrides]
    with pytest.raises(UserError, match=words):
        fid("out", *overrides)
    assert not (tmp_path / "out").exists()


def test_a_run_is_sampled_and_evaluated_in_its_training_precision_unless_another_is_requested(train, fid, tmp_path):
    assert checked(["train.precision=bf16"]).sampling.precision == "bf16"
    run = train("run", "train.num_steps=2", "train.lr=1e-2", "train.precision=bf16")
    points = [fid(name, f"checkpoint={run}", *given)[0] for name, given in (("own", []), ("asked", ["sampling.precision=fp32"]))]
    assert [point["settings"]["network_precision"] for point in points] == ["bf16", "fp32"]
    assert points[0]["metrics"] != points[1]["metrics"]
    run_sample(f"checkpoint={run}", f"output={tmp_path / 'images'}", "seeds=0", *FID[1:2], "machine.cpu_threads=1")
    assert "precision: bf16" in (tmp_path / "images" / "settings.yaml").read_text()


@pytest.fixture
def sampled(monkeypatch):
    """Fixture: a list of all seeds that have been sampled."""
    seeds, call = [], ImageSampler.__call__

    def recorded(self, batch, labels):
        seeds.extend(batch)
        return call(self, batch, labels)

    monkeypatch.setattr(ImageSampler, "__call__", recorded)
    return seeds


def test_results_for_different_labels_or_seeds_are_separate_and_show_these_settings(edm, fid, tmp_path, sampled):
    lines = [
        fid("out", f"checkpoint={edm}", *given)[-1]
        for given in ((), ("sampling.labels=balanced",), ("evaluation.first_seed=70",))
    ]
    assert len({line["metrics"]["fd_digits"] for line in lines}) == 3 and sampled[140:] == list(range(70, 140))
    about = [(line["settings"]["labels"], line["settings"]["first_seed"]) for line in lines]
    assert about == [("random", 0), ("balanced", 0), ("random", 70)]
    assert "balanced" in (tmp_path / "out" / "results.md").read_text()


def test_the_points_of_a_checkpoint_share_its_network(edm, fid, monkeypatch):
    load.load_network.cache_clear()
    built, build = [], schema.Model.build
    monkeypatch.setattr(schema.Model, "build", lambda model, data: built.append(model) or build(model, data))
    fid("out", f"checkpoints={edm}", "guidance=cfg", "guidance.cfg_scale=[1.0,1.5,2.0]", "evaluation.num_samples=4")
    assert len(built) == 2


def test_differences_are_judged_group_by_group():
    """Values vary by 10 between groups, but `above` always exceeds `first` by about 1. Separate errors would hide this."""
    low = [10.0 * group for group in range(10)]
    first, above, other = (
        record("a", fid, values) for fid, values in ((45.0, low), (46.05, [x + 1 + x / 1000 for x in low]), (46.05, low[::-1]))
    )
    assert standard_error(low) > 50
    assert (
        differ_significantly(first, above, "fid") is True
        and differ_significantly(first, first, "fid") is False
        and not differ_significantly(first, other, "fid")
    )
    assert differ_significantly(first, record("a", 45.0), "fid") is None  # too few samples: the tables show no mark
    lacks_a_group = record("a", 45.0, low[1:])  # of an earlier version, which left out infinite values
    assert differ_significantly(first, lacks_a_group, "fid") is None and differ_significantly(lacks_a_group, first, "fid") is None


def test_a_folder_is_no_reference_if_the_images_of_any_run_were_padded(tmp_path):
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    for runs in ([{"pad": 2}, {"pad": 0}], [{"pad": 0}, {"pad": 2}], [{}, {"pad": 2}]):
        with pytest.raises(UserError, match=f"evaluation.reference={tmp_path}: the training images were encoded with pad=2"):
            open_reference(str(tmp_path), "evaluation.reference", ["digits"], resolution=8, encoded_with=runs)


def test_a_guidance_that_fits_no_checkpoint_is_refused_wherever_the_runs_list_it():
    """A resumed run may list other guidances, so that an earlier checkpoint has the same guidance at another place."""
    latents = {"in_channels": 1, "input_size": 8, "num_classes": 10, "scale_factor": 0.5, "resolution": 8}
    checkpoints = []
    for step, scales in ((2, "[1.0,2.0]"), (4, "2.0")):
        run = checked(["guidance=cfg", f"guidance.cfg_scale={scales}", "model.class_dropout=0"])
        data, sampling = run.data.model_copy(update=latents), run.sampling.model_copy(update={"autoencoder": "identity"})
        config = run.model_copy(update={"data": data, "sampling": sampling})
        checkpoints.append(Checkpoint(Path(f"step_{step}"), str(step), step, config, {}))
    with pytest.raises(UserError, match="cfg_scale=2 needs the null class"):
        fid_plan.choose_recipes(checked(["checkpoints=run"], "fid"), checkpoints)
