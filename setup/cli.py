"""Command lines: Hydra for what has a configuration, `key=value` for the rest. A user's error becomes one line."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import itertools
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hydra
import torch
import yaml
from accelerate import Accelerator
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError, create_model

from configs import experiments
from errors import UserError
from setup.settings import Settings, accepted, keys_of, same_name_keys, unknown_key, validate
from training.speed import use_cores

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGS = REPOSITORY / "configs"
FULL_ERRORS = "HYDRA_FULL_ERROR"  # Hydra's own switch, for all of our commands
OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)

S = TypeVar("S", bound=Settings)


# ----------------------------------------------------------------------------------------------------------------------
# Errors.


def guard(action: Callable[[], None]) -> None:
    """Do it; an error that a user can cause becomes one line, and exit code 1. HYDRA_FULL_ERROR=1 keeps its traceback."""
    if _wants_tracebacks():
        action()
    else:
        _one_line(action)


def _one_line(action: Callable[[], None]) -> None:
    try:
        action()
    except UserError as error:
        _exit(str(error))


def _wants_tracebacks() -> bool:
    return os.environ.get(FULL_ERRORS, "0") == "1"


def _exit(message: str) -> NoReturn:
    rank = os.environ.get("RANK")
    who = "" if rank is None else f" (process {rank})"
    sys.stderr.write(f"error{who}: {message} [{FULL_ERRORS}=1 shows where]\n")
    sys.exit(1)


# ----------------------------------------------------------------------------------------------------------------------
# Commands with a configuration.


def run(main: Callable[[DictConfig], None], config_name: str, settings: type[Settings]) -> None:
    """Compose the configuration from the command line and call `main`, guarded.

    Args:
        config_name: the file in configs/.
        settings: the class that the script checks it by; its keys are known before anything is composed.
    """
    if "experiment" in settings.model_fields:
        experiments.register()
    compose = functools.partial(hydra.main, version_base="1.3", config_path=str(CONFIGS), config_name=config_name)
    if _wants_tracebacks():
        _check_arguments(sys.argv[1:], settings)
        compose()(main)()
        return
    is_composed = False

    @functools.wraps(main)
    def guarded(cfg: DictConfig) -> None:
        nonlocal is_composed
        is_composed = True
        _one_line(lambda: main(cfg))  # here and not around all: Hydra prints a line of its own for what leaves `main`

    def start() -> None:
        _check_arguments(sys.argv[1:], settings)
        os.environ[FULL_ERRORS] = "1"  # have Hydra raise its errors, and those of `main`, instead of printing them
        try:
            compose()(guarded)()
        except HydraException as e:
            raise UserError(explain(e, settings)) from e
        except ValueError as e:  # of OmegaConf, for a key below a list
            if is_composed:
                raise
            raise UserError(_explain_composition(e, settings)) from e
        finally:
            del os.environ[FULL_ERRORS]

    guard(start)


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


def _check_arguments(arguments: Sequence[str], settings: type[Settings]) -> None:
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
        rows = experiments.names()
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


def _explain_composition(error: ValueError, settings: type[Settings]) -> str:
    """A value for a key inside a list that has no such key: OmegaConf's error does not name it."""
    fields = keys_of(settings)
    for key in (argument.lstrip("+~").partition("=")[0] for argument in sys.argv[1:]):
        parent = key.rpartition(".")[0]
        if parent in fields:
            return f"{key} is not a key: {parent} is {accepted(fields[parent])}"
    return " ".join(str(error).split())


# ----------------------------------------------------------------------------------------------------------------------
# Commands without one: `key=value`, `--key=value` or `--key value`.


def settings_of(function: Callable[..., Any]) -> type[Settings]:
    """The arguments of a function as settings, by their annotations and defaults."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    fields = {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in parameters}
    return create_model(function.__name__, __base__=Settings, **fields)


def parse_arguments(arguments: Sequence[str], settings: type[S], command: str = "") -> S:
    """`key=value` (or `--key value`) arguments as checked settings. `--help` prints the program's docstring and the keys.

    A value is what YAML reads where the key accepts that, else text.

    Args:
        command: named first in messages, where a program has several.

    Raises:
        UserError: an argument of another form, a key that is unknown, missing or given twice, a value that is not accepted.
    """
    prefix, raw = f"{command}: " if command else "", {}
    fields = {key: found[0] for key, found in keys_of(settings).items()}
    usage = ", ".join(f"{name}=" if field.is_required() else f"[{name}=]" for name, field in fields.items())
    rest = iter(arguments)
    before = ""
    for argument in rest:
        if argument in ("--help", "-h"):
            sys.stdout.write(f"{sys.modules['__main__'].__doc__ or ''}\n{prefix}it takes {usage}\n")
            sys.exit(0)
        key, equals, text = argument.removeprefix("--").partition("=")
        if argument.startswith("--"):  # as argparse has it: dashes, and the value may be the next argument
            key, text = key.replace("-", "_"), text if equals else next(rest, "")
        if key not in fields or not text:
            near, hint = difflib.get_close_matches(key, fields, n=1), ""
            if key not in fields and near:
                hint = f"; nearest: {near[0]}="
            elif not equals and before:
                hint = f"; if it belongs to {before!r}, quote both: '{before} {argument}'"
            raise UserError(f"{prefix}{key} is not a key or has no value; it takes {usage}{hint}")
        check_value(key, text)
        if key in raw:
            raise UserError(f"{prefix}{key} is given twice")
        raw[key] = _read_value(text, TypeAdapter(fields[key].rebuild_annotation(), config=None))
        before = argument
    for name, field in fields.items():
        if field.is_required() and name not in raw:
            raise UserError(f"{prefix}{name}= is missing; it accepts {accepted([field])}")
    return validate(_nested(raw), settings)


def _nested(flat: dict[str, object]) -> dict:
    """{"model.backbone": "DiT-B/2"} -> {"model": {"backbone": "DiT-B/2"}}."""
    nested: dict = {}
    for key, value in flat.items():
        *groups, name = key.split(".")
        functools.reduce(lambda inside, group: inside.setdefault(group, {}), groups, nested)[name] = value
    return nested


def _read_value(text: str, accepts: TypeAdapter) -> object:
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"key={text}"]))["key"]
    except (yaml.YAMLError, OmegaConfBaseException):
        return text
    try:
        accepts.validate_python(value, strict=True)
    except ValidationError:
        return text
    return value


# ----------------------------------------------------------------------------------------------------------------------
# Starting.


def start_accelerator(cpu_threads: int | None, **settings) -> Accelerator:
    """accelerate, with its settings; this process's share of the cores; messages from the main process only."""
    if torch.distributed.is_available():
        # AdamW imports torch's compiler, which imports this, whose functions hold the process group of that moment as a default
        # argument: it would never be freed, and gloo's threads would meet the end of the interpreter, which then may abort.
        importlib.import_module("torch.distributed.nn.functional")
    accelerator = Accelerator(**settings)
    logging.basicConfig(format="%(message)s", level=logging.INFO if accelerator.is_main_process else logging.ERROR)
    use_cores(accelerator.device, cpu_threads)
    return accelerator
