"""Show progress bars and log messages in terminals and in the log files of batch jobs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator

from tqdm import tqdm

LOG_EVERY_SEC = 30
SLOW_SEC = 2.0


def progress_bar(items: Iterable | None = None, **kwargs) -> tqdm:
    """Show a tqdm bar on stderr, or print a line every LOG_EVERY_SEC if stderr is not a terminal. tqdm receives `kwargs`."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return tqdm(items, file=sys.stderr, dynamic_ncols=True, smoothing=0.05, **kwargs)
    if not kwargs.get("leave", True):  # a short bar that would disappear prints no line
        kwargs["delay"] = LOG_EVERY_SEC
    return tqdm(items, file=_Lines(), smoothing=0.05, **kwargs | {"mininterval": LOG_EVERY_SEC, "maxinterval": LOG_EVERY_SEC})


class _Lines:
    """A file object for tqdm that prints each bar update to stderr as a separate line without control characters."""

    def write(self, text: str) -> None:
        if (text := text.strip()) and not text.startswith("\x1b"):
            with contextlib.suppress(OSError):  # the run continues if stderr is closed (`| head`)
                sys.stderr.write(f"{text}\n")
                sys.stderr.flush()


class LogHandler(logging.StreamHandler):
    """Write log messages to stderr. In a terminal, the messages appear above active progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


@contextlib.contextmanager
def log_if_slow(
    log: logging.Logger, message: str, *args: object, after_sec: float | None = None, log_level: int = logging.INFO
) -> Iterator[None]:
    """Log `message` if the `with` block takes longer than `after_sec`, by default SLOW_SEC."""
    timer = threading.Timer(SLOW_SEC if after_sec is None else after_sec, log.log, (log_level, message, *args))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def log_to_stderr() -> None:
    """Log all messages from the main process and errors from other processes to stderr. A second call has no effect."""
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR
    logging.basicConfig(format="%(message)s", level=level, handlers=[LogHandler()])
    # torch sets this level at the end of its import. After Ctrl-C before that, it would log its statistics at exit.
    logging.getLogger("torch").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # Optuna's import would log the names of its plugins
