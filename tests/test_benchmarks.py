"""The benchmarks: FLOPs against a counter, turns and ratios, and the results file of `make gpu`."""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import forget_accelerate
from omegaconf import OmegaConf
from scipy.stats import ttest_ind
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import dit
from common.errors import UserError
from common.files import REPOSITORY
from configs.compose import compose_overrides
from extras import lightningdit
from extras.benchmarks import __main__ as benchmarks
from extras.benchmarks import harness, kernels, steps
from extras.benchmarks.evidence import (
    FOLDER,
    NAMES,
    collect,
    draw_scales,
    evidence,
    show_comparisons,
    show_equal_time,
    show_tokens,
)
from extras.benchmarks.harness import TimedVariant, measure
from routing_module import Route

CPU = torch.device("cpu")


def counted_flops(function):
    # Compute attention as matrix products, because torch 2.11 does not count the fused kernel of a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_total_flops(), result


@pytest.mark.parametrize("routes", [[], [Route(0.5, 2, -4)], [Route(0.3, 0, 2), Route(0.75, 5, 11)]])
@pytest.mark.parametrize(("file", "backbone"), [(dit, "DiT-XS/4"), (lightningdit, "LightningDiT-XS/2")])
def test_flops_equal_the_count_of_torch_dense_and_routed(file, backbone, routes):
    net = file.build(backbone, input_size=16, in_channels=4, num_classes=10, routes=routes)
    inputs = torch.randn(1, 4, 16, 16), torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    assert counted_flops(lambda: net.eval()(*inputs))[0] == net.forward_flops()
    forward, out = counted_flops(lambda: net.train()(*inputs))
    assert forward == net.forward_flops(None)
    backward, _ = counted_flops(lambda: out.sum().backward())
    assert forward + backward == pytest.approx(3 * net.forward_flops(None), rel=0.05)  # the input needs no gradient


def test_variants_take_turns_after_they_have_warmed_up():
    calls = []
    builders = {name: lambda name=name: TimedVariant(lambda: calls.append(name), 4, 1e9) for name in "ab"}
    records = measure(builders, CPU, rounds=2, steps=3, warmup=2)
    assert "".join(calls) == "aaa" + "bbb" + "aaaabbbb" * 2  # each turn begins with an untimed call
    assert [record["variant"] for record in records] == ["a", "b"] and records[0]["time / first"] == 1
    assert all(record["images/s"] == pytest.approx(4000 / record["ms"]) for record in records)


def test_ratios_compare_turns_of_the_same_round_and_rates_use_the_median():
    slow = TimedVariant(int, 8, 1e9, turns=[[10, 20, 30], [200, 200, 900]])
    fast = TimedVariant(int, 8, 5e8, turns=[[10, 10, 10], [150, 150, 150]])
    found = harness.summarise(fast, slow)
    assert found["time / first"] == (0.5 + 0.75) / 2 and found["lowest, highest"] == [0.5, 0.75]
    assert found["ms"] == 80 and found["images/s"] == 100
    assert (found["GFLOP/image"], found["TFLOP/s"]) == (0.5, 0.05)


@pytest.fixture
def run(capsys):
    """Fixture: run(*arguments) returns (text, rows of the table as dictionaries)."""

    def benchmark(*arguments):
        forget_accelerate()
        benchmarks.main(arguments)
        text = capsys.readouterr().out
        columns, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|")
        return text, [dict(zip(columns, line)) for line in lines]

    return benchmark


SMALL = ["train.precision=fp32", "train.batch_size=2", "machine.cpu_threads=1", "data.num_workers=0", "model.backbone=DiT-XS/8"]


def test_a_step_is_timed_dense_and_routed_with_machine_and_command(run):
    variants = 'variants=["model=dit","model=tread train.grad_accum_steps=2"]'
    text, (dense, routed) = run("step", variants, "rounds=2", "steps=1", *SMALL)
    assert (dense["variant"], routed["variant"]) == ("model=dit", "model=tread train.grad_accum_steps=2")
    assert float(routed["GFLOP/image"]) < 0.75 * float(dense["GFLOP/image"]) and float(routed["time / first"]) > 0
    assert all(f"\n- {key}: " in text for key in ("time", "command", "commit", "device", "torch"))


