"""Published state dicts in the names, the clock and the sign of this project's networks.

Their parameter names are those of facebookresearch/DiT or of hustvl/LightningDiT, as here. C channels, p patch size.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import dit
from common.errors import UserError
from latents.arrays import load_torch_file

# Whose layout a file has: the choices of model and diffusion.
KINDS_OF_WEIGHTS = {
    "dit": ("dit", "ddpm"),
    "sit": ("dit", "sit"),
    "repa": ("dit", "sit"),
    "tread": ("tread", "edm"),
    "lightningdit": ("lightningdit", "sit"),
}
TURNED = ("sit", "lightningdit")  # their clock runs from noise at 0 to data at 1, and they predict data - noise
FILE_TYPES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
# As training codes call the weights, their EMA and the count of steps in one file.
_CONTAINERS = (("model", "ema"), ("model_state_dict", "ema_state_dict"))
_STEP_NAMES = ("step", "steps", "train_steps")
_WRAPPERS = ("module.", "_orig_mod.")  # of DDP and of torch.compile


@dataclass(frozen=True)
class Published:
    """What a published file holds: state dicts, equal where it has one only, and the step if it says it."""

    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    step: int | None


@dataclass(frozen=True)
class Sizes:
    """What the shapes of a state dict say about its network."""

    backbone: str
    input_size: int
    in_channels: int
    num_classes: int
    learn_sigma: bool


# ----------------------------------------------------------------------------------------------------------------------
# Files.


def read_published(file: Path) -> Published:
    """Read a .safetensors file, or one of torch.save without running any code in it. The tensors are maps of the file.

    Raises:
        UserError: it cannot be read, holds objects that could run code, or no state dict.
    """
    try:
        # Training codes store their arguments, plain values in a Namespace, beside the weights.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = load_file(file) if file.suffix == ".safetensors" else load_torch_file(file)
    except (OSError, SafetensorError) as e:
        raise UserError(f"{file} is truncated or not a safetensors file: {e}; download it again") from e
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a {type(content).__name__} and no state dict; give a file of weights by name")
    for names in _CONTAINERS:
        held = [content[name] for name in names if isinstance(content.get(name), dict)]
        if held:
            steps = [content[name] for name in _STEP_NAMES if type(content.get(name)) is int and content[name] >= 0]
            model, ema = (_plain_tensors(file, one) for one in (held[0], held[-1]))
            return Published(model, ema, steps[0] if steps else None)
    weights = _plain_tensors(file, content)
    return Published(weights, weights, None)


def _plain_tensors(file: Path, state: dict) -> dict[str, Tensor]:
    """The state dict without the prefixes of wrappers. Raises UserError for values that are no plain tensors of this file."""
    size = file.stat().st_size
    for name, value in state.items():
        is_plain = isinstance(value, Tensor) and value.layout is torch.strided and value.is_floating_point()
        # A view of one stored number can claim any shape.
        if not isinstance(name, str) or not is_plain or value.numel() * value.element_size() > size:
            raise UserError(f"{file}: {name!r:.80} is no plain tensor of floats, which every value of a state dict must be")
    for prefix in _WRAPPERS:
        if state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


# ----------------------------------------------------------------------------------------------------------------------
# Shapes.


def read_sizes(file: Path, state: dict[str, Tensor], backbones: Mapping[str, tuple[int, int, int, int]]) -> Sizes:
    """The backbone and its sizes.

    Args:
        backbones: (depth, width, heads, patch size) by name.

    Raises:
        UserError: it is none of these networks, with what its tensors say.
    """
    wanted = {"x_embedder.proj.weight": 4, "pos_embed": 3, "y_embedder.embedding_table.weight": 2, "final_layer.linear.weight": 2}
    for name, num_axes in wanted.items():
        if name not in state or state[name].ndim != num_axes:
            found = (
                f"shape {list(state[name].shape)}" if name in state else f"not there; it holds {', '.join(list(state)[:4])}, ..."
            )
            raise UserError(f"{file}: {name} is {found}; give the weights of a DiT, in its published names")
    width, in_channels, patch_size, _ = state["x_embedder.proj.weight"].shape
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    names = {(d, w, p): name for name, (d, w, _, p) in backbones.items()}
    if (depth, width, patch_size) not in names:
        raise UserError(
            f"{file} has {depth} blocks of width {width} and patches of {patch_size}; the backbones of this kind= have (blocks x "
            f"width / patch) {', '.join(f'{d} x {w} / {p}' for d, w, p in names)}; give another kind=, or weights of one of these"
        )
    grid = math.isqrt(num_tokens := state["pos_embed"].shape[1])
    out_channels, rest = divmod(len(state["final_layer.linear.weight"]), patch_size**2)
    num_classes = len(state["y_embedder.embedding_table.weight"]) - 1  # its last row is the null class
    if num_classes < 1:
        raise UserError(
            f"{file}: y_embedder.embedding_table.weight has {num_classes + 1} rows and needs one for each class and one for the "
            "null class; give weights that were trained with classes"
        )
    if grid**2 != num_tokens or not grid or rest or out_channels not in (in_channels, 2 * in_channels):
        raise UserError(
            f"{file}: {num_tokens} positions and {out_channels} output channels for {in_channels} input channels are not those "
            "of a DiT for square latents; give its published file unchanged"
        )
    return Sizes(
        backbone=names[depth, width, patch_size],
        input_size=grid * patch_size,
        in_channels=in_channels,
        num_classes=num_classes,
        learn_sigma=out_channels == 2 * in_channels,
    )


def check_names(file: Path, state: dict[str, Tensor], like: dict[str, Tensor], backbone: str) -> None:
    """Raises UserError unless a state dict has exactly the tensors of the network, by name and shape."""
    for these, those, words in ((like, state, "lacks"), (state, like, "holds, beside the network's,")):
        if missing := [name for name in these if name not in those]:
            shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
            raise UserError(
                f"{file} {words} {len(missing)} tensors ({shown}), so that it is not the {backbone} that its shapes say; "
                "give another kind=, or its published file unchanged"
            )
    for name, value in like.items():
        if state[name].shape != value.shape:
            found, needed = list(state[name].shape), list(value.shape)
            raise UserError(f"{file}: {name} has shape {found}, and that of {backbone} has {needed}; is it of another network?")


# ----------------------------------------------------------------------------------------------------------------------
# Names, clock and sign.


def as_dit(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of REPA without its projectors, which align hidden states with an encoder in training alone.

    Its first checkpoints call the blocks after the aligned ones decoder_blocks.0, ...: here they are counted on.
    """
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    renamed = {}
    for name, value in state.items():
        first, _, rest = name.partition(".")
        number, _, last = rest.partition(".")
        if first == "decoder_blocks" and number.isdecimal():
            name = f"blocks.{depth + int(number)}.{last}"
        if first != "projectors":
            renamed[name] = value
    return renamed


