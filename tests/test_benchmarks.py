"""The benchmarks: their arithmetic against a counter, their refusals, and the files and last line of short runs."""

import ctypes
import json

import pytest
import torch
from conftest import LAUNCH_2, finish, forget_accelerate, start
from torch.utils.flop_counter import FlopCounterMode

import dit
from benchmarks import harness, loader, loss_curves, profile, sampling, scaling, train_step
from benchmarks.memory import saved_for_backward
from benchmarks.plain import PlainEMA
from routing_module import Route, TokenRouter
from sampling import flops
from setup import cli
from setup.settings import Count, Settings
from training.ema import EMA

TINY_STEP = ["backbones=DiT-XS/2", "resolution=8", "batch_size=4", "rounds=2", "steps=1", "warmup=1", "cpu_threads=1"]


@pytest.fixture
def run(tmp_path, capsys):
    """run(benchmark, *arguments) -> (JSON lines of the file, the Markdown, lines of stdout)."""

    def benchmark(module, *arguments):
        forget_accelerate()
        module.main([*arguments, "device=cpu", f"output={tmp_path / 'out' / 'result'}"])
        file = tmp_path / "out" / "result.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return lines, file.with_suffix(".md").read_text(), capsys.readouterr().out.splitlines()

    return benchmark


def counted_flops(function):
    with FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_total_flops(), result


@pytest.mark.parametrize("routes", [[], [Route(0.5, 2, -4)], [Route(0.3, 0, 2), Route(0.75, 5, 11)]])
@pytest.mark.parametrize("backbone", ["DiT-XS/4", "DiT-S/8"])
def test_flops_are_those_that_torch_counts_dense_and_routed(backbone, routes):
    net = dit.build(backbone, input_size=32, in_channels=4, num_classes=10, routes=routes)
    inputs = torch.randn(1, 4, 32, 32), torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    assert counted_flops(lambda: net.train()(*inputs))[0] == flops.forward_flops(net, None)
    assert counted_flops(lambda: net.eval()(*inputs))[0] == flops.forward_flops(net)


def test_the_backward_is_counted_as_twice_the_forward():
    net = dit.build("DiT-S/8", input_size=32, in_channels=4, num_classes=10, routes=[Route(0.5, 2, -4)])
    forward, out = counted_flops(lambda: net(torch.randn(1, 4, 32, 32), torch.zeros(1), torch.zeros(1, dtype=torch.int64)))
    backward, _ = counted_flops(lambda: out.sum().backward())
    assert forward + backward == pytest.approx(flops.step_flops(net, routed=True), rel=0.02)


def test_an_image_of_dit_s_2_costs_36_gflop():
    with torch.device("meta"):
        net = dit.build("DiT-S/2", input_size=32, in_channels=4, num_classes=1000)
    assert flops.step_flops(net, routed=True) == pytest.approx(36.4e9, rel=5e-3)


def saved_bytes(net, batch_size):
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch_size, 4, 32, 32, generator=g), torch.randn(batch_size, generator=g), torch.arange(batch_size)
    return saved_for_backward(net, lambda: net(*inputs).square().mean())


def test_what_a_step_saves_grows_linearly_in_the_batch_and_routes_lower_it_as_they_lower_the_flops():
    settings = dict(input_size=32, in_channels=4, num_classes=10)
    dense = dit.build("DiT-XS/2", **settings).train()
    routed = dit.build("DiT-XS/2", **settings, routes=[Route(0.5, 2, -4)]).train()
    for net in (dense, routed):
        one, two, four = (saved_bytes(net, batch_size) for batch_size in (1, 2, 4))
        assert one < two and four - two == pytest.approx(2 * (two - one), rel=0.01)
    ratio = flops.step_flops(routed, routed=True) / flops.step_flops(routed, routed=False)
    assert saved_bytes(routed, 4) <= (ratio + 0.1) * saved_bytes(dense, 4)