def test_equal_time_compares_each_arm_at_its_best_rate_by_the_pooled_deviation(capsys):
    values = {("A", 1): (10, 12, 11), ("A", 2): (20, 21, 22), ("A", 3): (1,), ("C", 1): (9, 10, 8), ("C", 2): (5, 6, 7, 8)}
    about = [(arm, lr, seed, n, v) for (arm, lr), vs in values.items() for seed, v in enumerate(vs) for n in (1000, 2000)]
    metrics = [dict.fromkeys(NAMES, value) for *_, value in about]
    names = ("arm", "lr", "seed", "num_samples")
    lines = [dict(zip(names, one), step=9, guidance="none", metrics=values) for one, values in zip(about, metrics)]
    lines.append({**lines[0], "guidance": "cfg"})  # lines with another guidance form another row
    show_equal_time(lines)
    text = capsys.readouterr().out
    assert "| 2 | 21.00 ± 1.00 | 6.00 ± 1.00 |" in text  # the first three seeds choose the rate; A at 3 has only one
    assert "| A | 1 | 3 | 11.00 ± 1.00 |" in text and "| C | 2 | 4 | 6.50 ± 1.29 |" in text
    assert "| C - A | -4.50 (-6.73 to -2.27) |" in text  # Welch: error (1/3 + 5/12)^0.5, 4.96 degrees of freedom; t = 2.577
    # Pooled: squares 2 and 5, 2 + 3 degrees of freedom: s = 1.183; error s (1/3 + 1/4)^0.5 = 0.904; t = 2.571.
    assert "| C - A | -4.50 (-6.82 to -2.18) |" in text
    # At 5 degrees of freedom, P(t > 2.571) is 80% if the noncentrality of t is 3.514.
    near = [line | {"metrics": dict.fromkeys(NAMES, line["metrics"]["fd_fashion"] + 4 * (line["arm"] == "C"))} for line in lines]
    show_equal_time(near)
    assert "| C - A | -0.50 (-2.82 to 1.82; 80%: 3.18) |" in capsys.readouterr().out


def test_unplanned_comparisons_have_welchs_p_values_and_holms_correction(capsys):
    rng = np.random.default_rng(0)
    found = {arm: (rng.standard_normal((4, 3)) + 3 * (arm == "C")).tolist() for arm in "ABC"}
    show_comparisons(found, "unplanned comparison")
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:] if line]
    tests = [ttest_ind(found["C"][i], found[arm][i], equal_var=False).pvalue for arm in "AB" for i in range(4)]
    assert [float(row[2]) for row in rows] == [float(f"{p:.2g}") for p in tests]
    ranked = sorted(range(8), key=tests.__getitem__)
    holm = {i: min(1, max((8 - rank) * tests[j] for rank, j in enumerate(ranked[: ranked.index(i) + 1]))) for i in ranked}
    assert [float(row[3].rstrip(" |")) for row in rows] == [float(f"{holm[i]:.2g}") for i in range(8)]


def test_the_primary_outcomes_follow_the_rule(capsys, tmp_path):
    """Log distances have a standard deviation of 0.1 between seeds, and parabolas over the scale have known minima."""
    lines = []

    def add(arm, step, logs, cfg_scale=1.0, first_seed=2000):
        for seed, value in enumerate(logs):
            about = {"arm": arm, "step": step, "seed": seed, "cfg_scale": cfg_scale, "first_seed": first_seed}
            lines.append(about | {"metrics": dict.fromkeys(NAMES, math.exp(value))})

    for arm, first in (("routed-256", 1.0), ("dense-256", 1.5), ("routed-64", 1.0), ("dense-64", 1.2)):
        add(arm, 2000, [first, first + 0.1, first + 0.2])
    lines.append(lines[-1] | {"seed": 3, "metrics": dict.fromkeys(NAMES, math.exp(1.3))})  # outcome 1 uses all seeds of an arm
    for arm, minima in (("dense-64", (2.0, 2.1, 2.2)), ("routed-64", (1.5, 1.6, 1.7))):
        for scale in (1.0, 1.25, 1.5, 1.75, 2.0, 2.5):
            add(arm, 3000, [(scale - minimum) ** 2 for minimum in minima], scale, first_seed=0)
            add(arm, 3000, [0, 0.1, 0.2] if scale == (2.0 if arm == "dense-64" else 1.5) else [1, 1.1, 1.2], scale)
    add("routed-64-end", 3000, [0.9, 1.1, 1.0, 9.0])  # outcome 3 does not use a seed that routed-64 lacks
    for arm, speed in (("dense-64", 3.0), ("routed-64", 4.0)):  # a routed step takes 0.75 of the time
        lines.append({"arm": arm, "seed": 0, "steps_per_sec": [speed, speed, 1.0], "metrics": {}})
    show_tokens(lines)
    text = capsys.readouterr().out
    # Standard errors (0.08/9 (1 + 1/4))^0.5, 0.1 (2/3)^0.5 (twice) and 0.1 / 3^0.5, with 9, 4, 4 and 2 degrees of freedom.
    # p: 0.0192, 1, 0.0036, 0.225; by Holm's method the lowest times 4, the second times 3, and so on.
    assert "with 256 tokens / with 64 | 0.74 (0.58 to 0.94) | 9 | 0.058 |" in text
    assert "seeds that all four arms share | 0.74 (0.57 to 0.97) | 8 |" in text
    assert "at the scales 1.5 / 2 | 1.00 (0.80 to 1.25; 80%: 1.36) | 4 | 1 |" in text
    assert "best scale, routed - dense | -0.50 (-0.73 to -0.27) | 4 | 0.014 |" in text
    assert "dense end / routed to the end | 0.90 (0.71 to 1.16; 80%: 1.39) | 2 | 0.45 |" in text
    # Dense log distances are 1.2 after 2,000 steps and 1 after 3,000, routed ones 1 after both; the seeds add 0, 0.1 and 0.2.
    assert "after 3,000 steps / after 2,000, paired by seed | 1.22 (1.22 to 1.22) | 2 |" in text
    # 3,000 routed steps take as long as 2,250 dense ones: 1.2 - 0.2 log(1.125) / log(1.5) = 1.142; along a line, 1.154.
    assert "takes 0.75: ratio of distances, linear, paired by seed | 0.86 (0.86 to 0.86) | 2 |" in text
    assert "takes 0.75: ratio of distances, power law | 0.87 (0.69 to 1.09; 80%: 1.36) | 4 |" in text
    draw_scales(lines, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"fashion_scales.png", "fashion_precision_recall.png"}


