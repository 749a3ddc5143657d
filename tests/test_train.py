"""Whole runs: interruptions, resumes and micro-batches do not change the numbers. Wrong settings are refused before any work."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import wandb
from accelerate import Accelerator
from accelerate.tracking import WandBTracker
from accelerate.utils import set_seed
from conftest import (
    TINY,
    checked,
    evaluated,
    file_size_limit,
    losses,
    make_shard,
    metrics,
    renew_manifest,
    run_train,
    wait_for,
    weights,
)
from forked import Command
from PIL import Image

from checkpoints import provenance, store
from checkpoints.checkpoint import Checkpoint, read_checkpoint, read_config, resolve_checkpoint
from checkpoints.load import load_network
from checkpoints.run import RunFolder, read_metrics
from common.errors import Diverged, UserError
from common.randomness import derive_seed
from dit import DiTBlock
from extras.report.runs import read_run
from latents.batches import BatchOrder
from latents.dataset import LatentDataset
from latents.shards import ShardInfo, write_shard
from routing_module import TokenRouter
from training import loop
from training.data import complete_lengths
from training.hooks import SampleGridHook
from training.start import begin_new_run, changes_on_resume, check_initial, check_resume, decide_start, restore_config
from training.trainer import Trainer, learning_rate

GRIDS = ["sample_grid.every=2", "sample_grid.num_samples=3", "sampler.num_steps=2"]
EVALUATION = ["evaluation.every=2", "evaluation.num_samples=6", "sampling.batch_size=2", "sampler.num_steps=1", "guidance=none"]


def folder_of(run, step):
    return run / "checkpoints" / store.folder_name(step)


def starts(run):
    return [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]


def assert_same_files(first, second, step):
    """Assert that the files of weights, EMA and optimizer at `step` are equal byte by byte."""
    for name in ("model.safetensors", "ema.safetensors", "optimizer.pt"):
        assert (folder_of(first, step) / name).read_bytes() == (folder_of(second, step) / name).read_bytes(), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Fixture: an uninterrupted run of 6 steps with all checkpoints. Tests do not write to it."""
    return run_train(tmp_path_factory.mktemp("runs"), "whole", "checkpoint.every=1", "checkpoint.keep_last=10")


# ----------------------------------------------------------------------------------------------------------------------
# Runs that must give the same numbers.


@pytest.mark.parametrize(
    "extra",
    [
        # The run is resumed between two lines of the log.
        ["data.num_workers=2", "train.grad_accum_steps=2", "train.grad_clip_norm=1.0", "train.log_every=3"],
        ["diffusion=sit", "diffusion.timestep=logit_normal", "model=lightningdit_sprint", "model.path_drop=0.5"]
        + ["train.precision=bf16", "train.schedule=cosine", "train.warmup_steps=2"],
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_exactly(train, tmp_path, extra):
    whole = train("whole", "checkpoint.every=4", *extra)
    cut = shutil.copytree(whole, tmp_path / "cut")
    shutil.rmtree(folder_of(cut, 6))  # as if the run had been killed after step 4
    train("cut", "checkpoint.every=4", *extra)
    assert [start["step"] for start in starts(cut)] == [0, 4]
    assert losses(cut) == losses(whole) and 6 in losses(whole)
    assert_same_files(whole, cut, 6)
    assert {value.dtype for value in weights(cut, 6).values()} == {torch.float32}  # even with bf16
    rates = {record["step"]: record["lr"] for record in metrics(whole)}
    assert rates == {record["step"]: record["lr"] for record in metrics(cut)}
    if "train.schedule=cosine" in extra:
        assert rates[1] == 1e-3 and rates[2] == rates[3] == 2e-3 and 0 < rates[6] < rates[4]


def test_two_training_steps_equal_their_definition(train, tmp_path):
    """Repeat a run by hand: items, flips, moments, noise, dropped labels and paths, routes, clipped gradients, AdamW."""
    stored, labels = make_shard(
        tmp_path / "data" / "a.safetensors", channels=1, size=8, kind="moments", num_classes=10, flips=True
    )
    settings = [f"data.path={tmp_path / 'data'}", "model=sprint", "model.class_dropout=0.4", "model.path_drop=0.3", "seed=5"]
    settings += ["train.lr=1e-2", "train.betas=[0.8,0.9]", "train.weight_decay=0.3", "train.num_steps=2"]
    settings.append("train.grad_clip_norm=0.1")
    cfg = read_config(folder_of(run := train("run", *settings), 2))
    set_seed(5)
    net = cfg.model.build(cfg.data).train()
    optimizer = torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad], lr=1e-2, betas=(0.8, 0.9), weight_decay=0.3, fused=True
    )
    rng = np.random.default_rng([5, 0])  # seed, epoch
    order, flips, norms = rng.permutation(24), rng.random(24) < 0.5, []
    for step in range(2):
        of = {
            name: torch.Generator().manual_seed(derive_seed(5, step, name))
            for name in ("latents", "labels", "paths", "routes", "diffusion")
        }
        rows = range(4 * step, 4 * step + 4)
        items = torch.stack([stored[order[row]].flip(-1) if flips[row] else stored[order[row]] for row in rows])
        mean, log_variance = items.chunk(2, dim=1)
        x = 0.5 * (mean + (log_variance / 2).exp() * torch.randn(4, 1, 8, 8, generator=of["latents"]))  # scale_factor
        draws = {
            "drop_labels": torch.rand(4, generator=of["labels"]) < 0.4,
            "drop_paths": torch.rand(4, generator=of["paths"]) < 0.3,
            "route_noise": torch.rand(4, 1, 16, generator=of["routes"]),
        }
        sigma = (-1.2 + 1.2 * torch.randn(4, generator=of["diffusion"])).exp()
        noisy = x + sigma.reshape(-1, 1, 1, 1) * torch.randn(4, 1, 8, 8, generator=of["diffusion"])
        denoised = cfg.diffusion.denoise(net, noisy, sigma, labels[order[rows]], **draws)
        weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
        loss = (weight * (denoised - x).square().mean(dim=(1, 2, 3))).mean()
        assert loss.item() == pytest.approx(losses(run)[step + 1], rel=1e-5)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > 0.11 and max(norms) > 1.2 * min(norms)  # AdamW ignores a constant factor of all gradients
    for name, value in weights(run, 2).items():  # Adam divides by small numbers, so rounding errors grow to 1e-4 of a step
        assert torch.allclose(net.state_dict()[name], value, atol=1e-5), name


def test_dense_and_routed_runs_see_the_same_noise_and_data(whole, train):
    dense = train("dense", "model=dit", "train.num_steps=3")
    # Before the first update, the output of the network is zero, with and without routes.
    assert losses(dense)[1] == losses(whole)[1]
    assert losses(dense)[3] != losses(whole)[3]


def test_micro_batches_loader_threads_and_checkpointed_activations_do_not_change_a_run(whole, train, monkeypatch):
    split = train("split", "train.grad_accum_steps=4", "data.num_workers=1")
    # The 4 losses are summed in another order. Over 6 steps, this changes a few units in the last place.
    assert losses(split) == pytest.approx(losses(whole), rel=1e-5)
    calls, forward = [], DiTBlock.forward
    monkeypatch.setattr(DiTBlock, "forward", lambda self, *args, **kwargs: calls.append(1) or forward(self, *args, **kwargs))
    recomputed = train("recomputed", "train.activation_checkpointing=blocks")
    assert losses(recomputed) == losses(whole) and len(calls) == 6 * 12 * 2  # steps, blocks, and once more for the backward pass
    assert_same_files(whole, recomputed, 6)


