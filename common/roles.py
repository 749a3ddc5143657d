"""Roles say what a run, another run that starts from it, and the report do if the value of a train.py key changes.

A key declares its role in its type, as in `lr: ChangesWeights[PositiveFloat]`. A key without a role has the role of its group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")
Answer = Literal["refuses", "accepts"]


@dataclass(frozen=True)
class Role:
    """What each use of a key does with another value."""

    resume: Literal["refuses", "asks", "accepts"]  # asks: only resume=changed accepts another value
    init_weights: Answer  # a run with init_from and init_state=weights
    init_all: Answer  # a run with init_from and init_state=all
    guidance: Answer  # guidance by the network of another run (guidance.checkpoint)
    report: Literal["separates", "ignores"]  # separates: runs with different values are different experiments


# fmt: off
#                                  resume     init_weights init_all   guidance   report           another value means
SameLatents    = Annotated[T, Role("refuses", "refuses",   "refuses", "refuses", "separates")]  # other latents or noise levels
SameClasses    = Annotated[T, Role("refuses", "accepts",   "refuses", "refuses", "separates")]  # another label table
SameWeights    = Annotated[T, Role("refuses", "refuses",   "refuses", "accepts", "separates")]  # other weights or their meaning
SameState      = Annotated[T, Role("refuses", "accepts",   "refuses", "accepts", "separates")]  # other state besides the weights
SameRun        = Annotated[T, Role("refuses", "accepts",   "accepts", "accepts", "separates")]  # another run
ChangesWeights = Annotated[T, Role("asks",    "accepts",   "accepts", "accepts", "separates")]  # other weights from this step on
ChangesReport  = Annotated[T, Role("accepts", "accepts",   "accepts", "accepts", "separates")]  # other figures or number of steps
ChangesNothing = Annotated[T, Role("accepts", "accepts",   "accepts", "accepts", "ignores")]    # the same weights
# fmt: on


def roles_of(settings: Any, group: str = "", role: Role | None = None) -> dict[str, Role]:
    """Map the dotted keys of settings, and of the groups in it, to their roles. Raises TypeError for a key without a role."""
    roles = {}
    for name, field in type(settings).__pydantic_fields__.items():
        key = f"{group}{name}"
        value = getattr(settings, name)
        key_role = next((part for part in field.metadata if isinstance(part, Role)), role)
        if hasattr(type(value), "__pydantic_fields__"):
            roles |= roles_of(value, f"{key}.", key_role)
        elif key_role is None:
            raise TypeError(f"{key} has no role: give its type one in {type(settings).__module__}, as in ChangesNothing[...]")
        if key_role is not None:
            roles[key] = key_role
    return roles
