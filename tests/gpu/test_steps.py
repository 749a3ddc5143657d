"""The trainer's steps: nothing waits or is compiled again, and they cost what they should."""

import contextlib
import gc
import json
from statistics import median
from unittest import mock

import pytest
import torch
from conftest import forget_accelerate
from torch._inductor import config as inductor

import dit
from extras.benchmarks import train_step
from extras.benchmarks.harness import time_ms
from extras.benchmarks.trainers import run_loop
from gpu.runs import SMALL, compiler_for, open_trainer
from routing_module import Route
from training import build, machine, memory


@contextlib.contextmanager
def nothing_waits(device):
    """Raise where the host waits for the device.

    torch's debug mode sees waits for a stream and copies to the host (item, tolist, bool, cpu), not these functions, which wait
    for the whole device or for an event.
    """

    def wait(*args, **kwargs):
        raise AssertionError("the host waits for the device")

    owners = (torch.cuda, torch.accelerator, torch.cuda.Event, torch.cuda.Stream)
    with contextlib.ExitStack() as stack:
        for owner in owners:
            stack.enter_context(mock.patch.object(owner, "synchronize", wait))
        if device.type == "cuda":
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("error")
        yield


def test_the_guard_sees_what_waits(device):
    x = torch.ones((), device=device)
    with nothing_waits(device):
        x.add_(1)
        with pytest.raises(AssertionError, match="waits for the device"):
            torch.cuda.synchronize()
        if device.type == "cuda":
            with pytest.raises(RuntimeError, match="synchroniz"):
                x.item()
    assert x.item() == 2


@pytest.mark.parametrize("keys", [[], ["train.grad_accum_steps=2", "train.grad_clip_norm=1"]])
def test_nothing_waits_between_two_log_lines(device, size, tmp_path, keys):
    trainer = open_trainer(device, size, tmp_path, "train.log_every=20", *keys)
    guard, logged, write_line = contextlib.ExitStack(), [], trainer._log

    def log(*args):
        guard.close()
        logged.append(trainer.step)
        result = write_line(*args)
        if trainer.step < 40:
            guard.enter_context(nothing_waits(device))
        return result

    with mock.patch.object(trainer, "_log", log), guard:
        run_loop(trainer, 40)
    assert logged == [20, 40]


def test_nothing_is_compiled_again_after_the_first_steps(device, size, tmp_path):
    with compiler_for(device):
        trainer = open_trainer(device, size, tmp_path, "train.compile=blocks")
        run_loop(trainer, 3)
        stats = torch._dynamo.utils.counters["stats"]
        num_graphs = stats["unique_graphs"]
        with torch._dynamo.config.patch(error_on_recompile=True):
            run_loop(trainer, 10)
    # All tokens, all tokens without a gradient for the input, the routed ones, and the float32 block after the route.
    assert 0 < num_graphs <= 4 and stats["unique_graphs"] == num_graphs


def test_the_float32_block_after_a_route_costs_at_most_two_and_a_half_others(device, size):
    net = dit.build(size.large_backbone, input_size=32, in_channels=4, num_classes=10, routes=[Route(0.5, 2, -4)])
    block = net.blocks[0].to(device)
    shape = (size.batch_size, net.num_tokens, net.pos_embed.shape[-1])
    h, c = torch.randn(shape, device=device, requires_grad=True), torch.randn(shape[0], shape[2], device=device)
    machine.allow_tf32(device, True)
    with torch.autocast(device.type, torch.bfloat16):
        fast, exact = (
            median(time_ms(lambda run=run: run(h, c).float().sum().backward(), 10 if device.type == "cuda" else 1, device, 3))
            for run in (block, lambda h, c: net._in_fp32(block, h, c))
        )
    assert exact < 2.5 * fast or device.type == "cpu"


def test_a_routed_step_takes_less_than_three_quarters_of_a_dense_one(device, size, tmp_path):
    forget_accelerate()
    output, is_cuda = tmp_path / "out", device.type == "cuda"
    own = [f"backbones={size.large_backbone}", f"batch_size={size.batch_size}", f"resolution={size.resolution}", "plain=false"]
    own += [f"compile={'blocks' if is_cuda else 'none'}", "precision=bf16", "rounds=3", f"steps={10 if is_cuda else 1}"]
    train_step.main([*own, f"loop_steps={20 if is_cuda else 1}", f"device={device.type}", "cpu_threads=1", f"output={output}"])
    ratios = json.loads(output.with_suffix(".jsonl").read_text().splitlines()[-1])
    for ratio in (ratios["time_tread_over_dit"], ratios["loop_tread_over_dit"]):
        assert ratio > 0 and (ratio < 0.75 or not is_cuda)


def losses_of(trainer, num_steps):
    run_loop(trainer, num_steps)
    return [json.loads(line)["loss"] for line in trainer.run.metrics.read_text().splitlines()[-num_steps:]]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_steps_that_record_cuda_graphs_learn_the_same(device, size, tmp_path, mode):
    # The small network and one library of products: what is compared is the recording, not the speed.
    mode = mode if device.type == "cuda" else "blocks"  # a CPU has no graphs
    with compiler_for(device), inductor.patch(max_autotune_gemm_backends="ATEN"):
        graphs, plain = (
            losses_of(open_trainer(device, SMALL, tmp_path / name, f"train.compile={name}", "train.log_every=1"), 8)
            for name in (mode, "none")
        )
    assert all(a == pytest.approx(b, rel=0.02) for a, b in zip(graphs, plain)) and len(set(graphs)) == 8


@pytest.mark.parametrize("keys", [["train.compile=blocks"], ["train.compile=none", "train.activation_checkpointing=blocks"]])
def test_the_memory_of_a_step_is_what_was_estimated(device, size, tmp_path, keys):
    gc.collect()  # networks of earlier tests: compiled blocks are cycles
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    trainer = open_trainer(device, size, tmp_path, *keys)
    estimated = sum(memory.estimate(trainer.cfg.train, lambda: build.build_network(trainer.cfg), 1).values())
    assert estimated > 0
    if device.type == "cuda":
        run_loop(trainer, 3)
        torch.cuda.reset_peak_memory_stats(device)
        run_loop(trainer, 3)
        assert torch.cuda.max_memory_allocated(device) - before == pytest.approx(estimated, rel=0.15)