def test_routing_is_on_in_training_and_off_in_grids(train, monkeypatch):
    calls, original = [], TokenRouter.start_route
    monkeypatch.setattr(
        TokenRouter, "start_route", staticmethod(lambda x, ids: calls.append((len(x), ids.shape[1])) or original(x, ids))
    )
    run = train("run", "train.num_steps=2", *GRIDS, "sampling.batch_size=2")
    assert calls == [(4, 8)] * 2  # 8 of 16 tokens in every step
    assert Image.open(run / "samples" / "step_0000002.png").size[0] > 3 * 64


# ----------------------------------------------------------------------------------------------------------------------
# Files of a run, and settings that it refuses.


def test_a_run_logs_its_plan_and_writes_its_config_metrics_and_checkpoints(train, caplog):
    caplog.set_level("INFO")
    run = train("run", "checkpoint.every=2", "checkpoint.keep_last=2", "train.grad_clip_norm=1")
    assert "train  steps 0 to 6, batch 4, adamw, lr 0.002 (constant), 1 x cpu, fp32" in caplog.text
    assert [p.name for p in store.list_steps(run / "checkpoints").values()] == ["step_0000004", "step_0000006"]
    last = metrics(run)[-1]
    assert last["step"] == 6 and last["images_seen"] == 24 and last["lr"] == 2e-3
    assert last["images_per_sec"] > 0 and last["grad_norm"] > 0
    stored = read_config(folder_of(run, 6))
    assert stored.data.scale_factor == pytest.approx(2 / 3) and stored.sampling.autoencoder == "identity"
    assert (run / "config.yaml").read_text() == (folder_of(run, 6) / "config.yaml").read_text()
    before = {p: p.stat().st_mtime_ns for p in (run / "checkpoints").rglob("*")}
    train("run", "checkpoint.every=2", "checkpoint.keep_last=2", "train.grad_clip_norm=1")  # the run is already complete
    assert {p: p.stat().st_mtime_ns for p in before} == before and len(metrics(run)) == 6
    (start,) = starts(run)
    assert start["command"].startswith("python ") and start["num_processes"] == 1 and start["device"] and start["torch"]
    assert start["step"] == 0 and start["time"].endswith("+00:00")


def test_a_run_records_no_commit_without_a_git_repository_of_its_own_or_if_git_hangs(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    assert provenance.git_commit() == (None, None)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "bin" / "git").chmod(0o755)
    (tmp_path / ".git").mkdir()  # an empty folder is no repository
    assert provenance.git_commit() == (None, None)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        start_sec = time.monotonic()
        assert provenance.git_commit() == (None, None) and 1.9 < time.monotonic() - start_sec < 20


@pytest.mark.skipif(not shutil.which("git"), reason="git is needed")
def test_a_run_records_the_commit_and_whether_files_were_modified(monkeypatch, tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "message")
    monkeypatch.setattr(provenance, "REPOSITORY", tmp_path)
    assert provenance.git_commit() == (git("rev-parse", "HEAD"), False)
    (tmp_path / "untracked").touch()
    assert provenance.git_commit()[1] is False
    (tmp_path / "file").write_text("2")
    assert provenance.git_commit() == (git("rev-parse", "HEAD"), True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model=dit", "model.routes"),
        ("model.backbone=DiT-XS/4", "model.backbone: 'DiT-XS/2' -> 'DiT-XS/4'"),
        ("seed=1", "seed: 0 -> 1"),
        ("train.batch_size=8", "train.batch_size: 4 -> 8"),
        ("diffusion.P_mean=1.0", "diffusion.P_mean: -1.2 -> 1.0"),
        ("diffusion=sit", "diffusion.name: 'edm' -> 'sit'"),
        ("init_from=runs/other", "init_from: None -> 'runs/other'"),
        ("diffusion.sigma_data=1.0", "diffusion.sigma_data: 0.5 -> 1.0"),
        ("model.class_dropout=0.2", "model.class_dropout: 0.1 -> 0.2"),
        ("train.optimizer=muon", "train.optimizer: 'adamw' -> 'muon'"),
        ("train.ema_schedule=constant", "train.ema_schedule: 'warmup' -> 'constant'"),
        ("train.ema_lengths=[0.1]", r"train.ema_lengths: \[\] -> \[0.1\]"),
    ],
)
def test_a_resume_with_different_settings_is_refused_and_names_the_difference(tmp_path, change, words):
    checkpoint = Checkpoint(tmp_path, "", 1, checked(TINY), {})
    for choice in ("auto", "changed"):  # a run cannot change these settings on its way
        with pytest.raises(UserError, match=f"{words}.*or start another run with name=...$"):
            check_resume(checkpoint, checked([*TINY, "train.lr=1", change, f"resume={choice}"]))


@pytest.mark.parametrize(
    ("stored", "change", "line"),
    [
        ([], "train.lr=1", "train.lr: 0.002 -> 1.0"),
        ([], "train.warmup_steps=3", "train.warmup_steps: 0 -> 3"),
        ([], "train.schedule=cosine", "train.schedule: 'constant' -> 'cosine'"),
        ([], "train.betas=[0.9,0.95]", r"train.betas: [0.9, 0.999] -> [0.9, 0.95]"),
        ([], "train.weight_decay=0.1", "train.weight_decay: 0.0 -> 0.1"),
        ([], "train.grad_clip_norm=1.0", "train.grad_clip_norm: None -> 1.0"),
        ([], "train.ema_decay=0.5", "train.ema_decay: 0.9999 -> 0.5"),
        ([], "train.precision=bf16", "train.precision: 'fp32' -> 'bf16'"),
        ([], "machine.tf32=false", "machine.tf32: True -> False"),
        ([], "train.num_steps=5", "train.num_steps: 6 -> 5"),
        (["train.schedule=cosine"], "train.num_steps=9", "train.num_steps: 6 -> 9"),
    ],
)
def test_a_resume_refuses_other_settings_of_training_unless_the_change_is_meant(tmp_path, caplog, stored, change, line):
    checkpoint = Checkpoint(tmp_path, "", 1, checked([*TINY, *stored]), {})
    with pytest.raises(UserError) as error:
        check_resume(checkpoint, checked([*TINY, *stored, change]))
    remedy = "Restore them, or start another run with name=..., or accept them with resume=changed"
    assert str(error.value) == f"resume: {tmp_path} belongs to a run with different settings: {line}. {remedy}"
    assert not caplog.text
    meant = checked([*TINY, *stored, change, "resume=changed"])
    check_resume(checkpoint, meant)
    assert [str(change) for change in changes_on_resume(checkpoint.config, meant)] == [line]


def test_a_resume_accepts_more_steps_and_other_paths_speeds_and_evaluations(tmp_path, caplog):
    free = ["train.num_steps=9", "machine.compile=none", "train.log_every=3", "name=x", "output_dir=y", "data.path=z"]
    free += ["sampler.num_steps=3", "sampler.num_steps=5", "evaluation.every=2", "sampling.rounding=truncate", "guidance=cfg"]
    free += ["evaluation.detector=inception", "sampling.labels=balanced", "sampling.precision=bf16", "sampling.precision=bf16"]
    check_resume(Checkpoint(tmp_path, "", 1, checked(TINY), {}), checked([*TINY, *free]))
    assert not caplog.text


