"""Published peaks of GPUs, by which papers state MFU; the fastest product that a device computes, its real ceiling."""

from __future__ import annotations

import re
from statistics import median

import torch
from torch.nn.functional import linear

from extras.benchmarks.harness import time_ms
from training.speed import fits_float8

# TFLOP/s of dense products of the vendor's tensor cores, (bf16, fp8), accumulated in float32, by torch.cuda.get_device_name.
# Data sheets that state sparse products are halved. The whole name must match: a part of a GPU (MIG) has no published peak.
PUBLISHED_TFLOPS: dict[str, tuple[float, float | None]] = {
    r"A(100|800)[- ].*": (312, None),  # A100 data sheet; PCIe and SXM alike
    r"A30": (165, None),  # A30 data sheet
    r"A10": (125, None),  # A10 data sheet
    r"H100 \d+GB HBM3|H800": (989.4, 1978.9),  # H100 data sheet, SXM
    r"H100 PCIe": (756, 1513),  # H100 data sheet, PCIe
    r"H100 NVL": (835, 1671),  # H100 data sheet, NVL
    r"H200": (989.4, 1978.9),  # H200 data sheet, SXM
    r"H200 NVL": (836, 1671),  # H200 data sheet, NVL
    r"GH200 .*": (989.4, 1978.9),  # GH200 data sheet
    r"B200": (2250, 4500),  # DGX B200 data sheet, divided by 8
    r"GB200": (2500, 5000),  # GB200 NVL72 data sheet, divided by 72
    r"L4": (121, 242.5),  # L4 data sheet
    r"L40": (181, 362),  # L40 data sheet
    r"L40S": (362, 733),  # L40S data sheet
    r"GeForce RTX 3090": (71, None),  # GA102 white paper
    r"GeForce RTX 4090": (165.2, 330.3),  # Ada white paper
    r"GeForce RTX 5090": (209.5, 419),  # RTX Blackwell white paper
}


def published_flops(device: torch.device, precision: str) -> float | None:
    """FLOP/s that the vendor states for bf16 or fp8; None for fp32, for other devices and for those that are not in the table."""
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device).removeprefix("NVIDIA ")
    if re.search(r"\bMIG\b", name):
        return None
    found = [peaks for pattern, peaks in PUBLISHED_TFLOPS.items() if re.fullmatch(pattern, name)]
    tflops = found[0][precision == "fp8"] if found else None
    return None if tflops is None else 1e12 * tflops


def fastest_product(block: torch.nn.Module, num_rows: int, precision: str, device: torch.device) -> float:
    """FLOP/s of the fastest x W^T of a precision: squares, and the layers of a block of the network; each the median of 5.

    Args:
        num_rows: of x, for the layers: images times tokens.
        precision: fp32 (in TF32, where that is allowed) | bf16 | fp8.
    """
    squares = (4096, 8192)
    if device.type != "cuda":
        squares, num_rows = (1024, 2048), min(num_rows, 4096)  # as fast as more rows, and sooner done
    layers = [block.attn.qkv, *(layer for layer in block.mlp.modules() if isinstance(layer, torch.nn.Linear))]
    if precision == "fp8":
        layers = [layer for layer in layers if fits_float8(layer)]
    shapes = [*((n, n, n) for n in squares), *((num_rows, layer.in_features, layer.out_features) for layer in layers)]

    def flops_per_sec(m: int, k: int, n: int) -> float:
        x, weight = (torch.randn(size, k, device=device) for size in (m, n))
        if precision == "fp8":
            x, weight, scale = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn), torch.ones((), device=device)
            times_ms = time_ms(
                lambda: torch._scaled_mm(x, weight.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True),
                5, device, warmup=1,
            )  # fmt: skip
        else:
            x, weight = (t.to(torch.float32 if precision == "fp32" else torch.bfloat16) for t in (x, weight))
            times_ms = time_ms(lambda: linear(x, weight), 5, device, warmup=1)
        return 2000 * m * k * n / median(times_ms)

    return max(flops_per_sec(*shape) for shape in shapes)
