"""Runs, shards, images and results that commit f7b5337 wrote are read, resumed, sampled and reported (see data/f7b5337)."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import checked, forget_accelerate, metrics, renew_manifest, run_fid, run_sample, weights
from omegaconf import OmegaConf
from PIL import Image
from pydantic import create_model

import dit
import prepare_latents
import train
from checkpoints import load, store
from checkpoints.resume import check_resume
from checkpoints.run import RunFolder
from common.errors import UserError
from common.roles import Reported, SameRun
from common.types import NonNegativeFloat, settings
from configs import schema
from configs.command_line import parse_config
from configs.compose import compose_overrides
from configs.settings import flatten
from edm import EDM
from edm.sampler import HeunSampler
from evaluations import results
from extras.report.__main__ import main as report
from extras.report.experiments import group
from extras.report.runs import LOSS, read_runs
from latents.shards import LatentDataset

FIXTURE = Path(__file__).parent / "data" / "f7b5337"
RUN = Path("trained/tread")
COMMAND = shlex.split(json.loads((FIXTURE / RUN / "starts.jsonl").read_text())["command"])[2:]
# A key bias shifts all logits of a query alike, so its gradient is a rounding error, which Adam scales to a whole step.
KEY_BIAS = re.compile(r"blocks\.\d+\.attn\.qkv\.bias")


@pytest.fixture(autouse=True)
def copy(tmp_path, monkeypatch):
    """Fixture: the working folder is a copy of the files, and DiT-XS/2 is the network that they were made with."""
    shutil.copytree(FIXTURE, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setitem(dit.BACKBONES, "DiT-XS/2", (2, 4, 1, 2))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def run_train(*overrides):
    forget_accelerate()
    train.main(parse_config(compose_overrides([*COMMAND, *overrides]), schema.TrainConfig, [*COMMAND, *overrides]))


def contents(folder="."):
    """Return the bytes of all files, without locks and the files that a repeated command writes anew."""
    files = [file for file in Path(folder).rglob("*") if file.is_file() and file.name != ".lock"]
    rewritten = ("grid_", "samples_", "results.csv", "results.md", "results.png")
    return {str(file): file.read_bytes() for file in files if not file.name.startswith(rewritten)}


def test_shards_hold_the_pictures_and_encoding_them_again_writes_nothing():
    before = contents()
    dataset = LatentDataset("latents")
    pictures = [np.asarray(Image.open(file)) for file in sorted(Path("pictures").rglob("*.png"))]
    latents, labels = dataset.fetch(np.arange(24), np.zeros(24, dtype=bool))
    expected = (torch.from_numpy(np.stack(pictures)) / 127.5 - 1)[:, None]
    assert torch.equal(labels, torch.from_numpy(dataset.labels)) and dataset.labels.tolist() == sorted(dataset.labels)
    assert (latents - expected).abs().max() < 1e-3  # float16 in [-1, 1]
    forget_accelerate()
    arguments = "images=pictures output=latents autoencoder=identity kind=sample grey=true resolution=8 shard_size=16"
    prepare_latents.main(["encode", *arguments.split(), "sigma_data=0.5"])
    after, manifest = contents(), "latents/manifest.json"
    assert json.loads(after.pop(manifest)).items() >= json.loads(before.pop(manifest)).items() and after == before


def test_a_checkpoint_is_resumed_as_if_the_run_had_not_stopped():
    for file in ("checkpoints/step_0000006", "ema_snapshots"):
        shutil.rmtree(RUN / file)
    run_train()
    steps = "checkpoints/step_0000006"
    for file in ("model", "ema", "tracked_ema"):
        assert_close(weights(RUN, 6, file), weights(FIXTURE / RUN, 6, file))
    ours, stored = (torch.load(folder / RUN / steps / "optimizer.pt", weights_only=True)["state"] for folder in (Path(), FIXTURE))
    assert len(ours) == len(stored) and {int(state["step"]) for state in ours.values()} == {6}
    for own, state in zip(ours.values(), stored.values()):  # f7b5337 counts the parameters, which this version names
        scale = state["exp_avg"].abs().max().clamp(min=1e-4)  # below this, gradients are sums that cancel
        assert (own["exp_avg"] - state["exp_avg"]).abs().max() <= 1e-3 * scale
    line, expected = (next(line for line in metrics(run) if line["step"] == 6 and "loss" in line) for run in (RUN, FIXTURE / RUN))
    assert line.keys() >= expected.keys()
    assert [line[key] for key in ("images_seen", "epoch", "lr")] == [24, 1.0, 0.01]
    # The losses are means over the batches before and after the stop, and fall by 10% in 3 steps.
    assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert [level is None for level in line["loss_by_level"]] == [level is None for level in expected["loss_by_level"]]
    state = json.loads((RUN / steps / "state.json").read_text())
    assert state.items() >= {"step": 6, "ema_num_updates": 6, "data": LatentDataset("latents").fingerprint}.items()


def assert_close(ours, stored):
    """Check names and values. In two steps of Adam with lr=1e-2, weights move by up to 2e-2.

    Sums of up to 1,000 float32 products have relative errors below 1e-5 on any CPU. The same kind of CPU gives the same bits.
    """
    assert ours.keys() == stored.keys()
    for name, value in stored.items():
        difference = (ours[name] - value).abs()
        if KEY_BIAS.search(name):
            difference[..., 4:8] = 0
        assert difference.max() <= 1e-6, name


def test_a_complete_run_stays_as_it_is(caplog):
    before = contents()
    caplog.set_level("INFO")
    run_train()
    assert contents() == before and "this run is complete at step 6" in caplog.text


def test_results_of_a_run_whose_checkpoints_are_gone_are_renamed(caplog):
    earlier = (RUN / "metrics.jsonl").read_text()
    shutil.rmtree(RUN / "checkpoints")
    run_train()
    (renamed,) = RUN.glob("metrics_earlier_*")
    assert renamed.read_text() == earlier and len(metrics(RUN)) == 6
    assert "holds results of a run that reached step 6, but none of its checkpoints; training starts over; they" in caplog.text
    shutil.rmtree(RUN / "checkpoints")
    run_train("train.num_steps=4")
    assert len([*RUN.glob("metrics_earlier_*")]) == 2 and "holds results of a run with other settings" in caplog.text


def test_another_run_starts_from_its_weights():
    run_train("name=other", f"init_from={RUN}", "model.routes=[]", "model=dit", "train.num_steps=1", "eval.every=0")
    assert store.list_steps(Path("trained/other/checkpoints")).keys() == {1}


SAMPLED = {
    "generated/guided": ["seeds=0-4", "guidance=cfg", "cfg_scale=2", "output=generated/guided"],
    "generated/churn": ["seeds=0-2", "S_churn=2", "classes=[3,7]", "output=generated/churn"],
    "generated/ema_length": ["seeds=0-2", "ema_length=0.15", "output=generated/ema_length"],
    "trained/tread/generated/step_0000006_ema_none_4steps_*": ["seeds=0-2"],
}


@pytest.mark.parametrize("folder", SAMPLED)
def test_missing_images_are_added_to_a_folder_and_equal_the_older_ones(folder):
    (folder,) = Path().glob(folder)
    before, folders = contents(folder), {*folder.parent.iterdir()}
    command = next(given for name, given in SAMPLED.items() if folder.match(name))
    first = min(folder.glob("seed_000000_*.png"))
    pixels = np.asarray(Image.open(first)).astype(int)
    first.unlink()
    run_sample(f"checkpoint={RUN}", "num_steps=4", "cpu_threads=1", *command)
    after, added = contents(folder), min(folder.glob("seed_000000_*.png"))
    assert added.name.startswith(first.stem)  # this version appends the name of the class
    assert len(after) == len(before) + 1 and {*folder.parent.iterdir()} == folders
    assert all(after[name] == blob for name, blob in before.items() if name != str(first))
    assert np.abs(np.asarray(Image.open(added)) - pixels).max() <= 1  # other CPUs round differently


def test_finished_results_are_not_computed_again(caplog):
    before = contents()
    caplog.set_level("INFO")
    run_fid(f"checkpoint={RUN}", "num_samples=20", "num_steps=4", "guidance=cfg", "cfg_scale=[1.0,2.0]", "cpu_threads=1")
    assert "0 of 2 evaluations to do" in caplog.text and contents() == before


def test_results_of_images_on_disk_are_computed_again_in_the_new_order_beside_the_older_ones(caplog):
    caplog.set_level("INFO")
    results = Path("evaluated/results.jsonl")
    older = results.read_text()
    images = ["images=generated/guided/samples_0-3.npz", "reference=reference.npz", "evaluation.detector=digits"]
    for number in (1, 0):
        caplog.clear()
        run_fid(*images, "output=evaluated", "cpu_threads=1")
        assert f"{number} of 1 evaluations to do" in caplog.text
        assert results.read_text().startswith(older) and results.read_text().count("\n") == older.count("\n") + 1


def test_the_report_shows_the_figures_of_training_and_of_fid(capsys):
    report(["trained"])
    text = capsys.readouterr().out
    results = [json.loads(line)["metrics"] for line in (RUN / "evaluations" / "results.jsonl").read_text().splitlines()]
    figures = [line["metrics"] for line in metrics(RUN) if line["step"] == 6 and "metrics" in line] + results
    assert "Left out" not in text and all(f"{figure['fd_digits']:.2f}" in text for figure in figures)
    ((run,), problems) = read_runs([Path("trained")])
    assert problems == {} and run.figures[LOSS].keys() == {3, 6} and run.speeds.keys() == {3, 6}


@pytest.mark.parametrize("name", sorted(file.name for file in (FIXTURE / "configurations").iterdir()))
def test_configurations_of_all_choices_are_read(name, tmp_path):
    folder = tmp_path / "step_0000000"
    folder.mkdir()
    shutil.copy(Path("configurations") / name, folder / "config.yaml")
    renew_manifest(folder)
    cfg, stored = load.load_config(folder), store.read_config(folder)
    read = json.loads(json.dumps(cfg.model_dump()))

    def holds(found, expected):
        if isinstance(expected, dict):
            return all(key in found and holds(found[key], value) for key, value in expected.items())
        return found == expected

    assert holds(read, json.loads(json.dumps(stored)))


# ----------------------------------------------------------------------------------------------------------------------
# A version with one more key, which reads what earlier versions wrote.


@settings
class DampedHeun(HeunSampler):
    damping: NonNegativeFloat = 0.0


@settings
class DampedEDM(EDM):
    sampler: Reported[DampedHeun] = DampedHeun()


@pytest.fixture
def damped(monkeypatch):
    """Fixture: EDM's sampler has one more setting, whose default is what earlier versions did."""
    load._load_config.cache_clear()
    monkeypatch.setitem(schema.DIFFUSIONS, "edm", f"{__name__}:DampedEDM")
    yield
    load._load_config.cache_clear()