def test_changes_that_are_meant_are_logged_and_recorded_with_the_start(train, caplog):
    for keys in (["train.num_steps=1"], ["train.lr=1e-3", "train.num_steps=2", "resume=changed"], ["train.lr=1e-3"]):
        run = train("run", *keys)
    assert [start.get("changed") for start in starts(run)] == [None, ["train.lr: 0.002 -> 0.001"], None]
    assert [line for line in caplog.messages if "changed" in line] == ["resumed with a changed setting: train.lr: 0.002 -> 0.001"]
    assert [line["lr"] for line in metrics(run)] == [2e-3] + 5 * [1e-3]
    with pytest.raises(UserError, match="train.lr: 0.001 -> 0.002.*resume=changed"):  # even though the run is complete
        train("run")


def test_a_complete_run_gets_its_settings_back_after_a_longer_start_without_a_checkpoint(train, monkeypatch):
    keys = ["train.num_steps=2", "sampler.num_steps=1"]
    run = train("run", *keys)
    text = (run / "config.yaml").read_text()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Trainer, "train_step", lambda *args: 1 / 0)
        train("run", "train.num_steps=3", "train.lr=1e-3", "resume=changed")
    assert read_config(run).train.lr == 1e-3
    train("run", *keys)
    assert (run / "config.yaml").read_text() == text
    assert starts(run)[-1]["changed"] and read_run(run).changes_on_resume == ()
    other = text.replace("  num_steps: 1\n", "  num_steps: 9\n")  # of the sampler
    (run / "config.yaml").write_text(other)
    train("run", *keys)
    assert (run / "config.yaml").read_text() == other != text


def test_a_complete_run_whose_settings_cannot_be_written_back_says_so(whole, tmp_path):
    run = RunFolder(str(tmp_path), "run")
    shutil.copytree(whole, run.path)
    newest = resolve_checkpoint(run.path, "checkpoint")
    run.config.write_text(run.config.read_text().replace("  lr: 0.002\n", "  lr: 0.001\n"))
    with file_size_limit(100), pytest.raises(UserError, match="^cannot write .*config.yaml: File too large"):
        restore_config(run, newest)
    restore_config(run, newest)
    assert read_config(run.path) == newest.config


@pytest.mark.parametrize(
    ("schedule", "change", "said"),
    [
        ("cosine", "train.num_steps=4", "the learning rate of step 2 is 0.001; with the settings of the checkpoint, it was 0"),
        (
            "constant",
            "train.warmup_steps=4",
            "the learning rate of step 2 is 0.0015; with the settings of the checkpoint, it was 0.002",
        ),
        ("constant", "train.num_steps=4", None),
        ("cosine", "train.grad_clip_norm=1", None),
    ],
)
def test_a_resume_says_the_learning_rate_before_and_after(train, caplog, schedule, change, said):
    keys = [f"train.schedule={schedule}", "model.backbone=DiT-XS/4"]
    train("run", *keys, "train.num_steps=2")
    run = train("run", *keys, "train.num_steps=2", change, "resume=changed")
    assert [line for line in caplog.messages if line.startswith("the learning rate")] == ([said] if said else [])
    if said and "num_steps" in change:
        assert f"is {metrics(run)[2]['lr']:.3g};" in said


@pytest.mark.parametrize("damage", ["none", "config", "weights"])
def test_settings_are_compared_before_a_checkpoint_is_hashed(whole, train, tmp_path, monkeypatch, damage):
    """If the newest configuration is damaged, the one before it is compared."""
    run, hashed, hash_file = shutil.copytree(whole, tmp_path / "run"), [], store.hash_file
    if damage == "config":
        config = folder_of(run, 6) / "config.yaml"
        config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    elif damage == "weights":
        (folder_of(run, 6) / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(store, "hash_file", lambda file: hashed.append(file.name) or hash_file(file))
    for name, words, *changed in (
        ("run", "resume: .* seed: 0 -> 1", "seed=1"),
        ("new", "init_from=.* model.backbone: 'DiT-XS/2' -> 'DiT-XS/4'", "model.backbone=DiT-XS/4", f"init_from={run}"),
    ):
        with pytest.raises(UserError, match=words):
            train(name, *changed)
    assert {*hashed} == {*store.READ_ALWAYS} and not [*run.glob("checkpoints/bad_*")]
    train("run")  # with the run's settings, a damaged checkpoint is renamed, and its steps are repeated
    assert "model.safetensors" in hashed and losses(run) == losses(whole)
    assert len([*run.glob("checkpoints/bad_step_0000006_*")]) == (damage != "none")


def test_a_start_fails_if_a_bad_checkpoint_cannot_be_renamed(whole, train, tmp_path, monkeypatch):
    run = shutil.copytree(whole, tmp_path / "run")
    (folder_of(run, 6) / "model.safetensors").write_bytes(b"")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}

    def refuse(*paths):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(
        UserError, match="step_0000006 is damaged, and cannot be renamed to bad_step_0000006.*: Permission denied"
    ):
        train("run")
    assert {path: path.read_bytes() for path in before} == before


def test_a_start_at_step_0_keeps_earlier_results_whether_its_settings_are_equal_or_not(train, caplog):
    run, kept = train("run", "train.num_steps=1", "train.log_every=1"), set()
    for number, seed in enumerate((3, 4, 4)):
        kept.add((run / "metrics.jsonl").read_text())
        (run / "checkpoints").rename(run / f"archive_{number}")
        (run / "ema_snapshots").mkdir()
        (run / "ema_snapshots" / f"of_{number}").write_text("kept")
        train("run", "train.num_steps=1", "train.log_every=1", f"seed={seed}")
        assert "run holds results but no checkpoint; training starts over, and they are now in *_earlier_" in caplog.text
        caplog.clear()
    assert {file.read_text() for file in run.glob("metrics_earlier_*.jsonl")} == kept and len(kept) == 3
    assert {file.name for file in run.glob("ema_snapshots_earlier_*/*")} == {"of_0", "of_1", "of_2"}
    assert (run / "samples").is_dir() and not [*run.glob("samples_earlier_*")]  # an empty folder has nothing to keep


@pytest.mark.parametrize("changed", [[], ["train.lr=1e-4"]])
@pytest.mark.parametrize("result", ["samples/step_0000001.png", "ema_snapshots/step_0000001_0.safetensors"])
def test_a_start_keeps_what_a_killed_run_made_before_its_first_metrics(train, result, changed):
    run = train("run", "train.num_steps=1")
    for folder in store.list_steps(run / "checkpoints").values():
        shutil.rmtree(folder)
    (run / "metrics.jsonl").write_text("")
    (run / result).parent.mkdir(exist_ok=True)
    (run / result).write_text("kept")
    train("run", "train.num_steps=1", *changed)
    folder, name = result.split("/")
    assert [file.read_text() for file in run.glob(f"{folder}_earlier_*/{name}")] == ["kept"]
    assert len([*run.glob("config_earlier_*.yaml")]) == 1 and not (run / result).exists()


