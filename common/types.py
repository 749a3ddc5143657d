"""Types of settings, which pydantic checks, and the decorator for objects that hold settings."""

from __future__ import annotations

import functools
import math
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

# A frozen dataclass. Unknown fields, and values with a wrong type or outside their bounds, raise ValueError.
settings = functools.partial(dataclass, frozen=True, config=ConfigDict(extra="forbid", defer_build=True))


def _colour(name: str) -> str:
    from PIL import ImageColor

    if len(ImageColor.getrgb(name)) != 3:  # raises ValueError for an unknown name
        raise ValueError(f"{name!r} is transparent")
    return name


def _number(value: object) -> object:
    """Refuse true and false, which Python counts as 1 and 0. Accept integers that are written as floats, such as 1e3."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


_NUMBER = BeforeValidator(_number)
# The upper bounds are far above all sensible values, so that a typing error raises instead of running forever.
Whole = Annotated[int, Field(ge=0, le=10**9), _NUMBER]
Count = Annotated[int, Field(ge=1, le=10**9), _NUMBER]
Steps = Annotated[int, Field(ge=1, le=10**5), _NUMBER]  # a sampler's num_steps
Number = Annotated[float, Field(allow_inf_nan=False), _NUMBER]
Positive = Annotated[float, Field(gt=0, lt=math.inf), _NUMBER]
NotNegative = Annotated[float, Field(ge=0, lt=math.inf), _NUMBER]
Text = Annotated[str, Field(min_length=1)]
Colour = Annotated[str, AfterValidator(_colour)]  # white, #ffffff, rgb(255, 255, 255), ...
AutoencoderSpec = Annotated[str, Field(pattern=r"^(identity|none|(sd-vae|va-vae):.+)$")]
