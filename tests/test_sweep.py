"""Sweeps: every combination is a run of its own, a failure ends nothing, and what is finished is not done again."""

import importlib.util
import json
import sys

import pytest
from conftest import REPOSITORY, TINY, composed, finish, forget_accelerate, start
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from configs.schema import TrainConfig, check, role_of
from configs.settings import keys_of
from extras.report import sweep
from extras.report.sweep import NOT_IN_NAMES, is_finished, main, parse_sweep_arguments, run_name
from training.run import RunFolder

LAUNCH = "--launch=--num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
SHORT = [*TINY, "train.num_steps=2"]


@pytest.fixture
def run_sweep(tmp_path, monkeypatch, capsys):
    """run_sweep(*arguments) -> (exit code, {run: status}, launched commands); launching runs train.py in this process."""
    import train as script

    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", ["reports/sweep.py"])
    launched = []

    def launch(name, overrides, options, log_file):
        launched.append((name, *overrides))
        log_file.write_text("starting\n")
        if name != "train.py":
            return 0
        forget_accelerate()
        outer = GlobalHydra.instance().hydra  # of the sweep: in a process of its own, train.py has none
        GlobalHydra.instance().clear()
        cfg = composed(overrides)
        GlobalHydra.instance().hydra = outer
        try:
            script.main(cfg)
        except ValueError as e:
            log_file.write_text(f"error: {e}\n")
            return 1
        return 0

    monkeypatch.setattr(sweep, "launch", launch)

    def run(*arguments):
        launched.clear()
        code = main([*SHORT, f"output_dir={tmp_path}", *arguments])
        folder = max((tmp_path / "sweeps").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        outcomes = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
        return code, {tuple(o["overrides"][-2:]): (o["status"], o["reason"], o["name"]) for o in outcomes}, list(launched)

    return run


def test_a_failed_job_does_not_end_the_sweep_and_a_rerun_skips_what_is_finished(run_sweep, tmp_path, capsys):
    jobs = ["model=dit,tread", "data.path=latents/digits.safetensors,nowhere"]
    code, outcomes, launched = run_sweep(*jobs)
    assert code == 1 and len(launched) == 4
    statuses = {key: value[0] for key, value in outcomes.items()}
    good, bad = "data.path=latents/digits.safetensors", "data.path=nowhere"
    assert statuses == {(f"model={m}", d): s for m in ("dit", "tread") for d, s in ((good, "finished"), (bad, "failed"))}
    assert "nowhere" in outcomes["model=dit", bad][1]
    names = [value[2] for value in outcomes.values()]
    assert len(set(names)) == 4 and {p.name for p in tmp_path.iterdir()} >= {outcomes["model=tread", good][2], "sweeps"}
    assert "2 finished, 2 failed; logs in" in capsys.readouterr().out

    code, outcomes, launched = run_sweep(*jobs)
    assert [value[0] for value in outcomes.values()] == ["skipped", "failed"] * 2 and len(launched) == 2


def test_seeds_can_be_added_and_a_run_that_was_cut_off_goes_on(run_sweep, tmp_path):
    _, outcomes, _ = run_sweep("model=dit", "seed=0")
    run = tmp_path / outcomes["model=dit", "seed=0"][2]
    (run / "checkpoints" / "step_0000002").rename(run / "checkpoints" / "bad_step_0000002")
    code, outcomes, launched = run_sweep("model=dit", "seed=0,1")
    assert code == 0 and [value[0] for value in outcomes.values()] == ["finished", "finished"] and len(launched) == 2
    code, outcomes, launched = run_sweep("model=dit", "seed=0,1,2")
    assert [value[0] for value in outcomes.values()] == ["skipped", "skipped", "finished"] and len(launched) == 1


def test_a_run_without_its_last_evaluation_is_not_finished(run_sweep, tmp_path):
    settings = ["eval.every=2", "eval.num_samples=70", "eval.num_steps=2", "eval.batch_size=70", "model=dit", "seed=0"]
    _, outcomes, _ = run_sweep(*settings)
    run = tmp_path / outcomes["model=dit", "seed=0"][2]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    _, outcomes, launched = run_sweep(*settings)
    assert outcomes["model=dit", "seed=0"][0] == "finished" and len(launched) == 1
    _, outcomes, launched = run_sweep(*settings)
    assert outcomes["model=dit", "seed=0"][0] == "skipped" and launched == []


def test_finished_runs_are_judged_when_asked_for(run_sweep, tmp_path):
    judged = "--fid=guidance=cfg cfg_scale=[1.0,1.5]"
    _, outcomes, launched = run_sweep("model=dit", "seed=0", judged)
    run = tmp_path / outcomes["model=dit", "seed=0"][2]
    assert launched[1] == ("fid.py", f"checkpoint={run}", "guidance=cfg", "cfg_scale=[1.0,1.5]")
    _, outcomes, launched = run_sweep("model=dit", "seed=0", judged)
    assert outcomes["model=dit", "seed=0"][0] == "skipped" and [command[0] for command in launched] == ["fid.py"]


def test_another_run_under_the_same_name_is_left_alone(run_sweep, tmp_path):
    _, outcomes, _ = run_sweep("model=dit", "seed=0")
    run = tmp_path / outcomes["model=dit", "seed=0"][2]
    config = run / "checkpoints" / "step_0000002" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 5"))
    code, outcomes, launched = run_sweep("model=dit", "seed=0")
    status, reason, _ = outcomes["model=dit", "seed=0"]
    assert code == 1 and status == "failed" and "is another run: seed: 5 -> 0" in reason and launched == []


def finished_run(tmp_path, overrides, **stored):
    """(configuration, run): its last checkpoint holds the configuration, what the data filled in, and `stored`."""
    cfg = check(composed([*SHORT, *overrides, f"output_dir={tmp_path}"]), TrainConfig)
    run = RunFolder(tmp_path, cfg.name)
    folder = run.checkpoints / "step_0000002"
    folder.mkdir(parents=True)
    config = OmegaConf.create(cfg.model_dump())
    for key, value in ({"data.scale_factor": 0.66, "data.kind": "sample", "data.autoencoder": "identity"} | stored).items():
        OmegaConf.update(config, key, value)
    OmegaConf.save(config, folder / "config.yaml")
    return cfg, run


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["diffusion=sit"], "diffusion.timestep", "logit_normal"),
        (["diffusion=sit"], "diffusion.logit_mean", 0.5),
        (["diffusion=sit"], "diffusion.logit_std", 0.5),
        (["diffusion=edm"], "diffusion.P_mean", 0.5),
        ([], "model.init", "official_tread"),
        ([], "model.selection", "importance"),
        ([], "train.ema_decay", 0.5),
        ([], "data.num_classes", 11),
    ],
)
def test_every_key_that_makes_another_run_or_other_figures_is_compared(tmp_path, overrides, key, value):
    cfg, run = finished_run(tmp_path, overrides, **{key: value})
    with pytest.raises(ValueError, match=f"is another run: {key}: "):
        is_finished(cfg, run)


