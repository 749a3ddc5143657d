"""Compose a configuration from the files in configs/ and the command-line arguments, and validate it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from common.errors import UserError
from common.files import REPOSITORY
from configs.schema import TrainConfig
from configs.settings import GROUPS, S, flatten, has_interpolation, nearest, validate

CONFIGS = REPOSITORY / "configs"
NO_ROW = "experiment=bases/... is only a part of rows; choose a row, a file in configs/experiment/ such as table2_dit_b2"


def help_text(config_name: str) -> str:
    """Return Hydra's template for --help: the script's docstring, and the YAML files, which explain every key."""
    config_name = config_name if config_name in ("sample", "fid") else "config"  # train.py also takes files of the user's own
    groups = {"config": ["*/*.yaml"]}.get(config_name, ["sampling.yaml", "guidance/*.yaml", "diffusion/*.yaml"])
    files = [file for group in (f"{config_name}.yaml", *groups) for file in sorted(CONFIGS.glob(group))]
    files = [file for file in files if file.parent.name != "experiment"]
    keys = "\n".join(f"--- {file.relative_to(REPOSITORY)}\n{file.read_text(encoding='utf-8')}" for file in files)
    choices = "== Configuration groups ==\n$APP_CONFIG_GROUPS\n" if config_name == "config" else ""
    docstring, keys = ((text or "").replace("$", "$$") for text in (sys.modules["__main__"].__doc__, keys))
    return f"{docstring}\n== Flags ==\n$FLAGS_HELP\n\n{choices}== Config ==\nOverride any key (train.lr=2e-4)\n\n{keys}"


def name_of(path: str | None) -> str:
    """Return the name of a folder as part of a run's name, which cannot begin with a dot."""
    return os.path.basename(os.path.abspath(path or "custom")).lstrip(".")


OmegaConf.register_new_resolver(
    "backbone", lambda size, _root_: f"{'LightningDiT' if 'lightning' in _root_.model.name else 'DiT'}-{size}", replace=True
)
OmegaConf.register_new_resolver("name_of", name_of, replace=True)
OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)
OmegaConf.register_new_resolver("help_text", help_text, replace=True)
# The group sampler of sample.py and fid.py accepts all keys, because they depend on the run. `_Command.of_run` checks them.
ConfigStore.instance().store("sampler_of_run", DictConfig({"sampler": DictConfig({}, flags={"struct": False})}))