def test_a_new_run_refuses_a_route_that_carries_no_token_and_stored_networks_with_one_are_loaded(train, tmp_path):
    route = "model.routes=[{{selection_ratio:{},start_layer_idx:1,end_layer_idx:2}}]"
    words = r"model.routes\[0\].selection_ratio=0.06 carries 0 of 16 tokens: use 0, at least 1/16, or smaller patches"
    with pytest.raises(UserError, match=words):
        train("run", route.format(0.06))
    assert not (tmp_path / "run").exists()
    folder = folder_of(train("run", route.format(0.07), "train.num_steps=1"), 1)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("selection_ratio: 0.07", "selection_ratio: 0.06"))
    renew_manifest(folder)
    assert load_network(read_checkpoint(folder), "ema", torch.device("cpu")).router.selection_ratios() == (0.06,)


def test_a_run_of_which_only_hidden_files_are_left_starts_anew(train):
    run = train("run", "train.num_steps=1")
    (run / ".has_saved").touch()  # earlier versions left it
    for path in run.glob("[!.]*"):  # as rm -rf run/*
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    train("run", "train.num_steps=1")
    assert [line["step"] for line in metrics(run)] == [1] and folder_of(run, 1).exists()


def test_each_start_that_ends_without_a_checkpoint_keeps_its_results_and_one_without_results_leaves_nothing(
    whole, train, tmp_path, monkeypatch
):
    run, train_step = tmp_path / "run", Trainer.train_step

    def fail(trainer, *args, after):
        if trainer.step == after:
            raise ZeroDivisionError
        return train_step(trainer, *args)

    with monkeypatch.context() as patch:
        for after in (0, 0, 2, 0, 0, 1):
            patch.setattr(Trainer, "train_step", partialmethod(fail, after=after))
            with pytest.raises(ZeroDivisionError):
                train("run")
    train("run")
    found = [[line["step"] for line in read_metrics(file)] for file in run.glob("metrics_earlier_*")]
    assert sorted(found) == [[1], [1, 2]] and len([*run.glob("*_earlier_*")]) == 4  # with a config.yaml each
    assert losses(run) == losses(whole)


def test_a_run_with_fewer_steps_than_its_checkpoint_makes_the_last_grid_and_evaluation_there(whole, train, tmp_path):
    run = shutil.copytree(whole, tmp_path / "run")
    evaluation = [
        "guidance=none",
        "evaluation.every=4",
        "evaluation.num_samples=2",
        "evaluation.final_num_samples=3",
        "sampler.num_steps=1",
    ]
    for _ in range(2):
        train("run", "train.num_steps=5", "resume=changed", "sample_grid.every=4", "sample_grid.num_samples=2", *evaluation)
        assert [file.name for file in run.glob("samples/*")] == ["step_0000006.png"]
        assert [(x["step"], x["settings"]["num_samples"]) for x in evaluated(run)] == [(6, 3)]


# The lock of a folder that is there keeps other trainers out, but not copies of runs.
@pytest.mark.parametrize(("is_there", "gone"), [(False, ""), (False, "metrics.jsonl"), (True, "")])
def test_a_new_run_whose_folder_is_filled_meanwhile_is_refused(whole, tmp_path, is_there, gone):
    run = RunFolder(str(tmp_path), "run")
    if is_there:
        run.path.mkdir()
        run.open()
    start = decide_start(run, checked(TINY))
    assert start.kind == "new" and run.lock_path.exists() == is_there
    shutil.copytree(whole, run.path, dirs_exist_ok=True, ignore=lambda folder, names: [gone] if gone else [])
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(UserError, match="another process has trained .*run meanwhile, .*; run the same command again"):
        begin_new_run(run)
    assert {path: path.read_bytes() for path in before} == before


def test_a_new_run_keeps_the_results_of_a_start_that_was_killed_meanwhile(whole, tmp_path):
    run = RunFolder(str(tmp_path), "run")
    assert decide_start(run, checked(TINY)).kind == "new"
    shutil.copytree(whole, run.path, ignore=lambda folder, names: ["checkpoints"])
    before = sorted(path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != ".lock")
    begin_new_run(run)
    assert sorted(path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.name != ".lock") == before
    assert not run.metrics.exists() and not run.config.exists()


def test_the_results_of_a_short_run_whose_checkpoints_are_gone_are_kept(train):
    keys = ["train.num_steps=2", "train.log_every=1", "checkpoint.every=1"]
    run = train("run", *keys)
    before = (run / "metrics.jsonl").read_text()
    for folder in store.list_steps(run / "checkpoints").values():
        shutil.rmtree(folder)
    train("run", *keys, "train.num_steps=2")
    assert [file.read_text() for file in run.glob("metrics_earlier_*.jsonl")] == [before]
    assert len(metrics(run)) == 2


def test_the_folder_of_somebody_else_is_refused_before_anything_is_written(train, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "config.yaml").write_text("train: {lr: 1}\n")
    with pytest.raises(UserError, match="configs holds config.yaml and was not made by train.py"):
        train("configs")
    assert [file.name for file in (tmp_path / "configs").iterdir()] == ["config.yaml"]
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "samples").touch()
    with pytest.raises(UserError, match="file holds samples and was not made by train.py"):
        train("file")
    with pytest.raises(UserError, match="name: aaa.* is longer than 255 bytes"):
        checked([*TINY, f"name={'a' * 256}"])


