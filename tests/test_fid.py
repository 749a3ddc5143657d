"""Evaluation during training and by fid.py: the same figures, shared between processes, finished points kept."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from conftest import LAUNCH_2, REPOSITORY, composed, finish, forget_accelerate, losses, metrics, start
from PIL import Image

from configs import schema
from evaluations.suite import display_name, metrics_of

NAMES = [metric.name for metric in metrics_of("digits")]
EVAL = ["eval.every=2", "eval.num_samples=70", "eval.num_steps=2", "eval.batch_size=35", "train.num_steps=4", "train.lr=1e-2"]
FID = ["num_samples=70", "num_steps=2", "batch_size=35", "cpu_threads=1"]


def evaluations(run):
    return {record["step"]: record for record in metrics(run) if "evaluation_sec" in record}


def training_losses(run):
    return {record["step"]: record["loss"] for record in metrics(run) if "loss" in record}


@pytest.fixture
def fid(tmp_path):
    """fid(output, *overrides) -> lines of results.jsonl."""
    import fid as script

    def run(output, *overrides):
        forget_accelerate()
        script.main(composed([f"output={tmp_path / output}", *FID, *overrides], "fid"))
        return [json.loads(line) for line in (tmp_path / output / "results.jsonl").read_text().splitlines()]

    return run


def test_training_is_the_same_with_and_without_evaluation(train):
    with_evaluation, without = train("with", *EVAL), train("without", *EVAL, "eval.every=0")
    assert training_losses(with_evaluation) == losses(without)
    records = evaluations(with_evaluation)
    assert list(records) == [2, 4]
    assert {f"{name}70/cfg{scale}" for name in NAMES for scale in ("1.0", "1.5")} < records[4].keys()


def test_an_evaluation_that_an_interruption_cut_off_is_made_up_for(train):
    whole = evaluations(train("whole", *EVAL))[4]
    run = train("run", *EVAL)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert "evaluation_sec" in lines[-1]
    (run / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    train("run", *EVAL)
    repeated = evaluations(run)[4]
    assert {k: v for k, v in repeated.items() if k != "evaluation_sec"} == {
        k: v for k, v in whole.items() if k != "evaluation_sec"
    }
    before = (run / "metrics.jsonl").read_text()
    train("run", *EVAL)
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluation.reference=null", "evaluation.reference=None does not exist; give a folder"),
        ("evaluation.reference=/nonexistent.npz", "/nonexistent.npz does not exist"),
        (
            "evaluation.detector=inception evaluation.weights=/nonexistent.pth",
            "/nonexistent.pth does not hold Inception",
        ),
    ],
)
def test_an_evaluation_that_cannot_work_is_found_before_training(train, tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        train("run", *EVAL, *override.split())
    assert not (tmp_path / "run").exists()


def test_fid_gives_the_figures_of_training_and_sweeps_keep_what_is_done(train, fid, tmp_path):
    run = train("run", *EVAL, "checkpoint.every=2")
    records = evaluations(run)
    sweep = [f"checkpoints={run}", "guidance=cfg"]
    first = fid("out", *sweep, "cfg_scale=1.5")
    assert len(first) == 2
    lines = fid("out", *sweep, "cfg_scale=[1.0,1.5]")
    assert len(lines) == 4 and lines[:2] == first
    for line in lines:
        step, scale = int(line["point"]["checkpoint"][-7:]), line["point"]["cfg_scale"]
        assert list(line["metrics"]) == NAMES
        for name, value in line["metrics"].items():
            assert value == pytest.approx(records[step][display_name(name, 70, scale)], rel=1e-4)
    with open(tmp_path / "out" / "results.csv") as f:
        rows = list(csv.DictReader(f))
    swept = [(row["run"], row["step"], row["cfg_scale"]) for row in rows]
    assert swept == [("run", "2", "1.0"), ("run", "2", "1.5"), ("run", "4", "1.0"), ("run", "4", "1.5")]
    assert (tmp_path / "out" / "results.md").read_text().count("\n") == 6
    assert Image.open(tmp_path / "out" / "results.png").size[0] > 300


def test_a_point_that_was_cut_off_while_it_was_written_is_left_out_and_joined_to_nothing(tmp_path):
    import fid as fid_script

    conditions = {"num_samples": 70, "reference": "reference"}
    first, second = {"images": "a.npz"}, {"images": "b.npz"}
    fid_script.Results(tmp_path, conditions, "images").add(first, {"fid": 1.0}, {})
    with open(tmp_path / "results.jsonl", "a") as f:
        f.write('{"point": {"images": "b.npz"}')
    results = fid_script.Results(tmp_path, conditions, "images")
    assert results.find(first) and not results.find(second)
    results.add(second, {"fid": 2.0}, {})
    results = fid_script.Results(tmp_path, conditions, "images")
    assert results.find(first) and results.find(second)


def test_points_of_earlier_versions_are_found_again_whatever_they_were_measured_with(tmp_path):
    import fid as fid_script

    settings = {"images": "a.npz"}
    conditions = {
        "num_samples": 70,
        "precision": "fp32",
        "autoencoder": None,
        "detector": "digits",
        "detector_weights": None,
        "detector_precision": "fp32",
        "reference": "12-ab",
    }
    line = {"point": settings | conditions | {"content": "34-cd"}, "metrics": {"fd_digits": 1.5}}  # as they are on disk
    (tmp_path / "results.jsonl").write_text(json.dumps(line) + "\n")
    assert fid_script.Results(tmp_path, conditions, "34-cd").find(settings) == line
    assert fid_script.Results(tmp_path, conditions | {"num_samples": 71}, "34-cd").find(settings) is None
    assert fid_script.Results(tmp_path, conditions, "34-ce").find(settings) is None


def test_results_without_an_output_lie_in_the_run_or_beside_what_was_judged_never_among_the_source_files(tmp_path, monkeypatch):
    import fid as script

    monkeypatch.chdir(REPOSITORY)
    source = {file.name for file in (REPOSITORY / "evaluations").iterdir()}
    (tmp_path / "samples.npz").write_bytes((REPOSITORY / "evaluations" / "digits_reference.npz").read_bytes())
    reference = f"reference={tmp_path / 'samples.npz'}"
    forget_accelerate()
    script.main(composed([f"images={tmp_path / 'samples.npz'}", reference, "evaluation.detector=digits", "cpu_threads=1"], "fid"))
    assert (tmp_path / "samples.npz_evaluations" / "results.jsonl").exists()
    assert {file.name for file in (REPOSITORY / "evaluations").iterdir()} == source

    cfg = schema.check(composed([], "fid"), schema.FidConfig)
    in_run, copied = tmp_path / "run" / "checkpoints" / "step_0000004", tmp_path / "copies" / "step_0000004"
    assert script.default_folder(cfg, [in_run]) == tmp_path / "run" / "evaluations"
    assert script.default_folder(cfg, [copied]) == tmp_path / "copies" / "evaluations"
    for folder in (Path("step_0000004"), Path("checkpoints/step_0000004")):
        assert script.default_folder(cfg, [folder]) == REPOSITORY / folder.parent / "step_0000004_evaluations"


def test_a_sit_run_is_evaluated_in_training_and_swept_over_solvers_and_guidance(train, fid, tmp_path):
    run = train("run", "diffusion=sit", *EVAL)
    in_training = evaluations(run)[4]
    lines = fid("out", f"checkpoint={run}", "solver=[heun,euler]")
    for name in NAMES:
        assert lines[0]["metrics"][name] == pytest.approx(in_training[display_name(name, 70, 1.0)], rel=1e-4)
    assert [line["cost"]["network_evaluations"] for line in lines] == [3, 2]
    sparse = fid("out", f"checkpoint={run}", "guidance=sparse", "guidance.w=[1,2]")[2:]
    assert [(line["point"]["guidance"], line["point"]["guidance.w"]) for line in sparse] == [("sparse", 1.0), ("sparse", 2.0)]
    assert [line["cost"]["network_evaluations"] for line in sparse] == [3, 6]
    assert sparse[0]["metrics"] == pytest.approx(lines[0]["metrics"], rel=1e-4)  # w=1 with r_strong=0 is off
    assert 0.5 < sparse[1]["cost"]["gflops_per_image"] / sparse[0]["cost"]["gflops_per_image"] / 2 < 1
    with open(tmp_path / "out" / "results.csv") as f:
        assert [row["guidance.w"] for row in csv.DictReader(f)] == ["1.0", "2.0"]
    assert len(fid("out", f"checkpoint={run}", "guidance=sparse", "guidance.w=[1,2]")) == 4  # all are kept


def test_a_sweep_goes_over_checkpoints_of_two_diffusions_and_their_second_networks(train, fid, tmp_path):
    edm, sit = (train(name, f"diffusion={name}", *EVAL, "eval.every=0", "train.num_steps=1") for name in ("edm", "sit"))
    lines = fid("out", f"checkpoint=[{edm},{sit}]", "num_steps=[1,2]")
    assert [("S_churn" in line["point"], line["point"].get("solver")) for line in lines] == [(True, None)] * 2 + [
        (False, "heun")
    ] * 2
    assert (tmp_path / "out" / "results.png").exists()
    (line,) = fid("auto", f"checkpoint={edm}", "guidance=autoguidance", f"guidance.checkpoint={edm}")
    assert line["point"]["guidance.checkpoint"].endswith("step_0000001") and line["cost"]["network_evaluations"] == 6
    with pytest.raises(ValueError, match="S_churn=1 is not a setting of the sampler of diffusion=sit"):
        fid("churn", f"checkpoint=[{edm},{sit}]", "S_churn=1")
    with pytest.raises(ValueError, match="guidance.r_strong=0.5 must be below guidance.r_weak=0.5"):
        fid("ratios", f"checkpoint={edm}", "guidance=sparse", "guidance.r_strong=[0.25,0.5]")


def test_images_on_disk_are_judged_like_the_samples_they_are(train, fid, tmp_path):
    import sample

    run = train("run", *EVAL, "eval.every=0")
    from_checkpoint = fid("a", f"checkpoint={run}")[0]["metrics"]
    forget_accelerate()
    settings = ["seeds=0-69", "num_steps=2", "batch_size=35", "cpu_threads=1"]
    sample.main(composed([f"checkpoint={run}", f"output={tmp_path / 'samples'}", *settings], "sample"))
    digits = ["evaluation.detector=digits", f"reference={REPOSITORY / 'evaluations' / 'digits_reference.npz'}"]
    from_npz = fid("b", f"images={tmp_path / 'samples' / 'samples_0-69.npz'}", *digits)[0]["metrics"]
    assert from_npz == pytest.approx(from_checkpoint, rel=1e-4)
    (tmp_path / "samples" / "grid_0-69.png").unlink()
    from_folder = fid("c", f"images={tmp_path / 'samples'}", *digits)[0]["metrics"]
    assert from_folder == {name: from_npz[name] for name in NAMES if name != "class_agreement"}  # a folder holds no labels


def test_two_processes_give_the_figures_of_one(train, fid, tmp_path):
    run = train("run", *EVAL, "eval.every=0")
    one = fid("one", f"checkpoint={run}", "num_samples=71")[0]["metrics"]
    arguments = ["fid.py", f"checkpoint={run}", *FID, "num_samples=71", f"output={tmp_path / 'two'}"]
    code, output = finish(start(*arguments, launcher=LAUNCH_2))
    assert code == 0, output
    two = json.loads((tmp_path / "two" / "results.jsonl").read_text())["metrics"]
    assert two == pytest.approx(one, rel=1e-4)


def test_images_shared_unevenly_between_processes_come_back_in_order(tmp_path):
    code = """
