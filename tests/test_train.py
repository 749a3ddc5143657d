"""Runs from end to end: the same numbers however a run is cut, resumed or spread; errors before any work."""

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import wandb
from accelerate import Accelerator
from accelerate.tracking import WandBTracker
from conftest import LAUNCH_2, TINY, finish, losses, make_shard, metrics, renew_manifest, start
from PIL import Image
from safetensors.torch import load_file

from common.errors import UserError
from common.files import lock_file
from latents.order import BatchOrder
from latents.shards import ShardInfo, write_shard
from routing_module import TokenRouter
from sampling.sampler import ImageSampler
from training import checkpoint as checkpoints
from training import stop as stop_module
from training import trainer as trainer_module
from training.load import load_config
from training.run import RunFolder
from training.sharding import copy_state_dict
from training.stop import STOP_SIGNALS, StopSignal
from training.trainer import Trainer, TrainingDiverged

GRIDS = ["sample.every=2", "sample.num_samples=3", "diffusion.sampler.num_steps=2"]
EVALUATION = ["eval.every=2", "eval.num_samples=6", "eval.batch_size=2", "eval.num_steps=1", "eval.cfg_scales=[1.0]"]


def weights(run, step, which="model"):
    return load_file(run / "checkpoints" / checkpoints.folder_name(step) / f"{which}.safetensors")


def assert_same_weights(first, second, step):
    for which in ("model", "ema"):
        a, b = weights(first, step, which), weights(second, step, which)
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), which


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["data.num_workers=2", "train.grad_accum_steps=2", "train.grad_clip_norm=1.0"],
        ["diffusion=sit"],
        ["diffusion=sit", "diffusion.timestep=logit_normal"],
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_exactly(train, extra):
    whole = train("whole", *extra)
    cut = train("cut", "train.num_steps=4", *extra)
    train("cut", *extra)
    assert list(losses(whole)) == [1, 2, 3, 4, 5, 6]
    assert losses(cut) == losses(whole)
    assert_same_weights(whole, cut, 6)


def test_a_window_of_the_log_that_a_resume_cuts_in_two_keeps_its_mean(train):
    settings = ["train.log_every=3", "checkpoint.every=2"]
    whole = train("whole", *settings)
    cut = train("cut", *settings)
    # As if it had been killed after step 4.
    shutil.rmtree(cut / "checkpoints" / "step_0000006")
    train("cut", *settings)
    assert losses(cut) == losses(whole) and list(losses(cut)) == [3, 6]


def test_moments_are_sampled_afresh_and_resume_exactly(train, tmp_path):
    make_shard(tmp_path / "data" / "a.safetensors", channels=1, size=8, kind="moments", num_classes=10, flips=True)
    data = [f"data.path={tmp_path / 'data'}"]
    whole, cut = train("whole", *data), train("cut", "train.num_steps=3", *data)
    train("cut", *data)
    assert losses(cut) == losses(whole)


def test_dense_and_routed_runs_see_the_same_noise_and_data(train):
    dense, routed = train("dense", "model=dit"), train("routed", "model=tread")
    # Before the first update the network's output is zero whatever its route.
    assert losses(dense)[1] == losses(routed)[1]
    assert losses(dense)[3] != losses(routed)[3]


def test_micro_batches_and_loader_workers_do_not_change_the_losses(train):
    plain, split = losses(train("plain")), losses(train("split", "train.grad_accum_steps=4", "data.num_workers=1"))
    assert split == pytest.approx(plain, rel=1e-5)


def test_a_step_that_does_not_fit_says_how_large_it_was_and_what_lowers_it(train, monkeypatch):
    def fail(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "losses", fail)
    message = (
        r"out of memory in step 1: DiT-XS/2 on 2 images of 16 tokens at once in each process "
        r"\(train.batch_size=4 / 1 processes / train.grad_accum_steps=2\), fp32. "
        r"Any of these lowers it: train.grad_accum_steps=4, train.activation_checkpointing=blocks, train.batch_size=2"
    )
    with pytest.raises(ValueError, match=message):
        train("run", "train.grad_accum_steps=2")


def test_checkpointed_activations_do_not_change_a_run(train):
    plain, checkpointed = train("plain"), train("checkpointed", "train.activation_checkpointing=blocks")
    assert losses(checkpointed) == losses(plain)
    assert_same_weights(plain, checkpointed, 6)


def test_routing_is_on_in_training_and_off_in_grids(train, monkeypatch):
    calls = []
    original = TokenRouter.start_route
    monkeypatch.setattr(
        TokenRouter, "start_route", staticmethod(lambda x, ids: calls.append((len(x), ids.shape[1])) or original(x, ids))
    )
    run = train("run", "train.num_steps=2", *GRIDS, "sample.batch_size=2")
    # Half of 16 tokens, and never while sampling: once for the estimate of the memory, and once per training step.
    assert calls == [(4, 8)] * 3
    assert Image.open(run / "samples" / "step_0000002.png").size[0] > 3 * 64


