"""Files are written completely or not at all. A lock names its holder. Errors name truncated files."""

import contextlib
import errno
import json
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch
from conftest import file_size_limit, make_shard, wait_for
from forked import Command
from PIL import Image
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import save_file

from checkpoints.run import RunFolder
from common import files
from common.errors import UserError
from common.files import write_atomically
from common.images import list_images
from evaluations.images import open_images, write_npz
from latents.dataset import LatentDataset
from latents.prepare.convert import ConvertConfig
from latents.prepare.encode_plan import EncodeConfig


def open_run(folder):
    run = RunFolder(str(folder.parent), folder.name)
    run.open()
    return run


# ----------------------------------------------------------------------------------------------------------------------
# Writing. tests/test_drills.py fills the disk while commands run.


WRITERS = {
    "a": lambda folder: files.write_atomically(folder / "a", "text" * 100),
    "metrics.jsonl": lambda folder: files.append_line(folder / "metrics.jsonl", {"step": list(range(50))}),
    "a.npz": lambda folder: write_npz(folder / "a.npz", [np.zeros((64, 64, 3), np.uint8)], (1, 64, 64, 3)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_named_with_the_file_and_the_free_space_and_leaves_nothing_behind(name, tmp_path):
    (tmp_path / name).write_text('{"step": 1}\n')
    words = f"^cannot write {tmp_path / name}: File too large; [0-9]+ MB are free on the disk of {tmp_path}"
    with file_size_limit(100), pytest.raises(UserError, match=words):
        WRITERS[name](tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text().startswith('{"step": 1}\n')


def test_paths_that_are_empty_or_lead_through_a_loop_of_links_are_refused(tmp_path):
    (loop := tmp_path / "loop").symlink_to("loop")
    for kind, keys in ((EncodeConfig, ("images", "output", "latents_stats")), (ConvertConfig, ("path", "output"))):
        hints = get_type_hints(kind, include_extras=True)
        for path, words in (("", "at least 1 character"), (str(loop), "form a loop"), (f"{loop}/a/b", "form a loop")):
            for key in keys:
                with pytest.raises(ValidationError, match=words):
                    TypeAdapter(hints[key]).validate_python(path)


def test_a_full_disk_keeps_nobody_from_a_lock_and_hides_no_other_error(tmp_path):
    with file_size_limit(0):
        files.lock_file(tmp_path / ".lock", "training in", "name").close()
        files.lock_file(tmp_path / ".lock", "training in", "name").close()


@pytest.mark.parametrize("content", ["mine", '{"packages": {}}\n', None])
def test_a_file_or_folder_of_others_under_the_name_of_a_lock_is_left_alone(content, tmp_path):
    file = tmp_path / ".lock"
    file.mkdir() if content is None else file.write_text(content)
    with pytest.raises(UserError, match=f"^{file} (is not a regular file|was not written by this program)"):
        files.lock_file(file, "training in", "name")
    assert file.is_dir() if content is None else file.read_text() == content


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_an_earlier_file_is_untouched_if_a_new_one_cannot_be_written(number, tmp_path):
    files.write_atomically(tmp_path / "a", "earlier")
    words = f"^cannot write {tmp_path / 'a'}: {os.strerror(number)}; .* MB are free"
    with pytest.raises(UserError, match=words), files.open_atomically(tmp_path / "a") as f:
        f.write(b"half")
        raise OSError(number, os.strerror(number))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a", "earlier")]


def test_a_folder_that_cannot_be_written_is_named_without_the_free_space(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"^cannot write {tmp_path}/file/a: File exists$"):
        files.write_atomically(tmp_path / "file" / "a", "text")
    with pytest.raises(UserError, match=f"^cannot write to {tmp_path}/file/run: Not a directory$"):
        open_run(tmp_path / "file" / "run")


def test_a_run_removes_the_leftovers_of_an_interrupted_save_and_nothing_else(tmp_path):
    run = open_run(tmp_path / "run")
    run.starts.touch()
    (run.path / "ema_snapshots").mkdir()
    left = [run.checkpoints / ".tmp_step_0000002", run.checkpoints / ".del_step_0000001"]
    left.append(run.samples / ".tmp_0123456789abcdef_a.png")
    left.append(run.path / "ema_snapshots" / ".tmp_0123456789abcdef_step_0000001_hash.safetensors")
    kept = [run.checkpoints / "step_0000001", run.checkpoints / "bad_step_0000001"]
    kept += [run.samples / name for name in (".tmp_mine", ".del_mine", ".tmp_step_one", ".tmp_0123_a.png")]  # the user's own
    for path in left + kept:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    run._lock.close()
    open_run(tmp_path / "run")
    assert not any(path.exists() for path in left) and all(path.exists() for path in kept)


def test_a_disk_without_free_inodes_is_named_as_such(tmp_path, monkeypatch):
    usage = os.statvfs(tmp_path)
    full = os.statvfs_result((*usage[:5], 1000, 0, 0, *usage[8:]))  # f_files, f_ffree, f_favail
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    monkeypatch.setattr(Path, "mkdir", lambda *args, **how: raise_os_error(errno.ENOSPC))
    with pytest.raises(UserError, match=r"^cannot write to .*samples: No space left .* MB are free .* \(no free inodes\)$"):
        files.make_folder(tmp_path / "samples")


def raise_os_error(number):
    raise OSError(number, os.strerror(number))


# ----------------------------------------------------------------------------------------------------------------------
# Folders from elsewhere: links, pipes and the files of others.


@pytest.mark.parametrize("name", [".lock", "starts.jsonl", "checkpoints", "samples", "ema_snapshots", "wandb"])
def test_nothing_is_written_through_a_link_inside_a_run(name, tmp_path):
    outside = tmp_path / "outside"
    if "." in name:
        outside.write_text("mine\n")
    else:
        outside.mkdir()
        (outside / ".tmp_0123456789abcdef_x").write_text("mine\n")
    run = RunFolder(tmp_path, "run")
    run.path.mkdir()
    run.starts.touch()
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(outside)
    with pytest.raises(UserError, match=f"^{run.path / name} is a link, and nothing is written through links inside {run.path}"):
        run.open()
        files.append_line(run.starts, {"step": 0})
    file = outside if "." in name else outside / ".tmp_0123456789abcdef_x"
    assert file.read_text() == "mine\n"


def test_a_run_or_an_output_folder_that_is_a_link_as_a_whole_is_used(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    run = open_run(tmp_path / "run")
    files.append_line(run.metrics, {"step": 1})
    assert (tmp_path / "disk" / "metrics.jsonl").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("name", ["metrics.jsonl", "wandb_id", "config.yaml", "state.json", "a.safetensors", ".lock"])
def test_a_pipe_under_the_name_of_a_file_is_an_error_and_no_wait(name, tmp_path):
    os.mkfifo(file := tmp_path / name)
    readers = {
        "metrics.jsonl": lambda: list(files.read_lines(file)),
        "wandb_id": RunFolder(tmp_path.parent, tmp_path.name).wandb_id,
        "config.yaml": lambda: files.read_yaml(file),
        "state.json": lambda: files.read_json(file),
        "a.safetensors": lambda: LatentDataset(tmp_path),
        ".lock": lambda: files.lock_file(file, "training in", "name"),
    }
    with within_a_second(), pytest.raises(UserError, match=f"^{file} is not a regular file, or the link is broken$"):
        readers[name]()


@contextlib.contextmanager
def within_a_second():
    previous = signal.signal(signal.SIGALRM, lambda *args: pytest.fail("it waits"))
    signal.setitimer(signal.ITIMER_REAL, 5)  # five seconds, because other processes share the machine
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_aliases_that_multiply_in_a_yaml_file_are_refused_at_once(tmp_path):
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    with within_a_second(), pytest.raises(UserError, match="config.yaml cannot be read: it contains YAML aliases$"):
        files.read_yaml(tmp_path / "config.yaml")


@pytest.mark.parametrize("name", ["config.yaml", "notes.md", "checkpoints/model.pt", "src/main.py", "metrics.jsonl"])
def test_the_folder_of_somebody_else_is_not_taken_over(name, tmp_path):
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("model: mine\n")
    before = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(UserError, match=f"run holds {name.partition('/')[0]} and was not made by train.py; .* name="):
        open_run(tmp_path / "run")
    assert sorted((tmp_path / "run").rglob("*")) == before and file.read_text() == "model: mine\n"


def test_a_folder_with_logs_of_a_launcher_is_new_and_our_configuration_makes_a_folder_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("slurm-7.out", "slurm-7.err", "log.txt"):
        (tmp_path / "run" / name).touch()
    run = open_run(tmp_path / "run")
    run.write_config(dict.fromkeys(("data", "model", "diffusion", "train", "checkpoint")))
    (run.path / "notes.md").touch()
    run._lock.close()
    open_run(tmp_path / "run")


# ----------------------------------------------------------------------------------------------------------------------
# Locks.


def hold_a_run():
    sys.argv = ["train.py", "name=run"]  # the command sets it only after `before`
    run = open_run(Path("run"))
    Path("is_open").touch()
    time.sleep(600)
    run.close()


def test_the_error_for_a_locked_run_names_its_process_until_that_is_killed(tmp_path):
    process = Command(tmp_path, ["train.py", "name=run"], before=hold_a_run)
    wait_for((tmp_path / "is_open").exists)
    words = rf"^another process is training in {tmp_path}/run: process {process.process.pid} on .*; .* name="
    with pytest.raises(UserError, match=words):
        open_run(tmp_path / "run")
    process.finish(limit_sec=0)  # kills the process
    run = open_run(tmp_path / "run")
    words = rf"^another process is sampling into {tmp_path}/run: process {os.getpid()} on .* output="
    with pytest.raises(UserError, match=words):
        files.lock_file(run.path / ".lock", "sampling into", "output")


def test_a_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch, caplog):
    def no_locks(descriptor, blocking):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(files, "lock_descriptor", no_locks)
    with caplog.at_level(logging.WARNING):
        open_run(tmp_path / "run")
    assert "run cannot be locked (no locks): make sure that no other process writes there" in caplog.text


# ----------------------------------------------------------------------------------------------------------------------
# Reading.


def test_lines_that_hold_no_json_object_are_skipped(tmp_path, caplog):
    (tmp_path / "a").write_bytes(b'[1]\n{"step": 1}\n\xff\n{"st\n')
    assert list(files.read_lines(tmp_path / "a")) == [{"step": 1}]
    assert list(files.read_lines(tmp_path / "none")) == []
    assert list(files.read_lines(tmp_path / "a", dict)) == [{"step": 1}]
    assert caplog.messages == [f"{tmp_path / 'a'}: line 1 is left out: it is not an object (2 other lines are left out, too)"]
    with pytest.raises(UserError, match=f"^{tmp_path / 'a'} cannot be read: UnicodeDecodeError"):
        files.read_json(tmp_path / "a")


def test_a_shard_without_channels_and_a_manifest_of_other_types_are_named(tmp_path):
    tensors = {"latents": torch.zeros(2, 0, 8, 8), "labels": torch.zeros(2, dtype=torch.int64)}
    save_file(tensors, tmp_path / "a.safetensors", ABOUT)
    with pytest.raises(UserError, match="a.safetensors holds .*; a latent shard needs latents .* with C, H and W above 0"):
        LatentDataset(tmp_path)
    for content, words in (
        ({"shards": [1], "settings": {}}, "shards=.1.: Input should"),
        ({"shards": {"a": 1}, "settings": {}}, "shards.a=1: Input should"),
        ({"shards": {}, "settings": 3}, "settings=3: Input should"),
        ({"shards": {}, "settings": {}, "class_names": 3}, "class_names=3: Input should"),
        ([], "missing keys: shards, settings.; make the folder again, or remove this file$"),
    ):
        (tmp_path / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=rf"manifest.json is not a manifest of latent shards \({words}"):
            LatentDataset(tmp_path)


ABOUT = {"about": json.dumps(dict(kind="sample", scale_factor=1.0, autoencoder="identity", resolution=8, num_classes=1))}


def test_a_dangling_link_among_the_images_of_a_reference_is_named_before_any_work(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to("missing.png")
    with pytest.raises(UserError, match="b.png cannot be read: it is not a regular file, or the link is broken"):
        open_images(tmp_path, crop=8).portable_hash()


def test_a_deep_tree_of_folders_is_listed_or_refused_at_once(tmp_path):
    here = os.getcwd()
    os.chdir(tmp_path)
    try:  # absolute paths of this depth are longer than a system call accepts
        for _ in range(900):
            os.mkdir("d1234")
            os.chdir("d1234")
    finally:
        os.chdir(here)
    with within_a_second(), pytest.raises(UserError, match="cannot be read: File name too long"):
        open_images(tmp_path)


@pytest.mark.parametrize("kept", [0, 0.5, 0.999])
def test_a_shard_that_is_truncated_during_use_is_named(kept, tmp_path):
    for k in range(2):
        make_shard(tmp_path / f"{k}.safetensors", num_items=24, channels=4, size=16, seed=k)
    dataset, file = LatentDataset(tmp_path), tmp_path / "1.safetensors"
    os.truncate(file, int(kept * file.stat().st_size))
    dataset.fetch(np.arange(24), np.zeros(24, dtype=bool))
    with pytest.raises(UserError, match=f"^{re.escape(str(file))} is truncated"):
        dataset.fetch(np.arange(48), np.zeros(48, dtype=bool))


def test_images_are_listed_through_links_and_a_loop_of_links_is_refused(tmp_path):
    for name in ("b/1.PNG", "b/2.txt", "a.png", ".hidden/3.png", "__MACOSX/4.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / name).touch()
    (tmp_path / "linked").symlink_to("images")
    (tmp_path / "images" / "c").symlink_to("b")
    assert list_images(tmp_path / "linked")[0] == ["a.png", "b/1.PNG", "c/1.PNG"]
    (tmp_path / "images" / "b" / "loop").symlink_to(tmp_path / "images")
    with pytest.raises(UserError, match="loop is a link to a folder that contains it"):
        open_images(tmp_path / "linked")


def test_a_read_only_disk_is_named_as_such(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        try:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        except FileNotFoundError:
            raise OSError(errno.EROFS, "Read-only file system")  # noqa: B904 (as pathlib's mkdir does)

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(UserError, match="Read-only file system"):
        write_atomically(tmp_path / "a" / "b.txt", "x")