import numpy as np, torch
from accelerate import Accelerator
from evaluations.classifiers import DIGITS_WEIGHTS, ClassifierDetector
from evaluations.images import open_images
from evaluations.reference import features_of_images
from sampling.evaluator import shared_features, shared_features_of_images
from evaluations.features import Features
accelerator, detector = Accelerator(), ClassifierDetector("digits", DIGITS_WEIGHTS)
images = open_images('evaluations/digits_reference.npz')
for stop in (1, 2, 7, 101):
    (together,) = shared_features_of_images(accelerator, images, [detector], 16, stop)
    (alone,) = features_of_images(images, [detector], 16, 0, stop)
    assert torch.allclose(together.pool, alone.pool, atol=1e-4), stop
    column = lambda start, stop: torch.arange(start, stop)[:, None].float()
    rows = lambda start, stop: [Features('x', column(start, stop), column(start, stop)), Features('y', -column(start, stop))]
    x, y = shared_features(accelerator, stop, rows)
    assert x.pool[:, 0].tolist() == list(range(stop)) and torch.equal(y.pool, -x.pool), stop
accelerator.end_training()
"""
    script = tmp_path / "check.py"
    script.write_text("import sys; sys.path.insert(0, '.')\n" + code)
    status, output = finish(start(str(script), launcher=LAUNCH_2))
    assert status == 0, output


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "give one of checkpoint=, checkpoints= and images=, not none of them"),
        (["images=a.npz", "checkpoint=b"], "not checkpoint and images"),
        (["checkpoints=nowhere"], "checkpoints: nowhere is not a folder; give a checkpoint such as"),
        (["images=a.npz"], "reference=None does not exist"),
        (["images=/nonexistent.npz", "reference=evaluations/digits_reference.npz"], "/nonexistent.npz is neither"),
        (
            ["images=evaluations/digits_reference.npz", "reference=evaluations/digits_reference.npz", "num_samples=1798"],
            "holds 1797",
        ),
        (["images=a.npz", "compile=reduce-overhead"], "^compile=reduce-overhead records CUDA graphs"),
        (["images=a.npz", "cfg_scale=2"], "cfg_scale=2 needs guidance=cfg or guidance=interval"),
        (["images=a.npz", "weights=[ema,best]"], r"weights=\['ema', 'best'\] is not accepted; use ema \| raw, or a list"),
    ],
)
def test_wrong_settings_are_refused_before_any_work(fid, tmp_path, monkeypatch, overrides, message):
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(ValueError, match=message):
        fid("out", *overrides)
    assert not (tmp_path / "out").exists()


def test_evaluation_of_the_shipped_configurations_is_complete():
    cfg = schema.check(composed(), schema.TrainConfig)
    assert cfg.evaluation.detector == "digits" and cfg.eval.every == cfg.train.num_steps
    assert composed(["data=imagenet256"]).evaluation.detector == "inception"
    reference = np.load(REPOSITORY / "evaluations" / "digits_reference.npz")
    assert reference["arr_0"].shape == (1797, 8, 8, 3)
