"""Roles say what a run, another run that starts from it, and the report do if the value of a train.py key changes.

A key declares its role in its type, as in `lr: Trained[PositiveFloat]`. A key without a role has the role of its group.

    role         another value means                resume     init_state=weights  init_state=all  guidance.checkpoint  report
    SameLatents  other latents or noise levels      refuses    refuses             refuses         refuses              separates
    SameClasses  another label table                refuses    accepts             refuses         refuses              separates
    SameWeights  weights of other shapes            refuses    refuses             refuses         accepts              separates
    SameState    other state besides the weights    refuses    accepts             refuses         accepts              separates
    SameRun      another run                        refuses    accepts             accepts         accepts              separates
    Trained      other weights from this step on    asks       accepts             accepts         accepts              separates
    Reported     other figures of the same weights  accepts    accepts             accepts         accepts              separates
    Free         the same weights and figures       accepts    accepts             accepts         accepts              ignores

`asks`: only resume=changed accepts another value. `separates`: runs with different values are different experiments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

T = TypeVar("T")
# The columns of the table. `resume=auto` stands for `asks`: a resume refuses another value, except with resume=changed.
Use = Literal["resume", "resume=auto", "init_state=weights", "init_state=all", "guidance.checkpoint", "report"]


@dataclass(frozen=True)
class Role:
    """The uses that compare the values of a key."""

    compared_by: tuple[Use, ...]


SameLatents = Annotated[T, Role(("resume", "init_state=weights", "init_state=all", "guidance.checkpoint", "report"))]
SameClasses = Annotated[T, Role(("resume", "init_state=all", "guidance.checkpoint", "report"))]
SameWeights = Annotated[T, Role(("resume", "init_state=weights", "init_state=all", "report"))]
SameState = Annotated[T, Role(("resume", "init_state=all", "report"))]
SameRun = Annotated[T, Role(("resume", "report"))]
Trained = Annotated[T, Role(("resume=auto", "report"))]
Reported = Annotated[T, Role(("report",))]
Free = Annotated[T, Role(())]


def roles_of(settings: object, group: str = "", role: Role | None = None) -> dict[str, Role]:
    """Map the dotted keys of settings, and of the groups in it, to their roles. Raises TypeError for a key without a role."""
    roles = {}
    for name, field in type(settings).__pydantic_fields__.items():
        key, value = f"{group}{name}", getattr(settings, name)
        key_role = next((part for part in field.metadata if isinstance(part, Role)), role)
        if hasattr(type(value), "__pydantic_fields__"):
            roles |= roles_of(value, f"{key}.", key_role)
        elif key_role is None:
            raise TypeError(f"{key} has no role: give its type one in {type(settings).__module__}, as in Free[...]")
        if key_role is not None:
            roles[key] = key_role
    return roles
