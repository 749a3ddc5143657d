"""What commands print and return: a message for a user's error, a traceback for a bug, sweeps, help."""

import argparse
import io
import multiprocessing
import signal
import subprocess
import sys
import weakref
from typing import Literal

import pytest
import torch
from conftest import REPOSITORY, TINY, evaluated, forget_accelerate, make_shard, metrics, run_python
from forked import launch, run

import dit
import prepare_latents
import train as train_script
from cli import jobs
from cli.arguments import run_command
from cli.compose import parse_argument
from cli.jobs import run_hydra
from cli.print_errors import FULL_ERRORS, run_and_print_errors
from common.errors import UserError
from common.types import Colour, PositiveInt, Text
from configs.sampling_schema import Numbers
from configs.schema import TrainConfig
from runtime import launch_checks, machine


def test_user_errors_and_ctrl_c_print_one_line_and_bugs_keep_their_traceback(monkeypatch, capsys):
    def fail(error):
        raise error

    with pytest.raises(ZeroDivisionError):
        run_and_print_errors(lambda: 1 / 0)
    with pytest.raises(SystemExit, match="^error: no luck"):  # Python prints a text and exits with 1
        run_and_print_errors(lambda: fail(UserError("no luck")))
    with pytest.raises(SystemExit) as left:
        run_and_print_errors(lambda: fail(KeyboardInterrupt()))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match=r"^error \(process 0\): no luck$"):
        run_and_print_errors(lambda: fail(UserError("no luck")))
    # `prepare_latents.py inspect`, for example, starts over.
    assert left.value.code == 130
    assert capsys.readouterr().err.endswith("stopped; run the same command again, which resumes or starts over\n")
    monkeypatch.setenv(FULL_ERRORS, "1")
    with pytest.raises(UserError):
        run_and_print_errors(lambda: fail(UserError("no")))


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py", "train.lrr=1"],
        ["train.py", "model=treat"],
        ["train.py", "train.lr=-1"],
        ["train.py", "diffusion=ddpm"],
        ["train.py", "data=custom", "data.path=missing"],
        ["sample.py", "checkpoint=missing"],
        ["fid.py", "num_samples=-1"],
        ["fid.py", "checkpoint=missing"],
        ["prepare_latents.py", "inspect", "path=missing"],
        ["extras/weights/__main__.py", "import", "source=missing", "kind=dit", "output=run"],
        ["extras/report/__main__.py", "missing"],
        ["extras/benchmarks/__main__.py", "step", "train.lr=-1"],
        ["evidence/__main__.py", "guided", "seeds=[3]"],
    ],
)
def test_a_users_error_is_the_only_line_that_a_command_prints(arguments, tmp_path):
    outcome = run(tmp_path, arguments)
    assert outcome.code == 1 and outcome.output.startswith("error: ") and outcome.output.count("\n") == 1, outcome.output
    if "train.lr=-1" in arguments:
        traced = run(tmp_path, arguments, HYDRA_FULL_ERROR="1")
        assert traced.code == 1 and traced.output.startswith("Traceback (most recent call last)"), traced.output


def test_a_sweep_of_two_processes_names_its_runs_and_repeating_it_does_nothing(tmp_path):
    runs = tmp_path / "runs"
    arguments = ["train.py", "-m", *TINY, "train.num_steps=2", "seed=1", "train.precision=fp32,bf16", f"output_dir={runs}"]
    for outcome in launch(tmp_path, arguments, 2):
        outcome.expect_code(0)
    names = {f"digits_tread_batch_size-4_seed-1_precision-{precision}" for precision in ("fp32", "bf16")}
    assert {path.name for path in runs.iterdir() if path.is_dir()} == {*names, ".sweeps"}
    first = {name: metrics(runs / name)[1]["loss"] for name in names}
    assert len(set(first.values())) == 2
    again = run(tmp_path, arguments)
    assert again.code == 0 and again.output.count("this run is complete at step 2") == 2, again.output
    arguments = [
        "sample.py",
        "-m",
        f"checkpoint={runs / min(names)}",
        "sampler.num_steps=2,3",
        "num_samples=4",
        "sampling.batch_size=2",
    ]
    for outcome in launch(tmp_path, arguments, 2):
        outcome.expect_code(0)
    assert len(list((runs / min(names) / "generated").glob("*/samples_0-3.npz"))) == 2
    guidances = ["guidance=path_drop,none", f"output={tmp_path}/refused"]  # a single process would start the second run
    main, other = launch(tmp_path, [*arguments, *guidances], 2)
    assert main.code == other.code == 1
    assert "guidance=path_drop needs a network of model=sprint" in main.output, main.output
    assert not (tmp_path / "refused").exists()


