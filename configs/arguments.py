"""What is wrong with a command line, in one line: often the shell took spaces or quotes, or a key has another name."""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from common.errors import UserError
from configs import experiments
from configs.settings import Settings, accepted, keys_of, same_name_keys, unknown_key

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def explain(error: HydraException, settings: type[Settings]) -> str:
    """What Hydra says, in one line; about keys and choices, in our words."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        group, _, name = error.missing_cfg_file.partition("/")
        if group == "hydra":
            group, _, name = error.missing_cfg_file.rpartition("/")
        return _not_a_choice(group, name, error.options)
    if isinstance(error, OverrideParseException):
        return _explain_argument(error.override, sys.argv[1:], settings)
    if ambiguous := re.match(r"Ambiguous value for argument '(.*)'\n", str(error)):
        key, _, value = ambiguous[1].partition("=")
        if key in _groups(settings):
            return f"{ambiguous[1]} names several choices; give one of them, or add -m, which runs the command once for each"
        text = f"{key}='{value}'"
        return f"{ambiguous[1]} has a comma: a list is '{key}=[{value}]', text is \"{text}\", and -m runs once for each value"
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key and not cause.full_key.startswith("hydra"):
        return unknown_key(cause.full_key, settings)
    # A group that the command does not have: Hydra's error names it in its text alone.
    given = [argument.lstrip("+~").partition("=")[0] for argument in sys.argv[1:] if "=" in argument]
    for key in given:
        if f"'{key}'" in str(error) and key.partition(".")[0] not in settings.model_fields and not key.startswith("hydra"):
            return unknown_key(key, settings)
    return " ".join([*str(error).split(), *str(cause or "").partition("\n")[0].split()])


def check_arguments(arguments: Sequence[str], settings: type[Settings]) -> None:
    """Raises UserError for what Hydra would take without a word, or does not say in one line."""
    choices: dict[str, str] = {}
    for number, argument in enumerate(arguments):
        key, equals, value = argument.partition("=")
        if argument.startswith("-"):  # as argparse has it
            key = key.lstrip("-").replace("-", "_")
            known = [key] if key in keys_of(settings) or key in _groups(settings) else same_name_keys(key, settings)
            if known:
                following = next(iter(arguments[number + 1 :]), "=")
                following = "<value>" if "=" in following else following
                raise UserError(f"{argument}: settings are given without dashes: {known[0]}={value if equals else following}")
        elif key in _groups(settings):
            if choices.setdefault(key, argument) != argument:
                raise UserError(f"{choices[key]} and {argument} are two values for one group; give one of them")
            try:
                chosen = OverridesParser.create().parse_override(argument)
            except HydraException:
                continue  # `explain` says what is wrong with it
            if not (chosen.is_sweep_override() or isinstance(chosen.value(), str | list)):  # Hydra has no message for these
                raise UserError(_not_a_choice(key, value, [file.stem for file in (CONFIGS / key).glob("*.yaml")]))


def _groups(settings: type[Settings]) -> set[str]:
    """The keys whose values are choices of files in configs/, and `experiment`."""
    folders = {path.name for path in CONFIGS.iterdir() if path.is_dir()} | {"experiment"}
    return folders & settings.model_fields.keys()


def _not_a_choice(group: str, name: str, options: Sequence[str]) -> str:
    if group == "experiment":
        rows = list(experiments.ROWS)
        near = difflib.get_close_matches(name, rows, n=5) or [row for row in rows if name and name in row][:5]
        if near:
            return f"experiment={name} is not a row of the paper's tables; nearest: {', '.join(near)}; --help lists all"
        options = rows
    hint = ""
    if group == "data" and Path(name).exists():
        hint = f"; latents in a folder are data=custom data.path={name}"
    return f"{group}={name} is not a choice; accepted: {', '.join(sorted(options))}{hint}"


def _explain_argument(argument: str, arguments: Sequence[str], settings: type[Settings]) -> str:
    """What is wrong with an argument that Hydra cannot read: mostly, the shell took its spaces or quotes."""
    key, equals, value = argument.partition("=")
    place = arguments.index(argument) if argument in arguments else len(arguments)
    after = list(itertools.takewhile(lambda other: "=" not in other, arguments[place + 1 :]))
    if not equals:
        before = arguments[place - 1] if 0 < place < len(arguments) else ""
        hint = ""
        if argument in keys_of(settings) or argument in _groups(settings):
            hint = f"; give {argument}=<value>"
        elif group := next((g for g in sorted(_groups(settings)) if (CONFIGS / g / f"{argument}.yaml").exists()), None):
            hint = f"; give {group}={argument}"
        elif "checkpoint" in keys_of(settings) and Path(argument).exists():
            hint = f"; give checkpoint={argument}"
        elif "=" in before:
            hint = f"; if it belongs to {before!r}, quote both: '{' '.join([before, argument, *after])}'"
        return f"{argument!r} is not of the form key=value{hint}"
    for count in range(1, len(after) + 1):
        whole = " ".join([argument, *after[:count]])
        if _is_open(argument) and not _is_open(whole):
            return f"the shell broke {key}= at its spaces; quote the list: '{whole}'"
    if _is_open(argument):
        return f"{argument!r} cannot be read: a bracket is not closed"
    if value.endswith(","):
        listed = f"; a list is quoted and has brackets: '{key}=[{' '.join([value, *after])}]'"
        return f"{argument!r} ends with a comma" + (listed if after else f"; write {key}={value.rstrip(',')}")
    if value.startswith("(") and value.endswith(")"):
        return f"{argument!r} cannot be read; a list has square brackets: '{key}=[{value[1:-1]}]'"
    check_value(key, value)
    text = f"{key}='{value}'"
    return f'{argument!r} cannot be read; quote text with special characters, and the whole for the shell: "{text}"'


def _is_open(text: str) -> bool:
    return sum(map(text.count, "[{(")) > sum(map(text.count, "]})"))


def check_value(key: str, value: str) -> None:
    """Raises UserError for the beginnings of a value that no value has."""
    if value.startswith("="):
        raise UserError(f"{key}={value} has two equals signs; write {key}{value}")
    if value.startswith("~"):
        home = re.sub("^~(?=/|$)", "$HOME", value)
        raise UserError(f"{key}={value}: the shell does not expand ~ after an equals sign; write {key}={home}")


def explain_composition(error: ValueError, settings: type[Settings]) -> str:
    """A value for a key inside a list that has no such key: OmegaConf's error does not name it."""
    fields = keys_of(settings)
    for key in (argument.lstrip("+~").partition("=")[0] for argument in sys.argv[1:]):
        parent = key.rpartition(".")[0]
        if parent in fields:
            return f"{key} is not a key: {parent} is {accepted(fields[parent])}"
    return " ".join(str(error).split())
