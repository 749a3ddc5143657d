"""Files of format 1: the number, and how settings are added and removed without another number (docs/architecture.md)."""

import json
import shlex
import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from conftest import checked, metrics, renew_manifest, run_fid, run_sample, run_train
from omegaconf import OmegaConf
from PIL import Image
from pydantic import create_model

import dit
import prepare_latents
from checkpoints import store
from checkpoints.checkpoint import read_checkpoint, read_config
from checkpoints.run import RunFolder
from cli.compose import compose_overrides
from common.errors import UserError
from common.files import REPOSITORY
from common.roles import SameRun
from common.types import NonNegativeFloat, settings_dataclass
from configs import schema
from configs.settings import flatten
from edm import EDM
from edm.sampler import HeunSampler
from evaluations.record import Results, read_records
from evaluations.result_settings import RESULT_SETTINGS, ResultSetting
from extras.report.experiments import group
from extras.report.runs import read_runs
from latents.dataset import LatentDataset
from latents.shards import ShardInfo, serialize_shard
from training.start import check_resume

RUN, CHECKPOINT = Path("runs/run"), Path("runs/run/checkpoints/step_0000004")
TRAIN = ["model=tread", "model.backbone=DiT-XS/4", "train.num_steps=4", "checkpoint.every=2", "checkpoint.keep_last=2"]
IMAGES = [f"evaluation.reference={REPOSITORY / 'evaluations' / 'digits_reference.npz'}", "evaluation.detector=digits"]
FID = [f"checkpoint={RUN}", "guidance=none", "evaluation.num_samples=20", "sampler.num_steps=2", *IMAGES]
SAMPLED = {  # arguments of sample.py by folder
    "guided": ["guidance=cfg", "guidance.cfg_scale=2", "output=guided"],
    "runs/run/generated/step_0000004_ema_none_2steps_*": ["guidance=none"],
}
PIXELS = ["autoencoder=identity", "kind=sample", "resolution=8", "labels=none", "shard_size=2", "num_workers=0"]


def train(*overrides, name="run"):
    return run_train(Path("runs"), name, *TRAIN, *overrides)


def sample(*overrides):
    run_sample(f"checkpoint={RUN}", "seeds=0-1", "sampler.num_steps=2", *overrides)


