"""Names of detectors, which the configuration checks without importing torch."""

from __future__ import annotations

import re


def small_set(detector: str) -> str | None:
    """The data set that the name of a detector for small images holds: small-fashion -> fashion. None for other detectors."""
    found = re.fullmatch(r"small-(?!digits$|dinov2$)([a-z][a-z0-9_]*)", detector)  # fd_digits and fd_dinov2 exist
    return found and found[1]
