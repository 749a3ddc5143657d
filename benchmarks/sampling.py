"""Speed of the sampler, from a random network: images per second for every kind of guidance.

    python -m benchmarks.sampling                                                    # DiT-S/2, batch 8, float32
    python -m benchmarks.sampling backbone=DiT-XL/2 batch_size=128 precision=bf16 'num_steps=[20,40]' compile=default
    python -m benchmarks.sampling autoencoder=sd-vae:stabilityai/sd-vae-ft-ema resolution=512

It times ImageSampler, which sample.py, fid.py and the grids of training use. Every kind of guidance that the project has is a
row, with the settings of its file in configs/guidance/ unless `overrides` changes them. Network evaluations are counted as they
happen: calls, and rows of these calls for one image (classifier-free guidance has two in a call). The rows take turns, round by
round. Decoding is timed apart; autoencoder=identity shows latents of 3 channels as pixels.

It writes <output>.jsonl and <output>.md; the last line sums up the speeds.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from accelerate.utils import set_seed
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch import Tensor, nn

import dit
from benchmarks.report import (
    describe_machine,
    emit,
    markdown_table,
    parse_settings,
    prepare_output,
    say,
    synchronise,
    write_report,
)
from benchmarks.train_step import KEYS as TRAIN_STEP_KEYS
from benchmarks.train_step import open_accelerator
from errors import UserError
from guidance import GUIDANCES
from latents import autoencoders
from latents.autoencoders import Autoencoder
from sampling.sampler import build_sampler
from setup.schema import Accepts, choice, one_or_list, whole
from training import config
from training.speed import compile_network

ONE_NETWORK = tuple(name for name in GUIDANCES if name != "autoguidance")  # that has a second one, of any size
DEFAULTS = {
    "backbone": "DiT-S/2",
    "guidance": list(ONE_NETWORK),  # a row for each
    "num_steps": [20],  # noise levels of the sampler; a row for each
    "batch_size": 8,
    "precision": "fp32",  # fp32 | bf16
    "compile": "none",  # as train.compile
    "resolution": 256,  # of the images: 256 | 512
    "autoencoder": "identity",  # identity | sd-vae:<hub id or folder>
    "rounds": 3,
    "batches": 1,  # timed in each turn
    "device": None,  # cpu | cuda; null: what accelerate chooses
    "cpu_threads": None,  # as train.cpu_threads
    "overrides": [],  # more of the configuration: [guidance.cfg_scale=2.0]; one that a row's guidance lacks is not for that row
    "output": "runs/benchmarks/sampling",  # the files' name, without its ending
}
KEYS = {name: TRAIN_STEP_KEYS[name] for name in DEFAULTS if name in TRAIN_STEP_KEYS} | {
    "backbone": choice(*dit.BACKBONES),
    "guidance": one_or_list(choice(*ONE_NETWORK)),
    "num_steps": one_or_list(whole(1)),
    "compile": config.TRAIN_KEYS["train.compile"],
    "resolution": Accepts(lambda v: v in (256, 512), "256 | 512"),
    "autoencoder": config.AUTOENCODER,
    "batches": whole(1),
}


def main(arguments: Sequence[str]) -> None:
    settings = parse_settings(arguments, DEFAULTS, KEYS)
    accelerator = open_accelerator(settings)
    prepare_output(settings["output"])
    machine = describe_machine(accelerator.device) | {"settings": settings}
    check_guidance_overrides(settings)
    configs = {name: sampling_config(name, settings) for name in settings["guidance"]}
    cfg = next(iter(configs.values()))
    autoencoder = autoencoders.build(settings["autoencoder"], accelerator.device, cfg.data.in_channels, "autoencoder")
    decoder = TimedDecoder(autoencoder, accelerator.device)
    set_seed(cfg.seed)
    net = config.build_network(cfg).to(accelerator.device).eval().requires_grad_(False)
    compile_network(net, settings["compile"])
    rows = [
        SamplingRow(net, configs[name], num_steps, decoder, settings)
        for name, num_steps in itertools.product(configs, settings["num_steps"])
    ]
    for row in rows:
        row.warm_up()
    for _ in range(settings["rounds"]):
        for row in rows:
            row.turn()
    lines = [row.record() for row in rows]
    last_line = "; ".join(
        f"{line['guidance']} with {line['num_steps']} steps: {line['images_per_sec']:.4g} images/s, "
        f"{line['evaluations']:g} evaluations per image"
        for line in lines
    )
    write_report(settings["output"], "Sampling", machine, lines, [NOTES, markdown_table(lines), f"{last_line}\n"])
    emit(**machine)
    for line in lines:
        emit(**line)
    say(last_line)
    accelerator.end_training()


NOTES = """`sampling_ms` and `decoding_ms` are medians per batch; `images_per_sec` counts both. `evaluations` are those of
the network per image, `gflops_per_image` the matrix products of all of them (a multiply-add counted twice). Routes are off in
sampling, but for sparse guidance.
"""


def guidance_keys(guidance_name: str) -> list[str]:
    return [f"guidance.{key}" for key in config.GUIDANCE_KEYS[guidance_name]]


def check_guidance_overrides(settings: dict) -> None:
    """Raises UserError for an override that no row would take."""
    accepted = sorted({key for name in settings["guidance"] for key in guidance_keys(name)})
    for key in (override.partition("=")[0] for override in settings["overrides"]):
        if key.startswith("guidance.") and key not in accepted:
            raise UserError(f"overrides: {key} is not a key of guidance={settings['guidance']}; accepted: {', '.join(accepted)}")


def sampling_config(guidance_name: str, settings: dict) -> DictConfig:
    """The configuration of a run that samples with this guidance; the network has routes, for a guidance that needs them."""
    known = guidance_keys(guidance_name)
    own = [o for o in settings["overrides"] if not o.startswith("guidance.") or o.partition("=")[0] in known]
    shape = [
        f"data.in_channels={3 if settings['autoencoder'] == 'identity' else 4}",
        f"data.input_size={settings['resolution'] // 8}",
        "data.num_classes=1000",
    ]
    if guidance_name == "interval":  # arXiv 2404.07724, for EDM2-S on ImageNet-512
        own = ["guidance.level_lo=0.28", "guidance.level_hi=2.9", *own]
    overrides = ["model=tread", "data=custom", f"guidance={guidance_name}", f"model.backbone={settings['backbone']}"]
    with initialize_config_dir(config.CONFIGS, version_base="1.3"):
        cfg = compose("config", [*overrides, *shape, *own])
    cfg = config.check(cfg, config.TRAIN_KEYS)
    cfg.data.scale_factor = 1.0  # a run takes it from its shards
    return cfg


class TimedDecoder:
    """An autoencoder that adds up the time that it takes."""

    def __init__(self, autoencoder: Autoencoder, device: torch.device):
        self.autoencoder, self.device, self.sec = autoencoder, device, 0.0

    def decode(self, latents: Tensor) -> Tensor:
        synchronise(self.device)
        start_sec = time.perf_counter()
        images = self.autoencoder.decode(latents)
        synchronise(self.device)
        self.sec += time.perf_counter() - start_sec
        return images


class SamplingRow:
    """A sampler, and what its batches took: seconds in all, and of these in the decoder."""

    def __init__(self, net: nn.Module, cfg: DictConfig, num_steps: int, decoder: TimedDecoder, settings: dict):
        self.cfg, self.num_steps, self.decoder, self.settings = cfg, num_steps, decoder, settings
        self.sampler = build_sampler(
            net,
            cfg,
            decoder,
            decoder.device,
            diffusion=config.build_diffusion(cfg, num_steps=num_steps),
            guide=config.build_guidance(cfg),
            precision=settings["precision"],
        )
        self.sec: list[float] = []
        self.decoding_sec: list[float] = []

    def warm_up(self) -> None:
        """One batch that is not timed."""
        self.sampler(*self._batch())

    def _batch(self) -> tuple[list[int], list[int]]:
        seeds = list(range(self.settings["batch_size"]))
        return seeds, [seed % 1000 for seed in seeds]

    def turn(self) -> None:
        for _ in range(self.settings["batches"]):
            self.decoder.sec, start_sec = 0.0, time.perf_counter()
            self.sampler(*self._batch())  # ends with the images in the main memory
            self.sec.append(time.perf_counter() - start_sec)
            self.decoding_sec.append(self.decoder.sec)

    def record(self) -> dict[str, object]:
        batch_size = self.settings["batch_size"]
        return {
            "guidance": self.cfg.guidance.name,
            "num_steps": self.num_steps,
            "evaluations": self.sampler.evaluations_per_image,
            "gflops_per_image": self.sampler.flops_per_image / 1e9,
            "images_per_sec": batch_size / statistics.median(self.sec),
            "sampling_ms": 1000 * statistics.median(a - b for a, b in zip(self.sec, self.decoding_sec)),
            "decoding_ms": 1000 * statistics.median(self.decoding_sec),
            "lowest_ms": 1000 * min(self.sec),
            "highest_ms": 1000 * max(self.sec),
            "num_timed": len(self.sec),
        }


if __name__ == "__main__":
    main(sys.argv[1:])
