"""Explain the errors of Hydra and OmegaConf to the user, in one line that names the key or shows what to write."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Iterable, Iterator

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from cli.hydra_setup import CONFIGS, compose_files, row_names
from common.errors import UserError
from configs.settings import GROUPS, did_you_mean, flatten

NO_ROW = "experiment=bases/... is only a part of rows; choose a row, a file in configs/experiment/ such as table2_dit_b2"
# Packages whose errors concern the command line or a launcher's job, and have clear messages.
PACKAGES_WITH_CLEAR_ERRORS = {"hydra", "hydra_plugins", "submitit", "joblib"}


def message_for_user(error: Exception, config_name: str = "config") -> str | None:
    """Return the message for the user that explains a user error, or None for any other error."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, (HydraException, OmegaConfBaseException)) or raising_package(error) in PACKAGES_WITH_CLEAR_ERRORS:
        return explain_hydra_error(error, sys.argv[1:], config_name)
    return None


def raising_package(error: Exception) -> str:
    """Return the package whose code raised an error. It is never OmegaConf, which works for Hydra or for our code."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [module.partition(".")[0] for module in modules]
    return next((package for package in reversed(packages) if package != "omegaconf"), "")


def explain_hydra_error(error: Exception, arguments: Iterable[str] = (), config_name: str = "config") -> str:
    """Return Hydra's error on one line, in other words if it is one of the usual mistakes."""
    text = one_line(error)
    if isinstance(error, OverrideParseException):
        return explain_syntax_error(error.override, text)
    if (key := unknown_key(error)) and not key.startswith("hydra."):
        return explain_unknown_key(key, arguments, config_name)
    if text.startswith("Multiple values for experiment") and any(one.startswith("+experiment=") for one in arguments):
        return "experiment is set already, by default to null: write experiment=... without +"
    if "In 'experiment/bases/" in text:  # its parts have other paths in a row
        return NO_ROW
    if isinstance(error, MissingConfigException) and "Could not find 'experiment/" in text:
        row = error.missing_cfg_file.removeprefix("experiment/")
        return f"experiment={row} is not in configs/experiment/ or --config-dir{did_you_mean(row, row_names())}"
    return text


def one_line(error: Exception) -> str:
    """Return the messages of an error and of its cause on one line, without the folders in which Hydra searched."""
    return " ".join(f"{error} {error.__cause__ or ''}".partition("Config search path")[0].split())


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


def explain_unknown_key(unknown: str, arguments: Iterable[str], config_name: str) -> str:
    """Return the message for a key that is not in the configuration, with keys that the user may mean."""
    group, _, key = unknown.partition(".")
    methods = [name for name, keys in guidance_keys().items() if group == "guidance" and key in keys]
    if methods:
        return f"{unknown} is a key of guidance={' or '.join(methods)}; choose one of them in the command, too"
    known = known_keys(arguments, config_name)
    groups = [known_key.partition(".")[0] for known_key in known]
    return f"{unknown} is not a key{did_you_mean(unknown, [*known, *groups])}"


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
        keys = [*flatten(OmegaConf.to_container(compose_files(config_name, choices)))]
    except (HydraException, ValueError):  # a choice that only --config-dir knows
        keys = []
    diffusions = [OmegaConf.load(file) for file in sorted((CONFIGS / "diffusion").glob("*.yaml"))]
    keys += [f"guidance.{key}" for method_keys in guidance_keys().values() for key in method_keys]
    return keys + [f"sampler.{key}" for diffusion in diffusions for key in diffusion.sampler]


@contextlib.contextmanager
def name_errors_of_omegaconf() -> Iterator[None]:
    """Convert an error of an interpolation in the `with` block to a UserError that names the key."""
    try:
        yield
    except OmegaConfBaseException as e:
        raise UserError(f"{e.full_key}: {str(e).splitlines()[0]}") from e
