"""Step time and saved activations of networks that `attach` routes, dense against routed in the same run.

    python -m benchmarks.attach                                             # both networks, 1,024 and 4,096 tokens
    python -m benchmarks.attach 'networks=[PixArt]' 'num_tokens=[1024]' rounds=9
    python -m benchmarks.attach device=cuda precision=bf16 width=1024 num_heads=16 depth=24 batch_size=4

A step is forward, loss and backward, of a randomly initialised network with the depth, width and head size given below
(PixArt: one list of blocks; Flux: as many double as single blocks, with rotary positions, which every sample gathers for
itself). Dense and routed steps take turns, so that a machine that slows down slows down both, and the ratio is taken turn by
turn. One JSON line a measurement: median, lowest and highest over the rounds; the machine and the versions are in the first
line. `saved_mib` is the memory of all distinct tensors that autograd saves for the backward pass, parameters left out.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from functools import partial
from importlib.metadata import version

import torch
from omegaconf import OmegaConf
from torch import nn

from benchmarks.memory import saved_for_backward
from benchmarks.report import emit
from errors import UserError
from attach import as_routes, attach

SETTINGS = {
    "networks": ["PixArt", "Flux"],
    "num_tokens": [1024, 4096],
    "routes": "balanced",
    "depth": 12,
    "width": 256,
    "num_heads": 4,
    "text_tokens": 64,
    "batch_size": 1,
    "rounds": 5,
    "per_sample": True,
    "device": "cpu",
    "precision": "fp32",  # or bf16: autocast
    "threads": 1,
}


def benchmark_network(name: str, settings) -> nn.Module:
    import diffusers

    head_size = settings.width // settings.num_heads
    if name == "PixArt":
        return diffusers.PixArtTransformer2DModel(
            num_attention_heads=settings.num_heads,
            attention_head_dim=head_size,
            num_layers=settings.depth,
            cross_attention_dim=settings.width,
            caption_channels=settings.width,
            sample_size=32,
            use_additional_conditions=False,
        )
    if name == "Flux":
        return diffusers.FluxTransformer2DModel(
            num_layers=settings.depth // 2,
            num_single_layers=settings.depth - settings.depth // 2,
            attention_head_dim=head_size,
            num_attention_heads=settings.num_heads,
            joint_attention_dim=settings.width,
            pooled_projection_dim=settings.width,
            axes_dims_rope=(head_size - 2 * (head_size // 8 * 3), head_size // 8 * 3, head_size // 8 * 3),
        )
    raise UserError(f"networks={name!r} is unknown; choose PixArt or Flux")


def benchmark_inputs(name: str, num_tokens: int, settings) -> dict:
    B, T, D, side = settings.batch_size, settings.text_tokens, settings.width, int(num_tokens**0.5)
    common = {"encoder_hidden_states": torch.randn(B, T, D), "timestep": torch.rand(B)}
    if name == "PixArt":
        sizes = {"resolution": None, "aspect_ratio": None}
        inputs = common | {"hidden_states": torch.randn(B, 4, 2 * side, 2 * side), "added_cond_kwargs": sizes}
    else:
        rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float()
        inputs = common | {
            "hidden_states": torch.randn(B, side * side, 64),
            "pooled_projections": torch.randn(B, D),
            "img_ids": ids,
            "txt_ids": torch.zeros(T, 3),
        }
    return {key: value.to(settings.device) if torch.is_tensor(value) else value for key, value in inputs.items()}


def forward(network: nn.Module, inputs: dict, settings) -> torch.Tensor:
    with torch.autocast(settings.device, torch.bfloat16, enabled=settings.precision == "bf16"):
        return network(**inputs, return_dict=False)[0].float().square().mean()


def train_step(network: nn.Module, inputs: dict, settings) -> None:
    loss = forward(network, inputs, settings)
    network.zero_grad(set_to_none=True)
    loss.backward()


def step_seconds(network: nn.Module, inputs: dict, settings) -> float:
    start_sec = time.perf_counter()
    train_step(network, inputs, settings)
    if settings.device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start_sec


def main(arguments: list[str]) -> None:
    given = OmegaConf.from_dotlist(arguments)
    unknown = given.keys() - SETTINGS.keys()
    if unknown:
        raise UserError(f"unknown {', '.join(sorted(map(str, unknown)))}; the settings are {', '.join(SETTINGS)}")
    settings = OmegaConf.merge(SETTINGS, given)
    torch.set_num_threads(settings.threads)
    routes = as_routes(settings.routes)
    emit(
        machine=platform.processor() or platform.machine(),
        num_cores=os.cpu_count(),
        torch=torch.__version__,
        diffusers=version("diffusers"),
        settings=OmegaConf.to_container(settings),
    )
    for name in settings.networks:
        torch.manual_seed(0)
        network = benchmark_network(name, settings).to(settings.device).train()
        for num_tokens in settings.num_tokens:
            inputs = benchmark_inputs(name, num_tokens, settings)
            seconds, saved = {"dense": [], "routed": []}, {}
            for i in range(settings.rounds + 1):
                for kind in ("dense", "routed"):
                    attachment = attach(network, routes, per_sample=settings.per_sample) if kind == "routed" else None
                    if i == 0:
                        saved[kind] = saved_for_backward(network, partial(forward, network, inputs, settings))
                        train_step(network, inputs, settings)  # the first step of each warms up
                    else:
                        seconds[kind].append(step_seconds(network, inputs, settings))
                    if attachment is not None:
                        saving = attachment.statistics.saving
                        attachment.detach()
            ratios = [routed / dense for dense, routed in zip(seconds["dense"], seconds["routed"])]
            emit(
                network=name,
                num_tokens=num_tokens,
                token_passes_skipped=round(saving, 3),
                **{f"{kind}_step_sec": [round(f(v), 4) for f in (statistics.median, min, max)] for kind, v in seconds.items()},
                **{f"{kind}_saved_mib": round(size / 2**20, 1) for kind, size in saved.items()},
                step_time_ratio=[round(f(ratios), 3) for f in (statistics.median, min, max)],
                saved_ratio=round(saved["routed"] / saved["dense"], 3),
            )


if __name__ == "__main__":
    main(sys.argv[1:])
