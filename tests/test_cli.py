"""Hydra's command line: what is refused, in one line that names the argument, and what is left to Hydra."""

import os
import signal
import sys
from datetime import timedelta

import pytest
import torch
from conftest import REPOSITORY, finish, forget_accelerate, start

from common.errors import UserError
from configs import command_line as cli
from configs import schema
from configs.schema import FidConfig, SampleConfig, TrainConfig
from training import machine

FILES = {TrainConfig: "config", SampleConfig: "sample", FidConfig: "fid"}


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command(*arguments) -> (exit code, stdout, stderr, checked configurations) of `cli.run` in an empty folder."""

    def run(*arguments, settings=TrainConfig):
        found = []
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        code = 0
        try:
            cli.run(lambda cfg: found.append(schema.check(cfg, settings)), FILES[settings], settings)
        except SystemExit as end:
            code = end.code
        assert cli.FULL_ERRORS not in os.environ
        return code, *capsys.readouterr(), found

    monkeypatch.delenv(cli.FULL_ERRORS, raising=False)
    return run


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.lr=1e-4", "++train.weight_decay=1e-4", "train.betas=[0.9,0.95]"],
        ["train={lr: 1e-4}", "model.routes.0.selection_ratio=0.25", "+experiment.paper.fid=1", "experiment=table2/dit_b2_tread"],
        ["model='dit'", "name='a=b'", "init_from=null"],
        ["name=${data.name}_mine", "data.path='a, b'", "hydra.job.name=mine"],
    ],
)
def test_what_hydra_accepts_is_accepted(command, arguments):
    code, _, errors, configs = command(*arguments)
    assert (code, errors, len(configs)) == (0, "", 1)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("train.lrr=1", "train.lrr is not a key of the configuration; accepted: train.lr"),
        ("+train.lrr=1", "train.lrr is not a key of the configuration; accepted: train.lr"),
        ("++zzz=1", "zzz is not a key of the configuration; accepted: name, output_dir, "),
        ("guidance.cfg_scal=1", "guidance.cfg_scal is not a key of the configuration; accepted: guidance.cfg_scale"),
        ("~train.lrr", "Could not delete from config. 'train.lrr' does not exist."),
        ("model='vit'", "model=vit is not a choice; accepted: dit, lightningdit, lightningdit_tread, tread"),
        ("model=", "model= is not a choice; accepted: dit, lightningdit, lightningdit_tread, tread"),
        (
            "experiment=table2/dit_b2_treat",
            "experiment=table2/dit_b2_treat is not a row of the paper's tables; nearest: table2/dit_b2_tread, ",
        ),
        ("experiment=tables/dit_b2", "experiment=tables/dit_b2 is not a row of the paper's tables; nearest: table2/dit_b2, "),
        ("experiment=xl2", "experiment=xl2 is not a row of the paper's tables; nearest: table2/dit_xl2, "),
        ("train.lr", "'train.lr' is not of the form key=value; give train.lr=<value>"),
        ("tread", "'tread' is not of the form key=value; give model=tread"),
        ("train.betas=[0.9", "'train.betas=[0.9' cannot be read: a bracket is not closed"),
        (
            "init_from=a=b",
            "'init_from=a=b' cannot be read; quote text with special characters, and the whole for the shell: \"init",
        ),
        (
            "name=run#1",
            "'name=run#1' cannot be read; quote text with special characters, and the whole for the shell: \"name='run",
        ),
        ("model=1", "model=1 is not a choice; accepted: dit, lightningdit, lightningdit_tread, tread ["),
        ("data=true", "data=true is not a choice; accepted: custom, digits, imagenet256, imagenet512"),
        ("model=Tread", "model=Tread is not a choice; accepted: dit, lightningdit, lightningdit_tread, tread"),
        ("model==tread", "model==tread has two equals signs; write model=tread"),
        ("-model=tread", "-model=tread: settings are given without dashes: model=tread"),
        ("--model=tread", "--model=tread: settings are given without dashes: model=tread"),
        ("--lr=1e-3", "--lr=1e-3: settings are given without dashes: train.lr=1e-3"),
        ("--resume", "--resume: settings are given without dashes: resume=<value>"),
        (
            "data.path=~/latents",
            "data.path=~/latents: the shell does not expand ~ after an equals sign; write data.path=$HOME/lat",
        ),
        ("train.lr=1e-4,", "'train.lr=1e-4,' ends with a comma; write train.lr=1e-4 ["),
        (
            "train.betas=(0.9,0.95)",
            "'train.betas=(0.9,0.95)' cannot be read; a list has square brackets: 'train.betas=[0.9,0.95]'",
        ),
        ("train.betas=0.9,0.95", "train.betas=0.9,0.95 has a comma: a list is 'train.betas=[0.9,0.95]', text is "),
        ("model=dit,tread", "model=dit,tread names several choices; give one of them, or add -m"),
        ("model.routes.selection_ratio=0.3", "model.routes.selection_ratio is not a key: model.routes is a list of routes, each"),
        (
            "train.num_steps=1e5",
            "train.num_steps=100000.0 is not accepted; use a whole number of at least 1; write train.num_steps=10",
        ),
        ("data.path=", "data.path= has no value; it accepts text, or null"),
        ("resume=true", "resume=True is not accepted; use auto | never | the folder of a checkpoint or of a run"),
        ("wandb=online", "wandb='online' is not accepted; set its keys: wandb.mode, wandb.project"),
        (
            "model.routes=[selection_ratio:0.5]",
            "model.routes=['selection_ratio:0.5'] is not accepted; use a list of routes, each with",
        ),
        ("cfg_scale=1.5", "cfg_scale is not a key of the configuration; accepted: guidance.cfg_scale ["),
        ("lr=1e-3", "lr is not a key of the configuration; accepted: train.lr ["),
        ("backbone=DiT-S/2", "backbone is not a key of the configuration; accepted: model.backbone ["),
        (
            "batch_size=8",
            "batch_size is not a key of the configuration; accepted: train.batch_size, sample.batch_size, eval.batch_size [",
        ),
        ("epochs=4", "epochs is not a key of the configuration; accepted: name, output_dir, experiment, seed, resume, init_from"),
    ],
)
def test_an_argument_that_cannot_be_right_is_refused_by_name(command, argument, message):
    code, _, errors, configs = command("seed=1", argument)
    assert (code, configs) == (1, []) and errors.startswith(f"error: {message}") and errors.count("\n") == 1


def test_a_key_or_a_group_of_another_command_is_refused(command):
    for argument, key in (("model=dit", "model"), ("train.lr=1", "train")):
        code, _, errors, configs = command(argument, settings=SampleConfig)
        assert (code, configs) == (1, []) and errors.startswith(f"error: {key} is not a key of the configuration")
    code, _, _, configs = command("guidance=sparse", "guidance.w=[1,2]", "num_samples=10", settings=FidConfig)
    assert code == 0 and len(configs[0].guidance) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=vit"], "model=vit is not a choice; accepted: dit, lightningdit, lightningdit_tread, tread"),
        (["diffusion=sit", "diffusion.P_mean=1"], "diffusion.P_mean is not a key of this diffusion; it belongs to diffusion=edm"),
        (["train={lrr: 1}"], "train.lrr is not a key of the configuration; accepted: train.lr"),
        (["+train.lr=1"], "Could not append to config. An item is already at 'train.lr'. Either remove + prefix: 'train.lr=1'"),
        (["model.routes.7.selection_ratio=0.1"], "Error merging override model.routes.7.selection_ratio=0.1 list index out of"),
        (["seed=1,2"], "seed=1,2 has a comma: a list is 'seed=[1,2]', text is \"seed='1,2'\", and -m runs once for each value"),
        (["--model", "tread"], "--model: settings are given without dashes: model=tread"),
        (["model=dit", "model=tread"], "model=dit and model=tread are two values for one group; give one of them"),
        (["data.path=my", "old", "latents"], "'old' is not of the form key=value; if it belongs to 'data.path=my', quote both: "),
        (
            ["eval.cfg_scales=[1.0,", "1.5]"],
            "the shell broke eval.cfg_scales= at its spaces; quote the list: 'eval.cfg_scales=[1",
        ),
        (
            ["model.routes=[{selection_ratio:0.5,", "start_layer_idx:2,", "end_layer_idx:-4}]"],
            "the shell broke model.routes= at its spaces; quote the list: 'model.routes=[{selection_ratio:0.5, start_layer",
        ),
        (["wandb.mode=a,", "b"], "'wandb.mode=a,' ends with a comma; a list is quoted and has brackets: 'wandb.mode=[a, b]'"),
        (["hydra/launcher=nope"], "hydra/launcher=nope is not a choice; accepted: basic, "),
        (
            ["hydra.zzz=1"],
            "Could not override 'hydra.zzz'. To append to your config use +hydra.zzz=1 Key 'zzz' not in 'HydraConf' [",
        ),
        (["-cd", ".", "model=vit"], "model=vit is not a choice; accepted: dit, lightningdit, lightningdit_tread, tread"),
        (["-cn", "nope"], "Cannot find primary config 'nope'."),
        (["~guidance"], "guidance is missing: it was removed"),
        (["~model"], "name: Interpolation key 'model.name' not found"),
        (["data.path='${nope}'"], "data.path: Interpolation key 'nope' not found"),
    ],
)
def test_a_wrong_command_line_ends_with_one_line_and_writes_nothing(command, tmp_path, arguments, message):
    code, output, errors, configs = command(*arguments)
    assert (code, output, configs) == (1, "", []) and list(tmp_path.iterdir()) == []
    assert errors.startswith(f"error: {message}") and errors.endswith(" [HYDRA_FULL_ERROR=1 shows where]\n")
    assert errors.count("\n") == 1


def test_a_sweep_over_a_choice_that_does_not_exist_runs_nothing(command):
    code, _, errors, configs = command("-m", "experiment=table2/dit_b2,table2/dit_b2_treat")
    assert (code, configs) == (1, []) and "error: experiment=table2/dit_b2_treat is not a row" in errors


def test_a_row_that_resembles_none_is_answered_with_all(command):
    _, _, errors, _ = command("experiment=nothing_like_it")
    assert "final/xl2_dit, " in errors and "digits/table2/dit_xs2, " in errors and "base/" not in errors


def test_other_commands_explain_their_arguments_as_well(command, tmp_path):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    for settings, arguments, message in (
        (
            FidConfig,
            ["cfg_scale=[1.0,", "1.5]"],
            "the shell broke cfg_scale= at its spaces; quote the list: 'cfg_scale=[1.0, 1.5]'",
        ),
        (FidConfig, ["detector=digits"], "detector is not a key of the configuration; accepted: evaluation.detector"),
        (FidConfig, ["guidance=cfg", "guidance=none"], "guidance=cfg and guidance=none are two values for one group"),
        (
            SampleConfig,
            ["seeds=0-3,", "7"],
            "'seeds=0-3,' ends with a comma; a list is quoted and has brackets: 'seeds=[0-3, 7]'",
        ),
        (SampleConfig, ["runs/x"], "'runs/x' is not of the form key=value; give checkpoint=runs/x"),
        (SampleConfig, ["checkpoint="], "checkpoint= has no value; it accepts the folder of a checkpoint or of a run"),
    ):
        code, _, errors, _ = command(*arguments, settings=settings)
        assert code == 1 and errors.startswith(f"error: {message}") and errors.count("\n") == 1


def test_what_a_message_tells_to_type_is_accepted(command):
    for typed in (
        "eval.cfg_scales=[1.0, 1.5]",
        "data.path=my old latents",
        "init_from='a=b'",
        "model.routes.0.selection_ratio=0.3",
    ):
        code, _, errors, _ = command(typed)
        assert (code, errors) == (0, "")
    code, output, _, _ = command("--help")  # lists all rows
    assert code == 0 and "dit_xl2_tread" in output


def test_a_group_may_be_given_the_same_value_twice_and_a_key_another_one(command):
    code, _, _, (cfg,) = command("model=dit", "model=dit", "train.lr=1", "train.lr=2")
    assert (code, cfg.model.name, cfg.train.lr) == (0, "dit", 2)


def test_arguments_of_commands_without_a_configuration_are_explained():
    def example(images: str, output: str = "x"):
        pass

    for arguments, message in (
        (
            ["images=my", "photos"],
            "photos is not a key or has no value; .* it belongs to 'images=my', quote both: 'images=my photos'",
        ),
        (["image=x"], r"image is not a key or has no value; it takes images=, \[output=\]; nearest: images="),
        (["images=~/x"], r"images=~/x: the shell does not expand ~ after an equals sign; write images=\$HOME/x"),
        (["images==x"], "images==x has two equals signs; write images=x"),
    ):
        with pytest.raises(UserError, match=message):
            cli.parse_arguments(arguments, cli.settings_of(example))


def test_help_prints_the_keys_of_a_command_without_a_configuration(capsys):
    def example(output: str, seed: int = 0):
        pass

    with pytest.raises(SystemExit) as end:
        cli.parse_arguments(["--help"], cli.settings_of(example), command="digits")
    assert end.value.code == 0 and capsys.readouterr().out.endswith("digits: it takes output=, [seed=]\n")


def test_a_guidance_of_fid_that_is_not_chosen_says_which_choices_have_the_key(command):
    code, _, errors, _ = command("guidance.w=1", settings=FidConfig)
    assert code == 1 and "guidance.w is not a key of this guidance; it belongs to guidance=sparse and guidance=auto" in errors


def test_errors_of_our_own_code_keep_their_traceback(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.delenv(cli.FULL_ERRORS, raising=False)

    def main(cfg):
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        cli.run(main, "config", TrainConfig)


def test_ctrl_c_ends_a_command_with_one_line(monkeypatch, tmp_path, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["sample.py", "checkpoint=x"])
    monkeypatch.delenv(cli.FULL_ERRORS, raising=False)

    def main(cfg):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        cli.run(main, "sample", SampleConfig)
    assert end.value.code == 130 and caplog.messages == ["stopped; the same command goes on where it was"]


@pytest.mark.parametrize("command", ["train", "sample", "fid", "prepare_latents", "prepare_checkpoint"])
def test_ctrl_c_during_the_imports_ends_without_a_traceback(tmp_path, command):
    (tmp_path / "torch.py").write_text("import time; print('importing', flush=True); time.sleep(60)")
    (tmp_path / "accelerate.py").write_text("import torch")
    run = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"
    process = start("-c", run, str(tmp_path), f"{command}.py")
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert finish(process) == (-signal.SIGINT, "")


def test_ctrl_c_ends_a_command_without_a_configuration_with_one_line(monkeypatch, caplog):
    def action():
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(SystemExit) as end:
        cli.guard(action)
    assert end.value.code == 130 and caplog.messages == ["stopped; the same command goes on where it was"]


def test_processes_wait_longer_for_each_other_than_nccls_ten_minutes():
    forget_accelerate()
    assert machine.start_accelerator(1, cpu=True).init_handler.timeout == timedelta(hours=2)
    forget_accelerate()
    assert machine.start_accelerator(1, cpu=True, patience=timedelta(days=7)).init_handler.timeout == timedelta(days=7)


def test_a_gpu_that_torch_cannot_use_or_that_two_processes_would_share_is_an_error(monkeypatch, tmp_path):
    device = tmp_path / "nvidiactl"
    monkeypatch.setattr(machine, "NVIDIA_DEVICE", device)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine.check_gpus()  # no GPU
    device.touch()
    with pytest.raises(UserError, match="has an NVIDIA GPU, but torch .* driver is older than CUDA 13.2 .*USE_CPU=true"):
        forget_accelerate()
        machine.start_accelerator(1)
    forget_accelerate()
    assert machine.start_accelerator(1, cpu=True).device.type == "cpu"
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("ACCELERATE_USE_CPU", "true")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            machine.check_gpus()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    machine.check_gpus()
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="process 2 of this node sees 2 GPUs, and needs one of its own: lower --num_processes"):
        machine.check_gpus()


def test_an_experiment_takes_other_settings_on_top(command):
    code, _, _, (cfg,) = command("experiment=table2/dit_b2_tread", "seed=3", "train.lr=2e-4", "diffusion=sit")
    assert (code, cfg.name, cfg.train.lr, cfg.diffusion.name) == (0, "table2_dit_b2_tread_seed3", 2e-4, "sit")
    assert command("experiment=table2/dit_b2_tread", "name=mine")[3][0].name == "mine"


def test_experiments_can_be_swept(command, tmp_path):
    rows = ("digits/table2/dit_xs2", "digits/table2/dit_xs2_tread")
    code, _, _, configs = command("-m", f"experiment={','.join(rows)}", "seed=0,1", "hydra.sweep.dir=sweep")
    assert code == 0 and [(cfg.experiment.name, cfg.seed) for cfg in configs] == [(row, seed) for row in rows for seed in (0, 1)]
    assert [cfg.name for cfg in configs[2:]] == [f"digits_table2_dit_xs2_tread_seed{seed}" for seed in (0, 1)]


def test_the_configuration_and_the_choices_are_printed_on_request(command):
    code, output, _, configs = command("--cfg", "job", "experiment=final/xl2_tread_finetune_220")
    assert code == 0 and configs == []
    assert "name: final_xl2_tread_finetune_220_seed${seed}\n" in output
    assert "init_from: ${output_dir}/final_xl2_tread_160_seed${seed}\n" in output
    code, output, _, _ = command("--help")
    assert code == 0 and "model: dit, lightningdit, lightningdit_tread, tread\n" in output
    assert "experiment/table2: dit_b2, dit_b2_tread, " in output and "__pycache__" not in output


def test_shipped_folders_are_the_groups_of_the_configuration():
    groups = {path.name for path in (REPOSITORY / "configs").iterdir() if path.is_dir()} - {"hydra", "__pycache__"}
    assert groups == {"alignment", "data", "diffusion", "guidance", "model"}