def encode():
    prepare_latents.main(["encode", "images=pictures", "output=latents", *PIXELS])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Fixture: a folder with a run, its images and results, and latents, which this version has written."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "pictures").mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)):
        Image.fromarray(pixels).save(folder / "pictures" / f"{number}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        encode()
        train()
        for arguments in SAMPLED.values():
            sample(*arguments)
        run_fid(*FID)
    return folder


@pytest.fixture(autouse=True)
def copy(made, tmp_path, monkeypatch):
    """Fixture: the working folder is a copy of the files."""
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")


def contents():
    """Return the bytes of all files, without locks and the files that a repeated command writes anew."""
    rewritten = (".lock", "grid_", "samples_", "results.csv", "results.md", "results.png")
    return {str(file): file.read_bytes() for file in Path().rglob("*") if file.is_file() and not file.name.startswith(rewritten)}


def store_number_in_run(number):
    """Write another number into the configurations of the run, or none if it is None."""
    for file in (RUN / "config.yaml", *RUN.glob("checkpoints/*/config.yaml")):
        text = file.read_text()
        assert text.startswith("format: 1\n")
        file.write_text(text.replace("format: 1\n", "" if number is None else f"format: {number}\n", 1))
    for folder in RUN.glob("checkpoints/*"):
        renew_manifest(folder)


def store_number_in_latents(number):
    manifest = json.loads(Path("latents/manifest.json").read_text())
    assert manifest.pop("format") == 1
    Path("latents/manifest.json").write_text(json.dumps(manifest | ({} if number is None else {"format": number})))


# ----------------------------------------------------------------------------------------------------------------------
# Files that were written when the format was defined. The bytes of others CPUs differ in the last digits.

STORED = REPOSITORY / "tests" / "data" / "format_1"


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Fixture: the working folder is a copy of the stored files, and DiT-XS/2 is the network that they were made with."""
    shutil.copytree(STORED, tmp_path / "stored")
    monkeypatch.chdir(tmp_path / "stored")
    monkeypatch.setitem(dit.BACKBONES, "DiT-XS/2", (2, 4, 1, 2))
    return Path("trained/tread")


def repeat(run, *overrides):
    command = shlex.split(json.loads((run / "starts.jsonl").read_text().splitlines()[0])["command"])[2:]
    run_train(Path("trained"), "tread", *command, *overrides)


def test_stored_latents_hold_the_pictures_and_encoding_them_again_adds_only_how_they_were_labelled(stored):
    before = contents()
    pictures = [np.asarray(Image.open(file)) for file in sorted(Path("pictures").rglob("*.png"))]
    latents, _ = LatentDataset("latents").fetch(np.arange(24), np.zeros(24, dtype=bool))
    assert (latents[:, 0] - torch.from_numpy(np.stack(pictures)) / 127.5 + 1).abs().max() < 1e-3  # float16 in [-1, 1]
    arguments = "images=pictures output=latents autoencoder=identity kind=sample grey=true resolution=8 shard_size=16"
    prepare_latents.main(["encode", *arguments.split(), "sigma_data=0.5", "num_workers=0"])
    after, added = contents(), b' "label_by": "auto",\n'
    assert after["latents/manifest.json"].count(added) == 1
    after["latents/manifest.json"] = after["latents/manifest.json"].replace(added, b"")
    assert after == before


def test_a_stored_run_resumes_with_its_weights_and_repeats_its_last_steps(stored):
    """Adam scales gradients that are rounding errors, such as that of a key bias, to whole steps, so losses are compared."""
    evaluations = read_records(stored / "evaluations" / "results.jsonl")
    shutil.rmtree(stored / "checkpoints" / "step_0000006")
    repeat(stored)
    (line, expected) = (metrics(folder)[-1] for folder in (stored, STORED / stored))
    assert line["step"] == expected["step"] == 6 and line["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    again = read_records(stored / "evaluations" / "results.jsonl")
    assert sorted((r.step, r.checkpoint or "") for r in again) == sorted((r.step, r.checkpoint or "") for r in evaluations)
    for record in again:
        (same,) = (r for r in evaluations if (r.step, r.key) == (record.step, record.key))
        assert record.metrics.keys() == same.metrics.keys()
        for name in {"fd_digits", "validation_loss"} & record.metrics.keys():  # the others are fractions of 20 images
            assert record.metrics[name] == pytest.approx(same.metrics[name], rel=1e-2)


def test_a_stored_run_is_evaluated_sampled_and_reported(stored, caplog):
    before = contents()
    caplog.set_level("INFO")
    for guidance in ([], ["guidance=cfg", "guidance.cfg_scale=2"]):
        run_fid(f"checkpoint={stored}", *guidance)
    assert caplog.text.count("0 of 1 evaluations to do, of 20 samples") == 2
    run_sample(f"checkpoint={stored}", "seeds=0-2", "output=generated", "npz=false")
    assert {*contents()} - {*before} == {next(str(file) for file in Path("generated").glob("seed_000002_*"))}
    assert all(content == before[name] for name, content in contents().items() if name in before)
    repeat(stored, "train.num_steps=7", f"init_from={stored}", "init_state=weights", "name=new")
    runs, problems = read_runs([Path("trained")])
    (run,) = (run for run in runs if run.path.name == "tread")
    measures = {measure.metric: curve for measure, curve in run.figures.items() if measure.guidance == "none"}
    assert not problems and [*measures["fd_digits"]] == [*measures["validation_loss"]] == [3, 6]


COMMANDS = {
    "resume": lambda: train("train.num_steps=5"),
    "init_from": lambda: train(f"init_from={RUN}", name="new"),
    "sample": lambda: sample("output=new"),
    "fid": lambda: run_fid(*FID, "output=new"),
    "guidance": lambda: sample("output=new", "guidance=autoguidance", f"guidance.checkpoint={RUN}"),
    "data.path": lambda: train("data=custom", "data.path=latents", "train.num_steps=1", name="custom"),
    "reference": lambda: run_fid(*FID, "evaluation.reference=latents", "output=other"),
    "images": lambda: run_fid("images=latents", *IMAGES, "output=new"),
    "encode": encode,
    "inspect": lambda: prepare_latents.main(["inspect", "path=latents", "grid=none"]),
}
READS_LATENTS = ("data.path", "reference", "images", "encode", "inspect")


@pytest.mark.parametrize("command", COMMANDS)
def test_another_number_is_refused_by_name_and_nothing_is_written(command):
    file = "latents/manifest.json" if command in READS_LATENTS else f"{CHECKPOINT}/config.yaml"
    store_number_in_latents(2) if command in READS_LATENTS else store_number_in_run(2)
    before = contents()
    with pytest.raises(UserError, match=f"{file} has format 2, but this version reads format 1$") as refused:
        COMMANDS[command]()
    assert "\n" not in str(refused.value) and contents() == before


def test_a_missing_number_means_1():
    store_number_in_run(None)
    store_number_in_latents(None)
    for command in ("resume", "init_from", "sample", "fid", "data.path", "reference", "encode"):
        COMMANDS[command]()
    assert store.read_state(RUN / "checkpoints" / "step_0000005")["step"] == 5 and len(LatentDataset("latents")) == 4


def test_a_shard_without_a_manifest_may_store_the_number():
    info = ShardInfo(kind="sample", scale_factor=1.0, autoencoder="identity", resolution=8, num_classes=1)
    shard = Path("latents/latents_00000.safetensors")
    latents, labels = LatentDataset(shard).fetch(np.arange(2), np.zeros(2, dtype=bool))
    for number in (1, 2):
        content = serialize_shard(shard, info, latents=latents, labels=labels)
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        header["__metadata__"]["about"] = json.dumps(json.loads(header["__metadata__"]["about"]) | {"format": number})
        header = json.dumps(header).encode()
        shard.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
        if number == 1:
            assert len(LatentDataset(shard)) == 2
    with pytest.raises(UserError, match=f"^{shard} has format 2, but this version reads format 1$"):
        LatentDataset(shard)


# ----------------------------------------------------------------------------------------------------------------------
# A version with one more key, which reads what this version has written.


@settings_dataclass
class DampedHeun(HeunSampler):
    damping: NonNegativeFloat = 0.0


@settings_dataclass
class DampedEDM(EDM):
    Sampler: ClassVar = DampedHeun


@pytest.fixture
def damped(monkeypatch):
    """Fixture: EDM's sampler has one more setting, whose default is what the sampler did before."""
    monkeypatch.setitem(schema.DIFFUSIONS, "edm", f"{__name__}:DampedEDM")


@pytest.fixture
def with_patience(monkeypatch):
    """Fixture: train.patience is one more key of training, which distinguishes experiments and was 0 before."""
    train_group = create_model("Train", __base__=schema.Train, patience=(SameRun[int], 0))
    monkeypatch.setattr(schema, "TrainConfig", create_model("TrainConfig", __base__=schema.TrainConfig, train=(train_group, ...)))


@pytest.mark.parametrize("folder", SAMPLED)
def test_a_new_sampler_setting_neither_refuses_nor_duplicates_a_folder_of_images(damped, folder):
    (found,) = Path().glob(folder)
    before, folders = contents(), {*found.parent.iterdir()}
    min(found.glob("seed_000000_*.png")).unlink()
    sample(*SAMPLED[folder])
    assert contents() == before and {*found.parent.iterdir()} == folders
    if "output=guided" in SAMPLED[folder]:
        with pytest.raises(UserError, match="sampler.damping: 0.0 -> 0.5"):
            sample("sampler.damping=0.5", *SAMPLED[folder])


def test_a_new_sampler_setting_gets_another_default_folder_only_if_it_is_set(damped):
    for damping in (0.0, 0.5, 0.5):
        sample("guidance=none", f"sampler.damping={damping}")
    assert len([*(RUN / "generated").iterdir()]) == 2


def test_a_new_sampler_setting_repeats_no_evaluation_and_refuses_no_resume(damped, caplog):
    before = contents()
    caplog.set_level("INFO")
    run_fid(*FID)
    assert "0 of 1 evaluations to do" in caplog.text and contents() == before
    train("train.num_steps=5")
    assert metrics(RUN)[-1]["step"] == 5


def test_a_new_key_neither_refuses_a_resume_nor_splits_the_seeds_of_an_experiment(with_patience):
    cfg = read_config(RUN)
    assert dict(cfg.train)["patience"] == 0
    check_resume(read_checkpoint(CHECKPOINT), cfg)
    other = cfg.model_copy(update={"train": cfg.train.model_copy(update={"patience": 3})})
    with pytest.raises(UserError, match="train.patience: 0 -> 3"):
        check_resume(read_checkpoint(CHECKPOINT), other)
    for seed, stored in ((1, cfg), (2, other)):  # both runs store the new key
        name = f"run_seed{seed}"
        shutil.copytree(RUN, f"runs/{name}", ignore=shutil.ignore_patterns("checkpoints", "evaluations"))
        RunFolder("runs", name).write_config(stored.model_copy(update={"seed": seed}).model_dump())
    (experiments,) = group(read_runs([Path("runs")])[0])[0].values()
    assert sorted([run.cfg.seed for run in experiment.runs] for experiment in experiments) == [[0, 1], [2]]


def test_a_new_condition_repeats_no_evaluation_and_splits_no_figure(monkeypatch):
    monkeypatch.setitem(RESULT_SETTINGS, "crop", ResultSetting("value", value_if_missing="none"))
    results = Results(RUN / "evaluations", RUN)
    stored = results.records[-1]
    for crop in ({}, {"crop": "none"}, {"crop": "square"}):
        wanted = stored.model_copy(update={"settings": stored.settings | crop})
        assert (results.find(wanted) == stored) == (crop != {"crop": "square"})


def test_a_removed_key_is_accepted_with_the_value_that_is_now_fixed(monkeypatch):
    text = (RUN / "config.yaml").read_text()
    (RUN / "config.yaml").write_text(text.replace("  log_every: 1\n", "  log_every: 1\n  fused: true\n"))
    with pytest.raises(UserError, match="^runs/run/config.yaml cannot be read: unknown keys: train.fused$"):
        read_config(RUN)
    monkeypatch.setattr(schema.TrainConfig, "removed_keys", {"train.fused": True})
    assert read_config(RUN).name == "run"
    monkeypatch.setattr(schema.TrainConfig, "removed_keys", {"train.fused": False})
    with pytest.raises(UserError, match="train.fused=True, but this version has no such key and always uses False"):
        read_config(RUN)


@pytest.mark.parametrize(
    "choices",
    [
        ["experiment=table2_dit_b2_tread"],
        ["model=sprint", "diffusion=sit", "alignment=repa", "guidance=interval", "guidance.level_lo=0", "guidance.level_hi=1"],
        ["model=lightningdit_sprint", "diffusion=sit", "guidance=path_drop"],
        ["model=lightningdit_tread", "guidance=sparse"],
        ["model=dit", "diffusion=ddpm", "guidance=autoguidance", "guidance.checkpoint=weak"],
    ],
    ids=lambda choices: choices[0],
)
def test_configurations_of_all_choices_are_read_as_they_were_written(choices, tmp_path):
    cfg = checked(choices)
    RunFolder(str(tmp_path), "run").write_config(cfg.model_dump())
    assert read_config(tmp_path / "run") == cfg
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").format == 1


def test_every_key_with_a_default_is_in_the_configurations():
    """A default in the schema is the value of older runs. If a command's YAML files lack the key, nobody sees its value."""
    for choices in ([], ["model=sprint", "alignment=repa", "diffusion=sit"]):
        composed = OmegaConf.to_container(compose_overrides(choices))
        filled = {f"data.{key}" for key in ("scale_factor", "latents_mean", "latents_std", "resolution")}  # read from the latents
        filled.add("guidance")  # a list of guidances, from lists in the group
        assert {key for key in flatten(checked(choices).model_dump())} - flatten(composed).keys() == filled
