"""Evaluation during training and fid.py give the same figures. fid.py keeps finished points."""

import csv
import itertools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import REPOSITORY, checked, losses, metrics, renew_manifest, run_fid, run_sample, run_train
from PIL import Image

import fid as script
from checkpoints import load, store
from common.errors import UserError
from common.files import append_line, lock_file
from configs import schema
from evaluations.images import open_images, write_npz
from evaluations.metrics import standard_error
from evaluations.results import Point, Results, differ
from evaluations.suite import metrics_for
from extras.report.runs import read_runs
from latents import autoencoders
from sampling import points
from sampling.sampler import ImageSampler

NAMES = [metric.name for metric in metrics_for("digits")]
EVAL = ["eval.every=2", "eval.num_samples=70", "eval.num_steps=2", "eval.batch_size=35", "train.num_steps=4", "train.lr=1e-2"]
FID = ["num_samples=70", "batch_size=35", "cpu_threads=1"]
REFERENCE = f"reference={REPOSITORY / 'evaluations' / 'digits_reference.npz'}"


def evaluations(run):
    """Return {(step, cfg_scale): metrics}."""
    return {(record["step"], record["cfg_scale"]): record["metrics"] for record in metrics(run) if "metrics" in record}


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
        sampler = [] if any(override.startswith("images=") for override in overrides) else ["num_steps=2"]
        run_fid(f"output={tmp_path / output}", *FID, *sampler, *overrides)
        return [json.loads(line) for line in (tmp_path / output / "results.jsonl").read_text().splitlines()]

    return run


def test_training_evaluates_one_more_guidance_with_the_figures_of_fid(fid, tmp_path):
    sparse = ["w=1.7", "r_strong=0.25", "r_weak=0.75"]
    settings = ["guidance@eval.guidance=sparse", *(f"eval.guidance.{setting}" for setting in sparse)]
    run = run_train(tmp_path, "run", *EVAL, "train.num_steps=2", "eval.cfg_scales=[1.0]", *settings)
    lines = [line for line in metrics(run) if "metrics" in line]
    assert [line.get("cfg_scale") for line in lines] == [1.0, None] and lines[1]["guidance"] == "sparse"
    (line,) = fid("out", f"checkpoint={run}", "guidance=sparse", *(f"guidance.{setting}" for setting in sparse))
    assert {key: lines[1][key] for key in line["point"] if key.startswith("guidance")} == {
        key: value for key, value in line["point"].items() if key.startswith("guidance")
    }
    assert line["metrics"] == pytest.approx(lines[1]["metrics"], rel=1e-4)
    (read,), _ = read_runs([run])
    words = {measure.guidance for measure in read.figures if measure.metric == "fd_digits"}
    assert len(words) == 2 and any("guidance sparse, guidance.w 1.7" in text for text in words)
    before = (run / "metrics.jsonl").read_text()
    run_train(tmp_path, "run", *EVAL, "train.num_steps=2", "eval.cfg_scales=[1.0]", *settings)
    assert (run / "metrics.jsonl").read_text() == before  # all evaluations were found
    again = run_train(tmp_path, "run", *EVAL, "train.num_steps=2", "eval.cfg_scales=[1.0,1.7]", "guidance@eval.guidance=cfg")
    found = [line.get("cfg_scale") for line in metrics(again) if "metrics" in line]
    assert found == [1.0, None, 1.7, 1.5]


def test_training_is_the_same_with_and_without_evaluation(edm, train):
    without = train("without", *EVAL, "eval.every=0")
    assert losses(edm) == losses(without)
    assert list(evaluations(edm)) == [(2, 1.0), (2, 1.5), (4, 1.0), (4, 1.5)]
    assert all(list(found) == NAMES for found in evaluations(edm).values())


def test_an_interrupted_evaluation_is_completed_by_the_next_start(edm, train):
    run = train("run", *EVAL)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    train("run", *EVAL)
    assert evaluations(run) == evaluations(edm)
    before = (run / "metrics.jsonl").read_text()
    train("run", *EVAL)
    assert (run / "metrics.jsonl").read_text() == before


