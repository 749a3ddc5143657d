"""What a run changed of its row of the paper's tables, and what it is called.

A row's figures are those of its own configuration. `experiment=<row>` takes other settings on top, and then the run is another
experiment: here is what these settings are, for training's log, the default name and the report.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from configs.arguments import CONFIGS
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from configs import experiments
from configs.schema import SAME_RUN, TrainConfig, family_of, flatten, role_of
from configs.settings import keys_of

MAX_NAME_LENGTH = 120
GROUPS = ("data", "model", "diffusion", "alignment")  # their choices set keys that have a role
ROUTING = ("model", "model.name", "model.routes", "model.selection")  # what a dense run and a routed one may differ in


# ----------------------------------------------------------------------------------------------------------------------
# Changes.


def identity_of(config: Mapping[str, object]) -> dict[str, object]:
    """The values that make two runs different experiments: those of keys with a role in the schema, the seed excepted.

    Args:
        config: values by dotted key.
    """
    identity = {key: value for key, value in config.items() if role_of(key) is not None and key != "seed"}
    if isinstance(init_from := identity.get("init_from"), str):  # its run and step, without the folder and the seed
        path = Path(init_from)
        name = f"{path.parent.parent.name}/{path.name}" if path.parent.name == "checkpoints" else path.name
        identity["init_from"] = without_seed(name)
    return identity


def without_seed(name: str) -> str:
    """A run's name without `_seed0`, wherever that stands."""
    return re.sub(r"[-_.]*seed[-_.]*\d+", "", name)


def changes_of(row: str, config: Mapping[str, object]) -> dict[str, tuple[object, object]] | None:
    """(the row's value, the run's) for every key that a run changed of its row; None if this version has no such row.

    A choice of a group stands for all that it brings: {"model": ("tread", "dit")}. No changes are the seed, keys that say how a
    run is watched or how fast it is, what the row leaves to the data, and model.name, which the routes decide. A key that the
    run does not know, because it is of an earlier version, is not compared.

    Args:
        config: values by dotted key. data.* may be filled in from the data.
    """
    if row not in experiments.names():
        return None
    found, own, changes, choices = identity_of(config), row_identity(row), {}, []
    for group in GROUPS:
        name, own_name = found.get(f"{group}.name"), own.get(f"{group}.name")
        is_choice = isinstance(name, str) and re.fullmatch(r"\w+", name) and (CONFIGS / group / f"{name}.yaml").is_file()
        if not is_choice or name == own_name or (group == "model" and found.get("model.routes") == own.get("model.routes")):
            continue
        chosen = row_identity(row, *choices, f"{group}={name}")
        if chosen.get(f"{group}.name") == name:  # else the row itself sets it
            choices, own, changes[group] = [*choices, f"{group}={name}"], chosen, (own_name, name)
    for key in sorted(found):
        is_left_to_data = key.startswith("data.") and own.get(key) is None
        if found[key] != own.get(key) and key != "model.name" and not is_left_to_data:
            changes[key] = (own.get(key), found[key])
    return changes


@functools.cache  # nobody writes to it
def row_identity(row: str, *choices: str) -> dict[str, object]:
    return identity_of(flatten(OmegaConf.to_container(compose_row(row, *choices), resolve=True)))


@functools.cache
def compose_row(row: str | None, *choices: str) -> DictConfig:
    """The row's own configuration, with other choices of groups; None: the configuration without a row."""
    experiments.register()
    overrides = [*([f"experiment={row}"] if row else []), *choices]
    if GlobalHydra.instance().is_initialized():  # inside hydra.main
        return compose("config", overrides=overrides)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", overrides=overrides)


def change_words(changes: Mapping[str, tuple[object, object]]) -> str:
    """model.backbone=DiT-XS/2 instead of DiT-XL/1, train.batch_size=8 instead of 1024."""
    return ", ".join(f"{key}={typed(new)} instead of {typed(old)}" for key, (old, new) in changes.items())


def typed(value: object) -> str:
    """A value as one would type it: null, true, [{selection_ratio:0.5,...}]."""
    return json.dumps(value, separators=(",", ":"), default=str).replace('"', "")


def short_key(key: str, keys: Iterable[str]) -> str:
    """backbone for model.backbone, unless another of the keys ends so."""
    last = key.rpartition(".")[2]
    return key if sum(other.rpartition(".")[2] == last for other in keys) > 1 else last


def short_change_key(key: str) -> str:
    return short_key(key, [other for other in keys_of(TrainConfig) if role_of(other) is not None])


# ----------------------------------------------------------------------------------------------------------------------
# Names.


def name_with(base: str, values: Iterable[tuple[str, str]]) -> str:
    """A folder's name that says which values were set: equal for equal ones, different for different ones.

    Args:
        values: the word that stands for a key, and its text: ("backbone", "DiT-XS-2") becomes <base>_backbone-DiT-XS-2.
    """
    words = []
    for key, value in values:
        is_plain = re.fullmatch(r"[\w.+-]{1,24}", value) is not None
        words.append(f"{key}-{value if is_plain else hash_text(value)}")
    name = "_".join([re.sub(r"[^\w.+-]", "-", base), *words])
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 9]}_{hash_text(name)}"


def hash_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def name_run(composed: DictConfig, cfg: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """The configuration with the name of its run, and lines for the log about a run that is not what its choices suggest.

    A name that the user gave stays. The default name of a run that is not its row says what it changed, as far as a resume would
    refuse the change: more steps continue the same folder. Without a row the default name says tread for a network with routes
    and dit for one without (lightningdit_tread and lightningdit), whatever model.name is, and repa with alignment.

    Args:
        composed: the configuration as Hydra composed it, unresolved.
        cfg: the same, checked.
    """
    row = cfg.experiment.name if cfg.experiment else None
    changes = changes_of(row, flatten(cfg.model_dump())) if row else {}
    _, (dense, routed) = family_of(cfg.model.backbone)
    kind = routed if any(route["selection_ratio"] > 0 for route in cfg.model.routes) else dense
    aligned = "" if cfg.alignment.name == "none" else f"_{cfg.alignment.name}"
    name, lines = cfg.name, []
    if row is None or changes is not None:  # the rows of another folder of configurations have names of their own
        raw, default = (OmegaConf.to_container(one, resolve=False)["name"] for one in (composed, compose_row(row)))
        if raw == default and row:
            kept = {key: new for key, (_, new) in changes.items() if key in GROUPS or role_of(key) in SAME_RUN}
            name = name_with(name, [(short_change_key(key), typed(new).replace("/", "-")) for key, new in kept.items()])
        elif raw == default and (cfg.model.name != kind or aligned):
            name = f"{cfg.data.name}_{kind}{aligned}"
    if changes:
        apart = "reports give it a row of its own" + (", without the paper's figures" if cfg.experiment.paper else "")
        lines.append(f"not the row {row}: {change_words(changes)}; {apart}")
    if cfg.model.name != kind:
        what = "with model.routes=... is a routed network" if kind == routed else "with no token that skips is a dense network"
        lines.append(f"model={cfg.model.name} {what}: the run is named {name}")
    return cfg.model_copy(update={"name": name}), lines
