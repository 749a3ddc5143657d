"""Read the `key=value` arguments of the commands that have no configuration, such as prepare_latents.py."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Collection
from pkgutil import resolve_name
from typing import get_type_hints

from omegaconf import OmegaConf
from pydantic import create_model

from cli.compose import parse_argument
from cli.hydra_errors import name_errors_of_omegaconf
from common.errors import UserError
from common.files import REPOSITORY
from configs.settings import Settings, validate

HELP = {"--help", "-h"}


def run_command(
    commands: dict[str, str], description: str, arguments: list[str], keys: dict[str, str] | None = None, **further: object
) -> None:
    """Call the function that the first argument names, and pass the remaining `key=value` arguments to the function.

    Args:
        commands: Maps each command to "module:function". A module is imported only when its command runs.
        description: Text that `--help` prints.
        keys: Maps a command to "module:class" if its function accepts one object. The fields of the class are the command's keys.
        further: Further values for the function.
    """
    name, *remaining = arguments or ["--help"]
    if name in HELP:
        sys.stdout.write(description)
        return
    if name not in commands:
        raise UserError(f"unknown command {name!r}; use one of {', '.join(commands)}")
    settings_class = (keys or {}).get(name)
    if HELP & set(remaining):
        sys.stdout.write(source_code_of(settings_class or commands[name]))
        return
    function = resolve_name(commands[name])
    target = resolve_name(settings_class) if settings_class else function
    parameters = inspect.signature(target, eval_str=True).parameters.values()
    types = {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in parameters}
    texts = {key for key, kind in get_type_hints(target).items() if kind in (str, str | None)}
    raw = dict(read_argument(argument, texts) for argument in remaining) | further
    values = dict(validate(raw, create_model(name, __base__=Settings, **types)))
    function(target(**values)) if settings_class else function(**values)


def read_argument(argument: str, texts: Collection[str]) -> tuple[str, object]:
    """Return the key and the value of `key=value`, with interpolations resolved.

    The value of a key in `texts` is the text as it was typed. Hydra's grammar reads text in quotes, `null`, and the values of all
    other keys. Values that only a sweep can have are refused.
    """
    key, equals, value = argument.partition("=")
    if not equals or key not in texts or value == "null" or value.startswith(("'", '"')):
        override = parse_argument(argument)
        if override.is_sweep_override():
            raise UserError(f"{argument}: write a list as {key}=[a,b], and text with commas as '{key}=\"a,b\"'")
        value = override.value()
    if isinstance(value, str) and "${" in value:  # such as ${oc.env:HOME}
        with name_errors_of_omegaconf():
            value = OmegaConf.create({key: value})[key]
    return key, value


def source_code_of(what: str) -> str:
    """Return the source code of a class, or a function's signature and docstring, without importing the module."""
    module, _, name = what.partition(":")
    source = (REPOSITORY / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    node = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name)
    end = node.end_lineno if isinstance(node, ast.ClassDef) else node.body[0].end_lineno
    return "\n".join(source.splitlines()[node.lineno - 1 : end]) + "\n"
