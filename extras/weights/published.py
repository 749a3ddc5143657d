"""Convert published state dicts to the parameter names, time convention and output sign of our networks.

Our networks use the parameter names of facebookresearch/DiT and hustvl/LightningDiT. Shapes: C = channels, p = patch size.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from common.errors import UserError
from dit import TimestepEmbedder
from latents.torch_files import load_tensors

# Keys under which checkpoints of other projects store the weights, the EMA and the step.
MODEL_NAMES, EMA_NAMES = ("model", "model_state_dict"), ("ema", "ema_state_dict")
STEP_NAMES = ("step", "steps", "train_steps")


def read_published(file: Path, kind: str) -> tuple[list[dict[str, Tensor]], int, int | None]:
    """Read (weights, step, num_classes) from a .safetensors or torch.save file, without running code from the file.

    The weights are those of the model and of its EMA, in float32. If the file contains only one of them, both are the same.
    Without a step, the step is 0. `num_classes` is None unless the file contains its project's arguments.

    Raises:
        UserError: If the file cannot be read, could run code, or contains no state dict or values that are not finite. Also
            raised if the arguments of SiT or REPA name another path than the linear one, or another prediction than the velocity.
    """
    # Other projects store their command-line arguments next to the weights, as plain values in a Namespace.
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = _as_dict(load_tensors(file))

    def pick(names: tuple[str, ...]) -> object:
        return next((content[name] for name in names if name in content), content)

    weights = [_plain_names(file, pick(names)) for names in (MODEL_NAMES + EMA_NAMES, EMA_NAMES + MODEL_NAMES)]
    step = next((content[name] for name in STEP_NAMES if type(content.get(name)) is int), 0)
    arguments = _as_dict(content.get("args"))  # of DiT, SiT and REPA
    transport = _as_dict(_as_dict(content.get("config")).get("transport"))  # of LightningDiT
    # SiT, REPA and LightningDiT can train other paths and predictions with networks of the same shapes.
    for name, accepted in (("path_type", ("linear",)), ("prediction", ("v", "velocity"))):
        value = arguments.get(name, transport.get(name))
        if kind in ("sit", "repa", "lightningdit") and value is not None and str(value).lower() not in accepted:
            raise UserError(f"{file} was trained with {name}={value}; only {' or '.join(accepted)} can be sampled")
    num_classes = arguments.get("num_classes")
    weights = [*map(without_projectors, weights)] if kind == "repa" else weights
    return weights, step, num_classes if type(num_classes) is int else None


def _as_dict(value: object) -> dict:
    value = vars(value) if isinstance(value, argparse.Namespace) else value
    return value if isinstance(value, dict) else {}


def _plain_names(file: Path, state: object) -> dict[str, Tensor]:
    """Return the state dict in float32, without wrapper prefixes."""
    items = state.items() if isinstance(state, dict) else ()
    if not items or not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in items):
        raise UserError(f"{file} holds no state dict; give a file that maps names to tensors")
    # Remove the prefixes of DDP, torch.compile and TREAD's preconditioning, in any order.
    while len(first := {name.partition(".")[0] for name in state}) == 1 and first < {"module", "_orig_mod", "model"}:
        state = {name.partition(".")[2]: value for name, value in state.items()}
    if broken := [name for name, value in state.items() if not value.isfinite().all()]:
        raise UserError(f"{file}: {broken[0]} holds NaN or infinite values")
    return {name: value.float() for name, value in state.items()}


def read_sizes(
    file: Path, state: dict[str, Tensor], backbones: Mapping[str, tuple[int, int, int, int]], num_classes: int | None
) -> dict[str, dict]:
    """Infer values of model.* and data.* from tensor shapes. The caller must check that all tensors fit these values.

    Args:
        backbones: (depth, width, heads, patch size) by name.
        num_classes: Number of classes, if it is known. Otherwise, the last of several rows of the label table is the null class.

    Raises:
        UserError: If the network is not among `backbones`, or if `num_classes` contradicts the label table.
    """
    try:
        width, in_channels, patch_size, _ = state["x_embedder.proj.weight"].shape
        _, num_tokens, _ = state["pos_embed"].shape
        num_rows = len(state["y_embedder.embedding_table.weight"])
        num_outputs = len(state["final_layer.linear.weight"])
    except (KeyError, ValueError) as e:
        raise UserError(f"{file} is not a DiT with its published names ({e}); it holds {', '.join(list(state)[:4])}, ...") from e
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    names = {(d, w, p): name for name, (d, w, _, p) in backbones.items()}
    if (depth, width, patch_size) not in names:
        known = ", ".join(f"{d} x {w} / {p}" for d, w, p in names)
        raise UserError(f"{file} has blocks x width / patch {depth} x {width} / {patch_size}; this kind= has {known}")
    num_classes = max(num_rows - 1, 1) if num_classes is None else num_classes
    if num_rows - num_classes not in (0, 1):
        fits = f"num_classes={max(num_rows - 1, 1)} or {num_rows}"
        raise UserError(f"{file} has a label table of {num_rows} rows, which fits {fits}, not {num_classes}")
    size = {"input_size": math.isqrt(num_tokens) * patch_size, "in_channels": in_channels, "num_classes": num_classes}
    model = {"backbone": names[depth, width, patch_size], "learn_sigma": num_outputs == 2 * in_channels * patch_size**2}
    # Networks that were trained without class dropout, and so without guidance, have no row for the null class.
    return {"model": model | ({"class_dropout": 0.0} if num_rows == num_classes else {}), "data": size}


def with_null_row(state: dict[str, Tensor], num_classes: int) -> dict[str, Tensor]:
    """Append the mean of all classes to a label table without a null class, as a start for training with class dropout."""
    table = state[name := "y_embedder.embedding_table.weight"]
    return state if len(table) > num_classes else state | {name: torch.cat([table, table.mean(dim=0, keepdim=True)])}


def without_projectors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the projectors from a REPA state dict, because only training uses projectors.

    Early REPA checkpoints name the blocks after the aligned block decoder_blocks.0, ... This function renumbers these blocks.
    """
    kept = {name: value for name, value in state.items() if not name.startswith("projectors.")}
    depth = len({name.split(".")[1] for name in kept if name.startswith("blocks.")})

    def renumber(match: re.Match) -> str:
        return f"blocks.{depth + int(match[1])}"

    return {re.sub(r"^decoder_blocks\.(\d+)", renumber, name): value for name, value in kept.items()}


