"""`train.cuda_graphs`: a graph of the step gives the bits of plain steps. tests/gpu captures real graphs."""

import contextlib
import gc
import itertools
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import checked, make_shard, run_train
from gpu.runs import SMALL, compiler_for, keys_of_repa, trainer_for
from recorded_graph import RecordedGraph
from safetensors.torch import load_file
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import dit
from common.errors import UserError
from configs.schema import TrainConfig
from configs.settings import read_stored
from edm import EDM
from extras import lightningdit, sprint
from runtime import compilation, cuda_graph
from runtime.compilation import check_machine
from training import step_graph, trainer
from training.step_graph import StaticRandom, StepGraph
from training.trainer import StepRandom, Trainer, learning_rate

CPU, GPU = torch.device("cpu"), torch.device("cuda")
# The graph is captured in step 3 and replayed in steps 3 to 7.
KEYS = ["model.backbone=DiT-XS/2", "train.num_steps=7", "train.warmup_steps=5", "train.grad_clip_norm=0.1"]
KEYS += ["train.precision=bf16", "checkpoint.every=4", "checkpoint.keep_last=9"]
GRAPH = "train.cuda_graphs=step"
ACCUMULATION = ["train.grad_accum_steps=2", "model.selection=importance"]
SPRINT = ["model=sprint", "model.path_drop=0.5", "diffusion=sit"]
SETTINGS = {
    "tread": [],
    "accumulation, importance": ACCUMULATION,
    "accumulation over four": ["train.grad_accum_steps=4"],
    "sprint, sit": SPRINT,
    "checkpointing": ["train.activation_checkpointing=blocks"],
    "muon": ["train.optimizer=muon"],
    "averages of chosen lengths": ["train.ema_lengths=[0.1,0.2]", "train.ema_snapshot_every=4"],
    "lightningdit, sit": ["model=lightningdit_tread", "model.backbone=LightningDiT-XS/2", "diffusion=sit"],
    "moments": ["data=custom"],
    "moments, sprint, accumulation": ["data=custom", *SPRINT, "train.grad_accum_steps=2"],
    "repa": ["repa"],
}


@pytest.fixture(autouse=True)
def small_networks(monkeypatch):
    """The networks are so small that their checkpoints take 1 MB. Their depth is the usual one, as routes need it."""
    for module, name in ((dit, "DiT-XS/2"), (sprint, "DiT-XS/2"), (lightningdit, "LightningDiT-XS/2")):
        monkeypatch.setitem(module.BACKBONES, name, (12, 24, 3, 2))


@pytest.fixture
def graphs(monkeypatch):
    """Fixture: the stand-ins that runs with `GRAPH` make. Without it, they make none."""
    made = []
    monkeypatch.setattr(compilation, "why_no_cuda_graph", lambda *args: None)
    monkeypatch.setattr(step_graph, "CUDAGraph", lambda device: made.append(RecordedGraph(device)) or made[-1])
    return made


def data_keys(keys, folder):
    if "repa" in keys:
        return keys_of_repa(SMALL, folder)
    if "data=custom" in keys:
        make_shard(folder / "data" / "a.safetensors", kind="moments", size=8)
        return [*keys, f"data.path={folder / 'data'}"]
    return keys


def contents(run):
    """Return all tensors of the run's checkpoints, and its metrics without times."""
    found = {}
    for file in sorted((run / "checkpoints").rglob("*.*")):
        if file.suffix == ".safetensors":
            found |= {f"{file.parent.name}/{file.name}/{name}": x for name, x in load_file(file).items()}
        elif file.suffix == ".pt":
            states = torch.load(file, weights_only=True)["state"]
            found |= {f"{file.parent.name}/{name}/{key}": x for name, state in states.items() for key, x in state.items()}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return found, [{key: value for key, value in line.items() if "sec" not in key} for line in lines]


def differences(first, second):
    (tensors, lines), (other_tensors, other_lines) = map(contents, (first, second))
    assert tensors.keys() == other_tensors.keys() and len(lines) == len(other_lines) == 7
    found = [name for name, x in tensors.items() if not torch.equal(x, other_tensors[name])]
    return found + [line["step"] for line, other in zip(lines, other_lines) if line != other]


@pytest.fixture(scope="module")
def plain_runs():
    """Fixture: {name: (keys, folder of the run with plain steps)}."""
    return {}


