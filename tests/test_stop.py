"""A signal asks a run to stop, a second one ends it. Runs notice signals of other processes and the launcher's end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate.commands import launch
from conftest import LAUNCH_1, LAUNCH_2, REPOSITORY, TINY, metrics, wait_for
from forked import Command, fork_children

from checkpoints import store
from common.errors import UserError
from common.files import lock_file
from latents.prepare import reference
from training import stop as stop_module
from training.stop import StopSignal


def test_signals_get_their_previous_handlers_back():
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(stop.poll)
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before


def test_an_ignored_warning_signal_stays_ignored_and_warnings_never_end_a_run_at_once(monkeypatch):
    monkeypatch.setattr(stop_module, "SAME_REQUEST_SEC", 0.1)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup does this
    try:
        with StopSignal() as stop:
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
    for name in stop_module.LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if launcher is not None:
        monkeypatch.setenv(launcher, "x")
    monkeypatch.setattr(stop_module, "_PARENT", -1)  # as if the launcher had ended: this process has a new parent
    with StopSignal() as stop:
        assert stop.poll() == (launcher is not None)


def wait_for_signals():
    with StopSignal():
        Path("ready").touch()
        time.sleep(600)


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
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(reference, "train_detector", interrupt)
    monkeypatch.setattr(reference, "open_image_set", lambda path: None)
    with pytest.raises(SystemExit) as ended:
        reference.detector("images.npz", str(tmp_path / "set.safetensors"), cpu_threads=1)
    assert ended.value.code == 130 and capsys.readouterr().err.endswith("stopped; nothing was written\n")


def test_a_preempted_job_of_submitit_waits_until_slurm_kills_it(monkeypatch):
    slept = []
    monkeypatch.setattr(stop_module.time, "sleep", slept.append)
    for executor, signum, waits in (
        ("slurm", signal.SIGTERM, True),
        ("slurm", signal.SIGUSR2, False),  # submitit requeues after this one
        ("slurm", None, False),
        ("local", signal.SIGTERM, False),
        (None, signal.SIGTERM, False),
    ):
        monkeypatch.delenv("SUBMITIT_EXECUTOR", raising=False)
        if executor is not None:
            monkeypatch.setenv("SUBMITIT_EXECUTOR", executor)
        slept.clear()
        stop_module.wait_to_be_killed(signum)
        assert slept == ([30 * 60] if waits else [])


# Stand-ins for Slurm's commands. Slurm gives the tasks of a step their numbers, and splits srun's own arguments off.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for task in $(seq 0 $((SLURM_NTASKS - 1))); do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & tasks="$tasks $!"; done
for task in $tasks; do wait $task || exit $?; done
"""


def test_the_script_for_slurm_on_the_page_starts_one_run_of_all_tasks(tmp_path):
    page = (REPOSITORY / "docs" / "speed_and_clusters.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
    own = " ".join([*TINY, "name=run", f"output_dir={tmp_path}", "train.num_steps=2", "machine.cpu_threads=1"])
    for line, replacement in (
        ("source .venv/bin/activate", ""),
        ("python train.py experiment=table2_dit_xl2_tread data.num_workers=4", f"{sys.executable} train.py {own}"),
    ):
        assert script.count(line) == 1
        script = script.replace(line, replacement)
    for name, content in {"srun": SRUN, "scontrol": "#!/bin/bash\necho 127.0.0.1\n"}.items():
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    with socket.socket() as found:  # a free port, from which the script's formula gets the number of the job
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    job = {"SLURM_JOB_ID": str(port - 10000), "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NODELIST": "n1"}
    script = script.replace("% 20000", "% 60000")
    env = {**os.environ, **job, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(["bash", "-c", script], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    starts = [json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").read_text().splitlines()]
    assert [start["num_processes"] for start in starts] == [2] and metrics(tmp_path / "run")[-1]["step"] == 2
    assert "works alone" not in done.stderr