def rewrite(file, change):
    content = json.loads(file.read_text()) if file.suffix == ".json" else torch.load(file)
    change(content)
    file.write_text(json.dumps(content)) if file.suffix == ".json" else torch.save(content, file)
    renew_manifest(file.parent)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (
            "optimizer.pt",
            lambda x: [x["state"].pop(name) for name in list(x["state"])[::2]],
            "optimizer.pt cannot be read: it has no state for x_embedder.proj.weight",
        ),
        (
            "optimizer.pt",
            lambda x: [values.update(m=values.pop("exp_avg")) for values in x["state"].values()],
            "exp_avg of x_embedder.proj.weight is missing in the file",
        ),
        (
            "optimizer.pt",
            lambda x: x["state"]["x_embedder.proj.bias"].update(exp_avg_sq=torch.zeros(7)),
            r"exp_avg_sq of x_embedder.proj.bias is \[7\] torch.float32 in the file and \[96\] torch.float32 in",
        ),
        (
            "optimizer.pt",
            lambda x: x["state"]["x_embedder.proj.bias"].update(step=torch.zeros((), dtype=torch.float64)),
            "step of x_embedder.proj.bias .*t64",
        ),
        (
            "optimizer.pt",
            lambda x: x["state"]["x_embedder.proj.bias"]["exp_avg"][3].fill_(np.nan),
            "optimizer.pt cannot be read: exp_avg of x_embedder.proj.bias holds NaN or infinity",
        ),
        (
            "optimizer.pt",
            lambda x: x["state"]["x_embedder.proj.weight"]["exp_avg_sq"].view(-1)[-1:].fill_(np.inf),
            "exp_avg_sq of x_embedder.proj.weight holds NaN or infinity",
        ),
        (
            "optimizer.pt",
            lambda x: x["state"]["blocks.1.mlp.fc1.bias"]["exp_avg_sq"][0].fill_(-1e-9),
            "exp_avg_sq of blocks.1.mlp.fc1.bias holds -1e-09, which cannot be negative",
        ),
        (
            "optimizer.pt",
            lambda x: [s["step"].fill_(-1) for s in x["state"].values()],
            "step of .* holds -1, which cannot be neg",
        ),
        (
            "optimizer.pt",
            lambda x: x["state"]["x_embedder.proj.bias"]["step"].fill_(500),
            "some of its parameters are after 5 steps and others after 500",
        ),
        ("optimizer.pt", lambda x: x["state"].update({999: {}}), "it has a state for 999, which this network does not train"),
        ("optimizer.pt", lambda x: x["state"]["x_embedder.proj.bias"].update(step=3.0), "it holds other values than tensors"),
        ("optimizer.pt", lambda x: x.update(state=[]), "optimizer.pt cannot be read: it holds no state by parameter name"),
        ("optimizer.pt", lambda x: x["state"].update({"x_embedder.proj.bias": 3}), "it holds no state by parameter name"),
        ("optimizer.pt", lambda x: x.pop("state"), "optimizer.pt cannot be read: it has no state for x_embedder.proj.weight"),
        (
            "state.json",
            lambda x: [x.pop("loss_sums"), x.pop("ema_num_updates"), x.update(other=1)],
            "state.json cannot be read: unknown keys: other; missing keys: ema_num_updates, loss_sums",
        ),
        ("state.json", lambda x: x.update(loss_sums=[1.0, 2.0]), r"state.json: loss_sums is \[2\] .* in the file and \[1\]"),
    ],
)
def test_a_state_that_does_not_fit_the_run_is_refused_in_one_line(whole, train, tmp_path, file, change, words):
    run = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(folder_of(run, 6))
    rewrite(folder_of(run, 5) / file, change)
    with pytest.raises(UserError, match=words) as error:
        train("run", "checkpoint.every=1", "checkpoint.keep_last=10")
    assert "\n" not in str(error.value)


def test_a_tracked_average_that_is_missing_is_refused(train):
    run = train("run", "train.ema_lengths=[0.05,0.1]", "train.ema_snapshot_every=3", "checkpoint.every=3")
    shutil.rmtree(folder_of(run, 6))
    (folder_of(run, 3) / "tracked_ema.safetensors").unlink()
    renew_manifest(folder_of(run, 3))
    with pytest.raises(UserError, match=r"tracked_ema.safetensors: 0.05/\S+ is missing in the file"):
        train("run", "train.ema_lengths=[0.05,0.1]", "train.ema_snapshot_every=3", "checkpoint.every=3")


def test_a_resume_on_other_data_is_refused(train, tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        make_shard(tmp_path / name / "x.safetensors", channels=1, size=8, num_classes=10, seed=seed)
    train("run", "train.num_steps=1", f"data.path={tmp_path / 'a'}")
    with pytest.raises(UserError, match=r"/a\) than data.path=.*/b"):
        train("run", f"data.path={tmp_path / 'b'}")
    (tmp_path / "a").rename(tmp_path / "moved")
    train("run", f"data.path={tmp_path / 'moved'}")  # the same data in a renamed folder are accepted


def test_a_loss_that_overflows_stops_the_run_and_keeps_the_checkpoints_before_it(train, tmp_path):
    file = tmp_path / "data" / "a.safetensors"
    latents, labels = make_shard(file, num_items=24, channels=1, size=8, num_classes=10)
    fourth_batch, _ = BatchOrder(24, 4, 0, 0, 6, [slice(0, 4)], with_flips=False).global_batch(3)
    latents[fourth_batch[1]] = 1e30  # its square overflows
    file.unlink()
    write_shard(file, latents, labels, ShardInfo("sample", 0.5, "identity", resolution=8, num_classes=10))
    with pytest.raises(UserError, match="by step 4"):
        train("run", f"data.path={file.parent}", "checkpoint.every=1", "train.log_every=6", "data.num_workers=2")
    assert max(store.list_steps(tmp_path / "run" / "checkpoints")) == 3


@pytest.mark.parametrize("schedule", ["constant", "cosine", "inverse_sqrt"])
def test_the_learning_rate_equals_that_of_torchs_schedulers(schedule):
    train = checked([*TINY, "train.lr=0.1", "train.num_steps=30", "train.warmup_steps=10", f"train.schedule={schedule}"]).train
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler
    after = {
        "constant": lambda: scheduler.ConstantLR(optimizer, factor=1),
        "cosine": lambda: scheduler.CosineAnnealingLR(optimizer, T_max=20),
        "inverse_sqrt": lambda: scheduler.LambdaLR(optimizer, lambda step: (10 / (step + 11)) ** 0.5),
    }[schedule]()
    rises = scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=9)
    both, expected = scheduler.SequentialLR(optimizer, [rises, after], milestones=[10]), []
    for _ in range(30):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        both.step()
    assert [learning_rate(train, step) for step in range(30)] == pytest.approx(expected)
    assert learning_rate(checked(TINY).train, 10**6) == checked(TINY).train.lr  # constant from the first step
    with pytest.raises(UserError, match="train: schedule=inverse_sqrt .* warmup_steps must be above 0"):
        checked([*TINY, "train.schedule=inverse_sqrt"])


@pytest.mark.parametrize(
    ("num_images", "num_steps", "ema_decay"), [(100, 10_000, 0.999), (10_000, 78_125, 0.999872), (10**7, 400_000, 0.9999)]
)
def test_the_default_length_of_a_run_on_custom_data_depends_on_the_number_of_images(num_images, num_steps, ema_decay):
    cfg = complete_lengths(checked(["data=custom"]), num_images)
    assert (cfg.train.num_steps, cfg.train.ema_decay, cfg.evaluation.every) == (num_steps, ema_decay, 0)
    assert cfg.checkpoint.every == cfg.sample_grid.every == cfg.train.ema_snapshot_every == num_steps // 20
    assert cfg.checkpoint.keep_every == 5 * (num_steps // 20)
    chosen = complete_lengths(checked(["data=custom", "checkpoint.every=30"]), num_images).checkpoint
    assert (chosen.every, chosen.keep_every) == (30, 150)
    own = ["data=custom", "train.num_steps=50", "train.ema_decay=0.5", "evaluation.reference=x", "sample_grid.every=7"]
    cfg = complete_lengths(checked(own), num_images)
    assert (cfg.train.num_steps, cfg.train.ema_decay) == (50, 0.5)
    assert (cfg.sample_grid.every, cfg.checkpoint.every, cfg.evaluation.every, cfg.train.ema_snapshot_every) == (7, 50, 100, 2)
    untouched = checked(TINY)
    assert complete_lengths(untouched, num_images) == untouched
    assert complete_lengths(checked(["data=custom", "train.batch_size=1000000000"]), num_images).train.num_steps == 1


def test_a_run_warns_before_the_disk_is_full_and_needs_room_for_a_checkpoint(train, monkeypatch, caplog, tmp_path):
    caplog.set_level("INFO")
    usage = SimpleNamespace(free=1e6)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"^the disk of \S+/run has 0.001 GB free, and a checkpoint needs \S+ GB; free space"):
        train("run", "train.num_steps=1")
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
    size = float(re.search(r"checkpoints \((\S+) GB each\)", caplog.text)[1])
    caplog.clear()
    usage.free = 1.5e9 * size
    run = train("run", "train.num_steps=1", "checkpoint.keep_last=2")
    lines = [record for record in caplog.records if record.message.startswith("disk ")]
    assert [line.levelname for line in lines] == ["INFO", "WARNING"]
    size = re.fullmatch(r"disk   up to .* of checkpoints \((\S+) GB each\), .* GB free", lines[0].message)[1]
    saved = sum(file.stat().st_size for file in folder_of(run, 1).iterdir())
    assert float(size) == pytest.approx(saved / 1e9, rel=0.05) and "room for only 1 more checkpoints" in lines[1].message
    usage.free = 0
    train("run", "train.num_steps=1")  # the run is complete and saves nothing
    caplog.clear()
    usage.free = 1e9
    train("other", "train.num_steps=1", "checkpoint.keep_last=2")
    assert "more checkpoints" not in caplog.text and "tf32" not in caplog.text  # on a CPU, tf32 has no effect