def reverse_time_and_sign(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Modify two linear layers so that ours(x, t, y) = -published(x, 1 - t, y). Also drop the unused output channels.

    The first layer of the time embedding receives cos(w t) and sin(w t). With s = 1 - t, cos(w s) = cos(w) cos(w t) + sin(w)
    sin(w t) and sin(w s) = sin(w) cos(w t) - cos(w) sin(w t), so a linear layer on the features of s equals another linear layer
    on the features of t. To change the sign, the last layer is negated. Both changes are exact up to float32 rounding.
    """
    state = dict(state)
    first_layer = state["t_embedder.mlp.0.weight"].double()
    half = TimestepEmbedder.NUM_FEATURES // 2
    w = TimestepEmbedder.frequencies().double()
    cosines, sines = first_layer[:, :half], first_layer[:, half:]
    reversed_layer = torch.cat([cosines * w.cos() + sines * w.sin(), cosines * w.sin() - sines * w.cos()], dim=1)
    state["t_embedder.mlp.0.weight"] = reversed_layer.float()
    in_channels, patch_size = state["x_embedder.proj.weight"].shape[1:3]
    for name in ("final_layer.linear.weight", "final_layer.linear.bias"):
        per_pixel = state[name].unflatten(0, (patch_size**2, -1))  # (p*p, C or 2C, ...)
        state[name] = -per_pixel[:, :in_channels].flatten(0, 1).contiguous()
    return state
