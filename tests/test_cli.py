"""Hydra's command line: what is refused, in one line that names the argument, and what is left to Hydra."""

import os
import sys

import pytest
from conftest import REPOSITORY

from setup import cli, schema
from setup.schema import FidConfig, SampleConfig, TrainConfig

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
        ("model='vit'", "model=vit is not a choice; accepted: dit, tread"),
        ("model=", "model= is not a choice; accepted: dit, tread"),
        ("experiment=table2/dit_b2_treat", "experiment=table2/dit_b2_treat is not a choice; accepted: table2/dit_b2_tread, "),
        ("experiment=tables/dit_b2", "experiment=tables/dit_b2 is not a choice; accepted: table2/dit_b2, "),
        ("train.lr", "'train.lr' is not of the form key=value"),
        ("train.betas=[0.9", "'train.betas=[0.9' cannot be read: "),
        ("init_from=a=b", "'init_from=a=b' cannot be read: mismatched input '=' expecting <EOF>; quote text"),
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
        (["model=vit"], "model=vit is not a choice; accepted: dit, tread"),
        (["diffusion=sit", "diffusion.P_mean=1"], "diffusion.P_mean is not a key of this diffusion; it belongs to diffusion=edm"),
        (["train={lrr: 1}"], "train.lrr is not a key of the configuration; accepted: train.lr"),
        (["+train.lr=1"], "Could not append to config. An item is already at 'train.lr'. Either remove + prefix: 'train.lr=1'"),
        (["model.routes.7.selection_ratio=0.1"], "Error merging override model.routes.7.selection_ratio=0.1 list index out of"),
        (["seed=1,2"], "Ambiguous value for argument 'seed=1,2' 1. To use it as a list"),
        (["hydra/launcher=nope"], "hydra/launcher=nope is not a choice; accepted: basic, "),
        (
            ["hydra.zzz=1"],
            "Could not override 'hydra.zzz'. To append to your config use +hydra.zzz=1 Key 'zzz' not in 'HydraConf' [",
        ),
        (["-cd", ".", "model=vit"], "model=vit is not a choice; accepted: dit, tread"),
        (["-cn", "nope"], "Cannot find primary config 'nope'."),
        (["~guidance"], "guidance is missing; it accepts keys and values"),
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
    assert (code, configs) == (1, []) and "error: experiment=table2/dit_b2_treat is not a choice" in errors


def test_a_row_that_resembles_none_is_answered_with_all(command):
    _, _, errors, _ = command("experiment=nothing_like_it")
    assert "final/xl2_dit, " in errors and "digits/table2/dit_xs2, " in errors and "base/" not in errors


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
    assert code == 0 and "model: dit, tread\n" in output
    assert "experiment/table2: dit_b2, dit_b2_tread, " in output and "__pycache__" not in output


def test_shipped_folders_are_the_groups_of_the_configuration():
    groups = {path.name for path in (REPOSITORY / "configs").iterdir() if path.is_dir()} - {"hydra", "__pycache__"}
    assert groups == {"data", "diffusion", "guidance", "model"}
