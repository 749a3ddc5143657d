"""Settings that are checked by their types: pydantic says what a key accepts, this file which key, and the nearest known one."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from typing import Annotated, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import UserError

T = TypeVar("T")


class Settings(BaseModel):
    """Checked settings. An unknown key, a missing one and a value of another type are errors; nobody writes to them."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)  # built when first used


S = TypeVar("S", bound=Settings)

_MISSING = ("missing", "missing_argument")
OneOrMany = Union[T, Annotated[list[T], Field(min_length=1)]]  # noqa: UP007 (a generic alias)


def as_list(value: T | list[T]) -> list[T]:
    """What OneOrMany accepts, as a list."""
    return value if isinstance(value, list) else [value]


def validate(raw: dict, settings: type[S]) -> S:
    """`raw` as checked settings. Raises UserError with a line for every wrong key: its value and what pydantic says."""
    with explained(raw, known={**flatten(raw), **settings.model_fields}):
        return settings.model_validate(raw)


@contextlib.contextmanager
def explained(raw: dict, known: Iterable[str]) -> Iterator[None]:
    """A context in which pydantic's ValidationError becomes a UserError with a line for every wrong key.

    `raw` is what is validated, and `known` are the keys to offer for an unknown one.
    """
    try:
        yield
    except ValidationError as e:
        lines: dict[str, str] = {}  # a key's branches (a number, or a list of them) on one line
        for error in e.errors():
            key = _dotted_key(error, raw)
            text = (key + _explain(error, key, known)).removeprefix(": ")
            lines[key] = f"{lines[key]} or {text.partition(': ')[2]}" if key in lines else text
        raise UserError("\n".join(lines.values())) from e


def _dotted_key(error: dict, raw: dict) -> str:
    """The key of an error, without what pydantic calls the branches of a choice."""
    path, value = [], raw
    for part in error["loc"]:
        if isinstance(value, dict) and part in value:
            path.append(str(part))
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int):
            path[-1] += f"[{part}]"
            value = value[part]
    if error["type"] in _MISSING:
        path.append(str(error["loc"][-1]))
    return ".".join(path)


def _explain(error: dict, key: str, known: Iterable[str]) -> str:
    if error["type"] in _MISSING:
        return "= is missing"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f" is not a key{nearest(key, known)}"
    if error["type"] == "value_error":  # raised by a function of ours
        return f": {error['ctx']['error']}"
    return " is not set" if error["input"] is None else f"={error['input']!r:.100}: {error['msg']}"


def nearest(key: str, known: Iterable[str]) -> str:
    """`; nearest: train.lr`: known keys that look alike, or whose last parts do, else those of the same group if it has few."""
    parts, (group, _, name) = {other: other.rpartition(".") for other in known if other != key}, key.rpartition(".")
    alike = difflib.get_close_matches(name, {part[2] for part in parts.values()}, n=3, cutoff=0.75)
    lowered = {other.lower(): other for other in parts}
    near = [lowered[found] for found in difflib.get_close_matches(key.lower(), lowered, n=3, cutoff=0.75)]
    near = near or [other for other in parts if parts[other][2] in alike]
    same = [other for other in parts if parts[other][0] == group]
    near = near or (same if group or len(same) == len(parts) else [])  # top-level keys are no group
    return f"; nearest: {', '.join(near)}" if 0 < len(near) <= 20 else ""


def flatten(config: dict, prefix: str = "") -> dict[str, object]:
    """Nested dictionaries -> {"train.lr": 1e-4, ...}; lists are values, and so is `experiment`."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict) and value and f"{prefix}{key}" != "experiment":
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
