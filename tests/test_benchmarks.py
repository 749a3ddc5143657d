"""The benchmarks: FLOPs against a counter, turns and ratios, and the results file of `make gpu`."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import forget_accelerate
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import dit
from common.files import REPOSITORY
from extras import lightningdit
from extras.benchmarks import __main__ as benchmarks
from extras.benchmarks import harness, kernels, steps
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
    assert forward == net.forward_flops()
    backward, _ = counted_flops(lambda: out.sum().backward())
    assert forward + backward == pytest.approx(3 * net.forward_flops(), rel=0.05)  # the input needs no gradient


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
    for key in ("NUM_KERNELS", "NUM_GRAPH_NODES", "NUM_PYTHON_ADDITIONS"):
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
