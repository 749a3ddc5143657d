"""Step time and saved activations of networks that `attach` routes, dense against routed in the same run.

    python -m extras.benchmarks.attach                                             # both networks, 1,024 and 4,096 tokens
    python -m extras.benchmarks.attach 'networks=[PixArt]' 'num_tokens=[1024]' rounds=9
    python -m extras.benchmarks.attach device=cuda precision=bf16 width=1024 num_heads=16 depth=24 batch_size=4

A step is forward, loss and backward, of a randomly initialised network with the depth, width and head size given below
(PixArt: one list of blocks; Flux: as many double as single blocks, with rotary positions, which every sample gathers for
itself). Dense and routed steps take turns, so that a machine that slows down slows both, and the ratio is taken turn by turn.
It prints a JSON line per measurement, with the machine and the versions in the first: median, lowest and highest over the
rounds. `saved_mib` is the memory of all distinct tensors that autograd saves for the backward, parameters left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Literal

import torch
from torch import nn
from training.memory import saved_for_backward

from configs import command_line as cli
from configs.schema import Precision
from configs.settings import Count, Settings, Text
from extras.attach import as_routes, attach
from extras.benchmarks.harness import Several, choose_device, describe_machine, emit, spread, time_ms


class AttachSettings(Settings):
    networks: Several[Literal["PixArt", "Flux"]] = ["PixArt", "Flux"]
    num_tokens: Several[Count] = [1024, 4096]
    routes: Text | list[dict] = "balanced"  # a preset of attach, or a list of routes
    depth: Count = 12
    width: Count = 256
    num_heads: Count = 4
    text_tokens: Count = 64
    batch_size: Count = 1
    rounds: Count = 5
    per_sample: bool = True
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Precision = "fp32"  # bf16: autocast
    threads: Count = 1


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, AttachSettings)
    torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    emit(describe_machine(device, settings) | {"diffusers": version("diffusers")})
    for name in settings.networks:
        torch.manual_seed(0)
        network = build_adapted_network(name, settings).to(device).train()
        for num_tokens in settings.num_tokens:
            measured = measure_network(network, build_inputs(name, num_tokens, settings), settings)
            emit({"network": name, "num_tokens": num_tokens, **measured})


def measure_network(network: nn.Module, inputs: dict, settings: AttachSettings) -> dict[str, object]:
    device, routes = torch.device(settings.device), as_routes(settings.routes)
    sec, saved = {"dense": [], "routed": []}, {}

    def forward() -> torch.Tensor:
        with torch.autocast(settings.device, torch.bfloat16, enabled=settings.precision == "bf16"):
            return network(**inputs, return_dict=False)[0].float().square().mean()

    def train_step() -> None:
        loss = forward()
        network.zero_grad(set_to_none=True)
        loss.backward()

    for i in range(settings.rounds + 1):
        for kind in sec:
            attachment = attach(network, routes, per_sample=settings.per_sample) if kind == "routed" else None
            if i == 0:  # the first step of each warms up
                saved[kind] = saved_for_backward(network, forward).total()
                train_step()
            else:
                sec[kind].append(time_ms(train_step, 1, device)[0] / 1000)
            if attachment is not None:
                saving = attachment.statistics.saving
                attachment.detach()
    return {
        "token_passes_skipped": round(saving, 3),
        **{f"{kind}_step_sec": spread(of_kind) for kind, of_kind in sec.items()},
        **{f"{kind}_saved_mib": round(size / 2**20, 1) for kind, size in saved.items()},
        "step_time_ratio": [round(value, 3) for value in spread([a / b for a, b in zip(sec["routed"], sec["dense"])])],
        "saved_ratio": round(saved["routed"] / saved["dense"], 3),
    }


def build_adapted_network(name: str, settings: AttachSettings) -> nn.Module:
    import diffusers  # slow

    depth, width, head_size = settings.depth, settings.width, settings.width // settings.num_heads
    heads = {"num_attention_heads": settings.num_heads, "attention_head_dim": head_size}
    if name == "PixArt":
        text = {"cross_attention_dim": width, "caption_channels": width}
        return diffusers.PixArtTransformer2DModel(
            **heads, **text, num_layers=depth, sample_size=32, use_additional_conditions=False
        )
    axis = head_size // 8 * 3  # of the rotary positions
    return diffusers.FluxTransformer2DModel(
        **heads,
        num_layers=depth // 2,
        num_single_layers=depth - depth // 2,
        joint_attention_dim=width,
        pooled_projection_dim=width,
        axes_dims_rope=(head_size - 2 * axis, axis, axis),
    )


def build_inputs(name: str, num_tokens: int, settings: AttachSettings) -> dict:
    B, T, D, side = settings.batch_size, settings.text_tokens, settings.width, int(num_tokens**0.5)
    inputs = {"encoder_hidden_states": torch.randn(B, T, D), "timestep": torch.rand(B)}
    if name == "PixArt":
        sizes = {"resolution": None, "aspect_ratio": None}
        inputs |= {"hidden_states": torch.randn(B, 4, 2 * side, 2 * side), "added_cond_kwargs": sizes}
    else:
        rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        inputs |= {
            "hidden_states": torch.randn(B, side * side, 64),
            "pooled_projections": torch.randn(B, D),
            "img_ids": torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(-1, 3).float(),
            "txt_ids": torch.zeros(T, 3),
        }
    return {key: value.to(settings.device) if torch.is_tensor(value) else value for key, value in inputs.items()}


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
