"""Define types that pydantic validates in settings, and a decorator for settings dataclasses."""

from __future__ import annotations

import functools
import math
import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

# Decorator for a frozen dataclass. Unknown fields and values of the wrong type or out of bounds raise ValueError.
settings = functools.partial(dataclass, frozen=True, config=ConfigDict(extra="forbid", defer_build=True))


def _colour(name: str) -> str:
    from PIL import ImageColor

    if len(ImageColor.getrgb(name)) != 3:  # raises ValueError for an unknown name
        raise ValueError(f"{name!r} is transparent")
    return name


def _number(value: object) -> object:
    """Reject true and false, which Python treats as 1 and 0. Convert floats with integer values, such as 1e3, to integers."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


_NUMBER = BeforeValidator(_number)
# The upper bounds far exceed all sensible values. A typing mistake therefore raises an error instead of running forever.
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9), _NUMBER]
PositiveInt = Annotated[int, Field(ge=1, le=10**9), _NUMBER]
Steps = Annotated[int, Field(ge=1, le=10**5), _NUMBER]  # type of a sampler's num_steps
FiniteFloat = Annotated[float, Field(allow_inf_nan=False), _NUMBER]
PositiveFloat = Annotated[float, Field(gt=0, lt=math.inf), _NUMBER]
NonNegativeFloat = Annotated[float, Field(ge=0, lt=math.inf), _NUMBER]


def matching(pattern: str, words: str) -> AfterValidator:
    """Return a validator for text that matches `pattern` completely. Its error message describes the pattern in `words`."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r:.100} is not {words}")
        return text

    return AfterValidator(check)


Text = Annotated[str, Field(min_length=1)]
Colour = Annotated[str, AfterValidator(_colour)]  # for example white, #ffffff or rgb(255, 255, 255)
AutoencoderSpec = Annotated[
    str, matching("identity|none|(sd-vae|va-vae):.+", "identity, none, sd-vae:<hub id or folder> or va-vae:<file or folder>")
]
