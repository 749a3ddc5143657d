"""Speed of the sampler, from a random network: images per second for every kind of guidance.

    python -m extras.benchmarks.sampling                                                    # DiT-S/2, batch 8, float32
    python -m extras.benchmarks.sampling backbone=DiT-XL/2 batch_size=128 precision=bf16 'num_steps=[20,40]' compile=default
    python -m extras.benchmarks.sampling autoencoder=sd-vae:stabilityai/sd-vae-ft-ema resolution=512

It times ImageSampler, which sample.py, fid.py and the grids of training use. Every kind of guidance that needs no second
network is a row, with the settings of its file in configs/guidance/ unless `overrides` changes them. Network evaluations are
counted as they happen: calls, and rows of these calls for one image (classifier-free guidance has two in a call). The rows take
turns, round by round. Decoding is timed apart; autoencoder=identity shows latents of 3 channels as pixels.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from statistics import median
from types import SimpleNamespace
from typing import Literal

from accelerate.utils import set_seed

from common.errors import UserError
from configs import command_line as cli
from configs import schema
from configs.schema import Autoencoder, Compile, Precision
from configs.settings import Count, Text, group_name, keys_of
from extras.benchmarks.harness import Backbone, Report, Several, open_accelerator, table, time_ms, timed
from extras.benchmarks.trainers import CommonSettings, compose_config, model_of
from latents import autoencoders
from sampling.sampler import ImageSampler
from training import build, load
from training.speed import check_compile, compile_network

ONE_NETWORK = {group_name(one): one for one in (schema.NoGuidance, schema.CFG, schema.Interval, schema.Sparse)}


class SamplingSettings(CommonSettings):  # overrides=[guidance.cfg_scale=2.0] is for the rows whose guidance has the key
    backbone: Backbone = "DiT-S/2"
    guidance: Several[Literal[tuple(ONE_NETWORK)]] = [*ONE_NETWORK]  # a row for each
    num_steps: Several[Count] = [20]  # noise levels of the sampler; a row for each
    precision: Precision = "fp32"
    compile: Compile = "none"  # as train.compile
    resolution: Literal[256, 512] = 256  # of the images
    autoencoder: Autoencoder = "identity"  # identity | sd-vae:<hub id or folder> | va-vae:<file or folder>
    rounds: Count = 3
    batches: Count = 1  # timed in each turn
    output: Text = "runs/benchmarks/sampling"  # the files' name, without its ending


NOTES = """`sampling_ms` and `decoding_ms` are medians per batch; `images_per_sec` counts both. `evaluations` are those of
the network per image, `gflops_per_image` the matrix products of all of them (a multiply-add counted twice). Routes are off in
sampling, but for sparse guidance.
"""


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, SamplingSettings)
    accelerator = open_accelerator(settings.device, settings.cpu_threads, settings.precision, settings.tf32)
    report = Report("Sampling", settings, accelerator.device)
    device = accelerator.device
    configs = [compose_sampling_config(name, settings) for name in settings.guidance]
    compile_mode = check_compile("compile", settings.compile, device)
    autoencoder = autoencoders.build(settings.autoencoder, device, configs[0].data.in_channels)
    set_seed(configs[0].seed)
    net = build.build_network(configs[0]).to(device).eval().requires_grad_(False)
    compile_network(net, compile_mode)
    rows = []
    for cfg, num_steps in itertools.product(configs, settings.num_steps):
        diffusion = build.build_diffusion(cfg.diffusion, num_steps=num_steps)
        sampler = load.build_sampler(
            net, cfg, cfg.guidance, autoencoder, device, diffusion=diffusion, precision=settings.precision
        )
        rows.append(SampledRow(sampler, cfg.guidance.name, num_steps, settings.batch_size))
    for row in rows:
        row.sample()  # to warm up
    for _, row, _ in itertools.product(range(settings.rounds), rows, range(settings.batches)):
        row.sample()
    lines = [row.record() for row in rows]
    summary = "; ".join(
        f"{line['guidance']} with {line['num_steps']} steps: {line['images_per_sec']:.4g} images/s, "
        f"{line['evaluations']:g} evaluations per image"
        for line in lines
    )
    report.save(lines, [NOTES, table(lines), f"{summary}\n"], [report.machine, *lines, summary])
    accelerator.end_training()


def compose_sampling_config(guidance: str, settings: SamplingSettings) -> schema.TrainConfig:
    """A run that samples with this guidance. The network has routes, for a guidance that needs them.

    Raises:
        UserError: an override that no row would take.
    """
    keys = {name: [f"guidance.{key}" for key in keys_of(ONE_NETWORK[name])] for name in settings.guidance}
    accepted = sorted({*itertools.chain(*keys.values())})
    # arXiv 2404.07724, for EDM2-S on ImageNet-512.
    own = ["guidance.level_lo=0.28", "guidance.level_hi=2.9"] if guidance == "interval" else []
    for override in settings.overrides:
        key = override.partition("=")[0]
        if key.startswith("guidance.") and key not in accepted:
            raise UserError(f"overrides: {key} is not a key of guidance={settings.guidance}; accepted: {', '.join(accepted)}")
        if not key.startswith("guidance.") or key in keys[guidance]:
            own.append(override)
    channels = 3 if settings.autoencoder == "identity" else 4
    shape = [f"data.in_channels={channels}", f"data.input_size={settings.resolution // 8}", "data.num_classes=1000"]
    model = [f"model={model_of('tread', settings.backbone)}", f"model.backbone={settings.backbone}"]
    return compose_config([*model, "data=custom", "data.scale_factor=1.0", *shape, f"guidance={guidance}", *own])


class SampledRow:
    """A sampler, and the milliseconds of its batches: in all, and in the decoder. The first batch does not count."""

    def __init__(self, sampler: ImageSampler, guidance: str, num_steps: int, batch_size: int):
        self.sampler, self.guidance, self.num_steps, self.batch_size = sampler, guidance, num_steps, batch_size
        self.total_ms: list[float] = []
        self.decoding_ms: list[float] = []
        sampler.autoencoder = SimpleNamespace(decode=timed(sampler.autoencoder.decode, sampler.device, self.decoding_ms))

    def sample(self) -> None:
        """One batch."""
        self.decoding_ms.append(0.0)
        seeds = list(range(self.batch_size))
        self.total_ms += time_ms(lambda: self.sampler(seeds, [seed % 1000 for seed in seeds]), 1, self.sampler.device)

    def record(self) -> dict[str, object]:
        """The row as it is written."""
        total_ms, decoding_ms = self.total_ms[1:], self.decoding_ms[1:]
        return {
            "guidance": self.guidance,
            "num_steps": self.num_steps,
            "evaluations": self.sampler.evaluations_per_image,
            "gflops_per_image": self.sampler.flops_per_image / 1e9,
            "images_per_sec": 1000 * self.batch_size / median(total_ms),
            "sampling_ms": median(total - decoding for total, decoding in zip(total_ms, decoding_ms)),
            "decoding_ms": median(decoding_ms),
            "lowest_ms": min(total_ms),
            "highest_ms": max(total_ms),
            "num_timed": len(total_ms),
        }


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