@pytest.fixture
def with_patience(monkeypatch):
    """Fixture: train.patience is one more key of training, which distinguishes experiments and was 0 in earlier versions."""
    load._load_config.cache_clear()
    train_group = create_model("Train", __base__=schema.Train, patience=(SameRun[int], 0))
    monkeypatch.setattr(schema, "TrainConfig", create_model("TrainConfig", __base__=schema.TrainConfig, train=(train_group, ...)))
    yield
    load._load_config.cache_clear()


@pytest.mark.parametrize("folder", SAMPLED)
def test_a_new_sampler_setting_neither_refuses_nor_duplicates_a_folder(damped, folder):
    test_missing_images_are_added_to_a_folder_and_equal_the_older_ones(folder)
    if "output=generated/guided" in SAMPLED.get(folder, ()):
        with pytest.raises(UserError, match="sampler.damping: 0.0 -> 0.5"):
            run_sample(f"checkpoint={RUN}", "num_steps=4", "+damping=0.5", *SAMPLED[folder])


def test_a_new_sampler_setting_gets_another_default_folder_only_if_it_is_set(damped):
    for damping in (0.0, 0.5, 0.5):
        run_sample(f"checkpoint={RUN}", "num_steps=4", f"+damping={damping}", "seeds=0", "npz=false")
    folders = sorted((RUN / "generated").iterdir())
    assert len(folders) == 2 and {len([*folder.glob("seed_*")]) for folder in folders} == {1, 2}


