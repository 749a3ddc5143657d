"""The network as diffusers loads it, with the parameter names of dit.py. `weights.source` makes one file of all."""

from __future__ import annotations

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config

from dit import DiT
from extras.lightningdit import LightningDiT


class DiTModel(DiT, ModelMixin, ConfigMixin):
    """`dit.DiT` without routes, which sampling does not use. transformer/config.json holds the arguments."""

    @register_to_config
    def __init__(
        self,
        input_size: int,
        patch_size: int,
        in_channels: int,
        num_classes: int,
        depth: int,
        width: int,
        num_heads: int,
        learn_sigma: bool = False,
    ):
        sizes = {"depth": depth, "width": width, "num_heads": num_heads, "patch_size": patch_size}
        latents = {"input_size": input_size, "in_channels": in_channels}
        super().__init__(num_classes=num_classes, learn_sigma=learn_sigma, **sizes, **latents)


class LightningDiTModel(DiTModel, LightningDiT):
    """`lightningdit.LightningDiT`, with the same arguments."""
