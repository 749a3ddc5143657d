"""Untrained networks that replace downloaded ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_fidelity import feature_extractor_inceptionv3 as port

CACHED_SD_VAE = "models--stabilityai--sd-vae-ft-ema"


def cache_untrained_autoencoder(cache: Path) -> None:
    """Write an untrained default autoencoder into a cache of the Hugging Face Hub. Its latents have the scale of SD-VAE's."""
    from diffusers import AutoencoderKL

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


def ldm_autoencoder(
    channels: int, widths: tuple[int, ...], num_blocks: int, attention_at: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Return random weights of an AutoencoderKL in the layout of latent diffusion.

    Args:
        channels: Channels of the latents.
        widths: Channels of each level, from the full resolution down.
        attention_at: Levels with attention.
    """
    g, weights = torch.Generator().manual_seed(0), {}

    def conv(name, c_in, c_out, size):
        weights[f"{name}.weight"] = torch.randn(c_out, c_in, size, size, generator=g) / (c_in * size**2) ** 0.5
        weights[f"{name}.bias"] = 0.1 * torch.randn(c_out, generator=g)

    def norm(name, width):
        weights[f"{name}.weight"], weights[f"{name}.bias"] = 1 + 0.1 * torch.randn(2, width, generator=g)

    def block(name, c_in, c_out):
        norm(f"{name}.norm1", c_in), norm(f"{name}.norm2", c_out)
        conv(f"{name}.conv1", c_in, c_out, 3), conv(f"{name}.conv2", c_out, c_out, 3)
        if c_in != c_out:
            conv(f"{name}.nin_shortcut", c_in, c_out, 1)

    def attention(name, width):
        norm(f"{name}.norm", width)
        for part in ("q", "k", "v", "proj_out"):
            conv(f"{name}.{part}", width, width, 1)

    def level(name, number, c_in, c_out, count):
        for i in range(count):
            block(f"{name}.block.{i}", c_in if i == 0 else c_out, c_out)
            if number in attention_at:
                attention(f"{name}.attn.{i}", c_out)

    last = widths[-1]
    for half in ("encoder", "decoder"):
        block(f"{half}.mid.block_1", last, last), block(f"{half}.mid.block_2", last, last), attention(f"{half}.mid.attn_1", last)
    conv("encoder.conv_in", 3, widths[0], 3), norm("encoder.norm_out", last), conv("encoder.conv_out", last, 2 * channels, 3)
    conv("decoder.conv_in", channels, last, 3), norm("decoder.norm_out", widths[0]), conv("decoder.conv_out", widths[0], 3, 3)
    conv("quant_conv", 2 * channels, 2 * channels, 1), conv("post_quant_conv", channels, channels, 1)
    for i, width in enumerate(widths):
        level(f"encoder.down.{i}", i, widths[max(i - 1, 0)], width, num_blocks)
        level(f"decoder.up.{i}", i, widths[min(i + 1, len(widths) - 1)], width, num_blocks + 1)
        if i < len(widths) - 1:
            conv(f"encoder.down.{i}.downsample.conv", width, width, 3)
        if i > 0:
            conv(f"decoder.up.{i}.upsample.conv", width, width, 3)
    return weights


def untrained_va_vae(file: Path, channels: int = 4) -> dict[str, torch.Tensor]:
    """Write a small untrained checkpoint in the published format of VA-VAE. Return the autoencoder's weights."""
    weights = ldm_autoencoder(channels, (32, 32, 64), num_blocks=1, attention_at=(2,))
    others = {
        "foundation_model.model.cls_token": torch.zeros(3),
        "linear_proj.weight": torch.zeros(3),
        "loss.logvar": torch.zeros(()),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": weights | others, "global_step": 7}, file)
    return weights


def untrained_inception(file: Path) -> None:
    """Write a weights file in the layout of the real network, with random weights."""

    class Untrained(port.FeatureExtractorInceptionV3):
        def load_state_dict(self, *args, **kwargs):  # keep the initial weights
            pass

    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        patch.setattr(port, "load_state_dict_from_url", lambda url, progress: {})
        net = Untrained("random", ["2048"])
        for module in net.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight)  # with the default, features vanish over 20 layers
            elif isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.normal_(module.running_mean, std=0.1)
                torch.nn.init.uniform_(module.running_var, 0.8, 1.2)
    # As published: a plain dict without the counters of newer versions of BatchNorm.
    state = {name: x for name, x in net.state_dict().items() if not name.endswith("num_batches_tracked")}
    assert len(state) == 472
    torch.save(state, file)


def untrained_encoder(file: Path) -> Path:
    """Write random weights of timm's test_vit (64 wide, patches of 16 pixels, 10x10 positions) and return the file."""
    import timm
    from safetensors.torch import save_file

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = timm.create_model("test_vit").state_dict()
        for name, x in weights.items():
            if x.ndim > 1:  # timm's small weights give nearly the same tokens for all images
                weights[name] = torch.randn_like(x) / (1 if "embed" in name else x[0].numel() ** 0.5)
    save_file(weights, file)
    return file
