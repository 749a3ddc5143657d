"""The runs with 256 tokens in equal time: what comes next, what the commands say, and the outcomes."""

import json
import math
import re

import numpy as np
import pytest
from conftest import FASTER_FASHION, forget_accelerate
from scipy.stats import ttest_1samp

from cli.arguments import run_command
from common.errors import UserError
from evidence import time_256
from evidence.__main__ import COMMANDS
from evidence.contrasts import DISTANCE, FOLDER, LOSS, NAMES
from evidence.tables import collect
from evidence.time_256 import ARMS, SEEDS, TIMES, arguments_of, choosing, comparing, plan_next, show_256, step_of


def test_steps_and_samples_are_those_of_the_rule():
    steps = {arm: [step_of(arm, part) for part in ("early", "search", "half", "full")] for arm in ARMS}
    assert steps == {"dense": [1250, 3125, 6250, 12_500], "routed": [1864, 4660, 9320, 18_640]}
    assert abs(12_500 / 0.6706 - 18_640) < 10
    used = [range(first, first + number) for seed in SEEDS for first, number in (choosing(seed), comparing(seed))]
    assert len({sampling_seed for one in used for sampling_seed in one}) == len(SEEDS) * 5500  # no sample is used twice
    assert (choosing(21), comparing(21)) == ((10_000, 500), (11_000, 5000))


def test_a_command_has_the_arguments_of_the_rule(tmp_path):
    page = (FOLDER / "fashion_256_time.md").read_text(encoding="utf-8").split("**Commands.**")[1].split("## Additions")[0]
    text = re.sub(r"\\?\n\s+", " ", page)
    common = dict(re.findall(r'(train|fid)="([^"]*)"', text))
    searched, trained = (
        f"{common['train']} {rest}" for rest in re.findall(r"python train.py (?=experiment)(.*?)(?= python| fid=)", text)
    )
    evaluated = f"{common['fid']} {re.findall('python fid.py (.*)', text)[0]}"

    def given(pattern, **values):
        written = re.sub(r"<(\w+)>", lambda found: str(values[found[1]]), pattern.replace("<...>", "<scale>"))
        return {word for word in written.split() if "=" in word}

    values = dict(row="fashion_dit_xs2_tread", arm="routed", rate=0.002)
    _, train, _ = arguments_of("search_routed_0.002", "routed", 100, 0.002, [], tmp_path, [], [])
    words = {*json.loads(train.removeprefix("train="))} - {f"output_dir={tmp_path}"}
    assert words == given(searched, **values, quarter=4660)
    planned = [("half", "autoguidance", scale, (0, 500)) for scale in (1.5, 2.0)] + [("full", "none", 1.0, (1000, 5000))]
    _, train, fid = arguments_of("routed_seed20", "routed", 20, 0.002, planned, tmp_path, [], [])
    words = {*json.loads(train.removeprefix("train="))} - {f"output_dir={tmp_path}"}
    assert words == given(trained, **values, seed=20, steps=18_640, tenth=1864, half=9320)
    guided, unguided = (set(one) for one in json.loads(fid.removeprefix("evaluations=")))
    folder = tmp_path / "routed_seed20" / "checkpoints"
    own = {f"checkpoint={folder / 'step_0009320'}", f"guidance.checkpoint={folder / 'step_0001864'}", "guidance.w=[1.5, 2.0]"}
    own |= {"guidance=autoguidance", "evaluation.num_samples=500", "evaluation.first_seed=0"}
    fixed = {word for word in evaluated.split() if "=" in word and "<" not in word}
    assert guided == fixed | own
    own = {f"checkpoint={folder / 'step_0018640'}", "guidance=none", "evaluation.num_samples=5000", "evaluation.first_seed=1000"}
    assert unguided == fixed | own