def start(monkeypatch, main, arguments, full_errors="0"):
    """Run `main` in this process as train.py runs its own `main`."""
    monkeypatch.setattr("sys.argv", ["train.py", *arguments])
    monkeypatch.setenv(FULL_ERRORS, full_errors)
    run_hydra(main, "config", TrainConfig)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.lrr=1"], "^error: train.lrr is not a key; nearest: train.lr$"),
        (
            ["guidance=cfg", "cfg_scale=1.5"],
            "^error: cfg_scale is not a key; nearest: guidance.cfg_scale$",
        ),
        (["-m", "model=dit,tread", "model.rutes=[]"], "^error: model.rutes is not a key; nearest: model.routes$"),
        (["model=3"], "^error: Config group override must be a string"),
        (["model=treat"], "^error: In 'config': Could not find 'model/treat' Available options in 'model': dit "),
        (["guidance={w:2}"], "^error: guidance.w is a key of guidance=autoguidance or sparse; choose one of them"),
        (["guidance.w=2"], "^error: guidance.w is a key of guidance=autoguidance or sparse; choose one of them"),
        (["eval.every=2"], "^error: eval.every is not a key; nearest: .*checkpoint.every"),
        (["diffusion.sampler.num_steps=2"], "^error: diffusion.sampler.num_steps is not a key; nearest: .*sampler.num_steps"),
        (["model={routs:[]}"], "^error: model.routs is not a key; nearest: model.routes$"),
        (["model.routes={selection_ratio:0.5}"], "model.routes={selection_ratio:0.5}.*Cannot merge DictConfig with ListConfig"),
        (["data.path=cats #2"], """^error: data.path=cats #2 is not readable: .* as in 'data.path="cats #2"' """),
        (["model"], "^error: 'model' is not of the form key=value$"),
        (["data.path=a=b"], """as in 'data.path="a=b"' """),
        (["output_dir=out dir #2"], """as in 'output_dir="out dir #2"' """),
        (["experiment=table2/dit_b2"], "^error: experiment=table2/dit_b2 is not in .*; nearest: table2_dit_b2"),
        # Alone, these parts of rows lack a name, lack files, or would be trained like a row.
        (["experiment=bases/row"], "^error: experiment=bases/... is only a part of rows; choose a row, .*such as table2_dit_b2$"),
        (["experiment=bases/fashion"], "^error: experiment=bases/... is only a part of rows"),
        (["experiment=bases/sde"], "^error: experiment=bases/... is only a part of rows"),
        (["-m", "experiment=bases/row,table2_dit_b2", "seed=-1"], "^error: a run of .*: experiment=bases/... is only a part"),
        (["seed=0,1"], "^error: Ambiguous value for argument 'seed=0,1' .*multirun"),
        (["hydra/launcher=slurm"], "^error: In 'hydra/config': Could not find 'hydra/launcher/slurm' Available options"),
        (["--resolve"], "^error: The --resolve flag can only be used"),
        (["name="], "^error: name: '' is not a folder name"),
        (["name=a/b"], "^error: name: 'a/b' is not a folder name"),
        (["-m", "seed=0", "output_dir=2024_11_25"], "output_dir=20241125: .* quote text that looks like a number twice"),
    ],
)
def test_wrong_arguments_give_one_line(monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=words) as left:
        start(monkeypatch, lambda cfg: 1 / 0, arguments)
    assert len(left.value.code.splitlines()) == 1
    assert not [*tmp_path.glob("*/[!.]*")]  # no run


def test_text_that_looks_like_a_number_and_quoted_text_reach_the_settings_as_they_were_typed(monkeypatch, tmp_path):
    found = []
    for arguments, values in (
        (["name=2024_11_25", "output_dir=1e3"], ("2024_11_25", "1e3", "digits")),
        (["name=2024_11_25", "output_dir=runs/${name}"], ("2024_11_25", "runs/2024_11_25", "digits")),
        (["name=007", """data.path="a b=c, #d 'e'\""""], ("007", "runs", "a b=c, #d 'e'")),
        (["name=7", "data.path=a b"], ("7", "runs", "a b")),
        (
            ["name=größe", "output_dir=runs/日本", "data.path=${output_dir}/e\u0301 😀"],
            ("größe", "runs/日本", "runs/日本/e\u0301 😀"),
        ),
        (["name=ж", "output_dir='\"ü, x\"'", "data={path: ü/b}"], ("ж", '"ü, x"', "ü/b")),
        (["name=${seed}", "seed=3", "output_dir=${train.lr}"], ("3", "0.002", "digits")),
        (["train={lr:1e-3,num_steps:3}", "model={selection:grid}"], ("digits_tread_lr-0.001_selection-grid", "runs", "digits")),
    ):
        start(monkeypatch, found.append, ["data.path=digits", *arguments])
        assert (found[-1].name, found[-1].output_dir, found[-1].data.path) == values


