"""Define UserError, the exception for problems that a user can solve, and convert other errors to UserError."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence


class UserError(ValueError):
    """A problem with a setting, file or machine that the user can solve. Commands print only the message and exit with code 1.

    Every function that gets a setting or reads or writes a file may raise it, and the message names the key or the file.
    Docstrings mention it only for conditions that their first lines do not imply. As a ValueError, it can also be raised in a
    validator of pydantic, whose own error `configs.settings.validate` unwraps.
    """


class Diverged(UserError):
    """The loss, the weights or the outputs of a network are no longer finite, or the loss is too large."""


class Unreadable(UserError):
    """A disk or a file system does not give a file's content now. The file may be intact."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class name if the message is empty."""
    return (str(error) or type(error).__name__).splitlines()[0]


def list_problems(problems: Sequence[str], remedy: str) -> str:
    """Return an error message for one or more problems. The message shows at most 20. `remedy` contains {} for `it`."""
    if len(problems) == 1:
        return f"{problems[0]}; {remedy.format('it')}"
    more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
    return "\n- ".join([f"{len(problems)} problems; {remedy.format('them')}:", *problems[:20], *more])


@contextlib.contextmanager
def prefix_errors(key: str) -> Iterator[None]:
    """Prefix the message of a UserError in the `with` block with the key whose value caused it."""
    try:
        yield
    except UserError as e:
        raise UserError(f"{key}: {e}") from e


@contextlib.contextmanager
def as_user_error(source: object) -> Iterator[None]:
    """Convert any error in the `with` block to a UserError that names `source`, because damaged files can raise any exception.

    An error of the operating system becomes `Unreadable`.
    """
    try:
        yield
    except UserError:
        raise
    except pickle.UnpicklingError as e:  # torch's own message suggests executing code from the file
        raise UserError(f"{source} cannot be read: it is damaged, or holds objects other than tensors and arrays") from e
    except Exception as e:
        name = "" if type(e) is ValueError else f"{type(e).__name__}: "
        is_from_system = isinstance(e, OSError) and e.errno is not None  # Pillow raises OSError for damaged images
        raise (Unreadable if is_from_system else UserError)(f"{source} cannot be read: {name}{first_line(e)}") from e
