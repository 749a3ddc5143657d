"""What commands print and return: one line for a user's error, a traceback for a bug, sweeps, help."""

import signal
import weakref

import pytest
import torch
from conftest import TINY, forget_accelerate, metrics, run_python
from forked import launch, run

import prepare_latents
from common.errors import UserError
from common.types import PositiveInt, Text
from configs import command_line
from configs.command_line import guard, run_command
from configs.schema import TrainConfig
from runtime import machine


def test_user_errors_and_ctrl_c_print_one_line_and_bugs_keep_their_traceback(monkeypatch, capsys):
    def fail(error):
        raise error

    with pytest.raises(ZeroDivisionError):
        guard(lambda: 1 / 0)
    with pytest.raises(SystemExit, match="^error: no luck"):  # Python prints a text and exits with 1
        guard(lambda: fail(UserError("no luck")))
    with pytest.raises(SystemExit) as left:
        guard(lambda: fail(KeyboardInterrupt()))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match=r"^error \(process 0\): no luck$"):
        guard(lambda: fail(UserError("no luck")))
    assert left.value.code == 130 and "stopped" in capsys.readouterr().err
    monkeypatch.setenv(command_line.FULL_ERRORS, "1")
    with pytest.raises(UserError):
        guard(lambda: fail(UserError("no")))


def test_a_sweep_of_two_processes_names_its_runs_and_repeating_it_does_nothing(tmp_path):
    runs = tmp_path / "runs"
    arguments = ["train.py", "-m", *TINY, "train.num_steps=2", "seed=1", "train.precision=fp32,bf16", f"output_dir={runs}"]
    for outcome in launch(tmp_path, arguments, 2):
        outcome.expect_code(0)
    names = {f"digits_tread_batch_size-4_seed-1_precision-{precision}" for precision in ("fp32", "bf16")}
    assert {path.name for path in runs.iterdir() if path.is_dir()} == names
    first = {name: metrics(runs / name)[1]["loss"] for name in names}
    assert len(set(first.values())) == 2
    again = run(tmp_path, arguments)
    assert again.code == 0 and again.output.count("this run is complete at step 2") == 2, again.output
    arguments = ["sample.py", "-m", f"checkpoint={runs / min(names)}", "num_steps=2,3", "num_samples=4", "batch_size=2"]
    for outcome in launch(tmp_path, arguments, 2):
        outcome.expect_code(0)
    assert len(list((runs / min(names) / "generated").glob("*/samples_0-3.npz"))) == 2
    guidances = ["guidance=path_drop,none", f"output={tmp_path}/refused"]  # a single process would start the second run
    main, other = launch(tmp_path, [*arguments, *guidances], 2)
    assert main.code == other.code == 1
    assert "error (process 0): guidance=path_drop needs a network of model=sprint" in main.output, main.output
    assert not (tmp_path / "refused").exists()


def test_unreadable_arguments_give_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        (["output_dir=out dir ü"], "LexerNoViableAltException: output_dir=out dir ü .*override_grammar"),
        (["model=3"], "Config group override must be a string"),
        (["-m", "seed=0,1", "hydra/launcher=joblib"], "hydra/launcher=joblib: settings of Hydra itself, such as launchers"),
        (["guidance=cfg", "cfg_scale=1.5"], "cfg_scale is not a key; nearest: guidance.cfg_scale, eval.cfg_scales"),
        (["model.routes={selection_ratio:0.5}"], "model.routes={selection_ratio:0.5}.*Cannot merge DictConfig with ListConfig"),
        (["-m", "train.lr=1e-3,abc"], "error: train.lr='abc': .*number"),
        (["-m", "seed=0", "experiment=table2/dit_b2,table2/dit_b1"], "table2/dit_b1 is not a row"),
        (["-m", "eval.num_steps=3,5"], "have the folder runs/digits_tread: eval.num_steps=3 and eval.num_steps=5"),
    ):
        monkeypatch.setattr("sys.argv", ["train.py", *arguments])
        monkeypatch.setenv(command_line.FULL_ERRORS, "0")
        with pytest.raises(SystemExit, match=words):
            command_line.run(lambda cfg: 1 / 0, "config", TrainConfig, "")
    monkeypatch.setattr("sys.argv", ["train.py", "--model", "tread"])
    with pytest.raises(SystemExit):
        command_line.run(lambda cfg: 1 / 0, "config", TrainConfig, "")
    assert "usage: train.py [-h] [-m] [--cfg {job}] [key=value ...]" in (shown := capsys.readouterr().err)
    assert "unrecognized arguments: --model" in shown
    assert not list(tmp_path.iterdir())


class Trainer:
    """A stand-in for the objects that a run holds in memory."""


def fail_in_a_sweep(cfg):
    trainer = Trainer()
    started.append((weakref.ref(trainer), [found() for found, *_ in started]))
    raise UserError("diverged")


def test_the_failed_run_of_a_sweep_leaves_nothing_in_memory_for_the_next(monkeypatch, tmp_path):
    started.clear()
    monkeypatch.setattr("sys.argv", ["train.py", "-m", "seed=0,1", f"output_dir={tmp_path}"])
    monkeypatch.setenv(command_line.FULL_ERRORS, "0")
    with pytest.raises(SystemExit, match="diverged"):
        command_line.run(fail_in_a_sweep, "config", TrainConfig, "")
    assert [alive for _, alive in started] == [[], [None]]


started = []
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
    for arguments, words in (
        (["mount"], "mount.*count"),
        (["count"], "path= is missing"),
        (["count", "path=x", "nunber=4"], "nunber is not a key; nearest: number"),
        (["count", "path=x", "number=four"], "number='four'"),
        (["count", "path=x", "number"], "'number' is not of the form key=value"),
        (["count", "path=[x"], "expected ',' or ']'"),
    ):
        with pytest.raises(UserError, match=words):
            run_command(commands, "", arguments)


def test_help_and_configurations_are_printed_on_request():
    for script, words in (
        ("train.py", ["python train.py model=tread", "lr: 1e-4              # AdamW's learning rate", "r_weak: 0.5"]),
        ("sample.py", ["weights: ema            # ema | raw"]),
        ("fid.py", ["S_churn: null", "cfg_scale: ${cfg_scale_or:1.5}"]),
        ("prepare_latents.py", ["prepare_latents.py encode images="]),
    ):
        code, output = run_python("-X", "importtime", script, "--help")
        assert code == 0 and all(word in output for word in words), output
        assert " torch\n" not in output  # its import takes seconds
    code, output = run_python("-X", "importtime", "train.py", "train.lrr=1")
    assert code == 1 and "error: train.lrr is not a key; nearest: train.lr\n" in output and " torch\n" not in output
    code, output = run_python("train.py", "--cfg=job", "experiment=table2/dit_b2_tread")
    assert code == 0 and "name: table2_dit_b2_tread_seed${seed}" in output


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
    monkeypatch.setattr(machine, "NVIDIA_DEVICE", tmp_path / "nvidiactl")
    monkeypatch.setattr(machine.torch.version, "cuda", "13.0")
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    machine.check_gpus()  # no GPU
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(UserError, match="CUDA 13.0"):
        machine.check_gpus()
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: True)
    machine.check_gpus()


def test_ctrl_c_reaches_a_command_that_a_shell_started_in_the_background():
    found, before = [], signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        guard(lambda: found.append(signal.getsignal(signal.SIGINT)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert found[0] not in (signal.SIG_IGN, signal.SIG_DFL)
