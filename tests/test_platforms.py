"""What other systems lack: modules, signals, locks, folders that can be opened. Linux alone runs these tests, and hides it."""

import ast
import errno
import logging
import multiprocessing
import platform
import re
import subprocess

import pytest
from conftest import REPOSITORY, finish, run_train, start

from common import files
from common.errors import UserError
from training import checkpoint as checkpoints
from training.run import RunFolder

# What Windows lacks is hidden after the libraries are imported, which have their own ways there.
AS_ON_WINDOWS = f"""
import asyncio, concurrent.futures, multiprocessing, os, shutil, signal, subprocess, sys, tarfile, tempfile
import accelerate, filelock._soft, huggingface_hub.hf_api, hydra, lmdb, matplotlib.pyplot, PIL.Image, safetensors.torch
import scipy, torch, wandb
import torch.distributed.nn.functional, torch._dynamo
from diffusers import AutoencoderKL, DiffusionPipeline

import fcntl
is_writable = lambda descriptor: fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)
for name in ("fcntl", "resource", "pwd", "grp", "termios", "pty"):
    sys.modules[name] = None
for module, names in (
    (os, "fork sched_getaffinity getuid geteuid getpgid setsid killpg uname mkfifo getloadavg sysconf"),
    (signal, "SIGHUP SIGUSR1 SIGUSR2 SIGKILL SIGQUIT SIGALRM"),
):
    for name in names.split():
        delattr(module, name)
shutil._use_fd_functions = False
multiprocessing.set_start_method("spawn")
os_open, os_fsync = os.open, os.fsync

def open_no_folder(path, flags, *arguments, **settings):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return os_open(path, flags, *arguments, **settings)

def flush_what_may_be_written(descriptor):
    if not is_writable(descriptor):
        raise OSError(9, "Bad file descriptor")
    os_fsync(descriptor)

os.open, os.fsync = open_no_folder, flush_what_may_be_written
sys.platform = "win32"
sys.path.insert(0, {str(REPOSITORY / "tests")!r})
"""

TRAIN_AND_SAMPLE = """
import importlib
from pathlib import Path
import conftest, test_repository
for name in test_repository.MODULES:
    importlib.import_module(name)
folder = Path(sys.argv[1])
run = conftest.run_train(folder, "run", *sys.argv[2:])
import sample
conftest.forget_accelerate()
sample.main(conftest.composed(
    [f"checkpoint={run}", "seeds=0-2", "num_steps=2", "cpu_threads=1", f"output={folder / 'images'}"], "sample"
))
"""
SHORT = ("train.num_steps=3", "sample.every=3", "sample.num_samples=2", "diffusion.sampler.num_steps=2", "checkpoint.every=1")


def test_training_and_sampling_need_nothing_that_windows_lacks(tmp_path):
    arguments = [*SHORT, "checkpoint.keep_last=1", "data.num_workers=2", "eval.every=3", "eval.num_samples=8", "eval.num_steps=2"]
    code, output = finish(start("-c", AS_ON_WINDOWS + TRAIN_AND_SAMPLE, str(tmp_path), *arguments))
    assert code == 0, output
    assert [folder.name for folder in checkpoints.list_steps(tmp_path / "run" / "checkpoints").values()] == ["step_0000003"]
    assert len(list((tmp_path / "images").rglob("*.png"))) == 4 and (tmp_path / "run" / "samples" / "step_0000003.png").exists()


def test_a_spawned_process_trains(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=run_train, args=(tmp_path, "run", "train.num_steps=1"))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0 and (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1


def test_text_files_are_utf_8_everywhere():
    """Without `encoding` Python takes the system's, which on Windows is another."""
    found = []
    for file in sorted(REPOSITORY.rglob("*.py")):
        path = file.relative_to(REPOSITORY)
        if any(part in ("tests", "runs", "outputs") or part.startswith(".") for part in path.parts):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            mode = next((a.value for a in node.args[1:2] if isinstance(a, ast.Constant)), "r")
            is_builtin_open = name == "open" and isinstance(node.func, ast.Name) and "b" not in mode
            if is_builtin_open or name in ("read_text", "write_text"):
                found.append(f"{path}:{node.lineno}")
    assert found == []


# ----------------------------------------------------------------------------------------------------------------------
# Locks.


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(number, tmp_path, monkeypatch, caplog):
    def no_locks(descriptor, blocking):
        raise OSError(number, "no locks")

    monkeypatch.setattr(files, "lock_descriptor", no_locks)
    with caplog.at_level(logging.WARNING):
        RunFolder(str(tmp_path), "run").open()
    assert ".lock cannot be locked (no locks): make sure that no other process writes to this folder" in caplog.text


def test_the_lock_of_a_killed_run_is_free(tmp_path):
    code = f"import time\nfrom training.run import RunFolder\nrun = RunFolder({str(tmp_path)!r}, 'run')\nrun.open()\n"
    process = start("-c", code + "print('open', flush=True)\ntime.sleep(60)")
    assert process.stdout.readline() == "open\n"
    held = re.escape(f"another process is training in {tmp_path / 'run'} (process {process.pid} on {platform.node()}, since 20")
    with pytest.raises(UserError, match=f"^{held}.*: -c\\); wait for it, or choose another name=...$"):
        RunFolder(str(tmp_path), "run").open()
    process.kill()
    finish(process)
    RunFolder(str(tmp_path), "run").open()


def test_a_program_that_a_run_starts_does_not_keep_its_lock(tmp_path):
    code = f"""
import subprocess, sys
from common.files import lock_file
from pathlib import Path
file = lock_file(Path({str(tmp_path / ".lock")!r}), "busy", "wait")
print(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL).pid, flush=True)
input()
"""
    process = start("-c", code, stdin=subprocess.PIPE)
    assert int(process.stdout.readline())
    with pytest.raises(UserError, match=f"^busy .process {process.pid} .*; wait$"):
        files.lock_file(tmp_path / ".lock", "busy", "wait")
    process.kill()
    finish(process)
    assert files.lock_file(tmp_path / ".lock", "busy", "wait")


def test_a_checkpoint_that_somebody_reads_on_windows_is_deleted_at_a_later_save(tmp_path, monkeypatch):
    run = run_train(tmp_path, "run", "train.num_steps=1")
    checkpoint, folder = checkpoints.load(next((run / "checkpoints").iterdir())), run / "checkpoints"
    rename = type(folder).rename

    def refuse(path, target):
        if path.name == "step_0000001":
            raise PermissionError(13, "it is in use")
        return rename(path, target)

    checkpoint.step = 2
    with monkeypatch.context() as windows:
        windows.setattr(type(folder), "rename", refuse)
        checkpoints.save(folder, checkpoint, keep_last=1, keep_every=0)
    assert list(checkpoints.list_steps(folder)) == [1, 2]
    checkpoint.step = 3
    checkpoints.save(folder, checkpoint, keep_last=1, keep_every=0)
    assert list(checkpoints.list_steps(folder)) == [3]


def test_a_script_on_another_drive_is_named_by_its_whole_path(monkeypatch):
    def other_drive(path):
        raise ValueError("path is on mount 'D:', start on mount 'C:'")

    monkeypatch.setattr(files.os.path, "relpath", other_drive)
    assert files.relative_path("D:/tread/train.py") == "D:/tread/train.py"
