"""Progress bars that read well in a terminal and in the log file of a batch job."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tqdm import tqdm

LOG_EVERY_SEC = 30


def progress_bar(items: Iterable | None = None, **settings) -> tqdm:
    """tqdm on stderr. Where stderr is no terminal, a line every LOG_EVERY_SEC. `settings` are tqdm's (total, unit, desc, ...)."""
    in_terminal = sys.stderr.isatty()
    every = {} if in_terminal else {"mininterval": LOG_EVERY_SEC, "maxinterval": LOG_EVERY_SEC}
    return tqdm(items, file=sys.stderr, dynamic_ncols=in_terminal, smoothing=0.05, **every, **settings)
