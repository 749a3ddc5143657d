"""The error that a user can cause."""

from __future__ import annotations


class UserError(ValueError):
    """A wrong setting, file or machine: the message names the key or the file, the value, and what helps.

    Commands print it as one line and exit with 1. Every other exception keeps its traceback.

    Args:
        lines: the message; more than one where a command lists what it found.
    """

    def __init__(self, *lines: str):
        super().__init__("\n".join(lines))


def first_line(error: Exception) -> str:
    """What an error of a library says first; its name where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]
