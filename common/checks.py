"""The check of settings that are dataclasses: diffusions and their samplers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args, get_origin, get_type_hints

MAX_NUM_STEPS = 10**5  # of a sampler, far above all that is sensible: a slip of the keyboard is an error, not a hang


def check_settings(
    settings: object,
    *,
    finite: Sequence[str] = (),
    positive: Sequence[str] = (),
    not_negative: Sequence[str] = (),
    **others: tuple[bool, str],
) -> None:
    """Check the fields of a dataclass: those with a Literal annotation by their choices, others as the caller says.

    Args:
        finite, positive, not_negative: names of fields that are finite numbers; positive is above 0, not_negative at least 0.
        others: by the name of a field, whether its value is accepted, and what is.

    Raises:
        ValueError: naming the field, its value and what is accepted.
    """
    value = vars(settings)
    checks = [(name, math.isfinite(value[name]), "a finite number") for name in finite]
    checks += [(name, 0 < value[name] < math.inf, "a finite number above 0") for name in positive]
    checks += [(name, 0 <= value[name] < math.inf, "a finite number, 0 or above") for name in not_negative]
    for name, annotation in get_type_hints(type(settings)).items():
        if get_origin(annotation) is Literal:
            choices = get_args(annotation)
            checks.append((name, value[name] in choices, " | ".join(choices)))
    for name, is_accepted, accepted in checks + [(name, *check) for name, check in others.items()]:
        if not is_accepted:
            raise ValueError(f"{name}={value[name]!r} is not accepted; use {accepted}")
