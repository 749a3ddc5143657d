"""Command lines: Hydra for what has a configuration, `key=value` for the rest. A user's error becomes one line."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import hydra
import yaml
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError, create_model

from common.errors import UserError
from common.files import REPOSITORY
from common.progress import log_to_stderr
from configs import experiments
from configs.arguments import CONFIGS, check_arguments, check_value, explain, explain_composition
from configs.schema import backbone_of
from configs.settings import S, Settings, accepted, keys_of, validate

FULL_ERRORS = "HYDRA_FULL_ERROR"  # Hydra's own switch, for all of our commands
OmegaConf.register_new_resolver("backbone", lambda size, _root_: backbone_of(_root_.model.name, size), replace=True)
OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)

log = logging.getLogger(__name__)


# ----------------------------------------------------------------------------------------------------------------------
# Errors.


def guard(action: Callable[[], None]) -> None:
    """Do it; an error that a user can cause becomes one line, and exit code 1. So does Ctrl-C, with 130.

    HYDRA_FULL_ERROR=1 keeps the tracebacks.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the commands start without it
    if _wants_tracebacks():
        action()
        return
    try:
        _one_line(action)
    except KeyboardInterrupt:
        log.warning("stopped; the same command goes on where it was")
        sys.exit(128 + signal.SIGINT)


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
    compose = functools.partial(hydra.main, version_base="1.3", config_path=str(CONFIGS), config_name=config_name)
    if _wants_tracebacks():
        guard(lambda: check_arguments(sys.argv[1:], settings))
        experiments.register(sys.argv[1:])
        compose()(main)()
        return
    is_composed = False

    @functools.wraps(main)
    def guarded(cfg: DictConfig) -> None:
        nonlocal is_composed
        is_composed = True
        _one_line(lambda: main(cfg))  # here and not around all: Hydra prints a line of its own for what leaves `main`

    def start() -> None:
        log_to_stderr()
        check_arguments(sys.argv[1:], settings)
        experiments.register(sys.argv[1:])
        os.environ[FULL_ERRORS] = "1"  # have Hydra raise its errors, and those of `main`, instead of printing them
        try:
            compose()(guarded)()
        except HydraException as e:
            raise UserError(explain(e, settings)) from e
        except ValueError as e:  # of OmegaConf, for a key below a list
            if is_composed:
                raise
            raise UserError(explain_composition(e, settings)) from e
        finally:
            del os.environ[FULL_ERRORS]

    guard(start)


# ----------------------------------------------------------------------------------------------------------------------
# Commands without one: `key=value`, `--key=value` or `--key value`.


def settings_of(function: Callable[..., Any]) -> type[Settings]:
    """The arguments of a function as settings, by their annotations and defaults."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    fields = {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in parameters}
    return create_model(function.__name__, __base__=Settings, **fields)


def run_command(commands: dict[str, Callable[..., None]], description: str, arguments: Sequence[str]) -> None:
    """Call the one of several commands that the first argument names, with the others as its settings.

    Args:
        description: what `--help` prints.
    """
    name, *settings = arguments or ["--help"]
    if name in ("--help", "-h", "help"):
        sys.stdout.write(description)
        return
    if name not in commands:
        raise UserError(f"unknown command {name!r}; use one of {', '.join(commands)}")
    command = commands[name]
    command(**dict(parse_arguments(settings, settings_of(command), command=name)))


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
