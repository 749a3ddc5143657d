"""Between two lines of metrics, training asks the device for no value: each such call would wait for it.

On a CPU the calls are counted. On the meta device, whose tensors have no values, each of them raises.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.tensor  # accelerate would import it while torch.Generator is patched
from accelerate import Accelerator
from conftest import TINY, composed, forget_accelerate, run_train
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functional_call

from configs import schema
from training import build
from training.ema import EMA
from training.run import RunFolder
from training.trainer import Trainer

WAITING = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__")
SETTINGS = {
    "routed": [],
    "dense": ["model=dit"],
    "importance": ["model.selection=importance"],
    "sit": ["diffusion=sit"],
    "clipping": ["train.grad_clip_norm=1"],
    "accumulation": ["train.grad_accum_steps=2"],
    "checkpointing": ["train.activation_checkpointing=selective"],
    "workers": ["data.num_workers=2"],
    "grids and evaluations": ["sample.every=6", "sample.num_samples=2", "eval.every=6", "eval.num_samples=4", "eval.num_steps=1"],
}


@contextlib.contextmanager
def recorded_waits():
    """A list that gets the name of every call that would wait for a device."""
    calls = []

    def recorded(name):
        original = getattr(torch.Tensor, name)
        return lambda *args, **kwargs: calls.append(name) or original(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name in WAITING:
            stack.enter_context(mock.patch.object(torch.Tensor, name, recorded(name)))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize", lambda *args: calls.append("synchronize")))
        yield calls


@pytest.mark.parametrize("name", SETTINGS)
def test_steps_between_two_lines_of_metrics_wait_for_nothing(tmp_path, monkeypatch, name):
    calls_before_step, train_step = [], Trainer.train_step
    with recorded_waits() as calls:
        monkeypatch.setattr(Trainer, "train_step", lambda *args: calls_before_step.append(len(calls)) or train_step(*args))
        run_train(tmp_path, "run", "train.num_steps=6", "train.log_every=6", *SETTINGS[name])
        torch.ones(1).item()
    # Steps 1 to 5, with all that the loop does after each.
    assert len(calls_before_step) == 6 and calls_before_step[-1] == calls_before_step[0], calls[calls_before_step[0] :]
    assert calls[-1] == "item" and len(calls) > calls_before_step[-1] + 1  # the line of metrics waits


# ----------------------------------------------------------------------------------------------------------------------
# Devices that are not here.


@contextlib.contextmanager
def a_device_without_generators(device):
    """Generators of the CPU serve it, and autocast is off."""
    make_generator = torch.Generator
    with (
        mock.patch.object(torch, "Generator", lambda *args: make_generator()),
        mock.patch.object(torch, "is_autocast_enabled", lambda *args: False),
        mock.patch.object(Accelerator, "device", torch.device(device)),
    ):
        yield


def open_settings_and_data(overrides):
    forget_accelerate()
    return build.open_data(schema.check(composed([*TINY, *overrides]), schema.TrainConfig))


def build_trainer(cfg, dataset):
    """As train.py builds it, without grids and evaluations."""
    net = build.build_network(cfg)
    ema, run = EMA(net, cfg.train.ema_decay), RunFolder(cfg.output_dir, cfg.name)
    return Trainer(Accelerator(cpu=True), cfg, net, ema, build.build_diffusion(cfg.diffusion), dataset, run)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "grids and evaluations"])
def test_whole_steps_run_on_a_device_whose_tensors_have_no_values(name):
    cfg, dataset = open_settings_and_data(SETTINGS[name])
    with a_device_without_generators("meta"):
        trainer = build_trainer(cfg, dataset)
        batches = trainer.batches()
        for _ in range(3):
            trainer.train_step(next(batches))
        assert {p.device.type for p in trainer.net.parameters()} == {trainer.loss_sums.device.type} == {"meta"}
        with pytest.raises(RuntimeError, match="meta"):
            trainer._mean_losses()


@pytest.mark.parametrize("name", ["routed", "dense", "importance", "sit"])
def test_the_loss_of_a_gpu_takes_no_tensor_that_stayed_on_the_cpu(name):
    cfg, dataset = open_settings_and_data(SETTINGS[name])
    net = build.build_network(cfg).train()
    shapes = {name: p.shape for name, p in net.named_parameters()}
    with FakeTensorMode(), a_device_without_generators("cuda"):
        # Modules that hold fake tensors cannot be moved, so the weights are replaced for the call.
        weights = {name: torch.empty(shape, device="cuda") for name, shape in shapes.items()}
        trainer = dict(cfg=cfg, step=0, dataset=dataset, net=net, diffusion=build.build_diffusion(cfg.diffusion))
        trainer |= dict(device=torch.device("cuda"), model=lambda *args, **draws: functional_call(net, weights, args, draws))
        stored, labels = torch.empty(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
        (loss,) = Trainer.losses(SimpleNamespace(**trainer), slice(0, 4), stored, labels)
        assert loss.device.type == "cuda"
        with pytest.raises(DataDependentOutputException):
            loss.item()
