"""Stop a loop over batches early, after a signal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """Raised when a signal stops training, sampling or an evaluation early."""


def until_stopped(batches: Iterable[T], stop: Callable[[], bool]) -> Iterator[T]:
    """Yield the batches, calling `stop` before each batch. Raises Interrupted if `stop` returns True."""
    for batch in batches:
        if stop():
            raise Interrupted
        yield batch
