"""Command lines: Hydra for commands with a configuration, `key=value` for the rest. A user's error becomes one line."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import create_model
from yaml import YAMLError

from common.errors import UserError, first_line
from common.files import REPOSITORY
from common.progress import log_to_stderr
from configs.compose import compose_overrides, register
from configs.settings import GROUPS, S, Settings, flatten, nearest, validate

FULL_ERRORS = "HYDRA_FULL_ERROR"  # Hydra's switch, which holds for all commands here
NO_NAME = "Config group override must be a string"  # Hydra's ValueError for model=3
CONFIGS = REPOSITORY / "configs"
HELP = {"--help", "-h"}


def _backbone(size: str, _root_: DictConfig) -> str:
    """The backbone of this size ("XS/2") for model=<name>, in the configuration of the digits."""
    return f"{'LightningDiT' if _root_.model.name.startswith('lightning') else 'DiT'}-{size}"


OmegaConf.register_new_resolver("backbone", _backbone, replace=True)
OmegaConf.register_new_resolver("name_of", lambda path: os.path.basename(os.path.abspath(path or "custom")), replace=True)
OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)


def guard(action: Callable[[], None]) -> None:
    """Call `action`. An error that a user can cause becomes one line, and exit code 1. HYDRA_FULL_ERROR=1 keeps the traceback."""
    wants_traceback = os.environ.get(FULL_ERRORS, "0") == "1"
    interrupts: list[int] = []

    def interrupt(signum: int, frame: object) -> NoReturn:
        interrupts.append(signum)
        raise KeyboardInterrupt

    log_to_stderr()
    signal.signal(signal.SIGINT, interrupt)  # shells start background jobs with SIGINT ignored
    try:
        action()
    except (Exception, KeyboardInterrupt) as error:
        if wants_traceback:
            raise
        if interrupts or isinstance(error, KeyboardInterrupt):  # in the middle of an import, Ctrl-C can raise any error
            sys.stderr.write("stopped; run the same command to resume\n")
            sys.exit(128 + signal.SIGINT)
        if (line := format_error(error)) is None:
            raise
        sys.exit(line)


def format_error(error: BaseException) -> str | None:
    """The message that a command prints for an error that a user can cause; None for others."""
    rank = os.environ.get("RANK")
    if isinstance(error, UserError):
        return f"error{'' if rank is None else f' (process {rank})'}: {error}"
    if isinstance(error, RuntimeError) and "gloo" in str(error):
        return f"error (process {rank}): another process has ended, or does not answer: {first_line(error)}"
    return None


def run(main: Callable[[S], None], config_name: str, settings: type[S], description: str) -> None:
    """Compose configs/<config_name>.yaml with the command line, check it by `settings`, and call `main` with it, guarded.

    `description` is printed above the help. `main` imports what it needs, so that --help and wrong keys do not
    wait seconds for torch.
    """
    if HELP & set(sys.argv):
        sys.stdout.write(f"{description}\n{explain_keys(config_name)}")
    else:
        guard(partial(_run, main, config_name, settings))


def _run(main: Callable[[S], None], config_name: str, settings: type[S]) -> None:
    given, unknown = get_args_parser().parse_known_args()
    if unknown:
        raise UserError(f"{unknown[0]} is not an option; keys are written without dashes: {unknown[0].lstrip('-')}=<value>")
    options = {name for name, value in vars(given).items() if value and name != "overrides"}
    with explained_composition(given.overrides, config_name):
        if "multirun" in options:
            check_sweep(given.overrides, config_name, settings)
        cfg = None if options else check(compose_overrides(given.overrides, config_name), settings, given.overrides)
    if options:  # a sweep, --cfg, the shell's completion
        run_by_hydra(main, config_name, settings, given.overrides)
    else:
        main(cfg)
    if processes := sys.modules.get("runtime.processes"):  # otherwise nothing ran
        processes.leave()


def run_by_hydra(main: Callable[[S], None], config_name: str, settings: type[S], overrides: Sequence[str]) -> None:
    """Let Hydra's sweeper and launcher call `main`."""

    def checked(cfg: DictConfig) -> None:
        try:
            main(check(cfg, settings, HydraConfig.get().overrides.task))
        except Exception as e:
            clear_frames(e)  # Hydra keeps the error until the sweep ends; its frames would keep the trainer in memory
            if os.environ.get("WORLD_SIZE", "1") != "1":  # the other processes may still be in this run: end the sweep
                sys.exit(format_error(e) or traceback.format_exc())
            raise

    checked.__module__ = Path(sys.argv[0]).stem  # Hydra names the jobs of a cluster after it
    os.environ[FULL_ERRORS] = "1"  # have Hydra raise errors instead of printing them
    register(overrides)
    with explained_composition(overrides, config_name):
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(checked)()


@contextlib.contextmanager
def explained_composition(overrides: Sequence[str], config_name: str) -> Iterator[None]:
    """A context in which Hydra's errors become UserErrors."""
    try:
        yield
    except (HydraException, ValueError) as e:
        if not isinstance(e, HydraException) and not str(e).startswith(NO_NAME):
            raise
        raise UserError(explain(e, overrides, config_name)) from e


