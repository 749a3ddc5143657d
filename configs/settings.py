"""Settings that are checked by their types, and messages that say what a key accepts.

`Settings` is the base class of every configuration and of every command's arguments; setup/schema.py holds the configurations.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from common.errors import UserError
from latents.shards import MAX_CLASSES, MAX_RESOLUTION

T = TypeVar("T")


class Settings(BaseModel):
    """Checked settings. An unknown key, a missing one and a value of another type are errors; nobody writes to them."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)  # built when first used


S = TypeVar("S", bound=Settings)

# ----------------------------------------------------------------------------------------------------------------------
# What a value may be.


@dataclass(frozen=True)
class Accepts:
    """A test that pydantic's own types cannot express, and how messages say it."""

    test: Callable[[Any], bool]
    words: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable) -> Any:
        return handler(Annotated[source, AfterValidator(self._check)])

    def _check(self, value: Any) -> Any:
        if not self.test(value):
            raise ValueError(self.words)
        return value


def one_of(choices: Iterable[str]) -> Accepts:
    return Accepts(lambda value: value in choices, " | ".join(choices))


Whole = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
# Bounds far above all that is sensible: a slip of the keyboard is an error, not a MemoryError or a hang.
BatchSize = Annotated[int, Field(ge=1, le=2**20)]
NumClasses = Annotated[int, Field(ge=1, le=MAX_CLASSES)]
Resolution = Annotated[int, Field(ge=1, le=MAX_RESOLUTION)]
LatentSize = Annotated[int, Field(ge=1, le=2**12)]  # channels, and height or width
NumSamples = Annotated[int, Field(ge=1, le=10**7)]
ShardSize = Annotated[int, Field(ge=1, le=10**7)]  # items
NumWorkers = Annotated[int, Field(ge=0, le=2**10)]
NumThreads = Annotated[int, Field(ge=1, le=2**12)]
SamplerSteps = Annotated[int, Field(ge=1, le=10**5)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # NumPy's global generator takes no other
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, lt=math.inf)]
NotNegative = Annotated[float, Field(ge=0, lt=math.inf)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
OneOrMany = Union[T, Annotated[list[T], Field(min_length=1)]]  # noqa: UP007 (a generic alias)


# ----------------------------------------------------------------------------------------------------------------------
# Checking, and messages.


def validate(raw: dict, settings: type[S]) -> S:
    """`raw` as checked settings. Raises UserError as `check` does."""
    try:
        return settings.model_validate(raw)
    except ValidationError as e:
        raise UserError(_explain(e.errors()[0], raw, settings)) from e


def _explain(error: dict, raw: dict, settings: type[Settings]) -> str:
    if isinstance(cause := error.get("ctx", {}).get("error"), UserError):  # of two keys together
        return str(cause)
    fields = keys_of(settings, raw)
    path, value = [], raw
    for part in error["loc"]:  # keys of the configuration, and what pydantic calls the branches in between
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value) and ".".join(path) not in fields:
            value = value[part]
            continue
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        path.append(part)
    key = ".".join(map(str, path))
    if error["type"] == "extra_forbidden":
        return unknown_key(key, settings)
    if error["type"] == "missing":
        return f"{key} is missing; it accepts {accepted(fields[key])}" if key in fields else f"{key} is missing: it was removed"
    if error["type"].startswith("union_tag"):
        key, value, fields = f"{key}.name", value.get("name") if isinstance(value, dict) else value, keys_of(settings)
    if key not in fields:
        return f"{key}={value!r} is not accepted; set its keys: {_keys_inside(key, fields)}"
    words = accepted(fields[key])
    if value == "":
        return f"{key}= has no value; it accepts {words}"
    is_whole = isinstance(value, float) and value.is_integer() and "whole number" in words
    hint = f"; write {key}={value:.0f}" if is_whole and _fits(int(value), fields[key][0]) else ""
    if isinstance(value, str) and words.count(" | ") > 8:  # too many to be seen at a glance
        folded = {choice.lower(): choice for choice in words.split(" | ")}
        near = difflib.get_close_matches(value.lower(), folded, n=3)
        hint = f"; nearest: {', '.join(folded[choice] for choice in near)}" if near else ""
    return f"{key}={value!r} is not accepted; use {words}{hint}"


def _fits(value: object, field: FieldInfo) -> bool:
    try:
        TypeAdapter(field.rebuild_annotation()).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def _keys_inside(group: str, fields: Iterable[str]) -> str:
    return ", ".join(key for key in fields if key.startswith(f"{group}."))