def test_sparse_guidance_routes_in_grids_without_touching_training(train):
    plain = train("plain", "train.num_steps=2", "model=dit", *GRIDS)
    sparse = train("sparse", "train.num_steps=2", "model=dit", "guidance=sparse", *GRIDS)
    assert losses(plain) == losses(sparse)
    assert_same_weights(plain, sparse, 2)
    assert (sparse / "samples" / "step_0000002.png").exists()


def test_a_second_network_that_is_missing_is_found_before_training(train, tmp_path):
    with pytest.raises(ValueError, match="guidance.checkpoint: nowhere is not a folder"):
        train("run", "guidance=autoguidance", "guidance.checkpoint=nowhere", *GRIDS)
    assert not (tmp_path / "run").exists()


def test_a_run_leaves_its_config_metrics_and_checkpoints(train):
    run = train("run", "checkpoint.every=2", "checkpoint.keep_last=2", "train.grad_clip_norm=1")
    assert [p.name for p in checkpoints.list_steps(run / "checkpoints").values()] == ["step_0000004", "step_0000006"]
    last = metrics(run)[-1]
    assert last["step"] == 6 and last["images_seen"] == 24 and last["lr"] == 2e-3
    assert last["images_per_sec"] > 0 and last["grad_norm"] > 0
    stored = load_config(run / "checkpoints" / "step_0000006")
    assert stored.data.scale_factor == pytest.approx(2 / 3) and stored.data.autoencoder == "identity"
    assert (run / "config.yaml").read_text() == (run / "checkpoints" / "step_0000006" / "config.yaml").read_text()


def test_a_complete_run_does_nothing_more(train):
    run = train("run", "train.num_steps=2")
    before = {p: p.stat().st_mtime_ns for p in (run / "checkpoints").rglob("*")}
    lines = (run / "metrics.jsonl").read_text()
    train("run", "train.num_steps=2")
    assert {p: p.stat().st_mtime_ns for p in before} == before and (run / "metrics.jsonl").read_text() == lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model=dit", r"model.name: 'tread' -> 'dit'; model.routes"),
        ("model.backbone=DiT-XS/4", r"model.backbone: 'DiT-XS/2' -> 'DiT-XS/4'"),
        ("seed=1", "seed: 0 -> 1"),
        ("train.batch_size=8", "train.batch_size: 4 -> 8"),
        ("diffusion.sigma_data=1.0", "diffusion.sigma_data: 0.5 -> 1.0"),
        ("diffusion=sit", "diffusion.P_mean: -1.2 -> 'absent'; .*diffusion.name: 'edm' -> 'sit'.*diffusion.timestep: 'absent'"),
        ("init_from=runs/other", "init_from: None -> 'runs/other'"),
    ],
)
def test_a_resume_under_another_configuration_is_refused_with_the_difference(train, change, message):
    run = train("run", "train.num_steps=1")
    before = (run / "config.yaml").read_text()
    with pytest.raises(ValueError, match=f"cannot go on under this configuration: {message}.*name="):
        train("run", change)
    assert (run / "config.yaml").read_text() == before and len(metrics(run)) == 1


