"""Files are written completely or not at all. A lock names its holder. Errors name truncated files."""

import errno
import logging
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import file_size_limit, make_shard, wait_for
from forked import Command

from checkpoints.run import RunFolder
from common import files
from common.errors import UserError
from common.files import write_atomically
from common.images import list_images
from evaluations.images import write_npz
from latents.shards import LatentDataset


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
    left = [run.checkpoints / ".tmp_step_0000002", run.checkpoints / ".del_step_0000001"]
    left.append(run.samples / ".tmp_0123456789abcdef_a.png")
    kept = [run.checkpoints / "step_0000001", run.checkpoints / "bad_step_0000001"]
    kept += [run.samples / name for name in (".tmp_mine", ".del_mine", ".tmp_step_one", ".tmp_0123_a.png")]  # the user's own
    for path in left + kept:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    run._lock.close()
    open_run(tmp_path / "run")
    assert not any(path.exists() for path in left) and all(path.exists() for path in kept)


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
    assert ".lock cannot be locked (no locks): make sure that no other process writes to this folder" in caplog.text


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
        list_images(tmp_path / "linked")


def test_a_read_only_disk_is_named_as_such(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        try:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        except FileNotFoundError:
            raise OSError(errno.EROFS, "Read-only file system")  # noqa: B904 (as pathlib's mkdir does)

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(UserError, match="Read-only file system"):
        write_atomically(tmp_path / "a" / "b.txt", "x")
