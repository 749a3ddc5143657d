"""Parse command lines, compose configurations with Hydra, and print every user error as a single line."""

from __future__ import annotations

import ast
import inspect
import os
import signal
import sys
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pkgutil import resolve_name

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import create_model
from yaml import YAMLError

from common.errors import UserError
from common.files import REPOSITORY
from common.progress import log_to_stderr
from configs.compose import CONFIGS, compose_overrides
from configs.schema import TrainConfig
from configs.settings import S, Settings, validate

FULL_ERRORS = "HYDRA_FULL_ERROR"  # Hydra's environment variable, which all commands read
HELP = {"--help", "-h"}


def guard(action: Callable[[], None]) -> None:
    """Call `action`. Print a user error as one line and exit with code 1. HYDRA_FULL_ERROR=1 prints the traceback instead."""
    log_to_stderr()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells may start background jobs with SIGINT ignored
    try:
        action()
    except KeyboardInterrupt:
        sys.stderr.write("stopped; run the same command to resume\n")
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        line = format_error(error)
        if line is None or os.environ.get(FULL_ERRORS) == "1":
            raise
        sys.exit(line)


def format_error(error: Exception) -> str | None:
    """Return the message that a command prints for a user error, or None for any other error."""
    rank = os.environ.get("RANK")
    if isinstance(error, (UserError, HydraException)):
        return f"error{'' if rank is None else f' (process {rank})'}: {error}"
    return None


def run(main: Callable[[S], None], config_name: str, settings_class: type[S], description: str) -> None:
    """Compose configs/<config_name>.yaml with the command line, validate it as `settings_class`, and call `main` in `guard`.

    `--help` prints `description` and all keys. `--help` and the check for unknown keys do not import torch, which takes seconds.
    """
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.epilog = explain_keys(config_name)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("-m", "--multirun", action="store_true", help="run every combination of the values between commas")
    parser.add_argument("--cfg", choices=["job"], help="print the configuration and stop")
    given = parser.parse_intermixed_args()
    if given.cfg:
        guard(lambda: sys.stdout.write(OmegaConf.to_yaml(compose_overrides(given.overrides, config_name))))
    elif given.multirun:
        guard(lambda: sweep(main, config_name, settings_class, given.overrides))
    else:
        guard(lambda: main(parse_config(compose_overrides(given.overrides, config_name), settings_class, given.overrides)))
    if processes := sys.modules.get("runtime.processes"):  # imported only if a command has run
        processes.leave()


def sweep(main: Callable[[S], None], config_name: str, settings_class: type[S], overrides: Sequence[str]) -> None:
    """Call `main` for every combination of the comma-separated values.

    All runs are checked before the first run starts. If a run fails, the sweep continues and prints all errors at the end. With
    several processes, the first error ends the sweep, because the other processes may still be executing the failed run.
    Raises UserError if `parse_config` rejects a run, or if two runs would use the same folder.
    """
    runs: dict[str, tuple[str, S]] = {}  # run folder -> (overrides, settings)
    for typed in BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(list(overrides)), None)[0]:
        words, cfg = " ".join(typed), parse_config(compose_overrides(typed, config_name), settings_class, typed)
        folder = f"{cfg.output_dir}/{cfg.name}" if hasattr(cfg, "name") else words
        if folder in runs:
            raise UserError(f"two runs of the sweep have the folder {folder}: {runs[folder][0]} and {words}; set name=...")
        runs[folder] = words, cfg
    failures = []
    for _, cfg in runs.values():
        try:
            main(cfg)
        except Exception as e:
            if os.environ.get("WORLD_SIZE", "1") != "1":
                raise
            failures.append(format_error(e) or traceback.format_exc())
    if failures:
        sys.exit("\n".join(failures))


def explain_keys(config_name: str) -> str:
    """Return the contents of a command's YAML files, which explain every key and define its default value."""
    groups = ["*/*.yaml"] if config_name == "config" else ["sampling.yaml", "guidance/*.yaml"]
    files = [CONFIGS / f"{config_name}.yaml", *(file for group in groups for file in sorted(CONFIGS.glob(group)))]
    return "\n".join(f"--- {file.relative_to(REPOSITORY)}\n{file.read_text(encoding='utf-8')}" for file in files)


def parse_config(cfg: DictConfig, settings_class: type[S], overrides: Sequence[str] = ()) -> S:
    """Resolve the interpolations in a composed configuration and return validated settings. Raises UserError for wrong keys.

    `TrainConfig.named` names a training run after `overrides`, which are the arguments that the user typed.
    """
    try:
        raw = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as e:
        raise UserError(f"{e.full_key}: {str(e).splitlines()[0]}") from e
    settings = validate(raw, settings_class)
    return settings.named(overrides) if isinstance(settings, TrainConfig) else settings


def run_command(commands: dict[str, str], description: str, arguments: list[str], keys: dict[str, str] | None = None) -> None:
    """Call the function that the first argument names, and pass the remaining `key=value` arguments to the function.

    Args:
        commands: Maps each command to "module:function". A module is imported only when its command runs.
        description: Text that `--help` prints.
        keys: Maps a command to "module:class" if its function accepts one object. The fields of the class are the command's keys.
    """
    name, *given = arguments or ["--help"]
    if name in HELP:
        sys.stdout.write(description)
        return
    if name not in commands:
        raise UserError(f"unknown command {name!r}; use one of {', '.join(commands)}")
    settings_class = (keys or {}).get(name)
    if HELP & set(given):
        sys.stdout.write(source_of(settings_class or commands[name]))
        return
    function = resolve_name(commands[name])
    target = resolve_name(settings_class) if settings_class else function
    parameters = inspect.signature(target, eval_str=True).parameters.values()
    types = {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in parameters}
    if wrong := [argument for argument in given if "=" not in argument]:
        raise UserError(f"{wrong[0]!r} is not of the form key=value")
    try:
        raw = OmegaConf.to_container(OmegaConf.from_dotlist(given))  # parses the values as YAML
    except (YAMLError, OmegaConfBaseException, ValueError) as e:
        raise UserError(" ".join(str(e).split())) from e
    values = dict(validate(raw, create_model(name, __base__=Settings, **types)))
    function(target(**values)) if settings_class else function(**values)


def source_of(what: str) -> str:
    """Return the source code of a class, or a function's signature and docstring, without importing the module."""
    module, _, name = what.partition(":")
    source = (REPOSITORY / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    node = next(node for node in ast.parse(source).body if getattr(node, "name", None) == name)
    end = node.end_lineno if isinstance(node, ast.ClassDef) else node.body[0].end_lineno
    return "\n".join(source.splitlines()[node.lineno - 1 : end]) + "\n"
