"""The runs in equal time at each network's best guidance: what runs, what is recorded, and the outcomes."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import FASTER_FASHION, forget_accelerate, wait_for
from scipy.stats import ttest_1samp

from cli.arguments import run_command
from common.errors import UserError
from evidence import guided, runs
from evidence.__main__ import COMMANDS
from evidence.contrasts import NAMES, Contrast
from evidence.guided import (
    ARMS,
    CHOOSING,
    COMPARING,
    GUIDANCES,
    Arm,
    complete_lines,
    plan_choosing,
    plan_comparing,
    show_guided,
)
from evidence.runs import Recorder


def test_the_arms_take_equal_times_and_keep_the_planned_checkpoints():
    time = {"dense": 1, "routed": 0.7089, "dense-46": 0.7065}  # the rule's measurement
    for arm, plan in ARMS.items():
        assert plan.num_steps * time[arm] == pytest.approx(8600, rel=0.002)
        assert plan.step("half") * 2 == plan.step("full") == plan.num_steps and plan.step("half") == 5 * plan.step("early")
    assert CHOOSING[0] + CHOOSING[1] <= COMPARING[0]  # no sample is used twice


@pytest.mark.parametrize(("deviation", "ratio"), [(0.11, 1.14), (0.17, 1.22)])
def test_the_power_of_the_rule_is_that_of_eight_seeds(deviation, ratio):
    differences = np.array([-1, 1] * 4) * deviation / np.std([-1, 1] * 4, ddof=1)
    text = Contrast.of([(1, differences.tolist())]).text(lambda x: f"{math.exp(x):.2f}")
    assert f"; 80%: {ratio:.2f})" in text


@pytest.fixture
def prepared(fashion_folder, monkeypatch):
    """Fixture: the working folder, runs of 10 and 20 steps, and two noise levels."""
    small = {"dense": (10, ("cfg",), [10]), "routed": (20, tuple(GUIDANCES), [10]), "dense-46": (20, ("cfg",), [])}
    arms = {name: Arm(ARMS[name].experiment, steps, guidances, seeds=seeds) for name, (steps, guidances, seeds) in small.items()}
    monkeypatch.setattr(guided, "ARMS", arms)
    scales = {name: (key, values[: 1 + (name == "cfg")], settings) for name, (key, values, settings) in GUIDANCES.items()}
    monkeypatch.setattr(guided, "GUIDANCES", scales)
    monkeypatch.setattr(guided, "CHOOSING", (0, 20))
    monkeypatch.setattr(guided, "COMPARING", (50, 20))
    monkeypatch.setattr(guided, "NUM_LEVELS", 2)
    return fashion_folder


def test_all_evaluations_are_recorded_once_with_their_weights_and_versions(prepared, monkeypatch, capsys):
    commands = []

    def run_here(given, jobs, folder, ended):
        for name, arguments in given.items():
            commands.append(name)
            forget_accelerate()
            run_command(COMMANDS, "", arguments)
            ended(name)

    monkeypatch.setattr(guided, "run_all", run_here)
    output = prepared / "results.jsonl"
    settings = dict(
        seeds=[10], overrides=FASTER_FASHION, fid_overrides=["sampling.batch_size=7"], runs="runs/guided", output=str(output)
    )
    settings["commit"] = "abc"
    guided.guided(**settings)
    assert commands == ["dense_seed10", "routed_seed10"] * 2  # choose the scales, then compare
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    evaluations = [line for line in lines if "guidance" in line]
    found = {(line["arm"], line["step"], line["guidance"], line["scale"]) for line in evaluations if line["first_seed"] == 0}
    num_scales = {"dense": 2, "routed": 2 + 1 + 1 + 1}
    assert len(found) == 2 * sum(num_scales.values()) and ("routed", 10, "sparse, early", 1.25) in found
    compared = [line for line in evaluations if line["first_seed"] == 50]
    assert len(compared) == 2 * (2 + 5) and {line["num_samples"] for line in compared} == {20}
    assert {line["guidance"] for line in compared} == {"none", *GUIDANCES}
    for line in evaluations:
        assert all(line[key] for key in ("ema", "content", "device", "torch", "standard_errors")) and "commit" in line
        assert {*NAMES} <= line["metrics"].keys() and line["settings"]["num_steps"] == 2
    moving = next(line for line in evaluations if line["guidance"] == "sparse, early")
    assert moving["settings"]["guidance.r_strong_last"] == 0.6 and moving["settings"]["guidance.r_weak_last"] == 0.0
    times = [line for line in lines if line.get("steps_per_sec")]
    assert [(line["arm"], line["step"], line["starts"][0]["step"]) for line in times] == [("dense", 10, 0), ("routed", 20, 0)]
    losses = [(line["arm"], line["step"]) for line in lines if "validation_loss" in line["metrics"]]
    assert losses == [("dense", 5), ("dense", 10), ("routed", 10), ("routed", 20)]
    show_guided(lines)
    assert "| routed | full | none | 1 | 1 |" in capsys.readouterr().out

    # Nothing runs again, even without the runs. What is missing is evaluated from the same run.
    shutil.move("runs/guided", "runs/elsewhere")
    guided.guided(**settings)
    assert len(commands) == 4
    shutil.move("runs/elsewhere", "runs/guided")
    kept = [line for line in lines if line != compared[-1]]
    output.write_text("".join(json.dumps(line) + "\n" for line in kept))
    guided.guided(**settings)
    assert commands[4:] == ["routed_seed10"]
    again = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(again) == len(lines) and again[-1]["metrics"] == compared[-1]["metrics"]

    # Results of other weights are never mixed with those of the file.
    output.write_text(json.dumps(lines[0] | {"ema": "other"}) + "\n")
    with pytest.raises(UserError, match=f"other weights for {lines[0]['arm']}, seed 10, step {lines[0]['step']}"):
        Recorder(prepared / "runs" / "guided", output).record(f"{lines[0]['arm']}_seed10")


def test_seeds_of_another_machine_help_to_choose_the_scales_and_do_not_run_here(prepared, monkeypatch):
    def line(seed, scale, distance):
        own = {"arm": "dense", "seed": seed, "step": 10, "guidance": "cfg", "scale": scale, "first_seed": 0, "num_samples": 20}
        return own | {"metrics": dict.fromkeys(NAMES, distance)}

    monkeypatch.setattr(guided, "ARMS", {"dense": Arm("fashion_dit_xs4", 10, ("cfg",), seeds=[10, 11])})
    monkeypatch.setattr(guided, "PRIMARY", ("dense",))
    monkeypatch.setattr(guided, "TIMES", ("full",))
    lines = [line(10, 1.5, 20.0), line(10, 2.0, 21.0), line(11, 1.5, 40.0), line(11, 2.0, 20.0)]
    (prepared / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def compared(**settings):
        given = {}
        monkeypatch.setattr(guided, "run_all", lambda commands, *_: given.update(commands))
        with pytest.raises(UserError, match="1 runs are not complete"):
            guided.guided(seeds=[10], output="results.jsonl", **settings)
        assert [*given] == ["dense_seed10"]
        return given["dense_seed10"][2]

    assert "guidance.cfg_scale=[1.5]" in compared() and "guidance.cfg_scale=[2.0]" in compared(elsewhere=[11])
    with pytest.raises(UserError, match=r"seeds=\[99\] are not in the rule"):
        guided.guided(seeds=[10], output="results.jsonl", elsewhere=[99])


def test_a_failed_secondary_run_does_not_stop_the_primary_comparisons(prepared, monkeypatch):
    monkeypatch.setitem(guided.ARMS, "dense-46", Arm("fashion_dit_xs4", 20, ("cfg",), seeds=[10]))
    ran = []

    def run_but_one(given, *_):
        arms = [name.removesuffix("_seed10") for name in given]
        ran.extend(arms)
        done.extend(line for arm in arms if arm != "dense-46" for line in evaluations_of(arm, 10))

    def evaluations_of(arm, seed):
        for planned in (plan_choosing([], arm), plan_comparing(done, arm)):
            for time, guidance, scale, (first_seed, num_samples) in planned:
                line = {"arm": arm, "seed": seed, "step": guided.ARMS[arm].step(time), "guidance": guidance, "scale": scale}
                yield line | {"first_seed": first_seed, "num_samples": num_samples, "metrics": dict.fromkeys(NAMES, 1.0)}

    done = []
    monkeypatch.setattr(guided, "run_all", run_but_one)
    monkeypatch.setattr(Recorder, "lines", lambda self, seeds: [*done])
    with pytest.raises(UserError, match=r"1 runs are not complete .*dense-46_seed10.log.*If a loss diverged, leave its seed out"):
        guided.guided(seeds=[10], runs="runs/guided", output="results.jsonl")
    assert ran == ["dense", "routed"] * 2 + ["dense-46"]


def test_a_failed_run_is_named_with_its_log(prepared, monkeypatch):
    monkeypatch.setattr(guided, "command", lambda *_: ["nonsense"])
    with pytest.raises(UserError, match="2 runs are not complete .*dense_seed10.log.*routed_seed10.log.*resumes"):
        guided.guided(seeds=[10], jobs=2, runs="runs/guided", output="results.jsonl")
    with pytest.raises(UserError, match=r"seeds=\[3\] are not in the rule, which has 10 to 17"):
        guided.guided(seeds=[3, 10])
    assert "unknown command 'nonsense'" in (prepared / "runs" / "guided" / "dense_seed10.log").read_text()


def test_a_signal_stops_the_running_runs_and_starts_no_other(tmp_path, monkeypatch):
    started = []

    def start(arguments, output):
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[-1]

    def stop():
        wait_for(lambda: started)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(runs, "start", start)
    threading.Thread(target=stop).start()
    with pytest.raises(KeyboardInterrupt):
        runs.run_all({"dense_seed10": [], "dense_seed11": []}, 1, tmp_path, Recorder(tmp_path, tmp_path / "results.jsonl").record)
    assert [process.wait(5) for process in started] == [-signal.SIGTERM]


def test_scales_are_chosen_on_other_samples_and_outcomes_are_paired_by_seed(capsys):
    lines, seeds = [], (10, 11, 12)
    noise = {seed: [0.0, 0.1, 0.3][seed - 10] for seed in seeds}  # shared by the arms of a seed

    def add(arm, time, guidance, scale, samples, logs):
        about = {"arm": arm, "step": ARMS[arm].step(time), "guidance": guidance, "scale": scale}
        about |= {"first_seed": samples[0], "num_samples": samples[1]}
        for seed, value in zip(seeds, logs):
            lines.append(about | {"seed": seed, "metrics": dict.fromkeys(NAMES, math.exp(value + noise[seed]))})

    lowest = {"cfg": (2.0, 0.5), "autoguidance": (3.0, 0.6), "sparse": (1.5, 0.4), "sparse, early": (1.25, 0.3)}
    full, half = (0.20, 0.21, 0.24), (0.0, 0.02, 0.01)  # routed - dense, each at its best guidance
    for arm in ("dense", "routed", "dense-46"):
        for time, name, scale, samples in plan_choosing([], arm):
            add(arm, time, name, scale, samples, [lowest[name][1] + (scale - lowest[name][0]) ** 2] * 3)
        for time in ("half", "full"):
            add(arm, time, "none", 1.0, COMPARING, [2.0] * 3)
            for name in ARMS[arm].guidances:
                own = {"half": half, "full": full}[time] if (arm, name) == ("routed", "sparse, early") else (0, 0, 0)
                add(arm, time, name, lowest[name][0], COMPARING, own)
                add(arm, time, name, 99.0, COMPARING, [-5.0] * 3)  # a scale that was not chosen
    show_guided(lines)
    text = capsys.readouterr().out
    assert "| routed | full | sparse, early (best) | 3 | **1.25: " in text and "| dense | half | cfg (best) | 3 | 1.5: " in text
    rows = [line.split(" | ") for line in text.splitlines()]
    primary = {row[0][2]: row for row in rows if row[0][:3] in ("| 1", "| 2") and "best guidance" in row[0]}
    p = [ttest_1samp(values, 0).pvalue for values in (full, np.subtract(full, half))]
    assert primary["1"][2].startswith(f"{math.exp(np.mean(full)):.2f} (") and primary["1"][1] == "3"
    assert primary["2"][2].startswith(f"{math.exp(np.mean(full) - np.mean(half)):.2f} (")
    assert [float(primary[key][3].rstrip(" |")) for key in "12"] == [float(f"{max(2 * min(p), x):.2g}") for x in p]  # Holm
    interval = ttest_1samp(full, 0).confidence_interval()
    assert f"({math.exp(interval.low):.2f} to {math.exp(interval.high):.2f})" in primary["1"][2]
    assert "| ratio of distances, routed / dense, unguided, full time | 3 | 1.00 (1.00 to 1.00" in text
    for time, values in {"full": full, "half": half}.items():
        name = f"ratio of distances, routed / dense-46, each at its best guidance, {time} time"
        assert f"| {name} | 3 | {math.exp(np.mean(values)):.2f} (" in text


def seed_lines(arm, seed, best_scale=2.0, num_compared=None):
    """Return all lines of a run for the comparison, or the first `num_compared` of its fresh evaluations."""

    def line(time, guidance, scale, samples, value):
        about = {"arm": arm, "seed": seed, "step": ARMS[arm].step(time), "guidance": guidance, "scale": scale}
        return about | {"first_seed": samples[0], "num_samples": samples[1], "metrics": dict.fromkeys(NAMES, value)}

    chosen = [line(*planned, 1.0 + (planned[2] != best_scale)) for planned in plan_choosing([], arm)]
    compared = plan_comparing(chosen, arm)[:num_compared]
    return chosen + [line(*planned, 3 + seed * len(arm) * (1 + (planned[0] == "full")) % 7 / 1000) for planned in compared]


@pytest.mark.parametrize("last", [{}, {"num_compared": 3}, {"num_compared": 0}, {"best_scale": 1.5}])
def test_the_first_seeds_count_that_have_all_evaluations_at_the_scales_that_these_seeds_choose(last, capsys):
    # Seed 12 diverged. Seed 13 counts if it has all evaluations, also at the scale that the three seeds choose together.
    lines = [line for arm in ("dense", "routed") for seed in (10, 11) for line in seed_lines(arm, seed)]
    lines += seed_lines("dense", 13) + seed_lines("routed", 13, **last)
    counted = {(line["arm"], line["seed"]) for line in complete_lines(lines)}
    seeds = (10, 11) if last else (10, 11, 13)
    assert counted == {(arm, seed) for arm in ("dense", "routed") for seed in seeds}
    assert not complete_lines([line for line in lines if line["arm"] == "dense"])
    show_guided(lines)
    assert ("Seeds [13] have no complete comparison yet: `guided seeds=[10,11,13]`" in capsys.readouterr().out) == bool(last)


def test_a_secondary_arm_counts_with_the_seeds_for_which_it_is_complete(capsys):
    lines = [line for arm in ("dense", "routed") for seed in (10, 11, 12) for line in seed_lines(arm, seed)]
    lines += [line for seed in (10, 11) for line in seed_lines("dense-46", seed)]
    lines += seed_lines("dense-46", 12, num_compared=2) + seed_lines("dense-46", 13)
    counted = [(line["arm"], line["seed"]) for line in complete_lines(lines)]
    assert {seed for arm, seed in counted if arm == "dense-46"} == {10, 11} and ("routed", 12) in counted
    show_guided(lines)
    text = capsys.readouterr().out
    assert "| ratio of distances, routed / dense-46, each at its best guidance, full time | 2 | 1.00 (" in text
    assert "1. ratio of distances, routed / dense, each at its best guidance, full time | 3 | 1.00 (" in text