def run_of(arm, seed, rate, planned, distance):
    """Return the lines of a run that has made the `planned` evaluations."""
    part = "search" if seed == 100 else "full"
    about = {"arm": arm, "seed": seed, "lr": rate}
    lines = [about | {"step": step_of(arm, part), "starts": [], "metrics": {}}]
    for part, guidance, scale, (first_seed, num_samples) in planned:
        line = about | {"step": step_of(arm, part), "guidance": guidance, "scale": scale, "first_seed": first_seed}
        value = distance(arm, seed, rate, part, guidance, scale, num_samples)
        lines.append(line | {"num_samples": num_samples, "metrics": dict.fromkeys(NAMES, value)})
    if seed != 100:
        for time in TIMES:
            loss = {"metrics": {LOSS: 0.15 if arm == "dense" else 0.18}, "validation_loss_by_level": [0.1, 0.2]}
            lines.append(about | loss | {"step": step_of(arm, time)})
    return lines


def follow(distance, num_pairs=6, diverged=()):
    """Follow the rule to its end. Return all lines, and the stages: what each run had to make."""
    lines, stages = [], []
    while planned := plan_next(lines, num_pairs, diverged):
        stages.append(planned)
        lines += [line for task in planned.values() for line in run_of(*task, distance)]
    return lines, stages


BEST = {"cfg": 1.25, "autoguidance": 9.0}  # the best scale of the routed arm; of the dense arm, it is 2


def distance_of(arm, seed, rate, part, guidance, scale, num_samples):
    if part == "search":
        return 100 + abs(math.log2(rate / {"dense": 2e-3, "routed": 16e-3}[arm]))
    best = BEST[guidance] if arm == "routed" and guidance in BEST else 2.0
    bonus = {"none": 0.5, "cfg": 0.0, "autoguidance": 0.3}[guidance] + 0.1 * (num_samples == 5000) * (seed % 3)
    return math.exp(3 + bonus + (guidance != "none") * 0.05 * abs(scale - best))


def test_the_rule_is_followed_to_its_end():
    lines, stages = follow(distance_of)
    searches = [[*stage] for stage in stages[:5]]
    # The routed search goes on until the best rate is neither end: 16e-3 is better than 8e-3, and 32e-3 is not.
    assert searches[0] == [f"search_{arm}_{rate}" for arm in ("routed", "dense") for rate in ("0.001", "0.002", "0.004")]
    assert searches[1:4] == [["search_routed_0.008"], ["search_routed_0.016"], ["search_routed_0.032"]]
    assert searches[4] == [f"{arm}_seed{seed}" for seed in SEEDS for arm in ("routed", "dense")]
    assert {(arm, rate) for arm, _, rate, _ in stages[4].values()} == {("routed", 0.016), ("dense", 0.002)}
    choices, comparison = stages[5:-1], stages[-1]
    assert all([*stage] == [f"{arm}_seed{seed}" for seed in (20, 21, 22) for arm in ARMS] for stage in choices[:1])
    scales = {}
    for stage in choices:
        assert all(samples == choosing(seed) for _, seed, _, planned in stage.values() for *_, samples in planned)
        for arm, seed, _, planned in stage.values():
            for time, guidance, scale, _ in planned:
                scales.setdefault((arm, seed, time, guidance), []).append(scale)
    for seed, time in ((20, "half"), (22, "full")):
        assert scales["routed", seed, time, "cfg"] == [1.5, 2.0, 2.5, 1.25, 1.1]
        assert scales["routed", seed, time, "autoguidance"] == [1.5, 2.0, 3.0, 4.0, 6.0, 8.0]  # an end that was reached
        assert scales["dense", seed, time, "cfg"] == [1.5, 2.0, 2.5]
        assert scales["dense", seed, time, "none"] == [1.0]
    assert [*comparison] == [f"{arm}_seed{seed}" for seed in SEEDS for arm in ("routed", "dense")]
    for arm, seed, _, planned in comparison.values():
        scale = {"routed": 1.25, "dense": 2.0}[arm]
        early = {("early", "none", 1.0, comparing(seed))} if arm == "routed" else set()
        every = {(time, *one, comparing(seed)) for time in TIMES for one in (("none", 1.0), ("cfg", scale))}
        assert {*planned} == every | early and len(planned) == len(every | early)


