"""The benchmarks: their arithmetic against a counter, their refusals, and the files and last line of short runs."""

import ctypes
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import LAUNCH_2, finish, forget_accelerate, start
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from training.memory import saved_for_backward

import dit
from common.errors import UserError
from configs import command_line as cli
from configs.settings import Count, Settings
from extras import lightningdit
from extras.benchmarks import gpu, harness, loader, loss_curves, peaks, profile, sampling, scaling, train_step, tune
from extras.benchmarks.plain import PlainEMA, make_blocks_plain
from routing_module import Route, TokenRouter
from sampling import flops
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
    # Of attention as matrix products: torch 2.11 does not count the fused kernel of a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_total_flops(), result


@pytest.mark.parametrize("routes", [[], [Route(0.5, 2, -4)], [Route(0.3, 0, 2), Route(0.75, 5, 11)]])
@pytest.mark.parametrize(("file", "backbone"), [(dit, "DiT-XS/4"), (dit, "DiT-S/8"), (lightningdit, "LightningDiT-XS/2")])
def test_flops_are_those_that_torch_counts_dense_and_routed(file, backbone, routes):
    net = file.build(backbone, input_size=32, in_channels=4, num_classes=10, routes=routes)
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
    return saved_for_backward(net, lambda: net(*inputs).square().mean()).total()


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
        (train_step, "compile=fast", r"compile='fast' is not accepted; use auto \| none \| blocks \| segments"),
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


def test_the_steps_of_lightningdit_are_timed_dense_and_routed_and_beside_plain_ones(run):
    lines, _, out = run(train_step, "backbones=LightningDiT-XS/2", *TINY_STEP[1:])
    assert [(row["model"], row["variant"]) for row in lines[1:5]] == [
        ("dit", "plain"), ("tread", "plain"), ("dit", "none"), ("tread", "none")
    ]  # fmt: skip
    assert lines[2]["gflops_per_image"] < 0.75 * lines[1]["gflops_per_image"]
    assert out[-1].startswith("LightningDiT-XS/2 plain: step time tread/dit")


def test_plain_blocks_of_lightningdit_compute_the_same():
    torch.manual_seed(0)
    settings = dict(input_size=8, in_channels=4, num_classes=10, init="official_tread", class_dropout=0.0)
    net = lightningdit.build("LightningDiT-XS/2", **settings, routes=[Route(0.5, 2, -4)]).train()
    inputs = torch.randn(2, 4, 8, 8), torch.rand(2), torch.arange(2)
    expected = net(*inputs, route_scores=(scores := torch.rand(2, 1, 16)))
    make_blocks_plain(net)
    assert torch.allclose(net(*inputs, route_scores=scores), expected, rtol=1e-4, atol=1e-5)


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
    code, output = finish(start(*LAUNCH_2, "-m", "extras.benchmarks.scaling", *settings, f"output={tmp_path / 'result'}"))
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
machine.use_cores(torch.device("cpu"), 1)
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


# ----------------------------------------------------------------------------------------------------------------------
# MFU.


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, None),
        ("NVIDIA A100 80GB PCIe", 312e12, None),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 1978.9e12),
        ("NVIDIA H100 PCIe", 756e12, 1513e12),
        ("NVIDIA H200", 989.4e12, 1978.9e12),
        ("NVIDIA B200", 2250e12, 4500e12),
        ("NVIDIA L40S", 362e12, 733e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 330.3e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),  # a seventh of the GPU
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),  # another chip
        ("Tesla V100-SXM2-16GB", None, None),
    ],
)
def test_the_published_peak_is_that_of_the_whole_name_or_unknown(monkeypatch, name, bf16, fp8):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    cuda = torch.device("cuda")
    assert peaks.published_flops(cuda, "bf16") == bf16 and peaks.published_flops(cuda, "fp8") == fp8
    assert peaks.published_flops(cuda, "fp32") is None and peaks.published_flops(torch.device("cpu"), "bf16") is None


def test_mfu_is_of_the_published_peak_and_counts_routed_flops(monkeypatch, run):
    monkeypatch.setattr(train_step, "published_flops", lambda device, precision: 1e12)
    monkeypatch.setattr(train_step, "fastest_product", lambda *args: 1e12)
    lines, _, _ = run(train_step, *TINY_STEP, "plain=false")
    for row in lines[1:3]:
        assert row["mfu"] == pytest.approx(row["tflops_per_sec"], rel=1e-3)
        assert row["tflops_per_sec"] == pytest.approx(row["gflops_per_image"] * row["images_per_sec"] / 1000, rel=1e-3)
    assert lines[2]["gflops_per_image"] < 0.75 * lines[1]["gflops_per_image"]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_every_precision_has_a_fastest_product_of_its_own(monkeypatch, precision):
    block, types = dit.DiTBlock(32, 2), set()

    def record(action, repeats, device, warmup):
        types.add(action().dtype)
        return [2.0] * repeats

    monkeypatch.setattr(peaks, "time_ms", record)
    assert peaks.fastest_product(block, 64, precision, torch.device("cpu")) == 2000 * 2048**3 / 2
    assert types == {torch.float32 if precision == "fp32" else torch.bfloat16}
    with torch.device("meta"):  # its MLP is 170 wide, which float8 products do not take
        block = lightningdit.LightningDiTBlock(64, 2)
    peaks.fastest_product(block, 64, precision, torch.device("cpu"))


