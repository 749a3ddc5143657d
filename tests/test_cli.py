"""Hydra's command line: what is refused, in one line that names the argument, and what is left to Hydra."""

import os
import sys

import pytest
from conftest import REPOSITORY

from errors import UserError
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
        ["train.lr=1e-4", "++train.lr=1e-4", "+train.lr=1e-4", "~train.lr", "train={lr: 1e-4}", "train.betas=[0.9,0.95]"],
        ["model.routes.0.selection_ratio=0.25", "+experiment.paper.fid=1"],
        ["model=dit", "model='dit'", 'model="dit"', "~model", "~model=tread", "+model@weak=dit", "model=[dit,tread]"],
        [
            "model=dit,tread",
            "model=choice(dit,tread)",
            "model=choice('dit',\"tread\")",
            "model=shuffle(dit,tread)",
            "model=glob(*)",
        ],
        ["seed=range(0,3)", "train.lr=interval(0,1)", "train.lr=1e-4,2e-4", "train.betas=[0.9,0.95],[0.9,0.99]"],
        ["experiment=table2/dit_b2_tread", "experiment=table2/dit_b2,selection_rate/50", "~experiment"],
        ["name='a=b'", "data.path='a, b'", "data.path=a b", "init_from=null", "data.path=", "name=${data.name}_mine"],
        ["hydra/launcher=parallel", "hydra/launcher=one_that_we_do_not_know", "hydra.verbose=true", "hydra.sweep.dir=x"],
        ["-m", "--multirun", "--help", "--hydra-help", "--resolve"],
        ["--cfg", "job", "seed=1"],
        ["-cn", "other", "--info", "searchpath", "seed=1"],
        ["-cd", "mine", "model=one_of_mine"],
        ["hydra.searchpath=[file://mine]", "model=one_of_mine"],
        ["--shell-completion", "install=bash"],
    ],
)
def test_keys_and_choices_that_exist_pass_and_what_only_hydra_knows_is_left_to_it(arguments):
    cli.check_overrides(arguments, TrainConfig)


ARGUMENTS = [
    ("train.lrr=1", "train.lrr is not a key of the configuration; accepted: train.lr"),
    ("+train.lrr=1", "train.lrr is not a key of the configuration; accepted: train.lr"),
    ("++zzz=1", "zzz is not a key of the configuration; accepted: name, output_dir, "),
    ("~zzz", "zzz is not a key of the configuration; accepted: "),
    ("~train.lrr", "train.lrr is not a key of the configuration; accepted: train.lr"),
    ("hydralisk=1", "hydralisk is not a key of the configuration; accepted: "),
    ("model/sub=x", "model/sub is not a key of the configuration; accepted: "),
    ("zzz@model=dit", "zzz is not a key of the configuration; accepted: "),
    ("guidance.cfg_scal=1", "guidance.cfg_scal is not a key of the configuration; accepted: guidance.cfg_scale"),
    ("model=vit", "model=vit is not a choice; accepted: dit, tread"),
    ("+model=vit", "model=vit is not a choice; accepted: dit, tread"),
    ("model@weak=vit", "model=vit is not a choice; accepted: dit, tread"),
    ("model='vit'", "model=vit is not a choice; accepted: dit, tread"),
    ("model=dit,vit", "model=vit is not a choice; accepted: dit, tread"),
    ("model=choice(dit,'vit')", "model=vit is not a choice; accepted: dit, tread"),
    ("model=1", "model=1 is not a choice; accepted: dit, tread"),
    ("model=null", "model=null is not a choice; accepted: dit, tread"),
    ("model=", "model= is not a choice; accepted: dit, tread"),
    ("experiment=table2/dit_b2_treat", "experiment=table2/dit_b2_treat is not a choice; accepted: table2/dit_b2_tread, "),
    ("experiment=table2/dit_b2,final/xl2_dite", "experiment=final/xl2_dite is not a choice; accepted: final/xl2_dit, "),
    ("train.lr", "'train.lr' is not of the form key=value"),
    ("=3", "'=3' is not of the form key=value"),
    ("train.betas=[0.9", "'train.betas=[0.9' cannot be read: "),
    (
        "init_from=a=b",
        "'init_from=a=b' cannot be read: mismatched input '=' expecting <EOF>; text with special characters needs quotes",
    ),
    ("--train.lr=1", "unrecognized arguments: --train.lr=1; settings are key=value without dashes"),
    ("--cfg=jobs", "argument --cfg/-c: invalid choice: 'jobs'"),
]


@pytest.mark.parametrize(("argument", "message"), ARGUMENTS)
def test_an_argument_that_cannot_be_right_is_refused_by_name(argument, message):
    with pytest.raises(UserError) as error:
        cli.check_overrides(["seed=1", argument], TrainConfig)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_a_key_or_a_group_of_another_command_is_refused():
    for argument in ("model=dit", "experiment=table2/dit_b2", "train.lr=1"):
        with pytest.raises(UserError, match=f"^{argument.partition('=')[0]} is not a key of the configuration"):
            cli.check_overrides([argument], SampleConfig)
    cli.check_overrides(["guidance=sparse", "guidance.w=[1,2]", "num_samples=10"], FidConfig)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=vit"], "model=vit is not a choice; accepted: dit, tread"),
        (["train.lr=[1"], "'train.lr=[1' cannot be read: "),
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
        (
            ["seed=1", "-m", "model=dit"],
            "unrecognized arguments: model=dit; settings are key=value without dashes, and flags stand",
        ),
        (["-m", "seed=1", "experiment=table2/dit_b2,table2/dit_b2_treat"], "experiment=table2/dit_b2_treat is not a choice"),
    ],
)
def test_a_wrong_command_line_ends_with_one_line_and_writes_nothing(command, tmp_path, arguments, message):
    code, output, errors, configs = command(*arguments)
    assert (code, output, configs) == (1, "", []) and list(tmp_path.iterdir()) == []
    assert errors.startswith(f"error: {message}") and errors.endswith(" [HYDRA_FULL_ERROR=1 shows where]\n")
    assert errors.count("\n") == 1


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