@pytest.mark.parametrize(("num_bytes", "is_enough"), [(20, False), (40, True)])
def test_a_resumed_run_needs_no_room_for_the_snapshots_that_it_has(train, monkeypatch, caplog, num_bytes, is_enough):
    """A checkpoint has 24 bytes per parameter and a snapshot 4. The run adds one of each, which need 28."""
    caplog.set_level("INFO")
    keys = ["train.ema_lengths=[0.1,0.25]", "train.ema_snapshot_every=1", "checkpoint.keep_last=1"]
    run = train("run", *keys)
    assert len([*(run / "ema_snapshots").iterdir()]) == 6
    size = float(re.search(r"checkpoints \((\S+) GB each\)", caplog.text)[1])
    caplog.clear()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=num_bytes / 24 * size * 1e9))
    train("run", *keys, "train.num_steps=7")
    assert ("room for only" in caplog.text) != is_enough


def test_settings_that_cannot_run_are_refused_before_anything_is_written(train, tmp_path):
    for change, words in (
        (["guidance=autoguidance", "guidance.checkpoint=nowhere", *GRIDS], "guidance.checkpoint"),
        (["model.class_dropout=0.0", "guidance=cfg", *GRIDS], "model.class_dropout=0"),
        (
            ["model.class_dropout=0.0", "guidance=none", "evaluation.every=2", "guidance=cfg", "guidance.cfg_scale=[1.0,2.0]"],
            "guidance.cfg_scale=2",
        ),
        (["train.grad_accum_steps=3"], "train.batch_size=4 .*= 3 parts"),
        (["diffusion=ddpm"], "diffusion=ddpm"),
        (["data.num_classes=7"], "data.num_classes=7, but .*10"),
        (["model.routes=[{selection_ratio:0.5,start_layer_idx:2,end_layer_idx:40}]"], "end_layer_idx=40"),
        (["init_from=nowhere"], "init_from"),
        (["resume=nowhere"], "resume"),
        (["data.path=nowhere"], "data.path: nowhere does not exist"),
        ([*EVALUATION, "evaluation.reference=null"], "evaluation.reference"),
        ([*EVALUATION, "evaluation.reference=/nonexistent.npz"], "/nonexistent.npz"),
        ([*EVALUATION, "evaluation.detector=inception", "evaluation.detector_weights=/nonexistent.pth"], "/nonexistent.pth"),
    ):
        with pytest.raises(UserError, match=words):
            train("run", *change)
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to .*file"):
        train("run", f"output_dir={tmp_path / 'file'}")


# ----------------------------------------------------------------------------------------------------------------------
# Weights & Biases.


