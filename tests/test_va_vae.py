"""VA-VAE against an independent implementation of latent diffusion's autoencoder, and files without its weights."""

import re

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from stand_ins import ldm_autoencoder, untrained_va_vae

from common.errors import UserError
from latents import autoencoders, va_vae

CPU = torch.device("cpu")


def load(path, channels=4):
    return autoencoders.build(f"va-vae:{path}", CPU, channels)


class Reference:
    """Latent diffusion's Encoder and Decoder (arXiv 2112.10752) as functions of a state dict in their layout."""

    def __init__(self, weights):
        self.weights = {name: value.double() for name, value in weights.items()}
        self.num_levels = 1 + max(int(match[1]) for name in weights if (match := re.match(r"encoder\.down\.(\d+)", name)))

    def conv(self, name, x, **kwargs):
        return F.conv2d(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], **kwargs)

    def norm(self, name, x):
        return F.group_norm(x, 32, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], eps=1e-6)

    def block(self, name, x):
        h = self.conv(f"{name}.conv1", F.silu(self.norm(f"{name}.norm1", x)), padding=1)
        h = self.conv(f"{name}.conv2", F.silu(self.norm(f"{name}.norm2", h)), padding=1)
        return h + (self.conv(f"{name}.nin_shortcut", x) if f"{name}.nin_shortcut.weight" in self.weights else x)

    def attention(self, name, x):
        h = self.norm(f"{name}.norm", x)
        q, k, v = (self.conv(f"{name}.{part}", h).flatten(2) for part in "qkv")  # (B, C, HW)
        weights = torch.softmax(torch.einsum("bci,bcj->bij", q, k) / q.shape[1] ** 0.5, dim=2)
        return x + self.conv(f"{name}.proj_out", torch.einsum("bij,bcj->bci", weights, v).reshape(x.shape))

    def level(self, name, x):
        i = 0
        while f"{name}.block.{i}.conv1.weight" in self.weights:
            x = self.block(f"{name}.block.{i}", x)
            if f"{name}.attn.{i}.q.weight" in self.weights:
                x = self.attention(f"{name}.attn.{i}", x)
            i += 1
        return x

    def middle(self, name, x):
        x = self.attention(f"{name}.attn_1", self.block(f"{name}.block_1", x))
        return self.block(f"{name}.block_2", x)

    def encode(self, images):
        x = self.conv("encoder.conv_in", images.double(), padding=1)
        for i in range(self.num_levels):
            x = self.level(f"encoder.down.{i}", x)
            if i < self.num_levels - 1:
                x = self.conv(f"encoder.down.{i}.downsample.conv", F.pad(x, (0, 1, 0, 1)), stride=2)
        x = F.silu(self.norm("encoder.norm_out", self.middle("encoder.mid", x)))
        return self.conv("quant_conv", self.conv("encoder.conv_out", x, padding=1))

    def decode(self, latents):
        x = self.conv("decoder.conv_in", self.conv("post_quant_conv", latents.double()), padding=1)
        x = self.middle("decoder.mid", x)
        for i in reversed(range(self.num_levels)):
            x = self.level(f"decoder.up.{i}", x)
            if i > 0:
                x = self.conv(f"decoder.up.{i}.upsample.conv", F.interpolate(x, scale_factor=2.0, mode="nearest"), padding=1)
        return self.conv("decoder.conv_out", F.silu(self.norm("decoder.norm_out", x)), padding=1)


@pytest.mark.parametrize("attention_at", [(2,), (), (1, 2)])
def test_va_vae_encodes_and_decodes_like_latent_diffusions_autoencoder_with_the_same_weights(tmp_path, attention_at):
    weights = ldm_autoencoder(4, (32, 64, 96), num_blocks=2, attention_at=attention_at)
    torch.save({"state_dict": weights}, tmp_path / "vae.ckpt")
    vae, reference = load(tmp_path / "vae.ckpt"), Reference(weights)
    g = torch.Generator().manual_seed(1)
    images, latents = torch.rand(2, 3, 16, 16, generator=g) * 2 - 1, torch.randn(2, 4, 4, 4, generator=g)
    mean, log_variance = reference.encode(images).chunk(2, dim=1)
    expected = torch.cat([mean, log_variance.clamp(-30, 20)], dim=1)
    assert torch.allclose(vae.encode_moments(images).double(), expected, atol=1e-4, rtol=1e-4)
    assert torch.allclose(vae.decode(latents).double(), reference.decode(latents), atol=1e-4, rtol=1e-4)
    assert vae.scaling == (1.0, 4, None, None) and vae.scaling.downsampling == 4


def test_weights_are_found_next_to_latents_stats_pt_and_in_safetensors(tmp_path):
    weights = untrained_va_vae(tmp_path / "a" / "vavae.pt")
    torch.save({"mean": torch.zeros(1, 4, 1, 1)}, tmp_path / "a" / "latents_stats.pt")
    save_file(weights, tmp_path / "b.safetensors")
    latents = torch.randn(1, 4, 4, 4)
    decoded = [load(tmp_path / path).decode(latents) for path in ("a", "a/vavae.pt", "b.safetensors")]
    assert torch.equal(decoded[0], decoded[1]) and torch.equal(decoded[0], decoded[2])


@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".safetensors"])
def test_a_replaced_file_of_weights_in_a_folder_has_another_hash(tmp_path, suffix):
    file = tmp_path / f"vae{suffix}"
    hashes = []
    for content in ("first", "second"):
        file.write_text(content)
        assert va_vae.find_va_vae(str(tmp_path)) == file
        hashes.append(autoencoders.hash_local_files(f"va-vae:{tmp_path}"))
    assert hashes[0] != hashes[1]


def test_files_without_its_weights_are_refused_by_name(tmp_path):
    weights = untrained_va_vae(tmp_path / "good.pt")
    missing = {name: value for name, value in weights.items() if name != "decoder.up.2.attn.1.proj_out.bias"}
    for name, content, message in (
        ("missing.pt", {"state_dict": missing}, "does not hold the weights .*attentions.1.to_out.0.bias"),
        ("more.pt", weights | {"encoder.extra": torch.zeros(1)}, "does not hold the weights .*encoder.extra"),
        ("other.pt", {"model": {"a": torch.zeros(1)}}, "does not hold the weights"),
        ("list.pt", [torch.zeros(1)], "does not hold the weights"),
        ("short.pt", (tmp_path / "good.pt").read_bytes()[:-1000], "cannot be read: "),
        ("text.safetensors", b"nothing", "cannot be read: SafetensorError"),
    ):
        (tmp_path / name).write_bytes(content) if isinstance(content, bytes) else torch.save(content, tmp_path / name)
        with pytest.raises(UserError, match=f"{name} {message}") as refused:
            load(tmp_path / name)
        assert "\n" not in str(refused.value)