def failures_in(caplog):
    return [record.message for record in caplog.records if record.levelname == "ERROR"]


def test_a_sweep_goes_on_after_a_failed_run_and_logs_each_failure_when_it_happens(monkeypatch, tmp_path, caplog, capsys):
    found, where = [], "output_dir=runs"
    monkeypatch.chdir(tmp_path)
    for batches in ([], ["hydra.sweeper.max_batch_size=1"]):
        found.clear()
        caplog.clear()
        with pytest.raises(SystemExit) as left:
            arguments = ["-m", "train.lr=1,-1,x,2", where, *batches]
            start(monkeypatch, lambda cfg: found.append((cfg.train.lr, len(failures_in(caplog)))), arguments)
        assert found == [(1, 0), (2, 2)] and "Error executing job" not in capsys.readouterr().err  # Hydra's line
    failed = "a run of the sweep failed: train.lr="
    assert failures_in(caplog) == [
        f"{failed}-1 {where}: train.lr=-1: Input should be greater than 0",
        f"{failed}x {where}: train.lr='x': Input should be a valid number",
    ]
    assert left.value.code == f"error: {failures_in(caplog)[0]}" and "Traceback" not in caplog.text
    caplog.clear()
    with pytest.raises(SystemExit) as left:  # a bug keeps its traceback
        start(monkeypatch, lambda cfg: 1 / cfg.seed, ["-m", "seed=0,1", where])
    assert left.value.code == f"error: a run of the sweep failed: seed=0 {where}: ZeroDivisionError: division by zero"
    assert "Traceback" in caplog.text
    caplog.clear()
    with pytest.raises(UserError, match="train.lr=-1"):
        start(monkeypatch, print, ["-m", "train.lr=-1,x", where], full_errors="1")
    assert [record.exc_info[0] for record in caplog.records if "failed" in record.message] == [UserError] * 2


def test_a_name_may_be_an_interpolated_number_in_a_sweep_or_set_by_an_own_group(monkeypatch, tmp_path):
    found = []
    start(monkeypatch, found.append, ["-m", "name=${seed}", "seed=0,1", f"output_dir={tmp_path}"])
    assert [cfg.name for cfg in found] == ["0", "1"]
    recipes = [("recipe/slow", "", 1e-5), ("my/recipe/fast", "", 1e-3), ("recipe/named", "name: mine\n", 1e-4)]
    for recipe, name, lr in recipes:
        file = tmp_path / "own" / f"{recipe}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# @package _global_\n{name}train:\n  lr: {lr}\n")
        start(monkeypatch, found.append, [f"--config-dir={tmp_path / 'own'}", "+{}={}".format(*recipe.rsplit("/", 1))])
    assert [cfg.train.lr for cfg in found[2:]] == [1e-5, 1e-3, 1e-4]
    assert [cfg.name for cfg in found[2:]] == ["digits_tread", "digits_tread", "mine"]
    with pytest.raises(
        SystemExit, match=r"^error: experiment is set already, by default to null: write experiment=... without \+"
    ):
        start(monkeypatch, found.append, ["+experiment=table2_dit_b2"])


def test_interpolations_on_the_command_line_are_resolved_in_the_configuration_and_their_errors_are_one_line(monkeypatch):
    found = []
    start(monkeypatch, found.append, ["train.warmup_steps=${.log_every}", "train.log_every=7"])
    assert found[0].train.warmup_steps == 7
    for arguments in (["output_dir=${oc.env:IT_IS_MISSING}/runs"], ["-m", "output_dir=${oc.env:IT_IS_MISSING}/runs"]):
        with pytest.raises(SystemExit, match="^error: .*Environment variable 'IT_IS_MISSING' not found"):
            start(monkeypatch, found.append, arguments)


def test_hydras_lazy_help_text_is_accepted_by_an_argparse_that_reads_it_at_once(monkeypatch, tmp_path):
    """Python 3.14 checks help texts when an argument is added."""
    add_argument = argparse.ArgumentParser.add_argument

    def check_help(parser, *names, **settings):
        assert "%" not in (settings.get("help") or "")  # a TypeError for the text of Hydra's --shell-completion
        return add_argument(parser, *names, **settings)

    monkeypatch.setattr(argparse.ArgumentParser, "add_argument", check_help)
    start(monkeypatch, lambda cfg: None, [f"output_dir={tmp_path}"])
    assert argparse.ArgumentParser.add_argument is check_help