def test_a_run_of_an_earlier_version_that_was_logged_otherwise_is_finished(tmp_path):
    cfg, run = finished_run(tmp_path, [], **{"train.log_every": 7, "train.compile": "blocks"})
    config = run.checkpoints / "step_0000002" / "config.yaml"
    stored = OmegaConf.load(config)
    del stored.init_state, stored.init_from  # an earlier version did not know these keys
    stored.model.pop("selection", None)
    OmegaConf.save(stored, config)
    assert is_finished(cfg, run)


def test_only_keys_without_a_role_are_left_out_of_names():
    assert set(NOT_IN_NAMES) <= set(keys_of(TrainConfig)) and not any(role_of(key) for key in NOT_IN_NAMES)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["model=tread", "seed=1"], "digits_tread_seed-1"),
        (["seed=1", "model=tread", "output_dir=x", "train.cpu_threads=1"], "digits_tread_seed-1"),
        (["experiment=table2/dit_b2", "seed=0"], "table2_dit_b2_seed-0"),
        (["name=mine", "train.lr=1e-3"], "mine_lr-1e-3"),
        (["+experiment=a", "guidance=none"], "a_guidance-none"),
    ],
)
def test_a_name_says_what_the_overrides_set(overrides, name):
    assert run_name(overrides, "digits_tread") == name


