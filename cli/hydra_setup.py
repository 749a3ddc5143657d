"""Set Hydra up for the files in configs/: the text of --help, the functions that the files call, and letters beyond ASCII."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from common.files import REPOSITORY

CONFIGS = REPOSITORY / "configs"
COMMANDS_ON_RUNS = ("sample", "fid")  # commands that take the configuration of a run, such as its diffusion


def files_of(config_name: str) -> list[Path]:
    """Return the YAML files with the keys of a command, without the rows. train.py also takes a user's own configuration."""
    groups = ["sampling.yaml", "guidance/*.yaml", "diffusion/*.yaml"]
    names = [f"{config_name}.yaml", *groups] if config_name in COMMANDS_ON_RUNS else ["config.yaml", "*/*.yaml"]
    return [file for name in names for file in sorted(CONFIGS.glob(name)) if file.parent.name != "experiment"]


def help_text(config_name: str) -> str:
    """Return Hydra's template for --help: the script's docstring, and the YAML files, which explain every key."""
    keys = "\n".join(f"--- {file.relative_to(REPOSITORY)}\n{file.read_text(encoding='utf-8')}" for file in files_of(config_name))
    choices = "" if config_name in COMMANDS_ON_RUNS else "== Configuration groups ==\n$APP_CONFIG_GROUPS\n"
    docstring = (sys.modules["__main__"].__doc__ or "").replace("$", "$$")  # Hydra fills in $NAME
    keys = keys.replace("$", "$$")
    return f"{docstring}\n== Flags ==\n$FLAGS_HELP\n\n{choices}== Config ==\nOverride any key (train.lr=2e-4)\n\n{keys}"


@contextlib.contextmanager
def accept_lazy_help() -> Iterator[None]:
    """Let argparse accept help texts that are not strings in the `with` block, such as that of Hydra's --shell-completion.

    Python 3.14 refuses them when an argument is added. Here, the argument gets its text afterwards. Hydra 1.4 will not need this.
    """
    add_argument = argparse.ArgumentParser.add_argument

    def add(parser: argparse.ArgumentParser, *names: str, **settings: object) -> argparse.Action:
        if isinstance(text := settings.get("help"), str | None):
            return add_argument(parser, *names, **settings)
        action = add_argument(parser, *names, **settings | {"help": None})
        action.help = text
        return action

    argparse.ArgumentParser.add_argument = add
    try:
        yield
    finally:
        argparse.ArgumentParser.add_argument = add_argument


def name_of(path: str | None) -> str:
    """Return the name of a folder as part of a run's name, which cannot begin with a dot."""
    return os.path.basename(os.path.abspath(path or "custom")).lstrip(".")


def backbone_of_size(size: str, _root_: DictConfig) -> str:
    """Return the backbone of this size for the chosen model, such as DiT-B/2. OmegaConf passes the whole configuration."""
    family = "LightningDiT" if "lightning" in _root_.model.name else "DiT"
    return f"{family}-{size}"


OmegaConf.register_new_resolver("backbone", backbone_of_size, replace=True)
OmegaConf.register_new_resolver("name_of", name_of, replace=True)
OmegaConf.register_new_resolver("repository", lambda path: str(REPOSITORY / path), replace=True)
OmegaConf.register_new_resolver("help_text", help_text, replace=True)
# A default of configs/sampling.yaml. The group sampler accepts any key, which YAML cannot say, because its keys depend on the
# run's diffusion. `sampling_schema.sampler_of_run` checks them.
ConfigStore.instance().store("any_sampler_keys", DictConfig({"sampler": DictConfig({}, flags={"struct": False})}))


# A quoted string, or in group 1 text outside of quotes up to a character that separates values in Hydra's grammar.
_TEXT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|((?:\$\{[^{}]*\}|[^,()\[\]{}'"])+)""")


def quote_non_ascii(argument: str) -> str:
    """Quote each text in the value of `key=value` that has letters beyond ASCII, which Hydra's grammar only knows in quotes."""
    key, equals, value = argument.partition("=")

    def quote(match: re.Match[str]) -> str:
        start = match[0].rfind(":") + 1 if value.startswith("{") else 0  # after a dictionary's key
        text = match[0][start:].strip()
        if match[1] is None or text.isascii() or "\\" in text:
            return match[0]
        return match[0][:start] + match[0][start:].replace(text, f'"{text}"')

    return argument if argument.isascii() else f"{key}{equals}{_TEXT.sub(quote, value)}"


def row_names() -> list[str]:
    """Return the names of all rows of the papers' tables, which are files in configs/experiment/."""
    return sorted(file.stem for file in (CONFIGS / "experiment").glob("*.yaml"))
