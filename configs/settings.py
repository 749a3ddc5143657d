"""Base class for settings, which pydantic validates. Error messages name the key, its value and the accepted values."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from copy import deepcopy
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from common.errors import UserError

T = TypeVar("T")


class Settings(BaseModel):
    """Base class for frozen settings. Unknown keys, missing keys and values of the wrong type raise an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)  # pydantic builds it on first use
    removed_keys: ClassVar[dict[str, Any]] = {}  # removed keys, and the only value of each that this version supports


S = TypeVar("S", bound=Settings)
M = TypeVar("M", bound=BaseModel)

# A value or a list of values. The discriminator lets pydantic check, and report, only one of the two.
OneOrMany = Annotated[
    Union[Annotated[T, Tag("one")], Annotated[list[T], Field(min_length=1), Tag("many")]],  # noqa: UP007 (a generic alias)
    Discriminator(lambda value: "many" if isinstance(value, list) else "one"),
]


def as_list(value: T | list[T]) -> list[T]:
    return value if isinstance(value, list) else [value]


def fill_missing(settings: S, values: Mapping[str, object]) -> S:
    """Return settings with the value in `values` for every key that is None."""
    filled = {key: values[key] for key, value in settings if value is None and key in values}
    return settings.model_copy(update=filled)


def override(settings: S, given: Settings | None) -> S:
    """Return settings with the value in `given` for every key of theirs that is not None there. These values are validated."""
    chosen = {key: value for key, value in given or () if value is not None and key in type(settings).model_fields}
    return settings.model_copy(update=chosen)


class NumberForText(UserError):
    """Some values must be text, but are the `numbers`, by dotted key. Other values may be wrong, too."""

    def __init__(self, message: str, numbers: Mapping[str, float] = MappingProxyType({})):  # pickle passes only the message
        super().__init__(message)
        self.numbers = numbers


def validate(raw: dict, settings_class: type[M]) -> M:
    """Convert `raw` to an instance of a settings class. The message of the UserError has a line for each problem."""
    try:
        return settings_class.model_validate(raw)
    except ValidationError as e:
        known = {**flatten(raw), **settings_class.__pydantic_fields__}
        message = "\n".join(dict.fromkeys(f"{_describe_error(error, raw)}{_advise(error, raw, known)}" for error in e.errors()))
        numbers = {_key_of_error(error, raw): error["input"] for error in e.errors() if _is_number_for_text(error)}
        raise (NumberForText(message, numbers) if numbers else UserError(message)) from e


def _key_of_error(error: dict, raw: dict) -> str:
    """Return the dotted key that pydantic's error is about. Union branches, which pydantic adds to its path, are omitted."""
    path: list[str] = []
    value = raw
    for part in error["loc"]:
        if isinstance(value, dict) and part in value:
            path.append(str(part))
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int):
            path[-1] += f"[{part}]"
            value = value[part]
    if error["type"] == "missing":
        path.append(str(error["loc"][-1]))
    return ".".join(path)


_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's error types


def _describe_error(error: dict, raw: dict) -> str:
    """Format the wrong key, its value and pydantic's message."""
    key = _key_of_error(error, raw)
    if error["type"] == "missing":
        return f"{key}= is missing"
    if error["type"] in _UNKNOWN_KEY:
        return f"{key} is not a key"
    if error["type"] == "value_error":  # raised by one of our validators
        return f"{key}: {error['ctx']['error']}".removeprefix(": ")
    if error["input"] is None:
        return f"{key} is not set: {error['msg']}"
    return f"{key}={error['input']!r:.100}: {error['msg']}"


def _advise(error: dict, raw: dict, known: Iterable[str]) -> str:
    """Return what may help a user who typed the wrong key or value, as the end of its description, or no text."""
    key = _key_of_error(error, raw)
    if error["type"] in _UNKNOWN_KEY:
        return did_you_mean(key, known)
    return f"""; quote text that looks like a number twice: '{key}="..."'""" if _is_number_for_text(error) else ""


def _is_number_for_text(error: dict) -> bool:
    return error["type"] == "string_type" and type(error["input"]) in (int, float)


def describe_errors(error: ValidationError, raw: dict) -> str:
    """Return one line about `raw`, the content of a file, which names up to 100 unknown and missing keys and 20 wrong values."""
    errors = error.errors()
    unknown = [_key_of_error(e, raw) for e in errors if e["type"] in _UNKNOWN_KEY]
    missing = [_key_of_error(e, raw) for e in errors if e["type"] == "missing"]
    wrong = [_describe_error(e, raw).replace("\n", "; ") for e in errors if e["type"] not in (*_UNKNOWN_KEY, "missing")]
    keys = {"unknown keys": unknown, "missing keys": missing}
    problems = [f"{what}: {', '.join(_first(100, names))}" for what, names in keys.items() if names]
    return "; ".join([*problems, *_first(20, [*dict.fromkeys(wrong)])])


def _first(number: int, texts: list[str]) -> list[str]:
    return texts if len(texts) <= number else [*texts[:number], f"and {len(texts) - number} more"]


def read_stored(raw: dict, settings_class: type[S], source: object) -> S:
    """Convert settings that are stored in the file `source` to settings of this version (see docs/architecture.md).

    A key that the file lacks was added later. It gets the default in `settings_class`, which is the value that the code used
    before. A key in `settings_class.removed_keys` is accepted with the value there. The UserError names all unknown, missing and
    wrong keys in one line.
    """
    raw = deepcopy(raw)
    problems: list[str] = []
    for key, value in settings_class.removed_keys.items():
        *groups, name = key.split(".")
        group = functools.reduce(lambda parent, part: parent.get(part, {}), groups, raw)
        if (stored := group.pop(name, value)) != value:
            problems.append(f"{key}={stored!r}, but this version has no such key and always uses {value!r}")
    try:
        settings = settings_class.model_validate(raw)
    except ValidationError as e:
        problems.insert(0, describe_errors(e, raw))
    if problems:
        raise UserError(f"{source} cannot be read: {'; '.join(problems)}")
    return settings


def did_you_mean(key: str, known: Iterable[str]) -> str:
    """Return up to three similar names as text, such as `; nearest: train.lr`. Names with the same end come first.

    The end of a key follows its last dot, and the whole `key` may be the end of a row's name, such as `table2_dit_b2`.
    """
    names = {other.lower(): other for other in known if other != key}
    end = key.lower().rpartition(".")[2]
    same = [other for name, other in names.items() if name.rpartition(".")[2] == end]
    same += [other for name, other in names.items() if name.endswith(f"_{end}")]
    near = [*same, *(names[name] for name in difflib.get_close_matches(key.lower(), names, cutoff=0.75))]
    return f"; nearest: {', '.join([*dict.fromkeys(near)][:3])}" if near else ""


def flatten(config: dict, prefix: str = "") -> dict[str, object]:
    """Flatten nested dictionaries to {"train.lr": 1e-4, ...}. Lists and the `experiment` dictionary are not flattened."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict) and value and f"{prefix}{key}" != "experiment":
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
