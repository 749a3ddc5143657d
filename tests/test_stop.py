"""A signal asks a run to stop, a second one ends it. Runs notice signals of other processes and the launcher's end."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from accelerate.commands import launch
from conftest import LAUNCH_1, LAUNCH_2, REPOSITORY, TINY, metrics, wait_for
from forked import Command, fork_children

from checkpoints import store
from common.errors import UserError
from common.files import lock_file
from training import stop as stop_module
from training.stop import StopSignal


def test_signals_get_their_previous_handlers_back():
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    stop = StopSignal()
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for(stop.poll)
    stop.close()
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before


def test_an_ignored_warning_signal_stays_ignored_and_warnings_never_end_a_run_at_once(monkeypatch):
    monkeypatch.setattr(stop_module, "SAME_REQUEST_SEC", 0.1)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup does this
    try:
        with contextlib.closing(StopSignal()) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and not stop.poll()
            for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGRTMIN):  # Slurm, launcher
                os.kill(os.getpid(), signum)
                time.sleep(0.2)
            assert stop.poll()
    finally:
        signal.signal(signal.SIGHUP, ignored)


@pytest.mark.parametrize("launcher", ["TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_BACKEND", None])
def test_a_run_stops_when_its_launcher_ends_and_not_when_its_shell_does(monkeypatch, launcher):
    for name in stop_module.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    if launcher is not None:
        monkeypatch.setenv(launcher, "x")
    monkeypatch.setattr(stop_module, "_PARENT", -1)  # as if the launcher had ended: this process has a new parent
    with contextlib.closing(StopSignal()) as stop:
        assert stop.poll() == (launcher is not None)


def wait_for_signals():
    stop = StopSignal()
    Path("ready").touch()
    time.sleep(600)
    stop.close()


def test_a_second_signal_ends_the_process(tmp_path):
    process = Command(tmp_path, ["train.py"], before=wait_for_signals)
    wait_for((tmp_path / "ready").exists)
    os.kill(process.process.pid, signal.SIGTERM)
    time.sleep(1.2)  # signals with a shorter interval count as one request
    os.kill(process.process.pid, signal.SIGTERM)
    outcome = process.finish(limit_sec=10)
    assert outcome.code == 128 + signal.SIGTERM, outcome.output


def is_free(lock):
    try:
        lock_file(lock, "waiting in", "folder").close()
    except UserError:
        return False
    return True


@pytest.mark.parametrize(
    ("launcher", "signum", "reason"), [(LAUNCH_1, signal.SIGKILL, "launcher has ended"), (LAUNCH_2, signal.SIGUSR1, "SIGUSR1")]
)
def test_the_processes_of_a_signalled_launcher_save_and_leave_during_an_evaluation(launcher, signum, reason, tmp_path):
    page = (REPOSITORY / "docs" / "speed_and_clusters.md").read_text(encoding="utf-8")
    environment = dict(re.findall(r"^export (\w*(?:SIGNALS|TIMEOUT)\w*)=(\S+)$", page, re.MULTILINE))
    evaluation = [
        "evaluation.every=2",
        "evaluation.num_samples=100000",
        "sampling.batch_size=2",
        "sampler.num_steps=1",
        "train.batch_size=8",
    ]
    train = [str(REPOSITORY / "train.py"), *TINY, "name=run", "output_dir=.", *evaluation]
    command = Command(tmp_path, [launch.__file__, *launcher[2:], *train], fork_children, **environment)  # after `-m`, module
    process, run = command.process, tmp_path / "run"
    try:
        wait_for(lambda: not process.is_alive() or ((run / "metrics.jsonl").exists() and len(metrics(run)) >= 2))
        time.sleep(1)  # now it evaluates step 2, which would take an hour
        os.kill(process.pid, signum)
        wait_for(lambda: is_free(run / ".lock"), timeout_sec=60)
        wait_for(lambda: not process.is_alive(), timeout_sec=60)
    finally:
        outcome = command.finish(limit_sec=0)
    code, output = outcome.code, outcome.output
    assert code == (-signal.SIGKILL if signum == signal.SIGKILL else 1), output
    assert list(store.list_steps(run / "checkpoints")) == [2], output
    assert f"{reason}: stopping after this step" in output and ("Traceback" in output) == (code == 1)  # in the launcher


def test_an_interrupted_training_of_a_detector_does_not_promise_a_resume(monkeypatch, tmp_path, capsys):
    import prepare_latents

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("evaluations.classifiers.train_detector", interrupt)
    monkeypatch.setattr("sampling.image_sets.open_image_set", lambda path: None)
    with pytest.raises(SystemExit) as ended:
        prepare_latents.detector("images.npz", str(tmp_path / "set.safetensors"), cpu_threads=1)
    assert ended.value.code == 130 and capsys.readouterr().err.endswith("stopped; nothing was written\n")