def check_sweep(overrides: Sequence[str], config_name: str, settings: type[S]) -> None:
    """Compose and check every run of a sweep before the first one starts. Sweepers other than Hydra's default choose runs later.

    Raises UserError for a run that `check` refuses, and for two runs that would share a folder.
    """
    if any(override.startswith("hydra/sweeper") for override in overrides):
        return
    runs: dict[tuple, str] = {}
    for typed in BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(list(overrides)), None)[0]:
        typed = [override for override in typed if not override.startswith("hydra")]
        words = " ".join(typed)
        try:
            cfg = check(compose_overrides(typed, config_name), settings, typed)
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
    """The YAML files of a command and of its groups, which explain every key and hold its default."""
    groups = ["*/*.yaml"] if config_name == "config" else ["sampling.yaml", "guidance/*.yaml"]
    files = [CONFIGS / f"{config_name}.yaml", *(file for group in groups for file in sorted(CONFIGS.glob(group)))]
    return "\n".join(f"--- {file.relative_to(REPOSITORY)}\n{file.read_text(encoding='utf-8')}" for file in files)


def explain(error: HydraException | ValueError, overrides: Sequence[str], config_name: str) -> str:
    """Hydra's message on one line, with the nearest key."""
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} cannot be read; quote a value that holds spaces or special characters: 'key=\"a b\"'"
    text = " ".join(str(error).partition("Config search path")[0].split())
    if text.startswith(NO_NAME):
        return f"{' '.join(overrides)}: a group takes the name of a choice; --help lists them"
    if text.startswith("Error merging override"):  # a dictionary in place of a list
        return f"{text.partition('override ')[2]}: the key holds a list"
    if unknown := re.search(r"Could not override '([^']+)'", text):
        choices = [override for override in overrides if override.partition("=")[0] in GROUPS]
        known = flatten(OmegaConf.to_container(compose_overrides(choices, config_name)))
        return f"{unknown[1]} is not a key{nearest(unknown[1], [*known, *(key.partition('.')[0] for key in known)])}"
    return text


def check(cfg: DictConfig, settings: type[S], overrides: Sequence[str] = ("name=",)) -> S:
    """Resolve the interpolations of a composed configuration and return it as checked settings. Raises UserError.

    Args:
        overrides: the arguments that the user typed. Without `name=`, the run is named after them (`Settings.named`).
    """
    try:
        raw = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as e:
        raise UserError(f"{e.full_key}: {str(e).splitlines()[0]}") from e
    return validate(raw, settings).named(overrides)


def run_command(
    commands: Mapping[str, Callable | str], description: str, arguments: list[str], keys: Mapping[str, str] | None = None
) -> None:
    """Call the function that the first argument names, with the other arguments, `key=value`.

    Args:
        commands: functions, or "module:function", which is imported when it is called.
        description: what `--help` prints.
        keys: "module:class" for commands that take one object; their keys are the fields of the class instead of parameters.
    """
    name, *given = arguments or ["--help"]
    if name in HELP:
        sys.stdout.write(description)
        return
    if name not in commands:
        raise UserError(f"unknown command {name!r}; use one of {', '.join(commands)}")
    kind = (keys or {}).get(name)
    if HELP & set(given):
        sys.stdout.write(source_of(kind or commands[name]))
        return
    function = resolve_name(commands[name]) if isinstance(commands[name], str) else commands[name]
    taker = resolve_name(kind) if kind else function
    parameters = inspect.signature(taker, eval_str=True).parameters.values()
    types = {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in parameters}
    values = dict(parse_arguments(given, create_model(name, __base__=Settings, **types)))
    function(taker(**values)) if kind else function(**values)


def source_of(what: Callable | str) -> str:
    """Source of a function's signature and docstring, or of a whole "module:class", without an import, which takes seconds."""
    if callable(what):
        file, name = Path(inspect.getsourcefile(what)), what.__name__
    else:
        module, _, name = what.partition(":")
        file = REPOSITORY / f"{module.replace('.', '/')}.py"
    source = file.read_text(encoding="utf-8")
    node = next(node for node in ast.parse(source).body if getattr(node, "name", None) == name)
    end = node.end_lineno if isinstance(node, ast.ClassDef) else node.body[0].end_lineno
    return "\n".join(source.splitlines()[node.lineno - 1 : end]) + "\n"


def parse_arguments(arguments: Sequence[str], settings: type[S]) -> S:
    """`key=value` arguments as checked settings. Values are parsed as YAML. Raises UserError."""
    if wrong := [argument for argument in arguments if "=" not in argument]:
        raise UserError(f"{wrong[0]!r} is not of the form key=value; the keys are {', '.join(settings.model_fields)}")
    try:
        raw = OmegaConf.to_container(OmegaConf.from_dotlist(list(arguments)))
    except (YAMLError, OmegaConfBaseException, ValueError) as e:
        raise UserError(" ".join(str(e).split())) from e
    return validate(raw, settings)
