"""Train and evaluate runs in processes of their own, and copy their results to a results file, a line for each evaluation."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import sleep

from checkpoints import store
from checkpoints.checkpoint import read_config
from checkpoints.provenance import device_name, git_commit
from checkpoints.run import present_starts, read_metrics
from common.errors import UserError
from common.files import REPOSITORY, append_line, read_json, read_lines
from configs.sampling_schema import FidConfig
from evaluations.metrics import standard_error
from evaluations.record import read_records

SAMPLE_KEYS = ("reference", "detector", "num_samples", "first_seed", "labels", "reference_hash")  # settings in each line
VERSIONS = ("commit", "modified", "device", "torch")  # what a line says of the code and the machine
# Arguments of train.py and fid.py that all compared runs share.
TRAIN = [
    "machine.tf32=false", "machine.cpu_threads=1", "sample_grid.every=0", "evaluation.validation=data/fashion_validation",
    "evaluation.reference=null",
]  # fmt: skip
FID = ["evaluation.reference=references/fashion.npz", "machine.tf32=false", "machine.cpu_threads=1"]
# A planned evaluation: part of the training, guidance, scale, and the first sampling seed with the number of samples.
Planned = tuple[str, str, float, tuple[int, int]]


def group_scales(planned: Sequence[Planned]) -> dict[tuple[str, str, tuple[int, int]], list[float]]:
    """Return the scales of the evaluations that differ in nothing else, which one call of fid.py makes."""
    scales: dict[tuple[str, str, tuple[int, int]], list[float]] = {}
    for part, guidance, scale, samples in planned:
        scales.setdefault((part, guidance, samples), []).append(scale)
    return scales


def command_line(train: list[str], evaluations: list[list[str]]) -> list[str]:
    """Return the arguments of `python -m evidence` that call `train_and_evaluate`."""
    return ["train_and_evaluate", f"train={json.dumps(train)}", f"evaluations={json.dumps(evaluations)}"]


def train_and_evaluate(train: list[str], evaluations: list[list[str]]) -> None:
    """Run train.py with the arguments `train`, then fid.py with each list of arguments in `evaluations`, in one process."""
    import fid
    import train as train_script
    from cli.compose import compose_overrides, parse_config
    from configs import schema

    train_script.main(parse_config(compose_overrides(train), schema.TrainConfig))
    for arguments in evaluations:
        fid.main(parse_config(compose_overrides(arguments, "fid"), FidConfig))


def run_all(commands: Mapping[str, list[str]], jobs: int, folder: Path, ended: Callable[[str], None]) -> None:
    """Run the command of each run, `jobs` at a time, with its output in <folder>/<run>.log.

    Call `ended` with the name of the run when its command ends, even after an error.
    """
    waiting = [*commands]
    running: dict[str, subprocess.Popen] = {}

    def end(name: str) -> None:
        code = running.pop(name).wait()
        sys.stderr.write(f"{name}: ended with code {code}\n")  # also 0 if a signal stopped the training
        ended(name)

    folder.mkdir(parents=True, exist_ok=True)
    earlier = signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM stops the runs like Ctrl-C
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                file = log_file(folder, name)
                with open(file, "ab") as output:
                    running[name] = start(commands[name], output)
                sys.stderr.write(f"{name}: started, see {file}\n")
            sleep(0.5)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                end(name)
    finally:
        for process in running.values():
            process.terminate()  # a trainer saves a checkpoint
        for name in [*running]:
            end(name)
        signal.signal(signal.SIGTERM, earlier)


def compared_run(arm: str, seed: int) -> str:
    """Return the name of a run that is compared with those of other arms."""
    return f"{arm}_seed{seed}"


def log_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


def start(arguments: list[str], output: object) -> subprocess.Popen:
    """Start `python -m evidence` in the current folder, with its output in a file."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-m", "evidence", *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment
    )