def test_wandb_logs_our_numbers_by_our_step_and_a_resumed_run_continues_its_wandb_run(train, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows, axes, log, define_metric = [], [], WandBTracker.log, wandb.Run.define_metric
    monkeypatch.setattr(WandBTracker, "log", lambda self, values, **how: rows.append((values, how)) or log(self, values, **how))
    monkeypatch.setattr(
        wandb.Run, "define_metric", lambda *args, **how: axes.append((args[1:], how)) or define_metric(*args, **how)
    )
    run = train("run", "wandb.mode=offline", "train.num_steps=2", *GRIDS, *EVALUATION)
    assert list((run / "wandb").glob(f"offline-run-*-{(run / 'wandb_id').read_text()}/*.wandb"))
    assert axes == [(("*",), {"step_metric": "step"})]
    # wandb drops a row if its step= is lower than the step= of an earlier row.
    assert all(how.get("step") is None for _, how in rows)
    committed = [values for values, how in rows if how.get("commit") is not False]
    assert [values["step"] for values in committed] == [1, 2, 2, 2]  # training twice, then grid and evaluation
    assert committed[1]["loss"] == losses(run)[2] and any("fd_digits" in name for name in committed[3])

    started = []
    monkeypatch.setattr(Accelerator, "init_trackers", lambda self, project, config, init_kwargs: started.append(init_kwargs))
    for name, num_steps in (("run", 3), ("other", 1)):
        train(name, "wandb.mode=offline", f"train.num_steps={num_steps}")
    resumed, other = (settings["wandb"] for settings in started)
    assert resumed["reinit"] == "finish_previous"
    assert resumed["id"] == (run / "wandb_id").read_text() != other["id"] and resumed["resume"] == "allow"


def test_a_run_after_a_failed_run_of_a_sweep_has_its_own_wandb_run(train, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(UserError, match="the loss became NaN"):
        train("failed", "wandb.mode=offline", "train.lr=1e30")
    later = train("later", "wandb.mode=offline", "train.num_steps=1")
    assert [*(later / "wandb").glob(f"offline-run-*-{(later / 'wandb_id').read_text()}/*.wandb")]


def test_wandb_ends_before_a_stopped_job_waits_to_be_killed(train, monkeypatch):
    calls = []
    monkeypatch.setattr("training.tracking.finish", lambda accelerator: calls.append("finish"))
    monkeypatch.setattr("training.stop.end_run_after_signal", lambda *arguments: calls.append("end"))
    train("run", "train.num_steps=1")
    assert calls == ["finish", "end"]


def test_a_missing_wandb_is_refused(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="^wandb.mode=offline: .*wandb.*; run `pip install wandb`, or set wandb.mode=disabled$"):
        train("run", "wandb.mode=offline")


def test_a_start_without_a_key_or_with_an_unusable_folder_of_wandb_is_refused_before_any_work(train, monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(UserError, match="^wandb.mode=online: No API key configured.*[^.]; .* wandb.mode=offline"):
        train("run", "wandb.mode=online")
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(UserError, match="^wandb.mode=online: .*API key must have 40"):
        train("run", "wandb.mode=online")
    assert not (tmp_path / "run").exists()
    run = train("run", "train.num_steps=1")
    monkeypatch.setattr("training.build.build_hooks", lambda *args: pytest.fail("slow work began"))
    (run / "wandb").touch()
    with pytest.raises(UserError, match="run/wandb is not a folder that can be written to"):
        train("run", "train.num_steps=2", "wandb.mode=offline")
    (run / "wandb").unlink()
    for content in ("a/b", "two\nlines", ""):
        (run / "wandb_id").write_text(content)
        with pytest.raises(UserError, match="wandb_id cannot be read: it holds no ID of Weights & Biases"):
            train("run", "train.num_steps=2", "wandb.mode=offline")


def break_wandb(call):
    def fail(*args, **how):
        raise ConnectionResetError("the service has ended")

    setattr(wandb if call == "init" else wandb.Run, call, fail)


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_errors_of_wandb_become_one_warning_and_training_continues(whole, tmp_path, call):
    # In a process of its own, because a wandb that failed keeps objects of later tests alive, such as their locks.
    command = ["train.py", *TINY, f"name={call}", "output_dir=.", "wandb.mode=offline"]
    outcome = Command(tmp_path, command, partial(break_wandb, call), small=False).finish()
    words = "Weights & Biases failed (ConnectionResetError: the service has ended). Training continues without it; "
    outcome.expect_code(0)
    assert outcome.output.count(words) == outcome.output.count("Weights & Biases failed") == 1, outcome.output
    assert losses(tmp_path / call) == pytest.approx(losses(whole), rel=1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# Grids and evaluations in training.


def test_the_speed_excludes_the_time_of_hooks_and_only_due_hooks_pause_the_clock(train, monkeypatch):
    seconds, steps, starts, start_clock = [0.0], [], [], loop.Clock.start

    def slowed(method, by_sec):
        def call(*args):
            seconds[0] += by_sec
            return method(*args)

        return call

    def counted(train_step):
        return lambda *args: steps.append(1) or train_step(*args)

    monkeypatch.setattr("training.loop.time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    monkeypatch.setattr(Trainer, "train_step", counted(slowed(Trainer.train_step, 2.0)))
    monkeypatch.setattr(SampleGridHook, "__call__", slowed(SampleGridHook.__call__, 100.0))
    monkeypatch.setattr(loop.Clock, "start", lambda clock: starts.append(len(steps)) or start_clock(clock))
    run = train("run", "train.num_steps=6", "train.log_every=3", *GRIDS)
    assert [line["steps_per_sec"] for line in metrics(run)] == [0.5, 0.5]
    assert starts == [0, 2, 3, 4, 6]


def test_each_evaluation_has_a_record_and_a_restart_adds_those_with_other_settings(train):
    settings = ["train.num_steps=2", "evaluation.every=1", "evaluation.num_samples=4", "evaluation.final_num_samples=6"]
    settings += ["guidance=cfg", "guidance.cfg_scale=[1.0,2.0]", "sampler.num_steps=1"]
    run = train("run", *settings)
    found = [(r["step"], r["settings"]["num_samples"], r["settings"]["cfg_scale"]) for r in evaluated(run)]
    assert found == [(1, 4, 1.0), (1, 4, 2.0), (2, 6, 1.0), (2, 6, 2.0)]
    assert all(r["metrics"]["fd_digits"] > 0 and r["evaluation_sec"] > 0 for r in evaluated(run))
    for change in ("sampler.num_steps=2", "sampling.labels=balanced"):
        train("run", *settings, change)
    found = [(r["step"], r["settings"]["num_steps"], r["settings"]["labels"]) for r in evaluated(run)]
    assert found[4:] == [(2, 2, "random")] * 2 + [(2, 1, "balanced")] * 2
    distances = [r["metrics"]["fd_digits"] for r in evaluated(run)]
    assert distances[2] != distances[6] and distances[3] != distances[7]  # other labels give other images


# ----------------------------------------------------------------------------------------------------------------------
# Runs that start from the weights of another run.


def test_init_from_starts_a_dense_run_from_the_weights_and_average_of_a_routed_run(whole, train):
    dense = train("dense", "model=dit", f"init_from={whole}", "train.num_steps=2", "train.lr=1e-30", "checkpoint.every=1")
    assert [record["step"] for record in metrics(dense)] == [1, 2]
    before, after, average = weights(whole, 6), weights(dense, 2), weights(whole, 6, "ema")
    assert all(torch.allclose(before[name], after[name], atol=1e-7) for name in before)
    # The average has had 6 updates and continues without a new warm-up. The next update keeps 7/16 of it, the one after it 8/17.
    for step, share in ((1, 9 / 16), (2, 9 / 17)):
        average = {name: value.lerp(after[name], share) for name, value in average.items()}
        for name, value in weights(dense, step, "ema").items():
            assert torch.allclose(value, average[name], atol=1e-6), name


def test_init_from_accepts_a_shared_checkpoint_that_holds_only_the_ema(whole, train, tmp_path, caplog):
    shared = shutil.copytree(folder_of(whole, 6), tmp_path / "shared")
    for name in ("optimizer.pt", "model.safetensors"):
        (shared / name).unlink()
    run = train("tuned", f"init_from={shared}", "train.num_steps=1", "train.lr=1e-30")
    average, after = weights(whole, 6, "ema"), weights(run, 1)
    assert all(torch.allclose(average[name], after[name], atol=1e-7) for name in average)
    assert "the raw weights also start from the EMA" in caplog.text


def test_a_run_that_starts_again_begins_from_the_same_checkpoint_of_another_run(whole, train, tmp_path, caplog):
    source = shutil.copytree(whole, tmp_path / "source")
    newest = folder_of(source, 6).rename(tmp_path / "newest")
    keys = [f"init_from={source}", "train.num_steps=1"]
    run = train("again", *keys)
    step, first = max(store.list_steps(source / "checkpoints")), losses(run)
    recorded = starts(run)[-1]["init_from"]
    assert recorded == {"checkpoint": str(folder_of(source, step)), "hash": store.hash_checkpoint(folder_of(source, step))}
    train("again", *keys, "train.num_steps=2")  # a start that resumes has no init_from
    shutil.rmtree(run / "checkpoints")
    newest.rename(folder_of(source, 6))
    assert losses(train("again", *keys)) == first
    named = f"began from {folder_of(source, step)} before"
    assert f"{named}; for a newer one, set init_from={folder_of(source, 6)}" in caplog.text
    assert losses(train("other", *keys)) != first
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(folder_of(source, step))
    assert losses(train("again", *keys)) != first and f"{named}, which is gone" in caplog.text


def test_a_run_that_started_from_another_resumes_without_it(whole, train, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(whole, source)
    extra = [f"init_from={source}", "model=dit", "seed=1"]
    first, cut = train("first", *extra), train("cut", "train.num_steps=3", *extra)
    shutil.rmtree(source)
    train("cut", *extra)
    assert losses(cut) == losses(first) and list(losses(first)) == [1, 2, 3, 4, 5, 6]
    assert_same_files(first, cut, 6)


def test_init_state_all_continues_the_optimizer_and_the_steps_and_a_restart_uses_the_runs_own_checkpoint(
    whole, train, monkeypatch
):
    start = [f"init_from={folder_of(whole, 4)}", "init_state=all"]
    branch = train("branch", *start, "train.num_steps=5")
    assert_same_files(whole, branch, 5)
    train("branch", *start)  # as if the job restarted: now the run has its own checkpoint
    assert [start["step"] for start in starts(branch)] == [4, 5]
    assert losses(branch) == {5: losses(whole)[5], 6: losses(whole)[6]}
    assert_same_files(whole, branch, 6)
    with pytest.raises(UserError, match="step 6"):
        train("other", f"init_from={whole}", "init_state=all")
    read, fetch = [], LatentDataset.fetch
    monkeypatch.setattr(
        LatentDataset, "fetch", lambda data, items, *flips: read.append(items.tolist()) or fetch(data, items, *flips)
    )
    more = [*start, "train.batch_size=8", "checkpoint.every=1"]  # another batch size is accepted
    wider = train("wider", *more, "train.num_steps=5")
    train("wider", *more)
    num_items = len(LatentDataset(read_config(wider).data.path))
    third, fourth = (BatchOrder(num_items, 8, 0, 0, 6, [slice(8)], with_flips=False).global_batch(i)[0].tolist() for i in (2, 3))
    assert [items for items in read if len(items) == 8] == [third, fourth]  # after 4 steps of 4 images
    assert [line["images_seen"] for line in metrics(wider)] == [4 * 4 + 8, 4 * 4 + 2 * 8]  # also after a resume
    last = train("last", f"init_from={folder_of(wider, 5)}", "init_state=all", "train.batch_size=2")
    assert metrics(last)[-1]["images_seen"] == 4 * 4 + 8 + 2


@pytest.mark.parametrize("change", ["model.backbone=DiT-XS/4", "model.learn_sigma=true", "diffusion=sit"])
def test_weights_that_do_not_fit_are_refused(tmp_path, change):
    checkpoint = Checkpoint(tmp_path, "", 1, checked(TINY), {})
    key = "diffusion.name" if change == "diffusion=sit" else change.partition("=")[0]
    with pytest.raises(UserError, match=key):
        check_initial(checkpoint, checked([*TINY, "init_from=x", change]))
    check_initial(checkpoint, checked([*TINY, "init_from=x", "model=dit", "seed=3", "train.batch_size=2"]))
    cfg = checked([*TINY, "init_from=x"])
    scaled = cfg.data.model_copy(update={"latents_mean": [0.1] * 128, "latents_std": [1.0] * 128})
    checkpoint = Checkpoint(tmp_path, "", 1, cfg.model_copy(update={"data": scaled}), {})
    with pytest.raises(UserError, match="does not fit this configuration: data.latents_mean") as refused:
        check_initial(checkpoint, cfg)
    assert len(str(refused.value)) < 500


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints that are written while training continues.


def patch_save(monkeypatch, before):
    """Call before(step) in the writing thread before each write. Return a list to which each trained step is added."""
    original_save, original_step, trained = store.save, Trainer.train_step, []

    def save(root, step, *args):
        before(step)
        return original_save(root, step, *args)

    def train_step(trainer, *args):
        measured = original_step(trainer, *args)
        trained.append(trainer.step)
        return measured

    monkeypatch.setattr(store, "save", save)
    monkeypatch.setattr(Trainer, "train_step", train_step)
    return trained


def test_training_continues_while_a_checkpoint_is_written_and_the_checkpoint_holds_its_own_step(whole, train, monkeypatch):
    trained = patch_save(monkeypatch, lambda step: wait_for(lambda: trained[-1] == min(step + 1, 6)))
    run = train("run", "checkpoint.every=1", "checkpoint.keep_last=10")
    for step in range(1, 7):
        assert_same_files(whole, run, step)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_before_the_next_one_is_due(train, monkeypatch, tmp_path):
    def fail(step):
        raise UserError(f"no room for step {step}")

    patch_save(monkeypatch, fail)
    with pytest.raises(UserError, match="^no room for step 20$"):
        train("run", "checkpoint.every=20", "train.num_steps=1000")
    assert 20 <= metrics(tmp_path / "run")[-1]["step"] < 40
    with pytest.raises(UserError, match="^no room for step 3$"):
        train("other", "train.num_steps=3", "train.log_every=3")  # the checkpoint of the last step cannot be written


def test_a_loss_that_explodes_but_stays_finite_ends_the_run_before_a_checkpoint_is_deleted(train, tmp_path):
    with pytest.raises(UserError, match=r"the loss became NaN, infinite or above 1e\+06 by step \d+"):
        train("run", "train.lr=1e4", "checkpoint.every=1", "checkpoint.keep_last=1", "train.num_steps=50", "train.log_every=50")
    (last,) = store.list_steps(tmp_path / "run" / "checkpoints").values()
    assert all(value.isfinite().all() for value in store.load_weights(last, "raw").values())


@pytest.mark.parametrize("hook", [GRIDS, EVALUATION, [*GRIDS, "sample_grid.every=1"], [*EVALUATION, "evaluation.every=1"]])
def test_a_run_that_diverges_before_a_hook_runs_its_network_ends_with_diverged(train, hook):
    with pytest.raises(Diverged, match="the network returns NaN or infinity"):
        train("run", "train.lr=1e30", "train.log_every=100", *hook)


def name_classes(folder, names):
    """Write a manifest with class names for the shards in a folder."""
    hashes = LatentDataset(folder, check_folder=False).hashes
    (folder / "manifest.json").write_text(json.dumps({"shards": hashes, "settings": {}, "class_names": names}))


def test_a_run_whose_classes_have_other_names_than_those_of_its_initial_weights_says_so(train, tmp_path, caplog):
    make_shard((folder := tmp_path / "data") / "a.safetensors", channels=1, size=8, num_classes=3, scale_factor=2 / 3)
    data = [f"data.path={folder}", "data.num_classes=3", "model.backbone=DiT-XS/4"]
    name_classes(folder, ["ant", "bee", "cow"])
    first = train("first", *data, "train.num_steps=1")
    cases = (
        (["ant", "bee", "cow"], None),
        (["ant", "cow", "bee"], "class 1 is 'bee' and 'cow'"),
        (["ant", "bee"], "class 2 is 'cow' and None"),  # `encode num_classes=3`
    )
    for number, (names, said) in enumerate(cases):
        name_classes(folder, names)
        caplog.clear()
        state = ("all", "weights")[number % 2]
        train(f"tuned_{number}", *data, "train.num_steps=2", f"init_from={first}", f"init_state={state}")
        lines = [line for line in caplog.messages if "was trained on other classes" in line]
        assert [line.partition("(")[2].partition(")")[0] for line in lines] == ([said] if said else [])


def test_a_run_with_other_classes_than_its_initial_weights_gets_a_new_label_table(whole, train, tmp_path, caplog):
    make_shard(tmp_path / "data" / "a.safetensors", channels=1, size=8, num_classes=3, scale_factor=2 / 3)
    caplog.set_level("INFO")
    data = [f"data.path={tmp_path / 'data'}", "data.num_classes=3", "train.num_steps=1", "train.lr=1e-12"]
    run = train("tuned", *data, f"init_from={folder_of(whole, 6)}")
    assert "the label table starts with new weights" in caplog.text and "has 10 classes, and the data have 3" in caplog.text
    for file in ("model", "ema"):
        assert weights(run, 1, file)["y_embedder.embedding_table.weight"].shape[0] == 4
    old, new = weights(whole, 6), weights(run, 1)
    assert all(torch.allclose(old[name], new[name], atol=1e-6) for name in old if "y_embedder" not in name)
    (tuned,) = store.list_steps(run / "checkpoints").values()
    assert store.read_state(tuned)["ema_num_updates"] == 1  # the EMA soon forgets the new table's random start
    with pytest.raises(UserError, match="data.num_classes: 10 -> 3"):
        train("all", *data[:2], f"init_from={folder_of(whole, 4)}", "init_state=all")