@pytest.fixture
def plain(graphs, plain_runs, tmp_path_factory):
    """Fixture: plain(name) returns the keys of these settings and the folder of their run with plain steps, made once."""

    def make(name):
        if name not in plain_runs:
            keys = [*KEYS, *data_keys(SETTINGS[name], folder := tmp_path_factory.mktemp("plain"))]
            plain_runs[name] = keys, run_train(folder, "plain", *keys)
            assert graphs == []
        return plain_runs[name]

    return make


@pytest.mark.parametrize("name", SETTINGS)
def test_replayed_steps_give_the_bits_of_plain_steps(graphs, plain, tmp_path, name):
    keys, expected = plain(name)
    replayed = run_train(tmp_path, "replayed", *keys, GRAPH)
    assert differences(expected, replayed) == []
    assert len(graphs) == 1 and graphs[0].calls == []  # one graph serves all micro-batches and is free after training


@pytest.mark.parametrize("name", ["tread", "accumulation, importance", "muon"])
def test_a_resumed_run_warms_up_and_captures_again(graphs, plain, tmp_path, name):
    keys, expected = plain(name)
    for num_steps in (4, 7):
        run = run_train(tmp_path, "parts", *keys, GRAPH, f"train.num_steps={num_steps}")
    assert differences(expected, run) == []


@pytest.mark.parametrize("kind", ["grid", "samples", "validation"])
def test_hooks_that_run_a_network_find_the_memory_of_the_graph_free(graphs, tmp_path, monkeypatch, kind):
    sizes, at_networks, batches, forward = [], [], Trainer.batches, dit.DiT.forward

    def batches_and_record(trainer):
        for micro_batches in batches(trainer):
            sizes.append(len(graphs[0].calls))
            yield micro_batches
        sizes.append(len(graphs[0].calls))

    def record_and_run(net, *args, **kwargs):
        if not net.training:  # the EMA network
            in_use = [x for reference in graphs[0].tensors if (x := reference()) is not None]
            at_networks.append((len(sizes), len(graphs[0].calls), in_use))
        return forward(net, *args, **kwargs)

    make_shard(tmp_path / "held_out" / "a.safetensors", channels=1, size=8, num_classes=10)
    looks = {
        "grid": ["sample_grid.every=5", "sample_grid.num_samples=2", "sampler.num_steps=1"],
        "samples": ["evaluation.every=5", "evaluation.num_samples=4", "sampler.num_steps=1", "guidance=none"],
        "validation": ["evaluation.every=5", "evaluation.reference=null", f"evaluation.validation={tmp_path / 'held_out'}"],
    }[kind]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "batches", batches_and_record)
        patch.setattr(dit.DiT, "forward", record_and_run)
        replayed = run_train(tmp_path, "replayed", *KEYS, GRAPH, *looks)
    # After steps 0 to 7: the graph exists from step 3 on. Lines of metrics and checkpoints keep it, and these hooks free it.
    assert [size > 0 for size in sizes] == [False, False, False, True, True, False, True, False]
    # (step, operations in the graph, its tensors that are in use)
    assert [key for key, _ in itertools.groupby(at_networks)] == [(5, 0, []), (7, 0, [])]
    assert differences(run_train(tmp_path, "plain", *KEYS, *looks), replayed) == []


def test_the_graph_is_free_after_an_error(graphs, tmp_path, monkeypatch):
    update = trainer.EMA.update

    def fail(ema, step):
        update(ema, step)
        if step == 4:
            raise ZeroDivisionError(len(graphs[0].calls))

    monkeypatch.setattr(trainer.EMA, "update", fail)
    with pytest.raises(ZeroDivisionError) as error:
        run_train(tmp_path, "run", *KEYS, GRAPH)
    assert error.value.args[0] > 0 and graphs[0].calls == []


# ----------------------------------------------------------------------------------------------------------------------
# The comparison finds what a graph would freeze.


def keep_labels(monkeypatch):
    fill = StepGraph._fill

    def fill_other_inputs(graph, random_for, inputs):
        fill(graph, random_for, (inputs[0], graph._inputs[1]) if graph._inputs else inputs)

    monkeypatch.setattr(StepGraph, "_fill", fill_other_inputs)


def keep_random_numbers(monkeypatch):
    monkeypatch.setattr(StaticRandom, "refill", lambda random, source: None)


