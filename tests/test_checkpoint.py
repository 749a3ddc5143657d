"""Checkpoints are whole or not there, whatever interrupts a save or damages a file."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from common.errors import UserError
from common.files import REPOSITORY, hash_file
from training import checkpoint as checkpoints
from training.resume import find_resume
from training.run import RunFolder


def make(step, value=0.0):
    weights = {"w": torch.full((50, 40), value + step)}
    return checkpoints.Checkpoint(
        step=step,
        model=weights,
        ema={"w": weights["w"] * 2},
        optimizer={"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(4.0)}}, "param_groups": [{"lr": 0.1}]},
        state={"images_seen": 8 * step},
        config={"seed": 3},
    )


def save(root, *steps, keep_last=10, keep_every=0):
    for step in steps:
        folder = checkpoints.save(root, make(step), keep_last, keep_every)
    return folder


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_what_is_saved_is_what_is_loaded(tmp_path):
    folder = save(tmp_path, 400)
    assert folder.name == "step_0000400"
    assert {f.name for f in folder.iterdir()} == {
        "model.safetensors", "ema.safetensors", "optimizer.pt", "state.json", "config.yaml", "manifest.json",
    }  # fmt: skip
    loaded = checkpoints.load(folder)
    expected = make(400)
    assert loaded.step == 400 and loaded.state == expected.state and loaded.config == expected.config
    assert torch.equal(loaded.model["w"], expected.model["w"]) and torch.equal(loaded.ema["w"], expected.ema["w"])
    assert torch.equal(loaded.optimizer["state"][0]["exp_avg"], torch.ones(3))


def test_weights_are_the_bytes_that_safetensors_writes(tmp_path):
    g = torch.Generator().manual_seed(0)
    weights = {"b": torch.randn(3, 4, generator=g), "a": torch.randn(2, 5, generator=g).T, 'Ω"': torch.tensor(1.5)}
    weights |= {"count": torch.tensor([7]), "none": torch.empty(0, 3), "half": torch.randn(3, generator=g).bfloat16()}
    checkpoint = make(10)
    checkpoint.model = weights
    folder = checkpoints.save(tmp_path, checkpoint, 1, 0)
    save_file({name: value.contiguous() for name, value in weights.items()}, tmp_path / "theirs")
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_save_hashes_what_it_writes_without_reading_it_again(tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(checkpoints, "hash_file", lambda file: pytest.fail(f"{file} is read"))
        folder = save(tmp_path, 10)
    checkpoints.verify(folder)


def test_the_newest_and_every_mth_are_kept(tmp_path):
    save(tmp_path, *range(10, 80, 10), keep_last=2, keep_every=30)
    assert names(tmp_path) == [f"step_00000{step}" for step in (30, 60, 70)]


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def flip_a_bit(folder):
    blob = bytearray((folder / "ema.safetensors").read_bytes())
    blob[-1] ^= 1
    (folder / "ema.safetensors").write_bytes(blob)


def lose_the_optimizer(folder):
    (folder / "optimizer.pt").unlink()


def lose_the_manifest(folder):
    (folder / "manifest.json").unlink()


def garble_the_manifest(folder):
    (folder / "manifest.json").write_text('{"model.safetensors": [1')


def shorten_the_manifest(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["ema.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def make_the_manifest_a_folder(folder):
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


def make_the_manifest_a_pipe(folder):
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def nest_the_manifest(folder):
    (folder / "manifest.json").write_text("[" * 100_000)


def list_a_name_that_is_too_long(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({"x" * 300: {"size": 1, "blake2b": ""}} | manifest))


def list_a_size_that_is_no_number(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({"x": {"size": "large", "blake2b": ""}} | manifest))


def swap_in_a_link_to_itself(folder):
    (folder / "optimizer.pt").unlink()
    (folder / "optimizer.pt").symlink_to("optimizer.pt")


def nest_the_state(folder):
    (folder / "state.json").write_text("[" * 100_000)
    sign(folder)


def take_the_step_out_of_the_state(folder):
    (folder / "state.json").write_text('{"images_seen": 8}')
    sign(folder)


def put_another_step_in_its_place(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("step_0000010"), folder)


def sign(folder):
    """Have the manifest tell of the files as they are now."""
    files = [file for file in sorted(folder.iterdir()) if file.name != "manifest.json"]
    manifest = {file.name: {"size": file.stat().st_size, "blake2b": hash_file(file)} for file in files}
    (folder / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = {
    truncate: r"model.safetensors has \d+ bytes instead of \d+: it is truncated or altered",
    flip_a_bit: r"ema.safetensors was altered",
    lose_the_optimizer: r"optimizer.pt is missing",
    lose_the_manifest: r"it has no manifest.json",
    garble_the_manifest: r"manifest.json is not readable",
    shorten_the_manifest: r"manifest.json does not list ema.safetensors",
    make_the_manifest_a_folder: r"manifest.json is not a file",
    make_the_manifest_a_pipe: r"manifest.json is not a file",
    nest_the_manifest: r"manifest.json is not readable: RecursionError",
    list_a_name_that_is_too_long: r"x is not readable: File name too long",
    list_a_size_that_is_no_number: r"manifest.json is not readable: ValueError",
    swap_in_a_link_to_itself: r"optimizer.pt is missing",
    nest_the_state: r"state.json is not readable: RecursionError",
    take_the_step_out_of_the_state: r"state.json has no step",
    put_another_step_in_its_place: r"step_0000020 holds step 10: it was renamed. Its name must be step_0000010",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_noticed_and_the_previous_one_found(tmp_path, damage):
    save(tmp_path, 10, 20)
    bad = tmp_path / "step_0000020"
    damage(bad)
    with pytest.raises(checkpoints.CheckpointError, match=DAMAGES[damage]):
        checkpoints.verify(bad)
    newest, problems = checkpoints.find_newest(tmp_path)
    assert newest == tmp_path / "step_0000010" and list(problems) == [bad]
    assert checkpoints.set_aside(bad).name == "bad_step_0000020"
    assert names(tmp_path) == ["bad_step_0000020", "step_0000010"]


@pytest.mark.parametrize("name", ["manifest.json", "ema.safetensors", "state.json"])
def test_a_file_that_the_disk_does_not_give_means_the_previous_checkpoint(tmp_path, monkeypatch, name):
    save(tmp_path, 10, 20)
    bad = tmp_path / "step_0000020" / name

    def fail(path):
        if Path(path) == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr("builtins.open", preceded_by(fail, open))
    monkeypatch.setattr(Path, "open", preceded_by(fail, Path.open))
    newest, problems = checkpoints.find_newest(tmp_path)
    assert newest == tmp_path / "step_0000010"
    assert problems == {bad.parent: f"{bad} is not readable: Input/output error"}


def preceded_by(check, function):
    def checked(path, *args, **kwargs):
        check(path)
        return function(path, *args, **kwargs)

    return checked


def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(tmp_path, monkeypatch):
    run = RunFolder(tmp_path, "run")
    save(run.checkpoints, 10)

    def fail(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "iterdir", preceded_by(fail, Path.iterdir))
    with pytest.raises(checkpoints.CheckpointError, match=f"{run.checkpoints} is not readable: Permission denied"):
        find_resume(run, "auto", SimpleNamespace(is_main_process=True))


def test_a_name_that_no_file_system_takes_is_answered_in_one_line(tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match="checkpoint=.*x is not readable: File name too long"):
        checkpoints.find_checkpoint(tmp_path / ("x" * 300), "checkpoint")


def test_a_damaged_checkpoint_that_cannot_be_renamed_is_named(tmp_path, monkeypatch):
    bad = save(tmp_path, 10)

    def fail(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "rename", preceded_by(fail, Path.rename))
    with pytest.raises(UserError, match=f"{bad} is damaged, and cannot be renamed to bad_step_0000010: Permission denied; move"):
        checkpoints.set_aside(bad)


def test_a_second_bad_checkpoint_of_a_step_does_not_replace_the_first(tmp_path):
    save(tmp_path, 10)
    checkpoints.set_aside(tmp_path / "step_0000010")
    save(tmp_path, 10)
    assert checkpoints.set_aside(tmp_path / "step_0000010").name == "bad_step_0000010_2"


def test_training_does_not_start_over_when_only_bad_checkpoints_remain(tmp_path):
    run = RunFolder(tmp_path, "run")
    truncate(save(run.checkpoints, 10))
    with pytest.raises(checkpoints.CheckpointError, match="does not silently start over.*name="):
        find_resume(run, "auto", SimpleNamespace(is_main_process=True))
    assert names(run.checkpoints) == ["step_0000010"]


def test_a_run_whose_checkpoints_are_all_bad_is_refused_under_the_key_that_named_it(tmp_path):
    truncate(save(tmp_path / "checkpoints", 10))
    with pytest.raises(checkpoints.CheckpointError, match="init_from=.*without a whole checkpoint: .*truncated.* Give another"):
        checkpoints.find_checkpoint(tmp_path, "init_from")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "runs/mine/checkpoints",
            "=runs/mine/checkpoints is no checkpoint; give the folder of the run, KEY=runs/mine, for its newest",
        ),
        (
            "runs/mine/checkpoints/step_0000020/ema.safetensors",
            "lies in a checkpoint; give KEY=runs/mine/checkpoints/step_0000020$",
        ),
        ("runs/mine/checkpoints/step_0000030", "KEY=runs/mine, .*; runs/mine/checkpoints holds step_0000010, step_0000020$"),
        ("runs/mine/metrics.jsonl", "is no checkpoint; give the folder of the run, KEY=runs/mine"),
        ("runs/mien", "runs/mien is not a folder; give a checkpoint .* or a run .*; nearest: KEY=runs/mine$"),
        ("runs/other_name", "or a run such as runs/<name>, of which the newest checkpoint is taken$"),
        ("mine", "nearest: KEY=runs/mine$"),
        ("runs", "KEY=runs is a folder of runs; give one of them: KEY=runs/mine$"),
        ("empty", "KEY: empty is not a checkpoint or a run: it has no manifest.json and no folder checkpoints"),
    ],
)
def test_a_path_near_a_checkpoint_is_answered_with_the_one_to_give(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "runs" / "mine" / "checkpoints", 10, 20)
    (tmp_path / "empty").mkdir()
    for key in ("checkpoint", "init_from"):
        with pytest.raises(checkpoints.CheckpointError, match=message.replace("KEY", key)):
            checkpoints.find_checkpoint(Path(path), key)


def test_a_run_can_be_resumed_from_the_newest_checkpoint_of_another(tmp_path):
    save(tmp_path / "theirs" / "checkpoints", 10, 20)
    run, main = RunFolder(tmp_path, "mine"), SimpleNamespace(is_main_process=True)
    with pytest.raises(checkpoints.CheckpointError, match=f"give the folder of the run, resume={tmp_path / 'theirs'}, for its"):
        find_resume(run, str(tmp_path / "theirs" / "checkpoints"), main)
    assert find_resume(run, str(tmp_path / "theirs"), main) == tmp_path / "theirs" / "checkpoints" / "step_0000020"


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(checkpoints.CheckpointError, match="is not a folder; give a checkpoint"):
        checkpoints.verify(tmp_path / "nothing")
    with pytest.raises(checkpoints.CheckpointError, match="it has no manifest.json"):
        checkpoints.verify(tmp_path)


def in_a_process(tmp_path, code):
    """Save step 20 in a process of its own, after `code` has prepared it."""
    program = f"""
        import os, resource, signal, sys
        sys.path[:0] = [{str(REPOSITORY)!r}, {str(REPOSITORY / "tests")!r}]
        from pathlib import Path
        from test_checkpoint import make
        from training import checkpoint as checkpoints
        root = Path({str(tmp_path)!r})
        checkpoint = make(20)
    """
    program = textwrap.dedent(program) + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize("moment", ["torch.save", "os.fsync", "Path.rename"])
def test_a_kill_in_the_middle_of_a_save_leaves_the_previous_checkpoint(tmp_path, moment):
    save(tmp_path, 10)
    owner, _, name = moment.partition(".")
    result = in_a_process(
        tmp_path,
        f"""
        import torch
        {owner}.{name} = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save(root, checkpoint, 10, 0)
        """,
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert names(tmp_path) == [".tmp_step_0000020", "step_0000010"]
    assert checkpoints.find_newest(tmp_path) == (tmp_path / "step_0000010", {})
    save(tmp_path, 20)
    assert names(tmp_path) == ["step_0000010", "step_0000020"]


@pytest.mark.parametrize(("kib", "file"), [(4, "model.safetensors"), (12, "optimizer.pt")])
def test_a_full_disk_leaves_the_previous_checkpoint_and_no_debris(tmp_path, kib, file):
    save(tmp_path, 10)
    result = in_a_process(
        tmp_path,
        f"""
        import torch
        checkpoint.optimizer["state"][0]["exp_avg"] = torch.ones(5000)
        # Files may not grow beyond a few KiB: writing fails as on a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ({kib * 1024}, {kib * 1024}))
        try:
            checkpoints.save(root, checkpoint, 10, 0)
        except checkpoints.SaveError as e:
            sys.exit(str(e))
        """,
    )
    assert "cannot write the checkpoint" in result.stderr and "intact before it: step_0000010" in result.stderr
    assert "File too large; " in result.stderr and f" MB are free on the disk of {tmp_path} ({file}); intact" in result.stderr
    assert names(tmp_path) == ["step_0000010"]
    checkpoints.verify(tmp_path / "step_0000010")


def test_loading_runs_no_code_from_the_file(tmp_path):
    folder = save(tmp_path, 10)

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "pwned"),)

    torch.save({"state": Evil()}, folder / "optimizer.pt")
    sign(folder)
    with pytest.raises(checkpoints.CheckpointError, match="optimizer.pt is not readable: .*[wW]eights.only"):
        checkpoints.load(folder)
    assert not (tmp_path / "pwned").exists()