def test_own_files_for_sweepers_are_recognised_by_what_they_launch(tmp_path, monkeypatch):
    (tmp_path / "own" / "hydra" / "sweeper").mkdir(parents=True)
    (tmp_path / "own" / "hydra" / "sweeper" / "mine.yaml").write_text("defaults: [optuna]\n")
    search = [f"--config-dir={tmp_path / 'own'}", "-m", "hydra/sweeper=mine", "hydra.sweeper.n_trials=1", "evaluation.every=0"]
    with pytest.raises(SystemExit, match="a search needs a metric"):
        start(monkeypatch, print, [*search, "train.lr=interval(0.1,0.2)", f"output_dir={tmp_path}"])


def test_all_rows_of_a_table_can_be_swept(monkeypatch, tmp_path):
    found = []
    rows = ["-m", "experiment=glob(table2_dit_s2*)", "data=custom", "data.path=x", f"output_dir={tmp_path}"]
    start(monkeypatch, found.append, rows)
    assert [cfg.experiment["name"] for cfg in found] == ["table2_dit_s2", "table2_dit_s2_tread"]


def test_a_search_needs_a_metric(monkeypatch, tmp_path):
    search = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "hydra.sweeper.n_jobs=1", "train.lr=interval(1e-3,1e-2)"]
    with pytest.raises(
        SystemExit, match="a search needs a metric, but the runs have no evaluations; set evaluation.every and eval"
    ):
        start(monkeypatch, lambda cfg: None, [*search, "evaluation.every=0", f"output_dir={tmp_path}"])


def test_a_sweep_that_a_signal_ends_after_a_failure_does_not_exit_with_0(monkeypatch, tmp_path, caplog):
    for number, (stop, code) in enumerate([(SystemExit(0), "error: a run of the sweep failed"), (KeyboardInterrupt(), "130")]):

        def train(cfg, stop=stop):
            raise stop if cfg.seed else UserError("diverged")

        with pytest.raises(SystemExit, match=f"^{code}"):
            start(monkeypatch, train, ["-m", "seed=0,1", f"output_dir={tmp_path}/{number}"])
        assert [line.endswith(": diverged") for line in failures_in(caplog)] == [True] * (number + 1)
        with pytest.raises(SystemExit, match="^(0|130)$"):  # without a failure
            start(monkeypatch, train, ["-m", "seed=1,2", f"output_dir={tmp_path}/{number}"])
    monkeypatch.setattr(multiprocessing.current_process(), "name", "LokyProcess-2")  # a run of another worker may have failed
    with pytest.raises(SystemExit, match="^1$"):
        start(monkeypatch, lambda cfg: sys.exit(0), ["-m", "seed=1,2", f"output_dir={tmp_path}/worker"])


def test_a_search_that_continues_after_a_failed_run_exits_with_1(monkeypatch, tmp_path):
    found = []

    def train(cfg):
        found.append(cfg.seed)
        if len(found) == 1:
            raise UserError("no memory")
        return 1.0

    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweeper.max_failure_rate=1"]
    search += ["train.lr=interval(1e-3,1e-2)", "evaluation.every=2"]
    with pytest.raises(SystemExit, match="^error: a run of the sweep failed: .*: no memory$"):
        start(monkeypatch, train, ["-m", *search, f"output_dir={tmp_path}"])
    assert len(found) == 3


def test_other_commands_resolve_interpolations(monkeypatch):
    monkeypatch.setenv("SCRATCH", "nowhere")
    with pytest.raises(UserError, match="^nowhere/latents does not exist"):
        prepare_latents.main(["inspect", "path=${oc.env:SCRATCH}/latents"])
    with pytest.raises(UserError, match="^path: .*'MISSING' not found"):
        prepare_latents.main(["inspect", "path=${oc.env:MISSING}/latents"])


def train_here(cfg):
    forget_accelerate()
    train_script.main(cfg)


