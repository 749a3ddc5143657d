"""Settings that pydantic checks by their types. Error messages name the key, its value and what is accepted."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import UserError

T = TypeVar("T")


class Settings(BaseModel):
    """Checked settings. Unknown keys, missing keys and values of another type are errors. Objects are frozen."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)  # built when first used

    def named(self, overrides: Sequence[str]) -> Settings:
        """Return the settings, named after `overrides` if they are those of a run (`TrainConfig.named`)."""
        return self


S = TypeVar("S", bound=Settings)
GROUPS = ("data", "model", "diffusion", "alignment", "guidance")  # Hydra's groups of choices

OneOrMany = Union[T, Annotated[list[T], Field(min_length=1)]]  # noqa: UP007 (a generic alias)


def as_list(value: T | list[T]) -> list[T]:
    """Return the list itself, or a list with the single value."""
    return value if isinstance(value, list) else [value]


def validate(raw: dict, settings: type[S]) -> S:
    """Turn `raw` into checked settings. Raises UserError with a line for every wrong key."""
    with explained(raw, known={**flatten(raw), **settings.model_fields}):
        return settings.model_validate(raw)


@contextlib.contextmanager
def explained(raw: dict, known: Iterable[str]) -> Iterator[None]:
    """A context in which pydantic's ValidationError becomes a UserError with a line for every wrong key.

    Args:
        raw: the values that the block validates.
        known: all keys; the message about an unknown key names the nearest of them.
    """
    try:
        yield
    except ValidationError as e:
        raise UserError("\n".join(dict.fromkeys(_explain(error, raw, known) for error in e.errors()))) from e


def _explain(error: dict, raw: dict, known: Iterable[str]) -> str:
    """Format the wrong key, its value and pydantic's message. Pydantic's path also holds branches of unions."""
    is_missing = error["type"] in ("missing", "missing_argument")
    path, value = [], raw
    for part in error["loc"]:
        if isinstance(value, dict) and part in value:
            path.append(str(part))
            value = value[part]
        elif isinstance(value, list) and isinstance(part, int):
            path[-1] += f"[{part}]"
            value = value[part]
    key = ".".join([*path, str(error["loc"][-1])] if is_missing else path)
    if is_missing:
        return f"{key}= is missing"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{key} is not a key{nearest(key, known)}"
    if error["type"] == "value_error":  # raised by one of our functions
        return f"{key}: {error['ctx']['error']}".removeprefix(": ")
    return f"{key} is not set: {error['msg']}" if error["input"] is None else f"{key}={error['input']!r:.100}: {error['msg']}"


def nearest(key: str, known: Iterable[str]) -> str:
    """Format `; nearest: train.lr` with up to three similar known keys. Keys with the same last part come first."""
    names = {other.lower(): other for other in known if other != key}
    same = [other for name, other in names.items() if name.rpartition(".")[2] == key.lower().rpartition(".")[2]]
    near = [*same, *(names[name] for name in difflib.get_close_matches(key.lower(), names, cutoff=0.75))]
    return f"; nearest: {', '.join([*dict.fromkeys(near)][:3])}" if near else ""


def flatten(config: dict, prefix: str = "") -> dict[str, object]:
    """Flatten nested dictionaries to {"train.lr": 1e-4, ...}. Lists and the dictionary `experiment` are values."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict) and value and f"{prefix}{key}" != "experiment":
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
