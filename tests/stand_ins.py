"""Untrained networks in place of those that commands download."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from torch_fidelity import feature_extractor_inceptionv3 as port

CACHED_SD_VAE = "models--stabilityai--sd-vae-ft-ema"


def cache_untrained_autoencoder(cache: Path) -> None:
    """Write the default autoencoder, untrained, into a cache of the hub's library; its latents have SD-VAE's scale."""
    torch.manual_seed(0)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8,) * 4, latent_channels=4, norm_num_groups=4, layers_per_block=1,
    )  # fmt: skip
    moments = vae.encode(torch.rand(64, 3, 64, 64) * 2 - 1).latent_dist.parameters
    with torch.no_grad():
        vae.quant_conv.weight[:4] *= 5 / moments[:, :4].std()
        vae.quant_conv.weight[4:] *= 0
        vae.quant_conv.bias[4:] = -12
    (cache / CACHED_SD_VAE / "refs").mkdir(parents=True)
    (cache / CACHED_SD_VAE / "refs" / "main").write_text("made_here")
    vae.save_pretrained(cache / CACHED_SD_VAE / "snapshots" / "made_here")


def untrained_inception(file: Path) -> None:
    """Write a weights file of the real network's layout, with random numbers."""

    class Untrained(port.FeatureExtractorInceptionV3):
        def load_state_dict(self, state_dict):  # keep the initial weights
            pass

    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        patch.setattr(port, "load_state_dict_from_url", lambda url, progress: {})
        net = Untrained("random", ["2048"])
        for module in net.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight)  # the default shrinks features to nothing over 20 layers
            elif isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.normal_(module.running_mean, std=0.1)
                torch.nn.init.uniform_(module.running_var, 0.8, 1.2)
    # As published: a plain dict without the counters that newer versions of BatchNorm keep.
    state = {name: x for name, x in net.state_dict().items() if not name.endswith("num_batches_tracked")}
    assert len(state) == 472
    torch.save(state, file)