OWN_FILES = {
    "own": "defaults: [config, _self_]\ntrain: {lr: 1e-5}\n",
    "recipe/slow": "# @package _global_\ntrain: {lr: 1e-5}\n",
    "data/digits_slow": "# @package _global_\ndefaults: [digits, _self_]\ntrain: {lr: 1e-5}\n",
    "model/narrow": "defaults: [tread, _self_]\nclass_dropout: 0.2\n",
    "train/slow": "lr: 1e-5\n",
    "experiment/mine": "# @package _global_\ntrain: {lr: 1e-5}\n",
}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-m", "train.lr=2e-3,1e-5"], "train.lr: 0.002 -> 1e-05.* resume=changed"),
        (["-m", "model=tread,dit"], "model.name: 'tread' -> 'dit'; model.routes: "),
        (["-m", "seed=0,1"], "seed: 0 -> 1"),
        (["-m", "train.num_steps=2,1"], "train.num_steps: 2 -> 1.* resume=changed"),
        (["-m", "data.path={latents},{other}/latents"], "was trained on other latents"),
        (["--config-name=own"], "train.lr: 0.002 -> 1e-05"),
        (["+recipe=slow"], "train.lr: 0.002 -> 1e-05"),
        (["data=digits_slow"], "train.lr: 0.002 -> 1e-05"),
        (["model=narrow"], "model.class_dropout: 0.1 -> 0.2"),
        (["+train=slow"], "train.lr: 0.002 -> 1e-05"),
        (["experiment=mine"], "train.lr: 0.002 -> 1e-05"),
    ],
)
def test_a_run_with_other_settings_than_the_run_in_its_folder_is_refused(monkeypatch, tmp_path, arguments, words):
    monkeypatch.setitem(dit.BACKBONES, "DiT-XS/2", (12, 24, 3, 2))
    for name, text in OWN_FILES.items():
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / f"{name}.yaml").write_text(text)
    for folder, seed in (("latents", 0), ("other/latents", 1)):
        make_shard(tmp_path / folder / "x.safetensors", channels=1, size=8, num_classes=10, seed=seed)
    keys = [*TINY, "train.num_steps=2", f"output_dir={tmp_path}/runs", f"data.path={tmp_path}/latents"]
    start(monkeypatch, train_here, keys)
    (run_folder,) = (tmp_path / "runs").iterdir()
    before = (run_folder / "metrics.jsonl").read_bytes(), (run_folder / "config.yaml").read_bytes()
    first, *others = (argument.format(latents=tmp_path / "latents", other=tmp_path / "other") for argument in arguments)
    more = [f"name={run_folder.name}"] if first == "-m" else []  # otherwise the sweep gives its runs different names
    with pytest.raises(SystemExit, match=f"(?s)^error: .*{words}"):
        start(monkeypatch, train_here, [f"--config-dir={tmp_path / 'own'}", first, *keys, *more, *others])
    assert before == ((run_folder / "metrics.jsonl").read_bytes(), (run_folder / "config.yaml").read_bytes())
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name != ".sweeps"] == [run_folder.name]


def test_runs_of_a_sweep_that_differ_in_nothing_that_training_uses_are_one_run(monkeypatch, tmp_path, caplog):
    monkeypatch.setitem(dit.BACKBONES, "DiT-XS/2", (12, 24, 3, 2))
    keys = [*TINY, "train.num_steps=2", f"output_dir={tmp_path}", "evaluation.num_samples=20", "guidance=none"]
    caplog.set_level("INFO")
    start(monkeypatch, train_here, ["-m", *keys, "name=same", "seed=0,0"])
    assert caplog.text.count("this run is complete at step 2") == 1
    start(monkeypatch, train_here, ["-m", *keys, "name=longer", "train.num_steps=1,2"])
    assert [line["step"] for line in metrics(tmp_path / "longer")] == [1, 2]
    start(monkeypatch, train_here, ["-m", *keys, "name=evaluated", "evaluation.every=2", "sampler.num_steps=2,3"])
    assert [line["step"] for line in metrics(tmp_path / "evaluated")] == [1, 2]
    assert [line["settings"]["num_steps"] for line in evaluated(tmp_path / "evaluated")] == [2, 3]


class Trainer:
    """A stand-in for the objects that a run holds in memory."""


@pytest.mark.parametrize("error", [UserError("diverged"), RuntimeError("diverged")])
def test_the_failed_run_of_a_sweep_leaves_nothing_in_memory_for_the_next(error, monkeypatch, tmp_path):
    def fail(cfg):
        trainer = Trainer()
        started.append((weakref.ref(trainer), [found() for found, *_ in started]))
        raise type(error)(*error.args)

    started = []
    monkeypatch.setattr(jobs.log, "propagate", False)  # pytest keeps the records that it sees, with their errors
    with pytest.raises(SystemExit, match="diverged"):
        start(monkeypatch, fail, ["-m", "seed=0,1", f"output_dir={tmp_path}"])
    assert [alive for _, alive in started] == [[], [None]]


called = []


def count(path: Text, number: PositiveInt = 3, shares: list[float] = (), switch: bool = False) -> None:
    """Count things."""
    called.append((path, number, shares, switch))