def test_the_loop_ema_is_the_same_average():
    nets = [torch.nn.Linear(3, 2) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    fast, plain = EMA(nets[0], 0.9), PlainEMA(nets[1], 0.9)
    for step in range(5):
        for net in nets:
            with torch.no_grad():
                net.weight.add_(step)
        fast.update(step)
        plain.update(step)
    assert torch.allclose(fast.net.weight, plain.net.weight, rtol=1e-6)


@pytest.mark.parametrize(
    ("module", "argument", "message"),
    [
        (train_step, "backbone=DiT-S/2", r"backbone is not a key or has no value; it takes .*\[backbones=\]"),
        (train_step, "backbones=[DiT-S/3]", r"backbones='\[DiT-S/3\]' is not accepted; use DiT-XS/1 .*, or a list of them"),
        (train_step, "precision=fp16", r"precision='fp16' is not accepted; use fp32 \| bf16 \| fp8"),
        (loss_curves, "variants=bf16", r"variants='bf16' is not accepted; use .*<train.precision>/<train.compile>"),
        (train_step, "compile=fast", r"compile='fast' is not accepted; use none \| blocks \| default"),
        (train_step, "resolution=128", r"resolution='128' is not accepted; use 8 \| 256 \| 512"),
        (train_step, "batch_size", r"batch_size is not a key or has no value; it takes .*\[backbones=\]"),
        (profile, "model=vit", r"model='vit' is not accepted; use dit \| tread"),
        (sampling, "guidance=free", r"guidance='free' is not accepted; use none \| cfg"),
        (sampling, "overrides=[guidance.scale=2]", "guidance.scale is not a key of guidance=.*; accepted: .*guidance.cfg_scale"),
        (sampling, "num_steps=0", "num_steps='0' is not accepted; use a whole number of at least 1, or a list of them"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_is_accepted(module, argument, message):
    forget_accelerate()
    with pytest.raises(ValueError, match=message):
        module.main([argument])


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device=cuda, but this machine has no CUDA device; use device=cpu"):
        train_step.main(["device=cuda"])


def test_a_lone_value_stands_for_a_list_of_one():
    class Sizes(Settings):
        sizes: harness.Several[Count] = [1, 2]
        n: Count = 5

    assert cli.parse_arguments(["sizes=3"], Sizes).model_dump() == {"sizes": [3], "n": 5}


def test_train_step_writes_rows_ratios_and_a_last_line_that_sums_them_up(run):
    lines, markdown, out = run(train_step, *TINY_STEP, "parts=true")
    machine, rows, ratios = lines[0], lines[1:5], lines[5:]
    assert {"machine", "torch", "date", "command", "revision", "num_threads"} <= machine.keys()
    assert [(row["model"], row["variant"]) for row in rows] == [
        ("dit", "plain"), ("tread", "plain"), ("dit", "none"), ("tread", "none")
    ]  # fmt: skip
    for row in rows:
        assert row["num_timed"] == 2 and row["ms_lowest"] <= row["ms_per_step"]
        assert row["images_per_sec"] == pytest.approx(4000 / row["ms_per_step"], rel=1e-3)
        assert row["mfu"] is None and 0 < row["of_fastest_product"] < 1 and row["tflops_per_sec"] < row["ceiling_tflops_per_sec"]
        assert all(row[f"{part}_ms"] > 0 for part in train_step.PARTS)
    dense, routed = rows[2:]
    assert routed["saved_mib"] < dense["saved_mib"]
    assert ratios[1]["flops_tread_over_dit"] == pytest.approx(routed["gflops_per_image"] / dense["gflops_per_image"], rel=1e-3)
    assert ratios[1]["time_over_flops"] > 0 and ratios[1]["tread_speed_over_plain"] > 0
    assert out[-1].startswith("DiT-XS/2 plain: step time tread/dit") and "times as fast as plain" in out[-1]
    assert out[-1] in markdown and "## DiT-XS/2" in markdown and machine["command"] in markdown


def test_train_step_times_random_latents_too_and_only_what_is_asked_for(run):
    settings = ["backbones=DiT-XS/8", "resolution=256", "batch_size=2", "rounds=1", "steps=1", "warmup=1", "cpu_threads=1"]
    lines, _, out = run(train_step, *settings, "plain=false", "models=tread", "overrides=[train.grad_accum_steps=2]")
    assert [(line["model"], line["variant"]) for line in lines[1:2]] == [("tread", "none")]
    assert out[-1] == "DiT-XS/8 none: nothing to compare"


def test_the_profile_names_the_routing_operations_and_their_gradients(run):
    lines, markdown, out = run(profile, "backbone=DiT-XS/2", "resolution=8", "batch_size=4", "steps=1", "cpu_threads=1")
    names = {line["name"]: line for line in lines[1:-1]}
    for name in ("select", "gather", "gather, backward", "scatter", "scatter, backward"):
        assert names[f"routing: {name}"]["calls"] == 1, name
        assert f"routing: {name}" in markdown
    assert 0 < lines[-1]["routing_share"] < 0.5
    assert out[-1].startswith("routing's own operations: ")
    assert not hasattr(TokenRouter.choose_ids_keep, "__wrapped__")
    assert TokenRouter.choose_ids_keep.__name__ == "choose_ids_keep"


def test_sampling_counts_evaluations_for_every_guidance(run):
    settings = ["backbone=DiT-XS/8", "batch_size=2", "num_steps=[1,3]", "rounds=1", "cpu_threads=1"]
    lines, markdown, out = run(sampling, *settings, "overrides=[guidance.cfg_scale=2.0,guidance.w=2.0]")
    rows = {(row["guidance"], row["num_steps"]): row for row in lines[1:]}
    evaluations = {key: row["evaluations"] for key, row in rows.items()}
    assert evaluations == {
        ("none", 1): 1, ("none", 3): 5, ("cfg", 1): 2, ("cfg", 3): 10,
        ("interval", 1): 1, ("interval", 3): 7, ("sparse", 1): 2, ("sparse", 3): 10,
    }  # fmt: skip
    assert rows["sparse", 3]["gflops_per_image"] < rows["cfg", 3]["gflops_per_image"]
    rows = list(rows.values())
    assert all(row["images_per_sec"] > 0 and row["decoding_ms"] >= 0 for row in rows)
    assert "cfg with 3 steps: " in out[-1] and out[-1] in markdown


def test_loss_curves_sets_the_difference_of_fast_and_plain_beside_that_of_seeds(run):
    settings = ["models=tread", "variants=[fp32/none,bf16/none]", "steps=5", "seeds=2", "window=2", "batch_size=8"]
    lines, markdown, out = run(loss_curves, *settings, "cpu_threads=1")
    curves, (fp32, bf16) = lines[1:7], lines[7:]
    assert [(c["variant"], c["seed"]) for c in curves] == [(v, s) for v in ("plain", "fp32/none", "bf16/none") for s in (0, 1)]
    assert all(len(c["losses"]) == 5 for c in curves)
    smooth = [[sum(c["losses"][i : i + 2]) / 2 for i in (0, 2)] for c in curves]
    of_seeds = (sum((a - b) ** 2 for a, b in zip(*smooth[:2])) / 2) ** 0.5
    assert fp32["seed_difference"] == bf16["seed_difference"] == pytest.approx(of_seeds, rel=1e-3)
    assert 0 < fp32["gradient_error"] < 1e-5 < bf16["gradient_error"] < 0.05
    assert fp32["step_loss_error"] < 1e-5
    assert fp32["share"] < bf16["share"] < 0.1
    assert out[-1].startswith("tread fp32/none: curves differ by ") and out[-1] in markdown


def test_two_processes_are_compared_with_one(tmp_path):
    settings = ["backbone=DiT-XS/2", "resolution=8", "batch_size=8", "rounds=2", "steps=1", "device=cpu", "cpu_threads=1"]
    code, output = finish(start(*LAUNCH_2, "-m", "benchmarks.scaling", *settings, f"output={tmp_path / 'result'}"))
    assert code == 0, output
    lines = [json.loads(line) for line in (tmp_path / "result.jsonl").read_text().splitlines()]
    assert lines[0]["num_processes"] == 2 and len(lines) == 4
    for line in lines[1:3]:
        assert all(line[kind] > 0 for kind in (*scaling.KINDS, "exchange"))
    assert "2 processes: efficiency " in output and "hide behind the backward" in (tmp_path / "result.md").read_text()


def test_what_scaling_sums_up():
    rounds = [{"alone": 90.0, "apart": 95.0, "together": 100.0, "exchange": 20.0}] * 2
    summary = scaling.sum_up(rounds, batch_size=16, num_processes=2)
    assert summary["images_per_sec"] == 160 and summary["images_per_sec_alone"] == pytest.approx(88.89, abs=0.01)
    assert (summary["efficiency"], summary["efficiency_without_exchange"]) == (0.9, pytest.approx(0.947, abs=1e-3))
    assert (summary["exposed_ms"], summary["hidden_share"]) == (5.0, 0.75)


def test_scaling_of_one_process_is_refused(run):
    with pytest.raises(ValueError, match="compares one process with several: accelerate launch --multi_gpu"):
        run(scaling)


@pytest.mark.parametrize("module", [train_step, profile, sampling, loss_curves])
def test_an_output_that_cannot_be_written_is_named_before_the_measurement(module, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    forget_accelerate()
    monkeypatch.setattr(harness, "describe_machine", None)
    with pytest.raises(ValueError, match="output=.*file/result: cannot write"):
        module.main(["device=cpu", f"output={tmp_path / 'file' / 'result'}"])


def test_the_standard_profile_modules_are_untouched_by_the_one_here():
    code, output = finish(start("-c", "import cProfile, profile; cProfile.run('1'); assert 'benchmarks' not in profile.__file__"))
    assert code == 0, output


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone has the setting")
def test_a_step_on_the_cpu_uses_the_memory_of_the_one_before():
    code = """
import resource, torch
from training import speed

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24).add(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(3):
    page_faults()
afresh = page_faults()
speed.use_cores(torch.device("cpu"), 1)
# Where on the heap the two tensors lie settles within a few calls.
print(afresh, min(page_faults() for _ in range(8)))
"""
    code, output = finish(start("-c", code))
    assert code == 0, output
    afresh, kept = map(int, output.split())
    assert kept < afresh / 10


def test_the_loader_is_measured(tmp_path, capsys):
    loader.main(
        ["num_items=500", "num_batches=10", "rounds=1", "large_items=1000", f"output={tmp_path / 'out'}", "num_workers=[0,2]"]
    )
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line.get("num_workers") for line in lines[1:]] == [0, 2, None] and lines[1]["latents_per_sec"] > 0
    assert lines[3]["num_items"] == 1000 and "| num_workers |" in (tmp_path / "out.md").read_text()
    assert '"latents_per_sec"' in capsys.readouterr().out
    with pytest.raises(ValueError, match="num_batch is not a key"):
        loader.main(["num_batch=3"])
