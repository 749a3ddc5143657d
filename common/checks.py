"""The check of settings that are dataclasses: diffusions and their samplers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args, get_origin, get_type_hints

MAX_NUM_STEPS = 10**5  # of a sampler, far above all that is sensible: a slip of the keyboard is an error, not a hang


def check_settings(
    settings: object, *, positive: Sequence[str] = (), not_negative: Sequence[str] = (), **others: tuple[bool, str]
) -> None:
    """Check the fields of a dataclass: choices by their Literal annotations, and that every float is finite.

    Args:
        positive, not_negative: names of the floats that are above 0, and at least 0.
        others: checks instead of these, by the name of a field: whether its value is accepted, and what is.

    Raises:
        ValueError: naming the field, its value and what is accepted.
    """
    value = vars(settings)
    checks = {name: (math.isfinite(value[name]), "a finite number") for name in value if isinstance(value[name], float)}
    checks |= {name: (0 < value[name] < math.inf, "a finite number above 0") for name in positive}
    checks |= {name: (0 <= value[name] < math.inf, "a finite number, 0 or above") for name in not_negative}
    for name, annotation in get_type_hints(type(settings)).items():
        if get_origin(annotation) is Literal:
            checks[name] = value[name] in get_args(annotation), " | ".join(get_args(annotation))
    for name, (is_accepted, accepted) in (checks | others).items():
        if not is_accepted:
            raise ValueError(f"{name}={value[name]!r} is not accepted; use {accepted}")
