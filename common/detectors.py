"""Names of detectors, which the configuration checks without importing torch."""

from __future__ import annotations

import re


def small_set(detector: str) -> str | None:
    """Extract the data set from the name of a small-image detector: small-fashion -> fashion. None for other detectors."""
    found = re.fullmatch(r"small-(?!digits$|dinov2$)([a-z][a-z0-9_]*)", detector)  # fd_digits and fd_dinov2 exist
    return found and found[1]