def test_a_resume_on_other_data_is_refused(train, tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        make_shard(tmp_path / name / "x.safetensors", channels=1, size=8, num_classes=10, seed=seed)
    train("run", "train.num_steps=1", f"data.path={tmp_path / 'a'}")
    with pytest.raises(ValueError, match="data: other latents or labels: .*/a' -> .*/b'"):
        train("run", f"data.path={tmp_path / 'b'}")
    (tmp_path / "a").rename(tmp_path / "moved")
    train("run", f"data.path={tmp_path / 'moved'}")  # the same data in another place is fine


def test_a_damaged_newest_checkpoint_is_set_aside_and_rerun(train):
    whole = train("whole")
    run = train("run", "checkpoint.every=2")
    newest = run / "checkpoints" / "step_0000006"
    (newest / "model.safetensors").write_bytes(b"torn")
    train("run", "checkpoint.every=2")
    assert (run / "checkpoints" / "bad_step_0000006" / "model.safetensors").read_bytes() == b"torn"
    assert losses(run) == losses(whole)
    assert_same_weights(whole, run, 6)


def test_resume_never_and_from_a_folder_overwrite_nothing(train):
    run = train("run", "checkpoint.every=2")
    with pytest.raises(ValueError, match="resume=never, but .* holds checkpoints; choose another name="):
        train("run", "resume=never")
    shutil.copytree(run / "checkpoints" / "step_0000004", run.parent / "copy")
    with pytest.raises(ValueError, match="already holds step 6"):
        train("run", f"resume={run.parent / 'copy'}")
    branch = train("branch", f"resume={run.parent / 'copy'}")
    assert losses(branch) == {5: losses(run)[5], 6: losses(run)[6]}
    with pytest.raises(ValueError, match="resume: nowhere is not a folder"):
        train("other", "resume=nowhere")


def test_a_loss_that_overflows_stops_the_run_with_the_step_and_the_last_good_checkpoint(train, tmp_path):
    file = tmp_path / "data" / "a.safetensors"
    latents, labels = make_shard(file, num_items=24, channels=1, size=8, num_classes=10)
    fourth_batch, _ = BatchOrder(24, 4, 0, 0, 6, [slice(0, 4)], with_flips=False).global_batch(3)
    latents[fourth_batch[1]] = 1e30  # its square overflows
    file.unlink()
    write_shard(file, latents, labels, ShardInfo("sample", 0.5, "identity", resolution=8, num_classes=10))
    with pytest.raises(
        TrainingDiverged, match="loss or weights are not finite since step 4; last good checkpoint: .*step_0000003"
    ):
        train("run", f"data.path={file.parent}", "checkpoint.every=1", "train.log_every=6")
    assert max(checkpoints.list_steps(tmp_path / "run" / "checkpoints")) == 3


def test_a_failed_run_with_loader_workers_ends(tmp_path):
    file = tmp_path / "data" / "a.safetensors"
    make_shard(file, channels=1, size=8, num_classes=10, scale_factor=1e30)  # overflows in the first step
    arguments = [*TINY, "name=run", f"output_dir={tmp_path}", f"data.path={file}", "data.num_workers=2"]
    code, output = finish(start("train.py", *arguments), timeout_sec=120)
    assert code == 1 and "error: loss or weights are not finite since step 1" in output, output


def test_a_run_killed_before_its_first_checkpoint_starts_its_metrics_afresh(train):
    run = train("run", "train.num_steps=2")
    shutil.rmtree(run / "checkpoints")
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"step": 3, "lo')
    train("run", "train.num_steps=2")
    assert [record["step"] for record in metrics(run)] == [1, 2]


def test_a_folder_that_cannot_be_written_is_refused_by_name(train, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="output_dir: cannot write to .*file"):
        train("run", f"output_dir={tmp_path / 'file'}")


def test_two_trainings_do_not_share_a_folder(train, tmp_path):
    code = f"from training.run import RunFolder\nrun = RunFolder({str(tmp_path)!r}, 'run')\nrun.open()\n"
    code += "print('open', flush=True)\ninput()"
    other = start("-c", code, stdin=subprocess.PIPE)
    assert other.stdout.readline() == "open\n"
    holder = rf"process {other.pid} on .*, since .*: -c"
    held = rf"another process is training in .*run \({holder}\); wait for it, or choose another name="
    with pytest.raises(ValueError, match=held):
        train("run")
    other.communicate("\n")
    train("run", "train.num_steps=1")


def test_bf16_trains_with_float32_weights(train):
    run = train("run", "train.precision=bf16")
    assert all(torch.isfinite(torch.tensor(list(losses(run).values()))))
    assert {w.dtype for w in weights(run, 6).values()} == {torch.float32}


def test_wandb_offline_reads_the_same_numbers(train, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = train("run", "wandb.mode=offline", "train.num_steps=2", *GRIDS)
    assert list((run / "wandb").glob(f"offline-run-*-{(run / 'wandb_id').read_text()}/*.wandb"))
    assert list(losses(run)) == [1, 2]


def test_a_resume_continues_the_run_of_wandb_and_another_run_starts_its_own(train, monkeypatch):
    started = []
    monkeypatch.setattr(Accelerator, "init_trackers", lambda self, project, config, init_kwargs: started.append(init_kwargs))
    for name, num_steps in (("run", 1), ("run", 2), ("other", 1)):
        train(name, "wandb.mode=offline", f"train.num_steps={num_steps}")
    first, resumed, other = (settings["wandb"] for settings in started)
    assert first["id"] == resumed["id"] != other["id"]
    assert {settings["resume"] for settings in (first, resumed, other)} == {"allow"}


def test_wandb_gets_our_step_with_every_row_so_that_a_resume_from_an_earlier_one_loses_nothing(train, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows, axes, log = [], [], WandBTracker.log
    monkeypatch.setattr(WandBTracker, "log", lambda self, values, **how: rows.append((values, how)) or log(self, values, **how))
    define_metric = wandb.Run.define_metric
    monkeypatch.setattr(
        wandb.Run, "define_metric", lambda *args, **how: axes.append((args[1:], how)) or define_metric(*args, **how)
    )
    train("run", "wandb.mode=offline", "train.num_steps=2", *GRIDS, *EVALUATION)
    assert axes == [(("*",), {"step_metric": "step"})]
    # wandb drops a row whose step= is lower than one that it has.
    assert all(how.get("step") is None for _, how in rows)
    committed = [values for values, how in rows if how.get("commit") is not False]
    assert [values["step"] for values in committed] == [1, 2, 2, 2]  # two of training, the grid's, the evaluation's
    assert "loss" in committed[1] and "fd_digits6/cfg1.0" in committed[3]


# ----------------------------------------------------------------------------------------------------------------------
# Sample grids and evaluation on the way.


def test_a_grid_that_is_made_up_for_at_a_resume_is_not_counted_as_training_time(train, monkeypatch):
    run = train("run", "train.num_steps=2", *GRIDS)
    (run / "samples" / "step_0000002.png").unlink()
    seconds = [0.0]

    def takes(method, sec):
        original = getattr(Trainer, method)

        def timed(self, *args):
            original(self, *args)
            seconds[0] += sec

        monkeypatch.setattr(Trainer, method, timed)

    takes("train_step", 1.0)
    takes("_sample_grid", 1000.0)
    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    train("run", "train.num_steps=4", *GRIDS)
    assert (run / "samples" / "step_0000002.png").exists()
    assert [record["steps_per_sec"] for record in metrics(run) if record["step"] > 2] == pytest.approx([1.0, 1.0])


def test_a_step_waits_for_the_device_only_where_something_is_due(train, monkeypatch):
    pauses, paused = [], trainer_module._Clock.paused
    monkeypatch.setattr(trainer_module._Clock, "paused", lambda clock: pauses.append(clock) or paused(clock))
    train("run", "train.num_steps=4", *GRIDS)
    assert len(pauses) == 3  # two grids and the last checkpoint


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_process_makes_its_share_of_a_grid(train, monkeypatch, rank):
    made, call = [], ImageSampler.__call__
    monkeypatch.setattr(
        ImageSampler, "__call__", lambda self, seeds, labels: made.append(list(seeds)) or call(self, seeds, labels)
    )
    monkeypatch.setattr(trainer_module, "broadcast_object_list", lambda values: values)

    def sample_as_one_of_three(trainer):
        others = SimpleNamespace(num_processes=3, process_index=rank, is_main_process=rank == 0, trackers=[])
        others.gather, others.wait_for_everyone = lambda own: own.repeat(3, 1, 1, 1), lambda: None
        monkeypatch.setattr(trainer, "accelerator", others)
        Trainer._sample_grid(trainer, lambda: False)

    monkeypatch.setattr(Trainer, "train", sample_as_one_of_three)
    train("run", "sample.every=1", "sample.num_samples=7", "sample.batch_size=2", "diffusion.sampler.num_steps=2")
    assert made == [[[0, 1], [2]], [[3, 4], [5]], [[6, 6], [6]]][rank]


def test_the_last_evaluation_has_a_number_of_samples_of_its_own(train):
    evaluation = ["eval.every=1", "eval.num_samples=4", "eval.cfg_scales=[1.0]", "eval.num_steps=1"]
    run = train("run", "train.num_steps=2", "eval.final_num_samples=6", *evaluation)
    names = {record["step"]: set(record) for record in metrics(run) if "evaluation_sec" in record}
    assert "fd_digits4/cfg1.0" in names[1] and "fd_digits6/cfg1.0" in names[2]
    assert "fd_digits4/cfg1.0" not in names[2]


def test_guidance_by_a_null_class_that_is_not_trained_is_refused_before_training(train, tmp_path):
    with pytest.raises(UserError, match="cfg_scale=1.5 needs the null class, which was never trained: .*model.class_dropout=0"):
        train("run", "model.class_dropout=0.0", "guidance=cfg", "guidance.cfg_scale=1.5", *GRIDS)
    with pytest.raises(UserError, match="eval.cfg_scales=2: .*cfg_scale=2 needs the null class"):
        train("run", "model.class_dropout=0.0", "guidance=none", "eval.every=2", "eval.cfg_scales=[1.0,2.0]")
    assert not (tmp_path / "run").exists()
    # Without grids, guidance.* is not used.
    train("run", "model.class_dropout=0.0", "guidance=cfg", "eval.every=6", "eval.num_samples=70", "eval.cfg_scales=[1.0]")


# ----------------------------------------------------------------------------------------------------------------------
# From the weights of another run.


def test_init_from_starts_a_dense_run_from_a_routed_ones_weights_and_average(train):
    routed = train("routed", "train.lr=1e-2")
    dense = train("dense", "model=dit", f"init_from={routed}", "train.num_steps=1", "train.lr=1e-30")
    assert [record["step"] for record in metrics(dense)] == [1]
    before, after = weights(routed, 6), weights(dense, 1)
    assert all(torch.allclose(before[name], after[name], atol=1e-7) for name in before)
    # The average goes on with the decay of its age, (1 + 6) / (10 + 6), and not of a first step.
    average = weights(routed, 6, "ema")
    for name, value in weights(dense, 1, "ema").items():
        assert torch.allclose(value, average[name].lerp(after[name], 9 / 16), atol=1e-6), name


def test_a_run_that_started_from_another_resumes_exactly_without_it(train):
    source = train("source", "train.num_steps=2", "train.lr=1e-2")
    extra = [f"init_from={source}", "model=dit", "seed=1"]
    whole, cut = train("whole", *extra), train("cut", "train.num_steps=3", *extra)
    shutil.rmtree(source)
    train("cut", *extra)
    assert losses(cut) == losses(whole) and list(losses(whole)) == [1, 2, 3, 4, 5, 6]
    assert_same_weights(whole, cut, 6)
    with pytest.raises(ValueError, match="cannot go on under this configuration: init_from: '.*source' -> None"):
        train("cut", "model=dit", "seed=1")


def test_init_state_all_goes_on_with_optimiser_and_step(train):
    whole, source = train("whole"), train("source", "train.num_steps=4")
    branch = train("branch", f"init_from={source / 'checkpoints' / 'step_0000004'}", "init_state=all")
    assert losses(branch) == {5: losses(whole)[5], 6: losses(whole)[6]}
    assert_same_weights(whole, branch, 6)
    fresh = train("fresh", f"init_from={source}", "train.num_steps=6")
    assert list(losses(fresh)) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="goes on from step 4, which leaves nothing to do for train.num_steps=4; raise it"):
        train("other", f"init_from={source}", "init_state=all", "train.num_steps=4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.backbone=DiT-XS/4", "another architecture: model.backbone: 'DiT-XS/2' -> 'DiT-XS/4'"),
        ("model.learn_sigma=true", "another architecture: model.learn_sigma: False -> True"),
        ("diffusion=sit", "another architecture: diffusion.name: 'edm' -> 'sit'"),
        ("init_from=nowhere", "init_from: nowhere is not a folder"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_written(train, tmp_path, change, message):
    source = train("source", "train.num_steps=1")
    with pytest.raises(ValueError, match=message):
        train("run", f"init_from={source}", change)
    assert not (tmp_path / "run").exists()


def test_a_run_of_a_version_without_init_from_resumes(train):
    whole, run = train("whole"), train("run", "train.num_steps=3")
    (folder,) = checkpoints.list_steps(run / "checkpoints").values()
    for name, drop in (("config.yaml", "init_"), ("state.json", "ema_num_updates")):
        lines = [line for line in (folder / name).read_text().splitlines() if drop not in line]
        (folder / name).write_text("\n".join(lines).replace("1,\n}", "1\n}") + "\n")
    renew_manifest(folder)
    train("run")
    assert losses(run) == losses(whole)
    assert_same_weights(whole, run, 6)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints that are written while training goes on.


class AtOnce(ThreadPoolExecutor):
    """Training waits for what the thread does."""

    def submit(self, function, *args):
        future = super().submit(function, *args)
        future.exception()
        return future


def patch_save(monkeypatch, before):
    """Call before(checkpoint) in the thread that writes, before it does; returns the steps trained so far."""
    original_save, original_step, trained = checkpoints.save, Trainer.train_step, []

    def save(root, checkpoint, *args):
        before(checkpoint)
        return original_save(root, checkpoint, *args)

    def train_step(trainer, micro_batches):
        original_step(trainer, micro_batches)
        trained.append(trainer.step)

    monkeypatch.setattr(checkpoints, "save", save)
    monkeypatch.setattr(Trainer, "train_step", train_step)
    return trained


def test_training_goes_on_until_the_next_save_while_a_checkpoint_is_written_that_holds_its_own_step(train, monkeypatch):
    settings = ["checkpoint.every=1", "checkpoint.keep_last=10"]
    with monkeypatch.context() as context:
        context.setattr(trainer_module, "ThreadPoolExecutor", AtOnce)
        whole = train("whole", *settings)
    trained = patch_save(monkeypatch, lambda c: wait_for(lambda: trained[-1] == min(c.step + 1, 6), timeout_sec=10))
    run = train("run", *settings)
    for step in range(1, 7):
        first, second = (path / "checkpoints" / checkpoints.folder_name(step) for path in (whole, run))
        for name in ("model.safetensors", "ema.safetensors", "optimizer.pt", "state.json"):
            assert (first / name).read_bytes() == (second / name).read_bytes(), (step, name)


def test_a_signal_waits_for_the_checkpoint_that_is_being_written_and_saves_its_own_step(train, monkeypatch):
    def slow(checkpoint):
        if checkpoint.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    patch_save(monkeypatch, slow)
    run = train("run", "checkpoint.every=2", "train.num_steps=100000")
    first, *_, last = checkpoints.list_steps(run / "checkpoints").values()
    assert first.name == "step_0000002" and last.name == checkpoints.folder_name(metrics(run)[-1]["step"])
    checkpoints.verify(first)
    checkpoints.verify(last)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_before_the_next_one_is_due(train, monkeypatch, tmp_path):
    def fail(checkpoint):
        raise checkpoints.SaveError(f"no room for step {checkpoint.step}")

    patch_save(monkeypatch, fail)
    with pytest.raises(checkpoints.SaveError, match="^no room for step 20$"):
        train("run", "checkpoint.every=20", "train.num_steps=100000")
    assert 20 < metrics(tmp_path / "run")[-1]["step"] < 40
    with pytest.raises(checkpoints.SaveError, match="^no room for step 3$"):
        train("other", "train.num_steps=3", "train.log_every=3")  # the last step's too


@pytest.mark.skipif(sys.platform != "linux", reason="names of open files are in /proc")
def test_metrics_are_on_the_disk_before_the_checkpoint_that_covers_them(train, monkeypatch):
    flushed, original = [], os.fsync
    record = lambda fd: flushed.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))) or original(fd)  # noqa: E731
    monkeypatch.setattr(os, "fsync", record)
    train("run", "train.num_steps=2", "checkpoint.every=1")
    files = ["model.safetensors", "ema.safetensors", "optimizer.pt", "state.json", "config.yaml", "manifest.json"]
    saves = [["metrics.jsonl", *files, f".tmp_step_000000{step}", "checkpoints"] for step in (1, 2)]
    assert flushed[-18:] == saves[0] + saves[1]


