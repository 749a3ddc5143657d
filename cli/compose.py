"""Compose a configuration from the files in configs/ and the command-line arguments, and validate it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from cli.hydra_errors import NO_ROW, explain_hydra_error, explain_syntax_error, name_errors_of_omegaconf, one_line
from cli.hydra_setup import CONFIGS, quote_non_ascii
from common.errors import UserError
from configs.schema import TrainConfig
from configs.settings import NumberForText, S, flatten, validate


def compose_overrides(overrides: Sequence[str], config_name: str = "config") -> DictConfig:
    """Compose configs/<config_name>.yaml with `overrides`, without resolving interpolations or validating values."""
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra.compose(config_name, overrides=[*map(quote_non_ascii, overrides)])
    except (HydraException, ValueError) as e:  # model=3 raises ValueError
        raise UserError(explain_hydra_error(e, config_name)) from e


def parse_config(cfg: DictConfig, settings_class: type[S], overrides: Sequence[str] = (), is_sweep: bool = False) -> S:
    """Return validated settings from a composed configuration. A number becomes text if its key needs it.

    Args:
        overrides: The arguments of the job. `TrainConfig.named` names a training run after them.
        is_sweep: Whether the job is one of a sweep, for which Hydra has replaced texts such as 2024_11_25 by numbers (20241125).
    """
    overridden = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    if overridden.get("experiment", "").startswith("bases/"):  # some parts compose and would train
        raise UserError(NO_ROW)
    if removed := next((override for override in overrides if override.startswith("~")), None):
        key = removed[1:].partition("=")[0]
        raise UserError(f"{removed}: every key has a value, so none can be removed; write {key}=<value>")
    try:
        settings = resolve_and_validate(cfg, settings_class)
    except NumberForText as e:
        for key, number in e.numbers.items():
            text = overridden.get(key)
            if text and ("${" in text or r"$\{" in text):  # name=${seed}; in a sweep, Hydra escapes the braces
                OmegaConf.update(cfg, key, str(number))
            elif text and not is_sweep:  # name=2024_11_25, which Hydra reads as 20241125
                OmegaConf.update(cfg, key, text)
        settings = resolve_and_validate(cfg, settings_class)
    return settings.named([*expand_groups(overrides)]) if isinstance(settings, TrainConfig) else settings


def resolve_and_validate(cfg: DictConfig, settings_class: type[S]) -> S:
    """Resolve the interpolations in a configuration and return validated settings."""
    with name_errors_of_omegaconf():
        raw = OmegaConf.to_container(cfg, resolve=True)
    return validate(raw, settings_class)


def expand_groups(overrides: Iterable[str]) -> Iterator[str]:
    """Write groups that were given as dictionaries key by key: train={lr:1e-3} becomes train.lr=0.001."""
    for override in overrides:
        if "={" in override:
            parsed = parse_argument(override)
            yield from (f"{key}={value}" for key, value in flatten({parsed.key_or_group: parsed.value()}).items())
        else:
            yield override


def parse_argument(argument: str) -> Override:
    """Parse `key=value` by Hydra's grammar."""
    try:
        return OverridesParser.create().parse_override(quote_non_ascii(argument))
    except HydraException as e:
        raise UserError(explain_syntax_error(argument, one_line(e))) from e
