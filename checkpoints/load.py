"""Load a checkpoint's configuration and network."""

from __future__ import annotations

import contextlib
import gc
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoints import store
from common.errors import UserError
from configs import schema
from configs.settings import read_stored
from latents.shards import fingerprint_of, read_manifest_at
from runtime.compilation import compile_network, resolve_compile

log = logging.getLogger(__name__)


def load_config(folder: Path) -> schema.TrainConfig:
    """Load a verified checkpoint's training configuration."""
    return _load_config(folder, store.hash_checkpoint(folder))


@lru_cache(maxsize=1000)
def _load_config(folder: Path, checkpoint_hash: str) -> schema.TrainConfig:
    return load_run_config(folder)


def load_run_config(folder: Path) -> schema.TrainConfig:
    """Load the training configuration in a run or checkpoint folder, with the meaning of this version (see `read_stored`)."""
    return read_stored(store.read_config(folder), schema.TrainConfig, folder / "config.yaml")


def load_class_names(folder: Path) -> list[str] | None:
    """Return the names of the classes that a checkpoint was trained on, or None if they are unknown.

    Earlier versions stored no names in checkpoints. Then they come from the run's latents, if these are still at data.path.
    """
    if (names := store.read_class_names(folder)) is not None:
        return names
    path, trained_on = load_config(folder).data.path, store.read_data_hash(folder)
    with contextlib.suppress(UserError):  # a damaged manifest does not stop sampling
        manifest = read_manifest_at(path)
        if manifest and trained_on not in (None, fingerprint_of(manifest["shards"])):
            log.warning("data.path=%s holds other latents than this run's, so its class names are not used", path)
            return None
        return manifest.get("class_names")


def load_network(folder: Path, weights: Any, device: torch.device, compile_mode: str = "none") -> nn.Module:
    """Load a verified checkpoint's network in evaluation mode. The last two networks are cached, because sweeps reuse networks.

    Args:
        weights: `ema`, `raw`, or an object with a `load` method, such as `extras.posthoc_ema.Average`.
        compile_mode: Compilation mode (see `runtime.compilation.resolve_compile`).
    """
    return _load_network(folder, store.hash_checkpoint(folder), weights, device, compile_mode)


@lru_cache(maxsize=2)
def _load_network(folder: Path, checkpoint_hash: str, weights: Any, device: torch.device, compile_mode: str) -> nn.Module:
    gc.collect()  # compiled networks contain reference cycles, which would keep earlier networks on the device
    stored = store.load_weights(folder, weights) if weights in store.WEIGHTS else weights.load()
    with torch.device("meta"):  # skip the random initialization
        cfg = load_config(folder)
        net = cfg.model.build(cfg.data).eval().requires_grad_(False)
    store.check_tensors(folder / store.WEIGHTS.get(weights, ""), stored, net.state_dict())
    net.to_empty(device=device).load_state_dict(stored)
    compile_network(net, resolve_compile(compile_mode, device))
    return net