def test_a_new_sampler_setting_repeats_no_evaluation_and_refuses_no_resume(damped, caplog):
    test_finished_results_are_not_computed_again(caplog)
    test_a_checkpoint_is_resumed_as_if_the_run_had_not_stopped()


def test_a_new_key_neither_refuses_a_resume_nor_splits_the_seeds_of_an_experiment(with_patience):
    cfg = load.load_run_config(RUN)
    assert cfg.train.patience == 0
    check_resume(RUN / "checkpoints" / "step_0000006", cfg)
    other = cfg.model_copy(update={"train": cfg.train.model_copy(update={"patience": 3})})
    with pytest.raises(UserError, match="train.patience: 0 -> 3"):
        check_resume(RUN / "checkpoints" / "step_0000006", other)
    for seed, stored in ((1, cfg), (2, other)):  # both runs store the new key
        name = f"tread_seed{seed}"
        shutil.copytree(RUN, f"trained/{name}", ignore=shutil.ignore_patterns("checkpoints", "evaluations"))
        RunFolder("trained", name).write_config(stored.model_copy(update={"seed": seed}).model_dump())
    experiments = group(read_runs([Path("trained")])[0])[0]["Other runs on latents"]
    assert sorted([run.cfg.seed for run in experiment.runs] for experiment in experiments) == [[0, 1], [2]]


