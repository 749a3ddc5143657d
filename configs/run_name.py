"""Name a training run after the arguments of its command (see "What a run is" in docs/architecture.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from common.files import hash_bytes
from common.roles import Role

GROUPS = ("data", "model", "diffusion", "alignment", "guidance")  # Hydra's config groups
MAX_NAME_LENGTH = 60  # maximum number of characters in a generated run name


def run_name(default: str, overrides: Sequence[str], values: Mapping[str, object], roles: Mapping[str, Role]) -> str:
    """Append the overridden keys and their values to the default name, unless the user set a name.

    The name omits keys that a resume accepts, and keys that the default name covers: data and model, or an experiment and its
    seed.

    Args:
        values, roles: Value and role of each dotted key. Keys inside lists have none.
    """
    overridden = {key: value for key, _, value in (override.lstrip("+").partition("=") for override in overrides)}
    if "name" in overridden:
        return default  # it is the user's name
    in_default = {"experiment", "seed"} if "experiment" in overridden else {"data", "model"}
    parts = [
        part_of(key, values.get(f"{key}.name" if key in GROUPS else key, text))
        for key, text in overridden.items()
        if key not in in_default and is_fixed(key, roles)
    ]
    return shorten("_".join([default, *parts])) if parts else default


def is_fixed(key: str, roles: Mapping[str, Role]) -> bool:
    """Return whether another value of a key makes another run. The group data has no role of its own, as its keys differ."""
    role = role_of(key, roles)
    return key == "data" or (role is not None and role.resume != "accepts")


def role_of(key: str, roles: Mapping[str, Role]) -> Role | None:
    """Return the role of a key. A key inside a list, such as model.routes.0.selection_ratio, has the role of the list."""
    while key and key not in roles:
        key = key.rpartition(".")[0]
    return roles.get(key)


def part_of(key: str, value: object) -> str:
    """Return what a key adds to the name, such as lr-0.001."""
    text = json.dumps(value).strip('[]{}"/ ')
    return f"{key.rpartition('.')[2]}-{re.sub(r'[^0-9A-Za-z.+-]+', '-', text)}"


def shorten(name: str) -> str:
    """Replace the end of a name that is longer than MAX_NAME_LENGTH by a hash."""
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 9]}_{hash_bytes(name.encode())[:8]}"
