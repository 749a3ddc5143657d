"""Explain the errors of Hydra and OmegaConf to the user, in one line that names the key or shows what to write."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from cli.hydra_setup import COMMANDS_ON_RUNS, CONFIGS, files_of, row_names
from common.errors import UserError
from configs.settings import did_you_mean, flatten

NO_ROW = "experiment=bases/... is only a part of rows; choose a row, a file in configs/experiment/ such as table2_dit_b2"


def explain_hydra_error(error: Exception, config_name: str = "config") -> str:
    """Return an error of Hydra or its plugins on one line, in other words if it is one of the usual mistakes."""
    text = one_line(error)
    if isinstance(error, OverrideParseException):
        return explain_syntax_error(error.override, text)
    if (key := unknown_key(error)) and not key.startswith("hydra."):
        return explain_unknown_key(key, config_name)
    if text.startswith("Multiple values for experiment"):
        return "experiment is set already, by default to null: write experiment=... without +"
    if "In 'experiment/bases/" in text:  # its parts have other paths in a row
        return NO_ROW
    if isinstance(error, MissingConfigException) and "Could not find 'experiment/" in text:
        row = error.missing_cfg_file.removeprefix("experiment/")
        return f"experiment={row} is not in configs/experiment/ or --config-dir{did_you_mean(row, row_names())}"
    return text


def one_line(error: Exception) -> str:
    """Return the messages of an error and of its cause on one line, without the folders in which Hydra searched."""
    has_clear_message = isinstance(error, HydraException | OmegaConfBaseException) or type(error) is ValueError
    name = "" if has_clear_message else f"{type(error).__name__}: "
    return " ".join(f"{name}{error} {error.__cause__ or ''}".partition("Config search path")[0].split())


def explain_syntax_error(argument: str, reason: str) -> str:
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


def explain_unknown_key(unknown: str, config_name: str) -> str:
    """Return the message for a key that is not in the configuration, with keys that the user may mean."""
    known = choices_by_key(config_name)
    if choices := known.get(unknown):
        group, _, _ = choices[0].partition("=")
        names = " or ".join(choice.removeprefix(f"{group}=") for choice in choices)
        return f"{unknown} is a key of {group}={names}; choose {'one of them' if choices[1:] else 'it'} in the command, too"
    groups = [key.partition(".")[0] for key in known]
    return f"{unknown} is not a key{did_you_mean(unknown, [*known, *groups])}"


def choices_by_key(config_name: str) -> dict[str, list[str]]:
    """Map each key of a command to the choices that have it, such as guidance.w to guidance=autoguidance and guidance=sparse.

    A key of no group, such as train.lr, has no choices.
    """
    choices: dict[str, list[str]] = {}
    for file in files_of(config_name):
        group = None if file.parent == CONFIGS else file.parent.name
        is_global = file.read_text(encoding="utf-8").startswith("# @package _global_")
        prefix = "" if group is None or is_global else f"{group}."
        for key in flatten(OmegaConf.to_container(OmegaConf.load(file)), prefix):
            is_of_run = key.startswith("diffusion.") and config_name in COMMANDS_ON_RUNS
            if key.removeprefix(prefix) != "defaults" and not is_of_run:
                choices.setdefault(key, []).extend([] if group is None else [f"{group}={file.stem}"])
    return choices


@contextlib.contextmanager
def name_errors_of_omegaconf() -> Iterator[None]:
    """Convert an error of an interpolation in the `with` block to a UserError that names the key."""
    try:
        yield
    except OmegaConfBaseException as e:
        raise UserError(f"{e.full_key}: {str(e).splitlines()[0]}") from e