# ----------------------------------------------------------------------------------------------------------------------
# The whole loop; rows in processes of their own.


def test_the_loop_around_the_step_is_timed_too(run, monkeypatch):
    steps = []
    original = train_step.Trainer._log

    def log(trainer, *args):
        steps.append(trainer.step)
        return original(trainer, *args)

    monkeypatch.setattr(train_step.Trainer, "_log", log)
    monkeypatch.setattr(train_step, "fastest_product", lambda *args: 1e12)
    lines, _, out = run(train_step, *TINY_STEP, "plain=false", "loop_steps=4", "overrides=[train.log_every=2]")
    assert len(steps) >= 8 and all(row["loop_ms_per_step"] > 0 for row in lines[1:3])
    assert lines[3]["loop_tread_over_dit"] > 0 and "loop tread/dit" in out[-1]


def test_a_row_that_records_cuda_graphs_has_its_own_process_beside_others(monkeypatch):
    started = []

    def run_python(arguments, limit_sec):
        started.append(arguments)
        output = next(a for a in arguments if a.startswith("output=")).partition("=")[2].strip('"')
        row = {"model": "tread", "ms_per_step": 5.0, "gflops_per_image": 2.0, "loop_ms_per_step": 6.0}
        with open(output + ".jsonl", "w") as file:
            file.write("{}\n" + json.dumps(row) + "\n")
        return 0, ""

    monkeypatch.setattr(train_step, "run_python", run_python)
    settings = cli.parse_arguments(
        ["compile=[none,reduce-overhead]", "precision=bf16", "overrides=[a=1]"], train_step.TrainStepSettings
    )
    accelerator = SimpleNamespace(num_processes=1)
    row = train_step.measure_apart(accelerator, "DiT-B/2", "tread", "reduce-overhead", settings)
    child = cli.parse_arguments(started[0][2:], train_step.TrainStepSettings)
    assert (child.backbones, child.models, child.compile, child.plain) == (["DiT-B/2"], ["tread"], ["reduce-overhead"], False)
    assert child.precision == "bf16" and child.overrides == ["a=1"]
    assert (row.rounds_ms, row.loops_ms, row.flops_per_image, row.problem) == ([[5.0]], [6.0], 2e9, None)
    monkeypatch.setattr(train_step, "run_python", lambda arguments, limit_sec: (1, "torch.OutOfMemoryError: CUDA out of memory."))
    row = train_step.measure_apart(accelerator, "DiT-B/2", "dit", "reduce-overhead", settings)
    assert row.problem == row.record()["problem"] == "out of memory"
    with pytest.raises(
        UserError, match="compile=reduce-overhead records CUDA graphs; with several processes it is measured alone"
    ):
        train_step.measure_apart(SimpleNamespace(num_processes=2), "DiT-B/2", "dit", "reduce-overhead", settings)


@pytest.mark.parametrize(
    ("code", "limit_sec", "expected"),
    [
        ("print('x')", 60, (0, "x\n")),
        ("raise SystemExit('error: no [HYDRA_FULL_ERROR=1 shows where]')", 60, "exit code 1: no"),
        ("raise ValueError('wrong')", 60, "exit code 1: ValueError: wrong"),
        ("import torch; raise torch.OutOfMemoryError('x')", 60, "out of memory"),
        ("import time; time.sleep(60)", 1, "not done after 1 s"),
        # Its child has a session of its own, and holds the pipe.
        ("import subprocess; subprocess.run(['sleep', '600'], start_new_session=True)", 1, "not done after 1 s"),
    ],
)
def test_a_process_that_fails_is_a_row_with_a_reason(code, limit_sec, expected):
    result = harness.run_python(["-c", code], limit_sec)
    assert (result if isinstance(expected, tuple) else harness.reason(*result, limit_sec)) == expected


# ----------------------------------------------------------------------------------------------------------------------
# The search for the fastest settings.