def test_fid_gives_the_figures_of_training_and_sweeps_keep_finished_points(edm, fid, tmp_path):
    sweep = [f"checkpoints={edm}", "guidance=cfg"]
    first = fid("out", *sweep, "cfg_scale=1.5")
    lines = fid("out", *sweep, "cfg_scale=[1.0,1.5]")
    assert len(first) == 2 and len(lines) == 4 and lines[:2] == first
    for line in lines:
        step, scale = int(line["point"]["checkpoint"][-7:]), line["point"]["cfg_scale"]
        assert line["metrics"] == pytest.approx(evaluations(edm)[step, scale], rel=1e-4)
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
    fid("out", f"checkpoint={edm}", "num_samples=35")  # a point with another number of samples is not compared
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 6
    fid("out", *sweep, "cfg_scale=[1.0,1.5]")
    assert (tmp_path / "out" / "results.md").read_text().count("\n") == 9
    assert Image.open(tmp_path / "out" / "results.png").size[0] > 300


def test_a_renamed_run_keeps_its_results_and_fid_prints_the_settings_that_differ(edm, fid, tmp_path, capsys, monkeypatch):
    shutil.copytree(edm, tmp_path / "runs" / "first", ignore=shutil.ignore_patterns("evaluations"))
    monkeypatch.chdir(tmp_path)
    points = ["guidance=cfg", "cfg_scale=[1.0,1.5]", *FID]
    run_fid("checkpoint=runs/first", *points)
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["cfg_scale", "best"] and "fd_digits" in head and "detector" not in head and len(rows) == 2
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
    guided = {measure.guidance for measure in run.figures if measure.num_samples == 70 and "reference" in measure.settings}
    assert not problems and "cfg_scale 1.5" in guided


def test_a_changed_detector_file_or_reference_makes_the_next_start_evaluate_again(train, tmp_path):
    shutil.copy(REPOSITORY / "evaluations" / "digits_detector.safetensors", weights := tmp_path / "a.safetensors")
    settings = [*EVAL, "train.num_steps=1", "eval.cfg_scales=[1.0]", f"evaluation.detector_weights={weights}"]
    run = train("run", *settings)
    weights.write_bytes(weights.read_bytes() + b" ")
    train("run", *settings)
    assert len({record["settings"]["detector_weights"] for record in metrics(run) if "metrics" in record}) == 2
    arrays = dict(np.load(REPOSITORY / REFERENCE.partition("=")[2]))
    np.savez(tmp_path / "digits_reference.npz", **arrays | {"arr_0": 255 - arrays["arr_0"]})
    settings.append(f"evaluation.reference={tmp_path / 'digits_reference.npz'}")
    train("run", *settings)
    assert len([record for record in metrics(run) if "metrics" in record]) == 3
    train("run", *settings, "sample.rounding=truncate")  # the images change, too
    lines = [record for record in metrics(run) if "metrics" in record]
    assert [record["settings"].get("rounding") for record in lines] == 3 * [None] + ["truncate"]
    assert lines[3]["metrics"] != lines[2]["metrics"]


