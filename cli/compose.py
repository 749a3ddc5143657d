"""Compose a configuration from the files in configs/ and the command-line arguments, and validate it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from cli.hydra_setup import CONFIGS, compose_files, quote_letters, row_names
from common.errors import UserError
from configs.schema import TrainConfig
from configs.settings import GROUPS, S, flatten, has_interpolation, nearest, validate

NO_ROW = "experiment=bases/... is only a part of rows; choose a row, a file in configs/experiment/ such as table2_dit_b2"


def parse_argument(argument: str) -> Override:
    """Parse `key=value` by Hydra's grammar."""
    try:
        return OverridesParser.create().parse_override(quote_letters(argument))
    except HydraException as e:
        error = e if isinstance(e, OverrideParseException) else OverrideParseException(argument, str(e))
        raise UserError(explain(error)) from e


def compose_overrides(overrides: Sequence[str], config_name: str = "config") -> DictConfig:
    """Compose configs/<config_name>.yaml with `overrides`, without resolving interpolations or validating values."""
    try:
        return compose_files(config_name, overrides)
    except (HydraException, ValueError) as e:  # model=3 raises ValueError
        raise UserError(explain(e, overrides, config_name)) from e


def parse_config(cfg: DictConfig, settings_class: type[S], overrides: Sequence[str] = (), are_as_written: bool = True) -> S:
    """Resolve the interpolations in a composed configuration and return validated settings.

    Args:
        overrides: The arguments of the job. `TrainConfig.named` names a training run after them.
        are_as_written: Whether `overrides` are as the user wrote them. In a sweep, Hydra has replaced 2024_11_25 by 20241125.
    """
    overridden = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    if overridden.get("experiment", "").startswith("bases/"):  # some parts compose and would train
        raise UserError(NO_ROW)
    if removed := next((override for override in overrides if override.startswith("~")), None):
        key = removed[1:].partition("=")[0]
        raise UserError(f"{removed}: every key has a value, so none can be removed; write {key}=<value>")
    with name_errors_of_omegaconf():
        raw = OmegaConf.to_container(cfg, resolve=True)
    as_written = {key: value for key, value in overridden.items() if are_as_written or has_interpolation(value)}
    settings = validate(raw, settings_class, as_written)
    return settings.named([*expand_groups(overrides)]) if isinstance(settings, TrainConfig) else settings


def expand_groups(overrides: Iterable[str]) -> Iterator[str]:
    """Write groups that were given as dictionaries key by key: train={lr:1e-3} becomes train.lr=0.001."""
    for override in overrides:
        if "={" in override:
            parsed = parse_argument(override)
            yield from (f"{key}={value}" for key, value in flatten({parsed.key_or_group: parsed.value()}).items())
        else:
            yield override


@contextlib.contextmanager
def name_errors_of_omegaconf() -> Iterator[None]:
    """Convert an error of an interpolation in the `with` block to a UserError that names the key."""
    try:
        yield
    except OmegaConfBaseException as e:
        raise UserError(f"{e.full_key}: {str(e).splitlines()[0]}") from e


def explain(error: Exception, arguments: Iterable[str] = (), config_name: str = "config") -> str:
    """Return Hydra's error on one line, in other words if it is one of the usual mistakes."""
    text = one_line(error)
    if isinstance(error, OverrideParseException):
        return explain_unreadable(error.override, text)
    if (key := unknown_key(error)) and not key.startswith("hydra."):
        return explain_unknown_key(key, arguments, config_name)
    if text.startswith("Multiple values for experiment") and any(one.startswith("+experiment=") for one in arguments):
        return "experiment is set already, by default to null: write experiment=... without +"
    if "In 'experiment/bases/" in text:  # its parts have other paths in a row
        return NO_ROW
    if isinstance(error, MissingConfigException) and "Could not find 'experiment/" in text:
        row = error.missing_cfg_file.removeprefix("experiment/")
        return f"experiment={row} is not in configs/experiment/ or --config-dir{nearest(row, row_names())}"
    return text


def one_line(error: Exception) -> str:
    """Return the messages of an error and of its cause on one line, without the folders in which Hydra searched."""
    return " ".join(f"{error} {error.__cause__ or ''}".partition("Config search path")[0].split())


def explain_unreadable(argument: str, reason: str) -> str:
    """Return the message for an argument that Hydra's grammar refuses, such as name=a=b. It shows how to quote the value."""
    key, equals, value = argument.partition("=")
    if not equals:
        return f"{argument!r} is not of the form key=value"
    quoted = value.strip("'").replace('"', r"\"")
    hint = f"""'{key}=["a b","c=d"]'""" if value.startswith(("[", "{")) else f"""'{key}="{quoted}"'"""
    return f"{argument} is not readable: quote text with special characters twice, as in {hint} ({reason})"


def unknown_key(error: Exception) -> str | None:
    """Return the key of an argument that is not in the configuration, or None if the error has another reason.

    Hydra says "Could not override 'eval.every'". OmegaConf's error, the cause, has the first part that is unknown, `eval`. If the
    argument is guidance={w:2}, Hydra names only `guidance`, and OmegaConf has `guidance.w`.
    """
    named = re.match("Could not override '(.+)'", str(error))
    if named is None or not isinstance(error.__cause__, (ConfigAttributeError, ConfigKeyError)):
        return None
    return max(named[1], error.__cause__.full_key, key=len)


def explain_unknown_key(unknown: str, arguments: Iterable[str], config_name: str) -> str:
    """Return the message for a key that is not in the configuration, with keys that the user may mean."""
    group, _, key = unknown.partition(".")
    methods = [name for name, keys in guidance_keys().items() if group == "guidance" and key in keys]
    if methods:
        return f"{unknown} is a key of guidance={' or '.join(methods)}; choose one of them in the command, too"
    known = known_keys(arguments, config_name)
    groups = [known_key.partition(".")[0] for known_key in known]
    return f"{unknown} is not a key{nearest(unknown, [*known, *groups])}"


def guidance_keys() -> dict[str, list[str]]:
    """Return the keys of each method of guidance, such as {"cfg": ["name", "cfg_scale", ...], ...}."""
    return {file.stem: [*OmegaConf.load(file)] for file in sorted((CONFIGS / "guidance").glob("*.yaml"))}


def known_keys(arguments: Iterable[str], config_name: str) -> list[str]:
    """Return the dotted keys of a command with the groups that its arguments choose, and all keys of guidance and sampler.

    The keys of these two groups depend on the method, and on the run's diffusion in sample.py and fid.py.
    """
    choice = re.compile(rf"({'|'.join(GROUPS)}|experiment)=[\w/]+")
    choices = [match[0] for argument in arguments if (match := choice.match(argument))]  # model=dit of model=dit,tread
    try:
        keys = [*flatten(OmegaConf.to_container(compose_overrides(choices, config_name)))]
    except UserError:  # a choice that only --config-dir knows
        keys = []
    diffusions = [OmegaConf.load(file) for file in sorted((CONFIGS / "diffusion").glob("*.yaml"))]
    keys += [f"guidance.{key}" for method_keys in guidance_keys().values() for key in method_keys]
    return keys + [f"sampler.{key}" for diffusion in diffusions for key in diffusion.sampler]
