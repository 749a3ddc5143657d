"""Composes configs/*.yaml with overrides, and with the row of configs/experiments.py that they name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from common.errors import UserError
from configs.settings import nearest


def register(overrides: Sequence[str]) -> None:
    """Register the rows that `experiment=` names (comma-separated for a sweep) as the choices of Hydra's group `experiment`.

    Hydra copies everything registered at every step: all rows would add 0.4 s to a start. UserError for an unknown row.
    """
    ConfigStore.instance().repo.pop("experiment", None)
    pairs = (override.partition("=") for override in overrides)
    names = [name for key, _, value in pairs if key.lstrip("+") == "experiment" for name in value.split(",") if name != "null"]
    if not names:
        return
    from configs.experiments import ROWS

    for name in names:
        if name not in ROWS:
            raise UserError(f"experiment={name} is not a row of configs/experiments.py{nearest(name, ROWS)}")
        group, _, last = f"experiment/{name}".rpartition("/")
        ConfigStore.instance().store(group=group, name=last, node=ROWS[name].to_config(), package="_global_")


def compose_overrides(overrides: Sequence[str], config_name: str = "config") -> DictConfig:
    """configs/<config_name>.yaml with these overrides, unresolved and unchecked. Raises UserError as `register` does."""
    if GlobalHydra.instance().is_initialized():  # inside a command, which has registered all of its rows
        return hydra.compose(config_name, overrides=list(overrides))
    register(overrides)
    with hydra.initialize_config_dir(str(Path(__file__).parent), version_base="1.3"):
        return hydra.compose(config_name, overrides=list(overrides))
