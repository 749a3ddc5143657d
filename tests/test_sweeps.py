"""Sweeps by Hydra's launchers and sweepers: what fails, what is killed, what is repeated."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from functools import partial

import psutil
import pytest
import torch
from conftest import TINY, checked, evaluated, forget_accelerate, metrics, wait_for
from forked import Command, at_operation, fork_children, launch, run, send

import train as script
from checkpoints import store
from common.files import REPOSITORY
from runtime import job, machine
from training.saving import CheckpointWriter


def runs_of(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def run_sweep(folder, arguments):
    return Command(folder, arguments, fork_children, small=False).finish(limit_sec=170)


def test_joblib_runs_the_jobs_beside_each_other_and_repeating_the_sweep_does_nothing(tmp_path):
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    arguments = ["train.py", "-m", *launcher, *TINY, "name=s${seed}", "output_dir=runs", "seed=0,-1,-2,1", "train.num_steps=2"]
    outcome = run_sweep(tmp_path, arguments)
    assert outcome.code == 1 and runs_of(tmp_path / "runs") == ["s0", "s1"], outcome.output
    *logged, error = [line for line in outcome.output.splitlines() if "a run of the sweep failed: " in line]
    words = "output_dir=runs seed={0}: seed={0}: Input should be greater than or equal to 0"
    assert [line.startswith("a run ") for line in logged] == [True, True], outcome.output  # in the terminal, from the workers
    assert {line.partition("=s$\\{seed\\} ")[2] for line in logged} == {words.format(-1), words.format(-2)}, logged
    assert error.startswith("error: ") and error.endswith(words.format(-1)) and "Traceback" not in outcome.output, error
    assert [metrics(tmp_path / "runs" / name)[-1]["step"] for name in ("s0", "s1")] == [2, 2]
    begun = json.loads((tmp_path / "runs" / "s1" / "starts.jsonl").read_text())["command"]
    assert begun.startswith("python train.py ") and begun.endswith(" output_dir=runs seed=1")  # the command of this run alone
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    again = run_sweep(tmp_path, [argument.replace("0,-1,-2,1", "0,1") for argument in arguments])
    assert again.code == 0 and again.output.count("this run is complete at step 2") == 2, again.output


def test_the_error_of_a_submitit_sweep_names_the_failed_run_and_the_folder_of_its_log(tmp_path):
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]
    arguments = ["train.py", "-m", *launcher, "output_dir=runs", "seed=-1,-2"]
    outcome = Command(tmp_path, arguments, small=False).finish(limit_sec=170)  # its jobs are new programs, not forks
    failed = "a run of the sweep failed: output_dir=runs seed={0}: seed={0}: Input should be greater than or equal to 0"
    *_, error = outcome.output.strip().splitlines()
    assert outcome.code == 1 and error.startswith(f"error: {failed.format(-1)} (logs: {tmp_path}/runs/.sweeps/"), outcome.output
    log, other = sorted(tmp_path.glob("runs/.sweeps/*/.submitit/*/*_log.err"), key=lambda file: str(file.parent) not in error)
    assert error.endswith(f" (logs: {log.parent})")
    assert failed.format(-1) in log.read_text() and failed.format(-2) in other.read_text()


def test_of_two_runs_that_start_at_the_same_moment_in_one_folder_one_is_refused(tmp_path):
    keys = [*TINY, "name=one", "output_dir=runs", "train.num_steps=40"]
    outcomes = [command.finish() for command in [Command(tmp_path, ["train.py", *keys, f"seed={seed}"]) for seed in (0, 1)]]
    assert sorted(outcome.code for outcome in outcomes) == [0, 1], [outcome.output for outcome in outcomes]
    (refused,) = (outcome.output for outcome in outcomes if outcome.code == 1)
    assert re.search("error: (another process (is training in|has trained) runs/one|.* different settings: seed: )", refused)
    assert [line["step"] for line in metrics(tmp_path / "runs" / "one")] == [*range(1, 41)]


def test_jobs_of_fid_that_run_beside_each_other_evaluate_one_run(tmp_path):
    trained = run_sweep(tmp_path, ["train.py", *TINY, "name=run", "output_dir=runs", "train.num_steps=2"])  # as the jobs see it
    assert trained.code == 0, trained.output
    arguments = [
        "checkpoint=runs/run",
        "evaluation.num_samples=20",
        "sampling.batch_size=20",
        "sampler.num_steps=2",
        "machine.cpu_threads=1",
        "guidance=cfg",
    ]
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=3"]
    outcome = run_sweep(tmp_path, ["fid.py", "-m", *launcher, *arguments, "guidance.cfg_scale=1.5,[1.5,2.0],2.0"])
    assert outcome.code == 0, outcome.output
    folder = tmp_path / "runs" / "run" / "evaluations"
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert sorted(line["settings"]["cfg_scale"] for line in lines) == [1.5, 2.0]  # no point twice
    assert (folder / "results.md").read_text().count("\n| run | 2 |") == 2 and len([*(folder / ".evaluating").iterdir()]) == 1
    scales = [1.1, 1.2, 1.3, 1.4, 1.6, 1.7]
    both = [
        Command(tmp_path, ["fid.py", *arguments, f"guidance.cfg_scale={scales}", "output=both"], small=False) for _ in range(2)
    ]
    outcomes = [command.finish(limit_sec=170) for command in both]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    lines = [json.loads(line) for line in (tmp_path / "both" / "results.jsonl").read_text().splitlines()]
    assert sorted(line["settings"]["cfg_scale"] for line in lines) == scales
    evaluated = sum(outcome.output.count(": fd_digits ") for outcome in outcomes)
    assert 6 <= evaluated < 12, outcomes
    assert (tmp_path / "both" / "results.md").read_text().count("\n| run | 2 |") == 6


def test_a_job_of_two_tasks_is_one_run_that_submitit_requeues_after_its_signal(tmp_path):
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2", "hydra.launcher.timeout_min=20"]
    arguments = [*TINY, "name=run", "output_dir=runs", "train.num_steps=80", "seed=3"]
    sweep = Command(tmp_path, ["train.py", "-m", *launcher, *arguments], fork_children, small=False)
    run_folder = tmp_path / "runs" / "run"
    try:
        wait_for(lambda: not sweep.process.is_alive() or (run_folder / "metrics.jsonl").exists() and metrics(run_folder))
        tasks = [task for job in psutil.Process(sweep.process.pid).children() for task in job.children()]
        for task in tasks:  # as at the time limit, or on preemption
            task.send_signal(signal.SIGUSR2)
    finally:
        outcome = sweep.finish(limit_sec=170)
    logs = "\n".join(file.read_text() for file in sorted((tmp_path / "runs" / ".sweeps").rglob("*_log.*")))
    assert outcome.code == 0 and len(tasks) == 2, outcome.output + logs
    assert "SIGUSR2: stopping after this step, with a checkpoint" in logs and "Requeued job" in logs, logs
    steps = [record["step"] for record in metrics(run_folder)]
    assert steps == list(range(1, 81))
    starts = [json.loads(line) for line in (run_folder / "starts.jsonl").read_text().splitlines()]
    assert len(starts) == 2 and 0 == starts[0]["step"] < starts[1]["step"] < 80
    assert list(store.list_steps(run_folder / "checkpoints"))[-1] == 80 and "batch 4, adamw, lr 0.002 (constant), 2 x cpu" in logs


@pytest.mark.parametrize(("signum", "codes"), [(signal.SIGTERM, [0]), (signal.SIGINT, [130, 0])])
def test_a_signal_to_one_process_during_the_last_save_of_a_run_ends_the_sweep_of_all(signum, codes, tmp_path):
    arguments = ["train.py", "-m", *TINY, "name=s${seed}", "output_dir=runs", "seed=0,1", "train.num_steps=2"]
    while_saving = partial(at_operation, partial(send, signum), "fsync runs/s0/checkpoints/.*optimizer.pt")
    if len(codes) == 1:
        outcomes = [run(tmp_path, arguments, while_saving)]
    else:
        outcomes = launch(tmp_path, arguments, len(codes), {0: while_saving})
    assert [outcome.code for outcome in outcomes] == codes and outcomes[0].happened(), outcomes
    assert runs_of(tmp_path / "runs") == ["s0"] and list(store.list_steps(tmp_path / "runs" / "s0" / "checkpoints")) == [2]
    assert "this run is complete at step 2; a signal ends the command" in outcomes[0].output, outcomes[0].output


def test_a_complete_run_in_a_job_of_submitit_returns_its_metric_after_a_signal(monkeypatch, tmp_path):
    save = CheckpointWriter.save

    def interrupt(checkpoints, trainer):
        if checkpoints.saved_step == trainer.step:  # after the last hook
            send(signal.SIGINT)
        save(checkpoints, trainer)

    monkeypatch.setattr(CheckpointWriter, "save", interrupt)
    monkeypatch.setattr(machine, "prepare_job", lambda: None)
    evaluation = ["evaluation.every=2", "evaluation.num_samples=20", "sampler.num_steps=2", "train.num_steps=2"]
    for name, executor in (("job", "local"), ("own", None)):
        if executor is None:
            monkeypatch.delenv("SUBMITIT_EXECUTOR")
        else:
            monkeypatch.setenv("SUBMITIT_EXECUTOR", executor)
        forget_accelerate()
        cfg = checked([*TINY, f"name={name}", f"output_dir={tmp_path}", *evaluation])
        if executor is None:
            with pytest.raises(SystemExit, match="^130$"):
                script.main(cfg)
        else:
            assert script.main(cfg) > 0


def test_launchers_that_start_processes_are_not_combined_with_accelerate(tmp_path):
    arguments = ["train.py", "-m", "hydra/launcher=submitit_local", *TINY, "output_dir=runs", "seed=0"]
    outcome = run(tmp_path, arguments, WORLD_SIZE="2", RANK="0")
    assert outcome.code == 1 and "hydra/launcher=submitit_local starts the processes itself" in outcome.output, outcome.output


def test_processes_that_would_run_different_jobs_of_a_search_are_stopped(tmp_path):
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "train.lr=interval(1e-3,1e-2)"]
    for outcome in launch(tmp_path, ["train.py", "-m", *search, *TINY, "evaluation.every=6", "output_dir=runs"], 2):
        assert outcome.code == 1 and "process 1 runs train.lr=0.0" in outcome.output, outcome.output
        assert "set hydra.sweeper.sampler.seed=0" in outcome.output and runs_of(tmp_path / "runs") == []


def gpus_of_workers(monkeypatch, numbers, visible):
    """Return the GPU of each worker of a joblib sweep whose command has CUDA_VISIBLE_DEVICES=`visible`."""
    chosen = []
    for number in numbers:
        with monkeypatch.context() as worker:
            worker.setenv("CUDA_VISIBLE_DEVICES", visible or "")
            if visible is None:
                worker.delenv("CUDA_VISIBLE_DEVICES")
            worker.setattr(multiprocessing.current_process(), "name", f"LokyProcess-{number}")
            job.choose_gpu.cache_clear()  # as in the next process
            for _ in range(3):  # all jobs of a worker use one GPU
                job.prepare_job()
                worker.setattr(torch.cuda, "device_count", lambda: 1)  # as torch then sees
            chosen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
    job.choose_gpu.cache_clear()
    return chosen


def test_each_worker_of_a_joblib_sweep_uses_one_gpu_and_says_if_others_may_share_it(monkeypatch, caplog):
    caplog.set_level("INFO")
    for name in ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert sorted(gpus_of_workers(monkeypatch, [1, 2, 3], None)) == ["0", "1", "2"]
    assert sorted(gpus_of_workers(monkeypatch, [1, 2, 3], "7,GPU-8,5")) == ["5", "7", "GPU-8"]
    assert caplog.text.count("this worker uses GPU ") == 6 and "another" not in caplog.text
    assert set(gpus_of_workers(monkeypatch, [4, 5], "7,GPU-8,5")) < {"5", "7", "GPU-8"}
    assert caplog.text.count("maybe with another worker, for example if hydra.launcher.n_jobs is above 3") == 2
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        assert gpus_of_workers(monkeypatch, [1, 2], "7,8,5") == ["7,8,5"] * 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpus_of_workers(monkeypatch, [1, 2], None) == [None, None] and gpus_of_workers(monkeypatch, [1], "") == [""]
    job.prepare_job()  # another process
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_joblib_numbers_its_workers_from_1(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "name", "LokyProcess-26:2")  # in a process of multiprocessing
    assert job.joblib_worker() == 2
    # In a process of its own, because processes of other tests would count.
    code = "import joblib, runtime.job as m; f = joblib.delayed(m.joblib_worker); "
    code += "print({*joblib.Parallel(n_jobs=2)(f() for _ in range(4))} <= {1, 2}, m.joblib_worker())"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=170, check=True)
    assert found.stdout == "True None\n"


def test_optuna_searches_a_guidance_scale_and_its_points_are_in_the_one_table(train, tmp_path):
    folder = train("run", "train.num_steps=2")
    search = ["fid.py", "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    search += ["hydra.sweeper.sampler.seed=0", "guidance.cfg_scale=interval(1.1,2.0)"]
    point = [f"checkpoint={folder}", "evaluation.num_samples=20", "sampler.num_steps=2", "sampling.batch_size=20", "guidance=cfg"]
    outcome = run_sweep(tmp_path, [*search, *point])
    assert outcome.code == 0, outcome.output
    lines = [json.loads(line) for line in (folder / "evaluations" / "results.jsonl").read_text().splitlines()]
    values = {line["settings"]["cfg_scale"]: line["metrics"]["fd_digits"] for line in lines}
    assert len(values) == 3 and all(1.1 <= scale <= 2 for scale in values)
    assert f"Best value: {min(values.values())}" in outcome.output and "alembic" not in outcome.output
    again = run_sweep(tmp_path, [*search, *point])
    assert again.code == 0 and again.output.count("0 of 1 evaluations to do") == 3, again.output


def test_a_run_that_diverges_in_a_search_counts_as_the_worst(tmp_path):
    search = ["train.py", "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", *TINY]
    search += ["hydra.sweeper.sampler.seed=0", "train.lr=choice(1e-3,1e30)", "output_dir=runs", "train.num_steps=2"]
    search += ["evaluation.every=2", "evaluation.num_samples=20", "sampler.num_steps=2", "train.log_every=1"]
    outcome = run_sweep(tmp_path, search)
    assert outcome.code == 0 and "Traceback" not in outcome.output, outcome.output
    assert "train.lr=1e+30" in outcome.output and "the loss became NaN" in outcome.output
    assert "Best parameters: {'train.lr': 0.001}" in outcome.output


def test_train_returns_the_first_metric_of_its_last_evaluation(tmp_path):
    evaluation = [
        "evaluation.every=2",
        "evaluation.num_samples=20",
        "sampler.num_steps=2",
        "guidance=cfg",
        "guidance.cfg_scale=[1.0,1.5]",
        "train.num_steps=4",
    ]
    arguments = [*TINY, "name=run", f"output_dir={tmp_path}", *evaluation]
    values = []
    for _ in range(2):  # the second time, the run is complete
        forget_accelerate()
        values.append(script.main(checked(arguments)))
    last = [line["metrics"]["fd_digits"] for line in evaluated(tmp_path / "run") if line["step"] == 4]
    assert len(last) == 2 and values == [min(last)] * 2
    forget_accelerate()
    assert script.main(checked([*TINY, "name=other", f"output_dir={tmp_path}", "train.num_steps=1"])) is None