def test_a_copy_of_a_state_dict_takes_the_memory_of_the_one_before():
    state = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.randn(3, 4).T}}, "param_groups": [{"betas": (0.9, 0.99)}]}
    first = copy_state_dict(state, keep=True)
    copied = first["state"][0]["exp_avg"]
    assert torch.equal(copied, state["state"][0]["exp_avg"]) and first["param_groups"] == state["param_groups"]
    state["state"][0]["exp_avg"] += 1
    assert not torch.equal(copied, state["state"][0]["exp_avg"])
    second = copy_state_dict(state, keep=True, into=first)
    assert second["state"][0]["exp_avg"] is copied and torch.equal(copied, state["state"][0]["exp_avg"])
    assert copy_state_dict(state, keep=False)["state"] == {0: {"step": None, "exp_avg": None}}


# ----------------------------------------------------------------------------------------------------------------------
# In processes of their own.


def wait_for(condition, timeout_sec=120):
    deadline = time.monotonic() + timeout_sec
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.05)


def long_run(tmp_path, *extra, **kwargs):
    arguments = [*TINY, "name=run", f"output_dir={tmp_path}", "train.num_steps=100000", "data.num_workers=1", *extra]
    process = start("train.py", *arguments, **kwargs)
    wait_for(lambda: process.poll() is not None or len(metrics_so_far(tmp_path)) >= 3)
    assert process.poll() is None, process.communicate()[0]
    return process


