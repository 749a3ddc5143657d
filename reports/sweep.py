"""Many runs from one command: every combination of the listed values becomes a run of train.py.

    python -m reports.sweep model=dit,tread seed=0,1,2                                      # one run after another
    python -m reports.sweep model=dit,tread seed=0,1,2 hydra/launcher=parallel              # two at a time
    python -m reports.sweep model=dit,tread seed=0,1,2 hydra/launcher=slurm hydra.launcher.partition=gpu
    python -m reports.sweep model=dit,tread --launch='--multi_gpu --num_processes 8'        # arguments for accelerate launch
    python -m reports.sweep model=dit,tread --fid='guidance=cfg cfg_scale=[1.0,1.5] num_samples=5000'

The configuration is train.py's, and the combinations are those of Hydra's multirun. Each job starts accelerate's launcher. Its
name, the run's folder, is made of its overrides: digits_tread_seed-0. A run that is finished (its last checkpoint is at
train.num_steps, and the last evaluation is there) is skipped, one that was cut off goes on, and one that fails does not end
the sweep. With --fid each finished run is judged by fid.py, which keeps the points that it has: settings of evaluation are swept
there, without training again. Logs and outcomes are in <output_dir>/sweeps/<time>/; the exit code is 1 if a job failed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from errors import UserError
from training import checkpoint as checkpoints
from training import cli, config
from training.run import RunFolder

log = logging.getLogger("sweep")

# hydra/launcher=...: the package that it needs.
LAUNCHER_PACKAGES = {
    "joblib": "hydra-joblib-launcher",
    "parallel": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
    "slurm": "hydra-submitit-launcher",
}
# Overrides that say where or how a run is made, and not which one it is.
NOT_IN_NAMES = ("name", "output_dir", "resume", "wandb.mode", "wandb.project", "train.cpu_threads", "data.num_workers")
LONGEST_NAME = 120
# What must be the same in a finished run, or it is another run of the same name.
IDENTITY_KEYS = ("model", "diffusion.name", "diffusion.sigma_data", "diffusion.P_mean", "diffusion.P_std", "seed")
IDENTITY_KEYS += ("train.batch_size", "train.lr")


@dataclass(frozen=True)
class Options:
    """What the command says beside the overrides.

    Attributes:
        launch: arguments of `accelerate launch`.
        fid: overrides of fid.py, which then judges each finished run; None does not.
        full_errors: HYDRA_FULL_ERROR=1 was set.
    """

    launch: tuple[str, ...]
    fid: tuple[str, ...] | None
    full_errors: bool


def main(arguments: Sequence[str]) -> int:
    """Run the sweep; returns the exit code."""
    options, overrides = parse_sweep_arguments(arguments)
    folder = sweep_folder(overrides)

    def job(cfg: DictConfig) -> None:
        run_one(cfg, options)

    sys.argv = [sys.argv[0], "--multirun", *overrides, f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
    try:
        cli.run(job, "config", config.TRAIN_KEYS)
    finally:
        outcomes = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
        if outcomes:
            sys.stdout.write(summary(outcomes, folder))
    return int(any(outcome["status"] == "failed" for outcome in outcomes))


def parse_sweep_arguments(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Options, and the overrides for Hydra.

    Raises:
        UserError: the package of a launcher is not installed, or what is given is no override.
    """
    parser = argparse.ArgumentParser(prog="python -m reports.sweep", add_help=False, allow_abbrev=False)
    parser.add_argument("--launch", default="")
    parser.add_argument("--fid")
    parser.add_argument("-m", "--multirun", action="store_true")  # always; accepted because Hydra's users type it
    known, overrides = parser.parse_known_args(arguments)
    for override in overrides:
        if override.startswith("--") or ("=" not in override and not override.startswith("~")):
            raise UserError(
                f"{override!r} is not of the form key=value; beside overrides there are --launch='...' and --fid='...'"
            )
        key, _, value = override.partition("=")
        package = LAUNCHER_PACKAGES.get(value) if key == "hydra/launcher" else None
        if package and importlib.util.find_spec(f"hydra_plugins.{package.replace('-', '_')}") is None:
            raise UserError(f"hydra/launcher={value} needs a package that is not installed: pip install {package}")
    fid = None if known.fid is None else tuple(shlex.split(known.fid))
    return Options(tuple(shlex.split(known.launch)), fid, os.environ.get("HYDRA_FULL_ERROR", "0") == "1"), overrides


def sweep_folder(overrides: Sequence[str]) -> Path:
    """<output_dir>/sweeps/<time>, where no other sweep is."""
    given = [override.partition("=")[2] for override in overrides if override.lstrip("+").startswith("output_dir=")]
    root = Path(given[-1] if given else "runs") / "sweeps"
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, number = root / stamp, 1
    while folder.exists():
        number += 1
        folder = root / f"{stamp}_{number}"
    return folder


