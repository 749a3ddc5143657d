"""Command lines: Hydra for what has a configuration, `key=value` for the rest. A user's error becomes one line."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any, NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import create_model
from yaml import YAMLError

from common.errors import UserError, first_line
from common.files import REPOSITORY
from common.progress import log_to_stderr
from configs import experiments
from configs.settings import S, Settings, flatten, nearest, validate

FULL_ERRORS = "HYDRA_FULL_ERROR"  # Hydra's own switch, for all of our commands
NO_NAME = "Config group override must be a string"  # Hydra's ValueError for model=3
CONFIGS = REPOSITORY / "configs"
HELP = {"--help", "-h"}


def _backbone(size: str, _root_: DictConfig) -> str:
    """The backbone of this size ("XS/2") for model=<name>, in the configuration of the digits."""
    from configs.schema import NETWORKS  # torch takes seconds

    return next(backbone for backbone in NETWORKS[_root_.model.name].BACKBONES if backbone.endswith(f"-{size}"))


OmegaConf.register_new_resolver("backbone", _backbone, replace=True)
OmegaConf.register_new_resolver("name_of", lambda path: os.path.basename(os.path.abspath(path or "custom")), replace=True)
OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)


def guard(action: Callable[[], None]) -> None:
    """Do it; an error that a user can cause becomes one line, and exit code 1. HYDRA_FULL_ERROR=1 keeps the traceback."""
    wants_traceback = os.environ.get(FULL_ERRORS, "0") == "1"
    log_to_stderr()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without it
    try:
        action()
    except (UserError, KeyboardInterrupt) as error:
        if wants_traceback:
            raise
        if isinstance(error, KeyboardInterrupt):
            sys.stderr.write("stopped; the same command goes on after what is finished\n")
            sys.exit(128 + signal.SIGINT)
        rank = os.environ.get("RANK")
        sys.exit(f"error{'' if rank is None else f' (process {rank})'}: {error}")
    except RuntimeError as error:
        if wants_traceback or "gloo" not in str(error):
            raise
        sys.exit(f"error (process {os.environ.get('RANK')}): another process has ended, or does not answer: {first_line(error)}")


def import_name(name: str) -> Any:
    """Import "module:name". Ctrl-C ends the process at once meanwhile: in the middle of an import, it can raise any error."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return resolve_name(name)
    finally:
        signal.signal(signal.SIGINT, before)


class SweepEnded(BaseException):
    """Passes through Hydra, which goes on with the next run of a sweep after any Exception."""


def run(main: str, config_name: str, settings: str, description: str, at_end: str) -> NoReturn:
    """Compose configs/<config_name>.yaml with the command line, check it by `settings`, and call `main` with it, guarded.

    `main`, `settings` and `at_end`, which is called after the last run of a sweep, are "module:name" and imported when they are
    needed: --help and an unknown key do not wait for torch. `description` stands above the help.
    """
    failures: list[Exception] = []

    def checked(cfg: DictConfig) -> None:
        is_sweep = HydraConfig.get().mode is RunMode.MULTIRUN
        try:
            cfg = check(cfg, import_name(settings), HydraConfig.get().overrides.task)  # before `main` is imported
            import_name(main)(cfg)
        except Exception as e:
            failures.append(e)  # Hydra prints a line of its own for what leaves this function
            if is_sweep:  # Hydra keeps the error until the sweep ends, and the error's frames would keep this run's trainer
                clear_frames(e)
            if is_sweep and os.environ.get("WORLD_SIZE", "1") != "1":  # the other processes may still be in this run
                raise SweepEnded from e
            if is_sweep or not isinstance(e, UserError):  # of a sweep, perhaps in a process of its own
                raise

    checked.__module__ = main.partition(":")[0]  # Hydra names the jobs of a cluster after it

    def start() -> None:
        given, unknown = get_args_parser().parse_known_args()
        if unknown:
            raise UserError(f"{unknown[0]} is not an option; keys are written without dashes: {unknown[0].lstrip('-')}=<value>")
        os.environ[FULL_ERRORS] = "1"  # have Hydra raise its errors, and those of `main`, instead of printing them
        try:
            if given.multirun:
                check_sweep(given.overrides, config_name, import_name(settings))
            experiments.register(given.overrides)
            with contextlib.suppress(SweepEnded):
                hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(checked)()
        except (HydraException, ValueError) as e:
            if not isinstance(e, HydraException) and not str(e).startswith(NO_NAME):  # it comes from `main`
                raise
            raise UserError(explain(e, given.overrides, config_name)) from e
        if failures:
            raise failures[0]
        if "torch" in sys.modules:  # else nothing ran: --cfg, the shell's completion
            import_name(at_end)()

    if HELP & set(sys.argv):
        sys.stdout.write(f"{description}\n{explain_keys(config_name)}")
    else:
        guard(start)
    sys.exit()