def test_collected_lines_hold_every_evaluation_with_its_weights(tmp_path):
    run = tmp_path / "runs/dense-64_seed5"
    (run / "evaluations").mkdir(parents=True)
    (run / "checkpoints/step_0000020").mkdir(parents=True)
    composed = compose_overrides(["seed=5", "train.lr=0.004"])
    OmegaConf.save(OmegaConf.create(OmegaConf.to_container(composed, resolve=True)), run / "config.yaml")
    how = {"cfg_scale": 1.5, "first_seed": 7, "detector": "small-fashion"}
    evaluation = {"step": 20, "settings": how, "metrics": {"fd": 3.0}, "jackknife": {"fd": [1, 3]}}
    loss = {"step": 20, "settings": {"num_samples": 9}, "metrics": {"validation_loss": 0.5}, "by_level": [0.5]}
    validation = {"step": 20, "metrics": {"validation_loss": 0.5}, "validation_loss_by_level": [0.5]}
    files = {"starts.jsonl": [{"commit": "abc"}], "evaluations/results.jsonl": [loss, evaluation]}
    files["metrics.jsonl"] = [{"step": 10, "loss": 1.0, "steps_per_sec": 2.0}]
    for name, lines in files.items():
        (run / name).write_text("\n".join(map(json.dumps, lines)))
    (run / "checkpoints/step_0000020/manifest.json").write_text(json.dumps({"ema.safetensors": {"blake2b": "123"}}))
    (tmp_path / "runs/other").mkdir()
    with pytest.raises(UserError, match="runs=.*checkpoints holds no runs named search_"):
        collect(str(tmp_path / "lines.jsonl"), str(run / "checkpoints"))
    collect(str(tmp_path / "lines.jsonl"), str(tmp_path / "runs"))
    with pytest.raises(UserError, match="output=.*lines.jsonl exists; give a new file"):
        collect(str(tmp_path / "lines.jsonl"), str(tmp_path / "runs"))
    about = {"arm": "dense-64", "seed": 5, "lr": 0.004, "commit": "abc"}
    assert [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()] == [
        about | validation | {"ema": "123"},
        about | how | {"step": 20, "metrics": {"fd": 3.0}, "standard_errors": {"fd": 1.0}, "ema": "123"},
        about | {"steps_per_sec": [2.0], "metrics": {}},
    ]