def metrics_so_far(tmp_path):
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_exits_with_0(train, tmp_path, signum):
    process = long_run(tmp_path, start_new_session=True)
    os.killpg(process.pid, signum)  # as a terminal does: to the whole group
    code, output = finish(process)
    assert code == 0, output
    step = metrics(tmp_path / "run")[-1]["step"]
    assert list(checkpoints.list_steps(tmp_path / "run" / "checkpoints")) == [step]
    assert f"stopped after step {step}, as asked" in output
    assert f"{signum.name}: stopping after this step, with a checkpoint; a second SIGTERM or Ctrl-C ends at once" in output
    train("run", f"train.num_steps={step + 2}")
    assert losses(tmp_path / "run") == losses(train("whole", f"train.num_steps={step + 2}"))


def assert_two_signals_end_it(process, timeout_sec):
    process.send_signal(signal.SIGTERM)
    time.sleep(1.2)  # less would be one request
    process.send_signal(signal.SIGTERM)
    code, output = finish(process, timeout_sec)
    assert code == 128 + signal.SIGTERM, output


@pytest.mark.parametrize("what", ["grid", "evaluation"])
@pytest.mark.parametrize("signum", [s for s in STOP_SIGNALS if s != signal.SIGINT])
def test_a_signal_while_it_samples_saves_and_leaves_and_the_next_start_samples_again(train, monkeypatch, caplog, what, signum):
    caplog.set_level(logging.INFO)
    looks = {"grid": GRIDS + ["sample.batch_size=1"], "evaluation": EVALUATION}[what]
    call, batches = ImageSampler.__call__, []

    def signalled(self, seeds, labels):
        batches.append(seeds)
        if len(batches) == 2:
            os.kill(os.getpid(), signum)
            wait_for(lambda: f"{signum.name}: stopping after this step" in caplog.text)
        return call(self, seeds, labels)

    before = signal.signal(signum, signal.SIG_DFL)  # nohup has the tests ignore SIGHUP
    with monkeypatch.context() as patch:
        patch.setattr(ImageSampler, "__call__", signalled)
        run = train("run", "train.num_steps=2", *looks)  # not a multiple of checkpoint.every
    signal.signal(signum, before)
    assert len(batches) == 2 and list(checkpoints.list_steps(run / "checkpoints")) == [2]
    assert "stopped after step 2, as asked; the same command goes on from there" in caplog.text
    is_there = {
        "grid": (run / "samples" / "step_0000002.png").exists,
        "evaluation": lambda: RunFolder(run.parent, "run").has_evaluation(2),
    }
    assert not is_there[what]()
    train("run", "train.num_steps=2", *looks)
    assert is_there[what]()


