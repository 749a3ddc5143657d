"""Parse detector names without importing torch, so that the configuration can validate them quickly."""

from __future__ import annotations

import re


def small_set(detector: str) -> str | None:
    """Return the data set in the name of a small-image detector (small-fashion -> fashion), or None for other detectors."""
    found = re.fullmatch(r"small-(?!digits$|dinov2$)([a-z][a-z0-9_]*)", detector)  # digits and dinov2 are other detectors
    return found and found[1]