def keys_of(settings: type[Settings], raw: dict | None = None, prefix: str = "") -> dict[str, list[FieldInfo]]:
    """{"train.lr": its field, ...} for every key; of a choice of groups, the keys of all of them.

    Args:
        raw: a configuration; of the groups, only those that it chooses by name.
    """
    keys: dict[str, list[FieldInfo]] = {}
    for name, field in settings.model_fields.items():
        groups = [one for one in _members(field.annotation) if isinstance(one, type) and issubclass(one, Settings)]
        inside = raw.get(name) if isinstance(raw, dict) else None
        chosen = inside.get("name") if isinstance(inside, dict) else None
        for group in [one for one in groups if group_name(one) == chosen] or groups:
            for key, found in keys_of(group, inside, f"{prefix}{name}.").items():
                keys.setdefault(key, []).extend(found)
        if not groups or NoneType in get_args(field.annotation):
            keys[f"{prefix}{name}"] = [field]
    return keys


def group_name(settings: type[Settings]) -> str | None:
    """`cfg` for the class of guidance=cfg; None where a group has no choices."""
    field = settings.model_fields.get("name")
    return get_args(field.annotation)[0] if field and get_origin(field.annotation) is Literal else None


def _members(annotation: Any) -> list[Any]:
    """The types that a union, an annotated type or a list of them is made of."""
    if get_origin(annotation) in (Union, UnionType, list, Annotated):
        parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
        return [member for part in parts for member in _members(part)]
    return [annotation]


def accepted(fields: Sequence[FieldInfo]) -> str:
    """What a key accepts, in words; of a choice of groups, what all of them do together."""
    return " | ".join(dict.fromkeys(_words(field.annotation, field.metadata) for field in fields))


def _words(annotation: Any, metadata: Sequence = ()) -> str:
    metadata = [part for one in metadata for part in (one.metadata if isinstance(one, FieldInfo) else [one])]
    if said := [one.words for one in metadata if isinstance(one, Accepts)]:
        return said[-1]
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(parts[0], [*parts[1:], *metadata])
    if origin in (Union, UnionType):
        single = [part for part in parts if part is not NoneType and get_origin(_bare(part)) is not list]
        words = _words(single[0], metadata) if single else "a list"
        words += ", or a list of them" if len(single) < len([part for part in parts if part is not NoneType]) else ""
        return words + (", or null" if NoneType in parts else "")
    if origin is Literal:
        return " | ".join(map(str, parts))
    limits = {name: getattr(one, name) for one in metadata for name in ("ge", "gt", "le", "lt") if hasattr(one, name)}
    if annotation is bool:
        return "true | false"
    if annotation is int:
        if "le" in limits:
            return f"a whole number from {limits['ge']} to {limits['le']}"
        return f"a whole number of at least {limits['ge']}" if "ge" in limits else "a whole number"
    if annotation is float:
        if not limits:
            return "a number"
        low, high = limits.get("gt", limits.get("ge", "-inf")), limits.get("lt", limits.get("le", "inf"))
        return f"a number in {'(' if 'gt' in limits else '['}{low}, {high}{']' if 'le' in limits else ')'}"
    return "a list" if origin is list or annotation is list else "text"


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def unknown_key(key: str, settings: type[Settings]) -> str:
    """The message for a key that does not exist: those of that name in other groups, the nearest ones, or those beside it."""
    group, _, own = key.partition(".")
    field = settings.model_fields.get(group)
    choices = [one for one in _members(field.annotation) if isinstance(one, type) and issubclass(one, Settings)] if field else []
    if len(choices) > 1 and any(own in keys_of(one) for one in choices):
        owners = " and ".join(f"{group}={group_name(one)}" for one in choices if own in keys_of(one))
        return f"{key} is not a key of this {group}; it belongs to {owners}"
    if same := same_name_keys(key, settings):
        return f"{key} is not a key of the configuration; accepted: {', '.join(same)}"
    keys = list(keys_of(settings))
    near = difflib.get_close_matches(key, keys, n=3, cutoff=0.75)
    beside = near or [k for k in keys if k.rpartition(".")[0] == key.rpartition(".")[0]] or keys
    more = "" if near else "; --help lists all keys"
    return f"{key} is not a key of the configuration; accepted: {', '.join(beside)}{more}"


def same_name_keys(key: str, settings: type[Settings]) -> list[str]:
    """The keys whose last part is that of `key`: lr -> [train.lr]."""
    name = key.rpartition(".")[2]
    return [] if name == "name" else [k for k in keys_of(settings) if k.rpartition(".")[2] == name]