def test_a_stop_between_checkpoints_while_it_samples_changes_nothing_of_the_run(train, monkeypatch):
    asked, looks = [], ["train.num_steps=4", *GRIDS]
    with monkeypatch.context() as patch:
        patch.setattr(StopSignal, "requested_now", lambda self: asked.append(1) or len(asked) == 1)
        run = train("run", *looks)
    assert list(checkpoints.list_steps(run / "checkpoints")) == [2]
    train("run", *looks)
    whole = train("whole", *looks)
    assert losses(run) == losses(whole)
    assert_same_weights(whole, run, 4)
    assert all((run / "samples" / file.name).read_bytes() == file.read_bytes() for file in (whole / "samples").iterdir())


def test_a_second_signal_exits_at_once(tmp_path):
    process = start("train.py", *TINY, "name=run", f"output_dir={tmp_path}", "train.batch_size=2048")
    wait_for(lambda: (tmp_path / "run" / "config.yaml").exists())
    time.sleep(2)  # now within a step, which takes several seconds
    assert_two_signals_end_it(process, timeout_sec=30)


def test_a_second_signal_exits_at_once_even_within_one_long_operation():
    code = """
import hashlib
from training.stop import StopSignal
stop = StopSignal()
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # many minutes without a bytecode, like a large backward on a CPU
"""
    process = start("-c", code)
    assert "ready\n" in iter(process.stdout.readline, "")
    assert_two_signals_end_it(process, timeout_sec=10)