def search_with(monkeypatch, tmp_path, speed_of, *given, device="cpu", num_gpus=1):
    """A Search whose rows take `speed_of(changes)` ms; a text is a problem."""
    monkeypatch.setattr(tune, "choose_device", lambda name: torch.device(device))
    monkeypatch.setattr(tune, "resolve_compile", lambda mode, where: "blocks" if device == "cuda" else "none")  # of auto
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    search = tune.Search(tune.TuneSettings(), given, tmp_path)

    def measure(changes):
        ms = speed_of(dict(changes))
        row = {"problem": ms} if isinstance(ms, str) else {"ms_per_step": ms}
        search.rows.setdefault(changes, []).append(row)
        return row

    monkeypatch.setattr(search, "measure", measure)
    return search


def test_the_search_keeps_what_is_faster_and_leaves_what_is_given(monkeypatch, tmp_path):
    gains = {"bf16": 0.6, "blocks": 0.8, "default": 0.9}

    def speed_of(changes):
        ms = 100.0
        for value in changes.values():
            ms *= gains.get(value, 1.1)
        return ms

    search = search_with(monkeypatch, tmp_path, speed_of)
    assert search.command(search.run()) == "python train.py train.compile=blocks train.precision=bf16"
    search = search_with(monkeypatch, tmp_path, speed_of, "train.precision=fp32", "model=dit")
    assert search.command(search.run()) == "python train.py train.precision=fp32 model=dit train.compile=blocks"


def test_a_gain_within_the_noise_does_not_complicate_the_command(monkeypatch, tmp_path):
    search = search_with(monkeypatch, tmp_path, lambda changes: 99.0 if "train.compile" in changes else 100.0)
    assert search.run() == ()
    turns = {"bf16": iter([50.0, 90.0, 120.0]), None: iter([100.0, 100.0, 100.0])}  # faster, but not in every round
    speed_of = lambda changes: next(turns[changes["train.precision"]]) if changes.get("train.precision") else 60.0  # noqa: E731
    search = search_with(monkeypatch, tmp_path, speed_of, "train.compile=none", "train.grad_accum_steps=1")
    assert search.run() in ((), (("train.precision", "bf16"),)) and len(search.rows) == 2


def test_a_choice_is_compared_with_what_it_replaces_at_the_same_time(monkeypatch, tmp_path):
    as_given = iter([200.0, 100.0, 100.0, 100.0, 100.0])  # the machine was busy at first

    def speed_of(changes):
        if not changes:
            return next(as_given)
        return 80.0 if changes == {"train.compile": "blocks"} else 150.0

    search = search_with(monkeypatch, tmp_path, speed_of)
    assert search.run() == (("train.compile", "blocks"),)  # not bf16, and with it blocks at 150


def test_what_does_not_fit_is_cut_into_micro_batches(monkeypatch, tmp_path):
    def speed_of(changes):
        num_images = 64 // int(changes.get("train.grad_accum_steps", 1))
        return "out of memory" if num_images > 16 else 90.0 if num_images == 8 else 100.0

    search = search_with(monkeypatch, tmp_path, speed_of)
    assert search.run() == (("train.grad_accum_steps", "8"),)  # 4 fit; 8 are faster here
    search = search_with(monkeypatch, tmp_path, lambda changes: "out of memory")
    with pytest.raises(UserError, match="train.batch_size=64 in 64 micro-batches does not fit into memory"):
        search.run()
    search = search_with(monkeypatch, tmp_path, lambda changes: "exit code 1: no compiler")
    with pytest.raises(UserError, match="no row could be measured: exit code 1: no compiler"):
        search.run()


def test_on_gpus_kernels_and_parallel_modes_are_tried_with_one_process_for_each(monkeypatch, tmp_path):
    def speed_of(changes):
        if changes.get("train.compile") == "reduce-overhead":
            return "not done after 300 s"
        return 100.0 * (0.8 if changes.get("train.attention") == "cudnn" else 1) * (0.9 if "train.parallel" in changes else 1)

    search = search_with(monkeypatch, tmp_path, speed_of, "train.batch_size=64", device="cuda", num_gpus=8)
    command = search.command(search.run())
    assert command.startswith("accelerate launch --multi_gpu --num_processes 8 train.py train.batch_size=64 ")
    assert "train.attention=cudnn" in command and "train.parallel=fsdp" in command
    tried = {value for changes in search.rows for _, value in changes}
    assert {"fp8", "none", "segments", "default", "reduce-overhead", "flash", "efficient"} <= tried
    assert search_with(monkeypatch, tmp_path, speed_of, "train.batch_size=6", device="cuda", num_gpus=4).num_processes == 3


