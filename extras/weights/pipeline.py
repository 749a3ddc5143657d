"""Images from class labels: the pipeline that `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)` loads.

`join_source` in export.py joins this module and the project's modules that it imports into one file.
"""

from __future__ import annotations

import operator

import torch
from diffusers import AutoencoderKL, ConfigMixin, DiffusionPipeline, ImagePipelineOutput, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from common.randomness import SeedRandom
from dit import DiT
from edm.diffusion import EDM
from extras.ddpm import DDPM
from extras.lightningdit import LightningDiT
from guidance import GuidanceInputs, cfg
from sit.diffusion import SiT

DIFFUSIONS = {"edm": EDM, "sit": SiT, "ddpm": DDPM}  # by diffusion["name"]


class DiTModel(DiT, ModelMixin, ConfigMixin):
    """`dit.DiT` without routes, which only training uses. transformer/config.json holds the arguments."""

    @register_to_config
    def __init__(self, input_size, patch_size, in_channels, num_classes, depth, width, num_heads, learn_sigma=False):
        super().__init__(
            input_size=input_size, patch_size=patch_size, in_channels=in_channels, num_classes=num_classes,
            depth=depth, width=width, num_heads=num_heads, learn_sigma=learn_sigma,
        )  # fmt: skip


class LightningDiTModel(DiTModel, LightningDiT):
    """`lightningdit.LightningDiT`, with the same arguments."""


class ClassToImagePipeline(DiffusionPipeline):
    """Samples images of classes.

    Args:
        transformer: the network. Its configuration has num_classes, in_channels and input_size.
        vae: decodes latents. None if the latents are pixels.
        diffusion: `name`, the settings of that diffusion and, in `sampler`, those of its sampler.
        guidance: default keywords of classifier-free guidance.
        latents: scale_factor, latents_mean and latents_std. The network's latents are (vae latents - latents_mean) /
            latents_std * scale_factor. Mean and std are a number per channel, or None.
        null_class: the label for unconditional samples. None if it was never trained.
        rounding: 8-bit images `round` to the nearest level, or `truncate` to the level below.
    """

    _optional_components = ["vae"]
    model_cpu_offload_seq = "transformer->vae"

    def __init__(
        self, transformer: ModelMixin, vae: AutoencoderKL | None,
        diffusion=None, guidance=None, latents=None, null_class=None, rounding="round",
    ):  # fmt: skip
        super().__init__()
        self.register_modules(transformer=transformer, vae=vae)
        settings = {"diffusion": diffusion, "guidance": guidance, "latents": latents}
        self.register_to_config(**settings, null_class=null_class, rounding=rounding)

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | list[int] | Tensor,
        seeds: int | list[int] | None = None,
        generator: torch.Generator | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        guidance: dict | None = None,
        sampler: dict | None = None,
        output_type: str = "pil",
    ) -> ImagePipelineOutput:
        """Image i depends on class_labels[i], seeds[i] and the settings alone. None means the value of the configuration.

        Args:
            class_labels: one label per image, 0 to num_classes, which is the null class.
            seeds: one integer per image, which gives the image of the project's sample.py for that seed.
            generator: draws the seeds if they are not given.
            num_inference_steps: steps of the sampler.
            guidance_scale: the scale of classifier-free guidance. 1 is off.
            guidance: other settings of guidance. {"level_lo": 0.2, "level_hi": 0.8} guides only at noise levels in (0.2, 0.8]
                (sigma for edm, t for sit and ddpm). {"channels": 3} guides only the first three channels of the latents.
            sampler: other settings of the sampler, such as {"S_churn": 10} or {"solver": "euler"}.
            output_type: `pil`, `np` (float32 [B, H, W, 3], 0 to 1), `pt` (float32 [B, 3, H, W], 0 to 1), or `latent`.

        Raises:
            ValueError: an unknown label, a wrong number of seeds, guidance without a trained null class, or an unknown setting
                of the sampler.
            TypeError: a seed that is not an integer, or an unknown setting of guidance.
        """
        device, net, defaults = self._execution_device, self.transformer, self.config
        labels = torch.as_tensor(class_labels).reshape(-1).tolist()
        last, null_class = net.config.num_classes, defaults.null_class
        if any(label not in range(last + 1) for label in labels):  # on a GPU, the embedding would abort the process
            raise ValueError(f"class_labels={class_labels}: give labels from 0 to {last}")
        if seeds is None:
            generator_device = generator.device if generator else "cpu"
            seeds = torch.randint(2**63 - 1, (len(labels),), generator=generator, device=generator_device).tolist()
        seeds = [operator.index(seed) for seed in (seeds if hasattr(seeds, "__iter__") else [seeds])]

        guidance = defaults.guidance | (guidance or {}) | ({} if guidance_scale is None else {"cfg_scale": guidance_scale})
        if null_class is None and guidance["cfg_scale"] != 1:
            raise ValueError(f"guidance_scale={guidance['cfg_scale']} needs the null class, which was never trained: use 1")

        settings = dict(defaults.diffusion)
        kind = DIFFUSIONS[settings.pop("name")]
        settings["sampler"] = settings["sampler"] | (sampler or {})
        settings["sampler"] |= {} if num_inference_steps is None else {"num_steps": num_inference_steps}
        diffusion = kind(**settings)

        def denoise(x: Tensor, level: Tensor, y: Tensor) -> Tensor:
            with torch.autocast(device.type, net.dtype, enabled=net.dtype != torch.float32):
                return diffusion.denoise(net, x, level, y)

        random = SeedRandom(seeds, device)
        noise = random.randn(net.config.in_channels, net.config.input_size, net.config.input_size)
        y = torch.tensor(labels, dtype=torch.int64, device=device)
        latents = diffusion.sampler(cfg(GuidanceInputs(denoise, null_class), **guidance), noise, y, random)
        images = latents if output_type == "latent" else self.decode(latents, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images)

    def decode(self, latents: Tensor, output_type: str) -> object:
        """Latents of the network (B, C, H, W) -> images in the form of `output_type`. Grey becomes RGB."""
        scaling = self.config.latents
        images = latents / scaling["scale_factor"]
        if scaling["latents_mean"] is not None:
            mean, std = (images.new_tensor(scaling[key]).reshape(-1, 1, 1) for key in ("latents_mean", "latents_std"))
            images = images * std + mean
        if self.vae is not None:
            images = self.vae.decode(images.to(self.vae.dtype)).sample.float()
        if self.config.rounding == "truncate" and output_type == "pil":  # which rounds
            images = (images * 127.5 + 127.5).floor() / 127.5 - 1
        return VaeImageProcessor().postprocess(images.expand(-1, 3, -1, -1), output_type)