def test_a_new_condition_repeats_no_evaluation_and_splits_no_figure(monkeypatch):
    monkeypatch.setitem(results.DEFAULTS, "crop", "none")
    stored = json.loads((RUN / "evaluations" / "results.jsonl").read_text().splitlines()[0])
    about = {key: stored["point"][key] for key in ("num_samples", "detector", "first_seed", "labels", "reference")}
    names = ("checkpoint", "weights", "cfg_scale", "num_steps", "precision")
    point = results.Point({key: stored["point"][key] for key in names}, stored["point"]["content"], {})
    folder = RUN / "evaluations"
    assert results.Results(folder, about).find(point) and results.Results(folder, about | {"crop": "none"}).find(point)
    assert not results.Results(folder, about | {"crop": "square"}).find(point)


def test_a_removed_key_is_accepted_with_the_value_that_is_now_fixed(monkeypatch):
    load._load_config.cache_clear()
    text = (RUN / "config.yaml").read_text()
    (RUN / "config.yaml").write_text(text.replace("  log_every: 3\n", "  log_every: 3\n  fused: true\n"))
    with pytest.raises(UserError, match="^trained/tread/config.yaml cannot be read: unknown keys: train.fused$"):
        load.load_run_config(RUN)
    monkeypatch.setattr(schema.TrainConfig, "removed_keys", {"train.fused": True})
    assert load.load_run_config(RUN).name == "tread"
    monkeypatch.setattr(schema.TrainConfig, "removed_keys", {"train.fused": False})
    load._load_config.cache_clear()
    with pytest.raises(UserError, match="train.fused=True, but this version has no such key and always uses False"):
        load.load_run_config(RUN)
    load._load_config.cache_clear()


def test_every_key_with_a_default_is_in_the_configurations():
    """A default in the schema is the value of older runs. If a command's YAML files lack the key, nobody sees its value."""
    for choices in ([], ["model=sprint", "alignment=repa", "diffusion=sit"]):
        composed = OmegaConf.to_container(compose_overrides(choices))
        filled = {f"data.{key}" for key in ("scale_factor", "latents_mean", "latents_std", "resolution")}  # read from the latents
        assert {key for key in flatten(checked(choices).model_dump())} - flatten(composed).keys() == filled
