"""What a setting may be: types that pydantic checks, and the decorator of objects that are settings."""

from __future__ import annotations

import functools
import math
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

# A dataclass that nobody writes to. An unknown field, and a value of another type or beyond its bounds, are ValueErrors.
settings = functools.partial(dataclass, frozen=True, config=ConfigDict(extra="forbid", defer_build=True))

# Upper bounds far above all that is sensible: a slip of the keyboard is an error, not a hang.
Whole = Annotated[int, Field(ge=0, le=10**9)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Steps = Annotated[int, Field(ge=1, le=10**5)]  # of a sampler
Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, lt=math.inf)]
NotNegative = Annotated[float, Field(ge=0, lt=math.inf)]
Text = Annotated[str, Field(min_length=1)]
AutoencoderSpec = Annotated[str, Field(pattern=r"^(identity|none|(sd-vae|va-vae):.+)$")]