def test_a_second_signal_exits_at_once_while_the_checkpoint_of_the_first_is_written(train, tmp_path):
    code = """
import time
import torch
import train
from configs import command_line as cli
from configs import schema

torch.save = lambda *args: time.sleep(600)
cli.run(train.main, "config", schema.TrainConfig)
"""
    process = start("-c", code, *TINY, "name=run", f"output_dir={tmp_path}", "checkpoint.every=2")
    temporary = tmp_path / "run" / "checkpoints" / ".tmp_step_0000002"
    wait_for(temporary.exists)
    assert_two_signals_end_it(process, timeout_sec=10)
    assert os.listdir(temporary.parent) == [temporary.name]
    train("run")
    assert os.listdir(temporary.parent) == ["step_0000006"]


def test_signals_return_to_whoever_had_them():
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    stop = StopSignal()
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for(stop.requested)
    stop.close()
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert "signals" not in [thread.name for thread in threading.enumerate()]  # it would free the process group, too late


def test_a_warning_that_somebody_handles_or_ignores_stays_theirs():
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with contextlib.closing(StopSignal()) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and not stop.requested()
    finally:
        signal.signal(signal.SIGHUP, ignored)


def test_warnings_are_requests_that_never_end_a_run_at_once():
    with contextlib.closing(StopSignal()) as stop:
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):  # as Slurm does: a warning, and later the request
            os.kill(os.getpid(), signum)
            time.sleep(1.1)
        assert stop.requested()


@pytest.mark.parametrize("launcher", ["TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND", None])
def test_a_run_stops_when_its_launcher_ends_and_not_when_its_shell_does(monkeypatch, launcher):
    for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    if launcher is not None:
        monkeypatch.setenv(launcher, "x")
    monkeypatch.setattr(stop_module, "_PARENT", -1)  # as if it had ended: this process now has another parent
    with contextlib.closing(StopSignal()) as stop:
        time.sleep(2.5 * stop_module.CHECK_PARENT_SEC)
        assert stop.requested() == (launcher is not None)


def is_free(lock):
    try:
        lock_file(lock, "it is held", "wait").close()
    except UserError:
        return False
    return True


