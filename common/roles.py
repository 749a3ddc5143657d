"""Roles say which commands compare a train.py key: a resume, init_from, guidance.checkpoint or the report.

A key declares its role in its type, as in `lr: Logged[PositiveFloat]`. A key without a role has the role of its group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

T = TypeVar("T")
# `resume`, `init_state=...` and `guidance.checkpoint` refuse a checkpoint with another value. `resume=auto` means that a resume
# refuses another value, except with resume=changed. `report` means that runs with different values are different experiments.
Use = Literal["resume", "resume=auto", "init_state=weights", "init_state=all", "guidance.checkpoint", "report"]


@dataclass(frozen=True)
class Role:
    """The uses that compare the values of a key."""

    compared_by: tuple[Use, ...]


SameLatents = Annotated[T, Role(("resume", "init_state=weights", "init_state=all", "guidance.checkpoint", "report"))]
SameClasses = Annotated[T, Role(("resume", "init_state=all", "guidance.checkpoint", "report"))]  # else a new label table
SameWeights = Annotated[T, Role(("resume", "init_state=weights", "init_state=all", "report"))]
SameState = Annotated[T, Role(("resume", "init_state=all", "report"))]  # must be equal to continue the optimizer
SameAverages = Annotated[T, Role(("resume", "init_state=all"))]  # must be equal to continue the tracked EMAs
SameSeed = Annotated[T, Role(("resume",))]  # the report averages over runs with different values
SameRun = Annotated[T, Role(("resume", "report"))]
Logged = Annotated[T, Role(("resume=auto", "report"))]
Reported = Annotated[T, Role(("report",))]  # may change on a resume without a message
Free = Annotated[T, Role(())]  # paths, logging and speed


def roles_of(settings: object, group: str = "", role: Role | None = None) -> dict[str, Role]:
    """Map the dotted keys of settings, and of the groups in it, to their roles. Raises TypeError for a key without a role."""
    roles = {}
    for name, field in type(settings).__pydantic_fields__.items():
        key, value = f"{group}{name}", getattr(settings, name)
        own = next((part for part in field.metadata if isinstance(part, Role)), role)
        if hasattr(type(value), "__pydantic_fields__"):
            roles |= roles_of(value, f"{key}.", own)
        elif own is None:
            raise TypeError(f"{key} has no role: give its type one in {type(settings).__module__}, as in Free[...]")
        if own is not None:
            roles[key] = own
    return roles
