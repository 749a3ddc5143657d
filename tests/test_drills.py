"""Drills: tests kill commands, send them signals, start them twice, fill their disk and damage their checkpoints.

In the end their files must equal those of an undisturbed run, byte for byte. The disturbances of a test hit the same folder,
one per start. Needs Linux.
"""

import errno
import os
import re
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY
from forked import Command, at_call, at_operation, contents, die, fail_with, launch, run, send
from PIL import Image

from checkpoints import store
from checkpoints.checkpoint import find_newest
from checkpoints.run import read_metrics

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, signals and /proc")
FEW = ["sampler.num_steps=2", "machine.cpu_threads=1"]
ENCODE = ["images={inputs}/images", "autoencoder=identity", "kind=sample", "resolution=8", "shard_size=4", "num_workers=0"]
COMMANDS = {
    "train": [
        "train.py", *TINY, "name=run", "output_dir=.", "checkpoint.every=2", "checkpoint.keep_last=1", "sample_grid.every=3",
        "sample_grid.num_samples=3", "sampler.num_steps=2",
    ],
    "sample": ["sample.py", "checkpoint={inputs}/run", "output=images", "seeds=0-3", "sampling.batch_size=2", *FEW],
    "fid": ["fid.py", "checkpoint={inputs}/run", "output=scores", "evaluation.num_samples=70", "guidance=none", *FEW],
    "encode": ["prepare_latents.py", "encode", "output=latents", *ENCODE, "cpu_threads=1"],
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Fixture: a folder with run/ (checkpoints of steps 2, 4 and 6) and images/ (two classes)."""
    folder, rng = tmp_path_factory.mktemp("inputs"), np.random.default_rng(0)
    for i in range(10):
        file = folder / "images" / ("ant", "bee")[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(file)
    run(folder, [*COMMANDS["train"], "checkpoint.keep_last=3"]).expect_code(0)
    return folder


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory):
    """Fixture: undisturbed(name, *more) returns the arguments of a command and the files that it leaves."""
    found = {}

    def make(name, *more):
        arguments = [argument.format(inputs=inputs) for argument in COMMANDS[name]] + list(more)
        if (name, more) not in found:
            folder = tmp_path_factory.mktemp(name)
            run(folder, arguments).expect_code(0)
            found[name, more] = contents(folder)
        return arguments, found[name, more]

    return make


def expect_same(out, reference):
    kept = {name.split("/")[2] for name in reference if "/checkpoints/" in name}
    for folder in out.glob("run/checkpoints/step_*"):
        if folder.name not in kept:  # the command was killed before it deleted an old checkpoint
            store.verify(folder)
            shutil.rmtree(folder)
    ours = {name: found for name, found in contents(out).items() if "_earlier_" not in name}  # of starts before the first save
    assert [name for name in sorted(ours | reference) if ours.get(name) != reference.get(name)] == []


def disturb(out, arguments, reference, before):
    """Return how a disturbed command ended. If nothing was left to do, so that nothing happened, it starts from the beginning."""
    newest = newest_step(out)
    outcome = run(out, arguments, before)
    if not outcome.happened():
        outcome.expect_code(0)
        expect_same(out, reference)
        shutil.rmtree(out)
        newest, outcome = -1, run(out, arguments, before)
    assert outcome.happened(), outcome.output
    assert newest_step(out) >= newest  # no complete checkpoint is lost
    return outcome


def newest_step(out):
    newest, problems = find_newest(out / "run" / "checkpoints")
    assert not problems
    return -1 if newest is None else newest.step


def finish_alike(out, arguments, reference):
    run(out, arguments).expect_code(0)
    expect_same(out, reference)


# ----------------------------------------------------------------------------------------------------------------------
# Kills: the process dies before each of these file operations.

KILLS = {
    "train": [
        r"open run/\.lock", r"rename run/\.tmp_config", r"open run/starts", r"mkdir \S*tmp_step", r"open \S*optimizer\.pt",
        r"open \S*manifest\.json", r"fsync \S*ema\.safetensors", r"fsync \S*tmp_step_\d+$", r"rename \S*/\.tmp_step_\d+ ",
        r"fsync run/checkpoints$", r"rename \S* \S*\.del_step", "remove ema.safetensors", r"rename \S*samples/",
        r"open run/metrics",
    ],
    "sample": [r"open images/\.tmp_settings", r"open images/\.tmp_seed_000002", r"rename \S*seed_000003", r"rename \S*npz"],
    "fid": [r"open scores/results\.jsonl", r"rename \S*results"],
    "encode": [r"rename \S*latents_00001", r"open \S*manifest\.json", r"remove latents/\.unfinished"],
}  # fmt: skip


@pytest.mark.parametrize("name", KILLS)
def test_a_command_that_is_killed_repeatedly_leaves_the_files_of_an_undisturbed_one(name, undisturbed, tmp_path):
    arguments, reference = undisturbed(name)
    for pattern in KILLS[name]:
        disturb(tmp_path / "out", arguments, reference, partial(at_operation, die, pattern)).expect_code(-signal.SIGKILL)
    finish_alike(tmp_path / "out", arguments, reference)


FIRST_SAVE = [r"mkdir \S*tmp_step", r"open \S*optimizer\.pt", r"fsync \S*ema\.safetensors", r"rename \S*/\.tmp_step_\d+ "]


def test_starts_that_are_killed_during_the_first_save_or_while_they_rename_keep_their_losses(undisturbed, tmp_path):
    arguments, reference = undisturbed("train")
    for pattern in [*FIRST_SAVE, r"rename run/metrics\.jsonl"]:
        run(tmp_path / "out", arguments, partial(at_operation, die, pattern)).expect_code(-signal.SIGKILL)
    finish_alike(tmp_path / "out", arguments, reference)
    *earlier, last = (losses(file) for file in sorted(tmp_path.glob("out/run/metrics*"), reverse=True))
    assert len(earlier) == len(FIRST_SAVE) and all(found and found == last[: len(found)] for found in earlier)
    assert len([*tmp_path.glob("out/run/config_earlier_*")]) == len(FIRST_SAVE)


def losses(file):
    return [line["loss"] for line in read_metrics(file)]


# ----------------------------------------------------------------------------------------------------------------------
# A full or failing disk: {operation that fails: file that the error names}.

FULL = {
    "train": {
        r"\S*/\.lock": "run", "mkdir run/samples": "run/samples", r"open \S*config\.yaml": "config.yaml",
        "open run/metrics": "run", "open run/starts": "starts.jsonl",
        r"open \S*optimizer\.pt": "step_", r"open \S*state\.json": "step_", r"open \S*samples/": "samples/step_",
    },
    "sample": {r"open \S*settings": "settings.yaml", r"open \S*seed_000002": "seed_000002", r"open \S*npz": "samples_0-3.npz"},
    "fid": {"open scores/results.jsonl": "results.jsonl"},
    "encode": {r"open \S*latents_00001": "latents_00001", r"open \S*manifest\.json": "manifest.json"},
}  # fmt: skip


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk_gives_an_error_of_one_line_and_the_next_start_continues(name, undisturbed, tmp_path):
    arguments, reference = undisturbed(name)
    for pattern, named in FULL[name].items():
        number = errno.EIO if "state" in pattern else errno.ENOSPC
        words = ("Input/output error",) if number == errno.EIO else ("No space left", "MB are free")
        before = partial(at_operation, partial(fail_with, number), pattern)
        disturb(tmp_path / "out", arguments, reference, before).expect_one_line(named, *words)
        assert not list(tmp_path.glob("out/run/checkpoints/.tmp*"))
    finish_alike(tmp_path / "out", arguments, reference)


# ----------------------------------------------------------------------------------------------------------------------
# Signals.

LOOKS = [
    "sampling.batch_size=1",
    "evaluation.every=3",
    "evaluation.num_samples=4",
    "sampling.batch_size=1",
    "sampler.num_steps=1",
]
STEP, SAMPLER = "training.trainer:Trainer.train_step", "sampling.sampler:ImageSampler.__call__"
MOMENTS = [(STEP, 2), ("checkpoints.store:_write_files", 1), (SAMPLER, 2), (SAMPLER, 5)]  # in a step, save, grid and evaluation


def test_training_saves_at_each_signal_and_ends_with_the_files_of_an_undisturbed_run(undisturbed, tmp_path):
    arguments, reference = undisturbed("train", *LOOKS)
    moments = [(signal.SIGTERM, *moment) for moment in MOMENTS] + [
        (signum, STEP, 1) for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    ]
    for signum, call, number in moments:
        outcome = disturb(tmp_path / "out", arguments, reference, partial(at_call, partial(send, signum), call, number))
        outcome.expect_code(128 + signum if signum == signal.SIGINT and "stopped after" in outcome.output else 0)
        stopped = re.search(r"stopped after step (\d+)", outcome.output)
        assert int(stopped[1]) == newest_step(tmp_path / "out") if stopped else "100%" in outcome.output, outcome.output
    finish_alike(tmp_path / "out", arguments, reference)


@pytest.mark.parametrize("name", ["sample", "encode"])
def test_other_commands_print_no_traceback_at_a_signal_and_their_next_start_continues(name, undisturbed, tmp_path):
    arguments, reference = undisturbed(name)
    for signum, pattern in zip((signal.SIGTERM, signal.SIGINT), KILLS[name][1:]):
        outcome = disturb(tmp_path / "out", arguments, reference, partial(at_operation, partial(send, signum), pattern))
        outcome.expect_code(1, 128 + signum, -signum)
    finish_alike(tmp_path / "out", arguments, reference)


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
def test_two_processes_save_the_same_step_whichever_is_signalled(ranks, inputs, tmp_path):
    arguments = [*COMMANDS["train"], "train.num_steps=1000", "sample_grid.every=0", "checkpoint.every=1000"]
    before = partial(at_call, partial(send, signal.SIGTERM), STEP, 3)
    for outcome in launch(tmp_path, arguments, 2, dict.fromkeys(ranks, before)):
        outcome.expect_code(0)
    assert newest_step(tmp_path) in (3, 4)  # the ranks agree before each step


def kill_wandb():
    """Kill the service of wandb, which is a child of this process."""
    services = [
        int(pid)
        for children in Path("/proc/self/task").glob("*/children")
        for pid in children.read_text().split()
        if b"wandb" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert services
    for pid in services:
        os.kill(pid, signal.SIGKILL)


def test_a_run_outlives_the_service_of_wandb(undisturbed, tmp_path):
    arguments, reference = undisturbed("train")
    outcome = run(tmp_path / "out", [*arguments, "wandb.mode=offline"], partial(at_call, kill_wandb, STEP, 2))
    outcome.expect_code(0)
    assert outcome.happened() and outcome.output.count("Weights & Biases failed") == 1, outcome.output
    ours = contents(tmp_path / "out")
    for name in ("run/metrics.jsonl", "run/checkpoints/step_0000006/optimizer.pt", "run/samples/step_0000006.png"):
        assert ours[name] == reference[name], name


# ----------------------------------------------------------------------------------------------------------------------
# Damage, and the same command twice.


def test_training_repeats_the_steps_of_a_damaged_checkpoint(inputs, undisturbed, tmp_path):
    arguments, reference = undisturbed("train", "checkpoint.keep_last=3")
    shutil.copytree(inputs / "run", tmp_path / "out" / "run")
    rng = np.random.default_rng(0)
    for number, file in enumerate(("ema.safetensors", "optimizer.pt", "manifest.json")):
        damaged = tmp_path / "out" / "run" / "checkpoints" / "step_0000006" / file
        content = bytearray(damaged.read_bytes())
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        damaged.write_bytes(content if number % 2 else content[:-1])
        finish_alike(tmp_path / "out", arguments, reference)
    assert len(list(tmp_path.glob("out/run/checkpoints/bad_step_0000006*"))) == number + 1


@pytest.mark.parametrize("name", ["train", "sample"])
def test_if_a_command_is_started_twice_one_works_and_the_other_names_it_or_both_succeed(name, undisturbed, tmp_path):
    arguments, reference = undisturbed(name)
    outcomes = [process.finish() for process in [Command(tmp_path / "out", arguments) for _ in range(2)]]
    for outcome in outcomes:
        if outcome.code != 0:
            outcome.expect_one_line("another process")
    assert any(outcome.code == 0 for outcome in outcomes), outcomes
    expect_same(tmp_path / "out", reference)