def test_an_incomplete_line_of_results_is_ignored_and_the_next_line_is_not_joined_to_it(tmp_path):
    shared = {"num_samples": 70, "reference": "reference"}
    first, second = (Point({"images": name}, f"content of {name}", {}) for name in ("a.npz", "b.npz"))
    Results(tmp_path, shared).add(first, {"fid": 1.0}, {}, {})
    with open(tmp_path / "results.jsonl", "a") as f:
        f.write('{"point": {"images": "b.npz"}')
    results = Results(tmp_path, shared)
    assert results.find(first) and not results.find(second)
    results.add(second, {"fid": 2.0}, {}, {})
    results = Results(tmp_path, shared)
    assert results.find(first) and results.find(second)
    assert Results(tmp_path, shared | {"num_samples": 71}).find(first) is None
    assert results.find(replace(first, hash="other images")) is None
    (tmp_path / "results.jsonl").rename(tmp_path / "results.md")
    with pytest.raises(UserError, match="results.md was not written by fid.py"):
        Results(tmp_path, shared)


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
    assert len(fid("out", f"checkpoint={edm}")) == 1  # lines of earlier versions have no hash
    assert "autoencoder_hash" not in (tmp_path / "out" / "results.md").read_text()
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
        return {json.loads(line)["shown"]["run"]: json.loads(line)["metrics"] for line in lines}

    def evaluate(*names):
        capsys.readouterr()
        run_fid(f"checkpoint=[{','.join(str(tmp_path / name) for name in names)}]", *FID, "num_steps=2")
        return capsys.readouterr().out

    both = evaluate("a", "b")
    assert [line.split()[0] for line in both.splitlines()[1:]] == ["a", "b"]
    assert [list(stored(run)) for run in runs] == [["a"], ["b"]]
    for run in runs:  # each folder is as a command for its run alone leaves it
        text = (run / "evaluations" / "results.md").read_text()
        assert f"| {run.name} |" in text and text.count("\n") == 3 and not (run / "evaluations" / "results.png").exists()
    (read,), problems = read_runs([runs[1]])
    assert not problems and 70 in {measure.num_samples for measure in read.figures}

    monkeypatch.setattr(points.PointEvaluator, "features", lambda *arguments: pytest.fail("this point has a result"))
    assert evaluate("b").count("\n") == 2 and evaluate("a", "b") == both
    assert [line.split()[0] for line in evaluate("b", "a").splitlines()[1:]] == ["b", "a"]
    assert [list(stored(run)) for run in runs] == [["a"], ["b"]]


def test_output_takes_the_results_and_tables_of_several_runs(edm, sit, fid, tmp_path):
    runs = [shutil.copytree(run, tmp_path / name) for run, name in ((edm, "a"), (sit, "b"))]
    lines = fid("out", f"checkpoint=[{runs[0]},{runs[1]}]", "num_samples=4")
    assert [line["shown"]["run"] for line in lines] == ["a", "b"]
    text = (tmp_path / "out" / "results.md").read_text()
    assert "\n| a |" in text and "\n| b |" in text and (tmp_path / "out" / "results.png").exists()
    assert not [*tmp_path.glob("[ab]/evaluations")]


def test_a_run_whose_folder_takes_no_results_or_has_the_checkpoints_of_another_does_not_stop_a_comparison(
    edm, sit, tmp_path, monkeypatch, caplog, capsys
):
    runs = [tmp_path / name for name in ("a", "b", "copy")]
    for run, source in zip(runs, (edm, sit, edm)):
        shutil.copytree(source, run, ignore=shutil.ignore_patterns("evaluations"))
    own = runs[1] / "evaluations"
    lines = tmp_path / "a" / "evaluations" / "results.jsonl"
    command = [f"checkpoint=[{','.join(map(str, runs))}]", *FID, "num_steps=2"]

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

        monkeypatch.setattr("evaluations.results.append_line", full)

    for prepare in (at_locking, at_opening, at_storing):
        caplog.clear()
        capsys.readouterr()
        prepare()
        run_fid(*command)
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["run", "a", "b"]
        assert [json.loads(line)["shown"]["run"] for line in lines.read_text().splitlines()] == ["a"]
        assert len([text for text in caplog.messages if "are printed, but not stored" in text]) == 1
        assert not (own / "results.md").exists() and not (runs[2] / "evaluations").exists()
        own.unlink() if own.is_symlink() else shutil.rmtree(own)
        shutil.rmtree(lines.parent)
    run_fid(f"checkpoint={runs[2]}", *FID, "num_steps=2")  # equal weights have one result, which is not in the copy