def test_commands_without_a_configuration_take_their_functions_parameters_as_yaml(capsys):
    commands = {"count": "test_command_line:count"}
    called.clear()
    run_command(commands, "what it does\n", ["count", "path=x", "number=4", "shares=[1.0,2e-3]", "switch=true"])
    assert called == [("x", 4, [1.0, 2e-3], True)]
    for arguments in ([], ["--help"]):
        run_command(commands, "what it does\n", arguments)
        assert capsys.readouterr().out == "what it does\n"
    run_command(prepare_latents.COMMANDS, "", ["inspect", "--help"])
    assert "sigma_data: PositiveFloat = 0.5" in (shown := capsys.readouterr().out) and "Read all latents, print" in shown
    run_command(prepare_latents.COMMANDS, "", ["encode", "--help"], prepare_latents.KEYS)
    assert "flips: bool = False  # true also encodes the mirrored images" in capsys.readouterr().out
    run_command(commands, "", ["count", "path=2024_11_25", "number=1e3"])
    run_command(commands, "", ["count", """path="cats, #2 = [x] 'y'\""""])
    run_command(commands, "", ["count", "number=2"], path="given")
    assert called[1:] == [("2024_11_25", 1000, (), False), ("cats, #2 = [x] 'y'", 3, (), False), ("given", 2, (), False)]
    for arguments, words in (
        (["mount"], "mount.*count"),
        (["count"], "path= is missing"),
        (["count", "path=x", "nunber=4"], "nunber is not a key; nearest: number"),
        (["count", "path=x", "number=four"], "number='four'"),
        (["count", "path=x", "number"], "'number' is not of the form key=value"),
        (["count", "path=x", "shares=[1"], "shares=.1 is not readable"),
        (["count", 'path="cats #2'], r"""path="cats #2 is not readable: .* as in 'path=\"\\\"cats #2\"' """),
        (["count", "path=x", "number=rgb(1, 2, 3)"], """as in 'number="rgb.1, 2, 3."' .*Unknown function 'rgb'"""),
        (["count", "path=x", "shares=1,2"], "shares=1,2: write a list as shares=.a,b., and text with commas as 'shares=\"a,b\"'"),
    ):
        with pytest.raises(UserError, match=words):
            run_command(commands, "", arguments)


def take(
    text: Text = "-",
    maybe: Text | None = "-",
    colour: Colour = "white",
    choice: Literal["none", "jpeg"] = "none",
    number: PositiveInt | None = 1,
    switch: bool = False,
    words: list[str] = (),
    seeds: Numbers = (),
) -> None:
    called.append(locals())


def taken(*arguments):
    """Return the value that `take` gets for the key of the last argument."""
    called.clear()
    run_command({"take": "test_command_line:take"}, "", ["take", *arguments])
    return called[0][arguments[-1].partition("=")[0]]


TEXTS = [
    "Bücher/日本", "a b", " x ", "x\t", "a, b", "a,b", "a=b", "a #2", "#808080", "a: b", "a:", "a:b", "yes", "no", "on", "off",
    "true", "none", "~", "~/x", "*x", "&x", "!x", "%x", "@x", "`x", "? x", "- x", "-", "---", "> x", "|", "2024_11_25", "007",
    "1e3", "12:30", "1.50", "0x10", "inf", "nan", "[x", "[x]", "{x}", "{x: 1}", "(a)", "rgb(1, 2, 3)", r"a\b", r"a\\b", r"a\,b",
    r"a\ b", "a;b", "it's", '5" disk', "???", "a$b", "two\nlines",
]  # fmt: skip


