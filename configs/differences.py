"""Compare two configurations key by key."""

from __future__ import annotations

from typing import Any, NamedTuple

from common.roles import roles_of
from configs.schema import TrainConfig
from configs.settings import Settings, flatten


class Change(NamedTuple):
    """A key with its values in two configurations."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r:.100} -> {self.new!r:.100}"


def differences(stored: Settings | dict, current: Settings | dict) -> list[Change]:
    """Return every change from `stored` to `current`. A value that one of them lacks is 'absent'."""
    old, new = (flatten(side.model_dump() if isinstance(side, Settings) else side) for side in (stored, current))
    return [
        Change(key, old.get(key, "absent"), new.get(key, "absent"))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def differences_by_role(use: str, answer: str, stored: TrainConfig, current: TrainConfig) -> list[Change]:
    """Return the `differences` of two training configurations in the keys whose role has this `answer` for `use`."""
    roles = roles_of(stored) | roles_of(current)
    return [change for change in differences(stored, current) if getattr(roles[change.key], use) == answer]
