"""Compose a configuration from configs/*.yaml, a row of configs/experiments.py and the command-line arguments."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from common.errors import UserError
from common.files import REPOSITORY
from configs.settings import GROUPS, flatten, nearest
from extras.experiments import ROWS

CONFIGS = REPOSITORY / "configs"


def help_text(config_name: str) -> str:
    """Return Hydra's template for --help: the script's docstring, and the YAML files, which explain every key."""
    config_name = config_name if config_name in ("sample", "fid") else "config"  # train.py also takes files of the user's own
    groups = {"config": ["*/*.yaml"]}.get(config_name, ["sampling.yaml", "guidance/*.yaml"])
    files = [file for group in (f"{config_name}.yaml", *groups) for file in sorted(CONFIGS.glob(group))]
    keys = "\n".join(f"--- {file.relative_to(REPOSITORY)}\n{file.read_text(encoding='utf-8')}" for file in files)
    choices = "== Configuration groups ==\n$APP_CONFIG_GROUPS\n" if config_name == "config" else ""
    docstring, keys = ((text or "").replace("$", "$$") for text in (sys.modules["__main__"].__doc__, keys))
    return f"{docstring}\n== Flags ==\n$FLAGS_HELP\n\n{choices}== Config ==\nOverride any key (train.lr=2e-4)\n\n{keys}"


OmegaConf.register_new_resolver(
    "backbone", lambda size, _root_: f"{'LightningDiT' if 'lightning' in _root_.model.name else 'DiT'}-{size}", replace=True
)
OmegaConf.register_new_resolver(  # `cfg_scale`, the short form of guidance.cfg_scale in sample.py and fid.py, or a default value
    "cfg_scale_or", lambda x, _root_: x if (given := OmegaConf.select(_root_, "cfg_scale")) is None else given, replace=True
)
OmegaConf.register_new_resolver("name_of", lambda path: os.path.basename(os.path.abspath(path or "custom")), replace=True)
OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)
OmegaConf.register_new_resolver("help_text", help_text, replace=True)


def job_overrides() -> list[str]:
    """Return the arguments of the job that Hydra runs, with their interpolations as they were typed."""
    return OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)


def parse_argument(argument: str) -> Override:
    """Parse `key=value` by Hydra's grammar."""
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException as e:
        raise UserError(explain(e if isinstance(e, OverrideParseException) else OverrideParseException(argument, str(e)))) from e


class RowSource(ConfigSource):
    """Presents the rows of the tables to Hydra as the files experiment/<name>.yaml of another configs/ folder."""

    files = {f"experiment/{name}": row for name, row in ROWS.items()}

    @staticmethod
    def scheme() -> str:
        return "rows"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return bool(self.list(config_path, None))

    def is_config(self, config_path: str) -> bool:
        return config_path in self.files

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        folder = f"{config_path}/" if config_path else ""
        inside = [file.removeprefix(folder) for file in self.files if file.startswith(folder)]
        if results_filter == ObjectType.CONFIG:
            return sorted(inside)  # with the rows of subfolders, because experiment=glob(*) chooses from this list
        kinds = {name: ObjectType.GROUP if slash else ObjectType.CONFIG for name, slash, _ in (x.partition("/") for x in inside)}
        return sorted(name for name, kind in kinds.items() if results_filter in (None, kind))

    def load_config(self, config_path: str) -> ConfigResult:
        row, choices, node = self.files[config_path], {}, OmegaConf.create()
        node.name = f"{row.name.replace('/', '_')}_seed${{seed}}"
        for override in map(parse_argument, row.arguments.split()):
            if override.key_or_group in GROUPS:
                choices[override.get_key_element().lstrip("+")] = override.value()  # such as guidance@eval.guidance
            else:
                OmegaConf.update(node, override.key_or_group, override.value())
        node.experiment = {key: value for key, value in asdict(row).items() if key != "arguments"}
        node.defaults = [*({f"override /{group}": choice} for group, choice in choices.items()), "_self_"]
        return ConfigResult(self.provider, self.full_path(), node, header={"package": "_global_"})


class RowPath(SearchPathPlugin):
    """Let Hydra search `RowSource` after configs/ and --config-dir."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("rows", "rows://")


Plugins.instance().register(RowSource)
Plugins.instance().register(RowPath)


def compose_overrides(overrides: Sequence[str], config_name: str = "config") -> DictConfig:
    """Compose configs/<config_name>.yaml with `overrides`, without resolving interpolations or validating values."""
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra.compose(config_name, overrides=[*overrides])
    except (HydraException, ValueError) as e:  # model=3 raises ValueError
        raise UserError(explain(e, overrides, config_name)) from e


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
    if unknown := re.search(r"is not in struct full_key: (\S+)", text):
        pattern = re.compile(rf"({'|'.join(GROUPS)}|experiment)=[\w/]+")
        choices = [match[0] for override in overrides if (match := pattern.match(override))]  # model=dit of model=dit,tread
        try:
            known = flatten(OmegaConf.to_container(compose_overrides(choices, config_name)))
        except UserError:  # a choice that only --config-dir knows
            known = {}
        return f"{unknown[1]} is not a key{nearest(unknown[1], [*known, *(key.partition('.')[0] for key in known)])}"
    if text.startswith("Multiple values for experiment") and any(one.startswith("+experiment=") for one in overrides):
        return "experiment is set already, by default to null: write experiment=... without +"
    if unknown := re.search(r"Could not find 'experiment/([^']+)'", text):
        files = "configs/experiments.py, extras/experiments.py, configs/experiment/ or --config-dir"
        return f"experiment={unknown[1]} is not in {files}{nearest(unknown[1], ROWS)}"
    return text
