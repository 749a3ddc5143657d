"""Settings checked by their types. pydantic says what a key accepts; this file adds the key's name and the nearest known key."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import UserError

T = TypeVar("T")


class Settings(BaseModel):
    """Checked settings. An unknown key, a missing key and a value of another type are errors. Objects are frozen."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)  # built when first used

    def named(self, overrides: Sequence[str]) -> Settings:
        """The settings; if they have a name, their default name shows what `overrides` changed."""
        return self


S = TypeVar("S", bound=Settings)
GROUPS = ("data", "model", "diffusion", "alignment", "guidance")  # Hydra's groups of choices

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

    Args:
        raw: what is validated.
        known: the keys from which the nearest one is suggested.
    """
    try:
        yield
    except ValidationError as e:
        problems: dict[str, str] = {}  # by key; a key that takes a number or a list of numbers has two problems
        for error in e.errors():
            key = _dotted_key(error, raw)
            text = _explain(error, key, known)
            problems[key] = f"{problems[key]} or {text.partition(': ')[2]}" if key in problems else text
        keys: dict[str, list[str]] = {}  # problem -> keys; interpolated keys share a problem
        for key, text in problems.items():
            keys.setdefault(text, []).append(key)
        raise UserError("\n".join((", ".join(names) + text).removeprefix(": ") for text, names in keys.items())) from e


def _dotted_key(error: dict, raw: dict) -> str:
    """The key of an error, without the branches of a union, which pydantic adds to the path."""
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
    if error["type"] == "value_error":  # raised by one of our functions
        return f": {error['ctx']['error']}"
    value = " is not set" if error["input"] is None else f"={error['input']!r:.100}"
    return f"{value}: {error['msg']}"


def nearest(key: str, known: Iterable[str]) -> str:
    """`; nearest: train.lr`: up to three known keys that look alike, first those with the same last part."""
    names = {other.lower(): other for other in known if other != key}
    same = [other for name, other in names.items() if name.rpartition(".")[2] == key.lower().rpartition(".")[2]]
    near = [*same, *(names[name] for name in difflib.get_close_matches(key.lower(), names, cutoff=0.75))]
    return f"; nearest: {', '.join([*dict.fromkeys(near)][:3])}" if near else ""


def flatten(config: dict, prefix: str = "") -> dict[str, object]:
    """Nested dictionaries -> {"train.lr": 1e-4, ...}; lists are values, and so is `experiment`."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict) and value and f"{prefix}{key}" != "experiment":
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