def turn_clock_and_sign(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """ours(x, t, y) = -published(x, 1 - t, y), by other weights of two linear layers, without the unused output channels.

    The clock: the first layer of the time embedding sees cos(w t) and sin(w t). With s = 1 - t, cos(w s) = cos(w) cos(w t) +
    sin(w) sin(w t) and sin(w s) = sin(w) cos(w t) - cos(w) sin(w t), so that a layer W on the features of s is another layer on
    those of t. The sign: of the last layer. Both are exact but for rounding to float32.
    """
    state = dict(state)
    first, half = state["t_embedder.mlp.0.weight"].double(), dit.TimestepEmbedder.NUM_FEATURES // 2
    w = dit.TimestepEmbedder.frequencies().double()
    cosines, sines = first[:, :half], first[:, half:]
    turned = torch.cat([cosines * w.cos() + sines * w.sin(), cosines * w.sin() - sines * w.cos()], dim=1)
    state["t_embedder.mlp.0.weight"] = turned.float()
    in_channels, patch_size = state["x_embedder.proj.weight"].shape[1:3]
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        per_pixel = state[name].unflatten(0, (patch_size**2, -1))  # (p*p, C or 2C, ...)
        state[name] = -per_pixel[:, :in_channels].flatten(0, 1).contiguous()
    return state