def scale_loss_by_the_rate(monkeypatch):
    compute_gradients = Trainer.compute_gradients

    def compute(own, *args):
        before = [None if p.grad is None else p.grad.clone() for p in own.parameters.values()]
        found = compute_gradients(own, *args)
        for p, old in zip(own.parameters.values(), before):
            if old is None:
                p.grad.mul_(learning_rate(own.cfg.train, own.step) / own.cfg.train.lr)
        return found

    monkeypatch.setattr(Trainer, "compute_gradients", compute)


def lose_gradients(monkeypatch):
    call = StepGraph.__call__

    def call_and_lose(graph, *args):
        found = call(graph, *args)
        if graph._outputs is not None:
            for p in graph._parameters:
                p.grad = None
        return found

    monkeypatch.setattr(StepGraph, "__call__", call_and_lose)


def keep_gradients(monkeypatch):
    monkeypatch.setattr(torch, "_foreach_zero_", lambda tensors: None)


def no_replay_after_the_capture(monkeypatch):
    replay, calls = RecordedGraph.replay, []
    monkeypatch.setattr(RecordedGraph, "replay", lambda graph: replay(graph) if calls else calls.append(1))


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (keep_labels, "tread"),
        (keep_random_numbers, "tread"),
        (scale_loss_by_the_rate, "tread"),
        (lose_gradients, "tread"),
        (no_replay_after_the_capture, "tread"),
        (keep_gradients, "accumulation, importance"),
    ],
)
def test_the_comparison_finds_what_a_graph_freezes(graphs, tmp_path, monkeypatch, damage, name):
    keys = [*KEYS, "train.grad_clip_norm=null", *SETTINGS[name]]
    with monkeypatch.context() as patch:
        damage(patch)
        plain = run_train(tmp_path, "plain", *keys)
    damage(monkeypatch)
    try:
        replayed = run_train(tmp_path, "replayed", *keys, GRAPH)
    except UserError as e:  # NaN
        assert "NaN" in str(e)
        return
    found = differences(plain, replayed)
    assert 4 in found and 1 not in found  # the first step computes with its own values


@pytest.mark.parametrize("inside", [lambda: torch.rand(2), lambda: torch.tensor([1.0])])
def test_the_stand_in_refuses_what_cuda_does(inside):
    with pytest.raises(AssertionError, match="inside the graph"):
        RecordedGraph(CPU).capture(lambda: [inside()])


# ----------------------------------------------------------------------------------------------------------------------
# What a capture needs of the trainer.


@pytest.mark.parametrize("part", [slice(0, 8), slice(0, 4), slice(4, 8)])
def test_static_random_numbers_are_those_of_each_step(part):
    def draw(random):
        return [random.randn(), *EDM().draw_levels(random), random.randn(3, 2), random.rand(), random.randn()]

    sources = [StepRandom(5, step, "diffusion", 8, part, CPU) for step in (0, 0, 1, 1)]
    static = StaticRandom(sources[0])
    first = draw(static.rewind())
    assert all(torch.equal(a, b) for a, b in zip(first, draw(sources[1])))
    static.refill(sources[2])
    again = draw(static.rewind())
    assert all(torch.equal(a, b) for a, b in zip(again, draw(sources[3])))
    drawn = [0, 3, 4, 5]  # levels and quantiles are computed
    assert [first[i].data_ptr() for i in drawn] == [again[i].data_ptr() for i in drawn]


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("name", ["tread", "accumulation, importance", "repa"])
def test_no_gradient_node_outlives_a_step(tmp_path, monkeypatch, name, is_kept):
    """A node that lives on would bring the stream of its step into the capture."""
    losses, loss = [], EDM.loss

    def mark(edm, *args, **kwargs):
        losses.append(loss(edm, *args, **kwargs))
        for p in own.parameters.values():
            get_gradient_edge(p).node.metadata["step"] = own.step
        return losses[-1] if is_kept else losses.pop()

    own = trainer_for(CPU, SMALL, tmp_path, *data_keys(SETTINGS[name], tmp_path))
    monkeypatch.setattr(EDM, "loss", mark)
    batches = own.batches()
    for _ in range(2):
        own.train_step(next(batches))
    found = [get_gradient_edge(p).node.metadata for p in own.net.blocks.parameters()]
    assert all(("step" in metadata) == is_kept for metadata in found)


def test_gradients_that_are_kept_cause_no_recompilation(tmp_path):
    with compiler_for(CPU):
        own = trainer_for(CPU, SMALL, tmp_path, "machine.compile=blocks")
        batches = own.batches()
        for _ in range(2):
            own.train_step(next(batches))
        for p in own.parameters.values():
            p.grad = torch.zeros_like(p)
        with torch._dynamo.config.patch(error_on_recompile=True):
            own.train_step(next(batches))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


