"""Sample images from a network. The trainer, sample.py and fid.py use the same sampler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from common.errors import Diverged
from common.images import to_uint8
from common.interfaces import Diffusion
from common.randomness import SeedRandom, derive_seed
from configs.schema import TrainConfig
from dit import DiT
from guidance import Guidance, GuidanceInputs
from latents.autoencoders import Autoencoder
from latents.shards import restore_latents


@dataclass
class ImageSampler:
    """Samples one image for each given seed.

    Attributes:
        net: Network in evaluation mode on `device`.
        config: Configuration of the run that trains the network, with the values to sample with.
        guidance: Function of one guidance. The configuration may list several.
        autoencoder: Autoencoder that decodes the output of `restore_latents`.
        is_compiled: Whether to pad each batch to the largest batch size so far, because each new size triggers a compilation.
        weak: Weak network of the guidance method and the diffusion of that network.
        cost: `network_evaluations` and `gflops_per_image` of the last call, summed over both networks.
    """

    net: DiT
    config: TrainConfig
    guidance: Guidance
    autoencoder: Autoencoder
    device: torch.device
    is_compiled: bool = False
    weak: tuple[DiT, Diffusion] | None = None
    cost: dict[str, float] = field(default_factory=dict, init=False)
    _largest_batch: int = field(default=0, init=False)

    @torch.no_grad()
    def __call__(self, seeds: list[int], labels: list[int]) -> np.ndarray:
        """Sample uint8 images [B, H, W, 3]. Image i depends only on seeds[i] and labels[i].

        Args:
            labels: Class label for each seed, from 0 to num_classes. Label num_classes is the null class.
        """
        config, data, num_images = self.config, self.config.data, len(seeds)
        if self.is_compiled:
            self._largest_batch = max(self._largest_batch, num_images)
            missing = self._largest_batch - num_images
            seeds, labels = seeds + seeds[-1:] * missing, labels + labels[-1:] * missing
        random = SeedRandom(seeds, self.device)
        random_routes = SeedRandom(seeds, self.device, stream="routes")
        y = torch.tensor(labels, dtype=torch.int64, device=self.device)
        calls: Counter[tuple] = Counter()  # evaluations per image, by network and selection ratio

        def denoise(net: DiT, diffusion: Diffusion, x: Tensor, level: float, y: Tensor, **routing) -> Tensor:
            calls[net, routing.get("selection_ratios", 0.0)] += len(x) / len(seeds)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=config.sampling.precision == "bf16"):
                return diffusion.denoise(net, x, level, y, **routing)

        shape = self.net.route_noise_shape
        inputs = GuidanceInputs(
            partial(denoise, self.net, config.diffusion),
            data.num_classes,
            shape,
            draw_route_noise=lambda: random_routes.rand(*shape),
            weak=partial(denoise, *self.weak) if self.weak else None,
            weak_route_noise_shape=self.weak[0].route_noise_shape if self.weak else (0, 0),
            levels=config.sampler.evaluated_levels(),
        )
        noise = random.randn(data.in_channels, data.input_size, data.input_size)
        latents = config.sampler(self.guidance(inputs), noise, y, random)
        flops = sum(number * net.forward_flops(ratios) for (net, ratios), number in calls.items())
        self.cost = {"network_evaluations": sum(calls.values()), "gflops_per_image": flops / 1e9}
        if not latents.isfinite().all():
            raise Diverged(
                f"the network returns NaN or infinity with sampling.precision={config.sampling.precision}; "
                "its weights may have diverged"
            )
        images = self.autoencoder.decode(restore_latents(latents[:num_images], data))
        return to_uint8(images, config.sampling.rounding).cpu().numpy()


def draw_labels(seeds: Iterable[int], num_classes: int, rule: str) -> dict[int, int]:
    """Map each seed to a class: seed mod num_classes for `balanced`, or a uniform draw that depends on the seed for `random`."""
    if rule == "balanced":
        return {seed: seed % num_classes for seed in seeds}
    return {seed: int(np.random.default_rng(derive_seed("class", seed)).integers(num_classes)) for seed in seeds}