class Recorder:
    """Copies the results of the runs in a folder to a results file. Results that the file has already are skipped."""

    def __init__(self, runs: Path, output: Path, commit: str | None = None):
        self.runs, self.output, self.commit = runs, output, commit

    def lines(self, seeds: Sequence[int]) -> list[dict]:
        return [line for line in read_lines(self.output) if line["seed"] in seeds]

    def record(self, name: str) -> None:
        """Append the new results of a run. Raises UserError if the file has results of other weights at the same step."""
        found = [line for line in results_of_run(self.runs / name, current_versions(self.commit)) if "ema" in line]
        if not found:
            return
        arm, seed = found[0]["arm"], found[0]["seed"]
        earlier = [line for line in self.lines([seed]) if line["arm"] == arm]
        hashes = {line["step"]: line["ema"] for line in earlier}
        known = {_identify(line) for line in earlier}
        for line in found:
            if hashes.get(line["step"], line["ema"]) != line["ema"]:
                raise UserError(
                    f"{self.output} has results of other weights for {arm}, seed {seed}, step {line['step']}; resume the run "
                    "folder that made them, or choose another output="
                )
            if _identify(line) not in known:
                append_line(self.output, line)


def _identify(line: dict) -> tuple:
    """Return what distinguishes the lines of a run. Lines without a guidance hold a validation loss or the times of the steps."""
    fields = ("step", "guidance", "scale", "first_seed", "num_samples")
    return *map(line.get, fields), "steps_per_sec" in line


def ema_hashes(run: Path) -> dict[int, str]:
    """Return the hash of the EMA weights in each checkpoint of a run, by step."""
    folders = store.list_steps(run / "checkpoints")
    return {step: read_json(folder / store.MANIFEST)["ema.safetensors"]["blake2b"] for step, folder in folders.items()}


def lines_of_runs(runs: Path) -> list[dict]:
    """Return the `results_of_run` of all runs in a folder."""
    folders = sorted(folder for folder in runs.iterdir() if re.search("^search_.*_|_seed", folder.name)) if runs.exists() else []
    return [line for folder in folders for line in results_of_run(folder)]


def current_versions(without_git: str | None = None) -> dict[str, object]:
    """Return the VERSIONS of this process. `without_git` is the commit if the repository has no git history."""
    import torch

    commit, modified = git_commit()
    device = device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return {"commit": commit or without_git, "modified": modified, "device": device, "torch": torch.__version__}


def results_of_run(run: Path, versions: dict[str, object] | None = None) -> Iterator[dict]:
    """Yield the results of a run: validation losses, evaluations, and after its last step the times of the steps.

    Args:
        run: Folder named <arm>_seed<seed> or search_<arm>_<rate>.
        versions: VERSIONS with which the run was evaluated. The default is those with which it was started.
    """
    if not (starts := present_starts([*read_lines(run / "starts.jsonl")])):
        return
    config, hashes = read_config(run), ema_hashes(run)
    versions = versions or {key: starts[0][key] for key in VERSIONS}
    about = {"arm": run.name.removeprefix("search_").rpartition("_")[0], "seed": config.seed, "lr": config.train.lr}
    for record in read_records(run / "evaluations" / "results.jsonl"):
        settings, step = record.settings, record.step
        fields = about | {"step": step, "metrics": record.metrics}
        weights = {"ema": hashes[step]} if step in hashes else {}
        if not record.of_samples:
            yield fields | {"validation_loss_by_level": record.by_level} | weights
            continue
        name, scale = settings.get("guidance", "cfg"), settings.get("guidance.w", settings.get("cfg_scale"))
        if name == "sparse" and "guidance.checkpoint" in settings:
            name = "sparse, early"
        name = "none" if scale == 1 else name
        fields |= {"guidance": name, "scale": scale} | {key: settings[key] for key in SAMPLE_KEYS}
        fields["settings"] = {key: x for key, x in settings.items() if key not in (*SAMPLE_KEYS, "guidance.checkpoint")}
        fields["standard_errors"] = {metric: standard_error(values) for metric, values in record.jackknife.items()}
        yield fields | weights | {"content": record.checkpoint} | versions
    if (last := config.train.num_steps) in hashes:
        kept = [{key: start[key] for key in ("step", "time", *VERSIONS, "python")} for start in starts]
        kept = [start | {"commit": start["commit"] or versions["commit"]} for start in kept]
        speeds = [line["steps_per_sec"] for line in read_metrics(run / "metrics.jsonl")]
        yield about | {"step": last, "ema": hashes[last], "starts": kept, "steps_per_sec": speeds, "metrics": {}}