@pytest.mark.parametrize("key", ["text", "maybe"])
@pytest.mark.parametrize("text", TEXTS)  # Hydra's grammar or YAML refuses, shortens or converts most of them
def test_text_reaches_a_command_as_it_was_typed(key, text):
    assert taken(f"{key}={text}") == text


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("""text="cats, #2 = [x] 'y'\"""", "cats, #2 = [x] 'y'"),  # quotes, as train.py needs them
        ("text='a b'", "a b"),
        (r'text="a\"b"', 'a"b'),
        (r'text="C:\new"', r"C:\new"),
        ('text="null"', "null"),
        ('text="2024"', "2024"),
        ("text=${oc.env:SCRATCH}/x", "/my scratch/x"),
        ('text="${oc.env:SCRATCH}/x"', "/my scratch/x"),
        ("choice=${oc.env:CHOICE}", "jpeg"),
        ("maybe=null", None),
        ("colour=#808080", "#808080"),
        ("colour='#808080'", "#808080"),
        ("colour=rgb(255, 255, 255)", "rgb(255, 255, 255)"),
        ("number=1e3", 1000),
        ("number=1_000", 1000),
        ("number= 4 ", 4),
        ("number=null", None),
        ("switch=True", True),
        ("words=[]", []),
        ('words=["model=dit","model=tread train.lr=1e-3"]', ["model=dit", "model=tread train.lr=1e-3"]),
        (r'words=["checkpoint=[\"x\",\"y\"]","a={b:1}","${seed}"]', ['checkpoint=["x","y"]', "a={b:1}", "${seed}"]),
        ("words=[no,12:30,a: b]", ["no", "12:30", "a: b"]),
        ("seeds=[10,12-14]", [10, 12, 13, 14]),
        ("seeds=10-12", [10, 11, 12]),
    ],
)
def test_quoted_text_interpolations_and_other_types_follow_hydras_grammar(monkeypatch, argument, value):
    monkeypatch.setenv("SCRATCH", "/my scratch")
    monkeypatch.setenv("CHOICE", "jpeg")
    assert taken(argument) == value
    assert taken(argument, argument) == value  # the last of equal keys counts


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("text=", "text='': String should have at least 1 character"),
        ("text=null", "text is not set: "),
        ('text="a"b"', 'text="a"b" is not readable: quote text with special characters twice'),
        ('text="a","b"', "write a list as text=.a,b., and text with commas as 'text=\"a,b\"'"),
        ("text=${", "text: "),
        ("text=${maybe}", "text: Interpolation key 'maybe' not found"),
        ("colour=", "colour: there is no colour"),
        ("colour=whit", "colour: unknown color specifier: 'whit'"),
        ("choice=png", "choice='png': Input should be 'none' or 'jpeg'"),
        ("number=010", "number='010': Input should be a valid integer"),  # YAML reads 8
        ("number=12:30", "number='12:30': Input should be a valid integer"),  # YAML reads 750
        ("number=0x10", "number='0x10': Input should be a valid integer"),
        ("number=", "number='': Input should be a valid integer"),
        ("number=4 # four", "number=4 # four is not readable"),
        ("number=1,2", "number=1,2: write a list as number="),
        ("switch=yes", "switch='yes': Input should be a valid boolean"),
        ("words=a,b", "words=a,b: write a list as words="),
        ("words=a", "words='a': Input should be a valid list"),
        ("words=[a=b]", """words=.a=b. is not readable: .* as in 'words=."a b","c=d".'"""),
        ("words=[2024_11_25]", r"words\[0\]=20241125: Input should be a valid string"),
        ("seeds=x", "seeds: 'x' is not a list"),
        ("text", "'text' is not of the form key=value"),
        ("", "'' is not of the form key=value"),
        ("+text=x", r"\+text is not a key; nearest: text"),
        ("~text", "~text is not a key; nearest: text"),
        ("~text=x", "~text is not a key; nearest: text"),
        ("text@there=x", "text@there is not a key"),
        ("text.a=x", "text.a is not a key"),
        ("Bücher=x", "Bücher=x is not readable"),
    ],
)
def test_an_argument_that_a_command_cannot_use_gives_one_line_that_names_it(argument, words):
    with pytest.raises(UserError, match=words) as error:
        taken(argument)
    assert len(str(error.value).splitlines()) == 1


def test_a_command_ends_quietly_when_the_reader_of_its_output_ends_and_works_with_closed_streams(tmp_path):
    for arguments in ("train.py --help", "train.py --cfg job", "prepare_latents.py --help"):
        line = f"{sys.executable} {arguments} | head -c 1; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], cwd=REPOSITORY, capture_output=True, text=True)
        assert (done.returncode, done.stderr) in ((128 + signal.SIGPIPE, ""), (0, "")), done  # 0: it wrote before the end
    code = "import sys; from cli.print_errors import run_and_print_errors; run_and_print_errors(lambda: sys.stderr.write(str(1)))"
    assert subprocess.run(["bash", "-c", f"exec 2>&-; {sys.executable} -c '{code}'"], cwd=REPOSITORY).returncode == 0


def test_help_and_configurations_are_printed_on_request():
    for script, words in (
        ("train.py", ["python train.py model=tread", "lr: 1e-4              # Learning rate.", "r_weak: 0.5", "table2_dit_b2,"]),
        ("sample.py", ["weights: null           # Weights to sample with: ema | raw."]),
        ("fid.py", ["S_churn: 0.0 ", "cfg_scale: 1.5 "]),
        ("prepare_latents.py", ["prepare_latents.py encode images="]),
    ):
        code, output = run_python("-X", "importtime", script, "--help")
        assert code == 0 and all(word in output for word in words), output
        assert " torch\n" not in output  # its import takes seconds
        assert "--- configs/experiment" not in output  # the contents of 68 files
    code, output = run_python("-X", "importtime", "train.py", "train.lrr=1")
    assert code == 1 and "error: train.lrr is not a key; nearest: train.lr\n" in output and " torch\n" not in output
    code, output = run_python("train.py", "--cfg=job", "--resolve", "experiment=table2_dit_b2_tread")
    assert code == 0 and "name: table2_dit_b2_tread_seed0" in output
    code, output = run_python("train.py", "--info=searchpath")
    assert code == 0 and output.count("Config search path\n") == 1, output  # stdout and stderr together


# ----------------------------------------------------------------------------------------------------------------------
# Starting.


