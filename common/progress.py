"""Progress bars and messages for terminals and for log files of batch jobs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TextIO

from tqdm import tqdm

LOG_EVERY_SEC = 30
SLOW_SEC = 2.0


def progress_bar(items: Iterable | None = None, **settings) -> tqdm:
    """tqdm on stderr. Where stderr is no terminal, a line every LOG_EVERY_SEC. `settings` are tqdm's (total, unit, desc, ...)."""
    settings = {"smoothing": 0.05, **settings}
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return tqdm(items, file=sys.stderr, dynamic_ncols=True, **settings)
    if not settings.get("leave", True):  # a short bar that disappears writes no line
        settings["delay"] = LOG_EVERY_SEC
    return tqdm(items, file=_Lines(sys.stderr), **settings | {"mininterval": LOG_EVERY_SEC, "maxinterval": LOG_EVERY_SEC})


class _Lines:
    """A stream for tqdm that writes every state of a bar as a line, without characters that move the cursor."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> None:
        text = text.strip()
        if text and not text.startswith("\x1b"):
            with contextlib.suppress(OSError):  # a run does not end because nobody reads its progress (`| head`)
                self._stream.write(f"{text}\n")
                self._stream.flush()

    def flush(self) -> None:
        pass


class LogHandler(logging.StreamHandler):
    """Writes messages to stderr, above the progress bars of a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(file=self.stream):
            super().emit(record)


@contextlib.contextmanager
def say_if_slow(log: logging.Logger, message: str, *args: object) -> Iterator[None]:
    """Log `message` once the block has taken SLOW_SEC."""
    timer = threading.Timer(SLOW_SEC, log.info, (message, *args))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def log_to_stderr() -> None:
    """Messages of the main process, and errors of the others. `start_accelerator` does it; a command may earlier."""
    level = logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR
    logging.basicConfig(format="%(message)s", level=level, handlers=[LogHandler()])
