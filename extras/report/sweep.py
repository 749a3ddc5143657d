"""Many runs from one command: every combination of the listed values becomes a run of train.py.

    python -m extras.report.sweep model=dit,tread seed=0,1,2                                      # one run after another
    python -m extras.report.sweep model=dit,tread seed=0,1,2 hydra/launcher=parallel              # two at a time
    python -m extras.report.sweep model=dit,tread seed=0,1,2 hydra/launcher=slurm hydra.launcher.partition=gpu
    python -m extras.report.sweep model=dit,tread --launch='--multi_gpu --num_processes 8'        # arguments for accelerate launch
    python -m extras.report.sweep model=dit,tread --fid='guidance=cfg cfg_scale=[1.0,1.5] num_samples=5000'

The configuration is train.py's, and the combinations are those of Hydra's multirun. Each job starts accelerate's launcher. The
name of a job, which is its run's folder, comes from its overrides: digits_tread_seed-0. A finished run (its last checkpoint is at
train.num_steps, and the last evaluation is there) is skipped, an interrupted one continues, and a failed one does not end the
sweep. With --fid, fid.py evaluates each finished run and keeps the points that it has: settings of evaluation are swept there,
without training again. Logs and outcomes are in <output_dir>/sweeps/<time>/. The exit code is 1 if a job failed.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from common.errors import UserError
from common.files import write_file
from configs import command_line as cli
from configs.schema import SAME_RUN, Role, TrainConfig, check, differences
from configs.settings import Settings, Text, keys_of
from extras.report import rows
from training import checkpoint as checkpoints
from training import load
from training.run import RunFolder

log = logging.getLogger("sweep")

# The packages that launchers need: hydra/launcher=...
LAUNCHERS = {
    "hydra-joblib-launcher": ("joblib", "parallel"),
    "hydra-submitit-launcher": ("submitit_local", "submitit_slurm", "slurm"),
}
# Overrides that do not say which run it is. Other keys without a role in the schema (data.path, guidance, ...) are in the name:
# jobs that differ in one of them must not share a folder.
NOT_IN_NAMES = ("name", "output_dir", "resume", "wandb.mode", "wandb.project", "train.cpu_threads", "data.num_workers")


class Options(Settings):
    """What a command says beside the overrides: arguments of `accelerate launch`, and overrides of fid.py, if it is to run."""

    launch: Text = ""
    fid: Text | None = None
    full_errors: bool = False  # HYDRA_FULL_ERROR=1 was set


def main(arguments: Sequence[str]) -> int:
    """Run the sweep; returns the exit code."""
    options, overrides = parse_sweep_arguments(arguments)
    folder = sweep_folder(overrides)

    def job(cfg: DictConfig) -> None:
        run_job(cfg, options)

    sys.argv = [sys.argv[0], "--multirun", *overrides, f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=."]
    try:
        cli.run(job, "config", TrainConfig)
    finally:
        outcomes = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
        if outcomes:
            sys.stdout.write(summary(outcomes, folder))
    return int(any(outcome["status"] == "failed" for outcome in outcomes))


def parse_sweep_arguments(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Options, and the overrides for Hydra.

    Raises:
        UserError: the package of a launcher is not installed, or an argument is no override.
    """
    own = [argument for argument in arguments if argument.startswith(("--launch=", "--fid="))]
    options = cli.parse_arguments(own, Options).model_copy(update={"full_errors": os.environ.get(cli.FULL_ERRORS, "0") == "1"})
    # A sweep is always a multirun: its switch is accepted because users of Hydra type it.
    overrides = [argument for argument in arguments if argument not in (*own, "-m", "--multirun")]
    for override in overrides:
        if override.startswith("--") or ("=" not in override and not override.startswith("~")):
            raise UserError(
                f"{override!r} is not of the form key=value; beside overrides there are --launch='...' and --fid='...'"
            )
    launcher = values_of(overrides).get("hydra/launcher")
    for package, launchers in LAUNCHERS.items():
        if launcher in launchers and importlib.util.find_spec(f"hydra_plugins.{package.replace('-', '_')}") is None:
            raise UserError(f"hydra/launcher={launcher} needs a package that is not installed: pip install {package}")
    return options, overrides


def values_of(overrides: Sequence[str]) -> dict[str, str]:
    """`key=value` overrides as {key: value}."""
    return dict(override.lstrip("+").partition("=")[::2] for override in overrides)


def sweep_folder(overrides: Sequence[str]) -> Path:
    """A new folder <output_dir>/sweeps/<time>."""
    folder = Path(values_of(overrides).get("output_dir", "runs")) / "sweeps" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    names = (f"{folder.name}_{number}" if number > 1 else folder.name for number in itertools.count(1))
    return next(path for path in map(folder.with_name, names) if not path.exists())


def run_name(overrides: Sequence[str], default: str) -> str:
    """A folder's name that says what a job's overrides set: equal for equal overrides, different for different ones.

    Args:
        overrides: `key=value`, as Hydra gives them to a job.
        default: the name that the configuration has, <data>_<model>.
    """
    values = values_of(overrides)
    base = values.pop("name", "") or values.pop("experiment", "").replace("/", "_")
    left_out = NOT_IN_NAMES if base else (*NOT_IN_NAMES, "data", "model")  # these two are in the default
    keys = list(keys_of(TrainConfig))
    words = [(rows.short_key(key, keys), value) for key, value in sorted(values.items()) if key not in left_out]
    return rows.name_with(base or default, words)