def test_a_point_that_two_commands_evaluate_is_stored_once_and_the_tables_of_the_last_one_have_all(tmp_path):
    shared = {"num_samples": 70, "reference": "reference"}
    first, second = (Point({"images": name}, f"of {name}", {"images": name, "number": len(name)}) for name in ("a", "bb"))
    ours, theirs = Results(tmp_path, shared), Results(tmp_path, shared)
    ours.add(first, {"fid": 1.0}, {"fid": [1.0, 2.0]}, {})
    assert theirs.find(first)["metrics"] == {"fid": 1.0}
    theirs.add(first, {"fid": 3.0}, {"fid": [1.0, 2.0]}, {})
    theirs.add(second, {"fid": 2.0}, {"fid": [1.0, 2.0]}, {})
    assert [line["metrics"]["fid"] for line in ours.lines] == [1.0, 2.0]
    assert "1.00 ± 0.50" in (table := ours.write([first, second], "fid")) and "2.00 ± 0.50" in table
    assert (tmp_path / "results.png").exists()


def test_a_command_skips_the_points_that_another_one_stores_meanwhile(edm, fid, monkeypatch, caplog):
    sweep, features, evaluated = ["out", f"checkpoints={edm}", "num_samples=4"], points.PointEvaluator.features, []

    def recorded(self, recipe, *more):
        evaluated.append(store.read_step(recipe.checkpoint))
        if len(evaluated) == 1:  # another command runs from its start to its end
            fid(*sweep)
        return features(self, recipe, *more)

    monkeypatch.setattr(points.PointEvaluator, "features", recorded)
    caplog.set_level("INFO")
    lines = fid(*sweep)
    assert evaluated == [2, 2, 4] and [line["shown"]["step"] for line in lines] == [2, 4]
    assert len([text for text in caplog.messages if "another command has stored this point" in text]) == 1