# A quoted string, or in group 1 text outside of quotes up to a character that separates values in Hydra's grammar.
_TEXT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|((?:\$\{[^{}]*\}|[^,()\[\]{}'"])+)""")


def quote_letters(argument: str) -> str:
    """Quote each text in the value of `key=value` that has letters beyond ASCII, which Hydra's grammar only knows in quotes."""
    key, equals, value = argument.partition("=")

    def quote(match: re.Match[str]) -> str:
        head, colon, text = match[0].rpartition(":") if value.startswith("{") else ("", "", match[0])  # a dictionary's key
        stripped = text.strip()
        is_readable = match[1] is None or stripped.isascii() or "\\" in stripped
        return match[0] if is_readable else f"{head}{colon}{text.replace(stripped, f'{chr(34)}{stripped}{chr(34)}')}"

    return argument if argument.isascii() else f"{key}{equals}{_TEXT.sub(quote, value)}"


def parse_argument(argument: str) -> Override:
    """Parse `key=value` by Hydra's grammar."""
    try:
        return OverridesParser.create().parse_override(quote_letters(argument))
    except HydraException as e:
        raise UserError(explain(e if isinstance(e, OverrideParseException) else OverrideParseException(argument, str(e)))) from e


def row_names() -> list[str]:
    """Return the names of all rows of the papers' tables, which are files in configs/experiment/."""
    return sorted(file.stem for file in (CONFIGS / "experiment").glob("*.yaml"))


def compose_overrides(overrides: Sequence[str], config_name: str = "config") -> DictConfig:
    """Compose configs/<config_name>.yaml with `overrides`, without resolving interpolations or validating values."""
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra.compose(config_name, overrides=[*map(quote_letters, overrides)])
    except (HydraException, ValueError) as e:  # model=3 raises ValueError
        raise UserError(explain(e, overrides, config_name)) from e


def parse_config(cfg: DictConfig, settings_class: type[S], overrides: Sequence[str] = (), are_typed: bool = True) -> S:
    """Resolve the interpolations in a composed configuration and return validated settings.

    Args:
        overrides: The arguments of the job. `TrainConfig.named` names a training run after them.
        are_typed: Whether `overrides` are as the user typed them. In a sweep, Hydra has replaced 2024_11_25 by 20241125.
    """
    typed = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    if typed.get("experiment", "").startswith("bases/"):  # some parts compose and would train
        raise UserError(NO_ROW)
    if removed := next((override for override in overrides if override.startswith("~")), None):
        raise UserError(
            f"{removed}: every key has a value, so none can be removed; write {removed[1:].partition('=')[0]}=<value>"
        )
    with name_errors_of_omegaconf():
        raw = OmegaConf.to_container(cfg, resolve=True)
    settings = validate(
        raw, settings_class, {key: value for key, value in typed.items() if are_typed or has_interpolation(value)}
    )
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


def explain(error: Exception, overrides: Iterable[str] = (), config_name: str = "config") -> str:
    """Return Hydra's error message on one line. Add the nearest names for an unknown key or choice, and quotes for a value."""
    text = " ".join(f"{error} {error.__cause__ or ''}".partition("Config search path")[0].split())
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals:
            return f"{error.override!r} is not of the form key=value"
        quoted = value.strip("'").replace('"', r"\"")
        hint = f"""'{key}=["a b","c=d"]'""" if value.startswith(("[", "{")) else f"""'{key}="{quoted}"'"""
        return f"{error.override} is not readable: quote text with special characters twice, as in {hint} ({text})"
    if "is not in struct" in text:
        # The argument's key has a part too many (guidance.w), or its value is a dictionary with an unknown key (guidance={w:2}).
        names = re.findall(r"(?:Could not override '|is not in struct full_key: )([\w.@/-]+)", text)
        unknown = max(names, key=len)
        if unknown.startswith("hydra."):
            return text
        pattern = re.compile(rf"({'|'.join(GROUPS)}|experiment)=[\w/]+")
        choices = [match[0] for override in overrides if (match := pattern.match(override))]  # model=dit of model=dit,tread
        try:
            known = flatten(OmegaConf.to_container(compose_overrides(choices, config_name)))
        except UserError:  # a choice that only --config-dir knows
            known = {}
        # The keys of these groups depend on the method, and on the run's diffusion in sample.py and fid.py.
        methods = {file.stem: OmegaConf.load(file) for file in sorted((CONFIGS / "guidance").glob("*.yaml"))}
        known |= {f"guidance.{key}": None for method in methods.values() for key in method}
        known |= {
            f"sampler.{key}": None for file in (CONFIGS / "diffusion").glob("*.yaml") for key in OmegaConf.load(file).sampler
        }
        group, _, key = unknown.partition(".")
        if group == "guidance" and (having := [name for name, method in methods.items() if key in method]):
            return f"{unknown} is a key of guidance={' or '.join(having)}; choose one of them in the command, too"
        return f"{unknown} is not a key{nearest(unknown, [*known, *(key.partition('.')[0] for key in known)])}"
    if text.startswith("Multiple values for experiment") and any(one.startswith("+experiment=") for one in overrides):
        return "experiment is set already, by default to null: write experiment=... without +"
    if "In 'experiment/bases/" in text:  # its own parts have other paths in a row
        return NO_ROW
    if unknown := re.search(r"Could not find 'experiment/([^']+)'", text):
        return f"experiment={unknown[1]} is not in configs/experiment/ or --config-dir{nearest(unknown[1], row_names())}"
    return text
