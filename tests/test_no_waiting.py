"""Between two lines of metrics, training reads no value from the device: each read would wait for it."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed.tensor  # accelerate would import it while torch.Generator is patched
from conftest import run_train
from recorded_graph import RecordedGraph
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functional_call

from runtime import compilation
from training import step_graph
from training.step_metrics import STEP_METRICS
from training.trainer import Trainer

WAITING = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__")
SETTINGS = {
    "defaults": [],
    "importance, clipping, accumulation and checkpointing": [
        "model.selection=importance", "train.activation_checkpointing=blocks",
        "train.grad_clip_norm=1", "train.grad_accum_steps=2",
    ],
    "sit, workers, grids and evaluations": [
        "diffusion=sit", "data.num_workers=2",
        "sample_grid.every=6", "sample_grid.num_samples=2", "evaluation.every=6", "evaluation.num_samples=4",
        "sampler.num_steps=1",
    ],
    "graph": ["train.cuda_graphs=step", "train.grad_accum_steps=2"],  # the third step captures it
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_between_two_lines_of_metrics_wait_for_nothing(tmp_path, monkeypatch, name):
    if name == "graph":
        monkeypatch.setattr(compilation, "why_no_cuda_graph", lambda *args: None)
        monkeypatch.setattr(step_graph, "CUDAGraph", RecordedGraph)
    calls, calls_before_step, train_step = [], [], Trainer.train_step

    def recorded(waiting, original):
        return lambda *args, **kwargs: calls.append(waiting) or original(*args, **kwargs)

    for waiting in WAITING:
        monkeypatch.setattr(torch.Tensor, waiting, recorded(waiting, getattr(torch.Tensor, waiting)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: calls.append("synchronize"))
    monkeypatch.setattr(Trainer, "train_step", lambda *args: calls_before_step.append(len(calls)) or train_step(*args))
    calls_of_metrics = []

    def measured(metric, trainer):
        before = len(calls)
        value = metric(trainer)
        calls_of_metrics.append(calls[before:])
        return value

    for metric in [*STEP_METRICS]:
        monkeypatch.setitem(STEP_METRICS, metric, partial(measured, STEP_METRICS[metric]))
    run_train(tmp_path, "run", "train.num_steps=6", "train.log_every=6", *SETTINGS[name])
    # Steps 1 to 5 and the code of the loop after each of them made no such call.
    assert len(calls_before_step) == 6 and calls_before_step[-1] == calls_before_step[0], calls[calls_before_step[0] :]
    assert calls_of_metrics == [[]] * len(STEP_METRICS)
    assert len(calls) > calls_before_step[-1]  # writing the line of metrics waits


@pytest.mark.parametrize("key", ["model.selection=importance", "diffusion=sit"])
def test_every_tensor_of_a_micro_batch_is_moved_to_the_gpu(tmp_path, monkeypatch, key):
    compute_gradients, make_generator = Trainer.compute_gradients, torch.Generator
    seen = []

    def compute_on_a_gpu(own, random_for, stored, labels):
        """Compute the losses on a GPU with fake tensors, which have no values, and then the real gradients."""
        on_gpu, net = copy.copy(own), own.net
        on_gpu.device = torch.device("cuda")
        random_on_gpu = partial(random_for.func, *random_for.args, **random_for.keywords | {"device": on_gpu.device})
        generators = mock.patch.object(torch, "Generator", lambda *args: make_generator())  # on the CPU
        no_autocast = mock.patch.object(torch, "is_autocast_enabled", lambda *args: False)
        no_backward = mock.patch.object(torch.Tensor, "backward", lambda loss: None)  # it needs a driver
        pinned = mock.patch.object(torch.Tensor, "pin_memory", lambda x: x)  # as those of the reader are
        with FakeTensorMode(), generators, no_autocast, no_backward, pinned:
            weights = {key: torch.empty(p.shape, device="cuda") for key, p in net.named_parameters()}
            on_gpu.wrapped = {"net": lambda *args, **draws: functional_call(net, weights, args, draws)}
            inputs = torch.empty(stored.shape), torch.zeros(labels.shape, dtype=labels.dtype)
            losses, bin_sums = compute_gradients(on_gpu, random_on_gpu, *inputs)
            assert losses.device.type == bin_sums.device.type == "cuda"
            with pytest.raises(DataDependentOutputException):
                losses[0].item()
        seen.append(losses)
        return compute_gradients(own, random_for, stored, labels)

    monkeypatch.setattr(Trainer, "compute_gradients", compute_on_a_gpu)
    run_train(tmp_path, "run", "train.num_steps=1", key)
    assert len(seen) == 1