@pytest.fixture(scope="module")
def printed():
    """Fixture: what `python -m extras.benchmarks evidence` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        evidence()
    return out.getvalue()


def test_the_pages_show_what_the_command_prints(printed):
    tables = printed.strip().split("\n\n")
    pages = [page.read_text(encoding="utf-8") for page in FOLDER.glob("fashion_*.md")]
    assert len(tables) >= 17 and all(any(table in page for page in pages) for table in tables)


def test_every_interval_of_the_docs_is_printed_by_the_command(printed):
    page = (REPOSITORY / "docs" / "evidence.md").read_text(encoding="utf-8")
    intervals = re.findall(r"[(,;]\s*(-?[\d.]+\s+to\s+-?[\d.]+(?:;\s+80%:\s+[\d.]+)?)[;)]", page)
    assert len(intervals) >= 30
    assert not [found for found in intervals if "(" + re.sub(r"\s+", " ", found) not in printed]


# The first lines of a page that hold its rule, and their hash. A rule is never reworded: corrections with a date follow it.
RULES = {
    "fashion_guided_time": (95, "9b52f1e06427af239e04ec48d63f00dca045c9b3f81d81f3896805e71f6a935f"),
    "fashion_learning_rates": (71, "bc33d14435bd59130b1dc00a13ab69f8be2bf7ed69f0afe997a2aff1ae19731b"),
    "fashion_sprint": (60, "438d3788beb77732505f70b342bba4e465f2070aca2baacf59c4e7d546c19687"),
    "fashion_tokens": (71, "f86a6e32cba3deabf48b5b0398c8e6180dbe92c3c2737ebe14f752024a94c0d9"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_keeps_the_words_of_its_commit(name):
    num_lines, digest = RULES[name]
    lines = (FOLDER / f"{name}.md").read_bytes().splitlines(keepends=True)
    assert hashlib.sha256(b"".join(lines[:num_lines])).hexdigest() == digest


def test_a_wrong_argument_is_refused():
    for arguments, message in (
        (["step", "train.lrr=1"], "train.lrr"),
        (["step", "rounds=0"], "rounds=.*0"),
        (["step", 'variants=["train.precision=fp32","train.precision=bf16"]'], "cannot differ in train.precision"),
    ):
        with pytest.raises(ValueError, match=message):
            benchmarks.main(arguments)


# Replaces Python on a machine with 2 GPUs. It records its arguments and environment. The tests fail, step_xl2 exceeds its time.
PYTHON = """#!{python}
import json, os, sys
KEYS = ["TORCHINDUCTOR_CPP_WRAPPER", "TORCHINDUCTOR_CUDAGRAPHS"]
if sys.argv[1] == "-c":
    print("2 NVIDIA Example GPU (80GB)")
    sys.exit()
with open("calls.jsonl", "a") as f:
    f.write(json.dumps(sys.argv[1:]) + "\\n")