def run_name(overrides: Sequence[str], default: str) -> str:
    """A folder's name that says what a job's overrides set: the same overrides always give the same, others another.

    Args:
        overrides: `key=value`, as Hydra gives them to a job.
        default: the name that the configuration has, <data>_<model>.
    """
    settings = dict(override.lstrip("+").partition("=")[::2] for override in overrides)
    if "name" in settings:
        base, said = settings["name"], ()
    elif "experiment" in settings:
        base, said = settings["experiment"].replace("/", "_"), ("experiment",)
    else:
        base, said = default, ("data", "model")
    last_parts = [key.rpartition(".")[2] for key in config.TRAIN_KEYS]
    words = []
    for key, value in sorted(settings.items()):
        if key not in NOT_IN_NAMES and key not in said:
            short = key.rpartition(".")[2]
            plain = re.fullmatch(r"[\w.+-]{1,24}", value) is not None
            words.append(f"{key if last_parts.count(short) > 1 else short}-{value if plain else _digest(value)}")
    name = "_".join([re.sub(r"[^\w.+-]", "-", base), *words])
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 9]}_{_digest(name)}"


def _digest(value: str) -> str:
    return hashlib.blake2b(value.encode(), digest_size=4).hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# One job.


def run_one(cfg: DictConfig, options: Options) -> None:
    """One combination: train unless that is done, judge if asked for, and leave a file with the outcome."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    logging.getLogger("hydra").setLevel(logging.WARNING)  # it would repeat the overrides of every job
    job = HydraConfig.get()
    folder, overrides = Path(job.sweep.dir), list(job.overrides.task)
    name = run_name(overrides, str(cfg.name))
    log_file = folder / f"{name}.log"
    start_sec = time.monotonic()
    log.info("job %d  %s: started", job.job.num, name)
    outcome = {"job": job.job.num, "name": name, "overrides": overrides, "log": str(log_file)}
    try:
        status, reason = train_and_judge(cfg, name, overrides, options, log_file)
    except (ValueError, OSError) as error:
        status, reason = "failed", str(error)
    outcome |= {"status": status, "reason": reason, "wall_sec": round(time.monotonic() - start_sec, 1)}
    (folder / f"{job.job.num:04d}_{name}.json").write_text(json.dumps(outcome))
    log.info("job %d  %s: %s", job.job.num, name, f"{status}; {reason}" if reason else status)


def train_and_judge(cfg: DictConfig, name: str, overrides: Sequence[str], options: Options, log_file: Path) -> tuple[str, str]:
    """(status, reason) with status one of finished, skipped, stopped and failed.

    Raises:
        UserError: the configuration is not accepted, or another run has this name.
    """
    cfg.name = name
    cfg = config.check(cfg, config.TRAIN_KEYS)
    run = RunFolder(cfg.output_dir, name)
    status = "skipped" if is_finished(cfg, run) else "finished"
    if status == "finished":
        kept = [override for override in overrides if not override.lstrip("+").startswith("name=")]
        code = launch("train.py", [*kept, f"name={name}"], options, log_file)
        if code != 0:
            return "failed", reason_in(log_file, code)
        if not is_finished(cfg, run):
            return "stopped", "it ended before train.num_steps; the same sweep goes on from there"
    if options.fid is not None:
        code = launch("fid.py", [f"checkpoint={run.path}", *options.fid], options, log_file)
        if code != 0:
            return "failed", f"fid.py: {reason_in(log_file, code)}"
    return status, ""


def is_finished(cfg: DictConfig, run: RunFolder) -> bool:
    """Whether the run's last checkpoint is at train.num_steps and the evaluation of that step is there.

    Raises:
        UserError: the run that is there has another configuration.
    """
    steps = checkpoints.list_steps(run.checkpoints)
    if not steps:
        return False
    newest = max(steps)
    changed = config.differences(checkpoints.load_config(steps[newest]), cfg, IDENTITY_KEYS)
    if changed:
        raise UserError(f"{run.path} is another run: {'; '.join(changed)}. Move it away, or use another output_dir=...")
    if newest != cfg.train.num_steps:
        return newest > cfg.train.num_steps
    return not cfg.eval.every or (run.metrics.exists() and run.has_evaluation(newest))


def launch(script: str, overrides: Sequence[str], options: Options, log_file: Path) -> int:
    """Start a script under accelerate's launcher, with its output in the log; returns its exit code.

    Ctrl-C in a terminal reaches the script as well: it finishes its step and saves, and is waited for.
    """
    path = os.path.relpath(config.REPOSITORY / script)
    command = [sys.executable, "-m", "accelerate.commands.launch", *options.launch, path, *overrides]
    environment = dict(os.environ)
    if not options.full_errors:
        environment.pop("HYDRA_FULL_ERROR", None)  # set by setup.cli in this process
    with open(log_file, "a") as output:
        output.write(f"$ {shlex.join(['accelerate', 'launch', *options.launch, path, *overrides])}\n")
        output.flush()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise


def reason_in(log_file: Path, code: int) -> str:
    """The script's own words for its failure, or the exit code."""
    errors = [line for line in log_file.read_text(errors="replace").splitlines() if line.startswith("error")]
    return errors[-1] if errors else f"exit code {code}; see {log_file}"


def summary(outcomes: Sequence[dict], folder: Path) -> str:
    lines = [f"{outcome['status']:9s} {outcome['name']}  {outcome['reason']}".rstrip() for outcome in outcomes]
    counts = {
        status: sum(outcome["status"] == status for outcome in outcomes)
        for status in ("finished", "skipped", "stopped", "failed")
    }
    lines.append(f"{', '.join(f'{count} {status}' for status, count in counts.items() if count)}; logs in {folder}")
    return "\n".join(lines) + "\n"


def script() -> None:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    cli.guard(script)
