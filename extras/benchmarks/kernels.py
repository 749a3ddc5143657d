"""Measure what decides the speed of a step on one machine: how fast the CPU starts kernels, and single parts of a step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dit
from common.errors import first_line
from common.types import PositiveInt
from edm import EDM
from extras.benchmarks.harness import measure_kernels_ms, report, time_ms
from runtime import machine as machine_settings
from runtime.compilation import compile_network, resolve_compile
from runtime.cuda_graph import CUDAGraph

LR, BETAS, EPS, EMA_DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.9999
# How often `machine` repeats each of its operations.
NUM_KERNELS = 5000
NUM_GRAPH_NODES = 2000
NUM_PYTHON_ADDITIONS = 10**7


def _start() -> Accelerator:
    return machine_settings.start_accelerator(None, precision="bf16")


def _measure_call(action: Callable[[], object], device: torch.device, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of a call and, on CUDA, those in which the GPU computes."""
    kernels = {"kernel ms": measure_kernels_ms(action)} if device.type == "cuda" else {}
    return {"ms": float(np.median(time_ms(action, repeats, device, 3)))} | kernels


def _capture(function: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Capture a function in a CUDA graph, after warming it up. Return a function that replays the graph."""
    graph = CUDAGraph(device)
    for _ in range(3):
        graph.warm_up(function)
    graph.capture(function)
    return graph.replay


def machine() -> None:
    """Measure the costs of starting a kernel, of a node in a CUDA graph and of Python, and the load of the CPU."""
    accelerator = _start()
    device = accelerator.device
    x = torch.zeros(1, device=device)

    def add(times: int) -> None:
        for _ in range(times):
            x.add_(1)

    def elapsed_us(action: Callable[[], object], times: int) -> float:
        action()
        time_ms(int, 0, device)  # waits for the device
        start_sec = time.perf_counter()
        action()
        time_ms(int, 0, device)
        return 1e6 * (time.perf_counter() - start_sec) / times

    record: dict[str, object] = {"us per add_": elapsed_us(lambda: add(NUM_KERNELS), NUM_KERNELS)}
    if device.type == "cuda":
        record["us per node of a graph"] = elapsed_us(_capture(lambda: add(NUM_GRAPH_NODES), device), NUM_GRAPH_NODES)
    total = 0
    start_sec = time.perf_counter()
    for i in range(NUM_PYTHON_ADDITIONS):
        total += i
    record["ns per addition in Python"] = 1e9 * (time.perf_counter() - start_sec) / NUM_PYTHON_ADDITIONS
    record |= {"cores": os.cpu_count(), "visible cores": machine_settings.visible_cores(), "load": os.getloadavg()[0]}
    if Path("/proc/stat").exists():
        fields = Path("/proc/stat").read_text(encoding="utf-8").split()
        record["share stolen by other machines"] = int(fields[8]) / max(sum(map(int, fields[1:9])), 1)
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
        record["CPU"] = names[0] if names else ""
    report("Machine", accelerator, [record])


def update(backbone: str = "DiT-XL/2", repeats: PositiveInt = 20) -> None:
    """Time fused AdamW and the EMA as the trainer calls them, and as one compiled update whose rate is a tensor.

    The trainer reads and writes 40 bytes per parameter for both, and one pass 36.
    """
    accelerator = _start()
    device = accelerator.device
    net = dit.build(backbone, input_size=32, in_channels=4, num_classes=1000).to(device)
    weights = [p for p in net.parameters() if p.requires_grad]
    detached = [p.detach() for p in weights]
    averages, first_moments, second_moments, gradients = ([torch.rand_like(p) for p in detached] for _ in range(4))
    for p, gradient in zip(weights, gradients):
        p.grad = gradient
    optimizer = torch.optim.AdamW(weights, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)

    def as_trained() -> None:
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - EMA_DECAY)

    numbers = [torch.tensor(number, device=device) for number in (LR, 1.0, 1 - EMA_DECAY)]  # rate, root and ema_weight
    compiled = torch.compile(update_in_one_pass) if resolve_compile("auto", device) == "blocks" else update_in_one_pass

    def as_one_pass() -> None:
        with torch.no_grad():
            compiled(detached, gradients, first_moments, second_moments, averages, *numbers)

    records = []
    for name, action in (("fused AdamW, then EMA", as_trained), ("one compiled update", as_one_pass)):
        start_sec = time.perf_counter()
        time_ms(action, 1, device)
        first_sec = time.perf_counter() - start_sec
        records.append({"variant": name, "first call s": first_sec} | _measure_call(action, device, repeats))
    report("Update of the weights and their average", accelerator, records)


def update_in_one_pass(
    weights: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    averages: list[Tensor],
    rate: Tensor,
    root: Tensor,
    ema_weight: Tensor,
) -> None:
    """Update weights by AdamW, and their average. `rate` and `root` contain the bias corrections of the moments."""
    torch._foreach_lerp_(first_moments, gradients, 1 - BETAS[0])
    torch._foreach_mul_(second_moments, BETAS[1])
    torch._foreach_addcmul_(second_moments, gradients, gradients, 1 - BETAS[1])
    divisors = torch._foreach_add(torch._foreach_div(torch._foreach_sqrt(second_moments), root), EPS)
    torch._foreach_sub_(weights, torch._foreach_mul(torch._foreach_div(first_moments, divisors), rate))
    torch._foreach_add_(averages, torch._foreach_mul(torch._foreach_sub(weights, averages), ema_weight))


def attention(batch_size: PositiveInt = 32, repeats: PositiveInt = 20) -> None:
    """Time attention of DiT-XL/2 (16 heads of 72) with each kernel, for routed and dense blocks, forward and backward."""
    accelerator = _start()
    device = accelerator.device
    records = []
    backends = ["FLASH_ATTENTION", "CUDNN_ATTENTION"] if device.type == "cuda" else ["MATH"]
    for num_tokens in (128, 256):
        q, k, v = (
            torch.randn(batch_size, 16, num_tokens, 72, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )

        def call(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            torch.autograd.grad(scaled_dot_product_attention(q, k, v).sum(), (q, k, v))

        for backend in backends:
            record: dict[str, object] = {"tokens": num_tokens, "kernel": backend}
            try:
                with sdpa_kernel(getattr(SDPBackend, backend)):
                    record |= _measure_call(call, device, repeats)
            except RuntimeError as e:  # the kernel does not support these sizes
                record["error"] = first_line(e)
            records.append(record)
    report("Attention", accelerator, records)


def denoiser(
    backbones: list[str] = ("DiT-XL/2", "DiT-S/2"), batch_sizes: list[int] = (16, 64), repeats: PositiveInt = 20
) -> None:
    """Time one denoiser call with guidance=cfg, which doubles the batch: with kernels started one by one, and as a CUDA graph."""
    accelerator = _start()
    device = accelerator.device
    records = []
    for backbone in backbones:
        net = dit.build(backbone, input_size=32, in_channels=4, num_classes=1000).to(device).eval()
        compile_network(net, resolve_compile("auto", device))
        for size in batch_sizes:
            x, sigma, y = torch.randn(2 * size, 4, 32, 32), torch.ones(2 * size), torch.zeros(2 * size, dtype=torch.int64)
            inputs = [tensor.to(device) for tensor in (x, sigma, y)]

            @torch.no_grad()
            def call(net: dit.DiT = net, inputs: list[Tensor] = inputs) -> Tensor:
                with torch.autocast(device.type, torch.bfloat16):
                    return EDM().denoise(net, *inputs)

            record = {"backbone": backbone, "images": size} | _measure_call(call, device, repeats)
            if device.type == "cuda":
                record["ms as a graph"] = float(np.median(time_ms(_capture(call, device), repeats, device, 3)))
            records.append(record)
    report("Denoiser", accelerator, records)
