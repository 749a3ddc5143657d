"""The network as diffusers loads it, with the parameter names of dit.py. `extras.weights.source` makes one file of all."""

from __future__ import annotations

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config

from dit import DiT
from extras.lightningdit import LightningDiT


class DiTModel(DiT, ModelMixin, ConfigMixin):
    """`dit.DiT` without routes, which sampling does not use. transformer/config.json holds the arguments."""

    @register_to_config
    def __init__(self, input_size, patch_size, in_channels, num_classes, depth, width, num_heads, learn_sigma=False):
        super().__init__(
            input_size=input_size, patch_size=patch_size, in_channels=in_channels, num_classes=num_classes,
            depth=depth, width=width, num_heads=num_heads, learn_sigma=learn_sigma,
        )  # fmt: skip


class LightningDiTModel(DiTModel, LightningDiT):
    """`lightningdit.LightningDiT`, with the same arguments."""
