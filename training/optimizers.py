"""Build the optimizers that `train.optimizer` names. Their state is stored and checked by parameter name, like weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from checkpoints import store
from common.errors import UserError
from configs.schema import Train

Parameters = Mapping[str, nn.Parameter]  # the trained parameters of the network and, with alignment, the projector


def adamw(train: Train, parameters: Parameters) -> list[Optimizer]:
    """AdamW (arXiv 1711.05101) for all parameters."""
    return [torch.optim.AdamW(parameters.values(), train.lr, tuple(train.betas), weight_decay=train.weight_decay, fused=True)]


def muon(train: Train, parameters: Parameters) -> list[Optimizer]:
    """Muon (https://kellerjordan.github.io/posts/muon) for the matrices of attention and MLP, and AdamW for all other parameters.

    Muon's updates are scaled to the root mean square of AdamW's (arXiv 2502.16982, section 2.2), so both use `train.lr`.

    AdamW also trains the modulation. Its input has one vector per sample, so the rank of its gradient is at most the batch size,
    and Muon would amplify rounding errors in the other directions to the size of the update.
    """
    layers = re.compile(r"blocks\.\d+\.(attn|mlp)\.")
    matrices = {name: p for name, p in parameters.items() if layers.match(name) and p.ndim == 2}
    others = {name: p for name, p in parameters.items() if name not in matrices}
    for_matrices = torch.optim.Muon(matrices.values(), train.lr, train.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [for_matrices, *adamw(train, others)]


# Functions by name in `train.optimizer`. Each parameter belongs to exactly one of the optimizers that a function returns.
OPTIMIZERS: dict[str, Callable[[Train, Parameters], list[Optimizer]]] = {"adamw": adamw, "muon": muon}


def get_state(optimizers: Sequence[Optimizer], parameters: Parameters) -> dict[str, dict[str, Any]]:
    """Return the optimizers' state by parameter name, such as AdamW's `step`, `exp_avg` and `exp_avg_sq`."""
    states = {p: state for optimizer in optimizers for p, state in optimizer.state.items()}
    return {name: dict(states.get(p, {})) for name, p in parameters.items()}


def load_state(optimizers: Sequence[Optimizer], parameters: Parameters, state: dict[str, dict[str, Any]]) -> None:
    """Copy a state that `get_state` returned into the optimizers. `check_state` checks that the state fits the parameters."""
    names = {p: name for name, p in parameters.items()}
    for optimizer in optimizers:
        grouped = [p for group in optimizer.param_groups for p in group["params"]]
        copies = {
            i: {key: x.to(p.device, copy=True) if isinstance(x, Tensor) else x for key, x in state[names[p]].items()}
            for i, p in enumerate(grouped)
        }
        # Use the current configuration's learning rate, betas and weight decay, because the user may change them on a resume.
        optimizer.load_state_dict({"state": copies, "param_groups": optimizer.state_dict()["param_groups"]})


def check_state(file: Path, state: dict[str, dict[str, Any]], train: Train, parameters: Parameters) -> None:
    """Check a state by parameter name, which is stored in `file`, against the optimizers of `train`.

    Raises UserError, which names the parameter, if names, shapes or types are not those of the optimizers' state after a step, or
    if training cannot have led to the values.
    """
    problem = f"{file} cannot be read"
    if not (isinstance(state, dict) and all(isinstance(values, dict) for values in state.values())):
        raise UserError(f"{problem}: it holds no state by parameter name")
    for name in {**parameters, **state}:
        if name not in parameters:
            raise UserError(f"{problem}: it has a state for {name}, which this network does not train")
        if name not in state:
            raise UserError(f"{problem}: it has no state for {name}")
    actual, expected = (
        {f"{key} of {name}": value for name, values in states.items() for key, value in values.items()}
        for states in (state, expected_state(train, parameters))
    )
    if not all(isinstance(value, Tensor) for value in actual.values()):
        raise UserError(f"{problem}: it holds other values than tensors")
    store.check_tensors(file, actual, expected)
    for name, value in actual.items():
        low, high = value.aminmax()
        if not (low.isfinite() and high.isfinite()):
            raise UserError(f"{problem}: {name} holds NaN or infinity")
        if low < 0 and name.startswith(("exp_avg_sq", "step")):
            raise UserError(f"{problem}: {name} holds {low.item():g}, which cannot be negative")
    steps = {values["step"].item() for values in state.values() if "step" in values}
    if len(steps) > 1:  # every parameter has a gradient in every step
        raise UserError(f"{problem}: some of its parameters are after {min(steps):g} steps and others after {max(steps):g}")


def expected_state(train: Train, parameters: Parameters) -> dict[str, dict[str, Any]]:
    """Return the state that the optimizers have after a step, as tensors without data (on the meta device)."""
    twins = {name: nn.Parameter(torch.empty_like(p, device="meta")) for name, p in parameters.items()}
    for twin in twins.values():
        twin.grad = torch.empty_like(twin)
    optimizers = OPTIMIZERS[train.optimizer](train, twins)
    for optimizer in optimizers:
        for group in optimizer.param_groups:  # the state is the same; the meta device has no fused step, and foreach is fast
            group |= {key: value for key, value in {"fused": False, "foreach": True}.items() if key in group}
        optimizer.step()
    return get_state(optimizers, twins)