# ----------------------------------------------------------------------------------------------------------------------
# The key, and what a capture asks of CUDA.


@pytest.mark.parametrize("compile", ["blocks", "none"])
def test_graphs_are_refused_where_they_cannot_work(monkeypatch, compile):
    monkeypatch.delenv("TORCHINDUCTOR_CUDAGRAPHS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    with_graphs, plain = (checked([f"train.cuda_graphs={mode}", f"machine.compile={compile}"]) for mode in ("step", "none"))
    for device, num_processes, reason in ((CPU, 1, "there is no GPU"), (GPU, 2, "several processes")):
        with pytest.raises(UserError, match=f"^train.cuda_graphs=step: .*{reason}.*; set train.cuda_graphs=none$"):
            check_machine(with_graphs, device, num_processes)
        check_machine(plain, device, num_processes)
    check_machine(with_graphs, GPU, 1)
    monkeypatch.setenv("TORCHINDUCTOR_CUDAGRAPHS", "1")
    with pytest.raises(UserError, match="TORCHINDUCTOR_CUDAGRAPHS=1"):
        check_machine(with_graphs, GPU, 1)
    check_machine(plain, GPU, 1)


def test_auto_of_earlier_versions_means_none():
    typed, usual = checked(["train.cuda_graphs=auto"]), checked()
    assert typed.train.cuda_graphs == "none" and typed.model_dump() == usual.model_dump()
    before = usual.model_dump()
    before["train"]["cuda_graphs"] = "auto"
    assert read_stored(before, TrainConfig, "config.yaml") == usual
    with pytest.raises(UserError, match="train.cuda_graphs='blocks': Input should be 'none' or 'step'"):
        checked(["train.cuda_graphs=blocks"])


class CUDA:
    """torch.cuda on a machine without a GPU. `calls` lists what was asked of it."""

    def __init__(self, error=None):
        self.calls, self.error, self.is_collecting = [], error, None

    def Stream(self, device):
        return SimpleNamespace(wait_stream=lambda other: self.calls.append("capture stream waits"))

    def current_stream(self):
        return SimpleNamespace(wait_stream=lambda other: self.calls.append("current stream waits"))

    def set_stream(self, stream):
        self.calls.append("set stream")

    def stream(self, stream):
        return self.context("stream")

    def CUDAGraph(self):
        return SimpleNamespace(replay=partial(self.calls.append, "replay"), reset=partial(self.calls.append, "reset"))

    def graph(self, graph, stream, capture_error_mode):
        return self.context(f"capture {capture_error_mode}")

    def context(self, name):
        @contextlib.contextmanager
        def entered():
            self.calls.append(name)
            self.is_collecting = gc.isenabled()
            try:
                yield
            finally:
                if self.error:
                    raise self.error
            self.calls.append("end")

        return entered()


def test_warm_up_and_capture_share_a_stream_and_nothing_is_collected_during_the_capture(monkeypatch):
    cuda = CUDA()
    monkeypatch.setattr(cuda_graph.torch, "cuda", cuda)
    graph = cuda_graph.CUDAGraph(GPU)
    assert graph.warm_up(lambda: 3) == 3
    assert cuda.calls == ["capture stream waits", "stream", "end", "current stream waits"]
    cuda.calls.clear()
    assert graph.capture(lambda: 4) == 4 and cuda.is_collecting is False and gc.isenabled()
    graph.replay(), graph.reset(), graph.reset()
    assert cuda.calls == ["capture thread_local", "end", "set stream", "replay", "reset"]


def test_a_capture_that_fails_names_the_first_cause_and_in_training_the_key(monkeypatch):
    def run_out_of_memory(*inputs: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory\nmore")

    cuda = CUDA(RuntimeError("capture failed due to a previous error"))
    monkeypatch.setattr(cuda_graph.torch, "cuda", cuda)
    with pytest.raises(UserError, match=r"^the GPU cannot capture a CUDA graph \(CUDA out of memory\)$"):  # also in benchmarks
        cuda_graph.CUDAGraph(GPU).capture(run_out_of_memory)
    assert gc.isenabled() and cuda.calls[-1] == "set stream"
    with pytest.raises(UserError, match="train.cuda_graphs: .*CUDA out of memory.*set train.cuda_graphs=none$"):
        StepGraph(run_out_of_memory, [], 1, GPU)._capture()
