"""Signals ask a run to stop, a second one ends it; other processes and the end of the launcher are noticed."""

import contextlib
import os
import re
import signal
import time

import pytest
from conftest import LAUNCH_1, LAUNCH_2, REPOSITORY, TINY, finish, metrics, start, wait_for

from checkpoints import store
from common.errors import UserError
from common.files import lock_file
from training import stop as stop_module
from training.stop import StopSignal


def test_signals_return_to_whoever_had_them():
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    stop = StopSignal()
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for(stop.requested)
    stop.close()
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_warning_that_somebody_ignores_stays_theirs_and_others_never_end_a_run_at_once(monkeypatch):
    monkeypatch.setattr(stop_module, "SAME_REQUEST_SEC", 0.1)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with contextlib.closing(StopSignal()) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and not stop.requested()
            for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):  # as Slurm does: a warning, and later the request
                os.kill(os.getpid(), signum)
                time.sleep(0.2)
            assert stop.requested()
    finally:
        signal.signal(signal.SIGHUP, ignored)


@pytest.mark.parametrize("launcher", ["TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND", None])
def test_a_run_stops_when_its_launcher_ends_and_not_when_its_shell_does(monkeypatch, launcher):
    for name in stop_module.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    if launcher is not None:
        monkeypatch.setenv(launcher, "x")
    monkeypatch.setattr(stop_module, "_PARENT", -1)  # as if it had ended: this process now has another parent
    with contextlib.closing(StopSignal()) as stop:
        assert stop.requested() == (launcher is not None)


def test_a_second_signal_ends_the_process():
    code = """
import time
from training.stop import StopSignal
stop = StopSignal()
print("ready", flush=True)
time.sleep(600)
"""
    process = start("-c", code)
    assert "ready\n" in iter(process.stdout.readline, "")
    process.send_signal(signal.SIGTERM)
    time.sleep(1.2)  # less would be one request
    process.send_signal(signal.SIGTERM)
    code, output = finish(process, timeout_sec=10)
    assert code == 128 + signal.SIGTERM, output


def is_free(lock):
    try:
        lock_file(lock, "waiting in", "folder").close()
    except UserError:
        return False
    return True


@pytest.mark.parametrize(
    ("launcher", "signum", "reason"), [(LAUNCH_1, signal.SIGKILL, "SIGTERM"), (LAUNCH_2, signal.SIGUSR1, "SIGUSR1")]
)
def test_the_processes_of_a_signalled_launcher_save_and_leave_during_an_evaluation(
    launcher, signum, reason, tmp_path, monkeypatch
):
    page = (REPOSITORY / "docs" / "speed_and_clusters.md").read_text(encoding="utf-8")
    for name, value in re.findall(r"^export (\w*(?:SIGNALS|TIMEOUT)\w*)=(\S+)$", page, re.MULTILINE):
        monkeypatch.setenv(name, value)
    evaluation = ["eval.every=2", "eval.num_samples=100000", "eval.batch_size=2", "eval.num_steps=1", "train.batch_size=8"]
    process = start("train.py", *TINY, "name=run", f"output_dir={tmp_path}", *evaluation, launcher=launcher)
    run = tmp_path / "run"
    try:
        wait_for(lambda: process.poll() is not None or ((run / "metrics.jsonl").exists() and len(metrics(run)) >= 2))
        time.sleep(1)  # now in the evaluation of step 2, which would take an hour
        process.send_signal(signum)
        wait_for(lambda: is_free(run / ".lock"), timeout_sec=60)
        wait_for(lambda: process.poll() is not None, timeout_sec=60)
    finally:
        process.kill()
    code, output = finish(process)  # when both have closed their output
    assert code == (-signal.SIGKILL if signum == signal.SIGKILL else 1), output
    assert list(store.list_steps(run / "checkpoints")) == [2], output
    assert f"{reason}: stopping after this step" in output and ("Traceback" in output) == (code == 1)  # the launcher's own
