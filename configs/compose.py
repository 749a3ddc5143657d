"""Compose configs/*.yaml, the row of configs/experiments.py that a command names, and the arguments of the command."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from common.errors import UserError
from common.files import REPOSITORY
from configs.experiments import ROWS, Row
from configs.settings import GROUPS, flatten, nearest

OmegaConf.register_new_resolver(
    "backbone", lambda size, _root_: f"{'LightningDiT' if 'lightning' in _root_.model.name else 'DiT'}-{size}", replace=True
)
OmegaConf.register_new_resolver("name_of", lambda path: os.path.basename(os.path.abspath(path or "custom")), replace=True)
OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)


def compose_overrides(overrides: Sequence[str], config_name: str = "config") -> DictConfig:
    """Compose configs/<config_name>.yaml with these overrides, without resolving or checking it.

    The arguments of the row that `experiment=` names come first, so that the others can change them.
    Raises UserError for an unknown row, for arguments that Hydra refuses, and for settings of Hydra itself.
    """
    for override in overrides:
        if override.lstrip("+~").startswith("hydra"):
            raise UserError(f"{override}: settings of Hydra itself, such as launchers, have no effect here")
    row = find_row(overrides) if config_name == "config" else None
    given = [f"name={row.name.replace('/', '_')}_seed${{seed}}", *row.arguments.split(), *overrides] if row else [*overrides]
    try:
        with hydra.initialize_config_dir(str(Path(__file__).parent), version_base="1.3"):
            cfg = hydra.compose(config_name, overrides=given)
    except (HydraException, ValueError) as e:  # ValueError: model=3
        raise UserError(explain(e, overrides, config_name)) from e
    if row:
        cfg.experiment = {key: value for key, value in asdict(row).items() if key != "arguments"}
    return cfg


def find_row(overrides: Sequence[str]) -> Row | None:
    """Return the row that `experiment=` names. Raises UserError for an unknown row."""
    name = next((o.partition("=")[2] for o in reversed(overrides) if o.startswith("experiment=")), "null")
    if name != "null" and name not in ROWS:
        raise UserError(f"experiment={name} is not a row of configs/experiments.py{nearest(name, ROWS)}")
    return ROWS.get(name)


def explain(error: Exception, overrides: Sequence[str], config_name: str) -> str:
    """Return Hydra's message on one line, or for an unknown key, a message with the nearest keys."""
    text = " ".join(f"{error} {error.__cause__ or ''}".partition("Config search path")[0].split())
    if unknown := re.search(r"Could not override '([^']+)'", text):
        choices = [override for override in overrides if override.partition("=")[0] in GROUPS]
        known = flatten(OmegaConf.to_container(compose_overrides(choices, config_name)))
        return f"{unknown[1]} is not a key{nearest(unknown[1], [*known, *(key.partition('.')[0] for key in known)])}"
    return text