def test_tune_measures_rows_in_processes_and_prints_the_fastest_command(tmp_path, capsys):
    given = [
        "train.batch_size=4",
        "train.precision=fp32",
        "train.compile=none",
        "train.grad_accum_steps=2",
        "train.cpu_threads=1",
    ]
    tune.main([*given, "device=cpu", "sec_per_row=0.1", f"output={tmp_path / 'tune'}"])
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"fastest: python train.py {' '.join(given)}" and out[0].startswith("as given: ")
    machine, row = (json.loads(line) for line in (tmp_path / "tune.jsonl").read_text().splitlines())
    assert machine["arguments"] == given and row["images_per_sec"] == pytest.approx(4000 / row["ms_per_step"], rel=1e-3)
    assert row["first_step_sec"] > 0 and out[-1].removeprefix("fastest: ") in (tmp_path / "tune.md").read_text()
    with pytest.raises(UserError, match="train.batch is not a key"):
        tune.main(["train.batch=4"])


# ----------------------------------------------------------------------------------------------------------------------
# The verification on a GPU.


def test_every_part_of_the_verification_is_written_down_failed_or_not(monkeypatch, tmp_path, capsys):
    report = """<testsuites><testsuite><testcase name="a" time="1.5"/><testcase name="b" time="2">
        <failure message="assert 3 &lt; 2&#10;more"/></testcase></testsuite></testsuites>"""

    def run_python(arguments, limit_sec):
        assert 0 < limit_sec <= gpu.LIMITS_SEC["tests"]
        if "pytest" in arguments:
            file = next(a for a in arguments if a.startswith("--junitxml=")).partition("=")[2]
            with open(file, "w") as f:
                f.write(report)
            return 1, "1 failed"
        if "part=detector" in arguments:
            return None, ""
        return 0, '{"machine": "x"}\n{"what": "fid", "sec": 1.0}\n'

    monkeypatch.setattr(gpu, "run_python", run_python)
    output = tmp_path / "gpu"
    with pytest.raises(UserError, match=f"failed: tests, detector; {output}.md says why"):
        gpu.main(["parts=[tests,metrics,detector]", "size=small", f"output={output}"])
    lines = [json.loads(line) for line in output.with_suffix(".jsonl").read_text().splitlines()][1:]
    assert [(line["part"], line.get("problem")) for line in lines if "problem" in line] == [
        ("tests", "1 of 2 tests failed"), ("metrics", None), ("detector", "not done after 60 s")
    ]  # fmt: skip
    assert {"part": "tests", "test": "b", "outcome": "failed", "sec": 2.0, "why": "assert 3 < 2"} in lines
    assert "assert 3 < 2" in output.with_suffix(".md").read_text()
    assert {"part": "metrics", "what": "fid", "sec": 1.0} in lines
    said = "tests/gpu/test_a.py::test_one PASSED [ 50%]\ntests/gpu/test_a.py::test_two[x] "
    monkeypatch.setattr(gpu, "run_python", lambda *_: (None, said))  # killed: pytest has written no report
    with pytest.raises(UserError, match="failed: tests"):
        gpu.main(["parts=tests", "size=small", f"output={output}"])
    markdown = output.with_suffix(".md").read_text()
    assert "not done after 480 s" in markdown and "| test_one | passed |" in markdown and "| test_two[x] | not done |" in markdown
    for part, written in (("tests", said), ("metrics", "c10::Error thrown\n")):  # a crash is not failed tests
        monkeypatch.setattr(gpu, "run_python", lambda *_, written=written: (-6, written))
        assert gpu.run_part(part, [], 60)[0]["problem"].startswith("exit code -6: ")
    monkeypatch.setattr(gpu, "run_python", run_python)
    gpu.main(["parts=metrics", "size=small", f"output={output}"])  # the other parts stay
    markdown = output.with_suffix(".md").read_text()
    assert "## tests" in markdown and "test_two[x]" in markdown and "| fid | 1 |" in markdown
    with pytest.raises(UserError, match="failed: metrics"):
        gpu.main(["parts=metrics", "size=small", f"output={output}", "total_sec=1e-9"])
    assert "total_sec is over" in output.with_suffix(".md").read_text()


@pytest.mark.parametrize("size", ["small", "full"])
def test_the_arguments_of_every_part_are_accepted(size, monkeypatch):
    from extras.benchmarks import evaluation

    settings = {"train_step": train_step.TrainStepSettings, "sampling": sampling.SamplingSettings}
    settings["evaluation"] = evaluation.TimingSettings
    commands = gpu.plan(size, torch.device("cuda"))
    assert commands.keys() == gpu.LIMITS_SEC.keys()
    for name, (_, module, *arguments) in commands.items():
        if name != "tests":
            cli.parse_arguments(arguments, settings[module.removeprefix("benchmarks.")])


def test_a_part_of_the_verification_runs(tmp_path, capsys):
    gpu.main(["parts=step_xl2", "size=small", f"output={tmp_path / 'gpu'}"])
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert lines[1]["problem"] is None and lines[-1]["loop_tread_over_dit"] > 0
    assert "## step_xl2" in (tmp_path / "gpu.md").read_text()
