"""The estimate of a run's memory: against what its steps allocate, and what is refused because of it."""

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import composed, forget_accelerate
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile

from configs import schema
from extras.alignment import Alignment, Projector
from extras.benchmarks.harness import open_accelerator
from extras.benchmarks.trainers import CommonSettings, data_overrides, open_trainer
from training import build, memory

LATENTS = ["data=custom", "data.in_channels=4", "data.input_size=32", "data.num_classes=1000", "data.scale_factor=0.18215"]


def estimated(*overrides, num_processes=1, data=LATENTS, alignment=None):
    overrides = ["train.compile=none", *overrides]
    cfg = schema.check(composed([*data, *overrides]), schema.TrainConfig)
    return memory.estimate(cfg.train, partial(build.build_network, cfg), num_processes, alignment)


def peak_of_two_steps(*overrides, resolution=256):
    """The most bytes that tensors of a trainer hold at once, as torch's allocator counts them."""
    settings = CommonSettings(overrides=list(overrides), resolution=resolution)
    accelerator = open_accelerator("cpu", 1, "fp32")
    with data_overrides(settings) as data, profile(profile_memory=True) as profiled:
        trainer = open_trainer(accelerator, settings, data)
        batches = trainer.batches()
        for _ in range(2):
            trainer.train_step(next(batches))
    held = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    "settings", [[], ["train.activation_checkpointing=blocks"], ["train.activation_checkpointing=selective"]]
)
def test_the_estimate_is_within_a_tenth_of_what_the_steps_allocate(settings):
    forget_accelerate()
    own = ["model=tread", "model.backbone=DiT-XS/2", "train.batch_size=4", "train.precision=fp32", *settings]
    needed = sum(estimated(*own).values())
    assert needed == pytest.approx(peak_of_two_steps(*own), rel=memory.MARGIN)


@pytest.mark.parametrize("block", [1, 4])  # before the route and inside of it
def test_the_projector_and_the_encoder_of_alignment_are_counted(block):
    forget_accelerate()
    own = ["model=tread", "model.backbone=DiT-XS/2", "train.batch_size=64", "train.precision=fp32", "alignment=repa"]
    own += ["alignment.encoder=digits", f"alignment.block={block}", "alignment.projector_width=2048"]
    projector = Projector(96, 2048, 48)
    alignment = Alignment(projector, encode=None, fetch=None, tap=block, encoder_bytes=290_000)
    parts = estimated(*own, data=["data=digits"], alignment=alignment)
    plain = estimated(*own, data=["data=digits"])
    size = sum(p.nbytes for p in projector.parameters())
    grown = {name: parts[name] - plain.get(name, 0) for name in parts}
    assert {name: grown[name] for name in ("weights", "AdamW", "EMA")} == {"weights": size, "AdamW": 2 * size, "EMA": 0}
    assert grown["encoder"] == 290_000 and grown["activations or gradients"] > 0
    assert sum(parts.values()) == pytest.approx(peak_of_two_steps(*own, resolution=8), rel=memory.MARGIN)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    "network",
    [["model=tread", "model.backbone=DiT-XS/8"], ["model=lightningdit_tread", "model.backbone=LightningDiT-XS/2"]],
    ids=["DiT", "LightningDiT"],
)
def test_what_a_forward_keeps_is_counted_without_running_it(network, precision, is_compiled):
    """Also with torch's partitioner, which decides what a compiled block keeps."""
    mode = "blocks" if is_compiled else "none"
    keys = [
        *network,
        "train.batch_size=2",
        f"train.precision={precision}",
        f"train.compile={mode}",
    ]
    cfg = schema.check(composed([*LATENTS, *keys]), schema.TrainConfig)
    net = build.build_network(cfg).train()
    x, t, y = torch.randn(2, 4, 32, 32), torch.rand(2), torch.zeros(2, dtype=torch.int64)
    if is_compiled:
        for block in net.blocks:
            block.forward = torch.compile(block.forward, dynamic=False, backend="aot_eager_decomp_partition")
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        kept = memory.saved_for_backward(net, lambda: net(x, t, y).sum()).total()
    with FakeTensorMode():
        needed, _ = memory._activations(nn.ModuleDict({"net": build.build_network(cfg).train()}), cfg.train, 2, tap=None)
    assert needed == pytest.approx(kept, rel=0.01)


def test_the_parts_are_those_of_the_parallel_mode():
    xl = ["model=tread", "model.backbone=DiT-XL/2", "train.batch_size=256"]
    size = 4 * 674.8e6  # bytes of the weights
    ddp = estimated(*xl, num_processes=8)
    assert ddp["weights"] == pytest.approx(size, rel=1e-3) and ddp["AdamW"] == pytest.approx(2 * size, rel=1e-3)
    assert ddp["gradients"] == pytest.approx(size, rel=1e-3)  # the buckets
    assert estimated(*xl, "train.grad_accum_steps=2", num_processes=8)["gradients"] == 2 * ddp["gradients"]
    fsdp = estimated(*xl, "train.parallel=fsdp", num_processes=8)
    assert fsdp["AdamW"] == pytest.approx(ddp["AdamW"] / 8, rel=1e-3)
    assert fsdp["gathered weights"] == pytest.approx(size / 2, rel=0.08)  # bfloat16, but for the block after the route
    again = estimated(*xl, "train.parallel=fsdp", "train.fsdp_reshard=after_forward", num_processes=8)
    assert again["gathered weights"] < 0.2 * fsdp["gathered weights"]


@pytest.fixture
def gpu(monkeypatch):
    """gpu(GiB) -> an accelerator with one CUDA device that has as much free memory."""

    def accelerator(free_gib):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free_gib * 2**30), 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
        return SimpleNamespace(device=torch.device("cuda"), is_main_process=False, num_processes=1)

    return accelerator


def checked(accelerator, *overrides):
    cfg = schema.check(composed([*LATENTS, "train.compile=none", *overrides]), schema.TrainConfig)
    return memory.check_memory(cfg.train, partial(build.build_network, cfg), accelerator)


def test_a_run_that_cannot_fit_is_refused_with_the_micro_batch_that_does(gpu):
    own = ["model=dit", "model.backbone=DiT-XS/2", "train.batch_size=16"]
    needed = sum(estimated(*own).values()) / 2**30
    assert checked(gpu(0.95 * needed), *own).startswith("about ")  # an estimate may be wrong by a tenth
    refusal = r"train.batch_size=16 with train.grad_accum_steps=1 needs about .* activations .*; Some GPU has .* GiB free. "
    with pytest.raises(ValueError, match=refusal + r"Set train.grad_accum_steps=2 \("):
        checked(gpu(0.7 * needed), *own)
    smallest = sum(estimated(*own, "train.grad_accum_steps=16", "train.activation_checkpointing=blocks").values()) / 2**30
    with pytest.raises(ValueError, match=refusal + r"Set train.grad_accum_steps=\d+ train.activation_checkpointing=blocks \("):
        checked(gpu(1.2 * smallest), *own)
    with pytest.raises(ValueError, match=refusal + "One image at a time does not fit either: use train.parallel=fsdp"):
        checked(gpu(0.5 * smallest), *own)


def test_training_says_what_it_needs_once(train, caplog):
    with caplog.at_level(logging.INFO):
        train("run", "train.num_steps=1")
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("memory ")]
    assert len(lines) == 1 and "GiB per process: weights" in lines[0]


def test_other_processes_without_a_gpu_do_not_compute_it():
    accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=False, num_processes=2)
    assert memory.check_memory(None, None, accelerator) == ""
