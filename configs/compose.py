"""Compose a configuration from configs/*.yaml, a row of configs/experiments.py and the command-line arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from common.errors import UserError
from common.files import REPOSITORY
from configs.experiments import Row
from configs.settings import GROUPS, flatten, nearest
from extras.experiments import ROWS

CONFIGS = REPOSITORY / "configs"

OmegaConf.register_new_resolver(
    "backbone", lambda size, _root_: f"{'LightningDiT' if 'lightning' in _root_.model.name else 'DiT'}-{size}", replace=True
)
OmegaConf.register_new_resolver(  # `cfg_scale`, the short form of guidance.cfg_scale in sample.py and fid.py, or a default value
    "cfg_scale_or", lambda x, _root_: x if (given := OmegaConf.select(_root_, "cfg_scale")) is None else given, replace=True
)
OmegaConf.register_new_resolver("name_of", lambda path: os.path.basename(os.path.abspath(path or "custom")), replace=True)
OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)


def compose_overrides(overrides: Sequence[str], config_name: str = "config") -> DictConfig:
    """Compose configs/<config_name>.yaml with `overrides`, without resolving interpolations or validating values.

    If `experiment=` selects a row, its arguments come first, so that the other overrides can change them.
    Raises UserError for an unknown row, for overrides that Hydra rejects, and for settings of Hydra itself.
    """
    for override in overrides:
        if override.lstrip("+~").startswith("hydra"):
            raise UserError(f"{override}: settings of Hydra itself, such as launchers, have no effect here")
    row = find_row(overrides) if config_name == "config" else None
    given = [f"name={row.name.replace('/', '_')}_seed${{seed}}", *row.arguments.split(), *overrides] if row else [*overrides]
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            cfg = hydra.compose(config_name, overrides=given)
    except (HydraException, ValueError) as e:  # model=3 raises ValueError
        raise UserError(explain(e, overrides, config_name)) from e
    if row:
        cfg.experiment = {key: value for key, value in asdict(row).items() if key != "arguments"}
    return cfg


def find_row(overrides: Sequence[str]) -> Row | None:
    """Return the row that `experiment=` selects, or None if no row is selected. Raises UserError for an unknown row."""
    name = next((o.partition("=")[2] for o in reversed(overrides) if o.startswith("experiment=")), "null")
    if name != "null" and name not in ROWS:
        raise UserError(f"experiment={name} is not a row of configs/experiments.py or extras/experiments.py{nearest(name, ROWS)}")
    return ROWS.get(name)


def explain(error: Exception, overrides: Sequence[str], config_name: str) -> str:
    """Return Hydra's error message on one line. For an unknown key, return a message that suggests the nearest keys."""
    text = " ".join(f"{error} {error.__cause__ or ''}".partition("Config search path")[0].split())
    if unknown := re.search(r"Could not override '([^']+)'", text):
        choices = [override for override in overrides if override.partition("=")[0] in GROUPS]
        known = flatten(OmegaConf.to_container(compose_overrides(choices, config_name)))
        return f"{unknown[1]} is not a key{nearest(unknown[1], [*known, *(key.partition('.')[0] for key in known)])}"
    return text