print("output of", *sys.argv[1:4], *[key for key in KEYS if key in os.environ])
print("reason", file=sys.stderr)
sys.exit({{"pytest": 3, "extras.benchmarks": 124 * sys.argv[-2].endswith("step_xl2.json")}}.get(sys.argv[2], 0))
"""


@pytest.fixture
def run_script(tmp_path):
    """Fixture: run_script(python, parts) returns (exit code, stdout and stderr), run in a copy of the repository's folders."""
    (tmp_path / "extras/benchmarks/results").mkdir(parents=True)
    script = shutil.copy(REPOSITORY / "extras/benchmarks/gpu.sh", tmp_path / "extras/benchmarks")
    (tmp_path / "python").write_text(PYTHON.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)

    def run(python=str(tmp_path / "python"), parts=""):
        environment = os.environ | {"PYTHON": python, "PARTS": parts}
        done = subprocess.run(["sh", script], env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_part_that_fails_is_noted_in_the_results_file_and_the_next_part_runs(run_script, tmp_path):
    code, output = run_script()
    assert code == 1 and "step_parallel: done" in output
    assert "failed: graph_bits step_xl2 resume test_evaluation test_numerics test_runs test_steps; " in output
    file, folder = sorted((tmp_path / "extras/benchmarks/results").iterdir(), key=lambda path: path.is_dir())
    assert file.name.startswith("gpu_example-gpu-80gb-_20") and folder.name == file.stem
    text = file.read_text()
    assert text.startswith("output of -m extras.benchmarks.versions")  # versions
    assert "## test_steps: exit code 3" in text and "## step_xl2: stopped after 170 s" in text and text.count("reason") == 7
    assert "## step_b2: done" in text and "\noutput of -m extras.benchmarks step\n" in text
    for part, variable in (("cpp_wrapper", "CPP_WRAPPER"), ("trees", "CUDAGRAPHS")):
        section = text.split(f"## {part}: done")[1].split("##")[0]
        assert f"    env TORCHINDUCTOR_{variable}=1 python -m extras.benchmarks step" in section
        assert f"output of -m extras.benchmarks step TORCHINDUCTOR_{variable}\n" in section
    assert run_script(parts="step_b2")[0] == 0 and file.read_text().count("## step_b2: done") == 2  # appended


def test_three_lines_of_parts_take_less_than_ten_minutes_each():
    script = (REPOSITORY / "extras/benchmarks/gpu.sh").read_text()
    limits = {part: int(limit) for part, limit in re.findall(r"^run_part (\w+) (\d+)", script, re.MULTILINE)}
    lines = re.findall(r'^all="(?:\$all )?(.*)"$', script, re.MULTILINE)
    assert all(sum(limits[part] for part in line.split()) <= 560 for line in lines[:3])


def test_every_benchmark_command_of_the_script_is_valid(run_script, tmp_path, monkeypatch, capsys):
    measured, called = [], []
    monkeypatch.setattr(steps, "measure", lambda builders, *_: measured.append(len(builders)))
    monkeypatch.setattr(steps, "report", lambda *_: None)
    monkeypatch.setattr(steps, "build_step", lambda *_: TimedVariant(lambda: torch.ones(2) * 2, 1, 0))  # for profile

    def record_as(name):
        return lambda: called.append(name)

    for name in ("machine", "update", "attention", "denoiser"):
        monkeypatch.setattr(kernels, name, record_as(name))
    run_script()
    monkeypatch.chdir(tmp_path)
    for arguments in map(json.loads, (tmp_path / "calls.jsonl").read_text().splitlines()):
        if "extras.benchmarks" in arguments:
            forget_accelerate()
            benchmarks.main(arguments[arguments.index("extras.benchmarks") + 1 :])
    assert measured == [4, 2, 2, 1, 8, 1, 1, 4, 4, 2, 1]  # variants of each benchmark
    assert called == ["machine", "update", "attention", "denoiser"]
    assert capsys.readouterr().out.count("aten::mul") == 4  # the tables of profile
    assert len([*tmp_path.rglob("profile/*.json.gz")]) == 4


def test_the_script_refuses_unknown_parts_and_a_machine_without_a_gpu(run_script, tmp_path):
    parts = "machine graph_bits step_xl2 profile cpp_wrapper trees one_core small xl2_256_tread xl2_256_dense s2_256 update "
    parts += "attention resume denoiser step_b2 step_parallel long_xl2 test_evaluation test_numerics test_runs test_steps"
    assert run_script(parts="test") == (1, f"PARTS=test is not a part; use {parts}\n")
    assert "gpu: install what is missing" in run_script(python="false")[1]
    (tmp_path / "python").write_text('#!/bin/sh\n[ "$1" != -c ]\n')  # all packages, but no GPU
    assert run_script() == (1, "gpu: torch finds no CUDA GPU on this machine\n")
    assert not [*(tmp_path / "extras/benchmarks/results").iterdir()]


@pytest.mark.parametrize("name", ["machine", "update", "attention", "denoiser"])
def test_parts_of_a_step_are_measured_on_a_cpu_with_small_sizes(run, monkeypatch, name):
    for key in ("ADD", "GRAPH_NODES", "PYTHON_ADDITIONS"):
        monkeypatch.setattr(kernels, key, 10)
    small = {"update": ["backbone=DiT-XS/8"], "attention": ["batch_size=1"]}
    small["denoiser"] = ["backbones=[DiT-XS/8]", "batch_sizes=[1,2]"]
    text, rows = run(name, *small.get(name, []), *(["repeats=1"] if name in small else []))
    assert len(rows) == {"machine": 1, "update": 2, "attention": 2, "denoiser": 2}[name]
    assert all(float(next(row[key] for key in row if key.startswith(("ms", "us")))) > 0 for row in rows)
    assert "\n- commit: " in text


def test_one_update_of_weights_and_average_equals_adamw_and_the_average():
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5))]
    averages, gradients = [torch.randn_like(p) for p in weights], [torch.randn_like(p) for p in weights]
    plain, own_averages = [p.detach().clone() for p in weights], [x.clone() for x in averages]
    first, second = [torch.zeros_like(p) for p in plain], [torch.zeros_like(p) for p in plain]
    optimizer = torch.optim.AdamW(weights, lr=kernels.LR, betas=kernels.BETAS, eps=kernels.EPS, weight_decay=0.0)
    for step in range(1, 4):
        for p, gradient in zip(weights, gradients):
            p.grad = gradient
        optimizer.step()
        torch._foreach_lerp_(averages, [p.detach() for p in weights], 1 - kernels.EMA_DECAY)
        corrections = [1 - beta**step for beta in kernels.BETAS]
        numbers = map(torch.tensor, (kernels.LR / corrections[0], corrections[1] ** 0.5, 1 - kernels.EMA_DECAY))
        kernels.update_in_one_pass(plain, gradients, first, second, own_averages, *numbers)
    for ours, theirs in zip([*plain, *own_averages], [*weights, *averages]):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
