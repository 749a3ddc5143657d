"""Steps of the trainer: they do not wait, recompile or change what is learnt, and their memory is as estimated."""

import contextlib
import gc
import itertools
from statistics import median
from unittest import mock

import pytest
import torch
from conftest import forget_accelerate

import dit
from checkpoints.run import RunFolder
from common.randomness import SeedRandom
from extras.benchmarks.harness import time_ms
from extras.benchmarks.steps import step
from gpu.runs import compiler_for, exact_attention, keys_of_repa, trainer_for
from routing_module import Route
from runtime import machine
from training import loop


@contextlib.contextmanager
def nothing_waits(device):
    """Raise an error where the host waits for the device.

    torch's debug mode detects waits for a stream and copies to the host (item, tolist, bool, cpu). It misses `synchronize`,
    which waits for the whole device or an event, so this function replaces it.
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


def test_the_guard_sees_functions_that_wait(device):
    x = torch.ones((), device=device)
    with nothing_waits(device):
        x.add_(1)
        with pytest.raises(AssertionError, match="waits for the device"):
            torch.cuda.synchronize()
        if device.type == "cuda":
            with pytest.raises(RuntimeError, match="synchroniz"):
                x.item()
    assert x.item() == 2


def test_random_numbers_of_sampling_equal_those_of_a_cpu_and_arrive_without_a_wait(device):
    with nothing_waits(device):
        drawn = SeedRandom([3, 4], device).randn(2, 5)
    assert drawn.cpu().equal(SeedRandom([3, 4], torch.device("cpu")).randn(2, 5))


ACCUMULATION = ["train.grad_accum_steps=2", "train.grad_clip_norm=1", "machine.compile=none"]


@pytest.mark.parametrize(
    "keys",
    [["data.num_workers=2"], ["train.cuda_graphs=step"], ACCUMULATION, ["train.optimizer=muon", "machine.compile=none"]],
)
def test_nothing_waits_in_the_loop_between_two_log_lines(device, size, tmp_path, keys):
    trainer = trainer_for(device, size, tmp_path, "train.log_every=1000", *keys)
    batches = trainer.batches()

    def some_batches():
        yield from itertools.islice(batches, 3)  # the first steps compile and allocate memory
        with nothing_waits(device):
            yield from itertools.islice(batches, 17)

    with mock.patch.object(trainer, "batches", some_batches), mock.patch.object(loop.CheckpointWriter, "save"):
        loop.train(trainer, RunFolder(str(tmp_path), "run"), hooks=[])
    assert trainer.step == 20


def test_batches_that_threads_read_ahead_are_pinned_and_equal_those_of_the_main_thread(device, size, tmp_path):
    batches = (trainer_for(device, size, tmp_path, f"data.num_workers={number}").batches() for number in (2, 0))
    ahead, plain = (list(itertools.islice(some, 5)) for some in batches)
    for (a,), (b,) in zip(ahead, plain):
        assert all(torch.equal(x, y) and x.is_pinned() == (device.type == "cuda") for x, y in zip(a, b))


# All but LightningDiT compile the same blocks, which inductor finds in its cache.
KINDS = {
    "tread": [],
    "lightningdit": ["model=lightningdit_tread", "model.backbone=LightningDiT-{backbone}"],
    "sit": ["diffusion=sit"],
    "importance": ["model.selection=importance"],
    "sprint": ["model=sprint"],
    "checkpointing": ["train.activation_checkpointing=blocks"],
    "repa": [],
}


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_learn_what_plain_ones_do_and_are_compiled_once(device, size, tmp_path, kind):
    if device.type == "cpu" and kind != "tread":
        pytest.skip("tests/test_speed.py compares them on the CPU, without a trainer")
    keys = [key.format(backbone=size.backbone) for key in KINDS[kind]] + (keys_of_repa(size, tmp_path) if kind == "repa" else [])
    changes = []
    for mode in ("none", "blocks"):
        with compiler_for(device):
            trainer = trainer_for(device, size, tmp_path, f"machine.compile={mode}", *keys)
            batches, before = trainer.batches(), [p.detach().clone() for p in trainer.parameters.values()]
            for step in range(6):
                with torch._dynamo.config.patch(error_on_recompile=step >= 3):
                    trainer.train_step(next(batches))
            changes.append(torch.cat([(p.detach() - x).flatten() for p, x in zip(trainer.parameters.values(), before)]))
    # Losses would show little, because the output starts at zero. Rounding to bfloat16 changes the weight updates by about 0.02.
    # Blocks that do nothing or tokens in the wrong places change them by more than 0.5 (tests/test_gpu_code.py).
    error = (changes[1] - changes[0]).norm() / changes[0].norm()
    assert error <= 0.1, f"the compiled network learns something else: {error:.3f}"
    # Four graphs: all tokens, all tokens without a gradient for the input, kept tokens, the float32 block after the route.
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


GRAPH, PLAIN = "train.cuda_graphs=step", "train.cuda_graphs=none"
GRAPH_KINDS = {"tread": [], "accumulation": ACCUMULATION[:2], "sprint, sit": ["model=sprint", "diffusion=sit"]}
GRAPH_KINDS |= {"muon": ["train.optimizer=muon"], "repa": []}


def learn(device, size, folder, num_steps, *keys, attention=contextlib.nullcontext):
    """Return the weights, averages and losses after some steps. From the capture on, nothing is compiled."""
    with compiler_for(device):
        trainer = trainer_for(device, size, folder, "train.warmup_steps=4", *keys)
        batches = trainer.batches()
        for number in range(num_steps):
            with attention(), torch._dynamo.config.patch(error_on_recompile=number >= 2):  # the third step captures
                trainer.train_step(next(batches))
        values = [
            *trainer.parameters.values(),
            *trainer.ema.averages.values(),
            trainer.loss_meter.sums,
            trainer.loss_meter.bin_sums,
        ]
        copies = [x.detach().cpu().clone() for x in values]
        trainer.free_graph()
    return copies


@pytest.mark.parametrize("kind", GRAPH_KINDS)
def test_a_graph_gives_the_bits_of_plain_steps(device, size, tmp_path, kind):
    keys = [f"machine.compile={'blocks' if device.type == 'cuda' else 'none'}", *GRAPH_KINDS[kind]]
    keys += keys_of_repa(size, tmp_path) if kind == "repa" else []
    # Other attention kernels add gradients in no fixed order.
    plain, replayed = (learn(device, size, tmp_path, 8, *keys, key, attention=exact_attention) for key in (PLAIN, GRAPH))
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed))


def test_a_graph_gives_what_plain_steps_learn_with_the_attention_of_training(device, size, tmp_path):
    keys = [] if device.type == "cuda" else ["machine.compile=none"]
    start, plain, replayed = (
        torch.cat([x.flatten() for x in learn(device, size, tmp_path, num_steps, *keys, key)[:-2]])  # without loss sums
        for num_steps, key in ((0, PLAIN), (6, PLAIN), (6, GRAPH))
    )
    assert (replayed - plain).norm() <= 0.1 * (plain - start).norm()


def test_the_gpu_hardly_waits_in_steps_that_are_graphs_and_routing_saves_a_quarter_of_a_step(device, size):
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < 79e9:
        pytest.skip("both trainers and their graphs need 60 GB")
    is_cuda = device.type == "cuda"
    overrides = [size.data, f"model.backbone={size.large_backbone}", f"train.batch_size={size.batch_size // 2}"]
    overrides += ["train.precision=bf16", "machine.cpu_threads=1"]
    turns = {"rounds": 3, "steps": 10, "warmup": 3} if is_cuda else {"rounds": 1, "steps": 1, "warmup": 0}
    found = {}
    for key in (PLAIN, GRAPH) if is_cuda else (PLAIN,):
        forget_accelerate()
        gc.collect()  # frees earlier networks: compiled blocks are reference cycles
        found[key] = step(["model=dit", "model=tread"], [*overrides, key], **turns)
    if is_cuda:
        dense, routed = found[GRAPH]
        # Profiles of replays may count overlapping kernels twice, so the kernels of plain steps are the yardstick.
        assert all(arm["ms"] <= 1.06 * plain["kernel ms"] for arm, plain in zip((dense, routed), found[PLAIN]))
        assert routed["time / first"] <= 0.74 and max(routed["lowest, highest"]) <= 0.75
        assert routed["reserved GiB"] < dense["reserved GiB"] < 2 * dense["peak GiB"]


def test_the_float32_block_after_a_route_costs_at_most_two_and_a_half_other_blocks(device, size):
    net = dit.build(size.large_backbone, input_size=32, in_channels=4, num_classes=10, routes=[Route(0.5, 2, -4)])
    block = net.blocks[0].to(device)
    shape = (size.batch_size, net.num_tokens, net.pos_embed.shape[-1])
    h, c = torch.randn(shape, device=device, requires_grad=True), torch.randn(shape[0], shape[2], device=device)
    machine.choose_kernels(device, True)
    with torch.autocast(device.type, torch.bfloat16):
        fast, exact = (
            median(time_ms(lambda run=run: run(h, c).float().sum().backward(), 10 if device.type == "cuda" else 1, device, 3))
            for run in (block, lambda h, c: net._run_layer(block, True, h, c))
        )
    assert exact < 2.5 * fast or device.type == "cpu"


def test_a_routed_step_takes_under_three_quarters_of_a_dense_one_and_the_estimated_memory(device, size):
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < 48e9:
        pytest.skip("both trainers need 40 GB")
    forget_accelerate()
    gc.collect()  # frees networks of earlier tests: compiled blocks are reference cycles
    is_cuda = device.type == "cuda"
    overrides = [size.data, f"model.backbone={size.large_backbone}", f"train.batch_size={size.batch_size}"]
    overrides += ["train.precision=bf16", "machine.cpu_threads=1"]
    turns = {"rounds": 3, "steps": 10, "warmup": 2} if is_cuda else {"rounds": 1, "steps": 1, "warmup": 0}
    dense, routed = step(["model=dit", "model=tread"], overrides, **turns)
    assert 0.5 < routed["GFLOP/image"] / dense["GFLOP/image"] < 0.75
    if is_cuda:
        assert routed["kernel ms"] / dense["kernel ms"] < 0.75  # "ms" would also judge how fast the CPU starts the kernels
        # DiT-XL/2, 64 images, compiled: weights, AdamW and EMA 10 GiB, activations 12.5, temporary memory of the backward 1.2.
        assert routed["peak GiB"] < 1.25 * 23.7 and routed["peak GiB"] < dense["peak GiB"]