def test_the_processes_of_a_killed_launcher_save_and_leave_even_while_they_evaluate(tmp_path):
    extra = [*EVALUATION, "eval.num_samples=100000", "train.batch_size=8"]
    arguments = [*TINY, "name=run", f"output_dir={tmp_path}", *extra]
    process = start("train.py", *arguments, launcher=LAUNCH_2)
    try:
        wait_for(lambda: process.poll() is not None or len(metrics_so_far(tmp_path)) >= 2)
        time.sleep(1)  # now in the evaluation of step 2, which would take an hour
        process.kill()
        wait_for(lambda: is_free(tmp_path / "run" / ".lock"), timeout_sec=60)
    finally:
        process.kill()
    code, output = finish(process)  # when both have closed their output
    assert list(checkpoints.list_steps(tmp_path / "run" / "checkpoints")) == [2], output
    assert "the launcher has ended: stopping after this step" in output
    assert "stopped after step 2, as asked" in output and "Traceback" not in output


def test_a_process_that_hangs_is_named(tmp_path):
    code = f"""
import sys, time
from datetime import timedelta
import torch.distributed as dist
from common.errors import UserError
from training.stop import StopSignal
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=2)
stop = StopSignal(timedelta(seconds=3))
stop.requested_now()
if rank == 1:
    time.sleep(8)
    sys.exit()
try:
    stop.requested_now()
except UserError as e:
    print(e)
"""
    asleep, waiting = start("-c", code, "1"), start("-c", code, "0")
    assert "waited 0.05 minutes for process 1: it hangs, or is that much slower" in finish(waiting)[1]
    finish(asleep)


def test_kill_9_at_any_time_and_a_resume_give_the_uninterrupted_run(train, tmp_path):
    process = long_run(tmp_path, "checkpoint.every=1")
    time.sleep(random.random())
    process.kill()
    process.wait()
    last = metrics_so_far(tmp_path)[-1]["step"] + 3
    run = train("run", f"train.num_steps={last}")
    whole = train("whole", f"train.num_steps={last}")
    assert losses(run) == losses(whole)
    assert_same_weights(whole, run, last)


def test_two_processes_give_the_losses_of_one_and_can_be_resumed_by_one(train, tmp_path):
    arguments = [*TINY, f"output_dir={tmp_path}", "name=two", "train.batch_size=8"]
    code, output = finish(start("train.py", *arguments, "train.num_steps=20", launcher=LAUNCH_2))
    assert code == 0, output
    one = train("one", "train.batch_size=8", "train.num_steps=22")
    two = losses(tmp_path / "two")
    assert list(two) == list(range(1, 21))
    assert two == pytest.approx({step: loss for step, loss in losses(one).items() if step <= 20}, rel=1e-5)
    train("two", "train.batch_size=8", "train.num_steps=22")
    assert losses(tmp_path / "two") == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_no_thread_of_a_destroyed_process_group_is_left_at_the_end_of_a_process():
    # It would be if torch's compiler were imported, as AdamW does, while there is a group.
    code = """
import time
from pathlib import Path
import torch
import torch.distributed as dist
from configs import command_line as cli

machine.start_accelerator(1, cpu=True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
count = lambda: sum("gloo" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())
before = count()
dist.destroy_process_group()
deadline = time.monotonic() + 5
while count() and time.monotonic() < deadline:
    time.sleep(0.1)
assert before > 0 and count() == 0, (before, count())
"""
    code, output = finish(start("-c", code))
    assert code == 0, output


def test_two_processes_agree_to_stop_on_a_signal_to_one_of_them(tmp_path):
    process = long_run(tmp_path, launcher=LAUNCH_2)
    process.send_signal(signal.SIGTERM)
    finish(process)
    (step,) = checkpoints.list_steps(tmp_path / "run" / "checkpoints")
    checkpoints.verify(tmp_path / "run" / "checkpoints" / checkpoints.folder_name(step))
    assert metrics(tmp_path / "run")[-1]["step"] == step


def test_a_full_disk_during_a_save_stops_the_run_with_the_previous_checkpoint(tmp_path):
    """From the second checkpoint on a limit on the size of files stands in for the disk."""
    code, output = finish(
        start(
            "-c",
            "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "import training.checkpoint as c; save = c.save\n"
            "def limited(root, checkpoint, *args):\n"
            "    if checkpoint.step == 2: resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
            "    return save(root, checkpoint, *args)\n"
            "c.save = limited\n"
            "import train; from setup import cli, schema\n"
            "cli.run(train.main, 'config', schema.TrainConfig)",
            *TINY, "name=run", f"output_dir={tmp_path}", "checkpoint.every=1",
        )
    )  # fmt: skip
    assert code == 1, output
    assert "error: cannot write the checkpoint" in output and "intact before it: step_0000001" in output
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_0000001"]
    checkpoints.verify(tmp_path / "run" / "checkpoints" / "step_0000001")
