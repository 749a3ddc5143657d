"""Define types that pydantic validates in settings, and a decorator for settings dataclasses."""

from __future__ import annotations

import errno
import math
import os
import re
from numbers import Integral
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict
from pydantic.dataclasses import dataclass

# Decorator for a frozen dataclass. Unknown fields and values of the wrong type or out of bounds raise ValueError.
settings_dataclass = dataclass(frozen=True, config=ConfigDict(extra="forbid", defer_build=True))

MAX_NAME_BYTES = 255  # length of a file's name on usual file systems
MAX_CLASSES = 10**6  # tables for more classes would not fit into memory


def check_colour(name: object) -> object:
    """Return the name of an opaque colour. Raises ValueError for other text."""
    from PIL import ImageColor

    if name in (None, ""):  # YAML takes an unquoted # as the start of a comment
        raise ValueError("there is no colour; put quotes around #: background=\"'#808080'\"")
    if not isinstance(name, str):
        return name  # pydantic reports the wrong type
    if len(ImageColor.getrgb(name)) != 3:  # raises ValueError for an unknown name
        raise ValueError(f"{name!r} is transparent")
    return name


def _check_on_disk(text: str) -> str:
    """Reject text that no file system accepts as a path. Libraries would raise errors without the name of the key."""
    if len(text.encode()) >= 4096 or any(len(name.encode()) > MAX_NAME_BYTES for name in text.split("/")):
        raise ValueError(f"{text[:20]}... is longer than {MAX_NAME_BYTES} bytes between two slashes, or than 4095 bytes")
    try:
        os.stat(text)
    except OSError as e:
        if e.errno == errno.ELOOP:  # `Path.resolve` would raise RuntimeError
            raise ValueError(f"{text} leads through links that form a loop") from e
    return text


def _number(value: object) -> object:
    """Reject true and false, which Python treats as 1 and 0. Convert NumPy's integers, and floats such as 1e3, to integers."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    is_whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole else value


_NUMBER = BeforeValidator(_number)
# Strict refuses text such as "0.5", also in a settings dataclass, which must accept a dictionary and cannot be strict itself.
# The upper bounds far exceed all sensible values. A typing mistake therefore raises an error instead of running forever.
NonNegativeInt = Annotated[int, Strict(), Field(ge=0, le=10**9), _NUMBER]
PositiveInt = Annotated[int, Strict(), Field(ge=1, le=10**9), _NUMBER]
Steps = Annotated[int, Strict(), Field(ge=1, le=10**5), _NUMBER]  # type of a sampler's num_steps
FiniteFloat = Annotated[float, Strict(), Field(allow_inf_nan=False), _NUMBER]
PositiveFloat = Annotated[float, Strict(), Field(gt=0, lt=math.inf), _NUMBER]
NonNegativeFloat = Annotated[float, Strict(), Field(ge=0, lt=math.inf), _NUMBER]
NonNegativeOrInfinite = Annotated[float, Strict(), Field(ge=0), _NUMBER]


def _increasing(ends: list[float]) -> list[float]:
    if not ends[0] < ends[1]:
        raise ValueError(f"{ends} is not [low,high] with low below high")
    return ends


def matching(pattern: str, description: str) -> AfterValidator:
    """Return a validator for text that matches `pattern` completely. Its error message contains the pattern's `description`."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r:.100} is not {description}")
        return _check_on_disk(text)

    return AfterValidator(check)


Range = Annotated[list[FiniteFloat], Field(min_length=2, max_length=2), AfterValidator(_increasing)]  # [low, high]
Text = Annotated[str, Field(min_length=1), AfterValidator(_check_on_disk)]  # for example a path
Colour = Annotated[str, BeforeValidator(check_colour)]  # for example white, #ffffff or rgb(255, 255, 255)
AutoencoderSpec = Annotated[
    str, matching("identity|none|(sd-vae|va-vae):.+", "identity, none, sd-vae:<hub id or folder> or va-vae:<file or folder>")
]