def test_diverged_runs_and_few_hours_leave_complete_pairs():
    _, stages = follow(distance_of, 4, ["search_dense_0.004", "routed_seed21"])
    assert "search_dense_0.004" not in stages[0] and "search_dense_0.002" in stages[0]
    trained = next(stage for stage in stages if "dense_seed20" in stage)
    assert {seed for _, seed, *_ in trained.values()} == {20, 22, 23}
    assert {seed for _, seed, *_ in stages[-1].values()} == {20, 22, 23}
    # A pair that was complete already counts, too.
    lines = [line for stage in stages[:-2] for task in stage.values() for line in run_of(*task, distance_of)]
    lines += [line for arm in ARMS for line in run_of(arm, 24, trained["dense_seed20"][2], [], distance_of)]
    assert "dense_seed24" not in plan_next(lines, 4, ["search_dense_0.004", "routed_seed21"])  # three others choose
    followed = [*lines, *(line for task in stages[-2].values() for line in run_of(*task, distance_of))]
    assert {seed for _, seed, *_ in plan_next(followed, 4, ["search_dense_0.004", "routed_seed21"]).values()} == {20, 22, 23, 24}
    lines, stages = follow(distance_of, 2)
    assert [*stages[-1]] == [f"{arm}_seed{seed}" for seed in (20, 21) for arm in ("routed", "dense")]  # two pairs choose nothing
    assert not any("guidance" in line for line in lines if line["seed"] != 100)


def test_outcomes_are_paired_by_seed_and_corrected(capsys):
    differences = {"full": [0.2, 0.25, 0.18, 0.3, 0.22, 0.21], "half": [0.0, 0.1, -0.1, 0.05, -0.02, 0.03]}

    def distance(arm, seed, rate, part, guidance, scale, num_samples):
        if num_samples < 5000 or part == "early":
            return distance_of(arm, 21, rate, part, guidance, scale, num_samples)
        seed_effect = 0.3 * (seed % 2)  # shared by both arms
        if guidance == "none":
            return math.exp(seed_effect + {"half": 2.0, "full": 1.0}[part] * (1 + (arm == "routed")))
        return math.exp(seed_effect + (arm == "routed") * differences[part][seed - 20])

    lines, _ = follow(distance)
    show_256(lines)
    text = capsys.readouterr().out
    assert "| dense | 0.001: 101.0" in text and ", **0.002: 100.0" in text
    assert "| routed | half | cfg (chosen) |" in text and "| routed | half | autoguidance (an end of all scales) |" in text
    p = [ttest_1samp(differences[time], 0).pvalue for time in ("full", "half")]
    rows = [line.split(" | ") for line in text.splitlines()]
    for number, time in enumerate(("full", "half")):
        (row,) = [row for row in rows if row[0].startswith(f"| {number + 1}. ratio of distances") and f"{time} time" in row[0]]
        interval = ttest_1samp(differences[time], 0).confidence_interval()
        found = f"{math.exp(np.mean(differences[time])):.2f} ({math.exp(interval.low):.2f} to {math.exp(interval.high):.2f}"
        assert row[1].startswith(found) and float(row[2].split(",")[0]) == float(f"{max(p[number], 2 * min(p)):.2g}")
        assert row[2].rstrip(" |").endswith(", decided" if time == "full" else ", undecided")
    change = np.subtract(differences["full"], differences["half"])
    low, high = (math.exp(x) for x in ttest_1samp(change, 0).confidence_interval())
    assert f"full time / half time | {math.exp(change.mean()):.2f} ({low:.2f} to {high:.2f})" in text
    assert "unguided, full time | 2.72 (2.72 to 2.72" in text and "unguided, half time | 7.39 (7.39 to 7.39" in text
    # Routed log distances without seed effects: 4 after 9,320 steps and 2 after 18,640, so 4 - 2 log2(12500 / 9320) after 12,500.
    assert f"unguided, after 12,500 steps (interpolated) | {math.exp(3 - 2 * math.log2(12500 / 9320)):.2f} (" in text
    assert "ratio of validation losses, routed / dense, half time | 1.200 (1.200 to 1.200" in text
    assert all(f"| validation loss, {time} time | 1.000 | 1.000 |" in text for time in TIMES)
    two_pairs = [line for line in lines if line["seed"] in (20, 21, 100)]
    show_256(two_pairs)
    text = capsys.readouterr().out
    assert "2 pairs are complete, and outcomes need 3." in text and "primary" not in text