def test_different_overrides_have_different_names():
    sets = [["eval.num_steps=2"], ["train.num_steps=2"], ["model.routes=[]"], ["data.path=a/b"], ["data.path=a/c"], ["seed=1"]]
    sets += [["train.betas=[0.9,0.99]"], ["train.betas=[0.9,0.95]"], [f"data.name={'a' * 200}"], [f"data.name={'a' * 200}b"]]
    names = {run_name(overrides, "x") for overrides in sets}
    assert len(names) == len(sets) - 2 + len({run_name(o, "x") for o in sets[-2:]})
    long = [[f"{key}=0.12345678901" for key in ("train.lr", "train.weight_decay", "train.ema_decay", "model.class_dropout", tail)]
            for tail in ("diffusion.P_mean", "diffusion.P_std")]  # fmt: skip
    a, b = (run_name(["experiment=" + "e" * 60, *one], "x") for one in long)
    assert a != b and max(len(a), len(b)) <= 120 and not set(a) & set("/\\ ")


def test_a_launcher_whose_package_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="hydra/launcher=slurm needs .*: pip install hydra-submitit-launcher"):
        parse_sweep_arguments(["seed=0,1", "hydra/launcher=slurm"])
    with pytest.raises(ValueError, match="pip install hydra-joblib-launcher"):
        parse_sweep_arguments(["hydra/launcher=parallel"])
    with pytest.raises(ValueError, match="'--launc' is not of the form key=value"):
        parse_sweep_arguments(["--launc"])
    with pytest.raises(ValueError, match="'--fit=x' is not of the form key=value; beside overrides there are --launch"):
        parse_sweep_arguments(["model=dit", "--fit=x"])


def test_the_slurm_configuration_is_submitits_with_what_a_training_needs():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    with initialize_config_dir(str(REPOSITORY / "configs"), version_base="1.3"):
        launcher = compose("config", overrides=["hydra/launcher=slurm"], return_hydra_config=True).hydra.launcher
    assert launcher._target_.endswith("SlurmLauncher") and launcher.tasks_per_node == 1 and launcher.max_num_timeout > 0
    assert any("TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in line for line in launcher.setup) and launcher.signal_delay_s > 110


def test_the_command_starts_accelerates_launcher_with_the_jobs_overrides(tmp_path):
    arguments = [*SHORT, "model=dit", "train.lr=1e-3,-1", f"output_dir={tmp_path}"]
    code, output = finish(start("-m", "extras.report.sweep", *arguments, LAUNCH))
    assert code == 1 and "1 finished, 1 failed" in output and "train.lr=-1 is not accepted" in output, output
    (run,) = (path for path in tmp_path.iterdir() if path.name != "sweeps")
    record = json.loads((run / "starts.jsonl").read_text())
    assert record["command"].startswith("accelerate launch --num_processes 1") and f"name={run.name}" in record["command"]
    assert record["step"] == 0 and record["num_processes"] == 1 and record["torch"] and record["device"]


def test_jobs_run_under_joblib(run_sweep):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    settings = ["hydra/launcher=parallel", "hydra.launcher.n_jobs=1", "model=dit", "seed=0,1"]  # 1 stays in this process
    code, outcomes, _ = run_sweep(*settings)
    assert code == 0 and [value[0] for value in outcomes.values()] == ["finished", "finished"]
    code, outcomes, launched = run_sweep(*settings)
    assert code == 0 and [value[0] for value in outcomes.values()] == ["skipped", "skipped"] and launched == []
