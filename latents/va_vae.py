"""Load VA-VAE (LightningDiT, arXiv 2501.01423), which is a latent diffusion AutoencoderKL (arXiv 2112.10752), with diffusers."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError
from latents.torch_files import load_tensors

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

# Patterns that convert latent diffusion's parameter names to diffusers, which numbers the decoder levels in reverse order.
# diffusers' own converter ignores attention layers inside levels, which VA-VAE uses on 16x16 feature maps.
LDM_TO_DIFFUSERS = (
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.", ".mid_block.attentions.0."),
    (r"\.down\.(\d+)\.", r".down_blocks.\1."),
    (r"\.up\.(\d+)\.", r".up_blocks.\1."),
    (r"\.block\.", ".resnets."),
    (r"\.attn\.", ".attentions."),
    (r"\.(down|up)sample\.", r".\1samplers.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"\.norm_out\.", ".conv_norm_out."),
    (r"(\.attentions\.\d+)\.norm\.", r"\1.group_norm."),
    (r"(\.attentions\.\d+)\.([qkv])\.", r"\1.to_\2."),
    (r"(\.attentions\.\d+)\.proj_out\.", r"\1.to_out.0."),
)


def find_va_vae(location: str) -> Path:
    """Return the weights file `location`, or the only .pt, .ckpt or .safetensors file in that folder."""
    path = Path(location)
    files = [path] if path.is_file() else [f for f in path.glob("*") if f.suffix in (".pt", ".ckpt", ".safetensors")]
    files = [file for file in files if file.name != "latents_stats.pt"]  # LightningDiT publishes this file with the weights
    if len(files) != 1:
        raise UserError(f"autoencoder=va-vae:{location} holds {len(files)} files of weights; give the path of one")
    return files[0]


def autoencoder_kl() -> type[AutoencoderKL]:
    """Import diffusers' AutoencoderKL and suppress all warnings. This function delays the import because it is slow."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from diffusers import AutoencoderKL
    finally:
        logging.disable(logging.NOTSET)
    return AutoencoderKL


def load_va_vae(file: Path):
    """Load a latent diffusion checkpoint into an AutoencoderKL with the same layer sizes."""
    stored = load_tensors(file)

    def count(pattern: str) -> int:
        return len({match[0] for name in weights if (match := re.match(pattern, name))})

    parts = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")  # the file also contains the discriminator and DINOv2
    try:
        weights = {name: value for name, value in stored.get("state_dict", stored).items() if name.startswith(parts)}
        num_levels = count(r"encoder\.down\.\d+\.")
        widths = [len(weights[f"encoder.down.{i}.block.0.conv1.weight"]) for i in range(num_levels)]
        has_attention = [f"encoder.down.{i}.attn.0.q.weight" in weights for i in range(num_levels)]
        vae = autoencoder_kl()(
            block_out_channels=widths,
            layers_per_block=count(r"encoder\.down\.0\.block\.\d+\."),
            latent_channels=weights["post_quant_conv.weight"].shape[1],
            down_block_types=["AttnDownEncoderBlock2D" if has else "DownEncoderBlock2D" for has in has_attention],
            up_block_types=["AttnUpDecoderBlock2D" if has else "UpDecoderBlock2D" for has in reversed(has_attention)],
            scaling_factor=1.0,  # LightningDiT normalises each channel instead of scaling
        )
        # diffusers implements the 1x1 convolutions of the attention layers as linear layers.
        weights = {name: x.flatten(1) if ".attn" in name and x.ndim > 1 else x for name, x in weights.items()}
        vae.load_state_dict({_diffusers_name(name, num_levels): x for name, x in weights.items()})
    except (AttributeError, KeyError, IndexError, ValueError, RuntimeError) as e:
        reason = " ".join(str(e).split())[:200]
        raise UserError(f"{file} does not hold the weights of latent diffusion's AutoencoderKL: {reason}") from e
    return vae


def _diffusers_name(name: str, num_levels: int) -> str:
    for pattern, replacement in LDM_TO_DIFFUSERS:
        name = re.sub(pattern, replacement, name)
    return re.sub(r"(?<=up_blocks\.)\d+", lambda level: str(num_levels - 1 - int(level[0])), name)