def is_of(line, arm, seed, **wanted):
    return (line["arm"], line["seed"]) == (arm, seed) and all(line.get(key) == value for key, value in wanted.items())


@pytest.mark.parametrize(
    "wanted",
    [
        dict(step=1864, guidance="none", num_samples=5000),  # of the comparison at equal steps alone
        dict(step=9320, guidance="cfg", num_samples=5000),
        dict(step=9320, guidance="none", num_samples=500),  # of the choice
        dict(step=18_640, metrics={LOSS: 0.18}),
    ],
)
def test_a_complete_pair_without_all_results_leaves_no_outcomes_instead_of_itself(wanted, capsys):
    lines, _ = follow(distance_of)
    kept = [line for line in lines if not is_of(line, "routed", 21, **wanted)]
    assert len(kept) < len(lines)
    show_256(kept)
    text = capsys.readouterr().out
    assert "because results of complete pairs are missing: routed_seed21." in text or wanted["num_samples"] == 500
    assert "are missing: " in text and "primary" not in text


def test_all_runs_are_made_recorded_and_shown(fashion_folder, monkeypatch, capsys):
    small = {name: (experiment, steps) for (name, (experiment, _)), steps in zip(ARMS.items(), (40, 20))}
    for name, value in {
        "ARMS": small, "RATES": (1e-3,), "FIRST_RATES": (1e-3,), "SEEDS": range(20, 22), "NUM_CHOOSING_SEEDS": 2,
        "SEARCHING": (0, 10), "choosing": lambda seed: (100 * seed, 10), "comparing": lambda seed: (100 * seed + 50, 12),
        "GUIDANCES": {name: (key, (1.5,), (1.5,), more) for name, (key, _, _, more) in time_256.GUIDANCES.items()},
    }.items():  # fmt: skip
        monkeypatch.setattr(time_256, name, value)
    ran = []

    def run_here(given, jobs, folder, ended):
        for name, arguments in given.items():
            ran.append(name)
            forget_accelerate()
            run_command(COMMANDS, "", arguments)
            ended(name)

    monkeypatch.setattr(time_256, "run_all", run_here)
    settings = dict(
        num_pairs=2, overrides=FASTER_FASHION, fid_overrides=["sampler.num_steps=2", "sampling.batch_size=12"], runs="runs/a"
    )
    time_256.time_256(**settings)
    pairs = [f"{arm}_seed{seed}" for seed in (20, 21) for arm in ("routed", "dense")]
    assert ran == ["search_routed_0.001", "search_dense_0.001", *pairs, *pairs, *pairs]
    collect("lines.jsonl", "runs/a")
    lines = [json.loads(line) for line in (fashion_folder / "lines.jsonl").read_text().splitlines()]
    show_256(lines)
    text = capsys.readouterr().out
    assert "| routed | full | none | 1 | 2 |" in text and "1. ratio of distances, routed / dense" in text
    assert all(math.isfinite(line["metrics"][DISTANCE]) for line in lines if "guidance" in line)
    time_256.time_256(**settings)
    assert len(ran) == 2 + 3 * 4  # nothing runs again

    monkeypatch.setattr(time_256, "run_all", lambda *_: None)
    with pytest.raises(UserError, match=r"2 runs are not complete \(see runs/b/search_routed_0.001.log, .*name a run whose loss"):
        time_256.time_256(runs="runs/b")
    with pytest.raises(UserError, match=r"4 runs are not complete \(see runs/b/routed_seed20.log, "):
        time_256.time_256(runs="runs/b", searches="lines.jsonl")  # the searches are not repeated
    with pytest.raises(UserError, match="searches=other.jsonl holds no searches"):
        time_256.time_256(runs="runs/b", searches="other.jsonl")
    (fashion_folder / "other.jsonl").write_text('{"step": 1}\n')  # such as the metrics of a run
    with pytest.raises(UserError, match="searches=other.jsonl holds no searches"):
        time_256.time_256(runs="runs/b", searches="other.jsonl")