def check_sweep(overrides: Sequence[str], config_name: str, settings: type[S]) -> None:
    """Compose and check every run of a sweep before the first one starts. Other sweepers than Hydra's own choose runs later.

    Raises UserError for a run that `check` refuses, and for two runs that would share a folder.
    """
    if any(override.startswith("hydra/sweeper") for override in overrides):
        return
    runs: dict[tuple, str] = {}
    for typed in BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(list(overrides)), None)[0]:
        typed = [override for override in typed if not override.startswith("hydra")]
        words = " ".join(typed)
        try:
            cfg = check(experiments.compose_overrides(typed, config_name), settings, typed)
        except UserError as e:
            raise UserError(f"{words}: {e}") from e
        folder = tuple(getattr(cfg, key, None) for key in ("output_dir", "name"))
        if folder != (None, None) and folder in runs:
            raise UserError(f"two runs of the sweep have the folder {'/'.join(folder)}: {runs[folder]} and {words}; set name=...")
        runs[folder] = words


def clear_frames(error: BaseException | None) -> None:
    """Drop the local variables that the tracebacks of an error and of its causes hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def explain_keys(config_name: str) -> str:
    """The files that say what every key means, and its default: the command's own, and those of its groups."""
    files = [CONFIGS / f"{config_name}.yaml", *sorted(CONFIGS.glob("*/*.yaml" if config_name == "config" else "guidance/*.yaml"))]
    return "\n".join(f"--- {file.relative_to(REPOSITORY)}\n{file.read_text(encoding='utf-8')}" for file in files)


def explain(error: HydraException | ValueError, overrides: Sequence[str], config_name: str) -> str:
    """Hydra's message on one line, with the nearest key."""
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} cannot be read; quote a value that holds spaces or special characters: 'key=\"a b\"'"
    text = " ".join(str(error).partition("Config search path")[0].split())
    if text.startswith(NO_NAME):
        return f"{' '.join(overrides)}: the choice of a group is a name; --help lists them"
    if text.startswith("Error merging override"):  # a dictionary in place of a list
        return f"{text.partition('override ')[2]}: the key holds a list"
    if unknown := re.search(r"Could not override '([^']+)'", text):
        choices = [override for override in overrides if override.partition("=")[0] in experiments.GROUPS]
        known = flatten(OmegaConf.to_container(experiments.compose_overrides(choices, config_name)))
        return f"{unknown[1]} is not a key{nearest(unknown[1], [*known, *(key.partition('.')[0] for key in known)])}"
    return text


def check(cfg: DictConfig, settings: type[S], overrides: Sequence[str] = ("name=",)) -> S:
    """The composed configuration as checked settings, with its interpolations resolved. Raises UserError.

    Args:
        overrides: what was typed, which names a run without a `name=` (`Settings.named`).
    """
    try:
        raw = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as e:
        raise UserError(f"{e.full_key}: {str(e).splitlines()[0]}") from e
    return validate(raw, settings).named(overrides)


def run_command(commands: dict[str, str], description: str, arguments: list[str], keys_of: dict[str, str] | None = None) -> None:
    """Call the one of several functions that the first argument names; the others are its parameters, as `key=value`.

    Args:
        commands: "module:function", which is imported when it is called.
        description: what `--help` prints.
        keys_of: the class whose fields are a command's keys, where they are not the function's own parameters.
    """
    name, *given = arguments or ["--help"]
    if name in HELP:
        sys.stdout.write(description)
        return
    if name not in commands:
        raise UserError(f"unknown command {name!r}; use one of {', '.join(commands)}")
    if HELP & set(given):
        sys.stdout.write(source_of((commands | (keys_of or {}))[name]))
        return
    function = import_name(commands[name])
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    types = {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in parameters}
    function(**dict(parse_arguments(given, create_model(function.__name__, __base__=Settings, **types))))


def source_of(name: str) -> str:
    """Signature and docstring of "module:function", or the whole of "module:class", from the file: importing takes seconds."""
    module, _, name = name.partition(":")
    source = (REPOSITORY / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    node = next(node for node in ast.parse(source).body if getattr(node, "name", None) == name)
    end = node.end_lineno if isinstance(node, ast.ClassDef) else node.body[0].end_lineno
    return "\n".join(source.splitlines()[node.lineno - 1 : end]) + "\n"


def parse_arguments(arguments: Sequence[str], settings: type[S]) -> S:
    """`key=value` arguments as checked settings. A value is what YAML reads. Raises UserError."""
    if wrong := [argument for argument in arguments if "=" not in argument]:
        raise UserError(f"{wrong[0]!r} is not of the form key=value; the keys are {', '.join(settings.model_fields)}")
    try:
        raw = OmegaConf.to_container(OmegaConf.from_dotlist(list(arguments)))
    except (YAMLError, OmegaConfBaseException, ValueError) as e:
        raise UserError(" ".join(str(e).split())) from e
    return validate(raw, settings)