def test_points_are_evaluated_in_a_random_order_network_by_network_and_listed_as_the_command_lists_them(
    edm, monkeypatch, tmp_path, capsys
):
    sweep = [f"checkpoints={edm}", "guidance=cfg", "cfg_scale=[1.0,1.5]", "num_samples=4", f"output={tmp_path / 'out'}"]
    draw(monkeypatch, itertools.count(0, -1))
    run_fid(*sweep, "num_steps=2", "cpu_threads=1")
    lines = [json.loads(line)["shown"] for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [(line["step"], line["cfg_scale"]) for line in lines] == [(4, 1.5), (4, 1.0), (2, 1.5), (2, 1.0)]
    printed = [tuple(line.split()[:2]) for line in capsys.readouterr().out.splitlines()]
    assert printed == [("step", "cfg_scale"), ("2", "1"), ("2", "1.5"), ("4", "1"), ("4", "1.5")]
    monkeypatch.undo()
    orders = []
    for _ in range(2):
        random.seed(0)  # a seed, for example of a sweeper, does not give two commands the same order
        listed = [(None, SimpleNamespace(network=i // 5)) for i in range(20)]
        orders.append(points.in_random_order(listed, range(20)))
        assert sorted(orders[-1]) == [*range(20)] and len([*itertools.groupby(orders[-1], lambda i: i // 5)]) == 4
    assert orders[0] != orders[1]


def test_a_result_that_cannot_be_stored_ends_the_command(edm, fid, monkeypatch, tmp_path):
    def full(path, record):
        raise UserError("the disk is full")

    monkeypatch.setattr("evaluations.results.append_line", full)
    with pytest.raises(UserError, match="the disk is full"):
        fid("out", f"checkpoints={edm}", "num_samples=4")
    (tmp_path / "file").touch()
    monkeypatch.setattr(points.PointEvaluator, "features", lambda *arguments: pytest.fail("this is known before any work"))
    with pytest.raises(UserError, match="cannot write to .*file/out: Not a directory"):
        fid("file/out", f"checkpoints={edm}")


def test_a_folder_that_a_trainer_locks_can_take_results(edm, fid, tmp_path):
    with lock_file(tmp_path / "out" / ".lock", "training in", "name"):
        assert len(fid("out", f"checkpoint={edm}")) == 1


def test_lines_that_are_no_results_are_left_out_with_one_warning(tmp_path, caplog):
    shared, point = {"num_samples": 70, "reference": "reference"}, Point({"images": "a.npz"}, "content", {"images": "a.npz"})
    Results(tmp_path, shared).add(point, {"fid": 1.0}, {"fid": [1.0, 2.0]}, {})
    good = json.loads((tmp_path / "results.jsonl").read_text())
    infinite, no_groups = good | {"metrics": {"fid": float("nan")}}, good | {"jackknife": {"fid": []}}
    bad = [infinite, no_groups, {"theirs": 1}, [3], good | {"shown": "text"}, good | {"metrics": {"fid": "1.0"}}]
    lines = [json.dumps(line) for line in bad]
    (tmp_path / "results.jsonl").write_text("\n".join([*lines[:3], "theirs", "[" * 100_000, *lines[3:], json.dumps(good), ""]))
    results = Results(tmp_path, shared)
    assert results.lines == [good] and results.find(point) == good
    for name in ("b.npz", "c.npz"):  # results without standard errors: nothing says whether they are worse
        results.add(Point({"images": name}, name, {"images": name}), {"fid": 2.0}, {}, {})
    results.write([point], "fid")
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [(row["images"], row["best"]) for row in rows] == [("a.npz", "*"), ("b.npz", ""), ("c.npz", "")]
    (warning,) = caplog.messages
    assert warning.startswith(f"{tmp_path / 'results.jsonl'}: line 1 is left out: metrics.fid=nan: ")
    assert warning.endswith("(7 other lines are left out, too)")
    assert "1.00 ± 0.50" in results.write([point], "fid")


def test_a_results_file_that_is_a_link_is_refused_before_the_evaluations(tmp_path):
    (tmp_path / "results.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    with pytest.raises(UserError, match="results.jsonl is a link, and nothing is written through links"):
        Results(tmp_path, {})


def test_a_command_that_fails_leaves_no_folder(edm, fid, tmp_path, monkeypatch):
    def failing(*arguments, **settings):
        raise UserError("the autoencoder is missing")

    monkeypatch.setattr(autoencoders, "build", failing)
    for run in (run_fid, run_sample):
        with pytest.raises(UserError, match="the autoencoder is missing"):
            run(f"checkpoint={edm}", f"output={tmp_path / 'new' / 'out'}", "num_samples=4", "num_steps=2", "cpu_threads=1")
        assert not (tmp_path / "new").exists()


def test_a_checkpoint_that_training_removes_is_left_out_of_a_sweep_and_ends_a_command_for_it_alone(
    edm, fid, tmp_path, monkeypatch, caplog
):
    run = shutil.copytree(edm, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations"))
    newest, load_weights, removes = run / "checkpoints" / "step_0000004", store.load_weights, ["ema", "raw"]

    def restore():
        shutil.copytree(edm / "checkpoints" / "step_0000004", newest, dirs_exist_ok=True)
        load._load_network.cache_clear()

    def removed_meanwhile(folder, weights):
        if weights in removes:
            shutil.rmtree(newest, ignore_errors=True)
        return load_weights(folder, weights)

    restore()
    monkeypatch.setattr(store, "load_weights", removed_meanwhile)
    lines = fid("all", f"checkpoints={run}", "num_samples=4", "weights=[ema,raw]")
    assert [line["shown"]["step"] for line in lines] == [2, 2] and (tmp_path / "all" / "results.png").exists()
    assert caplog.messages.count(f"{newest} was removed meanwhile; this point is left out") == 2

    words = "^[^ ]*step_0000004 was removed while it was read; run the same command again$"
    seeds = [f"checkpoint={run}", "seeds=0-1", "num_steps=2", "cpu_threads=1"]
    restore()
    with pytest.raises(UserError, match=words):
        fid("newest", f"checkpoint={run}", "num_samples=4")
    (line,) = fid("newest", f"checkpoint={run}", "num_samples=4")
    assert line["shown"]["step"] == 2
    restore()
    with pytest.raises(UserError, match=words):
        run_sample(*seeds)
    run_sample(*seeds)
    assert [folder.name[:12] for folder in (run / "generated").iterdir()] == ["step_0000002"]
    with pytest.raises(UserError, match="checkpoint: .*step_0000004 is not the folder of a run or of a complete checkpoint"):
        fid("gone", f"checkpoint={newest}")

    restore()
    removes.remove("ema")
    sweep = [f"checkpoint={run}", "num_samples=4", "weights=[ema,raw]", "guidance=cfg", "cfg_scale=[1.0,1.5]"]
    with pytest.raises(UserError, match=words):
        fid("sweep", *sweep)
    restore()
    removes.clear()
    lines = fid("sweep", *sweep)  # finished points are kept
    assert [(line["shown"]["step"], line["shown"]["weights"]) for line in lines] == 2 * [(4, "ema")] + 2 * [(4, "raw")]


def test_by_default_results_go_to_the_run_or_below_runs_and_never_to_images_or_source_files(fid, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    assert script.folder_for_images(str(tmp_path / "samples.npz")) == Path("runs") / "evaluations" / "samples.npz"
    for i in range(2):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"output=runs/evaluations/.* is inside images=\."):
        run_fid("images=.", REFERENCE, "evaluation.detector=digits", "cpu_threads=1")
    monkeypatch.chdir(REPOSITORY)
    in_run, copied = tmp_path / "run" / "checkpoints" / "step_0000004", tmp_path / "copies" / "step_0000004"
    assert script.results_folder(in_run) == tmp_path / "run" / "evaluations"
    assert script.results_folder(copied) == tmp_path / "copies" / "evaluations"
    for folder in (Path("step_0000004"), Path("checkpoints/step_0000004")):
        assert script.results_folder(folder) == REPOSITORY / folder.parent / "step_0000004_evaluations"


def test_a_sit_run_is_evaluated_in_training_and_swept_over_solvers_and_guidance(sit, fid, tmp_path):
    lines = fid("out", f"checkpoint={sit}", "solver=[heun,euler]")
    assert lines[0]["metrics"] == pytest.approx(evaluations(sit)[4, 1.0], rel=1e-4)
    assert [line["cost"]["network_evaluations"] for line in lines] == [3, 2]
    sparse = fid("out", f"checkpoint={sit}", "guidance=sparse", "guidance.w=[1,2]")[2:]
    assert [(line["point"]["guidance"], line["point"]["guidance.w"]) for line in sparse] == [("sparse", 1.0), ("sparse", 2.0)]
    assert [line["cost"]["network_evaluations"] for line in sparse] == [3, 6]
    assert sparse[0]["metrics"] == pytest.approx(lines[0]["metrics"], rel=1e-4)  # w=1 with r_strong=0 is no guidance
    assert 0.5 < sparse[1]["cost"]["gflops_per_image"] / sparse[0]["cost"]["gflops_per_image"] / 2 < 1
    assert len(fid("out", f"checkpoint={sit}", "guidance=sparse", "guidance.w=[1,2]")) == 4  # all points were finished


def test_a_sweep_covers_checkpoints_of_two_diffusions_and_autoguidance_loads_a_second_network(edm, sit, fid, tmp_path):
    lines = fid("out", f"checkpoint=[{edm},{sit}]", "num_steps=[1,2]", "num_samples=2")
    assert [line["point"]["num_steps"] for line in lines] == [1, 2, 1, 2]
    (line,) = fid("euler", f"checkpoint={sit}", "solver=euler", "num_samples=2")
    assert line["point"]["solver"] == line["shown"]["solver"] == "euler"
    assert (tmp_path / "out" / "results.png").exists()
    (line,) = fid("auto", f"checkpoint={edm}", "guidance=autoguidance", f"guidance.checkpoint={edm}", "num_samples=2")
    assert line["point"]["guidance.checkpoint"].endswith("step_0000004") and line["cost"]["network_evaluations"] == 6
    with pytest.raises(UserError, match="S_churn is not a setting"):
        fid("churn", f"checkpoint=[{edm},{sit}]", "S_churn=1")


def test_images_on_disk_get_the_figures_of_the_same_samples_from_a_checkpoint(edm, fid, tmp_path):
    from_checkpoint = fid("a", f"checkpoint={edm}")[0]["metrics"]
    settings = ["seeds=0-69", "num_steps=2", "batch_size=35", "cpu_threads=1"]
    run_sample(f"checkpoint={edm}", f"output={tmp_path / 'samples'}", *settings)
    digits = ["evaluation.detector=digits", REFERENCE]
    from_npz = fid("b", f"images={tmp_path / 'samples' / 'samples_0-69.npz'}", *digits)[0]["metrics"]
    assert from_npz == pytest.approx(from_checkpoint, rel=1e-4)
    assert fid("c", f"images={tmp_path / 'samples'}", *digits)[0]["metrics"] == from_npz  # the file names hold the labels


def test_images_that_state_their_background_need_a_reference_with_the_same_one(fid, tmp_path):
    digits = open_images(REPOSITORY / "evaluations" / "digits_reference.npz")
    sets = {}
    for colour in ("lightblue", "white"):
        sets[colour] = tmp_path / f"{colour}.npz"
        each = (image for batch in digits.batches(500) for image in batch)
        write_npz(sets[colour], each, digits.shape, digits.labels, background=colour)
    blue, white = (f"reference={file}" for file in sets.values())
    images = [f"images={sets['lightblue']}", "evaluation.detector=digits"]
    assert fid("blue", *images, blue)[0]["metrics"]["precision_digits"] == 1
    with pytest.raises(UserError, match="white.npz was made with background=white, but evaluation.background=lightblue"):
        fid("white", *images, white)
    with pytest.raises(UserError, match="^images=.*lightblue.npz was made with background=lightblue, but .*background=white"):
        fid("white", *images, white, "evaluation.background=white")


def test_results_of_images_in_the_order_of_the_files_are_kept_apart(fid, tmp_path, capsys):
    images = [f"images={REPOSITORY / 'evaluations' / 'digits_reference.npz'}", "evaluation.detector=digits", REFERENCE]
    (line,) = fid("out", *images)
    assert line["point"]["order"] == line["about"]["order"] == "fixed"
    for entries in (line["point"], line["about"]):  # as earlier versions wrote it
        del entries["order"]
    (tmp_path / "out" / "results.jsonl").write_text(json.dumps(line) + "\n")
    capsys.readouterr()
    assert len(fid("out", *images)) == len(fid("out", *images)) == 2
    head, first, second = capsys.readouterr().out.splitlines()[:3]
    assert "order" in head.split() and ("fixed" in first, "fixed" in second) == (False, True)
    assert "*" not in first + second and "~" not in first + second  # and not compared


def test_weights_raw_evaluates_the_network_instead_of_its_ema(edm, fid, tmp_path):
    ema, raw = fid("both", f"checkpoint={edm}", "weights=[ema,raw]")
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
        (["images=evaluations/digits_reference.npz", REFERENCE, "num_samples=1798"], "num_samples=1798.*1797"),
        (["images=evaluations/digits_reference.npz", REFERENCE, "num_samples=1"], "num_samples=1: a Frechet distance needs"),
        (["images=a.npz", "cfg_scale=2"], "cfg_scale= applies to sampling"),
        (["images=a.npz", "ema_length=0.1"], "ema_length= applies to sampling"),
        (["images=a.npz", "num_steps=3"], "num_steps= applies to sampling"),
        (["images=a.npz", "guidance=cfg"], "guidance= applies to sampling"),
        (["images=a.npz", "weights=raw"], "weights= applies to sampling"),
        (["images=a.npz", "first_seed=3"], "first_seed= applies to sampling"),
        (["images=a.npz", "autoencoder=identity"], "autoencoder= applies to sampling"),
        (["images=a.npz", "precision=fp32"], "precision= applies to sampling"),
        (["images=a.npz", "labels=balanced"], "labels= applies to sampling"),
        (["images=a.npz", "compile=blocks"], "compile= applies to sampling"),
        (["images=a.npz", "+jitter=1"], "jitter= applies to sampling"),
        (["checkpoint=a", "guidance=cfg", "cfg_scale=2", "guidance.cfg_scale=3"], "cfg_scale=2.* and guidance.cfg_scale=3"),
        (["checkpoint=a", "guidance=cfg", "cfg_scale=[1,2]", "guidance.cfg_scale=[1,3]"], "cfg_scale=.1.0, 2.* and guidance.cfg"),
        (["checkpoint=a", "cfg_scale=[1.0,2.0]"], "cfg_scale=.1.0, 2.0. needs guidance=cfg"),
        (["checkpoint=a", "reference=b.npz", "evaluation.reference=c.npz"], "reference=b.npz and evaluation.reference=c.npz"),
        (["images=a.npz", "weights=[ema,best]"], r"^weights\[1\]='best'"),
        (["checkpoint=a", "weights=[]"], r"weights=\[\]: .*at least 1 item"),
        (["checkpoint={edm}", "num_steps=[]"], r"num_steps=\[\] lists no value"),
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
    assert checked(["train.precision=bf16", "eval.precision=fp32"]).sample.precision == "bf16"
    run = train("run", "train.num_steps=2", "train.lr=1e-2", "train.precision=bf16")
    points = [fid(name, f"checkpoint={run}", *given)[0] for name, given in (("own", []), ("asked", ["precision=fp32"]))]
    assert [point["point"]["precision"] for point in points] == ["bf16", "fp32"]
    assert points[0]["metrics"] != points[1]["metrics"]
    run_sample(f"checkpoint={run}", f"output={tmp_path / 'images'}", "seeds=0", *FID[1:2], "cpu_threads=1")
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
    lines = [fid("out", f"checkpoint={edm}", *given)[-1] for given in ((), ("labels=balanced",), ("first_seed=70",))]
    assert len({line["metrics"]["fd_digits"] for line in lines}) == 3 and sampled[140:] == list(range(70, 140))
    about = [(line["about"]["labels"], line["about"]["first_seed"]) for line in lines]
    assert about == [("random", 0), ("balanced", 0), ("random", 70)]
    assert "balanced" in (tmp_path / "out" / "results.md").read_text()


def test_the_points_of_a_checkpoint_share_its_network(edm, fid, monkeypatch):
    load._load_network.cache_clear()
    built, build = [], schema.Model.build
    monkeypatch.setattr(schema.Model, "build", lambda model, data: built.append(model) or build(model, data))
    fid("out", f"checkpoints={edm}", "guidance=cfg", "cfg_scale=[1.0,1.5,2.0]", "num_samples=4")
    assert len(built) == 2


def test_differences_are_judged_group_by_group():
    """Values vary by 10 between groups, but `above` always exceeds `first` by about 1. Separate errors would hide this."""
    low = [10.0 * group for group in range(10)]
    first, above, other = (
        {"metrics": {"fid": fid}, "jackknife": {"fid": values}}
        for fid, values in ((45.0, low), (46.05, [x + 1 + x / 1000 for x in low]), (46.05, low[::-1]))
    )
    assert standard_error(low) > 50
    assert differ(first, above, "fid") is True and differ(first, first, "fid") is False and not differ(first, other, "fid")
    assert differ(first, first | {"jackknife": {}}, "fid") is None  # too few samples: the tables show no mark