def test_a_launch_of_one_process_instead_of_several_gives_a_warning(monkeypatch, caplog):
    for name in ("ACCELERATE_MIXED_PRECISION", "MASTER_PORT"):  # as `accelerate launch --num_processes 2` on a CPU
        monkeypatch.setenv(name, "no")
    forget_accelerate()
    machine.start_accelerator(1)
    assert "accelerate launch started only one process" in caplog.text


def test_accelerate_compiles_nothing_even_if_it_is_configured_to(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    forget_accelerate()
    net = torch.nn.Linear(2, 2)
    assert machine.start_accelerator(1).prepare(net) is net


def test_a_gpu_that_torch_cannot_use_is_an_error(monkeypatch, tmp_path):
    for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch_checks, "NVIDIA_DEVICE", tmp_path / "nvidiactl")
    monkeypatch.setattr(launch_checks.torch.version, "cuda", "13.0")
    monkeypatch.setattr(launch_checks.torch.cuda, "is_available", lambda: False)
    launch_checks.check_gpus()  # no GPU
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(UserError, match="CUDA 13.0"):
        launch_checks.check_gpus()
    monkeypatch.setattr(launch_checks.torch.cuda, "is_available", lambda: True)
    launch_checks.check_gpus()


def test_ctrl_c_reaches_a_command_that_a_shell_started_in_the_background():
    found, before = [], signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run_and_print_errors(lambda: found.append(signal.getsignal(signal.SIGINT)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert found[0] not in (signal.SIG_IGN, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("a=[runs/ü, ä b ,c]", ["runs/ü", "ä b", "c"]),
        ("a={b: größe, c: 1}", {"b": "größe", "c": 1}),
        ("a={b: [ü,2]}", {"b": ["ü", 2]}),
        ("a=['ü, x',\"ä\"]", ["ü, x", "ä"]),
        ("a=${oc.env:HOME}/ü", "${oc.env:HOME}/ü"),
        ("a=1e-3", 0.001),
        ("a=runs/2024_ü", "runs/2024_ü"),
    ],
)
def test_letters_beyond_ascii_need_no_quotes(typed, expected):
    assert parse_argument(typed).value() == expected


def test_letters_beyond_ascii_in_a_sweep(monkeypatch, tmp_path):
    found = []
    monkeypatch.chdir(tmp_path)
    start(monkeypatch, lambda cfg: found.append((cfg.output_dir, cfg.name)), ["-m", "output_dir=ü/a,c", "name=x,ж"])
    assert found == [("ü/a", "x"), ("ü/a", "ж"), ("c", "x"), ("c", "ж")]


def test_a_flag_keeps_letters_that_values_need_quotes_for(tmp_path, monkeypatch):
    found, own = [], tmp_path / "Bücher" / "data"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("defaults: [custom, _self_]\npath: here\n")
    start(monkeypatch, lambda cfg: found.append(cfg.data.path), [f"--config-dir={own.parent}", "data=mine"])
    assert found == ["here"]


def test_keys_cannot_be_removed_and_hydras_own_hints_stay(monkeypatch, capsys):
    for argument, words in (
        ("~train.lr", "~train.lr: every key has a value, so none can be removed; write train.lr=<value>"),
        ("~guidance", "write guidance=<value>"),
        ("hydra/launcher=submitit_slurm", "hydra/launcher=submitit_slurm starts jobs only with -m"),
        ("hydra.sweeper.params={train.lr: '1,2'}", "error: "),
        ("hydra/launcher=joblib", "starts jobs only with -m, and without it, this shell would do the work"),
        ("hydra.job.env_set.A=1", "To append to your config use +hydra.job.env_set.A=1"),
    ):
        with pytest.raises(SystemExit) as left:
            start(monkeypatch, lambda cfg: None, ["-m", argument] if "sweeper" in argument else [argument])
        assert words in str(left.value)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("text", ["Größe", "日本", "😀", "u\u0308"])
def test_letters_that_a_locale_lacks_are_escaped(monkeypatch, stream, encoding, text):
    written = io.BytesIO()
    monkeypatch.setattr(sys, stream, io.TextIOWrapper(written, encoding=encoding))
    run_and_print_errors(lambda: print(text, file=getattr(sys, stream), flush=True))
    assert written.getvalue() == f"{text}\n".encode(encoding, "backslashreplace")


@pytest.mark.parametrize("words", [["-i", "defaults"], ["-idefaults"], ["--info", "defaults"], ["--info=defaults"]])
def test_hydra_alone_prints_its_information(monkeypatch, words):
    started = []
    monkeypatch.setattr("cli.print_errors.log_to_stderr", lambda: started.append(True))
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    run_and_print_errors(lambda: None)
    assert not started
