"""UserError, for mistakes of a user, and the conversion of parsers' errors to it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator


class UserError(ValueError):
    """A wrong setting, file or machine, with what helps in the message. Commands print it without a traceback and exit with 1."""


def first_line(error: Exception) -> str:
    """What an error of a library says first; its name where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn any error in the block into a UserError that names the file: damaged input can raise anything."""
    try:
        yield
    except UserError:
        raise
    except pickle.UnpicklingError as e:  # torch's message advises to run the code
        raise UserError(f"{what} cannot be read: it is damaged, or holds other objects than tensors and arrays") from e
    except Exception as e:
        name = "" if type(e) is ValueError else f"{type(e).__name__}: "
        raise UserError(f"{what} cannot be read: {name}{first_line(e)}") from e
