"""Get the errors of a command out of Hydra, which would print them itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hydra.core.utils import JobRuntime, env_override

from configs.guard import FULL_ERRORS, wants_tracebacks


@contextlib.contextmanager
def raise_errors() -> Iterator[None]:
    """Let Hydra raise errors in the `with` block.

    Hydra prints an error itself and exits, unless HYDRA_FULL_ERROR=1. It offers no other way to get the error. The jobs need the
    value that the user set, for their logs. Every launcher copies Hydra's JobRuntime to its processes.
    """
    JobRuntime.instance().set(FULL_ERRORS, wants_tracebacks())
    with env_override({FULL_ERRORS: "1"}):
        yield