# ----------------------------------------------------------------------------------------------------------------------
# One job.


def run_job(cfg: DictConfig, options: Options) -> None:
    """One combination: train unless that is done, evaluate if asked for, and write the outcome to a file."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    logging.getLogger("hydra").setLevel(logging.WARNING)  # it would repeat the overrides of every job
    job = HydraConfig.get()
    folder, overrides = Path(job.sweep.dir), list(job.overrides.task)
    name = run_name(overrides, str(cfg.name))
    log_file = folder / f"{name}.log"
    start_sec = time.monotonic()
    log.info("job %d  %s: started", job.job.num, name)
    try:
        status, reason = train_and_evaluate(cfg, name, overrides, options, log_file)
    except (UserError, OSError) as error:
        status, reason = "failed", str(error)
    outcome = {"job": job.job.num, "name": name, "overrides": overrides, "log": str(log_file), "status": status}
    outcome |= {"reason": reason, "wall_sec": round(time.monotonic() - start_sec, 1)}
    write_file(folder / f"{job.job.num:04d}_{name}.json", json.dumps(outcome))
    log.info("job %d  %s: %s", job.job.num, name, f"{status}; {reason}" if reason else status)


def train_and_evaluate(cfg: DictConfig, name: str, overrides: Sequence[str], options: Options, log_file: Path) -> tuple[str, str]:
    """(status, reason) with status one of finished, skipped, stopped and failed.

    Raises:
        UserError: the configuration is not accepted, or another run has this name.
    """
    settings = check(cfg, TrainConfig)
    run = RunFolder(settings.output_dir, name)
    status = "skipped" if is_finished(settings, run) else "finished"
    if status == "finished":
        kept = [override for override in overrides if "name" not in values_of([override])]
        code = launch("train.py", [*kept, f"name={name}"], options, log_file)
        if code != 0:
            return "failed", reason_in(log_file, code)
        if not is_finished(settings, run):
            return "stopped", "it ended before train.num_steps; the same sweep continues it"
    if options.fid is not None:
        code = launch("fid.py", [f"checkpoint={run.path}", *shlex.split(options.fid)], options, log_file)
        if code != 0:
            return "failed", f"fid.py: {reason_in(log_file, code)}"
    return status, ""


def is_finished(cfg: TrainConfig, run: RunFolder) -> bool:
    """Whether the run's last checkpoint is at train.num_steps and the evaluation of that step is there.

    Raises:
        UserError: the run in this folder has another configuration.
    """
    steps = checkpoints.list_steps(run.checkpoints)
    if not steps:
        return False
    newest = max(steps)
    stored = load.load_config(steps[newest])
    from_data = {key: value for key, value in stored.data if getattr(cfg.data, key) is None}  # training fills these in
    wanted = cfg.model_copy(update={"data": cfg.data.model_copy(update=from_data)})
    changed = differences(stored, wanted, (*SAME_RUN, Role.NOTED))
    if changed:
        raise UserError(f"{run.path} is another run: {'; '.join(changed)}. Move it away, or use another output_dir=...")
    if newest != cfg.train.num_steps:
        return newest > cfg.train.num_steps
    return not cfg.eval.every or run.has_evaluation(newest)


def launch(script: str, overrides: Sequence[str], options: Options, log_file: Path) -> int:
    """Start a script under accelerate's launcher, with its output in the log; returns its exit code.

    Ctrl-C in a terminal reaches the script as well: it finishes its step and saves, and this function waits for it.
    """
    arguments = [*shlex.split(options.launch), os.path.relpath(cli.REPOSITORY / script), *overrides]
    # setup.cli has set FULL_ERRORS in this process.
    environment = {key: value for key, value in os.environ.items() if options.full_errors or key != cli.FULL_ERRORS}
    with open(log_file, "a", encoding="utf-8") as output:
        output.write(f"$ {shlex.join(['accelerate', 'launch', *arguments])}\n")
        output.flush()
        command = [sys.executable, "-m", "accelerate.commands.launch", *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise


def reason_in(log_file: Path, code: int) -> str:
    """The script's own words for its failure, or the exit code."""
    errors = [line for line in log_file.read_text(encoding="utf-8", errors="replace").splitlines() if line.startswith("error")]
    return errors[-1] if errors else f"exit code {code}; see {log_file}"


def summary(outcomes: Sequence[dict], folder: Path) -> str:
    lines = [f"{outcome['status']:9s} {outcome['name']}  {outcome['reason']}".rstrip() for outcome in outcomes]
    statuses = [outcome["status"] for outcome in outcomes]
    counts = [f"{statuses.count(one)} {one}" for one in ("finished", "skipped", "stopped", "failed") if one in statuses]
    return "\n".join([*lines, f"{', '.join(counts)}; logs in {folder}"]) + "\n"


if __name__ == "__main__":
    cli.guard(lambda: sys.exit(main(sys.argv[1:])))
