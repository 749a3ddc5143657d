"""UserError, the exception for problems that a user can solve, and the conversion of other errors into it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator


class UserError(ValueError):
    """A problem that the user can solve: a setting, a file, the machine. Commands print only its message and exit with 1."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class name if the message is empty."""
    return (str(error) or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def reading(source: object) -> Iterator[None]:
    """Turn any error in the block into a UserError that names the source: damaged files can raise anything."""
    try:
        yield
    except UserError:
        raise
    except pickle.UnpicklingError as e:  # torch's message suggests running the file's code
        raise UserError(f"{source} cannot be read: it is damaged, or holds objects other than tensors and arrays") from e
    except Exception as e:
        name = "" if type(e) is ValueError else f"{type(e).__name__}: "
        raise UserError(f"{source} cannot be read: {name}{first_line(e)}") from e
