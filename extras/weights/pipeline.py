"""Class labels in, images out: what `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)` makes of an export.

`weights.source` makes one file of this module and of what it imports of the project.
"""

from __future__ import annotations

import inspect
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, ImagePipelineOutput, ModelMixin
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from common.randomness import SeedRandom
from edm.diffusion import EDM
from edm.sampler import HeunSampler
from extras.ddpm.diffusion import DDPM
from extras.ddpm.sampler import AncestralSampler
from guidance import GuidanceInputs, cfg
from sit.diffusion import SiT
from sit.sampler import FlowSampler

# diffusion["name"] -> its class and that of its sampler.
DIFFUSIONS = {"edm": (EDM, HeunSampler), "sit": (SiT, FlowSampler), "ddpm": (DDPM, AncestralSampler)}


class ClassToImagePipeline(DiffusionPipeline):
    """Samples images of classes.

    Args:
        transformer: the network; its configuration has num_classes, in_channels and input_size.
        vae: decodes latents; None where the latents are pixels.
        diffusion: `name`, the settings of that diffusion and, in `sampler`, those of its sampler.
        guidance: the keywords of classifier-free guidance, as `__call__` uses them by default.
        latents: how the network sees those of the autoencoder: (latents - latents_mean) / latents_std * scale_factor. The
            first two are a number per channel, or None.
        null_class: the label that stands for no label; None if it was never trained.
    """

    _optional_components = ["vae"]
    model_cpu_offload_seq = "transformer->vae"

    def __init__(
        self,
        transformer: ModelMixin,
        vae: AutoencoderKL | None,
        diffusion: dict | None = None,
        guidance: dict | None = None,
        latents: dict | None = None,
        null_class: int | None = None,
    ):
        super().__init__()
        self.register_modules(transformer=transformer, vae=vae)
        self.register_to_config(diffusion=diffusion, guidance=guidance, latents=latents, null_class=null_class)

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | list[int] | Tensor,
        seeds: int | list[int] | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance_interval: tuple[float | None, float | None] | None = None,
        guidance_channels: int | None = None,
        null_class: int | None = None,
        sampler: dict | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple:
        """Image i depends on class_labels[i], seeds[i] and the settings alone. What is None has the value of the configuration.

        Args:
            class_labels: one label per image, 0 to num_classes; num_classes stands for no label.
            seeds: one integer per image. The images are those of the project's sample.py for these seeds.
            generator: draws the seeds that are not given; one generator, or one per image.
            num_inference_steps: steps of the sampler.
            guidance_scale: of classifier-free guidance; 1 is off.
            guidance_interval: (low, high), guide only at noise levels in (low, high]: sigma for edm, t for sit and ddpm. None
                leaves a side open.
            guidance_channels: guide only this many first channels of the latents; DiT, SiT and LightningDiT published 3.
            null_class: the label that guidance moves away from.
            sampler: other settings of the sampler, {"S_churn": 10} or {"solver": "euler"}, say.
            output_type: `pil`, `np` (float32 [B, H, W, 3], 0 to 1), `pt` (float32 [B, 3, H, W], 0 to 1), or `latent`.
            return_dict: False returns a tuple.

        Raises:
            ValueError: labels that do not exist; another number of seeds or generators; settings that the sampler does not have;
                guidance by a null class that was never trained.
        """
        device, net = self._execution_device, self.transformer
        last = net.config.num_classes
        labels = torch.as_tensor(class_labels).reshape(-1).tolist()
        if not labels or not all(type(label) is int and 0 <= label <= last for label in labels):
            raise ValueError(f"class_labels={class_labels}: give one label or several, each 0 to {last}")
        given = draw_seeds(generator, len(labels)) if seeds is None else list(seeds) if hasattr(seeds, "__iter__") else [seeds]
        if not all(hasattr(seed, "__index__") for seed in given):  # the text "3" would draw other numbers than 3
            raise ValueError(f"seeds={seeds}: give one integer per image")
        if len(given) != len(labels):
            raise ValueError(f"{len(labels)} class labels need as many seeds, not {len(given)}")

        guidance = dict(self.config.guidance)
        if guidance_scale is not None:
            guidance["cfg_scale"] = guidance_scale
        if guidance_interval is not None:
            guidance["level_lo"], guidance["level_hi"] = guidance_interval
        if guidance_channels is not None:
            guidance["channels"] = guidance_channels
        num_channels = net.config.in_channels
        if not 1 <= (guidance.get("channels") or num_channels) <= num_channels:
            raise ValueError(f"guidance_channels={guidance['channels']}: the latents have {num_channels} channels")
        null_class = self.config.null_class if null_class is None else null_class
        if null_class is not None and not 0 <= null_class <= last:  # which would stop the process on a GPU
            raise ValueError(f"null_class={null_class}: give a label, 0 to {last}")
        if null_class is None and guidance["cfg_scale"] != 1:
            raise ValueError(f"guidance_scale={guidance['cfg_scale']} needs the null class, which was never trained: use 1")

        settings = {key: value for key, value in self.config.diffusion.items() if key not in ("name", "sampler")}
        kind, sampler_kind = DIFFUSIONS[self.config.diffusion["name"]]
        changed = dict(sampler or {}) | ({} if num_inference_steps is None else {"num_steps": num_inference_steps})
        own = sampler_kind(**self.config.diffusion["sampler"])
        if unknown := changed.keys() - asdict(own):
            raise ValueError(f"sampler={sampler}: {min(unknown)} is not a setting of {sampler_kind.__name__}")
        diffusion = kind(**settings, sampler=replace(own, **changed))

        def denoise(x: Tensor, level: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(device.type, net.dtype, enabled=net.dtype != torch.float32):
                return diffusion.denoise(net, x, level, y)

        random = SeedRandom(given, device)
        denoiser = cfg(GuidanceInputs(denoise, null_class), **guidance)
        size = net.config.input_size
        y = torch.tensor(labels, device=device)
        latents = diffusion.sample(denoiser, random.randn(num_channels, size, size), y, random)
        images = latents if output_type == "latent" else self.decode(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def decode(self, latents: Tensor, output_type: str) -> object:
        """Latents of the network (B, C, H, W) -> images as `output_type` says; grey becomes RGB."""
        scaling = self.config.latents
        images = latents / scaling["scale_factor"]
        if scaling["latents_mean"] is not None:
            mean, std = (images.new_tensor(scaling[key]).reshape(-1, 1, 1) for key in ("latents_mean", "latents_std"))
            images = images * std + mean
        if self.vae is not None:
            images = self.vae.decode(images.to(self.vae.dtype)).sample.float()
        return VaeImageProcessor().postprocess(images.expand(-1, 3, -1, -1), output_type)

    def save_pretrained(self, save_directory: str | Path, **kwargs) -> None:
        """As in diffusers; the code goes with it, so that the folder loads elsewhere. `push_to_hub` is a method of its own."""
        if kwargs.pop("push_to_hub", False):
            raise ValueError("push_to_hub=True would upload the folder without its code; call pipeline.push_to_hub(repo_id)")
        super().save_pretrained(save_directory, **kwargs)
        folder = Path(save_directory)
        index = json.loads((folder / self.config_name).read_text(encoding="utf-8"))
        for key, part, place in (("_class_name", self, folder), ("transformer", self.transformer, folder / "transformer")):
            file = Path(inspect.getfile(type(part)))
            shutil.copyfile(file, place / file.name)
            index[key] = [file.stem, type(part).__name__]
        (folder / self.config_name).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def draw_seeds(generator: torch.Generator | list[torch.Generator] | None, count: int) -> list[int]:
    """`count` seeds, from one generator or from one each."""
    generators = generator if isinstance(generator, list) else [generator] * count
    return [int(torch.randint(2**63 - 1, (), generator=g, device=g.device if g else "cpu")) for g in generators]
